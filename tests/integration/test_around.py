# SPDX-License-Identifier: Apache-2.0

"""Leases cannot be bypassed, and nothing is undone after the cast: what
functional tests check in one process, with the servers of real clouds.
"""

from http import server as http_server
import threading
import time

import requests

from tests.integration import test_crash
from tests.integration import test_lease_api

#: Requests that Nova's router treats like the method that is named first.
POSTS = (('POST', '/servers%0A'), ('POST', '//servers'),
         ('PUT', '/servers?_method=POST'))
DELETIONS = (('DELETE', '/servers/{}%0A'), ('GET', '/servers/{}'
                                            '?_method=DELETE'))
#: Headers of one connection, or of what requests has decoded.
OF_A_HOP = {'connection', 'content-encoding', 'content-length', 'host',
            'keep-alive', 'transfer-encoding'}


class Keystone:
    """A proxy in front of keystone, until stop().

    :ivar broken: whether it answers the creation of a trust with a page
    :ivar pages: how often it has done so
    """

    def __init__(self, url):
        self.broken, self.pages = False, 0
        front = self

        class Handler(http_server.BaseHTTPRequestHandler):

            def do_GET(self):
                front.answer(self, url)

            do_DELETE = do_HEAD = do_PATCH = do_POST = do_PUT = do_GET

            def log_message(self, *_args):
                """Log nothing."""

        self._server = http_server.ThreadingHTTPServer(
            ('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever,
                         daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler, url):
        body = handler.rfile.read(int(handler.headers['Content-Length'] or 0))
        if self.broken and handler.command == 'POST' and (
                handler.path.endswith('/OS-TRUST/trusts')):
            self.pages += 1
            self._send(handler, 200, {'Content-Type': 'text/html'},
                       b'<html>Back soon</html>')
            return
        answer = requests.request(
            handler.command, url + handler.path, data=body, timeout=60,
            allow_redirects=False, headers={
                name: value for name, value in handler.headers.items()
                if name.lower() not in OF_A_HOP})
        self._send(handler, answer.status_code, answer.headers,
                   answer.content)

    @staticmethod
    def _send(handler, status, headers, body):
        handler.send_response(status)
        for name, value in headers.items():
            if name.lower() not in OF_A_HOP:
                handler.send_header(name, value)
        handler.send_header('Content-Length', str(len(body)))
        handler.end_headers()
        if handler.command != 'HEAD':
            handler.wfile.write(body)


class AroundTest(test_crash.CrashTestCase):

    def test_all_routes_that_nova_accepts_are_intercepted(self):
        hints = self.lease_hints(time.time() + 600)
        for way, deletion in zip(POSTS, (*DELETIONS, *DELETIONS)):
            answer = self.demo.request(*way, self.boot_body(hints))
            self.assertEqual(202, answer.status_code, (way, answer.text))
            server_id = answer.json()['server']['id']
            self.assertEqual('RESERVED', self.server(server_id)['status'], way)
            lease_id = self.lease_of(server_id)['id']
            stop = self.demo.request(
                'POST', f'/servers/{server_id}/action%0A', {'os-stop': None})
            self.assertEqual(409, stop.status_code, stop.text)
            self.assertIn('is RESERVED', stop.text)
            method, path = deletion
            answer = self.demo.request(method, path.format(server_id))
            self.assertEqual(204, answer.status_code, (deletion, answer.text))
            self.assertEqual('TERMINATED', self.lease(lease_id)['status'])
        self.assertEqual({}, self.booked_hosts())

    def test_delete_and_restore_do_not_delay_lease_end(self):
        # Only nova-api reads it; hosts would then delete an hour later.
        self.configure('\n[DEFAULT]\nreclaim_instance_interval = 3600\n')
        ends = time.time() + 60
        server_id = self.boot(self.lease_hints('now', 60))['server']['id']
        lease_id = self.lease_of(server_id)['id']
        self.wait_for_server(server_id)
        for _time in range(3):
            self.demo('DELETE', f'/servers/{server_id}')
            self.wait_for_server(server_id, 'SOFT_DELETED')
            self.demo('POST', f'/servers/{server_id}/action',
                      {'restore': None})
            self.wait_for_server(server_id)
        self.assertEqual('ACTIVE', self.lease(lease_id)['status'])
        restored = []

        def is_gone():
            """Check, and do all that a member can do; Nova may refuse."""
            self.demo.request('DELETE', f'/servers/{server_id}')
            answer = self.demo.request(
                'POST', f'/servers/{server_id}/action', {'restore': None})
            restored.append(answer.status_code)
            return not self.exists(server_id)

        self.wait_for(lambda: time.time() >= ends, 'the lease is over', 120)
        self.wait_for(is_gone, f'{server_id} is gone', 90)
        self.assertEqual([], self.guests(server_id))
        self.assertEqual({}, self.allocations(server_id))
        self.wait_for_lease(lease_id, 'TERMINATED')
        self.assert_nothing_left()

    def test_error_after_cast_undoes_nothing(self):
        before = self.trusts()
        keystone = Keystone(self.cloud.site.endpoint('keystone'))
        self.addCleanup(keystone.stop)
        self.configure('\n[blazar_keystone]\nendpoint_override = '
                       f'{keystone.url}/v3\n')
        keystone.broken = True
        # A boot that needs a trust is refused; no build was sent.
        said = self.refusal(503, self.demo, 'POST', '/servers', self.boot_body(
            self.lease_hints(time.time() + 600)))
        self.assertIn('identity service', said['message'])
        self.assertEqual(1, keystone.pages)
        now = time.time()
        servers = [self.boot(self.lease_hints('now', lasts))['server']['id']
                   for lasts in (3600, 90)]
        self.assertEqual((3, before), (keystone.pages, self.trusts()))
        leases = [self.lease_of(server_id)['id'] for server_id in servers]
        for server_id in servers:
            self.wait_for_server(server_id)
            self.assert_built_once(server_id)
            self.assertEqual(1, len(self.allocations(server_id)))
        self.wait_for_status(leases, 'ACTIVE')
        self.assert_nothing_left()
        # The owner creates a trust for the first one; the other has none.
        keystone.broken = False
        self.demo('PUT', f'/leases/{leases[0]}', {
            'end_date': test_lease_api.minute(now + 7200)},
            service='reservation')
        self.assertEqual(1, len(self.trusts() - before))
        self.wait_until_gone(servers[1], 180)
        self.assertGreaterEqual(time.time(), now + 90)
        self.demo('DELETE', f'/leases/{leases[0]}', service='reservation')
        self.wait_until_gone(servers[0])
        self.wait_for_status(leases, 'TERMINATED')
        self.wait_for(lambda: self.trusts() == before, 'the trust is gone')
        for server_id in servers:
            self.assertEqual(([], {}), (
                self.guests(server_id), self.allocations(server_id)))
        self.assert_nothing_left()
