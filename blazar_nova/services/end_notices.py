# SPDX-License-Identifier: Apache-2.0

"""Notify operators of servers that a lease by default would have ended.

An operator who considers making every boot a lease learns by this what these
leases would end. The servers have neither a lease nor a booking, and a failure
here does not affect them.
"""

import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import lease_status
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

EVENT = 'lease.event.would_end'

#: Seconds for which sent notices are kept.
KEEP = 30 * 86400
#: Seconds after which a process that was about to notify counts as dead.
_CLAIM = 60

#: The most servers that one periodic sync notifies about: others are not
#: delayed, and notifications of leases are not pushed out of the outbox.
_AT_ONCE = 500
#: Seconds until a server that could not be looked up is tried again.
_LATER = 600

_WOULD_END = models.WouldEnd.__table__
_IDS = _WOULD_END.c.server_id
#: The columns that the servers of one boot have in common.
_BOOT = (_WOULD_END.c.project_id, _WOULD_END.c.user_id,
         _WOULD_END.c.created_at, _WOULD_END.c.end_date)


class EndNotices:
    """Records servers at their boot, and notifies when the lease that they do
    not have would have ended.

    :param notify: called with an event type and a payload
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, notify: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._notify = notify

    def note(self, project_id: str, user_id: str,
             server_ids: ty.Sequence[str], window: model.Window) -> None:
        """Record servers that are about to be built.

        A failure is logged, and does not prevent the build.

        :param window: of the lease that they do not get
        """
        try:
            with self._database.begin() as connection:
                connection.execute(_WOULD_END.insert(), [{
                    'server_id': one, 'project_id': project_id,
                    'user_id': user_id, 'created_at': window.start,
                    'end_date': window.end, 'claimed_until': 0,
                    'notified_at': None} for one in server_ids])
        except Exception as exc:
            LOG.warning('Servers %s: the end of their default lease is not '
                        'recorded, and will not be announced: %s',
                        ', '.join(server_ids), exc)

    def tell(self) -> None:
        """Notify about servers that still exist after the end of that lease:
        once, unless a process dies right then.

        :raises DatabaseUnavailable: when the database does not answer
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            due = connection.execute(sa.select(_IDS, *_BOOT).where(
                _WOULD_END.c.end_date <= now,
                _WOULD_END.c.notified_at.is_(None), _free(now)).order_by(
                    *_BOOT, _IDS).limit(_AT_ONCE)).all()
        for boot, rows in itertools.groupby(due, lambda row: row[1:]):
            there = [row.server_id for row in rows
                     if self._is_there(row.server_id)]
            mine = there and self._database.retried(self._claim, there)
            if mine:
                project_id, user_id, created_at, end_date = boot
                LOG.info('Servers %s of project %s would be past their end if '
                         'every boot had a default lease',
                         ', '.join(mine), project_id)
                self._notify(EVENT, {
                    'version': '1.0', 'server_ids': mine,
                    'project_id': project_id, 'user_id': user_id,
                    'created_at': clocks.iso(created_at),
                    'end_date': clocks.iso(end_date)})
                self._database.retried(self._write_down, mine)

    def _is_there(self, server_id: str) -> bool:
        """Return whether a server exists and has no lease; if not, forget it.
        """
        try:
            state = self._cloud.look(server_id).state
        except errors.CloudUnavailable as exc:
            LOG.warning('Server %s could not be checked; the end of its '
                        'default lease is announced later: %s', server_id, exc)
            self._database.retried(self._put_off, server_id)
            return False
        except Exception:
            LOG.exception('Server %s could not be checked; the end of its '
                          'default lease is announced later', server_id)
            return False
        with self._database.reader() as session:
            is_leased = lease_status.booking_of(session, server_id) is not None
        if state is cloud_api.ServerState.GONE or is_leased:
            self._forget(_IDS == server_id)
            return False
        return state is not cloud_api.ServerState.LEAVING

    def _claim(self, server_ids: ty.Sequence[str]) -> list[str]:
        """Claim servers; return those that no other process has claimed."""
        now = self._clock.now()
        with self._database.begin() as connection:
            return [one for one in server_ids if connection.execute(
                sa.update(_WOULD_END).where(
                    _IDS == one, _WOULD_END.c.notified_at.is_(None),
                    _free(now)).values(claimed_until=now + _CLAIM)).rowcount]

    def _put_off(self, server_id: str) -> None:
        """Postpone a server, so that others come first."""
        with self._database.begin() as connection:
            connection.execute(sa.update(_WOULD_END).where(
                _IDS == server_id).values(
                    claimed_until=self._clock.now() + _LATER))

    def _write_down(self, server_ids: ty.Sequence[str]) -> None:
        with self._database.begin() as connection:
            for one in server_ids:
                connection.execute(sa.update(_WOULD_END).where(
                    _IDS == one).values(notified_at=self._clock.now()))

    @api.retried
    def _forget(self, which: sa.ColumnElement[bool]) -> None:
        with self._database.begin() as connection:
            connection.execute(sa.delete(_WOULD_END).where(which))

    def trim(self) -> None:
        """Forget notices that are old, and servers that are not notified about
        any longer.

        :raises DatabaseUnavailable: when the database does not answer
        """
        before = self._clock.now() - KEEP
        # The first condition is redundant, and uses an index.
        self._forget(sa.and_(
            _WOULD_END.c.end_date < before, sa.func.coalesce(
                _WOULD_END.c.notified_at, _WOULD_END.c.end_date) < before))


def _free(now: int) -> sa.ColumnElement[bool]:
    """Return the condition that no process is about to notify about a server,
    and that it is not postponed.
    """
    return clock_skew.is_over(_WOULD_END.c.claimed_until, now, 2 * _LATER)


def told(database: api.Database) -> ty.Sequence[sa.Row[ty.Any]]:
    """Return the servers notified about in the last :data:`KEEP` seconds, by
    their ends: the columns of :class:`~blazar_core.db.models.WouldEnd`.
    """
    with database.connection() as connection:
        return connection.execute(sa.select(_WOULD_END).where(
            _WOULD_END.c.notified_at.is_not(None)).order_by(
                _WOULD_END.c.end_date, _IDS)).all()
