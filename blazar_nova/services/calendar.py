# SPDX-License-Identifier: Apache-2.0

"""Data for a calendar: bars for what is reserved when, and free capacity.

Bars represent leases, or the bookings of leases on hosts. Users who may see
neither the hosts nor the leases of others see the free capacity at a time, as
one of a few levels, which do not disclose what others have reserved.
"""

import collections
import heapq
import json
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import views

#: Maximum number of bars.
MOST = 10_000
#: Maximum number of changes to compute free capacity from.
MOST_CHANGES = 200_000
#: Free capacity in quarters, rounded down: 0 is less than one, 4 is all.
LEVELS = 4
#: Maximum number of intervals for which free capacity is given.
_PARTS = 200

_LEASE, _BOOKING = models.Lease.__table__.c, models.Booking.__table__.c
_RESERVATION, _HOST = models.Reservation.__table__.c, models.Host.__table__.c
_OF_LEASE = (_LEASE.id.label('lease_id'), _LEASE.name, _LEASE.project_id,
             _LEASE.status, _LEASE.deleted_at)


class Bar(ty.NamedTuple):
    """A lease, or its bookings on a host.

    :ivar host: the name of the host; None: the bar is for the lease
    :ivar types: the resource types of its reservations
    """

    lease_id: str
    name: str
    project_id: str
    status: str
    start: int
    end: int
    host: str | None
    types: tuple[str, ...]


class Free(ty.NamedTuple):
    """The minimum free capacity by class within a window, as levels."""

    window: model.Window
    levels: dict[str, int]


class Change(ty.NamedTuple):
    """A change of planned amounts, by class.

    :ivar unavailable: of what is on hosts that are down or in maintenance;
        false: of what leases reserve
    """

    time: int
    unavailable: bool
    amounts: dict[str, int]


class Plan(ty.NamedTuple):
    """The capacity of all hosts, by class, and what is planned of it.

    :ivar usage: by servers without a lease, now
    :ivar changes: in the order of their times; read from the database while
        they are iterated
    """

    capacity: collections.Counter[str]
    usage: collections.Counter[str]
    changes: ty.Iterator[Change]


def bars(connection: sa.Connection, window: model.Window,
         project_id: str | None) -> list[Bar]:
    """Return the leases that overlap a window, by their start.

    :param project_id: None: of all projects
    :raises InvalidLeaseParams: if there are too many
    """
    chosen = sa.select(*_OF_LEASE, _LEASE.start_date, _LEASE.end_date).where(
        _LEASE.start_date < window.end, _LEASE.end_date > window.start,
        # Leases that were deleted before their start are empty.
        _LEASE.start_date < _LEASE.end_date,
        # So that an index on the state and the end is used.
        _LEASE.status.in_({*states.Lease} - {*states.SEEKING}),
        *_of(project_id),
    ).order_by(_LEASE.start_date, _LEASE.id).limit(MOST + 1)
    found = connection.execute(chosen).all()
    _check(found)
    types: dict[str, set[str]] = collections.defaultdict(set)
    ids = chosen.with_only_columns(_LEASE.id).subquery()
    for lease_id, resource_type in connection.execute(sa.select(
            _RESERVATION.lease_id, _RESERVATION.resource_type).join(
                ids, ids.c.id == _RESERVATION.lease_id).distinct()):
        types[lease_id].add(resource_type)
    return [Bar(row.lease_id, row.name, row.project_id, views.status(row),
                row.start_date, row.end_date, None,
                tuple(sorted(types[row.lease_id]))) for row in found]


def on_hosts(connection: sa.Connection, window: model.Window,
             project_id: str | None) -> list[Bar]:
    """Return the bookings of leases on hosts, by host and start.

    :param project_id: None: of all projects
    :raises InvalidLeaseParams: if there are too many
    """
    found = connection.execute(sa.select(
        *_OF_LEASE, _BOOKING.start_date, _BOOKING.end_date,
        _HOST.name.label('host'), _RESERVATION.resource_type,
    ).select_from(models.Booking).join(
        models.Reservation, _RESERVATION.id == _BOOKING.reservation_id).join(
            models.Lease, _LEASE.id == _RESERVATION.lease_id).join(
                models.Host, _HOST.id == _BOOKING.host_id).where(
        _BOOKING.start_date < window.end, _BOOKING.end_date > window.start,
        *_of(project_id)).distinct().order_by(
        _HOST.name, _BOOKING.start_date, _LEASE.id).limit(MOST + 1)).all()
    _check(found)
    return [Bar(row.lease_id, row.name, row.project_id, views.status(row),
                row.start_date, row.end_date, row.host,
                (row.resource_type,)) for row in found]


def _of(project_id: str | None) -> list[sa.ColumnElement[bool]]:
    return [] if project_id is None else [_LEASE.project_id == project_id]


def _check(found: ty.Sequence[ty.Any]) -> None:
    if len(found) > MOST:
        raise errors.InvalidLeaseParams(
            f'The calendar would have more than {MOST} bars. Write a shorter '
            'time, by start_date and end_date.')


def planned(connection: sa.Connection, window: model.Window,
            most: int | None = None) -> Plan:
    """Return what is planned on all hosts over a window. Hosts that are
    switched off are free.

    :param most: maximum number of changes by leases; None: unlimited
    """
    capacity, usage = collections.Counter[str](), collections.Counter[str]()
    for row in connection.execute(sa.select(_HOST.capacity, _HOST.usage)):
        if row.capacity:
            capacity.update(model.plain(row.capacity))
            usage.update(model.plain(row.usage))
    return Plan(capacity, usage, heapq.merge(
        _unavailable(connection, window), _reserved(connection, window, most),
        key=lambda change: change.time))


def _within(window: model.Window) -> tuple[sa.ColumnElement[bool], ...]:
    return (_BOOKING.host_id.is_not(None), _BOOKING.start_date < window.end,
            _BOOKING.end_date > window.start)


def _reserved(connection: sa.Connection, window: model.Window,
              most: int | None) -> ty.Iterator[Change]:
    """Yield the changes of what leases reserve."""
    amounts = sa.cast(_BOOKING.resources, sa.Text).label('amounts')
    start = sa.case((_BOOKING.start_date > window.start, _BOOKING.start_date),
                    else_=window.start)
    both = sa.union_all(*(sa.select(
        time.label('instant'), amounts,
        (sign * sa.func.count()).label('number'),
    ).where(_BOOKING.outage.is_(None), time < window.end, *_within(window),
            ).group_by(sa.text('instant'), sa.text('amounts'))
        for time, sign in ((start, 1), (_BOOKING.end_date, -1)))).subquery()
    for row in connection.execute(
            sa.select(both).order_by(both.c.instant).limit(most),
            execution_options={'yield_per': 1000}):
        yield Change(row.instant, False, {
            rc: amount * row.number for rc, amount in
            model.plain(json.loads(row.amounts)).items()})


def _unavailable(connection: sa.Connection, window: model.Window,
                 ) -> list[Change]:
    """Return the changes of what is on hosts that are down or in maintenance.
    """
    found, until = [], collections.defaultdict[int, int](lambda: window.start)
    for row in connection.execute(sa.select(
            _BOOKING.start_date, _BOOKING.end_date, _BOOKING.resources,
            _HOST.id, _HOST.usage).join(
                models.Host, _HOST.id == _BOOKING.host_id).where(
                    _BOOKING.outage.in_(
                        [outages.FAILURE, outages.MAINTENANCE]),
                    *_within(window)).order_by(_BOOKING.start_date)):
        # A host in maintenance may be down, too.
        start = max(row.start_date, until[row.id])
        end = until[row.id] = max(row.end_date, until[row.id])
        for time, sign in (start, 1), (end, -1):
            # What its servers without a lease use counts already.
            found.append(Change(time, True, {
                rc: sign * max(0, amount - row.usage.get(rc, 0))
                for rc, amount in model.plain(row.resources).items()}))
    return sorted((one for one in found if one.time < window.end),
                  key=lambda one: one.time)


def free(connection: sa.Connection, window: model.Window) -> list[Free]:
    """Return the free capacity of all hosts over a window, as currently
    planned, in intervals; adjacent ones with equal levels are merged.

    :raises InvalidLeaseParams: if there are too many bookings
    """
    plan = planned(connection, window, MOST_CHANGES + 1)
    changes = [*plan.changes]
    if len(changes) > MOST_CHANGES:
        raise errors.InvalidLeaseParams(
            f'What is reserved changes more than {MOST_CHANGES} times in that '
            'time. Write a shorter time, by start_date and end_date.')
    return _levels(window, plan.capacity, plan.usage, changes)


def _levels(window: model.Window, capacity: ty.Mapping[str, int],
            taken: collections.Counter[str], changes: ty.Iterable[Change],
            ) -> list[Free]:
    parts = min(_PARTS, window.end - window.start)
    cuts = [window.start + (window.end - window.start) * part // parts
            for part in range(parts + 1)]
    coming = collections.deque(changes)
    found: list[Free] = []
    for start, end in zip(cuts, cuts[1:]):
        while coming and coming[0].time <= start:
            taken.update(coming.popleft().amounts)
        most = dict(taken)
        while coming and coming[0].time < end:
            time = coming[0].time
            while coming and coming[0].time == time:
                taken.update(coming.popleft().amounts)
            most = {rc: max(most.get(rc, 0), taken[rc]) for rc in taken}
        levels = {rc: max(0, LEVELS * (whole - most.get(rc, 0)) // whole)
                  for rc, whole in sorted(capacity.items()) if whole}
        if found and found[-1].levels == levels:
            found[-1] = Free(model.Window(found[-1].window.start, end), levels)
        else:
            found.append(Free(model.Window(start, end), levels))
    return found
