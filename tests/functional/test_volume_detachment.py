# SPDX-License-Identifier: Apache-2.0

"""Volumes and ports of a lease that has ended, on servers of their users."""

import fixtures
from nova import context as nova_context
from nova import objects
from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel

from blazar_nova.compat import server_ports
from blazar_nova.compat import volume_detachment
from tests.functional import leased

VOLUME = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
OTHER = nova_fixtures.CinderFixture.IMAGE_WITH_TRAITS_BACKED_VOL
#: The reservation of the volumes.
ITS = uuidsentinel.reservation


class DetachTest(leased.LeasedTestCase):

    def attached(self, server_id):
        return [one['volumeId'] for one in self.alice.api_get(
            f'/servers/{server_id}/os-volume_attachments').body[
                'volumeAttachments']]

    def server(self):
        """Boot a server that has the volume."""
        server_id = self.boot_active('vm1')['id']
        self.alice.api_post(
            f'/servers/{server_id}/os-volume_attachments',
            {'volumeAttachment': {'volumeId': OTHER}})
        self.wait_for(lambda: self.cinder.attachment_ids_for_instance(
            server_id), what='an attachment')
        return server_id

    def give_task(self, server_id):
        """Let a server have a task that does not end."""
        context = nova_context.get_admin_context()
        with nova_context.target_cell(context, self.cell_mappings[
                'cell1']) as in_cell:
            instance = objects.Instance.get_by_uuid(in_cell, server_id)
            instance.task_state = 'image_snapshot'
            instance.save()
        return instance.host

    def after(self, seconds):
        """Let all requests be that old."""
        for name in '_PAUSE', '_LAST':
            self.useFixture(fixtures.MockPatchObject(
                volume_detachment, name,
                getattr(volume_detachment, name) - seconds))

    def actions(self, server_id):
        return [one['action'] for one in self.admin.api_get(
            f'/servers/{server_id}/os-instance-actions').body[
                'instanceActions'] if one['request_id'].startswith('req-vol')]

    def test_a_server_leaves_states_in_which_nova_refuses(self):
        for action, body, status, leave in (
                ('rescue', {}, 'RESCUE', 'unrescue'),
                ('suspend', None, 'SUSPENDED', 'resume')):
            server_id = self.server()
            self.alice.post_server_action(server_id, {action: body})
            self.wait_for_status(server_id, status)
            for _time in range(2):
                # Repeated at once, nothing is requested.
                self.assertTrue(
                    volume_detachment.detach(server_id, OTHER, ITS))
            self.wait_for_status(server_id, 'ACTIVE')
            with fixtures.MockPatchObject(volume_detachment, '_PAUSE', 0):
                self.assertTrue(
                    volume_detachment.detach(server_id, OTHER, ITS))
            self.wait_for(lambda: not self.attached(server_id),
                          what='a server without it')
            self.assertEqual(['detach_volume', leave],
                             self.actions(server_id))
            self.alice.delete_server(server_id)
            self.wait_until_gone(server_id)

    def test_a_server_that_keeps_it_is_deleted(self):
        """Nova refuses, as its user lets it have a task all the time."""
        server_id = self.server()
        self.give_task(server_id)
        for _time in range(2):
            self.assertTrue(volume_detachment.detach(server_id, OTHER, ITS))
        self.assertEqual(['detach_volume'], self.actions(server_id))
        self.after(601)
        # One of another reservation has its own time.
        self.assertTrue(volume_detachment.detach(
            server_id, OTHER, uuidsentinel.another))
        self.assertEqual('ACTIVE', self.admin.get_server(server_id)['status'])
        self.assertTrue(volume_detachment.detach(server_id, OTHER, ITS))
        self.wait_until_gone(server_id)

    def test_a_server_on_a_host_that_is_down_is_not_deleted(self):
        server_id = self.server()
        host = self.give_task(server_id)
        self.assertTrue(volume_detachment.detach(server_id, OTHER, ITS))
        self.after(601)
        for down in True, False:
            service, = self.admin.get_services('nova-compute', host)
            self.admin.put_service(service['id'], {'forced_down': down})
            self.assertTrue(volume_detachment.detach(server_id, OTHER, ITS))
            if down:
                self.assertEqual(
                    'ACTIVE', self.admin.get_server(server_id)['status'])
        self.wait_until_gone(server_id)

    def test_volume_is_detached_from_locked_server(self):
        server_id = self.server()
        self.alice.post_server_action(server_id, {'lock': None})
        self.assertTrue(volume_detachment.detach(server_id, OTHER, ITS))
        self.wait_for(lambda: not self.attached(server_id),
                      what='a server without it')
        # Asked again, nothing happens: it does not have the volume.
        self.assertFalse(volume_detachment.detach(server_id, OTHER, ITS))
        self.assertEqual(
            'ACTIVE', self.admin.get_server(server_id)['status'])

    def test_server_booted_from_volume_is_deleted(self):
        server_id = self.boot_active(
            'vm1', imageRef='', block_device_mapping_v2=[{
                'boot_index': 0, 'uuid': VOLUME, 'source_type': 'volume',
                'destination_type': 'volume'}])['id']
        self.assertTrue(volume_detachment.detach(server_id, VOLUME, ITS))
        self.wait_until_gone(server_id)
        self.assertFalse(volume_detachment.detach(server_id, VOLUME, ITS))

    def test_detach_from_unknown_server_is_ignored(self):
        self.assertFalse(volume_detachment.detach(
            uuidsentinel.server, VOLUME, ITS))


class PortTest(leased.LeasedTestCase):
    """Ports of leased networks."""

    def setUp(self):
        super().setUp()
        self.port = self.neutron.port_1['id']
        self.server_id = self.boot_active('vm1')['id']

    def attach(self):
        self.alice.api_post(
            f'/servers/{self.server_id}/os-interface',
            {'interfaceAttachment': {'port_id': self.port}})
        self.wait_for(self.ports, what='an attached port')

    def ports(self):
        return [one['port_id'] for one in self.alice.api_get(
            f'/servers/{self.server_id}/os-interface').body[
                'interfaceAttachments']]

    def test_port_of_locked_server_is_detached_once(self):
        self.attach()
        self.alice.post_server_action(self.server_id, {'lock': None})
        self.assertTrue(server_ports.detach(self.server_id, self.port))
        self.wait_for(lambda: not self.ports(),
                      what='a server without it')
        self.assertFalse(server_ports.detach(self.server_id, self.port))
        # Attached again, it is deleted instead.
        self.alice.post_server_action(self.server_id, {'unlock': None})
        self.attach()
        self.assertFalse(server_ports.detach(self.server_id, self.port))

    def test_nova_refuses_in_some_states(self):
        self.attach()
        self.alice.post_server_action(self.server_id, {'suspend': None})
        self.wait_for_status(self.server_id, 'SUSPENDED')
        self.assertFalse(server_ports.detach(self.server_id, self.port))

    def test_of_what_has_no_such_port(self):
        for server_id in (self.server_id, uuidsentinel.server, 'x', '../x'):
            self.assertFalse(server_ports.detach(server_id, self.port))
