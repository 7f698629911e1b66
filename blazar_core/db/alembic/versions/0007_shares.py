# SPDX-License-Identifier: Apache-2.0
"""Events that were put off, and those that go before others.

Revision ID: 0007
Revises: 0006
"""

from alembic import op
import sqlalchemy as sa

revision = '0007'
down_revision = '0006'


def upgrade() -> None:
    op.add_column('events', sa.Column(
        'waits', sa.Integer, nullable=False, server_default='0'))
    op.create_index('events_type_idx', 'events',
                    ['status', 'event_type', 'due'])
