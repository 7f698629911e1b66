# SPDX-License-Identifier: Apache-2.0

"""Clients that cannot be run here: their requests, and their parsers."""

import datetime
import json

from blazarclient import exception as blazar_exception
from blazarclient.v1 import client as blazar_client
import requests

from blazar_core.common import clocks
from tests.functional import shapes
from tests.functional import test_hosts_api
from tests.unit.blazar_nova import test_budget_service

HOUR = 3600
MINUTE = datetime.timedelta(minutes=1)
NANO = {'resource_type': 'virtual:instance', 'amount': 1, 'vcpus': 1,
        'memory_mb': 512, 'disk_gb': 1, 'resource_properties': ''}


class ClientsTestCase(test_hosts_api.HostsTestCase):

    def blazar(self, client):
        """Return a python-blazarclient with a user's token."""
        return blazar_client.Client(
            blazar_url=client.base_url.rsplit('/v2', 1)[0] +
            '/reservation/v1', auth_token=client.who.token())

    def at_time(self, when):
        """Return a date as gophercloud writes it."""
        return when.strftime('%Y-%m-%d %H:%M')


class GophercloudTest(ClientsTestCase):
    """openstack/reservation/v1, and the checks of its acceptance tests."""

    def lease(self, method, path='', body=None, code=200):
        return shapes.decoded(shapes.LEASE, self.ask(
            method, f'/leases{path}', body, self.admin, code)['lease'],
            'lease')

    def create(self, **reservation):
        start = datetime.datetime.now(datetime.UTC).replace(
            second=0, microsecond=0, tzinfo=None) + MINUTE
        lease = self.lease('POST', body={
            'name': 'ACPTTEST', 'start_date': self.at_time(start),
            'end_date': self.at_time(start + 60 * MINUTE),
            'reservations': [reservation]}, code=201)
        self.assertEqual((start, start + 60 * MINUTE), (
            lease['start_date'], lease['end_date']))
        return lease, lease['reservations'][0]

    def test_leases_of_each_type(self):
        self.enrol('host1', gpu='a100')
        self.run_sync()
        lease, reservation = self.create(
            resource_type='physical:host', min=1, max=1,
            hypervisor_properties='', resource_properties='')
        self.assertEqual(
            ('physical:host', lease['id'], False, 1, 1, None), tuple(
                reservation[key] for key in (
                    'resource_type', 'lease_id', 'missing_resources', 'min',
                    'max', 'vcpus')))
        # gophercloud follows no links.
        answer = self.ask('GET', '/leases', client=self.admin, code=200)
        self.assertEqual([lease], shapes.decoded(
            [shapes.LEASE], answer['leases']))
        changes = {'start_date': lease['start_date'] + 10 * MINUTE,
                   'end_date': lease['end_date'] + 60 * MINUTE,
                   'before_end_date': lease['end_date'] + 30 * MINUTE}
        updated = self.lease('PUT', f'/{lease["id"]}', {
            'name': 'new', **{key: self.at_time(when)
                              for key, when in changes.items()}})
        self.assertEqual(
            ('new', changes['start_date'], changes['end_date']), tuple(
                updated[key] for key in ('name', 'start_date', 'end_date')))
        self.assertEqual(list(changes.values()), [
            event['time'] for kind in ('start', 'end', 'before_end')
            for event in updated['events']
            if event['event_type'] == f'{kind}_lease'])
        lease, reservation = self.create(**NANO, affinity=False)
        self.assertEqual(
            (1, 1, 512, 1, False, reservation['id'], None, None), tuple(
                reservation[key] for key in (
                    'amount', 'vcpus', 'memory_mb', 'disk_gb', 'affinity',
                    'flavor_id', 'min', 'max')))
        self.assertIsNotNone(reservation['server_group_id'])
        self.assertIsNotNone(reservation['aggregate_id'])
        self.lease('PUT', f'/{lease["id"]}', {'reservations': [
            {'id': reservation['id'], 'memory_mb': 1024}]})
        self.assertEqual(1024, self.lease(
            'GET', f'/{lease["id"]}')['reservations'][0]['memory_mb'])
        lease, reservation = self.create(
            resource_type='flavor:instance', amount=1, flavor_id='1',
            affinity=None)
        self.assertEqual((1, 1, 512, 1, None, reservation['id']), tuple(
            reservation[key] for key in (
                'amount', 'vcpus', 'memory_mb', 'disk_gb', 'affinity',
                'flavor_id')))

    def host(self, method, path='', body=None, code=200):
        """Return a host, and its extra capabilities: the remaining keys."""
        host = self.hosts_api(method, path, body, code)['host']
        return shapes.decoded(shapes.HOST, host, 'host'), {
            key: value for key, value in host.items()
            if key not in shapes.HOST}

    def test_hosts_their_allocations_and_properties(self):
        host, extra = self.host(
            'POST', body={'name': 'host1', 'gpu': 'a100'}, code=201)
        self.assertEqual(('host1', {'gpu': 'a100'}), (
            host['hypervisor_hostname'], extra))
        path = f'/{host["id"]}'
        self.assertEqual((host, extra), self.host('GET', path))
        self.assertEqual([host], shapes.decoded(
            [shapes.HOST], self.hosts_api('GET')['hosts']))
        self.assertEqual({'gpu': 'h100'}, self.host(
            'PUT', path, {'gpu': 'h100'})[1])
        self.run_sync()
        lease, reservation = self.create(
            resource_type='physical:host', min=1, max=1,
            hypervisor_properties='', resource_properties='')
        held, = shapes.decoded([shapes.ALLOCATION], self.hosts_api(
            'GET', '/allocations', lease_id=lease['id'])['allocations'])
        self.assertEqual(held, shapes.decoded(
            shapes.ALLOCATION, self.hosts_api(
                'GET', f'{path}/allocation',
                reservation_id=reservation['id'])['allocation']))
        self.assertEqual({'resource_id': host['id'], 'reservations': [{
            'id': reservation['id'], 'lease_id': lease['id'],
            'start_date': lease['start_date'],
            'end_date': lease['end_date']}]}, held)
        self.assertEqual(
            [{'property': 'gpu', 'private': False, 'values': ['h100']}],
            shapes.decoded([shapes.PROPERTY], self.hosts_api(
                'GET', '/properties', detail='true', all='true')[
                    'resource_properties']))
        changed = shapes.decoded(shapes.PROPERTY_CHANGED, self.hosts_api(
            'PATCH', '/properties/gpu', {'private': True})[
                'resource_property'])
        self.assertEqual(('gpu', True), (
            changed['property_name'], changed['private']))
        self.assertEqual([], self.hosts_api('GET', '/properties')[
            'resource_properties'])
        self.ask('DELETE', f'/leases/{lease["id"]}', client=self.admin,
                 code=204)
        self.assertEqual({}, self.host('PUT', path, {'gpu': None})[1])
        self.hosts_api('DELETE', path, code=204)


class ChiTest(ClientsTestCase):
    """python-chi: the notebooks of Chameleon's users."""

    def setUp(self):
        super().setUp()
        self.chi = shapes.Chi(self.blazar(self.alice))
        self.operator = shapes.Chi(self.blazar(self.admin))
        for number, name in enumerate(self.hosts, 1):
            self.operator.blazar.host.create(name, **{
                'node_type': 'compute_skylake', 'node_name': f'c{number}',
                'architecture.smt_size': 48})
        self.run_sync()

    def submit(self, *reservations, start='now', end=2 * HOUR,
               name='notebook'):
        return self.chi.read(self.chi.blazar.lease.create(
            name=name, start=start, end=self.at(end),
            reservations=list(reservations), events=[]))

    def test_lease_of_nodes_and_boot_of_server(self):
        made = self.submit(self.chi.node_reservation(
            ['==', '$node_type', 'compute_skylake'],
            ['>', '$architecture.smt_size', 40]))
        self.run_until(clocks.SystemClock().now())
        lease = self.chi.named('notebook')
        self.assertEqual((made['id'], 'ACTIVE'), (
            lease['id'], lease['status']))
        # A name is only looked up if no lease has it as its id.
        self.assertEqual(404, self.assertRaises(
            blazar_exception.BlazarClientException,
            self.chi.blazar.lease.get, 'notebook').kwargs['code'])
        reservation_id = self.chi.node('notebook', 'compute_skylake')
        server = self.boot_active('node', hints={
            'reservation': reservation_id})
        used = server['OS-EXT-SRV-ATTR:host']
        other, = self.hosts.keys() - {used}
        start, end = self.operator.next_free(used)
        self.assertEqual((lease['end_date'], None), (start, end))
        # A node by its name, and one of any type.
        name = 'c1' if other == 'host1' else 'c2'
        self.submit(self.chi.node_reservation(['==', '$node_name', name]),
                    name='named', start=self.at(HOUR))
        self.assertEqual(self.date(HOUR), self.operator.next_free(
            other, hours=0)[1])
        self.submit(self.chi.node_reservation(), name='any',
                    start=self.at(60), end=HOUR)

    def date(self, seconds):
        return datetime.datetime.fromisoformat(self.at(seconds)).replace(
            tzinfo=datetime.UTC)

    def test_refusal_names_unsupported_reservation_type(self):
        refused = self.assertRaises(
            blazar_exception.BlazarClientException, self.submit,
            self.chi.node_reservation(), self.chi.network_reservation('net'))
        self.assertEqual(400, refused.kwargs['code'])
        self.assertIn('network', str(refused))
        self.assertEqual([], self.chi.blazar.lease.list())


class AzimuthTest(ClientsTestCase):
    """azimuth-schedule-operator: its requests over HTTP."""

    def raw_leases(self, method, body=None):
        return requests.request(
            method, self.alice.base_url.rsplit('/v2', 1)[0] +
            '/reservation/v1/leases', json=body, headers={
                'X-Auth-Token': self.alice.who.token(),
                'Content-Type': 'application/json',
                'X-OpenStack-Nova-API-Version': '2.61'})

    def create(self, amount):
        return self.raw_leases('POST', {
            'name': 'az-lease1', 'start_date': 'now',
            'end_date': self.at(HOUR), 'before_end_date': None, 'events': [],
            'reservations': [
                {'amount': amount, 'flavor_id': flavor_id,
                 'resource_type': 'flavor:instance', 'affinity': 'None'}
                for flavor_id in ('1', '2')]})

    def test_lease_of_several_flavors(self):
        answer = self.create(amount=1)
        self.assertEqual((201, 'application/json'), (
            answer.status_code, answer.headers['Content-Type']))
        self.run_until(clocks.SystemClock().now())
        answer = self.raw_leases('GET').json()
        lease, = (one for one in answer['leases']
                  if one['name'] == 'az-lease1')
        self.assertEqual('ACTIVE', lease['status'])
        sizes = shapes.size_map(lease)
        self.assertEqual(['1', '2'], sorted(sizes))
        flavors = {one['id']: one['name'] for one in self.alice.api_get(
            '/flavors').body['flavors']}
        for asked, reserved in sizes.items():
            self.assertEqual(f'reservation:{reserved}', flavors[reserved])
            self.assertIn(asked, flavors)

    def test_refusal_for_capacity_has_code_and_message(self):
        """It shows errors to its user only for 400 and 500."""
        answer = self.create(amount=50)
        self.assertEqual((409, 409), (
            answer.status_code, answer.json()['error_code']))
        self.assertIn('larger than the hosts', answer.json()['error_message'])


class WarreTest(ClientsTestCase):
    """warre, by which Nectar reserves flavors: one user for all projects."""

    def test_lease_from_creation_to_deletion(self):
        leases = self.blazar(self.alice).lease
        lease = leases.create(
            name='Reservation 4f1c', start=self.at(60),
            end=self.at(HOUR), events=[], reservations=[{
                **NANO, 'ephemeral_gb': 0, 'affinity': None,
                'resource_properties': None, 'extra_specs': {}}])
        flavor_id = lease['reservations'][0]['flavor_id']
        self.run_until(self.began + 60)
        # The query by which warre finds out that a reservation is in use.
        self.boot_active('used', flavor=flavor_id)
        servers = self.admin.api_get(
            f'/servers?all_tenants=True&flavor={flavor_id}').body['servers']
        self.assertEqual(['used'], [one['name'] for one in servers])
        leases.update(lease['id'], end_date=self.at(2 * HOUR)[:16])
        self.assertEqual(
            clocks.iso(self.began + 2 * HOUR)[:16],
            leases.get(lease['id'])['end_date'][:16])
        leases.delete(lease['id'])
        self.run_due()
        self.wait_for(lambda: not self.alice.get_servers())


class TerraformTest(ClientsTestCase):
    """openstack_compute_instance_v2; there is no resource for leases."""

    def servers(self, path):
        """Return servers as its microversion shows them."""
        return self.api(microversion=None).api_get(path).body

    def test_instance_with_lease_hints(self):
        """It treats every status but BUILD and ACTIVE as an error."""
        provider = self.api(microversion='2.37')
        made = self.boot('vm1', client=provider, config_drive=False,
                         hints=self.lease_hints(start_in=HOUR))
        server = shapes.decoded(shapes.SERVER, self.servers(
            f'/servers/{made["id"]}')['server'], 'server')
        self.assertEqual(('RESERVED', '1'), (
            server['status'], server['flavor']['id']))
        self.assertEqual([server], shapes.decoded(
            [shapes.SERVER], self.servers('/servers/detail')['servers']))
        now = self.boot('vm2', client=provider, config_drive=False,
                        hints=self.lease_hints())
        self.wait_for_status(now['id'], 'ACTIVE')

    def test_instance_with_flavor_of_lease(self):
        lease = self.make_active()
        flavor_id = lease['reservations'][0]['flavor_id']
        made = self.boot('vm1', flavor=flavor_id, config_drive=False,
                         client=self.api(microversion='2.37'))
        self.wait_for_status(made['id'], 'ACTIVE')
        server = shapes.decoded(shapes.SERVER, self.servers(
            f'/servers/{made["id"]}')['server'], 'server')
        # It reads the flavor after each change.
        self.assertEqual(f'reservation:{flavor_id}', self.servers(
            f'/flavors/{server["flavor"]["id"]}')['flavor']['name'])


class ServiceTestCase(ClientsTestCase):
    """A budget service that decides about leases."""

    options = ''

    def setUp(self):
        service = test_budget_service.Service()
        service.setUp()
        self.addCleanup(service.cleanUp)
        self.service = service
        self.more_conf = ('[blazar_enforcement]\n'
                          f'external_service_base_endpoint = {service.url}\n'
                          f'{self.options}')
        super().setUp()

    def asked(self, path):
        """Return the requests to the service since the last call."""
        asked, self.service.asked[:] = self.service.asked[:], []
        self.assertEqual({path}, {one[0] for one in asked})
        return [shapes.budget_request(body) for _path, _headers, body in asked]


class BudgetTest(ServiceTestCase):
    """A service that was written for Blazar gets all requests."""

    def test_budget_service_gets_all_requests(self):
        self.enrol('host1')
        self.run_sync()
        hosts = {'resource_type': 'physical:host', 'min': 1, 'max': 1,
                 'hypervisor_properties': '', 'resource_properties': ''}
        flavor = {'resource_type': 'flavor:instance', 'flavor_id': 1,
                  'amount': 1}
        for reservation in (hosts, flavor, *(
                {**one, 'affinity': affinity} for one in (NANO, flavor)
                for affinity in (None, 'None', True, 'False'))):
            lease = self.make(start_in=HOUR, reservations=[reservation])
            sent, = self.asked('/check-create')
            self.assertEqual(reservation['resource_type'], sent[
                'reservations'][0]['resource_type'])
            self.ask('PUT', f'/leases/{lease["id"]}', {
                'end_date': self.at(3 * HOUR)}, code=200)
            self.asked('/check-update')
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
            self.run_due()
            self.wait_for(lambda: self.service.asked,
                          what='the notification of the end')
            ended, = self.asked('/on-end')
            self.assertEqual(lease['id'], ended['id'])
        self.hold('vm1', count=2)
        sent, = self.asked('/check-create')
        self.assertEqual((2, 1, 512), tuple(
            sent['reservations'][0][key]
            for key in ('amount', 'vcpus', 'memory_mb')))

    def test_message_of_budget_service_reaches_user(self):
        self.service.answer = (403, {}, json.dumps(
            {'message': 'Your budget is used up.'}))
        answer = self.make(start_in=HOUR, code=403)
        self.assertEqual('Your budget is used up.', answer['error_message'])
        self.assertIn('Your budget is used up.', self.refused(
            403, self.hold))


class CommitsTest(ServiceTestCase):
    """A service that decides, and then commits."""

    options = 'external_service_commits = True\n'

    def test_dry_run_is_checked_but_not_committed(self):
        body = {'name': 'asked', 'start_date': self.at(HOUR),
                'end_date': self.at(2 * HOUR), 'reservations': [NANO]}
        quote = self.ask('POST', '/leases', body, code=200, dry_run='true')
        self.assertTrue(quote['quote']['fits'])
        sent, = self.asked('/check-create')
        self.assertEqual({'VCPU': 1, 'MEMORY_MB': 512, 'DISK_GB': 1},
                         sent['resource_requests'])
        lease = self.ask('POST', '/leases', body, code=201)['lease']
        self.assertEqual(
            [('/check-create', None), ('/commit-create', lease['id'])],
            [(path, sent['lease'].get('id'))
             for path, _headers, sent in self.service.asked])
