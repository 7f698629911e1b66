# SPDX-License-Identifier: Apache-2.0

"""Idempotency keys of requests for leases.

A client that gets no answer repeats its request without knowing whether the
lease exists. Therefore a request may carry a key. The transaction that creates
the lease stores the key, and the database accepts each key only once.
"""

import contextlib
import dataclasses
import typing as ty

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views

#: Seconds for which a key is stored.
KEEP = 86400

_KEYS = models.RequestKey.__table__


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The digests of a user's key in a project, and of the request."""

    digest: str
    asked: str


def made_by(database: api.Database, key: Key) -> dict[str, ty.Any] | None:
    """Return the lease that was created with a key, or None.

    :raises Conflict: if the key was used for another request, or the lease
        was deleted
    """
    with database.reader() as session:
        row = session.get(models.RequestKey, key.digest)
    if row is None:
        return None
    if row.asked != key.asked:
        raise errors.Conflict(
            'This Idempotency-Key was used for another lease, '
            f'{row.lease_id}. Use a new key for each lease.',
            errors.ConflictReason.EXISTS)
    with contextlib.suppress(errors.NotFound):
        lease = views.get(database, row.lease_id)
        if lease['status'] != views.DELETING:
            return lease
    raise errors.Conflict(
        f'Lease {row.lease_id}, which was created with this Idempotency-Key, '
        'was deleted. Use a new key to create another one.',
        errors.ConflictReason.EXISTS)


def keep(connection: sa.Connection, now: int, key: Key, lease_id: str,
         ) -> None:
    """Store a key, in the transaction that creates its lease.

    :raises Conflict: if another process has stored it
    """
    if connection.execute(sa.select(_KEYS.c.lease_id).where(
            _KEYS.c.digest == key.digest)).first():
        raise errors.Conflict(
            'A lease was just created with this Idempotency-Key.',
            errors.ConflictReason.EXISTS)
    connection.execute(_KEYS.insert().values(
        digest=key.digest, asked=key.asked, lease_id=lease_id,
        created_at=now))


def trim(database: api.Database, now: int) -> None:
    """Delete expired keys.

    :raises DatabaseUnavailable: if the database does not answer
    """
    with database.begin() as connection:
        connection.execute(sa.delete(_KEYS).where(
            _KEYS.c.created_at < now - KEEP))
