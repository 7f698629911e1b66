# SPDX-License-Identifier: Apache-2.0

"""What is free where while a plan grows, and where servers find room."""

import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books import ledger
from blazar_core.books.planning.words import HUGE
from blazar_core.books.planning.words import Movable
from blazar_core.books.planning.words import Place
from blazar_core.books.planning.words import Plan
from blazar_core.books.planning.words import Wish
from blazar_core.common import model

__all__ = ['FEW', 'Amounts', 'Placing', 'State']

#: Up to so many servers all ways are looked at.
FEW = 14
#: How many ways to place servers are looked at beyond the first one.
_WAYS = 3000

#: By class; or by position of host and class.
Amounts: ty.TypeAlias = npt.NDArray[np.int64]


class State:
    """What is free where, as the plan grows; by position of host and class.

    :ivar within: for what is wanted, when the servers of the plan have moved
    :ivar door: for ever, before any of them has
    :ivar staying: by position of host, the servers that may still be moved
    """

    def __init__(self, places: ty.Sequence[Place],
                 movable: ty.Sequence[Movable], wishes: ty.Sequence[Wish],
                 ) -> None:
        takes = [*(one.takes for one in movable),
                 *(one.takes for one in wishes)]
        self.classes = sorted({
            rc for one in takes for rc, amount in one.items() if amount})
        self.ids = [place.id for place in places]
        self.positions = {host_id: n for n, host_id in enumerate(self.ids)}
        self.within = self._table(place.within for place in places)
        self.beyond = self._table(place.beyond for place in places)
        self.before = self.within.copy()
        self.staying: list[list[Movable]] = [[] for _place in places]
        for one in movable:
            self.staying[self.positions[one.source]].append(one)
        self.sizes = {one.server_id: self.amounts(one.takes)
                      for one in movable}

    def amounts(self, takes: model.Resources) -> Amounts:
        return np.array([takes.get(rc, 0) for rc in self.classes], np.int64)

    def _table(self, rooms: ty.Iterable[model.Resources]) -> Amounts:
        return np.array([[
            room.get(rc, HUGE if rc in ledger.SHARED else 0)
            for rc in self.classes] for room in rooms], np.int64).reshape(
                -1, len(self.classes))

    def apply(self, found: Plan, wish: Wish) -> None:
        """A wish has got its place: what others want is beside it."""
        takes = self.amounts(wish.takes)
        for host_id in found.picked[0]:
            self.within[self.positions[host_id]] -= takes
            self.before[self.positions[host_id]] -= takes
        moved = set()
        for move in found.moves:
            size = self.sizes[move.server_id]
            source, target = (self.positions[one] for one in (
                move.source, move.target))
            self.within[source] += size
            for table in (self.within, self.before, self.beyond):
                table[target] -= size
            moved.add(move.server_id)
        self.staying = [[one for one in some if one.server_id not in moved]
                        for some in self.staying]
        for target in {self.positions[move.target] for move in found.moves}:
            # A server that comes there waits for none that leaves.
            np.minimum(self.within[target], self.before[target],
                       out=self.within[target])
            self.staying[target] = []


class Placing:
    """Finds targets for servers that leave."""

    def __init__(self, state: State) -> None:
        self._state = state
        #: What is asked for of each class, all hosts together.
        self._scale = np.maximum(np.where(
            state.beyond < HUGE // 2, np.maximum(state.beyond, 0), 0,
        ).sum(axis=0), 1).astype(float)
        self._allowed = {
            one.server_id: self._mask(one)
            for some in state.staying for one in some}

    def _mask(self, one: Movable) -> npt.NDArray[np.bool_]:
        ids = self._state.ids
        mask = np.ones(len(ids), bool) if one.targets is None else np.array(
            [host_id in one.targets for host_id in ids], bool)
        mask[self._state.positions[one.source]] = False
        return mask

    def has_target(self, one: Movable) -> bool:
        """Whether there is any host to which a server could go."""
        door = np.minimum(self._state.before, self._state.beyond)
        size = self._state.sizes[one.server_id]
        return bool((self._allowed[one.server_id] & (
            (door >= size) | (size == 0)).all(axis=1)).any())

    def place(self, door: Amounts, leaving: list[Movable],
              ) -> tuple[dict[str, int], list[str]]:
        """The position of a host for each of them.

        The largest ones first, each where it leaves least.

        :param door: what is free, by position of host; changed
        :returns: and those for which there was none
        """
        sizes = self._state.sizes
        order = sorted(leaving, key=lambda one: (
            -float((sizes[one.server_id] / self._scale).max(initial=0)),
            one.server_id))
        targets: dict[str, int] = {}
        before, lost = door.copy(), list[str]()
        for one in order:
            able = self._able(door, one)
            if not able:
                lost.append(one.server_id)
                continue
            targets[one.server_id] = able[0]
            door[able[0]] -= sizes[one.server_id]
        if lost and len(order) <= FEW:
            ways = [_WAYS]
            found = self._try(before, order, ways)
            if found is not None:
                return found, []
        return targets, lost

    def _able(self, door: Amounts, one: Movable) -> list[int]:
        """Where it could go; first where least is left then."""
        size = self._state.sizes[one.server_id]
        able = np.flatnonzero(self._allowed[one.server_id] & (
            (door >= size) | (size == 0)).all(axis=1))
        left = ((door[able] - size) / self._scale).sum(axis=1)
        return [int(place) for place in able[np.argsort(left, kind='stable')]]

    def _try(self, door: Amounts, order: list[Movable], ways: list[int],
             ) -> dict[str, int] | None:
        """Every way to place servers, until one does or there were too many.
        """
        if not order:
            return {}
        ways[0] -= 1
        first, *rest = order
        size = self._state.sizes[first.server_id]
        for place in self._able(door, first):
            if ways[0] <= 0:
                break
            door[place] -= size
            found = self._try(door, rest, ways)
            door[place] += size
            if found is not None:
                return {first.server_id: place, **found}
        return None
