# SPDX-License-Identifier: Apache-2.0

import dataclasses
from unittest import mock

from blazar_core.capacity import enrollment
from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import evacuation
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import server_moves
from blazar_core.lifecycle.server_moves import Obstacle
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_host_status
from tests.unit.blazar_core import test_maintenance

load_tests = databases.load_tests

NOW = base.NOW
State = cloud_api.ServerState
INTERVAL = test_host_status.INTERVAL


class EvacuationTestCase(test_maintenance.MaintenanceTestCase):
    """A server of a lease runs on the first of two hosts."""

    def setUp(self):
        super().setUp()
        self.evacuation = self.new_relocating(INTERVAL)
        #: The hosts that the check for certainty was called with, and its
        #: answer.
        self.fenced, self.says = [], True
        self.cloud.hosts = set(self.uuids.values())

    def certain(self, failed):
        self.fenced.append(failed)
        return [*failed] if self.says else []

    def look(self):
        self.evacuation.look(self.certain)

    def runs(self, end=2 * INTERVAL, name='one', **wanted):
        """Return a lease on a host, and its running server."""
        lease = self.running_lease(
            end=end, hosts=frozenset([self.uuid_of(name)]), **wanted)
        return lease, *base.servers_of(lease)

    def at(self, server_id, **seen):
        """Set what is observed of a server."""
        known = self.cloud.servers[server_id]
        self.cloud.servers[server_id] = cloud_api.ObservedServer(**{
            'state': known.state, 'host': known.host, **seen})

    def due(self):
        """Return in how many seconds servers may be requested again."""
        return [one - self.clock.now() for one in self.scalars(
            models.ServerMove.next_at)]

    def states(self):
        """Return the reason, the status and the attempts of each move."""
        with self.database.reader() as session:
            return [(row.reason, row.status, row.attempts) for row in
                    session.query(models.ServerMove).order_by('id')]

    def change_moves(self, **values):
        with self.database.writer() as session:
            session.query(models.ServerMove).update(values)


class TestEvacuation(EvacuationTestCase):

    def test_nothing_is_done_without_failed_hosts(self):
        self.runs()
        before = self.everything()
        self.look()
        self.assertEqual((before, [], []), (
            self.everything(), self.fenced, self.cloud.evacuations))

    def test_server_is_evacuated_if_host_is_certainly_down(self):
        lease, server_id = self.runs()
        self.fail()
        self.look()
        self.assertEqual(
            ([(server_id, None)], [], [{self.uuid_of('one'): True}]),
            (self.cloud.evacuations, self.cloud.moves, self.fenced))
        self.assertEqual([server_moves.AGAIN], self.due())
        self.assertEqual([('failed_host', 'accepted', 1)], self.states())
        self.assertIs(True, self.get(lease)['reservations'][0][
            'missing_resources'])
        # It is being evacuated.
        self.clock.advance(2 * server_moves.AGAIN)
        self.look()
        self.assertEqual(1, len(self.cloud.evacuations))

    def test_lease_is_healed_once_server_is_on_another_host(self):
        lease, server_id = self.runs()
        self.fail()
        self.look()
        self.cloud.arrive(server_id, self.uuid_of('two'))
        said = []
        with mock.patch.object(self.lifecycle.reconciliation, '_notify',
                               lambda *what: said.append(what)):
            self.lifecycle.reconciliation.check(server_id)
        self.look()
        self.assertEqual([('failed_host', 'moved', 1)], self.states())
        (event_type, told), = said
        self.assertEqual(('lease.healed', [{
            'reservation_id': lease['reservations'][0]['id'],
            'server_id': server_id, 'before': 'one', 'after': 'two'}]), (
                event_type, told['exchanged']))
        reservation, = self.get(lease)['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        self.clock.advance(server_moves.AGAIN)
        self.look()
        self.assertEqual(1, len(self.cloud.evacuations))

    def test_lease_is_healed_with_its_last_server(self):
        lease, *servers = self.runs(count=2)
        self.fail()
        self.look()
        self.assertEqual(2, len(self.cloud.evacuations))
        for server_id, told in zip(servers, (0, 1), strict=True):
            self.cloud.arrive(server_id, self.uuid_of('two'))
            self.lifecycle.reconciliation.check(server_id)
            self.assertEqual(told, self.notified.count(
                ('lease.healed', lease['id'])))

    def test_free_slot_is_not_moved_to_unavailable_host(self):
        for name in self.uuids:
            self.with_host(name, VCPU=8)
        for down in self.fail, lambda name: self.take(name, start=0):
            lease = self.reserve(0, INTERVAL, self.places(2, affinity=False),
                                 active=True)
            server_id, = self.take_slots(lease)
            here = self.host_of(server_id)
            there, = set(self.uuids) - {here}
            self.at(server_id, state=State.RUNNING, host=self.uuid_of(here))
            self.lifecycle.reconciliation.check(server_id)
            down(here)
            self.at(server_id, host=self.uuid_of(there))
            self.lifecycle.reconciliation.check(server_id)
            self.assertEqual([there, there], self.hosts_of(lease))
            self.see(**dict.fromkeys(self.uuids))
            self.clock.advance(test_host_status.BACK)
            self.see(**dict.fromkeys(self.uuids))

    def test_server_on_enrolled_host_goes_to_enrolled_host(self):
        self.enroll('one', 'three', 'four')
        servers = [self.runs_in_a_slot('one') for _number in range(2)]
        # Nova keeps it on enrolled hosts.
        self.cloud.hosts -= {self.uuid_of('two')}
        self.fail()
        self.look()
        self.assertEqual({(server_id, None) for server_id in servers},
                         set(self.cloud.evacuations))

    def test_server_stays_if_no_other_host_is_enrolled(self):
        self.enroll('one')
        self.runs_in_a_slot('one')
        self.fail()
        self.look()
        self.assertEqual([], self.cloud.evacuations)
        self.assertIn(Obstacle.NO_CAPACITY, self.log.output)

    def test_server_on_lent_enrolled_host_goes_to_any_host(self):
        """Nova looks among the enrolled hosts if no other is left."""
        self.enroll('one')
        server_id = self.runs_in_a_slot('one')
        needs = self.cloud.needs
        self.fail()
        with mock.patch.object(
                self.cloud, 'needs', lambda one, lent: dataclasses.replace(
                    needs(one, lent), among=model.HostPool.ALL if lent
                    else model.HostPool.COMMON)):
            self.look()
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def enroll(self, *names):
        """Enroll hosts, and add those that do not exist."""
        for name in names:
            if name not in self.uuids:
                self.with_host(name, VCPU=2)
            with self.database.writer() as session:
                enrollment.complete(session, NOW, enrollment.start(
                    session, NOW, self.uuid_of(name), {}))
        self.cloud.hosts = set(self.uuids.values())

    def runs_in_a_slot(self, name):
        """Return a server in the only slot of a reservation, on a host."""
        lease = self.reserve(0, INTERVAL, self.places(
            among=model.HostPool.ENROLLED,
            hosts=frozenset([self.uuid_of(name)])), active=True)
        server_id, = self.take_slots(lease)
        self.at(server_id, state=State.RUNNING, host=self.uuid_of(name))
        self.lifecycle.reconciliation.check(server_id)
        return server_id

    def test_no_evacuation_if_disabled(self):
        lease, _server_id = self.runs()
        self.fail()
        self.evacuation.look()
        self.assertEqual([], self.cloud.evacuations)
        self.assertEqual([], self.due())
        # Other hosts have capacity, and are not used.
        (warning,) = views.get(self.database, lease['id'])['warnings']
        self.assertIn('failed. Servers stay on a failed host until it is up '
                      'again or the operator evacuates them.', warning)

    def test_no_evacuation_until_host_is_certainly_down(self):
        self.runs()
        self.fail()
        self.says = False
        self.look()
        self.look()
        self.assertEqual([], self.cloud.evacuations)
        # This is logged once.
        self.assertEqual(1, self.log.output.count(
            'force its nova-compute down (openstack compute service set '
            '--down one nova-compute)'))
        self.says = True
        self.look()
        self.assertEqual(1, len(self.cloud.evacuations))

    def test_host_in_maintenance_is_not_fenced(self):
        self.runs()
        self.take(start=0)
        self.fail()
        self.says = False
        self.look()
        self.assertEqual([{self.uuid_of('one'): False}], self.fenced)

    def test_no_evacuation_if_certainty_check_is_unavailable(self):
        self.runs()
        self.fail()

        def certain(_failed):
            raise errors.CloudUnavailable('No.')

        self.evacuation.look(certain)
        self.assertEqual([], self.cloud.evacuations)
        self.assertIn('is not known now: No.', self.log.output)

    def test_failed_evacuation_is_retried_with_growing_pauses(self):
        _lease, server_id = self.runs()
        self.fail()
        self.look()
        self.cloud.arrive(server_id)
        self.clock.advance(server_moves.AGAIN - 1)
        self.look()
        self.assertEqual(1, len(self.cloud.evacuations))
        self.clock.advance(1)
        self.look()
        self.assertEqual(2, len(self.cloud.evacuations))
        # It is requested again after twice as long, as it may fail again.
        self.cloud.arrive(server_id)
        self.clock.advance(2 * server_moves.AGAIN - 1)
        self.look()
        self.assertEqual(2, len(self.cloud.evacuations))
        self.clock.advance(1)
        self.look()
        self.assertEqual(3, len(self.cloud.evacuations))

    def test_unanswered_evacuation_in_progress_is_not_repeated(
            self):
        _lease, server_id = self.runs()
        self.fail()
        evacuate = self.cloud.evacuate

        def lost(*args):
            evacuate(*args)
            raise errors.CloudUnavailable('It said nothing.')

        with mock.patch.object(self.cloud, 'evacuate', lost):
            self.look()
        self.assertEqual([('failed_host', 'requested', 1)], self.states())
        for _time in range(3):
            self.clock.advance(2 * server_moves.AGAIN)
            self.look()
            self.assertEqual([('failed_host', 'requested', 1)], self.states())
        self.assertEqual(1, len(self.cloud.evacuations))
        self.cloud.arrive(server_id, self.uuid_of('two'))
        self.lifecycle.reconciliation.check(server_id)
        self.look()
        self.assertEqual([('failed_host', 'moved', 1)], self.states())

    def test_unanswered_evacuation_is_repeated_only_after_timeout(self):
        self.runs()
        self.fail()
        self.cloud.broken['evacuate'] = errors.CloudUnavailable('No.')
        self.look()
        del self.cloud.broken['evacuate']
        self.change_moves(next_at=0)
        self.clock.advance(server_moves.LOST - 1)
        self.look()
        self.assertEqual([('failed_host', 'requested', 1)], self.states())
        self.change_moves(next_at=0)
        self.clock.advance(1)
        self.look()
        self.assertEqual([('failed_host', 'accepted', 2)], self.states())

    def test_refused_evacuation_takes_no_target_capacity(self):
        servers = [self.runs()[1] for _number in range(2)]
        self.runs(name='two')
        self.fail()
        self.cloud.broken[servers[0]] = 'It may not.'
        self.cloud.broken[servers[1]] = 'It may not.'
        self.look()
        self.assertEqual(
            2 * [('failed_host', 'planned', 1)], self.states())
        self.assertNotIn(Obstacle.NO_CAPACITY, self.log.output)

    def test_server_is_evacuated_again_if_new_host_fails(self):
        _lease, server_id = self.runs()
        for name, other in ('one', 'two'), ('two', 'one'):
            self.fail(name)
            self.look()
            self.cloud.arrive(server_id, self.uuid_of(other))
            self.lifecycle.reconciliation.check(server_id)
            self.see(**dict.fromkeys(self.uuids))
            self.clock.advance(test_host_status.BACK)
            self.see(**dict.fromkeys(self.uuids))
            self.look()
        self.assertEqual(2 * [('failed_host', 'moved', 1)], self.states())
        self.assertEqual(2 * [(server_id, None)], self.cloud.evacuations)

    def test_new_failure_resets_pause_of_evacuation(self):
        _lease, server_id = self.runs()
        self.fail()
        self.cloud.broken[server_id] = 'It may not.'
        self.look()
        self.change_moves(next_at=self.clock.now() + 1920, attempts=5)
        del self.cloud.broken[server_id]
        self.see(**dict.fromkeys(self.uuids))
        self.clock.advance(test_host_status.BACK)
        self.see(**dict.fromkeys(self.uuids))
        self.look()
        self.assertEqual([('failed_host', 'cancelled', 5)], self.states())
        self.fail()
        self.look()
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def test_evacuation_is_cancelled_if_lease_ends(self):
        lease, server_id = self.runs()
        self.fail()
        self.look()
        self.cloud.arrive(server_id)
        self.change_lease(lease, status='TERMINATING')
        self.clock.advance(server_moves.AGAIN)
        self.look()
        self.assertEqual([('failed_host', 'cancelled', 1)], self.states())
        self.assertEqual(1, len(self.cloud.evacuations))

    def test_evacuation_is_cancelled_if_server_left_lease(self):
        """Other servers and slots of the lease still have to be evacuated."""
        _lease, _stays, server_id = self.runs(count=2)
        self.runs(name='two', count=2)
        self.fail()
        self.look()
        with self.database.writer() as session:
            booking = lease_status.booking_of(session, server_id)
            # One of its slots is free by then.
            booking.server_id, booking.running = None, False
        self.clock.advance(30)
        self.look()
        self.assertEqual([('failed_host', 'cancelled', 0),
                          ('failed_host', 'planned', 0)],
                         sorted(self.states()))

    def test_late_acceptance_does_not_overwrite_newer_request(self):
        self.answered('', again='No.')
        self.assertEqual([('failed_host', 'planned', 2)], self.states())

    def test_late_refusal_does_not_overwrite_newer_request(self):
        self.answered('No.', again='')
        self.assertEqual([('failed_host', 'accepted', 2)], self.states())

    def test_late_answer_does_not_revive_lost_request(self):
        self.answered('')
        self.assertEqual([('failed_host', 'planned', 1)], self.states())

    def answered(self, *late, again=None):
        """Let Nova answer a request late.

        Another process has looked meanwhile, and requested it again if there
        was still capacity.
        """
        self.runs()
        self.fail()
        answers = [again, *late]

        def evacuate(*_args):
            answer = answers.pop()
            if len(answers) == 1:
                self.clock.advance(server_moves.AGAIN)
                if again is None:
                    self.with_host('two', usage=2, VCPU=2)
                self.new_relocating(INTERVAL).look(self.certain)
            return answer

        with mock.patch.object(self.cloud, 'evacuate', evacuate):
            self.look()
        self.assertNotIn('A move cannot go', self.log.output)

    def test_long_busy_server_is_logged(self):
        self.runs()
        self.fail()
        self.look()
        self.assertNotIn(Obstacle.BUSY, self.log.output)
        self.clock.advance(server_moves.AGAIN)
        self.look()
        self.assertIn(Obstacle.BUSY, self.log.output)

    def test_lost_evacuation_is_requested_again(self):
        """The process died after Nova had set the task of the server."""
        _lease, server_id = self.runs()
        self.fail()
        self.look()
        self.cloud.lost.add(server_id)
        for _time in range(2):
            self.clock.advance(2 * server_moves.AGAIN)
            self.look()
        self.assertEqual(2 * [(server_id, None)], self.cloud.evacuations)

    def test_due_time_days_ahead_does_not_block_evacuation(self):
        _lease, server_id = self.runs()
        self.fail()
        self.look()
        self.cloud.arrive(server_id)
        self.change_moves(next_at=NOW + 5 * 86400)
        self.look()
        self.assertEqual(2 * [(server_id, None)], self.cloud.evacuations)

    def test_due_time_an_hour_ahead_delays_at_most_one_pause(
            self):
        _lease, server_id = self.runs()
        self.fail()
        self.look()
        for attempts, due, asked in (
                (0, 300, 1), (1, 3600 + 120, 1), (2, 400, 0),
                (2, 3600, 1), (6, 3600, 0), (6, 12_000, 1)):
            del self.cloud.evacuations[:]
            self.cloud.arrive(server_id)
            self.change_moves(next_at=self.clock.now() + due,
                              attempts=attempts)
            self.look()
            self.assertEqual(
                asked, len(self.cloud.evacuations), (attempts, due))

    def test_target_capacity_is_used_by_one_evacuation(self):
        """The target of the first one is recorded only a moment later."""
        servers = [self.runs()[1] for _number in range(2)]
        self.runs(name='two')
        self.fail()
        self.look()
        (first, _to), = self.cloud.evacuations
        second, = set(servers) - {first}
        self.assertIn(Obstacle.NO_CAPACITY, self.log.output)
        self.cloud.arrive(first)
        self.clock.advance(30)
        self.look()
        # Its move has failed and its capacity is free again.
        self.assertEqual([first, second], [
            one for one, _to in self.cloud.evacuations])

    def test_server_without_previous_request_comes_first(self):
        servers = [self.runs()[1] for _number in range(2)]
        self.fail()
        look = self.cloud.look

        def slowly(server_id):
            self.clock.advance(evacuation._WORK + 1)
            return look(server_id)

        with mock.patch.object(self.cloud, 'look', slowly):
            self.look()
            (first, _to), = self.cloud.evacuations
            self.cloud.arrive(first)
            self.clock.advance(server_moves.AGAIN)
            self.look()
        self.assertEqual(set(servers), {
            one for one, _to in self.cloud.evacuations})

    def test_concurrent_processes_request_evacuation_once(self):
        self.runs()
        self.fail()
        other, go_on = self.new_relocating(INTERVAL), self.evacuation._go_on

        def first(one):
            other.look(self.certain)
            self.cloud.arrive(one.move.server_id)
            go_on(one)

        with mock.patch.object(self.evacuation, '_go_on', first):
            self.look()
        self.assertEqual(1, len(self.cloud.evacuations))

    def test_concurrent_processes_record_evacuation_once(self):
        self.runs()
        self.fail()
        other, plan = self.new_relocating(INTERVAL), self.evacuation._plan

        def later(stays):
            other.look(self.certain)
            plan(stays)

        with mock.patch.object(self.evacuation, '_plan', later):
            self.look()
        self.assertEqual([('failed_host', 'accepted', 1)], self.states())

    def test_no_evacuation_if_host_recovers_before_request(self):
        """The host is back before the request is recorded."""
        self.runs()
        self.take(start=4 * INTERVAL, end=5 * INTERVAL)
        self.fail()
        needs = self.cloud.needs

        def late(server_id):
            with self.database.writer() as session:
                failure = session.get_one(models.Outage, (
                    outages.locked(session, self.uuid_of('one')).id,
                    outages.FAILURE))
                outages.end(session, self.clock.now(), failure)
            return needs(server_id)

        with mock.patch.object(self.cloud, 'needs', late):
            self.look()
        self.assertEqual([], self.cloud.evacuations)
        self.assertEqual([('failed_host', 'planned', 0)], self.states())

    def test_stalled_process_requests_no_evacuation(self):
        self.runs()
        self.fail()
        look = self.cloud.look

        def slowly(server_id):
            self.clock.advance(60)
            return look(server_id)

        with mock.patch.object(self.cloud, 'look', slowly):
            self.look()
        self.assertEqual([], self.cloud.evacuations)

    def test_process_stalled_at_commit_requests_no_evacuation(self):
        self.runs()
        self.fail()
        retried, pauses = self.database.retried, [60]

        def commit(work, *args):
            done = retried(work, *args)
            if pauses and work.__name__ == '_write':
                self.clock.advance(pauses.pop())
            return done

        with mock.patch.object(self.database, 'retried', commit):
            self.look()
        self.assertEqual(([], []), (pauses, self.cloud.evacuations))

    def test_evacuation_is_requested_after_process_death(self):
        _lease, server_id = self.runs()
        self.fail()

        class Killed(BaseException):
            pass

        def reached(step, _what):
            if step is fault_points.FaultPoint.MOVE_RECORDED:
                raise Killed

        with mock.patch.object(fault_points, 'fault_point', reached):
            self.assertRaises(Killed, self.look)
        self.assertEqual([], self.cloud.evacuations)
        other = self.new_relocating(INTERVAL)
        self.clock.advance(server_moves.AGAIN - 1)
        other.look(self.certain)
        self.assertEqual([], self.cloud.evacuations)
        self.clock.advance(1)
        other.look(self.certain)
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def test_evacuation_waits_for_capacity(self):
        _lease, server_id = self.runs()
        _other, in_the_way, _too = self.runs(name='two', count=2)
        self.fail()
        self.look()
        self.assertEqual([], self.cloud.evacuations)
        self.assertIn(Obstacle.NO_CAPACITY, self.log.output)
        self.cloud.servers.pop(in_the_way)
        self.lifecycle.reconciliation.check(in_the_way)
        self.clock.advance(30)
        self.look()
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def test_busy_or_moved_server_is_not_evacuated(self):
        _lease, server_id = self.runs()
        self.fail()
        for seen in ({'busy': True}, {'host': self.uuid_of('two')},
                     {'host': None, 'rest': cloud_api.RestingState.SHELVED},
                     {'state': State.LEAVING}):
            known = self.cloud.servers[server_id]
            self.at(server_id, **seen)
            self.look()
            self.clock.advance(server_moves.AGAIN)
            self.cloud.servers[server_id] = known
        self.assertEqual([], self.cloud.evacuations)
        self.assertEqual([('failed_host', 'planned', 0)], self.states())

    def test_server_of_ending_lease_is_not_evacuated(self):
        lease, _server_id = self.runs()
        self.fail()
        self.change_lease(lease, status='TERMINATING')
        self.look()
        self.assertEqual([], self.cloud.evacuations)

    def test_failing_server_does_not_block_others(self):
        servers = [self.runs()[1] for _number in range(2)]
        self.fail()
        look = self.cloud.look

        def at(server_id):
            if server_id == servers[0]:
                raise ValueError('Boom.')
            return look(server_id)

        with mock.patch.object(self.cloud, 'look', at):
            self.look()
        self.assertEqual([(servers[1], None)], self.cloud.evacuations)
        self.assertIn('Boom.', self.log.output)

    def test_failing_lease_does_not_block_others(self):
        (broken, _), (_, server_id) = self.runs(), self.runs()
        self.fail()
        plan = server_moves.ServerMoves.plan

        def planned(mover, lease_id, *args):
            if lease_id == broken['id']:
                raise ValueError('Boom.')
            plan(mover, lease_id, *args)

        with mock.patch.object(server_moves.ServerMoves, 'plan', planned):
            self.look()
        self.assertEqual([(server_id, None)], self.cloud.evacuations)
        self.assertIn('Boom.', self.log.output)

    def change_lease(self, lease, **values):
        with self.database.writer() as session:
            for name, value in values.items():
                setattr(session.get(models.Lease, lease['id']), name, value)


class TestDrain(EvacuationTestCase):

    def test_servers_are_migrated_shortly_before_maintenance(self):
        _lease, server_id = self.runs(end=3 * INTERVAL)
        self.take(start=INTERVAL + 10, end=2 * INTERVAL)
        self.look()
        self.assertEqual([], self.cloud.moves)
        self.clock.advance(10)
        self.look()
        self.assertEqual(([(server_id, None)], [], []), (
            self.cloud.moves, self.cloud.evacuations, self.fenced))

    def test_drain_does_not_require_evacuation_to_be_enabled(self):
        _lease, server_id = self.runs()
        self.take()
        self.evacuation.look()
        self.assertEqual([(server_id, None)], self.cloud.moves)

    def test_server_ending_before_maintenance_is_not_migrated(self):
        self.runs(end=100)
        self.take(start=100)
        self.look()
        self.assertEqual([], self.cloud.moves)

    def test_nothing_is_migrated_after_maintenance(self):
        self.runs()
        self.take(start=0, end=100)
        self.clock.advance(100)
        self.look()
        self.assertEqual([], self.cloud.moves)

    def test_immovable_server_is_not_migrated_but_logged(self):
        _lease, server_id = self.runs()
        self.cloud.bound.add(server_id)
        self.take()
        self.look()
        self.assertEqual([], self.cloud.moves)
        self.assertIn('migrate it manually', self.log.output)

    def test_server_is_evacuated_if_host_fails(self):
        _lease, server_id = self.runs()
        self.take(start=0)
        self.fail()
        self.look()
        self.assertEqual(([], [(server_id, None)]), (
            self.cloud.moves, self.cloud.evacuations))

    def test_failed_migration_becomes_evacuation_if_host_fails(self):
        _lease, server_id = self.runs()
        self.take(start=0)
        self.look()
        self.cloud.arrive(server_id)
        self.fail()
        self.clock.advance(server_moves.AGAIN)
        self.look()
        self.assertEqual([('failed_host', 'accepted', 2)], self.states())
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def test_no_live_migration_from_failed_host(self):
        self.runs()
        self.take(start=0)
        self.fail()
        self.evacuation.look()
        self.assertEqual(([], []), (
            self.cloud.moves, self.cloud.evacuations))

    def test_preview_names_obstacles_of_each_lease(self):
        (lease, server_id), = [self.runs()]
        self.assertEqual([(lease['id'], '')], self.promised())
        self.cloud.bound.add(server_id)
        (_id, why), = self.promised()
        self.assertIn('migrate it manually', why)
        self.cloud.bound.clear()
        self.at(server_id, busy=True)
        self.assertEqual([(lease['id'], 'A task of the server is in '
                                        'progress.')],
                         self.promised())
        self.at(server_id, host=self.uuid_of('two'))
        self.assertEqual([(lease['id'], '')], self.promised())
        self.at(server_id, host=self.uuid_of('one'))
        self.runs(name='two', count=2)
        self.assertEqual([(lease['id'], Obstacle.NO_CAPACITY)],
                         self.promised())
        self.cloud.broken['needs'] = errors.CloudUnavailable('No.')
        self.assertEqual([
            (lease['id'], 'Whether it can be reassigned is not known now: '
                          'No.')],
            self.promised())

    def test_preview_judges_servers_of_a_lease_together(self):
        lease, *_servers = self.runs(count=2)
        self.runs(name='two')
        self.assertEqual([
            (lease['id'], ''), (lease['id'], Obstacle.NO_CAPACITY),
        ], sorted(self.promised()))

    def test_migration_is_cancelled_if_maintenance_ends_early(self):
        self.runs()
        self.take()
        go_on = self.evacuation._go_on

        def late(one):
            self.maintenance.end_early('one')
            go_on(one)

        with mock.patch.object(self.evacuation, '_go_on', late):
            self.look()
        self.assertEqual([], self.cloud.moves)
        self.clock.advance(server_moves.AGAIN)
        self.look()
        self.assertEqual([('maintenance', 'cancelled', 0)], self.states())

    def test_no_migration_if_maintenance_ends_before_request(self):
        self.runs()
        self.take()
        needs = self.cloud.needs

        def late(server_id):
            self.maintenance.end_early('one')
            return needs(server_id)

        with mock.patch.object(self.cloud, 'needs', late):
            self.look()
        self.assertEqual([], self.cloud.moves)

    def test_no_migration_if_maintenance_is_postponed(self):
        self.runs()
        self.take()
        needs = self.cloud.needs

        def late(server_id):
            self.maintenance.end_early('one')
            self.take(start=4 * INTERVAL, end=5 * INTERVAL)
            return needs(server_id)

        with mock.patch.object(self.cloud, 'needs', late):
            self.look()
        self.assertEqual([], self.cloud.moves)

    def test_failed_hosts_come_before_maintenance(self):
        self.with_host('three', VCPU=2)
        self.runs()
        _lease, server_id = self.runs(name='three')
        self.take()
        self.fail('three')
        order = []
        with mock.patch.object(self.evacuation, '_go_on', order.append):
            self.look()
        self.assertEqual([True, False], [one.failed for one in order])
        self.assertEqual(server_id, order[0].move.server_id)

    def test_drain_respects_anti_affinity(self):
        self.with_host('three', VCPU=2)
        self.cloud.hosts.add(self.uuid_of('three'))
        lease = self.reserve(0, INTERVAL, self.places(2, affinity=False),
                             active=True)
        names = self.hosts_of(lease)
        for server_id in self.take_slots(lease, 2):
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, self.uuid_of(self.host_of(server_id)))
            self.lifecycle.reconciliation.check(server_id)
        left, = set(self.uuids) - set(names)
        # The only other host without a server of the lease.
        self.with_host(left, usage=2, VCPU=2)
        self.take(names[0], start=0)
        self.assertEqual([(lease['id'], Obstacle.NO_CAPACITY)],
                         self.promised(names[0], start=0))
        self.with_host(left, VCPU=2)
        self.look()
        self.assertEqual([names[0]], [
            self.host_of(server_id) for server_id, _to in self.cloud.moves])
