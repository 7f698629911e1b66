#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""What lets us act for the owners of leases, sealed."""

import typing as ty

import sqlalchemy as sa

from blazar_core.common import clock as clocks
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['Credentials', 'all_of', 'reseal']


class Credentials:
    """Keeps what lets us act for the owners of leases."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def entrust(self, lease_id: str, sealed: str, in_use: bool = False,
                ) -> str | None:
        """Keep what lets us act for the owner of a lease.

        :param sealed: it, sealed
        :param in_use: what this takes the place of may be: both are revoked
            together
        :returns: what this takes the place of, sealed: to revoke now. None:
            there is none
        :raises NotFound: when the lease was withdrawn
        """
        return self._database.retried(
            self._entrust, lease_id, sealed, in_use)

    def _entrust(self, lease_id: str, sealed: str, in_use: bool,
                 ) -> str | None:
        with self._database.writer() as session:
            api.locked(session, lease_id)
            row = session.get(models.Credential, lease_id)
            if row is None:
                session.add(models.Credential(
                    lease_id=lease_id, sealed=sealed,
                    created_at=self._clock.now()))
                return None
            before, row.sealed = row.sealed, sealed
            if in_use:
                row.replaced = [before, *(row.replaced or [])]
            return None if in_use else before


def all_of(row: ty.Any) -> list[str]:
    """A credential and those that it replaced, sealed: they are revoked
    together.

    :param row: a :class:`models.Credential`, or what was read of one
    """
    return [row.sealed, *(row.replaced or [])]


def reseal(database: api.Database, again: ty.Callable[[str], str]) -> int:
    """Seal again, with another key, what is sealed; returns how many."""
    def one(table: type[models.HeldBuild | models.Credential],
            lease_id: str) -> None:
        with database.writer() as session:
            row = session.get(table, lease_id, with_for_update=True)
            if row is not None:
                assert isinstance(row, models.HeldBuild | models.Credential)
                row.sealed = again(row.sealed)
                if isinstance(row, models.Credential) and row.replaced:
                    row.replaced = [again(one) for one in row.replaced]

    count = 0
    tables: tuple[type[models.HeldBuild | models.Credential], ...] = (
        models.HeldBuild, models.Credential)
    for table in tables:
        with database.reader() as session:
            sealed = list(session.scalars(sa.select(table.lease_id)))
        for lease_id in sealed:
            database.retried(one, table, lease_id)
        count += len(sealed)
    return count
