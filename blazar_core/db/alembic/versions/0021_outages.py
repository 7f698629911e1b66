# SPDX-License-Identifier: Apache-2.0

"""Hosts that are away for a time.

Revision ID: 0021
Revises: 0020
"""

from alembic import op
import sqlalchemy as sa

revision = '0021'
down_revision = '0020'


def upgrade() -> None:
    op.create_table(
        'outages',
        sa.Column('host_id', sa.BigInteger().with_variant(
            sa.Integer(), 'sqlite'), sa.ForeignKey('hosts.id'),
            primary_key=True, autoincrement=False),
        sa.Column('kind', sa.String(16), primary_key=True),
        sa.Column('reason', sa.Text, nullable=False),
        sa.Column('seen_at', sa.BigInteger, nullable=False),
        sa.Column('began_at', sa.BigInteger),
        sa.Column('back_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
    with op.batch_alter_table('bookings') as table:
        table.alter_column('reservation_id', nullable=True,
                           existing_type=sa.String(36))
        table.add_column(sa.Column('outage', sa.String(16)))
        table.add_column(sa.Column('stranded_at', sa.BigInteger))
