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

"""Who is on a host: whose servers they are, and with which hint they came."""

import typing as ty

from nova import context as nova_context
from nova import objects

from blazar_nova.compat import bounded
from blazar_nova.compat import pool
from blazar_nova.compat import survey

__all__ = ['Occupant', 'on']


class Occupant(ty.NamedTuple):
    """A server on a host, or about to be there.

    :ivar project_id: whose it is; None: Nova does not know it
    :ivar hint: the reservation that its boot has named
    """

    id: str
    project_id: str | None
    hint: str | None

    def is_of(self, reservation_id: str, project_id: str | None) -> bool:
        """Whether it is within a reservation of hosts of a project, on whose
        hosts it is.
        """
        return reservation_id == self.hint or (
            project_id is not None and project_id == self.project_id)


def on(host: pool.Member) -> list[Occupant]:
    """The servers that are on a host, or about to be, by their ids.

    :raises CloudUnavailable: when that cannot be said now
    """
    there = sorted(pool.everybody(host))
    return bounded.of_api(_described, there) if there else []


def _described(server_ids: list[str]) -> list[Occupant]:
    context = nova_context.get_admin_context()
    projects = {one.instance_uuid: one.project_id for one in
                objects.InstanceMappingList.get_by_instance_uuids(
                    context, server_ids)}
    hints = survey.hints_of(server_ids)
    return [Occupant(one, projects.get(one), _hint(hints.get(one, {})))
            for one in server_ids]


def _hint(hints: survey.Hints) -> str | None:
    """Nova keeps each hint as a list."""
    value = hints.get('reservation')
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None
