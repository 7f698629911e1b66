# SPDX-License-Identifier: Apache-2.0

"""Claims of a scheduler count at once, and take no reserved capacity."""

import dataclasses
import functools
import threading
from unittest import mock

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
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import server_growth
from blazar_core.leases import updates
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
        database = self.db.connect()
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
            return inventory.record_server(
                connection, self.clock.now(), host, host,
                server_id, takes or None)

    def asked(self, host='one', at=None, **servers):
        """Report the servers of a host, as read from the cloud."""
        with self.database.writer() as session:
            uuid = self.uuid_of(host)
            inventory.record_host_usage(
                session, self.clock.now() if at is None else at, uuid,
                servers, inventory.generations(session, [uuid])[uuid])


class TestClaim(ClaimTestCase):

    def test_claimed_server_counts_before_it_is_reported(self):
        self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 6})
        self.assertEqual([True] * 4 + [False] * 6, [
            self.fits('one') for _boot in range(10)])
        self.assertEqual({'VCPU': 4}, self.row('one').usage)

    def test_other_schedulers_see_claim_at_once(self):
        self.host('one', VCPU=10)
        self.lease(50, 100, resources={'VCPU': 9})
        others = self.another()
        # Its index was loaded before the claim.
        self.claim('a', 'one', by=others)()
        self.claim('b', 'one')
        self.assertRaises(scheduler_claims.Denied, self.claim, 'c', 'one',
                          by=others)

    def test_host_without_reservations_is_not_checked(self):
        self.host('one', VCPU=1)
        self.assertEqual([True, True], [
            self.fits('one') for _boot in range(2)])
        self.assertEqual({'VCPU': 2}, self.row('one').usage)

    def test_forced_claim_is_counted_but_not_checked(self):
        self.host('one', VCPU=1)
        self.lease(50, 100)
        self.assertRaises(scheduler_claims.Denied, self.claim, 'a', 'one')
        self.claim('a', 'one', forced=True)
        self.assertEqual({'VCPU': 1}, self.row('one').usage)

    def test_all_resource_classes_of_host_count(self):
        uuid = self.host('one', VCPU=2, MEMORY_MB=10, CUSTOM_GPU=1)
        self.claims.claim('a', {
            'shared': {'DISK_GB': 7}, uuid: {'VCPU': 1, 'MEMORY_MB': 0},
            'gpu': {'CUSTOM_GPU': 1}})
        self.assertEqual({'VCPU': 1, 'CUSTOM_GPU': 1}, self.row('one').usage)

    def test_unknown_hosts_are_not_claimed(self):
        self.claims.claim('a', {'unknown': {'VCPU': 1}})()
        self.assertEqual({}, self.count_rows())

    def test_undone_claim_leaves_nothing(self):
        self.host('one', VCPU=1)
        for before in ({}, {'a': {'VCPU': 5}}):
            self.asked(**before)
            consumers = self.row('one').consumers
            self.claim('a', 'one')()
            self.assertEqual(consumers, self.row('one').consumers)

    def test_resize_on_same_host_counts_both_sizes(self):
        self.host('one', VCPU=9)
        self.asked(a={'VCPU': 2})
        self.claim('a', 'one', VCPU=3)
        self.assertEqual({'VCPU': 5}, self.row('one').usage)
        # A repeated claim does not count again.
        self.claim('a', 'one', VCPU=3)
        self.assertEqual({'VCPU': 5}, self.row('one').usage)
        self.asked(a={'VCPU': 3})
        self.assertEqual({'VCPU': 3}, self.row('one').usage)

    def test_lost_race_is_checked_again(self):
        self.be_slower()
        self.assertRaises(scheduler_claims.Denied, self.claim, 'slower', 'one')
        self.assertEqual({'VCPU': 1}, self.row('one').usage)

    def test_lost_race_overbooks_without_guard(self):
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

    def test_unconfirmed_claim_expires_after_a_while(self):
        self.assertEqual(NOW + pending.CLAIM_SECONDS + 1,
                         self.row('one').recheck_at)
        self.clock.advance(pending.CLAIM_SECONDS)
        self.asked()
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.clock.advance(1)
        self.asked()
        self.assertEqual({}, self.row('one').usage)
        self.assertIsNone(self.row('one').recheck_at)

    def test_claims_made_by_fast_clock_expire_in_time(self):
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

    def test_confirmed_claim_is_kept(self):
        self.clock.advance(pending.CLAIM_SECONDS + 1)
        self.asked(a={'VCPU': 1})
        self.assertEqual({'VCPU': 1}, self.row('one').usage)
        self.assertIsNone(self.row('one').recheck_at)

    def test_notification_confirms_claim_without_decision(self):
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

    def test_recheck_time_is_that_of_oldest_pending_claim(self):
        self.clock.advance(3)
        self.claim('b', 'one')
        self.assertEqual(NOW + 31, self.row('one').recheck_at)
        self.tell('a', VCPU=1)
        self.assertEqual(NOW + 34, self.row('one').recheck_at)
        self.tell('b', VCPU=1)
        self.assertIsNone(self.row('one').recheck_at)

    def test_earlier_recheck_time_is_kept(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=NOW + 2))
        self.claim('b', 'one')
        for server_id in 'ab':
            self.tell(server_id, VCPU=1)
        self.assertEqual(NOW + 2, self.row('one').recheck_at)

    def test_recheck_is_repeated_for_pending_claim(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=NOW + 2))
        self.clock.advance(2)
        self.asked()
        self.assertEqual(NOW + 31, self.row('one').recheck_at)

    def test_outdated_report_does_not_restore_removed_server(self):
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

    def test_server_on_booked_host_counts_once(self):
        server_id, = self.servers(0, 100, resources={'VCPU': 2})
        self.claim(server_id, 'one', VCPU=2)
        self.assertEqual(NOW, self.booking(server_id).claimed_at)
        self.assertEqual({}, self.row('one').usage)

    def test_booking_follows_server_to_claimed_host(self):
        server_id, = self.servers(0, 100)
        self.host('two', VCPU=1)
        undo = self.claim(server_id, 'two')
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual(NOW, self.booking(server_id).claimed_at)
        undo()
        self.assertIsNone(self.booking(server_id).claimed_at)
        self.claim(server_id, 'one')
        self.assertEqual('one', self.host_of(server_id))

    def test_claim_on_host_reserved_by_others_is_denied(self):
        self.servers(0, 100, count=2)
        self.host('two', VCPU=1)
        server_id, = self.servers(0, 100)
        self.assertEqual('two', self.host_of(server_id))
        self.assertFalse(self.fits('one', server_id))
        self.assertEqual('two', self.host_of(server_id))
        self.assertIsNone(self.booking(server_id).claimed_at)
        self.claim(server_id, 'one', forced=True)
        self.assertEqual('one', self.host_of(server_id))

    def test_servers_of_a_lease_swap_hosts(self):
        self.host('two', VCPU=2)
        first, second = self.servers(0, 100, count=2, resources={'VCPU': 2})
        before = [self.host_of(first), self.host_of(second)]
        self.claim(first, before[1], VCPU=2)
        self.assertEqual(before[::-1], [
            self.host_of(first), self.host_of(second)])
        # Its booking is there now.
        self.assertFalse(self.fits(before[1], second, VCPU=2))

    def test_booking_without_host_gets_claimed_host(self):
        server_id, = self.servers(0, 100)
        with self.database.writer() as session:
            booking = session.get(models.Booking, self.booking(server_id).id)
            ledger.amend(session, NOW, [ledger.Edit(
                booking, ledger.new_of(booking, host_id=None))])
        self.claim(server_id, 'one')
        self.assertEqual('one', self.host_of(server_id))
        self.assertEqual(NOW, self.booking(server_id).claimed_at)

    def test_second_claim_on_other_host_replaces_first(self):
        server_id, = self.servers(0, 100)
        self.host('two', VCPU=1)
        self.claim(server_id, 'one')
        self.claim(server_id, 'two')
        self.assertEqual(('two', {}), (
            self.host_of(server_id), self.row('two').usage))

    def test_migrating_server_counts_on_both_hosts(self):
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

    def test_target_host_is_rechecked_after_failed_migration(self):
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

    def test_unshelved_server_returns_to_its_booking(self):
        server_id, = base.servers_of(self.running_lease(
            0, 100, resources={'VCPU': 2}))
        self.claim(server_id, 'one', VCPU=2)
        self.assertEqual(({}, None), (
            self.row('one').usage, self.booking(server_id).migrating_to))
        # Additional usage must fit.
        self.assertFalse(self.fits('one', server_id, VCPU=1))

    def test_server_of_ending_lease_cannot_be_claimed(self):
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

    def test_running_server_migrates_if_capacity_is_free_until_end(self):
        server_id, = base.servers_of(self.running_lease(0, 100, resources={
            'VCPU': 2}))
        self.host('two', VCPU=2)
        self.servers(50, 200, resources={'VCPU': 2})
        self.assertFalse(self.fits('two', server_id, VCPU=2))
        self.host('three', VCPU=2)
        self.servers(100, 200, resources={'VCPU': 2})
        self.servers(100, 200, resources={'VCPU': 2})
        self.assertTrue(self.fits('three', server_id, VCPU=2))

    def test_server_of_ended_lease_is_checked_like_any_other(self):
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


class TestExtendedMeanwhile(ClaimTestCase):
    """A server migrates to a host that others have reserved after its lease.
    """

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.its_lease = self.running_lease(0, 100, resources={'VCPU': 2})
        self.server_id, = base.servers_of(self.its_lease)
        self.host('two', VCPU=3)
        self.lease(100, 200, resources={'VCPU': 3})

    def extend(self):
        self.leases.updates.update(
            self.its_lease['id'], updates.LeaseChange(end=NOW + 200))

    def test_claim_is_decided_by_the_end_that_the_lease_has_by_then(self):
        writer = api.Database.writer

        def meanwhile(database):
            # The claim has been decided, and the lease is not locked.
            patched.stop()
            self.extend()
            return writer(database)

        patched = mock.patch.object(api.Database, 'writer', meanwhile)
        patched.start()
        self.assertFalse(self.fits('two', self.server_id, VCPU=2))
        self.assertIsNone(self.booking(self.server_id).migrating_to)

    def test_lease_is_extended_if_the_target_no_longer_exists(self):
        self.claim(self.server_id, 'two', VCPU=2)
        self.assertRaises(errors.ServerOnTwoHosts, self.extend)
        with self.database.writer() as session:
            inventory.retain(
                session, [self.uuid_of('one')], self.clock.now())
        self.lifecycle.reconciliation.observe(
            self.server_id, self.cloud.servers[self.server_id])
        self.extend()

    def test_lease_is_extended_if_the_target_did_not_count_the_server(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).where(
                models.Host.name == 'two').values(consumers=sa.null()))
        self.claim(self.server_id, 'two', VCPU=2)
        self.assertRaises(errors.ServerOnTwoHosts, self.extend)
        self.lifecycle.reconciliation.observe(
            self.server_id, self.cloud.servers[self.server_id])
        self.extend()


class TestGrowth(ClaimTestCase):
    """A leased server that uses more than its booking."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.host('two', VCPU=8)
        self.limited(4)

    def limited(self, vcpus):
        self.db.conf.set_override(
            'max_reserved_vcpus_per_project', vcpus, 'blazar_enforcement')

    def another(self):
        database = self.db.connect()
        search = admissions.Admission(database, self.clock)
        return scheduler_claims.Claims(
            database, self.clock, search.index,
            growth=functools.partial(server_growth.check, limits.Limits(
                self.db.conf, database, self.clock)))

    def running(self, **how):
        return base.servers_of(self.running_lease(
            0, 100, **{'resources': {'VCPU': 1}, **how}))

    def test_resized_server_must_stay_within_limits(self):
        server_id, = self.running()
        self.lease(50, 80)
        for host in ('one', 'two'):
            self.assertFalse(self.fits(host, server_id, VCPU=4), host)
            self.assertTrue(self.fits(host, server_id, VCPU=3), host)

    def test_leases_at_other_times_do_not_count(self):
        server_id, = self.running()
        self.lease(100, 200, resources={'VCPU': 4})
        self.assertTrue(self.fits('two', server_id, VCPU=4))

    def test_concurrent_resizes_share_limit(self):
        first, second = self.running(count=2)
        self.assertTrue(self.fits('two', first, VCPU=3))
        self.assertFalse(self.fits('two', second, VCPU=2))

    def test_migration_without_resize_counts_once(self):
        first, second = self.running(count=2)
        self.limited(2)
        self.assertTrue(self.fits('two', first))
        self.assertTrue(self.fits('two', second))

    def test_server_above_lowered_limit_can_migrate(self):
        server_id, = self.running(resources={'VCPU': 4})
        self.limited(2)
        self.assertTrue(self.fits('two', server_id, VCPU=4))

    def test_server_resized_before_build_is_booked_with_new_size(self):
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
        self.db.conf.set_override(
            'max_reserved_vcpus_per_project', 3, 'blazar_enforcement')
        self.own = base.servers_of(self.running_lease(
            0, 1000, resources={'VCPU': 1}, count=2))
        self.kept = {f'migration {server_id}': {'VCPU': 2}
                     for server_id in self.own}

    def revert(self, server_id, source='two', meet=lambda: None):
        """Return whether a resize may be reverted.

        :param meet: called between the check and the write
        """
        database = self.db.connect()
        lease, booked = server_growth.booked(database, server_id)
        asked = server_growth.asked_of(lease, booked, {'VCPU': 2})
        allowed = limits.Limits(self.db.conf, database, self.clock)
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

    def test_concurrent_reverts_share_limit(self):
        self.asked('two', **self.kept)
        barrier, answers = threading.Barrier(2), []
        threads = [self.in_thread(lambda server_id=server_id: answers.append(
            self.revert(server_id, meet=lambda: barrier.wait(20))))
            for server_id in self.own]
        for thread in threads:
            thread.join(60)
        self.assertEqual([False, True], sorted(answers))

    def test_revert_counts_until_and_after_completion(self):
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

    def test_revert_on_same_host_counts_until_and_after_completion(self):
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

    def test_failed_revert_counts_for_a_while(self):
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

    def test_index_is_reloaded_after_clock_is_set_back(self):
        self.host('full', VCPU=4)
        self.lease(1000, 2000, resources={'VCPU': 4}, hosts=frozenset(
            [self.uuid_of('full')]))
        for known_before in (False, True):
            database = self.db.connect()
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


class TestSlots(ClaimTestCase):
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

    def test_unused_resources_of_slot_stay_booked(self):
        self.assertEqual({'VCPU': 1, 'DISK_GB': 20},
                         self.come_and_go(VCPU=1))
        self.assertFalse(self.fits('one', DISK_GB=11))

    def test_additional_resources_are_freed_with_server(self):
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

    def test_concurrent_migrations_respect_anti_affinity(self):
        """Both servers pass the filter before either is claimed."""
        first, second = self.running(affinity=False)
        there, = {'one', 'two', 'three'} - {
            self.host_of(first), self.host_of(second)}
        undo = self.claim(first, there)
        self.assertFalse(self.fits(there, second))
        undo()
        self.assertTrue(self.fits(there, second))

    def test_failed_migration_does_not_block_sibling(self):
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

    def test_server_does_not_migrate_to_host_of_sibling(self):
        first, second = self.running(affinity=False)
        self.assertFalse(self.fits(self.host_of(second), first))

    def test_servers_with_affinity_follow_the_first(self):
        first, second = self.running(affinity=True)
        there, elsewhere = {'one', 'two', 'three'} - {self.host_of(first)}
        self.lifecycle.reconciliation.observe(first, cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of(there)))
        self.assertFalse(self.fits(elsewhere, second))
        self.assertTrue(self.fits(there, second))


class TestMultipleServers(ClaimTestCase):
    """Servers that one request claims one after the other."""

    def fits(self, server_id):
        found = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_server(
                server_id, {'VCPU': 1}, self.scalars(models.Host.uuid))
        return {self.scalars(models.Host.name, models.Host.uuid == uuid)[0]:
                room for uuid, room in found.by_host.items()}

    def test_each_server_sees_earlier_claims(self):
        self.host('one', VCPU=3)
        self.lease(50, 100)
        for room in (2, 1, 0):
            self.assertEqual({'one': room}, self.fits('any'))
            if room:
                self.claim(f'server {room}', 'one')

    def test_claims_of_a_lease_keep_capacity_for_siblings(self):
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

    def test_claimed_server_keeps_capacity_past_end(self):
        self.claim(self.server_id, 'one')
        self.overstay()
        self.assertFalse(self.is_free())
        self.assertFalse(self.fits('one', VCPU=1))
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.GONE))
        self.assertTrue(self.is_free())

    def test_building_server_keeps_capacity_past_end(self):
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(
                State.BUILDING, self.uuid_of('one')))
        self.overstay()
        self.assertFalse(self.is_free())

    def test_ledger_counts_claimed_server_past_end(self):
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

    def test_lease_waits_until_claimed_server_is_deleted(self):
        self.claim(self.server_id, 'one')
        later = self.lease(100, 200)
        self.clock.advance(100)
        self.assertIsInstance(self.lifecycle.lease_start.start(later['id']),
                              retries.RetryAfter)
        self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.GONE))
        self.assertIsNone(self.lifecycle.lease_start.start(later['id']))

    def test_unclaimed_server_keeps_no_capacity_past_end(self):
        self.overstay()
        self.assertTrue(self.is_free())

    def test_host_of_failed_build_is_rechecked(self):
        self.assertEqual(['one'], self.lifecycle.reconciliation.observe(
            self.server_id, cloud_api.ObservedServer(State.ERROR)))
