# SPDX-License-Identifier: Apache-2.0

import threading
import types

import fixtures
from nova import context as nova_context
from nova.network import model as network_model

from blazar_core.common import errors
from blazar_nova.compat import accelerators
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import server_ports
from blazar_nova.compat import volume_detachment
from tests.unit import base

ADDRESS = server_ports.Address('net', '10.0.0.5')


def port(its_id, device_id, owner='compute:nova', project='mine'):
    return {'id': its_id, 'device_id': device_id, 'device_owner': owner,
            'tenant_id': project}


class TestInUse(base.TestCase):

    def setUp(self):
        super().setUp()
        self.context = nova_context.RequestContext(
            'alice', 'mine', is_admin=False)
        self.ports, self.asked = [], []
        self.useFixture(fixtures.MonkeyPatch(
            'nova.network.neutron.API',
            lambda: types.SimpleNamespace(list_ports=self.list_ports)))

    def list_ports(self, context, **limits):
        self.assertTrue(context.is_admin)
        del limits['fields']
        self.asked.append(limits)
        return {'ports': self.ports}

    def said(self, ports=(), addresses=(), but=()):
        return [str(one) for one in server_ports.in_use(
            self.context, ports, addresses, but)]

    def test_no_request_without_ports_and_addresses(self):
        self.assertEqual([], self.said())
        self.assertEqual([], self.asked)

    def test_ports_are_requested_together(self):
        self.ports = [port('a', 'vm'), port('b', ''), port('c', 'me')]
        self.assertEqual(['Port a is in use by server vm.'], self.said(
            ['a', 'b', 'c'], but=['me']))
        self.assertEqual([{'id': ['a', 'b', 'c']}], self.asked)

    def test_fixed_ip_of_any_port_is_in_use(self):
        self.ports = [port('a', '', owner='')]
        self.assertEqual(
            ['Fixed IP 10.0.0.5 of network net is in use.'],
            self.said(addresses=[ADDRESS]))
        self.assertEqual([{'network_id': 'net',
                           'fixed_ips': 'ip_address=10.0.0.5'}], self.asked)

    def test_servers_of_other_projects_are_not_named(self):
        for one in (port('a', 'vm', project='other'),
                    port('a', 'r', owner='network:router_interface'),
                    port('a', 'r', owner=None)):
            self.ports = [one]
            self.assertEqual(['Port a is in use.'], self.said(['a']))

    def test_unavailable_neutron_means_cloud_unavailable(self):
        self.ports = None
        self.list_ports = None
        self.assertRaises(errors.CloudUnavailable, self.said, ['a'])


class TestSilence(base.TestCase):
    """Neutron, or the database of a cell, does not answer."""

    def setUp(self):
        super().setUp()
        self.answers, self.waited = threading.Event(), []
        self.addCleanup(self.answers.set)
        for name, value in (
                ('nova.network.neutron.API',
                 lambda: types.SimpleNamespace(list_ports=self.silent)),
                ('nova.compute.api.API',
                 lambda: types.SimpleNamespace(get=self.silent)),
                ('nova.objects.InstanceMapping.get_by_instance_uuid',
                 lambda *_args: types.SimpleNamespace(
                     cell_mapping=types.SimpleNamespace(name='cell1'))),
                ('blazar_nova.compat.bounded_calls.LIMIT', 0.05)):
            self.useFixture(fixtures.MonkeyPatch(name, value))
        for module in (accelerators, server_ports, volume_detachment):
            self.useFixture(fixtures.MockPatchObject(
                module, '_within', bounded_calls.Bounded(), create=True))
        self.log = self.useFixture(fixtures.FakeLogger())

    def silent(self, *_args, **_limits):
        self.waited.append(self.answers.wait(5))

    def test_neutron_is_waited_for_with_a_limit(self):
        self.assertIn('Neutron does not answer within', str(
            self.assertRaises(
                errors.CloudUnavailable, server_ports.in_use,
                nova_context.RequestContext(
                    'alice', 'mine', is_admin=False), ['a'], [])))
        self.assertEqual([], self.waited)

    def test_cyborg_is_waited_for_with_a_limit(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova.accelerator.cyborg.get_client',
            lambda _context: types.SimpleNamespace(
                _get_device_profile_list=self.silent)))
        self.assertIn('Cyborg does not answer within', str(
            self.assertRaises(
                errors.CloudUnavailable, accelerators.lacking, None,
                types.SimpleNamespace(
                    extra_specs={'accel:device_profile': 'gpu'}))))
        self.assertEqual([], self.waited)

    def test_cell_is_waited_for_with_a_limit_to_detach_a_port(self):
        self.assertFalse(server_ports.detach('server', 'port'))
        self.assertEqual([], self.waited)
        self.assertIn('Cell cell1 does not answer within', self.log.output)

    def test_cell_is_waited_for_with_a_limit_to_detach_a_volume(self):
        self.assertTrue(
            volume_detachment.detach('server', 'volume', 'reservation'))
        self.assertEqual([], self.waited)
        self.assertIn('Cell cell1 does not answer within', self.log.output)


class TestOfInstance(base.TestCase):

    def test_ports_and_addresses_match_those_of_a_boot(self):
        vif = network_model.VIF(id='p', network=network_model.Network(
            id='net', subnets=[network_model.Subnet(ips=[
                network_model.FixedIP(address='10.0.0.5'),
                network_model.FixedIP(address='fd00::1')])]))
        instance = types.SimpleNamespace(
            get_network_info=lambda: network_model.NetworkInfo([vif]))
        self.assertEqual(
            server_ports.named(['p'], [ADDRESS, server_ports.Address(
                'net', 'FD00:0::1')]), server_ports.of_instance(instance))
