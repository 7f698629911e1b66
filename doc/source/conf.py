# SPDX-License-Identifier: Apache-2.0

"""How the documentation is built: tox -e docs."""

import os
import sys

sys.path.insert(0, os.path.abspath('../..'))
sys.path.insert(0, os.path.abspath('../ext'))

extensions = [
    'nova_seams',
    'openstackdocstheme',
    'oslo_config.sphinxext',
    'package_rooms',
    'state_machine',
]

project = 'nova-leases'
copyright = 'OpenStack contributors'

openstackdocs_repo_name = 'openstack/nova-leases'
openstackdocs_auto_name = False
# There is no tag yet that a version could be read from.
openstackdocs_auto_version = False
version = release = ''

html_theme = 'openstackdocs'
pygments_style = 'native'
exclude_patterns = []
