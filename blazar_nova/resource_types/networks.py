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
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import words
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.compat import server_ports
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import neutron_objects
from blazar_nova.resource_types import property_expressions

LOG = logging.getLogger(__name__)

Values: ty.TypeAlias = resource_types.Values

_IDS = uuid.UUID('5f0c6c8e-6a3d-4a57-8f1e-2f6f0d8b7a11')
#: Device owners of interfaces of routers, of the ports that neutron deletes
#: with these, of those that it deletes with the network, and of servers.
_INTERFACES = frozenset({
    'network:router_interface', 'network:ha_router_replicated_interface',
    'network:router_interface_distributed'})
_WITH_INTERFACES = 'network:router_centralized_snat'
_OWN = frozenset({'network:dhcp', 'network:distributed',
                  'network:floatingip_agent_gateway'})
_OF_SERVERS = 'compute:'


class Networks(neutron_objects.NeutronObjects[network_api.Network]):
    """A network that the project of a lease owns from its start to its end;
    its name is the id of the reservation.

    :ivar detach: see :func:`.server_ports.detach`
    """

    collection, noun, host_noun = 'networks', 'network', 'Segment'
    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'network_type': '"vlan"',
        'physical_network': '"physnet1"'}
    quotas: ty.ClassVar[ty.Mapping[str, str]] = {model.SEGMENT: 'network'}

    def __init__(self) -> None:
        super().__init__()
        self.detach: ty.Callable[[str, str], bool] = server_ports.detach

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

    def _marked(self, reservation_id: str | None, **limits: str,
                ) -> list[network_api.Network]:
        # One that was created a moment ago has no tags.
        return [*self.network.networks(
            tags=network_api.tag_of(reservation_id), **limits),
            *self.network.networks(
                description=network_api.LEASED, **limits, **(
                    {} if reservation_id is None
                    else {'name': reservation_id}))]

    def _reservations_of(self, one: network_api.Network,
                         ) -> ty.Collection[str]:
        return one.reservations | ({one.name} if one.leased else set())

    def _host_of(self, one: network_api.Network) -> str:
        return _name_of(one.segment)

    def _on(self, host: str, reserved: resource_types.ReservationContext,
            ) -> list[network_api.Network]:
        return self.network.networks_on(_segment_of(host))

    def _create(self, host: str, reserved: resource_types.ReservationContext,
                ) -> str:
        return self.network.create_network(
            _segment_of(host), reserved.id, reserved.project_id)

    def _restore(self, one: network_api.Network) -> None:
        self.network.set_up(one.id, True)

    def _remove(self, one: network_api.Network, forced: bool,
                is_over: bool) -> None:
        if is_over:
            # Whatever keeps the network.
            self.network.set_up(one.id, False)
        ports = sorted((port for port in self.network.ports(one.id)
                        if port.device_owner not in _OWN), key=_order)
        used = [port for port in ports if port.device_id and not _order(port)]
        if used and not forced:
            raise errors.CloudRefusal(
                f'Network {one.id} has {words.count(len(used), "port")} in '
                f'use: delete the servers, or detach port '
                f'{", ".join(port.id for port in used[:5])}.')
        remove = self._force if forced else self._remove_port
        neutron_objects.carry_out(
            functools.partial(remove, port) for port in ports)
        self.network.delete('networks', one.id)

    def _remove_port(self, port: network_api.Port) -> None:
        """Delete a port without a device, or the interface of a router."""
        if not port.device_id:
            self.network.delete('ports', port.id)
        elif port.device_owner in _INTERFACES:
            self.network.remove_router_interface(port)

    def _force(self, port: network_api.Port) -> None:
        """Delete a port, whatever uses it."""
        if port.device_owner.startswith(_OF_SERVERS) and (
                self.detach(port.device_id, port.id)):
            raise errors.CloudRefusal(
                f'Port {port.id} is being detached from server '
                f'{port.device_id}.')
        try:
            self._remove_port(port)
        except errors.CloudRefusal as exc:
            LOG.info('Port %s is deleted by force: %s', port.id, exc)
        self.network.force_delete_port(port.id)

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


def _order(port: network_api.Port) -> int:
    """Return when a port is deleted: with 1, interfaces of routers, and with
    2, what neutron deletes with these. What their owners wrote counts only if
    it names a router.
    """
    if not uuidutils.is_uuid_like(port.device_id):
        return 0
    return 2 if port.device_owner == _WITH_INTERFACES else int(
        port.device_owner in _INTERFACES)


def _name_of(segment: network_api.Segment) -> str:
    return f'{segment.type}:{segment.physical or ""}:{segment.number}'


def _segment_of(name: str) -> network_api.Segment:
    kind, _colon, rest = name.partition(':')
    physical, _colon, number = rest.rpartition(':')
    return network_api.Segment(kind, physical or None, int(number))


def _demand_of(params: ty.Mapping[str, ty.Any]) -> model.Demand:
    return model.Demand(
        {model.SEGMENT: 1}, params['amount'], properties=_like(
            params.get('network_type'), params.get('physical_network')))


@functools.lru_cache(1000)
def _like(network_type: str | None, physical: str | None,
          ) -> host_properties.Expression | None:
    return property_expressions.both(*(
        None if value is None
        else property_expressions.parse(['==', f'${name}', value])
        for name, value in (('network_type', network_type),
                            ('physical_network', physical))))
