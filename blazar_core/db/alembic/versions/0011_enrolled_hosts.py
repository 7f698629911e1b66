# SPDX-License-Identifier: Apache-2.0

"""Hosts that serve leases only, and who has all of one.

Revision ID: 0011
Revises: 0010
"""

from alembic import op
import sqlalchemy as sa

revision = '0011'
down_revision = '0010'


def upgrade() -> None:
    op.add_column('hosts', sa.Column('enrolment', sa.String(16)))
    op.add_column('hosts', sa.Column('reservable', sa.Boolean))
    op.add_column('hosts', sa.Column('extra', sa.JSON))
    op.add_column('hosts', sa.Column('held_by', sa.String(36)))
    for name in ('enrolment', 'held_by'):
        op.create_index(f'ix_hosts_{name}', 'hosts', [name])
    op.create_table(
        'host_properties',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('private', sa.Boolean, nullable=False))
