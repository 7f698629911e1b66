# SPDX-License-Identifier: Apache-2.0

"""Servers of a boot as a resource type."""

import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import lookup
from blazar_core.leases import requests
from blazar_core.plugins import resource_types
from blazar_nova.compat import accelerators
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.compat import host_filters
from blazar_nova.compat import hostnames
from blazar_nova.compat import pool
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import server_groups


class BootedServers(resource_types.BaseResourceType):
    """The resource type of a boot, whose request is the stored build call.

    No request names it. Its start and end are those of all servers of leases:
    the build and the deletion.
    """

    for_servers = True

    def __init__(self, known: lookup.Lookup) -> None:
        self._known = known

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        """Return the demand by the current hosts, aggregates, image types and
        server groups, with the rules that applied when the lease was created.
        """
        with server_demand.refused(0, f'Lease {reserved.lease_id}'):
            if reserved.call is None:
                # All servers are alike, and Nova has their request specs.
                spec, context = server_demand.spec_of(reserved.kept)
                return _demand_of(context, context, [spec], reserved.kept,
                                  self._known, reserved.window)
            call = build_calls.load(reserved.call)
            call.reread_group()
            return demand_of(call.context.elevated(), call, self._known,
                             reserved.window)

    def check_window(self,
                     reserved: resource_types.ReservationContext) -> None:
        if reserved.servers and reserved.window is not None:
            server_groups.check_apart(reserved.servers, reserved.hosts,
                                      reserved.window, self._known)


class BootDemands:
    """Demands of boots that are being admitted.

    :param expects_changes: returns whether hosts that cannot be used now may
        be usable at a time
    """

    def __init__(self, known: lookup.Lookup,
                 expects_changes: ty.Callable[[int], bool]) -> None:
        self._known = known
        self._expects_changes = expects_changes

    def of(self, call: build_calls.BuildCall, window: model.Window | None,
           start: int) -> model.Demand:
        """Return the demand of the servers of a boot, like :func:`demand_of`.

        :param start: when their lease starts
        :raises Refused: if Nova's own rules leave no host
        """
        with server_demand.refused(len(call.request_spec),
                                   f'Boot of {", ".join(call.server_ids)}'):
            return demand_of(call.context, call, self._known, window,
                             self._expects_changes(start))


def demand_of(context: ty.Any, call: build_calls.BuildCall,
              known: lookup.Lookup, window: model.Window | None,
              later: bool = False) -> model.Demand:
    """Return the demand of the servers of a boot.

    In a reservation of whole hosts they need no other resources; which of the
    hosts they get is decided when they are built.

    :param window: of the servers; None: unknown
    :param later: see :func:`server_demand.demand_of`
    :raises NoSuchHost: if Nova's own rules leave no host
    :raises CloudUnavailable: if placement does not answer
    """
    return _demand_of(context, call.context, call.request_spec,
                      call.server_ids, known, window, later)


def unreserved(call: build_calls.BuildCall, demand: model.Demand,
               request: requests.LeaseRequest) -> tuple[str, ...]:
    """Return what servers of a boot need and no lease reserves, as messages.

    :raises Conflict: if they must be built now, and no host has it
    :raises InvalidLeaseParams: if leases of these servers are refused
    """
    accelerators.require_counted(call.request_spec[0])
    found, has_some = host_filters.notes(
        call.context, call.request_spec[0], demand.hosts or ())
    if request.starts_now:
        hostnames.check(call)
        if not has_some and request.patience is None:
            raise errors.Conflict(
                ' '.join(found), errors.ConflictReason.NO_CAPACITY)
    return tuple(found)


def _demand_of(context: ty.Any, owner: ty.Any, specs: ty.Sequence[ty.Any],
               server_ids: ty.Collection[str], known: lookup.Lookup,
               window: model.Window | None, later: bool = False,
               ) -> model.Demand:
    within = bound_servers.host_reservation_of(specs[0].flavor)
    if within is not None:
        return model.Demand({}, len(specs), among=None,
                            hosts=known.hosts_within(within))
    return server_groups.in_group(
        server_demand.demand_of(
            context, specs, pool=pool.lends(len(specs)), later=later),
        owner, specs[0], server_ids, known, window)
