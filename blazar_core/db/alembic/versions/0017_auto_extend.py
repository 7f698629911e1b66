# SPDX-License-Identifier: Apache-2.0

"""Leases that are prolonged by themselves.

Revision ID: 0017
Revises: 0016
"""

from alembic import op
import sqlalchemy as sa

revision = '0017'
down_revision = '0016'


def upgrade() -> None:
    op.add_column('leases', sa.Column(
        'auto_extend', sa.Integer, nullable=False, server_default='0'))
