# SPDX-License-Identifier: Apache-2.0

"""Select hosts for demands, in one search of the timeline.

A strategy, chosen by the operator, orders the hosts and determines how far
each is filled. A server group with a soft policy has its own preference; the
strategy then decides between equal hosts.
"""

import contextlib
import dataclasses
import heapq
import itertools
import typing as ty

import numpy as np
from numpy import typing as npt

from blazar_core.capacity import booking_index
from blazar_core.capacity import rule
from blazar_core.capacity import timelines
from blazar_core.common import errors
from blazar_core.common import model

#: Puts hosts with free capacity into the order in which they are filled. Its
#: arguments are the timeline, the positions of the hosts in it (ascending),
#: the window, a mask of the hosts that the lease uses already, and how many
#: hosts are needed at most: those that come later may be left out.
Strategy: ty.TypeAlias = ty.Callable[
    [timelines.Timeline, npt.NDArray[np.intp], model.Window,
     npt.NDArray[np.bool_], int], npt.NDArray[np.intp]]


def pack(timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
         window: model.Window, ours: npt.NDArray[np.bool_], most: int,
         ) -> npt.NDArray[np.intp]:
    """Put leases that end together on the same hosts.

    Hosts that stay busy until the lease ends anyway come first, those that
    become free soonest after it before others; then those that would have to
    stay busy for longer, by how much. Empty hosts come last, so that whole
    hosts become free.
    """
    after = timeline.busy_until(candidates) - window.end
    np.maximum(after, 0, out=after, where=ours[candidates])
    # Hosts that are busy for long enough anyway come before all others.
    rank = np.where(after >= 0, after, model.FOREVER - after)
    if most < len(rank):
        # Finding the first ones costs less than sorting all.
        first = np.flatnonzero(rank <= np.partition(rank, most)[most])
        candidates, rank = candidates[first], rank[first]
    return candidates[np.argsort(rank, kind='stable')]


def spread(_timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
           _window: model.Window, _ours: npt.NDArray[np.bool_], _most: int,
           ) -> npt.NDArray[np.intp]:
    """Return the hosts in random order."""
    return np.random.default_rng().permutation(candidates)


def _gathered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
              members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Return positions of hosts for servers with soft affinity.

    Hosts with the most servers of their group come first, then those that
    take all of the servers, then those that take most.

    :param order: of hosts with free capacity, which suffices for all servers
    """
    takes = np.minimum(rooms[order], count)
    order = order[np.lexsort((np.arange(len(order)), -takes, -members[order]))]
    return [*map(int, np.repeat(order, np.minimum(rooms[order], count)))
            ][:count]


def _scattered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
               members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Return positions of hosts for servers with soft anti-affinity.

    Each server gets the host with the fewest servers of its group, including
    those that were placed before it.

    :param order: of hosts with free capacity, which suffices for all servers
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


#: How a soft affinity fills hosts that have capacity for all servers.
WISHES = {model.Affinity.SOFT_SAME: _gathered,
          model.Affinity.SOFT_DIFFERENT: _scattered}


#: For each demand, the id of a host for each of its servers.
Picked: ty.TypeAlias = list[list[int]]

#: More servers than any request has.
MANY = 2 ** 31
#: More servers than are counted that are evicted from a host; and the rank of
#: hosts that are switched off, after all others.
_MOST_EVICTED, _OFF = 128, 1024
#: Of more hosts than this, so many are searched first.
FIRST = 4096


class Pinned(ty.NamedTuple):
    """Servers that stay where they are: how many on each host, by its id."""

    resources: model.Resources
    on: ty.Mapping[int, int]


class NoFit(ty.NamedTuple):
    """The result that some demand does not fit.

    :ivar fits: how many servers of all demands do fit
    :ivar anywhere: whether there are any hosts that the demand may use
    :ivar demand: the demand; None: servers that stay where they are
    """

    fits: int
    anywhere: bool
    demand: model.Demand | None = None


@dataclasses.dataclass(frozen=True)
class HostBound:
    """The bound on the hosts where a project has reservations over all times:
    a multiple of those on which its leases are at the same time, plus two.

    :ivar times: the multiple, which the operator configures
    :ivar hosts: by id, those on which the project has reservations
    :ivar later: those of these with reservations that have not started, and
        so stay there; all others follow servers that users move
    :ivar leases: the window and the number of hosts of each of its leases
    """

    times: int
    hosts: frozenset[int]
    later: frozenset[int]
    leases: tuple[tuple[model.Window, int], ...]

    def allows(self, picked: Picked, window: model.Window) -> bool:
        """Return whether a lease may have these hosts over a window."""
        wanted = {host_id for hosts in picked for host_id in hosts}
        many = len(wanted | self.hosts)
        return wanted <= self.later or many <= self.times * max(
            len(wanted), self._most(len(wanted), window)) + 2

    def with_lease(self, picked: Picked, window: model.Window) -> 'HostBound':
        """Return the bound with another lease."""
        wanted = {host_id for hosts in picked for host_id in hosts}
        return dataclasses.replace(
            self, hosts=self.hosts | wanted, later=self.later | wanted,
            leases=(*self.leases, (window, len(wanted))))

    def in_words(self, hosts: int) -> str:
        """Return a sentence about the bound that ends with a number of hosts.
        """
        return (
            f'The leases of a project may use {self.times} times as many '
            'hosts over all times as they use at the same time, and 2 more '
            f'(max_host_spread). Those of this project use {hosts}')

    def _most(self, wanted: int, window: model.Window) -> int:
        """Return how many hosts its leases use at the same time at most."""
        return rule.peaks((), [
            (one, {model.HOST: count})
            for one, count in (*self.leases, (window, wanted))])[model.HOST]


class Preference(ty.NamedTuple):
    """The preference of a search for some hosts.

    :ivar last: the ids of hosts that are used only if no others will do, as
        others are deciding about them
    :ivar own: the ids of hosts that count as reserved already
    :ivar gather: whether a host with reservations comes before others even if
        it is one of ``last``
    """

    last: ty.Collection[int] = ()
    own: ty.Collection[int] = ()
    gather: bool = True


class _Order(ty.NamedTuple):
    """The preference for some hosts, whatever the strategy decides.

    :ivar reserved: hosts that have reservations, by position: first, so that
        the others stay available for workloads without an end
    :ivar lost: hosts about which others are deciding
    :ivar gather: whether a reserved host comes before an unreserved one even
        if others are deciding about it
    :ivar off: hosts that are switched off: last
    :ivar evicted: how many interruptible servers would be evicted from each
        host; None: none
    """

    reserved: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]
    gather: bool
    off: npt.NDArray[np.bool_]
    evicted: npt.NDArray[np.int64] | None = None

    def groups(self, candidates: npt.NDArray[np.intp],
               ) -> list[npt.NDArray[np.intp]]:
        """Return the positions in groups, the most preferred group first."""
        lost = self.lost[candidates].astype(np.int64)
        new = (~self.reserved[candidates]).astype(np.int64)
        rank = 2 * new + lost if self.gather else 2 * lost + new
        if self.evicted is not None:
            rank += 4 * self.evicted[candidates]
        rank += _OFF * self.off[candidates]
        return [candidates[rank == one] for one in np.unique(rank)]


class Selection:
    """Selects hosts.

    :param index: the index that is searched
    :param strategy: the order in which hosts with free capacity are filled
    """

    def __init__(self, index: booking_index.Index,
                 strategy: Strategy) -> None:
        self._index = index
        self._strategy = strategy

    @contextlib.contextmanager
    def asked(self, lag: float, instead_of: ty.Sequence[ty.Any] = (),
              coming: ty.Sequence[ty.Any] = (),
              ) -> ty.Iterator[timelines.Timeline]:
        """Yield the timeline as if some bookings did not exist and others did.
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
        """Yield the timeline of :meth:`asked`, and demands that name their
        hosts instead of properties.

        Hosts are judged before the timeline is locked, and again if they have
        changed meanwhile.
        """
        alike = self._index.judged
        while True:
            found = None if alike is None else _named(demands, alike)
            with self.asked(lag, instead_of, coming) as timeline:
                if found is not None and alike is self._index.alike():
                    yield timeline, found
                    return
                alike = self._index.alike()

    def together(self, timeline: timelines.Timeline,
                 demands: ty.Sequence[model.Demand], window: model.Window,
                 kept: ty.Sequence[Pinned] = (),
                 preference: Preference = Preference()) -> Picked | NoFit:
        """Return hosts for all demands, or that one demand does not fit.

        Hosts that have reservations come first.

        The demand with the fewest hosts to choose from chooses first. Demands
        that accept fewer servers get more only of what all others leave. The
        levels of the timeline are searched once; each demand costs O(H) more.
        """
        last, own, gather = preference
        order = _Order(self._reserved(timeline) | timeline.mask(own),
                       timeline.mask(last), gather, self._index.apart().off,
                       self._evicted(timeline, demands, window))
        fewest = [demand.fewest() for demand in demands]
        beside = timelines.Tentative(len(timeline))
        if len(demands) == 1 and not kept:
            places = self._first(timeline, demands[0], window, order, beside)
            if places is not None:
                return [[timeline.ids[place] for place in places]]
        # For a single demand it is cheaper to find that most hosts are full.
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
                    bool(len(timeline) if hosts is None else hosts.any()),
                    demands[number])
            picked[number] = places
            _add(timeline, beside, places, demand)
        for number, demand in enumerate(demands):
            picked[number] = np.concatenate((picked[number], self._more(
                timeline, demand, window, rooms[number] > 0, order, beside,
                peaks)))
        return [[timeline.ids[place] for place in picked[number]]
                for number in range(len(demands))]

    def _reserved(self, timeline: timelines.Timeline,
                  ) -> npt.NDArray[np.bool_]:
        """Return which hosts have reservations; those that have only
        interruptible servers have none.
        """
        lent = self._index.lent()
        if lent is None:
            return timeline.reserved()
        later = timeline.busy(timeline.peaks(model.Window(
            self._index.lent_until(), model.FOREVER)))
        return timeline.reserved() & (~lent.hosts | later)

    def _evicted(self, timeline: timelines.Timeline,
                 demands: ty.Iterable[model.Demand], window: model.Window,
                 ) -> npt.NDArray[np.int64] | None:
        """Return how many interruptible servers would be evicted from each
        host if it took all servers that fit there, rounded up if they are
        many; None: there are none, or the window starts too soon for that.

        Costs one search for each number of servers, of fewer hosts each time.
        """
        lent = self._index.lent()
        if lent is None or window.start < self._index.lent_until():
            return None
        found = np.zeros(len(timeline), np.int64)
        numbers = [*lent.left, _MOST_EVICTED]
        for demand in demands:
            hosts = lent.hosts
            wanted = np.minimum(
                timeline.fits(demand, window, hosts), demand.count)
            for count, more in itertools.pairwise(numbers):
                hosts = hosts & (timeline.fits(
                    demand, window, hosts, lent.left[count]) < wanted)
                if not hosts.any():
                    break
                np.maximum(found, more, out=found, where=hosts)
        return found

    def gathered(self, timeline: timelines.Timeline,
                 asked: ty.Sequence[model.Demand],
                 named: ty.Sequence[model.Demand], window: model.Window,
                 kept: ty.Sequence[Pinned], host_bound: HostBound,
                 ) -> Picked | None:
        """Return hosts among those on which a project has reservations that
        have not started.

        :param asked: the demands as the user wrote them
        :param named: the same demands, with the hosts that they may use
        :returns: None: these hosts have no capacity for them, so that they
            may use others
        :raises LimitExceeded: when these hosts have capacity, but the user
            has selected other hosts
        """
        hosts = self._index.hosts
        own = frozenset(hosts[one].uuid for one in host_bound.later
                        if one in hosts)

        def within(demands: ty.Iterable[model.Demand]) -> Picked | NoFit:
            return self.together(timeline, [dataclasses.replace(
                one, hosts=own if one.hosts is None else own & one.hosts)
                for one in demands], window, kept)

        if not isinstance(found := within(named), NoFit):
            return found
        if isinstance(within(dataclasses.replace(
                one, properties=None, avoid=frozenset(),
                hosts=one.hosts if one.ungrouped is None else one.ungrouped)
                for one in asked), NoFit):
            return None
        raise errors.LimitExceeded(
            f'{host_bound.in_words(len(own))}, which have capacity for this '
            'lease, but do not include the hosts that it selects by '
            'properties or a server group. Leave these out, or delete leases '
            'that you do not need.')

    def fitting(self, timeline: timelines.Timeline,
                parts: ty.Sequence[model.Demand]) -> ty.Callable[
                    [model.Window], int]:
        """Return a function that returns how many servers of a demand fit
        over a window; 0 if a required host has no capacity.

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
        """Return which hosts a demand may use at all, by position; None: any.

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
        """Return the positions of the hosts that a demand may use at all."""
        allowed = self.allowed(timeline, demand)
        return np.arange(len(timeline)) if allowed is None else (
            np.flatnonzero(allowed))

    def _first(self, timeline: timelines.Timeline, demand: model.Demand,
               window: model.Window, order: _Order,
               beside: timelines.Tentative) -> npt.NDArray[np.intp] | None:
        """Return what :meth:`_fill` would return for all hosts, by searching
        only those that would be filled first.

        :returns: None: all hosts must be searched
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
        """Return the position of a host for each server; None: no fit."""
        if not demand.count:
            return np.zeros(0, np.intp)
        candidates = np.flatnonzero(rooms >= _on_one(demand))
        if not len(candidates) or rooms.sum() < demand.count:
            return None
        groups = [candidates]
        if demand.among is model.HostPool.ALL:
            # Keep hosts that could be leased whole empty as long as possible.
            serving = self._index.apart().serving[candidates]
            groups = [candidates[~serving], candidates[serving]]
        # Each host takes at least one server.
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
        """Return positions of hosts for the servers of a demand that exceed
        its minimum.
        """
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
        """Return how many servers of its group each host has, by position."""
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
    """Return how many servers stay where they are."""
    return sum(sum(one.on.values()) for one in kept)


def _keep(timeline: timelines.Timeline, window: model.Window,
          kept: ty.Iterable[Pinned], beside: timelines.Tentative,
          peaks: ty.Sequence[npt.NDArray[np.int64]] | None) -> int:
    """Add the pinned servers as tentative; return how many of them fit."""
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
    """Add the hosts that were picked for a demand as tentative."""
    beside.add(np.bincount(places, minlength=len(timeline)),
               timeline.capacity if demand.whole else timeline.takes(demand))


def _on_one(demand: model.Demand) -> int:
    """Return how many servers of a demand a host must take to be of use."""
    return demand.count if demand.affinity is model.Affinity.SAME else 1


def most_of(demand: model.Demand, rooms: npt.NDArray[np.int64]) -> int:
    """Return how many servers of a demand fit, given those of each host."""
    return int(rooms.max(initial=0)
               if demand.affinity is model.Affinity.SAME else rooms.sum())
