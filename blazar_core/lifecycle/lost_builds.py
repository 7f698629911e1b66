# SPDX-License-Identifier: Apache-2.0

"""Send builds again whose request or conductor died.

:class:`LostBuilds` handles the builds of leases that were sent and make no
progress; the permit to send one is ``dispatched_at`` of its bookings.

:class:`UnsentSlotBuilds` sends builds that use reservation slots: a boot takes
its slots, and sends the build itself. In between its call is stored in a row;
deleting the row is the permit to send the build. So exactly one of the request
and the listeners sends it, even if another process was suspended.
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

LOG = logging.getLogger(__name__)

#: So many leases in a row without an answer of the cloud end a look.
_SILENT = 3

_SENT = sa.select(
    models.Lease.id, models.Lease.project_id, models.Booking.server_id,
    models.Booking.dispatched_at,
).join(models.Booking.reservation).join(models.Reservation.lease).where(
    models.Lease.status.in_((*states.BEGUN, states.Lease.ERROR)),
    models.Booking.server_id.is_not(None), models.Booking.running.is_(False))

#: The trace of a build, when it was sent, and since when the trace is the
#: same: by the monotonic clock, as the time of the dispatch may be of a wrong
#: clock.
_Seen: ty.TypeAlias = tuple[cloud_api.BuildTrace, int | None, float]


class LostBuilds:
    """Handles lost builds.

    :param lost_after: seconds without progress after which no process works on
        a build any longer
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
        #: What was seen of the builds at the last look, by server, and the
        #: time of that look.
        self._unseen: dict[str, _Seen] = {}
        self._looked = 0.0

    def send(self) -> None:
        """Handle the builds that were sent and make no progress.

        If a build left no trace, a worker died between taking and sending it,
        or the message bus lost it: it is sent again. If the service that built
        it died, its server is marked as failed. Both only after longer than
        any live service takes: a build that is sent twice would leave a
        running server that is not recorded.
        """
        now = self._clock.elapsed()
        unseen: dict[str, _Seen] = {}
        silent = 0
        for (lease_id, project_id), sent in self._sent().items():
            with logs.about(lease_id, project_id):
                found = self._look_for(lease_id, sent, now)
            silent = silent + 1 if found is None else 0
            unseen |= found or {}
            if silent == _SILENT:
                LOG.warning('The cloud does not answer: leases that are left '
                            'are checked for lost builds next time')
                break
        # Builds that have arrived since are left out.
        self._unseen, self._looked = unseen, now

    def _look_for(self, lease_id: str, sent: ty.Mapping[str, int | None],
                  now: float) -> dict[str, _Seen] | None:
        """Handle the builds of a lease that were sent; return the traces of
        those that have not arrived.

        :returns: None: the cloud does not answer
        """
        try:
            traces = self._cloud.traces(list(sent))
        except Exception as exc:
            # All builds may still be waiting for that service.
            LOG.warning('Lease %s: the check for lost builds failed: %s',
                        lease_id, exc, exc_info=not isinstance(
                            exc, errors.CloudUnavailable))
            return None if isinstance(exc, errors.CloudUnavailable) else {}
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
        """Return since when a build has this trace, by the monotonic clock."""
        before, now = self._unseen.get(server_id), self._clock.elapsed()
        if before is None or before[0] is not trace:
            return now
        if before[1] == sent:
            return before[2]
        # It was sent after the last look, whatever clock its time is of.
        ago = self._clock.now() - sent if sent else 0
        return now - max(0, min(ago, now - self._looked))

    def _sent(self) -> dict[tuple[str, str], dict[str, int | None]]:
        """Return the servers that should run, with the time of their dispatch,
        by lease and project.

        Includes servers that wait to be sent again, as the cloud may be stuck
        while it reports that it could not place them, and failed ones, as the
        service that failed may not have finished with them.
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
            encrypted = dispatch.encrypted_call(
                session, [lease_id]).get(lease_id)
        again = {} if encrypted is None else {
            server_id: sent[server_id] for server_id, trace in late.items()
            if trace is cloud_api.BuildTrace.NONE}
        try:
            if encrypted is not None and again:
                LOG.warning('Lease %s: builds were lost, sending them again: '
                            '%s',
                            lease_id, ', '.join(again))
                self._dispatcher.send_again(lease_id, encrypted, again)
            for server_id in late.keys() - again.keys():
                LOG.warning('Lease %s: no process is building server %s',
                            lease_id, server_id)
                with logs.about(server_id=server_id):
                    self._cloud.mark_failed(server_id)
                self._reconciler.check(server_id)
        except Exception:
            LOG.exception('Lease %s: its lost builds could not be handled '
                          'yet', lease_id)


#: Seconds between two looks.
PAUSE = 5
#: Seconds after which a build that cannot be sent is given up: by then its
#: servers are in ERROR, like those of a lost build.
_LONGEST = 3600
#: Seconds from now on beyond which no right clock creates one.
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


class UnsentSlotBuilds:
    """Sends builds that were not sent by their requests.

    :param permits: has the permits to send them
    :param send: sends a call, if the gate permits it; its second argument is
        whether the servers are for hosts that serve leases only; see
        :meth:`blazar_core.plugins.cloud_api.Cloud.send`
    :param decrypt: decrypts a stored call
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 permits: slots.Slots,
                 send: ty.Callable[[str, bool, cloud_api.Gate], None],
                 decrypt: ty.Callable[[str], str]) -> None:
        self._database = database
        self._clock = clock
        self._permits = permits
        self._send_call = send
        self._decrypt = decrypt

    def send(self) -> None:
        """Send unsent builds; builds that cannot be sent now are retried
        later.
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
        # If the row still exists, its servers are gone.
        self._permits.take_permit(row.server_id)

    def _send(self, row: ty.Any) -> None:
        def gate(server_ids: ty.Collection[str]) -> cloud_api.Deadline | None:
            deadline = cloud_api.Deadline(self._clock, dispatch.SECONDS)
            if not self._permits.take_permit(row.server_id):
                return None
            LOG.warning('Servers %s: the request that took their slots has '
                        'not sent their build; sending it',
                        ', '.join(server_ids))
            return deadline

        self._send_call(self._decrypt(row.encrypted), row.apart, gate)
