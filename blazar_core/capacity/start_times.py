# SPDX-License-Identifier: Apache-2.0

"""Find when demands fit, how many servers fit at each start, and until when.

A search is done in steps, and other threads may run between two of them.
"""

import bisect
import collections
import typing as ty

import numpy as np

from blazar_core.capacity import booking_index
from blazar_core.capacity import rule
from blazar_core.capacity import selection
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import model

#: Seconds for which one request may search, at most; the rest of the answer is
#: reported as unknown.
PATIENCE = 1.0
#: How many starts are searched before other threads may use the index.
SLICE = 10


class StartTimes:
    """Finds start times.

    :param index: the index that is searched
    """

    def __init__(self, clock: clocks.Clock, index: booking_index.Index,
                 selector: selection.Selection) -> None:
        self._clock = clock
        self._index = index
        self._selector = selector

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], int | None]:
        """Return how many servers fit from each start in a window.

        The number changes where a booking ends, and where one begins that
        would overlap. Costs a search of all hosts for each of these instants,
        O(most * H), and no more than :data:`PATIENCE` seconds.

        :param demand: its count is the maximum to report
        :param duration: for how many seconds the servers must fit
        :param most: the maximum number of instants to search
        :returns: starts, with how many servers fit from there until the next
            one; and until when that is known, or None: to the end of the
            window
        """
        late = self._clock.elapsed() + PATIENCE
        found: list[tuple[int, int]] = []
        with self._selector.asked_for(demand.parts(), 0) as (timeline, parts):
            instants = timeline.instants(window, duration)
        instants = np.unique(instants)
        starts = [window.start, *instants[:most].tolist()]
        known = starts.pop() if len(starts) > most else None
        for done in range(0, len(starts), SLICE):
            if done and self._clock.elapsed() > late:
                known = starts[done]
                break
            with self._index.fresh(PATIENCE) as timeline:
                count = self._selector.fitting(timeline, parts)
                for start in starts[done:done + SLICE]:
                    fits = count(model.Window(start, start + duration))
                    if not found or found[-1][1] != fits:
                        found.append((start, fits))
        return found, known

    def lasting(self, bookings: ty.Sequence[ty.Any],
                instead_of: ty.Sequence[ty.Any], since: int, until: int,
                ) -> int:
        """Return until when bookings could be extended on their hosts.

        Costs a query of each host, and some thirty of one with other bookings
        in between.

        :param instead_of: rows of bookings to ignore, including these
        :param since: the instant from which on they need more
        :param until: the last instant of interest
        """
        own: dict[int, collections.Counter[str]] = collections.defaultdict(
            collections.Counter)
        for one in bookings:
            if one.host_id is not None:
                own[one.host_id].update(one.resources)
        with self._index.fresh() as timeline, self._index.excluding(
                instead_of):
            for host_id, amounts in own.items():
                until = _last(timeline, self._index.hosts.get(host_id),
                              amounts, since, until)
        return until

    def fit_once(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, instead_of: ty.Sequence[ty.Any],
                 kept: ty.Sequence[selection.Pinned] = ()) -> bool:
        """Return whether demands fit after all current bookings are over."""
        with self._selector.asked(PATIENCE, instead_of) as timeline:
            start = max(timeline.settled(), window.start)
            return not isinstance(self._selector.together(
                timeline, demands, model.Window(
                    start, start + window.end - window.start), kept=kept),
                selection.NoFit)

    def next_start(self, demands: ty.Sequence[model.Demand],
                   window: model.Window, instead_of: ty.Sequence[ty.Any],
                   ) -> tuple[int | None, int | None]:
        """Return the earliest start at which demands fit.

        If several fit one by one but not together, later starts are tried in
        growing steps: the result is valid, though there may be an earlier
        one. Each step is one search of the timeline, and other threads may
        run between two steps.

        :returns: the start, if there is one; and if none was found within
            :data:`PATIENCE` seconds, the instant before which there is none
        """
        late = self._clock.elapsed() + PATIENCE
        if len(demands) > 1 and not self.fit_once(
                demands, window, instead_of):
            return None, None
        duration = window.end - window.start
        known = start = window.start
        step = 60
        while start + duration < model.FOREVER:
            for demand in demands:
                if self._clock.elapsed() > late:
                    return None, known
                with self._selector.asked(PATIENCE, instead_of) as timeline:
                    found = timeline.earliest(
                        demand, duration, start,
                        self._selector.allowed(timeline, demand))
                if found is None:
                    return None, None
                start = max(start, found)
                if step == 60:
                    # So far no start was skipped.
                    known = start
            if len(demands) == 1:
                return start, None
            if self._clock.elapsed() > late:
                return None, known
            with self._selector.asked(PATIENCE, instead_of) as timeline:
                if not isinstance(self._selector.together(
                        timeline, demands, model.Window(
                            start, start + duration)), selection.NoFit):
                    return start, None
            start, step = start + step, 2 * step
        return None, None


def _last(timeline: timelines.Timeline, host: model.Host | None,
          amounts: model.Resources, since: int, until: int) -> int:
    """Return until when a host has an amount free of other bookings."""
    if host is None:
        return min(since, until)

    def lacks(end: int) -> bool:
        booked = timeline.peak(host.id, model.Window(since, end))
        return bool(rule.lacking(host.capacity, host.usage, {
            rc: amount + booked.get(rc, 0)
            for rc, amount in amounts.items() if amount}))

    # Mostly it has.
    if until <= since or not lacks(until):
        return until
    return since + bisect.bisect(range(since + 1, until), False, key=lacks)
