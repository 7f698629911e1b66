# SPDX-License-Identifier: Apache-2.0

"""A database filled with a world (:mod:`benchmarks.world`), in bulk.

Rows are written as they are after all leases were created, without any check;
there are no changes in the feed, as after trimming.
"""

import time
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from benchmarks import world as worlds
from blazar_core.capacity import inventory
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from tests import databases

CHUNK = 20_000


def connect(url: str) -> api.Database:
    """Return a connection like that of a separate process."""
    return api.Database(databases.configuration(url))


def fill(url: str, world: worlds.World, leases: int,
         events: bool = False) -> None:
    """Write hosts, leases, and the bookings, distributed over the leases.

    No booking has a server.

    :param events: whether to write four events for each lease
    """
    database = connect(url)
    ids = [uuidutils.generate_uuid() for _lease in range(leases)]
    with database.writer() as session:
        connection = session.connection()
        if connection.dialect.name == 'mysql':
            connection.execute(sa.text('SET SESSION unique_checks = 0, '
                                       'foreign_key_checks = 0'))
        _insert(connection, models.Host, ({
            'id': number, 'uuid': uuidutils.generate_uuid(),
            'name': f'host{number}', 'service_host': f'host{number}',
            'capacity': world.capacity, 'usage': {}, 'properties': {},
            'generation': 0, 'updated_at': worlds.NOW}
            for number in range(1, world.hosts + 1)))
        stamps = {'created_at': worlds.NOW, 'updated_at': worlds.NOW}
        _insert(connection, models.Lease, ({
            'id': one, 'name': 'lease', 'project_id': 'project',
            'user_id': 'user', 'start_date': worlds.NOW + number,
            'end_date': worlds.NOW + worlds.YEAR, 'before_end_date': None,
            'on_end': 'delete', 'status': 'PENDING', 'conditions': None,
            'lease_type': 'scheduled', **stamps}
            for number, one in enumerate(ids)))
        _insert(connection, models.Reservation, ({
            'id': one, 'lease_id': one, 'resource_type': 'virtual:instance',
            'amount': 1, 'resources': {}, 'status': 'pending', **stamps}
            for one in ids))
        _insert(connection, models.Event, ({
            'id': uuidutils.generate_uuid(), 'lease_id': one,
            'event_type': event_type, 'time': worlds.NOW, 'status': 'UNDONE',
            'run_at': worlds.NOW, 'attempts': 0, 'claimed_by': None,
            'claimed_until': 0, **stamps}
            for one in ids if events for event_type in (
                'start_lease', 'remind', 'before_end_lease', 'end_lease')))
        _insert(connection, models.Booking, (
            _booking(world, number, ids[number % leases])
            for number in range(len(world.host))))
    # As databases do automatically after a while.
    analyze = {'mysql': 'ANALYZE TABLE bookings', 'postgresql': 'ANALYZE'}
    if database.engine.dialect.name in analyze:
        with database.engine.begin() as connection:
            connection.execute(sa.text(
                analyze[database.engine.dialect.name]))
    database.engine.dispose()


def _booking(world: worlds.World, number: int, reservation_id: str,
             ) -> dict[str, ty.Any]:
    host_id, window, resources = world.booking(number)
    return {'reservation_id': reservation_id, 'host_id': host_id,
            'server_id': None, 'start_date': window.start,
            'end_date': window.end, 'resources': resources,
            'running': False}


def set_interruptible(database: api.Database, takes: model.Resources,
                      number: int) -> None:
    """Put as many interruptible servers on each host, as its only servers."""
    table, now, lead = models.Host.__table__, int(time.time()), (600, 0)
    with database.begin() as connection:
        connection.execute(sa.delete(models.InterruptibleServer))
        for host_id in connection.scalars(sa.select(table.c.id)).all():
            consumers = {uuidutils.generate_uuid(): (takes, 0)
                         for _number in range(number)}
            connection.execute(table.update().where(
                table.c.id == host_id).values(
                    consumers=consumers, **inventory.counted(
                        consumers, dict.fromkeys(consumers, lead))))
            _insert(connection, models.InterruptibleServer, (
                {'server_id': one, 'project_id': 'other', 'user_id': 'user',
                 'lead_time': lead[0], 'notice': lead[1], 'safe_by': now,
                 'on_evict': 'shelve', 'created_at': now, 'checked_at': now}
                for one in consumers))


def _insert(connection: sa.Connection, table: type[models.Base],
            rows: ty.Iterable[dict[str, ty.Any]]) -> None:
    chunk: list[dict[str, ty.Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK:
            connection.execute(table.__table__.insert(), chunk)
            chunk = []
    if chunk:
        connection.execute(table.__table__.insert(), chunk)
