#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.


import datetime
import types
from unittest import mock

from oslo_utils import timeutils

from blazar_nova.compat import deletion
from tests.unit import base


class TestNextStep(base.TestCase):
    """What follows upon deletions that were asked for."""

    def step(self, *asked, cell='cell', task_state=None, ago=0):
        """The next one.

        :param asked: deletions, the last one first: whether it failed, who
            asked, and how many seconds ago
        """
        now = timeutils.utcnow()

        def before(seconds):
            return now - datetime.timedelta(seconds=seconds)

        actions = [types.SimpleNamespace(
            action='delete', message='Error' if failed else None, user_id=user,
            updated_at=before(seconds)) for failed, user, seconds in asked]
        actions.append(types.SimpleNamespace(action='create'))
        with mock.patch('nova.objects.InstanceActionList.'
                        'get_by_instance_uuid', return_value=actions):
            return deletion.next_step(
                types.SimpleNamespace(cell_uuid=cell), types.SimpleNamespace(
                    uuid='server', task_state=task_state,
                    updated_at=before(ago)))

    def assert_waits(self, seconds, step):
        self.assertTrue(seconds - 5 < step.seconds <= seconds, step)

    def test_the_first_is_asked_for_at_once_as_the_owner(self):
        for step in self.step(), self.step(cell=None):
            self.assertEqual((0, True, False), step)

    def test_nova_is_given_time(self):
        self.assert_waits(60, self.step((False, 'user', 0)))
        self.assert_waits(20, self.step((False, 'user', 40)))
        self.assertEqual((0, True, False), self.step((False, 'user', 61)))
        # One of which nothing is written yet.
        self.assert_waits(60, self.step(task_state='deleting'))
        self.assertEqual(0, self.step(task_state='deleting', ago=61).seconds)

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
