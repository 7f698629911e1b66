# SPDX-License-Identifier: Apache-2.0

import threading
import time

import fixtures

from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.common import periodic
from tests import driven
from tests.unit import base

NOW = base.NOW


class TestSystemClock(base.TestCase):

    def test_now_is_in_whole_seconds_rounded_down(self):
        before = time.time()
        now = clocks.SystemClock().now()
        self.assertIsInstance(now, int)
        self.assertTrue(before - 1 < now <= time.time())

    def test_waiting_ends_when_the_event_is_set(self):
        for until in int(time.time()) + 10_000, model.FOREVER:
            event = threading.Event()
            thread = self.in_thread(
                lambda event=event, until=until: clocks.SystemClock().wait(
                    event, until))
            thread.join(0.1)
            self.assertTrue(thread.is_alive())
            event.set()
            thread.join(20)
            self.assertFalse(thread.is_alive())

    def test_waiting_ends_at_the_given_time(self):
        event = threading.Event()
        until = int(time.time()) + 1
        clocks.SystemClock().wait(event, until)
        # The machine's timers may be slightly early.
        self.assertGreater(time.time(), until - 0.05)

    def test_wait_for_past_time_returns_at_once(self):
        before = time.monotonic()
        clocks.SystemClock().wait(threading.Event(), 0)
        self.assertLess(time.monotonic() - before, 10)


class TestRunPeriodically(base.TestCase):

    def test_work_repeats_after_failure_until_stopped(self):
        log = self.useFixture(fixtures.FakeLogger())
        manual, looks = driven.ManualClock(0), []
        stopping = threading.Event()

        def look():
            looks.append(manual.now())
            if len(looks) == 1:
                raise ValueError('so')
            stopping.set()

        thread = self.in_thread(lambda: periodic.run_periodically(
            manual, stopping, 30, 'What is short', look))
        # The thread may not wait yet: advance until it looks.
        self.wait_for(lambda: manual.advance(1) and len(looks) == 2,
                      'the second look')
        thread.join(20)
        self.assertFalse(thread.is_alive())
        self.assertGreaterEqual(looks[1] - looks[0], 30)
        self.assertIn('What is short: failed', log.output)

    def test_pause_after_failure_is_not_cut_short(self):
        self.useFixture(fixtures.FakeLogger())
        manual, looks = driven.ManualClock(0), []
        stopping, news = threading.Event(), threading.Event()

        def look():
            looks.append(manual.now())
            news.set()
            if len(looks) == 1:
                raise ValueError('so')
            stopping.set()

        thread = self.in_thread(lambda: periodic.run_periodically(
            manual, stopping, 3, 'What is short', look, news))
        self.wait_for(lambda: manual.advance(1) and len(looks) == 2,
                      'the second look')
        thread.join(20)
        self.assertFalse(thread.is_alive())
        self.assertGreaterEqual(looks[1] - looks[0], 5)

    def test_work_runs_at_once_when_event_is_set(self):
        manual, looks = driven.ManualClock(0), []
        stopping, news = threading.Event(), threading.Event()
        thread = self.in_thread(lambda: periodic.run_periodically(
            manual, stopping, 30, 'What is short',
            lambda: looks.append(manual.now()), news))
        for number in range(1, 4):
            self.wait_for(lambda: len(looks) == number, 'a look')
            news.set()
        self.wait_for(lambda: len(looks) == 4, 'the last look')
        stopping.set()
        news.set()
        thread.join(20)
        self.assertFalse(thread.is_alive())
        self.assertEqual([0] * len(looks), looks)


class TestManualClock(base.TestCase):

    def test_clock_advances_only_on_request(self):
        manual = driven.ManualClock(5)
        self.assertEqual(5, manual.now())
        self.assertEqual(12, manual.advance(7))
        self.assertEqual(12, manual.now())

    def test_waiting_ends_when_clock_reaches_the_time(self):
        manual = driven.ManualClock(0)
        thread = self.in_thread(
            lambda: manual.wait(threading.Event(), 10))
        manual.advance(9)
        self.assertTrue(thread.is_alive())
        manual.advance(1)
        thread.join(20)
        self.assertFalse(thread.is_alive())

    def test_waiting_ends_when_the_event_is_set(self):
        manual, event = driven.ManualClock(0), threading.Event()
        thread = self.in_thread(lambda: manual.wait(event, 10))
        event.set()
        thread.join(20)
        self.assertFalse(thread.is_alive())
        self.assertEqual(0, manual.now())


class TestDates(base.TestCase):

    def test_a_date_of_the_api_has_microseconds(self):
        self.assertEqual('2027-01-15T08:00:00.000000', clocks.iso(NOW))

    def test_dates_of_a_window_are_named_as_in_the_api(self):
        self.assertEqual(
            [('start_date', '2027-01-15T08:00:00.000000'),
             ('end_date', '2027-01-15T08:00:07.000000')],
            list(clocks.span(NOW, NOW + 7).items()))

    def test_date_for_users_shows_only_nonzero_seconds(self):
        self.assertEqual('2027-01-15 08:00', clocks.minute(NOW))
        self.assertEqual('2027-01-15 08:00:07', clocks.minute(NOW + 7))

    def test_dates_are_utc_in_any_timezone(self):
        self.addCleanup(time.tzset)
        self.useFixture(fixtures.EnvironmentVariable('TZ', 'Asia/Tokyo'))
        time.tzset()
        self.assertEqual('2027-01-15T08:00:00.000000', clocks.iso(NOW))
        self.assertEqual('2027-01-15 08:00', clocks.minute(NOW))
