# SPDX-License-Identifier: Apache-2.0

"""Abuse: the most expensive requests that a member can send.

1,000 hosts, 100,000 bookings, SQLite. Requests of each kind are drawn at
random, and the worst ones are varied repeatedly to find worse ones. cpu_s is
the worker's CPU time for the worst one. wait_ms is the longest time for which
another request waits for the index meanwhile (the best of three rounds).
x_plain and wait_x_plain are the ratios to a quote for one server in the same
run. The time that Nova and placement take to find the eligible hosts is not
included.
"""

import dataclasses
import json
import logging
import os
import random
import threading
import time
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import filled
from benchmarks import records
from benchmarks import series
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import property_expressions
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_queries
from blazar_nova.schemas import lease_schema
from tests import driven
from tests.unit.blazar_core import racer

HOSTS, BOOKINGS, LEASES = 1000, 100_000, 20_000
#: Requests that are drawn of each kind, and variations of the worst one.
DRAWN, CHANGED = 40, 40
#: The default of [blazar] max_amount.
MAX_AMOUNT = 1000
#: Seconds between two accesses of the waiting thread.
PAUSE = 0.002
#: Number of plain requests that are measured together.
PLAIN = 50

PUBLIC = ('hypervisor_type', 'vcpus', 'hypervisor_hostname')
DEFAULTS = hint_params.Defaults('now', 86400, 60)

#: A request: the chosen value of each parameter.
Request: ty.TypeAlias = dict[str, ty.Any]

#: The values to choose from, by kind of request. All are within the bounds of
#: the API, as other requests are refused at no cost.
DEMAND = {
    'vcpus': (1, 2, 8, 33, 64), 'affinity': (None, True, False),
    'hours': (1, 24, 24 * 7, 24 * 90, 24 * 365 * 3, 24 * 365 * 900),
    'ahead': (0, 1, 100, 300, 363, 3650),
    'condition': (None, 'vcpus', 'hypervisor_hostname'),
}
SPACE: dict[str, dict[str, tuple[ty.Any, ...]]] = {
    'quote': DEMAND | {
        'reservations': (1, 2, 5, 10, lease_schema.MAX_RESERVATIONS),
        'kinds': (1, 2, 5, 10, lease_schema.MAX_RESERVATIONS),
        'servers': (1, 20, 100, 500, MAX_AMOUNT),
        'mixed': (False, True)},
    'availability': DEMAND | {
        'limit': (1, 10, 100, lease_schema.MAX_LIMIT),
        'days': (1, 30, 365, 36500), 'servers': (1, MAX_AMOUNT)},
    'grow': DEMAND | {
        'servers': (1, 100, 500), 'kept': (1, 100, 500),
        'kept_on': (1, 10, 500), 'kept_kinds': (1, 5, 20)},
    'lease': {
        'reservations': (1, 5, lease_schema.MAX_RESERVATIONS),
        'servers': (1, 100, MAX_AMOUNT),
        'events': (0, 10, requests.MAX_EVENTS), 'hours': (1, 24)},
    'list': {
        'limit': (1, 100, lease_schema.MAX_LIMIT), 'ended': ('true', 'false'),
        'status': (None, 'PENDING', 'TERMINATED'),
        'sort': ('start_date', 'name', 'updated_at:desc,name,status:desc,'
                 'created_at,end_date:desc,id'),
        'start_date': (None, 'now'), 'resource_type': (
            None, 'virtual:instance'), 'marker': (False, True)},
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Costs of a request, for the worker and for another request."""

    cpu: float
    wait: float


class Waiter:
    """Another request, which accesses the index repeatedly.

    :ivar longest: its longest wait, in seconds
    """

    def __init__(self, search: admissions.Admission) -> None:
        self._search = search
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.longest = 0.0

    def __enter__(self) -> 'Waiter':
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.wait(PAUSE):
            began = time.perf_counter()
            # The age does not matter, as the lock is measured.
            with self._search.index.fresh(worlds.YEAR):
                self.longest = max(
                    self.longest, time.perf_counter() - began)


class Member:
    """Makes requests with the parsers of the API."""

    def __init__(self, database: api.Database) -> None:
        self.database = database
        clock = _Standing()
        self.search = admissions.Admission(database, clock)
        with self.search.index.fresh():
            self.hosts = frozenset(self.search.index.ids_by_uuid)
        self.host_ids = [*self.search.index.hosts]
        self.leases = leases.Leases(
            database, clock, self.search, racer.FileType.types(os.devnull))
        self.made: list[str] = []
        self.marker = lease_queries.page(database, lease_queries.Query(
            project_id='project', limit=500))[0][-1]['id']

    def make(self, kind: str, request: Request) -> None:
        """Make a request; it may be refused."""
        try:
            getattr(self, kind)(**request)
        except (errors.Refused, errors.InvalidLeaseParams):
            pass

    def plain(self) -> None:
        """Make the most usual request: a server for a day."""
        self.search.quote(
            [self._demand(1, 1, None, None, 0)], _window(0, 24))

    def quote(self, reservations: int, kinds: int, servers: int, mixed: bool,
              vcpus: int, affinity: bool | None, hours: int, ahead: int,
              condition: str | None) -> None:
        asked = lease_schema.create({
            'start_date': clocks.iso(_window(ahead, hours).start),
            'end_date': clocks.iso(min(
                _window(ahead, hours).end, model.LATEST - 1)),
            'reservations': [{
                'amount': max(1, servers // reservations),
                'vcpus': vcpus, 'memory_mb': 1024 + number % kinds,
                'affinity': (affinity, None)[mixed and number % 2]}
                for number in range(reservations)]},
            worlds.NOW, DEFAULTS)
        demands = [self._demand(
            one['vcpus'], inputs.integer(one['amount'], 'amount', 1),
            inputs.affinity_of(one.get('affinity')), condition, number,
            one['memory_mb'])
            for number, one in enumerate(asked.reservations)]
        lease_schema.check_total((demand.count for demand in demands),
                                 MAX_AMOUNT)
        self.search.quote(demands, asked.lease.window)

    def availability(self, limit: int, days: int, servers: int, vcpus: int,
                     affinity: bool | None, hours: int, ahead: int,
                     condition: str | None) -> None:
        window = _window(ahead, 24 * days)
        if window.end + hours * 3600 >= model.LATEST:
            return
        self.search.starts.availability(
            self._demand(vcpus, servers, affinity, condition, 0), window,
            hours * 3600, limit)

    def grow(self, servers: int, kept: int, kept_on: int, kept_kinds: int,
             vcpus: int, affinity: bool | None, hours: int, ahead: int,
             condition: str | None) -> None:
        each: list[dict[int, int]] = [{} for _kind in range(kept_kinds)]
        for number in range(kept):
            on, host = each[number % kept_kinds], self.host_ids[
                number % min(kept_on, len(self.host_ids))]
            on[host] = on.get(host, 0) + 1
        self.search.quote([self._demand(
            vcpus, servers, affinity, condition, 0)], _window(ahead, hours))
        self.search.pick_all(
            [self._demand(vcpus, servers, affinity, condition, 0)],
            _window(0, hours), kept=[
                selection.Pinned({'VCPU': 1, 'MEMORY_MB': 1 + number}, on)
                for number, on in enumerate(each) if on])

    def lease(self, reservations: int, servers: int, events: int,
              hours: int) -> None:
        window = _window(1, hours)
        request = requests.LeaseRequest(
            'lease', window, None, tuple(
                requests.EventRequest(f'event{number}', window.start)
                for number in range(events)), 'delete', False)
        reserved = tuple(
            new_leases.NewReservation(self._demand(
                1, max(1, servers // reservations), None, None, 0,
                1024 + number), params={}, spec={})
            for number in range(reservations))
        self.made.append(self.leases.creation.create(new_leases.NewLease(
            'project', 'user', request, reserved), None)['id'])

    def tidy(self) -> None:
        """Delete the leases that were created."""
        while self.made:
            driven.withdraw(self.leases, self.made.pop())

    def list(self, marker: bool, **values: ty.Any) -> None:
        asked = {key: str(value) for key, value in values.items()
                 if value is not None}
        if marker:
            asked['marker'] = self.marker
        query, _fields = lease_schema.query(asked, worlds.NOW, 86400)
        found, _more = lease_queries.page(self.database, dataclasses.replace(
            query, project_id='project'))
        json.dumps(found)

    def _demand(self, vcpus: int, servers: int, affinity: bool | None,
                condition: str | None, number: int, memory_mb: int = 1024,
                ) -> model.Demand:
        wanted = None
        if condition is not None:
            values = (f'{value}x' for value in range(
                property_expressions.MAX_VALUES - 1))
            wanted = property_expressions.parse([
                'or', ['>=', '$vcpus', number],
                ['in', f'${condition}', *values]])
            property_expressions.check(wanted, PUBLIC)
        return model.Demand(
            {'VCPU': vcpus, 'MEMORY_MB': memory_mb, 'DISK_GB': 20}, servers,
            {None: model.Affinity.NONE, True: model.Affinity.SAME,
             False: model.Affinity.DIFFERENT}[affinity],
            hosts=self.hosts, properties=wanted)

    def cost(self, work: ty.Callable[[], None], times: int = 1) -> Cost:
        """Return the cost of some work: of several calls, mean and worst."""
        with Waiter(self.search) as waiter:
            began = time.thread_time()
            for _time in range(times):
                work()
            cost = Cost((time.thread_time() - began) / times, waiter.longest)
        self.tidy()
        return cost


class _Standing(clocks.SystemClock):
    """A clock with a fixed date, whose elapsed time runs."""

    def now(self) -> int:
        return worlds.NOW


def _window(ahead: int, hours: int) -> model.Window:
    start = worlds.NOW + ahead * worlds.DAY + 3600
    return model.Window(start, start + hours * 3600)


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    world = worlds.parts(HOSTS // size, BOOKINGS // size)
    logging.getLogger('blazar_core').setLevel(logging.WARNING)
    with servers.place('sqlite') as place:
        filled.fill(place.url, world, LEASES // size, events=True)
        database = filled.connect(place.url)
        _describe_hosts(database)
        member = Member(database)
        plain = _best(member, member.plain, PLAIN)
        yield from _records('plain', plain, plain)
        for kind in SPACE:
            worst, request = _search(member, kind, 10 if quick else 1)
            yield from _records(kind, worst, plain)
            print(f'  {kind}: {request}', flush=True)
        database.engine.dispose()
    yield from series.run(quick)


def _describe_hosts(database: api.Database) -> None:
    """Give hosts the properties that Nova reports, and end half of the leases.
    """
    with database.writer() as session:
        for host in session.scalars(sa.select(models.Host)):
            host.properties = {
                'hypervisor_type': 'QEMU', 'vcpus': 64,
                'hypervisor_hostname': uuidutils.generate_uuid()}
        session.execute(sa.update(models.Lease).where(
            models.Lease.start_date % 2 == 0).values(status='TERMINATED'))


def _search(member: Member, kind: str, part: int) -> tuple[Cost, Request]:
    """Return the worst costs found, for the worker and for others."""
    chance = random.Random(worlds.SEED)
    worst: dict[str, tuple[float, Request]] = {}

    def attempt(request: Request) -> None:
        cost = member.cost(lambda: member.make(kind, request))
        for name in ('cpu', 'wait'):
            value = getattr(cost, name)
            if name not in worst or value > worst[name][0]:
                worst[name] = value, request

    for _time in range(DRAWN // part):
        attempt({name: chance.choice(choices)
                 for name, choices in SPACE[kind].items()})
    for number in range(CHANGED // part):
        _value, request = worst['cpu' if number % 2 else 'wait']
        name = chance.choice([*SPACE[kind]])
        attempt({**request, name: chance.choice(SPACE[kind][name])})
    costs = {name: _best(member, lambda: member.make(kind, request))
             for name, (_value, request) in worst.items()}
    return (Cost(max(one.cpu for one in costs.values()),
                 max(one.wait for one in costs.values())),
            {name: request for name, (_value, request) in worst.items()})


def _best(member: Member, work: ty.Callable[[], None], times: int = 1,
          ) -> Cost:
    """Return the lowest costs of some rounds, to exclude other load."""
    rounds = [member.cost(work, times) for _round in range(records.ROUNDS)]
    return Cost(min(one.cpu for one in rounds),
                min(one.wait for one in rounds))


def _records(kind: str, cost: Cost, plain: Cost,
             ) -> ty.Iterator[records.Record]:
    name = f'abuse.{kind}'
    yield records.Record(name, 'cpu_s', cost.cpu)
    yield records.Record(name, 'wait_ms', cost.wait * 1000)
    yield records.Record(name, 'x_plain', cost.cpu / plain.cpu)
    yield records.Record(name, 'wait_x_plain', cost.wait / max(
        plain.wait, 1e-6))


if __name__ == '__main__':
    TABLE = records.Table()
    for record in run(quick=False):
        TABLE.add(record, None)
    TABLE.close()
