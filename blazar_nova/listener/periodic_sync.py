# SPDX-License-Identifier: Apache-2.0

"""The periodic sync: a full comparison, by one listener at a time.

The leader is recorded in the database (:mod:`blazar_core.db.leader_election`).
It remains the leader as long as it runs, as it knows which hosts have not
changed. Changes that a listener was notified of and could not record are found
by the next sync, which is then requested at once. What else runs periodically
is listed in :mod:`blazar_nova.listener.daemon`.
"""

import contextlib
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import leader_election
from blazar_nova.listener import server_sync

LOG = logging.getLogger(__name__)

#: The name of the leader election.
NAME = 'comparison'

#: Seconds between two attempts to become the leader, and after a sync that
#: failed entirely.
_PAUSE = 10
#: Seconds without progress after which another listener may take over.
_STUCK = 600

#: What it is, for the log, and the function.
Task: ty.TypeAlias = tuple[str, ty.Callable[[], object]]


class PeriodicSync:
    """Runs the sync while this listener is the leader.

    :param interval: seconds from one sync to the next
    :param worker_timeout: seconds after which a listener counts as dead
    :param stopping: set when this is to end, and then ``sync.missed``
    :param tasks: what else runs with each sync, in this order
    """

    def __init__(self, clock: clocks.Clock, leader: leader_election.Leader,
                 interval: int, worker_timeout: int,
                 sync: server_sync.ServerSync, stopping: threading.Event,
                 tasks: ty.Sequence[Task]) -> None:
        self._clock = clock
        self._leader = leader
        self._pause = min(_PAUSE, interval)
        self._interval = interval
        #: The rest of the interval is for the servers.
        self._spread = interval // 2
        #: The leadership is extended in good time.
        self._beat = max(1, worker_timeout // 3)
        self._sync = sync
        self._missed = sync.missed
        self._stopping = stopping
        self._tasks = tasks
        #: Until when other listeners may become the leader first, and when a
        #: sync last made progress; as of :meth:`clocks.Clock.elapsed`.
        self._others_first = self._further = float('-inf')

    def run(self) -> None:
        """Run the sync whenever this listener is the leader, until stopped."""
        while not self._stopping.is_set():
            again = None
            try:
                again = self.look()
            except errors.DatabaseUnavailable as exc:
                LOG.debug('Periodic sync: which listener runs it is not '
                          'known: %s', exc)
            except Exception:
                LOG.exception('Periodic sync: which listener runs it could '
                              'not be determined; again in %s s', self._pause)
            soon = self._clock.now() + self._pause
            if again is None:
                # However many changes are missed meanwhile.
                self._clock.wait(self._stopping, soon)
            else:
                # Changes during an outage of the database are not notified
                # again.
                self._clock.wait(self._missed, min(again, soon))
        try:
            self._leader.leave(done=True)
        except Exception as exc:
            LOG.info('Periodic sync: another listener takes over later than '
                     'necessary: %s', exc)

    def look(self) -> int | None:
        """Run the sync if this listener is the leader.

        :returns: None: it was; else when it may be
        :raises DatabaseUnavailable: when the database does not answer
        """
        if self._missed.is_set():
            self._missed.clear()
            try:
                self._leader.trigger()
            except Exception:
                self._missed.set()
                raise
            self._others_first = float('-inf')
        if self._clock.elapsed() < self._others_first:
            return self._clock.now() + self._pause
        again = self._leader.take()
        if again is not None:
            return again
        seen: list[bool] = []
        with self._kept() as lost:
            done = self._compare_all(lost, seen)
        if not done:
            self._leader.leave(done=False)
        elif all(seen):
            self._leader.done()
        else:
            # Another listener may reach services that this one does not.
            self._leader.leave(done=True)
            self._others_first = self._clock.elapsed() + (
                self._interval + 2 * self._pause)
        return None

    def _compare_all(self, lost: threading.Event, seen: list[bool]) -> bool:
        """Run the sync; return whether it was complete, even with failures.

        :param seen: gets whether Nova and placement answered
        """
        def go_on() -> bool:
            self._further = self._clock.elapsed()
            return not lost.is_set() and not self._stopping.is_set()

        def compare() -> None:
            seen.append(self._sync.compare_all(go_on, self._spread))

        for what, work in (('Hosts and servers', compare), *self._tasks):
            if not go_on():
                return False
            try:
                work()
            except errors.DatabaseUnavailable:
                # Changes during that time have to be found soon after.
                self._missed.set()
                return False
            except Exception:
                LOG.exception('Periodic sync: %s: failed', what)
        return go_on()

    @contextlib.contextmanager
    def _kept(self) -> ty.Iterator[threading.Event]:
        """Extend the leadership meanwhile; yield what is set when it is lost.
        """
        over, lost = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=self._keep, args=(over, lost), name='leader', daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            over.set()
            thread.join()

    def _keep(self, over: threading.Event, lost: threading.Event) -> None:
        while True:
            self._clock.wait(over, self._clock.now() + self._beat)
            if over.is_set():
                return
            if self._clock.elapsed() - self._further > _STUCK:
                LOG.error('Periodic sync is stuck; another listener may take '
                          'over')
                lost.set()
                return
            try:
                if not self._leader.extend():
                    LOG.warning('Periodic sync: another listener has taken '
                                'over, because this one did not extend its '
                                'claim in time')
                    lost.set()
                    return
            except errors.DatabaseUnavailable:
                # The sync ends by that as well.
                pass
            except Exception:
                LOG.exception('Periodic sync: extending the claim failed')
