# SPDX-License-Identifier: Apache-2.0

"""Builds of servers with reservation slots that are not sent yet.

Revision ID: 0036
Revises: 0035
"""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from blazar_core.db import migration

revision = '0036'
down_revision = '0035'


def upgrade() -> None:
    op.create_table(
        'slot_builds',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('apart', sa.Boolean, nullable=False),
        sa.Column('sealed', sa.Text().with_variant(
            mysql.MEDIUMTEXT(), 'mysql', 'mariadb'), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4',
        mysql_collate=migration.exact_collation(op.get_bind()))
