# SPDX-License-Identifier: Apache-2.0

"""Read hosts and bookings: all of them for a new index, or some hosts."""

import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.capacity import host_memory
from blazar_core.capacity import inventory
from blazar_core.capacity import timelines
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models

LOG = logging.getLogger(__name__)

#: Condition: the booking has a host, and so takes capacity.
CURRENT = models.Booking.__table__.c.host_id.is_not(None)
#: About the number of bookings that are read at once: all those of some
#: hosts. Databases limit one text to some megabytes.
BLOCK = 50_000


def host_of(row: ty.Any, alike: host_memory.InternedRecords) -> model.Host:
    """Return a host, given its row."""
    return model.Host(
        row.id, row.uuid, row.name,
        row.name if row.service_host == row.name else row.service_host,
        alike.of(row.capacity), alike.of(row.usage), row.generation,
        alike.of({**row.properties, **(row.extra or {})}),
        enrolled=row.enrollment is not None,
        reservable=bool(row.reservable) and (
            row.enrollment == states.Enrollment.ENROLLED),
        assigned_to=row.assigned_to, overdue=row.overdue_at is not None,
        providers=alike.providers(row.units),
        interruptible=row.interruptible or {},
        off=row.power_state in states.POWERED_OFF)


def read_all(connection: sa.Connection, since: int,
             ) -> tuple[dict[int, model.Host], timelines.Timeline,
                        host_memory.InternedRecords]:
    """Return all hosts by id, the timeline of every booking that ends after
    an instant, and the cache of the values that were read.
    """
    LOG.info('Loading the booking index')
    alike = host_memory.InternedRecords()
    timeline = timelines.Timeline()
    hosts = {row.id: host_of(row, alike) for row in connection.execute(
        inventory.HOSTS, execution_options={'yield_per': 1000})}
    for host in hosts.values():
        timeline.set_host(host.id, host.capacity, host.usage, host.uuid,
                          host.providers)
    LOG.info('Loaded %s hosts', len(hosts))
    timeline.load(_blocks(connection, since))
    LOG.info('The booking index is loaded')
    return hosts, timeline, alike


def _blocks(connection: sa.Connection, since: int,
            ) -> ty.Iterator[timelines.Block]:
    """Yield all bookings, in blocks.

    A driver takes many seconds to read a million rows, so the database packs
    them: for each distinct amount of resources, one text of numbers.
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
                    f'The database truncated the bookings of hosts {first} to '
                    f'{last}')
        done += sum(pack.bookings for pack in packs)
        if done - shown >= 100_000:
            shown = done
            LOG.info('Loaded %s of %s bookings', done, total)
        yield _block(
            [jsonutils.loads(pack.resources) for pack in packs], numbers)


def _ranges(counts: ty.Iterable[tuple[int, int]],
            ) -> ty.Iterator[tuple[int, int]]:
    """Yield the first and the last host of each block, given the number of
    bookings of each host.
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
    """Return the block of bookings of some amounts of resources.

    :param numbers: for each amount, the host, start and end of each booking
    """
    counts = [len(some) // 3 for some in numbers]
    booked = np.concatenate([np.zeros(0, np.int64), *numbers])
    return timelines.Block(
        booked[0::3], booked[1::3], booked[2::3],
        {rc: np.repeat([one.get(rc, 0) for one in resources], counts)
         for rc in {rc for one in resources for rc in one}})


def _packed(dialect: str) -> sa.Select[ty.Any]:
    """Return the query that packs the bookings of each amount: their number,
    and their hosts and times in one text, in the dialect of the database.
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
