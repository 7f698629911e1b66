# SPDX-License-Identifier: Apache-2.0

"""Expressions over the properties of hosts, as users write them.

They are JSON arrays in prefix notation::

    ["and", [">=", "$vcpus", "8"], ["in", "$hypervisor_type", "QEMU", "KVM"]]

``and`` and ``or`` take one or more expressions. The other operators take a
property, named with a dollar sign, and the values to compare it with: ``=``
(or ``==``), ``!=``, ``<``, ``>``, ``<=``, ``>=`` one value, ``in`` one or
more. If both sides are numbers, they are compared as numbers, otherwise as
text: ``"9"`` is less than ``"10"``, and ``"node9"`` is not less than
``"node10"``. A host without the property matches no comparison with it. An
empty string or array matches every host.

``["=", "$capabilities:gpu", "<in> A1"]`` compares the property ``gpu`` as the
extra specs of flavors do: ``>= 8``, ``s== A100``, ``<in> A1``,
``<or> A100 <or> H100``, ``<all-in> aes``, ``<range-in> [ 1 4 ]``; without an
operator, equal as text. As in extra specs, ``=`` means at least.
"""

import json
import math
import typing as ty

from oslo_utils import specs_matcher
import pyparsing

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_nova.resource_types import inputs

#: Limits of an expression: its nesting, its length in bytes, and the values
#: that it compares with, as it is evaluated for every kind of host. Each
#: comparison has a value, and there are fewer combinations than comparisons.
MAX_DEPTH = 20
MAX_BYTES = 16 * 1024
MAX_VALUES = 50

#: Begins the name of a property that is compared as extra specs are.
_SPEC = f'${host_properties.SPEC}'
_EXAMPLE = '["and", [">=", "$vcpus", "8"], ["=", "$hypervisor_type", "QEMU"]]'


def parse(text: object) -> host_properties.Expression | None:
    """Parse an expression from a JSON string, or from parsed JSON.

    :returns: None if every host matches
    :raises InvalidLeaseParams: if it is invalid; the message says what to
        write
    """
    if isinstance(text, str):
        text = _load(text)
    else:
        _check_length(_shown(text, MAX_BYTES + 1))
    if text is None or text == []:
        return None
    return _expression(text, 1)


def both(one: host_properties.Expression | None,
         other: host_properties.Expression | None,
         ) -> host_properties.Expression | None:
    """Return the conjunction of two expressions; None matches every host."""
    return host_properties.Combination('and', (one, other)) if (
        one and other) else one or other


def check(expression: host_properties.Expression | None,
          public: ty.Collection[str]) -> None:
    """Check that a user may use an expression.

    A user who may use any property of a host can tell all hosts apart.

    :param public: properties that users may use
    :raises InvalidLeaseParams: if it uses others or has too many values
    """
    if expression is None:
        return
    if expression.count > MAX_VALUES:
        raise errors.InvalidLeaseParams(
            f'The property expression compares with {expression.count} '
            f'values. Write one with at most {MAX_VALUES}.')
    for name in sorted(expression.names):
        if name not in public:
            raise errors.InvalidLeaseParams(
                f'"${name[:80]}" is not a host property that reservations can '
                'ask for. ' + (
                    'Write one or more of ' + ', '.join(
                        f'"${one}"' for one in public) + '.' if public else
                    'There are none: leave the properties out.'))


def _check_length(text: str) -> None:
    if len(text.encode(errors='replace')) > MAX_BYTES:
        raise errors.InvalidLeaseParams(
            f'The property expression is longer than {MAX_BYTES} bytes. '
            f'Write a shorter one.')


def _load(text: str) -> object:
    _check_length(text)
    if not text.strip():
        return None
    try:
        found = ty.cast(object, json.loads(text))
    except (ValueError, RecursionError) as exc:
        raise errors.InvalidLeaseParams(
            f'The property expression is not JSON ({exc}). Write for '
            f'example {_EXAMPLE}.') from exc
    inputs.check_depth(found, 'The property expression')
    return found


def _expression(node: object, depth: int) -> host_properties.Expression:
    if depth > MAX_DEPTH:
        raise errors.InvalidLeaseParams(
            f'The property expression is nested deeper than {MAX_DEPTH} '
            f'levels. Write a flatter one.')
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise errors.InvalidLeaseParams(
            'A property expression is an array that begins with an operator, '
            f'but {_shown(node)} is not. Write for example {_EXAMPLE}.')
    if node[0] in host_properties.COMBINE:
        return _combination(node[0], node[1:], depth)
    if node[0] in host_properties.COMPARE:
        return _comparison(node[0], node[1:])
    known = [*host_properties.COMBINE, *host_properties.COMPARE]
    raise errors.InvalidLeaseParams(
        f'"{node[0][:80]}" is not an operator of property expressions. Write '
        f'one of {", ".join(known)}.')


def _combination(name: str, parts: list[object], depth: int,
                 ) -> host_properties.Expression:
    if not parts:
        raise errors.InvalidLeaseParams(
            f'"{name}" needs one or more expressions. Write for example '
            f'{_EXAMPLE}.')
    found = tuple(_expression(part, depth + 1) for part in parts)
    return found[0] if len(found) == 1 else (
        host_properties.Combination(name, found))


def _comparison(name: str, operands: list[object],
                ) -> host_properties.Comparison:
    many = name == 'in'
    if len(operands) < 2 or len(operands) > 2 and not many:
        raise errors.InvalidLeaseParams(
            f'"{name}" needs a property and {"values" if many else "a value"}'
            f'. Write for example ["{name}", "$vcpus", "8"].')
    prop, *rest = operands
    if not isinstance(prop, str) or not prop.startswith('$') or prop == '$':
        raise errors.InvalidLeaseParams(
            f'The first operand of "{name}" must be a property such as '
            f'"$vcpus", not {_shown(prop)}.')
    values = rest[0] if many and isinstance(rest[0], list) else rest
    if not values:
        raise errors.InvalidLeaseParams(
            f'"in" needs one or more values to compare "{prop[:80]}" with. '
            'Write for example ["in", "$vcpus", "8", "16"].')
    found = tuple(_value(one) for one in values)
    if prop.startswith(_SPEC):
        return _spec(name, prop.removeprefix(_SPEC), found)
    return host_properties.Comparison(name, prop[1:], found)


def _spec(name: str, prop: str, values: tuple[host_properties.Value, ...],
          ) -> host_properties.Comparison:
    if name not in ('=', '==', 'in'):
        raise errors.InvalidLeaseParams(
            f'"{name}" cannot compare "{_SPEC}{prop[:80]}": its value '
            f'contains its own operator. Write ["=", "{_SPEC}gpu", "<in> '
            'A1"].')
    for value in values:
        problem = _spec_problem(str(value))
        if problem is not None:
            raise errors.InvalidLeaseParams(
                f'{_shown(value)} cannot be compared with '
                f'"{_SPEC}{prop[:80]}" ({problem[:80]}). Write for example '
                '">= 8", "s== A100" or "<or> A100 <or> H100".')
    return host_properties.Comparison(
        host_properties.SPEC, prop, tuple(map(str, values)))


def _value(value: object) -> host_properties.Value:
    # Python reads NaN and 1e999, but databases do not store them.
    if not isinstance(value, str | int | float) or (
            isinstance(value, float) and not math.isfinite(value)):
        raise errors.InvalidLeaseParams(
            f'A property compares with a text or a number, not with '
            f'{_shown(value)}.')
    # Booleans compare as text; as a value of Python, True equals 1.
    return str(value) if isinstance(value, bool) else value


def _shown(node: object, most: int = 80) -> str:
    try:
        return json.dumps(node)[:most]
    except RecursionError:
        return 'what is nested so deeply'


def _spec_problem(spec: str) -> str | None:
    """Return why a text is not a valid spec, or None."""
    try:
        operator, *values = host_properties.tokens(spec)
        if operator == '<range-in>':
            specs_matcher.op_methods[operator]('0', *values)
        elif operator[0] in '=!<>' and operator[-1:] != '>' or (
                operator == '>'):
            float(values[0])
    except (pyparsing.ParseException, ValueError, TypeError) as exc:
        return str(exc)
    return None
