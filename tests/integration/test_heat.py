# SPDX-License-Identifier: Apache-2.0

"""Heat, and the templates of the user guide."""

import json
import os
import time
import typing as ty

import requests

from tests.integration import base
from tests.integration import test_hosts
from tests.integration import test_lease_api as lease_api
from tests import stack

EXAMPLES = os.path.join(base.ROOT, 'doc/source/user/examples')
HOST = '''
heat_template_version: 2021-04-16
parameters:
  name: {type: string}
resources:
  host:
    type: OS::Blazar::Host
    properties:
      name: {get_param: name}
      extra_capability: {gpu: A100}
outputs:
  made: {value: {get_attr: [host, created_at]}}
  vcpus: {value: {get_attr: [host, vcpus]}}
'''


class HeatTest(test_hosts.HostsTestCase):

    _stack: ty.ClassVar[stack.Stack]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._stack = stack.Stack(f'{base.folder()}-heat')
        cls._stack.down()
        cls.addClassCleanup(cls._stack.down)
        base.start(cls._stack, hosts=1, services=['heat'])

    @classmethod
    def stack(cls) -> stack.Stack:
        return cls._stack

    def heat(self, client: base.Client, method: str, path: str,
             body: ty.Any = None) -> ty.Any:
        answer = requests.request(
            method, f'{self.stack().site.endpoint("heat")}/v1/'
            f'{client.project_id}/stacks{path}',
            json=body, timeout=base.PATIENCE,
            headers={'X-Auth-Token': client.token})
        if not answer.ok:
            raise requests.HTTPError(answer.text, response=answer)
        return answer.json() if answer.content else None

    def create(self, client: base.Client, stack: str, template: str,
               **parameters: ty.Any) -> base.Json:
        """Create a stack; return it when that has ended."""
        made = self.heat(client, 'POST', '', {
            'stack_name': stack, 'template': template,
            'parameters': parameters, 'timeout_mins': 2})['stack']
        path = f'/{stack}/{made["id"]}'
        self.addCleanup(self.delete_stack, client, path)
        return self.over(client, path, 'CREATE')

    def over(self, client: base.Client, path: str, action: str) -> base.Json:
        """Return the stack when an action of it has ended."""
        stack: base.Json = {}

        def ended() -> bool:
            stack.update(self.heat(client, 'GET', path)['stack'])
            return ty.cast(bool, stack['stack_status'] not in (
                f'{action}_IN_PROGRESS', 'CREATE_FAILED') or
                action == 'CREATE' and
                stack['stack_status'] == 'CREATE_FAILED')

        self.wait_for(ended, f'{path}: {action} is over', 2 * base.PATIENCE)
        return {**stack, 'path': path, 'outputs': {
            one['output_key']: one.get('output_value')
            for one in stack.get('outputs', ())}}

    def delete_stack(self, client: base.Client, path: str) -> None:
        try:
            self.heat(client, 'DELETE', path)
            self.wait_for(lambda: self.heat(client, 'GET', path)['stack'][
                'stack_status'] == 'DELETE_COMPLETE', f'{path} is gone')
        except requests.HTTPError as exc:
            self.assertEqual(404, exc.response.status_code)

    @staticmethod
    def example(name: str) -> str:
        with open(f'{EXAMPLES}/{name}') as file:
            return file.read()

    def test_server_with_hints_creates_lease(self) -> None:
        stack = self.create(
            self.demo, 'now', self.example('heat_hints.yaml'),
            flavor='m1.nano')
        self.assertEqual('CREATE_COMPLETE', stack['stack_status'], stack)
        server_id = stack['outputs']['server']
        self.assertEqual('ACTIVE', self.server(server_id)['status'])
        lease = self.lease_of(server_id)
        self.assertEqual(('from-heat', 'ACTIVE'), (
            lease['name'], lease['status']))
        self.delete_stack(self.demo, stack['path'])
        self.wait_until_gone(server_id)
        self.wait_for_lease(lease['id'], 'TERMINATED')

    def test_later_lease_fails_stack_until_check(self) -> None:
        """Heat knows Nova's statuses only: it fails, and checks later."""
        stack = self.create(
            self.demo, 'later', self.example('heat_hints.yaml'),
            flavor='m1.nano', lease=json.dumps({
                'start': base.date(time.time() + 20), 'duration': '1h'}))
        self.assertEqual('CREATE_FAILED', stack['stack_status'])
        self.assertIn('Unknown status RESERVED',
                      stack['stack_status_reason'])
        # The boot that was requested continues.
        server_id, = self.server_ids_of('demo')
        self.wait_for_server(server_id)
        self.heat(self.demo, 'POST', f'{stack["path"]}/actions',
                  {'check': None})
        checked = self.over(self.demo, stack['path'], 'CHECK')
        self.assertEqual('CHECK_COMPLETE', checked['stack_status'], checked)

    def test_later_lease_shown_as_build_completes_stack(self) -> None:
        stack = self.create(
            self.demo, 'built', self.example('heat_hints.yaml'),
            flavor='m1.nano', lease=json.dumps({
                'start': base.date(time.time() + 20), 'duration': '1h',
                'server_status': 'BUILD'}))
        self.assertEqual('CREATE_COMPLETE', stack['stack_status'], stack)
        server_id = stack['outputs']['server']
        self.assertEqual('ACTIVE', self.server(server_id)['status'])
        self.delete_stack(self.demo, stack['path'])
        self.wait_until_gone(server_id)

    def server_ids_of(self, user: str) -> list[str]:
        return [one['id'] for one in self.client(user)(
            'GET', '/servers')['servers']]

    def test_host_and_lease_resources_with_server(self) -> None:
        name = self.hosts()[0]
        stack = self.create(self.admin, 'host', HOST, name=name)
        self.assertEqual('CREATE_COMPLETE', stack['stack_status'], stack)
        self.assertIn(name, self.aggregates()['freepool'])
        self.assertRegex(stack['outputs']['made'],
                         r'^\d{4}-\d\d-\d\d \d\d:\d\d')
        # Members see the hosts, but not their names.
        leased = self.create(
            self.demo, 'leased', self.example('heat_lease.yaml'),
            start=lease_api.minute(time.time()),
            end=lease_api.minute(time.time() + 7200))
        self.assertEqual('CREATE_COMPLETE', leased['stack_status'], leased)
        lease = self.get(leased['outputs']['lease'])
        self.assertEqual('ACTIVE', lease['status'])
        self.assertIn('remind', [one['event_type'] for one in
                                 lease['events']])
        self.assertEqual([leased['outputs']['server']],
                         lease['reservations'][0]['servers'])
        self.delete_stack(self.demo, leased['path'])
        self.wait_for_lease(lease['id'], 'TERMINATED')
        self.delete_stack(self.admin, stack['path'])
        self.assertNotIn(name, self.aggregates()['freepool'])
