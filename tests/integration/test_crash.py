# SPDX-License-Identifier: Apache-2.0

"""Wherever a process dies: every lease reaches the right state.

Processes are killed by signal 9: the listener at each named step of a start
and of an end, nova-api at each step of a deferred create, the command that
enrolls a host at each of its steps, the message bus and the database during
all of them. Two listeners that are about to send the same build freeze, each
considered dead. Afterwards each server was built exactly once, and
``blazar-nova-manage verify`` finds no difference between the reservation
database, Nova, placement and keystone.
"""

from concurrent import futures
import os
import re
import signal
import sys
import time

import requests

from blazar_core.lifecycle import fault_points
from tests.integration import base
from tests.integration import test_best_effort
from tests.integration import test_hosts
from tests.integration import test_lease_api
from tests.stack import processes

#: Options that make the wait for another worker short: longer than any
#: operation takes here (long_rpc_timeout is 20 on the stack), and shorter
#: than the timeout of a test.
QUICK = '''
[blazar]
worker_timeout = 5
sync_interval = 2
lost_build_timeout = 22
max_sleep = 2
'''

#: Seconds in which a listener reaches a step, and another one completes it.
PATIENCE = 90
#: The same where a build may have been lost in Nova, and the listeners are
#: those of the stack: these notice after lost_build_timeout, 80, and with the
#: next periodic sync.
LOST = 240

Step = fault_points.FaultPoint


def steps_of(prefix):
    return [step for step in Step if step.name.startswith(prefix)]


class CrashTestCase(base.IntegrationTestCase):
    """A test of processes that die or freeze.

    :cvar OPTIONS: options of the listeners that a test starts itself
    :ivar clock: the file with the seconds by which the clocks of processes
        that die or freeze are ahead
    """

    OPTIONS = QUICK

    def setUp(self):
        super().setUp()
        self.clock = os.path.join(self.cloud.folder, 'etc', 'clock')
        self.set_clock(0)
        self.quick = os.path.join(self.cloud.folder, 'etc', 'quick.conf')
        with open(self.quick, 'w') as file:
            file.write(self.OPTIONS)

    def set_clock(self, seconds):
        with open(f'{self.clock}.new', 'w') as file:
            file.write(str(seconds))
        os.replace(f'{self.clock}.new', self.clock)

    def process(self, name, command, ready):
        """Return a new process of the stack, unknown to the stack itself."""
        process = processes.Process(self.cloud.folder, processes.Program(
            name, command, ready, options={'cwd': base.ROOT}, environ={
                'OS_NOVA_DISABLE_EVENTLET_PATCHING': '1',
                'OS_NOVA_CONFIG_DIR': self.etc(), 'PYTHONWARNINGS': 'ignore',
                'BLAZAR_CLOCK': self.clock,
            }))
        self.addCleanup(process.kill)
        process.start()
        return process

    def etc(self, *path):
        return os.path.join(self.cloud.folder, 'etc', 'nova', *path)

    def without(self, *names):
        """Stop these processes of the stack until the test ends."""
        for name in names:
            self.addCleanup(self.cloud.restart, name)
            self.cloud.stop(name)

    def crashing(self, step, what, *arguments, ready, ending='SIGKILL',
                 number=1):
        """Return a process that dies or freezes at a step.

        :param step: None if it does neither
        """
        name = '-' if step is None else step.name
        return self.process(
            f'crashing-{what.split(".")[-1]}-{name.lower()}-{number}',
            [sys.executable, '-m', 'tests.integration.crashing', name,
             ending, what, *arguments], ready)

    def api(self, step, ending='SIGKILL'):
        """Start the only nova-api, which ends at a step, if any."""
        *_python, _script, port, module, threads, server = (
            self.cloud.nova_api_command())
        process = self.crashing(
            step, 'tests.stack.wsgi', port, module, threads, server,
            ready='Serving requests', ending=ending)
        process.wait_until_up(PATIENCE)
        return process

    def listener_dies_at(self, step):
        """Run a listener until it dies at a step."""
        process = self.crashing(step, 'listener', *self.files(),
                                ready='Started')
        self.wait_for(lambda: process.pid is None,
                      f'a listener comes to {step.name}', PATIENCE)
        self.assertNotIn('Traceback', process.written())

    def listener_freezes_at(self, step, number):
        """Run a listener until it freezes at a step, as if it were dead."""
        process = self.crashing(step, 'listener', *self.files(),
                                ready='Started', ending='SIGSTOP',
                                number=number)
        self.wait_for(lambda: f'SIGSTOP at {step.name}' in process.written(),
                      f'a listener freezes at {step.name}', PATIENCE)
        return process

    def new_listener(self):
        process = self.process('listener-after', [
            os.path.join(os.path.dirname(sys.executable), 'blazar-listener'),
            *self.files()], 'Started')
        process.wait_until_up(PATIENCE)
        return process

    def files(self):
        return ['--config-file', self.etc('nova.conf'),
                '--config-file', self.quick]

    def wait_for_status(self, leases, status, seconds=PATIENCE):
        """Wait until all of these leases have a status."""
        for lease_id in leases:
            self.wait_for_lease(lease_id, status, seconds)

    def assert_all_built_once(self, servers):
        for server_id in servers:
            self.assertEqual(1, len(self.spawns(server_id)), server_id)

    def assert_nothing_left(self, *, fix=()):
        """Assert that nothing differs when nothing is in progress."""
        verified = self.verify(*fix)
        self.assertEqual(0, verified.returncode, verified.stdout)


class ListenerTest(CrashTestCase):

    def test_listener_dies_at_each_step_of_start(self):
        self.without('blazar-listener-1', 'blazar-listener-2')
        servers, leases = [], []
        for step in steps_of('START'):
            server_id, lease_id = self.hold(starts_in=3, lasts=600)
            servers.append(server_id)
            leases.append(lease_id)
            self.listener_dies_at(step)
        self.new_listener()
        self.wait_for_status(leases, 'ACTIVE')
        self.assert_all_built_once(servers)
        self.delete(*servers)
        self.wait_for_status(leases, 'TERMINATED')
        self.assert_nothing_left()

    def test_listener_dies_at_each_step_of_admission(self):
        group = self.admin('POST', '/os-server-groups', {'server_group': {
            'name': 'together', 'policy': 'affinity'}},
            microversion=base.MICROVERSION)['server_group']['id']
        self.addCleanup(self.admin.request, 'DELETE',
                        f'/os-server-groups/{group}')
        self.addCleanup(self.remove_what_is_new)
        large = {'flavor': 'm1.large', 'client': self.admin}
        # Two fill the host of their group.
        first = self.boot({**self.lease_hints(time.time() + 600),
                           'group': group}, min_count=2, max_count=2, **large)
        first = self.servers_of(self.lease_of(first['server']['id'])['id'])
        waits = self.boot({**self.lease_hints(
            'now', 1200, lease_type='retry', retries=60,
            retry_interval='10s'), 'group': group}, **large)['server']['id']
        lease_id = self.lease_of(waits)['id']
        self.assertEqual('WAITING', self.lease(lease_id)['status'])
        self.without('blazar-listener-1', 'blazar-listener-2')
        self.listener_dies_at(Step.RETRY_TRIED)
        self.assertEqual('WAITING', self.lease(lease_id)['status'])
        self.delete(*first)
        self.listener_dies_at(Step.RETRY_ADMITTED)
        self.new_listener()
        self.wait_for_status([lease_id], 'ACTIVE')
        self.assert_all_built_once([waits])
        self.delete(waits)
        self.wait_for_status([lease_id], 'TERMINATED')
        self.assert_nothing_left()

    def test_frozen_listeners_send_same_build_once(self):
        """The second listener considers the first one dead."""
        self.without('blazar-listener-1', 'blazar-listener-2')
        server_id, lease_id = self.hold(starts_in=3, lasts=600)
        frozen = [self.listener_freezes_at(Step.START_READY, number)
                  for number in (1, 2)]
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
        self.wait_for_status([lease_id], 'ACTIVE')
        # Both complete what they have started.
        for process in frozen:
            process.stop()
        self.wait_for_server(server_id)
        self.assert_built_once(server_id)
        self.assertEqual(1, sum(
            process.written().count('sending its build')
            for process in frozen))
        self.new_listener()
        self.delete(server_id)
        self.wait_for_status([lease_id], 'TERMINATED')
        self.assert_nothing_left()

    def test_leases_claimed_together_survive_death_and_freeze(self):
        """The process that has read them dies, or freezes, before sending."""
        self.without('blazar-listener-1', 'blazar-listener-2')
        held = [self.hold(starts_in=3, lasts=600) for _number in range(4)]
        servers, leases = zip(*held)
        # All that are due when a listener starts are claimed together.
        self.wait_for(lambda: time.time() > max(
            self.lease(one)['start_date'] for one in leases),
            'all of them are due')
        self.listener_dies_at(Step.START_READY)
        frozen = self.listener_freezes_at(Step.START_READY, 1)
        after = self.new_listener()
        # Not all of them: its other threads may be frozen while they hold
        # locks on rows of Nova.
        self.wait_for(lambda: any(
            self.lease(one)['status'] == 'ACTIVE' for one in leases),
            'another listener starts one of them', PATIENCE)
        os.kill(frozen.pid, signal.SIGCONT)
        self.wait_for_status(leases, 'ACTIVE')
        frozen.stop()
        self.assert_all_built_once(servers)
        self.assertEqual(len(leases), sum(
            process.written().count('sending its build')
            for process in (frozen, after)))
        self.delete(*servers)
        self.wait_for_status(leases, 'TERMINATED')
        self.assert_nothing_left()

    def test_listener_dies_at_each_step_of_end(self):
        ending = steps_of('END')
        first = 40
        servers = [self.boot(self.lease_hints(
            time.time() + 3, first + 12 * number,
            on_end='delete' if number else 'snapshot'))['server']['id']
            for number, _step in enumerate(ending)]
        leases = [self.lease_of(one)['id'] for one in servers]
        self.wait_for_status(leases, 'ACTIVE')
        # Its end has all steps.
        self.demo('POST', f'/servers/{servers[0]}/action', {'rescue': {}})
        self.wait_for_server(servers[0], 'RESCUE')
        self.without('blazar-listener-1', 'blazar-listener-2')
        for step in ending:
            self.listener_dies_at(step)
        self.new_listener()
        self.wait_for_status(leases, 'TERMINATED')
        self.assert_all_built_once(servers)
        for server_id in servers:
            self.assertEqual([], self.guests(server_id))
        self.assertEqual(1, len(self.demo(
            'GET', f'/images?status=active&instance_uuid={servers[0]}',
            service='glance')['images']))
        self.assert_nothing_left()

    def test_frozen_listener_does_not_act_on_servers_after_end(self):
        for number, step in enumerate((Step.END_BEGUN, Step.END_UNBLOCKED)):
            self.without('blazar-listener-1', 'blazar-listener-2')
            first = self.new_listener()
            server_id = self.boot(self.lease_hints(
                'now', 30, on_end='stop'))['server']['id']
            lease_id = self.lease_of(server_id)['id']
            self.wait_for_status([lease_id], 'ACTIVE')
            if step is Step.END_UNBLOCKED:
                self.demo('POST', f'/servers/{server_id}/action',
                          {'rescue': {}})
                self.wait_for_server(server_id, 'RESCUE')
            first.stop()
            frozen = self.listener_freezes_at(step, number)
            after = self.new_listener()
            self.wait_for_status([lease_id], 'TERMINATED')
            self.wait_for_server(server_id, 'SHUTOFF')
            self.demo('POST', f'/servers/{server_id}/action',
                      {'os-start': None})
            self.wait_for_server(server_id)
            os.kill(frozen.pid, signal.SIGCONT)
            if step is Step.END_BEGUN:
                self.wait_for(lambda frozen=frozen: (
                    'has left the lease meanwhile' in frozen.written()),
                    'it sees that the server has left', PATIENCE)
            # It completes what it has started.
            frozen.stop()
            self.assertEqual(1, len([
                one for one in self.demo(
                    'GET', f'/servers/{server_id}/os-instance-actions',
                )['instanceActions'] if one['action'] == 'stop']))
            self.assertEqual('ACTIVE', self.server(server_id)['status'])
            self.delete(server_id)
            self.assert_nothing_left()
            after.stop()


class HostsTest(CrashTestCase, test_hosts.HostsTestCase):
    """Whole hosts: wherever a listener dies, the next one continues."""

    STARTS = (Step.START_CLAIMED, Step.OPEN_HELD, Step.OPEN_OPENED,
              Step.START_CARRIED_OUT)
    #: No server of it has a booking of its own that would reach END_GONE.
    ENDS = (Step.END_CLAIMED, Step.END_BEGUN, Step.END_ASKED,
            Step.CLOSE_CLEANED, Step.CLOSE_CLOSED, Step.END_OVER,
            Step.END_CARRIED_OUT)

    def lease_one(self):
        lease = self.make(time.time(), 3600, reservations=[{
            'resource_type': 'physical:host', 'min': 1, 'max': 1,
            'hypervisor_properties': '', 'resource_properties': ''}])
        return lease['id'], lease['reservations'][0]['id']

    def test_listener_dies_at_each_step_of_start_and_end(self):
        hosts = self.hosts()[:len(self.ENDS)]
        for name in hosts:
            self.enrol(name)
        self.without('blazar-listener-1', 'blazar-listener-2')
        leases = []
        for step in self.STARTS:
            leases.append(self.lease_one())
            self.listener_dies_at(step)
        leases += [self.lease_one()
                   for _number in range(len(hosts) - len(leases))]
        listener = self.new_listener()
        self.wait_for_status([one for one, _of_it in leases], 'ACTIVE')
        there = self.aggregates()
        self.assertEqual((hosts, []), (sorted(
            there[of_it][0] for _one, of_it in leases), there['freepool']))
        servers = [self.boot({'reservation': of_it})['server']['id']
                   for _one, of_it in leases]
        for server_id in servers:
            self.wait_for_server(server_id)
        listener.stop()
        for (lease_id, _of_it), step in zip(leases, self.ENDS, strict=True):
            self.admin('DELETE', f'/leases/{lease_id}',
                       service='reservation')
            self.listener_dies_at(step)
        self.new_listener()
        self.wait_for_status([one for one, _of_it in leases], 'TERMINATED')
        self.assert_all_built_once(servers)
        self.assertEqual([], self.server_ids())
        self.assertEqual(
            {'freepool': hosts, 'blazar_pool': hosts}, self.aggregates())
        self.assert_nothing_left()


class RoomTest(CrashTestCase, test_best_effort.CheapTestCase):
    """A listener dies while it frees a host for a lease."""

    def test_listener_dies_at_each_step_of_best_effort_plan(self):
        before = self.booted_on_each()
        self.without('blazar-listener-1', 'blazar-listener-2')
        lease = self.ask_for_one()
        self.assertEqual('IN_PROGRESS', lease['status'])
        # Whether the recorded migration was requested is unknown: it is
        # waited for, and then the other server is migrated.
        for step in (Step.ROOM_PLANNED, Step.MOVE_RECORDED,
                     Step.MOVE_REQUESTED, Step.ROOM_SEEN):
            self.listener_dies_at(step)
        self.new_listener()
        self.wait_for_lease(lease['id'], 'ACTIVE', PATIENCE)
        self.assert_freed(lease, before)
        asked = [one['instance_uuid'] for one in self.admin(
            'GET', '/os-migrations')['migrations']
            if one['instance_uuid'] in before]
        self.assertEqual(1, len(asked), asked)


class EnrollmentTest(CrashTestCase, test_hosts.HostsTestCase):
    """A process dies while it enrolls or removes a host."""

    def manage_dies_at(self, step, *words):
        process = self.crashing(step, 'manage', '--config-file', self.etc(
            'nova.conf'), 'host', *words, ready=f'SIGKILL at {step.name}')
        self.wait_for(lambda: process.pid is None,
                      f'the command comes to {step.name}', PATIENCE)
        self.assertIn(f'SIGKILL at {step.name}', process.written())

    def manage(self, *words, gone=None):
        """Run a command about hosts; return its output.

        :param gone: its message if a listener has completed that before
        """
        done = self.run_process(
            'blazar-nova-manage', '--config-file', self.etc('nova.conf'),
            'host', *words)
        if gone is None or gone not in done.stdout + done.stderr:
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def enrolled(self):
        """Return the ids and the states of the hosts, by their names."""
        return {name: (number, status) for number, name, status in re.findall(
            r'\| (\d+) +\| (\S+) +\| (\S+) ', self.manage('list'))}

    def forced(self, host):
        """Return the resulting status of a server forced onto a host."""
        server_id = self.boot(client=self.admin, availability_zone=(
            f'nova:{host}'))['server']['id']
        self.addCleanup(self.delete, server_id)
        return self.wait_for(
            lambda: {self.server(server_id)['status']} - {'BUILD'},
            f'server {server_id} is built or not').pop()

    def test_command_dies_at_each_step_of_enrollment_and_removal(self):
        ways = steps_of('ENROL')
        hosts = self.hosts()[:len(ways)]
        for host, step in zip(hosts, ways, strict=True):
            self.manage_dies_at(step, 'add', host)
        self.assertEqual({host: 'enrolling' for host in hosts}, {
            host: status for host, (_id, status) in self.enrolled().items()})
        self.assertEqual(['ERROR'] * len(hosts), [
            self.forced(host) for host in hosts])
        # Whichever process completes one, it is complete.
        self.manage('add', hosts[0])
        self.assert_nothing_left(fix=('--fix',))
        enrolled = self.enrolled()
        self.assertEqual({'enrolled'}, {
            status for _id, status in enrolled.values()})
        self.assertEqual({'freepool': hosts, 'blazar_pool': hosts},
                         self.aggregates())
        ways = steps_of('LEAVE')
        for host, step in zip(hosts, ways):
            self.manage_dies_at(step, 'remove', enrolled[host][0])
        self.manage('remove', enrolled[hosts[0]][0],
                    gone='could not be found')
        self.assert_nothing_left(fix=('--fix',))
        left = hosts[len(ways):]
        self.assertEqual(left, sorted(self.enrolled()))
        self.assertEqual({'freepool': left, 'blazar_pool': left},
                         self.aggregates())
        for host in left:
            self.manage('remove', enrolled[host][0])
        self.assertEqual('ACTIVE', self.forced(hosts[0]))


class ApiTest(CrashTestCase, test_lease_api.LeaseApiTestCase):

    def boot_unanswered(self, process, hints=None, **boot):
        """Boot with a nova-api that dies before it answers."""
        exc = self.assertRaises(
            requests.RequestException, self.boot, hints, **boot)
        if self.cloud.settings.api == 'uwsgi':
            # This answer is that of nginx.
            self.assertEqual(502, exc.response.status_code)
        else:
            self.assertIsInstance(exc, requests.ConnectionError)
        # Its connections end a moment before the process.
        self.wait_for(lambda: process.pid is None,
                      f'{process.name} comes to its step')

    def test_api_dies_at_each_step_of_boot_from_now_on(self):
        self.without('nova-api-1', 'nova-api-2', 'blazar-listener-1',
                     'blazar-listener-2')
        before, leases = set(self.leases()), []
        for step in steps_of('BOOT'):
            process = self.api(step)
            self.boot_unanswered(process, self.lease_hints())
            lease_id, = set(self.leases()) - before
            before.add(lease_id)
            leases.append(lease_id)
        self.cloud.restart('nova-api-1')
        servers = [server_id for lease_id in leases
                   for server_id in self.servers_of(lease_id)]
        self.assertEqual(['PENDING', 'STARTING'], [
            self.lease(lease_id)['status'] for lease_id in leases[:2]])
        self.new_listener()
        # Whether the second one was sent cannot be known.
        self.wait_for_status(leases[:1], 'ACTIVE', 20)
        self.wait_for_status(leases, 'ACTIVE')
        self.assert_all_built_once(servers)
        self.delete(*servers)
        self.wait_for_status(leases, 'TERMINATED')
        self.assert_nothing_left(fix=('--fix', '--revoke-trusts'))

    def stand_still(self, step, status):
        """Freeze nova-api at a step, and let it continue after a listener has
        built what it was about to send.
        """
        self.without('nova-api-1', 'nova-api-2', 'blazar-listener-1',
                     'blazar-listener-2')
        before, process = set(self.leases()), self.api(step, 'SIGSTOP')
        with futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.boot, self.lease_hints())
            self.wait_for(
                lambda: f'SIGSTOP at {step.name}' in process.written(),
                f'nova-api freezes at {step.name}', PATIENCE)
            try:
                lease_id, = set(self.leases()) - before
                self.assertEqual(status, self.lease(lease_id)['status'])
                self.new_listener()
                self.wait_for_status([lease_id], 'ACTIVE')
            finally:
                os.kill(process.pid, signal.SIGCONT)
            server_id = answer.result(PATIENCE)['server']['id']
        # The process serves the next request, so it has continued.
        self.wait_for_server(server_id)
        self.assert_built_once(server_id)
        self.delete(server_id)
        self.wait_for_status([lease_id], 'TERMINATED')
        self.assertEqual([], self.guests(server_id))
        self.assert_nothing_left()
        return process.written()

    def test_api_freezes_before_it_takes_permit(self):
        self.assertIn('blazar-listener sends its build',
                      self.stand_still(Step.BOOT_RESERVED, 'PENDING'))

    def test_api_freezes_after_it_has_taken_permit(self):
        self.assertIn('was stopped between the permit',
                      self.stand_still(Step.BOOT_TAKEN, 'STARTING'))

    def test_api_dies_at_each_step_of_boot_with_slot(self):
        lease = self.make(time.time(), reservations=[{
            'resource_type': 'virtual:instance', 'vcpus': 1, 'memory_mb': 64,
            'disk_gb': 1, 'amount': len(steps_of('SLOT'))}])
        self.wait_for_lease(lease['id'], 'ACTIVE')
        flavor_id = self.get(lease['id'])['reservations'][0]['flavor_id']
        self.without('nova-api-1', 'nova-api-2', 'blazar-listener-1',
                     'blazar-listener-2')
        servers = []
        for step in steps_of('SLOT'):
            process = self.api(step)
            self.boot_unanswered(process, flavorRef=flavor_id)
            servers += set(self.servers_of(lease['id'])) - set(servers)
        self.cloud.restart('nova-api-1')
        taken, dispatched, sent = servers
        self.wait_for_server(sent)
        self.new_listener()
        self.wait_for_server(taken, seconds=20)
        # Whether this one was sent cannot be known.
        self.wait_for_server(dispatched, 'ERROR')
        for server_id in (taken, sent):
            self.assert_built_once(server_id)
        self.assertEqual([], self.spawns(dispatched))
        self.delete(*servers)
        self.wait_for(lambda: not self.servers_of(lease['id']),
                      'the slots are free')
        self.assert_nothing_left()

    def test_api_dies_at_each_step_of_deferred_create(self):
        self.without('nova-api-1', 'nova-api-2')
        before = set(self.leases())
        for step in steps_of('CREATE'):
            process = self.api(step)
            self.boot_unanswered(
                process, self.lease_hints(time.time() + 20))
        self.cloud.restart('nova-api-1')
        # Only the last one was recorded: it starts, the others are deleted.
        lease_id, = set(self.leases()) - before
        server_id, = self.servers_of(lease_id)
        self.wait_for_status([lease_id], 'ACTIVE')
        self.assert_built_once(server_id)
        self.assertEqual(1, self.verify().returncode)
        self.assert_nothing_left(fix=('--fix', '--revoke-trusts'))
        self.assertEqual([server_id], self.server_ids())
        self.delete(server_id)
        self.wait_for_status([lease_id], 'TERMINATED')
        self.assert_nothing_left()


class InfrastructureTest(CrashTestCase):
    """Events that are due during an outage are carried out after it."""

    def survive(self, name):
        held = [self.hold(starts_in=8 + 2 * number, lasts=600)
                for number in range(3)]
        ending = self.hold(starts_in=2, lasts=14)
        servers, leases = zip(*held)
        self.wait_for_status([ending[1]], 'ACTIVE')
        self.cloud.kill(name)
        due = time.time() + 16
        self.wait_for(lambda: time.time() > due, 'all are due', PATIENCE)
        self.cloud.restart(name)
        # On a slow machine the first is being started when it dies.
        self.wait_for_status(leases, 'ACTIVE', LOST)
        self.wait_for_status([ending[1]], 'TERMINATED')
        self.assert_all_built_once((*servers, ending[0]))
        self.delete(*servers)
        self.wait_for_status(leases, 'TERMINATED')
        self.assert_nothing_left(fix=('--fix',))

    def test_due_events_survive_death_of_message_bus(self):
        self.survive('rabbitmq')

    def test_due_events_survive_death_of_database(self):
        self.survive('database')
