# SPDX-License-Identifier: Apache-2.0

"""RESERVED as one of Nova's states.

A held server is a BuildRequest, and the instance in it carries a vm_state,
which is free text. What the API shows for a vm_state, and what it looks for
when asked ``?status=``, stands in one table; what it may answer, in the
response schemas. RESERVED is added to both, in place.

Tools that do not know RESERVED can be shown BUILD instead. The vm_state of
the server is the same then, and so is all that is recognized by it: it has a
mark in its system metadata, and what shows and searches goes by that.
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

__all__ = ['TEXT', 'VM_STATE', 'changing', 'give_lock_reason', 'install',
           'is_built', 'is_held', 'is_marked', 'mark', 'show_as_build',
           'states_of', 'unmark']

VM_STATE = 'reserved'
STATUS = 'RESERVED'

#: What stands in the text of each BuildRequest that is marked.
TEXT = f'"vm_state": "{VM_STATE}"'

#: Where Nova keeps why a server is locked.
_LOCK_REASON = 'locked_reason'

#: In the system metadata of a server that is shown as being built as long as
#: it is held, and its task state then.
_SHOWN_AS, TASK_STATE = 'blazar_shown_as', 'reserved'

#: An enumeration of states is told by these members of it.
_TELLING = frozenset({'VERIFY_RESIZE', 'SHELVED_OFFLOADED'})


def install() -> int:
    """Teach this process the state. Safe to call twice.

    :returns: how many of the response schemas' lists of states know it
    """
    common._STATE_MAP[VM_STATE] = {'default': STATUS}
    lists = list(_state_lists(vars(schemas), set()))
    for states in lists:
        if STATUS not in states:
            states.append(STATUS)
    return len(lists)


def _state_lists(node: ty.Any, seen: set[int]) -> ty.Iterator[list[str]]:
    """The lists of states anywhere below a schema, each once."""
    if not isinstance(node, dict | list) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list) and _TELLING <= {
            one for one in node if isinstance(one, str)}:
        yield node
    for child in (node.values() if isinstance(node, dict) else node):
        yield from _state_lists(child, seen)


def is_built(instance: ty.Any) -> bool:
    """Whether a server, as Nova's API has it, is in a cell."""
    return bool(instance.obj_attr_is_set('id'))


def is_held(instance: ty.Any) -> bool:
    """Whether a server, as Nova's API has it, is one that is held."""
    return not is_built(instance) and (
        instance.obj_attr_is_set('vm_state') and
        bool(instance.vm_state == VM_STATE))


def is_marked(build_request: ty.Any) -> bool:
    """Whether a server is shown as RESERVED."""
    return bool(build_request.instance.vm_state == VM_STATE)


def states_of(vm_state: str | None, system_metadata: ty.Mapping[str, ty.Any],
              ) -> dict[str, str] | None:
    """The vm_state and the task_state that are shown of a held server whose
    record has these; None: those of its record.
    """
    return {'vm_state': vm_states.BUILDING, 'task_state': TASK_STATE} if (
        vm_state == VM_STATE and _SHOWN_AS in system_metadata) else None


def show_as_build(build_request: ty.Any) -> None:
    """Show a server as being built whenever it is held, from now on.

    :raises BuildRequestNotFound: when it is gone
    """
    with changing(build_request._context,
                  build_request.instance_uuid) as request:
        for instance in (request.instance, build_request.instance):
            instance.system_metadata = {
                **instance.system_metadata, _SHOWN_AS: vm_states.BUILDING}
    # It was us who changed it: see mark().
    build_request.updated_at = objects.BuildRequest.get_by_instance_uuid(
        build_request._context, build_request.instance_uuid).updated_at


def give_lock_reason(instance: ty.Any, reason: str | None) -> None:
    """Say why a server that is not built yet is locked; None: nothing."""
    others = {key: value for key, value in instance.system_metadata.items()
              if key != _LOCK_REASON}
    instance.system_metadata = others | (
        {_LOCK_REASON: reason} if reason else {})


def mark(build_request: ty.Any, unless_changed: bool = False) -> None:
    """Show a server as RESERVED from now on.

    :param unless_changed: not if it was changed since it was read
    :raises BuildRequestNotFound: when it is gone
    """
    _change(build_request, unless_changed, vm_state=VM_STATE, task_state=None)


def unmark(build_request: ty.Any) -> bool:
    """Show a held server as being built; false when it is gone.

    The BuildRequest is then what it is by now: its user may have changed it
    until this moment.
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
    """A BuildRequest that nobody else changes so meanwhile; what has become of
    it in the block is saved.

    :raises BuildRequestNotFound: when there is none
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
        # A change inside the instance does not count as one of the request.
        request.instance = request.instance
        request.save()
