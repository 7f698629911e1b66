# SPDX-License-Identifier: Apache-2.0

"""BMCs for tests: the Redfish emulator of sushy-tools, on the loopback.

Its systems change their state at once, and then call a function of the test.
The emulator can hang, fail or lie, and requires a password if it has one.
"""

import base64
import json
import os
import threading
import uuid

import fixtures
from sushy_tools.emulator import main
from sushy_tools.emulator.resources.systems import fakedriver
from sushy_tools import error
from werkzeug import serving

_SESSIONS = '/redfish/v1/SessionService/Sessions'


class _Systems(fakedriver.FakeDriver):
    """Systems whose state is that of the test.

    :param systems: by UUID, the name and whether the system is on
    """

    def __init__(self, emulator):
        self._emulator = emulator
        self._systems = {
            one: {'uuid': one, 'name': name, 'nics': []}
            for one, name in emulator.names.items()}
        self._by_name = {name: one for one, name in emulator.names.items()}

    def _get(self, identity):
        if identity in self._by_name:
            raise error.AliasAccessError(self._by_name[identity])
        if identity not in self._systems:
            raise error.NotFound(f'{identity} was not found')
        return self._systems[identity]

    def get_power_state(self, identity):
        return 'On' if self._emulator.is_on(identity) else 'Off'

    def set_power_state(self, identity, state):
        self._get(identity)
        self._emulator.switch(identity, state)


class Emulator(fixtures.Fixture):
    """Emulate the power of systems. Only the last one of a process works.

    :param names: of the systems; by the UUIDs that they get
    :param on_switch: called with the name of a system and whether it is on
    :param password: of the user ``blazar``; None: no authentication
    :param ssl_context: None: without encryption
    :ivar url: of the server
    :ivar on: the names of the systems that are on
    :ivar requested: each reset, by its name and type
    :ivar stubborn: the names of systems that ignore a graceful shutdown
    :ivar mode: ``hang``, ``500``, ``garbage`` or ``lie`` (answers a request as
        done without doing it)
    :ivar sessions: the tokens of open sessions
    """

    def __init__(self, *names, on_switch=lambda name, on: None, password=None,
                 ssl_context=None):
        super().__init__()
        self.names = {str(uuid.uuid5(uuid.NAMESPACE_DNS, name)): name
                      for name in names}
        self.on, self.requested, self.stubborn = {*names}, [], set()
        self.mode = ''
        self.sessions = set()
        self.seen_auth = []
        self._on_switch = on_switch
        self._password = password
        self._ssl_context = ssl_context
        self._over = threading.Event()
        self._port, self._running = 0, None

    def _setUp(self):
        self.useFixture(fixtures.MonkeyPatch(
            'sushy_tools.emulator.main.Application.systems', _Systems(self)))
        # The cache of the previous emulator of this process.
        vars(main.app).pop('_cache', None)
        self.serve()
        self.addCleanup(self.kill)
        self.addCleanup(self._over.set)
        scheme = 'http' if self._ssl_context is None else 'https'
        self.url = f'{scheme}://127.0.0.1:{self._port}'

    def write_hosts(self, folder):
        """Write a ``hosts_file`` with all systems; return its path."""
        path = os.path.join(folder, 'power.conf')
        with open(path, 'w') as file:
            file.write(f'[DEFAULT]\ndriver = redfish\naddress = {self.url}\n')
            for system, name in self.names.items():
                file.write(
                    f'[{name}]\nsystem = /redfish/v1/Systems/{system}\n')
        # Whatever the umask.
        os.chmod(path, 0o644)
        return path

    def serve(self):
        """Take connections, after :meth:`kill` at the same port."""
        server = serving.make_server(
            '127.0.0.1', self._port, self._serve, threaded=True,
            ssl_context=self._ssl_context, request_handler=_Quiet)
        thread = threading.Thread(
            target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        self._port, self._running = server.server_port, (server, thread)

    def kill(self):
        """Refuse connections."""
        if self._running is not None:
            server, thread = self._running
            self._running = None
            server.shutdown()
            server.server_close()
            thread.join(20)

    def is_on(self, identity):
        return self.names[identity] in self.on

    def switch(self, identity, state):
        name = self.names[identity]
        self.requested.append((name, state))
        if self.mode == 'lie' or state == 'GracefulShutdown' and (
                name in self.stubborn):
            return
        (self.on.add if state == 'On' else self.on.discard)(name)
        self._on_switch(name, state == 'On')

    def _serve(self, environ, start_response):
        if self.mode == 'hang':
            self._over.wait(60)
        if self.mode in ('500', 'garbage', 'hang'):
            start_response('200 OK' if self.mode == 'garbage' else
                           '500 Internal Server Error',
                           [('Content-Type', 'application/json')])
            return [b'[{"PowerState": ']
        path, method = environ['PATH_INFO'].rstrip('/'), (
            environ['REQUEST_METHOD'])
        if self._password is not None:
            if path == _SESSIONS and method == 'POST':
                return self._log_in(environ, start_response)
            if path.startswith(_SESSIONS) and method == 'DELETE':
                self.sessions.discard(path.rpartition('/')[2])
                start_response('204 No Content', [])
                return []
            if path != '/redfish/v1' and not self._knows(environ):
                start_response('401 Unauthorized', [])
                return []
        return main.app(environ, start_response)

    def _log_in(self, environ, start_response):
        body = json.loads(environ['wsgi.input'].read(
            int(environ['CONTENT_LENGTH'])))
        if body != {'UserName': 'blazar', 'Password': self._password}:
            start_response('401 Unauthorized', [])
            return []
        token = uuid.uuid4().hex
        self.sessions.add(token)
        start_response('201 Created', [
            ('X-Auth-Token', token), ('Location', f'{_SESSIONS}/{token}'),
            ('Content-Type', 'application/json')])
        return [b'{}']

    def _knows(self, environ):
        token = environ.get('HTTP_X_AUTH_TOKEN')
        basic = environ.get('HTTP_AUTHORIZATION', '')
        self.seen_auth.append('session' if token else basic.split(' ')[0])
        return token in self.sessions or basic == 'Basic ' + (
            base64.b64encode(f'blazar:{self._password}'.encode()).decode())


class _Quiet(serving.WSGIRequestHandler):
    def log(self, *args):
        """Do nothing: tests capture what is printed."""
