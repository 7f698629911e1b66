# SPDX-License-Identifier: Apache-2.0

"""By which keys leases were asked for.

Revision ID: 0008
Revises: 0007
"""

from alembic import op
import sqlalchemy as sa

revision = '0008'
down_revision = '0007'


def upgrade() -> None:
    op.create_table(
        'request_keys',
        sa.Column('digest', sa.String(64), primary_key=True),
        sa.Column('asked', sa.String(64), nullable=False),
        sa.Column('lease_id', sa.String(36), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Index('request_keys_created_idx', 'created_at'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
