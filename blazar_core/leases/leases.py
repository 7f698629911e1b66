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

"""Leases: the parts that make, change and find them, put together."""

from blazar_core.books import admission as admissions
from blazar_core.common import clock as clocks
from blazar_core.db import api
from blazar_core.leases import binding
from blazar_core.leases import changing
from blazar_core.leases import credentials
from blazar_core.leases import joining
from blazar_core.leases import making
from blazar_core.leases import owning
from blazar_core.leases import places
from blazar_core.leases import recurring
from blazar_core.leases import servers
from blazar_core import resources

__all__ = ['Leases']


class Leases:
    """The leases in the books."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, types: resources.Types,
                 ) -> None:
        self.making = making.Making(database, clock, admission, types)
        self.changing = changing.Changing(database, clock, admission, types)
        self.binding = binding.Binding(database, clock, types)
        self.joining = joining.Joining(database, clock, types)
        self.owning = owning.Owning(database, clock, types)
        self.recurring = recurring.Recurring(
            database, clock, admission, self.making)
        self.places = places.Places(database, clock)
        self.credentials = credentials.Credentials(database, clock)
        self.servers = servers.Servers(database)
