# SPDX-License-Identifier: Apache-2.0

"""Hosts that are no compute nodes.

Revision ID: 0010
Revises: 0009
"""

from alembic import op
import sqlalchemy as sa

revision = '0010'
down_revision = '0009'


def upgrade() -> None:
    op.add_column('hosts', sa.Column(
        'pool', sa.String(66), nullable=False, server_default='compute'))
