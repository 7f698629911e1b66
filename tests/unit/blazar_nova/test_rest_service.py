# SPDX-License-Identifier: Apache-2.0

"""What neutron, cinder and Heat may answer."""

import contextlib
import copy
import functools
import itertools
from unittest import mock
import urllib.parse

from keystoneauth1 import exceptions
from keystoneauth1 import loading
import requests

from blazar_core.common import errors
from blazar_nova.compat import network_api
from blazar_nova.compat import process
from blazar_nova.compat import rest_service
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
#: Methods for which a missing object or extension is no error, and what they
#: return then.
MISSING = (
    (network_api.Neutron, 'segments', (), []),
    (network_api.Neutron, 'quota', ('project', 'network'),
     rest_service.Quota(-1, 0)),
    (network_api.Neutron, 'set_up', ('network', False), None),
    (network_api.Neutron, 'delete', ('networks', 'network'), None),
    (network_api.Neutron, 'release', ('floating IP',), None),
    (network_api.Neutron, 'force_delete_port', ('port',), None),
    (volume_api.Cinder, 'is_encrypted', ('type',), False),
    (volume_api.Cinder, 'projects_of', ('type',), set()),
    (volume_api.Cinder, 'delete_type', ('type',), None),
    (volume_api.Cinder, 'delete_volume', ('volume', False), None),
    (stack_api.Heat, 'find', (*USER, 'a/7'), None),
    (stack_api.Heat, 'suspend', (*USER, 'a/7'), None),
    (stack_api.Heat, 'delete', (*USER, 'a/7'), None))
#: The bodies of a 404 of each service.
OWN = {
    network_api.Neutron: {'NeutronError': {
        'type': 'HTTPNotFound', 'detail': '',
        'message': 'The resource could not be found.'}},
    volume_api.Cinder: {'itemNotFound': {
        'code': 404, 'message': 'Volume 7 could not be found.'}},
    stack_api.Heat: {
        'code': 404, 'title': 'Not Found', 'explanation': 'Not found.',
        'error': {'type': 'EntityNotFound', 'traceback': None,
                  'message': 'The Stack (a) could not be found.'}}}
#: Those of others: JSON of a proxy, of keystone, and of any WSGI application.
OTHERS = (None, [], {}, {'message': 'no Route matched with those values'},
          {'error': {'code': 404, 'message': 'No such user.',
                     'title': 'Not Found'}},
          {'message': 'The resource could not be found.<br /><br />',
           'code': '404 Not Found', 'title': 'Not Found'})
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


class TestMissing(base.TestCase):
    """A service, or something in front of it, answers with 404."""

    def ask(self, kind, method, args, json):
        service, adapter = kind(), mock.Mock()
        adapter.get_project_id.return_value = 'service'
        adapter.get_endpoint.return_value = 'http://heat/v1/service'
        adapter.request.side_effect = exceptions.NotFound(
            response=mock.Mock(json=json))
        service.__dict__['_adapter'] = adapter
        return getattr(service, method)(*args)

    def test_404_of_the_service_itself_means_that_it_does_not_exist(self):
        for kind, method, args, expected in MISSING:
            self.assertEqual(expected, self.ask(
                kind, method, args, lambda: OWN[kind]), method)

    def test_404_of_others_means_cloud_unavailable(self):
        def page():
            raise ValueError('<html>404 Not Found</html>')

        for kind, method, args, _expected in MISSING:
            bodies = [*OTHERS, *(body for other, body in OWN.items()
                                 if other is not kind)]
            for json in page, *(functools.partial(copy.copy, body)
                                for body in bodies):
                raised = self.assertRaises(
                    errors.CloudUnavailable, self.ask, kind, method, args,
                    json)
                self.assertNotIsInstance(raised, errors.CloudRefusal)
                self.assertIn('does not answer', str(raised))


class TestSessions(base.TestCase):

    def session_of(self, kind, **values):
        conf, group = process.CONF, kind.group
        for option in loading.get_auth_plugin_conf_options('password'):
            conf.register_opt(option, group=group)
        for key, value in {
                'auth_type': 'password', 'auth_url': 'http://keystone.test',
                'username': 'nova', 'password': 'secret', **values}.items():
            conf.set_override(key, value, group=group)
            self.addCleanup(conf.clear_override, key, group=group)
        return kind()._adapter.session

    def test_keystone_is_waited_for_with_a_limit(self):
        stack_api.heat()
        for kind in OWN:
            if kind is not stack_api.Heat:
                loading.register_auth_conf_options(process.CONF, kind.group)
            self.assertEqual(
                [30, 7], [self.session_of(kind, **values).timeout
                          for values in ({}, {'timeout': 7})])


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
