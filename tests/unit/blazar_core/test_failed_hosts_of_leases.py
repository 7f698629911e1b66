# SPDX-License-Identifier: Apache-2.0

"""Whole hosts that fail while they are leased."""

import dataclasses
from unittest import mock

import sqlalchemy as sa
from testtools import matchers

from blazar_core.audit import audit
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import hosted_servers
from blazar_core.leases import views
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestFailedHosts(whole_hosts_base.WholeHostsTestCase):
    """A lease has a whole host, which fails."""

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
        """Create a lease of a number of the named hosts."""
        wanted = self.machines_of(count, count)
        return self.reserve(start, end, dataclasses.replace(
            wanted, demand=dataclasses.replace(
                wanted.demand, hosts=frozenset(
                    self.uuids[name] for name in names))))

    def after_failure(self, start, runs_until, later):
        """Let one of three hosts fail; one is in use, one is booked for later.

        Returns the lease that lost its host, and the later lease.
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

    def test_later_lease_makes_way_for_running_lease_of_failed_host(self):
        self.assert_exchanged(*self.after_failure(0, 3900, 4000))

    def test_later_lease_makes_way_for_lease_starting_soon(self):
        self.assert_exchanged(*self.after_failure(60, 3900, 4000))

    def assert_each_is_exchanged(self, start):
        """Let two hosts of a lease fail, and check that each is replaced.

        Two hosts are in use for some time, and each of two more is booked for
        later.
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

    def test_each_failed_host_of_running_lease_is_replaced(self):
        self.assert_each_is_exchanged(0)

    def test_each_failed_host_of_lease_starting_soon_is_replaced(self):
        self.assert_each_is_exchanged(60)

    def test_bookings_of_hosted_servers_do_not_block_reshuffling(self):
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

    def test_later_lease_is_not_moved_to_failed_host(self):
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

    def test_lease_ending_before_start_does_not_block_reshuffling(self):
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

    def test_booking_without_permitted_host_is_not_reshuffled(self):
        """A booking that has no permitted host is not reshuffled."""
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

    def test_each_reservation_of_lease_starting_soon_gets_its_host(self):
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

    def test_lease_of_unknown_type_does_not_block_reshuffling(self):
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

    def test_no_reshuffling_for_lease_being_deleted(self):
        lease = self.on(['one'], 60, 7200)
        with self.database.writer() as session:
            row = session.scalars(sa.select(models.Booking)).one()
            row.host_id, deleted = None, session.get(models.Lease, lease['id'])
            deleted.deleted_at = NOW
            lost = row.reservation_id, {row.id: None}
        bookings = self.overbooking._replacement
        with mock.patch.object(bookings._reshuffler, 'free') as free:
            self.assertTrue(bookings._find(*lost))
        free.assert_not_called()

    def test_hopeless_reservation_does_not_starve_others(self):
        """The oldest reservation is always first, and always fails."""
        reshuffler = self.overbooking._replacement._reshuffler
        tried = []
        demand, window = self.machines.so_many({'min': 1, 'max': 1}), (
            model.Window(NOW, NOW + 100))

        def free(*_what):
            self.clock.advance(2)
            return False

        reshuffler._free = free
        # The checks are at shorter and at longer intervals than its pauses.
        for wait in (0, 3, 20, 20, 3, 20, 60, 60):
            self.clock.advance(wait)
            for one in ('old', 'young', 'last'):
                before = self.clock.elapsed()
                reshuffler.free(one, demand, window, ())
                if self.clock.elapsed() > before:
                    tried.append(one)
        self.assertEqual(2 * ['old', 'young', 'last'], tried)

    def test_vanished_reservation_does_not_block_others(self):
        reshuffler = self.overbooking._replacement._reshuffler
        demand, window = self.machines.so_many({'min': 1, 'max': 1}), (
            model.Window(NOW, NOW + 100))
        reshuffler._free = lambda *_what: self.clock.advance(2) and False
        reshuffler.free('one', demand, window, ())
        self.assertFalse(reshuffler.is_next('gone'))
        self.clock.advance(20)
        self.assertFalse(reshuffler.is_next('one'))
        self.clock.advance(41)
        self.assertTrue(reshuffler.is_next('one'))

    def test_reshuffling_error_does_not_block_others(self):
        reshuffler = self.overbooking._replacement._reshuffler
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

    def test_lost_race_is_retried_soon(self):
        reshuffler = self.overbooking._replacement._reshuffler

        def free(*_what):
            self.clock.advance(2)
            raise api.Outdated('leases')

        reshuffler._free = free
        self.assertFalse(reshuffler.free(
            'one', self.machines.so_many({'min': 1, 'max': 1}),
            model.Window(NOW, NOW + 100), ()))
        self.clock.advance(2)
        self.assertTrue(reshuffler.is_next('one'))

    def test_slot_reservations_do_not_wait_for_whole_hosts(self):
        """Reservations of slots never wait for a whole host."""
        asked, self.uuids['three'] = [], self.host('three', VCPU=2)
        reshuffler = self.overbooking._replacement._reshuffler
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

    def test_audit_accepts_host_that_was_added_later(self):
        lease = self.reserve_machines(0, 7200)
        driven.run_due(self.engine)
        self.clock.advance(5)
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.held().keys())
        found = audit.Audit(self.database, self.clock, self.lifecycle,
                            self.encryption.decrypt, 60)
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

    def test_later_lease_without_alternative_is_not_moved(self):
        lost, other = self.after_failure(0, 3900, 3800)
        self.assertEqual(({'one'}, {'two'}, True), (
            self.bookings_of(lost).keys(), self.bookings_of(other).keys(),
            self.missing(lost)))
        self.assertNotIn(other['id'], dict(self.notified).values())

    def test_unsuccessful_reshuffling_is_repeated_after_pause(self):
        reshuffler = self.overbooking._replacement._reshuffler
        looks = []
        reshuffler._free = lambda *_what: looks.append(
            self.clock.advance(2))
        for wait, looked in ((0, 1), (0, 1), (19, 1), (1, 2), (0, 2)):
            self.clock.advance(wait)
            self.assertFalse(reshuffler.free(
                'one', self.machines.so_many({'min': 1, 'max': 1}),
                model.Window(NOW, NOW + 100), ()))
            self.assertEqual(looked, len(looks))

    def test_running_lease_gets_additional_host_for_failed_one(self):
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
        listed, = self.listed()
        self.assertEqual((False, True), tuple(
            listed['reservations'][0][flag] for flag in (
                'missing_resources', 'resources_changed')))
        self.assertThat(listed['warnings'], matchers.MatchesListwise([
            matchers.Contains('have changed')]))
        # Other changes do not concern its hosts.
        for _time in range(2):
            self.change(lease, 1, 1)
            self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        # It gets a third host only on request.
        self.uuids['three'] = self.host('three', VCPU=4)
        self.fail('one')
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.see('one', None)
        larger = self.change(lease, 2, 2)
        self.assertEqual(2, larger['reservations'][0]['amount'])
        self.assertEqual(
            {'one', 'two', 'three'}, self.bookings_of(lease).keys())
        driven.run_due(self.engine)
        # The host that was replaced stays, too.
        self.change(lease, 1, 1)
        driven.run_due(self.engine)
        self.assertEqual({'one', 'two'}, self.held().keys())
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual({}, self.held())
        self.assertEqual(0, self.count_rows()['bookings'])

    def test_warning_states_number_of_hosts_below_maximum(self):
        lease = self.reserve_machines(0, 7200)
        self.assertEqual([], lease['warnings'])
        driven.run_due(self.engine)
        lease = self.change(lease, 1, 3)
        (warning,) = lease['warnings']
        self.assertIn('has 2 of at most 3 hosts', warning)
        self.assertEqual({'one', 'two'}, self.bookings_of(lease).keys())
        self.assertEqual([], self.change(lease, 1, 2)['warnings'])

    def test_booked_hosts_are_listed_with_failed_flag(self):
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

    def test_lease_waits_for_replacement_host(self):
        lease = self.reserve_machines(0, 7200)
        other = self.reserve_machines(100, 200)
        driven.run_due(self.engine)
        self.fail('one')
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.assertEqual({'two'}, self.bookings_of(other).keys())
        self.assertIs(True, self.missing(lease))
        listed = self.listed()[0]
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

    def test_lease_with_unknown_demand_does_not_block_others(self):
        """The demand cannot be determined: its rack no longer exists."""
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

    def test_lease_not_started_is_moved_to_another_host(self):
        lease = self.reserve_machines(100, 7200)
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.fail('one')
        self.assertEqual({'two'}, self.bookings_of(lease).keys())
