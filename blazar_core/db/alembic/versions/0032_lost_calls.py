# SPDX-License-Identifier: Apache-2.0

"""Builds that are sent by a listener only if their request died.

Revision ID: 0032
Revises: 0031
"""

from alembic import op
import sqlalchemy as sa

revision = '0032'
down_revision = '0031'


def upgrade() -> None:
    op.add_column('held_builds', sa.Column(
        'only_if_lost', sa.Boolean, nullable=False,
        server_default='0'))
