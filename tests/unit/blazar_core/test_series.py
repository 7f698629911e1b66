# SPDX-License-Identifier: Apache-2.0


"""Recurring leases: admission, notifications, and their servers."""

import dataclasses
import datetime

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
State = cloud_api.ServerState


class RecurringTestCase(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=1)

    def policies(self):
        return {end_policies.DELETE: end_policies.Delete(),
                end_policies.SHELVE: end_policies.Shelve()}

    def wanted(self, *starts, between='delete', some=False, lasts=50,
               count=1):
        """Return a recurrence and its occurrences of one CPU each."""
        windows = tuple(model.Window(NOW + start, NOW + start + lasts)
                        for start in starts)
        asked = requests.Recurrence(
            'FREQ=HOURLY;COUNT=3', 'UTC', between, some, windows)
        recurrence_id = uuidutils.generate_uuid()
        return asked, [new_leases.NewLease(
            'project', 'user', request, (new_leases.NewReservation(
                model.Demand({'VCPU': 1}, count), () if (
                    between == 'shelve' and number) else tuple(
                        uuidutils.generate_uuid() for _one in range(count))),),
            credential=self.encryption.encrypt(f'trust{number}'),
            recurrence_id=recurrence_id)
            for number, request in enumerate(self.request(
                starts[0], starts[0] + lasts, recurrence=asked).occurrences)]

    def make(self, *starts, **how):
        asked, wanted = self.wanted(*starts, **how)
        recurring = self.leases.series
        fits, left_out = recurring.fitting(wanted, asked.some)
        kept = wanted[0].server_ids if asked.keeps_servers else ()
        recurring.create(wanted[0].recurrence_id, asked, fits, [
            self.encryption.encrypt('call') if one.server_ids else None
            for one in fits], left_out, kept)
        return recurring.get(wanted[0].recurrence_id)

    def statuses(self, lease):
        return [one['status'] for one in self.leases.series.get(
            lease['id'])['occurrences']]


class TestAdmission(RecurringTestCase):

    def test_all_occurrences_are_booked(self):
        lease = self.make(100, 200, 300)
        self.assertEqual([NOW + 100, NOW + 200, NOW + 300], sorted(
            self.scalars(models.Booking.start_date)))
        self.assertEqual(['PENDING'] * 3, self.statuses(lease))
        self.assertEqual(lease['id'], lease['recurrence_id'])

    def test_no_occurrence_is_booked_if_one_does_not_fit(self):
        self.lease(190, 210)
        before = self.everything()
        error = self.assertRaises(errors.Refused, self.make, 100, 200, 300)
        self.assertIn('Occurrence of 2027-01-15 08:03:20 UTC', str(error))
        self.assertEqual(before, self.everything())

    def test_occurrences_that_do_not_fit_can_be_left_out(self):
        self.lease(190, 210)
        lease = self.make(100, 200, 300, some=True)
        self.assertEqual(['PENDING', 'LEFT_OUT', 'PENDING'],
                         self.statuses(lease))
        self.assertIn('There is no capacity',
                      lease['occurrences'][1]['reason'])

    def test_series_without_fitting_occurrence_is_refused(self):
        self.lease(100, 400)
        self.assertRaises(errors.Refused, self.make, 100, 200, some=True)

    def test_overlapping_occurrences_are_refused(self):
        error = self.assertRaises(
            errors.InvalidLeaseParams, self.make, 100, 149)
        self.assertIn('an earlier end', str(error))
        self.make(100, 150)

    def test_events_are_shifted_for_each_occurrence(self):
        asked, _leases = self.wanted(100, 200)
        one, other = self.request(
            100, 150, before_end=NOW + 140, events=(
                requests.EventRequest('tea', NOW + 120),),
            recurrence=asked).occurrences
        self.assertEqual((NOW + 140, NOW + 120), (
            one.before_end, one.events[0].time))
        self.assertEqual((NOW + 240, NOW + 220), (
            other.before_end, other.events[0].time))


class TestMovedSeries(RecurringTestCase):
    """All occurrences move in one transaction."""

    def move(self, lease, by, also=None):
        found = self.leases.series.unfinished(lease['id'])
        if by > 0:
            found.reverse()
        return self.leases.updates.update_all({one['id']: updates.LeaseChange(
            start=one['start_date'] + by, end=one['end_date'] + by)
            for one in found}, also)

    def starts(self, lease):
        return [one['start_date'] - NOW for one in self.leases.series.get(
            lease['id'])['occurrences']]

    def test_occurrences_may_move_over_each_other(self):
        lease = self.make(100, 200, 300)
        for by, starts in ((100, [200, 300, 400]), (-90, [110, 210, 310])):
            self.move(lease, by)
            self.assertEqual(starts, self.starts(lease))

    def test_occurrences_are_moved_all_or_none(self):
        lease = self.make(100, 200, 300)
        self.lease(380, 410)
        before = self.everything()
        error = self.assertRaises(errors.Refused, self.move, lease, 60)
        self.assertEqual(NOW + 360, error.refusal.occurrence)
        self.assertEqual(before, self.everything())

    def test_refusal_names_blocked_occurrence_not_running_one(self):
        lease = self.make(0, 100)
        self.lifecycle.lease_start.start(lease['occurrences'][0]['id'])
        found = self.leases.series.unfinished(lease['id'])
        self.assertIn(found[0]['status'], states.BEGUN)
        # It blocks the second one, on the host of both.
        self.lease(155, 165)
        before = self.everything()
        error = self.assertRaises(
            errors.Refused, self.leases.updates.update_all, {
                one['id']: updates.LeaseChange(end=one['end_date'] + 10)
                for one in found})
        self.assertEqual(NOW + 100, error.refusal.occurrence)
        self.assertEqual(before, self.everything())

    def test_nominal_dates_change_only_if_move_succeeds(self):
        lease = self.make(100, 200)
        recurring = self.leases.series
        dates = local_times.Dates(
            datetime.datetime(2027, 3, 28, 2, 15),
            datetime.datetime(2027, 3, 28, 2, 45))
        window = model.Window(NOW + 110, NOW + 160)
        self.lease(400, 410)
        self.assertRaises(errors.Refused, self.move, lease, 200,
                          recurring.shift(lease['id'], {window: dates}))
        self.assertEqual({}, recurring.nominal(lease['id']))
        self.move(lease, 10, recurring.shift(lease['id'], {window: dates}))
        self.assertEqual({window: dates}, recurring.nominal(lease['id']))
        one, other = recurring.get(lease['id'])['occurrences']
        self.assertIn('2027-03-28 02:15 to 2027-03-28 02:45 (UTC)',
                      one['reason'])
        self.assertEqual('', other['reason'])


class TestStatements(RecurringTestCase):
    """A series takes as many statements as one lease."""

    def setUp(self):
        super().setUp()
        self.statements = []
        sa.event.listen(
            self.database.engine, 'before_cursor_execute',
            lambda _connection, _cursor, statement, *_rest:
                self.statements.append(statement))

    def written(self, work, *args):
        del self.statements[:]
        work(*args)
        # PostgreSQL gets all rows in one list of values.
        return sorted(one.partition(' VALUES ')[0] for one in self.statements
                      if one.startswith(('INSERT', 'UPDATE')))

    def test_series_is_written_with_statements_of_one_lease(self):
        one = self.written(self.make, 100)
        self.assertEqual(one, self.written(self.make, *range(200, 3200, 100)))

    def test_series_is_renamed_with_one_statement(self):
        lease = self.make(*range(100, 3100, 100))
        other = self.make(4000)
        over = lease['occurrences'][0]['id']
        with self.database.writer() as session:
            session.get(models.Lease, over).status = 'TERMINATED'
        before = self.generations(lease)
        self.assertEqual(1, len(self.written(
            self.leases.series.rename, lease['id'], 'tea')))
        names = dict(self.names())
        self.assertNotEqual('tea', names.pop(over))
        self.assertNotEqual('tea', names.pop(other['occurrences'][0]['id']))
        self.assertEqual(['tea'] * 29, [*names.values()])
        # Its generation has changed for other readers.
        self.assertEqual([number + 1 for number in before[1:]],
                         self.generations(lease)[1:])

    def test_ending_occurrence_is_not_renamed(self):
        lease = self.make(100, 200)
        ending, after = (one['id'] for one in lease['occurrences'])
        with self.database.writer() as session:
            session.get(models.Lease, ending).enter('TERMINATING', NOW + 150)
        self.clock.advance(160)
        self.leases.series.rename(lease['id'], 'tea')
        with self.database.reader() as session:
            one = session.get(models.Lease, ending)
            self.assertEqual(
                (NOW + 150, NOW + 150), (one.updated_at, one.ending_at))
            self.assertNotEqual('tea', one.name)
            self.assertEqual('tea', session.get(models.Lease, after).name)

    def names(self):
        with self.database.reader() as session:
            return session.execute(sa.select(
                models.Lease.id, models.Lease.name)).all()

    def generations(self, lease):
        with self.database.reader() as session:
            return [session.get(models.Lease, one['id']).generation
                    for one in lease['occurrences']]


class TestKeptServers(RecurringTestCase):

    def setUp(self):
        super().setUp()
        self.lease = self.make(100, 200, 300, between='shelve')
        self.ids = [one['id'] for one in self.lease['occurrences']]
        self.server, = self.lease['reservations'][0]['servers']

    def start(self, number):
        self.clock.advance(max(0, NOW + 100 * (number + 1) -
                               self.clock.now()))
        return self.lifecycle.lease_start.start(self.ids[number], True)

    def reason(self, number):
        return views.get(self.database, self.ids[number])['status_reason']

    def runs(self):
        self.cloud.servers[self.server] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('host'))
        self.lifecycle.reconciliation.check(self.server)

    def end(self, number):
        self.clock.advance(max(0, NOW + 100 * (number + 1) + 50 -
                               self.clock.now()))
        self.lifecycle.lease_end.end(self.ids[number], True)

    def test_server_is_shelved_unshelved_and_finally_deleted(self):
        self.start(0)
        self.runs()
        for number in (1, 2):
            self.end(number - 1)
            self.assertEqual((self.server, cloud_api.RestingState.SHELVED),
                             self.cloud.rests[-1])
            self.assertEqual('TERMINATED',
                             self.statuses(self.lease)[number - 1])
            self.assertIsNotNone(self.start(number))
            self.assertEqual([self.server] * number, self.cloud.unshelved)
            self.runs()
            self.assertIsNone(self.start(number))
            self.assertEqual('ACTIVE', self.statuses(self.lease)[number])
        self.end(2)
        self.assertEqual([self.server], self.cloud.deleted)

    def test_unshelve_is_repeated_after_process_death(self):
        """The process dies after the start and before it unshelves."""
        self.start(0)
        self.runs()
        self.end(0)
        self.cloud.broken['unshelve'] = RuntimeError('dead')
        self.assertRaises(RuntimeError, self.start, 1)
        del self.cloud.broken['unshelve']
        self.assertEqual('STARTING', self.statuses(self.lease)[1])
        self.lifecycle.reconciliation.check(self.server)
        self.assertEqual('STARTING', self.statuses(self.lease)[1])
        self.start(1)
        self.assertEqual([self.server], self.cloud.unshelved)

    def test_lost_unshelve_is_requested_again(self):
        self.start(0)
        self.runs()
        self.end(0)
        self.start(1)
        self.cloud.servers[self.server] = dataclasses.replace(
            self.cloud.servers[self.server], busy=True)
        self.cloud.lost.add(self.server)
        self.start(1)
        self.start(1)
        self.assertEqual([self.server] * 2, self.cloud.unshelved)

    def test_failed_unshelve_is_reported_and_retried(self):
        self.start(0)
        self.runs()
        self.end(0)
        self.cloud.broken['unshelve'] = errors.CloudUnavailable(
            'glance does not answer')
        self.assertIsNotNone(self.start(1))
        self.assertIn('glance does not answer', self.reason(1))

    def test_stalled_process_does_not_unshelve(self):
        """The occurrence may have ended when the frozen process continues."""
        self.start(0)
        self.runs()
        self.end(0)
        closer = self.lifecycle.lease_start._kept._closer
        closer.credential = lambda _lease_id: self.clock.advance(21)
        self.assertIsNotNone(self.start(1))
        self.assertEqual([], self.cloud.unshelved)

    def test_start_waits_for_end_of_previous_occurrence(self):
        self.start(0)
        self.runs()
        self.assertIn('host is not empty', self.start(1).why)
        self.lifecycle.lease_start._start_timeout = 0
        self.assertIn('previous occurrence', self.start(1).why)
        self.assertEqual([], self.cloud.unshelved)
        self.assertIn('previous occurrence', self.reason(1))
        self.end(0)
        self.assertIsNotNone(self.start(1))
        self.assertEqual([self.server], self.cloud.unshelved)
        self.assertEqual('', self.reason(1))

    def test_next_occurrence_ends_if_server_was_deleted(self):
        self.start(0)
        self.runs()
        self.end(0)
        self.cloud.servers.clear()
        told = []
        self.lifecycle.lease_start._kept._notify = lambda event, lease: (
            told.append((event, self.status(lease))))
        self.assertIsNone(self.start(1))
        # The change is committed before the notification.
        self.assertEqual([('lease.event.end_lease', 'TERMINATED')], told)
        self.assertEqual('TERMINATED', self.statuses(self.lease)[1])
        self.assertEqual([NOW + 300],
                         self.scalars(models.Booking.start_date))

    def test_occurrence_ended_for_missing_servers_clears_wait_reason(self):
        self.start(0)
        self.runs()
        self.lifecycle.lease_start._start_timeout = 0
        self.assertIn('previous occurrence', self.start(1).why)
        self.end(0)
        self.cloud.servers.clear()
        self.assertIsNone(self.start(1))
        self.assertIn('Its servers were deleted or removed before its start.',
                      self.reason(1))

    def test_removed_server_is_in_no_later_occurrence(self):
        self.start(0)
        self.runs()
        # There is free capacity on its present host.
        self.host('other', VCPU=1)
        self.cloud.servers[self.server] = cloud_api.ObservedServer(
            State.RUNNING, self.uuid_of('other'))
        self.lifecycle.reconciliation.check(self.server)
        self.lifecycle.server_removal.leave(
            self.ids[0], [self.server], lambda _id: True)
        self.start(1)
        self.assertEqual('TERMINATED', self.statuses(self.lease)[1])
        self.assertIn('removed', self.reason(1))
        self.assertEqual([None], self.scalars(models.Booking.server_id))

    def test_server_is_deleted_after_last_remaining_occurrence(self):
        self.start(0)
        self.runs()
        for lease_id in self.ids[1:]:
            self.lifecycle.lease_end.delete(lease_id)
        self.end(0)
        self.assertEqual([self.server], self.cloud.deleted)
