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

"""What the filter writes on Nova's host states.

Nova makes the host states anew for every request. It hands the same ones to
the filters and then to the weighers, once for each server of the request.
"""

import typing as ty

__all__ = ['is_booked', 'mark_booked']

_BOOKED = 'blazar_booked'


def mark_booked(host_states: ty.Iterable[ty.Any], booked: str | None) -> None:
    """Mark the host that the server in question has its booking on."""
    for host_state in host_states:
        setattr(host_state, _BOOKED, host_state.uuid == booked)


def is_booked(host_state: ty.Any) -> bool:
    """Whether the filter marked this host."""
    return bool(getattr(host_state, _BOOKED, False))
