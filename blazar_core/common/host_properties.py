# SPDX-License-Identifier: Apache-2.0

"""Expressions over the properties of hosts.

Users of reservations write them as a JSON array in prefix notation::

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

import dataclasses
import functools
import json
import math
import operator
import threading
import typing as ty

from oslo_utils import specs_matcher
import pyparsing

from blazar_core.common import errors
from blazar_core.common import inputs

Value: ty.TypeAlias = str | int | float | bool
Properties: ty.TypeAlias = ty.Mapping[str, Value]

#: Limits of an expression: its nesting, its length in bytes, and the values
#: that it compares with, as it is evaluated for every kind of host. Each
#: comparison has a value, and there are fewer combinations than comparisons.
MAX_DEPTH = 20
MAX_BYTES = 16 * 1024
MAX_VALUES = 50

_EXAMPLE = '["and", [">=", "$vcpus", "8"], ["=", "$hypervisor_type", "QEMU"]]'


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of one property with one or more values."""

    operator: str
    name: str
    values: tuple[Value, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset([self.name])

    @property
    def count(self) -> int:
        return len(self.values)

    def matches(self, properties: Properties) -> bool:
        if self.name not in properties:
            return False
        if self.operator == _SPEC:
            return any(spec_matches(str(properties[self.name]), str(spec))
                       for spec in self.values)
        return any(_COMPARE[self.operator](*_alike(
            properties[self.name], value)) for value in self.values)


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """Two or more expressions, of which all or at least one must match."""

    operator: str
    parts: 'tuple[Expression, ...]'

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names for part in self.parts))

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)

    def matches(self, properties: Properties) -> bool:
        return _COMBINE[self.operator](
            part.matches(properties) for part in self.parts)


Expression: ty.TypeAlias = Comparison | Combination

_COMPARE: dict[str, ty.Callable[[ty.Any, ty.Any], bool]] = {
    '=': operator.eq, '==': operator.eq, '!=': operator.ne,
    '<': operator.lt, '>': operator.gt, '<=': operator.le,
    '>=': operator.ge, 'in': operator.eq,
}
#: Prefix of a property that is compared as extra specs are, and the operator
#: of its comparison.
_SPEC = 'capabilities:'
_COMBINE: dict[str, ty.Callable[[ty.Iterable[bool]], bool]] = {
    'and': all, 'or': any,
}


def parse(text: object) -> Expression | None:
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


def both(one: Expression | None, other: Expression | None,
         ) -> Expression | None:
    """Return the conjunction of two expressions; None matches every host."""
    return Combination('and', (one, other)) if one and other else (
        one or other)


def check(expression: Expression | None, public: ty.Collection[str]) -> None:
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


def matching(expression: Expression | None,
             hosts: ty.Mapping[str, Properties]) -> list[str]:
    """Return the keys of the hosts that match an expression.

    Reads each host once, and evaluates each combination of values once.
    """
    if expression is None:
        return [*hosts]
    names = sorted(expression.names)
    known: dict[tuple[str, ...], bool] = {}
    found = []
    for key, properties in hosts.items():
        # Compare their repr: 1, 1.0 and True are equal, but not alike.
        values = tuple(repr(properties.get(name)) for name in names)
        if values not in known:
            known[values] = expression.matches(properties)
        if known[values]:
            found.append(key)
    return found


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


def _expression(node: object, depth: int) -> Expression:
    if depth > MAX_DEPTH:
        raise errors.InvalidLeaseParams(
            f'The property expression is nested deeper than {MAX_DEPTH} '
            f'levels. Write a flatter one.')
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise errors.InvalidLeaseParams(
            'A property expression is an array that begins with an operator, '
            f'but {_shown(node)} is not. Write for example {_EXAMPLE}.')
    if node[0] in _COMBINE:
        return _combination(node[0], node[1:], depth)
    if node[0] in _COMPARE:
        return _comparison(node[0], node[1:])
    raise errors.InvalidLeaseParams(
        f'"{node[0][:80]}" is not an operator of property expressions. Write '
        f'one of {", ".join([*_COMBINE, *_COMPARE])}.')


def _combination(name: str, parts: list[object], depth: int) -> Expression:
    if not parts:
        raise errors.InvalidLeaseParams(
            f'"{name}" needs one or more expressions. Write for example '
            f'{_EXAMPLE}.')
    found = tuple(_expression(part, depth + 1) for part in parts)
    return found[0] if len(found) == 1 else Combination(name, found)


def _comparison(name: str, operands: list[object]) -> Comparison:
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
    return _spec(name, prop.removeprefix(f'${_SPEC}'), found) if (
        prop.startswith(f'${_SPEC}')) else Comparison(name, prop[1:], found)


def _spec(name: str, prop: str, values: tuple[Value, ...]) -> Comparison:
    if name not in ('=', '==', 'in'):
        raise errors.InvalidLeaseParams(
            f'"{name}" cannot compare "${_SPEC}{prop[:80]}": its value '
            f'contains its own operator. Write ["=", "${_SPEC}gpu", "<in> '
            'A1"].')
    for value in values:
        problem = spec_problem(str(value))
        if problem is not None:
            raise errors.InvalidLeaseParams(
                f'{_shown(value)} cannot be compared with '
                f'"${_SPEC}{prop[:80]}" ({problem[:80]}). Write for example '
                '">= 8", "s== A100" or "<or> A100 <or> H100".')
    return Comparison(_SPEC, prop, tuple(map(str, values)))


def _value(value: object) -> Value:
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


def _alike(left: Value, right: Value) -> tuple[ty.Any, ty.Any]:
    """Return both values as numbers if both are, otherwise both as text."""
    numbers = _number(left), _number(right)
    if None not in numbers:
        return numbers
    return str(left), str(right)


def _number(value: Value) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    for convert in (int, float):
        try:
            number = convert(value)
        except ValueError:
            continue
        return None if number != number else number
    return None


_local = threading.local()


def spec_problem(spec: str) -> str | None:
    """Return why a text is not a valid spec, or None."""
    try:
        operator, *values = _tokens(spec)
        if operator == '<range-in>':
            specs_matcher.op_methods[operator]('0', *values)
        elif operator[0] in '=!<>' and operator[-1:] != '>' or (
                operator == '>'):
            float(values[0])
    except (pyparsing.ParseException, ValueError, TypeError) as exc:
        return str(exc)
    return None


def spec_matches(value: str, spec: str) -> bool:
    """Return whether a value matches a spec; a value that cannot be compared
    does not.
    """
    operator, *values = _tokens(spec)
    try:
        return bool(specs_matcher.op_methods[operator](value, *values))
    except (ValueError, TypeError, SyntaxError):
        return False


@functools.lru_cache(1000)
def _tokens(spec: str) -> tuple[str, ...]:
    """Return the operator of a spec and its operands.

    :raises ParseException: if the spec is invalid
    """
    # A grammar is not thread-safe, and expensive to create.
    if not hasattr(_local, 'grammar'):
        _local.grammar = specs_matcher.make_grammar()
    tokens = tuple(map(str, _local.grammar.parse_string(spec)))
    return tokens if tokens[0] in specs_matcher.op_methods else (
        's==', spec)
