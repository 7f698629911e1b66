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

"""Leases: how they are made and changed."""

import collections
import contextlib
import dataclasses
import types
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import ledger
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import repeats
from blazar_core.leases import requests
from blazar_core.leases import views

__all__ = ['Change', 'Leases', 'MISSING', 'NewLease', 'NewReservation',
           'RESOURCE_TYPE', 'may_move', 'reseal', 'total']

LOG = logging.getLogger(__name__)

#: How the reason of a lease begins that has no room for what it promised.
MISSING = 'What was promised does not fit any more. '
#: What the reservations of leases made by a boot are.
RESOURCE_TYPE = 'virtual:instance'


@dataclasses.dataclass(frozen=True, slots=True)
class NewReservation:
    """So many servers of a kind.

    :ivar server_ids: those that are about to be built; none when servers
        come later, of ``flavor``
    :ivar params: what was asked for, in the API's words
    :ivar flavor: what servers that come later will be made of
    """

    demand: model.Demand
    server_ids: tuple[str, ...] = ()
    resource_type: str = RESOURCE_TYPE
    params: ty.Mapping[str, ty.Any] | None = None
    flavor: ty.Mapping[str, ty.Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to be made.

    :ivar credential: what lets us act for the user when it starts, sealed
    :ivar key: what its user calls his request, to get one lease for it
    :ivar granted: what the limits said of it; None: nothing limits it
    """

    project_id: str
    user_id: str
    request: requests.LeaseRequest
    reservations: tuple[NewReservation, ...]
    credential: str | None = None
    key: repeats.Key | None = None
    granted: limits.Granted | None = None

    @property
    def demands(self) -> list[model.Demand]:
        return [one.demand for one in self.reservations]

    @property
    def server_ids(self) -> list[str]:
        return [server_id for one in self.reservations
                for server_id in one.server_ids]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is to become of a lease; None leaves a thing as it is.

    :ivar resources: what each of its servers gets
    :ivar elsewhere: what its hosts must be like, if a lease that has not
        started may get other ones; None: it keeps those it has
    :ivar events: all of the user's own that are still to come
    :ivar reservations: by id, what they are to be
    :ivar granted: what the limits said of it; None: nothing limits it
    """

    start: int | None = None
    end: int | None = None
    name: str | None = None
    before_end: int | None = None
    events: tuple[requests.EventRequest, ...] | None = None
    resources: model.Resources | None = None
    elsewhere: model.Demand | None = None
    reservations: ty.Mapping[str, NewReservation] = dataclasses.field(
        default_factory=dict)
    granted: limits.Granted | None = None


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
        self._admission.pick_all(new.demands, new.request.window)

    def quote(self, new: NewLease) -> refusals.Refusal | None:
        """Why there is no room for a lease; None when there is."""
        return self._admission.quote_all(new.demands, new.request.window)

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], bool]:
        """See :meth:`blazar_core.books.admission.Admission.availability`."""
        return self._admission.availability(demand, window, duration, most)

    def create(self, new: NewLease, sealed: str | None) -> dict[str, ty.Any]:
        """Admit a lease: all of its servers, or nothing is written.

        :param sealed: the call to be sent at its start; None when the caller
            sends it now, and the lease starts with that, or when its servers
            come later
        :returns: the lease, as :func:`~blazar_core.leases.views.describe` has
        it
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        :raises Conflict: when one was made with its key meanwhile
        :raises LimitExceeded: when others made meanwhile have what it needs
        """
        lease = self._admission.admit(
            new.demands, new.request.window,
            lambda connection, picked: self._create(
                connection, new, sealed, picked))
        LOG.info('Lease %s (%s) of project %s: %s from %s to %s, servers %s',
                 lease['id'], lease['name'], new.project_id, lease['status'],
                 lease['start_date'], lease['end_date'],
                 ', '.join(new.server_ids) or 'come later')
        return lease

    def _create(self, connection: sa.Connection, new: NewLease,
                sealed: str | None, picked: admissions.Picked,
                ) -> dict[str, ty.Any]:
        rows = _rows(new, self._clock.now(),
                     started=sealed is None and bool(new.server_ids))
        if sealed is not None:
            rows.held = [{
                'lease_id': rows.lease['id'], 'sealed': sealed,
                'created_at': rows.lease['created_at']}]
        if new.credential is not None:
            rows.credentials = [{
                'lease_id': rows.lease['id'], 'sealed': new.credential,
                'created_at': rows.lease['created_at']}]
        return self._book(connection, rows, new, picked)

    def _book(self, connection: sa.Connection, rows: '_Rows', new: NewLease,
              picked: admissions.Picked) -> dict[str, ty.Any]:
        """Write a lease and its bookings.

        :raises Conflict: when one was made with its key meanwhile
        :raises LimitExceeded: when others have what it needs
        """
        if new.granted is not None:
            new.granted.lock(connection)
            new.granted.confirm(connection)
        if new.key is not None:
            repeats.keep(connection, rows.lease['created_at'], new.key,
                         rows.lease['id'])
        # Who starts a lease as it is made sends its build right after that.
        sent_at = rows.lease['created_at'] if (
            rows.lease['status'] == 'STARTING') else None
        edits = [ledger.Edit(None, ledger.NewBooking(
            row['id'], host_id, server_id, new.request.window,
            one.demand.resources, sent_at=sent_at))
            for row, one, host_ids in zip(
                rows.reservations, new.reservations, picked, strict=True)
            for server_id, host_id in zip(
                one.server_ids or (None,) * one.demand.count, host_ids,
                strict=True)]
        ledger.decide(connection, self._clock.now(), edits)
        rows.insert(connection)
        ledger.add(connection, edits)
        return rows.describe(edits)

    # -- changing ------------------------------------------------------------

    def update(self, lease_id: str, change: Change) -> dict[str, ty.Any]:
        """Prolong, shorten, move, resize or rename: all of it, or nothing.

        Only a lease that has not started can be moved, or given servers of
        another kind.

        :returns: the lease as it is then
        :raises NotFound: when there is none of that id
        :raises InvalidLeaseParams: when that cannot be done to it; says why
        :raises Refused: when there is no room
        :raises LimitExceeded: when others made meanwhile have what it needs
        :raises Conflict: when somebody else has just changed it
        """
        return self._database.retried(self._update, lease_id, change)

    def _update(self, lease_id: str, change: Change) -> dict[str, ty.Any]:
        try:
            return self._rewrite(lease_id, change, {})
        except ledger.Full as full:
            with self._database.reader() as session:
                lease = api.found(session, lease_id)
                window = self._new_window(lease, change)
                rows = _bookings(lease)
                if not rows:
                    # Its servers have gone meanwhile.
                    raise api.LostRace(full.host_id) from full
                demands = self._demands(session, lease, change)
                kept = self._kept(lease, change)
                if lease.status in _BEGUN and (
                        window.end <= self._clock.now()):
                    raise errors.InvalidLeaseParams(
                        f'Lease {lease.id} is over: nothing can be added to '
                        f'it. Write a later end, or make another lease.'
                    ) from full
            if not demands and full.host_id == _UNPICKED:
                # Somebody else has added meanwhile what was to be added.
                raise api.LostRace(_UNPICKED) from full
            if not demands:
                # What runs stays where it is, and has started already.
                raise errors.Refused(refusals.Refusal(
                    refusals.Reason.NO_ROOM, len(rows), 0, None)) from full
        if kept:
            window = model.Window(self._clock.now(), window.end)
        picked = self._admission.pick_all(
            [*demands.values()], window, instead_of=rows, kept=kept)
        return self._rewrite(lease_id, change, dict(
            zip(demands, picked, strict=True)))

    def _kept(self, lease: models.Lease, change: Change,
              ) -> list[admissions.Kept]:
        """What stays where it is of a lease that has begun."""
        if lease.status not in _BEGUN:
            return []
        on: dict[frozenset[tuple[str, int]], collections.Counter[int]] = (
            collections.defaultdict(collections.Counter))
        for one in lease.reservations:
            for row in _kept(one, change.reservations.get(one.id)):
                if row.host_id is not None:
                    on[frozenset(row.resources.items())][row.host_id] += 1
        return [admissions.Kept(dict(resources), hosts)
                for resources, hosts in on.items()]

    def _demands(self, session: orm.Session, lease: models.Lease,
                 change: Change) -> dict[str, model.Demand]:
        """By reservation, what hosts are looked for.

        For all of its servers; for those that are added, if it has begun.
        """
        demands = {}
        for one in lease.reservations:
            wanted = change.reservations.get(one.id)
            if lease.status in _BEGUN:
                added = 0 if wanted is None else (
                    wanted.demand.count - len(one.bookings))
                if wanted is not None and added > 0:
                    demands[one.id] = self._added(
                        session, one, wanted.demand, added)
            elif wanted is not None:
                demands[one.id] = wanted.demand
            else:
                demands[one.id] = change.elsewhere or self._where_it_is(
                    session, one.bookings, change.resources)
                if demands[one.id].count != len(one.bookings):
                    raise errors.InvalidLeaseParams(
                        f'Lease {lease.id} has {len(one.bookings)} servers.')
        return demands

    def _added(self, session: orm.Session, reservation: models.Reservation,
               demand: model.Demand, count: int) -> model.Demand:
        """A demand, for so many servers more than there are."""
        hosts = frozenset(self._uuids(session, reservation.bookings))
        demand = dataclasses.replace(demand, count=count)
        if demand.affinity is model.Affinity.SAME and hosts:
            return dataclasses.replace(demand, hosts=hosts)
        if demand.affinity is model.Affinity.DIFFERENT:
            return dataclasses.replace(demand, avoid=demand.avoid | hosts)
        return demand

    def _uuids(self, session: orm.Session,
               rows: ty.Iterable[models.Booking]) -> ty.Iterable[str]:
        """The uuids of the hosts of bookings."""
        return session.scalars(sa.select(models.Host.uuid).where(
            models.Host.id.in_({row.host_id for row in rows})))

    def _where_it_is(self, session: orm.Session,
                     rows: ty.Sequence[models.Booking],
                     resources: model.Resources | None) -> model.Demand:
        """The demand of a reservation that keeps to the hosts it has.

        Its servers may have to be apart: none of them gets more than the one
        with most has.
        """
        most = max(collections.Counter(row.host_id for row in rows).values())
        return model.Demand(
            resources or rows[0].resources, len(rows),
            model.Affinity.DIFFERENT, most,
            hosts=frozenset(self._uuids(session, rows)))

    def _new_window(self, lease: models.Lease, change: Change,
                    ) -> model.Window:
        """The window that a lease would get.

        :raises InvalidLeaseParams: when it cannot get that
        """
        now = self._clock.now()
        begun = lease.status in _BEGUN
        if lease.deleted_at is not None or not begun and (
                lease.status not in ('PENDING', 'OFFERED')):
            raise errors.InvalidLeaseParams(
                f'Lease {lease.id} is {views.status(lease)}: it cannot be '
                f'changed any more.')
        if begun and (change.start not in (None, lease.start_date) or
                      change.resources):
            raise errors.InvalidLeaseParams(
                f'Lease {lease.id} has started: only its end, its name, its '
                f'events and amounts can be changed.')
        start = lease.start_date if change.start is None else change.start
        end = lease.end_date if change.end is None else change.end
        # What is left alone may be overdue; what runs may end this second.
        late = (start, end) != (lease.start_date, lease.end_date) and (
            end < now if begun else min(start, end - 1) < now)
        if end <= start or late:
            raise errors.InvalidLeaseParams(
                'End date must be later than start date, and neither may lie '
                f'in the past: from {clocks.minute(start)} to '
                f'{clocks.minute(end)}, now it is {clocks.minute(now)} UTC.')
        return model.Window(start, end)

    def _rewrite(self, lease_id: str, change: Change,
                 picked: ty.Mapping[str, list[int]]) -> dict[str, ty.Any]:
        """Give a lease another window, amounts and hosts.

        :param picked: by reservation, the hosts that it gets (all of them,
            or those that are added, if it has begun); empty: where it is
        :raises Full: when there is no room for that on a host, or hosts
            have to be picked first
        :raises LostRace: when it has other bookings than was thought
        """
        with self._database.writer() as session:
            if change.granted is not None:
                change.granted.lock(session.connection())
            lease = api.locked(session, lease_id)
            if change.granted is not None:
                change.granted.confirm(session.connection())
            window = self._new_window(lease, change)
            if change.reservations.keys() - {
                    one.id for one in lease.reservations}:
                raise errors.InvalidLeaseParams(
                    f'A reservation to be changed is not one of lease '
                    f'{lease_id}.')
            edits = [edit for one in lease.reservations
                     for edit in _edits(lease, one, window, change,
                                        picked.get(one.id))]
            ledger.amend(session, self._clock.now(), edits)
            for one in lease.reservations:
                _resize(one, change, self._clock.now())
            _redate(lease, window, self._clock.now())
            # Only what is written can be deleted again.
            session.flush()
            self._rename(session, lease, change, window)
            session.flush()
            session.expire(lease)
            return views.describe(lease)

    def _rename(self, session: orm.Session, lease: models.Lease,
                change: Change, window: model.Window) -> None:
        """Its name and its events."""
        now = self._clock.now()
        # What has come by the new dates is to be there for what follows.
        session.flush()
        if change.name is not None:
            lease.name = change.name
        own, parts = ty.cast('list[tuple[str, int]]', []), []
        if change.before_end is not None:
            lease.before_end_date = change.before_end
            parts = [states.EventType.BEFORE_END]
            own.append((states.EventType.BEFORE_END, change.before_end))
        for event_type, time in own + [
                (event.event_type, event.time)
                for event in change.events or ()]:
            first = max(window.start, now)
            if not first <= time <= window.end:
                raise errors.InvalidLeaseParams(
                    f'The {event_type} {clocks.minute(time)} is not within '
                    f'what is to come of the lease. Write a date from '
                    f'{clocks.minute(first)} to {clocks.minute(window.end)} '
                    f'UTC.')
        for event in [
                *(event for event in lease.events
                  if event.status == 'UNDONE' and (
                      event.event_type in parts or
                      change.events is not None and
                      event.event_type not in states.EventType.OWN)),
                *_old_events(lease)]:
            session.delete(event)
        for event_type, time in own + [
                (event.event_type, event.time)
                for event in change.events or ()]:
            row = _event(lease.id, event_type, time, now)
            if lease.status == 'OFFERED':
                row['due'] = model.FOREVER
            session.add(models.Event(**row))

    def rebind(self, lease_id: str, seen: int,
               hosts: ty.Mapping[int, int | None], reason: str = '',
               ) -> dict[str, ty.Any] | None:
        """Bind bookings of a lease to other hosts; all of them, or none.

        :param seen: the generation of the lease when this was decided
        :param hosts: by id of a booking, the id of its host; None: it has
            none, and takes no room
        :param reason: what is missing then, for those who look at the lease
        :returns: the lease; None when it has changed meanwhile
        :raises NotFound: when it was withdrawn
        :raises Full: when there is no room on a host
        :raises LostRace: when somebody else decided about one meanwhile
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.generation != seen + 1:
                return None
            held = session.get(models.HeldBuild, lease_id) is not None
            rows = [row for row in _bookings(lease) if row.id in hosts and
                    may_move(row, row.reservation.flavor is not None, held,
                             lease)]
            if len(rows) != len(hosts):
                return None
            rows = [row for row in rows if row.host_id != hosts[row.id]]
            said = [(row.server_id or f'a place of {row.reservation_id}',
                     row.host_id, hosts[row.id]) for row in rows]
            ledger.amend(session, self._clock.now(), [ledger.Edit(
                row, ledger.new_of(row, host_id=hosts[row.id]))
                for row in rows])
            _moved(lease, rows, reason, self._clock.now())
            session.flush()
            names = {host_id: name for host_id, name in session.execute(
                sa.select(models.Host.id, models.Host.name).where(
                    models.Host.id.in_({
                        one for _what, *two in said for one in two}))
            ).tuples()}
            described = views.describe(lease)
        for what, old, new in said:
            if new is not None:
                LOG.info('Lease %s: %s is bound to host %s now; before: %s',
                         lease_id, what, names[new],
                         names[old] if old else 'none')
            elif old is not None:
                LOG.warning('Lease %s: %s has no room on host %s any more. '
                            '%s', lease_id, what, names[old], reason)
        return described

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
            offered.demands, offered.request.window,
            lambda connection, picked: self._offer(
                connection, offered, seconds, picked))

    def _offer(self, connection: sa.Connection, new: NewLease, seconds: int,
               picked: admissions.Picked) -> dict[str, ty.Any]:
        now = self._clock.now()
        rows = _rows(new, now, started=False)
        rows.lease['status'] = 'OFFERED'
        # Nothing of it happens unless it is accepted.
        for event in rows.events:
            event['due'] = model.FOREVER
        rows.events.append(_event(
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
            if lease.status != 'OFFERED' or (
                    lease.end_date <= self._clock.now()):
                raise errors.NotFound(
                    f'Offer {lease_id} could not be found; it may have '
                    f'expired. Ask for another one.')
            states.LEASE.check(lease.status, 'PENDING')
            lease.status = 'PENDING'
            lease.updated_at = self._clock.now()
            for event in lease.events:
                if event.event_type == states.EventType.EXPIRE:
                    event.status = 'DONE'
                else:
                    event.due = event.time
            session.flush()
            return views.describe(lease)

    # -- servers that come later -------------------------------------------

    def occupy(self, reservation_id: str, project_id: str,
               server_ids: ty.Sequence[str]) -> dict[str, ty.Any]:
        """Give places of a reservation to servers that are about to be built.

        :returns: the lease
        :raises NotFound: when the project has no such reservation
        :raises Conflict: when it is not its time, or no places are left
        """
        return self._database.retried(
            self._occupy, reservation_id, project_id, server_ids)

    def _occupy(self, reservation_id: str, project_id: str,
                server_ids: ty.Sequence[str]) -> dict[str, ty.Any]:
        now = self._clock.now()
        lease_id = self._lease_of(reservation_id, project_id)
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != 'ACTIVE' or lease.end_date <= now:
                raise errors.Conflict(
                    f'Reservation {reservation_id} belongs to lease '
                    f'{lease.name} ({lease.id}), which is '
                    f'{views.status(lease)}: boot with it from '
                    f'{clocks.minute(lease.start_date)} to '
                    f'{clocks.minute(lease.end_date)} UTC, when the lease is '
                    f'ACTIVE.')
            (rows,) = [one.bookings for one in lease.reservations
                       if one.id == reservation_id]
            free = [row for row in rows if row.server_id is None]
            if len(free) < len(server_ids):
                raise errors.Conflict(
                    f'Reservation {reservation_id} holds {len(rows)} '
                    f'servers, and {len(rows) - len(free)} of them are there '
                    f'already: boot at most {len(free)} more, or raise the '
                    f'amount of lease {lease.id}.')
            for row, server_id in zip(free, server_ids):
                row.server_id, row.sent_at = server_id, now
            session.flush()
            return views.describe(lease)

    def _lease_of(self, reservation_id: str, project_id: str) -> str:
        """The lease of a project's reservation."""
        with self._database.reader() as session:
            lease_id = session.scalar(
                sa.select(models.Lease.id).join(models.Lease.reservations)
                .where(models.Reservation.id == reservation_id,
                       models.Lease.project_id == project_id))
        if lease_id is None:
            raise errors.NotFound(
                f'Reservation {reservation_id} could not be found.')
        return lease_id

    def vacate(self, server_ids: ty.Collection[str]) -> None:
        """Take back :meth:`occupy`, for servers that will not be built."""
        self._database.retried(self._vacate, server_ids)

    def _vacate(self, server_ids: ty.Collection[str]) -> None:
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Booking)
                .where(models.Booking.server_id.in_(server_ids))
                .values(server_id=None, sent_at=None, placed_at=None))

    def entrust(self, lease_id: str, sealed: str) -> str | None:
        """Keep what lets us act for the owner of a lease.

        :param sealed: it, sealed
        :returns: what was kept before, sealed, if there was something
        :raises NotFound: when the lease was withdrawn
        """
        return self._database.retried(self._entrust, lease_id, sealed)

    def _entrust(self, lease_id: str, sealed: str) -> str | None:
        with self._database.writer() as session:
            api.locked(session, lease_id)
            row = session.get(models.Credential, lease_id)
            if row is None:
                session.add(models.Credential(
                    lease_id=lease_id, sealed=sealed,
                    created_at=self._clock.now()))
                return None
            before, row.sealed = row.sealed, sealed
            return before

    def withdraw(self, lease_id: str) -> None:
        """Take a lease out of the books whose servers were never asked for.

        For the one who made it and then could not go on; safe to call twice.
        """
        with contextlib.suppress(errors.NotFound):
            self._database.retried(self._withdraw, lease_id)

    def _withdraw(self, lease_id: str) -> None:
        with self._database.writer() as session:
            # Locked: nobody adds to it any more what would keep it.
            lease = api.locked(session, lease_id)
            ledger.amend(session, self._clock.now(), [
                ledger.Edit(booking, None) for booking in _bookings(lease)])
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            session.flush()
            for row in (*lease.reservations, *lease.events):
                session.delete(row)
            session.flush()
            session.delete(lease)

    def held_by(self, server_id: str) -> dict[str, str] | None:
        """The lease that holds a server whose build has not been sent yet.

        :returns: ``lease_id``, ``name``, ``project_id`` and ``start_date``
            of it, or None when the server is not held
        """
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Lease.id, models.Lease.name,
                          models.Lease.project_id, models.Lease.start_date)
                .join(models.Reservation).join(models.Booking)
                .where(models.Booking.server_id == server_id,
                       models.Booking.sent_at.is_(None))).first()
        if row is None:
            return None
        return {'lease_id': row.id, 'name': row.name,
                'project_id': row.project_id,
                'start_date': clocks.minute(row.start_date)}

    def keeps_build(self, lease_id: str) -> bool:
        """Whether there are servers of a lease that are to be built by it
        yet, or once more.
        """
        with self._database.reader() as session:
            return session.get(models.HeldBuild, lease_id) is not None

    def is_leased(self, server_id: str) -> bool:
        """Whether the server belongs to a lease that is not over."""
        return self.booked(server_id) is not None

    def booked(self, server_id: str) -> tuple[str, int | None] | None:
        """The lease of a server, and the id of the host of its booking.

        :returns: None when it belongs to no lease that is not over
        """
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Reservation.lease_id, models.Booking.host_id)
                .join(models.Reservation.bookings)
                .where(models.Booking.server_id == server_id)).first()
        return None if row is None else (row.lease_id, row.host_id)

    def place_of(self, server_id: str) -> dict[str, str] | None:
        """The place that a server has in a reservation, and will leave.

        :returns: ``reservation_id`` and ``project_id``, or None
        """
        with self._database.reader() as session:
            row = session.execute(
                sa.select(models.Reservation.id, models.Lease.project_id)
                .join(models.Reservation.lease)
                .join(models.Reservation.bookings)
                .where(models.Booking.server_id == server_id,
                       models.Reservation.params.is_not(None))).first()
        return None if row is None else {
            'reservation_id': row.id, 'project_id': row.project_id}

    def reservation(self, reservation_id: str, project_id: str) -> str | None:
        """The resource type of a project's reservation.

        :returns: None when the project has none of that id, or it is over
        """
        if not reservation_id.isprintable():
            # No database takes all that JSON calls a string.
            return None
        with self._database.reader() as session:
            return session.scalars(
                sa.select(models.Reservation.resource_type)
                .join(models.Lease)
                .where(models.Reservation.id == reservation_id,
                       models.Lease.project_id == project_id,
                       models.Reservation.status != 'deleted')).one_or_none()

    def booked_hosts(self, server_ids: ty.Collection[str]) -> dict[str, str]:
        """The hosts on which these servers have bookings.

        :returns: uuids, by server
        """
        with self._database.reader() as session:
            return {server_id: uuid for server_id, uuid in session.execute(
                sa.select(models.Booking.server_id, models.Host.uuid).join(
                    models.Host, models.Booking.host_id == models.Host.id)
                .where(models.Booking.server_id.in_(server_ids)))}

    def hosts_of_services(self, service_hosts: ty.Collection[str],
                          ) -> dict[str, str]:
        """The hosts that these nova-computes run.

        :returns: the nova-compute's host, by uuid
        """
        with self._database.reader() as session:
            return {uuid: service_host for uuid, service_host in
                    session.execute(sa.select(
                        models.Host.uuid, models.Host.service_host).where(
                        models.Host.service_host.in_(service_hosts)))}


def total(demands: ty.Iterable[model.Demand]) -> dict[str, int]:
    """What all servers of demands take together."""
    sums: dict[str, int] = {}
    for demand in demands:
        for rc, amount in demand.resources.items():
            sums[rc] = sums.get(rc, 0) + amount * demand.count
    return sums


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


def may_move(row: ty.Any, later: bool, held: bool, lease: ty.Any) -> bool:
    """Whether a booking may be bound to another host.

    What is said of it is said until somebody sends a server there.

    :param row: the booking
    :param later: whether its servers come when it is there
    :param held: whether the build of its servers is kept
    :param lease: its status, and when its deletion was asked for
    """
    if row.placed_at is not None or row.sent_at is not None or (
            lease.deleted_at is not None):
        return False
    if later:
        return row.server_id is None and lease.status in (
            'OFFERED', 'PENDING', *_BEGUN)
    return held and lease.status in ('PENDING', 'STARTING')


#: No host: one that is still to be picked.
_UNPICKED = 0
#: The states of a lease whose servers are being built or run.
_BEGUN = ('STARTING', 'ACTIVE')


def _bookings(lease: models.Lease) -> list[models.Booking]:
    return [row for reservation in lease.reservations
            for row in reservation.bookings]


def _moved(lease: models.Lease, rows: ty.Iterable[models.Booking],
           reason: str, now: int) -> None:
    """What is said of a lease whose bookings were bound elsewhere."""
    for row in rows:
        if row.host_id is not None:
            row.reservation.moved_at = row.reservation.updated_at = now
    if reason:
        lease.status_reason = f'{MISSING}{reason}'
    elif lease.status_reason.startswith(MISSING) and all(
            row.host_id is not None for row in _bookings(lease)):
        lease.status_reason = ''
    lease.updated_at = now


def _edits(lease: models.Lease, reservation: models.Reservation,
           window: model.Window, change: Change, picked: list[int] | None,
           ) -> list[ledger.Edit]:
    """What becomes of the bookings of a reservation.

    :raises Full: when hosts have to be picked first
    :raises LostRace: when they were picked for other bookings
    """
    wanted = change.reservations.get(reservation.id)
    begun = lease.status in _BEGUN
    rows = reservation.bookings
    count = len(rows) if wanted is None else wanted.demand.count
    resources = change.resources
    if wanted is not None:
        used = sum(row.server_id is not None for row in rows)
        if reservation.flavor is None:
            raise errors.InvalidLeaseParams(
                f'Reservation {reservation.id} was made by a boot: its '
                f'servers are what they are. Leave it out.')
        if count < used:
            raise errors.InvalidLeaseParams(
                f'{used} servers of reservation {reservation.id} are there: '
                f'delete some of them first, or write an amount of at least '
                f'{used}.')
        others = (
            dict(wanted.demand.resources) != reservation.resources or
            {**(wanted.params or {}), 'amount': 0} !=
            {**(reservation.params or {}), 'amount': 0})
        if begun and others:
            raise errors.InvalidLeaseParams(
                f'Lease {lease.id} has started: of its reservations only the '
                f'amount can be changed.')
        if others and picked is None:
            # Such servers may not be allowed where these are.
            raise ledger.Full(0)
        resources = wanted.demand.resources
    kept = _kept(reservation, wanted)
    gone = [row for row in rows if row not in kept]
    if picked is None:
        if count > len(kept):
            raise ledger.Full(_UNPICKED)
        hosts: list[int | None] = [row.host_id for row in kept]
        added: list[int] = []
    elif begun:
        hosts, added = [row.host_id for row in kept], picked
    else:
        hosts, added = [*picked[:len(kept)]], picked[len(kept):]
    if len(kept) + len(added) != count or len(hosts) != len(kept):
        raise api.LostRace(-1)
    return [
        *(ledger.Edit(row, None) for row in gone),
        *(ledger.Edit(row, ledger.new_of(
            row, window=window, host_id=host_id,
            resources=resources or row.resources))
            for row, host_id in zip(kept, hosts)),
        *(ledger.Edit(None, ledger.NewBooking(
            reservation.id, host_id, None, window,
            resources or reservation.resources)) for host_id in added)]


def _kept(reservation: models.Reservation, wanted: NewReservation | None,
          ) -> list[models.Booking]:
    """The bookings that stay; those with a server are the last to go."""
    rows = sorted(reservation.bookings,
                  key=lambda row: (row.server_id is None, row.id))
    return rows if wanted is None else rows[:wanted.demand.count]


def _resize(reservation: models.Reservation, change: Change, now: int,
            ) -> None:
    """Write what a reservation is from now on."""
    wanted = change.reservations.get(reservation.id)
    if wanted is not None:
        reservation.resources = dict(wanted.demand.resources)
        reservation.amount = wanted.demand.count
        reservation.params = dict(wanted.params or {})
        reservation.flavor = dict(wanted.flavor or {})
        reservation.updated_at = now
    elif change.resources is not None:
        reservation.resources = dict(change.resources)
        reservation.updated_at = now


def _old_events(lease: models.Lease) -> list[models.Event]:
    """What has happened and is remembered no more: all but the newest, of
    which as many are kept as may be still to come.
    """
    done = [event for event in lease.events
            if event.status in ('DONE', 'ERROR') and event.event_type not in (
                states.EventType.START, states.EventType.END,
                states.EventType.EXPIRE)]
    done.sort(key=lambda event: (event.time, event.id))
    return done[:-requests.MAX_EVENTS]


def _redate(lease: models.Lease, window: model.Window, now: int) -> None:
    """Move a lease and its events; the user's own stay where they are."""
    moved = {states.EventType.START: window.start - lease.start_date,
             states.EventType.BEFORE_END: window.end - lease.end_date,
             states.EventType.END: window.end - lease.end_date}
    again = 0
    for event in lease.events:
        if event.event_type not in moved:
            continue
        time = max(event.time + moved[event.event_type], window.start)
        if event.status != 'DONE':
            event.time = time
            if event.due != model.FOREVER:
                event.due = time
            # Who is at it has the old date in mind: it is not his any more.
            event.status, event.claimed_by = 'UNDONE', None
            event.claimed_until = event.waits = 0
        elif event.event_type == states.EventType.BEFORE_END and time > now:
            again = max(again, time)
    if again and not any(
            event.status == 'UNDONE' and
            event.event_type == states.EventType.BEFORE_END
            for event in lease.events):
        # It was told of an end that is none any more.
        lease.events.append(models.Event(**_event(
            lease.id, states.EventType.BEFORE_END, again, now)))
    if lease.before_end_date is not None:
        lease.before_end_date = max(
            lease.before_end_date + window.end - lease.end_date, window.start)
    lease.start_date, lease.end_date = window.start, window.end
    lease.updated_at = now


@dataclasses.dataclass
class _Rows:
    """The rows of a lease that is to be."""

    lease: dict[str, ty.Any]
    reservations: list[dict[str, ty.Any]]
    events: list[dict[str, ty.Any]]
    held: list[dict[str, ty.Any]] = dataclasses.field(default_factory=list)
    credentials: list[dict[str, ty.Any]] = dataclasses.field(
        default_factory=list)

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


def _rows(new: NewLease, now: int, started: bool) -> _Rows:
    """What is to be written of a lease."""
    request = new.request
    lease_id = uuidutils.generate_uuid()
    # They are read in the order of their ids: that in which they were asked
    # for.
    ids = sorted(uuidutils.generate_uuid() for _one in new.reservations)
    return _Rows({
        'id': lease_id, 'name': request.name or f'lease-{lease_id[:8]}',
        'project_id': new.project_id, 'user_id': new.user_id,
        'start_date': request.window.start, 'end_date': request.window.end,
        'before_end_date': request.before_end, 'on_end': request.on_end,
        'status': 'STARTING' if started else 'PENDING', 'status_reason': '',
        'created_at': now, 'updated_at': now, 'deleted_at': None,
    }, [{
        'id': reservation_id, 'lease_id': lease_id,
        'resource_type': one.resource_type, 'amount': one.demand.count,
        'resources': dict(one.demand.resources), 'status': 'pending',
        'params': None if one.params is None else dict(one.params),
        'flavor': None if one.flavor is None else dict(one.flavor),
        'moved_at': None, 'created_at': now, 'updated_at': now,
    } for reservation_id, one in zip(ids, new.reservations, strict=True)], [
        _event(lease_id, event_type, time, now,
               done=started and event_type == states.EventType.START)
        for event_type, time in _events(request)])


def _events(request: requests.LeaseRequest) -> list[tuple[str, int]]:
    events = [(states.EventType.START, request.window.start),
              (states.EventType.END, request.window.end)]
    if request.before_end is not None:
        events.append((states.EventType.BEFORE_END, request.before_end))
    events += [(event.event_type, event.time) for event in request.events]
    return events


def _event(lease_id: str, event_type: str, time: int, now: int,
           done: bool = False) -> dict[str, ty.Any]:
    return {'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
            'event_type': event_type, 'time': time, 'due': time,
            'status': 'DONE' if done else 'UNDONE', 'attempts': 0,
            'waits': 0, 'claimed_by': None, 'claimed_until': 0,
            'created_at': now, 'updated_at': now}
