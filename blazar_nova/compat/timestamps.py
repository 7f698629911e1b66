# SPDX-License-Identifier: Apache-2.0

"""Dates that Nova's services write into their records, each by its clock."""

import calendar
import datetime

from oslo_utils import timeutils

from blazar_core.common import clocks

__all__ = ['epoch', 'is_older_than']


def epoch(stamp: datetime.datetime) -> int:
    """Return a date as seconds since the epoch."""
    return calendar.timegm(stamp.utctimetuple())


def is_older_than(stamp: datetime.datetime, seconds: int) -> bool:
    """Whether a date of something that happened is so old.

    One that is as far ahead was written by a clock that was ahead: it counts
    as old.
    """
    return not clocks.is_within(
        epoch(stamp) + seconds,
        int(timeutils.utcnow_ts()), 2 * seconds)
