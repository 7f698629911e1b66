# SPDX-License-Identifier: Apache-2.0

"""Builds of servers with slots are sent by one process, once."""

import os
import signal
import subprocess
import sys
import threading

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import slots
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import lost_builds
from tests import databases
from tests import imports
from tests.unit import base

load_tests = databases.load_tests

#: A process that takes a slot, and is killed before or after it has taken the
#: permit to send the build.
DIES = """
import os, signal, sys
from blazar_core.db import api
from blazar_core.leases import slots
from tests import databases
from tests import driven

url, now, reservation_id, dispatches = sys.argv[1:]
clock = driven.ManualClock(int(now))
taken = slots.Slots(api.Database(databases.configuration(url)), clock)
taken.take(reservation_id, 'project', ['one', 'two'], 'encrypted')
if dispatches == 'True':
    taken.take_permit('one')
os.kill(os.getpid(), signal.SIGKILL)
"""


class SlotsTestCase(base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        lease = self.reserve(0, 10_000, self.places(2), active=True)
        self.reservation_id = lease['reservations'][0]['id']
        self.sent, self.at_gate, self.are_there = [], lambda: None, True
        self.listener = self.another()

    def another(self):
        """Return a listener, with a database connection of its own."""
        database = self.db.connect()
        return lost_builds.UnsentSlotBuilds(
            database, self.clock, slots.Slots(database, self.clock),
            self.send, 'decrypted {}'.format)

    def send(self, call, apart, gate):
        if not self.are_there:
            return
        self.at_gate()
        if (deadline := gate(['one', 'two'])) is not None:
            self.assertFalse(deadline.passed())
            self.sent.append((call, apart))

    def take(self):
        self.leases.slots.take(
            self.reservation_id, 'project', ['one', 'two'], 'encrypted')

    def look(self, after=dispatch.HEAD_START):
        self.clock.advance(after)
        self.listener.send()

    def left(self):
        with self.database.reader() as session:
            return session.scalars(sa.select(models.SlotBuild.server_id)).all()


class TestProcessDeath(SlotsTestCase):

    def die(self, dispatches):
        done = subprocess.run(
            [sys.executable, '-c', DIES, self.db.url,
             str(self.clock.now()), self.reservation_id, str(dispatches)],
            cwd=imports.ROOT, env={**os.environ}, timeout=60)
        self.assertEqual(-signal.SIGKILL, done.returncode)

    def test_build_of_killed_process_is_sent(self):
        self.die(dispatches=False)
        self.look(dispatch.HEAD_START - 1)
        self.assertEqual([], self.sent)
        self.look(1)
        self.assertEqual([('decrypted encrypted', False)], self.sent)
        self.assertEqual([], self.left())

    def test_build_possibly_sent_by_killed_process_is_not_sent(self):
        self.die(dispatches=True)
        self.look()
        self.assertEqual([], self.sent)


class TestSentOnce(SlotsTestCase):

    def test_request_and_two_listeners_send_build_once(self):
        self.take()
        barrier, rights = threading.Barrier(3), []
        self.at_gate = lambda: barrier.wait(20)

        def request():
            barrier.wait(20)
            rights.append(self.leases.slots.take_permit('one'))

        self.clock.advance(dispatch.HEAD_START)
        threads = [self.in_thread(work) for work in (
            request, self.listener.send, self.another().send)]
        for thread in threads:
            thread.join(60)
        self.assertEqual(1, sum(rights) + len(self.sent))
        self.assertEqual([], self.left())

    def test_protection_costs_boot_two_statements(self):
        statements = []
        sa.event.listen(
            self.database.engine, 'before_cursor_execute',
            lambda _connection, _cursor, statement, *_more: (
                statement.startswith('BEGIN') or
                statements.append(statement)))
        taken = self.leases.slots
        for _warm in range(2):
            del statements[:]
            taken.take(self.reservation_id, 'project', ['three'])
            before = [*statements]
            taken.free(['three'])
        del statements[:]
        taken.take(self.reservation_id, 'project', ['three'], 'encrypted')
        taken.take_permit('three')
        self.assertEqual(len(before) + 2, len(statements),
                         (before, statements))


class TestRetries(SlotsTestCase):

    scenarios = databases.SCENARIOS

    def test_build_of_deleted_servers_is_dropped(self):
        self.take()
        self.are_there = False
        self.look()
        self.assertEqual([], self.left())

    def test_failed_build_is_retried_for_a_limited_time(self):
        def fail():
            raise errors.CloudUnavailable('No answer')

        self.take()
        self.at_gate = fail
        self.look()
        self.look(1800)
        self.assertEqual(['one'], self.left())
        self.at_gate = lambda: None
        self.look()
        self.assertEqual(1, len(self.sent))
        self.leases.slots.free(['one', 'two'])
        self.take()
        self.at_gate = fail
        self.look(3601)
        self.assertEqual(([], 1), (self.left(), len(self.sent)))

    def test_build_with_future_time_is_sent_at_once(self):
        self.clock.step(3600)
        self.take()
        self.clock.step(-3600)
        self.look(0)
        self.assertEqual(1, len(self.sent))
