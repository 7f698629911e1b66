# SPDX-License-Identifier: Apache-2.0

"""The long race: many processes book, change and release for a while.

The tables must be right all the same. BLAZAR_RACE_SECONDS is its duration
(30); less is for development.
"""

import os

from oslo_log import log as logging
import testscenarios

from tests import databases
from tests.races import contest
from tests.unit import base

load_tests = testscenarios.load_tests_apply_scenarios

LOG = logging.getLogger(__name__)
SECONDS = float(os.environ.get('BLAZAR_RACE_SECONDS', '30'))
#: Seconds in which an overbooking must appear without the guard, and seconds
#: between two checks of the tables.
PATIENCE = 90
SLICE = 2


class RaceTestCase(base.TestCase):

    scenarios = databases.SCENARIOS
    kind = 'sqlite'

    def contest(self, **options):
        place = self.useFixture(databases.DatabaseFixture(self.kind))
        return self.enterContext(contest.Contest(
            [place.url], seed=20, **options))


class LongRaceTest(RaceTestCase):

    def test_tables_and_indexes_are_consistent_after_race(self):
        race = self.contest()
        race.run(SECONDS)
        LOG.info('Done: %s. Outcomes: %s. Disturbed: %s', race.done(),
                 dict(race.outcomes), dict(race.disturbed))
        self.assertEqual(([], [], []), (
            race.problems(), race.wrong_pictures(), race.failures))
        # The processes did meet, and no operation was left out.
        self.assertEqual(
            [], [name for name, times in race.done().items() if not times])
        self.assertGreater(race.outcomes['create refused'], 0)
        self.assertGreater(race.disturbed.total(), 0)


class WithoutTheGuardTest(RaceTestCase):

    #: The writers of SQLite wait for each other, with the guard or without.
    scenarios = [one for one in databases.SERVERS if one[0] != 'snapshot']

    # Without generations no index follows, so most hosts are found to be full
    # only by the ledger: a few retries are enough. There is only one host, so
    # that overbooking appears soon.
    def test_race_overbooks_without_generation_guard(self):
        race = self.contest(without=['generation'], retries=4, hosts=1)
        for _slice in range(PATIENCE // SLICE):
            race.run(SLICE)
            found = race.problems()
            if any(one.startswith('overbooked') for one in found):
                return
        self.fail(f'{PATIENCE} s without the guard, and no overbooking: '
                  'this race proves nothing.')
