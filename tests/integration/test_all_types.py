# SPDX-License-Identifier: Apache-2.0

"""One lease of hosts, addresses, a network, storage and a stack.

On a stack with neutron, cinder and Heat: it is reserved, started, extended,
used and ended, while a listener dies at each step. Afterwards all services
list what they listed before.
"""

import time
import typing as ty

from blazar_core.lifecycle import fault_points
from tests.integration import base
from tests.integration import test_crash
from tests.integration import test_hosts
from tests.integration import test_stacks
from tests import stack

Step = fault_points.FaultPoint

NETWORK = {'name': 'public', 'router:external': True,
           'provider:network_type': 'flat',
           'provider:physical_network': 'public'}
SUBNET = {'cidr': '203.0.113.0/24', 'gateway_ip': '203.0.113.1',
          'ip_version': 4, 'enable_dhcp': False, 'allocation_pools': [
              {'start': '203.0.113.128', 'end': '203.0.113.254'}]}
ADDRESSES = [f'203.0.113.{number}' for number in range(10, 14)]
RANGE = {'name': 'leases', 'shared': False, 'network_type': 'vlan',
         'physical_network': 'physnet1', 'minimum': 300, 'maximum': 300}
TEMPLATE = {
    **test_stacks.VERSION, 'resources': {
        'one': {'type': 'OS::Nova::Server', 'properties': {
            'flavor': 'm1.tiny', **test_stacks.SERVER}},
        'two': {'type': 'OS::Heat::ResourceGroup', 'properties': {
            'count': 2, 'resource_def': {
                'type': 'OS::Nova::Server', 'properties': {
                    'flavor': 'm1.nano', **test_stacks.SERVER}}}},
        'net': {'type': 'OS::Neutron::Net'},
        'subnet': {'type': 'OS::Neutron::Subnet', 'properties': {
            'network': {'get_resource': 'net'}, 'cidr': '10.9.0.0/24'}},
        'router': {'type': 'OS::Neutron::Router', 'properties': {
            'external_gateway_info': {'network': 'public'}}},
        'interface': {'type': 'OS::Neutron::RouterInterface', 'properties': {
            'router': {'get_resource': 'router'},
            'subnet': {'get_resource': 'subnet'}}},
        'port': {'type': 'OS::Neutron::Port', 'properties': {
            'network': {'get_resource': 'net'},
            'fixed_ips': [{'subnet': {'get_resource': 'subnet'}}]}},
        'address': {'type': 'OS::Neutron::FloatingIP', 'properties': {
            'floating_network': 'public',
            'port_id': {'get_resource': 'port'}}}},
    'outputs': {'address': {'value': {
        'get_attr': ['address', 'floating_ip_address']}}}}
#: The steps of a start and of an end of this lease, in their order. After
#: END_OVER, nothing is left to carry out.
STARTS = (Step.START_CLAIMED, Step.OPEN_HELD, Step.OPEN_OPENED,
          Step.START_CARRIED_OUT)
ENDS = (Step.END_CLAIMED, Step.END_BEGUN, Step.END_ASKED, Step.CLOSE_CLEANED,
        Step.CLOSE_CLOSED, Step.END_OVER)


class AllTypesTest(test_crash.CrashTestCase, test_hosts.HostsTestCase):

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(f'{base.folder()}-all')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=3,
                   services=['cinder', 'heat', 'neutron'])

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def setUp(self) -> None:
        super().setUp()
        for name in self.hosts()[:2]:
            self.enrol(name)
        network = self.wait_for(self.external, 'an external network')
        self.neutron('POST', '/subnets', {'subnet': {
            'network_id': network, **SUBNET}})
        for address in ADDRESSES:
            self.admin('POST', '/floatingips', {
                'floating_network_id': network,
                'floating_ip_address': address}, service='reservation')
        self.neutron('POST', '/network_segment_ranges', {
            'network_segment_range': {
                **RANGE, 'project_id': self.client('nova').project_id}})
        self.typed('volume', 'type', 'create', 'leases', '--private',
                   '--property', 'blazar:capacity_gb=100', '--property',
                   'volume_backend_name=ssd', user='admin')
        self.network = network

    def external(self) -> str | None:
        # Neutron's first requests may arrive before its policy is read.
        answer = self.admin.request('POST', '/networks', {'network': NETWORK},
                                    service='neutron')
        return answer.json()['network']['id'] if answer.ok else None

    def neutron(self, method: str, path: str, body: ty.Any = None) -> ty.Any:
        return self.admin(method, path, body, service='neutron')

    def typed(self, *words: str, user: str = 'demo') -> ty.Any:
        return self.openstack(*words, user=user)

    def listed(self) -> dict[str, ty.Any]:
        """What the services list, and placement has allocated."""
        found: dict[str, ty.Any] = {kind: sorted(
            one['id'] for one in self.neutron('GET', f'/{kind}')[kind])
            for kind in ('networks', 'subnets', 'routers', 'ports',
                         'floatingips')}
        found |= {kind: sorted(
            str(one['id']) for one in self.admin('GET', path)[kind])
            for kind, path in (
                ('servers', '/servers?all_tenants=1'),
                ('flavors', '/flavors?is_public=None'),
                ('aggregates', '/os-aggregates'),
                ('server_groups', '/os-server-groups?all_projects=1'))}
        found['volumes'] = self.typed(
            'volume', 'list', '--all-projects', user='admin')
        found['types'] = sorted(one['Name'] for one in self.typed(
            'volume', 'type', 'list', user='admin'))
        found['stacks'] = self.typed('stack', 'list')
        found['trusts'] = sorted(self.trusts())
        found['hosts'] = self.aggregates()
        found['usages'] = [self.admin(
            'GET', f'/resource_providers/{one["uuid"]}/usages',
            service='placement')['usages'] for one in self.admin(
                'GET', '/resource_providers', service='placement')[
                    'resource_providers']]
        return found

    def request(self) -> base.Json:
        now = time.time()
        return {'name': 'all', 'start_date': base.date(now + 20),
                'end_date': base.date(now + 900), 'reservations': [
                    {'resource_type': 'physical:host', 'min': 2, 'max': 2,
                     'hypervisor_properties': '', 'resource_properties': ''},
                    {'resource_type': 'virtual:floatingip', 'amount': 3,
                     'network_id': self.network},
                    {'resource_type': 'virtual:network',
                     'physical_network': 'physnet1'},
                    {'resource_type': 'virtual:volume', 'size': 100},
                    {'resource_type': 'virtual:stack', 'stack_name': 'all',
                     'floating_network_id': self.network,
                     'template': TEMPLATE}]}

    def shown(self, lease: base.Json) -> base.Json:
        return ty.cast(base.Json, self.demo(
            'GET', f'/leases/{lease["id"]}', service='reservation')['lease'])

    def fits(self) -> bool:
        answer = self.demo.request('POST', '/leases?dry_run=true',
                                   self.request(), service='reservation')
        return answer.ok and bool(answer.json()['quote']['fits'])

    def test_lease_of_all_types_survives_death_at_each_step(self) -> None:
        self.wait_for(self.fits, 'all that is enrolled')
        before = self.listed()
        self.without('blazar-listener-1', 'blazar-listener-2')
        lease = self.demo('POST', '/leases', self.request(),
                          service='reservation')['lease']
        self.assertEqual(
            ['physical:host', 'virtual:floatingip', 'virtual:network',
             'virtual:volume', 'flavor:instance', 'flavor:instance',
             'virtual:floatingip', 'virtual:stack'],
            [one['resource_type'] for one in lease['reservations']])
        for step in STARTS:
            self.listener_dies_at(step)
        listener = self.new_listener()
        self.wait_for_lease(lease['id'], 'ACTIVE')
        self.wait_for(lambda: ('virtual:stack:create', 'DONE') in [
            (one['event_type'], one['status'])
            for one in self.shown(lease)['events']],
            'a stack that is created', 120)
        self.use(lease)
        self.demo('PUT', f'/leases/{lease["id"]}', {
            'end_date': base.date(time.time() + 1800)}, service='reservation')
        listener.kill()
        self.demo('PUT', f'/leases/{lease["id"]}', {
            'end_date': base.date(time.time() + 3)}, service='reservation')
        for step in ENDS:
            self.listener_dies_at(step)
        self.new_listener()
        self.wait_for_lease(lease['id'], 'TERMINATED', 240)
        self.wait_for(lambda: self.listed() == before,
                      lambda: f'{before} is {self.listed()}', 120)
        self.wait_for(lambda: self.verify().returncode == 0,
                      lambda: self.verify().stdout)

    def use(self, lease: base.Json) -> None:
        """Use what a lease has, by the clients of its services."""
        its = {one['resource_type']: one['id']
               for one in self.shown(lease)['reservations']}
        self.assertEqual(2, len(self.aggregates()[its['physical:host']]))
        addresses = {one['Floating IP Address']: one['Port']
                     for one in self.typed('floating', 'ip', 'list')}
        self.assertEqual(set(ADDRESSES), addresses.keys())
        # That of the stack is connected with its port.
        output = self.typed('stack', 'output', 'show', 'all', 'address')
        self.assertEqual([output['output_value']], [
            address for address, port in addresses.items() if port])
        network = self.typed('network', 'show', its['virtual:network'])
        self.typed('subnet', 'create', '--network', network['id'],
                   '--subnet-range', '10.0.0.0/24', 'inside')
        made = self.typed('volume', 'create', 'data', '--size', '40', '--type',
                          its['virtual:volume'])
        self.wait_for(lambda: self.typed('volume', 'show', made['id'])[
            'status'] == 'available', 'a volume')
        servers = self.demo('GET', '/servers/detail')['servers']
        self.assertEqual(['ACTIVE'] * 3, [one['status'] for one in servers])
        self.demo('POST', f'/servers/{servers[0]["id"]}/os-volume_attachments',
                  {'volumeAttachment': {'volumeId': made['id']}})
        hosted = self.boot(
            hints={'reservation': its['physical:host']})['server']['id']
        self.wait_for_server(hosted)
