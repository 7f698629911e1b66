# SPDX-License-Identifier: Apache-2.0

from unittest import mock

from blazar_core.common import errors
from blazar_nova.api import telling
from tests.unit import base


class TestAsking(base.LeaseTestCase):
    """Books that do not answer are left alone for a while."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.server_id, = base.servers_of(self.lease(50, 100, project='mine'))
        self.now = 0.0
        self.telling = telling.Telling(self.leases.servers, self)

    def elapsed(self):
        return self.now

    def is_told(self):
        return (bool(self.telling.metadata([self.server_id])), bool(
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
            self.now += 29
            self.assertEqual((False, False), self.is_told())
            self.now += 1
            self.assertEqual((True, True), self.is_told())

    def test_to_another_project_nothing_is_told(self):
        self.assertIsNone(self.telling.action(self.server_id, 'other'))
