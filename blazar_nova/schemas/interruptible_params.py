# SPDX-License-Identifier: Apache-2.0

"""What a user says of an interruptible server: in hints, or in a body."""

import collections.abc
import typing as ty

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_nova.schemas import boot_hints
from blazar_nova.schemas import dates

__all__ = ['ARE', 'EXTRA_SPEC', 'InterruptibleParams', 'check',
           'check_actions', 'of_body', 'of_flavor', 'of_hints']

#: The extra spec of flavors whose servers are interruptible.
EXTRA_SPEC = 'blazar:interruptible'
#: The hints that are read here.
ARE = frozenset({boot_hints.INTERRUPTIBLE, boot_hints.SAFE_FOR,
                 boot_hints.ON_EVICT})
#: Seconds; a year.
_LONGEST = 31_536_000


class InterruptibleParams(ty.NamedTuple):
    """How a server may be interrupted.

    :ivar on_evict: what is done first to evict it
    :ivar safe_for: seconds for which it is safe where it is placed
    """

    on_evict: str
    safe_for: int = 0


def of_hints(hints: collections.abc.Mapping[str, object],
             actions: ty.Sequence[str],
             by_flavor: bool = False) -> InterruptibleParams | None:
    """Return what the hints of a boot say; None: the server is not to be
    interruptible.

    :param actions: what may be done to evict a server; the first is the
        default
    :param by_flavor: whether its flavor makes it interruptible
    :raises InvalidLeaseParams: when they are not what they seem
    """
    asked = by_flavor
    if boot_hints.INTERRUPTIBLE in hints:
        asked = boot_hints.boolean(boot_hints.scalar(
            hints[boot_hints.INTERRUPTIBLE]), boot_hints.INTERRUPTIBLE)
        if by_flavor and not asked:
            raise errors.InvalidLeaseParams(
                'The servers of this flavor are interruptible. Leave the hint '
                'interruptible out, or choose another flavor.')
    others = [name for name in (boot_hints.SAFE_FOR, boot_hints.ON_EVICT)
              if name in hints]
    if not asked:
        if others and boot_hints.INTERRUPTIBLE not in hints:
            raise errors.InvalidLeaseParams(
                f'The hint {others[0]} is for interruptible servers. Add '
                f'--hint interruptible=True, or leave {others[0]} out.')
        return None
    return InterruptibleParams(
        _on_evict(boot_hints.scalar(hints.get(
            boot_hints.ON_EVICT, actions[0])), actions),
        dates.length(boot_hints.scalar(hints.get(boot_hints.SAFE_FOR, 0)),
                     boot_hints.SAFE_FOR, 0, _LONGEST))


def check(hints: collections.abc.Mapping[str, object],
          actions: ty.Sequence[str]) -> None:
    """Check hints before it is known whether the flavor of the servers makes
    them interruptible.

    :raises InvalidLeaseParams: see :func:`of_hints`
    """
    if ARE.intersection(hints):
        of_hints(hints, actions, boot_hints.INTERRUPTIBLE not in hints)


def check_actions(actions: ty.Sequence[str]) -> None:
    """Make sure that there is something by which servers are evicted.

    :raises ConfigurationError: when there is not
    """
    if not actions:
        raise errors.ConfigurationError(
            '[blazar] eviction_actions is empty. Write shelve,delete or one '
            'of them, or leave it out.')


def of_flavor(flavor: ty.Any) -> bool:
    """Whether the servers of a flavor are interruptible."""
    value = (flavor.extra_specs or {}).get(EXTRA_SPEC)
    return value is not None and str(value).strip().lower() in (
        'true', '1', 'yes')


def of_body(body: object, actions: ty.Sequence[str]) -> InterruptibleParams:
    """Return what a request says that makes a running server interruptible.

    :raises InvalidLeaseParams: when it cannot be understood
    """
    values = inputs.json_object(body, 'The body of the request')
    inputs.check_keys(values, {'on_evict': '"shelve"'},
                      'an interruptible server')
    return InterruptibleParams(
        _on_evict(values.get('on_evict', actions[0]), actions))


def _on_evict(value: object, actions: ty.Sequence[str]) -> str:
    if value not in actions:
        given = (f'"{inputs.shown(value)}"' if isinstance(value, str)
                 else inputs.kind_of(value))
        raise errors.InvalidLeaseParams(
            f'on_evict is {given}. Write what is done first when the server '
            f'is evicted: {" or ".join(actions)}.')
    return ty.cast(str, value)
