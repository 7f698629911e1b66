# SPDX-License-Identifier: Apache-2.0

"""Remove servers from their leases: deleted ones, and those that stay."""

import contextlib
import typing as ty

from oslo_log import log as logging
from sqlalchemy import orm

from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_status
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)


#: Maximum number of attempts to remove servers while their lease changes.
_TRIES = 5


class _Possible(Exception):
    """Raised to roll back a trial that has succeeded."""


class _Changed(Exception):
    """The lease has changed since the cloud was asked about its servers."""


class ServerRemoval:
    """Removes servers from their leases.

    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify,
                 closer: lease_close.LeaseClose) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify
        self._closer = closer

    def gone(self, lease_id: str, server_id: str) -> None:
        """Free the capacity of a server that is gone; the last server ends
        its lease.
        """
        if self._free(lease_id, server_id):
            self._freed(lease_id, server_id, 'is gone')

    def remove_server(self, lease_id: str, server_id: str,
                      is_there: bool) -> bool:
        """Remove a server that stays from its lease, which is over, unless its
        deletion was requested meanwhile.

        :param is_there: whether it is on its host
        :returns: False: it is, and has no capacity there indefinitely
        """
        freed = self._free(lease_id, server_id, True, is_there)
        if freed:
            self._freed(lease_id, server_id,
                        'is removed and keeps running without a lease')
        return freed is not False

    def _freed(self, lease_id: str, server_id: str, how: str) -> None:
        LOG.info('Lease %s: server %s %s', lease_id, server_id, how)
        fault_points.fault_point(fault_points.FaultPoint.END_GONE, lease_id)
        self._closer.finish_if_empty(lease_id)

    def leave(self, lease_id: str, server_ids: ty.Collection[str],
              is_on_host: ty.Callable[[str], bool]) -> dict[str, ty.Any]:
        """Remove servers, which stay, from a lease that continues: all, or
        none. The lease ends with the last of its servers.

        :param server_ids: those to remove
        :param is_on_host: returns whether a server is on its host, and raises
            if it cannot be removed in its state
        :returns: the lease without them
        :raises NotFound: when there is no lease of that id
        :raises Conflict: when one of them cannot be removed; says what to do
        :raises CloudUnavailable: when the cloud cannot release one now
        """
        for _try in range(_TRIES):
            with contextlib.suppress(_Changed):
                described = self._leave_once(
                    lease_id, server_ids, is_on_host)
                break
        else:
            raise errors.Conflict(
                f'Lease {lease_id} changes at the moment: one of its servers '
                'is started, moved or deleted. Try again.',
                errors.ConflictReason.CHANGED)
        LOG.info('Lease %s: servers %s are removed and keep running without a '
                 'lease', lease_id, ', '.join(sorted(server_ids)))
        self._notify('lease.update', described | {
            'changed': ['reservations'],
            'reason': conditions.Reason.SERVERS_REMOVED})
        self._closer.finish_if_empty(lease_id)
        return described

    def _leave_once(self, lease_id: str, server_ids: ty.Collection[str],
                    is_on_host: ty.Callable[[str], bool]) -> views.Lease:
        """
        :raises _Changed: when the lease has changed meanwhile
        """
        with self._database.reader() as session:
            seen = api.found(session, lease_id).generation
        servers = {one: is_on_host(one) for one in server_ids}
        with contextlib.suppress(_Possible):
            # A refused removal changes nothing in the cloud.
            self._leave(lease_id, servers, seen, True)
        for server_id in sorted(servers):
            # Before it is recorded: if the process dies after this, the server
            # is still recorded in its lease, and ends with it.
            self._cloud.release(server_id)
        return self._leave(lease_id, servers, seen)

    @api.retried
    def _leave(self, lease_id: str, servers: ty.Mapping[str, bool],
               seen: int, tried: bool = False) -> views.Lease:
        """Remove servers from the reservation database.

        :param servers: those to remove, and whether each is on its host
        :param seen: the generation of the lease before the cloud was asked:
            each claim for one of its servers increases it
        :param tried: only find out whether it is possible
        :raises _Possible: when it is
        :raises _Changed: when the lease has changed since then
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if api.changed_since(lease, seen):
                raise _Changed
            for booking in _leaving(lease, servers, self._clock.now()):
                is_there = servers[str(booking.server_id)]
                if is_there and not self._has_room(session, booking):
                    raise errors.Conflict(
                        f'Server {booking.server_id} cannot be removed from '
                        f'lease {lease_id}: its capacity on its host is '
                        'reserved by later leases. Extend the lease, or '
                        'migrate the server.',
                        errors.ConflictReason.NO_CAPACITY)
                self._take_out(session, booking, None, is_there)
            if tried:
                raise _Possible
            _forget(session, lease, servers)
            session.flush()
            session.expire_all()
            _count_again(session, lease)
            events.charge(session, lease, self._clock.now())
            lease_status.update_status(session, lease, self._clock.now())
            return views.refreshed(session, lease)

    @api.retried
    def _free(self, lease_id: str, server_id: str, stays: bool = False,
              is_there: bool = False) -> bool | None:
        """Free the capacity of a server.

        A slot that existed before its server remains: another server may take
        it, until the lease is ending.

        :returns: whether it is freed. None: it is no longer of the lease;
            False: the server is to stay, and cannot
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = lease_status.booking_of(session, server_id)
            if booking is None or booking.reservation.lease_id != lease_id or (
                    stays and lease.deleted_at is not None):
                # It may be in the next occurrence of its lease by now.
                return None
            if is_there and not self._has_room(session, booking):
                return False
            left = None
            if not booking.reservation.booted and (
                    lease.status not in states.ENDING):
                left = ledger.new_of(
                    booking, server_id=None, running=False, dispatched_at=None,
                    claimed_at=None, resources=booking.reservation.resources)
            self._take_out(session, booking, left, is_there)
            lease_status.update_status(session, lease, self._clock.now())
            return True

    def _take_out(self, session: orm.Session, booking: models.Booking,
                  left: ledger.NewBooking | None, is_there: bool) -> None:
        """Take a server from its booking, and count what it uses if it stays.

        :param left: what remains of its booking
        """
        host_id, server_id = booking.host_id, booking.server_id
        takes = dict(booking.resources)
        if server_id is not None:
            exclusive.drop(booking.reservation, server_id)
        ledger.amend(session, self._clock.now(),
                     [ledger.Edit(booking, left)])
        if left is not None:
            booking.failed_at = booking.migrating_to = None
        if is_there and host_id is not None and server_id is not None:
            session.flush()
            inventory.keep(session.connection(), self._clock.now(),
                           host_id, server_id, takes)

    def _has_room(self, session: orm.Session, booking: models.Booking,
                  ) -> bool:
        """Return whether a server may stay on its host indefinitely; if so,
        its booking has no end from now on.
        """
        try:
            ledger.amend(session, self._clock.now(), [ledger.Edit(
                booking, ledger.new_of(booking, window=model.Window(
                    booking.start_date, model.FOREVER),
                    among=model.HostPool.COMMON))])
        except ledger.OverCapacity:
            return False
        session.flush()
        return True


def _forget(session: orm.Session, lease: models.Lease,
            server_ids: ty.Collection[str]) -> None:
    """Do not keep removed servers for other occurrences of a lease."""
    kept = None if lease.recurrence_id is None else session.get(
        models.Recurrence, lease.recurrence_id)
    if kept is not None:
        kept.servers = [one for one in kept.servers if one not in server_ids]


def _leaving(lease: models.Lease, server_ids: ty.Collection[str], now: int,
             ) -> list[models.Booking]:
    """Return the bookings of servers that are to be removed from a lease.

    :raises Conflict: when one of them cannot be removed; says what to do
    """
    if not lease.is_active(now):
        raise errors.Conflict(
            f'Lease {lease.id} is {views.status(lease)}: servers can be '
            'removed only while a lease is ACTIVE, before its end.')
    own = {row.server_id: row for row in lease.bookings
           if row.reservation.booted and row.running and
           hosted_servers.of(row.reservation) is None}
    for server_id in server_ids:
        if server_id not in own:
            raise errors.Conflict(
                f'Server {server_id} cannot be removed from lease {lease.id}: '
                'it does not run in it, or it was booted into a reservation.')
    return [own[server_id] for server_id in sorted(server_ids)]


def _count_again(session: orm.Session, lease: models.Lease) -> None:
    """Update the amounts of a lease without the removed servers. A lease
    without servers keeps its amounts.
    """
    if not lease.bookings:
        return
    for one in lease.reservations:
        one.amount = len(one.bookings)
        if not one.bookings:
            session.delete(one)
