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
            for key in inspector.get_foreign_keys(table)]
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
