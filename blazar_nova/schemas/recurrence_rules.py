# SPDX-License-Identifier: Apache-2.0

"""Recurrence rules: an iCalendar RRULE (RFC 5545), in a time zone.

Decisions:

* Only rules whose evaluation is always cheap are supported: each FREQ has the
  few parts that make sense with it (:data:`_PARTS`). COUNT or UNTIL is
  required.
* Dates are local times of the time zone. HOURLY counts elapsed hours instead.
* A local time that does not exist, because the clocks are set forward, is the
  first one after it that exists: 02:30 is 03:00. A window that begins or ends
  with one keeps its length: 02:30 to 03:10 is 03:00 to 03:40.
* A local time that occurs twice is the first, unless the first window uses
  the second.
"""

import collections.abc
import datetime
import itertools
import re
import typing as ty
import zoneinfo

from dateutil import rrule

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import words

_EXAMPLE = '"FREQ=WEEKLY;BYDAY=MO;COUNT=10"'
_LONGEST = 300

_UTC = datetime.timezone.utc
#: Files in the database of time zones that are no zones: they count leap
#: seconds, or contain the setting of the machine.
_NO_ZONES = re.compile('localtime|Factory|posixrules|(?:right|posix)/.*')
_DAY = '(?:MO|TU|WE|TH|FR|SA|SU)'
_DAYS = f'{_DAY}(?:,{_DAY})*'
_NUMBERED = f'(?:-?[1-5])?{_DAY}'
_NUMBER = r'-?(?:[1-9]|[12][0-9]|3[01])'
_ALWAYS = {'INTERVAL': '[1-9][0-9]{0,2}', 'COUNT': '[1-9][0-9]{0,3}',
           'UNTIL': '[0-9]{8}(?:T[0-9]{6}Z?)?', 'WKST': _DAY}
#: The other parts of a rule and their patterns, by FREQ.
_PARTS: dict[str, dict[str, str]] = {
    'HOURLY': {}, 'DAILY': {'BYDAY': _DAYS}, 'WEEKLY': {'BYDAY': _DAYS},
    'MONTHLY': {'BYDAY': f'{_NUMBERED}(?:,{_NUMBERED})*',
                'BYMONTHDAY': f'{_NUMBER}(?:,{_NUMBER})*',
                'BYSETPOS': '-?[1-4]'},
    'YEARLY': {}}


class Occurrence(ty.NamedTuple):
    """One window of a recurrence.

    :ivar absent: the local times of the rule if one of them does not exist;
        None: both exist
    """

    window: model.Window
    absent: local_times.Dates | None = None


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """Return a time zone by its name in the IANA database.

    :raises InvalidLeaseParams: if there is none
    """
    if re.fullmatch(r'[A-Za-z0-9_+-]{1,40}(?:/[A-Za-z0-9_+-]{1,40}){0,2}',
                    name) and not _NO_ZONES.fullmatch(name):
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise errors.InvalidLeaseParams(
        f'There is no time zone "{words.shown(name)}". Write one of the '
        f'IANA\'s, such as "Europe/Berlin", or "UTC".')


def clock_of(rule: str, zone: zoneinfo.ZoneInfo) -> datetime.tzinfo:
    """Return the time zone in which the dates of a rule are calculated.

    :raises InvalidLeaseParams: if the rule is invalid
    """
    return _UTC if _parse(rule)['FREQ'] == 'HOURLY' else zone


def offset(date: datetime.datetime, zone: datetime.tzinfo) -> str:
    """Return the offset of a local time from UTC in ISO 8601: "+01:00"."""
    # No zone has had offsets with seconds since 1972.
    return date.replace(tzinfo=zone).isoformat()[-len('+01:00'):]


def window(dates: local_times.Dates, zone: datetime.tzinfo) -> model.Window:
    """Return the window between two local times, the end later than the start.

    If one of them does not exist, the window has their nominal length.
    """
    begin = local_times.instant(dates.start, zone)
    if all(local_times.exists(one, zone) for one in dates):
        for fold in (dates.end.fold, 1):
            end = local_times.timestamp(dates.end.replace(fold=fold), zone)
            if end > begin:
                return model.Window(begin, end)
    return model.Window(begin, begin + seconds(dates))


def expand(rule: str, zone: zoneinfo.ZoneInfo, first: model.Window,
           by_wall: bool, most: int, dates: local_times.Dates | None,
           ) -> list[Occurrence]:
    """Return the occurrences of a recurrence.

    :param first: the window of the first occurrence
    :param by_wall: whether each ends at the same local time; otherwise each
        is as long as the first
    :param most: maximum number of occurrences
    :param dates: local times of the first as the user wrote them; None: those
        of its window
    :raises InvalidLeaseParams: if the rule is invalid; the message says what
        to write
    """
    parts = _parse(rule)
    clock = clock_of(rule, zone)
    if dates is None or clock is _UTC:
        dates = local_times.Dates(local_times.wall(first.start, clock),
                                  local_times.wall(first.end, clock))
    # The first 02:30 of a night and the second are the same local time.
    if not (by_wall and clock is not _UTC and seconds(dates) > 0):
        by_wall = False
        dates = dates._replace(end=dates.start + datetime.timedelta(
            seconds=first.end - first.start))
    until = _until(parts.pop('UNTIL', None), zone)
    count = int(parts.pop('COUNT', 0))
    if count > most:
        raise _too_many(most)
    found: list[Occurrence] = []
    for start in itertools.islice(
            _dates(parts, dates.start.replace(fold=0)),
            min(count or most + 1, most + 1)):
        one = _occurrence(start, dates, clock, first if not by_wall else None)
        if until is not None and one.window.start > until:
            break
        if not found and start != dates.start.replace(fold=0):
            raise errors.InvalidLeaseParams(
                f'The start is not one of the dates of the rule '
                f'"{words.shown(rule)}". The first of them from then on is '
                f'{start:%Y-%m-%d %H:%M} ({zone.key}): write that as the '
                f'start.')
        # A start that has just passed is now.
        found.append(one if found else one._replace(window=first))
    if len(found) > most:
        raise _too_many(most)
    if not found:
        raise errors.InvalidLeaseParams(
            f'The rule "{words.shown(rule)}" has no date from the start on. '
            f'Write a later UNTIL, or another start.')
    return found


def _occurrence(start: datetime.datetime, first: local_times.Dates,
                clock: datetime.tzinfo, lasts: model.Window | None,
                ) -> Occurrence:
    """
    :param start: its date
    :param lasts: window of the same length; None: the end is a local time
    :raises InvalidLeaseParams: if it ends after the last possible date
    """
    try:
        dates = local_times.Dates(start.replace(fold=first.start.fold), (
            start + (first.end.replace(fold=0) - first.start.replace(fold=0))
        ).replace(fold=first.end.fold))
        return _at(dates, clock, lasts)
    except (ValueError, OverflowError) as exc:
        raise _too_late(
            start, 'Write an earlier UNTIL, or a smaller COUNT.') from exc


def moved(dates: local_times.Dates, by: ty.Sequence[datetime.timedelta],
          clock: datetime.tzinfo, before: model.Window) -> Occurrence:
    """Return an occurrence, postponed in local time.

    :param by: of its start, and of its end
    :param before: its previous window
    :raises InvalidLeaseParams: if it would end before it starts or after the
        last possible date
    """
    try:
        to = local_times.Dates(*(
            (one + much).replace(fold=one.fold)
            for one, much in zip(dates, by, strict=True)))
        lasts = None if seconds(to) > 0 else before
        if lasts and by[0] != by[1]:
            raise errors.InvalidLeaseParams(
                f'End date must be later than start date: the occurrence of '
                f'{dates.start:%Y-%m-%d %H:%M} would end before it starts. '
                f'Write a later end.')
        return _at(to, clock, lasts)
    except (ValueError, OverflowError) as exc:
        raise _too_late(dates.start, 'Write an earlier date.') from exc


def _too_late(start: datetime.datetime, remedy: str,
              ) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'The occurrence of {start:%Y-%m-%d %H:%M} would not end before '
        f'{clocks.minute(model.LATEST)} UTC. {remedy}')


def _at(dates: local_times.Dates, clock: datetime.tzinfo,
        lasts: model.Window | None) -> Occurrence:
    """
    :raises ValueError: if it ends after the last possible date
    """
    begin = local_times.instant(dates.start, clock)
    found = window(dates, clock) if lasts is None else model.Window(
        begin, begin + lasts.end - lasts.start)
    if found.end >= model.LATEST:
        raise ValueError('It ends too late.')
    absent = not all(local_times.exists(one, clock) for one in (
        dates if lasts is None else dates[:1]))
    return Occurrence(found, dates if absent else None)


def seconds(dates: local_times.Dates) -> int:
    """Return the seconds between two local times, by their digits."""
    start, end = (one.replace(fold=0) for one in dates)
    return int((end - start).total_seconds())


def _too_many(most: int) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'A lease recurs {most} times at most. Write a smaller COUNT or an '
        f'earlier UNTIL.')


def _parse(rule: str) -> dict[str, str]:
    """Parse a rule, of which every part must be supported."""
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
                f'"{words.shown(part)}" cannot be read in the rule. Write '
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
                f'"{words.shown(name)}" is not for a rule with FREQ='
                f'{parts["FREQ"]} here. Write no others than '
                f'{", ".join(known)}.')
        if not re.fullmatch(known[name], value):
            raise errors.InvalidLeaseParams(
                f'"{words.shown(f"{name}={value}")}" cannot be read in a '
                f'rule with FREQ={parts["FREQ"]}. Write for example '
                f'{_EXAMPLE}, with an UNTIL such as 20261231 or '
                f'20261231T170000Z.')
    _check(parts)
    return parts


def _check(parts: collections.abc.Mapping[str, str]) -> None:
    """Check that the parts of a rule can be combined."""
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
    """Return the last instant at which an occurrence may start."""
    if text is None:
        return None
    try:
        if text.endswith('Z'):
            return local_times.instant(datetime.datetime.strptime(
                text, '%Y%m%dT%H%M%SZ'), _UTC)
        return local_times.instant(datetime.datetime.strptime(
            text if 'T' in text else f'{text}T235959', '%Y%m%dT%H%M%S'), zone)
    except (ValueError, OverflowError) as exc:
        raise errors.InvalidLeaseParams(
            f'"UNTIL={text}" is no date. Write one such as 20261231 or '
            f'20261231T170000Z.') from exc
