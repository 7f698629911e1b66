# SPDX-License-Identifier: Apache-2.0

"""Running servers are added to leases and removed from them, on a real
OpenStack, by the client.
"""

import time
import typing as ty

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests.integration import test_tour

#: Seconds for all commands before the end.
LASTS = 60


class JoiningTest(test_tour.TourTestCase):

    def runs(self, name: str) -> str:
        """Boot a server without a lease; return its id."""
        server_id = str(self.create(name)['id'])
        self.wait_for_server(server_id)
        return server_id

    def reservation(self, *words: str) -> base.Json:
        """Run ``openstack reservation`` with a command such as adopt."""
        return ty.cast(base.Json, self.openstack('reservation', *words))

    def assert_consistent(self) -> None:
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)

    def test_running_servers_are_leased_added_and_removed(self) -> None:
        adopted, other = self.runs('adopted'), self.runs('other')
        # To the minute, as users write it.
        end = lease_api.minute(time.time() + LASTS + 60)
        lease_id = self.reservation(
            'adopt', '--name', 'lease', '--end', end, 'adopted')['id']
        self.assertEqual('ACTIVE', self.lease(lease_id)['status'])
        self.assertEqual([adopted], self.servers_of(lease_id))
        self.assert_consistent()

        self.reservation('add', 'server', 'lease', 'other')
        self.assertEqual({adopted, other}, {*self.servers_of(lease_id)})
        refused = self.run_client(
            'openstack', 'reservation', 'adopt', '--end', end, 'other')
        self.assertNotEqual(0, refused.returncode)
        self.assertIn('has a lease already', refused.stderr)

        self.reservation('remove', 'server', 'lease', 'other')
        self.assertEqual([adopted], self.servers_of(lease_id))
        self.assert_consistent()

        self.wait_until_gone(adopted, LASTS + 120)
        self.assertGreaterEqual(
            time.time(), self.lease(lease_id)['end_date'])
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assertEqual('ACTIVE', self.server(other)['status'])
        self.assert_built_once(other)
        self.assertEqual([], self.guests(adopted))
        self.assert_consistent()
