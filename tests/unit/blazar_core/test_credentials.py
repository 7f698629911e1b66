# SPDX-License-Identifier: Apache-2.0

"""The trusts of leases: which are kept, and which are revoked."""

from unittest import mock

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import retries
from tests import databases
from tests import driven
from tests.unit import base
from tests.unit.blazar_core import lifecycle_base

load_tests = databases.load_tests
State = base.State


class TestCredentials(lifecycle_base.LifecycleTestCase):
    """The trust of a lease, from the admission to the end."""

    def held(self, **wanted):
        return self.lease(50, 100, credential='trust', **wanted)

    def kept(self):
        return self.scalars(models.Credential.lease_id)

    def test_build_is_sent_with_trust_of_lease(self):
        lease, plain = self.held(), self.lease(50, 100)
        self.lifecycle.lease_start.start(plain['id'])
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual([None, 'trust'], self.cloud.sent_with)
        self.assertEqual([lease['id']], self.kept())

    def test_lease_fails_if_trust_is_unavailable_at_start(self):
        self.report(self.uuid_of('one'), 'one', None, {'VCPU': 1})
        lease = self.held()
        self.cloud.broken['send'] = errors.TrustUnavailable('He was disabled.')
        self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual('ERROR', self.status(lease))
        self.assertEqual('He was disabled.',
                         views.get(self.database,
                                   lease['id'])['status_reason'])
        self.assertEqual([('lease.update', lease['id'])], self.notified)
        # The booked capacity is free again.
        self.lease(50, 100)

    def test_trust_is_revoked_when_lease_ends(self):
        lease = self.held()
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual(['trust'], self.cloud.revoked)

    def test_failed_revocation_is_retried(self):
        lease = self.held()
        self.cloud.broken['revoke'] = RuntimeError('keystone does not answer')
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([lease['id']], self.kept())
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual([lease['id']], self.kept())
        self.cloud.broken.clear()
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))

    def test_revocations_stop_during_keystone_outage(self):
        """As each of them may wait for its timeout."""
        self.host('two', VCPU=8)
        leases = [self.held() for _lease in range(5)]
        silent = mock.patch.object(
            self.cloud, 'revoke',
            side_effect=errors.CloudUnavailable('Keystone does not answer.'))
        with silent as revoke:
            for lease in leases:
                self.lifecycle.lease_end.end(lease['id'])
            self.assertEqual(5, revoke.call_count)
            self.lifecycle.lease_close.revoke_over()
            self.assertEqual(8, revoke.call_count)
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'] * 5, []),
                         (self.cloud.revoked, self.kept()))

    def test_trust_without_answer_does_not_block_other_trusts(self):
        leases = [self.held(), self.held()]
        self.cloud.broken['revoke'] = RuntimeError('later')
        for lease in leases:
            self.lifecycle.lease_end.end(lease['id'])
        self.cloud.broken.clear()
        revoke, answers = self.cloud.revoke, [
            errors.CloudUnavailable('no answer')]

        def some(credential):
            if answers:
                raise answers.pop()
            revoke(credential)

        with mock.patch.object(self.cloud, 'revoke', some):
            self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'], 1),
                         (self.cloud.revoked, len(self.kept())))

    def test_failed_revocation_does_not_block_other_trusts(self):
        lease = self.held()
        self.replace_credential(lease['id'], 'another')
        revoke = self.cloud.revoke

        def some(credential: str) -> None:
            if credential == 'another':
                raise RuntimeError('keystone does not know it')
            revoke(credential)

        with mock.patch.object(self.cloud, 'revoke', some):
            self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['trust'], [lease['id']]),
                         (self.cloud.revoked, self.kept()))
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust', 'another', 'trust'], []),
                         (self.cloud.revoked, self.kept()))

    def test_trust_of_withdrawn_lease_is_revoked(self):
        driven.withdraw(self.leases, self.held()['id'])
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['trust'], []), (self.cloud.revoked, self.kept()))

    def test_trust_is_kept_while_lease_may_need_it(self):
        self.host('two', VCPU=1)
        leases = [self.held(), self.held(), self.held()]
        self.lifecycle.lease_start.start(leases[1]['id'])
        self.cloud.broken['send'] = errors.TrustUnavailable('no')
        self.lifecycle.lease_start.start(leases[2]['id'])
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual(([], 3), (self.cloud.revoked, len(self.kept())))

    def test_servers_are_deleted_with_trust(self):
        lease = self.running_lease(0, 100, credential='trust')
        plain = self.running_lease(0, 100)
        for one in lease, plain:
            self.lifecycle.lease_end.end(one['id'])
        self.assertEqual(['trust', None], self.cloud.deleted_with)
        self.assertEqual(['trust'], self.cloud.revoked)

    def test_trust_is_not_revoked_before_servers_are_deleted(self):
        lease = self.running_lease(0, 100, credential='trust')
        self.cloud.stubborn.update(base.servers_of(lease))
        for _time in range(2):
            self.assertEqual(retries.AGAIN, self.lifecycle.lease_end.end(
                lease['id']).seconds)
        self.assertEqual((['trust', 'trust'], []),
                         (self.cloud.deleted_with, self.cloud.revoked))

    def test_end_is_retried_if_cloud_is_unavailable(self):
        lease = self.running_lease(0, 100, credential='trust')
        self.cloud.broken['delete'] = errors.CloudUnavailable('down')
        self.assertEqual(retries.AGAIN,
                         self.lifecycle.lease_end.end(lease['id']).seconds)
        self.assertEqual('TERMINATING', self.status(lease))
        self.cloud.broken.clear()
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))

    def test_undecryptable_trust_does_not_block_end(
            self):
        lease = self.running_lease(0, 100, credential='trust')
        with self.database.writer() as session:
            session.get(models.Credential, lease['id']).encrypted = 'other key'
        self.assertIsNone(self.lifecycle.lease_end.end(lease['id']))
        self.assertEqual('TERMINATED', self.status(lease))
        self.assertEqual([None], self.cloud.deleted_with)

    def test_trust_can_be_stored_and_replaced_later(self):
        lease = self.running_lease(0, 100)
        first, second = map(self.encryption.encrypt, ('first', 'second'))
        self.assertEqual(
            [], self.leases.credentials.store(lease['id'], first))
        self.assertEqual(
            [first], self.leases.credentials.store(lease['id'], second))
        self.assertEqual([lease['id']], self.kept())
        self.lifecycle.lease_end.end(lease['id'])
        self.assertEqual((['second'], ['second']),
                         (self.cloud.deleted_with, self.cloud.revoked))

    def entrust(self, lease, text):
        """Replace the trust; return the trusts that can be revoked now."""
        return list(map(self.encryption.decrypt, self.leases.credentials.store(
            lease['id'], self.encryption.encrypt(text))))

    def test_replaced_trusts_are_not_kept_before_start(self):
        lease = self.held()
        self.clock.advance(49)
        self.assertEqual([['trust'], ['1'], ['2']], [
            self.entrust(lease, str(number)) for number in (1, 2, 3)])
        self.clock.advance(1)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['3'], self.cloud.sent_with)

    def test_replaced_trusts_used_for_builds_are_kept(self):
        lease = self.held(count=2)
        self.cloud.admits = 1
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual('STARTING', self.status(lease))
        self.assertEqual([[], ['1'], ['2']], [
            self.entrust(lease, str(number)) for number in (1, 2, 3)])
        self.clock.advance(10)
        self.see(self.cloud.sent[0][1][0], State.RUNNING, self.one)
        self.lifecycle.lease_start.start(lease['id'])
        self.assertEqual(['trust', '3'], self.cloud.sent_with)
        self.assertEqual([[], ['4'], ['5']], [
            self.entrust(lease, str(number)) for number in (4, 5, 6)])
        self.lifecycle.lease_end.end(lease['id'])
        for server_id in base.servers_of(lease):
            self.see(server_id, State.GONE)
        self.assertEqual({'trust', '3', '6'}, {*self.cloud.revoked})

    def test_number_of_kept_replaced_trusts_is_limited(self):
        lease = self.held()
        self.clock.advance(50)
        revoked = []
        with self.database.writer() as session:
            session.get(models.Lease, lease['id']).status = 'STARTING'
        for number in range(300):
            # Each is used for a build that is then found lost.
            with self.database.writer() as session:
                session.execute(sa.update(models.Booking).values(
                    dispatched_at=self.clock.now()))
            self.clock.advance(10)
            revoked += self.entrust(lease, str(number))
        self.assertEqual(['trust', *map(str, range(291))], revoked)
        row, = self.scalars(models.Credential)
        self.assertEqual([str(number) for number in range(299, 290, -1)], list(
            map(self.encryption.decrypt, credentials.all_of(row))))

    def test_build_is_not_sent_with_replaced_trust(self):
        lease = self.held()
        self.clock.advance(50)
        send = self.cloud.send

        def late(call, credential, server_ids, gate):
            if credential == 'trust':
                self.assertEqual(['trust'], self.entrust(lease, 'another'))
            return send(call, credential, server_ids, gate)

        with mock.patch.object(self.cloud, 'send', late):
            self.assertIsNotNone(self.lifecycle.lease_start.start(lease['id']))
            self.assertEqual([], self.cloud.sent)
            self.assertIsNone(self.lifecycle.lease_start.start(lease['id']))
        self.assertEqual((['trust', 'another'], 1), (
            self.cloud.sent_with, len(self.cloud.sent)))

    def test_lost_build_is_not_resent_with_replaced_trust(self):
        lease = self.held()
        self.clock.advance(50)
        self.lifecycle.lease_start.start(lease['id'])
        server_id, = base.servers_of(lease)
        with self.database.reader() as session:
            encrypted = dispatch.encrypted_call(
                session, [lease['id']])[lease['id']]
        self.entrust(lease, 'another')
        again = {server_id: self.clock.now()}
        self.lifecycle.dispatch.send_again(lease['id'], encrypted, again)
        self.assertEqual(1, len(self.cloud.sent))
        with self.database.reader() as session:
            encrypted = dispatch.encrypted_call(
                session, [lease['id']])[lease['id']]
        self.lifecycle.dispatch.send_again(lease['id'], encrypted, again)
        self.assertEqual(2, len(self.cloud.sent))

    def test_trust_stored_after_end_is_revoked(self):
        lease = self.running_lease(0, 100)
        self.lifecycle.lease_end.end(lease['id'])
        self.leases.credentials.store(
            lease['id'], self.encryption.encrypt('late'))
        self.lifecycle.lease_close.revoke_over()
        self.assertEqual((['late'], []), (self.cloud.revoked, self.kept()))
        driven.withdraw(self.leases, lease['id'])
        self.assertRaises(
            errors.NotFound, self.leases.credentials.store, lease['id'],
            self.encryption.encrypt('later'))

    def test_stray_trusts_are_found(self):
        self.assertEqual(set(), self.lifecycle.lease_close.strays())
        self.held()
        self.cloud.given = {'trust', 'stray'}
        self.assertEqual({'stray'}, self.lifecycle.lease_close.strays())
