# SPDX-License-Identifier: Apache-2.0

"""Texts, such as ids, are compared exactly on MariaDB and MySQL, too.

Revision ID: 0030
Revises: 0029
"""

from alembic import op
import sqlalchemy as sa

from blazar_core.db import migration

revision = '0030'
down_revision = '0029'


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name not in ('mysql', 'mariadb'):
        return
    exact = migration.exact_collation(connection)
    inspector = sa.inspect(connection)
    tables = sorted({*inspector.get_table_names()} - {'alembic_version'})
    # A column of a foreign key cannot be changed alone.
    keys = [(table, key) for table in tables
            for key in inspector.get_foreign_keys(table) if key['name']]
    for table, key in keys:
        op.drop_constraint(key['name'], table, type_='foreignkey')
    for table in tables:
        op.execute(f'ALTER TABLE `{table}` CONVERT TO CHARACTER SET utf8mb4 '
                   f'COLLATE {exact}')
    for table, key in keys:
        op.create_foreign_key(
            key['name'], table, key['referred_table'],
            key['constrained_columns'], key['referred_columns'],
            **key['options'])
