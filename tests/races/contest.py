# SPDX-License-Identifier: Apache-2.0

"""A race of many processes on one database, and its results. ::

    with contest.Contest(urls, seed=1) as race:
        race.run(30)
        race.problems()         # [] if all is well
"""

import collections
import json
import os
import subprocess
import sys
import time
import typing as ty

from oslo_utils import uuidutils

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from tests import databases
from tests.races import checker
from tests.races import contender

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
#: The number of processes.
PROCESSES = 8
#: The capacity of each host.
CAPACITY = {'VCPU': 16, 'MEMORY_MB': 32768}
HOSTS = 4


class Contest:
    """The processes, on the same hosts.

    :ivar outcomes: how often each operation had each outcome
    :ivar disturbed: how often a transaction had to be run again, and why
    :ivar failures: tracebacks of unexpected errors
    :param urls: of one database, through any servers; the processes are
        distributed over them
    :param without: guards that are disabled (:data:`racer.GUARDS`)
    :param retries: the option admission_retries
    """

    def __init__(self, urls: ty.Sequence[str], seed: int,
                 without: ty.Sequence[str] = (), retries: int = 20,
                 hosts: int = HOSTS) -> None:
        self.urls = [urls[number % len(urls)]
                     for number in range(PROCESSES)]
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.disturbed: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self._add_hosts(urls[0], hosts)
        self._processes = [subprocess.Popen(
            [sys.executable, '-W', 'ignore', '-m', 'tests.races.contender'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT) for _number in range(PROCESSES)]
        self._ask([{'do': 'open', 'url': url, 'without': without,
                    'seed': seed * 1000 + number, 'retries': retries}
                   for number, url in enumerate(self.urls)])

    def __enter__(self) -> 'Contest':
        return self

    def __exit__(self, *_error: ty.Any) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()

    def _add_hosts(self, url: str, count: int) -> None:
        database = api.Database(databases.configuration(url))
        with database.writer() as session:
            for number in range(count):
                inventory.record_host(
                    session, int(time.time()), model.HostFacts(
                        uuidutils.generate_uuid(), f'host{number}',
                        f'host{number}', CAPACITY), {'somebody': {'VCPU': 2}})
        database.engine.dispose()

    def _ask(self, tasks: ty.Sequence[ty.Any]) -> list[ty.Any]:
        """Give each process a task; return their answers."""
        for process, task in zip(self._processes, tasks, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(task) + '\n')
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    'A contender has died; its traceback is on stderr.')
            answers.append(json.loads(line))
        return answers

    def run(self, seconds: float) -> None:
        """Let them race."""
        until = time.time() + seconds
        self.outcomes.clear()
        self.disturbed.clear()
        for answer in self._ask(
                [{'do': 'race', 'until': until}] * PROCESSES):
            self.outcomes.update(answer['outcomes'])
            self.disturbed.update(answer['disturbed'])
            self.failures += answer['failures']

    def done(self) -> dict[str, int]:
        """Return how often each operation succeeded."""
        return {name: self.outcomes[f'{name} done']
                for name in contender.WEIGHTS}

    def problems(self) -> list[str]:
        """Return all violations in the tables."""
        return checker.problems(checker.read(self.urls[0]))

    def wrong_pictures(self) -> list[str]:
        """Return where an index differs from the tables; the last is new."""
        tables = checker.read(self.urls[0])
        now = int(time.time())
        instants = sorted({now, *(
            date for one in tables.bookings
            for date in (one.start_date, one.end_date) if date > now)})
        database = api.Database(databases.configuration(self.urls[0]))
        anew = contender.picture(admissions.Admission(
            database, clocks.SystemClock()), instants)
        database.engine.dispose()
        true = true_picture(tables, instants)
        return [difference(number, told, true) for number, told in enumerate(
            [*self._ask([{'do': 'picture', 'instants': instants}] *
                        PROCESSES), anew]) if told != true]


def true_picture(tables: checker.Tables, instants: ty.Sequence[int],
                 ) -> dict[str, ty.Any]:
    """Return the correct :meth:`contender.Contender.picture`."""
    pictures = {}
    for host in tables.hosts:
        levels = {rc: checker.booked(tables, host.id, rc) for rc in CAPACITY}
        pictures[str(host.id)] = {
            'host': [checker.decoded(host.capacity),
                     checker.decoded(host.usage), host.generation,
                     checker.decoded(host.properties)],
            'booked': [{rc: amount for rc in CAPACITY if (
                amount := level_at(levels[rc], start))}
                for start in instants[:-1]]}
    return pictures


def level_at(levels: ty.Mapping[int, int], instant: int) -> int:
    """Return the level that the last step until an instant led to."""
    return levels[max(at for at in levels if at <= instant)] if any(
        at <= instant for at in levels) else 0


def difference(number: int, told: dict[str, ty.Any],
               true: dict[str, ty.Any]) -> str:
    """Return where a picture is wrong first."""
    for host_id, host in true.items():
        mine = told.get(host_id, {'host': None, 'booked': []})
        if mine['host'] != host['host']:
            return (f'process {number}: host {host_id} is {mine["host"]}, '
                    f'should be {host["host"]}')
        for place, (one, other) in enumerate(
                zip(mine['booked'], host['booked'], strict=True)):
            if one != other:
                return (f'process {number}: host {host_id} has {one} booked '
                        f'in stretch {place}, should be {other}')
    return f'process {number} knows hosts that do not exist'
