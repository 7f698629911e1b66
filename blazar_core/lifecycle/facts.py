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

from blazar_core.common import errors
from blazar_core.db import models
from blazar_core.leases import events

__all__ = ['AGAIN', 'AWAY', 'CLEANING', 'Count', 'DEFERRED', 'GRACE',
           'GivenUp', 'LEFT', 'LONGEST_PAUSE', 'LONGEST_WAIT', 'Later',
           'Lease', 'NOT_CLOSED', 'NOT_FREE', 'NOT_LEFT', 'ORPHANED',
           'Outcome', 'REFUSED', 'SNAPSHOTS', 'apart', 'booking_of',
           'bookings', 'comes_first', 'counts', 'deferred', 'disowned',
           'failures', 'has_servers', 'is_building', 'is_unsettled', 'lasting',
           'pause', 'put_off', 'servers', 'waiting']

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

#: What a lease says whose hosts somebody has yet.
NOT_FREE = 'Its hosts are not free yet; the start is tried again.'
#: What one says whose servers are kept, and not free yet.
NOT_LEFT = ('Its servers are still in the occurrence before; the start is '
            'tried again.')
#: What one says that is ending, and of which all else is done.
NOT_CLOSED = 'What was reserved could not be closed yet; it is tried again.'
#: What one says whose servers have some time left.
GRACE = 'Its servers come to their end when its grace period is over.'
#: How the reason of a lease begins that has an event which could not be
#: carried out yet.
DEFERRED = 'An event is tried again: '
#: What one says whose hosts are not ready for others yet.
CLEANING = 'Its hosts are being cleaned.'
#: How begins what one says whose servers have not come to their end.
REFUSED = 'Its end is tried again: '
#: The beginning of the reason of a lease whose images are not made yet.
SNAPSHOTS = 'Its snapshots are tried again: '
#: What one says whose owner there is no more, by what is missing.
ORPHANED = {'project': 'Its project does not exist any more.',
            'user': 'Its user does not exist any more.'}
#: What one says whose servers may stay as long as they like.
LEFT = 'Its hosts are given back when the servers there have gone.'

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
            if booking.server_id is not None and booking.sent_at is None and
            booking.failed_at is None]


def is_unsettled(booking: models.Booking) -> bool:
    """Whether a server is still to be sent, or is being built."""
    return booking.failed_at is None and not booking.running


def is_building(lease: models.Lease) -> bool:
    """Whether of the servers that were sent some are not settled yet."""
    return any(is_unsettled(booking) and booking.sent_at is not None
               for booking in bookings(lease))


def disowned(reason: str, missing: str | None) -> str:
    """The status reason of a lease, with a word about its owner.

    :param missing: see :data:`ORPHANED`; None: there is one
    """
    for said in ORPHANED.values():
        reason = ' '.join(reason.replace(said, ' ').split())
    return reason if missing is None else (
        f'{reason} {ORPHANED[missing]}'.strip())


def deferred(reason: str, event_type: str, why: str) -> str:
    """Return the status reason of a lease of which an event is deferred.

    :param reason: what it says already
    :param why: empty: that event is not deferred for a reason to be shown
    """
    said, _mark, others = reason.partition(DEFERRED)
    if why:
        return f'{lasting(said)} {DEFERRED}{event_type}: {why}'.strip()
    return said.strip() if others.startswith(f'{event_type}: ') else reason


def lasting(reason: str) -> str:
    """What is still said of a lease when it waits for nothing any more."""
    for missing, said in ORPHANED.items():
        if said in reason:
            return disowned(lasting(disowned(reason, None)), missing)
    for begin in (DEFERRED, REFUSED, SNAPSHOTS, events.NOT_PROLONGED):
        reason = reason.partition(begin)[0].strip()
    for passing in (NOT_FREE, NOT_LEFT, NOT_CLOSED, GRACE, LEFT, CLEANING):
        reason = reason.removesuffix(passing).strip()
    return reason


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


def put_off(server_ids: ty.Sequence[str], why: str) -> str:
    """What a lease says whose servers wait longer than they should."""
    return (f'Not placed yet, and tried again: {", ".join(server_ids)}. '
            f'{why}')


def failures(lease: models.Lease) -> str:
    """What a lease says of its servers that failed."""
    failed = [ty.cast(str, booking.server_id) for booking in bookings(lease)
              if booking.failed_at is not None]
    return f'Could not be built: {", ".join(failed)}.' if failed else ''


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
def apart(lease_id: str) -> ty.Iterator[None]:
    """What fails with a lease keeps no other from its turn."""
    try:
        yield
    except errors.BooksUnavailable:
        raise
    except Exception:
        LOG.exception('Lease %s could not be seen to', lease_id)
