# SPDX-License-Identifier: Apache-2.0

"""The project for whose lease a server is moved, so that moves can be paced.

Revision ID: 0029
Revises: 0028
"""

from alembic import op
import sqlalchemy as sa

revision = '0029'
down_revision = '0028'


def upgrade() -> None:
    op.add_column('moves', sa.Column('project_id', sa.String(255)))
    op.create_index('moves_project_idx', 'moves', ['project_id', 'asked_at'])
    op.create_index('ix_moves_updated_at', 'moves', ['updated_at'])
