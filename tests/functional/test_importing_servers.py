#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Places for servers that Blazar has given."""

from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids

from tests import blazar18
from tests.functional import nova_box
from tests.functional import test_importing

HOUR = 3600


class ServersTestCase(test_importing.ImportTestCase):
    """Hosts of 4 VCPU and 8 GB."""

    def servers_of(self, start, end, *hosts, **values):
        """A lease of servers in Blazar, and its flavor in Nova."""
        lease_id, reservation_id = self.blazar.lease_of_servers(
            self.began + start, self.began + end, *hosts,
            project=nova_box.PROJECT_ID, **{
                'vcpus': 2, 'memory_mb': 1024, 'disk_gb': 1, **values})
        self.make_flavor(reservation_id)
        return lease_id, reservation_id

    def make_flavor(self, reservation_id, projects=(), **values):
        """As Blazar makes it: for nobody, until the lease begins."""
        resource_class = reservation_id.upper().replace('-', '_')
        objects.Flavor(
            self.context, flavorid=reservation_id,
            name=f'reservation:{reservation_id}', is_public=False,
            projects=[*projects], disabled=False, rxtx_factor=1.0, swap=0,
            **{'vcpus': 2, 'memory_mb': 1024, 'root_gb': 1, 'ephemeral_gb': 0,
               **values}, extra_specs={
                'aggregate_instance_extra_specs:reservation': reservation_id,
                f'resources:CUSTOM_RESERVATION_{resource_class}': '1',
                'affinity_id': uuids.group}).create()


class TestPendingServers(ServersTestCase):

    def test_it_begins_with_the_flavor_that_blazar_has_made(self):
        lease_id, reservation_id = self.servers_of(HOUR, 2 * HOUR, '2', '2')
        self.aggregate(reservation_id, None, [], reservation=reservation_id,
                       filter_tenant_id=nova_box.PROJECT_ID)
        self.assertIn('3 imported.', self.imported())
        self.assertEqual([('host2',), ('host2',)], self.books(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id'))
        self.assertIn('3 there already.', self.imported())
        before = self.flavor(reservation_id)
        self.run_until(self.began + HOUR)
        lease = self.get({'id': lease_id})
        self.assertEqual('ACTIVE', lease['status'])
        self.assertEqual(reservation_id, lease['reservations'][0]['flavor_id'])
        flavor = self.flavor(reservation_id)
        self.assertEqual(before.id, flavor.id)
        self.assertEqual({'blazar:reservation': reservation_id},
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

    def test_apart_and_like_a_flavor(self):
        """And nothing of Blazar's is there any more."""
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

    def test_one_that_lacks_a_place_gets_it(self):
        lease_id, _id = self.servers_of(HOUR, 2 * HOUR, '2', amount=2)
        self.assertIn('1 of its places are missing', self.manage()[1])
        self.imported()
        self.listener.watch.look()
        self.assertEqual(
            [(0,)], self.books('SELECT COUNT(*) FROM bookings '
                               'WHERE host_id IS NULL'))

    def test_what_would_overbook_is_refused(self):
        lease_id, _id = self.servers_of(
            HOUR, 2 * HOUR, '2', '2', '2', '1')
        code, text = self.manage('--apply')
        self.assertEqual(1, code, text)
        self.assertIn(f'({lease_id}): REFUSED: Host host2 would be '
                      f'overbooked: it offers', text)
        self.ask('GET', f'/leases/{lease_id}', code=404)
