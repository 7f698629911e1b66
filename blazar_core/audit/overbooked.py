# SPDX-License-Identifier: Apache-2.0

"""Hosts on which more is reserved than their capacity."""

import itertools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.audit.findings import when
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

#: Maximum number of leases in one line of the report.
_NAMED = 3


def overbooked(database: api.Database, clock: clocks.Clock,
               ) -> ty.Iterator[Difference]:
    """Yield the hosts that violate the capacity rule at any future instant."""
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
                   # Its bookings only keep other leases off.
                   models.Lease.status != states.Lease.IN_PROGRESS,
                   ledger.is_held(now))
            .order_by(models.Booking.host_id),
            execution_options={'yield_per': 10_000})
        for host_id, bookings in itertools.groupby(
                rows, key=lambda row: ty.cast(int, row.host_id)):
            found = _overfull(hosts[host_id], list(bookings), now)
            if found is not None:
                yield found


def _overfull(host: ty.Any, rows: ty.Sequence[ty.Any], now: int,
              ) -> Difference | None:
    """Return the first instant at which the reserved and used resources of a
    host exceed its capacity.
    """
    stays = [(rule.occupied(max(row.start_date, now), row.end_date,
                            row.claimed_at, now), row) for row in rows]
    first = next(((instant, min(lacking), levels) for instant, levels, _more
                  in rule.levels((stay, row.resources) for stay, row in stays)
                  if (lacking := rule.lacking(
                      host.capacity, host.usage, levels))), None)
    if first is None:
        return None
    instant, rc, levels = first
    leases = sorted({
        row.lease_id for stay, row in stays
        if stay.start <= instant < stay.end})
    more = f' and {len(leases) - _NAMED} more' if len(leases) > _NAMED else ''
    concerned = ', '.join(leases[:_NAMED]) + more
    if not host.capacity:
        return Difference(
            ('homeless', host.uuid),
            f'Host {host.name} no longer exists in Nova but still has '
            f'bookings of leases: {concerned}.',
            'blazar-listener reassigns them to other hosts within seconds, or '
            'sets a condition of their leases; bring the host back, or free '
            'capacity on other hosts')
    return Difference(
        ('overfull', host.uuid),
        f'Host {host.name} has {host.capacity.get(rc, 0)} '
        f'{model.class_in_words(rc)}, but at '
        f'{when(instant)} {host.usage.get(rc, 0) + levels[rc]} are in use or '
        f'reserved; leases: {concerned}.',
        'blazar-listener reassigns bookings that have not started to other '
        'hosts within seconds; for the others, migrate servers off the host, '
        'or let leases end earlier')
