# SPDX-License-Identifier: Apache-2.0

"""Rows that no lease needs.

These are rows of terminated leases, bookings with another window than their
live lease, and builds and trusts that are not needed or cannot be decrypted.
"""

import collections
import contextlib
import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.audit.findings import named
from blazar_core.audit.findings import when
from blazar_core.audit import unfinished
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import lease_status


class Remains:
    """Finds leftovers of leases and bookings."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def differences(self) -> ty.Iterator[Difference]:
        """Yield the leftovers."""
        yield from self._of_the_dead()
        yield from self._unlike()

    def _of_the_dead(self) -> ty.Iterator[Difference]:
        """Yield terminated leases that still have bookings, builds or events.

        Bookings with servers are left to checks that can query the servers.
        """
        parts = {
            'bookings': sa.select(models.Reservation.lease_id).join(
                models.Booking.reservation).where(
                    models.Booking.server_id.is_(None)),
            'a deferred build': sa.select(models.DeferredBuild.lease_id),
            'unfinished events': sa.select(
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
                f'{named(lease_id, name)} is TERMINATED, but still has '
                f'{" and ".join(has)}.', '--fix removes them',
                functools.partial(self._delete_leftovers, lease_id))

    @api.retried
    def _delete_leftovers(self, lease_id: str) -> None:
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
            lease_status.delete_build(session, lease_id)
            for event in lease.events:
                event.enter(states.Event.DONE, self._clock.now())

    def _unlike(self) -> ty.Iterator[Difference]:
        """Yield bookings whose window is not that of their lease. Bookings of
        hosts that were assigned to a started lease may start later.
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
                    # IN_PROGRESS: longer bookings keep other leases off.
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


#: Number of encrypted texts per query; a text can have megabytes.
_BATCH = 100


class EncryptedData:
    """Finds encrypted data that cannot be decrypted or is not needed.

    :param life: the handlers of the engine, by which differences are fixed
    :param decrypt: decrypts a text
    """

    def __init__(self, database: api.Database, life: handlers.Handlers,
                 decrypt: ty.Callable[[str], str]) -> None:
        self._database = database
        self._life = life
        self._decrypt = decrypt

    def differences(self) -> ty.Iterator[Difference]:
        """Yield data that no key decrypts, and trusts of ended leases."""
        for table, what in ((models.DeferredBuild, 'the build of its servers'),
                            (models.Credential, 'the trust of its owner')):
            for row in self._rows(table):
                if row.id is None or row.status == states.Lease.TERMINATED:
                    if table is models.Credential:
                        yield self._unrevoked(row)
                elif None in map(self._decrypted, credentials.all_of(row)):
                    yield Difference(
                        ('encrypted', table.__tablename__, row.lease_id),
                        f'{named(row.id, row.name)}: no key of [blazar] '
                        f'encryption_keys decrypts {what}.',
                        'add the key with which it was encrypted')

    def _unrevoked(self, row: ty.Any) -> Difference:
        return Difference(
            ('unrevoked', row.lease_id),
            f'Lease {row.lease_id} has ended, but the trust of its owner '
            'still exists.', '--fix revokes and removes it',
            functools.partial(self._life.lease_close.revoke_of, row.lease_id))

    def _decrypted(self, encrypted: str) -> str | None:
        try:
            return self._decrypt(encrypted)
        except errors.DecryptionError:
            return None

    def _rows(self, table: type[models.DeferredBuild | models.Credential],
              ) -> ty.Iterator[ty.Any]:
        """Yield the encrypted data that is still needed, with its lease."""
        replaced = (models.Credential.replaced if table is models.Credential
                    else sa.null().label('replaced'))
        query = sa.select(table.lease_id, table.encrypted, replaced,
                          models.Lease.id, models.Lease.name,
                          models.Lease.status).outerjoin(
            models.Lease, models.Lease.id == table.lease_id).where(
                ~sa.exists().where(models.InterruptibleServer.credential_id
                                   == table.lease_id)).order_by(
                                       table.lease_id).limit(_BATCH)
        if table is models.DeferredBuild:
            query = query.where(models.Lease.status.in_(
                states.HOLDING))
        last = ''
        while True:
            with self._database.reader() as session:
                rows = session.execute(query.where(
                    table.lease_id > last)).all()
            if not rows:
                return
            yield from rows
            last = rows[-1].lease_id

    def credentials(self) -> dict[str, tuple[str, str, str]]:
        """Return the decrypted credentials of leases.

        :returns: to each credential the id, name and status of its lease
        """
        return {plain: (row.lease_id, row.name or '',
                        row.status or states.Lease.TERMINATED)
                for row in self._rows(models.Credential)
                if (plain := self._decrypted(row.encrypted)) is not None}
