# SPDX-License-Identifier: Apache-2.0

"""Whole hosts: enrolled, reserved, used by their lease, and freed."""

import json
import os
import pydoc
import stat
import typing as ty

import fixtures
from nova.compute import api as compute_api
from nova import context as nova_context
from nova import objects
from nova.scheduler.client import report
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import timeutils
from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_traits
from blazar_nova.compat import providers
from blazar_nova.verify import verification
from tests.functional import nova_box
from tests.functional import whole_hosts_base

HOUR = 3600


class TestLife(whole_hosts_base.HostsTestCase):

    def test_lease_of_host_from_start_to_end(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts()
        self.assertEqual(
            (1, 1, 'active'), tuple(lease['reservations'][0][key] for key in (
                'min', 'max', 'status')))
        mine, = self.aggregates()[reservation_id]
        other, = {'host1', 'host2'} - {mine}
        self.assertEqual([other], self.aggregates()['freepool'])
        self.assertEqual({'CUSTOM_BLAZAR_POOL', self.trait_of(reservation_id)},
                         self.traits(mine))
        aggregate = objects.Aggregate.get_by_uuid(
            nova_context.get_admin_context(), reservation_id)
        self.assertEqual({
            'availability_zone': f'blazar_{reservation_id}',
            'blazar:owner': nova_box.PROJECT_ID,
            'reservation': reservation_id}, aggregate.metadata)
        servers = [self.within(f'in{number}', reservation_id)
                   for number in range(4)]
        for server in servers:
            self.wait_for_status(server['id'], 'ACTIVE')
            self.assertEqual(mine, self.host_of(server))
        self.listener.server_sync.compare_all()
        self.assertEqual([], self.query(
            f"SELECT usage FROM hosts WHERE name = '{mine}' "
            "AND usage != '{}'"))
        # It is full: its own servers do not get other hosts either.
        self.fails(self.within('too many', reservation_id))
        self.run_until(clocks.SystemClock().now() + 2 * HOUR)
        for server in servers:
            self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 300)
        lease = self.get(lease)
        self.assertEqual('TERMINATED', lease['status'])
        self.assertEqual(
            {'freepool': ['host1', 'host2'],
             'blazar_pool': ['host1', 'host2']}, self.aggregates())
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits(mine))
        self.assertEqual([], compute_hosts.ask_placement(
            f'/traits?name=in:{self.trait_of(reservation_id)}')['traits'])
        self.listener.server_sync.compare_all()
        self.assertEqual([(None,)] * 3, self.query(
            'SELECT assigned_to FROM hosts'))

    def test_lease_of_host_has_no_server_group(self):
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        self.assertEqual(404, self.alice.api_request(
            f'/os-server-groups/{reservation_id}', method='DELETE',
        ).status_code)

    def test_deletion_of_lease_deletes_hosted_servers(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.delete(lease['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 300)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
        self.assertNotIn(reservation_id, self.aggregates())

    def test_other_servers_cannot_use_leased_hosts(self):
        """By each way that a user or an admin has."""
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        for number in range(2):
            self.boot_active(f'big{number}', flavor='4')
        for number, hint in enumerate((
                reservation_id, uuids.none, [reservation_id] * 2, {'a': 1},
                7, 'x' * 300, '\u0000')):
            message = self.refused(
                400, self.within, f'forged{number}', hint, client=self.bob)
            self.assertIn('reservation', message)
        # This did not count as a use of the lease.
        self.assertEqual([(None,)], self.query('SELECT used_at FROM leases'))
        for name, kwargs in (
                ('plain', {}), ('zone', {
                    'availability_zone': f'blazar_{reservation_id}'})):
            for client in (self.alice, self.bob, self.admin):
                self.fails(self.boot(name, flavor='4', client=client,
                                     **kwargs))
        self.fails(self.boot('forced', client=self.admin,
                             availability_zone='nova:host1'))
        self.fails(self.boot('forced', client=self.admin, host='host1'))

    def test_boots_succeed_with_few_allocation_candidates(self):
        """More hosts are enrolled than placement returns candidates."""
        self.flags(group='scheduler', max_placement_results=1)
        self.enrol('host1', 'host2')
        for number in range(2):
            self.assertEqual('plain', self.host_of(
                self.boot_active(f'plain{number}')))
        for number in range(2):
            _lease, reservation_id = self.lease_hosts()
            server = self.within(f'in{number}', reservation_id)
            self.wait_for_status(server['id'], 'ACTIVE')
            self.assertEqual(self.aggregates()[reservation_id],
                             [self.host_of(server)])

    def test_owner_shares_hosts_with_other_projects(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        self.refused(400, self.within, 'early', reservation_id,
                     client=self.bob)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': reservation_id, 'projects': [uuids.other]}]}, code=200)
        server = self.within('hosted', reservation_id, client=self.bob)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(server))
        self.assertNotEqual(
            [(None,)], self.query('SELECT used_at FROM leases'))
        for shown in (self.get(lease), self.ask('GET', '/leases')['leases'][0],
                      self.ask('PUT', f'/leases/{lease["id"]}',
                               self.get(lease), code=200)['lease']):
            (reservation,) = shown['reservations']
            self.assertEqual([server['id']], reservation['servers'])
            self.assertEqual(
                [{'name': 'host1', 'failed': False,
                  'servers': [server['id']]}], reservation['hosts'])
        answer = self.ask('DELETE', f'/leases/{lease["id"]}', code=409)
        self.assertIn('1 server of 1 other project', answer['error_message'])
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': reservation_id, 'projects': []}]}, code=200)
        self.refused(400, self.within, 'late', reservation_id,
                     client=self.bob)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=409)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204, force='true')

    def test_lease_of_busy_host_for_later_shows_no_servers(self):
        """They are of the lease that has the host now."""
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        later = self.make(start_in=5 * HOUR, length=HOUR,
                          reservations=[self.hosts_wanted()])
        server = self.within('hosted', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        for found in ([self.get(lease), self.get(later)],
                      self.ask('GET', '/leases', code=200)['leases']):
            self.assertEqual(
                {lease['id']: [server['id']], later['id']: []}, {
                    one['id']: one['reservations'][0]['servers']
                    for one in found})
            self.assertEqual(
                {lease['id']: [[server['id']]], later['id']: [[]]}, {
                    one['id']: [host['servers'] for host in
                                one['reservations'][0]['hosts']]
                    for one in found})

    def test_shelved_server_of_former_sharer_is_ordinary_after_lease(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts(projects=[uuids.other])
        server_id = self.within('hosted', reservation_id,
                                client=self.bob)['id']
        self.wait_for_status(server_id, 'ACTIVE')
        self.bob.post_server_action(server_id, {'shelve': None})
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': reservation_id, 'projects': []}]}, code=200)
        self.delete(lease['id'])
        self.wait_until_over(lease['id'])
        self.run_sync()
        self.bob.post_server_action(server_id, {'unshelve': None})
        self.wait_for_status(server_id, 'ACTIVE')

    def test_reservation_hint_is_refused_before_start_and_after_end(self):
        self.enrol('host1')
        lease = self.make(start_in=HOUR, reservations=[self.hosts_wanted()])
        reservation_id = lease['reservations'][0]['id']
        message = self.refused(400, self.within, 'early', reservation_id)
        self.assertIn('which is PENDING', message)
        for wanted in lease['id'], lease['name']:
            self.assertIn(
                f'of hosts: {reservation_id}.',
                self.refused(400, self.within, 'early', wanted))
            self.assertIn('none was found', self.refused(
                400, self.within, 'early', wanted, client=self.bob))
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.refused(400, self.within, 'late', reservation_id)


class TestLeasesWithin(whole_hosts_base.HostsTestCase):
    """Servers on leased hosts that also have a lease of their own."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')

    def within_later(self, reservation_id, start_in, length, code=None):
        """Boot a hosted server with a lease that starts later."""
        hints = {'reservation': reservation_id, 'reserved': True,
                 'lease_params': json.dumps({
                     'name': 'inner', 'start': self.at(start_in),
                     'end': self.at(start_in + length)})}
        if code is not None:
            return self.refused(code, self.boot, 'in', hints=hints)
        return self.boot('in', hints=hints)

    def verified(self):
        report = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(False)
        return [one.text for one in report.left], report.failures

    def test_deferred_build_on_leased_host_starts_on_time(self):
        lease, reservation_id = self.lease_hosts(1, 1, start_in=None)
        mine, = self.aggregates()[reservation_id]
        server = self.within_later(reservation_id, HOUR // 4, HOUR // 4)
        self.wait_for_status(server['id'], 'RESERVED')
        # It does not reduce the capacity for servers that are there.
        others = [self.within(f'now{number}', reservation_id)
                  for number in range(3)]
        for other in others:
            self.wait_for_status(other['id'], 'ACTIVE')
        self.run_until(clocks.SystemClock().now() + HOUR // 4 + 60)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(mine, self.host_of(server))
        self.look()
        self.listener.server_sync.compare_all()
        self.assertEqual(([], []), self.verified())
        self.assertEqual([('{}',)], self.query(
            'SELECT resources FROM bookings WHERE server_id IS NOT NULL'))
        # It has an end of its own.
        self.run_until(clocks.SystemClock().now() + HOUR // 2 + 60)
        self.wait_until_gone(server['id'])
        for other in others:
            self.assertEqual('ACTIVE', self.alice.get_server(
                other['id'])['status'])
        self.assertEqual('ACTIVE', self.get(lease)['status'])

    def test_deferred_build_may_use_hosts_of_pending_lease(self):
        lease = self.make(start_in=HOUR, reservations=[self.hosts_wanted()])
        reservation_id = lease['reservations'][0]['id']
        server = self.within_later(reservation_id, HOUR, HOUR // 2)
        self.wait_for_status(server['id'], 'RESERVED')
        start = clocks.SystemClock().now() + HOUR + 60
        for _time in range(3):
            self.run_until(start)
            start += 60
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(self.aggregates()[reservation_id],
                         [self.host_of(server)])
        # The servers end with the lease of their hosts.
        self.delete(lease['id'])
        self.wait_until_gone(server['id'])
        self.look()
        self.run_until(self.clock.now() + 300)
        self.assertEqual([], self.ask('GET', '/leases')['leases'])

    def test_inner_lease_must_be_within_window_of_hosts(self):
        _lease, reservation_id = self.lease_hosts()
        message = self.within_later(
            reservation_id, HOUR // 2, HOUR, code=400)
        self.assertIn('choose a start and an end within that', message)
        later = self.make(start_in=3 * HOUR, reservations=[
            self.hosts_wanted()])['reservations'][0]['id']
        for start_in, length in ((2 * HOUR, HOUR // 2),
                                 (3 * HOUR, 2 * HOUR)):
            self.within_later(later, start_in, length, code=400)
        self.within_later(uuids.unknown, HOUR // 4, HOUR // 4, code=400)

    def test_inner_lease_waits_if_hosts_are_no_longer_leased(self):
        lease, reservation_id = self.lease_hosts()
        server = self.within_later(reservation_id, HOUR // 4, HOUR // 4)
        self.delete(lease['id'])
        self.assertNotIn(reservation_id, self.aggregates())
        self.run_until(clocks.SystemClock().now() + HOUR // 4 + 60)
        self.wait_for_status(server['id'], 'RESERVED')
        inner, = self.ask('GET', '/leases')['leases']
        self.assertEqual('PENDING', inner['status'])
        self.assertIn(f'Your project cannot use reservation {reservation_id}',
                      inner['status_reason'])
        self.run_until(clocks.SystemClock().now() + HOUR)
        self.wait_until_gone(server['id'])

    def test_inner_lease_on_hosts_of_other_project_is_refused(self):
        """A lease of one's own gives no access to the hosts of others."""
        other = self.make(client=self.bob, reservations=[
            self.hosts_wanted()])['reservations'][0]['id']
        self.run_until(clocks.SystemClock().now())
        self.within_later(other, HOUR // 4, HOUR // 4, code=400)


class TestParts(whole_hosts_base.PartsTestCase):

    def test_server_of_both_kinds_of_reservation_uses_leased_host(self):
        """With the flavor of one, and the hint of the other."""
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        flavor = self.get(self.make_active(reservations=[self.reservation(
            amount=1, vcpus=2)]))['reservations'][0]['flavor_id']
        server = self.within('both', reservation_id, flavor=flavor)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(server))

    def test_slots_prefer_common_hosts_over_enrolled_ones(self):
        """Each server is placed on the host of its slot."""
        self.enrol('host1', 'host2')
        lease = self.get(self.make_active(
            reservations=[self.reservation(amount=3, vcpus=2)]))
        flavor = lease['reservations'][0]['flavor_id']
        message = self.refused(
            409, self.boot, 'three', flavor=flavor, count=3)
        self.assertIn('boot at most 2 at once', message)
        self.boot('two', flavor=flavor, count=2)
        self.boot('one', flavor=flavor)
        servers = self.alice.get_servers(detail=False)
        for server in servers:
            self.wait_for_status(server['id'], 'ACTIVE')
        hosts = sorted(map(self.host_of, servers))
        self.assertEqual(['plain', 'plain'], hosts[1:])
        self.assertIn(hosts[0], ('host1', 'host2'))
        self.refused(409, self.boot, 'one more', flavor=flavor)
        self.fails(self.boot('outsider'))
        # The host is partly in use, until the lease ends.
        answer = self.make(code=409, reservations=[self.hosts_wanted(2, 2)])
        self.assertIn('1 of 2', answer['error_message'])
        _lease, reservation_id = self.lease_hosts()
        self.assertNotEqual([hosts[0]], self.aggregates()[reservation_id])
        self.listener.server_sync.compare_all()
        report = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(False)
        self.assertEqual(([], [], []), (
            report.left, report.problems, report.failures))
        self.delete(lease['id'])
        for server in servers:
            self.wait_until_gone(server['id'])
        self.look()
        self.lease_hosts()

    def test_slots_honour_properties_of_enrolled_hosts(self):
        self.enrol('host1', rack='7')
        answer = self.make(code=409, reservations=[self.parts_wanted(3)])
        self.assertIn('2 of 3', answer['error_message'])
        lease = self.get(self.make_active(
            reservations=[self.parts_wanted(2, affinity=True)]))
        server = self.boot('in', flavor=lease['reservations'][0]['flavor_id'])
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(server))

    def test_enrolled_host_with_bookings_cannot_be_removed(self):
        host, = self.enrol('host1', rack='7')
        self.make_active(reservations=[self.parts_wanted(1)])
        exc = self.assertRaises(
            errors.Conflict, self.enrolling.remove, int(host['id']))
        self.assertIn('1 booking of leases', str(exc))


class TestAsking(whole_hosts_base.HostsTestCase):

    def setUp(self):
        super().setUp()
        self.enrol('host1', gpu='A100')
        self.enrol('host2')

    def test_properties_select_hosts(self):
        _lease, reservation_id = self.lease_hosts(
            1, 2, resource_properties=json.dumps([
                'and', ['==', '$gpu', 'A100'],
                ['=', '$capabilities:gpu', '<in> A1']]),
            hypervisor_properties=json.dumps(['>=', '$vcpus', '4']))
        self.assertEqual(['host1'], self.aggregates()[reservation_id])
        for key in ('hypervisor_properties', 'resource_properties'):
            error = self.make(reservations=[self.hosts_wanted(
                **{key: json.dumps(['==', '$secret', '1'])})], code=400)
            self.assertIn('$secret', error['error_message'])

    def test_unknown_requirements_are_refused(self):
        self.flags(group='placement', region_name='RegionOne')
        for params, part in (
                ({'availability_zone': 'nowhere'}, 'no availability_zone'),
                ({'aggregate': 'nothing'}, 'no aggregate'),
                ({'traits': ['CUSTOM_NONE']}, 'no trait CUSTOM_NONE'),
                ({'traits': ['a b']}, 'no trait a b'),
                ({'traits': [1]}, '"traits" must be a text'),
                ({'region': ''}, '"region" must be a text'),
                ({'region': 'RegionTwo'}, 'The hosts of region RegionTwo '
                 'are not here: it is RegionOne'),
                ({'min': 3, 'max': 2}, '"max" must be at least "min"'),
                ({'min': 0}, '"min" is 0'), ({'max': None}, 'Missing'),
                ({'before_end': 'other'}, '"before_end" must be one of'),
                ({'before_end': 'snapshot'}, 'Add "before_end_date"'),
                ({'vcpus': 1}, '"vcpus" cannot be reserved as physical:host'),
                ({'cpus': 1}, 'The key "cpus" is not known')):
            error = self.make(
                reservations=[self.hosts_wanted(**params)], code=400)
            self.assertIn(part, error['error_message'])
        self.assertEqual([], self.leases())

    def test_zone_aggregate_and_traits_select_hosts(self):
        context = nova_context.get_admin_context()
        zone = objects.Aggregate(
            context, name='rack7', metadata={'availability_zone': 'az1'})
        zone.create()
        api = compute_api.AggregateAPI()
        api.add_host_to_aggregate(context, zone.id, 'host2')
        host_traits.make('CUSTOM_RACK')
        for uuid in (one.uuid for one in compute_hosts.all_hosts()[0]):
            providers.change(uuid, 'traits', ['CUSTOM_RACK'])
        for params, expected in (
                ({'availability_zone': 'az1'}, 'host2'),
                ({'availability_zone': 'nova'}, 'host1'),
                ({'aggregate': 'rack7'}, 'host2'),
                ({'aggregate': 'rack7', 'traits': ['CUSTOM_RACK']},
                 'host2')):
            lease, reservation_id = self.lease_hosts(1, 2, **params)
            aggregate = objects.Aggregate.get_by_uuid(
                context, reservation_id)
            self.assertEqual([expected], aggregate.hosts, params)
            # A host with a zone stays in it.
            self.assertEqual(expected == 'host1',
                             'availability_zone' in aggregate.metadata)
            self.delete(lease['id'])
            self.look()
        self.make(reservations=[self.hosts_wanted(
            availability_zone='nova', aggregate='rack7')], code=409)

    def test_refusals_do_not_disclose_other_reservations(self):
        _lease, rid = self.lease_hosts()
        for key, one, other in (
                ('aggregate', rid, uuids.none),
                ('availability_zone', f'blazar_{rid}', f'blazar_{uuids.none}'),
                ('traits', [self.trait_of(rid)], ['CUSTOM_BLAZAR_NONE'])):
            said = [self.make(client=self.bob, code=400, reservations=[
                self.hosts_wanted(**{key: value})])['error_message']
                for value in (one, other)]
            self.assertEqual(*(sentence.replace(str(
                value if isinstance(value, str) else value[0]), '')
                for sentence, value in zip(said, (one, other))))

    def test_sharing_does_not_add_hosts(self):
        lease, rid = self.lease_hosts(1, 1)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': rid, 'max': 2}]}, code=200)
        self.assertEqual(2, self.get(lease)['reservations'][0]['amount'])
        self.enrol('plain')
        for more in ({'projects': [uuids.other]}, {'max': 2}):
            self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
                {'id': rid, **more}]}, code=200)
            self.assertEqual(2, self.get(lease)['reservations'][0]['amount'])

    def test_traits_are_queried_once(self):
        asked = []
        real = compute_hosts.ask_placement
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.compute_hosts.ask_placement',
                lambda url: asked.append(url) or real(url)):
            self.make(code=400, reservations=[self.hosts_wanted(
                traits=['CUSTOM_NONE'] * 15 + ['CUSTOM_OTHER'])])
            self.make(code=400, reservations=[self.hosts_wanted(
                traits=[f'CUSTOM_{number}' for number in range(21)])])
        self.assertEqual(
            ['/traits?name=in:CUSTOM_NONE,CUSTOM_OTHER'], asked)

    def test_refusal_answers_next_start(self):
        lease = self.make(
            start_in=HOUR, reservations=[self.hosts_wanted(2, 2)])
        error = self.make(length=2 * HOUR, reservations=[
            self.hosts_wanted(2, 2)], code=409)
        self.assertEqual(('NO_ROOM', 0), (
            error['error_name'], error['fits_now']))
        self.assertEqual(lease['end_date'], error['next_start'])


class TestMany(whole_hosts_base.HostsTestCase):
    """More hosts than are processed at a time; BLAZAR_HOSTS sets the number.

    They are rows in Nova and placement, without a nova-compute.
    """

    hosts: ty.ClassVar[dict[str, nova_box.Capacity]] = {}
    COUNT = int(os.environ.get('BLAZAR_HOSTS', '12'))
    TIMEOUT_SCALING_FACTOR = max(1, COUNT // 50)

    def add_hosts(self):
        context = nova_context.get_admin_context()
        mapping = self.cell_mappings['cell1']
        client = report.report_client_singleton()
        for number in range(self.COUNT):
            name, uuid = f'many{number}', uuidutils.generate_uuid()
            with nova_context.target_cell(context, mapping) as cell:
                objects.Service(
                    context=cell, host=name, binary='nova-compute',
                    topic='compute',
                    last_seen_up=timeutils.utcnow()).create()
                objects.ComputeNode(
                    context=cell, host=name, uuid=uuid,
                    hypervisor_hostname=name, hypervisor_type='fake',
                    hypervisor_version=1, vcpus=8, vcpus_used=0,
                    memory_mb=4096, memory_mb_used=0, local_gb=100,
                    local_gb_used=0, cpu_info='', numa_topology=None,
                    mapped=1).create()
            objects.HostMapping(context=context, cell_mapping=mapping,
                                host=name).create()
            client.post('/resource_providers', {'name': name, 'uuid': uuid},
                        version='1.20')
            client.put(f'/resource_providers/{uuid}/inventories', {
                'resource_provider_generation': 0, 'inventories': {
                    'VCPU': {'total': 8}, 'MEMORY_MB': {'total': 4096},
                    'DISK_GB': {'total': 100}}}, version='1.20')

    def test_number_of_requests_per_host_is_bounded(self):
        self.add_hosts()
        self.look()
        self.enrol(*(f'many{number}' for number in range(self.COUNT)))
        wanted = self.COUNT // 6
        lease = self.make(reservations=[
            self.hosts_wanted(wanted, wanted)])
        self.look()
        asked, told = [], []
        for name in ('get', 'put', 'post', 'delete'):
            self._counted('nova.scheduler.client.report.'
                          f'SchedulerReportClient.{name}', asked)
        self._counted('nova.scheduler.rpcapi.SchedulerAPI.update_aggregates',
                      told)
        self.run_until(clocks.SystemClock().now())
        lease = self.get(lease)
        self.assertEqual('ACTIVE', lease['status'])
        there = self.aggregates()
        self.assertEqual(wanted, len(there[lease['reservations'][0]['id']]))
        self.assertEqual(self.COUNT - wanted, len(there['freepool']))
        self.assertEqual(self.COUNT, len(there['blazar_pool']))
        # To read the traits and aggregates of a host, and to write them.
        self.assertLessEqual(len(asked), 4 * wanted + 5)
        # For the new aggregate, and once for its members.
        self.assertLessEqual(len(told), 3)

    def _counted(self, name, calls):
        real = pydoc.locate(name)
        self.useFixture(fixtures.MonkeyPatch(
            name, lambda *args, **kwargs: (
                calls.append(args), real(*args, **kwargs))[1]))


class TestReturning(whole_hosts_base.HostsTestCase):
    """A lease in use returns one of its hosts."""

    def put(self, lease, code=200, **values):
        return self.ask('PUT', f'/leases/{lease["id"]}', values, code=code)

    def test_returned_empty_host_is_free_after_cleaning(self):
        folder = self.useFixture(fixtures.TempDir()).path
        command = os.path.join(folder, 'clean')
        with open(command, 'w') as file:
            file.write(f'#!/bin/sh\necho "$1" >> {folder}/asked\n'
                       f'[ -e {folder}/clean-by-now ] || exit 75\n')
        os.chmod(command, stat.S_IRWXU)
        self.flags(group='blazar', cleaning_command=command)
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts(2, 2)
        smaller = {'id': reservation_id, 'min': 1, 'max': 1}
        server = self.within('one', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        mine = self.host_of(server)
        other, = {'host1', 'host2'} - {mine}
        refused = self.put(lease, 409, remove_hosts=[mine])
        self.assertIn(f'{mine}: it has 1 server', refused['error_message'])
        self.assertIn(server['id'], refused['error_message'])
        for hosts in ([mine, other], ['plain']):
            self.put(lease, 400, remove_hosts=hosts)
        self.put(lease, 400, remove_hosts=[other], reservations=[smaller])
        shown = self.put(lease, reservations=[smaller])['lease']
        self.assertEqual([mine], [
            host['name'] for host in shown['reservations'][0]['hosts']])
        self.run_until(clocks.SystemClock().now() + 60)
        # Neither its own servers nor others are placed there now.
        self.assertEqual([mine], self.aggregates()[reservation_id])
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits(other))
        self.assertEqual({other}, {*open(
            f'{folder}/asked').read().splitlines()})
        self.assert_verified()
        self.make(client=self.bob, code=409,
                  reservations=[self.hosts_wanted()])
        open(f'{folder}/clean-by-now', 'w').close()
        self.run_until(self.clock.now() + 120)
        self.assertEqual({mine: reservation_id, other: None}, dict(
            self.query("SELECT name, assigned_to FROM hosts "
                       "WHERE name LIKE 'host_'")))
        self.look()
        self.make(client=self.bob, reservations=[self.hosts_wanted()])
        self.wait_for_status(server['id'], 'ACTIVE')
        again = self.put(lease, 409, reservations=[
            {'id': reservation_id, 'min': 2, 'max': 2}])
        self.assertIn('fits_now: 1 of 2', again['error_message'])

    def test_named_host_is_returned(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts(2, 2)
        self.put(lease, remove_hosts=['host1'])
        self.run_until(clocks.SystemClock().now() + 60)
        self.assertEqual(['host2'], self.aggregates()[reservation_id])
        self.assertEqual((1, 1), tuple(
            self.get(lease)['reservations'][0][key] for key in ('min', 'max')))
        self.assert_verified()


class TestGrowing(whole_hosts_base.HostsTestCase):
    """More hosts, or others, where an operator has zones."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        self.context = nova_context.get_admin_context()
        rack = aggregates.make(self.context, name='rack', metadata={
            'availability_zone': 'az1'})
        aggregate_members.put(self.context, rack, ['host2'])
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == 'host2')
        providers.change(uuid, 'aggregates', [rack.uuid])

    def grow(self, lease, code=200, **values):
        return self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': lease['reservations'][0]['id'], **values}]}, code=code)

    def has(self, lease, *hosts):
        """Assert that a lease has these hosts only, recorded and in Nova."""
        self.run_until(clocks.SystemClock().now() + 60)
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual([*hosts], self.aggregates()[reservation_id])
        self.assertEqual([(one,) for one in hosts], self.query(
            f"SELECT name FROM hosts WHERE assigned_to = '{reservation_id}' "
            f"ORDER BY name"))
        self.assert_verified()

    def beside(self, zone):
        """Lease one host, while the other host has a zone from its lease."""
        other, _id = self.lease_hosts(availability_zone=zone)
        lease, reservation_id = self.lease_hosts()
        self.delete(other['id'])
        self.look()
        return lease, reservation_id

    def test_lease_does_not_grow_by_host_of_other_zone(self):
        """A host has one zone in Nova, which is fixed while it is in use."""
        lease, reservation_id = self.beside('az1')
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        refused = self.grow(lease, 409, min=2, max=2)
        self.assertIn('Only 1 of the 2 requested hosts',
                      refused['error_message'])
        # As many as there are: there are no others.
        self.assertEqual(1, self.grow(lease, max=2)[
            'lease']['reservations'][0]['amount'])
        self.has(lease, 'host1')
        self.enrol('plain')
        self.grow(lease, min=2, max=2)
        self.has(lease, 'host1', 'plain')

    def test_lease_without_own_zone_grows_by_any_host(self):
        lease, _reservation_id = self.beside('nova')
        self.grow(lease, min=2, max=2)
        self.has(lease, 'host1', 'host2')

    def test_zone_of_current_lease_does_not_affect_later_lease(self):
        """Its present zone is only that of its present lease."""
        lease, _id = self.lease_hosts(availability_zone='nova')
        self.has(lease, 'host1')
        self.make(start_in=48 * HOUR, reservations=[
            self.hosts_wanted(availability_zone='nova')])

    def test_pending_lease_gets_other_hosts_for_other_zone(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.hosts_wanted(availability_zone='nova')])
        for change, host in (({'availability_zone': 'az1'}, 'host2'),
                             ({'availability_zone': 'nova'}, 'host1'),
                             ({'availability_zone': 'az1'}, 'host2')):
            self.grow(lease, **change)
            self.assertEqual([(host,)], self.query(
                'SELECT name FROM hosts JOIN bookings '
                'ON bookings.host_id = hosts.id'))
        self.run_until(self.began + HOUR)
        self.has(lease, 'host2')
