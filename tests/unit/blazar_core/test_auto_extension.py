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


class AutoExtensionTestCase(base.LeaseTestCase):
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


class TestAutoExtension(AutoExtensionTestCase):

    def test_lease_is_extended_one_period_before_each_end(self):
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

    def test_extension_withdraws_before_end_notification(self):
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

    def test_extension_is_at_most_two_hours_before_end(self):
        self.assertEqual([22 * HOUR], self.times(self.extended(
            end=24 * HOUR, period=24 * HOUR)))

    def test_short_lease_is_extended_at_its_start(self):
        lease = self.extended(end=600)
        self.assertEqual(600 + HOUR, self.end_of(lease))
        driven.run_due(self.engine)
        self.assertEqual(600 + HOUR, self.end_of(lease))

    def test_lease_that_cannot_be_extended_ends_with_reason(self):
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

    def test_failed_extension_is_retried_until_end(self):
        lease = self.extended()
        other = self.reserve(4 * HOUR, 5 * HOUR, self.places(1))
        self.run_at(3 * HOUR)
        self.lifecycle.lease_end.delete(other['id'])
        self.run_at(3 * HOUR + 300)
        self.assertEqual((5 * HOUR, ''), (
            self.end_of(lease), self.reason(lease)))

    def test_extension_respects_limits(self):
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

    def test_unavailable_cloud_defers_extension(self):
        def silent(_lease, _change):
            raise errors.CloudUnavailable('down')

        lease = self.extended()
        self.lifecycle.auto_extension._granting = silent
        self.run_at(3 * HOUR)
        self.lifecycle.auto_extension._granting = lambda _lease, _change: None
        self.run_at(3 * HOUR + 60)
        self.assertEqual(5 * HOUR, self.end_of(lease))

    def test_extension_is_retried_during_long_cloud_outage(self):
        def silent(_lease, _change):
            raise errors.CloudUnavailable('down')

        lease = self.extended(period=2 * HOUR)
        self.lifecycle.auto_extension._granting = silent
        for time in range(2 * HOUR, 3 * HOUR + 1530, 5):
            self.run_at(time)
        self.lifecycle.auto_extension._granting = lambda _lease, _change: None
        self.run_at(3 * HOUR + 1830)
        self.assertEqual(6 * HOUR, self.end_of(lease))

    def test_two_workers_extend_lease_once(self):
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

    def test_worker_taking_over_does_not_extend_again(self):
        lease = self.extended()
        self.clock.advance(3 * HOUR)
        self.lifecycle.auto_extension.extend(lease['id'])
        self.assertEqual(
            HOUR, self.lifecycle.auto_extension.extend(lease['id']).seconds)
        self.assertEqual((5 * HOUR, 1), (
            self.end_of(lease), self.updates(lease)))

    def test_extension_precedes_before_end_notification(self):
        """A notification before the end would be sent in vain."""
        lease = self.extended(before_end=NOW + 3 * HOUR)
        self.run_at(3 * HOUR)
        self.assertEqual(5 * HOUR, self.end_of(lease))
        self.assertNotIn(('lease.event.before_end_lease', lease['id']),
                         self.notified)

    def test_stalled_worker_does_not_extend_again(self):
        lease = self.extended()
        self.run_at(3 * HOUR)
        # Another process has taken over and is done by now.
        self.lifecycle.auto_extension.extend(lease['id'])
        self.assertEqual(5 * HOUR, self.end_of(lease))
        self.assertEqual(1, self.updates(lease))

    def test_extension_is_not_repeated_after_worker_death(self):
        lease = self.extended()
        self.lifecycle.auto_extension._notify = lambda *_what: 1 / 0
        self.run_at(3 * HOUR)
        self.clock.advance(600)
        driven.run_due(self.new_engine('other'))
        self.assertEqual((5 * HOUR, [4 * HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_unexpected_errors_are_retried_until_end(self):
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

    def test_concurrent_update_of_end_wins_over_extension(self):
        lease = self.extended()
        self.clock.advance(3 * HOUR)

        def late(*args):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))

        self.lifecycle.auto_extension._granting = late
        driven.run_due(self.engine)
        self.assertEqual((6 * HOUR, [5 * HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_deleted_lease_is_not_extended(self):
        lease = self.extended()
        self.lifecycle.lease_end.delete(lease['id'])
        self.run_at(3 * HOUR)
        # The lease ended at once.
        self.assertEqual([NOW], self.scalars(models.Lease.end_date))

    def test_extension_event_moves_with_end(self):
        lease = self.extended()
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))
        self.assertEqual([5 * HOUR], self.times(lease))

    def test_extension_lead_time_survives_changes_of_end(self):
        lease = self.extended()
        for end in (HOUR // 2, 6 * HOUR):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + end))
        self.assertEqual([5 * HOUR], self.times(lease))

    def test_short_lease_gets_full_lead_time_after_extension(self):
        lease = self.extended(end=600)
        self.assertEqual([600], self.times(lease))
        self.run_at(600)
        self.assertEqual((600 + 2 * HOUR, [600 + HOUR]), (
            self.end_of(lease), self.times(lease)))

    def test_new_end_restores_finished_extension_event(self):
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

    def test_reason_is_cleared_when_end_or_auto_extend_changes(self):
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

    def test_refusal_for_a_former_end_is_not_recorded(self):
        lease = self.extended()

        def late(*_what):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=NOW + 6 * HOUR))
            raise errors.LimitExceeded('Four hours are enough.')

        self.lifecycle.auto_extension._granting = late
        self.run_at(3 * HOUR)
        self.assertEqual((6 * HOUR, ''), (
            self.end_of(lease), self.reason(lease)))

    def test_notification_after_extension_has_no_old_reason(self):
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

    def test_auto_extension_can_be_turned_on_and_off(self):
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

    def test_future_lease_is_not_extended_before_start(self):
        later = self.extended(start=HOUR, end=2 * HOUR)
        self.run_at(HOUR)
        driven.run_due(self.engine)
        driven.run_due(self.engine)
        self.assertEqual(3 * HOUR, self.end_of(later))

    def test_offer_is_not_extended_until_accepted(self):
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

    def test_queued_lease_is_extended_once_admitted(self):
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
