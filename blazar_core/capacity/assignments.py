# SPDX-License-Identifier: Apache-2.0

"""Assign whole hosts to reservations, while the reservations can be used.

Servers on an assigned host belong to its reservation: they are not counted
again, and the capacity of the host stays reserved until the host is
unassigned, whatever the dates of the lease.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.db import models

#: Columns of a host that describe the end of one assignment, not the next.
_NOT_LEFT = dict.fromkeys((
    'vacated_at', 'cleaning_until', 'cleaned_at', 'overdue_at'))


class HostInUse(Exception):
    """A host is not free yet; the message has the reason."""


def assign(session: orm.Session, now: int,
           reservations: ty.Iterable[models.Reservation]) -> bool:
    """Assign the booked hosts to their reservations of whole hosts.

    Idempotent.

    :returns: whether one of them was lent since it was cleaned
    :raises HostInUse: when one of them is still in use; nothing is assigned
    :raises LostRace: when another process decided about one meanwhile
    """
    bookings = {one.host_id: one for reservation in reservations
                if reservation.whole for one in reservation.bookings
                if one.host_id is not None}
    if not bookings:
        return False
    hosts = session.scalars(sa.select(models.Host).where(
        models.Host.id.in_(bookings)).order_by(models.Host.id)).all()
    others = set(session.scalars(sa.select(models.Booking.host_id).where(
        models.Booking.host_id.in_(bookings),
        models.Booking.claimed_at.is_not(None), ledger.TAKES,
        models.Booking.id.not_in([one.id for one in bookings.values()]))))
    for host in hosts:
        if host.id in others or host.assigned_to not in (
                None, bookings[host.id].reservation_id):
            raise HostInUse(f'host {host.name} still belongs to another lease')
        if host.assigned_to is None and _has_others(host):
            raise HostInUse(
                f'host {host.name} has servers without a lease')
        if host.assigned_to is None and (
                host.recheck_at is not None and host.recheck_at <= now):
            raise HostInUse(
                f'the servers on host {host.name} are being checked')
    was_lent = any(host.lent_at is not None for host in hosts)
    for host in hosts:
        booking = bookings[host.id]
        if host.assigned_to != booking.reservation_id:
            host_generations.change(
                session, now, host, assigned_to=booking.reservation_id,
                **_NOT_LEFT)
            booking.claimed_at = now
    return was_lent


def lent(session: orm.Session,
         reservation_ids: ty.Collection[str]) -> set[str]:
    """Return the hosts that are assigned to reservations and were lent since
    they were cleaned: their uuids.
    """
    return set(session.scalars(sa.select(models.Host.uuid).where(
        models.Host.assigned_to.in_(reservation_ids),
        models.Host.lent_at.is_not(None))))


def _has_others(host: models.Host) -> bool:
    """Return whether a host has servers without a lease."""
    return bool(host.interruptible) or any(host.usage.values())


def absorb_servers(session: orm.Session, now: int,
                   host_ids: ty.Collection[int],
                   server_ids: ty.Collection[str]) -> None:
    """Stop counting the servers of hosts that are about to be assigned.

    This is right only if the hosts are assigned (:func:`assign`) in the same
    transaction.

    :param server_ids: the servers that may run there
    :raises HostInUse: when others run there, or the servers are not known
    :raises LostRace: when another process decided about one meanwhile
    """
    for host in _counted(session, host_ids):
        others = sorted(
            one for one, (amounts, _until) in (host.consumers or {}).items()
            if one not in server_ids and any(amounts.values()))
        if others:
            raise HostInUse(
                f'host {host.name} has servers that do not belong to this '
                f'lease: {", ".join(others)}')
        host_generations.change(session, now, host, usage={}, consumers={},
                                interruptible=None, recheck_at=None)


def convert_usage(session: orm.Session, now: int,
                  server_ids: ty.Mapping[int, ty.Collection[str]]) -> None:
    """Stop counting servers that are about to have bookings on their hosts.

    This is right only if the bookings are created in the same transaction.

    :param server_ids: by the host's id
    :raises HostInUse: when it is not known which servers are there
    :raises LostRace: when another process decided about one meanwhile
    """
    for host in _counted(session, server_ids):
        left = {one: entry for one, entry in (host.consumers or {}).items()
                if one not in server_ids[host.id]}
        host_generations.change(
            session, now, host, consumers=left, **inventory.counted(
                left, inventory.leads_of(host.interruptible)))


def _counted(session: orm.Session, host_ids: ty.Collection[int],
             ) -> ty.Iterator[models.Host]:
    """Yield those hosts of some that are not assigned.

    :raises HostInUse: when the servers on one of them are not known
    """
    for host in session.scalars(sa.select(models.Host).options(
            orm.undefer(models.Host.consumers)).where(
                models.Host.id.in_(host_ids),
                models.Host.assigned_to.is_(None)).order_by(models.Host.id)):
        if host.consumers is None and any(host.usage.values()):
            raise HostInUse(
                f'the servers on host {host.name} are not known yet')
        yield host


def holds(session: orm.Session,
          reservations: ty.Iterable[models.Reservation]) -> bool:
    """Return whether a host is assigned to any of these reservations."""
    whole = [one.id for one in reservations if one.whole]
    return bool(whole) and session.scalars(sa.select(models.Host.id).where(
        models.Host.assigned_to.in_(whole)).limit(1)).first() is not None


def overdue(session: orm.Session, now: int, lease: models.Lease) -> None:
    """Mark the hosts of an ending lease as overdue: no lease can reserve them
    until they are unassigned. Does nothing before the hosts are
    :data:`.rule.OVERDUE` seconds past their end. Idempotent.

    :raises LostRace: when another process decided about one meanwhile
    """
    whole = [one.id for one in lease.reservations if one.whole]
    if not whole or now < rule.OVERDUE + lease.booked().end:
        return
    for host in session.scalars(sa.select(models.Host).where(
            models.Host.assigned_to.in_(whole),
            models.Host.overdue_at.is_(None)).order_by(models.Host.id)):
        host_generations.change(session, now, host, overdue_at=now)


def leave(session: orm.Session, now: int,
          bookings: ty.Iterable[models.Booking]) -> None:
    """Return hosts from their reservations, before these bookings are
    deleted: from now on the reservations admit no server there, and no lease
    can reserve the hosts until they are free (:func:`left`).

    :raises LostRace: when another process decided about one meanwhile
    """
    holders = {row.host_id: row.reservation_id for row in bookings
               if row.server_id is None and row.host_id is not None}
    if not holders:
        return
    for host in session.scalars(sa.select(models.Host).where(
            models.Host.id.in_(holders), models.Host.assigned_to.is_not(None),
    ).order_by(models.Host.id)).all():
        if host.assigned_to == holders[host.id]:
            host_generations.change(session, now, host, overdue_at=now)


def left(session: orm.Session, reservation_ids: ty.Collection[str],
         ) -> list[models.Host]:
    """Return the hosts that reservations have returned but that are not free
    yet: they are assigned to a reservation that has no booking there.
    """
    return list(session.scalars(sa.select(models.Host).where(
        models.Host.assigned_to.in_(reservation_ids),
        sa.not_(sa.exists().where(
            models.Booking.host_id == models.Host.id,
            models.Booking.reservation_id == models.Host.assigned_to)),
    ).order_by(models.Host.id)))


def unassign(session: orm.Session, now: int,
             reservation_ids: ty.Collection[str],
             host_ids: ty.Collection[int] | None = None) -> None:
    """Unassign hosts on which nothing of these reservations is left.

    The servers on them were not counted, so the cloud is asked for them.

    :param host_ids: only these hosts; None: any
    :raises LostRace: when another process decided about one meanwhile
    """
    for host in session.scalars(sa.select(models.Host).where(
            models.Host.assigned_to.in_(reservation_ids),
            *([] if host_ids is None else [models.Host.id.in_(host_ids)]),
    ).order_by(models.Host.id)).all():
        host_generations.change(session, now, host, assigned_to=None,
                                recheck_at=now, **_NOT_LEFT)
