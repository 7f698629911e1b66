#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.
"""From the JSON of an API request to what is wanted of leases.

The names and formats are those that clients of reservations in OpenStack
send. Dates are as in lease_params (:mod:`blazar_core.params`); null stands
for what is left out; whole numbers and booleans may come as text.
"""

import collections.abc
import dataclasses
import re
import typing as ty

from oslo_utils import strutils

from blazar_core import clock
from blazar_core import errors
from blazar_core import leases
from blazar_core import model
from blazar_core import params
from blazar_core import views

__all__ = ['ChangeRequest', 'CreateRequest', 'affinity_of', 'boolean',
           'change', 'check_total', 'create', 'integer', 'json_object',
           'query']

#: No lease is for more reservations, or more servers in all of them together.
MAX_RESERVATIONS = 20
MAX_AMOUNT = 1000
#: Seconds that an offer may stand.
OFFER = (60, 86400)

#: More than any host has, less than what a database column or a sum of many
#: could not hold.
_LARGEST = 2 ** 31 - 1

_INTEGER = re.compile('[+-]?[0-9]{1,20}')

_CREATE_KEYS = {
    'name': '"lease1"',
    'start_date': '"2026-12-01 16:07" or "now"',
    'end_date': '"2026-12-02 16:07"',
    'before_end_date': '"2026-12-02 15:07"',
    'reservations': '[{"resource_type": "virtual:instance", ...}]',
    'events': '[{"event_type": "remind", "event_date": "2026-12-01 12:00"}]',
    'offer_seconds': '600',
}
_CHANGE_KEYS = {key: _CREATE_KEYS[key] for key in (
    'name', 'start_date', 'end_date', 'before_end_date', 'reservations',
    'events')}

#: What a list may be sorted by.
_SORT_KEYS = ('start_date', 'end_date', 'created_at', 'updated_at', 'name',
              'status', 'id')
_QUERY_KEYS = {
    'status': 'ACTIVE', 'name': 'lease1', 'project_id': 'an id',
    'resource_type': 'virtual:instance', 'start_date': '2026-12-01 16:07',
    'end_date': '2026-12-02 16:07', 'sort': 'created_at:desc,name',
    'limit': '100', 'marker': 'the id of a lease', 'fields': 'id,name',
    'ended': 'true',
}
#: No page of a list is longer; so are those of who does not say how long.
MAX_LIMIT = 1000

_Object: ty.TypeAlias = dict[str, object]
Reservations: ty.TypeAlias = tuple[_Object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CreateRequest:
    """A lease that is asked for; its reservations as they were written."""

    lease: params.LeaseRequest
    reservations: Reservations
    offer_seconds: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeRequest:
    """What is to become of a lease; its reservations as they were written.
    """

    change: leases.Change
    reservations: Reservations


def json_object(value: object, what: str) -> _Object:
    """An object, with what is null left out.

    :raises InvalidLeaseParams: when it is none
    """
    if not isinstance(value, dict):
        raise errors.InvalidLeaseParams(
            f'{what} is {params.kind_of(value)}. Write a JSON object.')
    return {key: one for key, one in value.items() if one is not None}


def integer(value: object, key: str, least: int, most: int = _LARGEST) -> int:
    """A whole number, also as text.

    :raises InvalidLeaseParams: when it is none, or not within the bounds
    """
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not least <= number <= most:
        given = params.shown(value) if isinstance(value, str) else (
            number if number is not None else params.kind_of(value))
        raise errors.InvalidLeaseParams(
            f'"{key}" is {given}. Write a whole number from {least} to '
            f'{most}.')
    return number


def affinity_of(value: object) -> bool | None:
    """True, false or none, as clients write them.

    :raises InvalidLeaseParams: for anything else
    """
    if value is None or isinstance(value, str) and (
            value.strip().lower() in ('none', 'null', '')):
        return None
    if isinstance(value, bool):
        return value
    try:
        if isinstance(value, str | int):
            return bool(strutils.bool_from_string(value, strict=True))
    except ValueError:
        pass
    raise errors.InvalidLeaseParams(
        f'"affinity" is {params.kind_of(value)} that is neither true nor '
        f'false. Write True for all servers on one host, False for each on '
        f'another one, or None.')


def boolean(value: str, key: str) -> bool:
    """True or false, as a parameter of a query.

    :raises InvalidLeaseParams: for anything else
    """
    if value.lower() not in ('true', 'false', '1', '0'):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {params.shown(value)}. Write true or false.')
    return value.lower() in ('true', '1')


def check_total(amounts: ty.Iterable[int], before: int = 0) -> None:
    """Make sure that a lease is not for too many servers.

    :param before: how many it has already
    :raises InvalidLeaseParams: when it is
    """
    total = sum(amounts)
    if total > max(MAX_AMOUNT, before):
        raise errors.InvalidLeaseParams(
            f'The reservations of one lease ask for {total} servers '
            f'together. Write amounts of at most {MAX_AMOUNT} in all, or make '
            f'several leases.')


def create(body: object, now: int, defaults: params.Defaults,
           ) -> CreateRequest:
    """Read the body of ``POST /leases``.

    :raises InvalidLeaseParams: with the sentence that the user reads
    """
    values = json_object(body, 'The body of the request')
    params.check_keys(values, _CREATE_KEYS, 'the lease')
    start = params.start_of(_text(values, 'start_date', defaults.start), now)
    end = params.parse_date(_text(values, 'end_date'), now)
    window = params.window_of(start, end, now)
    offer = values.get('offer_seconds')
    return CreateRequest(
        params.LeaseRequest(
            name=params.name_of(_text(values, 'name'))
            if 'name' in values else None,
            window=window,
            before_end=_before_end(values, window, now, defaults),
            events=params.events_of(values.get('events', []), window, now),
            on_end=params.ON_END[0], starts_now=start == now),
        _reservations(values),
        None if offer is None else integer(offer, 'offer_seconds', *OFFER))


def change(body: object, now: int, lease: ty.Mapping[str, ty.Any],
           ) -> ChangeRequest:
    """Read the body of ``PUT /leases/{id}``.

    Dates without seconds compare at the minute: one that says the minute at
    which the lease begins or ends anyway changes nothing.

    :param lease: as it is, in the API's words
    :raises InvalidLeaseParams: with the sentence that the user reads
    """
    values = json_object(body, 'The body of the request')
    params.check_keys(values, _CHANGE_KEYS, 'a change of a lease')
    start = _new_date(values, 'start_date', lease, now)
    end = _new_date(values, 'end_date', lease, now)
    before_end = _new_date(values, 'before_end_date', lease, now)
    if before_end is None and end is not None and 'before_end_date' in values:
        # What is not said moves with the end; this is to stay.
        before_end = clock.parse_iso(lease['before_end_date'])
    window = model.Window(0, params.LATEST)
    return ChangeRequest(
        leases.Change(
            start=start, end=end,
            name=params.name_of(_text(values, 'name'))
            if 'name' in values else None,
            before_end=before_end,
            events=params.events_of(values['events'], window, now)
            if 'events' in values else None),
        _reservations(values))


def query(values: collections.abc.Mapping[str, str], now: int,
          ) -> tuple[views.Query, list[str] | None]:
    """Read the parameters of ``GET /leases``.

    :returns: the query, and the fields that are wanted (None: all)
    :raises InvalidLeaseParams: with the sentence that the user reads
    """
    params.check_keys(dict(values), _QUERY_KEYS, 'the query of leases')
    dates = {key: params.parse_date(values[key + '_date'], now)
             for key in ('start', 'end') if key + '_date' in values}
    return views.Query(
        project_id=values.get('project_id'), name=values.get('name'),
        status=values.get('status', '').upper() or None,
        resource_type=values.get('resource_type'),
        start=dates.get('start'), end=dates.get('end'),
        sort=_sort(values.get('sort', 'start_date')),
        marker=values.get('marker'),
        ended=boolean(values.get('ended', 'false'), 'ended'),
        limit=integer(values.get('limit', MAX_LIMIT), 'limit', 1, MAX_LIMIT),
    ), _fields(values['fields']) if 'fields' in values else None


def _fields(text: str) -> list[str]:
    names = [name.strip() for name in text.split(',')]
    for name in names:
        if name not in views.FIELDS:
            raise errors.InvalidLeaseParams(
                f'"{params.shown(name)}" is no field of a lease. Write some '
                f'of {", ".join(views.FIELDS)}.')
    return names


def _sort(text: str) -> tuple[tuple[str, bool], ...]:
    keys = []
    for part in text.split(','):
        key, _colon, direction = part.strip().partition(':')
        if key not in _SORT_KEYS or direction not in ('', 'asc', 'desc'):
            raise errors.InvalidLeaseParams(
                f'"{params.shown(part)}" cannot be sorted by. Write one or '
                f'more of {", ".join(_SORT_KEYS)}, each with ":asc" or '
                f'":desc", such as "sort=created_at:desc,name".')
        keys.append((key, direction == 'desc'))
    return tuple(dict(keys).items())


def _new_date(values: _Object, key: str, lease: ty.Mapping[str, ty.Any],
              now: int) -> int | None:
    if key not in values:
        return None
    text = _text(values, key)
    time, old = params.parse_date(text, now), lease[key]
    same = 16 if params.is_whole_minute(text) else None
    if old is not None and old[:same] == clock.iso(time)[:same]:
        return None
    return time


def _before_end(values: _Object, window: model.Window, now: int,
                defaults: params.Defaults) -> int | None:
    if 'before_end_date' in values:
        return params.inside(
            params.parse_date(_text(values, 'before_end_date'), now), window,
            'before_end_date')
    return params.default_before_end(window, defaults)


def _text(values: _Object, key: str, default: str | None = None) -> str:
    value = values.get(key, default)
    if value is None:
        raise errors.InvalidLeaseParams(
            f'Missing parameter {key}. Write for example "{key}": '
            f'{_CREATE_KEYS[key]}.')
    if not isinstance(value, str):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {params.kind_of(value)}. Write a string, such as '
            f'"{key}": {_CREATE_KEYS[key]}.')
    return value


def _reservations(values: _Object) -> Reservations:
    found = values.get('reservations', [])
    if not isinstance(found, list) or len(found) > MAX_RESERVATIONS:
        raise errors.InvalidLeaseParams(
            f'"reservations" must be a list of at most {MAX_RESERVATIONS} '
            f'objects, such as {_CREATE_KEYS["reservations"]}.')
    return tuple(json_object(one, 'An entry of "reservations"')
                 for one in found)
