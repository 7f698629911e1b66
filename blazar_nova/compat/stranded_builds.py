# SPDX-License-Identifier: Apache-2.0

"""Builds that were sent but do not proceed, and their traces.

A conductor writes a server into its cell, and maps it some steps later; the
scheduler claims its capacity in placement before that. If a process dies in
between, the server stays in BUILD. It is not known whether a conductor is dead
or only slow; a conductor that continues finds the BuildRequest deleted, and
then undoes its work (nova.conductor.manager, ``_delete_build_request``). So
the process that deletes the BuildRequest decides, and only one can.
"""

import typing as ty

from nova.compute import utils as compute_utils
from nova.compute import vm_states
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler.client import report
from oslo_log import log as logging

from blazar_core.plugins import cloud_api
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import reserved_state
from blazar_nova.compat import unbuilt_servers

LOG = logging.getLogger(__name__)

Trace = cloud_api.BuildTrace


def on_the_way(server_ids: ty.Iterable[str]) -> dict[str, ty.Any]:
    """Return the BuildRequests of servers that a conductor should build."""
    context = nova_context.get_admin_context()
    found = {server_id: unbuilt_servers.build_request(context, server_id)
             for server_id in server_ids}
    return {server_id: request for server_id, request in found.items()
            if request is not None and not reserved_state.is_marked(request)}


def traces(server_ids: ty.Iterable[str]) -> dict[str, Trace]:
    """Return the traces of builds of servers with a BuildRequest.

    :raises CloudUnavailable: if a cell or placement does not answer
    """
    requests = on_the_way(server_ids)
    if not requests:
        return {}
    context = nova_context.get_admin_context()
    rows = _rows(list(requests))
    found = {}
    for server_id in requests:
        its = unbuilt_servers.mapping(context, server_id)
        if its is not None:
            found[server_id] = Trace.CAUGHT if (
                its.cell_mapping is not None or server_id in rows or
                compute_hosts.allocations(server_id)) else Trace.NONE
    return found


def _rows(server_ids: list[str]) -> dict[str, ty.Any]:
    """Return the cells in which servers are stored, mapped or not."""
    return {instance.uuid: cell for cell, found in bounded_calls.of_all_cells(
        objects.InstanceList.get_by_filters,
        {'uuid': server_ids, 'deleted': False}, expected_attrs=[])
        for instance in found}


class BuildStoodStill(exception.NovaException):  # type: ignore[misc]
    msg_fmt = ('The build of this server was begun and did not go on: a '
               'nova-conductor died over it. Delete the server.')


def mark_failed(server_id: str) -> None:
    """Set a server whose build is stranded to ERROR, in its cell.

    First the server is set to ERROR, then it is mapped, and the BuildRequest
    is deleted last: until then the server is found again, and this is
    repeated. A server that is in no cell is created in cell0, like servers
    without a host.

    A conductor that does continue overwrites the mapping, or deletes it if it
    has not created the server yet: then the record in cell0 has none, which
    ``blazar-nova-manage verify --fix`` restores.
    """
    context = nova_context.get_admin_context()
    its = unbuilt_servers.mapping(context, server_id)
    request = on_the_way([server_id]).get(server_id)
    if its is None or request is None:
        return
    cell = its.cell_mapping or _rows([server_id]).get(server_id)
    is_new = cell is None
    if is_new:
        cell = objects.CellMapping.get_by_uuid(
            context, objects.CellMapping.CELL0_UUID)
    with nova_context.target_cell(context, cell) as cell_context:
        _put_in_error(cell_context, request, is_new)
    if its.cell_mapping is None:
        its.cell_mapping = cell
        its.save()
    try:
        request.destroy()
    except exception.BuildRequestNotFound:
        LOG.info('Server %s: its build continues, or it was deleted',
                 server_id)
        return
    report.report_client_singleton().delete_allocation_for_instance(
        context, server_id, force=True)
    LOG.warning('The build of server %s stood still: it is in ERROR now',
                server_id)


def _put_in_error(context: ty.Any, request: ty.Any, is_new: bool) -> None:
    """:param context: of the cell"""
    if is_new:
        instance = request.get_new_instance(context)
        instance.create()
    else:
        instance = objects.Instance.get_by_uuid(
            context, request.instance_uuid,
            expected_attrs=['system_metadata'])
    instance.system_metadata[unbuilt_servers.ABANDONED] = 'True'
    instance.vm_state, instance.task_state = vm_states.ERROR, None
    instance.save()
    compute_utils.add_instance_fault_from_exc(
        context, instance, BuildStoodStill())
    # Without them, its volumes would stay attached after its deletion.
    for bdm in request.block_device_mappings:
        bdm = bdm.obj_clone()
        bdm._context = context
        bdm.instance_uuid = instance.uuid
        unbuilt_servers.renew(bdm)
        bdm.update_or_create()
