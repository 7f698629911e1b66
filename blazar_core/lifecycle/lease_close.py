# SPDX-License-Identifier: Apache-2.0

"""Close leases that are over, and clean their hosts.

A closed lease admits no server, and its credentials are deleted. Cleaning
starts when no server of the reservation is left. Until it is done the
reservation keeps its hosts, so that free capacity is really free. Hosts that
were lent are cleaned before a lease of hosts can use them.
"""

import dataclasses
import enum
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import enrollment
from blazar_core.common import background
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import credentials
from blazar_core.leases import views
from blazar_core.lifecycle import fault_points
from blazar_core.lifecycle import lease_conditions
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: The retry after a failure.
FAILED = retries.RetryAfter(retries.UNAVAILABLE,
                            lease_conditions.NOT_CLOSED.message,
                            retries.LONGEST_PAUSE)
#: So many leases in a row without an answer of the identity service end a
#: look.
_SILENT = 3
#: Credentials of leases that are over or were never created, and of servers
#: that are no longer interruptible.
_OVER = sa.select(
    models.Credential.lease_id, models.Lease.project_id,
).outerjoin(
    models.Lease, models.Lease.id == models.Credential.lease_id).where(sa.or_(
        models.Lease.id.is_(None),
        models.Lease.status == states.Lease.TERMINATED), ~sa.exists().where(
            models.InterruptibleServer.credential_id ==
            models.Credential.lease_id))


class Closed(ty.NamedTuple):
    """The obstacles to closing a lease.

    :ivar hosted_servers: hosted servers, which have to be deleted first
    :ivar again: other reasons, with the time of the next attempt
    :ivar why: why reservations cannot be closed, in sentences
    :ivar vacated: the reservations of whole hosts that are closed
    """

    hosted_servers: list[str]
    again: list[retries.RetryAfter]
    why: list[str]
    vacated: list[str]

    @property
    def done(self) -> bool:
        return not self.hosted_servers and not self.again

    @property
    def soonest(self) -> retries.RetryAfter:
        """The earliest of the next attempts."""
        return min(self.again or [FAILED],
                   key=lambda one: (one.seconds, one.most))


class _Found(ty.NamedTuple):
    """A reservation that a resource type has found open.

    :ivar projects: the owners of its objects; None: users cannot mark any
    """

    kind: resource_types.BaseResourceType
    projects: ty.Collection[str] | None

    def is_of(self, kind: resource_types.BaseResourceType,
              reserved: resource_types.ReservationContext) -> bool:
        """Return whether it may be a reservation with that id."""
        return self.kind is kind and (self.projects is None or any(
            map(reserved.may_own, self.projects)))


class LeaseClose:
    """Closes leases that are over.

    :param decrypt: decrypts a stored text
    :param notify: called with an event type and a lease
    :param later: runs what the end of a lease does not wait for
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 cloud: cloud_api.Cloud, decrypt: ty.Callable[[str], str],
                 notify: views.Notify,
                 types: resource_types.ResourceTypes,
                 later: background.Later) -> None:
        self._types = types
        self._later = later
        self._cleaning = Cleaning(database, clock)
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._decrypt = decrypt
        self._notify = notify

    def reserved(self, session: orm.Session, lease: models.Lease,
                 on_end: str | None = None, forced: bool = False,
                 ) -> list[resource_types.Reserved]:
        """Return the reservations of a lease, for :meth:`close`.

        :param on_end: the end policy that applies; None: that of the lease
        :param forced: see :class:`.resource_types.ReservationContext`
        """
        return [(kind, dataclasses.replace(
            one, on_end=one.on_end if on_end is None else on_end,
            forced=forced))
            for kind, one in self._types.reserved(session, lease)]

    def close(self, lease_id: str, has_servers: bool = False,
              over: ty.Sequence[resource_types.Reserved] | None = None,
              on_end: str | None = None, forced: bool = False) -> Closed:
        """Close the reservations of a lease.

        A reservation that cannot be closed yet does not keep others open.

        :param has_servers: whether the lease has servers, which may use its
            reservations that are not for boots: these stay open
        :param over: its reservations, as they were read since it began to end;
            None: read them
        :param on_end: see :meth:`reserved`, as ``forced``, if they are read
        """
        if over is None:
            with self._database.reader() as session:
                over = self.reserved(
                    session, api.found(session, lease_id), on_end, forced)
        closed = Closed([], [], [], [])
        # What uses another reservation comes after it.
        for kind, reserved in reversed(over):
            if has_servers and not kind.is_for_boots:
                continue
            try:
                one = self.shut(kind, reserved)
                closed.hosted_servers.extend(one.hosted_servers)
                closed.again.extend(one.again)
                closed.vacated.extend(one.vacated)
            except errors.CloudUnavailable as exc:
                closed.again.append(FAILED)
                closed.why.append(str(exc))
                LOG.warning('Lease %s: reservation %s could not be closed '
                            'yet: %s', lease_id, reserved.id, exc)
            except Exception:
                closed.again.append(FAILED)
                LOG.exception('Lease %s: reservation %s could not be closed '
                              'yet', lease_id, reserved.id)
        return closed

    def close_if_ending(self, lease_id: str) -> None:
        """Close a lease that has ended while it was opened or changed."""
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
        if lease.status in states.ENDING:
            self.close(lease_id)

    def shut(self, kind: resource_types.BaseResourceType,
             reserved: resource_types.ReservationContext) -> Closed:
        """Close a reservation when its servers are gone and its hosts are
        clean. Safe to repeat.

        :raises Exception: what the resource type raises
        """
        closed = Closed([*kind.hosted_servers(reserved)], [], [], [])
        if closed.hosted_servers:
            if kind.has_hosts:
                self._cleaning.mark_dirty(reserved.id)
        elif (again := self._cleaning.clean(kind, reserved)) is not None:
            closed.again.append(again)
        if closed.done:
            kind.end(reserved)
            if kind.has_hosts and kind.hosts_leave:
                self._database.retried(self._let_leave, reserved)
            if kind.has_hosts:
                closed.vacated.append(reserved.id)
            fault_points.fault_point(fault_points.FaultPoint.CLOSE_CLOSED,
                                     reserved.lease_id)
        return closed

    def clean_lent(self, lease_id: str) -> tuple[retries.RetryAfter | None,
                                                 set[str]]:
        """Have the assigned hosts of a lease cleaned that were lent, before
        they are opened. Safe to repeat.

        :returns: when to look again, and the uuids of hosts that are not clean
            yet; None when all of them are clean
        :raises CloudUnavailable: when the cloud does not answer
        """
        with self._database.reader() as session:
            mine = self.reserved(session, api.found(session, lease_id))
        again = [one for kind, reserved in mine if (
            one := self._clean_lent(kind, reserved))]
        if not again:
            return None, set()
        with self._database.reader() as session:
            dirty = assignments.lent(
                session, [reserved.id for _kind, reserved in mine])
        return min(again, key=lambda one: one.seconds), dirty

    def _clean_lent(self, kind: resource_types.BaseResourceType,
                    reserved: resource_types.ReservationContext,
                    ) -> retries.RetryAfter | None:
        try:
            return self._cleaning.clean(kind, reserved, Phase.START)
        except errors.CloudUnavailable:
            raise
        except Exception:
            LOG.exception('Lease %s: hosts of reservation %s could not be '
                          'cleaned yet', reserved.lease_id, reserved.id)
            return retries.wait('its hosts could not be cleaned')

    def occupied(self, lease_id: str) -> dict[
            str, resource_types.ReservationContext]:
        """Return the hosts that a lease in use has returned and that got a
        server at that moment, by reservation.

        :raises CloudUnavailable: when they cannot be determined now
        """
        found = {}
        for kind, reserved in self._returned(lease_id):
            used = [one for one in reserved.hosts if kind.hosted_servers(
                reserved, one)]
            if used:
                found[reserved.id] = reserved.only(used)
        return found

    def release(self, lease_id: str, occupied: ty.Mapping[
            str, resource_types.ReservationContext]) -> retries.Result:
        """Free the hosts that a lease in use has returned and that are clean.
        Safe to repeat.

        :param occupied: see :meth:`occupied`
        """
        again: list[retries.RetryAfter] = []
        for kind, reserved in self._returned(lease_id):
            used = occupied.get(reserved.id)
            empty = reserved.only([
                one for one in reserved.hosts
                if used is None or one not in used.hosts])
            if used is not None:
                again.append(retries.wait(
                    f'of the hosts that reservation {reserved.id} returns, '
                    f'{len(used.hosts)} got a server at that moment, and '
                    f'cannot be returned until it is deleted'))
            if not empty.hosts:
                continue
            dirty = self._cleaning.clean(kind, empty, Phase.RETURN)
            if dirty is not None:
                again.append(dirty)
            self._database.retried(
                self._free_returned, empty, kind.hosts_leave)
        return min(again, key=lambda one: one.seconds) if again else None

    def _returned(self, lease_id: str) -> list[resource_types.Reserved]:
        """Return the reservations of a lease in use, each with only those
        hosts that it has returned and that are not free yet.
        """
        with self._database.reader() as session:
            lease = api.found(session, lease_id)
            whole = {one.id: one for one in lease.reservations if one.whole}
            if lease.status not in states.BEGUN or not whole:
                return []
            left: dict[str, dict[str, str]] = {}
            for host in assignments.left(session, whole):
                left.setdefault(ty.cast(str, host.assigned_to), {})[
                    host.uuid] = host.service_host
            return [(self._types.of_row(whole[its_id]), dataclasses.replace(
                resource_types.context_of(session, whole[its_id]),
                hosts=tuple(hosts), services=hosts))
                for its_id, hosts in left.items()]

    def _free_returned(self, reserved: resource_types.ReservationContext,
                       hosts_leave: bool) -> None:
        with self._database.writer() as session:
            lease, now = api.locked(
                session, reserved.lease_id), self._clock.now()
            if lease.status not in states.BEGUN:
                # The end of the lease frees them.
                return
            clean = [host.id for host in assignments.left(
                session, [reserved.id]) if host.uuid in reserved.hosts and
                host.cleaned_at is not None and
                (host.vacated_at or now) + lease.cleaning_time <= now]
            if hosts_leave:
                for host_id in clean:
                    enrollment.remove(session, now, host_id, booked=True)
            assignments.unassign(session, now, [reserved.id], clean)

    def left_open(
            self,
            kinds: ty.Iterable[resource_types.ResourceType] | None = None,
    ) -> list[resource_types.Reserved]:
        """Return the reservations that can be used in the cloud though their
        lease has not started, or is over and has freed its hosts. Includes
        those that the reservation database does not know.

        :param kinds: of these types; None: of all
        :raises CloudUnavailable: when they cannot be determined now
        """
        there: dict[str, list[_Found]] = {}
        for kind in self._types.named.values() if kinds is None else kinds:
            found = kind.open_reservations() or ()
            for its_id in found:
                there.setdefault(its_id, []).append(_Found(
                    kind, found[its_id] if isinstance(found, ty.Mapping)
                    else None))
        if not there:
            return []
        with self._database.reader() as session:
            left = there.keys() - set(session.scalars(
                sa.select(models.Reservation.id).join(models.Lease).where(
                    # The end of a lease closes them in its own time.
                    models.Lease.status.in_((
                        *states.BEGUN, states.Lease.TERMINATING))))) - set(
                session.scalars(sa.select(models.Host.assigned_to).where(
                    models.Host.assigned_to.is_not(None))))
            known = {row.id: (self._types.of_row(row),
                              self._types.context(session, row))
                     for row in session.scalars(
                         sa.select(models.Reservation).where(
                             models.Reservation.id.in_(left)))}
        return [(kind, dataclasses.replace(reserved, forced=True))
                for its_id in sorted(left) for kind, reserved in [known.get(
                    its_id, (there[its_id][0].kind,
                             resource_types.unknown(its_id)))]
                if any(one.is_of(kind, reserved) for one in there[its_id])]

    def close_left(self) -> None:
        """Close the open reservations of leases that are over, which a stalled
        process has opened late.

        Those that the reservation database does not know are left to an
        operator, as it may be older than the cloud.
        """
        left = []
        for name, of in self._types.named.items():
            with retries.tried_later(
                    LOG, 'Reservations of %s that can still be used are not '
                    'known: %s', name):
                left += self.left_open([of])
        for kind, reserved in left:
            if reserved.lease_id:
                with logs.apart(reserved.lease_id,
                                reserved.project_id):
                    LOG.warning('Lease %s: reservation %s can still be used; '
                                'closing it', reserved.lease_id,
                                reserved.id)
                    self.shut(kind, reserved)

    def _let_leave(self, reserved: resource_types.ReservationContext) -> None:
        with self._database.writer() as session:
            lease = api.locked(session, reserved.lease_id)
            if lease.status not in states.ENDING:
                # A lease that could not start did not use them.
                return
            for host_id in session.scalars(sa.select(models.Host.id).where(
                    models.Host.assigned_to == reserved.id,
                    models.Host.enrollment.is_not(None),
            ).order_by(models.Host.id)).all():
                enrollment.remove(
                    session, self._clock.now(), host_id, booked=True)

    @api.retried
    def finish_if_empty(self, lease_id: str, closed: bool = False) -> bool:
        """End a lease that has no servers; return whether it has ended.

        :param closed: whether no server can use its reservations any longer;
            then it does not end while another worker opens them, who may still
            create what has to be found by its bookings
        """
        with self._database.writer() as session:
            lease = api.locked(session, lease_id)
            if lease.status == states.Lease.TERMINATED:
                return True
            if lease_status.has_servers(session, lease_id) or (
                    lease_status.comes_first(lease) and not closed) or (
                    lease.status != states.Lease.TERMINATING and
                    lease.bookings) or closed and _is_opened(lease):
                return False
            described = lease_status.finish(session, lease, self._clock.now())
        fault_points.fault_point(fault_points.FaultPoint.END_OVER, lease_id)
        LOG.info('Lease %s has ended', lease_id)
        self._notify('lease.event.end_lease', described)
        self._later(functools.partial(self.revoke_of, lease_id))
        return True

    def credential(self, lease_id: str, needed: bool = True) -> str | None:
        """Return the credential of the owner of a lease, if there is one.

        :param needed: False: ignore that the key is missing
        :raises DecryptionError: when it is needed, and cannot be decrypted
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        try:
            return None if row is None else self._decrypt(row.encrypted)
        except errors.DecryptionError as exc:
            if needed:
                raise
            LOG.warning('Lease %s: its servers are not deleted in the name '
                        'of its owner: %s', lease_id, exc)
            return None

    def revoke_of(self, lease_id: str) -> bool:
        """Revoke the credentials of the owner of a lease that is over.

        Failures are logged and retried by :meth:`revoke_over`.

        :returns: whether the identity service answers
        """
        with self._database.reader() as session:
            row = session.get(models.Credential, lease_id)
        if row is None:
            return True
        done = True
        for encrypted in credentials.all_of(row):
            try:
                self._cloud.revoke(self._decrypt(encrypted))
            except errors.CloudUnavailable as exc:
                LOG.warning('Lease %s has ended, but the credential of its '
                            'owner could not be revoked yet: %s', lease_id,
                            exc)
                return False
            except Exception:
                done = False
                LOG.exception('Lease %s has ended, but the credential of its '
                              'owner could not be revoked yet', lease_id)
        if done:
            fault_points.fault_point(
                fault_points.FaultPoint.END_REVOKED, lease_id)
            self._database.retried(self._forget_credential, lease_id)
        return True

    def _forget_credential(self, lease_id: str) -> None:
        with self._database.writer() as session:
            session.execute(sa.delete(models.Credential).where(
                models.Credential.lease_id == lease_id))

    def revoke_over(self) -> None:
        """Revoke the credentials that are left of leases that are over, unless
        the identity service does not answer.
        """
        with self._database.connection() as connection:
            over = connection.execute(_OVER).all()
        silent = 0
        for lease_id, project_id in over:
            with logs.apart(lease_id, project_id):
                silent = 0 if self.revoke_of(lease_id) else silent + 1
            if silent == _SILENT:
                return

    def strays(self) -> set[str]:
        """Return the credentials that belong to no lease, or not yet.

        A process died before it recorded its lease, or is about to do so. If
        several clouds have the same service user, the credentials may be
        another cloud's, so that only an operator revokes them. Decrypts all
        stored ones: some 20,000 a second.
        """
        given = self._cloud.credentials()
        with self._database.reader() as session:
            kept = [one for row in session.scalars(
                sa.select(models.Credential))
                for one in credentials.all_of(row)]
        return given - set(map(self._decrypt, kept)) if given else given


def _is_opened(lease: models.Lease) -> bool:
    """Return whether a worker opens reservations of a lease now, or has died
    meanwhile and is not replaced yet.
    """
    return any(one.status == states.Event.IN_PROGRESS and one.event_type in (
        states.EventType.START, states.EventType.CHANGED)
        for one in lease.events)


#: The most hosts of a reservation that are cleaned at once, so that no lease
#: waits long for its start.
MOST = 32
#: Seconds within which cleaning has to begin after it is recorded.
_SOON = 20

_HOST = models.Host.__table__.c


class Phase(enum.Enum):
    """When the hosts of a reservation are cleaned."""

    #: Before they are opened, those that were lent.
    START = enum.auto()
    #: Those that it returns while its lease is in use.
    RETURN = enum.auto()
    #: When its lease ends.
    END = enum.auto()


#: The statuses of a lease in which its hosts are cleaned.
_CLEANED_IN: ty.Mapping[Phase, ty.Container[str]] = {
    Phase.START: states.BEGUN,
    Phase.RETURN: states.BEGUN, Phase.END: states.ENDING}


class _Held(ty.NamedTuple):
    """The hosts of a reservation that are cleaned.

    :ivar hosts: their number, of which some may be clean
    :ivar dirty: the number of those that are not clean
    :ivar mine: the uuids of the hosts to clean now
    :ivar until: when other processes may clean those
    :ivar left: seconds for which the hosts stay unassigned after the last
        server
    """

    hosts: int
    dirty: int
    mine: set[str]
    until: int
    left: int


class Cleaning:
    """Has hosts cleaned that are assigned to a reservation."""

    def __init__(self, database: api.Database, clock: clocks.Clock) -> None:
        self._database = database
        self._clock = clock

    def clean(self, kind: resource_types.BaseResourceType,
              reserved: resource_types.ReservationContext,
              phase: Phase = Phase.END) -> retries.RetryAfter | None:
        """Have the hosts of a reservation cleaned on which no server is, nor
        can be placed. Safe to repeat.

        A host is cleaned by one process at a time. A host that was reported
        clean is not cleaned again; if a process dies before recording that,
        the cleaning is requested once more.

        :returns: when to look again; None when all of them are clean
        :raises Exception: what the resource type raises
        """
        if not kind.has_hosts or not reserved.lease_id:
            return None
        deadline = cloud_api.Deadline(self._clock, _SOON)
        held = self._database.retried(
            self._begin, reserved, kind.cleaning_seconds, phase)
        clean: set[str] = set()
        if held.mine:
            try:
                clean = held.mine.intersection(
                    kind.clean(reserved, held.mine, deadline))
                fault_points.fault_point(fault_points.FaultPoint.CLOSE_CLEANED,
                                         reserved.lease_id)
            finally:
                self._database.retried(
                    self._keep, reserved.id, held, clean, phase)
        dirty = held.dirty - len(clean)
        if dirty:
            host = 'lent host' if phase is Phase.START else 'host'
            return retries.RetryAfter(
                retries.UNAVAILABLE,
                f'of its {words.count(held.hosts, host)}, not clean '
                f'yet: {dirty}', 0 if clean
                else retries.LONGEST_WAIT, shown=phase is Phase.START)
        if held.left > 0:
            return retries.RetryAfter(
                min(held.left, retries.LONGEST_PAUSE),
                f'its hosts stay unassigned for {held.left} s')
        return None

    @api.retried
    def mark_dirty(self, reservation_id: str) -> None:
        """Mark the hosts as not clean, as they have a server (again)."""
        with self._database.writer() as session:
            session.execute(
                sa.update(models.Host)
                .where(_HOST.assigned_to == reservation_id,
                       _HOST.vacated_at.is_not(None))
                .values(vacated_at=None, cleaned_at=None))

    def _begin(self, reserved: resource_types.ReservationContext,
               seconds: int, phase: Phase) -> _Held:
        """Claim the hosts that no process cleans, least recently tried first.
        """
        with self._database.writer() as session:
            lease = api.locked(session, reserved.lease_id)
            now = self._clock.now()
            if lease.status not in _CLEANED_IN[phase]:
                # A lease that could not start did not use them.
                return _Held(0, 0, set(), now, 0)
            connection = session.connection()
            until = now + _SOON + seconds
            held = _HOST.assigned_to == reserved.id
            if phase is Phase.RETURN:
                held &= _HOST.uuid.in_(reserved.hosts)
            if phase is Phase.START:
                held &= _HOST.lent_at.is_not(None)
            else:
                connection.execute(
                    sa.update(models.Host.__table__)
                    # A clock that was ahead may have written a later time.
                    .where(held, sa.or_(_HOST.vacated_at.is_(None),
                                        _HOST.vacated_at > now))
                    .values(vacated_at=now))
            rows = connection.execute(
                sa.select(_HOST.id, _HOST.uuid, _HOST.vacated_at,
                          _HOST.cleaning_until, _HOST.cleaned_at)
                .where(held).order_by(_HOST.id)).all()
            dirty = [row for row in rows if row.cleaned_at is None]
            mine = sorted(
                (row for row in dirty if not clocks.is_within(
                    row.cleaning_until or 0, now, until + seconds - now)),
                key=lambda row: (row.cleaning_until or 0, row.id))[:MOST]
            connection.execute(
                sa.update(models.Host.__table__)
                .where(_HOST.id.in_([row.id for row in mine]))
                .values(cleaning_until=until))
            return _Held(
                len(rows), len(dirty), {row.uuid for row in mine}, until,
                max(row.vacated_at for row in rows) + lease.cleaning_time - now
                if rows and phase is not Phase.START else 0)

    def _keep(self, reservation_id: str, held: _Held, clean: set[str],
              phase: Phase) -> None:
        """Record the results of cleaning, unless another process cleans the
        hosts by now.
        """
        now = self._clock.now()
        done: dict[str, int | None] = {
            'cleaning_until': None, 'lent_at': None
        } if phase is Phase.START else {
            'cleaning_until': now, 'cleaned_at': now}
        with self._database.writer() as session:
            for uuids, values in (
                    (held.mine - clean, {'cleaning_until': now}),
                    (clean, done)):
                session.execute(
                    sa.update(models.Host)
                    .where(_HOST.assigned_to == reservation_id,
                           _HOST.cleaning_until == held.until,
                           _HOST.uuid.in_(uuids)).values(**values))
