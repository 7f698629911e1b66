# SPDX-License-Identifier: Apache-2.0

"""Reservation slots that were created by Blazar."""


from nova import context as nova_context
from nova import objects
from nova.scheduler.client import report
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_nova.compat import compute_hosts
from blazar_nova.verify import verification
from tests import blazar18
from tests.functional import nova_box
from tests.functional import test_importing

HOUR = 3600


def class_of(reservation_id):
    """Return the resource class of Blazar's slots."""
    return 'CUSTOM_RESERVATION_' + reservation_id.upper().replace('-', '_')


class ServersTestCase(test_importing.ImportTestCase):
    """Hosts of 4 VCPU and 8 GB."""

    def servers_of(self, start, end, *hosts, **values):
        """Create a lease of servers in Blazar, and its flavor in Nova."""
        lease_id, reservation_id = self.blazar.lease_of_servers(
            self.began + start, self.began + end, *hosts,
            project=nova_box.PROJECT_ID, **{
                'vcpus': 2, 'memory_mb': 1024, 'disk_gb': 1, **values})
        self.make_flavor(reservation_id)
        return lease_id, reservation_id

    def make_flavor(self, reservation_id, projects=(), **values):
        """Create a flavor as Blazar does: without projects until the start."""
        objects.Flavor(
            self.context, flavorid=reservation_id,
            name=f'reservation:{reservation_id}', is_public=False,
            projects=[*projects], disabled=False, rxtx_factor=1.0, swap=0,
            **{'vcpus': 2, 'memory_mb': 1024, 'root_gb': 1, 'ephemeral_gb': 0,
               **values}, extra_specs={
                'aggregate_instance_extra_specs:reservation': reservation_id,
                f'resources:{class_of(reservation_id)}': '1',
                'affinity_id': uuids.group}).create()


class TestPendingServers(ServersTestCase):

    def test_imported_lease_starts_with_flavor_of_blazar(self):
        lease_id, reservation_id = self.servers_of(HOUR, 2 * HOUR, '2', '2')
        self.aggregate(reservation_id, None, [], reservation=reservation_id,
                       filter_tenant_id=nova_box.PROJECT_ID)
        self.assertIn('3 imported.', self.imported())
        self.assertEqual([('host2',), ('host2',)], self.query(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id'))
        self.assertIn('3 there already.', self.imported())
        before = self.flavor(reservation_id)
        self.run_until(self.began + HOUR)
        lease = self.get({'id': lease_id})
        self.assertEqual('ACTIVE', lease['status'])
        self.assertNotIn(reservation_id, self.aggregates())
        self.assertEqual(reservation_id, lease['reservations'][0]['flavor_id'])
        flavor = self.flavor(reservation_id)
        self.assertEqual(before.id, flavor.id)
        self.assertEqual(dict.fromkeys((
            'aggregate_instance_extra_specs:reservation',
            'blazar:reservation'), reservation_id),
            flavor.extra_specs)
        self.assertEqual([nova_box.PROJECT_ID], flavor.projects)
        servers = [self.boot_active(f'in{number}', flavor=reservation_id)
                   for number in range(2)]
        self.assertEqual(['host2'] * 2, [*map(self.host_of, servers)])
        self.refused(409, self.boot, 'one more', flavor=reservation_id)
        self.delete(lease_id)
        for server in servers:
            self.wait_until_gone(server['id'])
        self.assertIsNone(self.flavor(reservation_id))

    def test_import_of_anti_affinity_and_flavor_reservations(self):
        """Nothing of Blazar remains."""
        wanted = {**blazar18.FLAVOR, 'ram': 512, 'disk': 1, 'extra_specs': {},
                  'OS-FLV-EXT-DATA:ephemeral': 0}
        lease_id, like = self.blazar.lease_of_servers(
            self.began + HOUR, self.began + 2 * HOUR, '1', '2', vcpus=2,
            project=nova_box.PROJECT_ID, flavor=wanted)
        apart = self.blazar.servers(lease_id, '2', '1', affinity=False,
                                    memory_mb=512, disk_gb=1)
        self.imported()
        self.run_until(self.began + HOUR)
        for flavor in (like, apart):
            self.assertEqual({'host1', 'host2'}, {
                self.host_of(self.boot_active(f'{flavor}{one}', flavor=flavor))
                for one in range(2)})
        reservation = next(one for one in self.get({'id': lease_id})[
            'reservations'] if one['id'] == apart)
        self.assertEqual(apart, reservation['server_group_id'])

    def test_missing_slot_of_imported_lease_is_booked(self):
        lease_id, _id = self.servers_of(HOUR, 2 * HOUR, '2', amount=2)
        self.assertIn('1 of its places are missing', self.manage()[1])
        self.imported()
        self.listener.overbooking.look()
        self.assertEqual(
            [(0,)], self.query('SELECT COUNT(*) FROM bookings '
                               'WHERE host_id IS NULL'))

    def test_import_that_would_overbook_host_is_refused(self):
        lease_id, _id = self.servers_of(
            HOUR, 2 * HOUR, '2', '2', '2', '1')
        code, text = self.manage('--apply')
        self.assertEqual(1, code, text)
        self.assertIn(f'({lease_id}): REFUSED: Host host2 would be '
                      f'overbooked: it offers', text)
        self.ask('GET', f'/leases/{lease_id}', code=404)


class TestActiveServers(ServersTestCase):
    """A lease of two slots on one host, one of which is taken."""

    def setUp(self):
        super().setUp()
        self.lease_id, self.reservation_id = self.begun('1', '1')
        self.server = self.boot_active('mine', flavor=self.reservation_id)
        self.assertEqual('host1', self.host_of(self.server))
        self.run_sync()

    def begun(self, *hosts, **values):
        """Start a lease as Blazar does."""
        lease_id, reservation_id = self.blazar.lease_of_servers(
            self.began - HOUR, self.began + HOUR, *hosts, status='ACTIVE',
            project=nova_box.PROJECT_ID, vcpus=2, memory_mb=1024, disk_gb=1,
            **values)
        self.make_flavor(reservation_id, [nova_box.PROJECT_ID])
        self.aggregate(
            reservation_id, None, [f'host{one}' for one in set(hosts)],
            reservation=reservation_id, filter_tenant_id=nova_box.PROJECT_ID)
        client = report.report_client_singleton()
        name = class_of(reservation_id)
        client.put(f'/resource_classes/{name}', None, version='1.7')
        for host in compute_hosts.all_hosts()[0]:
            count = hosts.count(host.name[-1])
            if count:
                own = uuidutils.generate_uuid()
                client.post('/resource_providers', {
                    'uuid': own, 'name': f'blazar_{own}',
                    'parent_provider_uuid': host.uuid}, version='1.20')
                client.put(f'/resource_providers/{own}/inventories', {
                    'resource_provider_generation': 0, 'inventories': {
                        name: {'total': count}}}, version='1.20')
        return lease_id, reservation_id

    def specs_of(self, server):
        """Return extra specs of its embedded flavor: in its cell and Nova."""
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            self.context, server['id'])
        with nova_context.target_cell(
                self.context, mapping.cell_mapping) as cell:
            instance = objects.Instance.get_by_uuid(
                cell, server['id'], ['flavor'])
        return [instance.flavor.extra_specs,
                objects.RequestSpec.get_by_instance_uuid(
                    self.context, server['id']).flavor.extra_specs]

    def places(self):
        """Return the bookings: host, server and state."""
        return self.query(
            'SELECT hosts.name, server_id, running, '
            'dispatched_at IS NOT NULL, claimed_at IS NOT NULL '
            'FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id ORDER BY server_id IS NULL')

    def nothing_differs(self):
        self.listener.server_sync.compare_all()
        self.verified()

    def verified(self):
        self.assertEqual([], [
            one.text for one in verification.Verifier(
                self.listener.parts, lambda _seconds: None,
                lambda _text: None, 0, False).run(False).left])

    def test_imported_active_lease_keeps_servers_until_end(self):
        self.assertIn(f'Lease lease ({self.lease_id}): imported',
                      self.imported())
        self.assertEqual('ACTIVE', self.get({'id': self.lease_id})['status'])
        self.assertEqual([('host1', self.server['id'], 1, 1, 1),
                          ('host1', None, 0, 0, 0)], self.places())
        self.assertEqual([{
            'blazar:reservation': self.reservation_id,
            'trait:CUSTOM_BLAZAR_POOL': 'required'}] * 2,
            self.specs_of(self.server))
        # Its usage is not counted in addition to its slot.
        self.assertEqual([('{}',)], self.query(
            "SELECT usage FROM hosts WHERE name = 'host1'"))
        self.assertNotIn(self.reservation_id, self.aggregates())
        # At once, as soon as the command has run.
        self.verified()
        other = self.boot_active('other', flavor=self.reservation_id)
        self.assertEqual('host1', self.host_of(other))
        self.refused(409, self.boot, 'too many', flavor=self.reservation_id)
        before = self.places()
        self.imported()
        self.assertEqual(before, self.places())
        self.run_until(clocks.SystemClock().now() + HOUR)
        for server in (self.server, other):
            self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 300)
        self.assertEqual('TERMINATED', self.get(
            {'id': self.lease_id})['status'])
        self.assertIsNone(self.flavor(self.reservation_id))

    def test_imported_servers_can_be_migrated_to_enrolled_hosts(self):
        self.imported()
        self.run_sync()
        self.admin.post_server_action(self.server['id'], {'migrate': None})
        self.wait_for_status(self.server['id'], 'VERIFY_RESIZE')
        self.admin.post_server_action(
            self.server['id'], {'confirmResize': None})
        self.wait_for_status(self.server['id'], 'ACTIVE')
        self.assertEqual('host2', self.host_of(self.server))

    def test_shelved_server_keeps_its_slot(self):
        self.admin.post_server_action(self.server['id'], {'shelve': None})
        self.wait_for_status(self.server['id'], 'SHELVED_OFFLOADED')
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertEqual(self.server['id'], self.places()[0][1])
        self.admin.post_server_action(self.server['id'], {'unshelve': None})
        self.wait_for_status(self.server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(self.server))

    def test_only_lease_on_host_with_foreign_server_is_refused(self):
        other, reservation_id = self.begun('2')
        stranger = self.old_boot('stranger', host='host2')
        self.run_sync()
        text = self.imported(1)
        self.assertIn(f'({stranger["id"]}). Migrate or delete', text)
        self.assertIn(f'({other}): REFUSED: Its host host2', text)
        self.assertEqual(1, len({one for one, *_more in self.places()}))
        self.assertIn(reservation_id, self.aggregates())
        self.admin.delete_server(stranger['id'])
        self.wait_until_gone(stranger['id'])
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertNotIn(reservation_id, self.aggregates())
        self.nothing_differs()

    def test_interrupted_import_can_be_repeated(self):
        self.interrupted('pool.join', 'flavors.take_over',
                         'flavors.open_reservation', 'pool.forget')
        self.imported()
        self.assertEqual(self.server['id'], self.places()[0][1])
        self.nothing_differs()

    def test_new_servers_keep_anti_affinity_with_imported_ones(self):
        self.admin.delete_server(self.server['id'])
        self.wait_until_gone(self.server['id'])
        self.look()
        self.clock.advance(60)
        self.blazar.execute("UPDATE leases SET status = 'TERMINATED'")
        _id, reservation_id = self.begun('1', '2', affinity=False)
        there = self.boot_active('there', flavor=reservation_id)
        self.run_sync()
        self.imported()
        self.assertEqual('anti-affinity', objects.InstanceGroup.get_by_uuid(
            self.context, reservation_id).policy)
        other = self.boot_active('other', flavor=reservation_id)
        self.assertEqual(['host1', 'host2'], sorted(
            map(self.host_of, (there, other))))

    def test_import_waits_for_unconfirmed_resize(self):
        self.flags(allow_resize_to_same_host=True)
        self.admin.post_server_action(self.server['id'], {
            'resize': {'flavorRef': '2'}})
        self.wait_for_status(self.server['id'], 'VERIFY_RESIZE')
        self.look()
        self.assertIn('confirm or revert resizes', self.imported(1))
        self.assertEqual([], self.places())
        self.admin.post_server_action(
            self.server['id'], {'revertResize': None})
        self.wait_for_status(self.server['id'], 'ACTIVE')
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertEqual(self.server['id'], self.places()[0][1])
        self.nothing_differs()

    def test_imported_lease_past_its_end_terminates(self):
        for column, date in (('end', '2020-01-01'), ('start', '2019-12-31')):
            self.blazar.execute(f'UPDATE leases SET {column}_date = :date',
                                date=f'{date} 00:00:00')
        self.imported()
        self.run_until(clocks.SystemClock().now())
        self.wait_until_gone(self.server['id'])
        self.run_until(self.clock.now() + 300)
        self.assertEqual('TERMINATED', self.get(
            {'id': self.lease_id})['status'])

    def test_import_of_lease_with_servers_and_whole_host(self):
        whole = self.blazar.insert(
            'reservations', lease_id=self.lease_id, status='active',
            resource_type='physical:host')
        self.blazar.insert(
            'computehost_reservations', reservation_id=whole,
            count_range='1-1', before_end='', resource_properties='',
            hypervisor_properties='')
        self.blazar.insert('computehost_allocations', compute_host_id='2',
                           reservation_id=whole)
        self.begin(whole, 'host2')
        server = self.old_boot('on it', whole, client=self.alice)
        self.run_sync()
        self.imported()
        self.assertEqual({self.server['id'], None}, {
            one for name, one, *_more in self.places() if name == 'host1'})
        self.assertEqual([('host2', whole)], self.query(
            'SELECT name, assigned_to FROM hosts '
            'WHERE assigned_to IS NOT NULL'))
        self.assertIn(f'trait:{self.trait_of(whole)}',
                      self.specs_of(server)[0])
        self.assertEqual(['host2'], self.aggregates()[whole])
        self.nothing_differs()
        self.delete(self.lease_id)
        for one in (server, self.server):
            self.wait_until_gone(one['id'])
