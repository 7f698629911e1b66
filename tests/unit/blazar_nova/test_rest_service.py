# SPDX-License-Identifier: Apache-2.0

"""What neutron, cinder and Heat may answer."""

import itertools
from unittest import mock

from blazar_core.common import errors
from blazar_nova.compat import network_api
from blazar_nova.compat import stack_api
from blazar_nova.compat import volume_api
from tests.unit import base

SEGMENT = network_api.Segment('vlan', 'physnet1', 7)
USER = 'token', 'project'
#: The methods that read an answer, their arguments, and where it has a list or
#: an object.
READ = (
    (network_api.Neutron, 'subnets', ('network',), ['networks']),
    (network_api.Neutron, 'floating_ips', (), ['floatingips']),
    (network_api.Neutron, 'port_addresses', ('network',), ['ports']),
    (network_api.Neutron, 'allocate', ('network', '192.0.2.7', 'project'),
     ['floatingip']),
    (network_api.Neutron, 'names_of', ('network',), ['networks']),
    (network_api.Neutron, 'segments', (), ['network_segment_ranges']),
    (network_api.Neutron, 'networks', (), ['networks']),
    (network_api.Neutron, 'create_network', (SEGMENT, 'name', 'project'),
     ['network']),
    (network_api.Neutron, 'ports', ('network',), ['ports']),
    (volume_api.Cinder, 'types', (), ['volume_types']),
    (volume_api.Cinder, 'create_type', ('name', 'text', {}), ['volume_type']),
    (volume_api.Cinder, 'projects_of', ('type',), ['volume_type_access']),
    (volume_api.Cinder, 'freeze', ('project', 'name'), ['quota_set']),
    (volume_api.Cinder, 'volumes_of', ('type',), ['volumes']),
    (stack_api.Heat, 'preview', (*USER, {}), ['stack', 'resources']),
    (stack_api.Heat, 'create', (*USER, {}), ['stack', 'id']),
    (stack_api.Heat, 'find', (*USER, 'a/7'), ['stack']))
#: JSON that is neither a list of objects nor an object with the right keys.
WRONG = (None, 7, 'text', True, [None], [7], ['text'], [[None]], {'a': 1})
#: Those of them that are right: there is no such stack, or quota.
RIGHT = (('find', {'stack': None}), ('freeze', {'quota_set': {'a': 1}}),
         ('create', {'stack': {'id': 'text'}}))


class TestWrongAnswers(base.TestCase):

    def read(self, kind, method, args, body):
        service, adapter = kind(), mock.Mock()
        adapter.get_project_id.return_value = 'service'
        adapter.get_endpoint.return_value = 'http://heat/v1/service'
        adapter.request.return_value = mock.Mock(
            content=b'x', json=lambda: body)
        service.__dict__['_adapter'] = adapter
        return getattr(service, method)(*args)

    def test_they_are_those_of_a_service_that_is_away(self):
        for (kind, method, args, keys), wrong in itertools.product(
                READ, WRONG):
            bodies = [wrong]
            for key in reversed(keys):
                bodies += [{key: body} for body in bodies]
            for body in bodies:
                if (method, body) in RIGHT:
                    continue
                try:
                    found = self.read(kind, method, args, body)
                except errors.CloudUnavailable as exc:
                    self.assertIn(kind.name, str(exc))
                else:
                    self.fail(f'{method} reads {body} as {found}')

    def test_so_is_a_preview_of_resources_that_lack_something(self):
        resource = {'resource_name': 'a', 'resource_type': 'OS::Nova::Server',
                    'properties': {}}
        (kind, *words), = (one[:3] for one in READ if one[1] == 'preview')
        for wrong in ({key: value for key, value in resource.items()
                       if key != missing} for missing in resource):
            for body in [wrong], [[wrong]], [resource, wrong], [
                    {**wrong, **dict.fromkeys(resource.keys() - wrong)}]:
                self.assertRaises(
                    errors.CloudUnavailable, self.read, kind, *words,
                    {'stack': {'resources': body}})
        self.assertEqual([resource], self.read(
            kind, *words, {'stack': {'resources': [resource]}}))
