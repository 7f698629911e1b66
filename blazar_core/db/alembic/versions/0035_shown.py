# SPDX-License-Identifier: Apache-2.0

"""Occurrences whose dates the clocks skip; when hosts were enrolled.

Revision ID: 0035
Revises: 0034
"""

from alembic import op
import sqlalchemy as sa

revision = '0035'
down_revision = '0034'


def upgrade() -> None:
    op.add_column('recurrences', sa.Column('shifted', sa.JSON))
    op.add_column('hosts', sa.Column('enrolled_at', sa.BigInteger))
