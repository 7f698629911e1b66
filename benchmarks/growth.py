# SPDX-License-Identifier: Apache-2.0

"""Growth: the costs of ten times as many hosts or bookings.

Whole hosts, a year at 70 % load; h: hosts, b: bookings. With more bookings,
these and the requested windows are shorter. load: reading all from SQLite in a
new process (see coldload).
"""

import typing as ty

from benchmarks import coldload
from benchmarks import filled
from benchmarks import records
from benchmarks import servers
from benchmarks import world as worlds
from blazar_core.common import model
from tests import timeline_size

SIZES = ((1_000, 10_000), (1_000, 100_000), (10_000, 100_000),
         (10_000, 1_000_000), (100_000, 1_000_000), (10_000, 10_000_000))


def run(quick: bool) -> ty.Iterator[records.Record]:
    for hosts, bookings in SIZES[:2] if quick else SIZES:
        world = worlds.whole(hosts, bookings)
        index = world.timeline()
        name = f'growth.h{hosts}.b{bookings}'
        yield records.Record(
            name, 'MiB', timeline_size.nbytes(index) / 2 ** 20)
        with servers.place('sqlite') as place:
            filled.fill(place.url, world, hosts)
            yield from coldload.measured(f'{name}.load', place.url)
        for what, count, days in (('n1', 1, 7), ('n10', 10, 7),
                                  ('n1.long', 1, 60), ('tenth', hosts // 10,
                                                       7)):
            yield from _some(f'{name}.{what}', lambda one: index.earliest(
                one.demand, one.duration, one.not_before),
                worlds.questions(world, count, 100, days))
        yield from _some(f'{name}.rooms', lambda one: index.fits(
            one.demand, one.window()), worlds.questions(world, 1, 100))
        yield from _some(f'{name}.rooms.endless', lambda one: index.fits(
            one.demand, model.Window(one.not_before, model.FOREVER)),
            worlds.questions(world, 1, 100))
        yield from _some(f'{name}.change', lambda one: index.apply(*one),
                         [(*world.booking(number), sign)
                          for number in range(1000) for sign in (-1, 1)], 1)


def _some(name: str, ask: ty.Callable[..., ty.Any],
          questions: ty.Sequence[ty.Any], rounds: int = records.ROUNDS,
          ) -> ty.Iterator[records.Record]:
    for record in records.times(name, ask, questions, rounds):
        if record.metric in ('p50_ms', 'p95_ms'):
            yield record
