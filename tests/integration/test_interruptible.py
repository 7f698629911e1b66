# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers on a real OpenStack: used, evicted, unshelved."""

import json
import time

from tests.integration import base

#: Seconds from the notification of an eviction to the start of a lease.
LEAD = 180


class EvictionTest(base.IntegrationTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.configure('\n[blazar]\ninterruptible_notice = 0\n'
                       f'eviction_timeout = {LEAD}\n')
        self.restart_listeners()
        # After the configuration has been restored.
        self.addCleanup(self.restart_listeners)

    def restart_listeners(self) -> None:
        for name in self.cloud.names():
            if name.startswith('blazar-listener'):
                self.cloud.restart(name)

    def lease_everything(self, starts_in: int) -> tuple[str, float]:
        """Reserve all CPUs of each host for later.

        :returns: the id of the lease, and its start
        """
        vcpus = {json.loads(one)['VCPU'] for one in (
            row[0] for row in self.sql('SELECT capacity FROM hosts'))}
        (size,) = vcpus
        start = time.time() + starts_in
        lease = self.demo('POST', '/leases', {
            'name': 'all of it', 'start_date': base.date(start),
            'end_date': base.date(start + 300), 'reservations': [{
                'resource_type': 'virtual:instance', 'vcpus': size,
                'memory_mb': 64, 'disk_gb': 1, 'affinity': None,
                'amount': len(self.sql('SELECT id FROM hosts'))}],
        }, service='reservation')['lease']
        return str(lease['id']), base.seconds(lease['start_date'])

    def test_servers_are_shelved_before_lease_starts(self) -> None:
        servers = [self.boot({'interruptible': 'True'})['server']['id']
                   for _number in range(3)]
        for server_id in servers:
            self.wait_for_server(server_id)
        before = self.trusts()
        lease_id, start = self.lease_everything(LEAD + 80)
        self.wait_for(lambda: 'safe_until' in self.server(servers[0])[
            'metadata'], 'it says until when it is safe')
        for server_id in servers:
            self.wait_for_server(server_id, 'SHELVED_OFFLOADED', LEAD + 120)
        base.say(f'  shelved {start - time.time():.0f} s before the start')
        self.assertLess(time.time(), start)
        self.assertEqual([{}] * 3, [*map(self.allocations, servers)])
        self.wait_for_lease(lease_id, 'ACTIVE', LEAD)
        self.assertLess(time.time(), start + 30)
        self.demo('DELETE', f'/leases/{lease_id}', service='reservation')
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.demo('POST', f'/servers/{servers[0]}/action', {'unshelve': None})
        self.wait_for_server(servers[0])
        self.assertEqual(set(), before - self.trusts())
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
