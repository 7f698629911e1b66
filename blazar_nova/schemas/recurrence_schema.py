# SPDX-License-Identifier: Apache-2.0


"""Parsing of ``recurrence``, in lease_params and in the lease API.

If it names a time zone, the other dates of the request are local to it,
unless they have an offset.
"""

import datetime
import re
import typing as ty
import zoneinfo

from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import event_schema
from blazar_nova.schemas import recurrence_rules

_KEYS = {
    'rule': '"FREQ=WEEKLY;BYDAY=MO;COUNT=10"',
    'timezone': '"Europe/Berlin"',
    'between': '"delete"',
    'fits': '"all"',
}
EXAMPLE = '{"rule": ' + _KEYS['rule'] + ', "timezone": "Europe/Berlin"}'

#: Keys of dates of a lease, in lease_params and in the API.
_DATES = ('start', 'end', 'before_end', 'start_date', 'end_date',
          'before_end_date')
_Object: ty.TypeAlias = dict[str, object]


class Local(ty.NamedTuple):
    """The time zone of a recurring lease.

    :ivar first: the local dates of the first occurrence; None: they are
        invalid, or there is no end
    """

    zone: zoneinfo.ZoneInfo
    first: local_times.Dates | None


def localized(values: _Object, now: int, start: str,
              ) -> tuple[_Object, Local | None]:
    """Add the offsets of their time zone to the dates of a request.

    :param start: the default start
    :returns: the values, and their time zone; None: the lease does not recur
    :raises InvalidLeaseParams: if the time zone is unknown
    """
    if values.get('recurrence') is None:
        return values, None
    zone = recurrence_rules.zone_of(_text(_read(values), 'timezone', 'UTC'))
    found = {key: _dated(value, zone) if key in _DATES else value
             for key, value in values.items()}
    events = found.get('events')
    if isinstance(events, list):
        found['events'] = [{
            key: _dated(value, zone) if key in event_schema.DATES else value
            for key, value in one.items()} if isinstance(one, dict) else one
            for one in events]
    said = {'start': start, **values}
    begins, until = (f'{key}_date' if f'{key}_date' in values else key
                     for key in ('start', 'end'))
    try:
        first = local_times.Dates(*(_wall(
            said[key], zone, now) for key in (
                begins, until if until in said else begins)))
        if recurrence_rules.seconds(first) > 0 and dates.wall(
                str(said[until])):
            found[until] = _written(
                values[until], first.end,
                recurrence_rules.window(first, zone).end, zone)
    except (errors.InvalidLeaseParams, ValueError, OverflowError):
        # The parser that reads these dates next reports what is invalid.
        return found, Local(zone, None)
    return found, Local(zone, first)


def _wall(said: object, zone: zoneinfo.ZoneInfo, now: int,
          ) -> datetime.datetime:
    """Return a date, with or without an offset, as local time.

    :raises InvalidLeaseParams: if it is not a date
    """
    if not isinstance(said, str):
        raise errors.InvalidLeaseParams('It is no date.')
    return dates.wall(said) or local_times.wall(
        dates.start_of(said, now), zone)


def _dated(value: object, zone: zoneinfo.ZoneInfo) -> object:
    """Add its offset to a local date; return any other value unchanged."""
    try:
        date = dates.wall(value) if isinstance(value, str) else None
        return value if date is None else _written(
            value, date, local_times.instant(date, zone), zone)
    except (ValueError, OverflowError):
        return value


def _written(said: object, date: datetime.datetime, time: int,
             zone: zoneinfo.ZoneInfo) -> str:
    """Return a date with its offset, in the format in which it was written.

    :param date: the local time that was written
    :param time: the instant of that date
    """
    shown = local_times.wall(time, zone)
    text = str(said).strip() if shown.replace(fold=0) == date else (
        shown.isoformat(sep=' ', timespec='minutes' if dates.is_whole_minute(
            str(said)) and not shown.second else 'seconds'))
    return dates.with_time(text) + recurrence_rules.offset(shown, zone)


def recurrence_of(values: _Object, window: model.Window, most: int,
                  local: Local | None, known: ty.Collection[str] = (),
                  ) -> requests.Recurrence | None:
    """Return how a lease recurs; None: it does not.

    :param window: of the first occurrence
    :param most: the maximum number of occurrences
    :param local: as :func:`localized` returns it
    :param known: the end policies available for the servers of a boot; empty:
        the request is not a boot
    :raises InvalidLeaseParams: with the message for the user
    """
    if local is None:
        return None
    for key, default in (('auto_extend', 0), ('offer_seconds', None),
                         ('lease_type', 'scheduled')):
        if values.get(key, default) not in (default, None, '0', 'immediate'):
            raise errors.InvalidLeaseParams(
                f'A lease that recurs has no "{key}": each occurrence has '
                f'its dates. Leave "{key}" out, or "recurrence".')
    asked = _read(values)
    rule = _text(asked, 'rule')
    found = recurrence_rules.expand(
        rule, local.zone, window, 'duration' not in values, most, local.first)
    between = _between(_text(asked, 'between', end_policies.DELETE), known)
    fits = _text(asked, 'fits', 'all')
    if fits not in ('all', 'some'):
        raise errors.InvalidLeaseParams(
            f'"fits" is "{words.shown(fits)}". Write all or some, or leave '
            f'it out.')
    return requests.Recurrence(
        rule, local.zone.key, between, fits == 'some',
        tuple(one.window for one in found),
        {one.window: one.absent for one in found if one.absent is not None})


def _between(wanted: str, known: ty.Collection[str]) -> str:
    """Return the end policy between two occurrences."""
    if wanted == end_policies.DELETE:
        return wanted
    if not known:
        raise errors.InvalidLeaseParams(
            '"between" is for servers that come with a boot. Leave it out; '
            '"on_end" says what becomes of servers in the reservations of '
            'each occurrence.')
    if wanted == end_policies.SHELVE and wanted in known:
        return wanted
    why = ('a server that is suspended keeps its capacity on its host, which '
           'others may have between the occurrences. '
           if wanted == 'suspend' else '')
    raise errors.InvalidLeaseParams(
        f'"between": "{words.shown(wanted)}" is not available: {why}Write '
        f'"{end_policies.DELETE}" to have others each time' + (
            f', or "{end_policies.SHELVE}" to keep the servers from one '
            f'occurrence to the next.'
            if end_policies.SHELVE in known else '.'))


def multiplied(body: ty.Mapping[str, ty.Any], times: int, limit: int,
               ) -> dict[str, ty.Any]:
    """Return the body of a boot that creates the servers of all occurrences.

    :param limit: the maximum number of these servers
    :raises InvalidLeaseParams: if the number of servers of an occurrence is
        not fixed, or there are too many
    """
    server = dict(body['server'])
    each = _count(server.get('min_count', 1))
    most = _count(server.get('max_count', each))
    if each is None or most is None:
        # Nova reports what is invalid.
        return dict(body)
    if each != most:
        raise errors.InvalidLeaseParams(
            'A lease that recurs has the same number of servers each time. '
            'Write the same min_count and max_count.')
    if each * times > limit:
        raise too_much(each, '' if times == 1 else (
            f'{each * times} in {times} occurrences'), limit)
    return {**body, 'server': {
        **server, 'min_count': each * times, 'max_count': each * times}}


def too_much(each: int, together: str, most: int,
             ) -> errors.InvalidLeaseParams:
    """Return the error for a lease with too many servers or hosts.

    :param together: the number in all occurrences; empty: there is only one
    """
    also = f', and to {together}' if together else ''
    return errors.InvalidLeaseParams(
        f'The amounts of the reservations of one lease add up to {each}'
        f'{also}. Write amounts of at most {most} in all, or make several '
        f'leases.')


def _count(value: object) -> int | None:
    """Return a count of servers parsed as by Nova, which accepts 2.0, "01"
    and "1\\n".

    :returns: None if Nova refuses the value
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Python cannot convert larger ints to a string.
    if isinstance(value, bool) or isinstance(value, int) and not (
            0 < value < 10 ** 100):
        return None
    match = re.fullmatch('0*([1-9][0-9]{0,99})\n?', str(value))
    return match and int(match[1])


def _read(values: _Object) -> _Object:
    asked = inputs.json_object(values['recurrence'], '"recurrence"')
    inputs.check_keys(asked, _KEYS, 'recurrence')
    return asked


def _text(asked: _Object, key: str, default: str | None = None) -> str:
    value = asked.get(key, default)
    if not isinstance(value, str):
        raise errors.InvalidLeaseParams(
            f'"recurrence" needs a text for "{key}". Write for example '
            f'"recurrence": {EXAMPLE}.')
    return value
