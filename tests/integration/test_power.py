# SPDX-License-Identifier: Apache-2.0

"""Idle hosts are switched off and on by Redfish, under leases of whole hosts.

Two hosts have a nova-compute each of their own, and a BMC: sushy-tools'
emulator, which stops and starts that process. Its machine loses the servers
that it has when it goes off, so that a wrong shutdown is seen.
"""

import datetime
import glob
import os
import threading
import time
import typing as ty

import fixtures

from blazar_nova.compat import power_services
from tests.integration import base
from tests.integration import test_crash
from tests.integration import test_failures
from tests import redfish

#: Short times, as a nova-compute of the stack is up after some ten seconds.
#: Each look takes place after 10 s.
POWER = '''
[blazar_power]
enabled = true
hosts_file = {}
spare_hosts = 0
minimum_off = 20
minimum_on = 20
boot_time = 40
boot_time_floor = 30
margin = {}
shutdown_timeout = 15
command_timeout = 2
'''
#: The longest time until a host that is off counts as available: its boot, and
#: what the outage is booked ahead.
AHEAD = 120


class Machines(redfish.Emulator):
    """The BMCs of hosts whose nova-compute is a process of the stack.

    :param names: of the hosts
    :ivar lost: the guests that were on a host when it went off
    :ivar broken: the names of hosts whose BMC takes commands and does nothing
    """

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.cloud: ty.Any = None
        self.lost: list[str] = []
        self.broken: set[str] = set()
        self._locks = {name: threading.Lock() for name in names}
        self._jobs: list[threading.Thread] = []

    def switch(self, identity: str, state: str) -> None:
        name = self.names[identity]
        self.requested.append((name, state))
        if self.mode == 'lie' or name in self.broken:
            return
        if state == 'On':
            self.on.add(name)
        job = threading.Thread(target=self._carry_out, args=(name, state))
        self._jobs.append(job)
        job.start()

    def _carry_out(self, name: str, state: str) -> None:
        """Take the time that a machine takes."""
        process = self.cloud.hosts()[name]
        with self._locks[name]:
            if state == 'On':
                self.cloud.restart(process)
                return
            self.lost += glob.glob(
                os.path.join(self.cloud.guests(name), '*.json'))
            if state == 'ForceOff':
                self.cloud.kill(process)
            else:
                self.cloud.stop(process)
            self.on.discard(name)

    def join(self) -> None:
        """Wait until all is carried out that was requested."""
        for job in self._jobs:
            job.join(60)


class PowerTestCase(test_failures.FailuresTestCase):
    """
    :cvar MARGIN: seconds
    """

    MARGIN = 20

    def setUp(self) -> None:
        self.machines = self.useFixture(Machines(*self.HOSTS))
        path = self.machines.write_hosts(
            self.useFixture(fixtures.TempDir()).path)
        # Another listener looks soon after one has died.
        self.OPTIONS = test_failures.IMPATIENT.replace(
            '[blazar]', '[blazar]\nworker_timeout = 5') + POWER.format(
                path, self.MARGIN)
        super().setUp()
        self.machines.cloud = self.cloud
        self.addCleanup(self.bring_back)
        self.addCleanup(self.machines.join)
        self.enrol(*self.HOSTS)

    def bring_back(self) -> None:
        """All hosts are on, and belong to all, when a test is over."""
        self.machines.mode, self.machines.broken = '', set()
        if self.machines._running is None:
            self.machines.serve()
        if self.listener.pid is None:
            self.listener = self.new_listener()
        for host in self.HOSTS:
            self.manage('--retry', host)
        self.wait_until_power('on', *self.HOSTS, seconds=180)
        self.machines.join()

    def manage(self, *words: str) -> str:
        return self.run_process(
            'blazar-nova-manage', *self.files(), 'host', 'power', *words,
        ).stdout

    def power(self) -> dict[str, str]:
        return {name: state or 'on' for name, state in self.sql(
            'SELECT name, power_state FROM hosts') if name in self.HOSTS}

    def wait_until_power(self, state: str, *hosts: str, seconds: float = 120,
                         ) -> None:
        self.wait_for(
            lambda: all(self.power()[host] == state for host in hosts),
            lambda: f'{hosts} are {state}: {self.power()}, {self.manage()}',
            seconds)

    def services(self) -> dict[str, tuple[str, str, str | None]]:
        return {one['host']: (
            one['state'], one['status'], one['disabled_reason'])
            for one in self.admin(
                'GET', '/os-services?binary=nova-compute')['services']
            if one['host'] in self.HOSTS}

    def all_go_off(self) -> None:
        self.wait_until_power('off', *self.HOSTS)
        self.machines.join()
        self.assertEqual(set(), self.machines.on)
        self.assertEqual({power_services.REASON}, {
            reason for _state, _status, reason in self.services().values()})
        self.nothing_was_lost()

    def all_are_enabled(self) -> None:
        self.assertEqual(
            {('up', 'enabled', None)}, {*self.services().values()})

    def nothing_was_lost(self) -> None:
        self.assertEqual([], self.machines.lost)

    def soon(self) -> float:
        """The first start, a whole minute, for which hosts can be back that
        are off.
        """
        first = time.time() + 40 + self.MARGIN + AHEAD + 20
        return first - first % 60 + 60

    def starts_in_time(self, lease: base.Json, start: float) -> None:
        """It is ACTIVE in its first minute."""
        self.wait_for_lease(lease['id'], 'ACTIVE', start + 60 - time.time())

    def assert_switched(self, *commands: str) -> None:
        """That is what was requested of each host, and nothing twice."""
        for host in self.HOSTS:
            self.assertEqual([*commands], [
                state for name, state in self.machines.requested
                if name == host])


class PowerTest(PowerTestCase):

    def test_two_listeners_switch_hosts_once_for_lease(self) -> None:
        self.process('second-listener', self.listener.program.command,
                     'Started').wait_until_up(base.PATIENCE)
        self.all_go_off()
        self.verify_finds_nothing()
        start = self.soon()
        lease = self.lease_hosts(2, base.date(start)[:16])
        self.starts_in_time(lease, start)
        self.assertEqual(set(self.HOSTS), self.machines.on)
        self.assert_switched('GracefulShutdown', 'On')
        self.all_are_enabled()
        self.assertFalse(self.lease(lease['id'])['degraded'])
        server_id = self.boot(
            {'reservation': lease['reservations'][0]['id']},
            client=self.admin)['server']['id']
        self.wait_for_server(server_id)
        self.assertIn(self.server(server_id)['OS-EXT-SRV-ATTR:host'],
                      self.HOSTS)
        self.verify_finds_nothing()
        # Nothing is switched off under a server.
        begun = time.time()
        self.wait_for(lambda: time.time() > begun + 45, 'four looks')
        self.assert_switched('GracefulShutdown', 'On')
        self.assertEqual(1, len(self.guests(server_id)))
        self.end(lease)
        self.wait_until_gone(server_id)
        self.all_go_off()
        self.assert_switched('GracefulShutdown', 'On', 'GracefulShutdown')

    def clients_show(self, state: str) -> None:
        """Both commands of Blazar's client show the power of the hosts."""
        columns = ('hypervisor_hostname', 'id', 'power_state', 'power_since',
                   'power_until')
        listed = {one['hypervisor_hostname']: one for one in self.openstack(
            'reservation', 'host', 'list',
            *(word for one in columns for word in ('-c', one)), user='admin')}
        for host in self.HOSTS:
            shown = self.openstack('reservation', 'host', 'show',
                                   str(listed[host]['id']), user='admin')
            for one in listed[host], shown:
                self.assertEqual(state, one['power_state'])
                since = datetime.datetime.fromisoformat(one['power_since'])
                self.assertLess(abs(time.time() - since.replace(
                    tzinfo=datetime.UTC).timestamp()), 600)
                self.assertIn('power_until', one)

    def test_lease_from_now_on_waits_for_hosts_to_boot(self) -> None:
        self.configure('[blazar_power]\nenabled = true\n')
        self.all_go_off()
        self.clients_show('off')
        lease = self.lease_hosts(2)
        self.wait_for(lambda: [one['reason'] for one in self.lease(
            lease['id'])['conditions']] == ['HostsBooting'],
            lambda: str(self.lease(lease['id'])), 30)
        # Before start_timeout is over.
        self.wait_for_lease(lease['id'], 'ACTIVE', 180)
        self.all_are_enabled()
        self.assert_switched('GracefulShutdown', 'On')
        self.clients_show('on')
        self.end(lease)

    def test_host_that_does_not_boot_is_replaced(self) -> None:
        """Its lease gets another one, at its start."""
        self.all_go_off()
        start = self.soon()
        lease = self.lease_hosts(2, base.date(start)[:16])
        # It is always on: nothing switches it.
        self.enrol('host3')
        self.machines.broken = {'host1'}
        self.starts_in_time(lease, start)
        self.wait_for(lambda: self.hosts_of(lease) == {'host2', 'host3'},
                      lambda: str(self.hosts_of(lease)), 30)
        self.assertEqual('failed', self.power()['host1'])
        self.assertIn('does not report', self.manage())
        self.nothing_was_lost()
        self.end(lease)

    def test_hosts_stay_on_if_bmcs_fail(self) -> None:
        """Hosts stay on and are used, whatever their BMCs say."""
        self.machines.kill()
        self.assert_left_on('killed')
        for mode in ('hang', '500', 'lie'):
            self.machines.mode = mode
            if mode == 'hang':
                self.machines.serve()
            self.try_again()
            self.assert_left_on(mode)
        self.machines.mode = ''
        self.try_again()
        self.all_go_off()

    def try_again(self) -> None:
        for host in self.HOSTS:
            self.manage('--retry', host)

    def assert_left_on(self, mode: str) -> None:
        self.wait_until_power('failed', *self.HOSTS, seconds=180)
        self.wait_for(lambda: {*self.services().values()} == {
            ('up', 'enabled', None)}, lambda: str(self.services()))
        self.assertEqual(set(self.HOSTS), self.machines.on, mode)
        self.verify_finds_nothing()


class DeathTest(PowerTestCase):
    """Margin for three deaths in a row."""

    MARGIN = 240

    def dies_at(self, step: ty.Any, seconds: float) -> None:
        process = self.crashing(step, 'listener', *self.files(),
                                ready='Started')
        self.wait_for(lambda: process.pid is None,
                      f'a listener comes to {step.name}', seconds)

    def test_listener_dies_at_each_step_of_power_switching(self) -> None:
        self.listener.kill()
        for step in test_crash.steps_of('POWER_OFF'):
            self.dies_at(step, 90)
        self.listener = self.new_listener()
        self.all_go_off()
        for host in self.HOSTS:
            # One that was recorded and not sent is forced off after its time.
            self.assertLessEqual(self.machines.requested.count(
                (host, 'GracefulShutdown')), 1)
        start = self.soon()
        lease = self.lease_hosts(2, base.date(start)[:16])
        self.listener.kill()
        for step in test_crash.steps_of('POWER_ON'):
            self.dies_at(step, start - time.time())
        self.listener = self.new_listener()
        self.starts_in_time(lease, start)
        self.assertEqual(set(self.HOSTS), self.machines.on)
        self.all_are_enabled()
        for host in self.HOSTS:
            self.assertEqual(
                1, self.machines.requested.count((host, 'On')))
        self.nothing_was_lost()
        self.end(lease)
        self.verify_finds_nothing()
