# SPDX-License-Identifier: Apache-2.0
"""The plug-in of the openstack client, through the shell that users type in.

The shell is the real one, with the real python-blazarclient beside the plug-in
or without it; the cloud is an HTTP server that answers what it is told, and
keeps what it was asked.
"""

import collections
import contextlib
import datetime
import http.server
import io
import json
import logging
import os
import subprocess
import sys
import threading
from urllib import parse
import warnings

import fixtures
from keystoneauth1 import fixture as keystone
from openstackclient.common import clientmanager
from openstackclient import shell
from osc_lib import clientmanager as clients
from oslotest import base

from blazar_nova.osc import commands
from tests import imports

ID = '0f3d5c1a-7b52-4a0e-8a53-6f1d2f7d9b10'
OTHER = '5a0f7f6e-1d0c-4a4b-9df7-2f6e3c8b7a21'
INSTANCE = ('resource_type=virtual:instance,vcpus=2,memory_mb=2048,'
            'disk_gb=10,amount=3')
WINDOW = ('--start-date', '2026-12-01 14:00', '--end-date',
          '2026-12-01 16:00')


def a_lease(**values):
    return {'id': ID, 'name': 'lease1', 'status': 'PENDING',
            'start_date': '2026-12-01T14:00:00.000000',
            'end_date': '2026-12-01T16:00:00.000000',
            'before_end_date': None, 'degraded': False, 'warnings': [],
            'reservations': [{'id': OTHER, 'amount': 3}], 'events': [],
            **values}


#: Prints the packages that our commands load, beside Python's own and those
#: that the client has loaded when it takes a command's name.
LOADED = """
import importlib, pkgutil, sys
from openstackclient import shell
import osc_lib.command.command
import osc_lib.cli.format_columns
before = set(sys.modules)
from blazar_nova import osc
for found in pkgutil.iter_modules(osc.__path__):
    importlib.import_module(f'blazar_nova.osc.{found.name}')
print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}
              - sys.stdlib_module_names))
"""

Request = collections.namedtuple('Request', 'method path query body token')


class FakeCloud(fixtures.Fixture):
    """A keystone with a catalog; the other answers are a test's own.

    :ivar answers: for "METHOD /path", what to answer: (status, body), one
        after the other; the last one again and again
    :ivar requests: what was asked, save of keystone
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
                    self.headers.get('X-Auth-Token')))
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
            token = keystone.V3Token()
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
        """What to answer to a call of the lease API."""
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
        # No clouds.yaml of whoever runs the tests.
        home = self.useFixture(fixtures.TempHomeDir()).path
        self.useFixture(fixtures.EnvironmentVariable('XDG_CONFIG_HOME', home))
        self.useFixture(fixtures.EnvironmentVariable('NO_PROXY', '127.0.0.1'))
        self.useFixture(fixtures.MockPatchObject(commands, 'PAUSE', 0.001))
        self.stderr = io.StringIO()

    def openstack(self, *words):
        """Type a command; returns its exit code, its output and the rest."""
        out = io.StringIO()
        # The shell makes itself at home in the process: it logs everything,
        # and keeps its clients.
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
        """Type a command that succeeds; returns its JSON."""
        code, out, self.error = self.openstack(
            'reservation', *words, '-f', 'json')
        self.assertEqual(0, code, self.error)
        return json.loads(out)

    def fails(self, *words, code=1):
        """Type a command that fails; returns what it says."""
        got, out, error = self.openstack('reservation', *words)
        self.assertEqual((code, ''), (got, out), error)
        self.assertNotIn('Traceback', error)
        return error

    def asked(self):
        """The only request."""
        self.assertEqual(1, len(self.cloud.requests), self.cloud.requests)
        return self.cloud.requests[0]


class OwnersTestCase(OscTestCase):
    """A keystone that knows one project and one user."""

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

    def changed(self):
        """What the lease API was asked to change."""
        return [one.body for one in self.cloud.requests
                if one.method == 'PUT']


class MembersTest(OscTestCase):
    """Servers that run come under leases, and leave them."""

    def setUp(self):
        super().setUp()
        server = {'id': OTHER, 'name': 'vm1', 'links': []}
        self.cloud.answers |= {
            'GET /v2.1': [(200, {'version': {
                'id': 'v2.1', 'status': 'CURRENT', 'version': '2.100',
                'min_version': '2.1', 'links': []}})],
            'GET /v2.1/servers/detail': [(200, {'servers': [server]})],
            'GET /v2.1/servers/vm1': [(404, {})],
            'GET /v2.1/servers/vm2': [(404, {})],
            f'GET /v2.1/servers/{OTHER}': [(200, {'server': server})]}
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': a_lease()}))
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': a_lease()}))
        self.cloud.sees('POST /leases', (201, {'lease': a_lease()}))

    def told(self):
        """What was asked of the lease API."""
        return [one.body for one in self.cloud.requests if one.body]

    def test_a_server_gets_a_lease(self):
        lease = self.reservation(
            'adopt', '--name', 'lease1', '--end', '2026-12-01 16:00',
            '--on-end', 'stop', 'vm1')
        self.assertEqual('lease1', lease['name'])
        self.assertEqual([{
            'name': 'lease1', 'end_date': '2026-12-01 16:00',
            'on_end': 'stop', 'servers': [OTHER]}], self.told())

    def test_a_server_becomes_interruptible_and_ordinary_again(self):
        for method in ('PUT', 'DELETE'):
            self.cloud.sees(f'{method} /interruptible/{OTHER}', (
                (200, {'interruptible': {}}) if method == 'PUT'
                else (204, None)))
        for words in (('set', '--on-evict', 'delete', 'vm1'),
                      ('unset', 'vm1')):
            self.assertEqual(0, self.openstack(
                'reservation', 'interruptible', *words)[0])
        self.assertEqual([{'on_evict': 'delete'}], self.told())

    def test_interruptible_servers_are_listed_page_by_page(self):
        one = {'server_id': ID, 'safe_until': None, 'on_evict': 'shelve',
               'project_id': 'p', 'eviction': None}
        self.cloud.sees(
            'GET /interruptible', (200, {
                'interruptible': [one], 'interruptible_links': [{}]}),
            (200, {'interruptible': [{**one, 'server_id': OTHER, 'eviction': {
                'time': '2026-12-01T16:00:00.000000'}}]}))
        self.assertEqual(
            [(ID, None), (OTHER, '2026-12-01T16:00:00.000000')],
            [(row['server_id'], row['evict_at']) for row in self.reservation(
                'interruptible', 'list')])

    def test_for_how_long_in_the_place_of_an_end(self):
        self.reservation('adopt', '--duration', '2h', 'vm1')
        self.reservation('request', 'lease1', '--duration', '1d12h',
                         '--reservation', INSTANCE)
        self.assertEqual([('2h', False), ('1d12h', False)], [
            (one['duration'], 'end_date' in one) for one in self.told()])
        self.assertIn('not allowed with argument', self.fails(
            'adopt', '--duration', '2h', '--end', '2026-12-01 16:00', 'vm1',
            code=2))

    def test_what_is_not_said_is_not_asked_for(self):
        self.reservation('adopt', '--end', '2026-12-01 16:00', OTHER)
        self.assertEqual([{
            'end_date': '2026-12-01 16:00', 'servers': [OTHER]}], self.told())

    def test_one_joins_and_leaves(self):
        self.reservation('add', 'server', ID, 'vm1')
        self.reservation('remove', 'server', ID, 'vm1')
        self.assertEqual([{'add_servers': [OTHER]},
                          {'remove_servers': [OTHER]}], self.told())

    def test_hosts_are_returned_by_their_names(self):
        self.reservation('remove', 'host', ID, 'one', 'two')
        self.assertEqual([{'remove_hosts': ['one', 'two']}], self.told())

    def test_one_that_is_not_there(self):
        said = self.fails('add', 'server', ID, 'vm2')
        self.assertIn('Server vm2 could not be found', said)
        self.assertEqual([], self.told())


class ListTest(OscTestCase):
    """Leases with their servers and what is left of them."""

    def listed(self, *words, **lease):
        self.cloud.sees('GET /leases', (200, {'leases': [a_lease(**lease)]}))
        found, = self.reservation('list', *words)
        return found

    def left(self, status, start, end):
        now = datetime.datetime.now(datetime.UTC)
        dates = {key: (now + datetime.timedelta(seconds=seconds)).strftime(
            '%Y-%m-%dT%H:%M:%S.%f') for key, seconds in (
                ('start_date', start), ('end_date', end))}
        return self.listed(status=status, reservations=[], **dates)['left']

    def test_it_says_what_there_is(self):
        found = self.listed(reservations=[
            {'servers': ['one', 'two']}, {'servers': ['three']}],
            warnings=['Its image is gone.'], status_reason='Why.',
            degraded=True, project_id='p', description='It is.',
            tags=['a', 'b'])
        del found['left']
        self.assertEqual(
            {'id': ID, 'name': 'lease1', 'status': 'PENDING',
             'start_date': '2026-12-01 14:00:00',
             'end_date': '2026-12-01 16:00:00',
             'servers': ['one', 'two', 'three'], 'status_reason': 'Why.',
             'degraded': True, 'project_id': 'p', 'description': 'It is.',
             'tags': ['a', 'b'], 'warnings': ['Its image is gone.']}, found)
        self.assertEqual({}, self.cloud.requests[0].query)

    def test_columns(self):
        self.assertEqual({'name': 'lease1', 'degraded': False}, self.listed(
            '-c', 'name', '-c', 'degraded', reservations=[]))
        self.assertIn('There is no column reason.', self.fails(
            'list', '-c', 'name', '-c', 'reason'))
        _code, out, _error = self.openstack('reservation', 'list')
        self.assertEqual(
            ['id', 'name', 'status', 'left', 'servers', 'status_reason',
             'warnings'], out.splitlines()[1].replace('|', '').split())

    def test_only_some_are_asked_for(self):
        self.listed('--name', 'lease1', '--status', 'PENDING', '--ended',
                    reservations=[])
        self.assertEqual(
            {'name': 'lease1', 'status': 'PENDING', 'ended': 'true'},
            self.cloud.requests[0].query)

    def test_the_time_that_is_left(self):
        for expected, *lease in (
                ('starts in 2h0m', 'PENDING', 7230, 9000),
                ('2d3h', 'ACTIVE', -50, 2 * 86400 + 4 * 3600 - 30),
                ('1w0d', 'ACTIVE', -50, 604800 + 30),
                ('', 'TERMINATING', -50, -1),
                ('', 'TERMINATED', -50, 100), ('', 'ERROR', -50, 100),
                ('', 'TIMEDOUT', 50, 100)):
            self.assertEqual(expected, self.left(*lease))
        self.assertRegex(self.left('ACTIVE', -50, 59), '^5[0-9]s$')


class PluginTest(OscTestCase):
    """Beside other plug-ins of the client, and without them."""

    OURS = ['accept', 'acknowledge', 'add server', 'adopt', 'availability',
            'calendar', 'delete', 'hand over', 'interruptible list',
            'interruptible set', 'interruptible unset', 'list', 'occurrences',
            'offer', 'quote', 'remove host', 'remove server', 'request', 'set',
            'share', 'usage', 'wait']

    def listed(self):
        code, out, error = self.openstack(
            'command', 'list', '--group', 'openstack.blazar_nova.v1',
            '-f', 'json')
        self.assertEqual(0, code, error)
        return json.loads(out)

    def test_its_commands_are_there(self):
        self.assertEqual(
            [{'Command Group': 'openstack.blazar_nova.v1',
              'Commands': [f'reservation {name}' for name in self.OURS]}],
            self.listed())

    def test_it_works_beside_the_client_of_blazar(self):
        self.cloud.sees('GET /leases', (200, {'leases': [a_lease()]}))
        self.cloud.sees('GET /availability', (200, {'availability': []}))
        self.assertEqual(['lease1'], [
            row['name'] for row in self.reservation('lease', 'list')])
        self.assertEqual([], self.reservation(
            'availability', *AvailabilityTest.SIZE))

    def test_it_works_without_the_client_of_blazar(self):
        self.useFixture(fixtures.MockPatchObject(
            clientmanager, 'PLUGIN_MODULES', [
                plugin for plugin in clientmanager.PLUGIN_MODULES
                if not plugin.__name__.startswith('blazarclient.')]))
        theirs = vars(clients.ClientManager)['reservation']
        del clients.ClientManager.reservation
        self.addCleanup(setattr, clients.ClientManager, 'reservation', theirs)
        self.cloud.sees('GET /availability', (200, {'availability': []}))
        self.assertEqual(2, self.openstack('reservation', 'lease', 'list')[0])
        self.assertEqual([], self.reservation(
            'availability', *AvailabilityTest.SIZE))

    def test_it_loads_nothing_that_the_client_does_not_load_itself(self):
        """The client loads the modules of all commands, whichever is typed."""
        done = subprocess.run(
            [sys.executable, '-c', LOADED], capture_output=True, text=True,
            cwd=imports.ROOT, timeout=120)
        self.assertEqual(('', 'blazar_nova'), (
            done.stderr, done.stdout.strip()))

    def test_every_command_has_a_help(self):
        for name in self.OURS:
            code, out, _error = self.openstack(
                'reservation', *name.split(), '--help')
            self.assertEqual(0, code)
            self.assertIn(f' reservation {name} [-h]', out)
            self.assertIn({
                'calendar': '--html', 'delete': '--force',
                'interruptible set': '--on-evict',
                'interruptible unset': '<server>'}.get(name, '--format'), out)


class SetTest(OscTestCase):

    def test_what_is_given_is_sent(self):
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': a_lease()}))
        self.reservation('set', ID, '--description', '', '--tags', 'a,b')
        self.assertEqual({'description': '', 'tags': 'a,b'},
                         self.asked().body)
        self.assertIn('Give --name', self.fails('set', ID))


class UsageTest(OwnersTestCase):

    ROW = {'start_date': '2026-12-01T00:00:00.000000',
           'end_date': '2026-12-02T00:00:00.000000', 'project_id': 'here',
           'planned': {'VCPU': 7200}, 'reserved': {'VCPU': 5400}, 'used': {}}

    def test_all_that_can_be_said_arrives_and_all_pages_are_shown(self):
        self.cloud.sees('GET /usage', (200, {
            'usage': [self.ROW], 'usage_links': [{
                'rel': 'next', 'href': '/usage?marker=1'}]}), (
                    200, {'usage': [self.ROW]}))
        shown = {'start_date': '2026-12-01 00:00:00',
                 'end_date': '2026-12-02 00:00:00', 'project_id': 'here',
                 'resource_class': 'VCPU', 'planned': 2.0, 'reserved': 1.5,
                 'used': 0.0}
        words = {'--start-date': '2026-12-01', '--end-date': '2027-01-01',
                 '--project': 'lab', '--lease': ID,
                 '--type': 'virtual:instance', '--group-by': 'project,day',
                 '--timezone': 'Europe/Berlin'}
        self.assertEqual([shown] * 2, self.reservation('usage', *(
            word for pair in words.items() for word in pair)))
        self.assertEqual({
            'start_date': '2026-12-01', 'end_date': '2027-01-01',
            'project_id': OTHER, 'lease_id': ID,
            'resource_type': 'virtual:instance', 'group_by': 'project,day',
            'timezone': 'Europe/Berlin'}, self.cloud.requests[-2].query)

    def test_a_project_that_does_not_exist(self):
        self.projects([])
        for command in 'usage', 'calendar':
            self.assertIn('There is no project nolab.', self.fails(
                command, '--project', 'nolab'))
        self.projects([], 403)
        for command in 'usage', 'calendar':
            self.assertIn(
                'Forbidden. Use the ID of the project.',
                self.fails(command, '--project', 'nolab'))
        self.assertEqual([], [
            one.path for one in self.cloud.requests
            if one.path.startswith('/reservation')])

    def test_whole_seconds(self):
        self.cloud.sees('GET /usage', (200, {'usage': [self.ROW]}))
        (row,) = self.reservation('usage', '--seconds')
        self.assertEqual((7200, 5400, 0), (
            row['planned'], row['reserved'], row['used']))


class AvailabilityTest(OscTestCase):

    ROWS = [{'start_date': '2026-12-01T14:00:00.000000',
             'end_date': '2026-12-01T16:00:00.000000', 'fits': 1,
             'enough': False},
            {'start_date': '2026-12-01T16:00:00.000000',
             'end_date': '2026-12-02T14:00:00.000000', 'fits': 5,
             'enough': True}]
    SIZE = ('--vcpus', '1', '--memory', '512', '--disk', '0')

    def setUp(self):
        super().setUp()
        self.cloud.sees('GET /availability',
                        (200, {'availability': self.ROWS}))

    def test_all_that_can_be_said_arrives(self):
        rows = self.reservation(
            'availability', '--vcpus', '2', '--memory', '2048', '--disk',
            '10', '--amount', '3', '--affinity', 'True', '--properties',
            '[">=", "$vcpus", "8"]', '--duration', '2h', '--start-date',
            '2026-12-01 14:00', '--end-date', '2026-12-02 14:00', '--limit',
            '50')
        self.assertEqual(Request(
            'GET', '/reservation/v1/availability', {
                'resource_type': 'virtual:instance', 'vcpus': '2',
                'memory_mb': '2048', 'disk_gb': '10', 'amount': '3',
                'affinity': 'true',
                'resource_properties': '[">=", "$vcpus", "8"]',
                'duration': '2h', 'start_date': '2026-12-01 14:00',
                'end_date': '2026-12-02 14:00', 'limit': '50',
            }, None, 'a-token'), self.asked())
        self.assertEqual([{**row, 'more': more} for row, more in zip(
            self.ROWS, (True, False), strict=True)], rows)

    def test_what_was_not_said_is_not_sent(self):
        self.reservation('availability', *self.SIZE)
        self.assertEqual({'resource_type': 'virtual:instance', 'vcpus': '1',
                          'memory_mb': '512', 'disk_gb': '0'},
                         self.asked().query)

    def test_enough_is_shown_to_who_said_how_many(self):
        self.assertEqual(
            [['start_date', 'end_date', 'fits', 'more']] * 2,
            [[*row] for row in self.reservation(
                'availability', *self.SIZE)])

    def test_as_a_table_and_by_column(self):
        code, out, _error = self.openstack(
            'reservation', 'availability', *self.SIZE)
        self.assertEqual(0, code)
        self.assertIn('| fits |', out)
        self.assertEqual((0, '1\n5\n', ''), self.openstack(
            'reservation', 'availability', *self.SIZE, '-f', 'value', '-c',
            'fits'))

    def test_a_list_that_was_cut_says_how_to_go_on(self):
        self.cloud.sees('GET /availability', (200, {
            'availability': self.ROWS, 'truncated': True}))
        self.assertEqual(
            'There are more rows: repeat the command with --start-date '
            '"2026-12-02 14:00:00"',
            self.openstack(
                'reservation', 'availability', *self.SIZE)[2].strip())
        self.assertIs(True, self.reservation(
            'availability', *self.SIZE)[-1]['more'])

    def flavors(self):
        """A Nova that has the flavor m1.small with the ID 42."""
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

    def test_a_flavor_by_name_or_id(self):
        self.flavors()
        for flavor in ('m1.small', '42'):
            self.reservation('availability', '--flavor', flavor,
                             '--amount', '2')
            self.assertEqual(
                ('/reservation/v1/availability',
                 {'resource_type': 'flavor:instance', 'flavor_id': '42',
                  'amount': '2'}),
                self.cloud.requests[-1][1:3])

    def test_a_flavor_that_is_not_there(self):
        self.flavors()
        self.assertIn('no-such', self.fails(
            'availability', '--flavor', 'no-such'))
        self.assertNotIn('/reservation/v1/availability',
                         [request.path for request in self.cloud.requests])

    def test_a_size_is_said_in_one_way(self):
        self.assertIn('either as --flavor', self.fails(
            'availability', '--flavor', '42', '--vcpus', '0'))
        for words in (), self.SIZE[:4], self.SIZE[2:]:
            self.assertIn(
                'Give --flavor, or --vcpus, --memory and --disk.',
                self.fails('availability', *words))
        self.assertEqual([], self.cloud.requests)


class QuoteTest(OscTestCase):

    FITS = {'fits': True, 'reason': None, 'message': 'It fits.',
            'next_start': None, 'fits_now': 3, 'wanted': 3,
            'start_date': '2026-12-01T14:00:00.000000',
            'end_date': '2026-12-01T16:00:00.000000'}
    FULL = {**FITS, 'fits': False, 'reason': 'no_room', 'fits_now': 1,
            'message': 'There is no capacity for this lease in this window.',
            'next_start': '2026-12-01T16:00:00.000000'}

    def test_one_that_fits(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FITS}))
        self.assertEqual(self.FITS, self.reservation(
            'quote', *WINDOW, '--reservation', INSTANCE))
        self.assertEqual(Request(
            'POST', '/reservation/v1/leases', {'dry_run': 'true'}, {
                'name': 'quote', 'start_date': '2026-12-01 14:00',
                'end_date': '2026-12-01 16:00', 'events': [],
                'reservations': [{
                    'resource_type': 'virtual:instance', 'vcpus': 2,
                    'memory_mb': 2048, 'disk_gb': 10, 'amount': 3,
                    'affinity': 'None', 'resource_properties': ''}],
            }, 'a-token'), self.asked())

    def test_one_that_does_not_says_so_by_its_exit_code_too(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FULL}))
        code, out, error = self.openstack(
            'reservation', 'quote', *WINDOW, '--reservation', INSTANCE, '-f',
            'json')
        self.assertEqual((3, ''), (code, error))
        self.assertEqual(self.FULL, json.loads(out))

    def test_the_reservation_is_what_the_client_of_blazar_would_send(self):
        self.cloud.sees('POST /leases', (200, {
            'quote': self.FITS, 'lease': a_lease()}))
        for text in (
                INSTANCE,
                INSTANCE + ',affinity=True',
                'amount=1,resource_type=virtual:instance,vcpus=01',
                INSTANCE + ',resource_properties=["and", ["=", "$a", "x,y"],'
                           ' [">=", "$vcpus", "8"]],affinity=False',
                'resource_type=flavor:instance,flavor_id=1,amount=2',
                'resource_type=flavor:instance,flavor_id=a-b,amount=2',
                'resource_type=physical:host,min=1,max=2,'
                'hypervisor_properties=[">=", "$vcpus", "2"]',
                'resource_type=virtual:floatingip,network_id=n,amount=2,'
                'required_floatingips=["192.0.2.7","192.0.2.8"]'):
            words = [*WINDOW, '--reservation', text, '--reservation', text]
            for command in (['quote'], ['lease', 'create', 'quote']):
                code, _out, error = self.openstack(
                    'reservation', *command, *words)
                self.assertEqual(0, code, error)
            ours, theirs = self.cloud.requests[-2:]
            theirs.body.pop('before_end_date')
            self.assertEqual(theirs.body, ours.body)

    def test_what_only_ours_can_say(self):
        self.cloud.sees('POST /leases', (200, {'quote': self.FITS}))
        self.reservation(
            'quote', *WINDOW, '--on-end', 'recycle', '--grace-period', '30m',
            '--reservation', 'resource_type=physical:host,min=1,max=2,'
            'traits=["A", "B"],aggregate=rack7,projects=["p"],region=R')
        body = self.asked().body
        self.assertEqual(('recycle', '30m'), (
            body['on_end'], body['grace_period']))
        self.assertEqual([{
            'resource_type': 'physical:host', 'min': 1, 'max': 2,
            'hypervisor_properties': '', 'resource_properties': '',
            'traits': ['A', 'B'], 'aggregate': 'rack7', 'projects': ['p'],
            'region': 'R'}], body['reservations'])

    def test_a_reservation_that_cannot_be_read(self):
        for text, says in (
                ('vcpus=2', 'needs resource_type=...'),
                ('resource_type=virtual:machine', 'virtual:instance'),
                (INSTANCE + ',color=red', "'color=red' is not key=value"),
                ('vcpu=2,' + INSTANCE, "'vcpu=2' is not key=value"),
                ('resource_type=virtual:instance,vcpu=2',
                 "'vcpu=2' is not key=value"),
                (INSTANCE + ',vcpus=3', 'has vcpus twice'),
                ('resource_type=virtual:floatingip,required_floatingips=[x',
                 'needs a list')):
            self.stderr = io.StringIO()
            self.assertIn(says, self.fails(
                'quote', *WINDOW, '--reservation', text, code=2))
        self.assertEqual([], self.cloud.requests)

    def test_an_end_and_a_reservation_have_to_be_said(self):
        error = self.fails('quote', code=2)
        self.assertIn('--reservation', error)
        self.assertIn('--end-date --duration is required', self.fails(
            'quote', '--reservation', INSTANCE, code=2))


class OfferTest(OscTestCase):

    def offer(self, *words):
        return self.reservation('offer', 'lease1', *WINDOW, '--reservation',
                                INSTANCE, *words)

    def test_an_offer(self):
        self.cloud.sees('POST /leases',
                        (201, {'lease': a_lease(status='OFFERED')}))
        self.assertEqual(a_lease(status='OFFERED'), self.offer())
        body = self.asked().body
        self.assertEqual({}, self.asked().query)
        self.assertEqual(('lease1', 600),
                         (body['name'], body['offer_seconds']))

    def test_it_expires_when_it_was_told_to(self):
        self.cloud.sees('POST /leases', (201, {'lease': a_lease()}))
        for text, seconds in (('90m', 5400), ('1h30m', 5400), ('60s', 60)):
            self.offer('--expires', text)
            self.assertEqual(
                seconds, self.cloud.requests[-1].body['offer_seconds'])
        for text in ('', '10', '0m', 'soon', '5m1h'):
            self.assertIn('not a duration', self.fails(
                'offer', 'lease1', *WINDOW, '--reservation', INSTANCE,
                '--expires', text, code=2))

    def test_a_refusal_says_why_and_when(self):
        self.cloud.sees('POST /leases', (409, {
            'error_code': 409, 'error_name': 'NO_ROOM', 'reason': 'no_room',
            'error_message':
                'There is no capacity for this lease in this window.',
            'next_start': '2026-12-01T16:00:00.000000', 'fits_now': 1}))
        self.assertEqual(
            'There is no capacity for this lease in this window. (next_start: '
            '2026-12-01T16:00:00.000000, fits_now: 1)', self.fails(
                'offer', 'l', *WINDOW, '--reservation', INSTANCE).strip())

    def test_a_refusal_names_options(self):
        for said, shown in (
                ('"offer_seconds" is 30.', '--expires is 30.'),
                ('(write "start_date": "2026-12-01 16:00").',
                 '(write --start-date "2026-12-01 16:00").'),
                ('Write "on_end": "delete" or leave it out.',
                 'Write --on-end "delete" or leave it out.'),
                ('write ?force=true to delete all.',
                 'write --force to delete all.'),
                ('Write "retries": 3.', 'Write --retries 3.'),
                ('"amount" is 0. Write "recurrence": {"rule": "x"}.',) * 2):
            self.cloud.sees('POST /leases', (400, {'error_message': said}))
            self.assertEqual(shown, self.fails(
                'offer', 'l', *WINDOW, '--reservation',
                INSTANCE).splitlines()[-1])

    def test_a_refusal_says_nothing_twice(self):
        message = ('There is no capacity. '
                   'next_start: 2026-12-01T16:00:00.000000.'
                   ' fits_now: 1 of 3.')
        self.cloud.sees('POST /leases', (409, {
            'error_code': 409, 'error_message': message, 'fits_now': 1,
            'next_start': '2026-12-01T16:00:00.000000'}))
        self.assertEqual(message, self.fails(
            'offer', 'l', *WINDOW, '--reservation', INSTANCE).strip())

    def test_lists_in_a_lease_can_be_read_in_a_table(self):
        self.cloud.sees('POST /leases', (201, {'lease': a_lease()}))
        code, out, _error = self.openstack(
            'reservation', 'offer', 'l', *WINDOW, '--reservation', INSTANCE)
        self.assertEqual(0, code)
        self.assertIn(f"amount='3', id='{OTHER}'", out)


class RecurringTest(OscTestCase):
    """A lease that recurs, and its occurrences."""

    def request(self, *words):
        return ('request', 'lease1', *WINDOW, '--reservation', INSTANCE,
                *words)

    def test_a_request(self):
        self.cloud.sees('POST /leases', (201, {'lease': a_lease()}))
        self.reservation(*self.request(
            '--recur', 'FREQ=DAILY;COUNT=2', '--timezone', 'Europe/Berlin',
            '--fits', 'some'))
        self.assertEqual(
            {'rule': 'FREQ=DAILY;COUNT=2', 'timezone': 'Europe/Berlin',
             'fits': 'some'}, self.asked().body['recurrence'])

    def test_once_if_nothing_is_said(self):
        self.cloud.sees('POST /leases', (201, {'lease': a_lease()}))
        self.reservation(*self.request())
        self.assertNotIn('recurrence', self.asked().body)

    def test_the_rest_goes_with_a_rule(self):
        self.assertIn('require --recur', self.fails(*self.request(
            '--timezone', 'Europe/Berlin')))

    def test_its_occurrences(self):
        each = {'id': OTHER, 'start_date': '2026-12-01T14:00:00.000000',
                'end_date': '2026-12-01T16:00:00.000000',
                'status': 'PENDING', 'reason': ''}
        self.cloud.sees(f'GET /leases/{ID}', (200, {
            'lease': a_lease(occurrences=[each])}))
        self.assertEqual([each], self.reservation('occurrences', ID))
        self.cloud.sees(f'GET /leases/{OTHER}', (200, {'lease': a_lease(
            occurrences=[], recurrence_id=ID)}))
        self.assertEqual([each], self.reservation('occurrences', OTHER))

    def test_a_lease_that_does_not_recur(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': a_lease(
            occurrences=[], recurrence_id=None)}))
        self.assertIn(f'Lease {ID} does not recur.',
                      self.fails('occurrences', ID))


class AcknowledgeTest(OscTestCase):

    def test_what_has_changed_was_seen(self):
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': a_lease()}))
        self.assertEqual(a_lease(), self.reservation('acknowledge', ID))
        asked = self.asked()
        self.assertEqual(
            ('PUT', f'/reservation/v1/leases/{ID}',
             {'resources_changed': False}),
            (asked.method, asked.path, asked.body))


class AcceptTest(OscTestCase):

    def setUp(self):
        super().setUp()
        self.cloud.sees(f'POST /leases/{ID}/accept',
                        (200, {'lease': a_lease()}))

    def test_by_id(self):
        self.assertEqual(a_lease(), self.reservation('accept', ID))
        self.assertEqual(
            ('POST', f'/reservation/v1/leases/{ID}/accept'),
            self.asked()[:2])

    def test_by_name_among_the_offers(self):
        self.cloud.sees('GET /leases', (200, {
            'leases': [a_lease(status='OFFERED')]}))
        self.reservation('accept', 'lease1')
        self.assertEqual({'name': 'lease1', 'status': 'OFFERED'},
                         self.cloud.requests[0].query)
        self.assertEqual(2, len(self.cloud.requests))

    def test_an_offer_that_is_over(self):
        message = f'The lease {ID} is not there.'
        self.cloud.sees(f'POST /leases/{ID}/accept', (404, {
            'error_code': 404, 'error_name': 'LEASE_NOT_FOUND',
            'error_message': message}))
        self.assertEqual(message, self.fails('accept', ID).strip())
        self.cloud.sees('GET /leases', (200, {'leases': []}))
        self.assertIn(
            "No lease has the name 'lease1' and the status OFFERED.",
            self.fails('accept', 'lease1'))

    def test_waiting_for_it_to_be_active(self):
        self.cloud.sees(f'GET /leases/{ID}', *(
            (200, {'lease': a_lease(status=status)})
            for status in ('PENDING', 'STARTING', 'ACTIVE')))
        self.assertEqual('ACTIVE',
                         self.reservation('accept', ID, '--wait')['status'])
        self.assertEqual(4, len(self.cloud.requests))
        self.assertEqual(
            'lease1: PENDING, starts 2026-12-01 14:00:00\n'
            'lease1: STARTING\n'
            'lease1: ACTIVE, ends 2026-12-01 16:00:00\n',
            self.error)


class DeleteTest(OscTestCase):

    def test_several_by_id_and_name(self):
        self.cloud.sees('GET /leases', (200, {'leases': [a_lease(id=OTHER)]}))
        for one in (ID, OTHER):
            self.cloud.sees(f'DELETE /leases/{one}', (204, ''))
        self.assertEqual((0, '', ''), self.openstack(
            'reservation', 'delete', ID, 'lease1'))
        self.assertEqual([(ID, {}), (OTHER, {})], [
            (one.path.rsplit('/', 1)[1], one.query)
            for one in self.cloud.requests if one.method == 'DELETE'])

    def test_those_before_one_that_fails_are_named(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}))
        self.cloud.sees(f'DELETE /leases/{ID}', (204, ''))
        self.assertEqual(
            f"No lease has the name 'x'. Deleted before that: {ID}.",
            self.fails('delete', ID, 'x', OTHER).strip())
        self.assertNotIn('Deleted',
                         self.fails('delete', 'y').splitlines()[-1])

    def test_servers_of_others_by_force(self):
        self.cloud.sees(f'DELETE /leases/{ID}', (409, {
            'error_message': 'Servers of others run there.'}), (204, ''))
        self.assertIn('Servers of others run there.',
                      self.fails('delete', ID))
        code, _out, _error = self.openstack(
            'reservation', 'delete', '--force', ID)
        self.assertEqual((0, {'force': 'true'}), (
            code, self.cloud.requests[-1].query))


class ShareTest(OwnersTestCase):

    def setUp(self):
        super().setUp()
        lease = a_lease(reservations=[
            {'id': OTHER, 'resource_type': 'physical:host',
             'projects': ['one', OTHER]},
            {'id': ID, 'resource_type': 'virtual:instance'}])
        for method in ('GET', 'PUT'):
            self.cloud.sees(f'{method} /leases/{ID}', (200, {'lease': lease}))

    def share(self, *words):
        del self.cloud.requests[:]
        self.reservation('share', ID, *words)
        return self.changed()

    def test_projects_are_added_removed_and_set(self):
        other = 'f' * 32
        self.projects([], 403)
        self.cloud.answers[f'GET /v3/projects/{other}'] = [(403, {})]
        for words, projects in (
                (['--project', other], ['one', OTHER, other]),
                (['--project', OTHER], ['one', OTHER]),
                (['--remove-project', OTHER], ['one']),
                (['--remove-project', OTHER, '--project', other],
                 ['one', other]),
                (['--no-project', '--project', OTHER], [OTHER]),
                (['--no-project'], [])):
            self.assertEqual([{'reservations': [
                {'id': OTHER, 'projects': projects}]}], self.share(*words))

    def test_a_name_is_resolved(self):
        self.assertEqual([{'reservations': [
            {'id': OTHER, 'projects': [OTHER]}]}],
            self.share('--no-project', '--project', 'lab'))

    def test_a_project_that_does_not_exist(self):
        self.projects([])
        self.assertIn('There is no project nolab.', self.fails(
            'share', ID, '--project', 'nolab'))
        self.projects([], 403)
        self.assertIn('Use the ID of the project.', self.fails(
            'share', ID, '--project', 'nolab'))
        self.assertEqual([], self.changed())

    def test_a_project_that_it_is_not_shared_with(self):
        self.cloud.answers[f'GET /v3/projects/{ID}'] = [(200, {'project': {
            'id': ID, 'name': 'other'}})]
        self.assertIn(f'is not shared with project {ID}', self.fails(
            'share', ID, '--remove-project', ID))
        self.assertEqual([], self.changed())

    def test_a_project_has_to_be_named(self):
        self.assertIn('Name the projects', self.fails('share', ID))
        self.assertEqual([], self.cloud.requests)

    def test_one_without_hosts(self):
        self.cloud.sees(f'GET /leases/{ID}', (200, {'lease': a_lease(
            reservations=[{'id': OTHER, 'resource_type': 'x'}])}))
        self.assertIn('has no whole hosts', self.fails(
            'share', ID, '--no-project'))


class HandOverTest(OwnersTestCase):

    def test_to_a_project_or_a_user_or_both(self):
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': a_lease()}))
        for words, body in (
                (['--project', 'lab'], {'project_id': OTHER}),
                (['--user', 'bob'], {'user_id': ID}),
                (['--project', OTHER, '--user', 'bob'],
                 {'project_id': OTHER, 'user_id': ID})):
            self.reservation('hand', 'over', ID, *words)
            self.assertEqual(body, self.changed()[-1])

    def test_a_user_that_does_not_exist(self):
        self.cloud.answers['GET /v3/users'] = [(200, {'users': []})]
        self.assertIn('There is no user bob.', self.fails(
            'hand', 'over', ID, '--user', 'bob'))
        self.assertEqual([], self.changed())

    def test_to_whom_has_to_be_said(self):
        self.assertIn('Name the new owner', self.fails('hand', 'over', ID))
        self.assertEqual([], self.cloud.requests)


class OutputTest(OscTestCase):
    """Whatever the API answers, now or later, every formatter prints it."""

    VALUES = ([], ['b', 'a'], [1, None, 2.5, True], [{}, {'a': 1}],
              ['a', {'b': [1]}, [2]], {}, {'a': {'b': None, 'c': [1]}},
              {'a': [{'b': 1}]}, None, 1.5, '', 'text')

    def test_any_value_of_a_lease(self):
        lease = a_lease(**{
            f'key{number}': value for number, value in enumerate(self.VALUES)},
            warnings=['Two servers have no image.', 'a'])
        self.cloud.sees(f'PUT /leases/{ID}', (200, {'lease': lease}))
        for kind in ('table', 'json', 'yaml', 'value', 'shell'):
            code, out, error = self.openstack(
                'reservation', 'acknowledge', ID, '-f', kind)
            self.assertEqual(0, code, f'{kind}: {error}')
            self.assertIn('Two servers have no image.', out)
        self.assertEqual(lease, self.reservation('acknowledge', ID))

    def test_any_value_of_a_list(self):
        self.cloud.sees('GET /leases', (200, {'leases': [a_lease(
            warnings=['b', {'a': 1}], reservations=[
                {'servers': ['z', 'y']}, {}, {'servers': None}])]}))
        for kind in ('table', 'yaml', 'value', 'csv'):
            code, _out, error = self.openstack(
                'reservation', 'list', '-f', kind)
            self.assertEqual(0, code, f'{kind}: {error}')
        self.assertEqual([['z', 'y'], ['b', {'a': 1}]], [
            self.reservation('list')[0][key]
            for key in ('servers', 'warnings')])


class WaitTest(OscTestCase):

    def goes(self, *statuses, **values):
        """Say how the lease will be seen, one look after the other."""
        self.cloud.sees(f'GET /leases/{ID}', *(
            (200, {'lease': a_lease(status=status, **values)})
            for status in statuses))

    def test_each_status_is_told_once_and_beside_the_result(self):
        self.goes('PENDING', 'PENDING', 'PENDING', 'STARTING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])
        self.assertEqual(5, len(self.cloud.requests))
        self.assertEqual(
            ['PENDING', 'STARTING', 'ACTIVE'],
            [line.split()[1].strip(',')
             for line in self.error.splitlines()])

    def test_a_terminal_sees_one_line_that_goes_on(self):
        self.stderr = Terminal()
        self.goes('PENDING', 'PENDING', 'ACTIVE')
        self.reservation('wait', ID)
        self.assertRegex(
            self.error,
            r'^(\rlease1: PENDING, starts [-0-9: ]+ \(\d s\)\x1b\[K){2}'
            r'\rlease1: ACTIVE, ends [-0-9: ]+ \(\d s\)\x1b\[K\n$')

    def test_who_wants_quiet_gets_it(self):
        self.goes('PENDING', 'ACTIVE')
        code, out, error = self.openstack(
            '--quiet', 'reservation', 'wait', ID, '-f', 'value', '-c',
            'status')
        self.assertEqual((0, 'ACTIVE\n', ''), (code, out, error))

    def test_what_came_already(self):
        for status, wanted in (
                ('PENDING', 'pending'), ('STARTING', 'PENDING'),
                ('ACTIVE', 'PENDING'), ('ACTIVE', 'STARTING'),
                ('TERMINATED', 'TERMINATING'), ('TERMINATED', 'TERMINATED')):
            self.goes(status)
            self.assertEqual(status, self.reservation(
                'wait', ID, '--status', wanted)['status'])

    def test_what_will_not_come_any_more(self):
        for status in ('TERMINATING', 'TERMINATED', 'ERROR', 'DELETING'):
            self.goes('OFFERED', status, status_reason='It rained.')
            self.stderr = io.StringIO()
            self.assertIn(
                f'The lease is {status} and cannot become ACTIVE. It rained.',
                self.fails('wait', ID))

    def test_the_end_comes_after_an_error_too(self):
        self.goes('ERROR', 'DELETING', 'TERMINATING', 'TERMINATED')
        self.assertEqual('TERMINATED', self.reservation(
            'wait', ID, '--status', 'TERMINATED')['status'])

    def test_a_status_that_this_plug_in_does_not_know(self):
        self.goes('UPDATING', 'ACTIVE')
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_no_longer_than_it_was_told(self):
        self.goes('PENDING')
        self.assertIn(
            'The lease is PENDING instead of ACTIVE after 0 s.',
            self.fails('wait', ID, '--timeout', '0'))
        self.asked()

    def test_the_api_may_be_away_for_a_moment(self):
        self.cloud.sees(f'GET /leases/{ID}', (503, 'busy'),
                        (200, {'lease': a_lease(status='ACTIVE')}))
        self.assertEqual('ACTIVE', self.reservation('wait', ID)['status'])

    def test_by_name(self):
        self.cloud.sees('GET /leases', (200, {'leases': [a_lease()]}))
        self.goes('ACTIVE')
        self.assertEqual(ID, self.reservation('wait', 'lease1')['id'])
        self.assertEqual({'name': 'lease1'}, self.cloud.requests[0].query)

    def test_by_the_name_of_one_that_is_over(self):
        self.cloud.sees('GET /leases', (200, {'leases': []}), (200, {
            'leases': [a_lease(status='TERMINATED')]}))
        self.goes('TERMINATED')
        self.assertEqual(ID, self.reservation(
            'wait', 'lease1', '--status', 'TERMINATED')['id'])
        self.assertEqual({'name': 'lease1', 'status': 'TERMINATED'},
                         self.cloud.requests[1].query)

    def test_a_name_is_looked_for_on_every_page(self):
        self.cloud.sees(
            'GET /leases', (200, {
                'leases': [a_lease(id=OTHER)],
                'leases_links': [{'rel': 'next', 'href': 'http://next'}]}),
            (200, {'leases': [a_lease()]}))
        self.assertIn(f'Use an ID: {OTHER}, {ID}',
                      self.fails('wait', 'lease1'))
        self.assertEqual([{'name': 'lease1'},
                          {'name': 'lease1', 'marker': OTHER}],
                         [one.query for one in self.cloud.requests])

    def test_a_name_that_two_have(self):
        self.cloud.sees('GET /leases', (200, {'leases': [
            a_lease(id=OTHER), a_lease()]}))
        self.assertIn(
            'More than one lease has the name \'lease1\'. Use an ID: '
            f'{OTHER}, {ID}',
            self.fails('wait', 'lease1'))

    def test_a_status_that_there_is_not(self):
        self.assertIn('--status', self.fails(
            'wait', ID, '--status', 'asleep', code=2))


class TroubleTest(OscTestCase):
    """Where something else than the lease API answers, or nothing."""

    def test_there_is_no_lease_api_in_this_cloud(self):
        self.cloud.services.remove('reservation')
        self.assertIn('endpoint for reservation service',
                      self.fails('availability', *AvailabilityTest.SIZE))

    def test_an_error_that_is_not_of_the_api(self):
        self.cloud.sees('GET /availability', (502, '<html>'))
        self.assertIn('The server answered 502 Bad Gateway to GET http',
                      self.fails('availability', *AvailabilityTest.SIZE))

    def test_something_else_answers(self):
        self.cloud.sees('GET /availability', (200, '<html>'))
        self.assertIn('is not the lease API',
                      self.fails('availability', *AvailabilityTest.SIZE))
