# SPDX-License-Identifier: Apache-2.0


import types

import fixtures
from oslotest import base

from blazar_nova.compat import build_calls


class NeedsUserTokenTest(base.BaseTestCase):
    """Builds that need the token of their user."""

    def makes(self, extra_specs=(), properties=(), devices=(), networks=()):
        flavor = types.SimpleNamespace(extra_specs=dict.fromkeys(
            extra_specs, '1'))
        return build_calls.BuildCall(
            None, [], [types.SimpleNamespace(flavor=flavor)],
            {'properties': dict.fromkeys(properties, '1')}, None, None,
            [types.SimpleNamespace(address=address, port_id=port_id)
             for address, port_id in networks],
            [types.SimpleNamespace(source_type=source, destination_type=to)
             for source, to in devices], None).makes_what_is_the_users

    def test_existing_resources_need_no_user_token(self):
        self.assertFalse(self.makes(
            ['hw:cpu_policy', 'aggregate_instance_extra_specs:x'],
            ['hw_disk_bus', 'os_type'],
            [('image', 'local'), ('volume', 'volume'), ('blank', 'local')],
            [(None, None), (None, 'port'), ('10.0.0.5', 'port')]))

    def test_new_volumes_need_user_token(self):
        for source in 'image', 'snapshot', 'blank':
            self.assertTrue(self.makes(devices=[(source, 'volume')]))

    def test_fixed_ip_needs_user_token(self):
        self.assertTrue(self.makes(networks=[('10.0.0.5', None)]))

    def test_secrets_and_accelerators_need_user_token(self):
        for name in ('hw:tpm_version', 'accel:device_profile',
                     'hw:ephemeral_encryption'):
            self.assertTrue(self.makes(extra_specs=[name]))
        for name in 'hw_tpm_model', 'hw_ephemeral_encryption_format':
            self.assertTrue(self.makes(properties=[name]))

    def test_call_without_details_needs_no_user_token(self):
        call = build_calls.BuildCall(None, [], [types.SimpleNamespace(
            flavor=types.SimpleNamespace(extra_specs={}))], None, None, None,
            None, None, None)
        self.assertFalse(call.makes_what_is_the_users)


class ExclusiveTest(base.BaseTestCase):
    """Resources that only one server at a time can use."""

    def needed(self, networks=(), volumes=(), networks_there=True):
        return build_calls.BuildCall(
            None, [], [], None, None, None, [types.SimpleNamespace(
                port_id=port, address=address, network_id='net')
                for port, address in networks] if networks_there else None,
            [types.SimpleNamespace(volume_id=one) for one in volumes],
            None).exclusive

    def test_call_without_ports_and_volumes_is_not_exclusive(self):
        self.assertEqual(frozenset(), self.needed(networks_there=False))
        self.assertEqual(frozenset(), self.needed([(None, None)], [None]))

    def test_ports_and_normalized_fixed_ips_are_exclusive(self):
        self.assertEqual(
            {'port p', 'fixed IP 10.0.0.5 of network net',
             'fixed IP fd00::1 of network net'},
            self.needed([('p', None), ('p', '10.0.0.9'), (None, '10.0.0.5'),
                         (None, 'fd00:0::0001'), (None, 'FD00::1')]))

    def test_volumes_without_multiattach_are_exclusive(self):
        volumes = {'mine': {'multiattach': False}, 'all': {
            'multiattach': True}}
        self.useFixture(fixtures.MonkeyPatch(
            'nova.volume.cinder.API', lambda: types.SimpleNamespace(
                get=lambda _context, volume_id: volumes[volume_id])))
        self.assertEqual(
            {'volume mine'}, self.needed(volumes=['mine', 'all', 'gone']))
