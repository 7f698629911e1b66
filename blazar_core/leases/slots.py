# SPDX-License-Identifier: Apache-2.0

"""Slots of a reservation, which servers take when they are built.

A lease is used once servers have been admitted to one of its reservations, and
is never a no-show after that. A lease that was created by a boot is used from
the beginning.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views

_DISPATCH = sa.delete(models.SlotBuild.__table__).where(
    models.SlotBuild.__table__.c.server_id == sa.bindparam('server'))


class Slots:
    """Assigns slots of reservations to servers."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    @api.retried
    def take(self, reservation_id: str, project_id: str,
             server_ids: ty.Sequence[str],
             encrypted: str | None = None) -> bool:
        """Assign slots of a reservation to servers that are about to be built.

        The servers are built by one call, so their hosts are of one kind.

        :param encrypted: the encrypted call, stored until :meth:`take_permit`
        :returns: whether these hosts serve leases only
        :raises NotFound: if it is not a reservation of the project
        :raises Conflict: if its lease is not ACTIVE
        :raises ReservationFull: if too few slots are free
        """
        lease_id = self._lease_of(reservation_id, project_id)
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            _check_owner(lease, reservation_id, project_id)
            if lease.status != states.Lease.ACTIVE or lease.end_date <= now:
                raise errors.Conflict(
                    f'Reservation {reservation_id} belongs to lease '
                    f'{lease.name} ({lease.id}), which is '
                    f'{views.status(lease)}: boot with it from '
                    f'{clocks.minute(lease.start_date)} to '
                    f'{clocks.minute(lease.end_date)} UTC, when the lease is '
                    f'ACTIVE.')
            (rows,) = [one.bookings for one in lease.reservations
                       if one.id == reservation_id]
            free = [row for row in rows if row.server_id is None]
            if len(free) < len(server_ids):
                raise errors.ReservationFull(
                    _full(reservation_id, len(rows), len(free)), len(free),
                    lease.end_date)
            record_first_use(lease, now)
            apart = _take(session, now, free, server_ids, lease.end_date)
            if encrypted is not None:
                session.add(models.SlotBuild(
                    server_id=server_ids[0], apart=apart, encrypted=encrypted,
                    created_at=now))
            return apart

    @api.retried
    def take_permit(self, server_id: str) -> bool:
        """Take the permit to send the build of servers that have slots.

        :param server_id: the first of them
        :returns: False: another process has it
        :raises OutcomeUnknown: if it is unknown which process has it
        """
        with self._database.begin() as connection:
            return bool(connection.execute(
                _DISPATCH, {'server': server_id}).rowcount)

    def use(self, reservation_id: str) -> bool:
        """Record the use of a lease by servers on its hosts without slots.

        :returns: whether this is the first use. Then the caller has to check
            again whether the servers are allowed
        """
        with self._database.reader() as session:
            lease_id = session.scalar(
                sa.select(models.Lease.id).join(models.Lease.reservations)
                .where(models.Reservation.id == reservation_id,
                       models.Lease.used_at.is_(None)))
        if lease_id is not None:
            self._database.retried(self._use, lease_id)
        return lease_id is not None

    def _use(self, lease_id: str) -> None:
        with self._database.writer() as session:
            record_first_use(api.locked(session, lease_id), self._clock.now())

    def _lease_of(self, reservation_id: str, project_id: str) -> str:
        """Return the lease of a project's reservation."""
        with self._database.reader() as session:
            lease_id = session.scalar(
                sa.select(models.Lease.id).join(models.Lease.reservations)
                .where(models.Reservation.id == reservation_id,
                       models.Lease.project_id == project_id))
        if lease_id is None:
            raise _none(reservation_id)
        return lease_id

    @api.retried
    def free(self, server_ids: ty.Collection[str]) -> None:
        """Undo :meth:`take` for servers that will not be built."""
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Booking)
                .where(models.Booking.server_id.in_(server_ids))
                .values(server_id=None, dispatched_at=None, claimed_at=None))


def _check_owner(lease: models.Lease, reservation_id: str, project_id: str,
                 ) -> None:
    """Check that a lease was not transferred before it was locked.

    :raises NotFound: if it was
    """
    if lease.project_id != project_id:
        raise _none(reservation_id)


def _none(reservation_id: str) -> errors.NotFound:
    return errors.NotFound(
        f'Reservation {reservation_id} could not be found.')


def _take(session: orm.Session, now: int, free: ty.Sequence[models.Booking],
          server_ids: ty.Sequence[str], until: int) -> bool:
    """Assign slots on hosts of one kind to servers, if possible on hosts that
    are not enrolled.

    :param until: the end of their lease
    :returns: whether the hosts serve leases only
    :raises ReservationFull: if there are too few of one kind
    """
    enrolled = set(session.scalars(sa.select(models.Host.id).where(
        models.Host.id.in_({row.host_id for row in free}),
        models.Host.enrollment.is_not(None))))
    kinds = {kind: [row for row in free if (row.host_id in enrolled) is kind]
             for kind in (False, True)}
    for kind, those in kinds.items():
        if len(those) >= len(server_ids):
            for row, server_id in zip(those, server_ids):
                row.server_id, row.dispatched_at = server_id, now
            return kind
    most = max(map(len, kinds.values()))
    raise errors.ReservationFull(
        f'Reservation {free[0].reservation_id} has '
        f'{words.count(len(free), "free slot")}, {len(kinds[True])} of them '
        'on hosts that serve leases only. Servers of one request must be on '
        f'hosts of the same kind: boot at most {most} at once.', most, until)


def _full(reservation_id: str, slots: int, free: int) -> str:
    """Return why servers cannot be booted into a reservation."""
    which = f'of reservation {reservation_id}'
    if not free:
        whole = 'The slot' if slots == 1 else f'All {slots} slots'
        return (f'{whole} {which} {"is" if slots == 1 else "are"} in use. '
                f'Delete a server or raise the amount.')
    taken = slots - free
    return (f'{taken} of the {slots} slots {which} '
            f'{"is" if taken == 1 else "are"} in use. Boot at most '
            f'{words.count(free, "server")}, delete some, or raise the '
            f'amount.')


def unused_condition(until: int) -> conditions.Condition:
    """Return the condition of an unused lease that will be ended soon."""
    return conditions.Condition(
        conditions.Type.UNUSED, conditions.Reason.NO_SERVER_BOOTED,
        f'It is unused: it ends at {clocks.minute(until)} UTC, unless a '
        'server is booted into one of its reservations before.',
        {'end_date': until})


def record_first_use(lease: models.Lease, now: int) -> None:
    """Record that a lease is used; it must be locked."""
    if lease.used_at is None:
        lease.used_at, lease.no_show_at = now, None
        conditions.update(lease, now, conditions.Type.UNUSED)
