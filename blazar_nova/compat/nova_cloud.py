# SPDX-License-Identifier: Apache-2.0

"""The cloud of the core, implemented with Nova: reads and builds servers."""

import contextlib
import functools
import typing as ty

from nova import baserpc
from nova.conductor import rpcapi as conductor_rpcapi
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler import rpcapi as scheduler_rpcapi
from oslo_log import log as logging

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import accelerators
from blazar_nova.compat import bound_servers
from blazar_nova.compat import build_calls
from blazar_nova.compat import build_preflight
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import end_actions
from blazar_nova.compat import flavors
from blazar_nova.compat import gated_casts
from blazar_nova.compat import hostnames
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import nova_quota
from blazar_nova.compat import pool
from blazar_nova.compat import probe
from blazar_nova.compat import request_context
from blazar_nova.compat import reserved_state
from blazar_nova.compat import server_deletion
from blazar_nova.compat import server_demand
from blazar_nova.compat import server_migration
from blazar_nova.compat import server_ports
from blazar_nova.compat import server_state
from blazar_nova.compat import stranded_builds
from blazar_nova.compat import unbuilt_leftovers
from blazar_nova.compat import unbuilt_servers

LOG = logging.getLogger(__name__)

#: Seconds that a service has to answer a ping.
_PING_TIMEOUT = 10


class NovaCloud(server_deletion.ServerDeletion, end_actions.EndActions,
                server_migration.ServerMigration):
    """Nova as the cloud that the core needs.

    For any process that has read nova.conf and has access to the API database
    and the cells.

    :param trusts: creates tokens of users
    """

    def __init__(self, trusts: request_context.Trusts,
                 clock: clocks.Clock) -> None:
        super().__init__(trusts, clock)
        # Many starts may wait for the same service.
        self._probe = probe.Probe()

    def _ping(self, topic: str) -> None:
        """:raises CloudUnavailable: if no service of a topic answers"""
        with self._probe.calling(f'nova-{topic}'):
            _ping(topic)

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: cloud_api.Gate) -> str:
        """Cast a deferred build for those of its servers that still wait.

        Two casts of a server would leave a guest that Nova does not know, so
        the gate is the last step before the cast, with nothing slow between
        them, and the cast is never repeated.
        """
        build = build_calls.load(call)
        if credential is not None:
            build.renew(self._access(
                credential, as_owner=build.makes_what_is_the_users))
        return self._send(build, server_ids, gate)

    def send_slots(self, call: str, apart: bool, gate: cloud_api.Gate) -> None:
        """Send the build of servers with reservation slots, as :meth:`send`,
        if the request has not sent it.

        :param apart: whether to bind the servers to hosts of the pool
        """
        build = build_calls.load(call)
        self._send(build, build.server_ids, gate,
                   functools.partial(bound_servers.admit, build, apart))

    def _send(self, build: build_calls.BuildCall,
              server_ids: ty.Collection[str], gate: cloud_api.Gate,
              admit: ty.Callable[[], None] = lambda: None) -> str:
        """:param admit: called when the remaining servers are known"""
        # Without these services, the build would fail or not even start; the
        # other services are reached by messages, which wait in queues.
        with self._probe.calling('Placement'):
            compute_hosts.ask_placement('/')
        self._ping(conductor_rpcapi.RPC_TOPIC)
        self._ping(scheduler_rpcapi.RPC_TOPIC)
        waiting = {server_id: request for server_id in build.server_ids
                   if server_id in server_ids and
                   (request := unbuilt_servers.waiting(build, server_id))}
        build.request_spec = [spec for spec in build.request_spec
                              if spec.instance_uuid in waiting]
        if not waiting:
            return ''
        build.build_requests = [
            waiting[server_id] for server_id in build.server_ids]
        admit()
        self._check_up(build)
        in_use = server_ports.in_use(build.context, *server_ports.wanted(
            build.requested_networks), but=build.server_ids)
        lacking = [*map(str, in_use), *accelerators.lacking(
            build.context, build.request_spec[0].flavor)]
        if lacking:
            # Its servers are alike, and only one of them can have it.
            return ' '.join(lacking)
        taken = hostnames.taken(build.context, {
            server_id: request.instance.hostname
            for server_id, request in waiting.items()})
        build.request_spec = [spec for spec in build.request_spec
                              if spec.instance_uuid not in taken]
        if not build.request_spec:
            return ' '.join(taken.values())
        count, why = nova_quota.admitted(
            build.context.elevated(), build.request_spec)
        build.request_spec = [
            spec for spec in build.request_spec[:count]
            if reserved_state.unmark(waiting[spec.instance_uuid])]
        build.build_requests = [
            waiting[server_id] for server_id in build.server_ids]
        if build.request_spec:
            _cast(build, gate)
        return ' '.join(filter(None, [*taken.values(), why]))

    def cast(self, build: build_calls.BuildCall, gate: cloud_api.Gate) -> None:
        """Cast the build of the current request, which needs no preparation,
        as Nova's API has just done all of it.
        """
        _cast(build, gate)

    def preflight(self, call: str, credential: str | None) -> list[str]:
        """Return why a deferred build could not be done now."""
        build = build_calls.load(call)
        if credential is not None:
            try:
                build.renew(self._access(
                    credential, as_owner=build.makes_what_is_the_users))
            except errors.TrustUnavailable as exc:
                # All other checks need a token of the user.
                return [f'{exc}.']
        # Bounded by server, so that a slow check does not block the others.
        return self._within(f'What server {build.server_ids[0]} needs',
                            build_preflight.lacking, build)

    def _check_up(self, build: build_calls.BuildCall) -> None:
        """Check that one of the hosts that may be used is up.

        :raises CloudUnavailable: if none is: Nova would give up at once
        """
        try:
            usable = server_demand.demand_of(
                build.context.elevated(), build.request_spec,
                pool=pool.lends(len(build.request_spec))).hosts or ()
        except server_demand.NoSuchHost as exc:
            raise errors.CloudUnavailable(
                f'None of the hosts may be used now: {exc}') from exc
        for fresh in False, True:
            known, up = self._hosts(fresh)
            if any(host.uuid in usable and host.service_host in up
                   for host in known):
                return
        raise errors.CloudUnavailable(
            'None of the hosts that its servers may use is up')

    def hold(self, server_ids: ty.Collection[str]) -> None:
        """Show servers that :meth:`send` did not send as RESERVED again."""
        context = nova_context.get_admin_context()
        for server_id in server_ids:
            try:
                reserved_state.mark(objects.BuildRequest.get_by_instance_uuid(
                    context, server_id))
            except exception.BuildRequestNotFound:
                LOG.debug('Server %s was deleted meanwhile', server_id)

    def revoke(self, credential: str) -> None:
        """Delete the trust of a user."""
        self._trusts.revoke(credential)

    def credentials(self) -> set[str]:
        """Return all trusts that users have given us."""
        return self._trusts.held()

    def traces(self, server_ids: ty.Collection[str],
               ) -> dict[str, cloud_api.BuildTrace]:
        """Return the traces of builds that no conductor has finished.

        The conductors share one queue: if one of them answers, everything that
        was sent before has been received, or is lost.
        """
        late = stranded_builds.on_the_way(server_ids)
        if not late:
            return {}
        self._ping(conductor_rpcapi.RPC_TOPIC)
        return stranded_builds.traces(late)

    def evacuate(self, server_id: str, lease_id: str,
                 deadline: cloud_api.Deadline) -> str:
        """See :meth:`.server_migration.ServerMigration.evacuate`.

        Nova records an evacuation before it sends it. If it is never sent, the
        host destroys the server when it is up again.
        """
        self._ping_first()
        return super().evacuate(server_id, lease_id, deadline)

    def move(self, server_id: str, host: str | None, lease_id: str,
             deadline: cloud_api.Deadline) -> str:
        """See :meth:`.server_migration.ServerMigration.move`.

        Nova sets the task of a migration before it sends it. If that is never
        sent, the server keeps the task for minutes.
        """
        self._ping_first()
        return super().move(server_id, host, lease_id, deadline)

    def reset_lost_task(self, server_id: str,
                        check: cloud_api.Check = cloud_api.always) -> None:
        """Reset the task of a server if its request was lost. If a conductor
        answers, everything that was sent before has been received, or is lost.

        :raises CloudUnavailable: if none answers, or its cell does not
        """
        if self._in_cell(lost_tasks.may_be_lost, server_id):
            self._ping(conductor_rpcapi.RPC_TOPIC)
            self._in_cell(lost_tasks.reset_of, server_id, check)

    def _ping_first(self) -> None:
        """:raises NotSent: if no nova-conductor answers"""
        try:
            self._ping(conductor_rpcapi.RPC_TOPIC)
        except errors.CloudUnavailable as exc:
            raise errors.NotSent(str(exc)) from exc

    def mark_failed(self, server_id: str) -> None:
        """Set a server whose build is stranded to ERROR."""
        self._in_cell(stranded_builds.mark_failed, server_id)

    def look(self, server_id: str) -> cloud_api.ObservedServer:
        """Return the state of a server in Nova now.

        :raises CloudUnavailable: if its cell does not answer
        """
        return self._in_cell(server_state.at_server, server_id)

    def release(self, server_id: str) -> None:
        """Remove what binds a server to a lease.

        :raises CloudUnavailable: if Nova does not answer
        """
        flavors.release(server_id)

    def forget(self, server_id: str) -> None:
        """Delete Nova's records of a server that was never built."""
        self._in_cell(unbuilt_leftovers.forget, server_id)


def _ping(topic: str) -> None:
    """Check that one of the services of a topic answers.

    :raises CloudUnavailable: if none does
    """
    # BaseAPI.ping() retries without a limit while the message bus is down. One
    # retry is for a connection from before a restart of the bus.
    client = baserpc.BaseAPI(topic).client.prepare(
        timeout=_PING_TIMEOUT, retry=1)
    try:
        client.call(nova_context.get_admin_context(), 'ping', arg='blazar')
    except Exception as exc:
        # oslo.messaging lets through some errors of its libraries.
        raise errors.CloudUnavailable(
            f'nova-{topic} does not answer: {exc}') from exc


class _NotSent(Exception):
    """The gate refuses, or the permit to send a build has expired."""


def _cast(build: build_calls.BuildCall, gate: cloud_api.Gate) -> None:
    """Send a call, if the gate permits it and the permit is still valid."""

    def ask() -> None:
        deadline = gate(build.server_ids)
        if deadline is None:
            raise _NotSent
        if deadline.passed():
            LOG.error('Servers %s: this process was stopped between the '
                      'permit to dispatch their build and the dispatch. The '
                      'build is dispatched later, as a lost build.',
                      ', '.join(build.server_ids))
            raise _NotSent

    with contextlib.suppress(_NotSent):
        build.send(gated_casts.task_api(ask))
