#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Makes the books true to what hosts have, and to what runs there."""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import inventory
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core import resources
from blazar_nova.compat import hosts as nova_hosts
from blazar_nova.compat import service
from blazar_nova.parts import wiring

__all__ = ['Hosts', 'SILENT']

LOG = logging.getLogger(__name__)

#: For how many hosts one after the other placement is waited for in vain.
SILENT = 3


class Hosts:
    """Compares the books of hosts with Nova and placement."""

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts
        #: By a host's uuid, what was last seen of it in full.
        self._facts: dict[str, nova_hosts.Facts] = {}

    def compare_all(self, apart: ty.Callable[..., bool]) -> None:
        """Make the books true for every host.

        :param apart: carries out what may fail by itself; see
            :meth:`mirror.Mirror.apart`
        :raises CloudUnavailable: when several hosts one after the other
            could not be looked at
        """
        found, complete = nova_hosts.all_hosts()
        silent = 0
        for number, host in enumerate(found, 1):
            if apart(f'Host {host.name}', self.compare, host):
                silent = 0
            elif (silent := silent + 1) == SILENT:
                raise errors.CloudUnavailable(
                    f'{silent} hosts one after the other could not be looked '
                    f'at; the others are next time.')
            if number % 100 == 0:
                LOG.info('Compared %s of %s hosts', number, len(found))
        if complete:
            self.retain({host.uuid for host in found})

    def compare_pools(self, apart: ty.Callable[..., bool]) -> None:
        """Make the books true for what resource types have of their own.

        :param apart: as above
        """
        for name, kind in self._parts.types.named.items():
            apart(f'What there is of {name}', self._compare_pool, name, kind)

    def _compare_pool(self, name: str, kind: resources.ResourceType) -> None:
        found = kind.hosts()
        if found is None:
            return
        hosts = [dataclasses.replace(one, pool=name) for one in found]
        for host in hosts:
            self._parts.database.retried(self._report, host)
        self.retain({host.uuid for host in hosts}, name)

    def _report(self, host: model.HostFacts) -> None:
        now, seen = self._before(host.uuid)
        with self._parts.database.writer() as session:
            inventory.report(session, now, host, {}, seen)

    def retain(self, uuids: set[str], pool: str = model.COMPUTE) -> None:
        """Take the room from all hosts of a pool but these."""
        gone = self._parts.database.retried(self._retain, uuids, pool)
        if gone:
            LOG.warning('Hosts that are not there any more (%s): %s', pool,
                        ', '.join(gone))

    def _retain(self, uuids: set[str], pool: str) -> list[str]:
        with self._parts.database.writer() as session:
            return inventory.retain(
                session, uuids, self._parts.clock.now(), pool)

    def compare_service_host(self, service_host: str) -> None:
        """Make the books true for all hosts of a nova-compute."""
        failed = None
        for host in nova_hosts.on_service_host(service_host):
            try:
                self.compare(host)
            except Exception as exc:
                failed = exc
        if failed is not None:
            raise failed

    def compare(self, host: nova_hosts.ComputeHost) -> None:
        """Make the books true for a host."""
        self._parts.database.retried(self._compare, host)

    def _compare(self, host: nova_hosts.ComputeHost) -> None:
        now, seen = self._before(host.uuid)
        facts = nova_hosts.facts(host.uuid)
        if facts is None:
            return
        self._facts[host.uuid] = facts
        with self._parts.database.writer() as session:
            if inventory.report(session, now, model.HostFacts(
                    host.uuid, host.name, host.service_host, facts.capacity,
                    host.properties), facts.allocations, seen):
                LOG.debug('Host %s: %s', host.name, facts)

    def _before(self, uuid: str) -> tuple[int, int | None]:
        """When the cloud is asked about a host, and what is known then.

        Other listeners ask about it too, and the first to ask may be the last
        to write: it sees by that that it has to ask again.
        """
        with self._parts.database.connection() as connection:
            return self._parts.clock.now(), inventory.generations(
                connection, [uuid]).get(uuid)

    def compare_usage(self, service_host: str) -> None:
        """Make the books true for what runs on the hosts of a nova-compute.

        Of a host that is in the books as it was last seen, nothing else is
        asked.
        """
        with self._parts.database.reader() as session:
            hosts = session.execute(
                sa.select(models.Host.uuid, models.Host.capacity)
                .where(models.Host.service_host == service_host,
                       models.Host.pool == model.COMPUTE)).all()
        seen = [self._facts.get(host.uuid) for host in hosts]
        if not hosts or [host.capacity for host in hosts] != [
                facts and facts.capacity for facts in seen]:
            self.compare_service_host(service_host)
            return
        for host, facts in zip(hosts, seen):
            assert facts is not None
            self._parts.database.retried(
                self._compare_usage, host.uuid, facts.providers)

    def _compare_usage(self, uuid: str, providers: ty.Any) -> None:
        now, seen = self._before(uuid)
        taken = nova_hosts.taken(providers)
        with self._parts.database.writer() as session:
            if inventory.report_usage(session, now, uuid, taken, seen):
                LOG.debug('Host %s: %s', uuid, taken)

    def believe(self, told: service.Told) -> bool:
        """Write down that a server came or left, as Nova told.

        :returns: ``False`` where that cannot be done: then look
        """
        return self._parts.database.retried(self._believe, told)

    def _believe(self, told: service.Told) -> bool:
        with self._parts.database.begin() as connection:
            return inventory.record(
                connection, self._parts.clock.now(), told.service_host,
                told.node, told.server_id, told.takes)

    def due(self, now: int) -> set[str]:
        """The service hosts with a server that was let in and not heard of.
        """
        with self._parts.database.reader() as session:
            return set(session.scalars(sa.select(
                models.Host.service_host).where(
                    models.Host.recheck_at <= now)))

    def looked_at(self, now: int, service_hosts: set[str],
                  again: int | None) -> None:
        """Those that were due at ``now`` were looked at, or are due again.

        :param again: when; ``None`` for not at all
        """
        if service_hosts:
            self._parts.database.retried(
                self._looked_at, now, service_hosts, again)

    def _looked_at(self, now: int, service_hosts: set[str],
                   again: int | None) -> None:
        with self._parts.database.begin() as connection:
            inventory.recheck(connection, now, service_hosts, again)
