# SPDX-License-Identifier: Apache-2.0

"""Resumption of interruptible servers that were evicted.

One process at a time looks where shelved servers would be safe again for as
long as their owners want (:mod:`blazar_core.capacity.interruptible`), and has
them unshelved, in the name of their owners. The cloud's scheduler chooses the
host, by the same rule: until when the server has to be safe is recorded before
it is asked. In the same way a host is found for those that can be
live-migrated in place of an eviction.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import interruptible
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

#: How many servers are tried by one look, seconds after which one is tried
#: again, and within which a request has to be made.
_TRIED, _PAUSE, _SEND = 10, 60, 20

_SERVERS = models.InterruptibleServer.__table__
_RESUME_AT = models.InterruptibleServer.resume_at
_DUE = sa.select(models.InterruptibleServer).where(
    # SQLite uses the index for a range only, and most have no such time.
    _RESUME_AT > 0, clock_skew.is_over(_RESUME_AT, sa.bindparam(
        'now', type_=sa.BigInteger), 2 * _PAUSE)).order_by(
            _RESUME_AT, models.InterruptibleServer.server_id).limit(_TRIED)
#: Only one that no other process tries.
_TAKE = sa.update(_SERVERS).where(
    _SERVERS.c.server_id == sa.bindparam('server'),
    _SERVERS.c.resume_at == sa.bindparam('seen'))


class Resumption:
    """Has servers unshelved where they are safe.

    :param credential: returns what is kept as this credential; None: nothing
        is
    :param safe_for: seconds for which those have to be safe whose owners want
        no other
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, admission: admissions.Admission,
                 credential: ty.Callable[[str], str | None], safe_for: int,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._admission = admission
        self._credential = credential
        self._safe_for = safe_for

    def look(self) -> None:
        """Try those that are due, the longest waiting first.

        :raises DatabaseUnavailable: when the database does not answer
        """
        with self._database.reader() as session:
            due = session.scalars(_DUE, {'now': self._clock.now()}).all()
        woken = 0
        for row in due:
            try:
                woken += self._try(row, woken)
            except errors.DatabaseUnavailable:
                raise
            except Exception as exc:
                LOG.warning(
                    'Server %s: its resumption is tried again: %s',
                    row.server_id, exc, exc_info=not isinstance(
                        exc, errors.BlazarError))
                self._write(row, self._later())

    def _try(self, row: models.InterruptibleServer, woken: int) -> bool:
        """
        :param woken: how many others may not be counted on their hosts yet
        :returns: whether the server is being unshelved
        """
        seen = self._cloud.look(row.server_id)
        if seen.rest is not cloud_api.RestingState.SHELVED or seen.busy:
            # It is back, or will be, or does not exist any longer.
            if seen.busy:
                self._cloud.reset_lost_task(row.server_id)
            self._write(
                row, interruptible.BACK if seen.host is not None
                and not seen.busy else self._later())
            return False
        wanted = row.safe_for or self._safe_for
        needs = self._cloud.needs(row.server_id, lent=True)
        if self._admission.safe_for(
                dataclasses.replace(needs, count=woken + 1), row.lead_time,
                wanted, row.cleaning_time) != wanted:
            self._write(row, self._later())
            return False
        deadline = cloud_api.Deadline(self._clock, _SEND)
        if not self._write(row, self._later() | {
                'safe_by': self._clock.now() + wanted}):
            return False
        credential = None if row.credential_id is None else (
            self._credential(row.credential_id))
        LOG.info('Server %s: resuming it after its eviction', row.server_id)
        try:
            self._cloud.unshelve(row.server_id, credential, deadline)
        except (errors.TrustUnavailable, errors.Forbidden) as exc:
            LOG.warning('Server %s: it cannot be resumed in the name of its '
                        'owner, who has to unshelve it: %s',
                        row.server_id, exc)
            interruptible.update(
                self._database, row.server_id, resume_at=None)
            return False
        return True

    def find_target(self, row: models.InterruptibleServer, least: int) -> bool:
        """Look for a host on which a server would be safe that has to leave
        its own, and record for how long it has to be.

        :param least: seconds for which that has to be at least
        :returns: whether there is one
        :raises CloudUnavailable: when that is not known now
        """
        found = self._admission.safe_for(
            self._cloud.needs(row.server_id, lent=True), row.lead_time,
            max(least, row.safe_for or self._safe_for), row.cleaning_time)
        if found is None or found < least:
            return False
        interruptible.update(self._database, row.server_id,
                             safe_by=self._clock.now() + found)
        return True

    def _later(self) -> dict[str, int]:
        return {'resume_at': self._clock.now() + _PAUSE}

    @api.retried
    def _write(self, row: models.InterruptibleServer,
               values: ty.Mapping[str, ty.Any]) -> bool:
        """Record something of a server, if no other process has tried it."""
        with self._database.begin() as connection:
            return connection.execute(_TAKE.values(**values), {
                'server': row.server_id, 'seen': row.resume_at}).rowcount == 1
