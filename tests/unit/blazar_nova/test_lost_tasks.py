# SPDX-License-Identifier: Apache-2.0

"""Which tasks of servers count as lost, by Nova's instance actions."""

import datetime
import types
from unittest import mock

from oslo_utils import timeutils

from blazar_nova.compat import compute_hosts
from blazar_nova.compat import lost_tasks
from tests.unit import base


class TestLost(base.TestCase):

    def is_lost(self, task, *actions, age=601, up=True):
        """Return whether a task is reset.

        :param actions: the last one first: its name, and for each of its
            events whether it has finished
        :param age: seconds since the server was changed
        """
        instance = mock.Mock(
            uuid='server', host='host', task_state=task,
            updated_at=timeutils.utcnow() - datetime.timedelta(seconds=age))
        rows = [types.SimpleNamespace(id=number, action=name)
                for number, (name, *_events) in enumerate(actions)]

        def events(_context, number):
            return types.SimpleNamespace(objects=[
                types.SimpleNamespace(finish_time=1 if is_over else None)
                for is_over in actions[number][1:]])

        records = mock.MagicMock()
        records.InstanceActionList.get_by_instance_uuid.return_value = rows
        records.InstanceActionEventList.get_by_action = events
        with mock.patch.object(lost_tasks, 'objects', records), (
                mock.patch.object(compute_hosts, 'state_of',
                                  return_value=mock.Mock(up=up))):
            lost_tasks.reset(None, instance)
        return instance.task_state is None

    def test_request_without_event_is_lost_after_ten_minutes(self):
        asked = ('suspend',), ('start', True)
        self.assertTrue(self.is_lost('suspending', *asked))
        self.assertFalse(self.is_lost('suspending', *asked, age=590))
        self.assertFalse(self.is_lost('suspending', *asked, up=False))
        # A conductor receives it.
        self.assertTrue(self.is_lost('migrating', ('live-migration',),
                                     up=False))

    def test_request_that_has_begun_is_not_lost(self):
        for task, *actions in (
                ('suspending', ('suspend', False)),
                ('migrating', ('live-migration', True)),
                ('resize_prep', ('migrate', True)),
                ('resize_reverting', ('revertResize', True)),
                ('shelving-offloading', ('shelveOffload', True))):
            self.assertFalse(self.is_lost(task, *actions), task)
            # Users may lock a server at any time.
            self.assertFalse(self.is_lost(task, ('lock',), *actions), task)
            self.assertFalse(self.is_lost(
                task, ('live_migration_cancel',), *actions), task)

    def test_request_without_action_is_lost(self):
        for task in ('suspending', 'migrating', 'rebuilding', 'resize_prep',
                     'image_snapshot_pending'):
            for actions in ((), (('lock',), ('create', True)),
                            (('start', True), ('suspend', True))):
                self.assertTrue(self.is_lost(task, *actions), task)
        # An image was created before.
        self.assertTrue(self.is_lost(
            'image_snapshot_pending', ('createImage', True)))

    def test_task_of_nova_compute_without_action_is_not_lost(self):
        # It offloads servers that were shelved for long.
        for actions in (), (('shelve', True),), (('stop', True),):
            self.assertFalse(self.is_lost('shelving-offloading', *actions))
        # It stops a server that it rebuilds.
        self.assertFalse(self.is_lost('powering-off', ('rebuild', False)))
        self.assertFalse(self.is_lost('networking', ('reboot',)))
