# SPDX-License-Identifier: Apache-2.0

"""The index in memory follows the database, for any writers and any order."""

import contextlib
import itertools
import json
import random
import threading
import typing as ty
from unittest import mock

import fixtures
import numpy as np
import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import feed
from blazar_core.capacity import host_memory
from blazar_core.capacity import index_rows
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from tests import databases
from tests import timeline_size
from tests.unit import base


load_tests = databases.load_tests

NOW = base.NOW
RESOURCES = [{'VCPU': 1}, {'VCPU': 2, 'MEMORY_MB': 512}, {'GPU': 1}]
#: The usage of a server without a lease.
PLAIN = {'VCPU': 3, 'MEMORY_MB': 0, 'GPU': 0}


class IndexTestCase(base.LeaseTestCase):
    """A database with hosts, a reservation for bookings, and an index."""

    scenarios = databases.SQL

    def setUp(self) -> None:
        super().setUp()
        for name in ('h1', 'h2', 'h3'):
            self.host(name, VCPU=64, MEMORY_MB=65536, GPU=64)
        self.host_ids = sorted(self.scalars(models.Host.id))
        lease = self.lease(0, 10)
        self.reservation_id = lease['reservations'][0]['id']
        self.index = booking_index.Index(self.database, self.clock)

    def new(self, host_id: int, start: int, end: int,
            resources: model.Resources | None = None) -> ledger.Edit:
        return ledger.Edit(None, ledger.NewBooking(
            self.reservation_id, host_id, None,
            model.Window(NOW + start, NOW + end), resources or {'VCPU': 1}))

    def amend(self, *edits: ledger.Edit) -> None:
        with self.database.writer() as session:
            ledger.amend(session, self.clock.now(), edits)

    def skip(self, followed: booking_index.Index) -> None:
        """Let an index regard all changes so far as read.

        As if their ids had been skipped, and committed long after higher ones.
        """
        with self.database.reader() as session:
            followed._known.top = session.execute(feed.NEWEST).one()
        followed._known._missing.clear()

    def bookings(self, session: ty.Any) -> list[models.Booking]:
        return list(session.scalars(sa.select(models.Booking).where(
            models.Booking.server_id.is_(None)).order_by(models.Booking.id)))

    def picture(self, followed: booking_index.Index) -> ty.Any:
        """Return everything that an index contains, from now on."""
        with followed.fresh() as timeline:
            pictures = {}
            for host_id in sorted(timeline.ids):
                peaks = [timeline.peak(host_id, model.Window(
                    NOW + at, NOW + at + 1))
                    for at in range(self.clock.now() - NOW, 60, 3)]
                pictures[host_id] = [
                    {rc: amount for rc, amount in peak.items() if amount}
                    for peak in peaks]
            hosts = {host.id: (host.capacity, host.usage)
                     for host in followed.hosts.values()}
            rooms = dict(zip(timeline.ids, timeline.fits(
                model.Demand({'VCPU': 1}, count=999),
                model.Window(self.clock.now(), model.FOREVER)).tolist(),
                strict=True))
        return pictures, hosts, rooms

    def assert_true_to_the_database(self,
                                    followed: booking_index.Index) -> None:
        anew = booking_index.Index(self.db.connect(), self.clock)
        self.assertEqual(self.picture(anew), self.picture(followed))


class IndexUpdatesTest(IndexTestCase):

    def test_index_matches_database_after_random_decisions(self):
        self.picture(self.index)
        dice = random.Random(20)
        for _round in range(60):
            self.one_decision(dice)
            if dice.random() < 0.4:
                self.assert_true_to_the_database(self.index)
        self.assert_true_to_the_database(self.index)

    def one_decision(self, dice: random.Random) -> None:
        """Book, change, move or release something, or change a host."""
        with self.database.writer() as session:
            rows = self.bookings(session)
            dice.shuffle(rows)
            kind = dice.randrange(7)
            start = dice.randrange(50)
            window = model.Window(NOW + start, NOW + start + dice.randint(
                1, 20))
            if kind == 0 and rows:
                edits = [ledger.Edit(row, None) for row in rows[:2]]
            elif kind == 1 and rows:
                edits = [ledger.Edit(row, ledger.new_of(
                    row, window=window, host_id=dice.choice(self.host_ids),
                    resources=dice.choice(RESOURCES))) for row in rows[:2]]
            elif kind == 2:
                host = session.get_one(models.Host, dice.choice(
                    self.host_ids))
                inventory.record_host(
                    session, self.clock.now(), model.HostFacts(
                        host.uuid, host.name, host.service_host,
                        {**host.capacity, 'VCPU': dice.randint(60, 90)}),
                    {'server': {'VCPU': dice.randint(1, 5)}},
                    host.generation)
                return
            elif kind == 3:
                host = session.get_one(models.Host, dice.choice(
                    self.host_ids))
                inventory.record_host_usage(
                    session, self.clock.now(), host.uuid, {
                        'server': {'VCPU': dice.randint(1, 5)}},
                    host.generation)
                return
            elif kind == 4:
                name = dice.choice(['h1', 'h2', 'h3'])
                inventory.record_server(
                    session.connection(), self.clock.now(), name, name,
                    'server', dice.choice([None, PLAIN]))
                return
            else:
                edits = [ledger.Edit(None, ledger.NewBooking(
                    self.reservation_id, dice.choice(self.host_ids), None,
                    window, dice.choice(RESOURCES)))
                    for _booking in range(dice.randint(1, 3))]
            ledger.amend(session, self.clock.now(), edits)

    def test_usage_is_followed_without_reading_the_hosts(self):
        self.picture(self.index)
        (host_id,) = self.scalars(models.Host.id, models.Host.name == 'h1')
        statements = []

        @sa.event.listens_for(self.database.engine, 'before_cursor_execute')
        def note(_connection, _cursor, statement, *_rest):
            statements.append(statement)

        self.addCleanup(sa.event.remove, self.database.engine,
                        'before_cursor_execute', note)
        for came in (True, False):
            with self.database.begin() as connection:
                self.assertTrue(inventory.record_server(
                    connection, NOW, 'h1', 'h1', 'server',
                    PLAIN if came else None))
            statements.clear()
            picture = self.picture(self.index)
            self.assertEqual(
                [], [one for one in statements if 'FROM hosts' in one])
            self.assertEqual(3 if came else 0,
                             picture[1][host_id][1].get('VCPU', 0))
            self.assert_true_to_the_database(self.index)

    def test_equal_usage_of_hosts_is_stored_once(self):
        self.picture(self.index)
        with self.database.begin() as connection:
            for name in ('h1', 'h2'):
                self.assertTrue(inventory.record_server(
                    connection, NOW, name, name, f'on {name}', PLAIN))
        self.picture(self.index)
        one, two = (self.index.hosts[host_id].usage
                    for host_id in self.host_ids[:2])
        self.assertEqual(3, one['VCPU'])
        self.assertIs(one, two)

    def test_new_host_is_indexed_with_its_bookings(self):
        self.picture(self.index)
        self.host('h4', VCPU=8)
        (host_id,) = self.scalars(models.Host.id, models.Host.name == 'h4')
        self.amend(self.new(host_id, 5, 10, {'VCPU': 3}))
        self.assert_true_to_the_database(self.index)
        with self.index.fresh() as timeline:
            self.assertEqual({'VCPU': 3}, {
                rc: amount for rc, amount in timeline.peak(
                    host_id, model.Window(NOW + 5, NOW + 6)).items()
                if amount})

    def test_partly_read_generation_is_read_again(self):
        self.picture(self.index)
        self.amend(*(self.new(self.host_ids[0], 40, 50)
                     for _booking in range(3)))
        with self.database.reader() as session:
            *_before, half, _newest = session.execute(feed._CHANGES).all()
        self.index._known.top = half
        self.assert_true_to_the_database(self.index)

    def test_past_bookings_are_dropped_from_index(self):
        self.picture(self.index)
        for number in range(12):
            start = number * booking_index.KEEP // 3
            self.amend(self.new(self.host_ids[0], start, start + 9))
            self.clock.advance(booking_index.KEEP // 3)
            with self.index.fresh() as timeline:
                steps = timeline_size.steps(timeline)
        # One for each host, two for each booking of the last two hours.
        self.assertLessEqual(steps, len(self.host_ids) + 2 * 7)
        start = 13 * booking_index.KEEP // 3
        self.amend(self.new(self.host_ids[1], start, start + 9))
        with self.index.fresh() as timeline:
            self.assertEqual(1, timeline.peak(self.host_ids[1], model.Window(
                NOW + start, NOW + start + 1))['VCPU'])

    def test_missed_change_is_found_by_comparing_generations(self):
        self.picture(self.index)
        self.amend(self.new(self.host_ids[1], 40, 50))
        self.skip(self.index)
        with self.index.fresh() as timeline:
            self.assertEqual(0, timeline.peak(
                self.host_ids[1], model.Window(NOW + 40, NOW + 41)).get(
                    'VCPU', 0))
        self.clock.advance(feed.COMPARE)
        self.assert_true_to_the_database(self.index)

    def test_missed_change_is_found_by_a_later_change(self):
        self.picture(self.index)
        self.amend(self.new(self.host_ids[0], 30, 40))
        with self.index.fresh():
            pass
        self.amend(self.new(self.host_ids[0], 35, 45))
        self.skip(self.index)
        self.amend(self.new(self.host_ids[0], 40, 50))
        self.assert_true_to_the_database(self.index)

    def test_missed_generation_between_others_is_found(self):
        self.picture(self.index)
        for start in (30, 35, 40):
            self.amend(self.new(self.host_ids[0], start, start + 10))
        with self.database.reader() as session:
            *_before, first, second, _third = session.execute(
                feed._CHANGES).all()
        self.index._known.top = second
        self.index._known._missing = {first.id: NOW}
        self.assert_true_to_the_database(self.index)

    def test_booking_is_excluded_only_within_the_context(
            self):
        self.amend(self.new(self.host_ids[0], 5, 10, {'GPU': 1}))
        before = self.picture(self.index)
        with self.database.reader() as session:
            rows = self.bookings(session)
        window = model.Window(NOW + 5, NOW + 10)
        with self.index.fresh() as timeline:
            with self.index.excluding(rows):
                self.assertEqual(0, timeline.peak(
                    self.host_ids[0], window)['GPU'])
            self.assertEqual(1, timeline.peak(
                self.host_ids[0], window)['GPU'])
        self.assertEqual(before, self.picture(self.index))

    def test_overstaying_server_keeps_its_capacity(self):
        lease = self.running_lease(0, 20)
        (server_id,) = base.servers_of(lease)
        (host_id,) = self.scalars(models.Booking.host_id,
                                  models.Booking.server_id == server_id)
        self.picture(self.index)
        self.clock.advance(25)
        for seconds in (0, 30):
            now = self.clock.advance(seconds)
            with self.index.fresh() as timeline:
                self.assertEqual(1, timeline.peak(
                    host_id, model.Window(now, now + 1))['VCPU'])
                self.assertEqual(0, timeline.peak(host_id, model.Window(
                    now + rule.OVERDUE, now + 100))['VCPU'])


class Fault(Exception):
    """The database fails."""


class ReadFailureTest(IndexTestCase):
    """Reading may fail at any statement."""

    @contextlib.contextmanager
    def failing_at(self, number: int) -> ty.Iterator[mock.Mock]:
        """Let a statement fail; the mock counts it."""
        statements = itertools.count()
        failed = mock.Mock(side_effect=Fault)

        def count(*_args: ty.Any) -> None:
            if next(statements) == number:
                failed()

        sa.event.listen(self.database.engine, 'before_execute', count)
        try:
            yield failed
        finally:
            sa.event.remove(self.database.engine, 'before_execute', count)

    def change_everything(self, number: int) -> None:
        """Change everything that the index may have to read."""
        self.amend(self.new(self.host_ids[0], 20 + number, 60))
        self.skip(self.index)
        self.amend(self.new(self.host_ids[0], 20 + number, 60),
                   self.new(self.host_ids[1], 20 + number, 60))
        with self.database.reader() as session:
            host = session.get_one(models.Host, self.host_ids[2])
        self.report(host.uuid, host.name, {'VCPU': number},
                    {'VCPU': 20 + number})
        self.host(f'new{number}', VCPU=number)

    def test_index_is_consistent_after_failure_of_any_statement(self):
        self.running_lease(0, 5)
        self.clock.advance(5)
        self.picture(self.index)
        for number in itertools.count():
            self.change_everything(number)
            # Every other time, so that generations are compared.
            self.clock.advance(feed.COMPARE // 2)
            with self.failing_at(number) as failed, contextlib.suppress(
                    Fault), self.index.fresh():
                pass
            self.assert_true_to_the_database(self.index)
            if not failed.called:
                break
        self.assertGreaterEqual(number, 4)

    def test_failed_load_can_be_retried(self):
        for number in itertools.count():
            with self.failing_at(number) as failed, contextlib.suppress(
                    Fault), self.index.fresh():
                pass
            if not failed.called:
                break
            if number % 2:
                self.assert_true_to_the_database(self.index)
                self.index = booking_index.Index(self.database, self.clock)
        self.assertGreaterEqual(number, 4)

    def test_changes_that_failed_to_apply_are_read_again(self):
        self.picture(self.index)
        self.amend(self.new(self.host_ids[0], 20, 30),
                   self.new(self.host_ids[1], 20, 30))
        apply = mock.Mock(side_effect=[None, MemoryError])
        with mock.patch.object(self.index._timeline, 'apply', apply):
            self.assertRaises(MemoryError, self.picture, self.index)
        self.assert_true_to_the_database(self.index)


class ReloadTest(IndexTestCase):
    """Only what cannot be followed is loaded again."""

    def setUp(self) -> None:
        super().setUp()
        self.amend(self.new(self.host_ids[0], 40, 50))
        self.picture(self.index)
        load = mock.patch.object(self.index, '_load', side_effect=(
            self.index._load))
        self.load = load.start()
        self.addCleanup(load.stop)

    def trim(self, before: int) -> int:
        return feed.trim(self.database, before)

    def test_trimming_read_changes_causes_no_reload(self):
        """The index is used within an hour of each change."""
        later = 100 * booking_index.KEEP
        for number in range(6):
            self.amend(self.new(self.host_ids[number % 3], later, later + 9))
            for hour in range(4):
                if hour == number % 2:
                    self.picture(self.index)
                self.clock.advance(booking_index.KEEP)
                self.trim(self.clock.now() - booking_index.KEEP)
        self.assertLess(len(self.scalars(models.Change.id)), 4)
        self.assert_true_to_the_database(self.index)
        self.load.assert_not_called()

    def test_trimming_unread_changes_causes_reload(self):
        self.amend(self.new(self.host_ids[0], 20, 30))
        self.amend(self.new(self.host_ids[1], 20, 30))
        self.assertGreater(self.trim(NOW + 1), 0)
        self.assert_true_to_the_database(self.index)
        self.load.assert_called_once()

    def test_trimmed_changes_are_noticed_despite_future_timestamp(self):
        self.check_trimmed_by_another_clock(0, self.host_ids[0])

    def test_trimmed_changes_are_noticed_by_periodic_comparison(self):
        self.check_trimmed_by_another_clock(
            feed.COMPARE, self.host_ids[1])

    def check_trimmed_by_another_clock(self, seconds: int, then: int) -> None:
        """The newest known change was made by a clock that is ahead."""
        with self.database.writer() as session:
            ledger.amend(session, NOW + 9999, [
                self.new(self.host_ids[2], 20, 30)])
        self.picture(self.index)
        self.amend(self.new(self.host_ids[0], 20, 30))
        self.amend(self.new(then, 20, 30))
        self.assertGreater(self.trim(NOW + 1), 0)
        self.clock.advance(seconds)
        self.assert_true_to_the_database(self.index)
        self.load.assert_called_once()

    def restore(self, backup: dict[str, list[ty.Any]]) -> None:
        """Replace the content of the database by a backup."""
        tables = models.Base.metadata.sorted_tables
        again = {
            'sqlite': "SELECT 1",
            'mysql': 'ALTER TABLE changes AUTO_INCREMENT = 1',
            'postgresql': "SELECT setval(pg_get_serial_sequence('changes', "
                          "'id'), (SELECT max(id) FROM changes))",
        }[self.database.engine.dialect.name]
        with self.database.begin() as connection:
            for table in reversed(tables):
                connection.execute(sa.delete(table))
            for table in tables:
                if backup[table.name]:
                    connection.execute(table.insert(), [
                        dict(row._mapping) for row in backup[table.name]])
            connection.execute(sa.text(again))

    def test_restored_database_causes_reload(self):
        backup = self.everything()
        self.amend(self.new(self.host_ids[0], 20, 30))
        self.picture(self.index)
        self.restore(backup)
        self.assert_true_to_the_database(self.index)
        self.load.assert_called_once()

    def test_database_changed_since_restore_causes_reload(self):
        """The same ids and generations have another meaning now."""
        backup = self.everything()
        for window in ((20, 30), (25, 35)):
            self.amend(self.new(self.host_ids[0], *window))
        self.picture(self.index)
        self.restore(backup)
        for window in ((30, 40), (35, 45), (40, 50)):
            self.amend(self.new(self.host_ids[0], *window))
        self.assertIn(self.index._known.top.id, self.scalars(models.Change.id))
        self.assert_true_to_the_database(self.index)
        self.load.assert_called_once()

    def test_restored_database_without_changes_causes_reload(self):
        for _time in range(2):
            with self.database.writer() as session:
                session.execute(sa.delete(models.Change))
            if not _time:
                backup = self.everything()
                self.amend(self.new(self.host_ids[0], 20, 30))
        self.index._timeline = None
        self.picture(self.index)
        self.load.reset_mock()
        for gone in (False, True):
            if gone:
                backup['bookings'].clear()
                backup['hosts'].pop()
            self.restore(backup)
            self.clock.advance(feed.COMPARE)
            self.assert_true_to_the_database(self.index)
            self.load.assert_called_once()
            self.load.reset_mock()


class BlocksTest(IndexTestCase):
    """The bookings of several hosts are read at once."""

    def setUp(self) -> None:
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.index_rows.BLOCK', 3))

    def test_hosts_are_grouped_into_blocks_by_booking_count(self):
        for counts, ranges in (
                ([], []),
                ([(1, 1)], [(1, 1)]),
                ([(1, 1), (2, 2), (5, 1)], [(1, 2), (5, 5)]),
                ([(1, 9), (2, 1), (3, 9)], [(1, 1), (2, 2), (3, 3)])):
            self.assertEqual(ranges, list(index_rows._ranges(counts)))

    def test_blocks_cover_all_bookings(self):
        self.picture(self.index)
        dice = random.Random(8)
        for _number in range(5):
            self.amend(*(self.new(
                host_id, start, start + 7, dice.choice(RESOURCES))
                for host_id in self.host_ids
                for start in (dice.randrange(40),)))
        with mock.patch.object(index_rows, '_block',
                               side_effect=index_rows._block) as blocks:
            self.assert_true_to_the_database(self.index)
        self.assertEqual(len(self.host_ids), blocks.call_count)

    def test_truncated_result_raises_error(self):
        self.amend(self.new(self.host_ids[0], 20, 30))
        whole = np.fromstring
        with (mock.patch.object(
                index_rows.np, 'fromstring', lambda *some, **how: whole(
                    *some, **how)[:-1]),
              self.assertRaisesRegex(RuntimeError, 'truncated'),
              self.index.fresh()):
            pass


class PrepareTest(IndexTestCase):

    def test_prepare_loads_index_and_replaces_connection_pool(self):
        self.amend(self.new(self.host_ids[0], 20, 30))
        expected = self.picture(booking_index.Index(self.database, self.clock))
        pool = self.database.engine.pool
        self.index.prepare()
        self.assertIsNot(pool, self.database.engine.pool)
        with mock.patch.object(booking_index.Index, '_load') as load:
            self.assertEqual(expected, self.picture(self.index))
        load.assert_not_called()

    def test_index_is_loaded_later_if_prepare_fails(self):
        pool = self.database.engine.pool
        with mock.patch.object(feed, 'overdue',
                               side_effect=errors.DatabaseUnavailable) as last:
            self.index.prepare()
        last.assert_called_once()
        self.assertIsNot(pool, self.database.engine.pool)
        self.assert_true_to_the_database(self.index)


class FollowerThreadTest(IndexTestCase):

    def test_thread_updates_index_in_background(self):
        def threads() -> int:
            return sum(thread.name == 'following'
                       for thread in threading.enumerate())

        def knows() -> bool:
            return self.index._timeline is not None and (
                self.index.hosts[self.host_ids[0]].generation == generation)

        before = threads()
        for _decision in range(2):
            self.amend(self.new(self.host_ids[0], 20, 30))
            (generation,) = self.scalars(
                models.Host.generation, models.Host.id == self.host_ids[0])
            self.index.follow()
            self.clock.advance(booking_index._PAUSE)
            self.wait_for(knows, 'the thread to know it')
        self.assertEqual(before + 1, threads())

    def test_follow_retries_when_thread_cannot_be_started(self):
        with mock.patch.object(threading.Thread, 'start', side_effect=[
                RuntimeError("can't start new thread"), None]) as start:
            for _request in range(3):
                self.index.follow()
        self.assertEqual(2, start.call_count)


class InternedRecordsTest(base.TestCase):

    def test_equal_records_are_stored_once(self):
        alike = host_memory.InternedRecords()
        first, second, other = (
            alike.of(json.loads(f'{{"rack one": "a b", "own": {number}}}'))
            for number in (1, 1, 2))
        self.assertEqual(({'rack one': 'a b', 'own': 1},
                          {'rack one': 'a b', 'own': 2}), (first, other))
        self.assertIs(first, second)
        for one, another in zip(first, other, strict=True):
            self.assertIs(one, another)
        self.assertIs(first['rack one'], other['rack one'])

    def test_number_of_remembered_records_is_limited(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_memory._REMEMBERED', 2))
        alike = host_memory.InternedRecords()
        some = [alike.of({'own': number}) for number in (1, 2, 1, 3, 3, 1)]
        self.assertEqual([1, 2, 1, 3, 3, 1], [one['own'] for one in some])
        self.assertIs(some[0], some[2])
        self.assertIs(some[3], some[4])
        self.assertIsNot(some[0], some[5])

    def test_record_behaves_as_mapping(self):
        one = host_memory.InternedRecords().of({'rack': 'a', 'own': None})
        self.assertEqual(
            ('a', None, 'else', ['rack', 'own'], "{'rack': 'a', 'own': None}"),
            (one.get('rack'), one.get('own', 'else'), one.get('no', 'else'),
             [*one], repr(one)))
        self.assertRaises(KeyError, one.__getitem__, 'no')


class OutOfOrderCommitTest(IndexTestCase):
    """Overlapping transactions commit in another order than they began."""

    scenarios = databases.SERVERS

    def test_late_commit_with_lower_id_is_found(self):
        self.picture(self.index)
        first, second = self.host_ids[:2]
        early = self.db.connect()
        with early.writer() as session:
            ledger.amend(session, NOW, [self.new(first, 40, 50)])
            session.flush()
            # Another transaction is faster, with a higher id.
            self.amend(self.new(second, 40, 50))
            with self.index.fresh() as timeline:
                window = model.Window(NOW + 40, NOW + 41)
                self.assertEqual(1, timeline.peak(second, window)['VCPU'])
                self.assertEqual(0, timeline.peak(first, window)['VCPU'])
        with self.index.fresh() as timeline:
            self.assertEqual(1, timeline.peak(first, window)['VCPU'])
        self.assert_true_to_the_database(self.index)

    def test_late_commit_exceeding_watched_ids_is_found(self):
        """Half of a decision has ids that are no longer looked for."""
        self.host('big', VCPU=9999)
        (big,) = self.scalars(models.Host.id, models.Host.name == 'big')
        self.picture(self.index)
        early = self.db.connect()
        with early.writer() as session:
            ledger.amend(session, NOW, [
                self.new(big, 40, 50)
                for _booking in range(feed._MISSING_MOST + 100)])
            self.amend(self.new(self.host_ids[0], 40, 50))
            self.picture(self.index)
        self.assert_true_to_the_database(self.index)
