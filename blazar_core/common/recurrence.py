# SPDX-License-Identifier: Apache-2.0


"""When something recurs: an iCalendar RRULE (RFC 5545), in a time zone.

What was decided:

* Only rules that cannot run on without a result are understood, so that what
  a user writes costs next to nothing: each FREQ has the few parts that go
  with it (:data:`_PARTS`). COUNT or UNTIL has to be there.
* Dates are those of the wall in the time zone, but of HOURLY, which counts
  hours as they pass.
* A time that the wall does not show, because the clocks go forward, is as
  much later: 02:30 is 03:30. One that it shows twice is the first of both.
"""

import collections.abc
import datetime
import itertools
import re
import typing as ty
import zoneinfo

from dateutil import rrule

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model

__all__ = ['expand', 'later', 'offset', 'zone_of']

_EXAMPLE = '"FREQ=WEEKLY;BYDAY=MO;COUNT=10"'
_LONGEST = 300

_UTC = datetime.timezone.utc
_DAY = '(?:MO|TU|WE|TH|FR|SA|SU)'
_DAYS = f'{_DAY}(?:,{_DAY})*'
_NUMBERED = f'(?:-?[1-5])?{_DAY}'
_NUMBER = r'-?(?:[1-9]|[12][0-9]|3[01])'
_ALWAYS = {'INTERVAL': '[1-9][0-9]{0,2}', 'COUNT': '[1-9][0-9]{0,3}',
           'UNTIL': '[0-9]{8}(?:T[0-9]{6}Z?)?', 'WKST': _DAY}
#: By FREQ, the other parts of a rule, each with what it may be.
_PARTS: dict[str, dict[str, str]] = {
    'HOURLY': {}, 'DAILY': {'BYDAY': _DAYS}, 'WEEKLY': {'BYDAY': _DAYS},
    'MONTHLY': {'BYDAY': f'{_NUMBERED}(?:,{_NUMBERED})*',
                'BYMONTHDAY': f'{_NUMBER}(?:,{_NUMBER})*',
                'BYSETPOS': '-?[1-4]'},
    'YEARLY': {}}


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """A time zone by its name in the IANA's database.

    :raises InvalidLeaseParams: when there is none
    """
    if re.fullmatch(r'[A-Za-z0-9_+-]{1,40}(?:/[A-Za-z0-9_+-]{1,40}){0,2}',
                    name):
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise errors.InvalidLeaseParams(
        f'There is no time zone "{inputs.shown(name)}". Write one of the '
        f'IANA\'s, such as "Europe/Berlin", or "UTC".')


def offset(wall: datetime.datetime, zone: zoneinfo.ZoneInfo) -> str:
    """How far a date of the wall is from UTC, as ISO 8601 has it: "+01:00".
    """
    behind = wall.replace(tzinfo=zone).utcoffset() or datetime.timedelta()
    minutes = int(behind.total_seconds()) // 60
    return f'{"-" if minutes < 0 else "+"}{abs(minutes) // 60:02}:' + (
        f'{abs(minutes) % 60:02}')


def later(time: int, by: datetime.timedelta, zone: zoneinfo.ZoneInfo) -> int:
    """An instant as much later as the wall says."""
    return _instant(_wall(time, zone) + by, zone)


def expand(rule: str, zone: zoneinfo.ZoneInfo, first: model.Window,
           by_wall: bool, most: int) -> list[model.Window]:
    """The windows of what recurs.

    :param first: the first of them
    :param by_wall: whether each ends at the same time of the day; else each
        is as long as the first
    :param most: how many there may be
    :raises InvalidLeaseParams: when the rule is none; says what to write
    """
    parts = _parse(rule)
    hourly = parts['FREQ'] == 'HOURLY'
    clock: datetime.tzinfo = _UTC if hourly else zone
    start = _wall(first.start, clock)
    length = _wall(first.end, clock) - start
    until = _until(parts.pop('UNTIL', None), zone)
    count = int(parts.pop('COUNT', 0))
    if count > most:
        raise _too_many(most)
    windows: list[model.Window] = []
    for wall in itertools.islice(
            _dates(parts, start), min(count or most + 1, most + 1)):
        begin = _instant(wall, clock)
        if until is not None and begin > until:
            break
        if not windows and begin != first.start:
            raise errors.InvalidLeaseParams(
                f'The start is not one of the dates of the rule '
                f'"{inputs.shown(rule)}". The first of them from then on is '
                f'{wall:%Y-%m-%d %H:%M} ({zone.key}): write that as the '
                f'start.')
        windows.append(model.Window(begin, _instant(
            wall + length, clock) if by_wall and not hourly
            else begin + first.end - first.start))
    if len(windows) > most:
        raise _too_many(most)
    if not windows:
        raise errors.InvalidLeaseParams(
            f'The rule "{inputs.shown(rule)}" has no date from the start on. '
            f'Write a later UNTIL, or another start.')
    return windows


def _too_many(most: int) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'A lease recurs {most} times at most. Write a smaller COUNT or an '
        f'earlier UNTIL.')


def _parse(rule: str) -> dict[str, str]:
    """The parts of a rule, all of which are understood."""
    text = rule.strip().upper().removeprefix('RRULE:')
    if len(text) > _LONGEST:
        raise errors.InvalidLeaseParams(
            f'The rule has {len(text)} characters. Write at most {_LONGEST}, '
            f'such as {_EXAMPLE}.')
    parts: dict[str, str] = {}
    for part in text.split(';'):
        name, equals, value = part.partition('=')
        if not equals or name in parts:
            raise errors.InvalidLeaseParams(
                f'"{inputs.shown(part)}" cannot be read in the rule. Write '
                f'NAME=VALUE, each name once, such as {_EXAMPLE}.')
        parts[name] = value
    known = _PARTS.get(parts.get('FREQ', ''))
    if known is None:
        raise errors.InvalidLeaseParams(
            f'The rule has no FREQ that is known here. Write one of '
            f'{", ".join(_PARTS)}, such as {_EXAMPLE}.')
    known = {**_ALWAYS, **known}
    for name, value in parts.items():
        if name == 'FREQ':
            continue
        if name not in known:
            raise errors.InvalidLeaseParams(
                f'"{inputs.shown(name)}" is not for a rule with FREQ='
                f'{parts["FREQ"]} here. Write no others than '
                f'{", ".join(known)}.')
        if not re.fullmatch(known[name], value):
            raise errors.InvalidLeaseParams(
                f'"{inputs.shown(f"{name}={value}")}" cannot be read in a '
                f'rule with FREQ={parts["FREQ"]}. Write for example '
                f'{_EXAMPLE}, with an UNTIL such as 20261231 or '
                f'20261231T170000Z.')
    _check(parts)
    return parts


def _check(parts: collections.abc.Mapping[str, str]) -> None:
    """Make sure that parts of a rule go together."""
    if ('COUNT' in parts) == ('UNTIL' in parts):
        raise errors.InvalidLeaseParams(
            f'A rule needs COUNT or UNTIL, and not both. Write for example '
            f'{_EXAMPLE}.')
    if parts['FREQ'] == 'DAILY' and 'BYDAY' in parts and (
            parts.get('INTERVAL', '1') != '1'):
        raise errors.InvalidLeaseParams(
            'BYDAY is for a rule with FREQ=DAILY and no INTERVAL. Write '
            'FREQ=WEEKLY with it.')
    if 'BYMONTHDAY' in parts and parts.keys() & {'BYDAY', 'BYSETPOS'}:
        raise errors.InvalidLeaseParams(
            'A rule has BYMONTHDAY, or BYDAY and BYSETPOS. Write one of '
            'them.')
    if 'BYSETPOS' in parts and not re.fullmatch(
            _DAYS, parts.get('BYDAY', '')):
        raise errors.InvalidLeaseParams(
            'BYSETPOS is for days without a number. Write for example '
            '"FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1;COUNT=10", or '
            'BYDAY=1MO alone.')


def _dates(parts: ty.Mapping[str, str], start: datetime.datetime,
           ) -> ty.Iterator[datetime.datetime]:
    try:
        found = rrule.rrulestr(';'.join(
            f'{name}={value}' for name, value in parts.items()),
            dtstart=start)
    except ValueError as exc:
        raise errors.InvalidLeaseParams(
            f'The rule cannot be read: {exc}. Write for example '
            f'{_EXAMPLE}.') from exc
    return iter(ty.cast('ty.Iterable[datetime.datetime]', found))


def _until(text: str | None, zone: zoneinfo.ZoneInfo) -> int | None:
    """The last instant at which something may begin."""
    if text is None:
        return None
    try:
        if text.endswith('Z'):
            return _instant(datetime.datetime.strptime(
                text, '%Y%m%dT%H%M%SZ'), _UTC)
        return _instant(datetime.datetime.strptime(
            text if 'T' in text else f'{text}T235959', '%Y%m%dT%H%M%S'), zone)
    except (ValueError, OverflowError) as exc:
        raise errors.InvalidLeaseParams(
            f'"UNTIL={text}" is no date. Write one such as 20261231 or '
            f'20261231T170000Z.') from exc


def _wall(time: int, zone: datetime.tzinfo) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time, zone).replace(
        tzinfo=None, fold=0)


def _instant(wall: datetime.datetime, zone: datetime.tzinfo) -> int:
    return int(wall.replace(tzinfo=zone).timestamp())
