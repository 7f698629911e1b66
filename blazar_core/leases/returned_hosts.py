# SPDX-License-Identifier: Apache-2.0

"""Choose the hosts that a reservation of whole hosts returns before its end.

Only empty hosts are returned, as no server is deleted for that. The choice is
made before the transaction that changes the lease, as it requires calls to the
cloud. A server that arrives in between keeps its host until it is deleted
(:meth:`~blazar_core.lifecycle.lease_close.LeaseClose.release`).
"""

import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import resize
from blazar_core.plugins import resource_types

_Wanted: ty.TypeAlias = ty.Mapping[str, new_leases.NewReservation]


class _Shrinking(ty.NamedTuple):
    """A reservation in use that is to have fewer hosts.

    :ivar hosts: its hosts, in the order in which it returns them
    :ivar inside: servers with bookings within the reservation, by host id
    :ivar number: how many hosts it returns
    """

    kind: resource_types.BaseResourceType
    reserved: resource_types.ReservationContext
    hosts: ty.Sequence[ty.Any]
    inside: ty.Mapping[int, ty.Collection[str]]
    number: int


def choose(database: api.Database, types: resource_types.ResourceTypes,
           lease_id: str, wanted: _Wanted, names: ty.Collection[str],
           ) -> _Wanted:
    """Return changed reservations with the hosts that they return.

    The named hosts are returned first, then failed ones, then the ones booked
    last.

    :param names: of hosts that must be returned
    :raises Conflict: if the lease is still starting
    :raises HostsNotEmpty: if too few hosts are empty, or a named one is not
    :raises CloudUnavailable: if it is unknown which are empty
    """
    with database.reader() as session:
        lease = api.found(session, lease_id)
        smaller = [_shrinking(session, types, one, wanted[one.id], names)
                   for one in lease.reservations
                   if lease.status in states.BEGUN and one.whole and
                   one.id in wanted and
                   wanted[one.id].demand.count < one.amount]
        if smaller and lease.status == states.Lease.STARTING:
            raise errors.Conflict(
                f'Lease {lease_id} is {lease.status}. Return its hosts when '
                'it is ACTIVE.')
    return {**wanted, **{one.reserved.id: dataclasses.replace(
        wanted[one.reserved.id], leaving=_empty(one, names))
        for one in smaller}}


def _shrinking(session: orm.Session, types: resource_types.ResourceTypes,
               reservation: models.Reservation,
               wanted: new_leases.NewReservation, names: ty.Collection[str],
               ) -> _Shrinking:
    rows = session.execute(sa.select(
        models.Host.id, models.Host.uuid, models.Host.name,
        outages.has_failed(models.Host.id).label('failed'),
        models.Booking.id.label('booking')).join(
            models.Booking, models.Booking.host_id == models.Host.id).where(
                models.Booking.reservation_id == reservation.id)).all()
    # Failed hosts that were replaced do not count in its amount.
    replaced = resize.others_beside(reservation) > 0
    hosts = sorted(
        (row for row in rows if not (replaced and row.failed)),
        key=lambda row: (row.name not in names, not row.failed, -row.booking))
    inside: dict[int, list[str]] = {}
    for host_id, server_id in session.execute(sa.select(
            models.Booking.host_id, models.Booking.server_id).where(
                models.Booking.host_id.in_([row.id for row in rows]),
                models.Booking.server_id.is_not(None),
                sa.not_(ledger.TAKES))).tuples():
        inside.setdefault(ty.cast(int, host_id), []).append(
            ty.cast(str, server_id))
    return _Shrinking(
        types.of_row(reservation),
        resource_types.context_of(session, reservation), hosts, inside,
        reservation.amount - wanted.demand.count)


def _empty(one: _Shrinking, names: ty.Collection[str]) -> frozenset[int]:
    """Return the ids of the hosts that a reservation returns."""
    empty: list[ty.Any] = []
    used: dict[str, list[str]] = {}
    for host in one.hosts:
        if len(empty) == one.number:
            break
        there = {*one.inside.get(host.id, ()),
                 *one.kind.hosted_servers(one.reserved, host.uuid)}
        if not there:
            empty.append(host)
            continue
        used[host.name] = sorted(there)
        if host.name in names:
            raise errors.HostsNotEmpty(
                one.reserved.id, 1, [], used, host.name)
    if len(empty) < one.number:
        raise errors.HostsNotEmpty(one.reserved.id, one.number, [
            host.name for host in empty], used)
    return frozenset(host.id for host in empty)
