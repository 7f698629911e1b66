# SPDX-License-Identifier: Apache-2.0

"""Leases for which capacity is made: servers of others are moved.

It is planned who moves where (:mod:`blazar_core.lifecycle.move_plans`). What
fails is planned around; what is under way when somebody dies goes on, and
whoever carries on looks at what is so.

As soon as there is room the lease gets it, as one that has waited for it
(:mod:`blazar_core.lifecycle.seeking`).
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import move_plans
from blazar_core.lifecycle import moving
from blazar_core.lifecycle import seeking

__all__ = ['MakingRoom', 'SETTLE']

LOG = logging.getLogger(__name__)

#: Seconds after the last move until the books are sure to know of it.
SETTLE = 30
#: Seconds until somebody looks again where nothing could be done.
_PAUSE = 10


class MakingRoom:
    """Makes room for leases.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: ty.Callable[[str, facts.Lease], None],
                 seeking: seeking.Seeking, plans: move_plans.MovePlans,
                 moving: moving.Moving) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._seeking = seeking
        self._plans = plans
        self._moving = moving

    def go_on(self, lease_id: str) -> facts.Outcome:
        """Do what can be done for a lease now.

        :returns: when to look again; None: it is no concern any more
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status != states.Lease.IN_PROGRESS:
            return None
        moves = self._moving.follow(lease_id)
        why = self._try(lease_id)
        if why is None:
            LOG.info('Lease %s has its room. %s', lease_id,
                     moving.whole(moves))
            return None
        left = (lease.retry_until or 0) - self._clock.now()
        if left <= 0:
            self._time_out(lease_id, why)
            return None
        pause = facts.AGAIN
        if not any(move.status in (states.Move.PLANNED, *states.UNSETTLED)
                   for move in moves):
            settled = max((move.updated_at for move in moves
                           if move.status == states.Move.MOVED), default=None)
            if settled is None or not (
                    0 <= self._clock.now() - settled < SETTLE):
                planned = self._plans.make(lease_id, why)
                pause = facts.AGAIN if planned else _PAUSE
        self._moving.ask(lease_id)
        return facts.Later(min(pause, left), why)

    def _try(self, lease_id: str) -> str | None:
        """Give a lease its room; says why there is none, None: it has it."""
        try:
            return self._seeking.admit(lease_id)
        except (errors.CloudUnavailable, errors.BooksBusy,
                errors.VaultError) as exc:
            return str(exc)
        except (errors.BooksUnavailable, errors.NotFound):
            raise
        except Exception:
            LOG.exception('Lease %s: whether there is room for it could not '
                          'be found out', lease_id)
            return 'it could not be found out what it needs.'

    def _time_out(self, lease_id: str, why: str) -> None:
        described, moved = self._database.retried(
            self._write_end, lease_id, why)
        if described is not None:
            LOG.warning('Lease %s gets no room: %s Moved for it: %s', lease_id,
                        why, ', '.join(moved) or 'nobody')
            self._notify('lease.update', described)

    def _write_end(self, lease_id: str, why: str,
                   ) -> tuple[facts.Lease | None, list[str]]:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.status != states.Lease.IN_PROGRESS:
                return None, []
            moves = list(session.scalars(sa.select(models.Move).where(
                models.Move.lease_id == lease_id)))
            seeking.fail(
                session, lease, f'No room could be made for it until '
                f'{clocks.minute(now)} UTC: {why} {moving.whole(moves)}',
                states.EventType.MAKE_ROOM, now)
            session.flush()
            return views.describe(lease), [
                move.server_id for move in moves
                if move.status == states.Move.MOVED]
