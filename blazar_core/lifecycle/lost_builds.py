# SPDX-License-Identifier: Apache-2.0

"""Send builds again whose request or conductor died.

A boot takes its slots, and sends the build itself. In between its call is
kept in a row; who deletes the row has the right to send the build. So exactly
one of the request and the listeners does, even if another process was
suspended.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.leases import slots
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import reconciliation
from blazar_core.plugins import cloud_api

__all__ = ['AbandonedSlots', 'LostBuilds', 'PAUSE']

LOG = logging.getLogger(__name__)

_SENT = sa.select(
    models.Lease.id, models.Lease.project_id, models.Booking.server_id,
    models.Booking.dispatched_at,
).join(models.Booking.reservation).join(models.Reservation.lease).where(
    models.Lease.status.in_((*states.BEGUN, states.Lease.ERROR)),
    models.Booking.server_id.is_not(None), models.Booking.running.is_(False))


class LostBuilds:
    """Sees to builds that got lost.

    :param lost_after: seconds that a build has not been on its way after
        which no process works on it any more
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, lost_after: int,
                 dispatcher: dispatch.Dispatch,
                 reconciler: reconciliation.Reconciliation) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._lost_after = lost_after
        self._dispatcher = dispatcher
        self._reconciler = reconciler
        #: What there was of builds at the last look, when they were sent, and
        #: since when that is so; and when that look was. By the monotonic
        #: clock, as the clock that said when one was sent may have been wrong.
        self._unseen: dict[str, tuple[cloud_api.BuildTrace, int | None,
                                      float]] = {}
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
        unseen: dict[str, tuple[cloud_api.BuildTrace, int | None, float]] = {}
        for (lease_id, project_id), sent in self._sent().items():
            with logs.about(lease_id, project_id):
                unseen |= self._look_for(lease_id, sent, now)
        # What has arrived since is not missed any more.
        self._unseen, self._looked = unseen, now

    def _look_for(self, lease_id: str, sent: ty.Mapping[str, int | None],
                  now: float) -> dict[str, tuple[cloud_api.BuildTrace,
                                                 int | None, float]]:
        """See to the builds of a lease that were sent; returns what there is
        of those that have not arrived.
        """
        try:
            traces = self._cloud.traces(list(sent))
        except Exception as exc:
            # All that was sent may still be waiting for it.
            LOG.warning('Lease %s: the check for lost builds failed: %s',
                        lease_id, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
            return {}
        unseen = {server_id: (trace, sent[server_id], self._since(
            server_id, trace, sent[server_id]))
            for server_id, trace in traces.items()}
        late = {server_id: trace for server_id, trace in traces.items()
                if now - unseen[server_id][2] >= self._lost_after and (
                    trace is cloud_api.BuildTrace.CAUGHT or sent[server_id])}
        if late:
            self._recover(lease_id, late, sent)
        return unseen

    def _since(self, server_id: str, trace: cloud_api.BuildTrace,
               sent: int | None) -> float:
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

    def _recover(
            self, lease_id: str, late: ty.Mapping[str, cloud_api.BuildTrace],
            sent: ty.Mapping[str, int | None]) -> None:
        with self._database.reader() as session:
            sealed = dispatch.encrypted_call(session, [lease_id]).get(lease_id)
        again = {} if sealed is None else {
            server_id: sent[server_id] for server_id, trace in late.items()
            if trace is cloud_api.BuildTrace.NONE}
        try:
            if sealed is not None and again:
                LOG.warning('Lease %s: builds were lost, sending them again: '
                            '%s',
                            lease_id, ', '.join(again))
                self._dispatcher.send_again(lease_id, sealed, again)
            for server_id in late.keys() - again.keys():
                LOG.warning('Lease %s: no process is building server %s',
                            lease_id, server_id)
                with logs.about(server_id=server_id):
                    self._cloud.abandon(server_id)
                self._reconciler.check(server_id)
        except Exception:
            LOG.exception('Lease %s: its lost builds could not be handled '
                          'yet', lease_id)


#: Seconds between two looks.
PAUSE = 5
#: Seconds after which a build that cannot be sent is given up: by then its
#: servers are in ERROR, as those of a build that got lost.
_LONGEST = 3600
#: Seconds from now on beyond which none is made: a clock was ahead.
_FURTHEST = 60

_BUILDS = models.SlotBuild.__table__
_LEFT = sa.select(
    _BUILDS, models.Lease.id.label('lease_id'), models.Lease.project_id,
).outerjoin(
    models.Booking, models.Booking.server_id == _BUILDS.c.server_id).outerjoin(
    models.Booking.reservation).outerjoin(models.Reservation.lease).where(
        clock_skew.is_over(
            _BUILDS.c.created_at + dispatch.HEAD_START, sa.bindparam(
                'now', type_=sa.BigInteger), _FURTHEST)).order_by(
                    _BUILDS.c.created_at).limit(100)


class AbandonedSlots:
    """Sends builds that were not sent by their requests.

    :param send: sends a call, if the gate opens; says whether its servers
        are there; see :meth:`blazar_core.plugins.cloud_api.Cloud.send`
    :param opens: opens a sealed call
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 taken: slots.Slots,
                 send: ty.Callable[[str, bool, cloud_api.Gate], None],
                 opens: ty.Callable[[str], str]) -> None:
        self._database = database
        self._clock = clock
        self._places = taken
        self._send_call = send
        self._opens = opens

    def send_left(self) -> None:
        """Send what was left unsent; what cannot be sent now is tried again.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            left = connection.execute(_LEFT, {'now': now}).all()
        for row in left:
            with logs.about(row.lease_id, row.project_id):
                self._see_to(row, now)

    def _see_to(self, row: ty.Any, now: int) -> None:
        try:
            self._send(row)
        except errors.DatabaseUnavailable:
            raise
        except Exception as exc:
            LOG.warning('Server %s: its build cannot be sent yet: %s',
                        row.server_id, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
            if now - row.created_at <= _LONGEST:
                return
        # Its servers are gone, if it is there yet.
        self._places.dispatch(row.server_id)

    def _send(self, row: ty.Any) -> None:
        def gate(server_ids: ty.Collection[str]) -> cloud_api.Deadline | None:
            deadline = cloud_api.Deadline(self._clock, dispatch.SECONDS)
            if not self._places.dispatch(row.server_id):
                return None
            LOG.warning('Servers %s: the request that took their slots has '
                        'not sent their build; sending it',
                        ', '.join(server_ids))
            return deadline

        self._send_call(self._opens(row.sealed), row.apart, gate)
