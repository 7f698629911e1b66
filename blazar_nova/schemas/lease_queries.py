# SPDX-License-Identifier: Apache-2.0

"""Queries for leases.

How a lease is described is in :mod:`blazar_core.leases.views`.
"""

import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views

#: A page ends with the statements that reach the first number of parts:
#: reservations, events and servers. The second is for a list without pages:
#: ten for each of 10,000 leases, which take some seconds and 200 MB.
_PARTS, _PARTS_OF_ALL = 20_000, 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """A query for leases, and their order; None: any.

    :ivar status: None: not those that are over, unless ``ended``
    :ivar tags: only leases that have all of these
    :ivar ended_after: also those that are over, with an end after this
    :ivar start: only leases that end after this and start before ``end``
    :ivar occurrences: whether to return each occurrence of a recurring lease;
        otherwise the first that is not over, or else the last, represents all
    :ivar sort: columns, and whether they descend
    :ivar marker: only leases after this one
    :ivar paged: whether the caller can request the rest
    """

    project_id: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    status: str | None = None
    resource_type: str | None = None
    start: int | None = None
    end: int | None = None
    sort: tuple[tuple[str, bool], ...] = (('start_date', False),)
    marker: str | None = None
    ended: bool = False
    ended_after: int | None = None
    limit: int = 1000
    paged: bool = True
    occurrences: bool = False


_GOES_ON = models.Lease.status.in_(states.GOING_ON)
#: The leases that may be degraded: few of all.
_MOVED = sa.select(models.Reservation.lease_id).where(
    models.Reservation.moved_at.is_not(None))
_LACKING = sa.select(models.Reservation.lease_id).join(models.Booking).where(
    sa.or_(models.Booking.host_id.is_(None),
           models.Booking.host_failed_at.is_not(None),
           models.Booking.failed_at.is_not(None)))


def owner_of_deleted(database: api.Database, lease_id: str) -> str | None:
    """Return the project of a lease that was deleted, or None."""
    with database.reader() as session:
        return session.scalar(sa.select(models.Lease.project_id).where(
            models.Lease.id == lease_id,
            models.Lease.deleted_at.is_not(None)))


def page(database: api.Database, query: Query,
         ) -> tuple[list[dict[str, ty.Any]], bool]:
    """Return the leases that match a query, and whether there are more.

    Executes four statements, and some more for several hundred leases. A page
    of very large leases is shorter than the limit. If a list without pages is
    too long, it is returned without leases that are over.

    :raises InvalidLeaseParams: if the marker is not a visible lease
    """
    with database.reader() as session:
        found = session.execute(_statement(query)).all()
        if not found and query.marker is not None and session.execute(
                _marked(sa.select(models.Lease.id), query)).first() is None:
            raise errors.InvalidLeaseParams(
                '"marker" is not the ID of one of these leases. Write the ID '
                'of the last lease of the previous page.')
        may_shrink = not query.paged and query.ended_after is not None
        described = [] if may_shrink and len(found) > query.limit else (
            views.described(session, found[:query.limit],
                            _PARTS if query.paged else _PARTS_OF_ALL))
    more = len(described) < len(found)
    if more and may_shrink:
        return page(database, dataclasses.replace(query, ended_after=None))
    return described, more


def listed(database: api.Database, ended: bool, host: str | None = None,
           degraded: bool = False) -> ty.Iterator[dict[str, ty.Any]]:
    """Yield all leases by start, oldest first, from one snapshot. Their parts
    are read when they are yielded, as there may be very many.

    :param ended: whether to include those that are over or were deleted
    :param host: only those that reserve capacity of the host of this name
    :param degraded: only those that are degraded
    :raises NotFound: if the host does not exist
    """
    chosen = sa.select(models.Lease.__table__).order_by(
        models.Lease.start_date, models.Lease.id)
    if degraded:
        few = sa.union(_MOVED, _LACKING).subquery()
        chosen = chosen.join(few, few.c.lease_id == models.Lease.id)
    named = sa.or_(models.Host.name == host, models.Host.service_host == host)
    if host is not None:
        chosen = chosen.where(models.Lease.id.in_(
            sa.select(models.Reservation.lease_id).join(models.Booking).join(
                models.Host, models.Host.id == models.Booking.host_id).where(
                    named)))
    with database.reader() as session:
        if host is not None and session.scalar(
                sa.select(models.Host.id).where(named).limit(1)) is None:
            raise views.unknown_host(host)
        found = session.execute(
            chosen if ended else chosen.where(_GOES_ON)).all()
        for first in range(0, len(found), views.AT_ONCE):
            yield from (one for one in views.described(
                session, found[first:first + views.AT_ONCE])
                if one['degraded'] or not degraded)


def _statement(query: Query) -> sa.Select[ty.Any]:
    lease = models.Lease
    chosen = sa.select(lease.__table__).where(*_conditions(query))
    # The id makes the order total.
    order = [*query.sort, ('id', query.sort[-1][1])]
    if query.marker is not None:
        chosen = chosen.where(_after(order, query))
    return chosen.order_by(*(
        sa.desc(getattr(lease, key)) if descending else getattr(lease, key)
        for key, descending in order)).limit(query.limit + 1)


def _marked(chosen: sa.Select[ty.Any], query: Query,
            lease: type[models.Lease] = models.Lease) -> sa.Select[ty.Any]:
    """Restrict a query to the marker, which may have ended meanwhile."""
    chosen = chosen.where(lease.id == query.marker)
    return chosen if query.project_id is None else chosen.where(
        lease.project_id == query.project_id)


def _after(order: ty.Sequence[tuple[str, bool]], query: Query,
           ) -> sa.ColumnElement[bool]:
    """Return the condition of rows after the marker. If the marker does not
    exist, no row fulfils it.
    """
    (key, descending), *rest = order
    marker = orm.aliased(models.Lease)
    column, value = getattr(models.Lease, key), _marked(
        sa.select(getattr(marker, key)), query, marker).scalar_subquery()
    beyond = column < value if descending else column > value
    if not rest:
        return ty.cast('sa.ColumnElement[bool]', beyond)
    return sa.or_(beyond, sa.and_(column == value, _after(rest, query)))


def _conditions(query: Query) -> list[sa.ColumnElement[bool]]:
    lease, over = models.Lease, states.LEASE.final()
    conditions: list[sa.ColumnElement[bool]] = []
    if query.ended or query.status in over:
        conditions.append(sa.or_(lease.deleted_at.is_(None),
                                 lease.status.not_in(over)))
    elif query.ended_after is None or query.status is not None:
        conditions.append(_GOES_ON)
    else:
        conditions.append(sa.or_(_GOES_ON, sa.and_(
            lease.status.in_(over), lease.deleted_at.is_(None),
            lease.end_date > query.ended_after)))
    if not query.occurrences:
        conditions.append(sa.or_(
            lease.recurrence_id.is_(None), ~_standing_before(over)))
    if query.project_id is not None:
        conditions.append(lease.project_id == query.project_id)
    if query.name is not None:
        conditions.append(lease.name == query.name)
    conditions += views.tagged(query.tags)
    if query.status == views.DELETING:
        conditions.append(lease.deleted_at.is_not(None))
    elif query.status is not None:
        conditions += [lease.status == query.status,
                       lease.deleted_at.is_(None)]
    if query.start is not None:
        conditions.append(lease.end_date > query.start)
    if query.end is not None:
        conditions.append(lease.start_date < query.end)
    if query.resource_type is not None:
        # A correlated count: for a rare type, PostgreSQL would otherwise
        # search all reservations first.
        conditions.append(sa.select(sa.func.count()).where(
            models.Reservation.lease_id == lease.id,
            models.Reservation.resource_type == query.resource_type,
        ).scalar_subquery() > 0)
    return conditions


def _standing_before(over: ty.Collection[str]) -> sa.ColumnElement[bool]:
    """Return the condition that another occurrence represents the series: the
    first that is not over, or else the last.
    """
    lease, other = models.Lease, orm.aliased(models.Lease)
    is_over = lease.status.in_(over)
    return sa.exists().where(
        other.recurrence_id == lease.recurrence_id, other.id != lease.id,
        sa.or_(
            sa.and_(other.status.not_in(over), sa.or_(
                is_over, other.start_date < lease.start_date)),
            sa.and_(is_over, other.status.in_(over),
                    other.deleted_at.is_(None),
                    other.start_date > lease.start_date)))
