# SPDX-License-Identifier: Apache-2.0


"""A nova-compute dies or freezes under leases, and listeners with short
intervals react.
"""

import os
import signal
import time
import typing as ty

from blazar_core.healing import evacuation
from tests.integration import base
from tests.integration import test_crash

#: A compute of the stack reports every 5 s. The interval is the shortest.
IMPATIENT = '''
[DEFAULT]
service_down_time = 15
[blazar]
sync_interval = 5
max_sleep = 2
polling_interval = 1
failure_delay = 3
recovery_delay = 8
healing_interval = 1
evacuate = true
'''
RECOVERY = 8
#: Seconds until the start of a lease that has to be moved before.
SOON = 50
LATER = 7200


class FailuresTestCase(test_crash.CrashTestCase):
    """Some hosts in a zone; the first two have a nova-compute of their own
    each.
    """

    OPTIONS = IMPATIENT
    HOSTS: ty.ClassVar[tuple[str, ...]] = ('host1', 'host2')

    def setUp(self) -> None:
        super().setUp()
        zone = self.admin('POST', '/os-aggregates', {'aggregate': {
            'name': 'pair', 'availability_zone': 'pair'}})['aggregate']['id']
        self.addCleanup(self.admin, 'DELETE', f'/os-aggregates/{zone}')
        for host in self.HOSTS:
            self.act(zone, add_host={'host': host})
            self.addCleanup(self.act, zone, remove_host={'host': host})
        self.addCleanup(self.remove_what_is_new)
        self.without('blazar-listener-1', 'blazar-listener-2')
        self.listener = self.new_listener()

    def act(self, aggregate: int, **action: base.Json) -> None:
        self.admin('POST', f'/os-aggregates/{aggregate}/action', action)

    def reserve(self, starts_in: int, **boot: str) -> str:
        """Boot a server for later on one of the two; return its id."""
        return self.hold(starts_in, availability_zone='pair', **boot)[0]

    def booked_beside(self, host: str, starts_in: int) -> str:
        """Boot a server for later that is booked on a host and fits on the
        other one; return its id.
        """
        for _number in range(16):
            server_id = self.reserve(starts_in)
            if self.booked_hosts()[server_id] == host:
                return server_id
        return self.fail(f'Nothing is booked on {host}')

    def wait_until_moved(self, server_id: str, host: str) -> str:
        """Wait until a booking has left a host; return its new host."""
        def elsewhere() -> str | None:
            booked = self.booked_hosts()[server_id]
            return booked if booked != host else None

        return str(self.wait_for(elsewhere, f'{server_id} leaves {host}'))

    def outages(self) -> list[tuple[object, ...]]:
        """Return the hosts that are considered failed, and since when they
        are up again.
        """
        return self.sql(
            'SELECT hosts.name, back_at FROM outages JOIN hosts '
            'ON hosts.id = host_id WHERE began_at IS NOT NULL')

    def wait_until_back(self) -> None:
        self.wait_for(lambda: not self.outages(), 'no host has failed')

    def verify_finds_nothing(self) -> None:
        def found() -> str:
            return self.verify().stdout

        self.wait_for(lambda: self.verify().returncode == 0, found)

    def starts_there(self, server_id: str, host: str) -> None:
        self.wait_for_lease(self.lease_of(server_id)['id'], 'ACTIVE',
                            SOON + base.PATIENCE)
        self.wait_for_server(server_id)
        self.assertEqual(host, self.assert_built_once(server_id)['host'])

    def runs(self, **boot: str) -> tuple[str, str]:
        """Boot an ACTIVE server; return its id and its host."""
        server_id = self.boot(self.lease_hints(), client=self.admin,
                              availability_zone='pair', **boot)['server']['id']
        self.wait_for_server(server_id)
        return server_id, self.assert_built_once(server_id)['host']

    def evacuations(self, server_id: str) -> list[base.Json]:
        return list(self.admin(
            'GET', '/os-migrations?migration_type=evacuation&instance_uuid='
            f'{server_id}')['migrations'])

    def comes_back(self, host: str, server_id: str, other: str) -> None:
        """Restart a host whose server was evacuated: the server has only the
        other guest, and was evacuated once.
        """
        self.cloud.restart(self.cloud.hosts()[host])
        self.force_down(host, False)
        self.wait_for(lambda: self.guests(server_id) == [other],
                      'one guest is left')
        self.assertEqual(1, len(self.evacuations(server_id)))

    def enrol(self, *hosts: str) -> None:
        """Make hosts serve leases only, until the test ends."""
        for host in hosts:
            enrolled = self.admin('POST', '/os-hosts', {'name': host},
                                  service='reservation')['host']['id']
            self.addCleanup(self.admin, 'DELETE', f'/os-hosts/{enrolled}',
                            service='reservation')

    def lease_of_the_admin(self, body: base.Json) -> base.Json:
        lease = ty.cast(base.Json, self.admin(
            'POST', '/leases', body, service='reservation')['lease'])
        self.addCleanup(self.end, lease)
        return lease

    def lease_hosts(self, number: int, start: str = 'now') -> base.Json:
        """Create a lease of that many whole hosts."""
        return self.lease_of_the_admin({
            'name': 'hosts', 'start_date': start, 'end_date': base.date(
                time.time() + LATER)[:16], 'reservations': [{
                    'resource_type': 'physical:host', 'min': number,
                    'max': number, 'hypervisor_properties': '',
                    'resource_properties': ''}]})

    def hosts_of(self, lease: base.Json) -> set[str]:
        return {host for host, in self.sql(
            'SELECT hosts.name FROM bookings '
            'JOIN hosts ON hosts.id = host_id '
            'JOIN reservations ON reservations.id = reservation_id '
            'WHERE lease_id = :lease', lease=lease['id'])}

    def end(self, *leases: base.Json) -> None:
        for lease in leases:
            self.admin.request('DELETE', f'/leases/{lease["id"]}',
                               service='reservation')
        for lease in leases:
            self.wait_for_lease(lease['id'], 'TERMINATED')


class FailuresTest(FailuresTestCase):
    """One of two hosts fails."""

    def test_bookings_soon_leave_killed_host(self) -> None:
        soon = self.reserve(SOON)
        failing = str(self.booked_hosts()[soon])
        later = self.booked_beside(failing, LATER)
        process = self.cloud.hosts()[failing]
        self.addCleanup(self.cloud.restart, process)
        self.cloud.kill(process)
        other = self.wait_until_moved(soon, failing)
        self.assertEqual([(failing, None)], self.outages())
        self.assertNotEqual(failing, other)
        (reservation,) = self.lease_of(soon)['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        self.assertIn(other, {'host1', 'host2'})
        self.starts_there(soon, other)
        self.verify_finds_nothing()
        self.assertEqual(failing, self.booked_hosts()[later])
        self.assertIs(False, self.lease_of(later)['degraded'])
        self.cloud.restart(process)
        self.wait_until_back()
        self.assertEqual(failing, self.booked_hosts()[later])
        self.verify_finds_nothing()

    def test_server_is_evacuated_once_by_two_listeners(self) -> None:
        self.new_listener()
        server_id, failing = self.runs()
        process = self.cloud.hosts()[failing]
        self.addCleanup(self.cloud.restart, process)
        self.addCleanup(self.force_down, failing, False)
        self.cloud.kill(process)
        self.wait_for(self.outages, 'the host has failed')
        # Long after the time of the evacuation if the failure were certain.
        begun = time.time()
        self.wait_for(lambda: time.time() > begun + 2 * evacuation.PAUSE,
                      'nothing is evacuated')
        self.assertEqual(([], [failing]), (
            self.evacuations(server_id), self.guests(server_id)))
        self.force_down(failing)
        other = self.wait_until_moved(server_id, failing)
        self.wait_for_server(server_id)
        (reservation,) = self.lease_of(server_id)['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        # Its old guest remains, as on a disk that was not cleaned.
        self.assertEqual({failing, other}, set(self.guests(server_id)))
        self.comes_back(failing, server_id, other)
        self.assertEqual([other, failing], sorted(
            (one['host'] for one in self.spawns(server_id)),
            key=lambda host: host != other))
        self.wait_until_back()
        self.verify_finds_nothing()

    def test_hosted_server_is_evacuated_within_its_lease(self) -> None:
        self.enrol('host1', 'host2')
        lease = self.lease_hosts(2)
        self.wait_for_lease(lease['id'], 'ACTIVE')
        server_id = self.boot({
            'reservation': lease['reservations'][0]['id']},
            client=self.admin)['server']['id']
        self.wait_for_server(server_id)
        failing = self.assert_built_once(server_id)['host']
        (other,) = {'host1', 'host2'} - {failing}
        process = self.cloud.hosts()[failing]
        self.addCleanup(self.cloud.restart, process)
        self.addCleanup(self.force_down, failing, False)
        self.cloud.kill(process)
        self.force_down(failing)
        self.wait_for(lambda: self.server(server_id)[
            'OS-EXT-SRV-ATTR:host'] == other, 'it is on the other host')
        self.wait_for_server(server_id)
        self.comes_back(failing, server_id, other)
        self.wait_until_back()
        self.verify_finds_nothing()
        self.end(lease)
        self.wait_until_gone(server_id)

    def test_listener_dies_at_each_step_of_healing(self) -> None:
        self.listener.stop()
        for step in test_crash.steps_of('HEAL'):
            server_id = self.reserve(SOON)
            failing = str(self.booked_hosts()[server_id])
            self.addCleanup(self.force_down, failing, False)
            self.force_down(failing)
            self.listener_dies_at(step)
            after = self.new_listener()
            other = self.wait_until_moved(server_id, failing)
            (reservation,) = self.lease_of(server_id)['reservations']
            self.assertEqual((False, True), (
                reservation['missing_resources'],
                reservation['resources_changed']), step)
            self.force_down(failing, False)
            self.wait_until_back()
            self.assertEqual(other, self.booked_hosts()[server_id], step)
            self.verify_finds_nothing()
            after.stop()

    def test_listener_dies_at_each_step_of_evacuation(self) -> None:
        server_id, failing = self.runs()
        self.listener.stop()
        process = self.cloud.hosts()[failing]
        self.addCleanup(self.cloud.restart, process)
        self.addCleanup(self.force_down, failing, False)
        self.cloud.kill(process)
        self.force_down(failing)
        for step in test_crash.steps_of('MOVE'):
            self.listener_dies_at(step)
            # Skip the time that an evacuation request may take.
            self.write('UPDATE server_moves SET next_at = 0, '
                       'requested_at = 0 WHERE server_id = :server',
                       server=server_id)
        self.new_listener()
        other = self.wait_until_moved(server_id, failing)
        self.wait_for_server(server_id)
        self.comes_back(failing, server_id, other)
        self.assertEqual(2, len(self.spawns(server_id)))
        self.wait_until_back()
        self.verify_finds_nothing()

    def test_running_server_is_migrated_before_maintenance(self) -> None:
        server_id, host = self.runs()

        def maintain(*words: str) -> str:
            done = self.run_process(
                'blazar-nova-manage', *self.files(), 'host', 'maintain', host,
                *words)
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
            return str(done.stdout)

        self.addCleanup(maintain, '--until', 'now')
        until = base.date(time.time() + 600)
        self.assertIn('to other hosts, 0 not.', maintain(
            '--until', until, '--dry-run'))
        self.assertIn(f'Host {host} has no bookings of leases', maintain(
            '--until', until, '--wait'))
        self.wait_for_server(server_id)
        other = self.booked_hosts()[server_id]
        self.assertEqual(
            other, self.server(server_id)['OS-EXT-SRV-ATTR:host'])
        self.assertIn(other, {'host1', 'host2'} - {host})
        self.assertIs(False, self.lease_of(server_id)['degraded'])
        self.verify_finds_nothing()

    def test_frozen_host_fails_and_recovers(self) -> None:
        soon = self.reserve(SOON)
        failing = str(self.booked_hosts()[soon])
        later = self.booked_beside(failing, LATER)
        runs = self.boot(self.lease_hints(), client=self.admin,
                         host=failing)['server']['id']
        self.wait_for_server(runs)
        # Its build is sent to the host before the failure is noticed.
        blind = self.boot(self.lease_hints(time.time() + 10),
                          client=self.admin, host=failing)['server']['id']
        pid = self.cloud.pid(self.cloud.hosts()[failing])
        assert pid is not None
        self.addCleanup(os.kill, pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
        other = self.wait_until_moved(soon, failing)
        self.starts_there(soon, other)
        self.assertEqual([(failing, None)], self.outages())
        for server_id in (runs, blind):
            (reservation,) = self.lease_of(server_id)['reservations']
            self.assertIs(True, reservation['missing_resources'])
        self.assertEqual([], self.guests(blind))

        os.kill(pid, signal.SIGCONT)
        begun = time.time()
        self.wait_until_back()
        self.assertGreaterEqual(time.time() - begun, RECOVERY)
        for server_id in (runs, blind):
            self.starts_there(server_id, failing)
            self.assertIs(False, self.lease_of(server_id)['degraded'])
        self.starts_there(soon, other)
        self.assertEqual(failing, self.booked_hosts()[later])
        self.assertIs(False, self.lease_of(later)['degraded'])
        self.verify_finds_nothing()


class ThreeOfTenTest(FailuresTestCase):
    """Leases of each kind that have started or start soon."""

    HOSTS = tuple(f'host{number}' for number in range(1, 11))

    def places(self, start: float) -> base.Json:
        """Create a lease of one reservation slot."""
        return self.lease_of_the_admin({
            'name': 'places', 'start_date': base.date(start)[:16],
            'end_date': base.date(start + LATER)[:16], 'reservations': [{
                'resource_type': 'virtual:instance', 'vcpus': 4,
                'memory_mb': 64, 'disk_gb': 1, 'amount': 1}]})

    def lacks(self, lease: base.Json) -> bool:
        return any(one['missing_resources'] for one in
                   self.lease(lease['id'])['reservations'])

    def test_leases_are_complete_after_failure_of_hosts(self) -> None:
        # All hosts of one lease are used, and others are available.
        self.enrol('host2', 'host3')
        hosts = self.lease_hosts(2)
        self.enrol('host4')
        soon = time.time() + SOON
        whole = self.lease_hosts(1, base.date(soon + 60)[:16])
        self.enrol('host5', 'host6')
        places = self.places(soon + 60)
        self.wait_for_lease(hosts['id'], 'ACTIVE')
        hint = {'reservation': hosts['reservations'][0]['id']}
        (on_places,), (on_whole,) = (
            self.hosts_of(places), self.hosts_of(whole))
        hosted, leased = (self.boot(
            hints, client=self.admin, host=host)['server']['id']
            for hints, host in ((hint, 'host2'),
                                (self.lease_hints(), 'host1')))
        held = self.reserve(SOON)
        for server_id, host in ((hosted, 'host2'), (leased, 'host1')):
            self.wait_for_server(server_id)
            self.assertEqual(host, self.assert_built_once(server_id)['host'])

        killed = [self.cloud.hosts()[host] for host in ('host1', 'host2')]
        for process in killed:
            self.addCleanup(self.cloud.restart, process)
            self.cloud.kill(process)
        # Three hosts, provided that the slot is on the first one.
        failing = {'host1', 'host2', on_whole, on_places}
        for host in failing:
            self.addCleanup(self.force_down, host, False)
            self.force_down(host)
        for server_id in (hosted, leased):
            self.wait_for(lambda: self.server(server_id)[
                'OS-EXT-SRV-ATTR:host'] not in failing,
                f'{server_id} has left')
            self.wait_for_server(server_id)
            self.assertEqual(1, len(self.evacuations(server_id)))
        self.assertIn(self.server(hosted)['OS-EXT-SRV-ATTR:host'],
                      self.hosts_of(hosts))
        self.wait_for(lambda: not self.lacks(hosts),
                      'the lease of hosts is whole')
        self.wait_for_lease(whole['id'], 'ACTIVE', SOON + 180)
        self.wait_for_lease(places['id'], 'ACTIVE')
        for lease in (hosts, whole, places, self.lease_of(leased)):
            self.assertFalse(self.lacks(lease))
        self.assertTrue(self.hosts_of(whole).isdisjoint(failing))
        for process in killed:
            self.cloud.restart(process)
        for host in failing:
            self.force_down(host, False)
        self.wait_until_back()
        for server_id in (hosted, leased, held):
            self.wait_for_server(server_id)
            self.wait_for(lambda: len(self.guests(server_id)) == 1,
                          'it has one guest')
        self.verify_finds_nothing()
        self.end(hosts, whole, places)
