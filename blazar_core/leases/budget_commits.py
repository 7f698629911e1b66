# SPDX-License-Identifier: Apache-2.0

"""Commit new leases with the operator's budget service.

Neither side can undo what the other has written, and each may fail between two
steps. So that nothing is charged for a lease that does not exist:

1. one transaction writes an *intent*: a terminated lease with the id of the
   new one and a single event, its refund, due in some minutes;
2. the service commits the lease with that id, once;
3. the transaction that creates the lease deletes the intent, or fails if the
   refund has started.

So at each instant either the lease exists, or a listener has the service
refund it. The API does not show intents, and limits do not count them.
"""

import collections.abc
import contextlib
import dataclasses
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

_EVENTS = models.Event.__table__
_LEASES = models.Lease.__table__
_PARTS = (_EVENTS, models.Reservation.__table__)

#: Has the service commit a lease, given as by
#: :func:`blazar_core.leases.views.describe`.
Commit: ty.TypeAlias = ty.Callable[[dict[str, ty.Any]], None]


class BudgetCommits:
    """Has the budget service commit new leases.

    :param commit: None: there is no service
    :param seconds: time after which an interrupted request is refunded
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes,
                 commit: Commit | None = None, seconds: int = 0) -> None:
        self._database = database
        self._clock = clock
        self._types = types
        self._commit = commit
        self._seconds = seconds

    @contextlib.contextmanager
    def committed(self, leases: ty.Sequence[new_leases.NewLease],
                  check: ty.Callable[
                      [new_leases.NewLease], None] | None = None,
                  ) -> collections.abc.Iterator[list[new_leases.NewLease]]:
        """Commit leases; refund them if they are not created.

        :param check: checks for capacity, so that few leases are committed
            that are not created
        :returns: the leases, each with the id under which it is committed
        :raises LimitExceeded: if the service refuses one
        :raises CloudUnavailable: if the service does not answer
        """
        if self._commit is None:
            yield list(leases)
            return
        if check is not None:
            for wanted in leases:
                check(wanted)
        new = [dataclasses.replace(one, lease_id=uuidutils.generate_uuid())
               for one in leases]
        described = self._database.retried(self._intend, new)
        ids: list[str] = [one['id'] for one in described]
        committed = 0
        try:
            for one in described:
                self._commit(one)
                committed += 1
            yield new
        except Exception as exc:
            # An unanswered lease may be committed: its intent is kept.
            unknown = not isinstance(exc, errors.LimitExceeded)
            self._take_back(ids[:committed], ids[committed + unknown:])
            raise

    def _intend(self, leases: ty.Sequence[new_leases.NewLease],
                ) -> list[dict[str, ty.Any]]:
        """Write the intents of leases that are about to be committed."""
        now = self._clock.now()
        planned = [new_leases.rows_of(
            new, [[None] * demand.count for demand in new.demands], now,
            False, self._types) for new in leases]
        described = [rows.describe(()) for rows in planned]
        for rows in planned:
            rows.lease |= {
                'status': states.Lease.TERMINATED, 'deleted_at': now,
                # It is refunded as a lease of zero duration.
                'start_date': rows.lease['end_date']}
            for row in rows.reservations:
                row['status'] = states.Reservation.DELETED
            rows.events = [
                event | {'status': states.Event.UNDONE, 'time': now,
                         'run_at': now + self._seconds}
                for event in rows.events
                if event['event_type'] == states.EventType.REFUND]
        with self._database.begin() as connection:
            new_leases.insert(connection, planned)
        return described

    def _take_back(self, committed: ty.Sequence[str],
                   unknown: ty.Sequence[str]) -> None:
        """Refund leases now, and delete the intents of others.

        If this fails, all of them are refunded later.

        :param unknown: leases that the service has refused, or was not asked
            about
        """
        try:
            self._database.retried(self._write_back, committed, unknown)
        except Exception:
            LOG.exception('Leases %s: the refund is retried later',
                          ', '.join((*committed, *unknown)))

    def _write_back(self, committed: ty.Sequence[str],
                    unknown: ty.Sequence[str]) -> None:
        now = self._clock.now()
        with self._database.begin() as connection:
            connection.execute(sa.update(_EVENTS).where(
                _EVENTS.c.lease_id.in_(committed),
                _EVENTS.c.event_type == states.EventType.REFUND,
                sa.exists().where(
                    _LEASES.c.id == _EVENTS.c.lease_id,
                    _LEASES.c.status == states.Lease.TERMINATED),
            ).values(status=states.Event.UNDONE, run_at=now, deferrals=0,
                     claimed_by=None, claimed_until=0))
            _forget(connection, unknown)


def confirm(connection: sa.Connection,
            leases: ty.Iterable[new_leases.NewLease]) -> None:
    """Delete the intents of committed leases, in the transaction that creates
    the leases.

    :raises CloudUnavailable: if the refund of one has started, because the
        service took too long
    """
    ids = [one.lease_id for one in leases if one.lease_id is not None]
    if ids and _forget(connection, ids) != len(ids):
        raise errors.CloudUnavailable(
            'The external service that checks leases took too long; try again '
            'in a minute.')


def _forget(connection: sa.Connection, ids: ty.Sequence[str]) -> int:
    """Delete intents whose refund has not started; return their number."""
    refunds = connection.execute(sa.delete(_EVENTS).where(
        _EVENTS.c.lease_id.in_(ids),
        _EVENTS.c.event_type == states.EventType.REFUND,
        _EVENTS.c.status == states.Event.UNDONE)).rowcount
    for table in (*_PARTS, _LEASES) if refunds == len(ids) else ():
        of = table.c.id if table is _LEASES else table.c.lease_id
        connection.execute(sa.delete(table).where(of.in_(ids)))
    return refunds
