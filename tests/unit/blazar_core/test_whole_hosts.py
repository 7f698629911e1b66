# SPDX-License-Identifier: Apache-2.0

"""Whole hosts in the reservation database, independent of the cloud."""

from unittest import mock

from oslo_utils import uuidutils

from blazar_core.capacity import assignments
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import lease_end
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestReserveHosts(whole_hosts_base.WholeHostsTestCase):

    def test_whole_capacity_of_host_is_booked(self):
        self.host('one', VCPU=4, MEMORY_MB=100)
        lease = self.reserve_machines(10, 20)
        self.assertEqual({'one': {'VCPU': 4, 'MEMORY_MB': 100}},
                         self.bookings_of(lease))
        self.assertEqual(
            [{'HOST': 1}], [one['resources']
                            for one in lease['reservations']])
        refused = self.assertRaises(
            errors.Refused, self.lease, 0, 100)
        self.assertEqual(NOW + 20, refused.refusal.next_start)
        self.lease(0, 10)
        self.lease(20, 30)

    def test_partly_reserved_or_used_host_is_not_reserved_whole(self):
        self.host('one', VCPU=4)
        self.lease(0, 50)
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 49, 100)
        self.assertEqual(NOW + 50, refused.refusal.next_start)
        self.assertEqual(0, refused.refusal.fits_now)
        self.host('two', {'VCPU': 1}, VCPU=4)
        self.assertRaises(errors.Refused, self.reserve_machines, 49, 100)

    def test_number_of_hosts_is_between_minimum_and_maximum(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve_machines(0, 100, least=1, most=9)
        self.assertEqual({'one', 'two', 'three'},
                         self.bookings_of(lease).keys())
        self.assertEqual(3, lease['reservations'][0]['amount'])
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 0, 100, 2, 9)
        self.assertEqual((2, NOW + 100), (
            refused.refusal.wanted, refused.refusal.next_start))

    def test_refusal_states_number_of_fitting_hosts(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=4)
        refused = self.assertRaises(
            errors.Refused, self.reserve_machines, 0, 100, 3, 3)
        self.assertIn('Only 2 of the 3 requested hosts fit now; no start '
                      'would provide 3.', str(refused))
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, self.machines_of(3, 3),
            self.places(amount=1, vcpus=4))
        self.assertNotIn('requested hosts fit now', str(refused))

    def test_optional_hosts_are_left_to_other_reservations(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve(
            0, 100, self.machines_of(1, 3), self.machines_of(1, 1),
            self.places(amount=1, vcpus=4))
        self.assertEqual([1, 1, 1], sorted(
            one['amount'] for one in lease['reservations']))

    def test_pending_lease_of_hosts_grows_and_shrinks(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=4)
        lease = self.reserve_machines(50, 100)
        lease = self.change(lease, 2, 2)
        self.assertEqual(2, len(self.bookings_of(lease)))
        lease = self.change(lease, 1, 9)
        self.assertEqual(3, len(self.bookings_of(lease)))
        lease = self.change(lease, 1, 1)
        self.assertEqual(1, len(self.bookings_of(lease)))
        self.assertEqual(1, lease['reservations'][0]['amount'])
        self.assertRaises(errors.Refused, self.change, lease, 4, 4)
        self.assertEqual(1, len(self.bookings_of(lease)))

    def test_lease_of_hosts_can_be_moved_and_extended(self):
        self.host('one', VCPU=4)
        lease = self.reserve_machines(50, 100)
        self.lease(200, 300)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            end=NOW + 200))
        self.assertRaises(errors.Refused, self.leases.updates.update,
                          lease['id'], updates.LeaseChange(end=NOW + 201))
        self.host('two', VCPU=8)
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            start=NOW + 250, end=NOW + 350, reservations={
                lease['reservations'][0]['id']: self.machines_of()}))
        self.assertEqual({'two': {'VCPU': 8}}, self.bookings_of(lease))

    def test_booking_follows_changed_capacity_of_host(self):
        """No other lease gets the new capacity."""
        uuid = self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        for vcpus in (8, 2):
            self.report(uuid, 'one', None, {'VCPU': vcpus})
            self.assertEqual({'one': {'VCPU': vcpus}},
                             self.bookings_of(lease))
            self.assertRaises(errors.Refused, self.lease, 15, 16)
        self.overbooking_check().look()
        self.assertEqual({'one': {'VCPU': 2}}, self.bookings_of(lease))

    def test_removed_host_is_replaced(self):
        self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        self.host('two', VCPU=16)
        with self.database.writer() as session:
            inventory.retain(session, [self.uuid_of('two')], NOW)
        self.overbooking_check().look()
        self.assertEqual({'two': {'VCPU': 16}}, self.bookings_of(lease))

    def test_returned_host_is_booked_with_its_new_capacity(self):
        uuid = self.host('one', VCPU=4)
        lease = self.reserve_machines(10, 20)
        with self.database.writer() as session:
            inventory.retain(session, [], NOW)
        self.overbooking_check().look()
        self.assertEqual({}, self.bookings_of(lease))
        self.assertTrue(views.get(
            self.database, lease['id'])['reservations'][0][
                'missing_resources'])
        self.report(uuid, 'one', None, {'VCPU': 6})
        self.overbooking_check().look()
        self.assertEqual({'one': {'VCPU': 6}}, self.bookings_of(lease))

    def test_nothing_is_booked_on_host_without_capacity(self):
        """The host disappears between the search and the decision."""
        self.host('one', VCPU=4)
        lease = self.reserve(0, 10)
        with self.database.writer() as session:
            inventory.retain(session, [], NOW)
        new = ledger.NewBooking(
            lease['reservations'][0]['id'], self.scalars(models.Host.id)[0],
            None, model.Window(NOW + 10, NOW + 20), model.WHOLE)
        with self.database.writer() as session:
            self.assertRaises(ledger.OverCapacity, ledger.amend, session, NOW,
                              [ledger.Edit(None, new)])


class TestLimits(whole_hosts_base.WholeHostsTestCase):

    def asked(self, **resources):
        return limits.Asked('project', 'user', model.Window(NOW, NOW + 50),
                            0, resources)

    def test_whole_hosts_count_as_hosts_not_as_vcpus(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=64)
        self.db.conf.set_override(
            'max_reserved_hosts_per_project', 3, 'blazar_enforcement')
        self.db.conf.set_override(
            'max_reserved_vcpus_per_project', 10, 'blazar_enforcement')
        limited = limits.Limits(self.db.conf, self.database, self.clock,
                                serverless=['machine'])
        self.reserve_machines(0, 100, 2, 2)
        limited.check(self.asked(VCPU=10))
        limited.check(self.asked(HOST=1))
        exc = self.assertRaises(
            errors.LimitExceeded, limited.check, self.asked(HOST=2))
        self.assertIn(
            'may have 3 whole hosts in leases at most '
            '(max_reserved_hosts_per_project): its other leases have 2 at '
            'the same time, and this one asks for 2', str(exc))

    def test_grace_period_counts_for_duration_and_cleaning_does_not(self):
        self.host('one', VCPU=4)
        self.machines.cleaning_time = 60
        lease = self.reserve(50, 1050, self.machines_of(
            1, 1), request=self.request(50, 1050, grace_period=100))
        self.db.conf.set_override(
            'max_lease_duration', 500, 'blazar_enforcement')
        limited = limits.Limits(self.db.conf, self.database, self.clock,
                                serverless=['machine'])

        def check(end, lease_id=lease['id']):
            limited.check(limits.Asked(
                'project', 'user', model.Window(NOW + 50, NOW + end + 160), 0,
                {'HOST': 1}, lease_id=lease_id, resized=False,
                cleaning_time=60))

        # It uses no more than before.
        check(1050)
        check(1000)
        exc = self.assertRaises(errors.LimitExceeded, check, 1051)
        self.assertIn('would last 18 minutes 21 seconds', str(exc))
        check(450, None)
        self.assertRaises(errors.LimitExceeded, check, 451, None)


class TestAssignedHosts(whole_hosts_base.WholeHostsTestCase):

    def policies(self):
        return {**super().policies(), 'shelve': end_policies.Shelve()}

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuid = self.host('one', VCPU=4)

    def started(self, **wanted):
        lease = self.reserve_machines(**wanted)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(lease))
        return lease, lease['reservations'][0]['id']

    def look(self, usage):
        """Report the usage of the host, as read from the cloud."""
        with self.database.writer() as session:
            inventory.record_host_usage(
                session, self.clock.now(), self.uuid, {'somebody': usage},
                inventory.generations(session, [self.uuid])[self.uuid])

    def test_host_is_assigned_from_start_to_end_of_lease(self):
        lease, reservation_id = self.started()
        self.assertEqual({'one': reservation_id}, self.held())
        self.assertEqual({reservation_id: (self.uuid,)},
                         self.machines.doors)
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(({}, {}), (self.held(), self.machines.doors))
        self.assertEqual([self.clock.now()],
                         self.scalars(models.Host.recheck_at))

    def test_servers_on_assigned_host_are_not_usage(self):
        _lease, _id = self.started()
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        with self.database.begin() as connection:
            self.assertTrue(inventory.record_server(
                connection, self.clock.now(), 'one', 'one', 'server',
                {'VCPU': 1}))
        self.assertEqual([{}], self.scalars(models.Host.usage))

    def test_servers_left_on_unassigned_host_are_usage(self):
        _lease, _id = self.started()
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.report(self.uuid, 'one', {'VCPU': 3}, {'VCPU': 4})
        self.assertEqual([{'VCPU': 3}], self.scalars(models.Host.usage))

    def test_capacity_stays_reserved_until_hosts_are_unassigned(self):
        lease, reservation_id = self.started()
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual({'one': reservation_id}, self.held())
        refused = self.assertRaises(errors.Refused, self.lease, 100, 110)
        self.assertEqual(NOW + 160, refused.refusal.next_start)
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.lease(400, 410)

    def test_hosts_are_freed_while_another_reservation_is_not_closed(self):
        self.host('two', VCPU=4)
        lease = self.reserve(0, 100, self.machines_of(), self.places())
        driven.run_due(self.engine)
        self.assertEqual(1, len(self.held()))
        forced = []

        def end(reserved):
            forced.append(reserved.forced)
            raise errors.CloudUnavailable('its users hold it')

        with mock.patch.object(self.places_type, 'end', end):
            self.clock.advance(100)
            driven.run_due(self.engine)
            self.assertEqual('TERMINATING', self.status(lease))
            self.assertEqual({}, self.held())
            self.clock.advance(lease_end.FORCED - 1)
            driven.run_due(self.engine)
            self.assertNotIn(True, forced)
            self.clock.advance(retries.LONGEST_PAUSE)
            driven.run_due(self.engine)
            self.assertTrue(forced[-1])
        self.reserve_machines(1000, 2000, 2, 2)
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_host_stays_overdue_while_its_type_is_not_installed(self):
        self.started()
        self.types.named.clear()
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual([None], self.scalars(models.Host.overdue_at))
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual(['TERMINATING'], self.scalars(models.Lease.status))
        self.assertEqual([self.clock.now()],
                         self.scalars(models.Host.overdue_at))

    def test_hosted_servers_are_deleted_before_host_is_freed(self):
        lease, reservation_id = self.started()
        hosted = uuidutils.generate_uuid()
        self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [hosted]
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual([hosted], self.cloud.deleted)
        self.assertEqual({reservation_id: (self.uuid,)}, self.machines.doors)
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual({}, self.machines.doors)
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))

    def awaited(self):
        """Return the server on each of two hosts of a lease whose end is
        refused, and the host that another lease has reserved from then on.
        """
        self.host('two', VCPU=4)
        self.lifecycle.lease_end._limit = 3600
        lease = self.reserve(0, 100, self.machines_of(2, 2))
        self.lifecycle.lease_start.start(lease['id'])
        reservation_id, hosted = lease['reservations'][0]['id'], {}
        for name in ('one', 'two'):
            hosted[name] = uuidutils.generate_uuid()
            self.cloud.servers[hosted[name]] = cloud_api.ObservedServer(
                base.State.RUNNING, self.uuid_of(name))
        self.machines.full[reservation_id] = [*hosted.values()]
        with self.database.writer() as session:
            session.get_one(models.Lease, lease['id']).on_end = 'shelve'
        second = self.reserve_machines(100, 2000)
        wanted, = self.bookings_of(second)
        self.cloud.broken['set_resting_state'] = errors.CloudRefusal('No.')
        return hosted, wanted

    def run_until_awaited(self):
        for elapsed in (100, 160, 30):
            self.clock.advance(elapsed)
            driven.run_due(self.engine)

    def test_servers_on_host_needed_by_others_are_deleted_early(self):
        hosted, wanted = self.awaited()
        self.run_until_awaited()
        self.assertEqual([hosted[wanted]], self.cloud.deleted[:1])
        self.assertEqual({hosted[wanted]}, {*self.cloud.deleted})

    def test_no_early_deletion_while_host_is_unavailable(self):
        """The other lease cannot start there anyway."""
        _hosted, wanted = self.awaited()
        self.new_maintenance().announce(
            wanted, model.Window(NOW + 90, NOW + 9000), 'firmware')
        self.run_until_awaited()
        self.assertEqual([], self.cloud.deleted)

    def test_stalled_process_changes_no_server_after_lease_end(self):
        """A process stands still while another one completes the end."""
        lease, reservation_id = self.started()
        hosted = uuidutils.generate_uuid()
        running = self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING, self.uuid)
        self.machines.full[reservation_id] = [hosted]
        with self.database.writer() as session:
            session.get_one(models.Lease, lease['id']).on_end = 'shelve'
        real = self.cloud.set_resting_state

        def stand_still(*args):
            self.cloud.set_resting_state = real
            self.lifecycle.lease_end.end(lease['id'], when_due=True)
            self.machines.full.clear()
            self.clock.advance(600)
            self.lifecycle.lease_end.end(lease['id'], when_due=True)
            self.assertEqual('TERMINATED', self.status(lease))
            # Its owner has unshelved it.
            self.cloud.servers[hosted] = running
            real(*args)

        self.cloud.set_resting_state = stand_still
        self.clock.advance(100)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual(
            ([(hosted, cloud_api.RestingState.SHELVED)], [running], []),
            (self.cloud.rests, [*self.cloud.servers.values()],
             self.cloud.deleted))

    def test_next_lease_waits_until_host_is_free(self):
        first, first_id = self.started()
        self.machines.full[first_id] = [uuidutils.generate_uuid()]
        second = self.reserve_machines(100, 2000)
        self.clock.advance(100 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(second))
        self.assertEqual({'one': first_id}, self.held())
        self.assertIn('not free yet', views.get(
            self.database, second['id'])['status_reason'])
        self.machines.full.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.clock.advance(60)
        driven.run_due(self.engine)
        # The host was not read since the end of the lease.
        self.assertEqual('PENDING', self.status(second))
        self.look({'VCPU': 1})
        self.clock.advance(60)
        driven.run_due(self.engine)
        # There still is a server.
        self.assertEqual('PENDING', self.status(second))
        self.assertEqual({}, self.held())
        self.look({})
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(second))
        self.assertEqual('', views.get(
            self.database, second['id'])['status_reason'])
        self.assertEqual({'one': second['reservations'][0]['id']},
                         self.held())

    def test_moved_lease_waits_only_for_its_new_start(self):
        _first, first_id = self.started()
        self.machines.full[first_id] = [uuidutils.generate_uuid()]
        second = self.reserve_machines(100, 2000)
        self.clock.advance(100 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertIn('not free yet', self.reason(second))
        self.leases.updates.update(second['id'], updates.LeaseChange(
            start=NOW + 1000))
        self.assertEqual(('PENDING', ''), (
            self.status(second), self.reason(second)))

    def test_start_waits_for_overstaying_server(self):
        lease = self.running_lease(0, 50)
        whole = self.reserve_machines(50, 2000)
        self.clock.advance(50 + self.start_timeout + 1)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(whole))
        self.assertEqual({}, self.held())
        self.cloud.servers.clear()
        self.clock.advance(300)
        driven.run_due(self.engine)
        self.assertEqual('TERMINATED', self.status(lease))
        self.clock.advance(60)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(whole))

    def test_hosts_added_later_are_assigned(self):
        lease, reservation_id = self.started()
        other = self.host('two', VCPU=2)
        self.change(lease, 2, 2)
        driven.run_due(self.engine)
        self.assertEqual({'one': reservation_id, 'two': reservation_id},
                         self.held())
        self.assertEqual({self.uuid, other},
                         set(self.machines.doors[reservation_id]))

    def test_failed_start_assigns_no_host(self):
        lease, reservation_id = self.started()
        with self.database.writer() as session:
            row = session.get(models.Lease, lease['id'])
            row.status = states.Lease.STARTING
        self.lifecycle.lease_start.give_up(
            lease['id'], states.EventType.START)
        self.assertEqual({}, self.held())
        self.assertEqual('ERROR', self.status(lease))

    def test_assigning_hosts_twice_is_idempotent(self):
        lease, _id = self.started()
        before = self.scalars(models.Host.generation)
        with self.database.writer() as session:
            assignments.assign(session, NOW, session.get(
                models.Lease, lease['id']).reservations)
        self.assertEqual(before, self.scalars(models.Host.generation))


class TestEndedLookup(whole_hosts_base.WholeHostsTestCase):
    """The lease of a host that has ended is found by its reservation."""

    def setUp(self):
        super().setUp()
        for name in ('one', 'two'):
            self.host(name, VCPU=4)
        self.first, self.other = (
            self.reserve_machines(0, 1000) for _number in range(2))
        self.lookup = self.leases.lookup

    def ended(self, lease):
        return self.lookup.ended_hosts(lease['reservations'][0]['id'])

    def test_ended_lease_is_found_only_by_its_own_reservation(self):
        driven.run_due(self.new_engine())
        self.assertFalse(self.lookup.any_ending())
        self.assertIsNone(self.ended(self.first))
        self.machines.full = {self.first['reservations'][0]['id']: ['busy']}
        self.lifecycle.lease_end.delete(self.first['id'])
        self.assertTrue(self.lookup.any_ending())
        found = self.ended(self.first)
        self.assertEqual((self.first['id'], 'delete'),
                         (found.lease_id, found.on_end))
        self.assertIsNone(self.ended(self.other))
        self.assertIsNone(self.lookup.ended_hosts('unheard of'))
