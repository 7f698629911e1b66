# SPDX-License-Identifier: Apache-2.0

"""Upkeep of the index: load, memory, changes, removal of the past.

10,000 hosts, 1,000,000 bookings; whole hosts, and parts of hosts in three
classes. Loads from arrays in memory. A change removes a booking of some days,
or adds it again; the slowest ones rebuild the arrays.
"""

import time
import typing as ty

from benchmarks import records
from benchmarks import world as worlds
from tests import timeline_size

HOSTS, BOOKINGS = 10_000, 1_000_000


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    for kind, make in (('whole', worlds.whole), ('parts', worlds.parts)):
        world = make(HOSTS // size, BOOKINGS // size)
        start = time.perf_counter()
        index = world.timeline()
        yield records.Record(f'upkeep.load.{kind}', 'seconds',
                             time.perf_counter() - start)
        yield records.Record(f'upkeep.memory.{kind}', 'MiB',
                             timeline_size.nbytes(index) / 2 ** 20)
        bookings = [world.booking(number) for number in range(
            min(50_000, BOOKINGS // size // 4))]
        changes = [(*one, sign) for one in bookings for sign in (-1, 1)]
        changes += [(host % world.hosts + 1, window, resources, 1)
                    for host, window, resources in bookings]
        yield from records.times(
            f'upkeep.change.{kind}', lambda one: index.apply(*one), changes, 1)
        yield records.Record(f'upkeep.memory.{kind}.later', 'MiB',
                             timeline_size.nbytes(index) / 2 ** 20)
        start = time.perf_counter()
        index.forget(worlds.NOW + worlds.YEAR // 10)
        yield records.Record(f'upkeep.forget.{kind}', 'seconds',
                             time.perf_counter() - start)
