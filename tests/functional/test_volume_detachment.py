# SPDX-License-Identifier: Apache-2.0

"""Volumes of a lease that has ended, on the servers of their users."""

from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel

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
