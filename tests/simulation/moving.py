# SPDX-License-Identifier: Apache-2.0

"""Servers that are migrated, evacuated or unshelved."""

import itertools
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.plugins import cloud_api
from tests.simulation import cloud as clouds

State = clouds.State


class Port(clouds.Port):
    """The simulated cloud with migrations, evacuations and unshelving.

    :ivar migrating: called for each server that starts to migrate for a lease
    :ivar asked: called for each server that is asked to migrate, and the lease
    :ivar unshelved: called for each server that was unshelved for a lease
    :ivar migrations: the interruptible servers, by their consumers in
        placement on the hosts that they leave
    """

    def __init__(self, cloud: clouds.Cloud) -> None:
        super().__init__(cloud)
        self.migrating: ty.Callable[[clouds.Server], None] = (
            lambda _server: None)
        self.asked: ty.Callable[[clouds.Server, str], None] = (
            lambda *_of: None)
        self.unshelved: ty.Callable[[clouds.Server], None] = lambda _of: None
        self.migrations: dict[str, str] = {}
        self._numbers = itertools.count(1)

    # -- moves -------------------------------------------------------------

    def movable(self, server_ids: ty.Collection[str]) -> dict[str, bool]:
        self.call('movable')
        return {one: server.preemptible for one in server_ids
                if (server := self._cloud.servers.get(one)) is not None and
                _is_free(server)}

    def needs(self, server_id: str, lent: bool = False) -> model.Demand:
        self.call('needs')
        server, lent = self._cloud.servers[server_id], (
            lent and self._cloud.lends)
        return model.Demand(
            server.amounts, among=model.HostPool.ALL if lent else (
                model.HostPool.COMMON), hosts=frozenset(
                    host.uuid for host in self._cloud.hosts.values()
                    if host.there and host is not server.host and (
                        host.admits(server) or
                        lent and host.admits(server, lent))))

    def free(self, host: str) -> model.Resources:
        self.call('free')
        return next((one.free() for one in self._cloud.hosts.values()
                     if one.uuid == host), {})

    def move(self, server_id: str, host: str | None, lease_id: str,
             deadline: cloud_api.Deadline) -> str:
        self.call('move')
        server = self._cloud.servers[server_id]
        if deadline.passed():
            return 'it is too late'
        if host is not None:
            self.asked(server, lease_id)
        if not _is_free(server) or not self._cloud.engage(
                server, 'move', lambda: self._migrate(
                    server, host and self._cloud.hosts[host])):
            return 'it may no longer be moved'
        if host is not None:
            self.migrating(server)
        self.evicts(server, 'migrate')
        self.answer('moved')
        return ''

    def evacuate(self, server_id: str, lease_id: str,
                 deadline: cloud_api.Deadline) -> str:
        self.call('evacuate')
        cloud, server = self._cloud, self._cloud.servers[server_id]
        if deadline.passed():
            return 'it is too late'
        if not server.is_there or server.soft_deleted or (
                server.host is None) or (
                not server.host.forced_down):
            return 'its host is not certain to be down'
        if server.before is not None:
            return 'Nova refuses: it is resized.'
        if server.busy:
            # Nova does not check that.
            cloud.wrong.append(f'{server.id} is evacuated twice')
        server.busy = True
        cloud.start(f'evacuate-{server.id}', lambda: self._rebuild(server))
        self.answer('evacuated')
        return ''

    def _rebuild(self, server: clouds.Server) -> None:
        """Rebuild a server; its allocation stays until the old host is up."""
        cloud, source = self._cloud, server.host
        assert source is not None
        host = cloud.ask(clouds.Request(server, State.RUNNING)).host
        if host is not None:
            # The reservation database counts it twice until its booking
            # follows.
            cloud.act_against(host, server.amounts)
            cloud.baton.let_pass(cloud.faults.pause('build'))
        server.busy = False
        if server.state is not State.RUNNING:
            cloud.free(server)
        elif host is None or host.down or cloud.faults.happens('build fails'):
            if host is not None:
                host.allocations.pop(server.id, None)
            cloud.baton.tell(f'{server.id} stays on {source.name}')
        else:
            cloud.act_against(source, server.amounts)
            source.left.add(server.id)
            server.host, server.is_rescued = host, False
            cloud.baton.tell(f'{server.id} is evacuated to {host.name}')
        for one in (source, host):
            cloud.notify(server.id, one and one.uuid)

    def _migrate(self, server: clouds.Server, target: clouds.Host | None,
                 ) -> None:
        """Migrate a server; the migration holds its old allocation."""
        cloud, source = self._cloud, server.host
        assert source is not None
        migration = f'migration-{next(self._numbers):05}'
        if server.interruptible:
            self.migrations[migration] = server.id
        source.allocations[migration] = source.allocations.pop(
            server.id, dict(server.amounts))
        if server.leased:
            # The reservation database counts it twice there: as usage and as
            # its booking; on the target too, until its booking follows.
            for one in (source, target):
                if one is not None:
                    cloud.act_against(one, server.amounts)
        host = cloud.ask(clouds.Request(
            server, State.RUNNING, target)).host
        if host is not None:
            if server.leased and target is None:
                cloud.act_against(host, server.amounts)
            cloud.baton.let_pass(cloud.faults.pause('move'))
        stays = host is None or host.down or source.down or (
            cloud.faults.happens('move fails'))
        server.busy = False
        had = source.allocations.pop(migration)
        if server.state is not State.RUNNING:
            cloud.free(server)
        elif stays:
            cloud.free(server)
            source.allocations[server.id] = had
            cloud.baton.tell(f'{server.id} stays on {source.name}')
        else:
            assert host is not None
            server.host = host
            if cloud.faults.happens('move elsewhere'):
                cloud.elsewhere(server, host)
            cloud.baton.tell(f'{server.id} has moved to {server.host.name}')
        for one in (source, target or host):
            if one is not None:
                cloud.notify(server.id, one.uuid)

    # -- shelved servers ---------------------------------------------------

    def unshelve(self, server_id: str, credential: str | None,
                 deadline: cloud_api.Deadline) -> None:
        self.call('unshelve')
        server = self._cloud.servers[server_id]
        if deadline.passed():
            raise errors.CloudUnavailable('it is too late')
        if (server.rest is cloud_api.RestingState.SHELVED and
                self._cloud.engage(server, 'unshelve',
                                   lambda: self._unshelve(server))):
            server.leased = not server.interruptible
            server.released = False
        self.answer('unshelved')

    def _unshelve(self, server: clouds.Server) -> None:
        cloud = self._cloud
        host = cloud.ask(clouds.Request(server, State.RUNNING)).host
        if host is not None and server.state is State.RUNNING:
            server.host = host
            cloud.baton.let_pass(cloud.faults.pause('build'))
        server.busy = False
        if server.state is not State.RUNNING:
            cloud.free(server)
        elif host is None or host.down or cloud.faults.happens('build fails'):
            cloud.free(server)
            server.host = None
            cloud.baton.tell(f'{server.id} stays shelved')
        else:
            server.rest, server.ran_at = None, cloud.baton.now
            cloud.baton.tell(f'{server.id} is back on {host.name}')
            if not server.interruptible:
                self.unshelved(server)
        cloud.notify(server.id, host.uuid if host else None)


def _is_free(server: clouds.Server) -> bool:
    """Return whether a server runs and may be migrated."""
    return server.state is State.RUNNING and server.host is not None and not (
        server.busy or server.deleting or server.rest or server.within or
        server.soft_deleted or server.is_rescued or server.before or
        server.kept)
