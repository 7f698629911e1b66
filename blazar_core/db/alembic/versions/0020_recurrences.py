# SPDX-License-Identifier: Apache-2.0


"""Leases that recur.

Revision ID: 0020
Revises: 0019
"""

from alembic import op
import sqlalchemy as sa

revision = '0020'
down_revision = '0019'


def upgrade() -> None:
    op.create_table(
        'recurrences',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('rule', sa.String(320), nullable=False),
        sa.Column('timezone', sa.String(128), nullable=False),
        sa.Column('between_policy', sa.String(16), nullable=False),
        sa.Column('servers', sa.JSON, nullable=False),
        sa.Column('left_out', sa.JSON, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
    op.add_column('leases', sa.Column('recurrence_id', sa.String(36)))
    op.create_index('leases_recurrence_idx', 'leases',
                    ['recurrence_id', 'start_date'])
