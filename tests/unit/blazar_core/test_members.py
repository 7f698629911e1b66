# SPDX-License-Identifier: Apache-2.0

"""Running servers that are added to a lease."""

import itertools

from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy.orm import attributes

from blazar_core.audit import audit
from blazar_core.capacity import assignments
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import members
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base

NOW = base.NOW
RUNNING = cloud_api.ServerState.RUNNING

load_tests = databases.load_tests


class Died(BaseException):
    """The process has died; nothing handles this."""


class AddServersTestCase(base.LeaseTestCase):
    """A host with eight CPUs, and running servers without a lease."""

    def setUp(self):
        super().setUp()
        self.uuid = self.host('one', VCPU=8)

    def runs(self, *sizes):
        """Add running servers of so many CPUs to the database."""
        joiners = [members.NewMember(
            uuidutils.generate_uuid(), self.uuid, {'VCPU': size})
            for size in sizes]
        consumers = {one.id: ({'VCPU': size}, NOW)
                     for one, size in zip(joiners, sizes, strict=True)}
        with self.database.writer() as session:
            host = session.scalars(sa.select(models.Host)).one()
            session.execute(sa.update(models.Host).values(
                consumers={**(host.consumers or {}), **consumers},
                usage={'VCPU': sum(sizes) + host.usage.get('VCPU', 0)}))
        for one in joiners:
            self.cloud.servers[one.id] = cloud_api.ObservedServer(RUNNING,
                                                                  self.uuid)
        return joiners

    def adopt(self, joiners, end=100, **wanted):
        return self.leases.members.create(new_leases.NewLease(
            'project', 'user', self.request(0, end, **wanted),
            self.leases.members.reservations(joiners)), joiners)

    def join(self, lease, joiners):
        return self.leases.members.join(
            lease['id'], joiners, self.leases.members.reservations(joiners),
            None)

    def leave(self, lease, *joiners):
        return self.lifecycle.server_removal.leave(
            lease['id'], [one.id for one in joiners], lambda _id: True)

    def amounts(self, lease):
        return [one['amount'] for one in views.get(
            self.database, lease['id'])['reservations']]

    def used(self):
        usage, = self.scalars(models.Host.usage)
        return usage.get('VCPU', 0)

    def differences(self):
        return [*audit.Audit(self.database, self.clock, self.lifecycle,
                             self.encryption.decrypt, 10).differences()]


class TestCreateFromServers(AddServersTestCase):

    def test_concurrently_changed_host_is_read_again(self):
        """The usage that was read is that before the other process."""
        server, = self.runs(2)
        with self.database.writer() as session:
            host = session.scalars(sa.select(models.Host)).one()
            attributes.set_committed_value(
                host, 'generation', host.generation - 1)
            self.assertRaises(api.LostRace, assignments.convert_usage, session,
                              NOW, {host.id: [server.id]})

    def test_capacity_of_servers_is_free_after_lease(self):
        servers = self.runs(4, 4)
        self.assertRaises(
            errors.Refused, self.reserve, 200, 300, self.places(1))
        lease = self.adopt(servers)
        self.assertEqual('ACTIVE', lease['status'])
        self.assertEqual(0, self.used())
        self.reserve(200, 300, self.places(8))
        self.assertRaises(
            errors.Refused, self.reserve, 50, 300, self.places(1))
        self.assertEqual([], self.differences())

    def test_servers_of_each_size_form_a_reservation(self):
        lease = self.adopt(self.runs(1, 2, 1))
        self.assertEqual([1, 2], sorted(self.amounts(lease)))

    def test_server_not_recorded_on_host_is_a_conflict(self):
        self.assert_conflict('is changing at this moment', [
            members.NewMember(
                uuidutils.generate_uuid(), self.uuid, {'VCPU': 1})])

    def test_server_being_resized_on_its_host_is_a_conflict(self):
        server, = self.runs(1)
        self.assert_conflict('is changing at this moment', [
            server._replace(takes={'VCPU': 2})])
        # Classes that the host does not have are not part of its usage.
        self.adopt([server._replace(takes={'VCPU': 1, 'VGPU': 1})])

    def test_server_with_lease_is_a_conflict(self):
        servers = self.runs(1)
        lease = self.adopt(servers)
        self.assertIn('has a lease already', str(self.assertRaises(
            errors.Conflict, self.adopt, servers)))
        self.assertEqual([lease['id']], self.scalars(models.Lease.id))

    def test_server_on_dedicated_host_is_a_conflict(self):
        servers = self.runs(1)
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(assigned_to='other'))
        self.assert_conflict('serves leases only', servers)

    def assert_conflict(self, part, servers):
        self.assertIn(part, str(self.assertRaises(
            errors.Conflict, self.adopt, servers)))
        self.assertEqual([], self.scalars(models.Lease.id))


class TestMembers(AddServersTestCase):

    def setUp(self):
        super().setUp()
        self.servers = self.runs(1, 1)
        self.adopted = self.adopt(self.servers)

    def test_added_server_is_in_reservation_of_its_size(self):
        joined = self.join(self.adopted, self.runs(1, 2))
        self.assertEqual([(1, 1), (3, 3)], sorted(
            (one['amount'], len(one['servers']))
            for one in joined['reservations']))
        self.assertEqual([1, 3], sorted(self.amounts(self.adopted)))
        self.assertEqual(0, self.used())
        self.assertEqual([], self.differences())

    def test_removed_server_is_not_counted_in_lease(self):
        left = self.leave(self.adopted, self.servers[0])
        self.assertEqual([1], [one['amount'] for one in left['reservations']])
        self.assertEqual([1], self.amounts(self.adopted))
        self.assertEqual([self.servers[0].id], self.cloud.released)
        self.assertEqual(1, self.used())
        self.assertEqual([], self.differences())
        self.join(self.adopted, self.servers[:1])
        self.assertEqual([2], self.amounts(self.adopted))

    def test_deleted_server_is_not_counted_when_another_is_added(self):
        gone = self.servers[0].id
        self.cloud.servers.pop(gone)
        self.lifecycle.reconciliation.check(gone)
        self.join(self.adopted, self.runs(1))
        self.assertEqual([2], self.amounts(self.adopted))

    def test_no_server_is_added_to_failed_reservation(self):
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).values(
                status='error'))
        self.join(self.adopted, self.runs(1))
        self.assertEqual([1, 2], sorted(self.amounts(self.adopted)))

    def test_all_servers_of_a_size_can_be_removed_and_added(self):
        other = self.runs(2)
        for _round in range(3):
            self.join(self.adopted, other)
            self.assertEqual([1, 2], sorted(self.amounts(self.adopted)))
            self.leave(self.adopted, *other)
            self.assertEqual([2], self.amounts(self.adopted))
        self.assertEqual([], self.differences())

    def test_removing_last_server_ends_lease(self):
        self.leave(self.adopted, *self.servers)
        self.assertEqual('TERMINATED', self.status(self.adopted))
        self.assertEqual(2, self.used())
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual([], self.differences())

    def test_server_that_is_claimed_meanwhile_is_asked_for_again(self):
        states, asked = [False, True], []

        def is_on_host(server_id):
            """Return whether it is, just before a scheduler places it."""
            asked.append(server_id)
            if len(asked) == 1:
                self.lock(self.adopted)
            return states[len(asked) - 1]

        one = self.servers[0].id
        self.lifecycle.server_removal.leave(
            self.adopted['id'], [one], is_on_host)
        self.assertEqual([one, one], asked)
        # It is on its host, and so it is counted there.
        self.assertEqual(1, self.used())

    def test_server_of_lease_that_keeps_changing_is_not_removed(self):
        def is_on_host(_server_id):
            self.lock(self.adopted)
            return True

        self.assertIn('changes at the moment', str(self.assertRaises(
            errors.Conflict, self.lifecycle.server_removal.leave,
            self.adopted['id'], [self.servers[0].id], is_on_host)))
        self.assertEqual([2], self.amounts(self.adopted))
        self.assertEqual([], self.cloud.released)

    def lock(self, lease):
        """Lock a lease, as each claim for its servers does."""
        with self.database.writer() as session:
            api.locked(session, lease['id'])

    def test_removal_is_all_or_nothing(self):
        stranger, = self.runs(1)
        self.assertRaises(errors.Conflict, self.leave, self.adopted,
                          self.servers[0], stranger)
        self.assertEqual([2], self.amounts(self.adopted))
        self.assertEqual(1, self.used())
        self.assertEqual([], self.cloud.released)

    def test_removal_into_reserved_capacity_is_refused(self):
        self.reserve(200, 300, self.places(8))
        before = self.everything()
        self.assertIn('reserved by later leases', str(self.assertRaises(
            errors.Conflict, self.leave, self.adopted, self.servers[0])))
        self.assertEqual(before, self.everything())
        self.assertEqual([], self.cloud.released)

    def test_server_stays_in_lease_if_cloud_is_unavailable(self):
        self.cloud.broken['release'] = errors.CloudUnavailable('Not now.')
        before = self.everything()
        self.assertRaises(errors.CloudUnavailable, self.leave, self.adopted,
                          self.servers[0])
        self.assertEqual(before, self.everything())

    def test_servers_of_ending_lease_cannot_be_added_or_removed(self):
        other = self.runs(1)
        self.cloud.stubborn |= {one.id for one in self.servers}
        self.clock.advance(100)
        # The end is due, and was not carried out yet.
        self.assertRaises(errors.Conflict, self.join, self.adopted, other)
        self.assertRaises(
            errors.Conflict, self.leave, self.adopted, self.servers[0])
        driven.run_due(self.new_engine())
        self.assertEqual('TERMINATING', self.status(self.adopted))
        self.assertRaises(errors.Conflict, self.join, self.adopted, other)
        self.assertRaises(
            errors.Conflict, self.leave, self.adopted, self.servers[0])
        self.assertEqual(1, self.used())

    def test_no_server_is_added_to_lease_with_slots(self):
        lease = self.reserve(0, 100, self.places(1), active=True)
        self.assertRaises(errors.Conflict, self.join, lease, self.runs(1))


class TestProcessDeath(AddServersTestCase):
    """A process dies, and another one continues."""

    def dies(self, commits, work, *args):
        """Run work that dies at the commit after so many commits.

        :returns: whether it died
        """
        left = iter(range(commits))

        def commit(_connection):
            if next(left, None) is None:
                raise Died

        sa.event.listen(self.database.engine, 'commit', commit)
        try:
            work(*args)
        except Died:
            return True
        finally:
            sa.event.remove(self.database.engine, 'commit', commit)
        return False

    def deaths(self, work):
        """Run work that dies later each time, each with a server of its own.

        Yields the servers, and whether it died.
        """
        for commits in itertools.count():
            servers = self.runs(1)
            died = self.dies(commits, work, servers)
            self.assertEqual([], self.differences())
            yield servers, died
            if not died:
                self.assertGreater(commits, 0)
                return

    def ends(self):
        """Check that nothing is left when all leases have ended."""
        self.clock.advance(100)
        driven.run_due(self.new_engine())
        self.assertEqual({'TERMINATED'}, {*self.scalars(models.Lease.status)})
        self.assertEqual([], self.scalars(models.Booking.id))
        self.assertEqual([], self.differences())

    def test_process_death_while_creating_lease_is_recovered(self):
        for servers, died in self.deaths(self.adopt):
            self.assertEqual(1 if died else 0, self.used())
            if died:
                self.adopt(servers)
        self.ends()
        self.assertEqual({}, self.cloud.servers)

    def test_process_death_while_adding_servers_is_recovered(self):
        lease = self.adopt(self.runs(1))
        for servers, died in self.deaths(
                lambda servers: self.join(lease, servers)):
            self.assertEqual(1 if died else 0, self.used())
            if died:
                self.join(lease, servers)
        self.ends()
        self.assertEqual({}, self.cloud.servers)

    def leaves(self, commits):
        """Let a process die that removes the only server of a lease."""
        server, = self.runs(1)
        lease = self.adopt([server])
        self.assertTrue(self.dies(commits, self.leave, lease, server))
        self.assertEqual([server.id], self.cloud.released)
        return server, lease

    def test_process_death_before_removal_is_recorded_is_recovered(self):
        server, _lease = self.leaves(0)
        self.assertEqual([], self.differences())
        self.assertEqual(0, self.used())
        self.ends()
        self.assertEqual([server.id], self.cloud.deleted)
        self.assertEqual(0, self.used())

    def test_removal_can_be_repeated_after_process_death(self):
        server, lease = self.leaves(0)
        self.leave(lease, server)
        self.assertEqual(1, self.used())
        self.ends()
        self.assertEqual([], self.cloud.deleted)

    def test_lease_ends_after_process_death_at_last_removal(self):
        _server, lease = self.leaves(1)
        self.assertEqual('ACTIVE', self.status(lease))
        self.lifecycle.reconciliation.settle_left()
        self.assertEqual('TERMINATED', self.status(lease))
        self.ends()
        self.assertEqual([], self.cloud.deleted)
        self.assertEqual(1, self.used())
