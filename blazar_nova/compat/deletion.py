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

"""When, and in whose name, a server is asked to go.

Nova's own record of what was done to a server says what has been tried, so
that it does not matter which process tries next.
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

from blazar_core.common import errors
from blazar_nova.compat import acting
from blazar_nova.compat import again
from blazar_nova.compat import calls

__all__ = ['Deleting', 'Step', 'next_step']

LOG = logging.getLogger(__name__)

#: Seconds after which a deletion that seems to be under way is asked for
#: again; each further time twice as many.
_ASK_AGAIN = 60

#: Seconds between two attempts at the most.
_LONGEST = 600

#: How often keystone is asked for a token before a server is deleted
#: without: for a minute or two.
_TRIES = 30

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


class Deleting(acting.Acting):
    """What of :class:`blazar_core.cloud.Cloud` is about deletions.

    :param trusts: what lets it act for users
    """

    def __init__(self, trusts: acting.Trusts) -> None:
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
            again.finish(server_id)
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
            calls.in_name_of(context, access).elevated())

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
        instance = self._compute_api.get(context, server_id)
        if instance.task_state == task_states.DELETING:
            # Nova would only say that it is already being deleted.
            instance.task_state = None
        self._compute_api.delete(context, instance)


def next_step(context: ty.Any, instance: ty.Any) -> Step:
    """Decide the next step of the deletion of a server.

    :param context: the one that the instance was read with
    """
    # One that waits for its build is in no cell, and goes at once.
    asked = [] if context.cell_uuid is None else [
        action for action in objects.InstanceActionList.get_by_instance_uuid(
            context, instance.uuid)
        if action.action == instance_actions.DELETE]
    if not asked:
        return Step(_since(instance) if instance.task_state ==
                    task_states.DELETING else 0, True, False)
    return _after(asked[0], len(asked))


def _after(last: ty.Any, count: int) -> Step:
    """What follows upon an attempt.

    One that failed is tried in the other way, at once if it was the first.
    What is neither done nor failed is tried in the same way: the message
    may be lost, or its deletion takes long.

    :param count: how many there were, the last one counted
    """
    failed = last.message == 'Error'
    by_somebody = last.user_id is not None
    pause = 0 if failed and count == 1 else min(
        _ASK_AGAIN * 2 ** min(count - 1, 10), _LONGEST)
    return Step(max(0, pause - _age(last.updated_at or last.start_time)),
                by_somebody != failed, failed)


def _since(instance: ty.Any) -> float:
    """Seconds until a deletion of which nothing is written is asked again."""
    return max(0, _ASK_AGAIN - _age(instance.updated_at)) if (
        instance.updated_at) else 0


def _age(when: ty.Any) -> float:
    """Seconds since a date."""
    return float(timeutils.delta_seconds(
        when.replace(tzinfo=None), timeutils.utcnow()))
