# SPDX-License-Identifier: Apache-2.0

"""Differences between the recorded and the expected state, as sentences."""

import dataclasses
import typing as ty

from blazar_core.common import clocks

#: Seconds after which a pending action should have been completed.
STUCK = 300

#: Remedy of a difference that a running worker would fix.
LISTENER = (
    'blazar-listener does it; check that one is running, and read its log')

Fix: ty.TypeAlias = ty.Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """An inconsistency.

    :param key: equal keys of two audits mean the same difference
    :param text: its description
    :param remedy: what ``fix`` does, or what the operator can do
    :param fix: fixes it; does nothing if it no longer exists
    :param fix_after: the time before which it may still be in progress
    """

    key: tuple[ty.Hashable, ...]
    text: str = dataclasses.field(compare=False)
    remedy: str = dataclasses.field(compare=False)
    fix: Fix | None = dataclasses.field(default=None, compare=False)
    fix_after: int = dataclasses.field(default=0, compare=False)


def named(lease_id: str, name: str) -> str:
    """Return the name of a lease for a line of the report."""
    return f'Lease {lease_id} ({name})'


def when(seconds: int) -> str:
    """Return a time for a line of the report."""
    return f'{clocks.minute(seconds)} UTC'
