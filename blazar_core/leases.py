#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Leases: how they are made, found, and told to others."""

import dataclasses
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core import books
from blazar_core import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import model
from blazar_core import params
from blazar_core import states

__all__ = ['Leases', 'NewLease', 'describe', 'RESOURCE_TYPE']

LOG = logging.getLogger(__name__)

#: What the reservations of leases made by a boot are.
RESOURCE_TYPE = 'virtual:instance'


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to be made for servers that are about to be built."""

    project_id: str
    user_id: str
    request: params.LeaseRequest
    demand: model.Demand
    server_ids: tuple[str, ...]


class Leases:
    """The leases in the books."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def create(self, new: NewLease, sealed: str | None) -> dict[str, ty.Any]:
        """Admit a lease: all of its servers, or nothing is written.

        :param sealed: the call to be sent at its start; None when the caller
            sends it now, and the lease starts with that
        :returns: the lease, as :func:`describe` has it
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        """
        lost: set[int] = set()

        def attempt() -> dict[str, ty.Any]:
            try:
                with self._database.writer() as session:
                    return self._create(session, new, sealed, lost)
            except api.LostRace as race:
                # Somebody else is busy there: look elsewhere first.
                lost.add(race.host_id)
                raise

        lease = self._database.retried(attempt)
        LOG.info('Lease %s (%s) of project %s: %s from %s to %s, servers %s',
                 lease['id'], lease['name'], new.project_id, lease['status'],
                 lease['start_date'], lease['end_date'],
                 ', '.join(new.server_ids))
        return lease

    def _create(self, session: orm.Session, new: NewLease,
                sealed: str | None, lost: ty.Container[int],
                ) -> dict[str, ty.Any]:
        now = self._clock.now()
        window = new.request.window
        hosts = books.choose(session, new.demand, window, now, last=lost)
        lease = _lease_row(new, now, started=sealed is None)
        reservation = lease.reservations[0]
        # The hosts first: who loses the race should lose it at once.
        books.take(session, hosts)
        session.add(lease)
        session.flush()
        session.add_all(
            books.booking_row(reservation.id, window, new.demand.resources,
                              server_id, host)
            for server_id, host in zip(new.server_ids, hosts, strict=True))
        if sealed is not None:
            session.add(models.HeldBuild(
                lease_id=lease.id, state=models.HeldBuild.HELD,
                sealed=sealed, created_at=now))
        session.flush()
        return describe(lease)

    def withdraw(self, lease_id: str) -> None:
        """Take a lease out of the books whose servers were never asked for.

        For the one who made it and then could not go on; safe to call twice.
        """
        self._database.retried(self._withdraw, lease_id)

    def _withdraw(self, lease_id: str) -> None:
        with self._database.writer() as session:
            lease = session.get(models.Lease, lease_id)
            if lease is None:
                return
            for reservation in lease.reservations:
                books.disturb(session, [
                    booking.host_id for booking in reservation.bookings])
                for booking in reservation.bookings:
                    session.delete(booking)
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            session.flush()
            for row in (*lease.reservations, *lease.events):
                session.delete(row)
            session.flush()
            session.delete(lease)

    def held_by(self, server_id: str) -> dict[str, str] | None:
        """The lease that holds a server which has not been started yet.

        :returns: ``lease_id``, ``name``, ``project_id`` and ``start_date``
            of it, or None when the server is not held
        """
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Lease.id, models.Lease.name,
                          models.Lease.project_id, models.Lease.start_date)
                .join(models.Reservation).join(models.Booking)
                .join(models.HeldBuild,
                      models.HeldBuild.lease_id == models.Lease.id)
                .where(models.Booking.server_id == server_id,
                       models.HeldBuild.state == models.HeldBuild.HELD)
            ).first()
        if row is None:
            return None
        return {'lease_id': row.id, 'name': row.name,
                'project_id': row.project_id,
                'start_date': clocks.minute(row.start_date)}

    def is_leased(self, server_id: str) -> bool:
        """Whether the server belongs to a lease that is not over."""
        with self._database.reader() as session:
            return session.execute(
                sa.select(models.Booking.id).where(
                    models.Booking.server_id == server_id)).first() is not None

    def reservation(self, reservation_id: str, project_id: str) -> str | None:
        """The resource type of a project's reservation.

        :returns: None when the project has none of that id, or it is over
        """
        with self._database.reader() as session:
            return session.scalars(
                sa.select(models.Reservation.resource_type)
                .join(models.Lease)
                .where(models.Reservation.id == reservation_id,
                       models.Lease.project_id == project_id,
                       models.Reservation.status != 'deleted')).one_or_none()

    def booked_hosts(self, server_ids: ty.Collection[str]) -> set[str]:
        """The uuids of the hosts on which these servers have bookings."""
        with self._database.reader() as session:
            return set(session.scalars(
                sa.select(models.Host.uuid).join(
                    models.Booking, models.Booking.host_id == models.Host.id)
                .where(models.Booking.server_id.in_(server_ids))))

    def hosts_of_services(self, service_hosts: ty.Collection[str],
                          ) -> set[str]:
        """The uuids of the hosts that these nova-computes run."""
        with self._database.reader() as session:
            return set(session.scalars(
                sa.select(models.Host.uuid).where(
                    models.Host.service_host.in_(service_hosts))))

    def get(self, lease_id: str) -> dict[str, ty.Any]:
        """One lease.

        :raises NotFound: when there is none of that id
        """
        with self._database.reader() as session:
            lease = session.get(models.Lease, lease_id)
            if lease is None:
                raise errors.NotFound(f'Lease {lease_id} could not be found.')
            return describe(lease)

    def reseal(self, again: ty.Callable[[str], str]) -> int:
        """Seal what is held again, with another key; returns how many."""
        with self._database.reader() as session:
            held = list(session.scalars(sa.select(models.HeldBuild.lease_id)))
        for lease_id in held:
            self._database.retried(self._reseal, lease_id, again)
        return len(held)

    def _reseal(self, lease_id: str, again: ty.Callable[[str], str]) -> None:
        with self._database.writer() as session:
            row = session.get(models.HeldBuild, lease_id,
                              with_for_update=True)
            if row is not None:
                row.sealed = again(row.sealed)

    def all(self, project_id: str | None = None) -> list[dict[str, ty.Any]]:
        """Leases by start, oldest first; of one project or of all."""
        query = sa.select(models.Lease).options(
            orm.selectinload(models.Lease.events),
            orm.selectinload(models.Lease.reservations).selectinload(
                models.Reservation.bookings))
        if project_id is not None:
            query = query.where(models.Lease.project_id == project_id)
        with self._database.reader() as session:
            return [describe(lease) for lease in session.scalars(
                query.order_by(models.Lease.start_date, models.Lease.id))]


def _lease_row(new: NewLease, now: int, started: bool) -> models.Lease:
    """The rows of a lease, its reservation and its events, not yet added."""
    request = new.request
    lease_id = uuidutils.generate_uuid()
    reservation = models.Reservation(
        id=uuidutils.generate_uuid(), resource_type=RESOURCE_TYPE,
        amount=new.demand.count, resources=dict(new.demand.resources),
        status='pending', created_at=now, updated_at=now)
    return models.Lease(
        id=lease_id, name=request.name or f'lease-{lease_id[:8]}',
        project_id=new.project_id, user_id=new.user_id,
        start_date=request.window.start, end_date=request.window.end,
        before_end_date=request.before_end, on_end=request.on_end,
        status='STARTING' if started else 'PENDING', status_reason='',
        created_at=now, updated_at=now, reservations=[reservation],
        events=[_event_row(event_type, time, started)
                for event_type, time in _events(request)])


def _events(request: params.LeaseRequest) -> list[tuple[str, int]]:
    events = [(states.EventType.START, request.window.start),
              (states.EventType.END, request.window.end)]
    if request.before_end is not None:
        events.append((states.EventType.BEFORE_END, request.before_end))
    events += [(event.event_type, event.time) for event in request.events]
    return events


def _event_row(event_type: str, time: int, started: bool) -> models.Event:
    done = started and event_type == states.EventType.START
    return models.Event(
        id=uuidutils.generate_uuid(), event_type=event_type, time=time,
        due=time, status='DONE' if done else 'UNDONE', attempts=0,
        claimed_until=0)


def describe(lease: models.Lease) -> dict[str, ty.Any]:
    """A lease in the API's words; no secrets in it."""
    return {
        'id': lease.id, 'name': lease.name, 'status': lease.status,
        'status_reason': lease.status_reason,
        'project_id': lease.project_id, 'user_id': lease.user_id,
        'start_date': clocks.iso(lease.start_date),
        'end_date': clocks.iso(lease.end_date),
        'created_at': clocks.iso(lease.created_at),
        'updated_at': clocks.iso(lease.updated_at),
        'reservations': [_describe_reservation(reservation)
                         for reservation in lease.reservations],
        'events': [{'id': event.id, 'lease_id': lease.id,
                    'event_type': event.event_type,
                    'time': clocks.iso(event.time), 'status': event.status}
                   for event in lease.events],
    }


def _describe_reservation(reservation: models.Reservation,
                          ) -> dict[str, ty.Any]:
    return {
        'id': reservation.id, 'lease_id': reservation.lease_id,
        'resource_type': reservation.resource_type,
        'status': reservation.status, 'amount': reservation.amount,
        'resources': dict(reservation.resources),
        'servers': [booking.server_id for booking in reservation.bookings],
    }
