# SPDX-License-Identifier: Apache-2.0

"""Neutron, asked with the credentials that Nova has in ``[neutron]``.

Nova's own client covers what servers need of networks; floating IPs and
segments are none of that.
"""

import functools
import typing as ty
import urllib.parse

from keystoneauth1 import exceptions
from keystoneauth1 import loading
from oslo_utils import timeutils

from blazar_core.common import errors
from blazar_nova.compat import process

__all__ = ['FloatingIP', 'Neutron', 'Subnet', 'neutron']

#: Seconds that neutron has to answer.
_SECONDS = 30
#: What a reservation writes to its objects: as Blazar does.
_TAG, _RESERVATION = 'blazar', 'reservation:'
_GROUP = 'neutron'


class FloatingIP(ty.NamedTuple):
    """A floating IP of any project.

    :ivar created_at: seconds since the epoch
    :ivar reservations: the ids of those by which it is tagged. Its owner may
        change its tags
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


class Neutron:
    """Neutron's API; connects when it is first used, after WSGI servers have
    forked.

    Every method raises :class:`.errors.CloudUnavailable` if neutron does not
    answer, or refuses for a reason that may pass.
    """

    def is_configured(self) -> bool:
        """Whether there is a neutron that can be asked."""
        return self._adapter is not None

    @functools.cached_property
    def _adapter(self) -> ty.Any:
        auth = loading.load_auth_from_conf_options(process.CONF, _GROUP)
        return auth and loading.load_adapter_from_conf_options(
            process.CONF, _GROUP, auth=auth,
            session=loading.load_session_from_conf_options(
                process.CONF, _GROUP, auth=auth))

    def subnets(self, network_id: str) -> list[Subnet] | None:
        """The subnets of an external network; None: there is no such one."""
        found = self._list('networks', id=network_id)
        if not found or not found[0].get('router:external'):
            return None
        return [Subnet(one['id'], one['cidr'], one.get('gateway_ip'), tuple(
            (pool['start'], pool['end']) for pool in one['allocation_pools']))
            for one in self._list('subnets', network_id=network_id)]

    def floating_ips(self, **limits: str) -> list[FloatingIP]:
        """Floating IPs of all projects.

        :param limits: of neutron's query, such as ``floating_network_id``
        """
        return [FloatingIP(
            one['id'], one['floating_ip_address'], one['project_id'],
            int(timeutils.parse_isotime(one['created_at']).timestamp()),
            _reservations(one))
            for one in self._list('floatingips', **limits)]

    def port_addresses(self, network_id: str) -> set[str]:
        """The addresses of a network that something else than floating IPs
        has.
        """
        return {fixed['ip_address']
                for port in self._list('ports', network_id=network_id)
                if port['device_owner'] != 'network:floatingip'
                for fixed in port['fixed_ips']}

    def of_reservation(self, reservation_id: str) -> list[FloatingIP]:
        """The floating IPs that are tagged by a reservation."""
        return self.floating_ips(tags=f'{_RESERVATION}{reservation_id}')

    def reserved(self) -> list[FloatingIP]:
        """The floating IPs that are tagged by any reservation."""
        return self.floating_ips(tags=_TAG)

    def allocate(self, network_id: str, address: str, project_id: str) -> str:
        """Create the floating IP of an address for a project.

        :returns: its id
        """
        made = self._ask('POST', '/floatingips', json={'floatingip': {
            'floating_network_id': network_id,
            'floating_ip_address': address, 'project_id': project_id}})
        return ty.cast(str, made['floatingip']['id'])

    def tag(self, floating_ip_id: str, reservation_id: str) -> None:
        """Write to a floating IP which reservation it is of."""
        self._ask('PUT', f'/floatingips/{floating_ip_id}/tags', json={
            'tags': [_TAG, f'{_RESERVATION}{reservation_id}']})

    def release(self, floating_ip_id: str) -> None:
        """Delete a floating IP, whatever uses it; nothing when it is gone."""
        self._ask('DELETE', f'/floatingips/{floating_ip_id}', missing={})

    def _list(self, kind: str, **limits: str) -> list[dict[str, ty.Any]]:
        query = urllib.parse.urlencode(limits)
        found = self._ask('GET', f'/{kind}?{query}')
        return ty.cast(list[dict[str, ty.Any]], found[kind])

    def _ask(self, method: str, path: str,
             missing: dict[str, ty.Any] | None = None,
             **more: ty.Any) -> dict[str, ty.Any]:
        """
        :param missing: the answer when there is no such thing; None: an error
        """
        if not self.is_configured():
            raise errors.CloudUnavailable(
                'Neutron cannot be asked: [neutron] of nova.conf has no '
                'auth_type.')
        try:
            answer = self._adapter.request(
                f'/v2.0{path}', method, timeout=_SECONDS, **more)
            return ty.cast(dict[str, ty.Any],
                           answer.json() if answer.content else {})
        except exceptions.NotFound as exc:
            if missing is not None:
                return missing
            raise errors.CloudUnavailable(_refusal(exc)) from exc
        except exceptions.HttpError as exc:
            raise errors.CloudUnavailable(_refusal(exc)) from exc
        except (exceptions.ClientException, KeyError, TypeError,
                ValueError) as exc:
            # Or something that stands in front of it does.
            raise errors.CloudUnavailable(
                f'Neutron does not answer: {exc}') from exc


def _reservations(found: ty.Mapping[str, ty.Any]) -> frozenset[str]:
    return frozenset(tag.removeprefix(_RESERVATION)
                     for tag in found.get('tags', ())
                     if tag.startswith(_RESERVATION))


def _refusal(exc: ty.Any) -> str:
    """What neutron says."""
    try:
        said = exc.response.json()['NeutronError']['message']
    except Exception:
        said = str(exc)
    return f'Neutron refuses: {said}'


@functools.cache
def neutron() -> Neutron:
    """The neutron of this process."""
    return Neutron()
