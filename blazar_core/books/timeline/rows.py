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

"""The levels of all hosts as step functions of time, in a few large arrays.

A *row* is the step function of one host: for each of its steps, in the order
of time, the instant from which it holds, and for each *column* (resource
class) the level from then until the next step. All rows stand in one array of
times and one array of levels for each column. A row begins with a step at
``PAST``, two steps that follow each other differ in some column, and there is
at least one empty place behind the last one, at ``NEVER``. So the place behind
a step always shows when its level ends, and a row depends only on the sum of
what was added to it, not on the order.

To find the steps at one instant in all rows at once, the number of steps
until some instants (*marks*, spread evenly over the steps) is kept for every
row; from there it is a few steps of binary search, for all rows together.

What is asked most is the highest level from now on, for ever. It is remembered
for each row, with the end of the last step that has it: until then it stays
true, unless the row changes (:meth:`Rows.rest`).

A row that is full moves to the spare places at the end; when those are used
up, everything is laid out anew. That takes some 100 ms with 2,000,000 steps
and happens about once in 10,000 changes.
"""

import bisect
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline import steps
from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import Levels
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline.steps import PAST

__all__ = ['Rows', 'Which']

#: Numbers of rows, or all of them.
Which: ty.TypeAlias = Ints | slice

#: Steps are collected only where there are so many times more, because that
#: costs so many times more than to look at it all.
DENSE = 32
#: How many instants the rows have an index for, at most.
MARKS = 256


class Rows:
    """Levels of hosts (rows) and resource classes (columns) over time.

    Nothing here is safe against threads that change it meanwhile.

    :param slack: rows get spare places for this part of their steps (8: for
        one eighth)
    :param spare: spare places for rows that move, at least
    :ivar time: when each step begins; empty places are at ``NEVER``
    :ivar size: how long each step lasts, in one byte: see :func:`size_of`
    :ivar levels: for each column, the level of each step; empty places hold
        the largest value of their type
    :ivar start: where each row begins
    :ivar length: how many steps each row has
    :ivar lowest: for each column, a level below which it was not lately
    :ivar horizon: what was before this instant is forgotten
    """

    def __init__(self, slack: int = 8, spare: int = 1024) -> None:
        self._slack, self._spare = slack, spare
        self.count = 0
        self.columns = 0
        self.horizon = PAST
        self.time: Ints
        self.size: npt.NDArray[np.uint8]
        self.levels: list[Levels] = []
        self.lowest: list[int] = []
        # How far from 0 the levels of each column can be.
        self._reach: list[int] = []
        self._start: Ints
        self._length: Ints
        self._width: Ints
        self._used: int
        self._in_place: Ints | None
        self._marks: list[int]
        self._until_mark: npt.NDArray[np.int32]
        # Of each column, and what they are true of: see rest().
        self._rest: list[Ints] = []
        self._rest_since = self._rest_until = np.zeros(0, np.int64)
        self._lay_out(np.zeros(0, np.int64), np.zeros(0, np.int64), [])

    @property
    def start(self) -> Ints:
        return self._start[:self.count]

    @property
    def length(self) -> Ints:
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
        return sum(array.nbytes for array in (
            *self._arrays(), self._start, self._length, self._width,
            self._until_mark))

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
            self._rest_since = _longer(self._rest_since, more)
            self._rest_until = _longer(self._rest_until, more)
            self._rest = [_longer(one, more) for one in self._rest]
            self._until_mark = np.concatenate([
                self._until_mark,
                np.zeros((len(self._marks), more), np.int32)], axis=1)
        self.count += 1
        self._width[row] = self._length[row] = 0
        self._move(row, 4)
        self._until_mark[:, row] = 0
        start = int(self._start[row])
        self.time[start] = PAST
        for level in self.levels:
            level[start] = 0
        self._length[row] = 1
        self._measure(start)
        self._rest_until[row] = PAST
        return row

    def add_column(self) -> int:
        """A new resource class, nothing of it booked; returns its number."""
        self.levels.append(np.where(
            self.time == NEVER, steps.empty(np.int32), 0).astype(np.int32))
        self.lowest.append(0)
        self._reach.append(0)
        self._rest.append(np.zeros(len(self._rest_until), np.int64))
        self.columns += 1
        return self.columns - 1

    def add(self, row: int, begin: int, end: int,
            amounts: ty.Iterable[tuple[int, int]]) -> None:
        """Raise levels (column, amount) of a row from begin until end.

        The cost is that of moving the steps of the row that come later.
        """
        if end <= self.horizon:
            return
        self._rest_until[row] = PAST
        first = self._cut(row, begin) if begin > self.horizon else 0
        last = self._cut(row, end) if end < NEVER else int(self._length[row])
        start = int(self._start[row])
        for column, amount in amounts:
            self._raise(column, slice(start + first, start + last), amount)
        if end < NEVER:
            self._mend(row, last)
        if first:
            self._mend(row, first)

    def _raise(self, column: int, where: slice, amount: int) -> None:
        level = self.levels[column]
        if level.dtype == np.int32 and (
                self._reach[column] + abs(amount) >= steps.NARROW):
            self._prepare(column, abs(amount))
        self._reach[column] += abs(amount)
        level = self.levels[column][where]
        level += amount
        if amount < 0:
            self.lowest[column] = min(
                self.lowest[column], int(np.minimum.reduce(level)))

    def _prepare(self, column: int, amount: int) -> None:
        """Have a column hold levels that are further from 0 by an amount.

        Costs O(S), once in so many changes as add up to half of what a narrow
        column holds.
        """
        used = self.time != NEVER
        self._reach[column] = steps.reach(self.levels[column][used])
        if 2 * (self._reach[column] + amount) >= steps.NARROW:
            wide = self.levels[column].astype(np.int64)
            wide[~used] = steps.empty(wide.dtype)
            self.levels[column] = wide

    def _cut(self, row: int, instant: int) -> int:
        """Have a step begin at an instant; returns its number in the row."""
        start, length = int(self._start[row]), int(self._length[row])
        step = int(self.time[start:start + length].searchsorted(instant))
        if step < length and self.time[start + step] == instant:
            return step
        if length + 1 == self._width[row]:
            self._move(row, length + max(4, length // 2))
            start = int(self._start[row])
        here, behind = start + step, start + length
        for array in self._arrays():
            # The step before it is cut in two that are alike so far.
            array[here:behind + 1] = array[here - 1:behind]
        self.time[here] = instant
        self._measure(here - 1)
        self._measure(here)
        self._length[row] += 1
        self._until_mark[bisect.bisect_left(self._marks, instant):, row] += 1
        return step

    def _mend(self, row: int, step: int) -> None:
        """Remove a step that makes no difference."""
        start, length = int(self._start[row]), int(self._length[row])
        here, behind = start + step, start + length
        for level in self.levels:
            if level[here] != level[here - 1]:
                return
        instant = int(self.time[here])
        for array in self._arrays():
            # With the empty place behind the row.
            array[here:behind] = array[here + 1:behind + 1]
        self._measure(here - 1)
        self._length[row] -= 1
        self._until_mark[bisect.bisect_left(self._marks, instant):, row] -= 1

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
        places, _offsets = steps.spans(
            self.start, self.start + self.length - 1)
        self._lay_out(
            self.length.copy(), self.time[places],
            [level[places] for level in self.levels], width + 1)

    def _lay_out(self, counts: Ints, times: Ints, levels: list[Levels],
                 more: int = 1) -> None:
        """Put rows of ``counts`` steps, one after the other, into place.

        A row without any steps yet is none: see :meth:`add_row`.
        """
        width = counts + counts // self._slack + 4
        start = np.cumsum(width) - width
        self._used = int(width.sum())
        size = self._used + self._used // 16 + self._spare + more
        places, _offsets = steps.spans(start, start + counts - 1)
        self.time = np.full(size, NEVER, np.int64)
        self.time[places] = times
        self.size = np.zeros(size, np.uint8)
        self.size[places] = np.minimum(
            np.log2(self.time[places + 1] - times) * 8, 255)
        self.levels = [steps.placed(level, places, size) for level in levels]
        self.lowest = [int(level.min(initial=0)) for level in levels]
        self._reach = [steps.reach(level) for level in levels]
        self._start, self._length, self._width = start, counts, width
        self._in_place = None
        # They are others when rows are loaded, and as many as there are.
        self._rest_since = np.zeros(len(counts), np.int64)
        self._rest_until = np.full(len(counts), PAST)
        self._rest = [np.zeros(len(counts), np.int64) for _one in levels]
        self._set_marks(counts, times)

    def _set_marks(self, counts: Ints, times: Ints) -> None:
        """Choose the marks, and count the steps until each of them."""
        number = min(MARKS, len(times) // max(1, len(counts)))
        some = np.sort(times[::max(1, len(times) // 2 ** 17)])
        chosen = np.unique(some[np.linspace(
            0, len(some) - 1, number, dtype=np.int64)] if number else some[:0])
        marks = np.concatenate([[PAST], chosen[chosen > PAST]])
        # Each step counts from the first mark that is not before it.
        cell = np.searchsorted(marks, times) * len(counts)
        cell += np.repeat(np.arange(len(counts)), counts)
        until = np.bincount(cell, minlength=(len(marks) + 1) * len(counts))
        until = until.reshape(len(marks) + 1, len(counts))[:-1]
        self._until_mark = until.cumsum(axis=0, dtype=np.int32) - np.int32(1)
        self._marks = marks.tolist()

    def later(self, instant: int, part: int) -> int:
        """The instant at which one of ``part`` parts of all steps has passed.

        About; ``NEVER`` when there are not that many.
        """
        mark = bisect.bisect_right(self._marks, instant) + (
            len(self._marks) // part)
        return self._marks[mark] if mark < len(self._marks) else NEVER

    def at(self, which: Which, instant: int) -> Ints:
        """The places of the steps that hold at an instant, for some rows."""
        mark = bisect.bisect_right(self._marks, instant) - 1
        start = self.start[which]
        place: Ints = start + self._until_mark[mark, :self.count][which]
        if mark + 1 < len(self._marks):
            last = start + self._until_mark[mark + 1, :self.count][which]
        else:
            last = start + self.length[which] - 1
        stride = 1 << int((last - place).max(initial=0)).bit_length() >> 1
        while stride:
            ahead = np.minimum(place + stride, last)
            place = np.where(self.time[ahead] <= instant, ahead, place)
            stride >>= 1
        return place

    def peaks(self, first: Ints, last: Ints, columns: ty.Iterable[int],
              ) -> ty.Iterator[Levels]:
        """The highest level between two places of each row, by column."""
        if int((last - first).sum()) * DENSE < len(self.time):
            places, offsets = steps.spans(first, last)
            for column in columns:
                yield np.maximum.reduceat(
                    self.levels[column][places], offsets)
            return
        # It is cheaper to look at everything than to collect so much. What
        # stands between two rows is reduced too, and not used: with the rows
        # in order, everything is looked at once.
        order = np.argsort(first)
        pairs = np.empty(2 * len(first), np.int64)
        pairs[0::2], pairs[1::2] = first[order], last[order] + 1
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        for column in columns:
            yield np.maximum.reduceat(self.levels[column], pairs)[::2][back]

    def rest(self, instant: int) -> list[Ints]:
        """The highest level of each row from an instant on, by column.

        Costs O(rows); and the steps from then on of those that have changed
        since it was asked last, or whose highest level is over.
        """
        for row in np.flatnonzero(
                (self._rest_until[:self.count] <= instant) |
                (self._rest_since[:self.count] > instant)).tolist():
            first = int(self.at(np.array([row]), instant)[0])
            behind = int(self._start[row]) + int(self._length[row])
            until = NEVER
            for rest, level in zip(self._rest, self.levels):
                later = level[first:behind]
                rest[row] = highest = later.max()
                # Of several steps that have it, the last one counts.
                last = behind - 1 - int((later[::-1] == highest).argmax())
                until = min(until, int(self.time[last + 1]))
            self._rest_since[row], self._rest_until[row] = instant, until
        return [one[:self.count] for one in self._rest]

    def load(self, row: Ints, begin: Ints, end: Ints, amounts: list[Ints],
             ) -> None:
        """Add many bookings at once; one array of amounts for each column.

        Costs a sort of all steps, old and new.
        """
        if not amounts:
            return
        alive = end > self.horizon
        row, begin, end = row[alive], begin[alive], end[alive]
        amounts = [amount[alive] for amount in amounts]
        from_past, ends = begin <= self.horizon, end < NEVER
        old, _offsets = steps.spans(self.start, self.start + self.length - 1)
        old_row = np.repeat(np.arange(self.count), self.length)
        inner = np.ones(len(old), bool)
        inner[np.cumsum(self.length) - self.length] = False
        rows = np.concatenate([old_row[inner], row[~from_past], row[ends]])
        times = np.concatenate([
            self.time[old[inner]], begin[~from_past], end[ends]])
        bases, changes = [], []
        for level, amount in zip(self.levels, amounts):
            base = level[self.start].astype(np.int64)
            np.add.at(base, row[from_past], amount[from_past])
            was = level[old].astype(np.int64)
            bases.append(base)
            changes.append(np.concatenate([
                np.diff(was, prepend=0)[inner], amount[~from_past],
                -amount[ends]]))
        self._lay_out(*steps.stepped(rows, times, bases, changes))

    def forget(self, before: int) -> None:
        """Drop the steps before an instant, which becomes the horizon.

        Costs about a tenth of a second with 2,000,000 steps.
        """
        if before <= self.horizon:
            return
        first = self.at(slice(None), before)
        last = self.start + self.length - 1
        places, offsets = steps.spans(first, last)
        times = self.time[places]
        times[offsets] = PAST
        self.horizon = before
        self._lay_out(last - first + 1, times,
                      [level[places] for level in self.levels])


def _longer(array: Ints, more: int) -> Ints:
    return np.concatenate([array, np.zeros(more, np.int64)])
