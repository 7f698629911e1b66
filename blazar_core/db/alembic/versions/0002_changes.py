# SPDX-License-Identifier: Apache-2.0

"""What changed in the books, for those who keep them in memory.

Also: properties of hosts, and bookings that belong to no server yet.

Revision ID: 0002
Revises: 0001
"""

from alembic import op
import sqlalchemy as sa

revision = '0002'
down_revision = '0001'

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')


def upgrade() -> None:
    op.create_table(
        'changes',
        sa.Column('id', _SERIAL, primary_key=True),
        # No foreign key: it would lock the row of the host once more.
        sa.Column('host_id', sa.BigInteger, nullable=False),
        sa.Column('generation', sa.BigInteger, nullable=False),
        sa.Column('start_date', sa.BigInteger),
        sa.Column('end_date', sa.BigInteger),
        sa.Column('resources', sa.JSON),
        sa.Column('sign', sa.SmallInteger, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Index('changes_host_idx', 'host_id', 'generation'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
    with op.batch_alter_table('hosts') as hosts:
        hosts.add_column(sa.Column('properties', sa.JSON))
    op.execute("UPDATE hosts SET properties = '{}'")
    with op.batch_alter_table('hosts') as hosts:
        hosts.alter_column('properties', existing_type=sa.JSON,
                           nullable=False)
    with op.batch_alter_table('bookings') as bookings:
        bookings.alter_column('server_id', existing_type=sa.String(36),
                              nullable=True)
