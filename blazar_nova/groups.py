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

"""What a server group adds to what a build asks for."""

import dataclasses

from blazar_core import leases
from blazar_core import model
from blazar_nova.compat import calls
from blazar_nova.compat import demand as demands

__all__ = ['in_group']

_AFFINITY = {'affinity': model.Affinity.SAME,
             'anti-affinity': model.Affinity.DIFFERENT}


def in_group(demand: model.Demand, call: calls.BuildCall,
             booked: leases.Leases) -> model.Demand:
    """A demand with what the server group of the boot adds to it."""
    group = demands.group_of(call.request_spec[0])
    if group is None or group[0] not in _AFFINITY:
        return demand
    policy, per_host, members, service_hosts = group
    others = set(members) - set(call.server_ids)
    taken = frozenset(booked.booked_hosts(others) |
                      booked.hosts_of_services(service_hosts))
    affinity = _AFFINITY[policy]
    if affinity is model.Affinity.SAME:
        hosts = demand.hosts
        if taken:
            hosts = taken if hosts is None else hosts & taken
        return dataclasses.replace(demand, affinity=affinity, hosts=hosts)
    return dataclasses.replace(
        demand, affinity=affinity, per_host=per_host,
        # With several to a host, Nova counts those that are there.
        avoid=taken if per_host == 1 else frozenset())
