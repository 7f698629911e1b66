# SPDX-License-Identifier: Apache-2.0

"""Whose token deletes servers, and what remains of servers never built.
"""

import collections
import contextlib
import os
import sqlite3
import threading
from unittest import mock

from keystoneauth1 import access
from keystoneauth1 import fixture as tokens
from nova.tests import fixtures as nova_fixtures

from blazar_core.common import errors
from blazar_core.leases import views
from blazar_core.lifecycle import lease_close
from blazar_core.plugins import cloud_api
from blazar_nova.compat import compute_hosts
from blazar_nova.services import service_user
from blazar_nova.verify import verification
from tests import driven
from tests.functional import api_base
from tests.functional import base
from tests.functional import leased
from tests.functional import test_held

OWNER = 'the-user-in-the-trust'


class DeletionTestCase(leased.LeasedTestCase):
    """A Nova whose keystone is replaced by this test."""

    def setUp(self):
        super().setUp()
        self.trusts = {}
        self.revoked = []
        # Run background work before the request is answered.
        self.stub_out(
            'blazar_core.common.background.Background._executor',
            mock.Mock(side_effect=RuntimeError))
        #: The exception to raise instead of returning a token.
        self.no_token = None
        for name, stand_in in (
                ('is_configured', lambda _self: True),
                ('delegate', lambda _self, *its, **_how: self.delegate(*its)),
                ('access', lambda _self, trust, **_how: self.access(trust)),
                ('held', lambda _self: self.trusts.keys() - {*self.revoked}),
                ('valid_until', lambda _self, trust: self.trusts[trust][1]),
                ('revoke', lambda _self, trust: self.revoked.append(trust))):
            self.stub_out(
                f'blazar_nova.services.user_credentials.Credentials.{name}',
                stand_in)

    def delegate(self, context, until):
        trust = f'trust-{len(self.trusts)}'
        self.trusts[trust] = (context.user_id, until)
        return trust

    def access(self, trust):
        if self.no_token is not None:
            raise self.no_token
        token = tokens.V3Token(user_id=OWNER,
                               project_id=self.alice.project_id)
        token.set_project_scope(self.alice.project_id)
        token.add_role('member')
        return access.AccessInfoV3(token, f'token-of-{trust}')

    def record_deletions(self, fails=lambda context: False):
        """Return a list of the token and user of each driver deletion.

        :param fails: whether a deletion with this context fails
        """
        seen = []
        for compute in self.computes.values():
            driver = compute.manager.driver
            destroy = driver.destroy

            def remember(context, *args, destroy=destroy, **kwargs):
                seen.append((context.auth_token, context.user_id))
                if fails(context):
                    raise RuntimeError('the secret cannot be deleted')
                return destroy(context, *args, **kwargs)

            driver.destroy = remember
        return seen

    def active(self, **kwargs):
        server_id = self.boot_active(
            'vm1', hints=self.lease_hints('vm1'), **kwargs)['id']
        self.run_sync()
        return server_id

    def goes(self, server_id):
        """Run until the lease of vm1, and so the server, has ended."""
        def over():
            self.clock.advance(2)
            self.run_due()
            return self.lease('vm1')['status'] == 'TERMINATED'

        self.clock.advance(3600)
        self.wait_for(over, 60, 'the lease is over')
        self.assertFalse(self.exists(server_id))
        self.assertEqual({}, self.guests())


class InWhoseNameTest(DeletionTestCase):

    def test_server_is_deleted_with_token_of_owner(self):
        seen = self.record_deletions()
        server_id = self.active()
        self.assertEqual([('alice', mock.ANY)], list(self.trusts.values()))
        # Only an admin could delete it now.
        self.alice.post_server_action(server_id, {'lock': None})
        self.goes(server_id)
        self.assertEqual([('token-of-trust-0', OWNER)], seen)
        self.assertEqual(['trust-0'], self.revoked)

    def test_failed_deletion_as_owner_is_retried_as_nova(self):
        seen = self.record_deletions(lambda context: context.auth_token)
        self.goes(self.active())
        self.assertEqual([('token-of-trust-0', OWNER), (None, None)], seen)

    def test_failed_deletion_as_nova_is_retried_as_owner(self):
        """After either attempt fails, the other is tried too."""
        seen = self.record_deletions(lambda context: not context.auth_token)
        server_id = self.active()
        # An admin's attempt, for whom there is no token.
        self.listener.parts.cloud.delete(server_id, None)
        self.wait_for_status(server_id, 'ERROR')
        self.goes(server_id)
        self.assertEqual([(None, None), ('token-of-trust-0', OWNER)], seen)

    def test_failing_deletion_is_not_retried_constantly(self):
        seen = self.record_deletions(lambda context: True)
        server_id = self.active()
        self.clock.advance(3600)
        self.run_due()
        self.wait_for_status(server_id, 'ERROR')
        for _round in range(5):
            self.clock.advance(2)
            self.run_due()
            self.wait_for(lambda: len(seen) == 2, what='both ways')
        self.assertEqual('TERMINATING', self.lease('vm1')['status'])

    def test_server_of_disabled_owner_is_deleted_as_nova(self):
        seen = self.record_deletions()
        server_id = self.active()
        self.no_token = errors.TrustUnavailable('He was disabled.')
        self.goes(server_id)
        self.assertEqual([(None, None)], seen)

    def test_server_is_deleted_as_nova_if_keystone_stays_unavailable(self):
        """Other leases wait for the capacity of its servers."""
        seen = self.record_deletions()
        server_id = self.active()
        self.no_token = errors.CloudUnavailable('keystone does not answer')
        self.clock.advance(3600)
        for _round in range(40):
            self.run_due()
            self.assertEqual([], seen)
            self.clock.advance(2)
        for _round in range(35):
            self.run_due()
            self.clock.advance(2)
        self.wait_until_gone(server_id)
        self.assertEqual([(None, None)], seen)

    def test_deletion_waits_for_short_keystone_outage(self):
        seen = self.record_deletions()
        server_id = self.active()
        self.no_token = errors.CloudUnavailable('keystone does not answer')
        self.clock.advance(3600)
        self.run_due()
        self.no_token = None
        self.goes(server_id)
        self.assertEqual([('token-of-trust-0', OWNER)], seen)

    def test_deletion_waits_until_resized_guest_is_created(self):
        self.check_deletion_during(
            'finish_migration', {'resize': {'flavorRef': '2'}})

    def test_deletion_waits_until_rebuilt_guest_is_created(self):
        self.check_deletion_during(
            'spawn', {'rebuild': {'imageRef': base.IMAGE}})

    def test_deletion_waits_until_guest_is_live_migrated(self):
        # Real drivers move a guest.
        self.stub_out('nova.virt.fake.FakeDriver.post_live_migration',
                      lambda driver, context, instance, *_args, **_kwargs:
                      driver.destroy(context, instance, None))
        self.check_deletion_during('post_live_migration_at_destination', {
            'os-migrateLive': {'host': None, 'block_migration': 'auto'}})

    def check_deletion_during(self, method, action):
        server_id = self.active()
        with self.holding(method) as (reached, release):
            self.admin.post_server_action(server_id, action)
            self.assertTrue(reached.wait(60))
            self.clock.advance(3600)
            for _round in range(5):
                self.run_due()
                self.clock.advance(2)
            self.assertNotIn('delete', [
                one['action']
                for one in self.admin.get_instance_actions(server_id)])
            release.set()
            self.goes(server_id)

    def test_deletion_does_not_wait_for_hanging_task(self):
        server_id = self.active()
        with self.holding('finish_migration') as (reached, _release):
            self.alice.post_server_action(
                server_id, {'resize': {'flavorRef': '2'}})
            self.assertTrue(reached.wait(60))
            self.clock.advance(3600)
            self.run_due()
            self.assertTrue(self.exists(server_id))
            for _round in range(65):
                self.clock.advance(2)
                self.run_due()
            self.wait_until_gone(server_id)

    @contextlib.contextmanager
    def holding(self, method):
        """Hold a method of all drivers; yields two events: that it is called,
        and that it may go on, which is set at the end.
        """
        reached, release = threading.Event(), threading.Event()
        with contextlib.ExitStack() as patches:
            patches.callback(release.set)
            for compute in self.computes.values():
                driver = compute.manager.driver
                original = getattr(driver, method)

                def hold(*args, original=original, **kwargs):
                    reached.set()
                    release.wait(120)
                    return original(*args, **kwargs)

                patches.enter_context(mock.patch.object(driver, method, hold))
            yield reached, release

    def test_server_whose_port_is_in_trunk_is_deleted(self):
        """Neutron deletes no port that its owner has put into a trunk."""
        server_id = self.active(networks=[
            {'uuid': nova_fixtures.NeutronFixture.network_1['id']}])
        freed = self.port_in_trunk()
        self.goes(server_id)
        self.assertEqual([server_id], freed)
        self.assertEqual({}, self.allocations(server_id))

    def test_shelved_server_whose_port_is_in_trunk_is_deleted(self):
        server_id = self.active(networks=[
            {'uuid': nova_fixtures.NeutronFixture.network_1['id']}])
        self.alice.post_server_action(server_id, {'shelve': None})
        self.wait_for_status(server_id, 'SHELVED_OFFLOADED')
        freed = self.port_in_trunk()
        self.goes(server_id)
        self.assertEqual([server_id], freed)

    def test_lease_shows_why_nova_does_not_delete_its_server(self):
        server_id = self.active(networks=[
            {'uuid': nova_fixtures.NeutronFixture.network_1['id']}])
        freed = self.port_in_trunk(configured=False)
        self.clock.advance(3600)

        def is_told():
            self.clock.advance(2)
            self.run_due()
            return self.lease('vm1')['status_reason']

        self.assertEqual(
            f'The end is retried: server {server_id}: Nova could not delete '
            f'it: Conflict', self.wait_for(is_told, 60, 'it says why'))
        self.assertEqual('Conflict', self.admin.get_server(
            server_id)['fault']['message'])
        self.assertEqual([], freed)

    def test_user_who_cannot_create_trust_gets_lease(self):
        self.stub_out(
            'blazar_nova.services.user_credentials.Credentials.delegate',
            mock.Mock(side_effect=errors.TrustUnavailable('restricted')))
        seen = self.record_deletions()
        self.goes(self.active())
        self.assertEqual([(None, None)], seen)


class TrustsTest(api_base.ApiTestCase, DeletionTestCase):
    """Every lease has a trust until its end, if its owner can create one."""

    def change(self, lease, client=None, code=200, **what):
        return self.ask('PUT', f'/leases/{lease["id"]}', what, client, code)

    def until(self):
        """Return the trustors, each with the expiry in s after ``began``."""
        return [(user, until - self.began)
                for user, until in self.trusts.values()]

    def test_lease_api_creates_and_revokes_trusts(self):
        lease = self.make(3600)
        self.assertEqual([('alice', 7200)], self.until())
        offer = self.make(3600, offer_seconds=600)
        self.assertEqual(1, len(self.trusts))
        self.ask('POST', f'/leases/{offer["id"]}/accept', code=200)
        self.assertEqual(2, len(self.trusts))
        self.change(lease, end_date=self.at(9000))
        self.assertEqual(('alice', 9000), self.until()[-1])
        self.assertEqual(['trust-0'], self.revoked)
        # The admin cannot create a trust of the owner; the lease still ends.
        self.change(lease, self.admin, end_date=self.at(9600))
        self.change(lease, end_date=self.at(9000))
        self.assertEqual(3, len(self.trusts))
        self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual(['trust-0', 'trust-2'], self.revoked)

    def test_lease_has_trust_if_process_dies_after_commit(self):
        """The trust is recorded with its purpose; leftover trusts are revoked
        later, or expire.
        """
        parts = self.listener.parts
        for what in ('blazar_core.common.background.Background.later',
                     'blazar_core.leases.credentials.Credentials.store'):
            # The steps after the commit.
            self.stub_out(what, lambda *_args: None)
        lease = self.make(3600)
        self.assertEqual('trust-0', parts.lifecycle.lease_close.credential(
            lease['id']))
        self.change(lease, end_date=self.at(9000))
        self.assertEqual('trust-1', parts.lifecycle.lease_close.credential(
            lease['id']))
        self.assertEqual([('alice', 7200), ('alice', 9000)], self.until())
        with mock.patch.object(lease_close.LeaseClose, 'revoke_of'):
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        self.assertEqual([], self.revoked)
        parts.lifecycle.lease_close.revoke_over()
        self.assertEqual(['trust-1'], self.revoked)
        self.assertEqual({'trust-0'}, parts.lifecycle.lease_close.strays())

    def test_accepted_offer_has_its_trust_if_a_process_dies(self):
        self.stub_out('blazar_core.leases.credentials.Credentials.store',
                      lambda *_args: None)
        offer = self.make(3600, offer_seconds=600)
        path = f'/leases/{offer["id"]}/accept'
        self.ask('POST', path, code=200)
        self.assertEqual(
            'trust-0', self.listener.parts.lifecycle.lease_close.credential(
                offer['id']))
        # A repeated request needs none.
        self.ask('POST', path, code=200)
        self.assertEqual([('alice', 7200)], self.until())
        # Two at the same moment make two, of which one is revoked.
        with mock.patch('blazar_core.leases.views.get', return_value=views.get(
                self.listener.parts.database, offer['id']) | {
                    'status': 'OFFERED'}):
            self.ask('POST', path, code=200)
        self.assertEqual(['trust-1'], self.revoked)

    def test_refused_requests_leave_no_trust(self):
        lease = self.make(3600)
        self.make(3600, code=409, reservations=[self.reservation(
            amount=1000)])
        self.change(lease, code=409, start_date=self.at(7200),
                    end_date=self.at(9000), reservations=[
                        {'id': lease['reservations'][0]['id'],
                         'amount': 1000}])
        self.ask('POST', '/leases?dry_run=true', {
            'name': 'n', 'start_date': self.at(3600),
            'end_date': self.at(7200), 'events': [],
            'reservations': [self.reservation()]}, code=200)
        self.assertEqual(['trust-0'], [
            one for one in self.trusts if one not in self.revoked])

    def test_trust_of_expired_offer_is_revoked(self):
        self.make(3600, offer_seconds=600, on_end='shelve')
        self.assertEqual(1, len(self.trusts))
        self.clock.advance(700)
        self.run_due()
        self.listener.parts.lifecycle.lease_close.revoke_over()
        self.assertEqual(['trust-0'], self.revoked)

    def test_placement_is_queried_once_and_not_for_extension(self):
        with mock.patch('blazar_nova.compat.compute_hosts.ask_placement',
                        side_effect=compute_hosts.ask_placement) as ask:
            with mock.patch('blazar_nova.services.property_visibility.public',
                            ) as public:
                lease = self.make(3600, reservations=[
                    self.reservation(resource_properties='')])
            # Public properties matter only if some are requested.
            self.assertEqual((1, 0), (ask.call_count, public.call_count))
            self.change(lease, end_date=self.at(9000))
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
            self.assertEqual(1, ask.call_count)

    def test_extension_of_deferred_build_requires_new_trust(self):
        self.hold('vm1')
        lease = self.lease('vm1')
        with mock.patch.object(self, 'delegate', mock.Mock(
                side_effect=errors.TrustUnavailable('restricted'))):
            self.change(lease, code=403, end_date=self.at(9000))
        self.assertEqual(lease, self.lease('vm1'))
        # The trust for a refused change is not kept.
        self.change(lease, code=400, start_date=self.at(9000),
                    end_date=self.at(8000))
        self.change(lease, end_date=self.at(9000))
        self.assertEqual([('alice', 7200), ('alice', 9000)],
                         self.until()[:1] + self.until()[-1:])
        self.assertEqual(1, len(self.trusts) - len(self.revoked))
        self.clock.advance(3600)
        self.run_due()
        self.wait_for_status(self.alice.get_servers()[0]['id'], 'ACTIVE')

    def test_administrator_extends_deferred_build_with_its_trust(self):
        server_id = self.hold('vm1')['id']
        lease = self.lease('vm1')
        for later in 9000, 9600:
            self.change(lease, self.admin, end_date=self.at(later))
        said = self.change(lease, self.admin, 403, end_date=self.at(9600),
                           on_end='shelve')
        self.assertIn('a trust that has to be valid until its end', str(said))
        # The trust is valid until the first end.
        latest = 7200 - self.listener.parts.conf.blazar.start_timeout
        said = self.change(lease, self.admin, 403, end_date=self.at(10000),
                           start_date=self.at(latest + 60))
        self.assertIn('a trust that has to be valid until then', str(said))
        self.assertEqual([('alice', 7200)], self.until())
        self.assertEqual([], self.revoked)
        seen = self.record_deletions()
        self.clock.advance(3600)
        self.run_due()
        self.wait_for_status(server_id, 'ACTIVE')
        self.no_token = errors.TrustUnavailable('The trust has expired')
        self.clock.advance(9600 - 3600)
        self.run_due()
        self.wait_until_gone(server_id)
        self.assertEqual([None], [token for token, _user in seen])

    def test_other_member_extends_deferred_build_with_own_trust(self):
        server_id = self.hold('vm1')['id']
        self.change(self.lease('vm1'), self.api(user='bob'),
                    end_date=self.at(9000))
        self.assertEqual([('alice', 7200), ('bob', 9000)], self.until())
        self.assertEqual(['trust-0'], self.revoked)
        self.clock.advance(3600)
        self.run_due()
        self.assertEqual('alice', self.wait_for_status(
            server_id, 'ACTIVE')['user_id'])

    def test_replaced_trusts_are_revoked(self):
        """A trust that the build may be using is revoked with the lease."""
        server_id = self.hold('vm1', start_in=300)['id']
        for later in range(7200, 7200 + 30 * 60, 60):
            self.change(self.lease('vm1'), end_date=self.at(later))
            self.assertEqual(1, len(self.trusts) - len(self.revoked))
        with mock.patch('blazar_nova.scheduler.filters.LeaseFilter.'
                        'filter_all', return_value=[]):
            self.clock.advance(300)
            self.run_due()
        self.assertEqual('STARTING', self.lease('vm1')['status'])
        for later in range(9000, 9000 + 30 * 60, 60):
            self.change(self.lease('vm1'), end_date=self.at(later))
            self.assertEqual(2, len(self.trusts) - len(self.revoked))
        parts, kept = self.listener.parts, self.trusts.keys() - {*self.revoked}
        with mock.patch.object(parts.cloud, 'credentials',
                               return_value={*kept, 'no'}):
            self.assertEqual({'no'}, parts.lifecycle.lease_close.strays())
        self.alice.delete_server(server_id)
        self.wait_until_gone(server_id)
        self.run_sync()
        self.run_due()
        self.assertEqual({*self.trusts}, {*self.revoked})

    def test_extension_of_failed_build_requires_new_trust(self):
        self.hold('vm1')
        with mock.patch('blazar_nova.scheduler.filters.LeaseFilter.'
                        'filter_all', return_value=[]):
            self.clock.advance(3600)
            self.run_due()
            self.wait_for(lambda: {'ERROR'} == {
                one['status'] for one in self.api(
                    microversion='2.99').get_servers()},
                what='Nova has found no host')
            self.run_sync()
        lease = self.lease('vm1')
        self.assertEqual('STARTING', lease['status'])
        # Its trust is still needed for the build.
        # The clock is at its start.
        self.flags(group='blazar', start_timeout=3600)
        self.change(lease, self.admin, 403, end_date=self.at(9000))
        self.change(lease, end_date=self.at(9000))
        self.assertEqual(('alice', 9000), self.until()[-1])


class NothingLeftTest(DeletionTestCase):
    """Deletion of servers that were never built."""

    def records(self):
        """Count the records of servers in Nova's API database."""
        counts = collections.Counter({
            table: self.api_rows(table) for table in (
                'build_requests', 'instance_mappings', 'request_specs',
                'instance_group_member')})
        return dict(+counts)

    def api_rows(self, table):
        return self.sql('api', f'SELECT count(*) FROM {table}')[0][0]

    def sql(self, name, statement):
        path = os.path.join(self.folder, f'{name}.sqlite')
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            return db.execute(statement).fetchall()

    def hold_in_group(self):
        """Boot a reserved server with a volume, in a server group."""
        group = self.alice.post_server_groups(
            {'name': 'group', 'policy': 'anti-affinity'})
        return self.boot('vm1', hints={
            **self.lease_hints('vm1', 3600), 'group': group['id']},
            **test_held.FROM_VOLUME)['id']

    def assert_nothing_left(self, server_id):
        self.assertEqual({}, self.records())
        self.assertEqual(
            {}, self.cinder.volume_to_attachment[test_held.VOLUME])
        self.refused(404, self.alice.api_get, f'/servers/{server_id}')
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])

    def test_user_deletion_removes_nova_records(self):
        server_id = self.hold_in_group()
        self.assertEqual(4, len(self.records()))
        self.alice.delete_server(server_id)
        self.assert_nothing_left(server_id)

    def test_lease_deletion_removes_nova_records(self):
        server_id = self.hold_in_group()
        self.listener.parts.lifecycle.lease_end.delete(self.lease('vm1')['id'])
        self.run_due()
        self.assert_nothing_left(server_id)

    def test_sync_removes_nova_records_after_nova_api_died(self):
        server_id = self.hold_in_group()
        with mock.patch(
                'blazar_core.lifecycle.reconciliation.Reconciliation.check',
                side_effect=RuntimeError('died')):
            self.alice.delete_server(server_id)
        self.assertEqual('PENDING', self.lease('vm1')['status'])
        self.assertNotEqual({}, self.records())
        self.run_sync()
        self.assert_nothing_left(server_id)

    def test_records_of_built_and_reserved_servers_are_kept(self):
        cloud = self.listener.parts.cloud
        active = self.boot_active('plain')['id']
        held = self.hold('vm1')['id']
        before = self.records()
        for server_id in active, held:
            cloud.forget(server_id)
        self.assertEqual(before, self.records())
        self.assertEqual('RESERVED',
                         self.alice.get_server(held)['status'])

    def test_orphan_deletion_removes_nova_records(self):
        """nova-api died before it recorded the lease."""
        server_id = self.hold('vm1')['id']
        driven.withdraw(self.listener.parts.leases, self.lease('vm1')['id'])
        self.listener.server_sync.delete_orphan(server_id)
        self.assertEqual({}, self.records())

    def test_verify_removes_leftover_nova_records(self):
        server_id = self.hold('vm1')['id']
        with mock.patch('blazar_nova.compat.unbuilt_leftovers.forget'):
            self.alice.delete_server(server_id)
        self.assertEqual('TERMINATED', self.lease('vm1')['status'])
        verifier = verification.Verifier(
            self.listener.parts, lambda seconds: None, lambda text: None, 0)
        # Its build may still be in progress.
        self.assertEqual([], verifier.run(fix=False).left)
        self.sql('api', "UPDATE instance_mappings SET "
                        "updated_at = '2020-01-01 00:00:00'")
        left, = verifier.run(fix=False).left
        self.assertIn(server_id, left.text)
        self.assertEqual([], verifier.run(fix=True).left)
        self.assertEqual({}, self.records())


class WithoutTrustTest(api_base.ApiTestCase, DeletionTestCase):
    """Alice cannot create a trust, and a build that creates nothing of hers
    needs none.
    """

    #: Objects that Nova creates at the build, owned by the token's owner.
    MADE = ({'imageRef': '', 'block_device_mapping_v2': [{
        'boot_index': 0, 'uuid': base.IMAGE, 'source_type': 'image',
        'destination_type': 'volume', 'volume_size': 1}]},
        {'networks': [{
            'uuid': nova_fixtures.NeutronFixture.network_1['id'],
            'fixed_ip': '192.168.1.4'}]})

    def setUp(self):
        super().setUp()
        self.may = False
        for name in 'delegate', 'access':
            self.stub_out(
                f'blazar_nova.services.user_credentials.Credentials.{name}',
                lambda _self, *its, name=name, **how: (
                    getattr(self, name)(*its, **how)))

    def access(self, credential, as_owner=False):
        if as_owner and service_user.ServiceUser.read(credential):
            raise errors.TrustUnavailable('There is no trust of hers.')
        return super().access(credential)

    def delegate(self, context, until, as_owner):
        if self.may:
            return super().delegate(context, until)
        if as_owner:
            raise errors.TrustUnavailable('She may make no trust.')
        return service_user.ServiceUser.of(context).written()

    def later(self, **boot):
        return self.boot('vm1', hints=self.lease_hints('vm1', 3600), **boot)

    def test_build_from_existing_resources_needs_no_trust(self):
        self.later()
        lease = self.lease('vm1')
        parts = self.listener.parts
        self.assertEqual(
            service_user.ServiceUser('alice', self.alice.project_id, tuple(
                sorted(self.alice.who.roles))), service_user.ServiceUser.read(
                    parts.lifecycle.lease_close.credential(lease['id'])))
        self.change(lease, end_date=self.at(9000))

    def change(self, lease, code=200, **what):
        return self.ask('PUT', f'/leases/{lease["id"]}', what, code=code)

    def test_build_that_creates_resources_requires_trust(self):
        before = self.boot_rows()
        hints = self.lease_hints('vm1', 3600)
        again = self.lease_hints('vm1', 3600, recurrence={
            'rule': 'FREQ=DAILY;COUNT=2'})
        for boot in self.MADE:
            # Nova boots no two servers with one fixed address.
            for one in (hints, again)[:1 if 'networks' in boot else 2]:
                self.assertIn('She may make no trust.', self.refused(
                    403, self.boot, 'vm1', hints=one, **boot))
        self.assertEqual(before, self.boot_rows())
        self.may = True
        for number, boot in enumerate(self.MADE):
            self.boot(f'vm{number}', hints=hints, **boot)

    def test_image_creation_and_shelving_require_trust(self):
        server_id = self.active()
        cloud, lease_id = self.listener.parts.cloud, self.lease('vm1')['id']
        credential = service_user.ServiceUser(
            'alice', self.alice.project_id, ('member',)).written()
        for do in (
                lambda: cloud.create_image(
                    server_id, lease_id, 'vm1', credential),
                lambda: cloud.set_resting_state(
                    server_id, cloud_api.RestingState.SHELVED, credential)):
            self.assertRaises(errors.TrustUnavailable, do)
        self.assertEqual('ACTIVE', self.alice.get_server(server_id)['status'])

    def test_snapshot_before_end_requires_trust_at_creation(self):
        hints = self.lease_hints(
            'vm1', 3600, before_end=self.at(5400),
            before_end_action='snapshot')
        self.refused(403, self.boot, 'vm1', hints=hints)

    def test_deferred_build_without_required_trust_fails(self):
        self.may = True
        server_id = self.later(**self.MADE[0])['id']
        parts, lease = self.listener.parts, self.lease('vm1')
        parts.leases.credentials.store(
            lease['id'], parts.encryption.encrypt(service_user.ServiceUser(
                'alice', self.alice.project_id, ('member',)).written()))
        self.clock.advance(3600)
        self.run_due()
        lease = self.lease('vm1')
        self.assertEqual(('ERROR', 'There is no trust of hers.'),
                         (lease['status'], lease['status_reason']))
        self.assertNotIn(server_id, self.guests())

    def test_verify_does_not_require_trust(self):
        self.later()
        self.run_sync()
        self.assert_verified()

    def test_refused_extension_keeps_existing_trust(self):
        self.may = True
        self.later(**self.MADE[0])
        lease = self.lease('vm1')
        self.may = False
        self.change(lease, 403, end_date=self.at(9000))
        self.assertEqual('trust-0', (
            self.listener.parts.lifecycle.lease_close.credential(lease['id'])))
