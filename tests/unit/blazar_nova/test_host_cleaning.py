# SPDX-License-Identifier: Apache-2.0


import os
import signal
import stat
import types
from unittest import mock

import fixtures
from oslo_db import exception as db_exception

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import compute_hosts
from blazar_nova.resource_types import host_cleaning
from blazar_nova.resource_types import physical_hosts
from tests.unit import base

HOSTS = {'uuid-1': 'compute1', 'uuid-2': 'compute2'}


class TestCommand(base.TestCase):

    def setUp(self):
        super().setUp()
        self.folder = self.useFixture(fixtures.TempDir()).path
        self.log = self.useFixture(fixtures.FakeLogger(level='INFO'))

    def run_for(self, script, hosts=HOSTS, timeout=20, words='', seconds=20):
        """Return the hosts that a shell script has cleaned."""
        path = os.path.join(self.folder, 'command')
        with open(path, 'w') as file:
            file.write(f'#!/bin/sh\n{script}\n')
        os.chmod(path, stat.S_IRWXU)
        return self.run_command(f'{path} {words}', hosts, timeout, seconds)

    def run_command(self, command, hosts=HOSTS, timeout=20, seconds=20):
        return host_cleaning.run(
            types.SimpleNamespace(cleaning_command=command,
                                  cleaning_timeout=timeout),
            resource_types.ReservationContext(
                'reservation', 'lease', 'project', 'user', {}, {}), hosts,
            cloud_api.Deadline(clocks.SystemClock(), seconds))

    def test_cleaning_waits_while_database_of_nova_is_unavailable(self):
        reserved = resource_types.ReservationContext(
            'reservation', 'lease', 'project', 'user', {}, {},
            services=HOSTS)
        with mock.patch.object(
                compute_hosts, 'on_service_host',
                side_effect=db_exception.DBConnectionError):
            self.assertRaises(
                errors.CloudUnavailable, physical_hosts.PhysicalHosts().clean,
                reserved, {'uuid-1'}, cloud_api.Deadline(
                    clocks.SystemClock(), 20))

    def test_every_host_is_clean_without_command(self):
        self.assertEqual({*HOSTS}, self.run_command(''))

    def test_command_gets_host_reservation_and_project(self):
        self.assertEqual({*HOSTS}, self.run_for(
            f'echo "$#: $@" > {self.folder}/of-"$3"', words='--hard "a b"'))
        self.assertEqual({
            name: f'5: --hard a b {name} reservation project\n'
            for name in HOSTS.values()}, {
                name: open(f'{self.folder}/of-{name}').read()
                for name in HOSTS.values()})

    def test_host_that_is_not_ready_does_not_delay_others(self):
        self.assertEqual({'uuid-2'}, self.run_for(
            '[ "$1" = compute2 ] || exit 75'))
        self.assertIn('1 of 2 hosts of reservation reservation are clean now',
                      self.log.output)
        self.assertNotIn('failed', self.log.output)

    def test_output_of_failed_command_is_logged(self):
        self.assertEqual(set(), self.run_for(
            'echo "no power in $1"; exit 3'))
        self.assertIn('Lease lease: cleaning_command failed for host compute1 '
                      '(3), and is retried: no power in '
                      'compute1', self.log.output)

    def test_command_past_timeout_is_killed_with_its_children(self):
        self.assertEqual(set(), self.run_for(
            f'sleep 100 & echo $! > {self.folder}/child; wait',
            {'uuid-1': 'compute1'}, timeout=2))
        child = int(open(f'{self.folder}/child').read())
        self.wait_for(lambda: not _runs(child), 'its child to be killed')
        self.assertIn('failed for host compute1 (-9)', self.log.output)

    def test_no_command_is_started_after_deadline(self):
        self.assertEqual(set(), self.run_for(
            f'touch {self.folder}/begun', seconds=-1))
        self.assertFalse(os.path.exists(f'{self.folder}/begun'))

    def test_command_that_cannot_be_killed_does_not_delay_others(self):
        """It has changed its user, as children of sudo do."""
        killed = []

        def refuse(group, _signal):
            killed.append(group)
            raise PermissionError

        with fixtures.MonkeyPatch('os.killpg', refuse):
            self.assertEqual({'uuid-2'}, self.run_for(
                '[ "$1" = compute2 ] || exec sleep 100', timeout=2))
        self.addCleanup(os.waitpid, killed[0], 0)
        os.kill(killed[0], signal.SIGKILL)
        self.assertIn('failed for host compute1 (None)', self.log.output)

    def test_command_that_cannot_be_parsed_is_a_configuration_error(self):
        exc = self.assertRaises(
            errors.ConfigurationError, self.run_command, 'clean "x')
        self.assertIn('cleaning_command cannot be read', str(exc))

    def test_missing_command_is_logged(self):
        self.assertEqual(set(), self.run_command('/nowhere/command'))
        self.assertIn('cleaning_command cannot be run', self.log.output)


def _runs(pid):
    """Return whether a process exists, and is no zombie."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False
