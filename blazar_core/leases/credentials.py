# SPDX-License-Identifier: Apache-2.0

"""Credentials for acting for the owners of leases, encrypted."""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import resource_types

#: Maximum number of replaced credentials per lease. Each was current when
#: builds were sent, and tokens of the oldest have expired.
_MOST_REPLACED = 8
#: The number of texts between two lines of progress, and the most that are
#: named in a message.
_STEP, _NAMED = 1000, 5


class Credentials:
    """Stores the credentials by which we act for the owners of leases."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    @api.retried
    def store(self, lease_id: str, encrypted: str) -> list[str]:
        """Store the credential of the owner of a lease.

        :param encrypted: the encrypted credential
        :returns: replaced credentials that are not in use, encrypted, to be
            revoked now. Those that may be in use are revoked with the lease
        :raises NotFound: if the lease was purged
        """
        with self._database.writer() as session:
            return self.put(session, api.locked(session, lease_id), encrypted)

    def put(self, session: orm.Session, lease: models.Lease, encrypted: str,
            ) -> list[str]:
        """Store a credential like :meth:`store` for a locked lease."""
        row = session.get(models.Credential, lease.id)
        if row is None:
            session.add(models.Credential(
                lease_id=lease.id, encrypted=encrypted,
                created_at=self._clock.now()))
            return []
        before, row.encrypted = row.encrypted, encrypted
        sent = session.scalar(_LAST_SENT, {'lease': lease.id}) or 0
        # A build is sent with the credential that its lease has at that
        # moment. A credential is unused if no build was sent since it was
        # stored, which is so for all before the start.
        if lease.status in (states.Lease.PENDING, states.Lease.ACTIVE) or (
                row.replaced and sent < row.created_at):
            return [before]
        kept = [before, *(row.replaced or [])]
        # The new one is in use if a build is sent after that time.
        row.replaced, row.created_at = kept[:_MOST_REPLACED], sent + 1
        return kept[_MOST_REPLACED:]


_LAST_SENT = sa.select(sa.func.max(models.Booking.dispatched_at)).join(
    models.Booking.reservation).where(
        models.Reservation.lease_id == sa.bindparam('lease'))


def all_of(row: ty.Any) -> list[str]:
    """Return a credential and those that it replaced, encrypted; they are
    revoked together.

    :param row: a :class:`models.Credential`, or its columns
    """
    return [row.encrypted, *(row.replaced or [])]


def take(session: orm.Session, lease_id: str) -> list[str]:
    """Delete the credentials of a lease and return them, encrypted."""
    row = session.get(models.Credential, lease_id)
    if row is None:
        return []
    session.delete(row)
    return all_of(row)


def reencrypt(database: api.Database, again: ty.Callable[[str], str],
              say: ty.Callable[[str], None] = lambda _text: None) -> int:
    """Encrypt all stored texts with another key; return their number.

    :param say: called with lines of progress
    :raises DecryptionError: when some could not be decrypted, after all others
        were encrypted
    """
    def one(table: type[models.Base], key: str) -> None:
        with database.writer() as session:
            row = session.get(table, key, with_for_update=True)
            if isinstance(row, models.Reservation) and row.params:
                row.params = row.params | {resource_types.SECRET: again(
                    row.params[resource_types.SECRET])}
            elif isinstance(row, models.DeferredBuild | models.Credential |
                            models.SlotBuild):
                row.encrypted = again(row.encrypted)
                if isinstance(row, models.Credential) and row.replaced:
                    row.replaced = [again(one) for one in row.replaced]

    count = 0
    unchanged: list[str] = []
    for table, keys, what in (
            (models.DeferredBuild, sa.select(models.DeferredBuild.lease_id),
             'lease'),
            (models.Credential, sa.select(models.Credential.lease_id),
             'lease'),
            (models.Reservation, _SECRETS, 'reservation'),
            (models.SlotBuild, sa.select(models.SlotBuild.server_id),
             'server')):
        with database.reader() as session:
            found = list(session.scalars(keys))
        for key in found:
            count += 1
            try:
                database.retried(one, table, key)
            except errors.DecryptionError:
                unchanged.append(f'{what} {key}')
            if count % _STEP == 0:
                say(f'{count} texts are done.')
    if unchanged:
        more = len(unchanged) - _NAMED
        raise errors.DecryptionError(
            'No key in [blazar] encryption_keys decrypts the data of '
            f'{", ".join(unchanged[:_NAMED])}' +
            (f' and {more} more' if more > 0 else '') +
            f'; the other {count - len(unchanged)} texts are encrypted with '
            'the first key. Keep all keys, add the key with which it was '
            'encrypted, and repeat the command. Without that key, delete '
            'these leases.')
    return count


#: Reservations with an encrypted parameter.
_SECRETS = sa.select(models.Reservation.id).where(
    models.Reservation.params[
        resource_types.SECRET].as_string().is_not(None))
