# SPDX-License-Identifier: Apache-2.0

"""Maintenance of hosts."""

from unittest import mock

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import maintenance
from blazar_core.lifecycle.server_moves import Obstacle
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_host_status

load_tests = databases.load_tests

NOW = base.NOW
#: Seconds from now on.
FROM, UNTIL = 1000, 5000


class MaintenanceTestCase(test_host_status.HostStatusTestCase):

    scenarios = databases.SCENARIOS

    def setUp(self):
        super().setUp()
        self.maintenance = self.new_maintenance()

    def window(self, start=FROM, end=UNTIL):
        return model.Window(NOW + start, NOW + end)

    def take(self, name='one', start=FROM, end=UNTIL):
        self.maintenance.announce(name, self.window(start, end), 'firmware')

    def promised(self, name='one', start=FROM, end=UNTIL):
        return [(one.lease_id, one.obstacle) for one in
                self.maintenance.promised(name, self.window(start, end))]


class TestScheduleMaintenance(MaintenanceTestCase):

    def test_bookings_during_maintenance_are_reassigned_at_once(self):
        """Leases are moved that a failure would not affect yet."""
        before = self.booked_on('one', 10, FROM)
        during = self.booked_on('one', FROM - 1, FROM + 1)
        after = self.booked_on('one', UNTIL, UNTIL + 10)
        self.overbooking.look()
        self.take()
        self.overbooking.look()
        self.assertEqual([['one'], ['two'], ['one']], [
            self.hosts_of(one) for one in (before, during, after)])
        self.assertEqual([('lease.update', during['id']),
                          ('lease.healed', during['id'])],
                         self.notified[-2:])

    def test_host_is_not_bookable_during_maintenance(self):
        self.take()
        refused = self.assertRaises(
            errors.Refused, self.booked_on, 'one', FROM + 1, FROM + 2)
        self.assertEqual(NOW + UNTIL, refused.refusal.next_start)
        self.booked_on('one', 10, FROM)
        self.booked_on('one', UNTIL, UNTIL + 1)

    def test_repeated_announcement_replaces_window(self):
        self.take()
        self.take()
        self.assertEqual({'one': (FROM, UNTIL)}, self.outages())
        self.take(start=FROM + 5, end=UNTIL + 5)
        self.assertEqual({'one': (FROM + 5, UNTIL + 5)}, self.outages())
        one, = outages.listed(self.database)
        self.assertEqual(
            ('one', outages.MAINTENANCE, 'firmware', NOW + FROM + 5,
             NOW + UNTIL + 5),
            (one.name, one.kind, one.reason, one.began_at, one.until))

    def test_maintenance_can_be_ended_early(self):
        self.take()
        self.maintenance.end_early('one')
        # Ending it again has no effect.
        self.maintenance.end_early('one')
        one = {'id': None, 'name': 'one'}
        self.assertEqual([
            ('host.maintenance', {
                **one, 'message': 'firmware',
                'start_date': clocks.iso(NOW + FROM),
                'end_date': clocks.iso(NOW + UNTIL)}),
            ('host.maintenance', {
                **one, 'message': '', 'start_date': None, 'end_date': None}),
        ], self.host_events)
        self.assertEqual({}, self.outages())
        self.assertEqual([], self.scalars(models.Outage.host_id))
        self.booked_on('one', FROM + 1, FROM + 2)

    def test_contended_host_does_not_block_end_of_others(self):
        for name in 'one', 'two':
            self.take(name)
        self.clock.advance(UNTIL)
        end, busy = maintenance._end, self.uuid_of('one')

        def tried(database, clock, uuid, early):
            if uuid == busy:
                raise errors.ConcurrentUpdate('Others are.')
            end(database, clock, uuid, early)

        with mock.patch.object(maintenance, '_end', tried):
            maintenance.forget(self.database, self.clock)
        self.assertEqual(['one'], [
            one.name for one in outages.listed(self.database)])

    def test_host_is_available_after_maintenance(self):
        self.take()
        self.clock.advance(UNTIL - 1)
        self.overbooking.look()
        self.assertEqual({'one': (FROM, UNTIL)}, self.outages())
        self.clock.advance(1)
        self.booked_on('one', UNTIL + 1, UNTIL + 2)
        self.clock.advance(100)
        self.overbooking.look()
        self.assertEqual({}, self.outages())
        self.assertEqual([], self.scalars(models.Outage.host_id))

    def test_host_failure_outlasts_maintenance(self):
        lease = self.running_lease(
            0, UNTIL, hosts=frozenset([self.uuid_of('one')]))
        self.take(start=0)
        self.assertIs(False, self.get(lease)['degraded'])
        self.fail()
        self.assertIs(True, self.get(lease)['degraded'])
        # The end of the maintenance does not mean that the host is up.
        self.maintenance.end_early('one')
        self.assertIs(True, self.get(lease)['degraded'])
        self.see(one=None)
        self.clock.advance(test_host_status.BACK)
        self.see(one=None)
        self.assertIs(False, self.get(lease)['degraded'])
        self.assertEqual({}, self.outages())

    def test_unknown_or_empty_host_is_refused(self):
        self.assertRaises(errors.NotFound, self.take, 'nowhere')
        self.assertRaises(
            errors.NotFound, self.maintenance.end_early, 'nowhere')
        self.assertRaises(errors.NotFound, self.promised, 'nowhere')
        self.with_host('none')
        self.assertIn('needs no maintenance', str(
            self.assertRaises(errors.Conflict, self.take, 'none')))


class TestPreview(MaintenanceTestCase):
    """The preview of a maintenance changes nothing."""

    def test_preview_lists_reassignable_and_stuck_bookings(self):
        running = self.running_lease(
            0, FROM + 1, hosts=frozenset([self.uuid_of('one')]))
        self.cloud.bound.update(base.servers_of(running))
        goes = self.booked_on('one', FROM, FROM + 100)
        self.booked_on('two', FROM + 200, FROM + 300)
        stays = self.booked_on('one', FROM + 200, FROM + 300, count=2)
        self.booked_on('one', UNTIL, UNTIL + 10)
        before = self.everything()
        self.assertEqual([
            (running['id'], Obstacle.BOUND), (goes['id'], ''),
            *sorted([(stays['id'], ''), (
                stays['id'], 'No other host has capacity for it.')])],
            sorted(self.promised(), key=lambda one: (
                [running['id'], goes['id'], stays['id']].index(one[0]),
                one[1])))
        self.assertEqual(before, self.everything())

    def test_preview_lists_overdue_lease(self):
        late = self.running_lease(
            0, 10, hosts=frozenset([self.uuid_of('one')]))
        self.clock.advance(FROM)
        self.assertEqual([(late['id'], 'It is in use.')], self.promised())
        self.assertEqual([], self.promised(start=FROM + 10_000_000,
                                           end=FROM + 10_000_001))

    def test_preview_moves_slots_with_affinity_together(self):
        self.wanted['project'] = model.Demand(
            {}, affinity=model.Affinity.SAME)
        lease = self.booked_on('one', FROM, FROM + 10, count=2)
        self.assertEqual([(lease['id'], '')] * 2, self.promised())
        self.booked_on('two', FROM, FROM + 10)
        self.assertEqual([
            (lease['id'], 'No other host has capacity for it.')] * 2,
            self.promised())

    def test_preview_tolerates_unavailable_cloud(self):
        lease = self.booked_on('one', FROM, FROM + 10)
        self.wanted['project'] = errors.CloudUnavailable('No answer.')
        self.assertEqual([(
            lease['id'], 'Whether it can be reassigned is not known now: No '
                         'answer.')],
            self.promised())

    def test_maintenance_applies_to_recreated_host(self):
        self.with_host('one')
        self.report('another', 'one', {}, {'VCPU': 2})
        self.take()
        self.assertEqual(['another'], [
            self.scalars(models.Host.uuid, models.Host.id == row)[0]
            for row in self.scalars(models.Outage.host_id)])

    def test_overbooking_is_logged_until_maintenance_starts(self):
        self.running_lease(
            0, FROM, hosts=frozenset([self.uuid_of('one')]), count=2)
        self.take()
        self.with_host('one', VCPU=1)
        self.overbooking.look()
        self.assertIn('overbooked', self.log.output)
