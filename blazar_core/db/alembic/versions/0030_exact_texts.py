# SPDX-License-Identifier: Apache-2.0

"""Texts, such as ids, are compared exactly on MariaDB and MySQL, too.

Revision ID: 0030
Revises: 0029
"""

import logging

from alembic import op
import sqlalchemy as sa

from blazar_core.db import migration

LOG = logging.getLogger(__name__)

revision = '0030'
down_revision = '0029'

#: The foreign keys of this revision, parents before children: the table, its
#: column, and the table to whose id that refers.
KEYS = (('reservations', 'lease_id', 'leases'),
        ('events', 'lease_id', 'leases'),
        ('held_builds', 'lease_id', 'leases'),
        ('bookings', 'reservation_id', 'reservations'),
        ('bookings', 'host_id', 'hosts'),
        ('outages', 'host_id', 'hosts'))


def upgrade() -> None:
    """Neither of these databases rolls back what changes a table: a run that
    follows an interrupted one may find any of the keys gone.
    """
    connection = op.get_bind()
    if connection.dialect.name not in ('mysql', 'mariadb'):
        return
    exact = migration.exact_collation(connection)
    inspector = sa.inspect(connection)
    tables = sorted({*inspector.get_table_names()} - {'alembic_version'})
    # A column of a foreign key cannot be changed alone.
    for table in tables:
        for key in inspector.get_foreign_keys(table):
            if key['name'] is not None:
                op.drop_constraint(key['name'], table, type_='foreignkey')
    for table in tables:
        op.execute(f'ALTER TABLE `{table}` CONVERT TO CHARACTER SET utf8mb4 '
                   f'COLLATE {exact}')
    # With the check of all rows, to create them takes most of the time.
    op.execute('SET SESSION foreign_key_checks = 0')
    try:
        for table, column, parent in KEYS:
            _delete_orphans(connection, table, column, parent)
            op.create_foreign_key(None, table, parent, [column], ['id'])
    finally:
        op.execute('SET SESSION foreign_key_checks = 1')


def _delete_orphans(connection: sa.Connection, table: str, column: str,
                    parent: str) -> None:
    """Delete rows without their parent, which are of no use: only a process
    that ran while the keys were gone has written such.
    """
    deleted = connection.execute(sa.text(
        f'DELETE FROM {table} WHERE {column} IS NOT NULL AND NOT EXISTS ('
        f'SELECT 1 FROM {parent} WHERE {parent}.id = {table}.{column})'
    )).rowcount
    if deleted:
        LOG.warning('Table %s: deleted %s rows whose %s is not in %s',
                    table, deleted, column, parent)
