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


"""A nova-compute dies or freezes under leases, and is seen by listeners that
do not wait for long.
"""

import os
import signal
import time

from tests.integration import base
from tests.integration import test_crash

#: A compute of the stack reports every 5 s. The interval is the shortest.
IMPATIENT = '''
[DEFAULT]
service_down_time = 15
[blazar]
comparison_interval = 5
longest_sleep = 2
polling_interval = 1
failure_delay = 3
recovery_delay = 8
healing_interval = 1
'''
RECOVERY = 8
#: Seconds after which a lease begins that has to be bound elsewhere by then.
SOON = 50
LATER = 7200


class FailuresTest(test_crash.CrashTestCase):
    """Two hosts, each with a nova-compute of its own, of which one fails."""

    OPTIONS = IMPATIENT

    def setUp(self) -> None:
        super().setUp()
        zone = self.admin('POST', '/os-aggregates', {'aggregate': {
            'name': 'pair', 'availability_zone': 'pair'}})['aggregate']['id']
        self.addCleanup(self.admin, 'DELETE', f'/os-aggregates/{zone}')
        for host in ('host1', 'host2'):
            self.act(zone, add_host={'host': host})
            self.addCleanup(self.act, zone, remove_host={'host': host})
        self.addCleanup(self.remove_what_is_new)
        self.without('blazar-listener-1', 'blazar-listener-2')
        self.new_listener()

    def act(self, aggregate: int, **action: base.Json) -> None:
        self.admin('POST', f'/os-aggregates/{aggregate}/action', action)

    def reserve(self, starts_in: int, **boot: str) -> str:
        """A server for later on one of the two; its id."""
        return self.hold(starts_in, availability_zone='pair', **boot)[0]

    def booked_beside(self, host: str, starts_in: int) -> str:
        """A server for later that is booked on a host but could be on the
        other one; its id.
        """
        for _number in range(16):
            server_id = self.reserve(starts_in)
            if self.booked_hosts()[server_id] == host:
                return server_id
        return self.fail(f'Nothing is booked on {host}')

    def wait_until_moved(self, server_id: str, host: str) -> str:
        """Where a server is booked now that was booked on a host."""
        def elsewhere() -> str | None:
            booked = self.booked_hosts()[server_id]
            return booked if booked != host else None

        return str(self.wait_for(elsewhere, f'{server_id} leaves {host}'))

    def outages(self) -> list[tuple[object, ...]]:
        """The hosts that are believed to have failed, and since when they are
        seen up again.
        """
        return self.sql(
            'SELECT hosts.name, back_at FROM outages JOIN hosts '
            'ON hosts.id = host_id WHERE began_at IS NOT NULL')

    def wait_until_back(self) -> None:
        self.wait_for(lambda: not self.outages(), 'no host has failed')

    def verify_finds_nothing(self) -> None:
        def found() -> str:
            return self.verify().stdout

        self.wait_for(lambda: self.verify().returncode == 0, found)

    def starts_there(self, server_id: str, host: str) -> None:
        self.wait_for_lease(self.lease_of(server_id)['id'], 'ACTIVE',
                            SOON + base.PATIENCE)
        self.wait_for_server(server_id)
        self.assertEqual(host, self.assert_built_once(server_id)['host'])

    def test_one_that_is_killed(self) -> None:
        soon = self.reserve(SOON)
        failing = str(self.booked_hosts()[soon])
        later = self.booked_beside(failing, LATER)
        process = self.cloud.hosts()[failing]
        self.addCleanup(self.cloud.restart, process)
        self.cloud.kill(process)
        other = self.wait_until_moved(soon, failing)
        self.assertEqual([(failing, None)], self.outages())
        self.assertNotEqual(failing, other)
        (reservation,) = self.lease_of(soon)['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        self.assertIn(other, {'host1', 'host2'})
        self.starts_there(soon, other)
        self.verify_finds_nothing()
        self.assertEqual(failing, self.booked_hosts()[later])
        self.assertIs(False, self.lease_of(later)['degraded'])
        self.cloud.restart(process)
        self.wait_until_back()
        self.assertEqual(failing, self.booked_hosts()[later])
        self.verify_finds_nothing()

    def test_one_that_freezes_and_comes_back(self) -> None:
        soon = self.reserve(SOON)
        failing = str(self.booked_hosts()[soon])
        later = self.booked_beside(failing, LATER)
        runs = self.boot(self.lease_hints(), client=self.admin,
                         host=failing)['server']['id']
        self.wait_for_server(runs)
        # Its build is on its way to the host before that is known to be down.
        blind = self.boot(self.lease_hints(time.time() + 10),
                          client=self.admin, host=failing)['server']['id']
        pid = self.cloud.pid(self.cloud.hosts()[failing])
        assert pid is not None
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
        other = self.wait_until_moved(soon, failing)
        self.starts_there(soon, other)
        self.assertEqual([(failing, None)], self.outages())
        for server_id in (runs, blind):
            (reservation,) = self.lease_of(server_id)['reservations']
            self.assertIs(True, reservation['missing_resources'])
        self.assertEqual([], self.guests(blind))

        os.kill(pid, signal.SIGCONT)
        begun = time.time()
        self.wait_until_back()
        self.assertGreaterEqual(time.time() - begun, RECOVERY)
        for server_id in (runs, blind):
            self.starts_there(server_id, failing)
            self.assertIs(False, self.lease_of(server_id)['degraded'])
        self.starts_there(soon, other)
        self.assertEqual(failing, self.booked_hosts()[later])
        self.assertIs(False, self.lease_of(later)['degraded'])
        self.verify_finds_nothing()
