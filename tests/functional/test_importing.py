# SPDX-License-Identifier: Apache-2.0

"""Leases of Blazar, imported with their hosts and their servers."""

import json
import pydoc

import fixtures
from nova.compute import api as compute_api
from nova import context as nova_context
from nova import objects
from oslo_utils.fixture import uuidsentinel as uuids

from blazar_core.common import clocks
from blazar_nova.compat import bound_servers
from blazar_nova.verify import verification
from tests import blazar18
from tests.functional import nova_box
from tests.functional import whole_hosts_base

HOUR = 3600


class ImportTestCase(whole_hosts_base.HostsTestCase):
    """Three hosts, and a Blazar that has two of them."""

    def setUp(self):
        super().setUp()
        self.blazar = self.useFixture(blazar18.BlazarDatabase())
        for number, name in enumerate(('host1', 'host2'), 1):
            self.blazar.host(name, str(number), gpu='A100')
        self.context = nova_context.get_admin_context()
        self.aggregate('freepool', None, ['host1', 'host2'])

    def aggregate(self, name, zone, hosts, **metadata):
        """Create an aggregate by Nova's API, as Blazar does: with a uuid."""
        api = compute_api.AggregateAPI()
        made = api.create_aggregate(self.context, name, zone)
        for host in hosts:
            api.add_host_to_aggregate(self.context, made.id, host)
        if metadata:
            api.update_aggregate_metadata(self.context, made.id, metadata)
        return objects.Aggregate.get_by_id(self.context, made.id)

    def begin(self, reservation_id, *hosts, **metadata):
        """Start a lease as Blazar does."""
        api = compute_api.AggregateAPI()
        freepool = next(one for one in objects.AggregateList.get_all(
            self.context) if one.name == 'freepool')
        for host in hosts:
            api.remove_host_from_aggregate(self.context, freepool.id, host)
        return self.aggregate(
            reservation_id, f'blazar_{reservation_id}', hosts, **{
                'blazar:owner': nova_box.PROJECT_ID, **metadata})

    def interrupted(self, *paths):
        """Run the command and interrupt it after each of these functions, one
        after the other.
        """
        for path in paths:
            real = pydoc.locate(f'blazar_nova.compat.{path}')

            def stumble(*args, real=real):
                real(*args)
                raise RuntimeError('killed')

            with fixtures.MonkeyPatch(f'blazar_nova.compat.{path}', stumble):
                self.assertIn('The import failed: killed', self.imported(1))

    def lease_of(self, start, end, *hosts, **kwargs):
        return self.blazar.lease(
            self.began + start, self.began + end, *hosts,
            **{'project': nova_box.PROJECT_ID, **kwargs})

    def manage(self, *words):
        return self.command('import', self.blazar.url, *words)

    def imported(self, code=0):
        """Import everything; return the output."""
        found, text = self.manage('--apply')
        self.assertEqual(code, found, text)
        return text

    def old_boot(self, name, reservation_id=None, host='host1', client=None):
        """Boot a server on a host, as it was booted under Blazar."""
        if reservation_id is None:
            return self.boot_active(name, client=client or self.admin,
                                    availability_zone=f'nova:{host}')
        server = self.boot_active(
            name, client=client,
            availability_zone=f'blazar_{reservation_id}')
        # The plugin was not there to check the hint.
        spec = objects.RequestSpec.get_by_instance_uuid(
            self.context, server['id'])
        spec.scheduler_hints = {'reservation': [reservation_id]}
        spec.save()
        return server


class TestPending(ImportTestCase):

    def test_dry_run_and_import_of_pending_lease(self):
        lease_id, reservation_id = self.lease_of(
            HOUR, 2 * HOUR, '2', resource_properties=['==', '$gpu', 'A100'])
        before = self.query('SELECT * FROM hosts')
        code, text = self.manage('--format', 'json')
        found = json.loads(text)
        self.assertEqual((0, False), (code, found['applied']))
        self.assertEqual({'to be imported'}, {
            one['outcome'] for one in found['items']})
        self.assertIn((lease_id, 'lease'), {
            (one['id'], one['name']) for one in found['items']})
        code, text = self.manage()
        self.assertEqual(0, code, text)
        for part in ('Host host1 (1): to be imported: gpu=A100',
                     f'Lease lease ({lease_id}): to be imported: PENDING, '
                     f'from {self.at(HOUR)} to {self.at(2 * HOUR)} UTC, on '
                     f'host2', '3 to be imported. Nothing was changed'):
            self.assertIn(part, text)
        self.assertEqual(before, self.query('SELECT * FROM hosts'))
        self.assertEqual({'freepool': ['host1', 'host2']}, self.aggregates())
        self.assertIn('3 imported.', self.imported())
        shown = self.get({'id': lease_id})
        self.assertEqual(('PENDING', reservation_id, 'pending'), (
            shown['status'], shown['reservations'][0]['id'],
            shown['reservations'][0]['status']))
        self.assertEqual([('host2',)], self.query(
            'SELECT hosts.name FROM bookings JOIN hosts '
            'ON hosts.id = bookings.host_id'))
        self.assertEqual('A100', self.enrolling.listed()[0]['gpu'])
        self.assertIn('3 there already.', self.imported())
        # An aggregate that Blazar has created in advance is no obstacle.
        self.aggregate(reservation_id, f'blazar_{reservation_id}', [])
        self.run_until(self.began + HOUR)
        self.assertEqual('ACTIVE', self.get({'id': lease_id})['status'])
        self.assertEqual(['host2'], self.aggregates()[reservation_id])
        server = self.within('in', reservation_id)
        self.wait_for_status(server['id'], 'ACTIVE')
        self.assertEqual('host2', self.host_of(server))

    def test_repeated_import_keeps_later_changes(self):
        """Changes of hosts, of their properties, and of leases are kept."""
        self.blazar.hide('gpu')
        ids = [self.lease_of(start * HOUR, (start + 1) * HOUR, '1')[0]
               for start in (1, 3, 5)]
        self.imported()
        self.assertEqual([], self.ask(
            'GET', '/os-hosts/properties', code=200)['resource_properties'])
        host = self.enrolling.listed()[0]['id']
        for path, change in (
                ('/os-hosts/properties/gpu', {'private': False}),
                (f'/os-hosts/{host}', {'rack': '7', 'reservable': False}),
                (f'/leases/{ids[0]}', {'name': 'mine', 'end_date': self.at(
                    5 * HOUR // 2)})):
            self.ask('PATCH' if 'gpu' in path else 'PUT', path, change,
                     self.admin, 200)
        self.ask('DELETE', f'/leases/{ids[1]}', code=204)
        self.ask('DELETE', f'/leases/{ids[2]}', code=204)

        def everything():
            return [self.query(f'SELECT * FROM {table}') for table in (
                'hosts', 'host_properties', 'leases', 'reservations',
                'bookings', 'events')]

        before = everything()
        self.assertIn('6 there already.', self.imported())
        self.assertEqual(before, everything())
        self.assertEqual({'gpu'}, {one['property'] for one in self.ask(
            'GET', '/os-hosts/properties')['resource_properties']} - {'rack'})
        self.assert_verified()


class TestActive(ImportTestCase):
    """A lease of one host that has servers."""

    def setUp(self):
        super().setUp()
        self.lease_id, self.reservation_id = self.lease_of(
            -HOUR, HOUR, '1', status='ACTIVE')
        self.blazars = self.begin(
            self.reservation_id, 'host1', filter_tenant_id='x')
        self.server = self.old_boot('mine', self.reservation_id)
        self.assertEqual('host1', self.host_of(self.server))
        self.run_sync()

    def bound_to(self, server):
        """Return a server's reservation according to its cell and to Nova."""
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            self.context, server['id'])
        with nova_context.target_cell(
                self.context, mapping.cell_mapping) as cell:
            instance = objects.Instance.get_by_uuid(
                cell, server['id'], ['flavor'])
        return {bound_servers.host_reservation_of(instance.flavor),
                bound_servers.reservation_of_server(server['id'])}

    def test_imported_active_lease_keeps_servers_until_end(self):
        other = self.old_boot('without hint', host='host1', client=self.api(
            roles=('admin', 'member', 'reader')))
        self.run_sync()
        text = self.imported()
        self.assertIn(f'Lease lease ({self.lease_id}): imported', text)
        lease = self.get({'id': self.lease_id})
        self.assertEqual(('ACTIVE', 'active', 'DONE'), (
            lease['status'], lease['reservations'][0]['status'], next(
                one['status'] for one in lease['events']
                if one['event_type'] == 'start_lease')))
        # Blazar's aggregate becomes that of the reservation, except for the
        # metadata that would exclude other projects.
        self.assertEqual({
            'freepool': ['host2'], 'blazar_pool': ['host1', 'host2'],
            self.reservation_id: ['host1']}, self.aggregates())
        aggregate = objects.Aggregate.get_by_id(
            self.context, self.blazars.id)
        self.assertEqual({
            'availability_zone': f'blazar_{self.reservation_id}',
            'blazar:owner': nova_box.PROJECT_ID,
            'reservation': self.reservation_id}, aggregate.metadata)
        self.assertEqual(
            {'CUSTOM_BLAZAR_POOL', self.trait_of(self.reservation_id)},
            self.traits('host1'))
        for server in (self.server, other):
            self.assertEqual({self.reservation_id}, self.bound_to(server))
        self.assertEqual(
            [('host1', self.reservation_id)], self.query(
                'SELECT name, assigned_to FROM hosts '
                'WHERE assigned_to IS NOT NULL'))
        self.assert_nothing_differs()
        # Other servers do not get there, and the owner boots as before.
        inside = self.within('new', self.reservation_id)
        self.wait_for_status(inside['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(inside))
        self.fails(self.boot('forced', client=self.admin,
                             availability_zone='nova:host1'))
        self.imported()
        self.run_until(clocks.SystemClock().now() + HOUR)
        for server in (self.server, other, inside):
            self.wait_until_gone(server['id'])
        self.run_until(self.clock.now() + 300)
        self.assertEqual('TERMINATED', self.get(lease)['status'])
        self.assertEqual({
            'freepool': ['host1', 'host2'],
            'blazar_pool': ['host1', 'host2']}, self.aggregates())

    def assert_nothing_differs(self):
        self.listener.server_sync.compare_all()
        self.assertEqual([], [
            one.text for one in verification.Verifier(
                self.listener.parts, lambda _seconds: None,
                lambda _text: None, 0, False).run(False).left])

    def test_servers_of_imported_lease_stay_on_its_hosts(self):
        self.imported()
        self.admin.post_server_action(self.server['id'], {'migrate': None},
                                      check_response_status=None)
        self.wait_for(lambda: self.admin.get_server(self.server['id'])[
            'OS-EXT-STS:task_state'] is None)
        self.assertEqual('host1', self.host_of(self.server))

    def test_host_with_foreign_servers_is_refused(self):
        stranger = self.old_boot('stranger', host='host1', client=self.api(
            project=uuids.other, roles=('admin', 'member', 'reader')))
        self.run_sync()
        before = self.aggregates()
        for words in ((), ('--apply',)):
            code, text = self.manage(*words)
            self.assertEqual(1, code, text)
            self.assertIn(f'({stranger["id"]}). Migrate or delete', text)
            self.assertIn('Its host host1 is refused. Resolve that', text)
        self.assertEqual([('host2',)], self.query(
            'SELECT name FROM hosts WHERE enrollment IS NOT NULL'))
        self.assertEqual(
            {**before, 'blazar_pool': ['host2']}, self.aggregates())
        self.assertEqual({None}, self.bound_to(self.server))
        self.ask('GET', f'/leases/{self.lease_id}', code=404)
        # When it is deleted, the same command does the rest.
        self.admin.delete_server(stranger['id'])
        self.wait_until_gone(stranger['id'])
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertEqual({self.reservation_id}, self.bound_to(self.server))

    def test_unrelated_lease_remains_with_blazar(self):
        """An unrelated lease is refused, and remains with Blazar."""
        other, reservation_id = self.lease_of(
            -HOUR, HOUR, resource_type='virtual:instance', status='ACTIVE')
        self.aggregate(
            reservation_id, None, ['plain'], reservation=reservation_id,
            filter_tenant_id=nova_box.PROJECT_ID)
        self.assertIn(f'({other}): REFUSED: Its reservation',
                      self.imported(1))
        self.assert_nothing_differs()
        self.assertEqual(['plain'], self.aggregates()[reservation_id])

    def test_import_waits_for_unconfirmed_resize(self):
        self.flags(allow_resize_to_same_host=True)
        self.admin.post_server_action(self.server['id'], {
            'resize': {'flavorRef': '2'}})
        self.wait_for_status(self.server['id'], 'VERIFY_RESIZE')
        self.look()
        self.assertIn('confirm or revert resizes', self.imported(1))
        self.admin.post_server_action(
            self.server['id'], {'confirmResize': None})
        self.wait_for_status(self.server['id'], 'ACTIVE')
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertEqual({self.reservation_id}, self.bound_to(self.server))

    def test_shelved_server_is_unshelved_on_hosts_of_lease(self):
        self.admin.post_server_action(self.server['id'], {'shelve': None})
        self.wait_for_status(self.server['id'], 'SHELVED_OFFLOADED')
        self.look()
        self.clock.advance(60)
        self.imported()
        self.assertEqual({self.reservation_id}, self.bound_to(self.server))
        self.admin.post_server_action(self.server['id'], {'unshelve': None})
        self.wait_for_status(self.server['id'], 'ACTIVE')
        self.assertEqual('host1', self.host_of(self.server))

    def test_imported_lease_past_its_end_terminates(self):
        self.blazar.execute('UPDATE leases SET end_date = :end',
                            end='2020-01-01 00:00:00')
        self.blazar.execute('UPDATE leases SET start_date = :start',
                            start='2019-12-31 00:00:00')
        self.imported()
        self.run_until(clocks.SystemClock().now())
        self.wait_until_gone(self.server['id'])
        self.run_until(self.clock.now() + 300)
        self.assertEqual(
            'TERMINATED', self.get({'id': self.lease_id})['status'])

    def test_unreservable_host_is_never_reservable_during_import(self):
        self.blazar.execute('UPDATE computehosts SET reservable = 0')
        self.interrupted('pool.join')
        self.assertEqual([('enrolling', 0)] * 2, self.query(
            'SELECT enrollment, reservable FROM hosts '
            'WHERE enrollment IS NOT NULL'))
        self.imported()
        self.assertEqual([('enrolled', 0)] * 2, self.query(
            'SELECT enrollment, reservable FROM hosts '
            'WHERE enrollment IS NOT NULL'))

    def test_interrupted_import_can_be_repeated(self):
        self.interrupted('pool.join', 'bound_servers.bind_running',
                         'pool.open_to')
        self.imported()
        self.assertEqual({self.reservation_id}, self.bound_to(self.server))
        self.assert_nothing_differs()


class TestNotIsolated(ImportTestCase):

    more_conf = '[scheduler]\nenable_isolated_aggregate_filtering = False\n'

    def test_import_requires_isolated_aggregate_filtering(self):
        self.lease_of(HOUR, 2 * HOUR, '1')
        code, text = self.manage()
        self.assertEqual(2, code)
        self.assertIn('enable_isolated_aggregate_filtering', text)


class TestUnreadable(ImportTestCase):

    def test_unusable_blazar_database_is_refused(self):
        folder = self.useFixture(fixtures.TempDir()).path
        for url, part in (
                (f'sqlite:///{folder}/empty', 'not a database of Blazar 18'),
                (f'{folder}/blazar.conf', 'cannot be read'),
                ('nothing://x', 'cannot be used')):
            self.blazar.url = url
            code, text = self.manage()
            self.assertEqual((2, True), (code, part in text), text)
