# SPDX-License-Identifier: Apache-2.0

"""Evacuation of hosted servers from a failed host."""

import dataclasses
from unittest import mock

import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.lifecycle import server_moves
from blazar_core.plugins import cloud_api
from tests import driven
from tests.unit.blazar_core import test_devices
from tests.unit.blazar_core import whole_hosts_base

State = cloud_api.ServerState


class TestHostedServers(whole_hosts_base.WholeHostsTestCase):
    """A lease of two hosts, of which the one with two servers fails."""

    def setUp(self):
        super().setUp()
        self.uuids = {name: self.host(name, VCPU=2) for name in (
            'one', 'two', 'three')}
        for name in self.uuids:
            self.enrol(name)
        self.machines.among = model.HostPool.ENROLLED
        self.cloud.hosts = set(self.uuids.values())
        self.host_status = host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(0, 0, 3600),
            lambda event, lease: self.notified.append((event, lease['id'])))
        self.evacuation = self.new_relocating()
        self.says = True
        self.lease_ = self.hosts_of(['one', 'two'])
        driven.run_due(self.new_engine())
        self.has('one', 'first', 'second')

    def hosts_of(self, names, start=0):
        wanted = self.machines_of(len(names), len(names))
        return self.reserve(start, 7200, dataclasses.replace(
            wanted, demand=dataclasses.replace(
                wanted.demand, hosts=frozenset(
                    self.uuids[name] for name in names))))

    def has(self, name, *server_ids):
        """Add hosted servers of the lease on a host."""
        its = self.machines.full.setdefault(
            self.lease_['reservations'][0]['id'], [])
        for server_id in server_ids:
            its.append(server_id)
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, self.uuids[name])

    def host_id(self, name):
        return self.scalars(models.Host.id, models.Host.name == name)[0]

    def fail(self, *names):
        self.host_status.update(
            {uuid: host_status.Down('It is off.', certain=True) if name in
             names else None for name, uuid in self.uuids.items()})

    def look(self):
        self.evacuation.look(lambda failed: [*failed] if self.says else [])

    def evacuated(self):
        self.look()
        asked = [server_id for server_id, _host in self.cloud.evacuations]
        self.cloud.evacuations.clear()
        return sorted(asked)

    def test_no_evacuation_if_hosts_of_lease_are_up(self):
        self.assertEqual([], self.evacuated())
        self.fail('three')
        self.assertEqual([], self.evacuated())

    def test_hosted_servers_are_evacuated_to_other_hosts_of_lease(self):
        self.has('two', 'third')
        self.fail('one')
        self.assertEqual(['first', 'second'], self.evacuated())
        # They are requested again after a while, if they are still there.
        self.assertEqual([], self.evacuated())
        for server_id in ('first', 'second'):
            self.cloud.arrive(server_id)
        self.clock.advance(server_moves.AGAIN - 1)
        self.assertEqual([], self.evacuated())
        self.clock.advance(1)
        self.assertEqual(['first', 'second'], self.evacuated())
        for server_id in ('first', 'second'):
            self.cloud.arrive(server_id, self.uuids['two'])
        self.clock.advance(2 * server_moves.AGAIN)
        self.assertEqual([], self.evacuated())

    def test_no_evacuation_until_host_is_certainly_down(self):
        self.says = False
        self.fail('one')
        self.assertEqual([], self.evacuated())
        self.says = True
        self.assertEqual(['first', 'second'], self.evacuated())

    def test_servers_with_own_lease_are_not_evacuated_as_hosted(self):
        own, = self.scalars(models.Booking, models.Booking.host_id ==
                            self.host_id('two'))
        with self.database.writer() as session:
            session.add(models.Booking(
                reservation_id=own.reservation_id, server_id='first',
                host_id=self.host_id('one'), start_date=own.start_date,
                end_date=own.end_date, resources={'VCPU': 1}))
        self.fail('one')
        self.assertEqual(['second'], self.evacuated())

    def test_no_evacuation_to_host_outside_the_lease(self):
        self.cloud.reach = {'first': frozenset([self.uuids['three']])}
        self.fail('one')
        self.assertEqual(['second'], self.evacuated())

    def test_no_evacuation_to_host_that_cannot_take_server(self):
        """No provider of host two has the trait that one server requires."""
        needs, having = self.cloud.needs, {
            'first': frozenset([self.uuids['three']]),
            'second': frozenset([self.uuids['two']])}
        with mock.patch.object(
                self.cloud, 'needs', lambda one, lent=False:
                dataclasses.replace(needs(one, lent), groups=(model.Group(
                    (('VCPU', 1),), True, (having[one],)),))):
            self.fail('one')
            self.assertEqual(['second'], self.evacuated())

    def test_no_evacuation_to_host_whose_kind_of_device_is_in_use(self):
        amounts, units = test_devices.cards_of('two', 'ab')
        with self.database.writer() as session:
            uuid = self.uuids['two']
            inventory.record_host(
                session, self.clock.now(), model.HostFacts(
                    uuid, 'two', 'two', {'VCPU': 2, **amounts}, units=units),
                {}, inventory.generations(session, [uuid])[uuid])
        demand, free = self.cloud.needs, {
            'VCPU': 1, 'GPU': 1, 'GPU@a': 0, 'GPU@b': 1}
        self.cloud.needs = lambda one, lent=False: dataclasses.replace(
            demand(one, lent), resources={'VCPU': 1, 'GPU': 1},
            groups=(model.Group((('VCPU', 1),)), test_devices.gpu('a')))
        self.cloud.free = lambda _host: free
        self.fail('one')
        self.assertEqual([], self.evacuated())
        free.update({'GPU@a': 1, 'GPU@b': 0})
        self.clock.advance(60)
        self.assertEqual(1, len(self.evacuated()))

    def test_only_as_many_servers_as_fit_are_evacuated(self):
        """The second server is requested when there is more capacity."""
        self.cloud.left[self.uuids['two']] = 0
        self.fail('one')
        self.assertEqual([], self.evacuated())
        self.clock.advance(29)
        self.cloud.left[self.uuids['two']] = 1
        self.assertEqual([], self.evacuated())
        self.clock.advance(1)
        first, = self.evacuated()
        self.cloud.arrive(first, self.uuids['two'])
        self.clock.advance(29)
        self.assertEqual([], self.evacuated())
        self.clock.advance(1)
        self.assertEqual([*{'first', 'second'} - {first}], self.evacuated())

    def test_target_capacity_is_used_by_one_evacuation(self):
        """Two hosts fail, and the cloud does not count the first move yet."""
        self.lease_ = self.hosts_of(['three'])
        driven.run_due(self.new_engine())
        with self.database.writer() as session:
            session.get(models.Booking, 3).reservation_id = session.get(
                models.Booking, 1).reservation_id
        its, = self.machines.full
        self.machines.full[its] = ['first']
        self.has('three', 'third')
        self.machines.full[its].append('third')
        self.cloud.left[self.uuids['two']] = 1
        self.fail('one', 'three')
        self.assertEqual(1, len(self.evacuated()))

    def test_another_process_counts_evacuations_under_way(self):
        """Placement does not count the first move yet."""
        self.cloud.left[self.uuids['two']] = 1
        self.fail('one')
        self.assertEqual(1, len(self.evacuated()))
        self.evacuation = self.new_relocating()
        with self.database.writer() as session:
            session.execute(sa.update(models.ServerMove).where(
                models.ServerMove.status == 'planned').values(next_at=0))
        self.assertEqual([], self.evacuated())
        self.clock.advance(30)
        self.assertEqual(1, len(self.evacuated()))

    def test_failed_evacuations_are_retried_with_pauses(self):
        """The second server is requested again only after a while, too."""
        self.cloud.servers['first'] = dataclasses.replace(
            self.cloud.servers['first'], busy=True)
        self.fail('one')
        asked = 0
        for _second in range(600):
            asked += len(self.evacuated())
            if self.cloud.servers['second'].busy:
                self.cloud.arrive('second')
            self.clock.advance(1)
        self.assertEqual(3, asked)

    def test_slow_checks_do_not_starve_any_server(self):
        """The time is never enough for all servers."""
        self.fail('one')
        needs, seen = self.cloud.needs, set()

        def slowly(server_id):
            seen.add(server_id)
            self.clock.advance(11)
            return dataclasses.replace(needs(server_id), hosts=frozenset())

        self.cloud.needs = slowly
        for _look in range(8):
            self.assertEqual([], self.evacuated())
            self.clock.advance(30)
        self.assertEqual({'first', 'second'}, seen)

    def test_failing_lookup_does_not_block_other_servers(self):
        self.fail('one')
        look = self.cloud.look

        def looked(server_id):
            if server_id == 'first':
                raise ValueError('It is odd.')
            return look(server_id)

        self.cloud.look = looked
        self.assertEqual(['second'], self.evacuated())

    def test_hosted_servers_are_evacuated_to_replacement_host(self):
        """The lease lacks no host after the replacement."""
        self.fail('one', 'two')
        self.overbooking_check().look()
        for server_id in ('first', 'second'):
            self.assertEqual(self.uuids['one'], self.cloud.look(
                server_id).host)
        self.assertEqual(['first', 'second'], self.evacuated())

    def test_no_evacuation_without_another_host_of_lease(self):
        self.fail('one', 'two')
        asked = mock.Mock(return_value=())
        self.evacuation.look(asked)
        asked.assert_not_called()
        self.assertEqual([], self.cloud.evacuations)

    def test_refused_evacuation_does_not_block_others(self):
        self.cloud.broken['first'] = 'It does not like that.'
        self.fail('one')
        self.assertEqual(['second'], self.evacuated())

    def test_concurrent_processes_request_evacuation_once(self):
        """Another process finds at the same time that they are due."""
        self.fail('one')
        others, go_on = self.new_relocating(), self.evacuation._go_on

        def first(one):
            others.look(lambda failed: [*failed])
            for server_id in ('first', 'second'):
                self.cloud.arrive(server_id)
            go_on(one)

        with mock.patch.object(self.evacuation, '_go_on', first):
            self.assertEqual(['first', 'second'], self.evacuated())

    def test_no_evacuation_if_host_recovers_meanwhile(self):
        self.fail('one')
        hosted_servers = self.machines.hosted_servers

        def late(*args):
            self.fail()
            self.clock.advance(1)
            self.fail()
            return hosted_servers(*args)

        self.machines.hosted_servers = late
        self.assertEqual([], self.evacuated())

    def test_time_spent_on_evacuation_is_limited(self):
        self.fail('one')
        needs = self.cloud.needs

        def slowly(server_id):
            self.clock.advance(21)
            return needs(server_id)

        self.cloud.needs = slowly
        self.assertEqual([], self.evacuated())
        self.cloud.needs = needs
        self.clock.advance(30)
        self.assertEqual(['first', 'second'], self.evacuated())

    def test_no_evacuation_if_lease_is_deleted(self):
        self.fail('one')
        self.lifecycle.lease_end.delete(self.lease_['id'])
        self.assertEqual([], self.evacuated())
