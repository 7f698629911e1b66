# SPDX-License-Identifier: Apache-2.0

"""Dates in the records of Nova's services, each by the clock of its service.
"""

import calendar
import datetime

from oslo_utils import timeutils

from blazar_core.common import clocks


def epoch(stamp: datetime.datetime) -> int:
    """Return a date as seconds since the epoch."""
    return calendar.timegm(stamp.utctimetuple())


def is_older_than(stamp: datetime.datetime, seconds: int) -> bool:
    """Return whether a date in the past is older than some seconds.

    A date that is that far in the future was written by a clock that was
    ahead, and counts as old.
    """
    return not clocks.is_within(
        epoch(stamp) + seconds,
        int(timeutils.utcnow_ts()), 2 * seconds)
