# SPDX-License-Identifier: Apache-2.0

"""Whole hosts: enrolled, reserved, used by who may, and given back."""

import contextlib
import io
import itertools
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
from testtools import matchers

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.cmd import manage
from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import host_traits
from blazar_nova.compat import nova_scheduler
from blazar_nova.compat import pool
from blazar_nova.compat import providers
from blazar_nova.services import host_enrollment
from blazar_nova.verify import enrolled_hosts
from blazar_nova.verify import verification
from tests import driven
from tests.functional import nova_box
from tests.functional import test_api

HOUR = 3600


class HostsTestCase(test_api.ApiTestCase):
    """Three hosts, and nothing reserved."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2', 'plain')}

    def setUp(self):
        super().setUp()
        self.enrolling = host_enrollment.HostEnrollment(self.listener.parts)
        self.bob = self.api(project=uuids.other, user='bob')

    def enrol(self, *names, **extra):
        return [self.enrolling.add(name, extra, pause=None) for name in names]

    def look(self):
        """See what is left on hosts: the next lease waits for that."""
        self.clock.advance(max(
            0, clocks.SystemClock().now() - self.clock.now()))
        self.listener.mirror.compare_all()

    def hosts_wanted(self, least=1, most=1, **params):
        return {'resource_type': 'physical:host', 'min': least, 'max': most,
                'hypervisor_properties': '', 'resource_properties': '',
                **params}

    def lease_hosts(self, least=1, most=1, **params):
        """An active lease of hosts, and its one reservation's id."""
        lease = self.get(self.make_active(
            reservations=[self.hosts_wanted(least, most, **params)]))
        return lease, lease['reservations'][0]['id']

    def delete(self, lease_id):
        """Delete a lease, and do what is due for that."""
        self.ask('DELETE', f'/leases/{lease_id}', code=204)
        self.run_until(clocks.SystemClock().now())

    def wait_until_over(self, lease_id):
        """Carry out what is due until a lease that was deleted is gone.

        While something of it is there yet, or Nova answers late, that is tried
        again.
        """
        def is_over():
            self.run_until(self.clock.now() + 600)
            try:
                self.ask('GET', f'/leases/{lease_id}', code=404)
            except matchers.MismatchError:
                return False
            return True

        self.wait_for(is_over)

    def within(self, name, reservation_id, **kwargs):
        """Boot with the hint that names a reservation."""
        return self.boot(name, hints={'reservation': reservation_id},
                         **kwargs)

    def host_of(self, server):
        return self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']

    def aggregates(self):
        """The hosts of each aggregate, by its name."""
        return {one.name: sorted(one.hosts) for one in
                objects.AggregateList.get_all(
                    nova_context.get_admin_context())}

    def traits(self, host):
        """The traits of ours that a host has in placement."""
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == host)
        return {one for one in compute_hosts.ask_placement(
            f'/resource_providers/{uuid}/traits')['traits']
            if one.startswith('CUSTOM_BLAZAR_')}

    def trait_of(self, reservation_id):
        return 'CUSTOM_BLAZAR_' + reservation_id.upper().replace('-', '_')

    def command(self, *words):
        """Type one of blazar-nova-manage; returns its exit code and what it
        wrote.
        """
        out = io.StringIO()
        with (fixtures.MonkeyPatch('blazar_nova.cmd.manage._parts',
                                   lambda _parsed: self.listener.parts),
              contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(out)):
            return manage.main([*words]), out.getvalue()

    def fails(self, server):
        """A server that finds no host."""
        self.wait_for_status(server['id'], 'ERROR')
        self.assertIn('No valid host', self.admin.get_server(
            server['id'])['fault']['message'])


class TestEnrolling(HostsTestCase):

    def enrol_anew(self):
        """Enroll a host; the ids of it and of an enrollment from before it
        was reinstalled under its name.
        """
        (new,) = self.enrol('host1')
        with self.listener.parts.database.writer() as session:
            row = session.get_one(models.Host, int(new['id']))
            old = models.Host(**{
                column.name: getattr(row, column.name)
                for column in models.Host.__table__.c
                if column.name not in ('id', 'uuid')} | {'capacity': {}},
                uuid=uuidutils.generate_uuid())
            session.add(old)
            session.flush()
            return int(new['id']), old.id

    def test_verify_names_an_enrollment_of_before_it_was_reinstalled(self):
        _new_id, old_id = self.enrol_anew()
        for fix in False, True:
            report = verification.Verifier(
                self.listener.parts, self.clock.advance, lambda _text: None,
                10).run(fix)
            (left,) = report.left
            self.assertIn(f'Host host1 is enrolled with ID {old_id}, but the '
                          'compute node', left.text)
            self.assertIn(f'host remove {old_id}', left.remedy)
            self.assertEqual(([], [], []), (
                report.mended, report.problems, report.failures))
        self.enrolling.remove(old_id)
        self.assert_verified()

    def test_verify_says_nothing_of_enrollments_while_a_cell_is_silent(self):
        self.enrol_anew()
        parts = self.listener.parts
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.compute_hosts.all_hosts',
                lambda: ([], False)):
            self.assertEqual([], [
                one for one in enrolled_hosts.differences(parts)
                if one.key[0] == 'enrolled'])

    def test_one_that_was_installed_anew_stays_when_the_old_one_goes(self):
        new_id, old_id = self.enrol_anew()
        # It may still be on its way in.
        for enrollment in 'enrolling', 'enrolled':
            with self.listener.parts.database.writer() as session:
                session.get_one(models.Host, new_id).enrollment = enrollment
                session.get_one(models.Host, old_id).enrollment = 'enrolled'
            self.enrolling.remove(old_id)
            self.assertEqual({'freepool': ['host1'], 'blazar_pool': ['host1']},
                             self.aggregates(), enrollment)
        self.enrolling.remove(new_id)
        self.assertEqual({'freepool': [], 'blazar_pool': []},
                         self.aggregates())

    def test_an_enrolled_host_takes_nobody(self):
        first, second = self.enrol('host1', 'host2')
        self.assertEqual(
            ('host1', 'host1', 4, 'enrolled', True), tuple(
                first[key] for key in (
                    'hypervisor_hostname', 'service_name', 'vcpus', 'status',
                    'reservable')))
        self.assertEqual({
            'freepool': ['host1', 'host2'],
            'blazar_pool': ['host1', 'host2']}, self.aggregates())
        self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
        for number in range(2):
            server = self.boot_active(f'plain{number}', flavor='3')
            self.assertEqual('plain', self.host_of(server))
        self.fails(self.boot('one too many', flavor='3'))
        # Not even who may name a host gets there.
        self.fails(self.boot('forced', client=self.admin,
                             availability_zone='nova:host1'))
        self.enrolling.remove(int(first['id']))
        self.assertEqual({'freepool': ['host2'], 'blazar_pool': ['host2']},
                         self.aggregates())
        self.assertEqual(set(), self.traits('host1'))
        server = self.boot_active('one more', flavor='3')
        self.assertEqual('host1', self.host_of(server))

    def test_members_do_not_see_whose_it_is(self):
        """Its zone has the id of the reservation in its name."""
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        for client, zone in ((self.admin, f'blazar_{reservation_id}'),
                             (self.bob, ''), (self.alice, '')):
            host, = self.ask('GET', '/os-hosts', client=client)['hosts']
            self.assertEqual(zone, host['availability_zone'])

    def test_not_while_servers_run_there(self):
        server = self.boot_active('there')
        host = self.host_of(server)
        exc = self.assertRaises(errors.Conflict, self.enrol, host)
        self.assertIn('it has 1 server', str(exc))
        self.assertEqual([], self.enrolling.listed())
        self.assertEqual(set(), self.traits(host))
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        # It counts as on its way until it is told that it is gone.
        self.clock.advance(60)
        self.enrol(host)

    def test_what_is_half_done_is_finished_by_the_same_request(self):
        with self.stumbling('join'):
            self.assertRaises(RuntimeError, self.enrol, 'host1')
        self.assertEqual(['enrolling'], [
            one['status'] for one in self.enrolling.listed()])
        self.enrol('host1')
        host_id = int(self.enrolling.listed()[0]['id'])
        with self.stumbling('leave'):
            self.assertRaises(
                RuntimeError, self.enrolling.remove, host_id)
        self.assertEqual('leaving', self.enrolling.show(host_id)['status'])
        self.enrolling.remove(host_id)
        self.assertEqual([], self.enrolling.listed())

    def test_two_who_take_it_out_at_once(self):
        """Or a listener that finishes what a command has begun."""
        one, = self.enrol('host1')
        host_id, real, also = int(one['id']), pool.leave, []

        def leave(host, *more):
            real(host, *more)
            if not also:
                also.append(True)
                self.enrolling.remove(host_id)

        with fixtures.MonkeyPatch('blazar_nova.compat.pool.leave', leave):
            self.enrolling.remove(host_id)
        self.assertEqual(([True], []), (also, self.enrolling.listed()))
        self.assertRaises(errors.NotFound, self.enrolling.remove, host_id)

    def test_who_takes_it_out_is_not_overtaken(self):
        """By who enrols it once more between two of his steps."""
        one, = self.enrol('host1')
        real, overtaken = pool.leave, []

        def leave(host, *more):
            overtaken.append(self.assertRaises(
                errors.Conflict, self.enrol, 'host1'))
            real(host, *more)

        with fixtures.MonkeyPatch('blazar_nova.compat.pool.leave', leave):
            self.enrolling.remove(int(one['id']))
        self.assertIn('is being removed', str(overtaken[0]))
        self.assertEqual([], self.enrolling.listed())

    def stumbling(self, name):
        """Within, a function of the pool dies when it has done its work."""
        real = getattr(pool, name)

        def stumble(*args):
            real(*args)
            raise RuntimeError('killed')

        return fixtures.MonkeyPatch(
            f'blazar_nova.compat.pool.{name}', stumble)

    def test_unknown_hosts_and_those_that_are_enrolled(self):
        self.assertRaises(errors.NotFound, self.enrol, 'no such host')
        self.enrol('host1')
        self.assertRaises(errors.Conflict, self.enrol, 'host1')


class TestCommands(HostsTestCase):

    def manage(self, *words):
        return self.command('host', *words)

    def test_an_operator_enrols_hosts_and_takes_them_out(self):
        code, text = self.manage('add', 'host1', 'gpu=A100')
        self.assertEqual((0, True), (code, 'it serves leases only' in text))
        host, = self.enrolling.listed()
        self.assertEqual('A100', host['gpu'])
        self.assertRegex(self.manage('list')[1],
                         rf'{host["id"]} *\| host1 *\| enrolled *\| True')
        code, text = self.manage('remove', host['id'])
        self.assertEqual((0, True), (code, 'available to all' in text))
        self.assertEqual([], self.enrolling.listed())

    def test_one_goes_when_its_leases_are_over(self):
        host, = self.enrol('host1')
        lease, _id = self.lease_hosts()
        later = self.make(start_in=2 * HOUR, reservations=[
            self.hosts_wanted()])['id']
        code, text = self.manage('remove', host['id'])
        self.assertEqual((1, True), (code, '2 bookings' in text), text)
        ends, seen = [lease['id'], None, later], []

        def pause(_seconds):
            self.enrolling.remove_left()
            seen.append(self.enrolling.show(int(host['id']))['status'])
            lease_id = ends.pop(0)
            if lease_id is not None:
                self.delete(lease_id)

        with fixtures.MonkeyPatch('blazar_nova.cmd.manage._pause', pause):
            code, text = self.manage('remove', host['id'], '--wait')
        self.assertEqual(0, code)
        self.assertEqual(['leaving'] * 3, seen)
        self.assertEqual([1, 1], [
            text.count(f'Waiting: Host host1 cannot be taken out: it has '
                       f'{count} of leases')
            for count in ('2 bookings', '1 booking')])
        self.assertIn('is available to all workloads again', text)
        self.assertEqual([], self.enrolling.listed())

    def test_who_waits_no_more_is_followed_by_a_listener(self):
        host, = self.enrol('host1')
        lease, _id = self.lease_hosts()

        def stop(_seconds):
            raise KeyboardInterrupt

        with fixtures.MonkeyPatch('blazar_nova.cmd.manage._pause', stop):
            self.assertRaises(KeyboardInterrupt, self.manage, 'remove',
                              host['id'], '--wait')
        answer = self.make(code=409, reservations=[self.hosts_wanted()])
        self.assertIn('fits_now: 0 of 1', answer['error_message'])
        self.listener._enrolling.remove_left()
        self.assertEqual('leaving', self.enrolling.show(
            int(host['id']))['status'])
        self.delete(lease['id'])
        self.listener._enrolling.remove_left()
        self.assertEqual([], self.enrolling.listed())
        self.assertEqual({'freepool': [], 'blazar_pool': []},
                         self.aggregates())

    def test_one_that_fails_keeps_no_other_from_leaving(self):
        first, second = self.enrol('host1', 'host2')
        for host in (first, second):
            self.enrolling.retire(int(host['id']))
        real = providers.change
        away_uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                      if one.service_host == 'host1')

        def away(uuid, *args, **kwargs):
            if uuid == away_uuid:
                raise errors.CloudUnavailable('Placement is away.')
            return real(uuid, *args, **kwargs)

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.providers.change', away):
            self.enrolling.remove_left()
            self.assertEqual(['host1'], [
                one['service_name'] for one in self.enrolling.listed()])
            code, text = self.manage('remove', first['id'])
            self.assertEqual(1, code)
            self.assertIn('Placement is away.', text)
        self.enrolling.remove_left()
        self.assertEqual([], self.enrolling.listed())

    def test_who_is_slow_does_not_take_out_what_was_enrolled_again(self):
        for late in ('before', 'within'):
            host, = self.enrol('host1')
            self.enrolling.retire(int(host['id']))
            other = host_enrollment.HostEnrollment(self.listener.parts)
            real, again = pool.leave, []

            def meanwhile(*args, other=other, again=again):
                if not again:
                    again.append(1)
                    other.remove_left()
                    self.enrol('host1', rack='7')
                return args and real(*args)

            left = other._left()
            with contextlib.ExitStack() as stack:
                if late == 'within':
                    stack.enter_context(fixtures.MonkeyPatch(
                        'blazar_nova.compat.pool.leave', meanwhile))
                else:
                    meanwhile()
                    stack.enter_context(fixtures.MockPatchObject(
                        self.enrolling, '_left', side_effect=[
                            left, other._left()]))
                self.enrolling.remove_left()
            host, = self.enrolling.listed()
            self.assertEqual(('enrolled', '7'), (
                host['status'], host['rack']), late)
            self.assertEqual({'freepool': ['host1'],
                              'blazar_pool': ['host1']}, self.aggregates())
            self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
            self.enrolling.remove(int(host['id']))

    def test_what_cannot_be_done_is_said(self):
        for words, part in (
                (('add', 'nowhere'), 'There is no host nowhere'),
                (('add', 'host1', 'gpu'), 'gpu is not in the form KEY=VALUE'),
                (('add', 'host1', 'vcpus=99'), '"vcpus" is no extra'),
                (('remove', '999'), 'Host 999 could not be found')):
            code, text = self.manage(*words)
            self.assertEqual((1, True), (code, part in text), text)


class TestNotIsolated(HostsTestCase):

    more_conf = '[scheduler]\nenable_isolated_aggregate_filtering = False\n'

    def test_nothing_is_enrolled_that_placement_would_not_keep(self):
        exc = self.assertRaises(errors.Conflict, self.enrol, 'host1')
        self.assertIn('enable_isolated_aggregate_filtering', str(exc))


class TestLife(HostsTestCase):

    def test_from_the_start_to_the_end(self):
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
        self.listener.mirror.compare_all()
        self.assertEqual([], self.books(
            f"SELECT usage FROM hosts WHERE name = '{mine}' "
            "AND usage != '{}'"))
        # It is full: not even those who may be there are elsewhere.
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
        self.listener.mirror.compare_all()
        self.assertEqual([(None,)] * 3, self.books(
            'SELECT assigned_to FROM hosts'))

    def test_it_has_no_server_group(self):
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        self.assertEqual(404, self.alice.api_request(
            f'/os-server-groups/{reservation_id}', method='DELETE',
        ).status_code)

    def test_a_deleted_lease_takes_its_servers_with_it(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.delete(lease['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 300)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
        self.assertNotIn(reservation_id, self.aggregates())

    def test_other_servers_are_nowhere_near(self):
        """By each way that a user has, and an admin."""
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
        # Nobody has used it by that.
        self.assertEqual([(None,)], self.books('SELECT used_at FROM leases'))
        for name, kwargs in (
                ('plain', {}), ('zone', {
                    'availability_zone': f'blazar_{reservation_id}'})):
            for client in (self.alice, self.bob, self.admin):
                self.fails(self.boot(name, flavor='4', client=client,
                                     **kwargs))
        self.fails(self.boot('forced', client=self.admin,
                             availability_zone='nova:host1'))
        self.fails(self.boot('forced', client=self.admin, host='host1'))

    def test_nothing_starves_however_few_placement_answers(self):
        """More hosts are enrolled than it names candidates."""
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

    def test_it_is_shared_with_whom_its_owner_says(self):
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        self.refused(400, self.within, 'early', reservation_id,
                     client=self.bob)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': reservation_id, 'projects': [uuids.other]}]}, code=200)
        server = self.within('guest', reservation_id, client=self.bob)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(server))
        self.assertNotEqual(
            [(None,)], self.books('SELECT used_at FROM leases'))
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

    def test_not_before_its_time_and_not_after_it(self):
        self.enrol('host1')
        lease = self.make(start_in=HOUR, reservations=[self.hosts_wanted()])
        reservation_id = lease['reservations'][0]['id']
        message = self.refused(400, self.within, 'early', reservation_id)
        self.assertIn('which is PENDING', message)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.refused(400, self.within, 'late', reservation_id)


class TestLeasesWithin(HostsTestCase):
    """Servers on leased hosts that have a lease of their own as well."""

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')

    def within_later(self, reservation_id, start_in, length, code=None):
        """Boot within a reservation, with a lease for later."""
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

    def test_one_is_held_and_built_there_when_its_time_has_come(self):
        lease, reservation_id = self.lease_hosts(1, 1, start_in=None)
        mine, = self.aggregates()[reservation_id]
        server = self.within_later(reservation_id, HOUR // 4, HOUR // 4)
        self.wait_for_status(server['id'], 'RESERVED')
        # It takes nothing of those who are there.
        others = [self.within(f'now{number}', reservation_id)
                  for number in range(3)]
        for other in others:
            self.wait_for_status(other['id'], 'ACTIVE')
        self.run_until(clocks.SystemClock().now() + HOUR // 4 + 60)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(mine, self.host_of(server))
        self.look()
        self.listener.mirror.compare_all()
        self.assertEqual(([], []), self.verified())
        self.assertEqual([('{}',)], self.books(
            'SELECT resources FROM bookings WHERE server_id IS NOT NULL'))
        # Its end is its own.
        self.run_until(clocks.SystemClock().now() + HOUR // 2 + 60)
        self.wait_until_gone(server['id'])
        for other in others:
            self.assertEqual('ACTIVE', self.alice.get_server(
                other['id'])['status'])
        self.assertEqual('ACTIVE', self.get(lease)['status'])

    def test_the_hosts_may_be_leased_for_later_themselves(self):
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
        # With the hosts goes what is there.
        self.delete(lease['id'])
        self.wait_until_gone(server['id'])
        self.look()
        self.run_until(self.clock.now() + 300)
        self.assertEqual([], self.ask('GET', '/leases')['leases'])

    def test_within_the_time_of_the_hosts_alone(self):
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

    def test_it_waits_for_hosts_that_are_not_there(self):
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

    def test_a_reservation_of_others(self):
        """Nobody gets in by a lease of his own."""
        other = self.make(client=self.bob, reservations=[
            self.hosts_wanted()])['reservations'][0]['id']
        self.run_until(clocks.SystemClock().now())
        self.within_later(other, HOUR // 4, HOUR // 4, code=400)


class TestEnds(HostsTestCase):
    """An end is that of nobody else, and nothing survives it."""

    def setUp(self):
        super().setUp()
        self.enrol('host1')
        self.started, self.reservation_id = self.lease_hosts()

    def end(self, lease, seconds=600):
        self.ask('DELETE', f'/leases/{lease["id"]}', client=self.admin,
                 code=204)
        self.run_until(self.clock.now() + seconds)

    def assigned_to(self):
        return self.books("SELECT assigned_to FROM hosts WHERE name = 'host1'")

    def test_servers_of_another_lease_of_the_same_host_stay(self):
        server = self.within('victim', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        later = self.make(start_in=2 * HOUR, client=self.bob,
                          reservations=[self.hosts_wanted()])
        self.end(later)
        self.ask('GET', f'/leases/{later["id"]}', client=self.bob, code=404)
        # And those of one that had ended when somebody came back to it.
        self.listener.parts.lifecycle.lease_end.end(later['id'])
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertEqual([(self.reservation_id,)], self.assigned_to())

    def test_who_comes_while_it_ends_is_not_let_in(self):
        """It ends between the claim in the books and that in placement."""
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

    def test_one_starts_only_where_nothing_is_left(self):
        """Somebody got there whom nothing of ours was asked about."""
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
        # Nobody has looked what is there since it was given back.
        driven.run_due(self.listener.engine)
        self.assertEqual([(None,)], self.assigned_to())
        self.listener.mirror.compare_all()
        self.run_until(self.clock.now() + 60)
        self.assertEqual([(None,)], self.assigned_to())
        self.assertIn('not free yet', self.get(
            lease, client=self.bob)['status_reason'])
        compute_hosts.tell_placement('delete', f'/allocations/{uuids.stray}')
        self.listener.mirror.compare_all()
        self.run_until(self.clock.now() + 60)
        self.assertEqual('ACTIVE', self.get(
            lease, client=self.bob)['status'])

    def test_what_is_beside_hosts_ends_while_they_cannot_be_seen(self):
        self.enrol('host2')
        lease = self.make_active(reservations=[
            self.hosts_wanted(), self.reservation(vcpus=1)])
        server = self.boot_active(
            'booked', flavor=lease['reservations'][1]['flavor_id'])

        def silent(*_args):
            raise errors.CloudUnavailable('placement is away')

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.host_servers.guests', silent):
            self.end(lease)
            self.wait_until_gone(server['id'])
            self.run_until(self.clock.now() + 600)
        self.assertIn('could not be closed', self.get(
            lease, client=self.admin)['status_reason'])
        self.run_until(self.clock.now() + 600)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)

    def test_a_host_that_nova_does_not_have_any_more(self):
        """Nor is it cleaned, which would come to nothing."""
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


class TestAfterwards(HostsTestCase):
    """What an operator may have done between two leases of a host."""

    more_conf = '[blazar]\non_end = delete,recycle,shelve,release\n'

    def setUp(self):
        super().setUp()
        self.enrol('host1')

    def using(self, **lease):
        """A lease that was over after an hour, and its server."""
        lease = self.get(self.make_active(
            reservations=[self.hosts_wanted()], **lease))
        self.over = clocks.SystemClock().now() + HOUR
        self.reservation_id = lease['reservations'][0]['id']
        server = self.within('one', self.reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        return lease, server

    def is_back(self):
        return 'host1' in self.aggregates().get('freepool', ())

    def test_a_command_makes_it_ready(self):
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
        # Nobody gets in there any more.
        self.assertIn('which is TERMINATING', self.refused(
            400, self.within, 'late', self.reservation_id))
        open(f'{folder}/clean-by-now', 'w').close()
        self.run_until(self.over + 500)
        self.assertEqual('TERMINATING', self.get(lease)['status'])
        self.run_until(self.over + 1200)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertTrue(self.is_back())
        self.assertNotIn(self.reservation_id, self.aggregates())

    def test_servers_have_a_period_of_grace(self):
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

    def test_nothing_comes_to_it_in_its_period_of_grace(self):
        self.takes_nothing_when_it_is_over(grace_period='30m')

    def test_nothing_comes_to_it_while_it_is_recycled(self):
        self.takes_nothing_when_it_is_over(on_end='recycle')

    def test_nothing_comes_to_it_while_it_is_cleaned(self):
        self.takes_nothing_when_it_is_over(stays=False)

    def takes_nothing_when_it_is_over(self, stays=True, **lease):
        """Whatever is asked of it until its last host is given back.

        :param stays: whether its server is there yet
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
        # What is on none of its hosts is an ordinary server now.
        self.alice.post_server_action(shelved['id'], {'unshelve': None})
        self.wait_for_status(shelved['id'], 'ACTIVE')
        self.assertEqual('plain', self.host_of(shelved))

    def nothing_is_taken(self, lease, shelved, server=None):
        """All that is asked of a lease that is over is refused, and why."""
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
                # Others do not even learn that it exists.
                self.refused(404, self.bob.post_server_action, one['id'],
                             {'unshelve': None})

    def test_who_has_one_may_have_another_one(self):
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

    def test_they_are_shelved_and_are_ordinary_servers_then(self):
        """Also where they were to go on: not on these hosts."""
        lease, server = self.using(on_end='release')
        self.wait_for(lambda: self.run_until(self.clock.now() + 60) or (
            self.get(lease)['status'] == 'TERMINATED'))
        self.wait_for_status(server['id'], 'SHELVED_OFFLOADED')
        self.assertTrue(self.is_back())
        self.alice.post_server_action(server['id'], {'unshelve': None})
        shown = self.wait_for_status(server['id'], 'ACTIVE')
        self.assertNotEqual('host1', shown['OS-EXT-SRV-ATTR:host'])

    def test_they_may_stay_until_they_go_by_themselves(self):
        lease, server = self.using(on_end='recycle')
        for hours in range(1, 4):
            self.run_until(self.over + hours * HOUR)
        self.assertEqual('TERMINATING', self.get(lease)['status'])
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])
        self.assertFalse(self.is_back())
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.run_until(self.over + 4 * HOUR)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertTrue(self.is_back())


class TestLeavingAfterwards(HostsTestCase):

    more_conf = '[blazar_hosts]\nafter_lease = common\n'

    def test_they_serve_everybody_again(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts()
        mine, = self.aggregates()[reservation_id]
        other, = {'host1', 'host2'} - {mine}
        self.delete(lease['id'])
        self.listener._enrolling.remove_left()
        self.assertEqual({'freepool': [other], 'blazar_pool': [other]},
                         self.aggregates())
        self.assertEqual(set(), self.traits(mine))
        self.look()
        self.assertIn(mine, {self.host_of(self.boot_active(
            f'plain{number}', flavor='3')) for number in range(4)})


class TestStaying(HostsTestCase):
    """Whatever becomes of a server, it stays on the hosts of its lease."""

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

    def test_cold_migrated(self):
        before = self.host_of(self.server)
        self.act('migrate')
        self.stays('VERIFY_RESIZE')
        self.assertNotEqual(before, self.host_of(self.server))
        self.act('confirmResize')
        self.stays()

    def test_resized(self):
        self.act('resize', {'flavorRef': '3'})
        self.stays('VERIFY_RESIZE')
        self.act('confirmResize')
        self.stays()
        # Also for what comes after the flavor is another one.
        self.act('migrate')
        self.stays('VERIFY_RESIZE')
        self.act('confirmResize')
        self.stays()
        self.assertEqual('2', str(self.admin.get_server(
            self.server['id'])['flavor']['vcpus']))

    def test_live_migrated(self):
        before = self.host_of(self.server)
        self.act('os-migrateLive', {'host': None, 'block_migration': 'auto'})
        self.wait_for(lambda: self.host_of(self.server) != before)
        self.stays()
        # An admin may not lead it out.
        self.act('os-migrateLive', {
            'host': 'plain', 'block_migration': 'auto'})
        self.wait_for(lambda: self.admin.get_server(self.server['id'])[
            'OS-EXT-STS:task_state'] is None)
        self.stays()

    def test_shelved_and_unshelved(self):
        self.act('shelve')
        self.wait_for_status(self.server['id'], 'SHELVED_OFFLOADED')
        self.act('unshelve')
        self.stays()

    def test_rebuilt_with_another_image(self):
        self.act('rebuild', {'imageRef':
                             '70a599e0-31e7-49b7-b260-868f441e862b'})
        self.stays()

    def test_evacuated(self):
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

    def test_somebody_else_is_not_moved_there(self):
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

    def test_nobody_is_led_astray_without_the_scheduler(self):
        """As older microversions let admins do."""
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
            # No database takes such a name, and Nova has no such host.
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


class PartsTestCase(HostsTestCase):
    """Reservations of servers, on hosts that serve leases only."""

    def parts_wanted(self, amount, **params):
        return self.reservation(
            amount=amount, vcpus=2,
            resource_properties='["==", "$rack", "7"]', **params)


class TestStayingOnParts(PartsTestCase, TestStaying):
    """Whatever becomes of it, it stays among the hosts for leases."""

    def setUp(self):
        HostsTestCase.setUp(self)
        self.enrol('host1', 'host2', rack='7')
        lease = self.get(self.make_active(
            reservations=[self.parts_wanted(1)]))
        self.server = self.boot(
            'in', flavor=lease['reservations'][0]['flavor_id'])
        self.stays()

    def test_resized(self):
        message = self.refused(409, self.act, 'resize', {'flavorRef': '3'})
        self.assertIn('cannot be resized out of it', message)

    def test_nobody_is_led_astray_without_the_scheduler(self):
        admin = self.api(
            roles=('admin', 'member', 'reader'), microversion='2.67')
        for host in ('host1', 'host2'):
            message = self.refused(
                409, admin.post_server_action, self.server['id'],
                {'os-migrateLive': {'host': host, 'force': True,
                                    'block_migration': 'auto'}})
            self.assertIn('Leave "force" out', message)


class TestParts(PartsTestCase):

    def test_beside_others_first_and_then_on_hosts_for_leases(self):
        """Each server goes where its place is."""
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
        # A part of it is taken, until the lease ends.
        answer = self.make(code=409, reservations=[self.hosts_wanted(2, 2)])
        self.assertIn('1 of 2', answer['error_message'])
        _lease, reservation_id = self.lease_hosts()
        self.assertNotEqual([hosts[0]], self.aggregates()[reservation_id])
        self.listener.mirror.compare_all()
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

    def test_by_what_operators_say_of_hosts(self):
        self.enrol('host1', rack='7')
        answer = self.make(code=409, reservations=[self.parts_wanted(3)])
        self.assertIn('2 of 3', answer['error_message'])
        lease = self.get(self.make_active(
            reservations=[self.parts_wanted(2, affinity=True)]))
        server = self.boot('in', flavor=lease['reservations'][0]['flavor_id'])
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(server))

    def test_a_host_for_leases_does_not_leave_with_servers_on_it(self):
        host, = self.enrol('host1', rack='7')
        self.make_active(reservations=[self.parts_wanted(1)])
        exc = self.assertRaises(
            errors.Conflict, self.enrolling.remove, int(host['id']))
        self.assertIn('1 booking of leases', str(exc))


class TestAsking(HostsTestCase):

    def setUp(self):
        super().setUp()
        self.enrol('host1', gpu='A100')
        self.enrol('host2')

    def test_by_what_a_host_is_like(self):
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

    def test_what_there_is_not_is_said_at_once(self):
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

    def test_within_a_zone_an_aggregate_and_traits(self):
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
            # Who has a zone stays in it.
            self.assertEqual(expected == 'host1',
                             'availability_zone' in aggregate.metadata)
            self.delete(lease['id'])
            self.look()
        self.make(reservations=[self.hosts_wanted(
            availability_zone='nova', aggregate='rack7')], code=409)

    def test_which_reservations_there_are_is_nobodys_business(self):
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

    def test_whoever_shares_it_gets_no_more_hosts(self):
        lease, rid = self.lease_hosts(1, 1)
        self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': rid, 'max': 2}]}, code=200)
        self.assertEqual(2, self.get(lease)['reservations'][0]['amount'])
        self.enrol('plain')
        for more in ({'projects': [uuids.other]}, {'max': 2}):
            self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
                {'id': rid, **more}]}, code=200)
            self.assertEqual(2, self.get(lease)['reservations'][0]['amount'])

    def test_a_trait_is_asked_for_once_however_often_it_is_named(self):
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

    def test_when_there_is_room_is_said(self):
        lease = self.make(
            start_in=HOUR, reservations=[self.hosts_wanted(2, 2)])
        error = self.make(length=2 * HOUR, reservations=[
            self.hosts_wanted(2, 2)], code=409)
        self.assertEqual(('NO_ROOM', 0), (
            error['error_name'], error['fits_now']))
        self.assertEqual(lease['end_date'], error['next_start'])


class TestMany(HostsTestCase):
    """More hosts than are seen to at a time; as many as BLAZAR_HOSTS says.

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

    def test_each_costs_as_much_as_one(self):
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
        # To read what traits and aggregates a host has, and to write them.
        self.assertLessEqual(len(asked), 4 * wanted + 5)
        # The aggregate when it is made, and once what is in it then.
        self.assertLessEqual(len(told), 3)

    def _counted(self, name, calls):
        real = pydoc.locate(name)
        self.useFixture(fixtures.MonkeyPatch(
            name, lambda *args, **kwargs: (
                calls.append(args), real(*args, **kwargs))[1]))


class TestReturning(HostsTestCase):
    """A lease in use returns one of its hosts."""

    def put(self, lease, code=200, **values):
        return self.ask('PUT', f'/leases/{lease["id"]}', values, code=code)

    def test_an_empty_one_is_free_when_it_is_clean(self):
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
        self.assertIn(f'{mine}: {server["id"]}', refused['error_message'])
        for hosts in ([mine, other], ['plain']):
            self.put(lease, 400, remove_hosts=hosts)
        self.put(lease, 400, remove_hosts=[other], reservations=[smaller])
        shown = self.put(lease, reservations=[smaller])['lease']
        self.assertEqual([mine], [
            host['name'] for host in shown['reservations'][0]['hosts']])
        self.run_until(clocks.SystemClock().now() + 60)
        # Its own servers do not come there any more, nor does anybody else.
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
            self.books("SELECT name, assigned_to FROM hosts "
                       "WHERE name LIKE 'host_'")))
        self.look()
        self.make(client=self.bob, reservations=[self.hosts_wanted()])
        self.wait_for_status(server['id'], 'ACTIVE')
        again = self.put(lease, 409, reservations=[
            {'id': reservation_id, 'min': 2, 'max': 2}])
        self.assertIn('fits_now: 1 of 2', again['error_message'])

    def test_one_that_is_named(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts(2, 2)
        self.put(lease, remove_hosts=['host1'])
        self.run_until(clocks.SystemClock().now() + 60)
        self.assertEqual(['host2'], self.aggregates()[reservation_id])
        self.assertEqual((1, 1), tuple(
            self.get(lease)['reservations'][0][key] for key in ('min', 'max')))
        self.assert_verified()


class TestGrowing(HostsTestCase):
    """More hosts, and others, where an operator has zones of his own."""

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
        """In the books, in Nova, and nothing else is to be done."""
        self.run_until(clocks.SystemClock().now() + 60)
        reservation_id = lease['reservations'][0]['id']
        self.assertEqual([*hosts], self.aggregates()[reservation_id])
        self.assertEqual([(one,) for one in hosts], self.books(
            f"SELECT name FROM hosts WHERE assigned_to = '{reservation_id}' "
            f"ORDER BY name"))
        self.assert_verified()

    def beside(self, zone):
        """A lease of one host, while another one has that of a zone."""
        other, _id = self.lease_hosts(availability_zone=zone)
        lease, reservation_id = self.lease_hosts()
        self.delete(other['id'])
        self.look()
        return lease, reservation_id

    def test_not_by_a_host_of_another_zone(self):
        """Nova has no host in two, and changes none that is in use."""
        lease, reservation_id = self.beside('az1')
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        refused = self.grow(lease, 409, min=2, max=2)
        self.assertIn('Only 1 of the 2 requested hosts',
                      refused['error_message'])
        # As many as there are: there are no more.
        self.assertEqual(1, self.grow(lease, max=2)[
            'lease']['reservations'][0]['amount'])
        self.has(lease, 'host1')
        self.enrol('plain')
        self.grow(lease, min=2, max=2)
        self.has(lease, 'host1', 'plain')

    def test_by_any_host_where_it_has_no_zone_of_its_own(self):
        lease, _reservation_id = self.beside('nova')
        self.grow(lease, min=2, max=2)
        self.has(lease, 'host1', 'host2')

    def test_one_that_is_in_use_is_there_for_a_later_lease(self):
        """The zone that it has until then goes with its lease."""
        lease, _id = self.lease_hosts(availability_zone='nova')
        self.has(lease, 'host1')
        self.make(start_in=48 * HOUR, reservations=[
            self.hosts_wanted(availability_zone='nova')])

    def test_other_hosts_before_the_start(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.hosts_wanted(availability_zone='nova')])
        for change, host in (({'availability_zone': 'az1'}, 'host2'),
                             ({'availability_zone': 'nova'}, 'host1'),
                             ({'availability_zone': 'az1'}, 'host2')):
            self.grow(lease, **change)
            self.assertEqual([(host,)], self.books(
                'SELECT name FROM hosts JOIN bookings '
                'ON bookings.host_id = hosts.id'))
        self.run_until(self.began + HOUR)
        self.has(lease, 'host2')


class TestZones(HostsTestCase):
    """What Nova looks at before a host comes into an aggregate of a zone."""

    def setUp(self):
        super().setUp()
        self.context = nova_context.get_admin_context()
        self.aggregate = aggregates.make(
            self.context, name='zoned', metadata={'availability_zone': 'az1'})

    def hosts_in(self, name='zoned'):
        return self.aggregates()[name]

    def refused_by_it(self, change, *hosts):
        return str(self.assertRaises(
            errors.CloudUnavailable, change, self.context, self.aggregate,
            hosts))

    def test_hosts_come_and_go_as_often_as_one_likes(self):
        for _again in range(2):
            aggregate_members.put(
                self.context, self.aggregate, ['host1', 'host2'])
            self.assertEqual(['host1', 'host2'], self.hosts_in())
        aggregate_members.put(self.context, self.aggregate, ['host2', 'plain'])
        self.assertEqual(['host1', 'host2', 'plain'], self.hosts_in())
        for _again in range(2):
            aggregate_members.take_out(
                self.context, self.aggregate, ['host1', 'plain'])
            self.assertEqual(['host2'], self.hosts_in())

    def test_the_schedulers_hear_of_all_that_is_there_now(self):
        told = []
        self.useFixture(fixtures.MonkeyPatch(
            'nova.scheduler.rpcapi.SchedulerAPI.update_aggregates',
            lambda _self, _context, found: told.extend(found)))
        aggregate_members.put(self.context, self.aggregate, ['host1', 'host2'])
        gone = aggregates.make(self.context, name='gone', metadata={})
        gone.destroy()
        told.clear()
        aggregate_members.tell(self.context, self.aggregate, gone)
        self.assertEqual([['host1', 'host2']], [
            sorted(one.hosts) for one in told])

    def test_one_that_is_in_another_zone(self):
        other = aggregates.make(
            self.context, name='other', metadata={'availability_zone': 'az2'})
        aggregate_members.put(self.context, other, ['host2'])
        message = self.refused_by_it(aggregate_members.put, 'host1', 'host2')
        self.assertIn('Hosts host2 do not come', message)
        self.assertIn('availability zone az2', message)
        self.assertEqual([], self.hosts_in())

    def test_one_with_servers(self):
        """They would be in another zone than they were booted into."""
        server = self.boot_active('one')
        host = self.host_of(server)
        self.assertIn('1 server there', self.refused_by_it(
            aggregate_members.put, 'host1', 'host2', 'plain'))
        self.assertEqual([], self.hosts_in())
        self.admin.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        aggregate_members.put(self.context, self.aggregate, [host])
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == host)
        providers.change(uuid, 'aggregates', [self.aggregate.uuid])
        self.boot_active('two', availability_zone='az1')
        # One that is there already changes nothing for it.
        aggregate_members.put(self.context, self.aggregate, [host])
        self.refused_by_it(aggregate_members.take_out, host)
        self.assertEqual([host], self.hosts_in())

    def test_a_cell_that_does_not_answer(self):
        """Its hosts wait, and no others."""
        cell = self.cell_mappings['cell1'].uuid
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.bounded_calls.of_cells', lambda *_args: {
                cell: nova_context.did_not_respond_sentinel}))
        self.assertIn('cell does not answer', self.refused_by_it(
            aggregate_members.put, 'host1'))
        aggregate_members.put(self.context, self.aggregate, ['unmapped'])
        self.assertEqual(['unmapped'], self.hosts_in())

    def test_an_aggregate_that_is_gone(self):
        self.aggregate.destroy()
        aggregate_members.take_out(self.context, self.aggregate, ['host1'])


class TestVerify(HostsTestCase):

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        self.verifier = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None, 0)

    def texts(self, fix=False):
        """What differs, or was mended; in words."""
        report = self.verifier.run(fix)
        self.assertEqual(([], []), (report.problems, report.failures))
        return [one.text for one in (
            report.mended if fix else report.left)]

    def test_nothing_differs_while_hosts_are_leased_and_used(self):
        self.assertEqual([], self.texts())
        lease, reservation_id = self.lease_hosts()
        self.wait_for_status(
            self.within('in', reservation_id)['id'], 'ACTIVE')
        self.listener.mirror.compare_all()
        self.assertEqual([], self.texts())
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual('DELETING', self.get(lease)['status'])
        self.assertEqual([], self.texts())

    def test_what_somebody_took_out_of_the_pool_is_put_back(self):
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == 'host1')
        before = self.aggregates()
        pool.leave(pool.Member(uuid, 'host1'))
        text, = self.texts()
        self.assertIn('host1 is enrolled, but Nova does not keep', text)
        self.assertEqual([text], self.texts(fix=True))
        self.assertEqual(([], before), (self.texts(), self.aggregates()))

    def test_what_is_leased_is_put_back_and_is_not_free(self):
        _lease, reservation_id = self.lease_hosts()
        before = self.aggregates()
        mine, = before[reservation_id]
        context = nova_context.get_admin_context()
        compute_api.AggregateAPI().remove_host_from_aggregate(
            context, aggregates.found(context, 'blazar_pool').id, mine)
        text, = self.texts()
        self.assertIn(f'{mine} is enrolled, but Nova does not keep', text)
        self.texts(fix=True)
        self.assertEqual(([], before), (self.texts(), self.aggregates()))

    def test_a_host_that_an_operator_took_from_a_reservation(self):
        _lease, reservation_id = self.lease_hosts(2, 2)
        before = self.aggregates()
        context = nova_context.get_admin_context()
        compute_api.AggregateAPI().remove_host_from_aggregate(
            context, objects.Aggregate.get_by_uuid(
                context, reservation_id).id, 'host2')
        text, = self.texts()
        self.assertIn('has other hosts in Nova than in the reservation '
                      'database', text)
        self.texts(fix=True)
        self.assertEqual(([], before), (self.texts(), self.aggregates()))

    def test_what_was_begun_is_finished(self):
        with Dying(3, True), contextlib.suppress(Died):
            self.enrol('plain')
        host_id, = (int(one['id']) for one in self.enrolling.listed()
                    if one['hypervisor_hostname'] == 'host1')
        with Dying(2, True), contextlib.suppress(Died):
            self.enrolling.remove(host_id)
        self.assertEqual(2, len(self.texts()))
        self.assertEqual(2, len(self.texts(fix=True)))
        self.assertEqual([], self.texts())
        self.assertEqual(['enrolled', 'enrolled'], [
            one['status'] for one in self.enrolling.listed()])


class Died(BaseException):
    """A process that is not there any more; nothing catches it."""


class Dying(fixtures.Fixture):
    """Whoever changes something in Nova or placement dies at a step.

    :ivar steps: what was done, in its order
    :param at: the number of the step
    :param after: whether it is done, and nothing after it
    """

    PLACES = ('nova.objects.aggregate.Aggregate.create',
              'blazar_nova.compat.aggregate_members.put',
              'blazar_nova.compat.aggregate_members.take_out',
              'nova.scheduler.client.query.SchedulerQueryClient.'
              'update_aggregates',
              'nova.compute.api.AggregateAPI.delete_aggregate',
              'blazar_nova.compat.compute_hosts.tell_placement',
              'blazar_core.capacity.enrollment._write',
              'blazar_core.capacity.assignments.assign',
              'blazar_core.lifecycle.event_queue.EventQueue.done',
              'blazar_core.capacity.assignments.unassign')

    def __init__(self, at, after):
        super().__init__()
        self.at, self.after = at, after
        self.steps = []

    def _setUp(self):
        for place in self.PLACES:
            self.useFixture(fixtures.MonkeyPatch(place, self._mortal(
                place.rpartition('.')[2], pydoc.locate(place))))

    def _mortal(self, name, real):
        def step(*args, **kwargs):
            self.steps.append(name)
            if len(self.steps) == self.at and not self.after:
                raise Died(name)
            result = real(*args, **kwargs)
            if len(self.steps) == self.at:
                raise Died(name)
            return result

        return step


class TestDying(HostsTestCase):
    """Nothing is stuck, in two aggregates or lost, wherever somebody dies.

    What is said of a step is done again by whoever comes next.
    """

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2')}
    POOL = {'freepool': ['host1'], 'blazar_pool': ['host1']}
    worker_timeout = 5
    more_conf = f'[blazar]\nworker_timeout = {worker_timeout}\n'

    def assert_handed_over(self, reservation_id, where):
        """A reservation has the first host, in Nova and in placement."""
        self.assertEqual(
            {'freepool': [], 'blazar_pool': ['host1'],
             reservation_id: ['host1']}, self.aggregates(), where)
        self.assertEqual(
            {'CUSTOM_BLAZAR_POOL', self.trait_of(reservation_id)},
            self.traits('host1'))

    def at_each_step(self, work, again, least, when=(False, True)):
        """Do something, and let it die at each of its steps.

        :param work: what dies
        :param again: what is done then, and looks whether all is right
        :param least: how many steps it has, or more
        :param when: whether the step is done
        """
        steps = []
        for at in itertools.count(1):
            for after in when:
                with Dying(at, after) as dying:
                    with contextlib.suppress(Died):
                        work()
                again((at, after, dying.steps))
                steps = max(steps, dying.steps, key=len)
            if len(dying.steps) < at:
                break
        self.assertGreaterEqual(len(steps), least, steps)

    def test_who_enrols_a_host_and_takes_it_out(self):
        def enrol():
            with contextlib.suppress(errors.Conflict):
                self.enrol('host1')

        def enrolled(where):
            enrol()
            self.assertEqual(self.POOL, self.aggregates(), where)
            self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
            one, = self.enrolling.listed()
            self.assertEqual('enrolled', one['status'], where)
            if len(where[2]) >= where[0]:
                self.enrolling.remove(int(one['id']))

        self.at_each_step(enrol, enrolled, 6)
        self.host_id = int(self.enrolling.listed()[0]['id'])

        def taken_out(where):
            with contextlib.suppress(errors.NotFound):
                self.enrolling.remove(self.host_id)
            self.assertEqual({'freepool': [], 'blazar_pool': []},
                             self.aggregates(), where)
            self.assertEqual(set(), self.traits('host1'))
            self.assertEqual([], self.enrolling.listed())
            enrol()

        self.at_each_step(
            lambda: self.enrolling.remove(self.host_id), taken_out, 5)

    def test_who_starts_a_lease_and_ends_it(self):
        self.enrol('host1')

        def start():
            self.look()
            self.lease_id = self.make(
                reservations=[self.hosts_wanted()])['id']
            self.look()
            self.listener.parts.lifecycle.lease_start.start(self.lease_id)

        def started(where):
            self.listener.parts.lifecycle.lease_start.start(self.lease_id)
            lease = self.ask('GET', f'/leases/{self.lease_id}')['lease']
            self.assertEqual('ACTIVE', lease['status'], where)
            reservation_id = lease['reservations'][0]['id']
            self.assert_handed_over(reservation_id, where)
            self.delete(self.lease_id)
            self.assertEqual(self.POOL, self.aggregates(), where)

        self.at_each_step(start, started, 6)

        def end():
            start()
            self.listener.parts.lifecycle.lease_end.end(self.lease_id)

        def ended(where):
            self.listener.parts.lifecycle.lease_end.end(self.lease_id)
            lease = self.ask('GET', f'/leases/{self.lease_id}')['lease']
            self.assertEqual('TERMINATED', lease['status'], where)
            self.assertEqual(self.POOL, self.aggregates(), where)
            self.assertEqual({'CUSTOM_BLAZAR_POOL'}, self.traits('host1'))
            self.assertEqual([(None,)] * 2, self.books(
                'SELECT assigned_to FROM hosts'), where)

        self.at_each_step(end, ended, 12)

    def test_another_listener_goes_on_with_a_late_start(self):
        """It needs no more than the time in which a claim runs out."""
        self.enrol('host1')
        other = self.new_listener(self.clock)

        def start_event():
            return self.books(
                "SELECT status FROM events WHERE event_type = 'start_lease' "
                f"AND lease_id = '{self.lease_id}'")[0][0]

        def put_off():
            self.lease_id = self.make(
                reservations=[self.hosts_wanted()])['id']
            # Nobody has looked since the host was given back.
            self.run_until(clocks.SystemClock().now() + 1)
            self.assertEqual('PENDING', self.status())
            self.look()
            self.clock.advance(60)

        def started(where):
            if len(where[2]) >= where[0]:
                driven.run_due(other.engine)
                self.assertEqual('IN_PROGRESS', start_event(), where)
            self.clock.advance(self.worker_timeout)
            driven.run_due(other.engine)
            self.assertEqual('ACTIVE', self.status(), where)
            reservation_id, = (one for one in self.aggregates()
                               if one not in self.POOL)
            self.assert_handed_over(reservation_id, where)
            self.assertEqual('DONE', start_event(), where)
            self.delete(self.lease_id)
            self.assertEqual(self.POOL, self.aggregates(), where)
            put_off()

        self.delete(self.make_active(
            reservations=[self.hosts_wanted()])['id'])
        put_off()
        self.at_each_step(
            self.run_due, started, 8, when=(False,))

    def status(self):
        lease = self.ask('GET', f'/leases/{self.lease_id}', code=200)
        return lease['lease']['status']
