# SPDX-License-Identifier: Apache-2.0

"""A lease is over: no server can use it, and nothing of it is left."""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import enrolment
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.lifecycle import cleaning
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core.lifecycle import transitions
from blazar_core import resources

__all__ = ['Closed', 'Closing', 'FAILED']

LOG = logging.getLogger(__name__)

#: When to try again what has failed.
FAILED = facts.Later(
    facts.AWAY, facts.NOT_CLOSED.message, facts.LONGEST_PAUSE)
#: The leases that are over, or never were, and have a credential yet.
_OVER = sa.select(
    models.Credential.lease_id, models.Lease.project_id,
).outerjoin(
    models.Lease, models.Lease.id == models.Credential.lease_id).where(sa.or_(
        models.Lease.id.is_(None),
        models.Lease.status == states.Lease.TERMINATED))


class Closed(ty.NamedTuple):
    """Whether nobody can use a lease any more, and what is in the way.

    :ivar guests: servers that have to go first
    :ivar again: what else is, with when to look at it again
    """

    guests: list[str]
    again: list[facts.Later]

    @property
    def done(self) -> bool:
        return not self.guests and not self.again

    @property
    def soonest(self) -> facts.Later:
        """When to look again at the first of what is in the way."""
        return min(self.again or [FAILED],
                   key=lambda one: (one.seconds, one.most))


class Closing:
    """What is over is closed.

    :param opens: opens a sealed text
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: clouds.Cloud, opens: ty.Callable[[str], str],
                 notify: ty.Callable[[str, facts.Lease], None],
                 types: resources.Types) -> None:
        self._types = types
        self._cleaning = cleaning.Cleaning(database, clock)
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._opens = opens
        self._notify = notify

    def close(self, lease_id: str) -> Closed:
        """Let nobody use the reservations of a lease. One that cannot be
        closed yet keeps nothing else from ending.
        """
        with self._database.reader() as session:
            over = self._types.reserved(session, api.found(session, lease_id))
        closed = Closed([], [])
        for kind, reserved in over:
            try:
                one = self.shut(kind, reserved)
                closed.guests.extend(one.guests)
                closed.again.extend(one.again)
            except errors.CloudUnavailable as exc:
                closed.again.append(FAILED)
                LOG.warning('Lease %s: reservation %s could not be closed '
                            'yet: %s', lease_id, reserved.id, exc)
            except Exception:
                closed.again.append(FAILED)
                LOG.exception('Lease %s: reservation %s could not be closed '
                              'yet', lease_id, reserved.id)
        return closed

    def shut(self, kind: resources.Kind, reserved: resources.Reserved,
             ) -> Closed:
        """Let nobody use a reservation, when its servers have gone and its
        hosts are clean; safe to repeat.

        :raises Exception: what its type raises
        """
        closed = Closed([*kind.guests(reserved)], [])
        if closed.guests:
            self._cleaning.soil(kind, reserved)
        elif (again := self._cleaning.clean(kind, reserved)) is not None:
            closed.again.append(again)
        if closed.done:
            kind.end(reserved)
            if kind.has_hosts and kind.hosts_leave:
                self._database.retried(self._let_leave, reserved)
            steps.reached(steps.Step.CLOSE_CLOSED, reserved.lease_id)
        return closed

    def left_open(self) -> list[tuple[resources.Kind, resources.Reserved]]:
        """What can be used in the cloud though its lease has not begun, or is
        over and has given its hosts back; also what the books do not know.

        :raises CloudUnavailable: when that cannot be said now
        """
        there: dict[str, resources.Kind] = {}
        for kind in self._types.named.values():
            there |= dict.fromkeys(kind.opened() or (), kind)
        if not there:
            return []
        with self._database.reader() as session:
            left = there.keys() - set(session.scalars(
                sa.select(models.Reservation.id).join(models.Lease).where(
                    models.Lease.status.in_(states.BEGUN)))) - set(
                session.scalars(sa.select(models.Host.assigned_to).where(
                    models.Host.assigned_to.is_not(None))))
            known = {row.id: (self._types.of_row(row),
                              resources.reserved(session, row))
                     for row in session.scalars(
                         sa.select(models.Reservation).where(
                             models.Reservation.id.in_(left)))}
        return [known.get(one, (there[one], resources.unknown(one)))
                for one in sorted(left)]

    def close_left(self) -> None:
        """Close what is open of leases that are over: a process that stood
        still has opened it after all. What the books do not know is left to
        an operator: they may be older than the cloud.
        """
        for kind, reserved in self.left_open():
            if reserved.lease_id:
                with facts.apart(reserved.lease_id, reserved.project_id):
                    LOG.warning('Lease %s: reservation %s can still be used, '
                                'and is closed', reserved.lease_id,
                                reserved.id)
                    self.shut(kind, reserved)

    def _let_leave(self, reserved: resources.Reserved) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, reserved.lease_id)
            if lease.status not in states.ENDING:
                # What could not start was not used.
                return
            for host_id in session.scalars(sa.select(models.Host.id).where(
                    models.Host.assigned_to == reserved.id,
                    models.Host.enrolment.is_not(None),
            ).order_by(models.Host.id)).all():
                enrolment.leave(
                    session, self._clock.now(), host_id, booked=True)

    def finish_if_empty(self, lease_id: str, closed: bool = False) -> bool:
        """A lease without servers is over; returns whether it is.

        :param closed: nobody can boot with its reservations any more
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status == states.Lease.TERMINATED:
                return True
            if facts.has_servers(session, lease_id) or (
                    facts.comes_first(lease) and not closed) or (
                    lease.status != states.Lease.TERMINATING and
                    facts.bookings(lease)):
                return False
            described = transitions.finish(session, lease, self._clock.now())
        steps.reached(steps.Step.END_OVER, lease_id)
        LOG.info('Lease %s is over', lease_id)
        self._notify('lease.event.end_lease', described)
        self.revoke_of(lease_id)
        return True

    def credential(self, lease_id: str, needed: bool = True) -> str | None:
        """What lets us act for the owner of a lease, if there is something.

        :param needed: false: a key that is missing is in no way
        :raises VaultError: when it is needed, and cannot be decrypted
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        try:
            return None if row is None else self._opens(row.sealed)
        except errors.VaultError as exc:
            if needed:
                raise
            LOG.warning('Lease %s: its servers are not deleted in the name '
                        'of its owner: %s', lease_id, exc)
            return None

    def revoke_of(self, lease_id: str) -> None:
        """Give back what let us act for the owner of a lease that is over.

        What fails is logged and tried again by :meth:`revoke_over`.
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        if row is None:
            return
        done = True
        for sealed in credentials.all_of(row):
            try:
                self._cloud.revoke(self._opens(sealed))
            except Exception:
                done = False
                LOG.exception('Lease %s is over, but the credential of its '
                              'owner could not be revoked yet', lease_id)
        if not done:
            return
        steps.reached(steps.Step.END_REVOKED, lease_id)
        self._database.retried(self._forget_credential, lease_id)

    def _forget_credential(self, lease_id: str) -> None:
        with self._database.writer() as session:
            session.execute(sa.delete(models.Credential).where(
                models.Credential.lease_id == lease_id))

    def revoke_over(self) -> None:
        """Give back what is left of leases that are over."""
        with self._database.connection() as connection:
            over = connection.execute(_OVER).all()
        for lease_id, project_id in over:
            with facts.apart(lease_id, project_id):
                self.revoke_of(lease_id)

    def strays(self) -> set[str]:
        """The credentials that are in no lease's name, or not yet.

        A process died before it wrote its lease down, or is about to do so.
        Where several clouds have the same service user, they may be another
        one's, so that nothing revokes them but an operator. Opens all that
        are kept: some 20,000 a second.
        """
        given = self._cloud.credentials()
        with self._database.reader() as session:
            kept = [one for row in session.scalars(
                sa.select(models.Credential))
                for one in credentials.all_of(row)]
        return given - set(map(self._opens, kept)) if given else given
