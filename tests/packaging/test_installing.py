# SPDX-License-Identifier: Apache-2.0

"""The wheel and the source distribution, each in an empty environment."""

import json
import os

import testtools

from tests.packaging import environment

COMMANDS = ('blazar-listener', 'blazar-nova-manage', 'blazar-nova-status')
SAMPLES = ('api-paste.ini', 'nova.conf', 'nova_leases_horizon.py',
           'metadefs/compute-interruptible.json',
           'metadefs/compute-leases.json',
           'metadefs/compute-reserved-hosts.json')

#: Imports all modules except those of the client plug-in, which belong to an
#: extra, and the commands, which are loaded by their scripts.
_IMPORT_ALL = '''
import importlib, pkgutil
from nova import monkey_patch
monkey_patch.patch(backend='threading')
import blazar_core, blazar_nova
count = 0
for package in (blazar_core, blazar_nova):
    for found in pkgutil.walk_packages(package.__path__,
                                       package.__name__ + '.'):
        if not found.name.startswith('blazar_nova.osc') and (
                '.alembic.' not in found.name):
            importlib.import_module(found.name)
            count += 1
print(count)
'''
_DATA = '''
import importlib.metadata, json, pathlib, sys
import blazar_core, blazar_nova
files = importlib.metadata.files('nova-leases')
print(json.dumps({
    'packages': [str(pathlib.Path(package.__file__).parent)
                 for package in (blazar_core, blazar_nova)],
    'files': [str(path.locate().resolve()) for path in files],
    'prefix': sys.prefix}))
'''


class InstallingTest(testtools.TestCase):

    def test_install_from_wheel(self):
        self.check('wheel')

    def test_install_from_source_distribution(self):
        self.check('sdist')

    def check(self, kind):
        package = getattr(self.useFixture(environment.Packages()), kind)
        made = self.useFixture(environment.Environment(package))
        made.do('pip', 'check')
        self.assertGreater(int(made.python(_IMPORT_ALL)), 150)
        for name in COMMANDS:
            self.assertIn(f'usage: {name}', made.do(name, '--help'))
        # The migrations are included, and the command finds them.
        url = f'sqlite:///{made.folder}/leases.sqlite'
        conf = os.path.join(made.folder, 'nova.conf')
        with open(conf, 'w') as file:
            file.write(f'[blazar_database]\nconnection = {url}\n')
        made.do('blazar-nova-manage', '--config-file', conf, 'db', 'sync')
        self.check_files(json.loads(made.python(_DATA)))
        # The name of an extra follows the path of the package.
        made.install(f'{package}[osc]')
        made.imports(['blazar_nova.osc.plugin', 'blazar_nova.osc.commands'])

    def check_files(self, data):
        """Check that data files are installed, and no tests."""
        files = set(data['files'])
        folder = os.path.realpath(data['prefix'])
        for name in SAMPLES:
            self.assertIn(f'{folder}/etc/nova-leases/{name}', files)
        for package in data['packages']:
            self.assertTrue(package.startswith(folder + os.sep), package)
            self.assertIn(f'{os.path.realpath(package)}/py.typed', files)
        tops = {os.path.relpath(path, os.path.dirname(os.path.realpath(
            data['packages'][0]))).split(os.sep)[0] for path in files}
        self.assertEqual({'blazar_core', 'blazar_nova'}, {
            top for top in tops if top not in ('..',) and (
                not top.endswith('.dist-info'))})
