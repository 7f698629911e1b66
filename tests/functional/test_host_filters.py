# SPDX-License-Identifier: Apache-2.0

"""Requirements that placement does not model: reported before the start."""

from unittest import mock

import fixtures
from nova import objects

from blazar_nova.compat import host_filters

from tests.functional import test_preflight

HOUR = 3600


class HostFiltersTestCase(test_preflight.PreflightTestCase):

    more_conf = ('[filter_scheduler]\nenabled_filters = ComputeFilter,'
                 'ComputeCapabilitiesFilter,'
                 'AggregateInstanceExtraSpecsFilter,NUMATopologyFilter,'
                 'PciPassthroughFilter,LeaseFilter\n')

    def fill_numa(self):
        """Give each host a NUMA topology whose memory is used up."""
        real = host_filters._state

        def state(*args):
            found = real(*args)
            found.numa_topology = objects.NUMATopology(cells=[
                objects.NUMACell(
                    id=0, cpuset={0, 1}, pcpuset=set(), memory=8192,
                    cpu_usage=0, memory_usage=10 ** 6, pinned_cpus=set(),
                    siblings=[{0}, {1}], socket=0, mempages=[])])
            return found

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.host_filters._state', state))

    def boot_now(self, flavor):
        return self.boot('vm1', flavor=flavor, hints=self.lease_hints('vm1'))


class HostFiltersTest(HostFiltersTestCase):

    def test_aggregate_extra_specs_filter_is_applied(self):
        flavor = self.flavor_with('aggregate_instance_extra_specs:ssd', 'true')
        for boot in (self.boot_now, lambda one: self.hold(flavor=one)):
            self.assertIn('no host', self.refused(409, boot, flavor))
        aggregate = self.admin.post_aggregate({'aggregate': {'name': 'ssd'}})
        self.admin.add_host_to_aggregate(aggregate['id'], 'host2')
        self.admin.api_post(f'/os-aggregates/{aggregate["id"]}/action', {
            'set_metadata': {'metadata': {'ssd': 'true'}}})
        self.hold(flavor=flavor, count=3)
        self.assertEqual(['host2'] * 3, [*self.bookings().values()])
        self.before()
        self.admin.api_post(f'/os-aggregates/{aggregate["id"]}/action', {
            'set_metadata': {'metadata': {'ssd': None}}})
        warning, = self.look()
        self.assertIn('None of the hosts may be used', warning)

    def test_compute_capabilities_filter_is_applied(self):
        flavor = self.flavor_with('capabilities:hypervisor_type', 's== ironic')
        self.refused(409, self.boot_now, flavor)
        self.hold(flavor=self.flavor_with(
            'capabilities:hypervisor_type', 's== fake'))
        self.assertEqual([], self.lease('vm1')['warnings'])

    def test_flavor_that_no_host_supports_is_refused(self):
        """Regardless of free capacity: no host has a NUMA topology."""
        flavor = self.flavor_with('hw:numa_nodes', '1')
        for boot in (self.boot_now, lambda one: self.hold(flavor=one)):
            self.assertIn('no host', self.refused(409, boot, flavor))

    def test_used_up_numa_topology_causes_warning(self):
        self.fill_numa()
        flavor = self.flavor_with('hw:numa_nodes', '1')
        self.assertIn('A NUMA topology', self.refused(
            409, self.boot_now, flavor))
        self.hold(flavor=flavor)
        warning, = self.lease('vm1')['warnings']
        self.assertIn('not reserved', warning)
        self.assertIn('now no host has it free', warning)
        self.clock.advance(HOUR)
        self.assertEqual([warning], self.look())
        with mock.patch.object(
                host_filters, 'refused', lambda *_args, **_more: set()):
            self.clock.advance(600)
            kept, = self.look()
        self.assertIn('not reserved', kept)
        self.assertNotIn('now no host', kept)

    def test_filters_are_not_run_for_other_flavors(self):
        with mock.patch.object(host_filters, 'refused') as refused:
            self.hold()
            self.before()
            self.assertEqual([], self.look())
        refused.assert_not_called()


class UniqueNameTest(HostFiltersTestCase):
    """A hostname of another server, where hostnames are unique."""

    more_conf = ('[DEFAULT]\n'
                 'osapi_compute_unique_server_name_scope = project\n')

    def test_start_waits_while_hostname_is_in_use(self):
        plain = self.boot_active('vm1')
        self.assertIn('vm1', self.refused(409, self.boot_now, '1'))
        server = self.hold()
        self.clock.advance(HOUR)
        warning, = self.look()
        self.assertIn('vm1', warning)
        self.clock.advance(HOUR)
        self.run_due()
        lease = self.lease('vm1')
        self.assertEqual('PENDING', lease['status'])
        self.assertIn(warning, lease['status_reason'])
        self.assertEqual('RESERVED', self.alice.get_server(
            server['id'])['status'])
        self.alice.delete_server(plain['id'])
        self.wait_until_gone(plain['id'])
        self.clock.advance(300)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
