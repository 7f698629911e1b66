# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for capacity."""

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


class RetryingTestCase(base.LeaseTestCase):
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


class TestRetrying(RetryingTestCase):

    def test_where_there_is_room_nothing_waits(self):
        self.assertEqual('PENDING', self.held()['status'])
        lease = self.asked()
        self.assertEqual(('PENDING', 'retry', None), (
            lease['status'], lease['lease_type'], lease['retry_until']))
        self.assertNotIn('retry_lease', self.events_of(lease))

    def test_one_without_retries_is_refused(self):
        self.fill()
        self.assertRaises(errors.Refused, self.lease)
        self.assertRaises(errors.Refused, self.leases.creation.create,
                          self.new_lease(request=self.wanted()), 'encrypted',
                          5)

    def test_it_waits_without_taking_any_room(self):
        first = self.fill()
        generation = self.generation('one')
        lease = self.held(end=2000)
        self.assertEqual('WAITING', lease['status'])
        self.assertIn('There is no capacity', lease['status_reason'])
        self.assertEqual(NOW + 600, lease['retry_until'])
        self.assertFalse(lease['degraded'])
        self.assertEqual(generation, self.generation('one'))
        self.clock.advance(30)
        driven.run_due(self.engine)
        self.look()
        self.assertEqual('WAITING', self.status(lease))
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

    def test_one_with_a_length_lasts_as_long_whenever_it_starts(self):
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

    def test_one_for_later_waits_for_its_time(self):
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

    def test_it_is_tried_at_its_times_too(self):
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

    def test_after_the_last_time_it_fails_and_says_why(self):
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

    def test_when_its_end_comes_first_it_fails_then(self):
        self.fill(10000)
        lease = self.asked(end=90, interval=60)
        self.clock.advance(90)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertIn('Its end has passed.', self.reason(lease))

    def test_a_silent_cloud_is_no_try(self):
        self.fill(10000)
        lease = self.asked(retries=1, end=5000)

        def silent(_reserved):
            raise errors.CloudUnavailable('placement is away')

        self.places_type.demand_of = silent
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('WAITING', self.status(lease))
        self.places_type.demand_of = base._demand_of
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))

    def test_what_cannot_be_tried_fails_all_the_same(self):
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

    def test_it_ends_as_if_it_had_got_room_with_its_last_try(self):
        self.fill(10000)
        lease = self.held(duration=100)
        self.clock.advance(600)
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))
        self.assertEqual((600, 700), self.window(lease))
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_after_the_time_in_which_it_may_wait_it_gets_nothing(self):
        """Limits and trusts are only checked for the waiting time."""
        first = self.fill(10000)
        lease = self.asked(duration=100)
        self.clock.advance(601)
        self.free(first)
        self.look()
        driven.run_due(self.engine)
        self.assertEqual('ERROR', self.status(lease))
        self.assertIn('waiting time has passed', self.reason(lease))

    def test_events_of_one_with_a_length_move_with_it(self):
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

    def test_a_server_that_has_failed_gets_no_room(self):
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

    def test_a_lease_that_waits_is_deleted_or_loses_its_servers(self):
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

    def test_it_gets_room_for_the_servers_that_are_left(self):
        first = self.fill()
        lease = self.held(2, end=2000)
        self.lifecycle.reconciliation.observe(
            base.servers_of(lease)[0], cloud_api.ObservedServer(State.GONE))
        other = self.reserve(1000, 2000, self.places(1))
        self.free(first)
        self.look()
        self.assertEqual(['PENDING', 'PENDING'], self.statuses(lease, other))
        self.assertEqual(1, len(self.bookings(lease)))

    def test_it_cannot_be_changed_meanwhile(self):
        self.fill()
        lease = self.asked()
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.leases.updates.update,
            lease['id'], updates.LeaseChange(name='other'))
        self.assertIn('waiting for capacity', str(error))

    def test_an_event_that_was_lost_is_written_again(self):
        self.fill(10000)
        lease = self.asked(end=5000)
        with self.database.writer() as session:
            session.execute(sa.delete(models.Event).where(
                models.Event.event_type == 'retry_lease'))
        found, = self.audit.differences()
        found.mend()
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


class TestTurns(RetryingTestCase):
    """The order of admissions."""

    def test_of_a_project_the_first_comes_first(self):
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

    def test_what_can_be_had_goes_to_other_projects(self):
        self.fill(10000)
        large = self.asked(2, end=5000)
        small = self.asked(1, project='other', end=5000)
        self.report(self.one, 'one', {}, {'VCPU': 3})
        self.look()
        self.assertEqual(['WAITING', 'PENDING'], self.statuses(large, small))

    def test_a_round_is_finished_before_the_next_one(self):
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

    def test_the_last_time_each_is_tried(self):
        """The last try is made even if another lease waits longer."""
        self.fill(10000)
        self.asked(2, end=9000)
        small = self.asked(1, end=9000, retries=1)
        self.report(self.one, 'one', {}, {'VCPU': 3})
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertIn(self.status(small), ('PENDING', 'ACTIVE'))

    def test_projects_take_turns(self):
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

    def test_nobody_is_tried_while_nothing_changes(self):
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

    def test_who_could_not_be_tried_is_tried_again_without_news(self):
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

    def test_a_server_that_goes_at_the_last_moment_gets_no_room(self):
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

    def test_two_processes_give_it_its_room_once(self):
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

    def test_who_takes_the_room_first_has_it(self):
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

    def test_limits_count_it_for_as_long_as_it_may_wait(self):
        new = new_leases.NewLease(
            'project', 'user', self.wanted(duration=100), (self.places(),))
        self.assertEqual(model.Window(NOW, NOW + 700), new.span)
        fixed = new_leases.NewLease(
            'project', 'user', self.wanted(), (self.places(),))
        self.assertEqual(model.Window(NOW, NOW + 100), fixed.span)

    def other_process(self):
        return self.new_handlers(self.books.connect())
