# SPDX-License-Identifier: Apache-2.0

"""Leases that wait for room.

Revision ID: 0013
Revises: 0012
"""

from alembic import op
import sqlalchemy as sa

revision = '0013'
down_revision = '0012'


def upgrade() -> None:
    op.add_column('leases', sa.Column('lease_type', sa.String(16)))
    op.add_column('leases', sa.Column('retry_interval', sa.Integer))
    for name in ('retry_until', 'lasts', 'admitted_at'):
        op.add_column('leases', sa.Column(name, sa.BigInteger))
    op.create_index('leases_admitted_idx', 'leases',
                    ['project_id', 'admitted_at'])
