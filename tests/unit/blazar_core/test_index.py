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

"""The books in memory follow the database, whoever writes and in what order.
"""

import random
import typing as ty

import sqlalchemy as sa
import testscenarios

from blazar_core import books
from blazar_core.db import models
from blazar_core import index
from blazar_core import model

from tests import databases
from tests.unit import base

load_tests = testscenarios.load_tests_apply_scenarios

NOW = base.NOW
RESOURCES = [{'VCPU': 1}, {'VCPU': 2, 'MEMORY_MB': 512}, {'GPU': 1}]
#: What a server without a lease takes.
PLAIN = {'VCPU': 3, 'MEMORY_MB': 0, 'GPU': 0}


class IndexTestCase(base.LeaseTestCase):
    """Books with hosts, a reservation to hang bookings on, an index."""

    def setUp(self) -> None:
        super().setUp()
        for name in ('h1', 'h2', 'h3'):
            self.host(name, VCPU=64, MEMORY_MB=65536, GPU=64)
        self.host_ids = self.scalars(models.Host.id)
        lease = self.lease(0, 10)
        self.reservation_id = lease['reservations'][0]['id']
        self.index = index.Index(self.database, self.clock)

    def new(self, host_id: int, start: int, end: int,
            resources: model.Resources | None = None) -> books.Edit:
        return books.Edit(None, books.NewBooking(
            self.reservation_id, host_id, None,
            model.Window(NOW + start, NOW + end), resources or {'VCPU': 1}))

    def amend(self, *edits: books.Edit) -> None:
        with self.database.writer() as session:
            books.amend(session, self.clock.now(), edits)

    def bookings(self, session: ty.Any) -> list[models.Booking]:
        return list(session.scalars(sa.select(models.Booking).where(
            models.Booking.server_id.is_(None)).order_by(models.Booking.id)))

    def picture(self, followed: index.Index) -> ty.Any:
        """All that an index says, from now on."""
        with followed.fresh() as timeline:
            pictures = {}
            for host_id in sorted(timeline.ids):
                peaks = [timeline.peak(host_id, model.Window(
                    NOW + at, NOW + at + 1))
                    for at in range(self.clock.now() - NOW, 60, 3)]
                pictures[host_id] = [
                    {rc: amount for rc, amount in peak.items() if amount}
                    for peak in peaks]
            hosts = {host.id: (host.capacity, host.usage)
                     for host in followed.hosts.values()}
            rooms = dict(zip(timeline.ids, timeline.rooms(
                model.Demand({'VCPU': 1}, count=999),
                model.Window(self.clock.now(), NOW + 9999)).tolist(),
                strict=True))
        return pictures, hosts, rooms

    def assert_true_to_the_database(self, followed: index.Index) -> None:
        anew = index.Index(self.books.connect(), self.clock)
        self.assertEqual(self.picture(anew), self.picture(followed))


class FollowingTest(IndexTestCase):

    def test_it_follows_whatever_is_decided(self):
        self.picture(self.index)
        dice = random.Random(20)
        for _round in range(60):
            self.one_decision(dice)
            if dice.random() < 0.4:
                self.assert_true_to_the_database(self.index)
        self.assert_true_to_the_database(self.index)

    def one_decision(self, dice: random.Random) -> None:
        """Book, change, move or release something, or change a host."""
        with self.database.writer() as session:
            rows = self.bookings(session)
            dice.shuffle(rows)
            kind = dice.randrange(7)
            start = dice.randrange(50)
            window = model.Window(NOW + start, NOW + start + dice.randint(
                1, 20))
            if kind == 0 and rows:
                edits = [books.Edit(row, None) for row in rows[:2]]
            elif kind == 1 and rows:
                edits = [books.Edit(row, books.new_of(
                    row, window=window, host_id=dice.choice(self.host_ids),
                    resources=dice.choice(RESOURCES))) for row in rows[:2]]
            elif kind == 2:
                host = session.get_one(models.Host, dice.choice(
                    self.host_ids))
                books.report(session, self.clock.now(), model.HostFacts(
                    host.uuid, host.name, host.service_host,
                    {**host.capacity, 'VCPU': dice.randint(60, 90)}),
                    {'server': {'VCPU': dice.randint(1, 5)}})
                return
            elif kind == 3:
                host = session.get_one(models.Host, dice.choice(
                    self.host_ids))
                books.report_usage(session, self.clock.now(), host.uuid, {
                    'server': {'VCPU': dice.randint(1, 5)}})
                return
            elif kind == 4:
                name = dice.choice(['h1', 'h2', 'h3'])
                books.tell(
                    session.connection(), self.clock.now(), name, name,
                    'server', dice.choice([None, PLAIN]))
                return
            else:
                edits = [books.Edit(None, books.NewBooking(
                    self.reservation_id, dice.choice(self.host_ids), None,
                    window, dice.choice(RESOURCES)))
                    for _booking in range(dice.randint(1, 3))]
            books.amend(session, self.clock.now(), edits)

    def test_usage_is_followed_without_reading_the_hosts(self):
        self.picture(self.index)
        (host_id,) = self.scalars(models.Host.id, models.Host.name == 'h1')
        statements = []

        @sa.event.listens_for(self.database.engine, 'before_cursor_execute')
        def note(_connection, _cursor, statement, *_rest):
            statements.append(statement)

        self.addCleanup(sa.event.remove, self.database.engine,
                        'before_cursor_execute', note)
        for came in (True, False):
            with self.database.begin() as connection:
                self.assertTrue(books.tell(
                    connection, NOW, 'h1', 'h1', 'server',
                    PLAIN if came else None))
            statements.clear()
            picture = self.picture(self.index)
            self.assertEqual(
                [], [one for one in statements if 'FROM hosts' in one])
            self.assertEqual(3 if came else 0,
                             picture[1][host_id][1].get('VCPU', 0))
            self.assert_true_to_the_database(self.index)

    def test_a_host_that_is_new_is_there_with_its_bookings(self):
        self.picture(self.index)
        self.host('h4', VCPU=8)
        (host_id,) = self.scalars(models.Host.id, models.Host.name == 'h4')
        self.amend(self.new(host_id, 5, 10, {'VCPU': 3}))
        self.assert_true_to_the_database(self.index)
        with self.index.fresh() as timeline:
            self.assertEqual({'VCPU': 3}, {
                rc: amount for rc, amount in timeline.peak(
                    host_id, model.Window(NOW + 5, NOW + 6)).items()
                if amount})

    def test_who_has_not_looked_for_long_reads_everything_again(self):
        self.picture(self.index)
        self.amend(self.new(self.host_ids[0], 5, 10))
        with self.database.writer() as session:
            self.assertGreater(books.trim(session, NOW + 1), 0)
        self.clock.advance(index.KEEP // 2 + 1)
        self.assert_true_to_the_database(self.index)

    def test_what_is_over_does_not_pile_up(self):
        self.picture(self.index)
        for number in range(12):
            start = number * index.KEEP // 3
            self.amend(self.new(self.host_ids[0], start, start + 9))
            self.clock.advance(index.KEEP // 3)
            with self.index.fresh() as timeline:
                steps = timeline.steps
        # One for each host, two for each booking of the last two hours.
        self.assertLessEqual(steps, len(self.host_ids) + 2 * 7)
        start = 13 * index.KEEP // 3
        self.amend(self.new(self.host_ids[1], start, start + 9))
        with self.index.fresh() as timeline:
            self.assertEqual(1, timeline.peak(self.host_ids[1], model.Window(
                NOW + start, NOW + start + 1))['VCPU'])

    def test_what_no_id_led_to_is_found_by_the_generations(self):
        self.picture(self.index)
        self.amend(self.new(self.host_ids[0], 40, 50))
        # As if it had been committed long after ids behind it were read.
        with self.index.fresh():
            pass
        self.amend(self.new(self.host_ids[1], 40, 50))
        self.index._top += 1000
        self.index._missing.clear()
        with self.index.fresh() as timeline:
            self.assertEqual(0, timeline.peak(
                self.host_ids[1], model.Window(NOW + 40, NOW + 41)).get(
                    'VCPU', 0))
        self.clock.advance(index.COMPARE)
        self.assert_true_to_the_database(self.index)

    def test_a_booking_that_was_taken_out_for_a_question_is_back_after_it(
            self):
        self.amend(self.new(self.host_ids[0], 5, 10, {'GPU': 1}))
        before = self.picture(self.index)
        with self.database.reader() as session:
            rows = self.bookings(session)
        window = model.Window(NOW + 5, NOW + 10)
        with self.index.fresh() as timeline:
            with self.index.without(rows):
                self.assertEqual(0, timeline.peak(
                    self.host_ids[0], window)['GPU'])
            self.assertEqual(1, timeline.peak(
                self.host_ids[0], window)['GPU'])
        self.assertEqual(before, self.picture(self.index))

    def test_a_server_that_overstays_keeps_its_room(self):
        lease = self.running_lease(0, 20)
        (server_id,) = base.servers_of(lease)
        (host_id,) = self.scalars(models.Booking.host_id,
                                  models.Booking.server_id == server_id)
        self.picture(self.index)
        self.clock.advance(25)
        for seconds in (0, 30):
            now = self.clock.advance(seconds)
            with self.index.fresh() as timeline:
                self.assertEqual(1, timeline.peak(
                    host_id, model.Window(now, now + 1))['VCPU'])
                self.assertEqual(0, timeline.peak(host_id, model.Window(
                    now + books.OVERDUE, now + 100))['VCPU'])


class OutOfOrderTest(IndexTestCase):
    """Transactions that overlap commit in another order than they began."""

    scenarios = databases.SERVERS

    def test_what_was_committed_late_under_an_early_id_is_found(self):
        self.picture(self.index)
        first, second = self.host_ids[:2]
        early = self.books.connect()
        with early.writer() as session:
            books.amend(session, NOW, [self.new(first, 40, 50)])
            session.flush()
            # Somebody else is faster, with a later id.
            self.amend(self.new(second, 40, 50))
            with self.index.fresh() as timeline:
                window = model.Window(NOW + 40, NOW + 41)
                self.assertEqual(1, timeline.peak(second, window)['VCPU'])
                self.assertEqual(0, timeline.peak(first, window)['VCPU'])
        with self.index.fresh() as timeline:
            self.assertEqual(1, timeline.peak(first, window)['VCPU'])
        self.assert_true_to_the_database(self.index)
