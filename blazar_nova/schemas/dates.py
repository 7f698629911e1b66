# SPDX-License-Identifier: Apache-2.0

"""Dates and durations, as users write them.

* A date is "now", ``YYYY-MM-DD HH:MM`` in UTC (month, day and hour may have
  one digit) or ISO 8601 with a ``T``; either may have seconds, whose fraction
  is cut, and end in ``Z`` or an offset (``+02``, ``+0200``, ``+02:00``). A
  date without a time is the beginning of that day.
* Dates without seconds compare at the minute: such a date inside the current
  minute is now, so that "start at 16:07" does not fail at 16:07:20. A start
  that was over less than a minute ago, with seconds or without, is now too.
* A duration is whole numbers with units, the largest first: ``1d12h``.
"""

import datetime
import re

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model

__all__ = ['is_whole_minute', 'length', 'outage', 'parse_date',
           'parse_duration', 'start_of', 'wall', 'with_time']

#: A start so many seconds ago is now: a request needs time to arrive, and
#: clocks differ.
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
    """The instant that a date names, in seconds since the epoch, UTC.

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
            f'{inputs.shown(text)} is an invalid date. Required format: '
            'YYYY-MM-DD HH:MM in UTC, such as '
            '"2026-12-01 16:07", with a year from 1970 to 9998; "now", '
            'seconds and ISO 8601 such as '
            '"2026-12-01T16:07:00+02:00" are accepted too.')
    whole_minute = match[6] is None
    return now if whole_minute and seconds == now - now % 60 else seconds


def wall(text: str) -> datetime.datetime | None:
    """A date without an offset, as the wall shows it; None for any other."""
    match = _DATE.fullmatch(text.strip())
    return None if match is None or match[7] else _datetime(match)


def with_time(text: str) -> str:
    """A date, with the beginning of its day where it has no time."""
    match = _DATE.fullmatch(text)
    return f'{text} 00:00' if match and match[4] is None else text


def start_of(text: str, now: int) -> int:
    """The start that a date names; one of a moment ago is now.

    One without seconds is meant for all of its minute.

    :raises InvalidLeaseParams: when it is no date
    """
    start = parse_date(text, now)
    late = LATE + 60 * is_whole_minute(text)
    return now if now - late < start < now else start


def outage(start: str | None, end: str, known: model.Window | None, now: int,
           instead: str = 'end the maintenance') -> model.Window:
    """For what time an operator takes a host.

    :param start: None: as it is known, else now
    :param known: for what time it is taken already
    :param instead: what else to do when the end is over
    :raises InvalidLeaseParams: with the sentence that the operator reads
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
    """Whether a date is written without seconds."""
    match = _DATE.fullmatch(text.strip())
    return match is not None and match[6] is None


def parse_duration(text: str) -> int:
    """The seconds of a duration such as "2h" or "1d12h"; never 0.

    :raises InvalidLeaseParams: for anything else
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise errors.InvalidLeaseParams(
            f'"{inputs.shown(text)}" is an invalid duration. Write whole '
            'numbers of at most 10 digits with the units w, d, h, m, s, the '
            'largest first, such as "2h", "90m" or "1d12h".')
    seconds = sum(int(number or 0) * unit for number, unit in
                  zip(match.groups(), _UNIT_SECONDS, strict=True))
    if seconds == 0:
        raise errors.InvalidLeaseParams(
            f'The duration "{inputs.shown(text)}" is zero. Write a longer '
            'one, such as "2h".')
    return seconds


def length(value: object, key: str, least: int, most: int) -> int:
    """The seconds of a value that is a number of them or a duration.

    :param key: where it stands, for the sentence
    :raises InvalidLeaseParams: when it is neither, or out of bounds
    """
    if isinstance(value, str) and not value.strip().isdigit():
        value = parse_duration(value)
    return inputs.integer(value, key, least, most)


def _seconds(date: re.Match[str]) -> int | None:
    """What a date that has the right form means; None for a 30 February."""
    sign, hours, minutes = date[8], int(date[9] or 0), int(date[10] or 0)
    when = _datetime(date)
    if when is None or hours > 23 or minutes > 59:
        return None
    # In integers, because a datetime overflows at the ends of the calendar.
    offset = (hours * 60 + minutes) * (-60 if sign == '-' else 60)
    return (when - _EPOCH) // datetime.timedelta(seconds=1) - offset


def _datetime(date: re.Match[str]) -> datetime.datetime | None:
    """What a date says without its offset; None for a 30 February."""
    try:
        year, month, day, hour, minute, second = (
            int(part or 0) for part in date.groups()[:6])
        return datetime.datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None
