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

"""Servers, as Nova has them: looked at, built, deleted."""

import contextlib
import functools
import typing as ty

from keystoneauth1 import exceptions as keystone_exceptions
from nova import baserpc
from nova.compute import api as compute_api
from nova.compute import task_states
from nova import conductor
from nova.conductor import rpcapi as conductor_rpcapi
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler import rpcapi as scheduler_rpcapi
from oslo_log import log as logging

from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_nova.compat import again
from blazar_nova.compat import bounded
from blazar_nova.compat import calls
from blazar_nova.compat import deletion
from blazar_nova.compat import demand
from blazar_nova.compat import flavors
from blazar_nova.compat import hosts
from blazar_nova.compat import keeping
from blazar_nova.compat import leftovers
from blazar_nova.compat import look
from blazar_nova.compat import migrating
from blazar_nova.compat import quota
from blazar_nova.compat import reserved
from blazar_nova.compat import stranded

__all__ = ['NovaCloud']

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')
R = ty.TypeVar('R')

#: How often keystone is asked for a token before a server is deleted
#: without: for a minute or two.
_TRIES = 30

#: The owner of a lease may not, or not any more.
_NOT_ALLOWED = (exception.Unauthorized, exception.Forbidden,
                keystone_exceptions.ClientException)

#: The service that is asked for images: not the cell, which others need.
_GLANCE = 'Glance'

#: Seconds that a service has to answer a ping.
_PING_TIMEOUT = 10


class Trusts(ty.Protocol):
    """See :class:`blazar_nova.parts.credentials.Credentials`."""

    def is_configured(self) -> bool:
        ...

    def access(self, trust_id: str) -> ty.Any:
        ...

    def revoke(self, trust_id: str) -> None:
        ...

    def held(self) -> set[str]:
        ...

    def service(self) -> ty.Any:
        ...


class NovaCloud(migrating.Migrating):
    """What the core needs of a cloud, done with Nova.

    For any process that has read nova.conf and has access to the API
    database and the cells.

    :param trusts: what lets it act for users
    """

    def __init__(self, trusts: Trusts) -> None:
        self._trusts = trusts
        #: The service hosts of the hosts, by their uuids.
        self._services: dict[str, str] = {}
        #: How often the token of an owner was waited for, by server.
        self._waited: dict[str, int] = {}
        self._within = bounded.Bounded()

    def _in_cell(self, work: ty.Callable[ty.Concatenate[str, P], R],
                 server_id: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Do something about a server, in the time that its cell has.

        :raises CloudUnavailable: when the cell does not answer
        """
        its = self._within(bounded.API, again.mapping,
                           nova_context.get_admin_context(), server_id)
        cell = None if its is None else its.cell_mapping
        return self._within(
            bounded.API if cell is None else f'Cell {cell.name or cell.uuid}',
            work, server_id, *args, **kwargs)

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: clouds.Gate) -> str:
        """Cast a held call for those of its servers that still wait.

        A second cast of the same server would orphan a running guest, so
        the gate comes last, and nothing that could take its time comes after
        it; the cast is never repeated.
        """
        build = calls.load(call)
        if credential is not None:
            build.renew(self._trusts.access(credential))
        # Without one of these no host is found or even looked for; what else
        # a build needs takes messages, and waits in a queue.
        hosts.ask_placement('/')
        _ping(conductor_rpcapi.RPC_TOPIC)
        _ping(scheduler_rpcapi.RPC_TOPIC)
        waiting = {server_id: request for server_id in build.server_ids
                   if server_id in server_ids and
                   (request := again.waiting(build, server_id))}
        build.request_spec = [spec for spec in build.request_spec
                              if spec.instance_uuid in waiting]
        if not waiting:
            return ''
        self._check_up(build)
        count, why = quota.admitted(
            build.context.elevated(), build.request_spec)
        build.request_spec = [
            spec for spec in build.request_spec[:count]
            if reserved.unmark(waiting[spec.instance_uuid])]
        build.build_requests = [
            waiting[server_id] for server_id in build.server_ids]
        if build.request_spec:
            _cast(build, gate)
        return why

    def _check_up(self, build: calls.BuildCall) -> None:
        """Make sure that one of the hosts that may be used is up.

        :raises CloudUnavailable: when none is: Nova would give up at once
        """
        try:
            usable = demand.demand_of(
                build.context.elevated(), build.request_spec).hosts or ()
        except demand.NoSuchHost as exc:
            raise errors.CloudUnavailable(
                f'None of the hosts may be used now: {exc}') from exc
        up = hosts.services_up()
        if not any(self._services.get(host) in up for host in usable):
            self._services = {host.uuid: host.service_host
                              for host in hosts.all_hosts()[0]}
        if not any(self._services.get(host) in up for host in usable):
            raise errors.CloudUnavailable(
                'None of the hosts that its servers may use is up')

    def hold(self, server_ids: ty.Collection[str]) -> None:
        """Show servers as RESERVED again that :meth:`send` did not send."""
        context = nova_context.get_admin_context()
        for server_id in server_ids:
            try:
                reserved.mark(objects.BuildRequest.get_by_instance_uuid(
                    context, server_id))
            except exception.BuildRequestNotFound:
                LOG.debug('Server %s was deleted meanwhile', server_id)

    def revoke(self, credential: str) -> None:
        """Give back what let us act for a user."""
        self._trusts.revoke(credential)

    def credentials(self) -> set[str]:
        """All trusts that were given to us."""
        return self._trusts.held()

    def traces(self, server_ids: ty.Collection[str],
               ) -> dict[str, clouds.Trace]:
        """What there is of the builds that no conductor has brought to an
        end.

        The conductors share one queue: when one of them answers, everything
        sent before has been taken out of it, or is lost.
        """
        late = stranded.on_the_way(server_ids)
        if not late:
            return {}
        _ping(conductor_rpcapi.RPC_TOPIC)
        return stranded.traces(late)

    def abandon(self, server_id: str) -> None:
        """Make a server whose build stands still one in ERROR."""
        self._in_cell(stranded.abandon, server_id)

    def look(self, server_id: str) -> clouds.Seen:
        """What Nova says of a server at this moment.

        :raises CloudUnavailable: when its cell does not answer
        """
        return self._in_cell(look.at_server, server_id)

    def delete(self, server_id: str, credential: str | None) -> None:
        """Ask Nova to delete a server; nothing when it is gone.

        In the name of the owner of its lease, whose are the secrets, volumes,
        images and accelerators that go with it; without a token Nova cannot
        reach all of them. Where that does not do, as Nova itself.

        :raises CloudUnavailable: when its cell does not answer
        """
        self._in_cell(self._delete, server_id, credential)

    def _delete(self, server_id: str, credential: str | None) -> None:
        context = nova_context.get_admin_context()
        try:
            step = deletion.next_step(
                context, self._compute_api.get(context, server_id))
            if step.seconds > 0:
                return
            if step.failed:
                LOG.warning('Server %s: Nova failed to delete it; trying %s',
                            server_id, 'with a token of the owner' if
                            step.as_owner else 'without a token')
            owner = self._owner(server_id, credential if step.as_owner
                                else None)
            if owner is None or not self._ask_as(owner, server_id):
                self._ask(nova_context.get_admin_context(), server_id)
        except exception.InstanceNotFound:
            # Gone, or nearly so.
            again.finish(server_id)
        except exception.InstanceInvalidState:
            # Going: the caller looks again.
            LOG.debug('Server %s is already being deleted', server_id)

    def bring(self, server_id: str, rest: clouds.Rest,
              credential: str | None) -> None:
        """Ask Nova to keep a server like this; nothing when it is gone.

        As its owner where glance is needed, else as Nova itself.

        :raises CloudUnavailable: when its cell does not answer, or Nova does
            not do that to it now
        :raises NotDelegated: when it takes the owner's name, and that cannot
            be had
        :raises Forbidden: when it takes that of the owner of another project
        """
        if rest is clouds.Rest.SHELVED:
            self._within(_GLANCE, self._bring, server_id, rest, credential)
        else:
            self._in_cell(self._bring, server_id, rest, credential)

    def _bring(self, server_id: str, rest: clouds.Rest,
               credential: str | None) -> None:
        context = nova_context.get_admin_context()
        with contextlib.suppress(exception.InstanceNotFound):
            if rest is clouds.Rest.SHELVED:
                context = self._in_its_name(server_id, credential)
            keeping.bring(self._compute_api, context, self._compute_api.get(
                context, server_id), rest)

    def wake(self, server_id: str, credential: str | None) -> None:
        """Ask Nova to unshelve a server, in the name of the owner.

        :raises CloudUnavailable, NotDelegated, Forbidden: as :meth:`bring`
        """
        self._within(_GLANCE, self._wake, server_id, credential)

    def _wake(self, server_id: str, credential: str | None) -> None:
        with contextlib.suppress(exception.InstanceNotFound):
            context = self._in_its_name(server_id, credential)
            keeping.wake(self._compute_api, context, self._compute_api.get(
                context, server_id, expected_attrs=['flavor', 'info_cache']))

    def copy(self, server_id: str, lease_id: str, name: str,
             credential: str | None, event: str = '', label: str = '',
             ) -> None:
        """Ask Nova for an image of a server, in the name of the owner.

        :raises CloudUnavailable, NotDelegated, Forbidden: as :meth:`bring`
        """
        self._within(
            _GLANCE, self._copy, server_id, lease_id, name, credential,
            event, label)

    def _copy(self, server_id: str, lease_id: str, name: str,
              credential: str | None, event: str, label: str) -> None:
        with contextlib.suppress(exception.InstanceNotFound):
            context = self._in_its_name(server_id, credential)
            keeping.copy(self._compute_api, context, self._compute_api.get(
                context, server_id), lease_id, name, event, label)

    def is_copied(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        """Whether an image of a server was made for a lease.

        :raises CloudUnavailable, NotDelegated: as :meth:`bring`
        """
        return self._within(
            _GLANCE, self._is_copied, server_id, lease_id, credential,
            event)

    def _is_copied(self, server_id: str, lease_id: str,
                   credential: str | None, event: str) -> bool:
        try:
            return keeping.is_copied(
                self._compute_api, self._in_its_name(server_id, credential),
                server_id, lease_id, event)
        except (exception.InstanceNotFound, errors.Forbidden):
            return False

    def _in_its_name(self, server_id: str, credential: str | None) -> ty.Any:
        """A context in the name of the owner of a lease, about a server.

        :raises Forbidden: when that is another project's: what is made of it
            would be theirs who made the lease
        """
        instance = self._compute_api.get(
            nova_context.get_admin_context(), server_id)
        access = None
        if self._trusts.is_configured():
            if credential is None:
                raise errors.NotDelegated(
                    'there is no trust of the owner of the lease')
            access = self._trusts.access(credential)
            if access.project_id != instance.project_id:
                raise errors.Forbidden(
                    f'it is of project {instance.project_id}, which did not '
                    f'make the lease')
        owner = nova_context.RequestContext(
            user_id=instance.user_id if access is None else access.user_id,
            project_id=instance.project_id)
        return (owner if access is None else calls.in_name_of(
            owner, access)).elevated()

    def release(self, server_id: str) -> None:
        """Nothing binds a server to a lease any more.

        :raises CloudUnavailable: when that cannot be done now
        """
        flavors.release(server_id)

    def _owner(self, server_id: str, credential: str | None) -> ty.Any:
        """A context in the name of the owner; None when it cannot be had.

        With the rights of an admin over the server, which may be locked.

        :raises CloudUnavailable: when it may be had soon
        """
        if credential is None or not self._trusts.is_configured():
            return None
        try:
            access = self._trusts.access(credential)
        except errors.NotDelegated as exc:
            LOG.warning('Server %s is not deleted in the name of its '
                        'owner: %s', server_id, exc)
            return None
        except Exception as exc:
            self._waited[server_id] = self._waited.get(server_id, 0) + 1
            if self._waited[server_id] < _TRIES:
                raise errors.CloudUnavailable(str(exc)) from exc
            LOG.warning('Server %s is not deleted in the name of its owner, '
                        'after %s attempts: %s', server_id,
                        self._waited.pop(server_id), exc)
            return None
        self._waited.pop(server_id, None)
        return calls.in_name_of(nova_context.RequestContext(
            user_id=access.user_id, project_id=access.project_id), access,
        ).elevated()

    def _ask_as(self, owner: ty.Any, server_id: str) -> bool:
        """Ask in the name of the owner; whether he may."""
        try:
            self._ask(owner, server_id)
        except _NOT_ALLOWED as exc:
            LOG.warning('Server %s cannot be deleted in the name of its '
                        'owner: %s', server_id, exc)
            return False
        return True

    def _ask(self, context: ty.Any, server_id: str) -> None:
        LOG.info('Server %s: deleting it %s', server_id,
                 f'in the name of user {context.user_id}' if
                 context.auth_token else 'without a token of its owner')
        instance = self._compute_api.get(context, server_id)
        if instance.task_state == task_states.DELETING:
            # Nova would only say that it is already being deleted.
            instance.task_state = None
        self._compute_api.delete(context, instance)

    def _as_service(self) -> ty.Any:
        return self._trusts.service()

    def forget(self, server_id: str) -> None:
        """Remove what Nova keeps of a server that was never built."""
        self._in_cell(leftovers.forget, server_id)

    @functools.cached_property
    def _compute_api(self) -> ty.Any:
        return compute_api.API()


def _ping(topic: str) -> None:
    """Make sure that one of the services of a topic answers.

    :raises CloudUnavailable: when none does
    """
    # BaseAPI.ping() tries for ever to reach a message bus that is away. Once
    # more is for a connection that is as old as one that was restarted.
    client = baserpc.BaseAPI(topic).client.prepare(
        timeout=_PING_TIMEOUT, retry=1)
    try:
        client.call(nova_context.get_admin_context(), 'ping', arg='blazar')
    except Exception as exc:
        # oslo.messaging lets through some of its library's.
        raise errors.CloudUnavailable(
            f'nova-{topic} does not answer: {exc}') from exc


def _cast(build: calls.BuildCall, gate: clouds.Gate) -> None:
    """Send a call, if the gate opens and it is not too late then."""
    task_api = conductor.ComputeTaskAPI()
    # Else it would wait for a message bus that is away, for as long as that
    # takes, and send when another one has sent long since. Once more is for
    # a connection that is as old as a bus that was restarted.
    task_api.conductor_compute_rpcapi.client.retry = 1
    deadline = gate(build.server_ids)
    if deadline is None:
        return
    if deadline.passed():
        LOG.error('Servers %s: this process stood still between the right to '
                  'send their build and the sending. It is not sent, and '
                  'will be as one that got lost.', ', '.join(build.server_ids))
        return
    build.send(task_api)
