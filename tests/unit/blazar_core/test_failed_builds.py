# SPDX-License-Identifier: Apache-2.0

"""Builds that fail, or find no host."""

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
NOW = base.NOW
Seen = cloud_api.ObservedServer
State = base.State


class TestFailedBuilds(lifecycle_base.LifecycleTestCase):

    def test_failed_build_frees_its_capacity(self):
        lease = self.lease(0, 100, count=2)
        self.assertEqual(0, self.room())
        server_id = base.servers_of(lease)[0]
        self.see(server_id, State.ERROR, fault='No valid host')
        self.assertEqual(1, self.room())
        self.assertIsNone(self.host_of(server_id))

    def test_allocation_of_failed_build_counts_until_lease_ends(self):
        """A nova-compute that died during the build leaves the allocation."""
        lease = self.lease(0, 100, count=2)
        server_id, other = base.servers_of(lease)
        self.see(other, State.RUNNING, self.one)
        self.see(server_id, State.ERROR, self.one, 'The host has died.')

        def report(**runs):
            with self.database.writer() as session:
                inventory.record_host(
                    session, NOW, model.HostFacts(
                        self.one, 'one', 'one', {'VCPU': 2}),
                    {one: {'VCPU': 1} for one in runs.values()},
                    inventory.generations(session, [self.one])[self.one])

        def usage():
            return self.scalars(models.Host.usage)[0]

        for _time in range(2):
            report(ran=other, failed=server_id)
            self.assertEqual('one', self.host_of(server_id))
            self.assertEqual({}, usage())
            self.assertEqual(0, self.room())
            reservation, = views.get(
                self.database, lease['id'])['reservations']
            listed, = self.listed()
            self.assertEqual((True, [reservation]), (
                reservation['missing_resources'], listed['reservations']))
        # The usage has an end, so another lease can follow.
        driven.withdraw(self.leases, self.lease(100, 200, count=2)['id'])
        # Its capacity is available as soon as it is free.
        report(ran=other)
        self.assertIsNone(self.host_of(server_id))
        self.assertEqual(1, self.room())
        # Its slot may be booked again by then, and is freed again.
        report(ran=other, failed=server_id)
        self.see(server_id, State.GONE)
        report(ran=other)
        self.assertEqual(({}, 1), (usage(), self.room()))

    def test_lease_fails_with_reason(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.see(server_id, State.ERROR, fault='No valid host')
        described = views.get(self.database, lease['id'])
        self.assertEqual('ERROR', described['status'])
        for part in (server_id, 'No valid host'):
            self.assertIn(part, described['status_reason'])
        self.assertEqual('error', described['reservations'][0]['status'])
        self.assertEqual([('lease.update', lease['id'])], self.notified)

    def test_failure_seen_twice_is_notified_once(self):
        lease = self.lease(0, 100)
        for _time in range(2):
            self.see(*base.servers_of(lease), State.ERROR)
        self.assertEqual(1, len(self.notified))

    def test_fault_of_active_server_does_not_fail_lease(self):
        lease = self.running_lease()
        self.see(*base.servers_of(lease), State.ERROR, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))

    def test_failure_of_one_server_does_not_affect_others(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.ERROR, fault='It broke.')
        self.assertEqual('STARTING', self.status(lease))
        self.see(second, State.RUNNING, self.one)
        described = views.get(self.database, lease['id'])
        self.assertEqual('ACTIVE', described['status'])
        self.assertIn('It broke.', described['status_reason'])
        self.assertTrue(described['degraded'])
        reservation, = described['reservations']
        self.assertEqual(('active', True), (
            reservation['status'], reservation['missing_resources']))
        self.assertEqual('one', self.host_of(second))
        # The rest of it is a lease like others.
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 200))
        self.assertTrue(self.leases.lookup.is_leased(first))

    def test_many_failures_are_counted_with_the_fault_of_the_first(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(second, State.ERROR, fault='It broke.')
        self.see(first, State.ERROR, fault='It was too late.')
        described = views.get(self.database, lease['id'])
        self.assertEqual(
            '2 of 2 servers could not be built, the first: It broke.',
            described['status_reason'])
        condition, = described['conditions']
        self.assertEqual((NOW, {first, second}), (
            condition['since'], set(condition['details']['servers'])))

    def test_failed_lease_still_ends(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.lifecycle.reconciliation.check(server_id)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([server_id], self.cloud.deleted)

    def test_lease_that_could_not_be_sent_fails_and_frees_capacity(self):
        lease = self.lease(50, 100, count=2)
        self.assertEqual(0, self.room())
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        described = views.get(self.database, lease['id'])
        self.assertEqual('ERROR', described['status'])
        self.assertIn('could not be sent', described['status_reason'])
        self.assertEqual('error', described['reservations'][0]['status'])
        self.assertEqual(2, self.room())
        self.assertEqual([('lease.update', lease['id'])], self.notified)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual(1, len(self.notified))

    def test_given_up_lease_is_not_sent(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual([], self.cloud.sent)

    def test_a_lease_that_has_started_cannot_be_given_up(self):
        lease = self.running_lease()
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual('ACTIVE', self.status(lease))

    def test_failed_notification_does_not_fail_its_lease(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'before_end_lease')
        self.assertEqual('PENDING', self.status(lease))


class TestNoValidHost(lifecycle_base.LifecycleTestCase):
    """Nova has no host or no quota at the time."""

    def sent(self, count=1, end=100_000):
        lease = self.lease(50, end, count=count)
        self.clock.advance(50)
        self.start(lease)
        return lease

    def start(self, lease):
        return self.lifecycle.lease_start.start(lease['id'], when_due=True)

    def fail(self, *servers):
        for server_id in servers:
            self.lifecycle.reconciliation.observe(server_id, Seen(
                State.ERROR, fault='No valid host', unplaced=True))

    def start_event(self, lease):
        event, = self.scalars(
            models.Event, models.Event.lease_id == lease['id'],
            models.Event.event_type == 'start_lease')
        return event

    def test_unplaced_build_keeps_capacity_and_is_resent(self):
        lease = self.sent()
        self.database.retried(self.done, lease)
        server_id, = base.servers_of(lease)
        self.fail(server_id)
        self.assertEqual(('STARTING', 'one'),
                         (self.status(lease), self.host_of(server_id)))
        for part in (server_id, 'No valid host'):
            self.assertIn(part, self.reason(lease))
        event = self.start_event(lease)
        self.assertEqual(('UNDONE', NOW + 50 + retries.UNAVAILABLE),
                         (event.status, event.run_at))
        # Observing it again changes nothing.
        self.fail(server_id)
        self.clock.advance(retries.UNAVAILABLE)
        self.start(lease)
        self.assertEqual(2, len(self.cloud.sent))
        self.assertEqual(['lease.event.start_lease'], self.events_told())
        self.see(server_id, State.RUNNING, self.one)
        self.assertEqual(('ACTIVE', ''),
                         (self.status(lease), self.reason(lease)))

    def test_deleted_unplaced_server_is_not_waited_for(
            self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.ERROR, fault='It broke.')
        self.fail(second)
        self.assertIn('no valid host yet', self.reason(lease))
        self.see(second, State.GONE)
        self.assertEqual(('ERROR', f'Server {first} could not be built: '
                          'It broke.'),
                         (self.status(lease), self.reason(lease)))

    def test_reason_of_failure_is_kept_when_others_are_resent(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.ERROR, fault='It broke.')
        self.fail(second)
        self.start(lease)
        self.assertEqual(f'Server {first} could not be built: It broke.',
                         self.reason(lease))
        self.see(second, State.ERROR, fault='It was too late.')
        self.assertEqual(
            '2 of 2 servers could not be built, the first: It broke.',
            self.reason(lease))

    def test_reason_is_cleared_when_failed_server_is_deleted(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.RUNNING, self.one)
        self.fail(second)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual('The build of its servers could not be sent.',
                         self.reason(lease))
        self.see(second, State.GONE)
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual(('ACTIVE', ''),
                         (self.status(lease), self.reason(lease)))

    def test_ending_lease_clears_reason_of_unplaced_server(self):
        lease = self.sent()
        self.fail(*base.servers_of(lease))
        self.assertIn('no valid host yet', self.reason(lease))
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.delete(lease['id'])
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(('DELETING', ''),
                         (self.status(lease), self.reason(lease)))

    def done(self, lease):
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                lease_id=lease['id'], event_type='start_lease').update(
                    {'status': 'DONE'})

    def test_pauses_between_attempts_grow_up_to_limit(self):
        lease = self.sent()
        pauses = []
        for _time in range(40):
            now = self.clock.now()
            self.fail(*base.servers_of(lease))
            pauses.append(self.start_event(lease).run_at - now)
            self.clock.advance(pauses[-1])
            self.start(lease)
        self.assertEqual(sorted(pauses), pauses)
        self.assertEqual((retries.UNAVAILABLE, retries.LONGEST_PAUSE),
                         (pauses[0], pauses[-1]))
        self.assertEqual(41, len(self.cloud.sent))

    def test_resend_waits_for_other_servers_to_be_built(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.fail(first)
        self.assertIsInstance(self.start(lease), retries.RetryAfter)
        self.assertEqual(1, len(self.cloud.sent))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual('STARTING', self.status(lease))
        self.start(lease)
        self.assertEqual(('call', [first]), self.cloud.sent[-1])

    def test_observation_from_before_resend_is_ignored(self):
        """The observer is frozen while a worker sends the build again."""
        lease = self.sent()
        server_id, = base.servers_of(lease)
        failed = Seen(State.ERROR, fault='No valid host', unplaced=True)
        self.cloud.servers[server_id] = failed

        def look(_server_id):
            self.fail(server_id)
            self.clock.advance(retries.UNAVAILABLE)
            self.start(lease)
            return failed

        with fixtures.MockPatchObject(self.cloud, 'look', look):
            self.lifecycle.reconciliation.check(server_id)
        self.assertEqual(
            self.clock.now(), self.booking(server_id).dispatched_at)
        self.clock.advance(retries.LONGEST_PAUSE)
        self.start(lease)
        self.assertEqual(2, len(self.cloud.sent))

    def test_unplaced_server_is_deleted_at_end(self):
        lease = self.sent(end=100)
        server_id, = base.servers_of(lease)
        self.fail(server_id)
        self.clock.advance(50)
        self.assertIsNone(self.start(lease))
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual([server_id], self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_unplaced_server_may_be_deleted(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.fail(first)
        self.see(second, State.RUNNING, self.one)
        self.see(first, State.GONE)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_immediate_lease_without_stored_call_fails(self):
        lease = self.lease(0, 100)
        self.fail(*base.servers_of(lease))
        self.assertEqual('ERROR', self.status(lease))

    def test_only_as_many_builds_as_quota_admits_are_sent(self):
        self.report(self.one, 'one', None, {'VCPU': 7})
        self.cloud.admits = 4
        lease = self.sent(count=7)
        servers = base.servers_of(lease)
        self.assertEqual([('call', servers[:4])], self.cloud.sent)
        self.assertEqual(('STARTING', servers[4:]),
                         (self.status(lease), self.cloud.held))
        self.assertIn('The quota admits 4.', self.reason(lease))
        for server_id in servers[:4]:
            self.see(server_id, State.RUNNING, self.one)
        self.assertEqual('STARTING', self.status(lease))
        self.cloud.admits = None
        self.assertIsNone(self.start(lease))
        self.assertEqual(('call', servers[4:]), self.cloud.sent[-1])
        for server_id in servers[4:]:
            self.see(server_id, State.RUNNING, self.one)
        self.assertEqual(('ACTIVE', ''),
                         (self.status(lease), self.reason(lease)))

    def test_exhausted_quota_leaves_lease_pending(self):
        self.cloud.admits = 0
        lease = self.lease(50, 100)
        self.clock.advance(50)
        later = self.start(lease)
        self.assertEqual((retries.UNAVAILABLE, 'The quota admits 0.'),
                         (later.seconds, later.why))
        self.assertEqual('PENDING', self.status(lease))
        self.assertIn('The quota admits 0.', self.reason(lease))
        self.assertEqual([], self.cloud.sent)

    def test_active_servers_remain_when_rest_is_given_up(self):
        self.cloud.admits = 1
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.RUNNING, self.one)
        self.cloud.broken['send'] = errors.TrustUnavailable('He was disabled.')
        self.start(lease)
        self.assertEqual(('ACTIVE', 'He was disabled.'),
                         (self.status(lease), self.reason(lease)))
        self.assertIsNone(self.host_of(second))
        self.assertEqual([], self.scalars(models.DeferredBuild.lease_id))


class TestStatusRepair(lifecycle_base.LifecycleTestCase):
    """The process that should have updated the status has died."""

    def test_lease_with_all_servers_running_becomes_active(self):
        lease = self.running_lease(0, 100)
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(status='STARTING'))
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual('ACTIVE', self.status(lease))

    def test_lease_without_servers_becomes_terminated(self):
        for status in ('PENDING', 'STARTING', 'ACTIVE', 'ERROR'):
            lease = self.lease(50, 100)
            with self.database.writer() as session:
                session.execute(sa.update(models.Lease).where(
                    models.Lease.id == lease['id']).values(status=status))
                session.execute(sa.delete(models.Booking))
            self.lifecycle.reconciliation.settle_left()
            self.assertEqual('TERMINATED', self.status(lease), status)

    def test_other_leases_are_unchanged(self):
        self.host('two', VCPU=2)
        leases = [self.lease(0, 100), self.lease(50, 100),
                  self.reserve(0, 100, active=True)]
        before = list(map(self.status, leases))
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual(before, list(map(self.status, leases)))


class TestLeaseStatus(lifecycle_base.LifecycleTestCase):
    """The status of a lease follows from its remaining servers."""

    def kept(self):
        return self.scalars(models.DeferredBuild.lease_id)

    def test_the_encrypted_call_is_kept_until_all_servers_run(self):
        lease = self.lease(50, 100, count=2)
        first, second = base.servers_of(lease)
        self.lifecycle.lease_start.start(lease['id'])
        self.see(first, State.RUNNING, self.one)
        self.assertEqual([lease['id']], self.kept())
        self.see(second, State.RUNNING, self.one)
        self.assertEqual([], self.kept())

    def test_encrypted_call_is_not_kept_for_failed_servers(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.start(lease['id'])
        self.see(*base.servers_of(lease), State.ERROR)
        self.assertEqual(('ERROR', []), (self.status(lease), self.kept()))

    def test_server_deleted_during_build_is_not_waited_for(
            self):
        for last in (State.RUNNING, State.ERROR):
            lease = self.lease(0, 100, count=2)
            first, second = base.servers_of(lease)
            self.see(first, last, self.one)
            self.see(second, State.GONE)
            described = views.get(self.database, lease['id'])
            self.assertEqual(
                ('ACTIVE', 'active') if last is State.RUNNING else
                ('ERROR', 'error'),
                (described['status'], described['reservations'][0]['status']))
            self.lifecycle.lease_end.end(lease['id'])

    def test_lease_fails_when_all_servers_have_failed(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.ERROR)
        self.assertEqual('STARTING', self.status(lease))
        self.see(second, State.ERROR)
        self.assertEqual('ERROR', self.status(lease))
