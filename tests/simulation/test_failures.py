# SPDX-License-Identifier: Apache-2.0

"""The rule that judges failures, and some runs."""

import pathlib
import random
from unittest import mock

import fixtures
from oslotest import base

from tests.simulation import failures


#: Seeds in which later bookings must be reshuffled.
SCARCE = (3, 4)


def fits(hosts, needs):
    """Return whether all needs have hosts, by trying all assignments."""
    servers = [need for need in needs for _one in range(need.count)]

    def rest(number, taken):
        if number == len(servers):
            return True
        need = servers[number]
        return any(
            all(need.end <= other.start or other.end <= need.start
                for other in of_host) and rest(number + 1, [
                    [*one, need] if one is of_host else one for one in taken])
            for of_host in taken)

    return rest(0, [[] for _host in range(hosts)])


class TestRoom(base.BaseTestCase):

    def test_has_room_agrees_with_exhaustive_search(self):
        dice, said = random.Random(1), []
        for _time in range(300):
            hosts = dice.randint(1, 3)
            needs = []
            for _need in range(dice.randint(1, 4)):
                start = dice.choice([0, 0, 1, 2, 3])
                needs.append(failures.Need(
                    dice.randint(1, 2), start, start + dice.randint(1, 3)))
            said.append(failures.has_room(hosts, needs))
            self.assertEqual(fits(hosts, needs), said[-1], (hosts, needs))
        self.assertEqual({True, False}, set(said))


class TestFailures(base.BaseTestCase):

    def years(self, seed, hosts, days, heals=True):
        folder = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        return failures.Years(seed, hosts, folder, heals).run(days)

    def test_leases_have_hosts_wherever_capacity_suffices(self):
        for seed in SCARCE:
            self.assertEqual(0, self.years(seed, 20, 25).wrong)

    def test_leases_lack_hosts_without_reshuffling(self):
        with mock.patch('blazar_core.healing.reshuffle.Reshuffle.free',
                        return_value=False):
            self.assertLess(0, sum(
                self.years(seed, 20, 25).wrong for seed in SCARCE))

    def test_leases_lack_hosts_only_without_healing(self):
        healed, left = (self.years(1, 60, 8, heals)
                        for heals in (True, False))
        self.assertLess(0, left.lacking)
        self.assertEqual((0, 0), (healed.lacking, healed.wrong))
        self.assertEqual(left.lacking, left.wrong)
