# SPDX-License-Identifier: Apache-2.0

"""Ports and fixed IP addresses, which one server can have at a time.

Nova checks at the boot whether they are free. If the build is deferred,
another server may get them meanwhile, and the build would end in ERROR on its
host. Volumes need no check, as cinder reserves them for a server at its boot.
"""

import ipaddress
import typing as ty

from nova.network import neutron

from blazar_core.common import errors

__all__ = ['Address', 'InUse', 'in_use', 'named', 'of_instance', 'wanted']

_FIELDS = ['id', 'device_id', 'device_owner', 'tenant_id']
_OF_SERVERS = 'compute:'


class Address(ty.NamedTuple):
    """A fixed IP address of a network."""

    network_id: str
    ip: str

    def __str__(self) -> str:
        return (f'fixed IP {ipaddress.ip_address(self.ip)} of network '
                f'{self.network_id}')


class InUse(ty.NamedTuple):
    """A port or an address that is in use.

    :ivar what: the port or address, as a phrase
    :ivar server_id: the server of the project that has it; None if something
        else has it, or another project
    """

    what: str
    server_id: str | None

    def __str__(self) -> str:
        whose = '' if self.server_id is None else (
            f' by server {self.server_id}')
        return f'{self.what[:1].upper()}{self.what[1:]} is in use{whose}.'


def wanted(requested: ty.Any) -> tuple[list[str], list[Address]]:
    """Return the ids of the ports and the addresses that a boot asks for.

    :param requested: Nova's NetworkRequestList, or None
    """
    return ([one.port_id for one in requested or () if one.port_id],
            [Address(one.network_id, str(one.address))
             for one in requested or () if one.address and not one.port_id])


def named(ports: ty.Iterable[str], addresses: ty.Iterable[Address],
          ) -> frozenset[str]:
    """Return ports and addresses as phrases that can be compared."""
    return frozenset((*(f'port {one}' for one in ports),
                      *map(str, addresses)))


def of_instance(instance: ty.Any) -> frozenset[str]:
    """Return the ports and addresses of a server, as phrases.

    :param instance: with its ``info_cache``, from which they are read
    """
    vifs = instance.get_network_info()
    return named((vif['id'] for vif in vifs), (
        Address(vif['network']['id'], ip['address'])
        for vif in vifs for ip in vif.fixed_ips()))


def in_use(context: ty.Any, ports: ty.Collection[str],
           addresses: ty.Iterable[Address], but: ty.Container[str] = (),
           ) -> list[InUse]:
    """Return the ports and addresses that are in use now.

    One request to neutron for all ports, and one for each address.

    :param context: of the project that asks; without a token, Nova's own
        credentials are used
    :param but: the servers that are to have them
    :raises CloudUnavailable: if neutron does not answer
    """
    # A port without a device is free, but its address is not.
    found = [(f'port {port["id"]}', port) for port in _ports(
        context, id=[*ports]) if port['device_id']] if ports else []
    for address in addresses:
        found += [(str(address), port) for port in _ports(
            context, network_id=address.network_id,
            fixed_ips=f'ip_address={address.ip}')]
    return [InUse(what, _server_of(port, context.project_id))
            for what, port in found if port['device_id'] not in but]


def _server_of(port: ty.Mapping[str, ty.Any], project_id: str) -> str | None:
    """Return the server that has a port, if the port is of the project."""
    is_servers = (port.get('device_owner') or '').startswith(_OF_SERVERS)
    return ty.cast(str, port['device_id']) if is_servers and (
        port['tenant_id'] == project_id) else None


def _ports(context: ty.Any, **limits: ty.Any) -> list[dict[str, ty.Any]]:
    try:
        return ty.cast(list[dict[str, ty.Any]], neutron.API().list_ports(
            context.elevated(), fields=_FIELDS, **limits)['ports'])
    except Exception as exc:
        # neutronclient lets some errors of its own libraries through.
        raise errors.CloudUnavailable(
            f'Neutron does not say whether ports are in use: {exc}') from exc
