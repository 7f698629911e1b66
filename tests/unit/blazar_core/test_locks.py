# SPDX-License-Identifier: Apache-2.0

"""Locks of leases: who waits for which, and what time it is afterwards."""

from concurrent import futures

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.leases import views
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_admission_queue
from tests.unit.blazar_core import test_members

load_tests = databases.load_tests


class TestSeveralLeases(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def test_locking_some_leases_does_not_wait_for_others(self):
        self.host('one', VCPU=64)
        leases = sorted(self.lease(50, 100)['id'] for _number in range(60))

        def lock_some():
            with self.database.writer() as session:
                api.lock(session, *leases[:20])

        with self.db.connect().writer() as session, (
                futures.ThreadPoolExecutor(1)) as pool:
            api.lock(session, leases[40])
            pool.submit(lock_some).result(10)


class Waiting:
    """Another process holds the lock of a lease until its end is due."""

    scenarios = databases.RACES

    def decide(self, lease, work, *args):
        """Return the result of work that waits for the lock meanwhile."""
        found = []

        def attempt():
            try:
                found.append(work(*args))
            except errors.BlazarError as exc:
                found.append(exc)

        other = self.db.connect()
        with other.writer() as session:
            api.locked(session, lease['id'])
            thread = self.db.meanwhile(attempt)
            self.clock.advance(lease['end_date'] - self.clock.now())
        thread.join(20)
        return found.pop()


class TestAddServers(Waiting, test_members.AddServersTestCase):

    def test_no_server_is_added_after_lease_end(self):
        lease = self.adopt(self.runs(1))
        self.assertIsInstance(
            self.decide(lease, self.join, lease, self.runs(2)),
            errors.Conflict)


class TestCapacity(Waiting, test_admission_queue.AdmissionQueueTestCase):

    def test_no_slot_is_taken_after_lease_end(self):
        lease = self.fill(end=100)
        self.assertIsInstance(self.decide(
            lease, self.leases.slots.take, lease['reservations'][0]['id'],
            'project', ['one']), errors.Conflict)

    def test_waiting_lease_is_not_admitted_after_its_end(self):
        first = self.fill(end=1000)
        lease = self.asked(amount=2, end=100)
        self.assertEqual('WAITING', lease['status'])
        self.free(first)
        self.decide(lease, self.look)
        self.assertNotIn(views.get(self.database, lease['id'])['status'],
                         ('PENDING', 'ACTIVE'))
