# SPDX-License-Identifier: Apache-2.0

"""Deletion of servers: when it is requested, and in whose name.

Nova's instance actions record what has been tried, so that any process can
make the next attempt. Only deletions that were requested here count: those by
users, which may be undone or repeated, neither delay nor replace one.
"""

import typing as ty

from keystoneauth1 import exceptions as keystone_exceptions
from nova.compute import instance_actions
from nova.compute import task_states
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova.network import neutron as network
from nova import objects
from oslo_log import log as logging
from oslo_utils import timeutils
from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import build_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import network_api
from blazar_nova.compat import request_context
from blazar_nova.compat import unbuilt_servers

LOG = logging.getLogger(__name__)

#: Seconds after which a deletion that seems to be in progress is requested
#: again; doubled each further time.
_ASK_AGAIN = 60

#: The most seconds between two attempts.
_LONGEST = 600

#: Seconds for which a deletion waits for a token of the owner, and until Nova
#: has created a guest: other leases wait for the capacity for a limited time.
_PATIENCE = 90

#: The prefix of the request ids of our deletions. Nova creates those of users'
#: requests itself, with a uuid after "req-".
OWN = 'req-blazar-'

#: The deletion of a server is in progress, or its message was lost.
_DELETING = (task_states.DELETING, task_states.SOFT_DELETING)

#: Tasks in which nova-compute may be about to create a guest, without the lock
#: that a deletion takes. Nova would delete the server before its guest exists,
#: and find the guest half an hour later.
_CREATING = (*task_states.resizing_states, *task_states.rebuild_states,
             task_states.RESIZE_REVERTING, task_states.MIGRATING)

#: States of servers with an image from which they can be unshelved.
_SHELVED = (vm_states.SHELVED, vm_states.SHELVED_OFFLOADED)

#: What deletions that Nova does not leave to nova-compute are bounded by: they
#: last as long as a server has volumes, which is up to its user.
_LOCAL = 'The deletion of a server of project {}'

#: Why a server still exists.
_NOT_DELETED = 'Nova could not delete it: {}'

#: Errors if the owner of a lease may not delete a server, or no longer may.
_NOT_ALLOWED = (exception.Unauthorized, exception.Forbidden,
                keystone_exceptions.ClientException)


class Step(ty.NamedTuple):
    """The next step of the deletion of a server.

    :ivar seconds: the time to wait before the deletion is requested
    :ivar as_owner: whether to request it in the name of the owner of its lease
    :ivar failed: whether Nova has failed to delete it
    """

    seconds: float
    as_owner: bool
    failed: bool


class ServerDeletion(request_context.Acting):
    """The part of :class:`blazar_core.plugins.cloud_api.Cloud` that deletes.

    :param trusts: creates tokens of users
    """

    def __init__(self, trusts: request_context.Trusts,
                 clock: clocks.Clock) -> None:
        super().__init__(trusts)
        self._clock = clock
        #: Since when deletions wait, by server.
        self._waits: dict[str, float] = {}

    def delete(self, server_id: str, credential: str | None,
               check: cloud_api.Check = cloud_api.always) -> None:
        """Ask Nova to delete a server; ignores a deleted one.

        Not yet while Nova may be about to create its guest.

        In the name of the owner of its lease, to whom the secrets, volumes,
        images and accelerators belong that are deleted with it: without a
        token Nova cannot delete all of them. As Nova itself if that fails.

        :raises CloudUnavailable: if its cell does not answer
        :raises CloudRefusal: if Nova has failed to delete it; says why
        """
        try:
            self._delete(server_id, credential, check)
        except exception.InstanceNotFound:
            # Deleted, or almost.
            self._waits.pop(server_id, None)
            self._in_cell(unbuilt_servers.finish, server_id)
        except exception.InstanceInvalidState:
            # Being deleted: the caller checks again.
            LOG.debug('Server %s is already being deleted', server_id)

    def _delete(self, server_id: str, credential: str | None,
                check: cloud_api.Check) -> None:
        instance, step, is_local, fault = self._in_cell(
            self._next_step, server_id)
        if step.seconds > 0:
            if step.failed:
                raise errors.CloudRefusal(_NOT_DELETED.format(
                    fault.message if fault else 'see its instance actions.'))
            return
        if instance.task_state in _CREATING and (
                self._waited(server_id) < _PATIENCE):
            LOG.info('Server %s is deleted when Nova has finished its task %s',
                     server_id, instance.task_state)
            return

        def slow(work: ty.Callable[..., None], *args: ty.Any) -> None:
            self._within(_LOCAL.format(instance.project_id), work, *args)

        if step.failed:
            LOG.warning('Server %s: Nova failed to delete it (%s); trying %s',
                        # The message that users see may only be its class.
                        server_id, (fault and fault.details or '').strip(
                        ).rpartition('\n')[2] or 'see its instance actions',
                        'with a token of the owner' if step.as_owner
                        else 'without a token')
            slow(_free_ports, server_id, check)
        ask = slow if is_local else self._in_cell
        try:
            self._ask_in_turn(ask, instance, step, credential, check)
        except network.neutron_client_exc.NeutronClientException as exc:
            # Nova deletes the ports of a server that is on no host itself.
            slow(_free_ports, server_id, check)
            raise errors.CloudRefusal(_NOT_DELETED.format(exc)) from exc

    def _ask_in_turn(self, ask: ty.Callable[..., None], instance: ty.Any,
                     step: Step, credential: str | None,
                     check: cloud_api.Check) -> None:
        """Ask in the name of the owner, or without if that is not possible.

        :param ask: calls a function about a server within a time limit
        """
        server_id = instance.uuid
        owner = self._owner(server_id, credential if step.as_owner else None)
        if owner is None or not self._ask_as(ask, owner, server_id, check):
            ask(self._ask, server_id, self._itself(instance), check)

    def _next_step(self, server_id: str) -> tuple[ty.Any, Step, bool, ty.Any]:
        """Return a server, the next step, whether the deletion is local, and
        the InstanceFault of a failed one or None.
        """
        context = nova_context.get_admin_context()
        instance = self._compute_api.get(context, server_id)
        step = next_step(context, instance)
        return instance, step, _is_local(context, instance), (
            instance.fault if step.failed else None)

    def _waited(self, server_id: str) -> float:
        """Return for how many seconds the deletion of a server has waited."""
        now = self._clock.elapsed()
        return now - self._waits.setdefault(server_id, now)

    def _owner(self, server_id: str, credential: str | None) -> ty.Any:
        """Return a context in the name of the owner; None if there is none.

        With the rights of an admin over the server, which may be locked.

        :raises CloudUnavailable: if keystone may issue a token soon
        """
        if credential is None or not self._trusts.is_configured():
            return None
        try:
            access = self._access(credential)
        except errors.TrustUnavailable as exc:
            LOG.warning('Server %s is not deleted in the name of its '
                        'owner: %s', server_id, exc)
            return None
        except Exception as exc:
            waits = self._waited(server_id)
            if waits < _PATIENCE:
                if isinstance(exc, errors.CloudUnavailable):
                    raise
                raise errors.CloudUnavailable(str(exc)) from exc
            LOG.warning('Server %s is not deleted in the name of its owner, '
                        'for whom there was no token for %s s: %s',
                        server_id, round(waits), exc)
            return None
        self._waits.pop(server_id, None)
        return build_calls.in_name_of(nova_context.RequestContext(
            user_id=access.user_id, project_id=access.project_id), access,
        ).elevated()

    def _itself(self, instance: ty.Any) -> ty.Any:
        """Return the context in which Nova itself deletes a server.

        For a shelved server it has a token of the service user: without one,
        glance would keep the server's image.
        """
        context, access = nova_context.get_admin_context(), None
        if instance.vm_state in _SHELVED:
            try:
                access = self._as_service()
            except errors.CloudUnavailable as exc:
                LOG.warning('The image of shelved server %s stays: %s',
                            instance.uuid, exc)
        return context if access is None else (
            build_calls.in_name_of(context, access).elevated())

    def _ask_as(self, ask: ty.Callable[..., None], owner: ty.Any,
                server_id: str, check: cloud_api.Check) -> bool:
        """Ask in the name of the owner; return whether that was allowed."""
        try:
            ask(self._ask, server_id, owner, check)
        except _NOT_ALLOWED as exc:
            LOG.warning('Server %s cannot be deleted in the name of its '
                        'owner: %s', server_id, exc)
            return False
        return True

    def _ask(self, server_id: str, context: ty.Any,
             check: cloud_api.Check) -> None:
        LOG.info('Server %s: deleting it %s', server_id,
                 f'in the name of user {context.user_id}' if
                 context.user_id else 'without a token of its owner')
        # Each attempt has a request id of its own, by which Nova finds it.
        context.request_id = f'{OWN}{uuidutils.generate_uuid()}'
        instance = self._compute_api.get(context, server_id)
        if instance.task_state == task_states.RESIZE_REVERTING:
            check()
            # Nova would leave the guest on the previous host.
            lost_tasks.reset(context, instance, _PATIENCE)
        _check_source(context, instance)
        check()
        if instance.task_state in _DELETING:
            # Otherwise Nova would refuse, as it is already being deleted.
            instance.task_state = None
        # Never a soft deletion, which only the API requests. force_delete()
        # does the same, but sends no versioned notification of servers that it
        # deletes itself.
        self._compute_api.delete(context, instance)


def _check_source(context: ty.Any, instance: ty.Any) -> None:
    """Check that Nova can confirm the resize of a server, which it does before
    it deletes one: it would wait for a nova-compute that is down.

    :raises CloudRefusal: if that of its previous host is
    """
    if instance.vm_state != vm_states.RESIZED:
        return
    for status in 'finished', 'confirming':
        try:
            source = objects.Migration.get_by_instance_and_status(
                context.elevated(), instance.uuid, status).source_compute
            is_up = compute_hosts.state_of(
                objects.Service.get_by_compute_host(
                    context.elevated(), source)).up
        except (exception.MigrationNotFoundByStatus,
                exception.ComputeHostNotFound):
            # Nova knows what to do without it.
            continue
        if not is_up:
            raise errors.CloudRefusal(_NOT_DELETED.format(
                'its resize cannot be confirmed, as nova-compute on '
                f'{source} is down.'))


def _is_local(context: ty.Any, instance: ty.Any) -> bool:
    """Return whether Nova waits for other services while it deletes a server:
    it deletes ports and volumes itself if no nova-compute does, and before
    that the image of a shelved server or the source of a resized one.

    :param context: the context with which the instance was read
    """
    if instance.host is None or instance.vm_state in (
            *_SHELVED, vm_states.RESIZED):
        return True
    try:
        return not compute_hosts.state_of(
            objects.Service.get_by_compute_host(context, instance.host)).up
    except exception.ComputeHostNotFound:
        return True


def _free_ports(server_id: str, check: cloud_api.Check) -> None:
    """Remove what keeps neutron from deleting the ports of a server, such as
    a trunk, into which any member of the project can put them.
    """
    neutron = network_api.neutron()
    if not neutron.is_configured():
        return
    check()
    try:
        neutron.free_ports_of(server_id)
    except errors.CloudUnavailable as exc:
        LOG.warning('Server %s: its ports may keep Nova from deleting it: %s',
                    server_id, exc)


def next_step(context: ty.Any, instance: ty.Any) -> Step:
    """Decide the next step of the deletion of a server.

    :param context: the context with which the instance was read
    """
    # A server that waits for its build is in no cell, and deleted at once.
    asked = [] if context.cell_uuid is None else [
        action for action in objects.InstanceActionList.get_by_instance_uuid(
            context, instance.uuid)
        if action.action == instance_actions.DELETE and
        (action.request_id or '').startswith(OWN)]
    if not asked:
        return Step(0, True, False)
    return _after(asked[0], len(asked), instance)


def _after(last: ty.Any, count: int, instance: ty.Any) -> Step:
    """Return the step after an attempt.

    A failed attempt is repeated the other way, at once if it was the first. An
    attempt without a result is repeated the same way: its message may be lost,
    or the deletion may take long. If the server is neither being deleted nor
    in ERROR, the state after a failure, something has intervened, such as its
    user: the next attempt follows at once.

    :param count: the number of attempts, including the last one
    """
    failed = last.message == 'Error'
    by_somebody = last.user_id is not None
    # A server that is almost deleted is DELETED, without a task.
    is_back = instance.task_state not in _DELETING and (
        instance.vm_state not in (vm_states.ERROR, vm_states.DELETED))
    pause = 0 if is_back or failed and count == 1 else min(
        _ASK_AGAIN * 2 ** min(count - 1, 10), _LONGEST)
    return Step(_left(last, pause), by_somebody != failed, failed)


def _left(last: ty.Any, pause: float) -> float:
    """Return the seconds until a pause after an attempt is over.

    An action is updated by any service of Nova, whose clock may be ahead; its
    start is set by a process of ours, by the clock that is read here.
    """
    now = timeutils.utcnow()
    ages = [timeutils.delta_seconds(when.replace(tzinfo=None), now)
            for when in (last.updated_at, last.start_time) if when is not None]
    left = pause - next((age for age in ages if age >= 0), ages[-1])
    return min(left, pause) if clocks.is_within(left, 0, 2 * pause) else 0
