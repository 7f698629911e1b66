# SPDX-License-Identifier: Apache-2.0

"""blazar-nova-manage verify: it lists differences, and fixes them with --fix.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import typing as ty
from unittest import mock

import fixtures
from nova import context as nova_context
from nova.db.api import api as api_db
from nova.db.api import models as api_models
from nova import objects
from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.capacity import pending
from blazar_core.db import models
from blazar_core.plugins import resource_types
from blazar_nova.cmd import manage
from blazar_nova.compat import compute_hosts
from blazar_nova.compat import reserved_state
from blazar_nova.compat import unmapped_servers
from blazar_nova.listener import host_sync
from blazar_nova.verify import verification
from tests import driven
from tests.functional import api_base
from tests.functional import base
from tests.functional import leased


HOUR = 3600


class VerifyTestCase(leased.LeasedTestCase):
    """A clock that a pause advances."""

    def compare(self, fix: bool = False,
                **options: ty.Any) -> verification.Report:
        self.said: list[str] = []
        self.pauses: list[int] = []
        return verification.Verifier(self.listener.parts, self.pause,
                                     self.said.append, 10, **options).run(fix)

    def pause(self, seconds: int) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def assert_nothing(self, fix: bool = False) -> None:
        report = self.compare(fix)
        self.assertEqual(verification.Report([], [], [], []), report)
        self.assertEqual([], self.pauses)

    def assert_left(self, *words: str) -> verification.Report:
        """Expect one difference for each of these words, and no other.

        Nothing is changed, neither by the first run nor by the second.
        """
        before = self.dump()
        for _time in range(2):
            report = self.compare()
            self.assertEqual([], report.failures + report.fixed)
            texts = [one.text for one in report.left]
            self.assertEqual(len(words), len(texts), texts)
            for text in words:
                self.assertEqual(
                    1, sum(text in one for one in texts), (text, texts))
        self.assertEqual(before, self.dump())
        return report

    def assert_solved(self, *words: str) -> None:
        """Expect these differences, and fix them."""
        found = self.assert_left(*words)
        for one in found.left:
            self.assertIn('--fix', one.remedy)
        report = self.compare(fix=True)
        self.assertEqual(([], [], []), report[1:])
        for text in words:
            self.assertTrue(any(text in one.text for one in report.fixed))
        self.assert_nothing()
        self.assert_nothing(fix=True)

    def dump(self) -> list[ty.Any]:
        """Return the whole reservation database, except counters."""
        return [self.query(f'SELECT * FROM {table} ORDER BY 1')
                for table in models.Base.metadata.tables
                if table != models.Counter.__tablename__]

    def change(self, table: ty.Any, *where: ty.Any, **values: ty.Any,
               ) -> None:
        """Change the reservation database directly."""
        with self.listener.parts.database.writer() as session:
            session.execute(sa.update(table).where(*where).values(**values))

    def active(self, name: str, **kwargs: ty.Any) -> str:
        """Create a lease with an ACTIVE server, and record it."""
        server = self.boot_active(
            name, hints=self.lease_hints(name, length=2 * HOUR), **kwargs)
        self.run_sync()
        self.assertEqual('ACTIVE', self.lease(name)['status'])
        return ty.cast(str, server['id'])

    def fail_to_start(self, name: str) -> str:
        """Create a lease whose server Nova cannot place."""
        server_id = self.hold(name)['id']
        with mock.patch('nova.scheduler.manager.SchedulerManager.'
                        '_get_sorted_hosts', return_value=[]):
            self.clock.advance(HOUR)
            self.run_due()
            self.wait_for_status(server_id, 'ERROR')
        return ty.cast(str, server_id)

    def host_uuid(self, name: str) -> str:
        ((uuid,),) = self.query(f"SELECT uuid FROM hosts WHERE name='{name}'")
        return ty.cast(str, uuid)


class HealthyTest(VerifyTestCase):

    def test_healthy_cloud_has_no_differences(self):
        """With leases in every status that can last."""
        self.assert_nothing()
        self.fail_to_start('failed')
        self.boot_active('plain')
        self.hold('waits', start_in=3 * HOUR, count=2)
        over = self.active('over')
        self.alice.delete_server(over)
        self.wait_until_gone(over)
        self.wait_for(lambda: not self.allocations(over))
        self.active('runs')
        self.assertEqual(
            {'failed': 'STARTING', 'waits': 'PENDING', 'over': 'TERMINATED',
             'runs': 'ACTIVE'},
            {lease['name']: lease['status'] for lease in self.leases()})
        before = self.dump()
        self.assert_nothing()
        self.assert_nothing(fix=True)
        self.assertEqual(before, self.dump())


class HostsTest(VerifyTestCase):

    def test_unrecorded_host_is_added(self):
        self.start_compute('host3')
        self.assert_solved('Host host3 exists in Nova, but not in the '
                           'reservation database.')

    def test_recorded_host_missing_in_nova_is_fixed(self):
        with self.listener.parts.database.writer() as session:
            session.add(models.Host(
                uuid=uuidutils.generate_uuid(), name='ghost',
                service_host='ghost', capacity={'VCPU': 3}, usage={},
                generation=0, updated_at=0))
        self.assert_solved('Host ghost is in the reservation database with 3 '
                           'VCPU, but does not exist in Nova.')

    def test_wrong_capacity_usage_and_service_are_fixed(self):
        self.change(models.Host, models.Host.name == 'host1',
                    capacity={'VCPU': 4}, usage={'VCPU': 1})
        self.change(models.Host, models.Host.name == 'host2',
                    service_host='other')
        self.assert_solved(
            'Host host1, capacity: 4 VCPU in the reservation database, 200 '
            'DISK_GB, 16384 MEMORY_MB, 8 VCPU in placement.',
            'Host host1, in use without an end: 1 VCPU in the reservation '
            'database, nothing in placement.',
            'Host host2 differs between Nova and the reservation database')

    def test_unrecorded_usage_of_unleased_server_is_fixed(self):
        server = self.boot_active('plain')
        host = server['OS-EXT-SRV-ATTR:host']
        # Nor was it recorded when the scheduler claimed its host.
        self.change(models.Host, usage={}, consumers={})
        self.assert_solved(f'Host {host}, in use without an end: nothing in '
                           'the reservation database, 1 DISK_GB, 512 '
                           'MEMORY_MB, 1 VCPU')

    def test_unused_claim_is_no_difference_until_it_expires(self):
        server_id = self.boot_active('plain')['id']
        self.admin.delete_server(server_id)
        self.wait_until_gone(server_id)
        for left in range(3):
            self.change(
                models.Host, models.Host.name == 'host1', usage={'VCPU': 1},
                consumers={server_id: (
                    {'VCPU': 1}, self.clock.now() + left)})
            self.listener.server_sync.compare_all()
            self.assert_verified()

    def test_wrong_or_missing_allocation_is_reported(self):
        server_id = self.active('runs')
        ((uuid, held),) = self.allocations(server_id).items()
        url = f'/allocations/{server_id}'
        consumer = self.placement.get(url, version='1.28').body
        consumer['allocations'] = {uuid: {'resources': {**held, 'VCPU': 2}}}
        answer = self.placement.put(url, consumer, version='1.28')
        self.assertEqual(204, answer.status, answer.body)
        self.assert_solved('with 1 DISK_GB, 512 MEMORY_MB, 1 VCPU, but has 1 '
                           'DISK_GB, 512 MEMORY_MB, 2 VCPU in placement.')
        self.placement.delete(url)
        report = self.assert_left('but has no allocation in placement.')
        self.assertIn('heal_allocations --instance ' + server_id,
                      report.left[0].remedy)

    def test_host_without_inventory_is_reported(self):
        self.computes['host1'].stop()
        uuid = self.host_uuid('host1')
        generation = self.placement.get(
            f'/resource_providers/{uuid}').body['generation']
        self.placement.put(
            f'/resource_providers/{uuid}/inventories',
            {'resource_provider_generation': generation, 'inventories': {}})
        self.assert_left('in the reservation database, but no inventory in '
                         'placement.')


class ServersTest(VerifyTestCase):

    def test_leases_of_deleted_servers_are_ended(self):
        server_id = self.active('runs')
        held = self.hold('waits')['id']
        self.listener.parts.cloud.delete(held, None)
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.wait_for(lambda: not self.allocations(server_id))
        self.assert_solved(
            f'(runs) is ACTIVE: server {server_id} no longer exists in Nova.',
            f'(waits) is PENDING: server {held} no longer exists in Nova.')
        self.assertEqual({'TERMINATED'}, {
            lease['status'] for lease in self.leases()})

    def test_missing_instance_mapping_is_recreated(self):
        """No command of Nova finds it."""
        server_id = self.boot_active('plain')['id']
        self.run_sync()
        context = nova_context.get_admin_context()
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
        mapping.destroy()
        self.assertFalse(self.exists(server_id))
        self.assertEqual([server_id], list(self.guests()))
        self.assert_solved(f'Server {server_id} is in cell cell1, on host')
        self.assertEqual('ACTIVE', self.alice.get_server(server_id)['status'])
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)

    def test_instance_mapping_without_cell_is_fixed(self):
        server_id = self.boot_active('plain')['id']
        self.run_sync()
        context = nova_context.get_admin_context()
        with api_db.context_manager.writer.using(context):
            context.session.execute(
                sa.update(api_models.InstanceMapping).where(
                    api_models.InstanceMapping.instance_uuid == server_id,
                ).values(cell_id=None))
        self.assert_solved(f'Server {server_id} is in cell cell1, on host')
        self.assertEqual('ACTIVE', self.alice.get_server(server_id)['status'])

    def test_instance_mapping_to_other_cell_is_only_reported(self):
        server_id = self.boot_active('plain')['id']
        self.run_sync()
        context = nova_context.get_admin_context()
        mapping = objects.InstanceMapping.get_by_instance_uuid(
            context, server_id)
        mapping.cell_mapping = objects.CellMapping.get_by_uuid(
            context, objects.CellMapping.CELL0_UUID)
        mapping.save()
        self.assert_left(f'Server {server_id} is in cell cell1, on host')
        report = self.compare(fix=True)
        self.assertIn('is mapped to another cell, cell0', report.problems[0])

    def test_hidden_copy_of_cross_cell_resize_is_no_difference(self):
        server_id = self.boot_active('plain')['id']
        self.run_sync()
        context = nova_context.get_admin_context()
        server = objects.Instance.get_by_uuid(
            context, server_id, expected_attrs=['flavor'])
        cell0 = objects.CellMapping.get_by_uuid(
            context, objects.CellMapping.CELL0_UUID)
        with nova_context.target_cell(context, cell0) as target:
            objects.Instance(
                target, uuid=server_id, hidden=True, flavor=server.flavor,
                project_id=server.project_id, user_id=server.user_id).create()
        self.assert_nothing()

    def test_allocation_without_server_is_reported(self):
        """An allocation that remains of a server without a record."""
        server_id = self.boot_active('plain')['id']
        held = self.placement.get(
            f'/allocations/{server_id}', version='1.28').body
        consumer = uuidutils.generate_uuid()
        self.check_leaked(consumer, held)

    def test_allocation_of_deleted_server_is_reported(self):
        """Nova leaks it if the server is deleted while it is resized."""
        server_id = self.boot_active('plain')['id']
        held = self.placement.get(
            f'/allocations/{server_id}', version='1.28').body
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.wait_for(lambda: not self.allocations(server_id))
        self.useFixture(fixtures.MockPatchObject(
            unmapped_servers, '_CERTAINLY_LEAKED', 0))
        self.check_leaked(server_id, held)

    def check_leaked(self, consumer, held):
        for allocation in held['allocations'].values():
            allocation.pop('generation', None)
        held |= {'consumer_generation': None}
        answer = self.placement.put(
            f'/allocations/{consumer}', held, version='1.28')
        self.assertEqual(204, answer.status, answer.body)
        self.run_sync()
        report = self.assert_left(f'an allocation of consumer {consumer}')
        self.assertIn('placement audit', report.left[0].remedy)
        self.placement.delete(f'/allocations/{consumer}')
        # A server that is resized may come back.
        self.clock.advance(pending.BACK_SECONDS + 1)
        self.run_sync()
        self.assert_nothing()

    def test_unrecorded_running_server_is_recorded(self):
        server_id = self.boot_active(
            'runs', hints=self.lease_hints('runs'))['id']
        self.assert_solved(f'server {server_id} runs, but is not in the '
                           'reservation database.')
        self.assertEqual('ACTIVE', self.lease('runs')['status'])

    def test_booking_on_wrong_host_is_fixed(self):
        server_id = self.active('runs')
        there = self.bookings()[server_id]
        (other,) = {'host1', 'host2'} - {there}
        ((host_id,),) = self.query(
            f"SELECT id FROM hosts WHERE name='{other}'")
        self.change(models.Booking, models.Booking.server_id == server_id,
                    host_id=host_id)
        self.assert_solved(
            f'server {server_id} is on another host than its booking, '
            f'{other}.',
            f'Host {there}, in use without an end: nothing in the reservation '
            'database')
        self.assertEqual(there, self.bookings()[server_id])

    def test_server_in_error_with_booked_host_is_retried(self):
        server_id = self.fail_to_start('fails')
        self.assert_solved(f'server {server_id} is in ERROR in Nova, and its '
                           f'booking holds capacity on host')
        # Nova had no host for it: it is retried.
        self.assertEqual('STARTING', self.lease('fails')['status'])

    def test_reserved_server_without_lease_is_deleted(self):
        for shown, words in ((True, 'is RESERVED, but no lease has it'),
                             (False, 'was to be built with a lease, but no '
                                     'lease has it')):
            server_id = self.hold('waits')['id']
            if not shown:
                self.unmark(server_id)
            driven.withdraw(
                self.listener.parts.leases, self.lease('waits')['id'])
            self.assert_solved(f'Server {server_id} {words}')
            # Only after the time within which nova-api completes a boot.
            self.assertFalse(self.exists(server_id))

    def test_sync_deletes_reserved_server_without_lease_later(self):
        """The periodic sync deletes it, once no boot can be in progress."""
        server_id = self.hold('waits')['id']
        self.hold('other')
        driven.withdraw(self.listener.parts.leases, self.lease('waits')['id'])
        self.listener.server_sync.compare_all()
        self.assertTrue(self.exists(server_id))
        self.clock.advance(660)
        self.listener.server_sync.compare_all()
        self.assertFalse(self.exists(server_id))

    def test_sync_does_not_delete_many_servers_without_lease(self):
        """They cannot all be boots of a nova-api that died: the reservation
        database is wrong.
        """
        kept = self.hold('other')['id']
        waiting = [self.hold(name)['id'] for name in ('one', 'two', 'three')]
        with mock.patch('blazar_nova.listener.server_sync._MOST_ORPHANS', 2):
            for name in ('one', 'two', 'three'):
                driven.withdraw(
                    self.listener.parts.leases, self.lease(name)['id'])
            self.clock.advance(660)
            with self.assertLogs('blazar_nova.listener', 'ERROR') as logged:
                self.listener.server_sync.compare_all()
            # It would delete all but one if there were any leases.
            driven.withdraw(
                self.listener.parts.leases, self.lease('other')['id'])
            self.alice.delete_server(waiting.pop())
            self.alice.delete_server(waiting.pop())
            with self.assertLogs('blazar_nova.listener', 'ERROR') as again:
                self.listener.server_sync.compare_all()
        self.assertIn('3 servers are RESERVED without a lease',
                      logged.output[0])
        self.assertIn('blazar-nova-manage verify --fix', logged.output[0])
        self.assertIn('2 servers are RESERVED', again.output[0])
        for server_id in (kept, *waiting):
            self.assertTrue(self.exists(server_id))

    def test_sync_error_of_one_server_does_not_affect_others(self):
        ids = [self.hold(name)['id'] for name in ('one', 'two', 'three')]
        with mock.patch('blazar_nova.api.middleware.LeaseMiddleware._delete',
                        lambda self, environ, _server_id: self._app):
            for server_id in ids:
                self.alice.delete_server(server_id)
        look = self.listener.parts.cloud.look
        self.listener.parts.cloud.look = lambda server_id: (
            look(server_id) if server_id != ids[1] else 1 / 0)
        with mock.patch('blazar_nova.compat.compute_hosts.facts',
                        side_effect=RuntimeError('no such host')):
            self.listener.server_sync.compare_all()
        self.assertEqual(['PENDING', 'TERMINATED', 'TERMINATED'], sorted(
            lease['status'] for lease in self.leases()))

    def test_sync_checks_only_servers_that_differ(self):
        self.hold('held')
        other = self.boot_active('runs', hints=self.lease_hints('runs'))
        self.listener.server_sync.compare_all()
        check, looked = self.listener.parts.lifecycle.reconciliation.check, []
        self.stub_out(
            'blazar_core.lifecycle.reconciliation.Reconciliation.check',
            lambda _self, server_id: looked.append(
                server_id) or check(server_id))
        self.listener.server_sync.compare_all()
        self.assertEqual([], looked)
        self.alice.delete_server(other['id'])
        self.wait_until_gone(other['id'])
        self.listener.server_sync.compare_all()
        self.assertEqual({other['id']}, set(looked))

    def test_fix_waits_before_deleting_server_without_lease(self):
        server_id = self.hold('waits')['id']
        driven.withdraw(self.listener.parts.leases, self.lease('waits')['id'])
        report = self.compare(fix=True)
        self.assertEqual(1, len(report.fixed))
        self.assertGreater(sum(self.pauses), 50, self.pauses)
        self.assertFalse(self.exists(server_id))

    def test_unleased_server_in_build_is_no_difference(self):
        """Without a request for a lease this is Nova's own matter."""
        with mock.patch('nova.conductor.api.ComputeTaskAPI.'
                        'schedule_and_build_instances'):
            self.boot('plain')
            self.boot('plain', hints={'reserved': 'False'})
        self.assert_nothing()

    def test_leased_server_without_recorded_lease_is_reported(self):
        server_id = self.active('runs')
        driven.withdraw(self.listener.parts.leases, self.lease('runs')['id'])
        words = (f'Server {server_id} was booted with a lease, but the '
                 'reservation database has no lease of it')
        self.assert_left(words, 'in use without an end: nothing in the '
                                'reservation database')
        report = self.compare(fix=True)
        self.assertEqual(1, len(report.fixed))
        self.assert_left(words)
        self.assertTrue(self.exists(server_id))

    def test_running_server_of_ended_lease_is_reported(self):
        server_id = self.active('runs')
        self.change(models.Lease, status='TERMINATED')
        self.change(models.Event, status='DONE')
        words = (f'(runs) is TERMINATED: server {server_id} still exists in '
                 f'Nova (running).')
        report = self.assert_left(words)
        self.assertIn('delete it', report.left[0].remedy)
        self.assertEqual(1, len(self.compare(fix=True).left))
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.wait_for(lambda: not self.allocations(server_id))
        self.assert_solved(f'(runs) is TERMINATED: server {server_id} no '
                           'longer exists in Nova.')
        self.assertEqual({}, self.bookings())

    def test_deferred_server_not_shown_as_reserved_is_reported(self):
        server_id = self.hold('waits')['id']
        self.unmark(server_id)
        words = (f'(waits) is PENDING: server {server_id} is shown as being '
                 'built instead of RESERVED.')
        self.assert_left(words)
        # Its start is in progress then.
        self.clock.advance(HOUR)
        self.assert_nothing()

    def test_server_built_before_lease_start_is_reported(self):
        server_id = self.boot_active(
            'early', hints=self.lease_hints('early'))['id']
        self.run_sync()
        self.change(models.Lease, status='PENDING')
        self.change(models.Event, models.Event.event_type == 'start_lease',
                    status='UNDONE', run_at=self.began + HOUR)
        self.assert_left(
            f'(early) is PENDING: server {server_id} is built already.',
            'is PENDING, but the build of its servers is missing')

    def test_lost_build_is_reported_after_timeout(self):
        server_id = self.hold('lost')['id']
        self.clock.advance(HOUR)
        with base.at_the_bus(lambda send: None):
            self.run_due()
        self.assertEqual('STARTING', self.lease('lost')['status'])
        self.assert_nothing()
        self.clock.advance(290)
        self.assert_nothing()
        self.clock.advance(11)
        report = self.assert_left(
            f'(lost) is STARTING: server {server_id} has been building '
            'since', )
        self.assertIn('blazar-listener sends it again',
                      report.left[0].remedy)

    def test_reserved_server_of_starting_lease_is_reported(self):
        server_id = self.hold('held')['id']
        self.change(models.Lease, status='STARTING')
        self.change(models.Booking, dispatched_at=self.clock.now())
        self.assert_left(f'server {server_id} is still RESERVED in Nova.')

    def unmark(self, server_id: str) -> None:
        reserved_state.unmark(objects.BuildRequest.get_by_instance_uuid(
            nova_context.get_admin_context(), server_id))


class BooksTest(VerifyTestCase):
    """The other checks are in the unit tests of blazar_core.audit.audit."""

    def test_missing_end_event_is_recreated(self):
        server_id = self.active('runs')
        self.change(models.Event, status='DONE')
        self.assert_solved('(runs) is ACTIVE, but has no event end_lease.')
        self.clock.advance(2 * HOUR)

        def over() -> bool:
            self.clock.advance(2)
            self.run_due()
            return self.lease('runs')['status'] == 'TERMINATED'

        self.wait_for(over, what='the lease is over')
        self.assertFalse(self.exists(server_id))
        self.run_sync()
        self.assert_nothing()

    def test_overbooked_host_is_reported(self):
        self.hold('one', flavor='5')
        self.hold('two', flavor='5')
        self.change(models.Booking, host_id=1)
        self.assert_left('320 are in use or reserved; leases: ')


class TrustsTest(VerifyTestCase):
    """A keystone that is replaced by this test."""

    def setUp(self) -> None:
        super().setUp()
        self.trusts: set[str] = set()
        # Run background work before the request is answered.
        self.stub_out(
            'blazar_core.common.background.Background._executor',
            mock.Mock(side_effect=RuntimeError))
        for name, stand_in in (
                ('is_configured', lambda _self: True),
                ('delegate', lambda _self, *_args, **_how: self.delegate()),
                ('held', lambda _self: set(self.trusts)),
                ('revoke', lambda _self, trust: self.trusts.discard(trust))):
            self.stub_out(
                f'blazar_nova.services.user_credentials.Credentials.{name}',
                stand_in)

    def delegate(self) -> str:
        trust_id = uuidutils.generate_uuid(dashed=False)
        self.trusts.add(trust_id)
        return trust_id

    def test_trusts_of_leases_are_no_difference(self):
        self.hold('one')
        self.hold('two')
        self.assertEqual(2, len(self.trusts))
        self.assert_nothing(fix=True)
        self.assertEqual(2, len(self.trusts))

    def test_lease_without_its_trust_is_reported(self):
        self.hold('waits')
        self.trusts.clear()
        self.assert_left('(waits) is PENDING, but keystone no longer has the '
                         'trust')

    def test_stray_trust_is_revoked_only_on_request(self):
        self.hold('waits')
        stray = self.delegate()
        words = f'Trust {stray[:8]}... was given to our service user'
        report = self.assert_left(words)
        self.assertNotIn(stray, report.left[0].text)
        # It may belong to another cloud, unless the operator excludes that.
        self.assertEqual(1, len(self.compare(fix=True).left))
        self.assertIn(stray, self.trusts)
        report = self.compare(fix=True, trusts_are_ours=True)
        self.assertEqual(([], 1), (report.left, len(report.fixed)))
        # The trust had time to get its lease.
        self.assertGreater(sum(self.pauses), 60)
        self.assertNotIn(stray, self.trusts)
        self.assertEqual(1, len(self.trusts))
        self.assert_nothing()

    def test_trust_of_lease_created_meanwhile_is_kept(self):
        stray = self.delegate()

        def pause(seconds: int) -> None:
            self.pauses.append(seconds)
            self.clock.advance(seconds)
            if seconds > 10:
                with mock.patch.object(self, 'delegate', lambda: stray):
                    self.hold('late', start_in=2 * HOUR)

        with mock.patch.object(self, 'pause', pause):
            report = self.compare(fix=True, trusts_are_ours=True)
        self.assertEqual([], report.left)
        self.assertEqual({stray}, self.trusts)
        self.assert_nothing()

    def test_trust_of_ended_lease_is_revoked(self):
        server_id = self.hold('waits')['id']
        self.stub_out(
            'blazar_nova.services.user_credentials.Credentials.revoke',
            mock.Mock(side_effect=ValueError('down')))
        self.alice.delete_server(server_id)
        self.stub_out(
            'blazar_nova.services.user_credentials.Credentials.revoke',
            lambda _self, trust: self.trusts.discard(trust))
        lease_id = self.lease('waits')['id']
        self.assert_solved(f'Lease {lease_id} has ended, but the trust of its '
                           'owner still exists.')
        self.assertEqual(set(), self.trusts)

    def test_unavailable_keystone_is_reported(self):
        self.hold('waits')
        self.stub_out('blazar_nova.services.user_credentials.Credentials.held',
                      mock.Mock(side_effect=ValueError('down')))
        report = self.compare()
        self.assertEqual(
            ([], ['The trusts could not be compared: ValueError: down']),
            (report.left, report.failures))


class MomentsTest(VerifyTestCase):
    """Changes in progress are not reported as differences."""

    def test_difference_that_vanishes_is_not_reported(self):
        server_id = self.boot_active(
            'runs', hints=self.lease_hints('runs'))['id']
        looked: list[int] = []

        def meanwhile(seconds: int) -> None:
            looked.append(seconds)
            self.listener.server_sync.compare_server(server_id)

        with mock.patch.object(self, 'pause', meanwhile):
            report = self.compare()
        self.assertEqual(([10], verification.Report([], [], [], [])),
                         (looked, report))

    def test_difference_that_changes_is_not_reported(self):
        """Another boot on the same host that is not recorded yet."""
        self.boot_active('plain')
        self.change(models.Host, usage={}, consumers={})

        def meanwhile(_seconds: int) -> None:
            for number in (1, 2, 3):
                self.boot_active(f'plain{number}', flavor='3')

        with mock.patch.object(self, 'pause', meanwhile):
            self.assertEqual([], self.compare().left)
        self.assertEqual({'host1', 'host2'}, set(self.guests().values()))

    def test_failed_fix_is_reported(self):
        self.start_compute('host3')
        with mock.patch('blazar_core.capacity.inventory.record_host',
                        side_effect=ValueError('no')):
            report = self.compare(fix=True)
        self.assertEqual((1, 0), (len(report.left), len(report.fixed)))
        self.assertEqual(1, len(report.problems))
        self.assertIn('Fix failed, ValueError: no', report.problems[0])


class OutageTest(VerifyTestCase):
    """A service does not answer."""

    def test_unavailable_cell_is_reported(self):
        self.active('runs')
        with mock.patch('nova.objects.InstanceList.get_by_filters',
                        side_effect=ValueError('down')):
            report = self.compare(fix=True)
        self.assertEqual([], report.left + report.fixed)
        self.assertEqual(
            ['Cell cell1 did not answer: its servers were not compared.'],
            report.failures)
        with mock.patch('nova.objects.ComputeNodeList.get_all',
                        side_effect=ValueError('down')):
            report = self.compare(fix=True)
        self.assertEqual([], report.left + report.fixed)
        self.assertEqual(
            ['A cell did not answer: its hosts were not compared.'],
            report.failures)
        self.assert_nothing()

    def test_unavailable_placement_is_reported(self):
        self.start_compute('host3')
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=ValueError('no placement')):
            report = self.compare()
        self.assertEqual(([], ['The hosts could not be compared: ValueError: '
                               'no placement']),
                         (report.left, report.failures))

    def test_failure_of_one_host_does_not_hide_others(self):
        self.start_compute('host3')
        self.start_compute('host4')
        silent, facts = [], compute_hosts.facts

        def some_facts(uuid):
            if uuid in silent:
                raise ValueError('no placement')
            return facts(uuid)

        def unknown(name):
            return (f'Host {name} exists in Nova, but not in the reservation '
                    'database.')

        self.useFixture(fixtures.MonkeyPatch(
            'blazar_nova.compat.compute_hosts.facts', some_facts))
        uuids = {one.name: one.uuid for one in compute_hosts.all_hosts()[0]}
        silent.append(uuids['host3'])
        failed = 'Host host3 could not be compared: ValueError: no placement'
        report = self.compare()
        self.assertEqual(([unknown('host4')], [failed]), (
            [one.text for one in report.left], report.failures))
        # A difference that can no longer be checked is not called fixed.
        del silent[:]
        compare_host = host_sync.HostSync.compare

        def and_then_silent(self, host):
            if host.uuid == uuids['host4']:
                compare_host(self, host)
                silent.append(uuids['host3'])

        with mock.patch.object(
                host_sync.HostSync, 'compare', and_then_silent):
            report = self.compare(fix=True)
        self.assertEqual(
            ([unknown('host4')], [unknown('host3')], [failed]),
            ([one.text for one in report.fixed],
             [one.text for one in report.left], report.failures))

    def test_unverifiable_fix_is_not_reported_as_fixed(self):
        self.start_compute('host3')
        down = mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                          side_effect=ValueError('no placement'))
        self.addCleanup(down.stop)
        gone = []

        def go(*_args):
            # Only once for all hosts: stop() ends one start().
            if not gone:
                gone.append(down.start())

        with mock.patch('blazar_nova.listener.host_sync.HostSync.compare',
                        go):
            report = self.compare(fix=True)
        self.assertEqual(
            ([], ['Host host3 exists in Nova, but not in the reservation '
                  'database.']),
            (report.fixed, [one.text for one in report.left]))
        self.assertEqual(
            ['The hosts could not be compared: ValueError: no placement',
             'Host host3 could not be compared: ValueError: no placement'],
            report.failures)


class CommandTest(VerifyTestCase):

    def type(self, *words: str) -> tuple[int, list[str], str]:
        """Run a command; return its code, its lines and its stderr."""
        out, error = io.StringIO(), io.StringIO()
        with (contextlib.redirect_stdout(out),
              contextlib.redirect_stderr(error),
              mock.patch('blazar_nova.compat.process.configure')):
            code = manage.main(['verify', '--grace', '0', *words])
        return code, out.getvalue().splitlines(), error.getvalue()

    def test_stdout_has_only_the_answer(self):
        """Run in a process of its own; logs of libraries are not shown."""
        done = subprocess.run(
            [os.path.join(os.path.dirname(sys.executable),
                          'blazar-nova-manage'), '--config-file',
             self.conf_file, 'host', 'list', '--format', 'json'],
            capture_output=True, text=True, timeout=60)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertEqual([], json.loads(done.stdout))
        self.assertEqual('', done.stderr)

    def test_json_output(self):
        self.start_compute('host3')
        text = (
            'Host host3 exists in Nova, but not in the reservation database.')
        code, lines, _told = self.type('--format', 'json')
        found = json.loads('\n'.join(lines))
        self.assertEqual(1, code)
        self.assertEqual([{'text': text, 'remedy': '--fix adds it'}],
                         found['left'])
        code, lines, _told = self.type('--format', 'json', '--fix')
        found = json.loads('\n'.join(lines))
        self.assertEqual((0, [text], [], [], [], 2), (
            code, found['fixed'], found['left'], found['problems'],
            found['failures'], found['compared']['hosts']))

    def test_exit_codes_and_output(self):
        self.assertEqual(
            (0, ['No difference, 0 fixed, 0 left; compared: 0 leases, 0 '
                 'servers, 2 hosts.']), self.type()[:2])
        self.start_compute('host3')
        line = ('Host host3 exists in Nova, but not in the reservation '
                'database.')
        code, lines, told = self.type()
        self.assertEqual((1, [
            f'{line} [--fix adds it]',
            '1 difference, 0 fixed, 1 left; compared: 0 leases, 0 servers, 2 '
            'hosts.']), (code, lines))
        self.assertEqual('', told)
        self.assertIn('Comparing servers\n', self.type('--verbose')[2])
        self.assertEqual((0, [
            f'Fixed: {line}',
            '1 difference, 1 fixed, 0 left; compared: 0 leases, 0 servers, 2 '
            'hosts.']), self.type('--fix')[:2])
        self.assertEqual(0, self.type('--fix')[0])

    def test_incomplete_comparison_exits_with_2(self):
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=ValueError('no placement')):
            code, lines, _told = self.type()
        self.assertEqual(2, code)
        self.assertEqual('The hosts could not be compared: ValueError: no '
                         'placement', lines[0])
        self.assertIn('NOT EVERYTHING COULD BE COMPARED', lines[1])
        self.flags(group='blazar_database', connection=None)
        code, lines, told = self.type()
        self.assertEqual((2, []), (code, lines))
        self.assertIn('Nothing could be compared: [blazar_database] '
                      'connection is not set', told)


class FlavorsTest(VerifyTestCase, api_base.ApiTestCase):
    """Leases whose servers are booted later."""

    def test_leases_of_lease_api_have_no_differences_in_any_status(self):
        self.make(start_in=HOUR)
        self.make(reservations=[])
        lease = self.make_active(reservations=[self.reservation(amount=2)])
        self.boot_active(
            'one', flavor=lease['reservations'][0]['flavor_id'])
        self.listener.server_sync.compare_all()
        self.assert_nothing(fix=True)
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.make(start_in=HOUR, offer_seconds=600)
        self.run_until(self.clock.now() + 60)
        self.wait_for(lambda: not self.alice.get_servers())
        self.run_until(self.clock.now() + 60)
        self.assert_nothing(fix=True)

    def test_lost_flavor_is_recreated(self):
        lease = self.make_active()
        reservation_id = lease['reservations'][0]['id']
        self.listener.parts.types.named['virtual:instance'].end(
            resource_types.unknown(reservation_id))
        self.assertIsNone(self.flavor(reservation_id))
        self.assert_left('cannot be used')
        self.assert_solved('cannot be used')
        self.boot_active('one', flavor=reservation_id)

    def test_leftover_flavor_is_removed(self):
        lease = self.make(start_in=HOUR)
        reservation_id = lease['reservations'][0]['id']
        self.listener.parts.lifecycle.lease_opening.open(lease['id'])
        self.assert_left(f'{reservation_id} can still be used')
        self.assert_solved(f'{reservation_id} can still be used')
        self.assertIsNone(self.flavor(reservation_id))
