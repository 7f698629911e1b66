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

"""How leases are made: by a request, or by an offer that is accepted."""

import contextlib
import dataclasses
import types
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.books import admission as admissions
from blazar_core.books import ledger
from blazar_core.books import picking
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import limits
from blazar_core.leases import repeats
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core import resources

__all__ = ['Making', 'NewLease', 'NewReservation', 'RESOURCE_TYPE',
           'Rows', 'rows_of']

LOG = logging.getLogger(__name__)

#: What the reservations of leases made by a boot are.
RESOURCE_TYPE = 'virtual:instance'


@dataclasses.dataclass(frozen=True, slots=True)
class NewReservation:
    """So many of one thing.

    :ivar server_ids: those that are about to be built; none unless it comes
        with a boot
    :ivar params: what was asked for, in the API's words; None: a boot
    :ivar spec: what its resource type keeps beside that
    """

    demand: model.Demand
    server_ids: tuple[str, ...] = ()
    resource_type: str = RESOURCE_TYPE
    params: ty.Mapping[str, ty.Any] | None = None
    spec: ty.Mapping[str, ty.Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to be made.

    :ivar credential: what lets us act for the user when it starts, sealed
    :ivar key: what its user calls his request, to get one lease for it
    :ivar granted: what the limits said of it; None: nothing limits it
    :ivar recurrence_id: of what it is an occurrence; None: of nothing
    """

    project_id: str
    user_id: str
    request: requests.LeaseRequest
    reservations: tuple[NewReservation, ...]
    credential: str | None = None
    key: repeats.Key | None = None
    granted: limits.Granted | None = None
    recurrence_id: str | None = None

    @property
    def cleaning_time(self) -> int:
        """Seconds for which what it had is taken when it is left."""
        return max((one.demand.cleaning_time for one in self.reservations),
                   default=0)

    @property
    def booked(self) -> model.Window:
        """How long room is taken for it."""
        window = self.request.window
        return model.Window(window.start, window.end + (
            self.request.grace_period + self.cleaning_time))

    @property
    def span(self) -> model.Window:
        """Within what time it may take room, also if it waits for that.

        So long it counts for the limits of its project.
        """
        request, booked = self.request, self.booked
        if request.patience is None or request.lasts is None:
            return booked
        return model.Window(booked.start, booked.end + request.patience)

    @property
    def demands(self) -> list[model.Demand]:
        return [one.demand for one in self.reservations]

    @property
    def server_ids(self) -> list[str]:
        return [server_id for one in self.reservations
                for server_id in one.server_ids]


class Making:
    """Makes leases, and takes back those that fail."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, types: resources.Types,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types

    def check(self, new: NewLease) -> None:
        """Make sure that there is room now; books nothing.

        :raises Refused: when there is none; says why and when
        """
        self._admission.pick_all(new.demands, new.booked)

    def quote(self, new: NewLease) -> refusals.Refusal | None:
        """Why there is no room for a lease; None when there is."""
        return self._admission.quote(new.demands, new.booked)

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], bool]:
        """See :meth:`blazar_core.books.starts.Starts.availability`."""
        return self._admission.starts.availability(
            demand, window, duration + demand.cleaning_time, most)

    def create(self, new: NewLease, sealed: str | None) -> dict[str, ty.Any]:
        """Admit a lease: all of its servers, or none.

        Where there is no room for one with retries or a timeout, and it is
        known how to start it later, it does without for a while.

        :param sealed: the call to be sent at its start; None when the caller
            sends it now, and the lease starts with that, or when it does not
            come with a boot
        :returns: the lease, see :func:`~blazar_core.leases.views.describe`
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        :raises Conflict: when one was made with its key meanwhile
        :raises LimitExceeded: when others made meanwhile have what it needs
        """
        may_wait = new.request.patience is not None and (
            sealed is not None or not new.server_ids)
        why = self.why_wait(new) if may_wait else ''
        lease = None
        if not why:
            try:
                lease = self._admission.admit(
                    new.demands, new.booked,
                    lambda connection, picked: self.write(
                        connection, new, sealed, picked))
            except errors.Refused as exc:
                if not may_wait:
                    raise
                why = str(exc)
        if lease is None:
            lease = self._database.retried(self._wait, new, sealed, why)
        LOG.info('Lease %s (%s) of project %s: %s from %s to %s, servers %s',
                 lease['id'], lease['name'], new.project_id, lease['status'],
                 *map(clocks.iso, (lease['start_date'], lease['end_date'])),
                 ', '.join(new.server_ids) or 'come later')
        return lease

    def write(self, connection: sa.Connection, new: NewLease,
              sealed: str | None, picked: picking.Picked,
              ) -> dict[str, ty.Any]:
        """Write a lease, for which hosts were picked; see :meth:`create`."""
        rows = rows_of(new, picked, self._clock.now(), sealed is None and bool(
            new.server_ids), self._types)
        self._keep_secrets(rows, new, sealed)
        return self._book(connection, rows, new, picked)

    def why_wait(self, new: NewLease) -> str:
        """Why a lease with retries is not tried yet; empty: it is."""
        if new.request.retry is None:
            return ''
        with self._database.reader() as session:
            return waiting.behind(session.connection(), new.project_id)

    def _wait(self, new: NewLease, sealed: str | None,
              why: str) -> dict[str, ty.Any]:
        """Write a lease that waits for room, or for which some is made."""
        now, request = self._clock.now(), new.request
        retry = request.retry
        until = now + (request.patience or 0)
        nowhere: list[list[int | None]] = [
            [None] * demand.count for demand in new.demands]
        rows = rows_of(new, nowhere, now, False, self._types)
        rows.lease |= {
            'status': states.Lease.IN_PROGRESS if retry is None
            else states.Lease.WAITING,
            'status_reason': waiting.made(why) if retry is None
            else waiting.reason(why),
            'retry_interval': retry and retry.interval,
            'retry_until': until if request.lasts is not None
            else min(until, request.window.end),
            'lasts': request.lasts}
        self._keep_secrets(rows, new, sealed)
        # Nothing of it happens before there is room.
        for event in rows.events:
            event['due'] = model.FOREVER
        rows.events.append(events.row(
            rows.lease['id'], states.EventType.MAKE_ROOM, now, now)
            if retry is None else events.row(
                rows.lease['id'], states.EventType.RETRY,
                now + retry.interval, now))
        with self._database.begin() as connection:
            return self._book(connection, rows, new, nowhere)

    def _keep_secrets(self, rows: 'Rows', new: NewLease,
                      sealed: str | None) -> None:
        if sealed is not None:
            rows.held = [{'lease_id': rows.lease['id'], 'sealed': sealed,
                          'created_at': rows.lease['created_at']}]
        rows.keep_credential(new)

    def _book(self, connection: sa.Connection, rows: 'Rows', new: NewLease,
              picked: ty.Sequence[ty.Sequence[int | None]],
              ) -> dict[str, ty.Any]:
        """Write a lease and its bookings.

        :param picked: for each demand the hosts; None: it has none yet
        :raises Conflict: when one was made with its key meanwhile
        :raises LimitExceeded: when others have what it needs
        """
        if new.granted is not None:
            new.granted.lock(connection)
            new.granted.confirm(connection)
        if new.key is not None:
            repeats.keep(connection, rows.lease['created_at'], new.key,
                         rows.lease['id'])
        # A lease that starts at once has its build sent right after this.
        sent_at = rows.lease['created_at'] if (
            rows.lease['status'] == states.Lease.STARTING) else None
        window = new.span if rows.lease[
            'status'] in states.SEEKING else new.booked
        edits: ty.Sequence[ledger.Edit] = [ledger.Edit(None, ledger.NewBooking(
            row['id'], host_id, server_id, window, one.demand.resources,
            sent_at=sent_at, among=one.demand.among))
            for row, one, host_ids in zip(
                rows.reservations, new.reservations, picked, strict=True)
            for server_id, host_id in zip(
                one.server_ids or (None,) * len(host_ids), host_ids,
                strict=True)]
        edits = ledger.decide(connection, self._clock.now(), edits)
        rows.insert(connection)
        ledger.add(connection, edits)
        return rows.describe(edits)

    # -- offers --------------------------------------------------------------

    def offer(self, new: NewLease, seconds: int) -> dict[str, ty.Any]:
        """Hold room for a lease for so many seconds, to be accepted.

        :returns: the lease, OFFERED
        :raises Refused: when there is no room
        :raises LimitExceeded: when others made meanwhile have what it needs
        """
        # Nobody's servers yet: they would keep it from expiring.
        offered = dataclasses.replace(new, reservations=tuple(
            dataclasses.replace(one, server_ids=())
            for one in new.reservations))
        return self._admission.admit(
            offered.demands, offered.booked,
            lambda connection, picked: self._offer(
                connection, offered, seconds, picked))

    def _offer(self, connection: sa.Connection, new: NewLease, seconds: int,
               picked: picking.Picked) -> dict[str, ty.Any]:
        now = self._clock.now()
        rows = rows_of(new, picked, now, False, self._types)
        rows.lease['status'] = states.Lease.OFFERED
        # Nothing of it happens unless it is accepted.
        for event in rows.events:
            event['due'] = model.FOREVER
        rows.events.append(events.row(
            rows.lease['id'], states.EventType.EXPIRE, now + seconds, now))
        return self._book(connection, rows, new, picked)

    def accept(self, lease_id: str) -> dict[str, ty.Any]:
        """Make a lease of an offer.

        :raises NotFound: when there is no such offer (any more)
        """
        return self._database.retried(self._accept, lease_id)

    def _accept(self, lease_id: str) -> dict[str, ty.Any]:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.OFFERED or (
                    lease.end_date <= self._clock.now()):
                raise errors.NotFound(
                    f'Offer {lease_id} could not be found; it may have '
                    f'expired. Ask for another one.')
            now = self._clock.now()
            lease.enter(states.Lease.PENDING, now)
            events.begin(lease, states.EventType.EXPIRE, now)
            session.flush()
            return views.describe(lease)

    # -- taking it back ------------------------------------------------------

    def withdraw(self, lease_id: str) -> None:
        """Take a lease out of the books whose servers were never asked for.

        For a request that made it and then could not go on; safe to repeat.
        """
        with contextlib.suppress(errors.NotFound):
            self._database.retried(self._withdraw, lease_id)

    def _withdraw(self, lease_id: str) -> None:
        with self._database.writer() as session:
            # Locked: no process adds to it any more what would keep it.
            lease = api.locked(session, lease_id)
            ledger.amend(session, self._clock.now(), [
                ledger.Edit(booking, None) for booking in lease.bookings])
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            session.flush()
            for row in (*lease.reservations, *lease.events):
                session.delete(row)
            session.flush()
            session.delete(lease)


@dataclasses.dataclass
class Rows:
    """The rows of a new lease."""

    lease: dict[str, ty.Any]
    reservations: list[dict[str, ty.Any]]
    events: list[dict[str, ty.Any]]
    held: list[dict[str, ty.Any]] = dataclasses.field(default_factory=list)
    credentials: list[dict[str, ty.Any]] = dataclasses.field(
        default_factory=list)

    def keep_credential(self, new: NewLease) -> None:
        if new.credential is not None:
            self.credentials = [{
                'lease_id': self.lease['id'], 'sealed': new.credential,
                'created_at': self.lease['created_at']}]

    def insert(self, connection: sa.Connection) -> None:
        """Write them."""
        for table, rows in ((models.Lease, [self.lease]),
                            (models.Reservation, self.reservations),
                            (models.Event, self.events),
                            (models.HeldBuild, self.held),
                            (models.Credential, self.credentials)):
            if rows:
                connection.execute(table.__table__.insert(), rows)

    def describe(self, edits: ty.Sequence[ledger.Edit]) -> dict[str, ty.Any]:
        """What :func:`blazar_core.leases.views.describe` will say of them.

        :param edits: the bookings that are written with them
        """
        as_row = types.SimpleNamespace
        return views.describe(as_row(
            **self.lease,
            events=[as_row(**event) for event in sorted(
                self.events, key=lambda event: (event['time'], event['id']))],
            reservations=[as_row(**reservation, bookings=[
                edit.new for edit in edits if edit.new is not None and
                edit.new.reservation_id == reservation['id']])
                for reservation in self.reservations]))


def rows_of(new: NewLease, picked: ty.Sequence[ty.Sequence[int | None]],
            now: int, started: bool, types: resources.Types) -> Rows:
    """The rows that a new lease is written as."""
    request = new.request
    lease_id = uuidutils.generate_uuid()
    # They are read in the order of their ids: that in which they were asked
    # for.
    ids = sorted(uuidutils.generate_uuid() for _one in new.reservations)
    return Rows({
        'id': lease_id, 'name': request.name or f'lease-{lease_id[:8]}',
        'project_id': new.project_id, 'user_id': new.user_id,
        'start_date': request.window.start, 'end_date': request.window.end,
        'before_end_date': request.before_end, 'on_end': request.on_end,
        'grace_period': request.grace_period,
        'cleaning_time': new.cleaning_time,
        'status': states.Lease.STARTING if started else states.Lease.PENDING,
        'status_reason': '', 'lease_type': request.lease_type,
        'retry_interval': None, 'retry_until': None, 'lasts': None,
        'admitted_at': None, 'no_show_at': None, 'warnings': None,
        'auto_extend': request.auto_extend, 'recurrence_id': new.recurrence_id,
        'used_at': None if not new.server_ids and all(
            types.of(one.resource_type, one.params is None).is_for_boots
            for one in new.reservations) else now,
        'created_at': now, 'updated_at': now, 'deleted_at': None,
    }, [{
        'id': reservation_id, 'lease_id': lease_id,
        'resource_type': one.resource_type, 'amount': len(host_ids),
        'resources': dict(one.demand.resources),
        'status': states.Reservation.PENDING,
        'params': None if one.params is None else dict(one.params),
        'flavor': None if one.spec is None else dict(one.spec),
        'moved_at': None, 'created_at': now, 'updated_at': now,
    } for reservation_id, one, host_ids in zip(
        ids, new.reservations, picked, strict=True)], [
        events.row(lease_id, event_type, time, now, action=action,
                   done=started and event_type == states.EventType.START)
        for event_type, time, action in _events(new, types)])


def _events(new: NewLease, types: resources.Types,
            ) -> list[tuple[str, int, str | None]]:
    """Their types, when they happen, and what is done then."""
    request = new.request
    found: list[tuple[str, int, str | None]] = [
        (states.EventType.START, request.window.start, None),
        (states.EventType.END, request.window.end, None)]
    if request.before_end is not None:
        found.append((states.EventType.BEFORE_END, request.before_end,
                      request.before_end_action))
    if request.auto_extend:
        found.append((states.EventType.EXTEND, events.extension(
            request.window, request.auto_extend), None))
    found += [(event.event_type, event.time, event.action)
              for event in request.events]
    own = types.events([(one.resource_type, one.params is None)
                        for one in new.reservations], request.window)
    return [*found, *(
        (event_type, time, None) for event_type, time in own.items())]
