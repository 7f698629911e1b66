# SPDX-License-Identifier: Apache-2.0

"""Requests that Nova's router accepts, however they are written."""

import json

from oslo_utils.fixture import uuidsentinel as uuids

from tests.functional import api_base
from tests.functional import base
from tests.functional import nova_box

#: Ways to send the same request: method, and path with its query.
WAYS = {
    'POST': (('POST', '{}%0A'), ('POST', '//{}'), ('PUT', '{}?_method=POST'),
             ('PUT', '{}?a=%5Fmethod&_method=post'),
             ('PUT', f'/{nova_box.PROJECT_ID}{{}}%0A?_method=POST')),
    'PUT': (('PUT', '{}%0A'), ('POST', '{}?_method=PUT')),
    'DELETE': (('DELETE', '{}%0A'), ('DELETE', '//{}'),
               ('GET', '{}?_method=DELETE'), ('HEAD', '{}?_method=delete'),
               ('GET', f'/{nova_box.PROJECT_ID}{{}}%0A?_method=DELETE')),
}


class RoutesTest(api_base.ApiTestCase):

    def send(self, way, path, body=None, client=None):
        method, form = way
        return (client or self.alice).api_request(
            form.format(path), method=method,
            body=None if body is None else json.dumps(body))

    def test_boot_by_any_route_gets_requested_lease(self):
        for number, way in enumerate(WAYS['POST']):
            answer = self.send(way, '/servers', {
                'server': {'name': 'vm', 'imageRef': base.IMAGE,
                           'flavorRef': '1', 'networks': 'none'},
                'os:scheduler_hints': self.lease_hints(f'l{number}', 3600)})
            self.assertEqual(202, answer.status_code, (way, answer.text))
            self.assertEqual(self.lease(f'l{number}')['id'],
                             answer.headers.get('OpenStack-Lease-Id'), way)
            self.assertEqual('RESERVED', self.alice.get_server(
                answer.json()['server']['id'])['status'])

    def test_boot_by_any_route_with_wrong_hint_is_refused(self):
        for way in WAYS['POST']:
            answer = self.send(way, '/servers', {
                'server': {'name': 'vm', 'imageRef': base.IMAGE,
                           'flavorRef': '1', 'networks': 'none'},
                'os:scheduler_hints': {'reservation': uuids.none}})
            self.assertEqual(400, answer.status_code, (way, answer.text))

    def test_deletion_by_any_route_ends_lease_of_reserved_server(self):
        for way in WAYS['DELETE']:
            server = self.hold(way[1].format('') + way[0])
            answer = self.send(way, f'/servers/{server["id"]}')
            self.assertEqual(204, answer.status_code, (way, answer.text))
            self.assertEqual({}, self.bookings(), way)
            self.assertNotIn('PENDING', [
                lease['status'] for lease in self.leases()], way)

    def test_actions_by_any_route_are_refused_for_reserved_server(self):
        server = self.hold()
        for form in WAYS['POST']:
            for below, body in (('action', {'os-stop': None}),
                                ('os-interface', {}),
                                ('os-volume_attachments', {}),
                                ('remote-consoles', {})):
                answer = self.send(
                    form, f'/servers/{server["id"]}/{below}', body)
                self.assertEqual(409, answer.status_code,
                                 (form, below, answer.text))
                self.assertIn('is RESERVED', answer.text)
        for form in WAYS['DELETE']:
            answer = self.send(form, f'/servers/{server["id"]}/tags/a')
            self.assertEqual(409, answer.status_code, (form, answer.text))

    def test_update_by_any_route_with_invalid_text_is_refused(self):
        server = self.hold()
        for way in WAYS['PUT']:
            answer = self.send(way, f'/servers/{server["id"]}', {
                'server': {'description': 'a\ud800'}})
            self.assertEqual(400, answer.status_code, (way, answer.text))
            self.assertIn('must not have NUL', answer.text, way)

    def test_resize_by_any_route_from_or_to_lease_flavor_is_refused(self):
        flavor_id = self.make_active()['reservations'][0]['flavor_id']
        inside = self.boot_active('inside', flavor=flavor_id)
        outside = self.boot_active('outside')
        for way in WAYS['POST']:
            for server, flavor in ((inside, '2'), (outside, flavor_id)):
                answer = self.send(way, f'/servers/{server["id"]}/action', {
                    'resize': {'flavorRef': flavor}})
                self.assertEqual(409, answer.status_code, (way, answer.text))
                self.assertIn('cannot be resized', answer.text, way)

    def test_deletion_by_any_route_of_lease_server_group_is_refused(self):
        lease = self.make_active(reservations=[self.reservation(
            amount=2, vcpus=1, affinity=False)])
        path = f'/os-server-groups/{lease["reservations"][0]["id"]}'
        for way in WAYS['DELETE']:
            for client in (self.alice, self.admin):
                answer = self.send(way, path, client=client)
                self.assertEqual(409, answer.status_code, (way, answer.text))
        self.alice.api_get(path)

    def test_reserved_server_does_not_exist_for_other_projects(self):
        held = self.hold()['id']
        bob = self.api(project='b' * 32, user='bob')
        ways = [way for ways in WAYS.values() for way in ways if
                nova_box.PROJECT_ID not in way[1]]
        for way in [('GET', '{}%0A'), ('GET', '{}/'),
                    ('POST', '{}?_method=GET'), *ways]:
            for below in ('', '/action', '/metadata', '/os-interface',
                          '/tags/a', '/os-instance-actions'):
                body = {'os-stop': None} if way[0] != 'GET' else None
                ours, novas = (
                    self.send(way, f'/servers/{server_id}{below}', body, bob)
                    for server_id in (held, uuids.none))
                self.assertEqual(
                    (novas.status_code, novas.text.replace(uuids.none, held)),
                    (ours.status_code, ours.text), (way, below))
