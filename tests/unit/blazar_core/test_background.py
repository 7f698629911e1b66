# SPDX-License-Identifier: Apache-2.0

"""Work that a request does not wait for."""

import threading
import time
from unittest import mock

from oslotest import base

from blazar_core.common import background

#: Seconds after which a thread is missing.
LONGEST = 30


class TestBackground(base.BaseTestCase):

    def setUp(self):
        super().setUp()
        self.background = background.Background(workers=2)
        self.go_on = threading.Event()
        self.addCleanup(self.go_on.set)

    def wait(self):
        self.assertTrue(self.go_on.wait(LONGEST))
        return threading.current_thread()

    def test_work_runs_in_another_thread(self):
        started = self.background.start(self.wait)
        self.assertFalse(started.done())
        self.go_on.set()
        self.assertIsNot(threading.current_thread(), started.result(LONGEST))

    def test_work_runs_in_caller_if_all_threads_are_busy(self):
        busy = [self.background.start(self.wait) for _number in range(2)]
        own = self.background.start(threading.current_thread)
        self.assertIs(threading.current_thread(), own.result(0))
        self.go_on.set()
        for one in busy:
            one.result(LONGEST)
        # A thread becomes free a moment after it returns its result.
        deadline = time.monotonic() + LONGEST
        while self.background.start(threading.current_thread).result(
                LONGEST) is threading.current_thread():
            self.assertLess(time.monotonic(), deadline)

    def test_errors_are_raised_by_result_and_not_logged(self):
        for background_ in (self.background, background.Background(0)):
            with mock.patch.object(background, 'LOG') as log:
                failed = background_.start(lambda: 1 // 0)
                self.assertRaises(ZeroDivisionError, failed.result, LONGEST)
                self.assertEqual([], log.exception.mock_calls)

    def test_errors_of_unawaited_work_are_logged(self):
        done = threading.Event()
        with mock.patch.object(
                background.LOG, 'exception',
                side_effect=lambda *_args: done.set()):
            self.background.later(lambda: 1 // 0)
            self.assertTrue(done.wait(LONGEST))

    def test_work_runs_in_caller_during_shutdown(self):
        with mock.patch.object(self.background, '_executor', side_effect=(
                RuntimeError('cannot schedule new futures'))):
            for _time in range(3):
                self.assertIs(
                    threading.current_thread(), self.background.start(
                        threading.current_thread).result(0))
