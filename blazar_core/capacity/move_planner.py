# SPDX-License-Identifier: Apache-2.0

"""Plan migrations of servers, so that hosts get free capacity for a demand.

The planner is pure: it reads no database and writes nothing.

A plan names the hosts for the demand, and a target host for each server that
has to leave them. A server moves at most once, and each target has its free
capacity from the beginning. So no move waits for another one, moves may be
made in any order, and a failed move does not affect the others.

The plan with the fewest moves is chosen; of equal ones, the plan that moves
the least memory. Servers that may have different kinds of providers all get
one kind if there is a plan for that. The cost of each host is computed first.
Combinations of hosts are then tried from the cheapest on until the servers of
one of them find targets. If there are few combinations, many are tried;
otherwise servers without a target stay, and the search is repeated without
them.
"""

import collections
import heapq
import itertools
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.capacity import rule
from blazar_core.capacity import search
from blazar_core.common import model


class PlannedHost(ty.NamedTuple):
    """A host, and what is free there and not reserved by leases, by class.

    :ivar within: until the demand ends
    :ivar beyond: from then on, without an end
    """

    id: int
    within: model.Resources
    beyond: model.Resources


class Movable(ty.NamedTuple):
    """A server that may be moved.

    :ivar source: the id of its host
    :ivar takes: what it takes there, and takes of its target without an end
    :ivar targets: the ids of the hosts that it may move to; None: any
    """

    server_id: str
    source: int
    takes: model.Resources
    targets: frozenset[int] | None = None

    @property
    def memory(self) -> int:
        """The memory of the server in MiB."""
        return self.takes.get('MEMORY_MB', 0)


class PlannedDemand(ty.NamedTuple):
    """A number of servers of equal size.

    :ivar most: the maximum number on one host
    :ivar together: whether all of them must be on one host
    :ivar hosts: the ids of the hosts that they may use
    :ivar ways: what one of them takes by kind of provider: one of these
    :ivar limits: by id of a host, how many of them its providers can serve,
        and by class, how much of what is free they cannot use
    """

    takes: model.Resources
    amount: int
    most: int
    hosts: frozenset[int]
    together: bool = False
    ways: tuple[model.Resources, ...] = ({},)
    limits: ty.Mapping[int, tuple[int, model.Resources]] = {}

    def most_on(self, host_id: int) -> int:
        """Return the maximum number on a host."""
        return min(self.most, self.limits.get(host_id, (self.most, {}))[0])

    def lost_on(self, host_id: int) -> model.Resources:
        """Return how much of what is free on a host they cannot use."""
        return self.limits.get(host_id, (0, {}))[1]


class PlannedMove(ty.NamedTuple):
    """A migration of a server from one host to another, by their ids."""

    server_id: str
    source: int
    target: int
    takes: model.Resources


class Plan(ty.NamedTuple):
    """The moves to make.

    :ivar picked: for each demand, the id of a host for each of its servers
    :ivar kinds: for each demand, what each of its servers takes by kind of
        provider
    """

    picked: list[list[int]]
    moves: list[PlannedMove]
    kinds: list[list[model.Resources]]


def is_complete(places: ty.Iterable[PlannedHost],
                movable: ty.Iterable[Movable],
                wishes: ty.Sequence[PlannedDemand], made: Plan) -> bool:
    """Return whether a plan can be carried out in any order, and the demands
    fit afterwards. Checked for every plan before the first server moves.
    """
    sources = {one.server_id: one for one in movable}
    within = {place.id: collections.Counter(place.within) for place in places}
    beyond = {place.id: collections.Counter(place.beyond) for place in places}
    for wish, hosts, kinds in zip(
            wishes, made.picked, made.kinds, strict=True):
        per_host = collections.Counter(hosts)
        if not len(hosts) == len(kinds) == wish.amount or (
                not wish.hosts >= set(hosts)) or any(
                count > wish.most_on(host_id)
                for host_id, count in per_host.items()) or (
                wish.together and len(per_host) > 1) or any(
                way not in wish.ways for way in kinds):
            return False
        for host_id, way in zip(hosts, kinds, strict=True):
            _take(within[host_id], {**wish.takes, **way})
    for move in made.moves:
        one = sources.pop(move.server_id, None)
        if one is None or one.source != move.source or (
                move.target == move.source) or (
                one.targets is not None and move.target not in one.targets):
            return False
        for room in (within, beyond):
            _take(room[move.target], move.takes)
            if any(room[move.target][rc] < 0
                   for rc, amount in move.takes.items() if amount):
                return False
    for move in made.moves:
        for rc, amount in move.takes.items():
            if rc in within[move.source]:
                within[move.source][rc] += amount
    return all(within[host_id][rc] >= wish.lost_on(host_id).get(rc, 0)
               for wish, hosts, kinds in zip(
                   wishes, made.picked, made.kinds, strict=True)
               for host_id, way in zip(hosts, kinds, strict=True)
               for rc, amount in {**wish.takes, **way}.items() if amount)


def _take(room: collections.Counter[str], takes: model.Resources) -> None:
    for rc, amount in takes.items():
        if _is_judged(room, rc):
            room[rc] -= amount


def _is_judged(classes: ty.Collection[str], rc: str) -> bool:
    """Return whether a host with these classes is judged by a class: not if it
    is shared, or the host has no kinds of providers of it.
    """
    base = model.base_of(rc)
    return rc in classes or rc not in rule.SHARED and (
        base == rc or base not in classes or any(
            one != base and model.base_of(one) == base for one in classes))


#: Up to this number of servers, all combinations are tried.
FEW = 14
#: The maximum number of further ways to place servers that are tried.
_WAYS = 3000

#: By class; or by position of the host and class.
Amounts: ty.TypeAlias = npt.NDArray[np.int64]


class State:
    """The free amounts as the plan grows; by position of the host and class.

    :ivar within: for the demand, after the servers of the plan have moved
    :ivar before: for the demand, before any of them has moved
    :ivar beyond: after the demand, without an end
    :ivar staying: by position of the host, the servers that may still be moved
    """

    def __init__(self, places: ty.Sequence[PlannedHost],
                 movable: ty.Sequence[Movable],
                 wishes: ty.Sequence[PlannedDemand]) -> None:
        takes = [*(one.takes for one in movable),
                 *(one.takes for one in wishes),
                 *(way for one in wishes for way in one.ways)]
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
            room[rc] if rc in room
            else 0 if _is_judged(room, rc) else search.HUGE
            for rc in self.classes] for room in rooms], np.int64).reshape(
                -1, len(self.classes))

    def apply(self, found: Plan, wish: PlannedDemand) -> None:
        """Subtract the capacity and the moves of a demand that was planned."""
        for host_id, way in zip(
                found.picked[0], found.kinds[0], strict=True):
            takes = self.amounts({**wish.takes, **way})
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
            # A server that moves there does not wait for another one to leave.
            np.minimum(self.within[target], self.before[target],
                       out=self.within[target])
            self.staying[target] = []


class Placing:
    """Finds targets for servers that leave their hosts."""

    def __init__(self, state: State) -> None:
        self._state = state
        #: The free amounts of each class, of all hosts together.
        self._scale = np.maximum(np.where(
            state.beyond < search.HUGE // 2, np.maximum(state.beyond, 0), 0,
        ).sum(axis=0), 1).astype(float)
        self._allowed = {
            one.server_id: self._mask(one)
            for some in state.staying for one in some}
        #: What a server that moves there may take.
        self._free = np.minimum(state.before, state.beyond)

    def _mask(self, one: Movable) -> npt.NDArray[np.bool_]:
        ids = self._state.ids
        mask = np.ones(len(ids), bool) if one.targets is None else np.array(
            [host_id in one.targets for host_id in ids], bool)
        mask[self._state.positions[one.source]] = False
        return mask

    def has_target(self, one: Movable) -> bool:
        """Return whether there is any host that a server could move to."""
        size = self._state.sizes[one.server_id]
        return bool((self._allowed[one.server_id] & (
            (self._free >= size) | (size == 0)).all(axis=1)).any())

    def place(self, door: Amounts, leaving: list[Movable],
              ) -> tuple[dict[str, int], list[str]]:
        """Return the position of a target host for each server.

        The largest servers are placed first, each where it leaves least free.

        :param door: what is free, by position of the host; is changed
        :returns: the positions, and the servers for which there was no target
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
        """Return where a server fits, the host with the least left first."""
        size = self._state.sizes[one.server_id]
        able = np.flatnonzero(self._allowed[one.server_id] & (
            (door >= size) | (size == 0)).all(axis=1))
        left = ((door[able] - size) / self._scale).sum(axis=1)
        return [int(place) for place in able[np.argsort(left, kind='stable')]]

    def _try(self, door: Amounts, order: list[Movable], ways: list[int],
             ) -> dict[str, int] | None:
        """Try all ways to place servers, until one succeeds or there were too
        many.
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


#: The cost of a move in MiB of memory: more than that of all memory.
MOVE = 2 ** 36


class Option(ty.NamedTuple):
    """A number of servers that fit on a host if some servers leave it."""

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
    """Return all sets of servers to move of which no server could stay."""
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
    """Return servers to move: those that free the largest part of what is
    still missing first, without those that turn out to be unnecessary.
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
    """Yield how many of some servers each host gets, the cheapest way first.

    :param options: by position of the host
    """
    hosts = [*options]
    ahead = _ahead([options[host] for host in hosts], count)
    if ahead[0][count] >= search.HUGE:
        return
    number = itertools.count()
    # By minimum cost; of equal ones, the most complete first.
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
            if rest < 0 or after[rest] >= search.HUGE:
                continue
            heapq.heappush(heap, (
                cost + option.cost + after[rest], -reached - 1, next(number),
                rest, cost + option.cost, ((hosts[reached], option), way)
                if option.amount else way))


def _ahead(options: ty.Sequence[list[Option]], count: int,
           ) -> list[list[int]]:
    """Return the minimum cost of each number of servers on the hosts from each
    one on.
    """
    least = np.full(count + 1, search.HUGE, np.int64)
    least[0] = 0
    ahead = [least]
    for some in reversed(options):
        cheapest: dict[int, int] = {}
        for option in some:
            cheapest[option.amount] = min(
                option.cost, cheapest.get(option.amount, search.HUGE))
        better = least.copy()
        for size, cost in cheapest.items():
            if size <= count:
                np.minimum(better[size:], least[:count + 1 - size] + cost,
                           out=better[size:])
        least = np.minimum(better, search.HUGE)
        ahead.append(least)
    return [one.tolist() for one in reversed(ahead)]


#: The number of choices of hosts that are tried if there are few servers.
_TRIES_OF_FEW = 500
#: The number of searches, each without servers that found no target before.
_ROUNDS = 16


def plan(places: ty.Sequence[PlannedHost], movable: ty.Sequence[Movable],
         wishes: ty.Sequence[PlannedDemand], most: int) -> Plan | None:
    """Return the plan that causes the least disturbance of those found.

    :param most: the maximum number of moves
    :returns: None when none was found
    """
    state = State(places, movable, wishes)
    order = sorted(range(len(wishes)), key=lambda number: (
        -sum(wishes[number].takes.values()), number))
    found: dict[int, Plan] = {}
    moves: list[PlannedMove] = []
    for number in order:
        one = _plan_one(state, wishes[number], most - len(moves))
        if one is None:
            return None
        found[number] = one
        moves += one.moves
    made = [found[number] for number in range(len(wishes))]
    return Plan([one.picked[0] for one in made], moves,
                [one.kinds[0] for one in made])


def _plan_one(state: State, wish: PlannedDemand, most: int) -> Plan | None:
    """Return the best plan for one demand, and apply it.

    If not all of its servers can have the same kinds of providers, they are
    planned one after the other.
    """
    made = _Search(state, wish, most).best()
    if made is not None:
        state.apply(made, wish)
        return made
    if len(wish.ways) == 1 or wish.amount == 1 or wish.together:
        return None
    made = Plan([[]], [], [[]])
    for _server in range(wish.amount):
        on = collections.Counter(made.picked[0])
        one = _Search(state, wish._replace(amount=1, hosts=frozenset(
            host_id for host_id in wish.hosts
            if on[host_id] < wish.most_on(host_id))),
            most - len(made.moves)).best()
        if one is None:
            return None
        state.apply(one, wish)
        made = Plan([made.picked[0] + one.picked[0]], made.moves + one.moves,
                    [made.kinds[0] + one.kinds[0]])
    return made


class _Search:
    """A search for the best plan for one demand whose servers all have the
    same kinds of providers.
    """

    def __init__(self, state: State, wish: PlannedDemand, most: int) -> None:
        self._state = state
        self._wish = wish
        self._most = most
        self._few = sum(map(len, state.staying)) <= FEW
        self._tries = _TRIES_OF_FEW if self._few else 1
        self._placing = Placing(state)
        #: By position of the host, the servers that could leave it.
        self._usable = {
            position: list(filter(self._placing.has_target, some))
            for position, some in enumerate(state.staying)
            if state.ids[position] in wish.hosts}
        #: What would be free if all of them left.
        self._reach = {
            position: state.within[position] + sum(
                state.sizes[one.server_id] for one in some)
            for position, some in self._usable.items()}

    def best(self) -> Plan | None:
        return min(filter(None, map(self._best_of, self._wish.ways)),
                   key=lambda made: (len(made.moves), sum(
                       move.takes.get('MEMORY_MB', 0)
                       for move in made.moves)), default=None)

    def _best_of(self, way: model.Resources) -> Plan | None:
        """Return the best plan of those in which each server takes the same of
        each kind of provider.
        """
        takes = self._state.amounts({**self._wish.takes, **way})
        usable = {position: some for position, some in self._usable.items()
                  if ((takes <= self._reach[position]) | (takes == 0)).all()}
        known = {position: self._options(position, some, takes)
                 for position, some in usable.items()}
        for _round in range(_ROUNDS):
            options = {position: some for position, some in known.items()
                       if some}
            homeless: collections.Counter[str] = collections.Counter()
            for chosen in itertools.islice(
                    choices(options, self._wish.amount), self._tries):
                if sum(len(one.leaving) for one in chosen.values()) > (
                        self._most):
                    break
                moves, lost = self._place(chosen, takes)
                if not lost:
                    picked = [self._state.ids[position]
                              for position, option in sorted(chosen.items())
                              for _one in range(option.amount)]
                    return Plan([picked], moves, [[way] * len(picked)])
                homeless.update(lost)
            if not homeless:
                return None
            stay = {min(homeless, key=lambda one: (-homeless[one], one))} if (
                self._few) else set(homeless)
            for position, some in usable.items():
                rest = [one for one in some if one.server_id not in stay]
                if len(rest) < len(some):
                    usable[position] = rest
                    known[position] = self._options(position, rest, takes)
        return None

    def _place(self, chosen: ty.Mapping[int, Option], takes: Amounts,
               ) -> tuple[list[PlannedMove], list[str]]:
        """Return the moves of a choice, or the servers without a target."""
        door = self._state.before.copy()
        for position, option in chosen.items():
            door[position] -= takes * option.amount + self._lost(
                position)
        np.minimum(door, self._state.beyond, out=door)
        targets, lost = self._placing.place(door, [
            one for option in chosen.values() for one in option.leaving])
        if lost:
            return [], lost
        return [PlannedMove(one.server_id, one.source,
                            self._state.ids[targets[one.server_id]], one.takes)
                for _position, option in sorted(chosen.items())
                for one in option.leaving], []

    def _lost(self, position: int) -> Amounts:
        """Return how much of what is free on a host cannot be used."""
        return self._state.amounts(
            self._wish.lost_on(self._state.ids[position]))

    def _options(self, position: int, some: list[Movable],
                 takes: Amounts) -> list[Option]:
        """Return what a host could take, and which servers must leave it."""
        wish, options = self._wish, []
        most = min(wish.most_on(self._state.ids[position]), wish.amount)
        free = self._state.within[position] - self._lost(position)
        for count in range(
                wish.amount if wish.together else 1, most + 1):
            need = takes * count - free
            if not (need > 0).any():
                options.append(Option(count, 0, ()))
                continue
            ways = self._ways(need, some)
            if not ways:
                break
            options += [Option(
                count, sum(MOVE + one.memory for one in way), way)
                for way in ways]
        return options

    def _ways(self, need: Amounts, some: list[Movable],
              ) -> list[tuple[Movable, ...]]:
        """Return sets of servers that free enough when they leave, none of
        which could stay.
        """
        wanted = np.flatnonzero(need > 0)
        needs = [int(need[n]) for n in wanted]
        sized = sorted(((one, [int(self._state.sizes[one.server_id][n])
                               for n in wanted]) for one in some),
                       key=lambda pair: (pair[0].memory, pair[0].server_id))
        if not covers(needs, sized):
            return []
        if self._few:
            return every_way(needs, sized)
        for count in (1, 2):
            if any(sum(sorted(size[n] for _one, size in sized)[-count:]) <
                   amount for n, amount in enumerate(needs)):
                continue
            pairs = min(
                (some for some in itertools.combinations(sized, count)
                 if covers(needs, some)), default=None,
                key=lambda some: sum(one.memory for one, _size in some))
            if pairs is not None:
                return [tuple(one for one, _size in pairs)]
        return [greedy_way(needs, sized)]
