# SPDX-License-Identifier: Apache-2.0

"""Claims of a scheduler count at once, and take no reserved capacity."""

import dataclasses
import functools
import threading

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import pending
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import server_growth
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import racer

load_tests = databases.load_tests

NOW = base.NOW
State = cloud_api.ServerState


class ClaimTestCase(base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.claims = self.another()

    def another(self):
        """Return the claims of another scheduler, with an index of its own."""
        database = self.books.connect()
        search = admissions.Admission(database, self.clock)
        return scheduler_claims.Claims(database, self.clock, search.index)

    def claim(self, server_id, host, forced=False, by=None, **takes):
        """Claim a host for a server; return the function that undoes it."""
        return (by or self.claims).claim(
            server_id, {self.uuid_of(host): takes or {'VCPU': 1}}, forced)

    def fits(self, host, server_id=None, **takes):
        """Return whether a claim is admitted."""
        try:
            self.claim(server_id or uuidutils.generate_uuid(), host, **takes)
        except scheduler_claims.Denied:
            return False
        return True

    def row(self, host):
        with self.database.reader() as session:
            return session.scalars(sa.select(models.Host).options(
                sa.orm.undefer(models.Host.consumers)).where(
                    models.Host.name == host)).one()

    def booking(self, server_id):
        row, = self.scalars(models.Booking,
                            models.Booking.server_id == server_id)
        return row

    def tell(self, server_id, host='one', **takes):
        """Record that a server has arrived on a host, or has left it."""
        with self.database.begin() as connection:
            return inventory.record(connection, self.clock.now(), host, host,
                                    server_id, takes or None)

    def asked(self, host='one', at=None, **servers):
        """Report the servers of a host, as read from the cloud."""
        with self.database.writer() as session:
            uuid = self.uuid_of(host)
            inventory.report_usage(
                session, self.clock.now() if at is None else at, uuid,
                servers, inventory.generations(session, [uuid])[uuid])


class TestClaim(ClaimTestCase):

    def test_what_is_let_in_counts_before_anybody_tells_of_it(self):
        self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 6})
        self.assertEqual([True] * 4 + [False] * 6, [
            self.fits('one') for _boot in range(10)])
        self.assertEqual({'VCPU': 4}, self.row('one').usage)

    def test_other_schedulers_see_it_at_once(self):
        self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 9})
        others = self.another()
        # Its index was loaded before the claim.
        self.claim('a', 'one', by=others)()
        self.claim('b', 'one')
        self.assertRaises(scheduler_claims.Denied, self.claim, 'c', 'one',
                          by=others)

    def test_where_nothing_is_promised_nobody_is_judged(self):
        self.host('one', VCPU=1)
        self.assertEqual([True, True], [
            self.fits('one') for _boot in range(2)])
        self.assertEqual({'VCPU': 2}, self.row('one').usage)

    def test_a_host_that_is_forced_is_not_judged_but_counted(self):
        self.host('one', VCPU=1)
        self.lease(50, 100)
        self.assertRaises(scheduler_claims.Denied, self.claim, 'a', 'one')
        self.claim('a', 'one', forced=True)
        self.assertEqual({'VCPU': 1}, self.row('one').usage)

    def test_all_that_is_taken_of_a_host_counts(self):
        uuid = self.host('one', VCPU=2, MEMORY_MB=10, CUSTOM_GPU=1)
        self.claims.claim('a', {
            'shared': {'DISK_GB': 7}, uuid: {'VCPU': 1, 'MEMORY_MB': 0},
            'gpu': {'CUSTOM_GPU': 1}})
        self.assertEqual({'VCPU': 1, 'CUSTOM_GPU': 1}, self.row('one').usage)

    def test_hosts_that_nobody_knows_are_not_claimed(self):
        self.claims.claim('a', {'unknown': {'VCPU': 1}})()
        self.assertEqual({}, self.count_rows())

    def test_a_claim_taken_back_leaves_nothing(self):
        self.host('one', VCPU=1)
        for before in ({}, {'a': {'VCPU': 5}}):
            self.asked(**before)
            consumers = self.row('one').consumers
            self.claim('a', 'one')()
            self.assertEqual(consumers, self.row('one').consumers)

    def test_resized_in_its_place_a_server_takes_both_sizes(self):
        self.host('one', VCPU=9)
        self.asked(a={'VCPU': 2})
        self.claim('a', 'one', VCPU=3)
        self.assertEqual({'VCPU': 5}, self.row('one').usage)
        # A repeated claim does not count again.
        self.claim('a', 'one', VCPU=3)
        self.assertEqual({'VCPU': 5}, self.row('one').usage)
        self.asked(a={'VCPU': 3})
        self.assertEqual({'VCPU': 3}, self.row('one').usage)

    def test_who_lost_a_race_judges_again(self):
        self.be_slower()
        self.assertRaises(scheduler_claims.Denied, self.claim, 'slower', 'one')
        self.assertEqual({'VCPU': 1}, self.row('one').usage)

    def test_without_the_guard_he_would_not(self):
        self.be_slower()
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.inventory.claim', racer.claim_unguarded))
        self.claim('slower', 'one')
        self.assertEqual({'VCPU': 2}, self.row('one').usage)

    def be_slower(self):
        """Let another claim take the last capacity before the decision."""
        self.host('one', VCPU=2)
        self.lease(50, 100)
        judge = self.claims._fits
        others = iter([self.another()])

        def meanwhile(*args, **kwargs):
            fits = judge(*args, **kwargs)
            for other in others:
                self.claim('faster', 'one', by=other)
            return fits

        self.claims._fits = meanwhile


class TestPending(ClaimTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=10)
        self.asked()
        self.claim('a', 'one')

    def test_it_is_kept_until_the_cloud_must_have_it(self):
        self.assertEqual(NOW + pending.CLAIM_SECONDS + 1,
                         self.row('one').recheck_at)
        self.clock.advance(pending.CLAIM_SECONDS)
        self.asked()
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.clock.advance(1)
        self.asked()
        self.assertEqual({}, self.row('one').usage)
        self.assertIsNone(self.row('one').recheck_at)

    def test_a_clock_that_was_ahead_keeps_nothing_taken(self):
        self.clock.step(3600)
        self.claim('b', 'one')
        self.tell('c', VCPU=1)
        self.clock.step(-3600)
        self.asked()
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.clock.advance(pending.CLAIM_SECONDS + 1)
        self.asked()
        self.assertEqual({}, self.row('one').usage)
        self.assertIsNone(self.row('one').recheck_at)

    def test_what_the_cloud_has_stays(self):
        self.clock.advance(pending.CLAIM_SECONDS + 1)
        self.asked(a={'VCPU': 1})
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.assertIsNone(self.row('one').recheck_at)

    def test_told_of_it_nothing_is_decided_and_nobody_asked(self):
        generation = self.generation('one')
        changes = self.count_rows()['changes']
        self.assertTrue(self.tell('a', VCPU=1))
        row = self.row('one')
        self.assertEqual((generation, {'VCPU': 1}, None), (
            row.generation, row.usage, row.recheck_at))
        self.assertEqual(changes, self.count_rows()['changes'])
        # It is on the host without an end.
        self.asked(at=NOW - 1)
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.clock.advance(1)
        self.asked()
        self.assertEqual({}, self.row('one').usage)

    def test_the_host_is_looked_at_for_the_others_that_are_awaited(self):
        self.clock.advance(3)
        self.claim('b', 'one')
        self.assertEqual(NOW + 31, self.row('one').recheck_at)
        self.tell('a', VCPU=1)
        self.assertEqual(NOW + 34, self.row('one').recheck_at)
        self.tell('b', VCPU=1)
        self.assertIsNone(self.row('one').recheck_at)

    def test_who_wants_to_look_sooner_does_so(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=NOW + 2))
        self.claim('b', 'one')
        for server_id in 'ab':
            self.tell(server_id, VCPU=1)
        self.assertEqual(NOW + 2, self.row('one').recheck_at)

    def test_looked_at_in_between_it_is_looked_at_again(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=NOW + 2))
        self.clock.advance(2)
        self.asked()
        self.assertEqual(NOW + 31, self.row('one').recheck_at)

    def test_one_that_leaves_does_not_come_back(self):
        self.tell('a')
        self.assertEqual({}, self.row('one').usage)
        self.asked(at=NOW - 1, a={'VCPU': 1})
        self.assertEqual({}, self.row('one').usage)


class TestLeased(ClaimTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def servers(self, *window, **wanted):
        return base.servers_of(self.lease(*window, **wanted))

    def test_it_is_placed_where_it_is_booked_and_counts_once(self):
        server_id, = self.servers(0, 100, resources={'VCPU': 2})
        self.claim(server_id, 'one', VCPU=2)
        self.assertEqual(NOW, self.booking(server_id).claimed_at)
        self.assertEqual({}, self.row('one').usage)

    def test_elsewhere_its_booking_goes_with_it(self):
        server_id, = self.servers(0, 100)
        self.host('two', VCPU=1)
        undo = self.claim(server_id, 'two')
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual(NOW, self.booking(server_id).claimed_at)
        undo()
        self.assertIsNone(self.booking(server_id).claimed_at)
        self.claim(server_id, 'one')
        self.assertEqual('one', self.host_of(server_id))

    def test_it_does_not_go_where_others_were_promised_the_room(self):
        self.servers(0, 100, count=2)
        self.host('two', VCPU=1)
        server_id, = self.servers(0, 100)
        self.assertEqual('two', self.host_of(server_id))
        self.assertFalse(self.fits('one', server_id))
        self.assertEqual('two', self.host_of(server_id))
        self.assertIsNone(self.booking(server_id).claimed_at)
        self.claim(server_id, 'one', forced=True)
        self.assertEqual('one', self.host_of(server_id))

    def test_those_of_one_lease_change_places(self):
        self.host('two', VCPU=2)
        first, second = self.servers(0, 100, count=2, resources={'VCPU': 2})
        before = [self.host_of(first), self.host_of(second)]
        self.claim(first, before[1], VCPU=2)
        self.assertEqual(before[::-1], [
            self.host_of(first), self.host_of(second)])
        # Its booking is there now.
        self.assertFalse(self.fits(before[1], second, VCPU=2))

    def test_one_without_a_host_is_bound_where_it_is_let_in(self):
        server_id, = self.servers(0, 100)
        with self.database.writer() as session:
            booking = session.get(models.Booking, self.booking(server_id).id)
            ledger.amend(session, NOW, [ledger.Edit(
                booking, ledger.new_of(booking, host_id=None))])
        self.claim(server_id, 'one')
        self.assertEqual('one', self.host_of(server_id))
        self.assertEqual(NOW, self.booking(server_id).claimed_at)

    def test_built_again_elsewhere_it_does_not_count_twice(self):
        server_id, = self.servers(0, 100)
        self.host('two', VCPU=1)
        self.claim(server_id, 'one')
        self.claim(server_id, 'two')
        self.assertEqual(('two', {}), (
            self.host_of(server_id), self.row('two').usage))

    def test_one_that_runs_counts_twice_while_it_moves(self):
        server_id, = base.servers_of(self.running_lease(0, 100))
        uuid = self.host('two', VCPU=1)
        undo = self.claim(server_id, 'two')
        two = self.row('two')
        self.assertEqual({'VCPU': 1}, two.usage)
        self.assertEqual('one', self.host_of(server_id))
        self.assertEqual(two.id, self.booking(server_id).migrating_to)
        undo()
        self.assertEqual({}, self.row('two').usage)
        self.assertIsNone(self.booking(server_id).migrating_to)
        self.claim(server_id, 'two')
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(State.RUNNING, uuid))
        self.asked('two')
        self.assertEqual({}, self.row('two').usage)
        self.assertIsNone(self.booking(server_id).migrating_to)

    def test_one_that_stays_after_all_is_looked_for_where_it_would_go(self):
        server_id, = base.servers_of(self.running_lease(0, 100))
        self.host('two', VCPU=1)
        self.claim(server_id, 'two')
        self.clock.advance(60)
        seen = self.cloud.servers[server_id]
        observe = self.lifecycle.reconciliation.observe
        self.assertEqual([], observe(
            server_id, dataclasses.replace(seen, busy=True)))
        self.assertEqual(['two'], observe(server_id, seen))
        self.asked('two')
        self.assertEqual({}, self.row('two').usage)
        self.assertEqual([], observe(server_id, seen))

    def test_one_that_was_shelved_comes_back_to_its_room(self):
        server_id, = base.servers_of(self.running_lease(
            0, 100, resources={'VCPU': 2}))
        self.claim(server_id, 'one', VCPU=2)
        self.assertEqual(({}, None), (
            self.row('one').usage, self.booking(server_id).migrating_to))
        # Additional usage must fit.
        self.assertFalse(self.fits('one', server_id, VCPU=1))

    def test_one_whose_lease_is_over_moves_nowhere(self):
        """It cannot return to its host either: its end decides by its host."""
        self.host('other', VCPU=4)
        lease = self.running_lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.stubborn.add(server_id)
        self.clock.advance(100)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATING', self.status(lease))
        for host in ('one', 'other'):
            self.assertFalse(self.fits(host, server_id), host)

    def test_one_that_runs_moves_where_there_is_room_until_its_end(self):
        server_id, = base.servers_of(self.running_lease(0, 100, resources={
            'VCPU': 2}))
        self.host('two', VCPU=2)
        self.servers(50, 200, resources={'VCPU': 2})
        self.assertFalse(self.fits('two', server_id, VCPU=2))
        self.host('three', VCPU=2)
        self.servers(100, 200, resources={'VCPU': 2})
        self.servers(100, 200, resources={'VCPU': 2})
        self.assertTrue(self.fits('three', server_id, VCPU=2))

    def test_one_whose_lease_is_over_is_like_any_other(self):
        server_id, = self.servers(0, 100)
        self.servers(100, 200, resources={'VCPU': 2})
        own_of = eligibility.own_of

        def meanwhile(*args):
            self.lifecycle.reconciliation.observe(
                server_id, cloud_api.ObservedServer(State.GONE))
            eligibility.own_of = own_of
            return own_of(*args)

        eligibility.own_of = meanwhile
        self.addCleanup(setattr, eligibility, 'own_of', own_of)
        self.assertFalse(self.fits('one', server_id))


class TestGrowth(ClaimTestCase):
    """A leased server that uses more than its booking."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.host('two', VCPU=8)
        self.limited(4)

    def limited(self, vcpus):
        self.books.conf.set_override(
            'max_reserved_vcpus_per_project', vcpus, 'blazar_enforcement')

    def another(self):
        database = self.books.connect()
        search = admissions.Admission(database, self.clock)
        return scheduler_claims.Claims(
            database, self.clock, search.index,
            growth=functools.partial(server_growth.check, limits.Limits(
                self.books.conf, database, self.clock)))

    def running(self, **how):
        return base.servers_of(self.running_lease(
            0, 100, **{'resources': {'VCPU': 1}, **how}))

    def test_one_that_is_resized_is_within_the_limits(self):
        server_id, = self.running()
        self.lease(50, 80)
        for host in ('one', 'two'):
            self.assertFalse(self.fits(host, server_id, VCPU=4), host)
            self.assertTrue(self.fits(host, server_id, VCPU=3), host)

    def test_what_others_have_at_other_times_does_not_count(self):
        server_id, = self.running()
        self.lease(100, 200, resources={'VCPU': 4})
        self.assertTrue(self.fits('two', server_id, VCPU=4))

    def test_two_that_are_resized_at_once(self):
        first, second = self.running(count=2)
        self.assertTrue(self.fits('two', first, VCPU=3))
        self.assertFalse(self.fits('two', second, VCPU=2))

    def test_one_that_moves_as_it_is_counts_once(self):
        first, second = self.running(count=2)
        self.limited(2)
        self.assertTrue(self.fits('two', first))
        self.assertTrue(self.fits('two', second))

    def test_one_above_a_limit_that_was_lowered_moves(self):
        server_id, = self.running(resources={'VCPU': 4})
        self.limited(2)
        self.assertTrue(self.fits('two', server_id, VCPU=4))

    def test_one_that_has_grown_before_it_is_built_is_booked_so(self):
        """The server was resized in an earlier occurrence."""
        server_id, = base.servers_of(self.lease(0, 100))
        self.assertFalse(self.fits('one', server_id, VCPU=5))
        self.leases.creation.create(dataclasses.replace(
            self.new_lease(0, 100, resources={'VCPU': 6}),
            project_id='other'), None)
        self.assertEqual('one', self.host_of(server_id))
        self.assertFalse(self.fits('one', server_id, VCPU=3))
        self.assertTrue(self.fits('one', server_id, VCPU=2))
        self.assertEqual({'VCPU': 2}, self.booking(server_id).resources)
        self.assertTrue(self.fits('two', server_id, VCPU=4))
        self.assertEqual(('two', {'VCPU': 4}), (
            self.host_of(server_id), self.booking(server_id).resources))


class TestReverts(ClaimTestCase):
    """Two servers of one CPU that had two each, with a limit of 3 CPUs."""

    scenarios = [databases.SCENARIOS[0], *databases.SERVERS]

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.host('two', VCPU=8)
        self.books.conf.set_override(
            'max_reserved_vcpus_per_project', 3, 'blazar_enforcement')
        self.own = base.servers_of(self.running_lease(
            0, 1000, resources={'VCPU': 1}, count=2))
        self.kept = {f'migration {server_id}': {'VCPU': 2}
                     for server_id in self.own}

    def revert(self, server_id, source='two', meet=lambda: None):
        """Return whether a resize may be reverted.

        :param meet: called between the check and the write
        """
        database = self.books.connect()
        lease, booked = server_growth.booked(database, server_id)
        asked = server_growth.asked_of(lease, booked, {'VCPU': 2})
        allowed = limits.Limits(self.books.conf, database, self.clock)
        try:
            granted = allowed.check(dataclasses.replace(
                asked, server_ids=(server_id,)))
            meet()
            server_growth.revert(
                database, self.clock, granted, lease.id, server_id,
                server_growth.Revert({'VCPU': 2, 'UNKNOWN': 1}, source, source,
                                     f'migration {server_id}'))
        except errors.LimitExceeded:
            return False
        return True

    def test_one_of_two_at_once_is_within_the_limits(self):
        self.asked('two', **self.kept)
        barrier, answers = threading.Barrier(2), []
        threads = [self.in_thread(lambda server_id=server_id: answers.append(
            self.revert(server_id, meet=lambda: barrier.wait(20))))
            for server_id in self.own]
        for thread in threads:
            thread.join(60)
        self.assertEqual([False, True], sorted(answers))

    def test_what_it_takes_counts_until_it_is_there_and_then_too(self):
        first, second = self.own
        self.asked('two', **self.kept)
        self.assertTrue(self.revert(first))
        self.assertFalse(self.revert(second))
        # Its allocation was kept there: it counts once.
        self.assertEqual({'VCPU': 4}, self.row('two').usage)
        kept = {f'migration {second}': {'VCPU': 2}}
        self.asked('two', **kept, **{first: {'VCPU': 2}})
        self.assertFalse(self.revert(second))
        self.cloud.servers[first] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('two'))
        self.lifecycle.reconciliation.check(first)
        self.asked('two', **kept, **{first: {'VCPU': 2}})
        self.assertEqual({'VCPU': 2}, self.booking(first).resources)
        self.assertIsNone(self.booking(first).migrating_to)
        self.assertFalse(self.revert(second))
        self.assertEqual({'VCPU': 2}, self.row('two').usage)

    def test_so_it_does_where_it_has_stayed_on_its_host(self):
        first, second = self.own
        small = dict.fromkeys(self.own, {'VCPU': 1})
        self.asked('one', **self.kept, **small)
        self.assertTrue(self.revert(first, 'one'))
        self.asked('one', **self.kept, **small)
        self.assertFalse(self.revert(second, 'one'))
        self.asked('one', **{
            first: {'VCPU': 2}, second: {'VCPU': 1},
            f'migration {second}': {'VCPU': 2}})
        self.assertEqual({'VCPU': 2}, self.booking(first).resources)
        self.assertIsNone(self.booking(first).migrating_to)
        self.assertFalse(self.revert(second, 'one'))
        self.assertEqual({'VCPU': 2}, self.row('one').usage)

    def test_one_that_nova_does_not_revert_counts_for_a_while(self):
        for source in 'two', 'one':
            server_id, other = self.own
            there = dict.fromkeys(self.own, {'VCPU': 1}) if (
                source == 'one') else {}
            self.asked(source, **self.kept, **there)
            self.assertTrue(self.revert(server_id, source))
            self.clock.advance(pending.BACK_SECONDS + 2)
            self.asked(source, **self.kept, **there)
            self.assertIsNone(self.booking(server_id).migrating_to)
            self.assertEqual({'VCPU': 4}, self.row(source).usage)
            self.assertTrue(self.revert(other, source))
            self.clock.advance(pending.BACK_SECONDS + 2)
            self.asked(source, **self.kept, **there)


class TestClock(ClaimTestCase):
    """A clock that was ahead, and is set right."""

    def test_what_is_over_by_it_is_not_forgotten(self):
        self.host('full', VCPU=4)
        self.lease(1000, 2000, resources={'VCPU': 4}, hosts=frozenset(
            [self.uuid_of('full')]))
        for known_before in (False, True):
            database = self.books.connect()
            index = admissions.Admission(database, self.clock).index
            claiming = scheduler_claims.Claims(database, self.clock, index)
            takes = {self.uuid_of('full'): {'VCPU': 1}}
            if known_before:
                self.assertRaises(
                    scheduler_claims.Denied, claiming.claim, 'any', takes)
            self.clock.advance(3 * booking_index.KEEP)
            claiming.claim('any', takes)()
            self.clock.advance(-3 * booking_index.KEEP)
            self.assertRaises(scheduler_claims.Denied, claiming.claim, 'any',
                              takes)
            # A few seconds are no reason to load everything again.
            timeline = index._timeline
            self.clock.advance(-5)
            self.assertRaises(scheduler_claims.Denied, claiming.claim, 'any',
                              takes)
            self.assertIs(timeline, index._timeline)
            self.clock.advance(5)


class TestPlaces(ClaimTestCase):
    """A server with another amount leaves the slot's booking unchanged."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2, DISK_GB=30)
        self.lease_ = self.reserve(0, 1000, new_leases.NewReservation(
            model.Demand({'VCPU': 1, 'DISK_GB': 20}),
            params={'amount': 1, 'vcpus': 1}, spec={'vcpus': 1}),
            active=True)

    def booked(self):
        return self.scalars(models.Booking.resources)[0]

    def come_and_go(self, **takes):
        """Return the booking while a server is there."""
        server_id, = self.take_slots(self.lease_)
        self.claim(server_id, 'one', **takes)
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(
                State.RUNNING, self.uuid_of('one')))
        self.asked(**{server_id: takes})
        booked = self.booked()
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(State.GONE))
        return booked

    def test_one_without_a_disk_of_its_own_leaves_it_to_the_next(self):
        self.assertEqual({'VCPU': 1, 'DISK_GB': 20},
                         self.come_and_go(VCPU=1))
        self.assertFalse(self.fits('one', DISK_GB=11))

    def test_what_one_takes_beside_it_goes_with_it(self):
        self.assertEqual({'VCPU': 2, 'DISK_GB': 20},
                         self.come_and_go(VCPU=2))
        self.assertEqual({'VCPU': 1, 'DISK_GB': 20}, self.booked())


class TestSiblings(ClaimTestCase):

    def setUp(self):
        super().setUp()
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)

    def running(self, affinity, count=2):
        """Return running servers of a reservation, on their booked hosts."""
        lease = self.reserve(0, 100, self.places(count, affinity=affinity),
                             active=True)
        servers = self.take_slots(lease, count)
        for server_id in servers:
            self.lifecycle.reconciliation.observe(
                server_id, cloud_api.ObservedServer(
                    State.RUNNING, self.uuid_of(self.host_of(server_id))))
        return servers

    def test_two_that_move_at_once_do_not_meet(self):
        """Both servers pass the filter before either is claimed."""
        first, second = self.running(affinity=False)
        there, = {'one', 'two', 'three'} - {
            self.host_of(first), self.host_of(second)}
        undo = self.claim(first, there)
        self.assertFalse(self.fits(there, second))
        undo()
        self.assertTrue(self.fits(there, second))

    def test_who_did_not_get_there_is_in_nobodys_way(self):
        """Nova admits the server there, but it stays on its host."""
        first, second = self.running(affinity=False)
        there, = {'one', 'two', 'three'} - {
            self.host_of(first), self.host_of(second)}
        self.claim(first, there)
        self.asked(there)
        self.assertFalse(self.fits(there, second))
        self.clock.advance(pending.CLAIM_SECONDS)
        self.asked(there, **{first: {'VCPU': 1}})
        self.assertFalse(self.fits(there, second))
        self.clock.advance(1)
        self.asked(there)
        self.assertIsNone(self.booking(first).migrating_to)
        self.assertTrue(self.fits(there, second))

    def test_one_does_not_move_to_where_another_is(self):
        first, second = self.running(affinity=False)
        self.assertFalse(self.fits(self.host_of(second), first))

    def test_those_that_stay_together_follow_the_first(self):
        first, second = self.running(affinity=True)
        there, elsewhere = {'one', 'two', 'three'} - {self.host_of(first)}
        self.lifecycle.reconciliation.observe(first, cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of(there)))
        self.assertFalse(self.fits(elsewhere, second))
        self.assertTrue(self.fits(there, second))


class TestTogether(ClaimTestCase):
    """Servers that one request claims one after the other."""

    def fits(self, server_id):
        found = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_server(
                server_id, {'VCPU': 1}, self.scalars(models.Host.uuid))
        return {self.scalars(models.Host.name, models.Host.uuid == uuid)[0]:
                room for uuid, room in found.by_host.items()}

    def test_each_sees_those_before_it(self):
        self.host('one', VCPU=3)
        self.lease(50, 100)
        for room in (2, 1, 0):
            self.assertEqual({'one': room}, self.fits('any'))
            if room:
                self.claim(f'server {room}', 'one')

    def test_those_of_a_lease_leave_the_others_their_places(self):
        self.host('one', VCPU=2)
        first, second = base.servers_of(self.lease(0, 100, count=2))
        # The booking of the server or of another one of its lease is used.
        self.assertEqual({}, self.fits(first))
        self.claim(first, 'one')
        self.assertEqual({'one': 1}, self.fits(second))


class TestBuilding(ClaimTestCase):
    """A booking keeps its capacity until its server is deleted."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=1)
        self.server_id, = base.servers_of(self.lease(0, 100))

    def is_free(self):
        """Return whether a lease fits after the end of the first one."""
        demand = self.new_lease(100, 200).demands[0]
        window = self.request(101, 200).window
        return self.admission.quote([demand], window) is None

    def overstay(self):
        self.clock.advance(101)

    def test_one_that_a_scheduler_let_in_overstays(self):
        self.claim(self.server_id, 'one')
        self.overstay()
        self.assertFalse(self.is_free())
        self.assertFalse(self.fits('one', VCPU=1))
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.GONE))
        self.assertTrue(self.is_free())

    def test_one_that_is_being_built_overstays(self):
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(
                State.BUILDING, self.uuid_of('one')))
        self.overstay()
        self.assertFalse(self.is_free())

    def test_who_decides_in_the_database_knows_it_too(self):
        self.claim(self.server_id, 'one')
        self.overstay()
        with self.database.writer() as session:
            reservation, = self.scalars(models.Reservation.id)
            self.assertRaises(ledger.OverCapacity, ledger.amend, session,
                              self.clock.now(), [ledger.Edit(
                                  None, ledger.NewBooking(
                                      reservation, self.row('one').id, None,
                                      self.request(101, 200).window,
                                      {'VCPU': 1}))])

    def test_a_lease_waits_until_it_is_gone(self):
        self.claim(self.server_id, 'one')
        later = self.lease(100, 200)
        self.clock.advance(100)
        self.assertIsInstance(self.lifecycle.lease_start.start(later['id']),
                              retries.RetryAfter)
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.GONE))
        self.assertIsNone(self.lifecycle.lease_start.start(later['id']))

    def test_one_that_was_not_built_anywhere_does_not(self):
        self.overstay()
        self.assertTrue(self.is_free())

    def test_where_one_failed_the_cloud_is_asked(self):
        self.assertEqual(['one'], self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.ERROR)))
