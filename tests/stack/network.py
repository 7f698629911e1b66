# SPDX-License-Identifier: Apache-2.0

"""A network service without networks: python -m tests.stack.network PORT

Nova requests ports, networks, security groups and quotas even of servers
that are booted without a network. A boot with the network "auto" gets a port
of one network that no list contains: Ansible cannot boot without networks.
"""

import collections.abc
import json
import socketserver
import sys
import typing as ty
import urllib.parse
import uuid
from wsgiref import simple_server

Json: ty.TypeAlias = dict[str, ty.Any]

#: The network that Nova gets when it has one created for a project.
_AUTO: Json = {'id': str(uuid.uuid4()), 'name': 'auto', 'tenant_id': '',
               'mtu': 1500, 'subnets': [], 'port_security_enabled': False}
_ports: dict[str, Json] = {}


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(simple_server.WSGIRequestHandler):
    def address_string(self) -> str:
        """Return the address without resolving its name."""
        return ty.cast(str, self.client_address[0])


def application(environ: dict[str, ty.Any],
                start: collections.abc.Callable[..., ty.Any]) -> list[bytes]:
    """Answer with empty lists; no id exists."""
    path = [part.removesuffix('.json')
            for part in environ['PATH_INFO'].split('/') if part]
    status, body = '200 OK', {}
    if environ['REQUEST_METHOD'] == 'GET' and not path:
        body = {'versions': [{'id': 'v2.0', 'status': 'CURRENT', 'links': [
            {'rel': 'self', 'href': f'http://{environ["HTTP_HOST"]}/v2.0/'},
        ]}]}
    elif found := _auto(environ, path[1:]):
        status, body = found
    elif environ['REQUEST_METHOD'] == 'GET' and len(path) == 2:
        body = {path[1].replace('-', '_'): []}
    elif environ['REQUEST_METHOD'] == 'GET' and path[1:2] == [
            'quotas'] and len(path) == 3:
        body = {'quota': dict.fromkeys(
            ('network', 'subnet', 'port', 'floatingip', 'router',
             'security_group', 'security_group_rule'), -1)}
    elif environ['REQUEST_METHOD'] == 'GET' and (
            path[1:2] == ['auto-allocated-topology']):
        # A boot with the network "auto" is accepted: Nova first asks
        # whether a network could be created, and creates it for the build.
        body = {'auto_allocated_topology': {'id': 'dry-run=pass'}}
    else:
        status, body = '404 Not Found', {'NeutronError': {
            'type': 'NotFound', 'message': 'There are no networks here.',
            'detail': ''}}
    data = b'' if status.startswith('204') else json.dumps(body).encode()
    start(status, [('Content-Type', 'application/json'),
                   ('Content-Length', str(len(data)))])
    return [data]


def _auto(environ: dict[str, ty.Any], path: list[str],
          ) -> tuple[str, Json] | None:
    """Answer requests for that network and its ports; None for others.
    """
    method = environ['REQUEST_METHOD']
    wanted = urllib.parse.parse_qs(environ['QUERY_STRING'])
    if path[:1] == ['auto-allocated-topology']:
        return '200 OK', {'auto_allocated_topology': {
            'id': 'dry-run=pass' if 'fields' in wanted else _AUTO['id']}}
    if path == ['networks', _AUTO['id']]:
        return '200 OK', {'network': _AUTO}
    if path == ['networks'] and _AUTO['id'] in wanted.get('id', ()):
        return '200 OK', {'networks': [_AUTO]}
    if path == ['ports'] and method == 'GET':
        return '200 OK', {'ports': [
            port for port in list(_ports.values()) if all(
                port.get(key, value) == value for key, (value, *_rest)
                in wanted.items() if key in ('device_id', 'tenant_id'))]}
    if path == ['ports'] or path[1:] and path[1] in _ports:
        return _port(environ, method, path[1:])
    return None


def _port(environ: dict[str, ty.Any], method: str, path: list[str],
          ) -> tuple[str, Json]:
    """Create, change, show or delete a port."""
    port_id = path[0] if path else str(uuid.uuid4())
    if method == 'DELETE':
        _ports.pop(port_id, None)
        return '204 No Content', {}
    if method in ('POST', 'PUT'):
        given = json.loads(environ['wsgi.input'].read(
            int(environ['CONTENT_LENGTH'])))['port']
        _ports[port_id] = {
            'id': port_id, 'mac_address': 'fa:16:3e:00:00:01',
            'status': 'ACTIVE', 'fixed_ips': [], 'security_groups': [],
            'binding:vif_type': 'ovs', **_ports.get(port_id, {}), **given}
    return '201 Created' if method == 'POST' else '200 OK', {
        'port': _ports[port_id]}


if __name__ == '__main__':
    server = simple_server.make_server(
        '127.0.0.1', int(sys.argv[1]), application, _Server, _Handler)
    print('Serving requests', file=sys.stderr, flush=True)
    server.serve_forever()
