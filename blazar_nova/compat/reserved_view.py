# SPDX-License-Identifier: Apache-2.0

"""What a held server says of its lease, in fields that Nova has for that.

Its metadata tell of the lease as long as it is held, and those of an
interruptible server until when it is safe: they are added to what is
shown, and stored nowhere. One that has to be shown as being built is shown so.
One that will not be built is in ERROR, with a fault that says why. (Lists that
are asked for a status take both for what they were.) Its actions (``server
event list``) have one more, with an event for each one of the lease; that is
there for a server that was built, too, as long as its lease is not over.
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

__all__ = ['Action', 'Event', 'Fault', 'Held', 'Tells', 'install']

#: Of an action that is none of Nova's, whose ids begin with 1.
_ID = 0
#: Where in a request the servers stand of which it has been told.
_TOLD = 'blazar.told'

_show, _detail = views.ViewBuilder.show, views.ViewBuilder.detail
_actions = compute_api.InstanceActionAPI.actions_get
_by_request_id = compute_api.InstanceActionAPI.action_get_by_request_id
_events = compute_api.InstanceActionAPI.action_events_get


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why a server that was held is not built, and since when."""

    message: str
    since: datetime.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What is shown of a server that is held.

    :ivar metadata: what its metadata say of its lease
    :ivar fault: None: it is built when its lease starts
    """

    metadata: ty.Mapping[str, str]
    fault: Fault | None


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One of the events of an action.

    :ivar start: when it is planned; like all times in UTC
    :ivar finish: when it was over; None: it is to come, or goes on
    :ivar well: whether it went well; None: that is not known yet
    """

    name: str
    start: datetime.datetime
    finish: datetime.datetime | None
    well: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """What is told of a lease as an action on its server.

    :ivar request_id: unlike that of any request
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
    """Knows what there is to say."""

    def held(self, server_ids: ty.Collection[str]) -> ty.Mapping[str, Held]:
        """By server that is held, what is shown of it."""

    def interruptible(self, server_ids: ty.Collection[str],
                      ) -> ty.Mapping[str, ty.Mapping[str, str]]:
        """By interruptible server, what is shown of it as metadata."""

    def action(self, server_id: str, project_id: str) -> Action | None:
        """What its actions say of the lease of a server.

        :param project_id: of the server; of a lease of another project
            nothing is said
        """


def install(tells: Tells) -> None:
    """Let this process say it. Safe to call again."""
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
            # It comes last, behind those of a build that came after it.
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
    """Have the servers of an answer that are held say it, once a request."""
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
        # What the user has set under the same name stays.
        one.metadata = {**shown.metadata, **one.metadata}
        if shown.fault is not None:
            _fail(one, shown.fault)
    for server_id, metadata in tells.interruptible(new).items():
        new[server_id].metadata = {**new[server_id].metadata, **metadata}


def _fail(instance: ty.Any, fault: Fault) -> None:
    """Show a server as one in ERROR; in this answer alone."""
    instance.vm_state, instance.task_state = vm_states.ERROR, None
    instance.fault = objects.InstanceFault(
        instance_uuid=instance.uuid, code=500, message=fault.message,
        created_at=fault.since, details='')


def _passes(action: Action, filters: ty.Mapping[str, ty.Any]) -> bool:
    """Whether an action is one of those that are asked for."""
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
