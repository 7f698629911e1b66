# SPDX-License-Identifier: Apache-2.0

import collections
from unittest import mock

import fixtures
from hypothesis import strategies as st
import sqlalchemy as sa

from blazar_core.capacity import selection
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from tests import databases
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import admissions_base
from tests.unit.blazar_core import oracle
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests
NOW = base.NOW


class TestPickAgainstBruteForce(admissions_base.AgainstBruteForce):

    def test_admission_matches_brute_force(self):
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
                        # Raises if it does not fit there.
                        start = exc.refusal.next_start
                        admitting.pick(demand, model.Window(
                            start, start + window.end - window.start))
                else:
                    self.assertIsNone(quoted)
                    answers['admitted'] += 1
                    # A demand with a minimum gets as many as there are.
                    self.assertEqual(oracle.most(
                        world.hosts, world.bookings(), asked, window.start,
                        window.end) if demand.least else demand.count,
                        len(picked))
                    self.assertTrue(oracle.fits(
                        [host_id - 1000 for host_id in picked], world.hosts,
                        world.bookings(), asked, window.start, window.end))

            self.in_database(world, followed, work)

        self.for_all(check, worlds.questions(), st.booleans())
        # Each answer occurs often enough in the examples.
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

    def test_searching_first_hosts_gives_result_of_full_search(self):
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

            self.in_database(world, False, work)

        self.for_all(check, worlds.questions(),
                     st.sets(st.integers(1000, 1004), max_size=2))
        self.assertGreater(looks[True], examples.many(self.count) // 20)

    def test_replaced_bookings_do_not_count(self):
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

            # The bookings are counted again afterwards.
            after = self.in_database(world, False, ask)
            fits = oracle.most(
                world.hosts, world.bookings(), asked._replace(
                    count=demand.fewest().count), window.start, window.end)
            self.assertEqual(demand.fewest().count if after is None else
                             after.fits_now, fits)

        self.for_all(check, worlds.questions(), st.sets(st.integers(0, 9)),
                     count=150)


class TestPick(admissions_base.AdmissionTestCase):

    def test_refusal_is_no_host_without_any_host(self):
        self.assertEqual(refusals.Refusal(refusals.Reason.NO_HOST, 2, 0, None),
                         self.refusal(0, 10, 2))

    def test_windows_that_only_touch_share_a_host(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.book('one', 20, 30, VCPU=1)
        self.assertEqual(['one'], self.pick(10, 20))
        self.refusal(9, 20)
        self.refusal(10, 21)

    def test_lease_fits_with_consecutive_bookings(self):
        self.host('one', VCPU=2)
        for start in (0, 10, 20):
            self.book('one', start, start + 10, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 30))

    def test_open_ended_usage_never_becomes_free(self):
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

    def test_hosts_of_lost_race_are_picked_last(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=2)
        lost = {self.host_id('one')}
        self.assertEqual(['one'], self.pick(0, 10))
        self.assertEqual(['two'], self.pick(0, 10, last=lost))
        self.assertEqual(['two', 'two', 'one'],
                         self.pick(0, 10, 3, last=lost))

    def test_affinity_puts_servers_on_one_host(self):
        self.host('small', VCPU=2)
        self.host('large', VCPU=3)
        self.assertEqual(['large'] * 3, self.pick(
            0, 10, 3, affinity=model.Affinity.SAME))
        self.assertEqual(3, self.refusal(
            0, 10, 4, affinity=model.Affinity.SAME).fits_now)

    def test_anti_affinity_puts_servers_on_different_hosts(self):
        self.host('one', VCPU=9)
        self.host('two', VCPU=9)
        apart = {'affinity': model.Affinity.DIFFERENT}
        self.assertEqual(['one', 'two'], sorted(
            self.pick(0, 10, 2, **apart)))
        self.assertEqual(2, self.refusal(0, 10, 3, **apart).fits_now)
        self.assertEqual(['one', 'one', 'two', 'two'], sorted(
            self.pick(0, 10, 4, per_host=2, **apart)))

    def test_host_must_offer_every_resource_class(self):
        self.host('plain', VCPU=4)
        self.host('special', VCPU=4, CUSTOM_GPU=1)
        self.assertEqual(['special'], self.pick(
            0, 10, resources={'VCPU': 1, 'CUSTOM_GPU': 1}))

    def test_disk_from_a_shared_provider_is_left_to_nova(self):
        self.host('one', VCPU=4)
        self.assertEqual(['one'], self.pick(
            0, 10, resources={'VCPU': 1, 'DISK_GB': 999}))

    def test_local_disk_is_counted(self):
        self.host('one', VCPU=4, DISK_GB=10)
        self.refusal(0, 10, resources={'VCPU': 1, 'DISK_GB': 11})

    def test_refusal_is_no_host_if_no_host_is_allowed(self):
        uuid = self.host('one', VCPU=4)
        for limits in ({'hosts': frozenset()}, {'avoid': frozenset(
            [uuid])}, {'hosts': frozenset(
                ['unheard of'])}, {'properties': host_properties.Comparison(
                    '=', 'a', ('b',))}):
            self.assertEqual(
                refusals.Refusal(refusals.Reason.NO_HOST, 1, 0, None),
                self.refusal(0, 10, **limits))

    def test_overstaying_server_keeps_its_capacity_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertEqual(NOW + 60, self.refusal(0, 10).next_start)
        self.assertEqual(['one'], self.pick(60, 70))

    def test_past_booking_without_running_server_takes_no_capacity(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))

    def test_booking_without_host_takes_no_capacity(self):
        self.host('one', VCPU=1)
        self.book(None, 0, 10, VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))

    def test_new_bookings_and_hosts_are_seen_immediately(self):
        self.host('one', VCPU=1)
        self.assertEqual(['one'], self.pick(0, 10))
        self.book('one', 0, 10, VCPU=1)
        self.assertEqual(NOW + 10, self.refusal(0, 10).next_start)
        self.host('two', VCPU=1)
        self.assertEqual(['two'], self.pick(0, 10))


class TestSeveralDemands(admissions_base.AdmissionTestCase):

    def pick_all(self, *demands, start=0, end=10):
        return [list(map(self.name_of, hosts)) for hosts in
                self.admission.pick_all(demands, model.Window(
                    NOW + start, NOW + end))]

    def test_demands_are_admitted_all_or_none(self):
        self.host('one', VCPU=4)
        self.assertEqual([['one'] * 2, ['one']], self.pick_all(
            model.Demand({'VCPU': 1}, 2), model.Demand({'VCPU': 2})))
        refused = self.assertRaises(
            errors.Refused, self.pick_all, model.Demand({'VCPU': 1}, 3),
            model.Demand({'VCPU': 2}))
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 4, 3, None),
                         refused.refusal)
        # The failed attempt has left nothing.
        self.assertEqual(['one'] * 4, self.pick(0, 10, 4))

    def test_demand_with_fewest_hosts_is_placed_first(self):
        uuid = self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        anywhere, there = model.Demand({'VCPU': 1}), model.Demand(
            {'VCPU': 1}, hosts=frozenset([uuid]))
        self.assertEqual([['two'], ['one']], self.pick_all(anywhere, there))
        self.assertEqual([['one'], ['two']], self.pick_all(there, anywhere))

    def test_all_demands_fit_at_reported_next_start(self):
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

    def test_next_demand_prefers_hosts_of_the_lease(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=2, CUSTOM_GPU=1)
        self.assertEqual([['two'], ['two']], self.pick_all(
            model.Demand({'VCPU': 1}),
            model.Demand({'VCPU': 1, 'CUSTOM_GPU': 1})))

    def test_equal_demands_are_combined(self):
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

    def test_pinned_bookings_count_with_new_demands(self):
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


class TestQuote(admissions_base.AdmissionTestCase):

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
