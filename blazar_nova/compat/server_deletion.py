# SPDX-License-Identifier: Apache-2.0

"""When, and in whose name, a server is asked to go.

Nova's own record of what was done to a server says what has been tried, so
that it does not matter which process tries next. Only deletions that were
asked for here count: those of users, which may be undone or repeated, neither
delay nor replace one.
"""

import typing as ty

from keystoneauth1 import exceptions as keystone_exceptions
from nova.compute import instance_actions
from nova.compute import task_states
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_log import log as logging
from oslo_utils import timeutils
from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import build_calls
from blazar_nova.compat import request_context
from blazar_nova.compat import unbuilt_servers

__all__ = ['ServerDeletion', 'Step', 'next_step']

LOG = logging.getLogger(__name__)

#: Seconds after which a deletion that seems to be under way is asked for
#: again; each further time twice as many.
_ASK_AGAIN = 60

#: Seconds between two attempts at the most.
_LONGEST = 600

#: How often keystone is asked for a token before a server is deleted
#: without: for a minute or two.
_TRIES = 30

#: How the ids of the requests begin that delete servers. Nova makes those of
#: users' requests itself, with a uuid after "req-".
_OWN = 'req-blazar-'

#: The deletion of a server is under way, or its message was lost.
_DELETING = (task_states.DELETING, task_states.SOFT_DELETING)

#: Of such a server there is an image, to be brought back from.
_SHELVED = (vm_states.SHELVED, vm_states.SHELVED_OFFLOADED)

#: The owner of a lease may not, or not any more.
_NOT_ALLOWED = (exception.Unauthorized, exception.Forbidden,
                keystone_exceptions.ClientException)


class Step(ty.NamedTuple):
    """The next step of the deletion of a server.

    :ivar seconds: how long to wait before it is asked to go
    :ivar as_owner: whether it is then asked in the name of the owner of its
        lease
    :ivar failed: whether Nova has failed to delete it
    """

    seconds: float
    as_owner: bool
    failed: bool


class ServerDeletion(request_context.Acting):
    """What of :class:`blazar_core.plugins.cloud_api.Cloud` is about deletions.

    :param trusts: what lets it act for users
    """

    def __init__(self, trusts: request_context.Trusts) -> None:
        super().__init__(trusts)
        #: How often the token of an owner was waited for, by server.
        self._waited: dict[str, int] = {}

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
            instance = self._compute_api.get(context, server_id)
            step = next_step(context, instance)
            if step.seconds > 0:
                return
            if step.failed:
                LOG.warning('Server %s: Nova failed to delete it; trying %s',
                            server_id, 'with a token of the owner' if
                            step.as_owner else 'without a token')
            owner = self._owner(server_id, credential if step.as_owner
                                else None)
            if owner is None or not self._ask_as(owner, server_id):
                self._ask(self._itself(instance), server_id)
        except exception.InstanceNotFound:
            # Gone, or nearly so.
            unbuilt_servers.finish(server_id)
        except exception.InstanceInvalidState:
            # Going: the caller looks again.
            LOG.debug('Server %s is already being deleted', server_id)

    def _owner(self, server_id: str, credential: str | None) -> ty.Any:
        """A context in the name of the owner; None when it cannot be had.

        With the rights of an admin over the server, which may be locked.

        :raises CloudUnavailable: when it may be had soon
        """
        if credential is None or not self._trusts.is_configured():
            return None
        try:
            access = self._trusts.access(credential)
        except errors.TrustUnavailable as exc:
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
        return build_calls.in_name_of(nova_context.RequestContext(
            user_id=access.user_id, project_id=access.project_id), access,
        ).elevated()

    def _itself(self, instance: ty.Any) -> ty.Any:
        """The context in which Nova itself deletes a server.

        Of one that is shelved with a token of the service user: else glance
        would keep the image of it, for ever.
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
                 context.user_id else 'without a token of its owner')
        # Each has its own: Nova finds an action by it.
        context.request_id = f'{_OWN}{uuidutils.generate_uuid()}'
        instance = self._compute_api.get(context, server_id)
        if instance.task_state in _DELETING:
            # Nova would only say that it is already being deleted.
            instance.task_state = None
        # Never a soft one, which only the API asks for. force_delete() is the
        # same, but sends no versioned notification of what it deletes itself.
        self._compute_api.delete(context, instance)


def next_step(context: ty.Any, instance: ty.Any) -> Step:
    """Decide the next step of the deletion of a server.

    :param context: the one that the instance was read with
    """
    # One that waits for its build is in no cell, and goes at once.
    asked = [] if context.cell_uuid is None else [
        action for action in objects.InstanceActionList.get_by_instance_uuid(
            context, instance.uuid)
        if action.action == instance_actions.DELETE and
        (action.request_id or '').startswith(_OWN)]
    if not asked:
        return Step(0, True, False)
    return _after(asked[0], len(asked), instance)


def _after(last: ty.Any, count: int, instance: ty.Any) -> Step:
    """Return what follows upon an attempt.

    One that failed is tried in the other way, at once if it was the first.
    What is neither done nor failed is tried in the same way: the message
    may be lost, or its deletion takes long. If the server is neither being
    deleted nor in ERROR, where Nova leaves it after a failure, something has
    come in between, such as its user: the next attempt follows at once.

    :param count: how many there were, the last one counted
    """
    failed = last.message == 'Error'
    by_somebody = last.user_id is not None
    # A server that is nearly gone is DELETED, without a task.
    is_back = instance.task_state not in _DELETING and (
        instance.vm_state not in (vm_states.ERROR, vm_states.DELETED))
    pause = 0 if is_back or failed and count == 1 else min(
        _ASK_AGAIN * 2 ** min(count - 1, 10), _LONGEST)
    return Step(_left(last, pause), by_somebody != failed, failed)


def _left(last: ty.Any, pause: float) -> float:
    """Seconds until a pause after an attempt is over.

    An attempt is changed by any service of Nova, whose clock may be ahead.
    It is started by a process of ours: by the clock that is asked here.
    """
    now = timeutils.utcnow()
    ages = [timeutils.delta_seconds(when.replace(tzinfo=None), now)
            for when in (last.updated_at, last.start_time) if when is not None]
    left = pause - next((age for age in ages if age >= 0), ages[-1])
    return min(left, pause) if clocks.is_within(left, 0, 2 * pause) else 0
