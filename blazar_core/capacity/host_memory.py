# SPDX-License-Identifier: Apache-2.0

"""Keep the index of 100,000 hosts and 800,000 bookings within 150 MiB.

A process that has loaded them (``python -m benchmarks wide``) has grown by:

* 140 MiB as implemented;
* 155 MiB with a dict for each record instead of :class:`_Record`;
* 235 MiB if equal values are not shared (:class:`InternedRecords`);
* 192 MiB if freed memory is not returned (:func:`trim_heap`).
"""

import collections.abc
import contextlib
import ctypes
import typing as ty

from blazar_core.common import model

#: The number of different values that are cached, of each kind.
_REMEMBERED = 2000

K = ty.TypeVar('K')
V = ty.TypeVar('V')


class InternedRecords:
    """A cache that keeps equal records once, and different ones small: most
    of a hundred thousand hosts have the same values, or nearly so.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._texts: dict[str, str] = {}
        self._providers: dict[str, model.Providers] = {}
        self._units: dict[tuple[ty.Any, ...], tuple[ty.Any, ...]] = {}

    def of(self, read: ty.Mapping[str, ty.Any]) -> ty.Mapping[str, ty.Any]:
        """Return an equal record; mostly the first that was read."""
        names, key = tuple(read), repr(read)
        shape = self._shapes.get(names)
        if shape is None:
            shape = _first(self._shapes, names, _Shape(names))
        if key in shape.known:
            return shape.known[key]
        return _first(shape.known, key, _Record(shape.places, tuple(
            _first(self._texts, value, value) if type(value) is str else value
            for value in read.values())))

    def providers(self, read: ty.Mapping[str, ty.Mapping[
            str, ty.Sequence[int]]] | None) -> model.Providers | None:
        """Return the providers of a host, the root first; mostly the same
        object as for other hosts.
        """
        if read is None:
            return None
        key = repr(read)
        if key in self._providers:
            return self._providers[key]
        units = {one: tuple(sorted(
            (rc, model.Units(*numbers)) for rc, numbers in some.items()))
            for one, some in read.items()}
        # Equal children come in the same order on all hosts.
        ids = tuple(sorted(units, key=lambda one: (
            bool(one), units[one], one)))
        shape = tuple(units[one] for one in ids)
        found = model.Providers(ids, _first(self._units, shape, shape))
        return found if len(ids) > 1 else _first(self._providers, key, found)


class _Shape:
    """The names that many records have in common, and some of these records,
    by their text.
    """

    def __init__(self, names: ty.Sequence[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.known: dict[str, _Record] = {}


class _Record(collections.abc.Mapping[str, ty.Any]):
    """Values of a record that shares its names with others. Takes little more
    than half the memory of a dict.
    """

    __slots__ = '_places', '_values'

    def __init__(self, places: dict[str, int], values: tuple[ty.Any, ...],
                 ) -> None:
        self._places, self._values = places, values

    def __getitem__(self, name: str) -> ty.Any:
        return self._values[self._places[name]]

    def get(self, name: str, default: ty.Any = None) -> ty.Any:
        # Mapping's own raises and catches KeyError for a missing name.
        place = self._places.get(name)
        return default if place is None else self._values[place]

    def __eq__(self, other: object) -> bool:
        # Mapping's own builds two dicts, and mostly both are the same object.
        return self is other or super().__eq__(other)

    def __iter__(self) -> ty.Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def _first(known: dict[K, V], key: K, value: V) -> V:
    """Return the first value that a key got. A full cache is cleared: if most
    values differ, it would take more memory than it saves.
    """
    if len(known) >= _REMEMBERED:
        known.clear()
    return known.setdefault(key, value)


def trim_heap() -> None:
    """Return freed memory to the system.

    Otherwise the C library keeps it: a third of what the index takes.
    """
    with contextlib.suppress(AttributeError, OSError):
        # Only glibc has the function, and only glibc keeps so much.
        ctypes.CDLL(None).malloc_trim(0)
