# SPDX-License-Identifier: Apache-2.0

"""Conditions of a lease: why it waits, is delayed, has failed or ended early.

A lease has at most one condition of each :class:`Type`. Its row keeps them in
the order in which they were set, each with ``type``, ``reason`` (a code),
``message`` (a sentence for its user), ``since`` (seconds since the epoch) and
``details``. The status reason of a lease is the messages of its conditions.
Decisions are made by types, reasons and details, never by messages.
"""

import dataclasses
import enum
import typing as ty

__all__ = ['Condition', 'Reason', 'Row', 'TRANSIENT', 'Type', 'changed',
           'find', 'holds', 'is_set', 'status_reason', 'update']

#: A condition as the row of its lease has it.
Row: ty.TypeAlias = dict[str, ty.Any]


class Type(enum.StrEnum):
    """What a condition is about."""

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


class Reason(enum.StrEnum):
    """Why a lease has a condition, or something else of it has changed."""

    NO_CAPACITY = 'NoCapacity'
    SERVERS_ARE_MOVED = 'ServersAreMoved'
    HOSTS_IN_USE = 'HostsInUse'
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


#: The types of what is to be done yet; of a lease that is over nothing is.
TRANSIENT = (
    Type.WAITING, Type.START_DELAYED, Type.NOT_EXTENDED, Type.UNUSED,
    Type.SNAPSHOT_DELAYED, Type.EVENT_DEFERRED, Type.END_DELAYED)


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """A condition to be set.

    :ivar message: a whole sentence or several
    """

    type: Type
    reason: Reason
    message: str
    details: ty.Mapping[str, ty.Any] = dataclasses.field(default_factory=dict)


class _Lease(ty.Protocol):
    """What has conditions."""

    conditions: ty.Any


def find(rows: ty.Iterable[Row] | None, type_: Type,
         ) -> Row | None:
    """Return the condition of a type; None: there is none."""
    return next((row for row in rows or () if row['type'] == type_), None)


def is_set(rows: ty.Iterable[Row] | None, like: Condition) -> bool:
    """Return whether there is a condition of the same type and reason,
    whatever its message.
    """
    row = find(rows, like.type)
    return row is not None and row['reason'] == like.reason


def status_reason(rows: ty.Iterable[Row] | None) -> str:
    """Return the messages of conditions, one after the other."""
    return ' '.join(row['message'] for row in rows or ())


def update(lease: _Lease, now: int, *changes: Condition | Type) -> bool:
    """Set and clear conditions of a lease.

    One that is set replaces that of its type, and keeps ``since`` while its
    reason is the same. Nothing is written where nothing changes.

    :param changes: conditions to set, and types to clear
    :returns: whether that changed anything
    """
    rows = changed(lease.conditions, now, *changes)
    if rows == lease.conditions:
        return False
    lease.conditions = rows
    return True


def holds(rows: ty.Sequence[Row] | None, *changes: Condition | Type) -> bool:
    """Return whether :func:`update` would change nothing."""
    return changed(rows, 0, *changes) == (rows or None)


def changed(there: ty.Sequence[Row] | None, now: int,
            *changes: Condition | Type) -> list[Row] | None:
    """Return conditions as :func:`update` makes them; None: there are none."""
    rows: list[Row] = [*(there or ())]
    for change in changes:
        type_ = change if isinstance(change, Type) else change.type
        before = find(rows, type_)
        new = None if isinstance(change, Type) else {
            'type': type_, 'reason': change.reason,
            'message': change.message, 'details': {**change.details},
            'since': before['since'] if before is not None and (
                before['reason'] == change.reason) else now}
        if new != before:
            rows = [row for row in rows if row is not before]
            rows += [] if new is None else [new]
    return rows or None
