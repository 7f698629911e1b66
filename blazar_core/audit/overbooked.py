# SPDX-License-Identifier: Apache-2.0

"""Capacity: whether more of a host is promised than it has."""

import collections
import itertools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.audit.findings import when
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['overbooked']

#: How many leases one line names.
_NAMED = 3


def overbooked(database: api.Database, clock: clocks.Clock,
               ) -> ty.Iterator[Difference]:
    """The rule, on every host, at every instant from now on."""
    now = clock.now()
    with database.reader() as session:
        hosts = {row.id: row for row in session.execute(inventory.HOSTS)}
        rows = session.execute(
            sa.select(models.Booking.host_id, models.Booking.start_date,
                      models.Booking.end_date, models.Booking.resources,
                      models.Booking.claimed_at,
                      models.Reservation.lease_id)
            .join(models.Booking.reservation).join(models.Reservation.lease)
            .where(models.Booking.host_id.is_not(None),
                   # That has none of it yet, and keeps others off.
                   models.Lease.status != states.Lease.IN_PROGRESS,
                   sa.or_(models.Booking.end_date > now,
                          models.Booking.claimed_at.is_not(None)))
            .order_by(models.Booking.host_id),
            execution_options={'yield_per': 10_000})
        for host_id, bookings in itertools.groupby(
                rows, key=lambda row: ty.cast(int, row.host_id)):
            found = _overfull(hosts[host_id], list(bookings), now)
            if found is not None:
                yield found


def _overfull(host: ty.Any, rows: ty.Sequence[ty.Any], now: int,
              ) -> Difference | None:
    """The first instant at which more of a host is promised than it has."""
    steps: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for row in rows:
        stay = ledger.occupied(
            row.start_date, row.end_date, row.claimed_at, now)
        for rc, amount in row.resources.items():
            steps[rc] += ((max(stay.start, now), amount),
                          (stay.end, -amount))
    first = min((found for rc in sorted(steps) if (
        found := _first_over(host, rc, steps[rc])) is not None),
        default=None)
    if first is None:
        return None
    instant, rc, level = first
    leases = sorted({
        row.lease_id for row in rows
        if row.start_date <= instant < ledger.occupied(
            row.start_date, row.end_date, row.claimed_at, now).end})
    more = f' and {len(leases) - _NAMED} more' if len(leases) > _NAMED else ''
    concerned = ', '.join(leases[:_NAMED]) + more
    if not host.capacity:
        return Difference(
            ('homeless', host.uuid),
            f'Host {host.name} is none of Nova\'s any more, and leases are '
            f'booked on it: {concerned}.',
            'blazar-listener binds them to other hosts within seconds, or '
            'their leases say that there is no capacity; bring the host back, '
            'or free others')
    return Difference(
        ('overfull', host.uuid),
        f'Host {host.name} has {host.capacity.get(rc, 0)} {rc}, but at '
        f'{when(instant)} {level} are in use or promised; leases: '
        f'{concerned}.',
        'blazar-listener binds what has not begun to other hosts within '
        'seconds; of what runs, move servers away from it, or let leases end '
        'earlier')


def _first_over(host: ty.Any, rc: str, steps: list[tuple[int, int]],
                ) -> tuple[int, str, int] | None:
    if host.capacity and rc in ledger.SHARED and rc not in host.capacity:
        # A shared provider has it: Nova judges alone.
        return None
    most = host.capacity.get(rc, 0)
    level = host.usage.get(rc, 0)
    steps.sort()
    for instant, group in itertools.groupby(steps, key=lambda one: one[0]):
        level += sum(amount for _instant, amount in group)
        if level > most:
            return instant, rc, level
    return None
