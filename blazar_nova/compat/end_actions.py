# SPDX-License-Identifier: Apache-2.0

"""What is kept of servers whose lease is over, or nears its end: themselves,
or an image.
"""

import contextlib
import typing as ty

from nova.compute import task_states
from nova.compute import utils as compute_utils
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from oslo_log import log as logging

from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import request_context
from blazar_nova.compat import timestamps

__all__ = ['EndActions', 'RESTS']

LOG = logging.getLogger(__name__)

#: In what a server is kept that is in a state of Nova's.
RESTS = {
    vm_states.STOPPED: cloud_api.RestingState.STOPPED,
    vm_states.SUSPENDED: cloud_api.RestingState.SUSPENDED,
    # Its memory is kept, and it may go on from there.
    vm_states.PAUSED: cloud_api.RestingState.SUSPENDED,
    # It is off, and on its host.
    vm_states.SHELVED: cloud_api.RestingState.STOPPED,
    vm_states.SHELVED_OFFLOADED: cloud_api.RestingState.SHELVED,
}
#: What an image says of the lease for which it was made, and of the server.
_LEASE, _SERVER = 'blazar_lease', 'blazar_server'
#: And of which event it is. A server that was booted from such an image hands
#: on what that says, so that those of an end have to say so, too.
_EVENT, _END = 'blazar_event', 'end_lease'
#: No image has a longer name.
_LONGEST_NAME = 255
#: Seconds after which nobody makes an image that was only asked for.
_LOST = 600
#: The service that is asked for images: not the cell, which others need.
_GLANCE = 'Glance'


class EndActions(request_context.Acting):
    """What of :class:`blazar_core.plugins.cloud_api.Cloud` is about keeping
    servers, and images of them.
    """

    def bring(self, server_id: str, rest: cloud_api.RestingState,
              credential: str | None) -> None:
        """Ask Nova to keep a server like this; nothing when it is gone.

        As its owner where glance is needed, else as Nova itself.

        :raises CloudUnavailable: when its cell does not answer, or Nova does
            not do that to it now
        :raises TrustUnavailable: when it takes the owner's name, and that
            cannot be had
        :raises Forbidden: when it takes that of the owner of another project
        """
        if rest is cloud_api.RestingState.SHELVED:
            self._within(_GLANCE, self._bring, server_id, rest, credential)
        else:
            self._in_cell(self._bring, server_id, rest, credential)

    def _bring(self, server_id: str, rest: cloud_api.RestingState,
               credential: str | None) -> None:
        context = nova_context.get_admin_context()
        with contextlib.suppress(exception.InstanceNotFound):
            if rest is cloud_api.RestingState.SHELVED:
                context = self._in_its_name(server_id, credential)
            _bring(self._compute_api, context, self._compute_api.get(
                context, server_id), rest)

    def wake(self, server_id: str, credential: str | None,
             deadline: cloud_api.Deadline) -> None:
        """Ask Nova to unshelve a server, in the name of the owner.

        :raises CloudUnavailable, TrustUnavailable, Forbidden: as :meth:`bring`
        """
        self._within(_GLANCE, self._wake, server_id, credential, deadline)

    def _wake(self, server_id: str, credential: str | None,
              deadline: cloud_api.Deadline) -> None:
        with contextlib.suppress(exception.InstanceNotFound):
            context = self._in_its_name(server_id, credential)
            instance = self._compute_api.get(
                context, server_id, expected_attrs=['flavor', 'info_cache'])
            if deadline.passed():
                raise errors.CloudUnavailable(
                    f'Server {server_id} is not brought back yet: this '
                    f'process stood still.')
            _wake(self._compute_api, context, instance)

    def copy(self, server_id: str, lease_id: str, name: str,
             credential: str | None, event: str = '', label: str = '',
             ) -> None:
        """Ask Nova for an image of a server, in the name of the owner.

        :raises CloudUnavailable, TrustUnavailable, Forbidden: as :meth:`bring`
        """
        self._within(
            _GLANCE, self._copy, server_id, lease_id, name, credential,
            event, label)

    def _copy(self, server_id: str, lease_id: str, name: str,
              credential: str | None, event: str, label: str) -> None:
        with contextlib.suppress(exception.InstanceNotFound):
            context = self._in_its_name(server_id, credential)
            _copy(self._compute_api, context, self._compute_api.get(
                context, server_id), lease_id, name, event, label)

    def is_copied(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        """Whether an image of a server was made for a lease.

        :raises CloudUnavailable, TrustUnavailable: as :meth:`bring`
        """
        return self._within(
            _GLANCE, self._is_copied, server_id, lease_id, credential,
            event)

    def _is_copied(self, server_id: str, lease_id: str,
                   credential: str | None, event: str) -> bool:
        try:
            return _is_copied(
                self._compute_api, self._in_its_name(server_id, credential),
                server_id, lease_id, event)
        except (exception.InstanceNotFound, errors.Forbidden):
            return False


def _bring(api: ty.Any, context: ty.Any, instance: ty.Any,
           rest: cloud_api.RestingState) -> None:
    """Ask Nova to keep a server like this; nothing while it does something
    else to it.

    :raises CloudUnavailable: when Nova does not do that to such a server
    """
    if instance.task_state is not None:
        return
    work = {cloud_api.RestingState.STOPPED: api.stop,
            cloud_api.RestingState.SUSPENDED: api.suspend,
            cloud_api.RestingState.SHELVED: api.shelve_offload if (
                instance.vm_state == vm_states.SHELVED) else api.shelve}[rest]
    LOG.info('Server %s: asking Nova to have it %s', instance.uuid, rest.value)
    _ask(work, context, instance)


def _wake(api: ty.Any, context: ty.Any, instance: ty.Any) -> None:
    """Ask Nova to bring a server back that is shelved; nothing while it does
    something to it.

    :param context: in the name of who may use its image
    :raises CloudUnavailable: when Nova does not do that to such a server
    """
    if instance.task_state is None and instance.vm_state in (
            vm_states.SHELVED, vm_states.SHELVED_OFFLOADED):
        LOG.info('Server %s: asking Nova to unshelve it', instance.uuid)
        _ask(api.unshelve, context, instance)


def _copy(api: ty.Any, context: ty.Any, instance: ty.Any, lease_id: str,
          lease_name: str, event: str = '', label: str = '') -> None:
    """Ask Nova for an image of a server; nothing while it does something to
    it, or there is one.

    :param context: in the name of the image's owner
    :param event: the one at which it is made; empty: the end of the lease
    :param label: stands last in its name
    :raises CloudUnavailable: when Nova makes none of such a server
    """
    if instance.task_state is not None:
        _give_up(instance)
        return
    for image in _images(api, context, instance.uuid, lease_id, event):
        if image['status'] == 'active':
            return
        # No process is at it any more: the one that was has failed.
        _ask(api.image_api.delete, context, image['id'])
    work = (api.snapshot_volume_backed
            if compute_utils.is_volume_backed_instance(context, instance)
            else api.snapshot)
    last = label and f'-{label}'
    name = f'{lease_name}-{instance.display_name}'[
        :_LONGEST_NAME - len(last)] + last
    LOG.info('Server %s: making the image %s of it', instance.uuid, name)
    _ask(work, context, instance, name, extra_properties={
        _LEASE: lease_id, _SERVER: instance.uuid, _EVENT: event or _END})


def _is_copied(api: ty.Any, context: ty.Any, server_id: str, lease_id: str,
               event: str = '') -> bool:
    """Whether there is an image of a server that was made for a lease.

    :param event: the one at which it was made; empty: the end
    """
    return any(image['status'] == 'active' for image in _images(
        api, context, server_id, lease_id, event))


def _images(api: ty.Any, context: ty.Any, server_id: str, lease_id: str,
            event: str) -> list[dict[str, ty.Any]]:
    """The images of a server that were asked for at an event of a lease, or
    at its end. Those of the release before do not say which.

    Those of others may say so, too.
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
    except exception.NovaException as exc:
        raise errors.CloudUnavailable(f'Nova refuses: {exc}') from exc


def _give_up(instance: ty.Any) -> None:
    """Forget an image that was asked for, if none has begun with it: what
    asked has died, or the message was lost.
    """
    if instance.task_state != task_states.IMAGE_SNAPSHOT_PENDING or (
            instance.updated_at is None or not timestamps.is_older_than(
                instance.updated_at, _LOST)):
        return
    LOG.warning('Server %s: the image that was asked for %s s ago is not '
                'being made; it is asked for once more', instance.uuid, _LOST)
    instance.task_state = None
    instance.save(expected_task_state=[task_states.IMAGE_SNAPSHOT_PENDING])
