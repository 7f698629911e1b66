# SPDX-License-Identifier: Apache-2.0

"""The timeline, compared with a calendar of every single second."""

import collections
import dataclasses
import random
from unittest import mock

import fixtures
import hypothesis
from hypothesis import strategies as st
import numpy as np
from oslotest import base

from blazar_core.capacity import search
from blazar_core.capacity import step_functions
from blazar_core.capacity import timelines
from blazar_core.common import model
from tests import examples
from tests import timeline_size

CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB', 'CUSTOM_GPU', 'CUSTOM_HOST')
#: Bookings end before this second, or never: later ones are equal to it.
LAST = 30
#: The end of endless bookings, in the oracle's seconds.
EVER = 10 ** 6
#: The length of the oracle's second in the timeline, and its origin: real
#: seconds, or weeks from about now, so that windows are years long.
SCALES = ((1, 0), (604_800, 1_800_000_000))


class Calendar:
    """The oracle: how much is booked, for every host, class and second."""

    def __init__(self):
        self.levels = collections.defaultdict(
            lambda: collections.defaultdict(int))
        self.capacity = {}
        self.usage = {}

    def set_host(self, host, capacity, usage):
        self.capacity[host], self.usage[host] = capacity, usage

    def apply(self, host, start, end, resources, sign):
        self.capacity.setdefault(host, {})
        self.usage.setdefault(host, {})
        for second in range(start, min(end, LAST + 1)):
            for rc, amount in resources.items():
                self.levels[host, rc][second] += sign * amount

    def forget(self, before):
        """Replace the past by the level at that second."""
        for level in self.levels.values():
            for second in range(before):
                level[second] = level[before]

    def level(self, host, rc, second):
        return self.levels[host, rc][min(second, LAST)]

    def over(self, host, rc, second):
        """Return whether more is booked than is free."""
        capacity = self.capacity[host].get(rc)
        if capacity is None and rc == 'DISK_GB':
            return False
        free = 0 if capacity is None else (
            capacity - self.usage[host].get(rc, 0))
        return self.level(host, rc, second) > max(free, 0)

    def is_idle(self, host, start, end):
        """Return whether nothing of a host is used, if it has any capacity."""
        has = [rc for rc, total in self.capacity[host].items() if total]
        return bool(has) and all(
            self.usage[host].get(rc, 0) + self.level(host, rc, second) <= 0
            for rc in has
            for second in range(start, min(end, max(LAST, start) + 1)))

    def fits(self, host, needs, times, start, end):
        if needs == model.WHOLE:
            return times <= 1 and self.is_idle(host, start, end)
        for rc, need in needs.items():
            if need == 0:
                continue
            if rc not in self.capacity[host]:
                if rc == 'DISK_GB':
                    continue
                return False
            for second in range(start, min(end, max(LAST, start) + 1)):
                used = (self.usage[host].get(rc, 0) +
                        self.level(host, rc, second) + need * times)
                if used > self.capacity[host][rc]:
                    return False
        return True

    def room(self, host, needs, most, start, end):
        times = 0
        while times < most and self.fits(host, needs, times + 1, start, end):
            times += 1
        return times

    def possible(self, hosts, question, start, end):
        """Return whether the servers of a question can be placed."""
        if question.affinity is model.Affinity.SAME:
            return any(self.fits(host, question.needs, question.count, start,
                                 end) for host in hosts)
        most = question.count
        if question.affinity is model.Affinity.DIFFERENT:
            most = question.per_host
        return sum(self.room(host, question.needs, most, start, end)
                   for host in hosts) >= question.count

    def most(self, hosts, question, start):
        """Return how many servers fit, up to a few more than asked for."""
        count, end = question.count, self.end(question, start)
        while count < question.count + 6 and self.possible(
                hosts, dataclasses.replace(question, count=count + 1),
                start, end):
            count += 1
        return count

    def end(self, question, start):
        return EVER if question.endless else start + question.length

    def earliest(self, hosts, question):
        for start in range(question.start, max(question.start, LAST) + 1):
            if self.possible(hosts, question, start,
                             self.end(question, start)):
                return start
        return None


@dataclasses.dataclass
class SetHost:
    host: int
    capacity: dict
    usage: dict


@dataclasses.dataclass
class Book:
    """A booking; an Undo with its number removes it."""

    host: int
    start: int
    length: int
    endless: bool
    resources: dict
    sign: int = 1

    @property
    def end(self):
        return EVER if self.endless else self.start + self.length


@dataclasses.dataclass
class Undo:
    """Remove an earlier booking, if there is any."""

    number: int


@dataclasses.dataclass
class Load:
    bookings: list


@dataclasses.dataclass
class Forget:
    later: int


@dataclasses.dataclass
class Question:
    needs: dict
    count: int
    affinity: model.Affinity
    per_host: int
    start: int
    length: int
    endless: bool
    hosts: set | None
    masked: bool

    def demand(self):
        return model.Demand(self.needs, self.count, self.affinity,
                            self.per_host)


amounts = st.dictionaries(st.sampled_from(CLASSES[:4]), st.integers(0, 3))
needs = st.one_of(
    st.builds(lambda vcpus: {'VCPU': vcpus}, st.integers(1, 3)),
    st.builds(lambda vcpus, memory: {'VCPU': vcpus, 'MEMORY_MB': memory},
              st.integers(1, 3), st.integers(1, 4)),
    amounts)
capacities = st.one_of(
    st.builds(lambda vcpus: {'VCPU': vcpus}, st.integers(3, 9)),
    st.builds(lambda vcpus, more: {'VCPU': vcpus, **more},
              st.integers(3, 9), st.dictionaries(
                  st.sampled_from(CLASSES[1:4]), st.integers(2, 9))),
    st.builds(lambda vcpus, memory: {'VCPU': vcpus, 'MEMORY_MB': memory},
              st.integers(3, 9), st.integers(4, 12)),
    st.just({}))
numbers = st.integers(1, 6)
# Some hosts never have a booking.
set_hosts = st.builds(SetHost, st.integers(1, 9), capacities, st.one_of(
    st.just({}), amounts))
# Starts and ends on few seconds: ties, and adjacent windows.
bookings = st.builds(
    Book, numbers, st.integers(0, 18), st.integers(1, 10),
    st.sampled_from([False] * 7 + [True]), needs)
#: Removed before it was booked, as when changes arrive out of order.
early = st.builds(
    Book, numbers, st.integers(0, 18), st.integers(1, 10), st.just(False),
    needs, st.just(-1))
when = (
    st.integers(1, 3), st.integers(0, LAST + 2), st.integers(1, 15),
    st.sampled_from([False] * 5 + [True]),
    st.one_of(st.none(), st.sets(st.integers(1, 7))), st.booleans())
questions = st.one_of(
    st.builds(Question, needs, st.integers(1, 6),
              st.sampled_from(model.Affinity), *when),
    st.builds(Question, st.just(model.WHOLE), st.integers(1, 4),
              st.just(model.Affinity.NONE), *when))
changes = st.one_of(
    bookings, bookings, bookings, early, set_hosts,
    st.builds(Undo, st.integers(0, 40)),
    st.builds(Load, st.lists(bookings, max_size=25)),
    st.builds(Forget, st.integers(0, 4)))
several = st.builds(
    lambda hosts, first, later: [*hosts, first, *later],
    st.lists(set_hosts, min_size=3, max_size=9,
             unique_by=lambda one: one.host),
    st.builds(Load, st.lists(bookings, max_size=40)),
    st.lists(st.one_of(changes, questions), min_size=5, max_size=30))


def _whole(change, other):
    """Replace amounts by whole hosts, and some by another class."""
    if isinstance(change, Load):
        return Load([_whole(one, other) for one in change.bookings])
    if isinstance(change, Book) and other and change.start % 2:
        return dataclasses.replace(change, resources={'VCPU': 1})
    if isinstance(change, Book):
        return dataclasses.replace(change, resources={'CUSTOM_HOST': 1})
    if isinstance(change, SetHost):
        return SetHost(change.host, dict.fromkeys(
            ['CUSTOM_HOST'][:len(change.capacity)], 1), {})
    if isinstance(change, Question):
        return dataclasses.replace(
            change, needs=model.WHOLE if change.needs == model.WHOLE
            else {'CUSTOM_HOST': 1})
    return change


stories = st.one_of(several, st.builds(
    lambda changes, early, other: [
        _whole(one, other) for one in changes
        if early or getattr(one, 'sign', 1) == 1],
    several, st.booleans(), st.booleans()))
shapes = st.fixed_dictionaries({
    'slack': st.sampled_from([1, 8, 100]), 'spare': st.sampled_from([0, 64]),
    'piece': st.sampled_from([1, 20, 2 ** 16])})

CASES = examples.repeatable(30)


class Story:
    """The timeline and the oracle, with the same changes."""

    def __init__(self, scale, shape):
        self.second, self.zero = scale
        self.timeline = timelines.Timeline(**shape)
        self.calendar = Calendar()
        self.booked = []
        self.since = 0

    def tell(self, change):
        getattr(self, '_' + type(change).__name__.lower())(change)

    def at(self, second):
        if second is None:
            return None
        return self.zero + second * self.second

    def window(self, start, end):
        return model.Window(self.at(start), model.FOREVER if end == EVER
                            else self.at(end))

    def _sethost(self, change):
        self.timeline.set_host(change.host, change.capacity, change.usage)
        self.calendar.set_host(change.host, change.capacity, change.usage)

    def _apply(self, one, sign):
        self.timeline.apply(one.host, self.window(one.start, one.end),
                            one.resources, sign)
        self._in_calendar(one, sign)

    def _in_calendar(self, one, sign):
        if one.end <= self.since:
            # It has ended: that time is never asked about again.
            self.calendar.apply(one.host, 0, 0, {}, sign)
            return
        start = 0 if one.start <= self.since else one.start
        self.calendar.apply(one.host, start, one.end, one.resources, sign)

    def _book(self, one):
        self._apply(one, one.sign)
        self.booked.append(one)

    def _undo(self, change):
        if self.booked:
            one = self.booked.pop(change.number % len(self.booked))
            self._apply(one, -one.sign)

    def _load(self, change):
        by_host = collections.defaultdict(list)
        for one in change.bookings:
            by_host[one.host % (1 + len(change.bookings) % 3)].append(one)
        self.timeline.load(map(self._block, by_host.values()))
        for one in change.bookings:
            self._in_calendar(one, 1)
            self.booked.append(one)

    def _block(self, bookings):
        return timelines.Block(
            [one.host for one in bookings],
            [self.at(one.start) for one in bookings],
            [self.window(one.start, one.end).end for one in bookings],
            {rc: [one.resources.get(rc, 0) for one in bookings]
             for rc in CLASSES
             if any(rc in one.resources for one in bookings)})

    def _forget(self, change):
        self.since += change.later
        self.timeline.forget(self.at(self.since))
        self.calendar.forget(self.since)

    def hosts(self, question):
        """Return the hosts of a question for the timeline, and as numbers."""
        known = list(self.timeline.ids)
        if question.hosts is None:
            return None, known
        asked = question.hosts
        if question.masked:
            asked = self.timeline.mask(asked)
        return asked, [one for one in known if one in question.hosts]

    def levels(self):
        """Return all levels of the timeline, host by host."""
        return {host: [self.timeline.peak(host, self.window(
            second, second + 1)) for second in range(LAST + 2)]
            for host in self.timeline.ids}


class TimelineTest(base.BaseTestCase):

    scale = SCALES[0]

    def _story(self, shape):
        return Story(self.scale, shape)

    @CASES
    @hypothesis.given(stories, shapes)
    def test_fits_match_check_of_every_second(
            self, changes, shape):
        def ask(story, one):
            asked, hosts = story.hosts(one)
            end = story.calendar.end(one, one.start)
            window = story.window(one.start, end)
            most = one.demand().most_per_host()
            expected = {host: story.calendar.room(
                host, one.needs, most, one.start, end)
                if host in hosts else 0 for host in story.timeline.ids}
            for peaks in (None, story.timeline.peaks(window)):
                rooms = story.timeline.fits(
                    one.demand(), window, asked, peaks=peaks)
                self.assertEqual(
                    expected, dict(zip(story.timeline.ids, rooms.tolist())))

        self._run(changes, shape, ask)

    @CASES
    @hypothesis.given(stories, shapes)
    def test_earliest_start_is_the_first_second_at_which_all_fit(
            self, changes, shape):
        self._run(changes, shape, self._ask_for_more)

    def test_earliest_start_in_full_calendars(self):
        for seed in range(examples.many(15)):
            chance = random.Random(seed)
            whole, early = chance.random() < 0.5, chance.random() < 0.3
            story = self._story({'piece': chance.choice([1, 20, 2 ** 16]),
                                 'spare': chance.choice([0, 1024])})
            for change in _full(chance, whole):
                story.tell(change)
            for _number in range(10):
                story.tell(Undo(chance.randrange(100)))
                story.tell(_some_booking(
                    chance, whole, -1 if early else 1))
                needs = {'VCPU': 1 if whole else chance.randint(1, 3)}
                if not whole and chance.random() < 0.5:
                    needs['MEMORY_MB'] = chance.randint(1, 5)
                self._ask_for_more(story, Question(
                    needs, chance.randint(1, 8),
                    chance.choice(list(model.Affinity)), 1,
                    chance.randint(0, 12), chance.randint(1, 6),
                    chance.random() < 0.1,
                    chance.choice([None, {1, 2, 3, 4}]), False))

    def _ask_for_more(self, story, one):
        """Ask, and again for one server more than fit at that start.

        So the answer mostly requires a search.
        """
        asked, hosts = story.hosts(one)
        length = model.FOREVER if one.endless else one.length * story.second
        for _time in range(5):
            start = story.calendar.earliest(hosts, one)
            self.assertEqual(story.at(start), story.timeline.earliest(
                one.demand(), length, story.at(one.start), asked))
            if start is None:
                break
            one = dataclasses.replace(
                one, count=story.calendar.most(hosts, one, start) + 1)

    @CASES
    @hypothesis.given(stories, shapes)
    def test_peak_is_the_highest_level_of_all_seconds(self, changes, shape):
        def ask(story, one):
            end = story.calendar.end(one, one.start)
            for host in story.timeline.ids:
                peak = story.timeline.peak(
                    host, story.window(one.start, end))
                self.assertEqual(set(story.timeline.capacity), set(peak))
                for rc in CLASSES:
                    self.assertEqual(
                        max(story.calendar.level(host, rc, second)
                            for second in range(
                                one.start,
                                min(end, one.start + LAST + 1))),
                        peak.get(rc, 0))

        self._run(changes, shape, ask)

    @CASES
    @hypothesis.given(stories, shapes)
    def test_overfull_hosts_match_check_of_every_second(
            self, changes, shape):
        def ask(story, one):
            seconds = range(one.start, max(LAST, one.start) + 1)
            self.assertEqual(
                [host for host in story.timeline.ids
                 if any(story.calendar.over(host, rc, second)
                        for rc in CLASSES for second in seconds)],
                story.timeline.overfull(
                    story.window(one.start, one.start + 1).start))

        self._run(changes, shape, ask)

    @CASES
    @hypothesis.given(stories, shapes)
    def test_busy_hosts_match_check_of_every_second(
            self, changes, shape):
        def ask(story, one):
            end = story.calendar.end(one, one.start)
            taken = [
                [second for second in range(0, max(LAST, one.start) + 1)
                 if any(story.calendar.level(host, rc, second) > 0
                        for rc in CLASSES)]
                for host in story.timeline.ids]
            self.assertEqual(
                [any(one.start <= second < end for second in seconds)
                 for seconds in taken],
                story.timeline.busy(story.timeline.peaks(
                    story.window(one.start, end))).tolist())
            until = story.timeline.busy_until(
                np.arange(len(story.timeline))).tolist()
            for host, seconds, instant in zip(
                    story.timeline.ids, taken, until):
                if any(story.calendar.usage[host].values()) or (
                        LAST in seconds):
                    self.assertEqual(model.FOREVER, instant)
                elif seconds and seconds[-1] >= story.since:
                    self.assertEqual(story.at(seconds[-1] + 1), instant)

        # With a negative level, an end does not end a usage.
        self._run([one for one in changes
                   if getattr(one, 'sign', 1) == 1], shape, ask)

    @CASES
    @hypothesis.given(stories, shapes, shapes, st.randoms())
    def test_order_of_changes_does_not_matter(
            self, changes, shape, other_shape, chance):
        changes = [one for one in changes
                   if isinstance(one, (Book, Load, SetHost))]
        story, other = self._story(shape), self._story(other_shape)
        for one in changes:
            story.tell(one)
        single = [(each, sign) for one in changes
                  if not isinstance(one, SetHost)
                  for each in (one.bookings if isinstance(one, Load)
                               else [one])
                  for sign in (each.sign, 1, -1)]
        chance.shuffle(single)
        for one, sign in single:
            other._apply(one, sign)
        for host in other.timeline.ids:
            self.assertEqual(
                _plain(story.levels().get(host, [])),
                _plain(other.levels()[host]))
        self.assertEqual(
            timeline_size.steps(story.timeline) - len(story.timeline),
            timeline_size.steps(other.timeline) - len(other.timeline))

    @CASES
    @hypothesis.given(st.lists(bookings, max_size=40), shapes, st.randoms())
    def test_removing_all_bookings_leaves_no_steps(
            self, booked, shape, chance):
        story = self._story(shape)
        single = [(one, sign) for one in booked for sign in (1, -1)]
        chance.shuffle(single)
        for one, sign in single:
            story._apply(one, sign)
        self.assertEqual(
            len(story.timeline), timeline_size.steps(story.timeline))

    def _run(self, changes, shape, ask):
        story = self._story(shape)
        for change in changes:
            if not isinstance(change, Question):
                story.tell(change)
            else:
                ask(story, change)


def _full(chance, whole):
    """Generate hosts that are mostly full, with gaps of some seconds."""
    size, bookings = 1 if whole else 4, []
    for host in range(1, 9):
        yield SetHost(host, {'VCPU': size, **(
            {} if whole else {'MEMORY_MB': chance.randint(4, 8)})}, {})
        for _lane in range(size):
            end = 0
            while end < 20:
                start = end + chance.choice([0, 0, 1, 2, 3, 4])
                end = start + chance.randint(1, 4)
                bookings.append(Book(host, start, end - start, False,
                                     _part(chance, whole)))
    yield Load(bookings)


def _part(chance, whole):
    if whole:
        return {'VCPU': 1}
    return {'VCPU': 1, 'MEMORY_MB': chance.randint(0, 3)}


def _some_booking(chance, whole, sign):
    return Book(chance.randint(1, 8), chance.randint(0, 20),
                chance.randint(1, 4), chance.random() < 0.1,
                _part(chance, whole), sign)


def _plain(levels):
    return [(second, rc, level) for second, each in enumerate(levels)
            for rc, level in sorted(each.items()) if level]


class YearsTest(TimelineTest):
    """The same, with windows of years."""

    scale = SCALES[1]


class SmallTest(YearsTest):
    """The same, with the optimizations for many hosts applied to a few."""

    def setUp(self):
        super().setUp()
        for where, name, value in (
                (search, 'FIRST', 1), (search, 'FEW', 0),
                (search, 'DOUBT', -10), (step_functions, 'DENSE', 10 ** 6),
                (step_functions, 'room', lambda dtype: {
                    2: 16, 4: 64, 8: 2 ** 62}[dtype.itemsize])):
            self.useFixture(fixtures.MonkeyPatch(
                f'{where.__name__}.{name}', value))


class ManyTest(base.BaseTestCase):
    """A few hundred hosts, compared with a scan of their bookings."""

    HOSTS = 200

    def setUp(self):
        super().setUp()
        self.chance = random.Random(4)
        self.timeline = timelines.Timeline()
        self.bookings = collections.defaultdict(list)

    def _fill(self, classes, most):
        """Add about 70 bookings for each host, over 100,000 seconds."""
        for host in range(self.HOSTS):
            self.timeline.set_host(host, dict.fromkeys(classes, most), {})
            for _number in range(70):
                start = self.chance.randrange(100_000)
                one = (start, start + int(self.chance.expovariate(1 / 1000))
                       + 1, {rc: self.chance.randint(1, 4)
                             for rc in classes})
                if self._room(self.bookings[host], dict(one[2]), 1, *one[:2]):
                    self.bookings[host].append(one)
        flat = [(host, *one) for host, booked in self.bookings.items()
                for one in booked]
        self.timeline.load([timelines.Block(
            [one[0] for one in flat], [one[1] for one in flat],
            [one[2] for one in flat],
            {rc: [one[3][rc] for one in flat] for rc in classes})])

    def _near(self, start, end):
        """Return the bookings of each host in a window."""
        return [[one for one in self.bookings[host]
                 if one[0] < end and start < one[1]]
                for host in range(self.HOSTS)]

    def _room(self, bookings, needs, most, start, end):
        booked = [one for one in bookings
                  if one[0] < end and start < one[1]]
        instants = [start, *(one[0] for one in booked if one[0] > start)]
        capacity = self.capacity
        for instant in instants:
            alive = [one for one in booked if one[0] <= instant < one[1]]
            for rc, need in needs.items():
                free = capacity - sum(one[2][rc] for one in alive)
                most = min(most, free // need)
        return max(0, most)

    def _check_question(self, classes, count, length, affinity):
        demand = model.Demand({rc: self.chance.randint(1, 4)
                               for rc in classes}, count, affinity)
        since = self.chance.randrange(110_000)
        start = self.timeline.earliest(demand, length, since)
        ends = {since, *(one[1] for booked in self.bookings.values()
                         for one in booked if one[1] > since)}
        last = min((end for end in ends if end > since + 3000),
                   default=max(ends))
        # Otherwise each instant would check all bookings of each host again.
        near = self._near(since, last + length)
        for instant in sorted(ends):
            rooms = [self._room(booked, demand.resources,
                                demand.most_per_host(), instant,
                                instant + length) for booked in near]
            self.assertEqual(rooms, self.timeline.fits(
                demand, model.Window(instant, instant + length)).tolist())
            fits = max(rooms) if affinity is model.Affinity.SAME else (
                sum(rooms))
            self.assertEqual(start == instant, fits >= count)
            if start == instant or instant >= last:
                break

    def test_whole_hosts_match_scan_of_bookings(self):
        self.capacity = 4
        self._fill(['CUSTOM_HOST'], 4)
        for count in (1, 10, 100, 120, 140, 150):
            self._check_question(['CUSTOM_HOST'], count, 1500,
                                 model.Affinity.DIFFERENT)

    def test_parts_of_hosts_match_scan_of_bookings(self):
        self.capacity = 8
        self._fill(['VCPU', 'MEMORY_MB'], 8)
        for count in (1, 4, 100, 400, 500, 600):
            for affinity in (model.Affinity.NONE, model.Affinity.SAME):
                self._check_question(['VCPU', 'MEMORY_MB'], count, 800,
                                     affinity)


class ContractTest(base.BaseTestCase):
    """Methods that do not answer how much fits."""

    def setUp(self):
        super().setUp()
        self.timeline = timelines.Timeline()
        self.timeline.set_host(7, {'VCPU': 4}, {'VCPU': 1})
        self.timeline.set_host(3, {'VCPU': 2}, {})
        self.window = model.Window(10, 20)

    def test_results_are_in_order_of_adding_hosts(self):
        rooms = self.timeline.fits(model.Demand({'VCPU': 1}, 9),
                                   self.window)
        self.assertEqual([7, 3], self.timeline.ids)
        self.assertEqual([3, 2], rooms.tolist())
        self.assertEqual(1, self.timeline.index(3))

    def test_hosts_may_be_given_as_ids_or_as_mask(self):
        demand = model.Demand({'VCPU': 1}, 9)
        mask = self.timeline.mask([3, 99])
        self.assertEqual([False, True], mask.tolist())
        for hosts in (mask, [3, 99], frozenset({3})):
            self.assertEqual([0, 2], self.timeline.fits(
                demand, self.window, hosts).tolist())

    def test_nothing_fits_where_there_are_no_hosts(self):
        empty, demand = timelines.Timeline(), model.Demand({'VCPU': 1})
        self.assertEqual([], empty.fits(demand, self.window).tolist())
        self.assertIsNone(empty.earliest(demand, 10, 0))
        self.assertIsNone(self.timeline.earliest(demand, 10, 0, []))

    def test_unknown_resource_class_fits_nowhere(self):
        demand = model.Demand({'CUSTOM_FPGA': 1})
        self.assertEqual([0, 0], self.timeline.fits(
            demand, self.window).tolist())
        self.assertIsNone(self.timeline.earliest(demand, 10, 0))

    def test_shared_classes_are_those_given(self):
        demand = model.Demand({'VCPU': 1, 'CUSTOM_NET': 5})
        shared = timelines.Timeline(shared=['CUSTOM_NET'])
        shared.set_host(1, {'VCPU': 1}, {})
        self.assertEqual([1], shared.fits(demand, self.window).tolist())
        shared.set_host(1, {'VCPU': 1, 'CUSTOM_NET': 4}, {})
        self.assertEqual([0], shared.fits(demand, self.window).tolist())

    def test_invalid_arguments_are_refused(self):
        booked = timelines.Block([7], [5], [6], {'VCPU': [1]})
        self.assertRaises(ValueError, self.timeline.load, [booked, booked])
        self.assertRaises(KeyError, self.timeline.index, 8)
        self.assertRaises(KeyError, self.timeline.peak, 8, self.window)
        self.assertEqual(2, timeline_size.steps(self.timeline))

    def test_repeated_add_and_remove_does_not_widen_levels(self):
        self.timeline.set_host(1, {'DISK_GB': 4000}, {})
        with mock.patch.object(
                step_functions.Rows, '_prepare', autospec=True,
                side_effect=step_functions.Rows._prepare) as prepare:
            for number in range(1000):
                for sign in (1, -1):
                    self.timeline.apply(1, model.Window(number, number + 9),
                                        {'DISK_GB': 2000}, sign)
        self.assertEqual(0, prepare.call_count)

    def test_many_small_amounts_are_exact(self):
        for host, until in ((1, 100), (2, 200)):
            self.timeline.set_host(host, {'CUSTOM_GB': 100_000}, {})
            for _number in range(95):
                self.timeline.apply(
                    host, model.Window(0, until), {'CUSTOM_GB': 1000}, 1)
            self.assertEqual(95_000, self.timeline.peak(
                host, model.Window(0, until))['CUSTOM_GB'])
        # They may be confused after its end, when all would fit.
        self.assertEqual(100, self.timeline.earliest(
            model.Demand({'CUSTOM_GB': 10_000}), 50, 0))

    def test_amounts_removed_before_they_are_added_are_exact(self):
        for sign, number in ((-1, 40), (1, 80)):
            for _number in range(number):
                self.timeline.apply(
                    1, model.Window(0, 9), {'DISK_GB': 1000}, sign)
        self.assertEqual(40_000, self.timeline.peak(
            1, model.Window(0, 9))['DISK_GB'])

    def test_amounts_beyond_32_bits_are_exact(self):
        large = 10 ** 14
        self.timeline.set_host(1, {'CUSTOM_BYTES': 3 * large + 1}, {})
        for start in (0, 5, 10):
            self.timeline.apply(
                1, model.Window(start, 20), {'CUSTOM_BYTES': large}, 1)
        self.assertEqual(
            {'VCPU': 0, 'CUSTOM_BYTES': 3 * large},
            self.timeline.peak(1, model.Window(0, 30)))
        for need, start in ((1, 0), (2, 20), (large, 20)):
            self.assertEqual(start, self.timeline.earliest(
                model.Demand({'CUSTOM_BYTES': need}), 20, 0))

    def test_large_capacity_with_small_bookings_is_exact(self):
        # Levels of 32 bits, and a larger capacity.
        for host, start, end in ((11, 0, 10), (12, 5, 20), (13, 20, 30)):
            self.timeline.set_host(host, {'CUSTOM_BYTES': 2 ** 40}, {})
            self.timeline.apply(host, model.Window(start, end),
                                {'CUSTOM_BYTES': 2 ** 29}, 1)
        for count, start in ((5, 0), (6, 30)):
            self.assertEqual(start, self.timeline.earliest(
                model.Demand({'CUSTOM_BYTES': 2 ** 39}, count), 5, 0))

    def test_every_class_counts_if_first_leaves_few_hosts(self):
        full = timelines.Timeline()
        for host in range(1, 9):
            full.set_host(host, {'VCPU': 4, 'MEMORY_MB': 4}, {})
            rc = 'MEMORY_MB' if host == 8 else 'VCPU'
            full.apply(host, model.Window(4, 6), {rc: 4}, 1)
            full.apply(host, model.Window(1, 2), {'DISK_GB': 1}, 1)
            full.apply(host, model.Window(8, 9), {'DISK_GB': 1}, 1)
        for needs in ({'VCPU': 1, 'MEMORY_MB': 1},
                      {'MEMORY_MB': 1, 'VCPU': 1}):
            self.assertEqual([0] * 8, full.fits(
                model.Demand(needs), model.Window(0, 10)).tolist())

    def test_open_ended_peak_covers_future_bookings(self):
        calendar = timelines.Timeline()
        calendar.set_host(1, {'VCPU': 8}, {})
        calendar.apply(1, model.Window(0, 10), {'VCPU': 3}, 1)
        calendar.apply(1, model.Window(20, 30), {'VCPU': 1}, 1)

        def highest(since):
            levels, = calendar.peaks(model.Window(since, model.FOREVER))
            return levels.tolist()

        # The result is cached, and only as long as it is true.
        self.assertEqual([[3], [3], [1], [1], [0]],
                         [highest(since) for since in (0, 9, 10, 29, 30)])
        calendar.apply(1, model.Window(40, 50), {'VCPU': 5}, 1)
        self.assertEqual([5], highest(30))
        self.assertEqual([5], highest(0))

    def test_free_time_grows_when_booking_is_removed(self):
        whole = timelines.Timeline()
        for host in (1, 2):
            whole.set_host(host, {'CUSTOM_HOST': 1}, {})
        for host, start, end, sign in (
                (1, 0, 100, 1), (2, 0, 50, 1), (2, 60, 70, 1),
                (2, 60, 70, -1)):
            whole.apply(host, model.Window(start, end), {'CUSTOM_HOST': 1},
                        sign)
        self.assertEqual(100, whole.earliest(
            model.Demand({'CUSTOM_HOST': 1}, 2), 30, 0))

    def test_forgetting_the_past_frees_memory(self):
        starts = np.arange(0, 100_000, 10)
        self.timeline.load([timelines.Block(
            np.full(len(starts), 7), starts, starts + 5,
            {'VCPU': np.ones(len(starts))})])
        before = timeline_size.nbytes(self.timeline)
        self.timeline.forget(90_000)
        self.assertLess(timeline_size.nbytes(self.timeline), before / 4)
        self.assertEqual(3, self.timeline.fits(
            model.Demand({'VCPU': 1}, 9), model.Window(90_005, 90_009))[0])
