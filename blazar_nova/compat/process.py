# SPDX-License-Identifier: Apache-2.0

"""Processes of ours that use Nova's configuration and message bus."""

import atexit
import collections
import contextlib
import dataclasses
import functools
import os
import threading
import typing as ty

import nova.conf
from nova import config as nova_config
from nova import context as nova_context
from nova import objects
from nova import rpc
from nova.scheduler.client import report
from oslo_limit import opts as limit_opts
from oslo_log import log as logging
import oslo_messaging
from oslo_messaging._drivers import amqpdriver

from blazar_core.common import model
from blazar_nova.compat import server_demand

LOG = logging.getLogger(__name__)

#: Nova's configuration; our options are in the same files.
CONF = nova.conf.CONF

#: Called with an event's type, its payload and its publisher.
Handler: ty.TypeAlias = ty.Callable[[str, dict[str, ty.Any], str], None]


#: Seconds in which placement and keystone must answer, unless an operator has
#: set another timeout.
_ANSWER_SECONDS = 30


def bound_waiting() -> None:
    """Set a timeout for requests to placement and for keystone's limits, where
    Nova waits without one.
    """
    limit_opts.register_opts(CONF)
    for group in ('placement', 'oslo_limit'):
        CONF.set_default('timeout', _ANSWER_SECONDS, group)
    report.SchedulerReportClient._create_client = _unpaced


_create_client = report.SchedulerReportClient._create_client


@functools.wraps(_create_client)
def _unpaced(client: ty.Any) -> ty.Any:
    """Create an adapter for placement that sends each request at once.

    keystoneauth paces the requests of an adapter by the time of its creation,
    even without a limit: if the clock was ahead then and has been corrected,
    each request would wait until that time.
    """
    adapter = _create_client(client)
    adapter.request = functools.partial(
        adapter.request, rate_semaphore=contextlib.nullcontext())
    return adapter


def configure(argv: list[str], prog: str, quiet: bool = False) -> None:
    """Read nova.conf and set up what Nova's objects need.

    :param quiet: whether to drop, unless debug is set, messages of libraries
        at INFO, and our own if they would be written to standard error
    """
    objects.register_all()
    nova_config.parse_args(argv)
    is_logged = CONF.log_file or CONF.log_dir or CONF.use_journal
    if not is_logged:
        # oslo.log would use stdout, which is for results.
        CONF.set_override('use_stderr', True)
    logging.setup(CONF, prog)
    if quiet and not logging.is_debug_enabled(CONF):
        logging.getLogger(None).logger.setLevel(logging.WARNING)
        # On a terminal they would be mixed with the results.
        for name in ('blazar_core', 'blazar_nova') if is_logged else ():
            logging.getLogger(name).logger.setLevel(logging.INFO)
    objects.Service.enable_min_version_cache()


#: The most events that wait while the message bus is slow or down, and the
#: seconds for which a process waits for them when it ends.
_WAITING = 1000
_FLUSH_SECONDS = 5


class Outbox:
    """Sends events one after the other, from a thread of its own.

    If the message bus is down, a request for a lease would otherwise wait,
    until its client sends it again and gets a second lease. The thread is
    started by the first event, in the process that has the event.

    :param send: sends an event; returns when it is sent, or cannot be
    :param most: the most events that may wait; then the oldest is dropped
    """

    def __init__(self, send: ty.Callable[[str, dict[str, ty.Any]], None],
                 most: int = _WAITING) -> None:
        self._send = send
        self._most = most
        self.empty()

    def empty(self) -> None:
        """Reset to the initial state after a fork: the parent sends its own
        events, and the child has no thread.
        """
        self._changed = threading.Condition()
        self._waiting: collections.deque[
            tuple[str, dict[str, ty.Any]]] = collections.deque()
        self._busy = False
        self._thread: threading.Thread | None = None

    def put(self, event_type: str, payload: dict[str, ty.Any]) -> None:
        """Queue an event; returns at once."""
        with self._changed:
            self._waiting.append((event_type, payload))
            if len(self._waiting) > self._most:
                dropped, of = self._waiting.popleft()
                LOG.error('%s: %s is not published, because %s newer '
                          'events wait for the message bus', _named(of),
                          dropped, self._most)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name='outbox', daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Wait until all events are sent, or for some seconds; events that are
        left are logged.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._waiting and not self._busy, seconds)
            left = len(self._waiting) + self._busy
        if left:
            LOG.error('The message bus did not take the last %s events of '
                      'leases', left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                event_type, payload = self._waiting.popleft()
                self._busy = True
            try:
                self._send(event_type, payload)
            except Exception:
                LOG.exception('%s: publishing %s failed',
                              _named(payload), event_type)


def _named(payload: ty.Mapping[str, ty.Any]) -> str:
    """Return the object of an event, for the log."""
    of = payload.get('blazar_object.data', payload)
    if 'lease_id' in of:
        return f'Lease {of["lease_id"]}'
    servers = of.get('server_ids') or [of.get('server_id') or of.get('id')]
    return f'Object {", ".join(map(str, servers))}'


def _publish(event_type: str, payload: dict[str, ty.Any]) -> None:
    """Publish an event where Nova publishes its own.

    An event that cannot be published is logged and does not fail its caller.
    One retry is for a connection from before a restart of the bus.
    """
    # For oslo.messaging, 0 means the configured value, which is unlimited.
    rpc.NOTIFIER.prepare(publisher_id='blazar.lease', retry=1).info(
        nova_context.get_admin_context(), event_type, payload)


_outbox = Outbox(_publish)
#: Waits until the queued events are sent.
flush = _outbox.flush
atexit.register(flush)
os.register_at_fork(after_in_child=_outbox.empty)


def notify(event_type: str, payload: dict[str, ty.Any]) -> None:
    """Publish an event of a lease; returns at once."""
    _outbox.put(event_type, payload)


#: After each message, oslo.messaging polls whether it may be acknowledged:
#: after a thousandth of a second, then after two, four and so on, which costs
#: more than the message itself. Our acknowledgements are not urgent.
ACKNOWLEDGE_SECONDS = 0.1


def notification_listener(topic: str, handler: Handler) -> ty.Any:
    """Call a function for every notification of a topic, from a thread.

    Processes that listen to the same topic share its notifications.

    :returns: an object with ``start()``, ``stop()`` and ``wait()``
    """
    amqpdriver.ACK_REQUEUE_EVERY_SECONDS_MIN = ACKNOWLEDGE_SECONDS
    return oslo_messaging.get_notification_listener(
        rpc.NOTIFICATION_TRANSPORT, [oslo_messaging.Target(topic=topic)],
        [_Endpoint(handler)], executor='threading')


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """A server that was just created on a host, with the resources that it
    takes there, or (None) has just left it.
    """

    server_id: str
    service_host: str
    node: str
    takes: model.Resources | None


def told(event_type: str, payload: dict[str, ty.Any]) -> Told | None:
    """Return what a notification reports of a server, if that is reliable.

    The resources are those of its flavor, without classes that its image or
    its ports request: :func:`blazar_core.capacity.inventory.record_server`
    uses it only for hosts without these.
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
    return Told(server_id, service_host, node,
                server_demand.resources_of_flavor(
                    flavor, on_volume=not data['image_uuid']))


class _Endpoint:
    """Handles all priorities alike: failures are published as errors."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def info(self, context: ty.Any, publisher_id: str, event_type: str,
             payload: dict[str, ty.Any], metadata: ty.Any) -> None:
        self._handler(event_type, payload, publisher_id)

    warn = error = audit = debug = critical = sample = info
