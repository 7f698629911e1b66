# SPDX-License-Identifier: Apache-2.0

"""Servers within a reservation of whole hosts: which are allowed, and when.

They may have a lease of their own. Its bookings use no capacity, as all of it
is already reserved by the project that has the hosts.
"""

import collections
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models


class Host(ty.NamedTuple):
    """A host that is booked for a reservation.

    :ivar failed: whether it is known to have failed
    """

    name: str
    service_host: str
    failed: bool


def spec(reservation_id: str | None) -> dict[str, str] | None:
    """Return the ``spec`` of a reservation that is created by a boot.

    :param reservation_id: the reservation of hosts for its servers, or None
    """
    return None if reservation_id is None else {'within': reservation_id}


def of(reservation: models.Reservation) -> str | None:
    """Return the reservation of whole hosts that servers of a boot are in."""
    return (reservation.spec or {}).get('within') if (
        reservation.booted) else None


def why_not(session: orm.Session, reservation_id: str, project_id: str,
            window: model.Window | None = None, later: bool = False,
            ) -> str | None:
    """Return why servers of a project may not use a reservation of whole
    hosts.

    Its own project may, and those that it is shared with.

    :param window: the window of the servers' own lease
    :param later: whether the servers will be built later, and not now
    :returns: a sentence; None: they may
    """
    row = session.execute(
        sa.select(models.Reservation.params, models.Lease.project_id,
                  models.Lease.status, models.Lease.name,
                  models.Lease.start_date, models.Lease.end_date,
                  models.Reservation.status.label('of_it'))
        .join(models.Lease)
        .where(models.Reservation.id == reservation_id)).one_or_none()
    if row is None or row.of_it == states.Reservation.DELETED or (
            project_id != row.project_id and
            project_id not in (row.params or {}).get('projects', ())):
        return (f'Your project cannot use reservation {reservation_id}.')
    whose = (f'Reservation {reservation_id} belongs to lease {row.name}, '
             f'which is {row.status}')
    time = (f'{clocks.minute(row.start_date)} to '
            f'{clocks.minute(row.end_date)} UTC')
    if window is not None and not (
            row.start_date <= window.start and window.end <= row.end_date):
        return (f'{whose} and lasts from {time}: choose a start and an end '
                f'within that.')
    if later and row.status in (states.Lease.PENDING, states.Lease.STARTING):
        return None
    if row.status in states.ENDING:
        return f'{whose}: it has ended. Create another lease.'
    if row.status != states.Lease.ACTIVE:
        return (f'{whose}: boot with it from {time}, when the lease is '
                f'ACTIVE.')
    return None


def why_not_of(session: orm.Session, lease: models.Lease,
               window: model.Window | None = None, later: bool = False) -> str:
    """Return why the servers of a lease may not be on hosts of other leases:
    see :func:`why_not`; empty: they may.
    """
    return next(filter(None, (
        why_not(session, outer, lease.project_id, window, later)
        for one in lease.reservations if (outer := of(one)) is not None)), '')


def check(session: orm.Session, lease: models.Lease, window: model.Window,
          ) -> None:
    """Check that a lease may have another window; it can always be shortened.

    :raises InvalidLeaseParams: if servers would be on the hosts of another
        lease outside of its window
    """
    if lease.start_date <= window.start and window.end <= lease.end_date:
        return
    if why := why_not_of(session, lease, window, later=True):
        raise errors.InvalidLeaseParams(why)


def hosts(session: orm.Session, reservation_id: str) -> frozenset[str]:
    """Return the uuids of the hosts that are booked for a reservation, without
    failed ones unless all have failed.
    """
    rows = session.execute(_HOSTS.add_columns(models.Host.uuid).join(
        models.Host, models.Host.id == models.Booking.host_id).where(
            models.Booking.reservation_id == reservation_id)).all()
    return frozenset(row.uuid for row in rows if not row.failed) or (
        frozenset(row.uuid for row in rows))


def booked(session: orm.Session, reservation_ids: ty.Collection[str],
           ) -> dict[str, list[Host]]:
    """Return the hosts that are booked for reservations, sorted by name."""
    found: dict[str, list[Host]] = {}
    for row in session.execute(_HOSTS.add_columns(
            models.Host.name, models.Host.service_host).join(
            models.Host, models.Host.id == models.Booking.host_id).where(
                models.Booking.reservation_id.in_(reservation_ids)).order_by(
                    models.Host.name)):
        found.setdefault(row.reservation_id, []).append(
            Host(row.name, row.service_host, row.failed))
    return found


def astray(connection: sa.Connection) -> frozenset[int]:
    """Return the bookings of unbuilt servers within a reservation of hosts
    that are not on a working host of that reservation, although it has one.

    Costs one SELECT over all deferred builds, and another if some of them are
    within leased hosts.
    """
    # Two statements, as no database finds the reservations by an id in JSON.
    rows = [row for row in connection.execute(
        _LATER) if row.spec.get('within')]
    if not rows:
        return frozenset()
    sound: dict[str, set[int]] = collections.defaultdict(set)
    hosts_of = {row.spec['within'] for row in rows}
    for one in connection.execute(_HOSTS.where(
            models.Booking.reservation_id.in_(hosts_of))):
        if not one.failed:
            sound[one.reservation_id].add(one.host_id)
    return frozenset(row.id for row in rows if row.host_id not in sound.get(
        row.spec['within'], {row.host_id}))


#: Hosts of reservations.
_HOSTS = sa.select(
    models.Booking.reservation_id, models.Booking.host_id,
    outages.has_failed(models.Booking.host_id).label('failed')).where(
        models.Booking.host_id.is_not(None))
#: Bookings of deferred builds, with the ``spec`` of their reservation.
_LATER = sa.select(
    models.Booking.id, models.Booking.host_id,
    models.Reservation.spec.label('spec'),
).join(models.Booking.reservation).join(
    models.DeferredBuild,
    models.DeferredBuild.lease_id == models.Reservation.lease_id).where(
        models.Reservation.params.is_(None),
        models.Reservation.spec.is_not(None),
        models.Booking.host_id.is_not(None))
