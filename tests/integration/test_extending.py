# SPDX-License-Identifier: Apache-2.0

"""Leases that are extended automatically or transferred, on a real
OpenStack, with the clients.
"""

import time

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests.integration import test_tour


class ExtendingTest(test_tour.TourTestCase):

    def test_lease_is_extended_automatically(self) -> None:
        """The minimum is ten minutes, which is also how long before its end it
        is extended.
        """
        server_id = self.create('longer', *self.lease_words(
            'now', 630, auto_extend='10m'))['id']
        lease = self.lease_of(server_id)
        first = lease['end_date']
        self.wait_for_server(server_id)
        self.wait_for(
            lambda: self.lease(lease['id'])['end_date'] == first + 600,
            'it ends later', 120)
        self.assertEqual(('ACTIVE', ''), (
            self.lease(lease['id'])['status'],
            self.lease(lease['id'])['status_reason']))
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)


class HandingOverTest(lease_api.LeaseApiTestCase):

    def test_transferred_lease_is_used_by_other_project(self) -> None:
        other = self.client('other')
        lease = self.make(time.time())
        flavor_id = lease['reservations'][0]['flavor_id']
        self.wait_for_lease(lease['id'], 'ACTIVE')
        words = ('openstack', 'reservation', 'hand', 'over', lease['id'],
                 '--project', other.project_id, '--user', other.user_id)
        refused = self.run_client(*words)
        self.assertNotEqual(0, refused.returncode)
        self.assertIn('handed over to another project or user by admins',
                      refused.stderr)
        done = self.run_client(*words, user='admin')
        self.assertEqual(0, done.returncode, done.stderr)
        # Its flavor follows within seconds.
        boot = {'server': {
            'name': 'theirs', 'imageRef': self.image_id,
            'flavorRef': flavor_id, 'networks': 'none'}}

        def booted() -> base.Json | None:
            answer = other.request('POST', '/servers', boot,
                                   microversion=base.MICROVERSION)
            return answer.json()['server'] if answer.ok else None

        server_id = self.wait_for(booted, 'the flavor is theirs')['id']
        self.wait_for_server(server_id)
        self.assertIn('could not be found', self.refusal(
            400, self.demo, 'POST', '/servers', boot,
            microversion=base.MICROVERSION)['message'])
        self.delete(server_id)
        self.wait_until_gone(server_id)
        self.admin('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED')
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
