# SPDX-License-Identifier: Apache-2.0

"""Leases in one server group with different windows."""

from blazar_core.common import clocks
from tests.functional import api_base

HOUR = 3600


class TestServerGroups(api_base.ApiTestCase):

    def boot_in(self, group, name, start, end):
        """Boot a server in a group, with a lease in seconds from now; return
        its id.
        """
        return self.boot(name, hints={
            **self.lease_hints(name, start, end - start), 'group': group,
        })['id']

    def group(self, policy):
        return self.alice.post_server_groups(
            {'name': policy, 'policy': policy})['id']

    def test_members_with_other_windows_do_not_exclude_hosts(self):
        group = self.group('anti-affinity')
        first = self.boot_in(group, 'one', HOUR, 2 * HOUR)
        second = self.boot_in(group, 'two', 3 * HOUR, 4 * HOUR)
        both = self.boot_in(group, 'both', HOUR, 4 * HOUR)
        booked = self.bookings()
        self.assertEqual(booked[first], booked[second])
        self.assertNotEqual(booked[first], booked[both])
        # With that end it would overlap the second one on this host.
        refused = self.ask('PUT', f'/leases/{self.lease("one")["id"]}', {
            'end_date': self.at(3 * HOUR + 60)}, code=409)
        self.assertIn('server group', str(refused))
        latest = self.began + 3 * HOUR
        self.assertIn(f'latest_end: {clocks.iso(latest - latest % 60)}',
                      str(refused))
        self.ask('PUT', f'/leases/{self.lease("one")["id"]}', {
            'end_date': self.at(3 * HOUR)}, code=200)

    def test_consecutive_members_start_on_same_host(self):
        group = self.group('anti-affinity')
        servers = [self.boot_in(group, str(number), number * HOUR,
                                (number + 1) * HOUR) for number in (1, 2, 3)]
        host, = set(self.bookings().values())
        for number, server_id in enumerate(servers, 1):
            self.run_until(self.began + number * HOUR)
            # Its start waits until the previous server has left.
            self.wait_for(lambda: self.run_until(
                self.clock.now() + 2) or server_id in self.guests())
            self.assertEqual(host, self.wait_for_status(
                server_id, 'ACTIVE')['OS-EXT-SRV-ATTR:host'])

    def test_affinity_applies_only_to_overlapping_members(self):
        group = self.group('affinity')
        first = self.boot_in(group, 'one', HOUR, 2 * HOUR)
        self.hold('full', 3 * HOUR, flavor='4', client=self.admin,
                  host=self.bookings()[first])
        second = self.boot_in(group, 'two', 3 * HOUR, 4 * HOUR)
        self.assertEqual(2, len({self.bookings()[one]
                                 for one in (first, second)}))
        # No host has both of them.
        self.assertIn('fits_now: 0 of 1', self.refused(
            409, self.boot_in, group, 'both', HOUR, 4 * HOUR))
