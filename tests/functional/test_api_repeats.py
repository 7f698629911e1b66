# SPDX-License-Identifier: Apache-2.0

"""Repeated requests, and processes that die during a request."""

from unittest import mock

import fixtures
from oslo_messaging import transport
import requests

from blazar_core.common import errors
from blazar_core.leases import idempotency
from blazar_core.leases import slots
from blazar_core.lifecycle import fault_points
from blazar_nova.api import boots
from blazar_nova.compat import bound_servers
from tests.functional import api_base

HOUR = 3600


class TestRepeats(api_base.ApiTestCase):

    def post(self, key, code=201, **more):
        """Request a lease with a key, as a client without an answer does."""
        url = self.alice.base_url.rsplit('/v2', 1)[0]
        answer = requests.post(
            f'{url}/reservation/v1/leases', params=more.pop('query', None),
            json={'name': 'lease1', 'start_date': self.at(HOUR),
                  'end_date': self.at(2 * HOUR), 'events': [],
                  'reservations': [self.reservation(amount=4)],
                  'before_end_date': None, **more},
            headers={'X-Auth-Token': self.alice.who.token(),
                     'Idempotency-Key': key})
        self.assertEqual(code, answer.status_code, answer.text)
        return answer.json()

    def test_idempotency_key_creates_lease_once(self):
        quote = self.post('one', 200, query={'dry_run': 'true'})['quote']
        self.assertTrue(quote['fits'])
        lease = self.post('one')['lease']
        # All capacity is taken: the repeat does not search for any.
        self.assertEqual(lease, self.post('one')['lease'])
        self.assertEqual('NO_ROOM', self.post('two', 409)['error_name'])
        answer = self.post('one', 409, name='other')
        self.assertIn('Use a new key', answer['error_message'])
        self.post('x' * 300, 400)
        self.assertEqual(1, len(self.leases()))

    def test_lost_race_returns_lease_of_same_idempotency_key(self):
        made_by = idempotency.made_by
        first = self.post('one')['lease']
        answers = [None]
        with mock.patch('blazar_core.leases.idempotency.made_by',
                        lambda *args: (
                            answers.pop() if answers else made_by(*args))):
            self.assertEqual(first, self.post('one')['lease'])
        self.assertEqual(1, len(self.leases()))


class TestRequestsThatDie(api_base.ApiTestCase):
    """A boot takes slots, and its nova-api dies then."""

    def setUp(self):
        super().setUp()
        self.sent = 0
        self.reservation_id = self.make_active(reservations=[
            self.reservation(amount=2)])['reservations'][0]['id']
        self.useFixture(fixtures.MockPatchObject(
            transport.Transport, '_send', self.counting(
                transport.Transport._send)))

    def counting(self, send):
        def count(bus, target, context, message, **kwargs):
            self.sent += message['method'] == 'schedule_and_build_instances'
            return send(bus, target, context, message, **kwargs)
        return count

    def boot_two(self):
        before = self.own_servers()
        self.boot('two', flavor=self.reservation_id, count=2)
        return self.own_servers() - before

    def own_servers(self):
        return {one['id'] for one in self.alice.get_servers(detail=False)}

    def left(self):
        return self.query('SELECT server_id FROM slot_builds')

    def look(self, after=30):
        self.clock.advance(after)
        self.listener.unsent_builds.send()

    def assert_built_once(self, servers):
        self.assertEqual(2, len(servers))
        for server_id in servers:
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual((1, []), (self.sent, self.left()))

    def test_listener_sends_build_of_dead_request(self):
        with mock.patch.object(boots.BootHandler, '_send'):
            servers = self.boot_two()
        self.look(after=0)
        self.assertEqual(0, self.sent)
        self.look()
        self.assert_built_once(servers)
        self.look()
        self.assertEqual(1, self.sent)
        for server_id in servers:
            self.assertEqual(1, len(self.allocations(server_id)))

    def test_stalled_request_does_not_send_build_twice(self):
        with mock.patch.object(
                fault_points, 'fault_point', lambda step, _what: (
                    step is fault_points.FaultPoint.SLOT_TAKEN and
                    self.look())):
            servers = self.boot_two()
        self.assert_built_once(servers)

    def test_failed_request_does_not_send_build_twice(self):
        def fail(*_args):
            self.look()
            raise ValueError('A fault of the database')

        real, admit = bound_servers.admit, iter([fail])
        with mock.patch.object(bound_servers, 'admit', lambda *args: next(
                admit, real)(*args)):
            servers = self.boot_two()
        self.assert_built_once(servers)

    def test_request_that_fails_before_dispatch_frees_slots(self):
        with mock.patch.object(bound_servers, 'admit', side_effect=ValueError):
            self.refused(500, self.boot_two)
        self.assertEqual(([], set()), (self.left(), self.own_servers()))
        self.assert_built_once(self.boot_two())

    def refused_and_left(self, name, then):
        """Boot by a request that does not learn what it has written."""
        taken, before = getattr(slots.Slots, name), self.own_servers()

        def unsure(*args):
            taken(*args)
            then()
            raise errors.OutcomeUnknown

        with mock.patch.object(slots.Slots, name, unsure):
            self.refused(503, self.boot_two)
        return self.own_servers() - before

    def test_unknown_outcome_of_slot_use_undoes_nothing(self):
        for then in (self.look, lambda: None):
            self.sent = 0
            servers = self.refused_and_left('take', then)
            self.look()
            self.assert_built_once(servers)
            for server_id in servers:
                self.alice.delete_server(server_id)
                self.wait_until_gone(server_id)
            self.run_sync()

    def test_unknown_outcome_of_dispatch_undoes_nothing(self):
        with mock.patch.object(bound_servers, 'admit', side_effect=ValueError):
            servers = self.refused_and_left('take_permit', lambda: None)
        self.assertEqual((2, []), (len(servers), self.left()))
        # As if the build had been lost.
        self.assertEqual({'RESERVED'}, {
            self.alice.get_server(one)['status'] for one in servers})

    def test_build_of_deleted_servers_is_not_sent(self):
        with mock.patch.object(boots.BootHandler, '_send'):
            servers = self.boot_two()
        for server_id in servers:
            self.alice.delete_server(server_id)
        self.look()
        self.assertEqual((0, []), (self.sent, self.left()))

    def test_build_is_retried_after_placement_was_unavailable(self):
        with mock.patch.object(boots.BootHandler, '_send'):
            servers = self.boot_two()
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=errors.CloudUnavailable('No answer')):
            self.look()
        self.assertEqual(0, self.sent)
        self.look(after=0)
        self.assert_built_once(servers)
