# SPDX-License-Identifier: Apache-2.0

"""Availability: costs of queries with 1,000 hosts and 10,000 leases.

pick finds hosts; refusal is a quote for more than there is in that window,
with its next_start; fits_for is the query of the scheduler for each server,
let_in the same with the claim of a host; hosts.alike searches 200 of 1,200
whole hosts by properties (ratio: relative to any 200 hosts, hosts.any); free
is the query of GET /availability for ten starts; page is a page of a hundred
leases, anywhere in the list of all, with their reservations and events. All
include the database: statements are counted at the driver. A refusal logs the
conflicting leases, which costs a query.
"""

import functools
import logging
import typing as ty
import unittest

import sqlalchemy as sa

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import scheduler_claims
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from blazar_nova.resource_types import property_expressions
from blazar_nova.schemas import lease_queries
from tests import driven

HOSTS, BOOKINGS = 1000, 10_000
#: Whole hosts, and how many of them are requested.
WHOLE, WANTED = 1200, 200
DEMAND = {'VCPU': 8, 'MEMORY_MB': 32_768, 'DISK_GB': 160}
SERVER = '00000000-0000-0000-0000-000000000001'


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    # Ten bookings per host, as many as one lane has.
    world = _sparse(HOSTS // size, BOOKINGS // size * 8, BOOKINGS // size)
    for kind in servers.KINDS:
        try:
            with servers.place(kind) as place:
                filled.fill(place.url, world, BOOKINGS // size, events=True)
                yield from measure(kind, place.url, world)
            with servers.place(kind) as place:
                # With a hundredth of the hosts, too few would match.
                yield from whole(kind, place.url, min(size, 20))
        except unittest.SkipTest as skip:
            print(f'{kind}: {skip}')


def _sparse(hosts: int, bookings: int, kept: int) -> worlds.World:
    """Return a world with some of its bookings, drawn at random."""
    world = worlds.parts(hosts, bookings)
    for name in ('host', 'start', 'end'):
        setattr(world, name, getattr(world, name)[:kept])
    world.amounts = {rc: amount[:kept]
                     for rc, amount in world.amounts.items()}
    return world


def whole(kind: str, url: str, size: int) -> ty.Iterator[records.Record]:
    """Search whole hosts by properties that half of them have."""
    hosts = WHOLE // size
    # Twenty of some 800 bookings per host: most hosts are free for a week.
    world = _sparse(hosts, 800 * hosts, 20 * hosts)
    filled.fill(url, world, hosts)
    database = filled.connect(url)
    with database.writer() as session:
        table = models.Host.__table__
        session.execute(sa.update(table).values(
            enrollment='enrolled', reservable=True,
            properties={'vcpus': 64, 'hypervisor_type': 'QEMU'},
            extra={'gpu': 'A100'}))
        session.execute(sa.update(table).where(table.c.id % 2 == 0).values(
            extra={'gpu': 'none'}))
    search = admissions.Admission(database, driven.ManualClock(worlds.NOW))
    windows = [model.Window(worlds.NOW + day * worlds.DAY,
                            worlds.NOW + (day + 7) * worlds.DAY)
               for day in range(1, 300)]
    found = {}
    for name, expression in (
            ('any', ''), ('alike', '["and", ["==", "$gpu", "A100"], '
                                   '[">=", "$vcpus", "8"]]')):
        demand = model.Demand(
            model.WHOLE, WANTED // size, among=model.HostPool.ENROLLED,
            properties=property_expressions.parse(expression))
        search.pick(demand, windows[0])
        found[name] = [*records.times(
            f'availability.{kind}.hosts.{name}',
            functools.partial(search.pick, demand), windows)]
        yield from found[name]
    yield records.Record(
        f'availability.{kind}.hosts.alike', 'ratio',
        found['alike'][0].value / found['any'][0].value)
    database.engine.dispose()


def measure(kind: str, url: str, world: worlds.World,
            ) -> ty.Iterator[records.Record]:
    """Measure all queries."""
    database = filled.connect(url)
    clock = driven.ManualClock(worlds.NOW)
    search = admissions.Admission(database, clock)
    log = logging.getLogger('blazar_core.capacity.admissions')
    log.setLevel(logging.INFO)
    log.propagate = False
    statements = []
    sa.event.listen(database.engine, 'before_cursor_execute',
                    lambda *args: statements.append(args[2]))
    days = range(1, 300, 3)
    windows = [model.Window(worlds.NOW + day * worlds.DAY,
                            worlds.NOW + (day + 7) * worlds.DAY)
               for day in days]
    eligible_hosts = eligibility.Eligibility(database, clock, search.index)
    schedulers = scheduler_claims.Claims(database, clock, search.index)
    with search.index.fresh():
        host = search.index.hosts[min(search.index.hosts)]
        uuids = [*search.index.ids_by_uuid]
    fits = model.Demand(DEMAND, 4)
    # As many whole hosts as there are, of which some are always in use.
    refused = model.Demand(dict(world.capacity), world.hosts,
                           model.Affinity.DIFFERENT)
    some, _more = lease_queries.page(database, lease_queries.Query(
        sort=(('id', False),), limit=len(days)))
    markers = [lease['id'] for lease in some]
    asked: dict[str, ty.Callable[[model.Window], ty.Any]] = {
        'pick': lambda window: search.pick(fits, window),
        'refusal': lambda window: expect(search.quote([refused], window)),
        'fits_for': lambda window: eligible_hosts.for_server(
            SERVER, DEMAND, uuids),
        'let_in': lambda window: (
            eligible_hosts.for_server(SERVER, DEMAND, uuids), schedulers.claim(
                SERVER, {host.uuid: DEMAND}, forced=True)),
        'free': lambda window: search.starts.availability(
            fits, window, worlds.DAY, 10),
        'page': lambda window: lease_queries.page(
            database, lease_queries.Query(
                project_id='project', limit=100, marker=markers[
                    window.start // worlds.DAY % len(markers)]))}
    for name, ask in asked.items():
        ask(windows[0])
        statements.clear()
        ask(windows[1])
        yield records.Record(f'availability.{kind}.{name}', 'statements',
                             sum(one != 'BEGIN' for one in statements))
        yield from records.times(
            f'availability.{kind}.{name}', ask, windows)
    database.engine.dispose()


def expect(refusal: refusals.Refusal | None) -> None:
    """Check that a refusal has a next start."""
    if refusal is None or refusal.next_start is None:
        raise RuntimeError(f'Not what was to be measured: {refusal}')


if __name__ == '__main__':
    TABLE = records.Table()
    for record in run(quick=False):
        TABLE.add(record, None)
    TABLE.close()
