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

"""Leases that wait for room.

They are tried at the times that were asked for, and as soon as something has
changed on a host. Those of a project come one after the other, in the order
in which they were asked for; of several projects the one comes first that has
waited longest since it got something. A lease that has had its last try
fails, and says why.

Any number of processes may do this at the same time.
"""

import dataclasses
import itertools
import typing as ty

from oslo_log import log as logging
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
from blazar_core.leases import events
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.leases import within
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core.lifecycle import transitions
from blazar_core import resources

__all__ = ['PAUSE', 'Retrying', 'fail', 'wanting']

LOG = logging.getLogger(__name__)

#: Seconds between two looks at whether there is room now, and for how long a
#: look goes through the leases that wait.
PAUSE = 3

#: By reservation, what it needs.
_Demands: ty.TypeAlias = dict[str, model.Demand]


class Retrying:
    """Gives leases that wait their room.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 opens: ty.Callable[[str], str], types: resources.Types,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._types = types
        self._demands = demands.Demands(clock, opens, types)
        self._notify = notify
        #: What the hosts were like when those were tried for which there was
        #: no room, and whether that was all of them.
        self._news = -1
        self._tried: set[str] = set()
        self._done = True

    def look(self) -> None:
        """Try leases that wait, if something has changed since the last time.

        One statement where nobody waits; else a search for the first one of
        each project. What is not done after :data:`PAUSE` seconds is done in
        the next look.
        """
        late = self._clock.elapsed() + PAUSE
        line = self._line()
        if not line:
            return
        self._demands.forget()
        with self._admission.index.fresh():
            # Room comes only by a decision about a host.
            news = sum(host.generation
                       for host in self._admission.index.hosts.values())
        if news != self._news and self._done:
            # Else those whose turn has not come yet come first.
            self._news, self._tried = news, set()
        self._done = False
        while self._clock.elapsed() <= late:
            lease_id = next((
                row.id for row in line if row.id not in self._tried), None)
            if lease_id is None:
                self._done = True
                return
            with facts.apart(lease_id):
                if self._try_next(lease_id):
                    # A project that got something goes to the end of the line.
                    line = self._line()

    def _try_next(self, lease_id: str) -> bool:
        """Try a lease; says whether it waits no more."""
        self._tried.add(lease_id)
        try:
            why = self.admit(lease_id)
        except (errors.CloudUnavailable, errors.BooksBusy) as exc:
            LOG.warning('Lease %s waits for capacity, and it cannot be found '
                        'out now whether there is some: %s', lease_id, exc)
            # The next look does not go by what this one has seen.
            self._news = -1
            return False
        if why is not None:
            LOG.debug('Lease %s waits for capacity: %s', lease_id, why)
        return why is None

    def _line(self) -> list[ty.Any]:
        """The next lease of each project, in turn."""
        with self._database.reader() as session:
            heads: dict[str, ty.Any] = {}
            for row in session.execute(_WAITING):
                heads.setdefault(row.project_id, row)
            served = {row.project_id: row.last for row in session.execute(
                _SERVED, {'projects': [*heads]})} if heads else {}
        return sorted(heads.values(), key=lambda row: (
            served.get(row.project_id, 0), row.created_at, row.id))

    # -- at its time ---------------------------------------------------------

    def due(self, lease_id: str) -> facts.Outcome:
        """It is time to try a lease; if that is the last time, it fails."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status != states.Lease.WAITING:
            return None
        left = (lease.retry_until or 0) - self._clock.now()
        try:
            # The last time everybody is tried.
            why = (self._behind(lease) if left > 0 else '') or (
                self.admit(lease_id))
        except (errors.CloudUnavailable, errors.BooksBusy) as exc:
            # However long it takes: it is not the lease that fails.
            return facts.Later(facts.AWAY, str(exc), facts.LONGEST_WAIT)
        except (errors.BooksUnavailable, errors.NotFound):
            raise
        except Exception:
            LOG.exception('Lease %s waits for capacity, and could not be '
                          'tried',
                          lease_id)
            # It keeps others of its project no longer than it may.
            why = 'it could not be found out what it needs.'
        steps.reached(steps.Step.RETRY_TRIED, lease_id)
        if why is None:
            return None
        described = self._database.retried(
            self._explain, lease_id, why, left <= 0)
        if left <= 0:
            if described is not None:
                LOG.warning('Lease %s gets no capacity: %s', lease_id, why)
                self._notify('lease.update', described)
            return None
        return facts.Later(min(lease.retry_interval or left, left), why)

    def _behind(self, lease: models.Lease) -> str:
        """Why it is not the turn of a lease; empty: it is."""
        with self._database.reader() as session:
            return waiting.behind(
                session.connection(), lease.project_id, lease.id)

    def _explain(self, lease_id: str, why: str, last: bool,
                 ) -> facts.Lease | None:
        """Say why a lease waits, or that it has failed.

        :returns: the lease; None when it does not wait any more
        """
        now, reason = self._clock.now(), waiting.reason(why)
        with self._database.reader() as session:
            if not last and api.found(
                    session, lease_id).status_reason == reason:
                return None
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.WAITING:
                return None
            lease.status_reason, lease.updated_at = reason, now
            if last:
                fail(session, lease, f'It got no capacity until '
                     f'{clocks.minute(now)} UTC: {why}',
                     states.EventType.RETRY, now)
            session.flush()
            return views.describe(lease)

    # -- one lease -----------------------------------------------------------

    def admit(self, lease_id: str) -> str | None:
        """Give a lease its room, if there is some.

        :returns: why there is none; None: it waits no more
        :raises CloudUnavailable: when it cannot be said now what it needs
        :raises BooksBusy: when too many others book at the same moment
        """
        return self._database.retried(self._admit, lease_id)

    def _admit(self, lease_id: str) -> str | None:
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            now = self._clock.now()
            start = max(lease.start_date, now)
            end = lease.end_date if lease.lasts is None else (
                start + lease.lasts)
            if end <= start:
                return 'Its end has come.'
            if lease.lasts is not None and now > (lease.retry_until or 0):
                # Neither limits nor a trust go further.
                return 'The time in which it may wait is over.'
            window = model.Window(start, end)
            for one in lease.reservations:
                outer = within.of(one)
                why = outer and within.why_not(
                    session, outer, lease.project_id, window, later=True)
                if why:
                    return why
            # What keeps others off there, while room is made.
            own = [row for row in lease.bookings if row.host_id is not None]
        wanted = self.needs(lease_id)
        if isinstance(wanted, refusals.Refusal):
            return wanted.sentence()
        try:
            picked = self._admission.pick_all(
                [*wanted.values()], lease.booked(window), instead_of=own)
        except errors.Refused as exc:
            return str(exc)
        described = self._enter(
            lease_id, window, wanted, dict(zip(wanted, picked, strict=True)))
        if described is not None:
            LOG.info('Lease %s has got its capacity, from %s to %s', lease_id,
                     clocks.iso(window.start), clocks.iso(window.end))
            steps.reached(steps.Step.RETRY_ADMITTED, lease_id)
            self._notify('lease.update', described)
        return None

    def needs(self, lease_id: str) -> _Demands | refusals.Refusal:
        """What the reservations of a lease need now, by their ids; or why
        there is no host at all for one.

        :raises CloudUnavailable: when it cannot be said now
        """
        with self._database.reader() as session:
            held = session.get(models.HeldBuild, lease_id)
            sealed = None if held is None else held.sealed
            asked = [(one, resources.reserved(session, one),
                      len(wanting(one)))
                     for one in api.found(session, lease_id).reservations]
        wanted: _Demands = {}
        for one, reserved, count in asked:
            said = self._demands.of(one, reserved, sealed)
            if isinstance(said, refusals.Refusal):
                return said
            wanted[one.id] = dataclasses.replace(
                said, count=count, least=None if said.least is None
                else min(said.least, count))
        return wanted

    def _enter(self, lease_id: str, window: model.Window, wanted: _Demands,
               picked: ty.Mapping[str, list[int]]) -> facts.Lease | None:
        """Book what a lease has waited for.

        :raises Full: when there is no room on a host
        :raises LostRace: when another process decided about one meanwhile
        :raises Outdated: when it is for others than was thought
        """
        now = self._clock.now()
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status not in states.SEEKING:
                return None
            booked = lease.booked(window)
            edits = []
            for one in lease.reservations:
                demand = wanted[one.id]
                if demand.count != len(wanting(one)):
                    raise api.Outdated('some of its servers have gone')
                one.amount = len(picked[one.id])
                edits += [ledger.Edit(
                    row, None if host_id is None else ledger.new_of(
                        row, window=booked, host_id=host_id,
                        resources=demand.resources, among=demand.among))
                    for row, host_id in itertools.zip_longest(
                        wanting(one), picked[one.id])]
            ledger.amend(session, now, edits)
            lease.enter(states.Lease.PENDING, now)
            lease.status_reason, lease.admitted_at = '', now
            events.retime(session, lease, self._types, window, now)
            if lease.lasts is not None:
                events.move_own(lease, window.start - lease.start_date)
            events.redate(lease, window, now)
            events.begin(lease, states.EventType.MAKE_ROOM if (
                lease.lease_type == requests.LeaseType.BEST_EFFORT
            ) else states.EventType.RETRY, now)
            session.flush()
            session.expire(lease)
            return views.describe(lease)


def fail(session: orm.Session, lease: models.Lease, reason: str,
         over: states.EventType, now: int) -> None:
    """A lease that had no capacity will not get any.

    :param over: the event that has tried to
    """
    lease.status_reason, lease.updated_at = reason, now
    if lease.lasts is not None:
        # Its end comes as if it had got it now.
        start = max(lease.start_date, now)
        events.redate(
            lease, model.Window(start, start + lease.lasts), now)
    transitions.fail_waiting(session, lease, now)
    events.begin(lease, over, now)


def wanting(reservation: models.Reservation) -> list[models.Booking]:
    """The bookings that need a host."""
    return [row for row in reservation.bookings if row.failed_at is None]


#: Oldest first.
_WAITING = sa.select(
    models.Lease.id, models.Lease.project_id, models.Lease.created_at,
).where(models.Lease.status == states.Lease.WAITING).order_by(
    models.Lease.created_at, models.Lease.id)
#: When projects got something last.
_SERVED = sa.select(
    models.Lease.project_id,
    sa.func.max(models.Lease.admitted_at).label('last'),
).where(
    models.Lease.project_id.in_(sa.bindparam('projects', expanding=True)),
    models.Lease.admitted_at.is_not(None),
).group_by(models.Lease.project_id)
