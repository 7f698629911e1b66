# SPDX-License-Identifier: Apache-2.0

"""Answer from the last known state while the database is unavailable.

Servers that are admitted meanwhile are counted by this process only, until the
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

LOG = logging.getLogger(__name__)

#: Seconds after the last use of the stale index, by this process, after which
#: servers that were admitted without the database no longer count: then other
#: sources have recorded them.
ALONE = 300


class _Unrecorded(ty.NamedTuple):
    """Amounts that count on a host although the database lacks them."""

    host_id: int
    amounts: model.Resources


class StaleIndex:
    """The last known state, for decisions without the database.

    :param lock: that of the timeline; a thread that uses the timeline has it
    :param last: returns the known state, its timeline (None: nothing was known
        yet), and the monotonic time when it was read
    """

    def __init__(self, clock: clocks.Clock, lock: threading.Lock,
                 last: ty.Callable[[], tuple[
                     feed.FeedState, timelines.Timeline | None, float]],
                 ) -> None:
        self._clock = clock
        self._lock = lock
        self._last = last
        #: When a decision was last made without the database (None: the
        #: database is available), and what was admitted meanwhile.
        self._alone: float | None = None
        self._unrecorded: list[_Unrecorded] = []

    @contextlib.contextmanager
    def timeline(self) -> ty.Iterator[timelines.Timeline | None]:
        """Yield the last known timeline, to one thread at a time.

        For decisions while the database is unavailable.

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
        """Return the time, as far as it is known without the database.

        The clock was right when the known state was read, and the monotonic
        clock has the time since then: a clock that is ahead does not count.
        """
        known, _timeline, read = self._last()
        return min(self._clock.now(),
                   known.at + int(self._clock.elapsed() - read))

    def let_in(self, host_id: int, amounts: model.Resources,
               ) -> ty.Callable[[], None]:
        """Within :meth:`timeline`: count something on a host that cannot be
        recorded, until the database is available again.

        :returns: a function that undoes this
        """
        amount = _Unrecorded(host_id, amounts)
        self._unrecorded.append(amount)
        self._count_unrecorded([amount])

        def take_back() -> None:
            with self._lock:
                self._unrecorded = [
                    one for one in self._unrecorded if one is not amount]
                self._count_unrecorded([amount])

        return take_back

    def written(self) -> None:
        """Note that a process could write: the database is available again.

        A database that can only be read counts as unavailable: what is
        admitted is still counted only here.
        """
        if self._alone is not None:
            with self._lock:
                if self._alone is not None:
                    self._end_alone()

    def keep_unrecorded(self) -> None:
        """Count what was admitted on the state that has just been read, which
        lacks it. The caller holds the lock.
        """
        if self._alone is not None:
            if self._clock.elapsed() >= self._alone + ALONE:
                self._end_alone()
            self._count_unrecorded(self._unrecorded)

    def _end_alone(self) -> None:
        """Stop counting what is unrecorded: the periodic sync finds it."""
        LOG.warning('Servers are checked against the reservation database '
                    'again; %s were placed without it', len(self._unrecorded))
        unrecorded, self._unrecorded, self._alone = self._unrecorded, [], None
        self._count_unrecorded(unrecorded)

    def _count_unrecorded(self, changed: ty.Iterable[_Unrecorded]) -> None:
        """Set the usage of the hosts of some amounts to what it is now."""
        known, timeline, _read = self._last()
        for host_id in {one.host_id for one in changed} & known.hosts.keys():
            host = known.hosts[host_id]
            usage = collections.Counter(host.usage)
            for amount in self._unrecorded:
                if amount.host_id == host_id:
                    usage.update(amount.amounts)
            if timeline is not None:
                timeline.set_host(host_id, host.capacity, dict(usage),
                                  host.uuid, host.providers)
