# SPDX-License-Identifier: Apache-2.0

"""The stack's own processes, without its services."""

import os
import signal

import fixtures

from tests.stack import processes
from tests.stack import stack
from tests.unit import base


class StackTest(base.TestCase):

    def test_what_a_test_started_and_left_ends_with_the_stack(self):
        """A test that is killed ends nothing that it has started."""
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
