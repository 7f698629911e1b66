# SPDX-License-Identifier: Apache-2.0

"""Dispatch builds, each once.

A process that wants to send builds gets a permit in the database, in the
transaction that records the dispatch; a build has at most one.
"""

import functools
import threading
import typing as ty

from oslo_log import log as logging
from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_status
from blazar_core.plugins import cloud_api

LOG = logging.getLogger(__name__)

P = ty.ParamSpec('P')

#: Seconds that may pass between the permit to send a build and the cast.
SECONDS = 10


class NotPermitted(Exception):
    """A build must not be sent, or another process has sent it."""


class DispatchRight(ty.NamedTuple):
    """The right to send builds.

    :ivar deadline: until when they may be sent
    :ivar begun: the leases that the permit has started
    :ivar left: whether other servers of the lease still wait
    """

    deadline: cloud_api.Deadline
    begun: list[views.Lease]
    left: bool


class DispatchPermit:
    """A permit to send builds, which is requested until its outcome is known.

    :ivar mark: written with the permit: shows that the transaction is
        committed
    :ivar right: valid if the last transaction is committed; None: there was
        none
    """

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock
        self.mark = uuidutils.generate_uuid()
        self.right: DispatchRight | None = None

    def surely(self, take: ty.Callable[P, DispatchRight], *args: P.args,
               **kwargs: P.kwargs) -> DispatchRight:
        """Take the permit, even if the answer to a commit is lost.

        Looks for what was written until the permit would expire.

        :param take: calls :meth:`had` with the lease locked
        :raises NotPermitted: when another process has the permit
        :raises OutcomeUnknown: when the outcome is still unknown then
        """
        latest = cloud_api.Deadline(self._clock, SECONDS)
        unknown: errors.OutcomeUnknown | None = None
        while True:
            again = self._clock.elapsed() + 1
            try:
                return self._database.retried(take, *args, **kwargs)
            except (errors.DatabaseUnavailable,
                    errors.ConcurrentUpdate) as exc:
                if isinstance(exc, errors.OutcomeUnknown):
                    unknown = unknown or exc
                if unknown is None:
                    raise
                if latest.passed():
                    raise unknown from exc
            # By elapsed time: the clock may have been set back.
            if self._clock.elapsed() < again:
                self._clock.wait(threading.Event(), self._clock.now() + 1)

    def give(self, deadline: cloud_api.Deadline,
             begun: ty.Sequence[views.Lease] = (), left: bool = False,
             ) -> DispatchRight:
        """Return the right, which is valid once the transaction is committed.
        """
        self.right = DispatchRight(deadline, [*begun], left)
        return self.right

    def had(self, connection: sa.Connection,
            lease_id: str) -> DispatchRight | None:
        """Return the right if it was committed; None: it was not."""
        return self.right if self.right is not None and connection.scalar(
            _HAD, {'lease': lease_id, 'mark': self.mark}) else None


def mark_sent(connection: sa.Connection, servers: ty.Mapping[str, int | None],
              now: int) -> None:
    """Record that the builds of servers are sent.

    :param servers: with the time of their previous dispatch
    :raises NotPermitted: when another process has sent one of them, or one no
        longer exists
    """
    for before in set(servers.values()):
        alike = [one for one, at in servers.items() if at == before]
        taken = connection.execute(
            _FIRST if before is None else _AGAIN,
            {'servers': alike, 'now': now} | (
                {} if before is None else {'before': before}))
        if taken.rowcount != len(alike):
            raise NotPermitted


_BOOKINGS = models.Booking.__table__
_MARK = sa.update(_BOOKINGS).where(
    _BOOKINGS.c.server_id.in_(sa.bindparam('servers', expanding=True)),
    _BOOKINGS.c.failed_at.is_(None)).values(dispatched_at=sa.bindparam('now'))
_FIRST = _MARK.where(_BOOKINGS.c.dispatched_at.is_(None))
_AGAIN = _MARK.where(_BOOKINGS.c.dispatched_at == sa.bindparam('before'))
_LEASES = models.Lease.__table__
_HAD = sa.select(_LEASES.c.id).where(
    _LEASES.c.id == sa.bindparam('lease'),
    _LEASES.c.permit == sa.bindparam('mark'))


#: Seconds for which a listener leaves a lease that starts now to the request
#: that created it. A slower request finds its build sent; this is not what
#: prevents a double dispatch.
HEAD_START = 5


class EncryptedCall(ty.NamedTuple):
    """The encrypted call that builds the servers of a lease.

    :ivar credential: of its owner, encrypted; None: there is none
    """

    call: str
    credential: str | None


def encrypted_call(session: orm.Session,
                   lease_ids: ty.Collection[str]) -> dict[str, EncryptedCall]:
    """Return the encrypted calls of those leases that (still) have one."""
    return {lease_id: EncryptedCall(*found)
            for lease_id, *found in session.connection().execute(
                _ENCRYPTED, {'leases': lease_ids})}


class Dispatch:
    """Sends the builds of servers, each once.

    :param decrypt: decrypts a stored call
    :param notify: called with an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, decrypt: ty.Callable[[str], str],
                 notify: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._decrypt = decrypt
        self._notify = notify

    def send_waiting(self, lease: models.Lease, encrypted: EncryptedCall,
                     when_due: bool) -> tuple[str, bool]:
        """Send the builds of the servers of a lease that wait for it.

        :param lease: as it was read in a session that is closed
        :param when_due: send nothing if the start was moved meanwhile
        :returns: why some were left out, empty when none was; and whether no
            server was waiting any longer when the last one was sent
        :raises CloudUnavailable: when a service that a build needs does not
            answer; nothing was sent
        """
        lease_id = lease.id
        begun: list[views.Lease] = []
        known, left = [lease], True

        def gate(server_ids: ty.Collection[str]) -> cloud_api.Deadline | None:
            nonlocal left
            fault_points.fault_point(fault_points.FaultPoint.START_READY,
                                     lease_id)
            permit = DispatchPermit(self._database, self._clock)
            try:
                deadline, begins, left = permit.surely(
                    self._take, lease_id, known, server_ids, when_due,
                    encrypted, permit)
            except (NotPermitted, errors.NotFound):
                return None
            begun.extend(begins)
            return self._pass(lease_id, deadline)

        why = self._send(lease_id, encrypted, lease_status.waiting(lease),
                         gate)
        # Only now: it may take long, and a build that is not sent in time is
        # considered lost.
        for described in begun:
            self._notify('lease.event.start_lease', described)
        return why, not left

    def hold(self, server_ids: ty.Sequence[str]) -> None:
        """Let servers wait again whose build was already prepared."""
        self._cloud.hold(server_ids)

    def _take(self, lease_id: str, known: list[models.Lease],
              server_ids: ty.Collection[str], when_due: bool,
              encrypted: EncryptedCall,
              permit: DispatchPermit) -> DispatchRight:
        """Return the right to send the builds of servers, which is given once.

        Runs right before the cast. If a worker dies before it, the builds are
        unsent, and another worker starts again; a worker that was considered
        dead and returns does not get the right.

        :param known: the lease as it was read, removed by the first run. Later
            runs read it with a lock, so that concurrent changes do not make
            them fail again and again
        :param encrypted: what was read with it
        :raises NotPermitted: when the builds must not be sent, or not by us
        :raises Outdated: when the lease was locked since it was read
        """
        if known:
            # Without a session, as this runs for every start of a lease.
            lease = known.pop()
            with self._database.begin() as connection:
                api.lock_as_read(connection, lease)
                return self._open(
                    connection, lease, server_ids, when_due, permit)
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if (right := permit.had(session.connection(), lease_id)):
                return right
            _check_credential(session, lease_id, encrypted)
            return self._open(
                session.connection(), lease, server_ids, when_due, permit)

    def _open(self, connection: sa.Connection, lease: models.Lease,
              server_ids: ty.Collection[str], when_due: bool,
              permit: DispatchPermit) -> DispatchRight:
        """Do what :meth:`_take` does, with the lease locked."""
        deadline = cloud_api.Deadline(self._clock, SECONDS)
        now = self._clock.now()
        if lease.status not in states.TO_START or (
                lease.end_date <= now or
                when_due and lease.start_date > now):
            # It was moved or has ended meanwhile.
            raise NotPermitted
        if lease_status.is_building(lease):
            raise NotPermitted
        waiting = lease_status.waiting(lease)
        mark_sent(connection, dict.fromkeys(server_ids), now)
        begins = lease.status == states.Lease.PENDING
        lease.enter(states.Lease.STARTING, now)
        conditions.update(lease, now, conditions.Type.START_DELAYED)
        lease.updated_at = now
        connection.execute(_BEGUN, {
            'lease': lease.id, 'state': lease.status, 'now': now,
            'conditions': lease.conditions, 'mark': permit.mark})
        return permit.give(
            deadline, [views.describe(lease)] if begins else [],
            bool(set(waiting).difference(server_ids)))

    def send_own(self, lease: views.Lease,
                 cast: ty.Callable[[cloud_api.Gate], None]) -> None:
        """Send the build of a lease that starts now and was just reserved.

        Undoes and raises nothing: after a failure it is not known whether the
        build was sent. A listener sends a build without a permit, and looks
        for one with a permit (:mod:`blazar_core.lifecycle.lost_builds`).

        :param lease: as it was created, with its call
        :param cast: sends the build in time, if the gate permits it
        """
        lease_id, taken = lease['id'], False
        permit = DispatchPermit(self._database, self._clock)

        def gate(server_ids: ty.Collection[str]) -> cloud_api.Deadline | None:
            nonlocal taken
            try:
                right = permit.surely(
                    self._take_own, lease_id, server_ids, permit)
            except NotPermitted:
                LOG.warning('Lease %s was changed while it was created: '
                            'blazar-listener sends its build', lease_id)
                return None
            taken = True
            fault_points.fault_point(fault_points.FaultPoint.BOOT_TAKEN,
                                     lease_id)
            return right.deadline

        fault_points.fault_point(fault_points.FaultPoint.BOOT_RESERVED,
                                 lease_id)
        try:
            cast(gate)
        except Exception as exc:
            LOG.exception('Lease %s: %s', lease_id, (
                'it is not known whether its build was sent; blazar-listener '
                'checks' if taken or isinstance(exc, errors.OutcomeUnknown)
                else 'its build was not sent; blazar-listener sends it'))
        fault_points.fault_point(fault_points.FaultPoint.BOOT_SENT, lease_id)
        if taken:
            _show_started(lease)

    def _take_own(self, lease_id: str, server_ids: ty.Collection[str],
                  permit: DispatchPermit) -> DispatchRight:
        """Return the same right as :meth:`_take`, without having read the
        lease.

        :raises NotPermitted: when the lease is not as it was created: a
            listener has taken it, or it was changed
        """
        with self._database.begin() as connection:
            now = self._clock.now()
            mine = {'lease': lease_id, 'now': now}
            if not connection.execute(
                    _OWN, {**mine, 'mark': permit.mark}).rowcount:
                if (right := permit.had(connection, lease_id)):
                    return right
                raise NotPermitted
            deadline = cloud_api.Deadline(self._clock, SECONDS)
            mark_sent(connection, dict.fromkeys(server_ids), now)
            connection.execute(_STARTED, mine)
            return permit.give(deadline)

    def send_again(self, lease_id: str, encrypted: EncryptedCall,
                   sent: ty.Mapping[str, int | None]) -> None:
        """Send lost builds again.

        :param sent: the servers, with the time of their previous dispatch
        :raises CloudUnavailable: as :meth:`send_waiting`
        """
        self._send(lease_id, encrypted, list(sent), functools.partial(
            self._gate_again, lease_id, encrypted, sent))

    def _gate_again(self, lease_id: str, encrypted: EncryptedCall,
                    sent: ty.Mapping[str, int | None],
                    server_ids: ty.Collection[str],
                    ) -> cloud_api.Deadline | None:
        """Take the permit for lost builds, which one caller gets."""
        permit = DispatchPermit(self._database, self._clock)
        try:
            right = permit.surely(
                self._take_again, lease_id, encrypted, {
                    server_id: sent[server_id] for server_id in server_ids},
                permit)
        except (NotPermitted, errors.NotFound):
            return None
        return self._pass(lease_id, right.deadline)

    def _take_again(self, lease_id: str, encrypted: EncryptedCall,
                    sent: ty.Mapping[str, int | None], permit: DispatchPermit,
                    ) -> DispatchRight:
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if (right := permit.had(session.connection(), lease_id)):
                return right
            _check_credential(session, lease_id, encrypted)
            deadline = cloud_api.Deadline(self._clock, SECONDS)
            if lease.status not in states.BEGUN:
                raise NotPermitted
            mark_sent(session.connection(), sent, self._clock.now())
            lease.permit = permit.mark
            return permit.give(deadline)

    def _pass(self, lease_id: str, deadline: cloud_api.Deadline,
              ) -> cloud_api.Deadline:
        LOG.info('Lease %s: sending its build', lease_id)
        fault_points.fault_point(fault_points.FaultPoint.START_TAKEN, lease_id)
        return deadline

    def _send(self, lease_id: str, encrypted: EncryptedCall,
              servers: ty.Collection[str], gate: cloud_api.Gate) -> str:
        why = ''
        try:
            why = self._cloud.send(
                self._decrypt(encrypted.call),
                None if encrypted.credential is None else self._decrypt(
                    encrypted.credential), servers, gate)
        except errors.TrustUnavailable as exc:
            self.never_started(lease_id, str(exc))
        fault_points.fault_point(fault_points.FaultPoint.START_SENT, lease_id)
        return why

    @api.retried
    def never_started(self, lease_id: str, reason: str,
                      settle: ty.Callable[[orm.Session], bool] = (
                          lambda _: True),
                      event_type: str = states.EventType.START) -> None:
        """Fail a lease that could not start.

        Its capacity is freed; its reserved servers wait to be deleted.

        :param settle: see :meth:`LeaseStart.give_up
            <blazar_core.lifecycle.lease_start.LeaseStart.give_up>`
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            # Read before settle(), which clears it.
            cause = conditions.find(
                lease.conditions, conditions.Type.EVENT_DEFERRED)
            if not settle(session) or (
                    event_type != states.EventType.START or
                    lease.status not in states.TO_START):
                return
            now = self._clock.now()
            if cause is not None:
                reason = (f'{reason} {cause["details"]["event_type"]}: '
                          f'{cause["details"]["why"]}')
            conditions.update(
                lease, now, *conditions.TRANSIENT, conditions.Condition(
                    conditions.Type.FAILED, conditions.Reason.NEVER_STARTED,
                    reason))
            lease_status.fail_waiting(session, lease, now)
            described = views.describe(lease)
        LOG.warning('Lease %s could not start: %s', lease_id, reason)
        self._notify('lease.update', described)


def _show_started(lease: views.Lease) -> None:
    """Update a lease with what its permit has written."""
    lease['status'] = states.Lease.STARTING
    for event in lease['events']:
        if event['event_type'] == states.EventType.START:
            event['status'] = states.Event.DONE


def _check_credential(session: orm.Session, lease_id: str,
                      encrypted: EncryptedCall) -> None:
    """Make sure that the builds of a lease have its current credential.

    A credential that was replaced may be revoked already.

    :raises NotPermitted: when the lease has another one
    """
    if session.scalar(
            _CREDENTIAL, {'lease': lease_id}) != encrypted.credential:
        raise NotPermitted


_CREDENTIAL = sa.select(models.Credential.encrypted).where(
    models.Credential.lease_id == sa.bindparam('lease'))
_BEGUN = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease')).values(
        status=sa.bindparam('state'), conditions=sa.bindparam('conditions'),
        updated_at=sa.bindparam('now'), permit=sa.bindparam('mark'))
#: Locks a lease (see api.locked), and starts it.
_OWN = sa.update(_LEASES).where(
    _LEASES.c.id == sa.bindparam('lease'),
    _LEASES.c.status == states.Lease.PENDING,
    _LEASES.c.end_date > sa.bindparam('now')).values(
        generation=_LEASES.c.generation + 1, status=states.Lease.STARTING,
        updated_at=sa.bindparam('now'), permit=sa.bindparam('mark'))
_EVENTS = models.Event.__table__
_STARTED = sa.update(_EVENTS).where(
    _EVENTS.c.lease_id == sa.bindparam('lease'),
    _EVENTS.c.event_type == states.EventType.START,
    _EVENTS.c.status == states.Event.UNDONE).values(
        status=states.Event.DONE, run_at=_EVENTS.c.time,
        updated_at=sa.bindparam('now'))
_ENCRYPTED = sa.select(
    models.DeferredBuild.lease_id, models.DeferredBuild.encrypted,
    models.Credential.encrypted.label('credential'),
).outerjoin(
    models.Credential,
    models.Credential.lease_id == models.DeferredBuild.lease_id,
).where(models.DeferredBuild.lease_id.in_(
    sa.bindparam('leases', expanding=True)))
