# SPDX-License-Identifier: Apache-2.0

"""Leases where Nova keeps deleted servers for a while
(``[DEFAULT] reclaim_instance_interval``), and members who delay an end.
"""

import contextlib
from unittest import mock

from nova.tests.functional.api import client as nova_client
from oslo_limit import fixture as limit_fixture

from tests.functional import test_deletion
from tests.functional import test_ends
from tests.functional import test_quota
from tests.functional import whole_hosts_base

HOUR = 3600
SOFT = '[DEFAULT]\nreclaim_instance_interval = 3600\n'


class SoftDeleteTestCase(test_deletion.DeletionTestCase):

    more_conf = SOFT

    def delete(self, server_id):
        self.alice.delete_server(server_id)
        self.wait_for_status(server_id, 'SOFT_DELETED')

    def restore(self, server_id):
        self.alice.post_server_action(server_id, {'restore': None})
        self.wait_for_status(server_id, 'ACTIVE')

    def delay(self, server_id):
        """Do all that a member can do to keep a server; Nova may refuse."""
        for action in ('delete', 'restore'):
            with contextlib.suppress(nova_client.OpenStackApiException):
                if action == 'delete':
                    self.alice.delete_server(server_id)
                else:
                    self.alice.post_server_action(
                        server_id, {'restore': None})


class TestTheEndOfALease(SoftDeleteTestCase):

    def test_delete_and_restore_do_not_delay_lease_end(self):
        server_id = self.active()
        for _time in range(8):
            self.delete(server_id)
            self.restore(server_id)
        self.clock.advance(HOUR)
        rounds = []

        def is_over():
            self.run_due()
            rounds.append(self.lease('vm1')['status'])
            if self.exists(server_id):
                self.delay(server_id)
            self.clock.advance(2)
            return rounds[-1] == 'TERMINATED'

        self.wait_for(is_over, 20, 'the end of the lease')
        self.assertFalse(self.exists(server_id))
        self.assertEqual({}, self.guests())
        self.assertEqual({}, self.allocations(server_id))

    def test_soft_deleted_server_is_removed_at_lease_end(self):
        server_id = self.active()
        self.delete(server_id)
        self.goes(server_id)

    def test_soft_deleted_server_keeps_capacity_until_lease_end(self):
        server_id = self.active()
        booked = self.bookings()
        self.delete(server_id)
        self.run_sync()
        self.assertEqual(booked, self.bookings())
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.restore(server_id)
        self.run_sync()
        self.assertEqual(booked, self.bookings())
        self.goes(server_id)

    def test_lost_soft_deletion_does_not_block_lease_end(self):
        server_id = self.active()
        with mock.patch('nova.compute.rpcapi.ComputeAPI.'
                        'soft_delete_instance'):
            self.alice.delete_server(server_id)
        self.assertEqual('soft-deleting', self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'])
        self.goes(server_id)

    def test_reserved_server_is_deleted_at_once(self):
        server_id = self.hold('vm1')['id']
        self.alice.delete_server(server_id)
        self.assertFalse(self.exists(server_id))
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_reserved_server_is_deleted_with_its_lease(self):
        server_id = self.hold('vm1')['id']
        for action in 'restore', 'forceDelete':
            self.refused(409, self.alice.post_server_action, server_id,
                         {action: None})
        self.listener.parts.lifecycle.lease_end.delete(self.lease('vm1')['id'])
        self.run_due()
        self.assertFalse(self.exists(server_id))

    def test_server_restarted_after_failed_deletion_is_deleted(self):
        """Its deletion fails, and an operator starts it again."""
        seen = self.record_deletions(lambda context: len(seen) <= 4)
        server_id = self.active()
        self.clock.advance(HOUR)
        for number in range(1, 5):
            self.run_due()
            self.wait_for(lambda: len(seen) >= number, what='an attempt')
            self.wait_for_status(server_id, 'ERROR')
            self.admin.post_server_action(
                server_id, {'reboot': {'type': 'HARD'}})
            self.wait_for(lambda: self.admin.get_server(
                server_id)['status'] == 'ACTIVE', what='the reboot')
            self.clock.advance(60)
        self.goes(server_id)


class TestPoliciesOfAnEnd(test_ends.EndsTestCase, SoftDeleteTestCase):

    def test_end_policies_keep_nothing_of_soft_deleted_server(self):
        for on_end in 'stop', 'shelve', 'snapshot', 'release':
            server = self.leased(on_end=on_end)
            self.delete(server['id'])
            self.end()
            self.wait_until_gone(server['id'])
            self.assertEqual({}, self.images())
            # A server in deletion while it was released is checked again.
            self.wait_for(lambda: self.listener.server_sync.recheck() or (
                not self.compared().left), what='it is known to be gone')
            self.assert_verified()


class TestWholeHosts(whole_hosts_base.HostsTestCase):
    """A deleted server may be restored on its host without the scheduler: it
    is removed before the host is assigned to another lease.
    """

    more_conf = SOFT

    def test_soft_deleted_server_is_removed_from_hosts_at_lease_end(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.alice.delete_server(server['id'])
        self.wait_for_status(server['id'], 'SOFT_DELETED')
        self.delete(lease['id'])
        self.wait_until_over(lease['id'])
        self.assertFalse(self.exists(server['id']))
        self.assertEqual({}, self.allocations(server['id']))


class TestQuota(test_quota.QuotaTestCase):
    """A deleted server counts once, as long as it belongs to its lease."""

    more_conf = SOFT + test_quota.QuotaTestCase.more_conf

    def test_soft_deleted_server_counts_once(self):
        server = self.boot_active('leased', hints=self.lease_hints())
        self.run_sync()
        self.alice.delete_server(server['id'])
        self.wait_for_status(server['id'], 'SOFT_DELETED')
        self.run_sync()
        self.exceeded(self.places(
            1, 403, start_in=60, vcpus=4, length=60), self.cpus, 4, 4, 1)
        self.places(1, start_in=60, vcpus=3, length=60)


class TestQuotaOfPlacement(TestQuota):

    more_conf = TestQuota.more_conf + 'count_usage_from_placement = true\n'


class TestUnifiedLimits(TestQuota):

    more_conf = SOFT + test_quota.TestUnified.more_conf
    servers, cpus = test_quota.TestUnified.servers, test_quota.TestUnified.cpus

    def setUp(self):
        super().setUp()
        self.useFixture(limit_fixture.LimitFixture(
            {'servers': 2, 'class:VCPU': 4, 'class:MEMORY_MB': -1,
             'class:DISK_GB': -1}, {}))
