# SPDX-License-Identifier: Apache-2.0

"""Which hosts a lease that is changed needs, and what stays where it is."""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import picking
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import making
from blazar_core.leases import resizing
from blazar_core.leases import views
from blazar_core.leases import waiting

__all__ = ['Plan', 'plan', 'window_of']

#: By the id of a reservation, what it becomes.
_Resized = ty.Mapping[str, making.NewReservation]


class Plan(ty.NamedTuple):
    """What a change needs hosts for.

    :ivar demands: by reservation: all of its servers, or those that are added
    :ivar instead_of: the bookings that it has
    :ivar kept: what stays where it is
    """

    demands: dict[str, model.Demand]
    window: model.Window
    instead_of: list[models.Booking]
    kept: list[picking.Kept]


def plan(session: orm.Session, lease: models.Lease, resized: _Resized,
         window: model.Window, grace_period: int | None, now: int) -> Plan:
    """What hosts are needed for, where a lease is to get another window, and
    its reservations become something else.

    :param grace_period: seconds; None: what it has
    :raises Outdated: when it has no servers any more
    :raises InvalidLeaseParams: when more is wanted of what is over
    """
    rows = lease.bookings
    if not rows:
        raise api.Outdated('its servers have gone meanwhile')
    booked = lease.booked(window, grace_period)
    demands = _demands(session, lease, resized)
    kept = _kept(lease, resized)
    if lease.status in states.BEGUN and window.end <= now:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} is over by then: nothing can be added to it. '
            f'Make another lease.')
    if kept:
        booked = model.Window(now, booked.end)
    return Plan(demands, booked, rows, kept)


def _kept(lease: models.Lease, resized: _Resized) -> list[picking.Kept]:
    """What stays where it is of a lease that has begun."""
    if lease.status not in states.BEGUN:
        return []
    on: dict[frozenset[tuple[str, int]], collections.Counter[int]] = (
        collections.defaultdict(collections.Counter))
    for one in lease.reservations:
        for row in resizing.kept(one, resized.get(one.id)):
            if row.host_id is not None:
                on[frozenset(row.resources.items())][row.host_id] += 1
    return [picking.Kept(dict(resources), hosts)
            for resources, hosts in on.items()]


def _demands(session: orm.Session, lease: models.Lease, resized: _Resized,
             ) -> dict[str, model.Demand]:
    """By reservation, what hosts are looked for.

    For all of its servers; for those that are added, if it has begun.
    """
    demands = {}
    for one in lease.reservations:
        wanted = resized.get(one.id)
        if lease.status in states.BEGUN:
            if wanted is not None and resizing.is_more(one, wanted):
                demands[one.id] = _added(session, one, wanted.demand)
        elif wanted is not None:
            demands[one.id] = wanted.demand
        else:
            demands[one.id] = _where_it_is(session, one)
    return demands


def _added(session: orm.Session, reservation: models.Reservation,
           demand: model.Demand) -> model.Demand:
    """A demand, for what it asks for beside what is there."""
    there = len(reservation.bookings) - resizing.beside(reservation)
    hosts = frozenset(_uuids(session, reservation.bookings))
    demand = dataclasses.replace(
        demand, count=demand.count - there, least=None
        if demand.least is None else max(0, demand.least - there))
    if demand.affinity is model.Affinity.SAME and hosts:
        return dataclasses.replace(demand, hosts=hosts)
    if demand.affinity is model.Affinity.DIFFERENT:
        return dataclasses.replace(demand, avoid=demand.avoid | hosts)
    return demand


def _uuids(session: orm.Session,
           rows: ty.Iterable[models.Booking]) -> ty.Iterable[str]:
    """The uuids of the hosts of bookings."""
    return session.scalars(sa.select(models.Host.uuid).where(
        models.Host.id.in_({row.host_id for row in rows})))


def _where_it_is(session: orm.Session,
                 reservation: models.Reservation) -> model.Demand:
    """The demand of a reservation that keeps to the hosts it has.

    Its servers may have to be apart: none of them gets more than the one
    with most has.
    """
    rows = reservation.bookings
    most = max(collections.Counter(row.host_id for row in rows).values())
    return model.Demand(
        model.WHOLE if reservation.whole else rows[0].resources, len(rows),
        model.Affinity.DIFFERENT, most, among=None,
        hosts=frozenset(_uuids(session, rows)))


def window_of(lease: models.Lease, start: int | None, end: int | None,
              was_end: int | None, now: int) -> model.Window:
    """The window that a lease would get.

    :param start: the new one; None: the one that it has; so is ``end``
    :param was_end: the end that it has to have until now; None: any
    :raises InvalidLeaseParams: when it cannot get that
    :raises Conflict: when it has another end than was thought
    """
    begun = lease.status in states.BEGUN
    if lease.status in states.SEEKING:
        raise errors.InvalidLeaseParams(
            f'{waiting.unready(lease, "it can be changed")} Until then, '
            f'delete it and ask for another one.')
    alone = lease.end_date + lease.grace_period
    if (lease.grace_period and lease.deleted_at is None and now < alone and
            lease.status == states.Lease.TERMINATING):
        raise errors.Conflict(
            f'Lease {lease.id} is over, and its servers are left alone '
            f'until {clocks.minute(alone)}. Make another lease.')
    if lease.deleted_at is not None or not begun and (
            lease.status not in states.BEFORE):
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} is {views.status(lease)}: it cannot be '
            f'changed. Make another lease.')
    if begun and lease.end_date <= now and (
            end not in (None, lease.end_date)):
        # Others may count on its room: what is still there stays too long.
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} is over since '
            f'{clocks.minute(lease.end_date)} UTC: its end cannot be moved. '
            f'Make another lease.')
    if begun and start not in (None, lease.start_date):
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has started: only its end, its name, its '
            f'events and amounts can be changed.')
    if was_end not in (None, lease.end_date):
        raise errors.Conflict(
            f'The end of lease {lease.id} was moved meanwhile.')
    start = lease.start_date if start is None else start
    end = lease.end_date if end is None else end
    # What is left alone may be overdue; what runs may end this second.
    late = (start, end) != (lease.start_date, lease.end_date) and (
        end < now if begun else min(start, end - 1) < now)
    if end <= start or late:
        raise errors.InvalidLeaseParams(
            'End date must be later than start date, and neither may lie '
            f'in the past: from {clocks.minute(start)} to '
            f'{clocks.minute(end)}, now it is {clocks.minute(now)} UTC.')
    return model.Window(start, end)
