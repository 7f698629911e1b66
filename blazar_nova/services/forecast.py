# SPDX-License-Identifier: Apache-2.0

"""Reserved and free capacity of the next days, and of additional hosts."""

import collections
import typing as ty

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from blazar_core.capacity import timelines
from blazar_core.capacity import usage_records
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import calendar
from blazar_nova.schemas import refused_demands

__all__ = ['Day', 'MOST', 'Replay', 'days', 'replay']

#: Maximum number of demands in a replay: the latest.
MOST = 5000
_DAY = 86400
_HOST = models.Host.__table__.c
_RECORD = models.UsageRecord.__table__.c
_NONE: collections.Counter[str] = collections.Counter()


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
    (UTC), except the first one.
    """
    cuts = [start, *(start - start % _DAY + one * _DAY
                     for one in range(1, number + 1))]
    plan = calendar.planned(connection, model.Window(start, cuts[-1]))
    return sorted(day for rc, whole in plan.capacity.items() if whole
                  for day in _days_of(rc, plan, cuts))


def _days_of(rc: str, plan: calendar.Plan, cuts: ty.Sequence[int],
             ) -> ty.Iterator[Day]:
    bounds = sorted({*plan.reserved, *plan.away, *cuts})
    reserved = away = 0
    sums, taken = [0] * (len(cuts) - 1), [0] * (len(cuts) - 1)
    peaks: list[tuple[int, int]] = [(-1, 0)] * len(sums)
    for time, until in zip(bounds, bounds[1:]):
        reserved += plan.reserved.get(time, _NONE)[rc]
        away += plan.away.get(time, _NONE)[rc]
        day = time // _DAY - cuts[0] // _DAY
        sums[day] += reserved * (until - time)
        taken[day] = max(taken[day], reserved + away)
        if reserved > peaks[day][0]:
            peaks[day] = reserved, time
    for day, (peak, at) in enumerate(peaks):
        yield Day(cuts[day], rc, plan.capacity[rc], plan.usage[rc],
                  round(sums[day] / (cuts[day + 1] - cuts[day]), 2), peak, at,
                  max(0, plan.capacity[rc] - plan.usage[rc] - taken[day]))


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
    demands = [(window, parts) for (window, _text), parts in asked.items()
               ][-MOST:]
    world = _World(connection, hosts, [window for window, _parts in demands])
    if not world.sizes:
        return []
    found = []
    for number in range(hosts + 1):
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
        """Yield the reservations of each host as a block."""
        changes: dict[int, dict[int, collections.Counter[str]]] = (
            collections.defaultdict(lambda: collections.defaultdict(
                collections.Counter)))
        known = {*self._timeline.ids}
        capacity = self._timeline.capacity
        for row in connection.execute(sa.select(
                _RECORD.sign, _RECORD.start_date, _RECORD.end_date,
                _RECORD.resources, _RECORD.hosts).where(
                    _RECORD.kind != usage_records.Kind.USED,
                    _RECORD.end_date > window.start,
                    _RECORD.start_date < window.end)):
            for host_id in known.intersection(row.hosts):
                of_host, count = changes[host_id], row.hosts.count(host_id)
                for rc, amount in row.resources.items():
                    # Only whole hosts differ from each other in a record.
                    amount = (
                        int(capacity[rc][self._timeline.index(host_id)])
                        if model.HOST in row.resources and rc in capacity
                        else amount * count // len(row.hosts))
                    of_host[row.start_date][rc] += row.sign * amount
                    of_host[row.end_date][rc] -= row.sign * amount
        for host_id, of_host in changes.items():
            times, level = sorted(of_host), collections.Counter[str]()
            levels = []
            for time in times[:-1]:
                level.update(of_host[time])
                levels.append(dict(level))
            yield timelines.Block(
                [host_id] * len(levels), times[:-1], times[1:], {
                    rc: [one.get(rc, 0) for one in levels] for rc in level})

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
