# SPDX-License-Identifier: Apache-2.0

"""When the end of a lease began.

Revision ID: 0033
Revises: 0032
"""

from alembic import op
import sqlalchemy as sa

revision = '0033'
down_revision = '0032'


def upgrade() -> None:
    op.add_column('leases', sa.Column('ending_at', sa.BigInteger))
    op.execute(sa.text("UPDATE leases SET ending_at = updated_at "
                       "WHERE status = 'TERMINATING'"))
