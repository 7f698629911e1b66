# SPDX-License-Identifier: Apache-2.0


"""Leases are transferred in the generation that was checked."""

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import transfer
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

NEW = transfer.Owner('new', 'other')


class TestTransfer(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=64)
        self.transfer = self.leases.transfer

    def made(self, start=0, end=100, **wanted):
        """Create a lease of slots and return its id."""
        made = self.leases.creation.create(new_leases.NewLease(
            'project', 'user', self.request(start, end),
            (self.places(2),), **wanted), None)
        driven.run_due(self.new_engine())
        return made['id']

    def hand(self, lease_id, owner=NEW, seen=None):
        looked = self.transfer.look(lease_id)
        return self.transfer.transfer(
            lease_id, looked.generation if seen is None else seen, owner,
            None, False)

    def reservation(self):
        return self.scalars(models.Reservation.id)[0]

    def test_lease_is_transferred_and_its_trusts_are_returned(self):
        lease_id = self.made(credential=self.encryption.encrypt('trust'))
        self.replace_credential(lease_id, 'another')
        lease, encrypted = self.hand(lease_id)
        self.assertEqual(('new', 'other'),
                         (lease['project_id'], lease['user_id']))
        self.assertEqual(['another', 'trust'],
                         list(map(self.encryption.decrypt, encrypted)))
        self.assertEqual([], self.scalars(models.Credential.lease_id))

    def test_transfer_removes_limit_warning_of_old_project(self):
        lease_id = self.made()
        near = conditions.Condition(
            conditions.Type.LIMIT_NEAR, conditions.Reason.LIMIT_NEAR,
            'With this lease the project has 9 of at most 10 leases.', {})
        with self.database.writer() as session:
            conditions.update(session.get_one(
                models.Lease, lease_id), self.clock.now(), near)
        self.assertIn('9 of at most 10', self.hand(
            lease_id, transfer.Owner('project', 'other'))[
                0]['status_reason'])
        self.assertEqual('', self.hand(lease_id)[0]['status_reason'])

    def test_new_trust_is_stored_with_transfer(self):
        lease_id = self.made(credential=self.encryption.encrypt('trust'))
        looked, keys = self.transfer.look(lease_id), self.leases.credentials

        def keep(session):
            keys.put(session, api.found(session, lease_id),
                     self.encryption.encrypt('of the new owner'))

        def die(session):
            keep(session)
            raise errors.CloudUnavailable('It dies')

        what = lease_id, looked.generation, NEW, None, False
        before = self.everything()
        self.assertRaises(errors.CloudUnavailable, self.transfer.transfer,
                          *what, also=die)
        self.assertEqual(before, self.everything())
        _lease, encrypted = self.transfer.transfer(*what, also=keep)
        self.assertEqual(['trust'], list(map(self.encryption.decrypt,
                                             encrypted)))
        self.assertEqual(['of the new owner'], [
            self.encryption.decrypt(one)
            for one in self.scalars(models.Credential.encrypted)])

    def test_transfer_of_changed_lease_is_a_conflict(self):
        lease_id = self.made()
        seen = self.transfer.look(lease_id).generation
        self.leases.slots.take(self.reservation(), 'project', ['server'])
        self.assertRaises(errors.Conflict, self.hand, lease_id, NEW, seen)
        said = str(self.assertRaises(errors.Conflict, self.hand, lease_id))
        self.assertIn('1 server of its project', said)
        lease, _encrypted = self.hand(
            lease_id, transfer.Owner('project', 'other'))
        self.assertEqual('other', lease['user_id'])

    def test_boot_gets_no_slot_after_concurrent_transfer(self):
        lease_id = self.made()
        find = self.leases.slots._lease_of

        def hand_over(*args):
            found = find(*args)
            self.hand(lease_id)
            return found

        self.leases.slots._lease_of = hand_over
        self.assertRaises(errors.NotFound, self.leases.slots.take,
                          self.reservation(), 'project', ['server'])
        self.assertEqual([None, None], self.scalars(models.Booking.server_id))

    def test_lease_created_by_boot_cannot_be_transferred(self):
        lease_id = self.lease(10, 100)['id']
        self.assertIn('was created by the boot', str(self.assertRaises(
            errors.Conflict, self.hand, lease_id)))

    def test_deleted_lease_cannot_be_transferred(self):
        lease_id = self.made(10, 100)
        self.lifecycle.lease_end.delete(lease_id)
        self.assertRaises(errors.Conflict, self.hand, lease_id)

    def test_transfer_advances_generation_of_both_projects(self):
        lease_id = self.made()
        self.hand(lease_id)
        self.assertEqual(['new', 'project'], sorted(
            self.scalars(models.Project.id)))

    def test_unknown_lease_is_not_found(self):
        self.assertRaises(errors.NotFound, self.transfer.look, 'x')
        self.assertRaises(errors.NotFound, self.transfer.transfer,
                          'x', 0, NEW, None, False)
