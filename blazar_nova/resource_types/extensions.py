# SPDX-License-Identifier: Apache-2.0

"""What is installed: resource types, end policies and other plugins.

Each is an entry point, so that operators can add others.
"""

import functools
from importlib import metadata
import typing as ty

import stevedore

from blazar_core.common import errors
from blazar_core.common import words
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types

T = ty.TypeVar('T')

#: The entry points of resource types.
_TYPES = 'blazar_nova.resource_types'
#: Length of the columns in which the names are stored.
_LONGEST = 64


@functools.cache
def installed_types() -> dict[str, resource_types.ResourceType]:
    """Return the resource types of this installation by name.

    :raises ConfigurationError: if there are none, or one cannot be loaded
    """
    return load(_TYPES, resource_types.ResourceType)


def check_type(name: str) -> str:
    """Return a resource type by which a list is filtered. Loads none of them.

    :raises InvalidLeaseParams: if it is not installed
    """
    known = {*metadata.entry_points(group=_TYPES).names}
    if name not in known:
        raise errors.InvalidLeaseParams(
            f'"{words.shown(name)}" is no resource type. Write one of '
            f'{", ".join(sorted(known))}.')
    return name


@functools.cache
def installed_policies() -> end_policies.Policies:
    """Return the end policies of this installation by name.

    :raises ConfigurationError: if there are none, or one cannot be loaded
    """
    return load('blazar_nova.end_policies', end_policies.EndPolicy,
                end_policies.DELETE)


def keeps(on_end: str) -> bool:
    """Return whether an end policy keeps servers, or images of them."""
    its = installed_policies()
    return any(its[name].keeps for name in on_end.split(',') if name in its)


def load(group: str, base: ty.Callable[..., T], required: str = '',
         ) -> dict[str, T]:
    """Return an object of each class of a group of entry points, by name.

    :param base: the base class that is required
    :param required: the name of an entry point that is required
    :raises ConfigurationError: if one is missing, cannot be loaded, has
        another base class, or the same name as another
    """
    found: stevedore.ExtensionManager[ty.Any] = stevedore.ExtensionManager(
        group, on_load_failure_callback=_fail)
    loaded: dict[str, T] = {}
    for one in found:
        if one.name in loaded:
            raise errors.ConfigurationError(
                f'There are two entry points {one.name} of {group}: '
                f'{type(loaded[one.name]).__module__} and '
                f'{one.entry_point.value}. Remove one of the packages.')
        if not 0 < len(one.name) <= _LONGEST:
            raise errors.ConfigurationError(
                f'The name of entry point {one.name} of {group} must have '
                f'{_LONGEST} characters at most.')
        try:
            plugin = one.plugin()
        except Exception as exc:
            _fail(found, one.entry_point, exc)
        if not isinstance(plugin, ty.cast(type, base)):
            raise errors.ConfigurationError(
                f'Entry point {one.name} of {group} is '
                f'{one.entry_point.value}, and not a class that derives from '
                f'{base.__module__}.{base.__name__}.')
        loaded[one.name] = ty.cast(T, plugin)
    if not loaded or required and required not in loaded:
        raise errors.ConfigurationError(
            f'There is no entry point {required or "at all"} of {group}: '
            f'install nova-leases again.')
    return loaded


def _fail(_manager: ty.Any, entry_point: ty.Any, exc: BaseException,
          ) -> ty.NoReturn:
    raise errors.ConfigurationError(
        f'{entry_point.name} of the entry points {entry_point.group} cannot '
        f'be loaded: {exc}') from exc
