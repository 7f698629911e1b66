# SPDX-License-Identifier: Apache-2.0

"""The rule, checked at every second, and the timeline, checked by the rule."""

import hypothesis
from hypothesis import strategies as st
from oslotest import base

from blazar_core.capacity import rule
from blazar_core.capacity import timelines
from blazar_core.common import model
from tests import examples

CLASSES = ('VCPU', 'MEMORY_MB', 'DISK_GB')
#: All windows end before this second.
LAST = 24

amounts = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 3),
                          max_size=3)
windows = st.builds(lambda start, length: model.Window(start, start + length),
                    st.integers(0, 14), st.integers(1, 9))
taken = st.lists(st.tuples(windows, amounts), max_size=8)
hosts = st.tuples(
    st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 12), max_size=3),
    amounts)

CASES = examples.repeatable(200)


def level(some, rc, second):
    """Return the usage of a class in one second."""
    return sum(each.get(rc, 0) for window, each in some
               if window.start <= second < window.end)


class TestRule(base.BaseTestCase):

    @CASES
    @hypothesis.given(taken, taken, taken)
    def test_peaks_match_seconds_with_increased_usage(
            self, stays, comes, goes):
        expected = {}
        for rc in CLASSES:
            of_them = [level(stays + comes, rc, second)
                       for second in range(LAST)
                       if level(comes, rc, second) > level(goes, rc, second)]
            if of_them:
                expected[rc] = max(of_them)
        self.assertEqual(expected, rule.peaks(stays, comes, goes))

    @CASES
    @hypothesis.given(taken, taken, taken)
    def test_levels_hold_until_the_next_instant(self, stays, comes, goes):
        found = {instant: (dict(after), dict(more)) for instant, after, more
                 in rule.levels(stays, comes, goes)}
        self.assertEqual(sorted(found), [*found])
        now = {}, {}
        for second in range(LAST):
            now = found.get(second, now)
            for rc in CLASSES:
                self.assertEqual(level(stays + comes, rc, second),
                                 now[0].get(rc, 0))
                self.assertEqual(
                    level(comes, rc, second) - level(goes, rc, second),
                    now[1].get(rc, 0))

    def test_shared_class_is_lacking_only_if_reported(self):
        self.assertEqual([], rule.lacking({}, {}, {'DISK_GB': 1}))
        self.assertEqual(['DISK_GB'], rule.lacking(
            {'DISK_GB': 2}, {'DISK_GB': 1}, {'DISK_GB': 2}))
        self.assertEqual(['VCPU'], rule.lacking({}, {}, {'VCPU': 1}))

    def test_unrequested_classes_are_never_lacking(self):
        self.assertEqual([], rule.lacking(
            {'VCPU': 2}, {'VCPU': 3, 'MEMORY_MB': 1},
            {'VCPU': 0, 'MEMORY_MB': 0}))

    def test_overdue_server_occupies_one_more_minute(self):
        self.assertEqual(model.Window(1, 9), rule.occupied(1, 9, None, 9))
        self.assertEqual(model.Window(1, 9), rule.occupied(1, 9, 1, 8))
        self.assertEqual(model.Window(1, 69), rule.occupied(1, 9, 1, 9))


class TestTimeline(base.BaseTestCase):
    """The timeline has arrays for all hosts, and agrees with the rule."""

    @CASES
    @hypothesis.given(st.lists(st.tuples(hosts, taken), min_size=1,
                               max_size=4), amounts, windows)
    def test_timeline_agrees_with_rule(self, told, wanted, window):
        line = timelines.Timeline()
        for number, ((capacity, usage), booked) in enumerate(told):
            line.set_host(number, capacity, usage)
            for its, each in booked:
                line.apply(number, its, each, 1)
        rooms = line.fits(model.Demand(wanted), window)
        for number, ((capacity, usage), booked) in enumerate(told):
            comes = [(window, wanted)]
            fits = not rule.lacking(
                capacity, usage, rule.peaks(booked, comes))
            self.assertEqual(fits, bool(rooms[line.index(number)]))
            peak = {rc: found - wanted[rc] for rc, found in rule.peaks(
                booked, comes).items()}
            self.assertEqual(peak, {
                rc: found for rc, found in line.peak(number, window).items()
                if rc in peak} | dict.fromkeys(
                    peak.keys() - set(line.capacity), 0))
        self.assertEqual(
            [number for number, ((capacity, usage), booked) in enumerate(told)
             if rule.lacking(capacity, usage, rule.peaks((), booked))],
            line.overfull(0))
