# SPDX-License-Identifier: Apache-2.0


"""Series of leases: created at once by a recurrence rule, shown as one lease.

Each occurrence is an ordinary lease, so that the code that starts, ends,
moves and heals leases does not depend on series. Common data is in
:class:`blazar_core.db.models.Recurrence`, whose id is that of the series.
"""

import collections
import dataclasses
import datetime
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import local_times
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import budget_commits
from blazar_core.leases import creation
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views

LOG = logging.getLogger(__name__)

_Shifted: ty.TypeAlias = ty.Mapping[model.Window, local_times.Dates]


class Series:
    """Creates and shows recurring leases."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 creator: creation.LeaseCreation,
                 commits: budget_commits.BudgetCommits) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._creator = creator
        self._commits = commits

    # -- create --------------------------------------------------------------

    def fitting(self, leases: ty.Sequence[new_leases.NewLease], some: bool,
                ) -> tuple[list[new_leases.NewLease], list[dict[str, ty.Any]]]:
        """Return the occurrences that fit now, without booking anything.

        :param leases: the occurrences, in their order
        :param some: whether it suffices if some of them fit
        :returns: these, and for each of the others its dates and the reason
        :raises InvalidLeaseParams: if they overlap
        :raises Refused: if one does not fit; with ``some``, if none does
        """
        check_apart([new.booked for new in leases])
        fits, left_out, first = [], [], None
        for new in leases:
            refusal = self._creator.quote(new)
            if refusal is None:
                fits.append(new)
                continue
            window = new.request.window
            refusal = dataclasses.replace(refusal, occurrence=window.start)
            first = first or refusal
            if not some:
                break
            left_out.append({
                'start_date': window.start, 'end_date': window.end,
                'reason': dataclasses.replace(
                    refusal, occurrence=None).sentence()})
        if first is not None and not (some and fits):
            raise errors.Refused(first)
        return fits, left_out

    def create(self, recurrence_id: str, asked: requests.Recurrence,
               leases: ty.Sequence[new_leases.NewLease],
               encrypted: ty.Sequence[str | None],
               left_out: ty.Sequence[dict[str, ty.Any]],
               kept: ty.Sequence[str] = ()) -> list[views.Lease]:
        """Admit occurrences: all of them, or none.

        :param leases: occurrences of this series, which do not overlap and
            share the result of the limits
        :param encrypted: for each, the encrypted call for its start
        :param left_out: the occurrences that did not fit
        :param kept: servers that are kept from one occurrence to the next
        :returns: the leases
        :raises Refused: if one does not fit
        :raises ConcurrentUpdate: if there are too many concurrent bookings
        :raises Conflict: if a lease was concurrently created with the key
        :raises LimitExceeded: if a limit is exceeded
        """
        def write(connection: sa.Connection, picked: list[selection.Picked],
                  ) -> list[views.Lease]:
            made = self._creator.write(connection, zip(
                committed, encrypted, picked, strict=True))
            connection.execute(models.Recurrence.__table__.insert().values(
                id=recurrence_id, rule=asked.rule, timezone=asked.timezone,
                between_policy=asked.between, servers=list(kept),
                left_out=list(left_out), shifted=_shifted(asked.shifted),
                created_at=self._clock.now()))
            return made

        with self._commits.committed(leases) as committed:
            made = self._admission.admit_all(
                [(new.demands, new.booked) for new in leases], write,
                leases[0].host_bound, leases[0].after_end)
        LOG.info('Lease %s (%s) of project %s: from %s on, %s times (%s), '
                 'leases %s', recurrence_id, made[0]['name'],
                 made[0]['project_id'], clocks.iso(made[0]['start_date']),
                 len(made), asked.rule, ', '.join(
                     one['id'] for one in made))
        return made

    # -- show ----------------------------------------------------------------

    def get(self, recurrence_id: str) -> views.Lease:
        """Return all occurrences as one lease: the first that is not over, or
        else the last.

        :returns: the lease, as by :meth:`as_one`
        :raises NotFound: if it does not exist, or all were deleted
        """
        with self._database.reader() as session:
            rows = [row for row in _occurrences(session, [recurrence_id])
                    if not _is_gone(row)]
            if not rows:
                raise errors.NotFound(
                    f'Lease {recurrence_id} could not be found.')
            current = _current(rows)
            lease = views.describe(api.found(session, current.id))
        return self.as_one([lease])[0]

    def as_one(self, leases: ty.Sequence[views.Lease]) -> list[views.Lease]:
        """Return leases, each occurrence as the representative of its series.

        In addition to the keys of a lease it has ``recurrence`` and
        ``occurrences``, and its ``id`` is that of the series.
        """
        ids = {one['recurrence_id'] for one in leases} - {None}
        if not ids:
            return list(leases)
        with self._database.reader() as session:
            known = {row.id: row for row in session.scalars(
                sa.select(models.Recurrence).where(
                    models.Recurrence.id.in_(ids)))}
            occurrences = collections.defaultdict(list)
            for row in _occurrences(session, ids):
                occurrences[row.recurrence_id].append({
                    'id': row.id, 'start_date': row.start_date,
                    'end_date': row.end_date, 'status': views.status(row)
                    if not _is_gone(row) else 'DELETED',
                    'reason': _reason(known.get(row.recurrence_id), row)})
        for row in known.values():
            occurrences[row.id] += [
                {'id': None, 'status': 'LEFT_OUT', **one}
                for one in row.left_out]
        return [one if one['recurrence_id'] not in known else {
            **one, 'id': one['recurrence_id'],
            'recurrence': {name: getattr(
                known[one['recurrence_id']], name) for name in (
                    'rule', 'timezone', 'between')},
            'occurrences': sorted(
                occurrences[one['recurrence_id']],
                key=lambda each: (each['start_date'], each['id'] or ''))}
                for one in leases]

    def current(self, lease_id: str) -> str:
        """Return the id of the occurrence that represents a series, or the id
        of any other lease unchanged.
        """
        with self._database.reader() as session:
            rows = _occurrences(session, [lease_id])
        return str(_current(rows).id) if rows else lease_id

    def unfinished(self, recurrence_id: str) -> list[views.Lease]:
        """Return the occurrences that are not over, by their start."""
        with self._database.reader() as session:
            ids = [row.id for row in _occurrences(session, [recurrence_id])
                   if row.status not in states.LEASE.final()]
            found = {one.id: one for one in api.whole(session, ids)}
            return [views.describe(found[one]) for one in ids]

    def nominal(self, recurrence_id: str,
                ) -> dict[model.Window, local_times.Dates]:
        """Return the local times of occurrences of which one does not exist,
        by window.
        """
        with self._database.reader() as session:
            row = session.get_one(models.Recurrence, recurrence_id)
            return {_window(one): local_times.Dates(*(
                datetime.datetime.fromisoformat(date)
                for date in one['dates'])) for one in row.shifted or ()}

    def shift(self, recurrence_id: str, shifted: _Shifted,
              ) -> ty.Callable[[orm.Session], None]:
        """Return a function that stores the occurrences with local times that
        do not exist.
        """
        def write(session: orm.Session) -> None:
            recurrence = models.Recurrence.__table__
            session.execute(sa.update(recurrence).where(
                recurrence.c.id == recurrence_id,
            ).values(shifted=_shifted(shifted)))

        return write

    @api.retried
    def rename(self, recurrence_id: str, name: str) -> None:
        """Rename the occurrences that are not ending, in one statement."""
        leases = models.Lease.__table__
        with self._database.begin() as connection:
            connection.execute(sa.update(leases).where(
                leases.c.recurrence_id == recurrence_id,
                leases.c.status.not_in(states.ENDING),
                leases.c.deleted_at.is_(None),
            ).values(name=name, updated_at=self._clock.now(),
                     generation=leases.c.generation + 1))

    def amount_beside(self, lease: views.Lease) -> int:
        """Return the number of servers or hosts of the other occurrences that
        are not over; 0 for a lease that does not recur.
        """
        if lease['recurrence_id'] is None:
            return 0
        with self._database.connection() as connection:
            return connection.scalar(sa.select(sa.func.coalesce(sa.func.sum(
                models.Reservation.amount), 0)).join(models.Lease).where(
                    models.Lease.recurrence_id == lease['recurrence_id'],
                    models.Lease.status.not_in(states.LEASE.final()),
                    models.Lease.id != lease['id'])) or 0


def check_apart(booked: ty.Sequence[model.Window]) -> None:
    """Check that occurrences do not overlap.

    :param booked: the windows of their capacity, in their order
    :raises InvalidLeaseParams: if they do
    """
    for one, after in itertools.pairwise(booked):
        if one.end > after.start:
            raise errors.InvalidLeaseParams(
                f'The occurrences overlap: that of {clocks.minute(one.start)} '
                f'UTC uses capacity until {clocks.minute(one.end)}, with its '
                'grace period and cleaning time, and the next one starts at '
                f'{clocks.minute(after.start)}. Write an earlier end, or a '
                'rule with more time between them.')


def absence(timezone: str, dates: local_times.Dates) -> str:
    """Return the reason of an occurrence with a local time that does not
    exist.
    """
    return (f'Its dates are {dates.start:%Y-%m-%d %H:%M} to '
            f'{dates.end:%Y-%m-%d %H:%M} ({timezone}), and not both exist, as '
            'the clocks are set forward: it starts at the first time that '
            'exists, and keeps its length.')


def _shifted(shifted: _Shifted) -> list[dict[str, ty.Any]]:
    return [{'start_date': window.start, 'end_date': window.end,
             'dates': [date.replace(fold=0).isoformat() for date in dates]}
            for window, dates in shifted.items()]


def _window(described: ty.Any) -> model.Window:
    return model.Window(described['start_date'], described['end_date'])


def _reason(recurrence: models.Recurrence | None, row: ty.Any) -> str:
    """Return the reason of an occurrence that was not changed, or ''."""
    if recurrence is None:
        return ''
    return next((absence(recurrence.timezone, local_times.Dates(*(
        datetime.datetime.fromisoformat(date) for date in one['dates'])))
        for one in recurrence.shifted or () if _window(one) == model.Window(
            row.start_date, row.end_date)), '')


def _occurrences(session: orm.Session, ids: ty.Collection[str],
                 ) -> ty.Sequence[ty.Any]:
    lease = models.Lease.__table__.c
    return session.execute(sa.select(
        lease.id, lease.recurrence_id, lease.start_date, lease.end_date,
        lease.status, lease.deleted_at).where(
            lease.recurrence_id.in_(ids)).order_by(
                lease.start_date, lease.id)).all()


def _current(rows: ty.Sequence[ty.Any]) -> ty.Any:
    """Return the representative, as in lists of leases (:mod:`.views`)."""
    return next((row for row in rows
                 if row.status not in states.LEASE.final()), next(
                     (row for row in reversed(rows)
                      if row.deleted_at is None), rows[-1]))


def _is_gone(row: ty.Any) -> bool:
    return row.deleted_at is not None and row.status in states.LEASE.final()
