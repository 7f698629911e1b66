# SPDX-License-Identifier: Apache-2.0

"""The Nova of the functional tests, on HTTP ports of the loopback.

For the real `openstack` client, it includes minimal fakes of keystone (which
accepts any password) and of glance (one image, read only).
"""

import collections.abc
import difflib
import json
import logging
import os
import shutil
import socketserver
import tempfile
import threading
import typing as ty
import urllib.parse
from wsgiref import simple_server

# Set before it is read: the cloud may run for days.
os.environ['OS_TEST_TIMEOUT'] = '0'

# Imported before Nova, as it disables eventlet.
from tests.functional import nova_box  # noqa: E402, I100
from tests import samples  # noqa: E402

from nova import context as nova_context  # noqa: E402
from placement import deploy  # noqa: E402

Environ = dict[str, ty.Any]
Start = collections.abc.Callable[..., ty.Any]
App = collections.abc.Callable[[Environ, Start], collections.abc.Iterable[
    bytes]]

LOOPBACK = '127.0.0.1'
ROLES = {'admin': ('admin', 'member', 'reader')}
IMAGE = {'name': 'cirros', 'container_format': 'raw', 'disk_format': 'raw',
         'size': 12716032, 'min_ram': 0, 'min_disk': 0, 'is_public': True,
         'status': 'active', 'protected': False, 'properties': {}}
FLAVORS = ('m1.medium', 'm1.large')


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(simple_server.WSGIRequestHandler):
    def log_message(self, *_args: ty.Any) -> None:
        """Log nothing: Nova's log has the requests."""

    def address_string(self) -> str:
        """Return the address without a look-up of the client's name."""
        return ty.cast(str, self.client_address[0])


def serve(app: App) -> str:
    """Serve an application on a free port.

    :returns: its URL, without a slash at the end
    """
    server = simple_server.make_server(LOOPBACK, 0, app, _Server, _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://{LOOPBACK}:{server.server_port}'


def answer(start: Start, status: str, body: ty.Any,
           *headers: tuple[str, str]) -> list[bytes]:
    """Answer with JSON."""
    data = json.dumps(body, default=str).encode()
    start(status, [('Content-Type', 'application/json'),
                   ('Content-Length', str(len(data))), *headers])
    return [data]


def not_found(start: Start, service: str) -> list[bytes]:
    message = f'This stand-in for {service} does not have that.'
    return answer(start, '404 Not Found', {'error': {
        'code': 404, 'title': 'Not Found', 'message': message}})


class Keystone:
    """Fake keystone: tokens for every user; user admin has the admin role."""

    def __init__(self) -> None:
        self.url = serve(self)
        #: Endpoints by service type.
        self.catalog = {'identity': self.url + '/v3'}

    def __call__(self, environ: Environ, start: Start) -> list[bytes]:
        path = environ['PATH_INFO'].rstrip('/')
        if path in ('', '/v3'):
            return self._versions(path, start)
        if path == '/v3/auth/tokens':
            if environ['REQUEST_METHOD'] == 'POST':
                return self._issue(environ, start)
            token = environ.get('HTTP_X_SUBJECT_TOKEN', '')
            if who := nova_box.Identity.of_token(token):
                return self._token(who, start, '200 OK')
        return not_found(start, 'keystone')

    def _versions(self, path: str, start: Start) -> list[bytes]:
        version = {'id': 'v3.14', 'status': 'stable', 'links': [
            {'rel': 'self', 'href': self.url + '/v3/'}]}
        if path:
            return answer(start, '200 OK', {'version': version})
        return answer(start, '300 Multiple Choices',
                      {'versions': {'values': [version]}})

    def _issue(self, environ: Environ, start: Start) -> list[bytes]:
        length = int(environ.get('CONTENT_LENGTH') or 0)
        auth = json.loads(environ['wsgi.input'].read(length))['auth']
        identity = auth['identity']
        if 'token' in identity:
            known = nova_box.Identity.of_token(identity['token']['id'])
            user = known.user if known else 'nobody'
        else:
            account = identity['password']['user']
            user = account.get('name') or account['id']
        roles = ROLES.get(user, ('member', 'reader'))
        return self._token(nova_box.Identity(user, roles=roles), start,
                           '201 Created')

    def _token(self, who: nova_box.Identity, start: Start,
               status: str) -> list[bytes]:
        domain = {'id': 'default', 'name': 'Default'}
        body = {
            'methods': ['password'], 'is_domain': False, 'audit_ids': ['x'],
            'issued_at': '2026-01-01T00:00:00.000000Z',
            'expires_at': '2099-01-01T00:00:00.000000Z',
            'user': {'id': who.user, 'name': who.user, 'domain': domain},
            'project': {'id': who.project, 'name': 'demo', 'domain': domain},
            'roles': [{'id': role, 'name': role} for role in who.roles],
            'catalog': [self._service(*item)
                        for item in self.catalog.items()]}
        return answer(start, status, {'token': body},
                      ('X-Subject-Token', who.token()))

    @staticmethod
    def _service(kind: str, url: str) -> dict[str, ty.Any]:
        return {'type': kind, 'name': kind, 'id': kind, 'endpoints': [
            {'id': f'{kind}-{interface}', 'interface': interface, 'url': url,
             'region': 'RegionOne', 'region_id': 'RegionOne'}
            for interface in ('public', 'internal', 'admin')]}


class Glance:
    """Fake glance: the images of Nova's Glance fixture, read only."""

    FIELDS = ('id', 'name', 'status', 'size', 'container_format',
              'disk_format', 'min_ram', 'min_disk', 'protected',
              'created_at', 'updated_at')

    def __init__(self, images: ty.Any) -> None:
        self.images = images
        self.url = serve(self)

    def __call__(self, environ: Environ, start: Start) -> list[bytes]:
        path = [part for part in environ['PATH_INFO'].split('/') if part]
        if len(path) < 2:
            return answer(start, '300 Multiple Choices', {'versions': [
                {'id': 'v2.9', 'status': 'CURRENT', 'links': [
                    {'rel': 'self', 'href': self.url + '/v2/'}]}]})
        images = [self._shown(image) for image in
                  self.images.detail(nova_context.get_admin_context())]
        if path == ['v2', 'images']:
            query = urllib.parse.parse_qs(environ.get('QUERY_STRING', ''))
            name = query.get('name', [None])[0]
            return answer(start, '200 OK', {'images': [
                image for image in images if name in (None, image['name'])]})
        for image in images:
            if path == ['v2', 'images', image['id']]:
                return answer(start, '200 OK', image)
        return not_found(start, 'glance')

    def _shown(self, image: dict[str, ty.Any]) -> dict[str, ty.Any]:
        return {field: image.get(field) for field in self.FIELDS} | {
            'visibility': 'public', 'tags': []}


class PlacementAuth:
    """Converts our tokens to those of placement's `noauth2` strategy."""

    def __init__(self, app: App) -> None:
        self.app = app

    def __call__(self, environ: Environ, start: Start
                 ) -> collections.abc.Iterable[bytes]:
        who = nova_box.Identity.of_token(environ.get('HTTP_X_AUTH_TOKEN', ''))
        if who:
            environ['HTTP_X_AUTH_TOKEN'] = (
                'admin' if 'admin' in who.roles
                else f'{who.user}:{who.project}')
        return self.app(environ, start)


class Cloud(nova_box.NovaBox):
    """A Nova with two small hosts, the plugin, and HTTP endpoints."""

    hosts = {'host1': nova_box.Capacity(4, 8192, 100),
             'host2': nova_box.Capacity(4, 8192, 100)}

    def runTest(self) -> None:
        """Do nothing: a test case must have a test."""

    def _make_folder(self) -> str:
        # Not removed by cleanups: close() decides whether to keep it.
        return tempfile.mkdtemp(prefix='blazar-demo-')

    def open(self) -> None:
        """Start all services, and serve them.

        :raises Exception: any error of their start
        """
        self.setUp()
        self._log_to_file()
        self.keystone = Keystone()
        self.keystone.catalog |= {
            'compute': serve(self.api_fixture.app()) + '/v2.1',
            'image': Glance(self.glance).url,
            'placement': serve(PlacementAuth(deploy.loadapp(
                self.placement_fixture.conf_fixture.conf)))}
        self._offer_little()
        self.listener = self.new_listener()
        self.listener.start()

    def _log_to_file(self) -> None:
        """Log to a file: Nova's test harness would keep the log in memory."""
        self.log_file = os.path.join(self.folder, 'nova.log')
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter(
            '%(asctime)s %(levelname)s [%(name)s] %(message)s'))
        logging.root.handlers[:] = [handler]

    def _offer_little(self) -> None:
        """Offer one image and two flavors, without those of the tests."""
        self.glance.images.clear()
        self.glance.create(nova_context.get_admin_context(), dict(IMAGE))
        admin = self.client()
        for flavor in admin.get_flavors():
            if flavor['name'] not in FLAVORS:
                admin.delete_flavor(flavor['id'])

    def member(self) -> nova_box.ApiClient:
        """Return the client of an ordinary user."""
        return self.client(nova_box.Identity('demo'))

    def close(self, keep_folder: bool) -> None:
        """Stop what was started."""
        # The cleanups delete attributes.
        folder = self.folder
        self.listener.stop()
        self.listener.wait()
        self.doCleanups()
        if not keep_folder:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def paste_changes() -> list[str]:
        """Return the lines of api-paste.ini that enable the plugin, as a diff.
        """
        before = samples.nova_paste()
        after = samples.with_leases(before)
        return [line for line in difflib.ndiff(before.splitlines(),
                                               after.splitlines())
                if line.startswith(('- ', '+ '))]

    def exports(self, user: str = 'demo') -> dict[str, str]:
        """Return the openstack client's environment for this cloud."""
        return {'OS_AUTH_URL': self.keystone.url + '/v3',
                'OS_USERNAME': user, 'OS_PASSWORD': 'any',
                'OS_PROJECT_NAME': 'demo', 'OS_REGION_NAME': 'RegionOne',
                'OS_USER_DOMAIN_ID': 'default',
                'OS_PROJECT_DOMAIN_ID': 'default',
                'OS_IDENTITY_API_VERSION': '3',
                'OS_COMPUTE_API_VERSION': '2.90'}
