# SPDX-License-Identifier: Apache-2.0


"""Servers that would be over, if every boot were a lease.

Revision ID: 0015
Revises: 0014
"""

from alembic import op
import sqlalchemy as sa

revision = '0015'
down_revision = '0014'


def upgrade() -> None:
    op.create_table(
        'would_end',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('user_id', sa.String(255), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('told_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
    op.create_index('would_end_end_idx', 'would_end', ['end_date'])
