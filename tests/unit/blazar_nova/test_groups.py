# SPDX-License-Identifier: Apache-2.0
"""What a server group adds to a demand."""

import types
from unittest import mock

from blazar_core.common import model
from blazar_nova.compat import demand as demands
from blazar_nova.resources import groups
from tests.unit import base

EVERY = frozenset({'uuid-1', 'uuid-2', 'uuid-3'})


class TestGroups(base.TestCase):

    def in_group(self, policy, running):
        """The demand of a server in a group with servers that run."""
        group = demands.Group(policy, 1, list(running), running)
        known = types.SimpleNamespace(
            booked_hosts=lambda _ids: {},
            hosts_of_services=lambda hosts: {
                f'uuid-{host}': host for host in hosts})
        with mock.patch.object(demands, 'group_of', return_value=group):
            return groups.in_group(
                model.Demand({'VCPU': 1}, hosts=EVERY), None, None, [], known)

    def test_affinity_tells_which_hosts_would_do_without_it(self):
        demand = self.in_group('affinity', {'server': '1'})
        self.assertEqual({'uuid-1'}, demand.hosts)
        self.assertEqual(EVERY, demand.ungrouped)

    def test_anti_affinity_avoids_hosts(self):
        demand = self.in_group('anti-affinity', {'server': '1'})
        self.assertEqual({'uuid-1'}, demand.avoid)
        self.assertEqual(EVERY, demand.hosts)
