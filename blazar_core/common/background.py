# SPDX-License-Identifier: Apache-2.0

"""Run work of a request that it does not wait for in background threads."""

from concurrent import futures
import contextlib
import os
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import logs

LOG = logging.getLogger(__name__)

R = ty.TypeVar('R')

#: Calls a function, now or later.
Later: ty.TypeAlias = ty.Callable[[ty.Callable[[], object]], None]


class Background:
    """A pool of threads without a queue.

    While all threads are busy, the caller does the work itself. The threads
    are started on first use, in each process.

    :param workers: maximum number of threads
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
        """Start a function and return the future of its result."""
        if self._process != os.getpid():
            # A forked child has none of the threads of its parent.
            self._empty()
        if self._free.acquire(blocking=False):
            # The executor takes no work while the process exits.
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
        """Call a function whose result is not needed; log its exception."""
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
