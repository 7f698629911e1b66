# SPDX-License-Identifier: Apache-2.0

"""Tasks of servers whose request was lost.

Nova sets the task of a server before it sends the request. If the process dies
in between, or the message is lost, the server keeps the task, and Nova refuses
further requests.
"""

import contextlib
import typing as ty

from nova.compute import api as compute_api
from nova.compute import instance_actions
from nova.compute import task_states
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_log import log as logging

from blazar_core.plugins import cloud_api
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import timestamps

LOG = logging.getLogger(__name__)

#: The tasks that Nova sets for requests to a nova-conductor, each with the
#: instance action of the request.
_BY_CONDUCTOR = {
    task_states.MIGRATING: instance_actions.LIVE_MIGRATION,
    task_states.REBUILDING: instance_actions.EVACUATE,
    task_states.UNSHELVING: instance_actions.UNSHELVE}
#: These, and those that it sets for the requests of an end to nova-compute.
_PENDING = {
    **_BY_CONDUCTOR,
    task_states.IMAGE_SNAPSHOT_PENDING: instance_actions.CREATE_IMAGE,
    task_states.POWERING_OFF: instance_actions.STOP,
    task_states.SUSPENDING: instance_actions.SUSPEND,
    task_states.SHELVING: instance_actions.SHELVE,
    task_states.SHELVING_OFFLOADING: instance_actions.SHELVE_OFFLOAD,
    task_states.UNRESCUING: instance_actions.UNRESCUE}
#: Seconds after which a request that Nova has not begun with is assumed to be
#: lost.
_LOST = 600


def may_be_lost(server_id: str) -> bool:
    """Return whether the request of the task of a server may be lost."""
    with contextlib.suppress(exception.InstanceNotFound):
        return _is_old(_read(nova_context.get_admin_context(), server_id))
    return False


def reset_of(server_id: str, check: cloud_api.Check) -> None:
    """Reset the task of a server if its request was lost; see
    :meth:`blazar_core.plugins.cloud_api.Cloud.reset_lost_task`.

    A nova-conductor must have answered before.
    """
    context = nova_context.get_admin_context()
    with contextlib.suppress(exception.InstanceNotFound):
        instance = _read(context, server_id)
        check()
        reset(context, instance)


def reset(context: ty.Any, instance: ty.Any) -> None:
    """Reset the task of an instance if its request was lost.

    :param context: the context with which the instance was read
    """
    task = instance.task_state
    if not _is_old(instance) or _may_begin(context, instance):
        return
    LOG.warning('Server %s: Nova has not begun with its task %s that was '
                'requested %s s ago; the task is reset',
                instance.uuid, task, _LOST)
    if task == task_states.REBUILDING:
        fail_evacuation(context, instance.uuid)
    instance.task_state = None
    with contextlib.suppress(exception.UnexpectedTaskStateError):
        instance.save(expected_task_state=[task])


def fail_evacuation(context: ty.Any, server_id: str) -> None:
    """Record that an evacuation was not sent: otherwise the host would destroy
    the server when it is up again.
    """
    for migration in objects.MigrationList.get_by_filters(context, {
            'instance_uuid': server_id, 'status': 'accepted',
            'migration_type': 'evacuation'}):
        migration.status = 'error'
        migration.save()


def _read(context: ty.Any, server_id: str) -> ty.Any:
    return compute_api.API().get(context, server_id)


def _is_old(instance: ty.Any) -> bool:
    return instance.task_state in _PENDING and (
        instance.updated_at is not None and
        timestamps.is_older_than(instance.updated_at, _LOST))


def _may_begin(context: ty.Any, instance: ty.Any) -> bool:
    """Return whether Nova has begun with a task, or nova-compute may find its
    message when it is up again. Tasks without an action are its own.
    """
    try:
        if instance.task_state not in _BY_CONDUCTOR and (
                not compute_hosts.state_of(
                    objects.Service.get_by_compute_host(
                        context, instance.host)).up):
            return True
    except exception.ComputeHostNotFound:
        return True
    last = next(iter(objects.InstanceActionList.get_by_instance_uuid(
        context, instance.uuid, limit=1)), None)
    return last is None or last.action != _PENDING[instance.task_state] or (
        bool(objects.InstanceActionEventList.get_by_action(
            context, last.id).objects))
