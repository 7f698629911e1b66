# SPDX-License-Identifier: Apache-2.0

"""From when on servers may be asked to leave hosts that are away.

Revision ID: 0026
Revises: 0025
"""

from alembic import op
import sqlalchemy as sa

revision = '0026'
down_revision = '0025'


def upgrade() -> None:
    op.add_column('bookings', sa.Column('relocate_at', sa.BigInteger))
    op.add_column('bookings', sa.Column('relocate_tries', sa.Integer))
    op.add_column('outages', sa.Column('fenced_at', sa.BigInteger))
