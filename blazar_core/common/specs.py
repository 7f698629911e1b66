# SPDX-License-Identifier: Apache-2.0

"""Values of hosts that are compared as in the extra specs of flavors.

``>= 8``, ``s== A100``, ``<in> A1``, ``<or> A100 <or> H100``, ``<all-in> aes``,
``<range-in> [ 1 4 ]``; without an operator, equal as text. As in extra specs,
``=`` means at least.
"""

import functools
import threading

from oslo_utils import specs_matcher
import pyparsing

__all__ = ['matches', 'problem']

_local = threading.local()


def problem(spec: str) -> str | None:
    """Why a text is no such spec; None: it is one."""
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


def matches(value: str, spec: str) -> bool:
    """Whether a value is like that; one that cannot be compared is not."""
    operator, *values = _tokens(spec)
    try:
        return bool(specs_matcher.op_methods[operator](value, *values))
    except (ValueError, TypeError, SyntaxError):
        return False


@functools.lru_cache(1000)
def _tokens(spec: str) -> tuple[str, ...]:
    """The name of an operator, and what it compares with.

    :raises ParseException: when it is none
    """
    # A grammar is for one thread, and takes a while to make.
    if not hasattr(_local, 'grammar'):
        _local.grammar = specs_matcher.make_grammar()
    tokens = tuple(map(str, _local.grammar.parse_string(spec)))
    return tokens if tokens[0] in specs_matcher.op_methods else (
        's==', spec)
