#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""What an operator may add without a change here: entry points."""

import typing as ty

import stevedore

from blazar_core.common import errors

__all__ = ['load']


def load(group: str) -> dict[str, ty.Any]:
    """An object of each class of a group of entry points, by its name.

    :raises ConfigurationError: when there are none, or one cannot be loaded
    """
    found: stevedore.ExtensionManager[ty.Any] = stevedore.ExtensionManager(
        group, on_load_failure_callback=_fail)
    loaded = {one.name: one.plugin() for one in found}
    if not loaded:
        raise errors.ConfigurationError(
            f'There are no entry points {group}: install the package again.')
    return loaded


def _fail(_manager: ty.Any, entry_point: ty.Any, exc: BaseException,
          ) -> None:
    raise errors.ConfigurationError(
        f'{entry_point.name} of the entry points {entry_point.group} cannot '
        f'be loaded: {exc}')
