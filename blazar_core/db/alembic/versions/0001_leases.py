# SPDX-License-Identifier: Apache-2.0

"""Leases, reservations, events, hosts, bookings, held builds.

Revision ID: 0001
Revises:
"""

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

revision = '0001'
down_revision = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')
_LONG = sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb')


def upgrade() -> None:
    _leases()
    _reservations()
    _events()
    _hosts()
    _bookings()
    _held_builds()


def _leases() -> None:
    op.create_table(
        'leases',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('name', sa.String(255), nullable=False),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('user_id', sa.String(255), nullable=False),
        sa.Column('start_date', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('before_end_date', sa.BigInteger),
        sa.Column('on_end', sa.String(64), nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('status_reason', sa.Text, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('leases_project_idx', 'project_id', 'status'),
        sa.Index('leases_status_idx', 'status', 'end_date'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')


def _reservations() -> None:
    op.create_table(
        'reservations',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  nullable=False),
        sa.Column('resource_type', sa.String(66), nullable=False),
        sa.Column('amount', sa.Integer, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('reservations_lease_idx', 'lease_id'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')


def _events() -> None:
    op.create_table(
        'events',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  nullable=False),
        sa.Column('event_type', sa.String(66), nullable=False),
        sa.Column('time', sa.BigInteger, nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('due', sa.BigInteger, nullable=False),
        sa.Column('attempts', sa.Integer, nullable=False),
        sa.Column('claimed_by', sa.String(255)),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Index('events_lease_idx', 'lease_id'),
        sa.Index('events_due_idx', 'status', 'due'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')


def _hosts() -> None:
    op.create_table(
        'hosts',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('uuid', sa.String(36), nullable=False, unique=True),
        sa.Column('name', sa.String(255), nullable=False),
        sa.Column('service_host', sa.String(255), nullable=False),
        sa.Column('capacity', sa.JSON, nullable=False),
        sa.Column('usage', sa.JSON, nullable=False),
        sa.Column('generation', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('ix_hosts_service_host', 'service_host'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')


def _bookings() -> None:
    op.create_table(
        'bookings',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('reservation_id', sa.String(36),
                  sa.ForeignKey('reservations.id'), nullable=False),
        sa.Column('host_id', _SERIAL, sa.ForeignKey('hosts.id')),
        sa.Column('server_id', sa.String(36), nullable=False, unique=True),
        sa.Column('start_date', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('running', sa.Boolean, nullable=False),
        sa.Index('bookings_reservation_idx', 'reservation_id'),
        sa.Index('bookings_host_idx', 'host_id', 'end_date', 'start_date'),
        sa.Index('bookings_end_idx', 'end_date'),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')


def _held_builds() -> None:
    op.create_table(
        'held_builds',
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  primary_key=True),
        sa.Column('state', sa.String(16), nullable=False),
        sa.Column('sealed', _LONG, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('sent_at', sa.BigInteger),
        mysql_engine='InnoDB', mysql_charset='utf8mb4')
