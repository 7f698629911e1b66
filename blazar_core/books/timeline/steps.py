# SPDX-License-Identifier: Apache-2.0

"""What rows of steps are made of: times, levels and places in arrays."""

import functools
import math
import typing as ty

import numpy as np
import numpy.typing as npt

__all__ = ['Ints', 'Levels', 'NEVER', 'PAST', 'blank', 'empty', 'narrowed',
           'reach', 'room', 'size_of', 'spans', 'stepped', 'type_for']

Ints: ty.TypeAlias = npt.NDArray[np.int64]
Levels: ty.TypeAlias = npt.NDArray[ty.Any]

#: When the first step of a row begins, and when the last one ends. What lies
#: between them, and twice that, is still 64 bits.
PAST, NEVER = -2 ** 61, 2 ** 61

#: What levels may be kept in.
_TYPES = tuple(map(np.dtype, (np.int16, np.int32, np.int64)))
#: They are given a type that has room for so many times theirs: so they seldom
#: grow out of it.
_AHEAD = 2


@functools.cache
def empty(dtype: npt.DTypeLike) -> int:
    """The level of an empty place: more than fits anywhere."""
    return min(int(np.iinfo(np.dtype(dtype)).max), NEVER)


def size_of(seconds: int) -> int:
    """The logarithm of a time that is not 0, in eighths of a doubling.

    So that times can be told apart roughly by looking at one byte. Two ways
    of computing it may differ by 1.
    """
    return min(int(math.log2(seconds) * 8), 255)


def reach(level: Levels) -> int:
    """How far from 0 some levels are at most."""
    return max(int(level.max(initial=0)), -int(level.min(initial=0)))


def spans(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """All places from the first until the last of each row.

    And where in them each row begins.
    """
    counts = last - first + 1
    ends = np.cumsum(counts)
    offsets = ends - counts
    places = np.arange(int(counts.sum()))
    places += np.repeat(first - offsets, counts)
    return places, offsets


@functools.cache
def room(dtype: np.dtype[ty.Any]) -> int:
    """How far from 0 the levels of a type may be: so far that the difference
    of two is of that type, too.
    """
    return 1 << 8 * dtype.itemsize - 2


def type_for(far: int) -> np.dtype[ty.Any]:
    """What levels are kept in that are not further from 0 than this."""
    return next((one for one in _TYPES if _AHEAD * far < room(one)),
                _TYPES[-1])


def narrowed(level: Levels) -> Levels:
    """Levels in the smallest type that they are kept in."""
    return level.astype(type_for(reach(level)))


def blank(size: int, levels: ty.Iterable[Levels]) -> Levels:
    """So many empty places, of the smallest type that some are kept in."""
    dtype = type_for(max(map(reach, levels), default=0))
    return np.full(size, empty(dtype), dtype)


def stepped(row: Ints, time: Ints, bases: list[Ints], changes: list[Ints],
            ) -> tuple[Ints, Ints, list[Levels]]:
    """Step functions, given their levels in the past and their changes.

    :returns: how many steps each row has, their times, and their levels
    """
    order = np.lexsort((time, row))
    row, time = row[order], time[order]
    # What happens at one instant is one step, the last one's sum.
    whole = np.ones(len(row), bool)
    whole[:-1] = (row[1:] != row[:-1]) | (time[1:] != time[:-1])
    row, time = row[whole], time[whole]
    first = np.ones(len(row), bool)
    first[1:] = row[1:] != row[:-1]
    differs = np.zeros(len(row), bool)
    levels = []
    for base, change in zip(bases, changes):
        total = np.cumsum(change[order])[whole]
        before = np.concatenate([[0], total[:-1]]) if len(total) else total
        differs |= total != before
        heads = np.flatnonzero(first)
        total += np.repeat(base[row[heads]] - before[heads],
                           np.diff(np.append(heads, len(row))))
        levels.append(total)
    counts = np.bincount(row[differs], minlength=len(bases[0])) + 1
    heads = np.cumsum(counts) - counts
    inner = np.ones(int(counts.sum()), bool)
    inner[heads] = False
    times = np.full(len(inner), PAST)
    times[inner] = time[differs]
    for column, base in enumerate(bases):
        level = np.empty(len(inner), np.int64)
        level[heads], level[inner] = base, levels[column][differs]
        levels[column] = level
    return counts, times, ty.cast('list[Levels]', levels)
