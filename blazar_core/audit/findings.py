# SPDX-License-Identifier: Apache-2.0

"""Differences between what is recorded and what should be, as sentences."""

import dataclasses
import typing as ty

from blazar_core.common import clocks

__all__ = ['Difference', 'LISTENER', 'Mend', 'STUCK', 'named', 'when']

#: Seconds after which what goes on by itself should have.
STUCK = 300

#: What an operator is told when no worker does it.
LISTENER = (
    'blazar-listener does it; check that one is running, and read its log')

Mend: ty.TypeAlias = ty.Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it should be.

    :param key: two looks have found the same when this is the same
    :param text: what it is, in words
    :param remedy: what ``mend`` would do, or what is left to the operator
    :param mend: makes it right; harmless when it is right by then
    :param mend_after: the time before which it may still be under way
    """

    key: tuple[ty.Hashable, ...]
    text: str = dataclasses.field(compare=False)
    remedy: str = dataclasses.field(compare=False)
    mend: Mend | None = dataclasses.field(default=None, compare=False)
    mend_after: int = dataclasses.field(default=0, compare=False)


def named(lease_id: str, name: str) -> str:
    """A lease, as all lines name it."""
    return f'Lease {lease_id} ({name})'


def when(seconds: int) -> str:
    """A time, as all lines show it."""
    return f'{clocks.minute(seconds)} UTC'
