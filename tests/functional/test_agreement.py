# SPDX-License-Identifier: Apache-2.0

"""For any request the middleware acts on what Nova then calls.

Generated requests are sent to Nova's own API application, unmodified, and to
the application that operators load. Of the first, the tests record which
function of which controller is called, with which arguments; of the second
also what the middleware does before.

``BLAZAR_ROUTED_REQUESTS`` sets the number of requests, by default 2,000.
"""

import collections
import io
import os
import random
import re
import string
import unicodedata
import urllib.parse

import fixtures
from nova.api.openstack import compute
from nova.api.openstack.compute import routes
from nova.api.openstack import urlmap
from nova.api.openstack import wsgi
from nova import context as nova_context
from oslo_utils.fixture import uuidsentinel as uuids
import webob

from blazar_nova.api import app
from tests.functional import base
from tests.functional import nova_box

REQUESTS = int(os.environ.get('BLAZAR_ROUTED_REQUESTS', '2000'))
METHODS = ('GET', 'HEAD', 'POST', 'PUT', 'DELETE', 'PATCH', 'OPTIONS')
#: Actions that read a server and change nothing.
READS = ('index', 'show', 'detail')
UUID = re.compile('[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}')


class Requests:
    """Generates requests: environs, each by a function that creates it."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._routes = [
            (path, method) for path, methods in routes.ROUTE_LIST
            if isinstance(methods, dict) for method in methods]
        # Routes that matter for leases are more frequent.
        for least, wanted in ((4, ('/servers', '/os-volumes_boot')),
                              (20, ('/servers', '/servers/{id}',
                                    '/os-server-groups/{id}'))):
            self._routes += least * [
                route for route in self._routes if route[0] in wanted or
                least == 4 and route[0].startswith(wanted)]

    def maybe(self, chance):
        return self._random.random() < chance

    def one_of(self, *values):
        return self._random.choice(values)

    def make(self):
        """Return a request: method, URL, query, type, body, version."""
        path, method = self._random.choice(self._routes)
        path = re.sub('{[^}]*}', lambda _match: self.id(), path)
        sent, query = method, ''
        if self.maybe(0.25):
            sent = self.one_of(*METHODS, method.lower())
            query = self.override(method)
        elif self.maybe(0.1):
            sent = self.one_of(*METHODS)
        content_type, body = self.body(method)
        return (sent, self.url(path), query, content_type, body,
                self.version())

    def id(self):
        known = uuids.server
        return known if self.maybe(0.6) else self.one_of(
            known.upper(), known.title(),
            known.replace('-', ''), f'{{{known}}}', f'urn:uuid:{known}',
            f'{known}%20', f'%20{known}', f'{known}%0A', f'{known}%00',
            f'{known}.json', f'{known}.xml', f'{known}%C3%A1',
            known.replace('a', '%C3%A1').replace('e', '%E9'),
            f'{known}%2F', f'{known};x', '1', '0', 'detail', 'action', '-',
            '..', '%2E%2E', 'x' * 300, '%F0%9F%98%80', '%FF')

    def override(self, method):
        name = self.one_of('_method', '_method', '_method', '%5Fmethod',
                           '_METHOD', '_method%20', '_m%65thod')
        value = self.one_of(
            method, method, method.lower(), method.title(), f'{method}%20',
            '', self.one_of(*METHODS), '%FF',
            ''.join(f'%{ord(letter):02X}' for letter in method))
        before = self.one_of('', '', 'a=1&', '&', '%FF=1&', 'x=_method&',
                             f'_method={self.one_of(*METHODS)}&')
        return before + f'{name}={value}' + self.one_of(
            '', '', '&b=2', f'&_method={self.one_of(*METHODS)}', ';c=3')

    def body(self, method):
        if self.maybe(0.15):
            value = self.one_of(method, *METHODS)
            return self.one_of(
                ('application/x-www-form-urlencoded', f'_method={value}'),
                ('Application/X-WWW-Form-Urlencoded; charset=utf-8',
                 f'a=1&_method={value}&_method=GET'),
                ('application/x-www-form-urlencoded', '_method=%FF'),
                ('multipart/form-data; boundary=b',
                 '--b\r\nContent-Disposition: form-data; name="_method"\r\n'
                 f'\r\n{value}\r\n--b--\r\n'))
        return self.one_of('application/json', 'application/json', '',
                           'text/plain', 'text/html',
                           'application/json;version=2.1',
                           'application/vnd.openstack.compute+json'
                           ), self.one_of(
            '', '{}', '{"os-stop": null}', '{"resize": {"flavorRef": "1"}}',
            '{"delete": null}', '{"create": null}', '{"index": {}}',
            '{"server": {}, "os:scheduler_hints": {}}', '[]', 'null', '{')

    def url(self, path):
        for _ in range(self.one_of(0, 0, 0, 0, 1, 2)):
            path = self.mutated(path)
        project = self.one_of('', f'/{nova_box.PROJECT_ID}')
        if self.maybe(0.15):
            project = self.one_of(
                f'/{"b" * 32}', f'/{nova_box.PROJECT_ID.upper()}', '/12-3',
                '/project')
        prefix = self.one_of('/v2.1', '/v2', '//v2.1')
        if self.maybe(0.1):
            prefix = self.one_of(
                '/V2.1', '', '/v2.1/', '/v2.1%0A', '/v2.1/v2')
        return prefix + project + path + '%0A' * self.maybe(0.15)

    def mutated(self, path):
        place = self._random.randrange(len(path) + 1)
        letter = path[place:place + 1]
        if self.maybe(0.4):
            return path + self.one_of(
                '%0A', '%0A%0A', '%0D%0A', '/', '//', '%00', '%20',
                '.json', '.xml', '.json%0A', '/.', '%2F', ';a=1', '%85',
                '%E2%80%A8')
        if letter in string.ascii_letters + '-_' and letter:
            letter = self.one_of(letter.upper(), f'%{ord(letter):02x}',
                                 f'%25{ord(letter):02x}', '', letter * 2)
        elif letter == '/':
            letter = self.one_of('//', '/./', '%2F', '/%0A', '%0A/', '\\',
                                 '%5C')
        return path[:place] + letter + path[place + 1:]

    def version(self):
        return self.one_of(
            {}, {}, {'HTTP_OPENSTACK_API_VERSION': 'compute 2.1'},
            {'HTTP_OPENSTACK_API_VERSION': 'compute latest'},
            {'HTTP_OPENSTACK_API_VERSION': 'compute 2.47'},
            {'HTTP_X_OPENSTACK_NOVA_API_VERSION': '2.90'},
            {'HTTP_OPENSTACK_API_VERSION': 'compute 9.9'},
            {'HTTP_OPENSTACK_API_VERSION': 'compute x'})


def environ_of(context, request):
    """Return a request as a WSGI server passes it on."""
    method, url, query, content_type, body, version = request
    body = body.encode()
    return {
        'REQUEST_METHOD': method, 'SCRIPT_NAME': '', 'QUERY_STRING': query,
        'PATH_INFO': urllib.parse.unquote(url, 'latin-1'),
        'CONTENT_TYPE': content_type, 'CONTENT_LENGTH': str(len(body)),
        'SERVER_NAME': 'localhost', 'SERVER_PORT': '80',
        'SERVER_PROTOCOL': 'HTTP/1.1', 'wsgi.url_scheme': 'http',
        'wsgi.input': io.BytesIO(body), 'wsgi.errors': io.StringIO(),
        'wsgi.version': (1, 0), 'wsgi.multithread': True,
        'wsgi.multiprocess': False, 'wsgi.run_once': False,
        'nova.context': context, **version}


class Recorder:
    """Records Nova's own calls and the middleware's actions, in order."""

    def __init__(self):
        self.calls, self.judged = [], []

    def call(self, resource, environ, start_response):
        """Replaces Resource.__call__()."""
        args = resource.get_action_args(environ)
        action, request = args.pop('action'), wsgi.Request(environ)
        try:
            name = resource.get_method(
                request, action, request.content_type, request.body).__name__
        except Exception as exc:
            # Nova answers this with a client error.
            name = type(exc).__name__
        self.calls.append((type(resource.controller), action, name, args))
        return webob.Response()(environ, start_response)

    def guard(self, name):
        def of(_guards, _environ, *args):
            self.judged.append((name, *args))

        return of

    def handler(self, name):
        def handle(around, _environ, *args):
            self.judged.append((name, *args))
            return around._app

        return handle


class AgreementTest(base.FunctionalTestCase):

    hosts = {}

    def setUp(self):
        super().setUp()
        self.recorder = recorder = Recorder()
        self.useFixture(fixtures.MonkeyPatch(
            'nova.api.openstack.wsgi.Resource.__call__',
            lambda *args: recorder.call(*args)))
        for name in ('_boot', '_delete', '_hidden'):
            self.useFixture(fixtures.MonkeyPatch(
                f'blazar_nova.api.middleware.LeaseMiddleware.{name}',
                recorder.handler(name)))
        for name in ('of_action', 'of_update', 'of_group', 'of_no_id'):
            self.useFixture(fixtures.MonkeyPatch(
                f'blazar_nova.api.guards.Guards.{name}',
                recorder.guard(name)))
        self.novas = self.mapped(compute.APIRouterV21.factory({}))
        self.ours = self.mapped(app.factory({}))
        self.context = nova_context.RequestContext(
            'alice', nova_box.PROJECT_ID, roles=['member', 'reader'])

    def mapped(self, app):
        """Mount an API as api-paste.ini does: at /v2.1, and below /v2."""
        paths = urlmap.URLMap(not_found_app=webob.exc.HTTPNotFound())
        paths['/v2.1'] = paths['/v2/+'] = app
        return paths

    def given(self, app, request):
        """Return the calls and judgements for a request, and its status."""
        self.recorder.calls, self.recorder.judged = [], []
        answers = []
        try:
            for _part in app(environ_of(self.context, request),
                             lambda status, _headers, _exc=None:
                             answers.append(status)):
                pass
        except Exception as exc:
            answers.append(type(exc))
        return self.recorder.calls, self.recorder.judged, answers

    def test_middleware_acts_on_what_nova_calls(self):
        requests, seen = Requests(47), collections.Counter()
        for _ in range(REQUESTS):
            request = requests.make()
            called, _none, answers = self.given(self.novas, request)
            calls, judged, ours = self.given(self.ours, request)
            self.assertEqual((called, answers), (calls, ours), request)
            wanted = [one for call in called for one in wanted_of(*call)]
            self.assertEqual(wanted, [
                simple(*one) for one in judged], (request, called))
            for one in wanted or [('nothing',)]:
                seen[one[0]] += 1
                seen[one[0], 'overridden'] += '_method' in request[2]
                seen[one[0], 'ended'] += request[1].endswith('%0A')
        # Check that the generator covers the cases.
        for name, least in (('_boot', 8), ('_delete', 8), ('of_action', 60),
                            ('of_update', 3), ('of_group', 3),
                            ('of_no_id', 10), ('_hidden', 150)):
            self.assertGreater(seen[name], least, seen)
            self.assertGreater(seen[name, 'overridden'], 0, seen)
            self.assertGreater(seen[name, 'ended'], 0, seen)


#: Whose changes neither use more of a server nor let it live longer.
MINOR = {'ConsolesController', 'RemoteConsolesController',
         'ServerMigrationsController', 'ServerPasswordController',
         'ServerTagsController'}


def simple(name, *args):
    """Return an action of the middleware in comparable form."""
    if name in ('_hidden', 'of_no_id'):
        return name, args[0].named
    return (name, *(getattr(arg, 'value', arg) for arg in args))


def is_almost(text):
    """Return whether a database may match a text with a server's id."""
    letters = [one for one in unicodedata.normalize('NFKD', text).lower()
               if one in '0123456789abcdef-']
    return not UUID.fullmatch(text) and bool(
        UUID.fullmatch(''.join(letters)))


def wanted_of(controller, action, _name, args):
    """Return what the middleware must do before Nova calls a controller."""
    of = {one.__name__ for one in controller.__mro__}
    if 'ServerGroupController' in of and action == 'delete':
        return [('of_no_id', args['id'])] if is_almost(args['id']) else [
            ('of_group', args['id'].lower())]
    if 'ServersController' in of and action == 'create':
        return [('_boot',)]
    server = args.get('id' if 'ServersController' in of else 'server_id')
    if server is None:
        return []
    if is_almost(server):
        return [('of_no_id', server)]
    hidden, known = ('_hidden', server), server.lower()
    if action in READS:
        return [hidden]
    if 'ServersController' in of:
        return [{'delete': ('_delete', known), 'update': ('of_update', known),
                 'action': ('of_action', known, 'action')}[action], hidden]
    if 'ServerMetadataController' in of:
        kind = 'metadata'
    elif action == 'delete' or of & MINOR or (
            action == 'update' and 'VolumeAttachmentController' in of):
        kind = 'minor'
    else:
        kind = 'other'
    return [('of_action', known, kind), hidden]
