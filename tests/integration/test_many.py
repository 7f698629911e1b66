# SPDX-License-Identifier: Apache-2.0

"""Many servers at once: one lease of several, and many leases."""

import collections
import concurrent.futures
import statistics
import time
import typing as ty

from tests.integration import base


class SeveralServersTest(base.IntegrationTestCase):

    def test_servers_of_one_request_share_one_lease(self) -> None:
        # Late enough for the requests of a slow client before it.
        hints = self.lease_hints(time.time() + 15)
        self.openstack(
            'server', 'create', '--image', 'cirros', '--flavor', 'm1.nano',
            '--nic', 'none', '--min', '3', '--max', '3',
            '--hint', f'reserved={hints["reserved"]}',
            '--hint', f'lease_params={hints["lease_params"]}', 'several')
        listed = self.openstack('server', 'list')
        self.assertEqual({'several-1', 'several-2', 'several-3'},
                         {server['Name'] for server in listed})
        self.assert_one_lease({server['ID'] for server in listed})

    def test_boot_that_returns_reservation_id_has_one_lease(self) -> None:
        """The answer contains no id of a server."""
        answer = self.boot(self.lease_hints(time.time() + 8), name='by-id',
                           min_count=3, max_count=3,
                           return_reservation_id=True)
        self.assertEqual({'reservation_id'}, set(answer))
        servers = self.demo('GET', '/servers')['servers']
        self.assertEqual({'by-id-1', 'by-id-2', 'by-id-3'},
                         {server['name'] for server in servers})
        server_ids = {server['id'] for server in servers}
        for server_id in server_ids:
            self.assertEqual(
                answer['reservation_id'],
                self.server(server_id)['OS-EXT-SRV-ATTR:reservation_id'])
        self.assert_one_lease(server_ids)

    def assert_one_lease(self, server_ids: set[str]) -> None:
        """Check for one lease of reserved servers, all built at its start."""
        lease, = {self.lease_of(server_id)['id'] for server_id in server_ids}
        for server_id in server_ids:
            self.assertEqual('RESERVED', self.server(server_id)['status'])
        self.wait_for_lease(lease, 'ACTIVE')
        for server_id in server_ids:
            self.assertEqual('ACTIVE', self.server(server_id)['status'])
            self.assert_built_once(server_id)
        # The lease continues without one of them.
        first, *others = server_ids
        self.delete(first)
        self.wait_until_gone(first)
        self.wait_for(lambda: self.servers_of(lease) and
                      set(self.servers_of(lease)) == set(others),
                      'the lease has lost a server')
        self.assertEqual('ACTIVE', self.lease(lease)['status'])


class ManyLeasesTest(base.IntegrationTestCase):

    #: By flavor; they exactly fill twenty hosts.
    COUNTS = {'m1.large': 30, 'm1.medium': 20}
    VCPUS = {'m1.large': 4, 'm1.medium': 2}
    #: Seconds within which all are booked.
    AHEAD = 20

    def test_fifty_leases_start_in_same_second(self) -> None:
        self.assertEqual(20, len(self.cloud.hosts()))
        start = int(time.time()) + self.AHEAD
        servers = self.book(start)
        base.say(f'  booked in {time.time() - start + self.AHEAD:.0f} s')
        self.assertLess(time.time(), start, 'booked too slowly')
        booked = self.booked_hosts()
        self.assert_no_host_is_over(booked, servers)

        launched = [base.seconds(self.wait_for_server(server_id, seconds=120)[
            'OS-SRV-USG:launched_at']) - start for server_id in servers]
        base.say(f'  seconds after the start: {min(launched):.0f} to '
                 f'{max(launched):.0f}, half of them within '
                 f'{statistics.median(launched):.0f}')
        self.assertGreaterEqual(min(launched), 0)
        built = {server_id: self.assert_built_once(server_id)['host']
                 for server_id in servers}
        # As all hosts are full, there is no other placement.
        self.assertEqual(booked, built)
        self.wait_for(lambda: self.statuses(servers) == {'ACTIVE'},
                      'all leases are ACTIVE')
        self.assertEqual(booked, self.booked_hosts())
        self.assert_no_host_is_over(built, servers)
        self.assert_placement_is_full()

    def book(self, start: int) -> dict[str, str]:
        """Boot them, some concurrently; return server -> flavor."""
        hints = self.lease_hints(start)
        servers = {}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            # The large ones first: then the others fill what is left.
            for flavor, count in self.COUNTS.items():
                for answer in pool.map(
                        lambda _number: self.boot(hints, flavor=flavor),
                        range(count)):
                    servers[answer['server']['id']] = flavor
        return servers

    def statuses(self, server_ids: ty.Iterable[str]) -> set[str]:
        leases = self.leases().values()
        return {lease['status'] for lease in leases
                for reservation in lease['reservations']
                if set(reservation['servers']) & set(server_ids)}

    def assert_no_host_is_over(self, hosts: dict[str, str | None],
                               servers: dict[str, str]) -> None:
        taken: collections.Counter[str | None] = collections.Counter()
        for server_id, host in hosts.items():
            taken[host] += self.VCPUS[servers[server_id]]
        self.assertEqual({host: 8 for host in self.cloud.hosts()}, taken)

    def assert_placement_is_full(self) -> None:
        providers = self.admin('GET', '/resource_providers',
                               service='placement')['resource_providers']
        for provider in providers:
            used = self.admin(
                'GET', f'/resource_providers/{provider["uuid"]}/usages',
                service='placement')['usages']
            self.assertEqual(
                {'VCPU': 8, 'MEMORY_MB': 16384, 'DISK_GB': 160}, used,
                provider['name'])
