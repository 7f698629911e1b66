# SPDX-License-Identifier: Apache-2.0

"""The last check before a message to a conductor."""

from unittest import mock

from nova import context as nova_context
from nova import objects
import oslo_messaging

from blazar_nova.compat import gated_casts
from blazar_nova.compat import process
from tests.unit import base


class TestGatedCast(base.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        process.CONF([], default_config_files=[], default_config_dirs=[])
        self.addCleanup(process.CONF.reset)
        self.transport = oslo_messaging.get_rpc_transport(
            process.CONF, 'fake://')
        self.steps = []
        self.error = None
        for patch in (mock.patch('nova.rpc.TRANSPORT', self.transport),
                      mock.patch.object(self.transport, '_send', self.send)):
            patch.start()
            self.addCleanup(patch.stop)

    def send(self, _target, _context, message, retry, **_options):
        self.steps.append((message['method'], retry))

    def check(self):
        self.steps.append('checked')
        if self.error:
            raise self.error

    def casts(self):
        api = gated_casts.task_api(self.check)
        context = nova_context.get_admin_context()
        api.rebuild_instance(
            context, objects.Instance(), None, None, [], None, {}, None)
        api.schedule_and_build_instances(
            context, [], [], None, None, [], None, None)

    def test_each_message_is_checked_before_it_is_sent(self):
        self.casts()
        self.assertEqual(
            ['checked', ('rebuild_instance', 1), 'checked',
             ('schedule_and_build_instances', 1)], self.steps)

    def test_refused_message_is_not_sent(self):
        self.error = RuntimeError('too late')
        self.assertIs(self.error, self.assertRaises(
            RuntimeError, self.casts))
        self.assertEqual(['checked'], self.steps)
