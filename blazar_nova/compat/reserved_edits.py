# SPDX-License-Identifier: Apache-2.0

"""What users may change of a server that is held.

Nova changes a server in its cell, and one that has no cell yet only where it
is renamed. A held one is what its BuildRequest says, and is built by that: it
is locked and given metadata there. Whoever changes one locks its row, and so
does the start (:func:`reserved_state.unmark`), so that what is accepted is in
the build, and what comes too late is refused.
"""

import contextlib
import functools
import typing as ty

from nova.compute import api as compute_api
from nova.compute import vm_states
from nova import exception

from blazar_nova.compat import reserved_state

__all__ = ['ACTIONS', 'install']

#: The actions that a held server can have.
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
            # Of one that is being built, too: else what was read before it
            # was held again would be written over that.
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
        # Limits may be asked for elsewhere, for which nobody is kept waiting.
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
    """A held server, to be changed unless it is locked.

    :param what: is done with it, in the words of Nova's refusals
    :raises InstanceIsLocked: when it may not be
    :raises InstanceInvalidState: when it is not held any more
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
    """A held server, to be locked or unlocked.

    :raises Forbidden: when it is not held any more, but has no cell yet. (Of
        what Nova lets through from these actions it is what says so best; by
        itself it answers 500.)
    """
    try:
        with _changed(context.elevated(), instance, 'lock') as its:
            yield its
    except exception.InstanceInvalidState as exc:
        raise exception.Forbidden(
            f'Server {instance.uuid} is being built at this moment. Try '
            f'again when it is ACTIVE.') from exc


def install() -> None:
    """Let this process do so. Safe to call again."""
    _API.update_instance = _update_instance
    _API.get_instance_metadata = _get_instance_metadata
    _API.update_instance_metadata = _update_instance_metadata
    _API.delete_instance_metadata = _delete_instance_metadata
    _API.lock, _API.unlock = _lock_instance, _unlock_instance
