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


import types

import fixtures
from oslo_messaging._drivers import amqpdriver

from blazar_nova.compat import service
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
