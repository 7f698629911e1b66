# SPDX-License-Identifier: Apache-2.0

"""What becomes of the bookings of a lease that is changed."""

import typing as ty

from sqlalchemy import orm

from blazar_core.books import ledger
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import making
from blazar_core.leases import resizing

__all__ = ['Unpicked', 'leases_on', 'of']


class Unpicked(Exception):
    """Hosts have to be picked before a lease can be changed like this."""


def of(always: ty.Iterable[str], lease: models.Lease,
       reservation: models.Reservation, window: model.Window,
       wanted: making.NewReservation | None, picked: list[int] | None,
       ) -> list[ledger.Edit]:
    """What becomes of the bookings of a reservation.

    :param always: what it may become without being another one
    :param window: that of its bookings
    :param wanted: what it becomes; None: it stays what it is
    :param picked: the hosts that it gets, or those that are added
    :raises Unpicked: when hosts have to be picked first
    :raises Outdated: when they were picked for other bookings
    """
    begun = lease.status in states.BEGUN
    if wanted is not None:
        others = _is_another(reservation, wanted, always)
        resizing.check(lease, reservation, wanted, others)
        if others and picked is None:
            # Such servers may not be allowed where these are.
            raise Unpicked
    rows = reservation.bookings
    kept = resizing.kept(reservation, wanted)
    count, least = len(rows), len(rows)
    if wanted is not None and (
            not begun or resizing.is_more(reservation, wanted) or
            wanted.demand.least is None):
        beside = resizing.beside(reservation)
        count, least = (one.count + beside for one in (
            wanted.demand, wanted.demand.fewest()))
    if picked is None:
        if count > len(kept):
            raise Unpicked
        hosts: list[int | None] = [row.host_id for row in kept]
        added: list[int] = []
    elif begun:
        hosts, added = [row.host_id for row in kept], picked
    else:
        kept = kept[:len(picked)] if wanted is not None else kept
        hosts, added = [*picked[:len(kept)]], picked[len(kept):]
    if not least <= len(kept) + len(added) <= count or (
            len(hosts) != len(kept)):
        raise api.Outdated('it has other bookings than was thought')
    changed: dict[str, ty.Any] = {} if wanted is None else {
        'resources': wanted.demand.resources,
        'among': wanted.demand.among}
    return [
        *(ledger.Edit(row, None) for row in rows if row not in kept),
        *(ledger.Edit(row, ledger.new_of(
            row, window=window, host_id=host_id, **changed if
            # Where it is it may stay, whatever becomes of the host.
            host_id != row.host_id else {**changed, 'among': None}))
            for row, host_id in zip(kept, hosts)),
        *(ledger.Edit(None, ledger.NewBooking(
            reservation.id, host_id, None, window, **{
                'resources': reservation.resources, **changed}))
          for host_id in added)]


def leases_on(host_id: int, session: orm.Session,
              edits: ty.Mapping[str, ty.Iterable[ledger.Edit]]) -> list[str]:
    """Return the leases that are to have bookings on a host.

    Those that have begun cannot go to another host, and come last.

    :param edits: by lease
    """
    return sorted((lease_id for lease_id, each in edits.items() if any(
        edit.new is not None and edit.new.host_id == host_id
        for edit in each)), key=lambda lease_id: api.found(
            session, lease_id).status in states.BEGUN)


def _is_another(reservation: models.Reservation,
                wanted: making.NewReservation, always: ty.Iterable[str],
                ) -> bool:
    """Whether something else is wanted than what it may always become,
    such as more or fewer of the same.
    """
    any_ = dict.fromkeys(always)
    return dict(wanted.demand.resources) != reservation.resources or (
        {**(wanted.params or {}), **any_} !=
        {**(reservation.params or {}), **any_})
