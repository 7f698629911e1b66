# SPDX-License-Identifier: Apache-2.0

"""Servers that move so that there is room for a lease.

Revision ID: 0019
Revises: 0018
"""

from alembic import op
import sqlalchemy as sa

revision = '0019'
down_revision = '0018'


def upgrade() -> None:
    op.create_table(
        'moves',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('source', sa.BigInteger, nullable=False),
        sa.Column('target', sa.BigInteger, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('asked_at', sa.BigInteger),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
