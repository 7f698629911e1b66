# SPDX-License-Identifier: Apache-2.0

"""Parse values that users write, or refuse them with a sentence."""

import difflib
import ipaddress
import re
import typing as ty

from oslo_utils import strutils

from blazar_core.common import errors
from blazar_core.common import words

#: More than any host has, and small enough for a database column and for the
#: sum of many.
_LARGEST = 2 ** 31 - 1

#: The levels of lists and objects in the JSON of users. Every recursive
#: function has enough stack for them.
_DEEPEST = 64

_INTEGER = re.compile('[+-]?[0-9]{1,20}')

_Object: ty.TypeAlias = dict[str, object]


def check_depth(value: object, what: str) -> None:
    """Check how deeply lists and objects are nested.

    :raises InvalidLeaseParams: if it is more than any function may need
    """
    level = [value]
    for _depth in range(_DEEPEST):
        level = [each for one in level if isinstance(one, dict | list)
                 for each in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise errors.InvalidLeaseParams(
            f'{what} is nested deeper than {_DEEPEST} levels. Write a flatter '
            f'one.')


def check_keys(
        params: _Object, known: dict[str, str], where: str) -> None:
    """Check that an object has only known keys.

    :param known: the known keys, with examples of their values
    :raises InvalidLeaseParams: if it has other keys
    """
    for key in params:
        if key not in known:
            raise errors.InvalidLeaseParams(
                f'The key "{words.shown(key)}" is not known in {where}.'
                f'{_nearest(key, known)} Known keys: '
                f'{", ".join(known) or "none"}.')


def _nearest(key: str, known: dict[str, str]) -> str:
    # From "end_date", as the lease API has it, to "end" and vice versa, even
    # if another key is more similar.
    key = key.lower()
    near = [one for one in known if one.startswith(f'{key}_') or (
        key.startswith(f'{one}_'))] or (
            difflib.get_close_matches(key, known, n=1, cutoff=0.6))
    return f' Did you mean "{near[0]}"?' if near else ''


def kind_of(value: object) -> str:
    """Return what JSON calls the type of a value."""
    # In Python bool is a subclass of int, so it is checked first.
    kinds: tuple[tuple[type, str], ...] = (
        (type(None), 'null'), (bool, 'a boolean'), (int, 'a number'),
        (float, 'a number'), (str, 'a string'), (list, 'a list'),
        (dict, 'an object'))
    return next((kind for type_, kind in kinds if isinstance(value, type_)),
                'of an unknown type')


def json_object(value: object, what: str) -> _Object:
    """Return an object without its null values.

    :raises InvalidLeaseParams: if the value is no object
    """
    if not isinstance(value, dict):
        raise errors.InvalidLeaseParams(
            f'{what} is {kind_of(value)}. Write a JSON object.')
    return {key: one for key, one in value.items() if one is not None}


def needed(values: ty.Mapping[str, object], key: str) -> object:
    """Return a required value.

    :raises InvalidLeaseParams: if it is missing
    """
    if key not in values:
        raise errors.InvalidLeaseParams(f'Missing parameter {key}.')
    return values[key]


def integer(value: object, key: str, least: int, most: int = _LARGEST) -> int:
    """Parse a whole number, which may be given as text.

    :raises InvalidLeaseParams: if it is none, or out of bounds
    """
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not least <= number <= most:
        given = words.shown(value) if isinstance(value, str) else (
            number if number is not None else
            value if isinstance(value, float) else kind_of(value))
        if not str(given).strip():
            given = 'empty or missing'
        raise errors.InvalidLeaseParams(
            f'"{key}" is {given}. Write a whole number ' + (
                f'of at least {least}.' if most == _LARGEST and (
                    number is None or number < least)
                else f'from {least} to {most}.'))
    return number


def text(value: object, key: str, most: int = 255) -> str:
    """Return a text that is printable and not blank.

    :param most: maximum number of characters
    :raises InvalidLeaseParams: if it is none
    """
    if not isinstance(value, str) or not value.isprintable() or (
            not value.strip() or len(value) > most):
        raise errors.InvalidLeaseParams(
            f'"{words.shown(key)}" must be a text of 1 to {most} characters.')
    return value


def texts(value: object, key: str, most: int) -> list[str]:
    """Return a list of texts without duplicates; the value may be one text.

    :param most: maximum number of texts
    :raises InvalidLeaseParams: if it is invalid
    """
    several = value if isinstance(value, list) else [value]
    if len(several) > most:
        raise errors.InvalidLeaseParams(
            f'"{key}" has {len(several)} entries. Write at most {most}.')
    return list(dict.fromkeys(text(one, key) for one in several))


def address(value: object, key: str) -> str:
    """Return an IP address in its shortest notation.

    :raises InvalidLeaseParams: if it is none
    """
    try:
        return str(ipaddress.ip_address(text(value, key).strip()))
    except ValueError as exc:
        raise errors.InvalidLeaseParams(
            f'"{key}" is {words.shown(str(value))}, which is not an IP '
            'address. Write one such as "203.0.113.10".') from exc


def affinity_of(value: object) -> bool | None:
    """Parse an affinity (true, false or none) as clients write it.

    :raises InvalidLeaseParams: for any other value
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
        f'"affinity" is {kind_of(value)} that is neither true nor '
        f'false. Write True for all servers on one host, False for each on '
        f'another one, or None.')


def boolean(value: str, key: str) -> bool:
    """Parse a boolean query parameter.

    :raises InvalidLeaseParams: for any other value
    """
    if value.lower() not in ('true', 'false', '1', '0'):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {words.shown(value)}. Write true or false.')
    return value.lower() in ('true', '1')
