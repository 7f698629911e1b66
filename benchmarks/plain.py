# SPDX-License-Identifier: Apache-2.0

"""The plain scan: the costs of searching a list of bookings.

It does what a table scan in a database does, with all data in memory: iterate
over all bookings, group those that overlap the window by host, and compute the
peak usage of each host.
"""

import collections
import typing as ty

from benchmarks import world as worlds
from blazar_core.common import model

#: Host, start, end and amounts by class.
Row: ty.TypeAlias = tuple[int, int, int, dict[str, int]]


def rows(world: worlds.World) -> list[Row]:
    """Return the list of all bookings."""
    classes = list(world.amounts)
    amounts = zip(*(world.amounts[rc].tolist() for rc in classes))
    return [(host, start, end, dict(zip(classes, amount)))
            for host, start, end, amount in zip(
                world.host.tolist(), world.start.tolist(),
                world.end.tolist(), amounts)]


def fits(world: worlds.World, bookings: list[Row], demand: model.Demand,
         window: model.Window, hosts: ty.Collection[int] | None = None,
         ) -> dict[int, int]:
    """Return how many servers fit on each host."""
    overlapping = collections.defaultdict(list)
    for host, start, end, amounts in bookings:
        if start < window.end and window.start < end:
            overlapping[host].append((start, end, amounts))
    return {host: _room(world.capacity, overlapping.get(host, ()), demand)
            for host in hosts or range(1, world.hosts + 1)}


def _room(capacity: dict[str, int],
          bookings: ty.Iterable[tuple[int, int, dict[str, int]]],
          demand: model.Demand) -> int:
    room = demand.most_per_host()
    for rc, need in demand.resources.items():
        steps = sorted(step for start, end, amounts in bookings
                       for step in ((start, amounts[rc]),
                                    (end, -amounts[rc])))
        level = peak = 0
        for _when, amount in steps:
            level += amount
            peak = max(peak, level)
        room = min(room, (capacity[rc] - peak) // need)
    return room
