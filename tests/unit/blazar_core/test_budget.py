# SPDX-License-Identifier: Apache-2.0

"""The budget service charges the leases that exist, whatever process dies."""

import contextlib
from unittest import mock

import testtools

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.lifecycle import budget_events
from blazar_core.lifecycle import fault_points
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import test_admission_queue
from tests.unit.blazar_core import test_members
from tests.unit.blazar_core import test_series

load_tests = databases.load_tests

NOW = base.NOW
AFTER = 100


class Killed(BaseException):
    """The process has died."""


class Budget:
    """A budget service that charges by lease and may be called twice.

    :ivar charged: the end for which each lease is charged
    :ivar commits: the ids of all committed leases, with repetitions
    :ivar before: called before it records anything
    :ivar after: called before it answers
    """

    def __init__(self):
        self.charged, self.commits, self.asked = {}, [], []
        self.before = self.after = lambda _what, _lease: None

    @contextlib.contextmanager
    def _answer(self, what, lease):
        self.asked.append(what)
        self.before(what, lease)
        yield
        self.after(what, lease)

    def commit(self, lease):
        with self._answer('commit', lease):
            self.commits.append(lease['id'])
            self.charged[lease['id']] = lease['end_date']

    def charge(self, lease):
        with self._answer('charge', lease):
            self.charged[lease['id']] = lease['end_date']

    def refund(self, lease):
        with self._answer('refund', lease):
            self.charged.pop(lease['id'], None)


def failing(exc, at, once=True):
    """Return a function that raises at one of its calls."""
    calls = []

    def fail(what, _lease):
        if what == at and not (once and calls):
            calls.append(what)
            raise exc
    return fail


class ChargingTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.budget = Budget()
        self.leases = type(self.leases)(
            self.database, self.clock, self.admission, self.types,
            (self.budget.commit, AFTER))
        self.lifecycle.budget_events = budget_events.BudgetEvents(
            self.database, self.clock, self.budget)
        self.engine = self.new_engine()

    def run_at(self, seconds):
        self.clock.advance(NOW + seconds - self.clock.now())
        driven.run_due(self.engine)

    def assert_settled(self):
        """Check that charges and leases agree, and no event is open."""
        self.assertEqual(
            dict(self.existing()), self.budget.charged)
        self.assertEqual([], self.scalars(
            models.Event.id, models.Event.status.in_(states.OPEN),
            models.Event.event_type.like(':%')))
        self.assertEqual(sorted(set(self.budget.commits)),
                         sorted(self.budget.commits))

    def existing(self):
        return [(one.id, one.end_date) for one in self.scalars(
            models.Lease, models.Lease.status != states.Lease.TERMINATED)]


class TestNewLeases(ChargingTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)

    def test_a_lease_is_committed_once_under_its_id(self):
        lease = self.lease(10, 100)
        self.assertEqual([lease['id']], self.budget.commits)
        self.run_at(0)
        self.assert_settled()

    def test_internal_budget_events_are_not_shown(self):
        lease = self.lease(10, 100)
        self.assertEqual({'start_lease': 'UNDONE', 'end_lease': 'UNDONE'},
                         self.events_of(lease))

    def test_refused_lease_is_not_committed(self):
        with testtools.ExpectedException(errors.Refused):
            self.lease(10, 100, count=3)
        self.assertEqual([], self.budget.asked)
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))

    def test_lease_refused_by_budget_service_is_not_created(self):
        self.budget.before = failing(errors.LimitExceeded('no'), 'commit')
        with testtools.ExpectedException(errors.LimitExceeded, '^no$'):
            self.lease(10, 100)
        self.assertEqual({'hosts': 1}, self.count_rows('changes'))
        self.assert_settled()

    def test_no_lease_is_visible_during_commit(self):
        seen = []
        self.budget.before = lambda *_asked: seen.append(self.existing())
        self.lease(10, 100)
        self.assertEqual([[]], seen)

    def test_unanswered_commit_is_refunded_after_timeout(
            self):
        self.budget.after = failing(errors.CloudUnavailable('?'), 'commit')
        with testtools.ExpectedException(errors.CloudUnavailable):
            self.lease(10, 200)
        self.run_at(AFTER - 1)
        self.assertEqual(1, len(self.budget.charged))
        self.run_at(AFTER)
        self.assertEqual(['commit', 'refund'], self.budget.asked)
        self.assert_settled()

    def test_commit_of_killed_request_is_refunded(self):
        for when in ('before', 'after'):
            setattr(self.budget, when, failing(Killed(), 'commit'))
            with testtools.ExpectedException(Killed):
                self.lease(10, 500)
        self.run_at(AFTER)
        self.assertEqual(2, self.budget.asked.count('refund'))
        self.assert_settled()

    def test_commit_is_refunded_at_once_if_capacity_was_taken(self):
        def take(what, _lease):
            self.budget.before = lambda *_asked: None
            self.lease(10, 100, count=2)
        self.budget.before = take
        with testtools.ExpectedException(errors.Refused):
            self.lease(10, 100)
        self.run_at(0)
        self.assertEqual(['commit', 'commit', 'refund'], self.budget.asked)
        self.assert_settled()

    def test_request_exceeding_timeout_creates_no_lease(self):
        """The refund has begun, and may have preceded the commit."""
        def late(what, _lease):
            self.run_at(AFTER)
        self.budget.before = late
        with testtools.ExpectedException(errors.CloudUnavailable, '.*long'):
            self.lease(10, 500)
        self.budget.before = lambda *_asked: None
        driven.run_due(self.engine)
        self.assertEqual(2, self.budget.asked.count('refund'))
        self.assert_settled()

    def test_expired_offer_is_refunded(self):
        offer = self.leases.creation.offer(self.new_lease(10, 100), 5)
        self.assertEqual([offer['id']], self.budget.commits)
        self.run_at(5)
        self.assert_settled()

    def test_an_accepted_offer_is_committed_once(self):
        offer = self.leases.creation.offer(self.new_lease(10, 100), 5)
        self.leases.creation.accept(offer['id'])
        self.run_at(6)
        self.assertEqual(['commit'], self.budget.asked)
        self.assert_settled()

    def test_no_budget_events_are_written_without_service(self):
        self.leases = type(self.leases)(
            self.database, self.clock, self.admission, self.types)
        self.lease(10, 100)
        self.assertEqual([], self.scalars(
            models.Event.id, models.Event.event_type.like(':%')))


class TestSeries(ChargingTestCase, test_series.RecurringTestCase):

    def test_occurrences_are_committed_all_or_none(self):
        self.make(100, 200, 300)
        self.assertEqual(['commit'] * 3, self.budget.asked)
        self.assert_settled()
        self.budget.before = self.refuse_the_second
        with testtools.ExpectedException(errors.LimitExceeded):
            self.make(400, 500, 600)
        self.run_at(0)
        self.assertEqual(['commit'] * 5 + ['refund'], self.budget.asked)
        self.assert_settled()

    def refuse_the_second(self, what, _lease):
        if what == 'commit' and self.budget.asked.count(what) == 5:
            raise errors.LimitExceeded('no')


class TestChanges(ChargingTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.made = self.lease(10, 100)

    def change(self, end):
        self.leases.updates.update(
            self.made['id'], updates.LeaseChange(end=NOW + end))

    def test_change_of_lease_is_charged(self):
        self.change(200)
        self.run_at(0)
        self.assertEqual(['commit', 'charge'], self.budget.asked)
        self.assert_settled()

    def test_unanswered_charge_is_retried(self):
        for when in ('before', 'after'):
            setattr(self.budget, when, failing(
                errors.CloudUnavailable('?'), 'charge'))
        self.change(200)
        for seconds in (0, 9, 8, 60):
            self.clock.advance(seconds)
            driven.run_due(self.engine)
        self.assertEqual(3, self.budget.asked.count('charge'))
        self.assert_settled()

    def test_refused_charge_is_reported_in_status_reason(self):
        self.budget.before = failing(errors.LimitExceeded('broke'), 'charge')
        self.change(200)
        self.run_at(0)
        self.assertIn('broke', self.reason(self.made))
        self.run_at(9)
        self.assertEqual('', self.reason(self.made))
        self.assert_settled()

    def test_change_during_charge_is_charged_again(self):
        def again(what, _lease):
            self.budget.before = lambda *_asked: None
            self.change(300)
        self.budget.before = again
        self.change(200)
        self.run_at(0)
        self.run_at(3)
        self.assert_settled()

    def test_charge_is_completed_after_listener_death(self):
        for when in ('before', 'after'):
            setattr(self.budget, when, failing(Killed(), 'charge'))
            self.change(200 if when == 'before' else 300)
            with testtools.ExpectedException(Killed):
                driven.run_due(self.engine)
            self.engine = self.new_engine(when)
            self.clock.advance(9)
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual(
            [NOW + 300], [*self.budget.charged.values()])

    def test_lease_deleted_during_charge_is_refunded_afterwards(self):
        def end(what, _lease):
            self.budget.before = lambda *_asked: None
            self.lifecycle.lease_end.delete(self.made['id'])
            self.cloud.servers.clear()
            driven.run_due(self.new_engine('other'))
        self.budget.before = end
        self.change(200)
        self.run_at(0)
        self.assertEqual('refund', self.budget.asked[-1])
        self.assert_settled()

    def test_uncommitted_lease_is_not_charged(self):
        old = type(self.leases)(
            self.database, self.clock, self.admission, self.types)
        made = old.creation.create(self.new_lease(10, 100), None)
        self.leases.updates.update(
            made['id'], updates.LeaseChange(end=NOW + 200))
        self.run_at(0)
        self.assertEqual(['commit'], self.budget.asked)


class TestServers(ChargingTestCase, test_members.AddServersTestCase):
    """Servers that are added to a lease, and removed from it."""

    def test_added_and_removed_servers_are_charged(self):
        one, two, three = self.runs(1, 2, 1)
        lease = self.adopt([one, two])
        charged = []
        self.budget.after = lambda _what, told: charged.append(
            sorted(part['amount'] for part in told['reservations']))
        self.join(lease, [three])
        self.run_at(1)
        self.leave(lease, two)
        self.run_at(2)
        self.leave(lease, one)
        self.run_at(3)
        self.assertEqual([[1, 2], [2], [1]], charged)
        self.assert_settled()

    def test_removal_of_last_server_is_refunded(self):
        server, = self.runs(1)
        self.leave(self.adopt([server]), server)
        self.run_at(1)
        self.assertEqual('refund', self.budget.asked[-1])
        self.assert_settled()


class TestQueuedLeases(ChargingTestCase,
                       test_admission_queue.AdmissionQueueTestCase):
    """A lease that waits for capacity is admitted with other dates."""

    def setUp(self):
        super().setUp()
        self.first = self.fill()
        self.waits = self.asked(end=1000, duration=1000, retries=1000)
        self.dates = []
        self.budget.after = self.note

    def note(self, _what, lease):
        if lease['id'] == self.waits['id']:
            self.dates.append((lease['start_date'] - NOW,
                               lease['end_date'] - NOW))

    def admit(self, look=None):
        """Free capacity for the lease after 500 seconds."""
        self.clock.advance(500)
        self.free(self.first)
        (look or self.look)()

    def test_admitted_lease_is_charged_once_for_its_new_dates(self):
        driven.run_due(self.engine)
        self.assertEqual(['commit', 'commit'], self.budget.asked)
        self.admit(lambda: self.run_at(500))
        self.look()
        driven.run_due(self.engine)
        self.assertEqual([(500, 1500)], self.dates)
        self.assertEqual(1, self.budget.asked.count('charge'))
        self.assert_settled()
        self.assertEqual(NOW + 1500, self.budget.charged[self.waits['id']])

    def test_lease_is_charged_after_listener_death_at_admission(self):
        def die(step, _subject=None):
            if step == fault_points.FaultPoint.RETRY_ADMITTED:
                raise Killed
        with mock.patch.object(fault_points, 'fault_point', die):
            with testtools.ExpectedException(Killed):
                self.admit()
        self.assertEqual((500, 1500), self.window(self.waits))
        self.assertNotIn('charge', self.budget.asked)
        driven.run_due(self.new_engine('other'))
        self.assertEqual([(500, 1500)], self.dates)
        self.assert_settled()

    def test_charge_is_completed_after_listener_death(self):
        self.admit()
        for when in ('before', 'after'):
            fail = failing(Killed(), 'charge')
            setattr(self.budget, when, fail)
            with testtools.ExpectedException(Killed):
                driven.run_due(self.new_engine(when))
            self.budget.after = self.note
            self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual({(500, 1500)}, {*self.dates})
        self.assertEqual([1, 1], [
            self.budget.commits.count(one['id'])
            for one in (self.first, self.waits)])
        self.assertEqual(NOW + 1500, self.budget.charged[self.waits['id']])

    def test_deleted_waiting_lease_is_refunded(self):
        self.free(self.waits)
        driven.run_due(self.engine)
        self.assertNotIn(self.waits['id'], self.budget.charged)
        self.assert_settled()


class TestEnds(ChargingTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.made = self.reserve(10, 100)

    def test_a_lease_that_ends_is_refunded_once(self):
        self.run_at(10)
        self.run_at(100)
        self.run_at(101)
        self.assertEqual(['commit', 'refund'], self.budget.asked)
        self.assert_settled()

    def test_lease_deleted_before_its_start_is_refunded(self):
        self.lifecycle.lease_end.delete(self.made['id'])
        self.run_at(0)
        self.assert_settled()

    def test_unanswered_refund_is_retried(self):
        self.budget.before = failing(
            errors.CloudUnavailable('?'), 'refund', once=False)
        self.lifecycle.lease_end.delete(self.made['id'])
        self.run_at(0)
        self.run_at(600)
        self.budget.before = lambda *_asked: None
        self.run_at(1200)
        self.assert_settled()

    def test_refused_refund_is_not_retried(self):
        self.budget.before = failing(
            errors.LimitExceeded('no'), 'refund', once=False)
        self.lifecycle.lease_end.delete(self.made['id'])
        self.run_at(0)
        self.run_at(600)
        self.assertEqual(1, self.budget.asked.count('refund'))

    def test_refund_is_completed_after_listener_death(self):
        for when in ('before', 'after'):
            setattr(self.budget, when, failing(Killed(), 'refund'))
        self.lifecycle.lease_end.delete(self.made['id'])
        for name in ('second', 'third'):
            with testtools.ExpectedException(Killed):
                driven.run_due(self.engine)
            self.engine = self.new_engine(name)
            self.clock.advance(300)
        driven.run_due(self.engine)
        self.assert_settled()
