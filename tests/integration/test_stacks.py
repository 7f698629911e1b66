# SPDX-License-Identifier: Apache-2.0

"""Stacks of a real Heat, reserved as what they contain."""

import json
import time
import typing as ty

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests import stack

SERVER = {'image': 'cirros', 'user_data_format': 'RAW',
          'networks': [{'allocate_network': 'none'}]}
VERSION = {'heat_template_version': '2018-08-31'}
INNER = {**VERSION, 'parameters': {'flavor': {'type': 'string'}},
         'resources': {'inner': {'type': 'OS::Nova::Server', 'properties': {
             'flavor': {'get_param': 'flavor'}, **SERVER}}}}
TEMPLATE = {
    **VERSION, 'parameters': {'size': {'type': 'string'}}, 'resources': {
        'one': {'type': 'OS::Nova::Server', 'properties': {
            'flavor': {'get_param': 'size'}, **SERVER}},
        'group': {'type': 'OS::Heat::ResourceGroup', 'properties': {
            'count': 2, 'resource_def': {
                'type': 'OS::Nova::Server', 'properties': {
                    'flavor': 'm1.tiny', **SERVER}}}},
        'inside': {'type': 'inner.yaml', 'properties': {
            'flavor': 'm1.nano'}}}}
SERVERS = 4


class StacksTest(lease_api.LeaseApiTestCase):

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(f'{base.folder()}-stacks')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, services=['heat'])

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def setUp(self) -> None:
        super().setUp()
        self.before = self.listed()
        self.addCleanup(lambda: self.wait_for(
            lambda: self.listed() == self.before, 'what was there before'))

    def listed(self) -> ty.Any:
        """What the services list that a stack may leave."""
        keystone = f'{self.stack().site.endpoint("keystone")}/v3'
        trusts = self.admin.send(
            'GET', f'{keystone}/OS-TRUST/trusts', headers={
                'X-Auth-Token': self.admin.token}).json()['trusts']
        return (self.stacks(), sorted(one['id'] for one in trusts), [
            sorted(one['id'] for one in self.admin(
                'GET', f'/{kind}')[kind.partition('?')[0]])
            for kind in ('servers?all_tenants=1', 'flavors?is_public=None')])

    def heat(self, *words: str) -> ty.Any:
        """Type a command of Heat's client as a member."""
        done = self.run_client('openstack', *words, '-f', 'json')
        self.assertEqual(0, done.returncode, done.stderr)
        return json.loads(done.stdout or 'null')

    def stacks(self) -> dict[str, str]:
        return {one['Stack Name']: one['Stack Status']
                for one in self.heat('stack', 'list')}

    def reserve(self, name: str, start: float, seconds: int, **values: ty.Any,
                ) -> base.Json:
        now = time.time()
        return self.demo('POST', '/leases', {
            'name': name, 'start_date': base.date(now + start) if start
            else 'now', 'end_date': base.date(now + start + seconds),
            'reservations': [{
                'resource_type': 'virtual:stack', 'stack_name': name,
                'template': TEMPLATE, 'parameters': {'size': 'm1.nano'},
                'files': {'inner.yaml': json.dumps(INNER)}}],
            **values}, service='reservation')['lease']

    def shown(self, lease: base.Json) -> base.Json:
        return self.demo('GET', f'/leases/{lease["id"]}',
                         service='reservation')['lease']

    def wait_for_stack(self, lease: base.Json) -> None:
        self.wait_for(
            lambda: self.stacks()[lease['name']] == 'UPDATE_COMPLETE',
            'a stack with its resources')
        self.wait_for(lambda: not self.shown(lease)['status_reason'],
                      'a lease that knows it')

    def end(self, lease: base.Json) -> None:
        self.demo('PUT', f'/leases/{lease["id"]}', {
            'end_date': base.date(time.time() + 2)}, service='reservation')
        self.wait_for_lease(lease['id'], 'TERMINATED', seconds=180)

    def test_stack_from_lease_to_deletion(self) -> None:
        refused = self.demo.request('POST', '/leases', {
            'name': 'bad', 'start_date': 'now',
            'end_date': base.date(time.time() + 60), 'reservations': [{
                'resource_type': 'virtual:stack', 'template': {
                    **VERSION, 'resources': {'a': {
                        'type': 'OS::Heat::AutoScalingGroup'}}}}]},
            service='reservation')
        self.assertEqual(400, refused.status_code, refused.text)
        self.assertIn('OS::Heat::AutoScalingGroup', refused.text)
        lease = self.reserve('web', 15, 600)
        self.assertEqual({'web': 'CREATE_COMPLETE'}, self.stacks())
        self.assertEqual([], self.demo('GET', '/servers')['servers'])
        flavors = {one['id']: one['amount']
                   for one in lease['reservations'][:-1]}
        self.assertEqual([2, 2], [*flavors.values()])
        # Another has the name already: nothing is reserved.
        self.assertEqual(400, self.demo.request('POST', '/leases', {
            'name': 'web', 'start_date': 'now',
            'end_date': base.date(time.time() + 60), 'reservations': [{
                'resource_type': 'virtual:stack', 'stack_name': 'web',
                'template': {**VERSION, 'resources': {
                    'one': {'type': 'OS::Nova::Server', 'properties': {
                        'flavor': 'm1.nano', **SERVER}}}}}]},
            service='reservation').status_code)
        self.wait_for_stack(lease)
        resources = self.heat('stack', 'resource', 'list', '-n', '3', 'web')
        servers = {one['physical_resource_id'] for one in resources
                   if one['resource_type'] == 'OS::Nova::Server'}
        self.assertEqual(SERVERS, len(servers))
        self.assertEqual(
            servers, {server for one in self.shown(lease)['reservations']
                      for server in one['servers']})
        self.end(lease)
        self.assertEqual({}, self.stacks())

    def test_stack_is_suspended_at_lease_end(self) -> None:
        lease = self.reserve('kept', 0, 600, on_end='suspend')
        self.wait_for_stack(lease)
        self.end(lease)
        self.assertEqual({'kept': 'SUSPEND_COMPLETE'}, self.stacks())
        self.assertEqual(['SUSPENDED'] * SERVERS, [
            one['status'] for one in self.demo(
                'GET', '/servers/detail')['servers']])
        done = self.run_client('openstack', 'stack', 'resume', '--wait',
                               'kept')
        self.assertEqual(0, done.returncode, done.stderr)
        done = self.run_client('openstack', 'stack', 'delete', '--yes',
                               '--wait', 'kept')
        self.assertEqual(0, done.returncode, done.stderr)

    def test_stack_lease_survives_death_of_heat_and_listeners(self) -> None:
        lease = self.reserve('web', 5, 600)
        self.stack().kill('heat')
        self.wait_for(lambda: 'Heat does not answer' in (
            self.shown(lease)['status_reason']), 'a lease that waits')
        self.assertEqual('ACTIVE', self.shown(lease)['status'])
        for name in ('blazar-listener-1', 'blazar-listener-2'):
            self.stack().kill(name)
        self.stack().restart('heat')
        for name in ('blazar-listener-1', 'blazar-listener-2'):
            self.stack().restart(name)
        self.wait_for_stack(lease)
        self.stack().kill('heat')
        self.demo('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.wait_for(lambda: not self.demo('GET', '/servers')['servers'],
                      'servers that are deleted')
        self.stack().restart('heat')

    def test_lease_continues_after_user_deletes_stack(self) -> None:
        lease = self.reserve('web', 0, 600)
        self.wait_for_stack(lease)
        done = self.run_client('openstack', 'stack', 'delete', '--yes',
                               '--wait', 'web')
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertEqual(('ACTIVE', ''), (
            self.shown(lease)['status'], self.shown(lease)['status_reason']))
        self.end(lease)
