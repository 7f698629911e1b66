# SPDX-License-Identifier: Apache-2.0

"""The world of the benchmarks: hosts, bookings, queries.

All of it is random with a fixed seed. A host has *lanes*, in which bookings
and gaps alternate, so that no host is overbooked and each is used for the same
part of the year on average.
"""

import dataclasses
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.capacity import timelines
from blazar_core.common import model

SEED = 20270115
NOW = 1_800_000_000
DAY = 86_400
YEAR = 365 * DAY
LOAD = 0.7

#: The class of a whole host, and the capacity in parts of hosts.
WHOLE = 'CUSTOM_HOST'
PARTS = {'VCPU': 64, 'MEMORY_MB': 64 * 4096, 'DISK_GB': 64 * 50}

Ints: ty.TypeAlias = npt.NDArray[np.int64]


@dataclasses.dataclass
class World:
    """Hosts 1..n with the same capacity, and arrays of bookings.

    :ivar usual: the average seconds of a booking, if each took all of a host
    """

    hosts: int
    capacity: dict[str, int]
    host: Ints
    start: Ints
    end: Ints
    amounts: dict[str, Ints]
    usual: float

    def timeline(self) -> timelines.Timeline:
        """Return an index with all hosts and bookings."""
        index = timelines.Timeline()
        for host in range(1, self.hosts + 1):
            index.set_host(host, self.capacity, {})
        index.load([timelines.Block(
            self.host, self.start, self.end, self.amounts)])
        return index

    def booking(self, number: int,
                ) -> tuple[int, model.Window, dict[str, int]]:
        """Return one of the bookings."""
        return (int(self.host[number]), model.Window(
            int(self.start[number]), int(self.end[number])),
            {rc: int(amount[number]) for rc, amount in self.amounts.items()})


def whole(hosts: int, bookings: int) -> World:
    """Return a world with bookings of whole hosts."""
    chance = np.random.default_rng(SEED)
    host, start, end, usual = _lanes(chance, hosts, bookings, 1)
    return World(hosts, {WHOLE: 1}, host, start, end,
                 {WHOLE: np.ones(len(host), np.int64)}, usual)


def parts(hosts: int, bookings: int) -> World:
    """Return a world with bookings of up to an eighth of a host, in three
    classes.
    """
    chance = np.random.default_rng(SEED)
    host, start, end, usual = _lanes(chance, hosts, bookings, 8)
    size = chance.choice([2, 4, 8], len(host), p=[0.1, 0.2, 0.7])
    return World(hosts, dict(PARTS), host, start, end, {
        'VCPU': size, 'MEMORY_MB': size * chance.choice(
            [2048, 4096], len(host), p=[0.3, 0.7]),
        'DISK_GB': size * chance.choice([0, 20, 50], len(host))}, usual)


def _lanes(chance: np.random.Generator, hosts: int, bookings: int, lanes: int,
           ) -> tuple[Ints, Ints, Ints, float]:
    """Return alternating bookings and gaps, mostly short and sometimes long.

    A booking lasts from 1 to 336 units, and each length is as likely as its
    double (from an hour to two weeks with 100 bookings a year).
    """
    each = bookings // (hosts * lanes)
    shape = (hosts * lanes, each)
    last = np.exp(chance.uniform(0, np.log(336), shape))
    last = np.maximum(1, last * (
        LOAD * YEAR / each / last.mean())).astype(np.int64)
    gap = 1 + chance.exponential(
        (1 - LOAD) * YEAR / each, shape).astype(np.int64)
    end = NOW + np.cumsum(last + gap, axis=1)
    host = 1 + np.repeat(np.arange(hosts * lanes) // lanes, each)
    order = chance.permutation(host.size)
    return (host[order], (end - last).ravel()[order], end.ravel()[order],
            LOAD * YEAR / each / lanes)


@dataclasses.dataclass(frozen=True)
class Question:
    """A demand for a duration, not before an instant."""

    demand: model.Demand
    duration: int
    not_before: int

    def window(self) -> model.Window:
        """Return the first window that would do."""
        return model.Window(self.not_before, self.not_before + self.duration)


def questions(world: World, count: int, number: int, days: float = 7,
              sizes: ty.Sequence[int] = (4, 8, 16, 32, 48),
              ) -> list[Question]:
    """Return queries for a number of servers.

    They are for an hour to ``days`` days (with 100 bookings of a host a year;
    otherwise in proportion to ``usual``), each length as likely as its double,
    and start in the first three quarters of the year. Servers have a number of
    VCPUs from ``sizes``, or are whole hosts.
    """
    chance = np.random.default_rng(SEED + count)
    scale = world.usual / (2.555 * DAY)
    answer = []
    for _number in range(number):
        size = int(chance.choice(sizes))
        resources = {WHOLE: 1} if WHOLE in world.capacity else {
            'VCPU': size, 'MEMORY_MB': size * 4096, 'DISK_GB': size * 20}
        duration = scale * np.exp(chance.uniform(
            np.log(3600), np.log(days * DAY)))
        answer.append(Question(
            model.Demand(resources, count), max(1, int(duration)),
            NOW + int(chance.uniform(0, 0.75 * YEAR))))
    return answer
