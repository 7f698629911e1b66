# SPDX-License-Identifier: Apache-2.0

"""Usage is exact though processes are killed between any two statements, and
though two listeners do the same at once.
"""

import collections
import os
import signal
import traceback
from unittest import mock

import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import racer
from tests.unit.blazar_core import test_usage_records

load_tests = databases.load_tests

NOW = base.NOW
#: No action has as many statements.
MANY = 200


class ProcessTestCase(test_usage_records.UsageTestCase):
    """Actions are carried out by processes of their own."""

    scenarios = databases.SERVERS
    kind = 'mariadb'

    def setUp(self):
        super().setUp()
        self.observer = test_usage_records.Observer(self.database)
        self.begun = self.clock.now()

    def fork(self, action, dies_at=0, wait=None):
        """Carry out an action in another process.

        :param dies_at: the number of the statement, or of the end of a
            transaction, before which it is killed; 0: never
        :param wait: what it reads first, to begin with another one
        :returns: its id
        """
        pid = os.fork()
        if pid:
            return pid
        try:
            # By connections of its own: those of the parent are not shared.
            self.database = api.Database(self.db.conf)
            self.admission = admissions.Admission(self.database, self.clock)
            self.leases = leases.Leases(
                self.database, self.clock, self.admission, self.types)
            self.lifecycle = self.new_handlers(self.database)
            self.lifecycle.lease_start.start('nothing')
        except errors.NotFound:
            pass
        try:
            if wait is not None:
                os.read(wait, 1)
            self.count(dies_at)
            action()
        except errors.BlazarError:
            # It was done, or others have changed the lease meanwhile.
            pass
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def count(self, dies_at):
        left = [dies_at]

        def note(*_args):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        for event in ('before_cursor_execute', 'commit'):
            sa.event.listen(self.database.engine, event, note)

    def ends(self, *pids):
        """Wait for processes; returns whether none of them was killed."""
        found = [os.waitpid(pid, 0)[1] for pid in pids]
        self.assertEqual(set(), {*found} - {0, signal.SIGKILL})
        return not any(found)

    def pass_time(self):
        """Some seconds, in which the observer counts."""
        now = self.clock.now()
        self.observer.watch(now, self.clock.advance(3))

    def check(self):
        """Records are what the bookings say: from now on, and since the
        beginning what the observer has counted.
        """
        self.pass_time()
        now = self.clock.now()
        with self.database.reader() as session:
            lost = session.scalars(sa.select(models.Booking.id).where(
                models.Booking.host_id.is_(None))).all()
        self.assertEqual([], lost)
        for kind in ('reserved', 'used'):
            self.assertEqual(
                self.observer.total(kind, self.begun, now),
                self.vcpus(self.begun - NOW, now - NOW)[
                    1 if kind == 'reserved' else 2], kind)
        self.assertEqual(*self.to_come(now))

    def to_come(self, now):
        """Amounts from now on by when they begin and end: of bookings, and
        of records.
        """
        booked, recorded = collections.Counter(), collections.Counter()

        def note(found, kind, lease_id, start, end, amount):
            found[kind, lease_id, max(now, start)] += amount
            found[kind, lease_id, max(now, end)] -= amount

        with self.database.reader() as session:
            for row in session.scalars(sa.select(models.Booking)):
                lease = row.reservation.lease
                if lease.status not in states.SEEKING:
                    note(booked, 'reserved', lease.id, row.start_date,
                         row.end_date, row.resources['VCPU'])
                if row.running:
                    booked['used', lease.id, now] += row.resources['VCPU']
            for row in session.scalars(sa.select(models.UsageRecord)):
                used = row.kind == usage_records.Kind.USED
                note(recorded, 'used' if used else 'reserved', row.lease_id,
                     row.start_date, row.end_date,
                     row.sign * row.resources['VCPU'])
        far = {key: value for key, value in recorded.items()
               if value and key[2] < 10 ** 11}
        return {key: value for key, value in booked.items() if value}, far

    def die_everywhere(self, action, *args):
        """Have an action die before each of its statements, and end it.

        :returns: how often it died
        """
        for dies_at in range(1, MANY):
            if self.ends(self.fork(lambda: action(*args), dies_at)):
                self.check()
                return dies_at - 1
            self.check()
        raise AssertionError('It has too many statements.')

    # -- actions --------------------------------------------------------------

    def create(self, start):
        self.lease(self.clock.now() - NOW + start, 5000, count=2)

    def see(self, server_ids, name=None):
        """A listener finds that servers run, or are gone."""
        for server_id in server_ids:
            if name is None:
                self.cloud.servers.pop(server_id, None)
            else:
                self.cloud.servers[server_id] = cloud_api.ObservedServer(
                    base.State.RUNNING, self.uuid_of(name))
            self.lifecycle.reconciliation.check(server_id)


class TestDeaths(ProcessTestCase):

    def story(self):
        """Do all that changes usage; returns how often a process died."""
        lease = self.lease(0, 5000, count=2)
        (server_id, other), died = base.servers_of(lease), 0
        died += self.die_everywhere(self.create, 100)
        for server_ids, name in (
                ([server_id, other], 'one'), ([other], 'two'),
                ([other], None)):
            died += self.die_everywhere(self.see, server_ids, name)
        change = {'id': lease['id']}
        for end in (6000, 4000):
            died += self.die_everywhere(
                lambda end=end: self.change(change, end=NOW + end))
        slots = self.reserve(0, 5000, self.places(2, 3), active=True)
        died += self.die_everywhere(lambda: self.change(slots, reservations={
            slots['reservations'][0]['id']: self.places(4, 2)}))
        died += self.die_everywhere(self.hand_over, slots)
        died += self.die_everywhere(
            self.lifecycle_of('lease_end', 'delete'), slots['id'])
        died += self.die_everywhere(
            self.lifecycle_of('lease_end', 'delete'), lease['id'])
        return died + self.die_everywhere(self.see, [server_id])

    def lifecycle_of(self, part, name):
        """A method of the process that it is called in."""
        return lambda *args: getattr(
            getattr(self.lifecycle, part), name)(*args)

    def test_usage_is_exact_wherever_a_process_is_killed(self):
        self.assertLess(50, self.story())

    def test_separate_transaction_for_records_is_detected(self):
        """So that the test would see it."""
        write = usage_records.Records.write

        def apart(records, _connection):
            with self.database.begin() as connection:
                write(records, connection)

        self.enterContext(mock.patch.object(
            usage_records.Records, 'write', apart))
        self.assertRaises(AssertionError, self.story)


class TestTwoListeners(ProcessTestCase):

    def race(self, action):
        """Have two processes do the same at the same time."""
        reading, writing = os.pipe()
        pids = [self.fork(action, wait=reading) for _listener in range(2)]
        os.write(writing, b'go')
        self.assertTrue(self.ends(*pids))
        os.close(reading)
        os.close(writing)
        self.check()

    def story(self, times=3):
        for _time in range(times):
            lease = self.lease(0, 50_000, count=2)
            one, two = base.servers_of(lease)
            self.race(lambda one=one, two=two: self.see([one, two], 'one'))
            self.race(lambda one=one: self.see([one], 'two'))
            self.race(lambda two=two: self.see([two]))
            self.race(lambda lease=lease: self.lifecycle.lease_end.delete(
                lease['id']))
            self.race(lambda one=one: self.see([one]))

    def test_usage_is_exact_with_two_listeners(self):
        self.story()

    def test_events_are_carried_out_once(self):
        self.lease(10, 60, count=2)
        for seconds in (20, 60):
            while self.clock.now() < NOW + seconds:
                self.pass_time()
            self.race(lambda: driven.run_due(self.new_engine(
                f'listener {os.getpid()}')))

    def test_missing_locks_are_detected(self):
        """So that the test would see it."""
        if self.kind != 'mariadb':
            self.skipTest('The database itself ends one of two that meet.')
        self.enterContext(mock.patch.object(api, 'locked', racer.late_lock))
        self.assertRaises(AssertionError, self.story, 30)
