# SPDX-License-Identifier: Apache-2.0

"""Moves of servers to other hosts, whatever their reason.

A move is a row of ``server_moves``, written before Nova is asked for anything.
Each request is recorded before it is made. It is made by the process that has
recorded it, within some seconds or not at all. Its result is read from Nova,
by any process, before the move may be requested again. So any process can
continue, and repeats no request.

Which servers have to move, where to, and how Nova is asked is for the callers:
:mod:`~blazar_core.lifecycle.best_effort` (best effort) and
:mod:`~blazar_core.healing.evacuation` (hosts in maintenance, failed hosts).
"""

import collections
import enum
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.lifecycle import fault_points
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

#: The reasons for which a server has to leave an unavailable host, with the
#: kind of its outage.
OUTAGE_OF: dict[str, str] = {
    states.MoveReason.MAINTENANCE: outages.MAINTENANCE,
    states.MoveReason.FAILED_HOST: outages.FAILURE}
#: The reasons for which a move is requested until the server has left.
_REPEATED = (*OUTAGE_OF, states.MoveReason.EVICTION)
#: Seconds after which a move is requested again if its server is still there,
#: doubled each time, and how often they are doubled.
AGAIN, _DOUBLED = 120, 5
#: Seconds within which a process may make a request that it has recorded, and
#: after which a request without a trace in Nova is lost.
_SEND, LOST = 20, 60

_State = cloud_api.ServerState
_Status = states.Move


class Obstacle(enum.StrEnum):
    """Why a server or booking stays on its host, as shown to users. Code
    compares members, never their text.
    """

    IN_USE = 'It is in use.'
    NO_CAPACITY = 'No other host has capacity for it.'
    BOUND = ('The server is not running or cannot be live-migrated (pinned '
             'CPUs, PCI, locked, server group): migrate it manually.')
    BUSY = 'A task of the server is in progress.'
    LATE = 'It could not be requested in time.'


class ServerMoves:
    """Records moves, requests them from Nova, and follows them.

    :param notify: called with an event type and a lease
    :param ahead: seconds before its maintenance from which on a host counts as
        unavailable
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: views.Notify = (
                     lambda *_what: None), ahead: int = 0) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._ahead = ahead

    @api.retried
    def plan(self, lease_id: str, reason: str, source: int,
             server_ids: ty.Iterable[str], next_at: int = 0) -> None:
        """Record that servers of a lease have to leave an unavailable host, or
        that other servers have to leave a host for the lease. Open moves of
        some of them stay as they are.

        :param next_at: when they are requested
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            known = set(session.scalars(sa.select(
                models.ServerMove.server_id).where(
                    models.ServerMove.lease_id == lease_id,
                    models.ServerMove.reason.in_(_REPEATED),
                    models.ServerMove.status.in_(states.OPEN_MOVES))))
            session.add_all(models.ServerMove(
                lease_id=lease_id, project_id=lease.project_id,
                server_id=server_id, reason=reason, source=source,
                next_at=next_at, updated_at=self._clock.now())
                for server_id in server_ids if server_id not in known)

    @api.retried
    def put_off(self, move: models.ServerMove, seconds: int) -> bool:
        """Postpone a move; return whether no other process has taken it
        meanwhile.
        """
        next_at = self._clock.now() + seconds
        values = {'move': move.id, 'seen': move.next_at, 'next': next_at}
        with self._database.begin() as connection:
            if connection.execute(_PUT_OFF, values).rowcount != 1:
                return False
        move.next_at = next_at
        return True

    def next_status(self, move: models.ServerMove,
                    seen: cloud_api.ObservedServer,
                    source: str) -> states.Move:
        """Return the status of a move, by what is observed of its server.

        :param source: the uuid of the host that it leaves
        """
        if seen.state is _State.GONE or (
                seen.state is _State.LEAVING and seen.host is None):
            return _Status.MOVED
        if seen.busy and move.reason != states.MoveReason.EVICTION:
            # Mostly because of the requested move.
            return _Status(move.status)
        if seen.host != source:
            return _Status.MOVED
        if move.status not in states.UNSETTLED or (
                move.status == _Status.REQUESTED and clocks.is_within(
                    (move.requested_at or 0) + LOST, self._clock.now(),
                    2 * LOST)):
            return _Status(move.status)
        return (_Status.PLANNED if move.reason in _REPEATED
                else _Status.FAILED)

    def request(self, move: models.ServerMove,
                call: ty.Callable[[cloud_api.Deadline], str],
                deadline: cloud_api.Deadline | None = None, **values: ty.Any,
                ) -> str | None:
        """Request a move from Nova, unless another process has.

        :param call: makes the request; returns why Nova refuses it
        :param deadline: after that it is not made
        :param values: what else is recorded of the move
        :returns: why the server stays; empty: Nova has accepted; None: the
            result is not known yet, the request was not sent and does not
            count, or the move is no longer wanted
        """
        # Starts before the commit: a process may stall right after that.
        deadline = deadline or cloud_api.Deadline(self._clock, _SEND)
        if deadline.passed():
            return Obstacle.LATE
        if not self.write(move.lease_id, {move.id: _Status.REQUESTED},
                          move.next_at, **values):
            return None
        fault_points.fault_point(fault_points.FaultPoint.MOVE_RECORDED,
                                 move.lease_id)
        try:
            why = call(deadline)
        except errors.NotSent as exc:
            LOG.warning('Lease %s: the move of server %s is requested later: '
                        '%s', move.lease_id, move.server_id, exc)
            if move.reason in _REPEATED:
                # As if it had not been recorded.
                self.write(move.lease_id, {move.id: _Status.PLANNED}, None,
                           move.attempts + 1, attempts=move.attempts,
                           next_at=move.next_at,
                           requested_at=move.requested_at)
            return None
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s: whether server %s is being moved is not '
                        'known yet: %s',
                        move.lease_id, move.server_id, exc)
            return None
        fault_points.fault_point(fault_points.FaultPoint.MOVE_REQUESTED,
                                 move.lease_id)
        if why:
            # No server was disturbed: it does not count for limits.
            self.write(move.lease_id, {
                move.id: _Status.PLANNED if move.reason in _REPEATED
                else _Status.FAILED}, None, move.attempts + 1,
                requested_at=None)
        else:
            self.write(move.lease_id, {move.id: _Status.ACCEPTED}, None,
                       move.attempts + 1)
        return why

    def write(self, lease_id: str, news: ty.Mapping[int, str],
              seen: int | None = None, attempts: int | None = None, /,
              **values: ty.Any) -> bool:
        """Record the statuses of moves; return whether they are still wanted.

        :param seen: ``next_at`` of the move that is to be requested, as read
        :param attempts: how often the move was requested when its status was
            determined; nothing is recorded if it was requested again since.
            None: record it in any case
        :param values: what else is recorded of them
        """
        described = self._database.retried(
            self._write, lease_id, news, seen, attempts, values)
        if described:
            self._notify('lease.update', described)
        return described is not None

    def _write(self, lease_id: str, news: ty.Mapping[int, str],
               seen: int | None, attempts: int | None,
               values: ty.Mapping[str, ty.Any],
               ) -> views.Lease | None:
        """Record the statuses of moves.

        :returns: the lease if its conditions have changed; empty: they have
            not; None: the moves are no longer wanted
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            rows = [session.get(models.ServerMove, one) for one in news]
            for row in rows:
                if row is None or not self._is_wanted(
                        session, lease, row, news[row.id],
                        values.get('reason', row.reason)) or (
                        news[row.id] == _Status.REQUESTED and
                        _is_taken(row, seen)):
                    return None
                if not _is_past(row, news[row.id], attempts):
                    _enter(row, news[row.id], now, values)
            if any(row.reason in _REPEATED for row in rows if row) or (
                    not conditions.update(lease, now, progress(
                        of_lease(session, lease_id)))):
                return {}
            lease.updated_at = now
            session.flush()
            return views.describe(lease)

    def _is_wanted(self, session: orm.Session, lease: models.Lease,
                   move: models.ServerMove, status: str, reason: str) -> bool:
        """Return whether a move may enter a status.

        A move that frees capacity is void when its lease no longer waits. A
        move off a host that is available again, or of a lease that ends, is
        not requested, but may finish.
        """
        if move.reason == states.MoveReason.EVICTION:
            return status != _Status.REQUESTED or (
                lease.status not in states.ENDING)
        if move.reason not in OUTAGE_OF:
            return lease.status == states.Lease.IN_PROGRESS
        return status != _Status.REQUESTED or (
            lease.status not in states.ENDING and outages.are_unavailable(
                session.connection(), [move.source], self._clock.now(),
                [OUTAGE_OF[reason]], self._ahead))


def _enter(row: models.ServerMove, status: str, now: int,
           values: ty.Mapping[str, ty.Any]) -> None:
    row.enter(status, now)
    if status == _Status.REQUESTED:
        row.requested_at = now
        row.attempts += 1
        if row.reason in _REPEATED:
            row.next_at = now + _pause(row.attempts)
    for name, value in values.items():
        setattr(row, name, value)


def _is_taken(move: models.ServerMove, seen: int | None) -> bool:
    """Return whether another process has requested a move, or is about to."""
    return move.status != _Status.PLANNED or move.next_at != seen


def _is_past(move: models.ServerMove, status: str, attempts: int | None,
             ) -> bool:
    """Return whether another process has recorded the result of a move since a
    status was determined.
    """
    return attempts not in (None, move.attempts) or (
        status not in (move.status, *states.MOVE.steps[move.status]))


def progress(moves: ty.Iterable[models.ServerMove]) -> conditions.Condition:
    """Return the condition of a lease while servers move for it."""
    counts = collections.Counter(move.status for move in moves)
    failed = counts.pop(_Status.FAILED, 0)
    said = f'{counts[_Status.MOVED]} of {counts.total()} servers moved.'
    return waiting.made(
        f'{said} {failed} could not be moved.' if failed else said)


def of_lease(session: orm.Session, lease_id: str) -> list[models.ServerMove]:
    """Return the moves that free capacity for a lease."""
    return list(session.scalars(sa.select(models.ServerMove).where(
        models.ServerMove.lease_id == lease_id,
        models.ServerMove.reason == states.MoveReason.BEST_EFFORT,
    ).order_by(models.ServerMove.server_id)))


def _pause(attempts: int) -> int:
    """Return the seconds until a move is requested again."""
    return AGAIN << min(attempts - 1, _DOUBLED)


_MOVE = models.ServerMove.__table__.c
_PUT_OFF = sa.update(models.ServerMove.__table__).where(
    _MOVE.id == sa.bindparam('move'), _MOVE.next_at == sa.bindparam('seen'),
    _MOVE.status.in_(states.OPEN_MOVES),
).values(next_at=sa.bindparam('next'))
#: The condition that a move off an unavailable host is not over.
is_open = sa.and_(
    _MOVE.reason.in_([*OUTAGE_OF]), _MOVE.status.in_(states.OPEN_MOVES))
#: The condition that a move may be looked at or requested again: no right
#: clock has written more than twice its pause.
is_due = clock_skew.is_over(
    _MOVE.next_at, sa.bindparam('now', type_=sa.BigInteger), sa.case(*(
        (_MOVE.attempts <= attempts, 2 * _pause(attempts))
        for attempts in range(1, _DOUBLED + 1)),
        else_=2 * _pause(_DOUBLED + 1)))
