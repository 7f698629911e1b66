# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from nova.conf import CONF
from nova import context as nova_context
from nova import objects
from nova.objects import pci_device_pool
from oslo_config import fixture as conf_fixture
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_nova.compat import host_filters
from blazar_nova.compat import process
from tests.unit import base

ENABLED = ['ComputeFilter', 'ComputeCapabilitiesFilter',
           'NUMATopologyFilter', 'PciPassthroughFilter']


def spec(extra_specs=(), **more):
    return objects.RequestSpec(
        flavor=objects.Flavor(extra_specs=dict(extra_specs)),
        image=objects.ImageMeta(properties=objects.ImageMetaProps()),
        instance_uuid=uuids.server, scheduler_hints={}, **{
            'numa_topology': None, 'pci_requests': None, **more})


def gpus(count):
    return objects.InstancePCIRequests(requests=[objects.InstancePCIRequest(
        count=count, request_id=uuids.pci, alias_name='gpu',
        spec=[{'vendor_id': '10de', 'product_id': '1db4'}])])


def pages(size):
    return objects.InstanceNUMATopology(cells=[objects.InstanceNUMACell(
        id=0, cpuset={0}, pcpuset=set(), memory=1024, pagesize=size)])


def node(uuid, pools=(), page_sizes=(), used=0):
    """Return a host with devices, and four pages of some sizes in KiB.

    :param used: how many of them are used
    """
    topology = objects.NUMATopology(cells=[objects.NUMACell(
        id=0, cpuset={0, 1}, pcpuset=set(), memory=8192, cpu_usage=0,
        memory_usage=0, pinned_cpus=set(), siblings=[{0}, {1}], socket=0,
        network_metadata=objects.NetworkMetadata(
            physnets=set(), tunneled=False), mempages=[
                objects.NUMAPagesTopology(size_kb=size, total=4, used=used)
                for size in page_sizes])])
    return objects.ComputeNode(
        uuid=uuid, host=str(uuid), hypervisor_hostname=str(uuid),
        memory_mb=8192, free_ram_mb=8192, local_gb=10, local_gb_used=0,
        free_disk_gb=10, disk_available_least=None, vcpus=2, vcpus_used=0,
        updated_at=None, hypervisor_type='fake', hypervisor_version=1,
        cpu_info='', supported_hv_specs=[], stats={}, metrics='[]',
        host_ip='127.0.0.1', cpu_allocation_ratio=1.0,
        ram_allocation_ratio=1.0, disk_allocation_ratio=1.0,
        numa_topology=topology._to_json() if page_sizes else None,
        pci_device_pools=pci_device_pool.from_pci_stats([{
            'vendor_id': '10de', 'product_id': '1db4', 'numa_node': None,
            'count': count} for count in pools]))


class TestHostFilters(base.TestCase):
    """The filters that are called for a request."""

    def setUp(self):
        super().setUp()
        objects.register_all()
        process.CONF([], project='nova', default_config_files=[],
                     default_config_dirs=[])
        self.addCleanup(process.CONF.reset)
        self.conf = self.useFixture(conf_fixture.Config(CONF))
        self.conf.config(group='filter_scheduler', enabled_filters=ENABLED)
        self.context = nova_context.RequestContext('alice', 'mine')
        self.nodes = []
        self.patch('blazar_nova.compat.bounded_calls.of_api',
                   lambda *_args: [])
        self.patch('blazar_nova.compat.bounded_calls.of_cells',
                   lambda *_args: {uuids.cell: self.nodes})

    def patch(self, name, new):
        patcher = mock.patch(name, new)
        patcher.start()
        self.addCleanup(patcher.stop)

    def notes(self, request, *nodes):
        self.nodes = nodes
        return host_filters.notes(
            self.context, request, {one.uuid for one in nodes})

    def test_filters_are_selected_by_extra_specs(self):
        for name, asked in (
                ('capabilities:hypervisor_type', ENABLED[1:2]),
                ('hypervisor_type', ENABLED[1:2]), ('hw:cpu_policy', []),
                # Its filter is not enabled.
                ('aggregate_instance_extra_specs:ssd', []),
                ('resources:VGPU', [])):
            self.assertEqual(asked, host_filters.fixed(spec({name: '1'})))
        self.assertEqual([], host_filters.fixed(spec()))

    def test_plain_request_has_no_notes(self):
        self.assertEqual(([], True), self.notes(spec(), node(uuids.one)))

    def test_notes_name_pci_devices_as_not_reserved(self):
        request = spec(pci_requests=gpus(2))
        said, has_some = self.notes(
            request, node(uuids.one), node(uuids.two, pools=[2]))
        self.assertEqual((1, True), (len(said), has_some))
        self.assertIn('PCI devices: not reserved.', said[0])
        said, has_some = self.notes(
            request, node(uuids.one), node(uuids.two, pools=[1]))
        self.assertIn('now no host has it free', said[0])
        self.assertFalse(has_some)

    def test_pci_devices_in_placement_have_no_notes(self):
        self.conf.config(group='filter_scheduler', pci_in_placement=True)
        self.assertEqual(([], True), self.notes(
            spec(pci_requests=gpus(1)), node(uuids.one)))

    def test_notes_name_page_sizes_as_not_reserved(self):
        request = spec(numa_topology=pages(1048576))
        for sizes, expected in (((4, 1048576), True), ((4,), False),
                                ((), False)):
            said, has_some = self.notes(
                request, node(uuids.one, page_sizes=sizes))
            self.assertEqual((1, expected), (len(said), has_some), sizes)

    def test_notes_name_ports_that_need_one_subtree(self):
        request = spec()
        request.request_level_params = objects.RequestLevelParams()
        self.assertEqual(([], True), self.notes(request, node(uuids.one)))
        request.request_level_params.same_subtree = [['one', 'two']]
        said, has_some = self.notes(request, node(uuids.one))
        self.assertEqual((1, True), (len(said), has_some))
        self.assertIn('one subtree of resource providers: not reserved',
                      said[0])

    def test_hosts_without_page_size_are_refused_even_if_unused(self):
        request = spec(numa_topology=pages(1048576))
        self.assertEqual(['NUMATopologyFilter'], host_filters.fixed(request))
        self.nodes = [
            node(uuids.free, page_sizes=(4, 1048576)),
            node(uuids.full, page_sizes=(4, 1048576), used=4),
            node(uuids.others, page_sizes=(4,)), node(uuids.none)]
        for as_free, refused in (
                (False, {uuids.full, uuids.others, uuids.none}),
                (True, {uuids.others, uuids.none})):
            self.assertEqual(refused, host_filters.refused(
                self.context, request, {one.uuid for one in self.nodes},
                host_filters.fixed(request), as_free))
        # The total number of devices is unknown.
        self.assertEqual([], host_filters.fixed(spec(
            numa_topology=pages(4), pci_requests=gpus(1))))

    def test_disabled_filters_refuse_no_hosts(self):
        self.conf.config(group='filter_scheduler',
                         enabled_filters=['ComputeFilter'])
        said, has_some = self.notes(
            spec(pci_requests=gpus(1)), node(uuids.one))
        self.assertEqual((1, True), (len(said), has_some))
