# SPDX-License-Identifier: Apache-2.0

"""The lease of a server, shown in fields of Nova's API.

The metadata of a reserved server show its lease, and those of an interruptible
server the time until which it is safe from eviction: they are added to the
answer, not stored. A reserved server is shown as being built if so configured,
and in ERROR with a fault that says why if it will not be built. (Lists that
are filtered by status use the status without these two.) The actions of a
server (``server event list``) have an additional one, with the events of the
lease, also after it is built and until the lease ends.
"""

import dataclasses
import datetime
import functools
import typing as ty

from nova.api.openstack.compute.views import servers as views
from nova.compute import api as compute_api
from nova.compute import vm_states
from nova import objects

from blazar_nova.compat import reserved_state

#: The id of our action; Nova's begin with 1.
_ID = 0
#: The key of a request's environment with the servers already updated.
_TOLD = 'blazar.told'

_show, _detail = views.ViewBuilder.show, views.ViewBuilder.detail
_actions = compute_api.InstanceActionAPI.actions_get
_by_request_id = compute_api.InstanceActionAPI.action_get_by_request_id
_events = compute_api.InstanceActionAPI.action_events_get


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why a reserved server is not built, and since when."""

    message: str
    since: datetime.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """The texts that are shown of a reserved server.

    :ivar metadata: the keys that describe its lease
    :ivar fault: None: it is built when its lease starts
    """

    metadata: ty.Mapping[str, str]
    fault: Fault | None


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An event of an action.

    :ivar start: the planned time; all times are in UTC
    :ivar finish: the time when it ended; None: it is planned, or in progress
    :ivar well: whether it succeeded; None: not known yet
    """

    name: str
    start: datetime.datetime
    finish: datetime.datetime | None
    well: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """A lease, shown as an action on its server.

    :ivar request_id: unlike the id of any request
    :ivar message: a sentence or two
    """

    name: str
    request_id: str
    user_id: str
    project_id: str
    start: datetime.datetime
    updated: datetime.datetime
    message: str
    events: ty.Sequence[Event]


class Tells(ty.Protocol):
    """Provides the data that is shown."""

    def held(self, server_ids: ty.Collection[str]) -> ty.Mapping[str, Held]:
        """Return what is shown of each server that is reserved."""

    def interruptible(self, server_ids: ty.Collection[str],
                      ) -> ty.Mapping[str, ty.Mapping[str, str]]:
        """Return the metadata to show of each interruptible server."""

    def action(self, server_id: str, project_id: str) -> Action | None:
        """Return the lease of a server as an action.

        :param project_id: of the server; None is returned for a lease of
            another project
        """


def install(tells: Tells) -> None:
    """Show leases in the answers of this process. Idempotent."""
    @functools.wraps(_show)
    def show(self: ty.Any, request: ty.Any, instance: ty.Any,
             *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
        _tell(tells, request, [instance])
        return _show(self, request, instance, *args, **kwargs)

    @functools.wraps(_detail)
    def detail(self: ty.Any, request: ty.Any, instances: ty.Any,
               *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
        _tell(tells, request, instances)
        return _detail(self, request, instances, *args, **kwargs)

    @functools.wraps(_actions)
    def actions_get(self: ty.Any, context: ty.Any, instance: ty.Any,
                    limit: int | None = None, marker: str | None = None,
                    filters: ty.Any = None) -> ty.Any:
        ours = tells.action(instance.uuid, instance.project_id)
        if ours is not None and marker == ours.request_id:
            # Ours is the last one, after the actions of a later build.
            return []
        found = _actions(self, context, instance, limit, marker, filters)
        if ours is None or limit is not None and len(found) >= limit or (
                not _passes(ours, filters or {})):
            return found
        return [*found, _action(instance, ours)]

    @functools.wraps(_by_request_id)
    def action_get_by_request_id(self: ty.Any, context: ty.Any,
                                 instance: ty.Any, request_id: str) -> ty.Any:
        found = _by_request_id(self, context, instance, request_id)
        ours = None if found is not None else tells.action(
            instance.uuid, instance.project_id)
        return found if ours is None or ours.request_id != request_id else (
            _action(instance, ours))

    @functools.wraps(_events)
    def action_events_get(self: ty.Any, context: ty.Any, instance: ty.Any,
                          action_id: int) -> ty.Any:
        if action_id != _ID:
            return _events(self, context, instance, action_id)
        ours = tells.action(instance.uuid, instance.project_id)
        return [] if ours is None else [*map(_event, ours.events)]

    views.ViewBuilder.show, views.ViewBuilder.detail = show, detail
    api = compute_api.InstanceActionAPI
    api.actions_get, api.action_get_by_request_id, api.action_events_get = (
        actions_get, action_get_by_request_id, action_events_get)


def _tell(tells: Tells, request: ty.Any, servers: ty.Iterable[ty.Any],
          ) -> None:
    """Update the servers of an answer, each once for a request."""
    told: set[str] = request.environ.setdefault(_TOLD, set())
    new = {one.uuid: one for one in servers if one.uuid not in told}
    told.update(new)
    held = {server_id: one for server_id, one in new.items()
            if reserved_state.is_held(one)}
    found = tells.held(held) if held else {}
    for server_id, one in held.items():
        one.update(reserved_state.states_of(
            one.vm_state, one.system_metadata) or {})
        shown = found.get(server_id, Held({}, None))
        # Keys that the user has set keep their values.
        one.metadata = {**shown.metadata, **one.metadata}
        if shown.fault is not None:
            _fail(one, shown.fault)
    # Of a server in a cell that does not answer, Nova knows no metadata.
    read = {server_id: one for server_id, one in new.items()
            if one.obj_attr_is_set('metadata')}
    for server_id, metadata in tells.interruptible(read).items():
        read[server_id].metadata = {**read[server_id].metadata, **metadata}


def _fail(instance: ty.Any, fault: Fault) -> None:
    """Show a server in ERROR, in this answer only."""
    instance.vm_state, instance.task_state = vm_states.ERROR, None
    instance.fault = objects.InstanceFault(
        instance_uuid=instance.uuid, code=500, message=fault.message,
        created_at=fault.since, details='')


def _passes(action: Action, filters: ty.Mapping[str, ty.Any]) -> bool:
    """Return whether an action matches the filters of a request."""
    since, before = map(filters.get, ('changes-since', 'changes-before'))
    return (since is None or action.updated >= since) and (
        before is None or action.updated <= before)


def _action(instance: ty.Any, ours: Action) -> ty.Any:
    return objects.InstanceAction(
        id=_ID, action=ours.name, instance_uuid=instance.uuid,
        request_id=ours.request_id, user_id=ours.user_id,
        project_id=ours.project_id, start_time=ours.start, finish_time=None,
        message=ours.message, created_at=ours.start, updated_at=ours.updated)


def _event(one: Event) -> ty.Any:
    return objects.InstanceActionEvent(
        event=one.name, action_id=_ID, start_time=one.start,
        finish_time=one.finish, traceback=None, host='', details=None,
        result={None: None, True: 'Success', False: 'Error'}[one.well])
