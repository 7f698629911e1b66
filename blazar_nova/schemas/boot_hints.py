# SPDX-License-Identifier: Apache-2.0

"""Scheduler hints of a boot: whether they request a lease, and are valid."""

import collections.abc
import difflib
import typing as ty

from oslo_utils import strutils

from blazar_core.common import errors
from blazar_core.common import words
from blazar_nova.resource_types import inputs

RESERVED = 'reserved'
LEASE_PARAMS = 'lease_params'
INTERRUPTIBLE, SAFE_FOR, ON_EVICT = 'interruptible', 'safe_for', 'on_evict'
RESUME = 'resume'
SERVICE_PREFIX = 'blazar'

#: The hints for users, each with an example of its value.
HINTS = {RESERVED: 'True',
         LEASE_PARAMS: '\'{"start": "now", "duration": "2h"}\'',
         'reservation': 'ID', INTERRUPTIBLE: 'True', SAFE_FOR: '4h',
         ON_EVICT: 'shelve', RESUME: 'auto'}
#: Similarity above which an unknown hint counts as a typing error
#: (:meth:`difflib.SequenceMatcher.ratio`): one letter in eight.
_NEAR = 0.85


def ask_for_lease(hints: collections.abc.Mapping[str, object],
                  others: ty.Collection[str]) -> bool:
    """Return whether a boot with these hints is for servers with a lease.

    :param hints: as in the body of the request
    :param others: hints with another meaning in this cloud, even if similar
    :raises InvalidLeaseParams: if a hint is invalid
    """
    _refuse_service_hints(hints)
    _refuse_near_misses(hints, others)
    if not _is_reserved(hints):
        return False
    _refuse_unreadable_hints(hints)
    return True


def _refuse_service_hints(
        hints: collections.abc.Mapping[str, object]) -> None:
    for name in hints:
        if name.lower().startswith(SERVICE_PREFIX):
            raise errors.InvalidLeaseParams(
                f'Only the service may set the hint "{words.shown(name)}", '
                'like all that begin with "blazar". Leave it out; to request '
                'a lease, use --hint reserved=True.')


def _refuse_near_misses(hints: collections.abc.Mapping[str, object],
                        others: ty.Collection[str]) -> None:
    """Refuse names that are similar to a hint of ours: the server would get
    no lease, and run without an end.
    """
    for name in hints:
        near = difflib.get_close_matches(
            name.lower().replace('-', '_'), HINTS, 1, _NEAR)
        if near and name not in HINTS and name not in others:
            raise errors.InvalidLeaseParams(
                f'The hint "{words.shown(name)}" is nearly "{near[0]}", and '
                f'not the same. Write --hint {near[0]}={HINTS[near[0]]}, or '
                f'leave it out for a server without a lease.')


def _refuse_unreadable_hints(
        hints: collections.abc.Mapping[str, object]) -> None:
    """Refuse values that Nova accepts but cannot store.

    Hints that have a parser of their own are not checked.
    """
    for name, value in hints.items():
        if name not in (LEASE_PARAMS, 'reservation') and not all(
                isinstance(one, str | int | float) for one in (
                value if isinstance(value, list) else [value])):
            raise errors.InvalidLeaseParams(
                f'The hint "{words.shown(name)}" is {inputs.kind_of(value)}. '
                f'Write a string, or leave it out.')


def _is_reserved(hints: collections.abc.Mapping[str, object]) -> bool:
    if RESERVED in hints:
        return boolean(scalar(hints[RESERVED]), RESERVED)
    if LEASE_PARAMS in hints:
        raise errors.InvalidLeaseParams(
            'The hint lease_params is given without the hint reserved. Add '
            '--hint reserved=True, or leave lease_params out.')
    return False


def scalar(value: object) -> object:
    """Unwrap the list of one element that some clients make of each hint."""
    if isinstance(value, list) and len(value) == 1:
        return ty.cast(object, value[0])
    return value


def boolean(value: object, name: str) -> bool:
    """Return the value of a hint that is true or false.

    :param name: of the hint
    :raises InvalidLeaseParams: if the value is neither
    """
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    try:
        if isinstance(value, str):
            return bool(strutils.bool_from_string(value, strict=True))
    except ValueError:
        pass
    given = (f'"{words.shown(value)}"' if isinstance(value, str)
             else inputs.kind_of(value))
    what = 'with a lease' if name == RESERVED else 'that may be evicted'
    raise errors.InvalidLeaseParams(
        f'The hint {name} is {given}, which is neither true nor false. '
        f'Write --hint {name}=True for a server {what}, once, or leave '
        'it out.')
