# SPDX-License-Identifier: Apache-2.0

"""Changes that users may make to reserved servers.

Nova changes a server in its cell, and a server without a cell only if it is
renamed. A reserved server is built from its BuildRequest, so it is locked and
given metadata there. Each change locks the row, and so does the start
(:func:`reserved_state.unmark`): an accepted change is part of the build, and a
change that comes too late is refused.
"""

import contextlib
import functools
import typing as ty

from nova.compute import api as compute_api
from nova.compute import vm_states
from nova import exception

from blazar_nova.compat import reserved_state

#: The actions that are allowed on reserved servers.
ACTIONS = frozenset({'lock', 'unlock'})

_API = compute_api.API
_update, _lock, _unlock = _API.update_instance, _API.lock, _API.unlock
_get_metadata, _set_metadata, _delete_metadata = (
    _API.get_instance_metadata, _API.update_instance_metadata,
    _API.delete_instance_metadata)


@functools.wraps(_update)
def _update_instance(self: ty.Any, context: ty.Any, instance: ty.Any,
                     updates: dict[str, ty.Any]) -> ty.Any:
    if not reserved_state.is_built(instance):
        try:
            # Also while it is being built: otherwise values that were read
            # before it became reserved again would overwrite those written
            # since.
            with reserved_state.changing(context, instance.uuid) as request:
                request.instance.update(updates)
                return request.instance
        except exception.BuildRequestNotFound:
            pass
    return _update(self, context, instance, updates)


@functools.wraps(_get_metadata)
def _get_instance_metadata(self: ty.Any, context: ty.Any, instance: ty.Any,
                           ) -> dict[str, str]:
    return dict(instance.metadata) if reserved_state.is_held(instance) else (
        _get_metadata(self, context, instance))


@functools.wraps(_set_metadata)
def _update_instance_metadata(
        self: ty.Any, context: ty.Any, instance: ty.Any,
        metadata: dict[str, str], delete: bool = False) -> ty.Any:
    if not reserved_state.is_held(instance):
        return _set_metadata(self, context, instance, metadata, delete)
    known = dict(instance.metadata)
    while True:
        wanted = metadata if delete else {**known, **metadata}
        # This may call other services, so it is done without the row lock.
        self._check_metadata_properties_quota(context, wanted)
        with _changed(context, instance, 'update metadata') as its:
            if delete or its.metadata == known:
                its.metadata = wanted
                return wanted
            known = dict(its.metadata)


@functools.wraps(_delete_metadata)
def _delete_instance_metadata(self: ty.Any, context: ty.Any,
                              instance: ty.Any, key: str) -> None:
    if not reserved_state.is_held(instance):
        _delete_metadata(self, context, instance, key)
        return
    with _changed(context, instance, 'delete metadata') as its:
        its.metadata = {name: value for name, value
                        in its.metadata.items() if name != key}


@functools.wraps(_lock)
def _lock_instance(self: ty.Any, context: ty.Any, instance: ty.Any,
                   reason: str | None = None) -> None:
    if reserved_state.is_built(instance):
        _lock(self, context, instance, reason=reason)
        return
    is_owner = instance.project_id == context.project_id
    with _unsent(context, instance) as its:
        if its.locked and is_owner:
            return
        its.locked, its.locked_by = True, 'owner' if is_owner else 'admin'
        if reason:
            reserved_state.give_lock_reason(its, reason)


@functools.wraps(_unlock)
def _unlock_instance(self: ty.Any, context: ty.Any, instance: ty.Any) -> None:
    if reserved_state.is_built(instance):
        _unlock(self, context, instance)
        return
    with _unsent(context, instance) as its:
        its.locked, its.locked_by = False, None
        reserved_state.give_lock_reason(its, None)


@contextlib.contextmanager
def _changed(context: ty.Any, instance: ty.Any, what: str,
             ) -> ty.Iterator[ty.Any]:
    """Yield a reserved server to be changed, unless it is locked.

    :param what: the action, as Nova's refusals name it
    :raises InstanceIsLocked: if it is locked and the user is no admin
    :raises InstanceInvalidState: if it is no longer reserved
    """
    try:
        with reserved_state.changing(context, instance.uuid) as request:
            if not reserved_state.is_marked(request):
                raise exception.BuildRequestNotFound(uuid=instance.uuid)
            if request.instance.locked and not context.is_admin:
                raise exception.InstanceIsLocked(instance_uuid=instance.uuid)
            yield request.instance
    except exception.BuildRequestNotFound as exc:
        raise exception.InstanceInvalidState(
            attr='vm_state', instance_uuid=instance.uuid,
            state=vm_states.BUILDING, method=what) from exc


@contextlib.contextmanager
def _unsent(context: ty.Any, instance: ty.Any) -> ty.Iterator[ty.Any]:
    """Yield a reserved server to be locked or unlocked.

    :raises Forbidden: if it is no longer reserved, but has no cell yet. (The
        most suitable of the errors that Nova passes on from these actions;
        Nova's own would be a 500.)
    """
    try:
        with _changed(context.elevated(), instance, 'lock') as its:
            yield its
    except exception.InstanceInvalidState as exc:
        raise exception.Forbidden(
            f'Server {instance.uuid} is being built at this moment. Try '
            f'again when it is ACTIVE.') from exc


def install() -> None:
    """Install these functions in this process. Idempotent."""
    _API.update_instance = _update_instance
    _API.get_instance_metadata = _get_instance_metadata
    _API.update_instance_metadata = _update_instance_metadata
    _API.delete_instance_metadata = _delete_instance_metadata
    _API.lock, _API.unlock = _lock_instance, _unlock_instance
