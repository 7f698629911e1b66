# SPDX-License-Identifier: Apache-2.0

"""Networks on reserved segments."""

import dataclasses
import types

import fixtures
from oslo_utils.fixture import uuidsentinel

from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import reassignment
from blazar_core.leases import transfer
from blazar_core.leases import views
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from blazar_nova.compat import network_api
from blazar_nova.listener import host_sync
from blazar_nova.resource_types import networks
from blazar_nova.resource_types import reservation_requests
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_nova import fake_network

NAME = 'virtual:network'
SERVER = network_api.Port('of a server', 'compute:nova', 'server')
ROUTER = network_api.Port('of a router', 'network:router_interface',
                          uuidsentinel.router)
SNAT = network_api.Port('of SNAT', 'network:router_centralized_snat',
                        uuidsentinel.router)
DHCP = network_api.Port('of dhcp', 'network:dhcp', 'dhcp1')
UNUSED = network_api.Port('unused', '', '')

load_tests = databases.load_tests


class NetworkTestCase(base.LeaseTestCase):
    """Two enrolled VLANs and a VXLAN."""

    def more_types(self):
        self.network = fake_network.FakeNetwork(self.clock)
        self.kind = networks.Networks()
        self.kind.network = self.network
        self.detached = []
        self.kind.detach = self.detach
        return {NAME: self.kind}

    def setUp(self):
        super().setUp()
        self.host('compute', VCPU=10)
        self.pools = host_sync.HostSync(
            self.database, self.clock, self.types)
        self.sync()
        self.engine = self.new_engine()

    def detach(self, server_id, port_id):
        """Have Nova detach a port: once, and it may fail."""
        if server_id != 'server' or port_id in self.detached:
            return False
        self.detached.append(port_id)
        return True

    def sync(self, times=1):
        for _time in range(times):
            self.pools.compare_pools(lambda _what, work, *args: work(*args))

    def overbooking_check(self):
        overbooking.OverbookingCheck(
            self.db.connect(), self.clock, self.admission,
            reassignment.Reassignment(self.database, self.clock, self.types),
            self.new_demands(), lambda event, lease: None,
            self.start_timeout).look()

    def wanted(self, **values):
        asking = reservation_requests.ReservationRequest(
            types.SimpleNamespace(project_id='project', user_id='user',
                                  is_admin=False),
            lambda: (), self.types, lambda _projects: None)
        return asking.new_reservation({'resource_type': NAME, **values})

    def run_for(self, seconds):
        self.clock.advance(seconds)
        for _time in range(3):
            driven.run_due(self.engine)
            self.clock.advance(1)

    def started(self, **values):
        start = self.clock.now() - base.NOW
        lease = self.reserve(start, start + 1000, self.wanted(**values))
        driven.run_due(self.engine)
        return lease

    def reserved(self, lease):
        with self.database.reader() as session:
            (_kind, reserved), = self.types.reserved(
                session, api.found(session, lease['id']))
        return reserved

    def only(self):
        """Return the only network."""
        one, = self.network.made.values()
        return one


class TestQuota(NetworkTestCase):

    def test_networks_without_lease_count_and_those_of_leases_do_not(self):
        self.network.limits['network'] = 5
        self.started()
        # Another one is created, and a process dies before tagging it.
        for number, values in ((70, {'leased': False}), (80, {}), (
                90, {'leased': False, 'project_id': 'other'})):
            made = self.network.create_network(network_api.Segment(
                'vxlan', None, number), f'name{number}', 'project')
            self.network.made[made] = self.network.made[made]._replace(
                **values)
        self.assertEqual(
            ({'network': cloud_api.Headroom(5, 3, 2)},
             {'network': cloud_api.Headroom(5, 0)}),
            (self.kind.headroom('project'), self.kind.headroom('third')))
        self.network.limits.clear()
        self.assertEqual({}, self.kind.headroom('project'))


class TestLifecycle(NetworkTestCase):

    def test_network_exists_from_start_to_end(self):
        lease = self.reserve(50, 100, self.wanted(network_type='vxlan'))
        self.run_for(50)
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual(
            (reservation_id, 'project',
             network_api.Segment('vxlan', None, 7), {reservation_id}),
            (self.only().name, self.only().project_id, self.only().segment,
             self.only().reservations))
        self.assertEqual({reservation_id: {'project'}},
                         self.kind.open_reservations())
        self.run_for(100)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_networks_are_limited_by_enrolled_segments(self):
        wanted = [self.wanted(physical_network='physnet1')] * 3
        refused = self.assertRaises(
            errors.Refused, self.reserve, 0, 100, *wanted)
        self.assertIsNone(refused.refusal.next_start)
        self.reserve(0, 100, *wanted[:2])
        refused = self.assertRaises(
            errors.Refused, self.reserve, 50, 150, wanted[0])
        self.assertEqual(base.NOW + 100, refused.refusal.next_start)
        self.reserve(50, 150, self.wanted())

    def test_deleted_segment_range_has_no_capacity(self):
        self.clock.advance(1)
        self.network.ranges = self.network.ranges[:1]
        self.sync(2)
        self.reserve(1, 100, self.wanted())
        self.assertRaises(errors.Refused, self.reserve, 1, 2, self.wanted())

    def test_invalid_parameters_are_refused_with_message(self):
        for wrong, part in (({'amount': 2}, '"amount" is 2'),
                            ({'network_type': 7}, '"network_type"'),
                            ({'vlan': 7}, '"vlan" is not known')):
            self.assertIn(part, str(self.assertRaises(
                errors.InvalidLeaseParams, self.wanted, **wrong)))


class TestEnd(NetworkTestCase):

    def test_ports_and_network_are_deleted_despite_crashes(self):
        lease = self.started()
        self.network.of_network[self.only().id] = [DHCP, ROUTER, UNUSED]
        for method in ('delete ports', 'remove_router_interface',
                       'delete networks'):
            self.network.dies_after[method] = RuntimeError('killed')
        self.run_for(1000)
        for _time in range(4):
            self.run_for(300)
        self.assertEqual(({}, 'TERMINATED', {}), (
            self.network.dies_after, self.status(lease), self.network.made))

    def test_network_created_after_end_is_deleted(self):
        """Its lease is deleted, and the answer is lost, at that moment."""
        lease, create = self.reserve(50, 1000, self.wanted()), (
            self.network.create_network)

        def late(*args):
            self.lifecycle.lease_end.delete(lease['id'])
            create(*args)
            raise errors.CloudUnavailable('The answer is lost.')

        self.useFixture(fixtures.MockPatchObject(
            self.network, 'create_network', late))
        self.run_for(60)
        self.run_for(60)
        self.assertEqual({}, self.network.made)

    def test_ports_that_prevent_deletion_are_reported(self):
        lease = self.started()
        self.network.of_network[self.only().id] = [SERVER, ROUTER, UNUSED]
        self.run_for(1000)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertIn('has 1 port in use: delete the servers, or detach port '
                      'of a server', self.reason(lease))
        # The rest was not changed, but the network is disabled.
        self.assertEqual(3, len(self.network.ports(self.only().id)))
        self.assertEqual({self.only().id}, self.network.disabled)
        self.network.of_network[self.only().id].remove(SERVER)
        for _time in range(2):
            self.run_for(300)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def held(self, *ports):
        """Lease a network, and hold it by ports; return the lease."""
        lease = self.started()
        self.network.of_network[self.only().id] = [*ports]
        self.run_for(1000)
        self.assertEqual('TERMINATING', self.status(lease))
        self.assertIn(self.only().id, self.network.disabled)
        return lease

    def check_taken(self, *ports):
        """Check that ports keep a network for ten minutes, and set DOWN."""
        lease = self.held(*ports)
        self.network.disabled.clear()
        self.run_for(300)
        self.assertEqual(('TERMINATING', {self.only().id}), (
            self.status(lease), self.network.disabled))
        for _time in range(4):
            self.run_for(300)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_a_port_of_no_server_does_not_keep_it(self):
        for port in (('', 'x'), ('compute:nova', 'x'), ('network:dhcp2', 'x'),
                     ('network:router_interface', 'x'),
                     ('network:router_interface', '../routers/x')):
            self.check_taken(network_api.Port('forged', *port))
        self.assertEqual([], self.detached)

    def test_forged_router_port_does_not_keep_network(self):
        for owner in ('network:router_interface', SNAT.device_owner,
                      'network:router_gateway', 'network:floatingip'):
            self.network.forged = {'forged'}
            self.check_taken(network_api.Port(
                'forged', owner, uuidsentinel.router))

    def test_server_does_not_keep_network(self):
        self.check_taken(SERVER, UNUSED)
        self.assertEqual([SERVER.id], self.detached)

    def test_needed_router_interface_does_not_keep_network(self):
        self.network.broken['remove_router_interface'] = (
            errors.CloudRefusal('Neutron refuses: routes need it.'))
        self.check_taken(ROUTER)

    def test_trunk_does_not_keep_network(self):
        self.network.trunks = {UNUSED.id}
        other = network_api.Port('other', '', '')
        lease = self.held(UNUSED, other, ROUTER)
        self.assertIn('in a trunk', self.reason(lease))
        # It does not keep the others.
        self.assertEqual([UNUSED], self.network.ports(self.only().id))
        for _time in range(4):
            self.run_for(300)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_ports_that_neutron_deletes_do_not_keep_it(self):
        lease = self.started()
        self.network.of_network[self.only().id] = [ROUTER, SNAT, DHCP]
        self.network.follow[ROUTER.id] = SNAT.id
        self.run_for(1000)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_network_left_open_is_taken_apart_at_once(self):
        lease = self.started()
        made = self.only()
        self.run_for(1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.network.made[made.id] = made
        self.network.of_network[made.id] = [
            network_api.Port('forged', '', 'x')]
        self.lifecycle.lease_close.close_left()
        self.assertEqual({}, self.network.made)

    def with_server(self, **request):
        """Lease a network and a server; return the lease and the server."""
        lease = self.reserve(
            0, 100, self.wanted(), self.places(),
            request=self.request(0, 100, **request))
        driven.run_due(self.engine)
        server_id, = self.take_slots(lease, number=1)
        self.cloud.servers[server_id] = cloud_api.ObservedServer(
            cloud_api.ServerState.RUNNING, self.uuid_of('compute'))
        self.lifecycle.reconciliation.check(server_id)
        return lease, server_id

    def test_network_ends_with_server_that_is_already_deleted(self):
        lease, server_id = self.with_server()
        del self.cloud.servers[server_id]
        self.clock.advance(100)
        driven.run_due(self.engine)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_servers_of_lease_are_deleted_before_network(self):
        lease, server_id = self.with_server(grace_period=50)
        self.network.of_network[self.only().id] = [SERVER]
        self.run_for(100)
        self.assertEqual(('TERMINATING', set()), (
            self.status(lease), self.network.disabled))
        self.cloud.stubborn.add(server_id)
        self.run_for(60)
        self.assertEqual([server_id], self.cloud.deleted)
        self.assertEqual(set(), self.network.disabled)
        self.network.of_network.clear()
        del self.cloud.servers[server_id]
        self.lifecycle.reconciliation.check(server_id)
        self.run_for(300)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_network_with_changed_tags_is_deleted(self):
        for tags in ((), ('another',)):
            lease = self.reserve(
                self.clock.now() - base.NOW, self.clock.now() - base.NOW + 100,
                self.wanted())
            driven.run_due(self.engine)
            made = self.only()
            self.network.made[made.id] = made._replace(
                reservations=frozenset(tags))
            self.run_for(100)
            self.assertEqual(('TERMINATED', {}), (
                self.status(lease), self.network.made))

    def test_lease_ends_after_owner_deleted_its_network(self):
        lease = self.started()
        self.network.made.clear()
        self.run_for(1000)
        self.assertEqual('TERMINATED', self.status(lease))

    def test_delayed_end_keeps_networks_of_next_lease(self):
        first = self.reserve(0, 100, self.wanted())
        driven.run_due(self.engine)
        reserved = self.reserved(first)
        second = self.reserve(100, 1000, *[self.wanted()] * 3)
        self.run_for(100)
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(second))
        self.kind.end(reserved)
        self.assertEqual(3, len(self.network.made))


class TestWrongAnswers(NetworkTestCase):
    """Neutron reports too few segments."""

    def setUp(self):
        super().setUp()
        self.lease = self.started()
        self.before = self.only()

    def answer(self, ranges, syncs):
        """Let neutron report segments, and do all that follows from it."""
        self.network.ranges = ranges
        self.clock.advance(5)
        self.sync(syncs)
        self.overbooking_check()
        self.run_for(5)

    def others(self):
        """Return the segments without that of the network."""
        return [one for one in self.network.ranges
                if one != self.before.segment]

    def test_one_answer_takes_no_segment(self):
        ranges = self.network.ranges
        for number, wrong in enumerate(([], self.others()), 1):
            self.answer(wrong, 1)
            self.assertEqual(({self.before.id: self.before}, set()), (
                self.network.made, self.network.disabled))
            self.reserve(5000 * number, 5000 * number + 100,
                         *[self.wanted()] * 3)
            self.answer(ranges, 1)

    def test_the_same_answer_again_takes_a_segment(self):
        self.answer(self.others(), 2)
        self.assertNotEqual(self.before.segment, self.only().segment)

    def test_network_without_replacement_is_kept(self):
        ranges = self.network.ranges
        self.network.of_network[self.before.id] = [ROUTER]
        self.answer([], 3)
        self.assertEqual(({self.before.id: self.before}, set(), [ROUTER]), (
            self.network.made, self.network.disabled,
            self.network.ports(self.before.id)))
        self.answer(ranges, 1)
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(self.lease))
        self.assertEqual('project', self.only().project_id)

    def test_network_in_use_stays_up_after_its_replacement_is_created(self):
        self.network.of_network[self.before.id] = [SERVER]
        self.answer(self.others(), 2)
        self.assertEqual((2, set()), (
            len(self.network.made), self.network.disabled))
        self.assertIn('has 1 port in use', self.reason(self.lease))
        self.network.of_network.clear()
        self.run_for(300)
        self.assertNotEqual(self.before, self.only())

    def test_network_is_set_up_again_after_failed_transfer(self):
        reserved = self.reserved(self.lease)
        self.network.of_network[self.before.id] = [SERVER]
        self.assertRaises(
            errors.CloudUnavailable, self.kind.transferred,
            dataclasses.replace(reserved, project_id='other',
                                former=frozenset(['project'])))
        self.assertEqual({self.before.id}, self.network.disabled)
        self.kind.transferred(reserved)
        self.assertEqual(set(), self.network.disabled)


class TestPool(NetworkTestCase):

    def test_only_changed_segments_are_written(self):
        with fixtures.MockPatchObject(
                inventory, 'record_host',
                wraps=inventory.record_host) as patched:
            self.sync()
            self.assertEqual([], patched.mock.mock_calls)
            self.network.ranges.append(
                network_api.Segment('vlan', 'physnet1', 302))
            self.sync()
        self.assertEqual(1, patched.mock.call_count)

    def test_sync_ends_early_when_it_is_not_to_go_on(self):
        self.network.ranges = [network_api.Segment('vlan', 'physnet2', number)
                               for number in range(10)]
        asked = []
        self.pools.compare_pools(
            lambda _what, work, *args: work(*args),
            lambda: asked.append(1) or len(asked) <= 5)
        self.assertEqual(3, len(self.scalars(
            models.Host, models.Host.name.like('vlan:physnet2:%'))))


class TestFailures(NetworkTestCase):

    def test_network_is_created_once_despite_crash(self):
        for method in ('create_network', 'tag networks'):
            self.network.dies_after[method] = RuntimeError('killed')
        lease = self.started()
        self.run_for(60)
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(lease))
        self.assertEqual({lease['reservations'][0]['id']},
                         self.only().reservations)

    def test_segment_in_use_by_another_project_is_reported(self):
        self.clock.advance(1)
        self.network.ranges = self.network.ranges[:1]
        self.sync(2)
        theirs = self.network.create_network(
            self.network.ranges[0], 'theirs', 'other')
        lease = self.reserve(1, 1000, self.wanted())
        driven.run_due(self.engine)
        self.assertEqual('STARTING', self.status(lease))
        self.assertIn('Segment vlan:physnet1:300 is used by another project',
                      self.reason(lease))
        self.network.delete('networks', theirs)
        self.run_for(60)
        self.assertEqual('ACTIVE', self.status(lease))

    def test_network_of_another_project_is_kept_at_end(self):
        lease = self.started()
        segment = self.only().segment
        self.network.made.clear()
        self.network.create_network(segment, 'theirs', 'other')
        self.run_for(1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual('theirs', self.only().name)

    def test_tagged_network_of_another_project_does_not_block_end(self):
        lease = self.started()
        made = self.network.create_network(
            network_api.Segment('vxlan', None, 9), 'theirs', 'other')
        self.network.tag(
            'networks', made, lease['reservations'][0]['id'])
        self.network.of_network[made] = [SERVER]
        self.run_for(1000)
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual('theirs', self.only().name)

    def test_network_without_lease_is_deleted_by_its_tag(self):
        self.started()
        (its_id,) = self.kind.open_reservations()
        self.kind.end(resource_types.unknown(its_id))
        self.assertEqual({}, self.network.made)

    def ended(self, *reservations):
        """Return the id of a reservation of a lease that is over."""
        lease = self.reserve(0, 10, *reservations)
        driven.run_due(self.engine)
        self.run_for(10)
        self.assertEqual('TERMINATED', self.status(lease))
        return lease['reservations'][0]['id']

    def left_open(self):
        return [reserved.id for _kind, reserved in
                self.lifecycle.lease_close.left_open()]

    def tagged(self, project_id, reservation_id):
        """Create a network that no lease has, and tag it."""
        made = self.network.create_network(network_api.Segment(
            'vxlan', None, 1000 + len(self.network.made)), '', project_id)
        self.network.made[made] = self.network.made[made]._replace(
            leased=False, reservations=frozenset([reservation_id]))
        return made

    def test_a_tag_counts_for_networks_of_its_project(self):
        its_id = self.ended(self.wanted())
        self.tagged('other', its_id)
        self.assertEqual([], self.left_open())
        self.tagged('project', its_id)
        self.assertEqual([its_id], self.left_open())
        self.lifecycle.lease_close.close_left()
        one, = self.network.made.values()
        self.assertEqual('other', one.project_id)

    def test_a_tag_does_not_name_what_is_no_network(self):
        self.tagged('project', self.ended(self.places()))
        log = self.useFixture(fixtures.FakeLogger())
        self.lifecycle.lease_close.close_left()
        self.assertNotIn('can still be used', log.output)
        self.assertEqual([], self.left_open())

    def test_a_type_that_fails_keeps_no_other_open(self):
        self.tagged('project', self.ended(self.wanted()))
        for name, kind in self.types.named.items():
            if name != NAME:
                self.useFixture(fixtures.MockPatchObject(
                    kind, 'open_reservations', side_effect=RuntimeError))
        self.lifecycle.lease_close.close_left()
        self.assertEqual({}, self.network.made)

    def test_untagged_network_belongs_to_the_next_lease(self):
        first = self.started()
        reserved = self.reserved(first)
        self.run_for(1000)
        self.assertEqual('TERMINATED', self.status(first))
        self.network.create_network(
            network_api.Segment('vlan', 'physnet1', 300), 'next', 'project')
        self.kind.end(reserved)
        self.assertEqual('next', self.only().name)

    def test_transfer_moves_network_without_marks(self):
        """Its project has removed tags, name and description."""
        lease = self.started()
        made = self.only()
        self.network.made[made.id] = made._replace(
            reservations=frozenset(), name='mine', leased=False)
        self.clock.advance(1)
        own = self.leases.transfer
        own.transfer(lease['id'], own.look(lease['id']).generation,
                     transfer.Owner('other', 'user'), None, False)
        self.run_for(0)
        self.assertEqual('other', self.only().project_id)
        self.run_for(1000)
        self.assertEqual(('TERMINATED', {}), (
            self.status(lease), self.network.made))

    def test_transfer_moves_unused_network_to_new_project(self):
        lease = self.started()
        reserved = dataclasses.replace(
            self.reserved(lease), project_id='other')
        self.network.of_network[self.only().id] = [SERVER]
        self.assertRaises(
            errors.CloudUnavailable, self.kind.transferred, reserved)
        self.network.of_network.clear()
        self.kind.transferred(reserved)
        self.assertEqual('other', self.only().project_id)
        self.assertEqual('ACTIVE', views.get(
            self.database, lease['id'])['status'])
