# SPDX-License-Identifier: Apache-2.0


import datetime
import types
from unittest import mock

from oslo_utils import timeutils

from blazar_nova.compat import server_deletion
from tests.unit import base


class TestNextStep(base.TestCase):
    """The next step after requested deletions."""

    def step(self, *asked, cell='cell', state=('error', None),
             request_id='req-blazar-1', started=0):
        """Return the next step.

        :param asked: deletions, the last one first: whether it failed, the
            user, and how many seconds ago
        :param state: the state of the server, and its task
        :param request_id: the id of all deletions
        :param started: how many seconds ago they were requested, if they were
            updated since
        """
        now = timeutils.utcnow()

        def before(seconds):
            return now - datetime.timedelta(seconds=seconds)

        actions = [types.SimpleNamespace(
            action='delete', message='Error' if failed else None, user_id=user,
            request_id=request_id, updated_at=before(seconds),
            start_time=before(started))
            for failed, user, seconds in asked]
        actions.append(types.SimpleNamespace(action='create'))
        with mock.patch('nova.objects.InstanceActionList.'
                        'get_by_instance_uuid', return_value=actions):
            return server_deletion.next_step(
                types.SimpleNamespace(cell_uuid=cell), types.SimpleNamespace(
                    uuid='server', vm_state=state[0], task_state=state[1],
                    updated_at=before(0)))

    def assert_waits(self, seconds, step):
        self.assertTrue(seconds - 5 < step.seconds <= seconds, step)

    def test_the_first_is_asked_for_at_once_as_the_owner(self):
        for step in self.step(), self.step(cell=None):
            self.assertEqual((0, True, False), step)

    def test_nova_is_given_time(self):
        for state in (('active', 'deleting'), ('stopped', 'soft-deleting'),
                      ('deleted', None)):
            self.assert_waits(60, self.step((False, 'user', 0), state=state))
            self.assert_waits(20, self.step((False, 'user', 40), state=state))
            self.assertEqual((0, True, False), self.step(
                (False, 'user', 61), state=state))

    def test_a_clock_of_nova_that_is_ahead_delays_nothing(self):
        """An action of this process has its own time of the request."""
        for started, seconds in ((0, 60), (40, 20), (61, 0)):
            step = self.step((False, 'user', -3600), started=started,
                             state=('active', 'deleting'))
            self.assertTrue(seconds - 5 <= step.seconds <= seconds, step)

    def test_a_date_that_is_ahead_is_waited_for_once_at_most(self):
        for ahead, seconds in ((1, 60), (30, 60), (3600, 0)):
            step = self.step((False, 'user', -ahead), started=-ahead,
                             state=('active', 'deleting'))
            self.assertTrue(seconds - 5 <= step.seconds <= seconds, step)

    def test_the_deletions_of_users_do_not_count(self):
        for state in (('active', None), ('soft-delete', None),
                      ('active', 'deleting'), ('active', 'soft-deleting')):
            for request_id in 'req-1', None:
                self.assertEqual((0, True, False), self.step(
                    *[(False, 'user', 0)] * 8, state=state,
                    request_id=request_id))

    def test_a_server_that_is_there_again_is_deleted_at_once(self):
        for state in (('active', None), ('soft-delete', None),
                      ('active', 'restoring'), ('stopped', None)):
            for failed in False, True:
                self.assertEqual(
                    (0, not failed, failed), self.step(
                        *[(failed, 'user', 0)] * 8, state=state))

    def test_one_that_failed_is_tried_in_the_other_way_at_once(self):
        self.assertEqual((0, False, True), self.step((True, 'user', 0)))
        self.assertEqual((0, True, True), self.step((True, None, 0)))

    def test_then_again_and_again_in_turns_with_pauses_that_grow(self):
        failed = [(True, 'user', 0)]
        pauses = []
        for number in range(7):
            failed.insert(0, (True, 'user' if number % 2 else None, 0))
            step = self.step(*failed)
            self.assertEqual(number % 2 == 0, step.as_owner)
            pauses.append(round(step.seconds, -1))
        self.assertEqual([120, 240, 480, 600, 600, 600, 600], pauses)
