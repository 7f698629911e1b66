# SPDX-License-Identifier: Apache-2.0

"""Processes freeze during builds: each server is built once, or it has
failed.
"""

import os
import signal
import sys
import time

from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from tests.integration import test_crash
from tests.stack import stack

#: Seconds to find a lost build (lost_build_timeout, 22) and to build it.
FOUND = 120

Step = fault_points.FaultPoint


class StandingStillTest(test_crash.CrashTestCase):

    def setUp(self):
        super().setUp()
        self.without('blazar-listener-1', 'blazar-listener-2')

    def freeze_between_gate_and_cast(self):
        """Freeze a listener after it took the permit of a build to be sent.
        """
        self.server_id, self.lease_id = self.hold(starts_in=3, lasts=900)
        self.frozen = self.listener_freezes_at(Step.START_TAKEN, 1)

    def go_on(self):
        os.kill(self.frozen.pid, signal.SIGCONT)

    def wait_until(self, seconds):
        self.wait_for(lambda: time.time() > seconds, 'time passes', FOUND)

    def finish(self):
        """Check that it was built once, and nothing remains."""
        self.wait_for_status([self.lease_id], 'ACTIVE', FOUND)
        self.assert_built_once(self.server_id)
        self.delete(self.server_id)
        self.wait_for_status([self.lease_id], 'TERMINATED')
        self.assert_nothing_left()

    def test_frozen_listener_with_expired_permit_sends_no_build(self):
        self.freeze_between_gate_and_cast()
        self.wait_until(time.time() + dispatch.SECONDS + 2)
        self.go_on()
        self.wait_for(lambda: 'stood still' in self.frozen.written(),
                      'it sees that it is late')
        self.frozen.stop()
        self.assertEqual([], self.spawns(self.server_id))
        self.new_listener()
        self.finish()

    def test_message_bus_dies_between_permit_and_cast(self):
        self.freeze_between_gate_and_cast()
        self.cloud.kill('rabbitmq')
        self.go_on()
        # The listener does not wait for the bus to send the build later.
        self.wait_for(lambda: 'start_lease failed' in self.frozen.written(),
                      'the cast is given up', FOUND)
        self.frozen.stop()
        self.cloud.restart('rabbitmq')
        self.new_listener()
        self.finish()

    def test_frozen_schedulers_only_delay_build(self):
        self.freeze_between_gate_and_cast()
        schedulers = [pid for number in (1, 2) for pid in self.processes(
            f'nova-scheduler-{number}')]
        for pid in schedulers:
            os.kill(pid, signal.SIGSTOP)
        try:
            self.go_on()
            # Less than long_rpc_timeout, 20.
            self.wait_until(time.time() + 15)
        finally:
            for pid in schedulers:
                os.kill(pid, signal.SIGCONT)
        self.finish()
        self.assertNotIn('sending them again', self.frozen.written())

    def processes(self, name):
        """Return the ids of a process of the stack and its children."""
        pid = self.cloud.pid(name)
        with open(f'/proc/{pid}/task/{pid}/children') as file:
            return [pid, *map(int, file.read().split())]

    def test_build_of_conductor_that_died_fails(self):
        """Between the server in its cell and its mapping to there."""
        self.without('nova-conductor')
        dying = self.process('dying-conductor', [
            sys.executable, '-m', 'tests.integration.dying_conductor',
            '--config-file', self.etc('conductor.conf'),
            '--config-file', self.etc('nova-conductor.conf')], stack.JOINED)
        dying.wait_until_up(FOUND)
        self.server_id, self.lease_id = self.hold(starts_in=3, lasts=900)
        self.new_listener()
        self.wait_for(lambda: f'SIGKILL at {self.server_id}' in
                      dying.written(), 'the conductor dies', FOUND)
        self.cloud.restart('nova-conductor')
        self.wait_for_lease(self.lease_id, 'ERROR', FOUND)
        server = self.wait_for_server(self.server_id, 'ERROR')
        self.assertIn('a nova-conductor died over it',
                      server['fault']['message'])
        self.assertEqual({}, self.allocations(self.server_id))
        self.assertEqual({self.server_id: None}, self.booked_hosts())
        self.delete(self.server_id)
        self.wait_for_status([self.lease_id], 'TERMINATED')
        self.assert_nothing_left()


class NoHostTest(test_crash.CrashTestCase):

    def test_start_waits_until_host_is_up(self):
        services = self.admin(
            'GET', '/os-services?binary=nova-compute')['services']
        self.addCleanup(self.all_down, services, False)
        self.all_down(services, True)
        server_id, lease_id = self.hold(starts_in=5, lasts=600)
        due = time.time() + 15
        self.wait_for(lambda: time.time() > due, 'it is due')
        self.assertEqual('PENDING', self.lease(lease_id)['status'])
        self.assertEqual('RESERVED', self.server(server_id)['status'])
        self.all_down(services, False)
        self.wait_for_status([lease_id], 'ACTIVE')
        self.assert_built_once(server_id)

    def all_down(self, services, down):
        for service in services:
            self.force_down(service['host'], down)
