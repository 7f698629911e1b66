# SPDX-License-Identifier: Apache-2.0

"""How the release notes are built: tox -e releasenotes."""

extensions = [
    'openstackdocstheme',
    'reno.sphinxext',
]

project = 'nova-leases release notes'
copyright = 'OpenStack contributors'

openstackdocs_repo_name = 'openstack/nova-leases'
openstackdocs_auto_name = False
openstackdocs_auto_version = False
version = release = ''

html_theme = 'openstackdocs'
pygments_style = 'native'
