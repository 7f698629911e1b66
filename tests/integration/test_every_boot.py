# SPDX-License-Identifier: Apache-2.0

"""Lease by default, on a real OpenStack."""

import time

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests.integration import test_tour

#: Additional configuration of nova-api.
EVERY = '''
[blazar]
default_reservation = on
reservation_length_minutes = 30
reservation_length_days = 0
default_reservation_exempt_flavors = m1.tiny
'''


class EveryBootTest(test_tour.TourTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.configure(EVERY)

    def test_default_lease_is_shown_extended_and_ended(self) -> None:
        now = time.time()
        answer = self.demo.request('POST', '/servers', self.boot_body())
        self.assertEqual(202, answer.status_code, answer.text)
        server_id = answer.json()['server']['id']
        lease = self.lease_of(server_id)
        self.assertEqual(lease['id'], answer.headers['OpenStack-Lease-Id'])
        self.assertAlmostEqual(now + 1800, base.seconds(
            answer.headers['OpenStack-Lease-End']), delta=60)
        self.wait_for_server(server_id)
        exempt = self.create('exempt', '--flavor', 'm1.tiny')['id']
        self.assertNotIn(exempt, self.booked_hosts())
        # Ends are whole minutes: 80 s ahead is after the current minute.
        for seconds in (3600, 80):
            done = self.run_client(
                'openstack', 'reservation', 'lease', 'set', '--end-date',
                lease_api.minute(time.time() + seconds), lease['id'])
            self.assertEqual(0, done.returncode, done.stderr)
        self.wait_until_gone(server_id, 120)
        self.wait_for_lease(lease['id'], 'TERMINATED')
        self.wait_for_server(exempt)
