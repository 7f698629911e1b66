# SPDX-License-Identifier: Apache-2.0
"""Parsing of the JSON of API requests about leases.

Names and formats are those that Blazar's clients send. Dates are as in
lease_params (:mod:`blazar_nova.schemas.dates`); null counts as left out; whole
numbers and booleans may be strings.
"""

import collections.abc
import dataclasses
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates
from blazar_nova.schemas import event_schema
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_queries
from blazar_nova.schemas import lease_types
from blazar_nova.schemas import lease_views
from blazar_nova.schemas import recurrence_schema

#: Maximum number of reservations of a lease, and of hosts in remove_hosts.
MAX_RESERVATIONS = 20
#: Minimum and maximum seconds for which an offer is valid.
OFFER = (60, 86400)


_CREATE_KEYS = {
    'name': '"lease1"',
    'description': '"Nightly build"',
    'tags': '["ci", "team-a"]',
    'start_date': '"2026-12-01 16:07" or "now"',
    'end_date': '"2026-12-02 16:07"',
    'duration': '"2d"',
    'before_end_date': '"2026-12-02 15:07"',
    'before_end_action': '"snapshot"',
    'reservations': '[{"resource_type": "virtual:instance", ...}]',
    'events': event_schema.EXAMPLE,
    'offer_seconds': '600',
    'on_end': '"delete"',
    'grace_period': '1800',
    'auto_extend': '"7d"',
    'lease_type': '"retry"',
    'retries': '12',
    'retry_interval': '300',
    'timeout': '1800',
    'recurrence': recurrence_schema.EXAMPLE,
}
CHANGE_KEYS = {key: _CREATE_KEYS[key] for key in (
    'name', 'description', 'tags', 'start_date', 'end_date',
    'before_end_date', 'before_end_action', 'reservations', 'events', 'on_end',
    'grace_period', 'auto_extend')} | {
        'end': _CREATE_KEYS['end_date'], 'duration': _CREATE_KEYS['duration'],
        'resources_changed': 'false', 'remove_hosts': '["compute-7"]'}
#: Keys by which an update may set the end: those of the API, and those of
#: lease_params.
_ENDS = ('end_date', 'end', 'duration')

#: Keys by which a list may be sorted.
_SORT_KEYS = ('start_date', 'end_date', 'created_at', 'updated_at', 'name',
              'status', 'id')
_QUERY_KEYS = {
    'status': 'ACTIVE', 'name': 'lease1', 'tags': 'ci,team-a',
    'project_id': 'an id',
    'resource_type': 'virtual:instance', 'start_date': '2026-12-01 16:07',
    'end_date': '2026-12-02 16:07', 'sort': 'created_at:desc,name',
    'limit': '100', 'marker': 'the id of a lease', 'fields': 'id,name',
    'ended': 'true', 'occurrences': 'true',
}
#: Maximum length of a page.
MAX_LIMIT = 1000
#: Maximum length of a list without paging.
MAX_WHOLE = 10_000

_Object: ty.TypeAlias = dict[str, object]
Reservations: ty.TypeAlias = tuple[_Object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CreateRequest:
    """A requested lease; its reservations as they were written."""

    lease: requests.LeaseRequest
    reservations: Reservations
    offer_seconds: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A requested update; its reservations as they were written."""

    change: updates.LeaseChange
    reservations: Reservations


def check_total(amounts: ty.Iterable[int], most: int, before: int = 0,
                times: int = 1, others: int = 0) -> None:
    """Check the total amount of a lease.

    :param most: the operator's limit, over all occurrences
    :param before: how many servers or hosts the lease has so far
    :param times: the number of occurrences
    :param others: how many the other occurrences have
    :raises InvalidLeaseParams: if the lease exceeds the limit
    """
    each = sum(amounts)
    if each <= before or each * times + others <= most:
        return
    together = '' if times == 1 else f'{each * times} in {times} occurrences'
    if others:
        together = f'{each + others} with those of the other occurrences'
    raise recurrence_schema.too_much(each, together, most)


def create(body: object, now: int, defaults: hint_params.Defaults,
           ) -> CreateRequest:
    """Read the body of ``POST /leases``.

    :raises InvalidLeaseParams: with the message for the user
    """
    values = inputs.json_object(body, 'The body of the request')
    inputs.check_keys(values, _CREATE_KEYS, 'the lease')
    values = _with_snapshots(values, ())
    values, local = recurrence_schema.localized(values, now, defaults.start)
    start = dates.start_of(
        _text(values, 'start_date', defaults.start), now)
    window = hint_params.window_of(start, _end(values, start, now), now)
    request = hint_params.request_of(
        values, window, now, defaults, local, _CREATE_KEYS, 'before_end_date')
    offer = values.get('offer_seconds')
    if offer is not None and request.patience is not None:
        raise errors.InvalidLeaseParams(
            'An offer is made now, or not at all. Leave "offer_seconds" out, '
            'or "lease_type".')
    return CreateRequest(
        request, _reservations(values),
        None if offer is None else inputs.integer(
            offer, 'offer_seconds', *OFFER))


def change(body: object, now: int, lease: ty.Mapping[str, ty.Any],
           defaults: hint_params.Defaults) -> ChangeRequest:
    """Read the body of ``PUT /leases/{id}``.

    Dates without seconds compare at the minute: one in the same minute as the
    current start or end changes nothing.

    :param lease: as :func:`blazar_core.leases.views.describe` returns it
    :raises InvalidLeaseParams: with the message for the user
    """
    values = inputs.json_object(body, 'The body of the request')
    _check_changed(values)
    values = _with_snapshots(values, lease['reservations'])
    start = _new_date(values, 'start_date', lease, now)
    end = _new_end(values, start, lease, now)
    before_end = _new_date(values, 'before_end_date', lease, now)
    if before_end is None and end is not None and 'before_end_date' in values:
        # A date that is left out moves with the end; this one stays.
        before_end = ty.cast(int, lease['before_end_date'])
    first = max(now, lease['start_date'] if start is None else start)
    if end is not None and end > max(first, lease['end_date']) and (
            lease['before_end_date'] is None and before_end is None):
        # The lease was too short to have one.
        before_end = hint_params.default_before_end(
            model.Window(first, end), defaults)
    if values.get('resources_changed', False) is not False:
        raise errors.InvalidLeaseParams(
            '"resources_changed" is true when the hosts of a reservation have '
            'changed. Write false to acknowledge it; it becomes true again '
            'with the next change.')
    window = model.Window(0, model.LATEST)
    return ChangeRequest(
        updates.LeaseChange(
            start=start, end=end, seen='resources_changed' in values,
            remove_hosts=frozenset(inputs.texts(
                values['remove_hosts'], 'remove_hosts', MAX_RESERVATIONS))
            if 'remove_hosts' in values else frozenset(),
            name=hint_params.name_of(_text(values, 'name'))
            if 'name' in values else None,
            description=hint_params.description_of(values),
            tags=hint_params.tags_of(values),
            before_end=before_end,
            events=event_schema.read(
                values['events'], window, now, defaults.actions)
            if 'events' in values else None,
            on_end=hint_params.on_end_of(values['on_end'], defaults)
            if _joined(values.get('on_end', lease['on_end'])) != (
                lease['on_end']) else None,
            grace_period=hint_params.grace_of(values['grace_period'])
            if 'grace_period' in values else None,
            auto_extend=lease_types.extension_of(values['auto_extend'])
            if 'auto_extend' in values else None,
            before_end_action=event_schema.action_of(
                values['before_end_action'], 'before_end_action',
                defaults.actions)
            if 'before_end_action' in values else None),
        _reservations(values))


def _check_changed(values: dict[str, object]) -> None:
    """Check that all keys of a change can be changed.

    :raises InvalidLeaseParams: if one cannot
    """
    for key in lease_views.FIELDS:
        # Fields that are sent unchanged were dropped before.
        if key in values and key not in CHANGE_KEYS:
            raise errors.InvalidLeaseParams(
                f'"{key}" cannot be changed, and this lease has another value '
                f'of it now. Read the lease again if it may have changed '
                f'meanwhile, or send only the keys to change.')
    inputs.check_keys(values, CHANGE_KEYS, 'a change of a lease')


def query(values: collections.abc.Mapping[str, str], now: int,
          list_ended: int) -> tuple[lease_queries.Query, list[str] | None]:
    """Read the parameters of ``GET /leases``.

    :param list_ended: for how many seconds ended leases are listed
    :returns: the query, and the requested fields (None: all)
    :raises InvalidLeaseParams: with the message for the user
    """
    inputs.check_keys(dict(values), _QUERY_KEYS, 'the query of leases')
    found = {key: dates.parse_date(values[key + '_date'], now)
             for key in ('start', 'end') if key + '_date' in values}
    paged = 'limit' in values or 'marker' in values
    return lease_queries.Query(
        project_id=values.get('project_id'), name=values.get('name'),
        tags=hint_params.tags_of(dict(values)) or (),
        status=_status(values['status']) if 'status' in values else None,
        resource_type=extensions.check_type(values['resource_type'])
        if 'resource_type' in values else None,
        start=found.get('start'), end=found.get('end'),
        sort=_sort(values.get('sort', 'start_date')),
        marker=values.get('marker'),
        ended=inputs.boolean(values.get('ended', 'false'), 'ended'),
        ended_after=None if 'ended' in values or not list_ended
        else now - list_ended,
        occurrences=inputs.boolean(
            values.get('occurrences', 'false'), 'occurrences'),
        # Clients without paging take the first page for the whole list.
        limit=inputs.integer(
            values.get('limit', MAX_LIMIT), 'limit', 1, MAX_LIMIT)
        if paged else MAX_WHOLE, paged=paged,
    ), _fields(values['fields']) if 'fields' in values else None


def _status(text: str) -> str:
    known = [*states.Lease, views.DELETING]
    if text.upper() not in known:
        raise errors.InvalidLeaseParams(
            f'"{words.shown(text)}" is no status of a lease. Write one of '
            f'{", ".join(known)}.')
    return text.upper()


def _fields(text: str) -> list[str]:
    names = [name.strip() for name in text.split(',')]
    for name in names:
        if name not in lease_views.FIELDS:
            raise errors.InvalidLeaseParams(
                f'"{words.shown(name)}" is no field of a lease. Write some '
                f'of {", ".join(lease_views.FIELDS)}.')
    return names


def _sort(text: str) -> tuple[tuple[str, bool], ...]:
    keys = []
    for part in text.split(','):
        key, _colon, direction = part.strip().partition(':')
        if key not in _SORT_KEYS or direction not in ('', 'asc', 'desc'):
            raise errors.InvalidLeaseParams(
                f'"{words.shown(part)}" cannot be sorted by. Write one or '
                f'more of {", ".join(_SORT_KEYS)}, each with ":asc" or '
                f'":desc", such as "sort=created_at:desc,name".')
        keys.append((key, direction == 'desc'))
    return tuple(dict(keys).items())


def _end(values: _Object, start: int, now: int) -> int:
    """Return the end of a new lease."""
    if not values.keys() & {'end_date', 'duration'}:
        raise errors.InvalidLeaseParams(
            'Missing parameter end_date. Write for example "end_date": '
            f'{_CREATE_KEYS["end_date"]}, or "duration": '
            f'{_CREATE_KEYS["duration"]}.')
    if 'duration' not in values:
        return dates.parse_date(_text(values, 'end_date'), now)
    if 'end_date' in values:
        raise errors.InvalidLeaseParams(
            'A lease has both "end_date" and "duration". Write only one of '
            'them.')
    return start + dates.parse_duration(_text(values, 'duration'))


def _new_end(values: _Object, start: int | None,
             lease: ty.Mapping[str, ty.Any], now: int) -> int | None:
    """Return the new end of a lease; None: the end does not change.

    :param start: the new start; None: the start does not change
    """
    said = [key for key in _ENDS if key in values]
    if len(said) > 1:
        raise errors.InvalidLeaseParams(
            f'A change of a lease has both "{said[0]}" and "{said[1]}". Write '
            f'only one of them.')
    if said != ['duration']:
        return _new_date(values, 'end' if 'end' in said else 'end_date',
                         lease, now)
    start = lease['start_date'] if start is None else start
    end = start + dates.parse_duration(_text(values, 'duration'))
    if end >= model.LATEST:
        # Check the computed end like a date that is written.
        hint_params.window_of(start, end, start)
    return None if end == lease['end_date'] else end


def _new_date(values: _Object, key: str, lease: ty.Mapping[str, ty.Any],
              now: int) -> int | None:
    """Return the new value of a date; None: the date does not change.

    :param key: of the date, with or without "_date"
    """
    if key not in values:
        return None
    text = _text(values, key)
    time, old = dates.parse_date(text, now), lease[
        f'{key.removesuffix("_date")}_date']
    unit = 60 if dates.is_whole_minute(text) else 1
    return None if old is not None and old // unit == time // unit else time


def _text(values: _Object, key: str, default: str | None = None) -> str:
    value = values.get(key, default)
    if value is None:
        raise errors.InvalidLeaseParams(
            f'Missing parameter {key}. Write for example "{key}": '
            f'{_CREATE_KEYS[key]}.')
    return event_schema.string(value, key, _CREATE_KEYS | CHANGE_KEYS)


def _joined(on_end: object) -> object:
    """Return end policies in a list as they are shown."""
    return ','.join(map(str, on_end)) if isinstance(on_end, list) else on_end


def _with_snapshots(values: _Object,
                    before: ty.Iterable[ty.Mapping[str, ty.Any]]) -> _Object:
    """Add the images before the end that a reservation requests.

    :param before: the current reservations
    :raises InvalidLeaseParams: if the lease requests another action
    """
    said = [one['before_end'] for one in _reservations(values)
            if 'before_end' in one]
    if states.Action.SNAPSHOT not in said:
        if said and 'before_end_action' not in values and any(
                (one['params'] or {}).get('before_end') for one in before):
            return {**values, 'before_end_action': states.Action.NOTIFY.value}
        return values
    if values.get('before_end_action', states.Action.SNAPSHOT) != (
            states.Action.SNAPSHOT):
        raise errors.InvalidLeaseParams(
            f'A reservation has "before_end": "snapshot", and the lease '
            f'"before_end_action": "{states.Action.NOTIFY}". Leave one of '
            f'them out: it is done for all servers of a lease, or none.')
    return {**values, 'before_end_action': states.Action.SNAPSHOT.value}


def _reservations(values: _Object) -> Reservations:
    found = values.get('reservations', [])
    if not isinstance(found, list) or len(found) > MAX_RESERVATIONS:
        raise errors.InvalidLeaseParams(
            f'"reservations" must be a list of at most {MAX_RESERVATIONS} '
            f'objects, such as {_CREATE_KEYS["reservations"]}.')
    return tuple(inputs.json_object(one, 'An entry of "reservations"')
                 for one in found)
