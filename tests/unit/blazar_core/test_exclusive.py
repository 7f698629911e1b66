# SPDX-License-Identifier: Apache-2.0

"""A port, a fixed IP or a volume belongs to one server at a time."""

import dataclasses

import sqlalchemy as sa
import testtools

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.leases import exclusive
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.lifecycle import dispatch
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import test_members

load_tests = databases.load_tests

NOW = base.NOW


class TestExclusive(base.LeaseTestCase):

    # No start waits for its host.
    start_timeout = 0

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=8)

    def hold(self, start, end, *needed, **values):
        new = self.new_lease(start, end, **values)
        reservation, = new.reservations
        return self.leases.creation.create(dataclasses.replace(
            new, reservations=(dataclasses.replace(
                reservation, spec=exclusive.spec(None, dict.fromkeys(
                    reservation.server_ids, needed))),)),
            self.encryption.encrypt('call'),
            None if start else dispatch.HEAD_START)

    def refused(self, *wanted, **values):
        return str(self.assertRaises(
            errors.Conflict, self.hold, *wanted, **values))

    def test_overlapping_leases_cannot_need_same_resource(self):
        first = self.hold(60, 120, 'port a', 'volume b')
        why = self.refused(119, 200, 'volume b')
        for part in (first['id'], 'volume b', '08:02 UTC'):
            self.assertIn(part, why)
        self.refused(10, 61, 'port a')
        self.refused(0, 61, 'port a')

    def test_other_resources_or_consecutive_leases_are_allowed(self):
        self.hold(60, 120, 'port a')
        self.hold(60, 120, 'port b')
        self.hold(60, 120)
        self.hold(120, 180, 'port a')
        self.hold(10, 60, 'port a')

    def test_resource_is_in_use_during_grace_period(self):
        self.hold(60, 120, 'port a', request=self.request(
            60, 120, grace_period=30))
        self.refused(149, 180, 'port a')
        self.hold(150, 180, 'port a')

    def test_leases_of_other_projects_are_ignored(self):
        self.hold(60, 120, 'port a')
        self.hold(60, 120, 'port a', project='other')

    def test_refused_lease_leaves_nothing(self):
        self.hold(60, 120, 'port a')
        before = self.everything()
        self.refused(60, 120, 'port a')
        self.assertEqual(before, self.everything())

    def test_deleted_lease_needs_nothing(self):
        first = self.hold(60, 120, 'port a')
        self.lifecycle.lease_end.delete(first['id'])
        driven.run_due(self.new_engine())
        self.hold(60, 120, 'port a')

    def test_update_causing_overlap_is_refused(self):
        first = self.hold(60, 120, 'port a')
        other = self.hold(120, 180, 'port a')
        for lease, change in (
                (first, {'end': NOW + 121}), (first, {'grace_period': 1}),
                (other, {'start': NOW + 119})):
            self.assertRaises(
                errors.Conflict, self.leases.updates.update,
                lease['id'], updates.LeaseChange(**change))
        self.leases.updates.update(
            first['id'], updates.LeaseChange(end=NOW + 119))
        self.leases.updates.update(
            other['id'], updates.LeaseChange(start=NOW + 119))

    def test_start_waits_for_servers_of_previous_lease(self):
        first = self.hold(60, 120, 'port a')
        other = self.hold(120, 600, 'port a')
        engine = self.new_engine()
        self.clock.advance(60)
        driven.run_due(engine)
        self.assertEqual('STARTING', self.status(first))
        self.run_servers(first)
        self.clock.advance(60)
        self.lifecycle.lease_start.start(other['id'])
        self.assertEqual('PENDING', self.status(other))
        self.assertIn('port a', self.reason(other))
        self.assertIn(first['id'], self.reason(other))
        self.cloud.servers.clear()
        for _round in range(5):
            driven.run_due(engine)
            self.clock.advance(30)
        self.assertEqual('TERMINATED', self.status(first))
        self.assertEqual('STARTING', self.status(other))

    def run_servers(self, lease):
        for server_id in base.servers_of(lease):
            self.cloud.servers[server_id] = base.cloud_api.ObservedServer(
                base.State.RUNNING, self.uuid_of('one'))
            self.lifecycle.reconciliation.check(server_id)

    def test_resource_of_active_server_does_not_block_start(self):
        """Nova finds out when the other server is built."""
        first = self.hold(60, 600, 'volume a')
        self.clock.advance(60)
        driven.run_due(self.new_engine())
        self.run_servers(first)
        self.assertEqual('ACTIVE', self.status(first))
        other = self.hold(120, 180, 'volume a')
        self.clock.advance(60)
        self.lifecycle.lease_start.start(other['id'])
        self.assertEqual('STARTING', self.status(other))

    def test_update_is_refused_only_for_additional_time(self):
        """The other lease is admitted, as the volume may be free by then."""
        first = self.hold(60, 600, 'volume a')
        self.clock.advance(60)
        driven.run_due(self.new_engine())
        self.run_servers(first)
        other = self.hold(120, 180, 'volume a')
        self.hold(700, 800, 'volume a')
        for lease, change in (
                (first, {'name': 'new'}), (first, {'end': NOW + 300}),
                (first, {'end': NOW + 700}), (other, {'end': NOW + 170}),
                (other, {'start': NOW + 130})):
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(**change))
        self.assertRaises(
            errors.Conflict, self.leases.updates.update, first['id'],
            updates.LeaseChange(end=NOW + 701))

    def wait(self, *needed):
        """Create a lease of 100 s that starts at 10, or later until 100."""
        return self.hold(10, 110, *needed, request=self.request(
            10, 110, retry=requests.Retry(10, 10), duration=100))

    def test_waiting_lease_counts_until_its_latest_end(self):
        self.reserve(0, 140, self.places(8))
        self.assertEqual('WAITING', self.wait('port a')['status'])
        self.assertIn('08:03:20 UTC', self.refused(199, 300, 'port a'))
        self.hold(200, 300, 'port a')
        self.hold(150, 300, 'port b')
        with testtools.ExpectedException(errors.Conflict):
            self.wait('port b')

    def test_admitted_lease_counts_only_for_its_window(self):
        before = self.reserve(0, 140, self.places(8))
        waits = self.wait('port a')
        self.lifecycle.lease_end.delete(before['id'])
        self.lifecycle.admission_queue.look()
        self.assertEqual('PENDING', self.status(waits))
        self.hold(110, 200, 'port a')

    def test_lease_admitted_at_once_counts_only_for_its_window(self):
        self.hold(110, 200, 'port a')
        self.assertEqual('PENDING', self.wait('port a')['status'])

    def test_check_without_resources_issues_no_query(self):
        with self.database.connection() as connection:
            connection.close()
            exclusive.check(connection, 'project', frozenset(),
                            model.Window(0, 1))


class TestAddedServers(test_members.AddServersTestCase):
    """Resources of a server that is added to a lease."""

    def setUp(self):
        super().setUp()
        new = self.new_lease(60, 120)
        reservation, = new.reservations
        self.leases.creation.create(dataclasses.replace(
            new, reservations=(dataclasses.replace(
                reservation, spec=exclusive.spec(None, {
                    reservation.server_ids[0]: ['port a']})),)),
            self.encryption.encrypt('call'))
        self.joiners = [one._replace(has=frozenset({'port a', 'port b'}))
                        for one in self.runs(1)]

    def refused(self, call, *wanted):
        before = self.everything()
        self.assertIn('port a from', str(self.assertRaises(
            errors.Conflict, call, *wanted)))
        self.assertEqual(before, self.everything())

    def test_lease_of_server_with_reserved_port_is_refused(self):
        self.refused(self.adopt, self.joiners, 61)
        lease = self.adopt(self.joiners, 60)
        self.refused(self.leases.updates.update, lease['id'],
                     updates.LeaseChange(end=NOW + 61))

    def test_adding_server_with_reserved_port_is_refused(self):
        lease = self.adopt(self.runs(1), 61)
        self.refused(self.join, lease, self.joiners)
        self.leases.updates.update(lease['id'], updates.LeaseChange(end=NOW +
                                                                    60))
        self.join(lease, self.joiners)
        self.refused(self.leases.updates.update, lease['id'],
                     updates.LeaseChange(end=NOW + 61))

    def test_resources_of_removed_server_do_not_count(self):
        """The lease has other servers; removal and deletion are equal."""
        later = NOW + 90
        for leave in (self.leave, lambda lease, one: (
                self.lifecycle.server_removal.gone(lease['id'], one.id))):
            joiner, other = self.runs(1, 1)
            joiner = joiner._replace(has=frozenset({'port a'}))
            other = other._replace(has=frozenset({'port c'}))
            lease = self.adopt([other], 60)
            self.join(lease, [joiner])
            self.refused(self.leases.updates.update, lease['id'],
                         updates.LeaseChange(end=later))
            leave(lease, joiner)
            self.leases.updates.update(
                lease['id'], updates.LeaseChange(end=later))
            # The resources of the others are still known.
            self.assertEqual({frozenset({'port c'})}, {
                exclusive.of(spec) for spec, its_lease in self.specs()
                if its_lease == lease['id']})
            leave(lease, other)

    def specs(self):
        with self.database.reader() as session:
            return session.execute(sa.select(
                models.Reservation.spec, models.Reservation.lease_id)).all()
