# SPDX-License-Identifier: Apache-2.0

"""Parsing of the scheduler hints of a boot into a lease request.

A user writes ``--hint reserved=True --hint lease_params='{...}'``. The rules:

* ``reserved`` alone requests a lease of the default start and length.
  ``reserved=False`` is an ordinary boot; ``lease_params`` is then not parsed.
* ``lease_params`` is a string with a JSON object. Its keys are
  ``name``, ``start``, ``end`` or ``duration``, ``before_end``,
  ``before_end_action``, ``events``, ``on_end``, ``grace_period``,
  ``auto_extend``, ``lease_type``, ``retries``, ``retry_interval``,
  ``timeout``, ``recurrence`` and ``server_status``. A null counts as left
  out.
* Hints whose names begin with "blazar" are set by the service only.
* Blanks around a name are cut, as Nova does for servers.
* :mod:`blazar_nova.schemas.dates` defines dates and durations.
"""

import collections.abc
import dataclasses
import json
import re
import typing as ty
import unicodedata

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import requests
from blazar_core.plugins import end_policies
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import boot_hints
from blazar_nova.schemas import dates
from blazar_nova.schemas import event_schema
from blazar_nova.schemas import lease_types
from blazar_nova.schemas import recurrence_schema

MAX_BYTES = 16 * 1024
MAX_NAME = 255
MAX_TAGS = 20
#: No characters that end a tag in a list, in JSON or in a table.
_TAG = re.compile(r'[\w .:=+#@()-]{1,60}')
#: Maximum grace period in seconds: 30 days.
MAX_GRACE = 2592000


_EXAMPLE = '{"start": "now", "duration": "2h"}'

#: The known keys of lease_params, each with an example of its value.
_KEYS = {
    'name': '"lease1"',
    'description': '"Nightly build"',
    'tags': '["ci", "team-a"]',
    'start': '"now"',
    'end': '"2026-12-01 16:07"',
    'duration': '"2h"',
    'before_end': '"2026-12-01 15:07"',
    'before_end_action': '"snapshot"',
    'events': event_schema.EXAMPLE,
    'on_end': '"delete"',
    'grace_period': '"30m"',
    'auto_extend': '"7d"',
    'lease_type': '"retry"',
    'retries': '12',
    'retry_interval': '"5m"',
    'timeout': '"30m"',
    'recurrence': recurrence_schema.EXAMPLE,
    'server_status': '"BUILD"',
}

#: What Nova may show as the status of a reserved server.
_RESERVED, _BUILD = 'RESERVED', 'BUILD'

_Object: ty.TypeAlias = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Defaults:
    """The operator's defaults for what a request leaves out.

    ``start`` is a date as in lease_params, ``length`` is in seconds;
    ``minutes_before_end`` of 0 means no before_end event.
    """

    start: str
    length: int
    minutes_before_end: int
    #: Available values of ``on_end``; the first is the default.
    ends: tuple[str, ...] = (end_policies.DELETE,)
    #: Seconds.
    grace_period: int = 0
    retry: requests.Retry = requests.Retry(300, 12)
    #: Seconds.
    timeout: int = 1800
    max_occurrences: int = 100
    max_amount: int = 1000
    #: Names of hints with another meaning in this cloud.
    allowed_hints: tuple[str, ...] = ()
    server_status: str = _RESERVED

    @property
    def shows_build(self) -> bool:
        """Return whether reserved servers are shown with status BUILD."""
        return self.server_status == _BUILD

    @property
    def actions(self) -> tuple[states.Action, ...]:
        """Return the available event actions: images only if ``on_end`` may
        create images too.
        """
        return tuple(one for one in states.Action if one in (
            states.Action.NOTIFY, *self.ends))


def defaults(conf: ty.Any) -> Defaults:
    """Return the defaults of lease requests, from the configuration."""
    group = conf.blazar
    return Defaults(
        start=group.reservation_start_date,
        length=60 * (group.reservation_length_minutes + 60 * (
            group.reservation_length_hours +
            24 * group.reservation_length_days)),
        minutes_before_end=group.minutes_before_end_lease,
        ends=tuple(group.on_end), grace_period=group.grace_period,
        retry=requests.Retry(group.retry_interval, group.retries),
        timeout=group.best_effort_timeout,
        max_occurrences=group.max_occurrences,
        max_amount=group.max_amount,
        allowed_hints=tuple(group.allowed_hints),
        server_status=group.server_status)


def check_defaults(made: Defaults, now: int) -> None:
    """Check that ``reserved=True`` alone requests a valid lease.

    :raises ConfigurationError: if it does not
    """
    missing = set(made.ends) - extensions.installed_policies().keys()
    if missing or not made.ends:
        raise errors.ConfigurationError(
            f'[blazar] on_end must be names of end policies that are '
            f'installed '
            f'({", ".join(sorted(extensions.installed_policies()))}), '
            f'and is "{",".join(made.ends)}".')
    try:
        lease_request({'reserved': True}, now, made)
    except errors.InvalidLeaseParams as exc:
        raise errors.ConfigurationError(
            f'[blazar] reservation_start_date and reservation_length_days, '
            f'_hours and _minutes make no lease: {exc}') from exc


def lease_request(
        hints: collections.abc.Mapping[str, object], now: int,
        defaults: Defaults) -> requests.LeaseRequest | None:
    """Parse the hints of a boot; None: they request no lease.

    :param hints: the scheduler hints as in the request's body
    :param now: seconds since the epoch, UTC
    :raises InvalidLeaseParams: with the message for the user
    """
    if not boot_hints.ask_for_lease(hints, defaults.allowed_hints):
        return None
    if boot_hints.LEASE_PARAMS not in hints:
        start = dates.parse_date(defaults.start, now)
        return _request({}, start, start + defaults.length, now, defaults)
    params, local = recurrence_schema.localized(_load(boot_hints.scalar(
        hints[boot_hints.LEASE_PARAMS])), now, defaults.start)
    start = dates.start_of(_text(params, 'start', defaults.start), now)
    return _request(
        params, start, _end(params, start, now), now, defaults, local)


# The JSON of lease_params

def _load(text: object) -> _Object:
    """Return the parsed object, with known keys only, without nulls."""
    if not isinstance(text, str):
        raise errors.InvalidLeaseParams(
            f'The hint lease_params is {inputs.kind_of(text)}. Send it once, '
            f'as a string that holds a JSON object, such as \'{_EXAMPLE}\'.')
    # JSON may have lone surrogates, which strict UTF-8 cannot encode.
    size = len(text.encode('utf-8', 'surrogatepass'))
    if size > MAX_BYTES:
        raise errors.InvalidLeaseParams(
            f'The hint lease_params has {size} bytes. Write at most '
            f'{MAX_BYTES}.')
    params = _decode(text)
    inputs.check_depth(params, 'The hint lease_params')
    if not isinstance(params, dict):
        raise errors.InvalidLeaseParams(
            f'The hint lease_params holds {inputs.kind_of(params)}. Write a '
            f'JSON object instead, such as \'{_EXAMPLE}\'.')
    params = inputs.json_object(params, 'lease_params')
    inputs.check_keys(params, _KEYS, 'lease_params')
    return params


def _decode(text: str) -> object:
    try:
        return ty.cast(object, json.loads(
            text, object_pairs_hook=_pairs, parse_constant=_constant))
    except json.JSONDecodeError as e:
        why = f'{e.msg} at line {e.lineno}, column {e.colno}'
    except RecursionError:
        why = 'it is nested too deeply'
    except ValueError:
        # Python does not convert integers of several thousand digits.
        why = 'a number in it is too long'
    raise errors.InvalidLeaseParams(
        f'The hint lease_params is not JSON that can be read: {why}. Write it '
        f'like this: \'{_EXAMPLE}\'.')


def _pairs(pairs: list[tuple[str, object]]) -> _Object:
    result: _Object = {}
    for key, value in pairs:
        if key in result:
            raise errors.InvalidLeaseParams(
                f'The key "{words.shown(key)}" is given twice in '
                'lease_params. Write it once.')
        result[key] = value
    return result


def _constant(name: str) -> ty.NoReturn:
    raise errors.InvalidLeaseParams(
        f'The hint lease_params holds {name}, which is not JSON. Write dates '
        f'and durations as strings, such as \'{_EXAMPLE}\'.')


def _text(params: _Object, key: str, default: str) -> str:
    """Return the string at a key of lease_params."""
    return event_schema.string(params.get(key, default), key, _KEYS)


# The lease

def _request(params: _Object, start: int, end: int, now: int,
             defaults: Defaults, local: recurrence_schema.Local | None = None,
             ) -> requests.LeaseRequest:
    request = request_of(params, window_of(start, end, now), now, defaults,
                         local, _KEYS, 'before_end', defaults.ends)
    return dataclasses.replace(
        request, shows_build=_shows_build(params, defaults))


def request_of(values: _Object, window: model.Window, now: int,
               defaults: Defaults, local: recurrence_schema.Local | None,
               keys: ty.Mapping[str, str], date: str,
               between: ty.Collection[str] = ()) -> requests.LeaseRequest:
    """Return the request of a new lease, from lease_params or a body.

    :param local: as :func:`.recurrence_schema.localized` returns it
    :param keys: the known keys, each with an example of its value
    :param date: the key of the time of the event before the end
    :param between: the end policies available between two occurrences
    :raises InvalidLeaseParams: with the message for the user
    """
    before_end = default_before_end(window, defaults) if (
        date not in values) else event_schema.inside(dates.parse_date(
            event_schema.string(values[date], date, keys), now), window, date)
    request = requests.LeaseRequest(
        name=name_of(event_schema.string(values['name'], 'name', keys))
        if 'name' in values else None,
        description=description_of(values) or None,
        tags=tags_of(values) or (),
        window=window, starts_now=window.start == now,
        retry=lease_types.retry_of(values, window, now, defaults.retry),
        timeout=lease_types.timeout_of(values, window, defaults.timeout),
        recurrence=recurrence_schema.recurrence_of(
            values, window, defaults.max_occurrences, local, between),
        before_end=before_end,
        before_end_action=event_schema.before_end_action(
            values, before_end, window, defaults.actions, date),
        events=event_schema.read(
            values.get('events', []), window, now, defaults.actions),
        on_end=on_end_of(values.get('on_end', defaults.ends[0]), defaults),
        grace_period=grace_of(values.get(
            'grace_period', defaults.grace_period)),
        auto_extend=lease_types.extension_of(values.get('auto_extend', 0)))
    lease_types.check_extension(
        request.auto_extend, request.on_end, request.actions)
    if 'duration' in values and request.patience is not None:
        request = dataclasses.replace(
            request, duration=window.end - window.start)
    return request


def _shows_build(params: _Object, defaults: Defaults) -> bool:
    status = _text(params, 'server_status', defaults.server_status)
    if status.upper() not in (_RESERVED, _BUILD):
        raise errors.InvalidLeaseParams(
            f'"server_status" is "{words.shown(status)}". Write '
            f'"{_RESERVED}" or "{_BUILD}": what is shown as the status of a '
            f'server until its lease starts.')
    return status.upper() == _BUILD


def _end(params: _Object, start: int, now: int) -> int:
    if 'end' in params and 'duration' in params:
        raise errors.InvalidLeaseParams(
            'lease_params has both "end" and "duration". Write only one of '
            'them.')
    if 'end' in params:
        return dates.parse_date(_text(params, 'end', ''), now)
    if 'duration' in params:
        return start + dates.parse_duration(_text(params, 'duration', ''))
    raise errors.InvalidLeaseParams(
        'lease_params needs "end" or "duration". Write for example "end": '
        f'{_KEYS["end"]} or "duration": {_KEYS["duration"]}.')


def window_of(start: int, end: int, now: int) -> model.Window:
    """Return the window of a new lease.

    :raises InvalidLeaseParams: if it is not valid
    """
    if start < now:
        raise errors.InvalidLeaseParams(
            f'The start {clocks.minute(start)} is in the past: it is '
            f'{clocks.minute(now)} UTC. Write "now" to start at once, or a '
            'later date.')
    if end <= start:
        raise errors.InvalidLeaseParams(
            'End date must be later than start date. The start is '
            f'{clocks.minute(start)}, the end is {clocks.minute(end)} UTC: '
            'write a later end, or a duration such as "2h".')
    if end >= model.LATEST:
        raise errors.InvalidLeaseParams(
            f'The lease would not end before {clocks.minute(model.LATEST)} '
            'UTC. Write an earlier one.')
    return model.Window(start, end)


def name_of(text: str) -> str:
    """Return the name of a lease from a request.

    :raises InvalidLeaseParams: if it is not valid
    """
    # Checked before blanks are cut: line breaks are not accepted as blanks.
    if any(unicodedata.category(char) in ('Cc', 'Cs') for char in text):
        raise errors.InvalidLeaseParams(
            f'The name "{words.shown(text)}" has control characters or '
            'halves of characters in it. Write one without them.')
    name = text.strip()
    if not 1 <= len(name) <= MAX_NAME:
        raise errors.InvalidLeaseParams(
            f'The name has {len(name)} characters, blanks around it not '
            f'counted. Write 1 to {MAX_NAME}, or leave it out.')
    return name


def description_of(values: _Object) -> str | None:
    """Return the description of a lease; None: the request has none.

    :raises InvalidLeaseParams: if it is not valid
    """
    text = values.get('description')
    if text is None:
        return None
    if not isinstance(text, str) or len(text) > MAX_NAME or any(
            unicodedata.category(char) in ('Cc', 'Cs') for char in text):
        raise errors.InvalidLeaseParams(
            f'"description" must be a text of at most {MAX_NAME} characters '
            'without control characters.')
    return text.strip()


def tags_of(values: _Object) -> tuple[str, ...] | None:
    """Return the tags of a lease, sorted, and in lower case as some databases
    compare without case; None: the request has none.

    :raises InvalidLeaseParams: if one is not valid
    """
    tags = values.get('tags')
    if tags is None:
        return None
    if isinstance(tags, str):
        tags = tags.split(',') if tags.strip() else []
    if not isinstance(tags, list) or len(tags) > MAX_TAGS:
        raise errors.InvalidLeaseParams(
            f'"tags" must be a list of at most {MAX_TAGS} texts, such as '
            f'{_KEYS["tags"]}.')
    found = [tag.strip().lower() if isinstance(tag, str) else ''
             for tag in tags]
    for tag in found:
        if not _TAG.fullmatch(tag):
            raise errors.InvalidLeaseParams(
                f'"{words.shown(tag)}" is no tag. Write 1 to 60 letters, '
                'digits, blanks and characters of _.:=+#@()-.')
    return tuple(sorted(set(found)))


def default_before_end(window: model.Window, defaults: Defaults,
                       ) -> int | None:
    """Return the default time of the notification before the end; None: a
    lease has none if it is not longer than that.
    """
    time = window.end - 60 * defaults.minutes_before_end
    return time if defaults.minutes_before_end > 0 and (
        time > window.start) else None


def on_end_of(value: object, defaults: Defaults) -> str:
    """Return the end policy of a lease.

    :param value: a name, or several: a list, or a text with commas
    :raises InvalidLeaseParams: if one is not available
    """
    known = defaults.ends
    names = value.split(',') if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(
            isinstance(name, str) for name in names):
        raise errors.InvalidLeaseParams(
            f'"on_end" is {inputs.kind_of(value)}. Write a string, such as '
            f'"on_end": {_KEYS["on_end"]}, or a list of some.')
    names = [name.strip() for name in names]
    for name in names:
        if name not in known:
            raise errors.InvalidLeaseParams(
                f'"on_end": "{words.shown(name)}" is not available. What is '
                'available at the end of a lease: '
                f'{", ".join(known)}. Write "on_end": "{known[0]}" or leave '
                f'it out.')
    return end_policies.ordered(names, extensions.installed_policies())


def grace_of(value: object) -> int:
    """Return the seconds for which servers stay after the end of a lease.

    :param value: seconds, or a duration
    :raises InvalidLeaseParams: if the value is neither, or too large
    """
    return dates.length(value, 'grace_period', 0, MAX_GRACE)
