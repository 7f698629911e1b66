# SPDX-License-Identifier: Apache-2.0

"""Reserved amounts of each host at each instant, in memory.

A timeline has the level of each host as a step function of time: the amounts
that are booked there. A level rises where a booking starts and falls where it
ends. A search for free capacity reads levels; a booking raises the level over
its window, and its removal lowers it again. So a booking leaves no object
behind, and bookings may be added and removed in any order.

A calendar has the hosts, the resource classes by their names, and what is
booked; a timeline answers questions about it. The levels are in
:mod:`~blazar_core.capacity.step_functions`;
:mod:`~blazar_core.capacity.search` finds free capacity and the earliest
start, and :mod:`~blazar_core.capacity.provider_limits` has the limits of one
server on a host.

H is the number of hosts, S that of steps (at most two for each booking).
"""

import dataclasses
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.capacity import provider_limits
from blazar_core.capacity import rule
from blazar_core.capacity import search
from blazar_core.capacity import step_functions
from blazar_core.capacity.step_functions import Ints
from blazar_core.capacity.step_functions import NEVER
from blazar_core.common import model


@dataclasses.dataclass
class _Class:
    """A resource class, with the amounts of each host, by its position."""

    capacity: Ints
    usage: Ints
    free: Ints


class Block(ty.NamedTuple):
    """Many bookings; each array has one value for each booking.

    :ivar amounts: by resource class
    """

    host_ids: npt.ArrayLike
    starts: npt.ArrayLike
    ends: npt.ArrayLike
    amounts: ty.Mapping[str, npt.ArrayLike]


class Calendar:
    """The amounts that are booked on every host, at every instant.

    Bookings are not stored one by one: a caller that removes one repeats its
    window and amounts. Times from :data:`model.FOREVER` on are equal: what is
    booked until then is booked without an end. Not thread-safe: the caller
    holds a lock, or uses a copy.

    :param shared: classes that a host may offer through a shared provider: a
        host that reports none of its own is not judged by them
    :ivar units: the limits of one server on each host
    """

    def __init__(self, shared: ty.Collection[str] = rule.SHARED, *,
                 slack: int = 8, spare: int = 1024,
                 piece: int = search.PIECE) -> None:
        self._shared = frozenset(shared)
        self._rows = step_functions.Rows(slack, spare)
        self._piece = piece
        self._index: dict[int, int] = {}
        self._ids: list[int] = []
        self._classes: dict[str, _Class] = {}
        self._columns: dict[str, int] = {}
        self.units = provider_limits.UnitsOfHosts()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The ids of the hosts, in the order of all results. Not a copy."""
        return self._ids

    def index(self, host_id: int) -> int:
        """Return the position of a host in the results.

        :raises KeyError: when it is not known
        """
        return self._index[host_id]

    def mask(self, host_ids: ty.Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of hosts; unknown ones are ignored.

        Keep it if the same hosts are used again.
        """
        mask = np.zeros(len(self), bool)
        mask[[self._index[one] for one in host_ids if one in self._index]] = (
            True)
        return mask

    @property
    def capacity(self) -> dict[str, Ints]:
        """The capacity of each host, by class; in the order of :attr:`ids`."""
        return {rc: one.capacity[:len(self)]
                for rc, one in self._classes.items()}

    def reserved(self) -> npt.NDArray[np.bool_]:
        """Return which hosts have bookings, at any time that is not forgotten;
        in the order of :attr:`ids`. Costs O(H).
        """
        return np.asarray(self._rows.length > 1)

    def too_much(self, demand: model.Demand, hosts: Ints,
                 ) -> list[provider_limits.ExceedsHost] | None:
        """Return why none of some hosts can ever take a server of a demand.

        :param hosts: their positions
        :returns: as :meth:`provider_limits.UnitsOfHosts.too_much`
        """
        return self.units.too_much(demand, hosts, {
            rc: np.where(capacity > 0, capacity, self._missing(rc))
            for rc, capacity in self.capacity.items()})

    def set_host(self, host_id: int, capacity: model.Resources,
                 usage: model.Resources, uuid: str = '',
                 providers: model.Providers | None = None) -> None:
        """Set the capacity of a host, and its open-ended usage.

        An unknown host is added, with nothing booked; a host that no longer
        exists is set to no capacity. Costs O(classes).

        :param uuid: needed if demands name providers
        :param providers: None: capacity alone limits what a server can get
        """
        place = self._place(host_id)
        self.units.set(place, uuid, providers)
        for rc in (*capacity, *usage):
            self._class(rc)
        for rc, one in self._classes.items():
            total, used = capacity.get(rc, 0), usage.get(rc, 0)
            one.capacity[place], one.usage[place] = total, used
            one.free[place] = (
                total - used if rc in capacity else self._missing(rc))

    def _missing(self, rc: str) -> int:
        """Return what is free of a class that a host does not report."""
        return search.HUGE if rc in self._shared else -search.HUGE

    def _place(self, host_id: int) -> int:
        if host_id in self._index:
            return self._index[host_id]
        place = self._rows.add_row()
        self._index[host_id] = place
        self._ids.append(host_id)
        for rc, one in self._classes.items():
            if place == len(one.free):
                more = max(16, place // 2)
                for name in ('capacity', 'usage', 'free'):
                    array = getattr(one, name)
                    setattr(one, name, np.concatenate([
                        array, np.zeros(more, np.int64)]))
            one.free[place] = self._missing(rc)
        return place

    def _class(self, rc: str) -> int:
        """Return the column of a class, which is added if it is new."""
        if rc not in self._columns:
            size = max(16, len(self))
            self._classes[rc] = _Class(
                np.zeros(size, np.int64), np.zeros(size, np.int64),
                np.full(size, self._missing(rc)))
            self._columns[rc] = self._rows.add_column()
        return self._columns[rc]

    def apply(self, host_id: int, window: model.Window,
              resources: model.Resources, sign: int) -> None:
        """Add a booking (``sign`` 1) or remove one (-1).

        Changes may be applied in any order, a removal even before its booking.
        Costs some 20 us, and about once in 10,000 times a new layout of
        everything. An unknown host is added, without capacity.
        """
        place = self._place(host_id)
        amounts = [(self._class(rc), sign * amount)
                   for rc, amount in resources.items() if amount]
        if amounts:
            self._rows.add(place, window.start, end_of(window), amounts)

    def load(self, blocks: ty.Iterable[Block]) -> None:
        """Add many bookings at once, all of a host in one block.

        Costs a sort of each block, some 200 bytes for each booking of the
        largest one, and a new layout of everything: better once with many.

        :raises ValueError: when a host is in two blocks; then no booking was
            added
        """
        self._rows.load(map(self._placed, blocks))

    def _placed(self, block: Block) -> step_functions.Block:
        """Return the bookings of a block, by the positions of their hosts."""
        hosts, begin, end = (np.asarray(one, np.int64) for one in (
            block.host_ids, block.starts, block.ends))
        columns = {rc: np.asarray(one, np.int64)
                   for rc, one in block.amounts.items()}
        known, number = np.unique(hosts, return_inverse=True)
        places = np.array([self._place(int(one)) for one in known], np.int64)
        for rc in columns:
            self._class(rc)
        none = np.zeros(len(hosts), np.int64)
        return step_functions.Block(
            places[number], begin,
            np.where(end >= model.FOREVER, NEVER, end),
            [columns.get(rc, none) for rc in self._columns])

    def forget(self, before: int) -> None:
        """Drop the steps before an instant to save memory.

        From then on, questions about earlier times are answered with the
        levels of that instant. Costs O(S), about 100 ms with 2,000,000.
        """
        self._rows.forget(before)


def end_of(window: model.Window) -> int:
    return NEVER if window.end >= model.FOREVER else window.end


#: Ids of hosts, or a mask in the order of :attr:`Calendar._ids`; None: all.
Hosts: ty.TypeAlias = npt.NDArray[np.bool_] | ty.Collection[int] | None


class Tentative:
    """Servers that are about to be booked over all of one window.

    For a search for hosts for several demands of one request: the levels of
    the calendar do not change.

    :ivar servers: how many there are on each host, in the order of
        :attr:`Calendar._ids`
    :ivar amounts: by class, what they take of each host
    """

    def __init__(self, hosts: int) -> None:
        self.servers: Ints = np.zeros(hosts, np.int64)
        self.amounts: dict[str, Ints] = {}

    def add(self, servers: Ints,
            amounts: ty.Mapping[str, int | Ints]) -> None:
        """Add a number of servers on each host, of a size each.

        :param amounts: by class, the same on all hosts, or that of each
        """
        self.servers = self.servers + servers
        for rc, amount in amounts.items():
            self.amounts[rc] = self.amounts.get(rc, 0) + amount * servers

    def set(self, place: int, servers: ty.Sequence[model.Resources]) -> None:
        """Set the servers of one host, by its position."""
        self.servers[place] = len(servers)
        for rc, amount in model.summed(servers).items():
            self.amounts.setdefault(rc, np.zeros_like(self.servers))[
                place] = amount


class Timeline(Calendar):
    """A calendar that answers when there is free capacity, and how much."""

    def peaks(self, window: model.Window, hosts: Hosts = None) -> list[Ints]:
        """Return the maximum that is booked on each host over a window.

        For several questions about one window, the levels are then read only
        once. Costs O(H + steps in the window).

        :param hosts: only for these; of others the result has no meaning
        :returns: for each class in their order, by host in that of :attr:`ids`
        """
        if end_of(window) == NEVER:
            return self._rows.rest(window.start)
        which = self._which(hosts)
        if not len(which):
            return [np.zeros(len(self), np.int64) for _one in self._columns]
        first = self._rows.at(which, window.start)
        last = self._rows.at(which, end_of(window) - 1)
        found = self._rows.peaks(first, last, self._columns.values())
        if hosts is None:
            return [*found]
        peaks = []
        for some in found:
            peak = np.zeros(len(self), some.dtype)
            peak[which] = some
            peaks.append(peak)
        return peaks

    def fits(self, demand: model.Demand, window: model.Window,
             hosts: Hosts = None, beside: Tentative | None = None,
             peaks: ty.Sequence[Ints] | None = None) -> Ints:
        """Return how many servers of a demand fit on each host over a window.

        For every host in the order of :attr:`_ids`; never more than
        :meth:`model.Demand.most_per_host`, and 0 for hosts that are not in
        ``hosts``. The hosts that the demand itself selects are ignored. On a
        host that does not report a class that is needed, nothing fits, unless
        the class is a shared one, which then is ignored. A whole host fits if
        nothing of it is booked at any instant, nor used.

        Costs O(H + steps in the window); O(H) with ``peaks``.

        :param beside: what else is there, over all of the window
        :param peaks: the result of :meth:`peaks` for the window, if known
        """
        which = self._which(hosts)
        if peaks is None and end_of(window) == NEVER:
            peaks = self.peaks(window)

        def fits(resources: model.Resources) -> Ints:
            rooms = np.zeros(len(self), np.int64)
            scan = self._scan(demand, resources, demand.most_per_host(),
                              which, beside)
            if scan is not None:
                rooms[scan.which] = scan.room(
                    window.start, end_of(window)) if (
                    peaks is None) else scan.room_over(peaks)
            return rooms

        first, *others = self.units.ways(demand)
        if not others:
            return fits({**demand.resources, **first})
        ways = [first, *others]
        rooms = fits(demand.resources)
        which = np.flatnonzero(rooms)
        by_way = [fits(way) for way in ways]
        # Servers of several ways fit on one host together if these ways are
        # of different kinds.
        combine = np.add if all(len(way) == 1 for way in ways) else np.maximum
        return np.asarray(np.minimum(rooms, combine.reduce(by_way)), np.int64)

    def takes(self, demand: model.Demand) -> dict[str, int]:
        """Return the maximum that a server of a demand takes of a host."""
        found = dict(demand.resources)
        for way in self.units.ways(demand):
            for rc, amount in way.items():
                found[rc] = max(amount, found.get(rc, 0))
        return found

    def earliest(self, demand: model.Demand, duration: int, not_before: int,
                 hosts: Hosts = None) -> int | None:
        """Return the first start at which all of a demand fits for a time.

        For a demand without an end, the duration is :data:`model.FOREVER`.
        The hosts that the demand itself selects are ignored. None if it never
        fits.

        Costs as much as :meth:`fits` of some hosts where it fits at once;
        otherwise O(S).

        :param duration: seconds, more than 0
        """
        if not_before + duration >= model.FOREVER:
            duration = search.HUGE
        resources, most, wanted = (
            demand.resources, demand.most_per_host(), demand.count)
        if demand.affinity is model.Affinity.SAME:
            # All servers on one host are like one server of their size.
            resources = {rc: amount * wanted
                         for rc, amount in resources.items()}
            most = wanted = 1
        times = demand.count if (
            demand.affinity is model.Affinity.SAME) else 1
        found = []
        for way in self.units.ways(demand):
            scan = self._scan(demand, {**resources, **{
                rc: amount * times for rc, amount in way.items()}}, most,
                self._which(hosts), least=times)
            if scan is not None:
                found.append(scan.earliest(duration, not_before, wanted))
        return min((one for one in found if one is not None), default=None)

    def peak(self, host_id: int, window: model.Window) -> dict[str, int]:
        """Return the maximum booked on a host over a window, by class.

        :raises KeyError: when the host is not known
        """
        place = np.array([self._index[host_id]])
        first = int(self._rows.at(place, window.start)[0])
        last = int(self._rows.at(place, end_of(window) - 1)[0])
        return {rc: int(self._rows.levels[column][first:last + 1].max())
                for rc, column in self._columns.items()}

    def overfull(self, since: int) -> list[int]:
        """Return the ids of hosts on which more is booked than is free.

        At any instant from ``since`` on, of any class. Hosts without bookings
        are left out, whatever their usage.

        Costs O(S).
        """
        if not len(self):
            return []
        over = np.zeros(len(self), bool)
        first = self._rows.at(self._which(None), since)
        last = self._rows.start + self._rows.length - 1
        for one, peak in zip(self._classes.values(), self._rows.peaks(
                first, last, self._columns.values()), strict=True):
            over |= peak > np.maximum(one.free[:len(self)], 0)
        return [self._ids[place] for place in np.flatnonzero(over)]

    def instants(self, window: model.Window, duration: int) -> Ints:
        """Return the starts in a window at which free capacity may change.

        It grows where a level falls, and shrinks ``duration`` before a level
        rises; some starts make no visible difference. The result is unsorted,
        with duplicates: sorting takes most of the time, and no other thread
        has to wait for that. Costs O(steps), some ten ms for a million.

        :param duration: seconds for which the capacity is wanted
        """
        rows, late = self._rows, duration - 1
        times = rows.time[1:]
        # Between two rows there is no step; one too many does no harm.
        near = np.flatnonzero(
            (times > window.start) & (times < window.end + late))
        times = times[near]
        ups, downs = np.zeros(len(near), bool), np.zeros(len(near), bool)
        for level in rows.levels:
            before, after = level[near], level[near + 1]
            ups |= after > before
            downs |= after < before
        grows = times[downs & (times < window.end)]
        shrinks = times[ups & (times > window.start + late)] - late
        return np.concatenate((grows, shrinks))

    def settled(self) -> int:
        """Return the instant from which on no level changes: what is booked
        then is booked without an end. 0 if no level ever changes. Costs O(H).
        """
        last = self._rows.start + self._rows.length - 1
        return max(0, int(self._rows.time[last].max(initial=0)))

    def busy(self, peaks: ty.Iterable[Ints]) -> npt.NDArray[np.bool_]:
        """Return whether anything is booked on each host over a window.

        :param peaks: the result of :meth:`peaks` for the window
        """
        busy = np.zeros(len(self), bool)
        for peak in peaks:
            busy |= peak > 0
        return busy

    def busy_until(self, which: npt.NDArray[np.intp]) -> Ints:
        """Return when the last booking on some hosts ends.

        0 if there is none, :data:`model.FOREVER` if something is used or
        booked without an end. Costs O(hosts asked about).

        :param which: the positions of the hosts
        """
        last = self._rows.start[which] + self._rows.length[which] - 1
        until = self._rows.time[last]
        for level in self._rows.levels:
            until[level[last] > 0] = model.FOREVER
        for one in self._classes.values():
            until[one.usage[which] > 0] = model.FOREVER
        return np.asarray(np.clip(until, 0, model.FOREVER), np.int64)

    def _which(self, hosts: Hosts) -> Ints:
        """Return the positions of the hosts that are asked about."""
        if hosts is None:
            return np.arange(len(self))
        if not isinstance(hosts, np.ndarray):
            hosts = self.mask(hosts)
        return np.flatnonzero(hosts)

    def _scan(self, demand: model.Demand, resources: model.Resources,
              most: int, which: Ints, beside: Tentative | None = None,
              least: int = 1) -> search.Scan | None:
        """Return a scan of hosts; None: no host has one of the classes.

        :param least: how many servers of the demand a host has to take
        """
        if model.HOST in resources:
            return self._scan_whole(which, beside)
        limits = self.units.limits(demand, len(self))
        needs = []
        for rc, amount in resources.items():
            if amount and rc in self._classes:
                free = limits.less(self._free(rc, beside), rc)
                needs.append(search.Need(self._columns[rc], amount, free))
            elif amount and rc not in self._shared:
                return None
        return search.Scan(self._rows, needs, most, limits.able(which, least),
                           self._piece, limits.most)

    def _free(self, rc: str, beside: Tentative | None) -> Ints:
        """Return what each host has free of a class if nothing is booked."""
        free = self._classes[rc].free[:len(self)]
        if (base := model.base_of(rc)) != rc:
            # Hosts that have the class themselves are judged by it alone.
            free = np.where(np.logical_or.reduce([
                self._classes[one].capacity[:len(self)] > 0
                for one in self.units.kinds.get(base, ())
                if one in self._classes] or [np.ones(len(self), bool)]),
                free, search.HUGE)
        return free if beside is None or rc not in beside.amounts else (
            free - beside.amounts[rc])

    def _scan_whole(self, which: Ints, beside: Tentative | None,
                    ) -> search.Scan | None:
        """Return a scan for whole hosts, which asks for the last unit of each
        class of a host: it is not free if any unit is taken.
        """
        some = np.zeros(len(self), bool)
        needs = []
        for rc, capacity in self.capacity.items():
            some |= capacity > 0
            needs.append(search.Need(self._columns[rc], 1, np.where(
                capacity > 0, self._free(rc, beside) - capacity + 1,
                search.HUGE)))
        return search.Scan(self._rows, needs, 1, which[some[which]],
                           self._piece) if needs else None
