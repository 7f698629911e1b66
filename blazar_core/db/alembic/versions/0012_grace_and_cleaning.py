# SPDX-License-Identifier: Apache-2.0

"""Servers have some time left after the end, and hosts are cleaned.

Revision ID: 0012
Revises: 0011
"""

from alembic import op
import sqlalchemy as sa

revision = '0012'
down_revision = '0011'


def upgrade() -> None:
    for name in ('grace_period', 'cleaning_time'):
        op.add_column('leases', sa.Column(
            name, sa.Integer, nullable=False, server_default='0'))
    for name in ('emptied_at', 'cleaning_until', 'cleaned_at', 'overdue_at'):
        op.add_column('hosts', sa.Column(name, sa.BigInteger))
