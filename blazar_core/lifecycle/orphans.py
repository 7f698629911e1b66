# SPDX-License-Identifier: Apache-2.0


"""Orphans: leases whose project or user no longer exists.

An orphan is found, reported once, and ended if the operator has configured
that. Its condition records what is missing, and since when. A lease belongs to
its project: if only the user is gone, it is only reported. An owner that could
not be looked up is not gone, and no lease is ended by one answer: a later
answer has to be the same.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.lifecycle import lease_conditions
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

PROJECT = 'project'
USER = 'user'

#: Leases that are neither over nor deleted. Includes leases that are ending,
#: as an end policy may need the owner.
_LASTING = sa.and_(models.Lease.deleted_at.is_(None),
                   models.Lease.status.in_(states.GOING_ON))


class Known(ty.NamedTuple):
    """An orphan.

    :ivar missing: ``project`` or ``user``; if both, the project
    :ivar seen_at: when that was seen first
    """

    id: str
    name: str
    project_id: str
    user_id: str
    status: str
    end_date: int
    missing: str
    seen_at: int


class Orphans:
    """Finds leases without an owner.

    :param delete: ends a lease as if it was deleted, if it is still one of a
        project
    :param ends: whether leases are ended whose project is gone
    :param grace: seconds for which it has to be gone
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 identity: cloud_api.Identity,
                 delete: ty.Callable[[str, str], None],
                 ends: bool, grace: int) -> None:
        self._database = database
        self._clock = clock
        self._identity = identity
        self._delete = delete
        self._ends = ends
        self._grace = grace

    def find(self, ends: bool = False,
             go_on: ty.Callable[[], object] = lambda: None) -> list[str]:
        """Check the owners of all leases. Safe to run concurrently.

        :param ends: end leases whose project is gone for long enough, whatever
            the configuration
        :param go_on: called before each owner and each lease that is handled;
            what it raises is raised
        :returns: the ids of the leases that were ended
        :raises CloudUnavailable: when keystone does not answer
        :raises DatabaseUnavailable: when the database does not answer
        """
        with self._database.connection() as connection:
            owners = connection.execute(sa.select(
                models.Lease.project_id, models.Lease.user_id,
            ).where(_LASTING).distinct()).all()
        # The answer is as of now, however long handling it takes.
        asked = self._clock.now()
        absent = self._identity.absent(
            sorted({one.project_id for one in owners}),
            sorted({one.user_id for one in owners}), go_on) if owners else (
                cloud_api.MissingOwners(frozenset(), frozenset()))
        ended = []
        for lease in self._concerned(absent):
            go_on()
            with logs.apart(lease.id, lease.project_id):
                if self._see_to(lease, absent, asked, ends or self._ends):
                    ended.append(lease.id)
        return ended

    def _concerned(self, absent: cloud_api.MissingOwners) -> list[ty.Any]:
        """Return the leases whose owners are gone, or were before: each with
        its owner when that was looked up.
        """
        gone = absent.projects | absent.users
        with self._database.connection() as connection:
            # Filtered here: no statement takes any number of ids.
            return [row for row in connection.execute(sa.select(
                models.Lease.id, models.Lease.project_id,
                models.Lease.user_id, models.Lease.conditions,
            ).where(_LASTING).order_by(models.Lease.id))
                if _found(row.conditions) or not gone.isdisjoint(
                    (row.project_id, row.user_id))]

    def _see_to(self, lease: ty.Any, absent: cloud_api.MissingOwners,
                asked: int, ends: bool) -> bool:
        """Record whether the owner of a lease exists; return whether the lease
        is ended.
        """
        if lease.project_id in absent.projects:
            missing: str | None = PROJECT
        elif lease.project_id in absent.unknown:
            return False
        elif lease.user_id in absent.users:
            missing = USER
        elif lease.user_id in absent.unknown:
            return False
        else:
            missing = None
        long_gone = self._database.retried(self._note, lease, missing, asked)
        if not (ends and long_gone and missing == PROJECT):
            return False
        LOG.warning('Lease %s is ended: its project %s has been missing for '
                    '%s s',
                    lease.id, lease.project_id, self._grace)
        self._delete(lease.id, lease.project_id)
        return True

    def _note(self, seen: ty.Any, missing: str | None, asked: int) -> bool:
        """Record an answer; return whether an owner is gone for long enough.
        """
        with self._database.writer() as session:
            lease = api.locked(session, seen.id)
            now = self._clock.now()
            if _is_over(lease) or (seen.project_id, seen.user_id) != (
                    lease.project_id, lease.user_id):
                # It was transferred meanwhile: the answer is of another owner.
                return False
            if missing is None:
                _forget(lease, now)
                return False
            before = _found(lease.conditions)
            condition = lease_conditions.ORPHANED[missing]
            # That the project is gone, too, is also announced.
            if before is None or (missing == PROJECT and (
                    before['reason'] != condition.reason)):
                LOG.warning('Lease %s has no owner: its %s %s does not exist',
                            lease.id, missing, lease.project_id
                            if missing == PROJECT else lease.user_id)
                events.trigger(session, lease, states.EventType.ORPHANED, now)
            if conditions.update(lease, now, condition):
                lease.updated_at = now
            row = _found(lease.conditions)
            assert row is not None
            since: int = row['since']
            return since + self._grace <= min(asked, now)

    @api.retried
    def forget(self, lease_id: str) -> None:
        """Clear the record of an orphan that has another owner, which has to
        be looked up again.

        :raises NotFound: when the lease does not exist
        """
        with self._database.writer() as session:
            _forget(api.locked(session, lease_id), self._clock.now())


def _is_over(lease: models.Lease) -> bool:
    return lease.deleted_at is not None or (
        lease.status in states.LEASE.final())


def _found(rows: ty.Iterable[conditions.Row] | None,
           ) -> conditions.Row | None:
    return conditions.find(rows, conditions.Type.ORPHANED)


def _forget(lease: models.Lease, now: int) -> None:
    """Record that the owner exists."""
    if conditions.update(lease, now, conditions.Type.ORPHANED):
        lease.updated_at = now
        LOG.info('Lease %s: its owner exists again', lease.id)


def known(database: api.Database) -> list[Known]:
    """Return the orphans, the oldest first."""
    lease, missing = models.Lease, {
        one.reason: what for what, one in lease_conditions.ORPHANED.items()}
    with database.connection() as connection:
        rows = connection.execute(sa.select(
            lease.id, lease.name, lease.project_id, lease.user_id,
            lease.status, lease.end_date, lease.conditions,
        ).where(lease.status.in_(states.GOING_ON))).all()
    return sorted((
        Known(row.id, row.name, row.project_id, row.user_id, row.status,
              row.end_date, missing[found['reason']], found['since'])
        for row in rows if (found := _found(row.conditions))),
        key=lambda one: (one.seen_at, one.id))
