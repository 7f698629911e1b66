# SPDX-License-Identifier: Apache-2.0


"""Servers that a series keeps from one occurrence to the next.

Between two occurrences they are shelved and belong to no lease. When the next
one starts, they get its bookings and are restored.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import slots
from blazar_core.leases import views
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import reconciliation
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies

LOG = logging.getLogger(__name__)

#: Seconds after reading a lease within which its servers may be restored:
#: later, it may be over and no longer have them.
_RESTORE_TIMEOUT = 20


def is_kept(lease: models.Lease, has_build: bool) -> bool:
    """Return whether the servers of a lease that is to start exist already.

    :param has_build: whether there is a call that builds them
    """
    return (lease.recurrence_id is not None and not has_build and
            not lease_status.comes_first(lease))


def on_end(session: orm.Session, lease: models.Lease) -> str:
    """Return the end policy of the servers of a lease: if another occurrence
    follows that gets them, the policy that keeps them.
    """
    kept = None if lease.recurrence_id is None else session.get(
        models.Recurrence, lease.recurrence_id)
    if kept is None or kept.between == end_policies.DELETE or session.execute(
            sa.select(models.Lease.id).where(
                models.Lease.recurrence_id == lease.recurrence_id,
                models.Lease.start_date > lease.start_date,
                models.Lease.status.in_(states.TO_START))).first() is None:
        return lease.on_end
    return kept.between


class KeptServers:
    """Starts leases whose servers exist already.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify,
                 reconciler: reconciliation.Reconciliation,
                 closer: lease_close.LeaseClose) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify
        self._reconciler = reconciler
        self._closer = closer

    def resume(self, lease_id: str, when_due: bool) -> retries.Result:
        """Restore the servers of a lease; done when they run. Safe to repeat.

        :param when_due: postpone if the start was moved meanwhile
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            kept = session.get(models.Recurrence, lease.recurrence_id)
            left = set(kept.servers if kept else ()) - set(
                lease_status.servers(lease))
            begun = lease.status == states.Lease.STARTING
        if not begun:
            there = [one for one in sorted(left) if self._cloud.look(
                one).state not in (cloud_api.ServerState.GONE,
                                   cloud_api.ServerState.LEAVING)]
            later, told = self._database.retried(
                self._take, lease_id, there, when_due)
            if later is not None:
                return later
            if told is not None:
                self._notify(*told)
        waiting = []
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.TO_START:
                return None
            servers = lease_status.servers(lease)
            deadline = cloud_api.Deadline(self._clock, min(
                _RESTORE_TIMEOUT, lease.end_date - self._clock.now()))
        credential = self._closer.credential(lease_id)
        for server_id in servers:
            seen = self._cloud.look(server_id)
            self._reconciler.observe(server_id, seen)
            if seen.rest is cloud_api.RestingState.SHELVED or seen.busy:
                waiting.append(server_id)
            if seen.busy:
                self._cloud.reset_lost_task(server_id)
            if seen.rest is cloud_api.RestingState.SHELVED and not seen.busy:
                try:
                    self._cloud.unshelve(server_id, credential, deadline)
                except (errors.CloudUnavailable, errors.TrustUnavailable,
                        errors.Forbidden) as exc:
                    LOG.warning('Lease %s: server %s cannot be restored yet: '
                                '%s',
                                lease_id, server_id, exc)
                    self._explain(lease_id, lease_conditions.put_off(
                        [server_id], str(exc)))
        if not waiting:
            return None
        return retries.RetryAfter(
            retries.AGAIN, 'its servers are being restored',
            retries.LONGEST_WAIT)

    def _take(self, lease_id: str, there: ty.Sequence[str], when_due: bool,
              ) -> tuple[retries.Result,
                         tuple[str, views.Lease] | None]:
        """Give servers the capacity that is booked for them.

        :param there: the servers that still exist
        :returns: what to wait for, None: nothing; and the event and the lease
            to notify about, None: nothing has changed
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.PENDING or lease.end_date <= now:
                return None, None
            if when_due and lease.start_date > now:
                return retries.RetryAfter(
                    lease.start_date - now, 'its start was changed'), None
            if there and session.execute(sa.select(models.Booking.id).where(
                    models.Booking.server_id.in_(there))).first():
                conditions.update(lease, now, lease_conditions.NOT_LEFT)
                return retries.RetryAfter(
                    retries.AGAIN,
                    'its servers are in the previous occurrence', 4 *
                    retries.AGAIN), None
            if not there:
                return None, ('lease.event.end_lease', lease_status.finish(
                    session, lease, now))
            rows = lease.bookings
            for row, server_id in zip(rows, there, strict=False):
                row.server_id, row.dispatched_at = server_id, now
            # Bookings of deleted servers are removed.
            ledger.amend(session, now, [
                ledger.Edit(row, None) for row in rows[len(there):]])
            conditions.update(lease, now, conditions.Type.START_DELAYED)
            slots.record_first_use(lease, now)
            lease.enter(states.Lease.STARTING, now)
            return None, ('lease.event.start_lease', views.refreshed(
                session, lease))

    def _explain(self, lease_id: str, why: conditions.Condition) -> None:
        lease_conditions.explain(
            self._database, self._clock, lease_id, lambda lease: [why]
            if lease.status == states.Lease.STARTING else [])
