# SPDX-License-Identifier: Apache-2.0
"""Parsing of the JSON of API requests about hosts.

Extra capabilities, the properties that an operator sets in addition to those
that Nova reports, are keys at the top level. Values are strings; numbers and
booleans become strings.
"""

import collections.abc
import math
import typing as ty

from blazar_core.common import errors
from blazar_core.common import words
from blazar_nova.resource_types import inputs

#: Maximum length of an extra capability's key and value, in characters.
MAX_KEY = 64
MAX_VALUE = 1024

#: Examples of bodies.
EXAMPLE = '{"name": "compute1", "gpu": "A100"}'
CHANGE = '{"gpu": "A100", "reservable": true}'
PRIVATE = '{"private": true}'

_MAX_LIMIT = 1000
_MAX_ID = 10 ** 18

_BODY = 'The body of the request'

#: Properties of every host that Nova reports.
FACTS = ('hypervisor_hostname', 'hypervisor_type', 'hypervisor_version',
         'vcpus', 'memory_mb', 'local_gb')
#: The fields of every host in the API.
FIELDS = ('id', *FACTS, 'cpu_info', 'service_name', 'reservable', 'status',
          'trust_id', 'availability_zone', 'created_at', 'updated_at')
#: Additional fields where hosts are switched off and on.
POWER = ('power_state', 'power_since', 'power_until')
_OWN = frozenset(['name', *FIELDS, *POWER])

_Object: ty.TypeAlias = dict[str, object]
_Query: ty.TypeAlias = collections.abc.Mapping[str, str]


def create(body: object) -> tuple[str, dict[str, str]]:
    """Read the body of ``POST /os-hosts``.

    :returns: the name of the host, and its extra capabilities
    :raises InvalidLeaseParams: with the message for the user
    """
    values = inputs.json_object(body, _BODY)
    if 'name' not in values:
        raise errors.InvalidLeaseParams(
            f'Missing parameter name. Write the name of a hypervisor, for '
            f'example {EXAMPLE}.')
    name = inputs.text(values.pop('name'), 'name')
    return name, {_key(key): _value(key, value)
                  for key, value in values.items()}


def change(body: object) -> tuple[dict[str, str | None], bool | None]:
    """Read the body of ``PUT /os-hosts/{id}``.

    :returns: the extra capabilities to change (None: to remove), and whether
        the host is reservable (None: as before)
    :raises InvalidLeaseParams: with the message for the user
    """
    known = inputs.json_object(body, _BODY)
    if not body:
        raise errors.InvalidLeaseParams(
            f'{_BODY} says nothing of the host. Write what shall be '
            f'otherwise, such as {CHANGE}.')
    values = dict(ty.cast('_Object', body))
    values.pop('reservable', None)
    return {_key(key): None if value is None else _value(key, value)
            for key, value in values.items()}, (
        _boolean(known, 'reservable') if 'reservable' in known else None)


def private(body: object) -> bool:
    """Read the body of ``PATCH /os-hosts/properties/{name}``.

    :raises InvalidLeaseParams: with the message for the user
    """
    values = inputs.json_object(body, _BODY)
    inputs.check_keys(values, {'private': 'true'}, 'a change of a property')
    if not values:
        raise errors.InvalidLeaseParams(
            f'Missing parameter private. Write {PRIVATE}, or false.')
    return _boolean(values, 'private')


def page(query: _Query) -> tuple[int, int | None]:
    """Read the parameters of ``GET /os-hosts``.

    :returns: the id after which the page begins, and its maximum length
        (None: all)
    :raises InvalidLeaseParams: with the message for the user
    """
    inputs.check_keys(dict(query), {
        'limit': '100', 'marker': 'the id of a host'}, 'the query of hosts')
    limit = query.get('limit')
    return inputs.integer(query.get('marker', 0), 'marker', 0, _MAX_ID), (
        None if limit is None else
        inputs.integer(limit, 'limit', 1, _MAX_LIMIT))


def allocations(query: _Query) -> dict[str, str]:
    """Read the parameters of ``GET /os-hosts/allocations`` and
    ``GET /os-hosts/{id}/allocation``.

    :raises InvalidLeaseParams: with the message for the user
    """
    inputs.check_keys(dict(query), {
        'lease_id': 'the id of a lease',
        'reservation_id': 'the id of a reservation'},
        'the query of allocations')
    return dict(query)


def properties(query: _Query) -> dict[str, bool]:
    """Read the parameters of ``GET /os-hosts/properties``.

    :returns: whether ``detail`` and ``all`` are requested
    :raises InvalidLeaseParams: with the message for the user
    """
    known = {'detail': 'true', 'all': 'true'}
    inputs.check_keys(dict(query), known, 'the query of properties')
    return {key: inputs.boolean(query.get(key, 'false'), key)
            for key in known}


def _key(key: str) -> str:
    # The prefix by which extra specs of flavors refer to the key.
    key = key.removeprefix('capabilities:')
    if key in _OWN:
        raise errors.InvalidLeaseParams(
            f'"{key}" is no extra capability: every host has it by itself. '
            f'Leave it out, or write another key.')
    if len(key) > MAX_KEY:
        raise errors.InvalidLeaseParams(
            f'Extra capability key too long: "{words.shown(key)}" has '
            f'{len(key)} characters. Write at most {MAX_KEY}.')
    if not key or not key.isprintable() or any(
            char == '$' or char.isspace() for char in key):
        raise errors.InvalidLeaseParams(
            f'"{words.shown(key)}" cannot be the key of an extra '
            f'capability. Write printable characters without blanks and '
            f'without "$", such as "gpu".')
    return key


def _value(key: str, value: object) -> str:
    if not isinstance(value, str | int | float) or (
            isinstance(value, float) and not math.isfinite(value)):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {_kind_of(value)}. Write a text, such as '
            f'"{key}": "A100".')
    text = str(value)
    if len(text) > MAX_VALUE or not text.isprintable():
        raise errors.InvalidLeaseParams(
            f'"{key}" must be a text of at most {MAX_VALUE} printable '
            f'characters.')
    return text


def _kind_of(value: object) -> str:
    return 'a number without an end' if isinstance(value, float) else (
        inputs.kind_of(value))


def _boolean(values: _Object, key: str) -> bool:
    value = values[key]
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {inputs.kind_of(value)}. Write true or false.')
    return inputs.boolean(value, key)
