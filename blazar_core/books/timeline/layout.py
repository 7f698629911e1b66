# SPDX-License-Identifier: Apache-2.0

"""Where the steps of each row stand, in one array for all of them.

There is at least one empty place behind the last step of a row, at ``NEVER``,
so the place behind a step always shows when its level ends. A row that is full
moves to the spare places at the end; when those are used up, everything is
laid out anew. That takes some 100 ms with 2,000,000 steps and happens about
once in 10,000 changes.
"""

import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline import marks
from blazar_core.books.timeline import steps
from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import Levels
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline.steps import PAST

__all__ = ['Layout', 'Piece', 'Which']

#: Numbers of rows, or all of them.
Which: ty.TypeAlias = Ints | slice


class Piece(ty.NamedTuple):
    """Some rows, that stand nowhere yet.

    :ivar counts: how many steps each has
    :ivar times: when they begin, one row after the other
    :ivar levels: for each column, theirs; columns at the end may be missing,
        of which nothing is booked
    """

    rows: Ints
    counts: Ints
    times: Ints
    levels: list[Levels]


class Layout:
    """The arrays of all rows, and the places that each row has in them.

    Nothing here is safe against threads that change it meanwhile.

    :param slack: rows get spare places for this part of their steps (8: for
        one eighth)
    :param spare: spare places for rows that move, at least
    :ivar count: how many rows there are
    :ivar time: when each step begins; empty places are at ``NEVER``
    :ivar size: how long each step lasts, in one byte: see
        :func:`steps.size_of`
    :ivar levels: for each column, the level of each step; empty places hold
        the largest value of their type
    :ivar lowest: for each column, a level below which it was not lately
    """

    def __init__(self, slack: int = 8, spare: int = 1024) -> None:
        self._slack, self._spare = slack, spare
        self.count = 0
        self.time: Ints
        self.size: npt.NDArray[np.uint8]
        self.levels: list[Levels] = []
        self.lowest: list[int]
        # How far from 0 the levels of each column were since it was looked at.
        self._reach: list[int]
        self._start: Ints
        self._length: Ints
        self._width: Ints
        self._used: int
        self._in_place: Ints | None
        self._marks: marks.Marks
        self._lay_out([])

    @property
    def start(self) -> Ints:
        """Where each row begins."""
        return self._start[:self.count]

    @property
    def length(self) -> Ints:
        """How many steps each row has."""
        return self._length[:self.count]

    def _arrays(self) -> list[Levels]:
        """What has one value for each place."""
        return [self.time, self.size, *self.levels]

    @property
    def total(self) -> int:
        """How many steps there are."""
        return int(self.length.sum())

    @property
    def nbytes(self) -> int:
        """The memory of the arrays, in bytes."""
        return self._marks.nbytes + sum(array.nbytes for array in (
            *self._arrays(), self._start, self._length, self._width))

    def in_place(self) -> Ints:
        """The numbers of the rows in the order in which they stand."""
        if self._in_place is None:
            self._in_place = np.argsort(self.start)
        return self._in_place

    def add_row(self) -> int:
        """A new host, on which nothing is booked; returns its number."""
        row = self.count
        if row == len(self._start):
            more = max(16, row // 2)
            self._start = _longer(self._start, more)
            self._length = _longer(self._length, more)
            self._width = _longer(self._width, more)
            self._marks.grow(more)
        self.count += 1
        self._width[row] = self._length[row] = 0
        self._move(row, 4)
        self._marks.begin(row)
        start = int(self._start[row])
        self.time[start] = PAST
        for level in self.levels:
            level[start] = 0
        self._length[row] = 1
        self._measure(start)
        return row

    def add_column(self) -> int:
        """A new resource class, nothing of it booked; returns its number."""
        level = steps.blank(len(self.time), [])
        level[self.time != NEVER] = 0
        self.levels.append(level)
        self.lowest.append(0)
        self._reach.append(0)
        return len(self.levels) - 1

    def _measure(self, place: int) -> None:
        self.size[place] = steps.size_of(
            int(self.time[place + 1]) - int(self.time[place]))

    def _clear(self, where: slice) -> None:
        self.time[where], self.size[where] = NEVER, 0
        for level in self.levels:
            level[where] = steps.empty(level.dtype)

    def _move(self, row: int, width: int) -> None:
        """Give a row (at least) so many places, somewhere else."""
        if self._used + width >= len(self.time):
            self._make_space(width)
            if self._width[row] > self._length[row] + 1:
                return
        old = int(self._start[row])
        new, length = self._used, int(self._length[row])
        for array in self._arrays():
            array[new:new + length] = array[old:old + length]
        self._clear(slice(old, old + int(self._width[row])))
        self._start[row], self._width[row] = new, width
        self._used += width
        self._in_place = None

    def _make_space(self, width: int) -> None:
        self._lay_out([self._piece(np.arange(self.count))], width + 1)

    def _piece(self, rows: Ints) -> Piece:
        """Some rows as they are. A copy."""
        counts = self.length[rows]
        places, _offsets = steps.spans(
            self.start[rows], self.start[rows] + counts - 1)
        return Piece(rows, counts, self.time[places],
                     [level[places] for level in self.levels])

    def _lay_out(self, pieces: list[Piece], more: int = 1) -> None:
        """Put all rows, one after the other, into place.

        A row without any steps yet is none: see :meth:`add_row`.

        :param pieces: every row is in one of them; they are used up
        """
        counts = np.zeros(self.count, np.int64)
        for piece in pieces:
            counts[piece.rows] = piece.counts
        width = counts + counts // self._slack + 4
        start = np.cumsum(width) - width
        self._used = int(width.sum())
        size = self._used + self._used // 16 + self._spare + more
        self.time = np.full(size, NEVER, np.int64)
        self.size = np.zeros(size, np.uint8)
        self.levels = [
            steps.blank(size, [piece.levels[column] for piece in pieces
                               if column < len(piece.levels)])
            for column in range(len(self.levels))]
        self.lowest, self._reach = ([0] * len(self.levels) for _one in (0, 1))
        while pieces:
            self._put(pieces.pop(), start)
        self._start, self._length, self._width = start, counts, width
        self._in_place = None
        self._marks = marks.Marks(counts, self.time[self.time != NEVER])

    def _put(self, piece: Piece, start: Ints) -> None:
        """Put some rows to where they begin."""
        first = start[piece.rows]
        places, _offsets = steps.spans(first, first + piece.counts - 1)
        self.time[places] = piece.times
        self.size[places] = np.minimum(
            np.log2(self.time[places + 1] - piece.times) * 8, 255)
        for column, level in enumerate(self.levels):
            if column < len(piece.levels):
                given = piece.levels[column]
                level[places] = given
                self.lowest[column] = min(
                    self.lowest[column], int(given.min(initial=0)))
                self._reach[column] = max(
                    self._reach[column], steps.reach(given))
            else:
                level[places] = 0

    def at(self, which: Which, instant: int) -> Ints:
        """The places of the steps that hold at an instant, for some rows."""
        here, there = self._marks.around(instant)
        start = self.start[which]
        place: Ints = start + here[:self.count][which]
        last = start + (self.length[which] - 1 if there is None
                        else there[:self.count][which])
        stride = 1 << int((last - place).max(initial=0)).bit_length() >> 1
        while stride:
            ahead = np.minimum(place + stride, last)
            place = np.where(self.time[ahead] <= instant, ahead, place)
            stride >>= 1
        return place

    def later(self, instant: int, part: int) -> int:
        """The instant at which one of ``part`` parts of all steps has passed.

        About; ``NEVER`` when there are not that many.
        """
        return self._marks.later(instant, part)


def _longer(array: Ints, more: int) -> Ints:
    return np.concatenate([array, np.zeros(more, np.int64)])
