# SPDX-License-Identifier: Apache-2.0

"""Counters of all processes, for metrics.

A process counts in memory, which costs a request nothing, and periodically
adds its counts to the rows of the database, in a thread of its own. A process
that dies loses the counts that it has not added yet. The labels of a counter
come from the code, never from a user, so that the number of rows is limited.
"""

import collections
import json
import threading
import typing as ty

import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import periodic
from blazar_core.db import models

#: Seconds between two writes of the counts.
SECONDS = 10

_COUNTERS = models.Counter.__table__
_ADD = sa.update(_COUNTERS).where(
    _COUNTERS.c.name == sa.bindparam('of'),
    _COUNTERS.c.labels == sa.bindparam('with_labels'),
).values(value=_COUNTERS.c.value + sa.bindparam('more'))


class Counted(ty.NamedTuple):
    """A counter, with the sum of all processes."""

    name: str
    labels: dict[str, str]
    value: int


class Counters:
    """The counts of this process.

    :param begin: opens a transaction that writes
    :param retried: runs a transaction again if others disturb it
    """

    def __init__(self, begin: ty.Callable[
            [], ty.ContextManager[sa.Connection]],
            retried: ty.Callable[..., None]) -> None:
        self._begin = begin
        self._retried = retried
        self._lock = threading.Lock()
        self._counts: collections.Counter[
            tuple[str, str]] = collections.Counter()
        self._followed = threading.Lock()

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Count something.

        :param labels: each with one of a few values
        """
        key = name, json.dumps(labels, sort_keys=True)
        with self._lock:
            self._counts[key] += amount

    def observe(self, name: str, value: int, bounds: ty.Iterable[int],
                **labels: str) -> None:
        """Count a value of a histogram, in the bucket with the lowest bound
        that is not below it.
        """
        self.add(f'{name}_sum', value, **labels)
        self.add(f'{name}_bucket', 1, le=next(
            (str(one) for one in bounds if value <= one), '+Inf'), **labels)

    def flush(self) -> None:
        """Add the counts of this process to those of all processes.

        :raises DatabaseUnavailable: when the database does not answer; the
            counts are added the next time
        """
        with self._lock:
            counts, self._counts = self._counts, collections.Counter()
        try:
            if counts:
                self._retried(self._write, counts)
        except BaseException:
            with self._lock:
                self._counts.update(counts)
            raise

    def _write(self, counts: ty.Mapping[tuple[str, str], int]) -> None:
        with self._begin() as connection:
            # In a fixed order, so that two processes do not deadlock.
            for (name, labels), more in sorted(counts.items()):
                added = connection.execute(_ADD, {
                    'of': name, 'with_labels': labels, 'more': more}).rowcount
                if not added:
                    connection.execute(_COUNTERS.insert().values(
                        name=name, labels=labels, value=more))

    def follow(self, clock: clocks.Clock) -> None:
        """Write the counts periodically, as long as the process lives. Further
        calls cost nothing. Call it after a process forks.
        """
        if self._followed.acquire(blocking=False) and not periodic.in_thread(
                clock, 'counters', SECONDS, 'Counters', self.flush):
            self._followed.release()


def read(connection: sa.Connection, prefix: str) -> list[Counted]:
    """Return the counters of all processes whose names begin with a prefix."""
    return [Counted(row.name, json.loads(row.labels), row.value)
            for row in connection.execute(sa.select(_COUNTERS).where(
                _COUNTERS.c.name.startswith(prefix, autoescape=True),
            ).order_by(_COUNTERS.c.name, _COUNTERS.c.labels))]
