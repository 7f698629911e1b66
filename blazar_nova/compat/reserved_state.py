# SPDX-License-Identifier: Apache-2.0

"""RESERVED as one of Nova's states.

A reserved server is a BuildRequest, and the instance in it has a vm_state,
which is free text. One table maps it to the status that the API shows and
``?status=`` searches; the response schemas list the statuses that the API may
return. RESERVED is added to both, in place.

Tools that do not know RESERVED can be shown BUILD instead. The vm_state of the
server is the same then, so that it is recognized as before; a mark in its
system metadata controls what is shown and searched.
"""

import contextlib
import typing as ty

from nova.api.openstack import common
from nova.api.openstack.compute.schemas import servers as schemas
from nova.compute import task_states
from nova.compute import vm_states
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import exception
from nova import objects
import sqlalchemy as sa

VM_STATE = 'reserved'
STATUS = 'RESERVED'

#: The text that the BuildRequest of each marked server contains.
TEXT = f'"vm_state": "{VM_STATE}"'

#: The key of system metadata in which Nova keeps why a server is locked.
_LOCK_REASON = 'locked_reason'

#: The key of system metadata of a server that is shown as being built while it
#: is reserved, and its task state then.
_SHOWN_AS, TASK_STATE = 'blazar_shown_as', 'reserved'

#: The members by which an enumeration of statuses is recognized.
_TELLING = frozenset({'VERIFY_RESIZE', 'SHELVED_OFFLOADED'})


def install() -> int:
    """Add the state to Nova in this process. Idempotent.

    :returns: the number of lists of statuses in the response schemas that have
        it
    """
    common._STATE_MAP[VM_STATE] = {'default': STATUS}
    lists = list(_state_lists(vars(schemas), set()))
    for states in lists:
        if STATUS not in states:
            states.append(STATUS)
    return len(lists)


def _state_lists(node: ty.Any, seen: set[int]) -> ty.Iterator[list[str]]:
    """Yield the lists of statuses anywhere below a schema, each once."""
    if not isinstance(node, dict | list) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list) and _TELLING <= {
            one for one in node if isinstance(one, str)}:
        yield node
    for child in (node.values() if isinstance(node, dict) else node):
        yield from _state_lists(child, seen)


def is_built(instance: ty.Any) -> bool:
    """Return whether a server, as Nova's API has read it, is in a cell."""
    return bool(instance.obj_attr_is_set('id'))


def is_held(instance: ty.Any) -> bool:
    """Return whether a server, as Nova's API has read it, is reserved."""
    return not is_built(instance) and (
        instance.obj_attr_is_set('vm_state') and
        bool(instance.vm_state == VM_STATE))


def is_marked(build_request: ty.Any) -> bool:
    """Return whether a server is marked as reserved."""
    return bool(build_request.instance.vm_state == VM_STATE)


def states_of(vm_state: str | None, system_metadata: ty.Mapping[str, ty.Any],
              ) -> dict[str, str] | None:
    """Return the vm_state and the task_state to show of a reserved server with
    these values in its record; None: those of the record.
    """
    return {'vm_state': vm_states.BUILDING, 'task_state': TASK_STATE} if (
        vm_state == VM_STATE and _SHOWN_AS in system_metadata) else None


def show_as_build(build_request: ty.Any) -> None:
    """Show a server as being built whenever it is reserved, from now on.

    :raises BuildRequestNotFound: if it was deleted
    """
    with changing(build_request._context,
                  build_request.instance_uuid) as request:
        for instance in (request.instance, build_request.instance):
            instance.system_metadata = {
                **instance.system_metadata, _SHOWN_AS: vm_states.BUILDING}
    # So that mark() does not take this for a change by another process.
    build_request.updated_at = objects.BuildRequest.get_by_instance_uuid(
        build_request._context, build_request.instance_uuid).updated_at


def give_lock_reason(instance: ty.Any, reason: str | None) -> None:
    """Set why a server that is not built yet is locked; None: no reason."""
    others = {key: value for key, value in instance.system_metadata.items()
              if key != _LOCK_REASON}
    instance.system_metadata = others | (
        {_LOCK_REASON: reason} if reason else {})


def mark(build_request: ty.Any, unless_changed: bool = False) -> None:
    """Show a server as RESERVED from now on.

    :param unless_changed: do nothing if it has changed since it was read
    :raises BuildRequestNotFound: if it was deleted
    """
    _change(build_request, unless_changed, vm_state=VM_STATE, task_state=None)


def unmark(build_request: ty.Any) -> bool:
    """Show a reserved server as being built; return False if it was deleted.

    The BuildRequest is updated from its row, as its user may have changed it
    until now.
    """
    try:
        _change(build_request, vm_state=vm_states.BUILDING,
                task_state=task_states.SCHEDULING)
    except exception.BuildRequestNotFound:
        return False
    return True


def _change(build_request: ty.Any, unless_changed: bool = False,
            **values: str | None) -> None:
    context = build_request._context
    with changing(context, build_request.instance_uuid) as request:
        if unless_changed and (
                request.updated_at != build_request.updated_at):
            values = {}
        for name, value in values.items():
            setattr(request.instance, name, value)
    build_request.instance = request.instance
    build_request.obj_reset_changes(recursive=True)


@contextlib.contextmanager
def changing(context: ty.Any, server_id: str) -> ty.Iterator[ty.Any]:
    """Yield a BuildRequest whose row is locked, and save it after the block.

    :raises BuildRequestNotFound: if there is none
    """
    with api_db.context_manager.writer.using(context):
        row = context.session.scalar(
            sa.select(api_models.BuildRequest)
            .where(api_models.BuildRequest.instance_uuid == server_id)
            .with_for_update().execution_options(populate_existing=True))
        if row is None:
            raise exception.BuildRequestNotFound(uuid=server_id)
        request = objects.BuildRequest._from_db_object(
            context, objects.BuildRequest(), row)
        yield request
        # A change inside the instance does not mark the request as changed.
        request.instance = request.instance
        request.save()
