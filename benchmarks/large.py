# SPDX-License-Identifier: Apache-2.0

"""Leases of many servers, and the costs of a thousand hosts.

make: a lease of one server on each of 1,000 hosts; end: its withdrawal.
statements does not count begin and commit. run and gone: 400 servers of one
lease are observed one after the other as running, and as deleted; seconds for
all of them.

``beside``: while another process books twenty servers a second on the same
hosts, leases of all hosts are created, one after the other. unmade_pct: how
many of them failed; slowest_s: time of the slowest; others_unmade_pct: how
many of the other process's leases failed meanwhile.
"""

import json
import logging
import subprocess
import sys
import threading
import time
import typing as ty
import unittest

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import admission
from benchmarks import records
from benchmarks import servers
from blazar_core.capacity import admissions
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import handlers
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base

HOSTS, SERVERS, LEASES = 1000, 400, 5
#: Seconds between two small leases.
PACE = 0.05


def run(quick: bool) -> ty.Iterator[records.Record]:
    hosts, count = (50, 10) if quick else (HOSTS, SERVERS)
    for kind in servers.KINDS:
        try:
            with servers.place(kind) as place:
                admission.add_hosts(place.url, hosts)
                yield from measure(f'large.{kind}', place, hosts, count)
            with servers.place(kind) as place:
                admission.add_hosts(place.url, hosts)
                yield from beside(f'large.{kind}.beside', place, hosts,
                                  1 if quick else LEASES)
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


class LeaseMaker:
    """Creates leases of servers on different hosts in a database."""

    def __init__(self, url: str, strategy: str = 'pack') -> None:
        self.clock = clocks.SystemClock()
        self.database = api.Database(databases.configuration(url))
        self.admission = admissions.Admission(
            self.database, self.clock, admission.STRATEGIES[strategy])
        self.types = resource_types.ResourceTypes({}, base.FakeType())
        self.leases = leases.Leases(
            self.database, self.clock, self.admission, self.types)
        self.statements = 0
        sa.event.listen(self.database.engine, 'before_cursor_execute',
                        self._count)

    def _count(self, _connection: ty.Any, _cursor: ty.Any, statement: str,
               *_rest: ty.Any) -> None:
        self.statements += not statement.startswith('BEGIN')

    def make(self, count: int, vcpus: int) -> dict[str, ty.Any]:
        """Create a lease from tomorrow on, of servers on different hosts."""
        start = self.clock.now() + 86_400
        return self.leases.creation.create(new_leases.NewLease(
            'project', 'user', requests.LeaseRequest(
                name='large', window=model.Window(start, start + 3600),
                before_end=None, events=(), on_end='delete',
                starts_now=False),
            (new_leases.NewReservation(
                model.Demand({'VCPU': vcpus}, count,
                             affinity=model.Affinity.DIFFERENT),
                tuple(uuidutils.generate_uuid() for _one in range(count))),
             )), 'encrypted')

    def lifecycle(self, cloud: base.FakeCloud) -> handlers.Handlers:
        return handlers.Handlers(
            databases.configuration(''), self.database, self.clock,
            self.admission, base.integration(
                cloud, self.types, {}, str, lambda _event, _lease: None),
            base.LOST_AFTER)


def measure(name: str, place: servers.Place, hosts: int, count: int,
            ) -> ty.Iterator[records.Record]:
    """Measure a large lease."""
    maker = LeaseMaker(place.url)
    # Warm up: caches, connections and compiled statements.
    driven.withdraw(maker.leases, maker.make(2, 1)['id'])
    made: list[dict[str, ty.Any]] = []
    for what, work in (('make', lambda: made.append(maker.make(hosts, 8))),
                       ('end', lambda: driven.withdraw(
                           maker.leases, made[0]['id']))):
        maker.statements, begin = 0, time.perf_counter()
        work()
        yield records.Record(f'{name}.{what}', 'seconds',
                             time.perf_counter() - begin)
        yield records.Record(f'{name}.{what}', 'statements',
                             maker.statements)
    lease = maker.make(count, 1)
    life = maker.lifecycle(base.FakeCloud())
    life.lease_start.start(lease['id'])
    for what, state in (('run', cloud_api.ServerState.RUNNING),
                        ('gone', cloud_api.ServerState.GONE)):
        maker.statements, begin = 0, time.perf_counter()
        for server_id in lease['reservations'][0]['servers']:
            life.reconciliation.observe(
                server_id, cloud_api.ObservedServer(state))
        yield records.Record(f'{name}.{what}', 'seconds',
                             time.perf_counter() - begin)
        yield records.Record(f'{name}.{what}', 'statements',
                             maker.statements)
    maker.database.engine.dispose()


def beside(name: str, place: servers.Place, hosts: int, count: int,
           ) -> ty.Iterator[records.Record]:
    """Create large leases while another process creates small ones."""
    process = subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.large', place.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    maker, made, slowest = LeaseMaker(place.url), 0, 0.0
    logging.disable(logging.WARNING)
    for _number in range(count):
        begin = time.perf_counter()
        try:
            maker.make(hosts, 4)
            made += 1
        except errors.ConcurrentUpdate:
            pass
        slowest = max(slowest, time.perf_counter() - begin)
    logging.disable(logging.NOTSET)
    process.stdin.close()
    small = json.loads(process.stdout.readline())
    process.wait(60)
    yield records.Record(name, 'unmade_pct', 100 - 100 * made / count)
    yield records.Record(name, 'slowest_s', slowest)
    yield records.Record(name, 'others_unmade_pct', 100 - (
        100 * small['made'] / max(small['asked'], 1)))
    maker.database.engine.dispose()


def small(url: str) -> None:
    """Run the other process: create small leases until its input is closed."""
    logging.disable()
    maker = LeaseMaker(url, 'spread')
    maker.make(1, 1)
    print('ready', flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()),
                     daemon=True).start()
    asked = made = 0
    while not ended.wait(PACE):
        asked += 1
        try:
            maker.make(1, 1)
            made += 1
        except errors.ConcurrentUpdate:
            pass
    print(json.dumps({'asked': asked, 'made': made}), flush=True)


if __name__ == '__main__':
    small(*sys.argv[1:])
