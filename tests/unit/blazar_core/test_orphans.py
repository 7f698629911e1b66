# SPDX-License-Identifier: Apache-2.0


"""Orphans: they are found, announced, and ended by policy."""

from unittest import mock

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import updates
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_end
from blazar_core.lifecycle import orphans
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

State = cloud_api.ServerState
HOUR = 3600
GRACE = 2 * HOUR


class FakeIdentity:
    """A keystone from which projects and users can be deleted."""

    def __init__(self):
        self.gone, self.unknown, self.asked = set(), set(), []
        self.broken = None

    def absent(self, project_ids, user_ids, go_on):
        self.asked.append((list(project_ids), list(user_ids)))
        if self.broken:
            raise self.broken
        return cloud_api.MissingOwners(
            frozenset(self.gone & set(project_ids)),
            frozenset(self.gone & set(user_ids)), frozenset(self.unknown))


class TestOrphans(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=64)
        self.identity = FakeIdentity()
        self.engine = self.new_engine()

    def another(self, ends=False):
        """Return another process that searches for orphans."""
        return orphans.Orphans(
            self.database, self.clock, self.identity,
            self.lifecycle.lease_end.delete, ends, GRACE)

    def owned(self, **columns):
        made = self.running_lease(0, 100 * HOUR)
        with self.database.writer() as session:
            row = session.get_one(models.Lease, made['id'])
            for name, value in columns.items():
                setattr(row, name, value)
        return made['id']

    def row(self, lease_id):
        with self.database.reader() as session:
            return session.get_one(models.Lease, lease_id)

    def said(self, lease):
        return conditions.status_reason(self.row(lease).conditions)

    def found(self):
        return [one.id for one in orphans.known(self.database)]

    def told(self):
        """Carry out the announcements, and return their leases."""
        driven.run_due(self.engine)
        return [lease for event, lease in self.notified
                if event == 'lease.event.orphaned']

    def test_lease_of_missing_project_is_notified_once(self):
        lease, other = self.owned(), self.owned(project_id='other')
        self.identity.gone = {'project'}
        for _time in range(3):
            self.assertEqual([], self.another().find())
            self.clock.advance(GRACE)
        self.assertEqual([lease], self.told())
        self.assertEqual('The project of the lease no longer exists.',
                         self.said(lease))
        self.assertEqual('', self.said(other))
        found, = orphans.known(self.database)
        self.assertEqual((lease, 'project', base.NOW),
                         (found.id, found.missing, found.seen_at))
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)

    def test_orphaned_offer_is_notified(self):
        lease = self.owned(status='OFFERED')
        self.identity.gone = {'project'}
        self.another().find()
        self.assertEqual([lease], self.told())

    def test_clock_that_was_ahead_delays_neither_notice_nor_end(self):
        lease = self.owned()
        self.identity.gone = {'project'}
        self.clock.step(10 * GRACE)
        # The process dies before the announcement.
        self.another().find()
        self.clock.step(-10 * GRACE)
        self.another(ends=True).find()
        self.assertEqual([base.NOW], [
            one.seen_at for one in orphans.known(self.database)])
        since, = [one['since'] for one in self.row(lease).conditions]
        self.assertEqual(base.NOW, since)
        self.assertEqual([lease], self.told())
        self.clock.advance(GRACE - 1)
        self.assertEqual([], self.another(ends=True).find())
        self.clock.advance(1)
        self.assertEqual([lease], self.another(ends=True).find())

    def test_clock_corrected_during_search_ends_no_lease(self):
        self.owned()
        self.identity.gone = {'project'}
        self.another(ends=True).find()
        answer = self.identity.absent
        late = self.another(ends=True)
        lasting = late._concerned

        def set_right(absent):
            self.clock.step(-10 * GRACE)
            return lasting(absent)

        late._concerned = set_right
        self.identity.absent = answer
        self.clock.step(10 * GRACE)
        self.assertEqual([], late.find())

    def test_outdated_answer_of_stalled_process_ends_no_lease(self):
        """A process that was frozen continues with an outdated answer."""
        lease = self.owned()
        self.identity.gone = {'project'}
        self.another(ends=True).find()
        answer = self.identity.absent

        def late(*ids):
            found = answer(*ids)
            self.clock.advance(GRACE)
            return found

        with mock.patch.object(self.identity, 'absent', late):
            self.assertEqual([], self.another(ends=True).find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)
        self.assertEqual([lease], self.another(ends=True).find())

    def test_each_project_and_user_is_looked_up_once(self):
        for _time in range(3):
            self.owned()
        self.owned(user_id='other')
        self.another().find()
        self.assertEqual([(['project'], ['other', 'user'])],
                         self.identity.asked)

    def test_nothing_is_looked_up_without_leases(self):
        self.another().find()
        self.assertEqual([], self.identity.asked)

    def test_orphaned_lease_is_ended_after_grace(self):
        lease = self.owned()
        server, = self.scalars(models.Booking.server_id)
        self.cloud.servers[server] = cloud_api.ObservedServer(State.RUNNING,
                                                              'host')
        self.identity.gone = {'project'}
        one = self.another(ends=True)
        self.assertEqual([], one.find())
        self.clock.advance(GRACE - 1)
        self.assertEqual([], one.find())
        self.clock.advance(1)
        self.assertEqual([lease], one.find())
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.TERMINATING, self.row(lease).status)
        self.lifecycle.lease_end.end(lease)
        self.assertEqual([server], self.cloud.deleted)
        self.assertEqual(states.Lease.TERMINATED, self.row(lease).status)
        self.assertIn('no longer exists', self.said(lease))
        one.find()
        self.assertEqual([], self.found())

    def test_operator_can_end_orphan_only_after_grace(self):
        lease = self.owned()
        self.identity.gone = {'project'}
        self.assertEqual([], self.another().find(ends=True))
        self.clock.advance(GRACE)
        self.assertEqual([lease], self.another().find(ends=True))

    def test_reappearing_project_resets_grace(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE // 2)
        self.identity.gone = set()
        one.find()
        self.assertEqual('', self.said(lease))
        self.assertEqual([], self.found())
        self.clock.advance(GRACE)
        self.identity.gone = {'project'}
        self.assertEqual([], one.find())

    def test_lease_is_kept_if_owner_reappears(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE)
        self.identity.gone = set()
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)

    def test_unavailable_keystone_ends_no_lease(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE)
        self.identity.broken = errors.CloudUnavailable('No answer.')
        self.assertRaises(errors.CloudUnavailable, one.find)
        self.identity.broken, self.identity.gone = None, set()
        self.identity.unknown = {'project'}
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)
        # The project does not count as found either.
        self.assertEqual([lease], self.found())

    def test_lease_of_missing_user_is_only_notified(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'user'}
        for _time in range(3):
            self.assertEqual([], one.find())
            self.clock.advance(GRACE)
        self.assertEqual([lease], self.told())
        self.assertEqual('The user of the lease no longer exists.',
                         self.said(lease))

    def test_missing_project_after_user_is_notified_and_starts_grace(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'user'}
        one.find()
        self.clock.advance(GRACE)
        self.assertEqual([lease], self.told())
        self.identity.gone = {'user', 'project'}
        self.assertEqual([], one.find())
        self.assertEqual([lease, lease], self.told())
        self.assertEqual('The project of the lease no longer exists.',
                         self.said(lease))
        self.clock.advance(GRACE)
        self.assertEqual([lease], one.find())

    def test_lease_transferred_meanwhile_is_not_ended(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE)
        absent = self.identity.absent

        def hand_over(*ids):
            found = absent(*ids)
            with self.database.writer() as session:
                session.get_one(models.Lease, lease).project_id = 'new'
            return found

        self.identity.absent = hand_over
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)

    def test_a_lease_of_another_project_is_not_deleted(self):
        lease = self.owned()
        self.lifecycle.lease_end.delete(lease, 'other')
        self.assertIsNone(self.row(lease).deleted_at)
        self.lifecycle.lease_end.delete(lease, 'project')
        self.assertIsNotNone(self.row(lease).deleted_at)

    def test_no_notification_if_owner_reappears(self):
        self.owned()
        self.identity.gone = {'project'}
        self.another().find()
        self.identity.gone = set()
        self.another().find()
        self.assertEqual([], self.told())

    def test_deleted_lease_is_ignored(self):
        lease = self.owned()
        self.lifecycle.lease_end.delete(lease)
        self.identity.gone = {'project'}
        self.another().find()
        self.assertEqual([], self.told())

    def test_failing_lease_does_not_block_others(self):
        first, second = sorted((self.owned(), self.owned()))
        self.identity.gone = {'project'}
        one = self.another()
        note = one._note

        def fail_once(lease, *args):
            if lease.id == first:
                raise ValueError
            return note(lease, *args)

        with mock.patch.object(one, '_note', fail_once):
            one.find()
        self.assertEqual([second], self.told())

    def test_end_policy_needing_owner_is_abandoned_after_a_while(self):
        lease = self.owned(on_end='snapshot,delete')
        server, = self.scalars(models.Booking.server_id)
        self.cloud.broken['create_image'] = errors.TrustUnavailable(
            'He is gone.')
        self.identity.gone = {'project'}
        self.another().find()
        self.clock.advance(100 * HOUR)
        self.lifecycle.lease_end.end(lease)
        self.assertEqual([], self.cloud.deleted)
        self.assertIn('He is gone.', self.said(lease))
        self.clock.advance(lease_end.IN_VAIN)
        self.lifecycle.lease_end.end(lease)
        self.assertEqual([server], self.cloud.deleted)

    def is_ending(self):
        """Return a lease that fails to end before its project is missing."""
        lease = self.owned(on_end='snapshot,delete')
        self.cloud.broken['create_image'] = errors.TrustUnavailable(
            'He is gone.')
        self.identity.gone = {'project'}
        self.clock.advance(100 * HOUR)
        self.lifecycle.lease_end.end(lease)
        self.assertEqual(states.Lease.TERMINATING, self.row(lease).status)
        return lease

    def test_end_started_before_project_went_missing_is_abandoned(self):
        lease = self.is_ending()
        server, = self.scalars(models.Booking.server_id)
        for _half in range(2):
            # However often that is checked, the time continues.
            self.another().find()
            self.lifecycle.lease_end.end(lease)
            self.assertEqual([], self.cloud.deleted)
            self.assertEqual([lease], self.told())
            self.clock.advance(lease_end.IN_VAIN // 2)
        self.assertIn('He is gone.', self.said(lease))
        self.another().find()
        self.lifecycle.lease_end.end(lease)
        self.assertEqual([server], self.cloud.deleted)

    def test_ending_orphan_is_deleted_after_grace(self):
        lease = self.is_ending()
        self.another(ends=True).find()
        self.assertIsNone(self.row(lease).deleted_at)
        self.clock.advance(GRACE)
        self.assertEqual([lease], self.another(ends=True).find())
        self.assertIsNotNone(self.row(lease).deleted_at)
        self.assertEqual([], self.another(ends=True).find())

    def notices(self):
        return [event for event, _lease in self.notified
                if event == 'lease.event.grace_period']

    def test_grace_period_is_notified_once_for_orphan(self):
        lease = self.owned(grace_period=HOUR)
        self.identity.gone = {'project'}
        self.clock.advance(100 * HOUR)
        self.lifecycle.lease_end.end(lease, when_due=True)
        self.another().find()
        self.lifecycle.lease_end.end(lease, when_due=True)
        self.assertEqual(1, len(self.notices()))
        self.assertEqual(f'{lease_conditions.GRACE.message} '
                         f'{lease_conditions.ORPHANED["project"].message}',
                         self.said(lease))

    def test_update_of_end_does_not_clear_orphan_condition(self):
        lease = self.owned(auto_extend=HOUR)
        end, = self.scalars(models.Lease.end_date, models.Lease.id == lease)
        self.lifecycle.auto_extension._explain(lease, end, 'later.')
        self.identity.gone = {'project'}
        self.another().find()
        self.assertIn('The lease could not be extended', self.said(lease))
        self.leases.updates.update(lease, updates.LeaseChange(end=end + HOUR))
        self.assertEqual(
            lease_conditions.ORPHANED['project'].message, self.said(lease))
        self.assertEqual([lease], self.found())

    def policies(self):
        return {one: kind() for one, kind in (
            (end_policies.DELETE, end_policies.Delete), (
                'snapshot', end_policies.Snapshot))}
