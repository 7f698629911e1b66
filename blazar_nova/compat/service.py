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

"""A process of ours that speaks with Nova: configuration, messages."""

import dataclasses
import typing as ty

import nova.conf
from nova import config as nova_config
from nova import context as nova_context
from nova import objects
from nova import rpc
from oslo_log import log as logging
import oslo_messaging
from oslo_messaging._drivers import amqpdriver

from blazar_core import model
from blazar_core import views
from blazar_nova.compat import demand

__all__ = ['CONF', 'Handler', 'Told', 'configure', 'notification_listener',
           'notify', 'told']

LOG = logging.getLogger(__name__)

#: Nova's configuration; ours stands in the same files.
CONF = nova.conf.CONF

#: Told of an event's type, its payload and its publisher.
Handler: ty.TypeAlias = ty.Callable[[str, dict[str, ty.Any], str], None]


def configure(argv: list[str], prog: str) -> None:
    """Read nova.conf and set up what Nova's objects need."""
    objects.register_all()
    nova_config.parse_args(argv)
    logging.setup(CONF, prog)
    objects.Service.enable_min_version_cache()


def notify(event_type: str, lease: dict[str, ty.Any]) -> None:
    """Publish an event of a lease where Nova publishes its own.

    What cannot be published is logged: it is news, and no reason to fail,
    nor to wait until a message bus is back: that it is sent once more is for
    a connection that is as old as a bus that was restarted.

    :param lease: as :func:`blazar_core.views.describe` has it
    """
    try:
        # oslo.messaging takes 0 for what is configured, which is for ever.
        rpc.NOTIFIER.prepare(publisher_id='blazar.lease', retry=1).info(
            nova_context.get_admin_context(), event_type,
            views.payload(lease))
    except Exception:
        LOG.exception('Lease %s: %s could not be published',
                      lease['id'], event_type)


#: After each message oslo.messaging wakes up time and again to see whether it
#: may be acknowledged: a thousandth of a second later, then two, four ... That
#: costs more than the message itself; of ours nobody waits for it.
ACKNOWLEDGE_SECONDS = 0.1


def notification_listener(topic: str, handler: Handler) -> ty.Any:
    """Hands every notification of a topic to a function, from a thread.

    Several processes that listen share the notifications among them.

    :returns: what has ``start()``, ``stop()`` and ``wait()``
    """
    amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN = ACKNOWLEDGE_SECONDS
    return oslo_messaging.get_notification_listener(
        rpc.NOTIFICATION_TRANSPORT, [oslo_messaging.Target(topic=topic)],
        [_Endpoint(handler)], executor='threading')


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """A server that has just come to a host and takes so much of it there,
    or (None) has left it.
    """

    server_id: str
    service_host: str
    node: str
    takes: model.Resources | None


def told(event_type: str, payload: dict[str, ty.Any]) -> Told | None:
    """What a notification tells of a server, if that can be relied on.

    What it takes follows from its flavor, but for classes that its image or
    its ports ask for: :func:`blazar_core.books.tell` keeps to hosts that
    have none of those.
    """
    data = payload.get('nova_object.data', {})
    server_id, service_host, node = map(data.get, ('uuid', 'host', 'node'))
    if not server_id or not service_host or not node:
        return None
    if event_type == 'instance.delete.end':
        return Told(server_id, service_host, node, None)
    flavor = data.get('flavor', {}).get('nova_object.data', {})
    if event_type != 'instance.create.end' or flavor.get(
            'extra_specs') is None:
        return None
    # A server without an image has its root disk on a volume.
    return Told(server_id, service_host, node, demand.resources_of_flavor(
        flavor, on_volume=not data['image_uuid']))


class _Endpoint:
    """All priorities alike: failures are published as errors."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def info(self, context: ty.Any, publisher_id: str, event_type: str,
             payload: dict[str, ty.Any], metadata: ty.Any) -> None:
        self._handler(event_type, payload, publisher_id)

    warn = error = audit = debug = critical = sample = info
