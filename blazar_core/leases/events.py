# SPDX-License-Identifier: Apache-2.0

"""Create and change the events of a lease."""

import typing as ty

from oslo_utils import uuidutils
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import requests
from blazar_core.plugins import resource_types

#: Maximum seconds before its end at which a lease is extended automatically:
#: earlier than the notification of its end, by the default options.
EXTEND_BEFORE = 7200


def row(lease_id: str, event_type: str, time: int, now: int,
        done: bool = False, action: str | None = None) -> dict[str, ty.Any]:
    return {'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
            'action': None if action == states.Action.NOTIFY else action,
            'event_type': event_type, 'time': time, 'run_at': time,
            'status': states.Event.DONE if done else states.Event.UNDONE,
            'created_at': now, 'updated_at': now}


def add(lease: models.Lease, event_type: str, time: int, now: int,
        action: str | None = None) -> None:
    """Add an event to a lease; that of an offer waits for its acceptance."""
    new = row(lease.id, event_type, time, now, action=action)
    if lease.status == states.Lease.OFFERED:
        new['run_at'] = model.FOREVER
    lease.events.append(models.Event(**new))


def is_within(event: models.Event, window: model.Window) -> bool:
    """Return whether an event can still happen in a lease that was shortened.
    """
    return event.time <= window.end - (event.action is not None)


def check_action(event_type: str, action: str, time: int,
                 window: model.Window) -> None:
    """Check that the action of an event of a lease can be carried out.

    :raises InvalidLeaseParams: if the event is after the end of the lease
    """
    if action != states.Action.NOTIFY and time >= window.end:
        raise errors.InvalidLeaseParams(
            f'The {event_type} {clocks.minute(time)} is after the end of the '
            f'lease, where only "action": "{states.Action.NOTIFY}" is '
            f'possible. Write an earlier date, or "on_end": "{action}".')


def act_before_end(lease: models.Lease, before: ty.Sequence[models.Event],
                   action: states.Action, window: model.Window) -> None:
    """Change the action before the end of a lease, at the same time.

    :param before: the pending before_end_lease events
    :raises InvalidLeaseParams: if there are none
    """
    if not before:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has no event before its end that could do '
            'this. Write before_end_date, too.')
    for event in before:
        check_action(event.event_type, action, event.time, window)
        event.action = None if action == states.Action.NOTIFY else action


def extension(window: model.Window, period: int) -> int:
    """Return when a lease with ``auto_extend`` is extended.

    That is ``period`` before its end, but at most :data:`EXTEND_BEFORE`, so
    that after an extension the next one is not due yet.

    :param period: seconds by which it is extended
    """
    return max(window.start, window.end - min(period, EXTEND_BEFORE))


def reextend(session: orm.Session, lease: models.Lease, period: int, now: int,
             ) -> None:
    """Change or disable the automatic extension of a lease.

    :param period: seconds by which it is extended; 0: it is not
    """
    lease.auto_extend = period
    for event in lease.events:
        if event.event_type == states.EventType.EXTEND:
            session.delete(event)
    if period:
        add(lease, states.EventType.EXTEND, extension(
            lease.window, period), now)


def forgotten(lease: models.Lease) -> list[models.Event]:
    """Return the past events to delete: all but the newest, of which as many
    are kept as a lease may have pending.
    """
    done = [event for event in lease.events
            if event.status not in states.OPEN and event.event_type not in (
                states.EventType.START, states.EventType.END,
                states.EventType.EXPIRE, states.EventType.EXTEND,
                states.EventType.REFUND)]
    done.sort(key=lambda event: (event.time, event.id))
    return done[:-requests.MAX_EVENTS]


def changed(session: orm.Session, lease: models.Lease,
            types: resource_types.ResourceTypes,
            reservations: ty.Iterable[models.Reservation], now: int) -> None:
    """Notify the resource types of changed bookings of reservations, if the
    lease has started.
    """
    if lease.status not in states.BEGUN or not any(
            one.whole or types.of_row(one).handles_changes
            for one in reservations):
        return
    trigger(session, lease, states.EventType.CHANGED, now)


def handed_over(session: orm.Session, lease: models.Lease,
                types: resource_types.ResourceTypes, now: int) -> None:
    """Notify the resource types of the new project of a lease, if it has
    started.
    """
    if lease.status in states.BEGUN and any(
            types.of_row(one).handles_transfer for one in lease.reservations):
        trigger(session, lease, states.EventType.CHANGED, now)


def charge(session: orm.Session, lease: models.Lease, now: int) -> None:
    """Notify the budget service of a changed lease, if it was committed there
    (:mod:`blazar_core.leases.budget_commits`).
    """
    if any(event.event_type == states.EventType.REFUND
           for event in lease.events):
        trigger(session, lease, states.EventType.CHARGE, now)


def trigger(session: orm.Session, lease: models.Lease,
            event_type: states.EventType, now: int) -> None:
    """Have an event of a lease carried out now, even if it was before."""
    told = {event.status: event for event in lease.events
            if event.event_type == event_type}
    if states.Event.DONE in told:
        # Only the last one is kept.
        session.delete(told[states.Event.DONE])
    if states.Event.UNDONE in told:
        # It may be deferred for a long time.
        told[states.Event.UNDONE].run_at = now
    else:
        # That of an offer, too.
        lease.events.append(models.Event(**row(
            lease.id, event_type, now, now)))


def begin(lease: models.Lease, over: states.EventType, now: int) -> None:
    """Activate the events that were deferred until a decision about a lease.

    :param over: the event that the decision has made obsolete
    """
    for event in lease.events:
        if event.event_type == over:
            event.enter(states.Event.DONE, now)
        elif event.status in states.OPEN:
            event.run_at = event.time


def move_own(lease: models.Lease, seconds: int) -> None:
    """Postpone the pending events that the user has defined."""
    for event in lease.events:
        if event.status in states.OPEN and (
                states.EventType.is_users(event.event_type)):
            event.time += seconds


def retime(session: orm.Session, lease: models.Lease,
           types: resource_types.ResourceTypes, window: model.Window,
           now: int) -> None:
    """Adapt the events of resource types to another window.

    A past event stays DONE unless its new time is in the future. Events of
    types that are not installed are not changed.
    """
    own = types.events([(one.resource_type, one.booted)
                        for one in lease.reservations], window)
    before = {event.event_type: event for event in lease.events
              if event.event_type.rpartition(':')[0] in types.named}
    for event_type in own.keys() - before.keys():
        add(lease, event_type, own[event_type], now)
    for event_type, event in before.items():
        if event_type not in own:
            if event.status in states.OPEN:
                session.delete(event)
        elif own[event_type] != event.time and (
                event.status in states.OPEN or own[event_type] > now):
            event.time = own[event_type]
            # A worker may be processing it by its old date.
            event.reopen(now, max(event.time, now))


def redate(lease: models.Lease, window: model.Window, now: int) -> None:
    """Move a lease and its events, except for those that users have defined.
    """
    moved: dict[str, int] = {
        states.EventType.START: window.start - lease.start_date,
        states.EventType.BEFORE_END: window.end - lease.end_date,
        states.EventType.EXTEND: 0,
        states.EventType.END: window.end - lease.end_date}
    again, action = 0, None
    for event in lease.events:
        if event.event_type not in moved:
            continue
        time = max(event.time + moved[event.event_type], window.start)
        extends = event.event_type == states.EventType.EXTEND
        if extends:
            # Derive it anew: the previous one may have been cut by the start.
            time = extension(window, lease.auto_extend)
        if event.status != states.Event.DONE or (
                extends and window.end > now):
            event.time = time
            # A worker may be processing it by its old date.
            event.reopen(now, time)
        elif event.event_type == states.EventType.BEFORE_END and time > now:
            again, action = max((again, action), (time, event.action),
                                key=lambda one: one[0])
    if again and not any(
            event.status == states.Event.UNDONE and
            event.event_type == states.EventType.BEFORE_END
            for event in lease.events):
        # The notification was sent for an end that is no longer valid.
        add(lease, states.EventType.BEFORE_END, again, now, action)
    if lease.before_end_date is not None:
        lease.before_end_date = max(
            lease.before_end_date + window.end - lease.end_date, window.start)
    lease.start_date, lease.end_date = window.start, window.end
    lease.updated_at = now
