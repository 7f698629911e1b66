# SPDX-License-Identifier: Apache-2.0

"""What a plan is made of, and whether one can be carried out."""

import collections
import typing as ty

from blazar_core.books import ledger
from blazar_core.common import model

__all__ = ['HUGE', 'Movable', 'Move', 'Place', 'Plan', 'Wish', 'is_complete']

#: More than any amount, and yet far from an overflow.
HUGE = 2 ** 60


class Place(ty.NamedTuple):
    """A host, and what is free there, by class, of which something is promised
    to nobody else.

    :ivar within: as long as what is wanted lasts
    :ivar beyond: from then on, for ever
    """

    id: int
    within: model.Resources
    beyond: model.Resources


class Movable(ty.NamedTuple):
    """A server that may be moved.

    :ivar source: the id of the host on which it is
    :ivar takes: what it takes there, and takes for ever where it goes
    :ivar targets: the ids of the hosts that it may move to; None: any
    """

    server_id: str
    source: int
    takes: model.Resources
    targets: frozenset[int] | None = None

    @property
    def memory(self) -> int:
        """MiB"""
        return self.takes.get('MEMORY_MB', 0)


class Wish(ty.NamedTuple):
    """So many servers, each of which takes so much.

    :ivar most: how many of them may stand on one host
    :ivar together: whether all of them have to
    :ivar hosts: the ids of the hosts on which they may stand
    """

    takes: model.Resources
    amount: int
    most: int
    hosts: frozenset[int]
    together: bool = False


class Move(ty.NamedTuple):
    """A server is to move from one host to another one, by their ids."""

    server_id: str
    source: int
    target: int
    takes: model.Resources


class Plan(ty.NamedTuple):
    """The moves to make.

    :ivar picked: for each wish the id of a host for each of its servers
    """

    picked: list[list[int]]
    moves: list[Move]


def is_complete(places: ty.Iterable[Place], movable: ty.Iterable[Movable],
                wishes: ty.Sequence[Wish], made: Plan) -> bool:
    """Whether a plan can be carried out in any order, and what is wanted fits
    when that is done. Asked of every plan before the first server moves.
    """
    sources = {one.server_id: one for one in movable}
    within = {place.id: collections.Counter(place.within) for place in places}
    beyond = {place.id: collections.Counter(place.beyond) for place in places}
    for wish, hosts in zip(wishes, made.picked, strict=True):
        per_host = collections.Counter(hosts)
        if len(hosts) != wish.amount or not wish.hosts >= set(hosts) or (
                max(per_host.values(), default=0) > wish.most) or (
                wish.together and len(per_host) > 1):
            return False
        for host_id in hosts:
            _take(within[host_id], wish.takes)
    for move in made.moves:
        one = sources.pop(move.server_id, None)
        if one is None or one.source != move.source or (
                move.target == move.source) or (
                one.targets is not None and move.target not in one.targets):
            return False
        for room in (within, beyond):
            _take(room[move.target], move.takes)
            if any(_left(room[move.target], rc) < 0
                   for rc, amount in move.takes.items() if amount):
                return False
    for move in made.moves:
        for rc, amount in move.takes.items():
            if rc in within[move.source]:
                within[move.source][rc] += amount
    return all(_left(within[host_id], rc) >= 0
               for wish, hosts in zip(wishes, made.picked, strict=True)
               for host_id in hosts for rc, amount in wish.takes.items()
               if amount)


def _take(room: collections.Counter[str], takes: model.Resources) -> None:
    for rc, amount in takes.items():
        if rc in room or rc not in ledger.SHARED:
            room[rc] -= amount


def _left(room: ty.Mapping[str, int], rc: str) -> int:
    """What is left of a class; a shared one that a host does not have is no
    concern of the books.
    """
    return room.get(rc, 0)
