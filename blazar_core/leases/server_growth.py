# SPDX-License-Identifier: Apache-2.0
"""Growth of servers beyond their bookings.

A booking grows by a resize within a lease, by a resize that is reverted, and
for a server that was resized in a previous occurrence. Limits apply as to a
lease that requests more servers.

The booking is updated when the cloud reports the server. Until then the growth
is counted by the claim that was made for it (:func:`usage.growing`).
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

_LEASES = models.Lease.__table__


@dataclasses.dataclass(frozen=True, slots=True)
class Revert:
    """A resize that is about to be reverted.

    :ivar takes: the resources of the server after that
    :ivar service_host: its previous service host, and ``node`` its host
    :ivar kept_as: the consumer that holds its capacity there until then
    """

    takes: model.Resources
    service_host: str
    node: str
    kept_as: str


def asked_of(lease: ty.Any, booked: model.Resources, takes: model.Resources,
             ) -> limits.Asked | None:
    """Return the request to the limits for a server that grows.

    :param lease: a row
    :param booked: the resources of its booking
    :param takes: its future resources
    :returns: None: it does not grow
    """
    more = {rc: amount - booked.get(rc, 0)
            for rc, amount in model.plain(takes).items()
            if amount > booked.get(rc, 0)}
    return limits.Asked(
        lease.project_id, lease.user_id, model.Window(
            lease.start_date, lease.end_date + lease.grace_period),
        servers=0, resources=more, lease_id=lease.id, added=True,
        held=False) if more else None


def booked(database: api.Database, server_id: str,
           ) -> tuple[models.Lease, model.Resources] | None:
    """Return the lease that was created with its servers and includes this
    one, and the resources of its booking; None: there is none.
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
    """Record that the resize of a server is being reverted.

    :param granted: the result of the limits
    :raises LimitExceeded: if concurrent leases have used up the limit
    :raises Conflict: if its lease has changed
    :raises NotFound: if its lease does not exist
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


def check(allowed: limits.Limits, connection: sa.Connection, lease_id: str,
          server_id: str, booked: model.Resources, takes: model.Resources,
          ) -> None:
    """Check that a server may grow, in the transaction that records it; its
    project must be locked.

    :raises LimitExceeded: if it may not
    """
    lease = connection.execute(sa.select(_LEASES).where(
        _LEASES.c.id == lease_id)).one()
    asked = asked_of(lease, booked, takes)
    if asked is not None:
        allowed.confirm(connection, dataclasses.replace(
            asked, server_ids=(server_id,)))
