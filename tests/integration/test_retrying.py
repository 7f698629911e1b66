# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for capacity on a real OpenStack, with the clients."""

import time

from tests.integration import test_hosts
from tests.integration import test_lease_api as lease_api
from tests.integration import test_tour

#: Seconds until free capacity is given to a waiting lease, and the lease is
#: ACTIVE.
SOON = 120


class WaitingTestCase(test_tour.TourTestCase):
    """Servers that need the same host, which two of them fill."""

    def setUp(self) -> None:
        super().setUp()
        self.group = self.openstack(
            'server', 'group', 'create', '--policy', 'affinity', 'together',
        )['id']
        self.addCleanup(self.run_client, 'openstack', 'server', 'group',
                        'delete', self.group)
        # The group is new each time; its servers have to be deleted first.
        self.addCleanup(self.remove_what_is_new)

    def fill(self) -> list[str]:
        """Boot servers for later that block the host for boots from now on."""
        start = int(time.time()) + 600
        self.create('first', '--min', '2', '--max', '2', '--flavor',
                    'm1.large', '--hint', f'group={self.group}',
                    *self.lease_words(start, 600))
        return [one['ID'] for one in self.openstack('server', 'list')]

    def wait_for_room(self, interval: str = '10s') -> tuple[str, str]:
        """Boot another server; return its id and that of its lease."""
        server_id = self.create(
            'later', '--flavor', 'm1.large', '--hint', f'group={self.group}',
            *self.lease_words('now', 1200, lease_type='retry', retries=60,
                              retry_interval=interval))['id']
        return server_id, self.lease_of(server_id)['id']


class RetryTest(WaitingTestCase):

    def test_boot_waits_until_capacity_is_free(self) -> None:
        first = self.fill()
        server_id, lease_id = self.wait_for_room()
        lease = self.lease(lease_id)
        self.assertEqual('WAITING', lease['status'])
        self.assertIn('There is no capacity', lease['status_reason'])
        self.assertEqual('RESERVED', self.openstack(
            'server', 'show', server_id)['status'])
        self.assertIsNone(self.booked_hosts()[server_id])
        self.delete(*first)
        self.wait_for_lease(lease_id, 'ACTIVE', SOON)
        self.wait_for_server(server_id)
        self.assert_built_once(server_id)
        self.assertEqual(self.booked_hosts()[server_id], self.server(
            server_id)['OS-EXT-SRV-ATTR:host'])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)

    def test_waiting_server_can_be_deleted(self) -> None:
        self.fill()
        server_id, lease_id = self.wait_for_room()
        done = self.run_client('openstack', 'server', 'delete', server_id)
        self.assertEqual(0, done.returncode, done.stderr)
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assertFalse(self.exists(server_id))


class HostsTest(test_hosts.HostsTestCase):
    """openstack reservation request"""

    def request(self, name: str, *words: str) -> dict[str, str]:
        done = self.run_client(
            'openstack', 'reservation', 'request', name, '--end-date',
            lease_api.minute(time.time() + 1200), '--reservation',
            'resource_type=physical:host,min=1,max=1', *words, '-f', 'shell',
            '-c', 'id', '-c', 'status')
        self.assertEqual(0, done.returncode, done.stderr)
        return {key: value.strip('"') for key, _is, value in (
            line.partition('=') for line in done.stdout.splitlines())}

    def test_lease_of_host_waits_for_capacity(self) -> None:
        mine = self.hosts()[0]
        self.enrol(mine)
        first = self.request('first', '--wait')
        self.assertEqual('ACTIVE', first['status'])
        second = self.request('second', '--lease-type', 'retry',
                              '--retries', '60', '--retry-interval', '10s')
        self.assertEqual('WAITING', second['status'])
        for one in (first, second):
            self.addCleanup(self.admin.request, 'DELETE',
                            f'/leases/{one["id"]}', service='reservation')
        done = self.run_client('openstack', 'reservation', 'lease', 'delete',
                               first['id'])
        self.assertEqual(0, done.returncode, done.stderr)
        lease = self.wait_for_lease(second['id'], 'ACTIVE', SOON)
        self.assertEqual('', lease['status_reason'])
        self.assertIn([mine], [
            hosts for name, hosts in self.aggregates().items()
            if name not in ('freepool', 'blazar_pool')])
