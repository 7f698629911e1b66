# SPDX-License-Identifier: Apache-2.0

"""Processes that do the same at the same instant."""

import atexit
import collections
import functools
import json
import os
import socket
import subprocess
import sys
import time

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import outages
from blazar_core.db import models
from blazar_core.leases import leases
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import oracle

NOW = base.NOW
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *['..'] * 3))
#: The number of processes.
RACERS = 8
#: Seconds until they run: by then the slowest has read the instant.
HEAD_START = 0.01


#: Guards that are disabled in every race: see tests/simulation/guards.py.
MISSING: list[str] = []


class Racers:
    """The processes; they serve one race after the other."""

    def __init__(self, count):
        pairs = [socket.socketpair() for _number in range(count)]
        self.parent = subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-m',
             'tests.unit.blazar_core.racer',
             *(str(theirs.fileno()) for _ours, theirs in pairs)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT,
            pass_fds=[theirs.fileno() for _ours, theirs in pairs])
        self.racers = []
        for ours, theirs in pairs:
            theirs.close()
            self.racers.append(ours.makefile('rw'))
            # The file keeps it open.
            ours.close()
        atexit.register(self.stop)

    def race(self, tasks):
        """Let each process carry out a task, all at the same time."""
        racing = self.racers[:len(tasks)]
        for racer, task in zip(racing, tasks, strict=True):
            print(json.dumps({**task, 'without': [
                *task.get('without', ()), *MISSING]}), file=racer, flush=True)
        for racer in racing:
            assert self.hear(racer) == 'ready'
        go = time.time() + HEAD_START
        for racer in racing:
            print(go, file=racer, flush=True)
        return [json.loads(self.hear(racer)) for racer in racing]

    def hear(self, racer):
        line = racer.readline()
        assert line, 'A racer has died; its traceback is on stderr.'
        return line.strip()

    def stop(self):
        for racer in self.racers:
            racer.close()
        self.parent.wait(20)


@functools.cache
def racers():
    return Racers(RACERS)


class RaceTestCase(base.LeaseTestCase):

    scenarios = [databases.SCENARIOS[0], *databases.SERVERS]

    def race(self, count, without=(), options=None, **task):
        """Return the answers of processes that do the same at once.

        Values of a task that are functions are called for each process.
        """
        return racers().race([{
            'url': self.db.url, 'now': NOW, 'without': without,
            'options': options or {}, **{
                key: value() if callable(value) else value
                for key, value in task.items()}}
            for _number in range(count)])

    def wanted(self, start=0, end=10, count=1, vcpus=1, **values):
        """Return a lease for a racer to create."""
        return {'start': NOW + start, 'end': NOW + end,
                'resources': {'VCPU': vcpus}, 'server_ids': [
                    uuidutils.generate_uuid() for _server in range(count)],
                **values}

    def hosts_and_bookings(self):
        """Return hosts and bookings, read without the code under test."""
        with self.db.connect().engine.connect() as connection:
            hosts = connection.execute(sa.text(
                'SELECT id, capacity, hosts.usage FROM hosts ORDER BY id')
            ).all()
            bookings = connection.execute(sa.text(
                'SELECT host_id, start_date, end_date, resources '
                'FROM bookings WHERE host_id IS NOT NULL')).all()
        numbers = {host.id: number for number, host in enumerate(hosts)}
        return ([oracle.Host(decoded(capacity), decoded(usage))
                 for _id, capacity, usage in hosts],
                [oracle.Booking(numbers[host_id], start, end,
                                decoded(resources))
                 for host_id, start, end, resources in bookings])

    def overbooked(self):
        return oracle.overbooked(*self.hosts_and_bookings())

    def clear(self):
        """Delete the leases from the tables."""
        with self.database.writer() as session:
            for table in ('bookings', 'reservations', 'events',
                          'deferred_builds', 'leases', 'changes',
                          'server_moves', 'recurrences'):
                session.execute(sa.text(f'DELETE FROM {table}'))
        self.leases = leases.Leases(
            self.database, self.clock,
            admissions.Admission(self.database, self.clock), self.types)


def decoded(value):
    """Return decoded JSON, which only some drivers decode themselves."""
    return json.loads(value) if isinstance(value, str) else value


def lateness(number):
    """Return by how many seconds, at most, one side of a race starts later.

    It depends on the round: without a delay the machine decides which side is
    first, and a slow machine needs a longer one for the other to be first.
    """
    return number % 2 * 0.1 * 2 ** (number // 10)


def outcomes(answers):
    """Return how many answers had each outcome."""
    return +collections.Counter(
        outcome for each in answers for one in each for outcome in one)


class FailedTestCase(RaceTestCase):
    """A race about a failed host."""

    # The writers of SQLite wait for each other, with the guard or without.
    scenarios = databases.RACES

    def fail_host(self):
        """Add an outage of the host with its booking; return its id."""
        with self.database.writer() as session:
            outage = models.Outage(
                host_id=session.scalars(sa.select(models.Host.id).where(
                    models.Host.uuid == self.uuid)).one(),
                kind=outages.FAILURE, reason='', seen_at=NOW)
            session.add(outage)
            session.flush()
            outages.begin(session, NOW, outage, NOW + 100)
            return outage.host_id
