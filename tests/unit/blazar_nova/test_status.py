# SPDX-License-Identifier: Apache-2.0

"""blazar-nova-status, in a process of its own, as an operator runs it."""

import json
import os
import subprocess
import sys

import fixtures

from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import migration
from blazar_core.db import models
from blazar_nova.services import settings
from tests import databases
from tests import samples
from tests.unit import base

#: Options that the sample nova.conf lacks.
MORE = """\
[DEFAULT]
transport_url = fake:/
[cinder]
auth_type = password
"""

#: A time after the end of all tests.
FAR = 2 ** 32
#: The parts of Nova's api-paste.ini that leases change.
_NOVA = """[composite:osapi_compute]
use = call:nova.api.openstack.urlmap:urlmap_factory
[app:osapi_compute_app_v21]
paste.app_factory = nova.api.openstack.compute:APIRouterV21.factory
"""


#: Runs the command on a machine whose clock is ahead.
_AHEAD = '''
import runpy, time
now = time.time
time.time = lambda: now() + 1001
runpy.run_module('blazar_nova.cmd.status', run_name='__main__',
                 alter_sys=True)
'''


class StatusTest(base.TestCase):

    start = ('-m', 'blazar_nova.cmd.status')

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        self.url = f'sqlite:///{self.folder}/leases.sqlite'

    def write(self, more='', conf=None,
              factory='blazar_nova.api.app:factory'):
        if conf is None:
            conf = MORE + samples.nova_conf(self.url, encryption.new_key())
        for name, text in (
                ('nova.conf', conf + more),
                ('api-paste.ini', samples.with_leases(_NOVA).replace(
                    'blazar_nova.api.app:factory', factory))):
            with open(os.path.join(self.folder, name), 'w') as file:
                file.write(text)

    def new_database(self):
        database = api.Database(databases.configuration(self.url))
        self.addCleanup(database.engine.dispose)
        migration.upgrade(database)
        return database

    @staticmethod
    def listen(database, worker, until):
        """Record a leader as a listener does during a sync."""
        with database.writer() as session:
            session.merge(models.TaskLeader(
                name='comparison', worker=worker, claimed_until=until,
                due_at=until))

    def type(self, *words):
        """Run the command; return its code and its output."""
        done = subprocess.run(
            [sys.executable, *self.start, '--config-file',
             os.path.join(self.folder, 'nova.conf'), 'upgrade', 'check',
             *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, 'OS_NOVA_CONFIG_DIR': self.folder})
        return done.returncode, done.stdout or done.stderr

    def results(self):
        code, text = self.type('--json')
        checks = {check['check']: (check['result'], check['details'])
                  for check in json.loads(text)['checks']}
        self.assertEqual(code, max(result for result, _details in
                                   checks.values()))
        return checks

    def test_where_everything_is_configured_all_checks_succeed(self):
        self.write()
        self.listen(self.new_database(), 'listener', FAR)
        results = self.results()
        # There is no keystone here, which is reported.
        code, details = results.pop('Keystone')
        self.assertEqual(1, code)
        self.assertIn('No service user is configured', details)
        self.assertEqual({(0, None)}, set(results.values()), results)
        self.assertEqual(16, len(results))

    def test_missing_configuration_is_reported_by_each_check(self):
        self.url = ''
        self.write(conf='[DEFAULT]\ntransport_url = fake:/\n',
                   factory='nova.api.openstack.compute:APIRouterV21.factory')
        results = self.results()
        for check, words in (
                ('Database', '[blazar_database] connection is not set. '),
                ('Encryption keys', 'encryption_keys = KEY'),
                ('Filter and weigher', 'enabled_filters = '),
                ('Notifications', 'notification_format = versioned'),
                ('api-paste.ini', 'paste.app_factory = '
                                  'blazar_nova.api.app:factory')):
            code, details = results.pop(check)
            self.assertEqual(2, code)
            self.assertIn(words, details)
        self.assertIn('connection is not set', results.pop('Clock')[1])
        self.assertEqual({'Nova': 0, 'Defaults of a lease': 0,
                          'Default reservation': 0, 'Lost builds': 0,
                          'Order of filters': 0, 'Keystone': 1,
                          'Volumes at the end': 1, 'blazar-listener': 1,
                          'Prefilters': 1, 'Enrolled hosts': 1,
                          'Policy': 0},
                         {check: code for check, (code, _details)
                          in results.items()})
        code, text = self.type()
        self.assertEqual(2, code)
        # To be copied, in one piece.
        self.assertIn('| weight_classes = nova.scheduler.weights.all_weighers,'
                      'blazar_nova.scheduler.weights.LeaseWeigher ', text)

    def test_unavailable_database_is_a_failure(self):
        """Services start without it; requests that need it are refused."""
        self.url = f'sqlite:///{self.folder}'
        self.write()
        code, details = self.results()['Database']
        self.assertEqual(2, code)
        self.assertIn('does not answer', details)
        self.assertIn('unable to open database file', details)

    def test_missing_schema_and_impossible_default_are_reported(self):
        self.write('[blazar]\ndefault_reservation = on\n'
                   'reservation_length_days = 366\n')
        results = self.results()
        self.assertIn('Run: blazar-nova-manage db sync',
                      results['Database'][1])
        code, details = results['Default reservation']
        self.assertEqual(2, code)
        self.assertIn('every boot would be refused', details)

    def test_wrong_clock_is_a_failure(self):
        """On a database with a clock of its own."""
        self.url = self.useFixture(databases.DatabaseFixture('mariadb')).url
        self.write()
        self.start = ('-c', _AHEAD)
        results = self.results()
        self.assertEqual((0, None), results['Database'])
        code, details = results['Clock']
        self.assertEqual(2, code)
        self.assertRegex(details, r'is\s+at least 100[01] s ahead')
        code, details = results['blazar-listener']
        self.assertEqual(1, code)
        self.assertIn('No blazar-listener has ever run on this database: '
                      'start one', details)

    def test_stopped_listener_is_a_warning(self):
        """Whether another one runs is not known yet."""
        self.write()
        self.listen(self.new_database(), None, FAR)
        code, details = self.results()['blazar-listener']
        self.assertEqual(1, code)
        self.assertIn('was stopped. Another one takes over by 2106-02-07 '
                      '06:28:16 UTC if it is running; otherwise start '
                      'one.', details)

    def test_late_events_exemptions_and_contradictions_are_reported(self):
        """Each start of the command takes seconds: test all of it at once."""
        self.write('[blazar]\n'
                   'default_reservation_exempt_project_ids = service\n'
                   '[scheduler]\n'
                   'enable_isolated_aggregate_filtering = False\n')
        database = self.new_database()
        with database.writer() as session:
            session.add(models.Lease(
                lease_type='immediate',
                id='lease', name='lease1', project_id='project',
                user_id='user', start_date=0, end_date=1, on_end='delete',
                status='ACTIVE', created_at=0, updated_at=0))
            session.add(models.Host(
                id=1, uuid='one', name='one', service_host='one', capacity={},
                usage={}, enrollment='enrolled', updated_at=0))
            session.flush()
            session.add(models.Event(
                id='event', lease_id='lease', event_type='end_lease', time=1,
                run_at=1, status='UNDONE', created_at=0, updated_at=0))
        self.listen(database, 'listener', 60)
        for process, value in (('nova-api', False), ('nova-scheduler', True)):
            settings.write(database, 0, process, {
                '[scheduler] image_metadata_prefilter': value})
        results = self.results()
        code, details = results['Default reservation']
        self.assertEqual(1, code)
        self.assertIn('no id of a project', details)
        code, details = results['blazar-listener']
        self.assertEqual(1, code)
        self.assertIn(
            '1 events of leases are overdue: start blazar-listener. The first '
            'event: Lease lease (lease1): its end_lease is due since '
            '1970-01-01 00:00:01 UTC', details)
        self.assertIn(
            'No blazar-listener has run the periodic sync, which was due by '
            '1970-01-01 00:01 UTC: start one', details)
        code, details = results['Enrolled hosts']
        self.assertEqual(2, code)
        self.assertIn('enable_isolated_aggregate_filtering = True', details)
        self.assertEqual((2, (
            '[scheduler] image_metadata_prefilter is False for nova-api, and '
            'True for nova-scheduler. These processes contradict each other: '
            'set the same value in the nova.conf of each of them, and restart '
            'them.')), results['Prefilters'])
