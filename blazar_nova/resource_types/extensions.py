# SPDX-License-Identifier: Apache-2.0

"""What an operator may add without a change here: entry points."""

import typing as ty

import stevedore

from blazar_core.common import errors

__all__ = ['load']

T = ty.TypeVar('T')

#: What the columns hold in which the names are kept.
_LONGEST = 64


def load(group: str, base: ty.Callable[..., T], required: str = '',
         ) -> dict[str, T]:
    """An object of each class of a group of entry points, by its name.

    :param base: the class that each of them derives from
    :param required: the name of one that has to be there
    :raises ConfigurationError: when one is missing, cannot be loaded, is
        something else, or has the name of another
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
