# SPDX-License-Identifier: Apache-2.0

"""Parsing of interruptible servers' parameters, in hints or a body."""

import collections.abc
import typing as ty

from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.lifecycle import eviction
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import boot_hints
from blazar_nova.schemas import dates

#: The extra spec of flavors whose servers are interruptible.
EXTRA_SPEC = 'blazar:interruptible'
#: The hints that are read here.
ARE = frozenset({boot_hints.INTERRUPTIBLE, boot_hints.SAFE_FOR,
                 boot_hints.ON_EVICT, boot_hints.RESUME})
#: The values of resume: whether a server is unshelved after its eviction.
_RESUMES = {'auto': True, 'manual': False}
#: Maximum of safe_for in seconds: a year.
_LONGEST = 31_536_000
_SHELVE = 'shelve'


class InterruptibleParams(ty.NamedTuple):
    """How a server may be interrupted.

    :ivar on_evict: the first action to evict it
    :ivar safe_for: seconds for which it is safe on the host that it gets
    :ivar resume: whether it is unshelved when there is capacity again
    """

    on_evict: str
    safe_for: int = 0
    resume: bool = False


def of_hints(hints: collections.abc.Mapping[str, object],
             actions: ty.Sequence[str],
             by_flavor: bool = False) -> InterruptibleParams | None:
    """Return what the hints of a boot request; None: the server is not to be
    interruptible.

    :param actions: the available eviction actions; the first but a migration
        is the default
    :param by_flavor: whether the flavor makes the server interruptible
    :raises InvalidLeaseParams: if a hint is invalid
    """
    asked = by_flavor
    if boot_hints.INTERRUPTIBLE in hints:
        asked = boot_hints.boolean(boot_hints.scalar(
            hints[boot_hints.INTERRUPTIBLE]), boot_hints.INTERRUPTIBLE)
        if by_flavor and not asked:
            raise errors.InvalidLeaseParams(
                'The servers of this flavor are interruptible. Leave the hint '
                'interruptible out, or choose another flavor.')
    others = [name for name in (
        boot_hints.SAFE_FOR, boot_hints.ON_EVICT, boot_hints.RESUME)
        if name in hints]
    if not asked:
        if others and boot_hints.INTERRUPTIBLE not in hints:
            raise errors.InvalidLeaseParams(
                f'The hint {others[0]} is for interruptible servers. Add '
                f'--hint interruptible=True, or leave {others[0]} out.')
        return None
    return _params(
        boot_hints.scalar(hints.get(boot_hints.ON_EVICT, _default(actions))),
        boot_hints.scalar(hints.get(boot_hints.RESUME, resume_of(False))),
        actions, dates.length(
            boot_hints.scalar(hints.get(boot_hints.SAFE_FOR, 0)),
            boot_hints.SAFE_FOR, 0, _LONGEST))


def check(hints: collections.abc.Mapping[str, object],
          actions: ty.Sequence[str]) -> None:
    """Check the hints before it is known whether the flavor makes the servers
    interruptible.

    :raises InvalidLeaseParams: see :func:`of_hints`
    """
    if ARE.intersection(hints):
        of_hints(hints, actions, boot_hints.INTERRUPTIBLE not in hints)


def check_actions(actions: ty.Sequence[str]) -> None:
    """Check that there is an eviction action.

    :raises ConfigurationError: if there is none
    """
    if not _choices(actions):
        raise errors.ConfigurationError(
            '[blazar] eviction_actions has neither shelve nor delete. Add one '
            'of them, as not every server can be migrated, or leave it out.')


def of_flavor(flavor: ty.Any) -> bool:
    """Return whether the servers of a flavor are interruptible."""
    value = (flavor.extra_specs or {}).get(EXTRA_SPEC)
    return value is not None and str(value).strip().lower() in (
        'true', '1', 'yes')


def of_body(body: object, actions: ty.Sequence[str]) -> InterruptibleParams:
    """Return the parameters in a request that makes a server interruptible.

    :raises InvalidLeaseParams: if the body is invalid
    """
    values = inputs.json_object(body, 'The body of the request')
    inputs.check_keys(values, {'on_evict': '"shelve"', 'resume': '"auto"'},
                      'an interruptible server')
    return _params(values.get('on_evict', _default(actions)),
                   values.get('resume', resume_of(False)), actions)


def resume_of(value: bool) -> str:
    """Return by which word a server is unshelved after its eviction."""
    return next(word for word, says in _RESUMES.items() if says is value)


def _params(on_evict: object, resume: object, actions: ty.Sequence[str],
            safe_for: int = 0) -> InterruptibleParams:
    first = _on_evict(on_evict, actions)
    if not isinstance(resume, str) or resume not in _RESUMES:
        raise errors.InvalidLeaseParams(
            f'resume is {_given(resume)}. Write auto for a server that is '
            'unshelved when there is capacity again, or manual.')
    if _RESUMES[resume] and _SHELVE not in eviction.actions_of(
            first, actions):
        raise errors.InvalidLeaseParams(
            'resume=auto is for servers that are shelved when they are '
            f'evicted. Leave it out{_or_choose(actions)}.')
    return InterruptibleParams(first, safe_for, _RESUMES[resume])


def _or_choose(actions: ty.Sequence[str]) -> str:
    return f', or write on_evict={_SHELVE}' if _SHELVE in actions else ''


def _on_evict(value: object, actions: ty.Sequence[str]) -> str:
    if value not in _choices(actions):
        raise errors.InvalidLeaseParams(
            f'on_evict is {_given(value)}. Write what is done first when the '
            f'server is evicted: {" or ".join(_choices(actions))}.')
    return value


def _choices(actions: ty.Sequence[str]) -> list[str]:
    """Return what users may choose."""
    return [one for one in actions if one != eviction.MIGRATE]


def _default(actions: ty.Sequence[str]) -> str:
    return _choices(actions)[0]


def _given(value: object) -> str:
    return f'"{words.shown(value)}"' if isinstance(value, str) else (
        inputs.kind_of(value))
