# SPDX-License-Identifier: Apache-2.0

"""Real processes on a Nova that lacks something, or that is not known."""

import json
import os
import signal
import subprocess
import sys
from unittest import mock

import fixtures
from nova.db.api import models as api_models
from nova.db.main import models as main_models
from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import encryption
from blazar_nova.cmd import listener
from blazar_nova.compat.seams import check
from tests import imports as code
from tests import samples
from tests.unit import base

CONF = """\
[DEFAULT]
transport_url = fake:/
state_path = {folder}
[api_database]
connection = sqlite:///{folder}/api
[database]
connection = sqlite:///{folder}/main
[blazar]
allow_untested_nova = {allow}
"""
BIN = os.path.dirname(sys.executable)
#: The commands of operators; of nova-api the import that is tested here.
PROCESSES = {
    'nova-api': [sys.executable, '-c', 'import nova.wsgi.osapi_compute'],
    'nova-scheduler': [f'{BIN}/nova-scheduler'],
    'blazar-listener': [
        sys.executable, '-c',
        'import sys; from blazar_nova.cmd import listener as it;'
        'sys.exit(it.main())'],
    'blazar-nova-manage': [
        sys.executable, '-c',
        'import sys; from blazar_nova.cmd import manage as it;'
        'sys.exit(it.main())'],
    'blazar-nova-status': [sys.executable, '-m', 'blazar_nova.cmd.status'],
}


class RefusalTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        # Databases that nova-api and nova-scheduler need before they load us.
        for name, models in (('api', api_models), ('main', main_models)):
            engine = sa.create_engine(f'sqlite:///{self.folder}/{name}')
            models.BASE.metadata.create_all(engine)
            engine.dispose()
        with open(os.path.join(self.folder, 'api-paste.ini'), 'w') as file:
            file.write(samples.with_leases(
                samples.nova_paste()))
        self.configure()

    def configure(self, allow=False):
        with open(os.path.join(self.folder, 'nova.conf'), 'w') as file:
            file.write(CONF.format(folder=self.folder, allow=allow))
            file.write(samples.nova_conf(
                f'sqlite:///{self.folder}/blazar', encryption.new_key()))

    def start(self, name, *words, **environ):
        """Run a process to its end; return its code and its output."""
        command = [*PROCESSES[name], *([] if name == 'nova-api' else [
            '--config-file', f'{self.folder}/nova.conf']), *words]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, cwd=code.ROOT, env={
                **os.environ, **environ, 'OS_NOVA_CONFIG_DIR': self.folder,
                'PYTHONPATH': os.pathsep.join(
                    [f'{code.ROOT}/tests/without', code.ROOT])})
        return done.returncode, done.stdout

    def check_refused(self, process, without, name, *words):
        found, said = self.start(process, *words, WITHOUT=without)
        self.assertEqual(1, found, said)
        self.assertIn('Leases cannot run with this Nova: '
                      f'{name}', said)
        self.assertIn('is installed; this version is for Nova 33.0 and '
                      '34.0.', said)
        return said

    def assert_no_more(self, said):
        """Check for the message; Nova 33 warns of threads before it."""
        self.assertTrue(said.splitlines()[-1].startswith(
            'Leases cannot run'), said)
        self.assertNotIn('Traceback', said)

    def test_nova_api_refuses_to_load(self):
        self.check_refused(
            'nova-api', 'nova.compute.api:API.lock',
            'nova.compute.api.API.lock(self, context, instance, reason=) is '
            'missing (RESERVED in the API: lock a reserved server).')

    def test_nova_scheduler_refuses_to_start(self):
        self.check_refused(
            'nova-scheduler', 'nova.scheduler.utils:request_is_rebuild',
            'nova.scheduler.utils.request_is_rebuild(spec_obj) is missing '
            '(scheduler: let rebuilds through).')

    def test_blazar_listener_refuses_to_start(self):
        said = self.check_refused(
            'blazar-listener', 'nova.conductor.rpcapi:RPC_TOPIC',
            'nova.conductor.rpcapi.RPC_TOPIC is missing (process and '
            'messages: ping nova-conductor).')
        self.assert_no_more(said)

    def test_blazar_nova_manage_refuses_to_run(self):
        said = self.check_refused(
            'blazar-nova-manage', 'nova.objects.flavor:Flavor.add_access',
            'nova.objects.Flavor.add_access(self, project_id) is missing '
            '(flavors and binding: the project of a reservation).',
            'host', 'list')
        self.assert_no_more(said)

    def test_blazar_nova_status_reports_missing_function(self):
        found, said = self.start(
            'blazar-nova-status', 'upgrade', 'check', '--json',
            WITHOUT='nova.monkey_patch:patch')
        self.assertEqual(2, found, said)
        nova, = json.loads(said)['checks']
        self.assertEqual(('Nova', 2), (nova['check'], nova['result']))
        self.assertIn('nova.monkey_patch.patch(backend=) is missing',
                      nova['details'])

    def test_untested_release_is_refused_unless_allowed(self):
        # The table of the installed release is compared.
        unknown = check.installed().split('.')[0] + '.9.0'
        for process in ('nova-scheduler', 'blazar-listener'):
            found, said = self.start(process, NOVA_VERSION=unknown)
            self.assertEqual(1, found, said)
            self.assertIn(f'Nova {unknown} is installed, and this version is '
                          f'tested with Nova 33.0 and 34.0', said, process)
            self.assertIn('Write in nova.conf [blazar]: allow_untested_nova '
                          '= True', said, process)
        self.configure(allow=True)
        found, said = self.start('blazar-listener', NOVA_VERSION=unknown)
        # The next missing part is reported.
        self.assertEqual(1, found, said)
        self.assertIn('Run: blazar-nova-manage db sync', said)
        self.assertNotIn(unknown, said)

    def check_file(self, wrong, code_, name, *words):
        """Check that a wrong configuration file is named in one line."""
        found, said = self.start(name, *words, '--config-file', wrong)
        self.assertEqual(code_, found, said)
        self.assertIn(wrong, said.splitlines()[-1])
        self.assertNotIn('Traceback', said)

    def test_missing_configuration_file_is_named(self):
        missing = os.path.join(self.folder, 'missing.conf')
        self.check_file(missing, 1, 'blazar-listener')
        self.check_file(missing, 1, 'blazar-nova-manage', 'health')
        self.check_file(missing, 1, 'blazar-nova-manage', 'db', 'version')
        self.check_file(missing, 2, 'blazar-nova-status', 'upgrade', 'check')

    def test_configuration_file_with_errors_is_named(self):
        wrong = os.path.join(self.folder, 'wrong.conf')
        with open(wrong, 'w') as file:
            file.write('no option')
        self.check_file(wrong, 1, 'blazar-listener')


class TestListener(base.TestCase):

    def test_start_without_its_port_is_refused(self):
        self.check_refused(
            errors.ConfigurationError('[blazar] metrics_port ...'))

    def test_wrong_value_is_refused(self):
        self.check_refused(cfg.ConfigFileValueError('sync_interval ...'))

    def check_refused(self, wrong):
        daemon = mock.Mock(**{'start.side_effect': wrong})
        self.useFixture(fixtures.MockPatchObject(
            listener, '_listener', return_value=daemon))
        self.useFixture(fixtures.MockPatchObject(signal, 'signal'))
        output = self.useFixture(fixtures.StringStream('stderr')).stream
        self.useFixture(fixtures.MonkeyPatch('sys.stderr', output))
        self.assertEqual(1, listener.main())
        output.seek(0)
        self.assertEqual(f'{wrong}\n', output.read())


class TestImportOrder(base.TestCase):

    def test_modules_loaded_by_nova_import_the_check_first(self):
        """Otherwise another import may fail, without a message."""
        for path in ('api/app.py', 'api/rest.py', 'scheduler/filters.py',
                     'scheduler/weights.py'):
            first = next(name for name in code.imports(f'blazar_nova/{path}')
                         if name.startswith('blazar_nova.'))
            self.assertEqual('blazar_nova.compat.require_seams', first, path)
