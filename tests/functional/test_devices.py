# SPDX-License-Identifier: Apache-2.0

"""Devices that placement counts, on hosts with more than one kind."""

from nova import context as nova_context
from nova import objects
from nova.pci import request
from oslo_config import fixture as config_fixture

from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import process
from blazar_nova.compat import server_demand
from tests import driven
from tests.functional import nova_box
from tests.functional import test_units

HOUR = 3600
#: The lead time of interruptible servers, by default.
LEAD = 600
A100, V100 = 'CUSTOM_A100', 'CUSTOM_V100'
#: The trait that Nova requires of, and sets on, providers of PCI devices.
OWNED = 'OWNER_NOVA'


class DevicesTestCase(test_units.UnitsTestCase):
    """One host with a GPU of each of two kinds, of one resource class."""

    def setUp(self):
        super().setUp()
        compute_hosts.tell_placement('put', '/resource_classes/CUSTOM_GPU')
        self.cards = {
            trait: self.add_provider(f'card-{trait[-4]}', 'CUSTOM_GPU', 1,
                                     trait, OWNED) for trait in (A100, V100)}
        self.run_sync()
        self.any_gpu = self.flavor(resources__CUSTOM_GPU='1')
        self.a100, self.v100 = (self.of_kind(one) for one in (A100, V100))

    def of_kind(self, trait):
        return self.flavor(**{'resources1__CUSTOM_GPU': '1',
                              f'trait1__{trait}': 'required'})

    def reserve(self, flavor, code=201, amount=1, start_in=HOUR, **more):
        return self.make(start_in=start_in, code=code, reservations=[{
            'resource_type': 'flavor:instance', 'flavor_id': flavor,
            'amount': amount, 'affinity': None}], **more)

    def card_of(self, server):
        """Return the trait of the card that is allocated to a server."""
        held = compute_hosts.allocations(server['id'])
        found = [trait for trait, uuid in self.cards.items() if uuid in held]
        self.assertEqual(1, len(found), held)
        return found[0]


class KindsTest(DevicesTestCase):

    def test_device_kinds_are_counted_separately(self):
        self.reserve(self.a100)
        refused = self.reserve(self.a100, code=409)
        self.assertIn('next_start', str(refused))
        self.reserve(self.v100)
        for flavor in (self.v100, self.any_gpu):
            self.reserve(flavor, code=409)

    def test_reservations_of_any_kind_use_all_cards(self):
        self.reserve(self.any_gpu)
        # One of either kind is left: not one of both, and not two.
        self.reserve(self.any_gpu, code=409, amount=2)
        self.reserve(self.any_gpu)
        self.reserve(self.a100, code=409)

    def test_server_with_two_devices_uses_both_kinds(self):
        both = self.flavor(
            resources1__CUSTOM_GPU='1', resources2__CUSTOM_GPU='1',
            **{f'trait1__{A100}': 'required', 'group_policy': 'none'})
        lease = self.reserve(both)
        for flavor in (self.v100, self.a100, self.any_gpu):
            self.reserve(flavor, code=409)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.reserve(self.v100)
        self.reserve(both, code=409)

    def assert_left(self, left, **boot):
        """A server without a preferred kind gets the remaining card."""
        server = self.boot('vm1', flavor=self.any_gpu, **boot)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(left, self.card_of(server))

    def test_unleased_server_avoids_reserved_a100(self):
        self.reserve(self.a100)
        self.assert_left(V100)

    def test_unleased_server_avoids_reserved_v100(self):
        self.reserve(self.v100)
        self.assert_left(A100)

    def test_leased_server_avoids_a100_of_next_lease(self):
        self.reserve(self.a100)
        self.assert_left(V100, hints=self.lease_hints(
            'vm1', length=2 * HOUR))

    def test_leased_server_avoids_v100_of_next_lease(self):
        self.reserve(self.v100)
        self.assert_left(A100, hints=self.lease_hints(
            'vm1', length=2 * HOUR))

    def test_lease_needs_one_kind_for_its_whole_window(self):
        """A card is free at each time, but none for the whole window."""
        self.reserve(self.a100, start_in=HOUR)
        self.reserve(self.v100, start_in=3 * HOUR)
        self.reserve(self.any_gpu, start_in=HOUR, length=3 * HOUR, code=409)
        self.reserve(self.any_gpu, start_in=2 * HOUR, length=2 * HOUR)

    def test_usage_is_counted_by_kind(self):
        server = self.boot('vm1', flavor=self.a100)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        self.reserve(self.a100, code=409)
        self.reserve(self.v100)

    def test_new_trait_of_provider_does_not_affect_reservations(self):
        self.reserve(self.a100)
        url = f'/resource_providers/{self.cards[A100]}/traits'
        compute_hosts.tell_placement('put', '/traits/CUSTOM_NEW')
        self.assertTrue(compute_hosts.tell_placement('put', url, {
            **self.ask_placement(url),
            'traits': [A100, OWNED, 'CUSTOM_NEW']}))
        self.run_sync()
        self.listener.overbooking.look()
        self.reserve(self.a100, code=409)
        self.reserve(self.v100)
        self.assertEqual(2, len([host for (host,) in self.query(
            'SELECT host_id FROM bookings') if host is not None]))

    def test_interruptible_server_uses_device_reserved_for_later(self):
        lease = self.reserve(self.a100, start_in=2 * HOUR)
        start = driven.parse_iso(lease['start_date'])
        hints = {'interruptible': 'True'}
        self.assertIn('No valid host', self.wait_for_status(self.boot(
            'vm1', flavor=self.a100)['id'], 'ERROR')['fault']['message'])
        server = self.boot_active('vm2', flavor=self.a100, hints=hints)
        other = self.boot_active('vm3', hints=hints)
        self.run_sync()
        self.clock.advance(start - LEAD - self.clock.now())
        self.listener.evictions.plan()
        shown = [self.ask('GET', f'/interruptible/{one["id"]}', code=200)[
            'interruptible'] for one in (server, other)]
        self.assertEqual(
            [clocks.iso(start - LEAD), None],
            [one['safe_until'] for one in shown])
        self.assertEqual([True, False], [
            one['eviction'] is not None for one in shown])

    def test_amount_cannot_exceed_cards_of_kind(self):
        lease = self.reserve(self.v100)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [{
            'id': lease['reservations'][0]['id'], 'amount': 2}]}, code=409)
        self.reserve(self.a100)


class AliasTest(DevicesTestCase):
    """The same with PCI aliases: Nova makes request groups of them."""

    def setUp(self):
        super().setUp()
        conf = self.useFixture(config_fixture.Config(process.CONF)).config
        conf(group='filter_scheduler', pci_in_placement=True)
        conf(group='pci', alias=[
            '{"name": "%s", "resource_class": "GPU"%s}' % (
                name, f', "traits": "{trait}"' if trait else '')
            for name, trait in (('a100', A100), ('v100', V100), ('gpu', ''))])
        # Nova caches them.
        request.get_alias_from_config.cache_clear()
        self.addCleanup(request.get_alias_from_config.cache_clear)

    def test_each_pci_alias_device_is_a_request_group(self):
        one, two, three, a100, both = (
            self.flavor(pci_passthrough__alias=alias) for alias in (
                'gpu:1', 'gpu:2', 'gpu:3', 'a100:1', 'a100:1,v100:1'))
        self.reserve(three, code=409)
        for fits, others in ((two, (one, a100, both)), (both, (one, two)),
                             (a100, (two, both, a100))):
            lease = self.reserve(fits)
            self.assertEqual([], lease['warnings'])
            for other in others:
                self.reserve(other, code=409)
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.reserve(self.flavor(pci_passthrough__alias='a100:2'), code=409)

    def test_devices_of_existing_servers_are_counted(self):
        """Nova stores no request groups of devices."""
        a100, both = (self.flavor(pci_passthrough__alias=alias)
                      for alias in ('a100:1', 'a100:1,v100:1'))
        server_id = self.boot('vm1', flavor=a100, hints=self.lease_hints(
            'vm1', HOUR))['id']
        spec, context = server_demand.spec_of([server_id])
        needs = server_demand.demand_of(context, [spec])
        self.assertEqual(1, needs.resources['CUSTOM_GPU'])
        self.assertIn(frozenset([self.cards[A100]]), [
            having for one in needs.groups for having in one.required])
        for flavor, amount in ((both, 2), (a100, 1), ('1', None)):
            takes, uncounted = server_demand.resized(server_id, flavor)
            self.assertEqual((amount, ''), (
                takes.get('CUSTOM_GPU'), uncounted))

    def test_leased_server_is_not_resized_to_unknown_alias(self):
        server_id = self.boot_active(
            'vm1', flavor='1', hints=self.lease_hints('vm1'))['id']
        unknown = self.flavor(pci_passthrough__alias='none:1')
        self.assertIn('alias', self.refused(
            400, self.alice.post_server_action, server_id,
            {'resize': {'flavorRef': unknown}}))


class MovedTest(DevicesTestCase):
    """Two hosts: the second has two cards of one kind, and one of the other.
    """

    hosts = {'host1': nova_box.Capacity(vcpus=16),
             'host2': nova_box.Capacity(vcpus=16)}

    def setUp(self):
        super().setUp()
        self.first = self.root
        self.root, = (uuid for (uuid,) in self.query('SELECT uuid FROM hosts')
                      if uuid != self.first)
        for name, trait in (('v1', V100), ('v2', V100),
                            ('a3', A100)):
            self.add_provider(name, 'CUSTOM_GPU', 1, trait, OWNED)
        self.run_sync()

    def hosts_of(self, lease):
        return [uuid for (uuid,) in self.query(
            'SELECT uuid FROM bookings JOIN hosts ON '
            'hosts.id = bookings.host_id JOIN reservations ON '
            'reservations.id = bookings.reservation_id WHERE '
            f"lease_id = '{lease['id']}'")]

    def test_reassigned_leases_keep_device_kind(self):
        leases = [self.reserve(self.a100) for _each in range(2)]
        self.reserve(self.a100, code=409)
        self.change('CUSTOM_GPU', self.cards[A100], total=1, max_unit=1,
                    reserved=1)
        self.run_sync()
        self.listener.overbooking.look()
        # Cards of the other kind are free, but do not match.
        self.assertEqual([self.root], [
            host for one in leases for host in self.hosts_of(one)])
        self.reserve(self.v100, amount=3)
        for one in leases:
            self.ask('DELETE', f'/leases/{one["id"]}', code=204)
        lease = self.reserve(self.a100)
        self.assertEqual([self.root], self.hosts_of(lease))

    def test_lease_is_reassigned_to_host_with_its_kind(self):
        lease = self.reserve(self.a100)
        here, = self.hosts_of(lease)
        there, = {self.first, self.root} - {here}
        url = '/resource_providers?required=' + A100
        card, = (one['uuid'] for one in self.ask_placement(url)[
            'resource_providers'] if one['root_provider_uuid'] == here)
        self.change('CUSTOM_GPU', card, total=1, max_unit=1, reserved=1)
        self.run_sync()
        self.listener.overbooking.look()
        self.assertEqual([there], self.hosts_of(lease))

    def test_leased_server_is_resized_only_to_free_device(self):
        self.reserve(self.a100, amount=2)
        server_id = self.boot_active('vm1', hints=self.lease_hints(
            'vm1', length=3 * HOUR))['id']
        self.run_sync()
        for flavor, status in ((self.a100, 'ACTIVE'),
                               (self.any_gpu, 'VERIFY_RESIZE')):
            self.alice.post_server_action(
                server_id, {'resize': {'flavorRef': flavor}})
            self.wait_for(lambda: self.admin.get_server(server_id)[
                'OS-EXT-STS:task_state'] is None, what='resized or not')
            self.assertEqual(
                status, self.admin.get_server(server_id)['status'])
        self.reserve(self.v100, amount=3, code=409)
        self.alice.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.reserve(self.v100, amount=3, code=409)
        self.reserve(self.v100, amount=2)

    def test_best_effort_migrates_server_with_needed_device(self):
        bob = self.api('f' * 32, 'bob', ('admin', 'member', 'reader'))
        names = {uuid: name for uuid, name in self.query(
            'SELECT uuid, name FROM hosts')}
        moved, stays = (self.boot_active(
            name, client=bob, flavor=flavor,
            availability_zone=f'nova:{names[self.root]}')['id']
            for name, flavor in (('bob1', self.v100), ('bob2', '1')))
        # Servers that have just arrived are not migrated.
        self.clock.advance(2 * pending.CLAIM_SECONDS)
        self.run_sync()
        server_id = self.boot('mine', flavor=self.flavor(**{
            f'resources{number}__CUSTOM_GPU': '1' for number in '123'}, **{
            f'trait{number}__{trait}': 'required'
            for number, trait in zip('123', (A100, V100, V100))},
            group_policy='none'), hints=self.lease_hints(
                'mine', duration='1h', lease_type='best_effort',
                timeout='10m'))['id']
        self.assertEqual('IN_PROGRESS', self.lease('mine')['status'])

        def hosts():
            return [self.admin.get_server(one)[
                'OS-EXT-SRV-ATTR:hypervisor_hostname']
                for one in (moved, stays)]

        def admitted():
            self.run_sync()
            self.clock.advance(2)
            self.run_due()
            return self.lease('mine')['status'] != 'IN_PROGRESS'

        self.run_until(clocks.SystemClock().now())
        self.wait_for(admitted, what='capacity for the lease')
        self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual([names[self.first], names[self.root]], hosts())

    def test_reservation_of_any_kind_spans_both_hosts(self):
        self.reserve(self.any_gpu, amount=5)
        for flavor in (self.a100, self.v100, self.any_gpu):
            self.reserve(flavor, code=409)

    def test_availability_is_by_kind(self):
        for flavor, fits in ((self.a100, 2), (self.v100, 3),
                             (self.any_gpu, 5)):
            free = self.ask('GET', '/availability', code=200,
                            flavor_id=flavor, amount=9)['availability']
            self.assertEqual([fits], [one['fits'] for one in free])


class UncountedTest(DevicesTestCase):
    """PCI devices that placement does not know."""

    def setUp(self):
        super().setUp()
        self.conf = self.useFixture(config_fixture.Config(process.CONF)).config
        self.conf(group='pci', alias=['{"name": "nic", "vendor_id": "8086", '
                                      '"product_id": "1572"}'])
        request.get_alias_from_config.cache_clear()
        self.addCleanup(request.get_alias_from_config.cache_clear)
        self.nic = self.flavor(pci_passthrough__alias='nic:1')

    def test_leases_of_uncounted_pci_devices_may_be_refused(self):
        self.assertIn('PCI devices', self.reserve(self.nic)['warnings'][0])
        self.conf(group='blazar', uncounted='refuse')
        for why in (self.reserve(self.nic, code=400)['error_message'],
                    self.refused(400, self.boot, 'vm1', flavor=self.nic,
                                 hints=self.lease_hints('vm1', HOUR))):
            self.assertIn('no leases of PCI devices', why)

    def test_leased_server_is_not_resized_to_what_is_refused(self):
        leased, ordinary = (self.boot_active(
            name, flavor='1', hints=hints)['id'] for name, hints in (
                ('vm1', self.lease_hints('vm1')), ('vm2', {})))
        numa, both = self.flavor(hw__numa_nodes='1'), self.flavor(
            hw__numa_nodes='1', pci_passthrough__alias='nic:1')
        context = nova_context.get_admin_context()

        def resize(server_id, flavor, code):
            return self.refused(
                code, self.alice.post_server_action, server_id,
                {'resize': {'flavorRef': flavor}})

        self.conf(group='blazar', uncounted='refuse')
        self.assertIn('no leases of PCI devices',
                      resize(leased, self.nic, 400))
        self.assertIn('no leases of a NUMA topology',
                      resize(leased, numa, 400))
        self.assertNotIn('leases', self.resize_to(ordinary, numa))
        # What it has had before is no reason.
        spec = objects.RequestSpec.get_by_instance_uuid(context, leased)
        spec.numa_topology = objects.InstanceNUMATopology(cells=[
            objects.InstanceNUMACell(id=0, cpuset={0}, memory=512)])
        spec.save()
        said = resize(leased, both, 400)
        self.assertIn('no leases of PCI devices,', said)
        self.assertNotIn('leases', self.resize_to(leased, numa))

    def resize_to(self, server_id, flavor):
        """Resize a server; return the body of the answer."""
        return str(self.alice.api_post(
            f'/servers/{server_id}/action',
            {'resize': {'flavorRef': flavor}},
            check_response_status=None).body)
