# SPDX-License-Identifier: Apache-2.0

"""A process of ours that speaks with Nova: configuration, messages."""

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

__all__ = ['CONF', 'Handler', 'Outbox', 'Told', 'bound_waiting',
           'configure', 'flush', 'notification_listener', 'notify', 'told']

LOG = logging.getLogger(__name__)

#: Nova's configuration; ours stands in the same files.
CONF = nova.conf.CONF

#: Told of an event's type, its payload and its publisher.
Handler: ty.TypeAlias = ty.Callable[[str, dict[str, ty.Any], str], None]


#: Seconds that placement and keystone have to answer, unless an operator says
#: otherwise.
_ANSWER_SECONDS = 30


def bound_waiting() -> None:
    """Let this process not wait for placement for ever, nor for the limits
    that keystone has, as Nova does.
    """
    limit_opts.register_opts(CONF)
    for group in ('placement', 'oslo_limit'):
        CONF.set_default('timeout', _ANSWER_SECONDS, group)
    report.SchedulerReportClient._create_client = _unpaced


_create_client = report.SchedulerReportClient._create_client


@functools.wraps(_create_client)
def _unpaced(client: ty.Any) -> ty.Any:
    """Make an adapter for placement that sends each request at once.

    keystoneauth paces the requests of an adapter by the time at which it was
    made, even without a limit: if the clock was ahead then and is right now,
    each request would wait until that time.
    """
    adapter = _create_client(client)
    adapter.request = functools.partial(
        adapter.request, rate_semaphore=contextlib.nullcontext())
    return adapter


def configure(argv: list[str], prog: str, quiet: bool = False) -> None:
    """Read nova.conf and set up what Nova's objects need.

    :param quiet: unless debug is set, without what libraries log at INFO, and
        without our own if that is written to standard error
    """
    objects.register_all()
    nova_config.parse_args(argv)
    is_logged = CONF.log_file or CONF.log_dir or CONF.use_journal
    if not is_logged:
        # oslo.log would take stdout, which is for answers.
        CONF.set_override('use_stderr', True)
    logging.setup(CONF, prog)
    if quiet and not logging.is_debug_enabled(CONF):
        logging.getLogger(None).logger.setLevel(logging.WARNING)
        # On a terminal they would stand between the answers.
        for name in ('blazar_core', 'blazar_nova') if is_logged else ():
            logging.getLogger(name).logger.setLevel(logging.INFO)
    objects.Service.enable_min_version_cache()


#: How many events wait at most for a message bus that is slow or away, and
#: for how many seconds they are waited for when a process ends.
_WAITING = 1000
_FLUSH_SECONDS = 5


class Outbox:
    """Sends events, one after the other, beside the threads that emit them.

    A message bus that is away would keep a request for a lease waiting, until
    he asks again and gets another one. The thread is started by the first
    event, in the process that has it.

    :param send: sends one; returns when it is sent, or cannot be
    :param most: how many may wait; the oldest goes when there are more
    """

    def __init__(self, send: ty.Callable[[str, dict[str, ty.Any]], None],
                 most: int = _WAITING) -> None:
        self._send = send
        self._most = most
        self.empty()

    def empty(self) -> None:
        """As new. For a process that was forked: what its parent has in hand
        is the parent's, and the thread has not come along.
        """
        self._changed = threading.Condition()
        self._waiting: collections.deque[
            tuple[str, dict[str, ty.Any]]] = collections.deque()
        self._busy = False
        self._thread: threading.Thread | None = None

    def put(self, event_type: str, payload: dict[str, ty.Any]) -> None:
        """Have an event sent; returns at once."""
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
        """Return when all is sent, or so much later; what is left then is
        logged.
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
    """Of what an event tells, for the log."""
    of = payload.get('blazar_object.data', payload)
    if 'lease_id' in of:
        return f'Lease {of["lease_id"]}'
    servers = of.get('server_ids') or [of.get('server_id') or of.get('id')]
    return f'Object {", ".join(map(str, servers))}'


def _publish(event_type: str, payload: dict[str, ty.Any]) -> None:
    """Publish an event where Nova publishes its own.

    What cannot be published is logged: it is news, and no reason to fail. It
    is sent once more for a connection that is as old as a bus that was
    restarted.
    """
    # oslo.messaging takes 0 for what is configured, which is for ever.
    rpc.NOTIFIER.prepare(publisher_id='blazar.lease', retry=1).info(
        nova_context.get_admin_context(), event_type, payload)


_outbox = Outbox(_publish)
#: Waits until what was told is sent.
flush = _outbox.flush
atexit.register(flush)
os.register_at_fork(after_in_child=_outbox.empty)


def notify(event_type: str, payload: dict[str, ty.Any]) -> None:
    """Have an event of a lease published; returns at once."""
    _outbox.put(event_type, payload)


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
    its ports ask for: :func:`blazar_core.capacity.inventory.record` keeps to
    hosts that have none of those.
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
    """All priorities alike: failures are published as errors."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def info(self, context: ty.Any, publisher_id: str, event_type: str,
             payload: dict[str, ty.Any], metadata: ty.Any) -> None:
        self._handler(event_type, payload, publisher_id)

    warn = error = audit = debug = critical = sample = info
