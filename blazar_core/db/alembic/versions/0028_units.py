# SPDX-License-Identifier: Apache-2.0

"""What limits one server on a host.

Revision ID: 0028
Revises: 0027
"""

from alembic import op
import sqlalchemy as sa

revision = '0028'
down_revision = '0027'


def upgrade() -> None:
    op.add_column('hosts', sa.Column('units', sa.JSON(none_as_null=True)))
