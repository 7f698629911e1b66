# SPDX-License-Identifier: Apache-2.0

"""Tokens with a role that are for no project: of the system, of a domain, or
unscoped.
"""

import json
import re

from blazar_nova.api import rest
from tests.functional import base
from tests.functional import nova_box
from tests.functional import whole_hosts_base

HOUR = 3600

SCOPES = {'system': (('HTTP_OPENSTACK_SYSTEM_SCOPE', 'all'),),
          'domain': (('HTTP_X_DOMAIN_ID', 'default'),),
          'none': ()}
ROLES = (('reader',), ('member', 'reader'), ('admin', 'member', 'reader'),
         ('service',))
#: A group of a route with its pattern, which has no parentheses.
NAMED = re.compile(r'\(\?P<(\w+)>[^)]*\)')


class ScopesTest(whole_hosts_base.HostsTestCase):
    """All routes of the lease API, each with objects that exist."""

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        self.leased = self.boot_active(
            'mine', hints=self.lease_hints('mine'))['id']
        self.running = self.boot_active('plain')['id']
        self.run_sync()
        self.mine = self.make(start_in=HOUR)
        lease = self.lease('mine')
        host, = self.ask('GET', '/os-hosts', None, self.admin, 200)['hosts']
        #: The values of the groups of routes; those of others do not exist.
        self.values = {'lease_id': lease['id'], 'host_id': host['id'],
                       'server_id': self.running, 'host_name': 'host1'}
        self.body = {
            'name': 'x', 'start_date': self.at(HOUR),
            'end_date': self.at(2 * HOUR), 'reservations': [
                self.reservation()]}

    def routes(self):
        """Return each method and path of the API."""
        found = []
        for route in rest.ROUTES:
            path = NAMED.sub(
                lambda group: str(self.values.get(group[1], '1')),
                route.path.pattern)
            self.assertIsNotNone(route.path.fullmatch(path), path)
            found += [(method, path) for method in route.methods]
        return found

    def tokens(self):
        for scope, headers in SCOPES.items():
            for roles in ROLES:
                yield (scope, roles), self.client(nova_box.Identity(
                    'eve', '', roles, headers))

    def rows(self):
        """Return what requests could change, and the statuses of leases."""
        return (self.row_counts(), self.leases(), self.query(
            'SELECT * FROM hosts ORDER BY id'), self.query(
            'SELECT count(*) FROM interruptible_servers'))

    def test_lease_api_refuses_tokens_without_project(self):
        before = self.rows()
        others = (
            ('POST', '/leases', {'name': 'x', 'end_date': self.at(HOUR),
                                 'servers': [self.running]}, {}),
            ('POST', '/leases', self.body, {'dry_run': 'true'}),
            ('POST', '/leases', {**self.body, 'offer_seconds': 60}, {}),
            ('POST', '/leases', {**self.body, 'recurrence': {
                'rule': 'FREQ=DAILY;COUNT=2'}}, {}),
            ('GET', '/leases', None, {'project_id': self.alice.project_id}),
            ('GET', '/leases', None, {'occurrences': 'true'}),
            ('GET', '/usage', None, {'project_id': self.alice.project_id}),
            ('GET', '/calendar', None, {'rows': 'host'}),
            ('PUT', f'/leases/{self.mine["id"]}', {
                'project_id': self.alice.project_id}, {}))
        for which, client in self.tokens():
            for method, path, body, query in (*(
                    (method, path, self.body, {})
                    for method, path in self.routes()), *others):
                said = f'{method} {path} {query}: {which}'
                answer = self.response(method, path, body, client, **query)
                self.assertIn(answer.status_code, (400, 403, 404), said)
                error = answer.json()
                if answer.status_code != 404:
                    self.assertIn('no project scope', error['error_message'],
                                  said)
        self.assertEqual(before, self.rows())

    def test_boot_with_lease_refuses_tokens_without_project(self):
        before = self.rows()
        for which, client in self.tokens():
            for hints in (self.lease_hints('his'), self.lease_hints(
                    'his', HOUR), {'interruptible': 'True'}, {
                        'reservation': self.mine['reservations'][0]['id']}):
                answer = client.api_request('/servers', method='POST', body=(
                    json.dumps({
                        'server': {'name': 'his', 'imageRef': base.IMAGE,
                                   'flavorRef': '1', 'networks': 'none'},
                        'os:scheduler_hints': hints})))
                self.assertIn(answer.status_code, (400, 403),
                              f'{which} {hints}: {answer.text}')
        self.assertEqual(before, self.rows())
