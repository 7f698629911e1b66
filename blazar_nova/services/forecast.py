# SPDX-License-Identifier: Apache-2.0

"""Reserved and free capacity of the next days, and of additional hosts."""

import array
import collections
import heapq
import itertools
import typing as ty

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from blazar_core.capacity import timelines
from blazar_core.capacity import usage_records
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_nova.schemas import refused_demands
from blazar_nova.services import calendar

#: Maximum number of hosts that are compared with demands in a replay, which
#: takes a few minutes.
_WORK = 50_000_000
#: Maximum number of rows in addition to that of 0 hosts.
_ROWS = 10
#: Number of hosts whose reservations are loaded at once.
_AT_ONCE = 1000
_DAY = 86400
_HOST = models.Host.__table__.c
_RECORD = models.UsageRecord.__table__.c


class Day(ty.NamedTuple):
    """The planned amounts of one resource class on one day.

    :ivar without_lease: used by servers without a lease
    :ivar reserved: on average
    :ivar peak: the maximum that is reserved at a time
    :ivar peak_at: when the peak starts
    :ivar free: the least that is free at a time, without hosts that are down
        or in maintenance then
    """

    start: int
    resource_class: str
    capacity: int
    without_lease: int
    reserved: float
    peak: int
    peak_at: int
    free: int


def days(connection: sa.Connection, start: int, number: int) -> list[Day]:
    """Return the next days, for each resource class. They begin at midnight
    (UTC), except the first one. Memory does not depend on the number of
    reservations.
    """
    cuts = [start, *(start - start % _DAY + one * _DAY
                     for one in range(1, number + 1))]
    plan = calendar.planned(connection, model.Window(start, cuts[-1]))
    levels = {rc: _Level(rc, whole, plan.usage[rc], start)
              for rc, whole in plan.capacity.items() if whole}
    found = []
    # The midnights are changes of nothing.
    for time, changes in itertools.groupby(heapq.merge(
            plan.changes, (calendar.Change(cut, False, {})
                           for cut in cuts[1:]),
            key=lambda one: one.time), key=lambda one: one.time):
        sums = collections.Counter[str](), collections.Counter[str]()
        for one in changes:
            sums[one.unavailable].update(one.amounts)
        found += [level.end(time) for level in levels.values()
                  if time in cuts[1:]]
        for rc in sums[False].keys() | sums[True].keys():
            if rc in levels:
                levels[rc].change(time, sums[False][rc], sums[True][rc])
    return sorted(found)


class _Level:
    """What is planned of a resource class, on the present day."""

    def __init__(self, rc: str, capacity: int, usage: int, start: int,
                 ) -> None:
        self._class, self._capacity, self._usage = rc, capacity, usage
        self._reserved = self._unavailable = 0
        self._begin(start)

    def _begin(self, start: int) -> None:
        self._start = self._since = self._peak_at = start
        self._sum, self._peak = 0, self._reserved
        self._taken = self._reserved + self._unavailable

    def change(self, time: int, reserved: int, unavailable: int) -> None:
        """Change what is reserved, and what is on hosts that are down."""
        self._sum += self._reserved * (time - self._since)
        self._since = time
        self._reserved += reserved
        self._unavailable += unavailable
        if time == self._start:
            self._begin(time)
        if self._reserved > self._peak:
            self._peak, self._peak_at = self._reserved, time
        self._taken = max(self._taken, self._reserved + self._unavailable)

    def end(self, time: int) -> Day:
        """Return the day that ends at a time, and begin the next one."""
        self.change(time, 0, 0)
        day = Day(
            self._start, self._class, self._capacity, self._usage,
            round(self._sum / (time - self._start), 2), self._peak,
            self._peak_at,
            max(0, self._capacity - self._usage - self._taken))
        self._begin(time)
        return day


class Replay(ty.NamedTuple):
    """The refused demands that additional hosts would have admitted.

    :ivar admitted: the number that would have been admitted
    :ivar servers: the number of servers of these
    """

    hosts: int
    demands: int
    admitted: int
    servers: int


#: The amounts of a server of a part of a demand, and the number of servers.
_Part: ty.TypeAlias = tuple[dict[str, int], int]


def replay(connection: sa.Connection, hosts: int) -> list[Replay]:
    """Return what 0, 1, 2, ... additional hosts would have admitted of the
    refused demands, in the order of their days and starts, by first fit.

    The real hosts have the reservations of the usage records, past and future,
    and today's usage without a lease. The additional hosts have the most
    common capacity and start empty. An admitted demand is booked for its
    window; repeated demands count once. Demands that 0 additional hosts admit
    fit because other leases were deleted or ended early. Properties and
    affinity are ignored.
    """
    asked: dict[tuple[model.Window, str], list[_Part]] = {}
    for one in sorted(refused_demands.found(connection), key=lambda one: (
            one.day, one.window.start if one.window else 0, str(one.parts),
            one.project_id)):
        if one.window is not None and one.parts:
            asked.setdefault((one.window, f'{one.project_id} {one.parts}'),
                             [*one.parts])
    demands = [(window, parts) for (window, _text), parts in asked.items()]
    world = _World(connection, hosts, [window for window, _parts in demands])
    if not world.sizes:
        return []
    found = []
    numbers = sorted({hosts * row // _ROWS for row in range(_ROWS + 1)})
    demands = demands[-max(1, _WORK // len(numbers) // (
        world.sizes.total() + hosts)):]
    for number in numbers:
        placed = [parts for window, parts in demands
                  if world.place(window, parts, number)]
        world.undo()
        found.append(Replay(number, len(demands), len(placed), sum(
            count for parts in placed for _amounts, count in parts)))
    return found


class _World:
    """Real and additional hosts with their reservations.

    :ivar sizes: number of real hosts by capacity
    """

    def __init__(self, connection: sa.Connection, more: int,
                 windows: ty.Sequence[model.Window]) -> None:
        self._timeline = timelines.Timeline()
        self._placed: list[tuple[int, model.Window, dict[str, int]]] = []
        self.sizes: collections.Counter[tuple[tuple[str, int], ...]] = (
            collections.Counter())
        enrolled, common = set(), set()
        for row in connection.execute(sa.select(
                _HOST.id, _HOST.capacity, _HOST.usage, _HOST.enrollment,
                _HOST.reservable).where(_HOST.pool == model.COMPUTE)):
            capacity = model.plain(row.capacity or {})
            if not any(capacity.values()):
                continue
            self.sizes[tuple(sorted(capacity.items()))] += 1
            self._timeline.set_host(row.id, capacity, model.plain(row.usage))
            if row.enrollment is None:
                common.add(row.id)
            elif row.enrollment == states.Enrollment.ENROLLED and (
                    row.reservable):
                enrolled.add(row.id)
        if self.sizes:
            size = dict(self.sizes.most_common(1)[0][0])
            for number in range(more):
                self._timeline.set_host(-1 - number, size, {})
        self._usable = {True: self._timeline.mask(enrolled),
                        False: self._timeline.mask(common)}
        self._real = len(self._timeline) - more
        if self.sizes and windows:
            self._timeline.load(self._reserved(connection, model.Window(
                min(one.start for one in windows),
                max(one.end for one in windows))))

    def _reserved(self, connection: sa.Connection, window: model.Window,
                  ) -> ty.Iterator[timelines.Block]:
        """Yield the reservations as blocks, those of a host in one of them."""
        capacity, known = self._timeline.capacity, {*self._timeline.ids}
        columns = {name: array.array('q') for name in (
            'host', 'start', 'end', *capacity)}
        for row in connection.execute(sa.select(
                _RECORD.sign, _RECORD.start_date, _RECORD.end_date,
                _RECORD.resources, _RECORD.hosts).where(
                    _RECORD.kind != usage_records.Kind.USED,
                    _RECORD.end_date > window.start,
                    _RECORD.start_date < window.end),
                execution_options={'yield_per': 1000}):
            for host_id in known.intersection(row.hosts):
                count = row.hosts.count(host_id)
                for name, value in (('host', host_id),
                                    ('start', row.start_date),
                                    ('end', row.end_date)):
                    columns[name].append(value)
                for rc, of in capacity.items():
                    # Only whole hosts differ from each other in a record.
                    amount = row.resources.get(rc, 0)
                    columns[rc].append(row.sign * int(
                        of[self._timeline.index(host_id)]
                        if amount and model.HOST in row.resources
                        else amount * count // len(row.hosts)))
        # What follows may take minutes, and databases end idle transactions.
        connection.rollback()
        arrays = {name: np.frombuffer(of, np.int64) for name, of in
                  columns.items() if of}
        if arrays:
            order = np.argsort(arrays['host'], kind='stable')
            hosts = arrays['host'][order]
            for part in np.split(order, np.searchsorted(
                    hosts, np.unique(hosts)[_AT_ONCE::_AT_ONCE])):
                host, start, end, *amounts = (
                    of[part] for of in arrays.values())
                yield timelines.Block(host, start, end, dict(zip(
                    capacity, amounts, strict=True)))

    def place(self, window: model.Window, parts: ty.Sequence[_Part],
              more: int) -> bool:
        """Book all servers of a demand, or nothing.

        :param more: number of additional hosts
        """
        timeline = self._timeline
        beside = timelines.Tentative(len(timeline))
        found = []
        for amounts, count in parts:
            whole = model.HOST in amounts
            usable = self._usable[whole].copy()
            usable[self._real:self._real + more] = True
            rooms = timeline.fits(
                model.Demand(amounts, count), window, usable, beside)
            taken: npt.NDArray[np.int64] = np.clip(
                count - (np.cumsum(rooms) - rooms), 0, rooms)
            if taken.sum() < count:
                return False
            # A whole host takes its full capacity.
            takes = timeline.capacity if whole else {
                rc: np.full(len(timeline), amount)
                for rc, amount in amounts.items()}
            beside.add(taken, takes)
            found.append((taken, takes))
        for taken, takes in found:
            for index in np.flatnonzero(taken):
                booked = {rc: int(of[index] * taken[index])
                          for rc, of in takes.items()}
                timeline.apply(timeline.ids[index], window, booked, 1)
                self._placed.append((timeline.ids[index], window, booked))
        return True

    def undo(self) -> None:
        """Remove the bookings of demands."""
        for host_id, window, booked in self._placed:
            self._timeline.apply(host_id, window, booked, -1)
        del self._placed[:]
