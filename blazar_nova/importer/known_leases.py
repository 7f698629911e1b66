# SPDX-License-Identifier: Apache-2.0

"""Import leases that were created elsewhere, unchanged.

Ids, dates and hosts are given and not searched for. The capacity rule holds:
an import that would overbook a host is refused.
"""

import collections
import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.capacity import usage_records
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

_BOOKINGS = models.Booking.__table__
_HOSTS = models.Host.__table__


class KnownServer(ty.NamedTuple):
    """A server that uses a reservation slot.

    :ivar host_id: its host; None: on no host now
    :ivar running: whether it was built
    """

    id: str
    host_id: int | None
    running: bool


@dataclasses.dataclass(frozen=True, slots=True)
class KnownReservation:
    """A number of whole hosts, or of slots for servers.

    :ivar params: the requested parameters, as in the API
    :ivar host_ids: ids of its hosts, one for each slot; None: the host is
        missing
    :ivar moved_at: when its hosts were last replaced
    :ivar resources: what it has of each host
    :ivar spec: additional data of its resource type
    :ivar servers: the servers in its slots
    """

    id: str
    resource_type: str
    params: ty.Mapping[str, ty.Any]
    host_ids: tuple[int | None, ...]
    moved_at: int | None
    created_at: int
    updated_at: int
    resources: model.Resources = dataclasses.field(
        default_factory=lambda: model.WHOLE)
    spec: ty.Mapping[str, ty.Any] = dataclasses.field(default_factory=dict)
    servers: tuple[KnownServer, ...] = ()

    @property
    def whole(self) -> bool:
        """Return whether it has whole hosts."""
        return model.HOST in self.resources


class KnownEvent(ty.NamedTuple):
    """An event; ``status`` is one of :class:`states.Event`."""

    id: str
    event_type: str
    time: int
    status: str


@dataclasses.dataclass(frozen=True, slots=True)
class KnownLease:
    """A lease that has not ended.

    :ivar active: whether it has started, so that its hosts are assigned to it
    :ivar cleaning_time: seconds for which its capacity stays reserved after
        its end
    :ivar servers: servers on its whole hosts, which may have no others
    """

    id: str
    name: str
    project_id: str
    user_id: str
    window: model.Window
    active: bool
    cleaning_time: int
    created_at: int
    updated_at: int
    reservations: tuple[KnownReservation, ...]
    events: tuple[KnownEvent, ...]
    servers: frozenset[str] = frozenset()

    @property
    def booked(self) -> model.Window:
        """The window over which its capacity is reserved."""
        return model.Window(
            self.window.start, self.window.end + self.cleaning_time)

    @property
    def host_ids(self) -> set[int]:
        """The ids of all its hosts."""
        return {host_id for one in self.reservations
                for host_id in one.host_ids if host_id is not None}

    @property
    def served(self) -> dict[int, set[str]]:
        """The servers in its slots, by the id of their host."""
        found: dict[int, set[str]] = collections.defaultdict(set)
        for one in self.reservations:
            for server in one.servers:
                if server.host_id is not None:
                    found[server.host_id].add(server.id)
        return dict(found)


class LeaseImport:
    """Writes leases that were created elsewhere into the database."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._types = types

    def adopt(self, known: KnownLease) -> bool:
        """Write a lease and everything that belongs to it, or nothing.

        Limits are not checked, as the lease was granted where it was created.

        :returns: whether it did not exist yet
        :raises Conflict: if a host is not enrolled, has too little capacity or
            other servers, or if there are more servers than slots
        """
        adopted = self._database.retried(self._adopt, known)
        if adopted:
            LOG.info('Lease %s (%s) of project %s was imported: from %s to %s',
                     known.id, known.name, known.project_id,
                     clocks.iso(known.window.start),
                     clocks.iso(known.window.end))
        return adopted

    def _adopt(self, known: KnownLease) -> bool:
        with self._database.writer() as session:
            connection = session.connection()
            api.lock_project(connection, known.project_id)
            now = self._clock.now()
            if session.get(models.Lease, known.id) is not None:
                return False
            _check_enrolled(session, known)
            try:
                if known.active:
                    assignments.absorb_servers(session, now, {
                        host_id for one in known.reservations if one.whole
                        for host_id in one.host_ids if host_id is not None},
                        known.servers)
                    assignments.convert_usage(session, now, known.served)
                edits = ledger.decide(connection, now, _edits(known, now))
                for table, rows in self._rows(known, now):
                    if rows:
                        connection.execute(table.insert(), rows)
                ledger.add(connection, now, edits, _owners(known))
                if known.active:
                    assignments.assign(session, now, api.found(
                        session, known.id).reservations)
            except ledger.OverCapacity as exc:
                # A retry would find the host as full.
                raise errors.Conflict(
                    _in_the_way(session, known, exc.host_id)) from exc
            except assignments.HostInUse as exc:
                raise errors.Conflict(
                    f'{str(exc)[0].upper()}{str(exc)[1:]}.') from exc
        return True

    def _rows(self, known: KnownLease, now: int,
              ) -> list[tuple[ty.Any, list[dict[str, ty.Any]]]]:
        """Return the rows to insert, by table."""
        status = states.Reservation.ACTIVE if known.active else (
            states.Reservation.PENDING)
        return [(models.Lease.__table__, [{
            'id': known.id, 'name': known.name,
            'project_id': known.project_id, 'user_id': known.user_id,
            'start_date': known.window.start, 'end_date': known.window.end,
            'before_end_date': max((
                one.time for one in known.events
                if one.event_type == states.EventType.BEFORE_END),
                default=None),
            'on_end': end_policies.DELETE,
            'cleaning_time': known.cleaning_time,
            'status': states.Lease.ACTIVE if known.active else (
                states.Lease.PENDING),
            'created_at': known.created_at, 'updated_at': known.updated_at,
            'lease_type': requests.LeaseType.IMMEDIATE
            if known.window.start <= known.created_at
            else requests.LeaseType.SCHEDULED,
            # Whether it was ever used is unknown; a started one counts so.
            'used_at': now if known.active else None,
        }]), (models.Reservation.__table__, [{
            'id': one.id, 'lease_id': known.id,
            'resource_type': one.resource_type, 'amount': len(one.host_ids),
            'resources': dict(one.resources), 'status': status,
            'params': dict(one.params), 'spec': dict(one.spec),
            'moved_at': one.moved_at, 'created_at': one.created_at,
            'updated_at': one.updated_at,
        } for one in known.reservations]),
            (models.Event.__table__, self._events(known, now))]

    def _events(self, known: KnownLease, now: int) -> list[dict[str, ty.Any]]:
        """Return its events, and those that every lease has."""
        rows = [{
            **events.row(known.id, one.event_type, one.time, now),
            'id': one.id, 'status': one.status} for one in known.events]
        wanted: dict[str, int] = {
            states.EventType.START: known.window.start,
            states.EventType.END: known.window.end,
            **self._types.events([
                (one.resource_type, False) for one in known.reservations],
                known.window)}
        there = {one.event_type for one in known.events}
        return [*rows, *(
            events.row(known.id, event_type, time, now, done=known.active and
                       event_type == states.EventType.START)
            for event_type, time in wanted.items()
            if event_type not in there)]


def _owners(known: KnownLease) -> dict[str, usage_records.Owner]:
    """Return the owners of its reservations, whose records start now."""
    return {one.id: usage_records.Owner(
        known.id, known.project_id, one.resource_type)
        for one in known.reservations}


def _edits(known: KnownLease, now: int) -> list[ledger.Edit]:
    """Return the bookings, on exactly the hosts that it has.

    :raises Conflict: if there are more servers than slots
    """
    return [ledger.Edit(None, booking) for one in known.reservations
            for booking in _bookings(known, one, now)]


def _bookings(known: KnownLease, of: KnownReservation, now: int,
              ) -> list[ledger.NewBooking]:
    """Return the bookings of a reservation. A server gets a booking on its
    host, or any if it is on no host.
    """
    free = [ledger.NewBooking(of.id, host_id, None, known.booked, of.resources)
            for host_id in of.host_ids]
    taken = []
    for server in sorted(of.servers, key=lambda one: one.host_id is None):
        place = next((one for one in free if server.host_id in (
            None, one.host_id)), None)
        if place is None:
            raise errors.Conflict(
                f'Server {server.id} has no slot in reservation {of.id} on '
                'its host. Delete it, or another server there.')
        free.remove(place)
        taken.append(dataclasses.replace(
            place, server_id=server.id, running=server.running,
            dispatched_at=now, claimed_at=now))
    return [*taken, *free]


def _check_enrolled(session: orm.Session, known: KnownLease) -> None:
    """Check that all hosts are enrolled, regardless of whether they are
    reservable, as this reservation exists already.

    :raises Conflict: if one is not
    """
    for row in session.execute(sa.select(_HOSTS.c.name, _HOSTS.c.enrollment)
                               .where(_HOSTS.c.id.in_(known.host_ids))
                               .order_by(_HOSTS.c.id)):
        if row.enrollment != states.Enrollment.ENROLLED:
            raise errors.Conflict(f'Host {row.name} is not enrolled.')


def _in_the_way(session: orm.Session, known: KnownLease, host_id: int) -> str:
    """Return why a host has too little free capacity for a lease."""
    name = session.scalar(
        sa.select(_HOSTS.c.name).where(_HOSTS.c.id == host_id))
    others = session.scalars(
        sa.select(models.Reservation.lease_id).distinct().join(
            _BOOKINGS, _BOOKINGS.c.reservation_id == models.Reservation.id)
        .where(_BOOKINGS.c.host_id == host_id,
               models.Reservation.lease_id != known.id,
               _BOOKINGS.c.start_date < known.booked.end,
               ledger.is_held(known.booked.start))
        .order_by(models.Reservation.lease_id)).all()
    why = f'it is booked in that window by lease {", ".join(others)}.' if (
        others) else 'it is too small, or has servers without a lease.'
    return f'Host {name} has no capacity for it: {why}'
