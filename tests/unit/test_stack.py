# SPDX-License-Identifier: Apache-2.0

"""The stack's own processes, without its services."""

import importlib.metadata
import os
import signal
import subprocess

import fixtures

from tests import imports
from tests.stack import processes
from tests.stack import stack
from tests.unit import base


class StackTest(base.TestCase):

    def test_processes_left_by_tests_end_with_the_stack(self):
        """A killed test leaves the processes that it has started."""
        folder = self.useFixture(fixtures.TempDir()).path
        for name in ('run', 'log'):
            os.mkdir(os.path.join(folder, name))
        added = processes.Process(folder, processes.Program(
            'added', ['sh', '-c', 'sleep 60 & wait'], ''))
        added.start()
        pid = added.pid
        self.addCleanup(added.kill)
        stack.Stack(folder).down()
        self.assertEqual((pid, signal.SIGKILL), os.waitpid(pid, os.WNOHANG))
        self.assertEqual({'lock', 'log'}, set(os.listdir(folder)))

    def test_all_missing_packages_are_named(self):
        """All missing packages are named, whatever the stack consists of."""
        for words, packages in (
                ('mariadb', {'mariadb-server'}),
                ('postgresql', {'postgresql'}),
                ('mariadb uwsgi', {'mariadb-server', 'nginx-light'})):
            done = subprocess.run(
                ['bash', '-euo', 'pipefail', '-c',
                 f'source tools/venv.sh; command() {{ return 1; }}; '
                 f'compgen() {{ return 1; }}; missing_stack_servers {words}'],
                cwd=imports.ROOT, capture_output=True, text=True, timeout=60)
            self.assertEqual((0, ''), (done.returncode, done.stderr))
            self.assertEqual(
                packages, {*done.stdout.split()} - {'rabbitmq-server'})

    def test_neutron_runs_only_if_requested(self):
        folder = self.useFixture(fixtures.TempDir()).path
        for services, words in (
                ([], 'tests.stack.network'),
                (['neutron'], 'neutron.wsgi.api')):
            cloud = stack.Stack(folder)
            cloud._create(stack.Settings(services=services))
            self.addCleanup(cloud.down)
            self.assertIn(words, cloud._process('neutron').program.command)
            self.assertEqual(
                bool(services), 'setup-neutron' in cloud._processes)
        found, = importlib.metadata.Distribution.discover(
            path=[os.path.join(folder, 'data', 'neutron')])
        entry, = found.entry_points
        self.assertEqual(('neutron.ml2.mechanism_drivers', 'stack'),
                         (entry.group, entry.name))
