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

"""What becomes of servers at the end of their leases on a real OpenStack."""

import time

from tests.integration import base
from tests.integration import test_tour

#: Seconds for which a lease lasts.
LASTS = 25


class EndsTest(test_tour.TourTestCase):

    def leased(self, on_end: str) -> tuple[str, str]:
        """A server of a lease with such an end; returns the ids of both."""
        server_id = str(self.create(
            'server', *self.lease_words('now', LASTS, name=on_end,
                                        on_end=on_end))['id'])
        return server_id, str(self.lease_of(server_id)['id'])

    def images(self, server_id: str) -> list[str]:
        """The names of the images of a server that can be used."""
        return [one['name'] for one in self.demo(
            'GET', f'/images?status=active&instance_uuid={server_id}',
            service='glance')['images']]

    def act(self, action: str, server_id: str) -> None:
        """openstack server start, and the like"""
        done = self.run_client('openstack', 'server', action, server_id)
        self.assertEqual(0, done.returncode, done.stderr)

    def test_images_before_the_end_and_at_an_event(self) -> None:
        now = time.time()
        server_id = str(self.create('server', *self.lease_words(
            'now', 600, name='kept', before_end=base.date(now + 22),
            before_end_action='snapshot', events=[{
                'event_type': 'halfway',
                'event_date': base.date(now + 15),
                'action': 'snapshot'}]))['id'])
        lease_id = str(self.lease_of(server_id)['id'])
        self.wait_for_server(server_id)
        self.wait_for(lambda: len(self.images(server_id)) == 2,
                      'two images', 120)
        for event in ('halfway', 'before_end_lease'):
            self.assertEqual(1, sum(
                name.startswith(f'kept-server-{event}')
                for name in self.images(server_id)), event)
        self.assertEqual('ACTIVE', self.server(server_id)['status'])
        self.assertEqual(('ACTIVE', ''), (
            self.lease(lease_id)['status'],
            self.lease(lease_id)['status_reason']))

    def everything(self) -> tuple[set[str], set[str]]:
        """The images and the servers that there are."""
        return ({one['id'] for one in self.admin(
            'GET', '/images?limit=1000', service='glance')['images']},
            set(self.server_ids()))

    def test_of_a_shelved_server_nothing_is_left(self) -> None:
        before = self.everything()
        server_id = str(self.create('server', *self.lease_words(
            'now', 600, name='shelved'))['id'])
        lease_id = str(self.lease_of(server_id)['id'])
        self.wait_for_server(server_id)
        self.act('shelve', server_id)
        self.wait_for_server(server_id, 'SHELVED_OFFLOADED')
        self.assertEqual(['server-shelved'], self.images(server_id))
        self.demo('DELETE', f'/leases/{lease_id}', service='reservation')
        self.wait_for_lease(lease_id, 'TERMINATED', 120)
        self.wait_until_gone(server_id)
        self.assertEqual(before, self.everything())

    def test_each_end_a_user_may_ask_for(self) -> None:
        servers, leases = {}, []
        for on_end in ('snapshot', 'stop,snapshot', 'shelve', 'stop',
                       'suspend', 'release'):
            servers[on_end], lease_id = self.leased(on_end)
            leases.append(lease_id)
        for lease_id in leases:
            self.wait_for_lease(lease_id, 'TERMINATED', LASTS + 120)
        for on_end, status in (
                ('shelve', 'SHELVED_OFFLOADED'), ('stop', 'SHUTOFF'),
                ('suspend', 'SUSPENDED'), ('release', 'ACTIVE')):
            self.assertEqual(
                status, self.server(servers[on_end])['status'], on_end)
        for on_end, name in (
                ('snapshot', 'snapshot-server'),
                ('stop,snapshot', 'stop,snapshot-server')):
            self.wait_until_gone(servers[on_end])
            self.assertEqual([name], self.images(servers[on_end]))
        # They are ordinary servers from now on.
        self.act('unshelve', servers['shelve'])
        self.act('start', servers['stop'])
        self.act('resume', servers['suspend'])
        for on_end in ('shelve', 'stop', 'suspend', 'release'):
            self.wait_for_server(servers[on_end])
        done = self.verify()
        self.assertEqual(0, done.returncode, done.stdout)
