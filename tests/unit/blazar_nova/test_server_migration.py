# SPDX-License-Identifier: Apache-2.0

"""The hosts to which servers may be moved, and where they may be built."""

import threading

import fixtures

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import server_migration
from tests.unit import base


class TestHosts(base.TestCase):
    """A thread reads the hosts, and waits for a cell."""

    def setUp(self):
        super().setUp()
        self.cloud = nova_cloud.NovaCloud(None, clocks.SystemClock())
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()
        self.addCleanup(self.answers.set)
        self.useFixture(fixtures.MockPatchObject(
            compute_hosts, 'all_hosts', self.all_hosts))
        self.useFixture(fixtures.MockPatchObject(
            compute_hosts, 'services_up', set))
        self.useFixture(fixtures.MockPatchObject(
            nova_cloud, '_ping', lambda _topic: None))
        # What was read is never recent.
        self.useFixture(fixtures.MockPatchObject(
            server_migration, '_FRESH', -1000))
        self.useFixture(fixtures.MockPatchObject(
            bounded_calls, 'SHORT_LIMIT', 0.05))

    def all_hosts(self):
        self.asked.release()
        self.answers.wait(20)
        return [], True

    def move(self):
        """Return why a server does not move to a host that is unknown."""
        return self.cloud.move('server', 'host', 'lease', None)

    def test_other_threads_get_what_was_read_before(self):
        self.answers.set()
        self.assertIn('does not know the host', self.move())
        self.answers.clear()
        reader = self.in_thread(self.move)
        self.assertTrue(self.asked.acquire(timeout=20))
        self.assertTrue(self.asked.acquire(timeout=20))
        self.assertIn('does not know the host', self.move())
        self.answers.set()
        reader.join(20)

    def test_other_threads_do_not_wait_long_for_first_answer(self):
        reader = self.in_thread(self.move)
        self.assertTrue(self.asked.acquire(timeout=20))
        self.assertRaises(errors.CloudUnavailable, self.move)
        self.answers.set()
        reader.join(20)
        self.assertIn('does not know the host', self.move())
