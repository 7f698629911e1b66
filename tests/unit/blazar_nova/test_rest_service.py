# SPDX-License-Identifier: Apache-2.0

"""What neutron, cinder and Heat may answer."""

import contextlib
import itertools
from unittest import mock
import urllib.parse

import requests

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
    (network_api.Neutron, 'quota', ('project', 'network'), ['quota']),
    (volume_api.Cinder, 'types', (), ['volume_types']),
    (volume_api.Cinder, 'create_type', ('name', 'text', {}), ['volume_type']),
    (volume_api.Cinder, 'projects_of', ('type',), ['volume_type_access']),
    (volume_api.Cinder, 'freeze', ('project', 'name'), ['quota_set']),
    (volume_api.Cinder, 'gigabytes', ('project',), ['quota_set']),
    (volume_api.Cinder, 'volumes_of', ('type',), ['volumes']),
    (volume_api.Cinder, 'delete_group_snapshots', ('volume',), ['snapshots']),
    (stack_api.Heat, 'preview', (*USER, {}), ['stack', 'resources']),
    (stack_api.Heat, 'create', (*USER, {}), ['stack', 'id']),
    (stack_api.Heat, 'find', (*USER, 'a/7'), ['stack']))
#: Texts that users may write where services expect ids.
TEXTS = ('victim/add_router_interface?x=', '../networks/victim/tags/text?',
         'victim/add_router_interface', '..', '.', '', 'a?b=c', 'a#b', 'a;b',
         'a b', 'a%2Fb', '%2e%2e', 'caf\u00e9')
#: JSON that is neither a list of objects nor an object with the right keys.
WRONG = (None, 7, 'text', True, [None], [7], ['text'], [[None]], {'a': 1})
#: Those of them that are right: there is no such stack, or quota.
RIGHT = (('find', {'stack': None}), ('freeze', {'quota_set': {'a': 1}}),
         ('create', {'stack': {'id': 'text'}}),
         ('quota', {'quota': {'a': 1}}),
         ('gigabytes', {'quota_set': {'a': 1}}))


class TestPaths(base.TestCase):
    """What users write does not choose the object of a request."""

    def check(self, kind, method, *args, **answers):
        """Call a method with each text in place of ID."""
        for text in TEXTS:
            service, adapter = kind(), mock.Mock()
            adapter.get_project_id.return_value = 'service'
            adapter.get_endpoint.return_value = 'http://heat/v1/service'
            adapter.request.return_value = mock.Mock(
                content=b'x', json=lambda: answers)
            service.__dict__['_adapter'] = adapter
            with contextlib.suppress(errors.CloudUnavailable):
                getattr(service, method)(*(
                    one(text) if callable(one) else one for one in args))
            for call in adapter.request.mock_calls:
                yield text, self.arriving(call.args[0])

    def arriving(self, url):
        """Return the parts of a path as a service sees them."""
        base = '' if url.startswith('http') else 'http://service'
        path = requests.Request('GET', base + url).prepare().path_url
        return urllib.parse.unquote(path.partition('?')[0]).split('/')[1:]

    def test_of_a_router(self):
        for text, parts in self.check(
                network_api.Neutron, 'remove_router_interface',
                lambda text: network_api.Port('p', 'owner', text)):
            self.assertEqual(['v2.0', 'routers', text,
                              'remove_router_interface'], parts)

    def test_of_an_object_of_neutron(self):
        for text, parts in self.check(
                network_api.Neutron, 'delete', 'ports', str):
            self.assertEqual(['v2.0', 'ports', text], parts)

    def test_of_a_group_of_volumes(self):
        for text, parts in self.check(
                volume_api.Cinder, 'remove_from_group', str, 'volume', False):
            self.assertEqual(['groups', text], parts)

    def test_of_a_stack(self):
        for text, parts in self.check(
                stack_api.Heat, 'suspend', *USER, lambda text: f'{text}/7'):
            self.assertEqual(
                ['v1', 'project', 'stacks', text, '7', 'actions'], parts)


class TestWrongAnswers(base.TestCase):

    def read(self, kind, method, args, body):
        service, adapter = kind(), mock.Mock()
        adapter.get_project_id.return_value = 'service'
        adapter.get_endpoint.return_value = 'http://heat/v1/service'
        adapter.request.return_value = mock.Mock(
            content=b'x', json=lambda: body)
        service.__dict__['_adapter'] = adapter
        return getattr(service, method)(*args)

    def test_malformed_responses_mean_cloud_unavailable(self):
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

    def test_preview_of_incomplete_resources_means_cloud_unavailable(self):
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
