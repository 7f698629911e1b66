# SPDX-License-Identifier: Apache-2.0

"""A resource type and an end policy of another package, in a whole Nova.

They are the examples of the contributor guide, and requested as users do.
"""

import fixtures

from blazar_core.common import clocks
from blazar_core.common import model
from blazar_nova.resource_types import extensions
from blazar_nova.verify import verification
from tests import driven
from tests.functional import api_base
from tests.unit.blazar_core import test_end_policies
from tests.unit.blazar_core import test_resource_types

HOUR = 3600


class TestExtending(api_base.ApiTestCase):

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n'
                 'instances = 5\n'
                 '[blazar]\n'
                 'on_end = delete,keep\n')

    def setUp(self):
        self.lots = test_resource_types.ParkingLots()
        self.lots.garages = [self.garage('garage', 10)]
        self.useFixture(fixtures.MockPatchObject(
            extensions, 'installed_types', lambda known={
                **extensions.installed_types(),
                'parking:lot': self.lots}: known))
        self.useFixture(fixtures.MockPatchObject(
            extensions, 'installed_policies', lambda known={
                **extensions.installed_policies(),
                'keep': test_end_policies.Keep()}: known))
        super().setUp()

    def garage(self, name, width):
        return model.HostFacts(
            f'uuid-of-{name}', name, '', {'CUSTOM_LOT_WIDTH': width})

    def lots_of(self, amount=2, width=3, **more):
        return {'resource_type': 'parking:lot', 'amount': amount,
                'width': width, **more}

    def verify(self):
        report = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(False)
        return [one.text for one in report.left] + report.failures

    def ends(self, lease):
        """Carry out the due events; return whether the lease has ended."""
        self.run_until(self.clock.now() + 300)
        return self.get(lease)['status'] == 'TERMINATED'

    def test_parking_lot_lease_from_creation_to_end(self):
        lease = self.make_active(reservations=[
            self.lots_of(), self.reservation()])
        lots, servers = lease['reservations']
        lots, servers = sorted(
            self.get(lease)['reservations'],
            key=lambda one: one['resource_type'])
        self.assertEqual((2, 3, 'active', []), (
            lots['amount'], lots['width'], lots['status'], lots['servers']))
        self.assertEqual({lots['id']: ('uuid-of-garage',) * 2},
                         self.lots.barrier)
        server = self.boot_active('one', flavor=servers['id'])
        self.run_sync()
        self.assertEqual([], self.verify())
        # More lots than there are; and a reservation without a flavor.
        refused = self.make(reservations=[self.lots_of(2)], code=409)
        self.assertIn('next_start', str(refused))
        self.assertIn('no servers are booted with it', self.refused(
            400, self.boot, 'two', hints={'reservation': lots['id']}))
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': lots['id'], 'amount': 1}]}, code=200)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual({lots['id']: ('uuid-of-garage',)}, self.lots.barrier)
        self.lots.garages = [self.garage('other', 4)]
        # One answer without a garage takes nothing from leases.
        self.run_sync()
        self.run_sync()
        self.listener.overbooking.look()
        driven.run_due(self.listener.engine)
        self.assertEqual({lots['id']: ('uuid-of-other',)}, self.lots.barrier)
        self.run_until(self.clock.now() + HOUR // 2)
        self.assertIn(('sweep', lots['id']), self.lots.swept)
        self.run_until(self.clock.now() + HOUR)
        self.wait_for(lambda: self.ends(lease))
        self.assertEqual({}, self.lots.barrier)
        self.assertNotIn(server['id'], [
            one['id'] for one in self.alice.get_servers()])

    def test_invalid_parameters_of_resource_type_are_refused(self):
        for wrong, part in (({'amount': 'x'}, '"amount" is x'),
                            ({'height': 1}, 'height')):
            self.assertIn(part, str(self.make(
                reservations=[self.lots_of(**wrong)], code=400)))
        missing = self.lots_of()
        del missing['width']
        self.assertIn('Missing parameter width', str(self.make(
            reservations=[missing], code=400)))

    def test_parking_lots_do_not_count_as_instances(self):
        self.make(reservations=[self.lots_of(10, 1)])
        self.make(reservations=[self.reservation(amount=5, vcpus=1)])
        refused = self.make(reservations=[self.reservation()], code=403)
        self.assertIn('instances', str(refused))

    def test_availability_defaults_to_servers(self):
        for query, part in (({'vcpu': 2}, 'vcpus'),
                            ({'amount': 2}, 'Missing parameter vcpus')):
            answer = self.ask('GET', '/availability', code=400, **query)
            self.assertIn(part, str(answer))
        for query in ({'vcpus': 1, 'memory_mb': 1, 'disk_gb': 1},
                      {'flavor_id': '1'}, {'width': 1, 'amount': 1}):
            answer = self.ask('GET', '/availability', code=200, **query)
            self.assertGreater(
                answer['availability'][0]['fits'], 0, query)

    def test_lease_that_cannot_be_shown_does_not_hide_others(self):
        def broken(*_args):
            raise ZeroDivisionError

        self.lots.show = broken
        lease = self.make(reservations=[self.lots_of()])
        other = self.make(reservations=[self.reservation()])
        listed = self.ask('GET', '/leases', code=200)['leases']
        self.assertEqual({lease['id'], other['id']},
                         {one['id'] for one in listed})

    def test_uninstalled_resource_type_does_not_break_leases(self):
        lease = self.make_active(reservations=[
            self.lots_of(), self.reservation()])
        lots, servers = sorted(
            lease['reservations'], key=lambda one: one['resource_type'])
        self.boot_active('one', flavor=servers['id'])
        self.run_sync()
        named = self.listener.parts.types.named, extensions.installed_types()
        instances = extensions.installed_types()['virtual:instance']
        for one in named:
            for name in ('parking:lot', 'virtual:instance'):
                one.pop(name, None)
        # Existing leases are still known.
        self.assertEqual([], self.verify())
        for one in named:
            one['virtual:instance'] = instances
        self.ask('PUT', f'/leases/{lease["id"]}',
                 {'end_date': self.at(2 * HOUR)}, code=200)
        self.assertIn('no servers are booted with it', self.refused(
            400, self.boot, 'two', hints={'reservation': lots['id']}))
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.wait_for(lambda: not self.ends(lease) and (
            not self.alice.get_servers()))
        self.wait_for(lambda: not self.ends(lease) and (
            'could not be closed' in self.get(lease)['status_reason']))

    def test_keep_policy_keeps_server(self):
        server = self.boot_active('kept', hints=self.lease_hints(
            'kept', length=HOUR, on_end='keep'))
        self.run_sync()
        self.run_until(clocks.SystemClock().now() + HOUR)
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertEqual([('TERMINATED',)], [
            tuple(row) for row in self.query('SELECT status FROM leases')])
        usage = [row for row in self.query('SELECT usage FROM hosts')
                 if 'VCPU' in str(row)]
        self.assertEqual(1, len(usage), usage)
