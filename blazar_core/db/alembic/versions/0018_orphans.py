# SPDX-License-Identifier: Apache-2.0

"""Leases whose project or user does not exist any more.

Revision ID: 0018
Revises: 0017
"""

from alembic import op
import sqlalchemy as sa

revision = '0018'
down_revision = '0017'


def upgrade() -> None:
    op.create_table(
        'orphans',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('missing', sa.String(16), nullable=False),
        sa.Column('seen_at', sa.BigInteger, nullable=False),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('told_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
