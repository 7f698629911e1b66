# SPDX-License-Identifier: Apache-2.0

"""Volumes and ports of a lease that has ended, on servers of their users."""

from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel

from blazar_nova.compat import server_ports
from blazar_nova.compat import volume_detachment
from tests.functional import leased

VOLUME = nova_fixtures.CinderFixture.IMAGE_BACKED_VOL
OTHER = nova_fixtures.CinderFixture.IMAGE_WITH_TRAITS_BACKED_VOL


class DetachTest(leased.LeasedTestCase):

    def attached(self, server_id):
        return [one['volumeId'] for one in self.alice.api_get(
            f'/servers/{server_id}/os-volume_attachments').body[
                'volumeAttachments']]

    def test_a_disk_is_detached_though_its_server_is_locked(self):
        server_id = self.boot_active('vm1')['id']
        self.alice.api_post(
            f'/servers/{server_id}/os-volume_attachments',
            {'volumeAttachment': {'volumeId': OTHER}})
        self.wait_for(lambda: self.cinder.attachment_ids_for_instance(
            server_id), what='an attachment')
        self.alice.post_server_action(server_id, {'lock': None})
        self.assertTrue(volume_detachment.detach(server_id, OTHER))
        self.wait_for(lambda: not self.attached(server_id),
                      what='a server without it')
        # Asked again, nothing happens: it does not have the volume.
        self.assertFalse(volume_detachment.detach(server_id, OTHER))
        self.assertEqual(
            'ACTIVE', self.admin.get_server(server_id)['status'])

    def test_a_server_that_boots_from_it_is_deleted(self):
        server_id = self.boot_active(
            'vm1', imageRef='', block_device_mapping_v2=[{
                'boot_index': 0, 'uuid': VOLUME, 'source_type': 'volume',
                'destination_type': 'volume'}])['id']
        self.assertTrue(volume_detachment.detach(server_id, VOLUME))
        self.wait_until_gone(server_id)
        self.assertFalse(volume_detachment.detach(server_id, VOLUME))

    def test_of_a_server_that_nova_does_not_have(self):
        self.assertFalse(volume_detachment.detach(
            uuidsentinel.server, VOLUME))


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

    def test_one_is_detached_though_its_server_is_locked(self):
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
