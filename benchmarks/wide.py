# SPDX-License-Identifier: Apache-2.0

"""A hundred thousand hosts: the queries of one boot, and a cold load.

800,000 bookings of parts of hosts, on SQLite, as the index in memory is
measured. Before each query another boot changes the usage of a host.

filter.plain and filter.leased: the query of our filter for a server without a
lease and with one, for the thousand hosts that placement returns at most.
pick: a host for a server of a lease; pick.properties: for a server that fits
on a fifth of the hosts only. load: all of it in a new process; MiB is the
growth of the process, most_MiB its peak. Each host has a name and a usage of
its own.
"""

import random
import time
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import coldload
from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_nova.resource_types import property_expressions
from tests import driven

HOSTS, BOOKINGS, LEASES = 100_000, 800_000, 50_000
#: Placement's maximum for Nova ([scheduler] max_placement_results).
ASKED = 1000
QUESTIONS = 50
DEMAND = {'VCPU': 2, 'MEMORY_MB': 4096, 'DISK_GB': 20}
GPU = '["==", "$gpu", "a100"]'


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    world = worlds.parts(HOSTS // size, BOOKINGS // size)
    with servers.place('sqlite') as place:
        filled.fill(place.url, world, LEASES // size)
        database = filled.connect(place.url)
        with database.begin() as connection:
            number = sa.cast(models.Host.id, sa.Text)
            connection.execute(sa.update(models.Host).values(
                consumers={}, usage=sa.literal('{"VCPU": 0, "MEMORY_MB": ') +
                number + '}', properties=sa.literal('{"name": "') + number +
                '", "rack": "one", "gpu": ' + sa.case(
                    (models.Host.id % 5 == 0, '"a100"}'), else_='""}')))
        yield from coldload.measured('wide.load', place.url)
        yield from ask(database)


def ask(database: api.Database) -> ty.Iterator[records.Record]:
    """Run the queries one after the other."""
    chance, clock = random.Random(worlds.SEED), driven.ManualClock(worlds.NOW)
    searching = admissions.Admission(database, clock)
    eligible_hosts = eligibility.Eligibility(database, clock, searching.index)
    with database.connection() as connection:
        hosts = list(connection.scalars(sa.select(models.Host.uuid)))
    server_id = uuidutils.generate_uuid()
    with database.begin() as connection:
        connection.execute(sa.update(models.Booking).where(
            models.Booking.id == 1).values(server_id=server_id))
    window = model.Window(worlds.NOW + 86_400, worlds.NOW + 90_000)
    plain = model.Demand(DEMAND)
    special = model.Demand(DEMAND, properties=property_expressions.parse(GPU))
    asked = chance.sample(hosts, min(ASKED, len(hosts)))
    what: dict[str, ty.Callable[[], object]] = {
        'filter.plain': lambda: eligible_hosts.for_unreserved(DEMAND, asked),
        'filter.leased': lambda: eligible_hosts.for_server(server_id, DEMAND,
                                                           asked),
        'pick': lambda: searching.pick(plain, window),
        'pick.properties': lambda: searching.pick(special, window)}
    # Warm up: caches and compiled statements.
    for question in what.values():
        question()
    for name, question in what.items():
        took = []
        for number in range(QUESTIONS):
            with database.begin() as connection:
                assert inventory.record_server(
                    connection, worlds.NOW, f'host{number + 1}',
                    f'host{number + 1}', uuidutils.generate_uuid(),
                    dict.fromkeys(DEMAND, 1))
            begin = time.perf_counter()
            question()
            took.append((time.perf_counter() - begin) * 1000)
        for percent in (50, 95):
            yield records.Record(f'wide.{name}', f'p{percent}_ms',
                                 records.percentile(took, percent))
