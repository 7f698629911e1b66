# SPDX-License-Identifier: Apache-2.0

"""Accelerators of a device profile: cyborg translates it for placement."""

import contextlib

import fixtures
from nova import exception
from nova.tests.fixtures import cyborg
from oslo_config import fixture as config_fixture

from blazar_nova.compat import process
from tests.functional import api_base
from tests.functional import test_host_filters
from tests.functional import test_units

HOUR = 3600
PROFILE = cyborg.CyborgFixture.dp_name


@contextlib.contextmanager
def without(known):
    """Make cyborg know no device profile in this context."""
    was = known.mock_get_dp.side_effect
    known.mock_get_dp.side_effect = lambda *_args: []
    try:
        yield
    finally:
        known.mock_get_dp.side_effect = was


@contextlib.contextmanager
def silent(known):
    """Make cyborg not answer in this context."""
    def raises(name):
        raise exception.DeviceProfileError(name=name, msg='it does not answer')

    with fixtures.MonkeyPatch(
            'blazar_nova.compat.accelerators._is_there', lambda _context:
            True):
        was = known.mock_get_dp.side_effect
        known.mock_get_dp.side_effect = raises
        try:
            yield
        finally:
            known.mock_get_dp.side_effect = was


class WithoutCyborgTest(test_units.UnitsTestCase):
    """A cloud that has no cyborg."""

    def test_device_profiles_are_refused_without_cyborg(self):
        flavor = self.flavor(accel__device_profile=PROFILE)
        for asked in (None, HOUR):
            self.assertIn(PROFILE, self.refused(
                400, self.boot, 'vm1', flavor=flavor,
                hints=self.lease_hints('vm1', asked)))
            self.assertIn(PROFILE, self.make(
                start_in=asked, code=400, reservations=[{
                    'resource_type': 'flavor:instance', 'flavor_id': flavor,
                    'amount': 1}])['error_message'])
        self.assertEqual(0, self.row_counts()['leases'])


class SilentCyborgTest(test_units.UnitsTestCase):
    """A cloud whose cyborg does not answer."""

    def setUp(self):
        super().setUp()
        # Nothing listens on port 1.
        self.useFixture(config_fixture.Config(process.CONF)).config(
            endpoint_override='http://127.0.0.1:1', group='cyborg')

    def test_lease_is_refused_with_503_while_cyborg_is_unavailable(self):
        flavor = self.flavor(accel__device_profile=PROFILE)
        for asked in None, HOUR:
            answer = self.make(start_in=asked, code=503, reservations=[{
                'resource_type': 'flavor:instance', 'flavor_id': flavor,
                'amount': 1}])
            self.assertEqual('CLOUD_UNAVAILABLE', answer['error_name'])
            self.assertIn('Cyborg does not answer', answer['error_message'])
        self.assertEqual(0, self.row_counts()['leases'])


class AcceleratorsTest(test_units.UnitsTestCase):

    def setUp(self):
        super().setUp()
        self.cyborg = self.useFixture(cyborg.CyborgFixture())
        self.accelerated = self.flavor(accel__device_profile=PROFILE)

    def leased(self, code=201, **more):
        return self.make(start_in=HOUR, code=code, reservations=[{
            'resource_type': 'flavor:instance', 'amount': 1,
            'flavor_id': self.accelerated, **more}])

    def test_lease_needs_host_with_matching_accelerator(self):
        self.refuse(self.accelerated)
        self.leased(409)
        self.add_provider('fpga1', 'FPGA', 2)
        self.run_sync()
        self.refuse(self.accelerated)

    def test_accelerator_is_reserved_by_only_one_lease(self):
        self.add_provider('fpga1', 'FPGA', 2, self.cyborg.trait)
        self.run_sync()
        self.leased(409, amount=3)
        reservation, = self.leased()['reservations']
        self.hold(flavor=self.accelerated)
        self.refuse(self.accelerated, 'vm2')
        self.leased(409)
        # A flavor from before cannot be enlarged either.
        self.ask('PUT', f'/leases/{reservation["lease_id"]}', {
            'reservations': [{'id': reservation['id'], 'amount': 2}]},
            code=409)
        self.clock.advance(HOUR)
        self.run_due()
        self.wait_for(lambda: self.admin.api_get(
            f'/flavors/{reservation["id"]}').body, what='its flavor is there')

    def test_start_is_deferred_while_device_profile_is_missing(self):
        self.add_provider('fpga1', 'FPGA', 2, self.cyborg.trait)
        self.run_sync()
        server = self.hold(flavor=self.accelerated)
        self.clock.advance(HOUR - 60)
        with without(self.cyborg):
            self.listener.parts.preflight.look()
        self.assertIn(PROFILE, self.lease('vm1')['warnings'][0])
        self.clock.advance(60)
        with without(self.cyborg):
            self.run_due()
        lease = self.lease('vm1')
        self.assertEqual('PENDING', lease['status'])
        self.assertIn(PROFILE, lease['status_reason'])
        self.clock.advance(300)
        with silent(self.cyborg):
            self.run_due()
        lease = self.lease('vm1')
        self.assertEqual('PENDING', lease['status'])
        self.assertIn('Cyborg does not answer', lease['status_reason'])
        self.clock.advance(300)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')


class PreflightTest(test_host_filters.HostFiltersTestCase,
                    api_base.ApiTestCase):
    """Answers of the preflight before the start."""

    def make_lease(self, flavor):
        return self.make(start_in=HOUR, reservations=[{
            'resource_type': 'flavor:instance', 'flavor_id': flavor,
            'amount': 1}])

    def test_creation_warns_of_unreserved_numa_topology(self):
        flavor = self.flavor_with('hw:numa_nodes', '1')
        # No host has NUMA nodes.
        refused = self.make(start_in=HOUR, code=409, reservations=[{
            'resource_type': 'flavor:instance', 'flavor_id': flavor,
            'amount': 1}])
        self.assertEqual('NO_ROOM', refused['error_name'])
        self.fill_numa()
        warning, = self.make_lease(flavor)['warnings']
        self.assertIn('A NUMA topology', warning)
        self.assertIn('not reserved', warning)
        self.assertEqual([], self.make_lease('1')['warnings'])
