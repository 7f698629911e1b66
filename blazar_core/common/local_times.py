# SPDX-License-Identifier: Apache-2.0

"""Local times of time zones.

* A local time that does not exist, because the clocks are set forward, is the
  first one after it that exists: 02:30 is 03:00.
* A local time that occurs twice is the first, unless its ``fold`` is set.
"""

import bisect
import datetime
import typing as ty


class Dates(ty.NamedTuple):
    """Local times without an offset; ``fold`` tells first from second."""

    start: datetime.datetime
    end: datetime.datetime


def wall(time: int, zone: datetime.tzinfo) -> datetime.datetime:
    """Return the local time of an instant."""
    return datetime.datetime.fromtimestamp(time, zone).replace(tzinfo=None)


def instant(date: datetime.datetime, zone: datetime.tzinfo) -> int:
    """Return the instant of a local time, or of the first existing one after
    it.
    """
    late = timestamp(date, zone)
    if exists(date, zone):
        return late
    # With the offset after the change it is before the change.
    early = timestamp(date.replace(fold=1), zone)
    before = wall(early, zone).replace(fold=0) - datetime.timedelta(
        seconds=early)
    middle = range(early + 1, late)
    return middle.start + bisect.bisect(middle, False, key=lambda one: (
        wall(one, zone).replace(fold=0) - datetime.timedelta(seconds=one)
    ) != before)


def exists(date: datetime.datetime, zone: datetime.tzinfo) -> bool:
    """Return whether a local time exists, once or twice."""
    before, after = (date.replace(tzinfo=zone, fold=fold).utcoffset()
                     for fold in (0, 1))
    return before is None or after is None or before >= after


def timestamp(date: datetime.datetime, zone: datetime.tzinfo) -> int:
    """Return the instant of a local time that exists."""
    return int(date.replace(tzinfo=zone).timestamp())
