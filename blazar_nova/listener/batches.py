# SPDX-License-Identifier: Apache-2.0

"""Look at many hosts, a few at a time and spread over time."""

from concurrent import futures
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors

LOG = logging.getLogger(__name__)

T = ty.TypeVar('T')

#: Returns whether a long operation is to continue.
GoOn: ty.TypeAlias = ty.Callable[[], bool]

#: How many hosts in a row without an answer of the cloud end a walk.
SILENT = 3

#: The number of threads of a walk.
_THREADS = 4
#: How many begin in a second; more if there are too many for that.
_PER_SECOND = 50
#: Progress is logged after so many.
_STEP = 100


def always() -> bool:
    """Return True, as nothing stops the operation."""
    return True


class _Walk(ty.Generic[T]):
    """The state of one walk.

    :ivar over: set when the walk has ended
    """

    def __init__(self, look: ty.Callable[[T], bool], go_on: GoOn) -> None:
        self._look = look
        self._go_on = go_on
        self._lock = threading.Lock()
        self._silent = 0
        #: Whether the cloud did not answer, so that the walk is given up.
        self.silent = False
        self.over = threading.Event()

    def visit(self, host: T) -> None:
        """Look at one host, unless the walk is over."""
        if self.over.is_set() or not self._go_on():
            self.over.set()
            return
        try:
            answers = self._look(host)
        except BaseException:
            self.over.set()
            raise
        with self._lock:
            self._silent = 0 if answers else self._silent + 1
            if self._silent >= SILENT:
                # For good, though concurrent ones may still be answered.
                self.silent = True
                self.over.set()


def walk(clock: clocks.Clock, hosts: ty.Sequence[T],
         look: ty.Callable[[T], bool], go_on: GoOn, spread: int) -> None:
    """Look at many hosts.

    :param look: looks at one of them; returns whether the cloud answered. An
        exception of it ends the walk
    :param go_on: whether to continue; asked before each of them
    :param spread: seconds that the walk may take, to spread the load on the
        cloud; 0: as short as possible
    :raises CloudUnavailable: when several of them in a row had no answer
    """
    size = _PER_SECOND if not spread else max(
        _PER_SECOND, -(-len(hosts) // spread))
    began, one = clock.elapsed(), _Walk(look, go_on)
    with futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix='periodic_sync') as pool:
        for number, first in enumerate(range(0, len(hosts), size)):
            while spread and go_on() and clock.elapsed() < began + number:
                clock.wait(one.over, clock.now() + 1)
            if one.over.is_set() or not go_on():
                break
            last = min(first + size, len(hosts))
            # Raises what one of them has raised.
            for _visited in pool.map(one.visit, hosts[first:last]):
                pass
            if last // _STEP > first // _STEP and not one.over.is_set():
                LOG.debug('Compared %s of %s hosts', last, len(hosts))
    if one.silent:
        raise errors.CloudUnavailable(
            f'{SILENT} hosts in a row could not be checked; the others are '
            'checked next time.')
