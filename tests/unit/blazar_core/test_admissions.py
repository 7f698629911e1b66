# SPDX-License-Identifier: Apache-2.0

import collections
import functools
import math
from unittest import mock

import fixtures
from hypothesis import strategies as st
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import selection
from blazar_core.capacity import start_times
from blazar_core.capacity import timelines
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from tests import databases
from tests import driven
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import oracle
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests

NOW = base.NOW
ONLY_SQLITE = [('sqlite', {'kind': 'sqlite'})]


class AgainstBruteForce(worlds.BooksTestCase):

    scenarios = ONLY_SQLITE

    def in_books(self, world, followed, work):
        """What ``work`` answers with an admission in a world.

        :param followed: the bookings come only after the admission has
            looked for the first time
        """
        admitting = admissions.Admission(
            self.database, driven.ManualClock(world.now))
        with self.database.writer() as session:
            (worlds.fill_hosts if followed else worlds.fill)(session, world)
        try:
            if followed:
                with admitting.index.fresh():
                    pass
                with self.database.writer() as session:
                    ledger.amend(session, world.now, [
                        ledger.Edit(None, row.new()) for row in world.rows],
                        force=True)
            return work(admitting)
        finally:
            with self.database.writer() as session:
                worlds.clear(session)


class TestPickAgainstBruteForce(AgainstBruteForce):

    def test_a_lease_is_admitted_or_refused_as_trying_everything_says(self):
        answers = collections.Counter()

        def check(question, followed):
            world, demand, window, asked = question

            def work(admitting):
                quoted = admitting.quote([demand], window)
                try:
                    picked = admitting.pick(demand, window)
                except errors.Refused as exc:
                    self.assertEqual(exc.refusal, quoted)
                    answers[exc.refusal.reason] += 1
                    self.check_refusal(question, exc.refusal)
                    if exc.refusal.next_start is not None:
                        # Raises, if it does not fit there.
                        start = exc.refusal.next_start
                        admitting.pick(demand, model.Window(
                            start, start + window.end - window.start))
                else:
                    self.assertIsNone(quoted)
                    answers['admitted'] += 1
                    # Who is content with fewer gets all that there are.
                    self.assertEqual(oracle.most(
                        world.hosts, world.bookings(), asked, window.start,
                        window.end) if demand.least else demand.count,
                        len(picked))
                    self.assertTrue(oracle.fits(
                        [host_id - 1000 for host_id in picked], world.hosts,
                        world.bookings(), asked, window.start, window.end))

            self.in_books(world, followed, work)

        self.for_all(check, worlds.questions(), st.booleans())
        # No answer is a rarity that the examples hardly reach.
        for answer in ('admitted', refusals.Reason.NO_ROOM,
                       refusals.Reason.NO_HOST, refusals.Reason.TOO_BIG):
            self.assertGreaterEqual(
                answers[answer], examples.many(self.count) // 50, answers)

    def check_refusal(self, question, refusal):
        world, demand, window, asked = question
        demand = demand.fewest()
        asked = asked._replace(count=demand.count)
        bookings = world.bookings()
        fits = oracle.most(
            world.hosts, bookings, asked, window.start, window.end)
        self.assertLess(fits, demand.count)
        next_start = oracle.earliest(
            world.hosts, bookings, asked, window.start, window.end)
        reason = refusals.Reason.NO_ROOM
        if next_start is None:
            reason = (refusals.Reason.TOO_BIG if asked.allowed else
                      refusals.Reason.NO_HOST)
        self.assertEqual(
            refusals.Refusal(reason, demand.count, fits, next_start), refusal)

    def test_a_look_at_the_first_hosts_finds_what_one_at_all_does(self):
        looks = collections.Counter()
        first = selection.Selection._first

        def counted(*args):
            places = first(*args)
            looks[places is not None] += 1
            return places

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.capacity.selection.Selection._first', counted))

        def check(question, crowded):
            world, demand, window, _asked = question

            def work(admitting):
                found = []
                for number in 1000, 2:
                    with mock.patch.object(selection, 'FIRST', number):
                        try:
                            found.append(admitting.pick(
                                demand, window, last=crowded))
                        except errors.Refused as exc:
                            found.append(exc.refusal)
                self.assertEqual(*found)

            self.in_books(world, False, work)

        self.for_all(check, worlds.questions(),
                     st.sets(st.integers(1000, 1004), max_size=2))
        self.assertGreater(looks[True], examples.many(self.count) // 20)

    def test_in_exchange_for_bookings_it_is_as_if_they_were_not_there(self):
        def check(question, given):
            world, demand, window, asked = question
            with_them = [row.counts(world.now) for index, row in enumerate(
                world.rows) if index not in given or row.running]

            def ask(admitting):
                with self.database.reader() as session:
                    rows = [row for row in session.scalars(
                        sa.select(models.Booking)) if not row.running and
                        int(row.server_id.split('-')[1]) in given]
                try:
                    picked = admitting.pick(demand, window, instead_of=rows)
                except errors.Refused as exc:
                    self.assertEqual(oracle.most(
                        world.hosts, with_them, asked, window.start,
                        window.end), exc.refusal.fits_now)
                else:
                    self.assertTrue(oracle.fits(
                        [host_id - 1000 for host_id in picked], world.hosts,
                        with_them, asked, window.start, window.end))
                return admitting.quote([demand], window)

            # And they are back after it.
            after = self.in_books(world, False, ask)
            fits = oracle.most(
                world.hosts, world.bookings(), asked._replace(
                    count=demand.fewest().count), window.start, window.end)
            self.assertEqual(demand.fewest().count if after is None else
                             after.fits_now, fits)

        self.for_all(check, worlds.questions(), st.sets(st.integers(0, 9)),
                     count=150)


class TestRoomsForAgainstBruteForce(AgainstBruteForce):

    #: More than any host of the examples can take.
    MANY = 20

    def eligibility(self, admitting):
        return eligibility.Eligibility(
            self.database, admitting._clock, admitting.index)

    def test_servers_may_go_where_no_promise_is_broken(self):
        rooms = collections.Counter()

        def check(world, resources, own, followed):
            server_id = f'server-{own}'
            booked, judged, elsewhere, _some = self.in_books(
                world, followed, lambda admitting: self.eligibility(
                    admitting).for_server(
                        server_id, resources,
                        self.scalars(models.Host.uuid)))
            if own == 10:
                # Who knows that it has no booking need not ask for it.
                self.assertEqual(
                    (booked, judged, elsewhere, _some), self.in_books(
                        world, followed, lambda admitting: self.eligibility(
                            admitting).for_unreserved(
                                resources, self.scalars(models.Host.uuid))))
            self.assertEqual(
                self.expected(world, resources, server_id), (booked, {
                    uuid: min(room, self.MANY)
                    for uuid, room in judged.items()}))
            self.assertEqual(math.inf, elsewhere)
            rooms.update(judged.values())

        # Every world has a server-0, and none has a server-10.
        self.for_all(check, worlds.worlds(), worlds.needs,
                     st.sampled_from([0, 1, 10]), st.booleans())
        for room in (0, 1, 2):
            self.assertGreater(rooms[room], examples.many(self.count) // 20)

    def expected(self, world, resources, server_id):
        mine = next((row for row in world.rows
                     if row.server_id == server_id), None)
        pairs = list(zip(world.rows, world.bookings(), strict=True))
        end = max(booking.end for _row, booking in pairs) + world.now + 1
        if mine is not None:
            end = max(mine.end, world.now + worlds.OVERDUE)
        judged = {}
        for number in range(len(world.hosts)):
            own = [row is mine or mine is not None and not row.running and
                   row.reservation == mine.reservation
                   for row, _booking in pairs]
            others = [booking for (_row, booking), is_own in zip(
                pairs, own, strict=True) if not is_own]
            if any(one.host == number and one.start < end and
                   one.end > world.now and any(one.resources.values())
                   for one in others):
                room = next(times for times in range(self.MANY, -1, -1)
                            if not times or oracle.has_room(
                                number, world.hosts, others, resources,
                                times, world.now, end))
                judged[worlds.uuid_of(number)] = max(room, sum(
                    row.host == number and booking.end > world.now
                    for (row, booking), is_own in zip(
                        pairs, own, strict=True) if is_own))
        booked = None if mine is None else mine.host
        return None if booked is None else worlds.uuid_of(booked), judged


class AdmissionTestCase(worlds.BooksTestCase):

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(self.database, self.clock)
        self.eligibility = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)

    def name_of(self, host_id):
        return self.scalars(models.Host.name, models.Host.id == host_id)[0]

    def pick(self, start, end, count=1, last=(), **wanted):
        """The names of the picked hosts."""
        demand = model.Demand(
            wanted.pop('resources', {'VCPU': 1}), count, **wanted)
        return list(map(self.name_of, self.admission.pick(
            demand, model.Window(NOW + start, NOW + end), last=last)))

    def refusal(self, *args, **kwargs):
        return self.assertRaises(
            errors.Refused, self.pick, *args, **kwargs).refusal


class TestPick(AdmissionTestCase):

    def test_without_any_host_there_is_none(self):
        self.assertEqual(refusals.Refusal(refusals.Reason.NO_HOST, 2, 0, None),
                         self.refusal(0, 10, 2))

    def test_windows_that_only_touch_share_a_host(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.book('one', 20, 30, VCPU=1)
        self.assertEqual(['one'], self.pick(10, 20))
        self.refusal(9, 20)
        self.refusal(10, 21)

    def test_a_lease_fits_beside_bookings_that_follow_each_other(self):
        self.host('one', VCPU=2)
        for start in (0, 10, 20):
            self.book('one', start, start + 10, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 30))

    def test_open_ended_usage_is_room_that_never_comes_back(self):
        self.host('one', usage={'VCPU': 3}, VCPU=4)
        self.assertEqual(['one'], self.pick(0, 10))
        refusal = self.refusal(0, 10, 2)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.TOO_BIG, 2, 1, None), refusal)

    def test_the_earliest_start_is_when_enough_bookings_have_ended(self):
        self.host('one', VCPU=4)
        self.book('one', 0, 30, VCPU=1)
        self.book('one', 0, 20, VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        refusal = self.refusal(0, 100, 3)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 3, 1, NOW + 20), refusal)

    def test_the_earliest_start_passes_over_gaps_that_are_too_short(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.book('one', 19, 30, VCPU=1)
        self.assertEqual(NOW + 30, self.refusal(0, 10).next_start)
        self.assertEqual(NOW + 10, self.refusal(0, 9).next_start)

    def test_hosts_of_a_lost_race_are_taken_when_no_others_will_do(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=2)
        lost = {self.host_id('one')}
        self.assertEqual(['one'], self.pick(0, 10))
        self.assertEqual(['two'], self.pick(0, 10, last=lost))
        self.assertEqual(['two', 'two', 'one'],
                         self.pick(0, 10, 3, last=lost))

    def test_servers_that_belong_together_stand_on_one_host(self):
        self.host('small', VCPU=2)
        self.host('large', VCPU=3)
        self.assertEqual(['large'] * 3, self.pick(
            0, 10, 3, affinity=model.Affinity.SAME))
        self.assertEqual(3, self.refusal(
            0, 10, 4, affinity=model.Affinity.SAME).fits_now)

    def test_servers_that_keep_apart_stand_on_different_hosts(self):
        self.host('one', VCPU=9)
        self.host('two', VCPU=9)
        apart = {'affinity': model.Affinity.DIFFERENT}
        self.assertEqual(['one', 'two'], sorted(
            self.pick(0, 10, 2, **apart)))
        self.assertEqual(2, self.refusal(0, 10, 3, **apart).fits_now)
        self.assertEqual(['one', 'one', 'two', 'two'], sorted(
            self.pick(0, 10, 4, per_host=2, **apart)))

    def test_a_host_must_offer_every_class(self):
        self.host('plain', VCPU=4)
        self.host('special', VCPU=4, CUSTOM_GPU=1)
        self.assertEqual(['special'], self.pick(
            0, 10, resources={'VCPU': 1, 'CUSTOM_GPU': 1}))

    def test_disk_from_a_shared_provider_is_left_to_nova(self):
        self.host('one', VCPU=4)
        self.assertEqual(['one'], self.pick(
            0, 10, resources={'VCPU': 1, 'DISK_GB': 999}))

    def test_disk_of_the_host_itself_is_counted(self):
        self.host('one', VCPU=4, DISK_GB=10)
        self.refusal(0, 10, resources={'VCPU': 1, 'DISK_GB': 11})

    def test_without_a_host_that_may_be_used_the_reason_says_so(self):
        uuid = self.host('one', VCPU=4)
        for limits in ({'hosts': frozenset()}, {'avoid': frozenset(
            [uuid])}, {'hosts': frozenset(
                ['unheard of'])}, {'properties': host_properties.parse(
                    '["=", "$a", "b"]')}):
            self.assertEqual(
                refusals.Refusal(refusals.Reason.NO_HOST, 1, 0, None),
                self.refusal(0, 10, **limits))

    def test_a_server_that_overstays_keeps_its_room_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertEqual(NOW + 60, self.refusal(0, 10).next_start)
        self.assertEqual(['one'], self.pick(60, 70))

    def test_a_booking_that_is_over_and_runs_nothing_takes_no_room(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))

    def test_a_booking_without_a_host_takes_no_room(self):
        self.host('one', VCPU=1)
        self.book(None, 0, 10, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))

    def test_what_was_decided_a_moment_ago_is_seen(self):
        self.host('one', VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))
        self.book('one', 0, 10, VCPU=1)
        self.assertEqual(NOW + 10, self.refusal(0, 10).next_start)
        self.host('two', VCPU=1)
        self.assertEqual(['two'], self.pick(0, 10))


class TestAvailability(AdmissionTestCase):

    def available(self, start=0, end=100, duration=10, most=100, count=9,
                  **demand):
        found, known = self.admission.starts.availability(
            model.Demand({'VCPU': 1}, count, **demand),
            model.Window(NOW + start, NOW + end), duration, most)
        return [(time - NOW, fits) for time, fits in found], (
            known and known - NOW)

    def test_it_changes_where_bookings_end_and_come_into_the_way(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 20, VCPU=2)
        self.book('one', 50, 60, VCPU=1)
        self.assertEqual(([(0, 0), (20, 2), (41, 1), (60, 2)], None),
                         self.available())
        self.assertEqual(([(0, 0), (20, 1)], None),
                         self.available(count=1))

    def test_what_has_no_room_yet_is_cut_and_said_to_be(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 20, VCPU=2)
        self.book('one', 50, 60, VCPU=1)
        self.assertEqual(([(0, 0), (20, 2)], 41), self.available(most=2))

    def test_servers_that_overstay_are_expected_to_go(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertEqual(([(0, 0), (60, 1)], None), self.available())
        self.assertEqual(([(0, 0)], None), self.available(end=60))

    def test_together_and_apart(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=3)
        for affinity, fits in ((model.Affinity.NONE, 6),
                               (model.Affinity.SAME, 3),
                               (model.Affinity.DIFFERENT, 2)):
            self.assertEqual(([(0, fits)], None),
                             self.available(affinity=affinity))

    def test_only_hosts_that_may_be_used_count(self):
        uuid = self.host('one', VCPU=3)
        self.host('two', VCPU=2)
        self.assertEqual(([(0, 3)], None), self.available(
            hosts=frozenset([uuid])))
        self.assertEqual(([(0, 2)], None), self.available(
            avoid=frozenset([uuid])))


class TestAvailabilityAgainstBruteForce(AgainstBruteForce):

    def test_every_start_has_as_many_as_trying_everything_says(self):
        seen = collections.Counter()

        def check(question, duration):
            world, demand, window, asked = question
            window = model.Window(max(window.start, world.now),
                                  max(window.start, world.now) + 15)
            found, more = self.in_books(
                world, False, lambda admitting: admitting.starts.availability(
                    demand, window, duration, 1000))
            self.assertFalse(more)
            for start in range(window.start, window.end):
                said = [fits for time, fits in found if time <= start][-1]
                self.assertEqual(oracle.most(
                    world.hosts, world.bookings(), asked, start,
                    start + duration), said, (start, found))
                seen[said] += 1

        self.for_all(check, worlds.questions(), st.integers(1, 5),
                     count=30)
        self.assertGreater(len(seen), 2)


class TestSeveralDemands(AdmissionTestCase):

    def pick_all(self, *demands, start=0, end=10):
        return [list(map(self.name_of, hosts)) for hosts in
                self.admission.pick_all(demands, model.Window(
                    NOW + start, NOW + end))]

    def test_together_or_not_at_all(self):
        self.host('one', VCPU=4)
        self.assertEqual([['one'] * 2, ['one']], self.pick_all(
            model.Demand({'VCPU': 1}, 2), model.Demand({'VCPU': 2})))
        refused = self.assertRaises(
            errors.Refused, self.pick_all, model.Demand({'VCPU': 1}, 3),
            model.Demand({'VCPU': 2}))
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 4, 3, None),
                         refused.refusal)
        # What was tried has left no trace.
        self.assertEqual(['one'] * 4, self.pick(0, 10, 4))

    def test_who_has_the_fewest_hosts_chooses_first(self):
        uuid = self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        anywhere, there = model.Demand({'VCPU': 1}), model.Demand(
            {'VCPU': 1}, hosts=frozenset([uuid]))
        self.assertEqual([['two'], ['one']], self.pick_all(anywhere, there))
        self.assertEqual([['one'], ['two']], self.pick_all(there, anywhere))

    def test_from_the_start_that_is_named_all_of_them_fit(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 50, VCPU=1)
        demands = [model.Demand({'VCPU': 1})] * 2
        refusal = self.assertRaises(
            errors.Refused, self.pick_all, *demands).refusal
        self.assertEqual((refusals.Reason.NO_ROOM, 2, 1), (
            refusal.reason, refusal.wanted, refusal.fits_now))
        start = refusal.next_start - NOW
        self.assertGreaterEqual(start, 50)
        self.assertEqual([['one'], ['one']], self.pick_all(
            *demands, start=start, end=start + 10))

    def test_the_next_reservation_goes_where_the_lease_is_already(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=2, CUSTOM_GPU=1)
        self.assertEqual([['two'], ['two']], self.pick_all(
            model.Demand({'VCPU': 1}),
            model.Demand({'VCPU': 1, 'CUSTOM_GPU': 1})))

    def test_equal_ones_are_one(self):
        self.host('one', VCPU=3)
        self.host('two', VCPU=2)
        one, apart = model.Demand({'VCPU': 1}), model.Demand(
            {'VCPU': 1}, affinity=model.Affinity.DIFFERENT)
        more = model.Demand({'VCPU': 1}, 2)
        self.assertEqual(
            [1, 2, 1, 1], [len(hosts) for hosts in self.pick_all(
                one, more, apart, one)])
        refused = self.assertRaises(
            errors.Refused, self.pick_all, more, one, more, one)
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 6, 5, None),
                         refused.refusal)

    def test_what_stays_is_beside_what_comes(self):
        self.host('one', VCPU=3)
        self.host('two', VCPU=3)
        ids = [self.host_id('one'), self.host_id('two')]

        def pick(count, *kept, start=0):
            return sorted(map(self.name_of, self.admission.pick_all(
                [model.Demand({'VCPU': 1}, count)],
                model.Window(NOW + start, NOW + 10),
                kept=[selection.Pinned({'VCPU': size}, dict(zip(ids, counts)))
                      for size, *counts in kept])[0]))

        self.assertEqual(['two'], pick(1, (1, 1, 2), (2, 1, 0)))
        refused = self.assertRaises(
            errors.Refused, pick, 2, (1, 1, 2), (2, 1, 0))
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 6, 5, None),
                         refused.refusal)
        self.book('one', 0, 5, VCPU=1)
        refused = self.assertRaises(
            errors.Refused, pick, 1, (1, 1, 2), (2, 1, 0))
        self.assertEqual(refusals.Refusal(refusals.Reason.NO_ROOM, 5, 3, None),
                         refused.refusal)
        self.assertEqual(['two'], pick(1, (1, 1, 2), (2, 1, 0), start=5))


class SlowClock(driven.ManualClock):
    """Short spans are what a test adds to them."""

    spent = 0.0

    def elapsed(self):
        return self.spent


class TestPatience(AdmissionTestCase):
    """What a request may cost: it, and those who come at the same time."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        self.clock = SlowClock(NOW)
        self.admission = admissions.Admission(self.database, self.clock)
        self.searches = []

    def note(self, name, cost=0.0, also=lambda: None):
        """Have each search of the timeline noted, and take so long."""
        search = getattr(timelines.Timeline, name)

        def noted(*args, **kwargs):
            self.searches.append(name)
            self.clock.spent += cost
            also()
            return search(*args, **kwargs)

        self.useFixture(fixtures.MonkeyPatch(
            f'blazar_core.capacity.timelines.Timeline.{name}', noted))

    def kinds(self, number):
        """Demands that differ; each fits where there is a VCPU."""
        return [model.Demand({'VCPU': 1, 'MEMORY_MB': size})
                for size in range(number)]

    def quote(self, demands):
        return self.admission.quote(demands, model.Window(NOW, NOW + 10))

    def test_a_hundred_equal_reservations_are_searched_for_once(self):
        self.host('one', VCPU=99)
        self.host('two', VCPU=1)
        self.book('two', 0, 50, VCPU=1)
        self.note('fits')
        self.note('earliest')
        self.assertEqual(NOW + 50, self.quote(
            [model.Demand({'VCPU': 1})] * 100).next_start)
        self.assertEqual(['fits', 'earliest'], self.searches)

    def test_a_trial_searches_twice_for_each_kind(self):
        self.host('one', VCPU=20, MEMORY_MB=1000)
        self.note('fits')
        self.assertIsNone(self.quote(self.kinds(20)))
        self.assertEqual(2 * 20 - 1, len(self.searches))

    def test_nothing_is_tried_again_and_again_that_never_fits(self):
        self.host('one', VCPU=2, MEMORY_MB=1000)
        self.book('one', 0, 10 ** 8, VCPU=1)
        self.note('fits')
        self.note('earliest')
        refusal = self.quote(self.kinds(3))
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 3, 1, None),
                         refusal)
        # Now, and when all is over.
        self.assertLessEqual(len(self.searches), 2 * (2 * 3))

    def test_growing_a_lease_searches_once_for_all_that_stays(self):
        ids = []
        for number in range(30):
            self.host(f'host{number}', VCPU=2)
            ids.append(self.host_id(f'host{number}'))
        self.note('fits')
        self.admission.pick_all(
            [model.Demand({'VCPU': 1})], model.Window(NOW, NOW + 10),
            kept=[selection.Pinned({'VCPU': 1}, dict.fromkeys(ids, 1))])
        self.assertEqual(2, len(self.searches))

    def test_a_search_that_takes_too_long_says_what_it_knows(self):
        self.host('one', VCPU=2, MEMORY_MB=1000)
        self.book('one', 0, 50, VCPU=1)
        self.book('one', 0, 10 ** 8, VCPU=1)
        self.assertEqual(
            (refusals.Reason.NO_ROOM, None), (
                self.quote(self.kinds(2)).reason,
                self.quote(self.kinds(2)).next_start_after))
        self.note('earliest', cost=0.4)
        refusal = self.quote(self.kinds(2))
        self.assertEqual(refusals.Refusal(
            refusals.Reason.NO_ROOM, 2, 0, None, NOW + 50), refusal)
        self.assertEqual(3, len(self.searches))
        self.assertIn('next_start: none before 2027-01-15T08:00:50.000000; '
                      'a later one may exist',
                      refusal.sentence())

    def test_one_kind_has_its_answer_however_long_that_takes(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 50, VCPU=2)
        self.note('earliest', cost=100)
        self.assertEqual(NOW + 50, self.quote(
            [model.Demand({'VCPU': 1})] * 2).next_start)

    def come(self):
        """Somebody else comes now, and has to wait."""
        if self.others:
            return
        self.others.append(self.in_thread(self.look))
        self.wait_for(self.admission.index._turn.locked, 'him to wait')

    def look(self):
        with self.admission.index.fresh():
            self.searches.append('other')

    def test_others_have_their_turn_between_two_steps(self):
        self.host('one', VCPU=2, MEMORY_MB=1000)
        self.book('one', 0, 10 ** 6, VCPU=1)
        self.others = []
        self.note('earliest', also=self.come)
        self.assertIsNotNone(self.quote(self.kinds(2)).next_start)
        self.assertEqual(['earliest', 'other', 'earliest'],
                         self.searches[:3])

    def test_others_have_their_turn_while_a_host_is_judged(self):
        self.host('one', VCPU=2)

        class Slow(host_properties.Comparison):
            def matches(one, host):
                self.in_thread(self.look)
                return self.wait_for(lambda: self.searches, 'the other')

        self.assertEqual(['one'], self.pick(
            0, 10, properties=Slow('=', 'a', ())))

    def busy_and_free(self, number):
        """A host that changes so often, each time at another time."""
        self.host('one', VCPU=9)
        for one in range(number):
            self.book('one', 10 + 20 * one, 20 + 20 * one, VCPU=one % 8 + 1)

    def availability(self, start=0, most=1000):
        found, known = self.admission.starts.availability(
            model.Demand({'VCPU': 1}, 9), model.Window(
                NOW + start, NOW + 1000), 1, most)
        return [(time - NOW, fits) for time, fits in found], (
            known and known - NOW)

    def test_others_have_their_turn_while_many_starts_are_looked_at(self):
        self.busy_and_free(12)
        self.others = []
        self.note('fits', also=self.come)
        self.availability()
        self.assertEqual(['fits'] * start_times.SLICE + ['other'],
                         self.searches[:start_times.SLICE + 1])

    def test_what_is_free_is_told_as_far_as_there_was_time(self):
        self.busy_and_free(30)
        every, known = self.availability()
        self.assertEqual((61, None), (len(every), known))
        self.note('fits', cost=0.06)
        together, start = {}, 0
        while start is not None:
            found, start = self.availability(start)
            # Two slices each.
            self.assertLessEqual(len(found), 2 * start_times.SLICE)
            together.update(found)
        self.assertEqual(dict(every), together)

    def test_one_row_after_the_other(self):
        self.busy_and_free(3)
        every, _known = self.availability()
        pages, start = [], 0
        while start is not None:
            found, start = self.availability(start, most=1)
            pages += found
        self.assertEqual(every, pages)

    def test_who_asks_again_gets_on_where_nothing_changes(self):
        self.host('one', VCPU=1)
        self.host('full', usage={'VCPU': 1}, VCPU=1)
        for one in range(50):
            self.book('full', 10 + 20 * one, 20 + 20 * one, VCPU=1)
        self.note('fits', cost=0.2)
        found, known = self.availability()
        self.assertEqual([(0, 1)], found)
        self.assertGreater(known, 0)


class TestQuote(AdmissionTestCase):

    def test_a_quote_books_nothing(self):
        self.host('one', VCPU=1)
        before, generation = self.count_rows(), self.generation('one')
        window = model.Window(NOW, NOW + 10)
        for _time in range(2):
            self.assertIsNone(self.admission.quote(
                [model.Demand({'VCPU': 1})], window))
            self.assertEqual(
                refusals.Refusal(refusals.Reason.TOO_BIG, 1, 0, None),
                self.admission.quote([model.Demand({'VCPU': 2})], window))
        self.assertEqual((before, generation), (
            self.count_rows(), self.generation('one')))


class TestProperties(AdmissionTestCase):

    def setUp(self):
        super().setUp()
        for name, found in (('plain', {}), ('old', {'gpu': 'v100'}),
                            ('new', {'gpu': 'a100', 'rack': 7})):
            with self.database.writer() as session:
                inventory.report(session, NOW, model.HostFacts(
                    name, name, name, {'VCPU': 4}, found), {})

    def with_properties(self, text):
        return {'properties': host_properties.parse(text)}

    def test_only_hosts_that_match_are_picked(self):
        for text, names in (
                ('["=", "$gpu", "v100"]', ['old']),
                ('["in", "$gpu", "v100", "a100"]', ['new', 'old']),
                ('["and", ["!=", "$gpu", "v100"], [">", "$rack", "6"]]',
                 ['new']),
                ('', ['new', 'old', 'plain'])):
            self.assertEqual(names, sorted(self.pick(
                0, 10, len(names), affinity=model.Affinity.DIFFERENT,
                **self.with_properties(text))), text)

    def test_a_refusal_is_about_the_hosts_that_match(self):
        self.book('old', 0, 50, VCPU=3)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 3, 1, NOW + 50),
            self.refusal(0, 10, 3, **self.with_properties(
                '["=", "$gpu", "v100"]')))
        self.assertEqual(
            refusals.Refusal(refusals.Reason.TOO_BIG, 5, 1, None),
            self.refusal(0, 10, 5, **self.with_properties(
                '["=", "$gpu", "v100"]')))

    def test_they_go_together_with_named_hosts(self):
        gpus = self.with_properties('["in", "$gpu", "v100", "a100"]')
        self.assertEqual(['new'], self.pick(
            0, 10, avoid=frozenset(['old']), **gpus))
        self.assertEqual(['old'], self.pick(
            0, 10, hosts=frozenset(['old', 'plain']), **gpus))
        self.assertEqual(refusals.Reason.NO_HOST, self.refusal(
            0, 10, hosts=frozenset(['plain']), **gpus).reason)

    def test_a_property_that_changes_is_followed(self):
        rare = self.with_properties('["=", "$gpu", "h100"]')
        self.refusal(0, 10, **rare)
        with self.database.writer() as session:
            inventory.report(session, NOW, model.HostFacts(
                'plain', 'plain', 'plain', {'VCPU': 4}, {'gpu': 'h100'}), {},
                inventory.generations(session, ['plain'])['plain'])
        self.assertEqual(['plain'], self.pick(0, 10, **rare))


class TestWishes(AdmissionTestCase):
    """Soft affinities choose among the hosts that have room."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        self.uuids = {}
        for name, vcpus in (('one', 2), ('two', 4), ('three', 4)):
            self.uuids[name] = self.host(name, VCPU=vcpus)
        # What is there first is filled first.
        self.admission = admissions.Admission(
            self.database, self.clock, lambda _timeline, found, *_rest: found)

    def wish(self, affinity, count, last=(), room=1, **members):
        return self.pick(
            0, 10, count, last, resources={'VCPU': room}, affinity=affinity,
            members={self.uuids.get(name, name): there
                     for name, there in members.items()})

    def apart(self, count, **more):
        return self.wish(model.Affinity.SOFT_DIFFERENT, count, **more)

    def together(self, count, **more):
        return self.wish(model.Affinity.SOFT_SAME, count, **more)

    def test_apart_each_has_its_host_as_long_as_there_are_some(self):
        self.assertEqual(['one', 'two'], self.apart(2))
        self.assertEqual(['one', 'two', 'three'], self.apart(3))
        self.assertEqual(['one', 'two', 'three', 'one', 'two'], self.apart(5))
        self.assertEqual(2 * ['one'] + 4 * ['three'] + 4 * ['two'],
                         sorted(self.apart(10)))

    def test_apart_they_go_where_fewest_of_their_group_are(self):
        self.assertEqual(['two', 'three', 'one'], self.apart(3, one=1))
        self.assertEqual(['three', 'one'], self.apart(2, one=1, two=2))
        self.assertEqual(['two'], self.apart(1, one=1, three=1, gone=1))

    def test_together_they_go_to_a_host_that_takes_all(self):
        self.assertEqual(['one', 'one'], self.together(2))
        self.assertEqual(3 * ['two'], self.together(3))
        self.assertEqual(4 * ['two'] + ['three'], self.together(5))

    def test_together_they_take_the_fewest_hosts(self):
        self.book('two', 0, 10, VCPU=2)
        self.assertEqual(
            ['three'] * 4 + ['two'] * 2, self.together(6))

    def test_together_they_go_where_most_of_their_group_are(self):
        self.assertEqual(['three'], self.together(1, three=1))
        self.assertEqual(['three'] * 2, self.together(2, two=1, three=2))
        self.assertEqual(['one'] * 2 + ['two'], self.together(3, one=1))
        self.assertEqual(['one'], self.together(1, gone=1))

    def test_a_wish_comes_before_a_lost_race_which_breaks_a_tie(self):
        lost = {self.host_id('one')}
        self.assertEqual(['two', 'three', 'one'], self.apart(3, last=lost))
        self.assertEqual(['one'], self.together(1, last=lost, one=1))
        self.assertEqual(['two'], self.together(1, last=lost))

    def test_a_wish_refuses_nothing(self):
        for affinity in (model.Affinity.SOFT_SAME,
                         model.Affinity.SOFT_DIFFERENT):
            for room, count in ((1, 11), (3, 3), (5, 1)):
                plain, wished = (self.refusal(
                    0, 10, count, resources={'VCPU': room}, affinity=one)
                    for one in (model.Affinity.NONE, affinity))
                self.assertEqual(plain, wished)


class TestPack(AdmissionTestCase):

    def hosts(self, count, **capacity):
        names = [f'host-{number}' for number in range(count)]
        for name in names:
            self.host(name, **capacity)
        return names

    def test_leases_that_end_together_share_a_host(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 100, VCPU=1)
        self.book('host-2', 0, 50, VCPU=1)
        self.assertEqual(['host-1'], self.pick(0, 100))
        self.assertEqual(['host-2'], self.pick(0, 50))

    def test_a_host_that_stays_busy_anyway_comes_first(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 50, VCPU=1)
        self.book('host-2', 0, 200, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_of_those_the_one_that_falls_free_soonest(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 300, VCPU=1)
        self.book('host-2', 0, 200, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_else_the_one_that_stays_busy_for_the_least_time_longer(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 50, VCPU=1)
        self.book('host-2', 0, 70, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_a_host_with_servers_without_an_end_never_falls_free(self):
        self.hosts(1, VCPU=2)
        self.host('used', usage={'VCPU': 1}, VCPU=2)
        self.assertEqual(['used'], self.pick(0, 100))

    def test_empty_hosts_are_left_whole(self):
        self.hosts(4, VCPU=4)
        for number in range(12):
            for name in self.pick(0, 100 + number % 2):
                self.book(name, 0, 100 + number % 2, VCPU=1)
        self.assertEqual(3, len(set(self.scalars(models.Booking.host_id))))
        self.assertEqual(['host-3'] * 4, self.pick(0, 10, 4))

    def test_servers_of_a_lease_fill_one_host_after_the_other(self):
        self.hosts(3, VCPU=2)
        self.assertEqual(['host-0', 'host-0', 'host-1'], self.pick(0, 10, 3))

    def test_equal_hosts_are_picked_in_the_order_of_their_ids(self):
        self.hosts(3, VCPU=2)
        # PostgreSQL puts a row that is written again behind the others.
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).where(
                models.Host.name == 'host-0').values(properties={}))
        self.assertEqual(['host-0', 'host-0', 'host-1'], self.pick(0, 10, 3))


class TestSpread(AdmissionTestCase):

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(
            self.database, self.clock, selection.spread)

    def test_every_host_with_room_is_picked_in_time(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=1)
        self.host('full', usage={'VCPU': 1}, VCPU=1)
        picked = collections.Counter(
            name for _time in range(100) for name in self.pick(0, 10))
        self.assertEqual({'one', 'two', 'three'}, set(picked))

    def test_no_host_gets_more_than_it_has_room_for(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)
        for _time in range(10):
            self.assertEqual(
                ['one', 'one', 'three', 'three', 'two', 'two'],
                sorted(self.pick(0, 10, 6)))

    def test_hosts_of_a_lost_race_come_last(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=1)
        lost = {self.host_id('one')}
        for _time in range(20):
            self.assertEqual(['two'], self.pick(0, 10, last=lost))

    def test_a_strategy_is_a_function_that_may_be_replaced(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=1)
        asked = []

        def reverse(timeline, candidates, window, ours, most):
            asked.append((len(timeline), window))
            return candidates[::-1]

        self.admission = admissions.Admission(
            self.database, self.clock, reverse)
        self.assertEqual(['two'], self.pick(0, 10))
        self.assertEqual([(2, model.Window(NOW, NOW + 10))], asked)


class TestInTheWay(AdmissionTestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger(level=20))

    def test_the_log_names_the_leases_in_the_way(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.refusal(5, 15)
        self.assertIn('Refused 1 servers from 2027-01-15 08:00:05 to '
                      '2027-01-15 08:00:15: only 0 fit. Blocked by leases: '
                      'lease',
                      self.log.output)

    def test_one_that_is_too_big_is_in_nobodys_way(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.refusal(5, 15, 2)
        self.assertNotIn('Blocked by', self.log.output)

    def test_those_that_end_first_come_first_and_others_are_left_out(self):
        self.host('one', VCPU=9)
        for name, start, end in (('late', 0, 50), ('soon', 0, 20),
                                 ('over', 0, 5), ('after', 30, 40),
                                 ('nowhere', 0, 20)):
            with self.database.writer() as session:
                session.add(models.Lease(
                    lease_type='immediate',
                    id=name, name='', project_id='', user_id='',
                    start_date=0, end_date=1, on_end='', status='ACTIVE',
                    created_at=0, updated_at=0))
                session.flush()
                session.add(models.Reservation(
                    id=name, lease_id=name, resource_type='', amount=1,
                    resources={}, status='active', created_at=0,
                    updated_at=0))
            self.book(None if name == 'nowhere' else 'one', start, end,
                      name, VCPU=1)
            self.book('one' if name == 'soon' else None, start, end + 1,
                      name, VCPU=1)
        with self.database.reader() as session:
            find = functools.partial(
                admissions._in_the_way, session,
                model.Window(NOW + 5, NOW + 30))
            self.assertEqual(['soon', 'late'], find())
            self.assertEqual(['soon'], find(1))


class TestRoomsFor(AdmissionTestCase):

    def fits(self, server_id='unleased', **resources):
        """The booked host, and the room of the judged ones, by name."""
        booked, rooms, *_others = self.eligibility.for_server(
            server_id, resources, self.scalars(models.Host.uuid))
        names = {host.uuid: host.name for host in self.scalars(models.Host)}
        return names.get(booked), {
            names[uuid]: room for uuid, room in rooms.items()}

    def test_hosts_without_bookings_are_left_to_nova(self):
        self.host('full', usage={'VCPU': 9}, VCPU=1)
        self.assertEqual((None, {}), self.fits(VCPU=1))

    def test_an_open_ended_server_does_not_eat_what_is_promised_later(self):
        self.host('one', VCPU=4)
        self.book('one', 5000, 6000, VCPU=2)
        self.assertEqual((None, {'one': 2}), self.fits(VCPU=1))
        self.assertEqual((None, {'one': 1}), self.fits(VCPU=2))
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=3))

    def test_a_leased_server_may_use_what_is_promised_after_its_end(self):
        self.host('booked', VCPU=1)
        self.host('other', VCPU=1)
        mine = self.book('booked', 0, 1000, VCPU=1)
        self.book('other', 1000, 2000, 'other', VCPU=1)
        self.assertEqual(('booked', {}), self.fits(mine, VCPU=1))
        self.book('other', 999, 1000, VCPU=1, running=True)
        self.assertEqual(('booked', {'other': 0}), self.fits(mine, VCPU=1))

    def test_a_leased_server_may_go_to_its_host_whatever_is_there(self):
        self.host('one', usage={'VCPU': 9}, VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('one', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.fits(mine, VCPU=1))

    def test_a_booking_does_not_stand_in_its_own_way(self):
        self.host('one', VCPU=3)
        mine = self.book('one', 0, 10, VCPU=2)
        self.book('one', 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.fits(mine, VCPU=2))
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=2))

    def test_servers_of_a_reservation_may_change_places(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=2)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, VCPU=1)
        for name in ('one', 'two'):
            self.book(name, 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1, 'two': 1}),
                         self.fits(mine, VCPU=1))

    def test_a_server_of_the_reservation_that_runs_has_its_place(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'two': 0}), self.fits(mine, VCPU=1))

    def test_a_server_that_lost_its_host_is_judged_until_its_end(self):
        self.host('one', VCPU=1)
        mine = self.book(None, 0, 100, VCPU=1)
        self.book('one', 100, 200, reservation='other', VCPU=1)
        self.assertEqual((None, {}), self.fits(mine, VCPU=1))
        self.book('one', 50, 60, reservation='other', VCPU=1)
        self.assertEqual((None, {'one': 0}), self.fits(mine, VCPU=1))

    def test_an_overdue_running_server_is_still_there(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -1, running=True, VCPU=1)
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=1))

    def test_what_is_over_and_does_not_run_is_forgotten(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual((None, {}), self.fits(VCPU=1))


class TestMoves(AdmissionTestCase):
    """Servers of a reservation that stay together, or apart, move."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)

    def fits(self, server_id, affinity):
        """The hosts on which a server may be, of those that are there."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).where(
                models.Reservation.id == 'reservation').values(
                params={'affinity': affinity}))
        found = self.eligibility.for_server(
            server_id, {'VCPU': 1}, self.scalars(models.Host.uuid))
        return {host.name for host in self.scalars(models.Host)
                if found.by_host.get(host.uuid, found.elsewhere) >= 1}

    apart = functools.partialmethod(fits, affinity=False)
    together = functools.partialmethod(fits, affinity=True)

    def place(self, host, server=True, **values):
        """A place that a server has; it runs, if nothing else is said."""
        server_id = self.book(
            host, 0, 100, running=server and not values, VCPU=1)
        if not server:
            values['server_id'] = None
        if values:
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).where(
                    models.Booking.server_id == server_id).values(values))
        return server_id

    def move(self, server_id, host):
        """A scheduler has let a server move there."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == server_id).values(
                migrating_to=self.host_id(host)))

    def test_until_it_is_placed_a_server_keeps_to_what_is_booked(self):
        mine = self.place('one', claimed_at=None)
        self.place('two', server=False)
        self.assertEqual({'one', 'two'}, self.apart(mine))
        self.assertEqual({'one', 'two'}, self.together(mine))

    def test_apart_it_moves_to_where_no_sibling_is(self):
        mine = self.place('one')
        self.place('two')
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_placed_is_enough_to_be_there(self):
        mine = self.place('one', claimed_at=NOW)
        self.place('two', claimed_at=NOW)
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_apart_it_does_not_move_to_where_one_is_about_to_be_built(self):
        mine = self.place('one')
        self.place('two', claimed_at=None)
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_apart_a_free_place_is_no_hindrance(self):
        mine = self.place('one')
        self.place('two', server=False)
        self.book('two', 0, 100, 'other', VCPU=1)
        self.assertEqual({'one', 'two', 'three'}, self.apart(mine))

    def test_apart_two_that_move_at_once_do_not_meet(self):
        mine, other = self.place('one'), self.place('two')
        self.move(other, 'three')
        self.assertEqual({'one'}, self.apart(mine))
        # Where it wants to be itself it may try again.
        self.assertEqual({'two', 'three'}, self.apart(other))

    def test_nobody_is_built_where_a_sibling_is_about_to_arrive(self):
        self.move(self.place('one'), 'two')
        mine = self.place('two', claimed_at=None)
        self.place('three', server=False)
        self.assertEqual({'three'}, self.apart(mine))

    def test_apart_promises_to_others_are_kept(self):
        mine = self.place('one')
        self.place('two')
        self.book('three', 99, 200, 'other', VCPU=2)
        self.assertEqual({'one'}, self.apart(mine))

    def test_together_one_alone_moves_to_where_all_have_room(self):
        mine = self.place('one')
        self.place('one', server=False)
        self.book('two', 99, 200, 'other', VCPU=1)
        self.assertEqual({'one', 'three'}, self.together(mine))
        self.report(self.scalars(
            models.Host.uuid, models.Host.name == 'three')[0], 'three',
            {'VCPU': 1}, {'VCPU': 2})
        self.assertEqual({'one'}, self.together(mine))

    def test_together_the_first_goes_where_the_others_can_follow(self):
        mine, other = self.place('one'), self.place('one')
        self.book('two', 99, 200, 'other', VCPU=1)
        self.assertEqual({'one', 'three'}, self.together(mine))
        self.move(mine, 'three')
        self.assertEqual({'one', 'three'}, self.together(other))
        self.host('four', VCPU=9)
        self.assertEqual({'one', 'three'}, self.together(other))

    def test_together_they_follow_one_that_has_moved(self):
        mine = self.place('one')
        self.place('two')
        self.assertEqual({'one', 'two'}, self.together(mine))

    def test_together_places_elsewhere_are_not_waited_for(self):
        """A place without a host is not promised any more."""
        mine = self.place('one')
        self.place(None, server=False)
        self.book('two', 0, 100, 'other', VCPU=1)
        self.assertEqual({'one', 'two', 'three'}, self.together(mine))
