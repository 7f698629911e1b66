# SPDX-License-Identifier: Apache-2.0

"""Conditions of leases that this package sets, and how they are written."""

import dataclasses
import typing as ty

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.db import api
from blazar_core.db import models

_T, _R = conditions.Type, conditions.Reason


NOT_FREE = conditions.Condition(
    _T.START_DELAYED, _R.HOSTS_IN_USE,
    'The hosts are not free yet; the start is retried.')
BOOTING = conditions.Condition(
    _T.START_DELAYED, _R.HOSTS_BOOTING,
    'The hosts are being switched on; the lease starts when they are ready.')
NOT_LEFT = conditions.Condition(
    _T.START_DELAYED, _R.SERVERS_IN_USE,
    'The servers are still in the previous occurrence; the start is retried.')
NOT_CLOSED = conditions.Condition(
    _T.END_DELAYED, _R.NOT_CLOSED,
    'The reservation could not be closed yet; closing is retried.')
GRACE = conditions.Condition(
    _T.END_DELAYED, _R.GRACE_PERIOD,
    'The lease has ended; its servers run until its grace period expires.')
CLEANING = conditions.Condition(
    _T.END_DELAYED, _R.CLEANING, 'The hosts are being cleaned.')
LEFT = conditions.Condition(
    _T.END_DELAYED, _R.HOSTED_SERVERS,
    'The hosts are freed when the servers on them are deleted.')
#: By what no longer exists.
ORPHANED = {
    'project': conditions.Condition(
        _T.ORPHANED, _R.PROJECT_NOT_FOUND,
        'The project of the lease no longer exists.'),
    'user': conditions.Condition(
        _T.ORPHANED, _R.USER_NOT_FOUND,
        'The user of the lease no longer exists.')}


def deferred(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease of which an event is deferred."""
    return conditions.Condition(
        _T.EVENT_DEFERRED, _R.NOT_YET_POSSIBLE,
        f'An event is retried: {event_type}: {why}',
        {'event_type': event_type, 'why': why})


def not_closed(why: ty.Iterable[str]) -> conditions.Condition:
    """Return the condition of a lease that cannot be closed yet.

    :param why: sentences
    """
    return dataclasses.replace(NOT_CLOSED, message=' '.join(
        [NOT_CLOSED.message, *why]))


def refused(why: str) -> conditions.Condition:
    """Return the condition of a lease whose end is tried again."""
    return conditions.Condition(
        _T.END_DELAYED, _R.SERVERS_REMAIN, f'The end is retried: {why}')


def no_image(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease whose snapshots are not made yet."""
    return conditions.Condition(
        _T.SNAPSHOT_DELAYED, _R.REFUSED,
        f'The snapshots are retried: {event_type}: {why}',
        {'event_type': event_type})


#: Returns the changes of the conditions of a lease.
Changes: ty.TypeAlias = ty.Callable[
    [models.Lease], ty.Sequence[conditions.Condition | conditions.Type]]


def explain(database: api.Database, clock: clocks.Clock, lease_id: str,
            changes: Changes, known: models.Lease | None = None) -> None:
    """Change the conditions of a lease, unless they hold already.

    :param known: the lease as it was just read; None: read it
    """
    if known is None:
        with database.reader() as session:
            lease = api.found(session, lease_id)
            if conditions.holds(lease.conditions, *changes(lease)):
                return
    elif conditions.holds(known.conditions, *changes(known)):
        return
    database.retried(_explain, database, clock, lease_id, changes)


def _explain(database: api.Database, clock: clocks.Clock, lease_id: str,
             changes: Changes) -> None:
    with database.writer() as session:
        lease, now = api.locked(session, lease_id), clock.now()
        if conditions.update(lease, now, *changes(lease)):
            lease.updated_at = now


def put_off(server_ids: ty.Sequence[str], why: str) -> conditions.Condition:
    """Return the condition of a lease whose servers have no host yet."""
    return conditions.Condition(
        _T.START_DELAYED, _R.NO_VALID_HOST,
        f'Servers {", ".join(server_ids)}: no valid host yet; retrying. {why}',
        {'servers': [*server_ids]})
