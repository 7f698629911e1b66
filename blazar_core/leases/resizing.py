# SPDX-License-Identifier: Apache-2.0

"""What a reservation may become, and what of it stays."""

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import models
from blazar_core.leases import making

__all__ = ['check', 'is_more', 'kept', 'resize']


def check(lease: models.Lease, reservation: models.Reservation,
          wanted: making.NewReservation, others: bool) -> None:
    """Make sure that a reservation can become what is wanted.

    :param others: whether that is something else than it was
    :raises InvalidLeaseParams: when it cannot; says why
    """
    rows, count = reservation.bookings, wanted.demand.count
    used = sum(row.server_id is not None for row in rows)
    begun = lease.status in states.BEGUN
    if reservation.booted:
        raise errors.InvalidLeaseParams(
            f'Reservation {reservation.id} was made by a boot: its servers '
            f'are what they are. Leave it out.')
    if count < used:
        raise errors.InvalidLeaseParams(
            f'Reservation {reservation.id} has {words.count(used, "server")}: '
            f'delete some first, or write an amount of at least {used}.')
    if begun and others:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has started: of its reservations only the '
            f'amount can be changed, and with whom hosts are shared.')
    if begun and reservation.whole and count < reservation.amount:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has started: reservation {reservation.id} has '
            f'{words.count(reservation.amount, "host")} and keeps all of them '
            f'until its end. Write a number of at least '
            f'{reservation.amount}; next time, reserve a host that you may '
            f'want to release earlier in a lease of its own.')


def beside(reservation: models.Reservation) -> int:
    """How many whole hosts a reservation has beside those that it should, in
    the place of others that have failed and stay its own.
    """
    return (len(reservation.bookings) - reservation.amount
            if reservation.whole else 0)


def is_more(reservation: models.Reservation, wanted: making.NewReservation,
            ) -> bool:
    """Whether a change asks for more than there is.

    A request that accepts fewer has not asked for more by asking for something
    else.
    """
    numbers = [{name: (params or {}).get(name) for name in ('min', 'max')}
               for params in (reservation.params, wanted.params)]
    return wanted.demand.count + beside(reservation) > len(
        reservation.bookings) and (
        wanted.demand.least is None or numbers[0] != numbers[1])


def kept(reservation: models.Reservation,
         wanted: making.NewReservation | None) -> list[models.Booking]:
    """The bookings that stay; those with a server are the last to go."""
    rows = sorted(reservation.bookings,
                  key=lambda row: (row.server_id is None, row.id))
    return rows if wanted is None else (
        rows[:wanted.demand.count + beside(reservation)])


def resize(reservation: models.Reservation, wanted: making.NewReservation,
           now: int, amount: int) -> None:
    """Write what a reservation is from now on.

    :param amount: how many bookings it has
    """
    reservation.resources = dict(wanted.demand.resources)
    reservation.amount = amount
    reservation.params = dict(wanted.params or {})
    reservation.spec = dict(wanted.spec or {})
    reservation.updated_at = now
