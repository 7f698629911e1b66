# SPDX-License-Identifier: Apache-2.0

"""All tables of the first release.

Revision ID: 0001
Revises:
"""

import typing as ty

from alembic import op
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from blazar_core.db import migration

revision = '0001'
down_revision = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')
_LONG = sa.Text().with_variant(mysql.MEDIUMTEXT(), 'mysql', 'mariadb')


def upgrade() -> None:
    _changes()
    _counters()
    _credentials()
    _host_properties()
    _hosts()
    _interruptible_servers()
    _leases()
    _projects()
    _recurrences()
    _request_keys()
    _server_moves()
    _settings()
    _slot_builds()
    _leaders()
    _usage_records()
    _would_end()
    _events()
    _deferred_builds()
    _outages()
    _reservations()
    _bookings()


def _create(name: str, *parts: ty.Any) -> None:
    """Create a table whose texts MariaDB compares exactly."""
    op.create_table(
        name, *parts, mysql_engine='InnoDB', mysql_charset='utf8mb4',
        mysql_collate=migration.exact_collation(op.get_bind()))


def _changes() -> None:
    _create(
        'changes',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('host_id', sa.BigInteger, nullable=False),
        sa.Column('generation', sa.BigInteger, nullable=False),
        sa.Column('change_count', sa.Integer, nullable=False),
        sa.Column('start_date', sa.BigInteger),
        sa.Column('end_date', sa.BigInteger),
        sa.Column('resources', sa.JSON),
        sa.Column('sign', sa.SmallInteger, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Index('changes_host_idx', 'host_id', 'generation'))


def _counters() -> None:
    _create(
        'counters',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('labels', sa.String(190), primary_key=True),
        sa.Column('value', sa.BigInteger, nullable=False))


def _credentials() -> None:
    _create(
        'credentials',
        sa.Column('lease_id', sa.String(36), primary_key=True),
        sa.Column('encrypted', sa.Text, nullable=False),
        sa.Column('replaced', sa.JSON),
        sa.Column('created_at', sa.BigInteger, nullable=False))


def _host_properties() -> None:
    _create(
        'host_properties',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('private', sa.Boolean, nullable=False))


def _hosts() -> None:
    _create(
        'hosts',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('uuid', sa.String(36), nullable=False, unique=True),
        sa.Column('name', sa.String(255), nullable=False),
        sa.Column('service_host', sa.String(255), nullable=False),
        sa.Column('pool', sa.String(66), nullable=False),
        sa.Column('capacity', sa.JSON, nullable=False),
        sa.Column('units', sa.JSON),
        sa.Column('usage', sa.JSON, nullable=False),
        sa.Column('consumers', sa.JSON),
        sa.Column('interruptible', sa.JSON),
        sa.Column('properties', sa.JSON, nullable=False),
        sa.Column('enrollment', sa.String(16)),
        sa.Column('enrolled_generation', sa.BigInteger),
        sa.Column('reservable', sa.Boolean),
        sa.Column('extra', sa.JSON),
        sa.Column('enrolled_at', sa.BigInteger),
        sa.Column('assigned_to', sa.String(36)),
        sa.Column('vacated_at', sa.BigInteger),
        sa.Column('cleaning_until', sa.BigInteger),
        sa.Column('cleaned_at', sa.BigInteger),
        sa.Column('overdue_at', sa.BigInteger),
        sa.Column('lent_at', sa.BigInteger),
        sa.Column('power_state', sa.String(16)),
        sa.Column('power_at', sa.BigInteger),
        sa.Column('power_until', sa.BigInteger),
        sa.Column('power_lead', sa.BigInteger),
        sa.Column('power_error', sa.Text),
        sa.Column('power_claimed_until', sa.BigInteger),
        sa.Column('boot_times', sa.JSON),
        sa.Column('generation', sa.BigInteger, nullable=False),
        sa.Column('recheck_at', sa.BigInteger),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('ix_hosts_enrollment', 'enrollment'),
        sa.Index('ix_hosts_assigned_to', 'assigned_to'),
        sa.Index('ix_hosts_power_state', 'power_state'),
        sa.Index('ix_hosts_recheck_at', 'recheck_at'),
        sa.Index('ix_hosts_service_host', 'service_host'))


def _interruptible_servers() -> None:
    _create(
        'interruptible_servers',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('user_id', sa.String(255), nullable=False),
        sa.Column('lead_time', sa.Integer, nullable=False),
        sa.Column('notice', sa.Integer, nullable=False),
        sa.Column('cleaning_time', sa.Integer, nullable=False),
        sa.Column('credential_id', sa.String(36)),
        sa.Column('safe_for', sa.Integer, nullable=False),
        sa.Column('safe_by', sa.BigInteger, nullable=False),
        sa.Column('on_evict', sa.String(16), nullable=False),
        sa.Column('resume', sa.Boolean, nullable=False),
        sa.Column('safe_until', sa.BigInteger),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('checked_at', sa.BigInteger, nullable=False),
        sa.Column('evicted_at', sa.BigInteger),
        sa.Column('resume_at', sa.BigInteger),
        sa.Index('interruptible_checked_idx', 'checked_at'),
        sa.Index('interruptible_credential_idx', 'credential_id'),
        sa.Index('interruptible_evicted_idx', 'evicted_at'),
        sa.Index('interruptible_project_idx', 'project_id', 'server_id'),
        sa.Index('interruptible_resume_idx', 'resume_at'))


def _leases() -> None:
    _create(
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
        sa.Column('conditions', sa.JSON),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Column('deleted_at', sa.BigInteger),
        sa.Column('ending_at', sa.BigInteger),
        sa.Column('permit', sa.String(36)),
        sa.Column('generation', sa.BigInteger, nullable=False),
        sa.Column('grace_period', sa.Integer, nullable=False),
        sa.Column('cleaning_time', sa.Integer, nullable=False),
        sa.Column('lease_type', sa.String(16), nullable=False),
        sa.Column('retry_interval', sa.Integer),
        sa.Column('retry_until', sa.BigInteger),
        sa.Column('duration', sa.BigInteger),
        sa.Column('admitted_at', sa.BigInteger),
        sa.Column('auto_extend', sa.Integer, nullable=False),
        sa.Column('used_at', sa.BigInteger),
        sa.Column('no_show_at', sa.BigInteger),
        sa.Column('recurrence_id', sa.String(36)),
        sa.Column('warnings', sa.JSON),
        sa.Column('preflight_at', sa.BigInteger),
        sa.Column('description', sa.String(255)),
        sa.Column('tags', sa.JSON),
        sa.Index('leases_admitted_idx', 'project_id', 'admitted_at'),
        sa.Index('leases_project_idx', 'project_id', 'status'),
        sa.Index('leases_project_start_idx', 'project_id', 'start_date', 'id'),
        sa.Index('leases_recurrence_idx', 'recurrence_id', 'start_date'),
        sa.Index('leases_start_idx', 'start_date', 'id'),
        sa.Index('leases_status_idx', 'status', 'end_date'))


def _projects() -> None:
    _create(
        'projects',
        sa.Column('id', sa.String(255), primary_key=True),
        sa.Column('generation', sa.BigInteger, nullable=False))


def _recurrences() -> None:
    _create(
        'recurrences',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('rule', sa.String(320), nullable=False),
        sa.Column('timezone', sa.String(128), nullable=False),
        sa.Column('between_policy', sa.String(16), nullable=False),
        sa.Column('servers', sa.JSON, nullable=False),
        sa.Column('left_out', sa.JSON, nullable=False),
        sa.Column('shifted', sa.JSON),
        sa.Column('created_at', sa.BigInteger, nullable=False))


def _request_keys() -> None:
    _create(
        'request_keys',
        sa.Column('digest', sa.String(64), primary_key=True),
        sa.Column('asked', sa.String(64), nullable=False),
        sa.Column('lease_id', sa.String(36), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Index('request_keys_created_idx', 'created_at'),
        sa.Index('request_keys_lease_idx', 'lease_id'))


def _server_moves() -> None:
    _create(
        'server_moves',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('lease_id', sa.String(36), nullable=False),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('server_id', sa.String(36), nullable=False),
        sa.Column('reason', sa.String(16), nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('source', sa.BigInteger, nullable=False),
        sa.Column('target', sa.BigInteger),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('attempts', sa.Integer, nullable=False),
        sa.Column('next_at', sa.BigInteger, nullable=False),
        sa.Column('requested_at', sa.BigInteger),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('ix_server_moves_lease_id', 'lease_id'),
        sa.Index('ix_server_moves_updated_at', 'updated_at'),
        sa.Index('server_moves_open_idx', 'reason', 'status', 'next_at'),
        sa.Index('server_moves_project_idx', 'project_id', 'requested_at'))


def _settings() -> None:
    _create(
        'settings',
        sa.Column('name', sa.String(255), primary_key=True),
        sa.Column('value', sa.JSON, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False))


def _slot_builds() -> None:
    _create(
        'slot_builds',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('apart', sa.Boolean, nullable=False),
        sa.Column('encrypted', _LONG, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False))


def _leaders() -> None:
    _create(
        'leaders',
        sa.Column('name', sa.String(64), primary_key=True),
        sa.Column('worker', sa.String(255)),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('due_at', sa.BigInteger, nullable=False))


def _usage_records() -> None:
    _create(
        'usage_records',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('reservation_id', sa.String(36), nullable=False),
        sa.Column('lease_id', sa.String(36), nullable=False),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('resource_type', sa.String(66), nullable=False),
        sa.Column('kind', sa.String(16), nullable=False),
        sa.Column('sign', sa.SmallInteger, nullable=False),
        sa.Column('start_date', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('hosts', sa.JSON, nullable=False),
        sa.Column('recorded_at', sa.BigInteger, nullable=False),
        sa.Index('usage_records_end_idx', 'end_date'),
        sa.Index('usage_records_lease_idx', 'lease_id', 'recorded_at'),
        sa.Index('usage_records_project_idx', 'project_id', 'end_date'))


def _would_end() -> None:
    _create(
        'would_end',
        sa.Column('server_id', sa.String(36), primary_key=True),
        sa.Column('project_id', sa.String(255), nullable=False),
        sa.Column('user_id', sa.String(255), nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('notified_at', sa.BigInteger),
        sa.Index('would_end_end_idx', 'end_date'))


def _events() -> None:
    _create(
        'events',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  nullable=False),
        sa.Column('event_type', sa.String(66), nullable=False),
        sa.Column('time', sa.BigInteger, nullable=False),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('run_at', sa.BigInteger, nullable=False),
        sa.Column('attempts', sa.Integer, nullable=False),
        sa.Column('deferrals', sa.Integer, nullable=False),
        sa.Column('claimed_by', sa.String(255)),
        sa.Column('claimed_until', sa.BigInteger, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Column('action', sa.String(16)),
        sa.Index('events_run_at_idx', 'status', 'run_at'),
        sa.Index('events_lease_idx', 'lease_id'),
        sa.Index('events_time_idx', 'status', 'time', 'run_at'),
        sa.Index('events_type_idx', 'status', 'event_type', 'run_at'))


def _deferred_builds() -> None:
    _create(
        'deferred_builds',
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  primary_key=True),
        sa.Column('encrypted', _LONG, nullable=False),
        sa.Column('only_if_lost', sa.Boolean, nullable=False),
        sa.Column('created_at', sa.BigInteger, nullable=False))


def _outages() -> None:
    _create(
        'outages',
        sa.Column('host_id', _SERIAL, sa.ForeignKey('hosts.id'),
                  primary_key=True, autoincrement=False),
        sa.Column('kind', sa.String(16), primary_key=True),
        sa.Column('reason', sa.Text, nullable=False),
        sa.Column('seen_at', sa.BigInteger, nullable=False),
        sa.Column('began_at', sa.BigInteger),
        sa.Column('back_at', sa.BigInteger),
        sa.Column('fenced_at', sa.BigInteger))


def _reservations() -> None:
    _create(
        'reservations',
        sa.Column('id', sa.String(36), primary_key=True),
        sa.Column('lease_id', sa.String(36), sa.ForeignKey('leases.id'),
                  nullable=False),
        sa.Column('resource_type', sa.String(66), nullable=False),
        sa.Column('amount', sa.Integer, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('params', sa.JSON),
        sa.Column('spec', sa.JSON),
        sa.Column('status', sa.String(16), nullable=False),
        sa.Column('moved_at', sa.BigInteger),
        sa.Column('created_at', sa.BigInteger, nullable=False),
        sa.Column('updated_at', sa.BigInteger, nullable=False),
        sa.Index('reservations_lease_idx', 'lease_id'))


def _bookings() -> None:
    _create(
        'bookings',
        sa.Column('id', _SERIAL, primary_key=True),
        sa.Column('reservation_id', sa.String(36),
                  sa.ForeignKey('reservations.id')),
        sa.Column('host_id', _SERIAL, sa.ForeignKey('hosts.id')),
        sa.Column('outage', sa.String(16)),
        sa.Column('server_id', sa.String(36), unique=True),
        sa.Column('start_date', sa.BigInteger, nullable=False),
        sa.Column('end_date', sa.BigInteger, nullable=False),
        sa.Column('resources', sa.JSON, nullable=False),
        sa.Column('dispatched_at', sa.BigInteger),
        sa.Column('failed_at', sa.BigInteger),
        sa.Column('claimed_at', sa.BigInteger),
        sa.Column('running', sa.Boolean, nullable=False),
        sa.Column('migrating_to', sa.BigInteger),
        sa.Column('host_failed_at', sa.BigInteger),
        sa.Column('recorded_at', sa.BigInteger),
        sa.Index('bookings_end_idx', 'end_date'),
        sa.Index('bookings_host_idx', 'host_id', 'end_date', 'start_date'),
        sa.Index('bookings_reservation_idx', 'reservation_id'))
