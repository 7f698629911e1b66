#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The events of a lease, as they are written."""

import typing as ty

from oslo_utils import uuidutils

from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import requests

__all__ = ['forgotten', 'redate', 'row']


def row(lease_id: str, event_type: str, time: int, now: int,
        done: bool = False) -> dict[str, ty.Any]:
    return {'id': uuidutils.generate_uuid(), 'lease_id': lease_id,
            'event_type': event_type, 'time': time, 'due': time,
            'status': states.Event.DONE if done else states.Event.UNDONE,
            'attempts': 0, 'waits': 0, 'claimed_by': None, 'claimed_until': 0,
            'created_at': now, 'updated_at': now}


def forgotten(lease: models.Lease) -> list[models.Event]:
    """What has happened and is remembered no more: all but the newest, of
    which as many are kept as may be still to come.
    """
    done = [event for event in lease.events
            if event.status not in states.OPEN and event.event_type not in (
                states.EventType.START, states.EventType.END,
                states.EventType.EXPIRE)]
    done.sort(key=lambda event: (event.time, event.id))
    return done[:-requests.MAX_EVENTS]


def redate(lease: models.Lease, window: model.Window, now: int) -> None:
    """Move a lease and its events; the user's own stay where they are."""
    moved = {states.EventType.START: window.start - lease.start_date,
             states.EventType.BEFORE_END: window.end - lease.end_date,
             states.EventType.END: window.end - lease.end_date}
    again = 0
    for event in lease.events:
        if event.event_type not in moved:
            continue
        time = max(event.time + moved[event.event_type], window.start)
        if event.status != states.Event.DONE:
            event.time = time
            if event.due != model.FOREVER:
                event.due = time
            # Who is at it has the old date in mind: it is not his any more.
            event.enter(states.Event.UNDONE, now)
            event.claimed_by, event.claimed_until, event.waits = None, 0, 0
        elif event.event_type == states.EventType.BEFORE_END and time > now:
            again = max(again, time)
    if again and not any(
            event.status == states.Event.UNDONE and
            event.event_type == states.EventType.BEFORE_END
            for event in lease.events):
        # It was told of an end that is none any more.
        lease.events.append(models.Event(**row(
            lease.id, states.EventType.BEFORE_END, again, now)))
    if lease.before_end_date is not None:
        lease.before_end_date = max(
            lease.before_end_date + window.end - lease.end_date, window.start)
    lease.start_date, lease.end_date = window.start, window.end
    lease.updated_at = now
