# SPDX-License-Identifier: Apache-2.0

"""The search for the plan with the smallest disturbance."""

import collections
import itertools
import typing as ty

import numpy as np

from blazar_core.books.planning import choices
from blazar_core.books.planning.choices import Option
from blazar_core.books.planning import placing
from blazar_core.books.planning.words import Movable
from blazar_core.books.planning.words import Move
from blazar_core.books.planning.words import Place
from blazar_core.books.planning.words import Plan
from blazar_core.books.planning.words import Wish

__all__ = ['plan']

#: Where there are few servers so many choices of hosts are tried.
_TRIES_OF_FEW = 500
#: How often what could not be moved is left out before it is given up.
_ROUNDS = 16


def plan(places: ty.Sequence[Place], movable: ty.Sequence[Movable],
         wishes: ty.Sequence[Wish], most: int) -> Plan | None:
    """The plan with the smallest disturbance that could be found.

    :param most: more moves are not made
    :returns: None when none was found
    """
    state = placing.State(places, movable, wishes)
    order = sorted(range(len(wishes)), key=lambda number: (
        -sum(wishes[number].takes.values()), number))
    picked: dict[int, list[int]] = {}
    moves: list[Move] = []
    for number in order:
        found = _Search(state, wishes[number], most - len(moves)).best()
        if found is None:
            return None
        picked[number] = found.picked[0]
        moves += found.moves
        state.apply(found, wishes[number])
    return Plan([picked[number] for number in range(len(wishes))], moves)


class _Search:
    """Looks for the best plan for one wish."""

    def __init__(self, state: placing.State, wish: Wish, most: int) -> None:
        self._state = state
        self._wish = wish
        self._most = most
        self._takes = state.amounts(wish.takes)
        self._few = sum(map(len, state.staying)) <= placing.FEW
        self._tries = _TRIES_OF_FEW if self._few else 1
        self._placing = placing.Placing(state)

    def best(self) -> Plan | None:
        usable = {position: [one for one in some
                             if self._placing.has_target(one)]
                  for position, some in enumerate(self._state.staying)
                  if self._state.ids[position] in self._wish.hosts}
        known = {position: self._options(position, some)
                 for position, some in usable.items()}
        for _round in range(_ROUNDS):
            options = {position: some for position, some in known.items()
                       if some}
            homeless: collections.Counter[str] = collections.Counter()
            for chosen in itertools.islice(
                    choices.choices(options, self._wish.amount), self._tries):
                if sum(len(one.leaving) for one in chosen.values()) > (
                        self._most):
                    break
                made, lost = self._place(chosen)
                if made is not None:
                    return made
                homeless.update(lost)
            if not homeless:
                return None
            stay = {min(homeless, key=lambda one: (-homeless[one], one))} if (
                self._few) else set(homeless)
            for position, some in usable.items():
                rest = [one for one in some if one.server_id not in stay]
                if len(rest) < len(some):
                    usable[position] = rest
                    known[position] = self._options(position, rest)
        return None

    def _place(self, chosen: ty.Mapping[int, Option],
               ) -> tuple[Plan | None, list[str]]:
        """A plan that makes a choice so, or the servers without a target.
        """
        door = self._state.before.copy()
        for position, option in chosen.items():
            door[position] -= self._takes * option.amount
        np.minimum(door, self._state.beyond, out=door)
        targets, lost = self._placing.place(door, [
            one for option in chosen.values() for one in option.leaving])
        if lost:
            return None, lost
        ids = self._state.ids
        return Plan(
            [[ids[position] for position, option in sorted(chosen.items())
              for _one in range(option.amount)]],
            [Move(one.server_id, one.source, ids[targets[one.server_id]],
                  one.takes)
             for _position, option in sorted(chosen.items())
             for one in option.leaving]), []

    def _options(self, position: int, some: list[Movable]) -> list[Option]:
        """What the host could take, and who has to leave for that."""
        wish, options = self._wish, []
        counts = range(1, min(wish.most, wish.amount) + 1)
        for count in (counts if not wish.together else [wish.amount]):
            need = self._takes * count - self._state.within[position]
            if not (need > 0).any():
                options.append(Option(count, 0, ()))
                continue
            ways = self._ways(need, some)
            if not ways:
                break
            options += [Option(
                count, sum(choices.MOVE + one.memory for one in way), way)
                for way in ways]
        return options

    def _ways(self, need: placing.Amounts, some: list[Movable],
              ) -> list[tuple[Movable, ...]]:
        """Sets of servers that free so much when they leave, none of which
        could stay.
        """
        wanted = np.flatnonzero(need > 0)
        needs = [int(need[n]) for n in wanted]
        sized = sorted(((one, [int(self._state.sizes[one.server_id][n])
                               for n in wanted]) for one in some),
                       key=lambda pair: (pair[0].memory, pair[0].server_id))
        if any(sum(size[n] for _one, size in sized) < amount
               for n, amount in enumerate(needs)):
            return []
        if self._few:
            return choices.every_way(needs, sized)
        for count in (1, 2):
            if any(sum(sorted(size[n] for _one, size in sized)[-count:]) <
                   amount for n, amount in enumerate(needs)):
                continue
            pairs = min(
                (some for some in itertools.combinations(sized, count)
                 if choices.covers(needs, some)), default=None,
                key=lambda some: sum(one.memory for one, _size in some))
            if pairs is not None:
                return [tuple(one for one, _size in pairs)]
        return [choices.greedy_way(needs, sized)]
