# SPDX-License-Identifier: Apache-2.0

"""The usage of hosts is reported to the ledger."""

from unittest import mock

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import feed
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests
NOW = base.NOW


class ReportTestCase(worlds.BooksTestCase):

    scenarios = databases.SQL

    def report(self, uuid='uuid', name='one', service_host='compute',
               capacity=None, now=NOW + 5, properties=None, **allocations):
        with self.database.writer() as session:
            return inventory.report(
                session, now, model.HostFacts(
                    uuid, name, service_host, capacity or {'VCPU': 4},
                    properties or {}), allocations,
                inventory.generations(session, [uuid]).get(uuid))

    def row(self, uuid='uuid'):
        return self.scalars(models.Host, models.Host.uuid == uuid)[0]


class TestReport(ReportTestCase):

    def test_a_new_host_is_written_down_with_what_runs_there(self):
        self.assertTrue(self.report(
            a={'VCPU': 1}, b={'VCPU': 2, 'MEMORY_MB': 3}))
        row = self.row()
        self.assertEqual(
            ('one', 'compute', {'VCPU': 4}, {'VCPU': 3, 'MEMORY_MB': 3},
             NOW + 5),
            (row.name, row.service_host, row.capacity, row.usage,
             row.updated_at))

    def test_the_same_again_changes_nothing(self):
        self.report(a={'VCPU': 1})
        self.assertFalse(self.report(now=NOW + 99, a={'VCPU': 1}))
        self.assertEqual(1, self.row().generation)
        self.assertEqual(NOW + 5, self.row().updated_at)

    def test_what_is_new_is_written_and_disturbs_who_decides(self):
        self.report()
        for changed in ({'name': 'two'}, {'service_host': 'elsewhere'},
                        {'capacity': {'VCPU': 5}}, {'a': {'VCPU': 1}},
                        {'properties': {'gpu': 'a100'}}):
            before = self.row().generation
            self.assertTrue(self.report(**changed), changed)
            self.assertEqual(before + 1, self.row().generation, changed)

    def test_a_leased_server_that_runs_on_its_host_is_no_usage(self):
        self.report()
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        self.assertTrue(self.report(**{mine: {'VCPU': 1}, 'b': {'VCPU': 2}}))
        self.assertEqual({'VCPU': 2}, self.row().usage)

    def test_a_leased_server_on_another_host_is_usage_there(self):
        self.report()
        self.report('uuid-2', 'two')
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        self.assertTrue(self.report('uuid-2', 'two', **{mine: {'VCPU': 1}}))
        self.assertEqual({'VCPU': 1}, self.row('uuid-2').usage)

    def test_the_booking_of_a_resized_server_follows(self):
        self.report()
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        self.assertTrue(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 3}],
                         self.scalars(models.Booking.resources))
        self.assertIn({'VCPU': 3},
                      self.scalars(models.Reservation.resources))
        self.assertEqual(3, self.row().generation)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))

    def test_a_place_stays_what_was_reserved(self):
        self.report()
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).values(
                params={'amount': 1}, resources={'VCPU': 1}))
        self.assertTrue(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 3}],
                         self.scalars(models.Booking.resources))
        self.assertEqual({1}, {one['VCPU'] for one in self.scalars(
            models.Reservation.resources)})

    def test_servers_of_a_reservation_that_differ_leave_it_as_it_was(self):
        self.report()
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        other = self.book('one', 0, 10, running=True, VCPU=1)
        with self.database.writer() as session:
            first, second = session.scalars(sa.select(models.Booking))
            second.reservation_id = first.reservation_id
        self.report(**{mine: {'VCPU': 3}, other: {'VCPU': 1}})
        self.assertNotIn({'VCPU': 3},
                         self.scalars(models.Reservation.resources))
        self.report(**{mine: {'VCPU': 3}, other: {'VCPU': 3}})
        self.assertIn({'VCPU': 3},
                      self.scalars(models.Reservation.resources))

    def test_a_booking_whose_server_does_not_run_keeps_its_size(self):
        self.report()
        mine = self.book('one', 0, 10, VCPU=1)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))


class TestReportOfUsage(ReportTestCase):

    def report_usage(self, uuid='uuid', **allocations):
        with self.database.writer() as session:
            return inventory.report_usage(
                session, NOW + 9, uuid, allocations,
                inventory.generations(session, [uuid]).get(uuid))

    def test_what_runs_there_is_written_down_and_nothing_else(self):
        self.report(name='one', properties={'gpu': 'a100'})
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        self.assertTrue(self.report_usage(
            **{mine: {'VCPU': 2}, 'b': {'VCPU': 2}}))
        row = self.row()
        self.assertEqual(
            ('one', 'compute', {'VCPU': 4}, {'gpu': 'a100'}, {'VCPU': 2}),
            (row.name, row.service_host, row.capacity, row.properties,
             row.usage))
        self.assertEqual([{'VCPU': 2}],
                         self.scalars(models.Booking.resources))
        self.assertEqual(NOW + 9, row.updated_at)

    def test_the_same_again_changes_nothing(self):
        self.report(a={'VCPU': 1})
        self.assertFalse(self.report_usage(a={'VCPU': 1}))
        self.assertTrue(self.report_usage())
        self.assertEqual({}, self.row().usage)

    def test_who_asked_before_somebody_else_wrote_asks_again(self):
        self.report(a={'VCPU': 1}, b={'VCPU': 2})
        seen = self.row().generation
        # Two have read the cloud; a was deleted, and the later reader is
        # first.
        self.assertTrue(self.report_usage(b={'VCPU': 2}))
        for report, host in ((inventory.report_usage, 'uuid'), (
                inventory.report, model.HostFacts(
                    'uuid', 'one', 'compute', {'VCPU': 4}))):
            with self.database.writer() as session:
                self.assertRaises(
                    api.LostRace, report, session, NOW + 9, host,
                    {'a': {'VCPU': 1}, 'b': {'VCPU': 2}}, seen)
        self.assertEqual({'VCPU': 2}, self.row().usage)
        # A report of what is recorded need not be repeated.
        with self.database.writer() as session:
            self.assertFalse(inventory.report_usage(
                session, NOW + 9, 'uuid', {'b': {'VCPU': 2}}, seen))

    def test_an_unknown_host_is_left_to_a_report_in_full(self):
        self.assertFalse(self.report_usage('nobody', a={'VCPU': 1}))
        self.assertEqual([], self.scalars(models.Host.uuid))


class TestTell(ReportTestCase):

    def tell(self, server_id='a', node='one', service_host='compute',
             now=NOW + 9, **takes):
        with self.database.begin() as connection:
            return inventory.record(
                connection, now, service_host, node, server_id,
                takes or None)

    def usage(self):
        return self.row().usage

    def test_a_server_that_came_is_usage_until_it_leaves(self):
        self.report(a={'VCPU': 1})
        self.assertTrue(self.tell('b', VCPU=2))
        self.assertEqual(({'VCPU': 3}, NOW + 9, 2), (
            self.usage(), self.row().updated_at, self.row().generation))
        self.assertTrue(self.tell('b'))
        self.assertEqual({'VCPU': 1}, self.usage())
        self.assertTrue(self.tell('a'))
        self.assertEqual({}, self.usage())

    def test_told_twice_it_counts_once(self):
        self.report(a={'VCPU': 1})
        for server_id in 'abab':
            self.assertTrue(self.tell(server_id, VCPU=1))
        self.assertEqual(({'VCPU': 2}, 2),
                         (self.usage(), self.row().generation))
        for _twice in range(2):
            self.assertTrue(self.tell('a'))
        self.assertEqual(({'VCPU': 1}, 3),
                         (self.usage(), self.row().generation))

    def test_what_left_before_it_came_does_not_come(self):
        self.report()
        self.assertTrue(self.tell())
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual({}, self.usage())

    def test_classes_that_the_host_lacks_and_nothing_are_left_out(self):
        self.report(capacity={'VCPU': 4, 'MEMORY_MB': 9})
        self.assertTrue(self.tell(VCPU=1, MEMORY_MB=0, DISK_GB=7))
        self.assertEqual({'VCPU': 1}, self.usage())

    def test_what_cannot_be_known_from_it_has_to_be_asked(self):
        self.report(capacity={'VCPU': 4, 'PCPU': 4}, a={'PCPU': 1})
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        for told in ({'node': 'two'}, {'service_host': 'elsewhere'},
                     {'server_id': mine}, {'server_id': mine, 'VCPU': 1},
                     {'server_id': 'b', 'VCPU': 1}):
            self.assertFalse(self.tell(**told), told)
        self.assertEqual({'PCPU': 1}, self.usage())
        self.assertTrue(self.tell('a'))
        self.assertEqual({}, self.usage())

    def test_a_host_of_which_the_consumers_are_not_known_is_asked(self):
        self.report(a={'VCPU': 1})
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host).values(consumers=None))
        self.assertFalse(self.tell('b', VCPU=1))
        self.assertTrue(self.report(a={'VCPU': 1}))
        self.assertTrue(self.tell('b', VCPU=1))
        self.assertEqual({'VCPU': 2}, self.usage())

    def test_a_host_that_was_lost_and_came_back_under_its_name(self):
        self.report()
        with self.database.writer() as session:
            inventory.retain(session, set(), NOW)
        self.assertFalse(self.tell(VCPU=1))
        self.report('uuid-2')
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual(({}, {'VCPU': 1}),
                         (self.usage(), self.row('uuid-2').usage))

    def test_placement_is_right_but_for_what_was_told_since_it_was_asked(self):
        self.report(now=NOW + 8, a={'VCPU': 1})
        self.tell('a')
        self.tell('b', VCPU=1)
        # Read before both.
        self.assertFalse(self.report(now=NOW + 9, a={'VCPU': 1}))
        self.assertEqual({'VCPU': 1}, self.usage())
        self.assertTrue(self.report(now=NOW + 10, a={'VCPU': 1},
                                    c={'VCPU': 2}))
        self.assertEqual({'VCPU': 3}, self.usage())
        self.tell('a', now=NOW + 11)
        self.assertEqual({'VCPU': 2}, self.usage())

    def test_who_left_is_forgotten_when_placement_is_asked(self):
        self.report()
        self.tell()
        self.assertTrue(self.report(now=NOW + 10))
        self.assertFalse(self.report(now=NOW + 11))
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual({'VCPU': 1}, self.usage())


class TestReportsThatMeet(ReportTestCase):

    scenarios = databases.SERVERS

    def meanwhile(self, interference):
        """Call something between the read and the write of a report."""
        total = inventory.usage_of

        pending = [interference]

        def late(consumers):
            if pending:
                pending.pop()()
            return total(consumers)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.inventory.usage_of', late))

    def elsewhere(self, work, *args):
        """Do something in a transaction of another process."""
        with self.books.connect().writer() as session:
            work(session, *args)

    def test_a_report_that_loses_the_race_is_made_again(self):
        self.report()
        self.meanwhile(lambda: self.elsewhere(ledger.amend, NOW, [
            ledger.Edit(None, ledger.NewBooking(
                'reservation', self.host_id('one'), 'server',
                model.Window(NOW, NOW + 10), {'VCPU': 1}, running=True))]))
        reports = []
        self.database.retried(lambda: reports.append(None) or self.report(
            capacity={'VCPU': 9}, server={'VCPU': 1}))
        self.assertEqual(2, len(reports))
        self.assertEqual(({'VCPU': 9}, {}),
                         (self.row().capacity, self.row().usage))
        self.assertEqual(3, self.row().generation)

    def test_what_was_told_when_somebody_was_faster_is_told_again(self):
        self.report()
        self.meanwhile(lambda: self.elsewhere(
            inventory.report_usage, NOW, 'uuid', {'a': {'VCPU': 1}},
            self.row().generation))

        def tell():
            with self.database.begin() as connection:
                return inventory.record(
                    connection, NOW + 9, 'compute', 'one', 'b', {'VCPU': 2})

        self.assertTrue(self.database.retried(tell))
        self.assertEqual({'VCPU': 3}, self.row().usage)

    def test_two_listeners_may_find_a_new_host_at_once(self):
        self.meanwhile(lambda: self.elsewhere(
            inventory.report, NOW, model.HostFacts(
                'uuid', 'one', 'compute', {'VCPU': 4}), {}))
        self.database.retried(self.report, capacity={'VCPU': 5})
        self.assertEqual([{'VCPU': 5}], self.scalars(models.Host.capacity))


class TestRetain(worlds.BooksTestCase):

    scenarios = databases.SQL

    def retain(self, *uuids):
        with self.database.writer() as session:
            return inventory.retain(session, uuids, NOW + 9)

    def test_hosts_that_nova_lost_have_no_capacity_any_more(self):
        kept = self.host('kept', VCPU=1)
        self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain(kept))
        self.assertEqual(
            [('gone', {}, NOW + 9, 2), ('kept', {'VCPU': 1}, NOW, 1)],
            sorted((row.name, row.capacity, row.updated_at, row.generation)
                   for row in self.scalars(models.Host)))

    def test_a_host_is_lost_only_once(self):
        self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain())
        self.assertEqual([], self.retain())
        self.assertEqual(2, self.generation('gone'))

    def test_nothing_is_booked_on_a_lost_host(self):
        self.host('gone', VCPU=1)
        host_id = self.host_id('gone')
        admitting = admissions.Admission(self.database, self.clock)
        demand, window = model.Demand({'VCPU': 1}), model.Window(NOW, NOW + 10)
        self.assertEqual([host_id], admitting.pick(demand, window))
        self.retain()
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 1, 0, None),
                         admitting.quote([demand], window))
        with self.database.writer() as session:
            self.assertRaises(
                ledger.OverCapacity, ledger.amend, session, NOW, [ledger.Edit(
                    None, ledger.NewBooking(
                        'reservation', host_id, None, window, {'VCPU': 1}))])


class TestTrim(worlds.BooksTestCase):

    scenarios = databases.SQL

    def test_what_changed_before_is_forgotten_but_for_the_newest(self):
        self.host('one', VCPU=9)
        self.clock.advance(10)
        self.book('one', 10, 20, VCPU=1)
        self.clock.advance(1)
        self.book('one', 10, 20, VCPU=1)
        for before, count in ((NOW, 0), (NOW + 10, 0), (NOW + 11, 1),
                              (NOW + 11, 0), (NOW + 99, 1), (NOW + 99, 0)):
            self.assertEqual(count, feed.trim(self.database, before))
        self.assertEqual(({'hosts': 1, 'bookings': 2, 'changes': 1}, 3), (
            self.count_rows('leases', 'reservations', 'usage_records'),
            self.generation('one')))

    def change(self, *seconds: int) -> None:
        with self.database.begin() as connection:
            connection.execute(sa.insert(models.Change.__table__), [{
                'host_id': 1, 'generation': number, 'change_count': 1,
                'sign': 1, 'created_at': NOW + one}
                for number, one in enumerate(seconds)])

    def test_many_are_forgotten_by_several_transactions(self):
        self.change(*range(12))
        some = []
        real = feed._trim_some
        with (mock.patch.object(feed, '_OLDEST', feed._OLDEST.limit(4)),
              mock.patch.object(feed, '_trim_some', lambda *given: (
                  some.append(real(*given)) or some[-1]))):
            self.assertEqual(9, feed.trim(self.database, NOW + 10))
        self.assertEqual([3, 3, 3, 0], some)
        self.assertEqual([NOW + 9, NOW + 10, NOW + 11], sorted(
            self.scalars(models.Change.created_at)))

    def test_what_a_clock_that_is_ahead_has_written_keeps_nothing(self):
        self.change(999, 0, 999, 1, 2, 999)
        self.assertEqual(4, feed.trim(self.database, NOW + 10))
        self.assertEqual([NOW + 2, NOW + 999], sorted(
            self.scalars(models.Change.created_at)))
