# SPDX-License-Identifier: Apache-2.0

"""Servers that Nova could not place, returned to waiting for their build.

A conductor that finds no host writes a server into cell0, in ERROR; if the
quota does not admit all servers, the conductor leaves the others in ERROR in
their cell. Neither has been on a host. A server like that is restored to its
previous form, with the same id: a BuildRequest, and a mapping without a cell.

Each step is kept, and all are repeated from the start until none is left:
first the records (the claim is deleted in placement, and a RequestSpec and a
BuildRequest marked as reserved are created), then the server is deleted for
good in its cell, and last the mapping loses its cell. If the mapping has a
cell without the server, a BuildRequest shows that we have deleted the server.
"""

import typing as ty

from nova.compute import vm_states
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
from nova.objects import base as objects_base
from nova.scheduler.client import report
from nova import utils
from oslo_db import exception as db_exception
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import build_calls
from blazar_nova.compat import reserved_state
from blazar_nova.compat import timestamps

LOG = logging.getLogger(__name__)

#: In the system metadata of a server whose build was abandoned: it must not be
#: built again, as a conductor may still continue.
ABANDONED = 'blazar_abandoned'

#: What a user can change of a server that waits or is in ERROR.
_CHANGEABLE = ('display_name', 'display_description', 'hostname',
               'access_ip_v4', 'access_ip_v6', 'auto_disk_config', 'metadata',
               'locked', 'locked_by')

#: Seconds after which a conductor has deleted the last record of a server
#: whose build it has given up.
_AT_WORK = 60


def mapping(context: ty.Any, server_id: str) -> ty.Any:
    """Return the InstanceMapping of a server, or None."""
    try:
        return objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
    except exception.InstanceMappingNotFound:
        return None


def build_request(context: ty.Any, server_id: str) -> ty.Any:
    """Return the BuildRequest of a server, or None."""
    try:
        return objects.BuildRequest.get_by_instance_uuid(context, server_id)
    except exception.BuildRequestNotFound:
        return None


def is_unplaced(context: ty.Any, instance: ty.Any, cell: ty.Any) -> bool:
    """Return whether a server in ERROR can wait for its build again.

    Only if no compute service has seen it. In cell0 none has; in other cells
    the conductor records an action after it has checked the quota.

    :param context: of its cell
    """
    if instance.host or instance.launched_at is not None or (
            ABANDONED in instance.system_metadata):
        return False
    return cell.is_cell0() or not list(
        objects.InstanceActionList.get_by_instance_uuid(
            context, instance.uuid))


def waiting(call: build_calls.BuildCall, server_id: str) -> ty.Any:
    """Return the BuildRequest of a server that waits for its build.

    :returns: None if the server is deleted, or does not wait
    :raises CloudUnavailable: if a conductor has not finished with it
    """
    context = call.context.elevated()
    its = mapping(context, server_id)
    request = build_request(context, server_id)
    if its is None or request is None and its.cell_mapping is None:
        return None
    if its.queued_for_delete:
        _drop(request)
        return None
    if its.cell_mapping is None:
        return request
    if request is not None and not reserved_state.is_marked(request):
        raise errors.CloudUnavailable(
            f'nova-conductor is not done with server {server_id} yet')
    if not bounded_calls.of_cell(
            context, its.cell_mapping, lambda in_cell: _take_out(
                call, server_id, its, request, in_cell)):
        return None
    _unmap(context, its)
    LOG.info('Server %s could not be placed, and waits again', server_id)
    return build_request(context, server_id)


def _take_out(call: build_calls.BuildCall, server_id: str, its: ty.Any,
              request: ty.Any, context: ty.Any) -> bool:
    """Delete a server from its cell; return False if it must not be built.

    :param context: of the cell
    """
    with utils.temporary_mutation(context, read_deleted='yes'):
        try:
            instance = objects.Instance.get_by_uuid(
                context, server_id, expected_attrs=['system_metadata'])
        except exception.InstanceNotFound:
            # By us, if it has a BuildRequest; otherwise by its user.
            return request is not None
    if instance.deleted:
        # Its user has deleted it meanwhile.
        _drop(request)
        return False
    if instance.vm_state != vm_states.ERROR or not is_unplaced(
            context, instance, its.cell_mapping):
        return False
    _restore(call, its, instance, request)
    try:
        instance.destroy(hard_delete=True)
    except exception.InstanceNotFound:
        if _is_deleted(context, server_id):
            _drop(build_request(call.context.elevated(), server_id))
            return False
        # Another process has just done the same.
    return True


def _is_deleted(context: ty.Any, server_id: str) -> bool:
    """Return whether a user has deleted a server: its record stays.

    :param context: of the cell
    """
    with utils.temporary_mutation(context, read_deleted='yes'):
        try:
            return bool(objects.Instance.get_by_uuid(
                context, server_id, expected_attrs=[]).deleted)
        except exception.InstanceNotFound:
            return False


def finish(server_id: str) -> None:
    """Finish what a process that died has started with a server that is in no
    cell.

    The server waits after this, or is deleted if its user has deleted it.
    """
    context = nova_context.get_admin_context()
    its, request = mapping(context, server_id), build_request(
        context, server_id)
    if its is None or its.cell_mapping is None or request is None:
        return
    with nova_context.target_cell(
            context, its.cell_mapping) as cell_context:
        if _is_deleted(cell_context, server_id):
            _drop(request)
            return
        try:
            objects.Instance.get_by_uuid(
                cell_context, server_id, expected_attrs=[])
        except exception.InstanceNotFound:
            _unmap(context, its)


def _restore(call: build_calls.BuildCall, its: ty.Any, instance: ty.Any,
             request: ty.Any) -> None:
    """Create the missing records of a server that waits.

    :raises CloudUnavailable: if a conductor has not finished with it
    """
    context = call.context.elevated()
    spec, = [one for one in call.request_spec
             if one.instance_uuid == instance.uuid]
    try:
        objects.RequestSpec.get_by_instance_uuid(context, instance.uuid)
    except exception.RequestSpecNotFound:
        _create(context, spec)
    else:
        # If the quota is exceeded, the conductor deletes this record last.
        if request is None and not its.cell_mapping.is_cell0() and not (
                timestamps.is_older_than(instance.updated_at, _AT_WORK)):
            raise errors.CloudUnavailable(
                f'nova-conductor is not done with server {instance.uuid} '
                f'yet')
    report.report_client_singleton().delete_allocation_for_instance(
        context, instance.uuid, force=True)
    if request is None:
        _create(context, _again(call.stored[instance.uuid], instance))


def _again(stored: ty.Any, instance: ty.Any) -> ty.Any:
    """Return a stored BuildRequest with the changes made since."""
    request = stored.obj_clone()
    for name in _CHANGEABLE:
        setattr(request.instance, name, getattr(instance, name))
    reserved_state.give_lock_reason(
        request.instance, instance.system_metadata.get('locked_reason'))
    request.instance.vm_state = reserved_state.VM_STATE
    request.instance.task_state = None
    for name in ('created_at', 'updated_at'):
        delattr(request, objects_base.get_attrname(name))
    return request


def _create(context: ty.Any, record: ty.Any) -> None:
    """Store a copy of a record as a new one, unless it exists."""
    record = record.obj_clone()
    record._context = context
    if record.obj_attr_is_set('id'):
        delattr(record, objects_base.get_attrname('id'))
    renew(record)
    try:
        record.create()
    except db_exception.DBDuplicateEntry:
        LOG.debug('%s is there already', record)


def renew(record: ty.Any) -> None:
    """Mark all fields of a record as changed, so that all are stored."""
    for name in record.obj_fields:
        if record.obj_attr_is_set(name):
            setattr(record, name, getattr(record, name))


def _drop(request: ty.Any) -> None:
    """Delete a BuildRequest, if there is one."""
    if request is not None:
        try:
            request.destroy()
        except exception.BuildRequestNotFound:
            LOG.debug('Server %s is gone already', request.instance_uuid)


def _unmap(context: ty.Any, its: ty.Any) -> None:
    """Remove a server's mapping from its cell. (Nova's own object can only set
    another cell.)
    """
    with api_db.context_manager.writer.using(context):
        context.session.execute(
            sa.update(api_models.InstanceMapping)
            .where(api_models.InstanceMapping.instance_uuid ==
                   its.instance_uuid,
                   api_models.InstanceMapping.cell_id == its.cell_mapping.id)
            .values(cell_id=None))
