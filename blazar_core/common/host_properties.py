# SPDX-License-Identifier: Apache-2.0

"""Expressions over the properties of hosts.

If both sides of a comparison are numbers, they are compared as numbers,
otherwise as text: ``"9"`` is less than ``"10"``, and ``"node9"`` is not less
than ``"node10"``. A host without the property matches no comparison with it.
For how users write expressions see
:mod:`blazar_nova.resource_types.property_expressions`.
"""

import dataclasses
import functools
import operator
import threading
import typing as ty

from oslo_utils import specs_matcher

Value: ty.TypeAlias = str | int | float | bool
Properties: ty.TypeAlias = ty.Mapping[str, Value]


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
        if self.operator == SPEC:
            return any(_spec_matches(str(properties[self.name]), str(spec))
                       for spec in self.values)
        return any(COMPARE[self.operator](*_alike(
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
        return COMBINE[self.operator](
            part.matches(properties) for part in self.parts)


Expression: ty.TypeAlias = Comparison | Combination

#: How the operators of comparisons compare.
COMPARE: dict[str, ty.Callable[[ty.Any, ty.Any], bool]] = {
    '=': operator.eq, '==': operator.eq, '!=': operator.ne,
    '<': operator.lt, '>': operator.gt, '<=': operator.le,
    '>=': operator.ge, 'in': operator.eq,
}
#: Prefix of a property that is compared as extra specs are, and the operator
#: of its comparison.
SPEC = 'capabilities:'
#: How combinations combine.
COMBINE: dict[str, ty.Callable[[ty.Iterable[bool]], bool]] = {
    'and': all, 'or': any,
}


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


def _spec_matches(value: str, spec: str) -> bool:
    """Return whether a value matches a spec; a value that cannot be compared
    does not.
    """
    operator, *values = tokens(spec)
    try:
        return bool(specs_matcher.op_methods[operator](value, *values))
    except (ValueError, TypeError, SyntaxError):
        return False


@functools.lru_cache(1000)
def tokens(spec: str) -> tuple[str, ...]:
    """Return the operator of a spec and its operands.

    :raises ParseException: if the spec is invalid
    """
    # A grammar is not thread-safe, and expensive to create.
    if not hasattr(_local, 'grammar'):
        _local.grammar = specs_matcher.make_grammar()
    found = tuple(map(str, _local.grammar.parse_string(spec)))
    return found if found[0] in specs_matcher.op_methods else (
        's==', spec)
