# SPDX-License-Identifier: Apache-2.0

"""Notifications: all of them are created and sent here.

``[blazar] notification_format`` selects the format. The unversioned format is
that of Blazar; the versioned one consists of versioned objects, as Nova's
notifications do. Both have the same values and are sent on the same topics.
The event type of a versioned one begins with ``blazar.``, so that consumers
can tell them apart.

A versioned notification says what has changed and why. The sender may put that
into the lease, as ``changed`` and ``reason``; otherwise both follow from the
event type and from the last condition of the lease.

A change of an object's fields requires a new version of the object, and a new
fingerprint in its test.
"""

import enum
import json
import types
import typing as ty

from oslo_log import log as logging
from oslo_versionedobjects import base
from oslo_versionedobjects import fields

from blazar_core.common import conditions
from blazar_core.common import states
from blazar_core.lifecycle import no_show_check
from blazar_core.lifecycle import preflight
from blazar_nova.schemas import lease_views
from blazar_nova.services import end_notices
from blazar_nova.services import hoarding

LOG = logging.getLogger(__name__)

COUNTER = 'blazar_notifications'
#: Prefix of the event types of versioned notifications.
PREFIX = 'blazar.'

_Object: ty.TypeAlias = dict[str, ty.Any]
_Send: ty.TypeAlias = ty.Callable[[str, _Object], None]


class Reason(enum.StrEnum):
    """Reasons of notifications, in addition to those of conditions."""

    ACCEPTED = 'Accepted'
    CAPACITY_NEEDED = 'CapacityNeeded'
    CAPACITY_NOT_NEEDED = 'CapacityNotNeeded'
    CHANGED = 'Changed'
    DELETION_REQUESTED = 'DeletionRequested'
    DUE = 'Due'
    END_IS_NEAR = 'EndIsNear'
    ENDED = 'Ended'
    EXTENDED = 'Extended'
    HOST_DOWN = 'HostDown'
    HOST_UP = 'HostUp'
    NOT_ACCEPTED = 'NotAccepted'
    POWER_FAILED = 'PowerFailed'
    POWER_OFF = 'PowerOff'
    POWER_ON = 'PowerOn'
    PREFLIGHT = 'Preflight'
    REASSIGNED = 'Reassigned'
    REQUESTED = 'Requested'
    TRANSFERRED = 'Transferred'


#: The fields that have changed and the reason, by event type.
_CAUSES: dict[str, tuple[tuple[str, ...], str]] = {
    'lease.create': ((), Reason.REQUESTED),
    'lease.delete': (('status',), Reason.DELETION_REQUESTED),
    'lease.degraded': (('degraded', 'reservations'),
                       conditions.Reason.HOSTS_LOST),
    'lease.healed': (('degraded', 'reservations'),
                     conditions.Reason.CAPACITY_RESTORED),
    'lease.event.start_lease': (('status', 'events'), Reason.DUE),
    'lease.event.end_lease': (('status', 'events'), Reason.ENDED),
    'lease.event.expire_offer': (('status', 'events'), Reason.NOT_ACCEPTED),
    'lease.event.before_end_lease': (('events',), Reason.END_IS_NEAR),
    'lease.event.before_end_lease.stop': (('end_date', 'events'),
                                          Reason.EXTENDED),
    'lease.event.grace_period': (('status',), conditions.Reason.GRACE_PERIOD),
    'lease.event.orphaned': (('conditions',),
                             conditions.Reason.PROJECT_NOT_FOUND),
    preflight.EVENT: (('warnings',), Reason.PREFLIGHT),
    no_show_check.EVENT: (('conditions',),
                          conditions.Reason.NO_SERVER_BOOTED),
    no_show_check.LOW_USE: (('conditions',), conditions.Reason.LOW_USE),
    hoarding.EVENT: (('conditions',), conditions.Reason.LIMIT_NEAR),
    end_notices.EVENT: ((), Reason.ENDED),
    'server.interruptible.evict_scheduled': (('evict_at',),
                                             Reason.CAPACITY_NEEDED),
    'server.interruptible.evict_cancelled': (('evict_at',),
                                             Reason.CAPACITY_NOT_NEEDED),
    'server.interruptible.evicted': (('host',), Reason.CAPACITY_NEEDED),
    'server.interruptible.migrated': (('host',), Reason.CAPACITY_NEEDED),
    'server.interruptible.safe_until': (('safe_until',),
                                        Reason.CAPACITY_NEEDED),
    'host.failed': (('status',), Reason.HOST_DOWN),
    'host.recovered': (('status',), Reason.HOST_UP),
    'host.maintenance': (('maintenance',), Reason.REQUESTED),
    'host.enrolled': (('enrolled',), Reason.REQUESTED),
    'host.removed': (('enrolled',), Reason.REQUESTED),
    'host.power_off': (('power_state',), Reason.POWER_OFF),
    'host.power_on': (('power_state',), Reason.POWER_ON),
    'host.power_failed': (('power_state',), Reason.POWER_FAILED),
}
#: Event types for single reservations, by the event type of the lease.
_OF_RESERVATIONS = {'lease.degraded': 'reservation.degraded',
                    'lease.healed': 'reservation.healed'}
#: Event types that are counted by their name; users can name others.
_COUNTED = frozenset({
    *_CAUSES, 'lease.update',
    *(f'lease.event.{one}' for one in states.EventType)})


#: The classes of notification objects by name; each in a list, as in
#: registries of versioned objects.
OBJECTS: dict[str, list[type['_Payload']]] = {}


class _Payload(base.VersionedObject):
    """Base of all objects in notifications."""

    OBJ_PROJECT_NAMESPACE = 'blazar'
    OBJ_SERIAL_NAMESPACE = 'blazar_object'

    def primitive(self) -> _Object:
        """Return the object as it is sent."""
        self.obj_reset_changes(recursive=True)
        return self.obj_to_primitive()


def _register(kind: type[_Payload]) -> type[_Payload]:
    """Add a class to the objects of notifications."""
    # Not to the global registry: Nova uses it too, with names of its own.
    base.VersionedObjectRegistry.register_if(False)(kind)
    OBJECTS[kind.__name__] = [kind]
    return kind


_TEXT, _NO_TEXT = fields.StringField(), fields.StringField(nullable=True)
_DATE, _NO_DATE = fields.DateTimeField(), fields.DateTimeField(nullable=True)
_FLAG = fields.BooleanField()
#: Fields of every notification: names of changed fields, and a reason code.
_CAUSE: ty.Mapping[str, ty.Any] = {
    'changed': fields.ListOfStringsField(), 'reason': _TEXT}


@_register
class ConditionPayload(_Payload):
    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {'type': _TEXT, 'reason': _TEXT, 'message': _TEXT, 'since': _DATE}


@_register
class EventPayload(_Payload):
    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {'id': _TEXT, 'event_type': _TEXT, 'status': _TEXT,
              'time': _DATE, 'action': _NO_TEXT}


@_register
class ReservationPayload(_Payload):
    """A reservation; ``parameters`` are those of its resource type, in JSON.
    """

    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {
        'id': _TEXT, 'lease_id': _TEXT, 'resource_type': _TEXT,
        'status': _TEXT, 'amount': fields.IntegerField(),
        'resources': fields.DictOfIntegersField(),
        'missing_resources': _FLAG, 'resources_changed': _FLAG,
        'servers': fields.ListOfStringsField(),
        'parameters': fields.DictOfStringsField(),
        'created_at': _DATE, 'updated_at': _DATE}


@_register
class BookingChangePayload(_Payload):
    """A booking that was moved to another host."""

    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {'reservation_id': _TEXT, 'server_id': _NO_TEXT,
              'before': _NO_TEXT, 'after': _NO_TEXT}


@_register
class LeasePayload(_Payload):
    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {
        'id': _TEXT, 'name': _TEXT, 'description': _TEXT,
        'tags': fields.ListOfStringsField(), 'status': _TEXT,
        'status_reason': _TEXT,
        'conditions': fields.ListOfObjectsField('ConditionPayload'),
        'degraded': _FLAG, 'project_id': _TEXT, 'user_id': _TEXT,
        'start_date': _DATE, 'end_date': _DATE, 'before_end_date': _NO_DATE,
        'on_end': _TEXT, 'grace_period': fields.IntegerField(),
        'auto_extend': fields.IntegerField(nullable=True),
        'lease_type': _TEXT, 'retry_until': _NO_DATE,
        'recurrence_id': _NO_TEXT, 'warnings': fields.ListOfStringsField(),
        'created_at': _DATE, 'updated_at': _DATE,
        'reservations': fields.ListOfObjectsField('ReservationPayload'),
        'events': fields.ListOfObjectsField('EventPayload'), **_CAUSE}


@_register
class ReservationChangePayload(_Payload):
    """A reservation that has changed."""

    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {
        'reservation': fields.ObjectField('ReservationPayload'),
        'project_id': _TEXT, 'user_id': _TEXT,
        'exchanged': fields.ListOfObjectsField('BookingChangePayload'),
        **_CAUSE}


@_register
class HostPayload(_Payload):
    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {
        'id': _NO_TEXT, 'name': _TEXT, 'message': _TEXT,
        'start_date': _NO_DATE, 'end_date': _NO_DATE, **_CAUSE}


@_register
class ServerPayload(_Payload):
    # Version 1.0: Initial version
    VERSION = '1.0'
    fields = {
        'server_id': _TEXT, 'project_id': _TEXT, 'user_id': _NO_TEXT,
        'action': _NO_TEXT, 'evict_at': _NO_DATE, 'safe_until': _NO_DATE,
        'created_at': _NO_DATE, 'end_date': _NO_DATE, **_CAUSE}


class Notifications:
    """Sends notifications.

    :param form: one of ``unversioned``, ``versioned`` and ``both``
    :param send: sends a notification without blocking
    :param count: counts a notification by its type
    """

    def __init__(self, form: str, words: lease_views.LeaseViews, send: _Send,
                 count: ty.Callable[..., None]) -> None:
        self._form = form
        self._words = words
        self._send = send
        self._count = count

    def __call__(self, event_type: str, of: _Object) -> None:
        """Send a notification.

        :param of: a lease as the core describes it, or the payload for a
            server or a host
        """
        self._count(COUNTER, type=event_type if event_type in _COUNTED
                    else 'other')
        payload = self._words.payload(of) if _is_lease(of) else of
        if self._form != 'versioned':
            self._send(event_type, payload)
        if self._form != 'unversioned':
            try:
                for kind, one in versioned(event_type, of, payload):
                    self._send(PREFIX + kind, one.primitive())
            except Exception:
                # The change itself is done and stays.
                LOG.exception('%s: the versioned notification %s could not be '
                              'made', of.get('id'), event_type)


def _is_lease(of: ty.Mapping[str, ty.Any]) -> bool:
    """Return whether this is a lease; event types do not tell, as users may
    give their events the types of others.
    """
    return 'reservations' in of


def diff(before: ty.Mapping[str, ty.Any], after: _Object, reason: str,
         ) -> _Object:
    """Return a lease with what a request has changed of it, and the reason.

    :param before: the previous state, described in the same way
    """
    return {**after, 'reason': reason, 'changed': sorted(
        name for name in lease_views.FIELDS if name != 'updated_at' and
        before.get(name) != after.get(name))}


def versioned(event_type: str, of: _Object, payload: _Object,
              ) -> ty.Iterator[tuple[str, _Payload]]:
    """Yield the versioned notifications of an event, with their types.

    :param of: the described lease, with ``changed`` and ``reason`` if known;
        or the payload
    :param payload: of the unversioned notification
    """
    if _is_lease(of):
        yield from _of_lease(event_type, of, payload)
    elif event_type.startswith('host.'):
        # When a host is switched, its reason is a sentence and no code.
        yield event_type, HostPayload(**_filled(HostPayload, {
            'name': payload.get('host'), 'message': payload.get('reason', ''),
            **payload}), **_cause(event_type, {}))
    else:
        for one in payload.get('server_ids') or [payload['server_id']]:
            yield event_type, ServerPayload(**_filled(ServerPayload, {
                **payload, 'server_id': one}), **_cause(event_type, of))


def _of_lease(event_type: str, of: _Object, payload: _Object,
              ) -> ty.Iterator[tuple[str, _Payload]]:
    cause = _cause(event_type, of)
    reservations = {one['id']: _reservation(one)
                    for one in payload['reservations']}
    yield event_type, LeasePayload(**_filled(LeasePayload, {
        **payload,
        'conditions': [ConditionPayload(**_filled(ConditionPayload, one))
                       for one in payload['conditions']],
        'events': [EventPayload(**_filled(EventPayload, one))
                   for one in payload['events']],
        'reservations': list(reservations.values())}), **cause)
    if event_type not in _OF_RESERVATIONS:
        return
    exchanged: dict[str, list[BookingChangePayload]] = {}
    for one in of.get('exchanged', ()):
        exchanged.setdefault(one['reservation_id'], []).append(
            BookingChangePayload(**_filled(BookingChangePayload, one)))
    missing = {one['id'] for one in payload['reservations']
               if one['missing_resources']}
    for reservation_id, made in reservations.items():
        if reservation_id in exchanged or reservation_id in missing:
            yield _OF_RESERVATIONS[event_type], ReservationChangePayload(
                reservation=made, project_id=payload['project_id'],
                user_id=payload['user_id'],
                exchanged=exchanged.get(reservation_id, []),
                changed=['hosts' if reservation_id in exchanged
                         else 'missing_resources'], reason=cause['reason'])


def _filled(kind: type[_Payload], values: ty.Mapping[str, ty.Any]) -> _Object:
    """Return the values of an object's fields; None where there is none."""
    return {name: values.get(name) for name in kind.fields
            if name not in _CAUSE}


def _reservation(values: _Object) -> ReservationPayload:
    others = values.keys() - ReservationPayload.fields.keys() - {'resource_id'}
    return ReservationPayload(**_filled(ReservationPayload, {
        **values, 'parameters': {name: json.dumps(values[name])
                                 for name in sorted(others)}}))


def _cause(event_type: str, of: _Object) -> _Object:
    """Return the changed fields and the reason."""
    changed, reason = _CAUSES.get(event_type, (
        ('events',) if event_type.startswith('lease.event.') else
        ('reservations',) if 'exchanged' in of else ('status', 'conditions'),
        Reason.DUE if event_type.startswith('lease.event.') else
        Reason.REASSIGNED if 'exchanged' in of else Reason.CHANGED))
    latest = max(of.get('conditions') or (), default=_NEVER,
                 key=lambda one: one['since'])
    if event_type in _BY_CONDITION and (
            latest['since'] >= (of.get('updated_at') or 0)):
        reason = latest['reason']
    return {'changed': list(of.get('changed', changed)),
            'reason': str(of.get('reason', reason))}


_NEVER: ty.Mapping[str, ty.Any] = types.MappingProxyType({'since': -1})
#: Event types with several possible reasons; the last condition has it.
_BY_CONDITION = frozenset({
    'lease.update', 'lease.event.end_lease', 'lease.event.orphaned'})
