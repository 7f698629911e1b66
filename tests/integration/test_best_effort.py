# SPDX-License-Identifier: Apache-2.0

"""Leases that need live migration of other servers, on a real OpenStack.
"""

import time

from tests.integration import base
from tests.integration import test_hosts
from tests.integration import test_retrying
from tests.integration import test_tour

#: A property of the hosts that serve leases only.
GPU = '["==", "$gpu", "A100"]'


class BestEffortTest(test_retrying.WaitingTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.anchor = self.create(
            'anchor', '--flavor', 'm1.large', '--hint',
            f'group={self.group}', '--wait')['id']
        self.host = self.where(self.anchor)
        # As an admin, who may select the host; the two fill it.
        self.other = self.openstack(
            'server', 'create', *test_tour.BOOT, '--flavor', 'm1.large',
            '--availability-zone', f'nova:{self.host}', '--wait', 'other',
            user='admin')['id']
        self.assertEqual(self.host, self.where(self.other))

    def where(self, server_id: str) -> str:
        return str(self.server(server_id)['OS-EXT-SRV-ATTR:host'])

    def make_room(self, **params: str) -> tuple[str, base.Json]:
        """Boot a server that needs the same host; return it and its lease."""
        server_id = self.create(
            'mine', '--flavor', 'm1.large', '--hint', f'group={self.group}',
            *self.lease_words('now', 1200, lease_type='best_effort',
                              **params))['id']
        return server_id, self.lease_of(server_id)

    def test_server_of_other_project_is_migrated(self) -> None:
        server_id, lease = self.make_room(timeout='10m')
        self.assertEqual('best_effort', lease['lease_type'])
        self.wait_for_lease(lease['id'], 'ACTIVE', 2 * test_retrying.SOON)
        self.wait_for_server(server_id)
        self.assert_built_once(server_id)
        self.assertEqual(self.host, self.where(server_id))
        self.assertNotEqual(self.host, self.where(self.other))
        self.wait_for_server(self.other)
        events = self.openstack('server', 'event', 'list', self.other,
                                user='admin')
        self.assertIn(('live-migration', f'req-move-{lease["id"]}'), [
            (event['Action'], event['Request ID']) for event in events])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)

    def test_lease_times_out_if_server_has_keep_metadata(self) -> None:
        done = self.run_client(
            'openstack', 'server', 'set', '--property', 'blazar:keep=true',
            self.other, user='admin')
        self.assertEqual(0, done.returncode, done.stderr)
        _server_id, lease = self.make_room(timeout='30s')
        self.assertEqual('IN_PROGRESS', lease['status'])
        lease = self.wait_for_lease(lease['id'], 'TIMEDOUT', 120)
        self.assertIn('Servers migrated for it: 0.', lease['status_reason'])
        self.assertEqual(self.host, self.where(self.other))


class CheapTestCase(test_hosts.TwoHostsTestCase):
    """A server of another project that may be migrated on each host."""

    def setUp(self) -> None:
        super().setUp()
        name = self.getUniqueString('cheap')
        self.flavor = self.admin('POST', '/flavors', {'flavor': {
            'name': name, 'ram': 64, 'vcpus': 2, 'disk': 1}})['flavor']['id']
        self.addCleanup(self.admin, 'DELETE', f'/flavors/{self.flavor}')
        self.admin('POST', f'/flavors/{self.flavor}/os-extra_specs', {
            'extra_specs': {'blazar:preemptible': 'true'}})

        # Before the hosts are removed.
        self.addCleanup(self.end_all)

    def end_all(self) -> None:
        self.delete_leases()
        for lease_id in self.leases().keys() - self._kept[1]:
            self.wait_for_lease(lease_id, 'TERMINATED')

    def active(self, **reservation: object) -> base.Json:
        """Create a lease of another project on one of the two hosts."""
        lease = self.make(
            time.time(), 1200, client=self.other, reservations=[{
                **reservation, 'resource_properties': GPU}])
        self.wait_for_lease(lease['id'], 'ACTIVE')
        return lease

    def booted(self) -> str:
        """Boot a server that may be migrated, in a reservation of its own."""
        lease = self.active(resource_type='flavor:instance',
                            flavor_id=self.flavor, amount=1)
        server_id = self.other('POST', '/servers', {'server': {
            'name': 'cheap', 'imageRef': self.image_id, 'networks': 'none',
            'flavorRef': lease['reservations'][0]['id'],
        }})['server']['id']
        self.wait_for_server(server_id)
        return str(server_id)

    def booted_on_each(self) -> dict[str, str]:
        """Boot a server on each of the two hosts; return server -> host."""
        servers = [self.booted()]
        # Fill the first host, so that the next server is on the other.
        filler = self.active(resource_type='virtual:instance', vcpus=6,
                             memory_mb=64, disk_gb=1, amount=1)
        servers.append(self.booted())
        before = {one: self.host_of(one) for one in servers}
        self.assertEqual({*self.MINE}, {*before.values()})
        self.other('DELETE', f'/leases/{filler["id"]}', service='reservation')
        return before

    def ask_for_one(self, *words: str) -> base.Json:
        """Request a lease of one of the two hosts, which has to be freed."""
        known = self.leases().keys()
        done = self.run_client(
            'openstack', 'reservation', 'request', 'whole', '--lease-type',
            'best_effort', '--timeout', '10m', '--end-date',
            base.date(time.time() + 1200)[:16], '--reservation',
            'resource_type=physical:host,min=1,max=1,hypervisor_properties=,'
            f'resource_properties={GPU}', *words)
        self.assertEqual(0, done.returncode, done.stderr)
        new, = self.leases().keys() - known
        return self.leases()[new]

    def assert_freed(self, lease: base.Json, before: dict[str, str]) -> None:
        """Assert that one server has moved to the other's host."""
        moved, = (one for one in before if self.host_of(one) != before[one])
        self.assertEqual(1, len({self.host_of(one) for one in before}))
        self.assertEqual([before[moved]], self.aggregates()[
            lease['reservations'][0]['id']])
        for server_id in before:
            self.wait_for_server(server_id)
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)


class WholeHostTest(CheapTestCase):

    def test_host_is_freed_for_lease(self) -> None:
        before = self.booted_on_each()
        self.assert_freed(self.ask_for_one('--wait'), before)
