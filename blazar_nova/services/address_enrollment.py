# SPDX-License-Identifier: Apache-2.0

"""Enrollment of the addresses that floating IP reservations use."""

import ipaddress
import typing as ty

from oslo_log import log as logging
from sqlalchemy import orm

from blazar_core.capacity import enrollment
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.resource_types import floating_ips

LOG = logging.getLogger(__name__)


class AddressEnrollment:
    """Enrolls and removes addresses, and shows the enrolled ones."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._types = types

    def add(self, network_id: str, address: str) -> dict[str, ty.Any]:
        """Enroll an address, so that leases can reserve it.

        :returns: the address, as :meth:`show` returns it
        :raises InvalidLeaseParams: if the address is not in that network, or
            neutron allocates it itself
        :raises Conflict: if it is already enrolled, or in use
        :raises CloudUnavailable: if neutron does not answer
        """
        network = self._network()
        subnets = network.subnets(network_id)
        if subnets is None:
            raise errors.InvalidLeaseParams(
                f'There is no external network {network_id}. Write the ID of '
                'one, as "openstack network list --external" shows it.')
        host = floating_ips.host_of(
            network_id, _subnet_of(subnets, address, network_id), address)
        if network.floating_ips(floating_network_id=network_id,
                                floating_ip_address=address) or (
                address in network.port_addresses(network_id)):
            raise errors.Conflict(
                f'{address} is in use in network {network_id}. Delete the '
                'floating IP or port that has it, or enroll another address.',
                errors.ConflictReason.IN_USE)
        row = self._add(host)
        LOG.info('Address %s of network %s is enrolled', address, network_id)
        return _described(row)

    def _network(self) -> network_api.Neutron:
        kind = ty.cast(floating_ips.FloatingIPs,
                       self._types.named[floating_ips.NAME])
        return kind.network

    @api.retried
    def _add(self, host: model.HostFacts) -> models.Host:
        with self._database.writer() as session:
            return enrollment.add(session, self._clock.now(), host)

    @api.retried
    def remove(self, address_id: str) -> None:
        """Remove an address, so that no lease can reserve it.

        :raises NotFound: if it is not enrolled
        :raises Conflict: if leases have reserved it
        """
        with self._database.writer() as session:
            enrollment.take_out(session, self._clock.now(),
                                _row(session, address_id))

    def show(self, address_id: str) -> dict[str, ty.Any]:
        """Return an enrolled address.

        :raises NotFound: if it is not enrolled
        """
        with self._database.reader() as session:
            return _described(_row(session, address_id))

    def listed(self) -> list[dict[str, ty.Any]]:
        """Return all enrolled addresses."""
        with self._database.reader() as session:
            return [_described(row) for row in enrollment.pooled(
                session, floating_ips.NAME)]


def _row(session: orm.Session, address_id: str) -> models.Host:
    rows = enrollment.pooled(session, floating_ips.NAME, address_id)
    if not rows:
        raise errors.NotFound(f'Floating IP {address_id} could not be found.')
    return rows[0]


def _subnet_of(subnets: ty.Iterable[network_api.Subnet], address: str,
               network_id: str) -> str:
    """Return the id of the subnet of an address outside allocation pools.

    :raises InvalidLeaseParams: if there is none
    """
    wanted = ipaddress.ip_address(address)
    if wanted.version != 4:
        raise errors.InvalidLeaseParams(
            f'{address} is no IPv4 address, and neutron has no other floating '
            'IPs. Write an IPv4 address.')
    for one in subnets:
        cidr = ipaddress.ip_network(one.cidr)
        if wanted not in cidr:
            continue
        if address == one.gateway or cidr.num_addresses > 2 and wanted in (
                cidr.network_address, cidr.broadcast_address):
            raise errors.InvalidLeaseParams(
                f'{address} is the gateway, the network or the broadcast '
                f'address of subnet {one.id}. Write another address.')
        if any(int(ipaddress.ip_address(first)) <= int(wanted) <=
               int(ipaddress.ip_address(last)) for first, last in one.pools):
            raise errors.InvalidLeaseParams(
                f'{address} is in an allocation pool of subnet {one.id}, so '
                'that neutron gives it to others. Take it out of the pool, '
                'or write an address outside of it.')
        return one.id
    raise errors.InvalidLeaseParams(
        f'{address} is in no subnet of network {network_id}. Write an '
        'address of one.')


def _described(row: models.Host) -> dict[str, ty.Any]:
    """Return an address as the API shows it."""
    return {
        'id': row.uuid,
        floating_ips.NETWORK: row.properties[floating_ips.NETWORK],
        floating_ips.SUBNET: row.properties[floating_ips.SUBNET],
        'floating_ip_address': row.name,
        # False: it is in use, or its network or subnet does not exist.
        'reservable': bool(row.capacity),
        'created_at': clocks.stamp(row.enrolled_at or 0), 'updated_at': None}
