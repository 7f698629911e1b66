# SPDX-License-Identifier: Apache-2.0

"""The moves of servers by which room is made for a lease.

They are rows, written down before anything is asked for. Each is asked for at
most once, by who has written down that he is about to; what becomes of it is
seen in the cloud, by whoever looks. So whoever carries on finds all that is
under way, and asks for none of it again.
"""

import collections
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_status
from blazar_core.plugins import cloud_api

__all__ = ['AT_ONCE', 'LOST', 'Moving', 'asked', 'of_others', 'progress',
           'whole']

LOG = logging.getLogger(__name__)

#: How many servers move at the same time.
AT_ONCE = 4
#: Seconds after which nobody asks for a move any more that he was about to ask
#: for, and after which one that has left no trace is taken to be lost.
_SEND, LOST = 20, 60

_State = cloud_api.ServerState


class Moving:
    """Asks for moves, and sees what becomes of them.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud,
                 notify: ty.Callable[[str, lease_status.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify

    def follow(self, lease_id: str) -> list[models.Move]:
        """See what has become of the moves of a lease; returns all of them.

        What cannot be looked at now is looked at the next time.
        """
        news = {}
        for move in self._rows(lease_id):
            if move.status in states.UNSETTLED:
                try:
                    status = self._judge(move)
                except errors.CloudUnavailable as exc:
                    LOG.warning('Lease %s: server %s, which is to move, '
                                'cannot be looked at: %s', lease_id,
                                move.server_id, exc)
                    continue
                if status != move.status:
                    news[move.server_id] = status
        if news:
            self.write(lease_id, news)
            fault_points.fault_point(fault_points.FaultPoint.ROOM_SEEN,
                                     lease_id)
        return self._rows(lease_id)

    def _judge(self, move: models.Move) -> str:
        """What has become of a move that was asked for, or may have been."""
        seen = self._cloud.look(move.server_id)
        if seen.state is _State.GONE or (
                seen.state is _State.LEAVING and seen.host is None):
            return states.Move.MOVED
        if seen.busy:
            # Somebody is at it, mostly because it was asked for.
            return states.Move(move.status)
        if seen.host != self._uuid(move.source):
            return states.Move.MOVED
        lost = not clocks.is_within(
            (move.asked_at or 0) + LOST, self._clock.now(), 2 * LOST)
        return states.Move.FAILED if (
            lost or move.status == states.Move.UNDER_WAY
        ) else states.Move(move.status)

    def ask(self, lease_id: str) -> None:
        """Ask for the next moves of a lease, so many at the same time."""
        moves = self._rows(lease_id)
        under_way = sum(move.status in states.UNSETTLED for move in moves)
        for move in moves:
            if move.status != states.Move.PLANNED or under_way >= AT_ONCE:
                continue
            # It counts from before the commit: a process may stand still
            # right behind that.
            deadline = cloud_api.Deadline(self._clock, _SEND)
            if not self.write(lease_id, {move.server_id: states.Move.ASKED}):
                return
            fault_points.fault_point(fault_points.FaultPoint.ROOM_TAKEN,
                                     lease_id)
            try:
                why = self._why_stays(move.server_id) or self._cloud.move(
                    move.server_id, self._uuid(move.target), lease_id,
                    deadline)
            except errors.CloudUnavailable as exc:
                LOG.warning('Lease %s: whether server %s moves is not known '
                            'yet: %s', lease_id, move.server_id, exc)
                under_way += 1
                continue
            fault_points.fault_point(fault_points.FaultPoint.ROOM_ASKED,
                                     lease_id)
            if why:
                LOG.warning('Lease %s: server %s stays where it is: %s',
                            lease_id, move.server_id, why)
            under_way += not why
            self.write(lease_id, {move.server_id: states.Move.FAILED if why
                                  else states.Move.UNDER_WAY}, bool(why))

    def _why_stays(self, server_id: str) -> str:
        """Why a server stays that came under a lease after its move was
        planned; empty: it may move.

        :raises CloudUnavailable: when that cannot be said now
        """
        with self._database.reader() as session:
            if lease_status.booking_of(session, server_id) is None:
                return ''
        return '' if self._cloud.movable([server_id]).get(server_id) else (
            'it has a lease by now.')

    def write(self, lease_id: str, news: ty.Mapping[str, str],
              refused: bool = False) -> bool:
        """Write down how far moves are; says whether room is still made, and
        all of them may get there.

        :param refused: nothing has come of asking for them
        """
        described = self._database.retried(
            self._write, lease_id, news, refused)
        if described is None:
            return False
        if described:
            self._notify('lease.update', described)
        return True

    def _write(self, lease_id: str, news: ty.Mapping[str, str],
               refused: bool) -> lease_status.Lease | None:
        """
        :returns: the lease if it says something else now, nothing if not;
            None: no room is made for it any more
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.IN_PROGRESS:
                return None
            rows = {row.server_id: row for row in session.scalars(
                _OF_LEASE, {'lease': lease_id})}
            for server_id, status in news.items():
                row = rows.get(server_id)
                if row is None or (
                        status == states.Move.ASKED and _is_taken(row)):
                    return None
                if row.status in states.MOVE.final():
                    # Somebody else has seen it, too.
                    continue
                row.enter(status, now)
                if status == states.Move.ASKED:
                    row.asked_at = now
                elif refused:
                    # No server was disturbed: it counts for no pace.
                    row.asked_at = None
            if not conditions.update(lease, now, progress(rows.values())):
                return {}
            lease.updated_at = now
            session.flush()
            return views.describe(lease)

    def _rows(self, lease_id: str) -> list[models.Move]:
        with self._database.reader() as session:
            return list(session.scalars(_OF_LEASE, {'lease': lease_id}))

    def _uuid(self, host_id: int) -> str:
        with self._database.reader() as session:
            return session.get_one(models.Host, host_id).uuid


def _is_taken(move: models.Move) -> bool:
    """Whether somebody has asked for a move, or was about to."""
    return move.status != states.Move.PLANNED


def progress(moves: ty.Iterable[models.Move]) -> conditions.Condition:
    """Return the condition of a lease while servers move for it."""
    counts = collections.Counter(move.status for move in moves)
    failed = counts.pop(states.Move.FAILED, 0)
    said = f'{counts[states.Move.MOVED]} of {counts.total()} servers moved.'
    return waiting.made(
        f'{said} {failed} could not be moved.' if failed else said)


def whole(moves: ty.Iterable[models.Move]) -> str:
    """What is said, when it is over, of what was moved for a lease.

    Whose servers they are does not concern its owner.
    """
    counts = collections.Counter(move.status for move in moves)
    said = [f'Servers moved for it: {counts[states.Move.MOVED]}']
    said += [f'{what}: {count}' for what, count in (
        ('being moved', sum(counts[one] for one in states.UNSETTLED)),
        ('not moved', counts[states.Move.FAILED])) if count]
    return ', '.join(said) + '.'


def asked(session: orm.Session, lease_id: str) -> list[models.Move]:
    """The moves of a lease that were asked for."""
    return list(session.scalars(sa.select(models.Move).where(
        models.Move.lease_id == lease_id,
        models.Move.status != states.Move.PLANNED)))


def of_others(session: orm.Session, lease_id: str) -> list[models.Move]:
    """The moves for other leases that are to come, or under way."""
    return list(session.scalars(sa.select(models.Move).join(
        models.Lease, models.Lease.id == models.Move.lease_id).where(
        models.Move.lease_id != lease_id,
        models.Lease.status == states.Lease.IN_PROGRESS,
        models.Move.status.in_((states.Move.PLANNED, *states.UNSETTLED)))))


_OF_LEASE = sa.select(models.Move).where(
    models.Move.lease_id == sa.bindparam('lease')).order_by(
        models.Move.server_id)
