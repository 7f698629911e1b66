# SPDX-License-Identifier: Apache-2.0

"""A neutron in memory, with the interface that resource types use."""

import itertools
import typing as ty

from blazar_core.common import errors
from blazar_nova.compat import network_api
from blazar_nova.compat import rest_service

NETWORK = 'public'


class FakeNetwork:
    """One external network, with a subnet of 256 addresses.

    :ivar external: the subnets of external networks
    :ivar found: the existing floating IPs, by id
    :ivar broken: exceptions to raise instead of the call, by method
    :ivar dies_after: exceptions to raise after the call, by method
    :ivar taken: addresses that ports have
    :ivar ranges: the enrolled segments
    :ivar made: the networks on segments, by id
    :ivar of_network: the ports of each of them
    :ivar disabled: the networks that forward nothing
    :ivar trunks: the ports that are in trunks
    :ivar follow: the port that is deleted with an interface of a router
    :ivar forged: the ports that are interfaces of no router
    :ivar limits: the quota of each project, by name
    """

    def __init__(self, clock: ty.Any) -> None:
        self._clock = clock
        self._ids = itertools.count(1)
        self.found: dict[str, network_api.FloatingIP] = {}
        self.broken: dict[str, Exception] = {}
        self.dies_after: dict[str, Exception] = {}
        self.taken: set[str] = set()
        self.ranges = [network_api.Segment('vlan', 'physnet1', number)
                       for number in (300, 301)] + [
            network_api.Segment('vxlan', None, 7)]
        self.made: dict[str, network_api.Network] = {}
        self.of_network: dict[str, list[network_api.Port]] = {}
        self.disabled: set[str] = set()
        self.trunks: set[str] = set()
        self.follow: dict[str, str] = {}
        self.forged: set[str] = set()
        self.limits: dict[str, int] = {}
        self.external = {NETWORK: [network_api.Subnet(
            'subnet', '203.0.113.0/24', '203.0.113.1',
            (('203.0.113.128', '203.0.113.254'),))]}

    def addresses(self, project: str = 'project') -> list[str]:
        """Return the addresses of a project."""
        return sorted(one.address for one in self.found.values()
                      if one.project_id == project)

    def change(self, address: str, **values: ty.Any) -> None:
        """Change a floating IP as its owner may do."""
        one, = self.floating_ips(floating_ip_address=address)
        self.found[one.id] = one._replace(**values)

    def _calls(self, method: str) -> None:
        if method in self.broken:
            raise self.broken[method]

    def _done(self, method: str) -> None:
        if method in self.dies_after:
            raise self.dies_after.pop(method)

    def is_configured(self) -> bool:
        return True

    def names_of(self, network_id: str) -> list[str]:
        return [network_id]

    def subnets(self, network_id: str) -> list[network_api.Subnet] | None:
        self._calls('subnets')
        return self.external.get(network_id)

    def port_addresses(self, network_id: str) -> set[str]:
        return self.taken

    def floating_ips(self, **limits: str) -> list[network_api.FloatingIP]:
        self._calls('floating_ips')
        address = limits.get('floating_ip_address')
        return [one for one in self.found.values()
                if address in (None, one.address) and _has(one, limits)]

    def allocate(self, network_id: str, address: str, project_id: str) -> str:
        self._calls('allocate')
        if network_id not in self.external or (
                self.floating_ips(floating_ip_address=address)):
            raise errors.CloudRefusal('Neutron refuses: in use')
        made = network_api.FloatingIP(
            f'fip{next(self._ids)}', address, project_id, self._clock.now())
        self.found[made.id] = made
        self._done('allocate')
        return made.id

    def quota(self, project_id: str, name: str) -> rest_service.Quota:
        self._calls('quota')
        existing: ty.Any = self.made if name == 'network' else self.found
        return rest_service.Quota(self.limits.get(name, -1), sum(
            one.project_id == project_id for one in existing.values()))

    def tag(self, collection: str, its_id: str, reservation_id: str) -> None:
        self._calls(f'tag {collection}')
        found: ty.Any = self.made if collection == 'networks' else self.found
        found[its_id] = found[its_id]._replace(
            reservations=frozenset([reservation_id]))
        self._done(f'tag {collection}')

    def delete(self, collection: str, its_id: str) -> None:
        self._calls(f'delete {collection}')
        if collection == 'ports':
            if its_id in self.trunks:
                raise errors.CloudRefusal('Neutron refuses: in a trunk.')
            self._gone(its_id)
        else:
            left = [one for one in self.ports(its_id)
                    if one.device_owner != 'network:dhcp']
            if left:
                raise errors.CloudRefusal(
                    f'Neutron refuses: {left} in use.')
            self.made.pop(its_id, None)
        self._done(f'delete {collection}')

    def release(self, its_id: str) -> None:
        self._calls('release')
        self.found.pop(its_id, None)
        self._done('release')

    # -- networks ----------------------------------------------------------

    def segments(self) -> list[network_api.Segment]:
        self._calls('segments')
        return self.ranges

    def networks_on(self, segment: network_api.Segment,
                    ) -> list[network_api.Network]:
        return [one for one in self.made.values() if one.segment == segment]

    def networks(self, **limits: str) -> list[network_api.Network]:
        self._calls('networks')
        return [one for one in self.made.values() if _has(one, limits)]

    def create_network(self, segment: network_api.Segment, name: str,
                       project_id: str) -> str:
        self._calls('create_network')
        if self.networks_on(segment):
            raise errors.CloudRefusal('Neutron refuses: in use.')
        made = network_api.Network(
            f'net{next(self._ids)}', name, project_id, segment,
            self._clock.now(), leased=True)
        self.made[made.id] = made
        self._done('create_network')
        return made.id

    def ports(self, network_id: str) -> list[network_api.Port]:
        return self.of_network.get(network_id, [])

    def remove_router_interface(self, port: network_api.Port) -> None:
        self._calls('remove_router_interface')
        if port.id not in self.forged:
            self._gone(port.id)
            self._gone(self.follow.get(port.id, ''))
        self._done('remove_router_interface')

    def force_delete_port(self, port_id: str) -> None:
        self._calls('force_delete_port')
        self._gone(port_id)
        self._done('force_delete_port')

    def free_ports_of(self, device_id: str) -> None:
        self._calls('free_ports_of')

    def set_up(self, network_id: str, is_up: bool) -> None:
        self._calls('set_up')
        if is_up:
            self.disabled.discard(network_id)
        else:
            self.disabled.add(network_id)

    def _gone(self, port_id: str) -> None:
        for network_id, ports in self.of_network.items():
            self.of_network[network_id] = [
                one for one in ports if one.id != port_id]


def _has(one: network_api.FloatingIP | network_api.Network,
         limits: ty.Mapping[str, str]) -> bool:
    """Return whether an object is what a query of networks, or for a tag,
    finds.
    """
    if 'description' in limits:
        return isinstance(one, network_api.Network) and one.leased and (
            limits.get('name') in (None, one.name))
    tags = {network_api.TAG, *map(network_api.tag_of, one.reservations)} if (
        one.reservations) else set()
    return 'tags' not in limits or limits['tags'] in tags
