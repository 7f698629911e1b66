# SPDX-License-Identifier: Apache-2.0
"""How often servers are migrated for leases of others.

The rows of moves say it. They stay when their lease is deleted, at least for
:data:`blazar_core.leases.purging.LEAST_AGE` seconds.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clock as clocks
from blazar_core.common import states
from blazar_core.db import models

__all__ = ['Left', 'PERIOD', 'Pace', 'left', 'resting', 'said']

#: Seconds over which the migrations of a project are counted.
PERIOD = 3600


class Pace(ty.NamedTuple):
    """
    :ivar interval: seconds between two migrations of a server
    :ivar per_hour: how many servers are migrated for the leases of a project
        within an hour; None: twice as many as for one lease
    """

    interval: int = 600
    per_hour: int | None = None


class Left(ty.NamedTuple):
    """How many more servers may be migrated for a project, and when there are
    more; None: not before others that are planned have been asked for.
    """

    remaining: int
    more_at: int | None


def resting(session: orm.Session, interval: int, now: int,
            ) -> dict[str, tuple[int, int]]:
    """The servers that were migrated too short a time ago to be so again.

    :param interval: seconds
    :returns: for each, until when, and the id of the host it went to
    """
    found = {}
    for row in session.execute(_RECENT, {'since': now - interval}):
        until = min(row.updated_at, now) + interval
        found[row.server_id] = until, row.target
    return found


def left(session: orm.Session, project_id: str, per_hour: int, lease_id: str,
         now: int) -> Left:
    """How many more servers may be migrated for the leases of a project.

    What is planned for others of its leases counts as if it was asked for.

    :param lease_id: of the lease whose own plan is about to be replaced
    """
    asked = [at for at in session.scalars(_ASKED, {
        'project': project_id, 'since': now - PERIOD}) if at is not None]
    planned = session.scalar(_PLANNED, {
        'project': project_id, 'lease': lease_id}) or 0
    return Left(max(0, per_hour - len(asked) - planned),
                min(asked[0], now) + PERIOD if asked else None)


def said(per_hour: int, interval: int, left: Left, most: int,
         resting: ty.Mapping[str, tuple[int, int]],
         wanted: ty.Collection[int]) -> ty.Iterator[str]:
    """What the pace keeps from being moved, and until when. Whose servers
    these are does not concern the owner of the lease.

    :param most: how many could be moved without it
    :param wanted: the ids of the hosts from which they would be moved
    """
    if left.remaining < most:
        more = '' if left.more_at is None else (
            f', the next one at {clocks.minute(left.more_at)} UTC')
        yield (f'For all leases of a project {per_hour} servers are migrated '
               f'within an hour at most: {left.remaining} more for now{more}.')
    until = [when for when, host_id in resting.values() if host_id in wanted]
    if until:
        yield (f'Servers that were migrated in the last {interval} seconds '
               f'stay where they are, the first of them until '
               f'{clocks.minute(min(until))} UTC.')


_RECENT = sa.select(
    models.Move.server_id, models.Move.updated_at, models.Move.target,
).where(
    models.Move.asked_at.is_not(None),
    models.Move.updated_at > sa.bindparam('since'),
).order_by(models.Move.updated_at)
_ASKED = sa.select(models.Move.asked_at).where(
    models.Move.project_id == sa.bindparam('project'),
    models.Move.asked_at > sa.bindparam('since'),
).order_by(models.Move.asked_at)
_PLANNED = sa.select(sa.func.count()).select_from(models.Move).join(
    models.Lease, models.Lease.id == models.Move.lease_id).where(
    models.Move.project_id == sa.bindparam('project'),
    models.Move.lease_id != sa.bindparam('lease'),
    models.Move.status == states.Move.PLANNED,
    models.Lease.status == states.Lease.IN_PROGRESS)
