# SPDX-License-Identifier: Apache-2.0

import itertools

import hypothesis
from hypothesis import strategies as st

from blazar_core.common import states
from blazar_nova.listener import power_planner
from tests import examples
from tests.unit import base

NOW = base.NOW
OFF, BOOTING, STOPPING, FAILED = (
    states.Power.OFF, states.Power.BOOTING, states.Power.STOPPING,
    states.Power.FAILED)


def policy(**values):
    return power_planner.Policy(**{
        'spare_hosts': 0, 'minimum_off': 1800, 'minimum_on': 900,
        'boot_time': 600, 'boot_time_floor': 120, 'margin': 60,
        'shutdown_timeout': 300, 'max_switching': 10, 'claim': 120,
        **values})


def host(number, state=None, needed_in=None, since=None, kind='a', lead=660,
         **values):
    return power_planner.PowerHost(
        number, f'host{number}', kind, state,
        None if since is None else NOW - since,
        None if needed_in is None else NOW + needed_in, lead, **values)


def plan(*hosts, **values):
    return [(one.host.id, one.on) for one in power_planner.plan(
        hosts, policy(**values), NOW)]


class TestPlan(base.TestCase):

    def test_unneeded_host_is_switched_off(self):
        self.assertEqual([(1, False)], plan(host(1)))
        # The first start that leaves it off for long enough.
        self.assertEqual([], plan(host(1, needed_in=660 + 1800)))
        self.assertEqual([(1, False)], plan(host(1, needed_in=660 + 1801)))
        self.assertEqual([], plan(host(1, needed_in=0)))
        self.assertEqual([], plan(host(1, needed_in=-5000)))

    def test_needed_host_is_switched_on_in_time(self):
        self.assertEqual([], plan(host(1, OFF, needed_in=661)))
        self.assertEqual([(1, True)], plan(host(1, OFF, needed_in=660)))
        # It may have been switched off just now.
        self.assertEqual([(1, True)], plan(
            host(1, OFF, needed_in=10, since=1)))

    def test_some_of_many_needed_hosts_are_switched_on_early(self):
        hosts = [host(number, OFF, needed_in=680) for number in range(5)]
        self.assertEqual([(0, True)], plan(*hosts, max_switching=2))
        self.assertEqual([], plan(*hosts, max_switching=5))
        late = [host(number, OFF, needed_in=1) for number in range(5)]
        self.assertEqual(5, len(plan(*late, max_switching=2)))

    def test_spare_hosts_stay_on_and_are_switched_on(self):
        two = host(1), host(2, needed_in=90_000)
        self.assertEqual([(1, False)], plan(*two, spare_hosts=1))
        self.assertEqual([], plan(*two, spare_hosts=2))
        off = host(3, OFF, since=1800, needed_in=90_000), host(
            4, OFF, since=1800)
        self.assertEqual([(4, True)], plan(*two, *off, spare_hosts=3))
        # A host that boots is one of them already.
        self.assertEqual([], plan(
            *two, *off, host(5, BOOTING), spare_hosts=3))
        # A host that is needed soon is not one of them.
        self.assertEqual([(4, True)], plan(
            host(1, needed_in=2000), *off, spare_hosts=1))

    def test_spare_hosts_are_kept_of_each_kind(self):
        self.assertEqual([(1, False), (3, False)], plan(
            host(1), host(2), host(3, kind='b'), host(4, kind='b'),
            spare_hosts=1))
        self.assertEqual([], plan(
            host(1), host(2, kind='b'), spare_hosts=1))

    def test_hosts_are_not_switched_before_minimum_times(self):
        self.assertEqual([], plan(host(1, since=899)))
        self.assertEqual([(1, False)], plan(host(1, since=900)))
        self.assertEqual([], plan(host(1, OFF, since=1799), spare_hosts=1))

    def test_hosts_in_transition_failed_or_held_are_not_switched(self):
        for one in (host(1, STOPPING), host(1, BOOTING), host(1, FAILED),
                    host(1, held='x'), host(1, OFF, 1, held='x')):
            self.assertEqual([], plan(one))

    def test_host_that_is_kept_on_is_switched_on(self):
        self.assertEqual([], plan(host(1, kept_on='x')))
        self.assertEqual([(1, True)], plan(host(1, OFF, kept_on='x')))

    def test_hosts_needed_by_leases_are_switched_on_first(self):
        """An operator may exclude thousands of hosts at once."""
        self.assertEqual([(3, True), (2, True), (1, True)], plan(
            host(1, OFF, kept_on='x'), host(2, OFF, needed_in=660),
            host(3, OFF, needed_in=600, kept_on='x')))

    def test_lead_time_depends_on_known_boot_times(self):
        for known, lead in (
                (None, 660), ([], 660), ([50] * 4, 660), ([700] * 2, 760),
                ([50] * 5, 180), ([50, 50, 400, 50, 50], 460)):
            self.assertEqual(lead, policy().lead(known), known)


_states = st.sampled_from([None, OFF, OFF, BOOTING, STOPPING, FAILED])
_hosts = st.lists(st.builds(
    lambda state, needed, since, kind, lead, held, kept: (
        state, needed, since, kind, lead, held, kept),
    _states, st.none() | st.integers(-2, 12), st.none() | st.integers(0, 6),
    st.sampled_from('ab'), st.integers(1, 3),
    st.sampled_from(['', '', '', 'held']),
    st.sampled_from(['', '', '', 'kept'])), max_size=6)


class TestProperties(base.TestCase):
    """Small clouds with small times."""

    policy = st.builds(
        lambda spare, off, on, at_once: policy(
            spare_hosts=spare, minimum_off=off, minimum_on=on,
            max_switching=at_once),
        st.integers(0, 3), st.integers(0, 4), st.integers(0, 4),
        st.integers(1, 3))

    @examples.repeatable(300)
    @hypothesis.given(_hosts, policy)
    def test_plan_satisfies_all_rules(self, values, rules):
        hosts = [host(number, state, needed, since, kind, lead, held=held,
                      kept_on=kept) for number, (
                          state, needed, since, kind, lead, held, kept)
                 in enumerate(values)]
        found = power_planner.plan(hosts, rules, NOW)
        on = {one.host.id for one in found if one.on}
        off = {one.host.id for one in found if not one.on}
        self.assertEqual(len(found), len(on) + len(off))
        for one in hosts:
            free = not one.kept_on and (
                one.needed_at is None or
                one.needed_at - one.lead - rules.minimum_off > NOW)
            if one.id in on:
                self.assertEqual(OFF, one.state)
            if one.id in off:
                self.assertIsNone(one.state)
                self.assertTrue(free)
                self.assertTrue(one.since is None or
                                NOW - one.since >= rules.minimum_on)
            if one.held:
                self.assertNotIn(one.id, on | off)
            elif one.state == OFF and (one.kept_on or (
                    one.needed_at is not None and
                    one.needed_at - one.lead <= NOW)):
                self.assertIn(one.id, on)
        self._check_spare(hosts, rules, on, off)
        self._check_waves(hosts, rules, on)

    def _check_spare(self, hosts, rules, on, off):
        """Check that enough hosts stay on, and no more than that."""
        for kind in 'ab':
            free = [one for one in hosts if one.kind == kind and
                    not one.held and one.is_free(rules.minimum_off, NOW)]
            there = [one for one in free
                     if one.state in (None, BOOTING) and one.id not in off]
            if any(one.id in off for one in free):
                self.assertGreaterEqual(len(there), rules.spare_hosts)
                self.assertFalse(any(
                    one.id in on and one.needed_at is None for one in free))
            rested = [one for one in there if one.state is None and (
                one.since is None or NOW - one.since >= rules.minimum_on)]
            if len(there) > rules.spare_hosts:
                self.assertEqual([], rested)

    def _check_waves(self, hosts, rules, on):
        """Check that hosts left off can be switched on in time, in rounds."""
        left = sorted(one.needed_at - one.lead for one in hosts
                      if one.state == OFF and not one.held and
                      one.needed_at is not None and
                      one.id not in on)
        for number, at in enumerate(left):
            first = NOW + power_planner.ROUND * (
                number // rules.max_switching)
            if number >= rules.max_switching:
                self.assertGreater(at, first - power_planner.ROUND)

    def test_rounds_of_switching_match_brute_force(self):
        """Compare the rounds of switching with all possible orders."""
        for needed in itertools.combinations_with_replacement(
                range(0, 60, 10), 4):
            hosts = [host(number, OFF, needed_in=one + 1, lead=1)
                     for number, one in enumerate(needed)]
            now = plan(*hosts, max_switching=1)
            left = [one for one in hosts if (one.id, True) not in now]
            possible = any(
                all(one.needed_at - one.lead - NOW >= 10 * (1 + place)
                    for place, one in enumerate(order))
                for order in itertools.permutations(left))
            self.assertTrue(possible or not left, needed)
            # With one less it would be too late.
            if now and len(now) < 4:
                more = [*left, now and hosts[now[-1][0]]]
                self.assertFalse(any(
                    all(one.needed_at - one.lead - NOW >= 10 * (1 + place)
                        for place, one in enumerate(order))
                    for order in itertools.permutations(more)), needed)
