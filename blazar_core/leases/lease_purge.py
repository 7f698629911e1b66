# SPDX-License-Identifier: Apache-2.0

"""Leases that were over long ago are deleted, with all that they have left.

A lease goes when nobody finishes anything of it any more: it is TERMINATED,
and none of its bookings, of the hosts that it held, of the events that were to
come and of the credentials of its owner is left. What is in the way is the
engine's or an operator's to finish, not to be deleted here. Occurrences of a
lease that recurs stay until all of them may go.

Nothing that is reckoned with needs what goes: limits, quotas and usage
(:mod:`blazar_core.leases.usage`) are of leases that are not over, and so are
the books in memory, for which nothing changes. Usage records
(:mod:`blazar_core.leases.accounting`) stay until it is said that they go, too.
What leases there have been is told by their rows alone, so it is written down
up to when these may be gone (:func:`purged_before`).
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import booking_index
from blazar_core.capacity import feed
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import accounting
from blazar_core.leases import idempotency

__all__ = ['LEAST_AGE', 'Purged', 'LeasePurge', 'purged_before']

#: How many leases are deleted by one transaction: those who wait for one of
#: these wait for some tenths of a second.
BATCH = 500
#: Seconds for which a lease that is over stays at least: a request that made
#: it may come again for so long.
LEAST_AGE = idempotency.KEEP

_MARK = 'purge'
_BEFORE = 'before'
_LEASES = models.Lease.__table__
_RESERVATIONS = models.Reservation.__table__

#: A page of the leases that were over, by an index.
_OVER = sa.select(_LEASES.c.id, _LEASES.c.end_date).where(
    _LEASES.c.status == states.Lease.TERMINATED,
    _LEASES.c.end_date >= sa.bindparam('since'),
    _LEASES.c.end_date < sa.bindparam('before'),
    sa.or_(_LEASES.c.end_date > sa.bindparam('since'),
           _LEASES.c.id > sa.bindparam('last')),
).order_by(_LEASES.c.end_date, _LEASES.c.id).limit(BATCH)

#: What has a row for each lease, or several.
_PARTS = tuple(one.__table__ for one in (
    models.Event, models.HeldBuild, models.Orphan,
    models.Reservation, models.ServerMove))

_RECURRENCES = models.Recurrence.__table__.c


class Purged(ty.NamedTuple):
    """How many leases were deleted, and how many stay that were over, too."""

    deleted: int
    kept: int


class LeasePurge:
    """Deletes leases; any number of processes may, at any time.

    :param tell: told how far it has come, in a sentence, now and then
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 tell: ty.Callable[[str], None]) -> None:
        self._database = database
        self._clock = clock
        self._tell = tell

    def purge(self, before: int, dry_run: bool = False,
              usage_before: int | None = None) -> Purged:
        """Delete the leases that were over before an instant.

        One was over at its end, when it was ended or when it was deleted,
        whichever was last. What an interruption leaves is deleted the next
        time.

        :param dry_run: only count them
        :param usage_before: delete the usage records of purged leases of
            which nothing was recorded since then; None: they stay
        :raises InvalidLeaseParams: when that instant is too near
        :raises DatabaseUnavailable: when the database does not answer
        """
        if before > self._clock.now() - LEAST_AGE:
            raise errors.InvalidLeaseParams(
                f'Ended leases are kept for at least {LEAST_AGE // 3600} '
                'hours. Write an earlier date.')
        deleted = kept = 0
        since, last = 0, ''
        while page := self._page(since, last, before):
            ids = [row.id for row in page]
            with self._database.reader() as session:
                done = _over(session, ids, before)
                over = len(done)
                done = _finished(session, done, before)
            if done and not dry_run:
                self._database.retried(self._remember, before)
                deleted += self._database.retried(self._delete, done, before)
            else:
                deleted += len(done)
            kept += over - len(done)
            since, last = page[-1].end_date, page[-1].id
            self._tell(f'{words.count(deleted, "lease")}; leases that ended '
                       f'until {clocks.minute(since)} UTC are processed.')
        if not dry_run:
            self._tidy(before)
            last = ''
            while usage_before is not None and (
                    last := self._database.retried(
                        self._forget_usage, usage_before, last)):
                self._tell(f'Usage records: leases until {last} are done.')
        return Purged(deleted, kept)

    def _page(self, since: int, last: str, before: int,
              ) -> ty.Sequence[ty.Any]:
        with self._database.connection() as connection:
            return connection.execute(_OVER, {
                'since': since, 'last': last, 'before': before}).all()

    def _remember(self, before: int) -> None:
        if (purged_before(self._database) or 0) >= before:
            return
        now = self._clock.now()
        with self._database.writer() as session:
            row = session.get(models.Setting, _MARK, with_for_update=True)
            if row is None:
                session.add(models.Setting(
                    name=_MARK, value={_BEFORE: before}, updated_at=now))
            elif row.value[_BEFORE] < before:
                row.value, row.updated_at = {_BEFORE: before}, now

    def _delete(self, ids: ty.Sequence[str], before: int) -> int:
        """Delete those of some leases that may still go; returns how many."""
        with self._database.writer() as session:
            # In one order, so that two who do this do not wait for each other
            # in a circle.
            for lease_id in sorted(ids):
                api.lock(session, lease_id)
            gone = _finished(session, _over(session, ids, before), before)
            for table in _PARTS:
                session.execute(sa.delete(table).where(
                    table.c.lease_id.in_(gone)))
            session.execute(sa.delete(_LEASES).where(_LEASES.c.id.in_(gone)))
        return len(gone)

    def _tidy(self, before: int) -> None:
        """Delete what no lease needs."""
        last = ''
        while ids := self._recurrences(last):
            self._database.retried(self._forget, ids, before)
            last = ids[-1]
        now = self._clock.now()
        self._database.retried(idempotency.trim, self._database, now)
        # Where no listener runs, nobody else does that.
        feed.trim(self._database, now - booking_index.KEEP)

    def _forget_usage(self, before: int, last: str) -> str:
        with self._database.begin() as connection:
            return accounting.forget(connection, before, last)

    def _recurrences(self, last: str) -> ty.Sequence[str]:
        with self._database.connection() as connection:
            return connection.scalars(sa.select(_RECURRENCES.id).where(
                _RECURRENCES.id > last).order_by(
                    _RECURRENCES.id).limit(BATCH)).all()

    def _forget(self, ids: ty.Sequence[str], before: int) -> None:
        with self._database.begin() as connection:
            connection.execute(sa.delete(models.Recurrence).where(
                _RECURRENCES.id.in_(ids), _RECURRENCES.created_at < before,
                ~sa.exists().where(
                    _LEASES.c.recurrence_id == _RECURRENCES.id)))


def _over(session: orm.Session, ids: ty.Sequence[str], before: int,
          ) -> ty.Sequence[str]:
    """Those of some leases that were over, all told, before an instant."""
    return session.scalars(sa.select(_LEASES.c.id).where(
        _LEASES.c.id.in_(ids), *_is_over(_LEASES, before))).all()


def _is_over(lease: ty.Any, before: int) -> tuple[ty.Any, ...]:
    return (lease.c.status == states.Lease.TERMINATED,
            lease.c.end_date < before, lease.c.updated_at < before,
            sa.func.coalesce(lease.c.deleted_at, 0) < before)


def _finished(session: orm.Session, ids: ty.Sequence[str], before: int,
              ) -> ty.Sequence[str]:
    """Those of some leases of which nobody finishes anything any more."""
    other = _LEASES.alias()
    mine = _RESERVATIONS.c.lease_id == _LEASES.c.id
    return session.scalars(sa.select(_LEASES.c.id).where(
        _LEASES.c.id.in_(ids), *(~sa.exists().where(*unfinished) for
                                 unfinished in (
            (models.Credential.lease_id == _LEASES.c.id,),
            (models.Event.lease_id == _LEASES.c.id,
             models.Event.status.in_(states.OPEN)),
            (mine, models.Booking.reservation_id == _RESERVATIONS.c.id),
            (mine, models.Host.assigned_to == _RESERVATIONS.c.id),
            (other.c.recurrence_id == _LEASES.c.recurrence_id,
             ~sa.and_(*_is_over(other, before))))))).all()


def purged_before(database: api.Database) -> int | None:
    """Leases that were over before this instant may be gone; None: all that
    there have been are there.
    """
    with database.reader() as session:
        row = session.get(models.Setting, _MARK)
    return None if row is None else int(row.value[_BEFORE])
