# SPDX-License-Identifier: Apache-2.0

"""What is kept sealed: the builds of servers, and the trusts of owners."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.lifecycle.audit.differences import Difference
from blazar_core.lifecycle.audit.differences import named
from blazar_core.lifecycle import lifecycle

__all__ = ['Sealed']

#: How many sealed texts are read at a time; one may have megabytes.
_BATCH = 100


class Sealed:
    """Looks at what is sealed.

    :param life: what mends do, as the engine would
    :param opens: opens a sealed text
    """

    def __init__(self, database: api.Database, life: lifecycle.Lifecycle,
                 opens: ty.Callable[[str], str]) -> None:
        self._database = database
        self._life = life
        self._opens = opens

    def differences(self) -> ty.Iterator[Difference]:
        """What is kept sealed opens, and is kept only while it is needed."""
        for table, what in ((models.HeldBuild, 'the build of its servers'),
                            (models.Credential, 'the trust of its owner')):
            for row in self._rows(table):
                if row.id is None or row.status == states.Lease.TERMINATED:
                    if table is models.Credential:
                        yield self._unrevoked(row)
                elif None in map(self._open, credentials.all_of(row)):
                    yield Difference(
                        ('sealed', table.__tablename__, row.lease_id),
                        f'{named(row.id, row.name)}: {what} does not open '
                        f'with any key of [blazar] encryption_keys.',
                        'put the key back that it was sealed with')

    def _unrevoked(self, row: ty.Any) -> Difference:
        return Difference(
            ('unrevoked', row.lease_id),
            f'Lease {row.lease_id} is over, and the trust of its owner is '
            f'still kept.', '--fix revokes and forgets it',
            functools.partial(self._life.closing.revoke_of, row.lease_id))

    def _open(self, sealed: str) -> str | None:
        try:
            return self._opens(sealed)
        except errors.VaultError:
            return None

    def _rows(self, table: type[models.HeldBuild | models.Credential],
              ) -> ty.Iterator[ty.Any]:
        """What somebody may still need to open, with its lease."""
        replaced = (models.Credential.replaced if table is models.Credential
                    else sa.null().label('replaced'))
        query = sa.select(table.lease_id, table.sealed, replaced,
                          models.Lease.id, models.Lease.name,
                          models.Lease.status).outerjoin(
            models.Lease, models.Lease.id == table.lease_id).order_by(
                table.lease_id).limit(_BATCH)
        if table is models.HeldBuild:
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
        """What lets us act for owners of leases, opened.

        :returns: to each credential the id, name and status of its lease
        """
        return {opened: (row.lease_id, row.name or '',
                         row.status or states.Lease.TERMINATED)
                for row in self._rows(models.Credential)
                if (opened := self._open(row.sealed)) is not None}
