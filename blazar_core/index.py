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
generation (:func:`books.amend`), so that for each host the changes are an
unbroken row: each is applied exactly once and in its order, and a gap is
noticed and read. A transaction whose changes got a lower id than those of
one that committed before it is looked for as a missing id for some seconds;
the comparison of all generations, every :data:`COMPARE` seconds, finds what
even that missed.

What is searched here is a hint: whoever decides, decides in the database.
"""

import collections
import contextlib
import threading
import typing as ty

import numpy as np
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core import books
from blazar_core import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core import model
from blazar_core import timeline as timelines

__all__ = ['Index', 'KEEP']

LOG = logging.getLogger(__name__)

#: Seconds for which changes are kept in the database. A process that has not
#: looked for longer reads everything again.
KEEP = 3600
#: Seconds between two comparisons of the generations of all hosts.
COMPARE = 30
#: Seconds for which a missing id is looked for, and how many at most.
_MISSING_SECONDS = 5
_MISSING_MOST = 500


class Index:
    """What the books say, ready to be searched."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.RLock()
        self._timeline: timelines.Timeline | None = None
        self.hosts: dict[int, model.Host] = {}
        self.ids_by_uuid: dict[str, int] = {}
        self._top = 0
        self._missing: dict[int, int] = {}
        self._overdue: list[tuple[int, model.Window, model.Resources]] = []
        self._refreshed = self._compared = self._forgotten = 0
        self._asked = 0.0

    @contextlib.contextmanager
    def fresh(self, lag: float = 0, session: orm.Session | None = None,
              ) -> ty.Iterator[timelines.Timeline]:
        """The timeline as of now, for one thread at a time.

        Costs one SELECT of what changed and, if anything did or the second
        is another one, one of servers that overstay; the first time, and
        after an hour without use, it reads everything.

        :param lag: for who decides in the database anyway: the seconds ago
            that the database was asked last, with which he is content
        :param session: a new one of who has more to read from the same state
        """
        with self._lock:
            now = self._clock.now()
            asked = self._clock.elapsed()
            if self._timeline is None or now - self._refreshed > KEEP // 2:
                self._load(now, session)
                self._asked = asked
            elif now != self._refreshed or asked >= self._asked + lag:
                self._refresh(now, session)
                self._asked = asked
            assert self._timeline is not None
            yield self._timeline

    @contextlib.contextmanager
    def without(self, bookings: ty.Sequence[ty.Any]) -> ty.Iterator[None]:
        """Within :meth:`fresh`: as if these bookings were not there."""
        taken = [one for one in bookings if one.host_id in self.hosts]
        self._apply_all(taken, -1)
        try:
            yield
        finally:
            self._apply_all(taken, 1)

    @contextlib.contextmanager
    def booked(self, host_ids: ty.Sequence[int], window: model.Window,
               resources: model.Resources) -> ty.Iterator[None]:
        """Within :meth:`fresh`: as if this were booked, once on each."""
        assert self._timeline is not None
        for host_id in host_ids:
            self._timeline.apply(host_id, window, resources, 1)
        try:
            yield
        finally:
            for host_id in host_ids:
                self._timeline.apply(host_id, window, resources, -1)

    def _apply_all(self, bookings: ty.Iterable[ty.Any], sign: int) -> None:
        assert self._timeline is not None
        for one in bookings:
            self._timeline.apply(
                one.host_id, books.stay(
                    one.start_date, one.end_date, one.placed_at,
                    self._refreshed), one.resources, sign)

    # -- reading everything --------------------------------------------------

    def _reader(self, session: orm.Session | None,
                ) -> contextlib.AbstractContextManager[orm.Session]:
        return (self._database.reader() if session is None
                else contextlib.nullcontext(session))

    def _load(self, now: int, given: orm.Session | None) -> None:
        with self._reader(given) as session:
            self._top = session.scalar(
                sa.select(sa.func.max(models.Change.id))) or 0
            self.hosts = {row.id: books.host_of(row)
                          for row in session.execute(books.HOSTS)}
            self.ids_by_uuid = {host.uuid: host.id
                                for host in self.hosts.values()}
            timeline = timelines.Timeline(shared=books.SHARED)
            for host in self.hosts.values():
                timeline.set_host(host.id, host.capacity, host.usage)
            _load_bookings(session, timeline, now)
            self._timeline = timeline
            self._missing, self._overdue = {}, []
            self._watch_overdue(session, now)
        self._refreshed = self._compared = self._forgotten = now

    # -- following -----------------------------------------------------------

    def _refresh(self, now: int, given: orm.Session | None) -> None:
        with self._reader(given) as session:
            rows = session.connection().execute(_NEW, {
                'top': self._top, 'missing': list(self._missing)}).all()
            self._note_ids([row.id for row in rows], now)
            self._follow(session, rows)
            if now - self._compared >= COMPARE:
                self._compare(session, now)
            if rows or now != self._refreshed:
                self._watch_overdue(session, now)
        self._refreshed = now
        if now - self._forgotten >= KEEP:
            # What is over would pile up as long as the process lives.
            assert self._timeline is not None
            self._timeline.forget(now - KEEP)
            self._forgotten = now

    def _note_ids(self, ids: ty.Sequence[int], now: int) -> None:
        """Remember which ids between others have not been seen."""
        for one in ids:
            self._missing.pop(one, None)
        newest = max(ids, default=self._top)
        if newest > self._top:
            missing = set(range(max(self._top + 1, newest - _MISSING_MOST),
                                newest)).difference(ids)
            self._missing.update(dict.fromkeys(missing, now))
            self._top = newest
        self._missing = {
            one: since for one, since in sorted(
                self._missing.items())[-_MISSING_MOST:]
            if now - since <= _MISSING_SECONDS}

    def _follow(self, session: orm.Session, rows: ty.Iterable[ty.Any],
                ) -> None:
        """Apply changes, host by host and generation by generation."""
        of_hosts = collections.defaultdict(list)
        for row in rows:
            of_hosts[row.host_id].append(row)
        anew = []
        for host_id, of_host in of_hosts.items():
            known = self.hosts.get(host_id)
            if known is None:
                anew.append(host_id)
                continue
            new = [row for row in of_host
                   if row.generation > known.generation]
            if new and min(row.generation for row in new) > (
                    known.generation + 1):
                new = self._gap(session, known)
            if new and not self._advance(known, new):
                anew.append(host_id)
        if anew:
            self._reread_hosts(session, anew)

    def _gap(self, session: orm.Session, known: model.Host) -> list[ty.Any]:
        """All changes of a host since the generation that is known."""
        return list(session.execute(_CHANGES.where(
            _CHANGE.host_id == known.id,
            _CHANGE.generation > known.generation)).all())

    def _advance(self, known: model.Host, rows: ty.Iterable[ty.Any]) -> bool:
        """Apply the changes of a host.

        :returns: False when the row of the host itself must be read again
        """
        assert self._timeline is not None
        plain = True
        newest, usage = known.generation, known.usage
        for row in sorted(rows, key=lambda row: row.generation):
            newest = row.generation
            if row.start_date is not None:
                self._timeline.apply(
                    known.id, model.Window(row.start_date, row.end_date),
                    row.resources, row.sign)
            elif row.resources is not None:
                usage = row.resources
            else:
                plain = False
        if usage != known.usage:
            self._timeline.set_host(known.id, known.capacity, usage)
        self.hosts[known.id] = known.at(newest, usage)
        return plain

    def _reread_hosts(self, session: orm.Session,
                      host_ids: ty.Collection[int]) -> None:
        """The rows of hosts that are new or have changed themselves.

        The generation stays the one up to which changes were applied; a new
        host has had none yet.
        """
        assert self._timeline is not None
        for row in session.execute(books.HOSTS.where(
                _HOST.id.in_(host_ids))):
            host = books.host_of(row)
            known = self.hosts.get(host.id)
            self.ids_by_uuid[host.uuid] = host.id
            self._timeline.set_host(host.id, host.capacity, host.usage)
            self.hosts[host.id] = host.at(
                0 if known is None else known.generation, host.usage)
            if known is None:
                self._advance(self.hosts[host.id],
                              self._gap(session, self.hosts[host.id]))

    def _compare(self, session: orm.Session, now: int) -> None:
        """Look for changes of hosts that no id led to."""
        self._compared = now
        behind = [
            row.id for row in session.execute(sa.select(
                _HOST.id, _HOST.generation))
            if row.id not in self.hosts or
            row.generation > self.hosts[row.id].generation]
        if behind:
            self._follow(session, session.execute(_CHANGES.where(
                _CHANGE.host_id.in_(behind))).all())

    def _watch_overdue(self, session: orm.Session, now: int) -> None:
        """Servers that overstay keep their room."""
        assert self._timeline is not None
        rows = session.connection().execute(_OVERDUE, {'now': now}).all()
        overdue = [(row.host_id, model.Window(row.end_date,
                                              now + books.OVERDUE),
                    row.resources) for row in rows
                   if row.host_id in self.hosts]
        if overdue != self._overdue:
            for sign, entries in ((-1, self._overdue), (1, overdue)):
                for host_id, window, resources in entries:
                    self._timeline.apply(host_id, window, resources, sign)
            self._overdue = overdue


_HOST, _BOOKING, _CHANGE = (
    models.Host.__table__.c, models.Booking.__table__.c,
    models.Change.__table__.c)
_CHANGES = sa.select(
    _CHANGE.id, _CHANGE.host_id, _CHANGE.generation, _CHANGE.start_date,
    _CHANGE.end_date, _CHANGE.resources, _CHANGE.sign).order_by(_CHANGE.id)
_NEW = _CHANGES.where(sa.or_(
    _CHANGE.id > sa.bindparam('top'),
    _CHANGE.id.in_(sa.bindparam('missing', expanding=True))))
#: The bookings that take room.
_CURRENT = _BOOKING.host_id.is_not(None)
_OVERDUE = sa.select(
    _BOOKING.host_id, _BOOKING.end_date, _BOOKING.resources).where(
        _BOOKING.placed_at.is_not(None), _CURRENT,
        _BOOKING.end_date <= sa.bindparam('now'))


def _load_bookings(session: orm.Session, timeline: timelines.Timeline,
                   now: int) -> None:
    """Every booking that is not over.

    A million rows take the driver many seconds, so the database packs them:
    for each host and amount of resources, one text of numbers.
    """
    total = session.scalar(sa.select(sa.func.count(models.Booking.id)).where(
        _CURRENT, models.Booking.end_date > now)) or 0
    done = shown = 0
    packs = []
    for row in _packed(session, now):
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
        tuple[int, model.Resources, np.typing.NDArray[np.int64]]]) -> None:
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


def _packed(session: orm.Session, now: int) -> ty.Iterator[ty.Any]:
    """For each host and amount: how many bookings, and their dates in one
    text, as each database knows to make it.
    """
    dialect = session.get_bind().dialect.name
    start, end = models.Booking.start_date, models.Booking.end_date
    text = sa.Text() if dialect != 'mysql' else sa.CHAR()
    pair = sa.cast(start, text).concat(' ').concat(sa.cast(end, text))
    if dialect == 'mysql':
        session.execute(sa.text(f'SET SESSION group_concat_max_len = {2**30}'))
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
    ).where(_CURRENT, end > now).group_by(models.Booking.host_id, amounts)
    yield from session.execute(query, execution_options={'yield_per': 1000})
