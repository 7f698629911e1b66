# SPDX-License-Identifier: Apache-2.0
"""The effect of a server group on a demand."""

import types
from unittest import mock

from blazar_core.common import model
from blazar_core.plugins import end_policies
from blazar_nova.compat import server_demand
from blazar_nova.resource_types import extensions
from blazar_nova.resource_types import server_groups
from tests.unit import base

EVERY = frozenset({'uuid-1', 'uuid-2', 'uuid-3'})


class TestGroups(base.TestCase):

    def in_group(self, policy, running, booked=(), window=None, per_host=1):
        """Return the demand of a server in a group with servers that run, and
        with some that are booked.
        """
        group = server_demand.Group(
            policy, per_host, [*running, *dict(booked)], running)
        known = types.SimpleNamespace(
            bookings=lambda _ids: dict(booked),
            hosts_of_services=lambda hosts: {
                f'uuid-{host}': host for host in hosts})
        with mock.patch.object(server_demand, 'group_of', return_value=group):
            return server_groups.in_group(
                model.Demand({'VCPU': 1}, hosts=EVERY), None, None, [], known,
                window)

    def test_affinity_demand_keeps_hosts_without_group(self):
        demand = self.in_group('affinity', {'server': '1'})
        self.assertEqual({'uuid-1'}, demand.hosts)
        self.assertEqual(EVERY, demand.ungrouped)

    def test_anti_affinity_avoids_hosts(self):
        demand = self.in_group('anti-affinity', {'server': '1'})
        self.assertEqual({'uuid-1'}, demand.avoid)
        self.assertEqual(EVERY, demand.hosts)

    def test_members_booked_at_other_times_do_not_count(self):
        booked = {'early': ('uuid-1', model.Window(0, 10)),
                  'late': ('uuid-2', model.Window(20, 30))}
        for window, hosts in ((model.Window(10, 20), set()),
                              (model.Window(9, 20), {'uuid-1'}),
                              (model.Window(10, 21), {'uuid-2'}),
                              (None, {'uuid-1', 'uuid-2'})):
            self.assertEqual(hosts, self.in_group(
                'anti-affinity', {}, booked, window).avoid)
            self.assertEqual(
                dict.fromkeys(hosts, 1),
                self.in_group('soft-affinity', {}, booked, window).members)
            self.assertEqual(hosts or EVERY, self.in_group(
                'affinity', {}, booked, window).hosts)

    def test_member_without_booking_has_no_end(self):
        self.assertEqual({'uuid-1'}, self.in_group(
            'anti-affinity', {'server': '1'}, (),
            model.Window(10, 20)).avoid)

    def test_member_running_elsewhere_than_booked_counts_on_both(self):
        booked = {'one': ('uuid-1', model.Window(0, 10))}
        for window, hosts in ((model.Window(5, 20), {'uuid-1', 'uuid-2'}),
                              (model.Window(10, 20), set())):
            self.assertEqual(hosts, self.in_group(
                'anti-affinity', {'one': '2'}, booked, window).avoid)

    def test_affinity_hosts_have_members_at_every_time_of_window(self):
        booked = {'early': ('uuid-1', model.Window(0, 10)),
                  'late': ('uuid-2', model.Window(10, 20)),
                  'both': ('uuid-1', model.Window(5, 12))}
        for window, hosts in (
                (model.Window(0, 10), {'uuid-1'}),
                # Without 'early', either host fits until 'both' ends.
                (model.Window(0, 12), {'uuid-1'}),
                (model.Window(10, 12), {'uuid-1', 'uuid-2'}),
                (model.Window(0, 13), set())):
            self.assertEqual(hosts, self.in_group(
                'affinity', {}, booked, window).hosts)


class TestLeavingPolicies(base.TestCase):

    def test_leaving_policies_are_those_that_keep_no_servers(self):
        booked = model.Window(1, 2)
        for name, policy in extensions.installed_policies().items():
            self.assertEqual(
                policy.stays or policy.goes_on,
                end_policies.stay(booked, name) != booked, name)
