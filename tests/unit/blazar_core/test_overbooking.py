# SPDX-License-Identifier: Apache-2.0

import threading

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class OverbookingTestCase(base.LeaseTestCase):
    """An overbooking check, and a cloud with the demands of each project.

    :ivar wanted: by project, what its servers need, or the exception raised
    :ivar asked: what the cloud was asked about
    """

    start_timeout = 300

    def setUp(self):
        super().setUp()
        self.wanted = {}
        self.asked = []
        self.uuids = {}
        self.places_type.demand_of = self.demand_of
        self.overbooking = self.new_check()
        self.log = self.useFixture(fixtures.FakeLogger(
            format='%(levelname)s %(message)s'))

    def new_check(self):
        """Return a check with connections of its own."""
        database = self.db.connect()
        search = admissions.Admission(database, self.clock)
        return overbooking.OverbookingCheck(
            database, self.clock, search,
            reassignment.Reassignment(database, self.clock, self.types),
            self.new_demands(),
            lambda event, lease: self.notified.append((event, lease['id'])),
            self.start_timeout)

    def demand_of(self, promise):
        self.asked.append(promise)
        demand = self.wanted.get(promise.project_id, model.Demand({}))
        if isinstance(demand, Exception):
            raise demand
        return demand

    def with_host(self, name, usage=0, **capacity):
        """Report the capacity and the usage of a host."""
        if name in self.uuids:
            self.report(self.uuids[name], name, {'VCPU': usage}, capacity)
        else:
            self.uuids[name] = self.host(name, {'VCPU': usage}, **capacity)

    def hosts_of(self, lease):
        """Return the names of the hosts of its bookings, oldest first."""
        with self.database.reader() as session:
            return list(session.scalars(
                sa.select(models.Host.name).select_from(models.Booking)
                .join(models.Reservation)
                .outerjoin(models.Host,
                           models.Host.id == models.Booking.host_id)
                .where(models.Reservation.lease_id == lease['id'])
                .order_by(models.Booking.id)))

    def change(self, lease, **values):
        """Update all bookings of a lease."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.reservation_id.in_([
                    one['id'] for one in lease['reservations']])).values(
                        **values))

    def get(self, lease):
        return views.get(self.database, lease['id'])

    def told(self, lease):
        """Return how many notifications of its change were sent."""
        return self.notified.count(('lease.update', lease['id']))


class TestReassignment(OverbookingTestCase):

    def test_nothing_is_done_without_overbooking(self):
        self.with_host('one', VCPU=2)
        lease = self.lease(50, 100, count=2)
        before = self.everything()
        self.overbooking.look()
        self.assertEqual(before, self.everything())
        self.assertEqual(([], []), (self.asked, self.notified))
        self.assertIs(False, self.get(lease)['degraded'])

    def test_booking_sent_meanwhile_is_not_reassigned(self):
        self.with_host('one', VCPU=2)
        lease = self.lease(50, 100, count=2)
        self.with_host('two', VCPU=2)
        self.with_host('one', usage=1, VCPU=2)
        reassign_all, found = self.overbooking._reassign_all, []

        def send_and_reassign(rows):
            found.extend(rows)
            self.change(lease, dispatched_at=NOW)
            with self.database.writer() as session:
                session.execute(sa.delete(models.DeferredBuild))
            reassign_all(found)

        self.overbooking._reassign_all = send_and_reassign
        self.overbooking.look()
        self.assertEqual(1, len(found))
        self.assertEqual((['one', 'one'], []),
                         (self.hosts_of(lease), self.asked))

    def test_overbooked_booking_is_reassigned_to_another_host(self):
        self.with_host('one', VCPU=2)
        lease = self.lease(50, 100, count=2)
        self.with_host('two', VCPU=2)
        self.with_host('one', usage=1, VCPU=2)
        self.overbooking.look()
        # The one that was booked last.
        self.assertEqual(['one', 'two'], self.hosts_of(lease))
        found = self.get(lease)
        self.assertEqual((True, False, ''), (
            found['reservations'][0]['resources_changed'],
            found['reservations'][0]['missing_resources'],
            found['status_reason']))
        self.assertEqual(1, self.told(lease))
        self.assertIn('is reassigned to host two; before: '
                      'one', self.log.output)
        before = self.everything()
        self.overbooking.look()
        self.assertEqual(before, self.everything())

    def test_host_with_unclosed_ended_lease_is_not_used(self):
        """A booking has one host over all of its window."""
        self.with_host('one', VCPU=1)
        lease = self.reserve(0, 1000, active=True)
        self.with_host('two', VCPU=1)
        ended = self.reserve(0, 100, active=True)
        self.assertEqual(['two'], self.hosts_of(ended))
        self.clock.advance(200)
        self.with_host('one')
        self.overbooking.look()
        self.assertEqual([None], self.hosts_of(lease))
        self.assertIs(True, self.get(lease)['degraded'])
        self.with_host('three', VCPU=1)
        self.overbooking.look()
        self.assertEqual(['three'], self.hosts_of(lease))

    def test_only_newest_overbooked_bookings_are_reassigned(self):
        self.with_host('one', VCPU=2)
        first = self.lease(50, 100)
        second = self.lease(50, 100)
        later = self.lease(200, 300, count=2)
        brief = self.lease(100, 110)
        self.with_host('two', VCPU=9)
        self.with_host('one', usage=1, VCPU=2)
        self.overbooking.look()
        self.assertEqual(
            [['one'], ['two'], ['one', 'two'], ['one']],
            [self.hosts_of(one) for one in (first, second, later, brief)])

    def test_all_bookings_leave_removed_host(self):
        self.with_host('one', VCPU=2)
        lease = self.lease(50, 100, count=2)
        self.with_host('two', VCPU=2)
        with self.database.writer() as session:
            inventory.retain(session, [self.uuids['two']], NOW)
        self.overbooking.look()
        self.assertEqual(['two', 'two'], self.hosts_of(lease))

    def when_it_is_gone(self, count):
        """Create leases on a host that disappears, and add another host."""
        self.with_host('one', VCPU=count)
        leases = [self.lease(50, 100) for _time in range(count)]
        self.with_host('two', VCPU=count)
        self.with_host('one', VCPU=0)
        return leases

    def test_lease_changed_during_reassignment_is_still_reassigned(self):
        first, second = self.when_it_is_gone(2)
        notify = self.overbooking._replacement._notify

        def change(event, lease):
            notify(event, lease)
            if event == 'lease.healed' and lease['id'] == first['id']:
                with self.database.writer() as session:
                    api.locked(session, second['id']).name = 'another'

        self.overbooking._replacement._notify = change
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(first))
        self.assertEqual(['two'], self.hosts_of(second))
        self.assertEqual('another', self.get(second)['name'])

    def test_lease_withdrawn_during_reassignment_blocks_no_other(self):
        first, second, third = self.when_it_is_gone(3)
        notify = self.overbooking._replacement._notify

        def change(event, lease):
            notify(event, lease)
            if event == 'lease.healed' and lease['id'] == first['id']:
                driven.withdraw(self.leases, second['id'])

        self.overbooking._replacement._notify = change
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(third))

    def test_unreadable_lease_does_not_block_others_in_batch(self):
        """An unreadable lease does not block others, and is tried again."""
        leases = self.when_it_is_gone(3)
        bad = leases[1]['reservations'][0]['id']
        cases, broken = self.overbooking._replacement._others.cases, [True]

        def fail(reservation_ids):
            if bad in reservation_ids and broken:
                raise ZeroDivisionError
            return cases(reservation_ids)

        self.overbooking._replacement._others.cases = fail
        self.overbooking.look()
        self.assertEqual([['two'], ['one'], ['two']],
                         [self.hosts_of(one) for one in leases])
        broken.clear()
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(leases[1]))

    def test_many_leases_are_reassigned_in_few_transactions(self):
        """Few transactions are enough, and each uses what others leave."""
        leases, begun = self.when_it_is_gone(20), []
        engine = self.overbooking._database.engine
        sa.event.listen(engine, 'begin', begun.append)
        self.overbooking.look()
        for lease in leases:
            self.assertEqual(['two'], self.hosts_of(lease))
        self.assertEqual([1] * 20, list(map(self.told, leases)))
        self.assertLess(len(begun), 15)

    def test_leases_reassigned_together_share_free_capacity(self):
        leases, begun = self.when_it_is_gone(2), []
        self.with_host('two', VCPU=1)
        self.with_host('three', VCPU=1)
        engine = self.overbooking._database.engine
        sa.event.listen(engine, 'begin', begun.append)
        self.overbooking.look()
        self.assertEqual({'two', 'three'}, {
            host for lease in leases for host in self.hosts_of(lease)})
        self.assertLess(len(begun), 15)

    def test_lease_gets_capacity_freed_in_same_check(self):
        """No lease is reported as lacking a host if another one frees one."""
        self.with_host('small', VCPU=2)
        self.with_host('gone', VCPU=1)
        leases = []
        for vcpus in (2, 1):
            leases.append(self.lease(50, 100, resources={'VCPU': vcpus}))
            self.clock.advance(1)
        self.with_host('large', VCPU=2)
        self.with_host('small', VCPU=1)
        self.with_host('gone', VCPU=0)
        self.overbooking.look()
        self.assertEqual([['large'], ['small']],
                         list(map(self.hosts_of, leases)))
        self.assertNotIn('lease.degraded', dict(self.notified))

    def test_oldest_lease_is_reassigned_completely_first(self):
        self.with_host('one', VCPU=3)
        older = self.reserve(50, 100, self.places(), self.places())
        self.clock.advance(1)
        younger = self.reserve(50, 100)
        self.with_host('two', VCPU=2)
        self.with_host('one', VCPU=0)
        self.overbooking.look()
        self.assertEqual([['two', 'two'], [None]],
                         list(map(self.hosts_of, (older, younger))))

    def test_lease_withdrawn_during_batch_does_not_block_others(self):
        leases, begun = self.when_it_is_gone(16), []
        reassign = self.overbooking._reassigner.reassign

        def reassign_late(*moves):
            if not begun:
                sa.event.listen(
                    self.overbooking._database.engine, 'begin', begun.append)
                driven.withdraw(self.leases, leases[3]['id'])
            return reassign(*moves)

        self.overbooking._reassigner.reassign = reassign_late
        self.overbooking.look()
        del leases[3]
        self.assertEqual([['two']] * 15, list(map(self.hosts_of, leases)))
        self.assertLess(len(begun), 15)

    def test_contended_host_is_avoided(self):
        leases = self.when_it_is_gone(1)
        self.with_host('three', VCPU=1)
        busy, = self.scalars(models.Host.id, models.Host.name == 'two')
        reassign = self.overbooking._reassigner.reassign

        def reassign_late(*moves):
            if busy in moves[0].hosts.values():
                raise api.LostRace(busy)
            return reassign(*moves)

        self.overbooking._reassigner.reassign = reassign_late
        self.overbooking.look()
        self.assertEqual(['three'], self.hosts_of(leases[0]))

    def test_reassignment_by_another_process_is_kept(self):
        """Another host would be better by then."""
        leases = self.when_it_is_gone(2)
        self.with_host('two', VCPU=1)
        self.with_host('three', VCPU=1)
        other, reassign_all = self.new_check(), self.overbooking._reassign_all

        def reassign_late(rows):
            rows = list(rows)
            other.look()
            self.with_host('better', VCPU=4)
            self.lease(50, 100, count=1)
            reassign_all(rows)

        self.overbooking._reassign_all = reassign_late
        self.overbooking.look()
        self.assertEqual({'two', 'three'}, {
            host for lease in leases for host in self.hosts_of(lease)})
        self.assertEqual([1] * 2, list(map(self.told, leases)))

    def test_some_bookings_leave_host_with_reduced_capacity(self):
        self.with_host('one', VCPU=4, MEMORY_MB=4)
        resources = {'VCPU': 1, 'MEMORY_MB': 1}
        lease = self.lease(50, 100, count=4, resources=resources)
        self.with_host('two', VCPU=4, MEMORY_MB=4)
        self.with_host('one', VCPU=4, MEMORY_MB=3)
        self.overbooking.look()
        self.assertEqual(['one'] * 3 + ['two'], self.hosts_of(lease))

    def test_booking_is_reassigned_only_to_permitted_hosts(self):
        self.with_host('one', VCPU=1)
        lease = self.lease(50, 100, call='the call')
        self.with_host('two', VCPU=1)
        self.with_host('three', VCPU=1)
        self.wanted['project'] = model.Demand(
            {}, hosts=frozenset([self.uuids['three']]))
        self.with_host('one', usage=1, VCPU=1)
        self.overbooking.look()
        self.assertEqual(['three'], self.hosts_of(lease))
        reservation, = lease['reservations']
        self.assertEqual([resource_types.ReservationContext(
            reservation['id'], lease['id'], 'project', 'user', {}, {},
            (self.uuids['one'],), 'the call', {self.uuids['one']: 'one'}, (),
            model.Window(NOW + 50, NOW + 100),
            tuple(base.servers_of(lease)), 'delete')], self.asked)

    def test_slots_with_affinity_are_reassigned_together(self):
        self.with_host('one', VCPU=3)
        lease = self.reserve(50, 100, self.places(2, affinity=True))
        self.wanted['project'] = model.Demand(
            {}, affinity=model.Affinity.SAME)
        self.with_host('two', VCPU=1)
        self.with_host('three', VCPU=2)
        self.with_host('one', usage=2, VCPU=3)
        self.overbooking.look()
        self.assertEqual(['three', 'three'], self.hosts_of(lease))
        self.assertEqual({'vcpus': 1}, self.asked[0].spec)
        self.assertIsNone(self.asked[0].call)

    def test_slots_with_anti_affinity_stay_apart(self):
        self.with_host('one', VCPU=2)
        self.with_host('two', VCPU=1)
        lease = self.reserve(50, 100, self.places(2, affinity=False))
        self.wanted['project'] = model.Demand(
            {}, affinity=model.Affinity.DIFFERENT)
        self.with_host('three', VCPU=1)
        self.with_host('two', usage=1, VCPU=1)
        self.overbooking.look()
        self.assertEqual({'one', 'three'}, set(self.hosts_of(lease)))

    def test_free_slots_are_reassigned_and_taken_ones_stay(self):
        self.with_host('one', VCPU=2)
        lease = self.reserve(0, 100, self.places(2), active=True)
        server_id, = self.take_slots(lease)
        self.with_host('two', VCPU=2)
        self.clock.advance(10)
        self.with_host('one', usage=1, VCPU=2)
        self.overbooking.look()
        self.assertEqual('one', self.host_of(server_id))
        self.assertEqual(['one', 'two'], sorted(self.hosts_of(lease)))

    def test_free_slot_waits_for_migrating_sibling(self):
        for name in ('one', 'two'):
            self.with_host(name, VCPU=1)
        lease = self.reserve(0, 1000, self.places(2), active=True)
        server_id, = self.take_slots(lease)
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(
                cloud_api.ServerState.RUNNING, self.uuids[self.host_of(
                    server_id)]))
        there, = {'one', 'two'} - {self.host_of(server_id)}
        scheduler_claims.Claims(
            self.database, self.clock, self.admission.index).claim(
                server_id, {self.uuids[there]: {'VCPU': 1}})
        before = self.hosts_of(lease)
        self.overbooking.look()
        self.assertEqual((before, []), (self.hosts_of(lease), self.asked))
        # It has stayed on its host, and another server has arrived.
        self.clock.advance(overbooking.AGAIN + 1)
        with self.database.writer() as session:
            uuid = self.uuids[there]
            inventory.record_host_usage(
                session, self.clock.now(), uuid, {'other': {'VCPU': 1}},
                inventory.generations(session, [uuid])[uuid])
        self.overbooking.look()
        self.assertIn(None, self.hosts_of(lease))

    def test_offer_is_reassigned(self):
        self.with_host('one', VCPU=1)
        offer = self.leases.creation.offer(new_leases.NewLease(
            'project', 'user', self.request(50, 100), (self.places(),)), 40)
        self.with_host('two', VCPU=1)
        self.with_host('one', usage=1, VCPU=1)
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(offer))


class TestUnmovableBookings(OverbookingTestCase):

    def setUp(self):
        super().setUp()
        self.with_host('one', VCPU=1)

    def crowd(self):
        self.with_host('two', VCPU=1)
        self.with_host('one', usage=1, VCPU=1)

    def test_running_server_is_not_reassigned_but_logged_once(self):
        lease = self.running_lease(0, 1000)
        self.crowd()
        for _look in range(3):
            self.clock.advance(overbooking.AGAIN)
            self.overbooking.look()
        self.assertEqual(['one'], self.hosts_of(lease))
        self.assertEqual(1, self.log.output.count('WARNING Host one is'))
        self.with_host('one', usage=2, VCPU=1)
        self.overbooking.look()
        self.assertEqual(2, self.log.output.count('WARNING Host one is'))

    def test_dispatched_or_claimed_server_is_not_reassigned(self):
        lease = self.lease(50, 100)
        self.crowd()
        for column in ('dispatched_at', 'claimed_at'):
            self.change(lease, **{column: NOW})
            self.overbooking.look()
            self.assertEqual(['one'], self.hosts_of(lease), column)
            self.change(lease, **{column: None})
        self.clock.advance(overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(lease))

    def test_immediate_lease_is_not_reassigned(self):
        lease = self.lease(0, 100)
        self.crowd()
        self.overbooking.look()
        self.assertEqual(['one'], self.hosts_of(lease))

    def test_overstaying_server_causes_no_immediate_reassignment(self):
        self.running_lease(0, 100)
        lease = self.lease(100, 9000)
        self.with_host('two', VCPU=1)
        self.clock.advance(100)
        self.overbooking.look()
        self.clock.advance(self.start_timeout - 1)
        self.overbooking.look()
        self.assertEqual(['one'], self.hosts_of(lease))
        self.clock.advance(overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(lease))

    def test_open_ended_usage_alone_is_not_logged(self):
        self.with_host('one', usage=2, VCPU=1)
        self.overbooking.look()
        self.assertNotIn('WARNING', self.log.output)


class TestMissingCapacity(OverbookingTestCase):

    def setUp(self):
        super().setUp()
        self.with_host('one', VCPU=2)

    def crowd(self, usage=2):
        self.with_host('one', usage=usage, VCPU=2)

    def test_lease_without_capacity_is_degraded_at_once(self):
        lease = self.lease(50, 100, count=2)
        self.crowd(1)
        self.overbooking.look()
        self.assertEqual(['one', None], self.hosts_of(lease))
        found = self.get(lease)
        self.assertEqual(
            ('PENDING', True, True), (
                found['status'], found['degraded'],
                found['reservations'][0]['missing_resources']))
        self.assertIn('There is no capacity for this lease in this window.',
                      found['status_reason'])
        self.assertEqual(1, self.told(lease))
        self.assertIn(f'WARNING Lease {lease["id"]}: ', self.log.output)
        self.assertIn('has lost its capacity on host one', self.log.output)

    def test_lost_capacity_is_notified_once(self):
        lease = self.lease(50, 1000, count=2)
        self.crowd(1)
        for _look in range(5):
            self.overbooking.look()
            self.clock.advance(20)
        self.assertEqual(1, self.told(lease))
        self.assertEqual(1, self.log.output.count('has lost its capacity'))

    def test_reason_names_next_start(self):
        lease = self.lease(50, 100, count=2)
        self.with_host('two', VCPU=2)
        self.lease(40, 500, count=2)
        self.crowd()
        self.overbooking.look()
        self.assertEqual([None, None], self.hosts_of(lease))
        self.assertIn('next_start: 2027-01-15T08:08:20',
                      self.get(lease)['status_reason'])

    def test_missing_capacity_is_assigned_as_soon_as_free(self):
        lease = self.lease(50, 1000, count=2)
        self.crowd()
        self.overbooking.look()
        self.assertEqual([None, None], self.hosts_of(lease))
        self.crowd(1)
        self.overbooking.look()
        self.assertEqual(['one', None], self.hosts_of(lease))
        self.assertEqual(['CapacityMissing'], [
            one['type'] for one in self.get(lease)['conditions']])
        self.crowd(0)
        self.overbooking.look()
        self.assertEqual(['one', 'one'], self.hosts_of(lease))
        found = self.get(lease)
        self.assertEqual((False, ''), (
            found['reservations'][0]['missing_resources'],
            found['status_reason']))
        self.assertEqual(3, self.told(lease))

    def test_reason_is_cleared_if_booking_got_host_elsewhere(self):
        lease = self.lease(50, 1000)
        self.crowd()
        self.overbooking.look()
        self.change(lease, host_id=self.scalars(models.Host.id)[0],
                    claimed_at=NOW)
        self.clock.advance(overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual('', self.get(lease)['status_reason'])
        self.assertEqual(2, self.told(lease))

    def test_large_lease_does_not_block_small_one(self):
        large = self.lease(50, 100, resources={'VCPU': 2})
        self.clock.advance(1)
        small = self.lease(200, 300)
        self.crowd()
        self.overbooking.look()
        self.assertEqual([[None], [None]], [
            self.hosts_of(one) for one in (large, small)])
        self.crowd(1)
        self.overbooking.look()
        self.assertEqual([[None], ['one']], [
            self.hosts_of(one) for one in (large, small)])

    def test_oldest_lease_gets_capacity_first(self):
        made = []
        for _number in range(2):
            made.append(self.lease(50, 100))
            self.clock.advance(1)
        self.crowd()
        self.overbooking.look()
        self.crowd(1)
        self.overbooking.look()
        self.assertEqual([['one'], [None]], list(map(self.hosts_of, made)))

    def test_slots_with_affinity_are_missing_together(self):
        lease = self.reserve(50, 100, self.places(2, affinity=True))
        self.wanted['project'] = model.Demand(
            {}, affinity=model.Affinity.SAME)
        self.crowd(1)
        self.overbooking.look()
        self.assertEqual([None, None], self.hosts_of(lease))
        self.crowd(0)
        self.overbooking.look()
        self.assertEqual(['one', 'one'], self.hosts_of(lease))

    def test_reason_states_that_no_host_is_permitted(self):
        lease = self.lease(50, 100)
        self.with_host('two', VCPU=2)
        self.wanted['project'] = errors.Refused(refusals.Refusal(
            refusals.Reason.NO_HOST, 0, 0, None))
        self.crowd()
        self.overbooking.look()
        self.assertEqual([None], self.hosts_of(lease))
        self.assertIn('There is no host that this lease may use. '
                      'next_start: none. fits_now: 0 of 1.',
                      self.get(lease)['status_reason'])

    def test_unavailable_cloud_defers_reassignment(self):
        lease = self.lease(50, 100)
        other = self.lease(50, 100, project='other')
        self.wanted['project'] = errors.CloudUnavailable('down')
        self.wanted['other'] = RuntimeError('broken')
        self.with_host('two', VCPU=2)
        self.crowd()
        self.overbooking.look()
        self.assertEqual([['one'], ['one']],
                         [self.hosts_of(one) for one in (lease, other)])
        self.assertEqual([], self.notified)
        self.wanted.clear()
        # It is not waited for in every check.
        self.overbooking.look()
        self.assertEqual([['one'], ['two']],
                         [self.hosts_of(one) for one in (lease, other)])
        self.clock.advance(overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual([['two'], ['two']],
                         [self.hosts_of(one) for one in (lease, other)])

    def test_long_search_continues_in_next_check(self):
        """Each lease costs a search, and new overbooking waits meanwhile."""
        found = [self.lease(50, 100, project=name) for name in 'ab']
        self.crowd()
        self.overbooking.look()
        self.assertEqual([[None]] * 2, list(map(self.hosts_of, found)))
        reassign_all, tried = self.overbooking._reassign_all, []

        def slow(rows):
            rows = list(rows)
            tried.extend(row.lease_id for row in rows)
            if rows:
                self.clock.advance(overbooking.PAUSE + 1)
            reassign_all(rows)

        self.overbooking._reassign_all = slow
        self.with_host('full', VCPU=0)
        for _look in range(2):
            self.overbooking.look()
        self.assertEqual([lease['id'] for lease in sorted(
            found, key=lambda lease: (lease['created_at'], lease['id']))],
            tried)

    def test_demand_is_not_looked_up_in_every_check(self):
        self.lease(50, 1000)
        self.crowd()
        for usage in range(3, 8):
            self.overbooking.look()
            self.crowd(usage)
        self.assertEqual(1, len(self.asked))
        self.clock.advance(overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual(2, len(self.asked))

    def test_failed_or_deleted_lease_is_ignored(self):
        failed = self.lease(50, 100)
        gone = self.lease(60, 100)
        self.lifecycle.lease_start.give_up(failed['id'], 'start_lease')
        self.with_host('two', VCPU=2)
        self.crowd()
        self.lifecycle.lease_end.delete(gone['id'])
        before = self.everything()
        self.overbooking.look()
        self.assertEqual(before, self.everything())


class TestConcurrentChecks(OverbookingTestCase):

    def test_concurrent_checks_reassign_once(self):
        self.with_host('one', VCPU=8)
        made = [self.lease(50, 100) for _number in range(8)]
        self.with_host('two', VCPU=8)
        self.with_host('one', usage=4, VCPU=8)
        checks = [self.new_check() for _number in range(3)]
        together = threading.Barrier(3)

        def look(one):
            together.wait(20)
            one.look()

        for thread in [self.in_thread(lambda one=one: look(one))
                       for one in checks]:
            thread.join(60)
        self.overbooking.look()
        self.assertEqual([['one']] * 4 + [['two']] * 4,
                         list(map(self.hosts_of, made)))
        self.assertEqual([0] * 4 + [1] * 4, list(map(self.told, made)))

    def test_late_check_keeps_reassignment_of_another(self):
        self.with_host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.with_host('two', VCPU=1)
        self.with_host('one', usage=1, VCPU=1)
        other = self.new_check()
        real = self.overbooking._reassigner.reassign

        def reassign(*args):
            # Another process does it meanwhile.
            other.look()
            return real(*args)

        self.overbooking._reassigner.reassign = reassign
        self.overbooking.look()
        self.assertEqual(['two'], self.hosts_of(lease))
        self.assertEqual(1, self.told(lease))

    def test_search_is_repeated_if_target_is_taken_meanwhile(self):
        self.with_host('one', VCPU=1)
        lease = self.lease(50, 100)
        self.with_host('two', VCPU=1)
        self.with_host('one', usage=1, VCPU=1)
        real = self.overbooking._reassigner.reassign
        taken = []

        def reassign(*args):
            if not taken:
                taken.append(self.lease(50, 100))
                self.with_host('three', VCPU=1)
            return real(*args)

        self.overbooking._reassigner.reassign = reassign
        self.overbooking.look()
        self.assertEqual([['two'], ['three']],
                         [self.hosts_of(one) for one in (*taken, lease)])
