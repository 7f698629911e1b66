# SPDX-License-Identifier: Apache-2.0

"""The admission queue: leases that wait for capacity, and are admitted by
:mod:`blazar_core.capacity.admissions` once there is some.

A lease is tried at the times that its user asked for, and whenever a host has
changed. Leases of one project are served in the order of their requests; of
several projects, the one whose last admission is longest ago comes first. A
lease whose last attempt fails gets an error status, with the reason.

Capacity for leases of the type best effort is freed by
:mod:`blazar_core.lifecycle.best_effort`. Idempotent; safe to run concurrently.
"""

import dataclasses
import itertools
import math
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import hosted_servers
from blazar_core.leases import limits
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: By reservation id, its demand.
_Demands: ty.TypeAlias = dict[str, model.Demand]
#: Returns the result of the limits for a project and its waiting lease.
Bound: ty.TypeAlias = ty.Callable[[str, str], limits.Granted | None]


class DeferredAdmission:
    """Admits leases that wait for capacity.

    :param notify: called with an event type and a lease
    :param bound: returns the bound on the hosts of a lease; None: it has none
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, wanted: demands.Demands,
                 types: resource_types.ResourceTypes, notify: views.Notify,
                 bound: Bound) -> None:
        self.bound = bound
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types
        self._demands = wanted
        self._notify = notify

    def admit(self, lease_id: str) -> str | None:
        """Admit a lease if there is free capacity.

        :returns: why there is none; None: the lease no longer waits
        :raises CloudUnavailable: when its demand cannot be determined now
        :raises ConcurrentUpdate: when too many others book at the same moment
        """
        return self._database.retried(self._admit, lease_id)

    def attempt(self, lease_id: str) -> str | None:
        """Do the same; an error of the lease itself is a reason, too.

        :raises CloudUnavailable: as :meth:`admit`
        :raises ConcurrentUpdate: as :meth:`admit`
        """
        try:
            return self.admit(lease_id)
        except (errors.CloudUnavailable, errors.ConcurrentUpdate,
                errors.DatabaseUnavailable, errors.NotFound):
            raise
        except errors.DecryptionError as exc:
            return str(exc)
        except Exception:
            LOG.exception('Lease %s: whether there is capacity for it could '
                          'not be determined', lease_id)
            return 'what it needs could not be determined.'

    def _admit(self, lease_id: str, not_before: int = 0) -> str | None:
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            now = self._clock.now()
            start = max(lease.start_date, now, not_before)
            end = lease.end_date if lease.duration is None else (
                start + lease.duration)
            if end <= start:
                return 'Its end has passed.'
            if lease.duration is not None and now > (lease.retry_until or 0):
                # Neither limits nor the trust cover a later start.
                return 'Its waiting time has passed.'
            window = model.Window(start, end)
            if why := hosted_servers.why_not_of(
                    session, lease, window, later=True):
                return why
            # These bookings keep others off while capacity is freed.
            own = [row for row in lease.bookings if row.host_id is not None]
            project_id = lease.project_id
        wanted = self.needs(lease_id)
        if isinstance(wanted, refusals.Refusal):
            return wanted.while_waiting()
        granted = self.bound(project_id, lease_id)
        try:
            picked = self._admission.pick_all(
                [*wanted.values()], lease.booked(window), instead_of=own,
                host_bound=None if granted is None else granted.host_bound())
        except errors.LimitExceeded as exc:
            return str(exc)
        except errors.Refused as exc:
            later = exc.refusal.next_start
            if not_before or later is None or (
                    later > self._admission.off_until()) or (
                    later >= end if lease.duration is None
                    else later > (lease.retry_until or 0)):
                return exc.refusal.while_waiting()
            # Hosts that are off are only switched on for a booking.
            return self._admit(lease_id, later)
        described = self._enter(
            lease_id, window, wanted, dict(zip(wanted, picked, strict=True)),
            granted)
        if described is not None:
            LOG.info('Lease %s is admitted, from %s to %s', lease_id,
                     clocks.iso(window.start), clocks.iso(window.end))
            fault_points.fault_point(fault_points.FaultPoint.RETRY_ADMITTED,
                                     lease_id)
            self._notify('lease.update', described | {
                'changed': ['status', 'start_date', 'end_date'],
                'reason': conditions.Reason.ADMITTED})
        return None

    def needs(self, lease_id: str) -> _Demands | refusals.Refusal:
        """Return the current demands of the reservations of a lease, or the
        refusal of one for which there is no host at all.

        :raises CloudUnavailable: when they cannot be determined now
        """
        with self._database.reader() as session:
            build = dispatch.encrypted_call(session, [lease_id]).get(lease_id)
            asked = [(one, resource_types.context_of(session, one),
                      len(wanting(one)))
                     for one in api.found(session, lease_id).reservations]
        wanted: _Demands = {}
        for one, reserved, count in asked:
            said = self._demands.of(
                one, reserved, build and build.call)
            if isinstance(said, refusals.Refusal):
                return said
            wanted[one.id] = dataclasses.replace(
                said, count=count, least=None if said.least is None
                else min(said.least, count))
        return wanted

    def _enter(self, lease_id: str, window: model.Window, wanted: _Demands,
               picked: ty.Mapping[str, list[int]],
               granted: limits.Granted | None) -> views.Lease | None:
        """Book the capacity that a lease has waited for.

        :raises OverCapacity: when a host lacks capacity
        :raises LostRace: when another process decided about one meanwhile
        :raises Outdated: when the servers of the lease, or the hosts of its
            project, have changed meanwhile
        """
        with self._database.writer() as session:
            if granted is not None:
                granted.lock(session.connection())
            lease = api.locked(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            now = self._clock.now()
            if granted is not None:
                granted.confirm(session.connection(), [
                    ([*picked.values()], lease.booked(window))])
            if window.end <= now:
                raise api.Outdated('its end has passed')
            booked = lease.booked(window)
            edits = []
            for one in lease.reservations:
                demand = wanted[one.id]
                if demand.count != len(wanting(one)):
                    raise api.Outdated('some of its servers were deleted')
                one.amount = len(picked[one.id])
                edits += [ledger.Edit(
                    row, None if host_id is None else ledger.new_of(
                        row, window=booked, host_id=host_id,
                        resources=demand.resources, among=demand.among,
                        groups=demand.groups))
                    for row, host_id in itertools.zip_longest(
                        wanting(one), picked[one.id])]
            # The status first: the ledger records the usage as the lease's
            # own.
            lease.enter(states.Lease.PENDING, now)
            ledger.amend(session, now, edits)
            conditions.update(lease, now, conditions.Type.WAITING)
            lease.admitted_at = now
            events.retime(session, lease, self._types, window, now)
            if lease.duration is not None:
                events.move_own(lease, window.start - lease.start_date)
            events.redate(lease, window, now)
            events.begin(lease, _event_of(lease), now)
            events.charge(session, lease, now)
            return views.refreshed(session, lease)

    @api.retried
    def give_up(self, lease_id: str, reason: str) -> bool:
        """Fail a lease that has waited for capacity for too long.

        :returns: whether it still waited
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status not in states.SEEKING:
                return False
            conditions.update(
                lease, now, conditions.Type.WAITING, conditions.Condition(
                    conditions.Type.FAILED, conditions.Reason.NO_CAPACITY,
                    reason))
            lease.updated_at = now
            if lease.duration is not None:
                # The end is computed as if it were admitted now.
                start = max(lease.start_date, now)
                events.redate(
                    lease, model.Window(start, start + lease.duration), now)
            lease_status.fail_waiting(session, lease, now)
            events.begin(lease, _event_of(lease), now)
            session.flush()
            described = views.describe(lease)
        self._notify('lease.update', described)
        return True


def _event_of(lease: models.Lease) -> states.EventType:
    """Return the type of the event that tries to admit a lease."""
    return states.EventType.MAKE_ROOM if (
        lease.lease_type == requests.LeaseType.BEST_EFFORT
    ) else states.EventType.RETRY


def wanting(reservation: models.Reservation) -> list[models.Booking]:
    """Return the bookings that need a host."""
    return [row for row in reservation.bookings if row.failed_at is None]


#: Seconds between two looks for free capacity, and for which one look tries
#: leases at most.
PAUSE = 3
#: Seconds until all are tried again if the cloud did not answer for some.
_AGAIN = 30


class AdmissionQueue:
    """Admits leases that wait for capacity, when hosts change or at their
    time.
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 index: booking_index.Index, deferred: DeferredAdmission,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._index = index
        self._deferred = deferred
        #: The state of the hosts when the leases in ``_tried`` were tried
        #: without success, and whether these were all of the queue.
        self._news = -1
        self._tried: set[str] = set()
        self._done = True
        #: When all are tried again, as the cloud did not answer for some.
        self._again = math.inf

    def look(self) -> None:
        """Try leases that wait, if something has changed since the last time.

        Costs one statement if no lease waits, else a search for the first
        lease of each project. Stops after :data:`PAUSE` seconds; the next look
        continues.
        """
        late = self._clock.elapsed() + PAUSE
        line = self._line()
        if not line:
            return
        with self._index.fresh():
            # Only decisions about hosts free capacity.
            news = sum(host.generation for host in self._index.hosts.values())
        if self._done and (
                news != self._news or self._clock.elapsed() >= self._again):
            # Else the leases that have not been tried yet come first.
            self._news, self._tried, self._again = news, set(), math.inf
        self._done = False
        while self._clock.elapsed() <= late:
            lease = next((
                row for row in line if row.id not in self._tried), None)
            if lease is None:
                self._done = True
                return
            with logs.apart(lease.id, lease.project_id):
                if self._try_next(lease.id):
                    # A project that was served is last in the queue.
                    line = self._line()

    def _try_next(self, lease_id: str) -> bool:
        """Try a lease; return whether it no longer waits."""
        self._tried.add(lease_id)
        try:
            why = self._deferred.admit(lease_id)
        except (errors.CloudUnavailable, errors.ConcurrentUpdate) as exc:
            is_first = self._again == math.inf
            LOG.log(logging.WARNING if is_first else logging.DEBUG,
                    'Lease %s waits for capacity; whether there is any is '
                    'not known now: %s', lease_id, exc)
            if isinstance(exc, errors.ConcurrentUpdate):
                # Have the next look search again.
                self._news = -1
            elif is_first:
                self._again = self._clock.elapsed() + _AGAIN
            return False
        if why is not None:
            LOG.debug('Lease %s waits for capacity: %s', lease_id, why)
        return why is None

    def _line(self) -> list[ty.Any]:
        """Return the first lease of each project, in the order of the queue.
        """
        with self._database.reader() as session:
            heads: dict[str, ty.Any] = {}
            for row in session.execute(_WAITING):
                heads.setdefault(row.project_id, row)
            served = {row.project_id: row.last for row in session.execute(
                _SERVED, {'projects': [*heads]})} if heads else {}
        return sorted(heads.values(), key=lambda row: (
            served.get(row.project_id, 0), row.created_at, row.id))

    # -- events --------------------------------------------------------------

    def due(self, lease_id: str) -> retries.Result:
        """Try a lease when its event is due; the last attempt fails it."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status != states.Lease.WAITING:
            return None
        left = (lease.retry_until or 0) - self._clock.now()
        try:
            # The last attempt does not depend on the queue. A lease whose
            # needs cannot be determined blocks others of its project until its
            # last attempt at most.
            why = (self._behind(lease) if left > 0 else '') or (
                self._deferred.attempt(lease_id))
        except (errors.CloudUnavailable, errors.ConcurrentUpdate) as exc:
            # Temporary errors do not fail the lease, however long they last.
            return retries.wait(
                str(exc), isinstance(exc, errors.CloudUnavailable))
        fault_points.fault_point(fault_points.FaultPoint.RETRY_TRIED, lease_id)
        if why is None:
            return None
        if left <= 0:
            if self._deferred.give_up(
                    lease_id, 'No capacity became available until '
                    f'{clocks.minute(self._clock.now())} UTC: {why}'):
                LOG.warning('Lease %s is not admitted: %s', lease_id, why)
            return None
        reason = waiting.reason(why)
        lease_conditions.explain(
            self._database, self._clock, lease_id, lambda lease: [reason]
            if lease.status == states.Lease.WAITING else [])
        return retries.RetryAfter(min(lease.retry_interval or left, left),
                                  why)

    def _behind(self, lease: models.Lease) -> str:
        """Return why it is not the turn of a lease; empty: it is."""
        with self._database.reader() as session:
            return waiting.behind(
                session.connection(), lease.project_id, lease.id)


#: The oldest one first.
_WAITING = sa.select(
    models.Lease.id, models.Lease.project_id, models.Lease.created_at,
).where(models.Lease.status == states.Lease.WAITING).order_by(
    models.Lease.created_at, models.Lease.id)
#: When a lease of each project was admitted last.
_SERVED = sa.select(
    models.Lease.project_id,
    sa.func.max(models.Lease.admitted_at).label('last'),
).where(
    models.Lease.project_id.in_(sa.bindparam('projects', expanding=True)),
    models.Lease.admitted_at.is_not(None),
).group_by(models.Lease.project_id)
