# SPDX-License-Identifier: Apache-2.0

"""Floating IPs and networks in a real neutron, with the clients of both."""

import json
import time
import typing as ty
from urllib import parse

import requests

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests import stack

SUBNET = {'cidr': '203.0.113.0/24', 'gateway_ip': '203.0.113.1',
          'ip_version': 4, 'enable_dhcp': False, 'allocation_pools': [
              {'start': '203.0.113.128', 'end': '203.0.113.254'}]}
FIRST, SECOND = '203.0.113.10', '203.0.113.11'


class NeutronTest(lease_api.LeaseApiTestCase):

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(f'{base.folder()}-neutron')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, services=['neutron'])

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def setUp(self) -> None:
        super().setUp()
        # Neutron's first requests may arrive before its policy is read.
        self.network = self.wait_for(self.external, 'an external network')
        self.addCleanup(self.neutron, 'DELETE', f'/networks/{self.network}',
                        None, self.admin)
        self.subnet = self.create('subnet', client=self.admin,
                                  network_id=self.network, **SUBNET)
        self.ids = {}
        for tool, address in (('blazar floatingip-create', FIRST), (
                'openstack reservation floatingip create', SECOND)):
            self.ids[address] = self.typed(
                *tool.split(), self.network, address, user='admin')['id']
            self.addCleanup(self.run_client, 'blazar', 'floatingip-delete',
                            self.ids[address], user='admin')

    def external(self) -> str | None:
        answer = self.admin.request('POST', '/networks', {'network': {
            'name': 'public', 'router:external': True,
            'provider:network_type': 'flat',
            'provider:physical_network': 'public'}}, service='neutron')
        return answer.json()['network']['id'] if answer.ok else None

    def neutron(self, method: str, path: str, body: ty.Any = None,
                client: base.Client | None = None) -> ty.Any:
        return (client or self.demo)(method, path, body, service='neutron')

    def create(self, kind: str, client: base.Client | None = None,
               **values: ty.Any) -> str:
        """Create an object, and delete it when the test ends."""
        def ask() -> requests.Response | None:
            answer = (client or self.demo).request(
                'POST', f'/{kind}s', {kind: values}, service='neutron')
            # Neutron has no segments until one of its workers has read them.
            return None if answer.status_code == 503 else answer

        answer = self.wait_for(ask, f'a {kind}')
        self.assertEqual(201, answer.status_code, answer.text)
        made = answer.json()[kind]
        self.addCleanup(self.neutron, 'DELETE', f'/{kind}s/{made["id"]}', None,
                        client)
        return ty.cast(str, made['id'])

    def typed(self, *words: str, user: str = 'demo') -> ty.Any:
        """Return the output of a client's command."""
        done = self.run_client(*words, '-f', 'json', user=user)
        self.assertEqual(0, done.returncode, f'{words}: {done.stderr}')
        return json.loads(done.stdout[done.stdout.index(
            min(('[', '{'), key=lambda one: (
                done.stdout.find(one) + 1 or len(done.stdout)))):])

    def addresses(self, user: str = 'demo') -> set[str]:
        """Return the floating IPs that the members of a project see."""
        return {one['Floating IP Address'] for one in self.typed(
            'openstack', 'floating', 'ip', 'list', user=user)}

    def reserve(self, starts_in: float = 0, lasts: int = 600,
                **more: ty.Any) -> base.Json:
        return self.make(
            time.time() + starts_in, lasts=lasts, reservations=[{
                'resource_type': 'virtual:floatingip',
                'network_id': self.network, 'amount': 2, **more}])

    def attach(self, address: str) -> None:
        """Use a floating IP for a port in a network of the project."""
        network = self.create('network', name='private')
        subnet = self.create('subnet', network_id=network, ip_version=4,
                             cidr='10.0.0.0/24')
        router = self.create('router', external_gateway_info={
            'network_id': self.network})
        self.neutron('PUT', f'/routers/{router}/add_router_interface',
                     {'subnet_id': subnet})
        self.addCleanup(
            self.neutron, 'PUT', f'/routers/{router}/remove_router_interface',
            {'subnet_id': subnet})
        port = self.create('port', network_id=network)
        done = self.run_client('openstack', 'floating', 'ip', 'set',
                               '--port', port, address)
        self.assertEqual(0, done.returncode, done.stderr)

    def verify_finds_nothing(self) -> None:
        self.wait_for(lambda: self.verify().returncode == 0,
                      lambda: self.verify().stdout)

    def test_floating_ips_are_reserved_used_and_released(self) -> None:
        other = self.client('other')
        theirs = self.create('floatingip', client=other,
                             floating_network_id=self.network)
        done = self.run_client(
            'openstack', 'reservation', 'lease', 'create', 'web',
            '--start-date', base.date(time.time() + 60)[:16],
            '--end-date', base.date(time.time() + 3600)[:16], '--reservation',
            f'resource_type=virtual:floatingip,network_id={self.network},'
            f'amount=1,required_floatingips=["{SECOND}"]')
        self.assertEqual(0, done.returncode, done.stderr)
        lease = self.reserve(amount=1)
        self.wait_for_lease(lease['id'], 'ACTIVE')
        self.assertEqual({FIRST}, self.addresses())
        shown, = self.typed('openstack', 'floating', 'ip', 'list', '--tags',
                            'blazar', '--long')
        self.assertIn(f'reservation:{lease["reservations"][0]["id"]}',
                      shown['Tags'])
        self.attach(FIRST)
        self.assertEqual({one['floating_ip_address'] for one in self.typed(
            'openstack', 'reservation', 'floatingip', 'list')},
            {FIRST, SECOND})
        self.verify_finds_nothing()
        done = self.run_client('blazar', 'floatingip-delete',
                               self.ids[FIRST], user='admin')
        self.assertIn('ERROR', done.stderr)
        for found in self.leases().values():
            if found['status'] != 'TERMINATED':
                self.demo('DELETE', f'/leases/{found["id"]}',
                          service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED')
        self.assertEqual(set(), self.addresses())
        self.assertEqual(theirs, self.neutron('GET', '/floatingips', None,
                                              other)['floatingips'][0]['id'])
        self.verify_finds_nothing()

    def test_no_floating_ip_is_lost_by_crash(self) -> None:
        """Neutron fails when it is needed, and listeners are killed."""
        lease = self.reserve(5)
        self.cloud.kill('neutron')
        self.wait_for_lease(lease['id'], 'STARTING')
        self.restart_all()
        self.wait_for_lease(lease['id'], 'ACTIVE', 180)
        self.assertEqual({FIRST, SECOND}, self.addresses())
        self.cloud.kill('neutron')
        self.demo('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.restart_all()
        self.wait_for_lease(lease['id'], 'TERMINATED', 180)
        self.assertEqual(set(), self.addresses())
        self.verify_finds_nothing()

    def limit(self, **quota: int) -> None:
        """Limit the objects of the project until the test ends."""
        path = f'/quotas/{self.demo.project_id}'
        self.neutron('PUT', path, {'quota': quota}, self.admin)
        self.addCleanup(self.neutron, 'DELETE', path, None, self.admin)

    def refused(self, *reservations: base.Json) -> str:
        """Return the message about a lease beyond a quota."""
        answer = self.demo.request('POST', '/leases', self.body(
            time.time(), reservations=list(reservations)),
            service='reservation')
        self.assertEqual(403, answer.status_code, answer.text)
        return ty.cast(str, answer.json()['error_message'])

    def test_lease_is_within_quota_of_neutron(self) -> None:
        self.create('floatingip', floating_network_id=self.network)
        self.limit(floatingip=2)
        lease = self.reserve(amount=1)
        self.wait_for_lease(lease['id'], 'ACTIVE')
        self.assertIn(
            'Quota exceeded for floatingip: this lease asks for 1, and of the '
            '2 that the project may have, 2 are in use', self.refused({
                'resource_type': 'virtual:floatingip',
                'network_id': self.network, 'amount': 1}))
        later = self.reserve(3600, amount=1)
        for one in (lease, later):
            self.demo('DELETE', f'/leases/{one["id"]}', service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED')

    def restart_all(self) -> None:
        for name in ('blazar-listener-1', 'blazar-listener-2'):
            self.cloud.kill(name)
        for name in ('neutron', 'blazar-listener-1', 'blazar-listener-2'):
            self.cloud.restart(name)

    def test_floating_ip_used_by_others_is_replaced(self) -> None:
        lease = self.reserve(60, amount=1, required_floatingips=[FIRST])
        self.create('floatingip', client=self.admin,
                    floating_network_id=self.network,
                    floating_ip_address=FIRST)
        self.wait_for(lambda: self.lease(lease['id'])['reservations'][0][
            'resources_changed'], 'another address', 60)
        self.wait_for_lease(lease['id'], 'ACTIVE', 120)
        self.assertEqual({SECOND}, self.addresses())
        self.demo('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED')

    def test_members_cannot_request_specific_addresses(self) -> None:
        answer = self.demo.request('POST', '/floatingips', {'floatingip': {
            'floating_network_id': self.network,
            'floating_ip_address': FIRST}}, service='neutron')
        self.assertEqual(403, answer.status_code)
        for client, code in ((self.demo, 403), (self.admin, 400)):
            answer = client.request('POST', '/floatingips', {
                'floating_network_id': self.network,
                'floating_ip_address': '203.0.113.200'},
                service='reservation')
            self.assertEqual(code, answer.status_code, answer.text)

    def test_network_is_reserved_used_and_deleted(self) -> None:
        name = 'network_segment_range'
        made = self.neutron('POST', f'/{name}s', {name: {
            'name': 'leases', 'shared': False, 'network_type': 'vlan',
            'project_id': self.client('nova').project_id,
            'physical_network': 'physnet1', 'minimum': 300, 'maximum': 300,
        }}, self.admin)[name]
        self.addCleanup(self.neutron, 'DELETE', f'/{name}s/{made["id"]}', None,
                        self.admin)
        wanted = [{'resource_type': 'virtual:network',
                   'physical_network': 'physnet1'}]

        def reserved() -> base.Json | None:
            answer = self.demo.request(
                'POST', '/leases', self.body(
                    time.time(), reservations=wanted), service='reservation')
            return answer.json()['lease'] if answer.ok else None

        lease = self.wait_for(reserved, 'the segment is known')
        self.wait_for_lease(lease['id'], 'ACTIVE')
        self.limit(network=1)
        self.assertIn('1 are in use', self.refused(*wanted))
        reservation_id = lease['reservations'][0]['id']
        shown = self.typed('openstack', 'network', 'show', reservation_id)
        self.assertEqual((reservation_id, self.demo.project_id),
                         (shown['name'], shown['project_id']))
        segment = self.neutron(
            'GET', f'/networks/{shown["id"]}', None, self.admin)['network']
        self.assertEqual(300, segment['provider:segmentation_id'])
        for text, count in ((segment['description'], 1), ('another', 0)):
            self.assertEqual(count, len(self.neutron(
                'GET', f'/networks?description={parse.quote(text)}', None,
                self.admin)['networks']))
        self.neutron('POST', '/subnets', {'subnet': {
            'network_id': shown['id'], 'ip_version': 4,
            'cidr': '10.0.0.0/24'}})
        server_id = self.boot(networks=[{'uuid': shown['id']}])['server']['id']
        self.assertIn('10.0.0.', json.dumps(
            self.wait_for_server(server_id)['addresses']))
        self.demo('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_for(lambda: 'has 1 port in use' in self.lease(lease['id'])[
            'status_reason'], 'what is in the way')
        self.delete(server_id)
        self.wait_for_lease(lease['id'], 'TERMINATED', 300)
        answer = self.admin.request('GET', f'/networks/{shown["id"]}',
                                    service='neutron')
        self.assertEqual(404, answer.status_code)
        self.verify_finds_nothing()
