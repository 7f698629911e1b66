# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for room.

They are tried at the times that were asked for, and as soon as something has
changed on a host. Those of a project come one after the other, in the order
in which they were asked for; of several projects the one comes first that has
waited longest since it got something. A lease that has had its last try
fails, and says why.

Any number of processes may do this at the same time.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import follower
from blazar_core.common import clock as clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import seeking
from blazar_core.lifecycle import steps

__all__ = ['PAUSE', 'Retrying']

LOG = logging.getLogger(__name__)

#: Seconds between two looks at whether there is room now, and for how long a
#: look goes through the leases that wait.
PAUSE = 3


class Retrying:
    """Gives leases that wait their room.

    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 index: follower.Index,
                 notify: ty.Callable[[str, facts.Lease], None],
                 seeking: seeking.Seeking) -> None:
        self._database = database
        self._clock = clock
        self._index = index
        self._notify = notify
        self._seeking = seeking
        #: What the hosts were like when those were tried for which there was
        #: no room, and whether that was all of them.
        self._news = -1
        self._tried: set[str] = set()
        self._done = True

    def look(self) -> None:
        """Try leases that wait, if something has changed since the last time.

        One statement where nobody waits; else a search for the first one of
        each project. What is not done after :data:`PAUSE` seconds is done in
        the next look.
        """
        late = self._clock.elapsed() + PAUSE
        line = self._line()
        if not line:
            return
        self._seeking.forget()
        with self._index.fresh():
            # Room comes only by a decision about a host.
            news = sum(host.generation for host in self._index.hosts.values())
        if news != self._news and self._done:
            # Else those whose turn has not come yet come first.
            self._news, self._tried = news, set()
        self._done = False
        while self._clock.elapsed() <= late:
            lease = next((
                row for row in line if row.id not in self._tried), None)
            if lease is None:
                self._done = True
                return
            with facts.apart(lease.id, lease.project_id):
                if self._try_next(lease.id):
                    # A project that got something goes to the end of the line.
                    line = self._line()

    def _try_next(self, lease_id: str) -> bool:
        """Try a lease; says whether it waits no more."""
        self._tried.add(lease_id)
        try:
            why = self._seeking.admit(lease_id)
        except (errors.CloudUnavailable, errors.BooksBusy) as exc:
            LOG.warning('Lease %s waits for capacity, and it cannot be found '
                        'out now whether there is some: %s', lease_id, exc)
            # The next look does not go by what this one has seen.
            self._news = -1
            return False
        if why is not None:
            LOG.debug('Lease %s waits for capacity: %s', lease_id, why)
        return why is None

    def _line(self) -> list[ty.Any]:
        """The next lease of each project, in turn."""
        with self._database.reader() as session:
            heads: dict[str, ty.Any] = {}
            for row in session.execute(_WAITING):
                heads.setdefault(row.project_id, row)
            served = {row.project_id: row.last for row in session.execute(
                _SERVED, {'projects': [*heads]})} if heads else {}
        return sorted(heads.values(), key=lambda row: (
            served.get(row.project_id, 0), row.created_at, row.id))

    # -- at its time ---------------------------------------------------------

    def due(self, lease_id: str) -> facts.Outcome:
        """It is time to try a lease; if that is the last time, it fails."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status != states.Lease.WAITING:
            return None
        left = (lease.retry_until or 0) - self._clock.now()
        try:
            # The last time everybody is tried.
            why = (self._behind(lease) if left > 0 else '') or (
                self._seeking.admit(lease_id))
        except (errors.CloudUnavailable, errors.BooksBusy) as exc:
            # However long it takes: it is not the lease that fails.
            return facts.Later(
                facts.AWAY, str(exc), facts.LONGEST_WAIT,
                shown=isinstance(exc, errors.CloudUnavailable))
        except (errors.BooksUnavailable, errors.NotFound):
            raise
        except errors.VaultError as exc:
            why = str(exc)
        except Exception:
            LOG.exception('Lease %s waits for capacity, and could not be '
                          'tried',
                          lease_id)
            # It keeps others of its project no longer than it may.
            why = 'it could not be found out what it needs.'
        steps.reached(steps.Step.RETRY_TRIED, lease_id)
        if why is None:
            return None
        described = self._database.retried(
            self._explain, lease_id, why, left <= 0)
        if left <= 0:
            if described is not None:
                LOG.warning('Lease %s gets no capacity: %s', lease_id, why)
                self._notify('lease.update', described)
            return None
        return facts.Later(min(lease.retry_interval or left, left), why)

    def _behind(self, lease: models.Lease) -> str:
        """Why it is not the turn of a lease; empty: it is."""
        with self._database.reader() as session:
            return waiting.behind(
                session.connection(), lease.project_id, lease.id)

    def _explain(self, lease_id: str, why: str, last: bool,
                 ) -> facts.Lease | None:
        """Say why a lease waits, or that it has failed.

        :returns: the lease; None when it does not wait any more
        """
        reason = waiting.reason(why)
        with self._database.reader() as session:
            if not last and conditions.holds(
                    api.found(session, lease_id).conditions, reason):
                return None
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.WAITING:
                return None
            now = self._clock.now()
            conditions.update(lease, now, reason)
            lease.updated_at = now
            if last:
                seeking.fail(session, lease, f'It got no capacity until '
                             f'{clocks.minute(now)} UTC: {why}',
                             states.EventType.RETRY, now)
            session.flush()
            return views.describe(lease)


#: Oldest first.
_WAITING = sa.select(
    models.Lease.id, models.Lease.project_id, models.Lease.created_at,
).where(models.Lease.status == states.Lease.WAITING).order_by(
    models.Lease.created_at, models.Lease.id)
#: When projects got something last.
_SERVED = sa.select(
    models.Lease.project_id,
    sa.func.max(models.Lease.admitted_at).label('last'),
).where(
    models.Lease.project_id.in_(sa.bindparam('projects', expanding=True)),
    models.Lease.admitted_at.is_not(None),
).group_by(models.Lease.project_id)
