# SPDX-License-Identifier: Apache-2.0


from unittest import mock

from nova import exception

from blazar_core.common import errors
from blazar_core.lifecycle import preflight
from tests.functional import base
from tests.functional import leased
from tests.functional import test_held

HOUR = 3600


class PreflightTestCase(leased.LeasedTestCase):
    """Objects of a boot that are missing an hour before the start."""

    def setUp(self):
        super().setUp()
        self.recorder, self.changes = self.record(), 0

    def look(self):
        """Return the warnings; expect a notification if they have changed."""
        before = self.lease('vm1')['warnings']
        self.listener.parts.preflight.look()
        lease = self.lease('vm1')
        if lease['warnings'] != before:
            self.changes += 1
            told = self.recorder.wait(preflight.EVENT, self.changes)[-1]
            self.assertEqual((lease['id'], lease['warnings']),
                             (told['lease_id'], told['warnings']))
        return lease['warnings']

    def before(self):
        """Advance to an hour before the start, at first without warnings."""
        self.assertEqual([], self.look())
        self.clock.advance(HOUR)

    def hold(self, **boot):
        return super().hold('vm1', start_in=2 * HOUR, **boot)


class PreflightTest(PreflightTestCase):

    def test_complete_boot_has_no_warnings(self):
        self.hold()
        self.before()
        self.assertEqual([], self.look())
        self.assertEqual([(self.clock.now(),)], self.query(
            'SELECT preflight_at FROM leases'))
        self.clock.advance(HOUR)
        self.run_due()
        self.wait_for_status(
            self.lease('vm1')['reservations'][0]['servers'][0], 'ACTIVE')

    def test_missing_or_deactivated_image_is_reported(self):
        self.hold()
        self.before()
        image = self.glance.images.pop(base.IMAGE)
        warning, = self.look()
        self.assertEqual(f'Image {base.IMAGE} could not be found.', warning)
        self.glance.images[base.IMAGE] = image
        self.assertEqual([warning], self.look())
        self.clock.advance(preflight.AGAIN)
        with mock.patch.dict(image, status='deactivated'):
            self.assertEqual([f'Image {base.IMAGE} is deactivated.'],
                             self.look())
        self.clock.advance(preflight.AGAIN)
        self.assertEqual([], self.look())

    def test_deleted_server_group_is_reported(self):
        group = self.alice.post_server_groups(
            {'name': 'apart', 'policy': 'anti-affinity', 'rules': {}})['id']
        self.boot('vm1', hints=self.lease_hints('vm1', 2 * HOUR) | {
            'group': group})
        self.before()
        self.alice.delete_server_group(group)
        self.assertEqual([
            f'Server group {group} no longer exists: its policy is '
            f'not enforced.'], self.look())

    def test_unauthorized_image_is_reported(self):
        self.hold()
        self.before()
        kept = mock.Mock(side_effect=exception.ImageNotAuthorized(
            image_id=base.IMAGE))
        with mock.patch('nova.image.glance.API.get', new=kept):
            self.assertIn('Not authorized', self.look()[0])

    def test_deleted_security_group_is_reported(self):
        group = self.neutron.security_group['id']
        groups = 'nova.network.security_group_api'
        with mock.patch(f'{groups}.validate_name', return_value=group):
            self.hold(networks='auto', security_groups=[{'name': 'web'}])
        self.before()
        gone = mock.Mock(side_effect=exception.SecurityGroupNotFound(
            security_group_id=group))
        with mock.patch(f'{groups}.get', new=gone):
            warning, = self.look()
        self.assertEqual(f'Security group {group} not found.', warning)

    def test_number_of_warnings_is_limited(self):
        self.hold(imageRef='', block_device_mapping_v2=[
            {'boot_index': number, 'uuid': test_held.VOLUME,
             'source_type': 'volume', 'destination_type': 'volume'}
            for number in range(1)])
        self.before()
        with mock.patch('blazar_nova.compat.build_preflight._volumes',
                        lambda build: ['It is gone.'] * 780):
            warnings = self.look()
        self.assertEqual((21, 'And 760 more.'), (len(warnings), warnings[-1]))

    def test_listener_runs_preflight_periodically(self):
        self.hold()
        self.before()
        self.start_listener(self.clock)
        self.wait_for(lambda: self.query(
            'SELECT preflight_at FROM leases') != [(None,)],
            what='somebody has looked')

    def test_deleted_port_is_reported(self):
        port = self.neutron.port_1['id']
        self.hold(networks=[{'port': port}])
        self.before()
        self.neutron.delete_port(port)
        warning, = self.look()
        self.assertIn(f'{port} could not be found', warning)

    def test_deleted_or_failed_volume_is_reported(self):
        self.hold(imageRef='', block_device_mapping_v2=[
            {'boot_index': 0, 'uuid': test_held.VOLUME,
             'source_type': 'volume', 'destination_type': 'volume'}])
        self.before()
        gone = mock.Mock(side_effect=exception.VolumeNotFound(
            volume_id=test_held.VOLUME))
        with mock.patch('nova.volume.cinder.API.get', new=gone):
            warning, = self.look()
        self.assertIn(f'Volume {test_held.VOLUME} could not be found.',
                      warning)
        self.clock.advance(preflight.AGAIN)
        with mock.patch('nova.volume.cinder.API.get', new=mock.Mock(
                return_value={'status': 'error_deleting'})):
            self.assertEqual(
                [f'Volume {test_held.VOLUME} is in error_deleting.'],
                self.look())

    def test_lack_of_enabled_hosts_is_reported(self):
        self.hold()
        self.before()
        for host in self.hosts:
            self.admin.put_service(self.admin.get_services(
                host=host, binary='nova-compute')[0]['id'], {
                    'status': 'disabled'})
        self.assertEqual(['None of the hosts may be used.'], self.look())

    def test_unusable_trust_is_reported(self):
        self.hold()
        lease = self.lease('vm1')
        self.listener.parts.leases.credentials.store(
            lease['id'], self.listener.parts.encryption.encrypt('trust'))
        self.before()
        with mock.patch(
                'blazar_nova.services.user_credentials.Credentials.access',
                side_effect=errors.TrustUnavailable('He was disabled')):
            self.assertEqual(['He was disabled.'], self.look())

    def test_preflight_is_retried_if_service_is_unavailable(self):
        self.hold()
        self.before()
        down = mock.Mock(side_effect=exception.GlanceConnectionFailed(
            server='x', reason='y'))
        with mock.patch('nova.image.glance.API.get', new=down):
            self.assertEqual([], self.look())
        self.assertEqual([(None,)], self.query(
            'SELECT preflight_at FROM leases'))
        self.glance.images.pop(base.IMAGE)
        self.assertEqual([], self.look())
        self.clock.advance(preflight.PAUSE)
        self.assertEqual(1, len(self.look()))


class QuotaTest(PreflightTestCase):
    """The same with a quota of Nova's own."""

    more_conf = ('[quota]\n'
                 'driver = nova.quota.DbQuotaDriver\n')

    def test_exhausted_quota_is_reported(self):
        self.hold(flavor='4')
        self.before()
        self.flags(cores=3, group='quota')
        self.assertEqual(['Quota: The quota of the project admits no more '
                          '(of cores).'], self.look())
