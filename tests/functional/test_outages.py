# SPDX-License-Identifier: Apache-2.0

"""Outages of services that the plug-in needs: the cloud keeps running.

The reservation database is a file here: in an outage it cannot be opened.
"""

import contextlib
import os
import threading

import fixtures
from keystoneauth1 import exceptions as keystone_exceptions
from nova.api import wsgi
from nova.scheduler import host_manager
from nova.tests.functional.api import client as nova_client

from blazar_nova.services import wiring
from tests import driven
from tests.functional import api_base
from tests.functional import leased
from tests.functional import whole_hosts_base

HOUR = 3600


class OutageFixture:
    """For test cases: the reservation database cannot be opened."""

    legacy_api = True

    def setUp(self):
        super().setUp()
        self.path = os.path.join(self.folder, 'blazar.sqlite')
        # The clock does not advance here: failed queries are retried at once.
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.db.circuit_breaker.PAUSE', 0))

    @contextlib.contextmanager
    def outage(self):
        os.rename(self.path, self.path + '.off')
        os.mkdir(self.path)
        try:
            yield
        finally:
            os.rmdir(self.path)
            os.rename(self.path + '.off', self.path)


class DatabaseOutageTest(OutageFixture, leased.LeasedTestCase):

    def test_notifications_during_outage_are_synced_afterwards(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.listener.periodic_sync._PAUSE', 1))
        listener = self.start_listener()

        def known(server):
            return server['id'] in str(
                self.query('SELECT consumers FROM hosts'))

        first = self.boot_active('first')
        self.wait_for(lambda: known(first))
        # The sync at the start is done, and the next one is not due yet.
        self.wait_for(lambda: not listener.server_sync.missed.is_set())
        look_into, found_out = listener.server_sync._look_into, []
        self.useFixture(fixtures.MockPatchObject(
            listener.server_sync, '_look_into',
            lambda *args: found_out.append(look_into(*args))))
        with self.outage():
            second = self.boot_active('second', flavor='4')
            self.wait_for(lambda: False in found_out)
        self.wait_for(lambda: known(second))

    def fails(self, name, **kwargs):
        server = self.boot(name, **kwargs)
        self.wait_for_status(server['id'], 'ERROR')
        self.alice.delete_server(server['id'])

    def test_unleased_servers_work_during_outage(self):
        # Existing reservations are kept.
        self.hold('held', flavor='5')
        first = self.boot_active('first')
        where = self.guests()[first['id']]
        with self.outage():
            second = self.boot_active('second', flavor='4')
            self.assertEqual(where, self.guests()[second['id']])
            self.fails('too big', flavor='5')
            self.alice.post_server_action(second['id'], {'os-stop': None})
            self.wait_for_status(second['id'], 'SHUTOFF')
            for server in (first, second):
                self.alice.delete_server(server['id'])
                self.wait_until_gone(server['id'])
        self.run_sync()
        self.boot_active('third', flavor='5')

    def test_lease_requests_are_refused_during_outage(self):
        held = self.hold('held')
        with self.outage():
            for hints in (self.lease_hints('vm'),
                          self.lease_hints('vm', HOUR),
                          {'reservation': 'any'}):
                self.assertIn('database of the leases does not answer',
                              self.refused(503, self.boot, 'vm',
                                           hints=hints))
            self.assertEqual(1, self.boot_rows()['api.build_requests'])
            self.assertEqual('RESERVED',
                             self.alice.get_server(held['id'])['status'])
        self.hold('later')

    def test_processes_start_during_outage(self):
        with self.outage():
            wiring.shared.cache_clear()
            wsgi.Loader().load_app('osapi_compute')
            listener = self.new_listener(self.clock)
            self.stop_scheduler_filter()
            self.boot_active('vm', flavor='5')
        self.assertEqual(0, driven.run_due(listener.engine))
        listener.server_sync.compare_all()
        self.boot_active('vm2')

    def stop_scheduler_filter(self):
        """Replace the scheduler's hosts and filters, as after a restart."""
        manager = self.scheduler.manager
        manager.host_manager = host_manager.HostManager()

    def test_on_database_failure_refuse_rejects_boots(self):
        self.flags(group='blazar', on_database_failure='refuse')
        self.stop_scheduler_filter()
        self.boot_active('before')
        with self.outage():
            self.fails('vm')
        self.boot_active('after')


class HostsDuringOutageTest(OutageFixture, whole_hosts_base.HostsTestCase):
    """Assignments of hosts are unknown, but no other servers get there."""

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        self.mine = self.within('mine', reservation_id)['id']
        self.other = self.boot('other')['id']
        self.where = {self.mine: 'host1'}
        for server_id in (self.mine, self.other):
            self.wait_for_status(server_id, 'ACTIVE')
        self.where[self.other] = self.guests()[self.other]
        self.free, = {'host2', 'plain'} - {self.where[self.other]}

    def move(self, version, server_id, action, host, **values):
        """Move a server as an admin; return the code and the message."""
        response = self.api(
            roles=('admin', 'member', 'reader'), microversion=version,
        ).api_post(f'/servers/{server_id}/action', {
            action: {**values, 'host': host}}, check_response_status=None)
        return response.status, response.content.decode()

    def test_servers_are_not_moved_to_or_from_leased_hosts(self):
        forced = (('2.1', 'os-migrateLive', {
            'block_migration': False, 'disk_over_commit': False}),
            ('2.67', 'os-migrateLive', {
                'block_migration': 'auto', 'force': True}),
            ('2.13', 'evacuate', {'onSharedStorage': False}),
            ('2.67', 'evacuate', {'force': True}))
        named = (('latest', 'os-migrateLive', {'block_migration': 'auto'}),
                 ('latest', 'migrate', {}), ('latest', 'evacuate', {}))
        with self.outage():
            for server_id, host in ((self.mine, 'plain'),
                                    (self.mine, 'host1'),
                                    (self.other, 'host1')):
                for version, action, values in forced:
                    code, text = self.move(
                        version, server_id, action, host, **values)
                    self.assertEqual(503, code, (action, host, text))
                    self.assertIn('Leave \\"force\\" out', text)
                for version, action, values in named:
                    self.move(version, server_id, action, host, **values)
                    self.rests(server_id)
            # Migrations of the other server are possible as always.
            code, _text = self.move(
                '2.67', self.other, 'os-migrateLive', self.free,
                block_migration='auto', force=True)
            self.assertEqual(202, code)
            self.wait_for(lambda: self.host_of(
                {'id': self.other}) == self.free)
            for kwargs in ({'availability_zone': 'nova:host1'},
                           {'host': 'host1'}):
                server = self.boot('forced', client=self.admin, **kwargs)
                self.wait_for_status(server['id'], 'ERROR')
            self.boot_active('ordinary')

    def rests(self, server_id):
        """Assert that a server has no task, and is on the same host."""
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'] is None)
        self.assertEqual(
            self.where[server_id], self.host_of({'id': server_id}))


class PlacementOutageTest(api_base.ApiTestCase):

    def test_lease_requests_are_refused_during_outage(self):
        def down(*_args, **_kwargs):
            raise keystone_exceptions.ConnectFailure('http://secret.place')

        with fixtures.MonkeyPatch(
                'nova.scheduler.client.report.SchedulerReportClient.get',
                down):
            for hints in (self.lease_hints('vm'),
                          self.lease_hints('vm', HOUR)):
                self.assertEqual(
                    'The placement service does not answer; try again in a '
                    'minute.', self.refused(503, self.boot, 'vm',
                                            hints=hints))
            self.assertEqual('60', self.assertRaises(
                nova_client.OpenStackApiException, self.boot, 'vm',
                hints=hints).response.headers['Retry-After'])
            answer = self.make(code=503)
        self.assertEqual('CLOUD_UNAVAILABLE', answer['error_name'])
        self.assertIn('placement service', answer['error_message'])
        self.assertEqual({0}, set(self.boot_rows().values()))
        self.assertEqual(0, self.row_counts()['leases'])


class ClockTest(api_base.ApiTestCase):
    """All processes' clocks are wrong, compared with the database."""

    #: The message of the middleware, of Nova's API and of the lease API.
    WRONG = ('The clock of this service is at least 1000 s ahead of the '
             'clock of the database')

    @contextlib.contextmanager
    def wrong(self):
        with fixtures.MonkeyPatch(
                'blazar_core.db.clock_skew.ClockSkew.seconds',
                lambda _self: 1000):
            yield

    def test_lease_requests_are_refused_with_wrong_clock(self):
        with self.wrong():
            for hints in (self.lease_hints('vm'),
                          self.lease_hints('vm', HOUR),
                          # With a correct clock this may be in the future.
                          self.lease_hints('vm', -600)):
                self.assertIn(self.WRONG, self.refused(
                    503, self.boot, 'vm', hints=hints))
            for values in ({}, {'start_date': self.at(-600)}):
                answer = self.make(code=503, **values)
                self.assertEqual('CLOCK_SKEWED', answer['error_name'])
                self.assertIn(self.WRONG, answer['error_message'])
        self.assertEqual({0}, set(self.boot_rows().values()))
        self.assertEqual(0, self.row_counts()['leases'])
        self.hold('later')
        self.make()

    def test_leases_can_be_shown_but_not_changed_with_wrong_clock(self):
        lease = self.make()
        path = f'/leases/{lease["id"]}'
        with self.wrong():
            self.ask('GET', path, code=200)
            self.ask('GET', '/leases', code=200)
            self.ask('PUT', path, {'name': 'other'}, code=503)
            self.ask('DELETE', path, code=503)
        self.assertEqual(lease['name'], self.ask(
            'GET', path, code=200)['lease']['name'])
        self.ask('DELETE', path, code=204)

    def test_other_errors_take_precedence_over_clock_skew(self):
        with self.wrong():
            self.refused(400, self.boot, 'vm', flavor='no such flavor')
            self.ask('GET', '/leases/no-such-lease', code=404)

    def test_unleased_servers_work_with_wrong_clock(self):
        with self.wrong():
            server = self.boot_active('vm', hints={})
            self.alice.delete_server(server['id'])
            self.wait_until_gone(server['id'])
        self.run_sync()
        self.assert_verified()


class CellOutageTest(leased.LeasedTestCase):
    """A cell that does not answer."""

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.bounded_calls.LIMIT', 1))
        self.answers = threading.Event()
        self.addCleanup(self.answers.set)

    def test_lease_end_is_postponed_while_cell_is_unavailable(self):
        server_id = self.boot_active(
            'vm1', hints=self.lease_hints('vm1'))['id']
        self.run_sync()
        cloud = self.listener.parts.cloud
        get, asked = cloud._compute_api.get, []

        def silent(context, server_id):
            asked.append(server_id)
            self.answers.wait(60)
            return get(context, server_id)

        cloud._compute_api.get = silent
        self.clock.advance(HOUR)
        for _time in range(3):
            # Returns although the cell has not answered yet.
            self.run_due()
            self.clock.advance(300)
        self.assertEqual([server_id], asked)
        self.assertEqual('TERMINATING', self.lease('vm1')['status'])
        self.answers.set()

        def over():
            self.clock.advance(60)
            self.run_due()
            return self.lease('vm1')['status'] == 'TERMINATED'

        self.wait_for(over, 60, 'the lease is over')
        self.assertFalse(self.exists(server_id))
