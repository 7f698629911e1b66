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

"""Admission: which hosts a demand gets, or why none.

The search is done in memory (:mod:`blazar_core.books.follower`), the decision
in the database (:func:`blazar_core.books.ledger.amend`), which may say that
the search was late: then it is done again, with other hosts first.
"""

import collections
import contextlib
import dataclasses
import heapq
import itertools
import math
import typing as ty

import numpy as np
from numpy import typing as npt
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import follower
from blazar_core.books import ledger
from blazar_core.books import timeline as timelines
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import properties
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['Admission', 'Kept', 'LAG', 'PATIENCE', 'Picked', 'Rooms',
           'Strategy', 'bound', 'own_of', 'pack', 'spread']

LOG = logging.getLogger(__name__)

R = ty.TypeVar('R')

#: Puts the hosts that have room into the order in which they are to be
#: filled: given the timeline, their positions in it, the window, and which
#: of all hosts something of the same lease goes to already.
Strategy: ty.TypeAlias = ty.Callable[
    [timelines.Timeline, npt.NDArray[np.intp], model.Window,
     npt.NDArray[np.bool_]], npt.NDArray[np.intp]]


def pack(timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
         window: model.Window, ours: npt.NDArray[np.bool_],
         ) -> npt.NDArray[np.intp]:
    """Put leases that end together on the same hosts.

    First the hosts that stay busy until the lease ends anyway, those that
    fall free soonest after it before others; then those that would have to
    stay busy for longer, by how much. Empty hosts come last, and so whole
    hosts fall free.
    """
    busy_until = timeline.busy_until()
    busy_until[ours] = np.maximum(busy_until[ours], window.end)
    busy_until = busy_until[candidates]
    longer = np.maximum(window.end - busy_until, 0)
    return candidates[np.lexsort((candidates, busy_until, longer))]


def spread(_timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
           _window: model.Window, _ours: npt.NDArray[np.bool_],
           ) -> npt.NDArray[np.intp]:
    """At random."""
    return np.random.default_rng().permutation(candidates)


#: For each demand, the id of a host for each of its servers.
Picked: ty.TypeAlias = list[list[int]]

#: Seconds that the first search for room may lag behind the database: to ask
#: costs half as much as to decide.
LAG = 0.1
#: Seconds for which a host where a race was lost is taken only if need be.
CROWDED = 1

#: Seconds for which somebody's request is thought about, at most: what is not
#: known by then is said not to be.
PATIENCE = 1.0
#: How many starts are looked at before others may ask the books.
SLICE = 10

#: More servers than any request has.
_MANY = 2 ** 31


class Rooms(ty.NamedTuple):
    """Where a server may be placed.

    ``booked`` is the uuid of the host of its booking; ``by_host`` says how
    many such servers may go to each host (by uuid) that is judged, and
    ``elsewhere`` how many to each that is not.
    """

    booked: str | None
    by_host: dict[str, int]
    elsewhere: float


class Kept(ty.NamedTuple):
    """Servers that stay where they are: how many on each host, by its id."""

    resources: model.Resources
    on: ty.Mapping[int, int]


class _Short(ty.NamedTuple):
    """Some demand has no room.

    :ivar fits: how many servers of all do have
    :ivar anywhere: whether there are hosts at all that it may use
    """

    fits: int
    anywhere: bool


#: The bookings of the reservation of a server, and what was asked for.
_OWN = sa.select(
    models.Booking.__table__, models.Reservation.__table__.c.params,
    models.Reservation.__table__.c.lease_id,
).join(models.Reservation.__table__).where(
    models.Booking.__table__.c.reservation_id.in_(
        sa.select(models.Booking.__table__.c.reservation_id).where(
            models.Booking.__table__.c.server_id == sa.bindparam('server'))))


class Admission:
    """Finds room, or says why there is none."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 strategy: Strategy = pack) -> None:
        self.index = follower.Index(database, clock)
        self._database = database
        self._clock = clock
        self._strategy = strategy
        self._lost: dict[int, int] = {}

    def admit(self, demands: ty.Sequence[model.Demand], window: model.Window,
              write: ty.Callable[[sa.Connection, Picked], R]) -> R:
        """Find hosts and write, again until nobody else is faster.

        :param demands: all of them, or nothing
        :param write: decides in a transaction, by
            :func:`blazar_core.books.ledger.decide`, about the hosts it is
            given, one for each server of each demand
        :returns: what ``write`` returned, when it is committed
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        """
        lags = iter([LAG])

        def attempt() -> R:
            picked = self.pick_all(demands, window, last=self._crowded(),
                                   lag=next(lags, 0))
            try:
                with self._database.begin() as connection:
                    return write(connection, picked)
            except api.LostRace as race:
                # Somebody else is busy there: look elsewhere first.
                self._lost[race.host_id] = self._clock.now()
                raise

        return self._database.retried(attempt)

    def _crowded(self) -> set[int]:
        """The ids of hosts about which others decided a moment ago.

        Who decides side by side with others would meet them again and again
        on the host that is the best for all of them. So each goes elsewhere
        for a while.
        """
        since = self._clock.now() - CROWDED
        self._lost = {host_id: when for host_id, when in self._lost.items()
                      if when >= since}
        return set(self._lost)

    def pick(self, demand: model.Demand, window: model.Window,
             **how: ty.Any) -> list[int]:
        """As :meth:`pick_all`, for one demand."""
        return self.pick_all([demand], window, **how)[0]

    def pick_all(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, last: ty.Collection[int] = (),
                 instead_of: ty.Sequence[ty.Any] = (), lag: float = 0,
                 kept: ty.Sequence[Kept] = ()) -> Picked:
        """The id of a host for each server of demands; books nothing.

        :param last: ids of hosts to be taken only when no others will do
        :param instead_of: rows of bookings that would go in exchange
        :param lag: seconds that what is picked from may be old; nothing is
            refused for what is
        :param kept: what has to fit beside them where it is; then no other
            start is looked for
        :raises Refused: when they do not all fit
        """
        demands = self._named(demands)
        alike = _alike(demands)
        merged = [dataclasses.replace(demands[numbers[0]], count=sum(
            demands[number].count for number in numbers))
            for numbers in alike]
        with self._asked(lag, instead_of) as timeline:
            found = self._together(timeline, merged, window, last, kept)
        if not isinstance(found, _Short):
            return _dealt(found, alike, demands)
        if lag:
            return self.pick_all(
                demands, window, last, instead_of, kept=kept)
        refusal = self._refusal(merged, window, found, instead_of, kept)
        self._explain(refusal, window)
        raise errors.Refused(refusal)

    @contextlib.contextmanager
    def _asked(self, lag: float, instead_of: ty.Sequence[ty.Any] = (),
               ) -> ty.Iterator[timelines.Timeline]:
        """The timeline, as if some bookings were not there."""
        with self.index.fresh(lag) as timeline:
            with self.index.without(instead_of):
                yield timeline

    def _named(self, demands: ty.Sequence[model.Demand],
               ) -> ty.Sequence[model.Demand]:
        """Demands that name their hosts instead of what these must be like.

        To judge all hosts takes a while: nobody waits for that.
        """
        if all(demand.properties is None for demand in demands):
            return demands
        with self.index.fresh():
            hosts = {host.uuid: host.properties
                     for host in self.index.hosts.values()}
        found: dict[properties.Expression | None, frozenset[str]] = {}
        for one in {demand.properties for demand in demands}:
            found[one] = frozenset(properties.matching(one, hosts))
        return [demand if demand.properties is None else dataclasses.replace(
            demand, properties=None, hosts=found[demand.properties]
            if demand.hosts is None
            else found[demand.properties] & demand.hosts)
            for demand in demands]

    def _together(self, timeline: timelines.Timeline,
                  demands: ty.Sequence[model.Demand], window: model.Window,
                  last: ty.Collection[int] = (),
                  kept: ty.Sequence[Kept] = ()) -> 'Picked | _Short':
        """Hosts for all demands; or that there are none left for one.

        Who has the fewest hosts to choose from chooses first. The levels of
        the timeline are searched once; each demand costs O(H) beside that.
        """
        beside = timelines.Beside(len(timeline))
        # A single demand is seen not to fit on most hosts by less.
        peaks = timeline.peaks(window) if (
            len(demands) + len(kept) > 1) else None
        fitting = _keep(timeline, window, kept, beside, peaks)
        if fitting < _count(kept):
            return _Short(fitting, True)
        allowed = [self._allowed(timeline, demand) for demand in demands]
        rooms = [timeline.rooms(demand, window, hosts, beside, peaks)
                 for demand, hosts in zip(demands, allowed, strict=True)]
        picked: dict[int, npt.NDArray[np.intp]] = {}
        for number in sorted(
                range(len(demands)), key=lambda number: np.count_nonzero(
                    rooms[number] >= _least(demands[number]))):
            demand, room = demands[number], rooms[number]
            if picked:
                room = timeline.rooms(demand, window, room > 0, beside, peaks)
            places = self._fill(timeline, demand, window, room, last, beside)
            if places is None:
                hosts = allowed[number]
                return _Short(
                    fitting + _most_of(demand, room) + sum(
                        map(len, picked.values())),
                    bool(len(timeline) if hosts is None else hosts.any()))
            picked[number] = places
            beside.add(np.bincount(places, minlength=len(timeline)),
                       demand.resources)
        return [[timeline.ids[place] for place in picked[number]]
                for number in range(len(demands))]

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], bool]:
        """How many servers fit for so long, from each start in a window.

        The number changes where a booking ends, and where one begins that
        would be in the way. Costs a look at all hosts for each of these
        instants, O(most * H), and no more than :data:`PATIENCE` seconds.

        :param demand: its count is the most that is wanted to be known
        :param duration: seconds
        :param most: how many instants are looked at
        :returns: starts, and how many fit from there until the next one;
            and whether there are more instants in the window: after the last
            start then
        """
        late = self._clock.elapsed() + PATIENCE
        demand, = self._named([demand])
        found: list[tuple[int, int]] = []
        with self.index.fresh() as timeline:
            instants = timeline.instants(window, duration)
        instants = np.unique(instants)
        more = len(instants) >= most
        starts = [window.start, *instants[:most - 1].tolist()]
        for done in range(0, len(starts), SLICE):
            if done and self._clock.elapsed() > late:
                more, starts = True, starts[:done]
                break
            with self.index.fresh(PATIENCE) as timeline:
                hosts = self._allowed(timeline, demand)
                for start in starts[done:done + SLICE]:
                    rooms = timeline.rooms(
                        demand, model.Window(start, start + duration), hosts)
                    fits = min(_most_of(demand, rooms), demand.count)
                    if not found or found[-1][1] != fits:
                        found.append((start, fits))
        if more and found[-1][0] < starts[-1]:
            # Who asks again from there gets on.
            found.append((starts[-1], found[-1][1]))
        return found, more

    def fits(self, demand: model.Demand, window: model.Window,
             instead_of: ty.Sequence[ty.Any] = ()) -> int:
        """How many servers of a demand there is room for; books nothing.

        :param instead_of: rows of bookings that would go in exchange
        """
        demand, = self._named([demand])
        with self._asked(0, instead_of) as timeline:
            rooms = timeline.rooms(
                demand, window, self._allowed(timeline, demand))
        return min(_most_of(demand, rooms), demand.count)

    def quote(self, demands: ty.Sequence[model.Demand],
              window: model.Window) -> refusals.Refusal | None:
        """What :meth:`pick_all` would say: None when there is room."""
        try:
            self.pick_all(demands, window)
        except errors.Refused as exc:
            return exc.refusal
        return None

    def rooms_for(self, server_id: str, resources: model.Resources,
                  reservation_id: str | None = None) -> Rooms:
        """Where a server, and those that come with it, may be placed now.

        A server with a booking may go to its booked host, and to any host
        where the rule holds until its booking ends; the others only where it
        holds for ever. The servers of one reservation that are not placed
        yet may change places: what is booked for them stands in the way of
        others, not in theirs. Hosts without a booking of somebody else are
        not judged: there is no promise that could be broken, and the cloud
        knows better what fits.

        The servers of a reservation that are to be together or apart keep to
        the hosts that are booked for them until they are placed; then they
        may move to where that stays so (:func:`_together`, :func:`_apart`).

        :param reservation_id: the one whose flavor the server has; it may go
            nowhere unless it has a place in it
        """
        now = self._clock.now()
        with self._database.connection() as connection, \
                self.index.fresh(connection=connection) as timeline:
            mine, own = own_of(connection, server_id)
            if reservation_id is not None and (
                    mine is None or mine.reservation_id != reservation_id):
                return Rooms(None, {}, 0)
            window = model.Window(now, model.FOREVER)
            if mine is not None:
                window = model.Window(
                    now, max(mine.end_date, now + ledger.OVERDUE))
            affinity = mine and (mine.params or {}).get('affinity')
            siblings = [] if affinity is None else _siblings(connection, mine)
            with self.index.without(own):
                # Nova asks about one server, and others may have to follow.
                by_host = self._rooms_by_host(
                    timeline, resources, window, everywhere=bool(affinity))
            own_on = collections.Counter(
                row.host_id for row in own
                if row.placed_at is not None or row.end_date > now)
            hosts = self.index.hosts
            booked = hosts.get(mine.host_id) if mine is not None else None
            uuid = None if booked is None else booked.uuid
            for host_id, count in own_on.items():
                if host_id in hosts and hosts[host_id].uuid in by_host:
                    by_host[hosts[host_id].uuid] = max(
                        by_host[hosts[host_id].uuid], count)
            found = Rooms(uuid, by_host, math.inf)
        if affinity is None:
            return found
        if mine.placed_at is None:
            return _as_booked(found, siblings, own_on, hosts)
        return (_together if affinity else _apart)(
            found, mine, siblings, hosts)

    def rooms_unbooked(self, resources: model.Resources, lag: float = 0,
                       ) -> Rooms:
        """Where a server that has no booking may be placed, for half as much.

        :param lag: see :meth:`blazar_core.books.follower.Index.fresh`
        """
        with self.index.fresh(lag) as timeline:
            return self._rooms_for_ever(timeline, resources)

    def rooms_alone(self, resources: model.Resources) -> Rooms:
        """Where a server may be placed, while the database is away.

        As far as this process knows the books, and as if it had no lease:
        nobody can tell.
        """
        with self.index.remembered() as timeline:
            if timeline is None:
                return Rooms(None, {}, math.inf)
            return self._rooms_for_ever(timeline, resources)

    def _rooms_for_ever(self, timeline: timelines.Timeline,
                        resources: model.Resources) -> Rooms:
        """Where there is room without an end."""
        window = model.Window(self._clock.now(), model.FOREVER)
        return Rooms(None, self._rooms_by_host(
            timeline, resources, window), math.inf)

    def _rooms_by_host(self, timeline: timelines.Timeline,
                       resources: model.Resources, window: model.Window,
                       everywhere: bool = False) -> dict[str, int]:
        """How many such servers fit on each of the hosts that are judged:
        where something is booked, or everywhere.
        """
        peaks = timeline.peaks(window)
        judged = timeline.busy(peaks) | everywhere
        rooms = timeline.rooms(model.Demand(resources, count=_MANY), window,
                               judged, peaks=peaks)
        return dict(zip(self.index.uuids()[judged].tolist(),
                        rooms[judged].tolist(), strict=True))

    def _allowed(self, timeline: timelines.Timeline, demand: model.Demand,
                 ) -> npt.NDArray[np.bool_] | None:
        """Which hosts a demand may use at all, by position; None: any.

        Costs O(H) where the demand names hosts.
        """
        if demand.hosts is None and not demand.avoid:
            return None
        ids = self.index.ids_by_uuid
        named = ids if demand.hosts is None else demand.hosts & ids.keys()
        return timeline.mask(ids[uuid] for uuid in named
                             if uuid not in demand.avoid)

    def _fill(self, timeline: timelines.Timeline, demand: model.Demand,
              window: model.Window, rooms: npt.NDArray[np.int64],
              last: ty.Collection[int], beside: timelines.Beside,
              ) -> npt.NDArray[np.intp] | None:
        """The position of a host for each server; None: they do not fit."""
        candidates = np.flatnonzero(rooms >= _least(demand))
        if not len(candidates) or rooms.sum() < demand.count:
            return None
        order = self._strategy(
            timeline, candidates, window, beside.servers > 0)
        if last:
            lost = timeline.mask(last)[order]
            order = np.concatenate((order[~lost], order[lost]))
        if demand.affinity in _WISHES:
            return np.array(_WISHES[demand.affinity](
                order, rooms, self._members(timeline, demand), demand.count))
        places = np.repeat(order, np.minimum(rooms[order], demand.count))
        return places[:demand.count] if len(places) >= demand.count else None

    def _members(self, timeline: timelines.Timeline, demand: model.Demand,
                 ) -> npt.NDArray[np.int64]:
        """How many servers of its group each host has, by position."""
        members = np.zeros(len(timeline), np.int64)
        for uuid, count in demand.members.items():
            if uuid in self.index.ids_by_uuid:
                members[timeline.index(self.index.ids_by_uuid[uuid])] = count
        return members

    def _refusal(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, short: '_Short',
                 instead_of: ty.Sequence[ty.Any],
                 kept: ty.Sequence[Kept]) -> refusals.Refusal:
        """Why, and when, for demands that had no room.

        :param kept: what cannot begin at another time
        """
        next_start = after = None
        reason = refusals.Reason.NO_HOST
        if short.anywhere:
            reason = refusals.Reason.TOO_BIG
            if kept:
                if self._fit_once(demands, window, instead_of, kept):
                    reason = refusals.Reason.NO_ROOM
            else:
                next_start, after = self._next_start(
                    demands, window, instead_of)
                if (next_start, after) != (None, None):
                    reason = refusals.Reason.NO_ROOM
        return refusals.Refusal(
            reason, _count(kept) + sum(demand.count for demand in demands),
            short.fits, next_start, after)

    def _fit_once(self, demands: ty.Sequence[model.Demand],
                  window: model.Window, instead_of: ty.Sequence[ty.Any],
                  kept: ty.Sequence[Kept] = ()) -> bool:
        """Whether demands fit when all that is booked now is over."""
        with self._asked(PATIENCE, instead_of) as timeline:
            start = max(timeline.settled(), window.start)
            return not isinstance(self._together(
                timeline, demands, model.Window(
                    start, start + window.end - window.start), kept=kept),
                _Short)

    def _next_start(self, demands: ty.Sequence[model.Demand],
                    window: model.Window, instead_of: ty.Sequence[ty.Any],
                    ) -> tuple[int | None, int | None]:
        """The earliest start at which demands fit.

        Where several fit one by one but not beside each other, later starts
        are tried in growing steps: what is found is true, though there may
        be an earlier one. Each step is one search of the timeline, and others
        have their turn between two of them.

        :returns: it, if there is one; and if that was not found out within
            :data:`PATIENCE` seconds, the instant before which there is none
        """
        late = self._clock.elapsed() + PATIENCE
        if len(demands) > 1 and not self._fit_once(
                demands, window, instead_of):
            return None, None
        duration = window.end - window.start
        known = start = window.start
        step = 60
        while start + duration < model.FOREVER:
            for demand in demands:
                if self._clock.elapsed() > late:
                    return None, known
                with self._asked(PATIENCE, instead_of) as timeline:
                    found = timeline.earliest(demand, duration, start,
                                              self._allowed(timeline, demand))
                if found is None:
                    return None, None
                start = max(start, found)
                if step == 60:
                    # So far none was passed over.
                    known = start
            if len(demands) == 1:
                return start, None
            if self._clock.elapsed() > late:
                return None, known
            with self._asked(PATIENCE, instead_of) as timeline:
                if not isinstance(self._together(
                        timeline, demands, model.Window(
                            start, start + duration)), _Short):
                    return start, None
            start, step = start + step, 2 * step
        return None, None

    def _explain(self, refusal: refusals.Refusal, window: model.Window,
                 ) -> None:
        """Tell the operator which leases stand in the way."""
        if refusal.reason is not refusals.Reason.NO_ROOM or not (
                LOG.isEnabledFor(logging.INFO)):
            return
        with self._database.reader() as session:
            leases = ledger.in_the_way(session, window)
        LOG.info('Refused %s servers from %s to %s: %s fit. In the way: '
                 'leases %s', refusal.wanted, clocks.minute(window.start),
                 clocks.minute(window.end), refusal.fits_now,
                 ', '.join(leases) or 'none, but servers without an end')


def _alike(demands: ty.Sequence[model.Demand]) -> list[list[int]]:
    """The numbers of demands that are one, each with more servers.

    Where servers keep together or apart, those of others are others.
    """
    alike: dict[ty.Hashable, list[int]] = {}
    for number, demand in enumerate(demands):
        alike.setdefault(
            demand.kind() if demand.affinity is model.Affinity.NONE
            else number, []).append(number)
    return [*alike.values()]


def _dealt(found: Picked, alike: ty.Sequence[ty.Sequence[int]],
           demands: ty.Sequence[model.Demand]) -> Picked:
    """What was picked for merged demands, dealt out to all of them."""
    picked: Picked = [[] for _demand in demands]
    for hosts, numbers in zip(found, alike, strict=True):
        rest = iter(hosts)
        for number in numbers:
            picked[number] = [*itertools.islice(rest, demands[number].count)]
    return picked


def _count(kept: ty.Iterable[Kept]) -> int:
    """How many servers stay where they are."""
    return sum(sum(one.on.values()) for one in kept)


def _keep(timeline: timelines.Timeline, window: model.Window,
          kept: ty.Iterable[Kept], beside: timelines.Beside,
          peaks: ty.Sequence[npt.NDArray[np.int64]] | None) -> int:
    """Put what is kept beside; returns how many servers of it fit."""
    fitting = 0
    for one in kept:
        wanted = np.zeros(len(timeline), np.int64)
        for host_id, count in one.on.items():
            wanted[timeline.index(host_id)] = count
        rooms = timeline.rooms(model.Demand(one.resources, count=_MANY),
                               window, wanted > 0, beside, peaks)
        fitting += int(np.minimum(rooms, wanted).sum())
        beside.add(wanted, one.resources)
    return fitting


def _least(demand: model.Demand) -> int:
    """How many servers of a demand a host must take to be of use."""
    return demand.count if demand.affinity is model.Affinity.SAME else 1


def _most_of(demand: model.Demand, rooms: npt.NDArray[np.int64]) -> int:
    """How many servers of a demand there is room for."""
    return int(rooms.max(initial=0)
               if demand.affinity is model.Affinity.SAME else rooms.sum())


def _gathered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
              members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of hosts for servers that would rather be on one host.

    Where most of their group are comes first, then who takes all of them,
    then who takes most.

    :param order: of those with room, which together have enough
    """
    takes = np.minimum(rooms[order], count)
    order = order[np.lexsort((np.arange(len(order)), -takes, -members[order]))]
    return [*map(int, np.repeat(order, np.minimum(rooms[order], count)))
            ][:count]


def _scattered(order: npt.NDArray[np.intp], rooms: npt.NDArray[np.int64],
               members: npt.NDArray[np.int64], count: int) -> list[int]:
    """Positions of hosts for servers that would rather be apart.

    Each goes where fewest of their group are, those before it included.

    :param order: of those with room, which together have enough
    """
    heap = [(int(members[position]), rank, int(rooms[position]))
            for rank, position in enumerate(order)]
    heapq.heapify(heap)
    picked: list[int] = []
    while len(picked) < count:
        there, rank, room = heap[0]
        picked.append(int(order[rank]))
        if room > 1:
            heapq.heapreplace(heap, (there + 1, rank, room - 1))
        else:
            heapq.heappop(heap)
    return picked


#: Fills the hosts, which have room for all, as a soft affinity wishes.
_WISHES = {model.Affinity.SOFT_SAME: _gathered,
           model.Affinity.SOFT_DIFFERENT: _scattered}


def own_of(connection: sa.Connection, server_id: str,
           ) -> tuple[ty.Any, list[ty.Any]]:
    """The booking of a server, and those that count as its own."""
    rows = connection.execute(_OWN, {'server': server_id}).all()
    mine = [row for row in rows if row.server_id == server_id]
    return (mine[0] if mine else None), [
        row for row in rows
        if row.server_id == server_id or row.placed_at is None]


# -- where the servers of a reservation stay together or apart ---------------

def _siblings(connection: sa.Connection, mine: ty.Any) -> list[ty.Any]:
    """All other bookings of a reservation."""
    table = models.Booking.__table__
    return [*connection.execute(sa.select(table).where(
        table.c.reservation_id == mine.reservation_id,
        table.c.id != mine.id))]


def _as_booked(found: Rooms, siblings: ty.Iterable[ty.Any],
               own_on: ty.Mapping[int, int],
               hosts: ty.Mapping[int, model.Host]) -> Rooms:
    """Where a server may be built: on a host that is booked for it, and to
    which none of the others is under way.
    """
    awaited = {one.moving_to for one in siblings}
    return Rooms(found.booked, {
        hosts[host_id].uuid: count for host_id, count in own_on.items()
        if host_id in hosts and host_id not in awaited}, 0)


def _apart(found: Rooms, mine: ty.Any, siblings: ty.Iterable[ty.Any],
           hosts: ty.Mapping[int, model.Host]) -> Rooms:
    """Where a server may move that is to be apart from its siblings."""
    _only, avoid = bound(False, mine, siblings)
    return found._replace(by_host={
        **found.by_host, **{hosts[host_id].uuid: 0 for host_id in avoid
                            if host_id in hosts}})


def _together(found: Rooms, mine: ty.Any, siblings: ty.Iterable[ty.Any],
              hosts: ty.Mapping[int, model.Host]) -> Rooms:
    """Where a server may move that is to be together with its siblings.

    The first one that leaves their host goes where there is room for all of
    them, the next ones follow it. Whether one may leave the others at all is
    for Nova to say.
    """
    siblings = [one for one in siblings if one.host_id is not None]
    only, _avoid = bound(True, mine, siblings)
    uuids = {hosts[host_id].uuid for host_id in only if host_id in hosts}
    return Rooms(found.booked, {
        uuid: room for uuid, room in found.by_host.items()
        if uuid == found.booked or (
            uuid in uuids if only else room > len(siblings))}, 0)


def bound(affinity: bool | None, mine: ty.Any, siblings: ty.Iterable[ty.Any],
          ) -> tuple[set[int], set[int]]:
    """What a server that moves owes its siblings; for who decides about it,
    with the lease locked.

    A place that nobody has taken is in nobody's way: they are exchanged.

    :param affinity: that of the reservation
    :param mine: the booking of the server
    :param siblings: all others of the reservation
    :returns: the ids of the hosts to which it has to go (none: any), and of
        those to which it must not go, because one is there or on its way
    """
    only: set[int | None] = set()
    avoid: set[int | None] = set()
    for one in siblings:
        if affinity is False and one.server_id is not None:
            avoid |= {one.host_id, one.moving_to}
        elif affinity and one.placed_at is not None:
            only.add(one.moving_to or one.host_id)
    here = {None, mine.host_id}
    return (ty.cast('set[int]', only - here),
            ty.cast('set[int]', avoid - here))
