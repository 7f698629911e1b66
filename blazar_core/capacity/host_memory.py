# SPDX-License-Identifier: Apache-2.0

"""Keep the index of 100,000 hosts and 800,000 bookings within 150 MiB.

A process that has read them (``python -m benchmarks wide``) has grown by:

* 140 MiB as it is;
* 155 MiB with a dict for each record instead of :class:`_Record`;
* 235 MiB where equal values are not shared (:class:`InternedRecords`);
* 192 MiB where freed memory is not returned (:func:`trim_heap`).
"""

import collections.abc
import contextlib
import ctypes
import typing as ty

from blazar_core.common import model

__all__ = ['InternedRecords', 'trim_heap']

#: So many different values are remembered, of each kind.
_REMEMBERED = 2000

K = ty.TypeVar('K')
V = ty.TypeVar('V')


class InternedRecords:
    """What is read is kept once where it is the same, and small where it is
    not: of a hundred thousand hosts most have what others have, or nearly so.
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._texts: dict[str, str] = {}
        self._providers: dict[str, model.Providers] = {}
        self._units: dict[tuple[ty.Any, ...], tuple[ty.Any, ...]] = {}

    def of(self, read: ty.Mapping[str, ty.Any]) -> ty.Mapping[str, ty.Any]:
        """The same; the first that was, mostly."""
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
        """The providers of a host, the root first; mostly the same object
        as for other hosts.
        """
        if read is None:
            return None
        key = repr(read)
        if key in self._providers:
            return self._providers[key]
        units = {one: tuple(sorted(
            (rc, model.Units(*numbers)) for rc, numbers in some.items()))
            for one, some in read.items()}
        # Children that are alike come in the same order on all hosts.
        ids = tuple(sorted(units, key=lambda one: (
            bool(one), units[one], one)))
        shape = tuple(units[one] for one in ids)
        found = model.Providers(ids, _first(self._units, shape, shape))
        return found if len(ids) > 1 else _first(self._providers, key, found)


class _Shape:
    """Names that many have, and some of those that do, by their text."""

    def __init__(self, names: ty.Sequence[str]) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.known: dict[str, _Record] = {}


class _Record(collections.abc.Mapping[str, ty.Any]):
    """Some values, whose names others have too. Takes little more than half of
    what a dictionary does.
    """

    __slots__ = '_places', '_values'

    def __init__(self, places: dict[str, int], values: tuple[ty.Any, ...],
                 ) -> None:
        self._places, self._values = places, values

    def __getitem__(self, name: str) -> ty.Any:
        return self._values[self._places[name]]

    def get(self, name: str, default: ty.Any = None) -> ty.Any:
        # Mapping's own raises and catches where there is none.
        place = self._places.get(name)
        return default if place is None else self._values[place]

    def __eq__(self, other: object) -> bool:
        # Mapping's own makes two dictionaries, and mostly it is the same one.
        return self is other or super().__eq__(other)

    def __iter__(self) -> ty.Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def _first(known: dict[K, V], key: K, value: V) -> V:
    """The value that a key got first. What is known is forgotten when it is
    much: where most differ that would take more than it saves.
    """
    if len(known) >= _REMEMBERED:
        known.clear()
    return known.setdefault(key, value)


def trim_heap() -> None:
    """Return freed memory to the system.

    The C library keeps it otherwise: a third of what the index takes.
    """
    with contextlib.suppress(AttributeError, OSError):
        # Only glibc has it, and keeps so much.
        ctypes.CDLL(None).malloc_trim(0)
