# SPDX-License-Identifier: Apache-2.0

"""Leases with automatic extension."""

from blazar_core.audit import audit
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW
HOUR = 3600

load_tests = databases.load_tests


class ExtendingTestCase(base.LeaseTestCase):
    """A host with two CPUs, and a lease of both, extended hour by hour."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.engine = self.new_engine()

    def extended(self, start=0, end=4 * HOUR, period=HOUR, **wanted):
        lease = self.reserve(0, 0, self.places(2), request=self.request(
            start, end, auto_extend=period, **wanted))
        if start == 0:
            driven.run_due(self.engine)
            self.assertEqual('ACTIVE', self.status(lease))
        return lease

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def end_of(self, lease):
        return views.get(self.database, lease['id'])['end_date'] - NOW

    def times(self, lease, event_type='extend_lease'):
        return [event['time'] - NOW for event in views.get(
            self.database, lease['id'])['events']
            if event['event_type'] == event_type]

    def updates(self, lease):
        return self.notified.count(('lease.update', lease['id']))


class TestExtending(ExtendingTestCase):

    def test_it_is_prolonged_an_hour_before_its_end_each_time(self):
        lease = self.extended(before_end=NOW + 4 * HOUR - 600)
        self.assertEqual([3 * HOUR], self.times(lease))
        self.run_at(3 * HOUR - 1)
        self.assertEqual(4 * HOUR, self.end_of(lease))
        for number in range(1, 4):
            self.run_at((2 + number) * HOUR)
            driven.run_due(self.engine)
            self.assertEqual((4 + number) * HOUR, self.end_of(lease))
            self.assertEqual(number, self.updates(lease))
            self.assertEqual([(3 + number) * HOUR], self.times(lease))
        # Its end was never near.
        self.assertEqual([7 * HOUR - 600],
                         self.times(lease, 'before_end_lease'))
        self.assertNotIn(('lease.event.before_end_lease', lease['id']),
                         self.notified)
        self.assertEqual([], [*audit.Audit(
            self.database, self.clock, self.lifecycle, self.encryption.decrypt,
            10).differences()])
        # Its capacity is reserved as long.
        self.assertRaises(errors.Refused, self.reserve, 6 * HOUR, 8 * HOUR,
                          self.places(1))
        self.reserve(7 * HOUR, 8 * HOUR, self.places(1))

    def test_what_was_told_of_its_end_is_taken_back(self):
        lease = self.extended(before_end=NOW + 3 * HOUR - 600)
        stop = ('lease.event.before_end_lease.stop', lease['id'])
        self.run_at(3 * HOUR - 600)
        self.assertEqual(('lease.event.before_end_lease', lease['id']),
                         self.notified[-1])
        self.run_at(3 * HOUR)
        self.assertEqual([('lease.update', lease['id']), stop],
                         self.notified[-2:])
        self.assertEqual([3 * HOUR - 600, 4 * HOUR - 600],
                         self.times(lease, 'before_end_lease'))

    def test_it_is_two_hours_before_the_end_at_most(self):
        self.assertEqual([22 * HOUR], self.times(self.extended(
            end=24 * HOUR, period=24 * HOUR)))

    def test_one_that_is_short_is_prolonged_at_its_start(self):
        lease = self.extended(end=600)
        self.assertEqual(600 + HOUR, self.end_of(lease))
        driven.run_due(self.engine)
        self.assertEqual(600 + HOUR, self.end_of(lease))

    def test_where_there_is_no_room_it_ends_and_says_why(self):
        lease = self.extended()
        other = self.reserve(4 * HOUR, 5 * HOUR, self.places(1))
        self.run_at(3 * HOUR)
        self.assertIn('The lease could not be extended', self.reason(lease))
        self.assertIn('reserved by other leases', self.reason(lease))
        self.assertEqual(('ACTIVE', 4 * HOUR), (
            self.status(lease), self.end_of(lease)))
        for time in range(3 * HOUR, 4 * HOUR + 600, 300):
            self.run_at(time)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(
            {'DONE'}, {event.status for event in self.events(lease)})
        self.assertEqual('ACTIVE', self.status(other))

    def events(self, lease):
        with self.database.reader() as session:
            return session.query(models.Event).filter_by(
                lease_id=lease['id']).all()

    def test_it_is_tried_again_until_its_end(self):
        lease = self.extended()
        other = self.reserve(4 * HOUR, 5 * HOUR, self.places(1))
        self.run_at(3 * HOUR)
        self.lifecycle.lease_end.delete(other['id'])
        self.run_at(3 * HOUR + 300)
        self.assertEqual((5 * HOUR, ''), (
            self.end_of(lease), self.reason(lease)))

    def test_the_limits_are_asked(self):
        asked = []

        def granting(lease, change):
            asked.append((lease['id'], change.end - NOW))
            if change.end > NOW + 5 * HOUR:
                raise errors.LimitExceeded('Five hours are enough.')

        self.lifecycle.auto_extension._granting = granting
        lease = self.extended()
        self.run_at(3 * HOUR)
        self.assertEqual([(lease['id'], 5 * HOUR)], asked)
        self.run_at(4 * HOUR)
        self.assertIn('Five hours are enough.', self.reason(lease))
        self.assertEqual(5 * HOUR, self.end_of(lease))

    def test_a_silent_cloud_puts_it_off(self):
        def silent(_lease, _change):
            raise errors.CloudUnavailable('away')

        lease = self.extended()
        self.lifecycle.auto_extension._granting = silent
        self.run_at(3 * HOUR)
        self.lifecycle.auto_extension._granting = lambda _lease, _change: None
        self.run_at(3 * HOUR + 60)
        self.assertEqual(5 * HOUR, self.end_of(lease))

    def test_however_long_it_is_silent_it_is_asked_every_few_minutes(self):
        def silent(_lease, _change):
            raise errors.CloudUnavailable('away')

        lease = self.extended(period=2 * HOUR)
        self.lifecycle.auto_extension._granting = silent
        for time in range(2 * HOUR, 3 * HOUR + 1530, 5):
            self.run_at(time)
        self.lifecycle.auto_extension._granting = lambda _lease, _change: None
        self.run_at(3 * HOUR + 1830)
        self.assertEqual(6 * HOUR, self.end_of(lease))

    def test_two_workers_prolong_it_once(self):
        lease = self.extended()
        self.clock.advance(3 * HOUR)
        other = self.new_engine('other')
        granting = self.lifecycle.auto_extension._granting

        def late(*args):
            self.lifecycle.auto_extension._granting = granting
            self.lifecycle.auto_extension.extend(lease['id'])

        self.lifecycle.auto_extension._granting = late
        driven.run_due(self.engine)
        driven.run_due(other)
        self.assertEqual((5 * HOUR, ''), (
            self.end_of(lease), self.reason(lease)))
        self.assertEqual(1, self.updates(lease))

    def test_who_takes_over_when_it_was_prolonged_does_not_do_it_again(self):
        lease = self.extended()
        self.clock.advance(3 * HOUR)
        self.lifecycle.auto_extension.extend(lease['id'])
        self.assertEqual(
            HOUR, self.lifecycle.auto_extension.extend(lease['id']).seconds)
        self.assertEqual((5 * HOUR, 1), (
            self.end_of(lease), self.updates(lease)))

    def test_it_goes_before_what_is_only_told(self):
        """A notification before the end would be sent in vain."""
        lease = self.extended(before_end=NOW + 3 * HOUR)
        self.run_at(3 * HOUR)
        self.assertEqual(5 * HOUR, self.end_of(lease))
        self.assertNotIn(('lease.event.before_end_lease', lease['id']),
                         self.notified)

    def test_who_stood_still_does_not_prolong_it_once_more(self):
        lease = self.extended()
        self.run_at(3 * HOUR)
        # Another process has taken over and is done by now.
        self.lifecycle.auto_extension.extend(lease['id'])
        self.assertEqual(5 * HOUR, self.end_of(lease))
        self.assertEqual(1, self.updates(lease))

    def test_who_dies_when_it_is_prolonged_is_followed_by_nobody(self):
        lease = self.extended()
        self.lifecycle.auto_extension._notify = lambda *_what: 1 / 0
        self.run_at(3 * HOUR)
        self.clock.advance(600)
        driven.run_due(self.new_engine('other'))
        self.assertEqual((5 * HOUR, [4 * HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_who_dies_before_is_followed_by_another(self):
        lease = self.extended()
        self.lifecycle.auto_extension._granting = lambda *_what: 1 / 0
        self.run_at(3 * HOUR)
        self.assertEqual(4 * HOUR, self.end_of(lease))
        # However often it fails, it is tried until the end.
        for time in range(3 * HOUR, 4 * HOUR - 300, 300):
            self.run_at(time)
        self.lifecycle.auto_extension._granting = lambda *_what: None
        self.run_at(4 * HOUR - 1)
        self.assertEqual(5 * HOUR, self.end_of(lease))

    def test_who_moves_its_end_meanwhile_has_his_way(self):
        lease = self.extended()
        self.clock.advance(3 * HOUR)

        def late(*args):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))

        self.lifecycle.auto_extension._granting = late
        driven.run_due(self.engine)
        self.assertEqual((6 * HOUR, [5 * HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_what_ends_is_not_prolonged(self):
        lease = self.extended()
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_at(3 * HOUR)
        # The lease ended at once.
        self.assertEqual([NOW], self.scalars(models.Lease.end_date))

    def test_who_moves_the_end_moves_it_too(self):
        lease = self.extended()
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))
        self.assertEqual([5 * HOUR], self.times(lease))

    def test_it_is_as_long_before_the_end_wherever_that_was(self):
        lease = self.extended()
        for end in (HOUR // 2, 6 * HOUR):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + end))
        self.assertEqual([5 * HOUR], self.times(lease))

    def test_one_that_was_short_is_prolonged_as_late_as_others(self):
        lease = self.extended(end=600)
        self.assertEqual([600], self.times(lease))
        self.run_at(600)
        self.assertEqual((600 + 2 * HOUR, [600 + HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_one_that_was_over_is_prolonged_again_when_it_is_not(self):
        lease = self.extended()
        self.clock.advance(4 * HOUR)
        self.assertIsNone(self.lifecycle.auto_extension.extend(lease['id']))
        # Another process, whose clock is ahead, has tried it.
        self.clock.advance(-5)
        with self.database.writer() as session:
            session.query(models.Event).filter_by(
                event_type='extend_lease').update({'status': 'DONE'})
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))
        self.run_at(5 * HOUR)
        self.assertEqual(7 * HOUR, self.end_of(lease))

    def test_what_is_not_so_any_more_is_not_said(self):
        self.host('two', VCPU=2)
        for change in ({'end': NOW + 4 * HOUR + 600}, {'auto_extend': 0}):
            lease = self.extended(end=4 * HOUR - 1)
            self.lifecycle.auto_extension._explain(
                lease['id'], lease['end_date'], 'No room.')
            self.assertIn('The lease could not be extended',
                          self.reason(lease))
            self.leases.updates.update(lease['id'], updates.LeaseChange(
                name='other'))
            self.assertIn('The lease could not be extended',
                          self.reason(lease))
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(**change))
            self.assertEqual('', self.reason(lease))

    def test_what_was_so_of_another_end_is_not_said(self):
        lease = self.extended()

        def late(*_what):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))
            raise errors.LimitExceeded('Four hours are enough.')

        self.lifecycle.auto_extension._granting = late
        self.run_at(3 * HOUR)
        self.assertEqual((6 * HOUR, ''), (
            self.end_of(lease), self.reason(lease)))

    def test_what_is_told_says_nothing_that_is_not_so_any_more(self):
        lease = self.extended()
        other = self.reserve(4 * HOUR, 5 * HOUR, self.places(1))
        self.run_at(3 * HOUR)
        self.lifecycle.lease_end.delete(other['id'])
        told = []
        self.lifecycle.auto_extension._notify = lambda *what: told.append(what)
        self.run_at(3 * HOUR + 300)
        self.assertEqual([('lease.update', '')], [
            (event, of['status_reason']) for event, of in told])
        self.assertEqual('', self.reason(lease))

    def test_it_is_turned_on_and_off(self):
        lease = self.extended(period=0)
        self.assertEqual([], self.times(lease))
        for period, times in ((HOUR, [3 * HOUR]), (2 * HOUR, [2 * HOUR]),
                              (0, [])):
            changed = self.leases.updates.update(
                lease['id'], updates.LeaseChange(auto_extend=period))
            self.assertEqual((period, times), (
                changed['auto_extend'], self.times(lease)))
        self.run_at(3 * HOUR)
        self.assertEqual(4 * HOUR, self.end_of(lease))

    def test_one_for_later_waits_for_its_start(self):
        later = self.extended(start=HOUR, end=2 * HOUR)
        self.run_at(HOUR)
        driven.run_due(self.engine)
        driven.run_due(self.engine)
        self.assertEqual(3 * HOUR, self.end_of(later))

    def test_an_offer_is_not_prolonged(self):
        new = self.new_lease(request=self.request(
            0, 4 * HOUR, auto_extend=HOUR), count=1)
        lease = self.leases.creation.offer(new, 86400)
        self.run_at(3 * HOUR)
        self.assertEqual(('OFFERED', 4 * HOUR), (
            self.status(lease), self.end_of(lease)))
        self.leases.creation.accept(lease['id'])
        driven.run_due(self.engine)
        driven.run_due(self.engine)
        self.assertEqual(5 * HOUR, self.end_of(lease))

    def test_one_that_waits_for_room_is_prolonged_when_it_has_it(self):
        first = self.reserve(0, 10 * HOUR, self.places(2), active=True)
        lease = self.reserve(0, 0, self.places(1), request=self.request(
            0, 4 * HOUR, auto_extend=HOUR, duration=4 * HOUR,
            retry=requests.Retry(60, 600)))
        self.run_at(5 * HOUR)
        self.assertEqual('WAITING', self.status(lease))
        self.lifecycle.lease_end.delete(first['id'])
        self.lifecycle.admission_queue.look()
        self.assertEqual((9 * HOUR, [8 * HOUR]), (
            self.end_of(lease), self.times(lease)))
        self.run_at(8 * HOUR)
        self.assertEqual(10 * HOUR, self.end_of(lease))
