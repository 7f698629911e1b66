# SPDX-License-Identifier: Apache-2.0

"""A host fails, and the leases booked there are moved."""

import datetime
import json
from unittest import mock

import fixtures
from nova.conductor import api as compute_task_api
from nova import context as nova_context
from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids
from oslo_utils import timeutils
import requests
import sqlalchemy as sa

from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_nova.compat import aggregate_members
from blazar_nova.compat import aggregates
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import lost_tasks
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import providers
from blazar_nova.listener import monitors
from tests import driven
from tests.functional import leased
from tests.functional import test_recurring
from tests.functional import whole_hosts_base

HOUR = 3600


class Failing:
    """Failures of hosts and the reactions of a listener."""

    def force_down(self, host, down=True):
        """Mark a host as forced down, as an operator or a fence does."""
        (service,) = self.admin.get_services(host=host, binary='nova-compute')
        self.admin.put_service(service['id'], {'forced_down': down})

    def look_for_failures(self):
        """Do the work of a listener within a minute."""
        self.listener.monitors.look()
        self.listener.overbooking.look()
        driven.run_due(self.listener.engine)

    def runs(self, name, hints=None, **boot):
        """Boot a server with a lease; return it ACTIVE, as an admin sees it.

        :param hints: hints in addition to those of the lease
        """
        server = self.boot_active(name, hints={
            **self.lease_hints(name), **(hints or {})}, **boot)
        self.run_due()
        self.run_sync()
        return server

    def leaves(self, server):
        """Wait until a server has left its host, and record that."""
        self.wait_for(lambda: self.admin.get_server(server['id'])[
            'OS-EXT-SRV-ATTR:host'] != server['OS-EXT-SRV-ATTR:host'],
            what='it is elsewhere')
        self.wait_for_status(server['id'], 'ACTIVE')
        self.listener.server_sync.compare_all()

    def back(self, host):
        """Bring a host up, and let it be up for long enough."""
        self.force_down(host, False)
        self.look_for_failures()
        self.clock.advance(300)
        self.look_for_failures()

    def relocate(self):
        self.listener.parts.evacuation.look(self.listener.monitors.certain)

    def fall_silent(self, host):
        """Stop a nova-compute, and let its last report be long ago."""
        self.computes[host].stop()
        service = self.service(host)
        service.last_seen_up = timeutils.utcnow() - datetime.timedelta(hours=1)
        service.save()

    def service(self, host):
        return objects.Service.get_by_compute_host(
            nova_context.get_admin_context(), host)

    def evacuations(self):
        return objects.MigrationList.get_by_filters(
            nova_context.get_admin_context(), {'migration_type': 'evacuation'})


class KeptTest(Failing, test_recurring.RecurringTestCase):
    """A server that is kept between occurrences of its lease."""

    def booked(self):
        """Return the hosts of the bookings of the next occurrences."""
        return [name for name, in self.query(
            'SELECT hosts.name FROM bookings JOIN hosts ON '
            'hosts.id = bookings.host_id WHERE server_id IS NULL '
            'AND outage IS NULL')]

    def test_next_occurrence_is_reassigned_to_other_host(self):
        lease = self.boot_each(count=2, how={'between': 'shelve'})
        server, = self.alice.get_servers()
        self.runs_since(lease, 0, server['id'])
        self.end_of(0, lease)
        self.run_sync()
        here, = self.booked()
        other, = self.hosts.keys() - {here}
        self.run_until(self.start_of(lease, 1) - HOUR // 2)
        self.force_down(here)
        self.look_for_failures()
        self.assertEqual([other], self.booked())
        self.assertIs(True, self.get(lease)['reservations'][0][
            'resources_changed'])
        self.runs_since(lease, 1, server['id'])
        self.assertEqual(other, self.admin.get_server(server['id'])[
            'OS-EXT-SRV-ATTR:host'])
        self.assert_verified()

    def test_running_server_does_not_block_its_next_occurrence(self):
        """Its group keeps servers on different hosts, and the next occurrence
        is booked on the other host.
        """
        group = self.alice.post_server_groups(
            {'name': 'group', 'policy': 'anti-affinity'})
        self.boot('vm', hints={'group': group['id'], **self.lease_hints(
            'vm', HOUR, length=2700, recurrence={
                'rule': 'FREQ=HOURLY;COUNT=2', 'between': 'shelve'})})
        lease = self.only('vm')
        server, = self.alice.get_servers()
        self.runs_since(lease, 0, server['id'])
        here = self.admin.get_server(server['id'])[
            'OS-EXT-SRV-ATTR:host']
        other, = self.hosts.keys() - {here}
        with self.listener.parts.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id.is_(None)).values(
                    host_id=sa.select(models.Host.id).where(
                        models.Host.name == other).scalar_subquery()))
        self.run_until(self.start_of(lease, 0) + 2500)
        self.force_down(other)
        self.look_for_failures()
        self.assertEqual([here], self.booked())
        self.assertEqual('ACTIVE', self.statuses(lease)[0])

    def test_deleted_server_does_not_block_reassignment(self):
        lease = self.boot_each(count=2, how={'between': 'shelve'},
                               min_count=2)
        first, second = (one['id'] for one in self.alice.get_servers())
        for one in (first, second):
            self.runs_since(lease, 0, one)
        self.end_of(0, lease)
        self.run_sync()
        kept, = self.query('SELECT servers FROM recurrences')
        gone, *_left = json.loads(kept[0])
        self.alice.delete_server(gone)
        self.wait_until_gone(gone)
        # As if Nova had archived it.
        objects.RequestSpec.get_by_instance_uuid(
            nova_context.get_admin_context(), gone).destroy()
        self.run_until(self.start_of(lease, 1) - HOUR // 2)
        here = self.booked()[0]
        self.force_down(here)
        self.look_for_failures()
        self.assertNotIn(here, self.booked())
        self.assertEqual(2, len(self.booked()))


class HealthTest(Failing, leased.LeasedTestCase):
    """Two hosts, one of which is forced down."""

    def test_booking_on_failed_host_starts_on_other_host(self):
        soon = self.hold('soon', flavor='5', start_in=HOUR // 2)['id']
        booked = self.bookings()[soon]
        (other,) = self.hosts.keys() - {booked}
        self.look_for_failures()
        self.assertEqual(booked, self.bookings()[soon])
        self.force_down(booked)
        self.look_for_failures()
        self.assertEqual(other, self.bookings()[soon])
        (reservation,) = self.lease('soon')['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        # Its owner acknowledges the change by the lease API.
        url = self.alice.base_url.rsplit('/v2', 1)[0] + (
            f'/reservation/v1/leases/{self.lease("soon")["id"]}')
        for value, code in ((True, 400), (False, 200)):
            response = requests.put(
                url, json={'resources_changed': value},
                headers={'X-Auth-Token': self.alice.who.token()})
            self.assertEqual(code, response.status_code, response.text)
        self.assertIs(False, self.lease('soon')['degraded'])
        self.assert_verified()
        self.clock.advance(HOUR // 2)
        self.run_due()
        server = self.wait_for_status(soon, 'ACTIVE')
        self.assertEqual(other, server['OS-EXT-SRV-ATTR:host'])

    def test_server_is_evacuated_once_host_failure_is_certain(self):
        recorder = self.record()
        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        self.relocate()
        self.force_down(host)
        self.look_for_failures()
        self.assertIs(True, self.lease('vm1')['degraded'])
        # Its nova-compute still reports.
        self.relocate()
        self.assertEqual(0, len(self.evacuations()))
        self.fall_silent(host)
        self.relocate()
        self.leaves(server)
        told = recorder.wait('lease.healed')[-1]
        self.assertEqual([(server['id'], host)], [
            (one['server_id'], one['before']) for one in told['exchanged']])
        (reservation,) = self.lease('vm1')['reservations']
        self.assertEqual((False, True), (
            reservation['missing_resources'],
            reservation['resources_changed']))
        self.relocate()
        self.assertEqual(1, len(self.evacuations()))

    def test_disabled_host_fails_only_if_forced_down(self):
        host = self.runs('vm1')['OS-EXT-SRV-ATTR:host']
        (service,) = self.admin.get_services(host=host, binary='nova-compute')
        self.admin.put_service(service['id'], {'status': 'disabled'})
        self.fall_silent(host)
        self.look_for_failures()
        self.clock.advance(HOUR // 30)
        self.look_for_failures()
        self.relocate()
        self.assertEqual((False, 0), (
            self.lease('vm1')['degraded'], len(self.evacuations())))
        self.force_down(host)
        self.look_for_failures()
        self.relocate()
        self.assertEqual((True, 1), (
            self.lease('vm1')['degraded'], len(self.evacuations())))

    def asks(self, server, seconds=20):
        """Request an evacuation from Nova, as after it was recorded."""
        # Services that are stopped during an evacuation never end.
        self.addCleanup(self.wait_for, lambda: self.task_of(server) is None,
                        what='nobody is at it')
        return self.listener.parts.cloud.evacuate(
            server['id'], self.lease('vm1')['id'], cloud_api.Deadline(
                self.listener.parts.clock, seconds))

    def task_of(self, server):
        return self.admin.get_server(server['id'])['OS-EXT-STS:task_state']

    def test_late_or_concurrent_evacuation_is_refused(self):
        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        self.force_down(host)
        # Its nova-compute still reports.
        self.assertIn('is heard of', self.asks(server))
        self.fall_silent(host)
        self.assertEqual('this process stood still.', self.asks(server, -1))
        # The same if Nova itself is delayed.
        records = objects.RequestSpec.get_by_instance_uuid

        def slowly(*args):
            self.force_down(host, False)
            return records(*args)

        with mock.patch.object(
                objects.RequestSpec, 'get_by_instance_uuid', slowly):
            self.assertIn('is not forced down', self.asks(server))
        self.assertIsNone(self.task_of(server))
        self.assertEqual(['error'], [one.status for one in self.evacuations()])
        self.force_down(host)
        # Of two concurrent requests only one evacuates.
        service = self.listener.parts.cloud._compute_api.get(
            nova_context.get_admin_context(), server['id'])
        service.task_state = 'rebuilding'
        service.save()
        self.assertIn('Nova refuses', self.asks(server))
        service.task_state = None
        service.save()
        self.assertEqual('', self.asks(server))
        self.leaves(server)

    def test_evacuation_is_not_recorded_without_conductor(self):
        """If it were, and never sent, the host would destroy the server when
        it is up again.
        """
        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        self.force_down(host)
        self.fall_silent(host)
        with mock.patch.object(
                nova_cloud, '_ping',
                side_effect=errors.CloudUnavailable('no conductor')):
            self.assertRaises(errors.NotSent, self.asks, server)
        self.assertEqual((None, 0), (
            self.task_of(server), len(self.evacuations())))
        self.assertEqual('', self.asks(server))
        self.leaves(server)

    def test_evacuation_that_was_never_sent_is_requested_again(self):
        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        self.force_down(host)
        self.look_for_failures()
        self.fall_silent(host)
        with mock.patch.object(compute_task_api.ComputeTaskAPI,
                               'rebuild_instance'):
            self.relocate()
        for lost, task in (600, 'rebuilding'), (0, None):
            self.clock.advance(120)
            with mock.patch.object(lost_tasks, '_LOST', lost):
                self.relocate()
            self.assertEqual(task, self.task_of(server))
        self.assertEqual(['error'], [one.status for one in self.evacuations()])
        self.clock.advance(120)
        self.relocate()
        self.leaves(server)

    def test_paused_server_is_not_evacuated(self):
        server = self.runs('vm1')
        self.admin.post_server_action(server['id'], {'pause': None})
        self.wait_for_status(server['id'], 'PAUSED')
        host = server['OS-EXT-SRV-ATTR:host']
        self.fall_silent(host)
        self.force_down(host)
        # Nova would not set a task state for it either.
        self.assertIn('nothing that is paused', self.asks(server))

    def test_server_in_affinity_group_is_not_evacuated(self):
        group = self.alice.post_server_groups(
            {'name': 'group', 'policy': 'affinity'})
        server = self.runs('vm1', {'group': group['id']})
        host = server['OS-EXT-SRV-ATTR:host']
        self.fall_silent(host)
        self.force_down(host)
        self.assertIn('server group', self.asks(server))
        self.assertEqual('ACTIVE', self.admin.get_server(
            server['id'])['status'])

    def test_silent_host_is_fenced_before_evacuation(self):
        asked, says = [], [False]

        class Controllers(monitors.Monitor):
            def look(self, _database):
                return {}

            def fence(self, host):
                asked.append(host)
                return says[-1]

        parts = self.listener.parts
        fencing = monitors.Fencing(
            parts.database, parts.clock, {'controllers': Controllers()})
        self.listener.monitors._fencing = fencing

        def certain(may_fence=True):
            found = self.listener.monitors.certain({uuid: may_fence})
            for thread in fencing._threads.values():
                thread.join()
            return found

        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        ((uuid,),) = self.query(
            f"SELECT uuid FROM hosts WHERE name = '{host}'")
        self.force_down(host)
        self.look_for_failures()
        self.force_down(host, False)
        # It is up: the fence is not called.
        self.assertEqual((frozenset(), []), (certain(), asked))
        self.fall_silent(host)
        self.assertEqual((frozenset(), []), (certain(False), asked))
        self.assertEqual((frozenset(), [host]), (certain(), asked))
        # Nova itself would consider it down.
        self.assertIn('is not forced down', self.asks(server))
        self.assertEqual(0, len(self.evacuations()))
        says.append(True)
        fencing._again.clear()
        self.assertEqual(frozenset(), certain())
        self.assertIs(True, self.service(host).forced_down)
        self.assertEqual({uuid}, certain())
        # Not again in this failure, once its operator has brought it up.
        self.force_down(host, False)
        fencing._again.clear()
        self.assertEqual((frozenset(), 2), (certain(), len(asked)))
        self.force_down(host)
        self.relocate()
        self.leaves(server)
        self.assertEqual(1, len(self.evacuations()))

    def test_later_booking_stays_if_host_recovers(self):
        later = self.hold('later', flavor='5', start_in=2 * HOUR)['id']
        booked = self.bookings()[later]
        self.force_down(booked)
        self.look_for_failures()
        self.assertEqual(booked, self.bookings()[later])
        self.back(booked)
        self.assertEqual([], self.query('SELECT * FROM outages'))
        self.clock.advance(2 * HOUR - 300)
        self.run_due()
        server = self.wait_for_status(later, 'ACTIVE')
        self.assertEqual(booked, server['OS-EXT-SRV-ATTR:host'])

    def test_owner_is_notified_if_no_host_is_left(self):
        recorder = self.record()
        first = self.hold('vm1', flavor='5', start_in=HOUR // 2)['id']
        self.hold('vm2', flavor='5', start_in=HOUR // 2)
        failing = self.bookings()[first]
        self.force_down(failing)
        self.look_for_failures()
        (told,) = recorder.wait('lease.degraded')
        self.assertEqual('vm1', told['name'])
        self.assertEqual([(failing, None)], [
            (one['before'], one['after']) for one in told['exchanged']])
        self.assertIs(True, self.lease('vm1')['degraded'])
        self.back(failing)
        (told,) = recorder.wait('lease.healed')
        self.assertEqual([(None, failing)], [
            (one['before'], one['after']) for one in told['exchanged']])

    def test_lease_of_running_server_is_degraded_until_recovery(self):
        server = self.boot_active('vm1', hints=self.lease_hints('vm1'))
        self.run_due()
        self.run_sync()
        self.force_down(server['OS-EXT-SRV-ATTR:host'])
        self.look_for_failures()
        self.assertIs(True, self.lease('vm1')['reservations'][0][
            'missing_resources'])
        self.assert_verified()
        self.back(server['OS-EXT-SRV-ATTR:host'])
        self.assertIs(False, self.lease('vm1')['degraded'])

    def test_new_leases_avoid_failed_host(self):
        self.force_down('host1')
        self.look_for_failures()
        server = self.boot_active('vm1', hints=self.lease_hints('vm1'))
        self.assertEqual('host2', server['OS-EXT-SRV-ATTR:host'])
        message = self.refused(409, self.boot, 'vm2', flavor='5',
                               hints=self.lease_hints('vm2'))
        self.assertIn('next_start', message)


class WholeHostsTest(Failing, whole_hosts_base.HostsTestCase):
    """Two enrolled hosts, one of which fails under a lease."""

    def hosts_of(self, lease):
        return {name for name, in self.query(
            'SELECT hosts.name FROM hosts '
            'JOIN bookings ON bookings.host_id = hosts.id '
            'JOIN reservations ON reservations.id = reservation_id '
            f"WHERE reservations.lease_id = '{lease['id']}'")}

    def test_pending_lease_yields_host_to_active_lease(self):
        """Its hosts are in a zone of their own, others are not."""
        self.enrol(*self.hosts)
        wanted = {'reservations': [self.hosts_wanted()]}
        lost = self.make_active(length=6 * HOUR, **wanted)
        runs = self.make_active(length=3 * HOUR, **wanted)
        # The first one is booked where another lease ends before; the second
        # one gets the third host.
        first, later = (self.make(
            start_in=4 * HOUR, length=HOUR, **wanted) for _each in range(2))
        self.delete(first['id'])
        failing, busy, free = (
            *self.hosts_of(lost), *self.hosts_of(runs), *self.hosts_of(later))
        self.assertEqual({*self.hosts}, {failing, busy, free})
        # The lost lease gets a healthy host from now on.
        self.clock.advance(2)
        self.force_down(failing)
        self.look_for_failures()
        self.assertEqual(({failing, free}, {busy}), (
            self.hosts_of(lost), self.hosts_of(later)))
        self.assertEqual(sorted((failing, free)), self.aggregates()[
            self.get(lost)['reservations'][0]['id']])
        self.assert_verified()

    def test_hosted_server_with_anti_affinity_is_not_evacuated(self):
        """Nova would put it in ERROR."""
        self.enrol('host1', 'host2')
        _lease, reservation_id = self.lease_hosts(2, 2)
        group = self.alice.api_post('/os-server-groups', {'server_group': {
            'name': 'apart', 'policy': 'anti-affinity',
        }}).body['server_group']['id']
        servers = [self.wait_for_status(self.boot(name, hints={
            'reservation': reservation_id, 'group': group})['id'], 'ACTIVE')
            for name in ('one', 'two')]
        failing = self.host_of(servers[0])
        self.assertNotEqual(failing, self.host_of(servers[1]))
        self.force_down(failing)
        self.fall_silent(failing)
        self.look_for_failures()
        for _look in range(3):
            self.relocate()
            self.clock.advance(300)
        self.assertEqual(0, len(self.evacuations()))
        self.wait_for_status(servers[0]['id'], 'ACTIVE')

    def test_hosted_server_is_evacuated_after_host_replacement(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts(2, 2)
        self.enrol('plain')
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        failing = self.host_of(server)
        self.force_down(failing)
        self.look_for_failures()
        self.assertIn('plain', self.hosts_of(lease))
        self.assertIs(False, self.get(lease)['reservations'][0][
            'missing_resources'])
        self.fall_silent(failing)
        self.relocate()
        self.wait_for(lambda: self.host_of(server) != failing)
        self.wait_for_status(server['id'], 'ACTIVE')

    def test_hosted_server_is_evacuated_to_other_host_of_lease(self):
        """A hosted server, by its hint alone, without a lease of its own."""
        self.enrol('host1', 'host2')
        _lease, reservation_id = self.lease_hosts(2, 2)
        large, small = (self.within(name, reservation_id, flavor=flavor)
                        for name, flavor in (('large', '4'), ('small', '1')))
        self.wait_for_status(small['id'], 'ACTIVE')
        large = self.wait_for_status(large['id'], 'ACTIVE')
        failing, other = self.host_of(large), self.host_of(small)
        self.assertNotEqual(failing, other)
        self.force_down(failing)
        self.look_for_failures()
        self.relocate()
        self.fall_silent(failing)
        # Nova would put it in ERROR: the host has no capacity for both.
        self.relocate()
        self.assertEqual(0, len(self.evacuations()))
        self.admin.delete_server(small['id'])
        self.wait_until_gone(small['id'])
        self.clock.advance(30)
        self.relocate()
        self.wait_for(lambda: self.host_of(large) == other)
        self.wait_for_status(large['id'], 'ACTIVE')
        self.clock.advance(HOUR // 4)
        self.relocate()
        self.assertEqual(1, len(self.evacuations()))
        self.assert_verified()

    def test_failed_host_of_lease_is_replaced(self):
        self.enrol('host1', 'host2')
        lease, reservation_id = self.lease_hosts()
        (first,) = self.aggregates()[reservation_id]
        (other,) = {'host1', 'host2'} - {first}
        self.force_down(first)
        self.look_for_failures()
        self.assertEqual(
            ['host1', 'host2'], self.aggregates()[reservation_id])
        self.assertIs(False, self.get(lease)['reservations'][0][
            'missing_resources'])
        shared = self.ask('PUT', f'/leases/{lease["id"]}', {
            'reservations': [{'id': reservation_id,
                              'projects': [uuids.other]}]}, code=200)
        self.assertEqual([uuids.other], shared['lease']['reservations'][0][
            'projects'])
        self.assertEqual(
            ['host1', 'host2'], self.aggregates()[reservation_id])
        server = self.within('vm1', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual(other, self.host_of(server))
        self.assert_verified()
        self.alice.delete_server(server['id'])
        self.wait_until_gone(server['id'])
        self.force_down(first, False)
        self.delete(lease['id'])
        self.assertEqual(['host1', 'host2'], self.aggregates()['freepool'])
        self.assertNotIn(reservation_id, self.aggregates())

    def test_replacement_host_is_not_of_other_availability_zone(self):
        """A host has one zone in Nova, and the lease has a zone of its own."""
        self.enrol('host1')
        lease, reservation_id = self.lease_hosts()
        self.enrol('host2')
        context = nova_context.get_admin_context()
        rack = aggregates.make(context, name='rack', metadata={
            'availability_zone': 'az1'})
        aggregate_members.put(context, rack, ['host2'])
        (uuid,) = (one.uuid for one in compute_hosts.all_hosts()[0]
                   if one.name == 'host2')
        providers.change(uuid, 'aggregates', [rack.uuid])
        self.force_down('host1')
        self.look_for_failures()
        self.assertIs(True, self.get(lease)['reservations'][0][
            'missing_resources'])
        self.assertEqual(['host1'], self.aggregates()[reservation_id])
        self.assertEqual([('host1',)], self.query(
            'SELECT name FROM hosts JOIN bookings '
            'ON bookings.host_id = hosts.id '
            f"WHERE reservation_id = '{reservation_id}'"))
        self.enrol('plain')
        self.clock.advance(600)
        self.look_for_failures()
        self.assertEqual(
            ['host1', 'plain'], self.aggregates()[reservation_id])


class MaintenanceTest(Failing, whole_hosts_base.HostsTestCase):
    """Two hosts, one of which is scheduled for maintenance."""

    hosts = leased.LeasedTestCase.hosts

    def maintain(self, host, until=None, *words, pause=None):
        """Run the command; it may only wait if ``pause`` is given."""
        until = self.at(4 * HOUR) if until is None else until
        with fixtures.MonkeyPatch(
                'blazar_nova.cmd.manage._pause', pause or self.fail):
            return self.command('host', 'maintain', host, '--until', until,
                                '--reason', 'firmware', *words)

    def test_booking_on_host_in_maintenance_is_reassigned(self):
        self.run_sync()
        held = self.hold('vm1', flavor='4', start_in=3 * HOUR)['id']
        booked = self.bookings()[held]
        (other,) = {'host1', 'host2'} - {booked}
        code, text = self.maintain(booked, None, '--dry-run')
        self.assertEqual(0, code, text)
        for words in (self.lease('vm1')['id'], held, 'vm1',
                      '1 booking: 1 reassigned to other hosts, 0 not.',
                      'Nothing was changed.'):
            self.assertIn(words, text)
        self.assertEqual([], self.query('SELECT * FROM outages'))
        code, text = self.maintain(booked)
        self.assertEqual(0, code, text)
        self.listener.overbooking.look()
        self.assertEqual(other, self.bookings()[held])
        self.assertEqual([(booked, 'maintenance', 'firmware')], [
            (one.name, one.kind, one.reason)
            for one in outages.listed(self.listener.parts.database)])
        self.assert_verified()
        # A server without a lease has no end: it is not placed there either.
        plain = self.boot_active('plain', client=self.admin)
        self.assertEqual(other, plain['OS-EXT-SRV-ATTR:host'])
        code, text = self.maintain(booked, None, '--wait')
        self.assertEqual(0, code, text)
        self.assertIn(f'Host {booked} has no bookings of leases', text)

    def test_maintenance_lists_servers_that_cannot_be_migrated(self):
        server = self.runs('vm1', metadata={'blazar:keep': 'true'})
        host = server['OS-EXT-SRV-ATTR:host']
        code, text = self.maintain(host)
        self.assertEqual(1, code)
        for words in (server['id'], 'No. The server is not running or',
                      'reassigned to other hosts, 1 not.',
                      'Nothing was changed. Migrate the servers that'):
            self.assertIn(words, text)
        self.assertEqual([], self.query('SELECT * FROM outages'))
        code, text = self.maintain(host, None, '--force')
        self.assertEqual(0, code, text)
        self.assertIs(False, self.lease('vm1')['degraded'])
        self.assert_verified()
        # Another operator ends the maintenance meanwhile.
        code, text = self.maintain(
            host, None, '--force', '--wait',
            pause=lambda _seconds: self.command(
                'host', 'maintain', host, '--until', 'now'))
        self.assertEqual(1, code)
        self.assertIn('is no longer in maintenance, and leases', text)
        self.assertEqual([], self.query('SELECT * FROM outages'))
        code, text = self.maintain(host, None, '--force')
        self.assertEqual(0, code, text)
        # It is migrated as always, and the filter selects the target.
        self.admin.post_server_action(server['id'], {'os-migrateLive': {
            'host': None, 'block_migration': 'auto'}})
        self.leaves(server)
        code, text = self.maintain(host, None, '--wait')
        self.assertEqual(0, code, text)
        # Omitted values are not changed.
        began = self.query('SELECT began_at, reason FROM outages')
        code, text = self.command(
            'host', 'maintain', host, '--until', self.at(5 * HOUR))
        self.assertEqual(0, code, text)
        self.assertEqual(
            began, self.query('SELECT began_at, reason FROM outages'))
        for said in ('is no longer in maintenance', 'is not in maintenance'):
            code, text = self.maintain(host, 'now')
            self.assertEqual(0, code, text)
            self.assertIn(said, text)
        self.assertEqual([], self.query('SELECT * FROM outages'))

    def test_maintenance_migrates_running_server(self):
        server = self.runs('vm1')
        host = server['OS-EXT-SRV-ATTR:host']
        code, text = self.maintain(host)
        self.assertEqual(0, code, text)
        self.assertIn('1 booking: 1 reassigned to other hosts, 0 not.', text)
        self.listener.parts.evacuation.look()
        self.leaves(server)
        code, text = self.maintain(host, None, '--wait')
        self.assertEqual(0, code, text)
        self.assertIn(f'Host {host} has no bookings of leases', text)
        self.assertIs(False, self.lease('vm1')['degraded'])
        self.assert_verified()

    def test_maintenance_api(self):
        held = self.hold('vm1', flavor='4', start_in=3 * HOUR)['id']
        self.run_sync()
        booked = self.bookings()[held]
        (other,) = {'host1', 'host2'} - {booked}
        path = f'/maintenance/{booked}'

        def take(code, client=None, query='', **body):
            return self.ask('PUT', path + query, {
                'end_date': self.at(4 * HOUR), **body},
                client or self.admin, code)

        for method in 'GET', 'PUT', 'DELETE':
            self.ask(method, path, {} if method == 'PUT' else None,
                     self.alice, 403)
        self.ask('GET', '/maintenance', client=self.alice, code=403)
        for code, query, body in (
                (400, '', {'end_date': None}), (400, '', {'end_date': 'soon'}),
                (400, '', {'end_date': '2020-01-01 00:00'}),
                (400, '', {'start_date': self.at(5 * HOUR)}),
                (400, '', {'start_date': 7}), (400, '', {'reason': 'x' * 256}),
                (400, '', {'force': 'maybe'}), (400, '', {'always': True}),
                (400, '?dry=1', {})):
            take(code, query=query, **body)
        for method in 'GET', 'PUT', 'DELETE':
            said = self.ask(method, '/maintenance/nowhere', {
                'end_date': self.at(HOUR)} if method == 'PUT' else None,
                self.admin, 404)
            self.assertIn('no host nowhere', said['error_message'])
        self.ask('GET', path, client=self.admin, code=404)
        self.ask('DELETE', path, client=self.admin, code=404)
        asked = take(200, query='?dry_run=true')['maintenance']
        self.assertEqual([(held, '')], [
            (one['server_id'], one['obstacle']) for one in asked['promised']])
        self.assertEqual([], self.query('SELECT * FROM outages'))
        # Without another host it is refused, with the counts.
        self.make(start_in=2 * HOUR, length=2 * HOUR, reservations=[
            self.reservation(vcpus=self.hosts[other].vcpus)])
        said = take(409)['error_message']
        self.assertIn('1 of ', said)
        self.assertIn(self.lease('vm1')['id'], said)
        taken = take(200, reason='firmware', force=True)['maintenance']
        self.assertEqual((booked, 'firmware'), (
            taken['host'], taken['reason']))
        # Omitted values are not changed.
        self.assertEqual('firmware', take(200, force=True)[
            'maintenance']['reason'])
        self.assertIn('"host" is not known', self.ask(
            'GET', '/maintenance', client=self.admin, code=400, host=booked)[
                'error_message'])
        listed, = self.ask('GET', '/maintenance', client=self.admin)[
            'maintenance']
        shown = self.ask('GET', path, client=self.admin)['maintenance']
        self.assertEqual([None], [
            one['obstacle'] for one in shown.pop('promised')])
        self.assertEqual(listed, shown)
        self.ask('DELETE', path, client=self.admin, code=204)
        self.assertEqual([], self.query('SELECT * FROM outages'))

    def test_invalid_maintenance_commands_are_refused(self):
        for words, said in (
                (('nowhere',),
                 'There is no host nowhere in the reservation database.'),
                (('host1', 'tomorrow'), 'invalid date'),
                (('host1', '2020-01-01 00:00'),
                 'or --until now to end the maintenance.'),
                (('host1', None, '--from', self.at(5 * HOUR)),
                 'over before it begins')):
            code, text = self.maintain(*words)
            self.assertEqual(1, code)
            self.assertIn(said, text)
