# SPDX-License-Identifier: Apache-2.0

"""The end of a lease, and its deletion."""

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import refusals
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
NOW = base.NOW
Seen = cloud_api.ObservedServer
State = base.State


class TestEnd(lifecycle_base.LifecycleTestCase):

    def test_end_deletes_servers_and_terminates_lease(self):
        lease = self.running_lease(count=2)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual(sorted(base.servers_of(lease)),
                         sorted(self.cloud.deleted))
        described = views.get(self.database, lease['id'])
        self.assertEqual('TERMINATED', described['status'])
        reservation, = described['reservations']
        self.assertEqual(('deleted', []), (
            reservation['status'], reservation['servers']))
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(lease))
        self.assertEqual([('lease.event.end_lease', lease['id'])],
                         self.notified)
        self.assertEqual(2, self.room())

    def test_capacity_is_freed_only_when_server_is_deleted(self):
        lease = self.running_lease(0, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.cloud.stubborn.update([first, second])
        self.assertIsInstance(
            self.lifecycle.lease_end.end(lease['id']), retries.RetryAfter)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(0, self.room())
        self.assertEqual([], self.notified)
        self.cloud.stubborn.discard(first)
        later = self.lifecycle.lease_end.end(lease['id'])
        self.assertIn(second, later.why)
        self.assertNotIn(first, later.why)
        self.assertEqual(1, self.room())
        self.cloud.stubborn.clear()
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(2, self.room())

    def test_end_is_idempotent(self):
        lease = self.running_lease()
        for _time in range(2):
            self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual(1, len(self.cloud.deleted))
        self.assertEqual(['lease.event.end_lease'], self.events_told())

    def test_end_of_pending_lease_deletes_its_encrypted_call(self):
        lease = self.lease(50, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.HELD)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual([], self.scalars(models.DeferredBuild.lease_id))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.cloud.sent)

    def test_undeletable_server_does_not_block_others(self):
        for number in range(3):
            lease = self.running_lease(0, 10_000, count=2)
            broken = base.servers_of(lease)[number % 2]
            self.cloud.broken = {broken: RuntimeError('its cell is down')}
            later = self.lifecycle.lease_end.end(lease['id'])
            self.assertIn(broken, later.why)
            self.assertEqual('TERMINATING', self.status(lease))
            self.assertEqual(1, self.room())
            self.cloud.broken = {}
            self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
            self.assertEqual('TERMINATED', self.status(lease))

    def test_lease_ends_when_user_deletes_last_server(self):
        lease = self.running_lease(0, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.see(first, State.GONE)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual(1, self.room())
        self.see(second, State.GONE)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(2, self.room())
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual(['lease.event.end_lease'], self.events_told())

    def test_pending_lease_ends_when_its_servers_are_deleted(self):
        lease = self.lease(50, 100)
        self.see(*base.servers_of(lease), State.GONE)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.scalars(models.DeferredBuild.lease_id))
        # It never started, so there is no event of a start.
        self.assertEqual({'end_lease': 'DONE'}, self.events_of(lease))
        described = views.get(self.database, lease['id'])
        self.assertEqual((NOW + 50, NOW + 50, NOW), (
            described['start_date'], described['end_date'],
            described['events'][0]['time']))
        self.assert_ended_early(described, 'start', NOW + 100)

    def assert_ended_early(self, lease, when, end):
        """Assert that a lease says why it ended, and its planned end."""
        (row,) = lease['conditions']
        self.assertEqual(('EndedEarly', 'ServersDeleted', {'end_date': end}), (
            row['type'], row['reason'], row['details']))
        self.assertIn(f'deleted or removed before its {when}.', row['message'])

    def test_lease_that_ends_in_time_or_is_deleted_has_not_ended_early(self):
        for is_deleted in (False, True):
            lease = self.running_lease(
                self.clock.now() - NOW, self.clock.now() - NOW + 100)
            self.clock.advance(50 if is_deleted else 100)
            if is_deleted:
                self.lifecycle.lease_end.delete(lease['id'])
            self.lifecycle.lease_end.end(lease['id'])
            self.assertEqual({'TERMINATED'}, {*self.scalars(
                models.Lease.status)})
            self.assertEqual([], [row for rows in self.scalars(
                models.Lease.conditions) for row in rows or ()])

    def test_lease_ended_early_shows_its_actual_end(self):
        lease = self.running_lease(request=self.request(
            0, 10_000, before_end=NOW + 9000))
        self.clock.advance(100)
        self.see(*base.servers_of(lease), State.GONE)
        described = views.get(self.database, lease['id'])
        self.assertEqual(('TERMINATED', NOW, NOW + 100, None), (
            described['status'], described['start_date'],
            described['end_date'], described['before_end_date']))
        self.assert_ended_early(described, 'end', NOW + 10_000)
        self.assertEqual(
            [('start_lease', NOW, 'DONE'), ('end_lease', NOW + 100, 'DONE')],
            [(event['event_type'], event['time'], event['status'])
             for event in described['events']])

    def test_sent_before_end_event_is_kept_after_early_end(self):
        lease = self.running_lease(request=self.request(
            0, 10_000, before_end=NOW + 50))
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.see(*base.servers_of(lease), State.GONE)
        described = views.get(self.database, lease['id'])
        self.assertEqual(
            (NOW + 50, ['start_lease', 'before_end_lease', 'end_lease']),
            (described['before_end_date'], [
                event['event_type'] for event in described['events']]))

    def test_partly_started_lease_has_completed_start_event(self):
        lease = self.lease(50, 10_000, count=2)
        first, second = base.servers_of(lease)
        self.clock.advance(50)
        driven.run_due(self.new_engine())
        self.see(first, State.RUNNING, self.one)
        self.lifecycle.reconciliation.observe(second, Seen(
            State.ERROR, fault='No valid host', unplaced=True))
        # It is to be sent again.
        self.assertEqual('UNDONE', self.events_of(lease)['start_lease'])
        for server_id in first, second:
            self.see(server_id, State.GONE)
        self.assertEqual({'start_lease': 'DONE', 'end_lease': 'DONE'},
                         self.events_of(lease))

    def test_lease_ended_late_shows_its_planned_end(self):
        lease = self.running_lease(request=self.request(
            0, 100, before_end=NOW + 50))
        self.clock.advance(150)
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id'], True))
        described = views.get(self.database, lease['id'])
        self.assertEqual(('TERMINATED', NOW + 100, NOW + 50), (
            described['status'], described['end_date'],
            described['before_end_date']))
        self.assertEqual(3, len(described['events']))

    def test_deleted_server_is_processed_once(self):
        lease = self.running_lease(count=2)
        server_id = base.servers_of(lease)[0]
        self.see(server_id, State.GONE)
        generation = self.generation('one')
        self.see(server_id, State.GONE)
        self.assertEqual(generation, self.generation('one'))
        self.assertEqual('ACTIVE', self.status(lease))

    def test_deleted_server_advances_host_generation(self):
        lease = self.running_lease()
        generation = self.generation('one')
        self.see(*base.servers_of(lease), State.GONE)
        self.assertEqual(generation + 1, self.generation('one'))

    def test_running_server_does_not_reactivate_ending_lease(
            self):
        lease = self.running_lease()
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.see(*base.servers_of(lease), State.RUNNING, self.one)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_failed_build_does_not_stop_end(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.cloud.stubborn.add(server_id)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATING', self.status(lease))
        self.cloud.stubborn.clear()
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))

    def test_overstaying_server_keeps_its_capacity(self):
        lease = self.running_lease(0, 100, count=2)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.clock.advance(200)
        self.lifecycle.lease_end.end(lease['id'])
        refused = self.assertRaises(errors.Refused, self.lease, 200, 300)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 1, 0, NOW + 260),
            refused.refusal)


class TestServerRecords(lifecycle_base.LifecycleTestCase):
    """The cloud keeps records of a server whose build was never sent."""

    def gone(self, *server_ids):
        for server_id in server_ids:
            self.cloud.servers.pop(server_id, None)
            self.lifecycle.reconciliation.check(server_id)

    def test_late_end_does_not_affect_server_of_next_lease(self):
        """A frozen worker continues after the next occurrence has started.

        Another worker has ended the occurrence that it was ending.
        """
        self.host('one', VCPU=4)
        late, current = (self.running_lease(0, 100) for _lease in range(2))
        server_id, = base.servers_of(current)
        before = self.everything()
        self.assertTrue(self.lifecycle.server_removal.remove_server(
            late['id'], server_id, True))
        self.lifecycle.server_removal.gone(late['id'], server_id)
        after = self.everything()
        self.assertEqual(before['bookings'], after['bookings'])
        self.assertEqual(before['hosts'], after['hosts'])

    def test_records_of_deleted_reserved_servers_are_removed(self):
        held, = base.servers_of(self.lease(50, 100))
        self.gone(held)
        self.assertEqual([held], self.cloud.forgotten)

    def test_records_of_reserved_servers_are_removed_at_end(self):
        lease = self.lease(50, 100, count=2)
        held = base.servers_of(lease)
        for server_id in held:
            self.cloud.servers[server_id] = Seen(State.HELD)
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(sorted(held), sorted(self.cloud.forgotten))

    def test_records_of_sent_builds_are_kept(self):
        """A conductor may be building the server."""
        sent = self.lease(50, 100)
        self.lifecycle.lease_start.start(sent['id'])
        at_once = self.lease(0, 100)
        self.gone(*base.servers_of(sent), *base.servers_of(at_once))
        self.gone(*self.take_slots(self.reserve(active=True)))
        self.assertEqual([], self.cloud.forgotten)

    def test_failed_removal_of_records_is_retried(self):
        lease = self.lease(50, 100)
        held, = base.servers_of(lease)
        self.cloud.broken['forget'] = RuntimeError('no database')
        self.assertRaises(RuntimeError, self.gone, held)
        self.assertEqual({held},
                         self.lifecycle.reconciliation.unfinished().keys())
        self.assertEqual(retries.AGAIN,
                         self.lifecycle.lease_end.end(lease['id']).seconds)
        self.cloud.broken.clear()
        self.gone(held)
        self.assertEqual([held], self.cloud.forgotten)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_freed_slot_is_reset(self):
        lease = self.reserve(active=True)
        self.gone(*self.take_slots(lease))
        self.assertEqual([(None, None)], [
            (row.server_id, row.dispatched_at)
            for row in self.scalars(models.Booking)])


class TestDelete(lifecycle_base.LifecycleTestCase):

    def setUp(self):
        super().setUp()
        self.worker = self.new_engine()

    def pending(self):
        return self.reserve(50, 100)

    def offered(self):
        return self.leases.creation.offer(self.new_lease(50, 100), 60)

    def held(self):
        lease = self.lease(50, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.HELD)
        return lease

    def starting(self):
        lease = self.lease(0, 100)
        self.cloud.servers[base.servers_of(lease)[0]] = Seen(State.BUILDING)
        return lease

    def active(self):
        return self.running_lease(0, 100)

    def with_places(self):
        lease = self.reserve(0, 100, active=True)
        server_id, = self.take_slots(lease)
        self.cloud.servers[server_id] = Seen(State.RUNNING, self.one)
        self.lifecycle.reconciliation.check(server_id)
        return lease

    def with_free_places(self):
        return self.reserve(0, 100, active=True)

    def terminating(self):
        lease = self.running_lease(0, 100)
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.end(lease['id'])
        self.cloud.stubborn.clear()
        return lease

    def terminated(self):
        lease = self.running_lease(0, 100)
        self.lifecycle.lease_end.end(lease['id'])
        return lease

    def failed(self):
        lease = self.lease(0, 100)
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = Seen(State.ERROR)
        self.lifecycle.reconciliation.check(server_id)
        return lease

    def never_started(self):
        lease = self.reserve(50, 100)
        self.lifecycle.lease_start.give_up(lease['id'], 'start_lease')
        return lease

    #: A method, the status of its lease, and whether there are servers to
    #: delete.
    STATES = (
        ('offered', 'OFFERED', False), ('pending', 'PENDING', False),
        ('held', 'PENDING', True), ('starting', 'STARTING', True),
        ('active', 'ACTIVE', True), ('with_places', 'ACTIVE', True),
        ('with_free_places', 'ACTIVE', False),
        ('terminating', 'TERMINATING', True),
        ('terminated', 'TERMINATED', False), ('failed', 'ERROR', True),
        ('never_started', 'ERROR', False))

    def assert_over(self, lease):
        self.assertRaises(errors.NotFound, views.get, self.database,
                          lease['id'])
        row, = self.scalars(models.Lease, models.Lease.id == lease['id'])
        self.assertEqual('TERMINATED', row.status)
        self.assertEqual({}, self.places_type.open)
        self.assertEqual({}, self.cloud.servers)
        self.assertEqual({'leases', 'reservations', 'events', 'hosts'},
                         set(self.count_rows('changes')))
        self.assertEqual({'DONE'}, set(self.scalars(
            models.Event.status, models.Event.lease_id == lease['id'])))
        self.assertEqual(2, self.room())

    def test_lease_can_be_deleted_in_every_state(self):
        for name, status, has_servers in self.STATES:
            lease = getattr(self, name)()
            self.assertEqual(status, self.status(lease), name)
            self.notified.clear()
            self.lifecycle.lease_end.delete(lease['id'])
            told = [] if name == 'terminated' else ['lease.event.end_lease']
            if has_servers:
                self.assertEqual('DELETING', self.status(lease), name)
                self.assertEqual(['lease.delete'], self.events_told(), name)
                self.assertGreater(driven.run_due(self.worker), 0, name)
            self.assertEqual(['lease.delete', *told], self.events_told(),
                             name)
            self.assert_over(lease)

    def test_repeated_deletion_is_notified_once(self):
        for name, _status, has_servers in self.STATES:
            lease = getattr(self, name)()
            self.notified.clear()
            for _time in range(2):
                self.lifecycle.lease_end.delete(lease['id'])
            driven.run_due(self.worker)
            self.lifecycle.lease_end.delete(lease['id'])
            self.assertEqual(1, self.events_told().count('lease.delete'),
                             name)
            self.assert_over(lease)

    def test_unknown_lease_is_not_found(self):
        self.assertRaises(
            errors.NotFound, self.lifecycle.lease_end.delete, 'unheard-of')

    def test_deletion_of_remaining_servers_is_retried(self):
        lease = self.active()
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.worker)
        self.assertEqual('DELETING', self.status(lease))
        self.cloud.stubborn.clear()
        self.clock.advance(retries.AGAIN)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def test_failed_end_of_resource_type_is_retried(self):
        lease = self.with_free_places()
        self.places_type.broken['end'] = RuntimeError('no database')
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        driven.run_due(self.worker)
        self.assertEqual('DELETING', self.status(lease))
        self.places_type.broken.clear()
        self.clock.advance(300)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def while_its_end_is_carried_out(self, lease):
        """Delete a lease while its end is carried out."""
        self.clock.advance(100)
        retried, deleted = self.worker._database.retried, []

        def late(work, *args, **kwargs):
            # Its end was carried out, and is about to be recorded.
            if getattr(work, 'func', None) == self.worker._settled and (
                    not deleted):
                deleted.append(self.lifecycle.lease_end.delete(lease['id']))
            return retried(work, *args, **kwargs)

        self.cloud.stubborn.update(self.cloud.servers)
        self.worker._database.retried = late
        driven.run_due(self.worker)
        self.assertEqual([None], deleted)
        self.cloud.stubborn.clear()
        driven.run_due(self.worker)
        self.clock.advance(retries.AGAIN)
        driven.run_due(self.worker)
        self.assert_over(lease)

    def test_delete_while_end_waits_for_servers(self):
        self.while_its_end_is_carried_out(self.active())

    def test_delete_while_end_waits_for_servers_in_slots(self):
        self.while_its_end_is_carried_out(self.with_places())

    def test_delete_while_end_is_being_completed(self):
        self.while_its_end_is_carried_out(self.with_free_places())

    def test_delete_overrides_existing_claim_of_end_event(self):
        lease = self.active()
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                event_type='end_lease').update({
                    'status': 'IN_PROGRESS', 'claimed_by': 'dead',
                    'claimed_until': NOW + 1000})
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual(1, driven.run_due(self.worker))
        self.assert_over(lease)

    def test_deleting_lease_sends_no_before_end_notification(self):
        lease = self.active()
        self.lifecycle.lease_end.delete(lease['id'])
        self.notified.clear()
        self.lifecycle.notices.announce(lease['id'], 'before_end_lease')
        self.assertEqual([], self.notified)


class TestBeforeEndNotification(lifecycle_base.LifecycleTestCase):

    def test_end_moved_during_notification_is_notified_again(self):
        lease = self.running_lease(request=self.request(
            0, 100, before_end=NOW + 50))
        self.clock.advance(50)
        told = []

        def notify(event_type, _lease):
            told.append(event_type)
            if len(told) == 1:
                self.leases.updates.update(
                    lease['id'], updates.LeaseChange(end=NOW + 200))

        self.lifecycle.notices._notify = notify
        worker = self.new_engine()
        driven.run_due(worker)
        self.clock.advance(99)
        self.assertEqual(0, driven.run_due(worker))
        self.clock.advance(1)
        driven.run_due(worker)
        self.assertEqual(2 * ['lease.event.before_end_lease'], told)

    def test_notification_is_sent(self):
        lease = self.running_lease()
        self.assertIsNone(
            self.lifecycle.notices.announce(lease['id'], 'before_end_lease'))
        self.assertEqual([('lease.event.before_end_lease', lease['id'])],
                         self.notified)

    def test_ended_lease_sends_no_notification(self):
        lease = self.running_lease()
        self.lifecycle.lease_end.end(lease['id'])
        self.notified.clear()
        self.assertIsNone(
            self.lifecycle.notices.announce(lease['id'], 'before_end_lease'))
        self.assertEqual([], self.notified)


class TestUnresponsiveCell(lifecycle_base.LifecycleTestCase):
    """A cell that does not answer, attempt after attempt."""

    scenarios = [databases.SCENARIOS[0]]

    def setUp(self):
        super().setUp()
        self.engine, self.statements = self.new_engine(), []
        for database in (self.database, self.engine._database):
            sa.event.listen(
                database.engine, 'before_cursor_execute',
                lambda _connection, _cursor, statement, *_rest:
                    self.statements.append(statement))

    def attempts(self, lease, event_type, count=4):
        """Return how many statements each attempt after the first takes."""
        found = []
        for _number in range(count):
            del self.statements[:]
            self.assertEqual(1, driven.run_due(self.engine))
            found.append([one for one in self.statements
                          if not one.startswith('BEGIN')])
            self.assertEqual('UNDONE', self.events_of(lease)[event_type])
            self.clock.advance(60)
        return max(map(len, found[1:]))

    def test_the_end_of_many_servers_takes_few_statements(self):
        self.host('two', VCPU=40)
        lease = self.running_lease(0, 100, count=20)
        self.clock.advance(100)
        for server_id in base.servers_of(lease):
            self.cloud.broken[server_id] = errors.CloudUnavailable(
                'Cell one has not answered an earlier call yet.')
        self.assertLessEqual(self.attempts(lease, 'end_lease'), 13)
        self.assertIn('Cell one has not answered', self.reason(lease))
        self.cloud.broken.clear()
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_start_takes_few_statements(self):
        lease = self.lease(50, 1000)
        self.clock.advance(50)
        self.cloud.broken['send'] = errors.CloudUnavailable(
            'Cell one has not answered an earlier call yet.')
        self.assertLessEqual(self.attempts(lease, 'start_lease'), 11)
        self.assertIn('Cell one has not answered', self.reason(lease))
        self.cloud.broken.clear()
        driven.run_due(self.engine)
        self.assertEqual('STARTING', self.status(lease))
