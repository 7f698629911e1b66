# SPDX-License-Identifier: Apache-2.0

"""The harness itself: an ordinary Nova, and assumptions of the tests."""

import requests

from tests.functional import base
from tests.functional import nova_box
from tests import samples


class PlainNovaTest(base.FunctionalTestCase):
    """Nova without the plugin."""

    plugin = False
    more_conf = ('[notifications]\n'
                 'notification_format = versioned\n'
                 '[oslo_messaging_notifications]\n'
                 'driver = messagingv2\n')

    def test_server_boots_and_is_deleted(self):
        server = self.boot_active('vm1')
        self.assertEqual({server['id']: server['OS-EXT-SRV-ATTR:host']},
                         self.guests())
        self.assertEqual(
            [{'VCPU': 1, 'MEMORY_MB': 512, 'DISK_GB': 1}],
            list(self.allocations(server['id']).values()))
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.assertEqual({}, self.guests())
        self.assertEqual({}, self.allocations(server['id']))
        # Nova keeps the mapping and the spec until they are archived.
        self.assertEqual({'api.build_requests': 0, 'cell0.instances': 0,
                          'cell1.instances': 0, 'api.request_specs': 1,
                          'api.instance_mappings': 1}, self.boot_rows())

    def test_boot_at_oldest_microversion(self):
        server = self.boot('vm1', client=self.api(microversion=None))
        self.wait_for_status(server['id'], 'ACTIVE')

    def test_host_capacity_limits_servers(self):
        self.boot_active('vm1', flavor='5')
        self.start_compute('host3', nova_box.Capacity(vcpus=1))
        self.boot_active('vm2', flavor='5')
        server = self.boot('vm3', flavor='5')
        self.wait_for_status(server['id'], 'ERROR')

    def test_projects_do_not_see_each_other(self):
        server = self.boot('vm1')
        bob = self.api(project='0' * 32, user='bob')
        self.refused(403, bob.get_server, server['id'])
        self.refused(403, bob.get_services)
        self.assertEqual([], bob.get_servers())

    def test_request_without_token_is_unauthorized(self):
        response = requests.get(self.alice.base_url + '/servers')
        self.assertEqual(401, response.status_code)
        self.assertIsNone(nova_box.Identity.of_token('no token'))

    def test_notifications_reach_a_listener(self):
        recorder = self.record('versioned_notifications')
        server = self.boot_active('vm1')
        (data,) = recorder.wait('instance.create.end')
        self.assertEqual(server['id'], data['uuid'])


class ConfigurationTest(base.FunctionalTestCase):
    """Nova reads the configuration that is documented for operators."""

    plugin = False

    def test_documentation_changes_one_line_of_api_paste_ini(self):
        before = samples.nova_paste().splitlines()
        after = samples.with_leases(samples.nova_paste()).splitlines()
        self.assertEqual(
            ['paste.app_factory = nova.api.openstack.compute:APIRouterV21.'
             'factory'], [line for line in before if line not in after])
        self.assertEqual(
            [], [line for line in after if line not in before and
                 'blazar' not in line and 'pipeline_factory' not in line])
        self.assertRaises(ValueError, samples.with_leases, 'nothing')

    def test_nova_conf_file_has_plain_configuration(self):
        with open(self.conf_file) as f:
            self.assertEqual(nova_box.plain_conf(self.folder), f.read())
