# SPDX-License-Identifier: Apache-2.0

"""Base of the resource types for servers."""

import dataclasses
import typing as ty

from blazar_core.common import host_properties
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.compat import blazar_freepool
from blazar_nova.compat import flavors
from blazar_nova.compat import server_demand

__all__ = ['BEFORE_END', 'ServerSlots']

Values: ty.TypeAlias = resource_types.Values

#: Values of ``before_end`` that clients of Blazar send. A notification before
#: the end is sent in any case; images are created of all servers of the lease.
BEFORE_END = ('', 'default', 'email', 'snapshot')


class ServerSlots(resource_types.ResourceType):
    """A number of servers of one flavor that exists during the lease only.

    The reservation stores that flavor, so that later changes of the flavor
    that it was made from do not matter.
    """

    for_servers = True
    #: Parameters of all these types, with examples.
    common: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '2', 'affinity': 'None',
        'resource_properties': '"[\\">=\\", \\"$vcpus\\", \\"8\\"]"'}

    #: Actions before the end are parameters of the lease.
    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {
        'before_end': BEFORE_END,
        'hypervisor_properties': ('', '[]', [])}

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        with server_demand.refused(0, f'Lease {reserved.lease_id}'):
            return self._demand_of(
                flavors.context_of(reserved.project_id, reserved.user_id),
                reserved.spec, reserved.params)

    def _demand_of(self, context: ty.Any, flavor: ty.Mapping[str, ty.Any],
                   params: ty.Mapping[str, ty.Any],
                   placement: server_demand.Placement | None = None,
                   later: bool = False) -> model.Demand:
        demand = flavors.demand_of(
            context, flavor, params.get('amount', 1), params.get('affinity'),
            placement, later)
        return dataclasses.replace(demand, properties=host_properties.parse(
            params.get('resource_properties', '')))

    def start(self, reserved: resource_types.ReservationContext) -> None:
        blazar_freepool.ensured()
        flavors.open_reservation(reserved)

    def transferred(self, reserved: resource_types.ReservationContext) -> None:
        flavors.give_reservation(reserved)

    def end(self, reserved: resource_types.ReservationContext) -> None:
        flavors.close_reservation(reserved.id)

    def open_reservations(self) -> ty.Collection[str]:
        return flavors.reservations_open()

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        params, its_id = reservation['params'], reservation['id']
        affine = params.get('affinity') is not None
        # None is needed; clients expect the number of one until the end.
        is_over = reservation['status'] == states.Reservation.DELETED
        return {**params, 'flavor_id': its_id,
                'server_group_id': its_id if affine else None,
                'aggregate_id': None if is_over else blazar_freepool.number()}

    def _common(self, values: Values) -> Values:
        """Return the parameters of all these types."""
        return {
            'amount': inputs.integer(values.get('amount', 1), 'amount', 1),
            'affinity': inputs.affinity_of(values.get('affinity'))}

    def _properties(self, values: Values) -> Values:
        """Return the requirements of hosts' properties as they were written.
        """
        wanted = values.get('resource_properties', '')
        host_properties.parse(wanted)
        return {'resource_properties': wanted}

    def _of_flavor(self, asking: ty.Any, flavor: Values, params: Values,
                   ) -> resource_types.Requirements:
        with server_demand.refused(
                params['amount'], f'A lease of project {asking.project_id}'):
            demand = self._demand_of(
                asking.context, flavor, params, asking.placement,
                asking.later)
            return resource_types.Requirements(
                demand, flavor, flavors.unreserved(
                    asking.context, flavor, demand.hosts or ()))
