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

The search is done in memory (:mod:`blazar_core.index`), the decision in the
database (:func:`blazar_core.books.amend`), which may say that the search was
late: then it is done again, with other hosts first.
"""

import collections
import typing as ty

import numpy as np
from numpy import typing as npt
from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core import books
from blazar_core import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import index as indexes
from blazar_core import model
from blazar_core import timeline as timelines

__all__ = ['Admission', 'Strategy', 'pack', 'spread']

LOG = logging.getLogger(__name__)

R = ty.TypeVar('R')

#: Puts the hosts that have room into the order in which they are to be
#: filled: given the timeline, their positions in it and the window.
Strategy: ty.TypeAlias = ty.Callable[
    [timelines.Timeline, npt.NDArray[np.intp], model.Window],
    npt.NDArray[np.intp]]


def pack(timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
         window: model.Window) -> npt.NDArray[np.intp]:
    """Put leases that end together on the same hosts.

    First the hosts that stay busy until the lease ends anyway, those that
    fall free soonest after it before others; then those that would have to
    stay busy for longer, by how much. Empty hosts come last, and so whole
    hosts fall free.
    """
    busy_until = timeline.busy_until()[candidates]
    longer = np.maximum(window.end - busy_until, 0)
    return candidates[np.lexsort((candidates, busy_until, longer))]


def spread(_timeline: timelines.Timeline, candidates: npt.NDArray[np.intp],
           _window: model.Window) -> npt.NDArray[np.intp]:
    """At random."""
    return np.random.default_rng().permutation(candidates)


#: Seconds that the first search for room may lag behind the database: to ask
#: costs half as much as to decide.
LAG = 0.1
#: Seconds for which a host where a race was lost is taken only if need be.
CROWDED = 1

#: More servers than any request has.
_MANY = 2 ** 31


class Admission:
    """Finds room, or says why there is none."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 strategy: Strategy = pack) -> None:
        self.index = indexes.Index(database, clock)
        self._database = database
        self._clock = clock
        self._strategy = strategy
        self._lost: dict[int, int] = {}

    def admit(self, demand: model.Demand, window: model.Window,
              write: ty.Callable[[sa.Connection, ty.Sequence[int]], R],
              ) -> R:
        """Find hosts and write, again until nobody else is faster.

        :param write: decides in a transaction, by
            :func:`blazar_core.books.decide`, about the hosts it is given,
            one for each server
        :returns: what ``write`` returned, when it is committed
        :raises Refused: when there is no room; says why and when
        :raises BooksBusy: when too many others book at the same moment
        """
        lags = iter([LAG])

        def attempt() -> R:
            host_ids = self.pick(demand, window, last=self._crowded(),
                                 lag=next(lags, 0))
            try:
                with self._database.begin() as connection:
                    return write(connection, host_ids)
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
             last: ty.Collection[int] = (),
             instead_of: ty.Sequence[ty.Any] = (), lag: float = 0,
             ) -> list[int]:
        """The id of a host for each server of a demand; books nothing.

        :param last: ids of hosts to be taken only when no others will do
        :param instead_of: rows of bookings that would go in exchange
        :param lag: seconds that what is picked from may be old; nothing is
            refused for what is
        :raises Refused: when they do not all fit
        """
        with self.index.fresh(lag) as timeline:
            with self.index.without(instead_of):
                hosts = self._allowed(timeline, demand)
                rooms = timeline.rooms(demand, window, hosts)
                picked = self._fill(timeline, demand, window, rooms, last)
                if picked is not None:
                    return picked
                if not lag:
                    refusal = _refusal(timeline, demand, window, hosts, rooms)
        if lag:
            return self.pick(demand, window, last, instead_of)
        self._explain(refusal, window)
        raise errors.Refused(refusal)

    def quote(self, demand: model.Demand, window: model.Window,
              ) -> model.Refusal | None:
        """What :meth:`pick` would say: None when there is room."""
        try:
            self.pick(demand, window)
        except errors.Refused as exc:
            return exc.refusal
        return None

    def rooms_for(self, server_id: str, resources: model.Resources,
                  ) -> tuple[str | None, dict[str, int]]:
        """Where a server, and those that come with it, may be placed now.

        A server with a booking may go to its booked host, and to any host
        where the rule holds until its booking ends; the others only where it
        holds for ever. The servers of one reservation that are not placed
        yet may change places: what is booked for them stands in the way of
        others, not in theirs. Hosts without a booking of somebody else are
        not judged: there is no promise that could be broken, and the cloud
        knows better what fits.

        :returns: the uuid of the booked host, if there is one, and for each
            host (by uuid) that is judged, how many such servers may go there
        """
        now = self._clock.now()
        with self.index.fresh() as timeline:
            mine, own = self._own(server_id)
            window = model.Window(now, model.FOREVER)
            if mine is not None:
                window = model.Window(
                    now, max(mine.end_date, now + books.OVERDUE))
            with self.index.without(own):
                busy = timeline.busy(window)
                rooms = timeline.rooms(
                    model.Demand(resources, count=_MANY), window, busy)
            own_on = collections.Counter(
                row.host_id for row in own
                if row.running or row.end_date > now)
            hosts = self.index.hosts
            booked = hosts.get(mine.host_id) if mine is not None else None
            return (None if booked is None else booked.uuid), {
                hosts[host_id].uuid: max(room, own_on[host_id])
                for host_id, room in zip(
                    timeline.ids, rooms.tolist(), strict=True)
                if busy[timeline.index(host_id)]}

    def _own(self, server_id: str) -> tuple[ty.Any, list[ty.Any]]:
        """The booking of a server, and those that count as its own."""
        with self._database.reader() as session:
            rows = session.execute(
                sa.select(models.Booking).where(
                    models.Booking.reservation_id.in_(
                        sa.select(models.Booking.reservation_id).where(
                            models.Booking.server_id == server_id)))
            ).scalars().all()
        mine = [row for row in rows if row.server_id == server_id]
        return (mine[0] if mine else None), [
            row for row in rows if row.server_id == server_id or
            not row.running]

    def _allowed(self, timeline: timelines.Timeline, demand: model.Demand,
                 ) -> npt.NDArray[np.bool_] | None:
        """Which hosts a demand may use at all, by position; None: any.

        Costs O(H) where the demand names hosts or properties.
        """
        if demand.hosts is None and not demand.avoid and (
                demand.properties is None):
            return None
        hosts = self.index.hosts
        if demand.properties is not None:
            return timeline.mask(host.id for host in hosts.values()
                                 if demand.allows(host))
        ids = self.index.ids_by_uuid
        named = ids if demand.hosts is None else demand.hosts & ids.keys()
        return timeline.mask(ids[uuid] for uuid in named
                             if uuid not in demand.avoid)

    def _fill(self, timeline: timelines.Timeline, demand: model.Demand,
              window: model.Window, rooms: npt.NDArray[np.int64],
              last: ty.Collection[int]) -> list[int] | None:
        least = demand.count if demand.affinity is model.Affinity.SAME else 1
        candidates = np.flatnonzero(rooms >= least)
        if not len(candidates) or rooms.sum() < demand.count:
            return None
        ids = timeline.ids
        order = self._strategy(timeline, candidates, window)
        if last:
            lost = timeline.mask(last)[order]
            order = np.concatenate((order[~lost], order[lost]))
        picked: list[int] = []
        for position in order:
            wanted = demand.count - len(picked)
            picked += [ids[position]] * min(int(rooms[position]), wanted)
            if len(picked) == demand.count:
                return picked
        return None

    def _explain(self, refusal: model.Refusal, window: model.Window,
                 ) -> None:
        """Tell the operator which leases stand in the way."""
        if refusal.reason is not model.Reason.NO_ROOM or not (
                LOG.isEnabledFor(logging.INFO)):
            return
        with self._database.reader() as session:
            leases = books.in_the_way(session, window)
        LOG.info('Refused %s servers from %s to %s: %s fit. In the way: '
                 'leases %s', refusal.wanted, clocks.minute(window.start),
                 clocks.minute(window.end), refusal.fits_now,
                 ', '.join(leases) or 'none, but servers without an end')


def _refusal(timeline: timelines.Timeline, demand: model.Demand,
             window: model.Window, hosts: npt.NDArray[np.bool_] | None,
             rooms: npt.NDArray[np.int64]) -> model.Refusal:
    fits_now = int(rooms.max(initial=0)
                   if demand.affinity is model.Affinity.SAME
                   else rooms.sum())
    next_start = timeline.earliest(
        demand, window.end - window.start, window.start, hosts)
    if next_start is not None:
        reason = model.Reason.NO_ROOM
    elif len(timeline) if hosts is None else hosts.any():
        reason = model.Reason.TOO_BIG
    else:
        reason = model.Reason.NO_HOST
    return model.Refusal(reason, demand.count, min(fits_now, demand.count),
                         next_start)
