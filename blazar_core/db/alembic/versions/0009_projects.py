# SPDX-License-Identifier: Apache-2.0

"""One decision about the leases of a project at a time.

Revision ID: 0009
Revises: 0008
"""

from alembic import op
import sqlalchemy as sa

revision = '0009'
down_revision = '0008'


def upgrade() -> None:
    op.create_table(
        'projects',
        sa.Column('id', sa.String(255), primary_key=True),
        sa.Column('generation', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
