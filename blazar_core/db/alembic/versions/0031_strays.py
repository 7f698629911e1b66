# SPDX-License-Identifier: Apache-2.0

"""Find events that a wrong clock has deferred.

Revision ID: 0031
Revises: 0030
"""

from alembic import op

revision = '0031'
down_revision = '0030'


def upgrade() -> None:
    op.create_index('events_time_idx', 'events', ['status', 'time', 'due'])
