# SPDX-License-Identifier: Apache-2.0


"""Leases are handed over, as they were when that was decided."""

from blazar_core.common import errors
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import creation
from blazar_core.leases import transfer
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

NEW = transfer.Owner('new', 'other')


class TestOwning(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('host', VCPU=64)
        self.owning = self.leases.owning

    def made(self, start=0, end=100, **wanted):
        """A lease of places."""
        made = self.leases.making.create(creation.NewLease(
            'project', 'user', self.request(start, end),
            (self.places(2),), **wanted), None)
        self.new_engine().run_due()
        return made['id']

    def hand(self, lease_id, owner=NEW, seen=None):
        looked = self.owning.look(lease_id)
        return self.owning.hand_over(
            lease_id, looked.generation if seen is None else seen, owner,
            None, False)

    def reservation(self):
        return self.scalars(models.Reservation.id)[0]

    def test_it_belongs_to_somebody_else_with_all_that_it_has(self):
        lease_id = self.made(credential=self.vault.seal('trust'))
        self.replace_credential(lease_id, 'another')
        lease, sealed = self.hand(lease_id)
        self.assertEqual(('new', 'other'),
                         (lease['project_id'], lease['user_id']))
        self.assertEqual(['another', 'trust'],
                         list(map(self.vault.open, sealed)))
        self.assertEqual([], self.scalars(models.Credential.lease_id))

    def test_its_trust_is_there_with_its_new_owner(self):
        lease_id = self.made(credential=self.vault.seal('trust'))
        looked, keys = self.owning.look(lease_id), self.leases.credentials

        def keep(session):
            keys.put(session, api.found(session, lease_id),
                     self.vault.seal('of the new owner'))

        def die(session):
            keep(session)
            raise errors.CloudUnavailable('It dies')

        what = lease_id, looked.generation, NEW, None, False
        before = self.everything()
        self.assertRaises(errors.CloudUnavailable, self.owning.hand_over,
                          *what, also=die)
        self.assertEqual(before, self.everything())
        _lease, sealed = self.owning.hand_over(*what, also=keep)
        self.assertEqual(['trust'], list(map(self.vault.open, sealed)))
        self.assertEqual(['of the new owner'], [
            self.vault.open(one)
            for one in self.scalars(models.Credential.sealed)])

    def test_one_that_was_changed_meanwhile_is_decided_about_again(self):
        lease_id = self.made()
        seen = self.owning.look(lease_id).generation
        self.leases.places.occupy(self.reservation(), 'project', ['server'])
        self.assertRaises(errors.Conflict, self.hand, lease_id, NEW, seen)
        said = str(self.assertRaises(errors.Conflict, self.hand, lease_id))
        self.assertIn('1 server of its project', said)
        lease, _sealed = self.hand(
            lease_id, transfer.Owner('project', 'other'))
        self.assertEqual('other', lease['user_id'])

    def test_a_boot_that_has_found_its_reservation_before_gets_no_place(self):
        lease_id = self.made()
        find = self.leases.places._lease_of

        def hand_over(*args):
            found = find(*args)
            self.hand(lease_id)
            return found

        self.leases.places._lease_of = hand_over
        self.assertRaises(errors.NotFound, self.leases.places.occupy,
                          self.reservation(), 'project', ['server'])
        self.assertEqual([None, None], self.scalars(models.Booking.server_id))

    def test_one_of_a_boot_stays_in_its_project(self):
        lease_id = self.lease(10, 100)['id']
        self.assertIn('was made by the boot', str(self.assertRaises(
            errors.Conflict, self.hand, lease_id)))

    def test_one_that_is_deleted_is_nobodys(self):
        lease_id = self.made(10, 100)
        self.lifecycle.ending.delete(lease_id)
        self.assertRaises(errors.Conflict, self.hand, lease_id)

    def test_who_counts_what_either_has_counts_again(self):
        lease_id = self.made()
        self.hand(lease_id)
        self.assertEqual(['new', 'project'], sorted(
            self.scalars(models.Project.id)))

    def test_one_that_is_unknown(self):
        self.assertRaises(errors.NotFound, self.owning.look, 'x')
        self.assertRaises(errors.NotFound, self.owning.hand_over,
                          'x', 0, NEW, None, False)
