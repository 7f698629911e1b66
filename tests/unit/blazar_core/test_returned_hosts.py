# SPDX-License-Identifier: Apache-2.0

"""Leases return whole hosts before their end."""

from unittest import mock

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import assignments
from blazar_core.capacity import eligibility
from blazar_core.capacity import enrollment
from blazar_core.capacity import outages
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import returned_hosts
from blazar_core.leases import updates
from blazar_core.lifecycle import retries
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
load_tests = databases.load_tests


class TestReturnedHosts(whole_hosts_base.WholeHostsTestCase):
    """A lease in use returns hosts before its end."""

    def setUp(self):
        super().setUp()
        self.engine = self.new_engine()
        self.uuids = {name: self.host(name, VCPU=4)
                      for name in ('one', 'two', 'three')}
        self.machines.among = model.HostPool.ENROLLED
        for name in self.uuids:
            self.enrol(name)
        self.lease = self.reserve_machines(0, 1000, 3, 3)
        driven.run_due(self.engine)
        (self.reservation,) = self.lease['reservations']
        self.order = [name for name, in self.of_bookings(
            sa.select(models.Host.name).join(
                models.Booking, models.Booking.host_id == models.Host.id
            ).order_by(models.Booking.id))]

    def of_bookings(self, statement):
        with self.database.reader() as session:
            return session.execute(statement).tuples().all()

    def use(self, *names):
        """Put servers on these hosts and no others."""
        self.machines.there = {
            self.uuids[name]: [f'{name}-server'] for name in names}

    def shrink(self, most, *names):
        return self.leases.updates.update(
            self.lease['id'], updates.LeaseChange(
                reservations={self.reservation['id']: self.machines_of(
                    1, most)}, remove_hosts=frozenset(names)))

    def test_last_hosts_are_returned_and_freed_once_clean(self):
        first, *others = self.order
        self.machines.dirty = {self.uuids[one] for one in others}
        shrunk = self.shrink(1)
        self.assertEqual(1, shrunk['reservations'][0]['amount'])
        self.assertEqual({first}, self.bookings_of(self.lease).keys())
        # No other lease gets them before.
        driven.run_due(self.engine)
        self.assertEqual({*self.order}, self.held().keys())
        self.assertEqual({self.uuids[one] for one in others},
                         {*self.machines.swept})
        self.assertEqual((self.uuids[first],),
                         self.machines.doors[self.reservation['id']])
        self.assertRaises(errors.Refused, self.reserve_machines, 500, 600)
        self.machines.dirty.clear()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual({first: self.reservation['id']}, self.held())
        self.assertEqual([None] * 3, self.scalars(models.Host.overdue_at))
        other = self.reserve_machines(500, 600, 2, 2)
        self.assertEqual({*others}, self.bookings_of(other).keys())
        self.assertEqual('ACTIVE', self.status(self.lease))

    def test_empty_hosts_are_returned_first_and_servers_kept(self):
        first, second, third = self.order
        self.use(second, third)
        self.shrink(2)
        driven.run_due(self.engine)
        self.assertEqual({second, third}, self.held().keys())
        refused = self.assertRaises(errors.HostsNotEmpty, self.shrink, 1)
        for said in ('cannot return 1 host: 0 of its hosts are empty',
                     f'{second}-server', f'{third}-server'):
            self.assertIn(said, str(refused))
            self.assertIn(said, refused.named)
        self.assertIn(f'{third}: {third}-server', refused.named)
        self.assertNotIn(f'{third}:', str(refused))
        self.assertEqual({second, third}, self.bookings_of(self.lease).keys())
        self.assertEqual([], self.cloud.deleted)

    def test_named_hosts_are_returned_if_empty(self):
        first, second, third = self.order
        self.use(second)
        refused = self.assertRaises(
            errors.HostsNotEmpty, self.shrink, 2, second)
        self.assertIn(f'cannot return host {second}: it has 1 server, and',
                      refused.named)
        self.assertIn(f'first: {second}-server.', refused.named)
        self.shrink(2, first)
        driven.run_due(self.engine)
        self.assertEqual({second, third}, self.held().keys())

    def test_removal_conflict_names_leases_with_bookings(self):
        with self.database.reader() as session:
            self.assertRaises(errors.NotFound, enrollment.named, session, 'x')
            host_id = enrollment.named(session, 'one').id
            refused = self.assertRaises(
                errors.Conflict, enrollment.remove, session, self.clock.now(),
                host_id)
        self.assertIn('taken out: it has 1 booking', str(refused))
        self.assertIn(
            f'leases: {self.lease["name"]} ({self.lease["id"]}).',
            str(refused))

    def test_the_reservation_is_found_by_its_lease(self):
        name, project = self.lease['name'], self.lease['project_id']
        within = self.leases.lookup.within
        for wanted in self.lease['id'], name:
            self.assertEqual([self.reservation['id']],
                             within(wanted, project))
        for others in ((name, 'other'), ('x', project), ('\0', project)):
            self.assertEqual([], within(*others))

    def test_host_with_newly_arrived_server_is_kept(self):
        *_others, last = self.order
        self.shrink(2)
        self.use(last)
        driven.run_due(self.engine)
        self.assertEqual({*self.order}, self.held().keys())
        # It stays isolated with the others, and the lease has the reason.
        self.assertIn(self.uuids[last],
                      self.machines.doors[self.reservation['id']])
        self.assertIn('until it is deleted', self.reason(self.lease))
        self.assertEqual([], self.machines.swept)
        self.use()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertEqual('', self.reason(self.lease))

    def test_returned_host_admits_no_servers(self):
        *_others, last = self.order
        claims = scheduler_claims.Claims(
            self.database, self.clock, self.admission.index)

        def claim(name):
            return claims.claim(
                uuidutils.generate_uuid(), {self.uuids[name]: {'VCPU': 1}},
                reservation_id=self.reservation['id'])

        def is_within(name):
            return claims.is_within(
                self.reservation['id'], {self.uuids[name]})

        claim(last)
        self.assertTrue(is_within(last))
        self.shrink(2)
        # A server that was admitted just now is checked again.
        self.assertFalse(is_within(last))
        self.assertTrue(is_within(self.order[0]))
        self.assertRaises(scheduler_claims.Denied, claim, last)
        claim(self.order[0])
        found = eligibility.Eligibility(
            self.database, self.clock, self.admission.index).for_server(
                uuidutils.generate_uuid(), {'VCPU': 1}, self.uuids.values(),
                self.reservation['id'])
        self.assertEqual(
            {self.uuids[one] for one in self.order[:2]},
            {uuid for uuid in self.uuids.values()
             if found.by_host.get(uuid, found.elsewhere)})
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertFalse(is_within(last))

    def test_failed_host_is_returned_first(self):
        first, *_others = self.order
        with self.database.writer() as session:
            session.add(models.Outage(
                host_id=session.scalar(sa.select(models.Host.id).where(
                    models.Host.name == first)),
                kind=outages.FAILURE, reason='', seen_at=NOW, began_at=NOW))
        self.shrink(2)
        self.assertNotIn(first, self.bookings_of(self.lease))

    def test_returned_host_is_removed_if_hosts_leave_after_leases(self):
        *_others, last = self.order
        self.machines.leaving = True
        self.shrink(2)
        driven.run_due(self.engine)
        with self.database.reader() as session:
            self.assertEqual({last: states.Enrollment.LEAVING}, {
                host.name: host.enrollment for host in session.scalars(
                    sa.select(models.Host).where(
                        models.Host.assigned_to.is_(None)))})

    def test_lease_end_frees_hosts_still_being_returned(self):
        *_others, last = self.order
        self.shrink(2)
        self.use(last)
        driven.run_due(self.engine)
        self.use()
        self.lifecycle.lease_end.delete(self.lease['id'])
        driven.run_due(self.engine)
        self.assertEqual(({}, 0), (
            self.held(), self.count_rows()['bookings']))

    def test_return_is_completed_after_process_death(self):
        *_others, last = self.order

        def die(*_args, **_kwargs):
            raise SystemExit

        self.shrink(2)
        for step in ('bookings_changed', 'clean'):
            with mock.patch.object(whole_hosts_base.Machines, step, die):
                self.assertRaises(
                    SystemExit, self.lifecycle.notices.changed,
                    self.lease['id'])
            self.assertIn(last, self.held())
        with mock.patch.object(assignments, 'unassign', die):
            self.assertRaises(SystemExit, self.lifecycle.notices.changed,
                              self.lease['id'])
        self.clock.advance(retries.LONGEST_PAUSE)
        driven.run_due(self.engine)
        self.assertNotIn(last, self.held())
        self.assertEqual([self.uuids[last]], self.machines.swept)

    def test_return_conflicts_with_concurrent_change(self):
        chosen = returned_hosts.choose

        def choose(*args):
            found = chosen(*args)
            with mock.patch.object(returned_hosts, 'choose', chosen):
                self.shrink(2)
            return found

        with mock.patch.object(returned_hosts, 'choose', choose):
            self.assertRaises(errors.Conflict, self.shrink, 1)
        self.assertEqual(2, len(self.bookings_of(self.lease)))

    def test_next_lease_waits_for_host_being_returned(self):
        *_others, last = self.order
        later = self.reserve_machines(1000, 1100, 3, 3)
        self.machines.dirty = {self.uuids[last]}
        self.shrink(2)
        self.clock.advance(1000)
        driven.run_due(self.engine)
        self.assertEqual('PENDING', self.status(later))
        self.machines.dirty.clear()
        self.clock.advance(retries.LONGEST_WAIT)
        driven.run_due(self.engine)
        self.assertEqual({}, self.held())
        with self.database.writer() as session:
            # The cloud was read: the hosts are empty.
            session.execute(sa.update(models.Host).values(recheck_at=None))
        self.clock.advance(8)
        driven.run_due(self.engine)
        self.assertEqual('ACTIVE', self.status(later))
