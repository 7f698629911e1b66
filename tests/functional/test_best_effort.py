# SPDX-License-Identifier: Apache-2.0

"""Leases that need live migration of other servers, on the real Nova."""

from unittest import mock

from nova.conductor.tasks import live_migrate
from nova import exception
from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.capacity import pending
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.lifecycle import best_effort
from blazar_core.plugins import cloud_api
from blazar_nova.compat import nova_cloud
from tests import driven
from tests.functional import api_base
from tests.functional import nova_box
from tests.functional import test_api
from tests.functional import whole_hosts_base

#: A flavor of Nova's tests that uses all of a host.
WHOLE = '4'


class BestEffortTestCase(api_base.ApiTestCase):
    """Three hosts with four CPUs each; on each one are two servers of another
    project.
    """

    hosts = {f'host{number}': nova_box.Capacity(
        vcpus=4, memory_mb=8192, disk_gb=200) for number in (1, 2, 3)}

    def setUp(self):
        super().setUp()
        # An admin, who may select the host.
        self.bob = self.api('f' * 32, 'bob', ('admin', 'member', 'reader'))
        self.servers = [
            self.boot_active(f'bob{number}', client=self.bob,
                             availability_zone=f'nova:host{number % 3 + 1}',
                             )['id'] for number in range(6)]
        # Servers that have just arrived are not migrated.
        self.clock.advance(2 * pending.CLAIM_SECONDS)
        self.run_sync()

    def wanted(self, **params):
        """Boot a server that uses a whole host."""
        return self.boot('mine', flavor=WHOLE, hints=self.lease_hints(
            'mine', duration='1h', lease_type='best_effort', **params))

    def go_on(self, seconds=2):
        self.run_sync()
        self.clock.advance(seconds)
        self.run_due()

    def settle(self):
        """Wait until no server is being migrated."""
        for server_id in self.servers:
            self.wait_for(lambda one=server_id: self.admin.get_server(one)[
                'OS-EXT-STS:task_state'] is None, what='moved')

    def wait_until_verified(self):
        """Wait until ``verify`` finds nothing: Nova frees the capacity at the
        source a moment after the server has moved.
        """
        def verified():
            self.run_sync()
            return not self.compared().left

        self.wait_for(verified, what='a database that agrees with Nova')
        self.assert_verified()

    def where(self):
        """Return the host of each of bob's servers."""
        return {one: self.admin.get_server(one)[
            'OS-EXT-SRV-ATTR:hypervisor_hostname'] for one in self.servers}


class TestBestEffort(BestEffortTestCase):

    def test_migration_is_not_requested_late(self):
        """Nova sets a task first: it is reset if the request is not sent."""
        cloud, server_id = self.listener.parts.cloud, self.servers[0]
        clock, records = (self.listener.parts.clock,
                          objects.RequestSpec.get_by_instance_uuid)

        def move():
            return cloud.move(server_id, None, uuids.lease,
                              cloud_api.Deadline(clock, 20))

        def slowly(*args):
            self.clock.advance(60)
            return records(*args)

        with mock.patch.object(
                objects.RequestSpec, 'get_by_instance_uuid', slowly):
            self.assertEqual('this process stood still.', move())
        with mock.patch.object(
                nova_cloud, '_ping',
                side_effect=errors.CloudUnavailable('no conductor')):
            self.assertRaises(errors.NotSent, move)
        self.assertIsNone(self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'])
        host = self.where()[server_id]
        self.assertEqual('', move())
        self.settle()
        self.assertNotEqual(host, self.where()[server_id])

    def test_lease_starts_after_migration_of_other_servers(self):
        before = self.where()
        server = self.wanted(timeout='10m')
        lease = self.lease('mine')
        self.assertEqual(('IN_PROGRESS', 'best_effort'), (
            lease['status'], lease['lease_type']))
        self.assertEqual('RESERVED', self.alice.get_server(
            server['id'])['status'])
        self.run_until(clocks.SystemClock().now())
        self.assertIn('of 2 servers moved.',
                      self.lease('mine')['status_reason'])
        self.settle()
        self.wait_until_verified()
        for _time in range(20):
            self.go_on()
            if self.lease('mine')['status'] != 'IN_PROGRESS':
                break
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        lease = self.lease('mine')
        self.assertEqual('ACTIVE', lease['status'], lease)
        self.assertGreaterEqual(
            driven.parse_iso(lease['start_date']), self.began)
        moved = [one for one, host in self.where().items()
                 if host != before[one]]
        self.assertEqual(2, len(moved))
        # Their owner sees the lease that caused it.
        for one in moved:
            actions = self.bob.api_get(
                f'/servers/{one}/os-instance-actions').body['instanceActions']
            self.assertIn(('live-migration', f'req-move-{lease["id"]}'), [
                (action['action'], action['request_id'])
                for action in actions])
        self.run_sync()
        self.assert_verified()

    def test_plan_avoids_host_with_failed_migrations(self):
        execute = live_migrate.LiveMigrationTask._execute
        before = self.where()
        # The host that is planned first; migrations from it fail.
        bad = []

        def fail(task):
            bad[:] = bad or [task.instance.host]
            if task.instance.host in bad:
                raise exception.MigrationPreCheckError(reason='It may not.')
            return execute(task)

        # Fix that host or the other of these two: host3 cannot be freed.
        for one, host in before.items():
            if host == 'host3':
                self.bob.api_put(f'/servers/{one}/metadata', {
                    'metadata': {'blazar:keep': 'true'}})
        with mock.patch.object(
                live_migrate.LiveMigrationTask, '_execute', fail):
            server = self.wanted(timeout='20m')
            for _time in range(40):
                self.run_until(clocks.SystemClock().now())
                self.settle()
                self.go_on(best_effort.SETTLE)
                if self.lease('mine')['status'] != 'IN_PROGRESS':
                    break
        self.wait_for_status(server['id'], 'ACTIVE')
        self.run_sync()
        freed, = {'host1', 'host2'} - set(bad)
        for one, host in self.where().items():
            if before[one] == freed:
                self.assertNotEqual(freed, host)
            else:
                self.assertEqual(before[one], host)
        self.assertEqual('ACTIVE', self.lease('mine')['status'])
        self.run_sync()
        self.assert_verified()

    def test_lease_times_out_if_all_servers_have_keep_metadata(self):
        for one in self.servers:
            self.bob.api_put(f'/servers/{one}/metadata', {
                'metadata': {'blazar:keep': 'true'}})
        before = self.where()
        server = self.wanted(timeout='60s')
        self.run_until(clocks.SystemClock().now())
        self.assertIn('No servers can be migrated',
                      self.lease('mine')['status_reason'])
        self.go_on(70)
        lease = self.lease('mine')
        self.assertEqual('TIMEDOUT', lease['status'])
        self.assertIn('Servers migrated for it: 0.', lease['status_reason'])
        self.assertEqual(before, self.where())
        self.run_sync()
        self.assert_verified()
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_sync()
        self.assertEqual('TERMINATED', self.lease('mine')['status'])

    def test_lease_api_lists_and_deletes_best_effort_lease(self):
        lease = self.make(lease_type='best_effort', timeout=600, reservations=[
            self.reservation(vcpus=4, memory_mb=1024)])
        self.assertEqual('IN_PROGRESS', lease['status'])
        listed, = self.ask('GET', '/leases', code=200,
                           status='IN_PROGRESS')['leases']
        self.assertEqual(lease['id'], listed['id'])
        error = str(self.ask('PUT', f'/leases/{lease["id"]}', {
            'name': 'other'}, code=400))
        self.assertIn('being freed for lease', error)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual('TERMINATED', self.lease(lease['id'])['status'])
        self.run_sync()
        self.assert_verified()


class TestWords(api_base.ApiTestCase):

    def test_incompatible_lease_params_are_refused(self):
        for params, sentence in (
                ({'timeout': '5m'}, '"lease_type": "best_effort"'),
                ({'lease_type': 'retry', 'timeout': '5m'},
                 '"timeout" is for best-effort'),
                ({'lease_type': 'best_effort', 'retries': 3},
                 '"retries" is only for'),
                ({'lease_type': 'best_effort', 'timeout': '1s'}, '"timeout"'),
                ({'lease_type': 'best_effort', 'start': self.at(600)},
                 'starts as soon as there is capacity')):
            self.assertIn(sentence, self.refused(
                400, self.boot, 'vm1', hints=self.lease_hints(
                    'mine', duration='1h', **params)), params)
        self.assertIn('An offer is made now', self.make(
            code=400, offer_seconds=600, lease_type='best_effort',
        )['error_message'])

    def test_policy_restricts_best_effort_leases(self):
        rules = {'blazar:leases:best_effort': 'role:admin'}
        with mock.patch('blazar_nova.services.policy.Policy.authorize',
                        self.only_admins(rules)):
            self.assertIn('blazar:leases:best_effort', self.make(
                code=403, lease_type='best_effort')['error_message'])
            self.assertIn('blazar:leases:best_effort', self.refused(
                403, self.boot, 'vm1', hints=self.lease_hints(
                    'mine', lease_type='best_effort')))
            self.make()
        self.assertEqual(['lease1'], [
            lease['name'] for lease in self.leases()])

    def only_admins(self, rules):
        """Return a replacement of Policy.authorize() with these rules."""
        from blazar_nova.services import policy
        authorize = policy.Policy.authorize

        def changed(its, context, rule, target=None):
            if rule in rules:
                its._enforcer.set_rules(
                    policy.policy.Rules.from_dict(rules), overwrite=False,
                    use_conf=False)
            return authorize(its, context, rule, target)

        return changed


class TestWholeHosts(whole_hosts_base.HostsTestCase):
    """Hosts for leases only, each with a server of another project that may
    be migrated.
    """

    hosts = {f'host{number}': nova_box.Capacity(
        vcpus=4, memory_mb=8192, disk_gb=200) for number in (1, 2)}

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        cheap = self.admin.post_flavor({'flavor': {
            'name': 'cheap', 'ram': 512, 'vcpus': 2, 'disk': 1}})['id']
        self.admin.post_extra_spec(cheap, {
            'extra_specs': {'blazar:preemptible': 'true'}})
        self.first = self.booted(cheap)
        # One host is full, so the next server uses the other.
        self.filler = self.make_active(reservations=[
            self.reservation(vcpus=2)])
        self.second = self.booted(cheap)
        self.run_sync()

    def booted(self, flavor):
        """Boot a server in a reservation of its own with a late end."""
        lease = self.make(
            client=self.bob, length=10 * test_api.HOUR, reservations=[{
                'resource_type': 'flavor:instance', 'flavor_id': flavor,
                'amount': 1}])
        self.run_until(clocks.SystemClock().now())
        lease = self.get(lease, client=self.bob)
        return self.boot_active('cheap', client=self.bob, flavor=lease[
            'reservations'][0]['flavor_id'])

    def test_host_is_freed_by_migrating_preemptible_server(self):
        before = {one['id']: self.host_of(one)
                  for one in (self.first, self.second)}
        self.assertEqual({'host1', 'host2'}, {*before.values()})
        lease = self.make(
            reservations=[self.hosts_wanted()], lease_type='best_effort',
            timeout='10m')
        self.assertEqual('IN_PROGRESS', lease['status'])
        for _time in range(3):
            self.run_until(self.clock.now() + 10)
        # The host that is free for alice is not yet in use.
        self.assertIn('No servers can be migrated',
                      self.get(lease)['status_reason'])
        self.delete(self.filler['id'])

        def has_it():
            self.look()
            self.run_until(self.clock.now() + 10)
            return self.get(lease)['status'] == 'ACTIVE'

        self.wait_for(has_it, what='a host for the lease')
        moved, = (one for one in (self.first, self.second)
                  if self.host_of(one) != before[one['id']])
        there, = (host for host in ('host1', 'host2')
                  if host != self.host_of(moved))
        self.assertEqual([there], self.aggregates()[
            lease['reservations'][0]['id']])
        self.assertEqual(self.host_of(self.first), self.host_of(self.second))
        self.look()
        self.assert_verified()
