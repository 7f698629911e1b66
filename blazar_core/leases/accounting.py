# SPDX-License-Identifier: Apache-2.0

"""Sum up usage records: what was planned, reserved and used, by whom.

Amounts are class-seconds: one VCPU for an hour is 3600. They are whole
numbers, and the totals of adjacent intervals add up exactly. See
:mod:`blazar_core.capacity.usage_records` for what is recorded.
"""

import collections
import dataclasses
import datetime
import itertools
import json
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import views

#: Keys by which totals can be grouped, in addition to the time.
KEYS = ('project_id', 'lease_id', 'resource_type')
UNITS = ('day', 'month')
#: Maximum number of days or months in an interval.
MAX_INTERVALS = 400
#: Maximum number of rows that one statement returns, unless a group in a day
#: or month has more.
_ROWS = 10_000

_Kind = usage_records.Kind
_RECORDS = models.UsageRecord.__table__.c
#: By the keys of a group, the kind and the resource class.
_Amounts: ty.TypeAlias = collections.Counter[
    tuple[tuple[str, ...], str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """A query for totals.

    :ivar lease_ids: only of these leases; None: of all
    :ivar tags: only of leases that have all of these and are neither purged
        nor, with a project, transferred to another one
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
    """Return the totals in the order of their windows and keys, as the
    database sorts these.

    Use after ``now`` is unknown and not counted. What is reserved after
    ``now`` is counted as currently planned. Memory does not depend on the
    number of groups.

    :param limit: maximum number of rows
    :raises InvalidLeaseParams: if there are too many days or months
    """
    start, keys = query.after or (-1, ())
    windows = [one for one in _windows(query) if one.start >= start]
    after = None
    if windows and windows[0].start == start:
        # Without keys, there is one group.
        after, windows = keys, windows[0 if keys else 1:]
    found: list[Totals] = []
    # One statement counts in many windows, unless these have too many groups.
    many, rows = len(windows), _ROWS
    while windows and len(found) < limit:
        part = windows[:1 if after else many]
        sums = connection.execute(_sums(
            query, part, now, after, rows + 1)).all()
        if len(sums) <= rows:
            windows, after = windows[len(part):], None
        elif len(part) > 1:
            many = len(part) // 8 or 1
            continue
        else:
            # The last group may be incomplete.
            last = _keys(query, sums[-1])
            sums = [row for row in sums if _keys(query, row) != last]
            if not sums:
                rows *= 2
                continue
            after = _keys(query, sums[-1])
        found += itertools.islice(
            _by_window(query, part, sums), limit - len(found))
    return found


def _keys(query: Query, row: ty.Any) -> tuple[str, ...]:
    return tuple(row[:len(query.group_by)])


def _by_window(query: Query, windows: ty.Sequence[model.Window],
               sums: ty.Iterable[ty.Any]) -> ty.Iterator[Totals]:
    """Yield the totals of adjacent windows.

    Of the records that begin in one window and end in another, the number and
    the sums of their starts and ends suffice.

    :param sums: rows of :func:`_sums`
    """
    order: dict[tuple[str, ...], int] = {}
    # By window: amounts of parts of it, and changes of those in all of it.
    parts: list[_Amounts] = [collections.Counter() for _one in windows]
    changes: list[_Amounts] = [
        collections.Counter() for _one in (*windows, None)]
    for row in sums:
        number, first, last = int(row.number), row.first, row.last
        of = _keys(query, row)
        order.setdefault(of, len(order))
        for rc, amount in json.loads(row.amounts).items():
            key = of, row.kind, rc
            if first == last:
                parts[first][key] += amount * int(row.ends - row.begins)
                continue
            parts[first][key] += amount * int(
                number * windows[first].end - row.begins)
            parts[last][key] += amount * int(
                row.ends - number * windows[last].start)
            changes[first + 1][key] += amount * number
            changes[last][key] -= amount * number
    level: _Amounts = collections.Counter()
    for window, part, change in zip(windows, parts, changes):
        level.update(change)
        level = collections.Counter({
            key: amount for key, amount in level.items() if amount})
        for key, amount in level.items():
            part[key] += amount * (window.end - window.start)
        groups: dict[tuple[str, ...], dict[str, collections.Counter[str]]] = {}
        for (of, kind, rc), amount in part.items():
            groups.setdefault(of, {
                name: collections.Counter() for name in _Kind})[
                    kind][rc] += amount
        for of in sorted(groups, key=order.__getitem__):
            kinds = groups[of]
            # Reserved amounts are the planned ones and their later changes.
            kinds[_Kind.RESERVED].update(kinds[_Kind.PLANNED])
            # Use has no end when it is recorded: what it has been later may
            # be zero.
            if any(map(any, map(dict.values, kinds.values()))):
                yield Totals(window, of, {
                    kind: {rc: amount for rc, amount in sorted(
                        kinds[kind].items()) if amount} for kind in _Kind})


def with_occurrences(connection: sa.Connection, query: Query) -> Query:
    """Return a query in which a recurring lease means all its occurrences,
    including those that were skipped.
    """
    if query.lease_ids is None:
        return query
    return dataclasses.replace(query, lease_ids={
        *query.lease_ids, *connection.scalars(sa.select(models.Lease.id).where(
            models.Lease.recurrence_id.in_(query.lease_ids)))})


def visible(query: Query) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of leases of which a query may show more than
    usage: a project has usage of leases that it has transferred.
    """
    return [] if query.project_id is None else [
        models.Lease.project_id == query.project_id]


def within(query: Query, window: model.Window, now: int) -> sa.Select[ty.Any]:
    """Return the statement that selects the parts of usage records within a
    window: their ``kind``, ``sign``, ``amounts`` as text, ``begins`` and
    ``ends``.
    """
    start, end = window.start, window.end
    wanted = [column == value for column, value in (
        (_RECORDS.project_id, query.project_id),
        (_RECORDS.resource_type, query.resource_type)) if value is not None]
    if query.lease_ids is not None:
        wanted.append(_RECORDS.lease_id.in_(query.lease_ids))
    if query.tags:
        wanted.append(sa.exists().where(
            models.Lease.id == _RECORDS.lease_id, *views.tagged(query.tags),
            *visible(query)))
    until = sa.case((_RECORDS.kind == _Kind.USED, max(
        start, min(end, now))), else_=end)
    found = sa.select(
        _RECORDS.kind, _RECORDS.sign,
        sa.cast(_RECORDS.resources, sa.Text).label('amounts'),
        sa.case((_RECORDS.start_date > start, _RECORDS.start_date),
                else_=start).label('begins'),
        sa.case((_RECORDS.end_date < until, _RECORDS.end_date),
                else_=until).label('ends'),
    ).where(_RECORDS.end_date > start, _RECORDS.start_date < until, *wanted)
    for dialect in ('mysql', 'mariadb'):
        # Otherwise they scan an index in its order, which takes twice as long.
        found = found.with_hint(
            models.UsageRecord.__table__, 'IGNORE INDEX FOR GROUP BY '
            '(usage_records_project_idx, usage_records_lease_idx)', dialect)
    return found


def _sums(query: Query, windows: ty.Sequence[model.Window], now: int,
          after: tuple[str, ...] | None, limit: int) -> sa.Select[ty.Any]:
    """Return the statement that counts the records of each group, kind and
    amount, and sums up their starts and ends, by the indices of the first and
    the last of their windows.

    :param after: only groups after these keys
    :param limit: maximum number of rows
    """
    keys = [_RECORDS[name] for name in query.group_by]
    part = within(query, model.Window(
        windows[0].start, windows[-1].end), now)
    of = part.selected_columns
    part = part.add_columns(
        *keys, _index(of.begins, windows).label('first'),
        # The last second, as windows are half-open.
        _index(of.ends - 1, windows).label('last'))
    if after:
        part = part.where(sa.tuple_(*keys) > after)
    one = part.subquery().c
    groups = (*(one[name] for name in query.group_by), one.kind, one.amounts,
              one.first, one.last)
    total = sa.select(
        *groups, sa.func.sum(one.sign).label('number'),
        sa.func.sum(one.sign * one.begins).label('begins'),
        sa.func.sum(one.sign * one.ends).label('ends'),
    ).group_by(*groups).subquery().c
    # Servers that were deleted before are omitted. With HAVING, databases
    # compute the sums twice.
    return sa.select(*total).where(
        (total.number != 0) | (total.begins != 0) | (total.ends != 0),
    ).order_by(*[*total][:len(keys)]).limit(limit)


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
    date = local_times.wall(start, query.zone).replace(
        hour=0, minute=0, second=0, microsecond=0, fold=0)
    following = date + datetime.timedelta(days=1) if query.unit == 'day' else (
        date.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
    return local_times.instant(following, query.zone)
