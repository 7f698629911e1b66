# SPDX-License-Identifier: Apache-2.0

"""Carry out due events, each by one worker.

An event is a row with a due time. A worker claims one
(:mod:`~blazar_core.lifecycle.event_queue`), and extends its claim while the
action runs; the claims of a worker that died expire, and others take them. So
an action may run again after a crash, and is idempotent. Events run
concurrently in a bounded pool: a slow lease delays no other; slow actions, and
starts that were deferred, get a part of the workers only. The engine sleeps
until the next due time.

The outcome of an event is written to its row and to its lease in one
transaction, by the owner of the claim. The pauses of deferred events grow,
until something changes for them.
"""

import collections
from concurrent import futures
import functools
import threading
import typing as ty

from oslo_config import cfg
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import lease_start
from blazar_core.lifecycle import retries

LOG = logging.getLogger(__name__)


#: The fault points before and after the action of an event.
_STEPS: dict[str, tuple[fault_points.FaultPoint, fault_points.FaultPoint]] = {
    states.EventType.START: (fault_points.FaultPoint.START_CLAIMED,
                             fault_points.FaultPoint.START_CARRIED_OUT),
    states.EventType.END: (fault_points.FaultPoint.END_CLAIMED,
                           fault_points.FaultPoint.END_CARRIED_OUT)}

#: Seconds until the database is asked again after it did not answer.
_AFTER_FAILURE = 5

#: Counters: events by result, and seconds by which starts and ends were late,
#: with the bounds of the buckets of these.
EVENTS = 'blazar_events'
LATENESS = 'blazar_event_lateness_seconds'
LATE = (1, 2, 5, 10, 30, 60, 300, 3600)

#: One of so many workers may carry out slow events, and deferred starts: each
#: of these may wait for a service that does not answer.
_PER_SLOW, _PER_LATE_START = 4, 2


class Engine:
    """Carries out due events.

    :param name: of this worker, unique among all that run
    """

    def __init__(self, conf: cfg.ConfigOpts, database: api.Database,
                 clock: clocks.Clock, lifecycle: handlers.Handlers,
                 name: str) -> None:
        self._database = database
        self._clock = clock
        self._lifecycle = lifecycle
        self._workers: int = conf.blazar.workers
        self._most_slow: int = max(1, self._workers // _PER_SLOW)
        self._max_sleep: int = conf.blazar.max_sleep
        seconds: int = conf.blazar.worker_timeout
        self._queue = event_queue.EventQueue(database, clock, name, seconds)
        self._beat, self._extended = max(1, seconds // 3), float('-inf')
        self._max_retries: int = conf.blazar.event_max_retries
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._running: dict[str, event_queue.Claim] = {}
        self._lock = threading.Lock()

    # -- running -----------------------------------------------------------

    def run(self) -> None:
        """Carry out events as they become due, until :meth:`stop`."""
        with futures.ThreadPoolExecutor(
                self._workers, thread_name_prefix='event') as pool:
            while not self._stopping.is_set():
                self._wake.clear()
                next_look = self._clock.now() + _AFTER_FAILURE
                try:
                    next_look = self._hand_out(pool)
                except errors.DatabaseUnavailable:
                    pass  # The thread that noticed it has logged it.
                except Exception:
                    LOG.exception(
                        'Reading due events failed; again in %s '
                        's', _AFTER_FAILURE)
                # The clock may have been set back since that was found.
                self._clock.wait(self._wake, min(
                    next_look, self._clock.now() + self._max_sleep))
            self._see_out()

    def _see_out(self) -> None:
        """Keep the claims of running events until they are done."""
        while True:
            self._wake.clear()
            with self._lock:
                if not self._running:
                    return
            again = self._clock.now() + self._beat
            try:
                self._extend()
            except errors.DatabaseUnavailable:
                pass
            except Exception:
                LOG.exception('Extending claims failed')
            self._clock.wait(self._wake, again)

    def _hand_out(self, pool: futures.Executor) -> int:
        """Submit due events to the workers; return when to look again."""
        self._extend()
        claims = self._claim_due(self._free()[0])
        read = self._read(claims)
        for claim in claims:
            # Not before: no other worker gets an event that is held here.
            self._hold(claim)
            pool.submit(self._carry_out, claim, read.get(claim.lease_id))
        return self._next_look()

    def _read(self, claims: list[event_queue.Claim]) -> dict[str,
                                                             lease_start.Read]:
        """Read what several starting leases need, once for all of them."""
        lease_ids = [claim.lease_id for claim in claims
                     if claim.event_type == states.EventType.START]
        try:
            return self._lifecycle.lease_start.read(
                lease_ids) if len(lease_ids) > 1 else {}
        except errors.DatabaseUnavailable:
            # Each of the workers notices that by itself.
            return {}
        except Exception:
            LOG.exception('Reading the starting leases together failed; they '
                          'are read one by one')
            return {}

    def wake(self) -> None:
        """Look at the events again, as something has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Take no more events; :meth:`run` returns when the pool is idle."""
        self._stopping.set()
        self._wake.set()

    def trigger(self, lease_id: str, host_id: int | None) -> None:
        """Retry deferred events now, as a server of a lease is gone.

        :param host_id: where it was; other leases may wait for its capacity
        """
        self._queue.trigger(lease_id, host_id)
        self.wake()

    # -- claims ------------------------------------------------------------

    def _free(self) -> tuple[int, int, int]:
        """Return how many workers are free, and how many of all may take a
        slow event, or a deferred start, now.
        """
        with self._lock:
            running = self._running.values()
            return (self._workers - len(running),
                    self._most_slow - sum(claim.slow for claim in running),
                    max(1, self._workers // _PER_LATE_START) - sum(
                        claim.is_late_start for claim in running))

    def _hold(self, claim: event_queue.Claim) -> None:
        with self._lock:
            self._running[claim.event_id] = claim

    def _claim_due(self, most: int) -> list[event_queue.Claim]:
        """Claim up to ``most`` due events."""
        with self._lock:
            busy = collections.Counter(
                claim.project_id for claim in self._running.values())
        _free, slow, starts = self._free()
        return self._queue.claim_due(most, busy, slow, starts)

    def _extend(self) -> None:
        """Extend the claims of running events, at most twice in a beat."""
        with self._lock:
            running = list(self._running)
        if running and (elapsed := self._clock.elapsed()) >= (
                self._extended + self._beat / 2):
            self._queue.extend(running)
            self._extended = elapsed

    def _next_look(self) -> int:
        """Return when to look again: at the next due time, or after
        ``max_sleep``. While all workers are busy, the end of one wakes the
        engine.
        """
        now = self._clock.now()
        latest = now + self._max_sleep
        free, slow, starts = self._free()
        if free < self._workers:
            latest = min(latest, now + self._beat)
        if free <= 0:
            return latest
        due = self._queue.next_due(slow > 0, starts > 0)
        return latest if due is None else min(latest, due)

    # -- actions -----------------------------------------------------------

    def _carry_out(self, claim: event_queue.Claim,
                   read: lease_start.Read | None = None) -> None:
        """Carry out an event, with its lease in the log context."""
        with logs.about(claim.lease_id, claim.project_id):
            self._act(claim, read)

    def _act(self, claim: event_queue.Claim,
             read: lease_start.Read | None) -> None:
        """Carry out the action of an event, and record its outcome.

        :param read: what was read ahead for a start; None: nothing was
        """
        before, after = _STEPS.get(claim.event_type, (None, None))
        result = 'deferred'
        try:
            if before is not None:
                fault_points.fault_point(before, claim.lease_id)
            outcome = _action(self._lifecycle, claim, read)(claim.lease_id)
            if after is not None:
                fault_points.fault_point(after, claim.lease_id)
        except errors.NotFound:
            # Its lease was purged, and the event with it.
            settle = functools.partial(self._settled, claim, None)
        except (errors.DatabaseUnavailable, errors.DecryptionError) as exc:
            # That does not count as a failed attempt.
            settle = functools.partial(
                self._settled, claim, _unavailable(claim, exc))
        except Exception as exc:
            LOG.exception('Lease %s: %s failed', claim.lease_id,
                          claim.event_type)
            result = 'failed'
            settle = functools.partial(self._failed, claim, exc)
        else:
            if not isinstance(outcome, retries.RetryAfter):
                result = 'done' if outcome is None else 'failed'
            settle = functools.partial(self._settled, claim, outcome)
        try:
            self._database.retried(settle)
            self._count(claim, result)
        # The claim expires, and the action runs again.
        except errors.DatabaseUnavailable as exc:
            LOG.warning('Lease %s: the result of %s is not recorded: %s',
                        claim.lease_id, claim.event_type, exc)
        except Exception:
            LOG.exception('Lease %s: recording the result of %s failed',
                          claim.lease_id, claim.event_type)
        finally:
            with self._lock:
                self._running.pop(claim.event_id, None)
            self.wake()

    def _count(self, claim: event_queue.Claim, result: str) -> None:
        """Count the result of an event, and by how much starts and ends are
        late.
        """
        counters = self._database.counters
        # A label has few values.
        counters.add(EVENTS, result=result, type=claim.event_type if (
            claim.event_type in {*states.EventType}) else 'other')
        if result == 'done' and claim.event_type in _STEPS:
            counters.observe(
                LATENESS, max(0, self._clock.now() - claim.time), LATE,
                type=claim.event_type)

    def _settled(self, claim: event_queue.Claim,
                 outcome: retries.Result) -> None:
        if outcome is None:
            self._queue.done(claim)
            return
        if isinstance(outcome, retries.Failed):
            LOG.warning('Lease %s: %s is not retried: %s', claim.lease_id,
                        claim.event_type, outcome.why)
            self._queue.write(claim, outcome, status=states.Event.ERROR)
            return
        seconds, now = outcome.after(claim.deferrals), self._clock.now()
        LOG.info('Lease %s: %s again in %s s: %s', claim.lease_id,
                 claim.event_type, seconds, outcome.why)
        # If it was triggered meanwhile, its pauses start again.
        same = models.Event.deferrals == claim.deferrals
        self._queue.write(
            claim, outcome, status=states.Event.UNDONE, attempts=0,
            run_at=sa.case((same, now + seconds), else_=now + outcome.seconds),
            deferrals=sa.case((same, claim.deferrals + 1), else_=1))

    def _failed(self, claim: event_queue.Claim, exc: Exception) -> None:
        """Retry after a pause that doubles, or give up.

        Never given up are the ends of leases and offers, as their capacity
        would be lost; changes, as the lease would be used on hosts that it
        does not have; admissions and best effort, as the lease would wait
        indefinitely; extensions, which are tried until the lease ends; and
        notifications of the budget service.
        """
        attempts = claim.attempts + 1
        if attempts > self._max_retries and claim.event_type not in (
                states.EventType.END, states.EventType.EXPIRE,
                states.EventType.RETRY, states.EventType.MAKE_ROOM,
                states.EventType.CHANGED, states.EventType.EXTEND,
                states.EventType.CHARGE, states.EventType.REFUND):
            self._lifecycle.lease_start.give_up(
                claim.lease_id, claim.event_type, functools.partial(
                    self._queue.update, claim, None,
                    status=states.Event.ERROR, attempts=attempts))
            return
        pause = min(300, 2 ** min(attempts, 10))
        self._queue.write(
            claim, retries.RetryAfter(pause, _reason(exc), shown=True),
            status=states.Event.UNDONE, attempts=attempts,
            run_at=self._clock.now() + pause)


def _unavailable(claim: event_queue.Claim, exc: Exception,
                 ) -> retries.RetryAfter:
    """Return when an event is retried that the process could not carry out."""
    if isinstance(exc, errors.DecryptionError):
        # Another process may have the key.
        LOG.error('Lease %s: %s is deferred: %s', claim.lease_id,
                  claim.event_type, exc)
        return retries.wait(str(exc))
    return retries.RetryAfter(_AFTER_FAILURE, str(exc))


def _reason(exc: Exception) -> str:
    """Return what a lease shows of an event that has failed."""
    return str(exc) if isinstance(exc, errors.BlazarError) else (
        f'internal error {type(exc).__name__}; see the log of '
        'blazar-listener.')


def _action(life: handlers.Handlers, claim: event_queue.Claim,
            read: lease_start.Read | None) -> ty.Callable[[str],
                                                          retries.Result]:
    """Return what is done with the lease of an event."""
    kinds = states.EventType
    actions: dict[str, ty.Callable[[str], retries.Result]] = {
        kinds.START: functools.partial(
            life.lease_start.start, when_due=True, read=read),
        kinds.END: functools.partial(life.lease_end.end, when_due=True),
        kinds.EXPIRE: life.lease_end.expire,
        kinds.RETRY: life.admission_queue.due,
        kinds.MAKE_ROOM: life.best_effort.go_on,
        kinds.EXTEND: life.auto_extension.extend,
        kinds.CHANGED: life.notices.changed,
        kinds.ORPHANED: life.notices.orphaned,
        kinds.CHARGE: life.budget_events.charge,
        kinds.REFUND: life.budget_events.refund}
    return actions.get(claim.event_type, functools.partial(
        life.notices.happen, event_type=claim.event_type,
        event_id=claim.event_id if claim.slow else None))
