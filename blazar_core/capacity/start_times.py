# SPDX-License-Identifier: Apache-2.0

"""Start times at which demands fit, how many servers each, and for how long.

A search is done in steps, and other threads may run between two of them.
"""

import collections
import typing as ty

import numpy as np

from blazar_core.capacity import booking_index
from blazar_core.capacity import rule
from blazar_core.capacity import selection
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import model

__all__ = ['PATIENCE', 'SLICE', 'StartTimes']

#: Seconds for which one request may search, at most: what is not
#: known by then is said not to be.
PATIENCE = 1.0
#: How many starts are looked at before others may ask the books.
SLICE = 10


class StartTimes:
    """Looks for starts.

    :param index: in which room is looked for
    """

    def __init__(self, clock: clocks.Clock, index: booking_index.Index,
                 selector: selection.Selection) -> None:
        self._clock = clock
        self._index = index
        self._selector = selector

    def availability(self, demand: model.Demand, window: model.Window,
                     duration: int, most: int,
                     ) -> tuple[list[tuple[int, int]], int | None]:
        """How many servers fit for so long, from each start in a window.

        The number changes where a booking ends, and where one begins that
        would be in the way. Costs a look at all hosts for each of these
        instants, O(most * H), and no more than :data:`PATIENCE` seconds.

        :param demand: its count is the most that is wanted to be known
        :param duration: seconds
        :param most: how many instants are looked at
        :returns: starts, and how many fit from there until the next one;
            and until when that is known, or None: to the end of the window
        """
        late = self._clock.elapsed() + PATIENCE
        parts = self._selector.named(demand.parts())
        found: list[tuple[int, int]] = []
        with self._index.fresh() as timeline:
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
        """Until when bookings could go on where they are.

        Costs a look at each host, and some thirty at one where others are in
        the way.

        :param instead_of: rows of bookings that are not in the way; these too
        :param since: the instant from which on they need more
        :param until: the last one that is of interest
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
        """Whether demands fit when all that is booked now is over."""
        with self._selector.asked(PATIENCE, instead_of) as timeline:
            start = max(timeline.settled(), window.start)
            return not isinstance(self._selector.together(
                timeline, demands, model.Window(
                    start, start + window.end - window.start), kept=kept),
                selection.NoFit)

    def next_start(self, demands: ty.Sequence[model.Demand],
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
                    # So far none was passed over.
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
    """Until when a host has so much beside what is booked there."""
    if host is None:
        return min(since, until)
    known, last = min(since, until), until
    while known < until:
        booked = timeline.peak(host.id, model.Window(since, until))
        if rule.lacking(host.capacity, host.usage, {
                rc: amount + booked.get(rc, 0)
                for rc, amount in amounts.items() if amount}):
            last = until - 1
        else:
            known = until
        until = (known + last + 1) // 2
    return known
