# SPDX-License-Identifier: Apache-2.0

"""Circuit breaker: stop using a database that does not answer.

A thread that uses an unavailable database waits, and waits again with every
request. So the first thread without an answer marks the database as doubtful;
the next one probes it with a short timeout, and if the probe fails, no thread
uses the database for a while.
"""

import threading
import typing as ty

from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors

LOG = logging.getLogger(__name__)

#: Seconds for which a database that did not answer is not used.
PAUSE = 10
#: Seconds that the database has to answer a probe.
PROBE_SECONDS = 2


class DatabaseStatus:
    """The status of the database, as this process knows it.

    :param probe: queries the database; raises if it does not answer
    """

    def __init__(self, clock: clocks.Clock,
                 probe: ty.Callable[[], None]) -> None:
        self._clock = clock
        self._probe = probe
        self._asking = threading.Lock()
        #: The thread that probes, for which the breaker is closed.
        self._asks: int | None = None
        self._doubtful = False
        #: Since when the database is unavailable, and why.
        self._since: float | None = None
        self._why: Exception | None = None
        self._again = 0.0
        self._before: list[ty.Callable[[], None]] = []
        self._down_for = 0.0

    def outage(self) -> tuple[bool, float]:
        """Return whether the database is unavailable, and for how many seconds
        in total it was since the process has started.
        """
        since = self._since
        return since is not None, self._down_for + (
            0.0 if since is None else self._clock.elapsed() - since)

    def before(self, work: ty.Callable[[], None]) -> None:
        """Do something before any other use of the database: now, or as soon
        as it is available.

        :raises ConfigurationError: when the work raises it now
        """
        self._before.append(work)
        try:
            self.check()
        except errors.DatabaseUnavailable as exc:
            if isinstance(exc.__cause__, errors.ConfigurationError):
                raise exc.__cause__ from None

    def check(self) -> None:
        """Check that the database may be used. Costs nothing as long as it is
        not doubtful.

        :raises DatabaseUnavailable: when it may not
        """
        if not self._is_open() or self._asks == threading.get_ident():
            return
        # Another thread is probing: wait no longer than its probe may take.
        if self._is_early() or not self._asking.acquire(
                timeout=0 if self._since is not None else 2 * PROBE_SECONDS):
            raise errors.DatabaseUnavailable from self._why
        try:
            if self._is_early():
                raise errors.DatabaseUnavailable from self._why
            if self._is_open():
                self._find_out()
        finally:
            self._asking.release()

    def doubt(self, why: object) -> None:
        """Mark the database as doubtful: it did not answer."""
        if self._since is None:
            LOG.warning('The database of the leases did not answer: %s', why)
        self._doubtful = True

    def _is_open(self) -> bool:
        return self._doubtful or bool(self._before)

    def _is_early(self) -> bool:
        return self._clock.elapsed() < self._again

    def _find_out(self) -> None:
        self._asks = threading.get_ident()
        try:
            self._probe()
            while self._before:
                self._before[0]()
                del self._before[0]
        except Exception as exc:
            self._note_outage(exc)
            raise errors.DatabaseUnavailable from exc
        finally:
            self._asks = None
        self._note_there()

    def _note_outage(self, exc: Exception) -> None:
        now = self._clock.elapsed()
        self._doubtful, self._again, self._why = True, now + PAUSE, exc
        if self._since is None:
            self._since = now
            LOG.error('The database of the leases is unavailable: %s. It is '
                      'retried after %s s each time.', exc,
                      PAUSE)

    def _note_there(self) -> None:
        self._doubtful, self._why = False, None
        if self._since is not None:
            LOG.warning('The database of the leases is available again, after '
                        '%d s',
                        self._clock.elapsed() - self._since)
            self._down_for += self._clock.elapsed() - self._since
            self._since = None
