# SPDX-License-Identifier: Apache-2.0
"""The host API of a real nova-api."""

import json

from blazarclient.v1 import client as blazar_client
import requests

from blazar_core.capacity import enrollment
from blazar_core.common import clocks
from blazar_nova.schemas import host_schema
from tests.functional import api_base
from tests.functional import test_api

HOUR = test_api.HOUR
TRAIT = 'CUSTOM_BLAZAR_POOL'


class HostsTestCase(api_base.ApiTestCase):

    def hosts_api(self, method, path='', body=None, code=200, client=None,
                  **query):
        """Send a request to the host API, by default as an admin."""
        return self.ask(method, f'/os-hosts{path}', body,
                        client or self.admin, code, **query)

    def enrol(self, name, **extra):
        return self.hosts_api('POST', body={'name': name, **extra},
                              code=201)['host']

    def refusal(self, code, method, path='', body=None, **query):
        """Return the message with which a request is refused."""
        answer = self.hosts_api(method, path, body, code, **query)
        self.assertEqual(code, answer['error_code'])
        return answer['error_message']

    def raw(self, method, path, body):
        """Return code and answer for a body that need not be JSON."""
        url = self.admin.base_url.rsplit('/v2', 1)[0]
        answer = requests.request(
            method, f'{url}/reservation/v1{path}', data=body, headers={
                'X-Auth-Token': self.admin.who.token(),
                'Content-Type': 'application/json'})
        return answer.status_code, answer.json()

    def traits(self, name):
        provider, = self.placement.get(
            f'/resource_providers?name={name}').body['resource_providers']
        return self.placement.get(
            f'/resource_providers/{provider["uuid"]}/traits',
            version='1.6').body['traits']

    def reserve(self, code=201, **more):
        """Lease one whole host, an hour from now."""
        self.run_sync()
        return self.make(start_in=HOUR, code=code, reservations=[
            {'resource_type': 'physical:host', 'min': 1, 'max': 1, **more}])


class TestHosts(HostsTestCase):

    def test_host_is_enrolled_updated_and_removed(self):
        made = self.enrol('host1', gpu='A100', ssd=True, rack=7, height=1.5)
        self.assertEqual(
            {'hypervisor_hostname': 'host1', 'service_name': 'host1',
             'hypervisor_type': 'fake', 'vcpus': 4, 'memory_mb': 8192,
             'local_gb': 100, 'reservable': True, 'trust_id': None,
             'status': 'enrolled', 'cpu_info': '', 'availability_zone': '',
             'gpu': 'A100', 'ssd': 'True', 'rack': '7', 'height': '1.5'},
            {key: value for key, value in made.items()
             if key not in ('id', 'hypervisor_version', 'created_at',
                            'updated_at')})
        self.assertLessEqual({*host_schema.FIELDS}, made.keys())
        self.assertRegex(made['id'], '^[0-9]+$')
        self.assertIn(TRAIT, self.traits('host1'))
        path = f'/{made["id"]}'
        self.assertEqual({'host': made}, self.hosts_api('GET', path))
        self.assertEqual({'hosts': [made]}, self.hosts_api('GET'))
        changed = self.hosts_api('PUT', path, {
            'gpu': 'H100', 'ssd': None, 'fpga': 'no', 'nothing': None,
            'reservable': 'False'})['host']
        del made['ssd']
        self.assertEqual({**made, 'gpu': 'H100', 'fpga': 'no',
                          'reservable': False}, changed)
        self.assertEqual({'host': changed}, self.hosts_api('GET', path))
        self.assertIsNone(self.hosts_api('DELETE', path, code=204))
        self.assertEqual({'hosts': []}, self.hosts_api('GET'))
        self.assertNotIn(TRAIT, self.traits('host1'))
        for method in ('GET', 'PUT', 'DELETE'):
            self.assertEqual(
                f'Host {made["id"]} could not be found.',
                self.refusal(404, method, path, {'gpu': 'A100'}))
        # Enroll it once more: its former properties are gone.
        self.assertNotIn('gpu', self.enrol('host1'))

    def test_update_changes_whether_host_is_reservable(self):
        path = f'/{self.enrol("host1")["id"]}'
        for said, reservable in ((False, False), ('True', True), ('0', False),
                                 (True, True), (None, True)):
            self.assertIs(reservable, self.hosts_api(
                'PUT', path, {'reservable': said})['host']['reservable'])
        self.hosts_api('PUT', path, {'reservable': False})
        self.reserve(code=409)
        self.hosts_api('PUT', path, {'reservable': 'true'})
        self.reserve()

    def test_host_list_is_paged(self):
        # Hosts are listed in the order in which the listener has found them.
        hosts = sorted((self.enrol('host1'), self.enrol('host2')),
                       key=lambda host: int(host['id']))
        self.assertEqual({'hosts': hosts}, self.hosts_api('GET'))
        self.assertEqual({'hosts': hosts}, self.hosts_api('GET', limit=2))
        page = self.hosts_api('GET', limit=1)
        self.assertEqual(hosts[:1], page['hosts'])
        link, = page['hosts_links']
        self.assertEqual('next', link['rel'])
        self.assertEqual({'hosts': hosts[1:]}, requests.get(
            link['href'], headers={
                'X-Auth-Token': self.admin.who.token()}).json())
        self.assertEqual({'hosts': []}, self.hosts_api(
            'GET', marker=hosts[1]['id']))

    def test_host_api_works_with_blazarclient(self):
        url = self.admin.base_url.rsplit('/v2', 1)[0] + '/reservation/v1'
        client = blazar_client.Client(
            blazar_url=url, auth_token=self.admin.who.token())
        made = client.host.create('host1', gpu='A100')
        self.assertEqual(made, client.host.get(made['id']))
        self.assertEqual([made], client.host.list(
            sort_by='hypervisor_hostname'))
        changed = client.host.update(made['id'], values={'gpu': None,
                                                         'rack': '7'})
        self.assertEqual({**{key: value for key, value in made.items()
                             if key != 'gpu'}, 'rack': '7'}, changed)
        self.assertEqual(
            {'resource_id': made['id'], 'reservations': []},
            client.allocation.get('os-hosts', made['id']))
        self.assertEqual(
            [{'resource_id': made['id'], 'reservations': []}],
            client.allocation.list('os-hosts', sort_by='resource_id'))
        self.assertEqual({'property': 'rack', 'private': False,
                          'property_values': ['7']},
                         client.host.get_property('rack'))
        client.host.set_property('rack', private=True)
        self.assertEqual([], client.host.list_properties())
        self.assertEqual([{'property': 'rack', 'private': True}],
                         client.host.list_properties(all=True))
        client.host.delete(made['id'])
        self.assertEqual([], client.host.list())


class TestRefusals(HostsTestCase):

    def test_unknown_host_is_not_found(self):
        self.assertIn('There is no host host9. Write the name of a '
                      'hypervisor', self.refusal(
                          404, 'POST', body={'name': 'host9'}))
        for path in ('/0', '/999999999999999999', '/' + '9' * 19,
                     '/' + '9' * 5000, '/-1', '/1.0', '/host1', '/%d9%a1',
                     '/%ff', '/%00', '/1%00', '/1%0a'):
            for method in ('GET', 'PUT', 'DELETE'):
                self.refusal(404, method, path, {'gpu': 'A100'})
            self.refusal(404, 'GET', f'{path}/allocation')

    def test_enrolled_host_cannot_be_enrolled_again(self):
        made = self.enrol('host1', gpu='A100')
        self.assertEqual(
            f'Host host1 is enrolled already: its id is {made["id"]}.',
            self.refusal(409, 'POST', body={'name': 'host1', 'gpu': 'B'}))
        self.assertEqual({'hosts': [made]}, self.hosts_api('GET'))

    def test_host_with_servers_cannot_be_enrolled(self):
        server = self.boot_active('server1')
        host = self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']
        self.assertIn(f'Host {host} cannot be enrolled: it has 1 server.',
                      self.refusal(409, 'POST', body={'name': host}))
        self.assertEqual({'hosts': []}, self.hosts_api('GET'))
        self.assertNotIn(TRAIT, self.traits(host))

    def test_booked_host_cannot_be_enrolled(self):
        for _host in self.hosts:
            self.make(start_in=HOUR, reservations=[self.reservation(vcpus=4)])
        self.assertIn('cannot be enrolled: it has 1 booking of leases',
                      self.refusal(409, 'POST', body={'name': 'host1'}))
        self.assertEqual({'hosts': []}, self.hosts_api('GET'))

    def test_reserved_host_cannot_be_removed(self):
        made = self.enrol('host1')
        lease = self.reserve()
        self.assertIn('cannot be taken out: it has 1 booking of leases',
                      self.refusal(409, 'DELETE', f'/{made["id"]}'))
        self.assertEqual({'hosts': [made]}, self.hosts_api('GET'))
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.hosts_api('DELETE', f'/{made["id"]}', code=204)

    def test_enrollment_requires_isolated_aggregate_filtering(self):
        self.flags(enable_isolated_aggregate_filtering=False,
                   group='scheduler')
        self.assertIn('Write enable_isolated_aggregate_filtering = True',
                      self.refusal(409, 'POST', body={'name': 'host1'}))
        self.assertEqual({'hosts': []}, self.hosts_api('GET'))

    def test_host_api_permissions_by_role(self):
        made = self.enrol('host1', gpu='A100')
        reader = self.api(user='carol', roles=('reader',))
        nobody = self.api(user='dave', roles=())
        for method, path, of_reader in (
                ('GET', '', 200), ('POST', '', 403),
                ('GET', f'/{made["id"]}', 403),
                ('PUT', f'/{made["id"]}', 403),
                ('DELETE', f'/{made["id"]}', 403),
                ('GET', '/999', 403), ('DELETE', '/999', 403),
                ('GET', '/allocations', 403),
                ('GET', f'/{made["id"]}/allocation', 403),
                ('GET', '/properties', 200),
                ('PATCH', '/properties/gpu', 403)):
            for client, code in ((reader, of_reader), (nobody, 403),
                                 (self.alice, of_reader)):
                answer = self.hosts_api(method, path, {}, code, client)
                if code == 403:
                    self.assertEqual('FORBIDDEN', answer['error_name'])
        self.assertEqual({'hosts': [made]}, self.hosts_api('GET'))

    def test_members_cannot_see_host_names_and_private_properties(self):
        made = self.enrol('host1', gpu='A100', rack='7')
        self.hosts_api('PATCH', '/properties/rack', {'private': True})
        self.assertEqual('host1', made['hypervisor_hostname'])
        del made['rack']
        made.update(hypervisor_hostname=None, service_name=None)
        self.assertEqual({'hosts': [made]}, self.hosts_api(
            'GET', client=self.alice))

    def test_power_state_is_shown_if_power_management_is_enabled(self):
        self.flags(group='blazar_power', enabled=True)
        made = self.enrol('host1')
        power = {'power_state': 'on', 'power_since': None,
                 'power_until': None}
        self.assertLessEqual(power.items(), made.items())
        for host in (self.hosts_api('GET', f'/{made["id"]}')['host'],
                     self.hosts_api('PUT', f'/{made["id"]}', {
                         'reservable': True})['host'],
                     *self.hosts_api('GET')['hosts']):
            self.assertEqual(made, host)
        hidden, = self.hosts_api('GET', client=self.alice)['hosts']
        self.assertEqual({None}, {hidden[key] for key in power})
        self.flags(group='blazar_power', enabled=False)
        self.assertEqual(made.keys() - power.keys(), self.hosts_api(
            'GET', f'/{made["id"]}')['host'].keys())

    def test_unsupported_methods_answer_405(self):
        for method, path, allowed in (
                ('PATCH', '', 'GET, POST'), ('POST', '/1', 'GET, PUT'),
                ('POST', '/allocations', 'GET'), ('PUT', '/1/allocation',
                                                  'GET'),
                ('POST', '/properties', 'GET'),
                ('GET', '/properties/gpu', 'PATCH')):
            self.assertIn(f'Use one of {allowed}', self.refusal(
                405, method, path, {}))


class TestBadInput(HostsTestCase):

    def setUp(self):
        super().setUp()
        self.made = self.enrol('host1', gpu='A100')
        self.path = f'/{self.made["id"]}'

    def assert_unchanged(self):
        self.assertEqual({'hosts': [self.made]}, self.hosts_api('GET'))
        self.assertEqual([False], [
            one['private'] for one in self.hosts_api(
                'GET', '/properties', all='true')['resource_properties']])

    def test_invalid_extra_capabilities_are_refused(self):
        for extra, words in (
                ({'vcpus': '8'}, '"vcpus" is no extra capability'),
                ({'id': '8'}, '"id" is no extra capability'),
                ({'k' * 65: '1'}, 'Extra capability key too long'),
                ({'': '1'}, 'cannot be the key'),
                ({'a b': '1'}, 'without blanks'),
                ({'a\x00': '1'}, '"a?" cannot be the key'),
                ({'\ud800': '1'}, 'cannot be the key'),
                ({'$gpu': '1'}, 'without "$"'),
                ({'fpga': {'a': 'b'}}, '"fpga" is an object. Write a text'),
                ({'fpga': ['a']}, '"fpga" is a list'),
                ({'fpga': 'x' * 1025}, 'at most 1024 printable'),
                ({'fpga': 'a\x00'}, 'printable'),
                ({'fpga': '\ud800'}, 'printable'),
                ({'fpga': int('9' * 4000)}, 'at most 1024'),
                ({'fpga': float('nan')}, '"fpga" is a number without an end')):
            for method, path, body in (
                    ('POST', '/os-hosts', {'name': 'host2', **extra}),
                    ('PUT', f'/os-hosts{self.path}', extra)):
                code, answer = self.raw(method, path, json.dumps(body))
                self.assertEqual((400, 'INVALID_REQUEST'), (
                    code, answer['error_name']), extra)
                self.assertIn(words, answer['error_message'])
        self.assert_unchanged()

    def test_invalid_bodies_are_refused(self):
        for body, words in (
                (b'', 'is not JSON'), (b'{', 'is not JSON'),
                (b'\xff', 'is not JSON'), (b'[' * 100000, 'is not JSON'),
                (b'{"a": ' + b'9' * 5000 + b'}', 'is not JSON'),
                (b'null', 'is null. Write a JSON object'),
                (b'[{}]', 'is a list. Write a JSON object'),
                (b'"name"', 'is a string. Write a JSON object')):
            for method, path in (
                    ('POST', '/os-hosts'), ('PUT', f'/os-hosts{self.path}'),
                    ('PATCH', '/os-hosts/properties/gpu')):
                code, answer = self.raw(method, path, body)
                self.assertEqual(400, code, (method, body[:40]))
                self.assertIn(words, answer['error_message'])
        self.assert_unchanged()

    def test_invalid_host_names_are_refused(self):
        for body, words in (
                ({}, 'Missing parameter name'),
                ({'name': None}, 'Missing parameter name'),
                *(({'name': name}, '"name" must be a text') for name in (
                    '', ' ', 'a\x00', 'x' * 256, 7, ['host2'], {}, True)),
                ({'name': 'host2', 'reservable': True}, '"reservable"')):
            self.assertIn(words, self.refusal(400, 'POST', body=body))
        self.assert_unchanged()

    def test_invalid_host_updates_are_refused(self):
        for body, words in (
                ({}, 'says nothing of the host'),
                ({'name': 'host2'}, '"name" is no extra capability'),
                ({'values': {'gpu': 'B'}}, '"values" is an object'),
                ({'reservable': 'perhaps'}, 'Write true or false'),
                ({'reservable': 2, 'gpu': 'B'}, 'Write true or false'),
                ({'reservable': []}, '"reservable" is a list')):
            self.assertIn(words, self.refusal(400, 'PUT', self.path, body))
        self.assert_unchanged()

    def test_invalid_property_updates_are_refused(self):
        for body, words in (
                ({}, 'Missing parameter private'),
                ({'private': None}, 'Missing parameter private'),
                ({'private': 'perhaps'}, 'Write true or false'),
                ({'private': 1}, 'Write true or false'),
                ({'private': True, 'public': False}, 'is not known')):
            self.assertIn(words, self.refusal(
                400, 'PATCH', '/properties/gpu', body))
        for name in ('fpga', 'vcpus', 'x' * 5000, '%00', '%ff', 'a/b',
                     'gpu%0a'):
            self.refusal(404, 'PATCH', f'/properties/{name}',
                         {'private': True})
        self.assert_unchanged()

    def test_invalid_queries_are_refused(self):
        for path, query in (
                ('', {'limit': '0'}), ('', {'limit': '1001'}),
                ('', {'limit': 'x'}), ('', {'marker': '-1'}),
                ('', {'marker': 'host1'}), ('', {'marker': '9' * 30}),
                ('', {'colour': 'red'}), ('', {'limit': ['1', '2']}),
                ('/allocations', {'terminated': 'true'}),
                ('/allocations', {'lease_id': 'a\x00'}),
                (f'{self.path}/allocation', {'id': 'x'}),
                ('/properties', {'detail': 'perhaps'}),
                ('/properties', {'all': ''}),
                ('/properties', {'private': 'true'})):
            self.refusal(400, 'GET', path, **query)

    def test_number_of_extra_capabilities_is_limited(self):
        most = enrollment.MAX_EXTRA
        many = {f'k{number}': 'x' for number in range(most)}
        for method, path, body in (
                ('POST', '', {'name': 'host2', 'one': '1', **many}),
                ('PUT', self.path, many)):
            self.assertIn(f'would have {most + 1} extra capabilities. Write '
                          f'at most {most}',
                          self.refusal(400, method, path, body))
        self.assert_unchanged()
        self.assertLessEqual(many.items(), self.hosts_api(
            'PUT', self.path, {'gpu': None, **many})['host'].items())


class TestAllocations(HostsTestCase):

    def test_allocations_of_all_hosts_and_of_one_host(self):
        hosts = [self.enrol(name) for name in self.hosts]
        # The order of the reservations does not matter.
        lease, other = self.reserve(), self.reserve()
        told = self.hosts_api('GET', '/allocations')['allocations']
        self.assertEqual(sorted(host['id'] for host in hosts),
                         [one['resource_id'] for one in told])
        found = [one for host in told for one in host['reservations']]
        self.assertEqual(
            sorted(({'id': one['reservations'][0]['id'],
                     'lease_id': one['id'],
                     'start_date': clocks.iso(self.began + HOUR),
                     'end_date': clocks.iso(self.began + 2 * HOUR)}
                    for one in (lease, other)), key=str),
            sorted(found, key=str))
        for host in told:
            self.assertEqual({'allocation': host}, self.hosts_api(
                'GET', f'/{host["resource_id"]}/allocation'))
        for key, value in (('lease_id', lease['id']),
                           ('reservation_id',
                            lease['reservations'][0]['id'])):
            self.assertEqual(
                {'allocations': [
                    {**host, 'reservations': [
                        one for one in host['reservations']
                        if one['lease_id'] == lease['id']]}
                    for host in told]},
                self.hosts_api('GET', '/allocations', **{key: value}))
        mine, = (host for host in told
                 if host['reservations'][0]['lease_id'] == lease['id'])
        self.assertEqual([], self.hosts_api(
            'GET', f'/{mine["resource_id"]}/allocation',
            lease_id=other['id'])['allocation']['reservations'])
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual(
            {'allocation': {**mine, 'reservations': []}},
            self.hosts_api('GET', f'/{mine["resource_id"]}/allocation'))

    def test_bookings_of_unenrolled_hosts_are_not_listed(self):
        self.make(start_in=HOUR)
        self.assertEqual({'allocations': []},
                         self.hosts_api('GET', '/allocations'))


class TestProperties(HostsTestCase):

    def setUp(self):
        super().setUp()
        self.enrol('host1', gpu='A100', **{'a/b': '1'})
        self.enrol('host2', gpu='H100')

    def properties(self, client=None, **query):
        return self.hosts_api('GET', '/properties', client=client,
                              **query)['resource_properties']

    def test_property_list_has_values_on_request(self):
        self.assertEqual([{'property': 'a/b', 'private': False},
                          {'property': 'gpu', 'private': False}],
                         self.properties(client=self.alice))
        self.assertEqual(
            [{'property': 'a/b', 'private': False, 'values': ['1']},
             {'property': 'gpu', 'private': False,
              'values': ['A100', 'H100']}], self.properties(detail='True'))

    def test_private_properties_are_listed_for_admins_on_request(self):
        for name, public in (('gpu', 'a/b'), ('a/b', None)):
            found = self.hosts_api('PATCH', f'/properties/{name}',
                                   {'private': True})['resource_property']
            self.assertEqual(
                (name, name, True, 'physical:host'), tuple(
                    found[key] for key in (
                        'property', 'property_name', 'private',
                        'resource_type')))
            for client in (self.admin, self.alice):
                self.assertEqual([public] if public else [], [
                    one['property'] for one in self.properties(client)])
        self.assertEqual([], self.properties(self.alice, all='True'))
        self.assertEqual([('a/b', True), ('gpu', True)], [
            (one['property'], one['private'])
            for one in self.properties(all='True')])
        self.hosts_api('PATCH', '/properties/gpu', {'private': 'False'})
        self.assertEqual([{'property': 'gpu', 'private': False}],
                         self.properties(self.alice))

    def test_reservations_cannot_require_private_properties(self):
        wanted = '["=", "$gpu", "H100"]'
        self.hosts_api('PATCH', '/properties/gpu', {'private': True})
        refused = self.reserve(code=400, resource_properties=wanted)
        self.assertIn('"$gpu" is not a host property that reservations can '
                      'ask for',
                      refused['error_message'])
        self.hosts_api('PATCH', '/properties/gpu', {'private': False})
        lease = self.reserve(resource_properties=wanted)
        self.assertEqual([['host2']], [[*one] for one in self.query(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id JOIN reservations '
            'ON reservations.id = bookings.reservation_id '
            f"WHERE lease_id = '{lease['id']}'")])


class TestDisabledHosts(HostsTestCase):
    """A lease for later is judged by the expected state of the hosts."""

    def test_disabled_hosts_are_treated_alike_by_all_resource_types(self):
        self.enrol('host1')
        for name in self.hosts:
            service, = self.admin.get_services('nova-compute', name)
            self.admin.put_service(service['id'], {'status': 'disabled'})
        self.run_sync()
        asked = ({'reservations': [self.reservation()]},
                 {'reservations': [{'resource_type': 'flavor:instance',
                                    'flavor_id': '1'}]},
                 {'reservations': [{'resource_type': 'physical:host',
                                    'min': 1, 'max': 1}]})
        for start_in, code in ((None, 409), (HOUR // 2, 409), (3 * HOUR, 201)):
            for body in asked:
                self.make(start_in, code=code, **body)
            self.assertEqual(code == 201, self.ask(
                'GET', '/availability', vcpus='1', memory_mb='64',
                disk_gb='1', start_date=self.at(start_in or HOUR // 2),
                code=200)['availability'][0]['enough'])
        self.refused(409, self.boot, 'soon', hints=self.lease_hints(
            'soon', HOUR // 2))
        self.boot('later', hints=self.lease_hints('later', 3 * HOUR))
        # A lease that is retried may wait until an operator enables them.
        self.boot('waits', hints=self.lease_hints(
            'waits', lease_type='retry'))
        self.assertEqual(['WAITING'] * 4, [
            self.lease('waits')['status'], *(self.make(
                lease_type='retry', **body)['status'] for body in asked)])
