# SPDX-License-Identifier: Apache-2.0


"""What the builds of leases lack, before they start.

Revision ID: 0023
Revises: 0022
"""

from alembic import op
import sqlalchemy as sa

revision = '0023'
down_revision = '0022'


def upgrade() -> None:
    op.add_column('leases', sa.Column('warnings', sa.JSON))
    op.add_column('leases', sa.Column('preflight_at', sa.BigInteger))
