# SPDX-License-Identifier: Apache-2.0

"""A neutron in memory, as the types that need it know it."""

import itertools
import typing as ty

from blazar_core.common import errors
from blazar_nova.compat import network_api

__all__ = ['NETWORK', 'FakeNetwork']

NETWORK = 'public'


class FakeNetwork:
    """One external network, with a subnet of 256 addresses.

    :ivar found: the floating IPs that there are, by id
    :ivar broken: by method, raised instead of what is asked for
    :ivar dies_after: by method, raised when it is done
    :ivar ports: addresses that ports have
    """

    def __init__(self, clock: ty.Any) -> None:
        self._clock = clock
        self._ids = itertools.count(1)
        self.found: dict[str, network_api.FloatingIP] = {}
        self.broken: dict[str, Exception] = {}
        self.dies_after: dict[str, Exception] = {}
        self.ports: set[str] = set()
        self.networks = {NETWORK: [network_api.Subnet(
            'subnet', '203.0.113.0/24', '203.0.113.1',
            (('203.0.113.128', '203.0.113.254'),))]}

    def addresses(self, project: str = 'project') -> list[str]:
        """The addresses that a project has."""
        return sorted(one.address for one in self.found.values()
                      if one.project_id == project)

    def change(self, address: str, **values: ty.Any) -> None:
        """Do what the owner of a floating IP may do."""
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

    def subnets(self, network_id: str) -> list[network_api.Subnet] | None:
        self._calls('subnets')
        return self.networks.get(network_id)

    def port_addresses(self, network_id: str) -> set[str]:
        return self.ports

    def floating_ips(self, **limits: str) -> list[network_api.FloatingIP]:
        self._calls('floating_ips')
        address = limits.get('floating_ip_address')
        return [one for one in self.found.values()
                if address in (None, one.address)]

    def of_reservation(self, reservation_id: str,
                       ) -> list[network_api.FloatingIP]:
        return [one for one in self.floating_ips()
                if reservation_id in one.reservations]

    def reserved(self) -> list[network_api.FloatingIP]:
        return [one for one in self.floating_ips() if one.reservations]

    def allocate(self, network_id: str, address: str, project_id: str) -> str:
        self._calls('allocate')
        if network_id not in self.networks or (
                self.floating_ips(floating_ip_address=address)):
            raise errors.CloudUnavailable('Neutron refuses: in use')
        made = network_api.FloatingIP(
            f'fip{next(self._ids)}', address, project_id, self._clock.now())
        self.found[made.id] = made
        self._done('allocate')
        return made.id

    def tag(self, floating_ip_id: str, reservation_id: str) -> None:
        self._calls('tag')
        self.found[floating_ip_id] = self.found[floating_ip_id]._replace(
            reservations=frozenset([reservation_id]))
        self._done('tag')

    def release(self, floating_ip_id: str) -> None:
        self._calls('release')
        self.found.pop(floating_ip_id, None)
        self._done('release')
