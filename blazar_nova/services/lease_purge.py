# SPDX-License-Identifier: Apache-2.0

"""Delete leases that ended long ago, and everything that belongs to them.

A lease is purged if nothing of it is pending: it is TERMINATED, and has no
bookings, assigned hosts, open events or credentials. Anything that prevents
its purge is left to the engine or an operator. Occurrences of a recurring
lease are kept until all of them can be purged.

Purging affects nothing else: limits, quota and usage
(:mod:`blazar_core.leases.usage`) only count leases that are not over, and so
does the index in memory. Usage records (:mod:`blazar_core.leases.accounting`)
are deleted only on request. As rows are the only record of past leases,
:func:`purged_before` returns up to when they may be missing.
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
from blazar_core.leases import idempotency

#: Number of leases per transaction, which may block other transactions on
#: these leases for some tenths of a second.
BATCH = 500
#: Minimum seconds for which an ended lease is kept, as the request that
#: created it may be repeated for so long.
LEAST_AGE = idempotency.KEEP

_MARK = 'purge'
_BEFORE = 'before'
_LEASES = models.Lease.__table__
_RESERVATIONS = models.Reservation.__table__

#: A page of ended leases, by an index.
_OVER = sa.select(_LEASES.c.id, _LEASES.c.end_date).where(
    _LEASES.c.status == states.Lease.TERMINATED,
    _LEASES.c.end_date >= sa.bindparam('since'),
    _LEASES.c.end_date < sa.bindparam('before'),
    sa.or_(_LEASES.c.end_date > sa.bindparam('since'),
           _LEASES.c.id > sa.bindparam('last')),
).order_by(_LEASES.c.end_date, _LEASES.c.id).limit(BATCH)

#: Tables with rows of leases.
_PARTS = tuple(one.__table__ for one in (
    models.Event, models.DeferredBuild, models.Reservation,
    models.ServerMove))

_RECURRENCES = models.Recurrence.__table__.c
_RECORDS = models.UsageRecord.__table__.c


class Purged(ty.NamedTuple):
    """The number of leases deleted, and of ended leases that are kept."""

    deleted: int
    kept: int


class LeasePurge:
    """Deletes leases. Safe to run concurrently.

    :param tell: called with progress messages
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 tell: ty.Callable[[str], None]) -> None:
        self._database = database
        self._clock = clock
        self._tell = tell

    def purge(self, before: int, dry_run: bool = False,
              usage_before: int | None = None) -> Purged:
        """Delete the leases that were over before an instant.

        A lease is over at its end, when it was terminated or when it was
        deleted, whichever was last. After an interruption the next purge
        deletes the rest.

        :param dry_run: only count them
        :param usage_before: delete the usage records of purged leases that
            have none since then; None: keep them
        :raises InvalidLeaseParams: if that instant is too recent
        :raises DatabaseUnavailable: if the database does not answer
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
        """Delete those of the leases that still may be; return the number."""
        with self._database.writer() as session:
            api.lock(session, *ids)
            gone = _finished(session, _over(session, ids, before), before)
            for table in _PARTS:
                session.execute(sa.delete(table).where(
                    table.c.lease_id.in_(gone)))
            session.execute(sa.delete(_LEASES).where(_LEASES.c.id.in_(gone)))
        return len(gone)

    def _tidy(self, before: int) -> None:
        """Delete rows that no lease needs."""
        last = ''
        while ids := self._recurrences(last):
            self._database.retried(self._forget, ids, before)
            last = ids[-1]
        now = self._clock.now()
        self._database.retried(idempotency.trim, self._database, now)
        # Without a listener, no other process does this.
        feed.trim(self._database, now - booking_index.KEEP)

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

    def _forget_usage(self, before: int, last: str) -> str:
        """Delete a batch of usage records of purged leases without records
        since an instant, all records of a lease at once.

        :param last: only leases with later ids
        :returns: the last id of the batch; empty: there are no others
        """
        with self._database.begin() as connection:
            ids = connection.scalars(sa.select(_RECORDS.lease_id).where(
                _RECORDS.lease_id > last,
                ~sa.exists().where(models.Lease.id == _RECORDS.lease_id),
            ).group_by(_RECORDS.lease_id).having(
                sa.func.max(_RECORDS.recorded_at) < before).order_by(
                    _RECORDS.lease_id).limit(BATCH)).all()
            if ids:
                connection.execute(sa.delete(models.UsageRecord).where(
                    _RECORDS.lease_id.in_(ids)))
        return ids[-1] if ids else ''


def _over(session: orm.Session, ids: ty.Sequence[str], before: int,
          ) -> ty.Sequence[str]:
    """Return those of the leases that were over before an instant."""
    return session.scalars(sa.select(_LEASES.c.id).where(
        _LEASES.c.id.in_(ids), *_is_over(_LEASES, before))).all()


def _is_over(lease: ty.Any, before: int) -> tuple[ty.Any, ...]:
    # An expression: SQLite would search all leases of that status for a few
    # ids.
    return (lease.c.status + '' == states.Lease.TERMINATED.value,
            lease.c.end_date < before, lease.c.updated_at < before,
            sa.func.coalesce(lease.c.deleted_at, 0) < before)


def _finished(session: orm.Session, ids: ty.Sequence[str], before: int,
              ) -> ty.Sequence[str]:
    """Return those of the leases of which nothing is pending."""
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
    """Return the instant before which ended leases may have been purged;
    None: none was.
    """
    with database.reader() as session:
        row = session.get(models.Setting, _MARK)
    return None if row is None else int(row.value[_BEFORE])
