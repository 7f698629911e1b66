# SPDX-License-Identifier: Apache-2.0

"""What a server group adds to what a build asks for."""

import collections
import dataclasses
import typing as ty

from blazar_core.common import model
from blazar_core.leases import servers
from blazar_nova.compat import demand as demands

__all__ = ['in_group']


def in_group(demand: model.Demand, context: ty.Any, spec: ty.Any,
             new: ty.Collection[str], known: servers.Servers) -> model.Demand:
    """A demand with what the server group of a request adds to it.

    :param new: the servers that come
    """
    group = demands.group_of(context, spec)
    if group is None or group.policy is None:
        return demand
    affinity = model.Affinity(group.policy)
    members = _members(group, set(new), known)
    taken = frozenset(members)
    if affinity is model.Affinity.SAME:
        hosts = demand.hosts
        if taken:
            hosts = taken if hosts is None else hosts & taken
        return dataclasses.replace(
            demand, affinity=affinity, hosts=hosts, ungrouped=demand.hosts)
    if affinity is model.Affinity.DIFFERENT:
        return dataclasses.replace(
            demand, affinity=affinity, per_host=group.per_host,
            # With several to a host, Nova counts those that are there.
            avoid=taken if group.per_host == 1 else frozenset())
    return dataclasses.replace(demand, affinity=affinity, members=members)


def _members(group: demands.Group, new: set[str], known: servers.Servers,
             ) -> collections.Counter[str]:
    """How many of a group are on each host, but for those that come.

    On the host of its booking, and where it runs if that is another.
    """
    booked = known.booked_hosts(set(group.members) - new)
    services = known.hosts_of_services(set(group.running.values()))
    places = set(booked.items()) | {
        (server_id, uuid) for server_id, service_host in
        group.running.items() for uuid, runs in services.items()
        # One that is kept may run yet.
        if runs == service_host and server_id not in new}
    return collections.Counter(uuid for _server_id, uuid in places)
