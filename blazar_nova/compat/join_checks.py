# SPDX-License-Identifier: Apache-2.0

"""Checks whether servers may be added to a lease, or removed from it."""

import typing as ty

from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova import objects
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_core.leases import members
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import flavors
from blazar_nova.compat import server_ports
from blazar_nova.compat import server_state
from blazar_nova.compat import unbuilt_servers

#: The states of servers that are built and have no task.
_STEADY = frozenset({
    vm_states.ACTIVE, vm_states.PAUSED, vm_states.STOPPED,
    vm_states.SUSPENDED})


def joiner(server_id: str, project_id: str,
           what: str = 'comes under a lease') -> members.NewMember:
    """Return a server of a project that may be added to its lease.

    :param what: what it does then, as a phrase of the refusal
    :raises InvalidLeaseParams: if the project has no server of this id
    :raises Conflict: if it cannot be added in its state; says what to do
    :raises CloudUnavailable: if Nova or placement does not answer
    """
    return bounded_calls.of_api(_joiner, server_id, project_id, what)


def _joiner(server_id: str, project_id: str, what: str) -> members.NewMember:
    instance, host = _find(server_id, project_id)
    if instance.locked:
        raise errors.Conflict(
            f'Server {server_id} is locked, and is not deleted or changed by '
            f'the end of a lease. Unlock it first.')
    if flavors.any_reservation_of(instance.flavor) is not None:
        raise errors.Conflict(
            f'Server {server_id} is in a reservation already. Leave it out.',
            errors.ConflictReason.EXISTS)
    _check_size(instance)
    if instance.vm_state not in _STEADY or instance.task_state is not None or (
            host is None):
        raise errors.Conflict(
            f'Server {server_id} is '
            f'{instance.task_state or instance.vm_state}: a server {what} '
            f'only while it is ACTIVE, PAUSED, SHUTOFF or SUSPENDED, with '
            f'nothing going on. Try again when it is so.',
            errors.ConflictReason.IN_PROGRESS if instance.task_state else None,
        )
    return members.NewMember(server_id, host, compute_hosts.taken_by(
        server_id, host), server_ports.of_instance(instance))


def leaves(server_id: str, project_id: str) -> bool:
    """Return whether a server that is removed from its lease is on a host.

    :raises InvalidLeaseParams: if the project has no server of this id
    :raises Conflict: if it cannot be removed in its state; says what to do
    :raises CloudUnavailable: if Nova does not answer
    """
    return bounded_calls.of_api(_leaves, server_id, project_id)


def _leaves(server_id: str, project_id: str) -> bool:
    instance, host = _find(server_id, project_id)
    _check_size(instance)
    if instance.vm_state == vm_states.BUILDING or (
            instance.task_state is not None):
        raise errors.Conflict(
            f'Server {server_id} is not built yet, or something is being '
            f'done to it. Try again when it is ACTIVE.',
            errors.ConflictReason.IN_PROGRESS)
    return host is not None


def _find(server_id: str, project_id: str) -> tuple[ty.Any, str | None]:
    """Return a server of a project, and the uuid of its host."""
    context = nova_context.get_admin_context()
    # Nova's database may find it by other strings, such as with accents or
    # in upper case.
    mapping = unbuilt_servers.mapping(
        context, server_id) if uuidutils.is_uuid_like(server_id) else None
    if mapping is None or mapping.instance_uuid != server_id or (
            mapping.project_id != project_id):
        raise _absent(server_id)
    if mapping.cell_mapping is None:
        raise errors.Conflict(
            f'Server {server_id} is not built yet. Try again when it is '
            f'ACTIVE.',
            errors.ConflictReason.IN_PROGRESS)
    try:
        return bounded_calls.of_cell(
            context, mapping.cell_mapping, _in_cell, server_id)
    except exception.InstanceNotFound as exc:
        raise _absent(server_id) from exc


def _in_cell(context: ty.Any, server_id: str) -> tuple[ty.Any, str | None]:
    instance = objects.Instance.get_by_uuid(
        context, server_id, expected_attrs=['flavor', 'info_cache'])
    return instance, server_state.host_of(context, instance)


def _check_size(instance: ty.Any) -> None:
    """Check that the resources of a server are final.

    :raises Conflict: if they are not; says what to do
    """
    if instance.vm_state == vm_states.RESIZED:
        raise errors.Conflict(
            f'Server {instance.uuid} has been resized or migrated, and may '
            f'go back yet. Confirm or revert that first.',
            errors.ConflictReason.IN_PROGRESS)


def _absent(server_id: str) -> errors.InvalidLeaseParams:
    return errors.InvalidLeaseParams(
        f'Server {server_id} could not be found. Write the ids of servers of '
        f'the project of the lease.')
