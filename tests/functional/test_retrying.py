# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for capacity, on the real Nova."""

from unittest import mock

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.verify import verification
from tests import driven
from tests.functional import api_base
from tests.functional import test_deletion
from tests.functional import whole_hosts_base

HOUR = 3600


class RetryingTestCase(api_base.ApiTestCase):
    """A lease has all but one CPU of two hosts."""

    length = HOUR
    retry = {'lease_type': 'retry', 'retries': 10, 'retry_interval': '5m'}

    def setUp(self):
        super().setUp()
        self.full = self.make_active(
            length=self.length, reservations=[self.reservation(
                amount=2, vcpus=3, disk_gb=0, memory_mb=64)])

    def free_capacity(self):
        self.delete(self.full)

    def delete(self, lease):
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())

    def look(self):
        self.listener.parts.lifecycle.admission_queue.look()
        self.run_until(clocks.SystemClock().now())

    def assert_right(self):
        report = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(False)
        self.assertEqual([], [one.text for one in report.left] +
                         report.failures)


class TestRetrying(RetryingTestCase):

    def test_boot_waits_for_capacity_and_is_built(self):
        server = self.boot('vm1', flavor='3', hints=self.lease_hints(
            'mine', duration='1h', **self.retry))
        self.assertEqual('RESERVED', self.alice.get_server(
            server['id'])['status'])
        lease = self.lease('mine')
        self.assertEqual(('WAITING', 'retry'), (
            lease['status'], lease['lease_type']))
        self.assertIn('There is no capacity', lease['status_reason'])
        self.look()
        self.assertEqual('WAITING', self.lease('mine')['status'])
        self.assert_right()
        self.free_capacity()
        self.look()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        lease = self.lease('mine')
        self.assertEqual('ACTIVE', lease['status'])
        start, end = (driven.parse_iso(lease[key])
                      for key in ('start_date', 'end_date'))
        self.assertEqual(HOUR, end - start)
        self.assertGreaterEqual(start, self.began)
        self.assert_right()

    def test_boot_with_free_capacity_starts_at_once(self):
        server = self.boot_active('vm1', hints=self.lease_hints(
            'mine', **self.retry))
        self.run_sync()
        lease = self.lease('mine')
        self.assertEqual(('ACTIVE', 'retry', [server['id']]), (
            lease['status'], lease['lease_type'],
            lease['reservations'][0]['servers']))

    def test_immediate_lease_is_refused_at_once(self):
        message = self.refused(
            409, self.boot, 'vm1', flavor='3', hints=self.lease_hints(
                'mine', lease_type='immediate'))
        self.assertIn('There is no capacity', message)
        self.assertEqual(1, len(self.leases()))

    def test_lease_is_in_error_after_last_retry(self):
        server = self.boot('vm1', flavor='3', hints=self.lease_hints(
            'mine', duration='1h', lease_type='retry', retries=1,
            retry_interval=10))
        self.clock.advance(20)
        driven.run_due(self.listener.engine)
        lease = self.lease('mine')
        self.assertEqual('ERROR', lease['status'])
        self.assertIn('No capacity became available until',
                      lease['status_reason'])
        for shown in (self.alice.get_server(server['id']),
                      *self.alice.get_servers(detail=True)):
            self.assertEqual('ERROR', shown['status'])
            self.assertIn('No capacity became available until',
                          shown['fault']['message'])
        self.assert_right()
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('mine')['status'])

    def test_waiting_lease_ends_if_it_or_its_server_is_deleted(self):
        one, two = (self.boot(name, flavor='3', hints=self.lease_hints(
            name, **self.retry)) for name in ('one', 'two'))
        self.alice.delete_server(one['id'])
        self.wait_until_gone(one['id'])
        self.run_sync()
        self.delete(self.lease('two'))
        self.wait_until_gone(two['id'])
        self.run_sync()
        self.assertEqual({'TERMINATED'}, {
            self.lease(name)['status'] for name in ('one', 'two')})
        self.assert_right()

    def test_lease_of_lease_api_waits_for_capacity(self):
        lease = self.make(**self.retry, reservations=[
            self.reservation(amount=2)])
        self.assertEqual(('WAITING', False), (
            lease['status'], lease['degraded']))
        self.assertEqual('WAITING', self.get(lease)['status'])
        listed, = self.ask('GET', '/leases', code=200,
                           status='WAITING')['leases']
        self.assertEqual(lease['id'], listed['id'])
        error = str(self.ask('PUT', f'/leases/{lease["id"]}',
                             {'name': 'other'}, code=400))
        self.assertIn('Still waiting for capacity', error)
        self.free_capacity()
        self.look()
        self.look()
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.boot_active('vm1', flavor=lease['reservations'][0]['id'])

    def test_incompatible_lease_params_are_refused(self):
        for said, part in (
                ({'lease_type': 'hunt'},
                 'Write one of "immediate", "scheduled", "retry"'),
                ({'lease_type': 3}, '"lease_type" is a number'),
                ({'retries': 3}, 'only for a lease that is tried again'),
                ({'lease_type': 'scheduled'}, 'A scheduled lease starts'),
                ({**self.retry, 'retries': 0}, '"retries"'),
                ({**self.retry, 'retries': 10000}, 'Write fewer "retries"'),
                ({**self.retry, 'retry_interval': '1s'}, 'retry_interval'),
                ({**self.retry, 'retry_interval': []}, 'retry_interval')):
            self.assertIn(part, self.refused(
                400, self.boot, 'no', hints=self.lease_hints(
                    'no', **said)).replace('\\"', '"'))
            self.assertIn(part, self.make(code=400, **said)[
                'error_message'])
        self.assertIn('An immediate lease starts now', self.refused(
            400, self.boot, 'no', hints=self.lease_hints(
                'no', HOUR, lease_type='immediate')))
        self.assertIn('An offer is made now', self.make(
            code=400, offer_seconds=600, **self.retry)['error_message'])
        self.assertEqual(1, len(self.leases()))


class TestTrusts(test_deletion.DeletionTestCase, RetryingTestCase):

    def test_trust_covers_latest_possible_end(self):
        self.boot('vm1', flavor='3', hints=self.lease_hints(
            'mine', duration='1h', **self.retry))
        (_user, until), = self.trusts.values()
        self.assertIn(until - self.began - HOUR - 3000, range(60))
        self.make(**self.retry, on_end='shelve')
        limit = self.listener.parts.conf.blazar.end_timeout
        _user, until = [*self.trusts.values()][-1]
        self.assertEqual(HOUR + limit, until - self.began)

    def test_waiting_boot_requires_trust(self):
        self.delegate = mock.Mock(
            side_effect=errors.TrustUnavailable('restricted'))
        self.refused(403, self.boot, 'vm1', flavor='3',
                     hints=self.lease_hints('mine', **self.retry))
        self.assertEqual(1, len(self.leases()))


class TestWholeHosts(whole_hosts_base.HostsTestCase):

    def test_lease_of_hosts_waits_for_capacity(self):
        """It gets as many hosts as are free, from ``min`` to ``max``."""
        self.enrol('host1', 'host2')
        first, _reservation_id = self.lease_hosts(2, 2)
        lease = self.make(
            reservations=[self.hosts_wanted(1, 3)], lease_type='retry')
        self.assertEqual('WAITING', lease['status'])
        self.delete(first['id'])
        self.look()
        self.listener.parts.lifecycle.admission_queue.look()
        self.run_until(self.clock.now())
        lease = self.get(lease)
        self.assertEqual('ACTIVE', lease['status'])
        self.assertEqual(2, lease['reservations'][0]['amount'])
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual(['host1', 'host2'],
                         self.aggregates()[reservation_id])
        self.wait_for_status(
            self.within('vm1', reservation_id)['id'], 'ACTIVE')
