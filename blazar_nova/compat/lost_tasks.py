# SPDX-License-Identifier: Apache-2.0

"""Tasks of servers whose request was lost.

Nova sets the task of a server, records an action, and then sends the request.
If the process dies in between, or the message is lost, the server keeps the
task, and Nova refuses further requests. The confirmation of a resize has no
task, but a status of its migration.

A task that was begun is not reset, although its nova-compute may have died: it
cannot be told from one that takes long.
"""

import contextlib
import typing as ty

from nova.compute import api as compute_api
from nova.compute import instance_actions
from nova.compute import task_states
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.virt import hardware
from oslo_log import log as logging

from blazar_core.plugins import cloud_api
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import timestamps

LOG = logging.getLogger(__name__)

#: The tasks that Nova sets for requests to a nova-conductor, each with the
#: instance actions of these requests.
_BY_CONDUCTOR = {
    task_states.MIGRATING: {instance_actions.LIVE_MIGRATION},
    task_states.REBUILDING: {
        instance_actions.EVACUATE, instance_actions.REBUILD},
    task_states.RESIZE_PREP: {
        instance_actions.MIGRATE, instance_actions.RESIZE},
    task_states.UNSHELVING: {instance_actions.UNSHELVE}}
#: These, and those that it sets for requests to nova-compute.
_PENDING = {
    **_BY_CONDUCTOR,
    task_states.IMAGE_BACKUP: {instance_actions.BACKUP},
    task_states.IMAGE_SNAPSHOT_PENDING: {instance_actions.CREATE_IMAGE},
    task_states.PAUSING: {instance_actions.PAUSE},
    task_states.POWERING_OFF: {instance_actions.STOP},
    task_states.POWERING_ON: {instance_actions.START},
    task_states.REBOOTING: {instance_actions.REBOOT},
    task_states.REBOOTING_HARD: {instance_actions.REBOOT},
    task_states.RESCUING: {instance_actions.RESCUE},
    task_states.RESIZE_REVERTING: {instance_actions.REVERT_RESIZE},
    task_states.RESUMING: {instance_actions.RESUME},
    task_states.SHELVING: {instance_actions.SHELVE},
    task_states.SHELVING_OFFLOADING: {instance_actions.SHELVE_OFFLOAD},
    task_states.SUSPENDING: {instance_actions.SUSPEND},
    task_states.UNPAUSING: {instance_actions.UNPAUSE},
    task_states.UNRESCUING: {instance_actions.UNRESCUE},
    task_states.UPDATING_PASSWORD: {instance_actions.CHANGE_PASSWORD}}
#: The tasks that may go on when all events of their action have finished.
_IN_STEPS = {*_BY_CONDUCTOR, task_states.RESIZE_REVERTING,
             task_states.SHELVING_OFFLOADING}
#: The actions that Nova begins only if the server has no task, so that those
#: before them are over.
_ALONE = frozenset[str]().union(*_PENDING.values())
#: Seconds after which a request that Nova has not begun with is assumed to be
#: lost.
_LOST = 600
#: Seconds after which a confirmation that a nova-compute has begun with is
#: assumed to have been interrupted, as this is the only way on: a second one
#: would set the server to ERROR.
_INTERRUPTED = 1800


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


def reset(context: ty.Any, instance: ty.Any, seconds: int | None = None,
          ) -> None:
    """Reset the task of an instance if its request was lost.

    :param context: the context with which the instance was read
    :param seconds: after which it is assumed to be lost, if not the usual ones
    """
    task = instance.task_state
    if not _is_old(instance, seconds) or _may_begin(context, instance):
        return
    LOG.warning('Server %s: Nova has not begun with its task %s that was '
                'requested at %s; the task is reset',
                instance.uuid, task, instance.updated_at)
    if task == task_states.REBUILDING:
        fail_evacuation(context, instance.uuid)
    elif task == task_states.RESIZE_REVERTING:
        _undo_revert(context, instance)
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


def _undo_revert(context: ty.Any, instance: ty.Any) -> None:
    """Record that a revert of a resize was not sent: otherwise Nova would
    neither confirm nor revert it, and, when it deletes the server, leave its
    guest and allocation on the previous host.
    """
    spec = objects.RequestSpec.get_by_instance_uuid(context, instance.uuid)
    spec.flavor = instance.flavor
    spec.numa_topology = hardware.numa_get_constraints(
        instance.flavor, instance.image_meta)
    spec.save()
    with contextlib.suppress(exception.MigrationNotFoundByStatus):
        migration = objects.Migration.get_by_instance_and_status(
            context, instance.uuid, 'reverting')
        migration.status = 'finished'
        migration.save()


def lost_confirmation(context: ty.Any, instance: ty.Any) -> ty.Any:
    """Return the Migration of a resize that Nova was to confirm, if that
    request was lost, or the nova-compute that had begun with it died; or None.

    :param context: the context with which the instance was read
    """
    try:
        migration = objects.Migration.get_by_instance_and_status(
            context, instance.uuid, 'confirming')
    except exception.MigrationNotFoundByStatus:
        return None
    last = next((one for one in _actions(context, instance)
                 if one.action == instance_actions.CONFIRM_RESIZE), None)
    begun = last is not None and bool(_events(context, last))
    return migration if timestamps.is_older_than(
        migration.updated_at, _INTERRUPTED if begun else _LOST) else None


def _read(context: ty.Any, server_id: str) -> ty.Any:
    return compute_api.API().get(context, server_id)


def _is_old(instance: ty.Any, seconds: int | None = None) -> bool:
    return instance.task_state in _PENDING and (
        instance.updated_at is not None and timestamps.is_older_than(
            instance.updated_at, _LOST if seconds is None else seconds))


def _may_begin(context: ty.Any, instance: ty.Any) -> bool:
    """Return whether Nova has begun with a task, or nova-compute may find its
    message when it is up again.
    """
    task = instance.task_state
    try:
        if task not in _BY_CONDUCTOR and not compute_hosts.state_of(
                objects.Service.get_by_compute_host(
                    context, instance.host)).up:
            return True
    except exception.ComputeHostNotFound:
        return True
    last = next((one for one in _actions(context, instance)
                 if one.action in _ALONE), None)
    events = () if last is None else _events(context, last)
    if any(one.finish_time is None for one in events):
        return True
    if last is None or last.action not in _PENDING[task]:
        # Nova's API died before it recorded the action. A nova-compute that
        # offloads a server which was shelved for long records none.
        return bool(task == task_states.SHELVING_OFFLOADING)
    return bool(events) and task in _IN_STEPS


def _actions(context: ty.Any, instance: ty.Any) -> ty.Any:
    """Return the actions of an instance, the last one first."""
    return objects.InstanceActionList.get_by_instance_uuid(
        context, instance.uuid)


def _events(context: ty.Any, action: ty.Any) -> ty.Any:
    return objects.InstanceActionEventList.get_by_action(
        context, action.id).objects
