# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for capacity."""

import logging

import fixtures
import sqlalchemy as sa

from blazar_core.audit import audit
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle.admission_queue import PAUSE
from blazar_core.lifecycle import demands
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW
State = cloud_api.ServerState

load_tests = databases.load_tests


class AdmissionQueueTestCase(base.LeaseTestCase):
    """A host with two CPUs, and leases that may wait for them."""

    def setUp(self):
        super().setUp()
        self.one = self.host('one', VCPU=2)
        self.engine = self.new_engine()
        self.audit = audit.Audit(self.database, self.clock, self.lifecycle,
                                 self.encryption.decrypt, 10)

    def fill(self, end=1000):
        """Reserve the whole host and return the lease."""
        return self.reserve(0, end, self.places(2), active=True)

    def wanted(self, start=0, end=100, retries=10, interval=60, duration=None,
               **values):
        return self.request(
            start, end, retry=requests.Retry(interval, retries),
            duration=duration, **values)

    def held(self, count=1, project='project', **wanted):
        """Create a lease of a boot that may wait; its build is deferred."""
        return self.leases.creation.create(self.new_lease(
            count=count, project=project, request=self.wanted(**wanted)),
            self.encryption.encrypt('call'))

    def asked(self, amount=1, project='project', **wanted):
        """Create a lease with slots that may wait."""
        return self.reserve(0, 0, self.places(amount), project=project,
                            request=self.wanted(**wanted))

    def free(self, lease):
        self.lifecycle.lease_end.delete(lease['id'])

    def look(self):
        self.lifecycle.admission_queue.look()

    def statuses(self, *leases):
        return [self.status(lease) for lease in leases]

    def window(self, lease):
        found = views.get(self.database, lease['id'])
        return found['start_date'] - NOW, found['end_date'] - NOW


class TestAdmissionQueue(AdmissionQueueTestCase):

    def test_lease_is_admitted_at_once_if_capacity_is_free(self):
        self.assertEqual('PENDING', self.held()['status'])
        lease = self.asked()
        self.assertEqual(('PENDING', 'retry', None), (
            lease['status'], lease['lease_type'], lease['retry_until']))
        self.assertNotIn('retry_lease', self.events_of(lease))

    def test_lease_without_retries_or_listener_is_refused(self):
        self.fill()
        self.assertRaises(errors.Refused, self.lease)
        self.assertRaises(errors.Refused, self.leases.creation.create,
                          self.new_lease(request=self.wanted()), 'encrypted',
                          5)

    def test_waiting_lease_takes_no_capacity_until_admitted(self):
        first = self.fill()
        generation = self.generation('one')
        lease = self.held(end=2000)
        self.assertEqual('WAITING', lease['status'])
        said = (
            'The lease waits for capacity and is retried: There is no '
            'capacity for this lease in this window. fits_now: 0 of 1. '
            'Capacity is expected from 2027-01-15 08:16:40 UTC on.')
        self.assertEqual(said, lease['status_reason'])
        self.assertEqual(NOW + 600, lease['retry_until'])
        self.assertFalse(lease['degraded'])
        self.assertEqual(generation, self.generation('one'))
        self.clock.advance(30)
        driven.run_due(self.engine)
        self.look()
        self.assertEqual('WAITING', self.status(lease))
        self.assertEqual(said, self.reason(lease))
        self.assertEqual([], [*self.audit.differences()])
        self.free(first)
        self.look()
        self.assertEqual('PENDING', self.status(lease))
        self.assertEqual('', self.reason(lease))
        self.assertEqual('one', self.host_of(base.servers_of(lease)[0]))
        driven.run_due(self.engine)
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([('call', base.servers_of(lease))], self.cloud.sent)
        self.assertEqual((30, 2000), self.window(lease))
        self.assertEqual('DONE', self.events_of(lease)['retry_lease'])
        self.assertIn(('lease.update', lease['id']), self.notified)
        self.clock.advance(2000)
        self.cloud.servers.clear()
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_lease_with_duration_keeps_it_whenever_admitted(self):
        first = self.fill()
        lease = self.asked(duration=100, before_end=NOW + 90)
        self.clock.advance(500)
        self.free(first)
        self.look()
        self.assertEqual((500, 600), self.window(lease))
        found = views.get(self.database, lease['id'])
        self.assertEqual(NOW + 590, found['before_end_date'])
        self.assertEqual({NOW + 500, NOW + 600}, {
            row.time for row in self.rows(models.Event, lease)
            if row.event_type in ('start_lease', 'end_lease')})
        self.assertEqual(
            [(NOW + 500, NOW + 600)],
            [(row.start_date, row.end_date) for row in self.bookings(lease)])

    def test_future_lease_starts_at_its_start_date_once_admitted(self):
        first = self.fill()
        lease = self.asked(start=200, end=300)
        self.assertEqual('WAITING', lease['status'])
        self.free(first)
        self.look()
        self.assertEqual((200, 300), self.window(lease))
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(lease))
        self.clock.advance(200)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_admission_is_retried_periodically_without_changes(self):
        """The cloud may change without any change in the database."""
        self.places_type.demand_of = lambda reserved: model.Demand(
            {'VCPU': 1}, hosts=frozenset())
        self.fill()
        lease = self.asked(amount=2, end=2000)
        self.report(self.one, 'one', {}, {'VCPU': 4})
        self.look()
        self.assertEqual('WAITING', self.status(lease))
        self.places_type.demand_of = base._demand_of
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_lease_fails_with_reason_after_last_retry(self):
        self.fill(10000)
        lease = self.held(retries=2, end=5000)
        for seconds, status in (59, 'WAITING'), (2, 'WAITING'), (60, 'ERROR'):
            self.clock.advance(seconds)
            driven.run_due(self.engine)
            self.assertEqual(status, self.status(lease))
        self.assertIn('No capacity became available until', self.reason(lease))
        self.assertIn('There is no capacity', self.reason(lease))
        self.assertEqual(('lease.update', lease['id']), self.notified[-1])
        self.assertEqual({}, self.count_rows(
            'hosts', 'changes', 'leases', 'reservations', 'events',
            'bookings', 'projects'))
        self.assertEqual([], self.cloud.sent)
        # Its servers exist until the lease ends.
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(State.ERROR)
        self.clock.advance(5000)
        driven.run_due(self.engine)
        self.assertIn(server_id, self.cloud.deleted)

    def test_waiting_lease_terminates_at_its_end_date(self):
        self.fill(10000)
        lease = self.asked(end=90, interval=60)
        self.clock.advance(90)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertIn('Its end has passed.', self.reason(lease))

    def test_unavailable_cloud_does_not_count_as_retry(self):
        self.fill(10000)
        lease = self.asked(retries=1, end=5000)

        def silent(_reserved):
            raise errors.CloudUnavailable('placement does not answer')

        self.places_type.demand_of = silent
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('WAITING', self.status(lease))
        self.places_type.demand_of = base._demand_of
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))

    def test_lease_whose_demand_fails_does_not_block_others(self):
        """A lease that cannot be tried does not block other leases."""
        first = self.fill(10000)
        lease = self.asked(retries=1, duration=100)

        def broken(_reserved):
            raise ValueError

        self.places_type.demand_of = broken
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))
        self.assertIn('could not be determined', self.reason(lease))
        self.places_type.demand_of = base._demand_of
        self.free(first)
        self.assertEqual('PENDING', self.asked()['status'])

    def test_window_of_failed_lease_starts_at_last_retry(self):
        self.fill(10000)
        lease = self.held(duration=100)
        self.clock.advance(600)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))
        self.assertEqual((600, 700), self.window(lease))
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_lease_is_not_admitted_after_its_waiting_time(self):
        """Limits and trusts are only checked for the waiting time."""
        first = self.fill(10000)
        lease = self.asked(duration=100)
        self.clock.advance(601)
        self.free(first)
        self.look()
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))
        self.assertIn('waiting time has passed', self.reason(lease))

    def test_events_move_with_window_of_lease_with_duration(self):
        first = self.fill()
        lease = self.asked(duration=100, events=(
            requests.EventRequest('mine', NOW + 10),))
        fixed = self.asked(project='other', end=2000, events=(
            requests.EventRequest('mine', NOW + 10),))
        self.clock.advance(500)
        self.free(first)
        self.look()
        self.assertEqual([NOW + 510, NOW + 10], [
            row.time for one in (lease, fixed)
            for row in self.rows(models.Event, one)
            if row.event_type == 'mine'])

    def test_failed_server_gets_no_capacity_on_admission(self):
        first = self.fill()
        lease = self.held(2, end=2000)
        failed, other = base.servers_of(lease)
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == failed).values(failed_at=NOW))
        self.free(first)
        self.look()
        self.assertEqual([None, 'one'], [
            self.host_of(failed), self.host_of(other)])

    def test_waiting_lease_ends_when_deleted_or_without_servers(self):
        self.fill()
        deleted, one, two = self.asked(), self.held(2), self.held()
        self.free(deleted)
        self.assertEqual([], self.scalars(
            models.Lease.id, models.Lease.id == deleted['id'],
            models.Lease.status != states.Lease.TERMINATED))
        self.clock.advance(1000)
        self.lifecycle.reconciliation.observe(
            base.servers_of(one)[0], cloud_api.ObservedServer(State.GONE))
        self.lifecycle.reconciliation.observe(
            base.servers_of(two)[0], cloud_api.ObservedServer(State.GONE))
        self.assertEqual(['WAITING', 'TERMINATED'], self.statuses(one, two))

    def test_lease_is_admitted_with_its_remaining_servers(self):
        first = self.fill()
        lease = self.held(2, end=2000)
        self.lifecycle.reconciliation.observe(
            base.servers_of(lease)[0], cloud_api.ObservedServer(State.GONE))
        other = self.reserve(1000, 2000, self.places(1))
        self.free(first)
        self.look()
        self.assertEqual(['PENDING', 'PENDING'], self.statuses(lease, other))
        self.assertEqual(1, len(self.bookings(lease)))

    def test_waiting_lease_cannot_be_updated(self):
        self.fill()
        lease = self.asked()
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.leases.updates.update,
            lease['id'], updates.LeaseChange(name='other'))
        self.assertIn('waiting for capacity', str(error))

    def test_audit_restores_lost_retry_event(self):
        self.fill(10000)
        lease = self.asked(end=5000)
        with self.database.writer() as session:
            session.execute(sa.delete(models.Event).where(
                models.Event.event_type == 'retry_lease'))
        found, = self.audit.differences()
        found.fix()
        self.clock.advance(1000)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))

    def rows(self, table, lease):
        with self.database.reader() as session:
            return session.scalars(sa.select(table).where(
                table.lease_id == lease['id'])).all()

    def bookings(self, lease):
        with self.database.reader() as session:
            return session.scalars(sa.select(models.Booking).join(
                models.Reservation).where(
                    models.Reservation.lease_id == lease['id'])).all()


class TestAdmissionOrder(AdmissionQueueTestCase):
    """The order of admissions."""

    def test_leases_of_a_project_are_admitted_in_order(self):
        first = self.fill(10000)
        large = self.asked(2, end=5000)
        self.clock.advance(1)
        small = self.asked(1, end=5000)
        self.assertIn(large['id'], small['status_reason'])
        self.report(self.one, 'one', {}, {'VCPU': 3})
        self.look()
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual(['WAITING', 'WAITING'], self.statuses(large, small))
        # A new lease is not admitted before them either.
        self.assertEqual('WAITING', self.asked(1, end=5000)['status'])
        self.free(first)
        self.look()
        self.assertEqual(['PENDING', 'PENDING'], self.statuses(large, small))

    def test_waiting_lease_does_not_block_other_projects(self):
        self.fill(10000)
        large = self.asked(2, end=5000)
        small = self.asked(1, project='other', end=5000)
        self.report(self.one, 'one', {}, {'VCPU': 3})
        self.look()
        self.assertEqual(['WAITING', 'PENDING'], self.statuses(large, small))

    def test_all_projects_are_tried_before_any_is_retried(self):
        """Each try takes longer than the pause between two changes."""
        self.fill()
        for project in 'abc':
            self.asked(project=project)
            self.clock.advance(1)
        tried = []

        def slow(reserved):
            tried.append(reserved.project_id)
            self.clock.advance(PAUSE + 10)
            return base._demand_of(reserved)

        self.places_type.demand_of = slow
        for number in range(5):
            self.report(self.one, 'one', {}, {'VCPU': 2, 'DISK_GB': number})
            self.look()
        self.assertEqual('abca', ''.join(tried))

    def test_last_retry_ignores_queue_order(self):
        """The last try is made even if another lease waits longer."""
        self.fill(10000)
        self.asked(2, end=9000)
        small = self.asked(1, end=9000, retries=1)
        self.report(self.one, 'one', {}, {'VCPU': 3})
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertIn(self.status(small), ('PENDING', 'ACTIVE'))

    def test_admission_alternates_between_projects(self):
        self.fill(10000)
        of_one = []
        for _number in range(3):
            of_one.append(self.asked(end=9000))
            self.clock.advance(1)
        of_two = [self.asked(project='other', end=9000)]
        for there, expected in (
                (3, ['PENDING', 'WAITING', 'WAITING', 'WAITING']),
                (4, ['PENDING', 'WAITING', 'WAITING', 'PENDING']),
                (5, ['PENDING', 'PENDING', 'WAITING', 'PENDING'])):
            self.clock.advance(1)
            self.report(self.one, 'one', {}, {'VCPU': there})
            self.look()
            self.assertEqual(expected, self.statuses(*of_one, *of_two))

    def test_leases_are_not_retried_without_changes(self):
        self.fill()
        for project in 'abc':
            self.asked(project=project)
        tried = []
        self.places_type.demand_of = lambda reserved: (
            tried.append(reserved.project_id) or base._demand_of(reserved))
        self.look()
        self.clock.advance(31)
        self.look()
        self.assertEqual(['a', 'b', 'c'], sorted(tried))

    def test_all_leases_are_retried_later_while_cloud_is_unavailable(self):
        self.fill()
        for project in 'abc':
            self.asked(project=project)
        tried = []

        def demand_of(reserved):
            tried.append(reserved.project_id)
            raise errors.CloudUnavailable('silent')

        self.places_type.demand_of = demand_of
        log = self.useFixture(fixtures.FakeLogger(
            'blazar_core.lifecycle.admission_queue', level=logging.WARNING))
        for seconds, times in (0, 1), (3, 1), (26, 1), (1, 2), (3, 2):
            self.clock.advance(seconds)
            self.look()
            self.assertEqual(sorted('abc' * times), sorted(tried))
        self.assertEqual(2, log.output.count('is not known now'))

    def test_admission_is_retried_after_cloud_was_unavailable(self):
        first = self.fill()
        lease, answers = self.asked(), [errors.CloudUnavailable('silent')]

        def demand_of(reserved):
            if answers:
                raise answers.pop()
            return base._demand_of(reserved)

        self.places_type.demand_of = demand_of
        self.free(first)
        self.look()
        self.assertEqual(('WAITING', []), (self.status(lease), answers))
        # The cloud did not answer, and is asked again later.
        self.clock.advance(demands.AGAIN)
        self.look()
        self.assertEqual('PENDING', self.status(lease))

    def test_server_deleted_during_admission_gets_no_capacity(self):
        first = self.fill()
        lease = self.held(2, end=2000)
        gone, left = base.servers_of(lease)
        self.free(first)
        enter, went = self.lifecycle.deferred_admission._enter, []

        def late(*args):
            if not went:
                went.append(gone)
                self.lifecycle.reconciliation.observe(
                    gone, cloud_api.ObservedServer(State.GONE))
            return enter(*args)

        self.lifecycle.deferred_admission._enter = late
        self.look()
        self.assertEqual('PENDING', self.status(lease))
        self.assertEqual([left], base.servers_of(
            views.get(self.database, lease['id'])))
        self.assertEqual(['one'], [self.host_of(left)])

    def test_two_processes_admit_lease_once(self):
        first = self.fill()
        lease = self.asked(2, end=2000)
        self.free(first)
        other = self.other_process()
        enter = self.lifecycle.deferred_admission._enter

        def late(*args):
            other.admission_queue.look()
            return enter(*args)

        self.lifecycle.deferred_admission._enter = late
        self.look()
        self.assertEqual('PENDING', self.status(lease))
        self.assertEqual(1, self.notified.count(
            ('lease.update', lease['id'])))

    def test_admission_fails_if_capacity_is_taken_meanwhile(self):
        """The admission is decided like any other booking."""
        first = self.fill()
        lease = self.asked(2, end=2000)
        self.free(first)
        enter, taken = self.lifecycle.deferred_admission._enter, []

        def late(*args):
            if not taken:
                taken.append(self.reserve(0, 100, self.places(1)))
            return enter(*args)

        self.lifecycle.deferred_admission._enter = late
        self.look()
        self.assertEqual('WAITING', self.status(lease))

    def test_span_of_lease_with_duration_includes_waiting_time(self):
        new = new_leases.NewLease(
            'project', 'user', self.wanted(duration=100), (self.places(),))
        self.assertEqual(model.Window(NOW, NOW + 700), new.span)
        fixed = new_leases.NewLease(
            'project', 'user', self.wanted(), (self.places(),))
        self.assertEqual(model.Window(NOW, NOW + 100), fixed.span)

    def other_process(self):
        return self.new_handlers(self.db.connect())
