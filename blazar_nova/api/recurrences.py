# SPDX-License-Identifier: Apache-2.0


"""How a lease recurs: ``recurrence``, in lease_params and in the lease API.

Where it names a time zone, the dates beside it are those of the wall there,
unless they have an offset of their own.
"""

import datetime
import re
import typing as ty

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import recurrence as recurrences
from blazar_core.leases import requests
from blazar_core.lifecycle import ends

__all__ = ['EXAMPLE', 'localized', 'multiplied', 'recurrence_of', 'too_much']

_KEYS = {
    'rule': '"FREQ=WEEKLY;BYDAY=MO;COUNT=10"',
    'timezone': '"Europe/Berlin"',
    'between': '"delete"',
    'fits': '"all"',
}
EXAMPLE = '{"rule": ' + _KEYS['rule'] + ', "timezone": "Europe/Berlin"}'

#: The dates of a lease, in lease_params and in the API.
_DATES = ('start', 'end', 'before_end', 'start_date', 'end_date',
          'before_end_date')
_WITHOUT_OFFSET = re.compile(
    r'([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})[ T]([0-9]{1,2}):([0-9]{2})'
    r'(?::[0-9]{2}(?:\.[0-9]+)?)?')

_Object: ty.TypeAlias = dict[str, object]


def localized(values: _Object) -> _Object:
    """What is asked for, its dates with the offsets of their time zone.

    :raises InvalidLeaseParams: when there is no such time zone
    """
    if values.get('recurrence') is None:
        return values
    zone = recurrences.zone_of(_text(_read(values), 'timezone', 'UTC'))

    def dated(value: object) -> object:
        match = _WITHOUT_OFFSET.fullmatch(value.strip()) if isinstance(
            value, str) else None
        if match is None:
            return value
        try:
            return match[0] + recurrences.offset(
                datetime.datetime(
                    int(match[1]), int(match[2]), int(match[3]),
                    int(match[4]), int(match[5])), zone)
        except (ValueError, OverflowError):
            # The function that reads it later says what is wrong with it.
            return value

    found = {key: dated(value) if key in _DATES else value
             for key, value in values.items()}
    events = found.get('events')
    if isinstance(events, list):
        found['events'] = [{
            key: dated(value) if key == 'event_date' else value
            for key, value in one.items()} if isinstance(one, dict) else one
            for one in events]
    return found


def recurrence_of(values: _Object, window: model.Window, most: int,
                  known: ty.Collection[str] = (),
                  ) -> requests.Recurrence | None:
    """How a lease recurs; None: it does not.

    :param window: of the first occurrence
    :param most: how many there may be
    :param known: what may become of the servers of a boot; none: it comes
        with no boot
    :raises InvalidLeaseParams: with the sentence that the user reads
    """
    if values.get('recurrence') is None:
        return None
    for key, default in (('auto_extend', 0), ('offer_seconds', None),
                         ('lease_type', 'scheduled')):
        if values.get(key, default) not in (default, None, '0', 'immediate'):
            raise errors.InvalidLeaseParams(
                f'A lease that recurs has no "{key}": each occurrence has '
                f'its dates. Leave "{key}" out, or "recurrence".')
    asked = _read(values)
    zone = recurrences.zone_of(_text(asked, 'timezone', 'UTC'))
    rule = _text(asked, 'rule')
    return requests.Recurrence(
        rule, zone.key, _between(_text(asked, 'between', ends.DELETE), known),
        _one_of(asked, 'fits', ('all', 'some')) == 'some',
        tuple(recurrences.expand(
            rule, zone, window, 'duration' not in values, most)))


def _between(wanted: str, known: ty.Collection[str]) -> str:
    """What becomes of servers between two occurrences."""
    if wanted == ends.DELETE:
        return wanted
    if not known:
        raise errors.InvalidLeaseParams(
            '"between" is for servers that come with a boot. Leave it out; '
            '"on_end" says what becomes of servers in the reservations of '
            'each occurrence.')
    if wanted == ends.SHELVE and wanted in known:
        return wanted
    why = ('a server that is suspended keeps its capacity on its host, which '
           'others may have between the occurrences. '
           if wanted == 'suspend' else '')
    raise errors.InvalidLeaseParams(
        f'"between": "{inputs.shown(wanted)}" is not available: {why}Write '
        f'"{ends.DELETE}" to have others each time' + (
            f', or "{ends.SHELVE}" to keep the servers from one occurrence '
            f'to the next.' if ends.SHELVE in known else '.'))


def multiplied(body: ty.Mapping[str, ty.Any], times: int, limit: int,
               ) -> dict[str, ty.Any]:
    """The body of a boot that makes the servers of all occurrences.

    :param limit: how many these may be
    :raises InvalidLeaseParams: when it leaves open how many each has, or
        they are too many
    """
    server = dict(body['server'])
    each = _count(server.get('min_count', 1))
    most = _count(server.get('max_count', each))
    if each is None or most is None:
        # Nova says what is wrong with it.
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
    """Return the refusal of a lease that is for too many servers or hosts.

    :param together: how many it has in all occurrences; empty: it has one
    """
    also = f', and to {together}' if together else ''
    return errors.InvalidLeaseParams(
        f'The amounts of the reservations of one lease add up to {each}'
        f'{also}. Write amounts of at most {most} in all, or make several '
        f'leases.')


def _count(value: object) -> int | None:
    """Read a count of servers as Nova does, which takes 2.0, "01" and "1\\n".

    :returns: None for what Nova refuses
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    # Of an int beyond these bounds not even the digits can be written.
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


def _one_of(asked: _Object, key: str, known: ty.Sequence[str]) -> str:
    value = _text(asked, key, known[0])
    if value not in known:
        raise errors.InvalidLeaseParams(
            f'"{key}" is "{inputs.shown(value)}". Write '
            f'{" or ".join(known)}, or leave it out.')
    return value
