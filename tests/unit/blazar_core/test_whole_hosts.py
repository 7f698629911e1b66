# SPDX-License-Identifier: Apache-2.0

"""Whole hosts in the books: reserved, held, given back, whatever the cloud."""

import dataclasses
import typing as ty
from unittest import mock

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa
from testtools import matchers

from blazar_core.audit import audit
from blazar_core.capacity import assignments
from blazar_core.capacity import eligibility
from blazar_core.capacity import enrollment
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import creation
from blazar_core.leases import hosted_servers
from blazar_core.leases import limits
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import returned_hosts
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW

load_tests = databases.load_tests


class Machines(base.WholeType):
    """So many whole hosts; who has them is written on their doors.

    :ivar doors: by reservation, the uuids of its hosts
    :ivar full: by reservation, the servers that are on its hosts
    :ivar there: by the uuid of a host, the servers that are there
    :ivar among: the hosts of which they are made
    :ivar dirty: the hosts that do not get clean
    :ivar swept: the hosts that were to be cleaned, in order
    :ivar leaving: whether hosts that were leased serve everybody again
    """

    def __init__(self) -> None:
        self.doors: dict[str, tuple[str, ...]] = {}
        self.full: dict[str, list[str]] = {}
        self.there: dict[str, list[str]] = {}
        self.among = model.HostPool.COMMON
        self.cleaning_time = 0
        self.dirty: set[str] = set()
        self.swept: list[str] = []
        self.leaving = False

    def so_many(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(
            model.WHOLE, params['max'], least=params['min'],
            among=self.among, cleaning_time=self.cleaning_time)

    def start(self, reserved: resource_types.ReservationContext) -> None:
        self.doors[reserved.id] = reserved.hosts

    def guests(self, reserved: resource_types.ReservationContext,
               host: str | None = None) -> ty.Collection[str]:
        return [*self.full.get(reserved.id, ()), *(
            server for one in reserved.hosts if host in (None, one)
            for server in self.there.get(one, ()))]

    @property
    def hosts_leave(self) -> bool:
        return self.leaving

    def end(self, reserved: resource_types.ReservationContext) -> None:
        self.doors.pop(reserved.id, None)

    def changed(self, reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def clean(self, reserved: resource_types.ReservationContext,
              hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        self.swept += sorted(hosts)
        return set(hosts) - self.dirty


class WholeHostsTestCase(base.LeaseTestCase):

    def more_types(self):
        self.machines = Machines()
        return {'machine': self.machines}

    def policies(self):
        return {**super().policies(),
                'recycle': end_policies.Recycle()}

    def enrol(self, name, finish=True, **extra):
        """Have a host serve leases only; returns its id."""
        with self.database.writer() as session:
            attempt = enrollment.start(
                session, NOW, self.uuid_of(name), extra)
            if finish:
                enrollment.complete(session, NOW, attempt)
        return attempt.host_id

    def machines_of(self, least=1, most=1):
        params = {'min': least, 'max': most}
        return creation.NewReservation(
            self.machines.wanted(None, params).demand,
            resource_type='machine', params=params, spec={})

    def reserve_machines(self, start=0, end=100, least=1, most=1):
        return self.reserve(start, end, self.machines_of(least, most))

    def bookings_of(self, lease):
        """The hosts of a lease by name, each with what is booked there."""
        with self.database.reader() as session:
            return {host: resources for host, resources in session.execute(
                sa.select(models.Host.name, models.Booking.resources)
                .join(models.Booking, models.Booking.host_id ==
                      models.Host.id).join(models.Booking.reservation)
                .where(models.Reservation.lease_id == lease['id'])).tuples()}

    def held(self):
        with self.database.reader() as session:
            return dict(session.execute(sa.select(
                models.Host.name, models.Host.assigned_to).where(
                    models.Host.assigned_to.is_not(None))).tuples().all())

    def change(self, lease, least, most):
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][0]['id']:
                          self.machines_of(least, most)}))

    def overbooking_check(self):
        database = self.books.connect()
        return overbooking.OverbookingCheck(
            database, self.clock, self.admission,
            reassignment.Reassignment(database, self.clock, self.types),
            self.new_demands(), lambda event, lease: None,
            self.start_timeout)


class TestReserving(WholeHostsTestCase):

    def test_all_that_a_host_has_is_booked(self):
        self.host('one', VCPU=4, MEMORY_MB=100)
        lease = self.reserve_machines(10, 20)
        self.assertEqual({'one': {'VCPU': 4, 'MEMORY_MB': 100}},
                         self.bookings_of(lease))
        self.assertEqual(
            [{'HOST': 1}], [one['resources']
                            for one in lease['reservations']])
        refused = self.assertRaises(
            errors.Refused, self.lease, 0, 100)
        self.assertEqual(NOW + 20, refused.refusal.next_start)
        self.lease(0, 10)
        self.lease(20, 30)

    def test_no_part_of_it_may_be_taken_in_the_same_time(self):
        self.host('one', VCPU=4)
        self.lease(0, 50)
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 49, 100)
        self.assertEqual(NOW + 50, refused.refusal.next_start)
        self.assertEqual(0, refused.refusal.fits_now)
        self.host('two', {'VCPU': 1}, VCPU=4)
        self.assertRaises(errors.Refused, self.reserve_machines, 49, 100)

    def test_as_many_as_there_are_but_not_fewer_than_the_least(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve_machines(0, 100, least=1, most=9)
        self.assertEqual({'one', 'two', 'three'},
                         self.bookings_of(lease).keys())
        self.assertEqual(3, lease['reservations'][0]['amount'])
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 0, 100, 2, 9)
        self.assertEqual((2, NOW + 100), (
            refused.refusal.wanted, refused.refusal.next_start))

    def test_where_there_are_fewer_it_says_how_many_there_are(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=4)
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 0, 100, 3, 3)
        self.assertIn('Only 2 of the 3 requested hosts fit now; no start '
                      'would provide 3.', str(refused))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.machines_of(3, 3),
            self.places(amount=1, vcpus=4))
        self.assertNotIn('requested hosts fit now', str(refused))

    def test_with_others_it_takes_more_only_of_what_they_leave(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve(
            0, 100, self.machines_of(1, 3), self.machines_of(1, 1),
            self.places(amount=1, vcpus=4))
        self.assertEqual([1, 1, 1], sorted(
            one['amount'] for one in lease['reservations']))

    def test_it_grows_and_shrinks_before_it_starts(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve_machines(50, 100)
        lease = self.change(lease, 2, 2)
        self.assertEqual(2, len(self.bookings_of(lease)))
        lease = self.change(lease, 1, 9)
        self.assertEqual(3, len(self.bookings_of(lease)))
        lease = self.change(lease, 1, 1)
        self.assertEqual(1, len(self.bookings_of(lease)))
        self.assertEqual(1, lease['reservations'][0]['amount'])
        self.assertRaises(errors.Refused, self.change, lease, 4, 4)
        self.assertEqual(1, len(self.bookings_of(lease)))

    def test_it_moves_and_is_prolonged_as_a_whole(self):
        self.host('one', VCPU=4)
        lease = self.reserve_machines(50, 100)
        self.lease(200, 300)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + 200))
        self.assertRaises(errors.Refused, self.leases.updates.update,
                          lease['id'], updates.LeaseChange(end=NOW + 201))
        self.host('two', VCPU=8)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            start=NOW + 250, end=NOW + 350, reservations={
                lease['reservations'][0]['id']: self.machines_of()}))
        self.assertEqual({'two': {'VCPU': 8}}, self.bookings_of(lease))

    def test_a_host_that_is_larger_by_now_is_booked_as_it_is(self):
        """Nobody else gets what has come."""
        uuid = self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        for vcpus in (8, 2):
            self.report(uuid, 'one', None, {'VCPU': vcpus})
            self.assertEqual({'one': {'VCPU': vcpus}},
                             self.bookings_of(lease))
            self.assertRaises(errors.Refused, self.lease, 15, 16)
        self.overbooking_check().look()
        self.assertEqual({'one': {'VCPU': 2}}, self.bookings_of(lease))

    def test_one_that_is_gone_is_exchanged_for_another(self):
        self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        self.host('two', VCPU=16)
        with self.database.writer() as session:
            inventory.retain(session, [self.uuid_of('two')], NOW)
        self.overbooking_check().look()
        self.assertEqual({'two': {'VCPU': 16}}, self.bookings_of(lease))

    def test_one_that_is_gone_comes_back_as_it_is_then(self):
        uuid = self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        with self.database.writer() as session:
            inventory.retain(session, [], NOW)
        self.overbooking_check().look()
        self.assertEqual({}, self.bookings_of(lease))
        self.assertTrue(views.get(
            self.database, lease['id'])['reservations'][0][
                'missing_resources'])
        self.report(uuid, 'one', None, {'VCPU': 6})
        self.overbooking_check().look()
        self.assertEqual({'one': {'VCPU': 6}}, self.bookings_of(lease))

    def test_nothing_is_booked_of_a_host_that_has_nothing(self):
        """It went between the search and the decision."""
        self.host('one', VCPU=4)
        lease = self.reserve(0, 10)
        with self.database.writer() as session:
            inventory.retain(session, [], NOW)
        new = ledger.NewBooking(
            lease['reservations'][0]['id'], self.scalars(models.Host.id)[0],
            None, model.Window(NOW + 10, NOW + 20), model.WHOLE)
        with self.database.writer() as session:
            self.assertRaises(ledger.OverCapacity, ledger.amend, session, NOW,
                              [ledger.Edit(None, new)])


class TestFailing(WholeHostsTestCase):
    """A lease has all of a host, which fails."""

    def setUp(self):
        super().setUp()
        self.uuids = {name: self.host(name, VCPU=4) for name in (
            'one', 'two')}
        self.engine = self.new_engine()
        self.overbooking = overbooking.OverbookingCheck(
            self.database, self.clock, self.admission,
            self.leases.reassignment, self.new_demands(),
            lambda event, lease: self.notified.append((event, lease['id'])),
            self.start_timeout)
        self.host_status = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(0, 0, 3600),
            lambda event, lease: self.notified.append((event, lease['id'])))

    def see(self, name, down):
        self.host_status.update({uuid: down if one == name else None for one,
                                 uuid in self.uuids.items()})
        self.overbooking.look()
        driven.run_due(self.engine)

    def fail(self, name):
        self.see(name, host_status.Down('Its power is off.', certain=True))

    def missing(self, lease):
        return views.get(self.database, lease['id'])['reservations'][0][
            'missing_resources']

    def on(self, names, start, end, count=1):
        """A lease of so many hosts, of these."""
        wanted = self.machines_of(count, count)
        return self.reserve(start, end, dataclasses.replace(
            wanted, demand=dataclasses.replace(
                wanted.demand, hosts=frozenset(
                    self.uuids[name] for name in names))))

    def after_failure(self, start, runs_until, later):
        """One host of three fails; one is in use for some time, and one is
        booked for later. Who has lost the first, and who comes later.
        """
        self.uuids['three'] = self.host('three', VCPU=4)
        lost = self.on(['one'], start, 7200)
        self.on(['three'], 0, runs_until)
        other = self.on(['two'], later, 6000)
        driven.run_due(self.engine)
        self.fail('one')
        return lost, other

    def assert_exchanged(self, lost, other):
        self.assertEqual(({'two'}, {'three'}, False), (
            self.bookings_of(lost).keys() - {'one'},
            self.bookings_of(other).keys(), self.missing(lost)))
        self.assertEqual(['lease.update'], [
            event for event, lease_id in self.notified
            if lease_id == other['id']])

    def test_who_comes_later_goes_where_all_of_its_time_is_free(self):
        self.assert_exchanged(*self.after_failure(0, 3900, 4000))

    def test_so_it_does_for_one_that_comes_soon(self):
        self.assert_exchanged(*self.after_failure(60, 3900, 4000))

    def assert_each_is_exchanged(self, start):
        """Two hosts of a lease fail; two are in use for some time, and each
        of two more is booked for later.
        """
        names = [f'host{number}' for number in range(6)]
        self.uuids |= {name: self.host(name, VCPU=4) for name in names}
        self.on(['one', 'two'], 0, 9000, 2)
        lost = self.on(names[:2], start, 7200, 2)
        self.on(names[2:4], 0, 3900, 2)
        for name in names[4:]:
            self.on([name], 4000, 6000)
        driven.run_due(self.engine)
        self.host_status.update({self.uuids[name]: host_status.Down(
            'It is off.', True) for name in names[:2]})
        self.overbooking.look()
        self.assertEqual(
            {*names[4:]}, self.bookings_of(lost).keys() - {*names[:2]})
        self.assertIs(False, self.missing(lost))

    def test_so_it_does_for_each_host_in_one_look(self):
        self.assert_each_is_exchanged(0)

    def test_so_it_does_for_each_host_of_one_that_comes_soon(self):
        self.assert_each_is_exchanged(60)

    def test_servers_within_a_lease_of_hosts_are_in_nobodys_way(self):
        self.uuids['three'] = self.host('three', VCPU=4)
        lost, running, other = (
            self.on(*what) for what in (
                (['one'], 0, 7200), (['three'], 0, 3900),
                (['two'], 4000, 6000)))
        driven.run_due(self.engine)
        three, = self.scalars(models.Host.id, models.Host.name == 'three')
        with self.database.writer() as session:
            session.add(models.Booking(
                reservation_id=running['reservations'][0]['id'],
                host_id=three, start_date=NOW + 4100,
                end_date=NOW + 4200, resources={}))
        self.fail('one')
        self.assert_exchanged(lost, other)

    def test_who_comes_later_does_not_go_where_one_has_failed(self):
        self.uuids |= {name: self.host(name, VCPU=4)
                       for name in ('three', 'four')}
        lost = self.on(['four'], 60, 7200)
        self.on(['three'], 0, 3900)
        other = self.on(['two'], 4000, 6000)
        self.on(['one'], 0, 9000)
        driven.run_due(self.engine)
        for _look in range(2):
            self.fail('four')
        self.assertEqual(({'two'}, {'three'}), (
            self.bookings_of(lost).keys(), self.bookings_of(other).keys()))

    def test_what_ends_before_one_comes_is_not_in_its_way(self):
        self.uuids['three'] = self.host('three', VCPU=4)
        lost = self.on(['one'], 2000, 7200)
        self.on(['two'], 0, 500)
        other = self.on(['two'], 4000, 6000)
        self.on(['three'], 0, 3900)
        driven.run_due(self.engine)
        for _look in range(2):
            self.fail('one')
        self.assertEqual(({'two'}, {'three'}), (
            self.bookings_of(lost).keys(), self.bookings_of(other).keys()))

    def test_what_is_where_nobody_may_be_any_more_stays(self):
        """It is nothing that could be dealt out."""
        self.uuids |= {name: self.host(name, VCPU=4)
                       for name in ('three', 'four', 'five', 'six')}
        lost = self.on(['one'], 1000, 7200)
        self.on(['three'], 0, 3900)
        self.on(['two'], 4000, 6000)
        self.on(['four'], 200, 900)
        self.on(['four'], 5000, 9000)
        self.on(['two'], 100, 950)
        early = self.on(['five', 'six'], 500, 4900, 2)
        driven.run_due(self.engine)
        demand, known = self.machines.demand, frozenset(
            uuid for name, uuid in self.uuids.items() if name != 'five')
        self.machines.demand = lambda reserved: dataclasses.replace(
            demand(reserved), hosts=known)
        for _look in range(3):
            self.fail('one')
        self.assertIs(False, self.missing(lost))
        self.assertEqual({'five', 'six'}, self.bookings_of(early).keys())

    def test_each_reservation_of_one_that_comes_soon_gets_its(self):
        names = [f'host{number}' for number in range(6)]
        self.uuids |= {name: self.host(name, VCPU=4) for name in names}
        self.on(['one', 'two'], 0, 9000, 2)
        wanted = self.machines_of(1, 1)
        lost = self.reserve(60, 7200, *(dataclasses.replace(
            wanted, demand=dataclasses.replace(
                wanted.demand, hosts=frozenset([self.uuids[name]])))
            for name in names[:2]))
        self.on(names[2:4], 0, 3900, 2)
        for name in names[4:]:
            self.on([name], 4000, 6000)
        driven.run_due(self.engine)
        for _look in range(3):
            self.host_status.update({
                self.uuids[name]: host_status.Down('It is off.', True)
                for name in names[:2]})
            self.overbooking.look()
        self.assertEqual({*names[4:]}, self.bookings_of(lost).keys())

    def test_whose_type_says_nothing_now_keeps_nobody_from_it(self):
        self.uuids |= {name: self.host(name, VCPU=4)
                       for name in ('three', 'four')}
        silent = self.on(['four'], 5000, 6000)
        self.on(['four'], 0, 4000)
        with self.database.writer() as session:
            session.get(models.Reservation, silent['reservations'][0][
                'id']).resource_type = 'gone'
        lost = self.on(['one'], 0, 7200)
        self.on(['three'], 0, 3900)
        other = self.on(['two'], 4000, 6000)
        driven.run_due(self.engine)
        self.fail('one')
        self.assertEqual(({'one', 'two'}, {'three'}), (
            self.bookings_of(lost).keys(), self.bookings_of(other).keys()))

    def test_nobody_makes_way_for_what_is_deleted_at_this_moment(self):
        lease = self.on(['one'], 60, 7200)
        with self.database.writer() as session:
            row = session.scalars(sa.select(models.Booking)).one()
            row.host_id, deleted = None, session.get(models.Lease, lease['id'])
            deleted.deleted_at = NOW
            lost = row.reservation_id, {row.id: None}
        bookings = self.overbooking._booking_reassignment
        with mock.patch.object(bookings._reshuffler, 'free') as free:
            self.assertTrue(bookings._find(*lost))
        free.assert_not_called()

    def test_who_cannot_be_helped_keeps_nobody_from_it(self):
        """The older one asks first, each time, and in vain."""
        reshuffler = self.overbooking._booking_reassignment._reshuffler
        tried = []
        demand, window = self.machines.so_many({'min': 1, 'max': 1}), (
            model.Window(NOW, NOW + 100))

        def free(*_what):
            self.clock.advance(2)
            return False

        reshuffler._free = free
        # Looks are more often than it rests, or not so.
        for wait in (0, 3, 20, 20, 3, 20, 60, 60):
            self.clock.advance(wait)
            for one in ('old', 'young', 'last'):
                before = self.clock.elapsed()
                reshuffler.free(one, demand, window, ())
                if self.clock.elapsed() > before:
                    tried.append(one)
        self.assertEqual(2 * ['old', 'young', 'last'], tried)

    def test_who_asked_and_has_gone_keeps_nobody_from_it(self):
        reshuffler = self.overbooking._booking_reassignment._reshuffler
        demand, window = self.machines.so_many({'min': 1, 'max': 1}), (
            model.Window(NOW, NOW + 100))
        reshuffler._free = lambda *_what: self.clock.advance(2) and False
        reshuffler.free('one', demand, window, ())
        self.assertFalse(reshuffler.is_next('gone'))
        self.clock.advance(20)
        self.assertFalse(reshuffler.is_next('one'))
        self.clock.advance(41)
        self.assertTrue(reshuffler.is_next('one'))

    def test_where_it_fails_others_have_their_turn(self):
        reshuffler = self.overbooking._booking_reassignment._reshuffler
        demand, window = self.machines.so_many({'min': 1, 'max': 1}), (
            model.Window(NOW, NOW + 100))

        def free(*_what):
            self.clock.advance(2)
            raise ValueError('It is odd.')

        reshuffler._free = free
        self.assertRaises(ValueError, reshuffler.free,
                          'one', demand, window, ())
        self.assertFalse(reshuffler.is_next('other'))
        self.clock.advance(20)
        self.assertFalse(reshuffler.is_next('one'))
        self.assertTrue(reshuffler.is_next('other'))

    def test_where_another_process_was_faster_it_is_looked_again_soon(self):
        reshuffler = self.overbooking._booking_reassignment._reshuffler

        def free(*_what):
            self.clock.advance(2)
            raise api.Outdated('leases')

        reshuffler._free = free
        self.assertFalse(reshuffler.free(
            'one', self.machines.so_many({'min': 1, 'max': 1}),
            model.Window(NOW, NOW + 100), ()))
        self.clock.advance(2)
        self.assertTrue(reshuffler.is_next('one'))

    def test_who_needs_no_whole_hosts_does_not_wait_for_one(self):
        """It would keep others from it."""
        asked, self.uuids['three'] = [], self.host('three', VCPU=2)
        reshuffler = self.overbooking._booking_reassignment._reshuffler
        reshuffler.is_next = lambda one: bool(asked.append(one))
        its = dataclasses.replace(self.places(), demand=dataclasses.replace(
            self.places().demand, hosts=frozenset([self.uuids['three']])))
        self.reserve(60, 7200, its)
        self.reserve(8000, 9000, its, its)
        self.on(['one', 'two'], 0, 9000, 2)
        lost = self.on(['one', 'two'], 9100, 9200, 2)
        driven.run_due(self.engine)
        with self.database.writer() as session:
            for row in session.query(models.Booking).filter(
                    models.Booking.start_date > NOW):
                row.host_id = None
        for _look in range(2):
            self.overbooking.look()
        self.assertEqual({lost['reservations'][0]['id']}, {*asked})

    def test_it_is_no_difference_that_one_came_later(self):
        lease = self.reserve_machines(0, 7200)
        driven.run_due(self.engine)
        self.clock.advance(5)
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.held().keys())
        found = audit.Audit(self.database, self.clock, self.lifecycle,
                            self.encryption.open, 60)
        self.assertEqual([], [*found.differences()])
        for start, end in ((6, 7200), (5, 7100)):
            with self.database.writer() as session:
                for row in session.query(models.Booking).filter(
                        models.Booking.start_date == NOW + 5):
                    row.start_date, row.end_date = NOW + start, NOW + end
            one, = found.differences()
            self.assertIn(lease['id'], one.text)
            with self.database.writer() as session:
                for row in session.query(models.Booking).filter(
                        models.Booking.start_date >= NOW + 5,
                        models.Booking.outage.is_(None)):
                    row.start_date, row.end_date = NOW + 5, NOW + 7200

    def test_where_it_can_go_nowhere_else_it_stays(self):
        lost, other = self.after_failure(0, 3900, 3800)
        self.assertEqual(({'one'}, {'two'}, True), (
            self.bookings_of(lost).keys(), self.bookings_of(other).keys(),
            self.missing(lost)))
        self.assertNotIn(other['id'], dict(self.notified).values())

    def test_where_nothing_is_found_it_is_not_looked_all_the_time(self):
        reshuffler = self.overbooking._booking_reassignment._reshuffler
        looks = []
        reshuffler._free = lambda *_what: looks.append(
            self.clock.advance(2))
        for wait, looked in ((0, 1), (0, 1), (19, 1), (1, 2), (0, 2)):
            self.clock.advance(wait)
            self.assertFalse(reshuffler.free(
                'one', self.machines.so_many({'min': 1, 'max': 1}),
                model.Window(NOW, NOW + 100), ()))
            self.assertEqual(looked, len(looks))

    def test_it_gets_another_one_beside_it(self):
        lease = self.reserve_machines(0, 7200)
        driven.run_due(self.engine)
        self.assertEqual({'one'}, self.held().keys())
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.assertEqual({'one', 'two'}, self.held().keys())
        self.assertIs(False, self.missing(lease))
        self.assertEqual(
            [('lease.degraded', lease['id']), ('lease.update', lease['id']),
             ('lease.healed', lease['id'])], self.notified[-3:])
        (listed,), _more = views.page(self.database, views.Query())
        self.assertEqual((False, True), tuple(
            listed['reservations'][0][flag] for flag in (
                'missing_resources', 'resources_changed')))
        self.assertThat(listed['warnings'], matchers.MatchesListwise([
            matchers.Contains('have changed')]))
        # What else is said of it is not about its hosts.
        for _time in range(2):
            self.change(lease, 1, 1)
            self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        # It does not get a third one, unless that is asked for.
        self.uuids['three'] = self.host('three', VCPU=4)
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.see('one', None)
        larger = self.change(lease, 2, 2)
        self.assertEqual(2, larger['reservations'][0]['amount'])
        self.assertEqual(
            {'one', 'two', 'three'}, self.bookings_of(lease).keys())
        driven.run_due(self.engine)
        # The one that was replaced stays beside those that are left.
        self.change(lease, 1, 1)
        driven.run_due(self.engine)
        self.assertEqual({'one', 'two'}, self.held().keys())
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual({}, self.held())
        self.assertEqual(0, self.count_rows()['bookings'])

    def test_one_that_runs_says_how_many_it_has_of_those_it_may_have(self):
        lease = self.reserve_machines(0, 7200)
        self.assertEqual([], lease['warnings'])
        driven.run_due(self.engine)
        lease = self.change(lease, 1, 3)
        (warning,) = lease['warnings']
        self.assertIn('has 2 of at most 3 hosts', warning)
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.assertEqual([], self.change(lease, 1, 2)['warnings'])

    def test_where_they_are(self):
        lease = self.reserve_machines(0, 7200, 2, 2)
        (reservation,) = lease['reservations']
        driven.run_due(self.engine)
        self.fail('two')
        with self.database.reader() as session:
            service_hosts = {host.name: host.service_host
                             for host in session.scalars(
                                 sa.select(models.Host))}
            found = hosted_servers.booked(session, [reservation['id'],
                                                    'other'])
        self.assertEqual({reservation['id']: [
            hosted_servers.Host('one', service_hosts['one'], False),
            hosted_servers.Host('two', service_hosts['two'], True)]}, found)

    def test_it_waits_for_one_where_there_is_none(self):
        lease = self.reserve_machines(0, 7200)
        other = self.reserve_machines(100, 200)
        driven.run_due(self.engine)
        self.fail('one')
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.assertEqual({'two'}, self.bookings_of(other).keys())
        self.assertIs(True, self.missing(lease))
        (listed,), _more = views.page(self.database, views.Query(limit=1))
        self.assertIs(True, listed['degraded'])
        (warning,) = listed['warnings']
        self.assertIn('1 host of reservation', warning)
        self.assertIn('failed', warning)
        self.assertEqual([warning], views.get(
            self.database, lease['id'])['warnings'])
        self.lifecycle.lease_end.delete(other['id'])
        driven.run_due(self.engine)
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.assertIs(False, self.missing(lease))

    def test_one_of_which_nothing_is_known_keeps_no_other_from_its(self):
        """What it asked for is no more, say."""
        broken = self.reserve_machines(0, 7200)
        other = self.reserve_machines(0, 7200)
        driven.run_due(self.engine)
        demand = self.machines.demand

        def demand_of(reserved):
            if reserved.lease_id == broken['id']:
                raise errors.InvalidLeaseParams('There is no such rack.')
            return demand(reserved)

        self.machines.demand = demand_of
        self.uuids['three'] = self.host('three', VCPU=4)
        down = host_status.Down('Its power is off.', certain=True)
        self.host_status.update({
            self.uuids['one']: down, self.uuids['two']: down,
            self.uuids['three']: None})
        self.overbooking.look()
        self.assertEqual({'one'}, self.bookings_of(broken).keys())
        self.assertEqual({'two', 'three'}, self.bookings_of(other).keys())

    def test_one_that_has_not_begun_goes_elsewhere(self):
        lease = self.reserve_machines(100, 7200)
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.fail('one')
        self.assertEqual({'two'}, self.bookings_of(lease).keys())


class TestLimits(WholeHostsTestCase):

    def asked(self, **resources):
        return limits.Asked('project', 'user', model.Window(NOW, NOW + 50),
                            0, resources)

    def test_hosts_count_as_such_and_not_by_what_they_have(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=64)
        self.books.conf.set_override(
            'max_reserved_hosts_per_project', 3, 'blazar_enforcement')
        self.books.conf.set_override(
            'max_reserved_vcpus_per_project', 10, 'blazar_enforcement')
        limited = limits.Limits(self.books.conf, self.database, self.clock,
                                serverless=['machine'])
        self.reserve_machines(0, 100, 2, 2)
        limited.check(self.asked(VCPU=10))
        limited.check(self.asked(HOST=1))
        exc = self.assertRaises(
            errors.LimitExceeded, limited.check, self.asked(HOST=2))
        self.assertIn(
            'may have 3 whole hosts in leases at most '
            '(max_reserved_hosts_per_project): its other leases have 2 at '
            'the same time, and this one asks for 2', str(exc))

    def test_a_period_of_grace_is_as_long_as_the_lease_is_longer(self):
        self.host('one', VCPU=4)
        self.machines.cleaning_time = 60
        lease = self.reserve(50, 1050, self.machines_of(
            1, 1), request=self.request(50, 1050, grace_period=100))
        self.books.conf.set_override(
            'max_lease_duration', 500, 'blazar_enforcement')
        limited = limits.Limits(self.books.conf, self.database, self.clock,
                                serverless=['machine'])

        def check(end, lease_id=lease['id']):
            limited.check(limits.Asked(
                'project', 'user', model.Window(NOW + 50, NOW + end + 160), 0,
                {'HOST': 1}, lease_id=lease_id, resized=False,
                cleaning_time=60))

        # It takes no more than it has already.
        check(1050)
        check(1000)
        exc = self.assertRaises(errors.LimitExceeded, check, 1051)
        self.assertIn('would last 18 minutes 21 seconds', str(exc))
        check(450, None)
        self.assertRaises(errors.LimitExceeded, check, 451, None)


class TestHolding(WholeHostsTestCase):

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuid = self.host('one', VCPU=4)

    def started(self, **wanted):
        lease = self.reserve_machines(**wanted)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        return lease, lease['reservations'][0]['id']

    def look(self, usage):
        """Ask the cloud what runs on the host."""
        with self.database.writer() as session:
            inventory.report_usage(
                session, self.clock.now(), self.uuid, {'somebody': usage},
                inventory.generations(session, [self.uuid])[self.uuid])

    def test_from_start_to_end_it_has_all_of_the_host(self):
        lease, reservation_id = self.started()
        self.assertEqual({'one': reservation_id}, self.held())
        self.assertEqual({reservation_id: (self.uuid,)},
                         self.machines.doors)
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(({}, {}), (self.held(), self.machines.doors))
        self.assertEqual([self.clock.now()],
                         self.scalars(models.Host.recheck_at))

    def test_what_runs_within_it_is_no_usage(self):
        _lease, _id = self.started()
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        with self.database.begin() as connection:
            self.assertTrue(inventory.record(
                connection, self.clock.now(), 'one', 'one', 'server',
                {'VCPU': 1}))
        self.assertEqual([{}], self.scalars(models.Host.usage))

    def test_what_is_left_when_it_is_given_back_is_usage(self):
        _lease, _id = self.started()
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        self.assertEqual([{'VCPU': 3}], self.scalars(models.Host.usage))

    def test_its_room_is_taken_until_it_is_really_given_back(self):
        lease, reservation_id = self.started()
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual({'one': reservation_id}, self.held())
        refused = self.assertRaises(errors.Refused, self.lease, 100, 110)
        self.assertEqual(NOW + 160, refused.refusal.next_start)
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.lease(400, 410)

    def test_the_servers_that_are_there_come_to_their_end_first(self):
        lease, reservation_id = self.started()
        guest = uuidutils.generate_uuid()
        self.cloud.servers[guest] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [guest]
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual([guest], self.cloud.deleted)
        self.assertEqual({reservation_id: (self.uuid,)}, self.machines.doors)
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual({}, self.machines.doors)
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))

    def test_who_comes_next_waits_however_long_it_takes(self):
        first, first_id = self.started()
        self.machines.full[first_id] = [uuidutils.generate_uuid()]
        second = self.reserve_machines(100, 2000)
        self.clock.advance(100 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(second))
        self.assertEqual({'one': first_id}, self.held())
        self.assertIn('not free yet', views.get(
            self.database, second['id'])['status_reason'])
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.clock.advance(60)
        driven.run_due(self.engine)
        # Nobody has looked what is left there.
        self.assertEqual('PENDING', self.status(second))
        self.look({'VCPU': 1})
        self.clock.advance(60)
        driven.run_due(self.engine)
        # Somebody is.
        self.assertEqual('PENDING', self.status(second))
        self.assertEqual({}, self.held())
        self.look({})
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(second))
        self.assertEqual('', views.get(
            self.database, second['id'])['status_reason'])
        self.assertEqual({'one': second['reservations'][0]['id']},
                         self.held())

    def test_one_that_is_moved_waits_for_its_new_start_alone(self):
        _first, first_id = self.started()
        self.machines.full[first_id] = [uuidutils.generate_uuid()]
        second = self.reserve_machines(100, 2000)
        self.clock.advance(100 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertIn('not free yet', self.reason(second))
        self.leases.updates.update(second['id'], updates.LeaseChange(
            start=NOW + 1000))
        self.assertEqual(('PENDING', ''), (
            self.status(second), self.reason(second)))

    def test_nor_does_it_start_beside_a_server_that_overstays(self):
        lease = self.running_lease(0, 50)
        whole = self.reserve_machines(50, 2000)
        self.clock.advance(50 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(whole))
        self.assertEqual({}, self.held())
        self.cloud.servers.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(whole))

    def test_hosts_that_come_later_are_held_too(self):
        lease, reservation_id = self.started()
        other = self.host('two', VCPU=2)
        self.change(lease, 2, 2)
        driven.run_due(self.engine)
        self.assertEqual({'one': reservation_id, 'two': reservation_id},
                         self.held())
        self.assertEqual({self.uuid, other},
                         set(self.machines.doors[reservation_id]))

    def test_what_could_not_start_holds_nothing(self):
        lease, reservation_id = self.started()
        with self.database.writer() as session:
            row = session.get(models.Lease, lease['id'])
            row.status = states.Lease.STARTING
        self.lifecycle.lease_start.give_up(
            lease['id'], states.EventType.START)
        self.assertEqual({}, self.held())
        self.assertEqual('ERROR', self.status(lease))

    def test_to_be_handed_over_twice_is_to_be_once(self):
        lease, _id = self.started()
        before = self.scalars(models.Host.generation)
        with self.database.writer() as session:
            assignments.assign(session, NOW, session.get(
                models.Lease, lease['id']).reservations)
        self.assertEqual(before, self.scalars(models.Host.generation))


class TestCleaning(WholeHostsTestCase):
    """Two hosts, of a lease that was over at 100."""

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuids = sorted(
            self.host(name, VCPU=4) for name in ('one', 'two'))

    def started(self, cleaning_time=0, **values):
        self.machines.cleaning_time = cleaning_time
        lease = self.reserve(
            0, 100, self.machines_of(2, 2), request=self.request(**values))
        driven.run_due(self.engine)
        return lease, lease['reservations'][0]['id']

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def looked(self):
        """The cloud was asked what is left on the hosts: nothing."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=None))

    def test_until_it_is_over_nobody_gets_the_hosts(self):
        lease, reservation_id = self.started(cleaning_time=60)
        for start in (100, 159):
            refused = self.assertRaises(
                errors.Refused, self.reserve_machines, start, 300)
            self.assertEqual(NOW + 160, refused.refusal.next_start)
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(lease_conditions.CLEANING.message, self.reason(lease))
        self.assertEqual({'one', 'two'}, self.held().keys())
        self.assertIn(reservation_id, self.machines.doors)
        self.run_at(159)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(160)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(({}, {}, ''), (
            self.held(), self.machines.doors, self.reason(lease)))
        self.assertEqual([(None, None)] * 2, [
            (row.vacated_at, row.cleaned_at)
            for row in self.scalars(models.Host)])

    def test_it_begins_when_the_last_server_has_gone(self):
        lease, reservation_id = self.started(cleaning_time=60)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.run_at(100)
        self.assertEqual([], self.machines.swept)
        self.machines.full.clear()
        self.run_at(130)
        self.run_at(189)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(190)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_a_host_is_cleaned_until_it_is_clean_and_not_again(self):
        lease, _id = self.started()
        first, second = self.uuids
        self.machines.dirty = {second}
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(lease_conditions.CLEANING.message, self.reason(lease))
        self.run_at(200)
        self.assertEqual([first, second, second], self.machines.swept)
        self.assertEqual(2, len(self.held()))
        self.machines.dirty.clear()
        self.run_at(300)
        self.assertEqual([first, second, second, second],
                         self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_they_are_cleaned_for_each_lease(self):
        for _time in range(2):
            self.started()
            self.clock.advance(100)
            driven.run_due(self.engine)
            self.clock.advance(-100)
        self.assertEqual(self.uuids * 2, self.machines.swept)

    def test_nobody_cleans_what_was_not_used(self):
        self.machines.cleaning_time = 60
        lease = self.reserve_machines(50, 100)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))
        self.assertEqual([], self.machines.swept)

    def test_it_is_as_long_as_when_the_lease_was_made(self):
        lease, _id = self.started(cleaning_time=60)
        self.machines.cleaning_time = 0
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 200))
        self.assertEqual({NOW + 260}, {*self.scalars(
            models.Booking.end_date)})
        self.run_at(200)
        self.run_at(259)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(260)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_could_not_start_is_cleaned_when_it_was_used(self):
        """It was given up, and started in the end."""
        start, self.machines.start = self.machines.start, lambda _: 1 / 0
        self.machines.cleaning_time = 600
        lease = self.reserve_machines(0, 10_000, 2, 2)
        driven.run_due(self.engine)
        self.lifecycle.lease_start.give_up(lease['id'], states.EventType.START)
        self.assertEqual([], self.machines.swept)
        self.assertEqual('ERROR', self.status(lease))
        self.machines.start = start
        self.looked()
        second = self.reserve_machines(100, 10_000, 2, 2)
        self.run_at(400)
        self.assertEqual('ACTIVE', self.status(second))
        self.run_at(10_000)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATING', self.status(second))

    def test_what_was_left_of_another_time_is_not_said_of_this_one(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                vacated_at=NOW, cleaned_at=NOW, cleaning_until=NOW))
        self.started(cleaning_time=60)
        self.run_at(100)
        self.assertEqual(self.uuids, self.machines.swept)

    def test_a_clock_that_was_ahead_delays_nothing(self):
        lease, _id = self.started(cleaning_time=60)
        self.run_at(100)
        with self.database.writer() as session:
            # What a worker writes that dies over it.
            session.execute(sa.update(models.Host).values(
                vacated_at=self.clock.now() + 3600, cleaned_at=None,
                cleaning_until=self.clock.now() + 3600 + 30))
        self.machines.swept.clear()
        for _time in range(16):
            self.run_at(self.clock.now() - NOW + 10)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_no_two_are_at_a_host(self):
        """A lease is deleted while its hosts are cleaned."""
        lease, _id = self.started()
        clean, times = self.machines.clean, []

        def slow(*args):
            times.append(self.clock.now())
            if len(times) == 1:
                self.lifecycle.lease_end.delete(lease['id'])
                driven.run_due(self.new_engine('second'))
            return clean(*args)

        self.machines.clean = slow
        self.run_at(100)
        self.assertEqual(1, len(times))
        self.run_at(110)
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))
        self.assertEqual(self.uuids, self.machines.swept)

    def test_who_stands_still_begins_nothing_any_more(self):
        lease, _id = self.started()
        clean, late = self.machines.clean, []

        def frozen(reserved, hosts, deadline):
            self.clock.advance(3600)
            late.append(deadline.passed())
            return ()

        self.machines.clean = frozen
        self.run_at(100)
        self.assertEqual([True], late)
        self.machines.clean = clean
        self.run_at(4000)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_who_stood_still_takes_it_from_nobody_else(self):
        lease, _id = self.started()
        clean, times = self.machines.clean, []

        def frozen(*args):
            times.append(self.clock.now())
            if len(times) > 2:
                return clean(*args)
            self.clock.advance(3600)
            if len(times) == 1:
                # Another one takes it over, and stands still as well.
                self.lifecycle.lease_end.end(lease['id'], when_due=True)
            else:
                # The first one wakes up: to him they are clean.
                self.lifecycle.lease_close._cleaning._keep(
                    lease['reservations'][0]['id'], lease_close._Held(
                        2, 2, {*self.uuids}, first, 0), {*self.uuids})
                self.assertEqual([None, None], self.scalars(
                    models.Host.cleaned_at))
            return ()

        self.machines.clean = frozen
        first = NOW + 100 + lease_close._SOON
        self.run_at(100)
        self.run_at(20_000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(self.uuids, self.machines.swept)

    def test_who_died_over_it_keeps_others_from_it_for_a_while(self):
        lease, _id = self.started()
        clean = self.machines.clean

        def dies(*args):
            raise SystemExit

        self.machines.clean = dies
        with fixtures.MockPatchObject(lease_close.Cleaning, '_keep'):
            self.assertRaises(SystemExit, self.run_at, 100)
        self.machines.clean = clean
        self.clock.advance(5)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual([], self.machines.swept)
        self.clock.advance(60)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_of_many_those_that_waited_longest_come_first(self):
        for number in range(8):
            self.host(f'more{number}', VCPU=4)
        lease = self.reserve_machines(0, 100, 10, 10)
        driven.run_due(self.engine)
        self.machines.dirty = {*self.scalars(models.Host.uuid)}
        self.useFixture(fixtures.MockPatchObject(lease_close, 'MOST', 4))
        for time in range(100, 1000, 100):
            self.run_at(time)
            if len(self.machines.swept) >= 12:
                break
        self.assertEqual(self.machines.dirty, {*self.machines.swept})
        self.assertLess(len(self.machines.swept), 2 * 10)
        self.machines.dirty.clear()
        for time in range(1000, 1400, 100):
            self.run_at(time)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_one_reservation_does_not_put_off_another(self):
        self.machines.cleaning_time = 3600
        self.host('three', VCPU=4)
        lease = self.reserve(
            0, 100, self.machines_of(1, 1), self.machines_of(1, 1),
            self.places())
        driven.run_due(self.engine)
        first, second = sorted(one for uuids in self.machines.doors.values()
                               for one in uuids)
        self.machines.dirty = {second}
        self.places_type.broken['end'] = errors.CloudUnavailable('away')
        self.run_at(100)
        self.machines.dirty.clear()
        self.places_type.broken.clear()
        self.run_at(120)
        self.assertEqual([first, second, second], sorted(self.machines.swept))
        self.assertEqual({}, self.places_type.open)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_what_verify_says_of_it(self):
        lease, reservation_id = self.started(on_end='recycle')
        looking = audit.Audit(self.database, self.clock, self.lifecycle,
                              self.encryption.open, 60)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        self.run_at(100)
        self.assertEqual(lease_conditions.LEFT.message, self.reason(lease))
        self.run_at(10_000)
        self.assertEqual([], [*looking.differences()])
        self.machines.full.clear()
        self.machines.dirty = {*self.uuids}
        self.run_at(11_000)
        found, = looking.differences()
        self.assertIn('not clean yet', found.text)
        self.assertIn('cleaning_command', found.remedy)

    def test_nobody_reserves_what_does_not_come_back(self):
        self.machines.among = model.HostPool.ENROLLED
        for name in ('one', 'two'):
            self.enrol(name)
        lease, reservation_id = self.started(on_end='recycle')
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        early = self.reserve_machines(150, 170)
        self.run_at(100)
        # It may be a matter of seconds.
        self.lifecycle.lease_end.delete(self.reserve_machines(200, 300)['id'])
        self.assertEqual('PENDING', self.status(early))
        self.lifecycle.lease_end.delete(early['id'])
        self.run_at(160)
        for start in (200, 1000, 10_000):
            self.assertRaises(errors.Refused, self.reserve_machines, start,
                              start + 100)
        self.host('three', VCPU=4)
        self.enrol('three')
        self.reserve_machines(200, 300)
        self.machines.full.clear()
        self.run_at(1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.reserve_machines(1000, 2000, 3, 3)

    def test_who_keeps_hosts_has_them_by_the_limits_too(self):
        self.books.conf.set_override(
            'max_reserved_hosts_per_project', 2, 'blazar_enforcement')
        limited = limits.Limits(self.books.conf, self.database, self.clock,
                                serverless=['machine'])
        _lease, reservation_id = self.started(on_end='recycle')
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        later = limits.Asked(
            'project', 'user', model.Window(NOW + 1000, NOW + 2000), 0,
            {'HOST': 1})
        limited.check(later)
        self.run_at(160)
        self.assertRaises(errors.LimitExceeded, limited.check, later)

    def test_whoever_comes_back_leaves_dirt(self):
        lease, reservation_id = self.started(cleaning_time=60)
        first, second = self.uuids
        self.machines.dirty = {second}
        self.run_at(100)
        guest = uuidutils.generate_uuid()
        self.machines.full[reservation_id] = [guest]
        self.run_at(110)
        self.machines.full.clear()
        self.machines.dirty.clear()
        self.run_at(200)
        self.assertEqual([first, second, first, second],
                         self.machines.swept)
        self.run_at(259)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(260)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_is_left_of_grace_is_not_wasted(self):
        lease, reservation_id = self.started(grace_period=10_000)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.run_at(100)
        self.machines.full.clear()
        self.run_at(100 + retries.LONGEST_PAUSE)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_pauses_grow_while_nothing_gets_clean(self):
        lease, _id = self.started()
        self.machines.dirty = {*self.uuids}
        pauses = []
        self.run_at(100)
        for _round in range(6):
            due, = self.scalars(
                models.Event.run_at, models.Event.event_type == 'end_lease')
            pauses.append(due - self.clock.now())
            self.run_at(due - NOW)
        self.assertEqual([5, 10, 20, 40, 60, 60], pauses)
        self.assertEqual(self.uuids * 7, self.machines.swept)
        self.machines.dirty = {self.uuids[0]}
        self.machines.clean = lambda *args: {self.uuids[1], 'another'}
        self.run_at(1000)
        due, = self.scalars(
            models.Event.run_at, models.Event.event_type == 'end_lease')
        self.assertEqual(retries.AWAY, due - self.clock.now())
        self.assertEqual('TERMINATING', self.status(lease))

    def test_servers_with_bookings_do_not_stay(self):
        lease = self.running_lease(request=self.request(on_end='recycle'))
        self.run_at(100)
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_is_ended_before_its_time_has_no_grace(self):
        lease = self.running_lease(request=self.request(grace_period=100))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_raises_is_tried_again(self):
        lease, _id = self.started()
        clean = self.machines.clean
        self.machines.clean = lambda *args: 1 / 0
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(2, len(self.held()))
        self.machines.clean = clean
        self.run_at(500)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_after_a_period_of_grace(self):
        lease, reservation_id = self.started(
            cleaning_time=60, grace_period=30)
        self.assertEqual({NOW + 190}, {*self.scalars(
            models.Booking.end_date)})
        guest = uuidutils.generate_uuid()
        self.cloud.servers[guest] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [guest]
        self.run_at(100)
        self.run_at(129)
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual(lease_conditions.GRACE.message, self.reason(lease))
        self.run_at(130)
        self.assertEqual([guest], self.cloud.deleted)

    def test_a_host_may_wait_until_its_servers_are_gone(self):
        lease, reservation_id = self.started(on_end='recycle')
        guest = uuidutils.generate_uuid()
        self.cloud.servers[guest] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [guest]
        self.run_at(100)
        self.run_at(10_000)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(2, len(self.held()))
        self.machines.full.clear()
        self.run_at(20_000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.cloud.deleted)

    def test_who_comes_next_gets_another_host_where_there_is_one(self):
        lease, reservation_id = self.started(on_end='recycle')
        guest = uuidutils.generate_uuid()
        self.cloud.servers[guest] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [guest]
        second = self.reserve_machines(100, 1000)
        self.run_at(100)
        self.host('three', VCPU=1)
        self.clock.advance(self.start_timeout)
        self.overbooking_check().look()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(second))
        self.assertEqual({'three'}, self.bookings_of(second).keys())

    def test_who_deletes_his_lease_has_no_servers_any_more(self):
        lease, reservation_id = self.started(
            on_end='recycle', grace_period=1000)
        guest = uuidutils.generate_uuid()
        self.cloud.servers[guest] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [guest]
        self.run_at(100)
        self.assertEqual([], self.cloud.deleted)
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual([guest], self.cloud.deleted)

    def test_it_is_nothing_that_whoever_deletes_a_lease_waits_for(self):
        """It may take as long as the operator's command does."""
        lease, _id = self.started()
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual([], self.machines.swept)
        driven.run_due(self.engine)
        self.assertEqual(self.uuids, self.machines.swept)


class TestReturning(WholeHostsTestCase):
    """A lease in use returns hosts before its end."""

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuids = {name: self.host(name, VCPU=4)
                      for name in ('one', 'two', 'three')}
        self.machines.among = model.HostPool.ENROLLED
        for name in self.uuids:
            self.enrol(name)
        self.lease = self.reserve_machines(0, 1000, 3, 3)
        driven.run_due(self.engine)
        (self.reservation,) = self.lease['reservations']
        self.order = [name for name, in self.of_bookings(
            sa.select(models.Host.name).join(
                models.Booking, models.Booking.host_id == models.Host.id
            ).order_by(models.Booking.id))]

    def of_bookings(self, statement):
        with self.database.reader() as session:
            return session.execute(statement).tuples().all()

    def use(self, *names):
        """Servers are on these hosts and no others."""
        self.machines.there = {
            self.uuids[name]: [f'{name}-server'] for name in names}

    def shrink(self, most, *names):
        return self.leases.updates.update(
            self.lease['id'], updates.LeaseChange(
                reservations={self.reservation['id']: self.machines_of(
                    1, most)}, remove_hosts=frozenset(names)))

    def test_those_that_came_last_are_free_when_they_are_clean(self):
        first, *others = self.order
        self.machines.dirty = {self.uuids[one] for one in others}
        shrunk = self.shrink(1)
        self.assertEqual(1, shrunk['reservations'][0]['amount'])
        self.assertEqual({first}, self.bookings_of(self.lease).keys())
        # Nobody else gets them before.
        driven.run_due(self.engine)
        self.assertEqual({*self.order}, self.held().keys())
        self.assertEqual({self.uuids[one] for one in others},
                         {*self.machines.swept})
        self.assertEqual((self.uuids[first],),
                         self.machines.doors[self.reservation['id']])
        self.assertRaises(errors.Refused, self.reserve_machines, 500, 600)
        self.machines.dirty.clear()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual({first: self.reservation['id']}, self.held())
        self.assertEqual([None] * 3, self.scalars(models.Host.overdue_at))
        other = self.reserve_machines(500, 600, 2, 2)
        self.assertEqual({*others}, self.bookings_of(other).keys())
        self.assertEqual('ACTIVE', self.status(self.lease))

    def test_empty_ones_first_and_no_server_is_deleted(self):
        first, second, third = self.order
        self.use(second, third)
        self.shrink(2)
        driven.run_due(self.engine)
        self.assertEqual({second, third}, self.held().keys())
        refused = self.assertRaises(errors.HostsNotEmpty, self.shrink, 1)
        for said in ('cannot return 1 host: 0 of its hosts are empty',
                     f'{second}-server', f'{third}-server'):
            self.assertIn(said, str(refused))
            self.assertIn(said, refused.named)
        self.assertIn(f'{third}: {third}-server', refused.named)
        self.assertNotIn(f'{third}:', str(refused))
        self.assertEqual({second, third}, self.bookings_of(self.lease).keys())
        self.assertEqual([], self.cloud.deleted)

    def test_those_that_are_named(self):
        first, second, third = self.order
        self.use(second)
        refused = self.assertRaises(
            errors.HostsNotEmpty, self.shrink, 2, second)
        self.assertIn(f'{second}: {second}-server', refused.named)
        self.shrink(2, first)
        driven.run_due(self.engine)
        self.assertEqual({second, third}, self.held().keys())

    def test_who_comes_at_that_moment_keeps_the_host(self):
        *_others, last = self.order
        self.shrink(2)
        self.use(last)
        driven.run_due(self.engine)
        self.assertEqual({*self.order}, self.held().keys())
        # It stays isolated with the others, and the lease says why.
        self.assertIn(self.uuids[last],
                      self.machines.doors[self.reservation['id']])
        self.assertIn('until it is deleted', self.reason(self.lease))
        self.assertEqual([], self.machines.swept)
        self.use()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertEqual('', self.reason(self.lease))

    def test_no_server_is_let_in_any_more(self):
        *_others, last = self.order
        claims = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index)

        def claim(name):
            return claims.claim(
                uuidutils.generate_uuid(), {self.uuids[name]: {'VCPU': 1}},
                reservation_id=self.reservation['id'])

        def is_within(name):
            return claims.is_within(
                self.reservation['id'], {self.uuids[name]})

        claim(last)
        self.assertTrue(is_within(last))
        self.shrink(2)
        # Who was let in a moment ago looks again.
        self.assertFalse(is_within(last))
        self.assertTrue(is_within(self.order[0]))
        self.assertRaises(scheduler_claims.Denied, claim, last)
        claim(self.order[0])
        found = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_server(
                uuidutils.generate_uuid(), {'VCPU': 1}, self.uuids.values(),
                self.reservation['id'])
        self.assertEqual(
            {self.uuids[one] for one in self.order[:2]},
            {uuid for uuid in self.uuids.values()
             if found.by_host.get(uuid, found.elsewhere)})
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertFalse(is_within(last))

    def test_one_that_failed_comes_first(self):
        first, *_others = self.order
        with self.database.writer() as session:
            session.add(models.Outage(
                host_id=session.scalar(sa.select(models.Host.id).where(
                    models.Host.name == first)),
                kind=outages.FAILURE, reason='', seen_at=NOW, began_at=NOW))
        self.shrink(2)
        self.assertNotIn(first, self.bookings_of(self.lease))

    def test_what_leaves_after_its_lease_leaves_then_too(self):
        *_others, last = self.order
        self.machines.leaving = True
        self.shrink(2)
        driven.run_due(self.engine)
        with self.database.reader() as session:
            self.assertEqual({last: states.Enrollment.LEAVING}, {
                host.name: host.enrollment for host in session.scalars(
                    sa.select(models.Host).where(
                        models.Host.assigned_to.is_(None)))})

    def test_the_end_frees_what_is_not_free_yet(self):
        *_others, last = self.order
        self.shrink(2)
        self.use(last)
        driven.run_due(self.engine)
        self.use()
        self.lifecycle.lease_end.delete(self.lease['id'])
        driven.run_due(self.engine)
        self.assertEqual(({}, 0), (
            self.held(), self.count_rows()['bookings']))

    def test_who_dies_between_two_steps_leaves_it_to_the_next(self):
        *_others, last = self.order

        def die(*_args, **_kwargs):
            raise SystemExit

        self.shrink(2)
        for step in ('changed', 'clean'):
            with mock.patch.object(Machines, step, die):
                self.assertRaises(
                    SystemExit, self.lifecycle.notices.changed,
                    self.lease['id'])
            self.assertIn(last, self.held())
        with mock.patch.object(assignments, 'unassign', die):
            self.assertRaises(SystemExit, self.lifecycle.notices.changed,
                              self.lease['id'])
        self.clock.advance(retries.LONGEST_PAUSE)
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertEqual([self.uuids[last]], self.machines.swept)

    def test_where_it_has_changed_meanwhile_it_is_asked_again(self):
        chosen = returned_hosts.choose

        def choose(*args):
            found = chosen(*args)
            with mock.patch.object(returned_hosts, 'choose', chosen):
                self.shrink(2)
            return found

        with mock.patch.object(returned_hosts, 'choose', choose):
            self.assertRaises(errors.Conflict, self.shrink, 1)
        self.assertEqual(2, len(self.bookings_of(self.lease)))

    def test_another_lease_waits_for_what_it_has(self):
        *_others, last = self.order
        later = self.reserve_machines(1000, 1100, 3, 3)
        self.machines.dirty = {self.uuids[last]}
        self.shrink(2)
        self.clock.advance(1000)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(later))
        self.machines.dirty.clear()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual({}, self.held())
        with self.database.writer() as session:
            # The cloud was asked what is left there: nothing.
            session.execute(sa.update(models.Host).values(recheck_at=None))
        self.clock.advance(8)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(later))


class TestWhoGetsIn(WholeHostsTestCase):
    """The scheduler's questions, and its claims."""

    def setUp(self):
        super().setUp()
        self.uuids = {name: self.host(name, VCPU=4)
                      for name in ('one', 'two', 'plain')}
        self.machines.among = model.HostPool.ENROLLED
        for name in ('one', 'two'):
            self.enrol(name)
        self.eligibility = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        self.claims = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index)
        lease = self.reserve_machines()
        driven.run_due(self.new_engine())
        self.reservation_id = lease['reservations'][0]['id']
        (self.held_host,) = self.held()

    def fits(self, reservation_id=None):
        found = self.eligibility.for_server(
            uuidutils.generate_uuid(), {'VCPU': 1}, self.uuids.values(),
            reservation_id)
        return {name for name, uuid in self.uuids.items()
                if found.by_host.get(uuid, found.elsewhere)}

    def claim(self, host, **how):
        return self.claims.claim(
            uuidutils.generate_uuid(), {self.uuids[host]: {'VCPU': 1}}, **how)

    def test_no_server_comes_when_the_lease_has_ended(self):
        self.assertTrue(self.claims.is_within(self.reservation_id))
        self.lifecycle.lease_end.delete(self.scalars(models.Lease.id)[0])
        self.assertFalse(self.claims.is_within(self.reservation_id))

    def test_who_is_in_no_reservation_stays_outside(self):
        self.assertEqual({'plain'}, self.fits())
        found = self.eligibility.for_unreserved({'VCPU': 1},
                                                self.uuids.values())
        self.assertEqual({'one', 'two'}, {
            name for name, uuid in self.uuids.items()
            if found.by_host.get(uuid, found.elsewhere) == 0})
        for forced in (False, True):
            for host in ('one', 'two'):
                self.assertRaises(
                    scheduler_claims.Denied, self.claim, host, forced=forced)
            self.claim('plain', forced=forced)()

    def test_who_is_in_the_reservation_goes_there_and_nowhere_else(self):
        self.assertEqual({self.held_host}, self.fits(self.reservation_id))
        self.claim(self.held_host, reservation_id=self.reservation_id)
        self.assertEqual([{}] * 3, self.scalars(models.Host.usage))
        for host in self.uuids.keys() - {self.held_host}:
            for forced in (False, True):
                self.assertRaises(
                    scheduler_claims.Denied, self.claim, host, forced=forced,
                    reservation_id=self.reservation_id)

    def test_who_is_in_another_one_stays_outside(self):
        other = uuidutils.generate_uuid()
        self.assertEqual(set(), self.fits(other))
        for host in self.uuids:
            self.assertRaises(scheduler_claims.Denied, self.claim, host,
                              reservation_id=other)

    def test_when_it_is_over_nobody_gets_in(self):
        self.clock.advance(100)
        driven.run_due(self.new_engine('second'))
        self.assertEqual({}, self.held())
        self.assertEqual(set(), self.fits(self.reservation_id))
        for host in self.uuids:
            self.assertRaises(scheduler_claims.Denied, self.claim, host,
                              reservation_id=self.reservation_id)


class TestParts(WholeHostsTestCase):
    """Servers on hosts that serve leases only: two, and one for all."""

    def setUp(self):
        super().setUp()
        self.uuids = {name: self.host(name, VCPU=4)
                      for name in ('plain', 'one', 'two', 'closed')}
        for name in ('one', 'two', 'closed'):
            self.enrol(name)
        self.close('closed')
        self.machines.among = model.HostPool.ENROLLED
        self.eligibility = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        self.claims = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index)

    def close(self, name):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).where(
                models.Host.name == name).values(
                    reservable=False, generation=models.Host.generation + 1))

    def parts(self, amount, **demand):
        return self.places(amount, among=model.HostPool.ALL, **demand)

    def taken(self, amount):
        """The servers of a lease of parts, and their hosts."""
        lease = self.reserve(0, 100, self.parts(amount), active=True)
        ids = [one for _number in range(
            amount) for one in self.take_slots(lease)]
        with self.database.reader() as session:
            return ids, dict(session.execute(sa.select(
                models.Booking.server_id, models.Host.name).join(
                    models.Host, models.Host.id == models.Booking.host_id)
                .where(models.Booking.server_id.in_(ids))).tuples().all())

    def test_hosts_for_leases_only_come_last(self):
        lease = self.reserve(0, 100, self.parts(5))
        hosts = self.bookings_of(lease)
        self.assertEqual((True, 2), ('plain' in hosts, len(hosts)))
        self.assertEqual(({'VCPU': 4}, 1), (
            self.peak('plain'), len(hosts.keys() & {'one', 'two'})))

    def test_so_they_do_where_not_all_are_looked_at(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.selection.FIRST', 1))
        # Else an empty one comes last, whatever it is.
        self.reserve(0, 1000, self.parts(1, hosts=frozenset({
            self.uuids['one']})))
        # What was booked is read by now.
        self.clock.advance(1)
        lease = self.reserve(10, 100, self.parts(1))
        self.assertEqual({'plain'}, self.bookings_of(lease).keys())

    def peak(self, name):
        with self.admission.index.fresh() as timeline:
            return timeline.peak(
                self.admission.index.ids_by_uuid[self.uuids[name]],
                model.Window(NOW, NOW + 100))

    def test_of_these_whole_ones_are_left_as_long_as_possible(self):
        self.reserve(0, 100, self.parts(6))
        self.reserve(0, 100, self.parts(2))
        self.reserve_machines(0, 100)
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.parts(1))
        self.assertEqual(NOW + 100, refused.refusal.next_start)

    def test_there_are_as_many_as_there_is_room_for(self):
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.parts(13))
        self.assertEqual(12, refused.refusal.fits_now)
        self.assertRaises(errors.Refused, self.reserve, 0, 100, self.places(5))
        self.reserve(0, 100, self.parts(12))

    def test_what_is_beside_them_can_be_changed(self):
        """Two reservations: what is not changed keeps to its hosts."""
        lease = self.reserve(
            50, 100, self.places(1), self.parts(4), self.machines_of())
        one = next(one for one in lease['reservations']
                   if one['amount'] == 1 and one['resource_type'] ==
                   creation.RESOURCE_TYPE)
        self.assertEqual(1, len(self.scalars(
            models.Booking.id, models.Booking.reservation_id == one['id'])))
        self.host('more', VCPU=4)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={one['id']: self.places(3)}))
        self.assertEqual(8, len(self.scalars(models.Booking.id)))

    def test_who_decides_sees_what_became_of_a_host(self):
        """It was closed, or is leaving, since it was picked."""
        for change in ({'reservable': False}, {'enrollment': 'leaving'}):
            with self.database.writer() as session:
                session.execute(sa.update(models.Host).where(
                    models.Host.name == 'one').values(
                        reservable=True, enrollment='enrolled', **{}))
                session.execute(sa.update(models.Host).where(
                    models.Host.name == 'one').values(**change))
                for among in model.HostPool:
                    with session.begin_nested():
                        booked = self.decided(session, among, 'one')
                        self.assertFalse(booked, (change, among))
                        self.assertEqual(
                            among is not model.HostPool.ENROLLED,
                            self.decided(session, among, 'plain'))

    def decided(self, session, among, name):
        """Whether a booking may come there, which is taken back."""
        host_id = session.scalar(sa.select(models.Host.id).where(
            models.Host.name == name))
        try:
            ledger.decide(session.connection(), NOW, [ledger.Edit(
                None, ledger.NewBooking(
                    'none', host_id, None, model.Window(NOW, NOW + 10),
                    {'VCPU': 1}, among=among))])
        except ledger.OverCapacity:
            return False
        return True

    def test_those_that_come_together_go_to_hosts_of_one_kind(self):
        lease = self.reserve(0, 100, self.parts(7), active=True)

        def come(count):
            return self.leases.slots.take(
                lease['reservations'][0]['id'], 'project', [
                    uuidutils.generate_uuid() for _number in range(count)])

        exc = self.assertRaises(errors.Conflict, come, 5)
        self.assertIn('has 7 free slots, 3 of them on hosts that serve '
                      'leases only', str(exc))
        self.assertIn('boot at most 4 at once', str(exc))
        self.assertEqual([False, True, False], [
            come(count) for count in (2, 3, 2)])
        exc = self.assertRaises(errors.Conflict, come, 1)
        self.assertIn('All 7 slots of reservation', str(exc))

    def test_nobody_is_forced_onto_what_somebody_has_whole(self):
        whole = self.reserve_machines(0, 100)
        later = self.reserve_machines(100, 200)
        driven.run_due(self.new_engine())
        self.assertEqual('ACTIVE', self.status(whole))
        held, = self.held()
        free = ({'one', 'two'} - {held}).pop()
        self.assertEqual(1, len(self.bookings_of(later)))
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] == free}
        for forced in (False, True):
            self.assertRaises(scheduler_claims.Denied, self.claim, inside,
                              held, forced)
        self.claim(inside, free, True)()
        other, = {'one', 'two'} - {free}
        self.lifecycle.lease_end.delete(later['id'])
        self.lifecycle.lease_end.delete(whole['id'])
        driven.run_due(self.new_engine('second'))
        self.assertEqual({}, self.held())
        # Nor onto what is promised so for its time.
        self.reserve_machines(50, 100)
        for forced in (False, True):
            self.assertRaises(scheduler_claims.Denied, self.claim, inside,
                              other, forced)

    def test_who_has_no_place_there_stays_outside(self):
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        outside = next(one for one in ids if one != inside)
        here, other = hosts[inside], ({'one', 'two'} - {hosts[inside]}).pop()
        for server_id, allowed in (
                (inside, {here, other, 'plain'}), (outside, {'plain'})):
            found = self.eligibility.for_server(
                server_id, {'VCPU': 1}, self.uuids.values())
            self.assertEqual(allowed, {
                name for name, uuid in self.uuids.items()
                if found.by_host.get(uuid, found.elsewhere)})
            for name in self.uuids.keys() - allowed:
                for forced in (False, True):
                    self.assertRaises(scheduler_claims.Denied, self.claim,
                                      server_id, name, forced)
        # The booking follows, and stays, whatever becomes of the host.
        self.claim(inside, other)()
        self.close(other)
        found = self.eligibility.for_server(
            inside, {'VCPU': 1}, self.uuids.values())
        self.assertEqual(self.uuids[other], found.booked)
        self.assertTrue(found.by_host.get(
            self.uuids[other], found.elsewhere))
        self.claim(inside, other)

    def claim(self, server_id, host, forced=False):
        return self.claims.claim(
            server_id, {self.uuids[host]: {'VCPU': 1}}, forced=forced)

    def test_who_comes_too_late_finds_somebody_else_there(self):
        """His host was chosen before the end, and is claimed after it."""
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        later = self.reserve_machines(100, 200, 2, 2)
        self.clock.advance(99)
        self.assertEqual(self.uuids[hosts[inside]],
                         self.eligibility.for_server(
                             inside, {'VCPU': 1}, ()).booked)
        self.clock.advance(1)
        self.lifecycle.lease_start.start(later['id'], when_due=True)
        self.assertEqual({'one', 'two'}, self.held().keys())
        for host in ('one', 'two'):
            for forced in (False, True):
                self.assertRaises(
                    scheduler_claims.Denied, self.claim, inside, host, forced)

    def test_of_who_comes_and_who_takes_all_one_sees_the_other(self):
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        later = self.reserve_machines(100, 200, 2, 2)
        self.clock.advance(100)
        locked = self.claims._locked

        def late(*args):
            # Between his look at the host and his writing.
            self.claims._locked = locked
            self.lifecycle.lease_start.start(later['id'], when_due=True)
            return locked(*args)

        self.claims._locked = late
        self.assertRaises(
            scheduler_claims.Denied, self.claim, inside, hosts[inside])
        self.assertEqual({'one', 'two'}, self.held().keys())

    def test_whole_hosts_wait_for_who_overstays(self):
        """Nobody is thrown out, and nobody is let in beside."""
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        self.claim(inside, hosts[inside])
        later = self.reserve_machines(100, 200, 2, 2)
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.assertEqual('PENDING', self.status(later))
        self.assertEqual({}, self.held())


class TestWithin(WholeHostsTestCase):
    """Servers within a reservation of hosts that have leases of their own."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.engine = self.new_engine()
        self.outer = self.reserve_machines(100, 1000)
        self.reservation_id = self.outer['reservations'][0]['id']

    def inner(self, start, end, **wanted):
        with self.database.reader() as session:
            hosts = hosted_servers.hosts(session, self.reservation_id)
        return self.leases.creation.create(creation.NewLease(
            'project', 'user', self.request(start, end, **wanted), (
                creation.NewReservation(
                    model.Demand({}, 1, among=None, hosts=hosts),
                    (uuidutils.generate_uuid(),),
                    spec=hosted_servers.spec(self.reservation_id)),)),
            self.encryption.seal('call'))

    def why_not(self, *window, project='project', later=True):
        with self.database.reader() as session:
            return hosted_servers.why_not(
                session, self.reservation_id, project,
                model.Window(*(NOW + one for one in window)), later)

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def share(self, *projects):
        with self.database.writer() as session:
            session.get(models.Reservation, self.reservation_id).params = {
                'min': 1, 'max': 1, 'projects': projects}

    def test_only_in_its_time_and_for_those_who_share_it(self):
        self.assertIsNone(self.why_not(100, 1000))
        for window in ((99, 200), (900, 1001)):
            self.assertIn('choose a start and an end within that',
                          self.why_not(*window))
        self.assertIn('when the lease is ACTIVE',
                      self.why_not(100, 200, later=False))
        self.assertIn('Your project cannot use',
                      self.why_not(100, 200, project='other'))
        self.share('other')
        self.assertIsNone(self.why_not(100, 200, project='other'))

    def test_it_takes_nothing_and_is_in_nobodys_way(self):
        self.inner(200, 300)
        self.inner(200, 300)
        self.assertEqual([{}, {}], self.scalars(
            models.Booking.resources,
            models.Booking.server_id.is_not(None)))
        self.assertRaises(errors.Refused, self.reserve_machines, 200, 300)
        self.reserve_machines(1000, 1100)

    def test_a_lease_within_stays_within(self):
        lease = self.inner(200, 300)
        for change in (updates.LeaseChange(end=NOW + 1001),
                       updates.LeaseChange(start=NOW + 50),
                       updates.LeaseChange(start=NOW + 5000, end=NOW + 5100)):
            exc = self.assertRaises(
                errors.InvalidLeaseParams, self.leases.updates.update,
                lease['id'], change)
            self.assertIn('within that', str(exc))
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            start=NOW + 150, end=NOW + 1000))
        # What is over keeps nobody from shortening it.
        self.lifecycle.lease_end.delete(self.outer['id'])
        driven.run_due(self.engine)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + 500))
        self.assertRaises(
            errors.InvalidLeaseParams, self.leases.updates.update,
            lease['id'], updates.LeaseChange(end=NOW + 600))

    def test_one_that_waits_stays_within_it_too(self):
        retry = requests.Retry(60, 20)
        first = self.reserve(0, 2000, self.places(1), request=self.request(
            0, 2000, retry=retry))
        lease = self.inner(200, 900, retry=retry, duration=700)
        self.assertIn('is served first', self.reason(lease))
        self.clock.advance(400)
        self.lifecycle.lease_end.delete(first['id'])
        driven.run_due(self.engine)
        self.assertEqual('WAITING', self.status(lease))
        self.assertIn('choose a start and an end within that',
                      self.reason(lease))

    def test_it_starts_when_the_hosts_are_there(self):
        self.machines.start, start = lambda _: 1 / 0, self.machines.start
        lease = self.inner(100, 300)
        self.run_at(100)
        self.assertEqual([], self.cloud.sent)
        self.assertIn('when the lease is ACTIVE', self.reason(lease))
        self.machines.start = start
        for time in (160, 260):
            self.run_at(time)
        self.assertEqual('ACTIVE', self.status(self.outer))
        self.assertEqual(1, len(self.cloud.sent))

    def promised(self):
        """What is said of a maintenance of host one, by lease."""
        return {one.lease_id: one.obstacle
                for one in self.new_maintenance().promised(
                    'one', model.Window(NOW + 150, NOW + 250))}

    def follow(self):
        """Its demand is as the types say it of a boot."""
        def demand_of(_reserved):
            with self.database.reader() as session:
                return model.Demand(
                    {}, 1, among=None, hosts=hosted_servers.hosts(
                        session, self.reservation_id))

        self.places_type.demand_of = demand_of

    def test_it_goes_where_the_hosts_go(self):
        lease, other = self.inner(200, 300), self.inner(200, 300)
        self.run_at(50)
        self.follow()
        self.host('two', VCPU=4)
        self.assertEqual({self.outer['id']: '', lease['id']: '',
                          other['id']: ''}, self.promised())
        self.new_maintenance().announce(
            'one', model.Window(NOW + 150, NOW + 250), 'firmware')
        check = self.overbooking_check()
        check.look()
        for one in (self.outer, lease, other):
            self.assertEqual({'two'}, self.bookings_of(one).keys())
            self.assertEqual('', self.reason(one))
        self.assertEqual({}, self.promised())
        self.run_at(100)
        self.run_at(200)
        self.assertEqual(2, len(self.cloud.sent))

    def test_it_stays_where_the_hosts_stay(self):
        lease = self.inner(200, 300)
        self.follow()
        inside = 'It belongs to a lease of the whole host.'
        # There is none to which they could go.
        self.assertEqual(inside, self.promised()[lease['id']])
        self.host('two', VCPU=4)
        self.run_at(100)
        self.assertEqual(inside, self.promised()[lease['id']])
        self.new_maintenance().announce(
            'one', model.Window(NOW + 150, NOW + 250), 'firmware')
        self.overbooking_check().look()
        self.assertEqual({'one'}, self.bookings_of(lease).keys())

    def test_it_goes_to_a_host_that_its_lease_got_for_one_that_failed(self):
        self.run_at(100)
        lease = self.inner(200, 300)
        self.follow()
        watch = self.overbooking_check()
        guard = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(0, 0, 3600),
            lambda event, lease: None)
        guard.update({self.uuid_of('one'): host_status.Down(
            'Its power is off.', certain=True)})
        watch.look()
        # It may be back in time.
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.host('two', VCPU=4)
        watch.look()
        self.assertEqual({'one', 'two'}, self.bookings_of(self.outer).keys())
        self.assertEqual({'two'}, self.bookings_of(lease).keys())

    def test_not_for_those_with_whom_it_is_not_shared_any_more(self):
        self.share('other')
        with self.database.reader() as session:
            hosts = hosted_servers.hosts(session, self.reservation_id)
        lease = self.leases.creation.create(creation.NewLease(
            'other', 'user', self.request(200, 300), (
                creation.NewReservation(
                    model.Demand({}, 1, among=None, hosts=hosts),
                    (uuidutils.generate_uuid(),),
                    spec=hosted_servers.spec(self.reservation_id)),)),
            self.encryption.seal('call'))
        self.run_at(100)
        self.share()
        self.run_at(200)
        self.assertEqual([], self.cloud.sent)
        self.assertIn('Your project cannot use', self.reason(lease))

    def test_who_overstays_within_keeps_no_other_from_its_start(self):
        self.run_at(100)
        first, second = self.inner(150, 200), self.inner(200, 300)
        server_id, = first['reservations'][0]['servers']
        self.cloud.stubborn.add(server_id)
        self.run_at(150)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid_of('one'))
        self.lifecycle.reconciliation.check(server_id)
        self.run_at(200)
        self.assertEqual(['TERMINATING', 'STARTING'], [
            self.status(one) for one in (first, second)])

    def test_who_is_shelved_is_in_nobodys_way(self):
        """Its booking says that it is there, until it is over."""
        self.run_at(100)
        lease = self.inner(150, 900)
        server_id, = lease['reservations'][0]['servers']
        self.run_at(150)
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == server_id).values(
                    claimed_at=NOW, running=True))
        self.lifecycle.lease_end.delete(self.outer['id'])
        self.run_at(200)
        self.assertEqual({}, self.held())
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=None))
        second = self.reserve_machines(200, 300)
        self.run_at(210)
        self.assertEqual('ACTIVE', self.status(second))


class TestEnrollment(WholeHostsTestCase):

    def setUp(self):
        super().setUp()
        self.machines.among = model.HostPool.ENROLLED
        self.host('one', VCPU=4)

    def write(self, work, *args):
        with self.database.writer() as session:
            return work(session, self.clock.now(), *args)

    def enrollments(self):
        return self.scalars(models.Host.enrollment)

    def left(self):
        with self.database.reader() as session:
            return enrollment.left(session, self.clock.now())

    def test_it_leaves_when_its_leases_are_over(self):
        host_id = self.enrol('one')
        lease = self.reserve_machines(0, 100)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.remove, host_id)
        self.assertEqual(['enrolled'], self.enrollments())
        self.write(enrollment.remove, host_id, True)
        self.assertEqual((['leaving'], set()), (
            self.enrollments(), self.left()))
        self.assertRaises(errors.Refused, self.reserve_machines, 200, 300)
        # What was promised begins all the same.
        driven.run_due(self.new_engine())
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual({'one'}, self.held().keys())
        self.clock.advance(100)
        driven.run_due(self.new_engine('second'))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual({host_id}, self.left())
        for work, *args in ((enrollment.change, host_id, {}, True),
                            (enrollment.start, self.uuid_of('one'), {})):
            exc = self.assertRaises(errors.Conflict, self.write, work, *args)
            self.assertIn('is being removed', str(exc))

    def test_its_operator_thinks_better_of_it(self):
        host_id = self.enrol('one')
        self.reserve_machines(0, 100)
        self.write(enrollment.remove, host_id, True)
        exc = self.assertRaises(errors.Conflict, self.write, enrollment.start,
                                self.uuid_of('one'), {})
        self.assertIn('To keep it, set', str(exc))
        # Who writes back what he has read changes nothing.
        shown, = self.scalars(models.Host.reservable)
        for reservable in (shown, None):
            self.write(enrollment.change, host_id, {'gpu': 'A100'}, reservable)
            self.assertEqual(['leaving'], self.enrollments())
        self.write(enrollment.change, host_id, {}, True)
        self.assertEqual(['enrolled'], self.enrollments())
        self.reserve_machines(200, 300)

    def test_who_was_leased_leaves_where_that_is_wanted(self):
        host_id = self.enrol('one')
        self.machines.leaving = True
        for start, end in ((0, 100), (200, 300)):
            self.reserve_machines(start, end)
        self.clock.advance(10)
        driven.run_due(self.new_engine())
        self.assertEqual(['enrolled'], self.enrollments())
        self.clock.advance(90)
        driven.run_due(self.new_engine('second'))
        self.assertEqual((['leaving'], set()), (
            self.enrollments(), self.left()))
        self.clock.advance(200)
        driven.run_due(self.new_engine('third'))
        self.assertEqual({host_id}, self.left())

    def test_who_was_not_used_stays(self):
        self.enrol('one')
        self.machines.leaving = True
        self.machines.start = lambda _reserved: 1 / 0
        lease = self.reserve_machines(0, 100)
        driven.run_due(self.new_engine())
        self.lifecycle.lease_start.give_up(lease['id'], states.EventType.START)
        self.assertEqual(('ERROR', ['enrolled']), (
            self.status(lease), self.enrollments()))

    def test_it_can_be_reserved_when_it_is_enrolled(self):
        attempt = self.begin()
        refusal = self.assertRaises(
            errors.Refused, self.reserve_machines).refusal
        self.assertEqual(refusals.Reason.NO_HOST, refusal.reason)
        self.assertRaises(errors.Refused, self.lease)
        self.write(enrollment.complete, attempt)
        self.reserve_machines()
        self.assertRaises(errors.Refused, self.lease, 200, 300)

    def test_who_follows_the_books_sees_it(self):
        """The index was there before the host was enrolled, or left."""
        self.lease(50, 60)
        self.clock.advance(100)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        with self.database.writer() as session:
            attempt = enrollment.start(
                session, self.clock.now(), self.uuid_of('one'), {})
            enrollment.complete(session, NOW, attempt)
        host_id = attempt.host_id
        lease = self.reserve_machines(100, 200)
        self.lifecycle.lease_end.delete(lease['id'])
        self.write(enrollment.change, host_id, {}, False)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        self.write(enrollment.change, host_id, {}, True)
        self.write(enrollment.remove, host_id)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        self.write(enrollment.retire, host_id)
        self.lease(100, 200)

    def test_who_has_not_left_does_not_come_again_or_go(self):
        host_id = self.enrol('one')
        self.assertRaises(
            errors.Conflict, self.write, enrollment.retire, host_id)
        self.write(enrollment.remove, host_id)
        exc = self.assertRaises(errors.Conflict, self.enrol, 'one')
        self.assertIn('is being removed', str(exc))
        self.write(enrollment.retire, host_id)
        self.enrol('one')

    def test_not_while_leases_have_bookings_there(self):
        self.lease(50, 60)
        exc = self.assertRaises(errors.Conflict, self.enrol, 'one')
        self.assertIn('1 booking of leases, the last one until '
                      '2027-01-15 08:01 UTC', str(exc))
        self.assertEqual([None], self.scalars(models.Host.enrollment))

    def test_it_does_not_leave_while_it_is_reserved(self):
        attempt = self.begin()
        self.write(enrollment.complete, attempt)
        host_id = attempt.host_id
        lease = self.reserve_machines(50, 100)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.remove, host_id)
        self.lifecycle.lease_end.delete(lease['id'])
        self.write(enrollment.remove, host_id)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, attempt)
        self.write(enrollment.retire, host_id)
        self.assertRaises(
            errors.NotFound, self.write, enrollment.remove, host_id)

    def begin(self):
        return self.write(enrollment.start, self.uuid_of('one'), {})

    def test_who_goes_on_with_one_may_finish_it(self):
        first, second = self.begin(), self.begin()
        self.assertEqual((True, False, first.enrolled_generation), (
            first.is_own, second.is_own, second.enrolled_generation))
        self.write(enrollment.complete, second)
        self.write(enrollment.complete, first)
        self.assertIsNone(self.write(enrollment.cancel, first))
        self.assertEqual(['enrolled'], self.enrollments())

    def test_one_that_was_given_up_is_not_finished(self):
        """Whatever has let others in meanwhile."""
        first = self.begin()
        self.assertEqual('leaving', self.write(
            enrollment.cancel, first).enrollment)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)
        self.write(enrollment.retire, first.host_id)
        self.assertIn('was canceled by another request', str(self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)))
        second = self.begin()
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)
        self.assertIsNone(self.write(enrollment.cancel, first))
        self.assertEqual(['enrolling'], self.enrollments())
        self.write(enrollment.complete, second)

    def test_what_is_said_of_it_can_be_asked_for(self):
        host_id = self.enrol('one', gpu='A100', rack='7')
        self.write(enrollment.change, host_id, {'rack': None, 'nvme': '2'},
                   None)
        with self.admission.index.fresh():
            found = host_properties.matching(
                host_properties.parse(
                    '["and", ["=", "$gpu", "A100"], ' '[">=", "$nvme", "2"]]'),
                {host.uuid: host.properties for host in
                 self.admission.index.hosts.values()})
        self.assertEqual({self.uuid_of('one')}, set(found))
        self.assertEqual([{'gpu': 'A100', 'nvme': '2'}],
                         self.scalars(models.Host.extra))

    def test_who_asks_again_goes_by_what_it_is_like_by_then(self):
        host_id = self.enrol('one', gpu='1')
        window = model.Window(NOW + 50, NOW + 100)
        wanted = model.Demand(
            model.WHOLE, 1, among=model.HostPool.ENROLLED,
            properties=host_properties.parse('["=", "$gpu", 1]'))
        for said, found in (('1', True), ('2', False), ('1', True)):
            self.write(enrollment.change, host_id, {'gpu': said}, None)
            for _again in range(2):
                self.assertEqual(found, self.admission.quote(
                    [wanted], window) is None, said)
        # Two expressions that are equal, and not alike.
        self.assertIsNotNone(self.admission.quote([dataclasses.replace(
            wanted, properties=host_properties.parse('["=", "$gpu", true]'))],
            window))

    def test_the_comparison_with_the_cloud_leaves_that_alone(self):
        self.enrol('one', gpu='A100')
        self.report(self.uuid_of('one'), 'one', None, {'VCPU': 8})
        self.assertEqual([{'gpu': 'A100'}], self.scalars(models.Host.extra))

    def test_twice_is_a_conflict_and_half_done_is_done_again(self):
        self.enrol('one', finish=False, gpu='1')
        self.enrol('one', gpu='2')
        self.assertEqual([{'gpu': '2'}], self.scalars(models.Host.extra))
        self.assertRaises(errors.Conflict, self.enrol, 'one')

    def test_allocations_are_of_enrolled_hosts_alone(self):
        self.host('plain', VCPU=4)
        host_id = self.enrol('one')
        mine = self.reserve_machines(50, 100)
        self.lease(50, 100)
        with self.database.reader() as session:
            found = enrollment.allocations(session)
        self.assertEqual([host_id], [*found])
        self.assertEqual(
            [(mine['reservations'][0]['id'], mine['id'], NOW + 50,
              NOW + 100)], [tuple(row)[1:] for row in found[host_id]])

    def test_they_are_listed_from_one_on_and_so_many(self):
        for name in ('two', 'plain', 'three'):
            self.host(name, VCPU=4)
        first, second, third = (
            self.enrol(name) for name in ('one', 'two', 'three'))
        for some, expected in (
                ((), [first, second, third]), ((0, 2), [first, second]),
                ((first,), [second, third]), ((first, 1), [second]),
                ((third,), [])):
            with self.database.reader() as session:
                self.assertEqual(expected, [
                    host.id for host in enrollment.listed(session, *some)])

    def test_so_much_is_said_of_one_and_no_more(self):
        most = {f'k{number}': '' for number in range(enrollment.MAX_EXTRA)}
        self.assertRaises(errors.InvalidLeaseParams, self.enrol, 'one',
                          more='1', **most)
        self.assertEqual([None], self.scalars(models.Host.enrollment))
        host_id = self.enrol('one', **most)
        for extra, kept in (({'k0': '1'}, True), ({'more': '1'}, False),
                            ({'more': '1', 'k0': None}, True)):
            with self.database.writer() as session:
                if kept:
                    enrollment.change(session, NOW, host_id, extra, None)
                else:
                    self.assertRaises(
                        errors.InvalidLeaseParams, enrollment.change, session,
                        NOW, host_id, extra, None)
        (extra,) = self.scalars(models.Host.extra)
        self.assertEqual({*most, 'more'} - {'k0'}, {*extra})

    def test_properties_are_those_of_enrolled_hosts_with_their_values(self):
        for name in ('two', 'three'):
            self.host(name, VCPU=4)
        self.enrol('one', gpu='B', ssd='1')
        self.enrol('two', gpu='A')
        gone = self.enrol('three', fpga='1', gpu='C')
        with self.database.writer() as session:
            enrollment.remove(session, NOW, gone)
            enrollment.retire(session, NOW, gone)
            enrollment.set_private(session, 'gpu', True)
        with self.database.reader() as session:
            found = enrollment.properties(session)
        self.assertEqual(
            [('gpu', (True, ['A', 'B'])), ('ssd', (False, ['1']))],
            [*found.items()])
        self.assertEqual(['vcpus', 'ssd'],
                         enrollment.public(self.database, ['vcpus']))
        self.assertEqual(['ssd'], enrollment.public(self.database, ['ssd']))

    def test_a_property_is_private_when_somebody_says_so(self):
        self.enrol('one', gpu='A100')
        with self.database.writer() as session:
            for private in (True, False):
                enrollment.set_private(session, 'gpu', private)
                self.assertEqual({'gpu': (private, ['A100'])},
                                 enrollment.properties(session))
            self.assertRaises(errors.NotFound, enrollment.set_private,
                              session, 'fpga', True)
