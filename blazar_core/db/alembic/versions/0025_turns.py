# SPDX-License-Identifier: Apache-2.0

"""What one process at a time does for all of them.

Revision ID: 0025
Revises: 0024
"""

from alembic import op
import sqlalchemy as sa

revision = '0025'
down_revision = '0024'


def upgrade() -> None:
    op.create_table(
        'turns',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('worker', sa.String(255)),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('due_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
