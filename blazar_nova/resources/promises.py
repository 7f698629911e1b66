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

"""What was promised, asked of Nova again as of now."""

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.leases import servers
from blazar_core.lifecycle import watch
from blazar_nova.compat import calls
from blazar_nova.compat import demand as demands
from blazar_nova.resources import groups
from blazar_nova.resources import types

__all__ = ['Promises']


class Promises:
    """Says what the servers of a reservation need, and where they may be.

    By the same rules as when the lease was made: what has changed of hosts,
    aggregates, image types and server groups since then counts.
    """

    def __init__(self, known: servers.Servers) -> None:
        self._servers = known

    def demand_of(self, promise: watch.Promise) -> model.Demand:
        """What servers of a reservation need.

        :raises Refused: when no host may be used at all
        """
        try:
            if promise.call is None:
                return types.demand_again(
                    promise.project_id, promise.user_id, promise.flavor,
                    promise.params)
            call = calls.load(promise.call)
            call.reread_group()
            demand = demands.demand_of(
                call.context.elevated(), call.request_spec)
        except demands.NoSuchHost as exc:
            raise errors.Refused(refusals.Refusal(
                refusals.Reason.NO_HOST, 0, 0, None)) from exc
        return groups.in_group(demand, call, self._servers)
