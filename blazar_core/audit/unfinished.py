# SPDX-License-Identifier: Apache-2.0

"""Leases that are not terminated, and their pending events."""

import collections
import contextlib
import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit.findings import Difference
from blazar_core.audit.findings import Fix
from blazar_core.audit.findings import LISTENER
from blazar_core.audit.findings import named
from blazar_core.audit.findings import STUCK
from blazar_core.audit.findings import when
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import lease_conditions

_COUNTS = sa.select(
    models.Reservation.lease_id,
    sa.func.count(models.Booking.id).label('bookings'),
    sa.func.count(models.Booking.server_id).label('servers'),
    sa.func.count(sa.case((sa.and_(
        models.Booking.dispatched_at.is_(None),
        models.Booking.failed_at.is_(None)),
        models.Booking.server_id))).label('waiting'),
).outerjoin(models.Reservation.bookings).group_by(models.Reservation.lease_id)

#: Number of leases whose rows are read at once.
_AT_ONCE = 1000
OPEN = models.Event.status.in_(states.OPEN)


class _Lease(ty.NamedTuple):
    """A lease that is not terminated, and the numbers of its objects.

    :ivar bookings: None if it has no reservations and needs no bookings
    :ivar waiting: servers whose build was not sent
    :ivar has_build: whether the deferred build is stored
    """

    row: ty.Any
    bookings: int | None
    servers: int
    waiting: int
    has_build: bool
    events: ty.Mapping[str, ty.Any]

    @property
    def title(self) -> str:
        return named(self.row.id, self.row.name)


def _wanted(status: str, waiting: bool) -> list[states.EventType]:
    """Return the types of the pending events of a lease.

    :param waiting: whether builds of its servers were not sent
    """
    wanted = {states.Lease.OFFERED: [states.EventType.EXPIRE],
              states.Lease.WAITING: [states.EventType.RETRY],
              states.Lease.IN_PROGRESS: [states.EventType.MAKE_ROOM],
              states.Lease.TERMINATED: []}
    is_started = status not in states.TO_START or (
        status == states.Lease.STARTING and not waiting)
    return wanted.get(states.Lease(status), [
        *(() if is_started else (states.EventType.START,)),
        states.EventType.END])


class Unfinished:
    """Finds differences of leases that are not terminated.

    :param life: the handlers of the engine, by which differences are fixed
    :param late: seconds after which a due event should have been claimed
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 life: handlers.Handlers, late: int) -> None:
        self._database = database
        self._clock = clock
        self._life = life
        self._late = late

    def differences(self) -> ty.Iterator[Difference]:
        """Yield the differences of all these leases."""
        for lease in self._unfinished():
            yield from self._about(lease)

    def _unfinished(self) -> ty.Iterator[_Lease]:
        """Yield the leases that are not terminated; there may be very many.
        """
        last = ''
        while page := self._page(last):
            yield from page
            last = page[-1].row.id

    def _page(self, last: str) -> list[_Lease]:
        """Return the next of these leases, from one snapshot.

        :param last: only leases with later ids
        """
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Lease.__table__).where(
                    models.Lease.status != states.Lease.TERMINATED,
                    models.Lease.id > last)
                .order_by(models.Lease.id).limit(_AT_ONCE)).all()
            if not found:
                return []
            ids = [row.id for row in found]
            counts = {row.lease_id: (row.bookings, row.servers, row.waiting)
                      for row in session.execute(_COUNTS.where(
                          models.Reservation.lease_id.in_(ids)))}
            builds = set(session.scalars(
                sa.select(models.DeferredBuild.lease_id).where(
                    models.DeferredBuild.lease_id.in_(ids))))
            events: dict[str, dict[str, ty.Any]] = (
                collections.defaultdict(dict))
            for row in session.execute(
                    sa.select(models.Event.__table__)
                    .where(OPEN, models.Event.lease_id.in_(ids))
                    .order_by(models.Event.run_at.desc())):
                events[row.lease_id][row.event_type] = row
        return [_Lease(row, *counts.get(row.id, (None, 0, 0)),
                       row.id in builds, events.get(row.id, {}))
                for row in found]

    def _about(self, lease: _Lease) -> ty.Iterator[Difference]:
        if lease.bookings == 0:
            yield self._empty(lease)
            return
        yield from self._unbuilt(lease)
        yield from self._without_event(lease)
        yield from self._overstaying(lease)

    def _empty(self, lease: _Lease) -> Difference:
        offered = lease.row.status == states.Lease.OFFERED
        return Difference(
            ('empty', lease.row.id),
            f'{lease.title} is {lease.row.status}, but has no booking.',
            '--fix ends it',
            functools.partial(self._life.lease_end.expire if offered else
                              self._life.lease_end.end, lease.row.id))

    def _unbuilt(self, lease: _Lease) -> ty.Iterator[Difference]:
        """Yield a lease whose build is missing or partly sent before its
        start, or that has servers that will never be built.
        """
        status = lease.row.status
        if status == states.Lease.PENDING and lease.servers and not (
                lease.has_build and lease.waiting == lease.servers):
            kept = 'was already sent' if lease.has_build else 'is missing'
            yield Difference(
                ('no build', lease.row.id),
                f'{lease.title} is PENDING, but the build of its servers '
                f'{kept}: it cannot start.',
                'delete its servers, which ends it, and book again')
        elif lease.waiting and (status == states.Lease.ACTIVE or (
                status == states.Lease.STARTING and not lease.has_build)):
            yield Difference(
                ('build', lease.row.id),
                f'{lease.title} is {status}, but {lease.waiting} of its '
                'servers were not sent to build, and no worker will send '
                'them: the API shows them as RESERVED.',
                'they are deleted with their lease; delete them now if you do '
                'not want to wait')

    def _without_event(self, lease: _Lease) -> ty.Iterator[Difference]:
        """Yield the pending events that a lease in its status lacks."""
        for event_type in _wanted(lease.row.status, bool(lease.waiting)):
            if event_type in lease.events:
                continue
            if event_type == states.EventType.EXPIRE:
                fix: Fix = functools.partial(
                    self._life.lease_end.expire, lease.row.id)
                remedy = '--fix ends it'
            else:
                fix = functools.partial(
                    self._reopen, lease.row.id, event_type)
                remedy = '--fix writes the event again'
            yield Difference(
                ('no event', lease.row.id, event_type),
                f'{lease.title} is {lease.row.status}, but has no event '
                f'{event_type}.', remedy, fix)

    @api.retried
    def _reopen(self, lease_id: str, event_type: str) -> None:
        """Create the missing event of a lease again."""
        with contextlib.suppress(errors.NotFound), (
                self._database.writer()) as session:
            lease = api.locked(session, lease_id)
            if event_type not in _wanted(lease.status, True) or any(
                    event.event_type == event_type and
                    event.status in states.OPEN for event in lease.events):
                return
            time = {states.EventType.START: lease.start_date,
                    states.EventType.END: lease.end_date,
                    }.get(states.EventType(event_type), self._clock.now())
            events.add(lease, event_type, time, self._clock.now())

    def overdue(self) -> ty.Iterator[Difference]:
        """Yield the events that no worker carries out."""
        latest = self._clock.now() - self._late
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Event.__table__, models.Lease.name).join(
                    models.Lease, models.Lease.id == models.Event.lease_id)
                .where(models.Lease.status != states.Lease.TERMINATED, sa.or_(
                    sa.and_(models.Event.status == states.Event.UNDONE,
                            models.Event.run_at < latest),
                    sa.and_(models.Event.status == states.Event.IN_PROGRESS,
                            models.Event.claimed_until < latest)))
                .order_by(models.Event.run_at)).all()
        for event in found:
            text = (f'is due since {when(event.run_at)}, but no worker has '
                    'claimed it' if event.status == states.Event.UNDONE else
                    f'was claimed by {event.claimed_by}, which has not '
                    f'extended its claim since {when(event.claimed_until)}, '
                    'but no worker has taken over')
            yield Difference(
                ('overdue', event.id, event.run_at, event.claimed_until),
                f'{named(event.lease_id, event.name)}: its '
                f'{event.event_type} {text}.', LISTENER)

    def _overstaying(self, lease: _Lease) -> ty.Iterator[Difference]:
        """Yield a lease that should have ended, or whose end takes too long.
        """
        row, latest = lease.row, self._clock.now() - STUCK
        end = lease.events.get(states.EventType.END)
        since = row.ending_at or row.updated_at
        if row.status == states.Lease.TERMINATING and (
                since + row.grace_period + row.cleaning_time
                < latest) and not conditions.is_set(
                    row.conditions, lease_conditions.LEFT):
            cleaning = conditions.is_set(
                row.conditions, lease_conditions.CLEANING)
            yield Difference(
                ('ending', row.id),
                f'{lease.title} is TERMINATING since {when(since)}: '
                + ('its hosts are not clean yet.' if cleaning else
                   f'{lease.servers} of its servers still exist.'),
                'check what blazar-listener has logged about cleaning_command'
                if cleaning else
                'check why Nova does not delete them; blazar-listener retries')
        elif row.status != states.Lease.TERMINATING and (
                row.end_date < latest) and end is not None and end.attempts:
            yield Difference(
                ('not ended', row.id),
                f'{lease.title} is past its end, {when(row.end_date)}, but '
                f'{row.status}; its end was tried {end.attempts} '
                'times.', LISTENER)
