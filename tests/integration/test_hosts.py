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

"""Whole hosts on a real OpenStack: enrolled, leased, used and given back."""

import time
import typing as ty

from tests.integration import test_lease_api as lease_api


class HostsTest(lease_api.LeaseApiTestCase):
    """With the clients that users and operators have."""

    def hosts(self) -> list[str]:
        """The names of the hypervisors."""
        return sorted(one['hypervisor_hostname'] for one in self.admin(
            'GET', '/os-hypervisors')['hypervisors'])

    def aggregates(self) -> dict[str, list[str]]:
        return {one['name']: sorted(one['hosts']) for one in self.admin(
            'GET', '/os-aggregates')['aggregates']}

    def enrol(self, name: str) -> str:
        """By Blazar's client; returns the id of the host."""
        done = self.run_client('openstack', 'reservation', 'host', 'create',
                               '--extra', 'gpu=A100', name, '-f', 'value',
                               '-c', 'id', user='admin')
        self.assertEqual(0, done.returncode, done.stderr)
        host_id = done.stdout.split()[-1]
        self.addCleanup(self.run_client, 'openstack', 'reservation', 'host',
                        'delete', host_id, user='admin')
        return host_id

    def host_of(self, server_id: str) -> str:
        return ty.cast(str, self.server(
            server_id)['OS-EXT-SRV-ATTR:hypervisor_hostname'])

    def test_from_its_enrolment_to_its_return(self) -> None:
        mine, *others = self.hosts()
        self.enrol(mine)
        self.assertEqual([mine], self.aggregates()['freepool'])
        start = time.time()
        lease = self.make(start, 5 * lease_api.MINUTE, reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '',
            'resource_properties': '["==", "$gpu", "A100"]'}])
        reservation_id = lease['reservations'][0]['id']
        self.wait_for_lease(lease['id'], 'ACTIVE')
        self.assertEqual([mine], self.aggregates()[reservation_id])
        server = self.openstack(
            'server', 'create', '--image', 'cirros', '--nic', 'none',
            '--flavor', 'm1.nano', '--hint', f'reservation={reservation_id}',
            '--wait', 'within')
        self.assertEqual('ACTIVE', server['status'])
        self.assertEqual(mine, self.host_of(server['id']))
        # Nobody else gets there, and who is there does not leave it.
        outsider = self.boot()['server']['id']
        self.wait_for_server(outsider)
        self.assertIn(self.host_of(outsider), others)
        self.admin('POST', f'/servers/{server["id"]}/action', {
            'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
        self.wait_for(lambda: self.server(server['id'])[
            'OS-EXT-STS:task_state'] is None, 'it stays')
        self.assertEqual(mine, self.host_of(server['id']))
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
        self.admin('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_until_gone(server['id'])
        self.wait_for(lambda: reservation_id not in self.aggregates(),
                      'given back')
        self.assertEqual([mine], self.aggregates()['freepool'])
        self.assertEqual('ACTIVE', self.server(outsider)['status'])
        self.wait_for_lease(lease['id'], 'TERMINATED')
