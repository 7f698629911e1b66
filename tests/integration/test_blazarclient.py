# SPDX-License-Identifier: Apache-2.0

"""The commands of python-blazarclient, except those of leases."""

import importlib.metadata
import json
import re
import typing as ty

from blazarclient import shell

from tests.integration import test_hosts
from tests.integration import test_lease_api as lease_api

#: Commands of leases: test_lease_api.py and test_lease_users.py.
LEASES = {'lease-list', 'lease-show', 'lease-create', 'lease-update',
          'lease-delete'}


class CommandsTest(test_hosts.HostsTestCase):
    """As the administrator, on a host that runs in a process of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.used: set[str] = set()

    def type(self, tool: str, command: str, *words: str,
             fails: str | None = None) -> ty.Any:
        """Run a command; return its output.

        :param command: as ``blazar`` has it, such as ``host-list``
        :param fails: the expected message if it is refused
        """
        self.used.add(command)
        typed = ['blazar', command] if tool == 'blazar' else [
            'openstack', 'reservation',
            *re.sub('host-update', 'host-set', command).split('-')]
        done = self.run_client(*typed, *words, user='admin')
        if fails is not None:
            self.assertEqual(1, done.returncode, done.stdout)
            self.assertIn(fails, done.stderr)
            return None
        self.assertEqual(0, done.returncode, f'{typed}: {done.stderr}')
        found = re.search(r'^[{[].*', done.stdout, re.MULTILINE | re.DOTALL)
        return json.loads(found[0]) if '-f' in words and found else None

    def test_host_allocation_and_floating_ip_commands(self) -> None:
        for tool in ('blazar', 'openstack'):
            self.hosts_by(tool)
            self.addresses_by(tool)
        # Every command of the client, except those of leases.
        self.assertEqual(set(shell.COMMANDS_V1) - LEASES, self.used)
        self.assertEqual(
            {'reservation_' + command.replace('-', '_').replace(
                'host_update', 'host_set').replace(
                    'lease_update', 'lease_set')
             for command in shell.COMMANDS_V1},
            {entry.name for entry in importlib.metadata.entry_points(
                group='openstack.reservation.v1')
             if entry.module.startswith('blazarclient.')})

    def hosts_by(self, tool: str) -> None:
        show = ('-f', 'json')
        host = self.type(tool, 'host-create', '--extra', 'gpu=A100',
                         '--extra', 'rack=7', 'host1', *show)
        host_id = host['id']
        self.addCleanup(self.run_client, 'blazar', 'host-delete', host_id,
                        user='admin')
        # The property remains after the host is removed.
        self.addCleanup(self.run_client, 'blazar', 'host-property-set',
                        '--public', 'gpu', user='admin')
        self.assertEqual(('host1', 'A100'), (
            host['hypervisor_hostname'], host['gpu']))
        self.assertEqual([host_id], [one['id'] for one in self.type(
            tool, 'host-list', *show)])
        self.type(tool, 'host-update', '--extra', 'gpu=H100', host_id)
        if tool == 'blazar':
            self.type(tool, 'host-unset', '--extra', 'rack', host_id)
        shown = self.type(tool, 'host-show', host_id, *show)
        self.assertEqual(('H100', tool == 'blazar'), (
            shown['gpu'], 'rack' not in shown))
        self.assertIn({'property': 'gpu', 'private': False,
                       'property_values': ['H100']}, self.type(
            tool, 'host-property-list', '--detail', *show))
        self.type(tool, 'host-property-set', '--private', 'gpu')
        self.type(tool, 'host-property-show', 'gpu',
                  fails='The resource property does not exist')
        self.type(tool, 'host-property-set', '--public', 'gpu')
        self.assertEqual(('gpu', False), tuple(self.type(
            tool, 'host-property-show', 'gpu', *show)[key]
            for key in ('property', 'private')))
        lease = self.make(lease_api.days_ahead(30), reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '', 'resource_properties': ''}])
        reservation_id = lease['reservations'][0]['id']
        for words in (('allocation-list', 'host'),
                      ('allocation-show', 'host', host_id)):
            found = self.type(tool, words[0], *words[1:], *show)
            self.assertIn(reservation_id, json.dumps(found))
        self.type(tool, 'host-delete', host_id, fails='ERROR: ')
        self.admin('DELETE', f'/leases/{lease["id"]}', service='reservation')
        self.type(tool, 'host-delete', host_id)
        self.assertEqual([], self.type(tool, 'host-list', *show))

    def addresses_by(self, tool: str) -> None:
        """There is no network here: see test_floating_ips."""
        self.assertEqual([], self.type(tool, 'floatingip-list', '-f', 'json'))
        for command, *words in (
                ('floatingip-show', '1'),
                ('floatingip-create', 'public', '172.24.4.10'),
                ('floatingip-delete', '1')):
            self.type(tool, command, *words, fails='ERROR: ')
