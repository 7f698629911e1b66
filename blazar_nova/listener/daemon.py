# SPDX-License-Identifier: Apache-2.0

"""blazar-listener: follow Nova's notifications, and carry out due events.

The following run concurrently. Nova's notifications become hints for the
:mod:`server sync <blazar_nova.listener.server_sync>`. The :mod:`engine
<blazar_core.lifecycle.engine>` carries out due events. The :mod:`overbooking
check <blazar_core.healing.overbooking>` reassigns bookings that no longer fit.
Servers are moved off unavailable hosts
(:mod:`~blazar_core.healing.evacuation`), and leases that wait for capacity are
admitted (:mod:`~blazar_core.lifecycle.admission_queue`). Hosts with unfinished
operations are rechecked, and so are builds whose process may have died
(:mod:`~blazar_core.lifecycle.lost_builds`). What leases need is checked before
they start (:mod:`~blazar_core.lifecycle.preflight`). Interruptible servers are
evicted (:mod:`~blazar_core.lifecycle.eviction`). One listener at a time runs
the :mod:`periodic sync <blazar_nova.listener.periodic_sync>` with Nova, and
one switches hosts (:mod:`~blazar_nova.listener.power`). The :mod:`monitors
<blazar_nova.listener.monitors>` detect failed hosts. Counters are written,
metrics served, and rows trimmed that are no longer used. Any number of
listeners may run.
"""

import contextlib
import functools
import os
import socket
import threading
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import periodic
from blazar_core.db import counters
from blazar_core.db import leader_election
from blazar_core.healing import evacuation
from blazar_core.healing import overbooking
from blazar_core.lifecycle import admission_queue
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import eviction
from blazar_core.lifecycle import lost_builds
from blazar_core.lifecycle import preflight
from blazar_core.lifecycle import resumption
from blazar_nova.compat import configuration_checks
from blazar_nova.compat import process
from blazar_nova.listener import metrics
from blazar_nova.listener import monitors
from blazar_nova.listener import periodic_sync
from blazar_nova.listener import power
from blazar_nova.listener import server_sync
from blazar_nova.services import notifications
from blazar_nova.services import wiring

LOG = logging.getLogger(__name__)

#: Prefixes of the types of notifications about leases, in either form.
_OURS = ('lease.', f'{notifications.PREFIX}lease.')
#: Prefixes of event types that say nothing about where servers are and what
#: they use. When a build starts, Nova does not know the host; when a deletion
#: does, everything is still in use.
_IGNORED = ('instance.update', 'instance.exists', 'instance.create.start',
            'instance.delete.start', 'instance.shutdown.', 'compute.',
            'scheduler.', 'libvirt.', 'metrics.', 'keypair.', 'flavor.',
            'server_group.', 'server.interruptible.', 'host.',
            notifications.PREFIX)
#: Those that are notified before the usage of the old and the new host has
#: changed.
_MOVES = ('instance.evacuate', 'instance.live_migration', 'instance.rebuild',
          'instance.resize', 'instance.shelve_offload', 'instance.unshelve')

#: Seconds between two looks for hosts that are due for a recheck.
_TICK = 3
#: Seconds between two looks whether it is time to look for leases without an
#: owner.
_OFTEN = 300
#: Seconds between two removals of old changes: this bounds their number,
#: however long a sync takes, or if it fails.
_TRIM = 60


class _Task(ty.NamedTuple):
    """A function that a thread runs periodically.

    :ivar name: of the thread, and of the task in the metrics
    :ivar seconds: between two runs; 0: it never runs
    :ivar what: it looks for, for the log
    :ivar news: see :func:`.periodic.run_periodically`
    """

    name: str
    seconds: int
    what: str
    look: ty.Callable[[], object]
    news: threading.Event | None = None


class Listener:
    """The daemon.

    :raises ConfigurationError: when Nova or its configuration is not as
        required; says which line to write
    """

    def __init__(self, conf: ty.Any, clock: clocks.Clock | None = None,
                 ) -> None:
        self.parts = wiring.assemble(conf, clock)
        configuration_checks.refuse('blazar-listener',
                                    configuration_checks.notifications(conf))
        wiring.compare_settings('blazar-listener', conf, self.parts.database,
                                self.parts.clock, 'worker_timeout')
        name = _name()
        self.engine = engine.Engine(
            conf, self.parts.database, self.parts.clock,
            self.parts.lifecycle, name)
        self.server_sync = server_sync.of_parts(
            self.parts, self.engine.trigger)
        self.overbooking = overbooking.OverbookingCheck(
            self.parts.database, self.parts.clock, self.parts.admission,
            self.parts.leases.reassignment, self.parts.lifecycle.demands,
            self.parts.notify, conf.blazar.start_timeout)
        self.unsent_builds = lost_builds.UnsentSlotBuilds(
            self.parts.database, self.parts.clock, self.parts.leases.slots,
            self.parts.cloud.send_slots, self.parts.encryption.decrypt)
        credential = functools.partial(
            self.parts.lifecycle.lease_close.credential, needed=False)
        self.evictions = eviction.Evictions(
            self.parts.database, self.parts.clock, self.parts.cloud,
            self.parts.notify, credential, conf.blazar.eviction_actions,
            resumption.Resumption(
                self.parts.database, self.parts.clock, self.parts.cloud,
                self.parts.admission, credential,
                conf.blazar.interruptible_safe_for))
        self.monitors = monitors.Monitors(
            conf, self.parts.database, self.parts.clock,
            self.parts.host_status)
        self.power = power.of_parts(
            self.parts) if conf.blazar_power.enabled else None
        self._messages = process.notification_listener(
            conf.blazar.notification_topic, self.handle)
        self._stopping = threading.Event()
        self._leader = functools.partial(
            leader_election.Leader, self.parts.database, self.parts.clock,
            worker=name, worker_timeout=conf.blazar.worker_timeout)
        self.periodic_sync = periodic_sync.PeriodicSync(
            self.parts.clock, self._leader(
                periodic_sync.NAME, interval=conf.blazar.sync_interval),
            conf.blazar.sync_interval, conf.blazar.worker_timeout,
            self.server_sync, self._stopping, self._with_sync())
        self._threads: list[threading.Thread] = []
        self.metrics = metrics.Metrics(
            conf, self.parts.database, self.parts.clock,
            self.parts.admission.index, name, self._threads, self.power)
        self._threads += [
            self._thread('server_sync', self.server_sync.run),
            self._thread('periodic_sync', self.periodic_sync.run),
            self._thread('engine', self.engine.run),
            self._thread('monitors', self.monitors.run, self._stopping),
            *(self._thread(
                task.name, periodic.run_periodically, self.parts.clock,
                self._stopping, task.seconds, task.what,
                self.metrics.watched(task.name, task.seconds, task.look),
                task.news)
              for task in self._periodic(conf) if task.seconds)]

    # -- what runs periodically ----------------------------------------------

    def _periodic(self, conf: ty.Any) -> ty.Sequence[_Task]:
        """Return what runs in threads of its own."""
        certain = self.monitors.certain if conf.blazar.evacuate else None
        orphan_interval = 3600 * conf.blazar.orphan_interval
        leader = self._leader('orphans', interval=orphan_interval)
        return (
            _Task('overbooking', overbooking.PAUSE, 'Overbooked hosts',
                  self.overbooking.look, self.parts.host_status.news),
            _Task('recheck', _TICK, 'Hosts to check again',
                  self.server_sync.recheck),
            _Task('evacuation', evacuation.PAUSE,
                  'Servers to move off unavailable hosts',
                  functools.partial(self.parts.evacuation.look, certain)),
            _Task('admission', admission_queue.PAUSE,
                  'Waiting leases with capacity',
                  self.parts.lifecycle.admission_queue.look),
            _Task('slots', lost_builds.PAUSE,
                  'Builds not sent by the requests that took slots',
                  self.unsent_builds.send),
            _Task('preflight', preflight.PAUSE, 'Preflight checks',
                  functools.partial(self.parts.preflight.look,
                                    self._stopping.is_set)),
            _Task('eviction', eviction.PAUSE, 'Interruptible servers to evict',
                  functools.partial(self._leader(
                      eviction.LEADER, interval=eviction.PAUSE).lead,
                      self.evictions.look)),
            *([] if self.power is None else [_Task(
                'power', power.PAUSE, 'Hosts to switch', functools.partial(
                    self._leader(power.LEADER, interval=power.PAUSE).lead,
                    self.power.look))]),
            _Task('trimming', _TRIM, 'Leftovers', self.server_sync.trim),
            _Task('counters', counters.SECONDS, 'Counters',
                  self.parts.database.counters.flush),
            _Task('metrics', metrics.PAUSE if conf.blazar.metrics_port else 0,
                  'Metrics', self.metrics.refresh),
            _Task('orphans', min(orphan_interval, _OFTEN),
                  'Leases without owner', functools.partial(
                      leader.lead, functools.partial(
                          self.find_orphans,
                          functools.partial(_keep, leader)))))

    def _with_sync(self) -> ty.Sequence[periodic_sync.Task]:
        """Return what runs after each periodic sync, by the same listener."""
        life = self.parts.lifecycle
        return (
            ('Unfinished leases', life.reconciliation.settle_left),
            ('Builds without progress', life.lost_builds.send),
            ('Trusts of ended leases', life.lease_close.revoke_over),
            ('Open reservations of ended leases',
             life.lease_close.close_left),
            ('Unused leases', life.no_shows.look),
            ('Ends of announced leases', self.announce),
            ('Unfinished removals of hosts',
             self.parts.host_enrollment.remove_left),
            ('Due events', self.engine.wake))

    # -- threads -------------------------------------------------------------

    def _thread(self, name: str, target: ty.Callable[..., None],
                *args: ty.Any) -> threading.Thread:
        return threading.Thread(target=target, args=args, name=name,
                                daemon=True)

    def start(self) -> None:
        """Start all threads; return at once."""
        port = self.parts.conf.blazar.metrics_port
        if port:
            self.metrics.serve(self.parts.conf.blazar.metrics_host, port)
        LOG.info('Started')
        # A hint is added at once, and every other thread of the pool would
        # wake each second.
        self._messages.start(override_pool_size=1)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start nothing new."""
        self._stopping.set()
        self._messages.stop()
        self.monitors.suspected.set()
        self.parts.host_status.news.set()
        self.server_sync.stop()
        self.engine.stop()

    def wait(self) -> None:
        """Return when running work is done."""
        self._messages.wait()
        for thread in self._threads:
            thread.join()
        self.metrics.stop()
        with contextlib.suppress(errors.DatabaseUnavailable):
            self.parts.database.counters.flush()
            if self.parts.conf.blazar.metrics_port:
                self.metrics.leave()
        process.flush()

    def handle(self, event_type: str, payload: dict[str, ty.Any],
               publisher_id: str = '') -> None:
        """Handle a notification."""
        if event_type.startswith(_OURS):
            self.engine.wake()
        elif not event_type.startswith(_IGNORED):
            self.monitors.tell(event_type)
            told = process.told(event_type, payload)
            if told is not None:
                self.server_sync.hints.add_told(told)
                return
            data = payload.get('nova_object.data', {})
            kind = 'usage' if event_type.startswith('instance.') else 'host'
            self.server_sync.hints.add(
                data.get('uuid') or data.get('instance_uuid'),
                **{kind: data.get('host')})
            if event_type.startswith(_MOVES):
                # 'nova-compute:' and its host
                self.server_sync.hints.add_move(
                    data.get('host'), publisher_id.partition(':')[2])

    def announce(self) -> None:
        """Notify about servers whose default lease would have ended, if
        default leases are only announced.
        """
        if self.parts.conf.blazar.default_reservation == 'announce':
            self.parts.end_notices.tell()
        self.parts.end_notices.trim()

    def find_orphans(self, go_on: ty.Callable[[], object] = lambda: None,
                     ) -> bool:
        """Handle leases whose project or user no longer exists.

        :param go_on: see :meth:`.orphans.Orphans.find`
        :returns: whether keystone answered
        """
        try:
            self.parts.orphans.find(go_on=go_on)
        except errors.CloudUnavailable as exc:
            LOG.warning('Orphaned leases: whether the projects and users '
                        'exist is not known: %s', exc)
            return False
        self.engine.wake()
        return True


def _keep(leader: leader_election.Leader) -> None:
    """Keep the lead during a round that may take long.

    :raises CloudUnavailable: if another process has taken over
    """
    if not leader.extend():
        raise errors.CloudUnavailable('another blazar-listener has taken over')


def _name() -> str:
    """Return a readable name that is unique among all listeners."""
    return f'{socket.gethostname()}:{os.getpid()}:' + (
        uuidutils.generate_uuid()[:8])
