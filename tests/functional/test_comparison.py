# SPDX-License-Identifier: Apache-2.0

"""Full syncs with a real placement: their requests and their results.
"""

import typing as ty
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import objects
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import models
from blazar_nova.compat import compute_hosts
from tests.functional import leased


class SteadyTest(leased.LeasedTestCase):
    """Hosts whose previous state is known."""

    version = '1.39'

    def setUp(self) -> None:
        super().setUp()
        self.clock.advance(1)
        self.uuid = self.host().uuid

    def host(self, name: str = 'host1') -> models.Host:
        with self.listener.parts.database.reader() as session:
            return session.scalars(sa.select(models.Host).where(
                models.Host.name == name)).one()

    def compare(self, listener: ty.Any = None) -> list[str]:
        """Sync and advance the clock; return the requests to placement."""
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=compute_hosts.ask_placement) as ask:
            (listener or self.listener).server_sync.compare_all()
        self.clock.advance(1)
        return sorted(call.args[0] for call in ask.call_args_list)

    def of(self, uuid: str, *what: str) -> list[str]:
        """Return the requests for all providers and for parts of one."""
        return ['/resource_providers'] + [
            f'/resource_providers/{uuid}/{one}' for one in what]

    def allocate(self, consumer: str, **by_provider: dict[str, int]) -> None:
        body = self.placement.get(f'/allocations/{consumer}',
                                  version=self.version).body
        body |= {'project_id': 'p', 'user_id': 'u', 'consumer_type': 'X',
                 'allocations': {uuid: {'resources': resources} for
                                 uuid, resources in by_provider.items()}}
        body.setdefault('consumer_generation', None)
        answer = self.placement.put(f'/allocations/{consumer}', body,
                                    version=self.version)
        self.assertEqual(204, answer.status, answer.body)

    def put(self, url: str, body: dict[str, ty.Any]) -> None:
        answer = self.placement.put(url, body, version=self.version)
        self.assertEqual(200, answer.status, answer.body)

    def set_inventory(self, uuid: str, **totals: int) -> None:
        url = f'/resource_providers/{uuid}/inventories'
        body = self.placement.get(url, version=self.version).body
        for rc, total in totals.items():
            body['inventories'].setdefault(rc, {})['total'] = total
        self.put(url, body)

    def test_sync_sends_no_requests_for_idle_host(self) -> None:
        self.assertEqual(self.of(self.uuid), self.compare())

    def test_sync_requests_only_allocations_of_used_host(self):
        consumer = uuidutils.generate_uuid()
        self.allocate(consumer, **{self.uuid: {'VCPU': 1}})
        self.assertEqual(self.of(self.uuid, 'allocations', 'inventories'),
                         self.compare())
        self.assertEqual({'VCPU': 1}, self.host().usage)
        for _time in range(2):
            self.assertEqual(self.of(self.uuid, 'allocations'),
                             self.compare())
        self.assertEqual({'VCPU': 1}, self.host().usage)

    def test_sync_sees_freed_allocation_without_new_generation(self) -> None:
        consumer = uuidutils.generate_uuid()
        self.allocate(consumer, **{self.uuid: {'VCPU': 1}})
        self.compare()
        before = compute_hosts.trees()
        # As Nova does where it does not check generations.
        answer = self.placement.delete(f'/allocations/{consumer}')
        self.assertEqual(204, answer.status)
        self.assertEqual(before, compute_hosts.trees())
        self.compare()
        self.assertEqual({}, self.host().usage)
        # Also by a consumer that keeps resources of another provider.
        other = self.host('host2').uuid
        self.allocate(consumer, **{self.uuid: {'VCPU': 1},
                                   other: {'VCPU': 2}})
        self.compare()
        before = compute_hosts.trees()
        self.allocate(consumer, **{other: {'VCPU': 2}})
        self.assertEqual(before[self.uuid], compute_hosts.trees()[self.uuid])
        self.compare()
        self.assertEqual(({}, {'VCPU': 2}),
                         (self.host().usage, self.host('host2').usage))

    def test_sync_sees_changed_inventory(self) -> None:
        before = self.host().capacity
        self.set_inventory(self.uuid, VCPU=17)
        self.assertEqual(self.of(self.uuid, 'allocations', 'inventories'),
                         self.compare())
        after = self.host().capacity
        self.assertNotEqual(before['VCPU'], after['VCPU'])
        self.assertEqual({**before, 'VCPU': after['VCPU']}, after)

    def test_sync_sees_inventory_changed_during_sync(self) -> None:
        self.allocate(uuidutils.generate_uuid(), **{self.uuid: {'VCPU': 1}})
        self.compare()
        trees = compute_hosts.trees

        def late() -> dict[str, compute_hosts.Tree]:
            found = trees()
            self.set_inventory(self.uuid, VCPU=17)
            return found

        with mock.patch('blazar_nova.compat.compute_hosts.trees', late):
            self.listener.server_sync.compare_all()
        facts = compute_hosts.facts(self.uuid)
        assert facts is not None
        self.assertEqual(facts.capacity, self.host().capacity)

    def test_sync_sees_new_child_provider(self) -> None:
        child = uuidutils.generate_uuid()
        self.placement.post('/resource_providers', {
            'name': 'child', 'uuid': child,
            'parent_provider_uuid': self.uuid}, version=self.version)
        self.put(f'/resource_providers/{child}/inventories', {
            'resource_provider_generation': 0,
            'inventories': {'VGPU': {'total': 8}}})
        self.compare()
        # Also by the kind of the provider, which other providers may share.
        kind, = self.host().capacity.keys() - model.plain(self.host().capacity)
        self.assertEqual('VGPU', model.base_of(kind))
        self.assertEqual((8, 8), (self.host().capacity['VGPU'],
                                  self.host().capacity[kind]))
        self.allocate(uuidutils.generate_uuid(), **{child: {'VGPU': 3}})
        self.compare()
        self.assertEqual({'VGPU': 3, kind: 3}, self.host().usage)
        # Once a host has usage, its allocations are requested.
        self.assertEqual(self.of(child, 'allocations'), self.compare())

    def test_sync_sees_changed_host_property(self) -> None:
        context = nova_context.get_admin_context()
        mapping = objects.HostMapping.get_by_host(context, 'host1')
        with nova_context.target_cell(
                context, mapping.cell_mapping) as cell_context:
            node = objects.ComputeNode.get_by_uuid(cell_context, self.uuid)
            node.hypervisor_version = 4711
            node.save()
        self.compare()
        self.assertEqual(
            4711, self.host().properties['hypervisor_version'])

    def test_sync_corrects_wrong_host_records(self) -> None:
        before = self.host()
        with self.listener.parts.database.writer() as session:
            session.execute(sa.update(models.Host).values(
                capacity={'VCPU': 1}, usage={'VCPU': 1}, properties={}))
        self.compare()
        after = self.host()
        self.assertEqual(
            (before.capacity, before.usage, before.properties),
            (after.capacity, after.usage, after.properties))

    def test_sync_does_not_overwrite_newer_host_record(self):
        other = self.new_listener(self.clock)
        trees = compute_hosts.trees

        def late() -> dict[str, compute_hosts.Tree]:
            found = trees()
            self.set_inventory(self.uuid, VCPU=17)
            other.server_sync.hosts.compare_service_host('host1')
            self.seen = self.host().capacity
            return found

        before = self.host().capacity
        with mock.patch('blazar_nova.compat.compute_hosts.trees', late):
            self.listener.server_sync.compare_all()
        self.assertNotEqual(before, self.seen)
        self.assertEqual(self.seen, self.host().capacity)

    def test_server_arriving_during_sync_is_counted(self) -> None:
        database, now = self.listener.parts.database, self.clock.now()
        server, takes = uuidutils.generate_uuid(), {'VCPU': 1}
        flavor = dict.fromkeys(self.host().capacity, 0) | takes
        told = []
        with database.writer() as session:
            session.execute(sa.update(models.Host).where(
                models.Host.uuid == self.uuid).values(
                    usage=takes, consumers={server: (takes, now + 30)}))
        trees = compute_hosts.trees

        def late() -> dict[str, compute_hosts.Tree]:
            found = trees()
            # The usage is confirmed, without a new generation in the database.
            self.allocate(server, **{self.uuid: takes})
            with database.begin() as connection:
                told.append(inventory.record_server(
                    connection, self.clock.now(), 'host1', 'host1', server,
                    flavor))
            self.clock.advance(100)
            return found

        with mock.patch('blazar_nova.compat.compute_hosts.trees', late):
            self.compare()
        self.assertEqual(([True], takes), (told, self.host().usage))

    def test_sync_works_if_provider_list_is_unavailable(self) -> None:
        self.allocate(uuidutils.generate_uuid(), **{self.uuid: {'VCPU': 1}})
        ask = compute_hosts.ask_placement

        def of_one(url: str) -> ty.Any:
            if url == '/resource_providers':
                raise compute_hosts.errors.CloudUnavailable('too slow')
            return ask(url)

        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        of_one):
            self.listener.server_sync.compare_all()
        self.assertEqual({'VCPU': 1}, self.host().usage)

    def test_only_one_of_two_listeners_syncs(self) -> None:
        listeners = [self.listener, self.new_listener(self.clock)]
        found: list[str] = []
        for listener in listeners:
            self.useFixture(fixtures.MockPatchObject(
                listener.server_sync.hosts, 'compare_all',
                lambda *_args, name=str(len(found)): found.append(name)))
        for number in range(1, 4):
            for listener in listeners:
                listener.periodic_sync.look()
            self.assertEqual(number, len(found))
            self.clock.advance(300)
