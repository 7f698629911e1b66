# SPDX-License-Identifier: Apache-2.0

"""Reserved and used resources of leases are recorded, to the second."""

import collections
import os
import random
import time
import typing as ty
from unittest import mock
import uuid
import zoneinfo

from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import usage_records
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import accounting
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.lifecycle import engine
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400
HOSTS = ('one', 'two', 'three')
STORIES = int(os.environ.get('BLAZAR_STORIES', '8' if os.environ.get(
    'BLAZAR_DATABASES') == 'all' else '2'))


class Machines(base.WholeType):
    """Whole hosts."""

    def so_many(self, params):
        return model.Demand(model.WHOLE, params['max'], least=params['min'])


class UsageTestCase(base.LeaseTestCase):

    def more_types(self):
        self.machines = Machines()
        return {'machine': self.machines}

    def setUp(self):
        super().setUp()
        for name in HOSTS:
            self.host(name, VCPU=40)

    def count_statements(self, table):
        """Return a list to which each statement about a table is added."""
        found = []

        def note(_connection, _cursor, statement, *_rest):
            if table in statement:
                found.append(statement)

        with self.database.connection() as connection:
            sa.event.listen(connection.engine, 'before_cursor_execute', note)
        return found

    def totals(self, start=0, end=10_000, limit=10_000, **values):
        """Return the totals of an interval; times are seconds from NOW."""
        query = accounting.Query(model.Window(
            NOW + start, NOW + end), **values)
        with self.database.connection() as connection:
            return accounting.totals(
                connection, query, self.clock.now(), limit)

    def vcpus(self, start=0, end=10_000, **values):
        """Return the VCPU-seconds that were planned, reserved and used."""
        found = self.totals(start, end, **values)
        return tuple(sum(one.amounts[kind].get('VCPU', 0) for one in found)
                     for kind in usage_records.Kind)

    def change(self, lease, **values):
        self.leases.updates.update(lease['id'], updates.LeaseChange(**values))

    def gone(self, lease):
        for server_id in base.servers_of(lease):
            self.cloud.servers.pop(server_id, None)
            self.lifecycle.reconciliation.check(server_id)

    def hand_over(self, lease, project_id='new'):
        seen = self.leases.transfer.look(lease['id']).generation
        self.leases.transfer.transfer(
            lease['id'], seen, transfer.Owner(project_id, 'other'), None,
            False)

    def runs_on(self, name, **servers):
        """The periodic sync finds that these servers run on a host."""
        with self.database.writer() as session:
            uuid = self.uuid_of(name)
            inventory.record_host_usage(
                session, self.clock.now(), uuid, {
                    server_id: {'VCPU': vcpus}
                    for server_id, vcpus in servers.items()},
                inventory.generations(session, [uuid])[uuid])


class TestRecords(UsageTestCase):

    def test_a_lease_counts_from_its_start_to_its_end(self):
        self.lease(100, 300, count=2)
        self.assertEqual((400, 400, 0), self.vcpus())
        self.assertEqual((0, 0, 0), self.vcpus(0, 100))
        self.assertEqual((100, 100, 0), self.vcpus(50, 150))

    def test_servers_are_used_from_active_until_deleted(self):
        lease = self.running_lease(0, 300, count=2)
        self.clock.advance(50)
        self.assertEqual((600, 600, 100), self.vcpus())
        self.gone(lease)
        self.clock.advance(50)
        self.assertEqual((600, 100, 100), self.vcpus())

    def test_a_server_past_its_end_is_used_and_not_reserved(self):
        lease = self.running_lease(0, 300)
        self.clock.advance(340)
        self.gone(lease)
        self.clock.advance(1000)
        self.assertEqual((300, 300, 340), self.vcpus())

    def test_lease_deleted_before_start_reserves_nothing(self):
        lease = self.reserve(100, 300, self.places(3))
        self.clock.advance(50)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual((600, 0, 0), self.vcpus())

    def test_lease_deleted_early_counts_until_deletion(self):
        lease = self.reserve(0, 300, self.places(3))
        self.clock.advance(50)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual((900, 150, 0), self.vcpus())

    def test_a_change_does_not_rewrite_the_past(self):
        lease = self.reserve(0, 300, self.places(1), active=True)
        self.clock.advance(100)
        self.change(lease, end=NOW + 500)
        self.clock.advance(100)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(10)})
        self.assertEqual((300, 200 + 10 * 300, 0), self.vcpus())
        self.assertEqual([100, 100, 1000, 0], [
            self.vcpus(*one)[1] for one in (
                (0, 100), (100, 200), (200, 300), (500, 600))])

    def test_waiting_lease_reserves_nothing(self):
        self.lease(0, 1000, count=120)
        self.leases.creation.create(new_leases.NewLease(
            'other', 'user', self.request(
                0, 500, retry=requests.Retry(60, 3)), (self.places(1),)), None)
        self.assertEqual((0, 0, 0), self.vcpus(project_id='other'))

    def test_transferred_lease_counts_for_new_owner_from_then_on(self):
        lease = self.reserve(0, 300, self.places(2), active=True)
        self.clock.advance(100)
        self.hand_over(lease)
        self.assertEqual((600, 200, 0), self.vcpus(project_id='project'))
        self.assertEqual((0, 400, 0), self.vcpus(project_id='new'))

    def test_a_booking_without_a_host_reserves_nothing(self):
        self.reserve(0, 300, self.places(1, 2), active=True)
        (first,) = self.scalars(models.Booking.host_id)
        second, third = sorted(
            {*self.scalars(models.Host.id)} - {first})
        for host_id in (None, second, third):
            self.clock.advance(50)
            self.reassign(host_id)
        self.assertEqual((600, 500, 0), self.vcpus())
        self.assertEqual([100, 0, 100, 100, 100], [
            self.vcpus(time, time + 50)[1] for time in range(0, 250, 50)])
        self.assertEqual([[first], [first], [second], [second], [third]],
                         self.scalars(models.UsageRecord.hosts))

    def reassign(self, host_id):
        with self.database.writer() as session:
            (row,) = session.scalars(sa.select(models.Booking))
            ledger.amend(session, self.clock.now(), [ledger.Edit(
                row, ledger.new_of(row, host_id=host_id))])

    def test_a_transfer_without_a_host_records_nothing(self):
        lease = self.reserve(0, 300, self.places(1, 2), active=True)
        (host_id,) = self.scalars(models.Booking.host_id)
        self.clock.advance(50)
        self.reassign(None)
        self.clock.advance(100)
        self.hand_over(lease)
        self.clock.step(-50)
        self.reassign(host_id)
        self.assertEqual(100, self.vcpus(project_id='project')[1])
        self.assertEqual(400, self.vcpus(project_id='new')[1])

    def used_now(self):
        return sum(one['VCPU'] for one in self.scalars(
            models.Booking.resources, models.Booking.running))

    def test_whole_hosts_are_used_while_servers_are_on_them(self):
        params = {'min': 2, 'max': 2}
        lease = self.reserve(0, 300, new_leases.NewReservation(
            self.machines.requirements(None, params).demand,
            resource_type='machine', params=params, spec={}), active=True)
        self.clock.advance(30)
        self.assertEqual((24000, 24000, 0), self.vcpus())
        self.leases.slots.use(lease['reservations'][0]['id'])
        self.assertEqual(0, self.used_now())
        for _time in range(2):
            self.runs_on('one', server=1)
            self.runs_on('two', other=3, third=1)
            self.assertEqual(80, self.used_now())
        self.clock.advance(30)
        self.hand_over(lease)
        self.clock.advance(10)
        self.runs_on('two')
        self.assertEqual(40, self.used_now())
        self.clock.advance(20)
        self.runs_on('two', fourth=1)
        self.clock.advance(10)
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.new_engine())
        self.clock.advance(100)
        self.assertEqual((24000, 4800, 2400), self.vcpus(
            project_id='project'))
        self.assertEqual((0, 3200, 3200 - 20 * 40),
                         self.vcpus(project_id='new'))

    def test_changes_are_ordered_despite_clock_steps(self):
        lease = self.reserve(0, 300, self.places(1, 3), active=True)
        self.clock.advance(100)
        self.change(lease, end=NOW + 400)
        self.clock.step(-50)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual((900, 300, 0), self.vcpus())
        self.assertEqual(300, self.vcpus(0, 100)[1])

    def test_addition_in_repeated_time_counts(self):
        lease = self.reserve(0, 300, self.places(4, 3), active=True)
        self.clock.advance(100)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(1, 3)})
        self.clock.step(-50)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(4, 3)})
        self.assertEqual([600, 600 + 450, 600], [
            self.vcpus(*one)[1] for one in ((0, 50), (50, 100), (100, 150))])

    def recorded(self):
        return len(self.scalars(models.UsageRecord.id))

    def test_changes_of_dates_add_no_records(self):
        """However many they are."""
        self.clock.advance(10)
        started = self.reserve(10, 2000, self.places(3, 2), active=True)
        later = self.reserve(1000, 2000, self.places(2))
        records = []
        for number in range(30):
            self.clock.advance(number % 3)
            self.change(started, end=NOW + 2000 + 60 * (number % 7 - 3))
            self.change(later, start=NOW + 1000 + 50 * (number % 5),
                        end=NOW + 3000 - 60 * (number % 4))
            records.append(self.recorded())
        # What was planned, and where the windows differ from that now.
        self.assertGreaterEqual(5, max(records), records)
        self.assertEqual((
            6 * 1990 + 2 * 1000,
            6 * (1990 + 60 * (29 % 7 - 3)) + 2 * (
                2000 - 60 * (29 % 4) - 50 * (29 % 5)), 0), self.vcpus())

    def test_changes_of_amounts_add_no_records(self):
        lease = self.reserve(1000, 2000, self.places(3))
        for number in range(20):
            self.clock.advance(1)
            self.change(lease, reservations={
                lease['reservations'][0]['id']: self.places(1 + number % 5)})
        self.assertGreaterEqual(3, self.recorded())
        self.assertEqual((3000, 5000, 0), self.vcpus())

    def test_transfers_add_no_records(self):
        lease = self.reserve(1000, 2000, self.places(3))
        for project_id in ('new', 'other', *5 * ('new', 'project')):
            self.clock.advance(1)
            self.hand_over(lease, project_id)
        self.assertGreaterEqual(5, self.recorded())
        self.assertEqual((3000, 3000, 0), self.vcpus(project_id='project'))
        # That they had it once is known.
        self.assertEqual({'new', 'other', 'project'}, {
            *self.scalars(models.UsageRecord.project_id)})

    def test_records_of_the_past_are_not_replaced(self):
        lease = self.reserve(0, 1000, self.places(1), active=True)
        self.clock.advance(10)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(3)})
        self.clock.advance(10)
        before = self.scalars(models.UsageRecord.id)
        self.change(lease, end=NOW + 2000)
        self.assertEqual(before, self.scalars(models.UsageRecord.id)[:2])
        self.assertEqual([10, 30, 30 * 98, 3000, 0], [
            self.vcpus(*one)[1] for one in (
                (0, 10), (10, 20), (20, 1000), (1000, 2000), (2000, 3000))])

    def test_record_of_earliest_window_stays(self):
        """The fee for a reservation is paid in its interval."""
        lease = self.reserve(1000, 2000, self.places(1))
        for start in (800, 500, 1000, 900, 1200):
            self.change(lease, start=NOW + start)
        self.assertEqual([NOW + 500], self.scalars(
            sa.func.min(models.UsageRecord.start_date),
            models.UsageRecord.sign == 1))
        self.assertEqual((1000, 800, 0), self.vcpus())

    def test_records_are_replaced_once(self):
        """Another process is faster in the first attempt."""
        lease = self.reserve(1000, 2000, self.places(1))
        self.change(lease, end=NOW + 3000)
        found = []

        def race(connection, _cursor, statement, *_rest):
            if statement.startswith('DELETE FROM usage_records'):
                found.append(statement)
                if len(found) == 1:
                    connection.exec_driver_sql(
                        "DELETE FROM usage_records WHERE kind = 'reserved'")

        # Of the connection that finds the rows deleted.
        with self.database.connection() as connection:
            sa.event.listen(connection.engine, 'before_cursor_execute', race)
        self.change(lease, end=NOW + 4000)
        self.assertEqual((1000, 3000, 0), self.vcpus())
        self.assertEqual(3, len(found))

    def test_consecutive_intervals_add_up(self):
        lease = self.running_lease(0, 3 * DAY, count=3)
        self.clock.advance(DAY + 7)
        self.gone(lease)
        for zone, unit in (('Europe/Berlin', 'day'), ('Asia/Kolkata', 'day'),
                           ('America/St_Johns', 'month')):
            parts = self.totals(-DAY, 5 * DAY, unit=unit,
                                zone=zoneinfo.ZoneInfo(zone))
            self.assertEqual(
                3 * (DAY + 7),
                sum(one.amounts['used'].get('VCPU', 0) for one in parts))
            for one, after in zip(parts, parts[1:]):
                self.assertEqual(one.window.end, after.window.start)
            for one in parts:
                self.assertEqual([one], self.totals(
                    one.window.start - NOW, one.window.end - NOW))

    def test_too_many_days_are_refused(self):
        self.assertRaises(errors.InvalidLeaseParams, self.totals,
                          0, 1000 * DAY, unit='day')

    def test_totals_are_grouped_and_read_page_by_page(self):
        for project in 'abc':
            self.lease(100, 200, project=project)
        keys = ('project_id', 'resource_type')
        found = self.totals(group_by=keys)
        self.assertEqual(
            [(one, 'virtual:instance') for one in 'abc'],
            [one.keys for one in found])
        after = self.totals(group_by=keys, after=(NOW, found[0].keys))
        self.assertEqual(found[1:], after)

    def test_pages_add_up_for_any_size_of_results(self):
        for number in range(12):
            self.lease(number * DAY // 3, number * DAY // 2 + 100 * number + 9,
                       project=f'p{number * 5 % 7}', count=1 + number % 3)
        asked = self.count_statements('usage_records')
        for unit, keys in ((None, ('lease_id',)), ('day', ('lease_id',)),
                           ('day', ('project_id', 'resource_type')),
                           ('day', ()), (None, ())):
            values = {'unit': unit, 'group_by': keys, 'end': 7 * DAY}
            whole = self.totals(**values)
            self.assertEqual(self.vcpus(end=7 * DAY), tuple(
                sum(one.amounts[kind].get('VCPU', 0) for one in whole)
                for kind in usage_records.Kind))
            for most, limit in ((1, 1), (3, 2), (5, 100), (10_000, 4)):
                pages, after = [], None
                with mock.patch.object(accounting, '_ROWS', most):
                    while True:
                        del asked[:]
                        page = self.totals(
                            **values, limit=limit, after=after)
                        if most == 10_000:
                            self.assertGreaterEqual(2, len(asked))
                        pages += page
                        if len(page) < limit:
                            break
                        after = page[-1].window.start, page[-1].keys
                self.assertEqual(whole, pages, (values, most, limit))

    def test_many_days_take_few_statements(self):
        """Each reads all records of the interval."""
        for day in range(0, 300, 5):
            self.lease(day * DAY, day * DAY + 3600)
        asked = self.count_statements('usage_records')
        for keys in ((), ('project_id',)):
            pages, after = [], None
            while True:
                del asked[:]
                page = self.totals(0, 300 * DAY, unit='day', group_by=keys,
                                   after=after, limit=50)
                self.assertGreaterEqual(9, len(asked))
                pages += page
                if len(page) < 50:
                    break
                after = page[-1].window.start, page[-1].keys
            self.assertEqual([NOW // DAY + day for day in range(0, 300, 5)],
                             [one.window.start // DAY for one in pages])

    def test_leases_outside_of_interval_are_omitted(self):
        leases = [self.running_lease(0, 300) for _lease in range(4)]
        self.clock.advance(300)
        for lease in leases:
            self.gone(lease)
        self.clock.advance(10 * DAY)
        asked = self.count_statements('usage_records')
        with mock.patch.object(accounting, '_ROWS', 1):
            self.assertEqual([], self.totals(
                300, 9 * DAY, group_by=('lease_id',), unit='day'))
        # They do not fill the answers of statements either.
        self.assertEqual(1, len(asked))

    def test_totals_can_be_filtered_by_tags(self):
        for tags in (('ci',), ('ci', 'dev'), ()):
            self.lease(request=self.request(100, 200, tags=tags))
        self.assertEqual(200, self.vcpus(tags=('ci',))[1])
        self.assertEqual(100, self.vcpus(tags=('ci', 'dev'))[1])
        (found,) = self.totals(group_by=('lease_id',), tags=('dev', 'ci'))
        self.assertEqual([['ci', 'dev']], self.scalars(
            models.Lease.tags, models.Lease.id == found.keys[0]))

    def test_admission_start_and_end_cost_one_statement_each(self):
        statements = self.count_statements('usage_records')

        def count(work, *args):
            del statements[:]
            done = work(*args)
            return len(statements), done

        admitted, lease = count(lambda: self.lease(0, 300, count=5))
        server_id, *others = base.servers_of(lease)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid_of(self.host_of(server_id)))
        check = self.lifecycle.reconciliation.check
        started, _seen = count(check, server_id)
        again, _seen = count(check, server_id)
        self.clock.advance(10)
        changed = [count(lambda end=end: self.change(
            lease, end=NOW + end))[0] for end in (400, 500)]
        del self.cloud.servers[server_id]
        ended, _seen = count(check, server_id)
        self.assertEqual((1, 1, 0, 1), (admitted, started, again, ended))
        # It reads the records to come, and deletes them if there are any.
        self.assertEqual([2, 3], changed)

    def test_records_cost_at_most_one_statement(self):
        """Of all statements, reading included."""
        statements = []
        with self.database.connection() as connection:
            sa.event.listen(
                connection.engine, 'before_cursor_execute',
                lambda _connection, _cursor, statement, *_rest:
                statements.append(statement))

        def count(work, *args):
            del statements[:]
            done = work(*args)
            return len(statements), done

        def story():
            reserved, lease = count(lambda: self.lease(
                self.clock.now() - NOW, self.clock.now() - NOW + 300,
                count=5, request=self.request(
                    self.clock.now() - NOW, self.clock.now() - NOW + 300,
                    starts_now=True)))
            server_id = base.servers_of(lease)[0]
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                base.State.RUNNING, self.uuid_of(self.host_of(server_id)))
            started, _seen = count(
                self.lifecycle.reconciliation.check, server_id)
            self.clock.advance(10)
            ended, _seen = count(self.lifecycle.lease_end.delete, lease['id'])
            return reserved, started, ended

        story()
        costs = story()
        with mock.patch.object(usage_records.Records, 'write'), (
                mock.patch.object(usage_records, 'owners', return_value={})):
            self.assertGreaterEqual(1, max(
                cost - without for cost, without in zip(
                    costs, story(), strict=True)))


class Booked(ty.NamedTuple):
    """What a booking reserves, and for whom."""

    project_id: str
    lease_id: str
    resource_type: str
    vcpus: int
    start: int
    end: int
    running: bool
    host_id: int

    def within(self, since, until):
        """The VCPU-seconds that it reserves within a time."""
        return self.vcpus * max(
            0, min(self.end, until) - max(self.start, since))


class Observer:
    """A count of bookings, without usage records.

    A booking is as it was last seen. If the clock is set back, a change counts
    from the previous change of the booking on at the earliest.
    """

    def __init__(self, database):
        self._database = database
        #: For each booking, also of the past, the times of its changes and its
        #: states since then; None: it reserves and uses nothing.
        self._seen = []
        #: The same for present ones, by lease and id, as ids are reused.
        self._there = {}
        #: When each reservation was admitted, and its bookings then.
        self._planned = {}

    def watch(self, since, until):
        """Count while nothing changes."""
        self._until = until
        bookings = sa.select(models.Booking).where(
            models.Booking.reservation_id.is_not(None)).options(orm.joinedload(
                models.Booking.reservation).joinedload(
                    models.Reservation.lease))
        admitted = {}
        with self._database.reader() as session:
            rows = {(row.reservation.lease_id, row.id): (
                row.reservation_id, self._state(row))
                for row in session.scalars(bookings)}
        for reservation_id, state in rows.values():
            if state is not None:
                admitted.setdefault(
                    reservation_id, (since, []))[1].append(state)
        self._planned = admitted | self._planned
        for key in {*self._there, *rows}:
            _reservation_id, state = rows.get(key, (None, None))
            changes = self._there.get(key)
            if changes is None and state is not None:
                self._there[key] = [(since, state)]
                self._seen.append(self._there[key])
            elif changes is not None and state != changes[-1][1]:
                changes.append((max(since, changes[-1][0]), state))
        for key in self._there.keys() - rows:
            del self._there[key]

    def _state(self, row):
        lease = row.reservation.lease
        if row.host_id is None or lease.status in states.SEEKING:
            return None
        return Booked(
            lease.project_id, lease.id, row.reservation.resource_type,
            row.resources['VCPU'], row.start_date, row.end_date, row.running,
            row.host_id)

    def _spans(self):
        """Yield the states of bookings, each with its beginning and end."""
        for changes in self._seen:
            ends = [begin for begin, _state in changes[1:]] + [self._until]
            for (begin, state), end in zip(changes, ends, strict=True):
                if state is not None:
                    yield begin, end, state

    def totals(self, since, until):
        """VCPU-seconds by kind and by accounting.KEYS, without zeros."""
        found = collections.Counter()
        for begin, admitted in self._planned.values():
            for state in admitted:
                found['planned', *state[:3]] += state.within(
                    max(begin, since), until)
        for begin, end, state in self._spans():
            begin, end = max(begin, since), min(end, until)
            found['reserved', *state[:3]] += state.within(begin, end)
            if state.running:
                found['used', *state[:3]] += state.vcpus * max(0, end - begin)
        return +found

    def total(self, kind, since, until):
        return sum(amount for key, amount in self.totals(since, until).items()
                   if key[0] == kind)

    def hosts(self, instant):
        """How many bookings reserve something of each host at an instant."""
        return collections.Counter(
            state.host_id for begin, end, state in self._spans()
            if begin <= instant < end and state.start <= instant < state.end)


class Broken(BaseException):
    """The process dies."""


class TestRandomStories(UsageTestCase):
    """Random sequences of operations, compared with an independent count."""

    scenarios = databases.EACH
    LENGTH = 220
    #: The acts of a story; it begins with leases.
    ACTS = {'create': 10, 'create_machines': 2, 'start': 2, 'extend': 4,
            'resize': 4, 'end': 1, 'boot': 10, 'use_machines': 2, 'move': 2,
            'delete_server': 1, 'fail': 1, 'transfer': 4, 'happen': 3,
            'fail_host': 4, 'fail_hosts': 1, 'lose': 1, 'heal': 1,
            'evacuate': 3, 'recover': 8}
    HOSTS = (*HOSTS, 'four')

    def setUp(self):
        # A story is the same each time, so that a failure can be repeated.
        ids = random.Random('ids')
        self.enterContext(mock.patch.object(
            uuidutils, 'generate_uuid',
            lambda: str(uuid.UUID(int=ids.getrandbits(128)))))
        super().setUp()
        # There are no others to wait for.
        self.enterContext(mock.patch.object(time, 'sleep'))
        self.host('four', VCPU=40)
        asked = self.count_statements('usage_records')
        self.addCleanup(lambda: self.assertEqual(set(), {
            one.split()[0] for one in asked} - {
                'INSERT', 'SELECT', 'DELETE'}))
        self.cloud.hosts = {self.uuid_of(name) for name in self.HOSTS}
        self.down, self.exchanged = set(), set()
        #: After so many statements the process dies; None: it does not.
        self.dies_at = None
        for event in ('before_cursor_execute', 'commit'):
            sa.event.listen(self.database.engine, event, self.step)
        self.engine = engine.Engine(
            self.db.conf, self.database, self.clock, self.lifecycle, 'it')
        self.evacuation = self.new_relocating()
        self.host_status = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(0, 0, 3600),
            lambda _event, _host: None)

    def step(self, *_args):
        if self.dies_at is not None:
            self.dies_at -= 1
            if self.dies_at < 0:
                raise Broken

    def test_records_match_independent_count(self):
        self.tell_all(STORIES)
        # Slots had another host at once, or lost theirs and had one later,
        # and servers were evacuated.
        self.assertEqual(set(), {
            'evacuated', *(('virtual:instance', *hosts) for hosts in (
                (True, True), (True, False), (False, True)))} - self.exchanged)

    def test_records_match_independent_count_if_clock_is_set_back(self):
        self.tell_all((STORIES + 1) // 2, backwards=0.1)

    def tell_all(self, stories, backwards=0.0):
        for number in range(stories):
            with self.subTest(number):
                self.tell(random.Random(number), backwards)

    def tell(self, dice, backwards):
        observer, begin = Observer(self.database), self.clock.now()
        leases = []
        for _step in range(self.LENGTH):
            begun = self.begun()
            self.act(dice, leases)
            # The past is never written again.
            self.assertLessEqual(begun, self.begun())
            now = self.clock.now()
            # Sometimes the clock is set forward: events are late.
            self.clock.advance(dice.choice([2000] + 59 * [
                dice.randint(0, 40)]))
            observer.watch(now, self.clock.now())
            if dice.random() < backwards:
                self.clock.step(-dice.randint(1, 200))
        now = self.clock.now()
        # However often the clock was set back, all of it is past now.
        observer.watch(now, self.clock.advance(10_000))
        self.compare(dice, observer, begin, self.clock.now(), leases)
        # The next story begins without leases.
        self.cloud.servers.clear()
        self.down.clear()
        self.heal(dice, leases)
        for lease in leases:
            self.lifecycle.lease_end.delete(lease['id'])
        while driven.run_due(self.engine):
            self.clock.advance(DAY)
        end = self.clock.now()
        self.assertEqual([], self.totals(end - NOW, end - NOW + DAY))

    def begun(self):
        """Return the records that begin before now."""
        with self.database.connection() as connection:
            return {str(row) for row in connection.execute(sa.select(
                models.UsageRecord.__table__).where(
                    models.UsageRecord.start_date < self.clock.now()))}

    def compare(self, dice, observer, begin, end, leases):
        """Compare records with what was seen from the beginning to the end."""
        cuts = sorted({begin, end, *(dice.randint(begin, end)
                                     for _cut in range(4))})
        sums = collections.Counter()
        for since, until in [*zip(cuts, cuts[1:]), (begin, end)]:
            whole = self.by_keys(since, until)
            seen = observer.totals(since, until)
            self.assertEqual({}, {
                key: (since, until, seen[key], whole[key])
                for key in seen | whole if seen[key] != whole[key]})
            if (since, until) != (begin, end):
                sums.update(whole)
        self.assertEqual(sums, whole)
        for name, value in (
                ('project_id', 'project'), ('project_id', 'new'),
                ('resource_type', 'machine'),
                *(('lease_id', one['id']) for one in dice.sample(leases, 5))):
            at = 1 + accounting.KEYS.index(name)
            self.assertEqual(tuple(
                sum(amount for key, amount in sums.items()
                    if (key[0], key[at]) == (kind, value))
                for kind in usage_records.Kind), self.vcpus(
                    begin - NOW, end - NOW, **({'lease_ids': [value]} if (
                        name == 'lease_id') else {name: value})))
        for instant in cuts:
            self.assertEqual(observer.hosts(instant), self.hosts_at(instant))

    def by_keys(self, since, until):
        return +collections.Counter({
            (kind, *one.keys): amounts.get('VCPU', 0)
            for one in self.totals(since - NOW, until - NOW,
                                   group_by=accounting.KEYS)
            for kind, amounts in one.amounts.items()})

    def hosts_at(self, instant):
        """How many bookings reserve something of each host, by records."""
        found = collections.Counter()
        with self.database.reader() as session:
            for row in session.scalars(sa.select(models.UsageRecord).where(
                    models.UsageRecord.kind != usage_records.Kind.USED,
                    models.UsageRecord.start_date <= instant,
                    models.UsageRecord.end_date > instant)):
                for host_id in row.hosts:
                    found[host_id] += row.sign
        return collections.Counter({
            host_id: number for host_id, number in found.items() if number})

    def act(self, dice, leases):
        act, = dice.choices([*self.ACTS], [*self.ACTS.values()])
        if dice.random() < 0.2:
            self.dies_at = dice.randint(0, 40)
        try:
            getattr(self, act)(dice, leases)
        except (Broken, errors.BlazarError):
            pass
        finally:
            self.dies_at = None

    def create(self, dice, leases):
        now = self.clock.now() - NOW
        start = now + dice.choice([0, dice.randint(1, 300)])
        end = start + dice.randint(50, 1500)
        if dice.random() < 0.6:
            leases.append(self.reserve(start, end, self.places(
                dice.randint(1, 4), dice.randint(1, 3)), request=self.request(
                    start, end, starts_now=start == now,
                    retry=dice.choice([None, requests.Retry(60, 3)]),
                    grace_period=dice.choice([0, 20]))))
        else:
            new = self.new_lease(start, end, count=dice.randint(1, 3))
            leases.append(self.leases.creation.create(
                new, self.encryption.encrypt('call')))
        self.start(dice, leases[-1:])

    def machines_of(self, number):
        params = {'min': number, 'max': number}
        return new_leases.NewReservation(
            self.machines.requirements(None, params).demand,
            resource_type='machine', params=params, spec={})

    def create_machines(self, dice, leases):
        now = self.clock.now() - NOW
        leases.append(self.reserve(
            now, now + dice.randint(50, 1500), self.machines_of(1)))
        self.start(dice, leases[-1:])

    def chosen(self, dice, leases, *kinds):
        """Return a lease that has not ended, of one of these kinds (boot, slot
        and machine).
        """
        going_on = {*self.scalars(models.Lease.id, models.Lease.status.not_in(
            states.LEASE.final()))}
        found = [one for one in leases if one['id'] in going_on and
                 self.kind_of(one) in kinds]
        if not found:
            raise Broken
        return dice.choice(found)

    def kind_of(self, lease):
        if base.servers_of(lease):
            return 'boot'
        return 'machine' if lease['reservations'][0][
            'resource_type'] == 'machine' else 'slot'

    def start(self, dice, leases):
        self.lifecycle.lease_start.start(self.chosen(
            dice, leases, 'boot', 'slot', 'machine')['id'])

    def extend(self, dice, leases):
        self.change(
            self.chosen(dice, leases, 'boot', 'slot', 'machine'),
            end=self.clock.now() + dice.randint(-10, 600))

    def resize(self, dice, leases):
        lease = self.chosen(dice, leases, 'slot', 'machine')
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(dice.randint(1, 5))
            if self.kind_of(lease) == 'slot' else self.machines_of(
                dice.randint(1, 2))})

    def end(self, dice, leases):
        self.lifecycle.lease_end.delete(self.chosen(
            dice, leases, 'boot', 'slot', 'machine')['id'])

    def happen(self, dice, leases):
        """A listener carries out the events that are due."""
        driven.run_due(self.engine)

    def boot(self, dice, leases):
        lease = self.chosen(dice, leases, 'boot', 'slot')
        servers = base.servers_of(lease) or [uuidutils.generate_uuid()]
        if not base.servers_of(lease):
            self.leases.slots.take(lease['reservations'][0]['id'],
                                   self.project_of(lease), servers)
        for server_id in servers:
            self.see(server_id, self.host_of(server_id))

    def project_of(self, lease):
        return self.scalars(models.Lease.project_id,
                            models.Lease.id == lease['id'])[0]

    def see(self, server_id, name):
        if name is not None and name not in self.down:
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                base.State.RUNNING, self.uuid_of(name))
            self.lifecycle.reconciliation.check(server_id)

    def use_machines(self, dice, leases):
        """Servers run on a host of a lease of hosts, or do no longer."""
        lease = self.chosen(dice, leases, 'machine')
        for name in self.scalars(models.Host.name, models.Host.id.in_(
                sa.select(models.Booking.host_id).join(
                    models.Booking.reservation).where(
                        models.Reservation.lease_id == lease['id']))):
            self.runs_on(name, **dice.choice([{}, {'server': 1}]))

    def move(self, dice, leases):
        servers = sorted(self.cloud.servers)
        if servers:
            self.see(dice.choice(servers), dice.choice(self.HOSTS))

    def delete_server(self, dice, leases):
        servers = sorted(self.cloud.servers)
        if servers:
            self.delete_any(dice, servers)

    def delete_any(self, dice, servers):
        server_id = dice.choice(servers)
        del self.cloud.servers[server_id]
        self.lifecycle.reconciliation.check(server_id)

    def fail(self, dice, leases):
        lease = self.chosen(dice, leases, 'boot')
        server_id = dice.choice(base.servers_of(lease))
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.ERROR, fault='It is broken.')
        self.lifecycle.reconciliation.check(server_id)

    def transfer(self, dice, leases):
        self.hand_over(self.chosen(dice, leases, 'slot', 'machine'),
                       dice.choice(['project', 'new']))

    # -- hosts that fail ------------------------------------------------------

    def fail_host(self, dice, leases):
        """Bookings go to other hosts."""
        self.down.add(dice.choice(self.HOSTS))
        self.heal(dice, leases)

    def fail_hosts(self, dice, leases):
        """Bookings lose their hosts, and there are no others."""
        self.down.update(self.HOSTS)
        self.heal(dice, leases)

    def recover(self, dice, leases):
        """Bookings have a host again."""
        self.down.discard(dice.choice(self.HOSTS))
        self.heal(dice, leases)

    def lose(self, dice, leases):
        """A server on a failed host is deleted, or is in ERROR."""
        lost = {self.uuid_of(name) for name in self.down}
        servers = sorted(server_id for server_id, seen in (
            self.cloud.servers.items()) if seen.host in lost)
        if not servers:
            return
        if dice.random() < 0.5:
            self.delete_any(dice, servers)
            return
        server_id = dice.choice(servers)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.ERROR, self.cloud.servers[server_id].host)
        self.lifecycle.reconciliation.check(server_id)

    def heal(self, dice, leases):
        """A listener that has just been started looks at all hosts."""
        self.host_status.update({
            self.uuid_of(name): host_status.Down('It is off.', certain=True)
            if name in self.down else None for name in self.HOSTS})
        overbooking.OverbookingCheck(
            self.database, self.clock, self.admission,
            self.leases.reassignment, self.new_demands(), self.note,
            self.start_timeout).look()
        self.evacuation.look(lambda failed: [*failed])

    def note(self, _event, lease):
        types = {one['id']: one['resource_type']
                 for one in lease['reservations']}
        self.exchanged |= {
            ('boot' if one['server_id'] else types[one['reservation_id']],
             one['before'] is not None, one['after'] is not None)
            for one in lease.get('exchanged', ())}

    def evacuate(self, dice, leases):
        """Nova has evacuated servers, or could not."""
        names = [None, *(name for name in self.HOSTS if name not in self.down)]
        for server_id in [server_id for server_id, seen in (
                self.cloud.servers.items()) if seen.busy]:
            before, name = self.host_of(server_id), dice.choice(names)
            self.cloud.arrive(server_id, name and self.uuid_of(name))
            self.lifecycle.reconciliation.check(server_id)
            if self.host_of(server_id) not in (None, before):
                self.exchanged.add('evacuated')
