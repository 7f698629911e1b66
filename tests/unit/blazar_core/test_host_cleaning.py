# SPDX-License-Identifier: Apache-2.0

"""Cleaning of hosts between two leases."""

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.audit import audit
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import limits
from blazar_core.leases import updates
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestCleaning(whole_hosts_base.WholeHostsTestCase):
    """Two hosts of a lease that ended at 100."""

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuids = sorted(
            self.host(name, VCPU=4) for name in ('one', 'two'))

    def started(self, cleaning_time=0, **values):
        self.machines.cleaning_time = cleaning_time
        lease = self.reserve(
            0, 100, self.machines_of(2, 2), request=self.request(**values))
        driven.run_due(self.engine)
        return lease, lease['reservations'][0]['id']

    def run_at(self, time):
        self.clock.advance(NOW + time - self.clock.now())
        driven.run_due(self.engine)

    def looked(self):
        """Record that the cloud was read: the hosts are empty."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(recheck_at=None))

    def test_hosts_are_unavailable_during_cleaning_time(self):
        lease, reservation_id = self.started(cleaning_time=60)
        for start in (100, 159):
            refused = self.assertRaises(
                errors.Refused, self.reserve_machines, start, 300)
            self.assertEqual(NOW + 160, refused.refusal.next_start)
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(lease_conditions.CLEANING.message, self.reason(lease))
        self.assertEqual({'one', 'two'}, self.held().keys())
        self.assertIn(reservation_id, self.machines.doors)
        self.run_at(159)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(160)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(({}, {}, ''), (
            self.held(), self.machines.doors, self.reason(lease)))
        self.assertEqual([(None, None)] * 2, [
            (row.vacated_at, row.cleaned_at)
            for row in self.scalars(models.Host)])

    def test_cleaning_starts_after_last_server_is_deleted(self):
        lease, reservation_id = self.started(cleaning_time=60)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.run_at(100)
        self.assertEqual([], self.machines.swept)
        self.machines.full.clear()
        self.run_at(130)
        self.run_at(189)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(190)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_cleaning_is_retried_only_for_dirty_hosts(self):
        lease, _id = self.started()
        first, second = self.uuids
        self.machines.dirty = {second}
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(lease_conditions.CLEANING.message, self.reason(lease))
        self.run_at(200)
        self.assertEqual([first, second, second], self.machines.swept)
        self.assertEqual(2, len(self.held()))
        self.machines.dirty.clear()
        self.run_at(300)
        self.assertEqual([first, second, second, second],
                         self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_hosts_are_cleaned_after_each_lease(self):
        for _time in range(2):
            self.started()
            self.clock.advance(100)
            driven.run_due(self.engine)
            self.clock.advance(-100)
        self.assertEqual(self.uuids * 2, self.machines.swept)

    def test_unused_hosts_are_not_cleaned(self):
        self.machines.cleaning_time = 60
        lease = self.reserve_machines(50, 100)
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))
        self.assertEqual([], self.machines.swept)

    def test_cleaning_time_is_that_of_lease_creation(self):
        lease, _id = self.started(cleaning_time=60)
        self.machines.cleaning_time = 0
        self.leases.updates.update(
            lease['id'], updates.LeaseChange(end=NOW + 200))
        self.assertEqual({NOW + 260}, {*self.scalars(
            models.Booking.end_date)})
        self.run_at(200)
        self.run_at(259)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(260)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_hosts_are_cleaned_only_after_successful_start(self):
        """The start is given up at first, and succeeds in the end."""
        start, self.machines.start = self.machines.start, lambda _: 1 / 0
        self.machines.cleaning_time = 600
        lease = self.reserve_machines(0, 10_000, 2, 2)
        driven.run_due(self.engine)
        self.lifecycle.lease_start.give_up(lease['id'], states.EventType.START)
        self.assertEqual([], self.machines.swept)
        self.assertEqual('ERROR', self.status(lease))
        self.machines.start = start
        self.looked()
        second = self.reserve_machines(100, 10_000, 2, 2)
        self.run_at(400)
        self.assertEqual('ACTIVE', self.status(second))
        self.run_at(10_000)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATING', self.status(second))

    def test_cleaning_state_of_earlier_lease_is_ignored(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                vacated_at=NOW, cleaned_at=NOW, cleaning_until=NOW))
        self.started(cleaning_time=60)
        self.run_at(100)
        self.assertEqual(self.uuids, self.machines.swept)

    def test_clock_that_was_ahead_does_not_delay_cleaning(self):
        lease, _id = self.started(cleaning_time=60)
        self.run_at(100)
        with self.database.writer() as session:
            # The state after a worker that died over the cleaning.
            session.execute(sa.update(models.Host).values(
                vacated_at=self.clock.now() + 3600, cleaned_at=None,
                cleaning_until=self.clock.now() + 3600 + 30))
        self.machines.swept.clear()
        for _time in range(16):
            self.run_at(self.clock.now() - NOW + 10)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_host_is_not_cleaned_twice_concurrently(self):
        """A lease is deleted while its hosts are cleaned."""
        lease, _id = self.started()
        clean, times = self.machines.clean, []

        def slow(*args):
            times.append(self.clock.now())
            if len(times) == 1:
                self.lifecycle.lease_end.delete(lease['id'])
                driven.run_due(self.new_engine('second'))
            return clean(*args)

        self.machines.clean = slow
        self.run_at(100)
        self.assertEqual(1, len(times))
        self.run_at(110)
        self.assertEqual(['TERMINATED'], self.scalars(models.Lease.status))
        self.assertEqual(self.uuids, self.machines.swept)

    def test_stalled_process_starts_no_cleaning(self):
        lease, _id = self.started()
        clean, late = self.machines.clean, []

        def frozen(reserved, hosts, deadline):
            self.clock.advance(3600)
            late.append(deadline.passed())
            return ()

        self.machines.clean = frozen
        self.run_at(100)
        self.assertEqual([True], late)
        self.machines.clean = clean
        self.run_at(4000)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_stalled_process_does_not_take_over_cleaning(self):
        lease, _id = self.started()
        clean, times = self.machines.clean, []

        def frozen(*args):
            times.append(self.clock.now())
            if len(times) > 2:
                return clean(*args)
            self.clock.advance(3600)
            if len(times) == 1:
                # Another worker takes over, and freezes as well.
                self.lifecycle.lease_end.end(lease['id'], when_due=True)
            else:
                # The first one continues, and regards the hosts as clean.
                self.lifecycle.lease_close._cleaning._keep(
                    lease['reservations'][0]['id'], lease_close._Held(
                        2, 2, {*self.uuids}, first, 0), {*self.uuids})
                self.assertEqual([None, None], self.scalars(
                    models.Host.cleaned_at))
            return ()

        self.machines.clean = frozen
        first = NOW + 100 + lease_close._SOON
        self.run_at(100)
        self.run_at(20_000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual(self.uuids, self.machines.swept)

    def test_cleaning_of_dead_process_is_taken_over_after_a_while(self):
        lease, _id = self.started()
        clean = self.machines.clean

        def dies(*args):
            raise SystemExit

        self.machines.clean = dies
        with fixtures.MockPatchObject(lease_close.Cleaning, '_keep'):
            self.assertRaises(SystemExit, self.run_at, 100)
        self.machines.clean = clean
        self.clock.advance(5)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual([], self.machines.swept)
        self.clock.advance(60)
        self.lifecycle.lease_end.end(lease['id'], when_due=True)
        self.assertEqual(self.uuids, self.machines.swept)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_hosts_waiting_longest_are_cleaned_first(self):
        for number in range(8):
            self.host(f'more{number}', VCPU=4)
        lease = self.reserve_machines(0, 100, 10, 10)
        driven.run_due(self.engine)
        self.machines.dirty = {*self.scalars(models.Host.uuid)}
        self.useFixture(fixtures.MockPatchObject(lease_close, 'MOST', 4))
        for time in range(100, 1000, 100):
            self.run_at(time)
            if len(self.machines.swept) >= 12:
                break
        self.assertEqual(self.machines.dirty, {*self.machines.swept})
        self.assertLess(len(self.machines.swept), 2 * 10)
        self.machines.dirty.clear()
        for time in range(1000, 1400, 100):
            self.run_at(time)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_reservation_does_not_delay_cleaning_of_another(self):
        self.machines.cleaning_time = 3600
        self.host('three', VCPU=4)
        lease = self.reserve(
            0, 100, self.machines_of(1, 1), self.machines_of(1, 1),
            self.places())
        driven.run_due(self.engine)
        first, second = sorted(one for uuids in self.machines.doors.values()
                               for one in uuids)
        self.machines.dirty = {second}
        self.places_type.broken['end'] = errors.CloudUnavailable('down')
        self.run_at(100)
        self.machines.dirty.clear()
        self.places_type.broken.clear()
        self.run_at(120)
        self.assertEqual([first, second, second], sorted(self.machines.swept))
        self.assertEqual({}, self.places_type.open)
        self.assertEqual('TERMINATING', self.status(lease))

    def test_audit_reports_hosts_that_are_not_clean(self):
        lease, reservation_id = self.started(on_end='recycle')
        looking = audit.Audit(self.database, self.clock, self.lifecycle,
                              self.encryption.decrypt, 60)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        self.run_at(100)
        self.assertEqual(lease_conditions.LEFT.message, self.reason(lease))
        self.run_at(10_000)
        self.assertEqual([], [*looking.differences()])
        self.machines.full.clear()
        self.machines.dirty = {*self.uuids}
        self.run_at(11_000)
        found, = looking.differences()
        self.assertIn('not clean yet', found.text)
        self.assertIn('cleaning_command', found.remedy)

    def test_hosts_with_remaining_servers_cannot_be_reserved(self):
        self.machines.among = model.HostPool.ENROLLED
        for name in ('one', 'two'):
            self.enrol(name)
        lease, reservation_id = self.started(on_end='recycle')
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        early = self.reserve_machines(150, 170)
        self.run_at(100)
        # It may take only seconds.
        self.lifecycle.lease_end.delete(self.reserve_machines(200, 300)['id'])
        self.assertEqual('PENDING', self.status(early))
        self.lifecycle.lease_end.delete(early['id'])
        self.run_at(160)
        for start in (200, 1000, 10_000):
            self.assertRaises(errors.Refused, self.reserve_machines, start,
                              start + 100)
        self.host('three', VCPU=4)
        self.enrol('three')
        self.reserve_machines(200, 300)
        self.machines.full.clear()
        self.run_at(1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.reserve_machines(1000, 2000, 3, 3)

    def test_hosts_with_remaining_servers_count_for_limits(self):
        self.db.conf.set_override(
            'max_reserved_hosts_per_project', 2, 'blazar_enforcement')
        limited = limits.Limits(self.db.conf, self.database, self.clock,
                                serverless=['machine'])
        _lease, reservation_id = self.started(on_end='recycle')
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.cloud.servers[self.machines.full[reservation_id][0]] = (
            cloud_api.ObservedServer(base.State.RUNNING))
        later = limits.Asked(
            'project', 'user', model.Window(NOW + 1000, NOW + 2000), 0,
            {'HOST': 1})
        limited.check(later)
        self.run_at(160)
        self.assertRaises(errors.LimitExceeded, limited.check, later)

    def test_hosts_are_cleaned_again_after_returning_server(self):
        lease, reservation_id = self.started(cleaning_time=60)
        first, second = self.uuids
        self.machines.dirty = {second}
        self.run_at(100)
        hosted = uuidutils.generate_uuid()
        self.machines.full[reservation_id] = [hosted]
        self.run_at(110)
        self.machines.full.clear()
        self.machines.dirty.clear()
        self.run_at(200)
        self.assertEqual([first, second, first, second],
                         self.machines.swept)
        self.run_at(259)
        self.assertEqual('TERMINATING', self.status(lease))
        self.run_at(260)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_empty_hosts_end_grace_period_early(self):
        lease, reservation_id = self.started(grace_period=10_000)
        self.machines.full[reservation_id] = [uuidutils.generate_uuid()]
        self.run_at(100)
        self.machines.full.clear()
        self.run_at(100 + retries.LONGEST_PAUSE)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_pauses_grow_while_cleaning_fails(self):
        lease, _id = self.started()
        self.machines.dirty = {*self.uuids}
        pauses = []
        self.run_at(100)
        for _round in range(6):
            due, = self.scalars(
                models.Event.run_at, models.Event.event_type == 'end_lease')
            pauses.append(due - self.clock.now())
            self.run_at(due - NOW)
        self.assertEqual([5, 10, 20, 40, 60, 60], pauses)
        self.assertEqual(self.uuids * 7, self.machines.swept)
        self.machines.dirty = {self.uuids[0]}
        self.machines.clean = lambda *args: {self.uuids[1], 'another'}
        self.run_at(1000)
        due, = self.scalars(
            models.Event.run_at, models.Event.event_type == 'end_lease')
        self.assertEqual(retries.UNAVAILABLE, due - self.clock.now())
        self.assertEqual('TERMINATING', self.status(lease))

    def test_recycle_policy_deletes_servers_with_bookings(self):
        lease = self.running_lease(request=self.request(on_end='recycle'))
        self.run_at(100)
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_lease_ended_early_has_no_grace_period(self):
        lease = self.running_lease(request=self.request(grace_period=100))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(base.servers_of(lease), self.cloud.deleted)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_cleaning_is_retried_after_error(self):
        lease, _id = self.started()
        clean = self.machines.clean
        self.machines.clean = lambda *args: 1 / 0
        self.run_at(100)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(2, len(self.held()))
        self.machines.clean = clean
        self.run_at(500)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_cleaning_follows_grace_period(self):
        lease, reservation_id = self.started(
            cleaning_time=60, grace_period=30)
        self.assertEqual({NOW + 190}, {*self.scalars(
            models.Booking.end_date)})
        hosted = uuidutils.generate_uuid()
        self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [hosted]
        self.run_at(100)
        self.run_at(129)
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual(lease_conditions.GRACE.message, self.reason(lease))
        self.run_at(130)
        self.assertEqual([hosted], self.cloud.deleted)

    def test_recycle_policy_waits_until_servers_are_deleted(self):
        lease, reservation_id = self.started(on_end='recycle')
        hosted = uuidutils.generate_uuid()
        self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [hosted]
        self.run_at(100)
        self.run_at(10_000)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertEqual(2, len(self.held()))
        self.machines.full.clear()
        self.run_at(20_000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([], self.cloud.deleted)

    def test_next_lease_gets_another_host_if_available(self):
        lease, reservation_id = self.started(on_end='recycle')
        hosted = uuidutils.generate_uuid()
        self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [hosted]
        second = self.reserve_machines(100, 1000)
        self.run_at(100)
        self.host('three', VCPU=1)
        self.clock.advance(self.start_timeout)
        self.overbooking_check().look()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(second))
        self.assertEqual({'three'}, self.bookings_of(second).keys())

    def test_deleting_lease_deletes_hosted_servers(self):
        lease, reservation_id = self.started(
            on_end='recycle', grace_period=1000)
        hosted = uuidutils.generate_uuid()
        self.cloud.servers[hosted] = cloud_api.ObservedServer(
            base.State.RUNNING)
        self.machines.full[reservation_id] = [hosted]
        self.run_at(100)
        self.assertEqual([], self.cloud.deleted)
        self.lifecycle.lease_end.delete(lease['id'])
        driven.run_due(self.engine)
        self.assertEqual([hosted], self.cloud.deleted)

    def test_deletion_request_does_not_wait_for_cleaning(self):
        """Cleaning may take as long as the operator's command does."""
        lease, _id = self.started()
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual([], self.machines.swept)
        driven.run_due(self.engine)
        self.assertEqual(self.uuids, self.machines.swept)
