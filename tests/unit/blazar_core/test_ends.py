#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.


import fixtures

from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import ends
from blazar_core.lifecycle import facts
from tests.unit import base


class Shut(ends.EndPolicy):
    """Turns servers off, and lets them be."""

    def __init__(self):
        self.asked = []
        self.stubborn = set()

    def ask(self, cloud, server_id, credential):
        if server_id in self.stubborn:
            raise errors.CloudUnavailable('its host is away')
        self.asked.append((server_id, credential))
        cloud.servers[server_id] = clouds.Seen(
            base.State.RUNNING, cloud.servers[server_id].host, fault='off')

    def is_over(self, seen):
        return seen.fault == 'off'


class TestPolicies(base.LeaseTestCase):

    def policies(self):
        self.shut = Shut()
        return {**super().policies(), 'shut': self.shut}

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)

    def ending(self, on_end, count=2):
        lease = self.running_lease(0, 100, request=self.request(
            0, 100, on_end=on_end), count=count, credential='trust')
        self.clock.advance(100)
        return lease, base.servers_of(lease)

    def test_a_lease_ends_as_was_asked_for(self):
        lease, servers = self.ending('shut')
        self.assertIsNone(
            self.lifecycle.ending.end(lease['id'], when_due=True))
        self.assertEqual([(one, 'trust') for one in servers],
                         self.shut.asked)
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.scalars(models.Booking.id))
        self.assertEqual({*servers}, self.cloud.servers.keys())

    def test_it_is_asked_for_until_it_is_so(self):
        lease, (first, second) = self.ending('shut')
        self.shut.stubborn.add(first)
        self.assertEqual(facts.AGAIN, self.lifecycle.ending.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([first], self.scalars(models.Booking.server_id))
        self.shut.stubborn.clear()
        self.assertIsNone(
            self.lifecycle.ending.end(lease['id'], when_due=True))
        self.assertEqual([(second, 'trust'), (first, 'trust')],
                         self.shut.asked)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_is_deleted_is_deleted(self):
        lease, servers = self.ending('shut')
        self.lifecycle.ending.delete(lease['id'])
        self.lifecycle.ending.end(lease['id'])
        self.assertEqual(servers, self.cloud.deleted)
        self.assertEqual([], self.shut.asked)
        self.assertRaises(
            errors.NotFound, views.get, self.database, lease['id'])

    def test_what_is_not_known_any_more_is_to_delete(self):
        log = self.useFixture(fixtures.FakeLogger())
        lease, servers = self.ending('vanish')
        self.assertIsNone(
            self.lifecycle.ending.end(lease['id'], when_due=True))
        self.assertEqual(servers, self.cloud.deleted)
        self.assertIn('knows how to vanish them', log.output)
