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
import types
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core import admission as admissions
from blazar_core import books
from blazar_core import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import model
from blazar_core import params
from blazar_core import states

__all__ = ['Leases', 'NewLease', 'RESOURCE_TYPE', 'describe', 'listed',
           'reseal']

LOG = logging.getLogger(__name__)

#: What the reservations of leases made by a boot are.
RESOURCE_TYPE = 'virtual:instance'


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to be made for servers that are about to be built.

    :ivar credential: what lets us act for the user when it starts, sealed
    """

    project_id: str
    user_id: str
    request: params.LeaseRequest
    demand: model.Demand
    server_ids: tuple[str, ...]
    credential: str | None = None


class Leases:
    """The leases in the books."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission

    def check(self, new: NewLease) -> None:
        """Make sure that there is room now; books nothing.

        :raises Refused: when there is none; says why and when
        """
        self._admission.pick(new.demand, new.request.window)

    def create(self, new: NewLease, sealed: str | None) -> dict[str, ty.Any]:
        """Admit a lease: all of its servers, or nothing is written.

        :param sealed: the call to be sent at its start; None when the caller
            sends it now, and the lease starts with that
        :returns: the lease, as :func:`describe` has it
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        """
        lease = self._admission.admit(
            new.demand, new.request.window,
            lambda connection, host_ids: self._create(
                connection, new, sealed, host_ids))
        LOG.info('Lease %s (%s) of project %s: %s from %s to %s, servers %s',
                 lease['id'], lease['name'], new.project_id, lease['status'],
                 lease['start_date'], lease['end_date'],
                 ', '.join(new.server_ids))
        return lease

    def _create(self, connection: sa.Connection, new: NewLease,
                sealed: str | None, host_ids: ty.Sequence[int],
                ) -> dict[str, ty.Any]:
        rows = _rows(new, self._clock.now(), started=sealed is None)
        if sealed is not None:
            rows.held = [{
                'lease_id': rows.lease['id'], 'state': models.HeldBuild.HELD,
                'sealed': sealed, 'created_at': rows.lease['created_at']}]
        if new.credential is not None:
            rows.credentials = [{
                'lease_id': rows.lease['id'], 'sealed': new.credential,
                'created_at': rows.lease['created_at']}]
        return self._book(connection, rows, new, host_ids)

    def _book(self, connection: sa.Connection, rows: '_Rows', new: NewLease,
              host_ids: ty.Sequence[int]) -> dict[str, ty.Any]:
        """Write a lease and its bookings."""
        servers = new.server_ids or (None,) * new.demand.count
        edits = [books.Edit(None, books.NewBooking(
            rows.reservation['id'], host_id, server_id, new.request.window,
            new.demand.resources))
            for server_id, host_id in zip(servers, host_ids, strict=True)]
        books.decide(connection, self._clock.now(), edits)
        rows.insert(connection)
        books.add(connection, edits)
        return rows.describe(servers)

    # -- changing ------------------------------------------------------------

    def update(self, lease_id: str, start: int | None = None,
               end: int | None = None,
               resources: model.Resources | None = None,
               elsewhere: model.Demand | None = None) -> dict[str, ty.Any]:
        """Prolong, shorten, move or resize a lease: all of it, or nothing.

        Only a lease that has not started can be moved or resized.

        :param elsewhere: what its hosts must be like, if a lease that has
            not started may get other ones; None: it keeps those it has
        :returns: the lease as it is then
        :raises NotFound: when there is none of that id
        :raises InvalidLeaseParams: when that cannot be done to it; says why
        :raises Refused: when there is no room
        """
        return self._database.retried(
            self._update, lease_id, start, end, resources, elsewhere)

    def _update(self, lease_id: str, start: int | None, end: int | None,
                resources: model.Resources | None,
                elsewhere: model.Demand | None) -> dict[str, ty.Any]:
        try:
            return self._rewrite(lease_id, start, end, resources, {})
        except books.Full as full:
            with self._database.reader() as session:
                lease = _existing(session, lease_id)
                window = self._new_window(lease, start, end, resources)
                rows = _bookings(lease)
                elsewhere = elsewhere or self._where_it_is(session, rows,
                                                           resources)
            if lease.status in _BEGUN:
                # What runs stays where it is, and has started already.
                raise errors.Refused(model.Refusal(
                    model.Reason.NO_ROOM, len(rows), 0, None)) from full
        host_ids = self._admission.pick(elsewhere, window, instead_of=rows)
        if len(host_ids) != len(rows):
            raise errors.InvalidLeaseParams(
                f'Lease {lease_id} has {len(rows)} servers.')
        return self._rewrite(lease_id, start, end, resources, {
            row.id: host_id for row, host_id in zip(rows, host_ids)})

    def _where_it_is(self, session: orm.Session,
                     rows: ty.Sequence[models.Booking],
                     resources: model.Resources | None) -> model.Demand:
        """The demand of a lease that keeps to the hosts it has."""
        hosts = session.scalars(sa.select(models.Host.uuid).where(
            models.Host.id.in_({row.host_id for row in rows})))
        return model.Demand(resources or rows[0].resources, len(rows),
                            hosts=frozenset(hosts))

    def _new_window(self, lease: models.Lease, start: int | None,
                    end: int | None, resources: model.Resources | None,
                    ) -> model.Window:
        """The window that a lease would get.

        :raises InvalidLeaseParams: when it cannot get that
        """
        now = self._clock.now()
        begun = lease.status in _BEGUN
        if not begun and lease.status not in ('PENDING', 'OFFERED'):
            raise errors.InvalidLeaseParams(
                f'Lease {lease.id} is {lease.status}: it cannot be changed '
                f'any more.')
        if begun and (start not in (None, lease.start_date) or resources):
            raise errors.InvalidLeaseParams(
                f'Lease {lease.id} has started: only its end can be changed.')
        start = lease.start_date if start is None else start
        end = lease.end_date if end is None else end
        if end <= max(start, now) or not begun and start < now:
            raise errors.InvalidLeaseParams(
                'End date must be later than start date, and neither may lie '
                f'in the past: from {clocks.minute(start)} to '
                f'{clocks.minute(end)}, now it is {clocks.minute(now)} UTC.')
        return model.Window(start, end)

    def _rewrite(self, lease_id: str, start: int | None, end: int | None,
                 resources: model.Resources | None,
                 moved: ty.Mapping[int, int]) -> dict[str, ty.Any]:
        """Give a lease another window, amounts and hosts.

        :param moved: by booking, the host it gets; empty: where it is
        :raises Full: when there is no room for that on a host
        :raises LostRace: when it has other bookings meanwhile than ``moved``
        """
        with self._database.writer() as session:
            lease = _existing(session, lease_id)
            window = self._new_window(lease, start, end, resources)
            rows = _bookings(lease)
            if moved and (lease.status in _BEGUN or moved.keys() != {
                    row.id for row in rows}):
                raise api.LostRace(-1)
            books.amend(session, self._clock.now(), [books.Edit(
                row, books.new_of(
                    row, window=window,
                    host_id=moved.get(row.id, row.host_id),
                    resources=resources or row.resources)) for row in rows])
            for reservation in lease.reservations:
                reservation.resources = dict(
                    resources or reservation.resources)
            _redate(lease, window, self._clock.now())
            session.flush()
            return describe(lease)

    def rebind(self, server_id: str, host_id: int) -> None:
        """Give the booking of a server another host, if there is room.

        :raises NotFound: when the server has no booking
        :raises Refused: when there is no room
        """
        self._database.retried(self._rebind, server_id, host_id)

    def _rebind(self, server_id: str, host_id: int) -> None:
        with self._database.writer() as session:
            row = session.scalars(sa.select(models.Booking).where(
                models.Booking.server_id == server_id)).one_or_none()
            if row is None:
                raise errors.NotFound(
                    f'Server {server_id} belongs to no lease.')
            try:
                books.amend(session, self._clock.now(), [books.Edit(
                    row, books.new_of(row, host_id=host_id))])
            except books.Full as full:
                raise errors.Refused(model.Refusal(
                    model.Reason.NO_ROOM, 1, 0, None)) from full

    # -- offers --------------------------------------------------------------

    def offer(self, new: NewLease, seconds: int) -> dict[str, ty.Any]:
        """Hold room for a lease for so many seconds, to be accepted.

        :returns: the lease, OFFERED
        :raises Refused: when there is no room
        """
        # Nobody's servers yet: they would keep it from expiring.
        offered = dataclasses.replace(new, server_ids=())
        return self._admission.admit(
            offered.demand, offered.request.window,
            lambda connection, host_ids: self._offer(
                connection, offered, seconds, host_ids))

    def _offer(self, connection: sa.Connection, new: NewLease, seconds: int,
               host_ids: ty.Sequence[int]) -> dict[str, ty.Any]:
        now = self._clock.now()
        rows = _rows(new, now, started=False)
        rows.lease['status'] = 'OFFERED'
        rows.events = [_event(rows.lease['id'], states.EventType.EXPIRE,
                              now + seconds, started=False)]
        return self._book(connection, rows, new, host_ids)

    def accept(self, lease_id: str, request: params.LeaseRequest,
               ) -> dict[str, ty.Any]:
        """Make a lease of an offer.

        :raises NotFound: when there is no such offer (any more)
        """
        return self._database.retried(self._accept, lease_id, request)

    def _accept(self, lease_id: str, request: params.LeaseRequest,
                ) -> dict[str, ty.Any]:
        with self._database.writer() as session:
            lease = _existing(session, lease_id)
            if lease.status != 'OFFERED':
                raise errors.NotFound(
                    f'Offer {lease_id} could not be found; it may have '
                    f'expired. Ask for another one.')
            states.LEASE.check(lease.status, 'PENDING')
            lease.status = 'PENDING'
            lease.updated_at = self._clock.now()
            for event in lease.events:
                event.status = 'DONE'
            session.add_all(models.Event(**_event(
                lease.id, event_type, time, started=False))
                for event_type, time in _events(request))
            session.flush()
            session.expire(lease, ['events'])
            return describe(lease)

    def withdraw(self, lease_id: str) -> None:
        """Take a lease out of the books whose servers were never asked for.

        For the one who made it and then could not go on; safe to call twice.
        """
        self._database.retried(self._withdraw, lease_id)

    def _withdraw(self, lease_id: str) -> None:
        with self._database.writer() as session:
            # Locked: nobody adds to it any more what would keep it.
            lease = session.get(models.Lease, lease_id, with_for_update=True)
            if lease is None:
                return
            books.amend(session, self._clock.now(), [
                books.Edit(booking, None) for booking in _bookings(lease)])
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

    def all(self) -> list[dict[str, ty.Any]]:
        """All leases by start, oldest first."""
        return listed(self._database)


def listed(database: api.Database) -> list[dict[str, ty.Any]]:
    """All leases by start, oldest first."""
    query = sa.select(models.Lease).options(
        orm.selectinload(models.Lease.events),
        orm.selectinload(models.Lease.reservations).selectinload(
            models.Reservation.bookings))
    with database.reader() as session:
        return [describe(lease) for lease in session.scalars(
            query.order_by(models.Lease.start_date, models.Lease.id))]


def reseal(database: api.Database, again: ty.Callable[[str], str]) -> int:
    """Seal again, with another key, what is sealed; returns how many."""
    def one(table: type[models.HeldBuild | models.Credential],
            lease_id: str) -> None:
        with database.writer() as session:
            row = session.get(table, lease_id, with_for_update=True)
            if row is not None:
                assert isinstance(row, models.HeldBuild | models.Credential)
                row.sealed = again(row.sealed)

    count = 0
    tables: tuple[type[models.HeldBuild | models.Credential], ...] = (
        models.HeldBuild, models.Credential)
    for table in tables:
        with database.reader() as session:
            sealed = list(session.scalars(sa.select(table.lease_id)))
        for lease_id in sealed:
            database.retried(one, table, lease_id)
        count += len(sealed)
    return count


#: The states of a lease whose servers are being built or run.
_BEGUN = ('STARTING', 'ACTIVE')


def _bookings(lease: models.Lease) -> list[models.Booking]:
    return [row for reservation in lease.reservations
            for row in reservation.bookings]


def _existing(session: orm.Session, lease_id: str) -> models.Lease:
    lease = session.get(models.Lease, lease_id, with_for_update=True,
                        populate_existing=True)
    if lease is None:
        raise errors.NotFound(f'Lease {lease_id} could not be found.')
    return lease


def _redate(lease: models.Lease, window: model.Window, now: int) -> None:
    """Move a lease and its events; the user's own stay where they are."""
    moved = {states.EventType.START: window.start - lease.start_date,
             states.EventType.BEFORE_END: window.end - lease.end_date,
             states.EventType.END: window.end - lease.end_date}
    for event in list(lease.events):
        if event.event_type not in moved:
            continue
        time = event.time + moved[event.event_type]
        if event.status != 'DONE':
            event.time = event.due = time
        elif event.event_type == states.EventType.BEFORE_END and time > now:
            # It was told of an end that is none any more.
            lease.events.append(models.Event(**_event(
                lease.id, event.event_type, time, started=False)))
    if lease.before_end_date is not None:
        lease.before_end_date += window.end - lease.end_date
    lease.start_date, lease.end_date = window.start, window.end
    lease.updated_at = now


@dataclasses.dataclass
class _Rows:
    """The rows of a lease that is to be."""

    lease: dict[str, ty.Any]
    reservation: dict[str, ty.Any]
    events: list[dict[str, ty.Any]]
    held: list[dict[str, ty.Any]] = dataclasses.field(default_factory=list)
    credentials: list[dict[str, ty.Any]] = dataclasses.field(
        default_factory=list)

    def insert(self, connection: sa.Connection) -> None:
        """Write them."""
        for table, rows in ((models.Lease, [self.lease]),
                            (models.Reservation, [self.reservation]),
                            (models.Event, self.events),
                            (models.HeldBuild, self.held),
                            (models.Credential, self.credentials)):
            if rows:
                connection.execute(table.__table__.insert(), rows)

    def describe(self, servers: ty.Sequence[str | None],
                 ) -> dict[str, ty.Any]:
        """What :func:`describe` will say of them."""
        as_row = types.SimpleNamespace
        return describe(as_row(
            **self.lease,
            events=[as_row(**event) for event in sorted(
                self.events, key=lambda event: (event['time'], event['id']))],
            reservations=[as_row(**self.reservation, bookings=[
                as_row(server_id=server_id) for server_id in servers])]))


def _rows(new: NewLease, now: int, started: bool) -> _Rows:
    """What is to be written of a lease."""
    request = new.request
    lease_id = uuidutils.generate_uuid()
    return _Rows({
        'id': lease_id, 'name': request.name or f'lease-{lease_id[:8]}',
        'project_id': new.project_id, 'user_id': new.user_id,
        'start_date': request.window.start, 'end_date': request.window.end,
        'before_end_date': request.before_end, 'on_end': request.on_end,
        'status': 'STARTING' if started else 'PENDING', 'status_reason': '',
        'created_at': now, 'updated_at': now,
    }, {
        'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
        'resource_type': RESOURCE_TYPE, 'amount': new.demand.count,
        'resources': dict(new.demand.resources), 'status': 'pending',
        'created_at': now, 'updated_at': now,
    }, [_event(lease_id, event_type, time, started)
        for event_type, time in _events(request)])


def _events(request: params.LeaseRequest) -> list[tuple[str, int]]:
    events = [(states.EventType.START, request.window.start),
              (states.EventType.END, request.window.end)]
    if request.before_end is not None:
        events.append((states.EventType.BEFORE_END, request.before_end))
    events += [(event.event_type, event.time) for event in request.events]
    return events


def _event(lease_id: str, event_type: str, time: int, started: bool,
           ) -> dict[str, ty.Any]:
    done = started and event_type == states.EventType.START
    return {'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
            'event_type': event_type, 'time': time, 'due': time,
            'status': 'DONE' if done else 'UNDONE', 'attempts': 0,
            'claimed_by': None, 'claimed_until': 0}


def describe(lease: ty.Any) -> dict[str, ty.Any]:
    """A row of a lease in the API's words; no secrets in it."""
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


def _describe_reservation(reservation: ty.Any) -> dict[str, ty.Any]:
    return {
        'id': reservation.id, 'lease_id': reservation.lease_id,
        'resource_type': reservation.resource_type,
        'status': reservation.status, 'amount': reservation.amount,
        'resources': dict(reservation.resources),
        'servers': [booking.server_id for booking in reservation.bookings],
    }
