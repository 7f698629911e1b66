# SPDX-License-Identifier: Apache-2.0

"""Which ports and addresses of a refused boot are looked up in neutron."""

import types
from unittest import mock

from oslo_utils.fixture import uuidsentinel as uuids
import webob

from blazar_nova.api import used_ports
from blazar_nova.compat import server_ports
from tests.unit import base


class TestExplain(base.TestCase):

    def looked_up(self, networks):
        """Return what neutron is asked for a boot with networks."""
        request = webob.Request.blank('/servers', method='POST')
        request.json_body = {'server': {'networks': networks}}
        environ = {**request.environ, 'nova.context': types.SimpleNamespace(
            project_id='project')}
        with mock.patch.object(server_ports, 'in_use',
                               return_value=[]) as in_use:
            used_ports.explain(mock.Mock(), environ, webob.Response())
        return [call.args[1:] for call in in_use.call_args_list]

    def test_each_port_and_address_is_looked_up_once(self):
        one = {'uuid': uuids.network, 'fixed_ip': '10.0.0.1'}
        self.assertEqual(
            [([uuids.port], [server_ports.Address(
                uuids.network, '10.0.0.1')])],
            self.looked_up([one, {'port': uuids.port}] * 1000))

    def test_request_with_many_addresses_does_not_ask_neutron(self):
        many = [{'uuid': uuids.network, 'fixed_ip': f'10.0.0.{number}'}
                for number in range(1, 22)]
        self.assertEqual([], self.looked_up(many))
        self.assertEqual(20, len(self.looked_up(many[1:])[0][1]))
