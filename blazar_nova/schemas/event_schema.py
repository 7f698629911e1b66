# SPDX-License-Identifier: Apache-2.0

"""Events of a lease that its user sets, from JSON.

lease_params and the bodies of the lease API have them in the same form:
``events``, a list of objects, and ``before_end_action`` with the date before
the end.
"""

import re
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.leases import events
from blazar_core.leases import requests
from blazar_nova.resource_types import inputs
from blazar_nova.schemas import dates

EXAMPLE = '[{"event_type": "remind", "event_date": "2026-12-01 12:00"}]'

_KEYS = {
    'event_type': '"remind"',
    'event_date': '"2026-12-01 12:00"',
}
#: Keys of an event's time; ``time`` is what answers have and Heat writes.
DATES = ('event_date', 'time')
#: Optional keys.
_MORE = {'action': '"snapshot"', 'time': '"2026-12-01 12:00"'}
#: Events that every lease has, and the parameter that sets their time.
_OWN_EVENTS = {
    'start_lease': 'the start of the lease',
    'end_lease': 'its end or duration',
    'before_end_lease': 'its before_end',
    'expire_offer': 'the seconds of the offer',
    'retry_lease': 'retries and retry_interval',
    'make_room': 'lease_type and timeout',
    'extend_lease': 'auto_extend',
}

_EVENT_TYPE = re.compile(r'[A-Za-z0-9_.-]{1,64}')

_Actions: ty.TypeAlias = ty.Sequence[states.Action]


def read(events: object, window: model.Window, now: int, actions: _Actions,
         ) -> tuple[requests.EventRequest, ...]:
    """Return the events that a user has set.

    :param actions: the available actions
    :raises InvalidLeaseParams: if one is invalid or not within the window
    """
    if not isinstance(events, list):
        raise errors.InvalidLeaseParams(
            f'"events" is {inputs.kind_of(events)}. Write a list of objects, '
            f'such as "events": {EXAMPLE}.')
    if len(events) > requests.MAX_EVENTS:
        raise errors.InvalidLeaseParams(
            f'"events" has {len(events)} entries. Write at most '
            f'{requests.MAX_EVENTS}.')
    return tuple(_event(event, window, now, actions) for event in events)


def _event(event: object, window: model.Window, now: int, actions: _Actions,
           ) -> requests.EventRequest:
    if not isinstance(event, dict):
        raise errors.InvalidLeaseParams(
            f'An entry of "events" is {inputs.kind_of(event)}. Write an '
            f'object, as in "events": {EXAMPLE}.')
    event = inputs.json_object(event, 'An entry of "events"')
    inputs.check_keys(event, _KEYS | _MORE, 'an entry of "events"')
    time = event.pop('time', None)
    if time is not None and event.setdefault('event_date', time) != time:
        raise errors.InvalidLeaseParams(
            'An entry of "events" has an "event_date" and another "time". '
            'Write one of them.')
    for key, example in _KEYS.items():
        if key not in event:
            raise errors.InvalidLeaseParams(
                f'An entry of "events" has no "{key}". Add it, such as '
                f'"{key}": {example}.')
    event_type = _event_type(string(
        event['event_type'], 'event_type', _KEYS))
    date = string(event['event_date'], 'event_date', _KEYS)
    time = inside(dates.parse_date(date, now), window, 'event_date')
    action = action_of(event.get('action', states.Action.NOTIFY), 'action',
                       actions)
    events.check_action(event_type, action, time, window)
    return requests.EventRequest(event_type, time, action)


def _event_type(text: str) -> str:
    if text.lower() in _OWN_EVENTS:
        raise errors.InvalidLeaseParams(
            f'The event "{text}" belongs to every lease. Set its time with '
            f'{_OWN_EVENTS[text.lower()]} instead.')
    if not _EVENT_TYPE.fullmatch(text):
        raise errors.InvalidLeaseParams(
            f'The event_type "{words.shown(text)}" is not a name. Write 1 to '
            '64 letters (A to Z), digits, "_", "." and "-", such as "remind".')
    return text


def action_of(value: object, key: str, actions: _Actions) -> states.Action:
    """Return the action of an event.

    :raises InvalidLeaseParams: if the action is not available
    """
    text = string(value, key, {key: '"snapshot"'})
    if text not in actions:
        raise errors.InvalidLeaseParams(
            f'"{key}": "{words.shown(text)}" is not available. What is '
            f'available at an event: {", ".join(actions)}. Write '
            f'"{key}": "{actions[0]}" or leave it out.')
    return states.Action(text)


def before_end_action(values: ty.Mapping[str, object], time: int | None,
                      window: model.Window, actions: _Actions, date: str,
                      ) -> states.Action:
    """Return the action before the end of a new lease.

    :param time: of the action; None: never
    :param date: the key that sets the time, for the message
    :raises InvalidLeaseParams: if the action is not available
    """
    if 'before_end_action' not in values:
        return states.Action.NOTIFY
    action = action_of(
        values['before_end_action'], 'before_end_action', actions)
    if time is None:
        raise errors.InvalidLeaseParams(
            f'Nothing says when "{action.value}" is to be done before the '
            f'end. Add "{date}": "2026-12-01 15:07", or leave the action '
            f'out.')
    events.check_action(date, action, time, window)
    return action


def inside(time: int, window: model.Window, key: str) -> int:
    """Return a time if it is in the window or at its end."""
    if not window.start <= time <= window.end:
        raise errors.InvalidLeaseParams(
            f'The {key} {clocks.minute(time)} is not within the lease. Write '
            f'a date from {clocks.minute(window.start)} to '
            f'{clocks.minute(window.end)} UTC.')
    return time


def string(value: object, key: str, known: ty.Mapping[str, str]) -> str:
    """Return a value that must be a string.

    :param known: examples by key
    """
    if not isinstance(value, str):
        raise errors.InvalidLeaseParams(
            f'"{key}" is {inputs.kind_of(value)}. Write a string, such as '
            f'"{key}": {known[key]}.')
    return value
