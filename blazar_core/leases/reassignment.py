# SPDX-License-Identifier: Apache-2.0

"""Reassign bookings of leases to other hosts."""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import views
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)


class Reassigned(ty.NamedTuple):
    """A reassignment of bookings of a lease.

    :ivar seen: the generation of the lease when this was decided
    :ivar hosts: the new host id by id of the booking; None: no host, so that
        it uses no capacity
    :ivar reason: what is missing then, for users of the lease
    :ivar among: see :class:`ledger.NewBooking`
    :ivar groups: the request groups of each booking, which may get other kinds
        of providers; empty: the kinds stay the same
    """

    lease_id: str
    seen: int
    hosts: ty.Mapping[int, int | None]
    reason: str = ''
    among: model.HostPool | None = None
    groups: tuple[model.Group, ...] = ()


class Reassignment:
    """Reassigns bookings of leases to other hosts."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._types = types

    def reassign(self, *moves: Reassigned) -> list[dict[str, ty.Any]] | None:
        """Reassign bookings of leases to other hosts; all of them, or none.

        :param moves: at most one for each lease
        :returns: each lease, with the key ``exchanged``: for each booking its
            reservation, its server and the names of its hosts before and
            after; None: one of the leases has changed meanwhile
        :raises NotFound: if one was purged
        :raises OverCapacity: if the capacity of a host does not suffice
        :raises LostRace: if a concurrent decision involved one of the hosts
        """
        with self._database.writer() as session:
            ids = [one.lease_id for one in moves]
            api.lock(session, *ids)
            leases = {one.id: one for one in api.whole(session, ids)}
            deferred = {*session.scalars(_DEFERRED, {'leases': [*leases]})} | {
                one.id for one in leases.values()
                if any(resource_types.kept_for(session, reservation)
                       for reservation in one.reservations)}
            now, going, kept = self._clock.now(), [], []
            for move in moves:
                if move.lease_id not in leases:
                    raise errors.NotFound(
                        f'Lease {move.lease_id} could not be found.')
                rows = _decided(move, leases[move.lease_id],
                                move.lease_id in deferred)
                if rows is None:
                    return None
                going.append([row for row in rows
                              if row.host_id != move.hosts[row.id]])
                kept += [(move, row) for row in rows if row.host_id == (
                    move.hosts[row.id]) and _of_any_kind(move, row)]
            said = [(move.lease_id, [
                (row.reservation_id, row.server_id, row.host_id,
                 move.hosts[row.id]) for row in rows])
                for move, rows in zip(moves, going, strict=True)]
            ledger.amend(session, now, [
                ledger.Edit(row, _reassigned(move, row))
                for move, row in (*kept, *(
                    (move, row)
                    for move, rows in zip(moves, going, strict=True)
                    for row in rows))])
            for move, rows in zip(moves, going, strict=True):
                lease = leases[move.lease_id]
                _moved(lease, rows, move.reason, now)
                events.changed(session, lease, self._types,
                               {row.reservation for row in rows}, now)
            session.flush()
            described = exchanged(session, [
                (leases[lease_id], what) for lease_id, what in said])
        for move, one in zip(moves, described, strict=True):
            with logs.about(one['id'], one['project_id']):
                _log(move, one)
        return described

    def add(self, lease_id: str, seen: int, reservation_id: str,
            hosts: ty.Sequence[int], window: model.Window,
            among: model.HostPool | None) -> dict[str, ty.Any] | None:
        """Add hosts to a started reservation of whole hosts, as replacements
        of failed ones, which it keeps.

        Arguments, results and errors are those of :meth:`reassign`.

        :param window: over which they are booked
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            found = [one for one in lease.reservations
                     if one.id == reservation_id]
            if lease.generation != seen + 1 or not found:
                return None
            now = self._clock.now()
            ledger.amend(session, now, [ledger.Edit(None, ledger.NewBooking(
                reservation_id, host_id, None, window, model.WHOLE,
                among=among)) for host_id in hosts])
            # The failed hosts are replaced now.
            for row in [row for row in found[0].bookings
                        if row.host_failed_at is not None][:len(hosts)]:
                row.host_failed_at = None
            events.changed(session, lease, self._types, found, now)
            found[0].moved_at = found[0].updated_at = lease.updated_at = now
            session.flush()
            session.expire(found[0])
            names = session.scalars(sa.select(models.Host.name).where(
                models.Host.id.in_(hosts)).order_by(models.Host.name)).all()
            described = views.describe(lease)
        described['exchanged'] = [
            {'reservation_id': reservation_id, 'server_id': None,
             'before': None, 'after': name} for name in names]
        with logs.about(lease_id, described['project_id']):
            LOG.info('Lease %s: reservation %s also has %s now, because some '
                     'of its hosts have failed',
                     lease_id, reservation_id,
                     ', '.join(names))
        return described


def _of_any_kind(move: Reassigned, row: models.Booking) -> bool:
    """Return whether a reassigned booking may get other kinds of providers."""
    return move.hosts[row.id] is not None and model.as_requested(
        row.resources, move.groups) != row.resources


def _reassigned(move: Reassigned, row: models.Booking) -> ledger.NewBooking:
    """Return a booking on its new host."""
    new = ledger.new_of(row, host_id=move.hosts[row.id], among=move.among)
    return dataclasses.replace(new, resources=model.plain(
        row.resources), groups=move.groups) if _of_any_kind(move, row) else new


def exchanged(session: orm.Session, said: ty.Sequence[tuple[
        models.Lease, ty.Sequence[tuple[
            str | None, str | None, int | None, int | None]]]],
) -> list[dict[str, ty.Any]]:
    """Return leases with their exchanged hosts.

    :param said: for each lease, for each booking, the ids of the reservation,
        of the server if any, and of the hosts before and after
    """
    names = {host_id: name for host_id, name in session.execute(
        sa.select(models.Host.id, models.Host.name).where(
            models.Host.id.in_({
                one for _lease, all_of_it in said
                for *_what, old, new in all_of_it for one in (old, new)}))
    ).tuples()}
    return [views.describe(lease) | {'exchanged': [
        {'reservation_id': reservation_id, 'server_id': server_id,
         'before': names[old] if old else None,
         'after': names[new] if new else None}
        for reservation_id, server_id, old, new in all_of_it]}
        for lease, all_of_it in said]


def _log(move: Reassigned, lease: ty.Mapping[str, ty.Any]) -> None:
    for one in lease['exchanged']:
        what = one['server_id'] or f'a slot of {one["reservation_id"]}'
        if one['after'] is not None:
            LOG.info('Lease %s: %s is reassigned to host %s; before: %s',
                     lease['id'], what, one['after'], one['before'] or 'none')
        elif one['before'] is not None:
            LOG.warning('Lease %s: %s has lost its capacity on host %s. %s',
                        lease['id'], what, one['before'], move.reason)


def may_move(row: ty.Any, later: bool, deferred: bool, lease: ty.Any) -> bool:
    """Return whether a booking may be reassigned to another host.

    :param row: the booking
    :param later: whether its servers are booted after its start
    :param deferred: whether the build of its servers is deferred, or they are
        kept from the previous occurrence
    :param lease: has ``status`` and ``deleted_at``
    """
    if row.claimed_at is not None or row.dispatched_at is not None or (
            lease.deleted_at is not None):
        return False
    if later:
        return row.server_id is None and lease.status in (
            *states.BEFORE, *states.BEGUN)
    return deferred and lease.status in states.TO_START


def _decided(move: Reassigned, lease: models.Lease, deferred: bool,
             ) -> list[models.Booking] | None:
    """Return the bookings to reassign; None: the lease has changed."""
    rows = [row for row in lease.bookings if row.id in move.hosts and may_move(
        row, not row.reservation.booted, deferred, lease)]
    if lease.generation != move.seen + 1 or len(rows) != len(move.hosts):
        return None
    return rows


def _moved(lease: models.Lease, rows: ty.Iterable[models.Booking],
           reason: str, now: int) -> None:
    """Update the conditions and times of a lease after a reassignment."""
    for row in rows:
        if row.host_id is not None:
            row.reservation.moved_at = row.reservation.updated_at = now
    if reason:
        conditions.update(lease, now, conditions.Condition(
            conditions.Type.CAPACITY_MISSING, conditions.Reason.HOSTS_LOST,
            f'Reserved capacity is no longer available. {reason}'))
    elif all(row.host_id is not None for row in lease.bookings):
        conditions.update(lease, now, conditions.Type.CAPACITY_MISSING)
    lease.updated_at = now


_DEFERRED = sa.select(models.DeferredBuild.lease_id).where(
    models.DeferredBuild.lease_id.in_(sa.bindparam('leases', expanding=True)))
