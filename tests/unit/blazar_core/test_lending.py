# SPDX-License-Identifier: Apache-2.0

"""Hosts that serve leases only are lent to interruptible servers."""

from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import enrollment
from blazar_core.capacity import interruptible
from blazar_core.capacity import scheduler_claims
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.lifecycle import lease_close
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import test_interruptible
from tests.unit.blazar_core import whole_hosts_base

load_tests = databases.load_tests

NOW, LEAD = test_interruptible.NOW, test_interruptible.LEAD
CLEANING = 300


class LendingTestCase(test_interruptible.EvictionTestCase,
                      whole_hosts_base.WholeHostsTestCase):
    """An enrolled host, and one for all workloads."""

    def setUp(self):
        super().setUp()
        self.machines.among = model.HostPool.ENROLLED
        for name in ('one', 'two'):
            self.host(name, VCPU=4)
        self.enrol('one')
        self.uuids = [*map(self.uuid_of, ('one', 'two'))]
        self.claims, self.eligibility = self.scheduler(lends=True)

    def scheduler(self, lends):
        """Return the claims and the eligibility of another scheduler."""
        database = self.db.connect()
        index = booking_index.Index(database, self.clock, lends)
        return (scheduler_claims.Claims(database, self.clock, index),
                eligibility.Eligibility(database, self.clock, index))

    def room_for(self, server_id, by=None):
        """Return what the filter says of the enrolled host."""
        found = (by or self.eligibility).for_server(
            server_id, {'VCPU': 1}, self.uuids)
        return found.by_host.get(self.uuids[0], found.elsewhere)

    def admitted(self, server_id=None):
        """Return whether the filter, and the claim, admit a server there."""
        return (bool(self.room_for(server_id or 'ordinary')),
                self.fits('one', server_id))


class TestLentHosts(LendingTestCase):

    def test_interruptible_servers_are_admitted(self):
        self.assertEqual((True, True), self.admitted(self.register()))
        self.assertEqual({}, self.row('one').usage)

    def test_ordinary_servers_are_not_admitted(self):
        self.assertEqual((False, False), self.admitted())
        self.assertEqual(0, self.eligibility.for_unreserved(
            {'VCPU': 1}, self.uuids).by_host[self.uuids[0]])
        self.assertRaises(scheduler_claims.Denied, self.claim, 'ordinary',
                          'one', forced=True)

    def test_no_host_is_lent_if_lending_is_disabled(self):
        self.claims, self.eligibility = self.scheduler(lends=False)
        self.assertEqual((False, False), self.admitted(self.register()))

    def test_forced_claim_still_respects_leases(self):
        self.reserve_machines(LEAD + 60, 5000)
        self.claim(self.register(), 'one', forced=True)
        self.clock.advance(120)
        self.assertRaises(scheduler_claims.Denied, self.claim,
                          self.register(), 'one', forced=True)

    def test_host_not_reservable_is_not_lent(self):
        with self.database.writer() as session:
            enrollment.change(session, NOW, self.row('one').id, {}, False)
        self.assertEqual((False, False), self.admitted(self.register()))

    def test_host_assigned_to_lease_is_not_lent(self):
        lease = self.reserve_machines(0, 5000)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['one'], [*self.held()])
        self.assertEqual((False, False), self.admitted(self.register()))
        # Also if nothing of it were booked.
        index = self.eligibility._index
        with index.fresh():
            self.assertEqual(frozenset(), index.apart().lendable)

    def test_host_with_unknown_servers_is_not_lent(self):
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host).where(
                models.Host.name == 'one').values(consumers=sa.null()))
        server_id = self.register()
        self.assertFalse(self.fits('one', server_id))
        self.assertTrue(self.fits('two', server_id))

    def test_host_assigned_to_lease_during_claim_is_not_lent(self):
        """The lease starts between the choice of the host and its claim."""
        lease = self.reserve_machines(LEAD + 60, 5000)
        window_of, server_id = interruptible.window_of, self.register()

        def start(*args):
            if not self.held():
                self.until(NOW + LEAD + 60)
                self.lifecycle.lease_start.start(lease['id'])
            return window_of(*args)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.interruptible.window_of', start))
        self.assertFalse(self.fits('one', server_id))
        self.assertEqual(['one'], [*self.held()])

    def test_lending_depends_on_servers_and_their_pool(self):
        there = [self.register(), self.register()]
        self.assertTrue(self.eligibility.may_be_lent(there))
        self.assertFalse(self.eligibility.may_be_lent(['ordinary']))
        self.assertFalse(self.eligibility.may_be_lent([*there, 'ordinary']))
        for among, lent in ((model.HostPool.COMMON, False),
                            (model.HostPool.ENROLLED, True)):
            server_id, = base.servers_of(self.lease(0, 1000, among=among))
            self.assertEqual(lent, self.eligibility.may_be_lent([server_id]))

    def test_lending_check_costs_same_for_many_servers(self):
        """Other requests of the scheduler wait for the index meanwhile."""
        there = [self.register() for _number in range(20)]
        self.assertTrue(self.eligibility.may_be_lent(there))
        self.clock.advance(1)
        sent = []
        engine = self.eligibility._database.engine

        def note(*args):
            sent.append(args[2])

        sa.event.listen(engine, 'before_cursor_execute', note)
        self.addCleanup(sa.event.remove, engine, 'before_cursor_execute', note)
        self.assertTrue(self.eligibility.may_be_lent(there[:1]))
        for_one = len(sent)
        self.clock.advance(1)
        self.assertTrue(self.eligibility.may_be_lent(there))
        self.assertEqual(for_one, len(sent) - for_one)

    def test_nothing_is_lent_if_no_host_is_enrolled(self):
        with self.database.writer() as session:
            enrollment.remove(session, NOW, self.row('one').id)
        with self.database.writer() as session:
            enrollment.retire(session, NOW, self.row('one').id)
        self.assertFalse(self.eligibility.may_be_lent([self.register()]))

    def test_server_on_lent_host_stays_interruptible(self):
        server_id = self.boot()
        self.assertFalse(interruptible.make_ordinary(
            self.admission.index, self.database, self.clock.now(), server_id))
        self.assertEqual({}, self.row('one').usage)
        server_id = self.boot('two')
        self.assertTrue(interruptible.make_ordinary(
            self.admission.index, self.database, self.clock.now(), server_id))


class TestLeasesOfHosts(LendingTestCase):
    """They get the hosts empty, cleaned and in time."""

    def setUp(self):
        super().setUp()
        self.machines.cleaning_time = CLEANING

    def boot(self, host='one', cleaning_time=CLEANING, **values):
        return super().boot(host, cleaning_time=cleaning_time, **values)

    def lead_of(self, server_id, host='one'):
        return self.row(host).interruptible[server_id][1]

    def test_cleaning_counts_on_enrolled_hosts_only(self):
        first, second = self.boot('one'), self.boot('two')
        self.assertEqual((LEAD + CLEANING, LEAD), (
            self.lead_of(first), self.lead_of(second, 'two')))

    def test_cleaning_time_counts_for_unreported_servers(self):
        server_id = self.register(cleaning_time=CLEANING)
        for host, lead in (('one', LEAD + CLEANING), ('two', LEAD)):
            self.asked(host, **{server_id: {'VCPU': 1}})
            self.assertEqual(lead, self.lead_of(server_id, host))

    def test_scheduler_respects_cleaning_time(self):
        self.reserve_machines(LEAD + CLEANING + 60, 9000)
        for admits in (True, False):
            self.assertEqual((admits, admits), self.admitted(
                self.register(cleaning_time=CLEANING)))
            self.clock.advance(120)

    def test_lease_starting_before_hosts_are_clean_is_refused(self):
        self.boot()
        soon = self.clock.now() - NOW + LEAD
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, soon + 60, 9000)
        start = refused.refusal.next_start - NOW - soon
        self.assertTrue(CLEANING <= start <= CLEANING + 60, start)
        self.reserve_machines(start + soon, 9000)

    def test_lease_starts_after_immediate_eviction_and_cleaning(self):
        self.boot()
        self.leases.creation._eviction_time = LEAD
        now = self.clock.now()
        lease = self.reserve_machines(now - NOW, 9000)
        late = lease['start_date'] - now - LEAD - CLEANING
        self.assertTrue(0 <= late <= 60, late)

    def test_server_is_evicted_in_time_for_cleaning(self):
        server_id = self.boot()
        start = self.clock.now() - NOW + 5000
        self.reserve_machines(start, start + 1000)
        self.evictions.plan()
        clean = NOW + start - CLEANING
        self.assertEqual([('safe_until', server_id, clocks.iso(
            clean - LEAD))], self.events())
        self.until(clean - LEAD)
        self.evictions.plan()
        self.assertEqual([('evict_scheduled', server_id, clocks.iso(
            clean - 300))], self.events())
        # What hangs is deleted before the cleaning.
        self.cloud.slow.add(server_id)
        self.until(clean - 300)
        self.run_until(clean - 285)
        self.set_busy(server_id)
        self.assertEqual([(server_id, cloud_api.RestingState.SHELVED)],
                         self.cloud.rests)
        self.run_until(clean - 60)
        self.assertEqual([server_id], self.cloud.deleted)

    def test_safe_for_respects_cleaning_time(self):
        self.reserve_machines(LEAD + CLEANING + 1000, 9000)
        for among, most in ((model.HostPool.ENROLLED, 1000),
                            (model.HostPool.ALL, 5000)):
            self.assertEqual(most, self.admission.safe_for(
                model.Demand({'VCPU': 1}, among=among), LEAD, 5000,
                CLEANING))

    def test_host_is_not_assigned_while_server_remains(self):
        server_id = self.boot()
        start = self.clock.now() - NOW + 5000
        lease = self.reserve_machines(start, start + 1000)
        self.until(NOW + start)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual({}, self.held())
        self.leave(server_id)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['one'], [*self.held()])


class TestCleaningOfLentHosts(LendingTestCase):
    """Hosts that were lent are cleaned before a lease of hosts has them."""

    def setUp(self):
        super().setUp()
        self.uuid, _other = self.uuids
        self.engine = self.new_engine()

    def lend(self, name='one'):
        """Place an interruptible server on a host, which then leaves it."""
        self.leave(self.boot(name), name)

    def reserved(self):
        """Reserve the host; return the lease and its start."""
        start = self.clock.now() - NOW + 5000
        return self.reserve_machines(start, start + 1000), NOW + start

    def run_at(self, instant):
        self.until(instant)
        driven.run_due(self.engine)

    def assert_waits(self, lease):
        self.assertEqual(('STARTING', {}), (
            self.status(lease), self.machines.doors))

    def assert_cleaned(self, lease, times):
        """Check that a lease has started after so many attempts."""
        self.assertEqual(('ACTIVE', '', [self.uuid] * times), (
            self.status(lease), self.reason(lease), self.machines.swept))

    def test_lease_does_not_start_before_lent_host_is_clean(self):
        self.lend()
        self.machines.dirty = {self.uuid}
        lease, start = self.reserved()
        self.run_at(start)
        self.assert_waits(lease)
        self.assertIn('of its 1 lent host, not clean yet: 1',
                      self.reason(lease))
        self.machines.dirty.clear()
        self.run_at(start + 120)
        self.assert_cleaned(lease, 2)

    def test_host_that_was_not_lent_is_cleaned_after_lease_only(self):
        _lease, start = self.reserved()
        self.run_at(start)
        self.assertEqual([], self.machines.swept)
        self.run_at(start + 1000)
        self.assertEqual([self.uuid], self.machines.swept)

    def test_lent_host_is_cleaned_at_start_and_after_end(self):
        self.lend()
        lease, start = self.reserved()
        self.run_at(start)
        self.assert_cleaned(lease, 1)
        self.run_at(start + 1000)
        self.assertEqual(('TERMINATED', [self.uuid] * 2, None, None), (
            self.status(lease), self.machines.swept, self.row('one').lent_at,
            self.row('one').cleaning_until))
        lease, start = self.reserved()
        self.looked()
        self.run_at(start)
        self.assert_cleaned(lease, 2)

    def looked(self):
        """Record that the cloud was read: the host is empty."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=None))

    def test_host_of_reserved_servers_is_cleaned(self):
        """Only a part of it was reserved."""
        lease = self.lease(0, 1000, among=model.HostPool.ENROLLED)
        server_id, = base.servers_of(lease)
        self.claim(server_id, 'one')
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            cloud_api.ServerState.GONE)
        self.run_at(NOW + 1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.looked()
        lease, start = self.reserved()
        self.run_at(start)
        self.assert_cleaned(lease, 1)

    def test_host_is_cleaned_again_if_process_dies_before_recording(self):
        self.lend()
        lease, start = self.reserved()
        clean = self.machines.clean

        def dies(*args):
            clean(*args)
            raise SystemExit

        self.machines.clean = dies
        self.until(start)
        with mock.patch.object(lease_close.Cleaning, '_keep'):
            self.assertRaises(SystemExit, self.lifecycle.lease_start.start,
                              lease['id'])
        self.machines.clean = clean
        # Until it expires, the claim of the other process is respected.
        self.until(start + 10)
        self.lifecycle.lease_start.start(lease['id'])
        self.assert_waits(lease)
        self.assertEqual([self.uuid], self.machines.swept)
        self.until(start + 120)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(('ACTIVE', [self.uuid] * 2), (
            self.status(lease), self.machines.swept))

    def test_lease_waits_for_cleaning_while_cloud_is_unavailable(self):
        clean = self.machines.clean
        for error in (errors.CloudUnavailable('down'), ValueError('broken')):
            self.lend()
            self.machines.clean = mock.Mock(side_effect=error)
            lease, start = self.reserved()
            for attempt in range(20):
                self.run_at(start + 45 * attempt)
                self.assert_waits(lease)
            self.machines.clean = clean
            self.run_at(start + 960)
            self.assert_cleaned(lease, 1)
            self.run_at(start + 1000)
            self.assertEqual('TERMINATED', self.status(lease))
            self.machines.swept.clear()
            self.looked()

    def test_lent_host_added_to_active_lease_is_cleaned_before_it_is_opened(
            self):
        lease, start = self.reserved()
        self.run_at(start)
        self.enrol('two')
        self.lend('two')
        other = self.uuid_of('two')
        self.machines.dirty = {other}
        reservation_id = lease['reservations'][0]['id']
        self.change(lease, 2, 2)
        told = []
        transferred, self.machines.transferred = (
            self.machines.transferred, told.append)
        driven.run_due(self.engine)
        # Nothing else waits for it.
        self.assertEqual(({self.uuid}, 1), (
            {*self.machines.doors[reservation_id]}, len(told)))
        self.machines.transferred = transferred
        self.machines.dirty.clear()
        self.run_at(start + 120)
        self.assertEqual(([other] * 2, {self.uuid, other}), (
            self.machines.swept, {*self.machines.doors[reservation_id]}))

    def test_wrong_clock_does_not_keep_host_from_being_cleaned(self):
        self.clock.advance(86_400)
        self.lend()
        self.clock.advance(-86_400)
        lease, start = self.reserved()
        self.run_at(start)
        self.assert_cleaned(lease, 1)
        self.assertIsNone(self.row('one').lent_at)
