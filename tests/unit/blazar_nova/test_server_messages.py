# SPDX-License-Identifier: Apache-2.0

from unittest import mock

import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import views
from blazar_nova.compat import reserved_view
from blazar_nova.services import server_messages
from tests.unit import base


class TestMetadata(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.lease_id = self.lease(3600, 7200)['id']
        self.telling = server_messages.ServerMessages(self.leases.lookup,
                                                      self.clock)

    def held(self):
        with self.database.reader() as session:
            server_id, = session.scalars(sa.select(models.Booking.server_id))
        return self.telling.held([server_id])[server_id]

    def words(self):
        return self.held().metadata

    def test_lease_next_shows_why_server_is_not_built(self):
        for seconds, begin in ((3660, 'It is built when its lease starts. '),
                               (1, 'It is due, and no blazar-listener has ')):
            self.clock.advance(seconds)
            following = self.words()['lease_next']
            self.assertTrue(following.startswith(begin), following)
            self.assertLessEqual(len(following), 255)

    def test_server_that_will_not_be_built_has_error_and_fault(self):
        self.assertIsNone(self.held().fault)
        self.clock.advance(3600)
        self.lifecycle.lease_start.give_up(self.lease_id, 'start_lease')
        held = self.held()
        self.assertEqual('ERROR', held.metadata['lease_status'])
        self.assertEqual(reserved_view.Fault(
            'The server will not be built. The build of its servers '
            'could not be sent.', clocks.utc(self.clock.now())), held.fault)

    def test_failed_start_is_shown_as_failed_event(self):
        def start():
            action = self.telling.action(self.server_id, 'project')
            return {event.name: event.well for event in action.events}[
                'start_lease']

        self.server_id, = base.servers_of(
            views.get(self.database, self.lease_id))
        self.assertIsNone(start())
        self.clock.advance(3600)
        with self.database.writer() as session:
            session.execute(sa.update(models.Event).where(
                models.Event.event_type == 'start_lease').values(
                    status='DONE'))
        self.assertIs(True, start())
        self.lifecycle.lease_start.give_up(self.lease_id, 'start_lease')
        self.assertIs(False, start())

    def test_warnings_are_shown_and_not_stored(self):
        self.assertNotIn('lease_warnings', self.words())
        with self.database.writer() as session:
            session.get(models.Lease, self.lease_id).warnings = [
                'Its image is gone.', 'x' * 300]
        words = self.words()
        self.assertEqual(('Its image is gone. x', 255), (
            words['lease_warnings'][:20], len(words['lease_warnings'])))
        self.assertEqual({'a': 'b'}, server_messages.own({**words, 'a': 'b'}))


class TestUnavailable(base.LeaseTestCase):
    """A database that does not answer is not queried for a while."""

    def setUp(self):
        super().setUp()
        self.host('one', VCPU=2)
        self.server_id, = base.servers_of(self.lease(50, 100, project='mine'))
        self.telling = server_messages.ServerMessages(self.leases.lookup,
                                                      self.clock)

    def is_told(self):
        return (bool(self.telling.held([self.server_id])), bool(
            self.telling.action(self.server_id, 'mine')))

    def test_failed_lookup_suspends_lookups_for_30_seconds(self):
        self.assertEqual((True, True), self.is_told())
        for wrong in (errors.DatabaseUnavailable(), RuntimeError('Locked.')):
            def fail(*_args, wrong=wrong):
                raise wrong

            with mock.patch.object(self.leases.lookup, 'held', fail):
                self.assertEqual((False, False), self.is_told())
            # It would answer now, but is not queried.
            self.assertEqual((False, False), self.is_told())
            self.clock.advance(29)
            self.assertEqual((False, False), self.is_told())
            self.clock.advance(1)
            self.assertEqual((True, True), self.is_told())

    def test_action_is_hidden_from_other_projects(self):
        self.assertIsNone(self.telling.action(self.server_id, 'other'))
