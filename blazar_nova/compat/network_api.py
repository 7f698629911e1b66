# SPDX-License-Identifier: Apache-2.0

"""Neutron, asked with the credentials that Nova has in ``[neutron]``."""

import functools
import typing as ty

from oslo_log import log as logging
from oslo_utils import timeutils

from blazar_core.common import errors
from blazar_nova.compat import rest_service

LOG = logging.getLogger(__name__)

#: The tag of the objects of all reservations, and how those of one begin, as
#: in Blazar.
TAG, _RESERVATION = 'blazar', 'reservation:'
#: The description of the networks of reservations. It is there from their
#: creation on, when neutron tags nothing but ports.
LEASED = 'The network of a lease'
#: The fields of ranges that are read, without the many segments in use.
_OF_RANGES = ('id', 'name', 'shared', 'project_id', 'network_type',
              'physical_network', 'minimum', 'maximum', 'created_at')
#: The most segments that are enrolled: each is a row of the database.
MOST_SEGMENTS = 10_000


class FloatingIP(ty.NamedTuple):
    """A floating IP of any project.

    :ivar created_at: seconds since the epoch
    :ivar reservations: the ids of reservations in its tags, which its owner
        can change
    """

    id: str
    address: str
    project_id: str
    created_at: int
    reservations: frozenset[str] = frozenset()


class Subnet(ty.NamedTuple):
    """A subnet of an external network.

    :ivar pools: the first and the last address of each allocation pool
    """

    id: str
    cidr: str
    gateway: str | None
    pools: tuple[tuple[str, str], ...]


class Segment(ty.NamedTuple):
    """A segment of a network.

    :ivar physical: the physical network; None if the type has none
    """

    type: str
    physical: str | None
    number: int


class Network(ty.NamedTuple):
    """A network of any project.

    :ivar name: if it was created for a reservation, the id of that
    :ivar created_at: seconds since the epoch
    :ivar reservations: see :class:`FloatingIP`
    :ivar leased: whether it was created for a reservation, as its description
        says, which its owner can change
    """

    id: str
    name: str
    project_id: str
    segment: Segment
    created_at: int
    reservations: frozenset[str] = frozenset()
    leased: bool = False


class Port(ty.NamedTuple):
    """A port, and the device that uses it."""

    id: str
    device_owner: str
    device_id: str


class Neutron(rest_service.RestService):
    """Neutron's API."""

    name, group, prefix = 'Neutron', 'neutron', '/v2.0'
    not_found = frozenset({'NeutronError'})

    @rest_service.reads
    def names_of(self, network_id: str) -> list[str]:
        """Return what users may call a network: its id and its name."""
        return [network_id, *(one['name'] for one in self._list(
            'networks', id=network_id))]

    @rest_service.reads
    def subnets(self, network_id: str) -> list[Subnet] | None:
        """Return the subnets of an external network; None if there is none."""
        found = self._list('networks', id=network_id)
        if not found or not found[0].get('router:external'):
            return None
        return [Subnet(one['id'], one['cidr'], one.get('gateway_ip'), tuple(
            (pool['start'], pool['end']) for pool in one['allocation_pools']))
            for one in self._list('subnets', network_id=network_id)]

    @rest_service.reads
    def floating_ips(self, **limits: str) -> list[FloatingIP]:
        """Return floating IPs of all projects.

        :param limits: of neutron's query, such as ``floating_network_id``
        """
        return [FloatingIP(
            one['id'], one['floating_ip_address'], one['project_id'],
            _created(one), _reservations(one))
            for one in self._list('floatingips', **limits)]

    @rest_service.reads
    def port_addresses(self, network_id: str) -> set[str]:
        """Return the addresses of a network that are in use by other things
        than floating IPs.
        """
        return {fixed['ip_address']
                for port in self._list('ports', network_id=network_id)
                if port['device_owner'] != 'network:floatingip'
                for fixed in port['fixed_ips']}

    @rest_service.reads
    def allocate(self, network_id: str, address: str, project_id: str) -> str:
        """Create the floating IP of an address for a project.

        :returns: its id
        """
        made = self._ask('POST', 'floatingips', json={'floatingip': {
            'floating_network_id': network_id,
            'floating_ip_address': address, 'project_id': project_id}})
        return rest_service.id_of(made, 'floatingip')

    @rest_service.reads
    def segments(self) -> list[Segment]:
        """Return the segments of the ranges that belong to our own project,
        from which neutron gives none to others: of the oldest ranges, and
        :data:`MOST_SEGMENTS` at most.
        """
        # Ranges cannot be filtered by these, and the extension is optional.
        kind = 'network_segment_ranges'
        found = self._all(kind, optional=True, query=[
            ('fields', name) for name in _OF_RANGES])
        mine = self._own_project() if found else ''
        segments: list[Segment] = []
        for one in sorted(found, key=lambda one: one.get('created_at') or ''):
            if one['shared'] or one['project_id'] != mine:
                continue
            size = one['maximum'] - one['minimum'] + 1
            if len(segments) + size > MOST_SEGMENTS:
                LOG.error(
                    'Network segment range %s (%s) is not enrolled: it has %s '
                    'segments, and at most %s can be enrolled, of which %s '
                    'are. Make it smaller, or delete it', one.get('id'),
                    one.get('name'), size, MOST_SEGMENTS, len(segments))
                continue
            segments += [Segment(
                one['network_type'], one['physical_network'] or None, number)
                for number in range(one['minimum'], one['maximum'] + 1)]
        return segments

    @rest_service.reads
    def networks(self, **limits: str) -> list[Network]:
        """Return networks of all projects.

        :param limits: see :meth:`floating_ips`
        """
        return [Network(
            one['id'], one['name'], one['project_id'], Segment(
                one['provider:network_type'],
                one['provider:physical_network'] or None,
                one['provider:segmentation_id']),
            _created(one), _reservations(one),
            one.get('description') == LEASED)
            for one in self._list('networks', **limits)
            if one.get('provider:network_type')]

    def networks_on(self, segment: Segment) -> list[Network]:
        """Return the networks on a segment."""
        limits = {'provider:network_type': segment.type,
                  'provider:segmentation_id': str(segment.number)}
        if segment.physical is not None:
            limits['provider:physical_network'] = segment.physical
        return self.networks(**limits)

    @rest_service.reads
    def create_network(self, segment: Segment, name: str, project_id: str,
                       ) -> str:
        """Create a network on a segment for a project; return its id.

        :param name: the reservation
        """
        physical = {} if segment.physical is None else {
            'provider:physical_network': segment.physical}
        return rest_service.id_of(self._ask('POST', 'networks', json={
            'network': {
                'name': name, 'description': LEASED, 'project_id': project_id,
                'provider:network_type': segment.type,
                'provider:segmentation_id': segment.number, **physical}}),
            'network')

    @rest_service.reads
    def ports(self, network_id: str) -> list[Port]:
        """Return the ports of a network."""
        return [Port(one['id'], one['device_owner'], one['device_id'])
                for one in self._list('ports', network_id=network_id)]

    def force_delete_port(self, port_id: str) -> None:
        """Delete a port, whatever uses it; ignores a missing one."""
        # Neutron deletes no port whose owner claims that it is of a router.
        self._ask('PUT', 'ports', port_id, missing={}, json={
            'port': {'device_owner': '', 'device_id': ''}})
        try:
            self.delete('ports', port_id)
        except errors.CloudRefusal:
            self._free_port(port_id)
            self.delete('ports', port_id)

    @rest_service.reads
    def _free_port(self, port_id: str) -> None:
        """Remove what keeps neutron from deleting a port without a device."""
        for trunk in self._found('trunks'):
            subports = {one['port_id'] for one in trunk['sub_ports']}
            if port_id == trunk['port_id'] or port_id in subports:
                # Neutron changes no trunk that its owner has set down.
                self._ask('PUT', 'trunks', trunk['id'], json={
                    'trunk': {'admin_state_up': True}})
            if port_id == trunk['port_id']:
                self.delete('trunks', trunk['id'])
            elif port_id in subports:
                self._ask('PUT', 'trunks', trunk['id'], 'remove_subports',
                          json={'sub_ports': [{'port_id': port_id}]})
        for local in self._found('local_ips', local_port_id=port_id):
            self._delete_all('local_ips', local['id'], 'port_associations',
                             key='fixed_port_id')
            self.delete('local_ips', local['id'])

    @rest_service.reads
    def free_ports_of(self, device_id: str) -> None:
        """Remove what keeps neutron from deleting the ports of a device."""
        for port in self._list('ports', device_id=device_id):
            self._free_port(port['id'])

    def remove_router_interface(self, port: Port) -> None:
        """Remove the interface of a router from a network."""
        self._ask('PUT', 'routers', port.device_id, 'remove_router_interface',
                  json={'port_id': port.id}, missing={})

    def set_up(self, network_id: str, is_up: bool) -> None:
        """Set a network administratively up or down; ignores a missing one.
        """
        self._ask('PUT', 'networks', network_id, missing={}, json={
            'network': {'admin_state_up': is_up}})

    @rest_service.reads
    def quota(self, project_id: str, name: str) -> rest_service.Quota:
        """Return a quota of a project, such as ``floatingip``."""
        # A neutron without quotas does not have the extension.
        found = self._ask('GET', 'quotas', project_id, 'details', missing={
            'quota': {}})['quota'].get(name)
        return rest_service.Quota(-1, 0) if found is None else (
            rest_service.Quota(int(found['limit']), int(
                found['used']) + int(found['reserved'])))

    def tag(self, collection: str, its_id: str, reservation_id: str) -> None:
        """Tag an object with its reservation.

        :param collection: ``floatingips`` or ``networks``
        """
        self._ask('PUT', collection, its_id, 'tags', json={
            'tags': _tags(reservation_id)})

    def delete(self, collection: str, its_id: str) -> None:
        """Delete an object, a network with its subnets; ignores a missing one.

        :param collection: such as ``networks``
        """
        self._ask('DELETE', collection, its_id, missing={})

    @rest_service.reads
    def release(self, its_id: str) -> None:
        """Delete a floating IP, whatever uses it; ignores a missing one."""
        self._delete_all('floatingips', its_id, 'port_forwardings')
        self.delete('floatingips', its_id)

    def _delete_all(self, *parts: str, key: str = 'id') -> None:
        """Delete all objects of a collection."""
        for one in self._found(*parts):
            self._ask('DELETE', *parts, one[key], missing={})

    def _list(self, kind: str, **limits: str) -> list[dict[str, ty.Any]]:
        return self._all(kind, query=limits.items())

    def _found(self, *parts: str, **limits: str) -> list[dict[str, ty.Any]]:
        """Return the objects of a collection; none if a neutron does not have
        the extension.
        """
        return self._all(*parts, optional=True, query=limits.items())

    def _all(self, *parts: str, query: ty.Iterable[tuple[str, str]],
             optional: bool = False) -> list[dict[str, ty.Any]]:
        """Return the objects of all pages of a list.

        :param optional: whether a neutron may not have the extension
        """
        kind, asked = parts[-1], [*query]
        found: list[dict[str, ty.Any]] = []
        marker: list[tuple[str, str]] = []
        while True:
            answer = self._ask(
                'GET', *parts, query=[*asked, *marker],
                missing={kind: []} if optional and not marker else None)
            page = rest_service.list_of(answer, kind)
            found += page
            if not any(link['rel'] == 'next'
                       for link in answer.get(f'{kind}_links', ())):
                return found
            marker = [('marker', page[-1]['id'])]


def _created(found: ty.Mapping[str, ty.Any]) -> int:
    return int(timeutils.parse_isotime(found['created_at']).timestamp())


def _reservations(found: ty.Mapping[str, ty.Any]) -> frozenset[str]:
    return frozenset(tag.removeprefix(_RESERVATION)
                     for tag in found.get('tags', ())
                     if tag.startswith(_RESERVATION))


def tag_of(reservation_id: str | None) -> str:
    """Return the tag of the objects of a reservation; None: of all."""
    return TAG if reservation_id is None else (
        f'{_RESERVATION}{reservation_id}')


def _tags(reservation_id: str) -> list[str]:
    return [TAG, tag_of(reservation_id)]


@functools.cache
def neutron() -> Neutron:
    """Return the client of this process."""
    return Neutron()
