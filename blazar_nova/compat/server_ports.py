# SPDX-License-Identifier: Apache-2.0

"""Ports and fixed IP addresses, which one server can have at a time.

Nova checks at the boot whether they are free. If the build is deferred,
another server may get them meanwhile, and the build would end in ERROR on its
host. Volumes need no check, as cinder reserves them for a server at its boot.
"""

import ipaddress
import typing as ty

from nova.compute import api as compute_api
from nova import context as nova_context
from nova import exception
from nova.network import neutron
from nova import objects
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls

LOG = logging.getLogger(__name__)

#: Nova's clients have no limit of their own.
_within = bounded_calls.Bounded()

_FIELDS = ['id', 'device_id', 'device_owner', 'tenant_id']
_OF_SERVERS = 'compute:'
#: The prefix of the ids of requests that detach a port.
_DETACH = 'req-detach-'


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
        return _within('Neutron', lambda: ty.cast(
            list[dict[str, ty.Any]], neutron.API().list_ports(
                context.elevated(), fields=_FIELDS, **limits)['ports']))
    except Exception as exc:
        # neutronclient lets some errors of its own libraries through.
        raise errors.CloudUnavailable(
            f'Neutron does not say whether ports are in use: {exc}') from exc


def detach(server_id: str, port_id: str) -> bool:
    """Have Nova detach a port from a server, once.

    :returns: whether it is requested now. Otherwise the server does not have
        the port, it was requested before, or Nova refuses or does not answer.
    """
    try:
        return _within.of_server(server_id, _detach, server_id, port_id)
    except errors.CloudUnavailable as exc:
        LOG.warning('Port %s is not detached from server %s by Nova: %s',
                    port_id, server_id, exc)
        return False


def _detach(server_id: str, port_id: str) -> bool:
    context = nova_context.get_admin_context()
    context.request_id = f'{_DETACH}{port_id}'
    api = compute_api.API()
    try:
        instance = api.get(context, server_id)
        if context.cell_uuid is None or all(
                vif['id'] != port_id for vif in instance.get_network_info()):
            return False
        if any(action.request_id == context.request_id for action in
               objects.InstanceActionList.get_by_instance_uuid(
                   context, instance.uuid)):
            return False
        api.detach_interface(context, instance, port_id)
    except exception.InstanceNotFound:
        return False
    except Exception as exc:
        LOG.info('Port %s is not detached from server %s by Nova: %s',
                 port_id, server_id, exc)
        return False
    return True
