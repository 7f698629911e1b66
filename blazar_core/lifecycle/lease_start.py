# SPDX-License-Identifier: Apache-2.0

"""Start leases."""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import kept_servers
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: Counter: leases whose start waited for hosts that were switched on.
WAITED = 'blazar_power_waits'

#: By reservation, the uuids of the hosts that are booked.
_Hosts: ty.TypeAlias = dict[str, tuple[str, ...]]


class Read(ty.NamedTuple):
    """The data that the start of a lease needs.

    :ivar lease: with all its rows, of a session that is closed
    :ivar encrypted: the call that builds its servers; None: there is none (any
        longer)
    :ivar crowded: whether its host is not empty yet
    :ivar outside: why its servers may not start: the hosts of another lease
        are closed to them, or a lease of its project still has what they need;
        empty: they may
    :ivar booting: whether a host of it is switched off, or boots
    """

    lease: models.Lease
    encrypted: dispatch.EncryptedCall | None
    crowded: bool
    outside: str
    booting: bool = False


class LeaseOpening:
    """Starts leases whose servers are booted later: opens their reservations.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: views.Notify, closer: lease_close.LeaseClose,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._closer = closer
        self._types = types

    def begin(self, lease_id: str, when_due: bool) -> retries.Result:
        """Start a lease: open its reservations."""
        begun, lent, outcome = self._database.retried(
            self._take, lease_id, when_due)
        if not begun:
            return outcome
        fault_points.fault_point(fault_points.FaultPoint.OPEN_HELD, lease_id)
        try:
            if lent and (again := self._closer.clean_lent(lease_id)[0]):
                return again
            opened = self.open(lease_id)
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s cannot start yet: %s', lease_id, exc)
            return retries.wait(str(exc))
        fault_points.fault_point(fault_points.FaultPoint.OPEN_OPENED, lease_id)
        described = self._database.retried(self._activate, lease_id, opened)
        if described is not None:
            self._notify('lease.event.start_lease', described)
        else:
            self._closer.close_if_ending(lease_id)
        return None

    def open(self, lease_id: str) -> _Hosts:
        """Open the reservations of a lease for use. Safe to repeat.

        :returns: by reservation, on which hosts
        :raises CloudUnavailable: when that is not possible now
        """
        with self._database.reader() as session:
            begun = self._types.reserved(session, api.found(session, lease_id))
        for kind, reserved in begun:
            kind.start(reserved)
        return {reserved.id: reserved.hosts for _kind, reserved in begun}

    def _take(self, lease_id: str, when_due: bool,
              ) -> tuple[bool, bool, retries.Result]:
        """Return whether a lease may start; if so, its start is recorded. And
        whether one of its hosts was lent since it was cleaned.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if when_due and lease.start_date > now:
                return False, False, retries.RetryAfter(
                    lease.start_date - now, 'its start was just changed')
            if lease.status not in states.TO_START or lease_status.servers(
                    lease):
                # Servers have a call that builds them; without it they cannot
                # start.
                return False, False, None
            try:
                lent = assignments.assign(
                    session, self._clock.now(), lease.reservations)
            except assignments.HostInUse as exc:
                LOG.warning('Lease %s cannot start yet: %s', lease_id, exc)
                conditions.update(lease, now, lease_conditions.NOT_FREE)
                return False, False, retries.RetryAfter(
                    retries.AGAIN, str(exc), 4 * retries.AGAIN)
            conditions.update(lease, now, conditions.Type.START_DELAYED)
            lease.enter(states.Lease.STARTING, self._clock.now())
            return True, lent, None

    def _activate(self, lease_id: str,
                  opened: _Hosts) -> views.Lease | None:
        """Record that a lease is opened.

        :returns: the lease; None: it was recorded before, or the lease ended
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            begins = lease.status == states.Lease.STARTING
            if begins:
                lease.enter(states.Lease.ACTIVE, self._clock.now())
                for reservation in lease.reservations:
                    reservation.enter(
                        states.Reservation.ACTIVE, self._clock.now())
            # Bookings may have been reassigned while it was opened, also after
            # another process has recorded that.
            events.changed(session, lease, self._types, [
                one for one in lease.reservations
                if resource_types.context_of(session, one).hosts !=
                opened.get(one.id)], self._clock.now())
            return views.describe(lease) if begins else None

    def undo(self, lease_id: str) -> bool:
        """Close the opened reservations of a lease that cannot start.

        :returns: whether the lease has reservations to open
        :raises CloudUnavailable: when they could not be closed
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.TO_START or (
                    not lease_status.comes_first(lease)):
                return False
        if not self._closer.close(lease_id).done:
            raise errors.CloudUnavailable(
                f'Lease {lease_id} could neither be opened nor closed again')
        return True


class LeaseStart:
    """Starts leases.

    :param start_timeout: seconds for which a start waits for its host to be
        empty
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 start_timeout: int, types: resource_types.ResourceTypes,
                 dispatcher: dispatch.Dispatch, opening: LeaseOpening,
                 kept: kept_servers.KeptServers) -> None:
        self._database = database
        self._clock = clock
        self._start_timeout = start_timeout
        self._types = types
        self._dispatcher = dispatcher
        self._opening = opening
        self._kept = kept

    def read(self, lease_ids: ty.Collection[str]) -> dict[str, Read]:
        """Read what is needed to start leases, of those that exist.

        Costs few statements, however many leases there are.
        """
        now = self._clock.now()
        with self._database.reader() as session:
            leases = {one.id: one for one in api.whole(session, lease_ids)}
            encrypted = dispatch.encrypted_call(session, leases)
            due = [one for one in leases.values()
                   if one.status in states.TO_START]
            crowded, booting = self._crowded(session, {
                booking.host_id for one in due
                if now < one.start_date + self._start_timeout
                for booking in one.bookings}, now)
            outside = {one.id: hosted_servers.why_not_of(session, one) or (
                exclusive.why_wait(session, one)) for one in due}
        return {lease_id: Read(
            lease, encrypted.get(lease_id),
            not crowded.isdisjoint(hosts)
            and now < lease.start_date + self._start_timeout,
            outside.get(lease_id, ''), not booting.isdisjoint(hosts))
            for lease_id, lease in leases.items()
            for hosts in [{one.host_id for one in lease.bookings}]}

    def start(self, lease_id: str, when_due: bool = False,
              read: Read | None = None) -> retries.Result:
        """Send the stored call of a lease for its servers that wait.

        Each server is sent once; a server that Nova could not place waits
        again.

        :param when_due: postpone if the lease was moved meanwhile
        :param read: what was just read of the lease; None: read it
        :raises NotFound: when the lease does not exist
        """
        read = read or self.read([lease_id]).get(lease_id)
        if read is None:
            raise errors.NotFound(f'Lease {lease_id} could not be found.')
        lease, encrypted, now = read.lease, read.encrypted, self._clock.now()
        if lease.status not in states.TO_START or lease.end_date <= now:
            return None
        if when_due and lease.start_date > now:
            return retries.RetryAfter(lease.start_date - now,
                                      'its start was changed')
        waiting, kept = lease_status.waiting(lease), kept_servers.is_kept(
            lease, encrypted is not None)
        if not kept and lease_status.servers(lease) and (
                encrypted is None or not waiting):
            return None
        if not kept and lease_status.is_building(lease):
            return retries.wait(
                'its other servers are being built', shown=False)
        if read.crowded:
            return retries.RetryAfter(
                retries.AGAIN, 'its host is not empty yet',
                4 * retries.AGAIN,
                # Deleting servers one after the other takes some seconds.
                shown=now > lease.start_date + retries.UNAVAILABLE)
        if read.booting:
            self._await_boot(lease)
            return retries.RetryAfter(
                retries.AGAIN, 'its hosts are being switched on',
                4 * retries.AGAIN)
        if read.outside:
            self._explain(lease, read.outside)
            return retries.wait(read.outside, shown=False)
        if kept:
            return self._kept.resume(lease_id, when_due)
        if encrypted is None:
            return self._opening.begin(lease_id, when_due)
        fault_points.fault_point(fault_points.FaultPoint.START_READ, lease_id)
        try:
            why, all_sent = self._dispatcher.send_waiting(
                lease, encrypted, when_due)
        except errors.CloudUnavailable as exc:
            # Temporary errors do not fail the lease, however long they last.
            LOG.warning('Lease %s cannot start yet: %s', lease_id, exc)
            self._explain(lease, str(exc))
            return retries.wait(str(exc), shown=False)
        return None if all_sent else self._rest(lease_id, when_due, why)

    def _rest(self, lease_id: str, when_due: bool,
              why: str) -> retries.Result:
        """Handle the servers that were not sent."""
        now = self._clock.now()
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            waiting = lease_status.waiting(lease)
        if lease.status not in states.TO_START or not waiting:
            return None
        # Their build was prepared: show them as reserved again.
        self._dispatcher.hold(waiting)
        if when_due and lease.start_date > now:
            return retries.RetryAfter(lease.start_date - now,
                                      'its start was just changed')
        if why:
            LOG.warning('Lease %s: %s of its servers cannot start yet: %s',
                        lease_id, len(waiting), why)
            self._explain(lease, why)
            return retries.RetryAfter(retries.pause(lease, now), why)
        return retries.RetryAfter(
            retries.AGAIN, 'its servers have changed')

    def _explain(self, lease: models.Lease, why: str) -> None:
        """Record in a lease why its servers have not started yet."""
        def delayed(lease: models.Lease) -> list[conditions.Condition]:
            waiting = lease_status.waiting(lease)
            return [lease_conditions.put_off(waiting, why)] if waiting and (
                lease.status in states.TO_START) else []

        lease_conditions.explain(
            self._database, self._clock, lease.id, delayed, lease)

    def _await_boot(self, lease: models.Lease) -> None:
        """Say in a lease that its hosts are being switched on."""
        if conditions.is_set(lease.conditions, lease_conditions.BOOTING):
            return

        def booting(lease: models.Lease) -> list[conditions.Condition]:
            return [lease_conditions.BOOTING] if (
                lease.status in states.TO_START) else []

        lease_conditions.explain(
            self._database, self._clock, lease.id, booting)
        self._database.counters.add(WAITED)

    def _crowded(self, session: orm.Session, host_ids: set[int | None],
                 now: int) -> tuple[set[int], set[int]]:
        """Return the hosts that servers of ended leases have not left yet, and
        those that are switched off or boot.
        """
        found = session.execute(_IN_THE_WAY, {
            'hosts': host_ids, 'serverless': [*self._types.serverless],
            'now': now}).all() if host_ids else []
        return ({row.host_id for row in found if not row.off},
                {row.host_id for row in found if row.off})

    def give_up(self, lease_id: str, event_type: str,
                settle: ty.Callable[[orm.Session], bool] = lambda _: True,
                ) -> None:
        """Give up an event; a lease that cannot start has failed.

        Reservations that were opened are closed before their capacity is
        freed.

        :param settle: records the outcome of the event, in the transaction
            that records that of the lease; returns False when another worker
            has the event
        """
        why = 'The build of its servers could not be sent.'
        if event_type == states.EventType.START and (
                self._opening.undo(lease_id)):
            why = 'The reservation could not be made ready for use.'
        self._dispatcher.never_started(lease_id, why, settle, event_type)


#: Hosts with bookings that are over and whose servers have not left, and
#: hosts that are switched off. Bookings without servers always count, as
#: nothing shows whether they are still in use.
_IN_THE_WAY = sa.select(
    models.Booking.host_id, sa.false().label('off')).distinct().join(
    models.Booking.reservation).where(
        models.Booking.host_id.in_(sa.bindparam('hosts', expanding=True)),
        ledger.TAKES, sa.or_(
            models.Booking.claimed_at.is_not(None),
            models.Reservation.resource_type.in_(
                sa.bindparam('serverless', expanding=True))),
        models.Booking.end_date <= sa.bindparam('now')).union_all(
            sa.select(models.Host.id, sa.true()).where(
                models.Host.id.in_(sa.bindparam('hosts', expanding=True)),
                models.Host.power_state.in_(states.POWERED_OFF)))
