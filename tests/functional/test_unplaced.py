# SPDX-License-Identifier: Apache-2.0

"""Starts for which Nova finds no host: they wait and are retried."""

import contextlib

import fixtures
from nova.conf import CONF
from nova import context as nova_context
from nova import objects

from blazar_nova.compat import server_state
from tests.functional import leased


class UnplacedTestCase(leased.LeasedTestCase):

    def statuses(self):
        # From 2.100 on Nova shows hints, and its own answer for a server
        # without a RequestSpec is an error.
        return {server['id']: server['status'] for server in self.api(
            microversion='2.99').get_servers(detail=True)}

    def look(self):
        """Sync with Nova, and carry out what is due within 300 s."""
        self.run_sync()
        self.clock.advance(300)
        self.run_due()

    def wait_for_all(self, status):
        self.wait_for(lambda: set(self.statuses().values()) == {status},
                      what=f'all are {status}')

    def start(self):
        self.clock.advance(3600)
        self.run_due()

    @contextlib.contextmanager
    def no_valid_host(self):
        """Make Nova find no host for any request in this context."""
        with fixtures.MonkeyPatch(
                'blazar_nova.scheduler.filters.LeaseFilter.filter_all',
                lambda *_args: []):
            yield


class NoHostTest(UnplacedTestCase):

    def test_start_waits_until_host_is_up(self):
        server = self.hold()
        for compute in self.computes.values():
            service = objects.Service.get_by_compute_host(
                self.cell_context(), compute.host)
            service.forced_down = True
            service.save()
        self.start()
        lease = self.lease('vm1')
        self.assertEqual(('PENDING', {server['id']: 'RESERVED'}),
                         (lease['status'], self.statuses()))
        service.forced_down = False
        service.save()
        self.clock.advance(5)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')

    def cell_context(self):
        context = nova_context.get_admin_context()
        nova_context.set_target_cell(context, self.cell_mappings['cell1'])
        return context

    def test_server_without_valid_host_is_retried_with_same_id(self):
        server = self.hold(metadata={'color': 'blue'})
        before = self.boot_rows()
        with self.no_valid_host():
            self.start()
            self.wait_for_all('ERROR')
            self.run_sync()
            lease = self.lease('vm1')
            self.assertEqual('STARTING', lease['status'])
            self.assertIn('No valid host', lease['status_reason'])
            self.assertIn(server['id'], lease['status_reason'])
            # Its capacity remains reserved.
            self.assertIsNotNone(self.bookings()[server['id']])
            # Once more without success.
            self.clock.advance(300)
            self.run_due()
            self.wait_for_all('ERROR')
        self.look()
        got = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'color': 'blue'}, got['metadata'])
        self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual(('ACTIVE', ''),
                         (lease['status'], lease['status_reason']))
        self.assertEqual([server['id']], list(self.guests()))
        rows = self.boot_rows()
        self.assertEqual((0, 0, 1), (
            rows['api.build_requests'], rows['cell0.instances'],
            rows['cell1.instances']))
        self.assertEqual(before['api.request_specs'],
                         rows['api.request_specs'])
        # Its secrets are no longer needed.
        self.assertEqual(0, self.row_counts()['deferred_builds'])

    def test_retried_server_keeps_metadata_and_lock(self):
        server_id = self.hold(metadata={'color': 'blue'})['id']
        self.alice.api_post(f'/servers/{server_id}/metadata',
                            {'metadata': {'a': 'b'}})
        self.alice.post_server_action(
            server_id, {'lock': {'locked_reason': 'mine'}})
        with self.no_valid_host():
            self.start()
            self.wait_for_all('ERROR')
            self.run_sync()
        self.look()
        got = self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual(
            ({'color': 'blue', 'a': 'b'}, True, 'mine'),
            (got['metadata'], got['locked'], got['locked_reason']))

    def test_interrupted_deferral_is_completed(self):
        """Between any two steps; the next process completes it."""
        self.hold()
        with self.no_valid_host():
            self.start()
            self.wait_for_all('ERROR')
        self.run_sync()

        class Died(BaseException):
            pass

        def die(*_args, **_kwargs):
            raise Died

        for step in ('nova.objects.BuildRequest.create',
                     'nova.objects.Instance.destroy',
                     'blazar_nova.compat.unbuilt_servers._unmap',
                     'blazar_nova.compat.nova_cloud.NovaCloud._check_up'):
            with fixtures.MonkeyPatch(step, die):
                self.clock.advance(300)
                self.assertRaises(Died, self.run_due)
            # Whatever exists of it, it does not count as deleted.
            self.run_sync()
            self.assertEqual('STARTING', self.lease('vm1')['status'], step)
        self.clock.advance(300)
        self.run_due()
        self.wait_for_all('ACTIVE')
        self.assertEqual(1, len(self.guests()))

    def unplaced(self):
        """Boot a reserved server that Nova cannot place; return its lease id.
        """
        self.hold()
        with self.no_valid_host():
            self.start()
            self.wait_for_all('ERROR')
        self.run_sync()
        self.clock.advance(300)
        return self.lease('vm1')['id']

    def test_concurrent_deferrals_do_not_lose_server(self):
        """One process is delayed while another one does all of it."""
        lease_id = self.unplaced()
        destroy, others = objects.Instance.destroy, []

        def slow(instance, hard_delete=False):
            if hard_delete and not others:
                others.append(True)
                self.listener.parts.lifecycle.lease_start.start(
                    lease_id, when_due=True)
            return destroy(instance, hard_delete=hard_delete)

        with fixtures.MonkeyPatch('nova.objects.Instance.destroy', slow):
            self.run_due()
        self.assertEqual([True], others)
        self.wait_for_all('ACTIVE')
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.assertEqual(1, len(self.guests()))
        self.assertEqual(0, self.boot_rows()['api.build_requests'])

    def test_sync_during_retry_finds_server(self):
        """The server is no longer in cell0 after it was looked up there."""
        lease_id = self.unplaced()
        look, started = server_state._in_cell, []

        def slow(*args):
            if not started:
                started.append(True)
                self.listener.parts.lifecycle.lease_start.start(
                    lease_id, when_due=True)
            return look(*args)

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.server_state._in_cell', slow):
            self.run_sync()
        self.assertEqual([True], started)
        self.assertEqual('STARTING', self.lease('vm1')['status'])
        self.wait_for_all('ACTIVE')
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])

    def test_lease_ends_after_interrupted_deferral(self):
        """The process that deferred it again died between any two steps."""
        class Died(BaseException):
            pass

        def die(*_args, **_kwargs):
            raise Died

        lease_id = self.unplaced()
        with fixtures.MonkeyPatch('blazar_nova.compat.unbuilt_servers._unmap',
                                  die):
            self.assertRaises(Died, self.run_due)
        self.listener.parts.lifecycle.lease_end.delete(lease_id)
        for _time in range(3):
            self.clock.advance(300)
            self.run_due()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.assertEqual(0, self.boot_rows()['api.build_requests'])

    def test_deletion_by_user_during_deferral(self):
        server = self.hold()
        with self.no_valid_host():
            self.start()
            self.wait_for_all('ERROR')
        self.run_sync()
        destroy, deleted = objects.Instance.destroy, []

        def deleted_first(instance, hard_delete=False):
            if hard_delete and not deleted:
                deleted.append(True)
                self.alice.delete_server(server['id'])
            return destroy(instance, hard_delete=hard_delete)

        with fixtures.MonkeyPatch(
                'nova.objects.Instance.destroy', deleted_first):
            self.clock.advance(300)
            self.run_due()
        self.assertEqual([True], deleted)
        self.assertFalse(self.exists(server['id']))
        self.look()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        self.assertEqual({}, self.guests())


class QuotaTest(UnplacedTestCase):

    more_conf = '''
[quota]
driver = nova.quota.DbQuotaDriver
instances = 7
'''

    def quota(self, instances):
        CONF.set_override('instances', instances, 'quota')

    def test_quota_limits_how_many_servers_start(self):
        self.hold(count=7)
        self.quota(4)
        self.start()
        self.wait_for(lambda: sorted(self.statuses().values()) == (
            ['ACTIVE'] * 4 + ['RESERVED'] * 3), what='4 of 7 run')
        self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual('STARTING', lease['status'])
        self.assertIn('instances', lease['status_reason'])
        self.quota(7)
        self.look()
        self.wait_for_all('ACTIVE')
        self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual(('ACTIVE', ''),
                         (lease['status'], lease['status_reason']))
        self.assertEqual(0, self.row_counts()['deferred_builds'])

    def test_servers_refused_by_conductor_quota_check_are_retried(self):
        """The quota was free at the check, and used up at the conductor's."""
        self.hold(count=3)
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.nova_quota.admitted',
                lambda _context, specs: (len(specs), '')):
            self.quota(2)
            self.start()
            self.wait_for_all('ERROR')
        self.run_sync()
        self.assertEqual('STARTING', self.lease('vm1')['status'])
        self.quota(7)
        self.look()
        self.wait_for_all('ACTIVE')
        self.assertEqual(3, len(self.guests()))
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        self.assertEqual(3, self.boot_rows()['api.request_specs'])
