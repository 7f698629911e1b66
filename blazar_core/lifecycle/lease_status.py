# SPDX-License-Identifier: Apache-2.0

"""The status of a lease.

That of a boot's lease is computed from its bookings (:func:`update_status`).
Other statuses are entered where their cause is: a new lease has its first one
from ``new_leases``, ``creation`` or ``members``, or is imported; others are
entered in ``budget_commits``, ``admission_queue``, ``lease_start`` and
``dispatch``, ``kept_servers``, ``no_show_check``, ``lease_end``, and here in
:func:`fail_waiting` and :func:`finish`. ``states.LEASE`` has the transitions.
Leases are changed within a transaction that has locked them.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import views

LOG = logging.getLogger(__name__)
_OF_SERVER = sa.select(models.Booking).where(
    models.Booking.server_id == sa.bindparam('server'))
_HAS_SERVERS = sa.select(sa.exists().where(
    models.Reservation.lease_id == sa.bindparam('lease'),
    models.Booking.reservation_id == models.Reservation.id,
    models.Booking.server_id.is_not(None)))
_B = models.Booking


def _sum(*of: ty.Any) -> ty.Any:
    return sa.func.sum(sa.case((sa.and_(*of), 1), else_=0))


_COUNTS = sa.select(
    _B.reservation_id,
    _sum(_B.failed_at.is_(None), _B.running.is_(False)),
    _sum(_B.running.is_(True)), _sum(_B.failed_at.is_not(None)),
).join(_B.reservation).where(
    models.Reservation.lease_id == sa.bindparam('lease'),
).group_by(_B.reservation_id)


def comes_first(lease: models.Lease) -> bool:
    """Return whether a lease was created before its servers, not by a boot."""
    return any(not one.booted for one in lease.reservations)


def waiting(lease: models.Lease) -> list[str]:
    """Return the servers of a lease whose build has not been sent."""
    return [booking.server_id for booking in lease.bookings
            if booking.server_id is not None and
            booking.dispatched_at is None and booking.failed_at is None]


def is_building(lease: models.Lease) -> bool:
    """Return whether some of the servers that were sent are being built."""
    return any(booking.failed_at is None and not booking.running and
               booking.dispatched_at is not None for booking in lease.bookings)


class Count(ty.NamedTuple):
    """The number of bookings of servers that are still to be sent or are being
    built, that run, and that have failed.
    """

    unsettled: int
    running: int
    failed: int


def server_counts(session: orm.Session, lease_id: str) -> dict[str, Count]:
    """Count the bookings of a lease by reservation, in one statement;
    reservations without bookings are left out.
    """
    return {row[0]: Count(*map(int, row[1:])) for row in (
        session.connection().execute(_COUNTS, {'lease': lease_id}))}


def servers(lease: models.Lease) -> list[str]:
    """Return the servers of a lease that have a booking."""
    return [booking.server_id for booking in lease.bookings
            if booking.server_id is not None]


def has_servers(session: orm.Session, lease_id: str) -> bool:
    """Return whether :func:`servers` has any, in one statement."""
    return bool(session.scalar(_HAS_SERVERS, {'lease': lease_id}))


def booking_of(session: orm.Session, server_id: str,
               ) -> models.Booking | None:
    """Return the booking of a server, if it has one."""
    return session.scalars(_OF_SERVER, {'server': server_id}).one_or_none()


def update_status(session: orm.Session, lease: models.Lease, now: int) -> None:
    """Update the status of a lease that was created by a boot and has started.

    It follows from the bookings: while a server is still to be sent or is
    being built, the lease is STARTING; after that, it is ACTIVE if any server
    runs, else ERROR. The stored call is deleted then.

    Everything in the session is written and then expired, so that bookings
    which changed in the database are read again.
    """
    session.flush()
    session.expire_all()
    if lease.status not in states.BEGUN or comes_first(lease):
        return
    # Counted, not read: each of many servers settles separately.
    counts = server_counts(session, lease.id)
    for reservation in lease.reservations:
        count = counts.get(reservation.id)
        if counts and reservation.status == states.Reservation.PENDING and (
                count is None or not count.unsettled):
            reservation.enter(
                states.Reservation.ACTIVE if count and count.running
                else states.Reservation.ERROR, now)
    if not counts or any(count.unsettled for count in counts.values()):
        return
    status = states.Lease.ACTIVE if any(
        count.running for count in counts.values()) else states.Lease.ERROR
    if lease.status != status:
        lease.enter(status, now)
        LOG.info('Lease %s is %s', lease.id, status)
    conditions.update(lease, now, conditions.Type.START_DELAYED)
    if not any(count.failed for count in counts.values()):
        # The servers that failed are deleted.
        conditions.update(lease, now, conditions.Type.BUILD_FAILED,
                          conditions.Type.FAILED)
    delete_build(session, lease.id)


def delete_build(session: orm.Session, lease_id: str) -> None:
    """Delete the deferred build of a lease, if there is one."""
    session.execute(sa.delete(models.DeferredBuild).where(
        models.DeferredBuild.lease_id == lease_id))


def finish(session: orm.Session, lease: models.Lease, now: int,
           ) -> views.Lease:
    """End a lease; only its record is left.

    A lease that ends before its end date, as its servers were deleted or
    removed, gets the condition EndedEarly.
    """
    is_pending = lease.status == states.Lease.PENDING
    # One that is ending was deleted, or another clock is slightly ahead.
    if now < lease.end_date and lease.status not in (
            states.Lease.OFFERED, states.Lease.TERMINATING) and (
            conditions.find(lease.conditions, conditions.Type.ENDED_EARLY)
            is None):
        conditions.update(lease, now, conditions.Condition(
            conditions.Type.ENDED_EARLY, conditions.Reason.SERVERS_DELETED,
            'Its servers were deleted or removed before its '
            f'{"start" if is_pending else "end"}. It was to end at '
            f'{clocks.minute(lease.end_date)} UTC.',
            {'end_date': lease.end_date}))
    _unassign_hosts(session, lease.reservations, now)
    ledger.amend(session, now, [
        ledger.Edit(booking, None) for booking in lease.bookings])
    lease.enter(states.Lease.TERMINATED, now)
    conditions.update(lease, now, *conditions.TRANSIENT)
    for reservation in lease.reservations:
        reservation.enter(states.Reservation.DELETED, now)
    _cut_short(session, lease, now)
    for event in lease.events:
        _end_event(event, min(now, lease.end_date), now)
    delete_build(session, lease.id)
    session.flush()
    return views.describe(lease)


def _cut_short(session: orm.Session, lease: models.Lease, now: int) -> None:
    """Correct the record of a lease that ends early, and delete events that
    have not come. A lease that had not started ends at its start.
    """
    if now >= lease.end_date:
        return
    lease.end_date = max(now, lease.start_date)
    if (lease.before_end_date or 0) > now:
        lease.before_end_date = None
    for event in lease.events:
        if event.event_type == states.EventType.END:
            event.time = now
        elif event.status in states.OPEN and event.time > now:
            session.delete(event)
    session.flush()
    session.expire(lease, ['events'])


def _end_event(event: models.Event, end: int, now: int) -> None:
    """Close an event of a lease that is over; a refund becomes due.

    A charge in progress is carried out: it may arrive after the refund, which
    is then repeated.
    """
    if event.event_type == states.EventType.REFUND:
        event.enter(states.Event.UNDONE, now)
        event.run_at = now
    elif event.event_type != states.EventType.CHARGE or (
            event.status != states.Event.IN_PROGRESS):
        event.enter(_last_state(event, end), now)


def _last_state(event: models.Event, end: int) -> states.Event:
    """Return the final status of an event of a lease that is over: an action
    before the end that could not be carried out is given up.
    """
    if event.action is not None and (
            event.status == states.Event.ERROR or
            event.status in states.OPEN and event.time <= end):
        return states.Event.ERROR
    return states.Event.DONE


def free_capacity(session: orm.Session,
                  bookings: ty.Iterable[models.Booking], now: int) -> None:
    """Free the capacity of bookings; their rows stay, by which servers belong
    to their lease.
    """
    bookings = list(bookings)
    _unassign_hosts(
        session, {booking.reservation for booking in bookings}, now)
    ledger.amend(session, now, [
        ledger.Edit(booking, ledger.new_of(
            booking, host_id=None, claimed_at=None))
        for booking in bookings])


def free_hosts(session: orm.Session, lease: models.Lease,
               reservation_ids: ty.Collection[str], now: int) -> None:
    """Free the whole hosts of reservations of a lease whose end continues."""
    vacated = [one for one in lease.reservations
               if one.whole and one.id in reservation_ids]
    _unassign_hosts(session, vacated, now)
    ledger.amend(session, now, [
        ledger.Edit(booking, None)
        for one in vacated for booking in one.bookings])


def _unassign_hosts(session: orm.Session,
                    reservations: ty.Iterable[models.Reservation], now: int,
                    ) -> None:
    """Unassign the hosts of reservations of whole hosts."""
    whole = [one.id for one in reservations if one.whole]
    if whole:
        assignments.unassign(session, now, whole)


def fail_waiting(session: orm.Session, lease: models.Lease, now: int,
                 ) -> None:
    """Fail the servers of a lease that were not sent yet."""
    if lease.status in (*states.SEEKING, states.Lease.PENDING) or (
            comes_first(lease)):
        lease.enter(states.Lease.TIMEDOUT if (
            lease.status == states.Lease.IN_PROGRESS
        ) else states.Lease.ERROR, now)
        for reservation in lease.reservations:
            reservation.enter(states.Reservation.ERROR, now)
    unsent = [row for row in lease.bookings if row.dispatched_at is None]
    for row in unsent:
        row.failed_at = now
    free_capacity(session, unsent, now)
    delete_build(session, lease.id)
    update_status(session, lease, now)


def follow(session: orm.Session, lease: models.Lease, booking: models.Booking,
           host: str | None, now: int) -> list[str]:
    """Move a booking to the host of its server, even if that overbooks it.

    Nova decides where a server is: the rule is not checked.

    :returns: the service hosts of both hosts; empty: it has not moved
    """
    hosts = {row.id: row for row in session.scalars(
        sa.select(models.Host).where(sa.or_(
            models.Host.uuid == host,
            models.Host.id == booking.host_id)))}
    new = [row for row in hosts.values() if row.uuid == host]
    if not new or new[0].id == booking.host_id:
        return []
    LOG.info('Lease %s: server %s is on host %s; updating its booking',
             lease.id, booking.server_id, new[0].name)
    left = booking.host_id
    ledger.amend(session, now, ledger.follow(
        booking, new[0].id, left is None or not outages.on_host(
            session.connection(), left, now)), force=True)
    booking.migrating_to = None
    if left and (booking.reservation.params or {}).get('affinity'):
        _bring_along(session, booking, left, now)
    return [row.service_host for row in hosts.values()]


def _bring_along(session: orm.Session, booking: models.Booking, left: int,
                 now: int) -> None:
    """Move the free slots along when the last of several servers with affinity
    leaves a host, as far as there is capacity.
    """
    places = [one for one in booking.reservation.bookings
              if one.host_id == left]
    if any(one.claimed_at is not None for one in places):
        return
    try:
        for place in places:
            # So that the previous move is counted.
            session.flush()
            ledger.amend(session, now, [ledger.Edit(
                place, ledger.new_of(place, host_id=booking.host_id))])
    except ledger.OverCapacity:
        LOG.warning('Reservation %s: server %s has moved, and its host has no '
                    'capacity for all slots with affinity to it',
                    booking.reservation_id, booking.server_id)
