# SPDX-License-Identifier: Apache-2.0

"""Reserved and free capacity of the next days, and of additional hosts."""

import collections
import json
import typing as ty

import sqlalchemy as sa

from blazar_core.common import model
from blazar_core.db import models
from blazar_nova.schemas import refused_demands

__all__ = ['Day', 'Replay', 'days', 'replay']

_DAY = 86400
_HOST, _BOOKING = models.Host.__table__.c, models.Booking.__table__.c


class Day(ty.NamedTuple):
    """The planned amounts of one resource class on one day.

    :ivar without_lease: used by servers without a lease
    :ivar reserved: on average
    :ivar peak: the maximum that is reserved at a time
    :ivar peak_at: when the peak starts
    :ivar free: the capacity that is left during the peak
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
    """Return the next days, for each resource class."""
    end = start + number * _DAY
    capacity: collections.Counter[str] = collections.Counter()
    usage: collections.Counter[str] = collections.Counter()
    for row in connection.execute(sa.select(_HOST.capacity, _HOST.usage)):
        if row.capacity:
            capacity.update(model.plain(row.capacity))
            usage.update(model.plain(row.usage))
    changes: dict[str, collections.Counter[int]] = collections.defaultdict(
        collections.Counter)
    amounts = sa.cast(_BOOKING.resources, sa.Text)
    for row in connection.execute(sa.select(
            _BOOKING.start_date, _BOOKING.end_date, amounts.label('amounts'),
            sa.func.count().label('number')).where(
                _BOOKING.host_id.is_not(None), _BOOKING.outage.is_(None),
                _BOOKING.start_date < end, _BOOKING.end_date > start,
    ).group_by(_BOOKING.start_date, _BOOKING.end_date, amounts)):
        for rc, amount in model.plain(json.loads(row.amounts)).items():
            changes[rc][max(start, row.start_date)] += amount * row.number
            changes[rc][min(end, row.end_date)] -= amount * row.number
    return sorted(day for rc, whole in capacity.items() if whole
                  for day in _days_of(rc, whole, usage[rc], changes[rc],
                                      start, number))


def _days_of(rc: str, capacity: int, usage: int,
             changes: ty.Mapping[int, int], start: int, number: int,
             ) -> ty.Iterator[Day]:
    bounds = sorted({*changes, *(start + one * _DAY
                                 for one in range(number + 1))})
    level, sums = 0, [0] * number
    peaks: list[tuple[int, int]] = [(-1, 0)] * number
    for time, until in zip(bounds, bounds[1:]):
        level += changes.get(time, 0)
        day = (time - start) // _DAY
        sums[day] += level * (until - time)
        if level > peaks[day][0]:
            peaks[day] = level, time
    for day, (peak, at) in enumerate(peaks):
        yield Day(start + day * _DAY, rc, capacity, usage,
                  round(sums[day] / _DAY, 2), peak, at,
                  max(0, capacity - usage - peak))


class Replay(ty.NamedTuple):
    """The refused demands that additional hosts would have admitted.

    :ivar demands: the number of all refused demands
    :ivar admitted: the number that would have been admitted
    :ivar servers: the number of servers of these
    """

    hosts: int
    demands: int
    admitted: int
    servers: int


def replay(connection: sa.Connection, hosts: int) -> list[Replay]:
    """Return what 1, 2, ... more hosts would have admitted of the refused
    demands.

    The hosts have the most common capacity and start empty. Demands are
    booked on them in the order of their starts, by first fit, for their whole
    windows. Capacity of the real hosts is not counted, as the demands did not
    fit there, so the numbers are lower bounds. A demand that was sent several
    times counts once.
    """
    sizes = collections.Counter(
        tuple(sorted(model.plain(row.capacity).items()))
        for row in connection.execute(sa.select(_HOST.capacity).where(
            _HOST.pool == model.COMPUTE))
        if row.capacity and any(row.capacity.values()))
    if not sizes:
        return []
    size = dict(sizes.most_common(1)[0][0])
    wanted = sorted({
        (one.window.start, one.window.end, one.project_id,
         json.dumps(one.parts)) for one in refused_demands.found(connection)
        if one.window is not None and one.parts})
    found = []
    for number in range(1, hosts + 1):
        booked: list[list[tuple[model.Window, dict[str, int]]]] = [
            [] for _host in range(number)]
        admitted = servers = 0
        for start, end, _project_id, text in wanted:
            parts = json.loads(text)
            if _place(booked, size, model.Window(start, end), parts):
                admitted += 1
                servers += sum(count for _amounts, count in parts)
        found.append(Replay(number, len(wanted), admitted, servers))
    return found


def _place(booked: list[list[tuple[model.Window, dict[str, int]]]],
           size: ty.Mapping[str, int], window: model.Window,
           parts: ty.Sequence[tuple[dict[str, int], int]]) -> bool:
    """Book all servers of a demand, or nothing."""
    before = [len(host) for host in booked]
    for amounts, count in parts:
        # A whole host takes its full capacity.
        needed = dict(size) if model.HOST in amounts else amounts
        for _server in range(min(count, 1 + sum(size.values()))):
            host = next((one for one in booked if _fits(
                one, size, window, needed)), None)
            if host is None:
                for one, length in zip(booked, before, strict=True):
                    del one[length:]
                return False
            host.append((window, needed))
    return True


def _fits(host: ty.Sequence[tuple[model.Window, ty.Mapping[str, int]]],
          size: ty.Mapping[str, int], window: model.Window,
          needed: ty.Mapping[str, int]) -> bool:
    beside = [(one, amounts) for one, amounts in host if one.overlaps(window)]
    times = {window.start, *(one.start for one, _amounts in beside
                             if one.start > window.start)}
    return all(
        amount + sum(amounts.get(rc, 0) for one, amounts in beside
                     if one.start <= time < one.end) <= size.get(rc, 0)
        for rc, amount in needed.items() for time in times)
