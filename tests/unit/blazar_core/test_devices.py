# SPDX-License-Identifier: Apache-2.0

"""Devices in what happens to leases and servers after their admission."""

import collections
import dataclasses

from oslo_utils import uuidutils

from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import models
from tests import databases
from tests.unit.blazar_core import test_best_effort
from tests.unit.blazar_core import test_provider_limits

load_tests = databases.load_tests

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
            inventory.report(session, self.clock.now(), model.HostFacts(
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
                inventory.report(session, self.clock.now(), model.HostFacts(
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
