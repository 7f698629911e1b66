# SPDX-License-Identifier: Apache-2.0

"""Remains: what is in the books and belongs to nothing any more."""

import collections
import contextlib
import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.books import ledger
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle.audit.differences import Difference
from blazar_core.lifecycle.audit.differences import named
from blazar_core.lifecycle.audit.differences import when
from blazar_core.lifecycle.audit import unfinished

__all__ = ['Remains']


class Remains:
    """Looks at what leases and bookings have left behind."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def differences(self) -> ty.Iterator[Difference]:
        """What has no business there."""
        yield from self._of_the_dead()
        yield from self._unlike()
        yield from self._without_lease()

    def _of_the_dead(self) -> ty.Iterator[Difference]:
        """Leases that are over have nothing but their record.

        Bookings with servers are left to checks that can ask for the servers.
        """
        parts = {
            'bookings': sa.select(models.Reservation.lease_id).join(
                models.Booking.reservation).where(
                    models.Booking.server_id.is_(None)),
            'a held build': sa.select(models.HeldBuild.lease_id),
            'events that are not done': sa.select(
                models.Event.lease_id).where(unfinished.OPEN),
        }
        left: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        with self._database.reader() as session:
            for what, query in parts.items():
                for row in session.execute(
                        sa.select(models.Lease.id, models.Lease.name).where(
                            models.Lease.status == states.Lease.TERMINATED,
                            models.Lease.id.in_(query))):
                    left[row.id, row.name].append(what)
        for (lease_id, name), has in left.items():
            yield Difference(
                ('dead', lease_id, *has),
                f'{named(lease_id, name)} is TERMINATED, and still has '
                f'{" and ".join(has)}.', '--fix removes them',
                functools.partial(
                    self._database.retried, self._bury, lease_id))

    def _bury(self, lease_id: str) -> None:
        with contextlib.suppress(errors.NotFound), (
                self._database.writer()) as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.TERMINATED:
                return
            ledger.amend(session, self._clock.now(), [
                ledger.Edit(booking, None)
                for reservation in lease.reservations
                for booking in reservation.bookings
                if booking.server_id is None])
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            for event in lease.events:
                event.enter(states.Event.DONE, self._clock.now())

    def _unlike(self) -> ty.Iterator[Difference]:
        """Bookings that take room are over the window of their lease; those
        of hosts that a lease got when it had begun are since then.
        """
        later = sa.and_(
            models.Booking.server_id.is_(None),
            models.Booking.start_date > models.Lease.start_date,
            models.Booking.start_date <= self._clock.now(),
            sa.exists().where(
                models.Host.id == models.Booking.host_id,
                models.Host.assigned_to == models.Booking.reservation_id))
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Booking.id, models.Booking.server_id,
                          models.Booking.start_date, models.Booking.end_date,
                          models.Lease.id.label('lease_id'),
                          models.Lease.name,
                          models.Lease.start_date.label('start'),
                          models.Lease.end_date.label('end'))
                .join(models.Booking.reservation)
                .join(models.Reservation.lease)
                .where(
                    # Where room is made others are kept off for longer.
                    models.Lease.status.not_in((
                        states.Lease.IN_PROGRESS, states.Lease.TERMINATED)),
                    models.Booking.host_id.is_not(None),
                    sa.or_(
                        sa.and_(models.Booking.start_date !=
                                models.Lease.start_date, ~later),
                        models.Booking.end_date != (
                            models.Lease.end_date +
                            models.Lease.grace_period +
                            models.Lease.cleaning_time)))).all()
        for row in found:
            yield Difference(
                ('unlike', row.id, row.start_date, row.end_date),
                f'{named(row.lease_id, row.name)} is from {when(row.start)} '
                f'to {when(row.end)}, but server {row.server_id} is booked '
                f'from {when(row.start_date)} to {when(row.end_date)}.',
                'end the lease and book again')

    def _without_lease(self) -> ty.Iterator[Difference]:
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Booking.id, models.Booking.server_id,
                          models.Booking.start_date, models.Booking.end_date)
                .outerjoin(models.Booking.reservation)
                .outerjoin(models.Reservation.lease)
                .where(models.Lease.id.is_(None),
                       models.Booking.outage.is_(None))).all()
        for row in found:
            yield Difference(
                ('no lease', row.id),
                f'Booking {row.id} of server {row.server_id} from '
                f'{when(row.start_date)} to {when(row.end_date)} belongs to '
                f'no lease.', '--fix removes it', functools.partial(
                    self._database.retried, self._drop, row.id))

    def _drop(self, booking_id: int) -> None:
        with self._database.writer() as session:
            row = session.scalars(
                sa.select(models.Booking).outerjoin(models.Booking.reservation)
                .outerjoin(models.Reservation.lease).where(
                    models.Booking.id == booking_id,
                    models.Lease.id.is_(None),
                    models.Booking.outage.is_(None))).one_or_none()
            if row is not None:
                ledger.amend(session, self._clock.now(),
                             [ledger.Edit(row, None)])
