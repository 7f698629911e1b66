# SPDX-License-Identifier: Apache-2.0

"""Which servers have to leave, and which hosts are taken: cheapest first."""

import heapq
import itertools
import typing as ty

import numpy as np

from blazar_core.books.planning.words import HUGE
from blazar_core.books.planning.words import Movable

__all__ = ['MOVE', 'Option', 'Sized', 'choices', 'covers', 'every_way',
           'greedy_way']

#: One move counts as much as so many MiB of memory, which is more than all.
MOVE = 2 ** 36


class Option(ty.NamedTuple):
    """So many servers of a wish can be on a host, when these have left."""

    amount: int
    cost: int
    leaving: tuple[Movable, ...]


#: A server, and what it takes of each class that is short.
Sized: ty.TypeAlias = tuple[Movable, list[int]]


def covers(needs: list[int], some: ty.Iterable[Sized]) -> bool:
    some = list(some)
    return all(sum(size[n] for _one, size in some) >= amount
               for n, amount in enumerate(needs))


def every_way(needs: list[int], sized: list[Sized],
              ) -> list[tuple[Movable, ...]]:
    """All sets of which nobody could stay."""
    found: list[set[str]] = []
    ways = []
    for count in range(1, len(sized) + 1):
        for some in itertools.combinations(sized, count):
            ids = {one.server_id for one, _size in some}
            if any(way <= ids for way in found) or not covers(needs, some):
                continue
            found.append(ids)
            ways.append(tuple(one for one, _size in some))
    return ways


def greedy_way(needs: list[int], sized: list[Sized],
               ) -> tuple[Movable, ...]:
    """Servers that free the largest part of what is still missing leave first;
    those that need not have left stay after all.
    """
    left, rest, way = list(needs), list(sized), list[Sized]()
    while any(amount > 0 for amount in left):
        best = max(rest, key=lambda pair: (sum(
            min(size, amount) / total for size, amount, total in zip(
                pair[1], left, needs, strict=True) if amount > 0),
            -pair[0].memory))
        rest.remove(best)
        way.append(best)
        left = [amount - size for amount, size in zip(
            left, best[1], strict=True)]
    for one in sorted(way, key=lambda pair: -pair[0].memory):
        if all(amount + size <= 0 for amount, size in zip(
                left, one[1], strict=True)):
            way.remove(one)
            left = [amount + size for amount, size in zip(
                left, one[1], strict=True)]
    return tuple(one for one, _size in way)


def choices(options: ty.Mapping[int, list[Option]], count: int,
            ) -> ty.Iterator[dict[int, Option]]:
    """What every host gets of so many servers, the cheapest choice first.

    :param options: by position of host
    """
    hosts = [*options]
    ahead = _ahead([options[host] for host in hosts], count)
    if ahead[0][count] >= HUGE:
        return
    number = itertools.count()
    # By what it costs at least; who is nearer to the end is seen first.
    heap: list[tuple[int, int, int, int, int, ty.Any]] = [
        (ahead[0][count], 0, next(number), count, 0, None)]
    while heap:
        _least, reached, _number, left, cost, way = heapq.heappop(heap)
        reached = -reached
        if not left:
            chosen = {}
            while way is not None:
                (position, option), way = way
                chosen[position] = option
            yield chosen
            continue
        if reached == len(hosts):
            continue
        after = ahead[reached + 1]
        for option in (Option(0, 0, ()), *options[hosts[reached]]):
            rest = left - option.amount
            if rest < 0 or after[rest] >= HUGE:
                continue
            heapq.heappush(heap, (
                cost + option.cost + after[rest], -reached - 1, next(number),
                rest, cost + option.cost, ((hosts[reached], option), way)
                if option.amount else way))


def _ahead(options: ty.Sequence[list[Option]], count: int,
           ) -> list[list[int]]:
    """What it costs at least to have so many servers on the hosts from each
    one on.
    """
    least = np.full(count + 1, HUGE, np.int64)
    least[0] = 0
    ahead = [least]
    for some in reversed(options):
        cheapest: dict[int, int] = {}
        for option in some:
            cheapest[option.amount] = min(
                option.cost, cheapest.get(option.amount, HUGE))
        better = least.copy()
        for size, cost in cheapest.items():
            if size <= count:
                np.minimum(better[size:], least[:count + 1 - size] + cost,
                           out=better[size:])
        least = np.minimum(better, HUGE)
        ahead.append(least)
    return [one.tolist() for one in reversed(ahead)]
