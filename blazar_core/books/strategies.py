# SPDX-License-Identifier: Apache-2.0

"""In which order hosts that have room are filled, and how far each.

A strategy is the operator's choice for every demand; a wish is that of a
server group with a soft policy, and the strategy decides between equals.
"""

import heapq
import typing as ty

import numpy as np
from numpy import typing as npt

from blazar_core.books import timeline as timelines
from blazar_core.common import model

__all__ = ['Strategy', 'WISHES', 'pack', 'spread']

#: Puts the hosts that have room into the order in which they are filled:
#: given the timeline, their positions in it (which ascend), the window, which
#: of all hosts something of the same lease goes to already, and how many of
#: them are wanted at most: those that come later may be left out.
Strategy: ty.TypeAlias = ty.Callable[
    [timelines.Timeline, npt.NDArray[np.intp], model.Window,
     npt.NDArray[np.bool_], int], npt.NDArray[np.intp]]


def pack(timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
         window: model.Window, ours: npt.NDArray[np.bool_], most: int,
         ) -> npt.NDArray[np.intp]:
    """Put leases that end together on the same hosts.

    First the hosts that stay busy until the lease ends anyway, those that
    fall free soonest after it before others; then those that would have to
    stay busy for longer, by how much. Empty hosts come last, and so whole
    hosts fall free.
    """
    after = timeline.busy_until(candidates) - window.end
    np.maximum(after, 0, out=after, where=ours[candidates])
    # What is busy for long enough anyway comes before all else.
    rank = np.where(after >= 0, after, model.FOREVER - after)
    if most < len(rank):
        # To find those that come first costs less than to sort all.
        first = np.flatnonzero(rank <= np.partition(rank, most)[most])
        candidates, rank = candidates[first], rank[first]
    return candidates[np.argsort(rank, kind='stable')]


def spread(_timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
           _window: model.Window, _ours: npt.NDArray[np.bool_], _most: int,
           ) -> npt.NDArray[np.intp]:
    """At random."""
    return np.random.default_rng().permutation(candidates)


def _gathered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
              members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of hosts for servers that would rather be on one host.

    Hosts with most of their group come first, then those that take all of
    them, then those that take most.

    :param order: of those with room, which together have enough
    """
    takes = np.minimum(rooms[order], count)
    order = order[np.lexsort((np.arange(len(order)), -takes, -members[order]))]
    return [*map(int, np.repeat(order, np.minimum(rooms[order], count)))
            ][:count]


def _scattered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
               members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of hosts for servers that would rather be apart.

    Each goes where fewest of their group are, those before it included.

    :param order: of those with room, which together have enough
    """
    heap = [(int(members[position]), rank, int(rooms[position]))
            for rank, position in enumerate(order)]
    heapq.heapify(heap)
    picked: list[int] = []
    while len(picked) < count:
        there, rank, room = heap[0]
        picked.append(int(order[rank]))
        if room > 1:
            heapq.heapreplace(heap, (there + 1, rank, room - 1))
        else:
            heapq.heappop(heap)
    return picked


#: Fills the hosts, which have room for all, as a soft affinity wishes.
WISHES = {model.Affinity.SOFT_SAME: _gathered,
          model.Affinity.SOFT_DIFFERENT: _scattered}
