# SPDX-License-Identifier: Apache-2.0

"""Leases that ended long ago are deleted, and nothing else."""

import threading
from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import feed
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import usage
from blazar_nova.services import lease_purge
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import test_budget
from tests.unit.blazar_core import test_series
from tests.unit.blazar_core import test_usage_records

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400


class Purging:
    """Common methods of the tests of purging."""

    def setUp(self):
        super().setUp()
        self.told = []

    def over(self, **columns):
        """Return a lease that has just ended, with all its rows."""
        lease = self.running_lease(0, 10 * DAY, **columns)
        for server_id in base.servers_of(lease):
            self.cloud.servers.pop(server_id)
            self.lifecycle.reconciliation.check(server_id)
        self.assertEqual('TERMINATED', self.status(lease))
        return lease

    def purge(self, before=None, **how):
        """Purge leases.

        :param before: seconds ago; None: as few as allowed
        """
        return lease_purge.LeasePurge(
            self.db.connect(), self.clock, self.told.append).purge(
                self.clock.now() - (lease_purge.LEAST_AGE if before is None
                                    else before), **how)

    def later(self, seconds=2 * DAY):
        self.clock.advance(seconds)

    def set(self, lease, **columns):
        with self.database.writer() as session:
            session.execute(sa.update(models.Lease).where(
                models.Lease.id == lease['id']).values(**columns))

    def add(self, *rows):
        with self.database.writer() as session:
            session.add_all(rows)


class TestPurging(Purging, base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=64)

    def test_ended_lease_is_purged_with_all_its_rows(self):
        before = self.everything()
        lease = self.over()
        with self.database.writer() as session:
            session.add(models.ServerMove(
                project_id='project',
                lease_id=lease['id'], server_id='server', source=1, target=2,
                resources={}, reason='best_effort', status='moved',
                updated_at=NOW))
            session.add(models.DeferredBuild(
                lease_id=lease['id'], encrypted='', created_at=NOW))
            session.add(models.RequestKey(
                digest='digest', asked='asked', lease_id=lease['id'],
                created_at=NOW))
        self.later()
        self.assertEqual((1, 0), self.purge())
        after = self.everything()
        for name in ('changes', 'hosts', 'settings', 'usage_records'):
            del before[name], after[name]
        self.assertEqual(before, after)

    def test_recent_and_unended_leases_are_kept(self):
        self.later()
        ages = {name: self.over() for name in ('long ago', 'after it')}
        self.set(ages['long ago'], end_date=NOW, updated_at=NOW)
        kept = [ages['after it']]
        for column in ('end_date', 'updated_at', 'deleted_at'):
            kept.append(self.over())
            self.set(kept[-1], **{
                'end_date': NOW, 'updated_at': NOW, column: NOW + 2 * DAY})
        kept += [self.lease(0, 5), self.lease(100, 200)]
        self.assertEqual((1, 0), self.purge())
        self.assertEqual({one['id'] for one in kept},
                         set(self.scalars(models.Lease.id)))

    def test_recurrences_of_existing_leases_are_kept(self):
        self.set(self.lease(100, 200), recurrence_id='recurrence')
        self.over()
        for name in 'recurrence', 'no more':
            self.add(models.Recurrence(
                id=name, rule='FREQ=DAILY', timezone='UTC', between='delete',
                servers=[], left_out=[], created_at=NOW))
        self.later()
        # It is being created before its leases.
        self.add(models.Recurrence(
            id='new', rule='FREQ=DAILY', timezone='UTC', between='delete',
            servers=[], left_out=[], created_at=self.clock.now()))
        self.assertEqual((1, 0), self.purge())
        self.assertEqual({'recurrence', 'new'}, set(
            self.scalars(models.Recurrence.id)))

    def test_lease_that_becomes_unfinished_during_purge_is_kept(self):
        lease = self.over()
        self.later()
        remember = lease_purge.LeasePurge._remember

        def late(this, before):
            remember(this, before)
            # The limit is recorded before anything is deleted.
            self.assertEqual(before, lease_purge.purged_before(self.database))
            self.assertEqual([lease['id']], self.scalars(models.Lease.id))
            self.add(models.Credential(
                lease_id=lease['id'], encrypted='', created_at=0))

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.services.lease_purge.LeasePurge._remember', late))
        self.purge()
        self.assertEqual([lease['id']], self.scalars(models.Lease.id))

    def test_leases_with_unfinished_rows_are_kept(self):
        trust, booking, event, holder = (self.over() for _one in range(4))
        self.add(
            models.Credential(
                lease_id=trust['id'], encrypted='', created_at=0),
            models.Booking(
                reservation_id=booking['reservations'][0]['id'],
                host_id=None, server_id='server', start_date=0, end_date=1,
                resources={}, failed_at=NOW),
            models.Event(
                id='event', lease_id=event['id'], event_type='end_lease',
                time=0, status='UNDONE', run_at=0, created_at=0, updated_at=0))
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                assigned_to=holder['reservations'][0]['id']))
        self.later()
        before = self.everything()
        self.assertEqual((0, 4), self.purge())
        self.assertEqual({**before, 'changes': []},
                         {**self.everything(), 'changes': []})
        with self.database.writer() as session:
            session.execute(sa.delete(models.Credential))
            session.execute(sa.delete(models.Booking))
            session.execute(sa.update(models.Event).values(status='DONE'))
            session.execute(sa.update(models.Host).values(assigned_to=None))
        self.assertEqual((4, 0), self.purge())

    def test_purge_does_not_change_counted_usage(self):
        self.over()
        self.running_lease(0, 10 * DAY, count=2)
        self.lease(5 * DAY, 6 * DAY)
        self.later()

        def counted():
            with self.database.connection() as connection:
                return sorted(map(repr, connection.execute(
                    usage.bookings_of('project', None, (), ()))))

        before = counted()
        self.assertEqual(3, len(before))
        self.assertEqual((1, 0), self.purge())
        self.assertEqual(before, counted())

    def test_purge_causes_no_reload_of_index(self):
        self.over()
        kept = self.running_lease(0, 10 * DAY)
        self.later()
        index = booking_index.Index(self.database, self.clock)
        with index.fresh():
            pass
        generation = self.generation('host')
        with (mock.patch.object(index, '_load') as load,
              mock.patch.object(index, '_apply') as apply):
            self.assertEqual((1, 0), self.purge())
            self.clock.advance(feed.COMPARE)
            with index.fresh():
                pass
        load.assert_not_called()
        (_timeline, found, _now), = (one.args for one in apply.mock_calls)
        self.assertEqual(([], []), (found.ids, found.steps))
        self.assertEqual(generation, self.generation('host'))
        self.assertEqual('ACTIVE', self.status(kept))

    def test_recent_date_is_refused(self):
        self.over()
        self.assertIn('24 hours', str(self.assertRaises(
            errors.InvalidLeaseParams, self.purge, DAY - 1)))
        self.assertEqual(1, len(self.scalars(models.Lease.id)))

    def test_purge_trims_changes(self):
        self.over()
        self.assertGreater(len(self.scalars(models.Change.id)), 1)
        self.later()
        self.purge()
        self.assertEqual(1, len(self.scalars(models.Change.id)))

    def test_dry_run_only_counts(self):
        self.over()
        self.later()
        before = self.everything()
        self.assertEqual((1, 0), self.purge(dry_run=True))
        self.assertEqual(before, self.everything())

    def test_latest_purge_limit_is_recorded(self):
        known = lease_purge.purged_before
        self.later()
        self.assertEqual((0, 0), self.purge())
        self.assertIsNone(known(self.database))
        for days in (2, 5, 3):
            self.set(self.over(), end_date=NOW - 9 * DAY,
                     updated_at=NOW - 9 * DAY)
            self.purge(days * DAY)
            self.assertEqual(NOW, known(self.database))

    def test_lease_deleted_during_purge_is_kept(self):
        lease = self.over()
        self.later()
        real = lease_purge.LeasePurge._delete

        def delete(*given):
            self.lifecycle.lease_end.delete(lease['id'])
            return real(*given)

        with mock.patch.object(lease_purge.LeasePurge, '_delete', delete):
            self.assertEqual((0, 0), self.purge())
        self.assertEqual([lease['id']], self.scalars(models.Lease.id))


class TestBatches(Purging, base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=64)
        self.made = [self.over() for _one in range(7)]
        # Several have the same end: pages continue within it.
        for number, one in enumerate(self.made):
            self.set(one, end_date=NOW + number // 4, updated_at=NOW)
        self.later()
        of_two = mock.patch.object(
            lease_purge, '_OVER', lease_purge._OVER.limit(2))
        of_two.start()
        self.addCleanup(of_two.stop)

    def test_leases_are_purged_in_batches(self):
        batches = []
        real = lease_purge.LeasePurge._delete

        def delete(one, ids, before):
            batches.append(len(ids))
            return real(one, ids, before)

        with mock.patch.object(lease_purge.LeasePurge, '_delete', delete):
            self.assertEqual((7, 0), self.purge())
        self.assertEqual([2, 2, 2, 1], batches)
        self.assertEqual(4, len(self.told))
        self.assertEqual((0, 0), self.purge())

    def test_interrupted_purge_can_be_continued(self):
        with mock.patch.object(self, 'told') as told:
            told.append.side_effect = [None, KeyboardInterrupt]
            self.assertRaises(KeyboardInterrupt, self.purge)
        self.assertEqual(3, len(self.scalars(models.Lease.id)))
        self.assertEqual((3, 0), self.purge())


class TestConcurrentPurges(Purging, base.LeaseTestCase):

    scenarios = databases.SERVERS
    options = {'admission_retries': 1000}

    def test_concurrent_purges_delete_each_lease_once(self):
        self.host('host', VCPU=64)
        for _one in range(12):
            self.over()
        kept = self.running_lease(0, 10 * DAY)
        self.later()
        done = []
        with mock.patch.object(
                lease_purge, '_OVER', lease_purge._OVER.limit(3)):
            threads = [threading.Thread(
                target=lambda: done.append(self.purge().deleted))
                for _one in range(3)]
            for thread in threads:
                thread.start()
            # Users send requests meanwhile.
            self.lease(0, 5)
            for thread in threads:
                thread.join()
        self.assertEqual((3, 12), (len(done), sum(done)))
        self.assertIn(kept['id'], self.scalars(models.Lease.id))
        self.assertEqual(2, len(self.scalars(models.Lease.id)))


class TestRecurring(Purging, test_series.RecurringTestCase):

    def end(self, lease_id):
        self.lifecycle.lease_end.delete(lease_id)
        self.lifecycle.lease_end.end(lease_id)

    def test_occurrences_are_kept_until_all_can_be_purged(self):
        first, second = (one['id'] for one in self.make(
            100, 3 * DAY)['occurrences'])
        self.end(first)
        self.later()
        self.assertEqual((0, 1), self.purge())
        self.end(second)
        self.assertEqual((0, 1), self.purge())
        self.later(4 * DAY)
        self.assertEqual((2, 0), self.purge())
        self.assertEqual([], self.scalars(models.Recurrence.id))


class TestUsageRecords(test_usage_records.UsageTestCase):

    def test_records_of_purged_leases_stay_until_they_are_old(self):
        lease = self.running_lease(0, 300)
        other = self.running_lease(0, 300)
        self.clock.advance(300)
        self.gone(lease)
        purge = lease_purge.LeasePurge(
            self.database, self.clock, lambda _text: None)
        before = self.clock.advance(10 * DAY) - 2 * DAY
        self.assertEqual(1, purge.purge(before).deleted)
        self.assertEqual((600, 600), self.vcpus()[:2])
        purge.purge(before, usage_before=NOW + 300)
        self.assertEqual((600, 600), self.vcpus()[:2])
        purge.purge(before, usage_before=NOW + 301)
        self.assertEqual([other['id']], sorted(
            {*self.scalars(models.UsageRecord.lease_id)}))


class TestRefund(test_budget.ChargingTestCase):

    def test_lease_is_not_purged_until_refunded(self):
        self.budget.before = test_budget.failing(
            errors.CloudUnavailable('?'), 'refund', once=False)
        self.host('one', VCPU=2)
        self.lifecycle.lease_end.delete(self.reserve(10, 100)['id'])
        purge = lease_purge.LeasePurge(self.database, self.clock,
                                       lambda _text: None)
        self.clock.advance(10 * lease_purge.LEAST_AGE)
        self.assertEqual((0, 1), purge.purge(
            self.clock.now() - lease_purge.LEAST_AGE))
        self.budget.before = lambda *_asked: None
        driven.run_due(self.engine)
        self.clock.advance(10 * lease_purge.LEAST_AGE)
        self.assertEqual((1, 0), purge.purge(
            self.clock.now() - lease_purge.LEAST_AGE))


class PlanTest(base.LeaseTestCase):
    """How SQLite searches; the other databases choose by statistics."""

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def test_leases_of_a_page_are_searched_by_their_ids(self):
        asked = []

        def note(_connection, _cursor, statement, values, *_more):
            asked.append((statement, values))

        sa.event.listen(self.database.engine, 'before_cursor_execute', note)
        with self.database.reader() as session:
            lease_purge._over(session, ['one', 'two'], base.NOW)
        sa.event.remove(self.database.engine, 'before_cursor_execute', note)
        (statement, values), = (one for one in asked if 'leases' in one[0])
        with self.database.connection() as connection:
            steps = [row[3] for row in connection.exec_driver_sql(
                f'EXPLAIN QUERY PLAN {statement}', values)]
        self.assertEqual(
            ['SEARCH leases USING INDEX sqlite_autoindex_leases_1 (id=?)'],
            steps)
