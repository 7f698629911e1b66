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


"""What becomes of servers at the end of their lease, on the real Nova."""

from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api import client as nova_client
from nova.volume import cinder

from blazar_core.common import clock as clocks
from blazar_nova.cmd import verify
from tests.functional import test_api

HOUR = 3600


class EndsTestCase(test_api.ApiTestCase):

    def setUp(self):
        super().setUp()
        self.over = clocks.SystemClock().now() + HOUR

    def leased(self, name='vm1', **lease):
        """A server with a lease that is over in an hour."""
        server = self.boot_active(name, hints=self.lease_hints(
            'mine', length=HOUR, **lease))
        self.fill_books()
        return server

    def end(self, seconds=10):
        """What is due is done, until the lease is over."""
        def is_over():
            self.clock.advance(self.over + seconds - self.clock.now())
            self.listener.engine.run_due()
            self.over += 10
            return ('TERMINATED', 'mine') in self.books(
                'SELECT status, name FROM leases')

        self.wait_for(is_over, what='the end of the lease')
        self.fill_books()

    def images(self):
        return {one['name']: one for one in self.glance.images.values()
                if 'blazar_lease' in one['properties']}

    def act(self, server, action, client=None):
        (client or self.alice).post_server_action(server['id'], action)

    def assert_ordinary(self, server):
        """Nothing binds it any more, and nothing differs."""
        report = verify.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(False)
        self.assertEqual([], [one.text for one in report.left] +
                         report.failures)
        self.assertEqual([], self.books(
            'SELECT id FROM bookings WHERE server_id IS NOT NULL'))
        shown = self.admin.get_server(server['id'])
        self.assertEqual([], [
            key for key in shown['flavor']['extra_specs']
            if 'blazar' in key.lower()])


class TestEnds(EndsTestCase):

    def test_an_image_is_made_and_the_server_deleted(self):
        server = self.leased(on_end='snapshot')
        self.assertEqual('snapshot,delete', self.lease('mine')['on_end'])
        self.end()
        self.wait_until_gone(server['id'])
        image, = self.images().values()
        self.assertEqual(('mine-vm1', 'active', server['id']), (
            image['name'], image['status'],
            image['properties']['instance_uuid']))

    def test_an_image_of_a_server_on_a_volume(self):
        """It has no instance_uuid, and is made once."""
        real, made = cinder.API.get, []

        def volume(_self, *args, **kwargs):
            return {'display_description': '', 'display_name': 'v',
                    **real(*args, **kwargs)}

        def snapshot(_self, _context, volume_id, *_args):
            made.append(volume_id)
            return {'id': f'snapshot{len(made)}'}

        self.stub_out('nova.volume.cinder.API.get', volume)
        self.stub_out('nova.volume.cinder.API.create_snapshot_force', snapshot)
        volume_id = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
        server = self.boot_active('vm1', hints=self.lease_hints(
            'mine', length=HOUR, on_end='snapshot'), imageRef='',
            block_device_mapping_v2=[{
                'boot_index': 0, 'uuid': volume_id, 'source_type': 'volume',
                'destination_type': 'volume'}])
        self.fill_books()
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(([volume_id], ['mine-vm1']), (
            made, [*self.images()]))

    def test_an_image_that_somebody_else_has_is_none(self):
        server = self.leased(on_end='snapshot')
        self.glance.images['junk'] = {
            'id': 'junk', 'name': 'junk', 'owner': 'mallory',
            'status': 'active', 'properties': {
                'blazar_server': server['id'],
                'blazar_lease': self.lease('mine')['id']}}
        self.end()
        self.assertIn('mine-vm1', self.images())

    def test_a_server_is_stopped_and_is_an_ordinary_one(self):
        server = self.leased(on_end='stop')
        self.end()
        self.wait_for_status(server['id'], 'SHUTOFF')
        self.assert_ordinary(server)
        self.act(server, {'os-start': None})
        self.wait_for_status(server['id'], 'ACTIVE')
        self.act(server, {'migrate': None}, self.admin)
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')

    def test_a_server_is_suspended(self):
        server = self.leased(on_end=['suspend', 'snapshot'])
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual(['mine-vm1'], [*self.images()])

    def test_a_server_is_shelved_and_can_be_unshelved(self):
        server = self.leased(on_end='shelve')
        self.end()
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.assert_ordinary(server)
        self.act(server, {'unshelve': None})
        self.wait_for_status(server['id'], 'ACTIVE')

    def test_one_for_which_there_is_no_room_is_shelved(self):
        server = self.leased(on_end='release')
        for _host in self.hosts:
            self.make(start_in=2 * HOUR, reservations=[
                self.reservation(vcpus=4)])
        self.end()
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.assert_ordinary(server)

    def test_who_has_a_place_is_released(self):
        lease = self.make_active(name='mine', on_end='release')
        self.over = self.clock.now() + HOUR
        server = self.boot_active(
            'in', flavor=lease['reservations'][0]['id'])
        self.fill_books()
        self.end()
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assert_ordinary(server)
        self.act(server, {'migrate': None}, self.admin)
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')

    def test_what_nova_refuses_is_said_and_has_a_limit(self):
        server = self.leased(on_end='snapshot')
        self.act(server, {'rescue': {}})
        self.wait_for_status(server['id'], 'RESCUE')
        self.clock.advance(self.over + 10 - self.clock.now())
        self.listener.engine.run_due()
        self.assertIn('Its end is tried again: server',
                      self.lease('mine')['status_reason'])
        self.clock.advance(HOUR + 10)
        self.over = self.clock.now()
        self.end()
        self.wait_until_gone(server['id'])
        self.assertEqual({}, self.images())
        self.assertIn('was not done within 3600 s.',
                      self.lease('mine')['status_reason'])

    def test_what_cannot_be_is_told_what_to_write(self):
        for on_end, part in (
                (['stop', 'suspend'], 'cannot be both stop and suspend'),
                ('recycle', '"recycle" is not available'),
                ([], 'Write a string, such as'),
                ([5], 'Write a string, such as'), ({}, 'is an object')):
            error = self.assertRaises(
                nova_client.OpenStackApiException, self.boot, 'no',
                hints=self.lease_hints('no', length=HOUR, on_end=on_end))
            self.assertEqual(400, error.response.status_code)
            self.assertIn(part, error.response.text.replace('\\"', '"'))
            self.assertIn(part, str(self.make(code=400, on_end=on_end)))
