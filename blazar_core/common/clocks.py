# SPDX-License-Identifier: Apache-2.0

"""Time as a parameter.

Everything that asks for the time or waits for it is given a clock, so that
tests drive the time instead of waiting for it.
"""

import datetime
import threading
import time
import typing as ty

__all__ = ['Clock', 'SystemClock', 'ManualClock', 'is_within', 'iso',
           'minute', 'stamp']


class Clock(ty.Protocol):
    """What the core needs of a clock."""

    def now(self) -> int:
        """Seconds since the epoch, UTC, rounded down."""
        ...

    def elapsed(self) -> float:
        """Seconds since some instant, in fractions: for short spans."""
        ...

    def wait(self, event: threading.Event, until: int) -> None:
        """Return when the event is set or the clock shows ``until``."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return int(time.time())

    def elapsed(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, until: int) -> None:
        event.wait(max(0.0, until - time.time()))


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now: int = 1_800_000_000) -> None:
        self._now, self._ahead = now, 0
        self._moved = threading.Condition()

    def now(self) -> int:
        with self._moved:
            return self._now + self._ahead

    def elapsed(self) -> float:
        with self._moved:
            return float(self._now)

    def step(self, seconds: int) -> None:
        """Set the clock to another time, while none passes."""
        with self._moved:
            self._ahead += seconds
            self._moved.notify_all()

    def advance(self, seconds: int) -> int:
        """Move forward, wake everything that waits, return the new time."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()
            return self._now + self._ahead

    def wait(self, event: threading.Event, until: int) -> None:
        with self._moved:
            while not event.is_set() and (
                    self._now + self._ahead < until):
                # The event cannot wake a condition: look at it now and then.
                self._moved.wait(0.02)


def is_within(until: float, now: float, longest: float) -> bool:
    """Whether a pause or a claim lasts yet.

    One that would last for longer than any of its kind was written by a clock
    that was ahead: it is over. In SQL it is the opposite of
    :func:`blazar_core.db.clock_skew.is_over`.

    :param longest: seconds
    """
    return now < until <= now + longest


def iso(seconds: int) -> str:
    """The API's format of a date, e.g. ``2026-12-01T16:07:00.000000``."""
    # A third of what strftime takes; a list of leases has thousands.
    return utc(seconds).replace(tzinfo=None).isoformat(
        timespec='microseconds')


def stamp(seconds: int) -> str:
    """The format that clients expect of ``created_at`` and ``updated_at``,
    e.g. ``2026-12-01 16:07:00``.
    """
    return utc(seconds).replace(tzinfo=None).isoformat(sep=' ')


def parse_iso(text: str) -> int:
    """The instant that :func:`iso` wrote."""
    return int(datetime.datetime.strptime(text, '%Y-%m-%dT%H:%M:%S.%f')
               .replace(tzinfo=datetime.timezone.utc).timestamp())


def minute(seconds: int) -> str:
    """A date as users write it, e.g. ``2026-12-01 16:07``.

    Seconds are shown only where they are not zero.
    """
    when = utc(seconds)
    return when.strftime('%Y-%m-%d %H:%M:%S' if when.second else
                         '%Y-%m-%d %H:%M')


def utc(seconds: int) -> datetime.datetime:
    """An aware datetime of an instant."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
