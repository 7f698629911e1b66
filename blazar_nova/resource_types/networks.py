# SPDX-License-Identifier: Apache-2.0

"""virtual:network: a network on a reserved segment (VLAN, VXLAN).

The operator enrolls segments by a network segment range of neutron that only
the service project may use, so that neutron allocates them to no other
project. Each segment is a host of this type's pool.
"""

import functools
import typing as ty
import uuid

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import inputs
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api

__all__ = ['Networks']

LOG = logging.getLogger(__name__)

Values: ty.TypeAlias = resource_types.Values

_IDS = uuid.UUID('5f0c6c8e-6a3d-4a57-8f1e-2f6f0d8b7a11')
#: Device owners of ports of routers, of any kind.
_ROUTER = 'network:router_interface', 'network:ha_router_replicated_interface'
#: Device owners of ports that neutron deletes with the network.
_OWN = ('network:dhcp', 'network:distributed')


class Networks(resource_types.ResourceType):
    """A network that the project of a lease owns from its start to its end;
    its name is the id of the reservation.

    :ivar network: neutron
    """

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'network_type': '"vlan"',
        'physical_network': '"physnet1"'}

    def __init__(self) -> None:
        self.network = network_api.neutron()

    # -- requests ----------------------------------------------------------

    def read(self, values: Values) -> Values:
        # One network per reservation, as its name is the reservation's id.
        asked: Values = {'amount': inputs.integer(
            values.get('amount', 1), 'amount', 1, 1)}
        for key in ('network_type', 'physical_network'):
            if key in values:
                asked[key] = inputs.text(values[key], key)
        return asked

    def requirements(self, asking: ty.Any,
                     params: Values) -> resource_types.Requirements:
        return resource_types.Requirements(_demand_of(params), {})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return _demand_of(reserved.params)

    # -- neutron -----------------------------------------------------------

    def start(self, reserved: resource_types.ReservationContext) -> None:
        wanted = set(map(_segment_of, reserved.services.values()))
        for one in self._tagged(reserved):
            if one.segment not in wanted:
                self._take_apart(one, reserved)
        for segment in wanted:
            self._create(reserved, segment)

    def bookings_changed(self,
                         reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def transferred(self, reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def end(self, reserved: resource_types.ReservationContext) -> None:
        found = {one.id: one for one in self._tagged(reserved)}
        for segment in map(_segment_of, reserved.services.values()):
            # Users may have changed the tags of their networks.
            found |= {one.id: one for one in self.network.networks_on(segment)
                      if one.project_id == reserved.project_id and
                      not _is_next(one, reserved)}
        for one in found.values():
            self._take_apart(one, reserved)

    def open_reservations(self) -> ty.Collection[str] | None:
        if not self.network.is_configured():
            return None
        return {its_id for one in self.network.reserved_networks()
                for its_id in one.reservations}

    def _tagged(self, reserved: resource_types.ReservationContext,
                ) -> list[network_api.Network]:
        # Users of other projects may set the same tag.
        return [one for one in self.network.networks_of(reserved.id)
                if reserved.may_own(one.project_id)]

    def _create(self, reserved: resource_types.ReservationContext,
                segment: network_api.Segment) -> None:
        """Create the network of a project on a segment; idempotent."""
        for one in self.network.networks_on(segment):
            if one.project_id == reserved.project_id:
                if reserved.id not in one.reservations:
                    # A process died before tagging it.
                    self.network.tag_network(one.id, reserved.id)
                return
            if reserved.id not in one.reservations:
                raise errors.CloudUnavailable(
                    f'Segment {_name_of(segment)} is used by another project; '
                    f'an operator has to delete network {one.id} there.')
            # The lease was transferred to another project.
            self._take_apart(one, reserved)
        made = self.network.create_network(
            segment, reserved.id, reserved.project_id)
        self.network.tag_network(made, reserved.id)
        LOG.info('Lease %s: network %s of reservation %s is created on '
                 'segment %s', reserved.lease_id, made, reserved.id,
                 _name_of(segment))

    def _take_apart(self, one: network_api.Network,
                    reserved: resource_types.ReservationContext) -> None:
        """Delete a network: first its ports without a device, then the
        interfaces of routers, finally itself with its subnets; idempotent.

        :raises CloudUnavailable: if the user's servers still use it
        """
        ports = [port for port in self.network.ports(one.id)
                 if not port.device_owner.startswith(_OWN)]
        used = [port for port in ports if port.device_id and
                not port.device_owner.startswith(_ROUTER)]
        if used:
            # The lease has ended, even if its ports are in use.
            self.network.disable(one.id)
            raise errors.CloudUnavailable(
                f'Network {one.id} has {words.count(len(used), "port")} in '
                f'use: delete the servers, or detach port '
                f'{", ".join(port.id for port in used[:5])}.')
        for port in ports:
            if not port.device_id:
                self.network.delete_port(port.id)
        for port in ports:
            if port.device_id:
                self.network.detach(port)
        self.network.delete_network(one.id)
        LOG.info('Lease %s: network %s of reservation %s is deleted',
                 reserved.lease_id, one.id, reserved.id)

    # -- the pool ----------------------------------------------------------

    def hosts(self) -> ty.Iterable[model.HostFacts] | None:
        if not self.network.is_configured():
            return None
        return map(_host_of, self.network.segments())


def _host_of(segment: network_api.Segment) -> model.HostFacts:
    name = _name_of(segment)
    return model.HostFacts(
        str(uuid.uuid5(_IDS, name)), name, name, {model.SEGMENT: 1}, {
            'network_type': segment.type,
            'physical_network': segment.physical or '',
            'segmentation_id': segment.number})


def _name_of(segment: network_api.Segment) -> str:
    return f'{segment.type}:{segment.physical or ""}:{segment.number}'


def _segment_of(name: str) -> network_api.Segment:
    kind, _colon, rest = name.partition(':')
    physical, _colon, number = rest.rpartition(':')
    return network_api.Segment(kind, physical or None, int(number))


def _is_next(one: network_api.Network,
             reserved: resource_types.ReservationContext) -> bool:
    """Return whether a network is already that of the project's next lease,
    as another process has completed the end of this one.
    """
    return reserved.window is not None and bool(one.reservations) and (
        reserved.id not in one.reservations) and (
        one.created_at >= reserved.window.end)


def _demand_of(params: ty.Mapping[str, ty.Any]) -> model.Demand:
    return model.Demand(
        {model.SEGMENT: 1}, params['amount'], properties=_like(
            params.get('network_type'), params.get('physical_network')))


@functools.lru_cache(1000)
def _like(network_type: str | None, physical: str | None,
          ) -> host_properties.Expression | None:
    return host_properties.both(*(
        None if value is None
        else host_properties.parse(['==', f'${name}', value])
        for name, value in (('network_type', network_type),
                            ('physical_network', physical))))
