# SPDX-License-Identifier: Apache-2.0

"""Many things looked at, by few at a time and not all at once."""

from concurrent import futures
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors

__all__ = ['GoOn', 'SILENT', 'always', 'walk']

LOG = logging.getLogger(__name__)

T = ty.TypeVar('T')

#: Whether what goes on for long is to go on.
GoOn: ty.TypeAlias = ty.Callable[[], bool]

#: For how many things one after the other the cloud is waited for in vain.
SILENT = 3

#: How many are looked at side by side.
_THREADS = 4
#: How many begin in a second, and more where there are too many for that.
_PER_SECOND = 50
#: The log says how far it is after so many.
_STEP = 100


def always() -> bool:
    """Nothing keeps it from going on."""
    return True


class _Walk(ty.Generic[T]):
    """One of them.

    :ivar over: set when nobody looks at any more of them
    """

    def __init__(self, look: ty.Callable[[T], bool], go_on: GoOn) -> None:
        self._look = look
        self._go_on = go_on
        self._lock = threading.Lock()
        self._silent = 0
        #: Whether the cloud is not waited for any more.
        self.silent = False
        self.over = threading.Event()

    def visit(self, thing: T) -> None:
        """Look at one of them, unless it is over."""
        if self.over.is_set() or not self._go_on():
            self.over.set()
            return
        try:
            answers = self._look(thing)
        except BaseException:
            self.over.set()
            raise
        with self._lock:
            self._silent = 0 if answers else self._silent + 1
            if self._silent >= SILENT:
                # For good: others that were under way may be answered yet.
                self.silent = True
                self.over.set()


def walk(clock: clocks.Clock, what: str, things: ty.Sequence[T],
         look: ty.Callable[[T], bool], go_on: GoOn = always, spread: int = 0,
         ) -> None:
    """Look at many things.

    :param what: they are, for the log
    :param look: at one of them; returns whether the cloud answered. What it
        raises ends this
    :param go_on: whether to; asked before each of them
    :param spread: seconds that it may take, so that the cloud has them one
        after the other; 0: as few as possible
    :raises CloudUnavailable: when several of them one after the other had no
        answer
    """
    size = _PER_SECOND if not spread else max(
        _PER_SECOND, -(-len(things) // spread))
    began, one = clock.elapsed(), _Walk(look, go_on)
    with futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix='comparison') as pool:
        for number, first in enumerate(range(0, len(things), size)):
            while spread and go_on() and clock.elapsed() < began + number:
                clock.wait(one.over, clock.now() + 1)
            if one.over.is_set() or not go_on():
                break
            last = min(first + size, len(things))
            # What one of them has raised is raised here.
            for _visited in pool.map(one.visit, things[first:last]):
                pass
            if last // _STEP > first // _STEP and not one.over.is_set():
                LOG.debug('Compared %s of %s %s', last, len(things), what)
    if one.silent:
        raise errors.CloudUnavailable(
            f'{SILENT} {what} in a row could not be checked; the others are '
            'checked next time.')
