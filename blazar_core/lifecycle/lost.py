# SPDX-License-Identifier: Apache-2.0

"""Builds that were sent and came to nothing."""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import observing
from blazar_core.lifecycle import sending as sendings

__all__ = ['Lost']

LOG = logging.getLogger(__name__)

_SENT = sa.select(
    models.Lease.id, models.Lease.project_id, models.Booking.server_id,
    models.Booking.dispatched_at,
).join(models.Booking.reservation).join(models.Reservation.lease).where(
    models.Lease.status.in_((*states.BEGUN, states.Lease.ERROR)),
    models.Booking.server_id.is_not(None), models.Booking.running.is_(False))


class Lost:
    """Sees to builds that got lost.

    :param lost_after: seconds that a build has not been on its way after
        which no process works on it any more
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: clouds.Cloud, lost_after: int,
                 sending: sendings.Sending, observing: observing.Observing,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._lost_after = lost_after
        self._sending = sending
        self._observing = observing
        #: What there was of builds at the last look, when they were sent, and
        #: since when that is so; and when that look was. By the monotonic
        #: clock, as the clock that said when one was sent may have been wrong.
        self._unseen: dict[str, tuple[clouds.Trace, int | None, float]] = {}
        self._looked = 0.0

    def send(self) -> None:
        """See to the builds that were sent and are not on their way.

        A worker died between taking a build and sending it, or the message
        bus lost it: it has left no trace, and is sent again. Or the service
        that built it died: then its server is marked as failed. Both only
        after longer than any service at work would take: sent twice, a build
        would leave a running server that nothing knows.
        """
        now = self._clock.elapsed()
        unseen: dict[str, tuple[clouds.Trace, int | None, float]] = {}
        for (lease_id, project_id), sent in self._sent().items():
            with logs.about(lease_id, project_id):
                unseen |= self._look_for(lease_id, sent, now)
        # What has arrived since is not missed any more.
        self._unseen, self._looked = unseen, now

    def _look_for(self, lease_id: str, sent: ty.Mapping[str, int | None],
                  now: float,
                  ) -> dict[str, tuple[clouds.Trace, int | None, float]]:
        """See to the builds of a lease that were sent; returns what there is
        of those that have not arrived.
        """
        try:
            traces = self._cloud.traces(list(sent))
        except Exception as exc:
            # All that was sent may still be waiting for it.
            LOG.warning('Lease %s: its builds cannot be looked for: %s',
                        lease_id, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
            return {}
        unseen = {server_id: (trace, sent[server_id], self._since(
            server_id, trace, sent[server_id]))
            for server_id, trace in traces.items()}
        late = {server_id: trace for server_id, trace in traces.items()
                if now - unseen[server_id][2] >= self._lost_after and (
                    trace is clouds.Trace.CAUGHT or sent[server_id])}
        if late:
            self._recover(lease_id, late, sent)
        return unseen

    def _since(self, server_id: str, trace: clouds.Trace, sent: int | None,
               ) -> float:
        """Since when there is this of a build, by the monotonic clock."""
        before, now = self._unseen.get(server_id), self._clock.elapsed()
        if before is None or before[0] is not trace:
            return now
        if before[1] == sent:
            return before[2]
        # It was sent after the last look, whatever clock has said when.
        ago = self._clock.now() - sent if sent else 0
        return now - max(0, min(ago, now - self._looked))

    def _sent(self) -> dict[tuple[str, str], dict[str, int | None]]:
        """By lease and its project, the servers that should run, and when
        they were sent.

        Those that wait to be sent again are among them: the cloud may stand
        still where it says that it could not place them. So are those that
        have failed: the service that failed may not have finished with them.
        """
        sent: dict[tuple[str, str], dict[str, int | None]] = {}
        with self._database.connection() as connection:
            for row in connection.execute(_SENT):
                sent.setdefault((row.id, row.project_id), {})[
                    row.server_id] = row.dispatched_at
        return sent

    def _recover(self, lease_id: str, late: ty.Mapping[str, clouds.Trace],
                 sent: ty.Mapping[str, int | None]) -> None:
        with self._database.reader() as session:
            sealed = sendings.sealed(session, [lease_id]).get(lease_id)
        again = {} if sealed is None else {
            server_id: sent[server_id] for server_id, trace in late.items()
            if trace is clouds.Trace.NONE}
        try:
            if sealed is not None and again:
                LOG.warning('Lease %s: builds got lost, sending them again: '
                            '%s', lease_id, ', '.join(again))
                self._sending.send_again(lease_id, sealed, again)
            for server_id in late.keys() - again.keys():
                LOG.warning('Lease %s: no process works on server %s any '
                            'more', lease_id, server_id)
                with logs.about(server_id=server_id):
                    self._cloud.abandon(server_id)
                self._observing.check(server_id)
        except Exception:
            LOG.exception('Lease %s: its lost builds could not be seen to '
                          'yet', lease_id)
