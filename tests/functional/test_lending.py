# SPDX-License-Identifier: Apache-2.0

"""Idle enrolled hosts are lent to interruptible and bounded servers."""

import fixtures

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import leader_election
from blazar_nova.compat import power_services
from blazar_nova.listener import power
from blazar_nova.services import wiring
from tests import driven
from tests.functional import base
from tests.functional import test_power
from tests.functional import whole_hosts_base
from tests import machines

HOUR = 3600
#: The defaults of the notice and of the time of an eviction.
LEAD, EVICTION = 600, 300
YES = {'interruptible': 'True'}


class LendingTestCase(whole_hosts_base.HostsTestCase):
    """A host for all workloads that is full, and two that are lent."""

    more_conf = '[blazar]\nlend_enrolled_hosts = True\n'

    def setUp(self):
        super().setUp()
        self.told = self.record()
        self.enrol('host1', 'host2')

    def fill(self):
        """Fill the host that serves all workloads."""
        self.boot_active('full', flavor='4')
        self.run_sync()

    def lent(self, name='lent', flavor='1', **hints):
        """Boot an interruptible server; return its id, and its host."""
        server = self.boot_active(name, flavor=flavor, hints={**YES, **hints})
        self.run_sync()
        return server['id'], self.host_of(server)

    def until(self, instant):
        """Advance the clock, and carry out and plan evictions."""
        self.clock.advance(max(0, instant - self.clock.now()))
        self.listener.evictions.carry_out()
        self.listener.evictions.plan()

    def wait_for_error(self, server_id, action):
        """Wait until the last action of a server has found no host."""
        def is_error():
            last = self.admin.get_instance_actions(server_id)[0]
            return (last['action'], last['message']) == (action, 'Error')

        self.wait_for(is_error, what=f'{action} fails')

    def shown(self, server_id):
        return self.ask('GET', f'/interruptible/{server_id}',
                        code=200)['interruptible']

    def start_of(self, lease):
        return driven.parse_iso(self.get(lease)['start_date'])

    def reserve(self, start_in=2 * HOUR, hosts=2, **kwargs):
        """Reserve whole hosts, for later."""
        return self.make(start_in=start_in, reservations=[
            self.hosts_wanted(hosts, hosts)], **kwargs)


class InterruptibleTest(LendingTestCase):

    def test_interruptible_server_uses_lent_host_until_it_is_needed(self):
        _first, host = self.lent('first')
        self.assertEqual('plain', host)
        self.boot_active('rest', flavor='3')
        self.boot_active('last')
        self.fails(self.boot('ordinary'))
        server_id, host = self.lent(flavor='4')
        self.assertIn(host, ('host1', 'host2'))
        self.assertIsNone(self.shown(server_id)['safe_until'])
        lease = self.reserve()
        start = self.start_of(lease)
        self.assertEqual(clocks.iso(start - LEAD),
                         self.shown(server_id)['safe_until'])
        self.assert_verified()
        self.until(start - LEAD)
        self.told.wait('server.interruptible.evict_scheduled')
        self.until(start - EVICTION)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.until(start - 100)
        self.told.wait('server.interruptible.evicted')
        self.run_until(start)
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        reservation_id = lease['reservations'][0]['id']
        for number in range(2):
            mine = self.within(f'mine{number}', reservation_id, flavor='4')
            self.wait_for_status(mine['id'], 'ACTIVE')
        self.fails(self.boot('late', hints=YES))
        self.assert_verified()

    def test_locked_server_is_evicted_in_time(self):
        self.fill()
        server_id, host = self.lent()
        self.alice.post_server_action(server_id, {'lock': {}})
        lease = self.reserve()
        start = self.start_of(lease)
        self.until(start - LEAD)
        self.until(start - EVICTION)
        self.wait_for(lambda: self.until(self.clock.now() + 15) or (
            not self.is_on(server_id, host)), what='it leaves')
        self.run_sync()
        self.assertLess(self.clock.now(), start)
        self.run_until(start)
        self.assertEqual('ACTIVE', self.get(lease)['status'])

    def is_on(self, server_id, host):
        """Return whether a server is on a host."""
        return any(one['id'] == server_id and one[
            'OS-EXT-SRV-ATTR:host'] == host for one in self.admin.get_servers(
                search_opts={'all_tenants': 1}))

    def test_common_hosts_are_preferred_with_few_placement_results(self):
        self.flags(group='scheduler', max_placement_results=1)
        hosts = [self.lent(f'lent{number}', flavor='3')[1]
                 for number in range(6)]
        self.assertEqual(['plain'] * 2, hosts[:2])
        self.assertEqual({'host1': 2, 'host2': 2}, {
            one: hosts[2:].count(one) for one in hosts[2:]})
        self.fails(self.boot('too many', flavor='3', hints=YES))

    def test_server_on_lent_host_cannot_become_ordinary(self):
        self.fill()
        server_id, host = self.lent()
        said = self.ask('DELETE', f'/interruptible/{server_id}', code=409)
        self.assertIn('its host serves leases only', said['error_message'])
        self.assertTrue(self.shown(server_id)['placed'])

    def test_safe_for_selects_host_that_is_safe_long_enough(self):
        self.reserve(hosts=1)
        self.make(start_in=2 * HOUR, reservations=[self.reservation(vcpus=4)])
        _server_id, host = self.lent(safe_for='4h')
        self.assertIn(host, ('host1', 'host2'))
        self.assertIn('No host is safe for', self.refused(
            409, self.boot, 'too big', flavor='4',
            hints={**YES, 'safe_for': '4h'}))

    def test_removed_host_keeps_its_server(self):
        self.fill()
        server_id, host = self.lent()
        self.enrolling.remove(self.enrolling.id_of(host))
        self.run_sync()
        self.assertTrue(self.shown(server_id)['placed'])
        self.assert_verified()
        self.ask('DELETE', f'/interruptible/{server_id}', code=204)

    def test_server_is_live_migrated_among_lent_hosts(self):
        self.fill()
        server_id, host = self.lent()
        self.admin.post_server_action(
            server_id, {'os-migrateLive': {'host': None,
                                           'block_migration': 'auto'}})
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-SRV-ATTR:host'] not in (None, host))
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.assert_verified()

    def test_leased_hosts_are_not_lent(self):
        self.fill()
        self.lease_hosts(2, 2)
        self.fails(self.boot('lent', hints=YES))

    def test_servers_of_one_boot_are_placed_on_lent_hosts(self):
        self.fill()
        self.boot('lent', flavor='3', hints=YES, count=4)
        for server in self.alice.get_servers():
            self.wait_for_status(server['id'], 'ACTIVE')
        self.fails(self.boot('one more', hints=YES))

    def moved(self, server_id, action, host):
        """Carry out an action of an admin; return the host after it."""
        self.admin.post_server_action(server_id, action)
        self.wait_for(lambda: self.host_of({'id': server_id}) not in (
            None, host))
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'] is None)
        return self.host_of({'id': server_id})

    def test_leases_prefer_hosts_without_lent_servers(self):
        self.fill()
        server_id, host = self.lent()
        lease = self.reserve(hosts=1)
        self.assertIsNone(self.shown(server_id)['safe_until'])
        self.run_until(self.start_of(lease))
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.assertEqual({'host1', 'host2'} - {host}, {
            *self.aggregates()[lease['reservations'][0]['id']]})

    def test_lease_that_starts_before_eviction_gets_other_hosts(self):
        self.fill()
        self.lent()
        self.reserve(start_in=LEAD - 120, hosts=2, code=409)
        self.make(reservations=[self.hosts_wanted(2, 2)], code=409)
        self.lease_hosts(1)
        self.fails(self.boot('late', flavor='4', hints=YES))

    def test_lease_starts_after_immediate_evictions(self):
        self.fill()
        for name in ('one', 'two'):
            self.lent(name, flavor='4')
        wiring.shared().leases.creation._eviction_time = LEAD
        lease = self.make(reservations=[self.hosts_wanted(2, 2)])
        self.assertIn('interruptible servers are evicted before',
                      self.get(lease)['warnings'][0])
        start = self.start_of(lease)
        self.until(start - LEAD)
        self.until(start - EVICTION)
        for server in self.alice.get_servers():
            if server['name'] != 'full':
                self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.run_sync()
        self.until(start - 100)
        self.run_until(start)
        self.assertEqual('ACTIVE', self.get(lease)['status'])

    def test_only_interruptible_servers_can_be_forced_on_lent_hosts(self):
        there = {'client': self.admin, 'availability_zone': 'nova:host1'}
        self.fails(self.boot('ordinary', **there))
        server = self.boot_active('lent', hints=YES, **there)
        self.assertEqual('host1', self.host_of(server))
        self.run_sync()
        self.reserve(start_in=2 * HOUR, hosts=2)
        self.boot_active('again', hints=YES, **there)
        self.run_sync()
        self.lease_hosts(1)
        self.fails(self.boot('late', hints=YES, client=self.admin,
                             availability_zone='nova:host2'))

    def test_ordinary_servers_cannot_move_to_lent_hosts(self):
        server = self.boot_active('ordinary')
        for action in ({'os-migrateLive': {
                'host': 'host1', 'block_migration': 'auto'}},
                {'migrate': {'host': 'host1'}}, {'migrate': None},
                {'resize': {'flavorRef': '3'}}):
            self.admin.post_server_action(server['id'], action)
            self.wait_for_error(server['id'], {
                'os-migrateLive': 'live-migration'}.get(*[*action] * 2))
            self.admin.post_server_action(
                server['id'], {'os-resetState': {'state': 'active'}})
        self.assertEqual('plain', self.host_of(server))
        self.alice.post_server_action(server['id'], {'shelve': None})
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.fill()
        self.alice.post_server_action(server['id'], {'unshelve': None})
        self.wait_for_error(server['id'], 'unshelve')
        self.assertIsNone(self.host_of(server))

    def test_interruptible_server_can_move_to_lent_hosts(self):
        server_id, host = self.lent()
        self.assertEqual('plain', host)
        first = self.moved(server_id, {'migrate': None}, host)
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.admin.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        # The claim of the scheduler counts for half a minute.
        self.clock.advance(60)
        self.run_sync()
        self.assertIn(first, ('host1', 'host2'))
        other, = {'host1', 'host2'} - {first}
        self.assertEqual(other, self.moved(server_id, {'os-migrateLive': {
            'host': other, 'block_migration': 'auto'}}, first))
        self.alice.post_server_action(server_id, {
            'rebuild': {'imageRef': base.IMAGE}})
        self.wait_for_status(server_id, 'ACTIVE')
        self.alice.post_server_action(server_id, {'shelve': None})
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.clock.advance(60)
        self.fill()
        self.alice.post_server_action(server_id, {'unshelve': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.assertIn(self.host_of({'id': server_id}), ('host1', 'host2'))
        self.assert_verified()

    def test_interruptible_server_is_evacuated_to_lent_host(self):
        self.fill()
        server_id, host = self.lent()
        self.computes[host].stop()
        service, = self.admin.get_services(host=host, binary='nova-compute')
        self.admin.put_service_force_down(service['id'], True)
        other, = {'host1', 'host2'} - {host}
        self.assertEqual(other, self.moved(
            server_id, {'evacuate': {}}, host))

    def test_hosts_are_not_lent_while_database_is_unavailable(self):
        self.fill()
        self.useFixture(fixtures.MockPatch(
            'blazar_core.capacity.eligibility.own_of',
            side_effect=errors.DatabaseUnavailable()))
        self.fails(self.boot('lent', hints=YES))

    def test_unrecorded_server_with_hint_gets_no_lent_host(self):
        self.fill()
        self.useFixture(fixtures.MockPatch(
            'blazar_nova.services.interruptible_servers.InterruptibleServers.'
            'asked', return_value=None))
        self.fails(self.boot('forged', hints=YES))


class PowerTest(LendingTestCase):

    def test_lent_host_in_use_is_not_switched_off(self):
        self.flags(service_down_time=100_000)
        self.flags(group='blazar_power', enabled=True)
        switches = test_power.Switches('host1', 'host2', 'plain')
        parts = self.listener.parts
        switcher = power.Power(
            parts.database, parts.clock, parts.host_status,
            power.Machines(power_services.Computes((), ()), switches),
            machines.policy(spare_hosts=0), lambda *_args: None,
            lambda work: work())
        leader = leader_election.Leader(
            parts.database, parts.clock, power.LEADER, 'test', power.PAUSE,
            60)
        self.fill()
        _server_id, host = self.lent()
        other, = {'host1', 'host2'} - {host}
        for _round in range(3):
            self.clock.advance(power.PAUSE)
            leader.lead(switcher.look)
        self.assertEqual([('off', other)], switches.done)
        self.assertEqual({host}, switches.on_now & {'host1', 'host2'})
        self.run_sync()
        self.boot_active('rest', flavor='3', hints=YES)
        self.fails(self.boot('more', flavor='4', hints=YES))


class CleaningTest(LendingTestCase):
    """Hosts are cleaned for ten minutes before a lease of hosts."""

    more_conf = ('[blazar]\nlend_enrolled_hosts = True\n'
                 'cleaning_time = 10\n')

    def test_eviction_is_earlier_by_cleaning_time(self):
        self.fill()
        server_id, _host = self.lent()
        self.reserve(start_in=LEAD + 300, hosts=2, code=409)
        lease = self.reserve()
        start = self.start_of(lease) - 600
        self.assertEqual(clocks.iso(start - LEAD),
                         self.shown(server_id)['safe_until'])
        self.until(start - LEAD)
        self.assertEqual(clocks.iso(start - EVICTION),
                         self.shown(server_id)['eviction']['time'])
        self.until(start - EVICTION)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')

    def test_lent_host_is_cleaned_at_start_of_lease(self):
        record = self.useFixture(fixtures.TempDir()).join('cleaned')
        self.flags(group='blazar', cleaning_command=(
            f"""sh -c 'echo "$1" >>{record}' clean"""))
        self.fill()
        server_id, host = self.lent()
        lease = self.reserve()
        start = self.start_of(lease)
        self.until(start - 600 - LEAD)
        self.until(start - 600 - EVICTION)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.run_until(start)
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        with open(record) as cleaned:
            self.assertEqual([host], cleaned.read().split())

    def test_host_is_not_lent_if_eviction_would_be_too_late(self):
        self.fill()
        self.reserve(start_in=LEAD + 300)
        self.fails(self.boot('late', hints=YES))
        self.assertIn('No host', self.refused(
            409, self.boot, 'late', hints={**YES, 'safe_for': '10s'}))


class NotLendingTest(LendingTestCase):

    more_conf = ''

    def test_hosts_are_not_lent_by_default(self):
        self.fill()
        self.fails(self.boot('lent', hints=YES))
        self.refused(409, self.boot, 'bounded',
                     hints=self.lease_hints('bounded'))


class BoundedTest(LendingTestCase):

    def test_boot_with_lease_uses_enrolled_host(self):
        self.fill()
        server = self.boot_active('bounded', flavor='4',
                                  hints=self.lease_hints('bounded'))
        self.run_sync()
        self.assertIn(self.host_of(server), ('host1', 'host2'))
        self.reserve(start_in=60, hosts=2, code=409)
        lease, _reservation_id = self.lease_hosts(1)
        self.assertEqual('ACTIVE', lease['status'])
        self.reserve(start_in=3 * HOUR, hosts=2)
        self.assert_verified()

    def test_deferred_build_uses_enrolled_host(self):
        self.fill()
        hints = self.lease_hints('bounded', start_in=HOUR)
        server = self.boot('bounded', flavor='4', hints=hints)
        self.wait_for_status(server['id'], 'RESERVED')
        self.run_until(clocks.SystemClock().now() + HOUR)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertIn(self.host_of(server), ('host1', 'host2'))

    def bounded(self, **kwargs):
        """Boot a server with a lease on an enrolled host."""
        self.fill()
        server = self.boot_active('bounded', flavor='4',
                                  hints=self.lease_hints('bounded', **kwargs))
        self.run_sync()
        self.assertIn(self.host_of(server), ('host1', 'host2'))
        return server

    def test_released_server_is_shelved_from_enrolled_host(self):
        server = self.bounded(on_end='release', length=HOUR)
        lease, = self.ask('GET', '/leases', code=200)['leases']
        self.run_until(driven.parse_iso(lease['end_date']))
        # As where its capacity is reserved for later.
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.run_until(self.clock.now() + 60)
        self.assertEqual([], self.ask('GET', '/leases', code=200)['leases'])
        self.alice.post_server_action(server['id'], {'unshelve': None})
        self.wait_for_error(server['id'], 'unshelve')

    def test_extension_into_lease_of_hosts_is_refused(self):
        self.bounded(length=HOUR)
        lease, = self.ask('GET', '/leases', code=200)['leases']
        self.reserve(start_in=2 * HOUR, hosts=2)
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'end_date': self.at(3 * HOUR)}, code=409)
        self.ask('PUT', f'/leases/{lease["id"]}', {
            'end_date': self.at(2 * HOUR - 120)}, code=200)

    def test_server_is_live_migrated_to_other_enrolled_host(self):
        server = self.bounded()
        host = self.host_of(server)
        other, = {'host1', 'host2'} - {host}
        self.admin.post_server_action(server['id'], {
            'os-migrateLive': {'host': None, 'block_migration': 'auto'}})
        self.wait_for(lambda: self.host_of(server) == other)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        self.reserve(start_in=60, hosts=2, code=409)
        self.assert_verified()

    def test_multi_create_boot_does_not_use_enrolled_hosts(self):
        self.fill()
        self.refused(409, self.boot, 'bounded', count=2,
                     hints=self.lease_hints('bounded'))
