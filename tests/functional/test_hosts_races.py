# SPDX-License-Identifier: Apache-2.0

"""Whole hosts: no server gets into a wrong lease or stays in one."""

from concurrent import futures
import functools
import pydoc
import threading
import types

import fixtures
from nova.compute import manager
from nova import context as nova_context
from nova import exception
from nova.scheduler import utils
from testtools import matchers

from blazar_core.capacity import scheduler_claims
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import nova_scheduler
from blazar_nova.compat import pool
from blazar_nova.compat import unbuilt_servers
from blazar_nova.services import host_enrollment
from blazar_nova.verify import verification
from tests.functional import whole_hosts_base

HOUR = 3600


class AlternatesTestCase(whole_hosts_base.HostsTestCase):
    """A build fails on its host: the conductor itself claims the next one.
    """

    def setUp(self):
        super().setUp()
        # A conductor in a process of its own does not load the plugin.
        alone = types.SimpleNamespace(**vars(utils))
        alone.claim_resources = nova_scheduler._novas
        self.useFixture(fixtures.MonkeyPatch(
            'nova.conductor.manager.scheduler_utils', alone))

    def fail_once(self, meanwhile):
        """Make the next build fail; return the list of hosts of builds.

        :param meanwhile: called with the host before it fails
        """
        hosts = []

        def spawn(real, name, *args, **kwargs):
            hosts.append(name)
            if len(hosts) == 1:
                meanwhile(name)
                raise exception.NovaException('broken')
            return real(*args, **kwargs)

        for name, compute in self.computes.items():
            driver = compute.manager.driver
            self.useFixture(fixtures.MockPatchObject(
                driver, 'spawn', functools.partial(
                    spawn, driver.spawn, name)))
        return hosts

    def verified(self):
        return verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None,
            0).run(True)


class TestAlternates(AlternatesTestCase):

    def test_failed_build_is_retried_within_reservation(self):
        self.enrol('host1', 'host2')
        _lease, reservation_id = self.lease_hosts(2, 2)
        builds = self.fail_once(lambda _host: None)
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'host1', 'host2'}, {*builds})

    def test_failed_build_in_single_host_lease_has_no_alternate(self):
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        self.fail_once(lambda _host: None)
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ERROR')
        self.assertEqual({}, self.guests())

    def test_unleased_server_is_not_retried_on_enrolled_hosts(self):
        self.enrol('host1')
        _lease, _reservation_id = self.lease_hosts()
        builds = self.fail_once(lambda _host: None)
        server = self.boot('ordinary')
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual({'host2', 'plain'}, {*builds})

    def test_server_being_retried_is_deleted_when_lease_ends(self):
        """The lease ends while the build is between two hosts."""
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts(2, 2)
        real, ended, claimed = nova_scheduler._novas, [], []

        def end(*args, **kwargs):
            if not ended:
                ended.append(1)
                self.delete(lease['id'])
                self.look()
                self.run_until(self.clock.now() + 60)
            try:
                return real(*args, **kwargs)
            finally:
                claimed.append(1)

        self.fail_once(lambda _host: None)
        with fixtures.MonkeyPatch(
                'nova.conductor.manager.scheduler_utils.claim_resources', end):
            server = self.within('in', reservation_id)
            self.wait_for(lambda: claimed)

        def is_free():
            # Nova's conductor has claimed resources for a deleted server; each
            # nova-compute frees them, once a minute.
            for compute in self.computes.values():
                compute.manager.update_available_resource(
                    nova_context.get_admin_context())
            return not self.exists(server['id']) and (
                not self.allocations(server['id'])) and not self.guests()

        self.wait_for(is_free)
        self.wait_until_over(lease['id'])

    def test_verify_reports_build_that_began_before_enrollment(self):
        """The conductor bypasses the plugin; ``verify`` reports it."""
        def lease_others(host):
            self.enrol(*self.hosts.keys() - {host})
            self.look()
            self.leased, self.reservation_id = self.lease_hosts(2, 2)

        self.fail_once(lease_others)
        server = self.boot('stranger')
        self.wait_for_status(server['id'], 'ACTIVE')
        host = self.host_of(server)
        self.assertIn(host, self.aggregates()[self.reservation_id])
        self.listener.server_sync.compare_all()
        self.assertEqual([
            f'Host {host} is assigned to reservation {self.reservation_id}, '
            f'but has servers that do not belong to it: {server["id"]}.'],
            [one.text for one in self.verified().left])
        # It does not end with the lease, and no other lease gets the host.
        self.delete(self.leased['id'])
        self.run_until(self.clock.now() + 600)
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertIn(f'{server["id"]}.', [one.text[-37:] for one in (
            self.verified().left)])
        self.make(code=409, reservations=[self.hosts_wanted(2, 2)])
        self.admin.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 600)
        self.ask('GET', f'/leases/{self.leased["id"]}', code=404)
        self.look()
        self.assert_verified()


class TestUnderWay(AlternatesTestCase):
    """A host is enrolled while builds are in progress that may have it as
    an alternate.
    """

    def setUp(self):
        super().setUp()
        self.go_on = threading.Event()
        self.addCleanup(self.go_on.set)

    def stop(self, name):
        """Boot a server whose build is paused, and fails when it continues;
        return the server and the hosts on which it is not.
        """
        began = []

        def meanwhile(host):
            began.append(host)
            self.assertTrue(self.go_on.wait(60))

        self.fail_once(meanwhile)
        server = self.boot(name)
        self.wait_for(lambda: began)
        return server, sorted(self.hosts.keys() - {*began})

    def test_host_that_gets_server_during_enrollment_is_refused(self):
        server, others = self.stop('late')
        told = []

        def pause(server_ids):
            told.append(server_ids)
            self.go_on.set()

        refused = []
        for host in others:
            try:
                self.enrolling.add(host, {}, pause=pause)
            except errors.Conflict as exc:
                refused.append(host)
                self.assertIn('it has 1 server', str(exc))
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual([server['id']], told[0])
        self.assertEqual([self.host_of(server)], refused)
        self.assertEqual(
            [host for host in others if host not in refused],
            [one['service_name'] for one in self.enrolling.listed()])

    def test_leftover_claim_of_deleted_server_delays_enrollment(self):
        """Nova's conductor claims resources for a deleted server."""
        server, _others = self.stop('gone')
        real, claimed = nova_scheduler._novas, []

        def claim(*args, **kwargs):
            self.alice.delete_server(server['id'])
            self.wait_until_gone(server['id'])
            claimed.append(real(*args, **kwargs))
            return claimed[-1]

        with fixtures.MonkeyPatch(
                'nova.conductor.manager.scheduler_utils.claim_resources',
                claim):
            self.go_on.set()
            self.wait_for(lambda: claimed)
        self.assertEqual([True], claimed)
        provider, = compute_hosts.allocations(server['id'])
        host, = (name for name, compute in self.computes.items()
                 if compute.manager.rt.compute_nodes[name].uuid == provider)
        exc = self.assertRaises(errors.Conflict, self.enrol, host)
        self.assertThat(str(exc), matchers.Contains(
            f'{server["id"]}. After a deletion, Nova may need a minute to '
            'free the capacity.'))
        self.computes[host].manager.update_available_resource(
            nova_context.get_admin_context())
        self.enrol(host)
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits(host))

    def test_enrollment_by_api_stops_waiting_for_builds(self):
        server, (host, _other) = self.stop('slow')
        with fixtures.MonkeyPatch(
                'blazar_nova.services.host_enrollment.PATIENCE', 0):
            answer = self.ask('POST', '/os-hosts', {'name': host}, code=409,
                              client=self.admin)
        self.assertThat(str(answer), matchers.MatchesAll(
            matchers.Contains(f'1 server that it builds or resizes: '
                              f'{server["id"]}.'),
            matchers.Contains('Try again in a minute')))
        self.assertEqual([], self.enrolling.listed())
        self.assertEqual(set(), self.traits(host))

    def test_refused_enrollment_does_not_cancel_enrollment_in_progress(self):
        server, (host, _other) = self.stop('slow')
        impatient = host_enrollment.patient(0)

        def meanwhile(_server_ids):
            # Neither the same request nor ``verify`` may cancel it.
            self.assertRaises(errors.Conflict, self.enrolling.add, host, {},
                              pause=impatient)
            with fixtures.MonkeyPatch(
                    'blazar_nova.services.host_enrollment.PATIENCE', 0):
                self.assertEqual(['enrolling'], [
                    one.key[0] for one in self.verified().left])
            self.go_on.set()
            self.wait_for_status(server['id'], 'ACTIVE')

        others = {*self.hosts} - {host}
        with fixtures.MonkeyPatch('blazar_nova.compat.host_servers.everybody',
                                  lambda _host: set()):
            self.enrolling.add(host, {}, pause=meanwhile)
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits(host))
        self.assertEqual(set(), self.traits(min(others)))
        # Nor after it is completed.
        self.assertRaises(errors.Conflict, self.enrolling.add, host, {},
                          pause=impatient)
        self.assertEqual(['enrolled'], [
            one['status'] for one in self.enrolling.listed()])

    def overtaken(self, meanwhile):
        """Continue an enrollment that was given up; return its error.

        :param meanwhile: called after that, before the enrollment continues
        """
        waits, given_up = threading.Event(), threading.Event()
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.host_servers.under_way',
            lambda: set() if given_up.is_set() else {'a server'}))

        def late(_server_ids):
            waits.set()
            self.assertTrue(given_up.wait(60))

        with futures.ThreadPoolExecutor(1) as executor:
            def first(_server_ids):
                self.going_on = executor.submit(
                    self.listener.parts.host_enrollment.add, 'host1', {},
                    pause=late)
                self.assertTrue(waits.wait(60))
                raise errors.Conflict('It takes too long.')

            self.assertRaises(errors.Conflict, self.enrolling.add, 'host1', {},
                              pause=first)
            self.assertEqual(set(), self.traits('host1'))
            meanwhile()
            given_up.set()
            return str(self.assertRaises(
                errors.Conflict, self.going_on.result))

    def test_canceled_enrollment_does_not_complete_later_one(self):
        def begin_and_die():
            # Before the host is closed to other servers again.
            with fixtures.MonkeyPatch('blazar_nova.compat.pool.join',
                                      lambda _host: 1 / 0):
                self.assertRaises(ZeroDivisionError, self.enrol, 'host1')

        self.assertIn('was canceled by another request',
                      self.overtaken(begin_and_die))
        self.assertEqual(['enrolling'], [
            one['status'] for one in self.enrolling.listed()])

    def test_canceled_enrollment_does_not_remove_enrolled_host(self):
        """The host is enrolled between a check and the next step."""
        real, again = pool.leave, []

        def leave(host, *more):
            if not again:
                again.append(1)
                self.enrol('host1')
            real(host, *more)

        self.overtaken(lambda: self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.pool.leave', leave)))
        self.assertEqual(['enrolled'], [
            one['status'] for one in self.enrolling.listed()])
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))

    def test_verify_completes_enrollment_as_not_reservable(
            self):
        with fixtures.MonkeyPatch('blazar_nova.compat.pool.join',
                                  lambda _host: 1 / 0):
            self.assertRaises(ZeroDivisionError, self.enrolling.add, 'host1',
                              {'gpu': 'A100'}, (), False, pause=None)
        self.verified()
        host, = self.enrolling.listed()
        self.assertEqual(('enrolled', False, 'A100'), tuple(
            host[key] for key in ('status', 'reservable', 'gpu')))

    def test_interrupted_command_prints_state_of_host(self):
        def interrupted():
            raise KeyboardInterrupt

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.host_servers.under_way', interrupted):
            code, text = self.command('host', 'add', 'host1')
        self.assertEqual(1, code)
        self.assertIn('Host host1 accepts no new servers until', text)
        self.assertEqual(['enrolling'], [
            one['status'] for one in self.enrolling.listed()])

    def test_verbose_command_prints_its_steps(self):
        code, text = self.command('host', 'add', 'host1')
        self.assertEqual((0, 1), (code, text.count('\n')), text)
        host, = self.enrolling.listed()
        code, text = self.command('-v', 'host', 'remove', str(host['id']))
        self.assertEqual((0, [
            f'Making host {host["id"]} available to servers of all projects '
            '...',
            f'Host {host["id"]} is available to all workloads again.']),
            (code, text.splitlines()))
        code, text = self.command('host', 'add', 'host1', '--verbose')
        self.assertEqual((0, [
            'Looking for host host1 in all cells ...',
            'Excluding servers without a lease from it ...',
            'Looking for builds and resizes in progress ...',
            'Looking for existing servers ...',
            f'Host host1 has the ID {host["id"]}: it serves leases only.']),
            (code, text.splitlines()))

    def test_command_names_servers_it_waits_for(self):
        server, (host, _other) = self.stop('slow')
        real = host_servers.under_way

        def under_way():
            # The first check finds it; then it ends. It is built before it is
            # deleted: of a server that is deleted between two hosts, the
            # conductor's claim may remain, and delay the enrollment until
            # nova-compute frees it.
            found = real()
            if found:
                self.go_on.set()
                self.wait_for_status(server['id'], 'ACTIVE')
                self.alice.delete_server(server['id'])
                self.wait_until_gone(server['id'])
                self.wait_for(
                    lambda: not compute_hosts.allocations(server['id']))
            return found

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.host_servers.under_way', under_way):
            code, text = self.command('host', 'add', host)
        self.assertEqual(0, code, text)
        self.assertRegex(text, rf'Waiting: .* 1 server .*{server["id"]}\.\n.*'
                               rf'it serves leases only')

    def test_enrollment_does_not_wait_for_reserved_servers(self):
        server = self.boot('later', self.lease_hints(start_in=HOUR), metadata={
            'vm_state': 'building'})
        self.wait_for_status(server['id'], 'RESERVED')
        asked = []
        self.boot('alike', self.lease_hints(start_in=HOUR))

        def build_request(real, context, server_id):
            asked.append(server_id)
            return real(context, server_id)

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.unbuilt_servers.build_request',
                functools.partial(build_request,
                                  unbuilt_servers.build_request)):
            self.assertEqual(set(), host_servers.under_way())
        # Ambiguous metadata cost more than one query.
        self.assertEqual([server['id']], asked)

    def test_enrollment_waits_for_unscheduled_builds(self):
        self.useFixture(fixtures.MonkeyPatch(
            'nova.conductor.manager.ComputeTaskManager.'
            'schedule_and_build_instances', lambda *args, **kwargs: None))
        servers = {self.boot('one')['id'], self.boot('two', metadata={
            'vm_state': 'reserved'})['id']}
        self.assertEqual(servers, host_servers.under_way())

    def test_enrollment_waits_for_resizes_in_progress(self):
        server = self.boot_active('grows')
        real, began = manager.ComputeManager.prep_resize, []

        def prep_resize(*args, **kwargs):
            began.append(1)
            self.assertTrue(self.go_on.wait(60))
            return real(*args, **kwargs)

        self.useFixture(fixtures.MonkeyPatch(
            'nova.compute.manager.ComputeManager.prep_resize', prep_resize))
        self.assertEqual(set(), host_servers.under_way())
        self.alice.post_server_action(
            server['id'], {'resize': {'flavorRef': '3'}})
        self.wait_for(lambda: began)
        self.assertEqual({server['id']}, host_servers.under_way())
        self.go_on.set()
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')
        self.assertEqual(set(), host_servers.under_way())


class TestNextLease(whole_hosts_base.HostsTestCase):
    """A host passes from one lease to the next while a server arrives.
    """

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        self.first, self.first_id = self.lease_hosts()
        self.second = None

    def hand_over(self):
        """End the first lease and start the second one."""
        self.ask('DELETE', f'/leases/{self.first["id"]}', code=204)
        self.look()
        self.run_until(self.clock.now() + 60)
        self.look()
        self.second = self.make(
            client=self.bob, reservations=[self.hosts_wanted()])
        self.run_until(clocks.SystemClock().now())

    def handed_over(self, module, name):
        """Do the same when a server arrives, just before a function."""
        real = getattr(module, name)

        def late(*args, **kwargs):
            if self.second is None:
                self.hand_over()
            return real(*args, **kwargs)

        return fixtures.MonkeyPatch(f'{module.__name__}.{name}', late)

    def stays_out(self, server):
        """Assert that a server has no guest or allocation, and is in ERROR."""
        self.wait_for_status(server['id'], 'ERROR')
        self.assertEqual(({}, {}), (
            self.guests(), self.allocations(server['id'])))
        self.assertEqual([(self.second['reservations'][0]['id'],)], self.query(
            "SELECT assigned_to FROM hosts WHERE name = 'host1'"))
        self.assert_verified()

    def test_server_that_passed_filter_cannot_enter_next_lease(self):
        with self.handed_over(utils, 'claim_resources'):
            self.stays_out(self.within('late', self.first_id))

    def test_server_claimed_in_database_cannot_enter_next_lease(self):
        with self.handed_over(nova_scheduler, '_novas'):
            self.stays_out(self.within('late', self.first_id))

    def test_server_allocated_in_placement_delays_next_lease(self):
        """Its allocation is found: no other lease gets the host."""
        real = scheduler_claims.Claims.is_within

        def late(*args):
            self.assertRaises(matchers.MismatchError, self.hand_over)
            return real(*args)

        with fixtures.MonkeyPatch(
                'blazar_core.capacity.scheduler_claims.Claims.is_within',
                late):
            server = self.within('late', self.first_id)
            self.wait_until_gone(server['id'])
        self.assertEqual({}, self.guests())
        self.look()
        self.wait_until_over(self.first['id'])

    def test_other_servers_are_kept_out_at_each_step_of_start(self):
        """Servers without a lease, and those of the host's previous lease."""
        self.delete(self.first['id'])
        self.look()
        self.run_until(self.clock.now() + 60)
        self.look()
        tried = []
        for place in ('blazar_nova.compat.aggregate_members.put',
                      'blazar_nova.compat.providers.change',
                      'blazar_nova.compat.aggregate_members.tell'):
            self.useFixture(fixtures.MonkeyPatch(place, self.step(
                pydoc.locate(place), tried)))
        lease = self.make(client=self.bob, reservations=[self.hosts_wanted()])
        for _again in range(3):
            # A claim counts for a while, and the start waits until it expires.
            self.look()
            self.run_until(self.clock.now() + 60)
        self.assertEqual(
            'ACTIVE', self.get(lease, client=self.bob)['status'])
        self.assertGreater(len(tried), 4)
        self.assertEqual({}, self.guests())
        self.assert_verified()

    def step(self, real, tried):
        def step(*args, **kwargs):
            message = self.refused(400, self.within, 'late', self.first_id)
            self.assertIn('none was found', message)
            server = self.boot('forced', client=self.admin,
                               availability_zone='nova:host1')
            self.wait_for_status(server['id'], 'ERROR')
            self.admin.delete_server(server['id'])
            tried.append(server)
            return real(*args, **kwargs)

        return step
