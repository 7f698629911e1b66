# SPDX-License-Identifier: Apache-2.0

"""Enrolled hosts are off while no lease needs them, as Nova sees it."""

import datetime
import os
import threading

import fixtures
from nova import context as nova_context
from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import leader_election
from blazar_nova.cmd import listings
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import power_services
from blazar_nova.compat import providers
from blazar_nova.listener import power
from tests.functional import leased
from tests.functional import whole_hosts_base
from tests import machines
from tests import redfish

#: Seconds until a host is back: its boot time and the margin.
LEAD = 780
DISABLED = 'COMPUTE_STATUS_DISABLED'


class Switches:
    """BMCs that obey, and record the commands."""

    def __init__(self, *names):
        self.on_now, self.done = {*names}, []

    def known(self, host, service):
        return True

    def is_on(self, host, service):
        return host in self.on_now

    def mismatch(self, host, service):
        return ''

    def on(self, host, service):
        self.done.append(('on', host))
        self.on_now.add(host)

    def off(self, host, service, force):
        self.done.append(('off', host))
        self.on_now.discard(host)


class PowerTest(whole_hosts_base.HostsTestCase):
    """The tests say when a nova-compute reports, by their clock, and it does
    not report by itself; until then it is up.
    """

    more_conf = ('[DEFAULT]\nreport_interval = 0\n'
                 'service_down_time = 100000\n')

    def setUp(self):
        super().setUp()
        self.flags(group='blazar_power', enabled=True)
        self.switches = Switches('host1', 'host2', 'plain')
        self.enrol('host1', 'host2')
        parts = self.listener.parts
        self.told = []
        self.power = self.switcher(['host2'])
        self.leader = leader_election.Leader(
            parts.database, parts.clock, power.LEADER, 'test', power.PAUSE,
            60)

    def switcher(self, exclude, common=(), **values):
        parts = self.listener.parts
        return power.Power(
            parts.database, parts.clock, parts.host_status, power.Machines(
                power_services.Computes(exclude, common), self.switches),
            machines.policy(**values),
            lambda event, payload: self.told.append((event, payload['host'])),
            lambda work: work())

    def switch(self, after=power.PAUSE):
        self.clock.advance(after)
        self.leader.lead(self.power.look)

    def service(self, host='host1'):
        return objects.Service.get_by_compute_host(
            nova_context.get_admin_context(), host)

    def mark(self):
        """Mark host1 as disabled in placement, as its nova-compute does.
        """
        providers.change(self.uuid_of('host1'), 'traits', add=[DISABLED])
        self.assertTrue(self.is_marked())

    def is_marked(self):
        return DISABLED in compute_hosts.ask_placement(
            f'/resource_providers/{self.uuid_of("host1")}/traits')['traits']

    def uuid_of(self, host):
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == host)
        return uuid

    def power_states(self):
        return {one['service_name']: one['power_state']
                for one in self.ask(
                    'GET', '/os-hosts', client=self.admin)['hosts']}

    def report(self, at, host='host1'):
        """Set the time of the last report of its nova-compute."""
        service = self.service(host)
        service.last_seen_up = datetime.datetime.fromtimestamp(
            at, datetime.timezone.utc)
        service.save()

    def go_off(self):
        """Switch host1 off."""
        self.switch()
        self.mark()
        self.switch()
        self.assertEqual([('off', 'host1')], self.switches.done)
        self.report(self.clock.now() - 200)

    def test_service_of_one_host_is_read(self):
        computes = power_services.Computes([])
        computes.disable('host1')
        found = computes.service('host1')
        self.assertEqual((True, True, False), (
            found.up, found.ours, found.theirs))
        self.assertFalse(computes.service('host2').ours)
        self.assertIsNone(computes.service('nowhere'))
        # One that was deleted meanwhile need not be enabled.
        computes.enable('nowhere', 'unused')

    def shown(self, host):
        """Return since when and until when a host has its power state."""
        return next((one['power_since'], one['power_until']) for one in
                    self.ask('GET', '/os-hosts', client=self.admin)['hosts']
                    if one['service_name'] == host)

    def test_idle_host_is_switched_off_and_on_before_its_lease(self):
        self.go_off()
        off_at = self.clock.now()
        self.assertEqual((True, power_services.REASON), (
            self.service().disabled, self.service().disabled_reason))
        self.assertEqual({'host1': 'off', 'host2': 'on'}, self.power_states())
        # Leases may use it from the end of its boot time on.
        self.assertFalse(self.is_marked())
        self.assertEqual([('host.power_off', 'host1')], self.told)
        self.assert_verified()
        wanted = [self.hosts_wanted(2, 2)]
        refused = self.make(reservations=wanted, code=409)
        self.assertIn('next_start', str(refused))
        lease = self.make(1500, reservations=wanted)
        self.assertEqual((clocks.stamp(off_at), clocks.stamp(
            self.began + 1500 - LEAD)), self.shown('host1'))
        self.listener.monitors.look()
        self.listener.overbooking.look()
        self.switch(650)
        self.assertEqual([('off', 'host1')], self.switches.done)
        self.switch(100)
        self.assertEqual(('on', 'host1'), self.switches.done[-1])
        self.assertEqual('booting', self.power_states()['host1'])
        # It boots, and marks itself as disabled again.
        self.clock.advance(300)
        self.report(self.clock.now())
        self.mark()
        self.switch()
        self.assertEqual({'host1': 'on', 'host2': 'on'}, self.power_states())
        self.assertEqual((False, None), (
            self.service().disabled, self.service().disabled_reason))
        self.assertFalse(self.is_marked())
        self.run_until(self.began + 1500)
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.assertFalse(self.get(lease)['degraded'])

    def test_host_with_server_stays_on(self):
        """Whatever the reservation database has of it."""
        _lease, reservation_id = self.lease_hosts()
        host, = (name for name, in self.query(
            'SELECT hosts.name FROM bookings JOIN hosts ON '
            'hosts.id = bookings.host_id WHERE outage IS NULL'))
        server = self.boot_active('vm1', hints={
            'reservation': reservation_id})
        self.assertEqual(host, server['OS-EXT-SRV-ATTR:host'])
        computes = power_services.Computes([])
        self.assertIn(server['id'], computes.occupied(
            self.uuid_of(host), host))
        other, = {'host1', 'host2'} - {host}
        self.assertEqual('', computes.occupied(self.uuid_of(other), other))
        for _look in range(3):
            self.switch()
        self.assertNotIn(('off', host), self.switches.done)

    def test_host_in_resize_or_with_allocation_stays_on(self):
        _lease, reservation_id = self.lease_hosts(2, 2)
        server = self.boot_active('vm1', hints={
            'reservation': reservation_id})
        before = server['OS-EXT-SRV-ATTR:host']
        self.alice.post_server_action(
            server['id'], {'resize': {'flavorRef': '2'}})
        after = self.wait_for_status(server['id'], 'VERIFY_RESIZE')
        self.assertNotEqual(before, after['OS-EXT-SRV-ATTR:host'])
        computes = power_services.Computes([])
        for host in before, after['OS-EXT-SRV-ATTR:host']:
            self.assertNotEqual(
                '', computes.occupied(self.uuid_of(host), host))
        self.placement.put(f'/allocations/{uuids.build}', {
            'project_id': 'p', 'user_id': 'u', 'consumer_generation': None,
            'consumer_type': 'INSTANCE', 'allocations': {
                self.uuid_of('plain'): {'resources': {'VCPU': 1}}}},
            version='1.38')
        self.assertIn(uuids.build, computes.occupied(
            self.uuid_of('plain'), 'plain'))

    def test_host_disabled_by_operator_is_left_alone(self):
        service = self.service()
        service.disabled, service.disabled_reason = True, 'fan'
        service.save()
        for _look in range(3):
            self.switch()
        self.assertEqual([], self.switches.done)
        self.assertEqual('fan', self.service().disabled_reason)
        computes = power_services.Computes([])
        self.assertFalse(computes.disable('host1'))
        computes.enable('host1', 'unused')
        self.assertTrue(self.service().disabled)

    def test_boot_waits_for_host_to_be_switched_on(self):
        """One that serves all workloads, as its operator wants."""
        # The API has the time of the machine.
        self.clock.advance(-100)
        self.power = self.switcher(
            ['host?'], ['pl*'], boot_time=100, boot_time_floor=100, margin=60)
        for _look in range(2):
            self.switch()
        self.assertEqual([('off', 'plain')], self.switches.done)
        self.report(self.clock.now() - 200, 'plain')
        self.assertIn('"off"', self.command('host', 'power', '--format',
                                            'json')[1])
        self.refused(409, lambda: self.boot('large', flavor='4', hints={
            **leased.RESERVE}, max_count=30))
        server = self.boot('vm1', hints=leased.RESERVE)
        self.wait_for_status(server['id'], 'RESERVED')
        self.run_until(self.began + 60)
        self.assertEqual('RESERVED', self.admin.get_server(
            server['id'])['status'])
        self.assertIn('being switched on', str(self.query(
            'SELECT conditions FROM leases')))
        self.switch()
        self.assertEqual(('on', 'plain'), self.switches.done[-1])
        self.run_until(self.clock.now() + 60)

        def is_back():
            # Its nova-compute reports, too, at another time.
            self.report(self.clock.now(), 'plain')
            self.switch()
            return not self.service('plain').disabled

        self.wait_for(is_back)
        # Nova's scheduler has the time of the machine, too.
        self.report(self.began, 'plain')
        self.run_until(self.clock.now() + 60)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('plain', self.host_of(server))

    def test_hosts_are_excluded_by_aggregates_names_and_properties(self):
        computes = power_services.Computes(
            ['aggregate:gold', 'ho*2', 'property:gpu=A100'])
        aggregate = self.admin.post_aggregate({'aggregate': {
            'name': 'gold', 'availability_zone': 'west'}})
        self.admin.add_host_to_aggregate(aggregate['id'], 'plain')
        computes.services()
        # Spare hosts stay on in each zone.
        self.assertEqual('west', computes.zone('plain'))
        self.assertNotEqual('west', computes.zone('host1'))
        self.assertEqual(
            {'plain': 'it is excluded by aggregate:gold',
             'host2': 'it is excluded by ho*2', 'host1': ''},
            {one: computes.excluded(one, one, {}) for one in (
                'plain', 'host2', 'host1')})
        self.assertIn('property', computes.excluded(
            'host1', 'host1', {'gpu': 'A100'}))
        for wrong in 'aggregates:gold', 'property:gpu', 'aggregate:':
            self.assertRaises(errors.ConfigurationError,
                              power_services.Computes, [wrong])

    def test_host_that_does_not_boot_again_has_failed(self):
        self.go_off()
        lease = self.make(1500, reservations=[self.hosts_wanted(2, 2)])
        self.switch(800)
        for _look in range(3):
            self.switch(300)
        self.assertEqual('failed', self.power_states()['host1'])
        self.listener.overbooking.look()
        self.assertIs(True, self.get(lease)['reservations'][0][
            'missing_resources'])


class ListenerTest(whole_hosts_base.HostsTestCase):
    """A listener and the operator's command, with BMCs that use Redfish."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        self.emulator = self.useFixture(redfish.Emulator('host1', 'host2'))
        self.path = self.emulator.write_hosts(
            self.useFixture(fixtures.TempDir()).path)
        self.flags(group='blazar_power', enabled=True, hosts_file=self.path,
                   spare_hosts=1)

    def test_listener_switches_off_one_of_two_idle_hosts(self):
        code, text = self.command('host', 'power', '--dry-run')
        self.assertEqual(0, code, text)
        self.assertIn('nothing needs it', text)
        self.assertEqual({'host1', 'host2'}, self.emulator.on)
        listener = self.new_listener(self.clock)
        leader = leader_election.Leader(
            listener.parts.database, self.clock, power.LEADER, 'test',
            power.PAUSE, 60)

        def is_off():
            self.clock.advance(power.PAUSE)
            leader.lead(listener.power.look)
            for one in threading.enumerate():
                if one.name == 'power':
                    one.join(20)
            return len(self.emulator.on) == 1 and '"off"' in self.command(
                'host', 'power', '--format', 'json')[1]

        self.wait_for(is_off, what='one of them to be off')
        off, = {'host1', 'host2'} - self.emulator.on
        self.assertEqual([(off, 'GracefulShutdown')],
                         self.emulator.requested)
        code, text = self.command('host', 'power', '--retry', off)
        self.assertEqual(1, code)
        self.assertIn(f'no host {off} that could not be switched', text)
        hosts, _leases, counts = listings.healths(
            listener.parts.database, self.clock.now())
        self.assertEqual([(off, 'switched off')], [
            (one['name'], one['status']) for one in hosts.rows])
        self.assertIn({'name': 'hosts_switched_off', 'count': 1},
                      counts.rows)

    def test_metric_shows_whether_hosts_file_is_used(self):
        listener = self.new_listener(self.clock)
        metric = b'blazar_power_hosts_file_used'

        def used():
            _code, _kind, body = listener.metrics.answer('/metrics')
            return [one for one in body.splitlines()
                    if one.startswith(metric)]

        self.assertEqual([metric + b' 1.0'], used())
        os.rename(self.path, f'{self.path}.off')
        self.assertEqual([metric + b' 0.0'], used())
        os.rename(f'{self.path}.off', self.path)
        self.assertEqual([metric + b' 1.0'], used())

    def test_listener_does_not_start_without_hosts_file(self):
        self.flags(group='blazar_power', hosts_file='/nowhere')
        exc = self.assertRaises(
            errors.ConfigurationError, self.new_listener, self.clock)
        self.assertIn('hosts_file /nowhere cannot be read', str(exc))
