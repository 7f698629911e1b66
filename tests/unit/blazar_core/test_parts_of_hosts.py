# SPDX-License-Identifier: Apache-2.0

"""Leases within a lease of whole hosts."""

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import eligibility
from blazar_core.capacity import ledger
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.leases import hosted_servers
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestReservationAccess(whole_hosts_base.WholeHostsTestCase):
    """Queries and claims of the scheduler."""

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

    def test_no_server_is_admitted_after_lease_is_deleted(self):
        self.assertTrue(self.claims.is_within(self.reservation_id))
        self.lifecycle.lease_end.delete(self.scalars(models.Lease.id)[0])
        self.assertFalse(self.claims.is_within(self.reservation_id))

    def test_server_without_reservation_is_kept_off_enrolled_hosts(self):
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

    def test_server_with_reservation_goes_only_to_its_hosts(self):
        self.assertEqual({self.held_host}, self.fits(self.reservation_id))
        self.claim(self.held_host, reservation_id=self.reservation_id)
        self.assertEqual([{}] * 3, self.scalars(models.Host.usage))
        for host in self.uuids.keys() - {self.held_host}:
            for forced in (False, True):
                self.assertRaises(
                    scheduler_claims.Denied, self.claim, host, forced=forced,
                    reservation_id=self.reservation_id)

    def test_server_with_other_reservation_is_not_admitted(self):
        other = uuidutils.generate_uuid()
        self.assertEqual(set(), self.fits(other))
        for host in self.uuids:
            self.assertRaises(scheduler_claims.Denied, self.claim, host,
                              reservation_id=other)

    def test_no_server_is_admitted_after_lease_end(self):
        self.clock.advance(100)
        driven.run_due(self.new_engine('second'))
        self.assertEqual({}, self.held())
        self.assertEqual(set(), self.fits(self.reservation_id))
        for host in self.uuids:
            self.assertRaises(scheduler_claims.Denied, self.claim, host,
                              reservation_id=self.reservation_id)


class TestSlotsOnEnrolledHosts(whole_hosts_base.WholeHostsTestCase):
    """Servers on enrolled hosts: two of them, and one for all workloads."""

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
        """Return the servers of a lease of parts of hosts, and their hosts."""
        lease = self.reserve(0, 100, self.parts(amount), active=True)
        ids = [one for _number in range(
            amount) for one in self.take_slots(lease)]
        with self.database.reader() as session:
            return ids, dict(session.execute(sa.select(
                models.Booking.server_id, models.Host.name).join(
                    models.Host, models.Host.id == models.Booking.host_id)
                .where(models.Booking.server_id.in_(ids))).tuples().all())

    def test_enrolled_hosts_are_picked_last(self):
        lease = self.reserve(0, 100, self.parts(5))
        hosts = self.bookings_of(lease)
        self.assertEqual((True, 2), ('plain' in hosts, len(hosts)))
        self.assertEqual(({'VCPU': 4}, 1), (
            self.peak('plain'), len(hosts.keys() & {'one', 'two'})))

    def test_enrolled_hosts_are_picked_last_in_partial_search(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.selection.FIRST', 1))
        # Otherwise an empty host comes last, of either kind.
        self.reserve(0, 1000, self.parts(1, hosts=frozenset({
            self.uuids['one']})))
        # The bookings are in the index by then.
        self.clock.advance(1)
        lease = self.reserve(10, 100, self.parts(1))
        self.assertEqual({'plain'}, self.bookings_of(lease).keys())

    def peak(self, name):
        with self.admission.index.fresh() as timeline:
            return timeline.peak(
                self.admission.index.ids_by_uuid[self.uuids[name]],
                model.Window(NOW, NOW + 100))

    def test_whole_enrolled_hosts_are_kept_free_if_possible(self):
        self.reserve(0, 100, self.parts(6))
        self.reserve(0, 100, self.parts(2))
        self.reserve_machines(0, 100)
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.parts(1))
        self.assertEqual(NOW + 100, refused.refusal.next_start)

    def test_slots_are_limited_by_capacity_of_both_pools(self):
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.parts(13))
        self.assertEqual(12, refused.refusal.fits_now)
        self.assertRaises(errors.Refused, self.reserve, 0, 100, self.places(5))
        self.reserve(0, 100, self.parts(12))

    def test_other_reservation_of_lease_can_be_updated(self):
        """The reservation that does not change keeps its hosts."""
        lease = self.reserve(
            50, 100, self.places(1), self.parts(4), self.machines_of())
        one = next(one for one in lease['reservations']
                   if one['amount'] == 1 and one['resource_type'] ==
                   new_leases.RESOURCE_TYPE)
        self.assertEqual(1, len(self.scalars(
            models.Booking.id, models.Booking.reservation_id == one['id'])))
        self.host('more', VCPU=4)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={one['id']: self.places(3)}))
        self.assertEqual(8, len(self.scalars(models.Booking.id)))

    def test_decision_respects_changed_enrollment_of_host(self):
        """The host was closed, or is being removed, since it was picked."""
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
        """Return whether a booking is possible there, without writing it."""
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

    def test_servers_booted_together_use_hosts_of_one_kind(self):
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

    def test_forced_claim_on_host_of_whole_host_lease_is_denied(self):
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
        # A host that is reserved as a whole later is denied, too.
        self.reserve_machines(50, 100)
        for forced in (False, True):
            self.assertRaises(scheduler_claims.Denied, self.claim, inside,
                              other, forced)

    def test_server_without_slot_on_enrolled_hosts_is_denied(self):
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
        # The booking follows and stays, even if the host is closed.
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

    def test_claim_after_end_of_slot_is_denied(self):
        """The host was chosen before the end, and is claimed after it."""
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

    def test_claim_is_denied_if_host_is_assigned_concurrently(self):
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        later = self.reserve_machines(100, 200, 2, 2)
        self.clock.advance(100)
        locked = self.claims._locked

        def late(*args):
            # Between its read of the host and its write.
            self.claims._locked = locked
            self.lifecycle.lease_start.start(later['id'], when_due=True)
            return locked(*args)

        self.claims._locked = late
        self.assertRaises(
            scheduler_claims.Denied, self.claim, inside, hosts[inside])
        self.assertEqual({'one', 'two'}, self.held().keys())

    def test_whole_host_lease_waits_for_overstaying_server(self):
        """No server is deleted, and no other one is admitted."""
        ids, hosts = self.taken(5)
        inside, = {one for one in ids if hosts[one] != 'plain'}
        self.claim(inside, hosts[inside])
        later = self.reserve_machines(100, 200, 2, 2)
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.assertEqual('PENDING', self.status(later))
        self.assertEqual({}, self.held())


class TestNestedLeases(whole_hosts_base.WholeHostsTestCase):
    """Servers of hosts leases that have leases of their own."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.engine = self.new_engine()
        self.outer = self.reserve_machines(100, 1000)
        self.reservation_id = self.outer['reservations'][0]['id']

    def inner(self, start, end, **wanted):
        with self.database.reader() as session:
            hosts = hosted_servers.hosts(session, self.reservation_id)
        return self.leases.creation.create(new_leases.NewLease(
            'project', 'user', self.request(start, end, **wanted), (
                new_leases.NewReservation(
                    model.Demand({}, 1, among=None, hosts=hosts),
                    (uuidutils.generate_uuid(),),
                    spec=hosted_servers.spec(self.reservation_id)),)),
            self.encryption.encrypt('call'))

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

    def test_nested_lease_needs_window_and_project_of_outer_lease(self):
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

    def test_nested_lease_books_no_capacity(self):
        self.inner(200, 300)
        self.inner(200, 300)
        self.assertEqual([{}, {}], self.scalars(
            models.Booking.resources,
            models.Booking.server_id.is_not(None)))
        self.assertRaises(errors.Refused, self.reserve_machines, 200, 300)
        self.reserve_machines(1000, 1100)

    def test_nested_lease_cannot_leave_window_of_outer_lease(self):
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
        # A lease that has ended does not prevent shortening.
        self.lifecycle.lease_end.delete(self.outer['id'])
        driven.run_due(self.engine)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + 500))
        self.assertRaises(
            errors.InvalidLeaseParams, self.leases.updates.update,
            lease['id'], updates.LeaseChange(end=NOW + 600))

    def test_queued_nested_lease_stays_within_outer_lease(self):
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

    def test_nested_lease_starts_once_outer_lease_is_active(self):
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
        """Return the obstacles to a maintenance of host one, by lease."""
        return {one.lease_id: one.obstacle
                for one in self.new_maintenance().promised(
                    'one', model.Window(NOW + 150, NOW + 250))}

    def follow(self):
        """Return the demand that the resource types determine for a boot."""
        def demand_of(_reserved):
            with self.database.reader() as session:
                return model.Demand(
                    {}, 1, among=None, hosts=hosted_servers.hosts(
                        session, self.reservation_id))

        self.places_type.demand_of = demand_of

    def test_nested_lease_follows_reassigned_hosts(self):
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

    def test_nested_lease_stays_with_its_hosts(self):
        lease = self.inner(200, 300)
        self.follow()
        inside = 'It belongs to a lease of the whole host.'
        # There is no other host.
        self.assertEqual(inside, self.promised()[lease['id']])
        self.host('two', VCPU=4)
        self.run_at(100)
        self.assertEqual(inside, self.promised()[lease['id']])
        self.new_maintenance().announce(
            'one', model.Window(NOW + 150, NOW + 250), 'firmware')
        self.overbooking_check().look()
        self.assertEqual({'one'}, self.bookings_of(lease).keys())

    def test_nested_lease_moves_to_replacement_host(self):
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
        # The host may be back in time.
        self.assertEqual({'one'}, self.bookings_of(lease).keys())
        self.host('two', VCPU=4)
        watch.look()
        self.assertEqual({'one', 'two'}, self.bookings_of(self.outer).keys())
        self.assertEqual({'two'}, self.bookings_of(lease).keys())

    def test_nested_lease_does_not_start_after_sharing_ends(self):
        self.share('other')
        with self.database.reader() as session:
            hosts = hosted_servers.hosts(session, self.reservation_id)
        lease = self.leases.creation.create(new_leases.NewLease(
            'other', 'user', self.request(200, 300), (
                new_leases.NewReservation(
                    model.Demand({}, 1, among=None, hosts=hosts),
                    (uuidutils.generate_uuid(),),
                    spec=hosted_servers.spec(self.reservation_id)),)),
            self.encryption.encrypt('call'))
        self.run_at(100)
        self.share()
        self.run_at(200)
        self.assertEqual([], self.cloud.sent)
        self.assertIn('Your project cannot use', self.reason(lease))

    def test_overstaying_nested_server_does_not_delay_others(self):
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

    def test_shelved_nested_server_does_not_block_next_lease(self):
        """The booking of a shelved server counts as running until the end."""
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
