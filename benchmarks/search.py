# SPDX-License-Identifier: Apache-2.0

"""Searches: next start and fitting hosts; 10,000 hosts, 1,000,000 bookings.

A year at 70 % load. ``earliest.whole``: whole hosts; ``earliest.parts``:
parts of hosts in three resource classes; n: number of servers; ``filtered``:
on a random fifth of the hosts. Durations are from an hour to a week, with
``long`` from an hour to two months. ``ratio`` is the median time of the plain
scan for the wanted start alone, relative to that of the index.
"""

import functools
import gc
import random
import typing as ty

from benchmarks import plain
from benchmarks import records
from benchmarks import world as worlds
from blazar_core.common import model

HOSTS, BOOKINGS = 10_000, 1_000_000


def run(quick: bool) -> ty.Iterator[records.Record]:
    size = 100 if quick else 1
    for kind, make in (('whole', worlds.whole), ('parts', worlds.parts)):
        world = make(HOSTS // size, BOOKINGS // size)
        yield from _measure(kind, world, 20 if quick else 300)


def _measure(kind: str, world: worlds.World, number: int,
             ) -> ty.Iterator[records.Record]:
    index, bookings = world.timeline(), plain.rows(world)
    # Exclude these lists from garbage collection, which real processes lack.
    gc.collect()
    gc.freeze()
    chance = random.Random(worlds.SEED)
    fifth = chance.sample(range(1, world.hosts + 1), world.hosts // 5)
    mask = index.mask(fifth)
    look = functools.partial(_look, world, bookings)
    for count in (1, 10, 1000):
        questions = worlds.questions(world, count, number)
        yield from _ratio(
            f'search.earliest.{kind}.n{count}', lambda one: index.earliest(
                one.demand, one.duration, one.not_before), questions, look)
        yield from records.times(
            f'search.earliest.{kind}.n{count}.long',
            lambda one: index.earliest(
                one.demand, one.duration, one.not_before),
            worlds.questions(world, count, number, days=60))
        if count < 1000:
            yield from _ratio(
                f'search.earliest.{kind}.n{count}.filtered',
                lambda one: index.earliest(
                    one.demand, one.duration, one.not_before, mask),
                questions, functools.partial(look, hosts=fifth))
    questions = worlds.questions(world, 1, number)
    yield from _ratio(
        f'search.rooms.{kind}',
        lambda one: index.fits(one.demand, one.window()), questions, look)
    yield from records.times(
        f'search.rooms.{kind}.endless', lambda one: index.fits(
            one.demand, model.Window(one.not_before, model.FOREVER)),
        questions)


def _look(world: worlds.World, bookings: list[plain.Row],
          one: worlds.Question, hosts: ty.Collection[int] | None = None,
          ) -> None:
    plain.fits(world, bookings, one.demand, one.window(), hosts)


def _ratio(name: str, ask: ty.Callable[[worlds.Question], ty.Any],
           questions: list[worlds.Question],
           look: ty.Callable[[worlds.Question], None],
           ) -> ty.Iterator[records.Record]:
    """Yield the times of queries, and of a few of them by the plain scan."""
    fast = list(records.times(name, ask, questions))
    slow = next(records.times(name, look, questions[:5], 1))
    yield from fast
    yield records.Record(name, 'plain_p50_ms', slow.value)
    yield records.Record(name, 'ratio', slow.value / fast[0].value)
