# SPDX-License-Identifier: Apache-2.0

"""Hosts with devices: the costs of eight child providers each.

The same 10,000 hosts with 1,000,000 bookings of parts of hosts, on SQLite,
once plain and once with eight devices each: one resource class, four kinds of
two providers. Every eighth booking has a device. Queries of the plain hosts
are compared with the same queries plus a device of one kind.

filter: the query of our filter for a leased server, for as many hosts as Nova
gets from placement, which returns 1,000 candidates: with devices, eight per
host. pick: a host for a server of a lease. refusal: as many servers as fit
only if nothing is booked, with the next start. ratio is that of the medians
with devices and without, in the same run.
"""

import dataclasses
import random
import statistics
import time
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from tests import driven

HOSTS, BOOKINGS, LEASES = 10_000, 1_000_000, 50_000
DEVICES, KINDS = 8, 4
#: Placement's maximum for Nova ([scheduler] max_placement_results).
CANDIDATES = 1000
QUESTIONS = 50
DEMAND = {'VCPU': 2, 'MEMORY_MB': 4096, 'DISK_GB': 20}

#: Queries by name.
Questions: ty.TypeAlias = dict[str, ty.Callable[[], object]]


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    world = worlds.parts(HOSTS // size, BOOKINGS // size)
    with servers.place('sqlite') as plain, servers.place('sqlite') as place:
        for one in (plain, place):
            filled.fill(one.url, world, LEASES // size)
        database = filled.connect(place.url)
        add_devices(database)
        yield from compare(
            questions(filled.connect(plain.url), model.Demand(DEMAND), 1,
                      worlds.PARTS['VCPU'] // DEMAND['VCPU']),
            questions(database, model.Demand(
                {**DEMAND, 'GPU': 1}, groups=(
                    model.Group(tuple(DEMAND.items())), model.Group(
                        (('GPU', 1),), True, (frozenset(
                            f'host{host}-{number}'
                            for host in range(1, world.hosts + 1)
                            for number in range(0, DEVICES, KINDS)),)))),
                DEVICES, DEVICES // KINDS))


def add_devices(database: api.Database) -> None:
    """Add devices to all hosts, and one to every eighth booking."""
    one = '[1, 1, 1, 1]'
    host = sa.literal('"host') + sa.cast(models.Host.id, sa.Text)
    units: ty.Any = sa.literal('{"": {}')
    for number in range(DEVICES):
        units = units + ', ' + host + (
            f'-{number}": {{"GPU": {one}, "GPU@k{number % KINDS}": {one}}}')
    capacity = sa.cast(models.Host.capacity, sa.Text)
    amounts = sa.cast(models.Booking.resources, sa.Text)
    with database.begin() as connection:
        connection.execute(sa.update(models.Host).values(
            units=units + '}', capacity=sa.func.replace(
                capacity, '}', f', "GPU": {DEVICES}' + ''.join(
                    f', "GPU@k{kind}": {DEVICES // KINDS}'
                    for kind in range(KINDS)) + '}')))
        for kind in range(KINDS):
            connection.execute(sa.update(models.Booking).where(
                models.Booking.id % (8 * KINDS) == 8 * kind).values(
                resources=sa.func.replace(
                    amounts, '}', f', "GPU": 1, "GPU@k{kind}": 1}}')))


def questions(database: api.Database, demand: model.Demand, each: int,
              most: int) -> Questions:
    """Return the queries of a database.

    :param each: number of candidates per host
    :param most: number of servers that fit on an empty host
    """
    chance, clock = random.Random(worlds.SEED), driven.ManualClock(worlds.NOW)
    searching = admissions.Admission(database, clock)
    eligible_hosts = eligibility.Eligibility(database, clock, searching.index)
    server_id = uuidutils.generate_uuid()
    with database.begin() as connection:
        rows = connection.execute(sa.select(models.Host.id, models.Host.uuid)
                                  ).all()
        connection.execute(sa.update(models.Booking).where(
            models.Booking.id == 1).values(server_id=server_id))
    asked = chance.sample(rows, min(CANDIDATES // each, len(rows)))
    window = model.Window(worlds.NOW + 86_400, worlds.NOW + 90_000)
    devices = {rc: amount for rc, amount in demand.resources.items()
               if rc not in DEMAND}
    candidates = {row.uuid: [{
        row.uuid: DEMAND, f'host{row.id}-{number}': devices}
        for number in range(each)] for row in asked} if devices else {}
    many = dataclasses.replace(demand, count=most * len(rows))

    def refuse() -> None:
        refusal = searching.quote([many], window)
        if refusal is None or refusal.next_start is None:
            raise AssertionError(f'Not refused until a later start: {refusal}')

    return {
        'filter': lambda: eligible_hosts.for_server(
            server_id, demand.resources, [row.uuid for row in asked],
            candidates=candidates),
        'pick': lambda: searching.pick(demand, window),
        'refusal': refuse}


def compare(plain: Questions, devices: Questions,
            ) -> ty.Iterator[records.Record]:
    """Run the queries of both in turn."""
    for name in plain:
        took: list[list[float]] = [[], []]
        for number in range(QUESTIONS + 1):
            for ask, times in zip((plain[name], devices[name]), took):
                begin = time.perf_counter()
                ask()
                # The first query is a warm-up.
                if number:
                    times.append((time.perf_counter() - begin) * 1000)
        yield records.Record(
            f'devices.{name}', 'p50_ms', records.percentile(took[1], 50))
        yield records.Record(
            f'devices.{name}', 'ratio',
            statistics.median(took[1]) / statistics.median(took[0]))
