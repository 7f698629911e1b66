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

"""What the filter writes on Nova's request.

Nova hands the same RequestSpec to the filters and then to the weighers, once
for each server of the request; between two of them the filter writes anew.
"""

import typing as ty

__all__ = ['is_booked', 'mark_booked']

_BOOKED = '_blazar_booked'


def mark_booked(spec: ty.Any, booked: str | None) -> None:
    """Note the host that the server in question has its booking on.

    :param booked: its uuid
    """
    setattr(spec, _BOOKED, booked)


def is_booked(spec: ty.Any, host_state: ty.Any) -> bool:
    """Whether that is this host."""
    return bool(getattr(spec, _BOOKED, None) == host_state.uuid)
