# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.db import models
from blazar_nova.api import telling
from tests.unit import base


class TestMetadata(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.lease_id = self.lease(3600, 7200)['id']
        self.telling = telling.Telling(self.leases.servers, self.clock)

    def server_ids(self):
        with self.database.reader() as session:
            return [*session.scalars(sa.select(models.Booking.server_id))]

    def words(self):
        server_id, = self.server_ids()
        return self.telling.words([server_id])[server_id].metadata

    def test_a_server_that_is_due_and_not_started(self):
        for seconds, begin in ((3660, 'It is built when its lease starts. '),
                               (1, 'It is due, and no blazar-listener has ')):
            self.clock.advance(seconds)
            following = self.words()['lease_next']
            self.assertTrue(following.startswith(begin), following)
            self.assertLessEqual(len(following), 255)

    def test_warnings_are_shown_and_not_stored(self):
        self.assertNotIn('lease_warnings', self.words())
        with self.database.writer() as session:
            session.get(models.Lease, self.lease_id).warnings = [
                'Its image is gone.', 'x' * 300]
        words = self.words()
        self.assertEqual(('Its image is gone. x', 255), (
            words['lease_warnings'][:20], len(words['lease_warnings'])))
        self.assertEqual({'a': 'b'}, telling.own({**words, 'a': 'b'}))

    def test_one_that_will_not_be_built_says_why(self):
        server_id, = self.server_ids()
        for status, failure in (
                ('PENDING', None), ('STARTING', None),
                ('ERROR', f'It is not built any more. Lease {self.lease_id} '
                          f'is ERROR. No.'),
                ('TERMINATING', None)):
            with self.database.writer() as session:
                lease = session.get(models.Lease, self.lease_id)
                lease.status, lease.status_reason = status, 'No.'
            self.assertEqual(failure, self.telling.words(
                [server_id])[server_id].failure)


class TestAsking(base.LeaseTestCase):
    """Books that do not answer are left alone for a while."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.server_id, = base.servers_of(self.lease(50, 100, project='mine'))
        self.telling = telling.Telling(self.leases.servers, self.clock)

    def is_told(self):
        return (bool(self.telling.words([self.server_id])), bool(
            self.telling.action(self.server_id, 'mine')))

    def test_that_do_not_answer(self):
        self.assertEqual((True, True), self.is_told())
        for wrong in (errors.BooksUnavailable(), RuntimeError('Locked.')):
            def fail(*_args, wrong=wrong):
                raise wrong

            with mock.patch.object(self.leases.servers, 'held', fail):
                self.assertEqual((False, False), self.is_told())
            # It would be told, and is not asked for.
            self.assertEqual((False, False), self.is_told())
            self.clock.advance(29)
            self.assertEqual((False, False), self.is_told())
            self.clock.advance(1)
            self.assertEqual((True, True), self.is_told())

    def test_to_another_project_nothing_is_told(self):
        self.assertIsNone(self.telling.action(self.server_id, 'other'))
