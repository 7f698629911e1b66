#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""The books in memory: a timeline that follows the database.

Each process that searches has one. It is read in full once, from one
snapshot, and from then on follows what changed. Every decision moves the
generation of its hosts by one and leaves its changes behind under that
generation (:func:`ledger.amend`), each of which says how many they are. So
for each host the changes are an unbroken row: each is applied exactly once
and in its order, and a gap is noticed and read. A transaction whose changes
got a lower id than those of one that committed before it is looked for as a
missing id for some seconds; the comparison of all generations, every
:data:`COMPARE` seconds, finds what even that missed.

Following has two halves. First everything that is new is read, all from one
state of the database, and nothing is touched; then it is applied, and nothing
is read. Whatever fails on the way, the index never says that it knows a
generation of which it does not have everything.

Where the row cannot be continued, everything is read again: changes have been
trimmed that are still needed, or the database is another one than it was (it
was restored from a backup). The newest change that is known tells the latter:
it has to be there, as it was, each time.

What is searched here is a hint: whoever decides, decides in the database.
"""

import collections
import contextlib
import threading
import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.books import inventory
from blazar_core.books import ledger
from blazar_core.books import timeline as timelines
from blazar_core.common import clock as clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['Index', 'KEEP']

LOG = logging.getLogger(__name__)

#: Seconds for which changes are kept in the database. A process that has not
#: looked for longer may have to read everything again.
KEEP = 3600
#: Seconds after which what was let in without the database counts no more,
#: when nobody had to do without it again: those who could write know it.
ALONE = 300
#: Seconds between two comparisons of the generations of all hosts.
COMPARE = 30
#: Seconds for which a missing id is looked for, and how many at most.
_MISSING_SECONDS = 5
_MISSING_MOST = 500


class _Guest(ty.NamedTuple):
    """What counts on a host though the database was not told of it."""

    host_id: int
    amounts: model.Resources


class _Torn(Exception):
    """What is known cannot be continued by what is in the database."""


class _Step(ty.NamedTuple):
    """A host as it is now, and the changes of bookings that made it so."""

    host: model.Host
    changes: list[ty.Any]


class _News(ty.NamedTuple):
    """What was read since the last time.

    ``top`` is the newest change, ``overdue`` None when it was not read.
    """

    ids: list[int]
    top: ty.Any
    steps: list[_Step]
    overdue: list[ty.Any] | None
    compared: bool


class Index:
    """What the books say, ready to be searched."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._timeline: timelines.Timeline | None = None
        self.hosts: dict[int, model.Host] = {}
        self.ids_by_uuid: dict[str, int] = {}
        self._uuids: npt.NDArray[np.object_] = np.empty(0, object)
        #: The newest change that is known, as it was read; None: there was
        #: none.
        self._top: ty.Any = None
        self._missing: dict[int, int] = {}
        self._overdue: list[tuple[int, model.Window, model.Resources]] = []
        self._refreshed = self._compared = self._forgotten = 0
        #: The instant since which everything is known.
        self._since = 0
        self._asked = 0.0
        #: When somebody had to do without the database last (None: nobody
        #: had), and what was let in meanwhile.
        self._alone: float | None = None
        self._guests: list[_Guest] = []

    @contextlib.contextmanager
    def fresh(self, lag: float = 0, connection: sa.Connection | None = None,
              ) -> ty.Iterator[timelines.Timeline]:
        """The timeline as of now, for one thread at a time.

        Whoever lets go of it and wants it again gets it after those who wait:
        so a long search in steps keeps nobody waiting for more than a step.
        A thread that has it does not get it again.

        Costs one SELECT of what changed and, if a booking did or the second
        is another one, one of servers that overstay; it reads everything the
        first time, and where it cannot follow any more.

        :param lag: for who decides in the database anyway: the seconds ago
            that the database was asked last, with which he is content
        :param connection: a new one of who has more to read from the same
            state
        """
        # Locks are not fair: who lets go of one mostly is the next to have
        # it. Who waits for this one has the turn until then.
        with self._turn:
            self._lock.acquire()
        try:
            # Who has waited here may have waited for one that had no answer.
            self._database.presence.check()
            now = self._clock.now()
            asked = self._clock.elapsed()
            if self._timeline is None or now < self._since:
                # Of before that it knows too little, for a clock that was
                # ahead and is set right.
                self._load(now, connection)
                self._asked = asked
            elif now != self._refreshed or asked >= self._asked + lag:
                self._refresh(now, connection)
                self._asked = asked
            assert self._timeline is not None
            if self._alone is not None:
                if self._clock.elapsed() >= self._alone + ALONE:
                    self._end_alone()
                # What was read knows nothing of them.
                self._count_guests(self._guests)
            yield self._timeline
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def remembered(self) -> ty.Iterator[timelines.Timeline | None]:
        """The timeline as it was known last, for one thread at a time.

        For who has to decide while the database is away.

        :returns: None when none was known yet
        """
        with self._lock:
            if self._alone is None:
                LOG.error(
                    'Without the database of the leases, servers are judged '
                    'by %s', 'nothing: it has not answered since this '
                    'process started' if self._timeline is None else
                    f'what was known '
                    f'{self._clock.now() - self._refreshed} s ago')
            self._alone = self._clock.elapsed()
            yield self._timeline

    def let_in(self, host_id: int, amounts: model.Resources,
               ) -> ty.Callable[[], None]:
        """Within :meth:`remembered`: let something count on a host that the
        database cannot be told of, until it is there again.

        :returns: what takes it back
        """
        guest = _Guest(host_id, amounts)
        self._guests.append(guest)
        self._count_guests([guest])

        def take_back() -> None:
            with self._lock:
                self._guests = [
                    one for one in self._guests if one is not guest]
                self._count_guests([guest])

        return take_back

    def written(self) -> None:
        """Somebody could write: the database is there again.

        One that can be read but not written is as good as away: what is let
        in counts here alone.
        """
        if self._alone is not None:
            with self._lock:
                if self._alone is not None:
                    self._end_alone()

    def _end_alone(self) -> None:
        """What came meanwhile is found by the comparison with the cloud."""
        LOG.warning('Servers are judged by the books again; %s were let in '
                    'without', len(self._guests))
        guests, self._guests, self._alone = self._guests, [], None
        self._count_guests(guests)

    def _count_guests(self, changed: ty.Iterable[_Guest]) -> None:
        """Give the hosts of some guests the usage that they have now."""
        for host_id in {one.host_id for one in changed} & self.hosts.keys():
            host = self.hosts[host_id]
            usage = collections.Counter(host.usage)
            for guest in self._guests:
                if guest.host_id == host_id:
                    usage.update(guest.amounts)
            if self._timeline is not None:
                self._timeline.set_host(host_id, host.capacity, dict(usage))

    def uuids(self) -> npt.NDArray[np.object_]:
        """Within :meth:`fresh`: the uuids of all hosts, in the order of the
        timeline.
        """
        assert self._timeline is not None
        # No host ever gets another one.
        if len(self._uuids) < len(self._timeline):
            self._uuids = np.array([self.hosts[host_id].uuid for host_id in
                                    self._timeline.ids], object)
        return self._uuids

    @contextlib.contextmanager
    def without(self, bookings: ty.Sequence[ty.Any]) -> ty.Iterator[None]:
        """Within :meth:`fresh`: as if these bookings were not there."""
        taken = [one for one in bookings if one.host_id in self.hosts]
        self._apply_all(taken, -1)
        try:
            yield
        finally:
            self._apply_all(taken, 1)

    def _apply_all(self, bookings: ty.Iterable[ty.Any], sign: int) -> None:
        assert self._timeline is not None
        for one in bookings:
            self._timeline.apply(
                one.host_id, ledger.stay(
                    one.start_date, one.end_date, one.placed_at,
                    self._refreshed), one.resources, sign)

    # -- reading everything --------------------------------------------------

    def _reader(self, given: sa.Connection | None,
                ) -> contextlib.AbstractContextManager[sa.Connection]:
        return (self._database.connection() if given is None
                else contextlib.nullcontext(given))

    def _load(self, now: int, given: sa.Connection | None) -> None:
        with self._reader(given) as connection:
            top = connection.execute(_NEWEST).one_or_none()
            hosts = {row.id: inventory.host_of(row)
                     for row in connection.execute(inventory.HOSTS)}
            timeline = timelines.Timeline(shared=ledger.SHARED)
            for host in hosts.values():
                timeline.set_host(host.id, host.capacity, host.usage)
            _load_bookings(connection, timeline, now - KEEP)
            overdue = _overdue(connection, now)
        self._top, self._missing, self._overdue = top, {}, []
        self.hosts = hosts
        self.ids_by_uuid = {host.uuid: host.id for host in hosts.values()}
        self._uuids = np.empty(0, object)
        self._watch_overdue(timeline, overdue, now)
        self._timeline = timeline
        self._refreshed = self._compared = self._forgotten = now
        self._since = now - KEEP

    # -- following -----------------------------------------------------------

    def _refresh(self, now: int, given: sa.Connection | None) -> None:
        try:
            with self._reader(given) as connection:
                news = self._read(connection, now)
        except _Torn as exc:
            LOG.warning('The books are read anew: %s', exc)
            self._load(now, given)
            return
        timeline, self._timeline = self._timeline, None
        assert timeline is not None
        self._apply(timeline, news, now)
        if now - self._forgotten >= KEEP:
            # What is over would pile up as long as the process lives.
            timeline.forget(now - KEEP)
            self._forgotten, self._since = now, now - KEEP
        # Whoever did not come this far finds none, and reads everything.
        self._timeline = timeline

    def _read(self, connection: sa.Connection, now: int) -> _News:
        """All that is new. Touches nothing.

        :raises _Torn: when it does not continue what is known
        """
        rows = list(connection.execute(_NEW, {
            'top': 0 if self._top is None else self._top.id,
            'missing': list(self._missing)}))
        if self._top is not None:
            if self._top not in rows:
                raise _Torn('the newest change that was known is not there '
                            'any more')
            rows.remove(self._top)
        goals: dict[int, int] = {}
        for row in rows:
            goals[row.host_id] = max(
                row.generation, goals.get(row.host_id, 0))
        compared = now - self._compared >= COMPARE
        if compared:
            goals |= self._behind(connection)
        return _News(
            [row.id for row in rows],
            max([self._top, *rows], key=lambda row: row.id if row else 0),
            self._steps(connection, rows, goals),
            _overdue(connection, now) if now != self._refreshed or any(
                row.start_date is not None for row in rows) else None,
            compared)

    def _behind(self, connection: sa.Connection) -> dict[int, int]:
        """The generations of hosts of which there is more than is known.

        :raises _Torn: when there is less
        """
        found = {row.id: row.generation for row in connection.execute(
            sa.select(_HOST.id, _HOST.generation))}
        for host in self.hosts.values():
            if found.get(host.id, -1) < host.generation:
                raise _Torn(f'host {host.name} is older than it was')
        return {host_id: generation for host_id, generation in found.items()
                if generation > self._known(host_id)}

    def _known(self, host_id: int) -> int:
        """The generation of a host up to which everything is known."""
        known = self.hosts.get(host_id)
        return 0 if known is None else known.generation

    def _steps(self, connection: sa.Connection, rows: ty.Iterable[ty.Any],
               goals: ty.Mapping[int, int]) -> list[_Step]:
        """What brings hosts to a generation.

        :raises _Torn: when something on the way there is missing
        """
        of_hosts = collections.defaultdict(list)
        for row in rows:
            if row.generation > self._known(row.host_id):
                of_hosts[row.host_id].append(row)
        changes = {host_id: self._way(connection, host_id, goal,
                                      of_hosts[host_id])
                   for host_id, goal in goals.items()
                   if goal > self._known(host_id)}
        anew = [host_id for host_id, way in changes.items()
                if host_id not in self.hosts or any(
                    row.start_date is None and row.resources is None
                    for row in way)]
        hosts = {row.id: inventory.host_of(row) for row in connection.execute(
            inventory.HOSTS.where(_HOST.id.in_(anew)))} if anew else {}
        if len(hosts) < len(anew):
            raise _Torn('hosts have changed that are not there')
        return [_step(self.hosts.get(host_id), hosts.get(host_id), way)
                for host_id, way in changes.items()]

    def _way(self, connection: sa.Connection, host_id: int, goal: int,
             rows: list[ty.Any]) -> list[ty.Any]:
        """All changes of a host since what is known, in their order."""
        known = self._known(host_id)
        if not _is_whole(rows, goal - known):
            rows = list(connection.execute(_CHANGES.where(
                _CHANGE.host_id == host_id,
                _CHANGE.generation > known)).all())
            if not _is_whole(rows, goal - known):
                raise _Torn(f'of host {host_id} not all changes from {known} '
                            f'to {goal} are there any more')
        return sorted(rows, key=lambda row: row.generation)

    def _apply(self, timeline: timelines.Timeline, news: _News, now: int,
               ) -> None:
        """Make what was read so. Reads nothing."""
        self._note_ids(news.ids, now)
        self._top = news.top
        for host, changes in news.steps:
            known = self.hosts.get(host.id)
            if known is None or (known.capacity, known.usage) != (
                    host.capacity, host.usage):
                timeline.set_host(host.id, host.capacity, host.usage)
            for row in changes:
                timeline.apply(
                    host.id, model.Window(row.start_date, row.end_date),
                    row.resources, row.sign)
            self.hosts[host.id] = host
            self.ids_by_uuid[host.uuid] = host.id
        if news.overdue is not None:
            self._watch_overdue(timeline, news.overdue, now)
        if news.compared:
            self._compared = now
        self._refreshed = now

    def _note_ids(self, ids: ty.Sequence[int], now: int) -> None:
        """Remember which ids between others have not been seen."""
        for one in ids:
            self._missing.pop(one, None)
        top = 0 if self._top is None else self._top.id
        newest = max(ids, default=top)
        if newest > top:
            missing = set(range(max(top + 1, newest - _MISSING_MOST),
                                newest)).difference(ids)
            self._missing.update(dict.fromkeys(missing, now))
        self._missing = {
            one: since for one, since in sorted(
                self._missing.items())[-_MISSING_MOST:]
            if now - since <= _MISSING_SECONDS}

    def _watch_overdue(self, timeline: timelines.Timeline,
                       rows: ty.Iterable[ty.Any], now: int) -> None:
        """Servers that overstay keep their room."""
        overdue = [(row.host_id, model.Window(row.end_date,
                                              now + ledger.OVERDUE),
                    row.resources) for row in rows
                   if row.host_id in self.hosts]
        if overdue != self._overdue:
            for sign, entries in ((-1, self._overdue), (1, overdue)):
                for host_id, window, resources in entries:
                    timeline.apply(host_id, window, resources, sign)
            self._overdue = overdue


def _is_whole(rows: ty.Sequence[ty.Any], generations: int) -> bool:
    """Whether changes of a host are all that so many generations made."""
    counts = collections.Counter(row.generation for row in rows)
    return len(counts) == generations and all(
        row.parts in (None, counts[row.generation]) for row in rows)


def _step(known: model.Host | None, anew: model.Host | None,
          way: ty.Sequence[ty.Any]) -> _Step:
    """What a way of changes makes of a host that is known, or that had to be
    read again. Its generation is the one to which the way leads.
    """
    host = anew or known
    assert host is not None
    usages = [row.resources for row in way if row.start_date is None]
    usage = usages[-1] if usages and anew is None else host.usage
    return _Step(host.at(way[-1].generation, usage), [
        row for row in way if row.start_date is not None])


def _overdue(connection: sa.Connection, now: int) -> list[ty.Any]:
    """The bookings of servers that overstay."""
    return list(connection.execute(_OVERDUE, {'now': now}).all())


_HOST, _BOOKING, _CHANGE = (
    models.Host.__table__.c, models.Booking.__table__.c,
    models.Change.__table__.c)
_COLUMNS = sa.select(
    _CHANGE.id, _CHANGE.host_id, _CHANGE.generation, _CHANGE.parts,
    _CHANGE.start_date, _CHANGE.end_date, _CHANGE.resources, _CHANGE.sign,
    _CHANGE.created_at)
_CHANGES = _COLUMNS.order_by(_CHANGE.id)
_NEW = _CHANGES.where(sa.or_(
    _CHANGE.id >= sa.bindparam('top'),
    _CHANGE.id.in_(sa.bindparam('missing', expanding=True))))
_NEWEST = _COLUMNS.order_by(_CHANGE.id.desc()).limit(1)
#: The bookings that take room.
_CURRENT = _BOOKING.host_id.is_not(None)
_OVERDUE = sa.select(
    _BOOKING.host_id, _BOOKING.end_date, _BOOKING.resources).where(
        _BOOKING.placed_at.is_not(None), _CURRENT,
        _BOOKING.end_date <= sa.bindparam('now'))


def _load_bookings(connection: sa.Connection, timeline: timelines.Timeline,
                   since: int) -> None:
    """Every booking that was not over at an instant.

    A million rows take the driver many seconds, so the database packs them:
    for each host and amount of resources, one text of numbers.
    """
    total = connection.scalar(
        sa.select(sa.func.count(models.Booking.id)).where(
            _CURRENT, models.Booking.end_date > since)) or 0
    done = shown = 0
    packs = []
    for row in _packed(connection, since):
        numbers = np.fromstring(row.packed, dtype=np.int64, sep=' ')
        if len(numbers) != 2 * row.bookings:
            raise RuntimeError(
                f'The database cut short the bookings of host {row.host_id}')
        packs.append((row.host_id, jsonutils.loads(row.resources), numbers))
        done += row.bookings
        if done - shown >= 100_000:
            shown = done
            LOG.info('Read %s of %s bookings', done, total)
    _add_packs(timeline, packs)


def _add_packs(timeline: timelines.Timeline, packs: ty.Sequence[
        tuple[int, model.Resources, npt.NDArray[np.int64]]]) -> None:
    if not packs:
        return
    counts = [len(numbers) // 2 for _host, _resources, numbers in packs]
    dates = np.concatenate([numbers for _h, _r, numbers in packs])
    classes = {rc for _host, resources, _numbers in packs for rc in resources}
    timeline.load(
        np.repeat([host_id for host_id, _r, _n in packs], counts),
        dates[0::2], dates[1::2],
        {rc: np.repeat([resources.get(rc, 0) for _h, resources, _n in packs],
                       counts) for rc in classes})


def _packed(connection: sa.Connection, since: int) -> ty.Iterator[ty.Any]:
    """For each host and amount: how many bookings, and their dates in one
    text, as each database knows to make it.
    """
    dialect = connection.dialect.name
    start, end = models.Booking.start_date, models.Booking.end_date
    text = sa.Text() if dialect != 'mysql' else sa.CHAR()
    pair = sa.cast(start, text).concat(' ').concat(sa.cast(end, text))
    if dialect == 'mysql':
        connection.execute(sa.text(
            f'SET SESSION group_concat_max_len = {2**30}'))
        packed = sa.func.group_concat(sa.text(
            "CONCAT(start_date, ' ', end_date) SEPARATOR ' '"))
    elif dialect == 'postgresql':
        packed = sa.func.string_agg(pair, ' ')
    else:
        packed = sa.func.group_concat(pair, ' ')
    amounts = sa.cast(models.Booking.resources, text)
    query = sa.select(
        models.Booking.host_id, sa.func.max(amounts).label('resources'),
        sa.func.count().label('bookings'), packed.label('packed'),
    ).where(_CURRENT, end > since).group_by(models.Booking.host_id, amounts)
    yield from connection.execute(query, execution_options={'yield_per': 1000})
