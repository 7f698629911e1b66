# SPDX-License-Identifier: Apache-2.0
"""What each of those takes that make up the usage of a host.

Revision ID: 0005
Revises: 0004
"""

from alembic import op
import sqlalchemy as sa

revision = '0005'
down_revision = '0004'


def upgrade() -> None:
    op.add_column('hosts', sa.Column('consumers', sa.JSON))
