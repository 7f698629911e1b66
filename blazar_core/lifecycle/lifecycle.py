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
engine (:mod:`blazar_core.lifecycle.engine`) through :meth:`Lifecycle.start`,
:meth:`Lifecycle.end` and :meth:`Lifecycle.announce`. What is **seen** of its
servers in the cloud, by a notification or by a comparison, is told to
:meth:`Lifecycle.observe`. Every step locks the lease's row first, and every
one may be done again without harm.
"""

import contextlib
import dataclasses
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import ledger
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import steps

__all__ = ['Later', 'Lifecycle']

LOG = logging.getLogger(__name__)

#: Seconds between two looks at servers that are being deleted, and at a host
#: that the servers of an ended lease have not left; notifications come
#: sooner as a rule.
AGAIN = 2

#: Seconds until a start is tried again for which the cloud was not there.
AWAY = 5

#: Seconds at most between two tries of an end, and of a start that could not
#: be placed.
LONGEST_PAUSE = 300

#: Seconds at most between two tries of a start that waits for something that
#: may come without anybody telling us.
LONGEST_WAIT = 60

#: Seconds that may pass between the right to send a build and the sending.
SEND_SECONDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """An action is not finished: do it again in so many seconds.

    :ivar most: each time that nothing has happened to it in between, the
        pause is twice as long, up to so many seconds; 0: it is always the
        same
    """

    seconds: int
    why: str
    most: int = 0

    def after(self, waits: int) -> int:
        """The pause when it was put off so many times before."""
        return max(self.seconds, min(
            self.most, self.seconds << min(waits, 16)))


#: The states of a lease of which something is to start.
_TO_START = ('PENDING', 'STARTING')
#: The states of a lease that has begun.
_BEGUN = ('STARTING', 'ACTIVE')
#: The states of a lease whose servers have to go.
_ENDING = ('TERMINATING', 'TERMINATED')

Outcome: ty.TypeAlias = Later | None
Lease: ty.TypeAlias = dict[str, ty.Any]


class _Closed(Exception):
    """A build is not to be sent, or somebody else has sent it."""


class Lifecycle:
    """The life of the leases.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease, e.g. ``lease.create``
    :param patience: seconds a start waits for its host to be left
    :param lost_after: seconds that a build has not been on its way after
        which nobody is at work on it any more
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: clouds.Cloud, opens: ty.Callable[[str], str],
                 notify: ty.Callable[[str, Lease], None],
                 patience: int, lost_after: int) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._opens = opens
        self._notify = notify
        self._patience = patience
        self._lost_after = lost_after
        #: What there was of builds at the last look, and since when.
        self._unseen: dict[str, tuple[clouds.Trace, int]] = {}

    # -- events ----------------------------------------------------------

    def start(self, lease_id: str, when_due: bool = False) -> Outcome:
        """Send the held call of a lease for the servers that wait for it.

        Each server is sent once; one that Nova could not place waits again.

        :param when_due: put it off when the lease was moved meanwhile
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            held = session.get(models.HeldBuild, lease_id)
            now = self._clock.now()
            if lease.status not in _TO_START or lease.end_date <= now:
                return None
            if when_due and lease.start_date > now:
                return Later(lease.start_date - now, 'it was moved')
            waiting = _waiting(lease)
            if _servers(lease) and (held is None or not waiting):
                return None
            if _is_building(lease):
                return Later(AWAY, 'its other servers are being built',
                             LONGEST_WAIT)
            if self._waits_for_host(session, lease):
                return Later(AGAIN, 'its host is not empty yet', 4 * AGAIN)
            sealed = None if held is None else held.sealed
        if sealed is None:
            return self._begin(lease_id, when_due)
        steps.reached(steps.Step.START_READ, lease_id)
        try:
            why = self._send_waiting(lease_id, sealed, waiting, when_due)
        except errors.CloudUnavailable as exc:
            # However long it takes: it is not the lease that fails.
            LOG.warning('Lease %s cannot start yet: %s', lease_id, exc)
            self._explain(lease_id, str(exc))
            return Later(AWAY, str(exc), LONGEST_WAIT)
        return self._rest(lease_id, when_due, why)

    def _send_waiting(self, lease_id: str, sealed: str,
                      servers: ty.Collection[str], when_due: bool) -> str:
        begun: list[Lease] = []

        def gate(server_ids: ty.Collection[str]) -> clouds.Deadline | None:
            steps.reached(steps.Step.START_READY, lease_id)
            deadline = clouds.Deadline(self._clock, SEND_SECONDS)
            try:
                begun.extend(self._database.retried(
                    self._take, lease_id, server_ids, when_due))
            except (_Closed, errors.NotFound):
                return None
            return self._pass(lease_id, deadline)

        why = self._send(lease_id, sealed, servers, gate)
        # Only now: it may take its time, and a build that is not sent is
        # taken to be lost.
        for described in begun:
            self._notify('lease.event.start_lease', described)
        return why

    def _pass(self, lease_id: str, deadline: clouds.Deadline,
              ) -> clouds.Deadline:
        LOG.info('Lease %s: sending its build', lease_id)
        steps.reached(steps.Step.START_TAKEN, lease_id)
        return deadline

    def _send(self, lease_id: str, sealed: str,
              servers: ty.Collection[str], gate: clouds.Gate) -> str:
        with self._database.reader() as session:
            credential = session.get(models.Credential, lease_id)
        why = ''
        try:
            why = self._cloud.send(
                self._opens(sealed),
                None if credential is None else self._opens(
                    credential.sealed), servers, gate)
        except errors.NotDelegated as exc:
            self._database.retried(
                self._never_started, lease_id, str(exc))
        steps.reached(steps.Step.START_SENT, lease_id)
        return why

    def _rest(self, lease_id: str, when_due: bool, why: str) -> Outcome:
        """What becomes of the servers that were not sent."""
        now = self._clock.now()
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            waiting = _waiting(lease)
        if lease.status not in _TO_START or not waiting:
            return None
        # They were made ready to be built, and are to be held again.
        self._cloud.hold(waiting)
        if when_due and lease.start_date > now:
            return Later(lease.start_date - now, 'it was just moved')
        if why:
            LOG.warning('Lease %s: %s of its servers cannot start yet: %s',
                        lease_id, len(waiting), why)
            self._explain(lease_id, why)
            return Later(_pause(lease, now), why)
        return Later(AGAIN, 'its servers are other ones than they were')

    def _explain(self, lease_id: str, why: str) -> None:
        """Say in a lease why servers of it have not started yet."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            if lease.status_reason == _put_off(_waiting(lease), why):
                return
        self._database.retried(self._write_why, lease_id, why)

    def _write_why(self, lease_id: str, why: str) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            waiting = _waiting(lease)
            if lease.status in _TO_START and waiting:
                lease.status_reason = _put_off(waiting, why)
                lease.updated_at = self._clock.now()

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
            openings = _openings(api.found(session, lease_id))
        for opening in openings:
            self._cloud.open(opening)

    def _is_ending(self, lease_id: str) -> bool:
        with self._database.reader() as session:
            return api.found(session, lease_id).status in _ENDING

    def _take_places(self, lease_id: str, when_due: bool,
                     ) -> list[clouds.Opening] | Outcome:
        """What is to be opened; it is not changed any more after this."""
        now = self._clock.now()
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if when_due and lease.start_date > now:
                return Later(lease.start_date - now, 'it was just moved')
            if lease.status not in _TO_START or _servers(lease):
                # Servers have a call that builds them; without it they
                # cannot start.
                return None
            self._enter(lease, 'STARTING')
            return _openings(lease)

    def _close(self, lease_id: str) -> bool:
        """Let nobody use the reservations of a lease; returns whether it is
        so. One that cannot be closed yet keeps nothing else from ending.
        """
        with self._database.reader() as session:
            openings = _openings(api.found(session, lease_id))
        closed = True
        for opening in openings:
            try:
                self._cloud.close(opening.reservation_id)
            except Exception:
                closed = False
                LOG.exception('Lease %s: reservation %s could not be closed '
                              'yet', lease_id, opening.reservation_id)
        return closed

    def _activate(self, lease_id: str) -> Lease | None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
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
            models.Booking.host_id.in_(hosts),
            models.Booking.placed_at.is_not(None),
            models.Booking.end_date <= now)).first() is not None

    def _take(self, lease_id: str, server_ids: ty.Collection[str],
              when_due: bool) -> list[Lease]:
        """The right to send the builds of servers: one gets it, once.

        It comes right before the cast. A worker that dies before it leaves
        them unsent, and another one begins again; a worker that was given up
        for dead and comes back finds the gate closed.

        :returns: the lease, if it has begun with that
        :raises _Closed: when they are not to be sent, or not by us
        """
        now = self._clock.now()
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status not in _TO_START or lease.end_date <= now or (
                    when_due and lease.start_date > now):
                # It was moved meanwhile, or ended.
                raise _Closed
            if _is_building(lease):
                raise _Closed
            self._mark_sent(session, dict.fromkeys(server_ids), now)
            begins = lease.status == 'PENDING'
            self._enter(lease, 'STARTING')
            lease.status_reason = _failures(lease)
            return [views.describe(lease)] if begins else []

    def _mark_sent(self, session: orm.Session,
                   servers: ty.Mapping[str, int | None], now: int) -> None:
        """Write down that the builds of servers are sent.

        :param servers: with when they were sent before
        :raises _Closed: when somebody else has sent one of them, or it is
            gone
        """
        for server_id, before in servers.items():
            taken = session.execute(
                sa.update(models.Booking)
                .where(models.Booking.server_id == server_id,
                       models.Booking.failed_at.is_(None),
                       models.Booking.sent_at.is_(None) if before is None
                       else models.Booking.sent_at == before)
                .values(sent_at=now))
            if ty.cast('sa.CursorResult[ty.Any]', taken).rowcount != 1:
                raise _Closed
        session.expire_all()

    # -- builds that came to nothing -----------------------------------------

    def send_lost(self) -> None:
        """See to the builds that were sent and are not on their way.

        A worker died between taking a build and sending it, or the message
        bus lost it: it has left no trace, and is sent again. Or who built it
        died over it: that is the end of it, and its server is made one that
        has failed. Both only when it has been so for long enough to be done,
        were somebody at it: sent twice, a build would leave a running server
        that nobody knows.
        """
        now = self._clock.now()
        unseen: dict[str, tuple[clouds.Trace, int]] = {}
        for lease_id, sent in self._sent().items():
            try:
                traces = self._cloud.traces(list(sent))
            except Exception as exc:
                # All that was sent may still be waiting for it.
                LOG.warning('Lease %s: its builds cannot be looked for: %s',
                            lease_id, exc, exc_info=not isinstance(
                                exc, errors.CloudUnavailable))
                continue
            for server_id, trace in traces.items():
                before = self._unseen.get(server_id)
                unseen[server_id] = before if (
                    before is not None and before[0] is trace) else (
                        trace, now)
            late = {server_id: trace for server_id, trace in traces.items()
                    if now - max(unseen[server_id][1], sent[server_id] or 0)
                    >= self._lost_after and (
                        trace is clouds.Trace.CAUGHT or sent[server_id])}
            if late:
                self._recover(lease_id, late, sent)
        # What has arrived since is not missed any more.
        self._unseen = unseen

    def _sent(self) -> dict[str, dict[str, int | None]]:
        """By lease, the servers that should run, and when they were sent.

        Those that wait to be sent again are among them: the cloud may stand
        still where it says that it could not place them. So are those that
        have failed: who made them so may not have come to the end of it.
        """
        sent: dict[str, dict[str, int | None]] = {}
        with self._database.reader() as session:
            for row in session.execute(
                    sa.select(models.Lease.id, models.Booking.server_id,
                              models.Booking.sent_at)
                    .join(models.Booking.reservation)
                    .join(models.Reservation.lease)
                    .where(models.Lease.status.in_((*_BEGUN, 'ERROR')),
                           models.Booking.server_id.is_not(None),
                           models.Booking.running.is_(False))):
                sent.setdefault(row.id, {})[row.server_id] = row.sent_at
        return sent

    def _recover(self, lease_id: str, late: ty.Mapping[str, clouds.Trace],
                 sent: ty.Mapping[str, int | None]) -> None:
        with self._database.reader() as session:
            held = session.get(models.HeldBuild, lease_id)
        again = {} if held is None else {
            server_id: sent[server_id] for server_id, trace in late.items()
            if trace is clouds.Trace.NONE}
        try:
            if held is not None and again:
                LOG.warning('Lease %s: builds got lost, sending them again: '
                            '%s', lease_id, ', '.join(again))
                self._send(lease_id, held.sealed, list(again),
                           functools.partial(self._gate_again, lease_id,
                                             again))
            for server_id in late.keys() - again.keys():
                LOG.warning('Lease %s: nobody is at work on server %s any '
                            'more', lease_id, server_id)
                self._cloud.abandon(server_id)
                self.check(server_id)
        except Exception:
            LOG.exception('Lease %s: its lost builds could not be seen to '
                          'yet', lease_id)

    def _gate_again(self, lease_id: str, sent: ty.Mapping[str, int | None],
                    server_ids: ty.Collection[str],
                    ) -> clouds.Deadline | None:
        """The gate of builds that got lost: it opens for one caller only."""
        deadline = clouds.Deadline(self._clock, SEND_SECONDS)
        try:
            self._database.retried(self._take_again, lease_id, {
                server_id: sent[server_id] for server_id in server_ids})
        except (_Closed, errors.NotFound):
            return None
        return self._pass(lease_id, deadline)

    def _take_again(self, lease_id: str, sent: ty.Mapping[str, int | None],
                    ) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status not in _BEGUN:
                raise _Closed
            self._mark_sent(session, sent, self._clock.now())

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
            lease = api.locked(session, lease_id)
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
            lease = api.locked(session, lease_id)
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
                    .values(status='UNDONE', due=now, waits=0,
                            claimed_by=None, claimed_until=0,
                            updated_at=now))
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
        steps.reached(steps.Step.END_BEGUN, lease_id)
        closed = self._close(lease_id)
        credential = self._credential(lease_id) if servers else None
        waiting = [server_id for server_id in servers
                   if not self._is_gone(lease_id, server_id, credential)]
        if waiting:
            return Later(AGAIN, 'not gone yet: ' + ', '.join(waiting),
                         LONGEST_PAUSE)
        if not closed:
            return Later(AWAY, 'its reservations could not be closed yet',
                         LONGEST_PAUSE)
        if not self._database.retried(
                self._finish_if_empty, lease_id, closed=True):
            return Later(AGAIN, 'another server has come')
        return None

    def _credential(self, lease_id: str) -> str | None:
        """What lets us act for the owner of a lease, if there is something.

        A key that was lost does not keep a lease from its end.
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        try:
            return None if row is None else self._opens(row.sealed)
        except errors.VaultError as exc:
            LOG.warning('Lease %s: its servers are not deleted in the name '
                        'of its owner: %s', lease_id, exc)
            return None

    def _is_gone(self, lease_id: str, server_id: str,
                 credential: str | None) -> bool:
        """Ask for the end of a server, and look whether it has come.

        One that cannot be deleted does not keep the others of its lease.
        """
        try:
            self._cloud.delete(server_id, credential)
            steps.reached(steps.Step.END_DELETED, lease_id)
            seen = self._cloud.look(server_id)
            self.observe(server_id, seen)
        except errors.CloudUnavailable as exc:
            LOG.warning('Lease %s: server %s is not deleted yet: %s',
                        lease_id, server_id, exc)
            return False
        except Exception:
            LOG.exception('Lease %s: server %s could not be deleted',
                          lease_id, server_id)
            return False
        return seen.state is clouds.ServerState.GONE

    def _begin_end(self, lease_id: str, when_due: bool,
                   ) -> list[str] | Later:
        """No start after this; returns the servers that have to go."""
        now = self._clock.now()
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
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

    def observe(self, server_id: str, seen: clouds.Seen,
                sent: tuple[int | None] | None = None) -> list[str]:
        """Make the books true for a server, given what was seen of it.

        :param sent: when it had been sent before somebody looked; a fault of
            it is old if it was sent once more since. None: not known
        :returns: the service hosts whose usage the books may have wrong
            now, because a booking came or left
        """
        try:
            return self._observe(server_id, seen, sent)
        except errors.NotFound:
            # Its lease was withdrawn in between.
            return []

    def _observe(self, server_id: str, seen: clouds.Seen,
                 sent: tuple[int | None] | None) -> list[str]:
        lease_id = self._lease_of(server_id)
        if lease_id is None:
            return []
        if seen.state is clouds.ServerState.RUNNING or (
                seen.host is not None and
                seen.state is clouds.ServerState.BUILDING):
            return self._database.retried(
                self._stands, lease_id, server_id, seen)
        if seen.state is clouds.ServerState.GONE:
            if self._was_never_sent(server_id):
                # While it has its booking: who dies here is followed by a
                # comparison that comes by again.
                self._cloud.forget(server_id)
            self._database.retried(self._gone, lease_id, server_id)
        elif seen.state is clouds.ServerState.ERROR:
            return self._database.retried(
                self._failed, lease_id, server_id, seen, sent)
        return []

    def _lease_of(self, server_id: str) -> str | None:
        """The lease in which a server has its booking."""
        with self._database.reader() as session:
            return session.scalar(
                sa.select(models.Reservation.lease_id)
                .join(models.Reservation.bookings)
                .where(models.Booking.server_id == server_id))

    def _was_never_sent(self, server_id: str) -> bool:
        """Whether nobody has begun to build a server of a lease.

        Asked when it is gone: a build that is sent after this finds that.
        """
        with self._database.reader() as session:
            booking = _booking_of(session, server_id)
            return booking is not None and booking.sent_at is None

    def _gone(self, lease_id: str, server_id: str) -> None:
        """Give the room back; the last server takes its lease with it.

        What was there before the server stays: another one may take its
        place, until the lease is ending.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = _booking_of(session, server_id)
            if booking is None:
                return
            left = None
            if booking.reservation.flavor is not None and (
                    lease.status not in _ENDING):
                left = ledger.new_of(
                    booking, server_id=None, running=False, sent_at=None,
                    placed_at=None, resources=booking.reservation.resources)
            ledger.amend(session, self._clock.now(),
                         [ledger.Edit(booking, left)])
            if left is not None:
                booking.failed_at = booking.moving_to = None
            self._settle(session, lease)
        LOG.info('Lease %s: server %s is gone', lease_id, server_id)
        steps.reached(steps.Step.END_GONE, lease_id)
        self._database.retried(self._finish_if_empty, lease_id)

    def _finish_if_empty(self, lease_id: str, closed: bool = False) -> bool:
        """A lease without servers is over; returns whether it is.

        :param closed: nobody can boot with its reservations any more
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status == 'TERMINATED':
                return True
            if _servers(lease) or (_openings(lease) and not closed) or (
                    lease.status != 'TERMINATING' and _bookings(lease)):
                return False
            described = self._finish(session, lease)
        steps.reached(steps.Step.END_OVER, lease_id)
        LOG.info('Lease %s is over', lease_id)
        self._notify('lease.event.end_lease', described)
        self.revoke_of(lease_id)
        return True

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
        steps.reached(steps.Step.END_REVOKED, lease_id)
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
            with _apart(lease_id):
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
        ledger.amend(session, self._clock.now(), [
            ledger.Edit(booking, None) for booking in _bookings(lease)])
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

    def _stands(self, lease_id: str, server_id: str, seen: clouds.Seen,
                ) -> list[str]:
        """A server has a host: its booking follows it to where it is."""
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = _booking_of(session, server_id)
            if booking is None:
                return []
            stale = self._follow(session, lease, booking, seen.host)
            if booking.placed_at is None:
                booking.placed_at = self._clock.now()
            if seen.state is clouds.ServerState.RUNNING:
                booking.running, booking.failed_at = True, None
                self._settle(session, lease)
            return stale

    def _settle(self, session: orm.Session, lease: models.Lease) -> None:
        """The state of a lease that was made by a boot, and has begun.

        It follows from what is left of it: while a server is still to be
        sent or is being built, it starts; after that, it is what those make
        it that run. The call that builds is kept no longer than that.
        """
        session.flush()
        session.expire_all()
        rows = _bookings(lease)
        if lease.status not in _BEGUN or not rows or _openings(lease):
            return
        for reservation in lease.reservations:
            reservation.status = _reservation_status(reservation)
        if any(map(_is_unsettled, rows)):
            return
        status = 'ACTIVE' if any(row.running for row in rows) else 'ERROR'
        if lease.status != status:
            self._enter(lease, status)
            LOG.info('Lease %s is %s', lease.id, status)
        if not any(row.failed_at for row in rows):
            lease.status_reason = ''
        session.execute(sa.delete(models.HeldBuild).where(
            models.HeldBuild.lease_id == lease.id))

    def settle_begun(self) -> None:
        """Bring leases into the state that follows from what is left of them.

        They are in it already, unless a process died over one of them.
        """
        with self._database.reader() as session:
            begun = list(session.scalars(_BEGUN_BY_BOOT.where(sa.or_(
                models.Lease.status == 'STARTING', ~_HAS_BOOKINGS))))
        for lease_id in begun:
            with _apart(lease_id), contextlib.suppress(errors.NotFound):
                self._database.retried(self._settle_again, lease_id)
                self._database.retried(self._finish_if_empty, lease_id)

    def _settle_again(self, lease_id: str) -> None:
        with self._database.writer() as session:
            self._settle(session, api.locked(session, lease_id))

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
        left = booking.host_id
        ledger.amend(session, self._clock.now(),
                     ledger.follow(booking, new[0].id), force=True)
        booking.moving_to = None
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
        if any(one.placed_at is not None for one in places):
            return
        try:
            for place in places:
                # What moved before it is counted.
                session.flush()
                ledger.amend(session, self._clock.now(), [ledger.Edit(
                    place, ledger.new_of(place, host_id=booking.host_id))])
        except ledger.Full:
            LOG.warning('Reservation %s: server %s has moved, and where it is '
                        'there is no room for all places that are to be '
                        'with it', booking.reservation_id, booking.server_id)

    def _failed(self, lease_id: str, server_id: str, seen: clouds.Seen,
                sent: tuple[int | None] | None) -> list[str]:
        """A server could not be built: its room goes back, and the state of
        its lease follows from the others.

        One for which there was no host waits to be sent again, in its room. A
        server that ran before has a fault of its own, not of its lease.

        :returns: the service host of the host that was booked, where the
            cloud may still keep what the server had
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            booking = _booking_of(session, server_id)
            if booking is None or booking.running or (
                    booking.failed_at is not None or
                    seen.unplaced and booking.sent_at is None or
                    sent not in (None, (booking.sent_at,))):
                return []
            if booking.reservation.flavor is not None:
                # The place is the lease's, whatever becomes of a server.
                return []
            fault = seen.fault or 'Nova gave no reason'
            if seen.unplaced and self._wait_again(session, lease, booking,
                                                  fault):
                return []
            stale = list(session.scalars(
                sa.select(models.Host.service_host)
                .where(models.Host.id == booking.host_id)))
            booking.failed_at = self._clock.now()
            self._give_room_back(session, [booking])
            if lease.status != 'TERMINATING':
                lease.status_reason = (
                    f'Server {server_id} could not be built: {fault}')
            self._settle(session, lease)
            described = views.describe(lease)
        LOG.warning('Lease %s: server %s could not be built: %s',
                    lease_id, server_id, seen.fault)
        self._notify('lease.update', described)
        return stale

    def _wait_again(self, session: orm.Session, lease: models.Lease,
                    booking: models.Booking, fault: str) -> bool:
        """Let a server wait in its room to be sent again; says whether.

        This is all that is written: the next start makes the server one in
        the cloud that waits, as often as it takes.
        """
        now = self._clock.now()
        if lease.status not in _TO_START or lease.end_date <= now or (
                session.get(models.HeldBuild, lease.id) is None):
            return False
        booking.sent_at = booking.placed_at = None
        pause = _pause(lease, now)
        for event in lease.events:
            if event.event_type == states.EventType.START:
                # Who is at it has sent what there was: this is not his.
                event.status, event.due = 'UNDONE', now + pause
                event.attempts = event.waits = 0
                event.claimed_by, event.claimed_until = None, 0
        lease.status_reason = _put_off(_waiting(lease), fault)
        lease.updated_at = now
        LOG.warning('Lease %s: server %s could not be placed yet, again in '
                    '%s s: %s', lease.id, booking.server_id, pause, fault)
        return True

    def _give_room_back(self, session: orm.Session,
                        bookings: ty.Iterable[models.Booking]) -> None:
        """The bookings stay, and tie their servers to their lease."""
        ledger.amend(session, self._clock.now(), [
            ledger.Edit(booking, ledger.new_of(
                booking, host_id=None, placed_at=None))
            for booking in bookings])

    def give_up(self, lease_id: str, event_type: str,
                settle: ty.Callable[[orm.Session], bool] = lambda _: True,
                ) -> None:
        """An event failed for good; a lease that cannot start has failed.

        :param settle: writes that down of the event, in the transaction that
            writes it down of the lease; false when the event is another's
        """
        self._database.retried(
            self._never_started, lease_id, 'The build of its servers could '
            'not be sent to Nova.', settle, event_type)

    def _never_started(self, lease_id: str, reason: str,
                       settle: ty.Callable[[orm.Session], bool] = (
                           lambda _: True),
                       event_type: str = states.EventType.START) -> None:
        """Its room goes back; its held servers wait to be deleted."""
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if not settle(session) or (
                    event_type != states.EventType.START or
                    lease.status not in _TO_START):
                return
            lease.status_reason = reason
            self._fail_waiting(session, lease)
            described = views.describe(lease)
        LOG.warning('Lease %s could not start: %s', lease_id, reason)
        self._notify('lease.update', described)

    def _fail_waiting(self, session: orm.Session, lease: models.Lease,
                      ) -> None:
        """What was not sent yet is not sent any more."""
        if lease.status == 'PENDING' or _openings(lease):
            self._enter(lease, 'ERROR')
            for reservation in lease.reservations:
                reservation.status = 'error'
        waiting = [row for row in _bookings(lease) if row.sent_at is None]
        for row in waiting:
            row.failed_at = self._clock.now()
        self._give_room_back(session, waiting)
        session.execute(sa.delete(models.HeldBuild).where(
            models.HeldBuild.lease_id == lease.id))
        self._settle(session, lease)

    # -- the rest ----------------------------------------------------------

    def unfinished(self) -> dict[str, clouds.Seen]:
        """The servers of all leases that are not over, as the books have them.

        Those that do not run yet are HELD or being built; this says HELD.
        """
        with self._database.reader() as session:
            return {row.server_id: clouds.Seen(
                clouds.ServerState.RUNNING, row.uuid) if row.running else
                clouds.Seen(clouds.ServerState.HELD)
                for row in session.execute(
                    sa.select(models.Booking.server_id,
                              models.Booking.running, models.Host.uuid)
                    .outerjoin(models.Host,
                               models.Host.id == models.Booking.host_id)
                    .where(models.Booking.server_id.is_not(None))
                    .order_by(models.Booking.id))}

    def check(self, server_id: str) -> tuple[clouds.Seen, list[str]]:
        """Look at a server and make the books true for it.

        :returns: what was seen, and what :meth:`observe` returned
        """
        with self._database.reader() as session:
            booking = _booking_of(session, server_id)
        seen = self._cloud.look(server_id)
        return seen, self.observe(
            server_id, seen, None if booking is None else (booking.sent_at,))

    def _enter(self, lease: models.Lease, status: str) -> None:
        states.LEASE.check(lease.status, status)
        lease.status = status
        lease.updated_at = self._clock.now()

    def _described(self, lease_id: str) -> Lease:
        with self._database.reader() as session:
            return views.describe(api.found(session, lease_id))


@contextlib.contextmanager
def _apart(lease_id: str) -> ty.Iterator[None]:
    """What fails with a lease keeps no other from its turn."""
    try:
        yield
    except errors.BooksUnavailable:
        raise
    except Exception:
        LOG.exception('Lease %s could not be seen to', lease_id)


_HAS_BOOKINGS = sa.exists().where(
    models.Booking.reservation_id == models.Reservation.id,
    models.Reservation.lease_id == models.Lease.id)
#: Leases with a reservation that servers came with, and no others.
_BEGUN_BY_BOOT = sa.select(models.Lease.id).where(
    models.Lease.status.in_(_BEGUN), sa.exists().where(
        models.Reservation.lease_id == models.Lease.id,
        models.Reservation.flavor.is_(None)))


def _bookings(lease: models.Lease) -> list[models.Booking]:
    return [booking for reservation in lease.reservations
            for booking in reservation.bookings]


def _openings(lease: models.Lease) -> list[clouds.Opening]:
    """The reservations of a lease that servers come to later."""
    return [clouds.Opening(
        one.id, lease.project_id, lease.user_id, one.flavor,
        (one.params or {}).get('affinity'))
        for one in lease.reservations if one.flavor is not None]


def _waiting(lease: models.Lease) -> list[str]:
    """The servers of a lease whose build is to be sent."""
    return [booking.server_id for booking in _bookings(lease)
            if booking.server_id is not None and booking.sent_at is None and
            booking.failed_at is None]


def _is_unsettled(booking: models.Booking) -> bool:
    """Whether a server is still to be sent, or is being built."""
    return booking.failed_at is None and not booking.running


def _is_building(lease: models.Lease) -> bool:
    """Whether of the servers that were sent some are not settled yet."""
    return any(_is_unsettled(booking) and booking.sent_at is not None
               for booking in _bookings(lease))


def _reservation_status(reservation: models.Reservation) -> str:
    """The state of a boot's reservation follows from its servers too."""
    if reservation.status != 'pending' or any(
            map(_is_unsettled, reservation.bookings)):
        return reservation.status
    return 'active' if any(
        one.running for one in reservation.bookings) else 'error'


def _pause(lease: models.Lease, now: int) -> int:
    """Seconds until servers that could not be placed are tried again.

    The longer it takes, the less often.
    """
    return max(AWAY, min(LONGEST_PAUSE, (now - lease.start_date) // 2))


def _put_off(server_ids: ty.Sequence[str], why: str) -> str:
    """What a lease says whose servers wait longer than they should."""
    return (f'Not placed yet, and tried again: {", ".join(server_ids)}. '
            f'{why}')


def _failures(lease: models.Lease) -> str:
    """What a lease says of its servers that failed."""
    failed = [ty.cast(str, booking.server_id) for booking in _bookings(lease)
              if booking.failed_at is not None]
    return f'Could not be built: {", ".join(failed)}.' if failed else ''


def _servers(lease: models.Lease) -> list[str]:
    return [booking.server_id for booking in _bookings(lease)
            if booking.server_id is not None]


def _booking_of(session: orm.Session, server_id: str,
                ) -> models.Booking | None:
    return session.scalars(sa.select(models.Booking).where(
        models.Booking.server_id == server_id)).one_or_none()
