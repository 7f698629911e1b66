# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers use reserved capacity until it is needed."""

import dataclasses
import itertools
import random
import threading
from unittest import mock

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.capacity import scheduler_claims
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import counters
from blazar_core.db import leader_election
from blazar_core.db import models
from blazar_core.leases import members
from blazar_core.leases import new_leases
from blazar_core.lifecycle import eviction
from blazar_core.lifecycle import resumption
from blazar_core.plugins import cloud_api
from tests import databases
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import test_scheduler_claims

load_tests = databases.load_tests

NOW = base.NOW
#: Seconds from the notification until the capacity is free.
LEAD = 600
State = cloud_api.ServerState


class InterruptibleTestCase(test_scheduler_claims.ClaimTestCase):

    def setUp(self):
        super().setUp()
        self.told = []
        self.evictions = self.new_evictions()

    ACTIONS = ('shelve', 'delete')

    def new_evictions(self):
        """Return an object that evicts servers."""
        return eviction.Evictions(
            self.database, self.clock, self.cloud,
            lambda event, payload: self.told.append((
                event.rpartition('.')[2], payload['server_id'],
                payload.get('evict_at') or payload.get('safe_until'))),
            lambda _credential_id: 'trust', self.ACTIONS,
            resumption.Resumption(
                self.database, self.clock, self.cloud, self.admission,
                lambda _credential_id: 'trust', 3600))

    def register(self, on_evict='shelve', safe_for=0, lead_time=LEAD,
                 resume=False, cleaning_time=0):
        """Register an interruptible server of a user."""
        server_id = uuidutils.generate_uuid()
        with self.database.begin() as connection:
            interruptible.register(connection, [{
                'server_id': server_id, 'project_id': 'lender',
                'user_id': 'user', 'lead_time': lead_time,
                'notice': lead_time - 300, 'credential_id': 'trust',
                'on_evict': on_evict, 'resume': resume,
                'cleaning_time': cleaning_time,
                'safe_for': safe_for, 'created_at': self.clock.now(),
                'checked_at': self.clock.now()}])
        return server_id

    def boot(self, host='one', vcpus=1, **values):
        """Run an interruptible server on a host."""
        server_id = self.register(**values)
        self.claim(server_id, host, VCPU=vcpus)
        self.tell(server_id, host, VCPU=vcpus)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of(host))
        self.clock.advance(1)
        return server_id

    def until(self, instant):
        """Let time pass."""
        self.clock.advance(instant - self.clock.now())

    def events(self):
        """Return the notifications since the last call."""
        told, self.told = self.told, []
        return told

    def leave(self, server_id, host='one'):
        """Record that a server has left a host."""
        self.tell(server_id, host)

    def moves(self):
        """Return the status of each eviction."""
        return {row.server_id: row.status
                for row in self.scalars(models.ServerMove)}


class TestAdmission(InterruptibleTestCase):
    """One rule for leased, open-ended and interruptible servers."""

    def test_interruptible_server_may_use_capacity_reserved_for_later(self):
        self.host('one', VCPU=4)
        self.lease(LEAD + 200, LEAD + 1000, resources={'VCPU': 4})
        self.assertFalse(self.fits('one'))
        self.assertTrue(self.fits('one', self.register()))

    def test_interruptible_server_may_not_use_capacity_reserved_soon(self):
        self.host('one', VCPU=4)
        self.lease(LEAD - 1, LEAD + 1000, resources={'VCPU': 4})
        self.assertFalse(self.fits('one', self.register()))

    def test_interruptible_server_may_not_use_capacity_in_use(self):
        self.host('one', VCPU=4)
        self.lease(LEAD + 200, LEAD + 1000)
        self.boot(vcpus=3)
        self.assertTrue(self.fits('one', self.register()))
        self.assertFalse(self.fits('one', self.register()))

    def test_future_lease_may_reserve_interruptible_capacity(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        for start, fits in ((0, False), (LEAD - 1, False),
                            (LEAD + 60, True)):
            self.assertEqual(fits, self.quote(start))
        self.lease(LEAD + 60, LEAD + 1000, resources={'VCPU': 4})

    def quote(self, start):
        """Return whether a lease of the whole host could start then."""
        return self.leases.creation.quote(self.new_lease(
            start, start + 100_000, resources={'VCPU': 4})) is None

    def test_a_lease_is_offered_the_first_start_after_an_eviction(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        refused = self.assertRaises(
            errors.Refused, self.lease, 10, 5000, resources={'VCPU': 4})
        start = refused.refusal.next_start - self.clock.now()
        self.assertTrue(LEAD <= start <= LEAD + 60, start)
        self.lease(refused.refusal.next_start - NOW, 9000,
                   resources={'VCPU': 4})

    def evict_now(self):
        """The operator lets leases start as soon as others are evicted."""
        self.leases.creation._eviction_time = LEAD

    def test_a_lease_starts_as_soon_as_others_are_evicted(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        self.evict_now()
        end = self.clock.now() - NOW + 5000
        now = self.clock.now()
        lease = self.lease(now - NOW, end, resources={'VCPU': 4})
        late = lease['start_date'] - now
        self.assertTrue(LEAD <= late <= LEAD + 60, late)
        self.assertEqual(NOW + end, lease['end_date'])
        self.assertIn(f'starts in {late} seconds', lease['warnings'][0])
        self.until(lease['start_date'] - LEAD)
        self.evictions.plan()
        self.assertEqual([lease['start_date'] - 300], self.scalars(
            models.ServerMove.next_at))

    def test_start_is_not_delayed_for_other_reasons(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=1)
        self.evict_now()
        self.lease(0, 500, resources={'VCPU': 3})
        self.assertRaises(errors.Refused, self.lease, 10, 5000,
                          resources={'VCPU': 4})

    def test_lease_ending_before_eviction_is_refused(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        self.evict_now()
        self.assertRaises(errors.Refused, self.lease, 10, LEAD,
                          resources={'VCPU': 4})

    def test_ledger_decides_by_the_same_rule(self):
        """The decision does not depend on what is found in memory."""
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        now, host_id = self.clock.now(), self.row('one').id

        def book(start):
            with self.database.begin() as connection:
                ledger.decide(connection, now, [ledger.Edit(
                    None, ledger.NewBooking(None, host_id, None, model.Window(
                        now + start, now + 5000), {'VCPU': 2}))])

        self.assertRaises(ledger.OverCapacity, book, LEAD - 1)
        book(LEAD)

    def test_open_ended_server_counts_leases_and_interruptible_servers(self):
        self.host('one', VCPU=4)
        self.lease(5000, 6000, resources={'VCPU': 2})
        self.boot(vcpus=2)
        self.assertTrue(self.fits('one', VCPU=2))
        self.assertFalse(self.fits('one', VCPU=1))

    def test_capacity_of_interruptible_server_is_kept_over_time(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        for _hour in range(30):
            self.clock.advance(3601)
            self.assertFalse(self.quote(
                self.clock.now() - NOW + LEAD - 1))
            self.assertTrue(self.quote(
                self.clock.now() - NOW + LEAD + 60))

    def test_another_process_sees_interruptible_servers(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        for index in (self.admission.index, booking_index.Index(
                self.db.connect(), self.clock)):
            with index.fresh() as timeline:
                now = self.clock.now()
                levels = [timeline.peak(self.row('one').id, model.Window(
                    now + at, now + at + 1)).get('VCPU', 0)
                    for at in (0, LEAD - 1, LEAD + 60)]
                self.assertEqual([3, 3, 0], levels)
        self.leave(server_id)
        self.assertTrue(self.quote(self.clock.now() - NOW + 1))

    def test_index_follows_interruptible_servers(self):
        rng, there = random.Random(0), []
        for name in 'ab':
            self.host(name, VCPU=100)
        for _step in range(60):
            self.clock.advance(rng.choice([0, 1, 30, 90]))
            if there and rng.random() < 0.4:
                self.leave(*there.pop(rng.randrange(len(there))))
            else:
                host = rng.choice('ab')
                there.append((self.boot(host, rng.randint(1, 3), lead_time=(
                    rng.choice([LEAD, 2 * LEAD]))), host))
            found = []
            for index in (self.admission.index, booking_index.Index(
                    self.database, self.clock)):
                with index.fresh() as timeline:
                    now = self.clock.now()
                    found.append([timeline.peak(self.row(name).id, (
                        model.Window(now + at, now + at + 1)))
                        for name in 'ab'
                        for at in range(0, 2 * LEAD + 120, 30)])
            self.assertEqual(*found)

    def test_change_of_host_costs_same_for_many_others(self):
        for name in 'abcde':
            self.host(name, VCPU=4)
            self.boot(name)
        self.clock.advance(-self.clock.now() % 60)
        with self.admission.index.fresh():
            pass
        self.tell('ordinary', 'a', VCPU=1)
        with mock.patch.object(rule, 'evictable',
                               wraps=rule.evictable) as evictable:
            with self.admission.index.fresh():
                pass
        self.assertEqual(1, evictable.call_count)

    def test_unreported_interruptible_server_is_found_by_sync(self):
        """The periodic sync finds it: nova-scheduler had no database."""
        self.host('one', VCPU=4)
        server_id = self.register()
        self.asked(**{server_id: {'VCPU': 1}, 'other': {'VCPU': 2}})
        row = self.row('one')
        self.assertEqual({'VCPU': 2}, row.usage)
        self.assertEqual({server_id: [{'VCPU': 1}, LEAD, NOW]},
                         row.interruptible)
        generation = row.generation
        self.asked(**{server_id: {'VCPU': 1}, 'other': {'VCPU': 2}})
        self.assertEqual(generation, self.row('one').generation)
        self.asked(other={'VCPU': 2})
        self.assertIsNone(self.row('one').interruptible)

    def test_resized_server_counts_with_its_new_size(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=1)
        self.asked(**{server_id: {'VCPU': 2}})
        self.assertEqual([[{'VCPU': 2}, LEAD, NOW]],
                         [*self.row('one').interruptible.values()])
        self.assertEqual({}, self.row('one').usage)

    def test_filter_and_claim_agree(self):
        self.host('one', VCPU=4)
        self.host('two', VCPU=4)
        self.lease(LEAD - 1, LEAD + 1000, resources={'VCPU': 4})
        self.lease(LEAD + 200, LEAD + 1000, resources={'VCPU': 4})
        uuids = [*map(self.uuid_of, ('one', 'two'))]
        hosts = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        self.assertEqual([0, 0], [
            hosts.for_unreserved({'VCPU': 1}, uuids).by_host[one]
            for one in uuids])
        # If nothing is booked soon, Nova decides alone.
        self.assertEqual({uuids[0]: 0}, hosts.for_server(
            self.register(), {'VCPU': 1}, uuids).by_host)
        self.assertEqual([0, 0], [
            hosts.for_server(self.register(safe_for=3600), {'VCPU': 1}, uuids
                             ).by_host[one] for one in uuids])

    def test_safe_for_counts_other_interruptible_servers(self):
        """Other interruptible servers are not evicted for it."""
        self.host('one', VCPU=4)
        self.lease(7200, 9000, resources={'VCPU': 1})
        self.boot(vcpus=3)
        uuid = self.uuid_of('one')
        hosts = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        for safe_for, room in ((3600, 1), (7200, 0)):
            self.assertEqual(room, hosts.for_server(
                self.register(safe_for=safe_for), {'VCPU': 1}, [uuid]
            ).by_host[uuid])

    def test_later_reservations_are_explained(self):
        self.host('one', VCPU=4)
        self.host('two', VCPU=4)
        uuids = [*map(self.uuid_of, ('one', 'two'))]

        def why(vcpus=4, count=1, server_id='server'):
            return eligibility.Eligibility(
                self.database, self.clock, self.admission.index,
            ).reserved_later(server_id, {'VCPU': vcpus}, uuids, count)

        self.assertIsNone(why())
        for start in 600, 7230:
            self.lease(start, 9000, resources={'VCPU': 4})
        self.assertEqual((2, NOW + 7200), why())
        self.assertEqual((2, NOW + 600), why(count=2))
        self.assertIsNone(why(count=3))
        self.assertIsNone(why(server_id=self.register()))
        self.clock.advance(600)
        self.assertEqual((1, NOW + 7200), why())

    def test_the_claim_counts_other_interruptible_servers(self):
        """Without a reservation, only an open-ended server would fit."""
        self.host('one', VCPU=4)
        self.lease(7200, 9000, resources={'VCPU': 1})
        self.boot(vcpus=3)
        self.assertFalse(self.fits('one', self.register(safe_for=7200)))
        self.assertTrue(self.fits('one', self.register(safe_for=3600)))

    def test_safe_for_counts_overdue_server_only_for_a_while(self):
        self.host('one', VCPU=4)
        self.running_lease(0, 1000, resources={'VCPU': 2})
        self.boot(vcpus=1)
        self.clock.advance(1000)
        self.lease(self.clock.now() - NOW + 5000,
                   self.clock.now() - NOW + 6000, resources={'VCPU': 2})
        index = self.admission.index
        with index.fresh() as timeline:
            now, host_id = self.clock.now(), self.row('one').id
            with index.keeping_interruptible(now + 7200):
                self.assertEqual([3, 1], [timeline.peak(
                    host_id, model.Window(now + at, now + at + 1)).get('VCPU')
                    for at in (0, 4000)])

    def test_returned_interruptible_server_is_found_by_sync(self):
        """nova-scheduler had no database when the server came back."""
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=1)
        self.leave(server_id)
        self.clock.advance(100)
        self.asked(**{server_id: {'VCPU': 1}})
        self.assertEqual({}, self.row('one').usage)
        self.assertEqual([server_id], [*self.row('one').interruptible])

    def test_server_made_ordinary_during_claim_is_denied(self):
        """The server changes between the choice of its host and its claim."""
        self.host('one', VCPU=4)
        self.lease(LEAD + 200, LEAD + 1000, resources={'VCPU': 4})
        server_id = self.register()
        window_of = interruptible.window_of

        def forgotten(*args):
            found = window_of(*args)
            with self.database.begin() as connection:
                interruptible.forget(connection, [server_id])
            return found

        self.useFixture(fixtures.MockPatchObject(
            interruptible, 'window_of', forgotten))
        self.assertFalse(self.fits('one', server_id))
        self.assertEqual({}, self.row('one').usage)

    def test_leased_server_cannot_be_made_interruptible(self):
        self.host('one', VCPU=4)
        self.running_lease(0, 1000, resources={'VCPU': 1})
        server_id, = self.scalars(models.Booking.server_id)
        host_id = self.row('one').id
        with self.database.begin() as connection:
            self.assertRaises(
                inventory.Leased, interruptible.make, connection,
                self.clock.now(), host_id, {
                    'server_id': server_id, 'project_id': 'lender',
                    'user_id': 'user', 'lead_time': LEAD, 'safe_for': 0,
                    'notice': 300, 'credential_id': None,
                    'on_evict': 'shelve', 'created_at': NOW,
                    'checked_at': NOW})

    def test_interruptible_server_cannot_be_added_to_lease(self):
        self.host('one', VCPU=4)
        server_id = self.boot()
        lease = self.running_lease(0, 100, resources={'VCPU': 1})
        joiner = members.NewMember(server_id, self.uuid_of('one'), {'VCPU': 1})
        wanted = [new_leases.NewReservation(
            model.Demand({'VCPU': 1}), (server_id,))]
        exc = self.assertRaises(
            errors.Conflict, self.leases.members.join, lease['id'], [joiner],
            wanted, None)
        self.assertIn('is interruptible', str(exc))


class TestSelection(InterruptibleTestCase):
    """The hosts of a reservation are those where none is evicted for it."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.host('two', VCPU=4)
        self.boot(vcpus=2)

    def host_of(self, vcpus, count=1):
        self.clock.advance(1)
        start = self.clock.now() - NOW + 2 * LEAD
        lease = self.lease(start, start + 1000, count=count,
                           resources={'VCPU': vcpus})
        with self.database.connection() as connection:
            return [*connection.scalars(sa.select(models.Host.name).join(
                models.Booking, models.Booking.host_id == models.Host.id,
            ).join(models.Reservation).where(
                models.Reservation.lease_id == lease['id']))]

    def test_host_without_interruptible_servers_is_preferred(self):
        self.assertEqual(['two'], self.host_of(4))

    def test_host_without_need_for_eviction_is_preferred(self):
        self.boot('two', vcpus=3)
        self.assertEqual(['one'], self.host_of(2))

    def test_avoiding_evictions_outranks_existing_reservations(self):
        self.lease(9000, 9100, resources={'VCPU': 1},
                   hosts=frozenset([self.uuid_of('one')]))
        self.assertEqual(['two'], self.host_of(4))

    def test_interruptible_servers_do_not_count_as_reservations(self):
        """Not one that has only interruptible servers."""
        self.lease(9000, 9100, resources={'VCPU': 1},
                   hosts=frozenset([self.uuid_of('two')]))
        self.clock.advance(1)
        with self.admission.index.fresh() as timeline:
            self.assertEqual([False, True], [
                *self.admission.selector._reserved(timeline)])

    def test_any_host_is_used_if_necessary(self):
        self.assertEqual(['one', 'two'], sorted(self.host_of(4, 2)))


class EvictionTestCase(InterruptibleTestCase):

    def needed(self, vcpus=2, ahead=LEAD + 60):
        """Create a lease that needs capacity of the host soon."""
        start = self.clock.now() - NOW + ahead
        lease = self.lease(start, start + 1000, resources={'VCPU': vcpus})
        self.until(NOW + start - LEAD)
        self.evictions.plan()
        return lease, NOW + start

    def run_until(self, instant):
        """Let a listener look every 15 seconds."""
        while self.clock.now() < instant:
            self.clock.advance(15)
            self.evictions.carry_out()
            self.evictions.plan()

    def set_busy(self, server_id, busy=True):
        """Set whether the cloud works on a server."""
        self.cloud.servers[server_id] = dataclasses.replace(
            self.cloud.servers[server_id], busy=busy)


class TestEvictions(EvictionTestCase):

    def test_owner_is_notified_and_server_is_evicted_in_time(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        self.evictions.plan()
        self.assertEqual([], self.events())
        start = self.clock.now() - NOW + 5000
        self.lease(start, start + 1000, resources={'VCPU': 2})
        self.evictions.plan()
        safe = clocks.iso(NOW + start - LEAD)
        self.assertEqual([('safe_until', server_id, safe)], self.events())
        self.until(NOW + start - LEAD)
        self.evictions.plan()
        at = NOW + start - 300
        self.assertEqual([('evict_scheduled', server_id, clocks.iso(at))],
                         self.events())
        self.evictions.plan()
        self.until(at - 1)
        self.evictions.carry_out()
        self.assertEqual(([], []), (self.events(), self.cloud.rests))
        self.until(at)
        self.evictions.carry_out()
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        self.clock.advance(150)
        self.evictions.carry_out()
        self.assertEqual([('evicted', server_id, None)], self.events())
        self.assertEqual({server_id: states.Move.MOVED}, self.moves())

    def test_a_long_notice_is_kept(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3, lead_time=7500)
        start = self.clock.now() + 7620
        self.lease(start - NOW, start - NOW + 1000, resources={'VCPU': 4})
        self.run_until(start - 315)
        self.assertEqual({server_id: states.Move.PLANNED}, self.moves())
        self.assertEqual([], self.cloud.rests)
        self.run_until(start)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)

    def test_changed_options_do_not_affect_existing_servers(self):
        """The owner gets the notice that the server was created with."""
        self.host('one', VCPU=4)
        self.boot(vcpus=3, lead_time=400)
        start = self.clock.now() + 1000
        self.lease(start - NOW, start - NOW + 1000, resources={'VCPU': 4})
        self.until(start - 400)
        self.evictions.plan()
        self.assertEqual([start - 300], self.scalars(
            models.ServerMove.next_at))

    def test_simultaneous_evictions_run_in_parallel(self):
        for name in 'one', 'two', 'three':
            self.host(name, VCPU=4)
            self.boot(name, vcpus=3)
        start = self.clock.now() - NOW + LEAD + 60
        self.lease(start, start + 1000, count=3, resources={'VCPU': 4})
        self.until(NOW + start - LEAD)
        self.evictions.plan()
        self.until(NOW + start - 300)
        all_there = threading.Barrier(3, timeout=30)

        def credential(_credential_id):
            all_there.wait()
            return 'trust'

        self.evictions._credential = credential
        self.evictions.carry_out()
        self.assertEqual(3, len(self.cloud.rests))

    def test_another_lease_takes_over_an_eviction(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        lease, start = self.needed()
        self.events()
        self.lifecycle.lease_end.delete(lease['id'])
        later = start + 70 - NOW
        other = self.lease(later, later + 1000, resources={'VCPU': 2})
        self.run_until(NOW + later)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        self.assertEqual([('evicted', server_id, None)], self.events())
        self.assertEqual([other['id']], self.scalars(
            models.ServerMove.lease_id))

    def test_after_a_cancelled_eviction_others_are_planned(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        lease, start = self.needed()
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_until(start)
        self.assertEqual([states.Move.CANCELLED], [*self.moves().values()])
        self.needed()
        self.run_until(self.clock.now() + LEAD)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)

    def test_lease_ending_before_start_cancels_eviction(self):
        """The end of the lease may take longer."""
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        lease, start = self.needed()
        self.events()
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertNotEqual([], self.scalars(models.Booking))
        self.run_until(start)
        self.assertEqual(['evict_cancelled'], [
            event for event, *_rest in self.events()])

    def test_server_stuck_in_shelving_is_deleted_in_time(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        self.cloud.slow.add(server_id)
        _lease, start = self.needed()
        self.run_until(start - 285)
        self.set_busy(server_id)
        self.run_until(start - 110)
        self.assertEqual(([(server_id, cloud_api.RestingState.SHELVED)], []),
                         (self.cloud.rests, self.cloud.deleted))
        self.run_until(start - 60)
        self.assertEqual([server_id], self.cloud.deleted)

    def test_busy_server_is_shelved_later(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        _lease, start = self.needed()
        self.set_busy(server_id)
        self.run_until(start - 240)
        self.assertEqual([], self.cloud.rests)
        self.set_busy(server_id, False)
        self.run_until(start)
        self.assertEqual(([(server_id, cloud_api.RestingState.SHELVED)], []),
                         (self.cloud.rests, self.cloud.deleted))

    def test_server_moved_to_another_host_is_evicted_there(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        _lease, start = self.needed(vcpus=4)
        self.host('two', VCPU=4)
        self.leave(server_id)
        later = start + 700 - NOW
        self.lease(later, later + 1000, resources={'VCPU': 4})
        self.claim(server_id, 'two', VCPU=3)
        self.tell(server_id, 'two', VCPU=3)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('two'))
        self.evictions.plan()
        self.events()
        self.run_until(NOW + later)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        self.assertEqual(
            ['evict_cancelled', 'evict_scheduled', 'evicted'],
            [event for event, *_rest in self.events()])

    def test_stalled_process_evicts_no_server(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        _lease, start = self.needed()
        self.until(start - 300)
        self.evictions._credential = lambda _id: self.clock.advance(60)
        self.evictions.carry_out()
        self.assertEqual(([], []), (self.cloud.rests, self.cloud.deleted))

    def test_request_stalled_in_cloud_evicts_no_server(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        _lease, start = self.needed()
        for method in 'set_resting_state', 'delete':
            real = getattr(self.cloud, method)

            def late(*args, real=real, **kwargs):
                self.clock.advance(60)
                real(*args, **kwargs)

            setattr(self.cloud, method, late)
        self.until(start - 300)
        self.run_until(start)
        self.assertEqual(([], []), (self.cloud.rests, self.cloud.deleted))

    def test_server_that_cannot_be_shelved_is_deleted_in_time(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        self.cloud.slow.add(server_id)
        _lease, start = self.needed()
        while self.clock.now() < start:
            self.clock.advance(15)
            self.evictions.carry_out()
        self.assertEqual([server_id], self.cloud.deleted)
        self.assertEqual({server_id: states.Move.MOVED}, self.moves())

    def test_unanswered_shelving_is_repeated(self):
        """Deletion waits, as there is time for both."""
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        _lease, start = self.needed()
        self.events()
        asked, rest = [], self.cloud.set_resting_state

        def shelve(*args, **kwargs):
            asked.append(start - self.clock.now())
            if len(asked) == 1:
                raise errors.CloudUnavailable('Glance does not answer.')
            rest(*args, **kwargs)

        self.cloud.set_resting_state = shelve
        self.run_until(start)
        self.assertEqual(([300, 240], []), (asked, self.cloud.deleted))
        self.assertEqual({server_id: states.Move.MOVED}, self.moves())
        self.assertEqual([('evicted', server_id, None)], self.events())

    def test_server_is_deleted_in_time_if_shelving_is_never_answered(self):
        # A third of the time of its eviction, when that comes or before the
        # result of one more request would be known.
        for answer, at in ((errors.CloudUnavailable, 120),
                           (errors.NotSent, 90)):
            self.host(answer.__name__, VCPU=4)
            server_id = self.boot(answer.__name__, vcpus=3)
            _lease, start = self.needed(vcpus=4)
            deleted, delete = [], self.cloud.delete

            def shelve(*_args, answer=answer, **_kwargs):
                raise answer('Glance does not answer.')

            def remove(*args, left=deleted, start=start, do=delete, **kwargs):
                left.append(start - self.clock.now())
                do(*args, **kwargs)

            with (mock.patch.object(self.cloud, 'set_resting_state', shelve),
                  mock.patch.object(self.cloud, 'delete', remove)):
                self.run_until(start)
            self.assertEqual([at], deleted)
            self.assertEqual(states.Move.MOVED, self.moves()[server_id])

    def test_deletion_of_overdue_server_is_requested_once_by_each_look(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        _lease, start = self.needed()
        self.run_until(start - 315)
        self.until(start + 300)
        for method in 'set_resting_state', 'delete':
            self.useFixture(fixtures.MockPatchObject(
                self.cloud, method, side_effect=errors.Forbidden('no')))
        for attempts in (2, 3, 4):
            self.evictions.carry_out()
            self.assertEqual([attempts], self.scalars(
                models.ServerMove.attempts))
            self.clock.advance(100)

    def test_shelving_that_was_not_sent_in_time_is_repeated(self):
        """As keystone has answered late."""
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        _lease, start = self.needed()
        slow, rest = [25, 25], self.cloud.set_resting_state

        def shelve(*args, **kwargs):
            if slow:
                self.clock.advance(slow.pop())
            rest(*args, **kwargs)

        self.cloud.set_resting_state = shelve
        self.run_until(start)
        self.assertEqual(([(server_id, cloud_api.RestingState.SHELVED)], []),
                         (self.cloud.rests, self.cloud.deleted))

    def test_server_without_trust_is_deleted(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        self.cloud.broken['set_resting_state'] = errors.TrustUnavailable(
            'none')
        _lease, start = self.needed()
        while self.clock.now() < start:
            self.clock.advance(15)
            self.evictions.carry_out()
        self.assertEqual([server_id], self.cloud.deleted)

    def test_user_chooses_eviction_action(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3, on_evict='delete')
        _lease, start = self.needed()
        self.until(start - 300)
        self.evictions.carry_out()
        self.assertEqual(([], [server_id]),
                         (self.cloud.rests, self.cloud.deleted))
        self.database.counters.flush()
        with self.database.connection() as connection:
            self.assertIn(counters.Counted(
                eviction.COUNTER, {'action': 'delete'}, 1),
                counters.read(connection, 'blazar_'))

    def test_notice_of_evictions_is_counted(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        _lease, start = self.needed()
        self.assertEqual(clocks.iso(start - 300), self.events()[-1][2])
        notice = start - 300 - self.clock.now()
        self.database.counters.flush()
        with self.database.connection() as connection:
            self.assertEqual(
                {(f'{eviction.NOTICE}_bucket', next(
                    str(one) for one in eviction.NOTICES if notice <= one),
                  'shelve', 1),
                 (f'{eviction.NOTICE}_sum', None, 'shelve', notice)},
                {(one.name, one.labels.get('le'), one.labels['action'],
                  one.value) for one in counters.read(
                      connection, eviction.NOTICE)})

    def test_deleted_server_counts_until_its_capacity_is_free(self):
        """Nova deletes the allocations of a server after its record."""
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3, on_evict='delete')
        _lease, start = self.needed()
        self.until(start - 300)
        self.cloud.stubborn.add(server_id)
        self.evictions.carry_out()
        self.cloud.servers[server_id] = cloud_api.ObservedServer(State.LEAVING)
        self.run_until(start - 120)
        self.assertEqual({server_id: states.Move.ACCEPTED}, self.moves())
        self.assertIn(server_id, self.row('one').interruptible)
        self.cloud.servers.pop(server_id)
        self.run_until(start - 90)
        self.assertEqual({server_id: states.Move.MOVED}, self.moves())
        self.assertIsNone(self.row('one').interruptible)
        self.assertEqual([server_id], self.cloud.deleted)

    def test_deleted_lease_cancels_eviction(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        lease, start = self.needed()
        self.events()
        self.lifecycle.lease_end.delete(lease['id'])
        self.until(start - 300)
        self.evictions.carry_out()
        self.assertEqual([('evict_cancelled', server_id, None)],
                         self.events())
        self.assertEqual(([], []), (self.cloud.rests, self.cloud.deleted))
        self.assertEqual({server_id: states.Move.CANCELLED}, self.moves())

    def test_fewest_and_youngest_servers_are_evicted(self):
        self.host('one', VCPU=8)
        old, young = self.boot(vcpus=2), self.boot(vcpus=2)
        self.boot(vcpus=1)
        self.needed(vcpus=5)
        self.assertEqual({young: states.Move.PLANNED}, self.moves())
        self.assertIn(old, self.cloud.servers)

    def test_eviction_is_not_repeated_after_process_death(self):
        self.host('one', VCPU=4)
        server_id = self.boot(vcpus=3)
        _lease, start = self.needed()
        self.until(start - 300)
        self.evictions.carry_out()
        other = self.new_evictions()
        other.carry_out()
        other.plan()
        other.carry_out()
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)

    def test_eviction_is_not_early_if_clock_was_wrong_for_a_moment(self):
        """From far behind, the planned time looks like that of a clock that
        was ahead, which counts as due.
        """
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        _lease, start = self.needed()
        self.until(start - 350)
        now, times = self.clock.now(), itertools.count()
        with mock.patch.object(
                self.clock, 'now',
                lambda: now - 3600 * (next(times) == 0)):
            self.evictions.carry_out()
            self.assertGreater(next(times), 1)
        self.assertEqual([], self.cloud.rests)
        self.until(start - 300)
        self.evictions.carry_out()
        self.assertEqual(1, len(self.cloud.rests))

    def test_only_one_process_plans_evictions(self):
        self.host('one', VCPU=4)
        self.boot(vcpus=3)
        start = self.clock.now() - NOW + LEAD + 60
        self.lease(start, start + 1000, resources={'VCPU': 2})
        self.until(NOW + start - LEAD)
        for name in ('a', 'b'):
            leader_election.Leader(
                self.database, self.clock, eviction.LEADER, name,
                eviction.PAUSE, 60).lead(self.new_evictions().look)
        self.assertEqual(1, len(self.scalars(models.ServerMove)))

    def test_deleted_servers_are_unregistered(self):
        self.host('one', VCPU=4)
        there, gone = self.boot(), self.boot()
        self.cloud.servers.pop(gone)
        self.clock.advance(1000)
        self.evictions.forget_deleted()
        self.assertEqual([there], self.scalars(
            models.InterruptibleServer.server_id))

    def test_unreachable_servers_do_not_block_others(self):
        self.host('one', VCPU=4)
        self.useFixture(fixtures.MockPatchObject(
            eviction, '_UNCHECKED', eviction._UNCHECKED.limit(1)))
        silent = self.register()
        self.clock.advance(1)
        self.register()
        self.cloud.broken['look'] = errors.CloudUnavailable('none')
        self.clock.advance(1000)
        self.evictions.forget_deleted()
        del self.cloud.broken['look']
        self.evictions.forget_deleted()
        self.assertEqual([silent], self.scalars(
            models.InterruptibleServer.server_id))

    def test_shared_credential_is_revoked_with_last_server(self):
        self.host('one', VCPU=4)
        server_id, other = self.boot(), self.boot()
        with self.database.writer() as session:
            session.add(models.Credential(
                lease_id='trust', encrypted=self.encryption.encrypt('trust'),
                created_at=NOW))
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual([], self.cloud.revoked)
        for one, revoked in (server_id, []), (other, ['trust']):
            with self.database.begin() as connection:
                interruptible.forget(connection, [one])
            self.lifecycle.lease_close.revoke_over()
            self.assertEqual(revoked, self.cloud.revoked)


class TestMigrations(EvictionTestCase):
    """A server is live-migrated, if another host is safe for longer."""

    ACTIONS = ('migrate', 'shelve', 'delete')

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.server_id = self.boot(vcpus=1)
        _lease, self.start = self.needed(vcpus=4)
        self.host('two', VCPU=4)
        self.cloud.hosts = {self.uuid_of('two')}
        self.events()

    def actions(self):
        """What was done: migrations, and servers shelved and deleted."""
        return tuple(map(len, (
            self.cloud.moves, self.cloud.rests, self.cloud.deleted)))

    def test_server_migrates_to_host_that_is_safe_for_longer(self):
        self.run_until(self.start - 300)
        self.assertEqual([(self.server_id, None)], self.cloud.moves)
        self.assertTrue(self.fits('two', self.server_id))
        self.cloud.arrive(self.server_id, self.uuid_of('two'))
        self.run_until(self.start)
        self.assertEqual((1, 0, 0), self.actions())
        self.assertEqual([('migrated', self.server_id, None)], self.events())
        row, = self.scalars(models.InterruptibleServer)
        self.assertIsNone(row.evicted_at)
        self.assertEqual({self.server_id: states.Move.MOVED}, self.moves())

    def test_server_is_not_shown_as_safe_before_its_migration_is_over(self):
        self.lease(5000, 6000, resources={'VCPU': 4},
                   hosts=frozenset([self.uuid_of('two')]))
        self.run_until(self.start - 300)
        self.claim(self.server_id, 'two', VCPU=1)
        self.evictions.plan()
        shown = models.InterruptibleServer.safe_until
        self.assertEqual([self.start - LEAD], self.scalars(shown))
        self.cloud.arrive(self.server_id, self.uuid_of('two'))
        self.run_until(self.start - 200)
        self.assertEqual({self.server_id: states.Move.MOVED}, self.moves())
        self.assertEqual([NOW + 5000 - LEAD], self.scalars(shown))

    def test_server_is_shelved_at_once_if_no_host_is_safe(self):
        later = self.start - NOW + LEAD
        self.lease(later, later + 1000, resources={'VCPU': 4},
                   hosts=frozenset([self.uuid_of('two')]))
        self.run_until(self.start - 300)
        self.assertEqual((0, 1, 0), self.actions())

    def test_server_is_shelved_at_once_if_targets_are_unknown(self):
        self.cloud.broken['needs'] = errors.CloudUnavailable('none')
        self.run_until(self.start - 300)
        self.assertEqual((0, 1, 0), self.actions())

    def test_server_that_cannot_be_migrated_is_shelved_at_once(self):
        self.cloud.broken[self.server_id] = Exception('It is pinned.')
        self.cloud.set_resting_state = (
            lambda *_of, **_more: self.cloud.rests.append(None))
        self.run_until(self.start - 300)
        self.assertEqual((0, 1, 0), self.actions())

    def test_server_is_shelved_after_failed_migration(self):
        self.run_until(self.start - 300)
        self.cloud.arrive(self.server_id)
        self.run_until(self.start - 200)
        self.assertEqual((1, 1, 0), self.actions())

    def test_stuck_migration_ends_in_deletion_in_time(self):
        self.cloud.slow.add(self.server_id)
        self.run_until(self.start - 165)
        self.assertEqual((1, 0, 0), self.actions())
        self.run_until(self.start - 90)
        self.assertEqual((1, 1, 0), self.actions())
        self.run_until(self.start - 60)
        self.assertEqual((1, 1, 1), self.actions())

    def test_only_one_process_migrates_server(self):
        self.until(self.start - 300)
        needs = self.cloud.needs

        def both(one, lent):
            self.cloud.needs = needs
            self.new_evictions().carry_out()
            return needs(one, lent)

        self.cloud.needs = both
        self.evictions.carry_out()
        self.assertEqual((1, 0, 0), self.actions())


class TestUnconfirmedResize(EvictionTestCase):
    """A server whose resize is not confirmed has capacity of two hosts."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.host('two', VCPU=4)
        self.server_id = self.boot(vcpus=2)
        self.claim(self.server_id, 'two', VCPU=3)
        self.cloud.servers[self.server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('two'), resized=True)

    def need(self, *hosts):
        for host in hosts:
            self.lease(LEAD + 60, LEAD + 1000, resources={'VCPU': 4})
        self.until(NOW + LEAD + 60 - LEAD)
        self.evictions.plan()
        return NOW + LEAD + 60

    def test_both_hosts_count_until_eviction(self):
        index = self.admission.index
        with index.fresh():
            self.assertEqual(2, len(index.interruptible_servers()[
                self.server_id]))
        self.assertEqual({}, self.row('one').usage)

    def test_resize_is_confirmed_if_old_host_is_needed(self):
        start = self.need('one', 'two')
        self.run_until(start - 285)
        self.assertEqual([self.server_id], [*{*self.cloud.unblocked}])
        self.cloud.servers[self.server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('two'))
        self.run_until(start)
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual([(self.server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)

    def test_request_stalled_in_cloud_confirms_nothing(self):
        self.until(self.need('one') - 300)
        real, late = self.cloud.unblock, []

        def stand_still(*args):
            self.clock.advance(eviction.PAUSE + 1)
            # The eviction may be cancelled, and this another resize.
            late.append(args[0])
            real(*args)

        self.cloud.unblock = stand_still
        self.evictions.carry_out()
        self.assertEqual(([self.server_id], []), (late, self.cloud.unblocked))
        self.cloud.unblock = real
        self.evictions.carry_out()
        self.assertEqual([self.server_id], self.cloud.unblocked)

    def test_server_being_resized_still_counts_on_old_host(self):
        start = self.need('one', 'two')
        self.cloud.servers[self.server_id] = dataclasses.replace(
            self.cloud.servers[self.server_id], busy=True, resized=False)
        self.run_until(start - 270)
        self.assertIn(self.server_id, self.row('one').interruptible or {})

    def test_server_is_deleted_in_time_if_not_confirmed(self):
        self.cloud.broken['unblock'] = errors.CloudUnavailable('none')
        start = self.need('one', 'two')
        self.cloud.broken['set_resting_state'] = (
            errors.CloudUnavailable('none'))
        self.run_until(start)
        self.assertEqual([self.server_id], [*{*self.cloud.deleted}])

    def test_server_cannot_become_ordinary_until_confirmed(self):
        self.assertIn('is not confirmed', str(self.assertRaises(
            errors.Conflict, interruptible.make_ordinary,
            self.admission.index, self.database, self.clock.now(),
            self.server_id)))


class TestPlacedMeanwhile(InterruptibleTestCase):
    """A server is placed while its user makes it ordinary."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.lease(LEAD + 200, LEAD + 1000, resources={'VCPU': 4})
        self.server_id = self.register()

    def make_ordinary(self):
        return self.database.retried(
            interruptible.make_ordinary, self.admission.index, self.database,
            self.clock.now(), self.server_id)

    def test_server_that_is_placed_stays_interruptible(self):
        index = self.admission.index
        servers = index.interruptible_servers

        def placed():
            # Until now, it has no host.
            before = servers()
            index.interruptible_servers = servers
            self.claim(self.server_id, 'one', VCPU=4)
            return before

        index.interruptible_servers = placed
        self.assertFalse(self.make_ordinary())
        self.assertEqual([self.server_id], [*self.row('one').interruptible])
        self.assertEqual([self.server_id], self.scalars(
            models.InterruptibleServer.server_id))

    def test_server_is_placed_as_what_it_has_become(self):
        begin = api.Database.begin

        def meanwhile(database):
            # The claim has been decided, and is not written.
            patched.stop()
            self.make_ordinary()
            return begin(database)

        patched = mock.patch.object(api.Database, 'begin', meanwhile)
        patched.start()
        self.assertRaises(
            scheduler_claims.Denied, self.claim, self.server_id, 'one',
            VCPU=4)
        self.assertIsNone(self.row('one').interruptible)

    def test_server_without_a_record_counts_as_ordinary(self):
        self.claim(self.server_id, 'one', VCPU=4)
        with self.database.begin() as connection:
            interruptible.forget(connection, [self.server_id])
        self.asked('one', **{self.server_id: {'VCPU': 4}})
        row = self.row('one')
        self.assertEqual((None, {'VCPU': 4}), (row.interruptible, row.usage))


class TestResumption(InterruptibleTestCase):
    """What is shelved by an eviction is unshelved when it is safe again."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)
        self.cloud.hosts = {self.uuid_of('one')}

    def evicted(self, lasts=1000, **values):
        """A server is evicted for a lease; returns it, and the lease's end.
        """
        server_id = self.boot(vcpus=1, **values)
        start = self.clock.now() + LEAD + 60
        self.lease(start - NOW, start - NOW + lasts, resources={'VCPU': 4})
        self.look_until(start)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        return server_id, start + lasts

    def look_until(self, instant):
        while self.clock.now() < instant:
            self.clock.advance(min(15, instant - self.clock.now()))
            leader_election.Leader(
                self.database, self.clock, eviction.LEADER, 'a',
                eviction.PAUSE, 60).lead(self.evictions.look)

    def look_until_woken(self, server_id, end):
        while not self.cloud.unshelved:
            self.look_until(self.clock.now() + 15)
        self.assertTrue(end < self.clock.now() < end + 75)
        self.assertEqual([server_id], self.cloud.unshelved)

    def row_of(self, server_id):
        return self.scalars(models.InterruptibleServer,
                            models.InterruptibleServer.server_id == server_id
                            )[0]

    def come_back(self, server_id):
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('one'))
        self.claim(server_id, 'one', VCPU=1)
        self.tell(server_id, 'one', VCPU=1)

    def test_server_is_resumed_once_safe_for_default_time(self):
        server_id, end = self.evicted(resume=True)
        later = end + 3600 + LEAD - 60
        self.lease(later - NOW, later - NOW + 1000, resources={'VCPU': 4})
        self.look_until(end + 300)
        self.assertEqual([], self.cloud.unshelved)
        self.look_until(later + 1000)
        self.assertEqual([], self.cloud.unshelved)
        self.look_until_woken(server_id, later + 1000)
        self.assertTrue(self.fits('one', server_id))
        self.assertGreater(self.row_of(server_id).safe_by,
                           self.clock.now() + 3500)

    def test_server_is_resumed_once_safe_for_requested_time(self):
        server_id, end = self.evicted(resume=True, safe_for=60)
        later = end + LEAD + 200
        self.lease(later - NOW, later - NOW + 1000, resources={'VCPU': 4})
        self.look_until_woken(server_id, end)

    def test_server_is_not_resumed_without_request(self):
        server_id, end = self.evicted()
        self.look_until(end + 300)
        self.assertEqual([], self.cloud.unshelved)
        self.assertIsNotNone(self.row_of(server_id).evicted_at)

    def test_resumed_server_is_not_resumed_again(self):
        """Its owner may shelve it then."""
        server_id, end = self.evicted(resume=True)
        self.look_until_woken(server_id, end)
        self.come_back(server_id)
        self.look_until(self.clock.now() + 15)
        row = self.row_of(server_id)
        self.assertEqual((None, None), (row.evicted_at, row.resume_at))
        self.leave(server_id)
        self.cloud.set_resting_state(
            server_id, cloud_api.RestingState.SHELVED, None)
        self.look_until(self.clock.now() + 300)
        self.assertEqual([server_id], self.cloud.unshelved)

    def test_failed_resumption_is_retried(self):
        server_id, end = self.evicted(resume=True)
        self.look_until_woken(server_id, end)
        self.come_back(server_id)
        self.cloud.servers[server_id] = dataclasses.replace(
            self.cloud.servers[server_id], busy=True)
        self.look_until(self.clock.now() + 30)
        self.leave(server_id)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            State.RUNNING, rest=cloud_api.RestingState.SHELVED)
        self.look_until(self.clock.now() + 120)
        self.assertIn(len(self.cloud.unshelved), (2, 3))

    def test_lost_resumption_is_requested_again(self):
        server_id, end = self.evicted(resume=True)
        self.look_until_woken(server_id, end)
        self.cloud.servers[server_id] = dataclasses.replace(
            self.cloud.servers[server_id], busy=True)
        self.cloud.lost.add(server_id)
        self.look_until(self.clock.now() + 200)
        self.assertIn(len(self.cloud.unshelved), (2, 3))

    def test_eviction_ends_only_when_unshelve_is_complete(self):
        server_id, end = self.evicted()
        self.look_until(end)
        self.come_back(server_id)
        seen = self.cloud.servers[server_id]
        self.cloud.servers[server_id] = dataclasses.replace(seen, busy=True)
        self.look_until(end + 30)
        self.assertIsNotNone(self.row_of(server_id).evicted_at)
        self.cloud.servers[server_id] = seen
        self.look_until(end + 60)
        self.assertIsNone(self.row_of(server_id).evicted_at)

    def test_unshelve_by_owner_ends_eviction(self):
        server_id, end = self.evicted()
        self.look_until(end)
        self.come_back(server_id)
        self.look_until(end + 15)
        self.assertIsNone(self.row_of(server_id).evicted_at)

    def test_unavailable_cloud_delays_resumption(self):
        server_id, end = self.evicted(resume=True)
        self.cloud.broken['unshelve'] = errors.CloudUnavailable('none')
        self.look_until(end + 75)
        del self.cloud.broken['unshelve']
        self.look_until(end + 150)
        self.assertEqual([server_id], self.cloud.unshelved)

    def test_server_without_trust_is_not_resumed(self):
        server_id, end = self.evicted(resume=True)
        self.cloud.broken['unshelve'] = errors.TrustUnavailable('none')
        self.look_until(end + 75)
        self.assertIsNone(self.row_of(server_id).resume_at)

    def test_deleted_server_is_not_resumed(self):
        self.boot(vcpus=1, on_evict='delete', resume=True)
        start = self.clock.now() + LEAD + 60
        self.lease(start - NOW, start - NOW + 100, resources={'VCPU': 4})
        self.look_until(start)
        self.assertEqual([None], self.scalars(
            models.InterruptibleServer.resume_at))

    def test_as_many_servers_as_fit_are_resumed(self):
        for _number in range(5):
            server_id = self.register(resume=True)
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, rest=cloud_api.RestingState.SHELVED)
            with self.database.begin() as connection:
                connection.execute(eviction._EVICT, {
                    'server': server_id, 'now': self.clock.now(),
                    'shelved': True})
        self.look_until(self.clock.now() + 15)
        self.assertEqual(4, len(self.cloud.unshelved))

    def test_only_one_process_resumes_server(self):
        server_id, end = self.evicted(resume=True)
        self.clock.advance(end + 60 - self.clock.now())
        needs = self.cloud.needs

        def both(one, lent):
            self.cloud.needs = needs
            self.new_evictions()._resumption.look()
            return needs(one, lent)

        self.cloud.needs = both
        self.evictions._resumption.look()
        self.assertEqual([server_id], self.cloud.unshelved)


class TestRandomWorkload(InterruptibleTestCase):
    """An hour of leases, ordinary and interruptible servers at random."""

    scenarios = databases.EACH

    def test_leases_start_in_time_and_evictions_are_notified(self):
        evicted = 0
        for seed in range(examples.many(3)):
            rng = random.Random(seed)
            hosts = [f'{seed}-{number}' for number in range(2)]
            for host in hosts:
                self.host(host, VCPU=8)
            self.story(rng, hosts)
            evicted += len(self.notice)
        self.assertGreater(evicted, 1)

    def story(self, rng, hosts):
        self.ordinary, self.mine, self.shown = {}, {}, {}
        self.starts, self.notice = {}, {}
        self.evictions = self.new_evictions()
        for _step in range(80):
            work = rng.choice([
                self.boot_some, self.boot_some, self.reserve_some,
                self.reserve_some, self.give_up_some, self.delete_some])
            work(rng, hosts)
            for _look in range(rng.randint(1, 8)):
                self.pass_time(15)
        for _look in range(4 * LEAD // 15):
            self.pass_time(15)

    def boot_some(self, rng, hosts):
        host, vcpus = rng.choice(hosts), rng.randint(1, 4)
        free = 8 - sum(size for place, size in (
            *self.ordinary.values(), *self.mine.values()) if place == host
        ) - self.running(host)
        if vcpus > free:
            return  # Placement refuses it.
        interruptible = rng.random() < 0.7
        server_id = self.register() if interruptible else (
            uuidutils.generate_uuid())
        if self.fits(host, server_id, VCPU=vcpus):
            self.tell(server_id, host, VCPU=vcpus)
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, self.uuid_of(host))
            (self.mine if interruptible else self.ordinary)[server_id] = (
                host, vcpus)

    def running(self, host):
        """Return what leases use of a host now."""
        now = self.clock.now()
        return sum(row.resources['VCPU'] for row in self.scalars(
            models.Booking, models.Booking.host_id == self.row(host).id)
            if row.start_date <= now < row.end_date)

    def reserve_some(self, rng, _hosts):
        start = self.clock.now() - NOW + rng.randint(1, 3 * LEAD)
        try:
            lease = self.reserve(start, start + rng.randint(60, 2 * LEAD),
                                 self.places(1, rng.randint(1, 8)))
        except errors.Refused:
            return
        self.starts[lease['id']] = NOW + start

    def give_up_some(self, rng, _hosts):
        if self.starts and rng.random() < 0.3:
            lease_id = rng.choice([*self.starts])
            self.starts.pop(lease_id)
            self.lifecycle.lease_end.delete(lease_id)
            self.lifecycle.lease_end.end(lease_id)

    def delete_some(self, rng, _hosts):
        some = [*self.mine, *self.ordinary]
        if some and rng.random() < 0.5:
            self.gone(rng.choice(some))

    def gone(self, server_id):
        host, _size = self.mine.pop(server_id, None) or (
            self.ordinary.pop(server_id))
        self.cloud.servers.pop(server_id, None)
        self.tell(server_id, host)

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        now = self.clock.now()
        leader_election.Leader(
            self.database, self.clock, eviction.LEADER, 'a', eviction.PAUSE,
            60).lead(self.evictions.look)
        for event, server_id, at in self.events():
            if event == 'evict_scheduled':
                at = clocks.iso(now) if at is None else at
                self.notice[server_id] = now
                self.assertGreaterEqual(
                    self.shown.get(server_id, now), now - 60)
        for row in self.scalars(models.InterruptibleServer):
            if row.safe_until is not None and row.server_id in self.mine:
                self.shown[row.server_id] = row.safe_until
        for server_id in [*self.mine]:
            if self.cloud.servers[server_id].host is None:
                # It was shelved.
                self.assertGreaterEqual(
                    now - self.notice[server_id], LEAD - 300)
                self.gone(server_id)
        self.check(now)

    def check(self, now):
        """Check that all due leases and servers really fit on their hosts."""
        for host in {place for place, _size in self.mine.values()}:
            self.assertLessEqual(sum(
                size for place, size in (*self.mine.values(),
                                         *self.ordinary.values())
                if place == host) + self.running(host), 8, (host, now - NOW))


class TestClouds(InterruptibleTestCase):
    """The hosts of a lease, and the servers that are evicted for it, compared
    with all possible choices in many small clouds.
    """

    scenarios = [(str(clouds), {'clouds': clouds}) for clouds in (50, 1000)]

    def test_few_are_evicted(self):
        rng = random.Random(0)
        counts = []
        while len(counts) < self.clouds:
            self.clock.advance(1)
            hosts = {}
            for _host in range(rng.randint(2, 4)):
                hosts |= self.some_host(rng)
            if (least := self.reserve_some(rng, hosts)) is not None:
                counts.append(self.evicted(hosts) - least)
        self.assertLessEqual(max(counts), 1)
        self.assertGreaterEqual(counts.count(0), 0.95 * len(counts))

    def some_host(self, rng):
        """Create a host with interruptible servers; return by its uuid its
        capacity, and what each of them takes.
        """
        capacity, servers, _booked = TestEvictionOrder.some(rng)
        name = uuidutils.generate_uuid()
        uuid = self.host(name, **capacity)
        ids = {self.register(): dict(one.resources) for one in servers}
        self.asked(name, **ids)
        return {uuid: (capacity, [*ids.values()])}

    def reserve_some(self, rng, hosts):
        """Create a lease; return the fewest evictions that it needs, or None
        if there is no capacity for it.
        """
        largest, _servers = rng.choice([*hosts.values()])
        wanted = {rc: rng.randint(1, amount) for rc, amount in largest.items()}
        least = min((self.fewest(capacity, servers, wanted)
                     for capacity, servers in hosts.values()))
        start = self.clock.now() - NOW + 2 * LEAD
        try:
            self.lease(start, start + 100, resources=wanted,
                       hosts=frozenset(hosts))
        except errors.Refused:
            self.assertEqual(float('inf'), least)
            return None
        return least

    @staticmethod
    def fewest(capacity, servers, wanted):
        """Return the fewest of some servers that have to leave."""
        def fit(some):
            return all(sum(one[rc] for one in some) + wanted[rc] <= amount
                       for rc, amount in capacity.items())

        return next((len(servers) - count for count in range(
            len(servers), -1, -1) if any(
                map(fit, itertools.combinations(servers, count)))),
            float('inf'))

    def evicted(self, hosts):
        """Return how many servers have to leave some hosts."""
        with self.database.connection() as connection:
            found = interruptible.hosts(
                connection, self.clock.now(), lambda row: row.uuid in hosts)
        return sum(len(interruptible.victims(
            host.capacity, host.usage, host.servers,
            [taken for taken, _lease in host.booked], self.clock.now(),
            model.FOREVER)) for host in found)


class TestEvictionOrder(base.TestCase):
    """The order of eviction, compared with all possible choices."""

    @classmethod
    def some(cls, rng, least=1):
        """Generate a host.

        :param least: the smallest amount of a class that a server uses
        """
        capacity = {'VCPU': rng.randint(4, 16),
                    'MEMORY_MB': rng.randint(4, 16)}
        servers = [interruptible.Server(
            str(number), {'VCPU': rng.randint(least, 4),
                          'MEMORY_MB': rng.randint(least, 4)}, 10, number)
            for number in range(rng.randint(1, 7))]
        while not cls.fit(capacity, servers, {}):
            servers.pop()
        booked = [(model.Window(start, start + rng.randint(1, 30)), {
            rc: rng.randint(0, amount) for rc, amount in capacity.items()})
            for start in rng.sample(range(0, 120, 30), rng.randint(0, 3))]
        order = rule.eviction_order(
            {one.id: one[1:] for one in servers}, capacity)
        servers.sort(key=lambda one: order.index(one.id))
        return capacity, servers, booked

    @staticmethod
    def fit(capacity, servers, levels):
        return not rule.lacking(capacity, {}, {
            rc: sum(one.resources[rc] for one in servers) + levels.get(rc, 0)
            for rc in capacity})

    def test_server_stays_if_only_what_no_server_uses_is_lacking(self):
        """Too many CPUs are booked, which no eviction frees."""
        servers = [interruptible.Server(
            kind, {'GPU': 1, f'GPU@{kind}': 1}, 10, 0) for kind in 'ba']
        found = interruptible.victims(
            {'VCPU': 5, 'GPU': 2, 'GPU@a': 1, 'GPU@b': 1}, {'VCPU': 4},
            servers, [(model.Window(50, 100), {
                'VCPU': 2, 'GPU': 1, 'GPU@a': 1})], 0, 200)
        self.assertEqual(['a'], [one.id for one, _instant in found])

    def test_nearly_minimal_number_of_servers_is_evicted(self):
        rng = random.Random(1)
        counts = []
        for _number in range(1000):
            capacity, servers, booked = self.some(rng)
            found = interruptible.victims(
                capacity, {}, servers, booked, 0, 1000)
            gone = {one.id for one, _instant in found}
            levels = [amounts for _window, amounts in booked]
            self.assertTrue(all(self.fit(
                capacity, [one for one in servers if one.id not in gone], one)
                for one in levels))
            least = next(count for count in range(len(servers) + 1) if any(
                all(self.fit(capacity, some, one) for one in levels)
                for some in itertools.combinations(
                    servers, len(servers) - count)))
            counts.append(len(gone) - least)
        self.assertLessEqual(max(counts), 1)
        self.assertGreaterEqual(counts.count(0), 950)

    def test_eviction_times_match_announced_ones(self):
        rng = random.Random(2)
        for _number in range(1000):
            capacity, servers, booked = self.some(rng)
            found = interruptible.conflicts(capacity, {}, servers, booked, 0)
            for one, instant in interruptible.victims(
                    capacity, {}, servers, booked, 0, 1000):
                self.assertEqual(found[one.id], instant)
            # The servers that are evicted first are safe for the shortest
            # time.
            instants = [found.get(one.id, 10_000) for one in servers]
            self.assertEqual(sorted(instants), instants)

    def test_conflicts_match_check_of_every_second(self):
        rng = random.Random(3)
        for _number in range(300):
            capacity, servers, booked = self.some(rng)
            now = rng.randint(0, 60)
            found = interruptible.conflicts(
                capacity, {}, servers, booked, now)
            for number, one in enumerate(servers):
                first = next((instant for instant in range(now, 200) if not (
                    self.fit(capacity, servers[number:], {
                        rc: sum(amounts[rc] for window, amounts in booked
                                if window.start <= instant < window.end)
                        for rc in capacity}))), None)
                self.assertEqual(first, found.get(one.id))

    def test_servers_are_safe_from_lack_of_what_they_do_not_use(self):
        rng, longer = random.Random(4), 0
        for _number in range(500):
            capacity, servers, booked = self.some(rng, 0)
            found = interruptible.conflicts(capacity, {}, servers, booked, 0)
            for number, one in enumerate(servers):
                first = next((instant for instant in range(200) if any(
                    amount and sum(
                        other.resources[rc] for other in servers[number:]
                    ) + sum(
                        amounts[rc] for window, amounts in booked
                        if window.start <= instant < window.end
                    ) > capacity[rc]
                    for rc, amount in one.resources.items())), None)
                self.assertEqual(first, found.get(one.id))
            instants = [found.get(one.id, 10_000) for one in servers]
            longer += instants != sorted(instants)
            gone = {one.id for one, _instant in interruptible.victims(
                capacity, {}, servers, booked, 0, 1000)}
            self.assertLessEqual(gone, found.keys())
            self.assertTrue(all(self.fit(
                capacity, [one for one in servers if one.id not in gone],
                amounts) for _window, amounts in booked))
            # No departure makes another server less safe.
            for leaving in servers:
                rest = interruptible.conflicts(capacity, {}, [
                    one for one in servers if one is not leaving], booked, 0)
                self.assertTrue(all(
                    instant >= found[one] for one, instant in rest.items()))
        self.assertTrue(longer)
