# SPDX-License-Identifier: Apache-2.0

"""Actions that keep servers at the end of their lease, or images of them."""

import contextlib
import functools
import typing as ty

from keystoneauth1 import exceptions as keystone_exceptions
from nova.compute import instance_actions
from nova.compute import task_states
from nova.compute import utils as compute_utils
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova.image import glance
from nova import objects
from nova.volume import cinder
from oslo_log import log as logging
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import gated_casts
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import request_context
from blazar_nova.compat import server_deletion
from blazar_nova.compat import volume_images

LOG = logging.getLogger(__name__)

#: The resting states of servers, by Nova's vm_state.
RESTS = {
    vm_states.STOPPED: cloud_api.RestingState.STOPPED,
    vm_states.SUSPENDED: cloud_api.RestingState.SUSPENDED,
    # Its memory is kept, and it may be resumed.
    vm_states.PAUSED: cloud_api.RestingState.SUSPENDED,
    # It is off, but still on its host.
    vm_states.SHELVED: cloud_api.RestingState.STOPPED,
    vm_states.SHELVED_OFFLOADED: cloud_api.RestingState.SHELVED,
}
#: Errors if a service that Nova needs does not answer.
_NO_ANSWER = (exception.CinderConnectionFailed,
              exception.GlanceConnectionFailed, exception.ServiceUnavailable)
#: Errors of clients that Nova passes on as they are, as if there is no
#: quota left for an image or a snapshot.
_OF_CLIENTS = (cinder.cinder_exception.ClientException,
               glance.glanceclient.exc.HTTPException,
               keystone_exceptions.ClientException)
#: Their status codes if that depends on the user: bad requests, no rights,
#: and quotas.
_REFUSED = (400, 403, 413)
#: The states in which Nova refuses actions of an end, until :meth:`.unblock`.
BLOCKING = frozenset({vm_states.RESIZED, vm_states.RESCUED, vm_states.ERROR,
                      vm_states.SHELVED})
#: The properties of an image with the lease and the server it was created for.
_LEASE, _SERVER = 'blazar_lease', 'blazar_server'
#: The property with the event. A server that is booted from an image passes
#: the image's properties on, so images of an end need a value as well.
_EVENT, _END = 'blazar_event', 'end_lease'
#: The longest name of an image.
_LONGEST_NAME = 255
#: The prefix of the request ids of the actions of an end.
_OWN = 'req-end-'
#: The service that image requests are bounded by: not the cell, which other
#: calls need. Snapshots of volumes are bounded by project, as they last as
#: long as a user has volumes and lets the agent in the guest take.
_GLANCE, _VOLUMES = 'Glance', 'A snapshot of volumes of project {}'


class EndActions(request_context.Acting):
    """The part of :class:`blazar_core.plugins.cloud_api.Cloud` that keeps
    servers, and images of them.
    """

    def set_resting_state(self, server_id: str, rest: cloud_api.RestingState,
                          credential: str | None, lease_id: str = '',
                          check: cloud_api.Check = cloud_api.always) -> None:
        """Ask Nova to stop, suspend or shelve a server; ignores a deleted one.

        In the name of its owner if glance is needed, else as Nova itself.

        :raises CloudUnavailable: if its cell does not answer, or Nova refuses
            the action now
        :raises TrustUnavailable: if the owner's name is needed and cannot be
            used
        :raises Forbidden: if the server is not of the project of the owner
        """
        with contextlib.suppress(exception.InstanceNotFound):
            if rest is cloud_api.RestingState.SHELVED:
                self._within(_GLANCE, self._set_resting_state, server_id,
                             self._in_its_name(server_id, credential), rest,
                             lease_id, check)
            else:
                self._in_cell(self._set_resting_state, server_id,
                              nova_context.get_admin_context(), rest,
                              lease_id, check)

    def _set_resting_state(self, server_id: str, context: ty.Any,
                           rest: cloud_api.RestingState, lease_id: str,
                           check: cloud_api.Check) -> None:
        if lease_id:
            context.request_id = _own_request(lease_id)
        instance = self._compute_api.get(context, server_id)
        check()
        _set_resting_state(self._compute_api, context, instance, rest)

    def unblock(self, server_id: str, lease_id: str,
                check: cloud_api.Check = cloud_api.always) -> None:
        """Ask Nova to bring a server out of a state in which it refuses
        actions of an end; see
        :meth:`blazar_core.plugins.cloud_api.Cloud.unblock`.

        :raises CloudUnavailable: if its cell does not answer, or Nova refuses
            the action now
        """
        self._in_cell(self._unblock, server_id, lease_id, check)

    def _unblock(self, server_id: str, lease_id: str,
                 check: cloud_api.Check) -> None:
        context = nova_context.get_admin_context()
        context.request_id = _own_request(lease_id)
        with contextlib.suppress(exception.InstanceNotFound):
            instance = self._compute_api.get(context, server_id)
            check()
            _unblock(self._compute_api, context, instance)

    def requests(self, server_id: str, lease_id: str) -> ty.Mapping[str, int]:
        """Return how often each action was requested for the end of a lease;
        see :meth:`blazar_core.plugins.cloud_api.Cloud.requests`.

        :raises CloudUnavailable: if its cell does not answer
        """
        return self._in_cell(self._requests, server_id, lease_id)

    def _requests(self, server_id: str, lease_id: str) -> dict[str, int]:
        context = nova_context.get_admin_context()
        try:
            # The context then is of the cell of the server.
            self._compute_api.get(context, server_id)
        except exception.InstanceNotFound:
            return {}
        if context.cell_uuid is None:
            return {}
        own = (f'{_OWN}{lease_id}', server_deletion.OWN)
        made: dict[str, int] = {}
        for action in objects.InstanceActionList.get_by_instance_uuid(
                context, server_id):
            if (action.request_id or '').startswith(own):
                # A deletion may be repeated without a limit, and counts as
                # requested even if it has not begun.
                made[action.action] = made.get(action.action, 0) + (
                    action.action == instance_actions.DELETE or bool(
                        objects.InstanceActionEventList.get_by_action(
                            context, action.id).objects))
        return made

    def unshelve(self, server_id: str, credential: str | None,
                 deadline: cloud_api.Deadline) -> None:
        """Ask Nova to unshelve a server, in the name of the owner.

        :raises CloudUnavailable, TrustUnavailable, Forbidden: as
            :meth:`set_resting_state`
        """
        with contextlib.suppress(exception.InstanceNotFound):
            self._within(_GLANCE, self._unshelve, server_id,
                         self._in_its_name(server_id, credential), deadline)

    def _unshelve(self, server_id: str, context: ty.Any,
                  deadline: cloud_api.Deadline) -> None:
        instance = self._compute_api.get(
            context, server_id, expected_attrs=['flavor', 'info_cache'])

        def still() -> None:
            if deadline.passed():
                # Nova sets the task before it sends the request.
                _reset(instance)
                raise errors.CloudUnavailable(
                    f'Server {server_id} is not brought back yet: this '
                    f'process stood still.')

        _unshelve(gated_casts.compute_api_of(still), context, instance)

    def create_image(self, server_id: str, lease_id: str, name: str,
                     credential: str | None, event: str = '', label: str = '',
                     check: cloud_api.Check = cloud_api.always) -> None:
        """Ask Nova for an image of a server, in the name of the owner.

        :raises CloudUnavailable, TrustUnavailable, Forbidden: as
            :meth:`set_resting_state`
        """
        with contextlib.suppress(exception.InstanceNotFound):
            context = self._in_its_name(server_id, credential)
            if not event:
                context.request_id = _own_request(lease_id)
            work = self._within(
                _GLANCE, self._create_image, server_id, context, lease_id,
                name, event, label, check)
            if work is not None:
                self._within(_VOLUMES.format(context.project_id), work)

    def _create_image(self, server_id: str, context: ty.Any, lease_id: str,
                      name: str, event: str, label: str,
                      check: cloud_api.Check) -> ty.Callable[[], None] | None:
        """Ask Nova for an image of a server, unless there is nothing to do;
        return what is left to do if the server has its disk on a volume.
        """
        instance = self._compute_api.get(context, server_id)
        if not _needs_image(self._compute_api, context, instance, lease_id,
                            check, event):
            return None
        if compute_utils.is_volume_backed_instance(context, instance):
            return functools.partial(
                _create_volume_image, context, instance, lease_id, name, check,
                event, label)
        _create_image(self._compute_api.snapshot, context, instance, lease_id,
                      name, check, event, label)
        return None

    def has_image(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        """Return whether an image of a server was created for a lease.

        :raises CloudUnavailable, TrustUnavailable: as
            :meth:`set_resting_state`
        """
        try:
            context = self._in_its_name(server_id, credential)
        except (exception.InstanceNotFound, errors.Forbidden):
            return False
        return self._within(_GLANCE, _has_image, self._compute_api, context,
                            server_id, lease_id, event)


def _set_resting_state(api: ty.Any, context: ty.Any, instance: ty.Any,
                       rest: cloud_api.RestingState) -> None:
    """Ask Nova to stop, suspend or shelve a server, unless it has another
    task.

    :raises CloudUnavailable: if Nova refuses the action in its state
    """
    if instance.task_state is not None:
        return
    work = {cloud_api.RestingState.STOPPED: api.stop,
            cloud_api.RestingState.SUSPENDED: api.suspend,
            cloud_api.RestingState.SHELVED: api.shelve_offload if (
                instance.vm_state == vm_states.SHELVED) else api.shelve}[rest]
    LOG.info('Server %s: asking Nova to have it %s', instance.uuid, rest.value)
    try:
        _ask(work, context, instance)
    except errors.CloudUnavailable as exc:
        # Otherwise another request has set the task that the server has.
        if not isinstance(exc.__cause__, exception.UnexpectedTaskStateError):
            _reset(instance)
        raise


def _reset(instance: ty.Any) -> None:
    """Reset the task that Nova has set for a request that it then refused: it
    sets it before it asks glance for an image.
    """
    task, instance.task_state = instance.task_state, None
    with contextlib.suppress(exception.NovaException):
        instance.save(expected_task_state=[task])


def _unblock(api: ty.Any, context: ty.Any, instance: ty.Any) -> None:
    """Ask Nova to bring a server out of a state in which it refuses other
    actions, unless it has another task.

    :raises CloudUnavailable: if Nova refuses that as well
    """
    if instance.task_state is not None or instance.vm_state not in BLOCKING:
        return
    work = {vm_states.RESIZED: functools.partial(_confirm, api),
            vm_states.RESCUED: api.unrescue,
            # Nova can stop a server in ERROR, which then is STOPPED.
            vm_states.ERROR: api.stop,
            vm_states.SHELVED: api.shelve_offload}[instance.vm_state]
    LOG.info('Server %s: asking Nova to bring it out of the state %s',
             instance.uuid, instance.vm_state)
    _ask(work, context, instance)


def _confirm(api: ty.Any, context: ty.Any, instance: ty.Any) -> None:
    """Ask Nova to confirm a resize, again if such a request was lost.

    :raises CloudRefusal: if it is being confirmed
    """
    try:
        api.confirm_resize(context, instance)
    except exception.MigrationNotFoundByStatus:
        migration = lost_tasks.lost_confirmation(context, instance)
        if migration is None:
            raise errors.CloudRefusal(
                'Nova is confirming its resize.') from None
        api.confirm_resize(context, instance, migration)


def _unshelve(api: ty.Any, context: ty.Any, instance: ty.Any) -> None:
    """Ask Nova to unshelve a shelved server, unless it has another task.

    :param context: of a user who may use its image
    :raises CloudUnavailable: if Nova refuses the action in its state
    """
    if instance.task_state is None and instance.vm_state in (
            vm_states.SHELVED, vm_states.SHELVED_OFFLOADED):
        LOG.info('Server %s: asking Nova to unshelve it', instance.uuid)
        _ask(api.unshelve, context, instance)


def _needs_image(api: ty.Any, context: ty.Any, instance: ty.Any,
                 lease_id: str, check: cloud_api.Check, event: str) -> bool:
    """Return whether an image of a server has to be requested: the server has
    no other task, and no image exists.

    :param context: in the name of the image's owner
    :param check: called right before each change, as glance may answer late
    :param event: the event at which it is created; empty: the end of the lease
    """
    if instance.task_state is not None:
        if instance.task_state == task_states.IMAGE_SNAPSHOT_PENDING:
            check()
            lost_tasks.reset(context, instance)
        return False
    for image in _images(api, context, instance.uuid, lease_id, event):
        if image['status'] == 'active':
            return False
        # The server has no task, so the process that created this has failed.
        check()
        _ask(api.image_api.delete, context, image['id'])
    return True


def _create_image(work: ty.Callable[..., ty.Any], context: ty.Any,
                  instance: ty.Any, lease_id: str, lease_name: str,
                  check: cloud_api.Check, event: str, label: str) -> None:
    """Ask Nova for an image of a server.

    :param label: the last part of its name
    :raises CloudUnavailable: if Nova refuses the image in its state
    """
    last = label and f'-{label}'
    name = f'{lease_name}-{instance.display_name}'[
        :_LONGEST_NAME - len(last)] + last
    check()
    LOG.info('Server %s: making the image %s of it', instance.uuid, name)
    _ask(work, context, instance, name, extra_properties={
        _LEASE: lease_id, _SERVER: instance.uuid, _EVENT: event or _END})


def _create_volume_image(context: ty.Any, *args: ty.Any) -> None:
    """Ask Nova for an image of a server that has its disk on a volume.

    :param args: as of :func:`_create_image`, from the context on
    :raises CloudUnavailable: as that
    """
    image = volume_images.VolumeImage()
    try:
        _create_image(image.create, context, *args)
    except errors.CloudUnavailable as exc:
        # Glance may have an image of which it has not told.
        if not image.asked or isinstance(exc, errors.CloudRefusal):
            image.undo(context)
        raise


def _has_image(api: ty.Any, context: ty.Any, server_id: str, lease_id: str,
               event: str = '') -> bool:
    """Return whether an image of a server for a lease is active.

    :param event: the event at which it was created; empty: the end
    """
    return any(image['status'] == 'active' for image in _images(
        api, context, server_id, lease_id, event))


def _images(api: ty.Any, context: ty.Any, server_id: str, lease_id: str,
            event: str) -> list[dict[str, ty.Any]]:
    """Return the images of a server requested at an event of a lease.

    Images without an event are of the end, as the previous release made them.
    Images of other owners may have the same properties, and are skipped.
    """
    mine = {_SERVER: server_id, _LEASE: lease_id}
    return [image for image in _ask(
        api.image_api.get_all, context, filters=dict(mine))
        if mine.items() <= image['properties'].items() and
        image['properties'].get(_EVENT, _END) == (event or _END) and
        image.get('owner', context.project_id) == context.project_id]


def _ask(work: ty.Callable[..., ty.Any], *args: ty.Any, **kwargs: ty.Any,
         ) -> ty.Any:
    try:
        return work(*args, **kwargs)
    except _NO_ANSWER as exc:
        raise errors.CloudUnavailable(str(exc)) from exc
    except exception.NovaException as exc:
        raise errors.CloudRefusal(f'Nova refuses: {exc}') from exc
    except _OF_CLIENTS as exc:
        status = getattr(exc, 'http_status', getattr(exc, 'code', None))
        if status in _REFUSED:
            raise errors.CloudRefusal(
                f'A service that Nova needs refuses: {exc}') from exc
        raise errors.CloudUnavailable(
            f'A service that Nova needs has failed: {exc}') from exc


def _own_request(lease_id: str) -> str:
    """Return a request id by which the instance actions of a server, which
    its owner sees, show that a request was made for the end of a lease.
    """
    return f'{_OWN}{lease_id}-{uuidutils.generate_uuid()[:8]}'
