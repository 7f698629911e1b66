# SPDX-License-Identifier: Apache-2.0

"""Look up the leases and reservations of servers."""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import hosted_servers
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.plugins import end_policies

#: The lease of a server, its project, its reservation and its booking, and
#: whether that is a slot.
BOOKED = sa.select(
    models.Reservation.lease_id, models.Booking.host_id,
    models.Booking.failed_at, models.Lease.project_id,
    models.Booking.reservation_id,
    models.Reservation.params.is_not(None).label('in_slot'),
).join(models.Reservation.bookings).join(models.Reservation.lease).where(
    models.Booking.server_id == sa.bindparam('server'))

#: The columns by which a lease has ended.
_ENDED = (models.Lease.name, models.Lease.status, models.Lease.on_end,
          models.Lease.deleted_at, models.Lease.end_date,
          models.Lease.grace_period)
_ANY_ENDING = sa.select(models.Lease.id).where(
    models.Lease.status == states.Lease.TERMINATING).limit(1)
#: A reservation with bookings without servers, such as those of hosts.
_ENDING = sa.select(models.Reservation.lease_id, *_ENDED).join(
    models.Reservation.lease).where(
        models.Reservation.id == sa.bindparam('reservation'),
        models.Lease.status == states.Lease.TERMINATING,
        models.Reservation.bookings.any(models.Booking.server_id.is_(None)))


class Ended(ty.NamedTuple):
    """A lease that has ended and still has servers."""

    lease_id: str
    name: str
    on_end: str


def keeps_build(session: orm.Session, lease_id: str) -> bool:
    """Return whether the build of servers of a lease is still deferred, or is
    to be repeated.
    """
    build = session.get(models.DeferredBuild, lease_id)
    return build is not None and not build.only_if_lost


class Lookup:
    """Looks up servers and reservations in the reservation database."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def held(self, server_ids: ty.Collection[str],
             ) -> dict[str, dict[str, ty.Any]]:
        """Return the leases of servers whose builds have not been sent yet.

        :returns: by server, ``lease_id``, ``name``, ``project_id``,
            ``status`` as users see it, ``warnings``, and ``start_date`` and
            ``end_date`` in seconds since the epoch; ``failed_at`` (when its
            build is known to have failed; None: it has not) and the
            ``status_reason`` of its lease; other servers are omitted
        """
        lease = models.Lease
        with self._database.connection() as connection:
            rows = connection.execute(
                sa.select(models.Booking.server_id, lease.id, lease.name,
                          lease.project_id, lease.status, lease.deleted_at,
                          lease.start_date, lease.end_date, lease.warnings,
                          lease.conditions, models.Booking.failed_at)
                .join(models.Booking.reservation)
                .join(models.Reservation.lease)
                .where(models.Booking.server_id.in_(server_ids),
                       models.Booking.dispatched_at.is_(None))).all()
        return {row.server_id: {
            'lease_id': row.id, 'name': row.name,
            'project_id': row.project_id, 'status': views.status(row),
            'start_date': row.start_date, 'end_date': row.end_date,
            'warnings': row.warnings or [], 'failed_at': row.failed_at,
            'status_reason': conditions.status_reason(row.conditions),
        } for row in rows}

    def lease_of(self, server_id: str) -> dict[str, ty.Any] | None:
        """Return the lease that a server is in, as by :func:`views.describe`,
        and whether its build ``failed``; None: it is in no lease that is not
        over.
        """
        row = self.booked(server_id)
        try:
            return None if row is None else {
                **views.get(self._database, row.lease_id),
                'failed': row.failed_at is not None}
        except errors.NotFound:
            # It was deleted meanwhile.
            return None

    def get(self, lease_id: str) -> views.Lease:
        """Return a lease.

        :raises NotFound: if it does not exist or was deleted
        """
        return views.get(self._database, lease_id)

    def generation(self, lease_id: str) -> int:
        """Return a number that increases with each change of a lease.

        :raises NotFound: if it does not exist
        """
        with self._database.reader() as session:
            return api.found(session, lease_id).generation

    def keeps_build(self, lease_id: str) -> bool:
        """See :func:`keeps_build`."""
        with self._database.reader() as session:
            return keeps_build(session, lease_id)

    def is_leased(self, server_id: str) -> bool:
        """Return whether the server belongs to a lease that is not over."""
        return self.booked(server_id) is not None

    def booked(self, server_id: str) -> ty.Any:
        """Return the lease that a server is in, a row of :data:`BOOKED`; None:
        it is in no lease that is not over.
        """
        with self._database.connection() as connection:
            return connection.execute(BOOKED, {'server': server_id}).first()

    def ended(self, server_id: str, project_id: str) -> Ended | None:
        """Return the lease of a server whose end policy is, or is about to
        be, carried out; None: there is none of that project.

        :raises ClockSkewed: when the clock is wrong, and the lease has ended
            by that clock only
        """
        with self._database.connection() as connection:
            row = connection.execute(BOOKED.add_columns(*_ENDED), {
                'server': server_id}).first()
        return None if row is None or row.project_id != project_id else (
            self._ended(row))

    def any_ending(self) -> bool:
        """Return whether any lease is ending."""
        with self._database.connection() as connection:
            return connection.scalar(_ANY_ENDING) is not None

    def ended_hosts(self, reservation_id: str) -> Ended | None:
        """Return the lease of a reservation of hosts that are still booked, if
        the lease has ended.

        :raises ClockSkewed: see :meth:`ended`
        """
        with self._database.connection() as connection:
            row = connection.execute(_ENDING, {
                'reservation': reservation_id}).one_or_none()
        return None if row is None else self._ended(row)

    def _ended(self, row: ty.Any) -> Ended | None:
        if row.status != states.Lease.TERMINATING or (
                row.deleted_at is None and row.grace_period):
            if row.end_date + row.grace_period > self._clock.now():
                return None
            self._database.check_clock()
        return Ended(row.lease_id, row.name, row.on_end if
                     row.deleted_at is None else end_policies.DELETE)

    def reservation(self, reservation_id: str, project_id: str | None,
                    anyones: bool = False) -> str | None:
        """Return the resource type of a reservation that a project owns or
        shares.

        :param project_id: None: of an unscoped token
        :param anyones: of any project
        :returns: None: it is not a reservation of the project, or it is over
        """
        if not reservation_id.isprintable():
            # Databases do not accept every string that JSON allows.
            return None
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Reservation.resource_type,
                          models.Reservation.params, models.Lease.project_id)
                .join(models.Lease)
                .where(models.Reservation.id == reservation_id,
                       models.Reservation.status !=
                       states.Reservation.DELETED)).one_or_none()
        if row is None or not anyones and project_id not in (
                row.project_id, *(row.params or {}).get('projects', ())):
            return None
        return ty.cast(str, row.resource_type)

    def within(self, name_or_id: str, project_id: str) -> list[str]:
        """Return the ids of the reservations of hosts in those leases of a
        project that have a name or an id and are not over.
        """
        if not name_or_id.isprintable():
            return []
        with self._database.reader() as session:
            return [one.id for one in session.scalars(
                sa.select(models.Reservation).join(models.Lease).where(
                    sa.or_(models.Lease.id == name_or_id,
                           models.Lease.name == name_or_id),
                    models.Lease.project_id == project_id,
                    models.Reservation.status !=
                    states.Reservation.DELETED).order_by(
                        models.Reservation.id)) if one.whole]

    def why_not_within(self, reservation_id: str, project_id: str,
                       lease: requests.LeaseRequest | None = None,
                       ) -> str | None:
        """Return why servers of a project may not use a reservation of whole
        hosts: see :func:`hosted_servers.why_not`.

        :param lease: the servers' own lease
        """
        with self._database.reader() as session:
            return hosted_servers.why_not(
                session, reservation_id, project_id, *(
                    () if lease is None else (
                        lease.window, not lease.starts_now)))

    def lease_status(self, reservation_id: str) -> tuple[str, str] | None:
        """Return the name and the status of the lease of a reservation; None:
        it does not exist any longer.
        """
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Lease.name, models.Lease.status)
                .join(models.Reservation)
                .where(models.Reservation.id == reservation_id)).one_or_none()
        return None if row is None else (row.name, row.status)

    def next_of_kept(self, server_id: str, project_id: str | None,
                     ) -> tuple[models.Lease, model.Resources] | None:
        """Return the next occurrence of the series that keeps a server, and
        the resources of the server's booking there; None: there is none.

        :param project_id: of the series; None: any
        """
        with self._database.reader() as session:
            for lease, servers in session.execute(
                    sa.select(models.Lease, models.Recurrence.servers).join(
                        models.Recurrence, models.Recurrence.id ==
                        models.Lease.recurrence_id).where(
                            models.Recurrence.between != end_policies.DELETE,
                            models.Lease.status.in_(states.TO_START),
                            sa.true() if project_id is None else
                            models.Lease.project_id == project_id).order_by(
                                models.Lease.start_date)):
                if server_id in servers:
                    return lease, dict(lease.reservations[0].resources)
        return None

    def hosts_within(self, reservation_id: str) -> frozenset[str]:
        """Return the uuids of the hosts that are booked for a reservation."""
        with self._database.reader() as session:
            return hosted_servers.hosts(session, reservation_id)

    def hosts(self, reservation_ids: ty.Collection[str],
              ) -> dict[str, list[hosted_servers.Host]]:
        """Return the hosts that are booked for reservations, sorted by name.
        """
        with self._database.reader() as session:
            return hosted_servers.booked(session, reservation_ids)

    def holder_of(self, service_host: str) -> tuple[bool, str | None]:
        """Return whether a host serves leases only, and the reservation that
        it is assigned to now.
        """
        with self._database.reader() as session:
            rows = session.execute(sa.select(
                models.Host.enrollment, models.Host.assigned_to).where(
                    models.Host.service_host == service_host)).all()
        return (any(row.enrollment for row in rows),
                next((row.assigned_to for row in rows if row.assigned_to),
                     None))

    def bookings(self, server_ids: ty.Collection[str],
                 ) -> dict[str, tuple[str, model.Window]]:
        """Return the bookings of servers on hosts.

        :returns: by server, the uuid of the host, and the window in which the
            server is there: without an end if it stays when its lease ends, or
            still exists after that
        """
        booking, now = models.Booking, self._clock.now()
        with self._database.reader() as session:
            rows = session.execute(
                sa.select(booking.server_id, models.Host.uuid,
                          booking.start_date, booking.end_date,
                          booking.claimed_at, models.Lease.on_end)
                .join(models.Host, booking.host_id == models.Host.id)
                .join(booking.reservation).join(models.Reservation.lease)
                .where(booking.server_id.in_(server_ids))).all()
        return {row.server_id: (row.uuid, end_policies.stay(
            model.Window(row.start_date, row.end_date),
            '' if row.claimed_at is not None and row.end_date <= now
            else row.on_end)) for row in rows}

    def hosts_of_services(self, service_hosts: ty.Collection[str],
                          ) -> dict[str, str]:
        """Return the hosts of some service hosts.

        :returns: the service host by the uuid of the host
        """
        with self._database.reader() as session:
            return {uuid: service_host for uuid, service_host in
                    session.execute(sa.select(
                        models.Host.uuid, models.Host.service_host).where(
                        models.Host.service_host.in_(service_hosts)))}
