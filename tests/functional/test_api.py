# SPDX-License-Identifier: Apache-2.0
"""The lease API of a real nova-api, and booting with what it made."""

import collections
import json
import time
from unittest import mock
import urllib.parse

import fixtures
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.scheduler.client import report
from oslo_messaging import transport
import requests
import sqlalchemy as sa
from sqlalchemy.orm import exc as orm_exc

from blazar_core.capacity import booking_index
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import idempotency
from blazar_core.leases import slots
from blazar_core.lifecycle import fault_points
from blazar_nova.compat import bound_servers
from blazar_nova.compat import flavors
from blazar_nova.services import lease_admission
from blazar_nova.services import wiring
from tests import driven
from tests.functional import base
from tests.functional import leased
from tests.functional import nova_box

HOUR = 3600


class ApiTestCase(leased.LeasedTestCase):
    """Two hosts of 10 VCPUs each, and clients of the lease API."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2')}

    def ask(self, method, path, body=None, client=None, code=None, **query):
        """Ask the lease API; returns what it answers.

        :param client: who asks; by default alice
        :param code: the code that must come
        """
        client = client or self.alice
        url = client.base_url.rsplit('/v2', 1)[0] + '/reservation/v1' + path
        answer = requests.request(
            method, url, json=body, params=query,
            headers={'X-Auth-Token': client.who.token()})
        if code is not None:
            self.assertEqual(code, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def placement_asked(self):
        """The URLs of placement that are asked for from now on."""
        client, asked = report.report_client_singleton(), []
        get = client.get

        def noted(url, *args, **kwargs):
            asked.append(url)
            return get(url, *args, **kwargs)

        self.useFixture(fixtures.MockPatchObject(client, 'get', noted))
        return asked

    def reservation(self, **params):
        """What is asked for: by default one server of 2 VCPUs."""
        return {'resource_type': 'virtual:instance', 'vcpus': 2,
                'memory_mb': 1024, 'disk_gb': 1, 'amount': 1, **params}

    def make(self, start_in=None, length=HOUR, reservations=None,
             client=None, code=201, **more):
        """POST a lease; returns it, or the error when that is expected."""
        body = {
            'name': 'lease1', 'start_date': 'now' if start_in is None else
            self.at(start_in), 'end_date': self.at(
                (start_in or 0) + length),
            'reservations': [self.reservation()] if reservations is None
            else reservations, 'events': [], 'before_end_date': None, **more}
        answer = self.ask('POST', '/leases', body, client, code)
        return answer.get('lease', answer)

    def make_active(self, **kwargs):
        """A lease that has started."""
        lease = self.make(**kwargs)
        self.run_until(clocks.SystemClock().now())
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        return lease

    def run_until(self, when):
        """Carry out what is due by then."""
        self.clock.advance(max(0, when - self.clock.now()))
        driven.run_due(self.listener.engine)

    def get(self, lease, **kwargs):
        return self.ask('GET', f'/leases/{lease["id"]}', code=200,
                        **kwargs)['lease']

    def flavor(self, flavor_id):
        """A flavor as Nova has it; None when it has none."""
        try:
            return objects.Flavor.get_by_flavor_id(
                nova_context.get_admin_context(), flavor_id)
        except exception.FlavorNotFound:
            return None


class TestLeases(ApiTestCase):

    def test_no_request_waits_until_all_books_are_read(self):
        with mock.patch.object(booking_index.Index, '_load') as load:
            self.make_active()
            self.boot_active('plain')
        load.assert_not_called()

    def test_the_books_are_followed_from_the_first_request_on(self):
        del self.followed[:]
        self.ask('GET', '/leases', code=200)
        self.assertEqual([wiring.shared().admission.index], self.followed)

    def test_a_lease_is_used_by_its_flavor_within_its_time_and_amount(self):
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
        self.listener.mirror.compare_all()
        message = self.refused(409, self.boot, 'three',
                               flavor=reservation['id'])
        self.assertIn('All 2 slots of reservation', message)
        # A place that is left may be taken again.
        self.alice.delete_server(first['id'])
        self.wait_until_gone(first['id'])
        self.listener.mirror.compare_all()
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        self.boot_active('three', flavor=reservation['id'])
        servers = self.get(lease)['reservations'][0]['servers']
        self.assertEqual(2, len(servers))
        # All of it ends with the lease.
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

    def test_one_server_too_many_is_told_what_fits(self):
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

    def test_a_reservation_that_ends_while_it_is_found_to_be_full(self):
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

    def test_nobody_boots_with_it_before_its_time(self):
        lease = self.make(start_in=HOUR)
        flavor_id = lease['reservations'][0]['flavor_id']
        self.assertIsNone(self.flavor(flavor_id))
        self.refused(400, self.boot, 'early', flavor=flavor_id)
        self.run_until(self.began + HOUR)
        self.boot_active('in time', flavor=flavor_id)

    def test_others_do_not_boot_with_it(self):
        lease = self.make_active()
        bob = self.api(project='b' * 32, user='bob')
        flavor_id = lease['reservations'][0]['flavor_id']
        self.refused(400, self.boot, 'mine?', flavor=flavor_id, client=bob)
        # An admin may use every flavor, but not every reservation.
        self.refused(409, self.boot, 'mine?', flavor=flavor_id,
                     client=self.api(project='c' * 32, roles=('admin',)))

    def test_what_is_reserved_is_not_given_to_others(self):
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

    def test_servers_apart_and_together(self):
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

    def test_its_server_group_stays_as_long_as_it_is_there(self):
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
        # Others are nobody's but their users'.
        other = self.alice.post_server_groups(
            {'name': 'mine', 'policy': 'affinity'})['id']
        self.assertEqual(204, self.alice.api_request(
            f'/os-server-groups/{other}', method='DELETE').status_code)

    def test_servers_of_it_are_not_resized(self):
        flavor_id = self.make_active()['reservations'][0]['flavor_id']
        inside = self.boot_active('inside', flavor=flavor_id)
        outside = self.boot_active('outside')
        for server, flavor in ((inside, '2'), (outside, flavor_id)):
            message = self.refused(
                409, self.alice.post_server_action, server['id'],
                {'resize': {'flavorRef': flavor}})
            self.assertIn('cannot be resized', message)
        # What others have is nothing to anybody.
        bob = self.api(project='b' * 32, user='bob')
        message = self.refused(
            404, bob.post_server_action, inside['id'],
            {'resize': {'flavorRef': '2'}})
        self.assertNotIn(flavor_id, message)

    def test_a_token_that_is_not_for_a_project_sees_and_makes_nothing(self):
        lease = self.make(start_in=HOUR)
        for roles in (('reader',), ('member', 'reader'), ('admin',)):
            who = self.api(project='', user='eve', roles=roles)
            for method, path in (
                    ('GET', '/leases'), ('GET', '/availability'),
                    ('GET', '/leases?project_id=' + self.alice.project_id),
                    ('POST', '/leases'), ('GET', '/os-hosts'),
                    ('GET', '/os-hosts/properties'), ('GET', '/maintenance')):
                body = {'name': 'x', 'start_date': self.at(HOUR),
                        'end_date': self.at(2 * HOUR), 'reservations': []}
                answer = self.ask(method, path, body, who, 403)
                self.assertIn('no project scope', answer['error_message'])
            for method in ('GET', 'PUT', 'DELETE'):
                self.ask(method, f'/leases/{lease["id"]}', {}, who, 404)
        self.assertEqual(1, len(self.leases()))

    def test_a_lease_without_reservations_is_one(self):
        lease = self.make_active(reservations=[])
        self.assertEqual([], lease['reservations'])
        self.run_until(self.began + 2 * HOUR)
        self.assertEqual('TERMINATED', self.get(lease)['status'])

    def test_a_reservation_of_a_flavor(self):
        lease = self.make_active(reservations=[
            {'resource_type': 'flavor:instance', 'flavor_id': 2,
             'amount': '2', 'affinity': 'None'}])
        reservation, = lease['reservations']
        self.assertEqual('2', reservation['source_flavor_id'])
        server = self.boot_active('one', flavor=reservation['flavor_id'])
        self.assertEqual(self.flavor('2').vcpus,
                         self.admin.get_server(server['id'])['flavor'][
                             'vcpus'])

    def test_a_reservation_of_a_flavor_on_hosts_of_some_properties(self):
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


class TestFlavorsThatClientsFind(ApiTestCase):
    """By an extra spec of Blazar, which a filter of Nova's reads too."""

    KEY = 'aggregate_instance_extra_specs:reservation'
    more_conf = ('[filter_scheduler]\nenabled_filters = ComputeFilter,'
                 'AggregateInstanceExtraSpecsFilter,LeaseFilter\n')

    def test_by_its_reservation(self):
        for name, more in (('one', {}), ('two', {'affinity': True})):
            lease = self.make_active(reservations=[
                self.reservation(vcpus=1, **more)])
            reservation, = lease['reservations']
            self.assertEqual({
                self.KEY: reservation['id'],
                'blazar:reservation': reservation['id']},
                self.flavor(reservation['flavor_id']).extra_specs)
            self.assertIn(
                self.get(lease)['reservations'][0]['aggregate_id'],
                [one.id for one in objects.AggregateList.get_all(
                    nova_context.get_admin_context())])
            server = self.boot_active(name, flavor=reservation['flavor_id'])
            spec = objects.RequestSpec.get_by_instance_uuid(
                nova_context.get_admin_context(), server['id'])
            self.assertNotIn(self.KEY, spec.flavor.extra_specs)
            self.assertEqual(reservation['id'], spec.flavor.extra_specs[
                'blazar:reservation'])
            # Moves go by that as well.
            self.admin.post_server_action(server['id'], {'migrate': None})
            self.wait_for_status(server['id'], 'VERIFY_RESIZE')

    def test_nova_would_find_no_host_with_it(self):
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.bound_servers.admit', lambda call,
            apart: None))
        lease = self.make_active()
        server = self.boot('vm', flavor=lease['reservations'][0]['flavor_id'])
        self.wait_for_status(server['id'], 'ERROR')


class TestMoves(ApiTestCase):
    """Servers of full reservations with an affinity are moved."""

    hosts = {name: nova_box.Capacity(vcpus=4, memory_mb=8192, disk_gb=100)
             for name in ('host1', 'host2', 'host3')}

    def reserved(self, count, grouped=True, **reservation):
        """Servers of a reservation, which they may use up; by their ids."""
        lease = self.make_active(reservations=[
            self.reservation(vcpus=1, **reservation)])
        reservation_id = lease['reservations'][0]['id']
        hints = {'group': reservation_id} if grouped else None
        servers = [self.boot_active(
            f'vm{number}', flavor=reservation_id, hints=hints)['id']
            for number in range(count)]
        self.fill_books()
        self.assertEqual(self.guests(), {
            server_id: self.bookings()[server_id] for server_id in servers})
        return servers

    def where(self, server_id):
        return self.admin.get_server(server_id)['OS-EXT-SRV-ATTR:host']

    def migrate(self, server_id):
        """Cold; returns when the books have followed."""
        before = self.where(server_id)
        self.admin.post_server_action(server_id, {'migrate': None})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.admin.post_server_action(server_id, {'confirmResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        self.fill_books()
        after = self.where(server_id)
        self.assertNotEqual(before, after)
        self.assertEqual(after, self.bookings()[server_id])
        return after

    def evacuate(self, server_id):
        """From a host that is down; returns when the books have followed."""
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
        self.fill_books()
        self.assertEqual(after, self.bookings()[server_id])
        return after

    def booked_on(self):
        """How many places there are on each host."""
        return collections.Counter(self.books(
            'SELECT hosts.name FROM bookings '
            'JOIN hosts ON hosts.id = bookings.host_id'))

    def test_apart(self):
        first, second = self.reserved(2, amount=2, affinity=False)
        other = self.where(second)
        self.assertEqual({'host1', 'host2', 'host3'}, {
            self.where(first), other, self.migrate(first)})
        self.assertEqual(other, self.bookings()[second])

    def test_apart_from_a_host_that_is_down(self):
        first, second = self.reserved(2, amount=2, affinity=False)
        hosts = {self.where(first), self.where(second)}
        self.assertNotIn(self.evacuate(first), hosts)

    def test_apart_into_a_free_place(self):
        """The one whose place it takes gets its own."""
        first, = self.reserved(1, amount=3, affinity=False)
        self.migrate(first)
        self.assertEqual([1, 1, 1], sorted(self.booked_on().values()))

    def test_two_at_once_do_not_meet(self):
        """The books do not know yet that the first one has arrived."""
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

    def test_together_one_alone_takes_its_places_along(self):
        first, = self.reserved(1, False, amount=3, affinity=True)
        host = self.migrate(first)
        self.assertEqual({(host,): 3}, self.booked_on())

    def test_together_one_by_one(self):
        servers = self.reserved(2, False, amount=2, affinity=True)
        hosts = {self.migrate(server_id) for server_id in servers}
        self.assertEqual(1, len(hosts))
        self.assertEqual({(hosts.pop(),): 2}, self.booked_on())


class TestNotifications(ApiTestCase):

    def test_all_that_happens_to_a_lease_is_told_without_secrets(self):
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


class TestChanges(ApiTestCase):

    def change(self, lease, code=200, client=None, **body):
        answer = self.ask('PUT', f'/leases/{lease["id"]}', body, client, code)
        return answer.get('lease', answer)

    def test_the_name_the_dates_and_the_amount(self):
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
        # Two hosts are full then.
        self.make(start_in=2 * HOUR, code=409)
        refused = self.change(lease, 409, reservations=[
            {'id': reservation_id, 'amount': 3}], name='not even this')
        self.assertEqual((2, 'NO_ROOM'),
                         (refused['fits_now'], refused['error_name']))
        self.assertEqual(changed, self.get(lease))
        changed = self.change(lease, reservations=[
            {'id': reservation_id, 'amount': 1}])
        self.make(start_in=2 * HOUR)

    def test_one_that_moves_may_find_other_hosts(self):
        lease = self.make(start_in=HOUR)
        (host_id,), = self.books('SELECT host_id FROM bookings')
        whole = [self.reservation(vcpus=4)]
        for _host in self.hosts:
            self.make(start_in=2 * HOUR, reservations=whole)
        self.change(lease, 409, end_date=self.at(2 * HOUR + 60))
        self.ask('DELETE', '/leases/' + next(
            one['id'] for one in self.ask('GET', '/leases')['leases']
            if one['id'] != lease['id'] and self.books(
                'SELECT host_id FROM bookings WHERE reservation_id = '
                f"'{one['reservations'][0]['id']}'") != [(host_id,)]),
            code=204)
        self.change(lease, end_date=self.at(2 * HOUR + 60))
        self.assertNotEqual([(host_id,)], self.books(
            'SELECT host_id FROM bookings WHERE reservation_id = '
            f"'{lease['reservations'][0]['id']}'"))

    def test_one_that_moves_stays_of_its_size(self):
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
        (booked,), = self.books('SELECT resources FROM bookings')
        self.assertEqual(before, json.loads(booked))

    def test_an_admin_looks_for_hosts_that_the_owner_may_use(self):
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

    def test_servers_that_are_to_be_apart_from_now_on_are(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.reservation(amount=2, vcpus=1, affinity=True)])
        reservation_id = lease['reservations'][0]['id']
        hosts = "SELECT DISTINCT host_id FROM bookings"
        self.assertEqual(1, len(self.books(hosts)))
        changed = self.change(lease, reservations=[
            {'id': reservation_id, 'affinity': False}])
        self.assertIs(False, changed['reservations'][0]['affinity'])
        self.assertEqual(2, len(self.books(hosts)))
        refused = self.change(lease, 409, reservations=[
            {'id': reservation_id, 'amount': 3}])
        self.assertEqual('too_big', refused['reason'])

    def test_one_that_has_started_grows_and_is_prolonged(self):
        lease = self.make_active()
        reservation_id = lease['reservations'][0]['id']
        changed = self.change(
            lease, start_date=lease['start_date'][:16].replace('T', ' '),
            end_date=self.at(2 * HOUR),
            reservations=[{'id': reservation_id, 'amount': 2}])
        self.assertEqual(2, changed['reservations'][0]['amount'])
        for name in ('one', 'two'):
            self.boot_active(name, flavor=reservation_id)
        self.listener.mirror.compare_all()
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

    def test_delete_in_every_state_and_twice(self):
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

    def test_delete_while_another_process_removes_the_flavor(self):
        lease = self.make_active()
        destroy = objects.Flavor.destroy
        calls = []

        def destroyed_by_another(flavor):
            calls.append(flavor.flavorid)
            destroy(flavor)
            # As MariaDB has it, when the rows are gone that Nova had read.
            raise orm_exc.StaleDataError('0 were matched')

        with mock.patch.object(objects.Flavor, 'destroy',
                               destroyed_by_another):
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual([lease['reservations'][0]['flavor_id']], calls)
        self.ask('GET', f'/leases/{lease["id"]}', code=404)


class TestAnswers(ApiTestCase):

    def test_the_versions_are_told_to_everybody(self):
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation'
        for path in ('', '/', '/versions'):
            answer = requests.get(url + path, allow_redirects=False)
            self.assertEqual(300, answer.status_code)
            version, = answer.json()['versions']
            self.assertEqual('v1.0', version['id'])
            self.assertEqual('/reservation/v1', urllib.parse.urlsplit(
                version['links'][0]['href']).path)
        answer = requests.get(url + '/v1/leases')
        self.assertEqual(401, answer.status_code)

    def test_the_versions_behind_a_proxy(self):
        self.flags(enable_proxy_headers_parsing=True,
                   group='oslo_middleware')
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation'
        for path in ('/', '/versions'):
            answer = requests.get(url + path, allow_redirects=False, headers={
                'X-Forwarded-Proto': 'https',
                'X-Forwarded-Host': 'cloud.example:8774'})
            version, = answer.json()['versions']
            self.assertEqual('https://cloud.example:8774/reservation/v1',
                             version['links'][0]['href'])

    def test_what_is_not_there_is_told_in_json(self):
        for method, path, code, name in (
                ('GET', '/nothing', 404, 'URL_NOT_FOUND'),
                ('PATCH', '/leases', 405, 'METHOD_NOT_ALLOWED'),
                ('GET', '/leases/unheard-of', 404, 'NOT_FOUND')):
            answer = self.ask(method, path, {}, code=code)
            self.assertEqual((code, name), (answer['error_code'],
                                            answer['error_name']))

    def test_head_is_answered_as_get_is(self):
        lease = self.make(start_in=HOUR)
        for path, code in ((f'/leases/{lease["id"]}', 200), ('/leases', 200),
                           ('/leases/unheard-of', 404)):
            self.assertIsNone(self.ask('HEAD', path, code=code))

    def test_bad_input_is_told_what_to_write(self):
        for body, words in (
                ({'end_date': None}, 'Missing parameter end_date'),
                ({'end_date': 'soon'}, 'soon is an invalid date. Required '
                                       'format: YYYY-MM-DD HH:MM'),
                ({'end_date': '2020-01-01 00:00'},
                 'End date must be later than start date.'),
                ({'reservations': [{'resource_type': 'physical:network'}]},
                 'one of flavor:instance, physical:host, virtual:instance'),
                ({'reservations': [self.reservation(vcpus='two')]},
                 '"vcpus" is two'),
                ({'reservations': [self.reservation(affinity='maybe')]},
                 '"affinity"'),
                ({'reservations': [{'resource_type': 'flavor:instance',
                                    'flavor_id': 'none'}]},
                 'Flavor none could not be found'),
                ({'reservations': 'all'}, '"reservations" must be a list')):
            answer = self.make(code=400, **body)
            self.assertEqual('INVALID_REQUEST', answer['error_name'])
            self.assertIn(words, answer['error_message'])
        self.assertEqual([], self.ask('GET', '/leases')['leases'])

    def test_null_is_what_is_left_out(self):
        lease = self.make(
            start_in=HOUR, servers=None, recurrence=None, lease_type=None,
            events=[{'event_type': 'x', 'event_date': self.at(HOUR),
                     'action': None}])
        for key in ('add_servers', 'servers', 'remove_servers', 'project_id',
                    'end_date', 'events', 'reservations', 'on_end'):
            lease = self.ask('PUT', f'/leases/{lease["id"]}', {
                'name': key, key: None}, code=200)['lease']
            self.assertEqual(key, lease['name'])
        self.ask('PUT', '/maintenance/host1', {
            'start_date': None, 'end_date': self.at(HOUR), 'reason': None,
            'force': None}, self.admin, code=200, dry_run='true')

    def test_one_that_has_not_begun_is_told_until_when_it_could_last(self):
        lease = self.make(start_in=HOUR, reservations=[
            self.reservation(vcpus=4, amount=2)])
        self.make(start_in=3 * HOUR, reservations=[
            self.reservation(vcpus=4, amount=2)])
        path = f'/leases/{lease["id"]}'
        # Ends are written to the minute.
        until = clocks.iso((self.began + 3 * HOUR) // 60 * 60)
        for asked in ({'end_date': self.at(4 * HOUR)},
                      {'duration': '3h', 'name': 'longer'}):
            self.assertEqual(until, self.ask(
                'PUT', path, asked, code=409)['latest_end'])
        self.assertIsNone(self.ask('PUT', path, {
            'end_date': self.at(4 * HOUR), 'reservations': [{
                'id': lease['reservations'][0]['id'], 'vcpus': 3}]},
            code=409)['latest_end'])
        self.ask('PUT', path, {'end_date': self.at(3 * HOUR)}, code=200)

    def test_one_of_before_has_no_properties_and_may_grow(self):
        lease = self.make_active(reservations=[
            {'resource_type': 'flavor:instance', 'flavor_id': '1'}])
        reservation, = lease['reservations']
        self.assertEqual('1', json.loads(
            reservation['resource_properties'])['id'])
        self.assertNotIn('resource_properties', self.books(
            'SELECT params FROM reservations')[0][0])
        changed = self.ask('PUT', f'/leases/{lease["id"]}', {
            'reservations': [{'id': reservation['id'], 'amount': 2}]},
            code=200)['lease']
        self.assertEqual(2, changed['reservations'][0]['amount'])

    def test_a_list_is_filtered_sorted_and_paged(self):
        made = [self.make(start_in=hour * HOUR, name=f'lease{hour}')
                for hour in (3, 1, 2)]
        bob = self.api(project='b' * 32, user='bob')
        bobs = self.make(start_in=5 * HOUR, client=bob)

        def names(client=None, **query):
            return [lease['name'] for lease in self.ask(
                'GET', '/leases', client=client, code=200,
                **query)['leases']]

        self.assertEqual(['lease1', 'lease2', 'lease3'], names())
        self.assertEqual(['lease3', 'lease2', 'lease1'],
                         names(sort='name:desc'))
        self.assertEqual(['lease2'], names(name='lease2'))
        self.assertEqual(['lease2'], names(
            start_date=self.at(2 * HOUR + 60),
            end_date=self.at(3 * HOUR - 60)))
        self.assertEqual([], names(status='ACTIVE'))
        self.assertEqual(['lease1'], names(client=bob))
        self.assertEqual(4, len(names(client=self.admin)))
        self.assertEqual(['lease1'], names(
            client=self.admin, project_id='b' * 32))
        self.ask('GET', '/leases', project_id='b' * 32, code=403)
        page = self.ask('GET', '/leases', limit=2, fields='id,name')
        self.assertEqual([{'id': made[1]['id'], 'name': 'lease1'},
                          {'id': made[2]['id'], 'name': 'lease2'}],
                         page['leases'])
        link, = page['leases_links']
        rest = requests.get(link['href'], headers={
            'X-Auth-Token': self.alice.who.token()}).json()
        self.assertEqual([{'id': made[0]['id'], 'name': 'lease3'}],
                         rest['leases'])
        self.assertNotIn('leases_links', rest)
        self.ask('GET', '/leases', marker=bobs['id'], code=400)
        self.ask('GET', '/leases', sort='color', code=400)
        self.ask('GET', '/leases', limit=0, code=400)
        # Whether there are leases or not.
        self.ask('GET', '/leases', fields='color', name='none', code=400)

    def test_what_has_just_ended_is_listed_for_a_while(self):
        self.flags(list_ended=300, group='blazar')
        lease = self.make_active(reservations=[], length=60)
        gone = self.make(start_in=HOUR)
        self.ask('DELETE', f'/leases/{gone["id"]}', code=204)
        self.run_until(clocks.SystemClock().now() + 100)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertEqual(['lease1'], [
            one['name'] for one in self.ask('GET', '/leases')['leases']])
        for more, count in (({'ended': 'true'}, 1), ({'ended': 'false'}, 0)):
            self.assertEqual(count, len(self.ask(
                'GET', '/leases', **more)['leases']))

    def test_an_administrator_asks_for_any_property_of_a_host(self):
        wanted = '["=", "$hypervisor_hostname", "host2"]'
        self.assertIn('hypervisor_hostname', self.make(
            reservations=[self.reservation(resource_properties=wanted)],
            code=400)['error_message'])
        self.make(reservations=[self.reservation(resource_properties=wanted)],
                  client=self.admin)

    def test_a_list_without_pages_is_whole_or_refused(self):
        """Some clients follow no links."""
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.schemas.lease_schema.MAX_WHOLE', 3))
        self.useFixture(fixtures.MonkeyPatch(
            'blazar_core.leases.views._PARTS', 1))
        for hour in range(1, 5):
            self.make(start_in=hour * HOUR, name=f'lease{hour}')
            answer = self.ask('GET', '/leases')
            if hour < 4:
                self.assertEqual(hour, len(answer['leases']))
                self.assertNotIn('leases_links', answer)
        self.assertEqual('INVALID_REQUEST', answer['error_name'])
        self.assertIn('more than 3 leases. Write filters (status, name',
                      answer['error_message'])
        self.assertEqual(1, len(self.ask(
            'GET', '/leases', code=200, name='lease2')['leases']))
        self.assertIn('leases_links', self.ask(
            'GET', '/leases', code=200, limit=3))

    def test_a_client_puts_back_what_it_was_shown(self):
        lease = self.make(start_in=HOUR, events=[
            {'event_type': 'remind', 'time': self.at(HOUR)}], reservations=[
            self.reservation(ephemeral_gb=0, extra_specs={},
                             before_end='default'),
            {'resource_type': 'flavor:instance', 'flavor_id': '1'}])
        again = self.ask('PUT', f'/leases/{lease["id"]}', {
            **lease, 'name': 'new'}, code=200)['lease']
        volatile = dict.fromkeys(('updated_at', 'events', 'name'))
        self.assertEqual(*({**each, **volatile, 'reservations': [
            {**one, 'updated_at': None} for one in each['reservations']]}
            for each in (lease, again)))
        self.assertEqual(*(sorted(
            (one['event_type'], one['time']) for one in each['events'])
            for each in (lease, again)))
        again['reservations'][0]['amount'] = 2
        for event in again['events']:
            if event['event_type'] == 'remind':
                event['time'] = self.at(HOUR + 60)
        answer = self.ask('PUT', f'/leases/{lease["id"]}', again, code=200)
        self.assertEqual(
            [2, 1], [one['amount'] for one in answer['lease'][
                'reservations']])
        self.ask('PUT', f'/leases/{lease["id"]}', {
            **again, 'status': 'ACTIVE'}, code=400)

    def test_what_is_over_is_in_the_list_of_who_asks_for_it(self):
        over = self.make_active(length=HOUR)
        later = self.make(start_in=2 * HOUR)
        self.run_until(self.clock.now() + HOUR + 60)
        self.run_until(self.clock.now() + 60)
        self.assertEqual('TERMINATED', self.get(over)['status'])

        def ids(**query):
            return [lease['id'] for lease in self.ask(
                'GET', '/leases', code=200, **query)['leases']]

        self.assertEqual([later['id']], ids())
        self.assertEqual([over['id'], later['id']], ids(ended='true'))
        self.assertEqual([over['id']], ids(status='TERMINATED'))
        page = self.ask('GET', '/leases', ended='true', limit=1)
        link, = page['leases_links']
        self.assertEqual([later['id']], [
            lease['id'] for lease in requests.get(link['href'], headers={
                'X-Auth-Token': self.alice.who.token()}).json()['leases']])

    def test_one_request_asks_for_so_much(self):
        many = [self.reservation(amount=one) for one in (600, 401)]
        for query in ({}, {'dry_run': 'true'}):
            error = self.ask('POST', '/leases', {
                'end_date': self.at(HOUR), 'reservations': many},
                code=400, **query)
            self.assertIn('add up to 1001. Write amounts of '
                          'at most 1000', error['error_message'])
        lease = self.make(reservations=[self.reservation()] * 2)
        first, second = lease['reservations']
        error = self.ask('PUT', f'/leases/{lease["id"]}', {'reservations': [
            {'id': first['id'], 'amount': 1000}]}, code=400)
        self.assertIn('add up to 1001',
                      error['error_message'])

    def test_placement_is_asked_once_for_equal_questions(self):
        asked = self.placement_asked()
        self.make(reservations=[
            self.reservation(vcpus=1, memory_mb=size)
            for size in range(100, 105)])
        self.assertEqual(1, sum('/resource_providers' in url
                                for url in asked), asked)

    def test_only_what_is_public_of_hosts_may_be_asked_for(self):
        for text in ('["=", "$hypervisor_hostname", "host1"]',
                     '["or", ["<", "$hypervisor_hostname", "host2"]]',
                     '["and", [">", "$vcpus", 0], ["<", "$local_gb", 9]]'):
            for error in (
                    self.make(reservations=[self.reservation(
                        resource_properties=text)], code=400),
                    self.ask('GET', '/availability', vcpus=1, memory_mb=1,
                             disk_gb=0, resource_properties=text, code=400)):
                self.assertIn('is not a host property that reservations can '
                              'ask for. Write one or more of '
                              '"$hypervisor_type", "$vcpus".',
                              error['error_message'])
        lease = self.make(start_in=HOUR, reservations=[self.reservation(
            resource_properties='[">", "$vcpus", 0]')])
        reservation, = lease['reservations']
        # It stays what it is when the operator takes it back.
        self.flags(group='blazar', public_properties=[])
        path = f'/leases/{lease["id"]}'
        self.ask('PUT', path, {'end_date': self.at(5 * HOUR)}, code=200)
        self.ask('PUT', path, {'reservations': [{
            'id': reservation['id'], 'amount': 2,
            'resource_properties': '[">", "$vcpus", 0]'}]}, code=200)
        error = self.ask('PUT', path, {'reservations': [{
            'id': reservation['id'],
            'resource_properties': '[">", "$vcpus", 1]'}]}, code=400)
        self.assertIn('There are none: leave the properties out.',
                      error['error_message'])

    def test_who_may_only_read(self):
        lease = self.make(start_in=HOUR)
        reader = self.api(user='carol', roles=('reader',))
        self.assertEqual(lease, self.get(lease, client=reader))
        self.make(client=reader, code=403)
        for method in ('PUT', 'DELETE'):
            answer = self.ask(method, f'/leases/{lease["id"]}', {},
                              reader, 403)
            self.assertEqual('FORBIDDEN', answer['error_name'])

    def test_a_quote_an_offer_and_what_is_free(self):
        body = {'end_date': self.at(HOUR), 'reservations': [
            self.reservation(vcpus=4, amount=3)]}
        quote = self.ask('POST', '/leases', body, code=200,
                         dry_run='true')['quote']
        self.assertEqual(
            (False, 'too_big', None, 2, 3), tuple(quote[key] for key in (
                'fits', 'reason', 'next_start', 'fits_now', 'wanted')))
        offer = self.make(reservations=[
            self.reservation(vcpus=4, amount=2)], offer_seconds=600)
        self.assertEqual('OFFERED', offer['status'])
        body['reservations'][0]['amount'] = 1
        quote = self.ask('POST', '/leases', body, code=200,
                         dry_run='true')['quote']
        self.assertEqual((False, 'no_room', offer['end_date']), tuple(
            quote[key] for key in ('fits', 'reason', 'next_start')))
        free = self.ask('GET', '/availability', code=200, vcpus=4,
                        memory_mb=1024, disk_gb=1, amount=2,
                        duration='10m')
        self.ask('GET', '/availability', code=200, vcpus=4, memory_mb=1024,
                 disk_gb=1, start_date=clocks.iso(
                     clocks.SystemClock().now() - 2))
        self.assertEqual([(0, False), (2, True)], [
            (one['fits'], one['enough']) for one in free['availability']])
        self.assertEqual(offer['end_date'],
                         free['availability'][1]['start_date'])
        self.assertEqual('PENDING', self.ask(
            'POST', f'/leases/{offer["id"]}/accept', code=200)['lease'][
                'status'])
        self.ask('POST', f'/leases/{offer["id"]}/accept', code=200)
        self.run_until(int(time.time()))
        self.assertEqual('ACTIVE', self.get(offer)['status'])


class TestRepeats(ApiTestCase):

    def post(self, key, code=201, **more):
        """Ask for a lease by a key, as who got no answer does."""
        url = self.alice.base_url.rsplit('/v2', 1)[0]
        answer = requests.post(
            f'{url}/reservation/v1/leases', params=more.pop('query', None),
            json={'name': 'lease1', 'start_date': self.at(HOUR),
                  'end_date': self.at(2 * HOUR), 'events': [],
                  'reservations': [self.reservation(amount=4)],
                  'before_end_date': None, **more},
            headers={'X-Auth-Token': self.alice.who.token(),
                     'Idempotency-Key': key})
        self.assertEqual(code, answer.status_code, answer.text)
        return answer.json()

    def test_asked_for_twice_a_lease_is_made_once(self):
        quote = self.post('one', 200, query={'dry_run': 'true'})['quote']
        self.assertTrue(quote['fits'])
        lease = self.post('one')['lease']
        # All there is is taken: nothing was looked for.
        self.assertEqual(lease, self.post('one')['lease'])
        self.assertEqual('NO_ROOM', self.post('two', 409)['error_name'])
        answer = self.post('one', 409, name='other')
        self.assertIn('Use a new key', answer['error_message'])
        self.post('x' * 300, 400)
        self.assertEqual(1, len(self.leases()))

    def test_who_was_overtaken_gets_the_lease_of_the_other(self):
        made_by = idempotency.made_by
        first = self.post('one')['lease']
        answers = [None]
        with mock.patch('blazar_core.leases.idempotency.made_by',
                        lambda *args: (
                            answers.pop() if answers else made_by(*args))):
            self.assertEqual(first, self.post('one')['lease'])
        self.assertEqual(1, len(self.leases()))


class TestRequestsThatDie(ApiTestCase):
    """A boot takes slots, and its nova-api gets no further."""

    def setUp(self):
        super().setUp()
        self.sent = 0
        self.reservation_id = self.make_active(reservations=[
            self.reservation(amount=2)])['reservations'][0]['id']
        self.useFixture(fixtures.MockPatchObject(
            transport.Transport, '_send', self.counting(
                transport.Transport._send)))

    def counting(self, send):
        def count(bus, target, context, message, **kwargs):
            self.sent += message['method'] == 'schedule_and_build_instances'
            return send(bus, target, context, message, **kwargs)
        return count

    def boot_two(self):
        before = self.own_servers()
        self.boot('two', flavor=self.reservation_id, count=2)
        return self.own_servers() - before

    def own_servers(self):
        return {one['id'] for one in self.alice.get_servers(detail=False)}

    def left(self):
        return self.books('SELECT server_id FROM slot_builds')

    def look(self, after=30):
        self.clock.advance(after)
        self.listener.slots.send_left()

    def assert_built_once(self, servers):
        self.assertEqual(2, len(servers))
        for server_id in servers:
            self.wait_for_status(server_id, 'ACTIVE')
        self.assertEqual((1, []), (self.sent, self.left()))

    def test_a_listener_sends_its_build(self):
        with mock.patch.object(lease_admission.LeaseAdmission, '_send'):
            servers = self.boot_two()
        self.look(after=0)
        self.assertEqual(0, self.sent)
        self.look()
        self.assert_built_once(servers)
        self.look()
        self.assertEqual(1, self.sent)
        for server_id in servers:
            self.assertEqual(1, len(self.allocations(server_id)))

    def test_one_that_stands_still_does_not_send_it_again(self):
        with mock.patch.object(
                fault_points, 'fault_point', lambda step, _what: (
                    step is fault_points.FaultPoint.SLOT_TAKEN and
                    self.look())):
            servers = self.boot_two()
        self.assert_built_once(servers)

    def test_nor_does_one_that_fails_then(self):
        def fail(*_args):
            self.look()
            raise ValueError('A fault of the database')

        real, admit = bound_servers.admit, iter([fail])
        with mock.patch.object(bound_servers, 'admit', lambda *args: next(
                admit, real)(*args)):
            servers = self.boot_two()
        self.assert_built_once(servers)

    def test_one_that_fails_before_gives_its_slots_back(self):
        with mock.patch.object(bound_servers, 'admit', side_effect=ValueError):
            self.refused(500, self.boot_two)
        self.assertEqual(([], set()), (self.left(), self.own_servers()))
        self.assert_built_once(self.boot_two())

    def refused_and_left(self, name, then):
        """Boot by a request that does not learn what it has written."""
        taken, before = getattr(slots.Slots, name), self.own_servers()

        def unsure(*args):
            taken(*args)
            then()
            raise errors.OutcomeUnknown

        with mock.patch.object(slots.Slots, name, unsure):
            self.refused(503, self.boot_two)
        return self.own_servers() - before

    def test_one_that_does_not_know_whether_it_has_them_undoes_nothing(self):
        for then in (self.look, lambda: None):
            self.sent = 0
            servers = self.refused_and_left('take', then)
            self.look()
            self.assert_built_once(servers)
            for server_id in servers:
                self.alice.delete_server(server_id)
                self.wait_until_gone(server_id)
            self.fill_books()

    def test_nor_one_that_does_not_know_who_sends_its_build(self):
        with mock.patch.object(bound_servers, 'admit', side_effect=ValueError):
            servers = self.refused_and_left('dispatch', lambda: None)
        self.assertEqual((2, []), (len(servers), self.left()))
        # As a build that got lost.
        self.assertEqual({'RESERVED'}, {
            self.alice.get_server(one)['status'] for one in servers})

    def test_none_is_sent_whose_servers_are_deleted(self):
        with mock.patch.object(lease_admission.LeaseAdmission, '_send'):
            servers = self.boot_two()
        for server_id in servers:
            self.alice.delete_server(server_id)
        self.look()
        self.assertEqual((0, []), (self.sent, self.left()))

    def test_where_placement_is_away_it_is_tried_again(self):
        with mock.patch.object(lease_admission.LeaseAdmission, '_send'):
            servers = self.boot_two()
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=errors.CloudUnavailable('It is away')):
            self.look()
        self.assertEqual(0, self.sent)
        self.look(after=0)
        self.assert_built_once(servers)
