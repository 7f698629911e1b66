# SPDX-License-Identifier: Apache-2.0

"""Monitors: who sees that hosts are down.

Each is an entry point of the group ``blazar_nova.monitors``. Whether it is
believed is decided in :mod:`blazar_core.healing.host_status`.
"""

import abc
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_nova.compat import compute_hosts
from blazar_nova.resource_types import extensions
from blazar_nova.services import wiring

__all__ = ['ComputeServices', 'Fencing', 'Monitor', 'Monitors']

LOG = logging.getLogger(__name__)

#: How many hosts are fenced at the same time, and seconds until one is tried
#: again.
_AT_ONCE, _PAUSE = 16, 60


class Monitor(abc.ABC):
    """Sees which hosts are down.

    :cvar event_types: how begin the types of those of Nova's notifications
        after which it has to look at once
    """

    event_types: ty.ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def look(self, parts: wiring.Parts) -> host_status.Report:
        """What is seen of hosts; those that it knows nothing of are left out.

        :param parts: those of the listener
        :raises CloudUnavailable: when nothing can be said now
        """

    def fence(self, parts: wiring.Parts, host: str) -> bool:
        """Make sure that nothing runs on a host that has failed: cut its
        power, say. Safe to repeat, also by several listeners at a time.

        The listener asks only where it evacuates servers of leases
        (``[blazar] evacuate``), about hosts that have failed and are not in
        maintenance, again and again until a monitor says yes: then it forces
        the nova-compute down, and does not ask any more in that failure.
        Asked in a thread of its own, of which nobody waits for the end.

        :param parts: those of the listener
        :param host: the name of its nova-compute
        :returns: whether it is sure
        """
        return False


class ComputeServices(Monitor):
    """Goes by the state of nova-compute, as Nova has it."""

    event_types = ('service.',)

    def look(self, parts: wiring.Parts) -> host_status.Report:
        states = compute_hosts.service_states()
        with parts.database.reader() as session:
            rows = session.execute(sa.select(
                models.Host.uuid, models.Host.service_host).where(
                    models.Host.pool == model.COMPUTE)).all()
        return {row.uuid: _seen(row.service_host, states[row.service_host])
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

    :raises ConfigurationError: when one cannot be loaded
    """

    def __init__(self, parts: wiring.Parts) -> None:
        self._parts = parts
        self._pushed = parts.conf.blazar.enable_notification_monitor
        self._polling = parts.conf.blazar.polling_interval if (
            parts.conf.blazar.enable_polling_monitor) else None
        self._monitors = extensions.load('blazar_nova.monitors', Monitor)
        self._fencing = Fencing(parts, self._monitors)
        #: Set when something was told that may be a failure.
        self.suspected = threading.Event()

    def tell(self, event_type: str) -> None:
        """A notification of Nova has come."""
        if self._pushed and any(
                event_type.startswith(one.event_types)
                for one in self._monitors.values()):
            self.suspected.set()

    def run(self, stopping: threading.Event) -> None:
        """Look again and again, and at once when something is suspected,
        until it is stopped: set :attr:`suspected` then.
        """
        clock = self._parts.clock
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
            # Before it is asked whether to stop: both are said then.
            self.suspected.clear()

    def look(self) -> None:
        """See which hosts are down. One that any monitor sees down is down.

        A monitor that fails keeps no other one from being asked.
        """
        report: dict[str, host_status.Down | None] = {}
        for name, monitor in self._monitors.items():
            try:
                seen = monitor.look(self._parts)
            except errors.DatabaseUnavailable:
                raise
            except Exception as exc:
                LOG.warning('Monitor %s: the check failed: %s', name, exc,
                            exc_info=not isinstance(
                                exc, errors.CloudUnavailable))
                continue
            for uuid, down in seen.items():
                known = report.get(uuid)
                if known is None or down is not None and down.certain:
                    report[uuid] = down
        self._parts.host_status.update(report)

    def certain(self, failed: ty.Mapping[str, bool]) -> frozenset[str]:
        """Which hosts that have failed are certain to run nothing: those whose
        nova-compute is forced down, and is not heard of either.

        :param failed: by its uuid, whether monitors may fence a host; they
            begin with that, and it is certain when they have done it
        """
        with self._parts.database.reader() as session:
            rows = session.execute(sa.select(
                models.Host.uuid, models.Host.service_host,
                models.Outage.fenced_at).join(
                    models.Outage, models.Outage.host_id ==
                    models.Host.id).where(models.Host.uuid.in_(
                        failed), models.Outage.kind == outages.FAILURE)).all()
        states, certain = compute_hosts.service_states(), set()
        for row in rows:
            state = states.get(row.service_host)
            if state is None or state.heard:
                continue
            if state.surely_down:
                certain.add(row.uuid)
            elif failed[row.uuid] and row.fenced_at is None:
                self._fencing.begin(row.uuid, row.service_host)
        return frozenset(certain)


class Fencing:
    """Has monitors fence hosts, each host in a thread of its own: how long it
    takes is for them to say. Who ends does not wait for that.
    """

    def __init__(self, parts: wiring.Parts,
                 monitors: ty.Mapping[str, Monitor]) -> None:
        self._parts = parts
        self._monitors = {
            name: one for name, one in monitors.items()
            if type(one).fence is not Monitor.fence}
        self._threads: dict[str, threading.Thread] = {}
        #: When a host may be tried again, in seconds of the process's life.
        self._again: dict[str, float] = {}

    def begin(self, uuid: str, host: str) -> None:
        """Have a host fenced, if that is not done, or was tried, just now.

        :param uuid: of the host
        :param host: the name of its nova-compute
        """
        self._threads = {one: thread for one, thread in self._threads.items()
                         if thread.is_alive()}
        if not self._monitors or uuid in self._threads or (
                len(self._threads) >= _AT_ONCE or
                self._again.get(uuid, 0) > self._parts.clock.elapsed()):
            return
        self._threads[uuid] = threading.Thread(
            target=self._fence, args=(uuid, host), name=f'fence-{host}',
            daemon=True)
        self._threads[uuid].start()

    def _fence(self, uuid: str, host: str) -> None:
        try:
            for name, monitor in self._monitors.items():
                try:
                    if not monitor.fence(self._parts, host):
                        continue
                except Exception as exc:
                    LOG.warning(
                        'Monitor %s: fencing host %s failed: %s', name,
                        host, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
                    continue
                compute_hosts.force_down(host)
                with self._parts.database.begin() as connection:
                    outages.note_fenced(
                        connection, uuid, self._parts.clock.now())
                LOG.warning('Host %s was fenced by the monitor %s: its '
                            'nova-compute is forced down', host, name)
                return
        except Exception:
            LOG.exception('Host %s was fenced, but forcing its nova-compute '
                          'down failed',
                          host)
        finally:
            self._again[uuid] = self._parts.clock.elapsed() + _PAUSE
