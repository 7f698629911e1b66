# SPDX-License-Identifier: Apache-2.0

"""Status of hosts: which ones have failed, and since when.

Monitors report what they see; this module decides what is believed. A host is
marked as failed when it has been reported as down for a while, or when a
monitor is certain, and as recovered when it has been reported as up for a
while. While it is failed, an outage is booked from that moment until
``interval`` seconds from now. So leases that run there or start until then are
healed at once by the overbooking check
(:mod:`blazar_core.healing.overbooking`), and later ones when their start comes
near: the host may have recovered by then.

Idempotent; safe to run concurrently.
"""

import dataclasses
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points

LOG = logging.getLogger(__name__)


class Down(ty.NamedTuple):
    """The report that a host is down.

    :ivar reason: a sentence for operators
    :ivar certain: whether it is believed at once, as an operator or a fence
        has reported it
    """

    reason: str
    certain: bool = False


#: By the uuid of a host, what a monitor reports of it; None: it is up. Hosts
#: that are missing are not reported on.
Report: ty.TypeAlias = ty.Mapping[str, Down | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Thresholds:
    """For how long something has to be reported until it is believed, in
    seconds.

    :ivar failed: that a host is down
    :ivar back: that it is up again
    :ivar interval: for how long, from now on, a failed host is expected to be
        unavailable
    """

    failed: int
    back: int
    interval: int


class _Noted(ty.NamedTuple):
    """A change of the status of a host, and the leases to notify about."""

    host_event: str
    name: str
    reason: str
    event_type: str
    leases: list[dict[str, ty.Any]]


class HostStatus:
    """Decides and records which hosts have failed.

    :ivar news: set when the status of a host has changed
    :param notify: called with an event type and a host that has failed or
        recovered; and with a lease that is degraded, as it has bookings on
        that host, or healed
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 thresholds: Thresholds, notify: views.Notify) -> None:
        self.news = threading.Event()
        self._notify = notify
        self._database = database
        self._clock = clock
        self._thresholds = thresholds

    def update(self, report: Report) -> None:
        """Record a report on hosts.

        Costs one SELECT if all hosts are up and were up before. A failed host
        that is no longer reported on stays failed. A host that is switched off
        for not being needed does not report, and has not failed.
        """
        with self._database.reader() as session:
            known = outages.failures(session)
            off = {*session.scalars(_OFF)} if any(report.values()) else set()
        off = {uuid for uuid in off if (down := report.get(uuid)) is None or
               not down.certain}
        doubtful = self._doubtful({
            uuid: down for uuid, down in report.items() if uuid not in off},
            known)
        report = {**report, **dict.fromkeys(off & report.keys())}
        unseen = {uuid: Down(row.reason) for uuid, row in known.items()
                  if row.began_at is not None}
        for uuid, down in sorted({**unseen, **report}.items()):
            if uuid not in doubtful and (down is not None or uuid in known):
                self._tell(uuid, down)

    def _tell(self, uuid: str, down: Down | None) -> None:
        """Record the status of a host, and notify about its leases."""
        try:
            noted = self._database.retried(self._note, uuid, down)
        except errors.ConcurrentUpdate as exc:
            # A failure here does not keep other hosts from being recorded.
            LOG.warning('Host %s: whether it has failed is checked again next '
                        'time: %s', uuid, exc)
            return
        if noted is not None:
            fault_points.fault_point(fault_points.FaultPoint.HEAL_NOTED, uuid)
            self.news.set()
            self._notify(noted.host_event, {
                'id': uuid, 'name': noted.name, 'message': noted.reason})
            for lease in noted.leases:
                self._notify(noted.event_type, lease)

    def _doubtful(self, report: Report, known: ty.Mapping[str, models.Outage],
                  ) -> set[str]:
        """Return the hosts that are reported as down but not believed to be.

        If more than half of the hosts look down, assume that the monitoring
        itself is broken.
        """
        seeming = {uuid for uuid, down in report.items()
                   if down is not None and not down.certain}
        if 2 * len(seeming) <= len(report):
            return set()
        doubtful = {uuid for uuid in seeming if uuid not in known or
                    known[uuid].began_at is None}
        if doubtful:
            LOG.error('%s of %s hosts look down: none of them is treated as '
                      'failed. Check the message bus and nova-conductor. If '
                      'the hosts have failed, force their nova-compute down.',
                      len(seeming), len(report))
        return doubtful

    def _note(self, uuid: str, down: Down | None) -> _Noted | None:
        """Record the status of a host.

        :returns: None when it has not changed
        """
        with self._database.writer() as session:
            host = outages.locked(session, uuid)
            now = self._clock.now()
            if host is None:
                return None
            outage = session.get(models.Outage, (host.id, outages.FAILURE))
            if outage is not None:
                # Correct the times of a process whose clock was ahead.
                for name in ('seen_at', 'began_at', 'back_at'):
                    if (getattr(outage, name) or 0) > now:
                        setattr(outage, name, now)
            if down is None:
                if outage is None or not self._is_back(outage, now):
                    return None
                began, stranded = outage.began_at, outages.stranded(
                    session, outage)
                outages.end(session, now, outage)
                if began is None:
                    return None
                LOG.info('Host %s is up again, after %s s', host.name,
                         now - began)
                # Leases that lack more, on other failed hosts, are not healed.
                healed = [
                    lease for lease in _described(session, stranded)
                    if not any(one['missing_resources']
                               for one in lease['reservations'])]
                return _Noted('host.recovered', host.name, '', 'lease.healed',
                              healed)
            if not any(host.capacity.values()) and (
                    outage is None or not outages.stranded(session, outage)):
                # The host no longer exists in Nova.
                if outage is not None:
                    outages.end(session, now, outage)
                return None
            outage = outages.noted(
                session, now, host.id, outages.FAILURE, down.reason)
            outage.back_at = None
            if outage.began_at is not None:
                self._go_on(session, now, outage)
                return None
            if not down.certain and (
                    now - outage.seen_at < self._thresholds.failed):
                return None
            outages.begin(session, now, outage, now +
                          self._thresholds.interval)
            LOG.warning('Host %s has failed: %s Its bookings of the next %s s '
                        'are reassigned to other hosts', host.name,
                        down.reason, self._thresholds.interval)
            return _Noted(
                'host.failed', host.name, down.reason, 'lease.degraded',
                _described(session, outages.stranded(session, outage)))

    def _is_back(self, outage: models.Outage, now: int) -> bool:
        """Return whether a host that is reported as up is believed to be."""
        if outage.began_at is None:
            return True
        if outage.back_at is None:
            outage.back_at = now
        return now - outage.back_at >= self._thresholds.back

    def _go_on(self, session: orm.Session, now: int, outage: models.Outage,
               ) -> None:
        """Extend the outage of a host that is still down, so that bookings
        that come near are reassigned, too.

        In steps of a tenth of the interval, as each step is a decision about
        the host.
        """
        until = now + self._thresholds.interval
        # It ends later than that if a clock was ahead.
        if abs(until - outages.until(session, outage)) >= (
                self._thresholds.interval // 10):
            assert outage.began_at is not None
            outages.last(session, now, outage,
                         model.Window(outage.began_at, until))


#: The uuids of the hosts that are switched off. One that has failed and is
#: switched on again is not: it recovers when it reports.
_OFF = sa.select(models.Host.uuid).where(
    models.Host.power_state.in_(states.POWERED_OFF), sa.not_(sa.and_(
        models.Host.power_state == states.Power.BOOTING,
        outages.has_failed(models.Host.id))))


def _described(session: orm.Session, lease_ids: ty.Iterable[str],
               ) -> list[dict[str, ty.Any]]:
    session.flush()
    session.expire_all()
    return [views.describe(api.found(session, one)) for one in lease_ids]
