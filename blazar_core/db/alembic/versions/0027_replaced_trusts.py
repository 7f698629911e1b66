# SPDX-License-Identifier: Apache-2.0

"""Trusts of owners that were replaced while they may have been in use.

Revision ID: 0027
Revises: 0026
"""

from alembic import op
import sqlalchemy as sa

revision = '0027'
down_revision = '0026'


def upgrade() -> None:
    op.add_column('credentials', sa.Column('replaced', sa.JSON))
