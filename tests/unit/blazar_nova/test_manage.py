# SPDX-License-Identifier: Apache-2.0

"""The command blazar-nova-manage, as an operator runs it."""

import contextlib
import io
import json
import os
import subprocess
import sys
import types
from unittest import mock

from cryptography import fernet
import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import migration
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import maintenance
from blazar_core.leases import accounting
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import orphans
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.cmd import forecast
from blazar_nova.cmd import listings
from blazar_nova.cmd import maintenance as maintain
from blazar_nova.cmd import manage
from blazar_nova.cmd import purge
from blazar_nova.cmd import usage
from blazar_nova.schemas import refused_demands
from blazar_nova.services import end_notices
from tests import databases
from tests import driven
from tests.unit import base


NOW = base.NOW


class Terminal(io.StringIO):

    def isatty(self):
        return True


class ManageTest(base.TestCase):

    now = NOW
    #: Additional lines of [blazar].
    more = ''

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        self.url = f'sqlite:///{self.folder}/leases.sqlite'
        self.keys = [encryption.new_key()]

    def test_closed_stdout_ends_command_without_message(self):
        """As ``head`` does."""
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, 'w') as closed:
            done = subprocess.run(
                [sys.executable, '-c', 'import sys; from blazar_nova.cmd '
                 'import manage; sys.exit(manage.main())', 'key', 'create'],
                stdout=closed, stderr=subprocess.PIPE, text=True)
        self.assertEqual((141, ''), (done.returncode, done.stderr))

    def test_config_file_may_precede_or_follow_the_command(self):
        path = self.configure()
        words, files = ('db', 'version'), ('--config-file', path)
        for typed in ((*files, *words), (*words, *files),
                      (*words, f'--config-file={path}'),
                      ('--config-file', '/dev/null', *words, *files)):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                self.assertEqual(0, manage.main(typed), typed)
            self.assertEqual('none\n', out.getvalue())

    def configure(self):
        path = os.path.join(self.folder, 'nova.conf')
        with open(path, 'w') as file:
            file.write(f'[blazar]\nencryption_keys = {",".join(self.keys)}\n'
                       f'{self.more}[blazar_database]\n'
                       f'connection = {self.url}\n')
        return path

    def manage(self, *words):
        """Run a command; return its exit code and its output."""
        path = self.configure()
        out, error = io.StringIO(), io.StringIO()
        with (contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(error)):
            code = manage.main(['--config-file', path, *words])
        return code, out.getvalue() + error.getvalue()

    def database(self):
        database = api.Database(databases.configuration(self.url))
        self.addCleanup(database.engine.dispose)
        return database

    def hold(self, database):
        """Create a lease with a deferred build, encrypted by the first key."""
        clock = driven.ManualClock(NOW)
        with database.writer() as session:
            session.add(models.Host(
                uuid='host', name='host', service_host='host',
                capacity={'VCPU': 1}, usage={}, generation=0,
                updated_at=NOW))
        request = requests.LeaseRequest(
            name='lease1', window=model.Window(NOW + 10, NOW + 20),
            before_end=None, events=(), on_end='delete', starts_now=False)
        return leases.Leases(
            database, clock, admissions.Admission(database, clock),
            resource_types.ResourceTypes({}, base.FakeType())).creation.create(
                new_leases.NewLease('project', 'user', request, (
                    new_leases.NewReservation(
                        model.Demand({'VCPU': 1}), ('server-1',)),)),
                encryption.Encryption(self.keys).encrypt('the call'))

    def test_db_sync_is_idempotent_and_prints_version(self):
        self.assertEqual((0, 'none\n'), self.manage('db', 'version'))
        for _time in range(2):
            code, text = self.manage('db', 'sync')
            self.assertEqual((0, f'The schema is at version '
                                 f'{migration.head()}.\n'), (code, text))
        self.assertEqual((0, migration.head() + '\n'),
                         self.manage('db', 'version'))

    def test_schema_commands_say_which_database_does_not_answer(self):
        self.url = 'mysql+pymysql://user:secret@127.0.0.1:1/leases'
        for verb in ('version', 'sync'):
            code, text = self.manage('db', verb)
            self.assertEqual(1, code)
            self.assertIn('[blazar_database] connection does not answer: ',
                          text)
            self.assertNotIn('secret', text)

    def test_interrupted_command_ends_without_traceback(self):
        self.manage('db', 'sync')
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.credentials.reencrypt',
            mock.Mock(side_effect=KeyboardInterrupt)))
        self.assertEqual(
            (130, 'The command was interrupted; it is safe to repeat it.\n'),
            self.manage('key', 'rotate'))

    def test_key_create_prints_a_new_fernet_key_each_time(self):
        code, key = self.manage('key', 'create')
        self.assertEqual(0, code)
        fernet.Fernet(key.strip())
        self.assertNotEqual((0, key), self.manage('key', 'create'))

    def test_after_a_rotation_the_old_key_is_not_needed(self):
        self.manage('db', 'sync')
        database = self.database()
        lease = self.hold(database)
        self.keys.insert(0, encryption.new_key())
        self.assertEqual(
            (0, '1 deferred builds and trusts are encrypted with the first '
                'key.\n'),
            self.manage('key', 'rotate'))
        with database.reader() as session:
            encrypted = session.get_one(models.DeferredBuild,
                                        lease['id']).encrypted
        self.assertEqual('the call', encryption.Encryption(
            self.keys[:1]).decrypt(encrypted))

    def test_rotation_without_old_key_fails_and_loses_nothing(self):
        self.manage('db', 'sync')
        database = self.database()
        lease = self.hold(database)
        old, self.keys = self.keys, [encryption.new_key()]
        code, text = self.manage('key', 'rotate')
        self.assertEqual(1, code)
        self.assertIn('add the key with which it was encrypted', text)
        with database.reader() as session:
            encrypted = session.get_one(models.DeferredBuild,
                                        lease['id']).encrypted
        self.assertEqual(
            'the call', encryption.Encryption(old).decrypt(encrypted))

    def test_listings_can_be_printed_as_json(self):
        self.manage('db', 'sync')
        lease = self.hold(self.database())
        (listed,) = self.json('lease', 'list')
        self.assertEqual(
            {'id': lease['id'], 'name': 'lease1', 'project_id': 'project',
             'status': 'PENDING', 'servers': ['server-1'],
             'start_date': clocks.iso(lease['start_date'])[:19],
             'end_date': clocks.iso(lease['end_date'])[:19],
             'status_reason': ''}, listed)
        self.assertEqual([], self.json('lease', 'announced'))
        found = self.json('health')
        self.assertEqual(([], [], {'leases_pending': 1}), (
            found['hosts'], found['leases'], self.counts(found)))
        host_status.HostStatus(self.database(), driven.ManualClock(NOW),
                               host_status.Thresholds(0, 0, 60), lambda event,
                               lease: None).update({'host': host_status.Down(
                                   'No power.', certain=True)})
        self.assertEqual(
            [{'name': 'host', 'status': 'failed', 'reason': 'No power.',
              'since': clocks.iso(NOW)[:19],
              'until': clocks.iso(NOW + 60)[:19]}],
            self.json('health')['hosts'])

    def counts(self, found):
        """Return the counts that are not zero."""
        return {row['name']: row['count'] for row in found['counts']
                if row['count']}

    def json(self, *words):
        code, text = self.manage(*words, '--format', 'json')
        self.assertEqual(0, code, text)
        return json.loads(text)

    def test_leases_are_listed_with_their_servers(self):
        self.manage('db', 'sync')
        lease = self.hold(self.database())
        code, text = self.manage('lease', 'list')
        self.assertEqual(0, code)
        for words in (lease['id'], 'lease1', 'project', 'PENDING',
                      'server-1', clocks.iso(lease['start_date'])[:19]):
            self.assertIn(words, text)

    def test_the_leases_of_one_host_are_listed(self):
        self.manage('db', 'sync')
        lease = self.hold(self.database())
        with self.database().writer() as session:
            session.add(models.Host(
                uuid='other', name='other', service_host='other', capacity={},
                usage={}, generation=0, updated_at=NOW))
        for host, found in ('host', [lease['id']]), ('other', []):
            self.assertEqual(found, [one['id'] for one in self.json(
                'lease', 'list', '--host', host)])
        self.assertEqual(
            (1, 'There is no host nowhere in the reservation database. Write '
                'the name of a hypervisor, or of its nova-compute.\n'),
            self.manage('lease', 'list', '--host', 'nowhere'))

    def test_ended_leases_are_listed_only_if_requested(self):
        self.manage('db', 'sync')
        lease = self.hold(self.database())
        with self.database().writer() as session:
            session.execute(sa.update(models.Lease).values(
                status='TERMINATED', deleted_at=NOW))
        self.assertEqual([], self.json('lease', 'list'))
        self.assertEqual([lease['id']], [
            one['id'] for one in self.json('lease', 'list', '--ended')])

    def test_usage_is_printed_as_csv_json_and_table(self):
        self.manage('db', 'sync')
        database = self.database()
        self.hold(database)
        with database.writer() as session:
            session.execute(sa.update(models.UsageRecord).values(
                project_id='=cmd();+cmd();x'))
        words = ('--start', '2027-01-15T08:00Z', '--end', '2027-01-15T09:00Z')
        code, text = self.manage('usage', *words, '--format', 'csv')
        self.assertEqual((0, [
            'start_date,end_date,project_id,resource_class,planned,reserved,'
            'used',
            # Some locales separate cells by semicolons.
            "2027-01-15T08:00:00,2027-01-15T09:00:00,'=cmd();'+cmd();x,VCPU,"
            '0.0028,0.0028,0.0']), (code, text.splitlines()))
        (row,) = self.json('usage', *words, '--seconds', '--group-by',
                           'lease,day', '--timezone', 'Asia/Tokyo')[:1]
        self.assertEqual((10, 10, 0), (
            row['planned'], row['reserved'], row['used']))
        self.assertIn('| Reserved |', self.manage('usage', *words)[1])

    def test_usage_has_costs_by_rates_file(self):
        self.manage('db', 'sync')
        self.hold(self.database())
        words = ('usage', '--start', '2027-01-15T08:00Z', '--end',
                 '2027-01-15T09:00Z', '--costs', '--format', 'csv')
        code, text = self.manage(*words)
        self.assertEqual((1, True), (code, 'Set [blazar] rates_file' in text))
        path = os.path.join(self.folder, 'rates.toml')
        self.more = f'rates_file = {path}\n'
        code, text = self.manage(*words)
        self.assertEqual((1, True), (code, 'cannot be used' in text), text)
        with open(path, 'w') as file:
            file.write('version = "=7"\ncurrency = "EUR"\n[rates.default]\n'
                       'flat = 2\nVCPU = {reserved = 36}\n')
        self.assertEqual((0, [
            'start_date,end_date,project_id,resource_class,planned,reserved,'
            'used,cost,currency,rates_version',
            "2027-01-15T08:00:00,2027-01-15T09:00:00,project,VCPU,0.0028,"
            "0.0028,0.0,0.100000,EUR,'=7",
            "2027-01-15T08:00:00,2027-01-15T09:00:00,project,flat,0.0,0.0,0.0,"
            "2.000000,EUR,'=7"]), (
                (found := self.manage(*words))[0], found[1].splitlines()))

    def test_interrupted_output_is_reported_as_incomplete(self):
        self.manage('db', 'sync')
        with self.database().writer() as session:
            for project in ('a', 'b'):
                session.add(models.UsageRecord(
                    lease_id=project, project_id=project, kind='planned',
                    reservation_id=project, resource_type='x', sign=1,
                    start_date=NOW, end_date=NOW + 60, resources={'VCPU': 1},
                    hosts=[1], recorded_at=NOW))
        words = ('usage', '--start', '2027-01-15T08:00Z', '--end',
                 '2027-01-15T09:00Z', '--format', 'csv')
        self.enterContext(mock.patch.object(
            usage.usage_schema, 'MAX_LIMIT', 1))
        code, text = self.manage(*words)
        self.assertEqual((0, 3), (code, len(text.splitlines())))
        totals = accounting.totals

        def unavailable(connection, query, *rest):
            if query.after:
                raise errors.DatabaseUnavailable
            return totals(connection, query, *rest)

        self.enterContext(mock.patch.object(
            accounting, 'totals', unavailable))
        code, text = self.manage(*words)
        self.assertEqual((1, 3), (code, len(text.splitlines())))
        self.assertIn('The output is incomplete', text.splitlines()[2])

    def test_forecast_of_days_refused_demands_and_hosts(self):
        self.manage('db', 'sync')
        database = self.database()
        self.hold(database)
        exc = errors.Refused(refusals.Refusal(
            refusals.Reason.NO_ROOM, 2, 0, None), (
                [model.Demand({'VCPU': 1}, 2)], model.Window(NOW, NOW + 60)))
        for project in ('=p', 'p'):
            refused_demands.count(database, exc, project, NOW)
        database.counters.flush()
        with mock.patch.object(forecast.clocks, 'SystemClock',
                               lambda: driven.ManualClock(NOW)):
            day, *others = self.json('forecast', '--days', '2')
        self.assertEqual({
            'start': '2027-01-15T08:00:00', 'resource_class': 'VCPU',
            'capacity': 1, 'without_lease': 0, 'reserved': 0.0, 'peak': 1,
            'peak_at': '2027-01-15T08:00:10', 'free': 0}, day)
        self.assertEqual(1, len(others))
        code, text = self.manage('forecast', '--refused', '--format', 'csv')
        self.assertEqual((0, [
            'day,project_id,reason,demand,start,end,tries',
            # No project has an id of this form.
            '2027-01-15,,no_room,,,,1',
            '2027-01-15,p,no_room,2 x VCPU 1,2027-01-15T08:00:00,'
            '2027-01-15T08:01:00,1']), (code, text.splitlines()))
        self.assertEqual([
            {'hosts': number, 'demands': 1, 'admitted': number // 2,
             'servers': number // 2 * 2} for number in range(3)],
            self.json('forecast', '--hosts', '2'))
        self.assertIn('| Least free |', self.manage('forecast')[1])

    def test_numbers_of_forecast_are_validated(self):
        for words, wanted in (
                (('--days', '0'), '--days: write a number from 1 to 366\n'),
                (('--days', '367'), '--days: write a number from 1 to 366\n'),
                (('--days', 'x'), "--days: invalid number value: 'x'\n"),
                (('--hosts', '-1'), '--hosts: write a number from 1 to 100\n'),
                (('--hosts', '101'), 'from 1 to 100\n'),
                (('--hosts', '1', '--refused'), 'not allowed with')):
            error = io.StringIO()
            with contextlib.redirect_stderr(error):
                self.assertEqual(2, self.assertRaises(
                    SystemExit, manage.main, ['forecast', *words]).code)
            self.assertIn(wanted, error.getvalue())

    def test_invalid_usage_query_is_reported(self):
        self.manage('db', 'sync')
        for words, said in (
                (('--group-by', 'week'), 'cannot be grouped by "week"'),
                (('--group-by', 'week'), 'such as --group-by project,day.'),
                (('--start', '2027-01-01', '--end', '2026-01-01'),
                 'Write an --end that is later than --start.'),
                (('--type', 'x'), '"x" is no resource type. Write one of '),
                (('--tags', ',' * 99), '--tags must be a list of at most')):
            code, text = self.manage('usage', *words)
            self.assertEqual((1, True), (code, said in text), text)

    def test_dates_of_usage_can_be_arguments_in_same_zone(self):
        self.manage('db', 'sync')
        self.hold(self.database())
        words = ('usage', '--timezone', 'Asia/Tokyo', '--seconds')
        (row,) = self.json(*words, '--start', '2027-01-15 17:00:00',
                           '--end', '2027-01-15 18:00')
        self.assertEqual('2027-01-15T08:00:00Z', row['start_date'])
        self.assertEqual([row], self.json(
            *words, '--start', row['start_date'], '--end', row['end_date']))

    def purge(self, *words):
        """Run the command at the time of the tests."""
        with mock.patch.object(purge.clocks, 'SystemClock',
                               lambda: driven.ManualClock(self.now)):
            return self.manage('db', 'purge', *words)

    def test_purge_deletes_ended_leases_and_listing_names_its_date(self):
        self.manage('db', 'sync')
        with self.database().writer() as session:
            session.add_all(models.Lease(
                lease_type='immediate',
                id=status, name='name', project_id='project', user_id='user',
                start_date=0, end_date=9, on_end='delete', status=status,
                created_at=0, updated_at=9) for status in (
                    'TERMINATED', 'ACTIVE'))
        # Output that scripts read is on stdout.
        self.assertNotIn('purged', self.manage('lease', 'list', '--ended')[1])
        before = '2027-01-14 08:00'
        for words, said in (
                (['--dry-run'], 'Would delete'),
                (['--dry-run', '--verbose'], 'Would delete'),
                ([], 'Deleted')):
            code, text = self.purge('--before', before, *words)
            self.assertEqual((0, (
                f'{said} 1 lease that ended before {before} UTC.'
                f'\n')), (code, text.partition('\n')[0] + '\n'))
            self.assertEqual(
                '--verbose' in words,
                '1 lease; leases that ended until 1970' in text)
        code, text = self.purge('--before', before, '--format', 'json')
        self.assertEqual({'deleted': 0, 'kept': 0, 'dry_run': False},
                         json.loads(text))
        code, text = self.manage('lease', 'list', '--ended')
        self.assertEqual(0, code)
        self.assertNotIn('TERMINATED', text)
        self.assertIn(f'ended before {before} UTC were purged', text)
        self.assertNotIn('purged', self.manage('lease', 'list')[1])

    def test_invalid_purge_date_is_reported(self):
        for date, said in (
                ('2028-01-01 00:00', '--before is in the future.'),
                ('2027-01-15 07:00', 'at least 24 hours'),
                ('yesterday', 'yesterday is an invalid date.')):
            self.assertEqual((1, True), (
                (one := self.purge('--before', date))[0], said in one[1]),
                date)

    def test_health_lists_failed_hosts_and_degraded_leases(self):
        self.manage('db', 'sync')
        database = self.database()
        code, text = self.manage('health')
        self.assertEqual((0, True), (
            code, 'Failed: 0 hosts. Degraded: 0 leases.' in text))
        with database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                'uuid', 'compute7', 'compute7', {'VCPU': 2}), {})
        lease = self.hold(database)
        with database.writer() as session:
            (reservation,) = session.scalars(sa.select(models.Reservation))
            reservation.moved_at = NOW
        sees = host_status.HostStatus(database, driven.ManualClock(
            NOW), host_status.Thresholds(0, 60, 3600), lambda *_said: None)
        sees.update({'uuid': host_status.Down('Its power is off.',
                                              certain=True)})
        code, text = self.manage('health')
        self.assertEqual(0, code)
        for words in ('compute7', 'failed', 'Its power is off.',
                      clocks.iso(NOW)[:19], clocks.iso(NOW + 3600)[:19],
                      lease['id'], 'Failed: 1 host. Degraded: 1 lease.'):
            self.assertIn(words, text)
        self.assertEqual({
            'hosts_failed': 1, 'leases_degraded': 1, 'leases_pending': 1,
            'reservations_resources_changed': 1},
            self.counts(self.json('health')))
        sees.update({'uuid': None})
        self.assertIn('coming back', self.manage('health')[1])
        with database.writer() as session:
            session.execute(sa.update(models.Event).where(
                models.Event.event_type == 'start_lease').values(run_at=1))
        self.assertEqual((1, 1), tuple(self.counts(self.json('health')).get(
            name) for name in ('events_late', 'hosts_coming_back')))

    def test_health_counts_deferred_events(self):
        self.manage('db', 'sync')
        database = self.database()
        with database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                'uuid', 'compute7', 'compute7', {'VCPU': 2}), {})
        self.hold(database)
        for run_at, counted in ((NOW + 50, {'events_deferred': 1}),
                                (model.FOREVER, {})):
            with database.writer() as session:
                session.execute(sa.update(models.Event).where(
                    models.Event.event_type == 'start_lease').values(
                        time=NOW - 100, run_at=run_at))
            with mock.patch.object(clocks.SystemClock, 'now',
                                   lambda _self: NOW):
                found = self.counts(self.json('health'))
            self.assertEqual(counted, {
                name: number for name, number in found.items()
                if name.startswith('events')})

    def test_health_reports_clock_skew(self):
        self.url = self.useFixture(databases.DatabaseFixture('mariadb')).url
        self.assertNotIn('clock_skew', self.counts(self.json('health')))
        now = clocks.SystemClock.now
        for ahead, skew in ((1000, 1000), (-1000, -999)):
            with mock.patch.object(clocks.SystemClock, 'now', lambda self,
                                   ahead=ahead: now(self) + ahead):
                found = self.counts(self.json('health'))['clock_skew']
            self.assertAlmostEqual(skew, found, delta=1)

    def test_announced_servers_are_listed(self):
        self.manage('db', 'sync')
        database, clock = self.database(), driven.ManualClock(NOW)
        cloud = base.FakeCloud()
        cloud.servers['server-1'] = cloud_api.ObservedServer(
            cloud_api.ServerState.RUNNING)
        one = end_notices.EndNotices(
            database, clock, cloud, lambda *_said: None)
        one.note('project', 'user', ['server-1'], model.Window(NOW, NOW + 60))
        code, text = self.manage('lease', 'announced')
        self.assertEqual(0, code)
        self.assertNotIn('server-1', text)
        clock.advance(60)
        one.tell()
        code, text = self.manage('lease', 'announced')
        self.assertEqual(0, code)
        for words in ('server-1', 'project', 'user', clocks.iso(NOW)[:19],
                      clocks.iso(NOW + 60)[:19]):
            self.assertIn(words, text)

    def orphans(self, *words, gone=('project',)):
        """Run the command, with a keystone that lacks these owners; None: that
        does not answer.
        """
        def absent(projects, users, _go_on):
            if gone is None:
                raise errors.CloudUnavailable('No answer.')
            return cloud_api.MissingOwners(frozenset(projects) & frozenset(
                gone), frozenset(users) & frozenset(gone))

        database, deleted = self.database(), []
        found = orphans.Orphans(
            database, driven.ManualClock(self.now),
            types.SimpleNamespace(absent=absent),
            lambda lease, project: deleted.append((lease, project)),
            False, 60)
        with mock.patch.object(
                manage, '_parts', lambda _parsed: types.SimpleNamespace(
                    orphans=found, database=database)):
            return *self.manage('lease', 'orphans', *words), deleted

    def test_leases_without_an_owner_are_listed_and_ended(self):
        self.manage('db', 'sync')
        lease = self.hold(self.database())
        code, text, _deleted = self.orphans(gone=())
        self.assertEqual((0, False), (code, lease['id'] in text))
        code, text, deleted = self.orphans('--end')
        self.assertEqual((0, []), (code, deleted))
        for words in (lease['id'], 'lease1', 'PENDING', 'project', 'user',
                      clocks.iso(NOW)[:19]):
            self.assertIn(words, text)
        self.now += 60
        self.assertEqual([], self.orphans()[2])
        code, text, deleted = self.orphans('--end')
        self.assertEqual((0, [(lease['id'], 'project')]), (code, deleted))
        self.assertIn(f'Ended: {lease["id"]}.', text)

    def test_unavailable_keystone_is_reported(self):
        self.manage('db', 'sync')
        self.hold(self.database())
        code, text, _deleted = self.orphans(gone=None)
        self.assertEqual((1, 'No answer.\n'), (code, text))

    def test_progress_is_printed_on_terminal_or_with_verbose(self):
        for error, verbose, expected in (
                (Terminal(), False, 'Loading ...\n'),
                (io.StringIO(), True, 'Loading ...\n'),
                (io.StringIO(), False, '')):
            with contextlib.redirect_stderr(error):
                listings.progress(types.SimpleNamespace(verbose=verbose),
                                  'Loading ...')
            self.assertEqual(expected, error.getvalue())

    def test_verify_counts_records_before_it_fixes_anything(self):
        fixed = []

        class Verifier:
            def __init__(self, *_args):
                pass

            def run(self, fix):
                fixed.append(fix)

            def size(self):
                raise errors.DatabaseUnavailable

        with (fixtures.MonkeyPatch('blazar_nova.cmd.manage._parts',
                                   lambda _parsed: None),
              fixtures.MonkeyPatch(
                  'blazar_nova.verify.verification.Verifier', Verifier)):
            code, text = self.manage('verify', '--fix')
        self.assertEqual((2, []), (code, fixed))
        self.assertIn('Nothing could be compared', text)

    def test_configuration_error_is_reported_with_exit_code(self):
        self.url = ''
        code, text = self.manage('db', 'sync')
        self.assertEqual(1, code)
        self.assertIn('[blazar_database] connection is not set', text)
        self.assertIn(f'Configuration read: {self.folder}/nova.conf.', text)

    def test_arguments_are_checked_before_nova_is_loaded(self):
        with fixtures.MonkeyPatch('blazar_nova.cmd.manage._parts', self.fail):
            for word in 'gpu', 'vcpus=99':
                code, text = self.manage('host', 'add', 'host1', word)
                self.assertEqual(1, code)
                self.assertIn(word.partition('=')[0], text)

    def test_several_hosts_are_enrolled_though_one_fails(self):
        def add(name, extra, **_more):
            added.append((name, extra))
            if name == 'two':
                raise errors.NotFound('There is no host two.')
            return {'id': len(added)}

        added, hosts = [], mock.Mock(add=add)
        out, error = io.StringIO(), io.StringIO()
        with (mock.patch.object(manage, '_enrollment', lambda _parsed: hosts),
              contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(error)):
            self.assertEqual(1, manage.main([
                'host', 'add', 'one,two,three', 'rack=7', '--verbose']))
        self.assertEqual([(name, {'rack': '7'}) for name in (
            'one', 'two', 'three')], added)
        self.assertEqual(['Host one has the ID 1: it serves leases only.',
                          'Host three has the ID 3: it serves leases only.'],
                         out.getvalue().splitlines())
        self.assertEqual([
            'Host 1 of 3: one', 'Host 2 of 3: two', 'There is no host two.',
            'Host 3 of 3: three', '1 of 3 hosts could not be enrolled.'],
            error.getvalue().splitlines())

    def test_bookings_of_host_in_maintenance_are_printed_as_json(self):
        booking = maintenance.Promised(
            'lease', 'fill', 'project', 'user', NOW, NOW + 60, 'server',
            'It is locked.')
        hosts = mock.Mock(**{'planned.return_value': None,
                             'promised.return_value': [booking]})
        parts = mock.Mock(maintenance=hosts, clock=driven.ManualClock(NOW))
        out, error = io.StringIO(), io.StringIO()
        with (mock.patch.object(manage, '_parts', lambda _parsed: parts),
              contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(error)):
            self.assertEqual(1, manage.main([
                'host', 'maintain', 'host1', '--until', '2027-01-15 09:00',
                '--format', 'json']))
        self.assertEqual([{
            **booking._asdict(), 'start_date': '2027-01-15T08:00:00',
            'end_date': '2027-01-15T08:01:00'}], json.loads(out.getvalue()))
        self.assertIn('1 booking: 0 reassigned to other hosts, 1 not.\n'
                      'Nothing was changed.', error.getvalue())

    def test_reassigned_servers_are_one_row_for_each_lease(self):
        one = maintenance.Promised('lease', 'fill', 'project', 'user', NOW,
                                   NOW + 60, 'server', '')
        rows = [one._replace(server_id=f'server{number}')
                for number in range(8)] + [
            one._replace(lease_id='other', server_id='only'),
            *(one._replace(server_id=name, obstacle='It is locked.')
              for name in ('stuck1', 'stuck2'))]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            maintain._show(rows, 'table')
        text = out.getvalue()
        self.assertEqual([1, 1, 1, 1, 0], [text.count(said) for said in (
            '8 bookings', ' only ', 'stuck1', 'stuck2', 'server0')], text)
