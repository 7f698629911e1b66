# SPDX-License-Identifier: Apache-2.0

"""Actions of reserved servers: all but show, rename and delete are refused."""

import json

import fixtures
from nova.api.openstack.compute import routes
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import uuidutils

from blazar_core.common import errors
from tests.functional import base
from tests.functional import leased

#: Allowed requests for a reserved server: path and method.
ALLOWED = {
    ('/servers/{id}', 'PUT'), ('/servers/{id}', 'DELETE'),
    ('/servers/{server_id}/metadata', 'POST'),
    ('/servers/{server_id}/metadata', 'PUT'),
    ('/servers/{server_id}/metadata/{id}', 'PUT'),
    ('/servers/{server_id}/metadata/{id}', 'DELETE')}
ALLOWED_ACTIONS = {'lock', 'unlock'}

#: Some actions that must be found, so that an empty list is no success.
KNOWN_ACTIONS = {
    'addFixedIp', 'addFloatingIp', 'addSecurityGroup', 'changePassword',
    'confirmResize', 'createBackup', 'createImage', 'evacuate',
    'forceDelete', 'injectNetworkInfo', 'lock', 'migrate',
    'os-getConsoleOutput', 'os-getVNCConsole', 'os-migrateLive',
    'os-resetState', 'os-start', 'os-stop', 'pause', 'reboot', 'rebuild',
    'rescue', 'resize', 'restore', 'resume', 'revertResize', 'shelve',
    'shelveOffload', 'suspend', 'trigger_crash_dump', 'unlock', 'unpause',
    'unrescue', 'unshelve'}

#: Some of the paths that must be found.
KNOWN_PATHS = {
    '/servers/{server_id}/tags', '/servers/{server_id}/tags/{id}',
    '/servers/{server_id}/os-interface',
    '/servers/{server_id}/os-volume_attachments/{id}',
    '/servers/{server_id}/remote-consoles',
    '/servers/{server_id}/os-server-password',
    '/servers/{server_id}/migrations/{id}/action'}


def server_routes():
    """Return Nova's routes below a server: (path, methods)."""
    return [(path, methods) for path, methods, *_ in routes.ROUTE_LIST
            if path.startswith(('/servers/{id}', '/servers/{server_id}'))]


def changes():
    """Return every request that changes a server: (method, path)."""
    return [(method, path) for path, methods in server_routes()
            for method in methods
            if method != 'GET' and (path, method) not in ALLOWED]


def looks():
    """Return every path below a server that can be read."""
    return [path for path, methods in server_routes() if 'GET' in methods]


def actions():
    """Return the names of all server actions, as Nova dispatches them."""
    for path, methods in server_routes():
        if path == '/servers/{id}/action':
            return sorted(methods['POST'][0]().wsgi_actions)
    raise AssertionError('Nova has no /servers/{id}/action')


def ask(client, method, path, server_id, body=None):
    """Send a request to one of Nova's routes, for a server."""
    path = path.replace('{server_id}', server_id)
    if path.startswith('/servers/{id}'):
        path = path.replace('{id}', server_id, 1)
    path = path.replace('{id}', uuids.anything)
    return client.api_request(
        path, method=method, body=None if body is None else json.dumps(body))


class HeldActionsTest(leased.LeasedTestCase):
    """409 and a message, at the oldest and at the latest microversion."""

    def check_held_back(self, response, what):
        self.assertEqual(409, response.status_code, f'{what}: {response.text}')
        fault = response.json()['conflictingRequest']
        self.assertEqual(409, fault['code'])
        lease = self.lease('vm1')
        for word in ('RESERVED', lease['id'], 'vm1', self.at(3600),
                     'locked and deleted.'):
            self.assertIn(word, fault['message'], what)

    def clients(self):
        return [self.api(microversion='2.1'), self.alice, self.admin,
                self.client(microversion='2.1')]

    def test_server_actions_are_refused_for_reserved_server(self):
        server = self.hold()
        found = actions()
        self.assertLessEqual(KNOWN_ACTIONS, set(found))
        for client in self.clients():
            for action in sorted(set(found) - ALLOWED_ACTIONS):
                self.check_held_back(
                    ask(client, 'POST', '/servers/{id}/action',
                        server['id'], {action: None}),
                    f'{action} at {client.microversion}')
        self.check_unharmed(server)

    def test_subresource_changes_are_refused_for_reserved_server(self):
        server = self.hold()
        found = changes()
        self.assertLessEqual(KNOWN_PATHS, {path for _, path in found})
        for client in self.clients():
            for method, path in found:
                self.check_held_back(
                    ask(client, method, path, server['id'], {}),
                    f'{method} {path} at {client.microversion}')
        # With bodies that Nova would accept, and then act on or fail.
        for method, path, body in (
                ('POST', 'action', {'reboot': {'type': 'HARD'}}),
                ('POST', 'action', {'lock': None, 'os-stop': None}),
                ('POST', 'action', {'os-stop': None}),
                ('POST', 'action', {'os-resetState': {'state': 'active'}}),
                ('POST', 'action', {'resize': {'flavorRef': '5'}}),
                ('POST', 'action', {'rebuild': {'imageRef': base.IMAGE}}),
                ('POST', 'action', {'forceDelete': None}),
                ('PUT', 'tags', {'tags': ['a']}),
                ('PUT', 'tags/a', None),
                ('POST', 'os-volume_attachments',
                 {'volumeAttachment': {'volumeId': uuids.volume}}),
                ('POST', 'os-interface', {'interfaceAttachment': {}}),
                ('POST', 'remote-consoles', {'remote_console': {
                    'protocol': 'vnc', 'type': 'novnc'}})):
            self.check_held_back(
                ask(self.admin, method, f'/servers/{{id}}/{path}',
                    server['id'], body), f'{path} {body}')
        self.check_unharmed(server)

    def check_unharmed(self, server):
        got = self.alice.get_server(server['id'])
        own = ask(self.alice, 'GET', '/servers/{server_id}/metadata',
                  server['id']).json()['metadata']
        self.assertEqual(('RESERVED', {}, [], False), (
            got['status'], own, got['tags'], got['locked']))
        self.assertEqual('PENDING', self.lease('vm1')['status'])

    def test_other_paths_of_reserved_server_are_guarded(self):
        server = self.hold()
        for path in (f'/servers/{server["id"].upper()}/action',
                     f'/servers/{server["id"]}/action%0A'):
            self.check_held_back(self.alice.api_request(
                path, method='POST', body='{"os-stop": null}'), path)
        # Nova has no path with a slash at its end.
        self.assertEqual(404, self.alice.api_request(
            f'/servers/{server["id"]}/action/', method='POST',
            body='{"os-stop": null}').status_code)
        # Nova routes this to the same servers up to 2.102.
        path = f'/os-volumes_boot/{server["id"]}'
        client = self.api(microversion='2.1')
        self.check_held_back(client.api_request(
            f'{path}/action', method='POST', body='{"os-stop": null}'), path)
        self.assertEqual(204, client.api_request(
            path, method='DELETE').status_code)
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.assertEqual({}, self.bookings())

    def test_refusal_has_headers_of_nova_answer(self):
        server = self.hold()
        for client in (self.api(microversion='2.1'), self.alice):
            ours, novas = (
                ask(client, 'POST', '/servers/{id}/action', server_id,
                    {'os-stop': None})
                for server_id in (server['id'], uuids.unknown))
            self.assertEqual((409, 404),
                             (ours.status_code, novas.status_code))
            self.assertEqual(set(novas.headers), set(ours.headers))
            for header in ('Content-Type', 'OpenStack-API-Version', 'Vary'):
                self.assertEqual(novas.headers[header], ours.headers[header])

    def test_actions_are_allowed_after_build_is_sent(self):
        server = self.hold()
        self.clock.advance(3600)
        self.run_due()
        self.wait_for_status(server['id'], 'ACTIVE')
        self.alice.post_server_action(server['id'], {'os-stop': None})
        self.wait_for_status(server['id'], 'SHUTOFF')


class ComparedTest(leased.LeasedTestCase):
    """Comparison with an ordinary server that also waits for its build."""

    def setUp(self):
        super().setUp()
        self.held = self.hold()['id']
        # The build of this server is never sent.
        with fixtures.MonkeyPatch(
                'nova.conductor.rpcapi.ComputeTaskAPI.'
                'schedule_and_build_instances', lambda *_args, **_kw: None):
            self.waiting = self.boot('vm1')['id']

    def both(self, client, method, path, body=None):
        """Return the answers for the reserved server and for the other one."""
        return [self.answer(client, method, path, server_id, body)
                for server_id in (self.held, self.waiting)]

    def answer(self, client, method, path, server_id, body):
        response = ask(client, method, path, server_id, body)
        return (response.status_code,
                response.text.replace(server_id, 'SERVER'))

    def compare_with_none(self, client, method, path, body):
        held, none = (
            self.answer(client, method, path, server_id, body)
            for server_id in (self.held, uuidutils.generate_uuid()))
        self.assertEqual(none, held, f'{method} {path} {body} at '
                                     f'{client.microversion}')

    def test_reads_answer_as_for_building_server(self):
        self.assertGreater(len(looks()), 15)
        for client in (self.api(microversion='2.1'), self.alice, self.admin):
            for path in looks():
                what = f'GET {path} at {client.microversion}'
                held, waiting = self.both(client, 'GET', path)
                self.assertEqual(waiting[0], held[0], f'{what}: {held}')
                if waiting[0] < 500:
                    self.assertLess(held[0], 500, what)

    def test_reserved_server_does_not_exist_for_other_projects(self):
        for microversion in ('2.1', 'latest'):
            bob = self.api(project='0' * 32, user='bob',
                           microversion=microversion)
            requests = [*changes(), *(('GET', path) for path in looks()),
                        *((method, path) for path, method in ALLOWED)]
            for method, path in requests:
                body = {} if method in ('POST', 'PUT') else None
                self.compare_with_none(bob, method, path, body)
            for action in actions():
                self.compare_with_none(
                    bob, 'POST', '/servers/{id}/action', {action: None})
        # An admin may know of it.
        admin = self.api(project='0' * 32, user='root',
                         roles=('admin', 'member', 'reader'))
        self.assertIn('is RESERVED', self.refused(
            409, admin.post_server_action, self.held, {'os-stop': None}))

    def test_other_apis_answer_as_for_building_server(self):
        for client in (self.client(microversion='2.1'), self.admin):
            for method, path, body in (
                    ('POST', '/os-server-external-events', {'events': [{
                        'name': 'network-changed', 'status': 'completed',
                        'server_uuid': '{server_id}'}]}),
                    ('GET', '/os-migrations?instance_uuid={server_id}', None),
                    ('GET', '/os-simple-tenant-usage?detailed=1', None),
                    ('GET', '/os-hypervisors/detail', None),
                    ('GET', '/limits', None)):
                held, waiting = (
                    client.api_request(
                        path.replace('{server_id}', server_id), method=method,
                        body=json.dumps(body).replace(
                            '{server_id}', server_id) if body else None)
                    for server_id in (self.held, self.waiting))
                what = f'{method} {path} at {client.microversion}'
                self.assertEqual(waiting.status_code, held.status_code,
                                 f'{what}: {held.text}')
        self.assertEqual('RESERVED',
                         self.alice.get_server(self.held)['status'])

    def test_actions_of_other_servers_pass_to_nova(self):
        server = self.boot_active('vm2')
        asked = []

        def down(_self, server_ids):
            asked.extend(server_ids)
            raise errors.DatabaseUnavailable

        # Even when the reservation database is unavailable.
        with fixtures.MonkeyPatch(
                'blazar_core.leases.lookup.Lookup.held', down):
            self.alice.post_server_action(server['id'], {'os-stop': None})
        self.assertEqual([server['id']], asked)
        self.wait_for_status(server['id'], 'SHUTOFF')

        # Nova's own answers for servers that do not exist.
        for server_id in (uuids.unknown, 'no-uuid'):
            response = ask(self.alice, 'POST', '/servers/{id}/action',
                           server_id, {'os-stop': None})
            self.assertEqual(404, response.status_code)
            self.assertIn('itemNotFound', response.json())
        self.assertEqual(404, ask(
            self.alice, 'POST', '/servers/{id}/action', self.waiting,
            {'os-stop': None}).status_code)
