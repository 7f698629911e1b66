# SPDX-License-Identifier: Apache-2.0

import json
import types

import fixtures
from oslo_utils import uuidutils

from blazar_core.capacity import enrollment
from blazar_core.common import clocks
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import physical_hosts
from blazar_nova.resource_types import server_slots
from blazar_nova.schemas import lease_views
from blazar_nova.services import host_enrollment
from tests.unit import base

NOW = base.NOW


class TestLeaseViews(base.LeaseTestCase):
    """Leases of the core in the form of the API."""

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=20)
        self.answers = lease_views.LeaseViews(resource_types.ResourceTypes({
            'virtual:instance': server_slots.Instances(),
            'flavor:instance': server_slots.FlavorInstances()},
            base.FakeType()))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.blazar_freepool._number',
            types.SimpleNamespace(get=lambda: None)))

    def test_lease_has_exactly_the_selectable_fields(self):
        said = self.answers.lease(self.lease(50, 100))
        self.assertEqual(list(lease_views.FIELDS), list(said))
        # The trust is secret.
        self.assertIsNone(said['trust_id'])

    def test_times_are_iso_strings(self):
        described = self.reserve(50, 100, request=self.request(
            50, 100, before_end=NOW + 90))
        said = self.answers.lease(described)
        for name in ('start_date', 'end_date', 'before_end_date'):
            self.assertEqual(clocks.iso(described[name]), said[name])
        self.assertEqual('2027-01-15T08:00:50.000000', said['start_date'])
        self.assertEqual(
            ['2027-01-15T08:00:50.000000', '2027-01-15T08:01:30.000000',
             '2027-01-15T08:01:40.000000'],
            [event['time'] for event in said['events']])
        described['before_end_date'] = described['events'][0][
            'created_at'] = None
        said = self.answers.lease(described)
        self.assertIsNone(said['before_end_date'])
        self.assertIsNone(said['events'][0]['created_at'])

    def test_a_reservation_has_its_parameters_and_a_flavor(self):
        described = self.reserve(50, 100, self.places(2, 3))
        reservation, = self.answers.lease(described)['reservations']
        times = dict.fromkeys(('created_at', 'updated_at'),
                              '2027-01-15 08:00:00')
        self.assertEqual({
            'id': reservation['id'], 'lease_id': described['id'],
            'resource_id': reservation['id'],
            'resource_type': 'virtual:instance', 'status': 'pending',
            'amount': 2, 'resources': {'VCPU': 3}, 'vcpus': 3,
            'missing_resources': False, 'resources_changed': False,
            'servers': [], 'affinity': None, 'flavor_id': reservation['id'],
            'server_group_id': None, 'aggregate_id': None, **times,
        }, reservation)

    def test_reservation_with_affinity_has_a_server_group(self):
        for affinity in (True, False):
            reservation, = self.answers.lease(self.reserve(
                50, 100, self.places(affinity=affinity)))['reservations']
            self.assertEqual(
                (affinity, reservation['id']),
                (reservation['affinity'], reservation['server_group_id']))

    def test_reservation_of_boot_has_servers_and_no_flavor(self):
        described = self.lease(50, 100, count=3)
        reservation, = self.answers.lease(described)['reservations']
        self.assertEqual(base.servers_of(described), reservation['servers'])
        self.assertFalse({'flavor_id', 'server_group_id', 'affinity',
                          'params'} & reservation.keys())

    def test_reservation_of_uninstalled_type_is_shown(self):
        lease = self.reserve(50, 100, self.places(2, 3))
        reservation, = lease_views.LeaseViews(resource_types.ResourceTypes(
            {}, base.FakeType())).lease(lease)['reservations']
        self.assertEqual(
            (3, 2, lease['reservations'][0]['id']), (
                reservation['vcpus'], reservation['amount'],
                reservation['id']))

    def test_notification_payload_has_fields_of_lease(self):
        lease = views.get(self.database, self.reserve(50, 100)['id'])
        told, said = self.answers.payload(lease), self.answers.lease(lease)
        self.assertEqual(('1.8', lease['id'], lease['id']), (
            told['version'], told['lease_id'], told['id']))
        self.assertNotIn('trust_id', told)
        self.assertEqual(
            [event['time'] for event in said['events']],
            [event['event_date'] for event in told['events']])
        times = {'created_at': None, 'updated_at': None}
        self.assertEqual(*(
            [{**one, **times} for one in lease['reservations']]
            for lease in (said, told)))
        # In our format: notifications have no consumers of Blazar's.
        self.assertEqual(clocks.iso(lease['created_at']), told['created_at'])


#: Blazar's documented answers: each key with the form of its value.
_ID = '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'
_DATE = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}'
_MADE = r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d'
_MADE_AT = {'created_at': _MADE, 'updated_at': f'{_MADE}|None'}
_RESERVATION = {
    'id': _ID, 'lease_id': _ID, 'status': 'pending|active|deleted|error',
    'missing_resources': 'True|False', 'resources_changed': 'True|False',
    'resource_id': _ID, 'resource_type': '[a-z]+:[a-z]+', **_MADE_AT}
_INSTANCES = {
    **_RESERVATION, 'amount': int, 'vcpus': int, 'memory_mb': int,
    'disk_gb': int, 'affinity': 'True|False|None', 'flavor_id': _ID,
    'server_group_id': f'{_ID}|None', 'aggregate_id': r'\d+|None',
    'resource_properties': str}
_BLAZAR = {
    'lease': {
        'id': _ID, 'name': str, 'start_date': _DATE, 'end_date': _DATE,
        'status': '[A-Z]+', 'degraded': 'True|False', 'user_id': str,
        'project_id': str, 'trust_id': 'None', 'reservations': list,
        'events': list, **_MADE_AT},
    'event': {
        'id': _ID, 'lease_id': _ID, 'status': '[A-Z_]+', 'time': _DATE,
        'event_type': '(start|end|before_end)_lease', **_MADE_AT},
    'physical:host': {
        **_RESERVATION, 'min': int, 'max': int, 'hypervisor_properties': str,
        'resource_properties': str, 'before_end': 'default|snapshot'},
    'virtual:instance': _INSTANCES, 'flavor:instance': _INSTANCES,
    'host': {
        'id': r'\d+', 'hypervisor_hostname': str, 'hypervisor_type': str,
        'hypervisor_version': int, 'vcpus': int, 'cpu_info': str,
        'memory_mb': int, 'local_gb': int, 'service_name': str,
        'reservable': 'True|False', 'status': str, 'trust_id': 'None',
        **_MADE_AT},
}


class TestBlazarFormat(base.LeaseTestCase):
    """Each key of an answer of Blazar, with a value of its form."""

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def setUp(self):
        super().setUp()
        self.types = resource_types.ResourceTypes({
            'virtual:instance': server_slots.Instances(),
            'flavor:instance': server_slots.FlavorInstances(),
            'physical:host': physical_hosts.PhysicalHosts()},
            base.FakeType())
        self.answers = lease_views.LeaseViews(self.types)
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.blazar_freepool._number',
            types.SimpleNamespace(get=lambda: 11)))

    def assert_form(self, name, answer):
        for key, form in _BLAZAR[name].items():
            self.assertIn(key, answer, name)
            value = answer[key]
            if isinstance(form, type):
                self.assertIsInstance(value, form, f'{name} {key}')
            else:
                self.assertRegex(str(value), f'^({form})$', f'{name} {key}')

    def described(self, status='pending', **reservation):
        ids = {'id': uuidutils.generate_uuid(),
               'lease_id': uuidutils.generate_uuid()}
        made = {'created_at': NOW, 'updated_at': None}
        return {
            **ids, 'name': 'x', 'description': '', 'tags': [],
            'status': 'PENDING', 'status_reason': '', 'conditions': [],
            'degraded': False, 'project_id': 'p', 'user_id': 'u',
            'start_date': NOW, 'end_date': NOW + 60, 'on_end': 'delete',
            'before_end_date': None, 'grace_period': 0, 'auto_extend': 0,
            'lease_type': 'scheduled', 'retry_until': None,
            'recurrence_id': None, 'warnings': [], **made,
            'reservations': [{
                **ids, 'status': status, 'resources': {}, 'servers': [],
                'missing_resources': False, 'resources_changed': False,
                'amount': 2, **made, **reservation}],
            'events': [{**ids, 'event_type': 'start_lease', 'time': NOW,
                        'status': 'UNDONE', 'action': None, **made}]}

    def test_leases_and_reservations_have_format_of_blazar(self):
        flavor = {'vcpus': 2, 'memory_mb': 1024, 'root_gb': 10,
                  'ephemeral_gb': 5, 'swap': 0, 'extra_specs': {'a': 'b'}}
        for name, asked in (
                ('virtual:instance', {
                    'amount': '2', 'vcpus': 2, 'memory_mb': 1024,
                    'disk_gb': 10, 'affinity': False}),
                ('flavor:instance', {'amount': 2, 'flavor_id': 7}),
                ('physical:host', {'min': 1, 'max': '2'})):
            for status in ('pending', 'active', 'deleted'):
                lease = self.answers.lease(self.described(
                    status, resource_type=name, spec=flavor,
                    params=self.types.named[name].read(asked)))
                self.assert_form('lease', lease)
                self.assert_form('event', lease['events'][0])
                reservation = lease['reservations'][0]
                self.assert_form(name, reservation)
                self.assertFalse({'spec', 'params'} & reservation.keys())
                self.assertEqual(
                    11 if status != 'deleted' and name != 'physical:host'
                    else None, reservation.get('aggregate_id'))

    def test_flavor_reservation_shows_details_of_flavor(self):
        flavor = {'vcpus': 2, 'memory_mb': 1024, 'root_gb': 10,
                  'ephemeral_gb': 5, 'swap': 0, 'extra_specs': {'a': 'b'}}
        kind = self.types.named['flavor:instance']
        reservation, = self.answers.lease(self.described(
            resource_type='flavor:instance', spec=flavor,
            params=kind.read({'flavor_id': 'f1'})))['reservations']
        self.assertEqual((2, 1024, 10), tuple(reservation[key] for key in (
            'vcpus', 'memory_mb', 'disk_gb')))
        self.assertEqual(
            {'id': 'f1', 'vcpus': 2, 'ram': 1024, 'disk': 10, 'swap': 0,
             'OS-FLV-EXT-DATA:ephemeral': 5, 'extra_specs': {'a': 'b'}},
            json.loads(reservation['resource_properties']))
        wanted = '["=", "$gpu", "yes"]'
        reservation, = self.answers.lease(self.described(
            resource_type='flavor:instance', spec=flavor, params=kind.read({
                'flavor_id': 'f1', 'resource_properties': wanted}),
        ))['reservations']
        self.assertEqual(wanted, reservation['resource_properties'])

    def test_host_has_format_of_blazar(self):
        self.host('one', VCPU=20)
        with self.database.writer() as session:
            host, = session.query(models.Host).all()
            host.properties = {
                'hypervisor_hostname': 'one', 'hypervisor_type': 'QEMU',
                'hypervisor_version': 8, 'vcpus': 20, 'memory_mb': 1,
                'local_gb': 1}
            uuid = host.uuid
        with self.database.writer() as session:
            enrollment.start(session, NOW, uuid, {})
        with self.database.reader() as session:
            host, = session.query(models.Host).all()
        said = host_enrollment._described(host, {}, {})
        self.assert_form('host', said)
        self.assertEqual('2027-01-15 08:00:00', said['created_at'])
