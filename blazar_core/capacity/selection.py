# SPDX-License-Identifier: Apache-2.0

"""Select hosts for demands, in one look at the timeline.

A strategy, the operator's choice, orders the hosts and says how far each is
filled. A server group with a soft policy has its own preference, and the
strategy decides between equal hosts.
"""

import contextlib
import dataclasses
import heapq
import typing as ty

import numpy as np
from numpy import typing as npt

from blazar_core.capacity import booking_index
from blazar_core.capacity import rule
from blazar_core.capacity import timelines
from blazar_core.common import errors
from blazar_core.common import model

__all__ = ['HostBound', 'MANY', 'NoFit', 'Picked', 'Pinned', 'Selection',
           'Strategy', 'WISHES', 'count_of', 'most_of', 'pack', 'spread']

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


#: For each demand, the id of a host for each of its servers.
Picked: ty.TypeAlias = list[list[int]]

#: More servers than any request has.
MANY = 2 ** 31
#: Of more hosts than these so many are looked at first.
FIRST = 4096


class Pinned(ty.NamedTuple):
    """Servers that stay where they are: how many on each host, by its id."""

    resources: model.Resources
    on: ty.Mapping[int, int]


class NoFit(ty.NamedTuple):
    """Some demand has no room.

    :ivar fits: how many servers of all do have
    :ivar anywhere: whether there are hosts at all that it may use
    """

    fits: int
    anywhere: bool


@dataclasses.dataclass(frozen=True)
class HostBound:
    """On how many hosts a project may have reservations over all times: so
    many times those on which its leases are at the same time, and two more.

    :ivar times: the operator's bound
    :ivar hosts: by id, those on which it has reservations
    :ivar leases: of each of its leases, over which window it is on how many
    """

    times: int
    hosts: frozenset[int]
    leases: tuple[tuple[model.Window, int], ...]

    def allows(self, picked: Picked, window: model.Window) -> bool:
        """Whether a lease may have these hosts over a window."""
        wanted = {host_id for hosts in picked for host_id in hosts}
        many = len(wanted | self.hosts)
        return wanted <= self.hosts or many <= self.times * max(
            len(wanted), self._most(len(wanted), window)) + 2

    def with_lease(self, picked: Picked, window: model.Window) -> 'HostBound':
        """Return the same with a lease more."""
        wanted = {host_id for hosts in picked for host_id in hosts}
        return dataclasses.replace(
            self, hosts=self.hosts | wanted,
            leases=(*self.leases, (window, len(wanted))))

    def _most(self, wanted: int, window: model.Window) -> int:
        """On how many its leases are at the same time at most."""
        return rule.peaks((), [
            (one, {model.HOST: count})
            for one, count in (*self.leases, (window, wanted))])[model.HOST]


class _Order(ty.NamedTuple):
    """Which hosts come before others, whatever the strategy says.

    :ivar reserved: those that have reservations, by position: first, so that
        the others stay free of them, for workloads without an end
    :ivar lost: those about which others are deciding
    :ivar gather: whether one that is reserved comes before one that is not
        although others are deciding about it
    :ivar off: those that are switched off: last
    """

    reserved: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]
    gather: bool
    off: npt.NDArray[np.bool_]

    def groups(self, candidates: npt.NDArray[np.intp],
               ) -> list[npt.NDArray[np.intp]]:
        """Positions, those that come first in the first group."""
        lost = self.lost[candidates].astype(np.int8)
        new = (~self.reserved[candidates]).astype(np.int8)
        rank = 2 * new + lost if self.gather else 2 * lost + new
        rank += 4 * self.off[candidates]
        return [candidates[rank == one] for one in np.unique(rank)]


def _too_wide(host_bound: HostBound, hosts: int) -> str:
    """Return the refusal of a lease that chooses further hosts."""
    return (
        f'The leases of a project may use {host_bound.times} times as many '
        'hosts over all times as they use at the same time, and 2 more '
        f'(max_host_spread). Those of this project use {hosts}, which have '
        'capacity for this lease, but do not include the hosts that it '
        'selects by properties or a server group. Leave these out, or delete '
        'leases that you do not need.')


class Selection:
    """Picks hosts.

    :param index: from which they are picked
    :param strategy: which of those that have room are taken first
    """

    def __init__(self, index: booking_index.Index,
                 strategy: Strategy) -> None:
        self._index = index
        self._strategy = strategy

    @contextlib.contextmanager
    def asked(self, lag: float, instead_of: ty.Sequence[ty.Any] = (),
              coming: ty.Sequence[ty.Any] = (),
              ) -> ty.Iterator[timelines.Timeline]:
        """The timeline, as if some bookings were not there and others were.
        """
        with self._index.fresh(lag) as timeline:
            with self._index.excluding(instead_of, coming):
                yield timeline

    @contextlib.contextmanager
    def asked_for(self, demands: ty.Sequence[model.Demand], lag: float,
                  instead_of: ty.Sequence[ty.Any] = (),
                  coming: ty.Sequence[ty.Any] = (),
                  ) -> ty.Iterator[tuple[
                      timelines.Timeline, ty.Sequence[model.Demand]]]:
        """The same, with demands that name their hosts, as :meth:`named`.

        Hosts are judged before; where they have changed since, again.
        """
        alike = self._index.judged
        while True:
            found = None if alike is None else _named(demands, alike)
            with self.asked(lag, instead_of, coming) as timeline:
                if found is not None and alike is self._index.alike():
                    yield timeline, found
                    return
                alike = self._index.alike()

    def named(self, demands: ty.Sequence[model.Demand],
              ) -> ty.Sequence[model.Demand]:
        """Demands that name their hosts instead of what these must be like.

        To judge all hosts takes a while: nobody waits for that.
        """
        if all(demand.properties is None for demand in demands):
            return demands
        with self._index.fresh():
            alike = self._index.alike()
        return _named(demands, alike)

    def together(self, timeline: timelines.Timeline,
                 demands: ty.Sequence[model.Demand], window: model.Window,
                 last: ty.Collection[int] = (),
                 kept: ty.Sequence[Pinned] = (),
                 own: ty.Collection[int] = (), gather: bool = True,
                 ) -> Picked | NoFit:
        """Hosts for all demands; or that there are none left for one.

        Those that have reservations come first.

        :param last: the ids of hosts about which others are deciding
        :param own: the ids of hosts that count as reserved already
        :param gather: whether a host with reservations comes before others
            even if it is one of ``last``

        The demand with the fewest hosts to choose from chooses first. One
        that accepts fewer gets more only of what all others leave. The levels
        of the timeline are searched once; each demand costs O(H) beside that.
        """
        order = _Order(timeline.reserved() | timeline.mask(own),
                       timeline.mask(last), gather, self._index.apart().off)
        fewest = [demand.fewest() for demand in demands]
        beside = timelines.Tentative(len(timeline))
        if len(demands) == 1 and not kept:
            places = self._first(timeline, demands[0], window, order, beside)
            if places is not None:
                return [[timeline.ids[place] for place in places]]
        # A single demand is seen not to fit on most hosts by less.
        peaks = timeline.peaks(window) if (
            len(demands) + len(kept) > 1) else None
        fitting = _keep(timeline, window, kept, beside, peaks)
        if fitting < count_of(kept):
            return NoFit(fitting, True)
        allowed = [self.allowed(timeline, demand) for demand in demands]
        rooms = [timeline.fits(demand, window, hosts, beside, peaks)
                 for demand, hosts in zip(fewest, allowed, strict=True)]
        picked: dict[int, npt.NDArray[np.intp]] = {}
        for number in sorted(
                range(len(demands)), key=lambda number: np.count_nonzero(
                    rooms[number] >= _on_one(demands[number]))):
            demand, room = fewest[number], rooms[number]
            if picked:
                room = timeline.fits(demand, window, room > 0, beside, peaks)
            places = self._fill(
                timeline, demand, window, room, order, beside)
            if places is None:
                hosts = allowed[number]
                return NoFit(
                    fitting + most_of(demand, room) + sum(
                        map(len, picked.values())),
                    bool(len(timeline) if hosts is None else hosts.any()))
            picked[number] = places
            _add(timeline, beside, places, demand)
        for number, demand in enumerate(demands):
            picked[number] = np.concatenate((picked[number], self._more(
                timeline, demand, window, rooms[number] > 0, order, beside,
                peaks)))
        return [[timeline.ids[place] for place in picked[number]]
                for number in range(len(demands))]

    def gathered(self, timeline: timelines.Timeline,
                 asked: ty.Sequence[model.Demand],
                 named: ty.Sequence[model.Demand], window: model.Window,
                 kept: ty.Sequence[Pinned], host_bound: HostBound,
                 ) -> Picked | None:
        """Return hosts among those that a project has reservations on.

        :param asked: as the user wrote them
        :param named: the same, with the hosts that they may use
        :returns: None: there is no capacity for them there, so that they may
            have others
        :raises LimitExceeded: when there is, and it is the user who chose
            other hosts
        """
        hosts = self._index.hosts
        own = frozenset(hosts[one].uuid for one in host_bound.hosts
                        if one in hosts)

        def within(demands: ty.Iterable[model.Demand]) -> Picked | NoFit:
            return self.together(timeline, [dataclasses.replace(
                one, hosts=own if one.hosts is None else own & one.hosts)
                for one in demands], window, (), kept)

        if not isinstance(found := within(named), NoFit):
            return found
        if isinstance(within(dataclasses.replace(
                one, properties=None, avoid=frozenset(),
                hosts=one.hosts if one.ungrouped is None else one.ungrouped)
                for one in asked), NoFit):
            return None
        raise errors.LimitExceeded(_too_wide(host_bound, len(own)))

    def fitting(self, timeline: timelines.Timeline,
                parts: ty.Sequence[model.Demand]) -> ty.Callable[
                    [model.Window], int]:
        """Return what says how many servers of a demand there is capacity for
        over a window; none where a required host has none.

        :param parts: see :meth:`.model.Demand.parts`; they name their hosts
        """
        allowed = [self.allowed(timeline, part) for part in parts]

        def fits(window: model.Window) -> int:
            found = [min(part.count, most_of(part, timeline.fits(
                part, window, hosts)))
                for part, hosts in zip(parts, allowed, strict=True)]
            return sum(found) if all(
                fit == part.count for fit, part in zip(found[:-1], parts)
            ) else 0

        return fits

    def allowed(self, timeline: timelines.Timeline, demand: model.Demand,
                ) -> npt.NDArray[np.bool_] | None:
        """Which hosts a demand may use at all, by position; None: any.

        Costs O(H).
        """
        apart = self._index.apart()
        among: npt.NDArray[np.bool_] = {
            None: np.ones(len(timeline), bool),
            model.HostPool.COMMON: ~apart.serving,
            model.HostPool.ENROLLED: apart.reservable,
            model.HostPool.ALL: ~apart.serving | apart.reservable,
        }[demand.among]
        if demand.hosts is None and not demand.avoid:
            return None if among.all() else among
        if demand.hosts is not None:
            among = among & self._index.mask(demand.hosts)
        return among & ~self._index.mask(demand.avoid)

    def places(self, timeline: timelines.Timeline, demand: model.Demand,
               ) -> npt.NDArray[np.intp]:
        """The positions of the hosts that a demand may use at all."""
        allowed = self.allowed(timeline, demand)
        return np.arange(len(timeline)) if allowed is None else (
            np.flatnonzero(allowed))

    def _first(self, timeline: timelines.Timeline, demand: model.Demand,
               window: model.Window, order: _Order,
               beside: timelines.Tentative) -> npt.NDArray[np.intp] | None:
        """What :meth:`_fill` would say of all hosts, by a look at those alone
        that would be filled first.

        :returns: None: look at all
        """
        if len(timeline) <= FIRST or demand.count > FIRST or (
                demand.least is not None or
                demand.affinity in WISHES):
            return None
        hosts = self.allowed(timeline, demand)
        if hosts is None:
            hosts = np.ones(len(timeline), bool)
        if demand.among is model.HostPool.ALL:
            hosts = hosts & ~self._index.apart().serving
        first = np.zeros(len(timeline), bool)
        first[np.concatenate([self._strategy(
            timeline, some, window, beside.servers > 0, FIRST)
            for some in order.groups(np.flatnonzero(hosts))] or [
                np.zeros(0, np.intp)])[:FIRST]] = True
        return self._fill(timeline, demand, window, timeline.fits(
            demand, window, first, beside), order, beside)

    def _fill(self, timeline: timelines.Timeline, demand: model.Demand,
              window: model.Window, rooms: npt.NDArray[np.int64],
              order: _Order, beside: timelines.Tentative,
              ) -> npt.NDArray[np.intp] | None:
        """The position of a host for each server; None: they do not fit."""
        if not demand.count:
            return np.zeros(0, np.intp)
        candidates = np.flatnonzero(rooms >= _on_one(demand))
        if not len(candidates) or rooms.sum() < demand.count:
            return None
        groups = [candidates]
        if demand.among is model.HostPool.ALL:
            # What could be leased whole is left whole as long as possible.
            serving = self._index.apart().serving[candidates]
            groups = [candidates[~serving], candidates[serving]]
        # Each takes one server at least.
        most = len(candidates) if demand.affinity in WISHES else (
            demand.count)
        filled = np.concatenate([self._strategy(
            timeline, some, window, beside.servers > 0, most)
            for group in groups for some in order.groups(group)])
        if demand.affinity in WISHES:
            return np.array(WISHES[demand.affinity](
                filled, rooms, self._members(timeline, demand), demand.count))
        places = np.repeat(filled, np.minimum(rooms[filled], demand.count))
        return places[:demand.count] if len(places) >= demand.count else None

    def _more(self, timeline: timelines.Timeline, demand: model.Demand,
              window: model.Window, hosts: npt.NDArray[np.bool_],
              order: _Order, beside: timelines.Tentative,
              peaks: ty.Sequence[npt.NDArray[np.int64]] | None,
              ) -> npt.NDArray[np.intp]:
        """Positions of hosts for what a demand wants beside its fewest."""
        count = demand.count - demand.fewest().count
        if count:
            room = timeline.fits(demand, window, hosts, beside, peaks)
            demand = dataclasses.replace(
                demand, count=min(count, most_of(demand, room)), least=None)
            places = self._fill(
                timeline, demand, window, room, order, beside)
            if places is not None:
                _add(timeline, beside, places, demand)
                return places
        return np.zeros(0, np.intp)

    def _members(self, timeline: timelines.Timeline, demand: model.Demand,
                 ) -> npt.NDArray[np.int64]:
        """How many servers of its group each host has, by position."""
        members = np.zeros(len(timeline), np.int64)
        for uuid, count in demand.members.items():
            if uuid in self._index.ids_by_uuid:
                members[timeline.index(self._index.ids_by_uuid[uuid])] = count
        return members


def _named(demands: ty.Sequence[model.Demand], alike: booking_index.Alike,
           ) -> ty.Sequence[model.Demand]:
    found = {one: alike(one) for one in {
        demand.properties for demand in demands} if one is not None}
    return [demand if demand.properties is None else dataclasses.replace(
        demand, properties=None, hosts=found[demand.properties]
        if demand.hosts is None
        else found[demand.properties] & demand.hosts)
        for demand in demands]


def count_of(kept: ty.Iterable[Pinned]) -> int:
    """How many servers stay where they are."""
    return sum(sum(one.on.values()) for one in kept)


def _keep(timeline: timelines.Timeline, window: model.Window,
          kept: ty.Iterable[Pinned], beside: timelines.Tentative,
          peaks: ty.Sequence[npt.NDArray[np.int64]] | None) -> int:
    """Put what is kept beside; returns how many servers of it fit."""
    fitting = 0
    for one in kept:
        wanted = np.zeros(len(timeline), np.int64)
        for host_id, count in one.on.items():
            wanted[timeline.index(host_id)] = count
        rooms = timeline.fits(model.Demand(one.resources, count=MANY),
                              window, wanted > 0, beside, peaks)
        fitting += int(np.minimum(rooms, wanted).sum())
        beside.add(wanted, one.resources)
    return fitting


def _add(timeline: timelines.Timeline, beside: timelines.Tentative,
         places: npt.NDArray[np.intp], demand: model.Demand) -> None:
    """Put what was picked for a demand beside the timeline."""
    beside.add(np.bincount(places, minlength=len(timeline)),
               timeline.capacity if demand.whole else timeline.takes(demand))


def _on_one(demand: model.Demand) -> int:
    """How many servers of a demand a host must take to be of use."""
    return demand.count if demand.affinity is model.Affinity.SAME else 1


def most_of(demand: model.Demand, rooms: npt.NDArray[np.int64]) -> int:
    """How many servers of a demand there is room for."""
    return int(rooms.max(initial=0)
               if demand.affinity is model.Affinity.SAME else rooms.sum())
