# SPDX-License-Identifier: Apache-2.0

"""Something is done at events.

Revision ID: 0014
Revises: 0013
"""

from alembic import op
import sqlalchemy as sa

revision = '0014'
down_revision = '0013'


def upgrade() -> None:
    op.add_column('events', sa.Column('action', sa.String(16)))
