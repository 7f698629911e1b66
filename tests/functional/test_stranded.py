# SPDX-License-Identifier: Apache-2.0

"""Builds that were sent and did not arrive: the message was lost, or a
conductor died during the build.
"""

from unittest import mock

import fixtures
from nova.compute import build_results
from nova import objects

from tests.functional import base
from tests.functional import leased


class StrandedTest(leased.LeasedTestCase):

    def setUp(self):
        super().setUp()
        self.life = self.listener.parts.lifecycle

    def start_and_lose(self):
        """Start a lease whose build never reaches a conductor."""
        server = self.hold()
        lost = mock.Mock()
        self.clock.advance(3600)
        with base.at_the_bus(lost):
            self.run_due()
        lost.assert_called_once()
        return server['id']

    def start_and_die_at(self, step):
        """Start a lease whose conductor dies at a step."""
        server = self.hold()
        reached = []

        def die(*_args, **_kwargs):
            reached.append(step)
            raise RuntimeError('The conductor died here')

        self.clock.advance(3600)
        with fixtures.MonkeyPatch(step, die):
            self.run_due()
            self.wait_for(lambda: reached, what=f'{step} was reached')
        return server['id']

    def look_after(self, *pauses):
        for pause in pauses:
            self.clock.advance(pause)
            self.life.lost_builds.send()

    def assert_given_up(self, server_id):
        """Assert that it stays in BUILD until the timeout, and fails then."""
        self.look_after(0, 1859)
        self.assertEqual('BUILD', self.alice.get_server(server_id)['status'])
        self.look_after(1)
        got = self.alice.get_server(server_id)
        self.assertEqual('ERROR', got['status'])
        self.assertIn('a nova-conductor died over it',
                      got['fault']['message'])
        self.assertEqual('ERROR', self.lease('vm1')['status'])
        self.assertEqual({server_id: None}, self.bookings())
        self.assertEqual({}, self.allocations(server_id))
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        self.assertEqual({}, self.guests())
        # It is not deferred again by any later check.
        self.run_sync()
        self.clock.advance(300)
        self.run_due()
        self.assertEqual('ERROR', self.alice.get_server(server_id)['status'])
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_server_in_error_after_build_keeps_lease_active(self):
        """Its notifications were lost, and another error occurred since."""
        server_id = self.boot_active(
            'vm1', hints=self.lease_hints('vm1'))['id']
        self.reset(server_id, 'error')
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease('vm1')['status'])
        self.assertIsNotNone(self.bookings()[server_id])

    def reset(self, server_id, state):
        self.admin.post_server_action(
            server_id, {'os-resetState': {'state': state}})

    def test_allocation_of_failed_server_ends_with_lease(self):
        """As Nova leaves it if a nova-compute died during a build."""
        def die(manager, context, instance, *_args, **_kwargs):
            node = objects.ComputeNode.get_first_node_by_host_for_old_compat(
                context, manager.host)
            instance.host = instance.node = manager.host
            instance.compute_id = node.id
            instance.vm_state, instance.task_state = 'error', None
            instance.save()
            return build_results.ACTIVE

        with fixtures.MonkeyPatch('nova.compute.manager.ComputeManager.'
                                  '_do_build_and_run_instance', die):
            server_id = self.boot('vm1', hints=self.lease_hints('vm1'))['id']
            self.wait_for_status(server_id, 'ERROR')
        self.assertNotEqual({}, self.allocations(server_id))
        self.run_sync()
        self.run_sync()
        self.assertEqual('ERROR', self.lease('vm1')['status'])
        self.assertIsNotNone(self.bookings()[server_id])
        self.assertEqual([('{}',)], self.query(
            'SELECT DISTINCT usage FROM hosts'))
        self.assert_verified()
        # A lost allocation is restored, also by verify.
        held = self.placement.get(f'/allocations/{server_id}',
                                  version='1.28').body
        self.placement.delete(f'/allocations/{server_id}')
        left, = self.compared().left
        self.assertIn('where it has no allocation in placement', left.text)
        self.assertEqual([], self.compared(fix=True).left)
        self.assertEqual({server_id: None}, self.bookings())
        self.placement.put(f'/allocations/{server_id}', {
            **held, 'consumer_generation': None}, version='1.28')
        self.run_sync()
        self.assertIsNotNone(self.bookings()[server_id])
        self.clock.advance(7200)
        self.run_due()
        self.wait_until_gone(server_id)
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        self.assertEqual(({}, {}), (
            self.bookings(), self.allocations(server_id)))

    def test_build_of_conductor_that_died_before_mapping_fails(self):
        server_id = self.start_and_die_at(
            'nova.conductor.manager.ComputeTaskManager.'
            '_map_instance_to_cell')
        self.assertEqual(1, self.boot_rows()['cell1.instances'])
        self.assert_given_up(server_id)

    def test_build_of_conductor_that_died_before_saving_fails(self):
        server_id = self.start_and_die_at(
            'nova.conductor.manager.availability_zones.'
            'get_host_availability_zone')
        self.assertNotEqual({}, self.allocations(server_id))
        self.assert_given_up(server_id)

    def test_interrupted_cleanup_of_lost_build_is_completed(self):
        server_id = self.start_and_die_at(
            'nova.conductor.manager.ComputeTaskManager.'
            '_map_instance_to_cell')
        self.look_after(0)

        def die(*_args):
            raise RuntimeError('The listener died here')

        with fixtures.MonkeyPatch('nova.objects.BuildRequest.destroy', die):
            self.look_after(1860)
        self.run_sync()
        self.assertEqual('ERROR', self.lease('vm1')['status'])
        self.look_after(300, 1860)
        self.assertEqual(0, self.boot_rows()['api.build_requests'])
        self.assertEqual({}, self.allocations(server_id))

    def test_lost_build_is_sent_again_after_timeout(self):
        server_id = self.start_and_lose()
        self.look_after(0, 1859)
        self.assertEqual({}, self.guests())
        self.look_after(1)
        self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual([server_id], list(self.guests()))

    def test_lost_build_timeout_restarts_after_conductor_outage(self):
        server_id = self.start_and_lose()
        self.look_after(0)
        self.stub_out('blazar_nova.compat.nova_cloud._PING_TIMEOUT', 1)
        self.conductor.rpcserver.stop()
        self.conductor.rpcserver.wait()
        self.look_after(1860)
        self.conductor.rpcserver.start()
        # It counts as lost from now on.
        self.look_after(1, 1859)
        self.assertEqual('BUILD', self.alice.get_server(server_id)['status'])
