# SPDX-License-Identifier: Apache-2.0

"""Run in other threads what a request does not wait for, or not yet."""

from concurrent import futures
import contextlib
import os
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import logs

__all__ = ['Background', 'Later', 'at_once']

LOG = logging.getLogger(__name__)

R = ty.TypeVar('R')

#: Runs something, now or later.
Later: ty.TypeAlias = ty.Callable[[ty.Callable[[], object]], None]


def at_once(work: ty.Callable[[], object]) -> None:
    """Run something now, in this thread."""
    work()


class Background:
    """A few threads. While all are busy the caller does the work itself, so
    that nothing waits in a queue.

    They start when they are needed first, in each process.

    :param workers: how many
    """

    def __init__(self, workers: int = 8) -> None:
        self._workers = workers
        self._empty()

    def _empty(self) -> None:
        self._process = os.getpid()
        self._free = threading.Semaphore(self._workers)
        self._lock = threading.Lock()
        self._pool: futures.Executor | None = None

    def start(self, work: ty.Callable[[], R]) -> 'futures.Future[R]':
        """Begin something whose result is asked for later."""
        if self._process != os.getpid():
            # A child has none of the threads of its parent.
            self._empty()
        if self._free.acquire(blocking=False):
            # It is not taken where the process ends.
            with contextlib.suppress(RuntimeError):
                started = self._executor().submit(logs.carried(work))
                started.add_done_callback(lambda _: self._free.release())
                return started
            self._free.release()
        done: futures.Future[R] = futures.Future()
        try:
            done.set_result(work())
        except Exception as exc:
            done.set_exception(exc)
        return done

    def later(self, work: ty.Callable[[], object]) -> None:
        """Do something of which nothing is asked; an error is logged."""
        def logged() -> None:
            try:
                work()
            except Exception:
                LOG.exception('What was left of a request failed')

        self.start(logged)

    def _executor(self) -> futures.Executor:
        with self._lock:
            if self._pool is None:
                self._pool = futures.ThreadPoolExecutor(
                    self._workers, thread_name_prefix='background')
            return self._pool
