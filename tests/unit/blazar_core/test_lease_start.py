# SPDX-License-Identifier: Apache-2.0

"""The start of a lease, until all of its servers are built."""

import logging
import threading

import fixtures

from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_start
from blazar_core.lifecycle import lease_status
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


class TestLockedAsRead(lifecycle_base.LifecycleTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.lease_id = self.lease(50, 100)['id']
        self.read = self.whole()

    def whole(self):
        with self.database.reader() as session:
            lease, = api.whole(session, [self.lease_id])
        return lease

    def lock(self):
        with self.database.begin() as connection:
            api.lock_as_read(connection, self.read)

    def test_whole_lease_is_usable_without_session(self):
        self.assertEqual(1, len(lease_status.waiting(self.read)))
        self.assertEqual({'start_lease', 'end_lease'}, {
            event.event_type for event in self.read.events})

    def test_state_as_read_can_be_locked_only_once(self):
        self.lock()
        self.assertRaises(api.Outdated, self.lock)
        self.read = self.whole()
        self.lock()

    def test_lease_locked_since_is_outdated(self):
        with self.database.writer() as session:
            api.locked(session, self.lease_id)
        self.assertRaises(api.Outdated, self.lock)

    def test_deleted_lease_is_outdated(self):
        driven.withdraw(self.leases, self.lease_id)
        self.assertRaises(api.Outdated, self.lock)

    def start(self):
        """Start the lease with what was read before."""
        self.clock.advance(50)
        return self.lifecycle.lease_start.start(
            self.lease_id, True, lease_start.Read(
                self.read, dispatch.EncryptedCall(
                    self.encryption.encrypt('call'), None), False, ''))

    def test_unchanged_lease_starts_as_read(self):
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual('STARTING', self.whole().status)

    def test_changed_lease_starts_with_its_current_state(self):
        with self.database.writer() as session:
            api.locked(session, self.lease_id).name = 'another'
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))
        lease = self.whole()
        self.assertEqual(('another', 'STARTING'), (lease.name, lease.status))

    def test_lease_starts_despite_repeated_concurrent_locks(self):
        whole = api.whole

        def read_and_lock(session, lease_ids):
            found = whole(session, lease_ids)
            with self.database.writer() as other:
                api.lock(other, self.lease_id)
            return found

        self.clock.advance(50)
        with fixtures.MonkeyPatch('blazar_core.db.api.whole', read_and_lock):
            self.assertIsNone(self.lifecycle.lease_start.start(self.lease_id))
        self.assertEqual(1, len(self.cloud.sent))

    def test_time_waiting_for_lock_does_not_count_for_permit(self):
        """The permit is valid from the time after the wait."""
        lock = api.lock

        def wait(session, lease_id):
            self.clock.advance(dispatch.SECONDS + 1)
            lock(session, lease_id)

        with self.database.writer() as session:
            lock(session, self.lease_id)
        with fixtures.MonkeyPatch('blazar_core.db.api.lock', wait):
            self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))

    def test_lease_sent_since_is_not_sent_again(self):
        self.clock.advance(50)
        self.assertIsNone(self.lifecycle.lease_start.start(self.lease_id))
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))

    def test_deleted_lease_does_not_start(self):
        driven.withdraw(self.leases, self.lease_id)
        self.assertRaises(errors.NotFound, self.start)
        self.assertEqual([], self.cloud.sent)


class TestStart(lifecycle_base.LifecycleTestCase):

    def test_deferred_call_is_decrypted_and_sent_with_its_servers(self):
        lease = self.lease(50, 100, count=2, call='the call')
        self.clock.advance(50)
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        (call, server_ids), = self.cloud.sent
        self.assertEqual('the call', call)
        self.assertEqual(sorted(base.servers_of(lease)), sorted(server_ids))
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([('lease.event.start_lease', lease['id'])],
                         self.notified)
        self.assertEqual(
            [NOW + 50] * 2, self.scalars(models.Booking.dispatched_at))

    def test_repeated_start_sends_build_once(self):
        lease = self.lease(50, 100)
        for _time in range(3):
            self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual(1, len(self.notified))

    def test_concurrent_starts_get_one_permit(self):
        """Both find the build deferred; only one of them gets the permit."""
        lease = self.lease(50, 100)
        servers, gates = base.servers_of(lease), self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([True, False, False], [
            gates[number](servers) is not None for number in (0, 1, 0)])

    def test_permit_for_already_sent_servers_is_denied(self):
        lease = self.lease(50, 100, count=2)
        first, second = base.servers_of(lease)
        gates = self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertIsNotNone(gates[0]([first]))
        self.see(first, State.RUNNING, self.one)
        self.assertIsNone(gates[1]([first, second]))
        self.assertIsNone(self.booking(second).dispatched_at)
        self.assertIsNotNone(gates[1]([second]))

    def gates(self):
        """Return a list that collects the gates instead of sending."""
        gates = []

        def send(*args):
            gates.append(args[-1])
            return ''

        self.cloud.send = send
        return gates

    def test_no_notification_between_permit_and_cast(self):
        lease = self.lease(50, 100)
        told_before = []
        send = self.cloud.send

        def sent(call, credential, servers, gate):
            def watched(server_ids):
                deadline = gate(server_ids)
                told_before.extend(self.notified)
                return deadline
            return send(call, credential, servers, watched)

        self.cloud.send = sent
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([], told_before)
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual(['lease.event.start_lease'], self.events_told())

    def test_process_stalled_after_permit_does_not_send(self):
        lease = self.lease(50, 1000)
        stop = [dispatch.SECONDS + 1]

        def reached(step, _what):
            if step is fault_points.FaultPoint.START_TAKEN and stop:
                self.clock.advance(stop.pop())

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.lifecycle.fault_points.fault_point', reached))
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(([], 'STARTING'),
                         (self.cloud.sent, self.status(lease)))
        # It is sent as a lost build.
        self.cloud.stranded = dict.fromkeys(
            base.servers_of(lease), cloud_api.BuildTrace.NONE)
        self.lifecycle.lost_builds.send()
        self.clock.advance(base.LOST_AFTER)
        self.lifecycle.lost_builds.send()
        self.assertEqual(1, len(self.cloud.sent))

    def test_deadline_passes_by_either_clock(self):
        for name in ('now', 'elapsed'):
            deadline = cloud_api.Deadline(self.clock, 10)
            self.clock.advance(10)
            self.assertFalse(deadline.passed())
            late = getattr(self.clock, name)() + 1
            with fixtures.MonkeyPatch(
                    f'tests.driven.ManualClock.{name}',
                    lambda _clock, late=late: late):
                self.assertTrue(deadline.passed())

    def test_no_permit_if_lease_was_moved_meanwhile(self):
        lease = self.lease(50, 100)
        self.clock.advance(50)
        send = self.cloud.send

        def late(*args):
            self.leases.updates.update(lease['id'], updates.LeaseChange(
                start=NOW + 60))
            return send(*args)

        self.cloud.send = late
        self.assertEqual(10, self.lifecycle.lease_start.start(
            lease['id'], when_due=True).seconds)
        self.assertEqual(([], 'PENDING', base.servers_of(lease)), (
            self.cloud.sent, self.status(lease), self.cloud.held))
        self.cloud.send = send
        self.clock.advance(10)
        self.assertIsNone(
            self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual(1, len(self.cloud.sent))

    def test_worker_death_before_permit_sends_nothing(self):
        lease = self.lease(50, 100)
        self.cloud.broken['send'] = RuntimeError('died')
        self.assertRaises(
            RuntimeError, self.lifecycle.lease_start.start, lease['id'])
        self.assertEqual('PENDING', self.status(lease))
        self.cloud.broken.clear()
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(1, len(self.cloud.sent))

    def test_start_waits_for_unavailable_cloud(self):
        lease = self.lease(50, 100)
        self.clock.advance(50)
        log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        self.cloud.broken['send'] = errors.CloudUnavailable('No answer.')
        for _time in range(3):
            self.assertEqual(
                retries.RetryAfter(retries.UNAVAILABLE, 'No answer.',
                                   retries.LONGEST_WAIT),
                self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual(('PENDING', []), (
            self.status(lease), self.notified))
        self.assertIn(f'Lease {lease["id"]} cannot start yet: No answer.',
                      log.output)
        self.assertIn('No answer.', self.reason(lease))
        self.cloud.broken.clear()
        self.assertIsNone(
            self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual('', self.reason(lease))

    def test_no_permit_for_ended_lease(self):
        lease = self.lease(50, 100)
        gates = self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.cloud.stubborn.update(base.servers_of(lease))
        self.cloud.servers = dict.fromkeys(
            base.servers_of(lease), Seen(State.HELD))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertIsNone(gates[0](base.servers_of(lease)))
        self.assertEqual('TERMINATING', self.status(lease))

    def test_no_permit_for_given_up_lease(self):
        lease = self.lease(50, 100)
        gates = self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertIsNone(gates[0](base.servers_of(lease)))
        self.assertEqual('ERROR', self.status(lease))

    def test_a_lease_that_was_ended_is_not_started(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual([], self.cloud.sent)

    def test_lease_past_its_end_is_not_started(self):
        lease = self.lease(50, 100)
        self.clock.advance(100)
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual([], self.cloud.sent)

    def test_servers_that_the_user_deleted_are_not_sent(self):
        lease = self.lease(50, 100, count=2)
        deleted, kept = base.servers_of(lease)
        self.see(deleted, State.GONE)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([('call', [kept])], self.cloud.sent)


class TestWaitingForTheHost(lifecycle_base.LifecycleTestCase):

    start_timeout = 30

    def setUp(self):
        super().setUp()
        self.before = self.running_lease(0, 100, count=2)
        self.after = self.lease(100, 200)
        self.clock.advance(100)

    def assert_put_off(self):
        self.assertIsInstance(self.lifecycle.lease_start.start(
            self.after['id']), retries.RetryAfter)
        self.assertEqual([], self.cloud.sent)

    def test_start_waits_for_overstaying_servers_on_host(self):
        self.assert_put_off()
        first, second = base.servers_of(self.before)
        self.see(first, State.GONE)
        self.assert_put_off()
        self.see(second, State.GONE)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))
        self.assertEqual(1, len(self.cloud.sent))

    def test_start_waits_no_longer_than_start_timeout(self):
        self.clock.advance(29)
        self.assert_put_off()
        self.clock.advance(1)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))
        self.assertEqual(1, len(self.cloud.sent))

    def test_leases_read_together_wait_for_their_own_hosts(self):
        late = self.lease(165, 200)
        self.host('two', VCPU=1)
        elsewhere = self.lease(165, 200)
        self.assertEqual(['one', 'one', 'two'], [
            self.host_of(*base.servers_of(one))
            for one in (self.after, late, elsewhere)])
        self.clock.advance(66)
        read = self.lifecycle.lease_start.read(
            [self.after['id'], late['id'], elsewhere['id'], 'unknown'])
        # The first one has waited long enough.
        self.assertEqual({self.after['id']: False, late['id']: True,
                          elsewhere['id']: False},
                         {one: found.crowded for one, found in read.items()})
        self.assertIsNone(self.lifecycle.lease_start.start(
            elsewhere['id'], True, read[elsewhere['id']]))
        (_call, server_ids), = self.cloud.sent
        self.assertEqual(base.servers_of(elsewhere), server_ids)

    def test_start_does_not_wait_for_other_hosts(self):
        self.host('two', VCPU=1)
        elsewhere = self.lease(0, 50)
        self.assertEqual('two', self.host_of(*base.servers_of(elsewhere)))
        later = self.lease(50, 100)
        self.assertEqual('two', self.host_of(*base.servers_of(later)))
        self.assertIsNone(self.lifecycle.lease_start.start(later['id']))

    def test_start_does_not_wait_for_servers_before_their_end(self):
        for server_id in base.servers_of(self.before):
            self.see(server_id, State.GONE)
        self.running_lease(0, 300)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))


class TestObserve(lifecycle_base.LifecycleTestCase):

    def test_a_lease_is_active_when_all_of_its_servers_run(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.RUNNING, self.one)
        self.assertEqual('STARTING', self.status(lease))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertEqual('active', reservation['status'])

    def test_repeated_observation_changes_nothing(self):
        lease = self.running_lease()
        generation = self.generation('one')
        self.see(*base.servers_of(lease), State.RUNNING, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(generation, self.generation('one'))

    def test_reserved_or_unplaced_server_changes_nothing(self):
        lease = self.lease(50, 100)
        server_id, = base.servers_of(lease)
        before = views.get(self.database, lease['id'])
        for state in (State.HELD, State.BUILDING):
            self.assertEqual([], self.see(server_id, state))
        self.assertEqual(before, views.get(self.database, lease['id']))
        self.assertEqual('one', self.host_of(server_id))

    def test_server_without_lease_is_ignored(self):
        for state in State:
            self.assertEqual([], self.see('unheard of', state, self.one))
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_a_booking_follows_its_server_to_another_host(self):
        lease = self.lease(0, 100)
        two = self.host('two', VCPU=2)
        server_id, = base.servers_of(lease)
        self.assertEqual(
            ['one', 'two'], sorted(self.see(server_id, State.BUILDING, two)))
        self.assertEqual('two', self.host_of(server_id))
        self.assertFalse(self.booking(server_id).running)
        self.assertEqual([], self.see(server_id, State.RUNNING, two))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_booking_follows_server_even_without_free_capacity(self):
        two = self.host('two', usage={'VCPU': 1}, VCPU=1)
        server_id, = base.servers_of(self.lease(0, 100))
        self.see(server_id, State.RUNNING, two)
        self.assertEqual('two', self.host_of(server_id))

    def together(self, amount, count, **capacity):
        """Run servers of a reservation on one host, and add another host.

        :returns: the reservation's id, the servers, and the UUID of the other
            host
        """
        self.host('big', VCPU=9)
        lease = self.reserve(0, 100, self.places(amount, affinity=True,
                             hosts=frozenset([self.uuid_of('big')])),
                             active=True)
        server_ids = self.take_slots(lease, count)
        for server_id in server_ids:
            self.see(server_id, State.RUNNING, self.uuid_of('big'))
        return (lease['reservations'][0]['id'], server_ids,
                self.host('two', **capacity))

    def hosts_of(self, reservation_id):
        return sorted(self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.reservation_id == reservation_id))

    def test_free_slots_follow_the_only_server(self):
        reservation_id, (server_id,), two = self.together(3, 1, VCPU=3)
        self.see(server_id, State.RUNNING, two)
        self.assertEqual(['two'] * 3, self.hosts_of(reservation_id))

    def test_free_slots_follow_the_last_server(self):
        reservation_id, server_ids, two = self.together(3, 2, VCPU=3)
        self.see(server_ids[0], State.RUNNING, two)
        self.assertEqual(['big', 'big', 'two'], self.hosts_of(reservation_id))
        self.see(server_ids[1], State.RUNNING, two)
        self.assertEqual(['two'] * 3, self.hosts_of(reservation_id))

    def test_free_slots_that_do_not_fit_on_target_stay(self):
        reservation_id, (server_id,), two = self.together(3, 1, VCPU=2)
        self.see(server_id, State.RUNNING, two)
        self.assertEqual(['big', 'two', 'two'], self.hosts_of(reservation_id))

    def test_free_slots_with_anti_affinity_stay(self):
        self.host('two', VCPU=2)
        lease = self.reserve(
            0, 100, self.places(2, affinity=False), active=True)
        server_id, = self.take_slots(lease)
        before = self.host_of(server_id)
        three = self.host('three', VCPU=9)
        self.see(server_id, State.RUNNING, three)
        self.assertEqual(
            sorted({'one', 'two', 'three'} - {before}),
            self.hosts_of(lease['reservations'][0]['id']))

    def test_booking_stays_if_host_is_unknown(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertEqual(
            [], self.see(server_id, State.RUNNING, 'unheard of'))
        self.assertEqual('one', self.host_of(server_id))
        self.assertTrue(self.booking(server_id).running)

    def test_check_looks_up_server_and_updates_lease(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        seen = self.cloud.servers[server_id] = Seen(State.RUNNING, self.one)
        self.assertEqual(
            (seen, []), self.lifecycle.reconciliation.check(server_id))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_servers_of_unended_leases_are_unfinished(self):
        over = self.running_lease()
        running = self.running_lease()
        self.see(*base.servers_of(over), State.GONE)
        held = self.lease(50, 100)
        self.assertEqual({
            **dict.fromkeys(base.servers_of(running),
                            Seen(State.RUNNING, self.uuid_of('one'))),
            **dict.fromkeys(base.servers_of(held), Seen(State.HELD))},
            self.lifecycle.reconciliation.unfinished())


class TestFailedServerUsage(lifecycle_base.LifecycleTestCase):
    """The lease changes while the usage of its failed server is found."""

    scenarios = databases.SERVERS

    def compare(self, *server_ids, meanwhile=None):
        lock, others = api.lock, [meanwhile] if meanwhile else []

        def locked(session, lease_id):
            if others:
                # In a thread: each has a transaction of its own.
                thread = threading.Thread(target=others.pop())
                thread.start()
                thread.join()
            lock(session, lease_id)

        with self.database.writer() as session, fixtures.MonkeyPatch(
                'blazar_core.db.api.lock', locked):
            inventory.record_host(
                session, NOW, model.HostFacts(
                    self.one, 'one', 'one', {'VCPU': 2}),
                {one: {'VCPU': 1} for one in server_ids},
                inventory.generations(session, [self.one])[self.one])

    def disturbed(self, *server_ids, **meanwhile):
        """Return whether a comparison has to be run again."""
        try:
            self.compare(*server_ids, **meanwhile)
        except Exception as exc:
            if not api.is_disturbance(exc):
                raise
            return True
        return False

    def test_sync_is_repeated_if_lease_changes_concurrently(self):
        lease = self.lease(0, 100, count=2)
        failed, other = base.servers_of(lease)
        # It would be detected by a decision about the same host.
        self.see(other, State.RUNNING, self.host('two', VCPU=2))
        self.see(failed, State.ERROR, self.one, 'The host has died.')

        def extend(end):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + end))

        # MariaDB returns the state at the beginning; others refuse.
        self.assertTrue(self.disturbed(
            failed, meanwhile=lambda: extend(5000)))
        self.assertIsNone(self.host_of(failed))
        self.compare(failed)
        self.assertEqual(('one', NOW + 5000), (
            self.host_of(failed), self.booking(failed).end_date))
        self.assertTrue(self.disturbed(meanwhile=lambda: extend(4000)))
        self.compare()
        self.assertEqual((None, 3), (self.host_of(failed), self.room()))

    def test_sync_waits_for_lock_of_lease(self):
        """The holder of the lock relies on a booking without a host."""
        lease = self.lease(0, 100)
        failed, = base.servers_of(lease)
        self.see(failed, State.ERROR, self.one, 'The host has died.')
        lost = []
        with self.database.writer() as session:
            api.locked(session, lease['id'])
            booking = lease_status.booking_of(session, failed)
            thread = self.db.meanwhile(
                lambda: lost.append(self.disturbed(failed)))
            ledger.amend(session, NOW, [ledger.Edit(booking, ledger.new_of(
                booking, window=model.Window(NOW, NOW + 5000)))])
        thread.join()
        self.assertEqual([True], lost)
        self.assertEqual((None, NOW + 5000), (
            self.host_of(failed), self.booking(failed).end_date))
