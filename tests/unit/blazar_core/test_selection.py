# SPDX-License-Identifier: Apache-2.0

"""The choice between possible hosts."""

import collections
import functools

import fixtures
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import selection
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import models
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import admissions_base

load_tests = databases.load_tests
NOW = base.NOW
ONLY_SQLITE = [('sqlite', {'kind': 'sqlite'})]


class TestProperties(admissions_base.AdmissionTestCase):

    def setUp(self):
        super().setUp()
        for name, found in (('plain', {}), ('old', {'gpu': 'v100'}),
                            ('new', {'gpu': 'a100', 'rack': 7})):
            with self.database.writer() as session:
                inventory.record_host(session, NOW, model.HostFacts(
                    name, name, name, {'VCPU': 4}, found), {})

    def with_property(self, operator, name, *values):
        return {'properties': host_properties.Comparison(
            operator, name, values)}

    def test_only_hosts_that_match_are_picked(self):
        for wanted, names in (
                (self.with_property('=', 'gpu', 'v100'), ['old']),
                (self.with_property('in', 'gpu', 'v100', 'a100'),
                 ['new', 'old']),
                ({'properties': host_properties.Combination('and', (
                    host_properties.Comparison('!=', 'gpu', ('v100',)),
                    host_properties.Comparison('>', 'rack', ('6',))))},
                 ['new']),
                ({}, ['new', 'old', 'plain'])):
            self.assertEqual(names, sorted(self.pick(
                0, 10, len(names), affinity=model.Affinity.DIFFERENT,
                **wanted)), wanted)

    def test_refusal_considers_only_matching_hosts(self):
        self.book('old', 0, 50, VCPU=3)
        self.assertEqual(
            refusals.Refusal(refusals.Reason.NO_ROOM, 3, 1, NOW + 50),
            self.refusal(0, 10, 3, **self.with_property(
                '=', 'gpu', 'v100')))
        self.assertEqual(
            refusals.Refusal(refusals.Reason.TOO_BIG, 5, 1, None),
            self.refusal(0, 10, 5, **self.with_property(
                '=', 'gpu', 'v100')))

    def test_properties_combine_with_hosts_and_avoid(self):
        gpus = self.with_property('in', 'gpu', 'v100', 'a100')
        self.assertEqual(['new'], self.pick(
            0, 10, avoid=frozenset(['old']), **gpus))
        self.assertEqual(['old'], self.pick(
            0, 10, hosts=frozenset(['old', 'plain']), **gpus))
        self.assertEqual(refusals.Reason.NO_HOST, self.refusal(
            0, 10, hosts=frozenset(['plain']), **gpus).reason)

    def test_changed_property_is_followed(self):
        rare = self.with_property('=', 'gpu', 'h100')
        self.refusal(0, 10, **rare)
        with self.database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                'plain', 'plain', 'plain', {'VCPU': 4}, {'gpu': 'h100'}), {},
                inventory.generations(session, ['plain'])['plain'])
        self.assertEqual(['plain'], self.pick(0, 10, **rare))


class TestSoftAffinity(admissions_base.AdmissionTestCase):
    """Soft affinities choose among the hosts with free capacity."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        self.uuids = {}
        for name, vcpus in (('one', 2), ('two', 4), ('three', 4)):
            self.uuids[name] = self.host(name, VCPU=vcpus)
        # The first host is filled first.
        self.admission = admissions.Admission(
            self.database, self.clock, lambda _timeline, found, *_rest: found)

    def wish(self, affinity, count, last=(), room=1, **members):
        return self.pick(
            0, 10, count, last, resources={'VCPU': room}, affinity=affinity,
            members={self.uuids.get(name, name): there
                     for name, there in members.items()})

    def apart(self, count, **more):
        return self.wish(model.Affinity.SOFT_DIFFERENT, count, **more)

    def together(self, count, **more):
        return self.wish(model.Affinity.SOFT_SAME, count, **more)

    def test_soft_anti_affinity_uses_different_hosts_if_possible(self):
        self.assertEqual(['one', 'two'], self.apart(2))
        self.assertEqual(['one', 'two', 'three'], self.apart(3))
        self.assertEqual(['one', 'two', 'three', 'one', 'two'], self.apart(5))
        self.assertEqual(2 * ['one'] + 4 * ['three'] + 4 * ['two'],
                         sorted(self.apart(10)))

    def test_soft_anti_affinity_prefers_hosts_with_fewest_members(self):
        self.assertEqual(['two', 'three', 'one'], self.apart(3, one=1))
        self.assertEqual(['three', 'one'], self.apart(2, one=1, two=2))
        self.assertEqual(['two'], self.apart(1, one=1, three=1, gone=1))

    def test_soft_affinity_prefers_host_that_takes_all(self):
        self.assertEqual(['one', 'one'], self.together(2))
        self.assertEqual(3 * ['two'], self.together(3))
        self.assertEqual(4 * ['two'] + ['three'], self.together(5))

    def test_soft_affinity_uses_fewest_hosts(self):
        self.book('two', 0, 10, VCPU=2)
        self.assertEqual(
            ['three'] * 4 + ['two'] * 2, self.together(6))

    def test_soft_affinity_prefers_hosts_with_most_members(self):
        self.assertEqual(['three'], self.together(1, three=1))
        self.assertEqual(['three'] * 2, self.together(2, two=1, three=2))
        self.assertEqual(['one'] * 2 + ['two'], self.together(3, one=1))
        self.assertEqual(['one'], self.together(1, gone=1))

    def test_soft_affinity_outranks_avoidance_of_lost_races(self):
        lost = {self.host_id('one')}
        self.assertEqual(['two', 'three', 'one'], self.apart(3, last=lost))
        self.assertEqual(['one'], self.together(1, last=lost, one=1))
        self.assertEqual(['two'], self.together(1, last=lost))

    def test_soft_affinity_causes_no_refusal(self):
        for affinity in (model.Affinity.SOFT_SAME,
                         model.Affinity.SOFT_DIFFERENT):
            for room, count in ((1, 11), (3, 3), (5, 1)):
                plain, wished = (self.refusal(
                    0, 10, count, resources={'VCPU': room}, affinity=one)
                    for one in (model.Affinity.NONE, affinity))
                self.assertEqual(plain, wished)


class TestPack(admissions_base.AdmissionTestCase):

    def hosts(self, count, **capacity):
        names = [f'host-{number}' for number in range(count)]
        for name in names:
            self.host(name, **capacity)
        return names

    def test_leases_that_end_together_share_a_host(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 100, VCPU=1)
        self.book('host-2', 0, 50, VCPU=1)
        self.assertEqual(['host-1'], self.pick(0, 100))
        self.assertEqual(['host-2'], self.pick(0, 50))

    def test_host_busy_beyond_lease_is_preferred(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 50, VCPU=1)
        self.book('host-2', 0, 200, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_host_that_becomes_free_soonest_is_preferred(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 300, VCPU=1)
        self.book('host-2', 0, 200, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_host_with_least_additional_busy_time_is_preferred(self):
        self.hosts(3, VCPU=2)
        self.book('host-1', 0, 50, VCPU=1)
        self.book('host-2', 0, 70, VCPU=1)
        self.assertEqual(['host-2'], self.pick(0, 100))

    def test_host_with_open_ended_servers_is_preferred(self):
        self.hosts(1, VCPU=2)
        self.host('used', usage={'VCPU': 1}, VCPU=2)
        self.assertEqual(['used'], self.pick(0, 100))

    def test_empty_hosts_are_kept_free(self):
        self.hosts(4, VCPU=4)
        for number in range(12):
            for name in self.pick(0, 100 + number % 2):
                self.book(name, 0, 100 + number % 2, VCPU=1)
        self.assertEqual(3, len(set(self.scalars(models.Booking.host_id))))
        self.assertEqual(['host-3'] * 4, self.pick(0, 10, 4))

    def test_servers_of_a_lease_fill_one_host_after_the_other(self):
        self.hosts(3, VCPU=2)
        self.assertEqual(['host-0', 'host-0', 'host-1'], self.pick(0, 10, 3))

    def test_equal_hosts_are_picked_in_the_order_of_their_ids(self):
        self.hosts(3, VCPU=2)
        # PostgreSQL returns updated rows after the others.
        with self.database.writer() as session:
            session.execute(sa.update(models.Host).where(
                models.Host.name == 'host-0').values(properties={}))
        self.assertEqual(['host-0', 'host-0', 'host-1'], self.pick(0, 10, 3))


class TestSpread(admissions_base.AdmissionTestCase):

    def setUp(self):
        super().setUp()
        self.admission = admissions.Admission(
            self.database, self.clock, selection.spread)

    def test_every_host_with_free_capacity_is_picked_eventually(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=1)
        self.host('full', usage={'VCPU': 1}, VCPU=1)
        picked = collections.Counter(
            name for _time in range(100) for name in self.pick(0, 10))
        self.assertEqual({'one', 'two', 'three'}, set(picked))

    def test_no_host_gets_more_than_its_free_capacity(self):
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)
        for _time in range(10):
            self.assertEqual(
                ['one', 'one', 'three', 'three', 'two', 'two'],
                sorted(self.pick(0, 10, 6)))

    def test_hosts_of_lost_race_are_picked_last(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=1)
        lost = {self.host_id('one')}
        for _time in range(20):
            self.assertEqual(['two'], self.pick(0, 10, last=lost))

    def test_a_strategy_is_a_function_that_may_be_replaced(self):
        for name in ('one', 'two'):
            self.host(name, VCPU=1)
        asked = []

        def reverse(timeline, candidates, window, ours, most):
            asked.append((len(timeline), window))
            return candidates[::-1]

        self.admission = admissions.Admission(
            self.database, self.clock, reverse)
        self.assertEqual(['two'], self.pick(0, 10))
        self.assertEqual([(2, model.Window(NOW, NOW + 10))], asked)


class TestBlockingLeases(admissions_base.AdmissionTestCase):

    def setUp(self):
        super().setUp()
        self.log = self.useFixture(fixtures.FakeLogger(level=20))

    def test_log_names_blocking_leases(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.refusal(5, 15)
        self.assertIn('Refused 1 servers from 2027-01-15 08:00:05 to '
                      '2027-01-15 08:00:15: only 0 fit. Blocked by leases: '
                      'lease',
                      self.log.output)

    def test_log_names_no_lease_if_request_is_too_large(self):
        self.host('one', VCPU=1)
        self.book('one', 0, 10, VCPU=1)
        self.refusal(5, 15, 2)
        self.assertNotIn('Blocked by', self.log.output)

    def test_blocking_leases_are_ordered_by_end(self):
        self.host('one', VCPU=9)
        for name, start, end in (('late', 0, 50), ('soon', 0, 20),
                                 ('over', 0, 5), ('after', 30, 40),
                                 ('nowhere', 0, 20)):
            with self.database.writer() as session:
                session.add(models.Lease(
                    lease_type='immediate',
                    id=name, name='', project_id='', user_id='',
                    start_date=0, end_date=1, on_end='', status='ACTIVE',
                    created_at=0, updated_at=0))
                session.flush()
                session.add(models.Reservation(
                    id=name, lease_id=name, resource_type='', amount=1,
                    resources={}, status='active', created_at=0,
                    updated_at=0))
            self.book(None if name == 'nowhere' else 'one', start, end,
                      name, VCPU=1)
            self.book('one' if name == 'soon' else None, start, end + 1,
                      name, VCPU=1)
        with self.database.reader() as session:
            self.assertEqual(['soon', 'late'], admissions._in_the_way(
                session, model.Window(NOW + 5, NOW + 30)))


class TestMigrationsWithAffinity(admissions_base.AdmissionTestCase):
    """Migrations of servers of a reservation with an affinity."""

    scenarios = ONLY_SQLITE

    def setUp(self):
        super().setUp()
        for name in ('one', 'two', 'three'):
            self.host(name, VCPU=2)

    def fits(self, server_id, affinity):
        """Return the hosts on which a server may be."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Reservation).where(
                models.Reservation.id == 'reservation').values(
                params={'affinity': affinity}))
        found = self.eligibility.for_server(
            server_id, {'VCPU': 1}, self.scalars(models.Host.uuid))
        return {host.name for host in self.scalars(models.Host)
                if found.by_host.get(host.uuid, found.elsewhere) >= 1}

    apart = functools.partialmethod(fits, affinity=False)
    together = functools.partialmethod(fits, affinity=True)

    def place(self, host, server=True, **values):
        """Add a slot with a server, which runs by default."""
        server_id = self.book(
            host, 0, 100, running=server and not values, VCPU=1)
        if not server:
            values['server_id'] = None
        if values:
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).where(
                    models.Booking.server_id == server_id).values(values))
        return server_id

    def move(self, server_id, host):
        """Record that a scheduler has admitted a migration."""
        with self.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == server_id).values(
                migrating_to=self.host_id(host)))

    def test_unclaimed_server_is_limited_to_booked_hosts(self):
        mine = self.place('one', claimed_at=None)
        self.place('two', server=False)
        self.assertEqual({'one', 'two'}, self.apart(mine))
        self.assertEqual({'one', 'two'}, self.together(mine))

    def test_anti_affinity_excludes_hosts_of_siblings(self):
        mine = self.place('one')
        self.place('two')
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_claimed_siblings_count_as_present(self):
        mine = self.place('one', claimed_at=NOW)
        self.place('two', claimed_at=NOW)
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_anti_affinity_excludes_hosts_of_unbuilt_siblings(self):
        mine = self.place('one')
        self.place('two', claimed_at=None)
        self.assertEqual({'one', 'three'}, self.apart(mine))

    def test_anti_affinity_ignores_free_slots(self):
        mine = self.place('one')
        self.place('two', server=False)
        self.book('two', 0, 100, 'other', VCPU=1)
        self.assertEqual({'one', 'two', 'three'}, self.apart(mine))

    def test_anti_affinity_excludes_targets_of_migrating_siblings(self):
        mine, other = self.place('one'), self.place('two')
        self.move(other, 'three')
        self.assertEqual({'one'}, self.apart(mine))
        # On its own target it may be tried again.
        self.assertEqual({'two', 'three'}, self.apart(other))

    def test_server_is_not_built_on_target_of_migrating_sibling(self):
        self.move(self.place('one'), 'two')
        mine = self.place('two', claimed_at=None)
        self.place('three', server=False)
        self.assertEqual({'three'}, self.apart(mine))

    def test_anti_affinity_respects_other_reservations(self):
        mine = self.place('one')
        self.place('two')
        self.book('three', 99, 200, 'other', VCPU=2)
        self.assertEqual({'one'}, self.apart(mine))

    def test_affinity_moves_single_server_where_all_slots_fit(self):
        mine = self.place('one')
        self.place('one', server=False)
        self.book('two', 99, 200, 'other', VCPU=1)
        self.assertEqual({'one', 'three'}, self.together(mine))
        self.report(self.scalars(
            models.Host.uuid, models.Host.name == 'three')[0], 'three',
            {'VCPU': 1}, {'VCPU': 2})
        self.assertEqual({'one'}, self.together(mine))

    def test_affinity_moves_first_server_where_others_can_follow(self):
        mine, other = self.place('one'), self.place('one')
        self.book('two', 99, 200, 'other', VCPU=1)
        self.assertEqual({'one', 'three'}, self.together(mine))
        self.move(mine, 'three')
        self.assertEqual({'one', 'three'}, self.together(other))
        self.host('four', VCPU=9)
        self.assertEqual({'one', 'three'}, self.together(other))

    def test_affinity_allows_following_a_moved_sibling(self):
        mine = self.place('one')
        self.place('two')
        self.assertEqual({'one', 'two'}, self.together(mine))

    def test_affinity_ignores_slots_without_host(self):
        """A slot without a host has no reserved capacity."""
        mine = self.place('one')
        self.place(None, server=False)
        self.book('two', 0, 100, 'other', VCPU=1)
        self.assertEqual({'one', 'two', 'three'}, self.together(mine))
