# SPDX-License-Identifier: Apache-2.0

"""Servers within leases of whole hosts that have no bookings of their own.

They are the cloud's, not the books': where one is is asked of the type of the
reservation. Where a host of the lease has failed and the lease has others,
they leave it for those, and for no host beside them.
"""

import typing as ty

import sqlalchemy as sa

from blazar_core.books import outages
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.leases import within
from blazar_core import resources

__all__ = ['Lodgers', 'Lodging', 'lodgings']


class Lodging(ty.NamedTuple):
    """The servers that a host which has failed has of a lease of hosts.

    :ivar server_ids: those that have no bookings
    :ivar hosts: the uuids of the other hosts of their reservation
    """

    server_ids: list[str]
    hosts: frozenset[str]


class Lodgers:
    """Finds them."""

    def __init__(self, database: api.Database, types: resources.Types,
                 ) -> None:
        self._database = database
        self._types = types

    @property
    def types(self) -> list[str]:
        """The names of the types that have such servers."""
        return [name for name, kind in self._types.named.items()
                if kind.has_hosts]

    def on(self, booking_id: int, source: str) -> Lodging | None:
        """Those on a host, as far as is known without a look at each.

        :param booking_id: of the host, for their lease
        :param source: the uuid of the host
        :returns: None when it is not the lease's any more
        :raises CloudUnavailable: when that cannot be said now
        """
        with self._database.reader() as session:
            booking = session.get(models.Booking, booking_id)
            if booking is None:
                return None
            reservation = booking.reservation
            kind = self._types.of_row(reservation)
            reserved = resources.reserved(session, reservation)
            hosts = within.hosts(session, reservation.id) - {source}
        there = set(kind.guests(reserved, source))
        with self._database.reader() as session:
            there -= set(session.scalars(sa.select(
                models.Booking.server_id).where(
                    models.Booking.server_id.in_(there))))
        return Lodging(sorted(there), hosts)


_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_SOUND = models.Booking.__table__.alias('sound')


def lodgings(*columns: ty.Any) -> sa.Select[ty.Any]:
    """The bookings of hosts that have failed, for leases that have begun and
    have other hosts; of :attr:`Lodgers.types`, as the parameter ``types``.

    :param columns: what is wanted of them, their host and their lease
    """
    return sa.select(*columns).select_from(notes.Outage).join(
        models.Booking, _BOOKING.host_id == notes.Outage.host_id).join(
        models.Host, models.Host.id == notes.Outage.host_id).join(
        models.Reservation,
        models.Reservation.id == _BOOKING.reservation_id).join(
        models.Lease, _LEASE.id == models.Reservation.lease_id).where(
            notes.Outage.kind == outages.FAILURE,
            notes.Outage.began_at.is_not(None),
            _BOOKING.server_id.is_(None),
            _BOOKING.start_date <= sa.bindparam('now'),
            _BOOKING.end_date > sa.bindparam('now'),
            models.Reservation.resource_type.in_(
                sa.bindparam('types', expanding=True)),
            _LEASE.status == states.Lease.ACTIVE,
            _LEASE.deleted_at.is_(None),
            # One that it got instead, too.
            sa.exists().where(
                _SOUND.c.reservation_id == _BOOKING.reservation_id,
                _SOUND.c.host_id.is_not(None),
                _SOUND.c.start_date <= sa.bindparam('now'),
                ~outages.has_failed(_SOUND.c.host_id)))
