# SPDX-License-Identifier: Apache-2.0

"""flavor:instance: so many servers like those of a flavor."""

import typing as ty

from oslo_serialization import jsonutils

from blazar_core.common import errors
from blazar_core.common import inputs
from blazar_core.plugins import resource_types
from blazar_nova.compat import flavors
from blazar_nova.resource_types import server_slots

__all__ = ['FlavorInstances']


class FlavorInstances(server_slots.ServerSlots):
    """Servers of what a flavor is when the lease is made."""

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'flavor_id': '"1"', **server_slots.ServerSlots.common}

    def read(self, values: resource_types.Values) -> resource_types.Values:
        flavor_id = inputs.needed(values, 'flavor_id')
        if isinstance(flavor_id, int) and not isinstance(flavor_id, bool):
            # Clients make a number of what looks like one.
            flavor_id = str(flavor_id)
        if not isinstance(flavor_id, str) or not flavor_id.isprintable() or (
                not 1 <= len(flavor_id) <= 255):
            raise errors.InvalidLeaseParams(
                '"flavor_id" must be the id of a flavor, a string.')
        # flavor_id is shown as that of the reserved flavor, as instances
        # have it; what it is like stays beside it.
        asked = {**self._common(values), 'source_flavor_id': flavor_id}
        # Those of before had none, and are what they were.
        wanted = self._properties(values)
        return asked | (wanted if wanted['resource_properties'] else {})

    def show(self, reservation: ty.Mapping[str,
                                           ty.Any]) -> resource_types.Values:
        flavor = reservation['spec']
        # Where no hosts were chosen by it, clients read the flavor in it.
        return {**flavors.amounts_shown(flavor),
                'resource_properties': jsonutils.dumps(flavors.shown(
                    reservation['params']['source_flavor_id'], flavor)),
                **super().show(reservation)}

    def written(self, params: ty.Mapping[str,
                                         ty.Any]) -> resource_types.Values:
        return {**super().written(params),
                'flavor_id': params['source_flavor_id']}

    def wanted(self, asking: ty.Any, params: resource_types.Values,
               ) -> resource_types.Requirements:
        return self._of_flavor(asking, flavors.facts_like(
            asking.context, params['source_flavor_id']), params)
