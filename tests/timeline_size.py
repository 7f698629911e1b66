# SPDX-License-Identifier: Apache-2.0

"""The size of a timeline, for tests and benchmarks."""

from blazar_core.capacity import timelines


def steps(timeline: timelines.Calendar) -> int:
    """Return the number of steps of all hosts."""
    return int(timeline._rows.length.sum())


def nbytes(timeline: timelines.Calendar) -> int:
    """Return the memory of the arrays of a timeline, in bytes."""
    rows = timeline._rows
    return sum(array.nbytes for array in (
        *rows._arrays(), rows._start, rows._length, rows._width,
        rows._marks._until, *(
            array for one in timeline._classes.values()
            for array in vars(one).values())))
