# SPDX-License-Identifier: Apache-2.0

"""Monitors, which detect failed hosts.

Each is an entry point of the group ``blazar_nova.monitors``.
:mod:`blazar_core.healing.host_status` decides whether a report is believed.
"""

import abc
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.lifecycle import retries
from blazar_nova.compat import compute_hosts
from blazar_nova.resource_types import extensions

LOG = logging.getLogger(__name__)

#: In a cell with so many hosts, those that seem to be down together are not
#: believed to be.
_MANY = 10
#: The most hosts that are fenced at the same time, and seconds until one is
#: tried again.
_AT_ONCE, _PAUSE = 16, 60


class Monitor(abc.ABC):
    """Detects which hosts are down.

    :cvar event_types: prefixes of the types of Nova's notifications after
        which it has to look at once
    """

    event_types: ty.ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def look(self, database: api.Database) -> host_status.Report:
        """Return a report on hosts; hosts that it does not know are left out.

        :raises CloudUnavailable: when there is no report now
        """

    def fence(self, host: str) -> bool:
        """Make sure that nothing runs on a failed host, for example by cutting
        its power. Safe to repeat, also concurrently by several listeners.

        The listener calls this only if it evacuates servers of leases
        (``[blazar] evacuate``), for hosts that have failed and are not in
        maintenance, until a monitor returns True: then it forces the
        nova-compute down, and does not call it again for that failure. Called
        in a separate thread, which nothing waits for.

        :param host: the name of its nova-compute
        :returns: whether it is certain
        """
        return False


class ComputeServices(Monitor):
    """Reports the state of nova-compute, as Nova has it."""

    event_types = ('service.',)

    def look(self, database: api.Database) -> host_status.Report:
        states: dict[str, compute_hosts.ServiceState] = {}
        doubtful = set[str]()
        for cell, its in compute_hosts.service_states():
            watched = {host: state for host, state in its.items()
                       if state.watched}
            down = [host for host, state in watched.items()
                    if not state.up and not state.forced_down]
            if len(watched) >= _MANY and 2 * len(down) > len(watched):
                LOG.error('%s of %s hosts in cell %s look down: none of them '
                          'is treated as failed. Check the message bus and '
                          'nova-conductor of the cell. If the hosts have '
                          'failed, force their nova-compute down.',
                          len(down), len(watched), cell)
                doubtful.update(down)
            states |= watched
        with database.reader() as session:
            rows = session.execute(sa.select(
                models.Host.uuid, models.Host.service_host).where(
                    models.Host.pool == model.COMPUTE)).all()
            failed = {uuid for uuid, outage in outages.failures(
                session).items() if outage.began_at is not None}
        return {row.uuid: None if (
            row.service_host in doubtful and row.uuid not in failed
        ) else _seen(row.service_host, states[row.service_host])
            for row in rows if row.service_host in states}


def _seen(host: str,
          state: compute_hosts.ServiceState) -> host_status.Down | None:
    if state.forced_down:
        return host_status.Down(
            f'nova-compute on {host} was forced down.', certain=True)
    return None if state.up else host_status.Down(
        f'nova-compute on {host} no longer reports.')


class Monitors:
    """All monitors of this installation.

    :raises ConfigurationError: when a monitor cannot be loaded
    """

    def __init__(self, conf: ty.Any, database: api.Database,
                 clock: clocks.Clock, status: host_status.HostStatus) -> None:
        self._database = database
        self._clock = clock
        self._status = status
        self._pushed = conf.blazar.enable_notification_monitor
        self._polling = conf.blazar.polling_interval if (
            conf.blazar.enable_polling_monitor) else None
        self._monitors = extensions.load('blazar_nova.monitors', Monitor)
        self._fencing = Fencing(database, clock, self._monitors)
        #: Set when a notification may mean a failure.
        self.suspected = threading.Event()

    def tell(self, event_type: str) -> None:
        """Handle the type of a notification of Nova."""
        if self._pushed and any(
                event_type.startswith(one.event_types)
                for one in self._monitors.values()):
            self.suspected.set()

    def run(self, stopping: threading.Event) -> None:
        """Look periodically, and at once when a failure is suspected, until
        ``stopping`` is set: set :attr:`suspected` then, too.
        """
        clock = self._clock
        while not stopping.is_set():
            try:
                self.look()
            except errors.DatabaseUnavailable as exc:
                LOG.info('Host monitor: which hosts are down is checked '
                         'later: %s', exc)
            except Exception:
                LOG.exception('Host monitor: checking which hosts are down '
                              'failed')
            clock.wait(self.suspected, model.FOREVER if self._polling is None
                       else clock.now() + self._polling)
            # Before ``stopping`` is checked: both are set to stop.
            self.suspected.clear()

    def look(self) -> None:
        """Ask which hosts are down. A host is down if any monitor reports it.

        A monitor that fails does not keep others from being asked.
        """
        report: dict[str, host_status.Down | None] = {}
        for name, monitor in self._monitors.items():
            with retries.tried_later(
                    LOG, 'Monitor %s: the check failed: %s', name):
                for uuid, down in monitor.look(self._database).items():
                    known = report.get(uuid)
                    if known is None or down is not None and down.certain:
                        report[uuid] = down
        self._status.update(report)

    def certain(self, failed: ty.Mapping[str, bool]) -> frozenset[str]:
        """Return the failed hosts that are certain to run nothing: their
        nova-compute is forced down, and does not report.

        :param failed: by uuid, whether monitors may fence a host; this starts
            it, and the host is certain when they have done it
        """
        with self._database.reader() as session:
            rows = session.execute(sa.select(
                models.Host.uuid, models.Host.service_host,
                models.Outage.fenced_at).join(
                    models.Outage, models.Outage.host_id ==
                    models.Host.id).where(models.Host.uuid.in_(
                        failed), models.Outage.kind == outages.FAILURE)).all()
        states, certain = compute_hosts.service_states_of(
            {row.service_host for row in rows}), set()
        for row in rows:
            state = states.get(row.service_host)
            if state is None or state.heard or not state.watched:
                continue
            if state.surely_down:
                certain.add(row.uuid)
            elif failed[row.uuid] and row.fenced_at is None:
                self._fencing.begin(row.uuid, row.service_host)
        return frozenset(certain)


class Fencing:
    """Has monitors fence hosts, each host in a separate thread, as only they
    know how long it takes. Nothing waits for these threads.
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 monitors: ty.Mapping[str, Monitor]) -> None:
        self._database = database
        self._clock = clock
        self._monitors = {
            name: one for name, one in monitors.items()
            if type(one).fence is not Monitor.fence}
        self._threads: dict[str, threading.Thread] = {}
        #: By host, when it may be tried again, by the monotonic clock.
        self._again: dict[str, float] = {}

    def begin(self, uuid: str, host: str) -> None:
        """Start to fence a host, unless that is running or was tried recently.

        :param uuid: of the host
        :param host: the name of its nova-compute
        """
        self._threads = {one: thread for one, thread in self._threads.items()
                         if thread.is_alive()}
        if not self._monitors or uuid in self._threads or (
                len(self._threads) >= _AT_ONCE or
                self._again.get(uuid, 0) > self._clock.elapsed()):
            return
        self._threads[uuid] = threading.Thread(
            target=self._fence, args=(uuid, host), name=f'fence-{host}',
            daemon=True)
        self._threads[uuid].start()

    def _fence(self, uuid: str, host: str) -> None:
        try:
            for name, monitor in self._monitors.items():
                try:
                    if not monitor.fence(host):
                        continue
                except Exception as exc:
                    LOG.warning(
                        'Monitor %s: fencing host %s failed: %s', name,
                        host, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
                    continue
                compute_hosts.force_down(host)
                with self._database.begin() as connection:
                    outages.note_fenced(
                        connection, uuid, self._clock.now())
                LOG.warning('Host %s was fenced by the monitor %s: its '
                            'nova-compute is forced down', host, name)
                return
        except Exception:
            LOG.exception('Host %s was fenced, but forcing its nova-compute '
                          'down failed',
                          host)
        finally:
            self._again[uuid] = self._clock.elapsed() + _PAUSE
