# SPDX-License-Identifier: Apache-2.0

"""What is asked of the calendar of all hosts.

H is the number of hosts, S that of steps (at most two for each booking).
"""

import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline import calendar
from blazar_core.books.timeline import search
from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import NEVER
from blazar_core.common import model

__all__ = ['Beside', 'Hosts', 'Timeline']

#: Ids of hosts, or a truth value for each host in the order of
#: :attr:`Timeline.ids`; None for all of them.
Hosts: ty.TypeAlias = npt.NDArray[np.bool_] | ty.Collection[int] | None


class Beside:
    """What is about to be booked over all of one window.

    For a search for hosts for several demands that come together: the levels
    of the calendar stay as they are.

    :ivar servers: how many there are on each host, in the order of
        :attr:`Timeline.ids`
    :ivar amounts: by class, what they take of each
    """

    def __init__(self, hosts: int) -> None:
        self.servers: Ints = np.zeros(hosts, np.int64)
        self.amounts: dict[str, Ints] = {}

    def add(self, servers: Ints,
            amounts: ty.Mapping[str, int | Ints]) -> None:
        """Add so many servers on each host, of so much each.

        :param amounts: by class, the same on all hosts, or that of each
        """
        self.servers = self.servers + servers
        for rc, amount in amounts.items():
            self.amounts[rc] = self.amounts.get(rc, 0) + amount * servers


class Timeline(calendar.Calendar):
    """A calendar that answers when there is room, and how much."""

    def peaks(self, window: model.Window, hosts: Hosts = None) -> list[Ints]:
        """The most that is booked on each host at any instant of a window.

        For several questions about one window: the levels are looked
        at only once. Costs O(H + steps in the window).

        :param hosts: nothing is said of others
        :returns: for each class in their order, by host in that of :attr:`ids`
        """
        if calendar.end_of(window) == NEVER:
            return self._rows.rest(window.start)
        which = self._which(hosts)
        if not len(which):
            return [np.zeros(len(self), np.int64) for _one in self._columns]
        first = self._rows.at(which, window.start)
        last = self._rows.at(which, calendar.end_of(window) - 1)
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
             hosts: Hosts = None, beside: Beside | None = None,
             peaks: ty.Sequence[Ints] | None = None) -> Ints:
        """How many servers of a demand fit on each host over all of a window.

        For every host in the order of :attr:`ids`; never more than
        :meth:`model.Demand.most_per_host`, and 0 for those not asked about.
        The demand's own choice of hosts is not looked at. A host that does
        not report a class that is needed has no room, except of the shared
        classes, by which it is not judged then. A whole host is one of which
        nothing is booked at any instant, nor used.

        Costs O(H + steps in the window); O(H) with ``peaks``.

        :param beside: what is there too, over all of the window
        :param peaks: what :meth:`peaks` says of the window, if that is known
        """
        rooms = np.zeros(len(self), np.int64)
        scan = self._scan(demand, demand.resources, demand.most_per_host(),
                          self._which(hosts), beside)
        if scan is None:
            return rooms
        if peaks is None and calendar.end_of(window) == NEVER:
            peaks = self.peaks(window)
        rooms[scan.which] = scan.room(
            window.start, calendar.end_of(window)) if (
            peaks is None) else scan.room_over(peaks)
        return rooms

    def earliest(self, demand: model.Demand, duration: int, not_before: int,
                 hosts: Hosts = None) -> int | None:
        """The first start at which all of a demand fits for so many seconds.

        For a demand without an end, the duration is :data:`model.FOREVER`.
        The demand's own choice of hosts is not looked at. None when it never
        fits.

        Costs as much as :meth:`rooms` of some hosts where it fits at once;
        otherwise O(S).

        :raises ValueError: when the duration is not positive
        """
        if duration <= 0:
            raise ValueError(f'The duration must be positive: {duration}')
        if not_before + duration >= model.FOREVER:
            duration = search.HUGE
        resources, most, wanted = (
            demand.resources, demand.most_per_host(), demand.count)
        if demand.affinity is model.Affinity.SAME:
            # All of them on one host are one server of their size.
            resources = {rc: amount * wanted
                         for rc, amount in resources.items()}
            most = wanted = 1
        scan = self._scan(demand, resources, most, self._which(hosts),
                          least=demand.count if (
                              demand.affinity is model.Affinity.SAME) else 1)
        if scan is None:
            return None
        return scan.earliest(duration, not_before, wanted)

    def peak(self, host_id: int, window: model.Window) -> dict[str, int]:
        """The most that is booked on a host at any instant, by class.

        :raises KeyError: when the host is not known
        """
        place = np.array([self._index[host_id]])
        first = int(self._rows.at(place, window.start)[0])
        last = int(self._rows.at(place, calendar.end_of(window) - 1)[0])
        return {rc: int(self._rows.levels[column][first:last + 1].max())
                for rc, column in self._columns.items()}

    def overfull(self, since: int) -> list[int]:
        """The ids of hosts on which more is booked than is free.

        At any instant from ``since`` on, of any class. A host on which
        nothing is booked is none of them, whatever is used of it.

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
        """The starts in a window at which the room for so long may change.

        It grows where a step leads down, and shrinks where one that leads up
        would come in the way; not always as much as to be seen. In no order,
        and some more than once: to sort them takes most of the time, and
        nobody has to wait for that. Costs O(steps), some ten ms for a
        million.

        :param duration: seconds
        """
        rows, late = self._rows, duration - 1
        times = rows.time[1:]
        # Between two rows there is no step, and one too many does no harm.
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
        """The instant from which on nothing changes any more: what is booked
        then is booked for ever. 0 when nothing ever changes. Costs O(H).
        """
        last = self._rows.start + self._rows.length - 1
        return max(0, int(self._rows.time[last].max(initial=0)))

    def busy(self, peaks: ty.Iterable[Ints]) -> npt.NDArray[np.bool_]:
        """Whether anything is booked on a host at any instant of a window.

        :param peaks: what :meth:`peaks` says of it
        """
        busy = np.zeros(len(self), bool)
        for peak in peaks:
            busy |= peak > 0
        return busy

    def busy_until(self, which: npt.NDArray[np.intp]) -> Ints:
        """When the last booking on some hosts ends, by their positions.

        0 where none is, :data:`model.FOREVER` where something is used or
        booked without an end. Costs O(hosts asked about).
        """
        last = self._rows.start[which] + self._rows.length[which] - 1
        until = self._rows.time[last]
        for level in self._rows.levels:
            until[level[last] > 0] = model.FOREVER
        for one in self._classes.values():
            until[one.usage[which] > 0] = model.FOREVER
        return np.asarray(np.clip(until, 0, model.FOREVER), np.int64)

    def _which(self, hosts: Hosts) -> Ints:
        """The numbers of the hosts asked about."""
        if hosts is None:
            return np.arange(len(self))
        if not isinstance(hosts, np.ndarray):
            hosts = self.mask(hosts)
        return np.flatnonzero(hosts)

    def _scan(self, demand: model.Demand, resources: model.Resources,
              most: int, which: Ints, beside: Beside | None = None,
              least: int = 1) -> search.Scan | None:
        """A question about hosts; None when some class is nowhere.

        :param least: so many servers of the demand a host has to take
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

    def _free(self, rc: str, beside: Beside | None) -> Ints:
        """What is free of a class on each host, if nothing is booked."""
        free = self._classes[rc].free[:len(self)]
        return free if beside is None or rc not in beside.amounts else (
            free - beside.amounts[rc])

    def _scan_whole(self, which: Ints, beside: Beside | None,
                    ) -> search.Scan | None:
        """A question about whole hosts: for the last bit of each class that
        they have. Where one is taken, another bit is not free.
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
