# SPDX-License-Identifier: Apache-2.0

"""Builds are sent once, and lost ones again."""

import contextlib
import threading
from unittest import mock

import fixtures
from oslo_db import exception as db_exception
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
Seen = cloud_api.ObservedServer
State = base.State


class TestLostBuilds(lifecycle_base.LifecycleTestCase):
    """A build that was sent and lost: its worker or the bus died just then."""

    def sent(self):
        lease = self.lease(50, 1000)
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        self.miss(lease)
        return lease

    def miss(self, lease, trace=cloud_api.BuildTrace.NONE):
        self.cloud.stranded = dict.fromkeys(base.servers_of(lease), trace)

    def look_after(self, *pauses):
        for pause in pauses:
            self.clock.advance(pause)
            self.lifecycle.lost_builds.send()
        return len(self.cloud.sent)

    def test_lost_build_is_resent_after_timeout(self):
        self.sent()
        self.assertEqual(1, self.look_after(10, 100, 19))
        self.assertEqual(2, self.look_after(1))
        self.assertEqual(*self.cloud.sent)

    def sent_by_a_clock(self, ahead):
        self.sent()
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).values(
                dispatched_at=self.clock.now() + ahead))
        self.assertEqual(1, self.look_after(0, 119))
        self.assertEqual(2, self.look_after(1))

    def test_future_dispatch_time_does_not_delay_resending(self):
        self.sent_by_a_clock(3600)

    def test_past_dispatch_time_does_not_hasten_resending(self):
        self.sent_by_a_clock(-3600)

    def test_clock_step_does_not_affect_resending(self):
        self.sent()
        self.look_after(0)
        self.clock.step(3600)
        self.assertEqual(1, self.look_after(119))
        self.clock.step(-3600)
        self.assertEqual(2, self.look_after(1))
        self.assertEqual(2, self.look_after(119))

    def test_build_missing_for_the_first_time_is_not_resent(self):
        """The build may have arrived just before the check."""
        self.sent()
        self.assertEqual(1, self.look_after(10_000))

    def test_timeout_restarts_after_resending(self):
        self.sent()
        self.assertEqual(2, self.look_after(0, 120, 119))
        self.assertEqual(3, self.look_after(1))

    def test_arrived_build_is_not_resent(self):
        self.sent()
        self.look_after(0)
        self.cloud.stranded.clear()
        self.assertEqual(1, self.look_after(300, 300))

    def test_timeout_restarts_if_build_was_seen_meanwhile(self):
        lease = self.sent()
        self.look_after(0)
        self.cloud.stranded.clear()
        self.look_after(119)
        self.miss(lease)
        self.assertEqual(1, self.look_after(1, 119))
        self.assertEqual(2, self.look_after(1))

    def test_build_of_ended_lease_is_not_resent(self):
        lease = self.sent()
        self.look_after(0)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(1, self.look_after(300))

    def test_two_listeners_resend_lost_build_once(self):
        lease = self.sent()
        self.look_after(0)
        gates = []

        def send(*args):
            gates.append(args[-1])
            return ''

        self.cloud.send = send
        other = self.new_handlers(self.db.connect())
        other.lost_builds.send()
        self.look_after(120)
        other.lost_builds.send()
        self.assertEqual([True, False], [
            gate(base.servers_of(lease)) is not None for gate in gates])

    def test_timeout_restarts_after_cloud_outage(self):
        self.sent()
        self.look_after(0)
        self.cloud.broken['traces'] = errors.CloudUnavailable('down')
        self.assertEqual(1, self.look_after(300))
        self.cloud.broken.clear()
        # It is missing from now on.
        self.assertEqual(1, self.look_after(0, 119))
        self.assertEqual(2, self.look_after(1))

    def test_cloud_outage_is_noticed_after_few_leases(self):
        """As each of them may wait for its timeout."""
        self.host('two', VCPU=16)
        for _lease in range(5):
            self.sent()
        with mock.patch.object(
                self.cloud, 'traces',
                side_effect=errors.CloudUnavailable('silent')) as traces:
            self.lifecycle.lost_builds.send()
        self.assertEqual(3, traces.call_count)

    def test_stuck_build_is_abandoned_and_not_resent(self):
        lease = self.sent()
        server_id, = base.servers_of(lease)
        self.miss(lease, cloud_api.BuildTrace.CAUGHT)
        self.look_after(0, 119)
        self.assertEqual([], self.cloud.marked_failed)
        self.assertEqual(1, self.look_after(1, 300, 300))
        self.assertEqual([server_id], self.cloud.marked_failed)
        self.assertEqual('ERROR', self.status(lease))
        self.assertIsNone(self.host_of(server_id))

    def test_timeout_restarts_when_build_trace_appears(self):
        lease = self.sent()
        self.look_after(0, 119)
        self.miss(lease, cloud_api.BuildTrace.CAUGHT)
        self.assertEqual(1, self.look_after(1, 119))
        self.assertEqual([], self.cloud.marked_failed)
        self.look_after(1)
        self.assertEqual(1, len(self.cloud.marked_failed))

    def test_lost_build_without_stored_call_is_abandoned(self):
        """The build of a server with a reservation slot is abandoned."""
        server_id, = self.take_slots(self.reserve(0, 1000, active=True))
        self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
        self.look_after(0, 120)
        self.assertEqual(([server_id], []),
                         (self.cloud.marked_failed, self.cloud.sent))


class _RolledBack(Exception):
    """A commit that does not reach the database."""


class TestImmediateStart(lifecycle_base.LifecycleTestCase):
    """A lease from now on, whose request sends its build itself."""

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.cast = []
        self.new = self.new_lease(0, 1000, count=2)
        self.made = self.leases.creation.create(
            self.new, self.encryption.encrypt('call'), dispatch.HEAD_START)

    def cast_it(self, gate):
        deadline = gate(self.new.server_ids)
        if deadline is not None and not deadline.passed():
            self.cast.append(sorted(self.new.server_ids))

    def send(self, cast=None):
        self.lifecycle.dispatch.send_own(self.made, cast or self.cast_it)

    def listen(self):
        """Let a listener carry out what is due after the head start."""
        self.clock.advance(dispatch.HEAD_START)
        driven.run_due(self.engine)

    def sent(self):
        return [*self.cast, *(sorted(servers)
                              for _call, servers in self.cloud.sent)]

    def assert_sent_once(self):
        self.listen()
        self.listen()
        self.assertEqual([sorted(self.new.server_ids)], self.sent())
        described = views.get(self.database, self.made['id'])
        self.assertEqual('STARTING', described['status'])
        self.assertEqual('DONE', self.events_of(self.made)['start_lease'])

    def test_build_is_sent_by_its_request(self):
        self.send()
        self.assertEqual(1, len(self.cast))
        self.assertEqual(self.made, views.get(
            self.database, self.made['id']))
        self.assert_sent_once()

    def test_listener_does_not_send_during_head_start(self):
        self.clock.advance(dispatch.HEAD_START - 1)
        driven.run_due(self.engine)
        self.assertEqual([], self.sent())
        self.send()
        self.assert_sent_once()

    def test_listener_sends_build_of_dead_request(self):
        self.assertEqual('PENDING', self.status(self.made))
        self.assert_sent_once()
        self.assertEqual([], self.cast)
        self.assertIn(('lease.event.start_lease', self.made['id']),
                      self.notified)

    def test_request_sends_nothing_after_listener(self):
        self.listen()
        self.send()
        self.assertEqual([], self.cast)
        self.assertEqual('PENDING', self.made['status'])
        self.assert_sent_once()

    def test_stalled_request_with_permit_sends_nothing(self):
        """The build is found lost, and sent once."""
        def stand_still(gate):
            deadline = gate(self.new.server_ids)
            for server_id in self.new.server_ids:
                self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
            self.lifecycle.lost_builds.send()
            self.clock.advance(base.LOST_AFTER)
            self.lifecycle.lost_builds.send()
            self.assertTrue(deadline.passed())

        self.send(stand_still)
        self.assert_sent_once()

    def lose_answers(self, count, committed=True, step=0):
        """Lose the answers to commits, a second after each other."""
        begin, lost = self.database.begin, []

        @contextlib.contextmanager
        def losing():
            with contextlib.suppress(_RolledBack), begin() as connection:
                yield connection
                if not committed and len(lost) < count:
                    raise _RolledBack
            if len(lost) < count:
                lost.append(self.clock.advance(1))
                self.clock.step(step)
                raise errors.OutcomeUnknown

        return mock.patch.object(self.database, 'begin', losing)

    def test_request_sends_build_after_unanswered_commit(self):
        with self.lose_answers(3):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.assertEqual(self.made, views.get(
            self.database, self.made['id']))
        self.assert_sent_once()

    def test_request_sends_build_after_lost_commit(self):
        with self.lose_answers(3, committed=False):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.assert_sent_once()

    def test_request_sends_build_despite_clock_step_back(self):
        self.useFixture(fixtures.Timeout(20, gentle=True))
        with self.lose_answers(1, step=-3600):
            self.send()
        self.assertEqual(1, len(self.cast))
        self.clock.step(3600)
        self.assert_sent_once()

    def losing(self, send):
        """Lose answers to the commits of a listener's permits."""
        def lost(transaction):
            @contextlib.contextmanager
            def losing():
                with transaction() as subject:
                    yield subject
                if len(answers) < 3:
                    answers.append(self.clock.advance(1))
                    raise errors.OutcomeUnknown
            return losing

        answers, given = [], self.cloud.send

        def late(call, credential, server_ids, gate):
            def unanswered(chosen):
                with (mock.patch.object(self.database, 'begin', lost(
                        self.database.begin)),
                      mock.patch.object(self.database, 'writer', lost(
                          self.database.writer))):
                    return gate(chosen)

            return given(call, credential, server_ids, unanswered)

        with mock.patch.object(self.cloud, 'send', late):
            send()
        self.assertEqual(3, len(answers))

    def test_listener_sends_build_after_unanswered_commit(self):
        self.losing(self.listen)
        self.assertEqual(1, len(self.cloud.sent))
        self.assertEqual(1, self.notified.count(
            ('lease.event.start_lease', self.made['id'])))
        self.assert_sent_once()

    def test_listener_resends_build_after_unanswered_commit(self):
        self.listen()
        self.cloud.sent.clear()
        for server_id in self.new.server_ids:
            self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
        self.lifecycle.lost_builds.send()
        self.clock.advance(base.LOST_AFTER)
        self.losing(self.lifecycle.lost_builds.send)
        self.assert_sent_once()

    def test_request_sends_nothing_if_listener_was_faster(self):
        """The listener has sent what the request could not record."""
        begin = self.database.begin

        @contextlib.contextmanager
        def lost():
            with contextlib.suppress(_RolledBack), begin() as connection:
                yield connection
                raise _RolledBack
            self.database.begin = begin
            self.listen()
            raise errors.OutcomeUnknown

        self.database.begin = lost
        self.send()
        self.assertEqual([], self.cast)
        self.assert_sent_once()

    def test_unknown_outcome_of_dispatch_is_logged(
            self):
        log = self.useFixture(fixtures.FakeLogger())
        with self.lose_answers(100):
            self.send()
        self.assertEqual([], self.cast)
        self.assertIn('it is not known whether its build was sent',
                      log.output)
        self.assertNotIn('its build was not sent', log.output)

    def test_failed_cast_does_not_undo_lease(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        for failure in (ValueError(), db_exception.DBError(),
                        errors.CloudUnavailable('down'),
                        errors.InvalidLeaseParams('no')):
            self.made = self.leases.creation.create(
                self.new_lease(0, 1000, resources={'VCPU': 0}),
                self.encryption.encrypt('call'), dispatch.HEAD_START)
            server_ids = base.servers_of(self.made)

            def cast(gate, failure=failure, server_ids=server_ids):
                self.assertIsNotNone(gate(server_ids))
                raise failure

            self.send(cast)
            self.assertEqual('STARTING', self.made['status'])
            self.assertEqual(self.made, views.get(
                self.database, self.made['id']))
            for server_id in server_ids:
                self.cloud.stranded[server_id] = cloud_api.BuildTrace.NONE
            self.listen()
            self.assertEqual([], self.sent())
            self.lifecycle.lost_builds.send()
            self.clock.advance(base.LOST_AFTER)
            self.lifecycle.lost_builds.send()
            self.assertEqual([sorted(server_ids)], self.sent())
            self.cloud.stranded.clear()
            self.cloud.sent.clear()

    def test_build_of_lease_ended_meanwhile_is_not_sent(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        self.send()
        self.listen()
        self.assertEqual([], self.sent())

    def test_listener_sends_build_if_request_gets_no_permit(self):
        with fixtures.MonkeyPatch(
                'blazar_core.lifecycle.dispatch.Dispatch._take_own',
                mock.Mock(side_effect=errors.DatabaseUnavailable())):
            self.send()
        self.assertEqual([], self.cast)
        self.assert_sent_once()

    def test_concurrent_senders_send_build_once(self):
        """The request and the listeners that assume it died run together."""
        self.clock.advance(dispatch.HEAD_START)
        others = [threading.Thread(
            target=self.lifecycle.lease_start.start, args=(self.made['id'],))
            for _number in range(3)]
        own = threading.Thread(target=self.send)
        for thread in (*others, own):
            thread.start()
        for thread in (*others, own):
            thread.join(60)
        self.assert_sent_once()

    def test_build_without_valid_host_fails_lease(self):
        self.send()
        for server_id in self.new.server_ids:
            self.lifecycle.reconciliation.observe(server_id, Seen(
                State.ERROR, None, 'No valid host', unplaced=True))
        self.assertEqual('ERROR', self.status(self.made))
        self.assertEqual([], self.scalars(models.DeferredBuild))

    def test_call_is_kept_until_all_servers_are_active(self):
        self.send()
        first, second = self.new.server_ids
        self.see(first, State.RUNNING, self.one)
        self.assertEqual(1, len(self.scalars(models.DeferredBuild)))
        self.see(second, State.RUNNING, self.one)
        self.assertEqual([], self.scalars(models.DeferredBuild))
        self.assertEqual('ACTIVE', self.status(self.made))
