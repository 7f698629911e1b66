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
_ID = sa.String(36)
_NAME = sa.String(255)
_TYPE = sa.String(66)
_WORD = sa.String(16)
_TIME = sa.BigInteger

#: The name of a table, and its columns and indexes.
_Table: ty.TypeAlias = tuple[str, list[ty.Any]]


def upgrade() -> None:
    # MariaDB compares texts exactly.
    collation = migration.exact_collation(op.get_bind())
    for tables in (_leases, _hosts, _servers, _processes):
        for name, parts in tables():
            op.create_table(
                name, *parts, mysql_engine='InnoDB', mysql_charset='utf8mb4',
                mysql_collate=collation)


def _key(kind: ty.Any, names: str) -> list[ty.Any]:
    return [sa.Column(name, kind, primary_key=True) for name in names.split()]


def _needed(kind: ty.Any, names: str) -> list[ty.Any]:
    return [sa.Column(name, kind, nullable=False) for name in names.split()]


def _optional(kind: ty.Any, names: str) -> list[ty.Any]:
    return [sa.Column(name, kind) for name in names.split()]


def _leases() -> ty.Iterator[_Table]:
    """Yield the tables of leases."""
    yield 'leases', [
        *_key(_ID, 'id'),
        *_needed(_NAME, 'name project_id user_id'),
        *_needed(sa.String(64), 'on_end'),
        *_needed(_WORD, 'status lease_type'),
        *_needed(_TIME, 'start_date end_date created_at updated_at'),
        *_needed(sa.BigInteger, 'generation'),
        *_needed(sa.Integer, 'grace_period cleaning_time auto_extend'),
        *_optional(_TIME, 'before_end_date deleted_at ending_at retry_until '
                          'admitted_at used_at no_show_at preflight_at'),
        *_optional(sa.BigInteger, 'duration'),
        *_optional(sa.Integer, 'retry_interval'),
        *_optional(_ID, 'permit recurrence_id'),
        *_optional(_NAME, 'description'),
        *_optional(sa.JSON, 'conditions warnings tags'),
        sa.Index('leases_admitted_idx', 'project_id', 'admitted_at'),
        sa.Index('leases_project_idx', 'project_id', 'status'),
        sa.Index('leases_project_start_idx', 'project_id', 'start_date', 'id'),
        sa.Index('leases_recurrence_idx', 'recurrence_id', 'start_date'),
        sa.Index('leases_start_idx', 'start_date', 'id'),
        sa.Index('leases_status_idx', 'status', 'end_date')]
    yield 'reservations', [
        *_key(_ID, 'id'),
        sa.Column('lease_id', _ID, sa.ForeignKey('leases.id'), nullable=False),
        *_needed(_TYPE, 'resource_type'),
        *_needed(_WORD, 'status'),
        *_needed(sa.Integer, 'amount'),
        *_needed(sa.JSON, 'resources'),
        *_needed(_TIME, 'created_at updated_at'),
        *_optional(sa.JSON, 'params spec'),
        *_optional(_TIME, 'moved_at'),
        sa.Index('reservations_lease_idx', 'lease_id')]
    yield 'events', [
        *_key(_ID, 'id'),
        sa.Column('lease_id', _ID, sa.ForeignKey('leases.id'), nullable=False),
        *_needed(_TYPE, 'event_type'),
        *_needed(_WORD, 'status'),
        *_needed(_TIME, 'time run_at claimed_until created_at updated_at'),
        *_needed(sa.Integer, 'attempts deferrals'),
        *_optional(_NAME, 'claimed_by'),
        *_optional(_WORD, 'action'),
        sa.Index('events_run_at_idx', 'status', 'run_at'),
        sa.Index('events_lease_idx', 'lease_id'),
        sa.Index('events_time_idx', 'status', 'time', 'run_at'),
        sa.Index('events_type_idx', 'status', 'event_type', 'run_at')]
    yield 'deferred_builds', [
        sa.Column('lease_id', _ID, sa.ForeignKey('leases.id'),
                  primary_key=True),
        *_needed(_LONG, 'encrypted'),
        *_needed(sa.Boolean, 'only_if_lost'),
        *_needed(_TIME, 'created_at')]
    yield 'credentials', [
        *_key(_ID, 'lease_id'),
        *_needed(sa.Text, 'encrypted'),
        *_optional(sa.JSON, 'replaced'),
        *_needed(_TIME, 'created_at')]
    yield 'projects', [
        *_key(_NAME, 'id'),
        *_needed(sa.BigInteger, 'generation')]
    yield 'recurrences', [
        *_key(_ID, 'id'),
        *_needed(sa.String(320), 'rule'),
        *_needed(sa.String(128), 'timezone'),
        *_needed(_WORD, 'between_policy'),
        *_needed(sa.JSON, 'servers left_out'),
        *_optional(sa.JSON, 'shifted'),
        *_needed(_TIME, 'created_at')]
    yield 'request_keys', [
        *_key(sa.String(64), 'digest'),
        *_needed(sa.String(64), 'asked'),
        *_needed(_ID, 'lease_id'),
        *_needed(_TIME, 'created_at'),
        sa.Index('request_keys_created_idx', 'created_at'),
        sa.Index('request_keys_lease_idx', 'lease_id')]
    yield 'usage_records', [
        *_key(_SERIAL, 'id'),
        *_needed(_ID, 'reservation_id lease_id'),
        *_needed(_NAME, 'project_id'),
        *_needed(_TYPE, 'resource_type'),
        *_needed(_WORD, 'kind'),
        *_needed(sa.SmallInteger, 'sign'),
        *_needed(_TIME, 'start_date end_date recorded_at'),
        *_needed(sa.JSON, 'resources hosts'),
        sa.Index('usage_records_end_idx', 'end_date'),
        sa.Index('usage_records_lease_idx', 'lease_id', 'recorded_at'),
        sa.Index('usage_records_project_idx', 'project_id', 'end_date')]


def _hosts() -> ty.Iterator[_Table]:
    """Yield the tables of hosts, and of what is booked on them."""
    yield 'hosts', [
        *_key(_SERIAL, 'id'),
        sa.Column('uuid', _ID, nullable=False, unique=True),
        *_needed(_NAME, 'name service_host'),
        *_needed(_TYPE, 'pool'),
        *_needed(sa.JSON, 'capacity usage properties'),
        *_needed(sa.BigInteger, 'generation'),
        *_needed(_TIME, 'updated_at'),
        *_optional(sa.JSON, 'units consumers interruptible extra boot_times'),
        *_optional(_WORD, 'enrollment power_state'),
        *_optional(_ID, 'assigned_to'),
        *_optional(sa.Boolean, 'reservable'),
        *_optional(sa.Text, 'power_error'),
        *_optional(sa.BigInteger, 'enrolled_generation power_lead'),
        *_optional(_TIME, 'enrolled_at vacated_at cleaning_until cleaned_at '
                          'overdue_at lent_at power_at power_until '
                          'power_claimed_until recheck_at'),
        sa.Index('ix_hosts_enrollment', 'enrollment'),
        sa.Index('ix_hosts_assigned_to', 'assigned_to'),
        sa.Index('ix_hosts_power_state', 'power_state'),
        sa.Index('ix_hosts_recheck_at', 'recheck_at'),
        sa.Index('ix_hosts_service_host', 'service_host')]
    yield 'host_properties', [
        *_key(sa.String(64), 'name'),
        *_needed(sa.Boolean, 'private')]
    yield 'outages', [
        sa.Column('host_id', _SERIAL, sa.ForeignKey('hosts.id'),
                  primary_key=True, autoincrement=False),
        *_key(_WORD, 'kind'),
        *_needed(sa.Text, 'reason'),
        *_needed(_TIME, 'seen_at'),
        *_optional(_TIME, 'began_at back_at fenced_at')]
    yield 'bookings', [
        *_key(_SERIAL, 'id'),
        sa.Column('reservation_id', _ID, sa.ForeignKey('reservations.id')),
        sa.Column('host_id', _SERIAL, sa.ForeignKey('hosts.id')),
        sa.Column('server_id', _ID, unique=True),
        *_optional(_WORD, 'outage'),
        *_needed(_TIME, 'start_date end_date'),
        *_needed(sa.JSON, 'resources'),
        *_needed(sa.Boolean, 'running'),
        *_optional(sa.BigInteger, 'migrating_to'),
        *_optional(_TIME, 'dispatched_at failed_at claimed_at host_failed_at '
                          'recorded_at'),
        sa.Index('bookings_end_idx', 'end_date'),
        sa.Index('bookings_host_idx', 'host_id', 'end_date', 'start_date'),
        sa.Index('bookings_reservation_idx', 'reservation_id')]
    yield 'changes', [
        *_key(_SERIAL, 'id'),
        *_needed(sa.BigInteger, 'host_id generation'),
        *_needed(sa.Integer, 'change_count'),
        *_optional(_TIME, 'start_date end_date'),
        *_optional(sa.JSON, 'resources'),
        *_needed(sa.SmallInteger, 'sign'),
        *_needed(_TIME, 'created_at'),
        sa.Index('changes_host_idx', 'host_id', 'generation')]


def _servers() -> ty.Iterator[_Table]:
    """Yield the tables of single servers."""
    yield 'interruptible_servers', [
        *_key(_ID, 'server_id'),
        *_needed(_NAME, 'project_id user_id'),
        *_needed(sa.Integer, 'lead_time notice cleaning_time safe_for'),
        *_needed(_WORD, 'on_evict'),
        *_needed(sa.Boolean, 'resume'),
        *_needed(_TIME, 'safe_by created_at checked_at'),
        *_optional(_ID, 'credential_id'),
        *_optional(_TIME, 'safe_until evicted_at resume_at'),
        sa.Index('interruptible_checked_idx', 'checked_at'),
        sa.Index('interruptible_credential_idx', 'credential_id'),
        sa.Index('interruptible_evicted_idx', 'evicted_at'),
        sa.Index('interruptible_project_idx', 'project_id', 'server_id'),
        sa.Index('interruptible_resume_idx', 'resume_at')]
    yield 'server_moves', [
        *_key(_SERIAL, 'id'),
        *_needed(_ID, 'lease_id server_id'),
        *_needed(_NAME, 'project_id'),
        *_needed(_WORD, 'reason status'),
        *_needed(sa.BigInteger, 'source'),
        *_optional(sa.BigInteger, 'target'),
        *_needed(sa.JSON, 'resources'),
        *_needed(sa.Integer, 'attempts'),
        *_needed(_TIME, 'next_at updated_at'),
        *_optional(_TIME, 'requested_at'),
        sa.Index('ix_server_moves_lease_id', 'lease_id'),
        sa.Index('ix_server_moves_updated_at', 'updated_at'),
        sa.Index('server_moves_open_idx', 'reason', 'status', 'next_at'),
        sa.Index('server_moves_project_idx', 'project_id', 'requested_at')]
    yield 'slot_builds', [
        *_key(_ID, 'server_id'),
        *_needed(sa.Boolean, 'apart'),
        *_needed(_LONG, 'encrypted'),
        *_needed(_TIME, 'created_at')]
    yield 'would_end', [
        *_key(_ID, 'server_id'),
        *_needed(_NAME, 'project_id user_id'),
        *_needed(_TIME, 'created_at end_date claimed_until'),
        *_optional(_TIME, 'notified_at'),
        sa.Index('would_end_end_idx', 'end_date')]


def _processes() -> ty.Iterator[_Table]:
    """Yield the tables of the processes themselves."""
    yield 'counters', [
        *_key(sa.String(64), 'name'),
        *_key(sa.String(190), 'labels'),
        *_needed(sa.BigInteger, 'value')]
    yield 'leaders', [
        *_key(sa.String(64), 'name'),
        *_optional(_NAME, 'worker'),
        *_needed(_TIME, 'claimed_until due_at')]
    yield 'settings', [
        *_key(_NAME, 'name'),
        *_needed(sa.JSON, 'value'),
        *_needed(_TIME, 'updated_at')]
