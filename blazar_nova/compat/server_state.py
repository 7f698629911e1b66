# SPDX-License-Identifier: Apache-2.0

"""The state of a server in Nova, as the core defines states."""

import typing as ty

from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova import objects
from nova import utils

from blazar_core.plugins import cloud_api
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import end_actions
from blazar_nova.compat import reserved_state
from blazar_nova.compat import timestamps
from blazar_nova.compat import unbuilt_servers

#: All tasks of a resize begin with it.
_RESIZING = 'resize_'
#: Seconds for which allocations of a deleted server are waited for.
_AWAITED = 60

Seen = cloud_api.ObservedServer
State = cloud_api.ServerState


def of_waiting(is_reserved: bool) -> Seen:
    """Return the state of a server that no conductor has received yet."""
    return Seen(State.HELD if is_reserved else State.BUILDING)


def of_instance(instance: ty.Any, host: str | None,
                is_unplaced: ty.Callable[[], bool] = lambda: False) -> Seen:
    """Return the state of a server in a cell.

    :param host: the uuid of its compute node
    :param is_unplaced: returns whether the build of a failed server may be
        sent again
    """
    # A server that has run was built, whatever its state is now.
    if instance.vm_state == vm_states.ERROR and instance.launched_at is None:
        fault = instance.fault.message if instance.fault else ''
        return Seen(State.ERROR, host, fault, is_unplaced())
    if instance.vm_state == vm_states.SOFT_DELETED:
        return Seen(State.LEAVING, host, busy=instance.task_state is not None)
    building = instance.vm_state == vm_states.BUILDING
    return Seen(State.BUILDING if building else State.RUNNING, host,
                rest=end_actions.RESTS.get(instance.vm_state),
                busy=instance.task_state is not None,
                resized=instance.vm_state == vm_states.RESIZED,
                blocked=instance.vm_state in end_actions.BLOCKING)


def at_server(server_id: str) -> Seen:
    """Return the state of a server, in a cell or not."""
    context = nova_context.get_admin_context()
    mapping = unbuilt_servers.mapping(context, server_id)
    if mapping is not None and mapping.cell_mapping is None:
        request = unbuilt_servers.build_request(context, server_id)
        if request is not None:
            return of_waiting(reserved_state.is_marked(request))
        # Either deleted, or it has just reached its cell.
        mapping = unbuilt_servers.mapping(context, server_id)
    if mapping is None or mapping.cell_mapping is None:
        return Seen(State.GONE)
    with nova_context.target_cell(
            context, mapping.cell_mapping) as cell_context:
        seen = _in_cell(cell_context, server_id, mapping.cell_mapping)
    if seen.state is State.GONE:
        return _elsewhere(context, server_id, mapping)
    return seen


def unconfirmed(server_ids: ty.Collection[str]) -> set[str]:
    """Return the servers whose resize or cold migration is not confirmed: they
    have capacity of two hosts, and may return to the previous one.

    :raises CloudUnavailable: if one of their cells does not answer
    """
    context = nova_context.get_admin_context()
    cells = {one.cell_mapping.uuid: one.cell_mapping for one in
             bounded_calls.of_api(
                 objects.InstanceMappingList.get_by_instance_uuids, context,
                 [*server_ids]) if one.cell_mapping is not None}
    return {one.uuid for _cell, instances in bounded_calls.of_all_cells(
        objects.InstanceList.get_by_filters,
        {'uuid': [*server_ids], 'deleted': False}, expected_attrs=[],
        cells=[*cells.values()])
        for one in instances if one.vm_state == vm_states.RESIZED or (
            one.task_state or '').startswith(_RESIZING)}


def _elsewhere(context: ty.Any, server_id: str, its: ty.Any) -> Seen:
    """Return the state of a server that is not in its cell: it may have been
    removed from there to be built again.

    :param its: the mapping with that cell
    """
    request = unbuilt_servers.build_request(context, server_id)
    if request is not None:
        return of_waiting(reserved_state.is_marked(request))
    now = unbuilt_servers.mapping(context, server_id)
    if now is not None and now.cell_mapping is not None and (
            now.cell_mapping.id != its.cell_mapping.id):
        return at_server(server_id)
    return Seen(State.GONE)


def _in_cell(context: ty.Any, server_id: str, cell: ty.Any) -> Seen:
    try:
        instance = objects.Instance.get_by_uuid(
            context, server_id, expected_attrs=[])
    except exception.InstanceNotFound:
        return _at_deleted(context, server_id)
    return of_instance(
        instance, host_of(context, instance),
        lambda: unbuilt_servers.is_unplaced(context, instance, cell))


def _at_deleted(context: ty.Any, server_id: str) -> Seen:
    """Return LEAVING as long as a deleted server has allocations, which
    nova-compute deletes last.

    Allocations that remain for longer are leaked, and not waited for: the
    reservation database counts them as usage of the host.
    """
    with utils.temporary_mutation(context, read_deleted='yes'):
        try:
            instance = objects.Instance.get_by_uuid(
                context, server_id, expected_attrs=[])
        except exception.InstanceNotFound:
            return Seen(State.GONE)
    if instance.deleted_at is None or timestamps.is_older_than(
            instance.deleted_at, _AWAITED):
        return Seen(State.GONE)
    return Seen(State.LEAVING if compute_hosts.allocations(server_id)
                else State.GONE)


def host_of(context: ty.Any, instance: ty.Any) -> str | None:
    """Return the uuid of the compute node of a server, or None."""
    if not instance.host or not instance.node:
        return None
    try:
        node = objects.ComputeNode.get_by_host_and_nodename(
            context, instance.host, instance.node)
    except exception.ComputeHostNotFound:
        return None
    return ty.cast(str, node.uuid)
