# SPDX-License-Identifier: Apache-2.0

"""Whole hosts on a real OpenStack: enrolled, leased, used and freed."""

import concurrent.futures
import time
import typing as ty
import uuid

from tests.integration import base
from tests.integration import test_lease_api as lease_api


class HostsTestCase(lease_api.LeaseApiTestCase):

    def hosts(self) -> list[str]:
        """Return the names of the hypervisors."""
        return sorted(one['hypervisor_hostname'] for one in self.admin(
            'GET', '/os-hypervisors')['hypervisors'])

    def aggregates(self) -> dict[str, list[str]]:
        return {one['name']: sorted(one['hosts']) for one in self.admin(
            'GET', '/os-aggregates')['aggregates']}

    def enrol(self, name: str) -> str:
        """Enroll a host by Blazar's client; return its id."""
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


class HostsTest(HostsTestCase):
    """With the clients of users and operators."""

    def test_leased_host_from_enrollment_to_return(self) -> None:
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
        # No other server gets there, and this one stays on the host.
        outsider = self.boot()['server']['id']
        self.wait_for_server(outsider)
        self.assertIn(self.host_of(outsider), others)
        self.admin('POST', f'/servers/{server["id"]}/action', {
            'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
        self.wait_for(lambda: self.server(server['id'])[
            'OS-EXT-STS:task_state'] is None, 'cannot be extended')
        self.assertEqual(mine, self.host_of(server['id']))
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
        self.admin('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_until_gone(server['id'])
        self.wait_for(lambda: reservation_id not in self.aggregates(),
                      'are freed')
        self.assertEqual([mine], self.aggregates()['freepool'])
        self.assertEqual('ACTIVE', self.server(outsider)['status'])
        self.wait_for_lease(lease['id'], 'TERMINATED')


class TwoHostsTestCase(HostsTestCase):
    """Two hosts that serve leases only, and another project."""

    #: These run in processes of their own.
    MINE = ('host1', 'host2')

    def setUp(self) -> None:
        super().setUp()
        self.other = self.client('other')
        for name in self.MINE:
            self.enrol(name)


class StayingTest(TwoHostsTestCase):
    """The hosts of a lease that is shared with the other project, and all
    operations of Nova on servers there.
    """

    def setUp(self) -> None:
        super().setUp()
        self.lease_ = self.make(
            time.time(), 30 * lease_api.MINUTE, reservations=[{
                'resource_type': 'physical:host', 'min': 2, 'max': 2,
                'projects': [self.other.project_id],
                'hypervisor_properties': '', 'resource_properties': ''}])
        self.reservation_id = self.lease_['reservations'][0]['id']
        self.wait_for_lease(self.lease_['id'], 'ACTIVE')

    def within(self, client: base.Client) -> str:
        server_id = self.boot({'reservation': self.reservation_id},
                              client)['server']['id']
        self.wait_for_server(server_id)
        return ty.cast(str, server_id)

    def act(self, server_id: str, action: str, value: ty.Any = None,
            ) -> None:
        self.admin('POST', f'/servers/{server_id}/action', {action: value})

    def stays(self, server_id: str, status: str = 'ACTIVE',
              away_from: str | None = None) -> str:
        """Wait until a server is idle; return its host, which belongs to the
        lease.
        """
        self.wait_for(lambda: self.server(server_id)[
            'OS-EXT-STS:task_state'] is None and
            self.host_of(server_id) != away_from, 'it has arrived')
        self.wait_for_server(server_id, status)
        host = self.host_of(server_id)
        self.assertIn(host, self.MINE)
        return host

    def test_servers_stay_on_leased_hosts_in_all_operations(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            servers = list(pool.map(self.walk, (self.demo, self.other)))
        self.evacuate(servers[0])
        self.outside()
        self.assertEqual(sorted(self.MINE),
                         self.aggregates()[self.reservation_id])
        path = f'/leases/{self.lease_["id"]}'
        answer = self.admin.request('DELETE', path, service='reservation')
        self.assertEqual(409, answer.status_code, answer.text)
        self.admin('DELETE', f'{path}?force=true', service='reservation')
        for server_id in servers:
            self.wait_until_gone(server_id)
        self.wait_for_lease(self.lease_['id'], 'TERMINATED')
        self.assertEqual(list(self.MINE), [
            host for host in self.aggregates()['freepool']
            if host in self.MINE])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)

    def walk(self, client: base.Client) -> str:
        """Boot a server and do all that moves it; return its id."""
        server_id = self.within(client)
        host = self.stays(server_id)
        self.act(server_id, 'migrate')
        host = self.stays(server_id, 'VERIFY_RESIZE', host)
        self.act(server_id, 'confirmResize')
        self.stays(server_id)
        self.act(server_id, 'os-migrateLive', {
            'host': None, 'block_migration': 'auto'})
        self.stays(server_id, away_from=host)
        self.act(server_id, 'resize', {'flavorRef': self.flavors['m1.tiny']})
        self.stays(server_id, 'VERIFY_RESIZE')
        self.act(server_id, 'confirmResize')
        self.stays(server_id)
        self.act(server_id, 'shelve')
        self.wait_for_server(server_id, 'SHELVED_OFFLOADED')
        self.act(server_id, 'unshelve')
        self.stays(server_id)
        return server_id

    def evacuate(self, server_id: str) -> None:
        """Evacuate from a host that fails and comes back."""
        host = self.host_of(server_id)
        name = self.cloud.hosts()[host]
        self.addCleanup(self.force_down, host, False)
        self.addCleanup(self.cloud.restart, name)
        self.cloud.kill(name)
        self.force_down(host)
        self.act(server_id, 'evacuate', {})
        self.stays(server_id, 'ACTIVE', host)
        self.cloud.restart(name)
        self.force_down(host, False)
        self.stays(server_id, 'ACTIVE', host)

    def outside(self) -> None:
        """Boot servers without the lease, in every possible way."""
        outsider = self.boot()['server']['id']
        self.wait_for_server(outsider)
        for host in self.MINE:
            forced = self.boot(client=self.admin, availability_zone=(
                f'nova:{host}'))['server']['id']
            self.wait_for_server(forced, 'ERROR')
            self.delete(forced)
            for action, value in (
                    ('os-migrateLive', {'host': host,
                                        'block_migration': 'auto'}),
                    ('migrate', {'host': host})):
                self.admin.request(
                    'POST', f'/servers/{outsider}/action', {action: value})
                self.wait_for(lambda: self.server(outsider)[
                    'OS-EXT-STS:task_state'] is None, 'nothing is done')
                self.assertNotIn(self.host_of(outsider), self.MINE)
        for hint in (str(uuid.uuid4()), self.lease_['id']):
            self.refusal(400, self.demo, 'POST', '/servers',
                         self.boot_body({'reservation': hint}))
        self.admin('PUT', f'/leases/{self.lease_["id"]}', {'reservations': [
            {'id': self.reservation_id, 'projects': []}]},
            service='reservation')
        self.refusal(400, self.other, 'POST', '/servers', self.boot_body(
            {'reservation': self.reservation_id}))
