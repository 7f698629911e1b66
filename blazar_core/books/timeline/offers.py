# SPDX-License-Identifier: Apache-2.0

"""Offers: from when until when how many servers fit, and what they add up to.

Starts are offered, not windows: the duration has been taken off already.
"""

import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline.steps import PAST

__all__ = ['Offers', 'joined', 'kept', 'opening', 'profile']

#: Not more offers than this are simply sorted.
FEW = 4096
#: Into how many buckets of time more offers are put: a power of two.
BUCKETS = 2 ** 16


class Offers(ty.NamedTuple):
    """From ``first`` until ``last``, both included, ``room`` servers fit.

    ``room`` is None where it is one everywhere.
    """

    first: Ints
    last: Ints
    room: Ints | None


def kept(first: Ints, last: Ints, room: Ints | None) -> Offers:
    """Those that offer a start at all."""
    real = np.flatnonzero(last >= first)
    return Offers(first[real], last[real],
                  None if room is None else room[real])


def joined(pieces: ty.Iterable[Offers]) -> Offers:
    """All of several."""
    first, last, rooms = zip(*pieces)
    return Offers(np.concatenate(first), np.concatenate(last),
                  None if rooms[0] is None else np.concatenate(rooms))


def profile(room: Ints, begin: Ints, end: Ints, duration: int, since: int,
            ) -> Offers:
    """Where how many fit, given the room at each step of some rows.

    The room over a window is the smallest room of its steps. Each step makes
    the offer for the windows of which it is the (first) smallest: those that
    begin after the last step before it with as little room, and end before
    the next one with less. These two are found for all steps at once: every
    step first points at its neighbor, and as long as that one has too much
    room, goes on to where the neighbor points. What was passed by on the way
    has more room yet, so that nothing is missed.
    """
    # Steps with the same room are one; a step without room stands at both
    # ends and (the empty places) between rows.
    room = np.concatenate([[0], room, [0]])
    heads = np.flatnonzero(np.diff(room, prepend=-1))
    room = room[heads]
    begin = np.concatenate([[PAST], begin, [0]])[heads]
    end = np.concatenate([[0], end, [0]])[
        np.append(heads[1:], len(end) + 2) - 1]
    live = np.flatnonzero(room)
    before = _pointers(live, -1, lambda at, to: room[to] > room[at])
    after = _pointers(live, 1, lambda at, to: room[to] >= room[at])
    first = np.maximum(begin[before + 1], begin[live] - (duration - 1))
    last = np.minimum(end[live] - 1, end[after - 1] - duration)
    return kept(np.maximum(first, since), last, room[live])


def _pointers(live: Ints, direction: int, passes: ty.Callable[
        [Ints, Ints], npt.NDArray[np.bool_]]) -> Ints:
    """For each live step, the next one in a direction not passed by."""
    size = int(live[-1]) + 2 if len(live) else 0
    target = np.arange(size) + direction
    going = live
    while len(going):
        going = going[passes(going, target[going])]
        target[going] = target[target[going]]
    return target[live]


def opening(offers: Offers, wanted: int, until: int = NEVER,
            ) -> int | None:
    """The first instant, not after ``until``, at which enough is offered.

    With many offers, time is cut into buckets. What was opened by the end of
    a bucket, less what was closed before it, is the most that can be offered
    in it, so that most of the buckets need not be looked into.
    """
    first, last, room = offers
    if until < NEVER:
        early = first <= until
        first, last = first[early], last[early]
        room = None if room is None else room[early]
    if (len(first) if room is None else int(room.sum())) < wanted:
        return None
    if len(first) <= FEW:
        return _sweep(Offers(first, last, room), wanted)
    begin = int(first.min())
    shift = (int(first.max()) - begin).bit_length() - BUCKETS.bit_length() + 1
    if shift <= 0:
        return _sweep(Offers(first, last, room), wanted)
    opened = (first - begin) >> shift
    closed = np.minimum(((last - begin) >> shift) + 1, BUCKETS)
    level = np.cumsum(
        np.bincount(opened, room, minlength=BUCKETS + 1) -
        np.bincount(closed, room, minlength=BUCKETS + 1))
    full = np.flatnonzero(level[:-1] >= wanted)
    width, place = 1, 0
    while place < len(full):
        bucket = int(full[place])
        inside = (opened < bucket + width) & (closed > bucket)
        start = _sweep(Offers(
            first[inside], last[inside],
            None if room is None else room[inside]), wanted)
        if start is not None:
            return start
        place = int(np.searchsorted(full, bucket + width))
        width *= 4
    return None


def _sweep(offers: Offers, wanted: int) -> int | None:
    """The first instant at which enough is offered, by sorting them."""
    first, last, room = offers
    if room is None:
        opens = np.sort(first)[wanted - 1:]
        closed = np.searchsorted(np.sort(last), opens)
        reached = np.flatnonzero(
            np.arange(wanted, len(first) + 1) - closed >= wanted)
        return int(opens[reached[0]]) if len(reached) else None
    times = np.concatenate([first, last + 1])
    order = np.argsort(times)
    times = times[order]
    level = np.cumsum(np.concatenate([room, -room])[order])
    enough = level >= wanted
    enough[:-1] &= times[1:] != times[:-1]
    reached = np.flatnonzero(enough)
    return int(times[reached[0]]) if len(reached) else None
