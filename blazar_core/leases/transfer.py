# SPDX-License-Identifier: Apache-2.0


"""Transfer leases to another project or user."""

import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import usage_records
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import events
from blazar_core.leases import hosted_servers
from blazar_core.leases import limits
from blazar_core.leases import lookup
from blazar_core.leases import views
from blazar_core.leases import waiting
from blazar_core.plugins import resource_types

_Also: ty.TypeAlias = ty.Callable[[orm.Session], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """The project and the user that own a lease."""

    project_id: str
    user_id: str


class OwnerLookup(ty.NamedTuple):
    """A lease and its owner at the time of a decision.

    :ivar generation: its generation at that time
    :ivar hosts: its whole hosts, if it has started, on which its project may
        have servers without bookings
    :ivar build: whether the call that builds its servers is stored
    """

    described: dict[str, ty.Any]
    generation: int
    hosts: list[resource_types.Reserved]
    build: bool

    @property
    def owner(self) -> Owner:
        return Owner(self.described['project_id'], self.described['user_id'])


class Transfer:
    """Transfers leases to other owners."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._clock = clock
        self._types = types

    def look(self, lease_id: str) -> OwnerLookup:
        """Return a lease for a decision about its transfer.

        :raises NotFound: if it does not exist
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            return OwnerLookup(
                views.describe(lease), lease.generation,
                [(kind, reserved) for kind, reserved in
                 self._types.reserved(session, lease) if kind.has_hosts]
                if lease.status in states.BEGUN else [],
                lookup.keeps_build(session, lease_id))

    @api.retried
    def transfer(self, lease_id: str, seen: int, owner: Owner,
                 granted: limits.Granted | None, keep_trust: bool,
                 back: bool = False,
                 also: _Also | None = None) -> tuple[dict[str, ty.Any],
                                                     list[str]]:
        """Transfer a lease to another project or user.

        :param seen: its generation when this was decided
        :param granted: the result of the limits; None: there are none
        :param keep_trust: whether the credential of the previous owner is kept
        :param back: whether it returns to its previous owner, to whom anything
            created meanwhile belongs
        :param also: writes what else belongs to the new owner
        :returns: the changed lease, and the deleted credentials of the
            previous owner, encrypted
        :raises NotFound: if it does not exist
        :raises Conflict: if its state does not allow it, or it has changed
            concurrently; says what to do
        :raises LimitExceeded: if concurrent leases have used up its limit
        """
        with self._database.connection() as connection:
            before = connection.scalar(sa.select(
                models.Lease.project_id).where(models.Lease.id == lease_id))
        with self._database.writer() as session:
            _lock_projects(session.connection(), before or '',
                           owner.project_id, granted)
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.generation != seen + 1 or lease.project_id != before:
                raise _changed(lease_id)
            if granted is not None:
                granted.confirm(session.connection())
            if lease.project_id != owner.project_id and not back:
                _check_project(session, lease)
                if granted is not None:
                    granted.check_hosts(session.connection(), [
                        one.host_id for one in lease.bookings
                        if one.host_id is not None], model.Window(
                            lease.start_date,
                            lease.end_date + lease.grace_period))
            _check_status(lease)
            _assign(lease, owner, granted, now)
            # The project that has created it cannot see it any longer.
            session.execute(sa.delete(models.RequestKey).where(
                models.RequestKey.lease_id == lease_id))
            encrypted = [] if keep_trust else credentials.take(
                session, lease_id)
            events.charge(session, lease, now)
            session.flush()
            if also is not None:
                also(session)
            if before is not None and before != owner.project_id:
                usage_records.transfer(session, now, lease, before)
                events.handed_over(session, lease, self._types, now)
            return views.refreshed(session, lease), encrypted


def _assign(lease: models.Lease, owner: Owner,
            granted: limits.Granted | None, now: int) -> None:
    """Make a lease belong to its new owner."""
    if lease.project_id != owner.project_id:
        # It says how much the former project has reserved.
        conditions.update(lease, now, conditions.Type.LIMIT_NEAR)
    if granted is not None:
        lease.conditions = granted.noted(lease.conditions, now)
    lease.project_id, lease.user_id = owner.project_id, owner.user_id
    lease.updated_at = now


def _lock_projects(connection: sa.Connection, before: str, after: str,
                   granted: limits.Granted | None) -> None:
    """Make concurrent transactions that count the usage of either project
    retry.
    """
    # The order is fixed to avoid deadlocks.
    for project_id in sorted({before, after}):
        if granted is not None and project_id == after:
            granted.lock(connection)
        else:
            api.lock_project(connection, project_id)


def _changed(lease_id: str) -> errors.Conflict:
    return errors.Conflict(
        f'Lease {lease_id} has just changed. Check it, and try again.',
        errors.ConflictReason.CHANGED)


def _check_status(lease: models.Lease) -> None:
    """Check that the status of a lease allows a transfer."""
    if lease.deleted_at is not None or lease.status in states.ENDING:
        raise errors.Conflict(
            f'Lease {lease.id} is {views.status(lease)}: it can no longer be '
            'transferred.')
    if lease.status in states.SEEKING:
        raise errors.Conflict(
            f'{waiting.unready(lease, "it can be handed over")} Try again '
            'then.')


def _check_project(session: orm.Session, lease: models.Lease) -> None:
    """Check that nothing of a lease has to stay in its project.

    :raises Conflict: if servers have to; says what to do
    """
    if lease.status == states.Lease.STARTING and not any(
            one.booted for one in lease.reservations):
        # Its resources are being set up for its present project.
        raise errors.Conflict(
            f'Lease {lease.id} is {lease.status}: try again in a minute, when '
            f'it is ACTIVE.',
            errors.ConflictReason.IN_PROGRESS)
    servers = [row for row in lease.bookings if row.server_id is not None]
    if any(one.booted for one in lease.reservations):
        raise errors.Conflict(
            f'Lease {lease.id} was created by the boot of its servers: '
            f'{len(servers)} of them exist, and servers cannot change their '
            'project. Change only its user; or let it end, and create another '
            'lease in the new project.')
    if servers:
        raise errors.Conflict(occupied(lease.id, len(servers)),
                              errors.ConflictReason.IN_USE)
    inside = _inside(session, lease)
    if inside:
        raise errors.Conflict(
            f'The hosts of lease {lease.id} are used by '
            f'{words.count(inside, "lease")} of project {lease.project_id}. '
            f'Delete what uses them first, or share the hosts with the '
            f'project.',
            errors.ConflictReason.IN_USE)


def occupied(lease_id: str, count: int) -> str:
    """Return why a lease with servers cannot change its project."""
    return (f'Lease {lease_id} has {words.count(count, "server")} of its '
            'project, and servers cannot change their project. Delete them '
            'first, or change only its user.')


def _inside(session: orm.Session, lease: models.Lease) -> int:
    """Return the number of leases on the hosts of a lease that are there only
    because they are of the same project.
    """
    own = {one.id for one in lease.reservations if one.whole and
           lease.project_id not in (one.params or {}).get('projects', ())}
    return 0 if not own else sum(
        hosted_servers.of(one) in own for one in session.scalars(
            sa.select(models.Reservation).join(models.Lease).where(
                models.Lease.project_id == lease.project_id,
                models.Lease.status.not_in(states.LEASE.final()),
                models.Reservation.params.is_(None))))
