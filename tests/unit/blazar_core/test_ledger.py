# SPDX-License-Identifier: Apache-2.0

import collections
import dataclasses

import fixtures
from hypothesis import strategies as st
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import host_generations
from blazar_core.capacity import host_memory
from blazar_core.capacity import index_rows
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import leases
from blazar_core.plugins import cloud_api
from tests import databases
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import oracle
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests
NOW = base.NOW


@st.composite
def decisions(draw):
    """Draw a world, and edits of some of its bookings.

    An edit is the number of a booking (None: a new one) and its new state
    (None: it is deleted).
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
    """Return the bookings after the edits."""
    gone = {index for index, _new in edits}
    return [row for index, row in enumerate(world.rows)
            if index not in gone] + [
                new for _index, new in edits if new is not None]


class AmendTestCase(worlds.WorldTestCase):

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
        """Return the bookings of the table as the ledger takes them."""
        session.expire_all()
        return {row.server_id: ledger.new_of(row) for row in session.scalars(
            sa.select(models.Booking))}

    def expected(self, rows):
        return {row.server_id: row.new() for row in rows}

    def generations(self, session):
        return dict(session.execute(sa.select(
            models.Host.id, models.Host.generation)).tuples().all())

    def changes(self, session):
        """Return the sum of all changes, by host, instant and class."""
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
    """A decision is made exactly if the rule holds wherever bookings grow.

    And then it is made completely.
    """

    def test_decision_is_made_exactly_if_rule_holds(self):
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
            self.assertGreater(answers[answer], examples.many(80), answers)

    def is_allowed(self, world, edits):
        # An extension cannot rely on the time that a server is overdue.
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

    def test_reduction_is_always_allowed_even_on_overbooked_host(self):
        over = []

        def check(world, index, cut, goes):
            row = world.rows[index]
            end = max(row.start + 1, row.end - cut)
            if row.running and row.end > world.now:
                # No end is moved into the past.
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
        self.assertGreater(len(over), examples.many(20))

    def test_forced_decision_is_never_refused(self):
        refused = []

        def check(decision):
            world, edits = decision
            if not self.is_allowed(world, edits):
                refused.append(decision)
            self.in_world(world, lambda session: (
                self.amend(session, world, edits, force=True),
                self.assert_made(session, world, edits)))

        self.for_all(check, decisions(), count=75)
        self.assertGreater(len(refused), examples.many(30))


class TestManyDecisions(AmendTestCase):

    def test_no_sequence_of_decisions_breaks_the_rule(self):
        answers = collections.Counter()

        def check(data):
            world = data.draw(worlds.worlds())
            world = worlds.World(0, world.hosts, [])
            self.in_world(world, lambda session: [
                self.one(session, world, data.draw) for _time in range(12)])

        self.answers = answers
        self.for_all(check, st.data(), count=50)
        for answer in ('made', 'refused'):
            self.assertGreater(answers[answer], examples.many(50), answers)

    def one(self, session, world, draw):
        """Try an edit, and check that the world is sound."""
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
        # Only open-ended usage may exceed the capacity: no rule limits it.
        self.assertEqual([], [
            (number, rc) for number, rc in idle
            if any(row.host == number and row.resources.get(rc)
                   for row in world.rows)])


class TestAmend(worlds.WorldTestCase):

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
        """Return a booking and its new state."""
        with self.database.reader() as session:
            return server_id, ledger.new_of(
                self.row(session, server_id), **changed)

    def test_booking_is_added_only_if_capacity_is_free(self):
        self.host('one', VCPU=2)
        self.amend((None, self.new('one')), (None, self.new('one')))
        full = self.assertRaises(
            ledger.OverCapacity, self.amend, (None, self.new('one', 9, 20)))
        self.assertEqual(self.host_id('one'), full.host_id)
        self.amend((None, self.new('one', 10, 20)))
        self.assertEqual(3, len(self.scalars(models.Booking)))

    def test_two_bookings_may_swap_hosts(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        first = self.book('one', 0, 10, VCPU=1)
        second = self.book('two', 0, 10, VCPU=1)
        there = self.changed(first, host_id=self.host_id('two'))
        self.assertRaises(ledger.OverCapacity, self.amend, there)
        self.amend(there, self.changed(second, host_id=self.host_id('one')))
        self.assertEqual(('two', 'one'), (
            self.host_of(first), self.host_of(second)))

    def test_amend_is_all_or_nothing(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        self.book('two', 0, 10, VCPU=1)
        before = self.count_rows(), self.generation('one')
        self.assertRaises(ledger.OverCapacity, self.amend,
                          (None, self.new('one')), (None, self.new('two')))
        self.assertEqual(before, (self.count_rows(), self.generation('one')))

    def test_bookings_on_overbooked_host_can_be_reduced(self):
        uuid = self.host('one', VCPU=2)
        mine = self.book('one', 0, 100, VCPU=2)
        self.report(uuid, 'one', {'VCPU': 1}, {'VCPU': 1})
        self.assertRaises(ledger.OverCapacity, self.amend, self.changed(
            mine, window=model.Window(NOW, NOW + 101)))
        self.amend(self.changed(mine, window=model.Window(NOW, NOW + 50)))
        self.amend(self.changed(mine, resources={'VCPU': 1}))
        self.amend((mine, None))
        self.assertEqual([], self.scalars(models.Booking))

    def test_only_increased_resource_classes_are_checked(self):
        self.host('one', VCPU=1, MEMORY_MB=4)
        mine = self.book('one', 0, 10, VCPU=2, MEMORY_MB=1)
        self.amend(self.changed(mine, resources={'VCPU': 2, 'MEMORY_MB': 4}))
        self.assertRaises(ledger.OverCapacity, self.amend, self.changed(
            mine, resources={'VCPU': 2, 'MEMORY_MB': 5}))

    def test_overstaying_server_keeps_its_capacity_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertRaises(ledger.OverCapacity, self.amend,
                          (None, self.new('one', 59, 70)))
        self.amend((None, self.new('one', 60, 70)))

    def test_missing_resource_class_has_no_capacity_unless_shared(self):
        self.host('one', VCPU=1)
        self.assertRaises(ledger.OverCapacity, self.amend, (
            None, self.new('one', VCPU=1, CUSTOM_GPU=1)))
        self.amend((None, self.new('one', VCPU=1, DISK_GB=999)))

    def test_empty_amend_changes_nothing(self):
        self.host('one', VCPU=1)
        nowhere = self.book(None, 0, 10, VCPU=1)
        self.amend()
        self.amend((nowhere, None))
        self.assertEqual(1, self.generation('one'))

    def test_decision_advances_generation_and_records_changes(self):
        self.host('one', VCPU=2)
        self.amend((None, self.new('one', 0, 10)),
                   (None, self.new('one', 20, 30)))
        self.assertEqual(2, self.generation('one'))
        self.assertEqual(
            [(1, None, None, 0), (2, NOW, NOW + 10, 1),
             (2, NOW + 20, NOW + 30, 1)],
            [(row.generation, row.start_date, row.end_date, row.sign)
             for row in self.scalars(models.Change)])


class TestHostGenerations(worlds.WorldTestCase):

    scenarios = databases.EACH

    def hosts(self):
        with self.database.reader() as session:
            return [index_rows.host_of(row, host_memory.InternedRecords())
                    for row in session.scalars(
                        sa.select(models.Host).order_by(models.Host.id))]

    def take(self, hosts):
        with self.database.writer() as session:
            host_generations.advance(session.connection(), NOW, hosts, {})

    def test_unchanged_host_can_be_advanced(self):
        self.host('one', VCPU=1)
        self.take(self.hosts())
        self.assertEqual(2, self.generation('one'))

    def test_later_decision_loses_race_and_changes_nothing(self):
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

    def test_hosts_are_advanced_in_order_of_id(self):
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


class TestManyHosts(worlds.WorldTestCase):
    """The number of statements does not depend on the number of hosts."""

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

    def test_later_decision_loses_race_for_all_hosts(self):
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

    def test_number_of_statements_does_not_depend_on_hosts(self):
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


class TestConcurrentDecisions(worlds.WorldTestCase):

    scenarios = databases.SERVERS
    options = {'admission_retries': 2}

    def test_decision_made_after_reading_is_not_overlooked(self):
        self.host('one', VCPU=1)
        host_id = self.host_id('one')
        edit = ledger.Edit(None, ledger.NewBooking(
            'reservation', host_id, None, model.Window(NOW, NOW + 10),
            {'VCPU': 1}))
        check, other = ledger._check, self.db.connect()
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

        # The decision is lost, tried again, and refused from then on.
        self.assertRaises(errors.ConcurrentUpdate, self.database.retried, work)
        self.assertEqual(3, len(runs) - 1)
        self.assertEqual(1, len(self.scalars(models.Booking)))

    def test_many_hosts_are_locked_while_deciding(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.MANY', 2))
        names = ['one', 'two', 'three']
        for name in names:
            self.host(name, VCPU=2)
        check, other = ledger._check, self.db.connect()
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
                threads.append(self.db.meanwhile(
                    lambda: other.retried(book, other, 'two')))

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger._check', watched))
        book(self.database, *names)
        threads[0].join(20)
        self.assertEqual(4, len(self.scalars(models.Booking)))
        self.assertEqual(3, self.scalars(
            models.Host.generation, models.Host.name == 'two')[0])

    def test_many_hosts_are_locked_before_bookings_are_read(self):
        """Rows read after the lock are at least as new as the lock."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.host_generations.MANY', 1))
        for name in 'one', 'two':
            self.host(name, VCPU=2)
        other, threads = self.db.connect(), []
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
                threads.append(self.db.meanwhile(
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


class TestReassignment(base.LeaseTestCase):
    """A booking may change its host before its server runs, and after."""

    scenarios = databases.SQL

    def test_capacity_moves_with_booking(self):
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


class TestConcurrentReassignment(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def test_decision_on_outdated_host_is_repeated(self):
        """The server arrives between the read and the write."""
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        other = self.host('two', VCPU=1)
        server_id, = base.servers_of(lease)
        amend, moved = ledger.decide, []
        elsewhere = self.new_handlers(self.db.connect())

        def late(session, now, edits, *args):
            if not moved:
                moved.extend(edits)
                elsewhere.reconciliation.observe(
                    server_id, cloud_api.ObservedServer(
                        base.State.RUNNING, other))
            return amend(session, now, edits, *args)

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.ledger.decide', late))
        database = self.db.connect()
        newer = leases.Leases(
            database, self.clock, admissions.Admission(database, self.clock),
            self.types).creation.create(self.new_lease(0, 100), None)
        self.assertEqual(self.scalars(
            models.Host.id, models.Host.name == 'two'), [
            edit.new.host_id for edit in moved])
        self.assertEqual('one', self.host_of(*base.servers_of(newer)))
