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

    def absent(self, project_ids, user_ids):
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

    def test_one_whose_project_is_gone_is_told_of_once(self):
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

    def test_that_of_an_offer_is_announced_before_it_is_accepted(self):
        lease = self.owned(status='OFFERED')
        self.identity.gone = {'project'}
        self.another().find()
        self.assertEqual([lease], self.told())

    def test_a_clock_that_was_ahead_delays_nothing(self):
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

    def test_nor_does_one_end_anything_that_is_set_right_meanwhile(self):
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

    def test_an_answer_is_of_when_it_was_asked_for(self):
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

    def test_each_project_and_user_is_asked_for_once(self):
        for _time in range(3):
            self.owned()
        self.owned(user_id='other')
        self.another().find()
        self.assertEqual([(['project'], ['other', 'user'])],
                         self.identity.asked)

    def test_without_leases_nobody_is_asked(self):
        self.another().find()
        self.assertEqual([], self.identity.asked)

    def test_it_is_ended_when_the_grace_is_over(self):
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

    def test_an_operator_may_have_it_ended_after_the_grace_only(self):
        lease = self.owned()
        self.identity.gone = {'project'}
        self.assertEqual([], self.another().find(ends=True))
        self.clock.advance(GRACE)
        self.assertEqual([lease], self.another().find(ends=True))

    def test_one_wrong_answer_ends_nothing(self):
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

    def test_it_is_not_ended_when_the_owner_is_back_at_that_time(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE)
        self.identity.gone = set()
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)

    def test_who_cannot_be_asked_is_not_gone(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'project'}
        one.find()
        self.clock.advance(GRACE)
        self.identity.broken = errors.CloudUnavailable('It is away.')
        self.assertRaises(errors.CloudUnavailable, one.find)
        self.identity.broken, self.identity.gone = None, set()
        self.identity.unknown = {'project'}
        self.assertEqual([], one.find())
        self.assertEqual(states.Lease.ACTIVE, self.row(lease).status)
        # The project does not count as found either.
        self.assertEqual([lease], self.found())

    def test_one_whose_user_alone_is_gone_is_only_told_of(self):
        lease, one = self.owned(), self.another(ends=True)
        self.identity.gone = {'user'}
        for _time in range(3):
            self.assertEqual([], one.find())
            self.clock.advance(GRACE)
        self.assertEqual([lease], self.told())
        self.assertEqual('The user of the lease no longer exists.',
                         self.said(lease))

    def test_that_his_project_goes_too_is_told_and_begins_the_grace(self):
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

    def test_one_that_is_handed_over_meanwhile_is_left_alone(self):
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

    def test_nothing_is_announced_when_the_owner_is_back_before(self):
        self.owned()
        self.identity.gone = {'project'}
        self.another().find()
        self.identity.gone = set()
        self.another().find()
        self.assertEqual([], self.told())

    def test_one_that_is_over_or_deleted_is_left_alone(self):
        lease = self.owned()
        self.lifecycle.lease_end.delete(lease)
        self.identity.gone = {'project'}
        self.another().find()
        self.assertEqual([], self.told())

    def test_one_that_fails_keeps_no_other(self):
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

    def test_an_end_that_takes_an_owner_is_not_tried_for_ever(self):
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

    def test_nor_is_one_that_had_begun_before_its_project_was_missed(self):
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

    def test_one_that_is_ending_is_ended_when_the_grace_is_over(self):
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

    def test_a_grace_period_is_told_once_beside_it(self):
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

    def test_a_change_of_the_end_does_not_clear_it(self):
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
