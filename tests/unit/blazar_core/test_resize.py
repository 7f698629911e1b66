# SPDX-License-Identifier: Apache-2.0

"""Changes of the size of reservations, and of the times of leases."""

import dataclasses
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import slots_base

load_tests = databases.load_tests
NOW = base.NOW


class TestSeveralReservations(slots_base.PlacesTestCase):

    def test_each_reservation_has_its_slots(self):
        lease = self.reserve(50, 100, self.places(2), self.places(1, 2))
        self.assertEqual([[('one', '')] * 2, [('one', '')]], [
            self.booked(lease, number) for number in range(2)])
        self.assertEqual(
            [1, 1, 2], sorted(row['VCPU'] for row in self.scalars(
                models.Booking.resources)))
        self.assertEqual({'leases': 1, 'reservations': 2, 'events': 2,
                          'hosts': 1, 'bookings': 3},
                         self.count_rows('changes'))

    def test_reservations_are_admitted_all_or_none(self):
        before = self.everything()
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 100, self.places(3),
            self.places(2))
        self.assertEqual(before, self.everything())
        # Three of the first and one of the second do fit.
        self.assertEqual((5, 4), (
            refused.refusal.wanted, refused.refusal.fits_now))

    def test_boot_and_slot_reservations_can_be_combined(self):
        new = self.new_lease(50, 100, count=2)
        lease = self.leases.creation.create(
            dataclasses.replace(new, reservations=(
                *new.reservations, self.places(2))), 'encrypted')
        self.assertEqual(sorted(new.server_ids),
                         sorted(lease['reservations'][0]['servers']))
        self.assertEqual([], lease['reservations'][1]['servers'])
        self.assertEqual('PENDING', lease['status'])

    def test_lease_may_have_no_reservations(self):
        lease = self.leases.creation.create(new_leases.NewLease(
            'project', 'user', self.request(50, 100), ()), None)
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual({'leases': 1, 'events': 2, 'hosts': 1},
                         self.count_rows('changes'))
        self.assertEqual(0, self.generation('one') - 1)
        lease = self.update(lease, start=60, end=200, name='other')
        self.assertEqual('other', lease['name'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual('ACTIVE', self.status(lease))
        self.update(lease, end=150)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_immediate_slot_lease_is_started_by_engine(self):
        lease = self.reserve(0, 100)
        self.assertEqual('PENDING', lease['status'])
        self.assertEqual(1, driven.run_due(self.new_engine()))
        self.assertEqual('ACTIVE', self.status(lease))


class TestResize(slots_base.PlacesTestCase):

    def test_lease_grows_if_capacity_is_free(self):
        for active in (False, True):
            lease = self.reserve(0, 100, active=active)
            answer = self.update(lease, self.places(3))
            self.assertEqual(answer, views.get(self.database, lease['id']))
            reservation, = answer['reservations']
            self.assertEqual(3, reservation['amount'])
            self.assertEqual([('one', '')] * 3, self.booked(lease))
            self.assert_refused(errors.Refused, 'next_start: none' if active
                                else 'larger than', lease, self.places(5))
            self.assertEqual(1, self.room())
            driven.withdraw(self.leases, lease['id'])

    def test_added_slots_may_be_on_other_hosts(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(3), active=active)
            self.host('two', VCPU=2)
            self.update(lease, self.places(5))
            self.assertEqual(5, len(self.booked(lease)))
            driven.withdraw(self.leases, lease['id'])

    def test_other_hosts_are_looked_up_only_if_needed(self):
        self.host('two', VCPU=4)
        three = self.host('three', VCPU=4)
        lease = self.reserve(50, 100, self.places(4))
        (here, _server), *_others = self.booked(lease)
        elsewhere = mock.Mock(return_value={
            lease['reservations'][0]['id']: self.places(
                4, hosts=frozenset([three]))})
        self.update(lease, end=150, elsewhere=elsewhere)
        self.assertEqual((0, [(here, '')] * 4), (
            elsewhere.call_count, self.booked(lease)))
        with self.database.reader() as session:
            uuid = session.scalar(sa.select(models.Host.uuid).where(
                models.Host.name == here))
        self.reserve(150, 200, self.places(hosts=frozenset([uuid])))
        self.update(lease, end=200, elsewhere=elsewhere)
        self.assertEqual((1, [('three', '')] * 4), (
            elsewhere.call_count, self.booked(lease)))

    def test_lease_shrinks_and_frees_capacity(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(4), active=active)
            self.assertEqual(0, self.room())
            self.update(lease, self.places(1))
            self.assertEqual([('one', '')], self.booked(lease))
            self.assertEqual(3, self.room())
            driven.withdraw(self.leases, lease['id'])

    def test_slots_with_servers_are_kept_when_shrinking(self):
        lease = self.reserve(0, 100, self.places(4), active=True)
        first, second = self.take_slots(lease, 2)
        third, = self.take_slots(lease)
        self.leases.slots.free([first])
        self.update(lease, self.places(2))
        self.assertEqual(sorted([('one', second), ('one', third)]),
                         self.booked(lease))
        refused = self.assert_refused(
            errors.InvalidLeaseParams, 'has 2 servers: delete some', lease,
            self.places(1))
        self.assertIn('at least 2', str(refused))

    def test_reservation_can_be_changed_before_start(self):
        lease = self.reserve(50, 100, self.places(2))
        self.assertEqual([2], self.scalars(models.Reservation.amount))
        answer = self.update(lease, self.places(1, 4, affinity=True))
        self.assertEqual([1], self.scalars(models.Reservation.amount))
        reservation, = answer['reservations']
        self.assertEqual(
            (1, {'amount': 1, 'vcpus': 4, 'affinity': True}, {'VCPU': 4}), (
                reservation['amount'], reservation['params'],
                reservation['resources']))
        self.assertEqual([{'VCPU': 4}],
                         self.scalars(models.Booking.resources))
        self.assertEqual([{'vcpus': 4}],
                         self.scalars(models.Reservation.spec))
        self.lifecycle.lease_start.start(lease['id'])
        reserved, = self.places_type.open.values()
        self.assertEqual(({'vcpus': 4}, True), (
            reserved.spec, reserved.params['affinity']))

    def test_only_amount_can_be_changed_after_start(self):
        lease = self.reserve(0, 100, self.places(2), active=True)
        same = self.places(2)
        for other in (self.places(2, 2), self.places(1, 2),
                      dataclasses.replace(same, demand=model.Demand(
                          {'VCPU': 2}, 2)),
                      self.places(2, affinity=True),
                      self.places(1, affinity=False)):
            self.assert_refused(
                errors.InvalidLeaseParams,
                'only the amounts of its reservations', lease, other)

    def test_reservation_created_by_boot_cannot_be_changed(self):
        lease = self.lease(50, 100)
        self.assert_refused(errors.InvalidLeaseParams, 'created by a boot',
                            lease, self.places(2))

    def test_reservation_of_another_lease_is_not_changed(self):
        lease, other = self.reserve(50, 100), self.reserve(50, 100)
        self.assert_refused(
            errors.InvalidLeaseParams, 'does not belong to lease',
            {**lease, 'reservations': other['reservations']}, self.places(2))

    def test_one_of_several_reservations_can_be_changed(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(1), self.places(2),
                                 active=active)
            answer = self.update(lease, None, self.places(3))
            self.assertEqual([1, 3], [
                one['amount'] for one in answer['reservations']])
            self.assertEqual([1, 3], [
                len(self.booked(lease, number)) for number in range(2)])
            driven.withdraw(self.leases, lease['id'])

    def test_reservations_change_all_or_none(self):
        for active in (False, True):
            lease = self.reserve(0, 100, self.places(2), self.places(2),
                                 active=active)
            self.update(lease, self.places(1), self.places(3))
            self.assertEqual([1, 3], [
                len(self.booked(lease, number)) for number in range(2)])
            self.assert_refused(errors.Refused, 'next_start', lease,
                                self.places(2), self.places(3), name='x')
            driven.withdraw(self.leases, lease['id'])

    def test_amount_dates_and_name_change_all_or_none(self):
        self.lease(200, 300)
        for active in (False, True):
            lease = self.reserve(0, 100, active=active)
            self.update(lease, self.places(3), end=250, name='longer')
            self.assert_refused(errors.Refused, 'next_start', lease,
                                self.places(4), name='even longer')
            self.update(lease, self.places(4), end=200, name='full')
            self.assertEqual(
                ('full', 4), ((found := views.get(
                    self.database, lease['id']))['name'],
                    found['reservations'][0]['amount']))
            driven.withdraw(self.leases, lease['id'])

    def test_affinity_is_kept_when_growing(self):
        self.host('two', VCPU=9)
        lease = self.reserve(0, 100, self.places(2, affinity=True,
                             hosts=frozenset([self.uuid_of('one')])),
                             active=True)
        self.update(lease, self.places(4, affinity=True))
        self.assertEqual([('one', '')] * 4, self.booked(lease))
        self.assert_refused(errors.Refused, 'next_start: none', lease,
                            self.places(5, affinity=True))

    def test_anti_affinity_is_kept_when_growing(self):
        self.host('two', VCPU=9)
        lease = self.reserve(0, 100, self.places(1, affinity=False),
                             active=True)
        self.update(lease, self.places(2, affinity=False))
        self.assertEqual([('one', ''), ('two', '')], self.booked(lease))
        self.assert_refused(errors.Refused, 'next_start: none', lease,
                            self.places(3, affinity=False))

    def test_anti_affinity_is_kept_when_moved(self):
        self.host('two', VCPU=9)
        lease = self.reserve(50, 100, self.places(2, affinity=False))
        self.host('three', VCPU=9)
        in_the_way = self.new_lease(
            100, 200, count=4, hosts=frozenset([self.uuid_of('one')]))
        self.leases.creation.create(in_the_way, 'encrypted')
        # Both would fit on the second host.
        self.assert_refused(errors.Refused, 'next_start: 2027-01-15T08:03:20',
                            lease, end=150)
        self.assertEqual([('one', ''), ('two', '')], self.booked(lease))

    def test_resize_after_end_date_is_refused(self):
        """The end of the lease is due, and was not carried out yet."""
        lease = self.reserve(0, 100, active=True)
        self.clock.advance(100)
        self.assert_refused(errors.InvalidLeaseParams, 'nothing can be', lease,
                            self.places(2))
        self.clock.advance(10)
        self.assert_refused(errors.InvalidLeaseParams, 'nothing can be', lease,
                            self.places(2))

    def test_concurrent_resize_to_same_amount_succeeds(self):
        lease = self.reserve(0, 100, active=True)
        other = leases.Leases(self.db.connect(), self.clock,
                              self.admission, self.types)
        lock, done = api.lock, []

        def meanwhile(session, lease_id):
            done.append(None)
            if len(done) == 2:
                other.updates.update(lease['id'], updates.LeaseChange(
                    reservations={
                        lease['reservations'][0]['id']: self.places(3)}))
            return lock(session, lease_id)

        with fixtures.MonkeyPatch('blazar_core.db.api.lock', meanwhile):
            answer = self.update(lease, self.places(3))
        self.assertGreater(len(done), 2)
        self.assertEqual(3, answer['reservations'][0]['amount'])

    def test_existing_slots_do_not_move_when_growing(self):
        self.host('two', VCPU=4)
        lease = self.reserve(0, 100, self.places(2), active=True)
        where = self.booked(lease)
        server_id, = self.take_slots(lease)
        self.update(lease, self.places(6))
        self.assertEqual(where, sorted((host, '') for host, server in
                                       self.booked(lease))[:2])
        self.assertEqual('one', self.host_of(server_id))


class TestUpdateOfTimes(slots_base.PlacesTestCase):

    def times(self, lease, status='UNDONE'):
        return sorted(
            (row.event_type, row.time - NOW) for row in self.scalars(
                models.Event, models.Event.lease_id == lease['id'])
            if row.status == status and row.event_type not in (
                'start_lease', 'end_lease'))

    def with_events(self, start=50, end=100, before_end=90, *mine, **more):
        return self.reserve(start, end, request=self.request(
            start, end, before_end=NOW + before_end, events=[
                requests.EventRequest('mine', NOW + time) for time in mine]),
            **more)

    def events(self, *times, event_type='mine'):
        return tuple(requests.EventRequest(event_type, NOW + time)
                     for time in times)

    def test_lease_is_not_extended_while_a_server_moves(self):
        self.host('one', VCPU=8)
        self.host('two', VCPU=8)
        lease = self.running_lease(0, 100, resources={'VCPU': 1})
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).values(
                migrating_to=sa.select(sa.func.max(
                    models.Host.id)).scalar_subquery()))
        for change in ({'end': NOW + 101}, {'grace_period': 1}):
            self.assertIn('is being migrated or resized', str(
                self.assertRaises(
                    errors.Conflict, self.leases.updates.update, lease['id'],
                    updates.LeaseChange(**change))))
        for change in ({'end': NOW + 99}, {'name': 'other'}):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(**change))

    def test_lease_that_changed_after_the_cloud_was_asked_is_kept(self):
        self.host('one', VCPU=8)
        lease = self.running_lease(0, 100)
        change = updates.LeaseChange(
            end=NOW + 200,
            generation=self.leases.lookup.generation(lease['id']))
        with self.database.writer() as session:
            # Each claim for one of its servers does so.
            api.locked(session, lease['id'])
        self.assertIn('has just changed', str(self.assertRaises(
            errors.Conflict, self.leases.updates.update, lease['id'],
            change)))
        self.leases.updates.update(lease['id'], dataclasses.replace(
            change, generation=change.generation + 1))

    def test_update_of_name_changes_nothing_else(self):
        lease = self.with_events(50, 100, 90, 60)
        self.clock.advance(1)
        answer = self.update(lease, name='other')
        self.assertEqual(
            {**lease, 'name': 'other', 'updated_at': answer['updated_at']},
            answer)

    def test_events_of_user_are_replaced(self):
        lease = self.with_events(50, 100, 90, 60, 70)
        self.update(lease, events=self.events(80))
        self.assertEqual([('before_end_lease', 90), ('mine', 80)],
                         self.times(lease))
        self.update(lease, events=())
        self.assertEqual([('before_end_lease', 90)], self.times(lease))

    def test_events_stay_if_not_given(self):
        lease = self.with_events(50, 100, 90, 60)
        self.update(lease, name='other', end=110)
        self.assertEqual([('before_end_lease', 100), ('mine', 60)],
                         self.times(lease))

    def test_completed_event_is_kept(self):
        lease = self.with_events(0, 100, 90, 10, 50, active=True)
        self.clock.advance(10)
        driven.run_due(self.new_engine())
        self.update(lease, events=self.events(60))
        self.assertEqual([('mine', 10)], self.times(lease, 'DONE'))
        self.assertEqual([('before_end_lease', 90), ('mine', 60)],
                         self.times(lease))

    def test_number_of_completed_events_is_limited(self):
        lease = self.with_events(0, 1000, 900, active=True)
        engine = self.new_engine()
        for number in range(1, 40):
            self.update(lease, events=self.events(number, number),
                        before_end=number)
            self.clock.advance(1)
            driven.run_due(engine)
        self.update(lease, events=())
        self.assertEqual(requests.MAX_EVENTS, len(self.times(lease, 'DONE')))
        self.assertIn(('mine', 39), self.times(lease, 'DONE'))

    def test_end_is_notified_once_for_each_extension(self):
        lease = self.with_events(0, 100, 50, active=True)
        engine = self.new_engine()
        for number in range(1, 5):
            self.clock.advance(50)
            driven.run_due(engine)
            for _twice in range(2):
                self.update(lease, end=50 * number + 100)
                self.assertEqual([('before_end_lease', 50 * number + 50)],
                                 self.times(lease))
            self.assertEqual(number, len(self.times(lease, 'DONE')))

    def test_before_end_date_can_be_set(self):
        lease = self.with_events(50, 100, 90, 60)
        answer = self.update(lease, before_end=70)
        self.assertEqual(NOW + 70, answer['before_end_date'])
        self.assertEqual([('before_end_lease', 70), ('mine', 60)],
                         self.times(lease))
        self.update(lease, before_end=140, end=150)
        self.assertEqual([('before_end_lease', 140), ('mine', 60)],
                         self.times(lease))

    def test_completed_before_end_event_is_repeated_at_given_time(self):
        lease = self.with_events(0, 100, 50, active=True)
        self.clock.advance(50)
        driven.run_due(self.new_engine())
        self.assertEqual([('before_end_lease', 50)],
                         self.times(lease, 'DONE'))
        self.update(lease, end=200, before_end=180)
        self.assertEqual([('before_end_lease', 180)], self.times(lease))
        self.assertEqual([('before_end_lease', 50)],
                         self.times(lease, 'DONE'))

    def test_before_end_event_is_never_before_start(self):
        lease = self.with_events(50, 100, 60)
        answer = self.update(lease, start=80)
        self.assertEqual([('before_end_lease', 80)], self.times(lease))
        self.assertEqual(NOW + 80, answer['before_end_date'])
        self.update(lease, end=90)
        self.assertEqual([('before_end_lease', 80)], self.times(lease))

    def test_times_outside_of_the_lease_are_refused(self):
        lease = self.with_events(50, 100, 90, 60)
        for changed in ({'before_end': 49}, {'before_end': 101},
                        {'events': self.events(49)},
                        {'events': self.events(60, 101)},
                        {'start': 70, 'events': self.events(60)},
                        {'end': 80, 'before_end': 90}):
            self.assert_refused(errors.InvalidLeaseParams,
                                'is not in the remaining', lease, **changed)
        self.update(lease, before_end=100, events=self.events(50, 100))

    def test_event_times_in_the_past_are_refused(self):
        """Events in the past would happen at once."""
        lease = self.with_events(0, 100, 90, active=True)
        self.clock.advance(30)
        for changed in ({'before_end': 29}, {'events': self.events(50, 29)}):
            self.assert_refused(errors.InvalidLeaseParams,
                                'is not in the remaining time', lease,
                                **changed)
        self.update(lease, before_end=30, events=self.events(30))

    def test_refused_update_writes_nothing(self):
        lease = self.with_events(50, 100, 90, 60)
        self.assert_refused(
            errors.InvalidLeaseParams, 'is not in the remaining', lease,
            self.places(3), name='x', start=55, end=120, before_end=130,
            events=self.events(60))

    def test_late_failure_of_update_changes_nothing(self):
        for active in (False, True):
            lease = self.with_events(0, 100, 90, 60, active=active)
            with fixtures.MonkeyPatch(
                    'blazar_core.leases.resize.set_columns', self.fall):
                self.assert_refused(
                    RuntimeError, 'fell', lease, self.places(3), name='x',
                    end=120, before_end=110, events=self.events(80))
            with fixtures.MonkeyPatch(
                    'blazar_core.capacity.ledger._insert', self.fall):
                self.assert_refused(
                    RuntimeError, 'fell', lease, self.places(3), name='x',
                    end=120, before_end=110, events=self.events(80))
            self.update(lease, self.places(3), name='x', end=120,
                        before_end=110, events=self.events(80))
            driven.withdraw(self.leases, lease['id'])

    def fall(self, *args):
        raise RuntimeError('fell')

    def test_offer_sends_no_notifications_until_accepted(self):
        offer = self.leases.creation.offer(new_leases.NewLease(
            'project', 'user', self.request(
                50, 100, before_end=NOW + 90, events=self.events(60)),
            (self.places(2),)), 60)
        self.leases.updates.update(offer['id'], updates.LeaseChange(
            before_end=NOW + 80, events=self.events(70), end=NOW + 90))
        self.clock.advance(59)
        self.assertEqual(0, driven.run_due(self.new_engine()))
        self.assertEqual([], self.notified)
        self.leases.creation.accept(offer['id'])
        self.assertEqual([('before_end_lease', 80), ('mine', 70)],
                         self.times(offer))
        for seconds in (11, 10, 10):
            self.clock.advance(seconds)
            driven.run_due(self.new_engine())
        self.assertEqual(
            {'lease.event.start_lease', 'lease.event.mine',
             'lease.event.before_end_lease', 'lease.event.end_lease'},
            {event for event, _lease_id in self.notified})
