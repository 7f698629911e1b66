# SPDX-License-Identifier: Apache-2.0

"""A lease that is requested twice with one key is created once."""

import dataclasses
import threading

from blazar_core.capacity import admissions
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import idempotency
from blazar_core.leases import leases
from tests import databases
from tests import driven
from tests.unit import base

load_tests = databases.load_tests

BODY = {'name': 'lease', 'end_date': '2027-01-01 00:00'}


class TestIdempotency(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=4)

    def key(self, text='key', body=BODY, project='project', user='user'):
        return idempotency.Key(f'{project} {user} {text}', repr(body))

    def make(self, key, by=None):
        return (by or self.leases).creation.create(
            dataclasses.replace(self.new_lease(100, 200), key=key),
            self.encryption.encrypt('call'))

    def made(self, key):
        return idempotency.made_by(self.database, key)

    def test_repeated_request_finds_first_lease(self):
        self.assertIsNone(self.made(self.key()))
        lease = self.make(self.key())
        self.assertEqual(lease['id'], self.made(self.key())['id'])
        # Another key, and the same key of another project or user.
        for other in (self.key('other'), self.key(project='other'),
                      self.key(user='other')):
            self.assertIsNone(self.made(other))

    def test_key_cannot_be_used_for_another_lease(self):
        lease = self.make(self.key())
        for body in ({}, {**BODY, 'name': 'other'}):
            refused = self.assertRaises(
                errors.Conflict, self.made, self.key(body=body))
            self.assertIn(f'another lease, {lease["id"]}', str(refused))
        self.assertRaises(errors.Conflict, self.make, self.key())
        self.assertEqual(1, self.count_rows()['leases'])

    def test_deleted_lease_is_not_created_again(self):
        lease = self.make(self.key())
        driven.withdraw(self.leases, lease['id'])
        refused = self.assertRaises(errors.Conflict, self.made, self.key())
        self.assertIn('was deleted. Use a new key', str(refused))

    def test_lease_being_deleted_is_not_created_again(self):
        lease = self.running_lease(0, 100)
        key = self.key()
        with self.database.begin() as connection:
            idempotency.keep(connection, base.NOW, key, lease['id'])
        self.assertEqual(lease['id'], self.made(key)['id'])
        self.cloud.stubborn.update(base.servers_of(lease))
        self.lifecycle.lease_end.delete(lease['id'])
        self.assertEqual('DELETING', self.status(lease))
        self.assertRaises(errors.Conflict, self.made, key)

    def test_refused_lease_does_not_use_up_its_key(self):
        self.lease(100, 200, count=4)
        self.assertRaises(errors.Refused, self.make, self.key())
        self.assertEqual(0, self.count_rows()['request_keys'])

    def test_keys_are_deleted_after_a_day(self):
        self.make(self.key())
        for seconds, left in ((idempotency.KEEP, 1), (1, 0)):
            self.clock.advance(seconds)
            idempotency.trim(self.database, self.clock.now())
            self.assertEqual(left, self.count_rows()['request_keys'])

    def test_concurrent_requests_create_one_lease(self):
        """Each thread has a connection of its own, like a process."""
        together, answers = threading.Barrier(4), []

        def ask(by):
            together.wait(20)
            try:
                answers.append(self.make(self.key(), by)['id'])
            except errors.Conflict:
                answers.append(self.made(self.key())['id'])

        threads = []
        for _number in range(4):
            database = self.db.connect()
            threads.append(self.in_thread(lambda by=leases.Leases(
                database, self.clock, admissions.Admission(
                    database, self.clock), self.types): ask(by)))
        for thread in threads:
            thread.join(60)
        self.assertEqual(4, len(answers))
        self.assertEqual(1, len(set(answers)))
        self.assertEqual((1, 1), (
            len(self.scalars(models.Lease.id)),
            len(self.scalars(models.RequestKey.digest))))
