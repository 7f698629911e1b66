# SPDX-License-Identifier: Apache-2.0

"""Where in each row of steps an instant is, about: an index of all rows."""

import bisect

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline.steps import PAST

__all__ = ['Marks']

#: How many instants there is an index for, at most.
MOST = 256
#: About so many steps are looked at at once.
PIECE = 2 ** 17


class Marks:
    """How many steps each row has until some instants, the *marks*.

    They are spread evenly over the steps, so between two of them each row has
    few. Costs O(steps), and a sort of some of them.

    :param counts: how many steps each row has
    :param times: when they begin, one row after the other
    """

    def __init__(self, counts: Ints, times: Ints) -> None:
        number = min(MOST, len(times) // max(1, len(counts)))
        some = np.sort(times[::max(1, len(times) // 2 ** 17)])
        chosen = np.unique(some[np.linspace(
            0, len(some) - 1, number, dtype=np.int64)] if number else some[:0])
        marks = np.concatenate([[PAST], chosen[chosen > PAST]])
        #: Of each mark and row, less one: the last step until there.
        self._until: npt.NDArray[np.int32] = np.empty(
            (len(marks), len(counts)), np.int32)
        ends = np.cumsum(counts)
        first = done = 0
        while first < len(counts):
            # Some rows at a time: this takes more memory than what it makes.
            behind = max(first + 1, int(np.searchsorted(
                ends, done + PIECE, 'right')))
            until = int(ends[behind - 1])
            self._until[:, first:behind] = _until(
                marks, counts[first:behind], times[done:until])
            first, done = behind, until
        self._marks: list[int] = marks.tolist()

    @property
    def nbytes(self) -> int:
        return self._until.nbytes

    def grow(self, more: int) -> None:
        """Have a place for so many more rows."""
        self._until = np.concatenate([
            self._until, np.zeros((len(self._marks), more), np.int32)], axis=1)

    def begin(self, row: int) -> None:
        """A row has one step."""
        self._until[:, row] = 0

    def changed(self, row: int, instant: int, steps: int) -> None:
        """A row has got so many steps more at an instant."""
        self._until[bisect.bisect_left(self._marks, instant):, row] += steps

    def around(self, instant: int) -> tuple[Ints, Ints | None]:
        """Of each row, which steps an instant is between, both included.

        ``None`` where the second is the last step of each row.
        """
        mark = bisect.bisect_right(self._marks, instant) - 1
        return self._until[mark], (
            self._until[mark + 1] if mark + 1 < len(self._marks) else None)

    def later(self, instant: int, part: int) -> int:
        """The instant at which one of ``part`` parts of all steps has passed.

        About; ``NEVER`` when there are not that many.
        """
        mark = bisect.bisect_right(self._marks, instant) + (
            len(self._marks) // part)
        return self._marks[mark] if mark < len(self._marks) else NEVER


def _until(marks: Ints, counts: Ints, times: Ints) -> Ints:
    """How many steps some rows have until each mark, less one."""
    # Each step counts from the first mark that is not before it.
    cell = np.searchsorted(marks, times) * len(counts)
    cell += np.repeat(np.arange(len(counts)), counts)
    until = np.bincount(cell, minlength=(len(marks) + 1) * len(counts))
    return until.reshape(len(marks) + 1, len(counts))[:-1].cumsum(axis=0) - 1
