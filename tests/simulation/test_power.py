# SPDX-License-Identifier: Apache-2.0

"""Most of the hours are saved that could be, and no lease is late.

``python -m tests.simulation.power`` does the same with 500 hosts for 30 days.
"""

from oslotest import base
import testscenarios

from tests.simulation import power

load_tests = testscenarios.load_tests_apply_scenarios


class TestSaved(base.BaseTestCase):

    scenarios = [(str(load), {'load': load}) for load in power.REQUIRED]
    load = 0

    def test_saved_hours_reach_required_share_of_optimum(self) -> None:
        found = power.run(100, 15, self.load / 100)
        self.assertEqual(0, found.late, found)
        self.assertGreaterEqual(found.part, power.REQUIRED[self.load], found)
        # The load is that which was wanted.
        self.assertAlmostEqual(self.load / 100, found.load, delta=0.02)
