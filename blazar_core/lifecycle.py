#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""What happens to a lease: it starts, nears its end, ends; servers go.

Two kinds of things move a lease. Its **events** are carried out by the
engine (:mod:`blazar_core.engine`) through :meth:`Lifecycle.start`,
:meth:`Lifecycle.end` and :meth:`Lifecycle.announce`. What is **seen** of its
servers in the cloud, by a notification or by a comparison, is told to
:meth:`Lifecycle.observe`. Every step locks the lease's row first, and every
one may be done again without harm.
"""

import dataclasses
import enum
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core import books
from blazar_core import clock as clocks
from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import states
from blazar_core import views

__all__ = ['Cloud', 'Later', 'Lifecycle', 'Opening', 'Seen', 'ServerState',
           'Step', 'reached']

LOG = logging.getLogger(__name__)

#: Seconds between two looks at servers that are being deleted, and at a host
#: that the servers of an ended lease have not left; notifications come
#: sooner as a rule.
AGAIN = 2

#: Seconds until a start is tried again for which the cloud was not there.
AWAY = 5


class ServerState(enum.Enum):
    """What a cloud can say of a server.

    LEAVING is one that is deleted while what it took is not free yet.
    """

    HELD = 'held'
    BUILDING = 'building'
    RUNNING = 'running'
    ERROR = 'error'
    LEAVING = 'leaving'
    GONE = 'gone'


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a server: its state, its host's uuid, its fault."""

    state: ServerState
    host: str | None = None
    fault: str = ''


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """A reservation whose servers come later, and whose time has come.

    :ivar affinity: True: its servers share one host; False: no two do
    """

    reservation_id: str
    project_id: str
    user_id: str
    flavor: ty.Mapping[str, ty.Any]
    affinity: bool | None


class Cloud(ty.Protocol):
    """What the core needs of a cloud."""

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: ty.Callable[[], bool],
             ) -> None:
        """Build the servers of a held call that still exist.

        Everything before the build itself may be done twice; the build is
        asked for only if ``gate()``, called last, is true.

        :param credential: what lets us act for the user
        :raises NotDelegated: when it does not, and will not again
        :raises CloudUnavailable: when something that a build needs does not
            answer; the gate was not asked
        """
        ...

    def hold(self, server_ids: ty.Collection[str]) -> None:
        """Show servers as held whose build was put off at the last moment.
        """
        ...

    def revoke(self, credential: str) -> None:
        """Give back what let us act for a user; nothing when it is gone."""
        ...

    def credentials(self) -> set[str]:
        """All that was ever given to us and is not revoked."""
        ...

    def is_missing(self, server_ids: ty.Collection[str]) -> bool:
        """Whether a build that was sent has left no trace.

        True only if the cloud has looked at everything sent before this
        question, though it may not be done with it.
        """
        ...

    def look(self, server_id: str) -> Seen:
        """What is true of a server at this moment."""
        ...

    def delete(self, server_id: str) -> None:
        """Ask for the end of a server; nothing when it is gone."""
        ...

    def open(self, reservation: Opening) -> None:
        """Let a project boot servers with a reservation; safe to repeat."""
        ...

    def close(self, reservation_id: str) -> None:
        """Let nobody boot with a reservation any more; safe to repeat."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """An action is not finished: do it again in so many seconds."""

    seconds: int
    why: str


class Step(enum.Enum):
    """Points at which a process may die, and nothing is lost or done twice.
    """

    # Making a lease that starts later, in the process that was asked.
    CREATE_MARKED = 'create: the servers are marked'
    CREATE_DELEGATED = 'create: there is a credential'
    CREATE_BOOKED = 'create: the lease is in the books'
    # Its start.
    START_CLAIMED = 'start: the event is claimed'
    START_READ = 'start: the call was read'
    START_READY = 'start: all but the build is done'
    START_TAKEN = 'start: the call is taken, and not sent yet'
    START_SENT = 'start: the call is sent'
    START_CARRIED_OUT = 'start: all is done, and not written down yet'
    # Its end.
    END_CLAIMED = 'end: the event is claimed'
    END_BEGUN = 'end: nothing of it can start any more'
    END_DELETED = 'end: the deletion of a server was asked for'
    END_GONE = 'end: a server is gone, its room is back'
    END_OVER = 'end: the lease is over'
    END_REVOKED = 'end: the credential is revoked'
    END_CARRIED_OUT = 'end: all is done, and not written down yet'


def reached(step: Step, what: str) -> None:
    """A process has come so far. For tests, which kill it just there.

    :param what: the lease, or the servers of one that is to be
    """
    LOG.debug('%s: %s', what, step.value)


#: The states of a lease that is to start, or whose start was cut off.
_TO_START = ('PENDING', 'STARTING')
#: The states of a lease whose servers have to go.
_ENDING = ('TERMINATING', 'TERMINATED')

Outcome: ty.TypeAlias = Later | None
Lease: ty.TypeAlias = dict[str, ty.Any]


class Lifecycle:
    """The life of the leases.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease, e.g. ``lease.create``
    :param patience: seconds a start waits for its host to be left
    :param lost_after: seconds that a build has left no trace after which it
        is sent again
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: Cloud, opens: ty.Callable[[str], str],
                 notify: ty.Callable[[str, Lease], None],
                 patience: int, lost_after: int = 120) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._opens = opens
        self._notify = notify
        self._patience = patience
        self._lost_after = lost_after
        self._missing: dict[str, int] = {}

    # -- events ----------------------------------------------------------

    def start(self, lease_id: str, when_due: bool = False) -> Outcome:
        """Send the held call of a lease, exactly once.

        :param when_due: put it off when the lease was moved meanwhile
        """
        with self._database.reader() as session:
            lease = _found(session, lease_id)
            held = session.get(models.HeldBuild, lease_id)
            now = self._clock.now()
            if lease.status not in _TO_START or lease.end_date <= now:
                return None
            if when_due and lease.start_date > now:
                return Later(lease.start_date - now, 'it was moved')
            if held is not None and held.state != models.HeldBuild.HELD:
                return None
            if self._waits_for_host(session, lease):
                return Later(AGAIN, 'its host is not empty yet')
            sealed = None if held is None else held.sealed
        if sealed is None:
            return self._begin(lease_id, when_due)
        reached(Step.START_READ, lease_id)
        try:
            self._send(lease_id, sealed, lambda: self._may_send(
                lease_id, when_due))
        except errors.CloudUnavailable as exc:
            # However long it takes: it is not the lease that fails.
            LOG.warning('Lease %s cannot start yet: %s', lease_id, exc)
            return Later(AWAY, str(exc))
        with self._database.reader() as session:
            lease = _found(session, lease_id)
            if not when_due or lease.status != 'PENDING' or (
                    lease.start_date <= now):
                return None
            servers = _servers(lease)
        # They were made ready to be built, and are to be held again.
        self._cloud.hold(servers)
        return Later(lease.start_date - now, 'it was just moved')

    def _send(self, lease_id: str, sealed: str, gate: ty.Callable[[], bool],
              ) -> None:
        with self._database.reader() as session:
            servers = _servers(_found(session, lease_id))
            credential = session.get(models.Credential, lease_id)
        try:
            self._cloud.send(
                self._opens(sealed),
                None if credential is None else self._opens(
                    credential.sealed), servers, gate)
        except errors.NotDelegated as exc:
            self._database.retried(self._never_started, lease_id, str(exc))
        reached(Step.START_SENT, lease_id)

    def _begin(self, lease_id: str, when_due: bool) -> Outcome:
        """Its servers come later, from now on."""
        openings = self._database.retried(
            self._take_places, lease_id, when_due)
        if not isinstance(openings, list):
            return openings
        for opening in openings:
            self._cloud.open(opening)
        described = self._database.retried(self._activate, lease_id)
        if described is not None:
            self._notify('lease.event.start_lease', described)
        elif self._is_ending(lease_id):
            # It ended meanwhile, and what was opened last is to be closed.
            self._close(lease_id)
        return None

    def open(self, lease_id: str) -> None:
        """Let the reservations of a lease be used; safe to repeat."""
        with self._database.reader() as session:
            openings = _openings(_found(session, lease_id))
        for opening in openings:
            self._cloud.open(opening)

    def _is_ending(self, lease_id: str) -> bool:
        with self._database.reader() as session:
            return _found(session, lease_id).status in _ENDING

    def _take_places(self, lease_id: str, when_due: bool,
                     ) -> list[Opening] | Outcome:
        """What is to be opened; it is not changed any more after this."""
        now = self._clock.now()
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if when_due and lease.start_date > now:
                return Later(lease.start_date - now, 'it was just moved')
            if lease.status not in _TO_START or _servers(lease):
                # Servers have a call that builds them; without it they
                # cannot start.
                return None
            self._enter(lease, 'STARTING')
            return _openings(lease)

    def _close(self, lease_id: str) -> None:
        with self._database.reader() as session:
            openings = _openings(_found(session, lease_id))
        for opening in openings:
            self._cloud.close(opening.reservation_id)

    def _activate(self, lease_id: str) -> Lease | None:
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.status != 'STARTING':
                return None
            self._enter(lease, 'ACTIVE')
            for reservation in lease.reservations:
                reservation.status = 'active'
            return views.describe(lease)

    def _waits_for_host(self, session: orm.Session, lease: models.Lease,
                        ) -> bool:
        """Whether servers of leases that are over still stand in the way."""
        now = self._clock.now()
        if now >= lease.start_date + self._patience:
            return False
        hosts = {booking.host_id for booking in _bookings(lease)}
        return session.execute(sa.select(models.Booking.id).where(
            models.Booking.host_id.in_(hosts), models.Booking.running,
            models.Booking.end_date <= now)).first() is not None

    def _may_send(self, lease_id: str, when_due: bool) -> bool:
        """The gate: true for one caller only, whoever asks how often.

        It comes right before the cast. A worker that dies before it leaves
        the call unsent, and another one begins again; a worker that was
        given up for dead and comes back finds the gate closed.
        """
        return self._database.retried(self._take_held, lease_id, when_due)

    def _take_held(self, lease_id: str, when_due: bool) -> bool:
        reached(Step.START_READY, lease_id)
        now = self._clock.now()
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if when_due and lease.start_date > now:
                # It was moved meanwhile, and start() puts it off.
                return False
            taken = session.execute(
                sa.update(models.HeldBuild)
                .where(models.HeldBuild.lease_id == lease_id,
                       models.HeldBuild.state == models.HeldBuild.HELD)
                .values(state=models.HeldBuild.SENT, sent_at=now))
            if lease.status != 'PENDING' or ty.cast(
                    'sa.CursorResult[ty.Any]', taken).rowcount != 1:
                return False
            self._enter(lease, 'STARTING')
            described = views.describe(lease)
        LOG.info('Lease %s: sending its build', lease_id)
        self._notify('lease.event.start_lease', described)
        reached(Step.START_TAKEN, lease_id)
        return True

    def send_lost(self) -> None:
        """Send again the builds that got lost.

        A worker died between taking a build and sending it, or a message bus
        lost it. Sent twice, a build would leave a running server that nobody
        knows. So it is sent again only when it has been missing for long
        enough to be done, had it arrived.
        """
        now = self._clock.now()
        with self._database.reader() as session:
            sent = session.execute(
                sa.select(models.HeldBuild.lease_id, models.HeldBuild.sealed,
                          models.HeldBuild.sent_at)
                .join(models.Lease,
                      models.Lease.id == models.HeldBuild.lease_id)
                .where(models.Lease.status == 'STARTING',
                       models.HeldBuild.state == models.HeldBuild.SENT)
            ).all()
            servers = {row.lease_id: _servers(_found(session, row.lease_id))
                       for row in sent}
        # What has arrived since is not missed any more.
        self._missing = {
            row.lease_id: self._missing.get(row.lease_id, now)
            for row in sent if self._cloud.is_missing(servers[row.lease_id])}
        for row in sent:
            since = self._missing.get(row.lease_id, now)
            if now - max(since, row.sent_at) >= self._lost_after:
                LOG.warning('Lease %s: its build got lost, sending it again',
                            row.lease_id)
                self._send_again(row.lease_id, row.sealed, row.sent_at)

    def _send_again(self, lease_id: str, sealed: str, sent_at: int) -> None:
        try:
            self._send(lease_id, sealed, functools.partial(
                self._may_send_again, lease_id, sent_at))
        except Exception:
            LOG.exception('Lease %s: its build could not be sent again yet',
                          lease_id)

    def _may_send_again(self, lease_id: str, sent_at: int) -> bool:
        """The gate of a build that got lost: true for one caller only."""
        return self._database.retried(self._take_again, lease_id, sent_at)

    def _take_again(self, lease_id: str, sent_at: int) -> bool:
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            taken = session.execute(
                sa.update(models.HeldBuild)
                .where(models.HeldBuild.lease_id == lease_id,
                       models.HeldBuild.state == models.HeldBuild.SENT,
                       models.HeldBuild.sent_at == sent_at)
                .values(sent_at=self._clock.now()))
            return lease.status == 'STARTING' and ty.cast(
                'sa.CursorResult[ty.Any]', taken).rowcount == 1

    def announce(self, lease_id: str, event_type: str) -> Outcome:
        """Tell the world that an event of a lease has come."""
        described = self._described(lease_id)
        if described['status'] not in (*_ENDING, views.DELETING):
            self._notify(f'lease.event.{event_type}', described)
        return None

    def expire(self, lease_id: str) -> Outcome:
        """An offer that nobody accepted in time is over."""
        self._database.retried(self._expire, lease_id)
        return None

    def _expire(self, lease_id: str) -> None:
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.status != 'OFFERED':
                return
            described = self._finish(session, lease)
        LOG.info('Lease %s: nobody accepted the offer', lease_id)
        self._notify('lease.event.expire_offer', described)

    # -- the end -----------------------------------------------------------

    def delete(self, lease_id: str) -> None:
        """End a lease that its owner does not want any more.

        It is over at once if it has no servers; else they are deleted by
        whoever carries out events. Safe to call again at any time.

        :raises NotFound: when there is no such lease
        """
        described = self._database.retried(self._delete, lease_id)
        if described is None:
            return
        self._notify('lease.delete', described)
        if any(one['servers'] for one in described['reservations']):
            return
        try:
            self.end(lease_id)
        except Exception:
            LOG.exception('Lease %s is not over yet; its end is tried again '
                          'by whoever carries out events', lease_id)

    def _delete(self, lease_id: str) -> Lease | None:
        now = self._clock.now()
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.deleted_at is not None:
                return None
            lease.deleted_at = lease.updated_at = now
            if lease.status != 'TERMINATED':
                self._enter(lease, 'TERMINATING')
                # Who carries out its end now will find that he does not.
                session.execute(
                    sa.update(models.Event)
                    .where(models.Event.lease_id == lease_id,
                           models.Event.event_type == states.EventType.END)
                    .values(status='UNDONE', due=now, claimed_by=None,
                            claimed_until=0, updated_at=now))
            session.flush()
            session.expire(lease)
            return views.describe(lease)

    def end(self, lease_id: str, when_due: bool = False) -> Outcome:
        """Delete the servers of a lease; done when they are gone.

        :param when_due: put it off when the lease was prolonged meanwhile
        """
        servers = self._database.retried(self._begin_end, lease_id, when_due)
        if isinstance(servers, Later):
            return servers
        reached(Step.END_BEGUN, lease_id)
        self._close(lease_id)
        waiting = [server_id for server_id in servers
                   if not self._is_gone(lease_id, server_id)]
        if waiting:
            return Later(AGAIN, 'not gone yet: ' + ', '.join(waiting))
        self._database.retried(self._finish_if_empty, lease_id)
        return None

    def _is_gone(self, lease_id: str, server_id: str) -> bool:
        """Ask for the end of a server, and look whether it has come.

        One that cannot be deleted does not keep the others of its lease.
        """
        try:
            self._cloud.delete(server_id)
            reached(Step.END_DELETED, lease_id)
            seen = self._cloud.look(server_id)
            self.observe(server_id, seen)
        except Exception:
            LOG.exception('Lease %s: server %s could not be deleted',
                          lease_id, server_id)
            return False
        return seen.state is ServerState.GONE

    def _begin_end(self, lease_id: str, when_due: bool,
                   ) -> list[str] | Later:
        """No start after this; returns the servers that have to go."""
        now = self._clock.now()
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.status == 'TERMINATED':
                return []
            if when_due and lease.status != 'TERMINATING' and (
                    lease.end_date > now):
                return Later(lease.end_date - now, 'it was prolonged')
            if lease.status != 'TERMINATING':
                self._enter(lease, 'TERMINATING')
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            return _servers(lease)

    # -- what is seen of the servers ---------------------------------------

    def observe(self, server_id: str, seen: Seen) -> list[str]:
        """Make the books true for a server, given what was seen of it.

        :returns: the service hosts whose usage the books may have wrong
            now, because a booking came or left
        """
        try:
            return self._observe(server_id, seen)
        except errors.NotFound:
            # Its lease was withdrawn in between.
            return []

    def _observe(self, server_id: str, seen: Seen) -> list[str]:
        if seen.state is ServerState.RUNNING or seen.host is not None and (
                seen.state is ServerState.BUILDING):
            return self._database.retried(self._stands, server_id, seen)
        if seen.state is ServerState.GONE:
            self._database.retried(self._gone, server_id)
        elif seen.state is ServerState.ERROR:
            self._database.retried(self._failed, server_id, seen)
        return []

    def _gone(self, server_id: str) -> None:
        """Give the room back; the last server takes its lease with it.

        What was there before the server stays: another one may take its
        place, until the lease is ending.
        """
        with self._database.writer() as session:
            booking = _booking_of(session, server_id)
            if booking is None:
                return
            lease = _locked(session, booking.reservation.lease_id)
            # Its place may have been taken by another one before the lock.
            booking = session.get(models.Booking, booking.id,
                                  with_for_update=True, populate_existing=True)
            if booking is None or booking.server_id != server_id:
                return
            left = None
            if booking.reservation.flavor is not None and (
                    lease.status not in _ENDING):
                left = books.new_of(booking, server_id=None, running=False)
            books.amend(session, self._clock.now(),
                        [books.Edit(booking, left)])
            lease_id = lease.id
        LOG.info('Lease %s: server %s is gone', lease_id, server_id)
        reached(Step.END_GONE, lease_id)
        self._database.retried(self._finish_if_empty, lease_id)

    def _finish_if_empty(self, lease_id: str) -> None:
        """A lease without servers is over."""
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.status == 'TERMINATED' or _servers(lease) or (
                    lease.status != 'TERMINATING' and _bookings(lease)):
                return
            described = self._finish(session, lease)
        reached(Step.END_OVER, lease_id)
        LOG.info('Lease %s is over', lease_id)
        self._notify('lease.event.end_lease', described)
        self.revoke_of(lease_id)

    def revoke_of(self, lease_id: str) -> None:
        """Give back what let us act for the owner of a lease that is over.

        What fails is logged and tried again by :meth:`revoke_over`.
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        if row is None:
            return
        try:
            self._cloud.revoke(self._opens(row.sealed))
        except Exception:
            LOG.exception('Lease %s is over, but the credential of its owner '
                          'could not be revoked yet', lease_id)
            return
        reached(Step.END_REVOKED, lease_id)
        self._database.retried(self._forget_credential, lease_id)

    def _forget_credential(self, lease_id: str) -> None:
        with self._database.writer() as session:
            session.execute(sa.delete(models.Credential).where(
                models.Credential.lease_id == lease_id))

    def revoke_over(self) -> None:
        """Give back what is left of leases that are over."""
        with self._database.reader() as session:
            over = list(session.scalars(
                sa.select(models.Credential.lease_id).outerjoin(
                    models.Lease,
                    models.Lease.id == models.Credential.lease_id)
                .where(sa.or_(models.Lease.id.is_(None),
                              models.Lease.status == 'TERMINATED'))))
        for lease_id in over:
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
            kept = list(session.scalars(sa.select(models.Credential.sealed)))
        return given - set(map(self._opens, kept)) if given else given

    def _finish(self, session: orm.Session, lease: models.Lease) -> Lease:
        """Nothing of a lease is left but its record."""
        books.amend(session, self._clock.now(), [
            books.Edit(booking, None) for booking in _bookings(lease)])
        self._enter(lease, 'TERMINATED')
        for reservation in lease.reservations:
            states.RESERVATION.check(reservation.status, 'deleted')
            reservation.status = 'deleted'
            reservation.updated_at = self._clock.now()
        for event in lease.events:
            event.status = 'DONE'
        session.execute(sa.delete(models.HeldBuild).where(
            models.HeldBuild.lease_id == lease.id))
        session.flush()
        return views.describe(lease)

    def _stands(self, server_id: str, seen: Seen) -> list[str]:
        """A server has a host: its booking follows it to where it is."""
        with self._database.writer() as session:
            booking = _booking_of(session, server_id)
            if booking is None:
                return []
            lease = _locked(session, booking.reservation.lease_id)
            stale = self._follow(session, lease, booking, seen.host)
            if seen.state is ServerState.RUNNING:
                self._runs(lease, booking)
            return stale

    def _runs(self, lease: models.Lease, booking: models.Booking) -> None:
        """A server runs; with the last one, its lease does."""
        booking.running = True
        reservation = booking.reservation
        if reservation.status == 'pending' and all(
                one.running for one in reservation.bookings):
            reservation.status = 'active'
        if lease.status == 'STARTING' and all(
                one.status == 'active' for one in lease.reservations):
            self._enter(lease, 'ACTIVE')
            LOG.info('Lease %s is ACTIVE', lease.id)

    def _follow(self, session: orm.Session, lease: models.Lease,
                booking: models.Booking, host: str | None) -> list[str]:
        """Move a booking to the host its server is on, whatever is there.

        It is Nova that decides where a server stands: the rule is not asked.
        """
        hosts = {row.id: row for row in session.scalars(
            sa.select(models.Host).where(sa.or_(
                models.Host.uuid == host,
                models.Host.id == booking.host_id)))}
        new = [row for row in hosts.values() if row.uuid == host]
        if not new or new[0].id == booking.host_id:
            return []
        LOG.info('Lease %s: server %s stands on host %s, its booking follows',
                 lease.id, booking.server_id, new[0].name)
        edits = [books.Edit(
            booking, books.new_of(booking, host_id=new[0].id))]
        # Whose place it took gets its own, so that both have one.
        edits += [books.Edit(
            other, books.new_of(other, host_id=booking.host_id))
            for other in booking.reservation.bookings
            if other.host_id == new[0].id and not other.running and
            other.id != booking.id][:1] if booking.host_id else []
        left = booking.host_id
        books.amend(session, self._clock.now(), edits, force=True)
        if left and (booking.reservation.params or {}).get('affinity'):
            self._bring_along(session, booking, left)
        return [row.service_host for row in hosts.values()]

    def _bring_along(self, session: orm.Session, booking: models.Booking,
                     left: int) -> None:
        """Of servers that stay together, the last one to leave a host takes
        the places with it that nobody has come to, as far as there is room.
        """
        places = [one for one in booking.reservation.bookings
                  if one.host_id == left]
        if any(one.placed_at is not None or one.running for one in places):
            return
        try:
            for place in places:
                # What moved before it is counted.
                session.flush()
                books.amend(session, self._clock.now(), [books.Edit(
                    place, books.new_of(place, host_id=booking.host_id))])
        except books.Full:
            LOG.warning('Reservation %s: server %s has moved, and where it is '
                        'there is no room for all places that are to be '
                        'with it', booking.reservation_id, booking.server_id)

    def _failed(self, server_id: str, seen: Seen) -> None:
        """A server could not be built: its room goes back, the lease fails.

        A server that ran before has a fault of its own, not of its lease.
        """
        with self._database.writer() as session:
            booking = _booking_of(session, server_id)
            if booking is None or booking.running or (
                    booking.host_id is None):
                return
            if booking.reservation.flavor is not None:
                # The place is the lease's, whatever becomes of a server.
                return
            lease = _locked(session, booking.reservation.lease_id)
            self._give_room_back(session, [booking])
            booking.reservation.status = 'error'
            if lease.status != 'TERMINATING':
                self._enter(lease, 'ERROR')
                lease.status_reason = (
                    f'Server {server_id} could not be built: '
                    f'{seen.fault or "Nova gave no reason"}')
            described = views.describe(lease)
        LOG.warning('Lease %s: server %s could not be built: %s',
                    described['id'], server_id, seen.fault)
        self._notify('lease.update', described)

    def _give_room_back(self, session: orm.Session,
                        bookings: ty.Iterable[models.Booking]) -> None:
        """The bookings stay, and tie their servers to their lease."""
        books.amend(session, self._clock.now(), [
            books.Edit(booking, books.new_of(booking, host_id=None))
            for booking in bookings])

    def give_up(self, lease_id: str, event_type: str) -> None:
        """An event failed for good; a lease that cannot start has failed."""
        if event_type == states.EventType.START:
            self._database.retried(
                self._never_started, lease_id,
                'The build of its servers could not be sent to Nova.')

    def _never_started(self, lease_id: str, reason: str) -> None:
        """Its room goes back; its held servers wait to be deleted."""
        with self._database.writer() as session:
            lease = _locked(session, lease_id)
            if lease.status not in ('PENDING', 'STARTING'):
                return
            self._enter(lease, 'ERROR')
            lease.status_reason = reason
            for reservation in lease.reservations:
                reservation.status = 'error'
            self._give_room_back(session, _bookings(lease))
            described = views.describe(lease)
        LOG.warning('Lease %s could not start: %s', lease_id, reason)
        self._notify('lease.update', described)

    # -- the rest ----------------------------------------------------------

    def unfinished(self) -> dict[str, Seen]:
        """The servers of all leases that are not over, as the books have them.

        Those that do not run yet are HELD or being built; this says HELD.
        """
        with self._database.reader() as session:
            return {row.server_id: Seen(
                ServerState.RUNNING if row.running else ServerState.HELD,
                row.uuid if row.running else None)
                for row in session.execute(
                    sa.select(models.Booking.server_id,
                              models.Booking.running, models.Host.uuid)
                    .outerjoin(models.Host,
                               models.Host.id == models.Booking.host_id)
                    .where(models.Booking.server_id.is_not(None))
                    .order_by(models.Booking.id))}

    def check(self, server_id: str) -> tuple[Seen, list[str]]:
        """Look at a server and make the books true for it.

        :returns: what was seen, and what :meth:`observe` returned
        """
        seen = self._cloud.look(server_id)
        return seen, self.observe(server_id, seen)

    def _enter(self, lease: models.Lease, status: str) -> None:
        states.LEASE.check(lease.status, status)
        lease.status = status
        lease.updated_at = self._clock.now()

    def _described(self, lease_id: str) -> Lease:
        with self._database.reader() as session:
            return views.describe(_found(session, lease_id))


def _locked(session: orm.Session, lease_id: str) -> models.Lease:
    """A lease that nobody else changes until the transaction ends."""
    return _found(session, lease_id, with_for_update=True,
                  populate_existing=True)


def _found(session: orm.Session, lease_id: str, **options: ty.Any,
           ) -> models.Lease:
    """A lease.

    :raises NotFound: when it was withdrawn
    """
    lease = session.get(models.Lease, lease_id, **options)
    if lease is None:
        raise errors.NotFound(f'Lease {lease_id} could not be found.')
    return lease


def _bookings(lease: models.Lease) -> list[models.Booking]:
    return [booking for reservation in lease.reservations
            for booking in reservation.bookings]


def _openings(lease: models.Lease) -> list[Opening]:
    """The reservations of a lease that servers come to later."""
    return [Opening(one.id, lease.project_id, lease.user_id, one.flavor,
                    (one.params or {}).get('affinity'))
            for one in lease.reservations if one.flavor is not None]


def _servers(lease: models.Lease) -> list[str]:
    return [booking.server_id for booking in _bookings(lease)
            if booking.server_id is not None]


def _booking_of(session: orm.Session, server_id: str,
                ) -> models.Booking | None:
    return session.scalars(sa.select(models.Booking).where(
        models.Booking.server_id == server_id)).one_or_none()
