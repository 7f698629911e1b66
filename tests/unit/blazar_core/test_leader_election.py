# SPDX-License-Identifier: Apache-2.0

"""Leader election: one process at a time."""

from concurrent import futures
import signal
import subprocess
import sys
import threading

from blazar_core.db import leader_election
from blazar_core.db import models
from tests import databases
from tests import driven
from tests import imports
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class LeaderTest(base.DatabaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.one, self.other = self.leader('one'), self.leader('other')

    def leader(self, worker, database=None):
        return leader_election.Leader(
            database or self.database, self.clock, 'it', worker, interval=300,
            worker_timeout=60)

    def worker(self):
        return self.scalars(models.TaskLeader.worker)

    def test_task_runs_once_per_interval(self):
        self.assertIsNone(self.one.take())
        self.assertEqual(NOW + 60, self.other.take())
        self.clock.advance(30)
        self.one.done()
        # The leader stays leader as long as it lives.
        self.assertEqual(NOW + 300, self.one.take())
        self.assertEqual(NOW + 360, self.other.take())
        self.clock.advance(270)
        self.assertEqual(NOW + 360, self.other.take())
        self.assertIsNone(self.one.take())

    def test_slow_leader_keeps_leadership(self):
        self.one.take()
        for _time in range(5):
            self.clock.advance(59)
            self.assertTrue(self.one.extend())
            self.assertIsNotNone(self.other.take())

    def test_leader_that_dies_while_working_is_replaced_soon(self):
        self.one.take()
        self.clock.advance(59)
        self.assertEqual(NOW + 60, self.other.take())
        self.clock.advance(1)
        self.assertIsNone(self.other.take())
        # It was only frozen.
        self.assertFalse(self.one.extend())
        self.one.done()
        self.one.leave(done=False)
        self.assertEqual(['other'], self.worker())
        self.assertEqual(NOW + 120, self.one.take())

    def test_leader_that_dies_between_runs_is_replaced(self):
        self.one.take()
        self.one.done()
        self.clock.advance(359)
        self.assertIsNotNone(self.other.take())
        self.clock.advance(1)
        self.assertIsNone(self.other.take())

    def test_stopped_leader_releases_leadership(self):
        self.one.take()
        self.one.leave(done=False)
        self.assertIsNone(self.other.take())
        self.other.done()
        self.other.leave(done=True)
        self.assertEqual(NOW + 300, self.one.take())
        self.clock.advance(300)
        self.assertIsNone(self.one.take())

    def test_triggered_task_runs_at_once(self):
        self.one.take()
        self.one.done()
        self.other.trigger()
        self.assertIsNotNone(self.other.take())
        self.assertIsNone(self.one.take())
        # Again: the leader may have passed that point already.
        self.other.trigger()
        self.assertIsNotNone(self.other.take())
        self.one.done()
        self.assertIsNone(self.one.take())
        self.one.done()
        self.assertEqual(NOW + 300, self.one.take())

    def test_trigger_does_not_wait_for_dead_leader(self):
        self.one.take()
        self.one.done()
        self.other.trigger()
        self.clock.advance(60)
        self.assertIsNone(self.other.take())


class WrongClockTest(base.DatabaseTestCase):

    scenarios = databases.SERVERS

    def test_clock_that_was_ahead_does_not_block_leadership(self):
        def leader(worker, clock):
            return leader_election.Leader(self.database, clock, 'it', worker,
                                          300, 60)

        ahead = driven.ManualClock(self.clock.now() + 86400)
        for worker in 'one', 'another':
            wrong = leader(worker, ahead)
            self.assertIsNone(wrong.take())
            wrong.done()
            # The clock is set right, or its process has died.
            self.assertIsNone(leader(worker, self.clock).take())
            ahead.advance(86400)
            self.assertIsNone(leader(worker, ahead).take())
            self.assertIsNone(leader('other', self.clock).take())
            ahead.advance(86400)


class ProcessTest(base.DatabaseTestCase):
    """A leader dies, or freezes."""

    scenarios = databases.SERVERS

    #: Becomes leader, reports it, and extends its term when it is told to.
    WORK = """
import sys
from blazar_core.db import api
from blazar_core.db import leader_election
from tests import databases
from tests import driven
one = leader_election.Leader(
    api.Database(databases.configuration(sys.argv[1])),
    driven.ManualClock(int(sys.argv[2])), 'it', 'process', 300, 60)
print(one.take(), flush=True)
sys.stdin.readline()
print(one.extend(), flush=True)
one.leave(done=False)
print('left', flush=True)
"""

    def process(self):
        process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-c', self.WORK, self.db.url,
             str(self.clock.now())], cwd=imports.ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        self.assertEqual('None', process.stdout.readline().strip())
        return process

    def take(self):
        return leader_election.Leader(
            self.database, self.clock, 'it', 'other', 300, 60).take()

    def test_killed_leader_is_replaced(self):
        process = self.process()
        process.kill()
        process.wait(20)
        self.assertEqual(self.clock.now() + 60, self.take())
        self.clock.advance(60)
        self.assertIsNone(self.take())

    def test_frozen_leader_does_not_take_back_leadership(self):
        process = self.process()
        process.send_signal(signal.SIGSTOP)
        self.clock.advance(60)
        self.assertIsNone(self.take())
        process.send_signal(signal.SIGCONT)
        process.stdin.write('go on\n')
        process.stdin.flush()
        self.assertEqual('False', process.stdout.readline().strip())
        self.assertEqual('left', process.stdout.readline().strip())
        self.assertEqual(['other'], self.scalars(models.TaskLeader.worker))


class Together:
    """A database whose users have all read before one of them writes.

    Each waits once for the others.
    """

    def __init__(self, database, barrier):
        self._database = database
        self._barrier = barrier

    def __getattr__(self, name):
        return getattr(self._database, name)

    def begin(self):
        if self._barrier is not None:
            barrier, self._barrier = self._barrier, None
            barrier.wait(20)
        return self._database.begin()


class RaceTest(base.DatabaseTestCase):

    scenarios = databases.SERVERS

    def test_only_one_of_many_becomes_leader(self):
        # The first time there is no row.
        for _time in range(3):
            together = threading.Barrier(4)
            with futures.ThreadPoolExecutor(4) as pool:
                taken = [*pool.map(
                    lambda one: one.take() is None, [leader_election.Leader(
                        Together(self.database, together), self.clock, 'it',
                        str(number), 300, 60) for number in range(4)])]
            self.assertEqual(1, taken.count(True))
            self.clock.advance(60)
