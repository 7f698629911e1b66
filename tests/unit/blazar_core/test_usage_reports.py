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


class ReportTestCase(worlds.WorldTestCase):

    scenarios = databases.SQL

    def report(self, uuid='uuid', name='one', service_host='compute',
               capacity=None, now=NOW + 5, properties=None, **allocations):
        with self.database.writer() as session:
            return inventory.record_host(
                session, now, model.HostFacts(
                    uuid, name, service_host, capacity or {'VCPU': 4},
                    properties or {}), allocations,
                inventory.generations(session, [uuid]).get(uuid))

    def row(self, uuid='uuid'):
        return self.scalars(models.Host, models.Host.uuid == uuid)[0]


class TestReport(ReportTestCase):

    def test_new_host_is_recorded_with_its_usage(self):
        self.assertTrue(self.report(
            a={'VCPU': 1}, b={'VCPU': 2, 'MEMORY_MB': 3}))
        row = self.row()
        self.assertEqual(
            ('one', 'compute', {'VCPU': 4}, {'VCPU': 3, 'MEMORY_MB': 3},
             NOW + 5),
            (row.name, row.service_host, row.capacity, row.usage,
             row.updated_at))

    def test_repeated_report_changes_nothing(self):
        self.report(a={'VCPU': 1})
        self.assertFalse(self.report(now=NOW + 99, a={'VCPU': 1}))
        self.assertEqual(1, self.row().generation)
        self.assertEqual(NOW + 5, self.row().updated_at)

    def test_changed_report_advances_generation(self):
        self.report()
        for changed in ({'name': 'two'}, {'service_host': 'elsewhere'},
                        {'capacity': {'VCPU': 5}}, {'a': {'VCPU': 1}},
                        {'properties': {'gpu': 'a100'}}):
            before = self.row().generation
            self.assertTrue(self.report(**changed), changed)
            self.assertEqual(before + 1, self.row().generation, changed)

    def test_leased_server_on_its_host_is_not_usage(self):
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

    def test_booking_of_resized_server_is_updated(self):
        self.report()
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        self.assertTrue(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 3}],
                         self.scalars(models.Booking.resources))
        self.assertIn({'VCPU': 3},
                      self.scalars(models.Reservation.resources))
        self.assertEqual(3, self.row().generation)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))

    def test_resize_does_not_change_slot_reservation(self):
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

    def test_reservation_is_unchanged_if_its_servers_differ(self):
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

    def test_booking_without_running_server_keeps_its_size(self):
        self.report()
        mine = self.book('one', 0, 10, VCPU=1)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))


class TestReportOfUsage(ReportTestCase):

    def report_usage(self, uuid='uuid', **allocations):
        with self.database.writer() as session:
            return inventory.record_host_usage(
                session, NOW + 9, uuid, allocations,
                inventory.generations(session, [uuid]).get(uuid))

    def test_only_usage_is_recorded(self):
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

    def test_repeated_report_changes_nothing(self):
        self.report(a={'VCPU': 1})
        self.assertFalse(self.report_usage(a={'VCPU': 1}))
        self.assertTrue(self.report_usage())
        self.assertEqual({}, self.row().usage)

    def test_outdated_report_loses_race(self):
        self.report(a={'VCPU': 1}, b={'VCPU': 2})
        seen = self.row().generation
        # Two have read the cloud; a was deleted, and the later reader is
        # first.
        self.assertTrue(self.report_usage(b={'VCPU': 2}))
        for report, host in ((inventory.record_host_usage, 'uuid'), (
                inventory.record_host, model.HostFacts(
                    'uuid', 'one', 'compute', {'VCPU': 4}))):
            with self.database.writer() as session:
                self.assertRaises(
                    api.LostRace, report, session, NOW + 9, host,
                    {'a': {'VCPU': 1}, 'b': {'VCPU': 2}}, seen)
        self.assertEqual({'VCPU': 2}, self.row().usage)
        # A report of what is recorded need not be repeated.
        with self.database.writer() as session:
            self.assertFalse(inventory.record_host_usage(
                session, NOW + 9, 'uuid', {'b': {'VCPU': 2}}, seen))

    def test_unknown_host_is_left_to_full_report(self):
        self.assertFalse(self.report_usage('nobody', a={'VCPU': 1}))
        self.assertEqual([], self.scalars(models.Host.uuid))


class TestRecord(ReportTestCase):

    def tell(self, server_id='a', node='one', service_host='compute',
             now=NOW + 9, **takes):
        with self.database.begin() as connection:
            return inventory.record_server(
                connection, now, service_host, node, server_id,
                takes or None)

    def usage(self):
        return self.row().usage

    def test_arrived_server_is_usage_until_it_leaves(self):
        self.report(a={'VCPU': 1})
        self.assertTrue(self.tell('b', VCPU=2))
        self.assertEqual(({'VCPU': 3}, NOW + 9, 2), (
            self.usage(), self.row().updated_at, self.row().generation))
        self.assertTrue(self.tell('b'))
        self.assertEqual({'VCPU': 1}, self.usage())
        self.assertTrue(self.tell('a'))
        self.assertEqual({}, self.usage())

    def test_repeated_notification_counts_once(self):
        self.report(a={'VCPU': 1})
        for server_id in 'abab':
            self.assertTrue(self.tell(server_id, VCPU=1))
        self.assertEqual(({'VCPU': 2}, 2),
                         (self.usage(), self.row().generation))
        for _twice in range(2):
            self.assertTrue(self.tell('a'))
        self.assertEqual(({'VCPU': 1}, 3),
                         (self.usage(), self.row().generation))

    def test_arrival_reported_after_departure_is_ignored(self):
        self.report()
        self.assertTrue(self.tell())
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual({}, self.usage())

    def test_missing_classes_and_zero_amounts_are_left_out(self):
        self.report(capacity={'VCPU': 4, 'MEMORY_MB': 9})
        self.assertTrue(self.tell(VCPU=1, MEMORY_MB=0, DISK_GB=7))
        self.assertEqual({'VCPU': 1}, self.usage())

    def test_inconclusive_notification_requires_lookup(self):
        self.report(capacity={'VCPU': 4, 'PCPU': 4}, a={'PCPU': 1})
        mine = self.book('one', 0, 10, running=True, VCPU=1)
        for told in ({'node': 'two'}, {'service_host': 'elsewhere'},
                     {'server_id': mine}, {'server_id': mine, 'VCPU': 1},
                     {'server_id': 'b', 'VCPU': 1}):
            self.assertFalse(self.tell(**told), told)
        self.assertEqual({'PCPU': 1}, self.usage())
        self.assertTrue(self.tell('a'))
        self.assertEqual({}, self.usage())

    def test_host_with_unknown_consumers_requires_lookup(self):
        self.report(a={'VCPU': 1})
        with self.database.begin() as connection:
            connection.execute(sa.update(models.Host).values(consumers=None))
        self.assertFalse(self.tell('b', VCPU=1))
        self.assertTrue(self.report(a={'VCPU': 1}))
        self.assertTrue(self.tell('b', VCPU=1))
        self.assertEqual({'VCPU': 2}, self.usage())

    def test_recreated_host_of_same_name_gets_usage(self):
        self.report()
        with self.database.writer() as session:
            inventory.retain(session, set(), NOW)
        self.assertFalse(self.tell(VCPU=1))
        self.report('uuid-2')
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual(({}, {'VCPU': 1}),
                         (self.usage(), self.row('uuid-2').usage))

    def test_report_keeps_notifications_newer_than_it(self):
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

    def test_departure_is_forgotten_after_report(self):
        self.report()
        self.tell()
        self.assertTrue(self.report(now=NOW + 10))
        self.assertFalse(self.report(now=NOW + 11))
        self.assertTrue(self.tell(VCPU=1))
        self.assertEqual({'VCPU': 1}, self.usage())


class TestConcurrentReports(ReportTestCase):

    scenarios = databases.SERVERS

    def meanwhile(self, interference):
        """Call something between the read and the write of a report."""
        counted = inventory.counted

        pending = [interference]

        def late(*args):
            if pending:
                pending.pop()()
            return counted(*args)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.inventory.counted', late))

    def elsewhere(self, work, *args):
        """Do something in a transaction of another process."""
        with self.db.connect().writer() as session:
            work(session, *args)

    def test_report_that_loses_race_is_repeated(self):
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

    def test_notification_that_loses_race_is_repeated(self):
        self.report()
        self.meanwhile(lambda: self.elsewhere(
            inventory.record_host_usage, NOW, 'uuid', {'a': {'VCPU': 1}},
            self.row().generation))

        def tell():
            with self.database.begin() as connection:
                return inventory.record_server(
                    connection, NOW + 9, 'compute', 'one', 'b', {'VCPU': 2})

        self.assertTrue(self.database.retried(tell))
        self.assertEqual({'VCPU': 3}, self.row().usage)

    def test_two_listeners_may_find_a_new_host_at_once(self):
        self.meanwhile(lambda: self.elsewhere(
            inventory.record_host, NOW, model.HostFacts(
                'uuid', 'one', 'compute', {'VCPU': 4}), {}))
        self.database.retried(self.report, capacity={'VCPU': 5})
        self.assertEqual([{'VCPU': 5}], self.scalars(models.Host.capacity))


class TestRetain(worlds.WorldTestCase):

    scenarios = databases.SQL

    def retain(self, *uuids):
        with self.database.writer() as session:
            return inventory.retain(session, uuids, NOW + 9)

    def test_hosts_missing_in_nova_lose_their_capacity(self):
        kept = self.host('kept', VCPU=1)
        self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain(kept))
        self.assertEqual(
            [('gone', {}, NOW + 9, 2), ('kept', {'VCPU': 1}, NOW, 1)],
            sorted((row.name, row.capacity, row.updated_at, row.generation)
                   for row in self.scalars(models.Host)))

    def test_missing_host_is_reported_once(self):
        self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain())
        self.assertEqual([], self.retain())
        self.assertEqual(2, self.generation('gone'))

    def test_nothing_is_booked_on_missing_host(self):
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


class TestTrim(worlds.WorldTestCase):

    scenarios = databases.SQL

    def test_old_changes_except_the_newest_are_deleted(self):
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

    def test_many_changes_are_deleted_in_several_transactions(self):
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

    def test_changes_with_future_time_do_not_block_trimming(self):
        self.change(999, 0, 999, 1, 2, 999)
        self.assertEqual(4, feed.trim(self.database, NOW + 10))
        self.assertEqual([NOW + 2, NOW + 999], sorted(
            self.scalars(models.Change.created_at)))
