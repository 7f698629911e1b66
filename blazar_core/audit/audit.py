# SPDX-License-Identifier: Apache-2.0

"""Audit the reservation database.

Processes keep the database consistent. The audit finds what a crash between
two transactions, a restored backup or a manual change of the tables may have
left. It takes a few statements and time linear in the number of bookings:

* :mod:`~blazar_core.audit.unfinished`: leases that are not terminated, and
  their events;
* :mod:`~blazar_core.audit.leftovers`: rows that belong to no lease, and
  encrypted data;
* :mod:`~blazar_core.audit.overbooked`: the capacity rule on each host;
* :mod:`~blazar_core.audit.findings`: the differences that these report.
"""

import typing as ty

import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.audit import leftovers
from blazar_core.audit import overbooked
from blazar_core.audit import unfinished
from blazar_core.common import clocks
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import handlers


class Audit:
    """Finds inconsistencies in the reservation database.

    :param life: the handlers of the engine, by which differences are fixed
    :param decrypt: decrypts a text
    :param late: seconds after which a due event should have been claimed
    :ivar unfinished: the check of events
    :ivar encrypted: the check of encrypted data
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 life: handlers.Handlers, decrypt: ty.Callable[[str], str],
                 late: int) -> None:
        self._database = database
        self._clock = clock
        self.unfinished = unfinished.Unfinished(database, clock, life, late)
        self._remains = leftovers.Remains(database, clock)
        self.encrypted = leftovers.EncryptedData(database, life, decrypt)

    def size(self) -> dict[str, int]:
        """Return the numbers of objects that are compared."""
        with self._database.reader() as session:
            return {
                'leases': session.scalars(
                    sa.select(sa.func.count()).where(
                        models.Lease.status != states.Lease.TERMINATED)).one(),
                'servers': session.scalars(
                    sa.select(sa.func.count(models.Booking.server_id))).one(),
                'hosts': session.scalars(
                    sa.select(sa.func.count(models.Host.id))).one()}

    def differences(self) -> ty.Iterator[Difference]:
        """Yield all differences."""
        yield from self.unfinished.differences()
        yield from self.unfinished.overdue()
        yield from self._remains.differences()
        yield from overbooked.overbooked(self._database, self._clock)
        yield from self.encrypted.differences()
