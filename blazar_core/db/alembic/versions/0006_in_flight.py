# SPDX-License-Identifier: Apache-2.0
"""What is in flight: builds sent, servers placed, hosts to be asked again.

Revision ID: 0006
Revises: 0005
"""

from alembic import op
import sqlalchemy as sa

revision = '0006'
down_revision = '0005'


def upgrade() -> None:
    op.add_column('leases', sa.Column(
        'generation', sa.BigInteger, nullable=False, server_default='0'))
    op.add_column('reservations', sa.Column('moved_at', sa.BigInteger))
    op.add_column('hosts', sa.Column('recheck_at', sa.BigInteger))
    op.create_index('ix_hosts_recheck_at', 'hosts', ['recheck_at'])
    op.add_column('bookings', sa.Column('sent_at', sa.BigInteger))
    op.add_column('bookings', sa.Column('failed_at', sa.BigInteger))
    op.add_column('bookings', sa.Column('placed_at', sa.BigInteger))
    op.add_column('bookings', sa.Column('moving_to', sa.BigInteger))
    op.add_column('changes', sa.Column('parts', sa.Integer))
    op.create_table(
        'settings',
        sa.Column('name', sa.String(255), primary_key=True),
        sa.Column('value', sa.JSON, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False))
    # What runs was sent and placed; what is being built was sent.
    op.execute(sa.text('UPDATE bookings SET sent_at = start_date, '
                       'placed_at = start_date WHERE running'))
    op.execute(sa.text(
        "UPDATE bookings SET sent_at = start_date WHERE reservation_id IN ("
        "SELECT reservations.id FROM reservations JOIN leases ON "
        "leases.id = reservations.lease_id WHERE leases.status <> 'PENDING') "
        "AND server_id IS NOT NULL AND sent_at IS NULL"))
    # What had no host any more is what had failed.
    op.execute(sa.text('UPDATE bookings SET failed_at = sent_at '
                       'WHERE host_id IS NULL'))
    op.execute(sa.text(
        "DELETE FROM held_builds WHERE lease_id IN ("
        "SELECT id FROM leases WHERE status NOT IN ('PENDING', 'STARTING'))"))
    op.drop_column('held_builds', 'state')
    op.drop_column('held_builds', 'sent_at')
