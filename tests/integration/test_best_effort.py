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

"""Leases for which servers of others are live-migrated, on a real OpenStack.
"""

from tests.integration import base
from tests.integration import test_retrying
from tests.integration import test_tour


class BestEffortTest(test_retrying.WaitingTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.anchor = self.create(
            'anchor', '--flavor', 'm1.large', '--hint',
            f'group={self.group}', '--wait')['id']
        self.host = self.where(self.anchor)
        # Who may say on which host; the two of them fill it.
        self.other = self.openstack(
            'server', 'create', *test_tour.BOOT, '--flavor', 'm1.large',
            '--availability-zone', f'nova:{self.host}', '--wait', 'other',
            user='admin')['id']
        self.assertEqual(self.host, self.where(self.other))

    def where(self, server_id: str) -> str:
        return str(self.server(server_id)['OS-EXT-SRV-ATTR:host'])

    def make_room(self, **params: str) -> tuple[str, base.Json]:
        """Boot one that has to be on the same host; and its lease."""
        server_id = self.create(
            'mine', '--flavor', 'm1.large', '--hint', f'group={self.group}',
            *self.lease_words('now', 1200, lease_type='best_effort',
                              **params))['id']
        return server_id, self.lease_of(server_id)

    def test_a_server_of_another_project_is_moved(self) -> None:
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
        self.assertIn(('live-migration', f'req-{lease["id"]}'), [
            (event['Action'], event['Request ID']) for event in events])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)

    def test_what_is_kept_is_not_and_the_lease_is_timed_out(self) -> None:
        done = self.run_client(
            'openstack', 'server', 'set', '--property', 'blazar:keep=true',
            self.other, user='admin')
        self.assertEqual(0, done.returncode, done.stderr)
        _server_id, lease = self.make_room(timeout='30s')
        self.assertEqual('IN_PROGRESS', lease['status'])
        lease = self.wait_for_lease(lease['id'], 'TIMEDOUT', 120)
        self.assertIn('0 servers were moved for it.', lease['status_reason'])
        self.assertEqual(self.host, self.where(self.other))
