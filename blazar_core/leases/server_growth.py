# SPDX-License-Identifier: Apache-2.0
"""Growth of servers beyond their bookings.

A resize within a lease, a resize that is reverted, and a server that was
resized in an occurrence before make a booking larger. They are within the
limits like a lease that asks for more servers.

The booking follows when the cloud reports the server. Until then it counts by
the claim that was made when it was let grow (:func:`usage.growing`).
"""

import dataclasses
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import limits

__all__ = ['ServerGrowth', 'Revert', 'asked_of', 'booked', 'revert']

_LEASES = models.Lease.__table__


@dataclasses.dataclass(frozen=True, slots=True)
class Revert:
    """A resize that is about to be reverted.

    :ivar takes: what the server takes then
    :ivar service_host: where it was before, and ``node`` of that
    :ivar kept_as: the consumer that has its capacity there until then
    """

    takes: model.Resources
    service_host: str
    node: str
    kept_as: str


def asked_of(lease: ty.Any, booked: model.Resources, takes: model.Resources,
             ) -> limits.Asked | None:
    """Return what the limits are asked about a server that grows.

    :param lease: a row
    :param booked: what is booked for the server
    :param takes: what it is to take
    :returns: None: it does not grow
    """
    more = {rc: amount - booked.get(rc, 0) for rc, amount in takes.items()
            if amount > booked.get(rc, 0)}
    return limits.Asked(
        lease.project_id, lease.user_id, model.Window(
            lease.start_date, lease.end_date + lease.grace_period),
        servers=0, resources=more, lease_id=lease.id, added=True,
        held=False) if more else None


def booked(database: api.Database, server_id: str,
           ) -> tuple[models.Lease, model.Resources] | None:
    """Return the lease of a server that was made with its servers, and what
    is booked for this one; None: it has none.
    """
    with database.reader() as session:
        row = session.execute(sa.select(models.Lease, models.Booking).join(
            models.Reservation, models.Reservation.lease_id == models.Lease.id,
        ).join(models.Booking).where(
            models.Booking.server_id == server_id,
            models.Reservation.params.is_(None))).first()
        return None if row is None else (row[0], dict(row[1].resources))


def revert(database: api.Database, clock: clocks.Clock,
           granted: limits.Granted, lease_id: str, server_id: str,
           wanted: Revert) -> None:
    """Have a server count as what it is when its resize is reverted.

    :param granted: it is within the limits, as far as was known
    :raises LimitExceeded: when others have taken what it needs
    :raises Conflict: when its lease has become another one
    :raises NotFound: when its lease is gone
    """
    def attempt() -> None:
        with database.writer() as session:
            granted.lock(session.connection())
            api.locked(session, lease_id)
            granted.confirm(session.connection())
            host_id = session.scalar(sa.select(models.Host.id).where(
                models.Host.service_host == wanted.service_host,
                models.Host.name == wanted.node))
            moved = session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == server_id).values(
                    migrating_to=host_id))
            if host_id is not None and ty.cast(
                    'sa.CursorResult[ty.Any]', moved).rowcount:
                inventory.come_back(
                    session.connection(), clock.now(), host_id, server_id,
                    wanted.takes, wanted.kept_as)

    database.retried(attempt)


class ServerGrowth:
    """Keeps servers that grow within the limits of their projects, in the
    transaction that lets them grow.
    """

    def __init__(self, allowed: limits.Limits) -> None:
        self._limits = allowed

    def lock(self, connection: sa.Connection, project_id: str) -> None:
        """Lock a project, as every transaction that counts what it has."""
        limits.lock(connection, project_id)

    def check(self, connection: sa.Connection, lease_id: str,
              server_id: str, booked: model.Resources,
              takes: model.Resources) -> None:
        """Make sure that a server may grow; with its project locked.

        :raises LimitExceeded: when it may not
        """
        lease = connection.execute(sa.select(_LEASES).where(
            _LEASES.c.id == lease_id)).one()
        asked = asked_of(lease, booked, takes)
        if asked is not None:
            self._limits.confirm(connection, dataclasses.replace(
                asked, server_ids=(server_id,)))
