# SPDX-License-Identifier: Apache-2.0

"""Limits of one server on a host: how much of it placement can give to one.

Placement takes all of a class of one request group from one provider, and
only amounts that the provider's inventory allows. So a host with enough
capacity may still be unable to take a server, or as many as its capacity
suggests.
"""

import functools
import itertools
import typing as ty

import numpy as np

from blazar_core.capacity.step_functions import Ints
from blazar_core.common import model

#: More servers than any host takes.
UNLIMITED = 2 ** 31
#: The number of demands whose limits are cached.
_REMEMBERED = 100
#: The maximum number of combinations of providers that are tried for a server;
#: if none of these fits, placement decides.
_TRIES = 10_000

#: The maximum number of ways to choose kinds of providers for a server.
_WAYS = 64

#: For each class, the classes of the kinds of providers that have it, and the
#: providers of each.
Kinds: ty.TypeAlias = dict[str, dict[str, set[str]]]

#: The units of each provider of a host, and for each set of providers that the
#: groups of a demand name, whether it is one of them.
_Shape: ty.TypeAlias = tuple[
    tuple[tuple[tuple[str, model.Units], ...], tuple[bool, ...]], ...]


class Limits(ty.NamedTuple):
    """The limits that units set to the servers of a demand on each host.

    :ivar most: how many servers each host can take; None: as many as its
        capacity allows
    :ivar lost: by class, how much of what is free on each host the servers
        cannot use, as it is left over on several providers
    """

    most: Ints | None
    lost: dict[str, Ints]

    def able(self, which: Ints, least: int) -> Ints:
        """Return those of some hosts that can take so many servers."""
        return which if self.most is None else (
            which[self.most[which] >= least])

    def less(self, free: Ints, rc: str) -> Ints:
        """Return what is free of a class on each host, less what is lost."""
        return free - self.lost[rc] if rc in self.lost else free


class ExceedsHost(ty.NamedTuple):
    """An amount that no host gives one server.

    ``most`` and ``least`` are the largest and the smallest amounts that a host
    gives, ``steps`` the numbers of which an amount has to be a multiple.
    """

    rc: str
    amount: int
    most: int
    least: int
    steps: tuple[int, ...]


def kinds_of(providers: ty.Iterable[tuple[str, ty.Iterable[str]]]) -> Kinds:
    """Return the kinds of some providers.

    :param providers: their uuids, each with its classes
    """
    found: Kinds = {}
    for uuid, classes in providers:
        for rc in classes:
            if (base := model.base_of(rc)) != rc:
                found.setdefault(base, {}).setdefault(rc, set()).add(uuid)
    return found


def ways(resources: model.Resources, groups: ty.Sequence[model.Group],
         kinds: Kinds) -> list[dict[str, int]]:
    """Return what one server may take by kind of provider: one of these.

    Amounts that already name their kind have one way. So have amounts of which
    no provider has a kind: an empty one.

    :param groups: its request groups; none: any provider will do
    """
    known = {model.base_of(rc) for rc in resources
             if model.base_of(rc) != rc}
    choices = []
    for group in groups or (model.Group(tuple(resources.items())),):
        for rc, amount in group.resources:
            if not amount or rc not in kinds or rc in known:
                continue
            required = [some for some in group.required if group.single or any(
                not some.isdisjoint(having) for having in kinds[rc].values())]
            usable = [name for name, having in kinds[rc].items()
                      if group.forbidden.isdisjoint(having) and not any(
                          some.isdisjoint(having) for some in required)]
            if usable:
                choices.append([(name, amount) for name in usable])
    found: dict[ty.Hashable, dict[str, int]] = {}
    for chosen in itertools.islice(itertools.product(*choices), _WAYS):
        amounts = model.summed({name: amount} for name, amount in chosen)
        found.setdefault(frozenset(amounts.items()), amounts)
    return [*found.values()]


class UnitsOfHosts:
    """The units of hosts, in the order of a timeline.

    Hosts with equal units are judged once for each demand.
    """

    def __init__(self) -> None:
        self._uuids: list[str] = []
        self._providers: list[model.Providers] = []
        #: The number in ``_units`` of the units of each host, by position.
        self._numbers: Ints = np.zeros(16, np.int64)
        self._units: dict[ty.Hashable, int] = {_ALONE.units: 0}
        self._known = functools.lru_cache(_REMEMBERED)(self._limits)
        #: The kinds of providers of all hosts.
        self.kinds: Kinds = {}
        self._ways = functools.lru_cache(_REMEMBERED)(
            lambda amounts, groups: ways(dict(amounts), groups, self.kinds))

    def ways(self, demand: model.Demand) -> list[dict[str, int]]:
        """Return what a server of a demand may take by kind of provider."""
        if not self.kinds:
            return [{}]
        return self._ways(tuple(demand.resources.items()), demand.groups)

    def _set_kinds(self, before: model.Providers, now: model.Providers,
                   ) -> None:
        """Update the kinds of providers after a change of a host."""
        for some, is_now in ((before, False), (now, True)):
            for rc, kinds in kinds_of(zip(some.ids, (
                    (name for name, _units in one)
                    for one in some.units))).items():
                for name, uuids in kinds.items():
                    of = self.kinds.setdefault(rc, {})
                    having = of.setdefault(name, set())
                    if is_now:
                        having |= uuids
                    else:
                        having -= uuids
                    if not having:
                        del of[name]
        self.kinds = {rc: kinds for rc, kinds in self.kinds.items() if kinds}
        self._ways.cache_clear()

    def set(self, place: int, uuid: str,
            providers: model.Providers | None) -> None:
        """Set the providers of a host.

        :param uuid: that of the host and of its root provider
        """
        for _more in range(len(self._uuids), place + 1):
            self._uuids.append('')
            self._providers.append(_ALONE)
            self._known.cache_clear()
        if place >= len(self._numbers):
            self._numbers = np.concatenate([
                self._numbers, np.zeros(max(16, place // 2), np.int64)])
        providers = providers or _ALONE
        if (self._uuids[place], self._providers[place]) != (uuid, providers):
            if self._providers[place].ids != ('',) or providers.ids != ('',):
                self._set_kinds(self._providers[place], providers)
            self._uuids[place], self._providers[place] = uuid, providers
            self._numbers[place] = self._units.setdefault(
                providers.units, len(self._units))
            self._known.cache_clear()

    def limits(self, demand: model.Demand, hosts: int) -> Limits:
        """Return the limits of a demand on each host.

        Costs O(hosts) for a demand that is not cached since units changed
        last.

        :param hosts: how many there are
        """
        if not demand.groups:
            return _NONE
        return self._known(demand.groups, demand.isolated, hosts)

    def _limits(self, groups: tuple[model.Group, ...], isolated: bool,
                hosts: int) -> Limits:
        """Return the limits, judged once for all equal units; if the groups of
        the demand name providers, also by which of these a host has.
        """
        demand = model.Demand({}, groups=groups, isolated=isolated)
        named = [*dict.fromkeys(
            some for group in groups
            for some in (*group.required, *(
                [group.forbidden] if group.forbidden else [])))]
        numbers = np.zeros(hosts, np.int64)
        known = min(hosts, len(self._uuids))
        if named:
            shapes: dict[_Shape, int] = {}
            numbers[:known] = [
                shapes.setdefault(self._shape(place, named), len(shapes))
                for place in range(known)]
        else:
            shapes = {tuple((some, ()) for some in ty.cast(
                'tuple[ty.Any, ...]', units)): number
                for units, number in self._units.items()}
            numbers[:known] = self._numbers[:known]
        found = [limits_of(demand, shape, named) for shape in shapes]
        if all(one == (UNLIMITED, {}) for one in found):
            return _NONE
        return Limits(np.array([most for most, _lost in found])[numbers], {
            rc: np.array([lost.get(rc, 0) for _most, lost in found])[numbers]
            for rc in {rc for _most, lost in found for rc in lost}})

    def _shape(self, place: int, named: ty.Sequence[frozenset[str]],
               ) -> _Shape:
        ids, units = self._providers[place]
        return tuple(
            (some, tuple((one or self._uuids[place]) in each
                         for each in named))
            for one, some in zip(ids, units, strict=True))

    def too_much(self, demand: model.Demand, hosts: Ints,
                 capacity: ty.Mapping[str, Ints]) -> list[ExceedsHost] | None:
        """Return why none of some hosts can ever take a server of a demand,
        although they may have the capacity.

        :param hosts: their positions
        :param capacity: by class, what each host has; less than 1 if it has
            none
        :returns: the amounts that none of them gives one server; empty if each
            amount alone is available. None: one of the hosts can take a
            server, or none has all of the classes
        """
        wanted = [*dict.fromkeys(
            one for group in demand.groups for one in group.resources)]
        for rc, _amount in wanted:
            hosts = hosts[capacity[rc][hosts] > 0] if (
                rc in capacity) else hosts[:0]
        if not wanted or not len(hosts):
            return None
        can = self.limits(demand, len(self._uuids)).able(hosts, 1)
        for rc, amount in demand.resources.items():
            can = can[capacity[rc][can] >= amount]
        if len(can):
            return None
        found = []
        for rc, amount in wanted:
            given = {one for place, have in zip(
                hosts.tolist(), capacity[rc][hosts].tolist(), strict=True)
                for one in self._of_class(rc, place) or [
                    model.Units(have, 1, have, 1)]}
            if not any(one.allow(amount) for one in given):
                found.append(ExceedsHost(
                    rc, amount, max(one.most for one in given),
                    min(one.least for one in given),
                    tuple(sorted({one.step for one in given}))))
        return found

    def _of_class(self, rc: str, place: int) -> list[model.Units]:
        """Return the units of a class that the providers of a host have; empty
        if its capacity has all.
        """
        return [units for some in self._providers[place].units
                for name, units in some if name == rc]


_NONE = Limits(None, {})
#: The providers of a host of which none are recorded.
_ALONE = model.Providers(('',), ((),))


class _Portion(ty.NamedTuple):
    """Amounts that have to come from one provider.

    :ivar group: the number of its group
    :ivar amounts: by class
    :ivar usable: the numbers of the providers that could give it
    """

    group: int
    amounts: tuple[tuple[str, int], ...]
    usable: tuple[int, ...]


def limits_of(demand: model.Demand, shape: _Shape,
              named: ty.Sequence[frozenset[str]],
              ) -> tuple[int, dict[str, int]]:
    """Return how many servers of a demand a host can take if nothing is taken
    of it, and by class, how much of what is free they may be unable to use.

    :param named: the sets of providers that its groups name
    """
    units = [dict(some) for some, _which in shape]
    classes = {rc for some in units for rc in some}
    portions = _portions(demand, shape, named, units, classes)
    if not _fits(demand, shape, named, units, portions):
        return 0, {}
    most = UNLIMITED
    lost = {}
    for rc in classes:
        having = [one[rc].capacity for one in units if rc in one]
        sizes = [amount for portion in portions
                 for name, amount in portion.amounts if name == rc]
        if not sizes or len(having) == 1:
            # Its capacity alone is the limit.
            continue
        numbers = {number for portion in portions for number in portion.usable
                   if rc in dict(portion.amounts)}
        most = min(most, _most(rc, units, portions))
        largest, usable = max(sizes), [
            units[number][rc].capacity for number in numbers
            if rc in units[number]]
        # The minimum of: what is lost if all servers have this size; what is
        # lost whatever their sizes; and what lets one fit an empty host.
        amount = min(
            sum(capacity % largest for capacity in usable),
            sum(min(largest - 1, capacity) for capacity in usable) + 1 -
            largest, sum(having) - sum(sizes))
        if amount > 0:
            lost[rc] = amount
    return most, lost


def _most(rc: str, units: ty.Sequence[ty.Mapping[str, model.Units]],
          portions: ty.Iterable[_Portion]) -> int:
    """Return how many times each portion of a class is available at most."""
    return min(sum(
        units[number][rc].capacity // amount for number in portion.usable
        if rc in units[number]) for portion in portions
        for name, amount in portion.amounts if name == rc)


def _portions(demand: model.Demand, shape: _Shape,
              named: ty.Sequence[frozenset[str]],
              units: ty.Sequence[ty.Mapping[str, model.Units]],
              classes: ty.Collection[str]) -> list[_Portion]:
    """Return the portions of a demand, each of which has to come from one
    provider; those with the fewest providers first.
    """
    portions = []
    for number, group in enumerate(demand.groups):
        amounts = [one for one in group.resources if one[1]]
        for some in ([tuple(amounts)] if group.single and amounts
                     else [(one,) for one in amounts]):
            portions.append(_Portion(number, some, tuple(
                place for place in range(len(shape))
                if _can(group, some, shape[place][1], named, units[place],
                        classes, root=not place))))
    portions = _narrowed(demand, shape, named, portions)
    return sorted(portions, key=lambda one: (
        demand.groups[one.group].single, len(one.usable)))


def _narrowed(demand: model.Demand, shape: _Shape,
              named: ty.Sequence[frozenset[str]],
              portions: ty.Sequence[_Portion]) -> list[_Portion]:
    """Return portions that use only providers with a required trait, if no
    other portion of their group could have it.
    """
    narrowed = [*portions]
    for number, group in enumerate(demand.groups):
        for some in group.required:
            place = named.index(some)
            having = {at: tuple(
                one for one in portion.usable if shape[one][1][place])
                for at, portion in enumerate(narrowed)
                if portion.group == number}
            can = [at for at, usable in having.items() if usable]
            if len(can) == 1:
                narrowed[can[0]] = narrowed[can[0]]._replace(
                    usable=having[can[0]])
    return narrowed


def _can(group: model.Group, amounts: ty.Iterable[tuple[str, int]],
         which: ty.Sequence[bool], named: ty.Sequence[frozenset[str]],
         units: ty.Mapping[str, model.Units], classes: ty.Collection[str],
         root: bool) -> bool:
    """Return whether a provider can give a portion, if nothing is taken of it.

    :param classes: those of which any provider of the host has units
    :param root: whether it is the root provider of the host
    """
    there = {some for some, is_one in zip(named, which, strict=True)
             if is_one}
    if group.forbidden in there or group.single and not all(
            some in there for some in group.required):
        return False
    return all(units[rc].allow(amount) if rc in units
               else root and rc not in classes for rc, amount in amounts)


def _fits(demand: model.Demand, shape: _Shape,
          named: ty.Sequence[frozenset[str]],
          units: ty.Sequence[ty.Mapping[str, model.Units]],
          portions: ty.Sequence[_Portion]) -> bool:
    """Return whether an empty host can take one server."""
    if not all(portion.usable for portion in portions):
        return False
    free = [{rc: one.capacity for rc, one in some.items()} for some in units]
    tries = itertools.count()
    chosen: list[int] = []

    def goes_on() -> bool:
        if len(chosen) == len(portions):
            return _have_traits(demand, shape, named, portions, chosen)
        if next(tries) > _TRIES:
            return True
        portion = portions[len(chosen)]
        apart = {place for one, place in zip(portions, chosen)
                 if demand.groups[one.group].single} if (
            demand.isolated and demand.groups[portion.group].single) else ()
        seen = set()
        for place in portion.usable:
            # Of equal providers, one is enough.
            alike = shape[place], tuple(free[place].items()), place in chosen
            if place in apart or alike in seen or any(
                    free[place].get(rc, amount) < amount
                    for rc, amount in portion.amounts):
                continue
            seen.add(alike)
            chosen.append(place)
            _take(free[place], portion, -1)
            done = goes_on()
            _take(free[place], portion, 1)
            chosen.pop()
            if done:
                return True
        return False

    return goes_on()


def _take(free: dict[str, int], portion: _Portion, sign: int) -> None:
    for rc, amount in portion.amounts:
        if rc in free:
            free[rc] += sign * amount


def _have_traits(demand: model.Demand, shape: _Shape,
                 named: ty.Sequence[frozenset[str]],
                 portions: ty.Sequence[_Portion],
                 chosen: ty.Sequence[int]) -> bool:
    """Return whether the providers of the groups that are not single have all
    traits that these require.
    """
    for number, group in enumerate(demand.groups):
        used = {place for one, place in zip(portions, chosen, strict=True)
                if one.group == number}
        if not used:
            continue
        for some in group.required:
            if not any(shape[place][1][named.index(some)] for place in used):
                return False
    return True
