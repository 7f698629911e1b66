# SPDX-License-Identifier: Apache-2.0

"""Sum up usage records: what was planned, reserved and used, by whom.

Amounts are class-seconds: one VCPU for an hour is 3600. They are whole
numbers, and the totals of adjacent intervals add up exactly. See
:mod:`blazar_core.capacity.usage_records` for what is recorded.
"""

import collections
import dataclasses
import datetime
import json
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import recurrences
from blazar_core.db import models
from blazar_core.leases import views

__all__ = ['KEYS', 'MAX_INTERVALS', 'Query', 'Totals', 'UNITS',
           'forget', 'leases', 'reserved_at', 'totals']

#: Keys by which totals can be grouped, in addition to the time.
KEYS = ('project_id', 'lease_id', 'resource_type')
UNITS = ('day', 'month')
#: Maximum number of days or months in an interval.
MAX_INTERVALS = 400
#: Assumed number of groups in a day or month, at first, except by lease.
_ROWS = 100
#: Number of leases whose usage records one statement deletes.
_BATCH = 500

_Kind = usage_records.Kind
_RECORDS = models.UsageRecord.__table__.c
_LEASES = models.Lease.__table__.c


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """A query for totals.

    :ivar lease_ids: only of these leases; None: of all
    :ivar tags: only of leases that have all of these and are not purged
    :ivar group_by: some of :data:`KEYS`
    :ivar unit: one of :data:`UNITS`; None: the time is not divided
    :ivar zone: time zone of days and months
    :ivar after: the window and the keys of a row: only the rows after it
    """

    window: model.Window
    project_id: str | None = None
    lease_ids: ty.Collection[str] | None = None
    resource_type: str | None = None
    tags: tuple[str, ...] = ()
    group_by: tuple[str, ...] = ()
    unit: str | None = None
    zone: datetime.tzinfo = datetime.timezone.utc
    after: tuple[int, tuple[str, ...]] | None = None


class Totals(ty.NamedTuple):
    """Class-seconds within a window, of the group that the keys identify."""

    window: model.Window
    keys: tuple[str, ...]
    amounts: dict[str, dict[str, int]]


def totals(connection: sa.Connection, query: Query, now: int, limit: int,
           ) -> list[Totals]:
    """Return the totals in the order of their windows and keys.

    Use after ``now`` is unknown and not counted. What is reserved after
    ``now`` is counted as currently planned.

    :param limit: maximum number of rows
    :raises InvalidLeaseParams: if there are too many days or months
    """
    windows = [one for one in _windows(query)
               if query.after is None or one.start >= query.after[0]]
    found: list[Totals] = []
    # One statement counts in many windows. How many rows a window has is not
    # known: at first few, so that not many more are read than requested.
    many = limit if not query.group_by else 1 if (
        'lease_id' in query.group_by) else max(1, limit // _ROWS)
    while windows and len(found) < limit:
        found += _of_windows(connection, query, windows[:many], now)
        windows, many = windows[many:], 2 * many
    return found[:limit]


def filters(query: Query) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that select the usage records of a query,
    regardless of its interval.
    """
    found = [column == value for column, value in (
        (_RECORDS.project_id, query.project_id),
        (_RECORDS.resource_type, query.resource_type)) if value is not None]
    if query.lease_ids is not None:
        found.append(_RECORDS.lease_id.in_(query.lease_ids))
    if query.tags:
        found.append(sa.exists().where(
            models.Lease.id == _RECORDS.lease_id, *views.tagged(query.tags)))
    return found


def _of_windows(connection: sa.Connection, query: Query,
                windows: ty.Sequence[model.Window], now: int) -> list[Totals]:
    """Return the totals of adjacent windows, in one statement, which reads
    each record once.

    Of the records that begin in one window and end in another, the number and
    the sums of their starts and ends suffice.
    """
    found: dict[tuple[int, tuple[str, ...]],
                dict[str, collections.Counter[str]]] = {}

    def add(index: int, of: tuple[str, ...], kind: str, rc: str,
            amount: int) -> None:
        if query.after is None or (windows[index].start, of) > query.after:
            found.setdefault((index, of), {
                name: collections.Counter() for name in _Kind})[
                    kind][rc] += amount

    # The changes of amounts over whole windows, by the index of a window.
    levels: dict[tuple[tuple[str, ...], str, str],
                 collections.Counter[int]] = {}
    for row in connection.execute(_sums(query, windows, now)):
        number, first, last = int(row.number), row.first, row.last
        of = tuple(row[:len(query.group_by)])
        for rc, amount in json.loads(row.amounts).items():
            if first == last:
                add(first, of, row.kind, rc,
                    amount * int(row.ends - row.begins))
                continue
            add(first, of, row.kind, rc, amount * int(
                number * windows[first].end - row.begins))
            add(last, of, row.kind, rc, amount * int(
                row.ends - number * windows[last].start))
            level = levels.setdefault(
                (of, row.kind, rc), collections.Counter())
            level[first + 1] += amount * number
            level[last] -= amount * number
    for (of, kind, rc), changes in levels.items():
        amount, indices = 0, sorted(changes)
        for since, following in zip(indices, indices[1:]):
            amount += changes[since]
            for index in range(since, following if amount else since):
                add(index, of, kind, rc, amount * (
                    windows[index].end - windows[index].start))
    for kinds in found.values():
        # Reserved amounts are the planned ones and their later changes.
        kinds[_Kind.RESERVED].update(kinds[_Kind.PLANNED])
    # Use has no end when it is recorded: later, what it has been may be zero.
    return [
        Totals(windows[index], of, {
            kind: {rc: amount for rc, amount in sorted(kinds[kind].items())
                   if amount} for kind in _Kind})
        for (index, of), kinds in sorted(found.items())
        if any(map(any, map(dict.values, kinds.values())))]


def _sums(query: Query, windows: ty.Sequence[model.Window],
          now: int) -> sa.Select[ty.Any]:
    """Return the statement that counts the records of each group, kind and
    amount, and sums up their starts and ends, by the indices of the first and
    the last of their windows.
    """
    keys = [_RECORDS[name] for name in query.group_by]
    start, end = windows[0].start, windows[-1].end
    until = sa.case((_RECORDS.kind == _Kind.USED, max(
        start, min(end, now))), else_=end)
    begins, ends = (
        sa.case((_RECORDS.start_date > start, _RECORDS.start_date),
                else_=start),
        sa.case((_RECORDS.end_date < until, _RECORDS.end_date), else_=until))
    part = sa.select(
        *keys, _RECORDS.kind, _RECORDS.sign,
        sa.cast(_RECORDS.resources, sa.Text).label('amounts'),
        begins.label('begins'), ends.label('ends'),
        # Earlier starts are in the first window.
        _index(_RECORDS.start_date, windows).label('first'),
        # The last second, as windows are half-open.
        _index(ends - 1, windows).label('last'),
    ).where(
        _RECORDS.end_date > start, _RECORDS.start_date < until,
        *filters(query))
    for dialect in ('mysql', 'mariadb'):
        # Otherwise they scan an index in its order, which takes twice as long.
        part = part.with_hint(
            models.UsageRecord.__table__, 'IGNORE INDEX FOR GROUP BY '
            '(usage_records_project_idx, usage_records_lease_idx)', dialect)
    one = part.subquery().c
    groups = (*(one[name] for name in query.group_by), one.kind, one.amounts,
              one.first, one.last)
    return sa.select(
        *groups, sa.func.sum(one.sign).label('number'),
        sa.func.sum(one.sign * one.begins).label('begins'),
        sa.func.sum(one.sign * one.ends).label('ends')).group_by(*groups)


def _index(time: sa.ColumnElement[int], windows: ty.Sequence[model.Window],
           first: int = 0) -> sa.ColumnElement[int]:
    """Return which of adjacent windows contains a time, by halves."""
    if len(windows) == 1:
        return sa.literal(first)
    half = len(windows) // 2
    return sa.case(
        (time < windows[half].start, _index(time, windows[:half], first)),
        else_=_index(time, windows[half:], first + half))


def _windows(query: Query) -> ty.Iterator[model.Window]:
    """Yield the days or months of the interval, of which the first and the
    last may be partial.

    :raises InvalidLeaseParams: if there are too many
    """
    start, end = query.window.start, query.window.end
    for _count in range(MAX_INTERVALS):
        until = min(end, _next(start, query))
        yield model.Window(start, until)
        if until == end:
            return
        start = until
    raise errors.InvalidLeaseParams(
        f'The interval has more than {MAX_INTERVALS} {query.unit}s. Write a '
        'shorter one.')


def _next(start: int, query: Query) -> int:
    """Return the start of the next day or month after an instant."""
    if query.unit is None:
        return query.window.end
    date = recurrences.wall(start, query.zone).replace(
        hour=0, minute=0, second=0, microsecond=0, fold=0)
    following = date + datetime.timedelta(days=1) if query.unit == 'day' else (
        date.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
    return recurrences.instant(following, query.zone)


def leases(connection: sa.Connection, ids: ty.Collection[str],
           ) -> dict[str, dict[str, ty.Any]]:
    """Return the names, descriptions and tags of leases by their ids; purged
    leases are omitted.
    """
    return {row.id: {'lease_name': row.name,
                     'description': row.description or '',
                     'tags': row.tags or []}
            for row in connection.execute(sa.select(
                _LEASES.id, _LEASES.name, _LEASES.description, _LEASES.tags,
            ).where(_LEASES.id.in_(ids)))}


def forget(connection: sa.Connection, before: int, last: str) -> str:
    """Delete a batch of usage records of purged leases without records since
    an instant, all records of a lease at once.

    :param last: only leases with later ids
    :returns: the last id of the batch; empty: there are no others
    """
    ids = connection.scalars(sa.select(_RECORDS.lease_id).where(
        _RECORDS.lease_id > last,
        ~sa.exists().where(_LEASES.id == _RECORDS.lease_id),
    ).group_by(_RECORDS.lease_id).having(
        sa.func.max(_RECORDS.recorded_at) < before).order_by(
            _RECORDS.lease_id).limit(_BATCH)).all()
    if ids:
        connection.execute(sa.delete(models.UsageRecord.__table__).where(
            _RECORDS.lease_id.in_(ids)))
    return ids[-1] if ids else ''


def reserved_at(connection: sa.Connection, instant: int,
                ) -> dict[int, tuple[collections.Counter[str],
                                     collections.Counter[str]]]:
    """Return by host what leases reserve at an instant, as currently planned,
    and what of that servers use now, by class. A whole host is in use while
    servers are on it.
    """
    booking = models.Booking.__table__.c
    amounts = sa.cast(booking.resources, sa.Text)
    found: dict[int, tuple[collections.Counter[str],
                           collections.Counter[str]]] = {}
    for row in connection.execute(sa.select(
            booking.host_id, amounts.label('amounts'), booking.running,
            sa.func.count().label('number'),
    ).where(
            booking.reservation_id.is_not(None), booking.host_id.is_not(None),
            booking.start_date <= instant, booking.end_date > instant,
    ).group_by(booking.host_id, amounts, booking.running)):
        reserved, used = found.setdefault(
            row.host_id, (collections.Counter(), collections.Counter()))
        for rc, amount in model.plain(json.loads(row.amounts)).items():
            reserved[rc] += amount * row.number
            used[rc] += amount * row.number * row.running
    return found
