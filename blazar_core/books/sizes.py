# SPDX-License-Identifier: Apache-2.0

"""What is booked for what has become larger or smaller since."""

import collections
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import ledger
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['grown', 'left_behind', 'of_server', 'tell']


def grown(session: orm.Session, row: models.Host,
          capacity: model.Resources | None) -> list[ledger.Edit]:
    """A booking of a whole host is all of it, whatever that has become.

    :param capacity: what the host is to have; None: what it has
    """
    if not capacity or capacity == row.capacity:
        return []
    return [ledger.Edit(booking, ledger.new_of(booking, resources=capacity))
            for booking in session.scalars(sa.select(models.Booking).where(
                models.Booking.host_id == row.id).options(
                    orm.joinedload(models.Booking.reservation)))
            if booking.whole]


def of_server(booking: models.Booking, takes: model.Resources,
              ) -> dict[str, int]:
    """What is booked for a server that runs, and takes so much.

    A place stays as large as was promised, whoever takes less of it: the
    next one may take all.
    """
    if booking.reservation.booted:
        return dict(takes)
    return dict(collections.Counter(booking.reservation.resources) |
                collections.Counter(takes))


def tell(edits: ty.Iterable[ledger.Edit]) -> None:
    """Have reservations that came with a boot say what each of their servers
    takes from now on; where they differ, what it was at first.

    :param edits: of bookings of servers, which were made
    """
    for reservation in {edit.row.reservation for edit in edits if edit.row}:
        first, *others = [one.resources for one in reservation.bookings]
        if reservation.booted and all(one == first for one in others):
            reservation.resources = dict(first)


def left_behind(session: orm.Session, row: models.Host, now: int,
                bookings: ty.Iterable[models.Booking],
                allocations: ty.Mapping[str, model.Resources],
                ) -> list[ledger.Edit]:
    """What servers that could not be built hold of a host all the same. It
    goes with them at the end of their lease, and is booked until then.

    :param bookings: of servers that have allocations there, and of those that
        could not be built and are booked there
    :returns: the edits; their leases are locked
    :raises LostRace: when something else has become of one meanwhile
    """
    edits = []
    for booking in {one.id: one for one in bookings}.values():
        server_id = ty.cast(str, booking.server_id)
        if booking.failed_at is None or (
                booking.host_id is not None) == (server_id in allocations):
            continue
        new = ledger.new_of(booking, host_id=None, claimed_at=None) if (
            booking.host_id is not None) else ledger.new_of(
                booking, host_id=row.id, claimed_at=now,
                resources=of_server(booking, allocations[server_id]))
        edits.append(ledger.Edit(booking, new))
    # A booking without a host is guarded by no host: whoever else changes it
    # has its lease.
    for lease_id in sorted({one.row.reservation.lease_id
                            for one in edits if one.row}):
        api.lock(session, lease_id)
    for edit in edits:
        _still(session, row, ty.cast(models.Booking, edit.row))
    return edits


def _still(session: orm.Session, row: models.Host, booking: models.Booking,
           ) -> None:
    """Make sure that a booking is what was read, by a statement that writes:
    it sees what has become of it since then.
    """
    same = session.execute(sa.update(models.Booking).where(
        models.Booking.id == booking.id,
        models.Booking.failed_at == booking.failed_at,
        models.Booking.host_id.is_not_distinct_from(booking.host_id),
        models.Booking.start_date == booking.start_date,
        models.Booking.end_date == booking.end_date,
    ).values(failed_at=booking.failed_at).execution_options(
        synchronize_session=False))
    if ty.cast('sa.CursorResult[ty.Any]', same).rowcount != 1:
        raise api.LostRace(row.id)
