# SPDX-License-Identifier: Apache-2.0

"""Time as a parameter.

Everything that asks for the time or waits for it is given a clock, so that
tests drive the time instead of waiting for it.
"""

import datetime
import threading
import time
import typing as ty

__all__ = ['Clock', 'SystemClock', 'is_within', 'iso', 'minute', 'stamp']


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
