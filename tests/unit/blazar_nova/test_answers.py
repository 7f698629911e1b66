# SPDX-License-Identifier: Apache-2.0

from blazar_core.common import clock as clocks
from blazar_core.leases import views
from blazar_core import resources
from blazar_nova.parts import answers
from blazar_nova.resources import flavor_instances
from blazar_nova.resources import instances
from tests.unit import base

NOW = base.NOW


class TestAnswers(base.LeaseTestCase):
    """Leases of the core in the words of the API."""

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=20)
        self.answers = answers.Answers(resources.Types({
            'virtual:instance': instances.Instances(),
            'flavor:instance': flavor_instances.FlavorInstances()},
            base.FakeType()))

    def test_its_fields_are_those_that_may_be_asked_for(self):
        said = self.answers.lease(self.lease(50, 100))
        self.assertEqual(list(answers.FIELDS), list(said))
        # A secret of ours.
        self.assertIsNone(said['trust_id'])

    def test_times_are_text(self):
        described = self.reserve(50, 100, request=self.request(
            50, 100, before_end=NOW + 90))
        said = self.answers.lease(described)
        for name in ('start_date', 'end_date', 'before_end_date',
                     'created_at', 'updated_at'):
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
                              '2027-01-15T08:00:00.000000')
        self.assertEqual({
            'id': reservation['id'], 'lease_id': described['id'],
            'resource_id': reservation['id'],
            'resource_type': 'virtual:instance', 'status': 'pending',
            'amount': 2, 'resources': {'VCPU': 3}, 'vcpus': 3,
            'missing_resources': False, 'resources_changed': False,
            'servers': [], 'affinity': None, 'flavor_id': reservation['id'],
            'server_group_id': None, 'aggregate_id': None, **times,
        }, reservation)

    def test_servers_together_or_apart_have_a_group(self):
        for affinity in (True, False):
            reservation, = self.answers.lease(self.reserve(
                50, 100, self.places(affinity=affinity)))['reservations']
            self.assertEqual(
                (affinity, reservation['id']),
                (reservation['affinity'], reservation['server_group_id']))

    def test_that_of_a_boot_has_its_servers_and_no_flavor(self):
        described = self.lease(50, 100, count=3)
        reservation, = self.answers.lease(described)['reservations']
        self.assertEqual(base.servers_of(described), reservation['servers'])
        self.assertFalse({'flavor_id', 'server_group_id', 'affinity',
                          'params'} & reservation.keys())

    def test_what_is_not_installed_any_more_is_shown(self):
        lease = self.reserve(50, 100, self.places(2, 3))
        reservation, = answers.Answers(resources.Types(
            {}, base.FakeType())).lease(lease)['reservations']
        self.assertEqual(
            (3, 2, lease['reservations'][0]['id']), (
                reservation['vcpus'], reservation['amount'],
                reservation['id']))

    def test_a_notification_tells_of_a_lease(self):
        lease = views.get(self.database, self.reserve(50, 100)['id'])
        told, said = self.answers.payload(lease), self.answers.lease(lease)
        self.assertEqual(('1.6', lease['id'], lease['id']), (
            told['version'], told['lease_id'], told['id']))
        self.assertNotIn('trust_id', told)
        self.assertEqual(
            [event['time'] for event in said['events']],
            [event['event_date'] for event in told['events']])
        self.assertEqual(said['reservations'], told['reservations'])
