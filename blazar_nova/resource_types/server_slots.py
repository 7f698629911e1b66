# SPDX-License-Identifier: Apache-2.0

"""virtual:instance and flavor:instance: a number of servers of given amounts,
or like those of a flavor.
"""

import dataclasses
import typing as ty

from oslo_serialization import jsonutils

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.compat import blazar_freepool
from blazar_nova.compat import flavors
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import property_expressions

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
        return dataclasses.replace(
            demand, properties=property_expressions.parse(
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
        property_expressions.parse(wanted)
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


class Instances(ServerSlots):
    """Servers whose amounts of resources are given in the request."""

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'vcpus': '2', 'memory_mb': '4096', 'disk_gb': '20',
        **ServerSlots.common}

    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {
        **ServerSlots.without, 'ephemeral_gb': (0, '0'),
        'swap_mb': (0, '0'), 'extra_specs': ({},)}

    def read(self, values: Values) -> Values:
        asked = {**self._common(values), **self._properties(values)}
        for key, least in (('vcpus', 1), ('memory_mb', 1), ('disk_gb', 0)):
            asked[key] = inputs.integer(
                inputs.needed(values, key), key, least)
        return asked

    def requirements(self, asking: ty.Any, params: Values,
                     ) -> resource_types.Requirements:
        return self._of_flavor(asking, flavors.facts_of(
            params['vcpus'], params['memory_mb'], params['disk_gb']), params)


class FlavorInstances(ServerSlots):
    """Servers with the properties that a flavor has when the lease is created.
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'flavor_id': '"1"', **ServerSlots.common}

    def read(self, values: Values) -> Values:
        flavor_id = inputs.needed(values, 'flavor_id')
        if isinstance(flavor_id, int) and not isinstance(flavor_id, bool):
            # Clients convert a string of digits to a number.
            flavor_id = str(flavor_id)
        if not isinstance(flavor_id, str) or not flavor_id.isprintable() or (
                not 1 <= len(flavor_id) <= 255):
            raise errors.InvalidLeaseParams(
                '"flavor_id" must be the id of a flavor, a string.')
        # Answers show the id of the reserved flavor as flavor_id, as
        # virtual:instance does; the original one is source_flavor_id.
        asked = {**self._common(values), 'source_flavor_id': flavor_id}
        # Reservations of earlier releases have no such key.
        wanted = self._properties(values)
        return asked | (wanted if wanted['resource_properties'] else {})

    def show(self, reservation: ty.Mapping[str, ty.Any]) -> Values:
        flavor = reservation['spec']
        # Without a requirement, clients read the flavor from this key.
        return {**flavors.amounts_shown(flavor),
                'resource_properties': jsonutils.dumps(flavors.shown(
                    reservation['params']['source_flavor_id'], flavor)),
                **super().show(reservation)}

    def as_request(self, params: ty.Mapping[str, ty.Any]) -> Values:
        return {**super().as_request(params),
                'flavor_id': params['source_flavor_id']}

    def requirements(self, asking: ty.Any, params: Values,
                     ) -> resource_types.Requirements:
        return self._of_flavor(asking, flavors.facts_like(
            asking.context, params['source_flavor_id']), params)
