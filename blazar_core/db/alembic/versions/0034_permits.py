# SPDX-License-Identifier: Apache-2.0

"""Which request or listener got the last permit to send a lease's builds.

Revision ID: 0034
Revises: 0033
"""

from alembic import op
import sqlalchemy as sa

revision = '0034'
down_revision = '0033'


def upgrade() -> None:
    op.add_column('leases', sa.Column('permit', sa.String(36)))
