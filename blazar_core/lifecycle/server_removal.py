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

__all__ = ['ServerRemoval']

LOG = logging.getLogger(__name__)


class _Possible(Exception):
    """What was tried can be done, and is not."""


class ServerRemoval:
    """Takes servers out of their leases.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud,
                 notify: ty.Callable[[str, lease_status.Lease], None],
                 closer: lease_close.LeaseClose) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify
        self._closer = closer

    def gone(self, lease_id: str, server_id: str) -> None:
        """A server is gone: its room goes back."""
        self._database.retried(self._gone, lease_id, server_id)

    def remove_server(self, lease_id: str, server_id: str,
                      is_there: bool) -> bool:
        """A server that stays is no business of its lease, which is over;
        nothing where its deletion was asked for meanwhile.

        :param is_there: whether it is on its host
        :returns: False where it is, and there is no room for it for ever
        """
        return self._database.retried(
            self._gone, lease_id, server_id, True, is_there)

    def leave(self, lease_id: str, servers: ty.Mapping[str, bool],
              ) -> dict[str, ty.Any]:
        """Servers leave a lease that goes on, and stay: all, or none. The
        last of them takes it with it.

        :param servers: those that leave, and whether each is on its host
        :returns: the lease without them
        :raises NotFound: when there is no lease of that id
        :raises Conflict: when one of them cannot leave; says what to do
        :raises CloudUnavailable: when the cloud cannot let go of one now
        """
        with contextlib.suppress(_Possible):
            # Nothing is changed in the cloud by what is refused.
            self._database.retried(self._leave, lease_id, servers, True)
        for server_id in sorted(servers):
            # First: a process that dies after this leaves a server that is
            # in its lease by the books, and ends with it.
            self._cloud.release(server_id)
        described = self._database.retried(self._leave, lease_id, servers)
        LOG.info('Lease %s: servers %s are removed and keep running without a '
                 'lease', lease_id,
                 ', '.join(sorted(servers)))
        self._notify('lease.update', described | {
            'changed': ['reservations'],
            'reason': conditions.Reason.SERVERS_REMOVED})
        self._database.retried(self._closer.finish_if_empty, lease_id)
        return described

    def _leave(self, lease_id: str, servers: ty.Mapping[str, bool],
               tried: bool = False) -> lease_status.Lease:
        """
        :param tried: whether it is only seen if it can be done
        :raises _Possible: when it can
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            for booking in _leaving(lease, servers, self._clock.now()):
                is_there = servers[str(booking.server_id)]
                if is_there and not self._has_room(session, booking):
                    raise errors.Conflict(
                        f'Server {booking.server_id} cannot be removed from '
                        f'lease {lease_id}: its capacity on its host is '
                        'reserved by later leases. Extend the lease, or '
                        'migrate the server.')
                self._take_out(session, booking, None, is_there)
            if tried:
                raise _Possible
            _forget(session, lease, servers)
            session.flush()
            session.expire_all()
            _count_again(session, lease)
            events.charge(session, lease, self._clock.now())
            lease_status.update_status(session, lease, self._clock.now())
            session.flush()
            session.expire(lease)
            return views.describe(lease)

    def _gone(self, lease_id: str, server_id: str, stays: bool = False,
              is_there: bool = False) -> bool:
        """Give the room back; the last server takes its lease with it.

        What was there before the server stays: another one may take its
        place, until the lease is ending.

        :returns: False where it is to stay, and cannot
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = lease_status.booking_of(session, server_id)
            if booking is None or booking.reservation.lease_id != lease_id or (
                    stays and lease.deleted_at is not None):
                # By now it may be in the next occurrence of its lease.
                return True
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
        LOG.info('Lease %s: server %s %s', lease_id, server_id,
                 'is removed and keeps running without a '
                 'lease' if stays else 'is gone')
        fault_points.fault_point(fault_points.FaultPoint.END_GONE, lease_id)
        self._database.retried(self._closer.finish_if_empty, lease_id)
        return True

    def _take_out(self, session: orm.Session, booking: models.Booking,
                  left: ledger.NewBooking | None, is_there: bool) -> None:
        """A server has its booking no more, and counts if it is there.

        :param left: what is left of its booking
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
        """Whether a server may stay on its host for ever; it has its room
        there then.
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
    """Servers that leave are not kept for other occurrences of a lease."""
    kept = None if lease.recurrence_id is None else session.get(
        models.Recurrence, lease.recurrence_id)
    if kept is not None:
        kept.servers = [one for one in kept.servers if one not in server_ids]


def _leaving(lease: models.Lease, server_ids: ty.Collection[str], now: int,
             ) -> list[models.Booking]:
    """The bookings of servers that are to leave a lease.

    :raises Conflict: when one of them cannot leave; says what to do
    """
    if lease.status != states.Lease.ACTIVE or lease.deleted_at is not None or (
            lease.end_date <= now):
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
    """A lease without those that have left it. What it was is kept of one
    that nobody is left in.
    """
    if not lease.bookings:
        return
    for one in lease.reservations:
        one.amount = len(one.bookings)
        if not one.bookings:
            session.delete(one)
