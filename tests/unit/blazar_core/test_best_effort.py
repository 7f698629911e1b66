# SPDX-License-Identifier: Apache-2.0

"""Leases for which servers of others are migrated."""

import dataclasses
from unittest import mock

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.audit import audit
from blazar_core.capacity import admissions
from blazar_core.capacity import consolidation
from blazar_core.capacity import enrollment
from blazar_core.capacity import inventory
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import limits
from blazar_core.leases import members
from blazar_core.leases import new_leases
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.lifecycle import best_effort
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import server_moves
from blazar_core.plugins import cloud_api
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import whole_hosts_base

NOW = base.NOW
State = cloud_api.ServerState

load_tests = databases.load_tests


class Killed(BaseException):
    """The process dies."""


class BestEffortTestCase(base.LeaseTestCase):
    """Three hosts with four CPUs each, and servers without a lease.

    One and two have two servers of two CPUs each; three has capacity for two.
    """

    def setUp(self):
        super().setUp()
        self.capacity = {'VCPU': 4, 'MEMORY_MB': 4096}
        self.names, self.there = {}, {}
        for name in 'one', 'two', 'three':
            self.names[name] = self.host(name, **self.capacity)
            self.there[name] = {}
        self.cloud.hosts = set(self.names.values())
        self.servers = [self.put('one'), self.put('one'), self.put('two'),
                        self.put('two')]
        self.engine = self.new_engine()
        self.audit = audit.Audit(self.database, self.clock, self.lifecycle,
                                 self.encryption.decrypt, 10)

    def put(self, name, vcpus=2):
        """Run a server on a host."""
        server_id = uuidutils.generate_uuid()
        self.there[name][server_id] = {
            'VCPU': vcpus, 'MEMORY_MB': 512 * vcpus}
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            State.RUNNING, self.names[name])
        self.tell(name)
        return server_id

    def tell(self, *names):
        """Report the usage of hosts, as the periodic sync does."""
        for name in names:
            uuid = self.names[name]
            with self.database.writer() as session:
                inventory.record_host(
                    session, self.clock.now(), model.HostFacts(
                        uuid, name, name, self.capacity), self.there[name],
                    inventory.generations(session, [uuid])[uuid])

    def arrive(self, server_id, told=True):
        """Complete a migration and return its target."""
        target = dict(self.cloud.moves)[server_id]
        to = next(name for name, uuid in self.names.items()
                  if uuid == target)
        old = next(name for name, some in self.there.items()
                   if server_id in some)
        self.there[to][server_id] = self.there[old].pop(server_id)
        self.cloud.arrive(server_id, target)
        if told:
            self.tell(old, to)
        return to

    def stay(self, server_id):
        """Let a migration fail."""
        self.cloud.arrive(server_id)

    def wanted(self, count=1, vcpus=4, timeout=600, end=5000, duration=None,
               encrypted=True, **values):
        """Create a best-effort lease."""
        request = self.request(0, end, timeout=timeout, duration=duration)
        self.places_type.demand_of = lambda reserved: model.Demand(
            {'VCPU': vcpus, 'MEMORY_MB': 512 * vcpus},
            hosts=values.get('hosts'))
        if not encrypted:
            return self.reserve(0, 0, self.places(count, vcpus, **values),
                                request=request)
        return self.leases.creation.create(self.new_lease(
            count=count, request=request, resources={
                'VCPU': vcpus, 'MEMORY_MB': 512 * vcpus}, **values),
            self.encryption.encrypt('call'))

    def go_on(self, seconds=2):
        """Let time pass, and carry out what is due."""
        driven.run_due(self.engine)
        self.clock.advance(seconds)
        driven.run_due(self.engine)

    def moves(self, lease):
        with self.database.reader() as session:
            return {row.server_id: row.status for row in session.query(
                models.ServerMove).filter_by(lease_id=lease['id'])}

    def bookings(self):
        with self.database.reader() as session:
            return session.query(models.Booking).all()

    def asked(self):
        """Return the servers that were asked to migrate."""
        return [server_id for server_id, _host in self.cloud.moves]


class TestBestEffort(BestEffortTestCase):

    def test_no_server_migrates_if_capacity_is_free(self):
        lease = self.wanted(vcpus=2)
        self.assertEqual(('PENDING', 'best_effort'), (
            lease['status'], lease['lease_type']))
        self.go_on()
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([], self.cloud.moves)

    def test_lease_starts_after_servers_are_migrated(self):
        # The free capacity of host three is enough for one migration.
        self.put('three', 2)
        self.there['two'].clear()
        self.put('two', 2)
        self.put('two', 1)
        lease = self.wanted(vcpus=3)
        self.assertEqual(('IN_PROGRESS', NOW + 600, False), (
            lease['status'], lease['retry_until'], lease['degraded']))
        self.go_on()
        self.assertIn('0 of 1 servers moved.', self.reason(lease))
        self.assertEqual(1, len(self.cloud.moves))
        self.assertEqual('IN_PROGRESS', self.status(lease))
        to = self.arrive(*self.asked())
        self.go_on()
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual('', self.reason(lease))
        self.assertEqual([('call', base.servers_of(lease))], self.cloud.sent)
        self.assertNotEqual(to, self.host_of(base.servers_of(lease)[0]))
        self.assertEqual('DONE', self.events_of(lease)['make_room'])
        self.assertEqual({'moved'}, set(self.moves(lease).values()))
        self.assertEqual([], [*self.audit.differences()])

    def test_reason_states_that_no_server_can_be_migrated(self):
        lease = self.wanted(vcpus=4)
        self.go_on()
        self.assertEqual([], self.cloud.moves)
        # A host is free already, so no plan is needed.
        self.assertEqual('STARTING', self.status(lease))
        lease = self.wanted(vcpus=4)
        self.go_on()
        self.assertIn('No servers can be migrated', self.reason(lease))
        self.assertEqual([], self.cloud.moves)


class FourHosts(BestEffortTestCase):
    """Host three has no capacity for migrations, host four has."""

    def setUp(self):
        super().setUp()
        self.cloud.bound.add(self.put('three', 3))
        self.names['four'] = self.host('four', **self.capacity)
        self.there['four'] = {}
        self.cloud.hosts.add(self.names['four'])
        # The leases cannot use host four.
        self.common = frozenset(
            self.names[name] for name in ('one', 'two', 'three'))

    def wanted(self, **values):
        return super().wanted(hosts=self.common, **values)


class TestServerMoves(FourHosts):

    def test_reason_reports_progress_of_migrations(self):
        lease = self.wanted()
        self.go_on()
        self.assertEqual(2, len(self.cloud.moves))
        self.assertEqual({self.names['four']},
                         {host for _who, host in self.cloud.moves})
        self.assertIn('0 of 2 servers moved.', self.reason(lease))
        self.assertIn(('lease.update', lease['id']), self.notified)
        first, second = self.asked()
        self.arrive(first)
        self.go_on()
        self.assertIn('1 of 2 servers moved.', self.reason(lease))
        self.arrive(second)
        self.go_on()
        self.assertEqual('STARTING', self.status(lease))

    def test_capacity_being_freed_is_not_available_to_others(self):
        self.wanted()
        self.go_on()
        first, _second = self.asked()
        source = next(name for name, some in self.there.items()
                      if first in some)
        self.arrive(first)
        boot = scheduler_claims.Claims(self.database, self.clock,
                                       self.admission.index)
        self.assertRaises(
            scheduler_claims.Denied, boot.claim, uuidutils.generate_uuid(),
            {self.names[source]: {'VCPU': 1, 'MEMORY_MB': 1}})
        self.assertRaises(errors.Refused, self.lease, 0, 100, resources={
            'VCPU': 2}, hosts=frozenset({self.names[source]}))

    def test_overbooking_check_keeps_bookings_of_other_leases(self):
        self.there['one'].clear()
        self.put('one', 1)
        self.put('one', 2)
        self.cloud.bound |= set(self.servers)
        later = self.lease(100, 200, resources={
            'VCPU': 1, 'MEMORY_MB': 1}, hosts=frozenset({self.names['one']}))
        self.cloud.servers[base.servers_of(
            later)[0]] = cloud_api.ObservedServer(State.HELD)
        self.wanted(vcpus=3)
        self.go_on()
        self.assertEqual(2, len(self.cloud.moves))
        look = overbooking.OverbookingCheck(
            self.database, self.clock, self.admission,
            self.leases.reassignment, self.new_demands(),
            lambda *_args: None, 300)
        look.look()
        self.assertEqual('one', self.host_of(base.servers_of(later)[0]))
        self.assertEqual([], [*self.audit.differences()])

    def test_new_plan_avoids_server_whose_migration_failed(self):
        lease = self.wanted()
        self.go_on()
        first, second = self.asked()
        self.arrive(first)
        self.stay(second)
        self.go_on()
        self.assertIn('1 of 1 servers moved. 1 could not be moved.',
                      self.reason(lease))
        # The completed migration is recorded after a while.
        self.go_on(best_effort.SETTLE)
        others = self.asked()[2:]
        self.assertEqual(set(self.servers) - {first, second}, set(others))
        self.assertEqual(len(self.asked()), len(set(self.asked())))

    def test_new_plan_is_made_if_migration_is_refused(self):
        self.cloud.broken = dict.fromkeys(
            self.servers[:1], errors.Conflict('It may not.'))
        lease = self.wanted()
        self.go_on()
        self.go_on()
        self.go_on(best_effort.SETTLE)
        for one in self.servers[1:]:
            if one in self.asked() and self.cloud.servers[one].busy:
                self.arrive(one)
        for _time in range(3):
            self.go_on(best_effort.SETTLE)
        self.assertEqual(len(self.asked()), len(set(self.asked())))
        self.assertNotIn(self.servers[0], self.asked())
        self.assertIn(self.status(lease), ('IN_PROGRESS', 'STARTING'))

    def test_lease_times_out_with_migration_counts_in_reason(self):
        lease = self.wanted(timeout=60, end=5000)
        self.go_on()
        first, _second = self.asked()
        self.arrive(first)
        self.go_on()
        self.go_on(60)
        self.assertEqual('TIMEDOUT', self.status(lease))
        reason = self.reason(lease)
        self.assertIn('No capacity could be freed until', reason)
        self.assertIn(
            'Servers migrated for it: 1, being moved: 1.', reason)
        # The reason does not name servers of other users.
        self.assertNotIn(first, reason)
        self.assertEqual('DONE', self.events_of(lease)['make_room'])
        self.assertEqual([None], [
            row.host_id for row in self.bookings()])
        self.assertEqual([], [*self.audit.differences()])
        self.assertEqual([], self.cloud.sent)
        # Its end is still carried out and deletes its server.
        server_id, = base.servers_of(lease)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(State.ERROR)
        self.clock.advance(5000)
        driven.run_due(self.engine)
        self.assertIn(server_id, self.cloud.deleted)

    def test_duration_counts_from_admission(self):
        lease = self.wanted(duration=5000)
        self.go_on(40)
        self.assertEqual([], [*self.audit.differences()])
        for one in self.asked():
            self.arrive(one)
        self.go_on(10)
        self.assertEqual('STARTING', self.status(lease))
        row, = self.bookings()
        self.assertEqual(5000, row.end_date - row.start_date)
        self.assertGreater(row.start_date, NOW + 30)

    def test_servers_migrate_only_to_allowed_hosts(self):
        self.cloud.reach = dict.fromkeys(
            self.servers, frozenset({self.names['one'], self.names['two']}))
        lease = self.wanted()
        self.go_on()
        self.assertEqual([], self.cloud.moves)
        self.assertIn('No servers can be migrated', self.reason(lease))
        for one in self.servers[2:]:
            self.cloud.reach[one] = frozenset({self.names['four']})
        self.go_on(10)
        self.assertEqual(set(self.servers[2:]), set(self.asked()))

    def test_immovable_server_is_not_migrated(self):
        self.cloud.bound.add(self.servers[0])
        self.wanted()
        self.go_on()
        self.assertEqual(set(self.servers[2:]), set(self.asked()))

    def test_migrations_per_lease_are_limited(self):
        self.limit_moves(per_lease=1)
        lease = self.wanted()
        self.go_on()
        self.assertEqual([], self.cloud.moves)
        self.assertIn('more than 1 would have to be', self.reason(lease))
        self.limit_moves(per_lease=0)
        self.go_on(10)
        self.assertEqual([], self.cloud.moves)

    def test_deleted_lease_requests_no_more_migrations(self):
        with mock.patch.object(best_effort, 'AT_ONCE', 1):
            lease = self.wanted()
            self.go_on()
            self.lifecycle.lease_end.delete(lease['id'])
            self.cloud.servers.pop(base.servers_of(lease)[0], None)
            self.arrive(*self.asked())
            self.go_on()
            self.go_on(100)
        self.assertEqual(1, len(self.asked()))
        self.assertEqual([], [
            row.host_id for row in self.bookings()])

    def test_lease_cannot_be_updated_or_transferred_meanwhile(self):
        lease = self.wanted()
        for seconds in 0, 2:
            self.clock.advance(seconds)
            self.assertIn('being freed for lease', str(self.assertRaises(
                errors.InvalidLeaseParams, self.leases.updates.update,
                lease['id'], updates.LeaseChange(end=NOW + 9000))))
            self.assertIn('being freed for lease', str(self.assertRaises(
                errors.Conflict, self.leases.transfer.transfer, lease['id'],
                self.leases.transfer.look(lease['id']).generation,
                transfer.Owner('project', 'other'), None, False)))
            driven.run_due(self.engine)

    def test_two_leases_migrate_no_server_twice(self):
        leases = [self.wanted(), self.wanted()]
        for _time in range(6):
            self.go_on()
            for one in self.asked():
                if self.cloud.servers[one].busy:
                    self.arrive(one)
            self.go_on(best_effort.SETTLE)
        self.assertEqual(len(self.asked()), len(set(self.asked())))
        self.assertEqual({'IN_PROGRESS', 'STARTING'}, {
            self.status(one) for one in leases})

    def planned_while(self, owner, name):
        """Make a second plan before the first one calls the cloud.

        Both have free capacity only on host four. Returns the servers that
        migrate there.
        """
        first, second = self.wanted(), self.wanted()
        wanted = {first['id']: self.names['one'],
                  second['id']: self.names['two']}
        self.places_type.demand_of = lambda reserved: model.Demand(
            {'VCPU': 4, 'MEMORY_MB': 2048}, hosts=frozenset({
                wanted[reserved.lease_id]}))
        room, call = self.lifecycle.best_effort, getattr(owner, name)
        left = [second['id']]

        def called(*args):
            if left:
                room.go_on(left.pop())
            return call(*args)

        with mock.patch.object(owner, name, called):
            room.go_on(first['id'])
        self.assertEqual([], left)
        self.assertIn('No servers can be migrated', self.reason(first))
        self.assertEqual({}, self.moves(first))
        return set(self.moves(second))

    def test_target_capacity_is_planned_with_once(self):
        self.assertEqual(set(self.servers[2:]), self.planned_while(
            self.cloud, 'movable'))

    def test_concurrent_plan_of_another_lease_is_seen(self):
        self.assertEqual(set(self.servers[2:]), self.planned_while(
            consolidation, 'planner_input'))

    def test_concurrent_booking_on_target_host_is_seen(self):
        lease, called = self.wanted(), self.cloud.movable
        left = [self.names['four']]

        def movable(server_ids):
            if left:
                self.reserve(0, 9000, self.places(
                    1, 4, hosts=frozenset({left.pop()})))
            return called(server_ids)

        with mock.patch.object(self.cloud, 'movable', movable):
            self.lifecycle.best_effort.go_on(lease['id'])
        self.assertEqual({}, self.moves(lease))
        self.assertIn('No servers can be migrated', self.reason(lease))

    def test_lost_move_with_future_request_time_fails(self):
        self.cloud.broken['move'] = errors.CloudUnavailable('No answer.')
        lease = self.wanted()
        self.go_on()
        with self.database.writer() as session:
            session.execute(sa.update(models.ServerMove).values(
                requested_at=self.clock.now() + 3600))
        self.assertEqual(
            ['requested', 'requested'], [*self.moves(lease).values()])
        del self.cloud.broken['move']
        self.go_on(server_moves.LOST)
        self.assertEqual(2, [*self.moves(lease).values()].count('failed'))

    def test_lost_migration_fails(self):
        lease = self.wanted()
        self.go_on()
        self.assertEqual(
            ['accepted', 'accepted'], [*self.moves(lease).values()])
        self.cloud.lost.update(self.moves(lease))
        self.go_on(server_moves.LOST)
        self.go_on(2)
        self.assertEqual(2, [*self.moves(lease).values()].count('failed'))

    def test_migrations_are_retried_after_cloud_outage(self):
        self.cloud.broken['movable'] = errors.CloudUnavailable('No answer.')
        lease = self.wanted()
        self.go_on()
        self.assertIn('No answer.', self.reason(lease))
        del self.cloud.broken['movable']
        self.cloud.broken['move'] = errors.CloudUnavailable('No answer.')
        self.go_on(10)
        self.assertEqual(
            ['requested', 'requested'], [*self.moves(lease).values()])
        del self.cloud.broken['move']
        # The request may have reached the cloud: it is not repeated.
        self.go_on(10)
        self.assertEqual([], self.cloud.moves)
        self.go_on(server_moves.LOST)
        self.go_on(2)
        self.assertEqual(2, len(self.cloud.moves))
        self.assertEqual(
            ['accepted', 'accepted', 'failed', 'failed'],
            sorted(self.moves(lease).values()))

    def test_lease_takes_capacity_that_becomes_free(self):
        lease = self.wanted()
        self.go_on()
        self.there['three'].clear()
        self.tell('three')
        self.go_on()
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual('three', self.host_of(base.servers_of(lease)[0]))

    def test_leased_servers_migrate_only_if_preemptible(self):
        self.there['one'].clear()
        self.tell('one')
        other = self.running_lease(0, 9000, resources={
            'VCPU': 2, 'MEMORY_MB': 1024},
            hosts=frozenset({self.names['one']}))
        server_id, = base.servers_of(other)
        self.cloud.bound |= set(self.servers[2:])
        lease = self.wanted()
        self.go_on()
        self.assertEqual([], self.cloud.moves)
        self.cloud.preemptible = {server_id}
        self.go_on(10)
        self.assertEqual([(server_id, self.names['four'])], self.cloud.moves)
        self.cloud.arrive(server_id, self.names['four'])
        self.lifecycle.reconciliation.check(server_id)
        self.go_on()
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual('four', self.host_of(server_id))

    def test_server_added_to_lease_after_planning_is_not_migrated(self):
        lease, joined = self.wanted(), []

        def reached(here, _what):
            if here is fault_points.FaultPoint.ROOM_PLANNED and not joined:
                server_id = next(one for one, status in self.moves(
                    lease).items() if status == 'planned')
                on = next(name for name, some in self.there.items()
                          if server_id in some)
                joiner = members.NewMember(
                    server_id, self.names[on], self.there[on][server_id])
                own = self.leases.members
                own.create(new_leases.NewLease(
                    'project', 'user', self.request(0, 9000),
                    own.reservations([joiner])), [joiner])
                joined.append(server_id)

        with mock.patch.object(fault_points, 'fault_point', reached):
            self.go_on()
        self.assertNotIn(joined[0], self.asked())
        self.assertEqual('failed', self.moves(lease)[joined[0]])

    def test_lease_without_remaining_servers_terminates(self):
        lease = self.wanted()
        self.go_on()
        self.lifecycle.reconciliation.observe(
            base.servers_of(lease)[0], cloud_api.ObservedServer(State.GONE))
        self.assertEqual('TERMINATED', self.status(lease))
        self.go_on()


class TestMigrationRate(FourHosts):
    """Servers of others are migrated at a limited rate."""

    def setUp(self):
        super().setUp()
        # The servers on host one may be migrated, there and to host four.
        self.victims = self.servers[:2]
        self.cloud.bound |= set(self.servers[2:])
        self.waiting = None

    def set_pace(self, interval, per_hour):
        self.limit_moves(interval=interval, per_hour=per_hour)

    def chase(self, leases, seconds=20, **values):
        """Create leases for the host of the victims, one after the other.

        Each is deleted when its migrations are done, or after some seconds.
        """
        for _each in range(leases):
            name = next(name for name, some in self.there.items()
                        if self.victims[0] in some)
            before = len(self.cloud.moves)
            self.waiting = BestEffortTestCase.wanted(
                self, hosts=frozenset({self.names[name]}), timeout=7200,
                **values)
            self.go_on()
            for server_id, _host in self.cloud.moves[before:]:
                self.arrive(server_id)
            self.go_on(seconds)
            self.reasons = self.reason(self.waiting)
            if _each < leases - 1:
                self.delete(self.waiting)

    def delete(self, lease):
        self.lifecycle.lease_end.delete(lease['id'])
        for one in base.servers_of(lease):
            self.cloud.servers.pop(one, None)
        self.go_on()
        with self.database.writer() as session:
            session.execute(sa.delete(models.Booking))
        self.tell(*self.there)

    def test_servers_are_not_migrated_again_within_interval(self):
        self.chase(6)
        self.assertLess(self.clock.now() - NOW, 200)
        self.assertEqual(2, len(self.cloud.moves))
        self.assertEqual('IN_PROGRESS', self.status(self.waiting))
        self.assertIn('Servers that were migrated in the last 600 seconds are '
                      'not migrated again, the first of them until ',
                      self.reasons)
        self.assertNotIn(self.victims[0], self.reasons)

    def test_servers_may_migrate_again_after_interval(self):
        self.chase(2)
        self.clock.advance(540)
        self.go_on()
        self.assertEqual(2, len(self.cloud.moves))
        self.clock.advance(60)
        self.go_on()
        self.assertEqual(4, len(self.cloud.moves))

    def test_migrations_per_project_and_hour_are_limited(self):
        self.set_pace(0, 5)
        self.chase(6)
        self.assertEqual(4, len(self.cloud.moves))
        self.assertIn('At most 5 servers are migrated within an hour for all '
                      'leases of a project: 1 more for now, the next one '
                      'at ', self.reasons)
        self.clock.advance(3600)
        self.go_on()
        self.assertEqual(6, len(self.cloud.moves))

    def test_default_hourly_limit_is_twice_the_limit_per_lease(self):
        self.limit_moves(per_lease=2)
        self.set_pace(0, None)
        self.chase(6)
        self.assertEqual(4, len(self.cloud.moves))

    def test_hourly_limit_is_per_project(self):
        self.set_pace(0, 2)
        self.chase(2)
        self.assertEqual(2, len(self.cloud.moves))
        with self.database.writer() as session:
            session.execute(sa.update(models.ServerMove).values(
                project_id='another'))
        self.go_on(10)
        self.assertEqual(4, len(self.cloud.moves))

    def test_refused_migrations_do_not_count_towards_limits(self):
        self.cloud.broken = dict.fromkeys(
            self.victims, errors.Conflict('It may not.'))
        self.set_pace(600, 2)
        lease = self.wanted()
        self.go_on()
        self.assertEqual({'failed'}, set(self.moves(lease).values()))
        self.delete(lease)
        self.cloud.broken = {}
        self.chase(1)
        self.assertEqual(2, len(self.cloud.moves))

    def test_concurrent_plans_share_hourly_limit(self):
        self.set_pace(0, 3)
        plans = self.lifecycle.best_effort._plans
        write = plans._write
        written = []

        def late(*args):
            if not written:
                written.append(1)
                with self.database.writer() as session:
                    other = session.scalars(sa.select(models.Lease)).one()
                    for number in range(2):
                        session.add(models.ServerMove(
                            lease_id='deleted', server_id=f'other{number}',
                            source=1, target=2, resources={},
                            status='moved', reason='best_effort',
                            requested_at=self.clock.now(),
                            updated_at=self.clock.now(),
                            project_id=other.project_id))
            return write(*args)

        plans._write = late
        self.chase(1)
        self.assertEqual([1], written)
        self.assertEqual([], self.cloud.moves)
        self.assertIn('1 more for now', self.reasons)


class TestWholeHosts(whole_hosts_base.WholeHostsTestCase):
    """Three enrolled hosts, each with servers that have leases."""

    def setUp(self):
        super().setUp()
        self.uuids = {name: self.host(name, VCPU=4, MEMORY_MB=4096)
                      for name in ('one', 'two', 'three', 'plain')}
        self.ids = {name: self.enrol(name)
                    for name in ('one', 'two', 'three')}
        self.machines.among = model.HostPool.ENROLLED
        self.cloud.hosts = set(self.uuids.values())
        self.engine = self.new_engine()

    def put(self, name, vcpus=1, preemptible=True, start=0, end=900):
        """Run a server with a lease on a host."""
        make = self.running_lease if start == 0 else self.lease
        lease = make(start, end, resources={
            'VCPU': vcpus, 'MEMORY_MB': 512 * vcpus}, among=model.HostPool.ALL,
            hosts=frozenset({self.uuids[name]}))
        server_id, = base.servers_of(lease)
        if preemptible:
            self.cloud.preemptible.add(server_id)
        return server_id

    def wanted(self, least=1, most=1):
        return self.reserve(0, 0, self.machines_of(least, most),
                            request=self.request(0, 5000, timeout=600))

    def go_on(self):
        driven.run_due(self.engine)
        self.clock.advance(10)
        driven.run_due(self.engine)

    def arrive(self):
        for server_id, target in self.cloud.moves:
            self.cloud.arrive(server_id, target)
            self.lifecycle.reconciliation.check(server_id)

    def moves(self):
        return [(server_id, self.named(uuid))
                for server_id, uuid in self.cloud.moves]

    def named(self, wanted):
        name, = (name for name, uuid in self.uuids.items() if uuid == wanted)
        return name

    def test_host_with_fewest_servers_is_freed(self):
        for name, count in (('one', 2), ('two', 1), ('three', 3)):
            servers = [self.put(name) for _number in range(count)]
            if name == 'two':
                going = servers
        lease = self.wanted()
        self.assertEqual('IN_PROGRESS', lease['status'])
        self.go_on()
        (moved, to), = self.moves()
        self.assertEqual(going, [moved])
        # The target is the fullest enrolled host.
        self.assertEqual('three', to)
        with self.database.reader() as session:
            move, = session.query(models.ServerMove)
            self.assertEqual({'VCPU': 1, 'MEMORY_MB': 512}, move.resources)
        self.assertEqual('IN_PROGRESS', self.status(lease))
        self.arrive()
        self.go_on()
        self.assertEqual(('ACTIVE', {'two': lease['reservations'][0]['id']}),
                         (self.status(lease), self.held()))
        self.assertEqual('three', self.host_of(moved))

    def test_host_with_immovable_or_reserved_servers_is_not_freed(self):
        self.put('one', preemptible=False)
        # Its lease has not started, so it cannot be migrated.
        self.put('two', start=600, end=1200)
        self.put('three', vcpus=4)
        lease = self.wanted()
        self.go_on()
        self.assertEqual([], self.moves())
        self.assertIn('No servers can be migrated', self.reason(lease))
        self.assertEqual('IN_PROGRESS', self.status(lease))

    def test_only_minimum_of_hosts_is_freed(self):
        for name in 'one', 'two', 'three':
            self.put(name)
        self.wanted(1, 3)
        self.go_on()
        self.assertEqual(1, len(self.moves()))

    def test_one_plan_frees_two_hosts(self):
        for name in 'one', 'two', 'three':
            self.put(name)
        lease = self.wanted(2, 2)
        self.go_on()
        (_one, to), (_other, also) = self.moves()
        self.assertEqual(to, also)
        self.arrive()
        self.go_on()
        self.assertEqual(('ACTIVE', 2), (
            self.status(lease), len(self.held())))

    def test_servers_migrate_only_to_reservable_hosts(self):
        going = self.put('one')
        self.put('two')
        self.put('two')
        self.put('three', vcpus=3)
        with self.database.writer() as session:
            enrollment.change(session, NOW, self.ids['three'], {}, False)
        self.enrol('plain', finish=False)
        lease = self.wanted()
        self.go_on()
        self.assertEqual([(going, 'two')], self.moves(), self.reason(lease))

    def test_host_with_server_without_lease_is_not_freed(self):
        for name in 'two', 'three':
            self.put(name)
            self.put(name)
        self.report(self.uuids['one'], 'one',
                    {'VCPU': 1, 'MEMORY_MB': 512},
                    {'VCPU': 4, 'MEMORY_MB': 4096})
        self.cloud.servers['somebody'] = cloud_api.ObservedServer(
            State.RUNNING, self.uuids['one'])
        lease = self.wanted()
        self.go_on()
        self.assertEqual(2, len(self.moves()), self.reason(lease))
        self.assertNotIn('one', self.bookings_of(lease))

    def test_host_with_unknown_consumers_is_not_freed(self):
        self.report(self.uuids['one'], 'one',
                    {'VCPU': 1, 'MEMORY_MB': 512},
                    {'VCPU': 4, 'MEMORY_MB': 4096})
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).values(consumers=None))
        for name in 'two', 'three':
            self.put(name)
        lease = self.wanted()
        self.go_on()
        self.assertEqual(1, len(self.moves()), self.reason(lease))
        self.assertNotIn('one', self.bookings_of(lease))

    def both(self):
        """Create a lease of a host and of a server; return the server to move.

        Each of the two needs the migration of one server.
        """
        self.uuids['spare'] = self.host('spare', VCPU=2, MEMORY_MB=2048)
        self.cloud.hosts = set(self.uuids.values())
        going = self.put('one')
        for name in 'two', 'three':
            self.put(name)
            self.put(name)
        self.report(self.uuids['plain'], 'plain',
                    {'VCPU': 1, 'MEMORY_MB': 512},
                    {'VCPU': 4, 'MEMORY_MB': 4096})
        self.cloud.servers['somebody'] = cloud_api.ObservedServer(
            State.RUNNING, self.uuids['plain'])
        return going, self.reserve(
            0, 0, self.machines_of(), self.places(1, 4),
            request=self.request(0, 5000, timeout=600))

    def test_one_plan_frees_capacity_for_servers_and_hosts(self):
        going, lease = self.both()
        self.go_on()
        targets = dict(self.moves())
        self.assertEqual({going, 'somebody'}, set(targets),
                         self.reason(lease))
        self.assertEqual('spare', targets['somebody'])
        self.assertIn(targets[going], ('two', 'three'))
        self.assertIn('0 of 2 servers moved', self.reason(lease))
        self.arrive()
        for name, usage in (('plain', {}), ('spare', {'VCPU': 1})):
            with self.database.reader() as session:
                capacity = session.query(models.Host).filter_by(
                    name=name).one().capacity
            self.report(self.uuids[name], name, usage, capacity)
        self.go_on()
        self.assertEqual(('ACTIVE', ['one']),
                         (self.status(lease), list(self.held())))
        self.assertEqual({'one', 'plain'}, set(self.bookings_of(lease)))

    def test_nothing_migrates_unless_all_reservations_can_be_met(self):
        going, lease = self.both()
        self.cloud.bound.add('somebody')
        self.go_on()
        self.assertEqual([], self.moves())
        self.assertIn('No servers can be migrated', self.reason(lease))
        self.cloud.bound.clear()
        self.limit_moves(per_lease=1)
        self.go_on(), self.go_on()
        self.assertEqual([], self.moves())


class TestMaxHostSpread(FourHosts):
    """Hosts that a project gets while a plan is made."""

    scenarios = [databases.SCENARIOS[0]]

    def setUp(self):
        super().setUp()
        # One server fits on four only.
        self.there['two'].popitem()
        self.put('two', 1)
        self.common = frozenset({self.names['one']})
        self.db.conf.set_override(
            'max_host_spread', 0, 'blazar_enforcement')
        self.limits = limits.Limits(
            self.db.conf, self.database, self.clock)
        self.reserve_on('three')

    def reserve_on(self, name):
        """Reserve a host for a later lease of the project."""
        new = self.new_lease(9000, 9100, hosts=frozenset({self.names[name]}))
        return self.leases.creation.create(dataclasses.replace(
            new, granted=self.limits.check(limits.Asked(
                'project', 'user', new.span, 1, {'VCPU': 1}, held=True))),
            self.encryption.encrypt('call'))

    def bound(self, project_id, lease_id):
        return self.limits.of_waiting(project_id, lease_id)

    def test_plan_within_max_host_spread_is_executed(self):
        self.wanted(vcpus=2)
        self.go_on()
        self.assertEqual(1, len(self.cloud.moves))

    def test_plan_exceeding_spread_by_concurrent_lease_is_dropped(self):
        """The planning process has just counted its project's hosts."""
        lease = self.wanted(vcpus=2)
        exceeded = admissions.ProjectHosts.exceeded
        others = []

        def late(hosts, *args):
            found = exceeded(hosts, *args)
            if not others:
                others.append(None)
                others.append(self.reserve_on('two'))
            return found

        with mock.patch.object(admissions.ProjectHosts, 'exceeded', late):
            self.go_on()
        self.assertEqual(2, len(others))
        self.assertIn('max_host_spread', self.reason(lease))
        self.assertEqual([], self.cloud.moves)


class TestStalledWorker(FourHosts):
    """A worker freezes after it has recorded the request of a migration."""

    def test_stalled_worker_requests_no_migration(self):
        lease = self.wanted()
        other, write, stopped = self.new_engine('other'), (
            server_moves.ServerMoves.write), []

        def stop(mover, lease_id, news, *args, **values):
            done = write(mover, lease_id, news, *args, **values)
            if not stopped and states.Move.REQUESTED in news.values():
                stopped.extend(self.scalars(
                    models.ServerMove.server_id,
                    models.ServerMove.id.in_(news)))
                self.clock.advance(120)
                driven.run_due(other)
            return done

        with mock.patch.object(server_moves.ServerMoves, 'write', stop):
            driven.run_due(self.engine)
        server_id, = stopped
        self.assertEqual('failed', self.moves(lease)[server_id])
        self.assertNotIn(server_id, [one for one, _host in self.cloud.moves])


class TestWorkerDeath(FourHosts):
    """The worker dies at every step, and another one continues."""

    def test_worker_death_at_every_step_is_recovered(self):
        for step in (fault_points.FaultPoint.ROOM_PLANNED,
                     fault_points.FaultPoint.MOVE_RECORDED,
                     fault_points.FaultPoint.MOVE_REQUESTED,
                     fault_points.FaultPoint.ROOM_SEEN,
                     fault_points.FaultPoint.RETRY_ADMITTED):
            with self.subTest(step):
                self._die_at(step)

    def _die_at(self, step):
        lease = self.wanted()
        deaths = []

        def reached(here, _what):
            if here is step and len(deaths) < 2:
                deaths.append(here)
                raise Killed

        with mock.patch.object(fault_points, 'fault_point', reached):
            for _time in range(60):
                if self.status(lease) == 'STARTING':
                    break
                try:
                    driven.run_due(self.engine)
                except Killed:
                    # Its claim expires.
                    self.engine = self.new_engine(f'heir{len(deaths)}')
                for one in self.asked():
                    if self.cloud.servers[one].busy:
                        self.arrive(one)
                self.clock.advance(10)
        self.assertTrue(deaths, step)
        self.assertEqual('STARTING', self.status(lease), (
            step, self.reason(lease)))
        self.assertEqual(len(self.asked()), len(set(self.asked())), step)
        self.assertEqual([], [
            one for one in self.audit.differences()
            if one.key[0] == 'overfull'], step)
        self.reset()

    def reset(self):
        """Restore the initial state."""
        with self.database.writer() as session:
            session.query(models.ServerMove).delete()
        for lease_id in self.scalars(models.Lease.id):
            self.lifecycle.lease_end.delete(lease_id)
            for server_id in self.scalars(
                    models.Booking.server_id,
                    models.Booking.server_id.is_not(None)):
                self.cloud.servers.pop(server_id, None)
                self.lifecycle.reconciliation.observe(
                    server_id, cloud_api.ObservedServer(State.GONE))
            driven.run_due(self.engine)
        for some in self.there.values():
            for server_id in some:
                self.cloud.servers.pop(server_id, None)
            some.clear()
        self.cloud.moves.clear()
        self.servers = [self.put('one'), self.put('one'), self.put('two'),
                        self.put('two')]
        self.cloud.bound.add(self.put('three', 3))
        self.tell(*self.names)
