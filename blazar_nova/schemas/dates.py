# SPDX-License-Identifier: Apache-2.0

"""Dates and durations as users write them.

* A date is "now", ``YYYY-MM-DD HH:MM`` in UTC (month, day and hour may have
  one digit) or ISO 8601 with a ``T``; either may have seconds, whose fraction
  is cut, and end in ``Z`` or an offset (``+02``, ``+0200``, ``+02:00``). A
  date without a time is the beginning of that day.
* Dates without seconds compare at the minute: a date in the current minute is
  now, so that "start at 16:07" is valid at 16:07:20. A start that has passed
  less than a minute ago, with seconds or without, is now too.
* A duration consists of whole numbers with units, the largest first:
  ``1d12h``.
"""

import datetime
import re

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import words
from blazar_nova.resource_types import inputs

#: Seconds for which a start in the past counts as now: a request takes time,
#: and clocks differ.
LATE = 60

_DATE = re.compile(
    r'([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})(?:[ T]([0-9]{1,2}):([0-9]{2})'
    r'(?::([0-9]{2})(?:\.[0-9]+)?)?'
    r'(Z|([+-])([0-9]{2})(?::?([0-9]{2}))?)?)?')
_DURATION = re.compile(''.join(
    f'(?:([0-9]{{1,10}}){unit})?' for unit in 'wdhms'))
_UNIT_SECONDS = (7 * 86400, 86400, 3600, 60, 1)
_EPOCH = datetime.datetime(1970, 1, 1)


def parse_date(text: str, now: int) -> int:
    """Return the instant of a date, in seconds since the epoch, UTC.

    :raises InvalidLeaseParams: for all but the documented forms, and for
        years before 1970 and after 9998
    """
    text = text.strip()
    if text.lower() == 'now':
        return now
    match = _DATE.fullmatch(text)
    seconds = None if match is None else _seconds(match)
    if match is None or seconds is None or not 0 <= seconds < model.LATEST:
        raise errors.InvalidLeaseParams(
            f'{words.shown(text)} is an invalid date. Required format: '
            'YYYY-MM-DD HH:MM in UTC, such as '
            '"2026-12-01 16:07", with a year from 1970 to 9998; "now", '
            'seconds and ISO 8601 such as '
            '"2026-12-01T16:07:00+02:00" are accepted too.')
    whole_minute = match[6] is None
    return now if whole_minute and seconds == now - now % 60 else seconds


def wall(text: str) -> datetime.datetime | None:
    """Return a date without an offset as local time; None for any other."""
    match = _DATE.fullmatch(text.strip())
    return None if match is None or match[7] else _datetime(match)


def with_time(text: str) -> str:
    """Return a date with the beginning of its day if it has no time."""
    match = _DATE.fullmatch(text)
    return f'{text} 00:00' if match and match[4] is None else text


def start_of(text: str, now: int) -> int:
    """Return the instant of a start; a start in the last minute is now.

    A start without seconds is valid during its whole minute.

    :raises InvalidLeaseParams: if it is not a date
    """
    start = parse_date(text, now)
    late = LATE + 60 * is_whole_minute(text)
    return now if now - late < start < now else start


def outage(start: str | None, end: str, known: model.Window | None, now: int,
           instead: str = 'end the maintenance') -> model.Window:
    """Return the window in which an operator takes a host out of use.

    :param start: None: the known start, or now
    :param known: the window so far; None: there is none
    :param instead: what the message suggests if the end has passed
    :raises InvalidLeaseParams: with the message for the operator
    """
    until = parse_date(end, now)
    since = (now if known is None else known.start) if start is None else (
        max(now, parse_date(start, now)))
    if until <= now:
        raise errors.InvalidLeaseParams(
            f'The end {clocks.minute(until)} is in the past: it is '
            f'{clocks.minute(now)} UTC. Write a later one, or {instead}.')
    if until <= since:
        raise errors.InvalidLeaseParams(
            'It is over before it begins. Write an end that is later than '
            'its start.')
    return model.Window(since, until)


def is_whole_minute(text: str) -> bool:
    """Return whether a date has no seconds."""
    match = _DATE.fullmatch(text.strip())
    return match is not None and match[6] is None


def parse_duration(text: str) -> int:
    """Return the seconds of a duration such as "2h" or "1d12h"; never 0.

    :raises InvalidLeaseParams: for anything else
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise errors.InvalidLeaseParams(
            f'"{words.shown(text)}" is an invalid duration. Write whole '
            'numbers of at most 10 digits with the units w, d, h, m, s, the '
            'largest first, such as "2h", "90m" or "1d12h".')
    seconds = sum(int(number or 0) * unit for number, unit in
                  zip(match.groups(), _UNIT_SECONDS, strict=True))
    if seconds == 0:
        raise errors.InvalidLeaseParams(
            f'The duration "{words.shown(text)}" is zero. Write a longer '
            'one, such as "2h".')
    return seconds


def length(value: object, key: str, least: int, most: int) -> int:
    """Return the seconds of a value that is a number of seconds or a duration.

    :param key: of the value, for the message
    :raises InvalidLeaseParams: if the value is neither, or out of bounds
    """
    if isinstance(value, str) and not value.strip().isdigit():
        value = parse_duration(value)
    return inputs.integer(value, key, least, most)


def _seconds(date: re.Match[str]) -> int | None:
    """Return the instant of a matched date; None for a 30 February."""
    sign, hours, minutes = date[8], int(date[9] or 0), int(date[10] or 0)
    when = _datetime(date)
    if when is None or hours > 23 or minutes > 59:
        return None
    # In integers, because a datetime overflows at the ends of the calendar.
    offset = (hours * 60 + minutes) * (-60 if sign == '-' else 60)
    return (when - _EPOCH) // datetime.timedelta(seconds=1) - offset


def _datetime(date: re.Match[str]) -> datetime.datetime | None:
    """Return a matched date without its offset; None for a 30 February."""
    try:
        year, month, day, hour, minute, second = (
            int(part or 0) for part in date.groups()[:6])
        return datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None
