# SPDX-License-Identifier: Apache-2.0

import json
import os
import types

import fixtures
from oslo_versionedobjects import fixture

from blazar_core.common import conditions
from blazar_core.plugins import resource_types
from blazar_nova.compat import process
from blazar_nova.listener import daemon
from blazar_nova.resource_types import server_slots
from blazar_nova.schemas import lease_views
from blazar_nova.services import end_notices
from blazar_nova.services import notifications
from tests.unit import base

NOW = base.NOW

#: Fingerprints of each released object. A change of its fields needs another
#: version: of the first number if readers of the former one would fail.
FINGERPRINTS = {
    'BookingChangePayload': '1.0-005634c8d62ac1970cf3d3072326e346',
    'ConditionPayload': '1.0-71c9e39ea3bacf267ee8d12c869a3cb5',
    'EventPayload': '1.0-b6e0526d3b610d9ff1a9d1bf3b3b6175',
    'HostPayload': '1.0-d4a6cb9a930c44394bc6b56575bbf823',
    'LeasePayload': '1.0-6958c9b64369b7011a2170e32dac0e76',
    'ReservationChangePayload': '1.0-e1d921ef4f16008bc7440db4315209f0',
    'ReservationPayload': '1.0-63eedf9f046e4434a2a56fa2f90229a1',
    'ServerPayload': '1.0-46450b4ec1cde73342b914e6fd2995ac',
}

SAMPLES = os.path.join(
    os.path.dirname(__file__), '..', '..', '..', 'doc', 'source', 'reference',
    'samples')

#: A lease of two servers, one of which has another host, as the core describes
#: it.
LEASE = {
    'id': 'cf5a1b8e-0b4d-4c0c-9d1f-0d6f3a1f5b11', 'name': 'nightly',
    'description': 'regression tests', 'tags': ['ci'], 'status': 'ACTIVE',
    'status_reason': '', 'conditions': [], 'degraded': True,
    'project_id': '5f3c0a52f7a94d6b8f4f6e2a9e7c1d10',
    'user_id': 'd1a7b30e3c5c4f0f8b6a4a7f1b0c9e22', 'start_date': NOW,
    'end_date': NOW + 14400, 'before_end_date': NOW + 10800,
    'on_end': 'delete', 'grace_period': 0, 'auto_extend': 0,
    'cleaning_time': 0, 'created_at': NOW - 86400, 'updated_at': NOW + 600,
    'lease_type': 'scheduled', 'retry_until': None, 'recurrence_id': None,
    'warnings': [],
    'reservations': [{
        'id': '2b9e5e4c-6f0f-4a5f-8a64-3f5f0e6f7a01',
        'lease_id': 'cf5a1b8e-0b4d-4c0c-9d1f-0d6f3a1f5b11',
        'resource_type': 'virtual:instance', 'status': 'active', 'amount': 2,
        'params': {'vcpus': 2, 'memory_mb': 4096, 'disk_gb': 20,
                   'affinity': None, 'resource_properties': ''},
        'spec': None, 'created_at': NOW - 86400, 'updated_at': NOW + 600,
        'resources': {'VCPU': 2, 'MEMORY_MB': 4096, 'DISK_GB': 20},
        'missing_resources': False, 'resources_changed': True,
        'servers': ['7c9f0a55-52d3-4b59-8f0b-3c7a5c0b9d33']}],
    'events': [{
        'id': 'a3d1c9b0-7a0e-4d5a-9a52-8e9d1f3b7c44',
        'lease_id': 'cf5a1b8e-0b4d-4c0c-9d1f-0d6f3a1f5b11',
        'event_type': 'end_lease', 'time': NOW + 14400, 'status': 'UNDONE',
        'action': None, 'created_at': NOW - 86400,
        'updated_at': NOW - 86400}],
}
EXCHANGED = [{
    'reservation_id': LEASE['reservations'][0]['id'],
    'server_id': LEASE['reservations'][0]['servers'][0],
    'before': 'compute1', 'after': 'compute2'}]

#: By file, the type of an event and its object.
EVENTS = {
    'lease-update': ('lease.update', {
        **LEASE, 'changed': ['end_date'], 'reason': 'Requested'}),
    'lease-healed': ('lease.healed', {**LEASE, 'exchanged': EXCHANGED}),
    'host-failed': ('host.failed', {
        'id': '0e3f7c6a-9b8d-4d5e-8f7a-6b5c4d3e2f55', 'name': 'compute1',
        'message': 'nova-compute does not report.'}),
    'server-evict-scheduled': ('server.interruptible.evict_scheduled', {
        'version': '1.0',
        'server_id': '9d8c7b6a-5f4e-4d3c-8b2a-1f0e9d8c7b66',
        'project_id': LEASE['project_id'], 'user_id': LEASE['user_id'],
        'action': 'shelve', 'evict_at': '2027-01-15T09:00:00.000000'}),
}


class NotificationsTest(base.TestCase):

    def setUp(self):
        super().setUp()
        self.sent, self.counted = [], []
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.blazar_freepool._number',
            types.SimpleNamespace(get=lambda: None)))
        self.words = lease_views.LeaseViews(resource_types.ResourceTypes({
            'virtual:instance': server_slots.Instances()},
            base.FakeType()))

    def notify(self, form, event_type, of):
        """Return the notifications of an event in a form."""
        self.sent.clear()
        notifications.Notifications(
            form, self.words, lambda *told: self.sent.append(told),
            lambda _name, type: self.counted.append(type))(event_type, of)
        return dict(self.sent)

    def data(self, event_type, of):
        """Return the fields of an event's first versioned notification."""
        sent = self.notify('versioned', event_type, of)
        return sent[f'blazar.{event_type}']['blazar_object.data']

    def test_object_fingerprints_match_their_versions(self):
        checker = fixture.ObjectVersionChecker(notifications.OBJECTS)
        expected, actual = checker.test_hashes(FINGERPRINTS)
        self.assertEqual(expected, actual)

    def test_documentation_has_sample_of_each_object(self):
        seen = set()
        for file, (event_type, of) in EVENTS.items():
            sent = self.notify('versioned', event_type, of)
            for kind, payload in sent.items():
                seen |= set(_names(payload))
                name = file if kind == f'blazar.{event_type}' else (
                    kind.removeprefix('blazar.').replace('.', '-'))
                with open(os.path.join(SAMPLES, f'{name}.json')) as sample:
                    self.assertEqual(json.load(sample), {
                        'event_type': kind, 'publisher_id': 'blazar.lease',
                        'priority': 'INFO', 'payload': payload})
        names = set(notifications.OBJECTS)
        self.assertEqual(names - {'ConditionPayload'},
                         seen - {'ConditionPayload'})

    def test_notification_format_is_configurable(self):
        of = EVENTS['lease-update'][1]
        self.assertEqual(['lease.update'], [
            *self.notify('unversioned', 'lease.update', of)])
        self.assertEqual(['blazar.lease.update'], [
            *self.notify('versioned', 'lease.update', of)])
        sent = self.notify('both', 'lease.update', of)
        self.assertEqual(['lease.update', 'blazar.lease.update'], [*sent])
        # The reason is not in the form that Blazar's listeners know.
        self.assertEqual(self.words.payload(LEASE), sent['lease.update'])
        # Counted once, in any form.
        self.assertEqual(['lease.update'] * 3, self.counted)

    def test_user_event_may_have_name_of_built_in_event(self):
        for name in ('would_end', 'low_use', 'host.failed', 'no_show'):
            sent = self.notify('both', f'lease.event.{name}', LEASE)
            self.assertEqual(self.words.payload(LEASE),
                             sent[f'lease.event.{name}'])
            self.assertEqual('LeasePayload', sent[
                f'blazar.lease.event.{name}']['blazar_object.name'])

    def test_user_event_types_are_counted_as_other(self):
        self.notify('both', 'lease.event.remind', LEASE)
        self.assertEqual(['other'], self.counted)

    def test_update_names_changed_fields(self):
        after = {**LEASE, 'end_date': NOW + 20000, 'updated_at': NOW + 700,
                 'name': 'weekly'}
        data = self.data('lease.update', notifications.diff(
            LEASE, after, notifications.Reason.REQUESTED))
        self.assertEqual((['end_date', 'name'], 'Requested'),
                         (data['changed'], data['reason']))

    def test_reason_is_the_condition_that_was_just_set(self):
        condition = {
            'type': conditions.Type.ENDED_EARLY,
            'reason': conditions.Reason.NO_SERVER_BOOTED, 'message': 'Unused.',
            'details': {}, 'since': NOW + 600}
        for since, reason in ((NOW + 600, 'NoServerBooted'),
                              (NOW + 500, 'Changed')):
            data = self.data('lease.update', {**LEASE, 'conditions': [
                {**condition, 'since': since}]})
            self.assertEqual(reason, data['reason'])
            self.assertEqual('EndedEarly', data['conditions'][0][
                'blazar_object.data']['type'])

    def test_reason_of_announcement_ignores_other_conditions(self):
        lease = {**LEASE, 'conditions': [
            {'type': kind, 'reason': reason, 'message': 'So it is.',
             'details': {}, 'since': NOW + 600} for kind, reason in (
                (conditions.Type.NOT_EXTENDED, conditions.Reason.REFUSED),
                (conditions.Type.UNUSED, conditions.Reason.LOW_USE))]}
        for name, reason in (('low_use', 'LowUse'),
                             ('no_show', 'NoServerBooted'),
                             ('limit_near', 'LimitNear')):
            self.assertEqual(reason, self.data(
                f'lease.event.{name}', lease)['reason'])

    def test_each_event_has_a_reason(self):
        for event_type in notifications._CAUSES:
            of = LEASE if event_type.startswith('lease.') else EVENTS[
                'host-failed' if event_type.startswith('host.')
                else 'server-evict-scheduled'][1]
            if event_type == end_notices.EVENT:
                of = {'server_ids': ['a', 'b'], 'project_id': 'p',
                      'user_id': 'u', 'end_date': None, 'created_at': None}
            self.notify('both', event_type, of)
            versioned = [one for kind, one in self.sent
                         if kind == f'blazar.{event_type}']
            self.assertEqual(2 if event_type == end_notices.EVENT else 1,
                             len(versioned), event_type)
            self.assertNotIn(versioned[0]['blazar_object.data']['reason'],
                             ('', 'Changed', 'None'))

    def test_power_notification_has_host_name_and_message(self):
        data = self.data('host.power_failed', {
            'host': 'compute1', 'service_host': 'compute1-service',
            'reason': 'The BMC does not answer.'})
        self.assertEqual(
            ('compute1', 'The BMC does not answer.', 'PowerFailed'),
            (data['name'], data['message'], data['reason']))

    def test_failed_versioned_payload_keeps_unversioned_one(self):
        broken = {**LEASE, 'grace_period': 'x'}
        self.assertEqual(['lease.update'], [
            *self.notify('both', 'lease.update', broken)])

    def test_reservation_parameters_are_json_strings(self):
        data = self.data('lease.update', LEASE)
        parameters = data['reservations'][0]['blazar_object.data'][
            'parameters']
        self.assertEqual((2, None), (json.loads(parameters['vcpus']),
                                     json.loads(parameters['affinity'])))


def _names(payload):
    """Return the objects within a notification."""
    yield payload['blazar_object.name']
    for value in payload['blazar_object.data'].values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and 'blazar_object.name' in one:
                yield from _names(one)


class ListenerTest(base.TestCase):
    """The plugin's own listener and these notifications."""

    def test_only_lease_notifications_wake_event_engine(self):
        woken = []
        listener = types.SimpleNamespace(
            engine=types.SimpleNamespace(wake=lambda: woken.append(1)))
        for event_type in ('lease.create', 'blazar.lease.create'):
            daemon.Listener.handle(listener, event_type, {})
        for event_type in ('blazar.reservation.healed', 'host.failed',
                           'blazar.server.interruptible.evicted',
                           'server.interruptible.evicted'):
            daemon.Listener.handle(listener, event_type, {})
        self.assertEqual(2, len(woken))

    def test_payload_is_named_by_its_id(self):
        for payload, name in (
                ({'lease_id': 'a'}, 'Lease a'),
                ({'server_ids': ['a', 'b']}, 'Object a, b'),
                ({'server_id': 'a'}, 'Object a'),
                ({'blazar_object.data': {'id': 'a'}}, 'Object a')):
            self.assertEqual(name, process._named(payload))
