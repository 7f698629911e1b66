# SPDX-License-Identifier: Apache-2.0

"""Add running servers to a lease.

The open-ended usage of the servers becomes bookings until the end of the
lease. That never needs more capacity than before, so no search takes place.
"""

import collections
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import budget_commits
from blazar_core.leases import events
from blazar_core.leases import exclusive
from blazar_core.leases import hosted_servers
from blazar_core.leases import idempotency
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import views
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)


class NewMember(ty.NamedTuple):
    """A server to add to a lease.

    :ivar host: uuid of its host
    :ivar takes: its resources there, as reported by the cloud
    :ivar has: its exclusive resources
        (see :mod:`~blazar_core.leases.exclusive`)
    """

    id: str
    host: str
    takes: model.Resources
    has: frozenset[str] = frozenset()


class _Counted(ty.NamedTuple):
    """The recorded host and usage of a server, and its exclusive resources."""

    host_id: int
    resources: model.Resources
    has: frozenset[str]


class Members:
    """Adds running servers to leases."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes,
                 commits: budget_commits.BudgetCommits) -> None:
        self._database = database
        self._clock = clock
        self._types = types
        self._commits = commits

    def reservations(self, joiners: ty.Collection[NewMember],
                     ) -> tuple[new_leases.NewReservation, ...]:
        """Return reservations for servers, one for all of the same size.

        :raises Conflict: if the usage of one is unknown, or it has a lease
        """
        with self._database.reader() as session:
            return _grouped(_counted(session, joiners))

    def create(self, new: new_leases.NewLease,
               joiners: ty.Collection[NewMember],
               ) -> dict[str, ty.Any]:
        """Create a lease of running servers; it is ACTIVE at once.

        :param new: with the result of :meth:`reservations`
        :returns: the lease, as by :func:`~blazar_core.leases.views.describe`
        :raises Conflict: if one of the servers has changed meanwhile, or a
            lease was created with its key
        :raises LimitExceeded: if concurrent leases have used up its limit
        """
        with self._commits.committed([new]) as [committed]:
            lease = self._database.retried(self._create, committed, joiners)
        LOG.info('Lease %s (%s) of project %s: servers %s were added, until '
                 '%s',
                 lease['id'], lease['name'], new.project_id,
                 ', '.join(new.server_ids), clocks.iso(lease['end_date']))
        return lease

    def _create(self, new: new_leases.NewLease,
                joiners: ty.Collection[NewMember]) -> dict[str, ty.Any]:
        with self._database.writer() as session:
            connection = session.connection()
            _lock(connection, new.granted, [new])
            new.check_exclusive(connection)
            now = self._clock.now()
            counted = self._take(session, now, joiners, new.reservations)
            rows = new_leases.rows_of(new, [
                [counted[server_id].host_id for server_id in one.server_ids]
                for one in new.reservations], now, True, self._types)
            if new.granted is not None:
                rows.note(new.granted)
            rows.lease['status'] = states.Lease.ACTIVE
            for row in rows.reservations:
                row['status'] = states.Reservation.ACTIVE
            rows.keep_credential(new)
            if new.key is not None:
                idempotency.keep(connection, now, new.key, rows.lease['id'])
            edits = ledger.decide(connection, now, [
                _edit(row['id'], server_id, counted, new.booked, now)
                for row, one in zip(
                    rows.reservations, new.reservations, strict=True)
                for server_id in one.server_ids], force=True)
            new_leases.insert(connection, [rows])
            ledger.add(connection, now, edits, rows.owners())
            return rows.describe(edits)

    def join(self, lease_id: str, joiners: ty.Collection[NewMember],
             wanted: ty.Sequence[new_leases.NewReservation],
             granted: limits.Granted | None) -> dict[str, ty.Any]:
        """Add servers to an ACTIVE lease of servers.

        :param wanted: the result of :meth:`reservations`
        :param granted: the result of the limits; None: there are none
        :returns: the changed lease
        :raises NotFound: if it does not exist
        :raises Conflict: if the lease is not ACTIVE or not of servers, or one
            of the servers has changed meanwhile
        :raises LimitExceeded: if concurrent leases have used up its limit
        """
        lease = self._database.retried(
            self._join, lease_id, joiners, wanted, granted)
        LOG.info('Lease %s: servers %s were added, until %s', lease_id,
                 ', '.join(sorted(one.id for one in joiners)),
                 clocks.iso(lease['end_date']))
        return lease

    def _join(self, lease_id: str, joiners: ty.Collection[NewMember],
              wanted: ty.Sequence[new_leases.NewReservation],
              granted: limits.Granted | None) -> dict[str, ty.Any]:
        with self._database.writer() as session:
            _lock(session.connection(), granted)
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            _check(lease, now)
            exclusive.check(
                session.connection(), lease.project_id, frozenset().union(
                    *(exclusive.of(one.spec) for one in wanted)),
                model.Window(now, lease.end_date + lease.grace_period),
                frozenset({lease.id}))
            counted = self._take(session, now, joiners, wanted)
            window = lease.booked()
            edits = []
            for one in wanted:
                row = _like(session, lease, one, now)
                # Servers of the reservation may have been deleted meanwhile.
                row.amount = len(row.bookings) + len(one.server_ids)
                row.spec = exclusive.spec(
                    row.spec, exclusive.by_server(one.spec))
                row.updated_at = now
                edits += [_edit(row.id, server_id, counted, window, now)
                          for server_id in one.server_ids]
            session.flush()
            ledger.amend(session, now, edits, force=True)
            if granted is not None:
                lease.conditions = granted.noted(lease.conditions, now)
            lease.updated_at = now
            events.charge(session, lease, now)
            session.flush()
            session.expire_all()
            return views.describe(lease)

    def _take(self, session: orm.Session, now: int,
              joiners: ty.Collection[NewMember],
              wanted: ty.Sequence[new_leases.NewReservation],
              ) -> dict[str, _Counted]:
        """Remove servers from the open-ended usage, as they get bookings.

        :raises Conflict: if they have changed since :meth:`reservations`
        """
        counted = _counted(session, joiners)
        if [(one.demand, one.server_ids) for one in _grouped(counted)] != [
                (one.demand, one.server_ids) for one in wanted]:
            raise _moved(', '.join(sorted(counted)))
        on: dict[int, set[str]] = collections.defaultdict(set)
        for server_id, one in counted.items():
            on[one.host_id].add(server_id)
        try:
            assignments.convert_usage(session, now, on)
        except assignments.HostInUse as exc:
            raise _moved(', '.join(sorted(counted))) from exc
        return counted


def _lock(connection: sa.Connection, granted: limits.Granted | None,
          new: ty.Sequence[new_leases.NewLease] = ()) -> None:
    """Start a transaction that increases the usage of a project."""
    if granted is not None:
        granted.lock(connection)
    budget_commits.confirm(connection, new)
    if granted is not None:
        granted.confirm(connection)


def _check(lease: models.Lease, now: int) -> None:
    """Check that servers may be added to a lease.

    :raises Conflict: if not; says what to do
    """
    if not lease.is_active(now):
        raise errors.Conflict(
            f'Lease {lease.id} is {views.status(lease)}: servers can be added '
            'only while a lease is ACTIVE, before its end. Create another '
            'lease for them.')
    if not all(one.booted and hosted_servers.of(one) is None
               for one in lease.reservations):
        raise errors.Conflict(
            f'Lease {lease.id} has reservations for boots, so servers cannot '
            'be added to it. Create another lease for running servers.')


def _counted(session: orm.Session, joiners: ty.Collection[NewMember],
             ) -> dict[str, _Counted]:
    """Return the recorded usage of servers on their hosts.

    :raises Conflict: if it is unknown, or a server has a lease already
    """
    for server_id in session.scalars(
            sa.select(models.Booking.server_id).where(
                models.Booking.server_id.in_([one.id for one in joiners]))):
        raise errors.Conflict(
            f'Server {server_id} has a lease already. Leave it out.',
            errors.ConflictReason.EXISTS)
    hosts = {host.uuid: host for host in session.scalars(
        sa.select(models.Host).options(orm.undefer(models.Host.consumers))
        .where(models.Host.uuid.in_({one.host for one in joiners})))}
    found = {}
    for one in joiners:
        host = hosts.get(one.host)
        if host is not None and (host.assigned_to or host.enrollment):
            raise errors.Conflict(
                f'Server {one.id} is on a host that serves leases only, and '
                'belongs to a lease of the host. Leave it out.')
        if host is not None and one.id in (host.interruptible or ()):
            raise errors.Conflict(
                f'Server {one.id} is interruptible. Make it an ordinary '
                'server first, or leave it out.')
        known = (host.consumers or {}) if host is not None else {}
        amounts, _told = known.get(one.id, ({}, 0))
        # A claim for a resize in place is added to what the server has.
        if host is None or not amounts or amounts != {
                rc: amount for rc, amount in one.takes.items()
                if amount and rc in host.capacity}:
            raise _moved(one.id)
        found[one.id] = _Counted(host.id, dict(amounts), one.has)
    return found


def _moved(server_ids: str) -> errors.Conflict:
    return errors.Conflict(
        f'The usage of the host of server {server_ids} is changing at this '
        'moment. Try again in some minutes.',
        errors.ConflictReason.IN_PROGRESS)


def _grouped(counted: ty.Mapping[str, _Counted],
             ) -> tuple[new_leases.NewReservation, ...]:
    """Return one reservation for all servers of the same size."""
    groups: dict[tuple[tuple[str, int], ...], list[str]] = (
        collections.defaultdict(list))
    for server_id, one in sorted(counted.items()):
        groups[tuple(sorted(one.resources.items()))].append(server_id)
    return tuple(new_leases.NewReservation(
        model.Demand(dict(size), len(server_ids)), tuple(server_ids),
        spec=exclusive.spec(None, {
            one: counted[one].has for one in server_ids}))
        for size, server_ids in sorted(groups.items()))


def _edit(reservation_id: str, server_id: str,
          counted: ty.Mapping[str, _Counted], window: model.Window, now: int,
          ) -> ledger.Edit:
    one = counted[server_id]
    return ledger.Edit(None, ledger.NewBooking(
        reservation_id, one.host_id, server_id, window, one.resources,
        running=True, dispatched_at=now, claimed_at=now))


def _like(session: orm.Session, lease: models.Lease,
          wanted: new_leases.NewReservation, now: int) -> models.Reservation:
    """Return the reservation of a lease for servers of a size, or create it.
    """
    for one in lease.reservations:
        if one.status == states.Reservation.ACTIVE and (
                one.resources == model.plain(wanted.demand.resources)):
            return one
    row = models.Reservation(
        id=uuidutils.generate_uuid(), lease_id=lease.id,
        resource_type=wanted.resource_type, amount=0,
        resources=model.plain(wanted.demand.resources),
        status=states.Reservation.ACTIVE, params=None, spec=None,
        moved_at=None, created_at=now, updated_at=now)
    session.add(row)
    return row
