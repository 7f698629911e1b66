# SPDX-License-Identifier: Apache-2.0

"""Servers that are built in slots of a reservation."""

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
NOW = base.NOW
Seen = cloud_api.ObservedServer
State = base.State


class TestSlotBuilds(lifecycle_base.LifecycleTestCase):
    """Leases whose servers come later."""

    def runs(self, server_id, host=None):
        self.cloud.servers[server_id] = Seen(State.RUNNING, host or self.one)
        return self.lifecycle.reconciliation.check(server_id)

    def states(self, lease):
        """Return the status of a lease and of its reservations."""
        described = views.get(self.database, lease['id'])
        return described['status'], [
            one['status'] for one in described['reservations']]

    def bookings(self, lease):
        return self.scalars(
            models.Booking, models.Booking.reservation_id.in_(
                [one['id'] for one in lease['reservations']]))

    def test_reservations_are_opened_at_start_and_closed_at_end(self):
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
                window=model.Window(NOW + 50, NOW + 100), on_end='delete',
                together=(first['id'], second['id']))
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

    def test_reservations_are_opened_before_lease_is_active(self):
        """Users may boot as soon as they see that the lease is active."""
        lease = self.reserve(50, 100)
        seen = []
        self.places_type.start = lambda reserved: seen.append(
            self.status(lease))
        self.lifecycle.lease_start.start(lease['id'])
        self.assertNotIn('ACTIVE', seen)
        self.assertEqual(1, len(seen))

    def test_reservations_are_closed_before_servers_are_deleted(self):
        """No server takes the slot of a server that is being deleted."""
        lease = self.reserve(active=True)
        self.runs(*self.take_slots(lease))
        opened = []
        delete = self.cloud.delete
        self.cloud.delete = lambda *args: (
            opened.append(dict(self.places_type.open)), delete(*args))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual([{}], opened)

    def test_servers_are_deleted_even_if_closing_fails(self):
        lease = self.reserve(0, 100, self.places(), self.places(),
                             active=True)
        server_id, = self.take_slots(lease)
        self.places_type.broken['end'] = RuntimeError('Nova does not answer')
        self.clock.advance(100)
        self.assertEqual(retries.UNAVAILABLE, self.lifecycle.lease_end.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([server_id], self.cloud.deleted)
        # Its capacity is free, but it ends only when it is closed.
        self.assertEqual(2, len(self.places_type.open))
        self.assertEqual('TERMINATING', self.status(lease))
        self.places_type.broken.clear()
        self.assertIsNone(
            self.lifecycle.lease_end.end(lease['id'], when_due=True))
        self.assertEqual({}, self.places_type.open)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_failed_start_is_retried(self):
        lease = self.reserve()
        self.places_type.broken['start'] = RuntimeError('no database')
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

    def test_lease_fails_if_reservation_cannot_be_opened(self):
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

    def test_lease_moved_during_start_does_not_start(self):
        lease = self.reserve(50, 100)
        self.clock.advance(50)
        retried, moved = self.database.retried, []

        def late(*args, **kwargs):
            # Its start is due, and nothing is written yet.
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

    def test_reservation_cannot_change_after_opening(self):
        """A reservation cannot change after it was opened."""
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

    def test_start_losing_to_deletion_closes_reservations(
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

    def test_lease_with_lost_call_does_not_become_active(self):
        lease = self.lease(50, 100)
        with self.database.writer() as session:
            session.query(models.DeferredBuild).delete()
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('PENDING', self.status(lease))

    def test_immediate_lease_is_not_started_again(self):
        lease = self.lease(0, 100)
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([], self.notified)

    def test_slot_is_freed_when_its_server_is_deleted(self):
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
        # The slot still belongs to the lease, and may be taken again.
        self.assertEqual(0, self.room())
        third, = self.take_slots(lease)
        self.runs(third)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_failed_server_in_slot_does_not_fail_lease(self):
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

    def test_servers_of_a_lease_swap_slots(self):
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

    def test_slot_follows_server_to_host_without_slot(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(2), active=True)
        server_id, = self.take_slots(lease)
        self.assertEqual(['one', 'two'], sorted(self.runs(
            server_id, two)[1]))
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual(1, self.room())

    def test_only_as_many_slots_move_as_servers(self):
        two = self.host('two', VCPU=2)
        lease = self.reserve(0, 100, self.places(4), active=True)
        first, = self.take_slots(lease)
        self.assertEqual('one', self.host_of(first))
        self.runs(first, two)
        self.assertEqual([two, self.one, self.one, two],
                         self.hosts_of(lease))

    def test_running_server_keeps_its_slot(self):
        two = self.host('two', VCPU=1)
        lease = self.reserve(0, 100, self.places(3), active=True)
        first, second, third = self.take_slots(lease, 3)
        self.runs(third, two)
        self.runs(first, two)
        self.assertEqual(['two', 'one', 'two'], [
            self.host_of(one) for one in (first, second, third)])

    def test_capacity_is_freed_with_each_server_at_end(self):
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

    def test_slots_of_another_reservation_do_not_move(self):
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

    def test_start_waits_for_overstaying_servers_on_its_hosts(self):
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
