# SPDX-License-Identifier: Apache-2.0
"""What lets us act for the owners of leases.

Revision ID: 0003
Revises: 0002
"""

from alembic import op
import sqlalchemy as sa

revision = '0003'
down_revision = '0002'


def upgrade() -> None:
    op.create_table(
        'credentials',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('sealed', sa.Text, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
