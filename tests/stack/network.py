# SPDX-License-Identifier: Apache-2.0

"""A network service without networks: python -m tests.stack.network PORT

Nova asks for ports, networks, security groups and quotas even of servers
that are booted without a network.
"""

import collections.abc
import json
import socketserver
import sys
import typing as ty
from wsgiref import simple_server

__all__ = ['application']


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(simple_server.WSGIRequestHandler):
    def address_string(self) -> str:
        """Without a look-up of the client's name."""
        return ty.cast(str, self.client_address[0])


def application(environ: dict[str, ty.Any],
                start: collections.abc.Callable[..., ty.Any]) -> list[bytes]:
    """Nothing of anything; what is looked for by its id is not there."""
    path = [part.removesuffix('.json')
            for part in environ['PATH_INFO'].split('/') if part]
    status, body = '200 OK', {}
    if environ['REQUEST_METHOD'] == 'GET' and not path:
        body = {'versions': [{'id': 'v2.0', 'status': 'CURRENT', 'links': [
            {'rel': 'self', 'href': f'http://{environ["HTTP_HOST"]}/v2.0/'},
        ]}]}
    elif environ['REQUEST_METHOD'] == 'GET' and len(path) == 2:
        body = {path[1].replace('-', '_'): []}
    elif environ['REQUEST_METHOD'] == 'GET' and path[1:2] == ['quotas']:
        body = {'quota': dict.fromkeys(
            ('network', 'subnet', 'port', 'floatingip', 'router',
             'security_group', 'security_group_rule'), -1)}
    else:
        status, body = '404 Not Found', {'NeutronError': {
            'type': 'NotFound', 'message': 'There are no networks here.',
            'detail': ''}}
    data = json.dumps(body).encode()
    start(status, [('Content-Type', 'application/json'),
                   ('Content-Length', str(len(data)))])
    return [data]


if __name__ == '__main__':
    server = simple_server.make_server(
        '127.0.0.1', int(sys.argv[1]), application, _Server, _Handler)
    print('Serving requests', file=sys.stderr, flush=True)
    server.serve_forever()
