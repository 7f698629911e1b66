# SPDX-License-Identifier: Apache-2.0

"""Processes that die, or act concurrently, at any step of a lease."""

import threading

import fixtures

from blazar_core.db import api
from blazar_core.leases import slots
from blazar_core.lifecycle import lease_status
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
Seen = cloud_api.ObservedServer
State = base.State


class TestCrashes(lifecycle_base.LifecycleTestCase):
    """Every action is interrupted after each of its transactions in turn.

    Another worker then repeats it.
    """

    class Crash(BaseException):
        """The process has died."""

    def cut_off(self, action, after):
        """Run an action until it has committed so many times.

        :returns: whether it completed
        """
        done = []
        retried = type(self.database).retried

        def counted(database, work, *args, **kwargs):
            if len(done) == after:
                raise self.Crash
            done.append(work)
            return retried(database, work, *args, **kwargs)

        with fixtures.MonkeyPatch(
                'blazar_core.db.api.Database.retried', counted):
            try:
                action()
            except self.Crash:
                return False
            return True

    def test_end_interrupted_at_any_commit_is_completed(self):
        cuts = 0
        finished = False
        while not finished:
            lease = self.running_lease(0, 10_000, count=2)
            finished = self.cut_off(
                lambda: self.lifecycle.lease_end.end(lease['id']), cuts)
            self.lifecycle.lease_end.end(lease['id'])
            self.assertEqual('TERMINATED', self.status(lease), cuts)
            self.assertEqual(2, self.room(), cuts)
            cuts += 1
        self.assertGreater(cuts, 4)

    def test_start_interrupted_at_any_commit_sends_once(self):
        cuts = 0
        finished = False
        while not finished:
            lease = self.lease(50, 100)
            self.cloud.sent.clear()
            finished = self.cut_off(
                lambda: self.lifecycle.lease_start.start(lease['id']), cuts)
            self.lifecycle.lease_start.start(lease['id'])
            self.assertEqual(1, len(self.cloud.sent), cuts)
            self.lifecycle.lease_end.end(lease['id'])
            cuts += 1
        self.assertGreater(cuts, 1)

    def test_lease_ends_after_crash_at_last_server_deletion(self):
        """The process dies between the last server and the lease."""
        lease = self.running_lease()
        self.assertFalse(self.cut_off(
            lambda: self.see(*base.servers_of(lease), State.GONE), 1))
        self.assertEqual('ACTIVE', self.status(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))


class TestConcurrentSteps(lifecycle_base.LifecycleTestCase):

    scenarios = databases.SERVERS
    #: The number of transactions of a database that wait for a lock.
    #: (INNODB_TRX is updated only every 0.1 s, and never if it is read more
    #: often.)
    WAITING = {
        'mysql': "SELECT CAST(VARIABLE_VALUE AS UNSIGNED) FROM "
                 "information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = "
                 "'INNODB_ROW_LOCK_CURRENT_WAITS'",
        'postgresql': "SELECT COUNT(*) FROM pg_stat_activity WHERE "
                      "wait_event_type = 'Lock' AND "
                      "datname = current_database()",
    }

    def is_waited_for(self):
        engine = self.database.engine
        with engine.connect() as connection:
            return connection.exec_driver_sql(
                self.WAITING[engine.dialect.name]).scalar_one()

    def test_ending_lease_does_not_become_active(self):
        """The last server is observed running in the middle of the end."""
        lease = self.lease(0, 100)
        with self.db.connect().writer() as ending:
            row = api.locked(ending, lease['id'])
            row.status = 'TERMINATING'
            ending.flush()
            thread = self.in_thread(lambda: self.see(
                *base.servers_of(lease), State.RUNNING, self.one))
            self.wait_for(self.is_waited_for, 'a step that waits its turn')
        thread.join(20)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertTrue(self.booking(*base.servers_of(lease)).running)

    def test_build_is_not_sent_while_lease_is_ending(self):
        lease = self.lease(50, 100)
        with self.db.connect().writer() as ending:
            row = api.locked(ending, lease['id'])
            row.status = 'TERMINATING'
            ending.flush()
            thread = self.in_thread(
                lambda: self.lifecycle.lease_start.start(lease['id']))
            self.wait_for(self.is_waited_for, 'a step that waits its turn')
        thread.join(20)
        self.assertEqual([], self.cloud.sent)
        self.assertEqual('TERMINATING', self.status(lease))

    def paused(self, work, owner, name):
        """Start work in a thread, and stop it before it commits.

        :param name: the last method that it calls
        :returns: the event that lets it continue
        """
        at, go_on = threading.Event(), threading.Event()
        last = getattr(owner, name)

        def late(*args, **kwargs):
            answer = last(*args, **kwargs)
            if not at.is_set():
                at.set()
                go_on.wait(20)
            return answer

        self.useFixture(fixtures.MockPatchObject(owner, name, late))
        self.in_thread(work)
        self.wait_for(at.is_set, 'the other one to have the lock')
        return go_on.set

    def other_lifecycle(self):
        """Return the lifecycle of another process."""
        return self.new_handlers(self.db.connect())

    def test_server_added_while_end_waits_is_deleted(self):
        lease = self.reserve(0, 100, active=True)
        other = slots.Slots(self.db.connect(), self.clock)
        self.cloud.servers['late'] = Seen(State.RUNNING, self.one)
        go_on = self.paused(
            lambda: other.take(
                lease['reservations'][0]['id'], 'project', ['late']),
            slots, '_take')
        self.clock.advance(100)
        ends = []
        thread = self.in_thread(
            lambda: ends.append(self.lifecycle.lease_end.end(lease['id'])))
        self.wait_for(self.is_waited_for, 'an end that waits its turn')
        go_on()
        thread.join(20)
        self.assertEqual((['late'], [None]), (self.cloud.deleted, ends))
        self.assertEqual('TERMINATED', self.status(lease))

    def test_concurrent_observation_of_last_servers_activates_lease(self):
        lease = self.lease(0, 100, count=2)
        first, second = base.servers_of(lease)
        other = self.other_lifecycle()
        go_on = self.paused(
            lambda: other.reconciliation.observe(
                first, Seen(State.RUNNING, self.one)),
            lease_status, 'update_status')
        thread = self.in_thread(
            lambda: self.see(second, State.RUNNING, self.one))
        self.wait_for(self.is_waited_for, 'a step that waits its turn')
        go_on()
        thread.join(20)
        self.assertEqual('ACTIVE', self.status(lease))
