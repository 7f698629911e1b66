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

    def test_first_deletion_is_requested_at_once_as_owner(self):
        for step in self.step(), self.step(cell=None):
            self.assertEqual((0, True, False), step)

    def test_deletion_in_progress_is_repeated_after_a_minute(self):
        for state in (('active', 'deleting'), ('stopped', 'soft-deleting'),
                      ('deleted', None)):
            self.assert_waits(60, self.step((False, 'user', 0), state=state))
            self.assert_waits(20, self.step((False, 'user', 40), state=state))
            self.assertEqual((0, True, False), self.step(
                (False, 'user', 61), state=state))

    def test_clock_of_nova_that_is_ahead_causes_no_delay(self):
        """An action of this process has its own time of the request."""
        for started, seconds in ((0, 60), (40, 20), (61, 0)):
            step = self.step((False, 'user', -3600), started=started,
                             state=('active', 'deleting'))
            self.assertTrue(seconds - 5 <= step.seconds <= seconds, step)

    def test_start_time_ahead_delays_by_one_minute_at_most(self):
        for ahead, seconds in ((1, 60), (30, 60), (3600, 0)):
            step = self.step((False, 'user', -ahead), started=-ahead,
                             state=('active', 'deleting'))
            self.assertTrue(seconds - 5 <= step.seconds <= seconds, step)

    def test_deletions_requested_by_users_do_not_count(self):
        for state in (('active', None), ('soft-delete', None),
                      ('active', 'deleting'), ('active', 'soft-deleting')):
            for request_id in 'req-1', None:
                self.assertEqual((0, True, False), self.step(
                    *[(False, 'user', 0)] * 8, state=state,
                    request_id=request_id))

    def test_restored_server_is_deleted_at_once(self):
        for state in (('active', None), ('soft-delete', None),
                      ('active', 'restoring'), ('stopped', None)):
            for failed in False, True:
                self.assertEqual(
                    (0, not failed, failed), self.step(
                        *[(failed, 'user', 0)] * 8, state=state))

    def test_failed_deletion_is_retried_at_once_as_other_user(self):
        self.assertEqual((0, False, True), self.step((True, 'user', 0)))
        self.assertEqual((0, True, True), self.step((True, None, 0)))

    def test_later_retries_alternate_users_with_growing_pauses(self):
        failed = [(True, 'user', 0)]
        pauses = []
        for number in range(7):
            failed.insert(0, (True, 'user' if number % 2 else None, 0))
            step = self.step(*failed)
            self.assertEqual(number % 2 == 0, step.as_owner)
            pauses.append(round(step.seconds, -1))
        self.assertEqual([120, 240, 480, 600, 600, 600, 600], pauses)
