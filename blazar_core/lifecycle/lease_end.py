# SPDX-License-Identifier: Apache-2.0

"""Ends of leases: the end policy is applied to each server.

The steps of a policy are carried out one after the other. Each attempt first
reads the state of the server, so that any worker may continue.
"""

import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import kept_servers
from blazar_core.lifecycle import lease_close
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import reconciliation
from blazar_core.lifecycle import retries
from blazar_core.lifecycle import server_removal
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: Records a reason and a sentence in a lease.
_Record: ty.TypeAlias = ty.Callable[[conditions.Reason, str], None]

#: The reason why an end policy is not complete, if nothing keeps it from that.
_IN_PROGRESS = ''


class ServerEnds:
    """Applies end policies to servers whose lease is over."""

    def __init__(self, cloud: cloud_api.Cloud,
                 reconciler: reconciliation.Reconciliation,
                 removal: server_removal.ServerRemoval,
                 policies: end_policies.Policies) -> None:
        self._cloud = cloud
        self._reconciler = reconciler
        self._removal = removal
        self.policies = policies

    def apply_policy(self, ended: end_policies.EndedServer,
                     its: end_policies.Steps,
                     record: _Record) -> str | None:
        """Carry out the next steps of the end policy of a server.

        A failure does not keep other servers of the lease from their end.

        :param record: called with a reason and a sentence before a server is
            treated otherwise
        :returns: why the policy is not complete (:data:`_IN_PROGRESS` if
            nothing keeps it from that); None: it is
        """
        try:
            try:
                return self._stay_or_go(ended, its, record)
            except (_Stuck, errors.CloudRefusal,
                    errors.TrustUnavailable) as exc:
                if not ended.awaited or self._cloud.look(
                        ended.server_id).host not in ended.awaited:
                    raise
                record(conditions.Reason.TIMED_OUT,
                       f'Server {ended.server_id} is deleted: another lease '
                       f'waits for its capacity, and its end policy is not '
                       f'complete: {exc}')
                return self._carry_out(ended, self._last)
        except (_Stuck, errors.CloudUnavailable,
                errors.TrustUnavailable) as exc:
            return str(exc)
        except _Left:
            LOG.warning('Lease %s: server %s has left the lease meanwhile; '
                        'nothing is requested',
                        ended.lease_id, ended.server_id)
            return None
        except Exception:
            LOG.exception('Lease %s: server %s: its end policy failed',
                          ended.lease_id, ended.server_id)
            return 'it failed; see the log.'

    def _stay_or_go(self, ended: end_policies.EndedServer,
                    its: end_policies.Steps, record: _Record) -> str | None:
        """Carry out the next steps; return like :meth:`apply_policy`. A server
        that cannot stay on its host is moved off it.
        """
        try:
            return self._carry_out(ended, its)
        except _NoCapacity:
            why = self._carry_out(
                ended, end_policies.moving(its, self.policies))
            record(conditions.Reason.NO_CAPACITY,
                   f'Server {ended.server_id} does not stay on its host: '
                   'other leases have reserved its capacity.')
            return why

    @property
    def _last(self) -> end_policies.Steps:
        return [self.policies[end_policies.DELETE]]

    def _carry_out(self, ended: end_policies.EndedServer,
                   its: end_policies.Steps) -> str | None:
        """Carry out the next steps; return like :meth:`apply_policy`."""
        asked, last = None, self._last
        if its == last:
            # Requested even if the server seems gone: parts may be left.
            asked = self._ask(ended, its[0])
        for _step in range(len(its) + 1):
            seen = self._cloud.look(ended.server_id)
            self._reconciler.observe(ended.server_id, seen)
            if asked is None and its != last and (
                    not its[-1].for_hosted_servers) and (
                    seen.state is not cloud_api.ServerState.RUNNING):
                # There is nothing to keep.
                return self._carry_out(ended, last)
            if asked is None and seen.host in ended.awaited:
                self._check_progress(ended, its, seen)
            if seen.busy and its != last:
                # The task may move it to another host.
                self._cloud.reset_lost_task(ended.server_id, ended.check)
                return _IN_PROGRESS
            todo = end_policies.next_of(its, self._cloud, ended, seen)
            if its != last and _is_blocked(its, todo, seen):
                self._cloud.unblock(ended.server_id, ended.lease_id,
                                    ended.check)
                fault_points.fault_point(
                    fault_points.FaultPoint.END_UNBLOCKED, ended.lease_id)
                return _IN_PROGRESS
            if todo is None:
                return self._leave(ended, its, seen)
            if todo is asked:
                return _IN_PROGRESS
            try:
                asked = self._ask(ended, todo)
            except errors.Forbidden as exc:
                LOG.info('Lease %s: server %s is deleted: %s',
                         ended.lease_id, ended.server_id, exc)
                return self._carry_out(ended, last)
        return _IN_PROGRESS

    def _check_progress(self, ended: end_policies.EndedServer,
                        its: end_policies.Steps,
                        seen: cloud_api.ObservedServer) -> None:
        """Check that a server makes progress with its end policy.

        :raises _Stuck: if it is busy with what was not requested for that, or
            has not become, or not stayed, what was requested twice
        """
        made = self._cloud.requests(ended.server_id, ended.lease_id)
        if seen.busy:
            if not made or end_policies.DELETE in made:
                raise _Stuck('it has another task.')
        elif max(made.values(), default=0) > 1 or end_policies.DELETE in made:
            todo = end_policies.next_of(its, self._cloud, ended, seen)
            if seen.resized or todo is not None and todo.keeps:
                raise _Stuck('what was requested of it did not last.')

    def _ask(self, ended: end_policies.EndedServer,
             policy: end_policies.EndPolicy) -> end_policies.EndPolicy:
        policy.ask(self._cloud, ended)
        fault_points.fault_point(fault_points.FaultPoint.END_ASKED,
                                 ended.lease_id)
        return policy

    def _leave(self, ended: end_policies.EndedServer, its: end_policies.Steps,
               seen: cloud_api.ObservedServer) -> str | None:
        """Remove a server, if it still exists, from its lease: its policy is
        complete.
        """
        if seen.state is cloud_api.ServerState.GONE:
            return None
        ended.check()
        self._cloud.release(ended.server_id)
        if self._removal.remove_server(
                ended.lease_id, ended.server_id, seen.host is not None):
            return None
        if its == end_policies.moving(its, self.policies):
            return _IN_PROGRESS
        raise _NoCapacity


class _Stuck(Exception):
    """An end policy makes no progress; the message says why."""


class _NoCapacity(Exception):
    """The capacity of a server on its host is not free indefinitely."""


class _Left(Exception):
    """A server is no longer in the lease that has ended."""


def _is_blocked(its: end_policies.Steps, todo: end_policies.EndPolicy | None,
                seen: cloud_api.ObservedServer) -> bool:
    """Return whether a server has to leave its state before the next step.

    A resize is confirmed in any case: otherwise, what the server still has on
    its previous host would be used without an end.
    """
    return not its[-1].for_hosted_servers and (seen.resized or (
        seen.blocked and todo is not None and todo.keeps))


#: Those of some hosts where another lease should have started at a date, and
#: has not. By the bookings of these hosts: without statistics, databases would
#: read all bookings.
_AWAITED = sa.select(models.Host.id, models.Host.uuid).where(
    models.Host.id.in_(sa.bindparam('hosts', expanding=True)),
    sa.select(models.Booking.id).join(models.Booking.reservation).join(
        models.Reservation.lease).where(
            models.Booking.host_id == models.Host.id,
            models.Booking.claimed_at.is_(None),
            models.Booking.start_date <= sa.bindparam('since'),
            models.Booking.end_date > sa.bindparam('now'),
            models.Lease.id != sa.bindparam('lease'),
            models.Lease.status.in_(states.TO_START)).exists())
#: Those of some hosts that are unavailable. MariaDB would read all bookings if
#: that were a condition of the above.
_UNAVAILABLE = sa.select(models.Booking.host_id).where(
    models.Booking.host_id.in_(sa.bindparam('hosts', expanding=True)),
    models.Booking.outage.is_not(None),
    models.Booking.start_date <= sa.bindparam('now'),
    models.Booking.end_date > sa.bindparam('now'))

#: An ending lease, and one that has a booking for a server.
_ENDING = sa.select(models.Lease.id).where(
    models.Lease.id == sa.bindparam('lease'),
    models.Lease.status == states.Lease.TERMINATING)
_ENDING_WITH = _ENDING.join(models.Reservation).join(models.Booking).where(
    models.Booking.server_id == sa.bindparam('server'))

#: The most servers that are named of those that an end waits for.
_SHOWN = 5
#: Seconds for which an end that needs a missing owner is retried, if nothing
#: else limits that: the owner may return, as after an outage of a user
#: directory for a day.
IN_VAIN = 3 * 86400
#: Seconds after which what users do to the resources of a lease no longer
#: delays its end.
FORCED = 600
#: The types of conditions that do not apply to a lease that ends.
_BEFORE_END = (conditions.Type.WAITING, conditions.Type.START_DELAYED,
               conditions.Type.NOT_EXTENDED, conditions.Type.UNUSED)


class _Begun(ty.NamedTuple):
    """An end that has begun, with the steps of its servers.

    :ivar servers: the steps of servers that have bookings
    :ivar others: the steps of servers that have none
    :ivar on_end: the policy of its reservations
    :ivar forced: whether their end waits no longer for their users
    :ivar grace: seconds that are left of the grace period
    :ivar awaited: the servers for whose capacity other leases wait, each with
        the uuid of its host; without a server: a whole host
    :ivar reserved: its reservations, as they were read when it began
    :ivar said: its conditions then
    """

    servers: dict[str, end_policies.Steps]
    others: end_policies.Steps
    on_end: str = end_policies.DELETE
    forced: bool = False
    name: str = ''
    project_id: str = ''
    grace: int = 0
    awaited: ty.Collection[tuple[str | None, str]] = ()
    reserved: ty.Sequence[resource_types.Reserved] | None = None
    said: ty.Sequence[conditions.Row] | None = None


class LeaseEnd:
    """Ends leases.

    :param notify: called with an event type and a lease
    :param start_timeout: seconds for which an end waits for another process
        that has its policy, if this one does not, and for which a start waits
        for its host to be empty
    :param limit: seconds after which servers are deleted, whatever their
        policy; 0: never
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 notify: views.Notify,
                 closer: lease_close.LeaseClose, server_ends: ServerEnds,
                 start_timeout: int, limit: int) -> None:
        self._database = database
        self._clock = clock
        self._notify = notify
        self._closer = closer
        self._server_ends = server_ends
        self._policies = server_ends.policies
        self._start_timeout = start_timeout
        self._limit = limit

    @api.retried
    def expire(self, lease_id: str) -> retries.Result:
        """End an offer that was not accepted in time."""
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status != states.Lease.OFFERED:
                return None
            described = lease_status.finish(session, lease, self._clock.now())
        LOG.info('Lease %s: the offer was not accepted in time', lease_id)
        self._notify('lease.event.expire_offer', described)
        return None

    def delete(self, lease_id: str, project_id: str | None = None) -> None:
        """End a lease at the request of its owner.

        It ends at once if it has neither servers nor hosts and is not being
        opened; else a worker carries out its end. Safe to repeat.

        :param project_id: do nothing unless the lease is this project's; None:
            of any project
        :raises NotFound: when the lease does not exist
        """
        described, in_use = self._database.retried(
            self._delete, lease_id, project_id)
        if described is None:
            return
        self._notify('lease.delete', described)
        if in_use:
            return
        try:
            self.end(lease_id)
        except Exception:
            LOG.exception('Lease %s has not ended yet; a worker retries its '
                          'end', lease_id)

    def _delete(self, lease_id: str, project_id: str | None,
                ) -> tuple[views.Lease | None, bool]:
        """Return the lease, unless it was deleted before, and whether servers
        or hosts have to be freed first.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            if lease.deleted_at is not None or (
                    project_id not in (None, lease.project_id)):
                return None, False
            lease.deleted_at = lease.updated_at = now
            if lease.status != states.Lease.TERMINATED:
                lease.enter(states.Lease.TERMINATING, self._clock.now())
                # A worker at its end event loses its claim.
                session.execute(
                    sa.update(models.Event)
                    .where(models.Event.lease_id == lease_id,
                           models.Event.event_type == states.EventType.END)
                    .values(status=states.Event.UNDONE, run_at=now,
                            deferrals=0, claimed_by=None, claimed_until=0,
                            updated_at=now))
            return views.refreshed(session, lease), bool(
                lease_status.servers(lease)) or assignments.holds(
                    session, lease.reservations)

    def end(self, lease_id: str,
            when_due: bool = False) -> retries.Result:
        """End a lease; done when the policies of its servers are complete.

        :param when_due: postpone if the lease was extended meanwhile
        """
        begun = self._database.retried(self._begin_end, lease_id, when_due)
        if isinstance(begun, retries.RetryAfter):
            return begun
        fault_points.fault_point(fault_points.FaultPoint.END_BEGUN, lease_id)
        closed = self._closer.close(
            lease_id, bool(begun.servers), begun.reserved)
        ends_of = begun.servers | {
            one: begun.others for one in closed.hosted_servers}
        if ends_of and begun.grace > 0:
            self._give_grace(lease_id)
            return retries.RetryAfter(
                min(begun.grace, retries.LONGEST_PAUSE),
                lease_conditions.GRACE.message)
        credential = self._closer.credential(lease_id, any(
            one.needs_owner for its in ends_of.values() for one in its)
        ) if ends_of else None
        waiting = {server_id: why for server_id, its in ends_of.items() if (
            why := self._server_ends.apply_policy(
                self._ended(lease_id, server_id, begun, credential), its,
                functools.partial(self._replace, lease_id))) is not None}
        if waiting:
            why = self._log_waiting(lease_id, waiting)
            if closed.hosted_servers or why:
                self._explain_waiting(lease_id, begun, (
                    lease_conditions.refused(why) if why
                    else lease_conditions.LEFT
                    if begun.others[-1].for_hosted_servers
                    else conditions.Type.END_DELAYED))
            return retries.RetryAfter(
                retries.AGAIN, 'not ended yet: '
                f'{words.count(len(waiting), "server")}: '
                f'{", ".join([*waiting][:_SHOWN])}',
                retries.LONGEST_PAUSE
                if begun.others[-1].for_hosted_servers else
                # No notification tells what users do to them meanwhile.
                retries.LONGEST_WAIT)
        if begun.servers:
            closed = self._closer.close(
                lease_id, on_end=begun.on_end, forced=begun.forced)
        if not closed.done:
            again = closed.soonest
            self._database.retried(
                self._explain, lease_id,
                lease_conditions.not_closed(closed.why)
                if again is lease_close.FAILED else lease_conditions.CLEANING,
                closed.vacated)
            return again
        if not self._closer.finish_if_empty(lease_id, closed=True):
            return retries.RetryAfter(
                retries.AGAIN, 'a server was added, or it is being opened')
        return None

    def _log_waiting(self, lease_id: str, waiting: ty.Mapping[str, str],
                     ) -> str:
        """Log why end policies are not complete, each reason once, as a
        service that does not answer concerns many servers.

        :param waiting: why, by server
        :returns: why the first one is not, with its server
        """
        reasons: dict[str, list[str]] = {}
        for server_id, why in waiting.items():
            if why:
                reasons.setdefault(why, []).append(server_id)
        for why, ids in reasons.items():
            LOG.warning('Lease %s: the end policy of %s is not complete yet '
                        '(%s): %s',
                        lease_id, words.count(len(ids), 'server'), ', '.join(
                            ids[:_SHOWN]), why)
        return next((f'server {ids[0]}: {why}'
                     for why, ids in reasons.items()), '')

    def _ended(self, lease_id: str, server_id: str, begun: _Begun,
               credential: str | None) -> end_policies.EndedServer:
        booked = server_id in begun.servers
        return end_policies.EndedServer(
            server_id, lease_id, begun.name, begun.project_id, credential,
            frozenset(host for one, host in begun.awaited
                      if one == (server_id if booked else None)),
            functools.partial(self._check_in, lease_id, server_id, booked))

    def _check_in(self, lease_id: str, server_id: str, booked: bool) -> None:
        """Check that a server is still in a lease whose end is in progress.

        :param booked: whether it has a booking, and is not only on a host of
            the lease
        :raises _Left: if it is not
        """
        with self._database.connection() as connection:
            if connection.scalar(_ENDING_WITH if booked else _ENDING, {
                    'lease': lease_id, 'server': server_id}) is None:
                raise _Left

    def _give_grace(self, lease_id: str) -> None:
        """Notify once that the servers of a lease have a grace period."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            said = conditions.is_set(lease.conditions, lease_conditions.GRACE)
            described = views.describe(lease)
        if not said:
            LOG.info('Lease %s has ended; its servers run until its grace '
                     'period expires, at %s',
                     lease_id, clocks.iso(
                         described['end_date'] + described['grace_period']))
            self._notify('lease.event.grace_period', described)
            self._database.retried(
                self._explain, lease_id, lease_conditions.GRACE)

    def _explain_waiting(self, lease_id: str, begun: _Begun,
                         why: conditions.Condition | conditions.Type) -> None:
        """Record why servers of a lease remain, unless it says that already.
        Whole hosts may have to be marked as overdue by now.
        """
        if any(kind.has_hosts for kind, _its in begun.reserved or ()) or (
                not conditions.holds(begun.said, why)):
            self._database.retried(self._explain, lease_id, why)

    def _explain(self, lease_id: str,
                 why: conditions.Condition | conditions.Type,
                 vacated: ty.Collection[str] = ()) -> None:
        """Record in a lease why it has not ended.

        :param vacated: reservations whose hosts others can have
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status == states.Lease.TERMINATING:
                conditions.update(lease, self._clock.now(), why)
                lease_status.free_hosts(
                    session, lease, vacated, self._clock.now())
                assignments.overdue(session, self._clock.now(), lease)

    def _replace(self, lease_id: str, reason: conditions.Reason, why: str,
                 ) -> None:
        """Record in a lease that the policy of a server is replaced."""
        def write() -> None:
            # The lease may have ended with this server.
            with self._database.writer() as session:
                conditions.update(
                    api.locked(session, lease_id), self._clock.now(),
                    conditions.Condition(
                        conditions.Type.POLICY_REPLACED, reason, why))

        LOG.warning('Lease %s: %s', lease_id, why)
        self._database.retried(write)

    def _begin_end(self, lease_id: str, when_due: bool,
                   ) -> _Begun | retries.RetryAfter:
        """Make sure that nothing of a lease starts from now on; return the
        steps of each server.
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            now = self._clock.now()
            last = [self._policies[end_policies.DELETE]]
            if lease.status == states.Lease.TERMINATED:
                return _Begun({}, last)
            if when_due and lease.status != states.Lease.TERMINATING and (
                    lease.end_date > now):
                return retries.RetryAfter(lease.end_date - now,
                                          'it was extended')
            name = end_policies.DELETE if lease.deleted_at is not None else (
                kept_servers.on_end(session, lease))
            if end_policies.missing(name, self._policies):
                if when_due and now < lease.end_date + self._start_timeout:
                    return retries.RetryAfter(retries.UNAVAILABLE, (
                        f'no installed end policy can {name} its servers; '
                        'they are deleted unless another process does it '
                        f'within {self._start_timeout} s after its end'),
                        shown=True)
                name = end_policies.DELETE
            if self._is_late(session, lease, now,
                             end_policies.steps_of(name, self._policies)):
                name = end_policies.DELETE
            conditions.update(lease, now, *_BEFORE_END)
            if lease.status != states.Lease.TERMINATING:
                lease.enter(states.Lease.TERMINATING, self._clock.now())
                if lease.deleted_at is None and end_policies.missing(
                        lease.on_end, self._policies):
                    LOG.warning('Lease %s: its servers are deleted, because '
                                'no installed end policy can %s them',
                                lease.id, lease.on_end)
            lease_status.delete_build(session, lease_id)
            its = end_policies.steps_of(name, self._policies)
            forced = self._has_lasted(lease, now, FORCED)
            return _Begun(
                {one: last if its[-1].for_hosted_servers else its
                 for one in lease_status.servers(lease)},
                end_policies.moving(its, self._policies)
                if its[-1].stays else its,
                on_end=name, forced=forced, name=lease.name,
                project_id=lease.project_id,
                grace=lease.end_date + lease.grace_period - now
                if when_due and lease.deleted_at is None else 0,
                awaited=self._awaited(session, lease, now, its),
                reserved=self._closer.reserved(session, lease, name, forced),
                said=lease.conditions)

    def _is_in_vain(self, lease: models.Lease) -> bool:
        """Return whether an end needs an owner that seems to be gone, and
        would be retried indefinitely.
        """
        return end_policies.needs_owner(lease.on_end, self._policies) and (
            conditions.find(lease.conditions, conditions.Type.ORPHANED)
            is not None)

    def _has_lasted(self, lease: models.Lease, now: int, seconds: int,
                    ) -> bool:
        """Return whether the end of a lease has been in progress for so many
        seconds.
        """
        return lease.status == states.Lease.TERMINATING and (
            now >= seconds + max(lease.end_date + lease.grace_period,
                                 lease.ending_at or 0))

    def _lasts(self, lease: models.Lease, now: int, its: end_policies.Steps,
               seconds: int) -> bool:
        """Return whether the end of a lease has been in progress for so many
        seconds, and deletes no server yet.
        """
        return self._has_lasted(lease, now, seconds) and (
            not its[-1].for_hosted_servers) and (
                its != [self._policies[end_policies.DELETE]])

    def _awaited(self, session: orm.Session, lease: models.Lease, now: int,
                 its: end_policies.Steps) -> set[tuple[str | None, str]]:
        """Return the servers of a lease, each with its host, for whose
        capacity other leases have waited since half of the time for which they
        wait at all. A whole host, without a server, must be empty.

        Of several that have ended there, the oldest come first, and those that
        are enough for the others: these start when they no longer wait for the
        host to be empty. Since three quarters of the time, all of them: the
        first ones may not be to blame. Where the host is unavailable, the
        others could not start anyway.
        """
        patience = self._start_timeout // 2
        booked = {one.host_id for one in lease.bookings} - {None}
        if not booked or not self._limit or not self._lasts(
                lease, now, its, patience):
            return set()

        def since(seconds: int) -> dict[int, str]:
            return {host_id: uuid for host_id, uuid in session.execute(
                _AWAITED, {'hosts': [*booked], 'lease': lease.id,
                           'since': now - seconds, 'now': now}).tuples()}

        hosts = since(patience)
        unavailable = {*session.scalars(_UNAVAILABLE, {
            'hosts': [*hosts], 'now': now})} if hosts else set()
        hosts = {one: uuid for one, uuid in hosts.items()
                 if one not in unavailable}
        which = ledger.awaited(
            session.connection(), hosts.keys() - {
                one.host_id for one in lease.bookings if one.whole},
            since(patience * 3 // 2) if hosts else (), now)
        return {(one.server_id, hosts[one.host_id]) for one in lease.bookings
                if one.host_id in hosts and (one.whole or one.id in which)}

    def _is_late(self, session: orm.Session, lease: models.Lease, now: int,
                 its: end_policies.Steps) -> bool:
        """Return whether the end policy of a lease has taken too long, so that
        its servers and volumes are deleted; the lease shows it.

        Counted from when its end began, as no process may have run before. No
        change of the lease extends that.
        """
        limit = self._limit or (
            IN_VAIN if self._is_in_vain(lease) else 0)
        if not limit or not self._lasts(lease, now, its, limit):
            return False
        why = (f'What it has is deleted: {lease.on_end} was not complete '
               f'within {limit} s.')
        if conditions.update(lease, now, conditions.Condition(
                conditions.Type.POLICY_REPLACED, conditions.Reason.TIMED_OUT,
                why)):
            conditions.update(lease, now, conditions.Type.END_DELAYED)
            LOG.warning('Lease %s: %s', lease.id, why)
        return True
