# SPDX-License-Identifier: Apache-2.0

"""Reserved and used resources of leases are recorded, to the second."""

import collections
import os
import random
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
from blazar_core.leases import accounting
from blazar_core.leases import creation
from blazar_core.leases import lease_purge
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NOW = base.NOW
DAY = 86400
STORIES = int(os.environ.get('BLAZAR_STORIES', '6'))


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
        for name in ('one', 'two', 'three'):
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


class TestRecords(UsageTestCase):

    def test_a_lease_counts_from_its_start_to_its_end(self):
        self.lease(100, 300, count=2)
        self.assertEqual((400, 400, 0), self.vcpus())
        self.assertEqual((0, 0, 0), self.vcpus(0, 100))
        self.assertEqual((100, 100, 0), self.vcpus(50, 150))

    def test_servers_are_used_from_when_they_run_until_they_are_gone(self):
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

    def test_one_that_is_deleted_before_its_start_has_reserved_nothing(self):
        lease = self.reserve(100, 300, self.places(3))
        self.clock.advance(50)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual((600, 0, 0), self.vcpus())

    def test_what_is_deleted_early_counts_until_then(self):
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

    def test_one_that_waits_has_reserved_nothing(self):
        self.lease(0, 1000, count=120)
        self.leases.creation.create(creation.NewLease(
            'other', 'user', self.request(
                0, 500, retry=requests.Retry(60, 3)), (self.places(1),)), None)
        self.assertEqual((0, 0, 0), self.vcpus(project_id='other'))

    def test_a_transferred_lease_is_its_new_owners_from_then_on(self):
        lease = self.reserve(0, 300, self.places(2), active=True)
        self.clock.advance(100)
        seen = self.leases.transfer.look(lease['id']).generation
        self.leases.transfer.transfer(
            lease['id'], seen, transfer.Owner('new', 'other'), None, False)
        self.assertEqual((600, 200, 0), self.vcpus(project_id='project'))
        self.assertEqual((0, 400, 0), self.vcpus(project_id='new'))

    def test_a_booking_without_a_host_reserves_nothing(self):
        self.reserve(0, 300, self.places(1, 2), active=True)
        (first,) = self.scalars(models.Booking.host_id)
        second, third = sorted(
            {*self.scalars(models.Host.id)} - {first})
        for host_id in (None, second, third):
            self.clock.advance(50)
            with self.database.writer() as session:
                (row,) = session.scalars(sa.select(models.Booking))
                ledger.amend(session, self.clock.now(), [ledger.Edit(
                    row, ledger.new_of(row, host_id=host_id))])
        self.assertEqual((600, 500, 0), self.vcpus())
        self.assertEqual([100, 0, 100, 100, 100], [
            self.vcpus(time, time + 50)[1] for time in range(0, 250, 50)])
        self.assertEqual([[first], [first], [second], [second], [third]],
                         self.scalars(models.UsageRecord.hosts))

    def used_now(self):
        with self.database.connection() as connection:
            return sum(used['VCPU'] for _reserved, used in (
                accounting.reserved_at(
                    connection, self.clock.now()).values()))

    def runs_on(self, name, **servers):
        """The periodic sync finds that these servers run on a host."""
        with self.database.writer() as session:
            uuid = self.uuid_of(name)
            inventory.report_usage(
                session, self.clock.now(), uuid, {
                    server_id: {'VCPU': vcpus}
                    for server_id, vcpus in servers.items()},
                inventory.generations(session, [uuid])[uuid])

    def test_whole_hosts_are_used_while_servers_are_on_them(self):
        params = {'min': 2, 'max': 2}
        lease = self.reserve(0, 300, creation.NewReservation(
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
        seen = self.leases.transfer.look(lease['id']).generation
        self.leases.transfer.transfer(
            lease['id'], seen, transfer.Owner('new', 'other'), None, False)
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

    def test_a_later_change_counts_later_whatever_the_clock_says(self):
        lease = self.reserve(0, 300, self.places(1, 3), active=True)
        self.clock.advance(100)
        self.change(lease, end=NOW + 400)
        self.clock.step(-50)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual((900, 300, 0), self.vcpus())
        self.assertEqual(300, self.vcpus(0, 100)[1])

    def test_what_is_added_in_time_that_passes_again_counts_in_it(self):
        lease = self.reserve(0, 300, self.places(4, 3), active=True)
        self.clock.advance(100)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(1, 3)})
        self.clock.step(-50)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(4, 3)})
        self.assertEqual([600, 600 + 450, 600], [
            self.vcpus(*one)[1] for one in ((0, 50), (50, 100), (100, 150))])

    def test_intervals_that_follow_each_other_add_up(self):
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

    def test_pages_add_up_whatever_one_statement_returns(self):
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

    def test_many_days_are_few_statements(self):
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

    def test_leases_of_former_times_are_omitted(self):
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

    def test_totals_of_leases_by_their_tags(self):
        for tags in (('ci',), ('ci', 'dev'), ()):
            self.lease(request=self.request(100, 200, tags=tags))
        self.assertEqual(200, self.vcpus(tags=('ci',))[1])
        self.assertEqual(100, self.vcpus(tags=('ci', 'dev'))[1])
        found = self.totals(group_by=('lease_id',), tags=('dev', 'ci'))
        with self.database.connection() as connection:
            self.assertEqual([{
                'lease_name': 'lease', 'description': '',
                'tags': ['ci', 'dev']}], [*accounting.leases(connection, [
                    one.keys[0] for one in found]).values()])

    def test_an_admission_a_start_and_an_end_cost_one_statement(self):
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
        del self.cloud.servers[server_id]
        ended, _seen = count(check, server_id)
        self.assertEqual((1, 1, 0, 1), (admitted, started, again, ended))

    def test_without_records_there_would_be_one_statement_less(self):
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

    def test_records_of_purged_leases_stay_until_they_are_old(self):
        lease = self.running_lease(0, 300)
        other = self.running_lease(0, 300)
        self.clock.advance(300)
        self.gone(lease)
        purge = lease_purge.LeasePurge(
            self.database, self.clock, lambda _text: None)
        before = self.clock.advance(10 * DAY) - 2 * DAY
        self.assertEqual(1, purge.purge(before).deleted)
        self.assertEqual((600, 600), self.vcpus()[:2])
        purge.purge(before, usage_before=NOW + 300)
        self.assertEqual((600, 600), self.vcpus()[:2])
        purge.purge(before, usage_before=NOW + 301)
        self.assertEqual([other['id']], sorted(
            {*self.scalars(models.UsageRecord.lease_id)}))


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

    def watch(self, since, until):
        """Count while nothing changes."""
        self._until = until
        bookings = sa.select(models.Booking).options(orm.joinedload(
            models.Booking.reservation).joinedload(models.Reservation.lease))
        with self._database.reader() as session:
            rows = {(row.reservation.lease_id, row.id): self._state(row)
                    for row in session.scalars(bookings)}
        for key in {*self._there, *rows}:
            state, changes = rows.get(key), self._there.get(key)
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
        return (lease.project_id, lease.id, row.resources['VCPU'],
                row.start_date, row.end_date, row.running, row.host_id)

    def total(self, kind, since, until, **wanted):
        found = 0
        for changes in self._seen:
            ends = [begin for begin, _state in changes[1:]] + [self._until]
            for (begin, state), end in zip(changes, ends, strict=True):
                if state is None:
                    continue
                project, lease, amount, start, stop, running, _host = state
                if wanted.get('project_id', project) != project or (
                        lease not in wanted.get('lease_ids', (lease,))):
                    continue
                begins, ends_at = max(begin, since), min(end, until)
                if kind == 'reserved':
                    begins, ends_at = max(begins, start), min(ends_at, stop)
                elif not running:
                    continue
                found += amount * max(0, ends_at - begins)
        return found


class Broken(Exception):
    """The process dies."""


class TestStories(UsageTestCase):
    """Random sequences of operations, compared with an independent count."""

    scenarios = databases.EACH
    LENGTH = 90

    def setUp(self):
        # A story is the same each time, so that a failure can be repeated.
        ids = random.Random('ids')
        self.enterContext(mock.patch.object(
            uuidutils, 'generate_uuid',
            lambda: str(uuid.UUID(int=ids.getrandbits(128)))))
        super().setUp()
        asked = self.count_statements('usage_records')
        self.addCleanup(lambda: self.assertEqual(set(), {
            one.split()[0] for one in asked} - {'INSERT', 'SELECT'}))

    def test_records_are_what_was_so_at_each_second(self):
        for number in range(STORIES):
            with self.subTest(number):
                self.tell(random.Random(number))

    def test_so_are_they_if_the_clock_is_set_back(self):
        for number in range(STORIES):
            with self.subTest(number):
                self.tell(random.Random(number), backwards=0.1)

    def tell(self, dice, backwards=0.0):
        observer, begin = Observer(self.database), self.clock.now()
        leases = []
        for _step in range(self.LENGTH):
            self.act(dice, leases)
            now = self.clock.now()
            # Sometimes the clock is set forward: events are late.
            self.clock.advance(dice.choice([2000] + 29 * [
                dice.randint(0, 40)]))
            observer.watch(now, self.clock.now())
            if dice.random() < backwards:
                self.clock.step(-dice.randint(1, 200))
        now = self.clock.now()
        # However often the clock was set back, all of it is past now.
        observer.watch(now, self.clock.advance(10_000))
        end = self.clock.now()
        cuts = sorted({begin, end, *(dice.randint(begin, end)
                                     for _cut in range(4))})
        for wanted in ({}, {'project_id': 'project'}, {'project_id': 'new'},
                       *({'lease_ids': [one['id']]} for one in leases)):
            sums = collections.Counter()
            for since, until in [*zip(cuts, cuts[1:]), (begin, end)]:
                found = self.vcpus(since - NOW, until - NOW, **wanted)[1:]
                if (since, until) != (begin, end):
                    sums.update(dict(zip(('reserved', 'used'), found)))
                self.assertEqual(tuple(
                    observer.total(kind, since, until, **wanted)
                    for kind in ('reserved', 'used')), found, wanted)
            self.assertEqual(found, (sums['reserved'], sums['used']))
        # The next story begins without leases.
        self.cloud.servers.clear()
        for lease in leases:
            self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual([], self.totals(end - NOW, end - NOW + DAY))

    def act(self, dice, leases):
        acts = [self.create, self.create, self.extend, self.resize, self.end,
                self.boot, self.boot, self.move, self.delete_server,
                self.hand_over, self.hand_over, self.start, self.fail,
                self.resize, self.extend]
        act = dice.choice(acts)
        dies = dice.random() < 0.2
        write = usage_records.Records.write

        def die(records, connection):
            write(records, connection)
            raise Broken

        if dies:
            usage_records.Records.write = die
        try:
            act(dice, leases)
        except (Broken, errors.BlazarError):
            pass
        finally:
            usage_records.Records.write = write

    def create(self, dice, leases):
        now = self.clock.now() - NOW
        start = now + dice.choice([0, 0, dice.randint(1, 100)])
        end = start + dice.randint(50, 900)
        if dice.random() < 0.6:
            leases.append(self.reserve(start, end, self.places(
                dice.randint(1, 4), dice.randint(1, 3)), request=self.request(
                    start, end, starts_now=start == now,
                    grace_period=dice.choice([0, 20]))))
        else:
            new = self.new_lease(start, end, count=dice.randint(1, 3))
            leases.append(self.leases.creation.create(
                new, self.encryption.encrypt('call')))
        self.start(dice, leases[-1:])

    def chosen(self, dice, leases, booted=None):
        """Return a lease that has not ended.

        :param booted: whether it was created by a boot; None: either
        """
        going_on = {*self.scalars(models.Lease.id, models.Lease.status.not_in(
            states.LEASE.final()))}
        found = [one for one in leases if one['id'] in going_on and
                 booted in (None, bool(base.servers_of(one)))]
        if not found:
            raise Broken
        return dice.choice(found)

    def start(self, dice, leases):
        self.lifecycle.lease_start.start(self.chosen(dice, leases)['id'])

    def extend(self, dice, leases):
        self.change(self.chosen(dice, leases), end=self.clock.now() +
                    dice.randint(-10, 600))

    def resize(self, dice, leases):
        lease = self.chosen(dice, leases, booted=False)
        self.change(lease, reservations={
            lease['reservations'][0]['id']: self.places(dice.randint(1, 5))})

    def end(self, dice, leases):
        self.lifecycle.lease_end.delete(self.chosen(dice, leases)['id'])

    def boot(self, dice, leases):
        lease = self.chosen(dice, leases)
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
        if name is not None:
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                base.State.RUNNING, self.uuid_of(name))
            self.lifecycle.reconciliation.check(server_id)

    def move(self, dice, leases):
        servers = sorted(self.cloud.servers)
        if servers:
            self.see(dice.choice(servers), dice.choice(
                ['one', 'two', 'three']))

    def delete_server(self, dice, leases):
        servers = sorted(self.cloud.servers)
        if servers:
            server_id = dice.choice(servers)
            del self.cloud.servers[server_id]
            self.lifecycle.reconciliation.check(server_id)

    def fail(self, dice, leases):
        lease = self.chosen(dice, leases, booted=True)
        server_id = dice.choice(base.servers_of(lease))
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            base.State.ERROR, fault='It is broken.')
        self.lifecycle.reconciliation.check(server_id)

    def hand_over(self, dice, leases):
        lease = self.chosen(dice, leases, booted=False)
        seen = self.leases.transfer.look(lease['id']).generation
        self.leases.transfer.transfer(
            lease['id'], seen, transfer.Owner(dice.choice(
                ['project', 'new']), 'user'), None, False)
