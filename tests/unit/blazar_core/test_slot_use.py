# SPDX-License-Identifier: Apache-2.0

"""Servers take slots of a reservation, and free them."""

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import ledger
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.lifecycle import lease_conditions
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import slots_base

load_tests = databases.load_tests
NOW = base.NOW


class TestTakeSlots(slots_base.PlacesTestCase):

    def assert_conflict(self, part, lease, count=1):
        before = self.everything()
        refused = self.assertRaises(
            errors.Conflict, self.take_slots, lease, count)
        self.assertIn(part, str(refused))
        self.assertEqual(before, self.everything())

    def test_servers_take_slots_until_all_are_taken(self):
        lease = self.reserve(0, 100, self.places(3), active=True)
        first, second = self.take_slots(lease, 2)
        self.assert_conflict('in use. Boot at most 1 server', lease, 2)
        third, = self.take_slots(lease)
        self.assert_conflict('All 3 slots of reservation', lease)
        self.assertEqual(sorted(('one', one) for one in (
            first, second, third)), self.booked(lease))
        booked = self.leases.lookup.booked(first)
        self.assertEqual(
            (lease['reservations'][0]['id'], 'project', True),
            (booked.reservation_id, booked.project_id, booked.in_slot))
        # A server in a slot does not run yet.
        self.assertEqual({False}, set(self.scalars(models.Booking.running)))

    def test_slots_are_taken_from_given_reservation(self):
        lease = self.reserve(0, 100, self.places(1), self.places(2),
                             active=True)
        self.take_slots(lease)
        self.assert_conflict('The slot of reservation', lease)
        self.take_slots(lease, 2, number=1)

    def test_reservation_is_not_found_for_other_projects(self):
        lease = self.reserve(0, 100, active=True)
        reservation_id = lease['reservations'][0]['id']
        for one, project in ((reservation_id, 'other'),
                             ('unheard-of', 'project')):
            refused = self.assertRaises(
                errors.NotFound, self.leases.slots.take, one, project, [
                    'a'])
            self.assertEqual(f'Reservation {one} could not be found.',
                             str(refused))
        self.assertEqual([None], self.scalars(models.Booking.server_id))

    def test_slots_can_be_taken_only_while_lease_is_active(self):
        lease = self.reserve(50, 100, self.places(2))
        self.assert_conflict('which is PENDING: boot with it from 2027-01-15 '
                             '08:00:50 to 2027-01-15 08:01:40 UTC', lease)
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        server_id, = self.take_slots(lease)
        self.clock.advance(49)
        self.take_slots(lease)
        self.leases.slots.free([server_id])
        self.clock.advance(1)
        self.assert_conflict('boot with it from', lease)
        self.cloud.stubborn.update(self.cloud.servers)
        self.lifecycle.lease_end.end(lease['id'])
        self.assert_conflict('which is TERMINATING', lease)

    def test_freed_slot_can_be_taken_again(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        kept, given = self.take_slots(lease, 2)
        self.leases.slots.free([given, 'unheard-of'])
        self.assertEqual([('one', ''), ('one', kept)], self.booked(lease))
        self.assertIsNone(self.leases.lookup.booked(given))
        another, = self.take_slots(lease)
        self.assertEqual(sorted([('one', another), ('one', kept)]),
                         self.booked(lease))

    def test_server_of_boot_lease_has_no_slot(self):
        server_id, = base.servers_of(self.running_lease())
        self.assertFalse(self.leases.lookup.booked(server_id).in_slot)


class TestConcurrentTakeSlots(slots_base.PlacesTestCase):

    scenarios = databases.SERVERS

    def test_waiting_process_takes_another_slot(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        other = leases.Leases(
            self.db.connect(), self.clock, None, self.types)
        reservation_id = lease['reservations'][0]['id']
        locked, done = api.locked, []

        def late(session, lease_id):
            if not done:
                # Another process has the lock, takes a slot, and is done.
                done.append(self.in_thread(lambda: other.slots.take(
                    reservation_id, 'project', ['second'])))
                done[0].join(20)
            return locked(session, lease_id)

        with fixtures.MonkeyPatch('blazar_core.db.api.locked', late):
            self.leases.slots.take(reservation_id, 'project', ['first'])
        self.assertEqual([('one', 'first'), ('one', 'second')],
                         self.booked(lease))


class TestReassign(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.made = self.lease(50, 100, count=2)
        self.host('two', VCPU=2)
        self.ids = {host.name: host.id for host in self.scalars(models.Host)}
        self.rows = sorted(self.scalars(models.Booking.id))

    def reassign(self, *hosts, reason='', lease=None):
        """Reassign its bookings, in their order, to hosts."""
        lease = lease or self.made
        seen, = self.scalars(models.Lease.generation,
                             models.Lease.id == lease['id'])
        leases = self.leases.reassignment.reassign(reassignment.Reassigned(
            lease['id'], seen, dict(zip(
                self.rows, [self.ids.get(host) for host in hosts])), reason))
        return leases and leases[0]

    def reassign_other(self, booking_id):
        self.rows = [booking_id]
        return self.reassign('two')

    def booked(self):
        return [self.host_of(one) for one in base.servers_of(self.made)]

    def get(self):
        return views.get(self.database, self.made['id'])

    def test_bookings_are_reassigned_if_capacity_is_free(self):
        described = self.reassign('two', 'two')
        self.assertEqual(['two', 'two'], self.booked())
        self.assertEqual((3, 2), (
            self.generation('one'), self.generation('two')))
        self.assertEqual(
            [('one', 'two', server_id)
             for server_id in base.servers_of(self.made)],
            [(one['before'], one['after'], one['server_id'])
             for one in described.pop('exchanged')])
        self.assertEqual(described, self.get())
        self.assertEqual((True, True, False), (
            described['degraded'],
            described['reservations'][0]['resources_changed'],
            described['reservations'][0]['missing_resources']))
        self.assertEqual(['one', 'one'], [
            self.host_of(one) for one in base.servers_of(
                self.lease(0, 100, count=2))][:2])

    def test_bookings_stay_without_free_capacity(self):
        self.host('three', VCPU=1)
        self.ids = {host.name: host.id for host in self.scalars(models.Host)}
        self.assertRaises(ledger.OverCapacity, self.reassign, 'three', 'three')
        self.assertEqual(['one', 'one'], self.booked())
        self.assertIs(False, self.get()['degraded'])

    def test_bookings_without_host_take_no_capacity_and_give_reason(self):
        described = self.reassign('one', None, reason='It is so.')
        self.assertEqual([('one', None)], [
            (one['before'], one['after'])
            for one in described.pop('exchanged')])
        self.assertEqual(described, self.get())
        self.assertEqual(
            'Reserved capacity is no longer available. It is so.',
            described['status_reason'])
        self.assertEqual((True, False), tuple(
            described['reservations'][0][key] for key in (
                'missing_resources', 'resources_changed')))
        self.lease(50, 100)
        self.assertEqual(['one', None], self.booked())

    def test_reason_is_kept_until_all_bookings_have_hosts(self):
        self.reassign(None, None, reason='It is so.')
        self.reassign('two', None)
        self.assertIn('It is so.', self.get()['status_reason'])
        self.assertEqual('', self.reassign('two', 'one')['status_reason'])

    def test_other_conditions_are_kept(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(
                conditions=conditions.changed(
                    None, NOW, lease_conditions.GRACE)))
        self.assertEqual(lease_conditions.GRACE.message, self.reassign(
            'two', 'two')['status_reason'])

    def test_changed_lease_is_not_reassigned(self):
        self.assertIsNone(
            self.leases.reassignment.reassign(reassignment.Reassigned(
                self.made['id'], -1, {self.rows[0]: self.ids['two']})))
        self.assertIsNone(self.reassign_other(-1))
        self.assertRaises(errors.NotFound, self.leases.reassignment.reassign,
                          reassignment.Reassigned('unheard-of', 0, {}))
        self.assertEqual(['one', 'one'], self.booked())

    def test_dispatched_or_claimed_booking_is_not_reassigned(self):
        for column in ('dispatched_at', 'claimed_at'):
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).where(
                    models.Booking.id == self.rows[1]).values({column: 1}))
            self.assertIsNone(self.reassign('two', 'two'), column)
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).values({
                    column: None}))
        self.assertIsNotNone(self.reassign('two', 'two'))

    def test_deleted_or_failed_lease_is_not_reassigned(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        self.assertIsNone(self.reassign('two', 'two'))
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).values(
                deleted_at=None, status='ERROR'))
        self.assertIsNone(self.reassign('two', 'two'))

    def test_only_free_slots_are_reassigned(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        self.rows = sorted(self.scalars(
            models.Booking.id, models.Booking.reservation_id ==
            lease['reservations'][0]['id']))
        self.take_slots(lease)
        taken, = self.scalars(
            models.Booking.id, models.Booking.reservation_id ==
            lease['reservations'][0]['id'],
            models.Booking.server_id.is_not(None))
        free, = set(self.rows) - {taken}
        self.rows = [taken]
        self.assertIsNone(self.reassign(None, lease=lease))
        self.rows = [free]
        self.assertIsNotNone(self.reassign(None, lease=lease))
