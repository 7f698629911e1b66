# SPDX-License-Identifier: Apache-2.0

"""How the documentation is built: tox -e docs."""

import os
import sys

sys.path.insert(0, os.path.abspath('../..'))
sys.path.insert(0, os.path.abspath('../ext'))

extensions = [
    'cliff.sphinxext',
    'lease_api',
    'nova_seams',
    'openstackdocstheme',
    'os_api_ref',
    'oslo_config.sphinxconfiggen',
    'oslo_config.sphinxext',
    'oslo_policy.sphinxext',
    'oslo_policy.sphinxpolicygen',
    'package_rooms',
    'program_help',
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

_SAMPLES = os.path.abspath('../../etc/nova-leases')
config_generator_config_file = [
    (os.path.join(_SAMPLES, 'config-generator.conf'), '_static/nova-leases')]
policy_generator_config_file = [
    (os.path.join(_SAMPLES, 'policy-generator.conf'), '_static/nova-leases')]
autoprogram_cliff_application = 'openstack'
# Those of each command that prints something.
autoprogram_cliff_ignored = [
    '--help', '--format', '--column', '--quote', '--noindent', '--max-width',
    '--fit-width', '--print-empty', '--prefix', '--sort-column',
    '--sort-ascending', '--sort-descending']
