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

"""Due events, each carried out by one worker.

An event is a row with a due time. A worker takes one by compare-and-swap,
writing its name and until when the claim holds, and keeps extending it while
the action runs; the claims of a worker that died run out and fall to the
others. Actions may therefore run again after a crash, and are written for
that. Due events run side by side in a bounded pool: one slow lease delays
no other. Between them the engine sleeps until the next due time.

Who has much that is due delays nobody else: a free worker goes to the project
for which the fewest are at work. What starts and ends leases goes before what
only tells of them, and what is tried for the first time before what was put
off. The pauses of what is put off grow, until something happens to it.
"""

import collections
from concurrent import futures
import dataclasses
import functools
import threading
import typing as ty

from oslo_config import cfg
from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import lifecycle
from blazar_core.lifecycle import steps

__all__ = ['Engine']

LOG = logging.getLogger(__name__)

#: How many due events are read at a time.
_BATCH = 50

#: What moves leases; all else only tells of them.
_URGENT = (states.EventType.START, states.EventType.END,
           states.EventType.EXPIRE)

#: Due events as they are read, and whose they are.
_READ = sa.select(
    models.Event.id, models.Event.lease_id, models.Event.event_type,
    models.Event.attempts, models.Event.waits, models.Event.due,
    models.Lease.project_id,
).join(models.Event.lease)

#: Before and after the action of an event.
_STEPS = {
    states.EventType.START: (steps.Step.START_CLAIMED,
                             steps.Step.START_CARRIED_OUT),
    states.EventType.END: (steps.Step.END_CLAIMED, steps.Step.END_CARRIED_OUT),
}

#: Seconds until the database is asked again after it did not answer.
_AFTER_FAILURE = 5


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    """An event that this worker owns."""

    event_id: str
    lease_id: str
    event_type: str
    attempts: int
    waits: int
    project_id: str


class Engine:
    """Carries out due events.

    :param name: of this worker, unique among all that run
    """

    def __init__(self, conf: cfg.ConfigOpts, database: api.Database,
                 clock: clocks.Clock, lifecycle: lifecycle.Lifecycle,
                 name: str) -> None:
        self._database = database
        self._clock = clock
        self._lifecycle = lifecycle
        self._name = name
        self._workers: int = conf.blazar.workers
        self._longest_sleep: int = conf.blazar.longest_sleep
        self._claim_seconds: int = conf.blazar.claim_seconds
        self._beat = max(1, self._claim_seconds // 3)
        self._max_retries: int = conf.blazar.event_max_retries
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._running: dict[str, _Claim] = {}
        self._lock = threading.Lock()

    # -- running -----------------------------------------------------------

    def run(self) -> None:
        """Carry out events as they become due, until :meth:`stop`."""
        with futures.ThreadPoolExecutor(
                self._workers, thread_name_prefix='event') as pool:
            while not self._stopping.is_set():
                self._wake.clear()
                try:
                    next_look = self._hand_out(pool)
                except errors.BooksUnavailable:
                    # Who found that out has said so.
                    next_look = self._clock.now() + _AFTER_FAILURE
                except Exception:
                    LOG.exception('Due events could not be looked up; '
                                  'again in %s s', _AFTER_FAILURE)
                    next_look = self._clock.now() + _AFTER_FAILURE
                self._clock.wait(self._wake, next_look)
            self._see_out()

    def _see_out(self) -> None:
        """What is under way stays this worker's until it is done."""
        while True:
            self._wake.clear()
            with self._lock:
                if not self._running:
                    return
            again = self._clock.now() + self._beat
            try:
                self._extend()
            except errors.BooksUnavailable:
                pass
            except Exception:
                LOG.exception('Claims could not be extended')
            self._clock.wait(self._wake, again)

    def _hand_out(self, pool: futures.Executor) -> int:
        """Give what is due to the workers; returns when to look again."""
        self._extend()
        for claim in self._claim_due(self._free_workers()):
            self._hold(claim)
            pool.submit(self._carry_out, claim)
        return self._next_look()

    def run_due(self) -> int:
        """Carry out, here and now, what is due; returns how many events."""
        count = 0
        while claims := self._claim_due(1):
            for claim in claims:
                self._hold(claim)
                self._carry_out(claim)
                count += 1
        return count

    def wake(self) -> None:
        """Look at the events again: something has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Take no more events; :meth:`run` returns when the pool is idle."""
        self._stopping.set()
        self._wake.set()

    def hasten(self, lease_id: str, host_id: int | None) -> None:
        """A server of a lease has gone: try now what was put off for that.

        :param host_id: where it was; others may have waited for its room
        """
        self._database.retried(self._hasten, lease_id, host_id)
        self.wake()

    def _hasten(self, lease_id: str, host_id: int | None) -> None:
        now = self._clock.now()
        with self._database.writer() as session:
            # Read first: a statement that changes events by what other
            # tables say goes through all events on some databases.
            leases = set(session.scalars(
                sa.select(models.Reservation.lease_id)
                .join(models.Reservation.bookings)
                .where(models.Booking.host_id == host_id,
                       models.Booking.end_date > now,
                       models.Booking.start_date <= now)))
            # Who is at one just now may have looked before: he tries again
            # as soon as if it were the first time.
            session.execute(
                sa.update(models.Event)
                .where(models.Event.lease_id.in_({lease_id, *leases}),
                       models.Event.status.in_(states.OPEN),
                       models.Event.waits > 0)
                .values(due=now, waits=0))

    # -- claims ------------------------------------------------------------

    def _free_workers(self) -> int:
        with self._lock:
            return self._workers - len(self._running)

    def _hold(self, claim: _Claim) -> None:
        with self._lock:
            self._running[claim.event_id] = claim

    def _claim_due(self, most: int) -> list[_Claim]:
        """Up to ``most`` due events that are now this worker's."""
        claims: list[_Claim] = []
        if most <= 0:
            return claims
        now = self._clock.now()
        with self._lock:
            busy = collections.Counter(
                claim.project_id for claim in self._running.values())
        for event in _in_turn(self._due(now, most, busy), busy):
            if self._database.retried(self._claim, event.id, now):
                claims.append(_Claim(
                    event.id, event.lease_id, event.event_type,
                    event.attempts, event.waits, event.project_id))
                busy[event.project_id] += 1
            if len(claims) == most:
                break
        return claims

    def _due(self, now: int, most: int, busy: ty.Mapping[str, int],
             ) -> list[ty.Any]:
        """Due events, so that each of ``most`` workers could have one, and
        could have it of a project for which nobody works.
        """
        def read(kind: sa.ColumnElement[bool],
                 *order: sa.ColumnElement[ty.Any]) -> None:
            projects: set[str] = set()
            while True:
                rows = session.execute(
                    _READ.where(kind, models.Lease.project_id.not_in(projects))
                    .order_by(*order, models.Event.due, models.Event.id)
                    .limit(_BATCH)).all()
                found.update((row.id, row) for row in rows)
                projects.update(row.project_id for row in rows)
                # Behind many of one project there may be others.
                if len(rows) < _BATCH or len(projects - busy.keys()) >= most:
                    break

        found: dict[str, ty.Any] = {}
        with self._database.reader() as session:
            read(_is_abandoned(now))
            # Each kind by itself: there may be many of one before the others.
            for urgent in _URGENT:
                read(sa.and_(_is_waiting(now),
                             models.Event.event_type == urgent),
                     models.Event.waits > 0)
            if len(found) < most:
                read(_is_waiting(now))
        return list(found.values())

    def _claim(self, event_id: str, now: int) -> bool:
        with self._database.writer() as session:
            claimed = session.execute(
                sa.update(models.Event)
                .where(models.Event.id == event_id, _is_free(now))
                .values(status=states.Event.IN_PROGRESS, claimed_by=self._name,
                        claimed_until=now + self._claim_seconds))
            return ty.cast(
                'sa.CursorResult[ty.Any]', claimed).rowcount == 1

    def _extend(self) -> None:
        """Tell the others that the actions under way have not died."""
        with self._lock:
            running = list(self._running)
        if running:
            self._database.retried(self._extend_claims, running)

    def _extend_claims(self, event_ids: list[str]) -> None:
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Event)
                .where(models.Event.id.in_(event_ids),
                       models.Event.claimed_by == self._name)
                .values(claimed_until=self._clock.now() +
                        self._claim_seconds))

    def _next_look(self) -> int:
        """When to look again: at the next due time, at the latest soon.

        While all workers are busy the next event waits for one of them, and
        their end wakes the engine.
        """
        now = self._clock.now()
        latest = now + self._longest_sleep
        with self._lock:
            running = len(self._running)
        if running:
            latest = min(latest, now + self._beat)
        if running >= self._workers:
            return latest
        with self._database.reader() as session:
            due = session.scalar(
                sa.select(sa.func.min(models.Event.due))
                .where(models.Event.status == states.Event.UNDONE))
        return latest if due is None else min(latest, due)

    # -- actions -----------------------------------------------------------

    def _carry_out(self, claim: _Claim) -> None:
        """Run the action of an event and write down how it went."""
        before, after = _STEPS.get(claim.event_type, (None, None))
        try:
            if before is not None:
                steps.reached(before, claim.lease_id)
            outcome = self._action(claim)()
            if after is not None:
                steps.reached(after, claim.lease_id)
        except errors.NotFound:
            # Its lease was withdrawn, and the event with it.
            settle = functools.partial(self._settled, claim, None)
        except errors.BooksUnavailable as exc:
            # That is no attempt that failed.
            settle = functools.partial(
                self._settled, claim, facts.Later(_AFTER_FAILURE, str(exc)))
        except Exception:
            LOG.exception('Lease %s: %s failed', claim.lease_id,
                          claim.event_type)
            settle = functools.partial(self._failed, claim)
        else:
            settle = functools.partial(self._settled, claim, outcome)
        try:
            self._database.retried(settle)
        # The claim runs out, and the action is done again.
        except errors.BooksUnavailable as exc:
            LOG.warning('Lease %s: the outcome of %s is not written down: %s',
                        claim.lease_id, claim.event_type, exc)
        except Exception:
            LOG.exception('Lease %s: the outcome of %s could not be '
                          'written down', claim.lease_id, claim.event_type)
        finally:
            with self._lock:
                self._running.pop(claim.event_id, None)
            self.wake()

    def _action(self, claim: _Claim) -> ty.Callable[[], facts.Outcome]:
        starting, ending = self._lifecycle.starting, self._lifecycle.ending
        if claim.event_type == states.EventType.START:
            return functools.partial(
                starting.start, claim.lease_id, when_due=True)
        if claim.event_type == states.EventType.END:
            return functools.partial(
                ending.end, claim.lease_id, when_due=True)
        if claim.event_type == states.EventType.EXPIRE:
            return functools.partial(ending.expire, claim.lease_id)
        telling = self._lifecycle.telling
        if claim.event_type == states.EventType.MOVED:
            return functools.partial(telling.moved, claim.lease_id)
        return functools.partial(
            telling.announce, claim.lease_id, claim.event_type)

    def _settled(self, claim: _Claim, outcome: facts.Outcome) -> None:
        if outcome is None:
            self._write(claim, status=states.Event.DONE)
            return
        seconds, now = outcome.after(claim.waits), self._clock.now()
        LOG.info('Lease %s: %s again in %s s: %s', claim.lease_id,
                 claim.event_type, seconds, outcome.why)
        # Unless something has happened since it was claimed.
        same = models.Event.waits == claim.waits
        self._write(claim, status=states.Event.UNDONE, attempts=0,
                    due=sa.case((same, now + seconds),
                                else_=now + outcome.seconds),
                    waits=sa.case((same, claim.waits + 1), else_=1))

    def _failed(self, claim: _Claim) -> None:
        """Again after a pause that doubles, or not at all any more.

        The end of a lease or an offer is never given up: its capacity would
        be lost; nor is a move: it would be used where it is not.
        """
        attempts = claim.attempts + 1
        if attempts > self._max_retries and claim.event_type not in (
                states.EventType.END, states.EventType.EXPIRE,
                states.EventType.MOVED):
            self._lifecycle.starting.give_up(
                claim.lease_id, claim.event_type, functools.partial(
                    self._update, claim, status=states.Event.ERROR,
                    attempts=attempts))
            return
        pause = min(300, 2 ** min(attempts, 10))
        self._write(claim, status=states.Event.UNDONE, attempts=attempts,
                    due=self._clock.now() + pause)

    def _write(self, claim: _Claim, **values: ty.Any) -> None:
        """Settle an event, if it is still this worker's."""
        with self._database.writer() as session:
            self._update(claim, session, **values)

    def _update(self, claim: _Claim, session: orm.Session, **values: ty.Any,
                ) -> bool:
        """The same within a transaction; says whether it was."""
        states.EVENT.check(states.Event.IN_PROGRESS, values['status'])
        settled = session.execute(
            sa.update(models.Event)
            .where(models.Event.id == claim.event_id,
                   models.Event.claimed_by == self._name,
                   models.Event.status == states.Event.IN_PROGRESS)
            .values(claimed_by=None, claimed_until=0,
                    updated_at=self._clock.now(), **values))
        return ty.cast('sa.CursorResult[ty.Any]', settled).rowcount == 1


def _is_free(now: int) -> sa.ColumnElement[bool]:
    """Due, and nobody's; or its worker has died."""
    return sa.or_(_is_waiting(now), _is_abandoned(now))


def _is_waiting(now: int) -> sa.ColumnElement[bool]:
    return sa.and_(models.Event.status == states.Event.UNDONE,
                   models.Event.due <= now)


def _is_abandoned(now: int) -> sa.ColumnElement[bool]:
    return sa.and_(models.Event.status == states.Event.IN_PROGRESS,
                   models.Event.claimed_until <= now)


def _in_turn(events: list[ty.Any], busy: ty.Mapping[str, int],
             ) -> ty.Iterator[ty.Any]:
    """The next event that a free worker should take, again and again.

    :param busy: how many are at work, by project; counted on by the caller
    """
    def turn(event: ty.Any) -> tuple[ty.Any, ...]:
        return (event.event_type not in _URGENT,
                busy.get(event.project_id, 0), event.waits > 0,
                event.event_type != states.EventType.START, event.due,
                event.id)

    # Of equals of a project the order stays as it is.
    waiting: dict[tuple[str, bool], collections.deque[ty.Any]] = (
        collections.defaultdict(collections.deque))
    for event in sorted(events, key=turn):
        waiting[event.project_id, event.event_type in _URGENT].append(event)
    while waiting:
        key = min(waiting, key=lambda key: turn(waiting[key][0]))
        yield waiting[key].popleft()
        if not waiting[key]:
            del waiting[key]
