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
import sqlalchemy as sa

from blazar_core import cloud as clouds
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import changing
from blazar_core.leases import views
from blazar_core.lifecycle import ends
from blazar_core.lifecycle import facts
from tests import databases
from tests.unit import base

NOW = base.NOW

load_tests = databases.load_tests


class Keep(ends.EndPolicy):
    """Servers stay as they are, and nothing is promised to them any more."""

    def ask(self, cloud: clouds.Cloud, server_id: str,
            credential: str | None) -> None:
        pass

    def is_over(self, cloud: clouds.Cloud, server_id: str,
                seen: clouds.Seen) -> bool:
        return True


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

    def is_over(self, cloud, server_id, seen):
        return seen.fault == 'off'


class TestGracePeriod(base.LeaseTestCase):
    """A server of a lease until 100, and for 50 seconds more."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=1)
        self.lease_ = self.running_lease(request=self.request(
            grace_period=50))
        self.engine = self.new_engine()

    def run_at(self, time):
        self.clock.advance(base.NOW + time - self.clock.now())
        self.engine.run_due()

    def notices(self):
        return [event for event, _lease in self.notified
                if event == 'lease.event.grace_period']

    def test_it_may_become_another_one(self):
        def change(seconds):
            return self.leases.changing.update(self.lease_['id'], (
                changing.Change(grace_period=seconds)))

        later = self.lease(150, 300)
        self.assertRaises(errors.Refused, change, 51)
        self.leases.making.withdraw(later['id'])
        self.assertEqual(80, change(80)['grace_period'])
        self.assertEqual(base.NOW + 180, self.assertRaises(
            errors.Refused, self.lease, 150, 300).refusal.next_start)
        self.assertEqual(0, change(0)['grace_period'])
        self.lease(100, 300)
        self.run_at(100)
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)

    def test_who_wants_another_end_gets_that(self):
        self.leases.changing.update(self.lease_['id'], changing.Change(
            on_end=ends.RECYCLE, grace_period=0))
        row, = self.scalars(models.Lease)
        self.assertEqual((ends.RECYCLE, 0), (row.on_end, row.grace_period))

    def test_its_room_is_taken_as_long(self):
        refused = self.assertRaises(errors.Refused, self.lease, 100, 300)
        self.assertEqual(base.NOW + 150, refused.refusal.next_start)
        self.lease(150, 300)

    def test_the_server_is_left_alone_and_it_is_told_once(self):
        for time in (100, 120, 149):
            self.run_at(time)
            self.assertEqual([], self.cloud.deleted)
        self.assertEqual('TERMINATING', self.status(self.lease_))
        self.assertEqual(facts.GRACE, self.reason(self.lease_))
        self.assertEqual(1, len(self.notices()))
        self.run_at(150)
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(self.lease_))
        self.assertEqual('', self.reason(self.lease_))

    def test_it_is_told_once_beside_what_else_is_said(self):
        with self.database.writer() as session:
            session.get(models.Lease, self.lease_['id']).status_reason = (
                'Could not be built: x.')
        for time in (100, 120):
            self.run_at(time)
            self.lifecycle.ending.end(self.lease_['id'], when_due=True)
        self.assertEqual(1, len(self.notices()))
        self.assertEqual(f'Could not be built: x. {facts.GRACE}',
                         self.reason(self.lease_))
        self.run_at(150)
        self.assertEqual('Could not be built: x.', self.reason(self.lease_))

    def test_who_has_no_server_any_more_needs_no_time(self):
        (server,) = base.servers_of(self.lease_)
        self.run_at(100)
        del self.cloud.servers[server]
        self.lifecycle.observing.check(server)
        self.assertEqual('TERMINATED', self.status(self.lease_))

    def test_who_deletes_his_lease_does_not_want_it(self):
        self.lifecycle.ending.delete(self.lease_['id'])
        self.engine.run_due()
        self.assertEqual(base.servers_of(self.lease_), self.cloud.deleted)
        self.assertEqual([], self.notices())

    def test_it_moves_with_the_end(self):
        self.leases.changing.update(
            self.lease_['id'], changing.Change(end=base.NOW + 200))
        self.assertEqual([base.NOW + 250],
                         self.scalars(models.Booking.end_date))


class TestPolicies(base.LeaseTestCase):

    def policies(self):
        self.shut = Shut()
        return {**super().policies(), 'shut': self.shut, 'keep': Keep()}

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

    def test_who_is_deleted_while_he_is_asked_for_something_else_goes(self):
        lease, servers = self.ending('shut')
        is_over = self.shut.is_over

        def late(*args):
            self.lifecycle.ending.delete(lease['id'])
            return is_over(*args)

        self.shut.is_over = late
        self.lifecycle.ending.end(lease['id'], when_due=True)
        self.assertEqual('DELETING', self.status(lease))
        self.lifecycle.ending.end(lease['id'])
        self.assertEqual(servers, self.cloud.deleted)

    def test_one_that_cannot_be_judged_keeps_no_other(self):
        lease, (first, second) = self.ending('shut')
        is_over = self.shut.is_over

        def broken(cloud, server_id, seen):
            return 1 / 0 if server_id == first else is_over(
                cloud, server_id, seen)

        self.shut.is_over = broken
        self.assertEqual(facts.AGAIN, self.lifecycle.ending.end(
            lease['id'], when_due=True).seconds)
        self.assertEqual([first], self.scalars(models.Booking.server_id))

    def test_what_has_never_run_is_deleted(self):
        lease = self.lease(50, 100, request=self.request(
            50, 100, on_end='shut'))
        self.clock.advance(100)
        self.lifecycle.ending.end(lease['id'])
        self.assertEqual([], self.shut.asked)
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_what_stays_takes_its_room(self):
        lease, servers = self.ending('keep')
        with self.database.writer() as session:
            host = session.scalars(sa.select(models.Host)).one()
            host.consumers = {}
        self.lifecycle.ending.end(lease['id'], when_due=True)
        self.assertEqual('TERMINATED', self.status(lease))
        host, = self.scalars(models.Host)
        self.assertEqual(({'VCPU': 2}, NOW + 100), (
            host.usage, host.recheck_at))
        self.assert_room(2)

    def test_what_stays_where_nothing_is_known_is_looked_for(self):
        lease, servers = self.ending('keep')
        self.lifecycle.ending.end(lease['id'], when_due=True)
        self.assertEqual([NOW + 100], self.scalars(models.Host.recheck_at))

    def assert_room(self, count):
        """So many servers of one VCPU fit, and no more."""
        self.lease(200, 300, count=count)
        self.assertRaises(errors.Refused, self.lease, 200, 300)

    def test_another_process_may_know_what_is_not_known_here(self):
        log = self.useFixture(fixtures.FakeLogger())
        lease, servers = self.ending('vanish')
        later = self.lifecycle.ending.end(lease['id'], when_due=True)
        self.assertIn('knows how to vanish', later.why)
        self.assertEqual(('ACTIVE', []), (
            self.status(lease), self.cloud.deleted))
        # Nobody did.
        self.clock.advance(self.patience)
        for _time in range(2):
            self.assertIsNone(
                self.lifecycle.ending.end(lease['id'], when_due=True))
        self.assertEqual(servers, self.cloud.deleted)
        self.assertEqual(1, log.output.count('knows how to vanish them'))
