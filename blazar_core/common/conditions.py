# SPDX-License-Identifier: Apache-2.0

"""Conditions of a lease: why it waits, is delayed, has failed or ended early.

A lease has at most one condition of each :class:`Type`. Its row stores them in
the order in which they were set, each with ``type``, ``reason`` (a code),
``message`` (a sentence for its user), ``since`` (seconds since the epoch) and
``details``. The status reason of a lease consists of the messages of its
conditions. Decisions depend on types, reasons and details, never on messages.
"""

import dataclasses
import enum
import sys
import typing as ty

#: A condition as it is stored in the row of its lease.
Row: ty.TypeAlias = dict[str, ty.Any]


class Type(enum.StrEnum):
    """Types of conditions."""

    WAITING = 'Waiting'
    START_DELAYED = 'StartDelayed'
    BUILD_FAILED = 'BuildFailed'
    CAPACITY_MISSING = 'CapacityMissing'
    NOT_EXTENDED = 'NotExtended'
    UNUSED = 'Unused'
    SNAPSHOT_DELAYED = 'SnapshotDelayed'
    EVENT_DEFERRED = 'EventDeferred'
    END_DELAYED = 'EndDelayed'
    POLICY_REPLACED = 'EndPolicyReplaced'
    FAILED = 'Failed'
    ENDED_EARLY = 'EndedEarly'
    ORPHANED = 'Orphaned'
    LIMIT_NEAR = 'LimitNear'


class Reason(enum.StrEnum):
    """Reasons of a condition, or of another change of a lease."""

    NO_CAPACITY = 'NoCapacity'
    SERVERS_ARE_MOVED = 'ServersAreMoved'
    HOSTS_IN_USE = 'HostsInUse'
    HOSTS_BOOTING = 'HostsBooting'
    SERVERS_IN_USE = 'ServersInUse'
    NO_VALID_HOST = 'NoValidHost'
    SERVERS_FAILED = 'ServersFailed'
    HOSTS_LOST = 'HostsLost'
    REFUSED = 'Refused'
    NO_SERVER_BOOTED = 'NoServerBooted'
    LOW_USE = 'LowUse'
    NOT_YET_POSSIBLE = 'NotYetPossible'
    GRACE_PERIOD = 'GracePeriod'
    SERVERS_REMAIN = 'ServersRemain'
    HOSTED_SERVERS = 'HostedServers'
    CLEANING = 'Cleaning'
    NOT_CLOSED = 'NotClosed'
    TIMED_OUT = 'TimedOut'
    NEVER_STARTED = 'NeverStarted'
    SERVERS_DELETED = 'ServersDeleted'
    PROJECT_NOT_FOUND = 'ProjectNotFound'
    USER_NOT_FOUND = 'UserNotFound'
    CAPACITY_RESTORED = 'CapacityRestored'
    AUTO_EXTENDED = 'AutoExtended'
    SERVERS_REMOVED = 'ServersRemoved'
    ADMITTED = 'Admitted'
    LIMIT_NEAR = 'LimitNear'


#: Types of conditions that are cleared when the lease has ended.
TRANSIENT = (
    Type.WAITING, Type.START_DELAYED, Type.NOT_EXTENDED, Type.UNUSED,
    Type.SNAPSHOT_DELAYED, Type.EVENT_DEFERRED, Type.END_DELAYED,
    Type.LIMIT_NEAR)


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """A condition to set.

    :ivar message: one or more whole sentences
    """

    type: Type
    reason: Reason
    message: str
    details: ty.Mapping[str, ty.Any] = dataclasses.field(default_factory=dict)


class _Lease(ty.Protocol):
    """A lease as far as it has conditions."""

    conditions: ty.Any


def find(rows: ty.Iterable[Row] | None, type_: Type,
         ) -> Row | None:
    """Return the condition of a type, or None."""
    return next((row for row in rows or () if row['type'] == type_), None)


def is_set(rows: ty.Iterable[Row] | None, like: Condition) -> bool:
    """Return whether a condition of the same type and reason is set, whatever
    its message.
    """
    row = find(rows, like.type)
    return row is not None and row['reason'] == like.reason


def status_reason(rows: ty.Iterable[Row] | None) -> str:
    """Return the messages of conditions, joined by spaces."""
    return ' '.join(row['message'] for row in rows or ())


def update(lease: _Lease, now: int, *changes: Condition | Type) -> bool:
    """Set and clear conditions of a lease.

    A new condition replaces the one of its type. It keeps ``since`` if the
    reason is the same, and if the clock of the process that set it was not
    ahead. If nothing changes, nothing is written.

    :param changes: conditions to set, and types to clear
    :returns: whether anything has changed
    """
    rows = changed(lease.conditions, now, *changes)
    if rows == lease.conditions:
        return False
    lease.conditions = rows
    return True


def holds(rows: ty.Sequence[Row] | None, *changes: Condition | Type) -> bool:
    """Return whether :func:`update` would change nothing."""
    # No time is corrected.
    return changed(rows, sys.maxsize, *changes) == (rows or None)


def changed(there: ty.Sequence[Row] | None, now: int,
            *changes: Condition | Type) -> list[Row] | None:
    """Return conditions as :func:`update` would set them, or None."""
    rows: list[Row] = [*(there or ())]
    for change in changes:
        type_ = change if isinstance(change, Type) else change.type
        before = find(rows, type_)
        new = None if isinstance(change, Type) else {
            'type': type_, 'reason': change.reason,
            'message': change.message, 'details': {**change.details},
            'since': min(now, before['since']) if before is not None and (
                before['reason'] == change.reason) else now}
        if new != before:
            rows = [row for row in rows if row is not before]
            rows += [] if new is None else [new]
    return rows or None
