# SPDX-License-Identifier: Apache-2.0

"""Reasons of leases that wait for capacity, and their order in a project."""

import sqlalchemy as sa

from blazar_core.common import conditions
from blazar_core.common import states
from blazar_core.db import models


def reason(why: str) -> conditions.Condition:
    """Return the condition of a lease that waits for capacity.

    :param why: reason why the last attempt failed
    """
    return conditions.Condition(
        conditions.Type.WAITING, conditions.Reason.NO_CAPACITY,
        f'The lease waits for capacity and is retried: {why}')


def made(why: str) -> conditions.Condition:
    """Return the condition of a lease for which servers are migrated.

    :param why: reason why it does not fit yet
    """
    return conditions.Condition(
        conditions.Type.WAITING, conditions.Reason.SERVERS_ARE_MOVED,
        f'The lease waits until migrations free its capacity: {why}')


def unready(lease: models.Lease, what: str) -> str:
    """Return why a lease that waits for capacity does not allow an operation.

    :param what: the operation, such as "it can be changed"
    """
    waits = ('Capacity is still being freed for lease' if
             lease.status == states.Lease.IN_PROGRESS else
             'Still waiting for capacity: lease')
    return f'{waits} {lease.id}: {what} once it is admitted.'


def behind(connection: sa.Connection, project_id: str,
           lease_id: str | None = None) -> str:
    """Return which lease of a project precedes a new or waiting one.

    :returns: a sentence; empty: none does
    """
    first = connection.execute(
        sa.select(models.Lease.id, models.Lease.name).where(
            models.Lease.project_id == project_id,
            models.Lease.status == states.Lease.WAITING)
        .order_by(models.Lease.created_at, models.Lease.id)).first()
    return '' if first is None or first.id == lease_id else (
        f'Lease {first.name} ({first.id}) of the project also waits for '
        'capacity, and is served first.')
