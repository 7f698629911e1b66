# SPDX-License-Identifier: Apache-2.0

"""Read the database of OpenStack Blazar 18.

Only what is imported is read, from the tables that are declared here. If the
database of another release lacks some of them, the error names those.
"""

import collections
import dataclasses
import datetime
import typing as ty

from oslo_config import cfg
import sqlalchemy as sa

from blazar_core.common import errors

#: The statuses of a lease that waits for its start, or for its end.
PENDING, ACTIVE = 'PENDING', 'ACTIVE'
#: Blazar's resource type of whole hosts.
WHOLE_HOSTS = 'physical:host'
#: Blazar's resource types of servers: by amounts, and by a flavor.
SERVERS = 'virtual:instance'
OF_SERVERS = (SERVERS, 'flavor:instance')


class Unreadable(errors.BlazarError):
    """The database does not exist, or is not that of Blazar 18."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A host that is enrolled in Blazar.

    :ivar name: of the hypervisor
    :ivar extra: the extra capabilities
    """

    id: str
    name: str
    service_host: str
    reservable: bool
    extra: ty.Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation of a lease.

    :ivar asked: the request for whole hosts or servers, by Blazar's columns;
        None for other resource types
    :ivar hosts: the ids of its hosts; of servers: one for each slot
    :ivar changed: whether its hosts were changed
    """

    id: str
    resource_type: str
    status: str
    asked: ty.Mapping[str, ty.Any] | None
    hosts: tuple[str, ...]
    changed: bool
    created_at: int | None
    updated_at: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An event of a lease at ``time``."""

    id: str
    event_type: str
    time: int
    status: str


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A lease, from ``start`` to ``end``; seconds since the epoch."""

    id: str
    name: str
    project_id: str | None
    user_id: str | None
    start: int
    end: int
    status: str
    created_at: int | None
    updated_at: int | None
    reservations: tuple[Reservation, ...]
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Blazar:
    """All that is imported.

    :ivar hosts: by id
    :ivar private: the extra capabilities that users cannot ask for
    """

    hosts: ty.Mapping[str, Host]
    private: frozenset[str]
    leases: tuple[Lease, ...]


#: The tables and columns that are read.
tables = sa.MetaData()


def _table(name: str, /, **columns: ty.Any) -> sa.Table:
    return sa.Table(name, tables, sa.Column(
        'id', sa.String(36), primary_key=True), *(
            sa.Column(key, kind) for key, kind in columns.items()))


_HOSTS = _table(
    'computehosts', hypervisor_hostname=sa.String(255),
    service_name=sa.String(255), reservable=sa.Boolean())
_CAPABILITIES = _table(
    'computehost_extra_capabilities', computehost_id=sa.String(36),
    property_id=sa.String(36), capability_value=sa.Text())
_PROPERTIES = _table(
    'resource_properties', resource_type=sa.String(255),
    property_name=sa.String(255), private=sa.Boolean())
_LEASES = _table(
    'leases', name=sa.String(80), project_id=sa.String(255),
    user_id=sa.String(255), start_date=sa.DateTime(),
    end_date=sa.DateTime(), status=sa.String(255),
    created_at=sa.DateTime(), updated_at=sa.DateTime())
_RESERVATIONS = _table(
    'reservations', lease_id=sa.String(36), resource_type=sa.String(66),
    status=sa.String(13), resources_changed=sa.Boolean(),
    created_at=sa.DateTime(), updated_at=sa.DateTime())
_WHOLE = _table(
    'computehost_reservations', reservation_id=sa.String(36),
    count_range=sa.String(36), hypervisor_properties=sa.Text(),
    resource_properties=sa.Text(), before_end=sa.String(36))
_SERVERS = _table(
    'instance_reservations', reservation_id=sa.String(36),
    vcpus=sa.Integer(), memory_mb=sa.Integer(), disk_gb=sa.Integer(),
    amount=sa.Integer(), affinity=sa.Boolean(), resource_properties=sa.Text())
_ALLOCATIONS = _table(
    'computehost_allocations', compute_host_id=sa.String(36),
    reservation_id=sa.String(36))
_EVENTS = _table(
    'events', lease_id=sa.String(36), event_type=sa.String(66),
    time=sa.DateTime(), status=sa.String(13))


def url_of(text: str) -> str:
    """Return the URL of Blazar's database.

    :param text: the URL, or the path of a blazar.conf, whose contents do not
        appear in the list of processes
    :raises Unreadable: if there is no URL
    """
    if '://' in text:
        return text
    conf = cfg.ConfigOpts()
    conf.register_opt(cfg.StrOpt('connection', secret=True), 'database')
    try:
        conf([], project='blazar', default_config_files=[text],
             default_config_dirs=[])
    except (cfg.Error, OSError, ValueError) as exc:
        raise Unreadable(
            f'{text} cannot be read: {exc}. Write the path of a blazar.conf, '
            f'or the URL of its database.') from exc
    if not conf.database.connection:
        raise Unreadable(
            f'{text} has no [database] connection. Write the path of the '
            f'blazar.conf that blazar-manager has, or the URL of its '
            f'database.')
    return ty.cast(str, conf.database.connection)


def read(url: str) -> Blazar:
    """Read a database of Blazar in one transaction, without writing to it.

    :raises Unreadable: if it does not answer, or is not that of Blazar 18
    """
    try:
        engine = sa.create_engine(url, poolclass=sa.pool.NullPool)
        shown = engine.url.render_as_string()
    except (sa.exc.ArgumentError, ImportError) as exc:
        raise Unreadable(
            f'The URL of Blazar\'s database cannot be used: {exc}') from exc
    try:
        with engine.connect() as connection:
            _check(connection, shown)
            return _read(connection)
    except sa.exc.SQLAlchemyError as exc:
        raise Unreadable(
            f'The database {shown} cannot be read: {exc}') from exc


def _check(connection: sa.Connection, shown: str) -> None:
    """Check that the database has all tables and columns.

    :raises Unreadable: if it lacks any
    """
    there = sa.inspect(connection)
    names = there.get_table_names()
    missing = [
        *(table.name for table in tables.sorted_tables
          if table.name not in names),
        *(f'{table.name}.{column}' for table in tables.sorted_tables
          if table.name in names for column in sorted(
              {one.name for one in table.columns} -
              {one['name'] for one in there.get_columns(table.name)}))]
    if missing:
        raise Unreadable(
            f'The database {shown} is not a database of Blazar 18: it lacks '
            f'{", ".join(missing)}. Check the URL. If it belongs to an older '
            'Blazar, upgrade that first (blazar-db-manage upgrade).')


def _read(connection: sa.Connection) -> Blazar:
    extra: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for row in connection.execute(sa.select(
            _CAPABILITIES.c.computehost_id, _PROPERTIES.c.property_name,
            _CAPABILITIES.c.capability_value).join(
                _PROPERTIES, _PROPERTIES.c.id == _CAPABILITIES.c.property_id)
            .order_by(_CAPABILITIES.c.id)):
        extra[row.computehost_id][row.property_name] = row.capability_value
    reservations = _reservations(connection)
    events: dict[str, list[Event]] = collections.defaultdict(list)
    for row in connection.execute(sa.select(_EVENTS).order_by(
            _EVENTS.c.time, _EVENTS.c.id)):
        events[row.lease_id].append(Event(
            row.id, row.event_type, _seconds(row.time) or 0, row.status))
    return Blazar({
        row.id: Host(row.id, row.hypervisor_hostname or '',
                     row.service_name or '', bool(row.reservable),
                     extra[row.id])
        for row in connection.execute(sa.select(_HOSTS).order_by(
            # The ids are integers of Nova, or uuids.
            sa.func.length(_HOSTS.c.id), _HOSTS.c.id))}, frozenset(
        connection.scalars(sa.select(_PROPERTIES.c.property_name).where(
            _PROPERTIES.c.resource_type == WHOLE_HOSTS,
            _PROPERTIES.c.private))), tuple(
        Lease(row.id, row.name, row.project_id, row.user_id,
              _seconds(row.start_date) or 0, _seconds(row.end_date) or 0,
              row.status or '', _seconds(row.created_at),
              _seconds(row.updated_at), tuple(reservations[row.id]),
              tuple(events[row.id]))
        for row in connection.execute(sa.select(_LEASES).order_by(
            _LEASES.c.start_date, _LEASES.c.id))))


def _reservations(connection: sa.Connection) -> dict[str, list[Reservation]]:
    """Return the reservations by lease."""
    hosts: dict[str, list[str]] = collections.defaultdict(list)
    for row in connection.execute(sa.select(_ALLOCATIONS).order_by(
            _ALLOCATIONS.c.id)):
        hosts[row.reservation_id].append(row.compute_host_id)
    asked = {row['reservation_id']: {
        key: value for key, value in row.items()
        if key not in ('id', 'reservation_id')}
        for table in (_WHOLE, _SERVERS)
        for row in connection.execute(sa.select(table)).mappings()}
    found: dict[str, list[Reservation]] = collections.defaultdict(list)
    for row in connection.execute(sa.select(_RESERVATIONS).order_by(
            _RESERVATIONS.c.id)):
        found[row.lease_id].append(Reservation(
            row.id, row.resource_type or '', row.status or '',
            asked.get(row.id), tuple(hosts[row.id]),
            bool(row.resources_changed), _seconds(row.created_at),
            _seconds(row.updated_at)))
    return found


def _seconds(date: datetime.datetime | None) -> int | None:
    """Return the seconds of a date, which Blazar writes in UTC."""
    return None if date is None else int(
        date.replace(tzinfo=datetime.UTC).timestamp())
