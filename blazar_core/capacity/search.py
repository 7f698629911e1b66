# SPDX-License-Identifier: Apache-2.0

"""Search for free capacity over windows, and for the earliest start.

An *offer* is a range of starts at which a number of servers fit; the duration
is already subtracted. A *scan* asks how many servers of one demand fit. It
reads the wanted start first, a few rows at a time, as a small demand mostly
fits at once. If it does not, the scan turns the levels of a stretch of time,
and then those of all the rest, into offers.
"""

import dataclasses
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.capacity import step_functions
from blazar_core.capacity.step_functions import Ints
from blazar_core.capacity.step_functions import Levels
from blazar_core.capacity.step_functions import NEVER
from blazar_core.capacity.step_functions import PAST

#: Up to this number, offers are simply sorted.
FEW = 4096
#: The number of buckets of time for more offers: a power of two.
BUCKETS = 2 ** 16


class Offers(ty.NamedTuple):
    """Ranges of starts: ``room`` servers fit from ``first`` to ``last``, both
    included.

    ``room`` is None if it is one everywhere.
    """

    first: Ints
    last: Ints
    room: Ints | None


def kept(first: Ints, last: Ints, room: Ints | None) -> Offers:
    """Return the offers that have a start at all."""
    real = np.flatnonzero(last >= first)
    return Offers(first[real], last[real],
                  None if room is None else room[real])


def joined(pieces: ty.Iterable[Offers]) -> Offers:
    """Return the offers of all pieces."""
    first, last, rooms = zip(*pieces)
    return Offers(np.concatenate(first), np.concatenate(last),
                  None if rooms[0] is None else np.concatenate(rooms))


def profile(room: Ints, begin: Ints, end: Ints, duration: int, since: int,
            ) -> Offers:
    """Return the offers of some rows, given how many servers fit at each step.

    What fits over a window is the minimum over its steps. Each step makes the
    offer for the windows of which it is the (first) minimum: those that begin
    after the last step before it where as few fit, and end before the next
    one where fewer do. These two are found for all steps at once: every step
    first points at its neighbor, and as long as more fit there, continues
    where the neighbor points. At skipped steps still more fit, so that
    nothing is missed.
    """
    # Equal adjacent steps are merged. A step where none fits is added at both
    # ends; the empty places between rows are such steps.
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
    """Return the next step of each live one in a direction, without those that
    are passed.
    """
    size = int(live[-1]) + 2 if len(live) else 0
    target = np.arange(size) + direction
    going = live
    while len(going):
        going = going[passes(going, target[going])]
        target[going] = target[target[going]]
    return target[live]


def opening(offers: Offers, wanted: int, until: int = NEVER,
            ) -> int | None:
    """Return the first instant, not after ``until``, when enough is offered.

    Many offers are put into buckets of time. What has opened by the end of a
    bucket, less what has closed before it, is the maximum that can be offered
    in it, so that most buckets can be skipped.
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
    """Return the first instant at which enough is offered, by sorting."""
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


#: More than any amount, but far from an overflow.
HUGE = 2 ** 60
#: How many steps are processed together, to fit into the cache of a CPU.
PIECE = 2 ** 16
#: The minimum number of rows that are first checked for an immediate fit.
FIRST = 256
#: How many more servers than were seen are expected in the other rows.
DOUBT = 3


class Need(ty.NamedTuple):
    """The amount that one server needs of a column, and that each row has.

    ``free`` is the capacity less the open-ended usage, ``HUGE`` for rows that
    are not judged by the column, ``-HUGE`` for those that have none.
    """

    column: int
    amount: int
    free: Ints


class _Piece(ty.NamedTuple):
    """Steps of some rows; those of each row are followed by an empty place."""

    begin: Ints
    end: Ints
    levels: list[Levels]
    row: Ints
    width: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """A search of some rows for the capacity of a demand.

    :ivar needs: what one server needs; not empty
    :ivar most: how many servers may be in one row
    :ivar which: the rows that may be used
    :ivar piece: how many steps are processed together
    :ivar limits: how many servers the units of each row allow; None: any
    """

    rows: step_functions.Rows
    needs: list[Need]
    most: int
    which: Ints
    piece: int = PIECE
    limits: Ints | None = None

    def bare(self) -> Ints:
        """Return the maximum that could ever fit in each row, if nothing is
        booked (or less than nothing, if a removal came before its booking).
        """
        room = _most(self, self.which)
        self._lower(room, self.which, [
            np.array([self.rows.lowest[need.column]]) for need in self.needs])
        return room

    def room_over(self, peaks: ty.Sequence[Ints]) -> Ints:
        """Return how many fit in each row, given the highest level of all
        rows in each column.
        """
        room = _most(self, self.which)
        self._lower(room, self.which, (
            peaks[need.column][self.which] for need in self.needs))
        return room

    def room(self, begin: int, end: int, which: Ints | None = None) -> Ints:
        """Return how many fit in each row over a whole window.

        Rows in which none fits where it begins or ends are not read again.
        """
        which = self.which if which is None else which
        room = _most(self, which)
        first = self.rows.at(which, begin)
        self._lower(room, which, (self.rows.levels[need.column][first]
                                  for need in self.needs))
        rest = np.flatnonzero((room > 0) & (self.rows.time[first + 1] < end))
        first, which, some = first[rest], which[rest], room[rest]
        last = self.rows.at(which, end - 1)
        self._lower(some, which, (self.rows.levels[need.column][last]
                                  for need in self.needs))
        room[rest] = some
        more = np.flatnonzero((some > 0) & (last > first + 1))
        rest = rest[more]
        room[rest] = self._between(some[more], first[more] + 1,
                                   last[more] - 1, which[more])
        return room

    def _between(self, room: Ints, first: Ints, last: Ints, which: Ints,
                 ) -> Ints:
        """Return how many fit in rows over the steps between places.

        If most rows turn out to be full, the other columns are read only for
        the rest.
        """
        done = 0
        for peak in self.rows.peaks(first, last, [
                need.column for need in self.needs]):
            self._lower(room, which, [peak], done)
            done += 1
            left = np.flatnonzero(room)
            if done < len(self.needs) and len(left) * 2 < len(room):
                other = dataclasses.replace(self, needs=self.needs[done:])
                room[left] = other._between(
                    room[left], first[left], last[left], which[left])
                break
        return room

    def _lower(self, room: Ints, which: Ints, levels: ty.Iterable[Levels],
               done: int = 0) -> None:
        """Reduce what fits to what levels leave, one array for each need."""
        for need, level in zip(self.needs[done:], levels):
            np.minimum(room, (need.free[which] - level) // need.amount,
                       out=room)
        np.maximum(room, 0, out=room)

    def earliest(self, duration: int, since: int, wanted: int) -> int | None:
        """Return the first start at which so many fit for a duration."""
        if self._fits_at_once(since, min(since + duration, NEVER),
                              wanted):
            return since
        bare = self.bare()
        if int(bare.sum()) < wanted:
            return None
        able = dataclasses.replace(
            self, which=self.which[bare > 0], most=int(bare.max()))
        if able._is_lone():
            return opening(able._single(duration, since), wanted)
        quarter = self.rows.later(since, 4)
        if quarter == NEVER:
            return opening(able._near(duration, since, quarter), wanted)
        until = self.rows.later(since, 32)
        if until + duration < quarter:
            start = opening(
                able._near(duration, since, until), wanted, until)
            if start is not None:
                return start
        return opening(able._all(duration, since), wanted)

    def _fits_at_once(self, begin: int, end: int, wanted: int) -> bool:
        """Return whether so many fit, if that can be found out quickly.

        Reads more and more rows, until enough fit or it does not look as if
        they will: the search that follows finds that as well.
        """
        found, done, size = 0, 0, max(FIRST, 4 * wanted)
        while done < len(self.which):
            found += int(self.room(
                begin, end, self.which[done:done + size]).sum())
            done += size
            size *= 4
            if found >= wanted:
                return True
            if (found + DOUBT) * len(self.which) < wanted * done:
                return False
        return False

    def _is_lone(self) -> bool:
        """Return whether steps at which a server fits never are adjacent.

        This is so for whole hosts, where only the lowest level fits: the next
        step has another level, if there is no other column.
        """
        return (self.most == 1 and len(self.rows.levels) == 1 and
                self._limit() <= self.rows.lowest[0])

    def _limit(self) -> int:
        """Return the highest level at which a server fits anywhere."""
        need = self.needs[0]
        return int(need.free[self.which].max()) - need.amount

    def _single(self, duration: int, since: int) -> Offers:
        """Return all offers if each is one step; reads only long steps."""
        rows, limit = self.rows, self._limit()
        size, levels = step_functions.size_of(duration) - 1, rows.levels[0]
        begins, ends, places = [], [], []
        for done in range(0, len(rows.time) - 1, 4 * self.piece):
            part = slice(done, done + 4 * self.piece)
            found = np.flatnonzero(
                (rows.size[part] >= size) & (levels[part] <= limit))
            begin = np.maximum(rows.time[part][found], since)
            end = rows.time[done + 1:][found]
            kept = np.flatnonzero(end - begin >= duration)
            begins.append(begin[kept])
            ends.append(end[kept])
            places.append(found[kept] + done)
        single = Offers(np.concatenate(begins),
                        np.concatenate(ends) - duration, None)
        if len(self.which) == rows.count:
            return single
        order = rows.in_place()
        allowed = np.zeros(rows.count, bool)
        allowed[self.which] = True
        kept = np.flatnonzero(allowed[order[np.searchsorted(
            rows.start[order], np.concatenate(places), 'right') - 1]])
        return Offers(single.first[kept], single.last[kept], None)

    def _near(self, duration: int, since: int, until: int) -> Offers:
        """Return the offers from one instant until another."""
        first = self.rows.at(self.which, since)
        # With an empty place after the steps of each row.
        last = self.rows.at(self.which, until + duration) + 1
        empty = (self.rows.start + self.rows.length)[self.which]
        return joined(
            self._offers(self._collected(
                self.which[part], first[part], last[part], empty[part]),
                duration, since)
            for part in _parts(last - first + 1, self.piece))

    def _collected(self, which: Ints, first: Ints, last: Ints, empty: Ints,
                   ) -> _Piece:
        places, offsets = step_functions.spans(first, last)
        ends = self.rows.time[places + 1]
        places[offsets + (last - first)] = empty
        return _Piece(
            self.rows.time[places], ends,
            [self.rows.levels[need.column][places] for need in self.needs],
            which, last - first + 1)

    def _all(self, duration: int, since: int) -> Offers:
        """Return all offers, reading rows in the order of memory."""
        rows, order = self.rows, self.rows.in_place()
        start = rows.start[order]
        width = np.diff(start, append=len(rows.time) - 1)
        allowed = np.zeros(rows.count, bool)
        allowed[self.which] = True
        able = dataclasses.replace(self, needs=[need._replace(
            free=np.where(allowed, need.free, -HUGE)) for need in self.needs])
        return joined(
            able._offers(_Piece(
                rows.time[part_of], rows.time[
                    part_of.start + 1:part_of.stop + 1],
                [rows.levels[need.column][part_of] for need in self.needs],
                order[part], width[part]), duration, since)
            for part in _parts(width, self.piece)
            for part_of in [slice(
                int(start[part.start]),
                int(start[part.stop - 1] + width[part.stop - 1]))])

    def _offers(self, piece: _Piece, duration: int, since: int) -> Offers:
        if self.most == 1:
            return self._runs(piece, duration, since)
        return profile(
            self._rooms(piece), piece.begin, piece.end, duration, since)

    def _runs(self, piece: _Piece, duration: int, since: int) -> Offers:
        """Return the offers of one server: runs of steps at which it fits."""
        fit = np.ones(len(piece.begin), bool)
        for need, level in zip(self.needs, piece.levels):
            fit &= level <= _fitted(need.free[piece.row] - need.amount,
                                    piece.width, level.dtype)
        inner = fit[1:] & fit[:-1]
        if not inner.any():
            # Every run is one step: check its length before anything is
            # collected.
            fit &= piece.end - piece.begin >= duration
            chosen = np.flatnonzero(fit)
            begin, end = piece.begin[chosen], piece.end[chosen]
        else:
            opens, closes = fit.copy(), fit
            opens[1:] &= ~inner
            closes[:-1] &= ~inner
            begin, end = piece.begin[opens], piece.end[closes]
        return kept(np.maximum(begin, since), end - duration, None)

    def _rooms(self, piece: _Piece) -> Ints:
        """Return how many fit at each step; none at the empty places."""
        room = np.repeat(_most(self, piece.row), piece.width)
        for need, level in zip(self.needs, piece.levels):
            free = np.repeat(need.free[piece.row], piece.width)
            free -= level
            free //= need.amount
            np.minimum(room, free, out=room)
            room[level == step_functions.empty(level.dtype)] = 0
        np.maximum(room, 0, out=room)
        return room


def _most(scan: Scan, which: Ints) -> Ints:
    """Return how many servers may be in each row if it is empty."""
    most = np.full(len(which), scan.most)
    return most if scan.limits is None else np.minimum(
        scan.limits[which], most)


def _fitted(limit: Ints, width: Ints, dtype: np.dtype[ty.Any],
            ) -> Levels | int:
    """Return limits of rows as limits of their steps, to compare with levels.
    """
    most = step_functions.room(dtype)
    limit = np.clip(limit, -most, most)
    if len(limit) and limit.min() == limit.max():
        return int(limit[0])
    return np.repeat(limit.astype(dtype), width)


def _parts(widths: Ints, size: int) -> ty.Iterator[slice]:
    """Cut a sequence of widths into parts of about a size."""
    ends = np.cumsum(widths)
    done = 0
    while done < len(widths):
        total = size + (int(ends[done - 1]) if done else 0)
        stop = max(done + 1, int(np.searchsorted(ends, total, 'right')))
        yield slice(done, stop)
        done = stop
