# SPDX-License-Identifier: Apache-2.0

"""The status of a lease, computed from its rows, and how actions are deferred.

An action that is not finished returns :class:`RetryAfter`; the pauses of all
actions are defined here. Changes of a lease are made within a transaction
that has locked it.
"""

import contextlib
import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import assignments
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import views

__all__ = ['AGAIN', 'AWAY', 'CLEANING', 'Count', 'Failed', 'GRACE', 'LEFT',
           'LONGEST_PAUSE', 'LONGEST_WAIT', 'Lease', 'NOT_CLOSED', 'NOT_FREE',
           'NOT_LEFT', 'ORPHANED', 'Result', 'RetryAfter', 'apart',
           'booking_of', 'comes_first', 'deferred', 'explain',
           'fail_waiting', 'finish', 'follow', 'give_room_back',
           'has_servers', 'is_building', 'no_image', 'not_closed', 'pause',
           'put_off', 'refused', 'server_counts', 'servers',
           'update_status', 'waiting']

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

_T, _R = conditions.Type, conditions.Reason
NOT_FREE = conditions.Condition(
    _T.START_DELAYED, _R.HOSTS_IN_USE,
    'The hosts are not free yet; the start is retried.')
NOT_LEFT = conditions.Condition(
    _T.START_DELAYED, _R.SERVERS_IN_USE,
    'The servers are still in the previous occurrence; the start is retried.')
NOT_CLOSED = conditions.Condition(
    _T.END_DELAYED, _R.NOT_CLOSED,
    'The reservation could not be closed yet; closing is retried.')
GRACE = conditions.Condition(
    _T.END_DELAYED, _R.GRACE_PERIOD,
    'The lease has ended; its servers run until its grace period expires.')
CLEANING = conditions.Condition(
    _T.END_DELAYED, _R.CLEANING, 'The hosts are being cleaned.')
LEFT = conditions.Condition(
    _T.END_DELAYED, _R.HOSTED_SERVERS,
    'The hosts are freed when the servers on them are deleted.')
#: By what is missing.
ORPHANED = {
    'project': conditions.Condition(
        _T.ORPHANED, _R.PROJECT_NOT_FOUND,
        'The project of the lease no longer exists.'),
    'user': conditions.Condition(
        _T.ORPHANED, _R.USER_NOT_FOUND,
        'The user of the lease no longer exists.')}

Lease: ty.TypeAlias = dict[str, ty.Any]


def not_closed(why: ty.Iterable[str]) -> conditions.Condition:
    """What keeps a lease from its end.

    :param why: sentences
    """
    return dataclasses.replace(NOT_CLOSED, message=' '.join(
        [NOT_CLOSED.message, *why]))


@dataclasses.dataclass(frozen=True, slots=True)
class RetryAfter:
    """An action is not finished: do it again in so many seconds.

    :ivar most: each time that nothing has happened to it in between, the
        pause is twice as long, up to so many seconds; 0: it is always the
        same
    :ivar shown: whether the status reason of the lease says why, until the
        event is carried out or deferred for another reason
    """

    seconds: int
    why: str
    most: int = 0
    shown: bool = False

    def after(self, deferrals: int) -> int:
        """The pause when it was put off so many times before."""
        return max(self.seconds, min(
            self.most, self.seconds << min(deferrals, 16)))


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """An action is not finished, and is not done again."""

    why: str


Result: ty.TypeAlias = RetryAfter | Failed | None

_OF_SERVER = sa.select(models.Booking).where(
    models.Booking.server_id == sa.bindparam('server'))
_HAS_SERVERS = sa.select(sa.exists().where(
    models.Reservation.lease_id == sa.bindparam('lease'),
    models.Booking.reservation_id == models.Reservation.id,
    models.Booking.server_id.is_not(None)))
_B = models.Booking


def _sum(*of: ty.Any) -> ty.Any:
    return sa.func.sum(sa.case((sa.and_(*of), 1), else_=0))


_COUNTS = sa.select(
    _B.reservation_id,
    _sum(_B.failed_at.is_(None), _B.running.is_(False)),
    _sum(_B.running.is_(True)), _sum(_B.failed_at.is_not(None)),
).join(_B.reservation).where(
    models.Reservation.lease_id == sa.bindparam('lease'),
).group_by(_B.reservation_id)


def comes_first(lease: models.Lease) -> bool:
    """Whether a lease is there before what takes it: no boot made it."""
    return any(not one.booted for one in lease.reservations)


def waiting(lease: models.Lease) -> list[str]:
    """The servers of a lease whose build has not been sent."""
    return [booking.server_id for booking in lease.bookings
            if booking.server_id is not None and
            booking.dispatched_at is None and booking.failed_at is None]


def _is_unsettled(booking: models.Booking) -> bool:
    """Whether a server is still to be sent, or is being built."""
    return booking.failed_at is None and not booking.running


def is_building(lease: models.Lease) -> bool:
    """Whether of the servers that were sent some are not settled yet."""
    return any(_is_unsettled(booking) and booking.dispatched_at is not None
               for booking in lease.bookings)


def deferred(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease of which an event is deferred."""
    return conditions.Condition(
        _T.EVENT_DEFERRED, _R.NOT_YET_POSSIBLE,
        f'An event is retried: {event_type}: {why}',
        {'event_type': event_type, 'why': why})


def refused(why: str) -> conditions.Condition:
    """Return the condition of a lease whose end is tried again."""
    return conditions.Condition(
        _T.END_DELAYED, _R.SERVERS_REMAIN, f'The end is retried: {why}')


def no_image(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease whose snapshots are not made yet."""
    return conditions.Condition(
        _T.SNAPSHOT_DELAYED, _R.REFUSED,
        f'The snapshots are retried: {event_type}: {why}',
        {'event_type': event_type})


#: How the conditions of a lease change, as it is.
Changes: ty.TypeAlias = ty.Callable[
    [models.Lease], ty.Sequence[conditions.Condition | conditions.Type]]


def explain(database: api.Database, clock: clocks.Clock, lease_id: str,
            changes: Changes) -> None:
    """Change the conditions of a lease, unless they are so already."""
    with database.reader() as session:
        lease = api.found(session, lease_id)
        if conditions.holds(lease.conditions, *changes(lease)):
            return
    database.retried(_explain, database, clock, lease_id, changes)


def _explain(database: api.Database, clock: clocks.Clock, lease_id: str,
             changes: Changes) -> None:
    with database.writer() as session:
        lease, now = api.locked(session, lease_id), clock.now()
        if conditions.update(lease, now, *changes(lease)):
            lease.updated_at = now


class Count(ty.NamedTuple):
    """How many bookings are of servers that are still to be sent or are being
    built, of some that run, and of some that have failed.
    """

    unsettled: int
    running: int
    failed: int


def server_counts(session: orm.Session, lease_id: str) -> dict[str, Count]:
    """The bookings of a lease by reservation, in one statement; of those that
    have any.
    """
    return {row[0]: Count(*map(int, row[1:])) for row in (
        session.connection().execute(_COUNTS, {'lease': lease_id}))}


def pause(lease: models.Lease, now: int) -> int:
    """Seconds until servers that could not be placed are tried again.

    The longer it takes, the less often.
    """
    return max(AWAY, min(LONGEST_PAUSE, (now - lease.start_date) // 2))


def put_off(server_ids: ty.Sequence[str], why: str) -> conditions.Condition:
    """Return the condition of a lease whose servers have no host yet."""
    return conditions.Condition(
        _T.START_DELAYED, _R.NO_VALID_HOST,
        f'Servers {", ".join(server_ids)}: no valid host yet; retrying. {why}',
        {'servers': [*server_ids]})


def servers(lease: models.Lease) -> list[str]:
    """The servers of a lease that have a booking."""
    return [booking.server_id for booking in lease.bookings
            if booking.server_id is not None]


def has_servers(session: orm.Session, lease_id: str) -> bool:
    """Whether :func:`servers` has any, in one statement."""
    return bool(session.scalar(_HAS_SERVERS, {'lease': lease_id}))


def booking_of(session: orm.Session, server_id: str,
               ) -> models.Booking | None:
    """The booking of a server, if it has one."""
    return session.scalars(_OF_SERVER, {'server': server_id}).one_or_none()


@contextlib.contextmanager
def apart(lease_id: str, project_id: str | None = None) -> ty.Iterator[None]:
    """What fails with a lease keeps no other from its turn; what is logged
    meanwhile names both.
    """
    with logs.about(lease_id, project_id), _apart(lease_id):
        yield


@contextlib.contextmanager
def _apart(lease_id: str) -> ty.Iterator[None]:
    try:
        yield
    except errors.DatabaseUnavailable:
        raise
    except Exception:
        LOG.exception('Lease %s: updating its status failed', lease_id)


def update_status(session: orm.Session, lease: models.Lease, now: int) -> None:
    """The state of a lease that was made by a boot, and has begun.

    It follows from what is left of it: while a server is still to be
    sent or is being built, it starts; after that, it is what those make
    it that run. The call that builds is kept no longer than that.
    """
    session.flush()
    session.expire_all()
    if lease.status not in states.BEGUN or comes_first(lease):
        return
    # Of a lease of many servers each is settled once: counted, not read.
    counts = server_counts(session, lease.id)
    for reservation in lease.reservations:
        count = counts.get(reservation.id)
        if counts and reservation.status == states.Reservation.PENDING and (
                count is None or not count.unsettled):
            reservation.enter(
                states.Reservation.ACTIVE if count and count.running
                else states.Reservation.ERROR, now)
    if not counts or any(count.unsettled for count in counts.values()):
        return
    status = states.Lease.ACTIVE if any(
        count.running for count in counts.values()) else states.Lease.ERROR
    if lease.status != status:
        lease.enter(status, now)
        LOG.info('Lease %s is %s', lease.id, status)
    conditions.update(lease, now, conditions.Type.START_DELAYED)
    if not any(count.failed for count in counts.values()):
        # Those that did have gone.
        conditions.update(lease, now, conditions.Type.BUILD_FAILED,
                          conditions.Type.FAILED)
    session.execute(sa.delete(models.HeldBuild).where(
        models.HeldBuild.lease_id == lease.id))


def finish(session: orm.Session, lease: models.Lease, now: int,
           ) -> Lease:
    """Nothing of a lease is left but its record."""
    _give_hosts_back(session, lease.reservations, now)
    ledger.amend(session, now, [
        ledger.Edit(booking, None) for booking in lease.bookings])
    lease.enter(states.Lease.TERMINATED, now)
    conditions.update(lease, now, *conditions.TRANSIENT)
    for reservation in lease.reservations:
        reservation.enter(states.Reservation.DELETED, now)
    _cut_short(session, lease, now)
    for event in lease.events:
        _end_event(event, min(now, lease.end_date), now)
    session.execute(sa.delete(models.HeldBuild).where(
        models.HeldBuild.lease_id == lease.id))
    session.flush()
    return views.describe(lease)


def _cut_short(session: orm.Session, lease: models.Lease, now: int) -> None:
    """Of a lease that is over before its time the record says when it was,
    and tells of nothing that has not come. One that had not begun is as long
    as nothing, at its start.
    """
    if now >= lease.end_date:
        return
    lease.end_date = max(now, lease.start_date)
    if (lease.before_end_date or 0) > now:
        lease.before_end_date = None
    for event in lease.events:
        if event.event_type == states.EventType.END:
            event.time = now
        elif event.status in states.OPEN and event.time > now:
            session.delete(event)
    session.flush()
    session.expire(lease, ['events'])


def _end_event(event: models.Event, end: int, now: int) -> None:
    """Nothing is left of an event whose lease is over, but its refund.

    A charge that is under way is carried out: it may arrive after the refund,
    which is then repeated.
    """
    if event.event_type == states.EventType.REFUND:
        event.enter(states.Event.UNDONE, now)
        event.run_at = now
    elif event.event_type != states.EventType.CHARGE or (
            event.status != states.Event.IN_PROGRESS):
        event.enter(_last_state(event, end), now)


def _last_state(event: models.Event, end: int) -> states.Event:
    """The state of an event whose lease is over: an action before the end
    that could not be carried out is given up.
    """
    if event.action is not None and (
            event.status == states.Event.ERROR or
            event.status in states.OPEN and event.time <= end):
        return states.Event.ERROR
    return states.Event.DONE


def give_room_back(session: orm.Session,
                   bookings: ty.Iterable[models.Booking], now: int) -> None:
    """The bookings stay, and tie their servers to their lease."""
    bookings = list(bookings)
    _give_hosts_back(
        session, {booking.reservation for booking in bookings}, now)
    ledger.amend(session, now, [
        ledger.Edit(booking, ledger.new_of(
            booking, host_id=None, claimed_at=None))
        for booking in bookings])


def _give_hosts_back(session: orm.Session,
                     reservations: ty.Iterable[models.Reservation], now: int,
                     ) -> None:
    """Those of whole hosts, if there are any, hold none any more."""
    whole = [one.id for one in reservations if one.whole]
    if whole:
        assignments.unassign(session, now, whole)


def fail_waiting(session: orm.Session, lease: models.Lease, now: int,
                 ) -> None:
    """What was not sent yet is not sent any more."""
    if lease.status in (*states.SEEKING, states.Lease.PENDING) or (
            comes_first(lease)):
        lease.enter(states.Lease.TIMEDOUT if (
            lease.status == states.Lease.IN_PROGRESS
        ) else states.Lease.ERROR, now)
        for reservation in lease.reservations:
            reservation.enter(states.Reservation.ERROR, now)
    waiting = [row for row in lease.bookings
               if row.dispatched_at is None]
    for row in waiting:
        row.failed_at = now
    give_room_back(session, waiting, now)
    session.execute(sa.delete(models.HeldBuild).where(
        models.HeldBuild.lease_id == lease.id))
    update_status(session, lease, now)


def follow(session: orm.Session, lease: models.Lease, booking: models.Booking,
           host: str | None, now: int) -> list[str]:
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
    LOG.info('Lease %s: server %s is on host %s; updating its booking',
             lease.id, booking.server_id, new[0].name)
    left = booking.host_id
    ledger.amend(session, now, ledger.follow(
        booking, new[0].id, left is None or not outages.on_host(
            session.connection(), left, now)), force=True)
    booking.migrating_to = None
    if left and (booking.reservation.params or {}).get('affinity'):
        _bring_along(session, booking, left, now)
    return [row.service_host for row in hosts.values()]


def _bring_along(session: orm.Session, booking: models.Booking, left: int,
                 now: int) -> None:
    """Of servers that stay together, the last one to leave a host takes
    the places with it that nobody has come to, as far as there is room.
    """
    places = [one for one in booking.reservation.bookings
              if one.host_id == left]
    if any(one.claimed_at is not None for one in places):
        return
    try:
        for place in places:
            # What moved before it is counted.
            session.flush()
            ledger.amend(session, now, [ledger.Edit(
                place, ledger.new_of(place, host_id=booking.host_id))])
    except ledger.OverCapacity:
        LOG.warning('Reservation %s: server %s has moved, and its host has no '
                    'capacity for all slots with affinity to it',
                    booking.reservation_id, booking.server_id)
