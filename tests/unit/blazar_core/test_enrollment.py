# SPDX-License-Identifier: Apache-2.0

"""Enrolling and removing hosts."""

import dataclasses

from blazar_core.capacity import enrollment
from blazar_core.common import errors
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import models
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestEnrollment(whole_hosts_base.WholeHostsTestCase):

    def setUp(self):
        super().setUp()
        self.machines.among = model.HostPool.ENROLLED
        self.host('one', VCPU=4)

    def write(self, work, *args):
        with self.database.writer() as session:
            return work(session, self.clock.now(), *args)

    def enrollments(self):
        return self.scalars(models.Host.enrollment)

    def left(self):
        with self.database.reader() as session:
            return enrollment.left(session, self.clock.now())

    def test_host_removal_waits_for_end_of_leases(self):
        host_id = self.enrol('one')
        lease = self.reserve_machines(0, 100)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.remove, host_id)
        self.assertEqual(['enrolled'], self.enrollments())
        self.write(enrollment.remove, host_id, True)
        self.assertEqual((['leaving'], set()), (
            self.enrollments(), self.left()))
        self.assertRaises(errors.Refused, self.reserve_machines, 200, 300)
        # Reserved leases start all the same.
        driven.run_due(self.new_engine())
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual({'one'}, self.held().keys())
        self.clock.advance(100)
        driven.run_due(self.new_engine('second'))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual({host_id}, self.left())
        for work, *args in ((enrollment.change, host_id, {}, True),
                            (enrollment.start, self.uuid_of('one'), {})):
            exc = self.assertRaises(errors.Conflict, self.write, work, *args)
            self.assertIn('is being removed', str(exc))

    def test_host_removal_can_be_undone(self):
        host_id = self.enrol('one')
        self.reserve_machines(0, 100)
        self.write(enrollment.remove, host_id, True)
        exc = self.assertRaises(errors.Conflict, self.write, enrollment.start,
                                self.uuid_of('one'), {})
        self.assertIn('To keep it, set', str(exc))
        # Writing back the value that was read changes nothing.
        shown, = self.scalars(models.Host.reservable)
        for reservable in (shown, None):
            self.write(enrollment.change, host_id, {'gpu': 'A100'}, reservable)
            self.assertEqual(['leaving'], self.enrollments())
        self.write(enrollment.change, host_id, {}, True)
        self.assertEqual(['enrolled'], self.enrollments())
        self.reserve_machines(200, 300)

    def test_host_is_removed_after_its_leases_if_so_configured(self):
        host_id = self.enrol('one')
        self.machines.leaving = True
        for start, end in ((0, 100), (200, 300)):
            self.reserve_machines(start, end)
        self.clock.advance(10)
        driven.run_due(self.new_engine())
        self.assertEqual(['enrolled'], self.enrollments())
        self.clock.advance(90)
        driven.run_due(self.new_engine('second'))
        self.assertEqual((['leaving'], set()), (
            self.enrollments(), self.left()))
        self.clock.advance(200)
        driven.run_due(self.new_engine('third'))
        self.assertEqual({host_id}, self.left())

    def test_unused_host_is_not_removed_after_lease(self):
        self.enrol('one')
        self.machines.leaving = True
        self.machines.start = lambda _reserved: 1 / 0
        lease = self.reserve_machines(0, 100)
        driven.run_due(self.new_engine())
        self.lifecycle.lease_start.give_up(lease['id'], states.EventType.START)
        self.assertEqual(('ERROR', ['enrolled']), (
            self.status(lease), self.enrollments()))

    def test_host_is_reservable_once_enrollment_is_complete(self):
        enrolling = self.begin()
        refusal = self.assertRaises(
            errors.Refused, self.reserve_machines).refusal
        self.assertEqual(refusals.Reason.NO_HOST, refusal.reason)
        self.assertRaises(errors.Refused, self.lease)
        self.write(enrollment.complete, enrolling)
        self.reserve_machines()
        self.assertRaises(errors.Refused, self.lease, 200, 300)

    def test_index_sees_enrollment_and_removal(self):
        """The index existed before the host was enrolled or removed."""
        self.lease(50, 60)
        self.clock.advance(100)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        with self.database.writer() as session:
            enrolling = enrollment.start(
                session, self.clock.now(), self.uuid_of('one'), {})
            enrollment.complete(session, NOW, enrolling)
        host_id = enrolling.host_id
        lease = self.reserve_machines(100, 200)
        self.lifecycle.lease_end.delete(lease['id'])
        self.write(enrollment.change, host_id, {}, False)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        self.write(enrollment.change, host_id, {}, True)
        self.write(enrollment.remove, host_id)
        self.assertRaises(errors.Refused, self.reserve_machines, 100, 200)
        self.write(enrollment.retire, host_id)
        self.lease(100, 200)

    def test_enrollment_steps_out_of_order_are_conflicts(self):
        host_id = self.enrol('one')
        self.assertRaises(
            errors.Conflict, self.write, enrollment.retire, host_id)
        self.write(enrollment.remove, host_id)
        exc = self.assertRaises(errors.Conflict, self.enrol, 'one')
        self.assertIn('is being removed', str(exc))
        self.write(enrollment.retire, host_id)
        self.enrol('one')

    def test_host_with_bookings_cannot_be_enrolled(self):
        self.lease(50, 60)
        exc = self.assertRaises(errors.Conflict, self.enrol, 'one')
        self.assertIn('1 booking of leases, the last one until '
                      '2027-01-15 08:01 UTC', str(exc))
        self.assertEqual([None], self.scalars(models.Host.enrollment))

    def test_reserved_host_cannot_be_removed(self):
        enrolling = self.begin()
        self.write(enrollment.complete, enrolling)
        host_id = enrolling.host_id
        lease = self.reserve_machines(50, 100)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.remove, host_id)
        self.lifecycle.lease_end.delete(lease['id'])
        self.write(enrollment.remove, host_id)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, enrolling)
        self.write(enrollment.retire, host_id)
        self.assertRaises(
            errors.NotFound, self.write, enrollment.remove, host_id)

    def begin(self):
        return self.write(enrollment.start, self.uuid_of('one'), {})

    def test_concurrent_enrollment_can_be_completed_by_either(self):
        first, second = self.begin(), self.begin()
        self.assertEqual((True, False, first.enrolled_generation), (
            first.is_own, second.is_own, second.enrolled_generation))
        self.write(enrollment.complete, second)
        self.write(enrollment.complete, first)
        self.assertIsNone(self.write(enrollment.cancel, first))
        self.assertEqual(['enrolled'], self.enrollments())

    def test_canceled_enrollment_cannot_be_completed(self):
        """A canceled enrollment cannot be completed in any later state."""
        first = self.begin()
        self.assertEqual('leaving', self.write(
            enrollment.cancel, first).enrollment)
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)
        self.write(enrollment.retire, first.host_id)
        self.assertIn('was canceled by another request', str(self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)))
        second = self.begin()
        self.assertRaises(
            errors.Conflict, self.write, enrollment.complete, first)
        self.assertIsNone(self.write(enrollment.cancel, first))
        self.assertEqual(['enrolling'], self.enrollments())
        self.write(enrollment.complete, second)

    def test_extra_capabilities_are_matched_by_properties(self):
        host_id = self.enrol('one', gpu='A100', rack='7')
        self.write(enrollment.change, host_id, {'rack': None, 'nvme': '2'},
                   None)
        with self.admission.index.fresh():
            found = host_properties.matching(
                host_properties.Combination('and', (
                    host_properties.Comparison('=', 'gpu', ('A100',)),
                    host_properties.Comparison('>=', 'nvme', ('2',)))),
                {host.uuid: host.properties for host in
                 self.admission.index.hosts.values()})
        self.assertEqual({self.uuid_of('one')}, set(found))
        self.assertEqual([{'gpu': 'A100', 'nvme': '2'}],
                         self.scalars(models.Host.extra))

    def test_changed_extra_capabilities_affect_next_quote(self):
        host_id = self.enrol('one', gpu='1')
        window = model.Window(NOW + 50, NOW + 100)
        wanted = model.Demand(
            model.WHOLE, 1, among=model.HostPool.ENROLLED,
            properties=host_properties.Comparison('=', 'gpu', (1,)))
        for said, found in (('1', True), ('2', False), ('1', True)):
            self.write(enrollment.change, host_id, {'gpu': said}, None)
            for _again in range(2):
                self.assertEqual(found, self.admission.quote(
                    [wanted], window) is None, said)
        # Two expressions that are equivalent, but not identical.
        self.assertIsNotNone(self.admission.quote([dataclasses.replace(
            wanted, properties=host_properties.Comparison(
                '=', 'gpu', ('True',)))],
            window))

    def test_periodic_sync_keeps_extra_capabilities(self):
        self.enrol('one', gpu='A100')
        self.report(self.uuid_of('one'), 'one', None, {'VCPU': 8})
        self.assertEqual([{'gpu': 'A100'}], self.scalars(models.Host.extra))

    def test_only_incomplete_enrollment_can_be_repeated(self):
        self.enrol('one', finish=False, gpu='1')
        self.enrol('one', gpu='2')
        self.assertEqual([{'gpu': '2'}], self.scalars(models.Host.extra))
        self.assertRaises(errors.Conflict, self.enrol, 'one')

    def test_allocations_list_only_enrolled_hosts(self):
        self.host('plain', VCPU=4)
        host_id = self.enrol('one')
        mine = self.reserve_machines(50, 100)
        self.lease(50, 100)
        with self.database.reader() as session:
            found = enrollment.allocations(session)
        self.assertEqual([host_id], [*found])
        self.assertEqual(
            [(mine['reservations'][0]['id'], mine['id'], NOW + 50,
              NOW + 100)], [tuple(row)[1:] for row in found[host_id]])

    def test_hosts_are_listed_with_marker_and_limit(self):
        for name in ('two', 'plain', 'three'):
            self.host(name, VCPU=4)
        first, second, third = (
            self.enrol(name) for name in ('one', 'two', 'three'))
        for some, expected in (
                ((), [first, second, third]), ((0, 2), [first, second]),
                ((first,), [second, third]), ((first, 1), [second]),
                ((third,), [])):
            with self.database.reader() as session:
                self.assertEqual(expected, [
                    host.id for host in enrollment.listed(session, *some)])

    def test_number_of_extra_capabilities_is_limited(self):
        most = {f'k{number}': '' for number in range(enrollment.MAX_EXTRA)}
        self.assertRaises(errors.InvalidLeaseParams, self.enrol, 'one',
                          more='1', **most)
        self.assertEqual([None], self.scalars(models.Host.enrollment))
        host_id = self.enrol('one', **most)
        for extra, kept in (({'k0': '1'}, True), ({'more': '1'}, False),
                            ({'more': '1', 'k0': None}, True)):
            with self.database.writer() as session:
                if kept:
                    enrollment.change(session, NOW, host_id, extra, None)
                else:
                    self.assertRaises(
                        errors.InvalidLeaseParams, enrollment.change, session,
                        NOW, host_id, extra, None)
        (extra,) = self.scalars(models.Host.extra)
        self.assertEqual({*most, 'more'} - {'k0'}, {*extra})
