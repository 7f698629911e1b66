# SPDX-License-Identifier: Apache-2.0

"""The one gate through which builds are sent."""

import functools
import threading
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import steps
from blazar_core.lifecycle import transitions

__all__ = ['HEAD_START', 'Right', 'SEND_SECONDS', 'Sealed', 'Sending',
           'sealed']

LOG = logging.getLogger(__name__)

#: Seconds that may pass between the right to send a build and the sending.
SEND_SECONDS = 10

#: Seconds for which a listener leaves a lease from now on to the request that
#: made it. One that takes longer finds its build sent; this is not what keeps
#: a build from being sent twice.
HEAD_START = 5


class _Closed(Exception):
    """A build must not be sent, or another process has sent it."""


class Right(ty.NamedTuple):
    """The right to send builds.

    :ivar deadline: until when they may be sent
    :ivar begun: the lease, if it has begun with that
    :ivar left: whether others of its servers wait yet
    """

    deadline: clouds.Deadline
    begun: list[facts.Lease]
    left: bool


class Sealed(ty.NamedTuple):
    """What builds the servers of a lease, sealed.

    :ivar credential: its owner's; None: there is none
    """

    call: str
    credential: str | None


def sealed(session: orm.Session, lease_ids: ty.Collection[str],
           ) -> dict[str, Sealed]:
    """What builds the servers of leases, of those that have it (yet)."""
    return {lease_id: Sealed(*found)
            for lease_id, *found in session.connection().execute(
                _SEALED, {'leases': lease_ids})}


class Sending:
    """Sends the builds of servers, each once.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: clouds.Cloud, opens: ty.Callable[[str], str],
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._opens = opens
        self._notify = notify

    def send_waiting(self, lease: models.Lease, sealed: Sealed,
                     when_due: bool) -> tuple[str, bool]:
        """Send the builds of the servers of a lease that wait for theirs.

        :param lease: as it was read in a session that is closed
        :param when_due: not if it was moved meanwhile
        :returns: why some were left out, empty when none was; and whether
            all were sent that waited when the last one was
        :raises CloudUnavailable: when something that a build needs does not
            answer; nothing was sent
        """
        lease_id = lease.id
        begun: list[facts.Lease] = []
        known, left = [lease], True

        def gate(server_ids: ty.Collection[str]) -> clouds.Deadline | None:
            nonlocal left
            steps.reached(steps.Step.START_READY, lease_id)
            try:
                deadline, begins, left = self._database.retried(
                    self._take, lease_id, known, server_ids, when_due,
                    sealed)
            except (_Closed, errors.NotFound):
                return None
            begun.extend(begins)
            return self._pass(lease_id, deadline)

        why = self._send(lease_id, sealed, facts.waiting(lease), gate)
        # Only now: it may take its time, and a build that is not sent is
        # taken to be lost.
        for described in begun:
            self._notify('lease.event.start_lease', described)
        return why, not left

    def _take(self, lease_id: str, known: list[models.Lease],
              server_ids: ty.Collection[str], when_due: bool,
              sealed: Sealed) -> Right:
        """The right to send the builds of servers: one gets it, once.

        It comes right before the cast. A worker that dies before it leaves
        them unsent, and another one begins again; a worker that was given up
        for dead and comes back finds the gate closed.

        :param known: the lease as it was read, for the first run: it is taken
            out, and one that is run again reads it with its lock, so that
            nobody who locks it meanwhile is in its way again and again
        :param sealed: what was read with it
        :raises _Closed: when they are not to be sent, or not by us
        :raises Outdated: when somebody has locked it since it was read
        """
        if known:
            # No session: for every start of a lease there is one of these.
            lease = known.pop()
            with self._database.begin() as connection:
                api.lock_as_read(connection, lease)
                return self._open(connection, lease, server_ids, when_due)
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            _check_credential(session, lease_id, sealed)
            return self._open(
                session.connection(), lease, server_ids, when_due)

    def _open(self, connection: sa.Connection, lease: models.Lease,
              server_ids: ty.Collection[str], when_due: bool) -> Right:
        """The same, with the lease locked."""
        deadline = clouds.Deadline(self._clock, SEND_SECONDS)
        now = self._clock.now()
        if lease.status not in states.TO_START or (
                lease.end_date <= now or
                when_due and lease.start_date > now):
            # It was moved meanwhile, or ended.
            raise _Closed
        if facts.is_building(lease):
            raise _Closed
        waiting = facts.waiting(lease)
        _mark_sent(connection, dict.fromkeys(server_ids), now)
        begins = lease.status == states.Lease.PENDING
        lease.enter(states.Lease.STARTING, now)
        lease.status_reason, lease.updated_at = facts.failures(lease), now
        connection.execute(_BEGUN, {
            'lease': lease.id, 'state': lease.status, 'now': now,
            'reason': lease.status_reason})
        return Right(deadline, [views.describe(lease)] if begins else [],
                     bool(set(waiting).difference(server_ids)))

    def send_own(self, lease: facts.Lease,
                 cast: ty.Callable[[clouds.Gate], None]) -> None:
        """Send the build of a lease from now on that was just reserved.

        Nothing is undone here, and nothing is raised: after a failure it is
        not known whether the build was sent. A listener sends one that was not
        taken, and looks for one that was (:mod:`blazar_core.lifecycle.lost`).

        :param lease: as it was made, with its call
        :param cast: sends the build in time, if the gate opens
        """
        lease_id, taken = lease['id'], False
        mark = uuidutils.generate_uuid()

        def gate(server_ids: ty.Collection[str]) -> clouds.Deadline | None:
            nonlocal taken
            try:
                deadline = _surely(
                    self._clock, lambda before: self._database.retried(
                        self._take_own, lease_id, server_ids, mark, before))
            except _Closed:
                LOG.warning('Lease %s was changed while it was made: a '
                            'listener sends its build', lease_id)
                return None
            taken = True
            steps.reached(steps.Step.BOOT_TAKEN, lease_id)
            return deadline

        steps.reached(steps.Step.BOOT_RESERVED, lease_id)
        try:
            cast(gate)
        except Exception as exc:
            LOG.exception('Lease %s: %s', lease_id, (
                'it is not known whether its build was sent; a listener looks '
                'for it' if taken or isinstance(exc, errors.OutcomeUnknown)
                else 'its build was not sent; a listener sends it'))
        steps.reached(steps.Step.BOOT_SENT, lease_id)
        if taken:
            _show_started(lease)

    def _take_own(self, lease_id: str, server_ids: ty.Collection[str],
                  mark: str, before: clouds.Deadline) -> clouds.Deadline:
        """The same right as :meth:`_take` gives, with nothing read before.

        :param mark: written into the event that starts the lease: it shows
            that the transaction that wrote it is committed
        :param before: what is valid when it is
        :raises _Closed: when it is not as it was made: a listener has taken
            it, or it was changed
        """
        with self._database.begin() as connection:
            now = self._clock.now()
            mine = {'lease': lease_id, 'mark': mark}
            if not connection.execute(
                    _OWN, {'lease': lease_id, 'now': now}).rowcount:
                if connection.scalar(_TAKEN, mine):
                    return before
                raise _Closed
            deadline = clouds.Deadline(self._clock, SEND_SECONDS)
            _mark_sent(connection, dict.fromkeys(server_ids), now)
            connection.execute(_STARTED, {**mine, 'now': now})
            return deadline

    def send_again(self, lease_id: str, sealed: Sealed,
                   sent: ty.Mapping[str, int | None]) -> None:
        """Send builds that got lost.

        :param sent: the servers, with when they were sent before
        :raises CloudUnavailable: as :meth:`send_waiting`
        """
        self._send(lease_id, sealed, list(sent), functools.partial(
            self._gate_again, lease_id, sealed, sent))

    def _gate_again(self, lease_id: str, sealed: Sealed,
                    sent: ty.Mapping[str, int | None],
                    server_ids: ty.Collection[str],
                    ) -> clouds.Deadline | None:
        """The gate of builds that got lost: it opens for one caller only."""
        try:
            deadline = self._database.retried(
                self._take_again, lease_id, sealed, {
                    server_id: sent[server_id] for server_id in server_ids})
        except (_Closed, errors.NotFound):
            return None
        return self._pass(lease_id, deadline)

    def _take_again(self, lease_id: str, sealed: Sealed,
                    sent: ty.Mapping[str, int | None]) -> clouds.Deadline:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            _check_credential(session, lease_id, sealed)
            deadline = clouds.Deadline(self._clock, SEND_SECONDS)
            if lease.status not in states.BEGUN:
                raise _Closed
            _mark_sent(session.connection(), sent, self._clock.now())
            return deadline

    def _pass(self, lease_id: str, deadline: clouds.Deadline,
              ) -> clouds.Deadline:
        LOG.info('Lease %s: sending its build', lease_id)
        steps.reached(steps.Step.START_TAKEN, lease_id)
        return deadline

    def _send(self, lease_id: str, sealed: Sealed,
              servers: ty.Collection[str], gate: clouds.Gate) -> str:
        why = ''
        try:
            why = self._cloud.send(
                self._opens(sealed.call),
                None if sealed.credential is None else self._opens(
                    sealed.credential), servers, gate)
        except errors.NotDelegated as exc:
            self._database.retried(
                self.never_started, lease_id, str(exc))
        steps.reached(steps.Step.START_SENT, lease_id)
        return why

    def never_started(self, lease_id: str, reason: str,
                      settle: ty.Callable[[orm.Session], bool] = (
                          lambda _: True),
                      event_type: str = states.EventType.START) -> None:
        """Its room goes back; its held servers wait to be deleted.

        :param settle: see :meth:`Starting.give_up
            <blazar_core.lifecycle.starting.Starting.give_up>`
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if not settle(session) or (
                    event_type != states.EventType.START or
                    lease.status not in states.TO_START):
                return
            _said, _mark, cause = lease.status_reason.partition(
                facts.DEFERRED)
            lease.status_reason = f'{reason} {cause}'.strip()
            transitions.fail_waiting(session, lease, self._clock.now())
            described = views.describe(lease)
        LOG.warning('Lease %s could not start: %s', lease_id, reason)
        self._notify('lease.update', described)


def _surely(clock: clocks.Clock,
            take: ty.Callable[[clouds.Deadline], clouds.Deadline],
            ) -> clouds.Deadline:
    """Take a permit, also when the answer to the commit is lost.

    What was written is looked for until the permit would expire.

    :param take: gets what is valid when it has taken the permit before
    :raises OutcomeUnknown: when it is not known by then
    """
    deadline = clouds.Deadline(clock, SEND_SECONDS)
    unknown: errors.OutcomeUnknown | None = None
    while True:
        again = clock.now() + 1
        try:
            return take(deadline)
        except (errors.BooksUnavailable, errors.BooksBusy) as exc:
            if isinstance(exc, errors.OutcomeUnknown):
                unknown = unknown or exc
            if unknown is None:
                raise
            if deadline.passed():
                raise unknown from exc
        clock.wait(threading.Event(), again)


def _mark_sent(connection: sa.Connection, servers: ty.Mapping[str, int | None],
               now: int) -> None:
    """Write down that the builds of servers are sent.

    :param servers: with when they were sent before
    :raises _Closed: when another process has sent one of them, or it is
        gone
    """
    for before in set(servers.values()):
        alike = [one for one, at in servers.items() if at == before]
        taken = connection.execute(
            _FIRST if before is None else _AGAIN,
            {'servers': alike, 'now': now} | (
                {} if before is None else {'before': before}))
        if taken.rowcount != len(alike):
            raise _Closed


def _show_started(lease: facts.Lease) -> None:
    """Have a lease say what was written when its build was taken."""
    lease['status'] = states.Lease.STARTING
    for event in lease['events']:
        if event['event_type'] == states.EventType.START:
            event['status'] = states.Event.DONE


def _check_credential(session: orm.Session, lease_id: str,
                      sealed: Sealed) -> None:
    """Make sure that the builds of a lease have the credential that it has.

    One that was replaced meanwhile may be revoked already.

    :raises _Closed: when it has another one
    """
    if session.scalar(_CREDENTIAL, {'lease': lease_id}) != sealed.credential:
        raise _Closed


_CREDENTIAL = sa.select(models.Credential.sealed).where(
    models.Credential.lease_id == sa.bindparam('lease'))
_BOOKINGS = models.Booking.__table__
_MARK = sa.update(_BOOKINGS).where(
    _BOOKINGS.c.server_id.in_(sa.bindparam('servers', expanding=True)),
    _BOOKINGS.c.failed_at.is_(None)).values(sent_at=sa.bindparam('now'))
_FIRST = _MARK.where(_BOOKINGS.c.sent_at.is_(None))
_AGAIN = _MARK.where(_BOOKINGS.c.sent_at == sa.bindparam('before'))
_LEASES = models.Lease.__table__
_BEGUN = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease')).values(
        status=sa.bindparam('state'), status_reason=sa.bindparam('reason'),
        updated_at=sa.bindparam('now'))
#: Locks a lease (see api.locked), and begins it.
_OWN = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease'),
    _LEASES.c.status == states.Lease.PENDING,
    _LEASES.c.end_date > sa.bindparam('now')).values(
        generation=_LEASES.c.generation + 1, status=states.Lease.STARTING,
        updated_at=sa.bindparam('now'))
_EVENTS = models.Event.__table__
_STARTED = sa.update(_EVENTS).where(
    _EVENTS.c.lease_id == sa.bindparam('lease'),
    _EVENTS.c.event_type == states.EventType.START,
    _EVENTS.c.status == states.Event.UNDONE).values(
        status=states.Event.DONE, due=_EVENTS.c.time,
        claimed_by=sa.bindparam('mark'), updated_at=sa.bindparam('now'))
_TAKEN = sa.select(_EVENTS.c.id).where(
    _EVENTS.c.lease_id == sa.bindparam('lease'),
    _EVENTS.c.claimed_by == sa.bindparam('mark'))
_SEALED = sa.select(
    models.HeldBuild.lease_id, models.HeldBuild.sealed,
    models.Credential.sealed.label('credential'),
).outerjoin(
    models.Credential,
    models.Credential.lease_id == models.HeldBuild.lease_id,
).where(models.HeldBuild.lease_id.in_(
    sa.bindparam('leases', expanding=True)))
