# SPDX-License-Identifier: Apache-2.0


from nova import objects
from nova.scheduler import host_manager
from oslotest import base

from blazar_nova.compat import flavors
from blazar_nova.compat import nova_scheduler


class TestPlugins(base.BaseTestCase):

    def test_server_may_be_leased_by_hint_or_by_flavor(self):
        def spec(extra_specs, **fields):
            return objects.RequestSpec(
                flavor=objects.Flavor(extra_specs=extra_specs), **fields)

        reserved = {flavors._MARK: 'one'}
        for wanted, one in (
                (False, spec({}, scheduler_hints={})),
                (False, spec({'hw:x': '1'}, scheduler_hints=None)),
                (True, spec({}, scheduler_hints={'reserved': ['True']})),
                (True, spec(reserved, scheduler_hints={})),
                # Its hints have not been loaded.
                (True, spec({}))):
            self.assertIs(wanted, nova_scheduler.may_be_leased(one))

    def spec(self, **extra_specs):
        return objects.RequestSpec(
            flavor=objects.Flavor(
                vcpus=3, memory_mb=512, root_gb=20, ephemeral_gb=0, swap=0,
                extra_specs=extra_specs),
            image=objects.ImageMeta(properties=objects.ImageMetaProps()),
            is_bfv=False, requested_resources=[], pci_requests=None,
            numa_topology=None)

    def host(self, *candidates):
        host = host_manager.HostState('host', 'node', 'cell')
        host.allocation_candidates = [
            {'allocations': {f'provider{number}': {'resources': resources}
                             for number, resources in enumerate(one)}}
            for one in candidates]
        return host

    def test_resources_of_all_providers_are_added_up(self):
        host = self.host([{'VCPU': 2, 'MEMORY_MB': 512}, {'VCPU': 1},
                          {'DISK_GB': 20}], [{'VCPU': 99}])
        lender = self.host()
        for hosts in ([host], [lender, host]):
            self.assertEqual(
                {'VCPU': 3, 'MEMORY_MB': 512, 'DISK_GB': 20},
                nova_scheduler.takes(hosts, self.spec()))

    def test_resources_of_request_replace_missing_candidates(self):
        amounts = {'MEMORY_MB': 512, 'DISK_GB': 20}
        self.assertEqual({'VCPU': 3, **amounts},
                         nova_scheduler.takes([self.host()], self.spec()))
        # Hosts without such CPUs are used as well, by VCPU.
        pinned = self.spec(**{'hw:cpu_policy': 'dedicated'})
        for hosts in ([{'VCPU': 3, **amounts}], [{'PCPU': 3, **amounts}]):
            self.assertEqual({'PCPU': 3, **amounts},
                             nova_scheduler.takes([self.host(hosts)], pinned))
