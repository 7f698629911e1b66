# SPDX-License-Identifier: Apache-2.0

import contextlib
import threading
import time
from unittest import mock

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import scheduler_claims
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import leader_election
from blazar_core.db import models
from blazar_core.leases import lookup
from blazar_core.lifecycle import engine
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import engine_base

load_tests = databases.load_tests

#: The databases that have a clock of their own.
_SERVERS = [one for one in databases.EACH if one[0] != 'sqlite']


class Shifted(clocks.SystemClock):
    """The clock of a machine that may be wrong.

    :ivar ahead: seconds by which it is ahead
    :ivar suspended: seconds for which the machine was suspended
    """

    ahead = suspended = 0

    def now(self):
        return super().now() + self.ahead

    def elapsed(self):
        return super().elapsed() - self.suspended


class TestClockSkew(base.TestCase):
    """Conclusions from the database's time, without a database."""

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.clock = driven.ManualClock(base.NOW)
        self.offset = 0
        self.asked = 0
        self.skew = clock_skew.ClockSkew(self.clock, 5, self.connect)

    @contextlib.contextmanager
    def connect(self):
        self.asked += 1
        result = mock.Mock()
        result.one.return_value = (self.time(),)
        yield mock.Mock(execute=lambda *_args: result)

    def time(self):
        return (self.clock.now() + self.offset) * 1000000

    def note(self, took=0):
        """Note the time of a database whose clock is ``offset`` ahead.

        :param took: seconds within which it answered
        """
        self.skew.note(self.time(), self.clock.elapsed() - took)

    def is_right(self):
        try:
            self.skew.check()
        except errors.ClockSkewed:
            return False
        return True

    def test_a_clock_that_agrees_is_right(self):
        self.assertTrue(self.is_right())
        self.assertEqual(0, self.skew.seconds())

    def test_clock_is_wrong_if_skew_exceeds_limit(self):
        for offset, right in ((5, True), (6, True), (7, False), (1000, False),
                              (-5, True), (-6, False), (-1000, False)):
            self.offset = offset
            self.note()
            # Whole seconds: it may be one second later than it says.
            self.assertEqual(right, self.is_right(), offset)

    def test_error_states_skew_and_remedy(self):
        self.offset = -1000
        exc = self.assertRaises(errors.ClockSkewed, self.skew.check)
        self.assertEqual(
            'The clock of this service is at least 1000 s ahead of the '
            'clock of the database, so that it cannot tell what is due. Try '
            'again later; an operator has to set the clock.', str(exc))
        self.assertIsInstance(exc, errors.DatabaseUnavailable)
        self.offset = 1000
        exc = self.assertRaises(errors.ClockSkewed, self.skew.check)
        self.assertIn('at least 999 s behind the clock of', str(exc))

    def test_a_slow_answer_is_no_skew(self):
        # The database has read its clock at some time in the eight seconds.
        for offset, right in ((-8, True), (-13, True), (-14, False),
                              (0, True), (6, True), (7, False)):
            self.offset = offset
            self.note(took=8)
            self.assertEqual(right, abs(self.skew.seconds()) <= 5, offset)

    def test_database_time_is_read_at_most_once_a_minute(self):
        for _second in range(2 * clock_skew.FRESH_SECONDS):
            self.assertTrue(self.is_right())
            self.clock.advance(1)
        self.assertEqual(2, self.asked)

    def test_noted_time_saves_reading_database_time(self):
        for _second in range(2 * clock_skew.FRESH_SECONDS):
            self.note()
            self.assertTrue(self.is_right())
            self.clock.advance(1)
        self.assertEqual(0, self.asked)

    def test_each_check_reads_time_while_clock_is_wrong(self):
        self.offset = -1000
        for _time in range(3):
            self.assertFalse(self.is_right())
        self.assertEqual(3, self.asked)
        self.offset = 0
        self.assertTrue(self.is_right())

    def test_begin_and_end_of_skew_are_logged_once(self):
        self.offset = -1000
        for _time in range(3):
            self.is_right()
        self.assertEqual(1, self.log.output.count('max_clock_skew = 5'))
        self.assertIn('is at least 1000 s ahead of the clock of the '
                      'database', self.log.output)
        self.offset = 0
        for _time in range(3):
            self.is_right()
        self.assertEqual(1, self.log.output.count('agrees with the database'))

    def test_noted_time_logs_skew(self):
        self.offset = 1000
        self.note()
        self.assertIn('max_clock_skew = 5', self.log.output)

    def test_database_without_clock_causes_no_skew(self):
        self.skew.note(None, 0)
        self.assertTrue(self.is_right())
        self.assertEqual(0, self.skew.seconds())


class TestDatabase(base.DatabaseTestCase):

    scenarios = _SERVERS

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.clock = Shifted()
        self.database = self.connect()

    def connect(self):
        """Connect as another process would, with the clock of this test."""
        database = api.Database(self.db.conf, self.clock)
        self.addCleanup(database.engine.dispose)
        return database

    def write(self, name='a'):
        with self.database.writer() as session:
            session.add(models.Project(id=name, generation=0))

    def written(self):
        return self.scalars(models.Project.id)

    def test_database_time_is_independent_of_timezone(self):
        zones = {'mysql': "SET time_zone = '+05:00'",
                 'postgresql': "SET TIME ZONE 'Asia/Karachi'"}
        with self.database.connection() as connection:
            connection.exec_driver_sql(zones[connection.dialect.name])
            found = connection.scalar(sa.select(clock_skew.database_time()))
        self.assertAlmostEqual(time.time(), float(found) / 1e6, delta=2)

    def test_database_time_advances_within_transaction(self):
        with self.database.connection() as connection:
            first, second = (float(connection.scalar(sa.select(
                clock_skew.database_time()))) for _time in range(2))
        self.assertLess(first, second)

    def test_with_a_wrong_clock_nothing_is_written(self):
        for number, ahead in enumerate((1000, -1000)):
            self.clock.ahead = ahead
            self.assertRaises(errors.ClockSkewed, self.write)
            self.assertRaises(errors.ClockSkewed, self.database.begin(
            ).__enter__)
            self.assertRaises(errors.ClockSkewed, self.database.check_clock)
            self.assertEqual([], self.written()[number:])
            self.clock.ahead = 0
            self.write(str(number))
        self.assertEqual(['0', '1'], sorted(self.written()))
        self.assertEqual(2, self.log.output.count('max_clock_skew'))

    def test_transaction_is_rolled_back_after_clock_step(self):
        def step():
            with self.database.writer() as session:
                session.add(models.Project(id='a', generation=0))
                self.clock.ahead = 1000

        self.assertRaises(errors.ClockSkewed, step)
        self.clock.ahead = 0
        self.assertEqual([], self.written())
        with self.database.begin() as connection:
            connection.execute(models.Project.__table__.insert().values(
                id='a', generation=0))
        self.assertEqual(['a'], self.written())

    def test_clock_step_is_noticed_without_a_statement(self):
        self.database.check_clock()
        self.clock.ahead = 1000
        # A call would not be answered now.
        self.assertRaises(errors.ClockSkewed, self.database.skew.check_step)

    def test_suspended_machine_is_not_skewed(self):
        self.write('a')
        self.clock.suspended = 1000
        self.write('b')
        self.assertEqual('', self.log.output)

    def test_skew_below_limit_is_accepted(self):
        for number, ahead in enumerate((3, -3)):
            self.clock.ahead = ahead
            self.write(str(number))
        self.assertEqual('', self.log.output)


class TestEngine(engine_base.EngineTestCase):
    """A listener whose clock differs from that of its database."""

    scenarios = _SERVERS

    def setUp(self):
        super().setUp()
        self.clock = Shifted()
        self.log = self.useFixture(fixtures.FakeLogger())
        self.now = self.clock.now()

    def engine(self, **options):
        database = api.Database(self.db.conf, self.clock)
        self.addCleanup(database.engine.dispose)
        return engine.Engine(
            self.db.conf, database, self.clock, self.actions, 'first')

    def due_in(self, lease_id, seconds):
        return self.event(lease_id, self.now + seconds - base.NOW,
                          'end_lease')

    def test_stalled_worker_takes_over_no_claim_or_leadership(self):
        """By the last reading of its clock, the other claim is far ahead."""
        event_id = self.event('lease', claimed_until=self.now + 60,
                              claimed_by='other', status='IN_PROGRESS')
        queue = self.engine()._queue
        queue._clock = before = Shifted()
        before.ahead = -1000
        self.assertEqual(set(), queue.claim([event_id]))
        self.assertEqual('other', self.row(event_id).claimed_by)
        other, stale = (leader_election.Leader(
            self.database, clock, 'name', worker, 10, 60)
            for clock, worker in ((self.clock, 'other'), (before, 'stale')))
        self.assertIsNone(other.take())
        self.assertIsNotNone(stale.take())
        self.assertTrue(other.extend())

    def test_engine_with_fast_clock_ends_no_lease_early(self):
        self.due_in('late', -100)
        self.due_in('early', 500)
        self.clock.ahead = 1000
        self.assertRaises(errors.ClockSkewed, driven.run_due, self.engine())
        self.assertEqual([], self.done())
        self.clock.ahead = 0
        self.assertEqual(1, driven.run_due(self.engine()))
        self.assertEqual(['late'], self.done())

    def test_engine_resumes_when_clock_is_right(self):
        self.clock.ahead = 1000
        worker = self.engine()
        # It tries again after some seconds: they pass at once.
        self.clock.wait = lambda event, until: event.wait(0.05)
        thread = self.in_thread(worker.run)
        self.addCleanup(worker.stop)
        self.due_in('late', -100)
        self.wait_for(lambda: 'max_clock_skew' in self.log.output, 'the log')
        self.assertEqual([], self.done())
        self.clock.ahead = 0
        self.wait_for(self.done, 'the end of the lease')
        self.assertIn('agrees with the database again', self.log.output)
        worker.stop()
        thread.join(20)

    def test_clock_check_needs_no_additional_statement(self):
        worker = self.engine()
        driven.run_due(worker)
        statements = []
        sa.event.listen(
            worker._database.engine, 'before_cursor_execute',
            lambda *args: statements.append(args[2]))
        driven.run_due(worker)
        self.assertEqual(1, len([
            one for one in statements if one.startswith('SELECT')]))

    def test_outcome_is_not_written_after_clock_step(self):
        """The clock steps during an action."""
        event_id = self.due_in('a', -100)
        door = self.shut('a')
        worker = self.engine()
        thread = self.in_thread(lambda: driven.run_due(worker))
        self.wait_for(lambda: self.actions.running, 'the action')
        self.clock.ahead = 1000
        door.set()
        thread.join(20)
        self.assertEqual('IN_PROGRESS', self.row(event_id).status)
        self.clock.ahead = 0
        self.assertGreater(self.row(event_id).claimed_until, self.now)
        self.assertLess(self.row(event_id).claimed_until, self.now + 100)


class BookedTestCase(base.DatabaseTestCase):
    """A process whose clock may be wrong, and a lease of a server."""

    scenarios = _SERVERS

    def setUp(self):
        super().setUp()
        self.clock = Shifted()
        self.of_process = api.Database(self.db.conf, self.clock)
        self.addCleanup(self.of_process.engine.dispose)
        self.uuid = self.host('one', VCPU=4)
        self.book(self.clock.now() + 100, self.clock.now() + 500)

    def book(self, start, end):
        """Reserve the host."""
        with self.database.writer() as session:
            session.add(models.Lease(
                lease_type='immediate',
                id='lease', name='', project_id='', user_id='',
                start_date=start, end_date=end, on_end='', status='PENDING',
                created_at=0, updated_at=0, reservations=[models.Reservation(
                    id='lease', resource_type='', amount=1, resources={},
                    status='', created_at=0, updated_at=0, bookings=[
                        models.Booking(
                            server_id='leased', start_date=start,
                            host_id=self.scalars(models.Host.id)[0],
                            end_date=end, resources={'VCPU': 4})])]))


class TestScheduler(BookedTestCase):
    """A scheduler with a wrong clock behaves as without a database."""

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(self.of_process, self.clock)
        self.eligibility = eligibility.Eligibility(
            self.of_process, self.clock, self.admission.index)
        self.claims = scheduler_claims.Claims(
            self.of_process, self.clock, self.admission.index)

    def claim(self):
        return self.claims.claim(
            uuidutils.generate_uuid(), {self.uuid: {'VCPU': 1}})

    def test_scheduler_uses_stale_index_with_wrong_clock(self):
        self.assertEqual(0, self.eligibility.for_unreserved(
            {'VCPU': 1}, [self.uuid]).by_host[self.uuid])
        # By this clock the lease has ended.
        self.clock.ahead = 1000
        self.assertRaises(
            errors.ClockSkewed, self.eligibility.for_unreserved, {'VCPU': 1},
            [self.uuid])
        self.assertEqual(0, self.eligibility.from_stale_index(
            {'VCPU': 1}, [self.uuid]).by_host[self.uuid])
        denied = self.assertRaises(scheduler_claims.Denied, self.claim)
        self.assertIn('without their database', str(denied))

    def test_claims_are_denied_with_wrong_clock_if_so_configured(self):
        self.claims._alone = False
        self.clock.ahead = 1000
        denied = self.assertRaises(scheduler_claims.Denied, self.claim)
        self.assertIsInstance(denied.__cause__, errors.ClockSkewed)

    def test_ended_leases_do_not_count_during_long_outage(self):
        with self.admission.index.fresh():
            pass
        clock = self.clock
        clock.ahead, clock.suspended = 1000, -1000
        self.assertEqual({}, self.eligibility.from_stale_index(
            {'VCPU': 1}, [self.uuid]).by_host)


class TestLookup(BookedTestCase):
    """A nova-api with a wrong clock takes no lease for one that has ended."""

    def setUp(self):
        super().setUp()
        self.lookup = lookup.Lookup(self.of_process, self.clock)

    def test_lookup_fails_if_clock_is_ahead_of_end(self):
        self.clock.ahead = 1000
        self.assertRaises(errors.ClockSkewed, self.lookup.ended, 'leased', '')

    def test_ended_lease_is_found_only_with_right_clock(self):
        self.assertIsNone(self.lookup.ended('leased', ''))
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Lease).values(
                end_date=self.clock.now() - 1))
        self.assertEqual('lease', self.lookup.ended('leased', '').lease_id)
        # It behaves as without the database, though the lease has ended.
        self.clock.ahead = 1000
        self.assertRaises(errors.ClockSkewed, self.lookup.ended, 'leased', '')

    def test_terminating_lease_is_found_with_clock_behind(self):
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Lease).values(
                status='TERMINATING'))
        self.clock.ahead = -1000
        self.assertEqual('lease', self.lookup.ended('leased', '').lease_id)


class TestConcurrentThreads(base.DatabaseTestCase):
    """Threads of a process share the known skew of its clock."""

    scenarios = _SERVERS

    def test_clock_step_is_noticed_by_all_threads(self):
        clock = Shifted()
        database = api.Database(self.db.conf, clock)
        self.addCleanup(database.engine.dispose)
        barrier, refused = threading.Barrier(9), []

        def write(number):
            barrier.wait(20)
            barrier.wait(20)
            try:
                with database.writer() as session:
                    session.add(models.Project(
                        id=str(number), generation=0))
            except errors.ClockSkewed:
                refused.append(number)

        threads = [self.in_thread(lambda number=number: write(number))
                   for number in range(8)]
        database.check_clock()
        barrier.wait(20)
        clock.ahead = -1000
        barrier.wait(20)
        for thread in threads:
            thread.join(20)
        self.assertEqual([*range(8)], sorted(refused))
        self.assertEqual([], self.scalars(models.Project.id))
