# SPDX-License-Identifier: Apache-2.0

"""What is slow for one server or service is not taken for another one."""

import functools
import threading
import types
from unittest import mock

import fixtures
from nova import exception
import oslo_messaging
from oslo_utils import timeutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_nova.compat import nova_cloud
from tests.unit import base

SLOW = 'slow'


class SlowTestCase(base.TestCase):
    """Nova, some of whose calls do not return.

    Servers are named ``PROJECT:CELL:STATE``.
    """

    def setUp(self):
        super().setUp()
        self.door = threading.Event()
        self.addCleanup(self.door.set)
        self.trusts = mock.Mock()
        self.trusts.access.side_effect = self.access
        self.trusts.is_configured.return_value = True
        self.cloud = nova_cloud.NovaCloud(self.trusts, clocks.SystemClock())
        self.nova = self.cloud.__dict__['_compute_api'] = mock.Mock()
        self.nova.get.side_effect = self.get
        self.nova.image_api.get_all.return_value = []
        for name, value in (
                ('bounded_calls._cell_of', self.cell_of),
                ('unbuilt_servers.finish', lambda _server_id: None),
                ('build_calls.in_name_of', lambda owner, _access: owner),
                ('bounded_calls.LIMIT', 0.6),
                ('bounded_calls.SHORT_LIMIT', 0.2)):
            self.patch(f'blazar_nova.compat.{name}', value)
        # Images of volumes are made by another object of Nova.
        self.patch('nova.compute.api.API', lambda **_clients: self.nova)
        self.patch('nova.policy.check_is_admin', lambda _context: False)
        self.patch('nova.compute.utils.is_volume_backed_instance',
                   lambda _context, one: one.volumes)
        self.useFixture(fixtures.MockPatch(
            'nova.objects.Service.get_by_compute_host',
            side_effect=self.service))
        self.useFixture(fixtures.MockPatch(
            'nova.objects.Migration.get_by_instance_and_status',
            return_value=types.SimpleNamespace(source_compute='host')))
        self.patch('nova.servicegroup.API', lambda: mock.Mock(
            service_is_up=lambda service: service.host != 'down'))

    def patch(self, name, value):
        self.useFixture(fixtures.MonkeyPatch(name, value))

    def hang(self, *_args, **_more):
        self.door.wait(20)

    def cell_of(self, server_id):
        cell = mock.Mock()
        cell.name = server_id.split(':')[1]
        return cell

    def get(self, _context, server_id, **_more):
        project, cell, state = server_id.split(':')
        if cell == SLOW:
            self.hang()
        vm_state = {'gone': 'shelved_offloaded', 'volumes': 'active',
                    'down': 'active'}.get(state, state)
        return mock.Mock(
            uuid=server_id, project_id=project, vm_state=vm_state,
            task_state=None, display_name='x', volumes=state == 'volumes',
            host=None if state == 'gone' else
            'down' if state == 'down' else 'host')

    def service(self, _context, host):
        if host == 'removed':
            raise exception.ComputeHostNotFound(host=host)
        return types.SimpleNamespace(
            host=host, disabled=False, forced_down=False, last_seen_up=None,
            updated_at=None, created_at=timeutils.utcnow())

    def access(self, credential, as_owner=False):
        if credential == SLOW:
            self.hang()
        return mock.Mock(user_id='user', project_id=credential)

    def refused(self, times, work, *args):
        """Return the errors of calls that run concurrently."""
        said = []

        def call():
            said.append(str(self.assertRaises(
                errors.CloudUnavailable, work, *args)))

        threads = [self.in_thread(call) for _number in range(times)]
        for thread in threads:
            thread.join(20)
        return said

    def image(self, server_id, credential=None):
        self.cloud.create_image(server_id, 'lease', 'name', credential or
                                server_id.partition(':')[0])

    def delete(self, server_id, credential=None):
        self.cloud.delete(server_id, credential or
                          server_id.partition(':')[0])

    def shelve(self, server_id, credential=None):
        self.cloud.set_resting_state(
            server_id, cloud_api.RestingState.SHELVED, credential or
            server_id.partition(':')[0])


class TestSlowServers(SlowTestCase):

    def test_slow_snapshots_of_volumes_do_not_block_other_projects(self):
        """As Nova waits for the agent in a guest, of its owner."""
        self.nova.snapshot_volume_backed.side_effect = self.hang
        self.assertEqual(3, len(self.refused(
            3, self.image, 'mallory:one:volumes')))
        self.assertIn('has not answered an earlier call', str(self.refused(
            1, self.image, 'mallory:two:volumes')))
        self.nova.snapshot_volume_backed.side_effect = None
        for server_id in 'mallory:one:active', 'alice:one:volumes':
            self.image(server_id)
            self.shelve(server_id)
        self.assertEqual(1, self.nova.snapshot.call_count)
        self.assertEqual(2, self.nova.shelve.call_count)

    def test_slow_local_deletions_do_not_block_their_cell(self):
        """As Nova deletes what belongs to the server in this process."""
        def delete(_context, instance):
            if instance.project_id == 'mallory':
                self.hang()

        self.nova.delete.side_effect = delete
        for state in 'gone', 'down', 'shelved', 'resized':
            self.refused(3, self.delete, f'mallory:one:{state}')
            self.delete('alice:one:active')
            self.delete(f'alice:one:{state}')
            self.door.set()
            self.wait_for(lambda: not self.cloud._within._again,
                          'the late answers')
            self.door.clear()
        # Nova only sends a message.
        self.assertIn('Cell one does not answer', str(
            self.refused(3, self.delete, 'mallory:one:active')))

    def test_names_of_calls_that_were_left_are_forgotten(self):
        self.nova.snapshot_volume_backed.side_effect = self.hang
        for number in range(5):
            self.refused(1, self.image, f'p{number}:one:volumes')
        within = self.cloud._within
        self.assertEqual(5, len(within._left))
        self.door.set()
        self.wait_for(lambda: not within._left, 'the late answers')
        self.assertEqual(({}, {}, {}), (
            dict(within._again), dict(within._silences),
            dict(within._waiting)))


class TestSilentServices(SlowTestCase):
    """Each is named, and only its callers are refused."""

    def test_silent_keystone_is_not_taken_for_other_services(self):
        for work in self.image, self.shelve, self.delete:
            said = self.refused(4, work, 'alice:one:active', SLOW)
            self.assertEqual({'Keystone'}, {
                one.partition(' ')[0] for one in said}, said)
        self.assertEqual({'Keystone'}, {*self.cloud._within._again})
        self.trusts.service.side_effect = self.hang
        self.patch('blazar_nova.compat.nova_cloud._ping', lambda _topic: None)
        for work in self.cloud.move, self.cloud.evacuate:
            said = self.refused(4, work, 'alice:one:active', *(
                [None] if work == self.cloud.move else []), 'lease',
                mock.Mock())
            self.assertEqual({'Keystone'}, {
                one.partition(' ')[0] for one in said}, said)
        self.cloud.set_resting_state(
            'alice:one:active', cloud_api.RestingState.STOPPED, None)
        self.assertEqual(1, self.nova.stop.call_count)

    def test_silent_cell_is_not_taken_for_glance(self):
        for work in self.image, self.shelve:
            said = self.refused(4, work, f'alice:{SLOW}:active')
            self.assertEqual({f'Cell {SLOW}'}, {
                one[:len(f'Cell {SLOW}')] for one in said}, said)
        self.image('bob:one:active')
        self.assertEqual(1, self.nova.snapshot.call_count)

    def test_silent_scheduler_is_waited_for_by_one_start(self):
        """All others are deferred at once, and go on when it answers."""
        client = mock.Mock()
        client.call.side_effect = oslo_messaging.MessagingTimeout()
        self.patch('nova.baserpc.BaseAPI', lambda topic: mock.Mock(
            client=mock.Mock(prepare=lambda **_how: client)))
        self.patch('blazar_nova.compat.compute_hosts.ask_placement',
                   lambda _url: {})
        send = functools.partial(
            self.cloud._send, mock.Mock(server_ids=[], request_spec=[]), [],
            None)
        self.refused(1, send)
        asked = threading.Event()

        def hang(*_args, **_more):
            asked.set()
            self.hang()

        client.call.side_effect = hang
        thread = self.in_thread(send)
        asked.wait(20)
        self.assertIn('nova-conductor has not answered an earlier', str(
            self.assertRaises(errors.NotSent, send)))
        self.door.set()
        thread.join(20)
        self.assertEqual('', send())
