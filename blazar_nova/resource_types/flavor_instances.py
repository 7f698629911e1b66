# SPDX-License-Identifier: Apache-2.0

"""flavor:instance: a number of servers like those of a flavor."""

import typing as ty

from oslo_serialization import jsonutils

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.plugins import resource_types
from blazar_nova.compat import flavors
from blazar_nova.resource_types import server_slots

__all__ = ['FlavorInstances']


class FlavorInstances(server_slots.ServerSlots):
    """Servers with the properties that a flavor has when the lease is created.
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'flavor_id': '"1"', **server_slots.ServerSlots.common}

    def read(self, values: resource_types.Values) -> resource_types.Values:
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

    def show(self, reservation: ty.Mapping[str,
                                           ty.Any]) -> resource_types.Values:
        flavor = reservation['spec']
        # Without a requirement, clients read the flavor from this key.
        return {**flavors.amounts_shown(flavor),
                'resource_properties': jsonutils.dumps(flavors.shown(
                    reservation['params']['source_flavor_id'], flavor)),
                **super().show(reservation)}

    def as_request(self, params: ty.Mapping[str,
                                            ty.Any]) -> resource_types.Values:
        return {**super().as_request(params),
                'flavor_id': params['source_flavor_id']}

    def requirements(self, asking: ty.Any, params: resource_types.Values,
                     ) -> resource_types.Requirements:
        return self._of_flavor(asking, flavors.facts_like(
            asking.context, params['source_flavor_id']), params)
