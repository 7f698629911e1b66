# SPDX-License-Identifier: Apache-2.0

"""Reconcile leases with what is observed of their servers."""

import contextlib

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import usage_records
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import lookup
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.lifecycle import server_removal
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

#: A booking of a lease without a host, or on a failed one.
_MISSES = sa.select(models.Booking.id).join(
    models.Reservation,
    models.Reservation.id == models.Booking.reservation_id).where(
    models.Reservation.lease_id == sa.bindparam('lease'), sa.or_(
        models.Booking.host_id.is_(None),
        models.Booking.host_failed_at.is_not(None))).limit(1)
_HAS_BOOKINGS = sa.exists().where(
    models.Booking.reservation_id == models.Reservation.id,
    models.Reservation.lease_id == models.Lease.id)
#: Leases of boots: without servers they are over.
_BY_BOOT = sa.select(models.Lease.id, models.Lease.project_id).where(
    sa.exists().where(models.Reservation.lease_id == models.Lease.id,
                      models.Reservation.params.is_(None)))
#: The statuses in which a lease follows its servers.
_GOING_ON = (*states.HOLDING, states.Lease.ACTIVE, states.Lease.TIMEDOUT,
             states.Lease.ERROR)
#: Leases that a process may have left unfinished.
# A union, as PostgreSQL reads all bookings for one condition.
_LEFT = _BY_BOOT.where(
    models.Lease.status == states.Lease.STARTING).union(_BY_BOOT.where(
        models.Lease.status.in_(_GOING_ON), ~_HAS_BOOKINGS))
_UNFINISHED = sa.select(
    models.Booking.server_id, models.Booking.running, models.Host.uuid,
).outerjoin(models.Host, models.Host.id == models.Booking.host_id).where(
    models.Booking.server_id.is_not(None)).order_by(models.Booking.id)


class Reconciliation:
    """Reconciles the reservation database with the servers in Nova.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify,
                 closer: lease_close.LeaseClose,
                 removal: server_removal.ServerRemoval) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify
        self._closer = closer
        self._removal = removal

    def observe(self, server_id: str, seen: cloud_api.ObservedServer,
                sent: tuple[int | None] | None = None) -> list[str]:
        """Update the reservation database by what was observed of a server.

        :param sent: when it had been sent before it was observed; a fault is
            outdated if it was sent again since. None: not known
        :returns: the service hosts whose recorded usage may be wrong now,
            because a booking moved or was removed
        """
        with self._database.connection() as connection:
            of = connection.execute(
                lookup.BOOKED, {'server': server_id}).first()
        if of is None:
            return []
        try:
            with logs.about(of.lease_id, of.project_id, server_id):
                return self._observe(of.lease_id, server_id, seen, sent)
        except errors.NotFound:
            # Its lease was purged meanwhile.
            return []

    def _observe(self, lease_id: str, server_id: str,
                 seen: cloud_api.ObservedServer,
                 sent: tuple[int | None] | None) -> list[str]:
        if seen.state is cloud_api.ServerState.RUNNING or (
                seen.host is not None and seen.state in (
                    cloud_api.ServerState.BUILDING,
                    cloud_api.ServerState.LEAVING)):
            stale, healed = self._database.retried(
                self._stands, lease_id, server_id, seen)
            if healed is not None:
                self._notify('lease.healed', healed)
            return stale
        if seen.state is cloud_api.ServerState.GONE:
            if self._was_never_sent(server_id):
                # While it has its booking: if the process dies here, the next
                # periodic sync finds it again.
                self._cloud.forget(server_id)
            self._removal.gone(lease_id, server_id)
        elif seen.state is cloud_api.ServerState.ERROR:
            return self._database.retried(
                self._failed, lease_id, server_id, seen, sent)
        return []

    def _was_never_sent(self, server_id: str) -> bool:
        """Return whether no service has begun to build a server of a lease.

        Called when it is gone: a build that is sent after this finds that.
        """
        with self._database.reader() as session:
            booking = lease_status.booking_of(session, server_id)
            return booking is not None and booking.dispatched_at is None

    def _stands(self, lease_id: str, server_id: str,
                seen: cloud_api.ObservedServer,
                ) -> tuple[list[str], views.Lease | None]:
        """Move the booking of a server that has a host to that host.

        :returns: the service hosts that it came from or moved to; the lease,
            with the hosts that were exchanged last, if nothing of it is on a
            failed host any longer
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = lease_status.booking_of(session, server_id)
            if booking is None or seen.host is None and (
                    seen.rest is not None and not booking.running):
                # A shelved server is on its host again once it is restored.
                return [], None
            left, failed = booking.host_id, booking.host_failed_at is not None
            stale = lease_status.follow(
                session, lease, booking, seen.host, self._clock.now())
            if booking.migrating_to is not None and not seen.busy:
                # It stays: Nova does not always notify the target host, as
                # when a migration in the queue is aborted.
                target = session.get_one(models.Host, booking.migrating_to)
                if target.capacity and server_id in (target.consumers or {}):
                    stale = [*stale, target.service_host]
                else:
                    booking.migrating_to = None
            if booking.claimed_at is None:
                booking.claimed_at = self._clock.now()
            if seen.state is not cloud_api.ServerState.BUILDING:
                if not booking.running:
                    booking.running = True
                    usage_records.begin_use(
                        session, self._clock.now(), booking)
                booking.failed_at = None
                lease_status.update_status(session, lease, self._clock.now())
            if not failed or booking.host_id == left:
                return stale, None
            booking.reservation.moved_at = self._clock.now()
            session.flush()
            if session.scalar(_MISSES, {'lease': lease_id}) is not None:
                # Not notified for each of many servers.
                return stale, None
            described, = reassignment.exchanged(session, [(lease, [
                (booking.reservation_id, server_id, left, booking.host_id)])])
            return stale, described

    def _failed(self, lease_id: str, server_id: str,
                seen: cloud_api.ObservedServer,
                sent: tuple[int | None] | None) -> list[str]:
        """Record that a server could not be built: its capacity is freed, and
        the status of its lease follows from the others.

        A server without a valid host keeps its capacity, and waits to be sent
        again. A server that ran before has a fault of its own, not of its
        lease.

        :returns: the service host of the booked host, where the cloud may
            still count what the server used
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = lease_status.booking_of(session, server_id)
            if booking is None or booking.running or (
                    booking.failed_at is not None or
                    seen.unplaced and booking.dispatched_at is None or
                    sent not in (None, (booking.dispatched_at,))):
                return []
            if not booking.reservation.booted:
                # The slot remains, whatever happens to a server.
                return []
            fault = seen.fault or 'Nova gave no reason'
            if seen.unplaced and self._wait_again(session, lease, booking,
                                                  fault):
                return []
            stale = list(session.scalars(
                sa.select(models.Host.service_host)
                .where(models.Host.id == booking.host_id)))
            booking.failed_at = self._clock.now()
            lease_status.free_capacity(
                session, [booking], self._clock.now())
            if lease.status != states.Lease.TERMINATING:
                conditions.update(
                    lease, self._clock.now(), conditions.Type.START_DELAYED,
                    _unbuilt(lease, server_id, fault))
            lease_status.update_status(session, lease, self._clock.now())
            described = views.describe(lease)
        LOG.warning('Lease %s: server %s could not be built: %s',
                    lease_id, server_id, seen.fault)
        self._notify('lease.update', described)
        return stale

    def _wait_again(self, session: orm.Session, lease: models.Lease,
                    booking: models.Booking, fault: str) -> bool:
        """Let a server wait to be sent again, with its capacity; return
        whether it does.

        Nothing else is written: the next start makes it a reserved server in
        the cloud again, each time.
        """
        now = self._clock.now()
        if lease.status not in states.TO_START or lease.end_date <= now or (
                not lookup.keeps_build(session, lease.id)):
            return False
        booking.dispatched_at = booking.claimed_at = None
        pause = retries.pause(lease, now)
        for event in lease.events:
            if event.event_type == states.EventType.START:
                # A worker that handles it has sent the others.
                event.reopen(now, now + pause)
                event.attempts = 0
        conditions.update(lease, now, lease_conditions.put_off(
            lease_status.waiting(lease), fault))
        lease.updated_at = now
        LOG.warning('Lease %s: server %s: no valid host yet, again in %s s: '
                    '%s',
                    lease.id, booking.server_id, pause, fault)
        return True

    def settle_left(self) -> None:
        """Update leases that a process may have left unfinished."""
        with self._database.connection() as connection:
            left = connection.execute(_LEFT).all()
        for lease_id, project_id in left:
            with (logs.apart(lease_id, project_id),
                  contextlib.suppress(errors.NotFound)):
                self._database.retried(self._settle_again, lease_id)
                self._closer.finish_if_empty(lease_id)

    def _settle_again(self, lease_id: str) -> None:
        with self._database.writer() as session:
            lease_status.update_status(session, api.locked(session, lease_id),
                                       self._clock.now())

    def unfinished(self) -> dict[str, cloud_api.ObservedServer]:
        """Return the servers of all leases that are not over, as recorded.

        Servers that do not run yet are HELD or being built; this returns HELD.
        """
        with self._database.connection() as connection:
            return {row.server_id: cloud_api.ObservedServer(
                cloud_api.ServerState.RUNNING, row.uuid) if row.running else
                cloud_api.ObservedServer(cloud_api.ServerState.HELD)
                for row in connection.execute(_UNFINISHED)}

    def check(self, server_id: str) -> tuple[cloud_api.ObservedServer,
                                             list[str]]:
        """Look up a server and reconcile it.

        :returns: what was observed, and what :meth:`observe` returned
        """
        with self._database.reader() as session:
            booking = lease_status.booking_of(session, server_id)
        seen = self._cloud.look(server_id)
        return seen, self.observe(
            server_id, seen,
            None if booking is None else (booking.dispatched_at,))


def _unbuilt(lease: models.Lease, server_id: str, fault: str,
             ) -> conditions.Condition:
    """Return the condition of a lease of which one more server was not built:
    its message has the fault of the first one.
    """
    rows = lease_status.servers(lease)
    before = conditions.find(lease.conditions, conditions.Type.BUILD_FAILED)
    first = fault if before is None else before['details']['fault']
    failed = [row.server_id for row in lease.bookings
              if row.server_id is not None and row.failed_at is not None]
    return conditions.Condition(
        conditions.Type.BUILD_FAILED, conditions.Reason.SERVERS_FAILED,
        f'Server {server_id} could not be built: {fault}'
        if len(failed) < 2 else
        f'{len(failed)} of {len(rows)} servers could not be built, the '
        f'first: {first}', {'servers': failed, 'fault': first})
