# SPDX-License-Identifier: Apache-2.0

"""Base classes of the tests of the commands."""

import collections
import contextlib
import http.server
import io
import json
import logging
import os
import threading
from urllib import parse
import warnings

import fixtures
from keystoneauth1 import fixture as keystone
from openstackclient import shell
from osc_lib import clientmanager as clients
from oslotest import base

from blazar_nova.osc import commands

#: The size of a requested server.
SIZE = ('--vcpus', '1', '--memory', '512', '--disk', '0')
ID = '0f3d5c1a-7b52-4a0e-8a53-6f1d2f7d9b10'
OTHER = '5a0f7f6e-1d0c-4a4b-9df7-2f6e3c8b7a21'
#: The ID of the user who types the commands.
USER = 'a' * 32


def a_lease(**values):
    return {'id': ID, 'name': 'lease1', 'status': 'PENDING',
            'start_date': '2026-12-01T14:00:00.000000',
            'end_date': '2026-12-01T16:00:00.000000',
            'before_end_date': None, 'degraded': False, 'warnings': [],
            'reservations': [{'id': OTHER, 'amount': 3}], 'events': [],
            **values}


Request = collections.namedtuple(
    'Request', 'method path query body token key',
    defaults=[None])


class FakeCloud(fixtures.Fixture):
    """A keystone with a catalog; each test sets the other answers.

    :ivar answers: for "METHOD /path", the answers: (status, body), one
        after the other; the last one is repeated
    :ivar requests: the requests, except those to keystone
    """

    def _setUp(self):
        self.answers = {}
        self.requests = []
        self.services = ['reservation', 'compute']
        cloud = self

        class Handler(http.server.BaseHTTPRequestHandler):

            def do_GET(self):
                url = parse.urlsplit(self.path)
                body = self.rfile.read(
                    int(self.headers.get('Content-Length') or 0))
                status, answer = cloud.answer(Request(
                    self.command, url.path, dict(parse.parse_qsl(url.query)),
                    json.loads(body) if body else None,
                    self.headers.get('X-Auth-Token'),
                    self.headers.get('Idempotency-Key')))
                text = answer.encode() if isinstance(answer, str) else (
                    json.dumps(answer).encode())
                self.send_response(status)
                self.send_header('Content-Type', 'application/json')
                self.send_header('Content-Length', str(len(text)))
                if url.path == '/v3/auth/tokens':
                    self.send_header('X-Subject-Token', 'a-token')
                self.end_headers()
                self.wfile.write(text)

            do_DELETE = do_POST = do_PUT = do_GET

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{server.server_port}'
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.addCleanup(server.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(server.shutdown)

    def answer(self, request):
        if request.path == '/v3/auth/tokens':
            token = keystone.V3Token(user_id=USER, user_name='alice')
            token.set_project_scope()
            paths = {'reservation': 'reservation/v1', 'compute': 'v2.1',
                     'identity': 'v3'}
            for service in self.services:
                token.add_service(service).add_standard_endpoints(
                    public=f'{self.url}/{paths[service]}')
            return 201, token
        self.requests.append(request)
        name = f'{request.method} {request.path}'
        answers = self.answers.get(name)
        if not answers:
            return 404, f'Nobody answers {name}'
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def sees(self, call, *answers):
        """Set the answers to a call of the lease API."""
        method, path = call.split()
        self.answers[f'{method} /reservation/v1{path}'] = list(answers)


class Terminal(io.StringIO):

    def isatty(self):
        return True


class OscTestCase(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.cloud = self.useFixture(FakeCloud())
        for name in os.environ:
            if name.startswith('OS_'):
                self.useFixture(fixtures.EnvironmentVariable(name))
        # Ignore a clouds.yaml of the user that runs the tests.
        home = self.useFixture(fixtures.TempHomeDir()).path
        self.useFixture(fixtures.EnvironmentVariable('XDG_CONFIG_HOME', home))
        self.useFixture(fixtures.EnvironmentVariable('NO_PROXY', '127.0.0.1'))
        self.useFixture(fixtures.MockPatchObject(commands, 'PAUSE', 0.001))
        self.stderr = io.StringIO()

    def openstack(self, *words):
        """Run a command; return its exit code, its output and its stderr."""
        out = io.StringIO()
        # The shell changes the process: it configures logging, and caches its
        # clients.
        root = logging.getLogger()
        level, handlers = root.level, root.handlers[:]
        root.handlers.clear()
        for cache in vars(clients.ClientManager).values():
            if isinstance(cache, clients.ClientCache):
                cache._handle = None
        try:
            with (warnings.catch_warnings(),
                  contextlib.redirect_stdout(out),
                  contextlib.redirect_stderr(self.stderr)):
                try:
                    code = shell.main([
                        '--os-auth-type', 'v3password', '--os-auth-url',
                        f'{self.cloud.url}/v3', '--os-username', 'alice',
                        '--os-password', 'secret', '--os-project-name', 'p',
                        '--os-user-domain-id', 'default',
                        '--os-project-domain-id', 'default', *words])
                except SystemExit as end:
                    code = end.code
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers
        # blazarclient 4.6 registers a command that it does not have.
        return code, out.getvalue(), ''.join(
            line for line in self.stderr.getvalue().splitlines(True)
            if not line.startswith("Could not load 'reservation_host_unset'"))

    def reservation(self, *words):
        """Run a command that succeeds; return its JSON."""
        code, out, self.error = self.openstack(
            'reservation', *words, '-f', 'json')
        self.assertEqual(0, code, self.error)
        return json.loads(out)

    def flavors(self):
        """Set up a Nova that has the flavor m1.small with the ID 42."""
        self.cloud.answers.update({
            'GET /v2.1': [(200, {'version': {
                'id': 'v2.1', 'status': 'CURRENT', 'version': '2.100',
                'min_version': '2.1', 'links': [
                    {'rel': 'self', 'href': f'{self.cloud.url}/v2.1/'}]}})],
            'GET /v2.1/flavors/42': [(200, {'flavor': {
                'id': '42', 'name': 'm1.small'}})],
            'GET /v2.1/flavors/detail': [(200, {'flavors': [
                {'id': '42', 'name': 'm1.small'}]})],
            'GET /v2.1/flavors': [(200, {'flavors': [
                {'id': '42', 'name': 'm1.small'}]})]})

    def fails(self, *words, code=1):
        """Run a command that fails; return its stderr."""
        got, out, error = self.openstack('reservation', *words)
        self.assertEqual((code, ''), (got, out), error)
        self.assertNotIn('Traceback', error)
        return error

    def asked(self):
        """Return the only request."""
        self.assertEqual(1, len(self.cloud.requests), self.cloud.requests)
        return self.cloud.requests[0]


class OwnersTestCase(OscTestCase):
    """A keystone with one project and one user."""

    def setUp(self):
        super().setUp()
        self.cloud.services.append('identity')
        self.cloud.answers |= {
            'GET /v3': [(200, {'version': {
                'id': 'v3.14', 'status': 'stable', 'links': []}})],
            f'GET /v3/projects/{OTHER}': [(200, {'project': {
                'id': OTHER, 'name': 'lab'}})],
            'GET /v3/projects/lab': [(404, {})],
            'GET /v3/projects/nolab': [(404, {})],
            'GET /v3/users/bob': [(404, {})],
            'GET /v3/users': [(200, {'users': [{'id': ID, 'name': 'bob'}]})]}
        self.projects([{'id': OTHER, 'name': 'lab'}])

    def projects(self, found, status=200):
        self.cloud.answers['GET /v3/projects'] = [
            (status, {'projects': found})]

    def member(self, projects):
        """Let the user search for no project or user, but for own ones."""
        self.projects([], 403)
        self.cloud.answers['GET /v3/users'] = [(403, {})]
        self.cloud.answers['GET /v3/users/alice'] = [(403, {})]
        self.cloud.answers[f'GET /v3/users/{USER}/projects'] = [
            (200, {'projects': projects})]

    def changed(self):
        """Return the bodies of all changes requested from the lease API."""
        return [one.body for one in self.cloud.requests
                if one.method == 'PUT']
