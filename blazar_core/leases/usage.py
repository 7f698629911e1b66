# SPDX-License-Identifier: Apache-2.0

"""Usage of a project by its leases, and its peak."""

import collections
import dataclasses
import json
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import rule
from blazar_core.capacity import selection
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import cloud_api

_RESERVED = models.Reservation.resources

#: Amounts by the option that limits them, or by the cloud's quota name.
Amounts: ty.TypeAlias = collections.Counter[str]


class Use(ty.NamedTuple):
    """The usage of a lease over a window."""

    window: model.Window
    amounts: ty.Mapping[str, int]
    own: bool
    user_id: str


@dataclasses.dataclass
class ProjectUsage:
    """The usage of a project by its leases."""

    others: Amounts = dataclasses.field(default_factory=collections.Counter)
    own: Amounts = dataclasses.field(default_factory=collections.Counter)
    #: The dates and the numbers of bookings of the lease to be checked.
    lease: set[tuple[ty.Any, ...]] = dataclasses.field(default_factory=set)
    uses: list[Use] = dataclasses.field(default_factory=list)
    #: The present windows of leases by id, including the grace period.
    windows: dict[str, model.Window] = dataclasses.field(default_factory=dict)
    #: The bookings of leases that wait for capacity.
    waiting: list[tuple[model.Window, model.Resources]] = dataclasses.field(
        default_factory=list)
    #: Each with the user of its lease.
    servers: list[tuple[str, cloud_api.CountedServer]] = dataclasses.field(
        default_factory=list)


def bookings_of(project_id: str, lease_id: str | None,
                serverless: ty.Collection[str],
                beside: ty.Collection[str]) -> sa.Select[ty.Any]:
    """Return a query with a row for each server in the leases of a project,
    and one for all equal free slots.

    Servers that were deleted or could not be built are not counted.

    :param serverless: the resource types whose bookings have no servers
    :param beside: leases that are changed with that one
    """
    not_over = sa.and_(models.Lease.project_id == project_id,
                       models.Lease.status.not_in(states.LEASE.final()))
    each = (
        models.Lease.id, (models.Lease.id == lease_id).label('own'),
        (models.Lease.id.in_(beside) if beside else sa.false()).label(
            'beside'),
        models.Lease.status.in_(states.SEEKING).label('waits'),
        sa.and_(models.Lease.status.in_(states.HOLDING),
                models.Booking.server_id.is_not(None),
                models.Booking.dispatched_at.is_(None)).label('held'),
        # A whole host counts as one, whatever its size. Cast to text, as
        # PostgreSQL does not group by JSON.
        sa.case((_RESERVED[model.HOST].as_integer().is_not(None),
                 sa.cast(_RESERVED, sa.Text)),
                else_=sa.cast(models.Booking.resources, sa.Text)
                ).label('kind'),
        models.Lease.user_id, models.Lease.start_date.label('first_date'),
        (models.Lease.end_date + models.Lease.grace_period).label(
            'last_date'), models.Booking.start_date,
        models.Booking.end_date, models.Booking.claimed_at,
        models.Booking.server_id, models.Booking.migrating_to)
    return sa.select(
        *each, sa.func.count(models.Booking.id).label('amount'),
        sa.func.count(sa.case((sa.or_(
            models.Reservation.params.is_(None),
            models.Reservation.resource_type.not_in(serverless)),
            models.Booking.id))).label('servers'),
        sa.select(sa.func.count()).select_from(models.Lease).where(
            not_over).correlate(None).scalar_subquery().label('leases'),
    ).select_from(models.Lease).outerjoin(
        models.Reservation, models.Reservation.lease_id == models.Lease.id,
    ).outerjoin(
        models.Booking, sa.and_(
            models.Booking.reservation_id == models.Reservation.id,
            models.Booking.failed_at.is_(None)),
    ).where(not_over).group_by(*(
        one.name if isinstance(one, sa.Label) and one.name in (
            'own', 'beside', 'waits', 'held', 'kind') else one
        for one in each))


def growing(connection: sa.Connection, rows: ty.Sequence[ty.Any],
            ) -> list[tuple[ty.Any, model.Resources]]:
    """Return the claims of servers on target hosts in excess of their
    bookings, because they are being resized.

    :param rows: of :func:`bookings_of`, with a host to move to
    """
    if not rows:
        return []
    claimed = {row.id: row.consumers for row in connection.execute(sa.select(
        models.Host.id, models.Host.consumers).where(
            models.Host.id.in_({row.migrating_to for row in rows})))}
    found: list[tuple[ty.Any, model.Resources]] = []
    for row in rows:
        amounts, _told = (claimed.get(row.migrating_to) or {}).get(
            row.server_id, ({}, 0))
        booked = json.loads(row.kind)
        found.append((row, {
            rc: amount - booked.get(rc, 0) for rc, amount in amounts.items()
            if amount > booked.get(rc, 0)}))
    return found


def bound(
        database: api.Database, project_id: str,
        lease_ids: ty.Collection[str | None], times: int,
        wanted: ty.Collection[int], connection: sa.Connection | None = None,
) -> selection.HostBound | None:
    """Return on how many hosts a project may have reservations, and on which
    it has.

    :param lease_ids: leases whose present hosts do not count, as they get
        others; None: a new one
    :param times: see :class:`.selection.HostBound`
    :param wanted: ids of the hosts that it would get
    :param connection: of the transaction to read in; None: of a new one
    :returns: None: it has reservations on all of these already that have not
        started
    """
    booking, host = models.Booking.__table__.c, models.Host.__table__.c
    node = orm.aliased(models.Host)
    of_project = (
        models.Lease.project_id == project_id,
        # Hosts of other pools do not keep servers off.
        node.pool == model.COMPUTE,
        models.Lease.status.not_in(states.LEASE.final()),
        models.Lease.id.not_in([one for one in lease_ids if one]))

    def asked(*columns: ty.Any) -> sa.Select[ty.Any]:
        return sa.select(*columns).select_from(models.Lease).join(
            models.Reservation, models.Reservation.lease_id == models.Lease.id,
        ).join(models.Booking).join(
            node, node.id == booking.host_id).where(*of_project)

    # A booking of a lease that has started may follow its server elsewhere.
    stays = models.Lease.status.in_((*states.BEFORE, *states.SEEKING))
    with database.connection(connection) as reader:
        # The subquery stops at the first booking of each host.
        own = frozenset(reader.scalars(sa.select(host.id).where(
            host.id.in_(wanted), sa.or_(
                host.pool != model.COMPUTE, asked(booking.id).where(
                    booking.host_id == host.id, stays).correlate(
                        models.Host.__table__).exists()))))
        if own.issuperset(wanted):
            return None
        found = reader.execute(asked(
            booking.host_id, sa.func.max(sa.case((stays, 1), else_=0)).label(
                'stays')).group_by(booking.host_id)).all()
        hosts, later = own.union(row.host_id for row in found), own.union(
            row.host_id for row in found if row.stays)
        if not hosts:
            return selection.HostBound(times, hosts, later, ())
        leases = reader.execute(asked(
            models.Lease.id, sa.func.min(booking.start_date).label('start'),
            sa.func.max(booking.end_date).label('end'),
            sa.func.count(booking.host_id.distinct()).label('hosts'),
        ).group_by(models.Lease.id).order_by(models.Lease.id)).all()
    return selection.HostBound(times, hosts, later, tuple(
        (model.Window(row.start, row.end), row.hosts) for row in leases))


def peaks(uses: ty.Collection[Use], new: Use) -> dict[str, int]:
    """Return the peak usage by leases during the time in which the new one
    uses more than before; by name, of what it uses more of.
    """
    return rule.peaks(
        ((one.window, one.amounts) for one in uses if not one.own),
        [(new.window, new.amounts)],
        ((one.window, one.amounts) for one in uses if one.own))
