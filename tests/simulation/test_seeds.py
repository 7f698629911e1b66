# SPDX-License-Identifier: Apache-2.0

"""Seeds of the simulation: fixed ones, those of the day, and guards.

The gate runs the fixed seeds and a few guards. ``./tools/test all`` also runs
as many seeds as fit into two minutes, others each day of the year, and
disables every guard. ``BLAZAR_SIMULATION_SECONDS`` is for how long seeds of an
hour and those of a week are started; ``BLAZAR_SIMULATION_GUARDS=all`` disables
all guards, instead of five of them by the date.

``python -m tests.simulation.choosing`` finds the seeds again after the core
has changed.
"""

import datetime
import os
import subprocess
import sys

from oslotest import base
import testscenarios

from tests import imports
from tests.simulation import guards

load_tests = testscenarios.load_tests_apply_scenarios

SECONDS = os.environ.get('BLAZAR_SIMULATION_SECONDS', '70')
#: The number of guards that are disabled each day.
DAILY = 5
#: Seeds of an hour and of a week that together reach the most code for their
#: time.
FIXED = {0.05: (2, 3, 5), 7: (1,)}
#: Guards, and the first seed that fails without each of them. Every error that
#: seeds have found has a guard here, and a unit test that shows it.
MISSED = {
    'claim': 1, 'recheck': 1, 'close': 1, 'gate': 1, 'copied': 1, 'image': 1,
    'generation': 1, 'servers': 1, 'room': 1, 'clean': 1, 'between': 1,
    'notice': 3, 'undo': 3, 'hosted': 4, 'judged': 4, 'used': 8, 'orphans': 5,
    'clock': 5, 'deadline': 7, 'evicted': 5, 'blocked': 11, 'again': 12,
    'twice': 41, 'held': 138, 'own': 10, 'power_lead': 19, 'sized': 123,
    'released': 6, 'unstacked': 6}
#: The first seed that fails without ``clock`` if clocks drift and there are no
#: other faults.
DRIFTED = 110
#: Guards of the simulation itself, which no unit test covers.
SIMULATED = ('recheck', 'orphans', 'hosted', 'twice', 'own')


#: A script that runs seeds on another day.
LATER = """
import runpy, time
now = time.time
time.time = lambda: now() + 40 * 86400
runpy.run_module('tests.simulation', run_name='__main__', alter_sys=True)
"""


def simulate(*arguments: object, start: tuple[str, str] = (
        '-m', 'tests.simulation'), **environ: str) -> tuple[int, str]:
    """Run some seeds by the command."""
    done = subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=imports.ROOT, capture_output=True, text=True, timeout=1800,
        env={**os.environ, **environ})
    return done.returncode, done.stdout + done.stderr


def today() -> int:
    """Return the day of the year."""
    return datetime.date.today().timetuple().tm_yday


def guards_of(day: int) -> list[str]:
    """Return the guards that are disabled on a day, in rotation."""
    names = sorted(MISSED)
    if os.environ.get('BLAZAR_SIMULATION_GUARDS') == 'all':
        return names
    return [names[(day * DAILY + number) % len(names)]
            for number in range(DAILY)]


class SeedsTestCase(base.BaseTestCase):

    def all_goes_well(self, *arguments: object) -> None:
        code, text = simulate(*arguments, '--shrink', '--until-wrong')
        self.assertEqual(0, code, text[-20_000:])
        self.assertIn('seed ', text)

    def is_missed(self, guard: str, *arguments: str,
                  first: int | None = None) -> None:
        """Check that seeds fail without a guard."""
        # Any new statement changes the seeds, so the following ones run too.
        first = first or MISSED[guard]
        code, text = simulate(
            f'{first}-{first + 99}', '--without', guard, '--until-wrong',
            *arguments)
        self.assertEqual(1, code, text)
        _well, *found = text.split('  WRONG: ')
        self.assertTrue(found, text)
        for wrong in found:
            self.assertTrue(guards.is_missed(wrong), text)


class TestFixed(SeedsTestCase):
    """The same seeds in every run."""

    def test_seeds_of_one_hour_pass(self) -> None:
        self.all_goes_well(*FIXED[0.05], '--days', 0.05)

    def test_seeds_of_one_week_pass(self) -> None:
        self.all_goes_well(*FIXED[7], '--days', 7)

    def test_seed_is_reproducible(self) -> None:
        told = 5, '--days', 0.01, '--story', '--still'
        first = simulate(*told, PYTHONHASHSEED='7')
        # On another day, and with another hash seed.
        self.assertEqual(first, simulate(
            *told, start=('-c', LATER), PYTHONHASHSEED='0'))
        self.assertIn('runs on host', first[1])


class TestGuardsOfTheSimulation(SeedsTestCase):
    """Guards that no unit test covers."""

    scenarios = [(name, {'guard': name}) for name in SIMULATED]
    guard = ''

    def test_seeds_fail_without_guard(self) -> None:
        self.is_missed(self.guard)


class TestDrift(SeedsTestCase):

    def test_clock_drift_alone_reveals_missing_clock_guard(self) -> None:
        self.is_missed('clock', '--only', 'drift', first=DRIFTED)


class TestToday(SeedsTestCase):
    """Other seeds and guards each day."""

    def all_of_today_goes_well(self, days: float) -> None:
        first = 1000 * today()
        self.all_goes_well(
            f'{first}-{first + 999}', '--days', days, '--seconds', SECONDS)

    def test_seeds_of_one_hour_pass(self) -> None:
        self.all_of_today_goes_well(0.05)

    def test_seeds_of_one_week_pass(self) -> None:
        self.all_of_today_goes_well(7)

    def test_seeds_fail_without_guards_of_the_day(self) -> None:
        for guard in guards_of(today()):
            self.is_missed(guard)
