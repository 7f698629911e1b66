# SPDX-License-Identifier: Apache-2.0

import contextlib
import logging
import threading
from unittest import mock

import fixtures
from oslo_db import exception as db_exception
import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import slots
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_start
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
Seen = cloud_api.ObservedServer
State = base.State


class LifecycleTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=2)

    def see(self, server_id, state, host=None, fault=''):
        """Something is seen of a server in the cloud."""
        return self.lifecycle.reconciliation.observe(
            server_id, Seen(state, host, fault))

    def events_told(self):
        return [event for event, _lease_id in self.notified]

    def room(self):
        """How many servers of 1 VCPU would get a lease now, for long."""
        try:
            driven.withdraw(self.leases, self.lease(0, 10_000, count=99)['id'])
        except errors.Refused as exc:
            return exc.refusal.fits_now

    def booking(self, server_id):
        row, = self.scalars(
            models.Booking, models.Booking.server_id == server_id)
        return row


class TestLockedAsRead(LifecycleTestCase):

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

    def test_all_of_it_is_there_when_its_session_is_closed(self):
        self.assertEqual(1, len(lease_status.waiting(self.read)))
        self.assertEqual({'start_lease', 'end_lease'}, {
            event.event_type for event in self.read.events})

    def test_nobody_else_has_what_was_read_before(self):
        self.lock()
        self.assertRaises(api.Outdated, self.lock)
        self.read = self.whole()
        self.lock()

    def test_one_that_somebody_has_locked_since_is_outdated(self):
        with self.database.writer() as session:
            api.locked(session, self.lease_id)
        self.assertRaises(api.Outdated, self.lock)

    def test_one_that_is_gone_is_outdated(self):
        driven.withdraw(self.leases, self.lease_id)
        self.assertRaises(api.Outdated, self.lock)

    def start(self):
        """Start it as it was read before."""
        self.clock.advance(50)
        return self.lifecycle.lease_start.start(
            self.lease_id, True, lease_start.Read(
                self.read, dispatch.EncryptedCall(
                    self.encryption.seal('call'), None), False, ''))

    def test_it_starts_as_it_was_read(self):
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual('STARTING', self.whole().status)

    def test_one_that_was_changed_since_starts_as_it_is(self):
        with self.database.writer() as session:
            api.locked(session, self.lease_id).name = 'another'
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))
        lease = self.whole()
        self.assertEqual(('another', 'STARTING'), (lease.name, lease.status))

    def test_who_locks_it_whenever_it_is_read_is_not_in_its_way(self):
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

    def test_what_it_has_waited_for_its_lock_does_not_count(self):
        """The build may be sent for so long from then on."""
        lock = api.lock

        def wait(session, lease_id):
            self.clock.advance(dispatch.SECONDS + 1)
            lock(session, lease_id)

        with self.database.writer() as session:
            lock(session, self.lease_id)
        with fixtures.MonkeyPatch('blazar_core.db.api.lock', wait):
            self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))

    def test_one_that_was_sent_since_is_not_sent_again(self):
        self.clock.advance(50)
        self.assertIsNone(self.lifecycle.lease_start.start(self.lease_id))
        self.assertIsNone(self.start())
        self.assertEqual(1, len(self.cloud.sent))

    def test_one_that_has_gone_since_does_not_start(self):
        driven.withdraw(self.leases, self.lease_id)
        self.assertRaises(errors.NotFound, self.start)
        self.assertEqual([], self.cloud.sent)


class TestStart(LifecycleTestCase):

    def test_the_held_call_is_sent_opened_with_its_servers(self):
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

    def test_it_is_sent_once_however_often_it_is_started(self):
        lease = self.lease(50, 100)
        for _time in range(3):
            self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual(1, len(self.notified))

    def test_two_who_are_at_it_together_send_it_once(self):
        """Both have found it held; the gate lets one of them through."""
        lease = self.lease(50, 100)
        servers, gates = base.servers_of(lease), self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([True, False, False], [
            gates[number](servers) is not None for number in (0, 1, 0)])

    def test_who_wants_one_that_was_sent_sends_none(self):
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
        """Instead of sending, the gates that would be asked."""
        gates = []

        def send(*args):
            gates.append(args[-1])
            return ''

        self.cloud.send = send
        return gates

    def test_nothing_is_told_between_the_gate_and_the_cast(self):
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

    def test_who_stood_still_after_the_gate_does_not_send(self):
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
        # As what got lost.
        self.cloud.stranded = dict.fromkeys(
            base.servers_of(lease), cloud_api.BuildTrace.NONE)
        self.lifecycle.lost_builds.send()
        self.clock.advance(base.LOST_AFTER)
        self.lifecycle.lost_builds.send()
        self.assertEqual(1, len(self.cloud.sent))

    def test_one_of_two_clocks_is_enough_to_be_too_late(self):
        for name in ('now', 'elapsed'):
            deadline = cloud_api.Deadline(self.clock, 10)
            self.clock.advance(10)
            self.assertFalse(deadline.passed())
            late = getattr(self.clock, name)() + 1
            with fixtures.MonkeyPatch(
                    f'tests.driven.ManualClock.{name}',
                    lambda _clock, late=late: late):
                self.assertTrue(deadline.passed())

    def test_the_gate_is_closed_when_the_lease_was_moved_meanwhile(self):
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

    def test_a_worker_that_died_before_the_gate_has_sent_nothing(self):
        lease = self.lease(50, 100)
        self.cloud.broken['send'] = RuntimeError('died')
        self.assertRaises(
            RuntimeError, self.lifecycle.lease_start.start, lease['id'])
        self.assertEqual('PENDING', self.status(lease))
        self.cloud.broken.clear()
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(1, len(self.cloud.sent))

    def test_a_cloud_that_is_away_is_waited_for(self):
        lease = self.lease(50, 100)
        self.clock.advance(50)
        log = self.useFixture(fixtures.FakeLogger(level=logging.WARNING))
        self.cloud.broken['send'] = errors.CloudUnavailable('It is away.')
        for _time in range(3):
            self.assertEqual(
                retries.RetryAfter(retries.AWAY, 'It is away.',
                                   retries.LONGEST_WAIT),
                self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual(('PENDING', []), (
            self.status(lease), self.notified))
        self.assertIn(f'Lease {lease["id"]} cannot start yet: It is away.',
                      log.output)
        self.assertIn('It is away.', self.reason(lease))
        self.cloud.broken.clear()
        self.assertIsNone(
            self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual('', self.reason(lease))

    def test_the_gate_is_closed_once_the_lease_was_ended(self):
        lease = self.lease(50, 100)
        gates = self.gates()
        self.lifecycle.lease_start.start(lease['id'])
        self.cloud.stubborn.update(base.servers_of(lease))
        self.cloud.servers = dict.fromkeys(
            base.servers_of(lease), Seen(State.HELD))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertIsNone(gates[0](base.servers_of(lease)))
        self.assertEqual('TERMINATING', self.status(lease))

    def test_the_gate_is_closed_once_the_lease_was_given_up(self):
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

    def test_a_lease_whose_time_is_over_is_not_started_any_more(self):
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


class TestWaitingForTheHost(LifecycleTestCase):

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

    def test_a_start_is_put_off_while_its_host_is_not_empty(self):
        self.assert_put_off()
        first, second = base.servers_of(self.before)
        self.see(first, State.GONE)
        self.assert_put_off()
        self.see(second, State.GONE)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))
        self.assertEqual(1, len(self.cloud.sent))

    def test_its_patience_ends(self):
        self.clock.advance(29)
        self.assert_put_off()
        self.clock.advance(1)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))
        self.assertEqual(1, len(self.cloud.sent))

    def test_each_of_those_that_are_read_together_waits_for_its_own(self):
        late = self.lease(165, 200)
        self.host('two', VCPU=1)
        elsewhere = self.lease(165, 200)
        self.assertEqual(['one', 'one', 'two'], [
            self.host_of(*base.servers_of(one))
            for one in (self.after, late, elsewhere)])
        self.clock.advance(66)
        read = self.lifecycle.lease_start.read(
            [self.after['id'], late['id'], elsewhere['id'], 'unknown'])
        # The patience of the first one is over.
        self.assertEqual({self.after['id']: False, late['id']: True,
                          elsewhere['id']: False},
                         {one: found.crowded for one, found in read.items()})
        self.assertIsNone(self.lifecycle.lease_start.start(
            elsewhere['id'], True, read[elsewhere['id']]))
        (_call, server_ids), = self.cloud.sent
        self.assertEqual(base.servers_of(elsewhere), server_ids)

    def test_a_full_host_of_others_is_not_waited_for(self):
        self.host('two', VCPU=1)
        elsewhere = self.lease(0, 50)
        self.assertEqual('two', self.host_of(*base.servers_of(elsewhere)))
        later = self.lease(50, 100)
        self.assertEqual('two', self.host_of(*base.servers_of(later)))
        self.assertIsNone(self.lifecycle.lease_start.start(later['id']))

    def test_servers_whose_time_is_not_over_are_not_waited_for(self):
        for server_id in base.servers_of(self.before):
            self.see(server_id, State.GONE)
        self.running_lease(0, 300)
        self.assertIsNone(self.lifecycle.lease_start.start(self.after['id']))


class TestObserve(LifecycleTestCase):

    def test_a_lease_is_active_when_all_of_its_servers_run(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.RUNNING, self.one)
        self.assertEqual('STARTING', self.status(lease))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        reservation, = views.get(self.database, lease['id'])['reservations']
        self.assertEqual('active', reservation['status'])

    def test_seeing_the_same_again_changes_nothing(self):
        lease = self.running_lease()
        generation = self.generation('one')
        self.see(*base.servers_of(lease), State.RUNNING, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(generation, self.generation('one'))

    def test_a_held_server_or_one_without_a_host_says_nothing(self):
        lease = self.lease(50, 100)
        server_id, = base.servers_of(lease)
        before = views.get(self.database, lease['id'])
        for state in (State.HELD, State.BUILDING):
            self.assertEqual([], self.see(server_id, state))
        self.assertEqual(before, views.get(self.database, lease['id']))
        self.assertEqual('one', self.host_of(server_id))

    def test_a_server_without_a_lease_is_nobodys_business(self):
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

    def test_a_booking_follows_even_where_there_is_no_room(self):
        two = self.host('two', usage={'VCPU': 1}, VCPU=1)
        server_id, = base.servers_of(self.lease(0, 100))
        self.see(server_id, State.RUNNING, two)
        self.assertEqual('two', self.host_of(server_id))

    def together(self, amount, count, **capacity):
        """Servers of a reservation that run on one host, and another host.

        :returns: the reservation's id, the servers, and the other's uuid
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

    def test_free_places_go_along_with_the_one_that_is_alone(self):
        reservation_id, (server_id,), two = self.together(3, 1, VCPU=3)
        self.see(server_id, State.RUNNING, two)
        self.assertEqual(['two'] * 3, self.hosts_of(reservation_id))

    def test_free_places_go_along_with_the_last_one(self):
        reservation_id, server_ids, two = self.together(3, 2, VCPU=3)
        self.see(server_ids[0], State.RUNNING, two)
        self.assertEqual(['big', 'big', 'two'], self.hosts_of(reservation_id))
        self.see(server_ids[1], State.RUNNING, two)
        self.assertEqual(['two'] * 3, self.hosts_of(reservation_id))

    def test_free_places_without_room_stay_where_they_are_promised(self):
        reservation_id, (server_id,), two = self.together(3, 1, VCPU=2)
        self.see(server_id, State.RUNNING, two)
        self.assertEqual(['big', 'two', 'two'], self.hosts_of(reservation_id))

    def test_free_places_that_are_to_be_apart_stay(self):
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

    def test_a_booking_stays_where_it_is_if_the_host_is_not_known(self):
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertEqual(
            [], self.see(server_id, State.RUNNING, 'unheard of'))
        self.assertEqual('one', self.host_of(server_id))
        self.assertTrue(self.booking(server_id).running)

    def test_check_looks_and_makes_the_books_true(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        seen = self.cloud.servers[server_id] = Seen(State.RUNNING, self.one)
        self.assertEqual(
            (seen, []), self.lifecycle.reconciliation.check(server_id))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_the_servers_of_leases_that_are_not_over_are_unfinished(self):
        over = self.running_lease()
        running = self.running_lease()
        self.see(*base.servers_of(over), State.GONE)
        held = self.lease(50, 100)
        self.assertEqual({
            **dict.fromkeys(base.servers_of(running),
                            Seen(State.RUNNING, self.uuid_of('one'))),
            **dict.fromkeys(base.servers_of(held), Seen(State.HELD))},
            self.lifecycle.reconciliation.unfinished())


class TestLeftBehind(LifecycleTestCase):
    """Whoever changes a lease while it is found what its server still has.
    """

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
            inventory.report(
                session, NOW, model.HostFacts(
                    self.one, 'one', 'one', {'VCPU': 2}),
                {one: {'VCPU': 1} for one in server_ids},
                inventory.generations(session, [self.one])[self.one])

    def test_it_is_looked_at_again(self):
        lease = self.lease(0, 100, count=2)
        failed, other = base.servers_of(lease)
        # A decision about the same host would be seen by that.
        self.see(other, State.RUNNING, self.host('two', VCPU=2))
        self.see(failed, State.ERROR, self.one, 'The host has died.')

        def extend(end):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + end))

        # MariaDB shows what was true at first; PostgreSQL refuses by itself.
        self.assertRaises(
            (api.LostRace, sa.exc.DBAPIError, db_exception.DBError),
            self.compare, failed, meanwhile=lambda: extend(5000))
        self.assertIsNone(self.host_of(failed))
        self.compare(failed)
        self.assertEqual(('one', NOW + 5000), (
            self.host_of(failed), self.booking(failed).end_date))
        self.assertRaises(
            (api.LostRace, sa.exc.DBAPIError, db_exception.DBError),
            self.compare, meanwhile=lambda: extend(4000))
        self.compare()
        self.assertEqual((None, 3), (self.host_of(failed), self.room()))

    def test_it_waits_for_whoever_has_its_lease(self):
        """He has read that its booking has no host, and goes by that."""
        lease = self.lease(0, 100)
        failed, = base.servers_of(lease)
        self.see(failed, State.ERROR, self.one, 'The host has died.')
        lost = []

        def compare():
            try:
                self.compare(failed)
            except (api.LostRace, sa.exc.DBAPIError,
                    db_exception.DBError) as exc:
                lost.append(exc)

        with self.database.writer() as session:
            api.locked(session, lease['id'])
            booking = lease_status.booking_of(session, failed)
            thread = self.books.meanwhile(compare)
            ledger.amend(session, NOW, [ledger.Edit(booking, ledger.new_of(
                booking, window=model.Window(NOW, NOW + 5000)))])
        thread.join()
        self.assertEqual(1, len(lost))
        self.assertEqual((None, NOW + 5000), (
            self.host_of(failed), self.booking(failed).end_date))


class TestFailure(LifecycleTestCase):

    def test_a_server_that_cannot_be_built_gives_back_its_room(self):
        lease = self.lease(0, 100, count=2)
        self.assertEqual(0, self.room())
        server_id = base.servers_of(lease)[0]
        self.see(server_id, State.ERROR, fault='No valid host')
        self.assertEqual(1, self.room())
        self.assertIsNone(self.host_of(server_id))

    def test_what_the_cloud_keeps_for_it_ends_with_its_lease(self):
        """A nova-compute that died over its build has its allocation."""
        lease = self.lease(0, 100, count=2)
        server_id, other = base.servers_of(lease)
        self.see(other, State.RUNNING, self.one)
        self.see(server_id, State.ERROR, self.one, 'The host has died.')

        def report(**runs):
            with self.database.writer() as session:
                inventory.report(
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
            listed, = views.page(self.database, views.Query())[0]
            self.assertEqual((True, [reservation]), (
                reservation['missing_resources'], listed['reservations']))
        # It has an end, and others may come after it.
        driven.withdraw(self.leases, self.lease(100, 200, count=2)['id'])
        # As soon as it is free it is for others.
        report(ran=other)
        self.assertIsNone(self.host_of(server_id))
        self.assertEqual(1, self.room())
        # It may be booked for somebody else by then, and is so no more.
        report(ran=other, failed=server_id)
        self.see(server_id, State.GONE)
        report(ran=other)
        self.assertEqual(({}, 1), (usage(), self.room()))

    def test_its_lease_fails_and_says_why(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.see(server_id, State.ERROR, fault='No valid host')
        described = views.get(self.database, lease['id'])
        self.assertEqual('ERROR', described['status'])
        for part in (server_id, 'No valid host'):
            self.assertIn(part, described['status_reason'])
        self.assertEqual('error', described['reservations'][0]['status'])
        self.assertEqual([('lease.update', lease['id'])], self.notified)

    def test_a_failure_that_is_seen_again_is_told_once(self):
        lease = self.lease(0, 100)
        for _time in range(2):
            self.see(*base.servers_of(lease), State.ERROR)
        self.assertEqual(1, len(self.notified))

    def test_a_server_that_ran_before_has_a_fault_of_its_own(self):
        lease = self.running_lease()
        self.see(*base.servers_of(lease), State.ERROR, self.one)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual('one', self.host_of(*base.servers_of(lease)))

    def test_one_failure_does_not_end_the_other_servers(self):
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
        # What is left of it is a lease like others.
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

    def test_a_lease_that_failed_comes_to_its_end_too(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.lifecycle.reconciliation.check(server_id)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([server_id], self.cloud.deleted)

    def test_a_lease_that_could_not_be_sent_fails_and_gives_back_room(self):
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

    def test_a_lease_that_was_given_up_is_not_sent_any_more(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual([], self.cloud.sent)

    def test_a_lease_that_has_started_cannot_be_given_up(self):
        lease = self.running_lease()
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual('ACTIVE', self.status(lease))

    def test_an_announcement_that_failed_does_not_fail_its_lease(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'before_end_lease')
        self.assertEqual('PENDING', self.status(lease))


class TestNotPlaced(LifecycleTestCase):
    """Nova has no host or no quota just then."""

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

    def test_it_keeps_its_room_and_is_sent_again_within_its_time(self):
        lease = self.sent()
        self.database.retried(self.done, lease)
        server_id, = base.servers_of(lease)
        self.fail(server_id)
        self.assertEqual(('STARTING', 'one'),
                         (self.status(lease), self.host_of(server_id)))
        for part in (server_id, 'No valid host'):
            self.assertIn(part, self.reason(lease))
        event = self.start_event(lease)
        self.assertEqual(('UNDONE', NOW + 50 + retries.AWAY),
                         (event.status, event.run_at))
        # Seen once more, it is nothing new.
        self.fail(server_id)
        self.clock.advance(retries.AWAY)
        self.start(lease)
        self.assertEqual(2, len(self.cloud.sent))
        self.assertEqual(['lease.event.start_lease'], self.events_told())
        self.see(server_id, State.RUNNING, self.one)
        self.assertEqual(('ACTIVE', ''),
                         (self.status(lease), self.reason(lease)))

    def test_one_of_which_another_failed_waits_for_no_server_that_is_gone(
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

    def test_what_broke_first_is_said_when_others_are_sent_again(self):
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

    def test_it_is_not_said_any_more_of_what_has_gone_that_it_failed(self):
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

    def test_one_that_ends_waits_for_no_host(self):
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

    def test_the_pauses_grow_up_to_some_minutes(self):
        lease = self.sent()
        pauses = []
        for _time in range(40):
            now = self.clock.now()
            self.fail(*base.servers_of(lease))
            pauses.append(self.start_event(lease).run_at - now)
            self.clock.advance(pauses[-1])
            self.start(lease)
        self.assertEqual(sorted(pauses), pauses)
        self.assertEqual((retries.AWAY, retries.LONGEST_PAUSE),
                         (pauses[0], pauses[-1]))
        self.assertEqual(41, len(self.cloud.sent))

    def test_the_others_are_waited_for_before_it_is_sent_again(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.fail(first)
        self.assertIsInstance(self.start(lease), retries.RetryAfter)
        self.assertEqual(1, len(self.cloud.sent))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual('STARTING', self.status(lease))
        self.start(lease)
        self.assertEqual(('call', [first]), self.cloud.sent[-1])

    def test_what_was_seen_before_it_was_sent_again_is_old(self):
        """Who looked stands still; others see it, and send it once more."""
        lease = self.sent()
        server_id, = base.servers_of(lease)
        failed = Seen(State.ERROR, fault='No valid host', unplaced=True)
        self.cloud.servers[server_id] = failed

        def look(_server_id):
            self.fail(server_id)
            self.clock.advance(retries.AWAY)
            self.start(lease)
            return failed

        with fixtures.MockPatchObject(self.cloud, 'look', look):
            self.lifecycle.reconciliation.check(server_id)
        self.assertEqual(
            self.clock.now(), self.booking(server_id).dispatched_at)
        self.clock.advance(retries.LONGEST_PAUSE)
        self.start(lease)
        self.assertEqual(2, len(self.cloud.sent))

    def test_at_its_end_it_is_deleted(self):
        lease = self.sent(end=100)
        server_id, = base.servers_of(lease)
        self.fail(server_id)
        self.clock.advance(50)
        self.assertIsNone(self.start(lease))
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual([server_id], self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_one_that_waits_may_be_deleted(self):
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.fail(first)
        self.see(second, State.RUNNING, self.one)
        self.see(first, State.GONE)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_a_lease_from_now_has_nothing_to_send_and_fails(self):
        lease = self.lease(0, 100)
        self.fail(*base.servers_of(lease))
        self.assertEqual('ERROR', self.status(lease))

    def test_as_many_are_sent_as_the_quota_admits(self):
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

    def test_a_quota_that_admits_none_leaves_the_lease_pending(self):
        self.cloud.admits = 0
        lease = self.lease(50, 100)
        self.clock.advance(50)
        later = self.start(lease)
        self.assertEqual((retries.AWAY, 'The quota admits 0.'),
                         (later.seconds, later.why))
        self.assertEqual('PENDING', self.status(lease))
        self.assertIn('The quota admits 0.', self.reason(lease))
        self.assertEqual([], self.cloud.sent)

    def test_given_up_the_others_run_on(self):
        self.cloud.admits = 1
        lease = self.sent(count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.RUNNING, self.one)
        self.cloud.broken['send'] = errors.TrustUnavailable('He was disabled.')
        self.start(lease)
        self.assertEqual(('ACTIVE', 'He was disabled.'),
                         (self.status(lease), self.reason(lease)))
        self.assertIsNone(self.host_of(second))
        self.assertEqual([], self.scalars(models.HeldBuild.lease_id))


class TestSettledAgain(LifecycleTestCase):
    """Who should have brought a lease into its state died over it."""

    def test_one_whose_servers_all_run_is_active(self):
        lease = self.running_lease(0, 100)
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(status='STARTING'))
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual('ACTIVE', self.status(lease))

    def test_one_without_servers_is_over(self):
        for status in ('PENDING', 'STARTING', 'ACTIVE', 'ERROR'):
            lease = self.lease(50, 100)
            with self.database.writer() as session:
                session.execute(sa.update(models.Lease).where(
                    models.Lease.id == lease['id']).values(status=status))
                session.execute(sa.delete(models.Booking))
            self.lifecycle.reconciliation.settle_left()
            self.assertEqual('TERMINATED', self.status(lease), status)

    def test_others_are_left_alone(self):
        self.host('two', VCPU=2)
        leases = [self.lease(0, 100), self.lease(50, 100),
                  self.reserve(0, 100, active=True)]
        before = list(map(self.status, leases))
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual(before, list(map(self.status, leases)))


class TestSettled(LifecycleTestCase):
    """The state of a lease follows from what is left of it."""

    def kept(self):
        return self.scalars(models.HeldBuild.lease_id)

    def test_the_sealed_call_is_kept_until_all_servers_run(self):
        lease = self.lease(50, 100, count=2)
        first, second = base.servers_of(lease)
        self.lifecycle.lease_start.start(lease['id'])
        self.see(first, State.RUNNING, self.one)
        self.assertEqual([lease['id']], self.kept())
        self.see(second, State.RUNNING, self.one)
        self.assertEqual([], self.kept())

    def test_it_is_not_kept_for_servers_that_failed(self):
        lease = self.lease(50, 100)
        self.lifecycle.lease_start.start(lease['id'])
        self.see(*base.servers_of(lease), State.ERROR)
        self.assertEqual(('ERROR', []), (self.status(lease), self.kept()))

    def test_a_server_that_is_deleted_while_it_builds_is_waited_for_no_more(
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

    def test_all_that_failed_make_a_lease_one_that_has_failed(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.ERROR)
        self.assertEqual('STARTING', self.status(lease))
        self.see(second, State.ERROR)
        self.assertEqual('ERROR', self.status(lease))


class TestCredentials(LifecycleTestCase):
    """What lets us act for the user, from the admission to the end."""

    def held(self, **wanted):
        return self.lease(50, 100, credential='trust', **wanted)

    def kept(self):
        return self.scalars(models.Credential.lease_id)

    def test_a_call_is_sent_with_what_was_given_for_it(self):
        lease, plain = self.held(), self.lease(50, 100)
        self.lifecycle.lease_start.start(plain['id'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([None, 'trust'], self.cloud.sent_with)
        self.assertEqual([lease['id']], self.kept())

    def test_a_user_who_may_not_any_more_gets_an_error_and_no_servers(self):
        self.report(self.uuid_of('one'), 'one', None, {'VCPU': 1})
        lease = self.held()
        self.cloud.broken['send'] = errors.TrustUnavailable('He was disabled.')
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('ERROR', self.status(lease))
        self.assertEqual('He was disabled.',
                         views.get(self.database,
                                   lease['id'])['status_reason'])
        self.assertEqual([('lease.update', lease['id'])], self.notified)
        # What was booked is free again.
        self.lease(50, 100)

    def test_it_is_given_back_when_the_lease_is_over(self):
        lease = self.held()
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(['trust'], self.cloud.revoked)

    def test_it_is_given_back_later_when_that_fails(self):
        lease = self.held()
        self.cloud.broken['revoke'] = RuntimeError('keystone is away')
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([lease['id']], self.kept())
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual([lease['id']], self.kept())
        self.cloud.broken.clear()
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))

    def test_one_that_cannot_be_given_back_keeps_no_other_from_it(self):
        lease = self.held()
        self.replace_credential(lease['id'], 'another')
        revoke = self.cloud.revoke

        def some(credential: str) -> None:
            if credential == 'another':
                raise RuntimeError('keystone does not know it')
            revoke(credential)

        with mock.patch.object(self.cloud, 'revoke', some):
            self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['trust'], [lease['id']]),
                         (self.cloud.revoked, self.kept()))
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust', 'another', 'trust'], []),
                         (self.cloud.revoked, self.kept()))

    def test_that_of_a_lease_that_was_withdrawn_is_given_back(self):
        driven.withdraw(self.leases, self.held()['id'])
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))

    def test_it_is_kept_while_the_lease_may_need_it(self):
        self.host('two', VCPU=1)
        leases = [self.held(), self.held(), self.held()]
        self.lifecycle.lease_start.start(leases[1]['id'])
        self.cloud.broken['send'] = errors.TrustUnavailable('no')
        self.lifecycle.lease_start.start(leases[2]['id'])
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual(([], 3), (self.cloud.revoked, len(self.kept())))

    def test_servers_are_deleted_with_it(self):
        lease = self.running_lease(0, 100, credential='trust')
        plain = self.running_lease(0, 100)
        for one in lease, plain:
            self.lifecycle.lease_end.end(one['id'])
        self.assertEqual(['trust', None], self.cloud.deleted_with)
        self.assertEqual(['trust'], self.cloud.revoked)

    def test_it_is_not_given_back_before_the_servers_are_gone(self):
        lease = self.running_lease(0, 100, credential='trust')
        self.cloud.stubborn.update(base.servers_of(lease))
        for _time in range(2):
            self.assertEqual(retries.AGAIN, self.lifecycle.lease_end.end(
                lease['id']).seconds)
        self.assertEqual((['trust', 'trust'], []),
                         (self.cloud.deleted_with, self.cloud.revoked))

    def test_an_end_is_tried_again_when_it_cannot_be_used_yet(self):
        lease = self.running_lease(0, 100, credential='trust')
        self.cloud.broken['delete'] = errors.CloudUnavailable('away')
        self.assertEqual(retries.AGAIN,
                         self.lifecycle.lease_end.end(lease['id']).seconds)
        self.assertEqual('TERMINATING', self.status(lease))
        self.cloud.broken.clear()
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))

    def test_one_that_does_not_open_any_more_keeps_no_lease_from_its_end(
            self):
        lease = self.running_lease(0, 100, credential='trust')
        with self.database.writer() as session:
            session.get(models.Credential, lease['id']).sealed = 'other key'
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([None], self.cloud.deleted_with)

    def test_a_lease_may_get_one_later_and_another_one_then(self):
        lease = self.running_lease(0, 100)
        first, second = map(self.encryption.seal, ('first', 'second'))
        self.assertEqual(
            [], self.leases.credentials.store(lease['id'], first))
        self.assertEqual(
            [first], self.leases.credentials.store(lease['id'], second))
        self.assertEqual([lease['id']], self.kept())
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['second'], ['second']),
                         (self.cloud.deleted_with, self.cloud.revoked))

    def entrust(self, lease, text):
        """Replace it; returns which can be revoked now."""
        return list(map(self.encryption.open, self.leases.credentials.store(
            lease['id'], self.encryption.seal(text))))

    def test_before_a_start_none_of_those_replaced_is_kept(self):
        lease = self.held()
        self.clock.advance(49)
        self.assertEqual([['trust'], ['1'], ['2']], [
            self.entrust(lease, str(number)) for number in (1, 2, 3)])
        self.clock.advance(1)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['3'], self.cloud.sent_with)

    def test_those_with_which_builds_were_sent_are_kept(self):
        lease = self.held(count=2)
        self.cloud.admits = 1
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([[], ['1'], ['2']], [
            self.entrust(lease, str(number)) for number in (1, 2, 3)])
        self.clock.advance(10)
        self.see(self.cloud.sent[0][1][0], State.RUNNING, self.one)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['trust', '3'], self.cloud.sent_with)
        self.assertEqual([[], ['4'], ['5']], [
            self.entrust(lease, str(number)) for number in (4, 5, 6)])
        self.lifecycle.lease_end.end(lease['id'])
        for server_id in base.servers_of(lease):
            self.see(server_id, State.GONE)
        self.assertEqual({'trust', '3', '6'}, {*self.cloud.revoked})

    def test_however_many_there_were_a_few_are_kept(self):
        lease = self.held()
        self.clock.advance(50)
        revoked = []
        with self.database.writer() as session:
            session.get(models.Lease, lease['id']).status = 'STARTING'
        for number in range(300):
            # Each is sent with, and found to have come to nothing.
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).values(
                    dispatched_at=self.clock.now()))
            self.clock.advance(10)
            revoked += self.entrust(lease, str(number))
        self.assertEqual(['trust', *map(str, range(291))], revoked)
        row, = self.scalars(models.Credential)
        self.assertEqual([str(number) for number in range(299, 290, -1)], list(
            map(self.encryption.open, credentials.all_of(row))))

    def test_a_build_is_not_sent_with_one_that_was_replaced(self):
        lease = self.held()
        self.clock.advance(50)
        send = self.cloud.send

        def late(call, credential, server_ids, gate):
            if credential == 'trust':
                self.assertEqual(['trust'], self.entrust(lease, 'another'))
            return send(call, credential, server_ids, gate)

        with mock.patch.object(self.cloud, 'send', late):
            self.assertIsNotNone(self.lifecycle.lease_start.start(lease['id']))
            self.assertEqual([], self.cloud.sent)
            self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual((['trust', 'another'], 1), (
            self.cloud.sent_with, len(self.cloud.sent)))

    def test_nor_is_one_that_got_lost(self):
        lease = self.held()
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        server_id, = base.servers_of(lease)
        with self.database.reader() as session:
            sealed = dispatch.encrypted_call(
                session, [lease['id']])[lease['id']]
        self.entrust(lease, 'another')
        again = {server_id: self.clock.now()}
        self.lifecycle.dispatch.send_again(lease['id'], sealed, again)
        self.assertEqual(1, len(self.cloud.sent))
        with self.database.reader() as session:
            sealed = dispatch.encrypted_call(
                session, [lease['id']])[lease['id']]
        self.lifecycle.dispatch.send_again(lease['id'], sealed, again)
        self.assertEqual(2, len(self.cloud.sent))

    def test_one_that_comes_when_the_lease_is_over_is_given_back(self):
        lease = self.running_lease(0, 100)
        self.lifecycle.lease_end.end(lease['id'])
        self.leases.credentials.store(
            lease['id'], self.encryption.seal('late'))
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['late'], []), (self.cloud.revoked, self.kept()))
        driven.withdraw(self.leases, lease['id'])
        self.assertRaises(
            errors.NotFound, self.leases.credentials.store, lease['id'],
            self.encryption.seal('later'))

    def test_what_no_lease_has_is_found(self):
        self.assertEqual(set(), self.lifecycle.lease_close.strays())
        self.held()
        self.cloud.given = {'trust', 'stray'}
        self.assertEqual({'stray'}, self.lifecycle.lease_close.strays())


class TestLostBuilds(LifecycleTestCase):
    """Sent, and never seen again: its worker or the bus died just then."""

    def sent(self):
        lease = self.lease(50, 1000)
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        self.miss(lease)
        return lease

    def miss(self, lease, trace=cloud_api.BuildTrace.NONE):
        self.cloud.stranded = dict.fromkeys(base.servers_of(lease), trace)

    def look_after(self, *pauses):
        for pause in pauses:
            self.clock.advance(pause)
            self.lifecycle.lost_builds.send()
        return len(self.cloud.sent)

    def test_it_is_sent_again_when_it_is_missing_for_long_enough(self):
        self.sent()
        self.assertEqual(1, self.look_after(10, 100, 19))
        self.assertEqual(2, self.look_after(1))
        self.assertEqual(*self.cloud.sent)

    def sent_by_a_clock(self, ahead):
        self.sent()
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).values(
                dispatched_at=self.clock.now() + ahead))
        self.assertEqual(1, self.look_after(0, 119))
        self.assertEqual(2, self.look_after(1))

    def test_it_is_so_when_a_clock_was_ahead_that_said_when(self):
        self.sent_by_a_clock(3600)

    def test_it_is_so_when_one_was_behind(self):
        self.sent_by_a_clock(-3600)

    def test_a_step_of_the_clock_makes_nothing_lost(self):
        self.sent()
        self.look_after(0)
        self.clock.step(3600)
        self.assertEqual(1, self.look_after(119))
        self.clock.step(-3600)
        self.assertEqual(2, self.look_after(1))
        self.assertEqual(2, self.look_after(119))

    def test_what_was_missed_for_the_first_time_is_not_sent_yet(self):
        """It may have arrived just before that."""
        self.sent()
        self.assertEqual(1, self.look_after(10_000))

    def test_sent_again_it_is_given_time_again(self):
        self.sent()
        self.assertEqual(2, self.look_after(0, 120, 119))
        self.assertEqual(3, self.look_after(1))

    def test_what_arrived_is_not_sent_again(self):
        self.sent()
        self.look_after(0)
        self.cloud.stranded.clear()
        self.assertEqual(1, self.look_after(300, 300))

    def test_what_arrived_in_between_is_missed_anew(self):
        lease = self.sent()
        self.look_after(0)
        self.cloud.stranded.clear()
        self.look_after(119)
        self.miss(lease)
        self.assertEqual(1, self.look_after(1, 119))
        self.assertEqual(2, self.look_after(1))

    def test_a_lease_that_is_over_is_let_be(self):
        lease = self.sent()
        self.look_after(0)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(1, self.look_after(300))

    def test_two_who_miss_it_send_it_once(self):
        lease = self.sent()
        self.look_after(0)
        gates = []

        def send(*args):
            gates.append(args[-1])
            return ''

        self.cloud.send = send
        other = self.new_handlers(self.books.connect())
        other.lost_builds.send()
        self.look_after(120)
        other.lost_builds.send()
        self.assertEqual([True, False], [
            gate(base.servers_of(lease)) is not None for gate in gates])

    def test_who_cannot_be_asked_is_not_taken_for_dead(self):
        self.sent()
        self.look_after(0)
        self.cloud.broken['traces'] = errors.CloudUnavailable('away')
        self.assertEqual(1, self.look_after(300))
        self.cloud.broken.clear()
        # It is missed from now on.
        self.assertEqual(1, self.look_after(0, 119))
        self.assertEqual(2, self.look_after(1))

    def test_what_stands_still_is_abandoned_and_never_sent_again(self):
        lease = self.sent()
        server_id, = base.servers_of(lease)
        self.miss(lease, cloud_api.BuildTrace.CAUGHT)
        self.look_after(0, 119)
        self.assertEqual([], self.cloud.abandoned)
        self.assertEqual(1, self.look_after(1, 300, 300))
        self.assertEqual([server_id], self.cloud.abandoned)
        self.assertEqual('ERROR', self.status(lease))
        self.assertIsNone(self.host_of(server_id))

    def test_what_was_caught_late_is_given_its_time_from_then_on(self):
        lease = self.sent()
        self.look_after(0, 119)
        self.miss(lease, cloud_api.BuildTrace.CAUGHT)
        self.assertEqual(1, self.look_after(1, 119))
        self.assertEqual([], self.cloud.abandoned)
        self.look_after(1)
        self.assertEqual(1, len(self.cloud.abandoned))

    def test_a_lost_build_whose_call_is_not_kept_is_abandoned(self):
        """That of a server with a reservation slot."""
        server_id, = self.take_slots(self.reserve(0, 1000, active=True))
        self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
        self.look_after(0, 120)
        self.assertEqual(([server_id], []),
                         (self.cloud.abandoned, self.cloud.sent))


class _RolledBack(Exception):
    """Ends a transaction whose commit has not reached the database."""


class TestFromNowOn(LifecycleTestCase):
    """A lease from now on, whose request sends its build itself."""

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.cast = []
        self.new = self.new_lease(0, 1000, count=2)
        self.made = self.leases.creation.create(
            self.new, self.encryption.seal('call'), dispatch.HEAD_START)

    def cast_it(self, gate):
        deadline = gate(self.new.server_ids)
        if deadline is not None and not deadline.passed():
            self.cast.append(sorted(self.new.server_ids))

    def send(self, cast=None):
        self.lifecycle.dispatch.send_own(self.made, cast or self.cast_it)

    def listen(self):
        """What a listener does when it is its turn."""
        self.clock.advance(dispatch.HEAD_START)
        driven.run_due(self.engine)

    def sent(self):
        return [*self.cast, *(sorted(servers)
                              for _call, servers in self.cloud.sent)]

    def assert_sent_once(self):
        self.listen()
        self.listen()
        self.assertEqual([sorted(self.new.server_ids)], self.sent())
        described = views.get(self.database, self.made['id'])
        self.assertEqual('STARTING', described['status'])
        self.assertEqual('DONE', self.events_of(self.made)['start_lease'])

    def test_it_is_sent_by_its_request(self):
        self.send()
        self.assertEqual(1, len(self.cast))
        self.assertEqual(self.made, views.get(
            self.database, self.made['id']))
        self.assert_sent_once()

    def test_a_listener_leaves_it_to_its_request_for_a_while(self):
        self.clock.advance(dispatch.HEAD_START - 1)
        driven.run_due(self.engine)
        self.assertEqual([], self.sent())
        self.send()
        self.assert_sent_once()

    def test_one_whose_request_died_is_sent_by_a_listener(self):
        self.assertEqual('PENDING', self.status(self.made))
        self.assert_sent_once()
        self.assertEqual([], self.cast)
        self.assertIn(('lease.event.start_lease', self.made['id']),
                      self.notified)

    def test_a_request_that_comes_after_a_listener_sends_nothing(self):
        self.listen()
        self.send()
        self.assertEqual([], self.cast)
        self.assertEqual('PENDING', self.made['status'])
        self.assert_sent_once()

    def test_a_request_that_stood_still_with_the_permit_sends_nothing(self):
        """It is found as one that got lost, and sent once."""
        def stand_still(gate):
            deadline = gate(self.new.server_ids)
            for server_id in self.new.server_ids:
                self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
            self.lifecycle.lost_builds.send()
            self.clock.advance(base.LOST_AFTER)
            self.lifecycle.lost_builds.send()
            self.assertTrue(deadline.passed())

        self.send(stand_still)
        self.assert_sent_once()

    def lose_answers(self, count, committed=True, step=0):
        """Have the answers to commits be lost, a second after each other."""
        begin, lost = self.database.begin, []

        @contextlib.contextmanager
        def losing():
            with contextlib.suppress(_RolledBack), begin() as connection:
                yield connection
                if not committed and len(lost) < count:
                    raise _RolledBack
            if len(lost) < count:
                lost.append(self.clock.advance(1))
                self.clock.step(step)
                raise errors.OutcomeUnknown

        return mock.patch.object(self.database, 'begin', losing)

    def test_one_whose_commit_was_not_answered_is_sent_by_its_request(self):
        with self.lose_answers(3):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.assertEqual(self.made, views.get(
            self.database, self.made['id']))
        self.assert_sent_once()

    def test_one_whose_commit_was_lost_is_sent_by_its_request(self):
        with self.lose_answers(3, committed=False):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.assert_sent_once()

    def test_so_is_one_while_the_clock_is_put_back(self):
        self.useFixture(fixtures.Timeout(20, gentle=True))
        with self.lose_answers(1, step=-3600):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.clock.step(3600)
        self.assert_sent_once()

    def losing(self, send):
        """Have answers to the commits of a listener's permits be lost."""
        def lost(transaction):
            @contextlib.contextmanager
            def losing():
                with transaction() as subject:
                    yield subject
                if len(answers) < 3:
                    answers.append(self.clock.advance(1))
                    raise errors.OutcomeUnknown
            return losing

        answers, given = [], self.cloud.send

        def late(call, credential, server_ids, gate):
            def unanswered(chosen):
                with (mock.patch.object(self.database, 'begin', lost(
                        self.database.begin)),
                      mock.patch.object(self.database, 'writer', lost(
                          self.database.writer))):
                    return gate(chosen)

            return given(call, credential, server_ids, unanswered)

        with mock.patch.object(self.cloud, 'send', late):
            send()
        self.assertEqual(3, len(answers))

    def test_a_listener_whose_commit_was_not_answered_sends_it(self):
        self.losing(self.listen)
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual(1, self.notified.count(
            ('lease.event.start_lease', self.made['id'])))
        self.assert_sent_once()

    def test_so_does_one_that_sends_again_what_got_lost(self):
        self.listen()
        self.cloud.sent.clear()
        for server_id in self.new.server_ids:
            self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
        self.lifecycle.lost_builds.send()
        self.clock.advance(base.LOST_AFTER)
        self.losing(self.lifecycle.lost_builds.send)
        self.assert_sent_once()

    def test_a_listener_that_was_faster_than_an_answer(self):
        """It has sent what the request could not write."""
        begin = self.database.begin

        @contextlib.contextmanager
        def lost():
            with contextlib.suppress(_RolledBack), begin() as connection:
                yield connection
                raise _RolledBack
            self.database.begin = begin
            self.listen()
            raise errors.OutcomeUnknown

        self.database.begin = lost
        self.send()
        self.assertEqual([], self.cast)
        self.assert_sent_once()

    def test_when_no_commit_is_answered_the_log_says_that_it_is_not_known(
            self):
        log = self.useFixture(fixtures.FakeLogger())
        with self.lose_answers(100):
            self.send()
        self.assertEqual([], self.cast)
        self.assertIn('it is not known whether its build was sent',
                      log.output)
        self.assertNotIn('its build was not sent', log.output)

    def test_whatever_fails_behind_the_cast_undoes_nothing(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        for failure in (ValueError(), db_exception.DBError(),
                        errors.CloudUnavailable('away'),
                        errors.InvalidLeaseParams('no')):
            self.made = self.leases.creation.create(
                self.new_lease(0, 1000, resources={'VCPU': 0}),
                self.encryption.seal('call'), dispatch.HEAD_START)
            server_ids = base.servers_of(self.made)

            def cast(gate, failure=failure, server_ids=server_ids):
                self.assertIsNotNone(gate(server_ids))
                raise failure

            self.send(cast)
            self.assertEqual('STARTING', self.made['status'])
            self.assertEqual(self.made, views.get(
                self.database, self.made['id']))
            for server_id in server_ids:
                self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
            self.listen()
            self.assertEqual([], self.sent())
            self.lifecycle.lost_builds.send()
            self.clock.advance(base.LOST_AFTER)
            self.lifecycle.lost_builds.send()
            self.assertEqual([sorted(server_ids)], self.sent())
            self.cloud.stranded.clear()
            self.cloud.sent.clear()

    def test_a_lease_that_has_ended_meanwhile_is_not_sent(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        self.send()
        self.listen()
        self.assertEqual([], self.sent())

    def test_one_that_could_not_be_taken_is_sent_by_a_listener(self):
        with fixtures.MonkeyPatch(
                'blazar_core.lifecycle.dispatch.Dispatch._take_own',
                mock.Mock(side_effect=errors.DatabaseUnavailable())):
            self.send()
        self.assertEqual([], self.cast)
        self.assert_sent_once()

    def test_of_several_who_try_together_one_sends_it(self):
        """The request, and listeners that believe it died."""
        self.clock.advance(dispatch.HEAD_START)
        others = [threading.Thread(
            target=self.lifecycle.lease_start.start, args=(self.made['id'],))
            for _number in range(3)]
        own = threading.Thread(target=self.send)
        for thread in (*others, own):
            thread.start()
        for thread in (*others, own):
            thread.join(60)
        self.assert_sent_once()

    def test_a_build_without_a_host_has_failed(self):
        self.send()
        for server_id in self.new.server_ids:
            self.lifecycle.reconciliation.observe(server_id, Seen(
                State.ERROR, None, 'No valid host', unplaced=True))
        self.assertEqual('ERROR', self.status(self.made))
        self.assertEqual([], self.scalars(models.HeldBuild))

    def test_the_call_is_kept_until_all_of_it_runs(self):
        self.send()
        first, second = self.new.server_ids
        self.see(first, State.RUNNING, self.one)
        self.assertEqual(1, len(self.scalars(models.HeldBuild)))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual([], self.scalars(models.HeldBuild))
        self.assertEqual('ACTIVE', self.status(self.made))


class TestEnd(LifecycleTestCase):

    def test_the_servers_are_deleted_and_the_lease_is_over(self):
        lease = self.running_lease(count=2)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual(sorted(base.servers_of(lease)),
                         sorted(self.cloud.deleted))
        described = views.get(self.database, lease['id'])
        self.assertEqual('TERMINATED', described['status'])
        reservation, = described['reservations']
        self.assertEqual(('deleted', []), (
            reservation['status'], reservation['servers']))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(lease))
        self.assertEqual([('lease.event.end_lease', lease['id'])],
                         self.notified)
        self.assertEqual(2, self.room())

    def test_room_comes_back_only_when_a_server_is_gone(self):
        lease = self.running_lease(0, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.cloud.stubborn.update([first, second])
        self.assertIsInstance(
            self.lifecycle.lease_end.end(lease['id']), retries.RetryAfter)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(0, self.room())
        self.assertEqual([], self.notified)
        self.cloud.stubborn.discard(first)
        later = self.lifecycle.lease_end.end(lease['id'])
        self.assertIn(second, later.why)
        self.assertNotIn(first, later.why)
        self.assertEqual(1, self.room())
        self.cloud.stubborn.clear()
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(2, self.room())

    def test_an_end_may_come_twice(self):
        lease = self.running_lease()
        for _time in range(2):
            self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual(1, len(self.cloud.deleted))
        self.assertEqual(['lease.event.end_lease'], self.events_told())

    def test_the_end_of_a_held_lease_forgets_its_secrets(self):
        lease = self.lease(50, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.HELD)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual([], self.scalars(models.HeldBuild.lease_id))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.cloud.sent)

    def test_one_server_that_cannot_be_deleted_does_not_keep_the_others(self):
        for number in range(3):
            lease = self.running_lease(0, 10_000, count=2)
            broken = base.servers_of(lease)[number % 2]
            self.cloud.broken = {broken: RuntimeError('its cell is down')}
            later = self.lifecycle.lease_end.end(lease['id'])
            self.assertIn(broken, later.why)
            self.assertEqual('TERMINATING', self.status(lease))
            self.assertEqual(1, self.room())
            self.cloud.broken = {}
            self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
            self.assertEqual('TERMINATED', self.status(lease))

    def test_a_lease_ends_with_the_last_server_that_the_user_deletes(self):
        lease = self.running_lease(0, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.GONE)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, self.room())
        self.see(second, State.GONE)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(2, self.room())
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual(['lease.event.end_lease'], self.events_told())

    def test_a_held_lease_ends_with_its_servers_too(self):
        lease = self.lease(50, 100)
        self.see(*base.servers_of(lease), State.GONE)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.scalars(models.HeldBuild.lease_id))
        # It never began: what did not happen is not told of.
        self.assertEqual({'end_lease': 'DONE'}, self.events_of(lease))
        described = views.get(self.database, lease['id'])
        self.assertEqual((NOW + 50, NOW + 50, NOW), (
            described['start_date'], described['end_date'],
            described['events'][0]['time']))

    def test_one_that_is_over_early_says_when_it_was(self):
        lease = self.running_lease(request=self.request(
            0, 10_000, before_end=NOW + 9000))
        self.clock.advance(100)
        self.see(*base.servers_of(lease), State.GONE)
        described = views.get(self.database, lease['id'])
        self.assertEqual(('TERMINATED', NOW, NOW + 100, None), (
            described['status'], described['start_date'],
            described['end_date'], described['before_end_date']))
        self.assertEqual(
            [('start_lease', NOW, 'DONE'), ('end_lease', NOW + 100, 'DONE')],
            [(event['event_type'], event['time'], event['status'])
             for event in described['events']])

    def test_what_was_told_before_that_stays_told(self):
        lease = self.running_lease(request=self.request(
            0, 10_000, before_end=NOW + 50))
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.see(*base.servers_of(lease), State.GONE)
        described = views.get(self.database, lease['id'])
        self.assertEqual(
            (NOW + 50, ['start_lease', 'before_end_lease', 'end_lease']),
            (described['before_end_date'], [
                event['event_type'] for event in described['events']]))

    def test_one_of_whose_servers_some_began_did_start(self):
        lease = self.lease(50, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.clock.advance(50)
        driven.run_due(self.new_engine())
        self.see(first, State.RUNNING, self.one)
        self.lifecycle.reconciliation.observe(second, Seen(
            State.ERROR, fault='No valid host', unplaced=True))
        # It is to be sent again.
        self.assertEqual('UNDONE', self.events_of(lease)['start_lease'])
        for server_id in first, second:
            self.see(server_id, State.GONE)
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(lease))

    def test_one_that_is_over_late_says_when_it_was_to_end(self):
        lease = self.running_lease(request=self.request(
            0, 100, before_end=NOW + 50))
        self.clock.advance(150)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id'], True))
        described = views.get(self.database, lease['id'])
        self.assertEqual(('TERMINATED', NOW + 100, NOW + 50), (
            described['status'], described['end_date'],
            described['before_end_date']))
        self.assertEqual(3, len(described['events']))

    def test_a_server_that_is_gone_is_gone_only_once(self):
        lease = self.running_lease(count=2)
        server_id = base.servers_of(lease)[0]
        self.see(server_id, State.GONE)
        generation = self.generation('one')
        self.see(server_id, State.GONE)
        self.assertEqual(generation, self.generation('one'))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_who_decides_sees_the_room_of_a_server_that_went(self):
        lease = self.running_lease()
        generation = self.generation('one')
        self.see(*base.servers_of(lease), State.GONE)
        self.assertEqual(generation + 1, self.generation('one'))

    def test_a_server_that_still_runs_does_not_make_an_ending_lease_active(
            self):
        lease = self.running_lease()
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.see(*base.servers_of(lease), State.RUNNING, self.one)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_a_server_whose_build_fails_at_the_end_does_not_stop_it(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.cloud.stubborn.add(server_id)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATING', self.status(lease))
        self.cloud.stubborn.clear()
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_an_overstaying_server_keeps_others_from_its_room(self):
        lease = self.running_lease(0, 100, count=2)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.clock.advance(200)
        self.lifecycle.lease_end.end(lease['id'])
        refused = self.assertRaises(errors.Refused, self.lease, 200, 300)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 1, 0, NOW + 260),
            refused.refusal)


class TestWhatIsLeftOfThem(LifecycleTestCase):
    """The cloud keeps records of a server whose build was never sent."""

    def gone(self, *server_ids):
        for server_id in server_ids:
            self.cloud.servers.pop(server_id, None)
            self.lifecycle.reconciliation.check(server_id)

    def test_an_end_that_comes_late_leaves_the_next_lease_its_server(self):
        """A worker that stood still, while what it ended was ended by another
        one, and the next occurrence has begun.
        """
        self.host('one', VCPU=4)
        late, current = (self.running_lease(0, 100) for _lease in range(2))
        server_id, = base.servers_of(current)
        before = self.everything()
        self.assertTrue(self.lifecycle.server_removal.remove_server(
            late['id'], server_id, True))
        self.lifecycle.server_removal.gone(late['id'], server_id)
        after = self.everything()
        self.assertEqual(before['bookings'], after['bookings'])
        self.assertEqual(before['hosts'], after['hosts'])

    def test_nothing_is_left_of_held_servers_that_were_deleted(self):
        held, = base.servers_of(self.lease(50, 100))
        self.gone(held)
        self.assertEqual([held], self.cloud.forgotten)

    def test_nor_when_their_lease_ends(self):
        lease = self.lease(50, 100, count=2)
        held = base.servers_of(lease)
        for server_id in held:
            self.cloud.servers[server_id] = Seen(State.HELD)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(sorted(held), sorted(self.cloud.forgotten))

    def test_what_was_sent_is_let_be(self):
        """Whoever builds it may be at it."""
        sent = self.lease(50, 100)
        self.lifecycle.lease_start.start(sent['id'])
        at_once = self.lease(0, 100)
        self.gone(*base.servers_of(sent), *base.servers_of(at_once))
        self.gone(*self.take_slots(self.reserve(active=True)))
        self.assertEqual([], self.cloud.forgotten)

    def test_what_could_not_be_forgotten_is_forgotten_later(self):
        lease = self.lease(50, 100)
        held, = base.servers_of(lease)
        self.cloud.broken['forget'] = RuntimeError('the database is away')
        self.assertRaises(RuntimeError, self.gone, held)
        self.assertEqual({held},
                         self.lifecycle.reconciliation.unfinished().keys())
        self.assertEqual(retries.AGAIN,
                         self.lifecycle.lease_end.end(lease['id']).seconds)
        self.cloud.broken.clear()
        self.gone(held)
        self.assertEqual([held], self.cloud.forgotten)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_a_place_that_was_left_is_as_new(self):
        lease = self.reserve(active=True)
        self.gone(*self.take_slots(lease))
        self.assertEqual([(None, None)], [
            (row.server_id, row.dispatched_at)
            for row in self.scalars(models.Booking)])


class TestPlaces(LifecycleTestCase):
    """Leases whose servers come later."""

    def runs(self, server_id, host=None):
        self.cloud.servers[server_id] = Seen(State.RUNNING, host or self.one)
        return self.lifecycle.reconciliation.check(server_id)

    def states(self, lease):
        """That of a lease, and those of its reservations."""
        described = views.get(self.database, lease['id'])
        return described['status'], [
            one['status'] for one in described['reservations']]

    def bookings(self, lease):
        return self.scalars(
            models.Booking, models.Booking.reservation_id.in_(
                [one['id'] for one in lease['reservations']]))

    def test_they_are_opened_at_the_start_and_closed_at_the_end(self):
        lease = self.reserve(50, 100, self.places(1, affinity=False),
                             self.places(1))
        self.assertEqual({}, self.places_type.open)
        self.clock.advance(50)
        self.assertIsNone(
            self.lifecycle.lease_start.start(lease['id'], when_due=True))
        first, second = lease['reservations']
        self.assertEqual([
            resource_types.ReservationContext(
                one['id'], lease['id'], 'project', 'user', one['params'],
                {'vcpus': 1}, (self.uuid_of(one_host),),
                services={self.uuid_of(one_host): one_host},
                window=model.Window(NOW + 50, NOW + 100))
            for one, one_host in ((first, 'one'), (second, 'one'))],
            list(self.places_type.open.values()))
        self.assertEqual(('ACTIVE', ['active'] * 2), self.states(lease))
        self.assertEqual(['lease.event.start_lease'], self.events_told())
        self.clock.advance(50)
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual({}, self.places_type.open)
        self.assertEqual(('TERMINATED', ['deleted'] * 2), self.states(lease))
        self.assertEqual(2, self.room())

    def test_they_are_open_before_the_lease_is_active(self):
        """Whoever sees that it is may boot."""
        lease = self.reserve(50, 100)
        seen = []
        self.places_type.start = lambda reserved: seen.append(
            self.status(lease))
        self.lifecycle.lease_start.start(lease['id'])
        self.assertNotIn('ACTIVE', seen)
        self.assertEqual(1, len(seen))

    def test_they_are_closed_before_a_server_is_deleted(self):
        """Nobody takes the place of one that is leaving."""
        lease = self.reserve(active=True)
        self.runs(*self.take_slots(lease))
        opened = []
        delete = self.cloud.delete
        self.cloud.delete = lambda *args: (
            opened.append(dict(self.places_type.open)), delete(*args))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual([{}], opened)

    def test_one_that_cannot_be_closed_keeps_no_server(self):
        lease = self.reserve(0, 100, self.places(), self.places(),
                             active=True)
        server_id, = self.take_slots(lease)
        self.places_type.broken['end'] = RuntimeError('Nova is away')
        self.clock.advance(100)
        self.assertEqual(retries.AWAY, self.lifecycle.lease_end.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([server_id], self.cloud.deleted)
        # Its room is back, but it is not over as long as it can be used.
        self.assertEqual(2, len(self.places_type.open))
        self.assertEqual('TERMINATING', self.status(lease))
        self.places_type.broken.clear()
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual({}, self.places_type.open)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_a_start_that_fails_is_done_again(self):
        lease = self.reserve()
        self.places_type.broken['start'] = RuntimeError('the database is away')
        for _time in range(2):
            self.assertRaises(
                RuntimeError, self.lifecycle.lease_start.start, lease['id'])
            self.assertNotEqual('ACTIVE', self.status(lease))
        self.places_type.broken.clear()
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(('ACTIVE', ['active']), self.states(lease))
        for _time in range(2):
            self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['lease.event.start_lease'], self.events_told())

    def test_one_that_cannot_be_opened_fails(self):
        lease = self.reserve(0, 10_000)
        self.places_type.broken['start'] = RuntimeError('no')
        self.assertRaises(
            RuntimeError, self.lifecycle.lease_start.start, lease['id'])
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        self.assertEqual(('ERROR', ['error']), self.states(lease))
        self.assertEqual(2, self.room())
        self.assertIs(True, views.get(
            self.database, lease['id'])['degraded'])
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(('TERMINATED', ['deleted']), self.states(lease))

    def test_one_that_is_moved_while_it_starts_does_not_start(self):
        lease = self.reserve(50, 100)
        self.clock.advance(50)
        retried, moved = self.database.retried, []

        def late(*args, **kwargs):
            # Its start has been found due, and nothing is written yet.
            if not moved:
                moved.append(None)
                self.leases.updates.update(lease['id'], updates.LeaseChange(
                    start=NOW + 60))
            return retried(*args, **kwargs)

        self.database.retried = late
        self.assertEqual(10, self.lifecycle.lease_start.start(
            lease['id'], when_due=True).seconds)
        self.assertEqual(('PENDING', {}), (
            self.status(lease), self.places_type.open))
        self.assertEqual([], self.notified)
        self.clock.advance(10)
        self.assertIsNone(
            self.lifecycle.lease_start.start(lease['id'], when_due=True))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_what_is_open_is_what_is_booked(self):
        """It cannot become another thing any more once it is opened."""
        lease = self.reserve(50, 100)
        reservation_id = lease['reservations'][0]['id']
        change = updates.LeaseChange(reservations={
            reservation_id: self.places(1, 2)})
        plain, refused = self.places_type.start, []

        def late(opening):
            plain(opening)
            refused.append(self.assertRaises(
                errors.InvalidLeaseParams, self.leases.updates.update, lease[
                    'id'],
                change))

        self.places_type.start = late
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(1, len(refused))
        self.assertEqual({'vcpus': 1},
                         self.places_type.open[reservation_id].spec)
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))

    def test_a_start_that_loses_against_a_deletion_closes_what_it_opened(
            self):
        for before in (False, True):
            lease = self.reserve(50, 100, self.places(), self.places())
            opened = []
            open_ = base.FakeType.start

            def late(opening, lease=lease, opened=opened, before=before):
                if before:
                    open_(self.places_type, opening)
                if not opened:
                    self.lifecycle.lease_end.delete(lease['id'])
                opened.append(opening)
                if not before:
                    open_(self.places_type, opening)

            self.places_type.start = late
            self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
            self.assertEqual({}, self.places_type.open)
            self.assertRaises(errors.NotFound, views.get, self.database,
                              lease['id'])
            self.assertNotIn('lease.event.start_lease', self.events_told())

    def test_a_boot_whose_call_is_lost_does_not_become_active(self):
        lease = self.lease(50, 100)
        with self.database.writer() as session:
            session.query(models.HeldBuild).delete()
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('PENDING', self.status(lease))

    def test_a_boot_that_starts_at_once_does_not_start_again(self):
        lease = self.lease(0, 100)
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([], self.notified)

    def test_a_place_is_given_back_when_its_server_goes(self):
        lease = self.reserve(0, 10_000, self.places(2), active=True)
        first, second = self.take_slots(lease, 2)
        for server_id in (first, second):
            self.runs(server_id)
        generation = self.generation('one')
        for server_id in (first, second):
            self.see(server_id, State.GONE)
        self.assertEqual(('ACTIVE', ['active']), self.states(lease))
        self.assertEqual([(None, False)] * 2, [
            (row.server_id, row.running) for row in self.bookings(lease)])
        self.assertEqual(generation + 2, self.generation('one'))
        # It is the lease's all the same, and may be taken again.
        self.assertEqual(0, self.room())
        third, = self.take_slots(lease)
        self.runs(third)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_a_server_that_fails_in_a_place_does_not_fail_its_lease(self):
        lease = self.reserve(0, 10_000, self.places(2), active=True)
        server_id, = self.take_slots(lease)
        self.notified.clear()
        self.see(server_id, State.ERROR, fault='No valid host')
        self.assertEqual(('ACTIVE', ['active']), self.states(lease))
        self.assertEqual('one', self.host_of(server_id))
        self.assertEqual(0, self.room())
        self.assertEqual([], self.notified)
        self.see(server_id, State.GONE)
        self.take_slots(lease, 2)

    def test_two_servers_of_a_lease_change_places(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(3), active=True)
        first, second, third = self.take_slots(lease, 3)
        self.assertEqual(['one', 'one', 'two'], [
            self.host_of(one) for one in (first, second, third)])
        self.runs(second)
        self.runs(first, two)
        self.assertEqual(['two', 'one', 'one'], [
            self.host_of(one) for one in (first, second, third)])
        self.runs(third, self.one)
        self.assertEqual(['two', 'one', 'one'], [
            self.host_of(one) for one in (first, second, third)])
        self.assertEqual({True}, set(self.scalars(models.Booking.running)))

    def test_who_stands_where_no_place_is_takes_his_with_him(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(2), active=True)
        server_id, = self.take_slots(lease)
        self.assertEqual(['one', 'two'], sorted(self.runs(
            server_id, two)[1]))
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual(1, self.room())

    def test_only_as_many_places_move_as_servers(self):
        two = self.host('two', VCPU=2)
        lease = self.reserve(0, 100, self.places(4), active=True)
        first, = self.take_slots(lease)
        self.assertEqual('one', self.host_of(first))
        self.runs(first, two)
        self.assertEqual([two, self.one, self.one, two],
                         self.hosts_of(lease))

    def test_one_who_runs_stays_where_he_is(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(3), active=True)
        first, second, third = self.take_slots(lease, 3)
        self.runs(third, two)
        self.runs(first, two)
        self.assertEqual(['two', 'one', 'two'], [
            self.host_of(one) for one in (first, second, third)])

    def test_room_comes_back_with_each_server_once_it_ends(self):
        lease = self.reserve(0, 10_000, self.places(2), active=True)
        first, second = self.take_slots(lease, 2)
        for server_id in (first, second):
            self.runs(server_id)
        self.cloud.stubborn.add(second)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(1, self.room())
        self.cloud.stubborn.clear()
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(2, self.room())

    def test_places_of_another_reservation_stay_where_they_are(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(1), self.places(1),
                             active=True)
        other = self.reserve(0, 100)
        self.assertEqual([two], self.hosts_of(other))
        server_id, = self.take_slots(lease)
        self.runs(server_id, two)
        self.assertEqual([two], self.hosts_of(other))
        self.assertEqual('two', self.host_of(server_id))

    def hosts_of(self, lease):
        uuids = {host.id: host.uuid for host in self.scalars(models.Host)}
        return [uuids[row.host_id] for row in sorted(
            self.bookings(lease), key=lambda row: row.id)]

    def test_a_start_waits_until_the_hosts_of_its_places_are_left(self):
        before = self.running_lease(0, 50, count=2)
        lease = self.reserve(50, 100)
        self.clock.advance(50)
        self.assertIsInstance(self.lifecycle.lease_start.start(lease['id']),
                              retries.RetryAfter)
        self.assertEqual({}, self.places_type.open)
        for server_id in base.servers_of(before):
            self.see(server_id, State.GONE)
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('ACTIVE', self.status(lease))


class TestDelete(LifecycleTestCase):

    def setUp(self):
        super().setUp()
        self.worker = self.new_engine()

    def pending(self):
        return self.reserve(50, 100)

    def offered(self):
        return self.leases.creation.offer(self.new_lease(50, 100), 60)

    def held(self):
        lease = self.lease(50, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.HELD)
        return lease

    def starting(self):
        lease = self.lease(0, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.BUILDING)
        return lease

    def active(self):
        return self.running_lease(0, 100)

    def with_places(self):
        lease = self.reserve(0, 100, active=True)
        server_id, = self.take_slots(lease)
        self.cloud.servers[server_id] = Seen(State.RUNNING, self.one)
        self.lifecycle.reconciliation.check(server_id)
        return lease

    def with_free_places(self):
        return self.reserve(0, 100, active=True)

    def terminating(self):
        lease = self.running_lease(0, 100)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.cloud.stubborn.clear()
        return lease

    def terminated(self):
        lease = self.running_lease(0, 100)
        self.lifecycle.lease_end.end(lease['id'])
        return lease

    def failed(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.lifecycle.reconciliation.check(server_id)
        return lease

    def never_started(self):
        lease = self.reserve(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        return lease

    #: What is there, its status, and whether it has servers to delete.
    STATES = (
        ('offered', 'OFFERED', False), ('pending', 'PENDING', False),
        ('held', 'PENDING', True), ('starting', 'STARTING', True),
        ('active', 'ACTIVE', True), ('with_places', 'ACTIVE', True),
        ('with_free_places', 'ACTIVE', False),
        ('terminating', 'TERMINATING', True),
        ('terminated', 'TERMINATED', False), ('failed', 'ERROR', True),
        ('never_started', 'ERROR', False))

    def assert_over(self, lease):
        self.assertRaises(errors.NotFound, views.get, self.database,
                          lease['id'])
        row, = self.scalars(models.Lease, models.Lease.id == lease['id'])
        self.assertEqual('TERMINATED', row.status)
        self.assertEqual({}, self.places_type.open)
        self.assertEqual({}, self.cloud.servers)
        self.assertEqual({'leases', 'reservations', 'events', 'hosts'},
                         set(self.count_rows('changes')))
        self.assertEqual({'DONE'}, set(self.scalars(
            models.Event.status, models.Event.lease_id == lease['id'])))
        self.assertEqual(2, self.room())

    def test_it_works_in_every_state(self):
        for name, status, has_servers in self.STATES:
            lease = getattr(self, name)()
            self.assertEqual(status, self.status(lease), name)
            self.notified.clear()
            self.lifecycle.lease_end.delete(lease['id'])
            told = [] if name == 'terminated' else ['lease.event.end_lease']
            if has_servers:
                self.assertEqual('DELETING', self.status(lease), name)
                self.assertEqual(['lease.delete'], self.events_told(), name)
                self.assertGreater(driven.run_due(self.worker), 0, name)
            self.assertEqual(['lease.delete', *told], self.events_told(),
                             name)
            self.assert_over(lease)

    def test_it_works_twice_and_is_told_once(self):
        for name, _status, has_servers in self.STATES:
            lease = getattr(self, name)()
            self.notified.clear()
            for _time in range(2):
                self.lifecycle.lease_end.delete(lease['id'])
            driven.run_due(self.worker)
            self.lifecycle.lease_end.delete(lease['id'])
            self.assertEqual(1, self.events_told().count('lease.delete'),
                             name)
            self.assert_over(lease)

    def test_what_is_not_there_is_not_found(self):
        self.assertRaises(
            errors.NotFound, self.lifecycle.lease_end.delete, 'unheard-of')

    def test_servers_that_stay_are_tried_again(self):
        lease = self.active()
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.worker)
        self.assertEqual('DELETING', self.status(lease))
        self.cloud.stubborn.clear()
        self.clock.advance(retries.AGAIN)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def test_what_cannot_be_closed_yet_is_closed_later(self):
        lease = self.with_free_places()
        self.places_type.broken['end'] = RuntimeError('the database is away')
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        driven.run_due(self.worker)
        self.assertEqual('DELETING', self.status(lease))
        self.places_type.broken.clear()
        self.clock.advance(300)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def while_its_end_is_carried_out(self, lease):
        """Another worker finds that the event is not his any more."""
        self.clock.advance(100)
        retried, deleted = self.worker._database.retried, []

        def late(work, *args, **kwargs):
            # Its end has been carried out, and is to be written down.
            if getattr(work, 'func', None) == self.worker._settled and (
                    not deleted):
                deleted.append(self.lifecycle.lease_end.delete(lease['id']))
            return retried(work, *args, **kwargs)

        self.cloud.stubborn.update(self.cloud.servers)
        self.worker._database.retried = late
        driven.run_due(self.worker)
        self.assertEqual([None], deleted)
        self.cloud.stubborn.clear()
        driven.run_due(self.worker)
        self.clock.advance(retries.AGAIN)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def test_while_its_end_waits_for_servers(self):
        self.while_its_end_is_carried_out(self.active())

    def test_while_its_end_waits_for_servers_in_places(self):
        self.while_its_end_is_carried_out(self.with_places())

    def test_while_its_end_has_just_come(self):
        self.while_its_end_is_carried_out(self.with_free_places())

    def test_an_end_that_somebody_has_claimed_is_carried_out_at_once(self):
        lease = self.active()
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                event_type='end_lease').update({
                    'status': 'IN_PROGRESS', 'claimed_by': 'dead',
                    'claimed_until': NOW + 1000})
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual(1, driven.run_due(self.worker))
        self.assert_over(lease)

    def test_it_is_not_announced_any_more(self):
        lease = self.active()
        self.lifecycle.lease_end.delete(lease['id'])
        self.notified.clear()
        self.lifecycle.notices.announce(lease['id'], 'before_end_lease')
        self.assertEqual([], self.notified)


class TestAnnounce(LifecycleTestCase):

    def test_an_end_that_is_put_off_while_it_is_told_is_told_again(self):
        lease = self.running_lease(request=self.request(
            0, 100, before_end=NOW + 50))
        self.clock.advance(50)
        told = []

        def notify(event_type, _lease):
            told.append(event_type)
            if len(told) == 1:
                self.leases.updates.update(
                    lease['id'], updates.LeaseChange(end=NOW + 200))

        self.lifecycle.notices._notify = notify
        worker = self.new_engine()
        driven.run_due(worker)
        self.clock.advance(99)
        self.assertEqual(0, driven.run_due(worker))
        self.clock.advance(1)
        driven.run_due(worker)
        self.assertEqual(2 * ['lease.event.before_end_lease'], told)

    def test_the_world_is_told_of_an_event(self):
        lease = self.running_lease()
        self.assertIsNone(
            self.lifecycle.notices.announce(lease['id'], 'before_end_lease'))
        self.assertEqual([('lease.event.before_end_lease', lease['id'])],
                         self.notified)

    def test_of_a_lease_that_is_over_nothing_is_told(self):
        lease = self.running_lease()
        self.lifecycle.lease_end.end(lease['id'])
        self.notified.clear()
        self.assertIsNone(
            self.lifecycle.notices.announce(lease['id'], 'before_end_lease'))
        self.assertEqual([], self.notified)


class TestCrashes(LifecycleTestCase):
    """Every action is cut off after each of its transactions in turn.

    Another worker then does it again.
    """

    class Crash(BaseException):
        """The process is gone."""

    def cut_off(self, action, after):
        """Run an action until it has committed so many times.

        :returns: whether it ended by itself
        """
        done = []
        retried = type(self.database).retried

        def counted(database, work, *args, **kwargs):
            if len(done) == after:
                raise self.Crash
            done.append(work)
            return retried(database, work, *args, **kwargs)

        with fixtures.MonkeyPatch(
                'blazar_core.db.api.Database.retried', counted):
            try:
                action()
            except self.Crash:
                return False
            return True

    def test_an_end_that_was_cut_off_anywhere_is_finished(self):
        cuts = 0
        finished = False
        while not finished:
            lease = self.running_lease(0, 10_000, count=2)
            finished = self.cut_off(
                lambda: self.lifecycle.lease_end.end(lease['id']), cuts)
            self.lifecycle.lease_end.end(lease['id'])
            self.assertEqual('TERMINATED', self.status(lease), cuts)
            self.assertEqual(2, self.room(), cuts)
            cuts += 1
        self.assertGreater(cuts, 4)

    def test_a_start_that_was_cut_off_anywhere_is_sent_once(self):
        cuts = 0
        finished = False
        while not finished:
            lease = self.lease(50, 100)
            self.cloud.sent.clear()
            finished = self.cut_off(
                lambda: self.lifecycle.lease_start.start(lease['id']), cuts)
            self.lifecycle.lease_start.start(lease['id'])
            self.assertEqual(1, len(self.cloud.sent), cuts)
            self.lifecycle.lease_end.end(lease['id'])
            cuts += 1
        self.assertGreater(cuts, 1)

    def test_a_lease_whose_last_server_went_unfinished_still_ends(self):
        """Cut off between the last server and the lease."""
        lease = self.running_lease()
        self.assertFalse(self.cut_off(
            lambda: self.see(*base.servers_of(lease), State.GONE), 1))
        self.assertEqual('ACTIVE', self.status(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))


class TestStepsThatMeet(LifecycleTestCase):

    scenarios = databases.SERVERS
    #: How many transactions of a database wait for a lock. (INNODB_TRX says
    #: the same for ever to who asks more often than every 0.1 s.)
    WAITING = {
        'mysql': "SELECT CAST(VARIABLE_VALUE AS UNSIGNED) FROM "
                 "information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = "
                 "'INNODB_ROW_LOCK_CURRENT_WAITS'",
        'postgresql': "SELECT COUNT(*) FROM pg_stat_activity WHERE "
                      "wait_event_type = 'Lock' AND "
                      "datname = current_database()",
    }

    def is_waited_for(self):
        engine = self.database.engine
        with engine.connect() as connection:
            return connection.exec_driver_sql(
                self.WAITING[engine.dialect.name]).scalar_one()

    def test_a_lease_that_is_being_ended_does_not_become_active(self):
        """Its last server is seen running in the middle of its end."""
        lease = self.lease(0, 100)
        with self.books.connect().writer() as ending:
            row = api.locked(ending, lease['id'])
            row.status = 'TERMINATING'
            ending.flush()
            thread = self.in_thread(lambda: self.see(
                *base.servers_of(lease), State.RUNNING, self.one))
            self.wait_for(self.is_waited_for, 'a step that waits its turn')
        thread.join(20)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertTrue(self.booking(*base.servers_of(lease)).running)

    def test_a_lease_is_not_sent_while_it_is_being_ended(self):
        lease = self.lease(50, 100)
        with self.books.connect().writer() as ending:
            row = api.locked(ending, lease['id'])
            row.status = 'TERMINATING'
            ending.flush()
            thread = self.in_thread(
                lambda: self.lifecycle.lease_start.start(lease['id']))
            self.wait_for(self.is_waited_for, 'a step that waits its turn')
        thread.join(20)
        self.assertEqual([], self.cloud.sent)
        self.assertEqual('TERMINATING', self.status(lease))

    def paused(self, work, owner, name):
        """Let another process do something, and stop it before it commits.

        :param name: of what is the last that it does
        :returns: what lets it go on
        """
        at, go_on = threading.Event(), threading.Event()
        last = getattr(owner, name)

        def late(*args, **kwargs):
            answer = last(*args, **kwargs)
            if not at.is_set():
                at.set()
                go_on.wait(20)
            return answer

        self.useFixture(fixtures.MockPatchObject(owner, name, late))
        self.in_thread(work)
        self.wait_for(at.is_set, 'the other one to have the lock')
        return go_on.set

    def other_lifecycle(self):
        """That of another process."""
        return self.new_handlers(self.books.connect())

    def test_a_server_that_comes_while_the_end_waits_goes_as_well(self):
        lease = self.reserve(0, 100, active=True)
        other = slots.Slots(self.books.connect(), self.clock)
        self.cloud.servers['late'] = Seen(State.RUNNING, self.one)
        go_on = self.paused(
            lambda: other.take(
                lease['reservations'][0]['id'], 'project', ['late']),
            slots, '_take')
        self.clock.advance(100)
        ends = []
        thread = self.in_thread(
            lambda: ends.append(self.lifecycle.lease_end.end(lease['id'])))
        self.wait_for(self.is_waited_for, 'an end that waits its turn')
        go_on()
        thread.join(20)
        self.assertEqual((['late'], [None]), (self.cloud.deleted, ends))
        self.assertEqual('TERMINATED', self.status(lease))

    def test_the_last_two_servers_may_be_seen_to_run_together(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        other = self.other_lifecycle()
        go_on = self.paused(
            lambda: other.reconciliation.observe(
                first, Seen(State.RUNNING, self.one)),
            lease_status, 'update_status')
        thread = self.in_thread(
            lambda: self.see(second, State.RUNNING, self.one))
        self.wait_for(self.is_waited_for, 'a step that waits its turn')
        go_on()
        thread.join(20)
        self.assertEqual('ACTIVE', self.status(lease))
