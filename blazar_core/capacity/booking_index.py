# SPDX-License-Identifier: Apache-2.0

"""All bookings in memory: a timeline that follows the database.

Each process that searches has one index. It is loaded once, from one snapshot
of the database, and then follows the changes. Every decision increases the
generation of its hosts by one and stores its changes under that generation
(:func:`ledger.amend`); each change has the number of changes of the decision.
So the changes of a host form an unbroken sequence: each is applied exactly
once and in order, and a gap is noticed and read. If a transaction commits
after one whose changes have higher ids, its missing ids are searched for
during some seconds; the comparison of all generations, every
:data:`blazar_core.capacity.feed.COMPARE` seconds, finds what that missed.

An update has two halves. The first reads everything that is new from one
state of the database (:mod:`blazar_core.capacity.feed`) and changes nothing;
the second applies it and reads nothing. Whatever fails in between, the index
never claims to know a generation of which it does not have everything.

Everything is loaded again if the sequence cannot be continued: changes that
are still needed have been trimmed, or the database is a different one (it was
restored from a backup). The latter is detected by the newest known change: it
must still exist, unchanged, at each update.

What is found here is a hint: each decision is made in the database.
"""

import collections
import contextlib
import functools
import itertools
import threading
import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import feed
from blazar_core.capacity import host_memory
from blazar_core.capacity import index_rows
from blazar_core.capacity import rule
from blazar_core.capacity import stale_index
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import periodic
from blazar_core.db import api

LOG = logging.getLogger(__name__)

#: Seconds for which changes are kept in the database. A process that has not
#: read for longer may have to load everything again.
KEEP = 3600
#: Seconds after which an idle process reads what has changed. Each time the
#: generations of all hosts are compared, which takes half a second of a
#: processor with 100,000 hosts.
_PAUSE = 120
#: The number of expressions whose matching hosts are cached, and of sets of
#: hosts whose masks are.
_EXPRESSIONS = 100
_MINUTE = 60
#: The numbers of evicted servers for which it is known what others take.
_EVICTED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


#: Amounts of a host over a window.
_Entry: ty.TypeAlias = tuple[int, model.Window, model.Resources]


class BookingRow(ty.NamedTuple):
    """A row with the columns of a booking that :meth:`Index.excluding` reads.
    """

    host_id: int
    start_date: int
    end_date: int
    resources: model.Resources
    claimed_at: None = None


class DedicatedHosts(ty.NamedTuple):
    """The hosts that are not for all workloads.

    :ivar enrolled: the uuids of the hosts that serve leases only
    :ivar closed: the uuids of those among them that may not be reserved
    :ivar serving: whether each host serves leases only, in the order of the
        timeline
    :ivar reservable: whether each host serves leases only and may be reserved
    :ivar held: by reservation, the uuids of the hosts that are assigned to it
    :ivar off: whether each host is switched off now
    :ivar lendable: the uuids of the hosts that serve leases only and that
        interruptible servers may use now
    """
    enrolled: frozenset[str]
    closed: frozenset[str]
    serving: npt.NDArray[np.bool_]
    reservable: npt.NDArray[np.bool_]
    held: dict[str, list[str]]
    off: npt.NDArray[np.bool_]
    lendable: frozenset[str]


#: Returns the uuids of the hosts that match an expression.
Alike: ty.TypeAlias = ty.Callable[
    [host_properties.Expression | None], frozenset[str]]


class Lent(ty.NamedTuple):
    """What interruptible servers take, by position.

    :ivar hosts: which hosts have any
    :ivar left: by a number of servers, ascending from 0: the amounts, as if so
        many had been evicted from each host and the others never were
    """

    hosts: npt.NDArray[np.bool_]
    left: dict[int, timelines.Tentative]


class Index:
    """The reservation database in memory, ready to be searched.

    :param lends: whether hosts that serve leases only are lent while no
        reservation holds them
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 lends: bool = False) -> None:
        self._lends = lends
        self._database = database
        self.clock = clock
        self._turn, self._lock = threading.Lock(), threading.Lock()
        #: Held from the first call of :meth:`follow` on.
        self._followed = threading.Lock()
        self._timeline: timelines.Timeline | None = None
        self._known = feed.FeedState({}, None, 0,
                                     host_memory.InternedRecords())
        self.ids_by_uuid: dict[str, int] = {}
        self._uuids: npt.NDArray[np.object_] = np.empty(0, object)
        self._apart: DedicatedHosts | None = None
        self._masks = functools.lru_cache(_EXPRESSIONS)(self._mask)
        #: Returns the hosts that match an expression; None: not computed.
        self.judged: Alike | None = None
        self._overdue: list[_Entry] = []
        self._overstaying: ty.Sequence[ty.Any] = ()
        #: The entries of the timeline for interruptible servers by host, the
        #: minute for which they were computed, and what these servers take by
        #: host and lead time.
        self._lent: dict[int, list[_Entry]] = {}
        self._minute = 0
        self._interruptible: dict[
            int, ty.Mapping[int, model.Resources]] = {}
        self._lent_at: Lent | None = None
        self._forgotten = 0
        #: The instant since which everything is known.
        self._since = 0
        self._asked = 0.0
        self.stale_index = stale_index.StaleIndex(clock, self._lock, lambda: (
            self._known, self._timeline, self._asked))

    @property
    def hosts(self) -> dict[int, model.Host]:
        """The known hosts, by id. Not a copy."""
        return self._known.hosts

    def age(self) -> float:
        """Return how many seconds ago the database was last read.
        """
        return self.clock.elapsed() - self._asked

    def prepare(self) -> None:
        """Load everything before the process serves requests.

        The process may fork afterwards: children start with what was loaded,
        and share none of its connections. If loading fails, it is done later.
        """
        try:
            _look(self)
        except Exception as exc:
            LOG.warning('The booking index is loaded later: %s',
                        exc.__cause__ or exc)
        finally:
            self._database.engine.dispose()

    def follow(self) -> None:
        """Follow the changes while there are no requests.

        A thread does that, as long as the process lives. Without it, the
        first request after so long a pause that changes were trimmed loads
        everything. Further calls cost nothing. Call it after a process forks:
        the child would not have the thread.
        """
        if self._followed.acquire(blocking=False) and not periodic.in_thread(
                self.clock, 'following', _PAUSE,
                'Changes of the booking index', lambda: _look(self)):
            self._followed.release()

    @contextlib.contextmanager
    def fresh(self, lag: float = 0, connection: sa.Connection | None = None,
              ) -> ty.Iterator[timelines.Timeline]:
        """Yield the timeline as of now, to one thread at a time.

        A thread that releases it and wants it again gets it after the others,
        so a long search in steps delays no other thread by more than a step.
        It is not reentrant.

        Costs one SELECT of what changed and, if a booking did or a second has
        passed, one of servers past their end; it loads everything the first
        time, and if the changes cannot be followed.

        :param lag: for a caller that decides in the database: how many
            seconds ago the last read may have been
        :param connection: a new one of a caller that has more to read from
            the same state
        """
        # Locks are not fair: the thread that releases one mostly is the next
        # to get it. A thread that waits here is the next instead.
        with self._turn:
            self._lock.acquire()
        try:
            # The previous thread may have got no answer.
            self._database.check_clock()
            now = self.clock.now()
            asked = self.clock.elapsed()
            if self._timeline is None or now < self._since:
                # The index lacks the changes before that time: the clock was
                # ahead and has been corrected.
                self._load(now, connection)
                self._asked = asked
            elif now != self._known.at or asked >= self._asked + lag:
                self._refresh(now, connection)
                self._asked = asked
            assert self._timeline is not None
            self.stale_index.keep_unrecorded()
            yield self._timeline
        finally:
            self._lock.release()

    def uuids(self) -> npt.NDArray[np.object_]:
        """Within :meth:`fresh`: return the uuids of all hosts, in the order
        of the timeline.
        """
        assert self._timeline is not None
        # The uuid of a host never changes.
        if len(self._uuids) < len(self._timeline):
            self._uuids = np.array([self.hosts[host_id].uuid for host_id in
                                    self._timeline.ids], object)
        return self._uuids

    def mask(self, uuids: ty.Collection[str]) -> npt.NDArray[np.bool_]:
        """Within :meth:`fresh`: return whether each host is one of these, in
        the order of the timeline. Not a copy: results are cached.
        """
        assert self._timeline is not None
        return self._masks(frozenset(uuids), len(self._timeline))

    def _mask(self, uuids: frozenset[str], _hosts: int,
              ) -> npt.NDArray[np.bool_]:
        """Return a mask of the timeline with a number of hosts."""
        assert self._timeline is not None
        return self._timeline.mask(
            self.ids_by_uuid[uuid] for uuid in uuids
            if uuid in self.ids_by_uuid)

    def apart(self) -> DedicatedHosts:
        """Within :meth:`fresh`: return the hosts that are not for all
        workloads.
        """
        assert self._timeline is not None
        if self._apart is None or (
                len(self._apart.serving) < len(self._timeline)):
            self._apart = _apart_of(
                [self.hosts[one] for one in self._timeline.ids], self._lends)
        return self._apart

    def alike(self) -> Alike:
        """Within :meth:`fresh`: return a function that finds the uuids of the
        hosts with given properties.

        The function may be used later, and then still answers for the state
        of now. It judges all hosts once for each expression, and caches some
        results until a host changes.
        """
        if self.judged is None:
            hosts = {host.uuid: host.properties
                     for host in self.hosts.values()}
            self.judged = functools.lru_cache(_EXPRESSIONS)(
                lambda one: frozenset(host_properties.matching(one, hosts)))
        return self.judged

    @contextlib.contextmanager
    def excluding(self, bookings: ty.Sequence[ty.Any],
                  coming: ty.Sequence[ty.Any] = ()) -> ty.Iterator[None]:
        """Within :meth:`fresh`: search as if these bookings did not exist.

        :param coming: bookings that count as if they existed
        """
        there, others = ([one for one in some if one.host_id in self.hosts]
                         for some in (bookings, coming))
        self._apply_all(there, -1)
        self._apply_all(others, 1)
        try:
            yield
        finally:
            self._apply_all(others, -1)
            self._apply_all(there, 1)

    @contextlib.contextmanager
    def keeping_interruptible(self, until: int) -> ty.Iterator[None]:
        """Within :meth:`fresh`: search as if no interruptible server were
        evicted before an instant.
        """
        with self.excluding((), [
                BookingRow(host_id, window.end, until, amounts)
                for host_id, window, amounts in self._all_lent()
                if window.end < until]):
            yield

    def lent(self) -> Lent | None:
        """Within :meth:`fresh`: what interruptible servers take, by position;
        None: nothing.
        """
        if not self._lent:
            return None
        assert self._timeline is not None
        found, timeline = self._lent_at, self._timeline
        if found is None or len(found.hosts) != len(timeline):
            left = {count: timelines.Tentative(len(timeline))
                    for count in _EVICTED}
            for host_id in self._interruptible:
                host = self.hosts[host_id]
                order = rule.eviction_order(host.interruptible, host.capacity)
                for count, some in left.items():
                    some.set(timeline.index(host_id), [
                        host.interruptible[one][0] for one in order[count:]])
            found = self._lent_at = Lent(left[0].servers > 0, left)
        return found

    def lent_until(self) -> int:
        """Within :meth:`fresh`: the instant from which on interruptible
        servers take nothing.
        """
        return max((window.end for _host, window, _some in self._all_lent()),
                   default=0)

    def evictable(self) -> list[ty.Any]:
        """Return the amounts of interruptible servers as bookings, as last
        read; for :meth:`excluding`.
        """
        return [BookingRow(host_id, window.start, window.end, amounts)
                for host_id, window, amounts in self._all_lent()]

    @contextlib.contextmanager
    def without_interruptible(self, host: model.Host, server_id: str,
                              ) -> ty.Iterator[None]:
        """Within :meth:`fresh`: search as if an interruptible server did not
        exist.
        """
        amounts, lead_time, _since = host.interruptible[server_id]
        with self.excluding([
                BookingRow(one, window.start, window.end, amounts)
                for one, window, _amounts in self._lent.get(host.id, ())
                if window.end - window.start == lead_time + _MINUTE][:1]):
            yield

    def interruptible_servers(self) -> dict[str, list[int]]:
        """Return the hosts of each interruptible server, as they were last
        read: two while it moves or is resized.
        """
        found: dict[str, list[int]] = collections.defaultdict(list)
        for host_id in [*self._interruptible]:
            for server_id in self.hosts[host_id].interruptible:
                found[server_id].append(host_id)
        return dict(found)

    def _all_lent(self) -> ty.Iterator[_Entry]:
        # Another thread may read meanwhile.
        return itertools.chain.from_iterable([*self._lent.values()])

    def _apply_all(self, bookings: ty.Iterable[ty.Any], sign: int) -> None:
        assert self._timeline is not None
        for one in bookings:
            self._timeline.apply(
                one.host_id, rule.occupied(
                    one.start_date, one.end_date, one.claimed_at,
                    self._known.at), one.resources, sign)

    # -- reading everything --------------------------------------------------

    def _load(self, now: int, given: sa.Connection | None) -> None:
        with self._database.connection(given) as connection:
            top = connection.execute(feed.NEWEST).one_or_none()
            hosts, timeline, alike = index_rows.read_all(
                connection, now - KEEP)
            overdue = feed.overdue(connection, now)
        self._known, self._overdue = feed.FeedState(hosts, top, now, alike), []
        self.ids_by_uuid = {host.uuid: host.id for host in hosts.values()}
        self._uuids, self._apart = np.empty(0, object), None
        self.judged = None
        self._masks.cache_clear()
        self._lent_at, self._lent = None, {}
        self._interruptible = {
            host.id: rule.by_lead_time(host.interruptible)
            for host in hosts.values() if host.interruptible}
        self._watch_overdue(timeline, overdue, now)
        self._watch_interruptible(timeline, self._interruptible, now)
        self._timeline = timeline
        self._forgotten = now
        self._since = now - KEEP
        host_memory.trim_heap()

    # -- following -----------------------------------------------------------

    def _refresh(self, now: int, given: sa.Connection | None) -> None:
        try:
            with self._database.connection(given) as connection:
                found = self._known.read(connection, now)
        except feed.FeedGap as exc:
            LOG.warning('The booking index is loaded again: %s', exc)
            self._load(now, given)
            return
        timeline, self._timeline = self._timeline, None
        assert timeline is not None
        self._apply(timeline, found, now)
        if now - self._forgotten >= KEEP:
            # Ended bookings would accumulate as long as the process lives.
            timeline.forget(now - KEEP)
            self._forgotten, self._since = now, now - KEEP
            host_memory.trim_heap()
        # If applying fails, there is no timeline: the next read loads all.
        self._timeline = timeline

    def _apply(self, timeline: timelines.Timeline, found: feed.FeedBatch,
               now: int) -> None:
        """Apply what was read. Reads nothing."""
        self._known.note_ids(found.ids, now)
        self._known.top = found.top
        for host, changes in found.steps:
            known = self.hosts.get(host.id)
            if known is None or _sizes_of(known) != _sizes_of(host):
                timeline.set_host(host.id, host.capacity, host.usage,
                                  host.uuid, host.providers)
            for row in changes:
                timeline.apply(
                    host.id, model.Window(row.start_date, row.end_date),
                    row.resources, row.sign)
            if known is None or _place_of(known) != _place_of(host):
                self._apart = None
            if known is None or known.properties != host.properties:
                self.judged = None
            self.hosts[host.id] = host
            self.ids_by_uuid[host.uuid] = host.id
            if (known and known.interruptible or {}) != host.interruptible:
                self._lent_at = None
            self._interruptible.pop(host.id, None)
            if host.interruptible:
                self._interruptible[host.id] = rule.by_lead_time(
                    host.interruptible)
        if found.overdue is not None or found.steps:
            self._watch_overdue(timeline, self._overstaying if (
                found.overdue is None) else found.overdue, now)
            self._watch_interruptible(
                timeline, {host.id for host, _changes in found.steps}, now)
        if found.compared:
            self._known.compared = now
        self._known.at = now

    def _watch_overdue(self, timeline: timelines.Timeline,
                       rows: ty.Sequence[ty.Any], now: int) -> None:
        """Reserve the capacity of servers past their end."""
        overdue = [(
            row.host_id, model.Window(row.end_date, now + rule.OVERDUE),
            row.resources) for row in rows if row.host_id in self.hosts]
        self._overstaying = rows
        if overdue != self._overdue:
            _replace(timeline, _without(self._overdue, overdue),
                     _without(overdue, self._overdue))
            self._overdue = overdue

    def _watch_interruptible(self, timeline: timelines.Timeline,
                             changed: ty.Collection[int], now: int) -> None:
        """Reserve the capacity of interruptible servers for their lead time,
        rounded up to a minute, so that the levels of their hosts change once
        in a minute.

        :param changed: the ids of hosts that have changed; others are looked
            at in the next minute
        """
        minute = now - now % _MINUTE
        if minute != self._minute:
            changed = {*self._interruptible, *self._lent}
            self._minute = minute
        for host_id in changed:
            before = self._lent.get(host_id, [])
            after = [(host_id, model.Window(minute, window.end), amounts)
                     for window, amounts in rule.evictable(
                         self._interruptible.get(host_id, {}),
                         minute + _MINUTE)]
            if after != before:
                _replace(timeline, before, after)
            if after:
                self._lent[host_id] = after
            else:
                self._lent.pop(host_id, None)


def _replace(timeline: timelines.Timeline, before: ty.Iterable[_Entry],
             after: ty.Iterable[_Entry]) -> None:
    for sign, entries in ((-1, before), (1, after)):
        for host_id, window, resources in entries:
            timeline.apply(host_id, window, resources, sign)


def _without(some: ty.Iterable[_Entry], others: ty.Iterable[_Entry],
             ) -> list[_Entry]:
    """Return the entries of a list that another list does not have."""
    left = collections.Counter(map(_key, others))
    found = []
    for one in some:
        if left[_key(one)]:
            left[_key(one)] -= 1
        else:
            found.append(one)
    return found


def _key(entry: _Entry) -> ty.Hashable:
    host_id, window, resources = entry
    return host_id, window, frozenset(resources.items())


def _sizes_of(host: model.Host) -> tuple[ty.Any, ...]:
    """Return what a timeline knows of a host."""
    return host.capacity, host.usage, host.providers


def _place_of(host: model.Host) -> tuple[bool, bool, str | None, bool, bool]:
    """Return the values of a host that :class:`DedicatedHosts` depends on."""
    return (host.enrolled, host.reservable, host.assigned_to, host.overdue,
            host.off)


def _look(index: Index) -> None:
    with index.fresh():
        pass


def _apart_of(hosts: ty.Sequence[model.Host], lends: bool,
              ) -> DedicatedHosts:
    held: dict[str, list[str]] = {}
    for host in hosts:
        if host.assigned_to is not None and not host.overdue:
            held.setdefault(host.assigned_to, []).append(host.uuid)
    return DedicatedHosts(
        frozenset(host.uuid for host in hosts if host.enrolled),
        frozenset(host.uuid for host in hosts
                  if host.enrolled and not host.reservable),
        np.array([host.enrolled for host in hosts], bool),
        np.array([host.reservable for host in hosts], bool), held,
        np.array([host.off for host in hosts], bool),
        frozenset(host.uuid for host in hosts
                  if lends and host.reservable and host.assigned_to is None))
