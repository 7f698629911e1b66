# SPDX-License-Identifier: Apache-2.0
"""Leases made by the API: what was asked for, flavors, deletion, pages.

Revision ID: 0004
Revises: 0003
"""

from alembic import op
import sqlalchemy as sa

revision = '0004'
down_revision = '0003'


def upgrade() -> None:
    op.add_column('leases', sa.Column('deleted_at', sa.BigInteger))
    op.add_column('reservations', sa.Column('params', sa.JSON))
    op.add_column('reservations', sa.Column('flavor', sa.JSON))
    op.add_column('events', sa.Column('created_at', sa.BigInteger))
    op.add_column('events', sa.Column('updated_at', sa.BigInteger))
    op.create_index('leases_start_idx', 'leases', ['start_date', 'id'])
    op.create_index('leases_project_start_idx', 'leases',
                    ['project_id', 'start_date', 'id'])
