# SPDX-License-Identifier: Apache-2.0

"""Treatment of servers on leased hosts at the end of the lease."""

import json
import os
import stat

import fixtures
from nova import context as nova_context
from nova import objects
from nova.scheduler.client import report
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_servers
from blazar_nova.compat import nova_scheduler
from tests import driven
from tests.functional import whole_hosts_base

HOUR = 3600


class TestEnds(whole_hosts_base.HostsTestCase):
    """The end affects no other lease, and no server survives it."""

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        self.started, self.reservation_id = self.lease_hosts()

    def end(self, lease, seconds=600):
        self.ask('DELETE', f'/leases/{lease["id"]}', client=self.admin,
                 code=204)
        self.run_until(self.clock.now() + seconds)

    def assigned_to(self):
        return self.query("SELECT assigned_to FROM hosts WHERE name = 'host1'")

    def test_end_keeps_servers_of_other_lease_on_same_host(self):
        server = self.within('victim', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        later = self.make(start_in=2 * HOUR, client=self.bob,
                          reservations=[self.hosts_wanted()])
        self.end(later)
        self.ask('GET', f'/leases/{later["id"]}', client=self.bob, code=404)
        # Nor are they deleted if the end of the other lease is repeated.
        self.listener.parts.lifecycle.lease_end.end(later['id'])
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertEqual([(self.reservation_id,)], self.assigned_to())

    def test_user_actions_do_not_delay_lease_end(self):
        server = self.within('busy', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        other = self.within('other', self.reservation_id)
        self.wait_for_status(other['id'], 'ACTIVE')
        reboot = {'reboot': {'type': 'HARD'}}
        self.alice.post_server_action(server['id'], reboot)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.ask('DELETE', f'/leases/{self.started["id"]}', client=self.admin,
                 code=204)
        self.assertIn('has ended', self.refused(
            409, self.alice.post_server_action, other['id'], reboot))
        self.run_until(self.clock.now() + 600)
        for one in server, other:
            self.wait_until_gone(one['id'])

    def test_server_arriving_during_lease_end_is_rejected(self):
        """The lease ends between the claims in the database and placement."""
        real = nova_scheduler._novas

        def late(*args, **kwargs):
            self.end(self.started, 0)
            return real(*args, **kwargs)

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.nova_scheduler._novas', late):
            self.fails(self.within('late', self.reservation_id))
        for host in compute_hosts.all_hosts()[0]:
            if host.name == 'host1':
                self.assertEqual(
                    set(), compute_hosts.consumers(host.uuid))

    def test_lease_starts_only_on_host_without_allocations(self):
        """An allocation was made there without asking the plugin."""
        lease = self.make(start_in=2 * HOUR, client=self.bob,
                          reservations=[self.hosts_wanted()])
        self.end(self.started)
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == 'host1')
        answer = report.report_client_singleton().put(
            f'/allocations/{uuids.stray}', {
                'allocations': {uuid: {'resources': {'VCPU': 1}}},
                'project_id': uuids.p, 'user_id': uuids.u,
                'consumer_generation': None}, version='1.36')
        self.assertEqual(204, answer.status_code)
        self.clock.advance(2 * HOUR)
        # No sync since the host was freed.
        driven.run_due(self.listener.engine)
        self.assertEqual([(None,)], self.assigned_to())
        self.listener.server_sync.compare_all()
        self.run_until(self.clock.now() + 60)
        self.assertEqual([(None,)], self.assigned_to())
        self.assertIn('not free yet', self.get(
            lease, client=self.bob)['status_reason'])
        compute_hosts.tell_placement('delete', f'/allocations/{uuids.stray}')
        self.listener.server_sync.compare_all()
        self.run_until(self.clock.now() + 60)
        self.assertEqual('ACTIVE', self.get(
            lease, client=self.bob)['status'])

    def test_other_reservations_end_while_hosts_are_unavailable(self):
        self.enrol('host2')
        lease = self.make_active(reservations=[
            self.hosts_wanted(), self.reservation(vcpus=1)])
        server = self.boot_active(
            'booked', flavor=lease['reservations'][1]['flavor_id'])

        def silent(*_args):
            raise errors.CloudUnavailable('placement does not answer')

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.host_servers.of_reservation', silent):
            self.end(lease)
            self.wait_until_gone(server['id'])
            self.run_until(self.clock.now() + 600)
        self.assertIn('could not be closed', self.get(
            lease, client=self.admin)['status_reason'])
        self.run_until(self.clock.now() + 600)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)

    def test_lease_ends_while_cell_without_its_hosts_is_silent(self):
        server = self.within('mine', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        shelved = self.within('shelved', self.reservation_id)
        self.wait_for_status(shelved['id'], 'ACTIVE')
        self.alice.post_server_action(shelved['id'], {'shelve': None})
        self.wait_for_status(shelved['id'], 'SHELVED_OFFLOADED')
        with self.silent_cell():
            shown = self.get(self.started)
            self.assertEqual([], shown['warnings'])
            self.assertEqual([server['id']],
                             shown['reservations'][0]['servers'])
            # Not the administrator, whose deletion checks nothing.
            self.delete(self.started['id'])
            self.wait_until_gone(server['id'])
            self.wait_until_over(self.started['id'])
            self.assertEqual([(None,)], self.assigned_to())
            self.alice.post_server_action(shelved['id'], {'unshelve': None})
            self.wait_for_status(shelved['id'], 'ACTIVE')

    def test_lease_does_not_end_while_cell_of_its_hosts_is_silent(self):
        with self.silent_cell('cell1'):
            self.assertIn('Nova does not say now', str(self.get(
                self.started)['warnings']))
            path = f'/leases/{self.started["id"]}'
            self.ask('DELETE', path, code=503)
            self.ask('DELETE', path, code=204, force='true')
            self.run_until(self.clock.now() + 600)
            self.assertEqual([(self.reservation_id,)], self.assigned_to())
        self.run_until(self.clock.now() + 600)
        self.assertEqual([(None,)], self.assigned_to())

    def test_lease_ends_only_when_its_shelved_servers_are_known(self):
        """They are in a cell that does not answer, others of the project do
        not matter.
        """
        shelved = self.within('shelved', self.reservation_id)
        self.wait_for_status(shelved['id'], 'ACTIVE')
        self.alice.post_server_action(shelved['id'], {'shelve': None})
        self.wait_for_status(shelved['id'], 'SHELVED_OFFLOADED')
        project_id = self.started['project_id']
        with self.silent_cell('cell1'):
            self.assertRaises(errors.CloudUnavailable, host_servers.shelved,
                              self.reservation_id, project_id)
            self.assertEqual([], host_servers.shelved(
                uuids.other_reservation, project_id))
        self.assertEqual([shelved['id']], host_servers.shelved(
            self.reservation_id, project_id))

    def test_lease_of_deleted_host_ends_without_cleaning(self):
        """Nor is it cleaned, which would fail."""
        self.flags(group='blazar', cleaning_command='false')
        context = nova_context.get_admin_context()
        with nova_context.target_cell(
                context, objects.CellMapping.get_by_uuid(
                    context, uuids.cell1)) as cell:
            objects.ComputeNode.get_first_node_by_host_for_old_compat(
                cell, 'host1').destroy()
        self.end(self.started)
        self.ask('GET', f'/leases/{self.started["id"]}', code=404)
        self.assertNotIn(self.reservation_id, self.aggregates())


class TestAfterwards(whole_hosts_base.HostsTestCase):
    """Commands of operators between two leases of a host."""

    more_conf = '[blazar]\non_end = delete,recycle,shelve,release\n'

    def setUp(self):
        super().setUp()
        self.enrol('host1')

    def using(self, **lease):
        """Create a lease that ends in an hour, with a server."""
        lease = self.get(self.make_active(
            reservations=[self.hosts_wanted()], **lease))
        self.over = clocks.SystemClock().now() + HOUR
        self.reservation_id = lease['reservations'][0]['id']
        server = self.within('one', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        return lease, server

    def is_back(self):
        return 'host1' in self.aggregates().get('freepool', ())

    def test_cleaning_command_delays_return_of_host(self):
        folder = self.useFixture(fixtures.TempDir()).path
        command = os.path.join(folder, 'clean')
        with open(command, 'w') as file:
            file.write(f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
                       f'[ -e {folder}/clean-by-now ] || exit 75\n')
        os.chmod(command, stat.S_IRWXU)
        self.flags(group='blazar', cleaning_command=command, cleaning_time=10)
        lease, server = self.using()
        refused = self.make(start_in=HOUR + 300, client=self.bob, code=409,
                            reservations=[self.hosts_wanted()])
        self.assertIn('next_start', str(refused))
        self.run_until(self.over + 60)
        self.wait_until_gone(server['id'])
        for seconds in (120, 180):
            self.run_until(self.over + seconds)
            shown = self.get(lease)
            self.assertEqual(
                ('TERMINATING', 'The hosts are being cleaned.'),
                (shown['status'], shown['status_reason']))
        self.assertEqual({f'host1 {self.reservation_id} {lease["project_id"]}'
                          }, {*open(f'{folder}/asked').read().splitlines()})
        self.assertFalse(self.is_back())
        self.assertIn(self.reservation_id, self.aggregates())
        # No server can be booted there any longer.
        self.assertIn('which is TERMINATING', self.refused(
            400, self.within, 'late', self.reservation_id))
        open(f'{folder}/clean-by-now', 'w').close()
        self.run_until(self.over + 500)
        self.assertEqual('TERMINATING', self.get(lease)['status'])
        self.run_until(self.over + 1200)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertTrue(self.is_back())
        self.assertNotIn(self.reservation_id, self.aggregates())

    def test_servers_run_during_grace_period(self):
        lease, server = self.using(grace_period='30m')
        self.assertEqual(('delete', 1800), (
            lease['on_end'], lease['grace_period']))
        for seconds in (10, 1500):
            self.run_until(self.over + seconds)
            self.assertEqual('TERMINATING', self.get(lease)['status'])
            self.assertEqual('ACTIVE', self.admin.get_server(
                server['id'])['status'])
            self.assertIn('its servers run until', self.ask(
                'PUT', f'/leases/{lease["id"]}', {'end_date': self.at(
                    4 * HOUR)}, code=409)['error_message'])
        self.run_until(self.over + 1810)
        self.wait_until_gone(server['id'])
        self.run_until(self.over + 2400)
        self.assertTrue(self.is_back())

    def test_lease_in_grace_period_accepts_nothing(self):
        self.takes_nothing_when_it_is_over(grace_period='30m')

    def test_ended_lease_with_recycle_policy_accepts_nothing(self):
        self.takes_nothing_when_it_is_over(on_end='recycle')

    def test_lease_whose_hosts_are_cleaned_accepts_nothing(self):
        self.takes_nothing_when_it_is_over(stays=False)

    def takes_nothing_when_it_is_over(self, stays=True, **lease):
        """Check that an ended lease accepts nothing until its hosts are free.

        :param stays: whether its server still exists
        """
        self.enrol('host2')
        self.flags(group='blazar', cleaning_command='false')
        lease, server = self.using(**lease)
        shelved = self.within('shelved', self.reservation_id)
        self.wait_for_status(shelved['id'], 'ACTIVE')
        self.alice.post_server_action(shelved['id'], {'shelve': None})
        self.wait_for_status(shelved['id'], 'SHELVED_OFFLOADED')
        for seconds in (10, 70):
            self.run_until(self.over + seconds)
        self.assertEqual('TERMINATING', self.get(lease)['status'])
        if not stays:
            self.wait_until_gone(server['id'])
        self.nothing_is_taken(lease, shelved, server if stays else None)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.nothing_is_taken(lease, shelved)
        self.flags(group='blazar', cleaning_command='true')
        for hours in (2, 3, 4):
            self.run_until(self.over + hours * HOUR)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
        # A server on none of its hosts is now an ordinary server.
        self.alice.post_server_action(shelved['id'], {'unshelve': None})
        self.wait_for_status(shelved['id'], 'ACTIVE')
        self.assertEqual('plain', self.host_of(shelved))

    def nothing_is_taken(self, lease, shelved, server=None):
        """Assert that requests for an ended lease are refused, and why."""
        reservation = {'id': self.reservation_id}
        for change in (
                {'end_date': self.at(6 * HOUR)},
                {'end_date': self.at(HOUR // 2)},
                {'start_date': self.at(5 * HOUR),
                 'end_date': self.at(6 * HOUR)},
                {'reservations': [{**reservation, 'max': 2}]},
                {'reservations': [{**reservation, 'min': 2, 'max': 2}]},
                {'reservations': [{**reservation, 'min': 1}]},
                {'reservations': [{**reservation,
                                   'projects': [uuids.other]}]},
                {'grace_period': '2h'}, {'name': 'other'}):
            answer = self.ask('PUT', f'/leases/{lease["id"]}', change)
            self.assertIn(answer.get('error_code'), (400, 409), change)
            self.assertIn('Create another lease.', answer['error_message'])
        for more in ({}, {'reserved': True, 'lease_params': json.dumps({
                'start': self.at(600), 'end': self.at(HOUR // 2)})}):
            message = self.refused(400, self.boot, 'late', hints={
                'reservation': self.reservation_id, **more})
            self.assertIn('it has ended. Create another lease.', message)
        for one, action in ((shelved, {'unshelve': None}),
                            (server, {'resize': {'flavorRef': '2'}}),
                            (server, {'migrate': None}),
                            (server, {'os-migrateLive': {
                                'host': None, 'block_migration': 'auto'}})):
            if one is not None:
                message = self.refused(
                    409, self.admin.post_server_action, one['id'], action)
                self.assertIn('it cannot move to another host of the', message)
                # Users of other projects do not learn that it exists.
                self.refused(404, self.bob.post_server_action, one['id'],
                             {'unshelve': None})

    def test_end_policy_and_grace_period_can_be_updated(self):
        lease, server = self.using()
        path = f'/leases/{lease["id"]}'
        self.assertIn('"on_end": "snap" is not available', self.ask(
            'PUT', path, {'on_end': 'snap'}, code=400)['error_message'])
        changed = self.ask('PUT', path, {
            'on_end': 'recycle', 'grace_period': '30m'})['lease']
        self.assertEqual(('recycle', 1800), (
            changed['on_end'], changed['grace_period']))
        self.assertIn('next_start', self.ask('POST', '/leases', {
            'name': 'next', 'start_date': self.at(HOUR + 600),
            'end_date': self.at(2 * HOUR),
            'reservations': [self.hosts_wanted()]}, self.bob, 409))
        self.ask('PUT', path, {'on_end': 'delete', 'grace_period': 0})
        self.run_until(self.over + 60)
        self.wait_until_gone(server['id'])

    def test_released_servers_are_shelved_without_lease(self):
        """Also servers that are kept after the end: not on these hosts."""
        lease, server = self.using(on_end='release')
        self.wait_for(lambda: self.run_until(self.clock.now() + 60) or (
            self.get(lease)['status'] == 'TERMINATED'))
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.assertTrue(self.is_back())
        self.alice.post_server_action(server['id'], {'unshelve': None})
        shown = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertNotEqual('host1', shown['OS-EXT-SRV-ATTR:host'])

    def test_recycle_policy_waits_until_servers_are_deleted(self):
        lease, server = self.using(on_end='recycle')
        for hours in range(1, 4):
            self.run_until(self.over + hours * HOUR)
        self.assertEqual('TERMINATING', self.get(lease)['status'])
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertFalse(self.is_back())
        self.alice.post_server_action(
            server['id'], {'reboot': {'type': 'HARD'}})
        self.wait_for_status(server['id'], 'ACTIVE')
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.over + 4 * HOUR)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertTrue(self.is_back())


class TestLeavingAfterwards(whole_hosts_base.HostsTestCase):

    more_conf = '[blazar_hosts]\nafter_lease = common\n'

    def test_hosts_are_available_to_all_workloads_after_lease(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts()
        mine, = self.aggregates()[reservation_id]
        other, = {'host1', 'host2'} - {mine}
        self.delete(lease['id'])
        self.listener.parts.host_enrollment.remove_left()
        self.assertEqual({'freepool': [other], 'blazar_pool': [other]},
                         self.aggregates())
        self.assertEqual(set(), self.traits(mine))
        self.look()
        self.assertIn(mine, {self.host_of(self.boot_active(
            f'plain{number}', flavor='3')) for number in range(4)})


class TestStaying(whole_hosts_base.HostsTestCase):
    """In each operation a server stays on the hosts of its lease."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        self.started, self.reservation_id = self.lease_hosts(2, 2)
        self.server = self.within('in', self.reservation_id)
        self.wait_for_status(self.server['id'], 'ACTIVE')

    def act(self, action, value=None, client=None):
        return (client or self.admin).post_server_action(
            self.server['id'], {action: value})

    def stays(self, status='ACTIVE'):
        self.wait_for_status(self.server['id'], status)
        self.assertIn(self.host_of(self.server), ('host1', 'host2'))

    def test_cold_migration_stays_on_leased_hosts(self):
        before = self.host_of(self.server)
        self.act('migrate')
        self.stays('VERIFY_RESIZE')
        self.assertNotEqual(before, self.host_of(self.server))
        self.act('confirmResize')
        self.stays()

    def test_resize_does_not_leave_leased_hosts(self):
        self.act('resize', {'flavorRef': '3'})
        self.stays('VERIFY_RESIZE')
        self.act('confirmResize')
        self.stays()
        # Also for operations after the flavor has changed.
        self.act('migrate')
        self.stays('VERIFY_RESIZE')
        self.act('confirmResize')
        self.stays()
        self.assertEqual('2', str(self.admin.get_server(
            self.server['id'])['flavor']['vcpus']))

    def test_live_migration_stays_on_leased_hosts(self):
        before = self.host_of(self.server)
        self.act('os-migrateLive', {'host': None, 'block_migration': 'auto'})
        self.wait_for(lambda: self.host_of(self.server) != before)
        self.stays()
        # An admin cannot migrate it to another host.
        self.act('os-migrateLive', {
            'host': 'plain', 'block_migration': 'auto'})
        self.wait_for(lambda: self.admin.get_server(self.server['id'])[
            'OS-EXT-STS:task_state'] is None)
        self.stays()

    def test_unshelve_stays_on_leased_hosts(self):
        self.act('shelve')
        self.wait_for_status(self.server['id'], 'SHELVED_OFFLOADED')
        self.act('unshelve')
        self.stays()

    def test_rebuild_with_other_image_stays_on_leased_hosts(self):
        self.act('rebuild', {'imageRef':
                             '70a599e0-31e7-49b7-b260-868f441e862b'})
        self.stays()

    def test_evacuation_stays_on_leased_hosts(self):
        before = self.host_of(self.server)
        context = nova_context.get_admin_context()
        with nova_context.target_cell(
                context, objects.CellMapping.get_by_uuid(
                    context, uuids.cell1)) as cell:
            service = objects.Service.get_by_compute_host(cell, before)
            service.forced_down = True
            service.save()
        self.act('evacuate', {})
        self.wait_for(lambda: self.host_of(self.server) != before)
        self.stays('SHUTOFF')

    def test_other_server_cannot_be_moved_to_leased_hosts(self):
        outsider = self.boot_active('outsider')
        self.assertEqual('plain', self.host_of(outsider))
        for action, value in (
                ('os-migrateLive', {'host': 'host1',
                                    'block_migration': 'auto'}),
                ('migrate', {'host': 'host1'}), ('migrate', None)):
            response = self.admin.api_post(
                f'/servers/{outsider["id"]}/action', {action: value},
                check_response_status=None)
            self.wait_for(lambda: self.admin.get_server(outsider['id'])[
                'OS-EXT-STS:task_state'] is None)
            self.assertEqual('plain', self.host_of(outsider),
                             (action, response.status))

    def test_forced_moves_that_bypass_scheduler_are_refused(self):
        """As older microversions allow admins to do."""
        outsider = self.boot_active('outsider')
        for version, action, value in (
                ('2.1', 'os-migrateLive', {
                    'block_migration': False, 'disk_over_commit': False}),
                ('2.67', 'os-migrateLive', {
                    'block_migration': 'auto', 'force': True}),
                ('2.13', 'evacuate', {'onSharedStorage': False}),
                ('2.67', 'evacuate', {'force': 'True'})):
            admin = self.api(
                roles=('admin', 'member', 'reader'), microversion=version)
            for server, host in ((self.server, 'plain'),
                                 (outsider, 'host1')):
                message = self.refused(
                    409, admin.post_server_action, server['id'],
                    {action: {**value, 'host': host}})
                self.assertIn('Leave "force" out', message)
            # No database accepts this name, and Nova has no such host.
            self.refused(400, admin.post_server_action, outsider['id'], {
                action: {**value, 'host': 'a\0'}})
        before = self.host_of(self.server)
        other, = {'host1', 'host2'} - {before}
        admin = self.api(
            roles=('admin', 'member', 'reader'), microversion='2.67')
        admin.post_server_action(self.server['id'], {'os-migrateLive': {
            'host': other, 'block_migration': 'auto', 'force': True}})
        self.wait_for(lambda: self.host_of(self.server) == other)
        self.stays()


class TestStayingOnParts(whole_hosts_base.PartsTestCase, TestStaying):
    """In each operation a server stays on the hosts for leases."""

    def setUp(self):
        whole_hosts_base.HostsTestCase.setUp(self)
        self.enrol('host1', 'host2', rack='7')
        lease = self.get(self.make_active(
            reservations=[self.parts_wanted(1)]))
        self.server = self.boot(
            'in', flavor=lease['reservations'][0]['flavor_id'])
        self.stays()

    def test_resize_does_not_leave_leased_hosts(self):
        message = self.refused(409, self.act, 'resize', {'flavorRef': '3'})
        self.assertIn('cannot be resized out of it', message)

    def test_forced_moves_that_bypass_scheduler_are_refused(self):
        admin = self.api(
            roles=('admin', 'member', 'reader'), microversion='2.67')
        for host in ('host1', 'host2'):
            message = self.refused(
                409, admin.post_server_action, self.server['id'],
                {'os-migrateLive': {'host': host, 'force': True,
                                    'block_migration': 'auto'}})
            self.assertIn('Leave "force" out', message)
