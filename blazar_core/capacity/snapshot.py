# SPDX-License-Identifier: Apache-2.0

"""The books as they are read: all of them for the first reader, and hosts."""

import collections.abc
import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import timelines
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models

__all__ = ['CURRENT', 'InternedRecords', 'host_of', 'read_all']

LOG = logging.getLogger(__name__)

#: The bookings that take room.
CURRENT = models.Booking.__table__.c.host_id.is_not(None)
#: About so many bookings are read at once: all those of some hosts. A database
#: sends no more in one text than some megabytes.
BLOCK = 50_000
#: So much that is alike is remembered, of each kind.
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


def host_of(row: ty.Any, alike: InternedRecords) -> model.Host:
    """A host from what was read of it."""
    return model.Host(
        row.id, row.uuid, row.name,
        row.name if row.service_host == row.name else row.service_host,
        alike.of(row.capacity), alike.of(row.usage), row.generation,
        alike.of({**row.properties, **(row.extra or {})}),
        enrolled=row.enrolment is not None,
        reservable=bool(row.reservable) and (
            row.enrolment == states.Enrollment.ENROLLED),
        assigned_to=row.assigned_to, providers=alike.providers(row.units))


def read_all(
        connection: sa.Connection, since: int) -> tuple[dict[int, model.Host],
                                                        timelines.Timeline,
                                                        InternedRecords]:
    """All hosts, by id, and every booking that was not over at an instant."""
    LOG.info('Reading the books')
    alike, timeline = InternedRecords(), timelines.Timeline(
        shared=ledger.SHARED)
    hosts = {row.id: host_of(row, alike) for row in connection.execute(
        inventory.HOSTS, execution_options={'yield_per': 1000})}
    for host in hosts.values():
        timeline.set_host(host.id, host.capacity, host.usage, host.uuid,
                          host.providers)
    LOG.info('Read %s hosts', len(hosts))
    timeline.load(_blocks(connection, since))
    LOG.info('The books are read')
    return hosts, timeline, alike


def _blocks(connection: sa.Connection, since: int,
            ) -> ty.Iterator[timelines.Block]:
    """All of them, in blocks.

    A million rows take the driver many seconds, so the database packs them:
    for each amount of resources, one text of numbers.
    """
    wanted = sa.and_(CURRENT, models.Booking.end_date > since)
    host = models.Booking.host_id
    counts = [(row.host_id, row.bookings) for row in connection.execute(
        sa.select(host, sa.func.count().label('bookings')).where(
            wanted).group_by(host).order_by(host))]
    total = sum(count for _host, count in counts)
    if connection.dialect.name == 'mysql':
        connection.execute(sa.text(
            f'SET SESSION group_concat_max_len = {2**30}'))
    done = shown = 0
    for first, last in _ranges(counts):
        packs = connection.execute(_packed(connection.dialect.name).where(
            wanted, host.between(first, last))).all()
        numbers = [np.fromstring(pack.packed, dtype=np.int64, sep=' ')
                   for pack in packs]
        for pack, some in zip(packs, numbers):
            if len(some) != 3 * pack.bookings:
                raise RuntimeError(
                    f'The database cut short the bookings of hosts {first} '
                    f'to {last}')
        done += sum(pack.bookings for pack in packs)
        if done - shown >= 100_000:
            shown = done
            LOG.info('Read %s of %s bookings', done, total)
        yield _block(
            [jsonutils.loads(pack.resources) for pack in packs], numbers)


def _ranges(counts: ty.Iterable[tuple[int, int]],
            ) -> ty.Iterator[tuple[int, int]]:
    """The first and the last host of each block, given how many bookings each
    host has.
    """
    first, bookings, last = None, 0, 0
    for host_id, count in counts:
        if first is not None and bookings + count > BLOCK:
            yield first, last
            first = None
        if first is None:
            first, bookings = host_id, 0
        bookings, last = bookings + count, host_id
    if first is not None:
        yield first, last


def _block(resources: ty.Sequence[model.Resources],
           numbers: ty.Sequence[npt.NDArray[np.int64]]) -> timelines.Block:
    """Of some amounts of resources, the hosts and times of their bookings."""
    counts = [len(some) // 3 for some in numbers]
    booked = np.concatenate([np.zeros(0, np.int64), *numbers])
    return timelines.Block(
        booked[0::3], booked[1::3], booked[2::3],
        {rc: np.repeat([one.get(rc, 0) for one in resources], counts)
         for rc in {rc for one in resources for rc in one}})


def _packed(dialect: str) -> sa.Select[ty.Any]:
    """For each amount: how many bookings, and their hosts and times in one
    text, as each database knows to make it.
    """
    text = sa.Text() if dialect != 'mysql' else sa.CHAR()
    if dialect == 'mysql':
        packed = sa.func.group_concat(sa.text(
            "CONCAT(host_id, ' ', start_date, ' ', end_date) SEPARATOR ' '"))
    else:
        host, start, end = (sa.cast(column, text) for column in (
            models.Booking.host_id, models.Booking.start_date,
            models.Booking.end_date))
        join = (sa.func.string_agg if dialect == 'postgresql'
                else sa.func.group_concat)
        packed = join(host.concat(' ').concat(start).concat(' ').concat(end),
                      ' ')
    amounts = sa.cast(models.Booking.resources, text)
    return sa.select(
        sa.func.max(amounts).label('resources'),
        sa.func.count().label('bookings'), packed.label('packed'),
    ).group_by(amounts)
