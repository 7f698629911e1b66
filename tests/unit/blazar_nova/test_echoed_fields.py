# SPDX-License-Identifier: Apache-2.0


"""Fields that clients send back, and fields that request nothing."""

import copy

from oslotest import base

from blazar_core.common import errors
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import physical_hosts
from blazar_nova.resource_types import reservation_requests
from blazar_nova.resource_types import server_slots
from blazar_nova.schemas import echoed_fields
from blazar_nova.schemas import event_schema
from blazar_nova.schemas import hint_params
from blazar_nova.schemas import lease_schema

#: 2027-01-15 08:00.
NOW = 1_800_000_000
TYPES = resource_types.ResourceTypes({
    'virtual:instance': server_slots.Instances(),
    'flavor:instance': server_slots.FlavorInstances(),
    'physical:host': physical_hosts.PhysicalHosts()}, None)
DEFAULTS = hint_params.Defaults(
    'now', 3600, 60, ends=('delete', 'snapshot'))

_TIMES = {'created_at': '2027-01-15 08:00:00', 'updated_at': None}
LEASE = {
    'id': 'lease', 'name': 'x', 'status': 'PENDING', 'degraded': False,
    'project_id': 'p', 'user_id': 'u', 'trust_id': None, **_TIMES,
    'start_date': '2027-01-15T09:00:00.000000',
    'end_date': '2027-01-15T10:00:00.000000', 'reservations': [
        {'id': 'r1', 'lease_id': 'lease', 'resource_type': 'flavor:instance',
         'flavor_id': 'r1', 'amount': 2, 'resource_properties': '{"id": "1"}',
         'vcpus': 1, 'aggregate_id': None, 'affinity': None, **_TIMES}],
    'events': [
        {'id': 'e1', 'lease_id': 'lease', 'event_type': 'start_lease',
         'time': '2027-01-15T09:00:00.000000', 'status': 'UNDONE',
         'action': None, **_TIMES},
        {'id': 'e2', 'lease_id': 'lease', 'event_type': 'remind',
         'time': '2027-01-15T09:30:00.000000', 'status': 'UNDONE',
         'action': 'notify', **_TIMES},
        {'id': 'e3', 'lease_id': 'lease', 'event_type': 'early',
         'time': '2027-01-15T07:30:00.000000', 'status': 'DONE',
         'action': 'notify', **_TIMES}]}


class TestEchoedLease(base.BaseTestCase):

    def put(self, **changes):
        return echoed_fields.without({**copy.deepcopy(LEASE), **changes},
                                     LEASE, TYPES)

    def test_echoed_utilization_is_dropped(self):
        body = self.put(reservations=[{
            'id': 'r1', 'amount': 2, 'utilization': {'VCPU': {'used': 1}}}])
        self.assertNotIn('utilization', body['reservations'][0])

    def test_unchanged_read_only_fields_are_dropped(self):
        self.assertEqual({
            'name': 'x', 'start_date': LEASE['start_date'],
            'end_date': LEASE['end_date'], 'reservations': [
                {'id': 'r1', 'amount': 2, 'affinity': None}],
            'events': [{'event_type': 'remind', 'action': 'notify',
                        'time': '2027-01-15T09:30:00.000000'}]},
            self.put())

    def test_changed_fields_are_kept(self):
        events = copy.deepcopy(LEASE['events'])
        events[0]['time'] = events[1]['time'] = '2027-01-15 09:45'
        found = self.put(status='ACTIVE', events=events, reservations=[
            {**LEASE['reservations'][0], 'vcpus': 2, 'flavor_id': '7'}])
        self.assertEqual('ACTIVE', found['status'])
        self.assertEqual({'id': 'r1', 'amount': 2, 'affinity': None,
                          'vcpus': 2, 'flavor_id': '7'},
                         found['reservations'][0])
        self.assertEqual(
            [{'event_type': 'start_lease', 'time': '2027-01-15 09:45',
              'action': None},
             {'event_type': 'remind', 'time': '2027-01-15 09:45',
              'action': 'notify'}], found['events'])

    def test_malformed_body_is_left_unchanged(self):
        for body in (None, [], 'x', {'events': 5, 'reservations': {}},
                     {'events': [None, 'x', {'id': []}, {'id': 'other'}]}):
            self.assertEqual(body, echoed_fields.without(body, LEASE, TYPES))


class TestNeutralFields(base.BaseTestCase):

    def drop(self, name, **given):
        return reservation_requests._without_nothing(
            given, TYPES.named[name], name)

    def test_fields_that_request_nothing_are_dropped(self):
        self.assertEqual({'vcpus': 1}, self.drop(
            'virtual:instance', vcpus=1, ephemeral_gb=0, extra_specs={},
            before_end='default', hypervisor_properties=''))
        self.assertEqual({}, self.drop(
            'flavor:instance', before_end='snapshot'))
        self.assertEqual({'min': 1}, self.drop(
            'physical:host', min=1, affinity=False, vcpus=0))

    def test_unsupported_fields_that_request_something_are_refused(self):
        for name, given in (
                ('virtual:instance', {'ephemeral_gb': 5}),
                ('virtual:instance', {'ephemeral_gb': False}),
                ('virtual:instance', {'extra_specs': {'a': 'b'}}),
                ('virtual:instance', {'hypervisor_properties': '["=", "$a",'
                                                               ' "b"]'}),
                ('physical:host', {'affinity': True}),
                ('physical:host', {'amount': 3})):
            error = self.assertRaises(
                errors.InvalidLeaseParams, self.drop, name, **given)
            self.assertIn(f'cannot be reserved as {name}', str(error))


class TestHeat(base.BaseTestCase):

    def create(self, **more):
        return lease_schema.create({
            'start_date': '2027-01-15 09:00', 'end_date': '2027-01-15 12:00',
            **more}, NOW, DEFAULTS)

    def test_event_date_may_be_given_as_time(self):
        for event in ({'time': '2027-01-15 10:00'},
                      {'event_date': '2027-01-15 10:00'},
                      {'time': '2027-01-15 10:00',
                       'event_date': '2027-01-15 10:00'}):
            found, = self.create(events=[
                {'event_type': 'x', **event}]).lease.events
            self.assertEqual(NOW + 7200, found.time)
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.create, events=[{
                'event_type': 'x', 'time': '2027-01-15 10:00',
                'event_date': '2027-01-15 11:00'}])
        self.assertIn('another "time"', str(error))
        self.assertIn('time', event_schema.DATES)

    def test_before_end_snapshot_sets_before_end_action(self):
        hosts = {'resource_type': 'physical:host', 'min': 1, 'max': 1}
        for before_end, action in (('snapshot', 'snapshot'),
                                   ('default', 'notify'), (None, 'notify')):
            self.assertEqual(action, self.create(reservations=[
                {**hosts, 'before_end': before_end},
                hosts]).lease.before_end_action)
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.create,
            before_end_action='notify', reservations=[
                {**hosts, 'before_end': 'snapshot'}])
        self.assertIn('Leave one of them out', str(error))
        self.assertRaises(
            errors.InvalidLeaseParams, lease_schema.create, {
                'end_date': '2027-01-15 12:00', 'reservations': [
                    {**hosts, 'before_end': 'snapshot'}]}, NOW,
            hint_params.Defaults('now', 3600, 60, ends=('delete',)))

    def test_before_end_of_reservation_can_be_changed(self):
        for before, said, action in (
                ('snapshot', 'default', 'notify'), (None, 'default', None),
                (None, 'snapshot', 'snapshot'), ('snapshot', None, None)):
            lease = {
                'start_date': NOW + 3600, 'end_date': NOW + 7200,
                'before_end_date': None, 'on_end': 'delete',
                'grace_period': 0, 'reservations': [
                    {'id': 'r', 'params': {'before_end': before}
                     if before else {}}]}
            self.assertEqual(action, lease_schema.change(
                {'reservations': [{'id': 'r', 'before_end': said}]}, NOW,
                lease, DEFAULTS).change.before_end_action)
