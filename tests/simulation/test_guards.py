# SPDX-License-Identifier: Apache-2.0

"""For each guard of the core, a unit test of the gate fails without it.

A test that passes although its guard is disabled tests nothing. Every guard is
disabled in a process of its own, in which the test must then fail; with all
guards it must pass. ``python -m tests.simulation.guards`` does the same, and
finds another test for a guard::

    python -m tests.simulation.guards undo blazar_core.test_scheduler_claims
"""

import pathlib
import re
import subprocess
import sys
from unittest import mock

from oslotest import base
import testscenarios

from tests import imports
from tests.simulation import guards
from tests.simulation import run
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

    def test_unit_test_fails_without_guard(self) -> None:
        code, text = self.failing(self.guard)
        # An error of the command itself, or an unknown test, is 2.
        self.assertEqual(1, code, text)
        self.assertIn('tests.unit.', text)

    def test_unit_test_passes_with_all_guards(self) -> None:
        code, text = self.failing('')
        self.assertEqual(0, code, text)


class TestTheList(base.BaseTestCase):

    def test_each_guard_has_unit_test_or_seed(self) -> None:
        self.assertEqual(set(guards.GUARDS), {
            *guards.TESTS, *test_seeds.SIMULATED})

    def test_gate_covers_nine_of_ten_guards(self) -> None:
        excluded = re.compile('|'.join(
            line for line in pathlib.Path(
                imports.ROOT, 'tests', 'tiers', 'gate.txt',
            ).read_text().splitlines() if line and line[0] != '#'))
        self.assertEqual([], [
            guard for guard, test in guards.TESTS.items()
            if all(map(excluded.search, guards.named([test])))])
        seed = test_seeds.TestGuardsOfTheSimulation(
            'test_seeds_fail_without_guard').id()
        missed = [*guards.TESTS, *(
            guard for guard in test_seeds.SIMULATED
            if not excluded.search(f'{seed}({guard})'))]
        self.assertGreaterEqual(len(missed), 0.9 * len(guards.GUARDS))


class TestWhatCounts(base.BaseTestCase):
    """An error of the simulation does not show that a guard is missed."""

    def wrong(self, where: str) -> str:
        """Return what is wrong if a function is replaced by a wrong one."""
        with mock.patch(where, lambda *_what, **_named: 1 / 0):
            found, = run.Run(1, 0.01).go()
        self.assertIn('ZeroDivisionError', found)
        return found

    def test_simulation_error_does_not_reveal_missing_guard(self) -> None:
        self.assertFalse(guards.is_missed(
            self.wrong('tests.simulation.world.World.compare')))

    def test_core_error_reveals_missing_guard(self) -> None:
        self.assertTrue(guards.is_missed(self.wrong(
            'blazar_core.healing.overbooking.OverbookingCheck._relieve')))

    def test_violated_invariant_reveals_missing_guard(self) -> None:
        self.assertTrue(guards.is_missed('server-00005 was built twice'))

    def test_unit_test_error_does_not_reveal_missing_guard(self) -> None:
        tests = ['blazar_nova.test_power_planner.TestPlan']
        wrong = ('tests.unit.blazar_nova.test_power_planner.host',
                 lambda *_what, **_named: 1 / 0)
        with mock.patch.dict(guards.GUARDS, {'mine': wrong}):
            self.assertEqual([], guards.failing('mine', tests))
        # With all guards, a test must have no error at all.
        with mock.patch(*wrong):
            self.assertNotEqual([], guards.failing('', tests))
