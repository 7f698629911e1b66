# SPDX-License-Identifier: Apache-2.0

"""The project and Blazar's own packages in one environment.

During a migration from Blazar, machines have both. The environment consists
of a wheel of this tree and of pinned releases of Blazar's packages.
"""

import collections
import itertools
import json
import os

import testtools

from tests.packaging import environment

OURS = environment.OURS
THEIRS = ('blazar', 'blazar-nova', 'blazar-dashboard', 'python-blazarclient')

#: Modules of either that a process of Nova loads. Blazar's services are not
#: among them: they cannot share a process with Nova (both have an option
#: `host`).
IN_NOVA = {
    OURS: ('blazar_nova.api.app', 'blazar_nova.api.rest',
           'blazar_nova.scheduler.filters', 'blazar_nova.scheduler.weights'),
    'blazar-nova': ('blazarnova.scheduler.filters.blazar_filter',),
}
#: The commands select native threads first.
COMMANDS = ('blazar_nova.cmd.listener', 'blazar_nova.cmd.manage')
#: Modules of either that a process without Nova may load.
WITHOUT_NOVA = {
    OURS: ('blazar_core.leases.leases', 'blazar_core.lifecycle.handlers',
           'blazar_nova.compat.nova_conf', 'blazar_nova.osc.plugin',
           'blazar_nova.osc.commands'),
    'blazar': ('blazar.opts', 'blazar.manager.service',
               'blazar.api.v1.leases.v1_0'),
    'python-blazarclient': ('blazarclient.osc.plugin', 'blazarclient.shell'),
}
#: The filters of one scheduler during the migration.
FILTERS = ('blazarnova.scheduler.filters.blazar_filter.BlazarFilter',
           'blazar_nova.scheduler.filters.LeaseFilter')

_ENTRY_POINTS = '''
import importlib.metadata, json
print(json.dumps([(one.name, entry.group, entry.name)
                  for one in importlib.metadata.distributions()
                  for entry in one.entry_points]))
'''
_FILES = '''
import importlib.metadata, json, sys
print(json.dumps({name: [str(path) for path in importlib.metadata.files(name)]
                  for name in sys.argv[1:]}))
'''
_LOAD_FILTERS = '''
import sys
from nova.scheduler import filters
from nova.conf import CONF
CONF([], project='nova', default_config_files=sys.argv[1:2])
handler = filters.HostFilterHandler()
for found in handler.get_matching_classes(sys.argv[2:]):
    print(found.__name__)
from blazar_nova.compat import pool
for name in ('aggregate_freepool_name', 'blazar_owner', 'blazar_az_prefix'):
    print(CONF.blazar_hosts[name])
'''


class BesideBlazarTest(testtools.TestCase):
    """One environment for all tests: it takes minutes to create."""

    def test_both_work_together_and_without_each_other(self):
        packages = self.useFixture(environment.Packages())
        both = self.useFixture(environment.Environment(
            packages.wheel, *THEIRS, 'python-openstackclient'))
        both.do('pip', 'check')
        self.check_names(both)
        self.check_files(both)
        for modules in (IN_NOVA, WITHOUT_NOVA):
            for order in itertools.permutations(modules.values()):
                both.imports(itertools.chain(*order))
        for command in COMMANDS:
            both.imports([command, *IN_NOVA['blazar-nova']])
        for order in itertools.permutations(FILTERS):
            self.check_filters(both, order)
        both.do('pip', 'uninstall', '--yes', 'blazar-nova', 'blazar')
        both.imports(IN_NOVA[OURS])
        self.check_status(both, 'blazar-nova-status')
        both.install('blazar', 'blazar-nova')
        both.imports(IN_NOVA[OURS])
        both.do('pip', 'uninstall', '--yes', OURS)
        both.imports(IN_NOVA['blazar-nova'])
        self.check_status(both, 'blazar-status')

    def check_status(self, both, name):
        """Check that a script runs."""
        self.assertIn(f'usage: {name}', both.do(name, '--help'))

    def check_names(self, both):
        """Check that names of scripts and entry points are unique."""
        owners = collections.defaultdict(set)
        for owner, group, name in json.loads(both.python(_ENTRY_POINTS)):
            owners[group, name].add(owner)
        ours = {key: names for key, names in owners.items()
                if names & {OURS, *THEIRS}}
        self.assertGreater(len(ours), 60)
        self.assertEqual({}, {key: names for key, names in ours.items()
                              if len(names) > 1})

    def check_files(self, both):
        """Check that no file belongs to two distributions."""
        files = json.loads(both.python(_FILES, OURS, *THEIRS))
        for one, other in itertools.combinations(files, 2):
            self.assertEqual(set(), set(files[one]) & set(files[other]))

    def check_filters(self, both, order):
        """Check that one scheduler has both filters, with the same options."""
        path = os.path.join(both.folder, 'nova.conf')
        with open(path, 'w') as file:
            file.write('[blazar:physical:host]\n'
                       'aggregate_freepool_name = pool\n'
                       'blazar_owner = owner\nblazar_az_prefix = zone_\n'
                       'allow_preemptibles = True\n')
        printed = both.python(_LOAD_FILTERS, path, *order).split()
        self.assertEqual({name.rpartition('.')[2] for name in order},
                         set(printed[:2]))
        self.assertEqual(['pool', 'owner', 'zone_'], printed[2:])
