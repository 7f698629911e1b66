# SPDX-License-Identifier: Apache-2.0

"""The levels of all hosts as step functions of time, in a few large arrays.

A *row* is the step function of one host: for each of its steps, in the order
of time, the instant from which it holds, and for each *column* (resource
class) the level from then until the next step. A row begins with a step at
``PAST``, and two steps that follow each other differ in some column. So a row
depends only on the sum of what was added to it, not on the order.
:mod:`~blazar_core.books.timeline.layout` says where they stand, and finds the
steps at one instant in all rows at once.

What is asked most is the highest level from now on, for ever. It is remembered
for each row, with the end of the last step that has it: until then it stays
true, unless the row changes (:meth:`Rows.rest`).
"""

import typing as ty

import numpy as np

from blazar_core.books.timeline import layout
from blazar_core.books.timeline import steps
from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import Levels
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline.steps import PAST

__all__ = ['Block', 'Rows']


class Block(ty.NamedTuple):
    """Bookings: of each its row, from when until when, and its amounts.

    :ivar amounts: one array for each column
    """

    row: Ints
    begin: Ints
    end: Ints
    amounts: list[Ints]


#: Steps are collected only where there are so many times more, because that
#: costs so many times more than to look at it all.
DENSE = 32


class Rows(layout.Layout):
    """Levels of hosts (rows) and resource classes (columns) over time.

    :ivar horizon: what was before this instant is forgotten
    """

    def __init__(self, slack: int = 8, spare: int = 1024) -> None:
        super().__init__(slack, spare)
        self.horizon = PAST
        self._highest = _Highest(0, 0)

    def add(self, row: int, begin: int, end: int,
            amounts: ty.Iterable[tuple[int, int]]) -> None:
        """Raise levels (column, amount) of a row from begin until end.

        The cost is that of moving the steps of the row that come later.
        """
        if end <= self.horizon:
            return
        self._highest.changed(row)
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
        if self._reach[column] + abs(amount) >= steps.room(level.dtype):
            self._prepare(column, abs(amount))
        level = self.levels[column][where]
        level += amount
        if amount < 0:
            lowest = int(np.minimum.reduce(level))
            self.lowest[column] = min(self.lowest[column], lowest)
            far = -lowest
        else:
            far = int(np.maximum.reduce(level))
        self._reach[column] = max(self._reach[column], far)

    def _prepare(self, column: int, amount: int) -> None:
        """Have a column hold levels that are further from 0 by an amount.

        Costs O(S), when levels have come to be twice as far from 0 as those
        for which the type was chosen, or more.
        """
        used = self.time != NEVER
        self._reach[column] = steps.reach(self.levels[column][used])
        level = self.levels[column].astype(
            steps.type_for(self._reach[column] + amount))
        level[~used] = steps.empty(level.dtype)
        self.levels[column] = level

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
        self._marks.changed(row, instant, 1)
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
        self._marks.changed(row, instant, -1)

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
        known = self._highest
        if not known.is_of(len(self._start), len(self.levels)):
            known = self._highest = _Highest(
                len(self._start), len(self.levels))
        for row in known.unknown(self.count, instant):
            first = int(self.at(np.array([row]), instant)[0])
            behind = int(self._start[row]) + int(self._length[row])
            until = NEVER
            for rest, level in zip(known.levels, self.levels):
                later = level[first:behind]
                rest[row] = highest = later.max()
                # Of several steps that have it, the last one counts.
                last = behind - 1 - int((later[::-1] == highest).argmax())
                until = min(until, int(self.time[last + 1]))
            known.since[row], known.until[row] = instant, until
        return [one[:self.count] for one in known.levels]

    def load(self, blocks: ty.Iterable[Block]) -> None:
        """Add many bookings at once.

        No row may be in two blocks: so each is sorted by itself, with what
        its rows have already, and only what comes of that is kept until all
        is laid out anew.

        :raises ValueError: when a row is in two blocks; no booking was added
        """
        pieces = [self._joined(block) for block in blocks if block.amounts]
        rows = np.concatenate([np.zeros(0, np.int64), *(
            piece.rows for piece in pieces)])
        others = np.ones(self.count, bool)
        others[rows] = False
        if len(rows) + int(others.sum()) != self.count:
            raise ValueError('No row may be in two blocks')
        self._highest = _Highest(0, 0)
        self._lay_out([*pieces, self._piece(np.flatnonzero(others))])

    def _joined(self, block: Block) -> layout.Piece:
        """The steps of the rows of a block, with its bookings."""
        alive = block.end > self.horizon
        begin, end = block.begin[alive], block.end[alive]
        amounts = [amount[alive] for amount in block.amounts]
        rows, row = np.unique(block.row[alive], return_inverse=True)
        from_past, ends = begin <= self.horizon, end < NEVER
        before = self._piece(rows)
        inner = np.ones(len(before.times), bool)
        inner[np.cumsum(before.counts) - before.counts] = False
        bases, changes = [], []
        for was, amount in zip(before.levels, amounts):
            was = was.astype(np.int64)
            base = was[~inner]
            np.add.at(base, row[from_past], amount[from_past])
            bases.append(base)
            changes.append(np.concatenate([
                np.diff(was, prepend=0)[inner], amount[~from_past],
                -amount[ends]]))
        counts, times, levels = steps.stepped(
            np.concatenate([
                np.repeat(np.arange(len(rows)), before.counts)[inner],
                row[~from_past], row[ends]]),
            np.concatenate([
                before.times[inner], begin[~from_past], end[ends]]),
            bases, changes)
        return layout.Piece(rows, counts, times, [
            steps.narrowed(level) for level in levels])

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
        self.horizon, self._highest = before, _Highest(0, 0)
        self._lay_out([layout.Piece(
            np.arange(self.count), last - first + 1, times,
            [level[places] for level in self.levels])])


class _Highest:
    """What is remembered of rows: their highest levels, and until when.

    :ivar levels: of each column, by row
    :ivar since: from when on that is so, by row
    :ivar until: and until when, at the latest
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.levels = [np.zeros(rows, np.int64) for _one in range(columns)]
        self.since = np.zeros(rows, np.int64)
        self.until = np.full(rows, PAST)

    def is_of(self, rows: int, columns: int) -> bool:
        return (len(self.until), len(self.levels)) == (rows, columns)

    def changed(self, row: int) -> None:
        """Nothing is known of a row any more."""
        if row < len(self.until):
            self.until[row] = PAST

    def unknown(self, count: int, instant: int) -> list[int]:
        """Of which rows nothing is known from an instant on."""
        numbers: list[int] = np.flatnonzero(
            (self.until[:count] <= instant) |
            (self.since[:count] > instant)).tolist()
        return numbers
