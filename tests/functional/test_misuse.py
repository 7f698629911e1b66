# SPDX-License-Identifier: Apache-2.0

"""A member tries to use leased hosts of another project."""

import copy
import itertools

from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import uuidutils
import requests

from tests.functional import base
from tests.functional import whole_hosts_base

HINTS = ('os:scheduler_hints', 'OS-SCH-HNT:scheduler_hints')
#: Values that are no id and no integer of a database.
ODD = ('', '0', '-1', '01', '1e3', '1.5', 'NaN', 'null', "'", ' ', '%00',
       '%FF', '%D9%A1', '%F0%9F%98%80', '9223372036854775808', '9' * 40,
       'x' * 3000)


class TestMisuse(whole_hosts_base.HostsTestCase):
    """One leased host has a server; bob belongs to another project."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', rack='7')
        _lease, self.reservation_id = self.lease_hosts()
        self.mine = self.within('mine', self.reservation_id)['id']
        self.wait_for_status(self.mine, 'ACTIVE')

    def post(self, where, hints, **server):
        return self.bob.api_post('/servers', {'server': {
            'name': 'x', 'imageRef': base.IMAGE, 'flavorRef': '1',
            'networks': 'none', **server}, where: hints},
            check_response_status=None)

    def is_elsewhere(self, server_id):
        """Assert that it is on a host for all workloads, or on none."""
        server = self.wait_for(lambda: (
            found := self.admin.get_server(server_id))[
                'status'] in ('ACTIVE', 'ERROR') and found)
        self.assertNotEqual('host1', server['OS-EXT-SRV-ATTR:host'])
        self.admin.delete_server(server_id)
        self.wait_until_gone(server_id)

    def test_hint_for_reservation_of_other_project_is_refused(self):
        mine = self.reservation_id
        later = self.make(start_in=10 * 3600, client=self.bob, reservations=[
            self.hosts_wanted()])['reservations'][0]['id']
        for where, value, more in itertools.product(HINTS, (
                mine, mine.upper(), [mine], [mine, mine], [[mine]],
                {mine: mine}, None, '', f' {mine}', f'{mine} ', f'{mine}\n',
                f'{mine}\0', f'{{{mine}}}', f'urn:uuid:{mine}',
                mine.replace('-', ''), 1, True, 1.5, ['', mine],
                [None, mine], '\ud800', 'x' * 70000, f'blazar_{mine}',
                later, [later], uuids.none), (
                    {}, {'min_count': 2, 'max_count': 3})):
            answer = self.post(where, {'reservation': value}, **more)
            self.assertEqual(400, answer.status, (where, value))
        self.assertEqual(
            400, self.post(HINTS[0], {'Reservation': mine}).status)
        # Nova uses the first key, and so does the plugin.
        answer = self.bob.api_post('/servers', {
            'server': {'name': 'x', 'imageRef': base.IMAGE, 'flavorRef': '1',
                       'networks': 'none'},
            HINTS[0]: {'a': 'b'}, HINTS[1]: {'reservation': mine}})
        self.is_elsewhere(answer.body['server']['id'])

    def test_host_zone_and_metadata_do_not_give_access(self):
        for named in ({'host': 'host1'}, {'hypervisor_hostname': 'host1'},
                      {'availability_zone': 'nova:host1'},
                      {'availability_zone': 'nova::host1'},
                      {'availability_zone':
                       f'blazar_{self.reservation_id}:host1'}):
            self.assertEqual(403, self.post(HINTS[0], {}, **named).status)
        for values in ({'availability_zone': f'blazar_{self.reservation_id}'},
                       {'metadata': {
                           'blazar:host_reservation': self.reservation_id,
                           'trait:CUSTOM_BLAZAR_POOL': 'required'}}):
            answer = self.post(HINTS[0], {}, **values)
            self.is_elsewhere(answer.body['server']['id'])

    def test_image_with_reservation_traits_does_not_give_access(self):
        trait = f'trait:{self.trait_of(self.reservation_id)}'
        for asked in (('trait:CUSTOM_BLAZAR_POOL',),
                      ('trait:CUSTOM_BLAZAR_POOL', trait)):
            image = copy.deepcopy(self.glance.image1)
            image['id'] = uuidutils.generate_uuid()
            image['properties'].update(dict.fromkeys(asked, 'required'))
            self.glance.create(None, image)
            for client in (self.alice, self.bob):
                self.fails(self.boot('x', client=client, imageRef=image['id']))

    def test_unshelve_cannot_move_server_out_of_leased_hosts(self):
        """Not even by an admin, who may name a host."""
        self.alice.post_server_action(self.mine, {'shelve': None})
        self.wait_for_status(self.mine, 'SHELVED_OFFLOADED')
        for where in ({'host': 'plain'},
                      {'availability_zone': 'nova', 'host': 'plain'},
                      {'availability_zone': None, 'host': 'plain'}):
            self.admin.post_server_action(self.mine, {'unshelve': where})
            self.wait_for(lambda: self.admin.get_server(self.mine)[
                'OS-EXT-STS:task_state'] is None)
            self.assertEqual('SHELVED_OFFLOADED', self.admin.get_server(
                self.mine)['status'])
        self.alice.post_server_action(
            self.mine, {'unshelve': {'availability_zone': 'nova'}})
        self.wait_for_status(self.mine, 'ACTIVE')
        self.assertEqual('host1', self.host_of({'id': self.mine}))

    def asked(self, client, method, path, code, body=None):
        """Send a request; none may cause a server error."""
        url = client.base_url.rsplit('/v2', 1)[0] + '/reservation/v1' + path
        answer = requests.request(method, url, json=body, headers={
            'X-Auth-Token': client.who.token()})
        self.assertLess(answer.status_code, 500, (method, path[:80]))
        if code is not None:
            self.assertEqual(code, answer.status_code, (method, path[:80]))

    def test_host_api_is_for_admins_and_odd_values_cause_no_5xx(self):
        for method, path in (
                ('GET', '/os-hosts/1'), ('GET', '/os-hosts/allocations'),
                ('GET', '/os-hosts/1/allocation'),
                ('POST', '/os-hosts'), ('PUT', '/os-hosts/1'),
                ('DELETE', '/os-hosts/1'),
                ('PATCH', '/os-hosts/properties/rack')):
            self.asked(self.bob, method, path, 403, {'private': True})
        for one in ODD:
            for method, client in itertools.product(
                    ('GET', 'PUT', 'PATCH'), (self.bob, self.admin)):
                for path in ('/os-hosts/{}', '/os-hosts/{}/allocation',
                             '/os-hosts/properties/{}', '/leases/{}'):
                    self.asked(client, method, path.format(one), None,
                               None if method == 'GET' else {'rack': '1'})
            for path, key in itertools.product(
                    ('/os-hosts', '/os-hosts/allocations',
                     '/os-hosts/1/allocation', '/os-hosts/properties',
                     '/leases'),
                    ('limit', 'marker', 'sort_key', 'lease_id', 'status',
                     'reservation_id', 'detail', 'all', 'x')):
                self.asked(self.admin, 'GET', f'{path}?{key}={one}', None)
