# SPDX-License-Identifier: Apache-2.0

"""Ansible with the collection openstack.cloud, as a user."""

import json
import os
import re
import typing as ty

import yaml

from tests.integration import base
from tests.integration import test_lease_api as lease_api
from tests.packaging import environment

PLAYBOOK = os.path.join(base.ROOT, 'doc/source/user/examples/ansible.yml')
PINS = ('tests/integration/ansible-constraints.txt',)


class AnsibleTest(lease_api.LeaseApiTestCase):

    _ansible: ty.ClassVar[environment.Environment]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls._ansible = environment.Environment(
            'ansible', 'openstacksdk', pins=PINS)
        cls._ansible.setUp()
        cls.addClassCleanup(cls._ansible.cleanUp)

    def setUp(self) -> None:
        super().setUp()
        self.folder = self._ansible.folder
        env = self.cloud.env('demo')
        self.write('clouds.yaml', {'clouds': {'demo': {
            'auth': {name: env[f'OS_{name.upper()}'] for name in (
                'auth_url', 'username', 'password', 'project_name',
                'user_domain_id', 'project_domain_id')},
            'region_name': env['OS_REGION_NAME']}}})

    def write(self, name: str, content: ty.Any) -> str:
        path = os.path.join(self.folder, name)
        with open(path, 'w') as file:
            yaml.safe_dump(content, file)
        return path

    def play(self, path: str, **variables: ty.Any) -> tuple[
            dict[str, int], str]:
        """Run a playbook.

        :returns: how many tasks were ok, changed, failed and so on, and the
            whole output
        """
        done = self.run_process(
            'env', f'HOME={self.folder}',
            f'OS_CLIENT_CONFIG_FILE={self.folder}/clouds.yaml',
            'ANSIBLE_LOCALHOST_WARNING=False', 'ANSIBLE_NOCOLOR=1',
            self._ansible.program('ansible-playbook'), path, '-e',
            json.dumps(variables))
        recap = re.search(r'^localhost +: (.*)$', done.stdout, re.MULTILINE)
        assert recap, f'{done.stdout}\n{done.stderr}'
        return {name: int(number) for name, number in re.findall(
            r'(\w+)=(\d+)', recap[1])}, done.stdout

    def servers(self) -> list[base.Json]:
        return ty.cast(list[base.Json], self.demo(
            'GET', '/servers/detail')['servers'])

    def test_playbook_of_lease_and_server_is_idempotent(self) -> None:
        """The playbook of the user guide; repeated, it changes nothing."""
        leases = self.demo._url('reservation', '/reservation/v1/leases')
        for changed in (2, 0):
            counts, printed = self.play(PLAYBOOK, leases=leases)
            self.assertEqual((changed, 0), (
                counts['changed'], counts['failed']), printed)
            server, = self.servers()
            self.assertEqual(('ACTIVE', 'training'), (
                server['status'], server['name']))
            self.assertIn(f'ACTIVE {server["id"]}', printed)
        self.assertEqual('training', self.lease_of(server['id'])['name'])

    def with_hints(self, start: str, guarded: bool = False,
                   **more: ty.Any) -> str:
        """Return a playbook that boots a server with lease hints.

        :param guarded: whether it first checks for an existing server
        """
        boot = {'openstack.cloud.server': {
            'cloud': 'demo', 'name': 'hinted', 'image': 'cirros',
            'flavor': 'm1.nano', 'auto_ip': False, 'security_groups': [],
            'scheduler_hints': {
                'reserved': 'True', 'lease_params': json.dumps(
                    {'start': start, 'duration': '1h'})}, **more}}
        tasks: list[base.Json] = [boot]
        if guarded:
            boot['when'] = 'there.servers | length == 0'
            tasks.insert(0, {
                'openstack.cloud.server_info': {
                    'cloud': 'demo', 'name': 'hinted'}, 'register': 'there'})
        return self.write('hints.yml', [{
            'hosts': 'localhost', 'gather_facts': False, 'tasks': tasks}])

    def test_hints_of_lease_from_now_on(self) -> None:
        for changed in (1, 0):
            counts, printed = self.play(self.with_hints('now'))
            self.assertEqual((changed, 0), (
                counts['changed'], counts['failed']), printed)
        server, = self.servers()
        self.assertEqual('ACTIVE', server['status'])

    def test_hints_of_lease_for_later(self) -> None:
        """Its second check fails unless the server is ACTIVE or SHUTOFF."""
        later = base.date(lease_api.days_ahead(1))
        for changed in (1, 0):
            counts, printed = self.play(self.with_hints(
                later, guarded=True, wait=False))
            self.assertEqual((changed, 0), (
                counts['changed'], counts['failed']), printed)
        server, = self.servers()
        self.assertEqual('RESERVED', server['status'])
        counts, printed = self.play(self.with_hints(later, wait=False))
        self.assertEqual((0, 1), (counts['changed'], counts['failed']))
        self.assertIn('not active state: RESERVED', printed)
