# SPDX-License-Identifier: Apache-2.0

"""The calendar: hosts and classes by their names, and what is booked of them.

H is the number of hosts, S that of steps (at most two for each booking).
"""

import dataclasses
import typing as ty

import numpy as np
import numpy.typing as npt

from blazar_core.books.timeline import rows
from blazar_core.books.timeline import search
from blazar_core.books.timeline.steps import Ints
from blazar_core.books.timeline.steps import NEVER
from blazar_core.books.timeline import units
from blazar_core.common import model

__all__ = ['Block', 'Calendar', 'end_of']


@dataclasses.dataclass
class _Class:
    """A resource class: what each host has of it, by number of the host."""

    capacity: Ints
    usage: Ints
    free: Ints


class Block(ty.NamedTuple):
    """Many bookings: one value of each array for each.

    :ivar amounts: by resource class
    """

    host_ids: npt.ArrayLike
    starts: npt.ArrayLike
    ends: npt.ArrayLike
    amounts: ty.Mapping[str, npt.ArrayLike]


class Calendar:
    """What is booked on every host, at every instant.

    Bookings are not remembered one by one: the caller that takes one away
    says again what it was. Times from :data:`model.FOREVER` on are all the
    same: what is booked until then is booked for ever. Not safe against
    threads that change it meanwhile: the caller holds a lock, or a copy.

    :param shared: classes that a host may offer through a shared provider: a
        host that reports none of its own is not judged by them
    :ivar units: how much one server can get of each host
    """

    def __init__(self, shared: ty.Collection[str] = ('DISK_GB',), *,
                 slack: int = 8, spare: int = 1024,
                 piece: int = search.PIECE) -> None:
        self._shared = frozenset(shared)
        self._rows = rows.Rows(slack, spare)
        self._piece = piece
        self._index: dict[int, int] = {}
        self._ids: list[int] = []
        self._classes: dict[str, _Class] = {}
        self._columns: dict[str, int] = {}
        self.units = units.UnitsOfHosts()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The ids of the hosts, in the order of the answers. Not a copy."""
        return self._ids

    @property
    def classes(self) -> tuple[str, ...]:
        """The resource classes that a host has reported or had booked."""
        return tuple(self._classes)

    @property
    def steps(self) -> int:
        """S, how often the levels of all hosts change. Costs O(H)."""
        return self._rows.total

    @property
    def nbytes(self) -> int:
        """The memory of its arrays, in bytes."""
        return self._rows.nbytes + sum(
            one.capacity.nbytes + one.usage.nbytes + one.free.nbytes
            for one in self._classes.values())

    def index(self, host_id: int) -> int:
        """The place of a host in the answers.

        :raises KeyError: when it is not known
        """
        return self._index[host_id]

    def mask(self, host_ids: ty.Iterable[int]) -> npt.NDArray[np.bool_]:
        """A truth value for each host; those that are not known are left out.

        Worth keeping where the same hosts are asked about again.
        """
        mask = np.zeros(len(self), bool)
        mask[[self._index[one] for one in host_ids if one in self._index]] = (
            True)
        return mask

    @property
    def capacity(self) -> dict[str, Ints]:
        """What each host has, by class; in the order of :attr:`ids`."""
        return {rc: one.capacity[:len(self)]
                for rc, one in self._classes.items()}

    def reserved(self) -> npt.NDArray[np.bool_]:
        """Which hosts have bookings, at any time that is not forgotten; in the
        order of :attr:`ids`. Costs O(H).
        """
        return np.asarray(self._rows.length > 1)

    def too_much(self, demand: model.Demand, hosts: Ints,
                 ) -> list[units.TooMuch] | None:
        """Why none of some hosts can ever take a server of a demand.

        :param hosts: their places
        :returns: as :meth:`units.UnitsOfHosts.too_much`
        """
        return self.units.too_much(demand, hosts, {
            rc: np.where(capacity > 0, capacity, self._missing(rc))
            for rc, capacity in self.capacity.items()})

    def set_host(self, host_id: int, capacity: model.Resources,
                 usage: model.Resources, uuid: str = '',
                 providers: model.Providers | None = None) -> None:
        """Say what a host has, and what of it is used without an end.

        A host that is not known yet is added (with nothing booked); one that
        is gone is given no capacity. Costs O(classes).

        :param uuid: needed where demands name providers
        :param providers: None: its capacity says what a server can get
        """
        place = self._place(host_id)
        self.units.set(place, uuid, providers)
        for rc in (*capacity, *usage):
            self._class(rc)
        for rc, one in self._classes.items():
            total, used = capacity.get(rc, 0), usage.get(rc, 0)
            one.capacity[place], one.usage[place] = total, used
            one.free[place] = (
                total - used if rc in capacity else self._missing(rc))

    def _missing(self, rc: str) -> int:
        """What is free of a class that a host does not report."""
        return search.HUGE if rc in self._shared else -search.HUGE

    def _place(self, host_id: int) -> int:
        if host_id in self._index:
            return self._index[host_id]
        place = self._rows.add_row()
        self._index[host_id] = place
        self._ids.append(host_id)
        for rc, one in self._classes.items():
            if place == len(one.free):
                more = max(16, place // 2)
                for name in ('capacity', 'usage', 'free'):
                    array = getattr(one, name)
                    setattr(one, name, np.concatenate([
                        array, np.zeros(more, np.int64)]))
            one.free[place] = self._missing(rc)
        return place

    def _class(self, rc: str) -> int:
        """The column of a class."""
        if rc not in self._columns:
            size = max(16, len(self))
            self._classes[rc] = _Class(
                np.zeros(size, np.int64), np.zeros(size, np.int64),
                np.full(size, self._missing(rc)))
            self._columns[rc] = self._rows.add_column()
        return self._columns[rc]

    def apply(self, host_id: int, window: model.Window,
              resources: model.Resources, sign: int) -> None:
        """Add a booking (``sign`` 1) or take one away (-1).

        Changes may be applied in any order, a removal even before what it
        removes. Costs some 20 us, and now and then (about once in 10,000
        times) a new layout of everything. A host that is not known yet is
        added, without capacity.

        :raises ValueError: when ``sign`` is neither
        """
        if sign not in (1, -1):
            raise ValueError(f'The sign must be 1 or -1: {sign}')
        place = self._place(host_id)
        amounts = [(self._class(rc), sign * amount)
                   for rc, amount in resources.items() if amount]
        if amounts:
            self._rows.add(place, window.start, end_of(window), amounts)

    def load(self, blocks: ty.Iterable[Block]) -> None:
        """Add many bookings at once, all of a host in one block.

        Costs a sort of each block, some 200 bytes for each booking of the
        largest one, and a new layout of everything: better once with many.

        :raises ValueError: when the arrays of a block differ in length, a
            booking does not end after it starts, or a host is in two blocks;
            no booking was added then
        """
        self._rows.load(map(self._placed, blocks))

    def _placed(self, block: Block) -> rows.Block:
        """The bookings of a block, by the places of their hosts."""
        hosts, begin, end = (np.asarray(one, np.int64) for one in (
            block.host_ids, block.starts, block.ends))
        columns = {rc: np.asarray(one, np.int64)
                   for rc, one in block.amounts.items()}
        if len({len(one) for one in (hosts, begin, end, *columns.values())}
               ) != 1:
            raise ValueError('The arrays must have the same length')
        if (end <= begin).any():
            raise ValueError('A booking must end after it starts')
        known, number = np.unique(hosts, return_inverse=True)
        places = np.array([self._place(int(one)) for one in known], np.int64)
        for rc in columns:
            self._class(rc)
        none = np.zeros(len(hosts), np.int64)
        return rows.Block(
            places[number], begin,
            np.where(end >= model.FOREVER, NEVER, end),
            [columns.get(rc, none) for rc in self._columns])

    def forget(self, before: int) -> None:
        """Drop what is over by an instant; that makes room in memory.

        From then on, what was before it is answered as if it had been like
        it was at that instant. Costs O(S), about 100 ms with 2,000,000.
        """
        self._rows.forget(before)


def end_of(window: model.Window) -> int:
    return NEVER if window.end >= model.FOREVER else window.end
