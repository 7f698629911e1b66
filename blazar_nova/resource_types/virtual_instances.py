# SPDX-License-Identifier: Apache-2.0

"""virtual:instance: a number of servers of given amounts."""

import typing as ty

from blazar_core.common import inputs
from blazar_core.plugins import resource_types
from blazar_nova.compat import flavors
from blazar_nova.resource_types import server_slots

__all__ = ['Instances']


class Instances(server_slots.ServerSlots):
    """Servers whose amounts of resources are given in the request."""

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'vcpus': '2', 'memory_mb': '4096', 'disk_gb': '20',
        **server_slots.ServerSlots.common}

    without: ty.ClassVar[ty.Mapping[str, ty.Sequence[ty.Any]]] = {
        **server_slots.ServerSlots.without, 'ephemeral_gb': (0, '0'),
        'swap_mb': (0, '0'), 'extra_specs': ({},)}

    def read(self, values: resource_types.Values) -> resource_types.Values:
        asked = {**self._common(values), **self._properties(values)}
        for key, least in (('vcpus', 1), ('memory_mb', 1), ('disk_gb', 0)):
            asked[key] = inputs.integer(
                inputs.needed(values, key), key, least)
        return asked

    def requirements(self, asking: ty.Any, params: resource_types.Values,
                     ) -> resource_types.Requirements:
        return self._of_flavor(asking, flavors.facts_of(
            params['vcpus'], params['memory_mb'], params['disk_gb']), params)
