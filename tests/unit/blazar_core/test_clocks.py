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

    def test_it_shows_whole_seconds_that_have_passed(self):
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

    def test_waiting_ends_when_the_time_has_come(self):
        event = threading.Event()
        until = int(time.time()) + 1
        clocks.SystemClock().wait(event, until)
        # The machine's timers may be slightly early.
        self.assertGreater(time.time(), until - 0.05)

    def test_there_is_no_waiting_for_the_past(self):
        before = time.monotonic()
        clocks.SystemClock().wait(threading.Event(), 0)
        self.assertLess(time.monotonic() - before, 10)


class TestRepeating(base.TestCase):

    def test_it_goes_on_after_a_failure_and_ends_when_it_is_told(self):
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

    def test_after_a_failure_it_waits_whatever_the_news(self):
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

    def test_it_looks_at_once_when_there_is_news(self):
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

    def test_it_moves_only_when_it_is_told_to(self):
        manual = driven.ManualClock(5)
        self.assertEqual(5, manual.now())
        self.assertEqual(12, manual.advance(7))
        self.assertEqual(12, manual.now())

    def test_waiting_ends_when_it_shows_the_time(self):
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

    def test_a_date_for_users_has_seconds_only_where_there_are_any(self):
        self.assertEqual('2027-01-15 08:00', clocks.minute(NOW))
        self.assertEqual('2027-01-15 08:00:07', clocks.minute(NOW + 7))

    def test_dates_are_utc_wherever_the_machine_stands(self):
        self.addCleanup(time.tzset)
        self.useFixture(fixtures.EnvironmentVariable('TZ', 'Asia/Tokyo'))
        time.tzset()
        self.assertEqual('2027-01-15T08:00:00.000000', clocks.iso(NOW))
        self.assertEqual('2027-01-15 08:00', clocks.minute(NOW))
