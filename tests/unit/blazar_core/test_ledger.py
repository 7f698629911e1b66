# SPDX-License-Identifier: Apache-2.0

import collections
import dataclasses
from unittest import mock

import fixtures
from hypothesis import strategies as st
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import feed
from blazar_core.capacity import host_generations
from blazar_core.capacity import host_memory
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import snapshot
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import oracle
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests

NOW = base.NOW


@st.composite
def decisions(draw):
    """A world, and what is to become of some of its bookings.

    Pairs of the number of one (None: it comes) and what it is to be (None:
    it goes).
    """
    world = draw(worlds.worlds())
    any_row = worlds.rows(len(world.hosts))
    edits = []
    for index in sorted(draw(st.sets(
            st.integers(0, len(world.rows) - 1), max_size=3))):
        old = world.rows[index]
        new = dataclasses.replace(draw(any_row), server_id=old.server_id)
        kept = draw(st.sampled_from([
            (), ('host', 'start', 'resources'), ('start', 'end', 'host'),
            ('start', 'end', 'resources'), ('resources', 'host')]))
        if 'start' in kept and 'end' not in kept:
            new.end = draw(st.integers(old.start + 1, old.start + 14))
        for name in ('running', 'reservation', *kept):
            setattr(new, name, getattr(old, name))
        edits.append((index, draw(st.sampled_from([new, new, new, None]))))
    for number in range(draw(st.integers(0 if edits else 1, 2))):
        edits.append((None, dataclasses.replace(
            draw(any_row), server_id=f'new-{number}')))
    return world, edits


def after(world, edits):
    """The bookings as they would be."""
    gone = {index for index, _new in edits}
    return [row for index, row in enumerate(world.rows)
            if index not in gone] + [
                new for _index, new in edits if new is not None]


class AmendTestCase(worlds.BooksTestCase):

    scenarios = [('sqlite', {'kind': 'sqlite'})]

    def amend(self, session, world, edits, **force):
        rows = {row.server_id: row for row in session.scalars(
            sa.select(models.Booking))}
        ledger.amend(session, world.now, [ledger.Edit(
            None if index is None else rows[f'server-{index}'],
            None if new is None else new.new())
            for index, new in edits], **force)
        session.flush()

    def rows(self, session):
        """The bookings in the table, as they would be said to the books."""
        session.expire_all()
        return {row.server_id: ledger.new_of(row) for row in session.scalars(
            sa.select(models.Booking))}

    def expected(self, rows):
        return {row.server_id: row.new() for row in rows}

    def generations(self, session):
        return dict(session.execute(sa.select(
            models.Host.id, models.Host.generation)).tuples().all())

    def changes(self, session):
        """The sum of what changed, by host, instant and class."""
        total = collections.Counter()
        for row in session.scalars(sa.select(models.Change)):
            self.assertEqual(1, row.generation)
            total.update(levels([(row.host_id - 1000, row.start_date,
                                  row.end_date, row.resources)], row.sign))
        return nonzero(total)


def levels(bookings, sign=1):
    total = collections.Counter()
    for host, start, end, resources in bookings:
        for rc, amount in resources.items():
            for instant in range(start, end):
                if host is not None:
                    total[host, instant, rc] += sign * amount
    return total


def nonzero(total):
    return {key: value for key, value in total.items() if value}


def raw(rows):
    return [(row.host, row.start, row.end, row.resources) for row in rows]


class TestAmendAgainstBruteForce(AmendTestCase):
    """A decision is made exactly when the rule holds wherever more is booked.

    And then all of it is made.
    """

    def test_it_is_made_when_the_rule_holds_where_more_is_booked(self):
        answers = collections.Counter()

        def check(decision):
            world, edits = decision
            allowed = self.is_allowed(world, edits)

            def decide(session):
                try:
                    self.amend(session, world, edits)
                except ledger.OverCapacity as full:
                    answers['refused'] += 1
                    self.assertFalse(allowed)
                    self.assertIn(full.host_id - 1000, {
                        new.host for _index, new in edits if new})
                    self.assertEqual(self.expected(world.rows),
                                     self.rows(session))
                    self.assertEqual({0}, set(
                        self.generations(session).values()))
                else:
                    answers['made'] += 1
                    self.assertTrue(allowed)
                    self.assert_made(session, world, edits)

            self.in_world(world, decide)

        self.for_all(check, decisions(), count=280)
        for answer in ('made', 'refused'):
            self.assertGreater(answers[answer], 100, answers)

    def is_allowed(self, world, edits):
        # What overstays has been promised nothing for that.
        longer = {index for index, new in edits if None not in (index, new)
                  and new.end > world.rows[index].end}
        before = [oracle.Booking(row.host, row.start, row.end, row.resources)
                  if index in longer else row.counts(world.now)
                  for index, row in enumerate(world.rows)]
        return oracle.may_become(world.hosts, before, [
            row.counts(world.now) for row in after(world, edits)])

    def assert_made(self, session, world, edits):
        self.assertEqual(self.expected(after(world, edits)),
                         self.rows(session))
        touched = {row.host for index, new in edits
                   for row in (new, None if index is None else
                               world.rows[index]) if row is not None}
        self.assertEqual(
            {1000 + number: int(number in touched)
             for number in range(len(world.hosts))},
            self.generations(session))
        difference = levels(raw(after(world, edits)))
        difference.subtract(levels(raw(world.rows)))
        self.assertEqual(nonzero(difference), self.changes(session))

    def test_less_is_never_asked_about_even_on_a_host_that_is_too_full(self):
        over = []

        def check(world, index, cut, goes):
            row = world.rows[index]
            end = max(row.start + 1, row.end - cut)
            if row.running and row.end > world.now:
                # Nobody's end is moved into the past.
                end = max(end, world.now + 1)
            less = None if goes else dataclasses.replace(
                row, end=end, resources={
                    rc: amount // 2 for rc, amount in row.resources.items()})
            self.in_world(world, lambda session: (
                self.amend(session, world, [(index, less)]),
                self.assert_made(session, world, [(index, less)])))
            if not oracle.may_become(world.hosts, [], [
                    one for one in world.bookings()
                    if one.host is not None and one.host == row.host]):
                over.append(world)

        self.for_all(check, worlds.worlds(), st.integers(0, 4),
                     st.integers(0, 9), st.booleans(), count=120)
        self.assertGreater(len(over), 20)

    def test_what_is_a_fact_is_never_refused(self):
        refused = []

        def check(decision):
            world, edits = decision
            if not self.is_allowed(world, edits):
                refused.append(decision)
            self.in_world(world, lambda session: (
                self.amend(session, world, edits, force=True),
                self.assert_made(session, world, edits)))

        self.for_all(check, decisions(), count=75)
        self.assertGreater(len(refused), 30)


class TestManyDecisions(AmendTestCase):

    def test_no_row_of_decisions_ever_breaks_the_rule(self):
        answers = collections.Counter()

        def check(data):
            world = data.draw(worlds.worlds())
            world = worlds.World(0, world.hosts, [])
            self.in_world(world, lambda session: [
                self.one(session, world, data.draw) for _time in range(12)])

        self.answers = answers
        self.for_all(check, st.data(), count=50)
        for answer in ('made', 'refused'):
            self.assertGreater(answers[answer], 50, answers)

    def one(self, session, world, draw):
        """Try some edit, and look whether the world is sound."""
        index = draw(st.none() if not world.rows else st.one_of(
            st.none(), st.integers(0, len(world.rows) - 1)))
        new = draw(worlds.rows(len(world.hosts)))
        new.running = False
        new.server_id = f'server-{len(world.rows)}'
        if index is not None:
            new.server_id = world.rows[index].server_id
        try:
            self.amend(session, world, [(index, new)])
        except ledger.OverCapacity:
            self.answers['refused'] += 1
        else:
            self.answers['made'] += 1
            if index is None:
                world.rows.append(new)
            else:
                world.rows[index] = new
        self.assertEqual(self.expected(world.rows), self.rows(session))
        idle = {(number, rc) for number, rc, _instant in oracle.overbooked(
            world.hosts, world.bookings())}
        # Open-ended usage alone may be more than there is: nobody was asked.
        self.assertEqual([], [
            (number, rc) for number, rc in idle
            if any(row.host == number and row.resources.get(rc)
                   for row in world.rows)])


class TestAmend(worlds.BooksTestCase):

    scenarios = databases.SQL

    def new(self, host, start=0, end=10, **resources):
        return ledger.NewBooking(
            'reservation', self.host_id(host), None,
            model.Window(NOW + start, NOW + end), resources or {'VCPU': 1})

    def amend(self, *edits, **force):
        with self.database.writer() as session:
            ledger.amend(session, NOW, [
                ledger.Edit(None if server_id is None else
                            self.row(session, server_id), new)
                for server_id, new in edits], **force)

    def row(self, session, server_id):
        return session.scalars(sa.select(models.Booking).where(
            models.Booking.server_id == server_id)).one()

    def changed(self, server_id, **changed):
        """A booking, and what it is to be."""
        with self.database.reader() as session:
            return server_id, ledger.new_of(
                self.row(session, server_id), **changed)

    def test_a_booking_comes_where_there_is_room(self):
        self.host('one', VCPU=2)
        self.amend((None, self.new('one')), (None, self.new('one')))
        full = self.assertRaises(
            ledger.OverCapacity, self.amend, (None, self.new('one', 9, 20)))
        self.assertEqual(self.host_id('one'), full.host_id)
        self.amend((None, self.new('one', 10, 20)))
        self.assertEqual(3, len(self.scalars(models.Booking)))

    def test_two_bookings_may_change_places(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        first = self.book('one', 0, 10, VCPU=1)
        second = self.book('two', 0, 10, VCPU=1)
        there = self.changed(first, host_id=self.host_id('two'))
        self.assertRaises(ledger.OverCapacity, self.amend, there)
        self.amend(there, self.changed(second, host_id=self.host_id('one')))
        self.assertEqual(('two', 'one'), (
            self.host_of(first), self.host_of(second)))

    def test_it_is_all_or_nothing(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        self.book('two', 0, 10, VCPU=1)
        before = self.count_rows(), self.generation('one')
        self.assertRaises(ledger.OverCapacity, self.amend,
                          (None, self.new('one')), (None, self.new('two')))
        self.assertEqual(before, (self.count_rows(), self.generation('one')))

    def test_a_host_that_has_become_too_small_still_gives_room_back(self):
        uuid = self.host('one', VCPU=2)
        mine = self.book('one', 0, 100, VCPU=2)
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 1})
        self.assertRaises(ledger.OverCapacity, self.amend, self.changed(
            mine, window=model.Window(NOW, NOW + 101)))
        self.amend(self.changed(mine, window=model.Window(NOW, NOW + 50)))
        self.amend(self.changed(mine, resources={'VCPU': 1}))
        self.amend((mine, None))
        self.assertEqual([], self.scalars(models.Booking))

    def test_classes_of_which_no_more_is_booked_are_not_asked_about(self):
        self.host('one', VCPU=1, MEMORY_MB=4)
        mine = self.book('one', 0, 10, VCPU=2, MEMORY_MB=1)
        self.amend(self.changed(mine, resources={'VCPU': 2, 'MEMORY_MB': 4}))
        self.assertRaises(ledger.OverCapacity, self.amend, self.changed(
            mine, resources={'VCPU': 2, 'MEMORY_MB': 5}))

    def test_a_server_that_overstays_is_in_the_way_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertRaises(ledger.OverCapacity, self.amend,
                          (None, self.new('one', 59, 70)))
        self.amend((None, self.new('one', 60, 70)))

    def test_a_class_that_a_host_lacks_has_no_room_but_a_shared_one(self):
        self.host('one', VCPU=1)
        self.assertRaises(ledger.OverCapacity, self.amend, (
            None, self.new('one', VCPU=1, CUSTOM_GPU=1)))
        self.amend((None, self.new('one', VCPU=1, DISK_GB=999)))

    def test_nothing_to_do_is_nothing_done(self):
        self.host('one', VCPU=1)
        nowhere = self.book(None, 0, 10, VCPU=1)
        self.amend()
        self.amend((nowhere, None))
        self.assertEqual(1, self.generation('one'))

    def test_each_decision_moves_a_generation_by_one_and_says_why(self):
        self.host('one', VCPU=2)
        self.amend((None, self.new('one', 0, 10)),
                   (None, self.new('one', 20, 30)))
        self.assertEqual(2, self.generation('one'))
        self.assertEqual(
            [(1, None, None, 0), (2, NOW, NOW + 10, 1),
             (2, NOW + 20, NOW + 30, 1)],
            [(row.generation, row.start_date, row.end_date, row.sign)
             for row in self.scalars(models.Change)])


class TestTheGuard(worlds.BooksTestCase):

    scenarios = databases.EACH

    def hosts(self):
        with self.database.reader() as session:
            return [snapshot.host_of(row, host_memory.InternedRecords())
                    for row in session.scalars(
                        sa.select(models.Host).order_by(models.Host.id))]

    def take(self, hosts):
        with self.database.writer() as session:
            host_generations.advance(session.connection(), NOW, hosts, {})

    def test_a_host_that_was_read_and_not_changed_can_be_taken(self):
        self.host('one', VCPU=1)
        self.take(self.hosts())
        self.assertEqual(2, self.generation('one'))

    def test_who_comes_later_loses_and_leaves_nothing(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        both = self.hosts()
        self.take(both[1:])
        before = self.count_rows()
        lost = self.assertRaises(api.LostRace, self.take, both)
        self.assertEqual(both[1].id, lost.host_id)
        self.assertEqual(1, self.generation('one'))
        self.assertEqual(2, self.generation('two'))
        self.assertEqual(before, self.count_rows())

    def test_hosts_are_taken_in_the_order_of_their_ids(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        taken = []

        def watched(session, now, hosts, changes):
            taken.extend(host.id for host in hosts)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.advance', watched))
        edits = [ledger.Edit(None, ledger.NewBooking(
            'reservation', self.host_id(name), None,
            model.Window(NOW, NOW + 1), {'VCPU': 1}))
            for name in ('three', 'one', 'two', 'one')]
        with self.database.begin() as connection:
            ledger.decide(connection, NOW, edits)
        self.assertEqual([self.host_id(name) for name in (
            'one', 'two', 'three')], taken)


class TestMany(worlds.BooksTestCase):
    """However many hosts are decided about, it takes as many statements."""

    def statements(self, count):
        edits = [ledger.Edit(None, ledger.NewBooking(
            'reservation', host_id, None, model.Window(NOW, NOW + 10),
            {'VCPU': 1})) for host_id in self.ids[:count]]
        noted = []

        def note(_connection, _cursor, statement, *_rest):
            noted.append(statement)

        engine = self.database.engine
        sa.event.listen(engine, 'before_cursor_execute', note)
        try:
            with self.database.begin() as connection:
                ledger.add(connection, NOW, ledger.decide(
                    connection, NOW, edits), {})
        finally:
            sa.event.remove(engine, 'before_cursor_execute', note)
        return len(noted)

    def test_who_comes_later_loses_all_of_them(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.MANY', 1))
        for number in range(3):
            self.host(str(number), VCPU=4)
        hosts = sorted(self.scalars(models.Host), key=lambda one: one.id)
        with self.database.begin() as connection:
            host_generations.advance(connection, NOW, hosts[1:2], {})
        before = self.count_rows()

        def take():
            with self.database.begin() as connection:
                host_generations.advance(connection, NOW, hosts, {})

        self.assertRaises(api.LostRace, take)
        self.assertEqual(before, self.count_rows())
        self.assertEqual([1, 2, 1], [
            self.generation(host.name) for host in hosts])

    def test_it(self):
        for number in range(3 * host_generations.MANY):
            self.host(str(number), VCPU=4)
        self.ids = sorted(self.scalars(models.Host.id))
        self.assertEqual(self.statements(host_generations.MANY + 1),
                         self.statements(3 * host_generations.MANY))
        self.assertLess(self.statements(3 * host_generations.MANY), 10)
        self.assertEqual([4] * (host_generations.MANY + 1) + [3] * (
            2 * host_generations.MANY - 1), [
                host.generation for host in sorted(
                    self.scalars(models.Host), key=lambda host: host.id)])


class TestDecisionsThatMeet(worlds.BooksTestCase):

    scenarios = databases.SERVERS
    options = {'admission_retries': 2}

    def test_what_was_decided_after_the_reading_is_never_overlooked(self):
        self.host('one', VCPU=1)
        host_id = self.host_id('one')
        edit = ledger.Edit(None, ledger.NewBooking(
            'reservation', host_id, None, model.Window(NOW, NOW + 10),
            {'VCPU': 1}))
        check, other = ledger._check, self.books.connect()
        runs = []

        def late(*args):
            runs.append(None)
            check(*args)
            if len(runs) == 1:
                with other.writer() as session:
                    ledger.amend(session, NOW, [edit])

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger._check', late))

        def work():
            with self.database.writer() as session:
                ledger.amend(session, NOW, [edit])

        # He loses, looks again, and finds it full ever after.
        self.assertRaises(errors.ConcurrentUpdate, self.database.retried, work)
        self.assertEqual(3, len(runs) - 1)
        self.assertEqual(1, len(self.scalars(models.Booking)))

    def test_of_many_hosts_nobody_else_decides_from_the_reading_on(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.MANY', 2))
        names = ['one', 'two', 'three']
        for name in names:
            self.host(name, VCPU=2)
        check, other = ledger._check, self.books.connect()
        begun, threads = [], []

        def book(database, *names):
            with database.writer() as session:
                ledger.amend(session, NOW, [ledger.Edit(
                    None, ledger.NewBooking(
                        'reservation', self.host_id(name), None,
                        model.Window(NOW, NOW + 10), {'VCPU': 1}))
                    for name in names])

        def watched(*args):
            check(*args)
            if not begun:
                begun.append(None)
                threads.append(self.books.meanwhile(
                    lambda: other.retried(book, other, 'two')))

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger._check', watched))
        book(self.database, *names)
        threads[0].join(20)
        self.assertEqual(4, len(self.scalars(models.Booking)))
        self.assertEqual(3, self.scalars(
            models.Host.generation, models.Host.name == 'two')[0])

    def test_many_hosts_are_locked_before_what_is_booked_is_read(self):
        """What is read after the lock is of after it."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.MANY', 1))
        for name in 'one', 'two':
            self.host(name, VCPU=2)
        other, threads = self.books.connect(), []
        edits = [ledger.Edit(None, ledger.NewBooking(
            'reservation', self.host_id(name), None,
            model.Window(NOW, NOW + 10), {'VCPU': 1}))
            for name in ('one', 'two')]

        def book():
            with other.writer() as session:
                ledger.amend(session, NOW, edits[:1])

        def note(_connection, _cursor, statement, *_rest):
            if 'bookings' in statement and 'FOR UPDATE' in statement and (
                    not threads):
                threads.append(None)
                threads.append(self.books.meanwhile(
                    lambda: other.retried(book)))

        engine = self.database.engine
        sa.event.listen(engine, 'before_cursor_execute', note)
        try:
            with self.database.begin() as connection:
                # From here on PostgreSQL shows one state.
                connection.scalar(sa.select(models.Lease.id).limit(1))
                ledger.add(connection, NOW, ledger.decide(
                    connection, NOW, edits), {})
        finally:
            sa.event.remove(engine, 'before_cursor_execute', note)
        threads[1].join(20)
        self.assertEqual(3, len(self.scalars(models.Booking)))


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
        # Two have asked; a left, and who asked after that is the first.
        self.assertTrue(self.report_usage(b={'VCPU': 2}))
        for report, host in ((inventory.report_usage, 'uuid'), (
                inventory.report, model.HostFacts(
                    'uuid', 'one', 'compute', {'VCPU': 4}))):
            with self.database.writer() as session:
                self.assertRaises(
                    api.LostRace, report, session, NOW + 9, host,
                    {'a': {'VCPU': 1}, 'b': {'VCPU': 2}}, seen)
        self.assertEqual({'VCPU': 2}, self.row().usage)
        # What is as it was seen needs no other question.
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
        # As it was before both.
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
        """Call something between the reading and the writing of a report."""
        total = inventory.usage_of

        pending = [interference]

        def late(consumers):
            if pending:
                pending.pop()()
            return total(consumers)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.inventory.usage_of', late))

    def elsewhere(self, work, *args):
        """Do something in a transaction of another process's."""
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


class TestRebinding(base.LeaseTestCase):
    """A booking may change its host until its server runs, and after."""

    scenarios = databases.SQL

    def test_room_moves_with_the_booking(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        other = self.host('two', VCPU=1)
        server_id, = base.servers_of(lease)
        self.lifecycle.reconciliation.observe(
            server_id, cloud_api.ObservedServer(base.State.RUNNING, other))
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual((3, 2), (
            self.generation('one'), self.generation('two')))
        again = self.lease(0, 100)
        self.assertEqual('one', self.host_of(*base.servers_of(again)))
        self.assertRaises(errors.Refused, self.lease, 0, 100)


class TestRebindingMeanwhile(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def test_who_decided_with_the_old_picture_has_to_look_again(self):
        """The server arrives between the reading and the taking."""
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        other = self.host('two', VCPU=1)
        server_id, = base.servers_of(lease)
        amend, moved = ledger.decide, []
        elsewhere = self.new_handlers(self.books.connect())

        def late(session, now, edits, *args):
            if not moved:
                moved.extend(edits)
                elsewhere.reconciliation.observe(
                    server_id, cloud_api.ObservedServer(
                        base.State.RUNNING, other))
            return amend(session, now, edits, *args)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger.decide', late))
        database = self.books.connect()
        newer = leases.Leases(
            database, self.clock, admissions.Admission(database, self.clock),
            self.types).creation.create(self.new_lease(0, 100), None)
        self.assertEqual(self.scalars(
            models.Host.id, models.Host.name == 'two'), [
            edit.new.host_id for edit in moved])
        self.assertEqual('one', self.host_of(*base.servers_of(newer)))
