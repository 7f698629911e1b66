# SPDX-License-Identifier: Apache-2.0

"""Enrolling and removing hosts, by commands and the API."""

import contextlib

import fixtures
from nova.compute import api as compute_api
from nova import context as nova_context
from nova import objects
from oslo_utils import uuidutils

from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import bounded_calls
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import pool
from blazar_nova.compat import providers
from blazar_nova.verify import enrolled_hosts
from blazar_nova.verify import verification
from tests.functional import whole_hosts_base

HOUR = 3600


class TestEnrolling(whole_hosts_base.HostsTestCase):

    def enrol_anew(self):
        """Enroll a host; return its id and that of an enrollment from before
        it was reinstalled under its name.
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

    def test_verify_reports_stale_enrollment_of_reinstalled_host(self):
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
                report.fixed, report.problems, report.failures))
        self.enrolling.remove(old_id)
        self.assert_verified()

    def test_verify_skips_enrollments_while_cell_is_unavailable(self):
        self.enrol_anew()
        parts = self.listener.parts
        with fixtures.MonkeyPatch(
                'blazar_nova.compat.compute_hosts.all_hosts',
                lambda: ([], False)):
            self.assertEqual([], [
                one for one in enrolled_hosts.differences(
                    parts.database, parts.clock.now(), parts.host_enrollment,
                    parts.lifecycle.lease_opening.open)
                if one.key[0] == 'enrolled'])

    def test_reinstalled_host_stays_enrolled_if_old_one_is_removed(self):
        new_id, old_id = self.enrol_anew()
        # Its enrollment may still be in progress.
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

    def test_enrolled_host_accepts_no_servers_without_lease(self):
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
        # Not even a user who may select the host gets there.
        self.fails(self.boot('forced', client=self.admin,
                             availability_zone='nova:host1'))
        self.enrolling.remove(int(first['id']))
        self.assertEqual({'freepool': ['host2'], 'blazar_pool': ['host2']},
                         self.aggregates())
        self.assertEqual(set(), self.traits('host1'))
        server = self.boot_active('one more', flavor='3')
        self.assertEqual('host1', self.host_of(server))

    def test_members_cannot_see_availability_zone_of_host(self):
        """The name of its zone contains the id of the reservation."""
        self.enrol('host1')
        _lease, reservation_id = self.lease_hosts()
        for client, zone in ((self.admin, f'blazar_{reservation_id}'),
                             (self.bob, ''), (self.alice, '')):
            host, = self.ask('GET', '/os-hosts', client=client)['hosts']
            self.assertEqual(zone, host['availability_zone'])

    def test_host_with_servers_cannot_be_enrolled(self):
        server = self.boot_active('there')
        host = self.host_of(server)
        exc = self.assertRaises(errors.Conflict, self.enrol, host)
        self.assertIn('it has 1 server', str(exc))
        self.assertEqual([], self.enrolling.listed())
        self.assertEqual(set(), self.traits(host))
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        # The deletion counts only once Nova has reported it.
        self.clock.advance(60)
        self.enrol(host)

    def test_repeated_request_completes_enrollment_or_removal(self):
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

    def test_concurrent_removals_of_host_succeed(self):
        """Or a listener that completes the removal of a command."""
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

    def test_enrollment_during_removal_is_refused(self):
        """A concurrent enrollment between two steps of the removal."""
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
        """Make a function of the pool raise after its work in this context."""
        real = getattr(pool, name)

        def stumble(*args):
            real(*args)
            raise RuntimeError('killed')

        return fixtures.MonkeyPatch(
            f'blazar_nova.compat.pool.{name}', stumble)

    def test_unknown_or_enrolled_hosts_are_refused(self):
        self.assertRaises(errors.NotFound, self.enrol, 'no such host')
        self.enrol('host1')
        self.assertRaises(errors.Conflict, self.enrol, 'host1')


class TestCommands(whole_hosts_base.HostsTestCase):

    def manage(self, *words):
        return self.command('host', *words)

    def test_commands_enroll_list_and_remove_host(self):
        code, text = self.manage('add', 'host1', 'gpu=A100')
        self.assertEqual((0, True), (code, 'it serves leases only' in text))
        host, = self.enrolling.listed()
        self.assertEqual('A100', host['gpu'])
        self.assertRegex(self.manage('list')[1],
                         rf'{host["id"]} *\| host1 *\| enrolled *\| True')
        code, text = self.manage('remove', host['id'])
        self.assertEqual((0, True), (code, 'available to all' in text))
        self.assertEqual([], self.enrolling.listed())

    def test_remove_waits_until_leases_of_host_have_ended(self):
        host, = self.enrol('host1')
        lease, _id = self.lease_hosts()
        later = self.make(start_in=2 * HOUR, reservations=[
            self.hosts_wanted()])['id']
        code, text = self.manage('remove', 'host1')
        self.assertEqual((1, True), (code, '2 bookings' in text), text)
        for lease_id in lease['id'], later:
            self.assertIn(f'({lease_id})', text)
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

    def test_listener_completes_interrupted_removal(self):
        host, = self.enrol('host1')
        lease, _id = self.lease_hosts()

        def stop(_seconds):
            raise KeyboardInterrupt

        with fixtures.MonkeyPatch('blazar_nova.cmd.manage._pause', stop):
            code, text = self.manage('remove', host['id'], '--wait')
        self.assertEqual(130, code)
        self.assertIn('it is safe to repeat it', text)
        answer = self.make(code=409, reservations=[self.hosts_wanted()])
        self.assertIn('fits_now: 0 of 1', answer['error_message'])
        self.listener.parts.host_enrollment.remove_left()
        self.assertEqual('leaving', self.enrolling.show(
            int(host['id']))['status'])
        self.delete(lease['id'])
        self.listener.parts.host_enrollment.remove_left()
        self.assertEqual([], self.enrolling.listed())
        self.assertEqual({'freepool': [], 'blazar_pool': []},
                         self.aggregates())

    def test_failed_removal_does_not_block_other_hosts(self):
        first, second = self.enrol('host1', 'host2')
        for host in (first, second):
            self.enrolling.retire(int(host['id']))
        real = providers.change
        down_uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                      if one.service_host == 'host1')

        def down(uuid, *args, **kwargs):
            if uuid == down_uuid:
                raise errors.CloudUnavailable('Placement does not answer.')
            return real(uuid, *args, **kwargs)

        with fixtures.MonkeyPatch(
                'blazar_nova.compat.providers.change', down):
            self.enrolling.remove_left()
            self.assertEqual(['host1'], [
                one['service_name'] for one in self.enrolling.listed()])
            code, text = self.manage('remove', first['id'])
            self.assertEqual(1, code)
            self.assertIn('Placement does not answer.', text)
        self.enrolling.remove_left()
        self.assertEqual([], self.enrolling.listed())

    def test_late_removal_does_not_remove_reenrolled_host(self):
        for late in ('before', 'within'):
            host, = self.enrol('host1')
            self.enrolling.retire(int(host['id']))
            other = self.listener.parts.host_enrollment
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

    def test_invalid_commands_print_reason(self):
        for words, part in (
                (('add', 'nowhere'), 'There is no host nowhere'),
                (('add', 'host1', 'gpu'), 'gpu is not in the form KEY=VALUE'),
                (('add', 'host1', 'vcpus=99'), '"vcpus" is no extra'),
                (('remove', '999'), 'Host 999 could not be found'),
                (('remove', 'host1'), 'No enrolled host has the name host1')):
            code, text = self.manage(*words)
            self.assertEqual((1, True), (code, part in text), text)


class TestNotIsolated(whole_hosts_base.HostsTestCase):

    more_conf = '[scheduler]\nenable_isolated_aggregate_filtering = False\n'

    def test_enrollment_requires_isolated_aggregate_filtering(self):
        exc = self.assertRaises(errors.Conflict, self.enrol, 'host1')
        self.assertIn('enable_isolated_aggregate_filtering', str(exc))


class TestZones(whole_hosts_base.HostsTestCase):
    """Nova's checks before a host joins an aggregate with a zone."""

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

    def test_adding_and_removing_members_is_idempotent(self):
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

    def test_schedulers_are_notified_of_current_members(self):
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

    def test_host_of_other_availability_zone_is_refused(self):
        other = aggregates.make(
            self.context, name='other', metadata={'availability_zone': 'az2'})
        aggregate_members.put(self.context, other, ['host2'])
        message = self.refused_by_it(aggregate_members.put, 'host1', 'host2')
        self.assertIn('Hosts host2 do not come', message)
        self.assertIn('availability zone az2', message)
        self.assertEqual([], self.hosts_in())

    def test_host_with_servers_cannot_change_availability_zone(self):
        """They would be in another zone than that of their boot."""
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
        # A host that is a member already is not changed.
        aggregate_members.put(self.context, self.aggregate, [host])
        self.refused_by_it(aggregate_members.take_out, host)
        self.assertEqual([host], self.hosts_in())

    def test_hosts_of_unavailable_cell_are_refused(self):
        """Only hosts of that cell have to wait."""
        cell = self.cell_mappings['cell1'].uuid
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.bounded_calls.of_cells', lambda *_args: {
                cell: bounded_calls.Silent()}))
        self.assertIn('cell does not answer', self.refused_by_it(
            aggregate_members.put, 'host1'))
        aggregate_members.put(self.context, self.aggregate, ['unmapped'])
        self.assertEqual(['unmapped'], self.hosts_in())

    def test_removal_from_deleted_aggregate_is_ignored(self):
        self.aggregate.destroy()
        aggregate_members.take_out(self.context, self.aggregate, ['host1'])


class TestVerify(whole_hosts_base.HostsTestCase):

    def setUp(self):
        super().setUp()
        self.enrol('host1', 'host2')
        self.verifier = verification.Verifier(
            self.listener.parts, lambda _seconds: None, lambda _text: None, 0)

    def texts(self, fix=False):
        """Return the texts of differences that remain, or were fixed."""
        report = self.verifier.run(fix)
        self.assertEqual(([], []), (report.problems, report.failures))
        return [one.text for one in (
            report.fixed if fix else report.left)]

    def test_verify_finds_nothing_while_hosts_are_leased(self):
        self.assertEqual([], self.texts())
        lease, reservation_id = self.lease_hosts()
        self.wait_for_status(
            self.within('in', reservation_id)['id'], 'ACTIVE')
        self.listener.server_sync.compare_all()
        self.assertEqual([], self.texts())
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual('DELETING', self.get(lease)['status'])
        self.assertEqual([], self.texts())

    def test_verify_restores_host_removed_from_pool(self):
        uuid, = (one.uuid for one in compute_hosts.all_hosts()[0]
                 if one.name == 'host1')
        before = self.aggregates()
        pool.leave(pool.Member(uuid, 'host1'))
        text, = self.texts()
        self.assertIn('host1 is enrolled, but Nova does not keep', text)
        self.assertEqual([text], self.texts(fix=True))
        self.assertEqual(([], before), (self.texts(), self.aggregates()))

    def test_verify_restores_leased_host_removed_from_pool(self):
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

    def test_verify_restores_host_removed_from_reservation(self):
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

    def test_verify_completes_interrupted_enrollment_and_removal(self):
        with whole_hosts_base.Dying(3, True), contextlib.suppress(
                whole_hosts_base.Died):
            self.enrol('plain')
        host_id, = (int(one['id']) for one in self.enrolling.listed()
                    if one['hypervisor_hostname'] == 'host1')
        with whole_hosts_base.Dying(2, True), contextlib.suppress(
                whole_hosts_base.Died):
            self.enrolling.remove(host_id)
        self.assertEqual(2, len(self.texts()))
        self.assertEqual(2, len(self.texts(fix=True)))
        self.assertEqual([], self.texts())
        self.assertEqual(['enrolled', 'enrolled'], [
            one['status'] for one in self.enrolling.listed()])
