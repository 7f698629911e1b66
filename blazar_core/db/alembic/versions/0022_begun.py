# SPDX-License-Identifier: Apache-2.0

"""Which enrolment of a host goes on.

Revision ID: 0022
Revises: 0021
"""

from alembic import op
import sqlalchemy as sa

revision = '0022'
down_revision = '0021'


def upgrade() -> None:
    op.add_column('hosts', sa.Column('begun', sa.BigInteger))
