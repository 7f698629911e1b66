# SPDX-License-Identifier: Apache-2.0

"""The time that an enrollment waits for other servers."""

import types

import fixtures

from blazar_core.common import errors
from blazar_nova.services import host_enrollment
from tests.unit import base


class TestWaitForServers(base.TestCase):

    def setUp(self):
        super().setUp()
        self.now, self.said = 0, []
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.services.host_enrollment.time', types.SimpleNamespace(
                monotonic=lambda: self.now, sleep=self.sleep)))

    def sleep(self, seconds):
        self.now += seconds

    def test_timeout_counts_from_first_check(self):
        pause = host_enrollment.patient(2, self.said.append)
        # What comes before the first check may take long.
        self.now = 100
        for _time in range(2):
            pause(['one', 'two'])
        self.assertEqual(102, self.now)
        self.assertIn('2 servers', str(self.assertRaises(
            errors.Conflict, pause, ['one', 'two'])))

    def test_servers_are_printed_when_they_change(self):
        pause = host_enrollment.patient(60, self.said.append)
        for server_ids in (['one', 'two'], ['one', 'two'], ['two']):
            pause(server_ids)
        self.assertEqual([True, True], [
            one.startswith('Waiting: ') for one in self.said])
        self.assertIn(': two.', self.said[-1])
