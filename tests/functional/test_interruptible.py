# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers on a real Nova: boots, notices and evictions."""

import functools
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import exception
from nova import objects
from nova.tests import fixtures as nova_fixtures
from oslo_utils.fixture import uuidsentinel as uuids
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.services import wiring
from tests import driven
from tests.functional import api_base

HOUR = 3600
#: The defaults of the notice and of the time of an eviction.
LEAD, EVICTION = 600, 300
YES = {'interruptible': 'True'}


class InterruptibleTestCase(api_base.ApiTestCase):

    def setUp(self):
        super().setUp()
        self.told = self.record()

    def reserve(self, start_in=2 * HOUR, amount=2):
        """Reserve all CPUs of both hosts, for later."""
        return self.make(start_in=start_in, reservations=[
            self.reservation(vcpus=4, amount=amount)])

    def until(self, instant):
        """Advance the clock, and carry out and plan evictions."""
        self.clock.advance(instant - self.clock.now())
        self.listener.evictions.carry_out()
        self.listener.evictions.plan()

    def shown(self, server_id):
        return self.ask('GET', f'/interruptible/{server_id}',
                        code=200)['interruptible']

    def start_of(self, lease):
        return driven.parse_iso(self.get(lease)['start_date'])

    def boot_error(self, name, **kwargs):
        return self.wait_for_status(
            self.boot(name, **kwargs)['id'], 'ERROR')

    def notified(self, event):
        return [one['server_id'] for one in self.told.told(
            f'server.interruptible.{event}')]


class InterruptibleTest(InterruptibleTestCase):

    def test_resize_does_not_tell_which_servers_of_others_are_interruptible(
            self):
        flavor = self.flavor_with('blazar:interruptible', 'True')
        bob = self.api('f' * 32, 'bob')
        for server_id in (self.boot_active('vm1', hints=YES)['id'],
                          self.boot_active('vm2')['id'], uuids.none):
            self.assertEqual(404, bob.api_post(
                f'/servers/{server_id}/action',
                {'resize': {'flavorRef': flavor}},
                check_response_status=None).status)

    def test_server_is_listed_while_its_cell_is_down(self):
        server_id = self.boot_active('vm1', flavor='4', hints=YES)['id']
        self.wait_for(lambda: self.alice.get_server(server_id)['metadata'])
        self.alice.microversion = '2.69'
        # The database of nova-api itself is that of cell0.
        absent = mock.patch.object(
            objects.Instance, 'obj_load_attr',
            side_effect=exception.InstanceNotFound(instance_id=server_id))
        with absent, nova_fixtures.DownCellFixture(
                [self.cell_mappings['cell1']]):
            self.assertEqual([(server_id, 'UNKNOWN')], [
                (one['id'], one['status'])
                for one in self.alice.get_servers()])
            self.assertEqual(
                'UNKNOWN', self.alice.get_server(server_id)['status'])
        self.assertEqual('ACTIVE', self.alice.get_server(server_id)['status'])

    def test_server_whose_port_is_in_trunk_is_evicted_in_time(self):
        lease = self.reserve()
        server_id = self.boot_active(
            'vm1', flavor='4', hints={**YES, 'on_evict': 'delete'}, networks=[
                {'uuid': nova_fixtures.NeutronFixture.network_1['id']}])['id']
        self.run_sync()
        freed = self.port_in_trunk()
        start = self.start_of(lease)
        for left in range(LEAD, 0, -15):
            self.until(start - left)
            self.wait_for(lambda: not self.exists(server_id) or (
                self.admin.get_server(server_id)['OS-EXT-STS:task_state']
                is None))
        self.assertEqual(([server_id], {}),
                         (freed, self.allocations(server_id)))

    def test_usage_is_recorded_while_another_cell_is_silent(self):
        def usage():
            return self.query('SELECT name, usage FROM hosts ORDER BY name')

        self.boot_active('spot', flavor='1', hints=YES)
        server = self.boot_active('ordinary', flavor='1')
        host = self.admin.get_server(server['id'])['OS-EXT-SRV-ATTR:host']
        gone = self.boot_active('gone', flavor='1', client=self.admin,
                                availability_zone=f'nova:{host}')
        self.run_sync()
        before = usage()
        # Its migration has the allocations that it had on the host.
        self.alice.post_server_action(
            server['id'], {'resize': {'flavorRef': '2'}})
        self.wait_for_status(server['id'], 'VERIFY_RESIZE')
        self.admin.delete_server(gone['id'])
        self.wait_until_gone(gone['id'])
        with self.silent_cell():
            self.clock.advance(1000)
            self.run_sync()
            self.assertNotEqual(before, usage())
            seen = usage()
        with self.silent_cell('cell1'):
            self.run_sync()
        self.run_sync()
        self.assertEqual(seen, usage())

    def test_interruptible_server_uses_reserved_capacity_until_eviction(self):
        lease = self.reserve()
        self.assertRegex(self.boot_error('ordinary', flavor='3')['fault'][
            'message'], r'No valid host .* 2 hosts with free capacity are '
            r'reserved by leases for later\. An interruptible server .*, or a '
            r'lease that ends by .* UTC would fit now\.')
        server_id = self.boot_active('vm1', flavor='4', hints=YES)['id']
        start = self.start_of(lease)
        safe = clocks.iso(start - LEAD)
        self.assertEqual(safe, self.shown(server_id)['safe_until'])
        # The displayed metadata may be some seconds old.
        self.wait_for(lambda: self.alice.get_server(server_id)['metadata'])
        metadata = {one['id']: one['metadata']
                    for one in self.alice.get_servers()}
        self.assertEqual({'interruptible': 'True', 'safe_until': safe},
                         metadata.pop(server_id))
        self.assertEqual([{}], [*metadata.values()])
        self.run_sync()
        self.until(start - LEAD)
        self.told.wait('server.interruptible.evict_scheduled')
        at = clocks.iso(start - EVICTION)
        self.clock.advance(100)
        shown = self.shown(server_id)
        self.assertEqual(({
            'time': at, 'status': 'PLANNED',
            'message': 'Leases need its capacity. It is moved to another '
            f'host if one is safer, or shelved at {at}.'},
            safe), (shown['eviction'], shown['safe_until']))
        self.until(start - EVICTION)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.until(start - 100)
        self.told.wait('server.interruptible.evicted')
        shown = self.shown(server_id)['eviction']
        self.assertEqual('EVICTED', shown['status'])
        self.wait_for(lambda: 'evicted_at' in self.alice.get_server(
            server_id)['metadata'])
        metadata = self.alice.get_server(server_id)['metadata']
        self.assertEqual({
            'interruptible': 'True', 'evicted_at': shown['time'],
            'eviction': 'Leases needed its capacity. If it was shelved, '
            'unshelve it when there is capacity again.'}, metadata)
        self.run_until(start)
        self.assertEqual('ACTIVE', self.get(lease)['status'])
        flavor = lease['reservations'][0]['id']
        for number in range(2):
            self.boot_active(f'reserved{number}', flavor=flavor)

    def test_fault_mentions_interruptible_servers_only_if_they_fit(self):
        self.reserve(start_in=400)
        said = self.boot_error('vm1')['fault']['message']
        self.assertIn('A lease that ends by', said)
        self.assertNotIn('interruptible', said)
        self.assertNotIn('reserved', self.boot_error('vm2', hints=YES)[
            'fault']['message'])

    def new_flavor(self):
        """Create a flavor whose servers are interruptible."""
        objects.Flavor(
            nova_context.get_admin_context(), flavorid='cheap', name='cheap',
            vcpus=1, memory_mb=512, root_gb=1, ephemeral_gb=0, swap=0,
            rxtx_factor=1.0, is_public=True, disabled=False,
            extra_specs={'blazar:interruptible': 'True'}).create()

    def test_flavor_extra_spec_makes_server_interruptible(self):
        self.reserve()
        self.new_flavor()
        server_id = self.boot_active('vm1', flavor='cheap')['id']
        self.assertEqual('shelve', self.shown(server_id)['on_evict'])
        self.assertIn('Leave the hint interruptible out', self.refused(
            400, self.boot, 'vm2', flavor='cheap',
            hints={'interruptible': 'False'}))
        self.assertIn('Create a new server', self.ask(
            'DELETE', f'/interruptible/{server_id}', code=409)[
                'error_message'])

    def test_lease_by_default_keeps_server_interruptible(self):
        server_id = self.boot_active('vm1', hints=YES)['id']
        self.flags(group='blazar', default_reservation='on')
        self.assertIn('has a lease', self.ask(
            'DELETE', f'/interruptible/{server_id}', code=403)[
                'error_message'])
        self.flags(group='blazar', default_reservation_exempt_roles='member')
        self.ask('DELETE', f'/interruptible/{server_id}', code=204)

    def test_boot_is_refused_if_no_host_is_safe_long_enough(self):
        self.reserve()
        said = self.refused(409, self.boot, 'vm1', hints={
            **YES, 'safe_for': '4h'})
        self.assertRegex(said, r'No host is safe for 14400 seconds; the best '
                               r'ones are safe for 6\d\d\d\.')
        server = self.boot_active('vm1', hints={**YES, 'safe_for': '1h'})
        self.assertEqual(HOUR, self.shown(server['id'])['safe_for'])

    def test_invalid_hints_are_refused(self):
        for hints, said in (
                ({'interruptible': 'perhaps'}, 'neither true nor false'),
                ({**YES, 'on_evict': 'explode'}, 'shelve or delete'),
                ({**YES, 'on_evict': {}}, 'shelve or delete'),
                ({**YES, 'safe_for': 'long'}, 'invalid duration'),
                ({**YES, 'safe_for': ['1h', '2h']}, 'Write a'),
                ({**YES, 'safe_for': -1}, 'Write a whole number'),
                ({**YES, 'resume': 'perhaps'}, 'Write auto'),
                ({**YES, 'resume': 'auto', 'on_evict': 'delete'},
                 'servers that are shelved'),
                ({'resume': 'auto'}, 'Add --hint interruptible=True'),
                ({'safe_for': '1h'}, 'Add --hint interruptible=True'),
                ({'interruptable': 'True'}, 'nearly "interruptible"'),
                ({**YES, **self.lease_hints('vm1')}, 'has no lease')):
            self.assertIn(said, self.refused(
                400, self.boot, 'vm1', hints=hints), hints)
        self.assertEqual([], self.alice.get_servers())
        with self.listener.parts.database.reader() as session:
            self.assertEqual([], session.scalars(
                sa.select(models.InterruptibleServer)).all())

    def test_running_server_becomes_interruptible_and_back(self):
        server_id = self.boot_active('vm1', flavor='4')['id']
        self.run_sync()
        path = f'/interruptible/{server_id}'
        self.assertEqual(404, self.ask('GET', path)['error_code'])
        self.ask('PUT', path, {}, code=200)
        self.assertIsNone(self.shown(server_id)['safe_until'])
        lease = self.reserve()
        self.assertEqual(
            clocks.iso(self.start_of(lease) - LEAD),
            self.shown(server_id)['safe_until'])
        said = self.ask('DELETE', path, code=409)['error_message']
        self.assertIn('stays interruptible', said)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.ask('DELETE', path, code=204)
        self.assertEqual(404, self.ask('GET', path)['error_code'])
        self.make(start_in=2 * HOUR, code=409, reservations=[
            self.reservation(vcpus=4, amount=2)])

    def test_evicted_server_is_unshelved_once_host_is_safe(self):
        server_id = self.boot_active('vm1', flavor='4', hints={
            **YES, 'resume': 'auto', 'safe_for': '10m'})['id']
        self.run_sync()
        lease = self.reserve()
        start = self.start_of(lease)
        self.until(start - LEAD)
        self.until(start - EVICTION)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.until(start - 100)
        self.assertIn('as soon as a host is safe for 600 seconds',
                      self.shown(server_id)['eviction']['message'])
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.run_until(clocks.SystemClock().now())
        self.clock.advance(60)
        self.listener.evictions._resumption.look()
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.until(start)
        self.assertIsNone(self.shown(server_id)['eviction'])

    def test_boot_with_lease_waits_for_evictions(self):
        for number in range(2):
            self.boot_active(f'vm{number}', flavor='4', hints=YES)
        self.run_sync()
        hints = self.lease_hints('leased')
        self.refused(409, self.boot, 'leased', flavor='4', hints=hints)
        wiring.shared().leases.creation._eviction_time = LEAD
        server_id = self.boot('leased', flavor='4', hints=hints)['id']
        self.wait_for_status(server_id, 'RESERVED')
        lease, = self.ask('GET', '/leases', code=200)['leases']
        self.assertIn('interruptible servers are evicted before',
                      lease['warnings'][0])

    def test_automatic_resume_requires_trust(self):
        self.useFixture(fixtures.MockPatch(
            'blazar_nova.services.user_credentials.Credentials.delegate',
            side_effect=errors.TrustUnavailable('none')))
        self.assertIn('without resume=auto', self.refused(
            403, self.boot, 'vm1', hints={**YES, 'resume': 'auto'}))

    def test_other_projects_cannot_see_or_change_interruptible_server(self):
        server_id = self.boot_active('vm1', hints=YES)['id']
        bob = self.api(project=uuids.other, user='bob')
        path = f'/interruptible/{server_id}'
        for method, body in (('GET', None), ('DELETE', None)):
            self.ask(method, path, body, bob, 404)
        self.ask('PUT', path, {}, bob, 400)
        self.assertEqual([], self.ask(
            'GET', '/interruptible', client=bob, code=200)['interruptible'])
        self.ask('GET', '/interruptible', client=bob, code=403,
                 all_projects='true')
        self.assertEqual([server_id], [one['server_id'] for one in self.ask(
            'GET', '/interruptible', client=self.admin, code=200,
            all_projects='true')['interruptible']])

    def test_only_administrators_see_hosts(self):
        server_id = self.boot_active('vm1', flavor='1', hints=YES)['id']
        self.run_sync()
        path, source = f'/interruptible/{server_id}', self.host_of(server_id)

        def hosts():
            listed, = self.ask('GET', '/interruptible', client=self.admin,
                               code=200, all_projects='true')['interruptible']
            shown = self.ask('GET', path, client=self.admin, code=200)
            self.assertEqual(listed, shown['interruptible'])
            return listed['hosts']

        self.assertEqual([source], hosts())
        mine, = self.ask('GET', '/interruptible', code=200)['interruptible']
        self.assertNotIn('hosts', mine)
        self.assertNotIn('hosts', self.shown(server_id))
        self.resize(server_id, '2')
        self.assertEqual(sorted([source, self.host_of(server_id)]), hosts())

    def host_of(self, server_id):
        return self.admin.get_server(server_id)['OS-EXT-SRV-ATTR:host']

    def counts(self, server_id):
        """Whether a server counts on a host."""
        with self.listener.parts.database.reader() as session:
            return any(server_id in (one or ()) for one in session.scalars(
                sa.select(models.Host.consumers)))

    def resize(self, server_id, flavor):
        self.alice.post_server_action(
            server_id, {'resize': {'flavorRef': flavor}})
        self.wait_for_status(server_id, 'VERIFY_RESIZE')
        self.run_sync()

    def test_server_with_unconfirmed_resize_is_evicted(self):
        """Until it is confirmed it is in the way of both hosts."""
        server_id = self.boot_active('vm1', flavor='1', hints=YES)['id']
        source = self.host_of(server_id)
        self.resize(server_id, '2')
        self.assertNotEqual(source, self.host_of(server_id))
        self.assert_verified()
        self.assertIn('is not confirmed', self.ask(
            'DELETE', f'/interruptible/{server_id}', code=409)[
                'error_message'])
        start = self.start_of(self.reserve())
        self.assertEqual(clocks.iso(start - LEAD),
                         self.shown(server_id)['safe_until'])
        self.until(start - LEAD)
        self.until(start - EVICTION)
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        # Whether the resize has ended is seen by one of the next looks.
        for seconds in (20, 40, 60):
            self.until(start - EVICTION + seconds)
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        self.run_sync()
        self.until(start - 100)
        self.assert_verified()

    def test_resize_to_interruptible_flavor_needs_interruptible_server(self):
        server_id = self.boot_active('vm1', flavor='1')['id']
        self.new_flavor()
        self.assertIn('Make server', self.refused(
            409, self.alice.post_server_action, server_id,
            {'resize': {'flavorRef': 'cheap'}}))
        self.run_sync()
        self.ask('PUT', f'/interruptible/{server_id}', {}, code=200)
        self.resize(server_id, 'cheap')
        self.alice.post_server_action(server_id, {'revertResize': None})
        self.wait_for_status(server_id, 'ACTIVE')
        # The claim of the scheduler counts for half a minute.
        self.clock.advance(60)
        self.run_sync()
        self.assert_verified()
        self.ask('DELETE', f'/interruptible/{server_id}', code=204)

    def test_server_is_migrated_instead_of_shelved_to_safer_host(self):
        server_id = self.boot_active('vm1', flavor='1', hints=YES)['id']
        source = self.host_of(server_id)
        other = self.boot_active('vm2', flavor='4')['id']
        self.run_sync()
        start = self.start_of(self.reserve(amount=1))
        self.alice.delete_server(other)
        # The claim of the scheduler counts for half a minute.
        self.clock.advance(60)
        self.wait_for(lambda: self.run_sync() or not self.counts(other))
        self.until(start - LEAD)
        self.assertIn('moved to another host', self.shown(server_id)[
            'eviction']['message'])
        self.until(start - EVICTION)
        self.wait_for(lambda: self.host_of(server_id) != source)
        self.wait_for_status(server_id, 'ACTIVE')
        self.run_sync()
        self.until(start - 100)
        self.told.wait('server.interruptible.migrated')
        self.assertIsNone(self.shown(server_id)['safe_until'])
        self.assert_verified()

    def test_leased_server_cannot_become_interruptible(self):
        server = self.boot_active('vm1', hints=self.lease_hints('vm1'))
        self.assertIn('has a lease', self.ask(
            'PUT', f'/interruptible/{server["id"]}', {}, code=409)[
                'error_message'])

    def test_server_becomes_interruptible_by_its_exact_id_only(self):
        """MariaDB takes strings for equal that differ in accents."""
        server_id = self.boot_active('vm1')['id']
        self.run_sync()
        for kind in (objects.InstanceMapping, objects.Instance):
            name = ('get_by_instance_uuid' if
                    kind is objects.InstanceMapping else 'get_by_uuid')
            self.useFixture(fixtures.MockPatchObject(
                kind, name, functools.partial(
                    lambda get, context, _its_id, *args, **kwargs: get(
                        context, server_id, *args, **kwargs),
                    getattr(kind, name))))
        for other in (f'{server_id}%20', '\u00e1' + server_id[1:],
                      f'{{{server_id}}}'):
            self.assertIn('could not be found', self.ask(
                'PUT', f'/interruptible/{other}', {}, code=400)[
                    'error_message'])
        self.ask('PUT', f'/interruptible/{server_id}', {}, code=200)

    def test_server_in_error_cannot_become_interruptible(self):
        server_id = self.boot_active('vm1')['id']
        self.admin.post_server_action(
            server_id, {'os-resetState': {'state': 'error'}})
        refused = self.ask('PUT', f'/interruptible/{server_id}', {}, code=409)
        self.assertIn('is error: a server becomes interruptible only',
                      refused['error_message'])

    def test_verify_accepts_interruptible_and_other_servers(self):
        self.boot_active('vm1', hints=YES)
        self.boot_active('vm2')
        self.run_sync()
        self.assert_verified()

    def test_verify_corrects_usage_of_interruptible_servers(self):
        server_id = self.boot_active('vm1', flavor='1', hints=YES)['id']
        self.run_sync()
        with self.listener.parts.database.writer() as session:
            host = session.scalars(sa.select(models.Host).where(
                models.Host.interruptible.is_not(None))).one()
            host.usage, host.interruptible = {'VCPU': 1, 'MEMORY_MB': 512,
                                              'DISK_GB': 1}, None
        self.assertEqual([
            'Host host1, in use without an end',
            'Host host1, in use by interruptible servers'],
            [one.text.partition(':')[0].replace(host.name, 'host1')
             for one in self.compared(fix=True).fixed])
        self.assert_verified()
        self.assertTrue(self.shown(server_id)['placed'])

    def test_servers_of_one_boot_share_trust(self):
        made = self.useFixture(fixtures.MockPatch(
            'blazar_nova.services.user_credentials.Credentials.delegate',
            return_value='trust')).mock
        self.useFixture(fixtures.MockPatch(
            'blazar_nova.services.user_credentials.Credentials.revoke'))
        self.boot('vm', hints=YES, min_count=3, max_count=3)
        self.assertEqual(1, made.call_count)
        with self.listener.parts.database.reader() as session:
            ids = session.scalars(sa.select(
                models.InterruptibleServer.credential_id)).all()
            kept = session.scalars(sa.select(models.Credential.lease_id)).all()
        self.assertEqual((3, kept), (len(ids), [*{*ids}]))
        close = self.listener.parts.lifecycle.lease_close
        servers = self.ask('GET', '/interruptible', code=200)['interruptible']
        for one in servers:
            close.revoke_over()
            self.assertIsNotNone(close.credential(kept[0]))
            self.wait_for_status(one['server_id'], 'ACTIVE')
            self.ask('DELETE', f'/interruptible/{one["server_id"]}', code=204)
        close.revoke_over()
        self.assertIsNone(close.credential(kept[0]))
