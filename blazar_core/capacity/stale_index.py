# SPDX-License-Identifier: Apache-2.0

"""Answer from the last known state while the database is unavailable.

Servers that are let in meanwhile are counted by this process only, until the
database is available again.
"""

import collections
import contextlib
import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.capacity import feed
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import model

__all__ = ['ALONE', 'StaleIndex']

LOG = logging.getLogger(__name__)

#: Seconds after which what was let in without the database counts no more,
#: when no process had to do without it again: the others wrote it.
ALONE = 300


class _Guest(ty.NamedTuple):
    """What counts on a host though the database was not told of it."""

    host_id: int
    amounts: model.Resources


class StaleIndex:
    """What is known of the books while the database is away.

    :param lock: of the timeline; a thread that uses it has that
    :param last: what is known; the timeline that has it, None: nothing was
        known yet; and when that was read, by the monotonic clock
    """

    def __init__(self, clock: clocks.Clock, lock: threading.Lock,
                 last: ty.Callable[[], tuple[
                     feed.FeedState, timelines.Timeline | None, float]],
                 ) -> None:
        self._clock = clock
        self._lock = lock
        self._last = last
        #: When somebody had to do without the database last (None: nobody
        #: had), and what was let in meanwhile.
        self._alone: float | None = None
        self._guests: list[_Guest] = []

    @contextlib.contextmanager
    def timeline(self) -> ty.Iterator[timelines.Timeline | None]:
        """The timeline as it was known last, for one thread at a time.

        For decisions while the database is away.

        :returns: None when none was known yet
        """
        with self._lock:
            known, timeline, _read = self._last()
            if self._alone is None:
                LOG.error(
                    'The database of the leases is unavailable; servers are '
                    'checked against %s',
                    'nothing: it has not answered since this process started'
                    if timeline is None else
                    f'the state of {self._clock.now() - known.at} s ago')
            self._alone = self._clock.elapsed()
            yield timeline

    def now(self) -> int:
        """The time, as far as it is known without the database.

        What is known was read with a clock that was right, and the monotonic
        clock says how long ago: a clock that is ahead by now does not count.
        """
        known, _timeline, read = self._last()
        return min(self._clock.now(),
                   known.at + int(self._clock.elapsed() - read))

    def let_in(self, host_id: int, amounts: model.Resources,
               ) -> ty.Callable[[], None]:
        """Within :meth:`timeline`: let something count on a host that the
        database cannot be told of, until it is there again.

        :returns: what takes it back
        """
        guest = _Guest(host_id, amounts)
        self._guests.append(guest)
        self._count_guests([guest])

        def take_back() -> None:
            with self._lock:
                self._guests = [
                    one for one in self._guests if one is not guest]
                self._count_guests([guest])

        return take_back

    def written(self) -> None:
        """A process could write: the database is there again.

        One that can be read but not written is as good as away: what is let
        in counts here alone.
        """
        if self._alone is not None:
            with self._lock:
                if self._alone is not None:
                    self._end_alone()

    def keep_guests(self) -> None:
        """By a thread that has the lock: let what was let in count on what
        has just been read, which knows nothing of it.
        """
        if self._alone is not None:
            if self._clock.elapsed() >= self._alone + ALONE:
                self._end_alone()
            self._count_guests(self._guests)

    def _end_alone(self) -> None:
        """What came meanwhile is found by the comparison with the cloud."""
        LOG.warning('Servers are checked against the reservation database '
                    'again; %s were placed without it', len(self._guests))
        guests, self._guests, self._alone = self._guests, [], None
        self._count_guests(guests)

    def _count_guests(self, changed: ty.Iterable[_Guest]) -> None:
        """Give the hosts of some guests the usage that they have now."""
        known, timeline, _read = self._last()
        for host_id in {one.host_id for one in changed} & known.hosts.keys():
            host = known.hosts[host_id]
            usage = collections.Counter(host.usage)
            for guest in self._guests:
                if guest.host_id == host_id:
                    usage.update(guest.amounts)
            if timeline is not None:
                timeline.set_host(host_id, host.capacity, dict(usage),
                                  host.uuid, host.providers)
