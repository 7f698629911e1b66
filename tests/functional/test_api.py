# SPDX-License-Identifier: Apache-2.0

"""The lease API of a real nova-api, and boots with its reservations."""

import collections
import json
import time
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import objects
from oslo_db import exception as db_exc
import sqlalchemy as sa
from sqlalchemy.orm import exc as orm_exc

from blazar_core.capacity import booking_index
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.compat import flavors
from blazar_nova.services import wiring
from tests import driven
from tests.functional import api_base
from tests.functional import base
from tests.functional import nova_box

HOUR = 3600


class TestLeases(api_base.ApiTestCase):

    def test_requests_do_not_load_whole_booking_index(self):
        with mock.patch.object(booking_index.Index, '_load') as load:
            self.make_active()
            self.boot_active('plain')
        load.assert_not_called()

    def test_booking_index_is_followed_from_first_request(self):
        del self.followed[:]
        self.ask('GET', '/leases', code=200)
        self.assertEqual([wiring.shared().admission.index], self.followed)

    def test_lease_flavor_boots_servers_up_to_amount_until_lease_ends(self):
        lease = self.make_active(reservations=[self.reservation(amount=2)])
        reservation, = lease['reservations']
        flavor = self.flavor(reservation['id'])
        self.assertEqual(
            (f'reservation:{reservation["id"]}', 2, 1024, 1, False,
             [nova_box.PROJECT_ID]),
            (flavor.name, flavor.vcpus, flavor.memory_mb, flavor.root_gb,
             flavor.is_public, flavor.projects))
        first = self.boot_active('one', flavor=reservation['flavor_id'])
        self.boot_active('two', flavor=reservation['id'])
        self.listener.server_sync.compare_all()
        message = self.refused(409, self.boot, 'three',
                               flavor=reservation['id'])
        self.assertIn('All 2 slots of reservation', message)
        # A free slot can be taken again.
        self.alice.delete_server(first['id'])
        self.wait_until_gone(first['id'])
        self.listener.server_sync.compare_all()
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.boot_active('three', flavor=reservation['id'])
        servers = self.get(lease)['reservations'][0]['servers']
        self.assertEqual(2, len(servers))
        # All servers end with the lease.
        self.clock.advance(2 * HOUR)
        driven.run_due(self.listener.engine)
        for server_id in servers:
            self.wait_until_gone(server_id)
        self.clock.advance(60)
        driven.run_due(self.listener.engine)
        lease = self.get(lease)
        self.assertEqual('TERMINATED', lease['status'])
        self.assertEqual('deleted', lease['reservations'][0]['status'])
        self.assertEqual({'end_lease': 'DONE'}, {
            event['event_type']: event['status'] for event in
            lease['events'] if event['event_type'] == 'end_lease'})
        self.assertIsNone(self.flavor(reservation['id']))

    def test_boot_beyond_amount_answers_fits_now_and_next_start(self):
        lease = self.make_active(reservations=[self.reservation(
            vcpus=4, amount=2)])
        flavor = lease['reservations'][0]['flavor_id']
        self.boot_active('one', flavor=flavor)
        fault = self.fault(flavor, 2)
        # Both hosts are full until the lease ends.
        self.assertEqual((1, lease['end_date']), (
            fault['fits_now'], fault['next_start']))
        self.assertIn(f'Boot at most 1 server, delete some, or raise the '
                      f'amount. next_start: {lease["end_date"]}, of a '
                      f'lease of their own. fits_now: 1.', fault['message'])

    def test_full_reservation_that_has_just_ended_has_no_next_start(self):
        lease = self.make_active()
        parts = wiring.shared()
        occupy, now = parts.leases.slots.take, parts.clock.now

        def slowly(*args):
            try:
                return occupy(*args)
            finally:
                self.useFixture(fixtures.MonkeyPatch(
                    f'{__name__}.clocks.SystemClock.now',
                    lambda _clock: now() + HOUR))

        with mock.patch.object(parts.leases.slots, 'take', slowly):
            fault = self.fault(lease['reservations'][0]['flavor_id'], 2)
        self.assertNotIn('next_start', fault)
        self.assertEqual('full', fault['reason'])
        self.assertIn('Boot at most 1 server', fault['message'])
        self.assertEqual([], self.alice.get_servers())

    def fault(self, flavor, count):
        answer = self.alice.api_request(
            '/servers', method='POST', headers={
                'Content-Type': 'application/json'}, body=json.dumps({
                    'server': {'name': 'more', 'flavorRef': flavor,
                               'imageRef': base.IMAGE, 'networks': 'none',
                               'min_count': count}}),
            check_response_status=None)
        self.assertEqual(409, answer.status_code, answer.text)
        return answer.json()['conflictingRequest']

    def test_lease_flavor_does_not_exist_before_lease_starts(self):
        lease = self.make(start_in=HOUR)
        flavor_id = lease['reservations'][0]['flavor_id']
        self.assertIsNone(self.flavor(flavor_id))
        self.refused(400, self.boot, 'early', flavor=flavor_id)
        self.run_until(self.began + HOUR)
        self.boot_active('in time', flavor=flavor_id)

    def test_other_projects_cannot_boot_with_lease_flavor(self):
        lease = self.make_active()
        bob = self.api(project='b' * 32, user='bob')
        flavor_id = lease['reservations'][0]['flavor_id']
        self.refused(400, self.boot, 'mine?', flavor=flavor_id, client=bob)
        # An admin may use every flavor, but not every reservation.
        self.refused(409, self.boot, 'mine?', flavor=flavor_id,
                     client=self.api(project='c' * 32, roles=('admin',)))

    def test_reserved_capacity_is_unavailable_to_others(self):
        self.make_active(reservations=[self.reservation(vcpus=4, amount=2)])
        server = self.boot('ordinary')
        self.wait_for(lambda: self.admin.get_server(server['id'])[
            'status'] == 'ERROR', what='no room')
        refused = self.make(code=409)
        self.assertEqual(
            ('NO_ROOM', 'no_room', 0, 409),
            tuple(refused[key] for key in (
                'error_name', 'reason', 'fits_now', 'error_code')))
        self.assertIn('next_start', refused['error_message'])

    def test_affinity_places_servers_on_separate_or_same_host(self):
        apart, together = self.make_active(reservations=[
            self.reservation(amount=2, vcpus=1, affinity='False'),
            self.reservation(amount=2, vcpus=1, affinity=True)],
        )['reservations']
        for reservation, hosts in ((apart, 2), (together, 1)):
            self.assertEqual(reservation['id'],
                             reservation['server_group_id'])
            servers = [self.boot_active(name, flavor=reservation['id'])
                       for name in ('one', 'two')]
            self.assertEqual(hosts, len({
                self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']
                for server in servers}))

    def test_server_group_of_lease_cannot_be_deleted_before_lease_ends(self):
        lease = self.make_active(reservations=[self.reservation(
            amount=2, vcpus=1, affinity=False)])
        path = f'/os-server-groups/{lease["reservations"][0]["id"]}'
        for client in (self.alice, self.admin):
            answer = client.api_request(path, method='DELETE')
            self.assertEqual(409, answer.status_code, answer.text)
            self.assertIn('is deleted when the lease ends', answer.text)
        self.assertEqual(404, self.api(
            project='0' * 32, user='bob').api_request(
                path, method='DELETE').status_code)
        self.alice.api_get(path)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual(404, self.alice.api_request(path).status_code)
        # Other server groups can only be deleted by their users.
        other = self.alice.post_server_groups(
            {'name': 'mine', 'policy': 'affinity'})['id']
        self.assertEqual(204, self.alice.api_request(
            f'/os-server-groups/{other}', method='DELETE').status_code)

    def test_resize_from_or_to_lease_flavor_is_refused(self):
        flavor_id = self.make_active()['reservations'][0]['flavor_id']
        inside = self.boot_active('inside', flavor=flavor_id)
        outside = self.boot_active('outside')
        for server, flavor in ((inside, '2'), (outside, flavor_id)):
            message = self.refused(
                409, self.alice.post_server_action, server['id'],
                {'resize': {'flavorRef': flavor}})
            self.assertIn('cannot be resized', message)
        # To users of other projects the server does not exist.
        bob = self.api(project='b' * 32, user='bob')
        message = self.refused(
            404, bob.post_server_action, inside['id'],
            {'resize': {'flavorRef': '2'}})
        self.assertNotIn(flavor_id, message)

    def test_lease_without_reservations_starts_and_ends(self):
        lease = self.make_active(reservations=[])
        self.assertEqual([], lease['reservations'])
        self.run_until(self.began + 2 * HOUR)
        self.assertEqual('TERMINATED', self.get(lease)['status'])

    def test_flavor_reservation_boots_server_of_source_flavor(self):
        lease = self.make_active(reservations=[
            {'resource_type': 'flavor:instance', 'flavor_id': 2,
             'amount': '2', 'affinity': 'None'}])
        reservation, = lease['reservations']
        self.assertEqual('2', reservation['source_flavor_id'])
        server = self.boot_active('one', flavor=reservation['flavor_id'])
        self.assertEqual(self.flavor('2').vcpus,
                         self.admin.get_server(server['id'])['flavor'][
                             'vcpus'])

    def test_flavor_is_not_looked_up_by_text_that_database_rejects(self):
        """MariaDB compares no column of Nova with four-byte characters, if
        the URL of the connection has charset=utf8mb4.
        """
        def found(context, text):
            raise db_exc.DBError(f'Illegal mix of collations: {text}')

        for name in ('_flavor_get_by_flavor_id_from_db',
                     '_flavor_get_by_name_from_db'):
            self.useFixture(fixtures.MockPatchObject(
                objects.Flavor, name, staticmethod(found)))
        self.assertIn('could not be found', self.make(
            reservations=[{'resource_type': 'flavor:instance',
                           'flavor_id': '\U0001f600'}], code=400)[
                               'error_message'])
        self.assertRaises(
            errors.InvalidLeaseParams, flavors.id_of,
            nova_context.get_admin_context(), '\U0001f600')

    def test_flavor_reservation_honours_resource_properties(self):
        flavored = {'resource_type': 'flavor:instance', 'flavor_id': '2'}
        wide = {**flavored, 'resource_properties': '[">=", "$vcpus", "4"]'}
        reservation, = self.make(start_in=HOUR, reservations=[wide])[
            'reservations']
        self.assertEqual(wide['resource_properties'],
                         reservation['resource_properties'])
        wider = {**flavored, 'resource_properties': '[">=", "$vcpus", "5"]'}
        self.make(start_in=HOUR, reservations=[wider], code=409)
        self.ask('PUT', f'/leases/{reservation["lease_id"]}', {
            'reservations': [{
                'id': reservation['id'],
                'resource_properties': wider['resource_properties']}]},
            code=409)
        for text in ('[">=", "$vcpus"', '[">", "$memory_mb", 0]'):
            self.make(start_in=HOUR, code=400, reservations=[
                {**flavored, 'resource_properties': text}])


class TestMoves(api_base.ApiTestCase):
    """Servers of full reservations with an affinity can be moved."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2', 'host3')}

    def reserved(self, count, grouped=True, **reservation):
        """Boot servers of a reservation, up to all; return their ids."""
        lease = self.make_active(reservations=[
            self.reservation(vcpus=1, **reservation)])
        reservation_id = lease['reservations'][0]['id']
        hints = {'group': reservation_id} if grouped else None
        servers = [self.boot_active(
            f'vm{number}', flavor=reservation_id, hints=hints)['id']
            for number in range(count)]
        self.run_sync()
        self.assertEqual(self.guests(), {
            server_id: self.bookings()[server_id] for server_id in servers})
        return servers

    def where(self, server_id):
        return self.admin.get_server(server_id)['OS-EXT-SRV-ATTR:host']

    def migrate(self, server_id):
        """Migrate cold; return once the bookings have followed."""
        before = self.where(server_id)
        self.admin.post_server_action(server_id, {'migrate': None})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.admin.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        after = self.where(server_id)
        self.assertNotEqual(before, after)
        self.assertEqual(after, self.bookings()[server_id])
        return after

    def evacuate(self, server_id):
        """Evacuate from a failed host; return once the bookings followed."""
        before = self.where(server_id)
        self.computes[before].stop()
        (service,) = self.admin.get_services(
            host=before, binary='nova-compute')
        self.admin.put_service_force_down(service['id'], True)
        self.admin.post_server_action(server_id, {'evacuate': {}})
        after = self.wait_for(lambda: (
            host := self.where(server_id)) != before and host,
            what='it was evacuated')
        self.wait_for(lambda: self.admin.get_server(server_id)[
            'OS-EXT-STS:task_state'] is None, what='it stands there')
        self.run_sync()
        self.assertEqual(after, self.bookings()[server_id])
        return after

    def booked_on(self):
        """Return how many slots there are on each host."""
        return collections.Counter(self.query(
            'SELECT hosts.name FROM bookings '
            'JOIN hosts ON hosts.id = bookings.host_id'))

    def test_anti_affinity_migration_selects_unused_host(self):
        first, second = self.reserved(2, amount=2, affinity=False)
        other = self.where(second)
        self.assertEqual({'host1', 'host2', 'host3'}, {
            self.where(first), other, self.migrate(first)})
        self.assertEqual(other, self.bookings()[second])

    def test_anti_affinity_evacuation_selects_unused_host(self):
        first, second = self.reserved(2, amount=2, affinity=False)
        hosts = {self.where(first), self.where(second)}
        self.assertNotIn(self.evacuate(first), hosts)

    def test_migration_swaps_host_with_free_anti_affinity_slot(self):
        """The free slot of the new host is moved to the old one."""
        first, = self.reserved(1, amount=3, affinity=False)
        self.migrate(first)
        self.assertEqual([1, 1, 1], sorted(self.booked_on().values()))

    def test_concurrent_migrations_keep_anti_affinity(self):
        """The first server's arrival is not yet recorded."""
        first, second = self.reserved(2, False, amount=2, affinity=False)
        (host,) = {'host1', 'host2', 'host3'} - {
            self.where(first), self.where(second)}
        with self.listener.parts.database.writer() as session:
            session.execute(sa.update(models.Booking).where(
                models.Booking.server_id == first).values(
                migrating_to=sa.select(models.Host.id).where(
                    models.Host.name == host).scalar_subquery()))
        before = self.where(second)
        self.admin.post_server_action(second, {'migrate': None})
        self.wait_for(lambda: any(
            one['action'] == 'migrate' and self.admin.api_get(
                f'/servers/{second}/os-instance-actions/{one["request_id"]}'
            ).body['instanceAction']['message'] == 'Error'
            for one in self.admin.get_instance_actions(second)),
            what='the migration was refused')
        self.assertEqual(before, self.where(second))

    def test_migration_of_only_affinity_server_moves_free_slots(self):
        first, = self.reserved(1, False, amount=3, affinity=True)
        host = self.migrate(first)
        self.assertEqual({(host,): 3}, self.booked_on())

    def test_affinity_servers_can_be_migrated_one_by_one(self):
        servers = self.reserved(2, False, amount=2, affinity=True)
        hosts = {self.migrate(server_id) for server_id in servers}
        self.assertEqual(1, len(hosts))
        self.assertEqual({(hosts.pop(),): 2}, self.booked_on())


class TestNotifications(api_base.ApiTestCase):

    def test_lease_events_send_notifications_without_trust_id(self):
        recorder = self.record()
        lease = self.make_active(events=[
            {'event_type': 'remind', 'event_date': self.at(600)}],
            before_end_date=self.at(1200))
        self.ask('PUT', f'/leases/{lease["id"]}', {'name': 'other'},
                 code=200)
        self.run_until(self.began + 1200)
        self.ask('PUT', f'/leases/{lease["id"]}',
                 {'end_date': self.at(2 * HOUR)}, code=200)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        for event in ('lease.create', 'lease.event.start_lease',
                      'lease.update', 'lease.event.remind',
                      'lease.event.before_end_lease',
                      'lease.event.before_end_lease.stop', 'lease.delete',
                      'lease.event.end_lease'):
            payload = recorder.wait(event)[0]
            self.assertEqual(('1.8', lease['id'], nova_box.PROJECT_ID), (
                payload['version'], payload['lease_id'],
                payload['project_id']))
            self.assertNotIn('trust_id', payload)
            self.assertIn('remind', [
                one['event_type'] for one in payload['events']])


class TestChanges(api_base.ApiTestCase):

    def change(self, lease, code=200, client=None, **body):
        answer = self.ask('PUT', f'/leases/{lease["id"]}', body, client, code)
        return answer.get('lease', answer)

    def test_update_changes_name_dates_and_amount(self):
        lease = self.make(start_in=HOUR)
        changed = self.change(lease, name='other',
                              start_date=self.at(2 * HOUR),
                              end_date=self.at(3 * HOUR))
        self.assertEqual(changed, self.get(lease))
        self.assertEqual(
            ('other', *(clocks.iso(self.began + hours * HOUR)
                        for hours in (2, 3))),
            tuple(changed[key] for key in ('name', 'start_date',
                                           'end_date')))
        reservation_id = lease['reservations'][0]['id']
        changed = self.change(lease, reservations=[
            {'id': reservation_id, 'amount': 2, 'vcpus': 4}])
        self.assertEqual((2, 4), tuple(
            changed['reservations'][0][key] for key in ('amount', 'vcpus')))
        # Two hosts are then full.
        self.make(start_in=2 * HOUR, code=409)
        refused = self.change(lease, 409, reservations=[
            {'id': reservation_id, 'amount': 3}], name='not even this')
        self.assertEqual((2, 'NO_ROOM'),
                         (refused['fits_now'], refused['error_name']))
        self.assertEqual(changed, self.get(lease))
        changed = self.change(lease, reservations=[
            {'id': reservation_id, 'amount': 1}])
        self.make(start_in=2 * HOUR)

    def test_every_lease_answer_shows_utilization(self):
        lease = self.make_active()
        now = self.began + HOUR // 2
        self.useFixture(fixtures.MonkeyPatch(
            f'{__name__}.clocks.SystemClock.now', lambda _clock: now))
        second = self.make(start_in=HOUR, length=2 * HOUR)
        self.assertEqual({}, second['reservations'][0]['utilization'])
        shown = self.get(lease)
        # What is reserved counts from the creation of the lease, which may be
        # later than the start that it asks for.
        (start,), = self.query(
            'SELECT start_date FROM usage_records '
            f"WHERE lease_id = '{lease['id']}' AND kind = 'planned'")
        self.assertEqual(
            {'reserved': round(2 * (now - start) / HOUR, 4), 'used': 0,
             'percent': 0},
            shown['reservations'][0]['utilization']['VCPU'])
        by_id = {one['id']: one
                 for one in self.ask('GET', '/leases', code=200)['leases']}
        self.assertEqual({lease['id']: shown, second['id']: second}, by_id)
        changed = self.change(lease, **shown)['reservations'][0]
        self.assertEqual(shown['reservations'][0]['utilization'],
                         changed['utilization'])

    def test_rescheduled_lease_may_get_other_hosts(self):
        lease = self.make(start_in=HOUR)
        (host_id,), = self.query('SELECT host_id FROM bookings')
        whole = [self.reservation(vcpus=4)]
        for _host in self.hosts:
            self.make(start_in=2 * HOUR, reservations=whole)
        self.change(lease, 409, end_date=self.at(2 * HOUR + 60))
        self.ask('DELETE', '/leases/' + next(
            one['id'] for one in self.ask('GET', '/leases')['leases']
            if one['id'] != lease['id'] and self.query(
                'SELECT host_id FROM bookings WHERE reservation_id = '
                f"'{one['reservations'][0]['id']}'") != [(host_id,)]),
            code=204)
        self.change(lease, end_date=self.at(2 * HOUR + 60))
        self.assertNotEqual([(host_id,)], self.query(
            'SELECT host_id FROM bookings WHERE reservation_id = '
            f"'{lease['reservations'][0]['id']}'"))

    def test_rescheduled_lease_keeps_size_of_changed_flavor(self):
        lease = self.make(start_in=HOUR, reservations=[
            {'resource_type': 'flavor:instance', 'flavor_id': '2'}])
        before = lease['reservations'][0]['resources']
        flavor = self.flavor('2')
        values = {name: flavor[name] for name in (
            'name', 'memory_mb', 'root_gb', 'ephemeral_gb', 'swap',
            'flavorid', 'disabled', 'is_public', 'rxtx_factor')}
        flavor.destroy()
        objects.Flavor(nova_context.get_admin_context(), **values,
                       vcpus=flavor.vcpus + 1).create()
        changed = self.change(lease, end_date=self.at(3 * HOUR))
        self.assertEqual(before, changed['reservations'][0]['resources'])
        (booked,), = self.query('SELECT resources FROM bookings')
        self.assertEqual(before, json.loads(booked))

    def test_update_by_admin_searches_hosts_for_owner_project(self):
        lease = self.make(start_in=HOUR)
        asked, demand_of = [], flavors.demand_of
        self.stub_out(
            'blazar_nova.compat.flavors.demand_of',
            lambda context, *args: asked.append(context.project_id) or
            demand_of(context, *args))
        admin = self.api(project='c' * 32, roles=('admin',))
        self.change(lease, client=admin, reservations=[
            {'id': lease['reservations'][0]['id'], 'amount': 2}],
            end_date=self.at(3 * HOUR))
        self.assertEqual({nova_box.PROJECT_ID}, set(asked))

    def test_update_to_anti_affinity_books_separate_hosts(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.reservation(amount=2, vcpus=1, affinity=True)])
        reservation_id = lease['reservations'][0]['id']
        hosts = "SELECT DISTINCT host_id FROM bookings"
        self.assertEqual(1, len(self.query(hosts)))
        changed = self.change(lease, reservations=[
            {'id': reservation_id, 'affinity': False}])
        self.assertIs(False, changed['reservations'][0]['affinity'])
        self.assertEqual(2, len(self.query(hosts)))
        refused = self.change(lease, 409, reservations=[
            {'id': reservation_id, 'amount': 3}])
        self.assertEqual('too_big', refused['reason'])

    def test_started_lease_can_only_grow_and_be_extended(self):
        lease = self.make_active()
        reservation_id = lease['reservations'][0]['id']
        changed = self.change(
            lease, start_date=lease['start_date'][:16].replace('T', ' '),
            end_date=self.at(2 * HOUR),
            reservations=[{'id': reservation_id, 'amount': 2}])
        self.assertEqual(2, changed['reservations'][0]['amount'])
        for name in ('one', 'two'):
            self.boot_active(name, flavor=reservation_id)
        self.listener.server_sync.compare_all()
        for body, words in (
                ({'start_date': self.at(HOUR)}, 'has started'),
                ({'reservations': [{'id': reservation_id, 'amount': 1}]},
                 'delete some first'),
                ({'reservations': [{'id': reservation_id, 'vcpus': 1}]},
                 'only the amount'),
                ({'reservations': [{'id': reservation_id,
                                    'affinity': True}]}, 'only the amount'),
                ({'reservations': [{'id': 'mine'}]}, 'must have the "id"'),
                ({'nam': 'x'}, 'Did you mean "name"')):
            refused = self.change(lease, 400, **body)
            self.assertIn(words, refused['error_message'])
        self.assertEqual(changed['end_date'], self.get(lease)['end_date'])

    def test_delete_works_in_every_state_and_is_repeatable(self):
        bob = self.api(project='b' * 32, user='bob')
        pending = self.make(start_in=HOUR)
        active = self.make_active()
        server = self.boot_active(
            'one', flavor=active['reservations'][0]['flavor_id'])
        held = self.boot('held', hints=self.lease_hints(start_in=HOUR))
        held_lease, = (one for one in self.ask(
            'GET', '/leases')['leases'] if held['id'] in one[
                'reservations'][0]['servers'])
        for lease in (pending, active, held_lease):
            self.ask('DELETE', f'/leases/{lease["id"]}', client=bob,
                     code=404)
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.ask('GET', f'/leases/{pending["id"]}', code=404)
        self.assertEqual('DELETING', self.get(active)['status'])
        self.run_until(int(time.time()))
        for server_id in (server['id'], held['id']):
            self.wait_until_gone(server_id)
        self.clock.advance(60)
        driven.run_due(self.listener.engine)
        for lease in (pending, active, held_lease):
            self.ask('GET', f'/leases/{lease["id"]}', code=404)
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
            self.ask('DELETE', f'/leases/{lease["id"]}', client=bob,
                     code=404)
        self.assertEqual({'leases': []}, self.ask('GET', '/leases'))
        self.ask('DELETE', '/leases/unheard-of', code=404)

    def test_delete_tolerates_concurrent_removal_of_flavor(self):
        lease = self.make_active()
        destroy = objects.Flavor.destroy
        calls = []

        def destroyed_by_another(flavor):
            calls.append(flavor.flavorid)
            destroy(flavor)
            # As with MariaDB, when the rows that Nova has read are gone.
            raise orm_exc.StaleDataError('0 were matched')

        with mock.patch.object(objects.Flavor, 'destroy',
                               destroyed_by_another):
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual([lease['reservations'][0]['flavor_id']], calls)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)
