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


import socket
import types
from unittest import mock

import fixtures
from oslo_config import cfg
import oslo_messaging
from oslo_messaging._drivers import amqpdriver

from blazar_core import errors
from blazar_nova.compat import service
from blazar_nova import wiring
from tests.unit import base


class TestNotificationListener(base.TestCase):

    def test_it_does_not_wake_up_all_the_time_after_a_message(self):
        """What is set for that is private to oslo.messaging."""
        waited = []

        def consume(timeout):
            waited.append(timeout)
            listener.incoming.append(types.SimpleNamespace(unique_id='one'))

        self.useFixture(fixtures.MonkeyPatch(
            'oslo_messaging._drivers.amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN',
            amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN))
        self.useFixture(fixtures.MonkeyPatch(
            'oslo_messaging.get_notification_listener',
            lambda *args, **options: None))
        service.notification_listener('news', print)
        listener = amqpdriver.AMQPListener(
            types.SimpleNamespace(prefetch_size=0),
            types.SimpleNamespace(consume=consume))
        self.assertEqual(['one'], [one.unique_id for one in listener.poll()])
        self.assertEqual([service.ACKNOWLEDGE_SECONDS], waited)


class TestNotify(base.TestCase):

    def test_it_does_not_wait_until_a_message_bus_is_back(self):
        with socket.socket() as taken:
            # Bound, and nobody listens.
            taken.bind(('127.0.0.1', 0))
            conf = cfg.ConfigOpts()
            conf([])
            notifier = oslo_messaging.Notifier(
                oslo_messaging.get_notification_transport(
                    conf, f'rabbit://127.0.0.1:{taken.getsockname()[1]}/'),
                driver='messagingv2', topics=['news'])
            self.assertEqual(-1, notifier.retry)
            self.useFixture(fixtures.MonkeyPatch(
                'nova.rpc.NOTIFIER', notifier))
            log = self.useFixture(fixtures.FakeLogger())
            with mock.patch('blazar_core.views.payload', dict):
                thread = self.in_thread(lambda: service.notify(
                    'lease.create', {'id': 'a-lease'}))
                thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertIn('Could not send notification to news', log.output)


class TestLostAfter(base.TestCase):
    """Nobody may be at work on a build that is taken to be lost."""

    def conf(self, seconds, longest=1800):
        return types.SimpleNamespace(
            long_rpc_timeout=longest,
            blazar=types.SimpleNamespace(lost_build_seconds=seconds))

    def test_it_is_longer_than_a_conductor_may_wait(self):
        self.assertEqual(1860, wiring.lost_after(self.conf(None)))
        self.assertEqual(80, wiring.lost_after(self.conf(None, 20)))
        self.assertEqual(1801, wiring.lost_after(self.conf(1801)))

    def test_what_is_not_is_refused_with_what_to_write(self):
        for seconds in (120, 1800):
            refused = self.assertRaises(
                errors.ConfigurationError, wiring.lost_after,
                self.conf(seconds))
            for words in (f'lost_build_seconds is {seconds}',
                          'long_rpc_timeout, 1800 seconds',
                          'Write a larger number'):
                self.assertIn(words, str(refused))
