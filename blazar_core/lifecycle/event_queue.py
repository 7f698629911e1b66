# SPDX-License-Identifier: Apache-2.0

"""Due events, and the workers that own them.

A worker claims an event by compare and swap, with its name and until when the
claim is valid. A project with many due events does not delay the others: a
free worker serves the project for which the fewest workers are busy. Starts
and ends of leases come before notifications, and first tries before deferred
events. Slow actions, and starts that were deferred, are taken by a limited
number of workers.
"""

import collections
from concurrent import futures
import contextlib
import dataclasses
import itertools
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import retries

LOG = logging.getLogger(__name__)

#: Seconds after its due time from which a pending event counts as late.
LATE = 60

#: The most due events that are read at a time.
_BATCH = 50

#: Seconds between two searches for events that a wrong clock has deferred.
_STRAY_SECONDS = 10

#: Events that change leases; all others only notify.
_URGENT = (states.EventType.START, states.EventType.END,
           states.EventType.EXPIRE, states.EventType.RETRY,
           states.EventType.MAKE_ROOM, states.EventType.EXTEND,
           states.EventType.CHANGED)

#: Due events as they are read, with their projects.
_READ = sa.select(
    models.Event.id, models.Event.lease_id, models.Event.event_type,
    models.Event.attempts, models.Event.deferrals, models.Event.run_at,
    models.Event.action, models.Event.time,
    models.Lease.project_id, models.Lease.conditions,
).join(models.Event.lease).where(models.Lease.project_id.not_in(
    sa.bindparam('projects', expanding=True)))
#: Events without an action, which change a lease or only notify.
_IS_QUICK = models.Event.action.is_(None)
_NOW = sa.bindparam('now', type_=sa.BigInteger)
_WAITING = sa.and_(
    models.Event.status == states.Event.UNDONE, models.Event.run_at <= _NOW)
_ABANDONED = sa.and_(
    models.Event.status == states.Event.IN_PROGRESS, clock_skew.is_over(
        models.Event.claimed_until, _NOW, sa.bindparam(
            'longest', type_=sa.BigInteger)))
#: Seconds from now on beyond which no event is deferred: twice the longest
#: pause, plus the interval of the lease for admissions.
_FURTHEST = retries.LONGEST_PAUSE + sa.case(
    (models.Event.event_type == states.EventType.RETRY,
     sa.func.coalesce(models.Lease.retry_interval, 0)), else_=0) + (
         retries.LONGEST_PAUSE)
#: Events that were due by now, or at once, and were deferred beyond that.
#: Events at their own date do not count, nor an offer, which waits without
#: one. Adding 0 makes any database use the index of the first condition.
_DUE = models.Event.run_at + 0
_FAR = sa.and_(
    models.Event.status == states.Event.UNDONE,
    # So neither row nor lease of an overdue event is read.
    _DUE > _NOW + 2 * retries.LONGEST_PAUSE,
    _DUE > _NOW + _FURTHEST, _DUE < model.FOREVER)
_STRAY = sa.union_all(*(
    sa.select(models.Event.id, models.Event.run_at, models.Event.lease_id,
              models.Lease.project_id)
    .join(models.Event.lease).where(at, _FAR).order_by(None) for at in (
        models.Event.time <= _NOW,
        sa.and_(models.Event.time + 0 > _NOW, models.Event.event_type.in_(
            (states.EventType.CHANGED, states.EventType.MAKE_ROOM,
             states.EventType.ORPHANED))))))
_OLDEST = (models.Event.run_at, models.Event.id)
_NEXT = sa.select(sa.func.min(models.Event.run_at)).where(
    models.Event.status == states.Event.UNDONE)
#: Starts that were deferred, which may wait for a silent service again.
_IS_LATE_START = sa.and_(models.Event.event_type == states.EventType.START,
                         models.Event.deferrals > 0)
#: By whether slow events, and deferred starts, are included.
_NEXT_OF = {(slow, starts): _NEXT.where(
    *([] if slow else [_IS_QUICK]), *([] if starts else [~_IS_LATE_START]))
    for slow in (False, True) for starts in (False, True)}
#: When the next event is due, and what there is to read. Executed very often,
#: and so built once: mostly there is nothing, else one kind or two.
_THERE = sa.select(
    _NEXT.scalar_subquery(),
    sa.exists().where(_ABANDONED), sa.exists().where(_WAITING),
    *(sa.exists().where(_WAITING, models.Event.event_type == kind)
      for kind in _URGENT), clock_skew.database_time())
_READ_ABANDONED = _READ.where(_ABANDONED, _IS_QUICK).order_by(
    *_OLDEST).limit(_BATCH)
_READ_URGENT = _READ.where(
    _WAITING, models.Event.event_type == sa.bindparam('urgent'),
).order_by(models.Event.deferrals > 0, *_OLDEST).limit(_BATCH)
#: Without deferred starts, which are read with the urgent ones, and of which
#: there may be many that no worker may take now.
_READ_WAITING = _READ.where(_WAITING, _IS_QUICK, ~_IS_LATE_START).order_by(
    *_OLDEST).limit(_BATCH)
_READ_SLOW = _READ.where(
    sa.or_(_WAITING, _ABANDONED), ~_IS_QUICK).order_by(*_OLDEST).limit(_BATCH)
_EVENTS = models.Event.__table__.c
_THESE = _EVENTS.id.in_(sa.bindparam('events', expanding=True))
_MINE = sa.and_(_THESE, _EVENTS.claimed_by == sa.bindparam('worker'),
                _EVENTS.status == states.Event.IN_PROGRESS)
#: Events that are due and unclaimed, or whose worker has died.
_CLAIM = sa.update(models.Event.__table__).where(
    _THESE, sa.or_(_WAITING, _ABANDONED),
).values(status=states.Event.IN_PROGRESS, claimed_by=sa.bindparam('worker'),
         claimed_until=sa.bindparam('until'))
_BRING_BACK = sa.update(models.Event.__table__).where(
    _EVENTS.id == sa.bindparam('event'),
    _EVENTS.status == states.Event.UNDONE,
    _EVENTS.run_at == sa.bindparam('seen')).values(run_at=sa.bindparam('now'))
_CLAIMED = sa.select(_EVENTS.id).where(_MINE)
_DONE = sa.update(models.Event.__table__).where(_MINE).values(
    status=states.Event.DONE, claimed_by=None, claimed_until=0,
    updated_at=sa.bindparam('now'))


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """An event that this worker owns.

    :ivar slow: whether its action is slow
    :ivar shown: whether the lease shows that an event of it is deferred
    """

    event_id: str
    lease_id: str
    event_type: str
    attempts: int
    deferrals: int
    project_id: str
    slow: bool = False
    shown: bool = False
    time: int = 0

    @property
    def is_late_start(self) -> bool:
        return _is_late_start(self)


class EventQueue:
    """The due events, as one worker sees them.

    :param name: of the worker, unique among all that run
    :param seconds: for which a claim is valid
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 name: str, seconds: int) -> None:
        self._database = database
        self._clock = clock
        self._name = name
        self._seconds = seconds
        #: When to search for events that a wrong clock has deferred.
        self._look_for_strays = float('-inf')
        #: If the last look found nothing: when the next event is due.
        self._quiet: tuple[int | None] | None = None
        self._done = _Together(self._finish)

    def claim_due(self, most: int, busy: collections.Counter[str], slow: int,
                  starts: int) -> list[Claim]:
        """Claim up to ``most`` due events.

        :param busy: the number of running events by project; updated
        :param slow: how many of them may be slow
        :param starts: how many of them may be deferred starts
        """
        claims: list[Claim] = []
        self._quiet = None
        if most <= 0:
            return claims
        now = self._clock.now()
        turns = _in_turn(self._due(now, most, busy, slow > 0, starts), busy)
        while len(claims) < most:
            wanted: list[Claim] = []
            for event in turns:
                is_slow = event.action is not None
                is_late_start = _is_late_start(event)
                if is_slow and slow <= 0 or is_late_start and starts <= 0:
                    continue
                wanted.append(Claim(
                    event.id, event.lease_id, event.event_type,
                    event.attempts, event.deferrals, event.project_id, is_slow,
                    conditions.find(
                        event.conditions,
                        conditions.Type.EVENT_DEFERRED) is not None,
                    event.time))
                busy[event.project_id] += 1
                slow -= is_slow
                starts -= is_late_start
                if len(claims) + len(wanted) == most:
                    break
            if not wanted:
                break
            taken = self.claim([one.event_id for one in wanted])
            for one in wanted:
                if one.event_id in taken:
                    claims.append(one)
                else:
                    busy[one.project_id] -= 1
                    slow += one.slow
                    starts += one.is_late_start
        return claims

    def _due(self, now: int, most: int, busy: ty.Mapping[str, int],
             slow: bool, starts: int) -> list[ty.Any]:
        """Return due events, enough for each of ``most`` workers to have one
        of a project for which no worker is busy.

        :param slow: include slow ones
        :param starts: how many deferred starts count
        """
        def lacks() -> bool:
            late = sum(map(_is_late_start, found.values()))
            return len(found) - late + min(late, starts) < most

        def read(kind: sa.Select[ty.Any], **of: str) -> None:
            projects: set[str] = set()
            while True:
                rows = connection.execute(kind, {
                    **self._at(now), 'projects': list(projects), **of,
                }).all()
                found.update((row.id, row) for row in rows)
                projects.update(row.project_id for row in rows)
                # Events of other projects may follow many of one project.
                if len(rows) < _BATCH or len(projects - busy.keys()) >= most:
                    break

        found: dict[str, ty.Any] = {}
        if self._clock.elapsed() >= self._look_for_strays:
            self._bring_back(now)
            self._look_for_strays = self._clock.elapsed() + _STRAY_SECONDS
        with self._database.connection() as connection:
            next_due, abandoned, waiting, *kinds = (
                self._database.skew.one(
                    connection, _THERE, self._at(now)))
            if not abandoned and not waiting:
                self._quiet = (next_due,)
            if abandoned:
                read(_READ_ABANDONED)
            # Each kind by itself: one may have many events before the others.
            for urgent in itertools.compress(_URGENT, kinds):
                read(_READ_URGENT, urgent=urgent)
            if waiting and lacks():
                read(_READ_WAITING)
            if (abandoned or waiting) and lacks() and slow:
                read(_READ_SLOW)
        return list(found.values())

    def _at(self, now: int) -> dict[str, int]:
        """Return the time, and the longest that a claim may last: other
        workers may be configured with longer claims.
        """
        return {'now': now, 'longest': 2 * self._seconds}

    @api.retried
    def _bring_back(self, now: int) -> None:
        """Make events due that a wrong clock has deferred beyond any pause."""
        with self._database.connection() as connection:
            found = connection.execute(_STRAY, {'now': now}).all()
        if not found:
            return
        with self._database.begin() as connection:
            for event_id, due, *_of in found:
                connection.execute(_BRING_BACK, {
                    'event': event_id, 'seen': due, 'now': now})
        for lease_id, project_id in sorted({
                (row.lease_id, row.project_id) for row in found}):
            with logs.about(lease_id, project_id):
                LOG.warning('Lease %s: an event was deferred by a fast clock; '
                            'it is due now', lease_id)

    @api.retried
    def claim(self, event_ids: list[str]) -> set[str]:
        """Claim events; return those that this worker has got."""
        these = {'events': event_ids, 'worker': self._name}
        with self._database.begin() as connection:
            # The clock is right here; it may have been wrong when the events
            # were read.
            now = self._clock.now()
            taken = connection.execute(_CLAIM, {
                **these, **self._at(now),
                'until': now + self._seconds}).rowcount
            if taken in (0, len(event_ids)):
                return set(event_ids[:taken])
            return set(connection.scalars(_CLAIMED, these))

    @api.retried
    def extend(self, event_ids: ty.Collection[str]) -> None:
        """Extend the claims of events, whose actions still run."""
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Event)
                .where(models.Event.id.in_(event_ids),
                       models.Event.claimed_by == self._name)
                .values(claimed_until=self._clock.now() +
                        self._seconds))

    def next_due(self, slow: bool, starts: bool) -> int | None:
        """Return when the next pending event is due; None: there is none.

        Costs no statement after a look that has found nothing.

        :param slow: include slow ones
        :param starts: include deferred starts
        """
        if self._quiet is not None:
            return self._quiet[0]
        with self._database.connection() as connection:
            return connection.scalar(_NEXT_OF[slow, starts])

    @api.retried
    def trigger(self, lease_id: str, host_id: int | None) -> None:
        """Make deferred events due, of a lease and of others on a host."""
        now = self._clock.now()
        with self._database.writer() as session:
            # Read first: on some databases, an update of events with a
            # condition on other tables scans all events.
            leases = set(session.scalars(
                sa.select(models.Reservation.lease_id)
                .join(models.Reservation.bookings)
                .where(models.Booking.host_id == host_id,
                       models.Booking.end_date > now,
                       models.Booking.start_date <= now)))
            # A worker that handles one now may have looked before this change:
            # it retries as soon as after the first attempt.
            session.execute(
                sa.update(models.Event)
                .where(models.Event.lease_id.in_({lease_id, *leases}),
                       models.Event.status.in_(states.OPEN),
                       models.Event.deferrals > 0)
                .values(run_at=now, deferrals=0))

    def done(self, claim: Claim) -> None:
        """Mark an event as done, if this worker still owns it.

        Returns when that is committed.
        """
        if self._changes_lease(claim, None):
            self.write(claim, None, status=states.Event.DONE)
        else:
            self._done.do(claim.event_id)

    @api.retried
    def _finish(self, event_ids: list[str]) -> None:
        with self._database.begin() as connection:
            connection.execute(_DONE, {
                'events': event_ids, 'worker': self._name,
                'now': self._clock.now()})

    def write(self, claim: Claim, outcome: retries.Result, **values: ty.Any,
              ) -> None:
        """Record the outcome of an event, if this worker still owns it, and in
        its lease whether it is deferred: both, or nothing.
        """
        changes_lease = self._changes_lease(claim, outcome)
        # The lease may have been purged, and its events with it.
        with (contextlib.suppress(errors.NotFound),
              self._database.writer() as session):
            if changes_lease:
                api.locked(session, claim.lease_id)
                self.update(claim, outcome, session, **values)
            else:
                self._settle(claim, session, **values)

    def update(self, claim: Claim, outcome: retries.Result,
               session: orm.Session, **values: ty.Any) -> bool:
        """Do the same with the lease locked; return whether it was done."""
        if not self._settle(claim, session, **values):
            return False
        lease = api.found(session, claim.lease_id)
        if lease.status != states.Lease.TERMINATED:
            conditions.update(lease, self._clock.now(),
                              *_changes(claim, outcome, lease))
        return True

    def _settle(self, claim: Claim, session: orm.Session, **values: ty.Any,
                ) -> bool:
        states.EVENT.check(states.Event.IN_PROGRESS, values['status'])
        settled = session.execute(
            sa.update(models.Event)
            .where(models.Event.id == claim.event_id,
                   models.Event.claimed_by == self._name,
                   models.Event.status == states.Event.IN_PROGRESS)
            .values(claimed_by=None, claimed_until=0,
                    updated_at=self._clock.now(), **values))
        return ty.cast('sa.CursorResult[ty.Any]', settled).rowcount == 1

    def _changes_lease(self, claim: Claim, outcome: retries.Result) -> bool:
        """Return whether the conditions of a lease change with an outcome."""
        if not claim.shown and not (
                isinstance(outcome, retries.RetryAfter) and outcome.shown):
            return False
        with (contextlib.suppress(errors.NotFound),
              self._database.reader() as session):
            lease = api.found(session, claim.lease_id)
            return lease.status != states.Lease.TERMINATED and (
                not conditions.holds(
                    lease.conditions, *_changes(claim, outcome, lease)))
        return False


def _changes(claim: Claim, outcome: retries.Result, lease: models.Lease,
             ) -> list[conditions.Condition | conditions.Type]:
    """Return the changes of the conditions of a lease by an outcome."""
    if isinstance(outcome, retries.RetryAfter) and outcome.shown:
        return [lease_conditions.deferred(claim.event_type, outcome.why)]
    said = conditions.find(lease.conditions, conditions.Type.EVENT_DEFERRED)
    return [conditions.Type.EVENT_DEFERRED] if said is not None and (
        said['details']['event_type'] == claim.event_type) else []


class _Together:
    """Runs an action once for several threads that request it concurrently.

    :param action: called with what each of them passed
    """

    def __init__(self, action: ty.Callable[[list[str]], None]) -> None:
        self._action = action
        self._turn = threading.Lock()
        self._waiting: collections.deque[tuple[
            str, futures.Future[None]]] = collections.deque()

    def do(self, one: str) -> None:
        """Return when the action is done, or raise what it raised for all."""
        outcome: futures.Future[None] = futures.Future()
        self._waiting.append((one, outcome))
        with self._turn:
            # The thread that held the lock before may have done it.
            if not outcome.done():
                self._do_all()
        outcome.result()

    def _do_all(self) -> None:
        batch = [self._waiting.popleft() for _one in range(
            len(self._waiting))]
        try:
            self._action([one for one, _outcome in batch])
        except BaseException as exc:
            for _one, outcome in batch:
                outcome.set_exception(exc)
        else:
            for _one, outcome in batch:
                outcome.set_result(None)


def _is_late_start(event: ty.Any) -> bool:
    """Return whether an event, or a claim, is a start that was deferred."""
    return bool(event.deferrals > 0 and
                event.event_type == states.EventType.START)


def _in_turn(events: list[ty.Any], busy: ty.Mapping[str, int],
             ) -> ty.Iterator[ty.Any]:
    """Yield the events in the order in which free workers should take them.

    :param busy: the number of running events by project; updated by the caller
    """
    def turn(event: ty.Any) -> tuple[ty.Any, ...]:
        return (event.event_type not in _URGENT,
                busy.get(event.project_id, 0), event.deferrals > 0,
                event.event_type != states.EventType.START, event.run_at,
                event.id)

    # Equal events of a project keep their order.
    waiting: dict[tuple[str, bool], collections.deque[ty.Any]] = (
        collections.defaultdict(collections.deque))
    for event in sorted(events, key=turn):
        waiting[event.project_id, event.event_type in _URGENT].append(event)
    while waiting:
        key = min(waiting, key=lambda key: turn(waiting[key][0]))
        yield waiting[key].popleft()
        if not waiting[key]:
            del waiting[key]


def late_events(connection: sa.Connection, now: int) -> int:
    """Return the number of pending events that were due more than
    :data:`LATE` seconds ago.
    """
    event = models.Event.__table__.c
    return connection.scalar(sa.select(sa.func.count()).where(
        event.status == states.Event.UNDONE, event.run_at < now - LATE)) or 0


def deferred_events(connection: sa.Connection, now: int) -> int:
    """Return the number of events of more than :data:`LATE` seconds ago that
    could not be carried out yet and are retried.
    """
    event = models.Event.__table__.c
    return connection.scalar(sa.select(sa.func.count()).where(
        event.status == states.Event.UNDONE, event.time < now - LATE,
        event.run_at >= now - LATE, event.run_at < model.FOREVER)) or 0
