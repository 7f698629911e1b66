# SPDX-License-Identifier: Apache-2.0

"""All bookings in memory: a timeline that follows the database.

Each process that searches has one. It is read in full once, from one
snapshot, and from then on follows what changed. Every decision moves the
generation of its hosts by one and leaves its changes behind under that
generation (:func:`ledger.amend`), each of which says how many they are. So
for each host the changes are an unbroken row: each is applied exactly once
and in its order, and a gap is noticed and read. A transaction whose changes
got a lower id than those of one that committed before it is looked for as a
missing id for some seconds; the comparison of all generations, every
:data:`blazar_core.capacity.feed.COMPARE` seconds, finds what even that missed.

Following has two halves. First everything that is new is read
(:mod:`blazar_core.capacity.feed`), all from one state of the database, and
nothing is touched; then it is applied, and nothing
is read. Whatever fails on the way, the index never says that it knows a
generation of which it does not have everything.

Where the row cannot be continued, everything is read again: changes have been
trimmed that are still needed, or the database is another one than it was (it
was restored from a backup). The newest change that is known tells the latter:
it has to be there, as it was, each time.

What is found here is a hint: each decision is made in the database.
"""

import collections
import contextlib
import functools
import threading
import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import feed
from blazar_core.capacity import host_memory
from blazar_core.capacity import rule
from blazar_core.capacity import snapshot
from blazar_core.capacity import stale_index
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import host_properties
from blazar_core.common import model
from blazar_core.common import periodic
from blazar_core.db import api

__all__ = ['Alike', 'DedicatedHosts', 'Index', 'KEEP']

LOG = logging.getLogger(__name__)

#: Seconds for which changes are kept in the database. A process that has not
#: looked for longer may have to read everything again.
KEEP = 3600
#: Seconds after which a process that nobody asks reads what has changed. Each
#: time the generations of all hosts are compared: half a second of a processor
#: with 100,000.
_PAUSE = 120
#: Of how many expressions it is remembered which hosts match, and of how many
#: sets of hosts which these are.
_EXPRESSIONS = 100
_MINUTE = 60


#: Amounts of a host over a window.
_Entry: ty.TypeAlias = tuple[int, model.Window, model.Resources]


class _Kept(ty.NamedTuple):
    """As a booking."""

    host_id: int
    start_date: int
    end_date: int
    claimed_at: None
    resources: model.Resources


class DedicatedHosts(ty.NamedTuple):
    """The hosts that are not for everybody.

    :ivar enrolled: the uuids of those that serve leases only
    :ivar closed: those of these that may not be reserved
    :ivar serving: whether a host is one of those, in the order of the
        timeline
    :ivar reservable: whether it may be reserved too
    :ivar held: by reservation, the uuids of those of which it has all
    :ivar off: whether it is switched off now
    """

    enrolled: frozenset[str]
    closed: frozenset[str]
    serving: npt.NDArray[np.bool_]
    reservable: npt.NDArray[np.bool_]
    held: dict[str, list[str]]
    off: npt.NDArray[np.bool_]


#: Which hosts, by their uuids, match an expression.
Alike: ty.TypeAlias = ty.Callable[
    [host_properties.Expression | None], frozenset[str]]


class Index:
    """What the books say, ready to be searched."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self.clock = clock
        self._turn, self._lock = threading.Lock(), threading.Lock()
        #: Held from the first :meth:`follow` on.
        self._followed = threading.Lock()
        self._timeline: timelines.Timeline | None = None
        self._known = feed.FeedState({}, None, 0,
                                     host_memory.InternedRecords())
        self.ids_by_uuid: dict[str, int] = {}
        self._uuids: npt.NDArray[np.object_] = np.empty(0, object)
        self._apart: DedicatedHosts | None = None
        #: Which hosts are of a set, and of how many that was said.
        self._masks: ty.Callable[
            [frozenset[str]], npt.NDArray[np.bool_]] | None = None
        self._masked = 0
        #: Says which hosts are alike, as they were last; None: not judged.
        self.judged: Alike | None = None
        self._overdue: list[_Entry] = []
        self._overstaying: ty.Sequence[ty.Any] = ()
        #: What interruptible servers take, by host and lead time, and the
        #: entries of the timeline for that.
        self._lent: list[_Entry] = []
        self._interruptible: dict[
            int, ty.Mapping[int, model.Resources]] = {}
        self._forgotten = 0
        #: The instant since which everything is known.
        self._since = 0
        self._asked = 0.0
        self.stale_index = stale_index.StaleIndex(clock, self._lock, lambda: (
            self._known, self._timeline, self._asked))

    @property
    def hosts(self) -> dict[int, model.Host]:
        """The hosts that are known, by id. Not a copy."""
        return self._known.hosts

    def age(self) -> float:
        """Return how many seconds ago the database was asked last what has
        changed.
        """
        return self.clock.elapsed() - self._asked

    def prepare(self) -> None:
        """Read everything while nobody waits: before a process serves.

        It may fork when this is done: children begin with what was read, and
        have none of its connections. What fails now is read later.
        """
        try:
            _look(self)
        except Exception as exc:
            LOG.warning('The booking index is loaded later: %s',
                        exc.__cause__ or exc)
        finally:
            self._database.engine.dispose()

    def follow(self) -> None:
        """Go on following while nobody asks.

        A thread does that, as long as the process lives. Without it a question
        that comes when nobody has asked for so long that changes were trimmed
        reads everything. Costs nothing when it has been said before. Not
        before a process forks: the thread would stay behind.
        """
        if self._followed.acquire(blocking=False) and not _started(self):
            self._followed.release()

    @contextlib.contextmanager
    def fresh(self, lag: float = 0, connection: sa.Connection | None = None,
              ) -> ty.Iterator[timelines.Timeline]:
        """The timeline as of now, for one thread at a time.

        A thread that releases it and wants it again gets it after the others:
        so a long search in steps delays no other thread by more than a step.
        A thread that has it does not get it again.

        Costs one SELECT of what changed and, if a booking did or the second
        is another one, one of servers that overstay; it reads everything the
        first time, and where it cannot follow any more.

        :param lag: for a caller that decides in the database: the seconds ago
            since the database was asked last that it accepts
        :param connection: a new one of a caller that has more to read from
            the same state
        """
        # Locks are not fair: the thread that releases one mostly is the next
        # to have it. A thread that waits here has its turn first.
        with self._turn:
            self._lock.acquire()
        try:
            # The thread that had the turn before may have got no answer.
            self._database.check_clock()
            now = self.clock.now()
            asked = self.clock.elapsed()
            if self._timeline is None or now < self._since:
                # Of before that it knows too little, for a clock that was
                # ahead and is set right.
                self._load(now, connection)
                self._asked = asked
            elif now != self._known.at or asked >= self._asked + lag:
                self._refresh(now, connection)
                self._asked = asked
            assert self._timeline is not None
            self.stale_index.keep_guests()
            yield self._timeline
        finally:
            self._lock.release()

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

    def mask(self, uuids: ty.Collection[str]) -> npt.NDArray[np.bool_]:
        """Within :meth:`fresh`: whether a host is one of these, in the order
        of the timeline. Not a copy: some are remembered.
        """
        assert self._timeline is not None
        if self._masks is None or self._masked != len(self._timeline):
            self._masked = len(self._timeline)
            self._masks = functools.lru_cache(_EXPRESSIONS)(self._mask)
        return self._masks(frozenset(uuids))

    def _mask(self, uuids: frozenset[str]) -> npt.NDArray[np.bool_]:
        assert self._timeline is not None
        return self._timeline.mask(
            self.ids_by_uuid[uuid] for uuid in uuids
            if uuid in self.ids_by_uuid)

    def apart(self) -> DedicatedHosts:
        """Within :meth:`fresh`: the hosts that are not for everybody."""
        assert self._timeline is not None
        if self._apart is None or (
                len(self._apart.serving) < len(self._timeline)):
            self._apart = _apart_of(
                [self.hosts[one] for one in self._timeline.ids])
        return self._apart

    def alike(self) -> Alike:
        """Within :meth:`fresh`: the uuids of the hosts that are what somebody
        asks for.

        Also to be asked later; says then what was so. Judges all hosts for
        each expression once, and remembers some, until a host changes.
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
        """Within :meth:`fresh`: as if these bookings were not there.

        :param coming: others, as if they were
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
        """Within :meth:`fresh`: as if no interruptible server were evicted
        before an instant.
        """
        with self.excluding((), [
                _Kept(host_id, window.end, until, None, amounts)
                for host_id, window, amounts in self._lent
                if window.end < until]):
            yield

    @contextlib.contextmanager
    def without_interruptible(self, host: model.Host, server_id: str,
                              ) -> ty.Iterator[None]:
        """Within :meth:`fresh`: as if an interruptible server were not there.
        """
        amounts, lead_time, _since = host.interruptible[server_id]
        with self.excluding([
                _Kept(one, window.start, window.end, None, amounts)
                for one, window, _amounts in self._lent
                if one == host.id and window.end - window.start == (
                    lead_time + _MINUTE)][:1]):
            yield

    def interruptible_servers(self) -> dict[str, int]:
        """Return the host of each interruptible server, as it was last read.
        """
        return {server_id: host_id for host_id in [*self._interruptible]
                for server_id in self.hosts[host_id].interruptible}

    def _apply_all(self, bookings: ty.Iterable[ty.Any], sign: int) -> None:
        assert self._timeline is not None
        for one in bookings:
            self._timeline.apply(
                one.host_id, rule.occupied(
                    one.start_date, one.end_date, one.claimed_at,
                    self._known.at), one.resources, sign)

    # -- reading everything --------------------------------------------------

    def _load(self, now: int, given: sa.Connection | None) -> None:
        with _reader(self._database, given) as connection:
            top = connection.execute(feed.NEWEST).one_or_none()
            hosts, timeline, alike = snapshot.read_all(connection, now - KEEP)
            overdue = feed.overdue(connection, now)
        self._known, self._overdue = feed.FeedState(hosts, top, now, alike), []
        self.ids_by_uuid = {host.uuid: host.id for host in hosts.values()}
        self._uuids, self._apart = np.empty(0, object), None
        self.judged = self._masks = None
        self._interruptible = {
            host.id: rule.by_lead_time(host.interruptible)
            for host in hosts.values() if host.interruptible}
        self._watch_overdue(timeline, overdue, now)
        self._timeline = timeline
        self._forgotten = now
        self._since = now - KEEP
        host_memory.trim_heap()

    # -- following -----------------------------------------------------------

    def _refresh(self, now: int, given: sa.Connection | None) -> None:
        try:
            with _reader(self._database, given) as connection:
                found = self._known.read(connection, now)
        except feed.FeedGap as exc:
            LOG.warning('The booking index is loaded again: %s', exc)
            self._load(now, given)
            return
        timeline, self._timeline = self._timeline, None
        assert timeline is not None
        self._apply(timeline, found, now)
        if now - self._forgotten >= KEEP:
            # What is over would pile up as long as the process lives.
            timeline.forget(now - KEEP)
            self._forgotten, self._since = now, now - KEEP
            host_memory.trim_heap()
        # A load that does not come this far leaves none: the next reads all.
        self._timeline = timeline

    def _apply(self, timeline: timelines.Timeline, found: feed.FeedBatch,
               now: int) -> None:
        """Make what was read so. Reads nothing."""
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
            self._interruptible.pop(host.id, None)
            if host.interruptible:
                self._interruptible[host.id] = rule.by_lead_time(
                    host.interruptible)
        if found.overdue is not None or found.steps:
            self._watch_overdue(timeline, self._overstaying if (
                found.overdue is None) else found.overdue, now)
        if found.compared:
            self._known.compared = now
        self._known.at = now

    def _watch_overdue(self, timeline: timelines.Timeline,
                       rows: ty.Sequence[ty.Any], now: int) -> None:
        """Servers that overstay keep their capacity, and interruptible ones
        have theirs for their lead time: to the end of a minute, so that the
        levels of their hosts change once in a minute.
        """
        overdue = [(
            row.host_id, model.Window(row.end_date, now + rule.OVERDUE),
            row.resources) for row in rows if row.host_id in self.hosts]
        self._overstaying, minute = rows, now - now % _MINUTE
        self._lent = [
            (host_id, model.Window(minute, window.end), amounts)
            for host_id, some in self._interruptible.items()
            for window, amounts in rule.evictable(some, minute + _MINUTE)]
        overdue += self._lent
        if overdue != self._overdue:
            for sign, entries in (
                    (-1, _without(self._overdue, overdue)),
                    (1, _without(overdue, self._overdue))):
                for host_id, window, resources in entries:
                    timeline.apply(host_id, window, resources, sign)
            self._overdue = overdue


def _without(some: ty.Iterable[_Entry], others: ty.Iterable[_Entry],
             ) -> list[_Entry]:
    """Return the entries of a list that another one does not have."""
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
    """What a timeline knows of a host."""
    return host.capacity, host.usage, host.providers


def _place_of(host: model.Host) -> tuple[bool, bool, str | None, bool, bool]:
    """For whom a host is, and whether it is off."""
    return (host.enrolled, host.reservable, host.assigned_to, host.overdue,
            host.off)


def _started(index: Index) -> bool:
    """Whether a thread follows an index now. Nobody's request fails for it."""
    try:
        threading.Thread(
            target=periodic.run_periodically, name='following', daemon=True,
            args=(
                index.clock, threading.Event(), _PAUSE,
                'Changes of the booking index', lambda: _look(index))).start()
    except RuntimeError as exc:
        LOG.warning('The booking index is updated on demand: %s', exc)
        return False
    return True


def _look(index: Index) -> None:
    with index.fresh():
        pass


def _apart_of(hosts: ty.Sequence[model.Host]) -> DedicatedHosts:
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
        np.array([host.off for host in hosts], bool))


def _reader(database: api.Database, given: sa.Connection | None,
            ) -> contextlib.AbstractContextManager[sa.Connection]:
    return (database.connection() if given is None
            else contextlib.nullcontext(given))
