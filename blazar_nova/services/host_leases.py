# SPDX-License-Identifier: Apache-2.0
"""Leases of whole hosts: their hosts, and the servers there.

The servers have no bookings: the reservation database has the hosts, and Nova
has the servers.
"""

import contextlib
import typing as ty

from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.leases import hosted_servers
from blazar_core.leases import views
from blazar_core.plugins import resource_types
from blazar_nova.services import policy

LOG = logging.getLogger(__name__)

_UNKNOWN = ('Nova does not say now which servers run on the hosts of this '
            'lease.')


class HostLeases:
    """Adds hosts and servers to the representations of leases."""

    def __init__(self, database: api.Database,
                 types: resource_types.ResourceTypes,
                 rules: policy.Policy) -> None:
        self._database = database
        self._types = types
        self._policy = rules

    def complete(self, context: ty.Any, leases: ty.Sequence[views.Lease],
                 ) -> list[views.Lease]:
        """Return leases with the ``hosts`` and ``servers`` of reservations of
        whole hosts, and with the hosts that other resource types show.

        Costs one statement and one query to each cell if there is such a
        reservation, else nothing.
        """
        leases = self._naming_hosts(leases)
        kinds = {one['id']: kind for lease in leases
                 for one, kind in self._of_hosts(lease)}
        if not kinds:
            return [*leases]
        with self._database.reader() as session:
            hosts = hosted_servers.booked(session, kinds)
        used = {one['id'] for lease in leases for one in lease['reservations']
                if lease['status'] in states.BEGUN}
        servers, unknown = self._servers(kinds, {
            one: found for one, found in hosts.items() if one in used})
        return [self._completed(context, lease, {
            one['id']: [_shown(host, servers if one['id'] in used else {})
                        for host in hosts.get(one['id'], ())]
            for one, _kind in self._of_hosts(lease)}, unknown)
            for lease in leases]

    def _naming_hosts(self, leases: ty.Sequence[views.Lease],
                      ) -> ty.Sequence[views.Lease]:
        """Add the hosts of the resource types that show them."""
        names = {one['id']: kind.shows_hosts for lease in leases
                 for one in lease['reservations'] if (
                     kind := self._types.named.get(
                         one['resource_type'])) and kind.shows_hosts}
        if not names:
            return leases
        with self._database.reader() as session:
            hosts = hosted_servers.booked(session, names)
        return [{**lease, 'reservations': [
            one if one['id'] not in names else {**one, names[one['id']]: [
                host.name for host in hosts.get(one['id'], ())]}
            for one in lease['reservations']]} for lease in leases]

    @contextlib.contextmanager
    def naming(self, context: ty.Any, lease: views.Lease) -> ty.Iterator[None]:
        """Name hosts in errors of this block, if the user may see them."""
        try:
            yield
        except errors.HostsNotEmpty as exc:
            if not self._names(context, lease):
                raise
            raise errors.Conflict(exc.named, exc.reason) from exc

    def _names(self, context: ty.Any, lease: views.Lease) -> bool:
        return self._policy.allows(context, 'blazar:leases:get_hosts', {
            'project_id': lease['project_id']})

    def check_deletion(self, lease: views.Lease) -> None:
        """Check that no servers of other projects would be deleted.

        :raises Conflict: if there are any
        :raises CloudUnavailable: if that is unknown now
        """
        mine = [(one['id'], kind) for one, kind in self._of_hosts(lease)
                if lease['status'] in states.BEGUN]
        if not mine:
            return
        with self._database.reader() as session:
            hosts = hosted_servers.booked(session, [one for one, _kind in
                                                    mine])
        others = [one.project_id for its_id, kind in mine
                  for one in kind.servers_on({
                      host.service_host for host in hosts.get(its_id, ())})
                  if one.project_id != lease['project_id']]
        if others:
            raise errors.Conflict(
                f'The hosts of this lease have '
                f'{words.count(len(others), "server")} of '
                f'{words.count(len(set(others)), "other project")}, which '
                f'would be deleted too. Ask the owners to delete them, let '
                f'the lease end at its end_date, or write ?force=true to '
                f'delete all.',
                errors.ConflictReason.IN_USE)

    def _of_hosts(self, lease: views.Lease) -> ty.Iterator[
            tuple[views.Lease, resource_types.BaseResourceType]]:
        """Yield the reservations of whole hosts that are shown in full."""
        for one in lease['reservations']:
            kind = self._types.named.get(one['resource_type'])
            if kind is not None and kind.has_hosts:
                yield one, kind

    def _servers(self, kinds: ty.Mapping[str, resource_types.BaseResourceType],
                 hosts: ty.Mapping[str, ty.Sequence[hosted_servers.Host]],
                 ) -> tuple[dict[str, list[str]], bool]:
        """Return the servers of hosts by nova-compute, and whether they are
        unknown.
        """
        found: dict[str, list[str]] = {}
        try:
            for kind in set(kinds.values()):
                for one in kind.servers_on(sorted({
                        host.service_host for its_id, its in hosts.items()
                        for host in its if kinds[its_id] is kind})):
                    found.setdefault(one.service_host, []).append(one.id)
        except errors.CloudUnavailable as exc:
            LOG.warning('The servers of leases of whole hosts are not shown: '
                        '%s', exc)
            return {}, True
        return found, False

    def _completed(self, context: ty.Any, lease: views.Lease,
                   hosts: ty.Mapping[str, list[dict[str, ty.Any]]],
                   unknown: bool,
                   ) -> views.Lease:
        if not hosts:
            return lease
        named = self._names(context, lease)
        return {
            **lease,
            'warnings': lease['warnings'] + (
                [_UNKNOWN] if unknown and lease['status'] in states.BEGUN
                else []),
            'reservations': [one if one['id'] not in hosts else {
                **one, 'hosts': [host if named else {**host, 'name': None}
                                 for host in hosts[one['id']]],
                'servers': [server for host in hosts[one['id']]
                            for server in host['servers']]}
                for one in lease['reservations']]}


def _shown(host: hosted_servers.Host, servers: ty.Mapping[str, list[str]],
           ) -> dict[str, ty.Any]:
    return {'name': host.name, 'failed': bool(host.failed),
            'servers': servers.get(host.service_host, [])}
