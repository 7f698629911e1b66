# SPDX-License-Identifier: Apache-2.0

"""New leases and their rows."""

import collections
import dataclasses
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import ledger
from blazar_core.capacity import usage_records
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import exclusive
from blazar_core.leases import idempotency
from blazar_core.leases import limits
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.plugins import resource_types

#: Resource type of the reservations that a boot creates.
RESOURCE_TYPE = 'virtual:instance'


@dataclasses.dataclass(frozen=True, slots=True)
class NewReservation:
    """A reservation to create: a number of equal slots.

    :ivar server_ids: the servers of a boot, about to be built
    :ivar params: the requested parameters, as in the API; None: a boot
    :ivar spec: additional data of its resource type
    :ivar warnings: sentences about what is requested and not reserved
    :ivar leaving: ids of the hosts that it returns before its end
    """

    demand: model.Demand
    server_ids: tuple[str, ...] = ()
    resource_type: str = RESOURCE_TYPE
    params: ty.Mapping[str, ty.Any] | None = None
    spec: ty.Mapping[str, ty.Any] | None = None
    warnings: tuple[str, ...] = ()
    leaving: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to create.

    :ivar credential: to act for the user at its start, encrypted
    :ivar key: the idempotency key of the request
    :ivar granted: the result of the limits; None: there are none
    :ivar recurrence_id: the series that it is an occurrence of; None: none
    :ivar lease_id: the id under which the budget service has committed it;
        None: it has not
    :ivar create_by: the latest instant at which it may be created, as its
        servers may be deleted afterwards; None: there is none
    """

    project_id: str
    user_id: str
    request: requests.LeaseRequest
    reservations: tuple[NewReservation, ...]
    credential: str | None = None
    key: idempotency.Key | None = None
    granted: limits.Granted | None = None
    recurrence_id: str | None = None
    lease_id: str | None = None
    create_by: int | None = None

    @property
    def cleaning_time(self) -> int:
        """Seconds for which its capacity stays reserved for cleaning."""
        return max((one.demand.cleaning_time for one in self.reservations),
                   default=0)

    @property
    def booked(self) -> model.Window:
        """The window over which its capacity is reserved."""
        window = self.request.window
        return model.Window(window.start, window.end + self.after_end)

    @property
    def after_end(self) -> int:
        """Seconds for which its capacity stays reserved after its end."""
        return self.request.grace_period + self.cleaning_time

    @property
    def span(self) -> model.Window:
        """The window within which it may use capacity, including the time for
        which it may wait.

        All of it counts against the limits of its project.
        """
        request, booked = self.request, self.booked
        if request.patience is None or request.duration is None:
            return booked
        return model.Window(booked.start, booked.end + request.patience)

    def host_bound(self) -> admissions.ProjectHosts | None:
        """Return the hosts of its project for a search; None: it may use
        all hosts.
        """
        return None if self.granted is None else self.granted.host_bound()

    @property
    def demands(self) -> list[model.Demand]:
        return [one.demand for one in self.reservations]

    @property
    def warnings(self) -> list[str]:
        """Sentences about what is requested and not reserved."""
        return [*dict.fromkeys(warning for one in self.reservations
                               for warning in one.warnings)]

    def check_exclusive(self, connection: sa.Connection, waits: bool = False,
                        ) -> None:
        """Check exclusive resources; see :func:`.exclusive.check`.

        :param waits: whether it waits for capacity, and may start later
        """
        taken = self.span if waits else self.booked
        exclusive.check(connection, self.project_id, frozenset().union(*(
            exclusive.of(one.spec) for one in self.reservations
            if one.params is None)), model.Window(
                taken.start, taken.end - self.cleaning_time))

    @property
    def server_ids(self) -> list[str]:
        return [server_id for one in self.reservations
                for server_id in one.server_ids]


@dataclasses.dataclass
class Rows:
    """The rows of a new lease."""

    lease: dict[str, ty.Any]
    reservations: list[dict[str, ty.Any]]
    events: list[dict[str, ty.Any]]
    deferred: list[dict[str, ty.Any]] = dataclasses.field(default_factory=list)
    credentials: list[dict[str, ty.Any]] = dataclasses.field(
        default_factory=list)

    def keep_credential(self, new: NewLease) -> None:
        if new.credential is not None:
            self.credentials = [{
                'lease_id': self.lease['id'], 'encrypted': new.credential,
                'created_at': self.lease['created_at']}]

    def note(self, granted: limits.Granted) -> None:
        """Set the condition that a limit is nearly reached."""
        self.lease['conditions'] = granted.noted(
            self.lease['conditions'], self.lease['created_at'])

    def owners(self) -> dict[str, usage_records.Owner]:
        """Return the owners of its reservations."""
        return {row['id']: usage_records.Owner(
            self.lease['id'], self.lease['project_id'], row['resource_type'],
            self.lease['status'] not in states.SEEKING)
            for row in self.reservations}

    def describe(self, edits: ty.Sequence[ledger.Edit]) -> dict[str, ty.Any]:
        """Return the result of :func:`blazar_core.leases.views.describe`.

        :param edits: the bookings that are written with the rows
        """
        bookings = collections.defaultdict(list)
        for edit in edits:
            if edit.new is not None and edit.new.reservation_id is not None:
                bookings[edit.new.reservation_id].append(edit.new)
        return views.describe_rows(
            models.Lease(**self.lease),
            [models.Reservation(**row) for row in self.reservations],
            sorted((models.Event(**row) for row in self.events),
                   key=lambda one: (one.time, one.id)), bookings)


class Planned(ty.NamedTuple):
    """A lease that is about to be written.

    :ivar picked: the selected hosts for each demand; None: no host yet
    """

    rows: Rows
    new: NewLease
    picked: ty.Sequence[ty.Sequence[int | None]]

    def edits(self) -> list[ledger.Edit]:
        """Return its bookings."""
        rows, new, picked = self
        window = new.span if rows.lease[
            'status'] in states.SEEKING else new.booked
        return [ledger.Edit(None, ledger.NewBooking(
            row['id'], host_id, server_id, window, one.demand.resources,
            among=one.demand.among, groups=one.demand.groups))
            for row, one, host_ids in zip(
                rows.reservations, new.reservations, picked, strict=True)
            for server_id, host_id in zip(
                one.server_ids or (None,) * len(host_ids), host_ids,
                strict=True)]


def insert(connection: sa.Connection, leases: ty.Sequence[Rows]) -> None:
    """Write the rows of new leases, without their bookings."""
    for table, rows in (
            (models.Lease, [one.lease for one in leases]),
            (models.Reservation, [
                row for one in leases for row in one.reservations]),
            (models.Event, [row for one in leases for row in one.events]),
            (models.DeferredBuild, [
                row for one in leases for row in one.deferred]),
            (models.Credential, [
                row for one in leases for row in one.credentials])):
        if rows:
            connection.execute(table.__table__.insert(), rows)


def rows_of(new: NewLease, picked: ty.Sequence[ty.Sequence[int | None]],
            now: int, start_done: bool,
            types: resource_types.ResourceTypes) -> Rows:
    """Return the rows of a new lease.

    :param start_done: whether its start needs no worker
    """
    request = new.request
    lease_id = new.lease_id or uuidutils.generate_uuid()
    # Reservations are read in the order of their ids, which has to be that of
    # the request.
    ids = sorted(uuidutils.generate_uuid() for _one in new.reservations)
    return Rows({
        'id': lease_id, 'name': request.name or f'lease-{lease_id[:8]}',
        'project_id': new.project_id, 'user_id': new.user_id,
        'start_date': request.window.start, 'end_date': request.window.end,
        'before_end_date': request.before_end, 'on_end': request.on_end,
        'grace_period': request.grace_period,
        'cleaning_time': new.cleaning_time,
        'status': states.Lease.PENDING,
        'conditions': None, 'lease_type': request.lease_type,
        'warnings': new.warnings or None,
        'auto_extend': request.auto_extend, 'recurrence_id': new.recurrence_id,
        'description': request.description, 'tags': [*request.tags] or None,
        'used_at': None if not new.server_ids and any(
            types.of(one.resource_type, one.params is None).is_for_boots
            for one in new.reservations) else now,
        'created_at': now, 'updated_at': now,
    }, [{
        'id': reservation_id, 'lease_id': lease_id,
        'resource_type': one.resource_type, 'amount': len(host_ids),
        'resources': model.plain(one.demand.resources),
        'status': states.Reservation.PENDING,
        'params': None if one.params is None else dict(one.params),
        'spec': None if one.spec is None else dict(one.spec),
        'created_at': now, 'updated_at': now,
    } for reservation_id, one, host_ids in zip(
        ids, new.reservations, picked, strict=True)], [
        events.row(lease_id, event_type, time, now, action=action,
                   done=event_type == states.EventType.REFUND or (
                       start_done and event_type == states.EventType.START))
        for event_type, time, action in _events(new, types)])


def _events(new: NewLease, types: resource_types.ResourceTypes,
            ) -> list[tuple[str, int, str | None]]:
    """Return the type, time and action of each event of a lease."""
    request = new.request
    found: list[tuple[str, int, str | None]] = [
        (states.EventType.START, request.window.start, None),
        (states.EventType.END, request.window.end, None)]
    if request.before_end is not None:
        found.append((states.EventType.BEFORE_END, request.before_end,
                      request.before_end_action))
    if new.lease_id is not None:
        # It becomes pending when the lease has ended.
        found.append((states.EventType.REFUND, request.window.start, None))
    if request.auto_extend:
        found.append((states.EventType.EXTEND, events.extension(
            request.window, request.auto_extend), None))
    found += [(event.event_type, event.time, event.action)
              for event in request.events]
    own = types.events([(one.resource_type, one.params is None)
                        for one in new.reservations], request.window)
    return [*found, *(
        (event_type, time, None) for event_type, time in own.items())]
