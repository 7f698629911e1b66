# SPDX-License-Identifier: Apache-2.0

"""Devices in what happens to leases and servers after their admission."""

import collections
import dataclasses
from unittest import mock

from oslo_utils import uuidutils

from blazar_core.capacity import eligibility
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import server_growth
from blazar_core.leases import updates
from blazar_core.lifecycle.server_moves import Obstacle
from blazar_core.plugins import cloud_api
from tests import databases
from tests.unit import base
from tests.unit.blazar_core import test_best_effort
from tests.unit.blazar_core import test_evacuation
from tests.unit.blazar_core import test_interruptible
from tests.unit.blazar_core import test_overbooking
from tests.unit.blazar_core import test_provider_limits
from tests.unit.blazar_core import test_scheduler_claims

load_tests = databases.load_tests

NOW = base.NOW
LEAD = test_interruptible.LEAD
group = test_provider_limits.group


def cards_of(name, kinds, each=1):
    """Return what cards add to a host, and the units of its providers.

    :param kinds: a letter for each card, the kind of its provider
    :param each: how many devices each card has
    """
    amounts, units = collections.Counter(), {}
    for number, kind in enumerate(kinds):
        having = {'GPU': [each, 1, each, 1], f'GPU@{kind}': [each, 1, each, 1]}
        units[card(name, kind, number)] = having
        amounts.update(dict.fromkeys(having, each))
    return dict(amounts), {'': {}, **units} if units else None


def card(name, kind, number):
    return f'{name}-{kind}{number}'


def gpu(kind, amount=1):
    """Return the request group for devices of a kind; empty: of any kind."""
    return group(True, [[
        card(name, kind, number) for name in ('one', 'two', 'three')
        for number in range(4)]] if kind else (), GPU=amount)


def needs(*kinds, amount=1, **more):
    """Return the demand for servers with a device of each of some kinds."""
    return test_provider_limits.demand(
        group(VCPU=1), *(gpu(kind, amount) for kind in kinds), **more)


def takes(kind, amount=1):
    """Return what a server with a device takes."""
    return {'VCPU': 1, 'GPU': amount, f'GPU@{kind}': amount}


class CardsMixin:
    """Hosts that have cards.

    :ivar cards: by name of the host, the kinds of its cards
    """

    cards = {}

    def report_cards(self, name, kinds, each=1, vcpus=16, **allocations):
        """Report a host with cards, and what runs there."""
        uuid = self.uuid_of(name) or uuidutils.generate_uuid()
        amounts, units = cards_of(name, kinds, each)
        with self.database.writer() as session:
            inventory.record_host(session, self.clock.now(), model.HostFacts(
                uuid, name, name, {'VCPU': vcpus, **amounts}, units=units),
                allocations, inventory.generations(session, [uuid]).get(uuid))
        return uuid

    def new(self, demand, start=0, end=100, **values):
        """Return a new lease for a demand."""
        return self.new_lease(
            start, end, count=demand.count, resources=demand.resources,
            groups=demand.groups, **values)

    def lease_of(self, demand, start, end, **values):
        """Admit a lease of a demand for later."""
        self.wanted_by(demand)
        return self.leases.creation.create(self.new(
            demand, start, end, **values), self.encryption.encrypt('call'))

    def wanted_by(self, demand):
        """Let the resource type say what its servers need."""
        self.places_type.demand_of = lambda _reserved: demand

    def kinds_of(self, lease):
        """Return host and kind of each booking."""
        names = {row.id: row.name for row in self.scalars(models.Host)}
        return sorted((names.get(row.host_id), ''.join(sorted(
            rc[-1] * amount for rc, amount in row.resources.items()
            if '@' in rc)), row.resources.get('GPU', 0))
            for row in self.scalars(
                models.Booking, models.Booking.reservation_id.in_(
                    [one['id'] for one in lease['reservations']])))


class BestEffortTest(CardsMixin, test_best_effort.BestEffortTestCase):
    """Leases may use host one; there is capacity for migrations elsewhere."""

    def setUp(self):
        super().setUp()
        self.capacity = {'VCPU': 16, 'MEMORY_MB': 16384}
        for some in self.there.values():
            some.clear()
        self.tell(*self.names)
        self.needs, fake = {}, self.cloud.needs
        self.cloud.needs = lambda server_id, lent=False: self.needs.get(
            server_id) or fake(server_id, lent)

    def tell(self, *names):
        for name in names:
            uuid = self.names[name]
            amounts, units = self.cards.get(name, ({}, None))
            with self.database.writer() as session:
                inventory.record_host(
                    session, self.clock.now(), model.HostFacts(
                        uuid, name, name, {**self.capacity, **amounts},
                        units=units), self.there[name],
                    inventory.generations(session, [uuid])[uuid])

    def with_cards(self, each=1, **kinds):
        self.cards = {name: cards_of(name, some, each)
                      for name, some in kinds.items()}
        self.tell(*self.names)

    def serve(self, kind, memory=512, name='one'):
        """Run a server with a device."""
        server_id = self.put(name, 1)
        self.there[name][server_id] = {**takes(kind), 'MEMORY_MB': memory}
        self.needs[server_id] = needs(
            kind, hosts=frozenset(self.names.values()))
        self.tell(name)
        return server_id

    def best_effort(self, demand, *names):
        """Create a best-effort lease that may use host one, and others."""
        hosts = frozenset(self.names[name] for name in ('one', *names))
        self.wanted_by(dataclasses.replace(demand, hosts=hosts))
        lease = self.leases.creation.create(self.new(
            demand, request=self.request(0, 5000, timeout=600),
            hosts=hosts), self.encryption.encrypt('call'))
        self.go_on()
        return lease

    def assert_moved(self, lease, *servers):
        """Check that these servers are migrated, and the lease starts."""
        self.assertEqual(set(servers), set(self.asked()), self.reason(lease))
        for one in servers:
            self.arrive(one)
        self.go_on(60)
        self.assertEqual('STARTING', self.status(lease), self.reason(lease))

    def test_servers_without_the_needed_device_stay(self):
        self.with_cards(one='ab', two='ab')
        self.put('one', 1)
        self.serve('a')
        moved = self.serve('b', 2048)
        self.assert_moved(self.best_effort(needs('b')), moved)

    def test_server_moves_only_to_a_device_of_its_kind(self):
        self.with_cards(one='a', two='b')
        self.serve('a')
        lease = self.best_effort(needs('a'))
        self.assertEqual([], self.asked())
        self.assertIn('No servers can be migrated', self.reason(lease))

    def test_kinds_that_one_server_needs_are_freed(self):
        self.with_cards(one='aab', two='aab')
        small = [self.serve('a'), self.serve('a')]
        large = self.serve('b', 2048)
        lease = self.best_effort(needs('b', ''))
        moved = self.asked()
        self.assertIn(large, moved)
        self.assertEqual(2, len(moved))
        self.assert_moved(lease, *moved)
        self.assertEqual([('one', 'ab', 2)], self.kinds_of(lease))
        self.assertEqual(1, len({*small} & {*moved}))

    def test_devices_for_one_group_are_freed_on_one_kind(self):
        """One of two is free of each kind."""
        self.with_cards(2, one='ab', two='ab')
        servers = [self.serve('a'), self.serve('b', 2048)]
        lease = self.best_effort(needs('', amount=2))
        self.assert_moved(lease, servers[0])
        self.assertEqual([('one', 'aa', 2)], self.kinds_of(lease))

    def test_servers_of_one_lease_may_get_different_kinds(self):
        self.with_cards(one='ab', two='ab')
        servers = [self.serve('a'), self.serve('b')]
        lease = self.best_effort(needs('', count=2))
        self.assert_moved(lease, *servers)
        self.assertEqual([('one', 'a', 1), ('one', 'b', 1)],
                         self.kinds_of(lease))

    def test_no_plan_for_host_that_cannot_take_server(self):
        """It has the capacity, but gives one server only one unit."""
        self.cards = {'one': ({}, {'': {'VCPU': [16, 1, 1, 1]}})}
        self.cloud.bound.add(self.put('two', 14))
        moved = self.put('two', 2)
        self.tell('one')
        self.assert_moved(self.best_effort(test_provider_limits.demand(
            group(VCPU=2)), 'two'), moved)

    def test_units_limit_the_servers_on_a_host(self):
        """Six devices are free, but only for two servers with two each."""
        self.with_cards(3, one='aa', two='a', three='a')
        servers = [self.serve('a', name='two') for _each in range(2)]
        lease = self.best_effort(needs('', amount=2, count=3), 'two')
        moved, = self.asked()
        self.assertIn(moved, servers)
        self.assert_moved(lease, moved)

    def test_devices_that_are_left_over_on_providers_are_not_free(self):
        self.with_cards(3, one='aa', two='a')
        servers = []
        for _each in range(2):
            server_id = self.put('one', 1)
            self.there['one'][server_id] = {
                **takes('a', 2), 'MEMORY_MB': 512}
            self.needs[server_id] = needs(
                'a', amount=2, hosts=frozenset(self.names.values()))
            servers.append(server_id)
        self.tell('one')
        # Two are free, perhaps one of each card.
        lease = self.best_effort(needs('a', amount=2))
        moved, = self.asked()
        self.assertIn(moved, servers)
        self.assert_moved(lease, moved)

    def test_target_must_give_all_devices_from_one_provider(self):
        """Of both cards of the target, one device is left."""
        self.with_cards(3, one='a', two='aa')
        for _each in range(2):
            other = self.put('two', 1)
            self.there['two'][other] = takes('a', 2)
            self.cloud.bound.add(other)
        server_id = self.put('one', 1)
        self.there['one'][server_id] = takes('a', 2)
        self.needs[server_id] = needs(
            'a', amount=2, hosts=frozenset(self.names.values()))
        self.tell('one', 'two')
        self.best_effort(needs('a', amount=3))
        self.assertEqual([], self.asked())


class ClaimTest(CardsMixin, test_scheduler_claims.ClaimTestCase):
    """Servers that are resized, or placed elsewhere than booked."""

    def claim_card(self, server_id, name, kind, number=0, **how):
        return self.claims.claim(server_id, {
            self.uuid_of(name): {'VCPU': 1},
            card(name, kind, number): {'GPU': 1}}, **how)

    def running(self, name='one', end=5000):
        """Return a server of a lease without a device."""
        server_id, = base.servers_of(self.running_lease(
            end=end, hosts=frozenset([self.uuid_of(name)])))
        return server_id

    def test_resize_to_device_is_limited_to_free_devices(self):
        """Until the end of its lease."""
        self.report_cards('one', 'ab')
        self.report_cards('two', 'ab')
        server_id = self.running()
        self.lease_of(needs('a'), 4000, 9000,
                      hosts=frozenset([self.uuid_of('two')]))
        self.assertRaises(scheduler_claims.Denied, self.claim_card,
                          server_id, 'two', 'a')
        self.claim_card(server_id, 'two', 'b', 1)
        # It counts there at once.
        self.assertRaises(errors.Refused, self.lease_of, needs('b'), 100,
                          9000, hosts=frozenset([self.uuid_of('two')]))

    def test_resize_within_its_time_does_not_wait_for_later_leases(self):
        self.report_cards('one', '')
        self.report_cards('two', 'a')
        server_id = self.running()
        self.lease_of(needs('a'), 5000, 9000)
        self.claim_card(server_id, 'two', 'a')

    def test_booking_follows_resize_to_device_and_back(self):
        self.report_cards('one', 'ab')
        server_id = self.running()
        self.report_cards('one', 'ab', **{server_id: takes('b')})
        self.assertEqual(takes('b'), self.booking(server_id).resources)
        self.assertRaises(errors.Refused, self.lease_of, needs('b'), 100, 200)
        self.lease_of(needs('a'), 100, 200)
        self.report_cards('one', 'ab', **{server_id: {'VCPU': 1}})
        self.assertEqual({'VCPU': 1}, self.booking(server_id).resources)
        self.lease_of(needs('b'), 100, 200)

    def test_resize_that_adds_only_a_device_is_checked(self):
        self.report_cards('one', '')
        self.report_cards('two', 'a')
        server_id, grown = self.running(), []
        self.claims._growth = lambda _connection, *what: grown.append(what[1:])
        self.claim_card(server_id, 'two', 'a')
        self.assertEqual([(server_id, {'VCPU': 1}, takes('a'))], grown)

    def test_another_kind_is_no_growth(self):
        row = mock.Mock(project_id='project', resources=takes('a'))
        self.assertIsNone(server_growth.asked_of(
            row, takes('a'), takes('b')))
        self.assertFalse(scheduler_claims._grows(row, takes('b')))

    def test_device_counts_while_a_resize_is_reverted(self):
        """Nova counts it for the migration until then."""
        self.report_cards('one', 'ab', migration=takes('a'))
        server_id = uuidutils.generate_uuid()
        host_id = self.row('one').id
        with self.database.begin() as connection:
            inventory.come_back(
                connection, NOW, host_id, server_id,
                {'VCPU': 1, 'GPU': 1, 'UNKNOWN': 1}, 'migration')
        self.assertEqual(takes('a'), self.row('one').usage)
        self.assertRaises(errors.Refused, self.lease_of, needs('a'), 0, 10)

    def test_server_that_was_resized_is_placed_with_its_device(self):
        """In the next occurrence of its lease."""
        self.report_cards('one', 'a')
        server_id, = base.servers_of(self.lease(0, 100))
        self.claim_card(server_id, 'one', 'a')
        self.assertEqual(takes('a'), self.booking(server_id).resources)

    def test_slots_exchange_kinds_with_their_hosts(self):
        self.report_cards('one', 'a')
        self.report_cards('two', 'b')
        demand = needs('', count=2)
        lease = self.reserve(0, 100, new_leases.NewReservation(
            demand, params={'amount': 2}, spec={}), active=True)
        server_id, = self.take_slots(lease)
        here = self.host_of(server_id)
        there = {'one': 'two', 'two': 'one'}[here]
        self.claim_card(server_id, there, {'one': 'a', 'two': 'b'}[there])
        self.assertEqual(there, self.host_of(server_id))
        self.assertEqual([('one', 'a', 1), ('two', 'b', 1)],
                         self.kinds_of(lease))


class InterruptibleTest(CardsMixin, test_interruptible.EvictionTestCase):
    """A host with two cards of each of two kinds."""

    def setUp(self):
        super().setUp()
        self.there = {}
        self.report_cards('one', 'aabb')

    def serve(self, kind='', vcpus=1, number=0, **values):
        """Run an interruptible server, with a device if it has a kind."""
        server_id = self.register(**values)
        self.claims.claim(server_id, {
            self.uuid_of('one'): {'VCPU': vcpus}} | ({
                card('one', kind, number): {'GPU': 1}} if kind else {}))
        self.there[server_id] = {
            **(takes(kind) if kind else {}), 'VCPU': vcpus}
        self.report_cards('one', 'aabb', **self.there)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            cloud_api.ServerState.RUNNING, self.uuid_of('one'))
        self.clock.advance(1)
        return server_id

    def safe_until(self):
        return dict(self.scalars_of(
            models.InterruptibleServer.server_id,
            models.InterruptibleServer.safe_until))

    def scalars_of(self, *columns):
        with self.database.reader() as session:
            return session.query(*columns).all()

    def test_only_servers_with_the_needed_device_are_evicted(self):
        """However large the others are."""
        large = self.serve(vcpus=12)
        other, mine = self.serve('b', 1, 2), self.serve('a')
        self.serve('b', 1, 3)
        self.lease_of(needs('a', 'a'), LEAD + 60, 9000)
        self.evictions.plan()
        self.until(NOW + LEAD + 60 - 300)
        self.evictions.plan()
        self.assertEqual({mine: states.Move.PLANNED}, self.moves())
        self.assertEqual(
            {large: None, other: None}, {
                one: self.safe_until()[one] for one in (large, other)})
        self.assertIsNotNone(self.safe_until()[mine])

    def test_server_is_placed_where_a_device_is_reserved_later(self):
        self.lease_of(needs('a', 'a'), LEAD + 60, 9000)
        ordinary, mine = uuidutils.generate_uuid(), self.register()
        uuid = self.uuid_of('one')
        ways = [{uuid: {'VCPU': 1}, card('one', kind, number): {'GPU': 1}}
                for kind, number in (('a', 0), ('a', 1), ('b', 2))]
        hosts = eligibility.Eligibility(
            self.database, self.clock, self.admission.index)
        for server_id, free in ((ordinary, [2]), (mine, [0, 1, 2])):
            found = hosts.for_server(
                server_id, {'VCPU': 1, 'GPU': 1}, [uuid],
                candidates={uuid: ways})
            # Without an entry, all of them may be used.
            self.assertEqual(free, sorted(
                found.candidates.get(uuid, [0, 1, 2])))
        self.assertRaises(
            scheduler_claims.Denied, self.claims.claim, ordinary, ways[0])
        self.claims.claim(mine, ways[0])

    def test_server_is_not_placed_where_its_kind_is_reserved_soon(self):
        self.lease_of(needs('a', 'a'), LEAD - 1, 9000)
        self.assertRaises(scheduler_claims.Denied, self.serve, 'a')
        self.serve('b', number=2)

    def test_device_is_available_to_leases_after_the_lead_time(self):
        self.serve('a', number=0)
        self.serve('a', number=1)
        self.assertRaises(
            errors.Refused, self.lease_of, needs('a'), LEAD - 1, 9000)
        self.assertEqual([('one', 'b', 1)], self.kinds_of(
            self.lease_of(needs(''), LEAD - 1, 9000)))
        self.lease_of(needs('a'), LEAD + 60, 9000)

    def test_server_becomes_ordinary_only_if_its_kind_is_free(self):
        self.lease_of(needs('a'), LEAD + 60, 9000)
        mine, second = self.serve('a', number=0), self.serve('a', number=1)
        other = self.serve('b', number=2)

        def ordinary(server_id):
            return interruptible.make_ordinary(
                self.admission.index, self.database, self.clock.now(),
                server_id)

        self.assertEqual([True, False, True], [
            ordinary(one) for one in (mine, second, other)])


class ReassignmentTest(CardsMixin, test_overbooking.OverbookingTestCase):
    """Leases whose hosts lose their devices."""

    def lease_of(self, demand, start=50, end=100, **values):
        self.wanted['project'] = demand
        return self.leases.creation.create(self.new(
            demand, start, end, **values), self.encryption.encrypt('call'))

    def lose(self, name='one'):
        self.report_cards(name, '', vcpus=0)
        self.overbooking.look()

    def test_lease_of_a_kind_is_healed_only_by_that_kind(self):
        self.report_cards('one', 'a')
        lease = self.lease_of(needs('a'))
        self.report_cards('two', 'b')
        self.lose()
        self.assertEqual([None], self.hosts_of(lease))
        self.report_cards('three', 'ba')
        self.overbooking.look()
        self.assertEqual([('three', 'a', 1)], self.kinds_of(lease))

    def test_device_that_is_reserved_heals_no_lease(self):
        self.report_cards('one', 'a')
        lease = self.lease_of(needs('a'))
        self.report_cards('two', 'a')
        self.lease_of(needs('a'), 90, 200)
        self.lose()
        self.assertEqual([None], self.hosts_of(lease))
        self.assertIs(True, self.get(lease)['degraded'])

    def test_lease_of_any_kind_is_healed_by_another_kind(self):
        self.report_cards('one', 'a')
        lease = self.lease_of(needs(''))
        self.report_cards('two', 'b')
        self.lose()
        self.assertEqual([('two', 'b', 1)], self.kinds_of(lease))
        self.assertIs(False, self.get(lease)['reservations'][0][
            'missing_resources'])

    def test_servers_with_different_kinds_are_healed_together(self):
        self.report_cards('one', 'ab')
        lease = self.lease_of(needs('', count=2))
        self.assertEqual([('one', 'a', 1), ('one', 'b', 1)],
                         self.kinds_of(lease))
        self.report_cards('two', 'ab')
        self.lose()
        self.assertEqual([('two', 'a', 1), ('two', 'b', 1)],
                         self.kinds_of(lease))
        self.assertNotIn(('lease.degraded', lease['id']), self.notified)

    def test_leases_healed_together_share_no_device(self):
        self.report_cards('one', 'ab')
        leases = [self.lease_of(needs('')) for _each in range(2)]
        self.report_cards('two', 'ab')
        self.lose()
        self.assertEqual(['a', 'b'], sorted(
            kind for one in leases for _host, kind, _many in
            self.kinds_of(one)))

    def test_leases_of_a_kind_healed_together_share_no_device(self):
        self.report_cards('one', 'aa')
        leases = [self.lease_of(needs('a')) for _each in range(2)]
        for name in 'two', 'three':
            self.report_cards(name, 'ab')
        self.lose()
        self.assertEqual([('three', 'a', 1), ('two', 'a', 1)], sorted(
            self.kinds_of(one)[0] for one in leases))
        self.assertNotIn('one by one', self.log.output)

    def test_lease_gets_another_kind_of_its_own_host(self):
        self.report_cards('one', 'ab')
        lease = self.lease_of(needs(''))
        self.assertEqual([('one', 'a', 1)], self.kinds_of(lease))
        self.report_cards('one', 'b')
        self.overbooking.look()
        self.overbooking.look()
        self.assertEqual([('one', 'b', 1)], self.kinds_of(lease))
        self.assertIs(False, self.get(lease)['degraded'])
        before = self.everything()
        self.clock.advance(test_overbooking.overbooking.AGAIN)
        self.overbooking.look()
        self.assertEqual(before, self.everything())

    def test_dates_of_servers_with_different_kinds_can_change(self):
        self.report_cards('one', 'ab')
        demand = needs('', count=2)
        lease = self.reserve(50, 100, new_leases.NewReservation(
            demand, params={'amount': 2}, spec={}), self.places())
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][1]['id']: self.places(2)}))
        self.assertEqual(
            [('one', '', 0)] * 2 + [('one', 'a', 1), ('one', 'b', 1)],
            self.kinds_of(lease))

    def test_lease_with_healed_kinds_can_change(self):
        for name, kind in ('one', 'a'), ('two', 'b'):
            self.report_cards(name, kind)
        self.wanted['project'] = needs('', count=2)
        lease = self.reserve(50, 100, new_leases.NewReservation(
            needs('', count=2), params={'amount': 2}, spec={}),
            self.places())
        self.report_cards('three', 'c')
        self.report_cards('four', '')
        self.lose()
        kinds = [('', 0), ('b', 1), ('c', 1)]
        self.assertEqual(kinds, sorted(
            one[1:] for one in self.kinds_of(lease)))
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][1]['id']: self.places(2)}))
        self.assertEqual([('', 0), *kinds], sorted(
            one[1:] for one in self.kinds_of(lease)))

    def test_reservation_can_be_changed_to_another_kind(self):
        def slots(kind):
            return new_leases.NewReservation(
                needs(kind, count=1), params={'amount': 1, 'kind': kind},
                spec={})

        self.report_cards('one', 'ab')
        lease = self.reserve(50, 100, slots('a'))
        self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][0]['id']: slots('b')}))
        self.assertEqual([('one', 'b', 1)], self.kinds_of(lease))


class EvacuationTest(CardsMixin, test_evacuation.EvacuationTestCase):
    """A server with a device on host one, which fails."""

    def setUp(self):
        super().setUp()
        self.needs = None
        self.cloud.needs = lambda _server_id, lent=False: (
            dataclasses.replace(
                self.needs, hosts=frozenset(self.cloud.hosts)))

    def running(self, demand, kinds='a'):
        self.report_cards('one', kinds)
        self.needs = demand
        servers = base.servers_of(self.running_lease(
            end=2 * test_evacuation.INTERVAL, count=demand.count,
            resources=demand.resources, groups=demand.groups,
            hosts=frozenset([self.uuid_of('one')])))
        return servers

    def assert_evacuated(self, *servers):
        self.fail()
        self.look()
        self.assertEqual({*servers}, {
            one for one, _host in self.cloud.evacuations})

    def test_server_waits_for_a_free_device_of_its_kind(self):
        server_id, = self.running(needs('a'))
        self.report_cards('two', 'b')
        self.assert_evacuated()
        self.assertIn(Obstacle.NO_CAPACITY, self.log.output)
        self.report_cards('two', 'ba')
        self.clock.advance(60)
        self.look()
        self.assertEqual([(server_id, None)], self.cloud.evacuations)

    def test_server_with_any_device_is_evacuated_to_another_kind(self):
        server_id, = self.running(needs(''))
        self.report_cards('two', 'b')
        self.assert_evacuated(server_id)

    def test_servers_with_any_device_are_evacuated_at_once(self):
        servers = [*self.running(needs(''), 'aa'), *base.servers_of(
            self.running_lease(
                end=2 * test_evacuation.INTERVAL, count=1,
                resources=self.needs.resources, groups=self.needs.groups,
                hosts=frozenset([self.uuid_of('one')])))]
        self.report_cards('two', 'bb')
        self.assert_evacuated(*servers)

    def test_reserved_device_is_not_used(self):
        self.running(needs(''))
        self.report_cards('two', 'b')
        self.leases.creation.create(self.new(
            needs('b'), 50, 100, hosts=frozenset([self.uuid_of('two')])),
            self.encryption.encrypt('call'))
        self.assert_evacuated()


class SwapTest(CardsMixin, base.LeaseTestCase):

    def test_slots_of_different_sizes_keep_their_amounts(self):
        self.report_cards('one', 'a')
        self.report_cards('two', 'b')
        lease = self.reserve(0, 100, new_leases.NewReservation(
            needs('', count=2), params={'amount': 2}, spec={}), active=True)
        server_id, = self.take_slots(lease)
        with self.database.writer() as session:
            mine = session.query(models.Booking).filter_by(
                server_id=server_id).one()
            other = next(one for one in mine.reservation.bookings
                         if one is not mine)
            mine.resources = {**mine.resources, 'VCPU': 2}
            kept, swapped = ledger.follow(mine, other.host_id)
            self.assertEqual([mine.resources, other.resources], [
                kept.new.resources, swapped.new.resources])
            self.assertEqual([other.host_id, mine.host_id], [
                kept.new.host_id, swapped.new.host_id])
