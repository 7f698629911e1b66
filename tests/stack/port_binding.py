# SPDX-License-Identifier: Apache-2.0

"""An ML2 mechanism driver that binds every port on every host at once.

There are no agents and no packets: servers of the fake driver get ports that
are ACTIVE. Neutron finds it by an entry point
(:mod:`tests.stack.configuration`).
"""

import typing as ty

from neutron_lib.api.definitions import portbindings
from neutron_lib import constants
from neutron_lib.plugins.ml2 import api


class Driver(api.MechanismDriver):  # type: ignore[misc]
    """Binds all ports on all hosts."""

    connectivity = portbindings.CONNECTIVITY_L2

    def initialize(self) -> None:
        pass

    def bind_port(self, context: ty.Any) -> None:
        context.set_binding(
            context.segments_to_bind[0][api.ID], portbindings.VIF_TYPE_OVS,
            {portbindings.CAP_PORT_FILTER: True},
            status=constants.PORT_STATUS_ACTIVE)
