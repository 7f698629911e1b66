# SPDX-License-Identifier: Apache-2.0

"""Series: the largest recurring lease, and how long others wait for it.

100 occurrences with 10 servers each, on different hosts, in a cloud of 300
hosts and 30,000 bookings, on MariaDB and on PostgreSQL. The series is created,
renamed, and moved to another hour. Meanwhile another process creates and
deletes leases of one server; wait_ms is how much longer its slowest lease
takes than the slowest in the same time without the series (the best of three
rounds, on the slower database). seconds is the time of the request itself,
without Nova.
"""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
import typing as ty
import unittest

from oslo_utils import uuidutils

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_nova.schemas import lease_views
from blazar_nova.services import limit_requests
from tests import databases
from tests import driven
from tests.unit.blazar_core import racer

HOSTS, BOOKINGS, LEASES = 300, 30_000, 6_000
OCCURRENCES, SERVERS = 100, 10
#: Minimum seconds for which leases are created without the series.
ALONE = 1.5


class Standing(clocks.SystemClock):
    """A clock with a fixed date, whose elapsed time runs."""

    def now(self) -> int:
        return worlds.NOW


class Member:
    """A member of a project, who makes requests."""

    def __init__(self, url: str, project_id: str) -> None:
        self.database = filled.connect(url)
        self.project_id = project_id
        clock = Standing()
        search = admissions.Admission(self.database, clock)
        with search.index.fresh():
            pass
        self.types = racer.FileType.types(os.devnull)
        self.leases = leases.Leases(
            self.database, clock, search, self.types)
        conf = databases.configuration(url)
        conf.set_override('max_leases_per_project', 1000, 'blazar_enforcement')
        self.limits = limit_requests.LimitRequests(
            limits.Limits(conf, self.database, clock), self.types,
            lease_views.LeaseViews(self.types), background.Background())

    def new(self, request: requests.LeaseRequest, count: int,
            affinity: model.Affinity, recurrence_id: str | None = None,
            ) -> new_leases.NewLease:
        return new_leases.NewLease(
            self.project_id, 'user', request, (new_leases.NewReservation(
                model.Demand({'VCPU': 1, 'MEMORY_MB': 1024, 'DISK_GB': 20},
                             count, affinity), params={}, spec={}),),
            recurrence_id=recurrence_id)

    def granted(self, series: ty.Sequence[new_leases.NewLease],
                ) -> list[new_leases.NewLease]:
        granted = self.limits.check_all([
            self.limits.asked_of(one, False) for one in series])
        return [dataclasses.replace(one, granted=granted) for one in series]

    def plain(self) -> None:
        """Make the most usual request: a server for an hour."""
        start = worlds.NOW + worlds.DAY
        new, = self.granted([self.new(requests.LeaseRequest(
            'lease', model.Window(start, start + 3600), None, (), 'delete',
            False), 1, model.Affinity.NONE)])
        driven.withdraw(
            self.leases, self.leases.creation.create(new, None)['id'])

    def make(self) -> str:
        """Create the largest series; return its id."""
        first = worlds.NOW + worlds.DAY // 2
        windows = tuple(model.Window(
            first + number * worlds.DAY, first + number * worlds.DAY + 3600)
            for number in range(OCCURRENCES))
        asked = requests.Recurrence(
            f'FREQ=DAILY;COUNT={OCCURRENCES}', 'UTC', 'delete', False, windows)
        recurrence_id = uuidutils.generate_uuid()
        series = self.granted([
            self.new(one, SERVERS, model.Affinity.DIFFERENT, recurrence_id)
            for one in requests.LeaseRequest(
                'series', windows[0], None, (), 'delete', False,
                recurrence=asked).occurrences])
        recurring = self.leases.series
        fits, left_out = recurring.fitting(series, False)
        recurring.create(recurrence_id, asked, fits, [None] * len(fits),
                         left_out)
        return recurrence_id

    def rename(self, recurrence_id: str) -> None:
        self.leases.series.rename(recurrence_id, 'other')

    def change(self, recurrence_id: str) -> None:
        """Move all occurrences together, as the API does."""
        series = self.leases.series.unfinished(recurrence_id)
        ids, changes = frozenset(one['id'] for one in series), {}
        for one in reversed(series):
            change = updates.LeaseChange(start=one['start_date'] + 3600,
                                         end=one['end_date'] + 3600)
            granted = self.limits.check(self.limits.asked_of_change(
                one, change, beside=ids - {one['id']}))
            changes[one['id']] = dataclasses.replace(change, granted=granted)
        self.leases.updates.update_all(changes)

    def delete(self, recurrence_id: str) -> None:
        for one in self.leases.series.unfinished(recurrence_id):
            driven.withdraw(self.leases, one['id'])


def wait(url: str) -> None:
    """Create leases until the input ends; print the slowest time after each
    line of input, and start over.
    """
    member = Member(url, 'other')
    member.plain()
    os.set_blocking(sys.stdin.fileno(), False)
    longest = 0.0
    print('ready', flush=True)
    while True:
        began = time.perf_counter()
        with contextlib.suppress(errors.ConcurrentUpdate):
            member.plain()
        longest = max(longest, time.perf_counter() - began)
        said = os.read(sys.stdin.fileno(), 100) if _has_input() else None
        if said == b'':
            return
        if said:
            print(json.dumps(longest), flush=True)
            longest = 0.0


def _has_input() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Waiter:
    """Another process, which creates leases all the time."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'benchmarks.series', url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def longest(self) -> float:
        """Return the slowest time since the last call, in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write('\n')
        self._process.stdin.flush()
        return float(json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Cost(ty.NamedTuple):
    """Costs of a request in seconds."""

    wait: float
    own: float


def measure(kind: str, size: int) -> dict[str, Cost]:
    """Return the costs of each request on a database: the best of some rounds.
    """
    found: dict[str, list[Cost]] = {}
    with servers.place(kind) as place:
        filled.fill(place.url, worlds.parts(HOSTS // size, BOOKINGS // size),
                    LEASES // size, events=True)
        member = Member(place.url, 'mine')
        waiter = Waiter(place.url)

        def timed(name: str, work: ty.Callable[[], ty.Any]) -> ty.Any:
            waiter.longest()
            began = time.perf_counter()
            answer = work()
            own = time.perf_counter() - began
            longest = waiter.longest()
            time.sleep(max(own, ALONE / size))
            found.setdefault(name, []).append(
                Cost(max(0, longest - waiter.longest()), own))
            return answer

        for _round in range(records.ROUNDS):
            series = timed('make', member.make)
            timed('rename', lambda: member.rename(series))
            timed('change', lambda: member.change(series))
            member.delete(series)
        waiter.close()
        member.database.engine.dispose()
    return {name: Cost(min(one.wait for one in some),
                       min(one.own for one in some))
            for name, some in found.items()}


def run(quick: bool) -> ty.Iterator[records.Record]:
    costs = []
    for kind in ('mariadb', 'postgresql'):
        with contextlib.suppress(unittest.SkipTest):
            costs.append(measure(kind, 10 if quick else 1))
            print(f'  {kind}: {costs[-1]}', flush=True)
    for name in ('make', 'rename', 'change'):
        if costs:
            of_all = [one[name] for one in costs]
            yield records.Record(f'abuse.{name}_series', 'wait_ms', 1000 * max(
                one.wait for one in of_all))
            yield records.Record(f'abuse.{name}_series', 'seconds', max(
                one.own for one in of_all))


if __name__ == '__main__':
    wait(sys.argv[1])
