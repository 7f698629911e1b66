# SPDX-License-Identifier: Apache-2.0

"""Several listeners, one of which runs the periodic sync."""

import functools
import threading

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import leader_election
from blazar_nova.listener import batches
from blazar_nova.listener import periodic_sync
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests


class Sync:
    """Counts syncs; ``during`` is called in the next one."""

    def __init__(self):
        self.missed = threading.Event()
        self.compared = 0
        self.during = None
        #: Whether it reaches the cloud.
        self.reaches = True

    def compare_all(self, go_on, _spread):
        during, self.during = self.during, None
        if during is not None:
            during(go_on)
        self.compared += go_on() and self.reaches
        return self.reaches


class PeriodicSyncTest(base.DatabaseTestCase):

    scenarios = databases.SERVERS

    def setUp(self):
        super().setUp()
        self.stopping = threading.Event()
        self.syncs = [Sync(), Sync()]
        self.more = []
        self.one, self.other = [periodic_sync.PeriodicSync(
            self.clock, leader_election.Leader(
                self.database, self.clock, 'comparison', str(number), 300,
                60),
            300, 60, sync, self.stopping,
            [('More', functools.partial(self.more.append, number))])
            for number, sync in enumerate(self.syncs)]

    def compared(self):
        return [one.compared for one in self.syncs]

    def look(self):
        self.one.look()
        self.other.look()

    def test_only_one_listener_syncs_in_each_interval(self):
        for number in range(1, 4):
            self.look()
            self.look()
            self.assertEqual([number, 0], self.compared())
            self.clock.advance(300)
        self.assertEqual([0] * 3, self.more)

    def test_missed_notification_of_another_listener_triggers_sync(self):
        self.look()
        self.syncs[1].missed.set()
        self.other.look()
        self.assertFalse(self.syncs[1].missed.is_set())
        self.one.look()
        self.one.look()
        self.assertEqual([2, 0], self.compared())

    def test_notification_missed_during_sync_triggers_another_sync(self):
        def miss(_go_on):
            self.syncs[1].missed.set()
            self.other.look()

        self.syncs[0].during = miss
        for _time in range(3):
            self.one.look()
        self.assertEqual([2, 0], self.compared())

    def test_sync_that_fails_is_repeated(self):
        def down(_go_on):
            raise errors.DatabaseUnavailable

        self.syncs[0].during = down
        self.one.look()
        self.assertEqual(([0, 0], []), (self.compared(), self.more))
        self.assertTrue(self.syncs[0].missed.is_set())
        self.one.look()
        self.assertEqual([1, 0], self.compared())

    def test_frozen_listener_ends_sync_after_another_took_over(self):
        seen = []

        def freeze(go_on):
            self.assertTrue(go_on())
            # It has not reported in this time.
            self.clock.advance(60)
            self.other.look()
            self.wait_for(lambda: self.clock.advance(1) and not go_on())
            seen.append(go_on())

        # As if its thread had been frozen, too.
        keep, self.one._beat = self.one._beat, 61
        self.syncs[0].during = freeze
        self.one.look()
        self.one._beat = keep
        self.assertEqual(([False], [1], [0, 1]),
                         (seen, self.more, self.compared()))
        # Nor is the leadership of the other one lost.
        self.look()
        self.assertEqual([0, 1], self.compared())

    def test_slow_listener_keeps_leadership(self):
        def slow(_go_on):
            for _time in range(8):
                at = self.turn_until()
                self.clock.advance(20)
                self.wait_for(lambda: self.turn_until() > at)
                self.other.look()

        self.syncs[0].during = slow
        self.one.look()
        self.assertEqual([1, 0], self.compared())

    def test_listener_that_cannot_reach_cloud_yields_leadership(self):
        self.syncs[0].reaches = False
        for _time in range(3):
            self.look()
            self.clock.advance(300)
        self.assertEqual([0, 2], self.compared())
        # A listener that is alone tries again.
        self.syncs[0].reaches = True
        self.clock.advance(3600)
        self.one.look()
        self.assertEqual([1, 2], self.compared())

    def test_lone_listener_syncs_again_after_missed_notification(self):
        self.syncs[0].reaches = False
        self.one.look()
        self.syncs[0].reaches = True
        self.syncs[0].missed.set()
        self.one.look()
        self.clock.advance(60)
        self.one.look()
        self.assertEqual([1, 0], self.compared())

    def test_hanging_listener_loses_leadership(self):
        def hang(_go_on):
            until = self.clock.now() + 3600
            while not self.syncs[1].compared:
                self.assertLess(self.clock.now(), until)
                at = self.turn_until()
                self.clock.advance(20)
                # It is extended once more, or no longer.
                threading.Event().wait(0.05)
                if self.turn_until() == at:
                    self.other.look()

        self.syncs[0].during = hang
        self.one.look()
        self.assertEqual([0, 1], self.compared())

    def test_missed_notification_survives_database_outage(self):
        self.look()
        self.syncs[0].missed.set()

        def down():
            raise errors.DatabaseUnavailable

        hurry, self.one._leader.trigger = self.one._leader.trigger, down
        self.assertRaises(errors.DatabaseUnavailable, self.one.look)
        self.one._leader.trigger = hurry
        self.one.look()
        self.assertEqual([2, 0], self.compared())

    def turn_until(self):
        until, = self.scalars(
            periodic_sync.leader_election.models.TaskLeader.claimed_until)
        return until

    def wait_for(self, is_so):
        waits, clock = threading.Event(), clocks.SystemClock()
        until = clock.elapsed() + 20
        while not is_so():
            self.assertLess(clock.elapsed(), until)
            waits.wait(0.01)

    def test_stopped_listener_yields_leadership(self):
        self.syncs[0].during = lambda _go_on: self.stopping.set()
        self.one.run()
        self.stopping.clear()
        self.other.look()
        self.assertEqual([0, 1], self.compared())
        # After a completed sync the next one is only due at its time.
        self.stopping.set()
        self.other.run()
        self.stopping.clear()
        self.one.look()
        self.clock.advance(300)
        self.one.look()
        self.assertEqual([1, 1], self.compared())


class WaitedClock(driven.ManualClock):
    """A clock that advances only during waits."""

    def wait(self, event, until):
        self.advance(max(0, until - self.now()))


class WalkTest(base.TestCase):

    def test_walk_is_spread_over_time(self):
        clock, seen = WaitedClock(), []
        began = clock.now()
        batches.walk(
            clock, range(1000),
            lambda one: seen.append((one, clock.now())) or True,
            batches.always, 10)
        self.assertEqual(list(range(1000)), sorted(one for one, _at in seen))
        by_second = [sum(at == began + second for _one, at in seen)
                     for second in range(10)]
        self.assertLessEqual(max(by_second), 100, by_second)

    def test_late_answer_does_not_complete_walk(self):
        begun, late = threading.Event(), threading.Event()
        self.addCleanup(late.set)

        def look(one):
            if one != 'late':
                return False
            begun.set()
            return late.wait(20)

        walk = batches._Walk(look, batches.always)
        thread = self.in_thread(lambda: walk.visit('late'))
        self.assertTrue(begun.wait(20))
        for number in range(batches.SILENT):
            walk.visit(number)
        late.set()
        thread.join(20)
        self.assertEqual((True, True), (walk.over.is_set(), walk.silent))

    def test_exception_ends_walk(self):
        seen = []

        def look(one):
            seen.append(one)
            raise errors.DatabaseUnavailable

        self.assertRaises(errors.DatabaseUnavailable, batches.walk,
                          driven.ManualClock(), range(40), look,
                          batches.always, 0)
        self.assertLess(len(seen), 9)
