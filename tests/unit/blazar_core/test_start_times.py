# SPDX-License-Identifier: Apache-2.0

"""The times at which there is capacity, and for how many servers."""

import collections
import math

import fixtures
from hypothesis import strategies as st

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import selection
from blazar_core.capacity import start_times
from blazar_core.capacity import timelines
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from tests import databases
from tests import driven
from tests import examples
from tests.unit import base
from tests.unit.blazar_core import admissions_base
from tests.unit.blazar_core import oracle
from tests.unit.blazar_core import worlds

load_tests = databases.load_tests
NOW = base.NOW
ONLY_SQLITE = [('sqlite', {'kind': 'sqlite'})]


class TestForServerAgainstBruteForce(admissions_base.AgainstBruteForce):

    #: More than any host of the examples can take.
    MANY = 20

    def eligibility(self, admitting):
        return eligibility.Eligibility(
            self.database, admitting._clock, admitting.index)

    def test_server_fits_where_reservations_are_kept(self):
        rooms = collections.Counter()

        def check(world, resources, own, followed):
            server_id = f'server-{own}'
            booked, judged, elsewhere, _some = self.in_database(
                world, followed, lambda admitting: self.eligibility(
                    admitting).for_server(
                        server_id, resources,
                        self.scalars(models.Host.uuid)))
            if own == 10:
                # A server without a booking has the same result.
                self.assertEqual(
                    (booked, judged, elsewhere, _some), self.in_database(
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
            self.assertGreater(rooms[room], examples.many(self.count) // 40)

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


class TestAvailability(admissions_base.AdmissionTestCase):

    def available(self, start=0, end=100, duration=10, most=100, count=9,
                  **demand):
        found, known = self.admission.starts.availability(
            model.Demand({'VCPU': 1}, count, **demand),
            model.Window(NOW + start, NOW + end), duration, most)
        return [(time - NOW, fits) for time, fits in found], (
            known and known - NOW)

    def test_availability_changes_at_starts_and_ends_of_bookings(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 20, VCPU=2)
        self.book('one', 50, 60, VCPU=1)
        self.assertEqual(([(0, 0), (20, 2), (41, 1), (60, 2)], None),
                         self.available())
        self.assertEqual(([(0, 0), (20, 1)], None),
                         self.available(count=1))

    def test_availability_is_truncated_with_continuation(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 20, VCPU=2)
        self.book('one', 50, 60, VCPU=1)
        self.assertEqual(([(0, 0), (20, 2)], 41), self.available(most=2))

    def test_overstaying_servers_count_for_a_minute(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -50, running=True, VCPU=1)
        self.assertEqual(([(0, 0), (60, 1)], None), self.available())
        self.assertEqual(([(0, 0)], None), self.available(end=60))

    def test_availability_respects_affinity(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=3)
        for affinity, fits in ((model.Affinity.NONE, 6),
                               (model.Affinity.SAME, 3),
                               (model.Affinity.DIFFERENT, 2)):
            self.assertEqual(([(0, fits)], None),
                             self.available(affinity=affinity))

    def test_only_permitted_hosts_count(self):
        uuid = self.host('one', VCPU=3)
        self.host('two', VCPU=2)
        self.assertEqual(([(0, 3)], None), self.available(
            hosts=frozenset([uuid])))
        self.assertEqual(([(0, 2)], None), self.available(
            avoid=frozenset([uuid])))


class TestAvailabilityAgainstBruteForce(admissions_base.AgainstBruteForce):

    def test_availability_matches_brute_force(self):
        seen = collections.Counter()

        def check(question, duration):
            world, demand, window, asked = question
            window = model.Window(max(window.start, world.now),
                                  max(window.start, world.now) + 15)
            found, more = self.in_database(
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
        self.assertGreater(len(seen), 1)


class SlowClock(driven.ManualClock):
    """A clock whose elapsed time a test sets."""

    spent = 0.0

    def elapsed(self):
        return self.spent


class TestSearchCost(admissions_base.AdmissionTestCase):
    """The cost of a request, for itself and for concurrent ones."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        self.clock = SlowClock(NOW)
        self.admission = admissions.Admission(self.database, self.clock)
        self.searches = []

    def note(self, name, cost=0.0, also=lambda: None):
        """Record each search of the timeline, and let it take some time."""
        search = getattr(timelines.Timeline, name)

        def noted(*args, **kwargs):
            self.searches.append(name)
            self.clock.spent += cost
            also()
            return search(*args, **kwargs)

        self.useFixture(fixtures.MonkeyPatch(
            f'blazar_core.capacity.timelines.Timeline.{name}', noted))

    def kinds(self, number):
        """Return different demands; each fits if there is a VCPU."""
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

    def test_demands_that_never_fit_are_not_retried(self):
        self.host('one', VCPU=2, MEMORY_MB=1000)
        self.book('one', 0, 10 ** 8, VCPU=1)
        self.note('fits')
        self.note('earliest')
        refusal = self.quote(self.kinds(3))
        self.assertEqual(refusals.Refusal(refusals.Reason.TOO_BIG, 3, 1, None),
                         refusal)
        # Now, and after the last booking.
        self.assertLessEqual(len(self.searches), 2 * (2 * 3))

    def test_growing_lease_searches_once_for_pinned_bookings(self):
        ids = []
        for number in range(30):
            self.host(f'host{number}', VCPU=2)
            ids.append(self.host_id(f'host{number}'))
        self.note('fits')
        self.admission.pick_all(
            [model.Demand({'VCPU': 1})], model.Window(NOW, NOW + 10),
            kept=[selection.Pinned({'VCPU': 1}, dict.fromkeys(ids, 1))])
        self.assertEqual(2, len(self.searches))

    def test_long_search_stops_with_partial_result(self):
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

    def test_search_for_one_kind_has_no_time_limit(self):
        self.host('one', VCPU=2)
        self.book('one', 0, 50, VCPU=2)
        self.note('earliest', cost=100)
        self.assertEqual(NOW + 50, self.quote(
            [model.Demand({'VCPU': 1})] * 2).next_start)

    def come(self):
        """Start another request, which has to wait."""
        if self.others:
            return
        self.others.append(self.in_thread(self.look))
        self.wait_for(self.admission.index._turn.locked, 'him to wait')

    def look(self):
        with self.admission.index.fresh():
            self.searches.append('other')

    def test_other_requests_proceed_between_search_steps(self):
        self.host('one', VCPU=2, MEMORY_MB=1000)
        self.book('one', 0, 10 ** 6, VCPU=1)
        self.others = []
        self.note('earliest', also=self.come)
        self.assertIsNotNone(self.quote(self.kinds(2)).next_start)
        self.assertEqual(['earliest', 'other', 'earliest'],
                         self.searches[:3])

    def test_other_requests_proceed_while_properties_are_matched(self):
        self.host('one', VCPU=2)

        class Slow(host_properties.Comparison):
            def matches(one, host):
                self.in_thread(self.look)
                return self.wait_for(lambda: self.searches, 'the other')

        self.assertEqual(['one'], self.pick(
            0, 10, properties=Slow('=', 'a', ())))

    def busy_and_free(self, number):
        """Add a host with many changes, each at another time."""
        self.host('one', VCPU=9)
        for one in range(number):
            self.book('one', 10 + 20 * one, 20 + 20 * one, VCPU=one % 8 + 1)

    def availability(self, start=0, most=1000):
        found, known = self.admission.starts.availability(
            model.Demand({'VCPU': 1}, 9), model.Window(
                NOW + start, NOW + 1000), 1, most)
        return [(time - NOW, fits) for time, fits in found], (
            known and known - NOW)

    def test_other_requests_proceed_during_availability_search(self):
        self.busy_and_free(12)
        self.others = []
        self.note('fits', also=self.come)
        self.availability()
        self.assertEqual(['fits'] * start_times.SLICE + ['other'],
                         self.searches[:start_times.SLICE + 1])

    def test_slow_availability_is_returned_in_parts(self):
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

    def test_availability_can_be_paged_row_by_row(self):
        self.busy_and_free(3)
        every, _known = self.availability()
        pages, start = [], 0
        while start is not None:
            found, start = self.availability(start, most=1)
            pages += found
        self.assertEqual(every, pages)

    def test_continuation_advances_without_changes(self):
        self.host('one', VCPU=1)
        self.host('full', usage={'VCPU': 1}, VCPU=1)
        for one in range(50):
            self.book('full', 10 + 20 * one, 20 + 20 * one, VCPU=1)
        self.note('fits', cost=0.2)
        found, known = self.availability()
        self.assertEqual([(0, 1)], found)
        self.assertGreater(known, 0)


class TestForServer(admissions_base.AdmissionTestCase):

    def fits(self, server_id='unleased', **resources):
        """Return the booked host, and how many fit by host name."""
        booked, rooms, *_others = self.eligibility.for_server(
            server_id, resources, self.scalars(models.Host.uuid))
        names = {host.uuid: host.name for host in self.scalars(models.Host)}
        return names.get(booked), {
            names[uuid]: room for uuid, room in rooms.items()}

    def test_hosts_without_bookings_are_left_to_nova(self):
        self.host('full', usage={'VCPU': 9}, VCPU=1)
        self.assertEqual((None, {}), self.fits(VCPU=1))

    def test_open_ended_server_does_not_use_later_reservations(self):
        self.host('one', VCPU=4)
        self.book('one', 5000, 6000, VCPU=2)
        self.assertEqual((None, {'one': 2}), self.fits(VCPU=1))
        self.assertEqual((None, {'one': 1}), self.fits(VCPU=2))
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=3))

    def test_leased_server_may_use_capacity_reserved_after_its_end(self):
        self.host('booked', VCPU=1)
        self.host('other', VCPU=1)
        mine = self.book('booked', 0, 1000, VCPU=1)
        self.book('other', 1000, 2000, 'other', VCPU=1)
        self.assertEqual(('booked', {}), self.fits(mine, VCPU=1))
        self.book('other', 999, 1000, VCPU=1, running=True)
        self.assertEqual(('booked', {'other': 0}), self.fits(mine, VCPU=1))

    def test_leased_server_always_fits_on_its_booked_host(self):
        self.host('one', usage={'VCPU': 9}, VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('one', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.fits(mine, VCPU=1))

    def test_booking_does_not_block_its_own_server(self):
        self.host('one', VCPU=3)
        mine = self.book('one', 0, 10, VCPU=2)
        self.book('one', 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1}), self.fits(mine, VCPU=2))
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=2))

    def test_servers_of_a_reservation_may_swap_hosts(self):
        self.host('one', VCPU=2)
        self.host('two', VCPU=2)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, VCPU=1)
        for name in ('one', 'two'):
            self.book(name, 0, 10, reservation='other', VCPU=1)
        self.assertEqual(('one', {'one': 1, 'two': 1}),
                         self.fits(mine, VCPU=1))

    def test_running_sibling_keeps_its_capacity(self):
        self.host('one', VCPU=1)
        self.host('two', VCPU=1)
        mine = self.book('one', 0, 10, VCPU=1)
        self.book('two', 0, 10, running=True, VCPU=1)
        self.assertEqual(('one', {'two': 0}), self.fits(mine, VCPU=1))

    def test_server_without_host_is_checked_until_its_end(self):
        self.host('one', VCPU=1)
        mine = self.book(None, 0, 100, VCPU=1)
        self.book('one', 100, 200, reservation='other', VCPU=1)
        self.assertEqual((None, {}), self.fits(mine, VCPU=1))
        self.book('one', 50, 60, reservation='other', VCPU=1)
        self.assertEqual((None, {'one': 0}), self.fits(mine, VCPU=1))

    def test_overdue_running_server_still_counts(self):
        self.host('one', VCPU=1)
        self.book('one', -100, -1, running=True, VCPU=1)
        self.assertEqual((None, {'one': 0}), self.fits(VCPU=1))

    def test_past_booking_without_running_server_is_ignored(self):
        self.host('one', VCPU=1)
        self.book('one', -100, 0, VCPU=1)
        self.assertEqual((None, {}), self.fits(VCPU=1))
