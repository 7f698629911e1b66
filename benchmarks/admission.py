# SPDX-License-Identifier: Apache-2.0

"""Admissions: leases created by four processes concurrently, per database.

1,000 hosts; each process admits one server after the other, for an hour to two
weeks within the next year. admission is the search and the guarded decision,
which writes a booking; lease is Leases.create, which also writes the lease,
its reservation, three events and the deferred build: nine rows instead of
three, in eight statements instead of four. pack is the default choice of
hosts, by which all processes prefer the same ones; spread chooses at random.
No commit waits for a disk (see benchmarks/servers.py); SQLite is in WAL mode
with synchronous=OFF.

retries_pct: repeated transactions per 100 admissions. wall_us: time per
admission, all processes together (1,000 us are 1,000/s). client_ms and
server_ms: CPU time per admission; cpu_bound_per_s is the rate of two cores
without any idle time.

The records with .parts are from one process that admits alone: microseconds
of each part of an admission (us), and the CPU time in them (cpu_us); the
difference is waiting for the database. follow reads the decisions of others,
search finds hosts, read reads these with their bookings, take increases their
generations, note writes the changes, book writes the bookings; rest is
everything else, in particular the other rows of a lease.
"""

import collections
import contextlib
import functools
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import time
import typing as ty
import unittest
from unittest import mock

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import records
from benchmarks import servers
from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.capacity import host_generations
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from tests import databases
from tests.unit.blazar_core import racer

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

PROCESSES, HOSTS, SECONDS = 4, 1000, 15
DAY = 86_400
CAPACITY = {'VCPU': 64, 'MEMORY_MB': 262_144, 'DISK_GB': 4000}
SIZES = [{'VCPU': n, 'MEMORY_MB': 4096 * n, 'DISK_GB': 20 * n}
         for n in (1, 2, 4, 8)]
#: Number of admissions whose parts are measured, and the parts' functions.
ALONE = 500
PARTS: dict[str, tuple[ty.Any, str]] = {
    'follow': (booking_index.Index, '_refresh'),
    'search': (selection.Selection, 'together'), 'read': (ledger, '_read'),
    'take': (host_generations, '_take'), 'note': (host_generations, 'advance'),
    'book': (ledger, 'add')}
STRATEGIES: dict[str, selection.Strategy] = {
    'pack': selection.pack, 'spread': selection.spread}


def run(quick: bool) -> ty.Iterator[records.Record]:
    for kind, strategy, what in itertools.product(
            servers.KINDS, STRATEGIES, ('admission', 'admission.lease')):
        try:
            with servers.place(kind) as place:
                name = f'{what}.{kind}.{strategy}'
                yield from measure(name, place, (what, strategy),
                                   1 if quick else SECONDS)
                yield from parts(f'{name}.parts', place, (what, strategy),
                                 10 if quick else ALONE)
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


def add_hosts(url: str, count: int = HOSTS) -> None:
    """Add identical hosts to the database."""
    database = api.Database(databases.configuration(url))
    with database.writer() as session:
        for number in range(count):
            inventory.record_host(session, int(time.time()), model.HostFacts(
                uuidutils.generate_uuid(), f'host{number}',
                f'host{number}', CAPACITY), {})
    database.engine.dispose()


def measure(name: str, place: servers.Place, work: ty.Sequence[str],
            seconds: float) -> ty.Iterator[records.Record]:
    """Run the processes for a number of seconds."""
    add_hosts(place.url)
    processes = [subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.admission',
         place.url, *work, str(number), str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(PROCESSES)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    answers, server = servers.answers(place, processes)
    took = [one for answer in answers for one in answer['took']]
    rate = sum(len(answer['took']) / answer['seconds'] for answer in answers)
    client = sum(answer['cpu'] for answer in answers)
    yield records.Record(name, 'per_second', rate)
    yield records.Record(name, 'wall_us', 1e6 / rate)
    for percent in (50, 95, 99):
        yield records.Record(name, f'p{percent}_ms',
                             records.percentile(took, percent))
    yield records.Record(name, 'retries_pct', 100 * sum(
        sum(answer['disturbed'].values()) for answer in answers) / len(took))
    yield records.Record(name, 'client_ms', client * 1000 / len(took))
    yield records.Record(name, 'server_ms', server * 1000 / len(took))
    yield records.Record(name, 'cpu_bound_per_s',
                         2 * len(took) / (client + server))


def parts(name: str, place: servers.Place, work: ty.Sequence[str],
          number: int) -> ty.Iterator[records.Record]:
    """Admit in this process only."""
    worker, meter = Worker(place.url, *work, 0), Meter()
    with contextlib.ExitStack() as stack:
        for part, (where, named) in {**PARTS, 'commit': (
                worker.database.engine.dialect, 'do_commit')}.items():
            stack.enter_context(mock.patch.object(
                where, named, meter.watching(part, getattr(where, named))))
        meter.switch('rest')
        for _one in range(number):
            worker.admit(worker.window())
        meter.switch('')
    worker.database.engine.dispose()
    for part in meter.wall.keys() - {''}:
        for metric, spent in (('us', meter.wall), ('cpu_us', meter.cpu)):
            yield records.Record(
                name, f'{part}_{metric}', spent[part] * 1e6 / number)


class Meter:
    """Seconds of each part, excluding the parts nested in it.

    :ivar wall: elapsed time by part
    :ivar cpu: CPU time of this thread by part
    """

    def __init__(self) -> None:
        self.wall: collections.Counter[str] = collections.Counter()
        self.cpu: collections.Counter[str] = collections.Counter()
        self._part, self._since = '', (0.0, 0.0)

    def switch(self, part: str) -> str:
        """Start another part; return the previous one."""
        now, was = (time.perf_counter(), time.thread_time()), self._part
        self.wall[was] += now[0] - self._since[0]
        self.cpu[was] += now[1] - self._since[1]
        self._part, self._since = part, now
        return was

    def watching(self, part: str, call: ty.Callable[P, R],
                 ) -> ty.Callable[P, R]:
        """Return a function that is measured as a part."""
        @functools.wraps(call)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            was = self.switch(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.switch(was)

        return watched


class Worker:
    """One of the processes."""

    def __init__(self, url: str, what: str, strategy: str, seed: int) -> None:
        self.dice = random.Random(seed)
        clock = clocks.SystemClock()
        self.now = clock.now()
        self.database = api.Database(databases.configuration(url))
        search = admissions.Admission(
            self.database, clock, STRATEGIES[strategy])
        self.search = search
        self.leases = leases.Leases(
            self.database, clock, search, racer.FileType.types(os.devnull))
        self.reservation = self.lease(self.window())['reservations'][0]['id']
        self.admit = {'admission.lease': self.lease,
                      'admission': self.book}[what]
        self.disturbed: collections.Counter[str] = collections.Counter()
        # Warm up: caches, connections and compiled statements.
        for _time in range(20):
            self.admit(self.window())

    def window(self) -> model.Window:
        """Return a window of some hours or days in the next year."""
        start = self.now + self.dice.randrange(DAY, 365 * DAY)
        return model.Window(start, start + int(
            3600 * 336 ** self.dice.random()))

    def book(self, window: model.Window) -> None:
        """Add a server to an existing reservation."""
        demand = model.Demand(self.dice.choice(SIZES))

        def write(connection: sa.Connection, picked: selection.Picked,
                  ) -> None:
            edits = [ledger.Edit(None, ledger.NewBooking(
                self.reservation, host_id, uuidutils.generate_uuid(), window,
                demand.resources)) for host_id in picked[0]]
            ledger.decide(connection, self.now, edits)
            ledger.add(connection, self.now, edits, {})

        self.search.admit([demand], window, write)

    def lease(self, window: model.Window) -> dict[str, ty.Any]:
        """Create a lease of one server."""
        return self.leases.creation.create(new_leases.NewLease(
            'project', 'user', requests.LeaseRequest(
                name='lease', window=window, before_end=window.end - 600,
                events=(), on_end='delete', starts_now=False),
            (new_leases.NewReservation(
                model.Demand(self.dice.choice(SIZES)),
                (uuidutils.generate_uuid(),)),)), 'encrypted')

    def work(self, seconds: float) -> dict[str, ty.Any]:
        """Admit for a number of seconds."""
        took = []
        cpu, start = time.process_time(), time.perf_counter()
        with mock.patch('blazar_core.db.api.is_disturbance',
                        functools.partial(self._note, api.is_disturbance)):
            while (begin := time.perf_counter()) < start + seconds:
                self.admit(self.window())
                took.append((time.perf_counter() - begin) * 1000)
        return {'took': took, 'disturbed': self.disturbed,
                'seconds': time.perf_counter() - start,
                'cpu': time.process_time() - cpu}

    def _note(self, is_disturbance: ty.Callable[[BaseException], bool],
              exc: BaseException) -> bool:
        answer = is_disturbance(exc)
        self.disturbed[type(exc).__name__] += answer
        return answer


def main(arguments: ty.Sequence[str]) -> None:
    """Run the benchmark; with arguments, one of its processes."""
    if not arguments:
        table = records.Table()
        for record in run(quick=False):
            table.add(record, None)
        table.close()
        return
    url, what, strategy, seed, seconds = arguments
    logging.disable()
    worker = Worker(url, what, strategy, int(seed))
    print('ready', flush=True)
    sys.stdin.read()
    print(json.dumps(worker.work(float(seconds))), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
