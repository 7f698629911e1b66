# SPDX-License-Identifier: Apache-2.0

"""Changes of bookings and hosts since the last read."""

import collections
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import host_memory
from blazar_core.capacity import index_rows
from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

#: Seconds between two comparisons of the generations of all hosts.
COMPARE = 30

#: The number of changes that one transaction deletes.
BATCH = 5000

#: Seconds for which a missing id is searched for, and the maximum number.
_MISSING_SECONDS = 5
_MISSING_MOST = 500

_HOST, _BOOKING, _CHANGE = (
    models.Host.__table__.c, models.Booking.__table__.c,
    models.Change.__table__.c)
_COLUMNS = sa.select(
    _CHANGE.id, _CHANGE.host_id, _CHANGE.generation, _CHANGE.change_count,
    _CHANGE.start_date, _CHANGE.end_date, _CHANGE.resources, _CHANGE.sign,
    _CHANGE.created_at)
_CHANGES = _COLUMNS.order_by(_CHANGE.id)
_NEW = _CHANGES.where(_CHANGE.id >= sa.bindparam('top'))
_LATE = _CHANGES.where(
    _CHANGE.id.in_(sa.bindparam('missing', expanding=True)))
_GENERATIONS = sa.select(_HOST.id, _HOST.generation)
NEWEST = _COLUMNS.order_by(_CHANGE.id.desc()).limit(1)
_OVERDUE = sa.select(
    _BOOKING.host_id, _BOOKING.end_date, _BOOKING.resources).where(
        _BOOKING.claimed_at.is_not(None), index_rows.CURRENT,
        _BOOKING.end_date <= sa.bindparam('now'))


_OLDEST = sa.select(_CHANGE.id, _CHANGE.created_at).order_by(
    _CHANGE.id).limit(BATCH)
_FORGET = sa.delete(models.Change.__table__).where(
    _CHANGE.id < sa.bindparam('newest'))


class FeedGap(Exception):
    """The changes in the database do not continue the known state."""


class HostDelta(ty.NamedTuple):
    """A host as it is now, and the changes of bookings since the last read."""

    host: model.Host
    changes: list[ty.Any]


class FeedBatch(ty.NamedTuple):
    """The changes that were read since the last time.

    ``top`` is the newest change; ``overdue`` is None if it was not read.
    """

    ids: list[int]
    top: ty.Any
    steps: list[HostDelta]
    overdue: list[ty.Any] | None
    compared: bool


class FeedState:
    """The known state of the reservation database, and how it is continued.

    :ivar hosts: by id
    :ivar top: the newest known change, as it was read; None: there was none
    :ivar at: the time of the last read
    :ivar compared: the time of the last comparison of all generations
    :param alike: the cache with which the hosts were read
    """

    def __init__(self, hosts: dict[int, model.Host], top: ty.Any, at: int,
                 alike: host_memory.InternedRecords) -> None:
        self.hosts = hosts
        self.top = top
        self.at = self.compared = at
        self._alike = alike
        #: Ids that were skipped, and since when they are searched for.
        self._missing: dict[int, int] = {}

    def read(self, connection: sa.Connection, now: int) -> FeedBatch:
        """Return all changes since the last read; apply none.

        :raises FeedGap: when it does not continue what is known
        """
        rows = list(connection.execute(_NEW, {
            'top': 0 if self.top is None else self.top.id}))
        if self.top is not None:
            if self.top not in rows:
                raise FeedGap('the newest known change no longer exists')
            rows.remove(self.top)
        if self._missing:
            # In one statement with the others, SQLite would read all changes.
            rows += connection.execute(_LATE, {
                'missing': list(self._missing)})
        goals: dict[int, int] = {}
        for row in rows:
            goals[row.host_id] = max(
                row.generation, goals.get(row.host_id, 0))
        # If the clock was ahead, compare at once.
        compared = not 0 <= now - self.compared < COMPARE
        if compared:
            goals |= self._behind(connection)
        return FeedBatch(
            [row.id for row in rows],
            max([self.top, *rows], key=lambda row: row.id if row else 0),
            self._steps(connection, rows, goals),
            overdue(connection, now) if now != self.at or any(
                row.start_date is not None for row in rows) else None,
            compared)

    def _behind(self, connection: sa.Connection) -> dict[int, int]:
        """Return the generations of hosts that are newer than known.

        :raises FeedGap: when one is older
        """
        found = {row.id: row.generation
                 for row in connection.execute(_GENERATIONS)}
        for host in self.hosts.values():
            if found.get(host.id, -1) < host.generation:
                raise FeedGap(f'host {host.name} is older than before')
        return {host_id: generation for host_id, generation in found.items()
                if generation > self._generation(host_id)}

    def _generation(self, host_id: int) -> int:
        """Return the generation of a host up to which everything is known."""
        known = self.hosts.get(host_id)
        return 0 if known is None else known.generation

    def _steps(self, connection: sa.Connection, rows: ty.Iterable[ty.Any],
               goals: ty.Mapping[int, int]) -> list[HostDelta]:
        """Return the changes that bring hosts to given generations.

        :raises FeedGap: when one of the changes is missing
        """
        of_hosts = collections.defaultdict(list)
        for row in rows:
            if row.generation > self._generation(row.host_id):
                of_hosts[row.host_id].append(row)
        changes = {host_id: self._way(connection, host_id, goal,
                                      of_hosts[host_id])
                   for host_id, goal in goals.items()
                   if goal > self._generation(host_id)}
        anew = [host_id for host_id, way in changes.items()
                if host_id not in self.hosts or any(
                    row.start_date is None and row.resources is None
                    for row in way)]
        hosts = {row.id: index_rows.host_of(row, self._alike)
                 for row in connection.execute(inventory.HOSTS.where(
                     _HOST.id.in_(anew)))} if anew else {}
        if len(hosts) < len(anew):
            raise FeedGap('unknown hosts have changed')
        return [self._step(self.hosts.get(host_id), hosts.get(host_id), way)
                for host_id, way in changes.items()]

    def _step(self, known: model.Host | None, anew: model.Host | None,
              way: ty.Sequence[ty.Any]) -> HostDelta:
        """Return a host after a sequence of changes. Its generation is the
        last one of the sequence.

        :param known: the host as known
        :param anew: the host as read again, if that was necessary
        """
        host = anew or known
        assert host is not None
        usages = [row.resources for row in way if row.start_date is None]
        usage = (self._alike.of(usages[-1]) if usages and anew is None
                 else host.usage)
        return HostDelta(host.at(way[-1].generation, usage), [
            row for row in way if row.start_date is not None])

    def _way(self, connection: sa.Connection, host_id: int, goal: int,
             rows: list[ty.Any]) -> list[ty.Any]:
        """Return all changes of a host since the known generation, in order.

        :raises FeedGap: when one of them is missing
        """
        known = self._generation(host_id)
        if not _is_whole(rows, goal - known):
            rows = list(connection.execute(_CHANGES.where(
                _CHANGE.host_id == host_id,
                _CHANGE.generation > known)).all())
            if not _is_whole(rows, goal - known):
                raise FeedGap(
                    f'not all changes of host {host_id} from {known} to '
                    f'{goal} exist')
        return sorted(rows, key=lambda row: row.generation)

    def note_ids(self, ids: ty.Sequence[int], now: int) -> None:
        """Remember which ids between others are missing."""
        for one in ids:
            self._missing.pop(one, None)
        top = 0 if self.top is None else self.top.id
        newest = max(ids, default=top)
        if newest > top:
            missing = set(range(max(top + 1, newest - _MISSING_MOST),
                                newest)).difference(ids)
            self._missing.update(dict.fromkeys(missing, now))
        self._missing = {
            one: since for one, since in sorted(
                self._missing.items())[-_MISSING_MOST:]
            if now - since <= _MISSING_SECONDS}


def _is_whole(rows: ty.Sequence[ty.Any], generations: int) -> bool:
    """Return whether changes of a host are all of so many generations."""
    counts = collections.Counter(row.generation for row in rows)
    return len(counts) == generations and all(
        row.change_count == counts[row.generation] for row in rows)


def overdue(connection: sa.Connection, now: int) -> list[ty.Any]:
    """Return the bookings of servers that are past their end."""
    return list(connection.execute(_OVERDUE, {'now': now}).all())


def trim(database: api.Database, before: int) -> int:
    """Delete changes from before an instant, except the newest one.

    By the newest one, followers recognize the database that they have
    followed. Each change has the time of its process, and all changes with
    lower ids than an old one are deleted with it. So if clocks differ, more or
    fewer changes are kept, and a follower that misses a change loads
    everything again.

    There may be millions of them: they are deleted in transactions of
    :data:`BATCH` rows, which are found by their ids.

    :returns: how many were deleted
    :raises DatabaseUnavailable: when the database does not answer
    """
    forgotten = 0
    while some := database.retried(_trim_some, database, before):
        forgotten += some
    return forgotten


def _trim_some(database: api.Database, before: int) -> int:
    with database.connection() as connection:
        old = [row.id for row in connection.execute(_OLDEST)
               if row.created_at < before]
    if len(old) < 2:
        return 0
    with database.begin() as connection:
        return connection.execute(_FORGET, {'newest': old[-1]}).rowcount
