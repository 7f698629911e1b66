#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

import collections
import dataclasses

import fixtures
import hypothesis
from hypothesis import strategies as st
from oslo_utils import uuidutils
import sqlalchemy as sa
import testscenarios

from blazar_core import books
from blazar_core import errors
from blazar_core import leases
from blazar_core import lifecycle
from blazar_core import model
from blazar_core.db import api
from blazar_core.db import models
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import oracle

load_tests = testscenarios.load_tests_apply_scenarios

NOW = base.NOW
#: Seconds that an overdue server is counted in the property tests, where all
#: times are small.
OVERDUE = 3
CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'CUSTOM_GPU')

amounts = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 3))
#: What a server needs or has booked: some VCPUs, most often.
needs = st.one_of(
    st.builds(lambda vcpus: {'VCPU': vcpus}, st.integers(1, 3)),
    st.builds(lambda vcpus, memory: {'VCPU': vcpus, 'MEMORY_MB': memory},
              st.integers(1, 3), st.integers(1, 4)), amounts)
#: What a host has; those without anything are gone.
capacities = st.one_of(
    st.builds(lambda vcpus, memory, more: {
        'VCPU': vcpus, 'MEMORY_MB': memory, **more},
        st.integers(3, 6), st.integers(3, 9),
        st.dictionaries(st.sampled_from(CLASSES[2:]), st.integers(1, 6))),
    st.just({}))


@dataclasses.dataclass
class Row:
    """A booking as it stands in the table."""

    host: int | None
    start: int
    end: int
    resources: dict
    running: bool
    reservation: str
    server_id: str = ''

    def counts(self, now):
        """As the oracle should see it: an overdue server is still there."""
        end = self.end
        if self.running and end <= now:
            end = now + OVERDUE
        return oracle.Booking(self.host, self.start, end, self.resources)


@dataclasses.dataclass
class World:
    """A few hosts and bookings at some time."""

    now: int
    hosts: list
    rows: list

    def bookings(self):
        return [row.counts(self.now) for row in self.rows]


@st.composite
def worlds(draw):
    hosts = draw(st.lists(st.builds(
        oracle.Host, capacities, st.one_of(
            st.just({}), st.just({}), amounts)),
        min_size=1, max_size=3))
    number = st.integers(0, len(hosts) - 1)
    rows = draw(st.lists(st.builds(
        lambda host, start, length, resources, running, reservation: Row(
            host, start, start + length, resources, running, reservation),
        st.one_of(number, number, number, st.none()), st.integers(0, 12),
        st.integers(3, 10), needs, st.booleans(),
        st.sampled_from(['reservation', 'other'])),
        min_size=5, max_size=10))
    for index, row in enumerate(rows):
        row.server_id = f'server-{index}'
    return World(draw(st.integers(0, 12)), hosts, rows)


def numbers(world):
    return st.sets(st.integers(0, len(world.hosts) - 1))


@st.composite
def questions(draw):
    """A world, a demand in it in both languages, and a window."""
    world = draw(worlds())
    start = draw(st.integers(0, 14))
    only = draw(st.one_of(st.none(), st.none(), numbers(world)))
    avoid = draw(st.one_of(st.just(set()), st.just(set()), numbers(world)))
    affinity = draw(st.sampled_from(model.Affinity))
    count, per_host = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    resources = draw(needs)
    demand = model.Demand(
        resources, count, affinity, per_host,
        None if only is None else frozenset(map(uuid_of, only)),
        frozenset(map(uuid_of, avoid)))
    allowed = set(range(len(world.hosts))) - avoid
    if only is not None:
        allowed &= only
    return (world, demand, model.Window(start, start + draw(
        st.integers(1, 6))), oracle.Demand(
            resources, count, affinity.value, per_host, allowed))


def uuid_of(number):
    return f'host-{number}'


class _Undo(Exception):
    """Ends a transaction that must leave nothing."""


class BooksTestCase(base.DatabaseTestCase):
    """Rows as they come to mind, without the detour of a lease."""

    examples = {'sqlite': 300, 'mariadb': 50, 'postgresql': 50}

    def setUp(self):
        super().setUp()
        with self.database.writer() as session:
            session.add(models.Lease(
                id='lease', name='', project_id='', user_id='', start_date=0,
                end_date=1, on_end='', status='ACTIVE', created_at=0,
                updated_at=0))
            session.flush()
            session.add_all(models.Reservation(
                id=name, lease_id='lease', resource_type='', amount=1,
                resources={}, status='active', created_at=0, updated_at=0)
                for name in ('reservation', 'other'))

    def for_all(self, check, *drawn):
        """Check many examples, the same ones in every run."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.books.OVERDUE', OVERDUE))
        hypothesis.settings(
            derandomize=True, deadline=None, database=None,
            max_examples=self.examples[self.kind])(
                hypothesis.given(*drawn)(check))()

    def in_world(self, world, work):
        """What ``work`` answers with a world in the tables."""
        answer = None
        try:
            with self.database.writer() as session:
                fill(session, world)
                answer = work(session)
                raise _Undo
        except _Undo:
            return answer

    def book(self, host, start, end, reservation='reservation',
             running=False, **resources):
        """Write a booking down; returns its server."""
        server_id = uuidutils.generate_uuid()
        with self.database.writer() as session:
            host_id = session.scalar(sa.select(models.Host.id).where(
                models.Host.name == host))
            session.add(models.Booking(
                reservation_id=reservation, host_id=host_id,
                server_id=server_id, start_date=NOW + start,
                end_date=NOW + end, resources=resources, running=running))
        return server_id

    def choose(self, start, end, count=1, last=(), **wanted):
        """The names of the chosen hosts."""
        demand = model.Demand(
            wanted.pop('resources', {'VCPU': 1}), count, **wanted)
        with self.database.reader() as session:
            return [host.name for host in books.choose(
                session, demand, model.Window(NOW + start, NOW + end), NOW,
                last)]

    def refusal(self, *args, **kwargs):
        return self.assertRaises(
            errors.Refused, self.choose, *args, **kwargs).refusal


def fill(session, world):
    """Write a world into the tables."""
    session.execute(sa.insert(models.Host), [
        {'id': 1000 + number, 'uuid': uuid_of(number),
         'name': uuid_of(number), 'service_host': '', 'generation': 0,
         'capacity': dict(host.capacity), 'usage': dict(host.usage),
         'updated_at': 0} for number, host in enumerate(world.hosts)])
    session.execute(sa.insert(models.Booking), [
        {'reservation_id': row.reservation, 'server_id': row.server_id,
         'host_id': None if row.host is None else 1000 + row.host,
         'start_date': row.start, 'end_date': row.end,
         'resources': row.resources, 'running': row.running}
        for row in world.rows])


class TestChooseAgainstBruteForce(BooksTestCase):

    def test_a_lease_is_admitted_or_refused_as_trying_everything_says(self):
        answers = collections.Counter()

        def check(question):
            world, demand, window, asked = question
            try:
                picked = self.in_world(
                    world, lambda session: books.choose(
                        session, demand, window, world.now))
            except errors.Refused as exc:
                answers[exc.refusal.reason] += 1
                self.check_refusal(question, exc.refusal)
            else:
                answers['admitted'] += 1
                self.assertEqual(demand.count, len(picked))
                self.assertTrue(oracle.fits(
                    [host.id - 1000 for host in picked], world.hosts,
                    world.bookings(), asked, window.start, window.end))

        self.for_all(check, questions())
        # No answer is a rarity that the examples hardly reach.
        for answer in ('admitted', *model.Reason):
            self.assertGreaterEqual(
                answers[answer], self.examples[self.kind] // 50, answers)

    def check_refusal(self, question, refusal):
        world, demand, window, asked = question
        bookings = world.bookings()
        fits = oracle.most(
            world.hosts, bookings, asked, window.start, window.end)
        self.assertLess(fits, demand.count)
        next_start = oracle.earliest(
            world.hosts, bookings, asked, window.start, window.end)
        reason = model.Reason.NO_ROOM
        if next_start is None:
            reason = (model.Reason.TOO_BIG if asked.allowed else
                      model.Reason.NO_HOST)
        self.assertEqual(
            model.Refusal(reason, demand.count, fits, next_start), refusal)

    def test_what_is_refused_is_admitted_at_the_start_that_is_named(self):
        named = 0

        def check(question):
            nonlocal named
            world, demand, window, _asked = question

            def ask(session):
                nonlocal named
                try:
                    books.choose(session, demand, window, world.now)
                except errors.Refused as exc:
                    if exc.refusal.next_start is not None:
                        named += 1
                        # Raises, if it does not fit there.
                        books.choose(session, demand, window.moved_to(
                            exc.refusal.next_start), world.now)

            self.in_world(world, ask)

        self.for_all(check, questions())
        self.assertGreaterEqual(named, self.examples[self.kind] // 50)


class TestRoomsForAgainstBruteForce(BooksTestCase):

    #: More than any host of the examples can take.
    MANY = 20

    def test_servers_may_go_where_no_promise_is_broken(self):
        rooms = collections.Counter()

        def check(world, resources, own):
            server_id = f'server-{own}'
            booked, judged = self.in_world(
                world, lambda session: books.rooms_for(
                    session, server_id, resources, world.now))
            self.assertEqual(
                self.expected(world, resources, server_id), (booked, {
                    uuid: min(room, self.MANY)
                    for uuid, room in judged.items()}))
            rooms.update(judged.values())

        # Every world has a server-0, and none has a server-9.
        self.for_all(check, worlds(), needs, st.sampled_from([0, 1, 9]))
        for room in (0, 1, 2):
            self.assertGreater(rooms[room], self.examples[self.kind] // 20)

    def expected(self, world, resources, server_id):
        mine = next((row for row in world.rows
                     if row.server_id == server_id), None)
        pairs = list(zip(world.rows, world.bookings(), strict=True))
        end = max(booking.end for _row, booking in pairs) + world.now + 1
        if mine is not None:
            end = max(mine.end, world.now + OVERDUE)
        judged = {}
        for number in range(len(world.hosts)):
            own = [row is mine or mine is not None and not row.running and
                   row.reservation == mine.reservation
                   for row, _booking in pairs]
            others = [booking for (_row, booking), is_own in zip(
                pairs, own, strict=True) if not is_own]
            if any(one.host == number and one.start < end and
                   one.end > world.now for one in others):
                room = next(times for times in range(self.MANY, -1, -1)
                            if not times or oracle.has_room(
                                number, world.hosts, others, resources,
                                times, world.now, end))
                judged[uuid_of(number)] = max(room, sum(
                    row.host == number and booking.end > world.now
                    for (row, booking), is_own in zip(
                        pairs, own, strict=True) if is_own))
        booked = None if mine is None else mine.host
        return None if booked is None else uuid_of(booked), judged


class TestChoose(BooksTestCase):

    def test_windows_that_only_touch_share_a_host(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.book('one', 20, 30, VCPU=1)
        self.assertEqual(['one'], self.choose(10, 20))
        self.refusal(9, 20)
        self.refusal(10, 21)

    def test_a_lease_fits_beside_bookings_that_follow_each_other(self):
        self.host('one', VCPU=2)
        for start in (0, 10, 20):
            self.book('one', start, start + 10, VCPU=1)
        self.assertEqual(['one'], self.choose(0, 30))

    def test_open_ended_usage_is_room_that_never_comes_back(self):
        self.host('one', usage={'VCPU': 3}, VCPU=4)
        self.assertEqual(['one'], self.choose(0, 10))
        refusal = self.refusal(0, 10, 2)
        self.assertEqual(
            model.Refusal(model.Reason.TOO_BIG, 2, 1, None), refusal)

    def test_the_earliest_start_is_when_enough_bookings_have_ended(self):
        self.host('one', VCPU=4)
        self.book('one', 0, 30, VCPU=1)
        self.book('one', 0, 20, VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        refusal = self.refusal(0, 100, 3)
        self.assertEqual(
            model.Refusal(model.Reason.NO_ROOM, 3, 1, NOW + 20), refusal)

    def test_the_earliest_start_passes_over_gaps_that_are_too_short(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.book('one', 19, 30, VCPU=1)
        self.assertEqual(NOW + 30, self.refusal(0, 10).next_start)
        self.assertEqual(NOW + 10, self.refusal(0, 9).next_start)

    def test_servers_fill_the_fullest_hosts_first(self):
        self.host('empty', VCPU=4)
        self.host('half', VCPU=2)
        self.assertEqual(['half', 'half', 'empty'], self.choose(0, 10, 3))

    def test_hosts_of_a_lost_race_are_taken_when_no_others_will_do(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=2)
        with self.database.reader() as session:
            lost = {session.scalar(sa.select(models.Host.id).where(
                models.Host.name == 'one'))}
        self.assertEqual(['one'], self.choose(0, 10))
        self.assertEqual(['two'], self.choose(0, 10, last=lost))
        self.assertEqual(['two', 'two', 'one'],
                         self.choose(0, 10, 3, last=lost))

    def test_servers_that_belong_together_stand_on_one_host(self):
        self.host('small', VCPU=2)
        self.host('large', VCPU=3)
        self.assertEqual(['large'] * 3, self.choose(
            0, 10, 3, affinity=model.Affinity.SAME))
        self.assertEqual(3, self.refusal(
            0, 10, 4, affinity=model.Affinity.SAME).fits_now)

    def test_servers_that_keep_apart_stand_on_different_hosts(self):
        self.host('one', VCPU=9)
        self.host('two', VCPU=9)
        apart = {'affinity': model.Affinity.DIFFERENT}
        self.assertEqual(['one', 'two'], sorted(
            self.choose(0, 10, 2, **apart)))
        self.assertEqual(2, self.refusal(0, 10, 3, **apart).fits_now)
        self.assertEqual(['one', 'one', 'two', 'two'], sorted(
            self.choose(0, 10, 4, per_host=2, **apart)))

    def test_a_host_must_offer_every_class(self):
        self.host('plain', VCPU=4)
        self.host('special', VCPU=4, CUSTOM_GPU=1)
        self.assertEqual(['special'], self.choose(
            0, 10, resources={'VCPU': 1, 'CUSTOM_GPU': 1}))

    def test_disk_from_a_shared_provider_is_left_to_nova(self):
        self.host('one', VCPU=4)
        self.assertEqual(['one'], self.choose(
            0, 10, resources={'VCPU': 1, 'DISK_GB': 999}))

    def test_disk_of_the_host_itself_is_counted(self):
        self.host('one', VCPU=4, DISK_GB=10)
        self.refusal(0, 10, resources={'VCPU': 1, 'DISK_GB': 11})

    def test_without_a_host_that_may_be_used_the_reason_says_so(self):
        uuid = self.host('one', VCPU=4)
        for limits in ({'hosts': frozenset()}, {'avoid': frozenset([uuid])}):
            self.assertEqual(
                model.Refusal(model.Reason.NO_HOST, 1, 0, None),
                self.refusal(0, 10, **limits))

    def test_a_server_that_overstays_keeps_its_room_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertEqual(NOW + 60, self.refusal(0, 10).next_start)
        self.assertEqual(['one'], self.choose(60, 70))

    def test_a_booking_that_is_over_and_runs_nothing_takes_no_room(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual(['one'], self.choose(0, 10))

    def test_a_booking_without_a_host_takes_no_room(self):
        self.host('one', VCPU=1)
        self.book(None, 0, 10, VCPU=1)
        self.assertEqual(['one'], self.choose(0, 10))


class TestTake(BooksTestCase):

    def hosts(self):
        with self.database.reader() as session:
            return [place.host for place in books.shelf(session, NOW, NOW)]

    def take(self, hosts):
        with self.database.writer() as session:
            books.take(session, hosts)

    def test_a_host_that_was_read_and_not_changed_can_be_taken(self):
        self.host('one', VCPU=1)
        self.take(self.hosts())
        self.assertEqual(1, self.generation('one'))

    def test_who_comes_later_loses_and_leaves_nothing(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        both = self.hosts()
        self.take(both[1:])
        lost = self.assertRaises(api.LostRace, self.take, both)
        self.assertEqual(both[1].id, lost.host_id)
        self.assertEqual(0, self.generation('one'))
        self.assertEqual(1, self.generation('two'))

    def test_hosts_that_appear_twice_are_taken_once(self):
        self.host('one', VCPU=1)
        self.take(self.hosts() * 3)
        self.assertEqual(1, self.generation('one'))

    def test_hosts_are_taken_in_the_order_of_their_ids(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=1)
        hosts = self.hosts()
        taken = []
        with self.database.writer() as session:
            execute = session.execute
            session.execute = lambda statement, **kwargs: (
                taken.append(statement.compile().params['id_1']),
                execute(statement, **kwargs))[1]
            books.take(session, reversed(hosts))
        self.assertEqual(sorted(host.id for host in hosts), taken)

    def test_who_was_disturbed_loses(self):
        self.host('one', VCPU=1)
        seen = self.hosts()
        with self.database.writer() as session:
            books.disturb(session, [seen[0].id, None, seen[0].id])
        self.assertEqual(1, self.generation('one'))
        self.assertRaises(api.LostRace, self.take, seen)


class TestRoomsFor(BooksTestCase):

    def rooms(self, server_id='unleased', now=NOW, **resources):
        """The booked host, and the room of the judged ones, by name."""
        with self.database.reader() as session:
            names = dict(session.execute(sa.select(
                models.Host.uuid, models.Host.name)).tuples().all())
            booked, rooms = books.rooms_for(
                session, server_id, resources, now)
        return names.get(booked), {
            names[uuid]: room for uuid, room in rooms.items()}

    def test_hosts_without_bookings_are_left_to_nova(self):
        self.host('full', usage={'VCPU': 9}, VCPU=1)
        self.assertEqual((None, {}), self.rooms(VCPU=1))

    def test_an_open_ended_server_does_not_eat_what_is_promised_later(self):
        self.host('one', VCPU=4)
        self.book('one', 5000, 6000, VCPU=2)
        self.assertEqual((None, {'one': 2}), self.rooms(VCPU=1))
        self.assertEqual((None, {'one': 1}), self.rooms(VCPU=2))
        self.assertEqual((None, {'one': 0}), self.rooms(VCPU=3))

    def test_a_leased_server_may_use_what_is_promised_after_its_end(self):
        self.host('booked', VCPU=1)
        self.host('other', VCPU=1)
        mine = self.book('booked', 0, 1000, VCPU=1)
        self.book('other', 1000, 2000, 'other', VCPU=1)
        self.assertEqual(('booked', {}), self.rooms(mine, VCPU=1))
        self.book('other', 999, 1000, VCPU=1, running=True)
        self.assertEqual(('booked', {'other': 0}), self.rooms(mine, VCPU=1))

    def test_a_leased_server_may_go_to_its_host_whatever_is_there(self):
        self.host('one', usage={'VCPU': 9}, VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('one', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.rooms(mine, VCPU=1))

    def test_a_booking_does_not_stand_in_its_own_way(self):
        self.host('one', VCPU=3)
        mine = self.book('one', 0, 10, VCPU=2)
        self.book('one', 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.rooms(mine, VCPU=2))
        self.assertEqual((None, {'one': 0}), self.rooms(VCPU=2))

    def test_servers_of_a_reservation_may_change_places(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=2)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, VCPU=1)
        for name in ('one', 'two'):
            self.book(name, 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1, 'two': 1}),
                         self.rooms(mine, VCPU=1))

    def test_a_server_of_the_reservation_that_runs_has_its_place(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'two': 0}), self.rooms(mine, VCPU=1))

    def test_a_server_that_lost_its_host_is_judged_until_its_end(self):
        self.host('one', VCPU=1)
        mine = self.book(None, 0, 100, VCPU=1)
        self.book('one', 100, 200, reservation='other', VCPU=1)
        self.assertEqual((None, {}), self.rooms(mine, VCPU=1))
        self.book('one', 50, 60, reservation='other', VCPU=1)
        self.assertEqual((None, {'one': 0}), self.rooms(mine, VCPU=1))

    def test_an_overdue_running_server_is_still_there(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -1, running=True, VCPU=1)
        self.assertEqual((None, {'one': 0}), self.rooms(VCPU=1))

    def test_what_is_over_and_does_not_run_is_forgotten(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual((None, {}), self.rooms(VCPU=1))


class ReportTestCase(BooksTestCase):

    def report(self, uuid='uuid', name='one', service_host='compute',
               capacity=None, now=NOW + 5, **allocations):
        with self.database.writer() as session:
            return books.report(
                session, now, uuid, name, service_host,
                capacity or {'VCPU': 4}, allocations)

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
        self.assertEqual(0, self.row().generation)
        self.assertEqual(NOW + 5, self.row().updated_at)

    def test_what_is_new_is_written_and_disturbs_who_decides(self):
        self.report()
        for changed in ({'name': 'two'}, {'service_host': 'elsewhere'},
                        {'capacity': {'VCPU': 5}}, {'a': {'VCPU': 1}}):
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
        self.assertEqual(1, self.row().generation)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))

    def test_a_booking_whose_server_does_not_run_keeps_its_size(self):
        self.report()
        mine = self.book('one', 0, 10, VCPU=1)
        self.assertFalse(self.report(**{mine: {'VCPU': 3}}))
        self.assertEqual([{'VCPU': 1}],
                         self.scalars(models.Booking.resources))


class TestReportsThatMeet(ReportTestCase):

    scenarios = databases.SERVERS

    def meanwhile(self, interference):
        """Call something between the reading and the writing of a report."""
        total = books._sum

        pending = [interference]

        def late(amounts):
            if pending:
                pending.pop()()
            return total(amounts)

        self.useFixture(fixtures.MonkeyPatch('blazar_core.books._sum', late))

    def elsewhere(self, work, *args):
        """Do something in a transaction of another process's."""
        with self.books.connect().writer() as session:
            work(session, *args)

    def test_a_report_that_loses_the_race_is_made_again(self):
        self.report()
        with self.database.reader() as session:
            ids = [place.host.id for place in books.shelf(session, NOW, NOW)]
        self.meanwhile(lambda: self.elsewhere(books.disturb, ids))
        reports = []
        self.database.retried(lambda: reports.append(None) or self.report(
            capacity={'VCPU': 9}))
        self.assertEqual(2, len(reports))
        self.assertEqual({'VCPU': 9}, self.row().capacity)
        self.assertEqual(2, self.row().generation)

    def test_two_listeners_may_find_a_new_host_at_once(self):
        self.meanwhile(lambda: self.elsewhere(
            books.report, NOW, 'uuid', 'one', 'compute', {'VCPU': 4}, {}))
        self.database.retried(self.report, capacity={'VCPU': 5})
        self.assertEqual([{'VCPU': 5}], self.scalars(models.Host.capacity))


class TestRetain(BooksTestCase):

    def retain(self, *uuids):
        with self.database.writer() as session:
            return books.retain(session, uuids, NOW + 9)

    def test_hosts_that_nova_lost_have_no_capacity_any_more(self):
        kept, _gone = self.host('kept', VCPU=1), self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain(kept))
        self.assertEqual(
            [('gone', {}, NOW + 9, 1), ('kept', {'VCPU': 1}, NOW, 0)],
            sorted((row.name, row.capacity, row.updated_at, row.generation)
                   for row in self.scalars(models.Host)))

    def test_a_host_is_lost_only_once(self):
        self.host('gone', VCPU=1)
        self.assertEqual(['gone'], self.retain())
        self.assertEqual([], self.retain())
        self.assertEqual(1, self.generation('gone'))

    def test_nothing_is_booked_on_a_lost_host(self):
        self.host('gone', VCPU=1)
        self.retain()
        self.assertEqual(0, self.refusal(0, 10).fits_now)


class TestRebinding(base.LeaseTestCase):
    """A booking may change its host until its server runs, and after."""

    def test_room_moves_with_the_booking(self):
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        other = self.host('two', VCPU=1)
        server_id, = base.servers_of(lease)
        self.lifecycle.observe(server_id, lifecycle.Seen(
            base.State.RUNNING, other))
        self.assertEqual('two', self.host_of(server_id))
        self.assertEqual((1 + 1, 1), (
            self.generation('one'), self.generation('two')))
        again = self.lease(0, 100)
        self.assertEqual('one', self.host_of(*base.servers_of(again)))
        self.assertRaises(errors.Refused, self.lease, 0, 100)


class TestRebindingMeanwhile(base.LeaseTestCase):

    scenarios = databases.SERVERS

    def test_who_decided_with_the_old_picture_has_to_look_again(self):
        """The server arrives on the host between the reading and the
        taking."""
        self.host('one', VCPU=1)
        lease = self.running_lease(0, 100)
        other = self.host('two', VCPU=1)
        server_id, = base.servers_of(lease)
        choose, moved = books.choose, []
        elsewhere = lifecycle.Lifecycle(
            self.books.connect(), self.clock, self.cloud, self.vault.open,
            lambda event, lease: None, 0)

        def late(session, *args, **kwargs):
            hosts = choose(session, *args, **kwargs)
            if not moved:
                moved.append(hosts[0].name)
                elsewhere.observe(server_id, lifecycle.Seen(
                    base.State.RUNNING, other))
            return hosts

        self.useFixture(fixtures.MonkeyPatch('blazar_core.books.choose', late))
        newer = leases.Leases(self.books.connect(), self.clock).create(
            self.new_lease(0, 100), None)
        self.assertEqual(['two'], moved)
        self.assertEqual('one', self.host_of(*base.servers_of(newer)))
