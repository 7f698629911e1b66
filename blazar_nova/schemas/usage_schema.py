# SPDX-License-Identifier: Apache-2.0
"""Parsing of usage queries, and representation of their results."""

import dataclasses
import sys
import typing as ty

from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import recurrence_rules

#: Keys by which totals may be grouped, with the names of the API.
GROUPS = {'project': 'project_id', 'lease': 'lease_id',
          'type': 'resource_type'}
MAX_LIMIT = 1000
#: Default length of the interval in days.
DEFAULT_DAYS = 30

_LEASE = models.Lease.__table__.c
#: Fields of a lease that is purged, or another project's.
_PURGED: dict[str, ty.Any] = {
    'lease_name': None, 'description': None, 'tags': []}
#: Known keys, with examples.
_KEYS = {
    'start_date': '"2026-11-01"', 'end_date': '"2026-12-01"',
    'project_id': '"5f3c..."', 'lease_id': '"8b1d..."',
    'resource_type': '"virtual:instance"', 'tags': '"ci,team-a"',
    'group_by': '"project,day"',
    'timezone': '"Europe/Berlin"', 'limit': '100', 'marker': '"[...]"'}


def query(values: dict[str, ty.Any], now: int) -> tuple[accounting.Query, int]:
    """Read the query of ``GET /usage``, or the arguments of a command.

    :returns: the parsed query, and the maximum number of rows
    :raises InvalidLeaseParams: with the message for the user
    """
    inputs.check_keys(values, _KEYS, 'the query')
    zone = recurrence_rules.zone_of(values.get('timezone', 'UTC'))

    def instant(key: str, default: int) -> int:
        text = values.get(key)
        if text is None:
            return default
        found, wall = dates.parse_date(text, now), dates.wall(text)
        # Without an offset, the date is local to the time zone.
        return found if wall is None else local_times.instant(wall, zone)

    end = instant('end_date', now)
    start = instant('start_date', end - DEFAULT_DAYS * 86400)
    if not 0 <= start < end < model.LATEST:
        since, until = (clocks.minute(min(max(0, one), model.LATEST))
                        for one in (start, end))
        raise errors.InvalidLeaseParams(
            f'The interval from {since} to {until} UTC is empty or out of '
            'range. Write an end_date that is later than start_date.')
    groups, unit = _groups(values.get('group_by', ''))
    found = accounting.Query(
        model.Window(start, end), values.get('project_id'),
        [values['lease_id']] if 'lease_id' in values else None,
        extensions.check_type(values['resource_type'])
        if 'resource_type' in values else None,
        hint_params.tags_of(values) or (), groups, unit, zone)
    return dataclasses.replace(
        found, after=_after(values['marker'], groups)
        if 'marker' in values else None), inputs.integer(
            values.get('limit', MAX_LIMIT), 'limit', 1, MAX_LIMIT)


def _groups(text: str) -> tuple[tuple[str, ...], str | None]:
    """Return the keys and the unit of time to group by."""
    names = [*dict.fromkeys(
        name.strip() for name in text.split(',') if name.strip())]
    known = [*GROUPS, *accounting.UNITS]
    for name in names:
        if name not in known:
            raise errors.InvalidLeaseParams(
                f'Usage cannot be grouped by "{words.shown(name)}". Write '
                f'some of {", ".join(known)}, such as group_by=project,day.')
    units = [name for name in names if name in accounting.UNITS]
    if len(units) > 1:
        raise errors.InvalidLeaseParams(
            'Usage is grouped by day or by month. Write only one of them.')
    return tuple(GROUPS[name] for name in names if name in GROUPS), (
        units[0] if units else None)


def marker(total: accounting.Totals) -> str:
    """Return the marker of the page after a row."""
    return str(jsonutils.dumps([total.window.start, *total.keys]))


def _after(text: str, groups: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    try:
        start, *keys = jsonutils.loads(text)
        if type(start) is int and len(keys) == len(groups) and all(
                isinstance(one, str) and one.isprintable() and
                len(one) <= 255 for one in keys):
            return start, tuple(keys)
    except (ValueError, TypeError, RecursionError):
        pass
    raise errors.InvalidLeaseParams(
        'The marker is not one of this list. Use the link to the next page as '
        'it is, with the same group_by.')


def rows(connection: sa.Connection, query: accounting.Query,
         totals: ty.Sequence[accounting.Totals]) -> list[dict[str, ty.Any]]:
    """Return the rows of the answer."""
    found: list[dict[str, ty.Any]] = [{
        **clocks.span(total.window.start, total.window.end),
        **dict(zip(query.group_by, total.keys, strict=True)),
        **total.amounts} for total in totals]
    if 'lease_id' in query.group_by:
        known = {row.id: {'lease_name': row.name,
                          'description': row.description or '',
                          'tags': row.tags or []}
                 for row in connection.execute(sa.select(
                     _LEASE.id, _LEASE.name, _LEASE.description, _LEASE.tags,
                 ).where(_LEASE.id.in_({row['lease_id'] for row in found}),
                         *accounting.visible(query)))}
        for row in found:
            row |= known.get(row['lease_id'], _PURGED)
    return found


def utilization(connection: sa.Connection, lease_ids: ty.Collection[str],
                now: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return by reservation of leases and by resource class the hours that
    were reserved and used until now, and how many percent of them were used.
    """
    return {total.keys[0]: {rc: {
        'reserved': round(amount / 3600, 4),
        'used': round(total.amounts['used'].get(rc, 0) / 3600, 4),
        'percent': round(100 * total.amounts['used'].get(rc, 0) / amount, 1)}
        for rc, amount in total.amounts['reserved'].items()}
        for total in accounting.totals(connection, accounting.Query(
            model.Window(0, now), lease_ids=lease_ids,
            group_by=('reservation_id',)), now, sys.maxsize)}
