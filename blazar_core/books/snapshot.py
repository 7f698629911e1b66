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

"""The books as they are read: all bookings at once for the first reader, and
hosts.
"""

import typing as ty

import numpy as np
import numpy.typing as npt
from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.books import timeline as timelines
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models

__all__ = ['CURRENT', 'host_of', 'load_bookings']

LOG = logging.getLogger(__name__)

#: The bookings that take room.
CURRENT = models.Booking.__table__.c.host_id.is_not(None)


def host_of(row: ty.Any) -> model.Host:
    """A host from what was read of it."""
    return model.Host(
        row.id, row.uuid, row.name, row.service_host, row.capacity, row.usage,
        row.generation, {**row.properties, **(row.extra or {})},
        enrolled=row.enrolment is not None,
        reservable=bool(row.reservable) and (
            row.enrolment == states.Enrolment.ENROLLED),
        held_by=row.held_by)


def load_bookings(connection: sa.Connection, timeline: timelines.Timeline,
                  since: int) -> None:
    """Every booking that was not over at an instant.

    A million rows take the driver many seconds, so the database packs them:
    for each host and amount of resources, one text of numbers.
    """
    total = connection.scalar(
        sa.select(sa.func.count(models.Booking.id)).where(
            CURRENT, models.Booking.end_date > since)) or 0
    done = shown = 0
    packs = []
    for row in _packed(connection, since):
        numbers = np.fromstring(row.packed, dtype=np.int64, sep=' ')
        if len(numbers) != 2 * row.bookings:
            raise RuntimeError(
                f'The database cut short the bookings of host {row.host_id}')
        packs.append((row.host_id, jsonutils.loads(row.resources), numbers))
        done += row.bookings
        if done - shown >= 100_000:
            shown = done
            LOG.info('Read %s of %s bookings', done, total)
    _add_packs(timeline, packs)


def _add_packs(timeline: timelines.Timeline, packs: ty.Sequence[
        tuple[int, model.Resources, npt.NDArray[np.int64]]]) -> None:
    if not packs:
        return
    counts = [len(numbers) // 2 for _host, _resources, numbers in packs]
    dates = np.concatenate([numbers for _h, _r, numbers in packs])
    classes = {rc for _host, resources, _numbers in packs for rc in resources}
    timeline.load(
        np.repeat([host_id for host_id, _r, _n in packs], counts),
        dates[0::2], dates[1::2],
        {rc: np.repeat([resources.get(rc, 0) for _h, resources, _n in packs],
                       counts) for rc in classes})


def _packed(connection: sa.Connection, since: int) -> ty.Iterator[ty.Any]:
    """For each host and amount: how many bookings, and their dates in one
    text, as each database knows to make it.
    """
    dialect = connection.dialect.name
    start, end = models.Booking.start_date, models.Booking.end_date
    text = sa.Text() if dialect != 'mysql' else sa.CHAR()
    pair = sa.cast(start, text).concat(' ').concat(sa.cast(end, text))
    if dialect == 'mysql':
        connection.execute(sa.text(
            f'SET SESSION group_concat_max_len = {2**30}'))
        packed = sa.func.group_concat(sa.text(
            "CONCAT(start_date, ' ', end_date) SEPARATOR ' '"))
    elif dialect == 'postgresql':
        packed = sa.func.string_agg(pair, ' ')
    else:
        packed = sa.func.group_concat(pair, ' ')
    amounts = sa.cast(models.Booking.resources, text)
    query = sa.select(
        models.Booking.host_id, sa.func.max(amounts).label('resources'),
        sa.func.count().label('bookings'), packed.label('packed'),
    ).where(CURRENT, end > since).group_by(models.Booking.host_id, amounts)
    yield from connection.execute(query, execution_options={'yield_per': 1000})
