# SPDX-License-Identifier: Apache-2.0

"""A database as OpenStack Blazar 18 leaves it, for tests.

The columns are those of Blazar's migrations on MariaDB; SQLite gets the same
ones here. Columns that our code never reads have values as Blazar writes them.
"""

import datetime
import json
import os
import typing as ty

import fixtures
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from tests import databases


def _text() -> ty.Any:
    return sa.Text().with_variant(
        mysql.MEDIUMTEXT(), 'mysql', 'mariadb')


def _table(metadata: sa.MetaData, name: str, *columns: sa.Column[ty.Any],
           ) -> None:
    sa.Table(name, metadata, sa.Column('created_at', sa.DateTime),
             sa.Column('updated_at', sa.DateTime),
             sa.Column('id', sa.String(36), primary_key=True), *columns,
             mysql_engine='InnoDB')


def _column(name: str, kind: ty.Any, of: str | None = None,
            needed: bool = False, **more: ty.Any) -> sa.Column[ty.Any]:
    """Return a column; ``of`` is the table that a foreign key refers to."""
    return sa.Column(name, kind, *(
        [sa.ForeignKey(f'{of}.id')] if of else []), nullable=not needed,
        **more)


def _schema() -> sa.MetaData:
    found = sa.MetaData()
    uuid, short, long = sa.String(36), sa.String(13), sa.String(255)
    _table(found, 'leases', _column('name', sa.String(80), needed=True),
           _column('user_id', long), _column('project_id', long),
           _column('start_date', sa.DateTime, needed=True),
           _column('end_date', sa.DateTime, needed=True),
           _column('trust_id', uuid), _column('status', long),
           _column('degraded', sa.Boolean, needed=True,
                   server_default=sa.false()))
    _table(found, 'reservations',
           _column('lease_id', uuid, 'leases', needed=True),
           _column('resource_id', uuid),
           _column('resource_type', sa.String(66)), _column('status', short),
           *(_column(name, sa.Boolean, needed=True, server_default=sa.false())
             for name in ('missing_resources', 'resources_changed')))
    _table(found, 'events', _column('lease_id', uuid, 'leases'),
           _column('event_type', sa.String(66)), _column('time', sa.DateTime),
           _column('status', short))
    _table(found, 'resource_properties',
           _column('resource_type', long, needed=True),
           _column('property_name', long, needed=True),
           _column('private', sa.Boolean, needed=True,
                   server_default=sa.false()))
    _table(found, 'computehosts',
           *(_column(name, kind, needed=True) for name, kind in (
               ('vcpus', sa.Integer), ('cpu_info', _text()),
               ('hypervisor_type', _text()),
               ('hypervisor_version', sa.Integer), ('memory_mb', sa.Integer),
               ('local_gb', sa.Integer), ('trust_id', uuid),
               ('availability_zone', long))),
           _column('hypervisor_hostname', long), _column('status', short),
           _column('service_name', long),
           _column('reservable', sa.Boolean, needed=True,
                   server_default=sa.true()))
    _table(found, 'computehost_extra_capabilities',
           _column('computehost_id', uuid, 'computehosts'),
           _column('property_id', long, 'resource_properties', needed=True),
           _column('capability_value', _text(), needed=True))
    _table(found, 'computehost_reservations',
           _column('reservation_id', uuid, 'reservations'),
           _column('aggregate_id', sa.Integer),
           _column('resource_properties', _text()),
           _column('count_range', uuid),
           _column('hypervisor_properties', _text()),
           _column('before_end', uuid))
    _table(found, 'instance_reservations',
           _column('reservation_id', uuid, 'reservations'),
           *(_column(name, sa.Integer, needed=True) for name in (
               'vcpus', 'memory_mb', 'disk_gb', 'amount')),
           _column('affinity', sa.Boolean),
           _column('resource_properties', _text()),
           _column('flavor_id', uuid), _column('aggregate_id', sa.Integer),
           _column('server_group_id', uuid))
    _table(found, 'computehost_allocations',
           _column('compute_host_id', uuid, 'computehosts'),
           _column('reservation_id', uuid, 'reservations'))
    return found


SCHEMA = _schema()


class BlazarDatabase(fixtures.Fixture):
    """A Blazar database, empty at first.

    :ivar url: its URL
    """

    def __init__(self, kind: str = 'sqlite') -> None:
        super().__init__()
        self._kind = kind

    def setUp(self) -> None:
        # A skip within _setUp() would count as an error.
        if self._kind != 'sqlite':
            databases.server(self._kind)
        super().setUp()

    def _setUp(self) -> None:
        if self._kind == 'sqlite':
            folder = self.useFixture(fixtures.TempDir()).path
            self.url = f'sqlite:///{os.path.join(folder, "blazar.sqlite")}'
        else:
            there = databases.server(self._kind)
            name = f'blazar_{uuidutils.generate_uuid(dashed=False)}'
            there.execute(f'CREATE DATABASE {name}')
            self.addCleanup(there.execute, f'DROP DATABASE {name}')
            self.url = there.url(name)
        self.engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        SCHEMA.create_all(self.engine)
        self._names: dict[str, str] = {}

    def insert(self, table: str, **values: ty.Any) -> str:
        """Write a row and return its id."""
        values.setdefault('id', uuidutils.generate_uuid())
        with self.engine.begin() as connection:
            connection.execute(SCHEMA.tables[table].insert(), {
                name: _date(value) if name in (
                    'start_date', 'end_date', 'time', 'created_at',
                    'updated_at') else value
                for name, value in values.items()})
        return ty.cast(str, values['id'])

    def execute(self, statement: str, **values: ty.Any) -> None:
        """Execute a statement."""
        with self.engine.begin() as connection:
            connection.execute(sa.text(statement), values)

    def host(self, name: str, host_id: str, reservable: bool = True,
             **extra: str) -> str:
        """Add a host with its extra capabilities."""
        self.insert(
            'computehosts', id=host_id, vcpus=4, cpu_info='{}',
            hypervisor_type='QEMU', hypervisor_version=1, memory_mb=8192,
            local_gb=100, trust_id='t', availability_zone='nova',
            hypervisor_hostname=name, service_name=name,
            reservable=reservable)
        for key, value in extra.items():
            if key not in self._names:
                self._names[key] = self.insert(
                    'resource_properties', resource_type='physical:host',
                    property_name=key)
            self.insert(
                'computehost_extra_capabilities', computehost_id=host_id,
                property_id=self._names[key], capability_value=value)
        return host_id

    def hide(self, name: str) -> None:
        """Make a capability private, so that users cannot ask for it."""
        self.execute('UPDATE resource_properties SET private = :yes '
                     'WHERE property_name = :name', yes=True, name=name)

    def lease(self, start: int, end: int, *hosts: str,
              status: str = 'PENDING', reserved: str | None = None,
              project: str = 'project', name: str = 'lease',
              resource_type: str = 'physical:host', least: int = 1,
              most: int | None = None, before_end: str = '',
              created_at: int | None = None, **asked: ty.Any,
              ) -> tuple[str, str]:
        """Add a lease with a reservation of these hosts and return their ids.

        :param asked: properties, as JSON
        """
        lease_id = self.insert(
            'leases', name=name, user_id='user', project_id=project,
            start_date=start, end_date=end, trust_id='t', status=status,
            created_at=start - 100 if created_at is None else created_at)
        reservation_id = self.insert(
            'reservations', lease_id=lease_id, resource_type=resource_type,
            status=reserved or status.lower()[:13], created_at=start - 100)
        if resource_type == 'physical:host':
            self.insert(
                'computehost_reservations', reservation_id=reservation_id,
                aggregate_id=1, before_end=before_end,
                count_range=f'{least}-{most or max(least, len(hosts))}', **{
                    name: json.dumps(asked[name]) if name in asked else ''
                    for name in ('resource_properties',
                                 'hypervisor_properties')})
        self._allocate(reservation_id, hosts)
        done = 'DONE' if status == 'ACTIVE' else 'UNDONE'
        for event_type, time, state in (
                ('start_lease', start, done), ('end_lease', end, 'UNDONE'),
                ('before_end_lease', end - 10, 'UNDONE')):
            self.insert('events', lease_id=lease_id, event_type=event_type,
                        time=time, status=state)
        return lease_id, reservation_id

    def _allocate(self, reservation_id: str, hosts: ty.Iterable[str]) -> None:
        for host_id in hosts:
            self.insert('computehost_allocations', compute_host_id=host_id,
                        reservation_id=reservation_id)

    def servers(self, lease_id: str, *hosts: str, vcpus: int = 1,
                memory_mb: int = 1, disk_gb: int = 0,
                amount: int | None = None, affinity: bool | None = None,
                status: str = 'pending', **asked: ty.Any) -> str:
        """Add a reservation of servers to a lease, one for each host.

        :param asked: properties or a flavor, as JSON
        :returns: the id of the reservation
        """
        reservation_id = self.insert(
            'reservations', lease_id=lease_id, status=status,
            resource_type='flavor:instance' if 'flavor' in asked else (
                'virtual:instance'))
        self.insert(
            'instance_reservations', reservation_id=reservation_id,
            vcpus=vcpus, memory_mb=memory_mb, disk_gb=disk_gb,
            amount=len(hosts) if amount is None else amount,
            affinity=affinity, resource_properties=''.join(
                json.dumps(one) for one in asked.values()),
            flavor_id=reservation_id, aggregate_id=1)
        self._allocate(reservation_id, hosts)
        return reservation_id

    def lease_of_servers(self, start: int, end: int, *hosts: str,
                         **values: ty.Any) -> tuple[str, str]:
        """Add a lease with only such a reservation; return both ids."""
        of_lease = {key: values.pop(key) for key in (
            'status', 'project', 'name', 'created_at') if key in values}
        lease_id, reservation_id = self.lease(start, end, **of_lease)
        for table, column in (('computehost_reservations', 'reservation_id'),
                              ('reservations', 'id')):
            self.execute(f'DELETE FROM {table} WHERE {column} = :id',
                         id=reservation_id)
        return lease_id, self.servers(lease_id, *hosts, **{
            'status': of_lease.get('status', 'pending').lower(), **values})


#: A flavor as Blazar stores it: as Nova's API represents it.
FLAVOR = {
    'id': '7', 'name': 'big', 'ram': 64, 'disk': 3, 'vcpus': 2, 'swap': '',
    'OS-FLV-EXT-DATA:ephemeral': 4, 'OS-FLV-DISABLED:disabled': False,
    'os-flavor-access:is_public': True, 'rxtx_factor': 1.0,
    'extra_specs': {'hw:cpu_policy': 'dedicated'}}


def _date(value: ty.Any) -> ty.Any:
    """Convert seconds since the epoch to a date as Blazar writes it."""
    return value if value is None else datetime.datetime.fromtimestamp(
        value, datetime.UTC).replace(tzinfo=None)
