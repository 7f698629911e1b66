# SPDX-License-Identifier: Apache-2.0

"""Notifications about servers without a lease that would have ended."""

from unittest import mock

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_nova.services import end_notices
from tests import databases
from tests.unit import base

load_tests = databases.load_tests

State = cloud_api.ServerState
HOUR = 3600


class TestEndNotices(base.LeaseTestCase):

    def setUp(self):
        super().setUp()
        self.said = []
        self.one = self.another()

    def another(self, notify=None):
        """Return another sender of notifications."""
        return end_notices.EndNotices(
            self.database, self.clock, self.cloud,
            notify or (lambda *said: self.said.append(said)))

    def note(self, *server_ids, length=HOUR, user='user', runs=True):
        now = self.clock.now()
        self.one.note('project', user, server_ids,
                      model.Window(now, now + length))
        for one in server_ids:
            if runs:
                self.cloud.servers[one] = cloud_api.ObservedServer(
                    State.RUNNING, 'host')

    def told(self):
        """Return the servers of each notification."""
        return [payload['server_ids'] for _event, payload in self.said]

    def ids(self):
        return sorted(self.scalars(models.WouldEnd.server_id))

    def test_notification_is_sent_at_would_be_end(self):
        self.note('b', 'a')
        self.note('c', user='other')
        self.clock.advance(HOUR - 1)
        self.one.tell()
        self.assertEqual([], self.said)
        self.clock.advance(1)
        self.one.tell()
        event, payload = self.said[1]
        self.assertEqual(('lease.event.would_end', {
            'version': '1.0', 'server_ids': ['a', 'b'],
            'project_id': 'project', 'user_id': 'user',
            'created_at': '2027-01-15T08:00:00.000000',
            'end_date': '2027-01-15T09:00:00.000000'}), (event, payload))
        self.assertEqual([['c'], ['a', 'b']], self.told())
        self.assertEqual(['a', 'b', 'c'], [
            row.server_id for row in end_notices.told(self.database)])
        self.assertEqual([], self.cloud.deleted)

    def test_clock_that_was_ahead_does_not_delay_notification(self):
        self.note('a')
        self.clock.step(3 * HOUR)
        self.assertRaises(RuntimeError, self.another(
            mock.Mock(side_effect=RuntimeError)).tell)
        self.clock.step(-3 * HOUR)
        self.clock.advance(HOUR)
        self.one.tell()
        self.assertEqual([['a']], self.told())

    def test_notification_is_sent_once(self):
        self.note('a')
        self.clock.advance(HOUR)
        for _time in range(3):
            self.one.tell()
            self.another().tell()
            self.clock.advance(HOUR)
        self.assertEqual([['a']], self.told())

    def test_concurrent_senders_notify_once(self):
        def tell(*said):
            self.said.append(said)
            self.another().tell()

        self.note('a', 'b')
        self.clock.advance(HOUR)
        self.another(tell).tell()
        self.assertEqual([['a', 'b']], self.told())

    def test_senders_that_found_same_servers_notify_once(self):
        self.note('a', 'b')
        self.clock.advance(HOUR)
        look, first = self.cloud.look, []

        def look_while_another_tells(server_id):
            if not first:
                first.append(True)
                self.another().tell()
            return look(server_id)

        self.cloud.look = look_while_another_tells
        self.one.tell()
        self.assertEqual([['a', 'b']], self.told())

    def test_notification_is_sent_after_sender_death(self):
        class Died(BaseException):
            """The process dies."""

        def die(*_said):
            raise Died

        self.note('a')
        self.clock.advance(HOUR)
        self.assertRaises(Died, self.another(die).tell)
        self.one.tell()
        self.assertEqual([], self.said)
        self.clock.advance(60)
        self.one.tell()
        self.one.tell()
        self.assertEqual([['a']], self.told())

    def test_deleted_or_leased_servers_are_dropped(self):
        self.host('host', VCPU=4)
        self.note('gone', runs=False)
        lease = self.running_lease(0, 2 * HOUR)
        leased, = lease['reservations'][0]['servers']
        self.note(leased, runs=False)
        self.note('stays')
        self.clock.advance(HOUR)
        self.one.tell()
        self.assertEqual([['stays']], self.told())
        self.assertEqual(['stays'], self.ids())

    def test_no_notification_for_server_being_deleted(self):
        self.note('a')
        self.cloud.servers['a'] = cloud_api.ObservedServer(State.LEAVING)
        self.clock.advance(HOUR)
        self.one.tell()
        self.assertEqual(['a'], self.ids())
        del self.cloud.servers['a']
        self.one.tell()
        self.assertEqual(([], []), (self.said, self.ids()))

    def test_unreachable_server_does_not_block_others(self):
        self.note('a', 'b')
        self.clock.advance(HOUR)
        look, broken = self.cloud.look, ['a']

        def fail(server_id):
            if server_id in broken:
                raise errors.CloudUnavailable('the cell does not answer')
            return look(server_id)

        self.cloud.look = fail
        self.one.tell()
        self.assertEqual([['b']], self.told())
        broken.clear()
        # Many servers like that must not keep others from their turn.
        self.one.tell()
        self.assertEqual([['b']], self.told())
        self.clock.advance(600)
        self.one.tell()
        self.assertEqual([['b'], ['a']], self.told())

    def test_failure_to_record_servers_is_not_raised(self):
        self.note('a')
        self.note('b', 'a')
        self.assertEqual(['a'], self.ids())

    def test_old_records_are_trimmed(self):
        self.note('told')
        self.clock.advance(HOUR)
        self.one.tell()
        self.note('not yet', length=2 * end_notices.KEEP)
        self.note('never', length=1)
        self.clock.advance(end_notices.KEEP)
        self.one.trim()
        self.assertEqual(['never', 'not yet', 'told'], self.ids())
        self.clock.advance(2)
        self.one.trim()
        self.assertEqual(['not yet'], self.ids())

    def test_end_date_is_indexed(self):
        self.assertIn(('end_date',), [
            tuple(index['column_names']) for index in
            sa.inspect(self.database.engine).get_indexes('would_end')])
