# SPDX-License-Identifier: Apache-2.0

"""Leases from Blazar are imported as they were, without overbooking."""

from concurrent import futures
import dataclasses
import threading

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_core.leases import views
from blazar_nova.importer import known_leases
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW

load_tests = databases.load_tests


class ImportTestCase(whole_hosts_base.WholeHostsTestCase):
    """Two enrolled hosts, the first of them in use."""

    scenarios = databases.SCENARIOS

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.host('two', VCPU=4)
        self.machines.among = model.HostPool.ENROLLED
        self.ids = {name: self.enrol(name) for name in ('one', 'two')}
        self.imports = known_leases.LeaseImport(
            self.database, self.clock, self.types)

    def known(self, start, end, *names, **values):
        """Return a lease to import; an unknown host is a missing one."""
        lease_id = uuidutils.generate_uuid()
        return known_leases.KnownLease(**{
            'id': lease_id, 'name': 'old', 'project_id': 'project',
            'user_id': 'user', 'window': model.Window(
                NOW + start, NOW + end), 'active': False, 'cleaning_time': 0,
            'created_at': NOW - 500, 'updated_at': NOW - 400,
            'reservations': (known_leases.KnownReservation(
                uuidutils.generate_uuid(), 'machine',
                {'min': 1, 'max': len(names)},
                tuple(self.ids.get(name) for name in names), None,
                NOW - 500, NOW - 400),),
            'events': (), **values})

    def in_use(self, *server_ids):
        """Run servers on the first host."""
        with self.database.writer() as session:
            host = session.get(models.Host, self.ids['one'])
            host.consumers = {one: ({'VCPU': 1}, NOW) for one in server_ids}
            host.usage = {'VCPU': len(server_ids)}


class TestPending(ImportTestCase):

    def test_lease_is_imported_unchanged(self):
        events = tuple(known_leases.KnownEvent(
            uuidutils.generate_uuid(), event_type, NOW + time, status)
            for event_type, time, status in (
                ('start_lease', 10, 'UNDONE'), ('mine', 5, 'ERROR'),
                ('before_end_lease', 15, 'UNDONE')))
        known = self.known(10, 20, 'one', 'two', events=events)
        self.assertTrue(self.imports.adopt(known))
        lease = views.get(self.database, known.id)
        self.assertEqual(
            ('PENDING', 'old', NOW + 10, NOW + 20, NOW + 15, NOW - 500,
             'delete'), tuple(lease[key] for key in (
                 'status', 'name', 'start_date', 'end_date',
                 'before_end_date', 'created_at', 'on_end')))
        reservation, = lease['reservations']
        self.assertEqual(
            (known.reservations[0].id, 'pending', 2, {'min': 1, 'max': 2},
             False), tuple(reservation[key] for key in (
                 'id', 'status', 'amount', 'params', 'missing_resources')))
        self.assertEqual({'one': {'VCPU': 4}, 'two': {'VCPU': 4}},
                         self.bookings_of(lease))
        # Every lease gets an end event.
        there = {event['event_type']: event for event in lease['events']}
        self.assertEqual(
            {'mine': ('ERROR', NOW + 5), 'start_lease': ('UNDONE', NOW + 10),
             'before_end_lease': ('UNDONE', NOW + 15),
             'end_lease': ('UNDONE', NOW + 20)}, {
                 name: (event['status'], event['time'])
                 for name, event in there.items()})
        self.assertEqual({event.id for event in events}, {
            there[event.event_type]['id'] for event in events})

    def test_imported_lease_starts_and_ends(self):
        known = self.known(10, 20, 'one')
        self.imports.adopt(known)
        worker = self.new_engine()
        self.clock.advance(10)
        driven.run_due(worker)
        self.assertEqual('ACTIVE', self.status({'id': known.id}))
        self.assertEqual({'one': known.reservations[0].id}, self.held())
        self.clock.advance(10)
        driven.run_due(worker)
        self.assertEqual('TERMINATED', self.status({'id': known.id}))
        self.assertEqual({}, self.held())

    def test_import_is_idempotent(self):
        known = self.known(10, 20, 'one')
        self.assertTrue(self.imports.adopt(known))
        before = self.everything()
        self.assertFalse(self.imports.adopt(known))
        # Only the generation of the project has changed.
        self.assertEqual(before | {'projects': None},
                         self.everything() | {'projects': None})

    def test_overbooking_import_is_refused_and_changes_nothing(self):
        there = self.reserve_machines(10, 20)
        name, = self.bookings_of(there)
        before = self.everything()
        exc = self.assertRaises(
            errors.Conflict, self.imports.adopt, self.known(19, 30, name))
        self.assertEqual(f'Host {name} has no capacity for it: it is booked '
                         f'in that window by lease {there["id"]}.', str(exc))
        self.assertEqual(before, self.everything())
        self.imports.adopt(self.known(20, 30, name))

    def test_cleaning_time_is_reserved(self):
        self.imports.adopt(self.known(10, 20, 'one', cleaning_time=5))
        for start in (20, 24):
            self.assertRaises(errors.Conflict, self.imports.adopt,
                              self.known(start, 30, 'one'))
        self.imports.adopt(self.known(25, 30, 'one'))

    def test_missing_host_is_replaced(self):
        known = self.known(10, 20, 'one', 'none')
        self.imports.adopt(known)
        reservation, = views.get(self.database, known.id)['reservations']
        self.assertEqual((2, True), (
            reservation['amount'], reservation['missing_resources']))
        self.overbooking_check().look()
        self.assertEqual({'one', 'two'}, self.bookings_of(
            {'id': known.id}).keys())

    def test_import_on_host_not_enrolled_is_refused(self):
        self.host('three', VCPU=4)
        self.ids['three'] = self.enrol('three', finish=False)
        exc = self.assertRaises(errors.Conflict, self.imports.adopt,
                                self.known(10, 20, 'three'))
        self.assertEqual('Host three is not enrolled.', str(exc))

    def test_import_on_host_not_reservable_is_allowed(self):
        with self.database.writer() as session:
            enrollment.change(session, NOW, self.ids['one'], {}, False)
        self.imports.adopt(self.known(10, 20, 'one'))

    def test_import_advances_generation_of_project(self):
        self.imports.adopt(self.known(10, 20, 'one'))
        self.imports.adopt(self.known(20, 30, 'one'))
        self.assertEqual([2], self.scalars(
            models.Project.generation, models.Project.id == 'project'))
        with self.database.begin() as connection:
            api.lock_project(connection, 'other')
        self.assertEqual([1], self.scalars(
            models.Project.generation, models.Project.id == 'other'))


class TestActive(ImportTestCase):

    def test_usage_is_counted_from_import_on(self):
        known = self.known(-1000, 1000, 'one', active=True,
                           servers=frozenset(['server']))
        self.in_use('server')
        self.imports.adopt(known)
        self.clock.advance(100)
        with self.database.writer() as session:
            uuid = self.uuid_of('one')
            inventory.record_host_usage(
                session, NOW + 100, uuid, {'server': {'VCPU': 1}},
                inventory.generations(session, [uuid])[uuid])
        with self.database.connection() as connection:
            found = [accounting.totals(connection, accounting.Query(
                model.Window(NOW + start, NOW + end)), NOW + 2000, 2)
                for start, end in ((-1000, 0), (-1000, 2000))]
        self.assertEqual([], found[0])
        self.assertEqual([4000, 4000, 4 * 1900], [
            found[1][0].amounts[kind].get('VCPU')
            for kind in usage_records.Kind])

    def test_hosts_are_assigned_with_their_servers(self):
        self.in_use('server')
        known = self.known(-10, 20, 'one', active=True,
                           servers=frozenset(['server']))
        self.imports.adopt(known)
        self.assertEqual('ACTIVE', self.status({'id': known.id}))
        self.assertEqual({'one': known.reservations[0].id}, self.held())
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of({'id': known.id}))
        # Its servers are within it, and no longer part of the usage.
        self.assertEqual([{}], self.scalars(
            models.Host.usage, models.Host.name == 'one'))
        self.assertEqual([NOW], self.scalars(models.Booking.claimed_at))

    def test_import_with_foreign_servers_on_host_is_refused(self):
        self.in_use('server', 'stranger')
        known = self.known(-10, 20, 'one', active=True,
                           servers=frozenset(['server']))
        before = self.everything()
        exc = self.assertRaises(errors.Conflict, self.imports.adopt, known)
        self.assertEqual('Host one has servers that do not belong to this '
                         'lease: stranger.', str(exc))
        self.assertEqual(before, self.everything())

    def test_import_with_unknown_servers_on_host_is_refused(self):
        with self.database.writer() as session:
            host = session.get(models.Host, self.ids['one'])
            host.consumers, host.usage = None, {'VCPU': 1}
        exc = self.assertRaises(
            errors.Conflict, self.imports.adopt,
            self.known(-10, 20, 'one', active=True))
        self.assertIn('The servers on host one are not known yet', str(exc))

    def test_second_import_of_assigned_host_is_refused(self):
        self.imports.adopt(self.known(-10, 20, 'one', active=True))
        exc = self.assertRaises(
            errors.Conflict, self.imports.adopt,
            self.known(-5, 10, 'one', active=True))
        self.assertIn('Host one has no capacity for it', str(exc))

    def test_overdue_lease_keeps_hosts_until_ended(self):
        known = self.known(-20, -10, 'one', active=True)
        self.imports.adopt(known)
        self.assertEqual({'one': known.reservations[0].id}, self.held())
        self.machines.full[known.reservations[0].id] = ['server']
        self.cloud.servers['server'] = base.cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid_of('one'))
        worker = self.new_engine()
        driven.run_due(worker)
        self.assertEqual(['server'], self.cloud.deleted)
        self.machines.full.clear()
        self.clock.advance(600)
        driven.run_due(worker)
        self.assertEqual('TERMINATED', self.status({'id': known.id}))

    def test_active_lease_gets_completed_start_event(self):
        known = self.known(-10, 20, 'one', active=True)
        self.imports.adopt(dataclasses.replace(known, events=(
            known_leases.KnownEvent('e', 'end_lease', NOW + 20,
                                    states.Event.UNDONE),)))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'UNDONE'},
                         self.events_of({'id': known.id}))


class TestSlots(ImportTestCase):
    """Reservations of slots with 2 VCPU each, two for each host."""

    def places(self, start, end, *names, servers=(), amounts=(2,), **values):
        return self.known(start, end, reservations=tuple(
            known_leases.KnownReservation(
                uuidutils.generate_uuid(), 'virtual:instance',
                {'amount': len(names), 'vcpus': amount},
                tuple(self.ids.get(name) for name in names), None, NOW - 500,
                NOW - 400, {'VCPU': amount}, {'kept': 'this'}, servers)
            for amount in amounts), **values)

    def server(self, name, host='one', running=True):
        return known_leases.KnownServer(name, self.ids.get(host), running)

    def rows(self):
        """Return the bookings, by host and server."""
        with self.database.reader() as session:
            return sorted(session.execute(sa.select(
                models.Host.name, models.Booking.server_id,
                models.Booking.running, models.Booking.dispatched_at,
                models.Booking.claimed_at).join(
                    models.Host, models.Host.id == models.Booking.host_id)
            ).tuples(), key=str)

    def test_each_slot_is_booked_on_its_host(self):
        known = self.places(10, 20, 'one', 'two', 'one')
        self.imports.adopt(known)
        self.assertEqual([('one', None, False, None, None)] * 2 + [
            ('two', None, False, None, None)], self.rows())
        self.assertEqual([3], self.scalars(models.Reservation.amount))
        self.assertEqual([{'VCPU': 2}], self.scalars(
            models.Reservation.resources))
        self.assertEqual([{'kept': 'this'}], self.scalars(
            models.Reservation.spec))

    def test_host_is_filled_with_slots_up_to_its_capacity(self):
        self.imports.adopt(self.places(10, 20, 'one'))
        self.imports.adopt(self.places(10, 20, 'one'))
        before = self.everything()
        for known in (self.places(19, 30, 'one'), self.known(19, 30, 'one')):
            exc = self.assertRaises(
                errors.Conflict, self.imports.adopt, known)
            self.assertIn('Host one has no capacity for it', str(exc))
        self.assertEqual(before, self.everything())
        self.imports.adopt(self.places(19, 30, 'two', 'two'))
        self.assertRaises(errors.Conflict, self.imports.adopt, self.places(
            40, 50, 'one', amounts=(3, 2)))

    def test_servers_take_their_slots_and_are_not_counted_as_usage(self):
        self.in_use('server', 'building')
        known = self.places(
            -10, 20, 'two', 'one', 'one', 'one', amounts=(1,), active=True,
            servers=(self.server('shelved', None), self.server('server'),
                     self.server('building', running=False)))
        self.imports.adopt(known)
        self.assertEqual([
            ('one', 'building', False, NOW, NOW),
            ('one', 'server', True, NOW, NOW),
            ('one', None, False, None, None),
            ('two', 'shelved', True, NOW, NOW)], self.rows())
        self.assertEqual([{}], self.scalars(
            models.Host.usage, models.Host.name == 'one'))
        self.assertEqual('ACTIVE', self.status({'id': known.id}))
        self.assertEqual({}, self.held())

    def test_other_servers_still_count_as_usage(self):
        self.in_use('server', 'other', 'third', 'fourth')
        known = self.places(-10, 20, 'one', active=True,
                            servers=(self.server('server'),))
        before = self.everything()
        exc = self.assertRaises(errors.Conflict, self.imports.adopt, known)
        self.assertIn('or has servers without a lease', str(exc))
        self.assertEqual(before, self.everything())
        self.in_use('server', 'other')
        self.imports.adopt(known)
        self.assertEqual([{'VCPU': 1}], self.scalars(
            models.Host.usage, models.Host.name == 'one'))

    def test_more_servers_than_slots_are_refused(self):
        self.in_use('server', 'other')
        before = self.everything()
        exc = self.assertRaises(
            errors.Conflict, self.imports.adopt, self.places(
                -10, 20, 'one', 'two', active=True,
                servers=(self.server('server'), self.server('other'))))
        self.assertIn('Server other has no slot', str(exc))
        self.assertEqual(before, self.everything())

    def test_unknown_servers_on_host_are_refused(self):
        with self.database.writer() as session:
            host = session.get(models.Host, self.ids['one'])
            host.consumers, host.usage = None, {'VCPU': 1}
        exc = self.assertRaises(
            errors.Conflict, self.imports.adopt, self.places(
                -10, 20, 'one', active=True,
                servers=(self.server('server'),)))
        self.assertIn('The servers on host one are not known yet', str(exc))


class TestRaces(ImportTestCase):
    """Two operators import at once, while other leases are created."""

    scenarios = databases.SERVERS

    def adopted(self, count=4):
        """Return how many leases of one host and one window are imported."""
        both = threading.Barrier(count)

        def adopt(known):
            work = known_leases.LeaseImport(
                self.db.connect(), self.clock, self.types)
            both.wait(20)
            try:
                return work.adopt(known)
            except errors.Conflict:
                return False

        with futures.ThreadPoolExecutor(count) as pool:
            return sum(pool.map(adopt, [
                self.known(10, 20, 'one') for _number in range(count)]))

    def test_concurrent_imports_reserve_host_once(self):
        self.assertEqual(1, self.adopted())
        self.assertEqual(1, len(self.scalars(models.Booking.id)))

    def test_host_is_overbooked_without_guard(self):
        """All processes read before the first of them writes."""
        real, read = ledger._check, threading.Barrier(4)

        def check(*args):
            real(*args)
            read.wait(20)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger._check', check))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.advance',
            lambda *args, **values: None))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.db.api.lock_project', lambda *args: None))
        self.assertEqual(4, self.adopted())

    def test_concurrent_imports_of_a_lease_import_it_once(self):
        known = self.known(10, 20, 'one')
        both = threading.Barrier(2)

        def adopt(_number):
            work = known_leases.LeaseImport(
                self.db.connect(), self.clock, self.types)
            both.wait(20)
            return work.adopt(known)

        with futures.ThreadPoolExecutor(2) as pool:
            self.assertEqual([False, True], sorted(pool.map(adopt, range(2))))
