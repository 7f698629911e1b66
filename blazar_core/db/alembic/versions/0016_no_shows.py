# SPDX-License-Identifier: Apache-2.0

"""Leases of which nobody has used anything: no-shows.

Revision ID: 0016
Revises: 0015
"""

from alembic import op
import sqlalchemy as sa

revision = '0016'
down_revision = '0015'


def upgrade() -> None:
    for name in ('used_at', 'no_show_at'):
        op.add_column('leases', sa.Column(name, sa.BigInteger))
    # Nobody noted of those that there are whether they were used.
    op.execute('UPDATE leases SET used_at = created_at')
