# SPDX-License-Identifier: Apache-2.0

"""The calendar of reserved and of free capacity."""

from unittest import mock

from blazar_core.common import errors
from blazar_core.common import model
from blazar_nova.services import calendar
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW


class TestCalendar(base.LeaseTestCase):

    scenarios = databases.SQL

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)
        self.host('two', {'VCPU': 4}, VCPU=8)

    def ask(self, what, start=0, end=400, *args):
        with self.database.connection() as connection:
            return what(connection, model.Window(NOW + start, NOW + end),
                        *args)

    def test_bars_are_leases_that_overlap_window(self):
        for start, end, project in ((50, 100, 'a'), (100, 200, 'b'),
                                    (150, 300, 'a'), (300, 400, 'a')):
            self.lease(start, end, project=project)
        self.assertEqual([(100, 200), (150, 300)], [
            (one.start - NOW, one.end - NOW)
            for one in self.ask(calendar.bars, 100, 300, None)])
        (bar,) = self.ask(calendar.bars, 100, 300, 'a')
        self.assertEqual(('a', 'lease', 'PENDING', ('virtual:instance',)), (
            bar.project_id, bar.name, bar.status, bar.types))

    def test_lease_deleted_before_its_start_has_no_bar(self):
        lease = self.lease(100, 200)
        self.lifecycle.lease_end.delete(lease['id'])
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual([], self.ask(calendar.bars, 0, 400, None))

    def test_bars_have_lease_statuses_of_api(self):
        lease = self.running_lease(0, 200)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        for what in calendar.bars, calendar.on_hosts:
            self.assertEqual(['DELETING'], [
                one.status for one in self.ask(what, 0, 400, None)])

    def test_bars_by_host_show_bookings_of_leases(self):
        lease = self.lease(50, 100, count=10)
        self.assertEqual([
            ('one', 50, 100, lease['id']), ('two', 50, 100, lease['id'])], [
            (one.host, one.start - NOW, one.end - NOW, one.lease_id)
            for one in self.ask(calendar.on_hosts, 0, 400, None)])
        self.assertEqual([], self.ask(calendar.on_hosts, 100, 200, None))
        other = self.lease(50, 100, project='other')
        # The bars of others do not count.
        with mock.patch.object(calendar, 'MOST', 1):
            (bar,) = self.ask(calendar.on_hosts, 0, 400, 'other')
        self.assertEqual(other['id'], bar.lease_id)

    def test_free_capacity_is_shown_as_levels(self):
        self.lease(100, 200, count=8)
        self.lease(150, 160, count=4)
        self.assertEqual([(0, 100, 3), (100, 150, 1), (150, 160, 0),
                          (160, 200, 1), (200, 400, 3)], [
            (one.window.start - NOW, one.window.end - NOW,
             one.levels['VCPU']) for one in self.ask(calendar.free)])

    def test_interval_shows_its_lowest_free_capacity(self):
        self.lease(100, 200, count=12)
        found = self.ask(calendar.free, 0, 200_000)
        self.assertEqual([(0, 1000, 0), (1000, 200_000, 3)], [
            (one.window.start - NOW, one.window.end - NOW,
             one.levels['VCPU']) for one in found])

    def test_too_many_bars_are_refused(self):
        self.lease(50, 100, count=2)
        with mock.patch.object(calendar, 'MOST', 0):
            for what in (calendar.bars, calendar.on_hosts):
                self.assertRaises(errors.InvalidLeaseParams, self.ask, what,
                                  0, 400, None)

    def test_too_many_bookings_are_refused(self):
        for number in range(3):
            # Equal bookings are one row.
            self.lease(50 + number, 100, count=2)
        with mock.patch.object(calendar, 'MOST_CHANGES', 3):
            error = self.assertRaises(
                errors.InvalidLeaseParams, self.ask, calendar.free)
            self.assertIn('Write a shorter time', str(error))
            self.assertEqual(2, len(self.ask(calendar.free, 0, 52)))
            self.assertEqual(4, len(self.ask(
                lambda *args: [*calendar.planned(*args).changes])))
