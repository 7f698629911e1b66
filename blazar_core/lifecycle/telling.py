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

"""What happens to a lease between its start and its end."""

import typing as ty

from blazar_core.common import states
from blazar_core.db import api
from blazar_core.leases import views
from blazar_core.lifecycle import facts
from blazar_core import resources

__all__ = ['Telling']


class Telling:
    """Tells the world, and the types of what is reserved.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database,
                 notify: ty.Callable[[str, facts.Lease], None],
                 types: resources.Types) -> None:
        self._database = database
        self._notify = notify
        self._types = types

    def announce(self, lease_id: str, event_type: str) -> facts.Outcome:
        """An event of a lease has come that neither starts nor ends it."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            described = views.describe(lease)
            parts = self._types.reserved(session, lease)
            names = {one.id: one.resource_type for one in lease.reservations}
        if described['status'] in (*states.ENDING, views.DELETING):
            return None
        for kind, reserved in parts:
            of_type, own, name = event_type.rpartition(':')
            if event_type == states.EventType.BEFORE_END or (
                    own and of_type == names[reserved.id]):
                kind.happens(name, reserved)
        self._notify(f'lease.event.{event_type}', described)
        return None

    def moved(self, lease_id: str) -> facts.Outcome:
        """Something of a lease that has begun has another host."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status not in states.BEGUN or lease.deleted_at:
                return None
            parts = self._types.reserved(session, lease)
        for kind, reserved in parts:
            kind.moved(reserved)
        return None
