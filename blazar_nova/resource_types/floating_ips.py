# SPDX-License-Identifier: Apache-2.0

"""virtual:floatingip: a number of floating IPs of an external network.

The operator enrolls addresses outside the allocation pools of its subnets, so
that neutron does not allocate them itself. Each is a host of this type's pool
with one unit of a resource class of its own: timelines, the next start, limits
and usage records work as for all other hosts, and choosing an address is
choosing a host. The id of a host is computed from network and address, so that
required addresses need no query.
"""

import dataclasses
import functools
import typing as ty
import uuid

from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.resource_types import inputs
from blazar_nova.resource_types import neutron_objects
from blazar_nova.resource_types import property_expressions

Values: ty.TypeAlias = resource_types.Values

#: The name of the entry point, and of the pool.
NAME = 'virtual:floatingip'
#: Properties of the hosts of the pool.
NETWORK, SUBNET = 'floating_network_id', 'subnet_id'
#: Maximum number of addresses that one reservation may require.
_MANY = 100
_IDS = uuid.UUID('9b8f3d1c-5a57-4d0e-9f2a-6f6b1c2d3e4f')


def host_of(network_id: str, subnet_id: str, address: str) -> model.HostFacts:
    """Return an address as a host of the pool."""
    return model.HostFacts(
        _uuid_of(network_id, address), address, address,
        {model.FLOATING_IP: 1}, {NETWORK: network_id, SUBNET: subnet_id},
        NAME)


def _uuid_of(network_id: str, address: str) -> str:
    return str(uuid.uuid5(_IDS, f'{network_id} {address}'))


class FloatingIPs(neutron_objects.NeutronObjects[network_api.FloatingIP]):
    """Addresses that the project of a lease owns as floating IPs from its
    start to its end.
    """

    collection, noun, host_noun = 'floatingips', 'floating IP', 'Address'
    changeable = ('amount', 'required_floatingips')
    shows_hosts = 'floating_ips'
    quotas: ty.ClassVar[ty.Mapping[str, str]] = {
        model.FLOATING_IP: 'floatingip'}
    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'network_id': '"the ID of an external network"', 'amount': '2',
        'required_floatingips': '["203.0.113.10"]'}

    # -- requests ----------------------------------------------------------

    def read(self, values: Values) -> Values:
        amount = inputs.integer(values.get('amount', 1), 'amount', 1)
        key = 'required_floatingips'
        required = [*dict.fromkeys(
            inputs.address(one, key)
            for one in inputs.texts(values.get(key, []), key, _MANY))]
        if len(required) > amount:
            raise errors.InvalidLeaseParams(
                f'"{key}" has {len(required)} addresses, and "amount" is '
                f'{amount}. Write an amount of at least {len(required)}.')
        return {
            'network_id': inputs.text(
                inputs.needed(values, 'network_id'), 'network_id'),
            'amount': amount, key: required}

    def check_change(self, before: ty.Mapping[str, ty.Any],
                     params: Values) -> None:
        was = before['params']
        if params['network_id'] != was['network_id']:
            raise errors.InvalidLeaseParams(
                '"network_id" of a reservation cannot be changed. Create '
                'another lease.')
        if params['required_floatingips'] not in (
                [], was['required_floatingips']):
            raise errors.InvalidLeaseParams(
                '"required_floatingips" of a reservation can only be changed '
                'to []. Create another lease.')
        if before['status'] == states.Reservation.ACTIVE and (
                params['amount'] < was['amount']):
            raise errors.InvalidLeaseParams(
                'The addresses of a started reservation are not taken from '
                f'it: write an amount of at least {was["amount"]}.')

    def requirements(self, asking: ty.Any,
                     params: Values) -> resource_types.Requirements:
        return resource_types.Requirements(_demand_of(params), {})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        demand = _demand_of(reserved.params)
        # A lost address is replaced by any other, so that its server can be
        # reached again.
        return dataclasses.replace(
            demand, required=frozenset()) if reserved.hosts else demand

    # -- neutron -----------------------------------------------------------

    def _marked(self, reservation_id: str | None, **limits: str,
                ) -> list[network_api.FloatingIP]:
        return self.network.floating_ips(
            tags=network_api.tag_of(reservation_id), **limits)

    def _host_of(self, one: network_api.FloatingIP) -> str:
        return one.address

    def _on(self, host: str, reserved: resource_types.ReservationContext,
            ) -> list[network_api.FloatingIP]:
        return self.network.floating_ips(
            floating_network_id=reserved.params['network_id'],
            floating_ip_address=host)

    def _create(self, host: str, reserved: resource_types.ReservationContext,
                ) -> str:
        return self.network.allocate(
            reserved.params['network_id'], host, reserved.project_id)

    def _remove(self, one: network_api.FloatingIP, forced: bool,
                is_over: bool) -> None:
        self.network.release(one.id)

    # -- the pool ----------------------------------------------------------

    def refreshed(self, known: ty.Sequence[model.HostFacts],
                  holders: ty.Mapping[str, ty.Collection[str]],
                  ) -> ty.Iterable[model.HostFacts]:
        taken: dict[tuple[str, str], str | None] = {}
        subnets: set[tuple[str, str]] = set()
        for network_id in {str(one.properties[NETWORK]) for one in known}:
            subnets |= {(network_id, one.id) for one in
                        self.network.subnets(network_id) or ()}
            taken |= {(network_id, address): None for address in
                      self.network.port_addresses(network_id)}
            taken |= {(network_id, one.address): one.project_id
                      for one in self.network.floating_ips(
                          floating_network_id=network_id)}
        for host in known:
            network_id = str(host.properties[NETWORK])
            place = network_id, host.name
            its = holders.get(host.uuid, ())
            # A subnet that is missing takes no address from its leases.
            usable = taken[place] in its if place in taken else bool(its) or (
                (network_id, host.properties[SUBNET]) in subnets)
            yield dataclasses.replace(
                host, capacity={model.FLOATING_IP: 1} if usable else {})


def _demand_of(params: ty.Mapping[str, ty.Any]) -> model.Demand:
    return model.Demand(
        {model.FLOATING_IP: 1}, params['amount'],
        properties=_in_network(params['network_id']),
        required=frozenset(_uuid_of(params['network_id'], one)
                           for one in params['required_floatingips']))


@functools.lru_cache(1000)
def _in_network(network_id: str) -> host_properties.Expression | None:
    return property_expressions.parse(['==', f'${NETWORK}', network_id])
