# SPDX-License-Identifier: Apache-2.0

"""Permits to send builds: one process gets each, once."""

import threading
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import facts

__all__ = ['Closed', 'Permit', 'Right', 'SECONDS', 'mark_sent']

P = ty.ParamSpec('P')

#: Seconds that may pass between the right to send a build and the sending.
SECONDS = 10


class Closed(Exception):
    """A build must not be sent, or another process has sent it."""


class Right(ty.NamedTuple):
    """The right to send builds.

    :ivar deadline: until when they may be sent
    :ivar begun: the lease, if it has begun with that
    :ivar left: whether others of its servers wait yet
    """

    deadline: clouds.Deadline
    begun: list[facts.Lease]
    left: bool


class Permit:
    """A permit to send builds that is asked for, until it is known whether it
    is had.

    :ivar mark: written with it: it shows that the transaction that wrote it
        is committed
    :ivar right: what is had if the last of these is; None: there was none
    """

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock
        self.mark = uuidutils.generate_uuid()
        self.right: Right | None = None

    def surely(self, take: ty.Callable[P, Right], *args: P.args,
               **kwargs: P.kwargs) -> Right:
        """Take it, also when the answer to the commit is lost.

        What was written is looked for until the permit would expire.

        :param take: asks :meth:`had` with the lease locked
        :raises Closed: when another process has it
        :raises OutcomeUnknown: when it is not known by then
        """
        latest = clouds.Deadline(self._clock, SECONDS)
        unknown: errors.OutcomeUnknown | None = None
        while True:
            again = self._clock.elapsed() + 1
            try:
                return self._database.retried(take, *args, **kwargs)
            except (errors.BooksUnavailable, errors.BooksBusy) as exc:
                if isinstance(exc, errors.OutcomeUnknown):
                    unknown = unknown or exc
                if unknown is None:
                    raise
                if latest.passed():
                    raise unknown from exc
            # Not by a date of before: the clock may have been put back.
            if self._clock.elapsed() < again:
                self._clock.wait(threading.Event(), self._clock.now() + 1)

    def give(self, deadline: clouds.Deadline,
             begun: ty.Sequence[facts.Lease] = (), left: bool = False,
             ) -> Right:
        """The right, if what is written is committed."""
        self.right = Right(deadline, [*begun], left)
        return self.right

    def had(self, connection: sa.Connection, lease_id: str) -> Right | None:
        """The right, if it was written down; None: it was not."""
        return self.right if self.right is not None and connection.scalar(
            _HAD, {'lease': lease_id, 'mark': self.mark}) else None


def mark_sent(connection: sa.Connection, servers: ty.Mapping[str, int | None],
              now: int) -> None:
    """Write down that the builds of servers are sent.

    :param servers: with when they were sent before
    :raises Closed: when another process has sent one of them, or it is
        gone
    """
    for before in set(servers.values()):
        alike = [one for one, at in servers.items() if at == before]
        taken = connection.execute(
            _FIRST if before is None else _AGAIN,
            {'servers': alike, 'now': now} | (
                {} if before is None else {'before': before}))
        if taken.rowcount != len(alike):
            raise Closed


_BOOKINGS = models.Booking.__table__
_MARK = sa.update(_BOOKINGS).where(
    _BOOKINGS.c.server_id.in_(sa.bindparam('servers', expanding=True)),
    _BOOKINGS.c.failed_at.is_(None)).values(dispatched_at=sa.bindparam('now'))
_FIRST = _MARK.where(_BOOKINGS.c.dispatched_at.is_(None))
_AGAIN = _MARK.where(_BOOKINGS.c.dispatched_at == sa.bindparam('before'))
_LEASES = models.Lease.__table__
_HAD = sa.select(_LEASES.c.id).where(
    _LEASES.c.id == sa.bindparam('lease'),
    _LEASES.c.permit == sa.bindparam('mark'))
