# SPDX-License-Identifier: Apache-2.0

"""Resize reservations: which bookings are kept, and which hosts are needed.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.capacity import selection
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.leases import waiting


def check(lease: models.Lease, reservation: models.Reservation,
          wanted: new_leases.NewReservation, others: bool) -> None:
    """Check that a reservation can be changed as requested.

    :param others: whether parameters change that have to stay after the start
    :raises InvalidLeaseParams: if it cannot; says why
    :raises Conflict: if its hosts have changed since they were read
    """
    rows, count = reservation.bookings, wanted.demand.count
    used = sum(row.server_id is not None for row in rows)
    begun = lease.status in states.BEGUN
    if reservation.booted:
        raise errors.InvalidLeaseParams(
            f'Reservation {reservation.id} was created by a boot: its servers '
            'cannot be changed. Leave it out.')
    if count < used:
        raise errors.InvalidLeaseParams(
            f'Reservation {reservation.id} has {words.count(used, "server")}: '
            f'delete some first, or write an amount of at least {used}.')
    if begun and others:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has started: only the amounts of its '
            'reservations and the projects that share its hosts can be '
            'changed.')
    if begun and reservation.whole and count < reservation.amount and not (
            len(wanted.leaving) == reservation.amount - count and
            wanted.leaving <= {row.host_id for row in rows}):
        raise errors.Conflict(
            f'The hosts of lease {lease.id} have just changed. Check it, and '
            f'try again.',
            errors.ConflictReason.CHANGED)


def others_beside(reservation: models.Reservation) -> int:
    """Return the number of whole hosts that a reservation has in addition to
    its amount, as replacements of failed ones, which it keeps.
    """
    return (len(reservation.bookings) - reservation.amount
            if reservation.whole else 0)


def is_more(reservation: models.Reservation, wanted: new_leases.NewReservation,
            ) -> bool:
    """Return whether a change requests more than the reservation has.

    A request with a minimum only does if it changes the minimum or maximum.
    """
    numbers = [{name: (params or {}).get(name) for name in ('min', 'max')}
               for params in (reservation.params, wanted.params)]
    return wanted.demand.count + others_beside(reservation) > len(
        reservation.bookings) and (
        wanted.demand.least is None or numbers[0] != numbers[1])


def kept_of(reservation: models.Reservation,
            wanted: new_leases.NewReservation | None) -> list[models.Booking]:
    """Return the bookings that are kept, preferably those with a server."""
    leaving = frozenset() if wanted is None else wanted.leaving
    rows = sorted(reservation.bookings, key=lambda row: (
        row.host_id in leaving, row.server_id is None, row.id))
    return rows if wanted is None else (
        rows[:wanted.demand.count + others_beside(reservation)])


def set_columns(reservation: models.Reservation,
                wanted: new_leases.NewReservation, now: int, amount: int,
                ) -> None:
    """Set the columns of a changed reservation.

    :param amount: its new number of bookings
    """
    reservation.resources = dict(wanted.demand.resources)
    reservation.amount = amount
    reservation.params = dict(wanted.params or {})
    reservation.spec = dict(wanted.spec or {})
    reservation.updated_at = now


class Unpicked(Exception):
    """Hosts have to be selected before a lease can be changed like this."""


def edits_of(always: ty.Iterable[str], lease: models.Lease,
             reservation: models.Reservation, window: model.Window,
             wanted: new_leases.NewReservation | None,
             picked: list[int] | None) -> list[ledger.Edit]:
    """Return the edits of the bookings of a reservation.

    :param always: parameters that may be changed without selecting new hosts
    :param window: the new window of its bookings
    :param wanted: the changed reservation; None: it is not changed
    :param picked: the selected hosts, for all or for additional bookings
    :raises Unpicked: if hosts have to be selected first
    :raises Outdated: if they were selected for other bookings
    """
    begun, others = lease.status in states.BEGUN, False
    if wanted is not None:
        others = _is_another(reservation, wanted, always)
        check(lease, reservation, wanted, others)
        if others and picked is None:
            # The changed servers may not be allowed on the present hosts.
            raise Unpicked
    rows = reservation.bookings
    kept = kept_of(reservation, wanted)
    count, least = len(kept), len(kept)
    if wanted is not None and (
            not begun or is_more(reservation, wanted) or
            wanted.demand.least is None):
        beside = others_beside(reservation)
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
        hosts, added = _where_they_are(kept, picked)
    if not least <= len(kept) + len(added) <= count or (
            len(hosts) != len(kept)):
        raise api.Outdated('its bookings have changed')
    changed: dict[str, ty.Any] = {} if wanted is None else {
        'resources': wanted.demand.resources,
        'among': wanted.demand.among, 'groups': wanted.demand.groups}
    return [
        *(ledger.Edit(row, None) for row in rows if row not in kept),
        *(ledger.Edit(row, _moved(row, window, host_id, changed, others))
          for row, host_id in zip(kept, hosts)),
        *(ledger.Edit(None, ledger.NewBooking(
            reservation.id, host_id, None, window, **{
                'resources': reservation.resources, **changed}))
          for host_id in added)]


def _moved(row: models.Booking, window: model.Window, host_id: int | None,
           changed: dict[str, ty.Any], others: bool) -> ledger.NewBooking:
    """Return a booking in its new window and on its new host.

    :param others: whether its server is of another kind
    """
    new = ledger.new_of(row, window=window, host_id=host_id, **changed if (
        # A booking may stay on its host, whichever pool that is in now.
        host_id != row.host_id) else {**changed, 'among': None})
    # It may need another kind of the same providers.
    return dataclasses.replace(
        new, resources=changed['resources']) if others else new


def _where_they_are(rows: ty.Sequence[models.Booking], picked: list[int],
                    ) -> tuple[list[int | None], list[int]]:
    """Return the hosts of bookings, each its present one if it was selected,
    and the hosts that are left.
    """
    left, stay = [*picked], set[int]()
    for row in rows:
        if row.host_id in left:
            left.remove(row.host_id)
            stay.add(row.id)
    hosts = [row.host_id if row.id in stay or not left else left.pop(0)
             for row in rows]
    return hosts[:len(picked)], left


def leases_on(host_id: int, session: orm.Session,
              edits: ty.Mapping[str, ty.Iterable[ledger.Edit]]) -> list[str]:
    """Return the leases that are to have bookings on a host.

    Started leases, which cannot move to another host, come last.

    :param edits: by lease
    """
    return sorted((lease_id for lease_id, each in edits.items() if any(
        edit.new is not None and edit.new.host_id == host_id
        for edit in each)), key=lambda lease_id: api.found(
            session, lease_id).status in states.BEGUN)


def _is_another(reservation: models.Reservation,
                wanted: new_leases.NewReservation, always: ty.Iterable[str],
                ) -> bool:
    """Return whether a change affects other parameters than those that may
    always be changed, such as the amount.
    """
    any_ = dict.fromkeys(always)
    return dict(wanted.demand.resources) != reservation.resources or (
        {**(wanted.params or {}), **any_} !=
        {**(reservation.params or {}), **any_})


#: The changed reservations by id.
_Resized = ty.Mapping[str, new_leases.NewReservation]


class Plan(ty.NamedTuple):
    """The demands of a change.

    :ivar demands: by reservation, of all its servers or of additional ones
    :ivar instead_of: its present bookings
    :ivar kept: the bookings that keep their hosts
    """

    demands: dict[str, model.Demand]
    window: model.Window
    instead_of: list[models.Booking]
    kept: list[selection.Pinned]


def plan(session: orm.Session, lease: models.Lease, resized: _Resized,
         window: model.Window, grace_period: int | None, now: int) -> Plan:
    """Return the demands of a lease with another window and changed
    reservations.

    :param grace_period: seconds; None: the present one
    :raises Outdated: if its servers were deleted
    :raises InvalidLeaseParams: if something is added to an ended lease
    """
    rows = lease.bookings
    if not rows:
        raise api.Outdated('its servers were deleted')
    booked = lease.booked(window, grace_period)
    demands = _demands(session, lease, resized)
    kept = _kept(lease, resized)
    if lease.status in states.BEGUN and window.end <= now:
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} ends before that: nothing can be added to it. '
            'Create another lease.')
    if kept:
        booked = model.Window(now, booked.end)
    return Plan(demands, booked, rows, kept)


def _kept(lease: models.Lease, resized: _Resized) -> list[selection.Pinned]:
    """Return the bookings of a started lease that keep their hosts."""
    if lease.status not in states.BEGUN:
        return []
    on: dict[frozenset[tuple[str, int]], collections.Counter[int]] = (
        collections.defaultdict(collections.Counter))
    for one in lease.reservations:
        for row in kept_of(one, resized.get(one.id)):
            if row.host_id is not None:
                on[frozenset(row.resources.items())][row.host_id] += 1
    return [selection.Pinned(dict(resources), hosts)
            for resources, hosts in on.items()]


def _demands(session: orm.Session, lease: models.Lease, resized: _Resized,
             ) -> dict[str, model.Demand]:
    """Return the demands by reservation.

    For all servers, or for additional ones if the lease has started.
    """
    demands = {}
    for one in lease.reservations:
        wanted = resized.get(one.id)
        if lease.status in states.BEGUN:
            if wanted is not None and is_more(one, wanted):
                demands[one.id] = _added(session, one, wanted.demand)
        elif wanted is not None:
            demands[one.id] = wanted.demand
        else:
            demands[one.id] = _where_it_is(session, one)
    return demands


def _added(session: orm.Session, reservation: models.Reservation,
           demand: model.Demand) -> model.Demand:
    """Reduce a demand to what the reservation does not have yet."""
    there = len(reservation.bookings) - others_beside(reservation)
    hosts = frozenset(_uuids(session, reservation.bookings))
    demand = dataclasses.replace(
        demand, count=demand.count - there, required=demand.required - hosts,
        least=None if demand.least is None
        else max(0, demand.least - there))
    if demand.affinity is model.Affinity.SAME and hosts:
        return dataclasses.replace(demand, hosts=hosts)
    if demand.affinity is model.Affinity.DIFFERENT:
        return dataclasses.replace(demand, avoid=demand.avoid | hosts)
    return demand


def _uuids(session: orm.Session,
           rows: ty.Iterable[models.Booking]) -> ty.Iterable[str]:
    """Return the uuids of the hosts of bookings."""
    return session.scalars(sa.select(models.Host.uuid).where(
        models.Host.id.in_({row.host_id for row in rows})))


def _where_it_is(session: orm.Session,
                 reservation: models.Reservation) -> model.Demand:
    """Return the demand of a reservation, limited to its present hosts.

    As its servers may have to be apart, no host may get more of them than any
    host has now.
    """
    rows = reservation.bookings
    most = max(collections.Counter(row.host_id for row in rows).values())
    first, *others = [row.resources for row in rows]
    return model.Demand(
        model.WHOLE if reservation.whole else first if all(
            one == first for one in others) else model.plain(first), len(rows),
        model.Affinity.DIFFERENT, most, among=None,
        hosts=frozenset(_uuids(session, rows)))


def window_of(lease: models.Lease, start: int | None, end: int | None,
              was_end: int | None, now: int) -> model.Window:
    """Return the new window of a lease.

    :param start: None: the present one; likewise ``end``
    :param was_end: the end that the lease must have at present; None: any
    :raises InvalidLeaseParams: if the lease cannot have that window
    :raises Conflict: if the lease has another end than ``was_end``
    """
    begun = lease.status in states.BEGUN
    if lease.status in states.SEEKING:
        raise errors.InvalidLeaseParams(
            f'{waiting.unready(lease, "it can be changed")} Or delete it now '
            'and create another one.')
    alone = lease.end_date + lease.grace_period
    if (lease.grace_period and lease.deleted_at is None and now < alone and
            lease.status == states.Lease.TERMINATING):
        raise errors.Conflict(
            f'Lease {lease.id} has ended, and its servers run until '
            f'{clocks.minute(alone)}. Create another lease.')
    if lease.deleted_at is not None or not begun and (
            lease.status not in states.BEFORE):
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} is {views.status(lease)}: it cannot be '
            'changed. Create another lease.')
    if begun and lease.end_date <= now and (
            end not in (None, lease.end_date)):
        # Its capacity may be reserved by others; what is left is overdue.
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} ended at {clocks.minute(lease.end_date)} UTC: '
            'its end cannot be changed. Create another lease.')
    if begun and start not in (None, lease.start_date):
        raise errors.InvalidLeaseParams(
            f'Lease {lease.id} has started: only its end, name, events and '
            'amounts can be changed.')
    if was_end not in (None, lease.end_date):
        raise errors.Conflict(
            f'The end of lease {lease.id} has just changed.',
            errors.ConflictReason.CHANGED)
    start = lease.start_date if start is None else start
    end = lease.end_date if end is None else end
    # Unchanged dates may have passed; a started lease may end this second.
    late = (start, end) != (lease.start_date, lease.end_date) and (
        end < now if begun else min(start, end - 1) < now)
    if end <= start or late:
        raise errors.InvalidLeaseParams(
            'End date must be later than start date, and neither can be in '
            f'the past: from {clocks.minute(start)} to {clocks.minute(end)}, '
            f'now it is {clocks.minute(now)} UTC.' + (
                ' Write "now" to end the lease.' if begun else ''))
    return model.Window(start, end)
