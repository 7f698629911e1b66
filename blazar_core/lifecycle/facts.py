# SPDX-License-Identifier: Apache-2.0

"""What the rows of a lease say of it, and how actions are put off.

An action that is not finished says when it has to be done again
(:class:`Later`); the pauses of all of them stand here.
"""

import contextlib
import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.db import models

__all__ = ['AGAIN', 'AWAY', 'CLEANING', 'Count', 'GRACE', 'GivenUp', 'LEFT',
           'LONGEST_PAUSE', 'LONGEST_WAIT', 'Later', 'Lease', 'NOT_CLOSED',
           'NOT_FREE', 'NOT_LEFT', 'ORPHANED', 'Outcome', 'apart',
           'booking_of', 'bookings', 'comes_first', 'counts', 'deferred',
           'has_servers', 'is_building', 'no_image', 'pause', 'put_off',
           'refused', 'servers', 'waiting']

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
    'Its hosts are not free yet; the start is tried again.')
NOT_LEFT = conditions.Condition(
    _T.START_DELAYED, _R.SERVERS_IN_USE,
    'Its servers are still in the occurrence before; the start is tried '
    'again.')
NOT_CLOSED = conditions.Condition(
    _T.END_DELAYED, _R.NOT_CLOSED,
    'What was reserved could not be closed yet; it is tried again.')
GRACE = conditions.Condition(
    _T.END_DELAYED, _R.GRACE_PERIOD,
    'The lease has ended; its servers run until its grace period expires.')
CLEANING = conditions.Condition(
    _T.END_DELAYED, _R.CLEANING, 'Its hosts are being cleaned.')
LEFT = conditions.Condition(
    _T.END_DELAYED, _R.HOSTED_SERVERS,
    'Its hosts are given back when the servers there have gone.')
#: By what is missing.
ORPHANED = {
    'project': conditions.Condition(
        _T.ORPHANED, _R.PROJECT_NOT_FOUND,
        'The project of the lease no longer exists.'),
    'user': conditions.Condition(
        _T.ORPHANED, _R.USER_NOT_FOUND,
        'The user of the lease no longer exists.')}

Lease: ty.TypeAlias = dict[str, ty.Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
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

    def after(self, waits: int) -> int:
        """The pause when it was put off so many times before."""
        return max(self.seconds, min(
            self.most, self.seconds << min(waits, 16)))


@dataclasses.dataclass(frozen=True, slots=True)
class GivenUp:
    """An action is not finished, and is not done again."""

    why: str


Outcome: ty.TypeAlias = Later | GivenUp | None

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


def bookings(lease: models.Lease) -> list[models.Booking]:
    """All bookings of a lease."""
    return [booking for reservation in lease.reservations
            for booking in reservation.bookings]


def comes_first(lease: models.Lease) -> bool:
    """Whether a lease is there before what takes it: no boot made it."""
    return any(not one.booted for one in lease.reservations)


def waiting(lease: models.Lease) -> list[str]:
    """The servers of a lease whose build has not been sent."""
    return [booking.server_id for booking in bookings(lease)
            if booking.server_id is not None and
            booking.dispatched_at is None and booking.failed_at is None]


def _is_unsettled(booking: models.Booking) -> bool:
    """Whether a server is still to be sent, or is being built."""
    return booking.failed_at is None and not booking.running


def is_building(lease: models.Lease) -> bool:
    """Whether of the servers that were sent some are not settled yet."""
    return any(_is_unsettled(booking) and booking.dispatched_at is not None
               for booking in bookings(lease))


def deferred(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease of which an event is deferred."""
    return conditions.Condition(
        _T.EVENT_DEFERRED, _R.NOT_YET_POSSIBLE,
        f'An event is tried again: {event_type}: {why}',
        {'event_type': event_type, 'why': why})


def refused(why: str) -> conditions.Condition:
    """Return the condition of a lease whose end is tried again."""
    return conditions.Condition(
        _T.END_DELAYED, _R.SERVERS_REMAIN, f'Its end is tried again: {why}')


def no_image(event_type: str, why: str) -> conditions.Condition:
    """Return the condition of a lease whose snapshots are not made yet."""
    return conditions.Condition(
        _T.SNAPSHOT_DELAYED, _R.REFUSED,
        f'Its snapshots are tried again: {event_type}: {why}',
        {'event_type': event_type})


class Count(ty.NamedTuple):
    """How many bookings are of servers that are still to be sent or are being
    built, of some that run, and of some that have failed.
    """

    unsettled: int
    running: int
    failed: int


def counts(session: orm.Session, lease_id: str) -> dict[str, Count]:
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
        f'Not placed yet, and tried again: {", ".join(server_ids)}. {why}',
        {'servers': [*server_ids]})


def servers(lease: models.Lease) -> list[str]:
    """The servers of a lease that have a booking."""
    return [booking.server_id for booking in bookings(lease)
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
    except errors.BooksUnavailable:
        raise
    except Exception:
        LOG.exception('Lease %s could not be seen to', lease_id)
