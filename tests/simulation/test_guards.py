# SPDX-License-Identifier: Apache-2.0

"""For each guard of the core, a unit test of the gate fails without it.

A test that passes although its guard is disabled tests nothing. Every guard is
disabled in a process of its own, in which the test must then fail; with all
guards it must pass. ``python -m tests.simulation.guards`` does the same, and
finds another test for a guard::

    python -m tests.simulation.guards undo blazar_core.test_scheduler_claims
"""

import subprocess
import sys

from oslotest import base
import testscenarios

from tests import imports
from tests.simulation import guards
from tests.simulation import test_seeds

load_tests = testscenarios.load_tests_apply_scenarios

#: Seconds that the tests of one guard may take.
LONGEST = 600


class TestGuards(base.BaseTestCase):

    scenarios = [(name, {'guard': name}) for name in sorted(guards.TESTS)]
    guard = ''

    def failing(self, guard: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, '-m', 'tests.simulation.guards', guard,
             guards.TESTS[self.guard]],
            cwd=imports.ROOT, capture_output=True, text=True,
            timeout=LONGEST)
        return done.returncode, done.stdout + done.stderr

    def test_without_it_a_unit_test_fails(self) -> None:
        code, text = self.failing(self.guard)
        # An error of the command itself, or an unknown test, is 2.
        self.assertEqual(1, code, text)
        self.assertIn('tests.unit.', text)

    def test_with_it_the_same_test_passes(self) -> None:
        code, text = self.failing('')
        self.assertEqual(0, code, text)


class TestTheList(base.BaseTestCase):

    def test_each_guard_is_missed_by_a_unit_test_or_by_a_seed(self) -> None:
        self.assertEqual(set(guards.GUARDS), {
            *guards.TESTS, *test_seeds.SIMULATED})
