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

"""What is wrong in the books, as far as the books alone can tell.

The books are kept right by whoever changes them. What is looked for here is
what a crash between two transactions, a database that was restored, or a
hand in the tables may have left behind. Reading is linear in the bookings,
and by a handful of statements.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import typing as ty

from oslo_utils import uuidutils
import sqlalchemy as sa

from blazar_core.books import inventory
from blazar_core.books import ledger
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import lifecycle

__all__ = ['Audit', 'Difference', 'LISTENER', 'STUCK', 'named', 'when']

#: Seconds after which what goes on by itself should have.
STUCK = 300

#: What an operator is told about what nobody does.
LISTENER = 'blazar-listener does it; does one run, and what does its log say?'

#: How many sealed texts are read at a time; one may have megabytes.
_BATCH = 100

#: How many leases one line names.
_NAMED = 3

Mend: ty.TypeAlias = ty.Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it should be.

    :param key: two looks have found the same when this is the same
    :param text: what it is, in words
    :param remedy: what ``mend`` would do, or what is left to the operator
    :param mend: makes it right; harmless when it is right by then
    :param mend_after: the time before which it may still be under way
    """

    key: tuple[ty.Hashable, ...]
    text: str = dataclasses.field(compare=False)
    remedy: str = dataclasses.field(compare=False)
    mend: Mend | None = dataclasses.field(default=None, compare=False)
    mend_after: int = dataclasses.field(default=0, compare=False)


def named(lease_id: str, name: str) -> str:
    """A lease, as all lines name it."""
    return f'Lease {lease_id} ({name})'


def when(seconds: int) -> str:
    """A time, as all lines show it."""
    return f'{clocks.minute(seconds)} UTC'


class _Lease(ty.NamedTuple):
    """A lease that is not over, and how much there is of what belongs to it.

    :ivar bookings: None when it has no reservations, and is right without
    :ivar waiting: servers whose build has not been sent
    :ivar has_build: whether what would be sent is kept
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


class Audit:
    """Looks for what is wrong in the books.

    :param life: what mends do, as the engine would
    :param opens: opens a sealed text
    :param late: seconds after which a due event should be under way
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 life: lifecycle.Lifecycle, opens: ty.Callable[[str], str],
                 late: int) -> None:
        self._database = database
        self._clock = clock
        self._life = life
        self._opens = opens
        self._late = late

    def size(self) -> dict[str, int]:
        """How much there is to compare."""
        with self._database.reader() as session:
            return {
                'leases': session.scalars(
                    sa.select(sa.func.count()).where(
                        models.Lease.status != 'TERMINATED')).one(),
                'servers': session.scalars(
                    sa.select(sa.func.count(models.Booking.server_id))).one(),
                'hosts': session.scalars(
                    sa.select(sa.func.count(models.Host.id))).one()}

    def differences(self) -> ty.Iterator[Difference]:
        """What is wrong."""
        for lease in self._unfinished():
            yield from self._about(lease)
        yield from self.overdue()
        yield from self._of_the_dead()
        yield from self._unlike()
        yield from self._without_lease()
        yield from self._overbooked()
        yield from self._sealed()

    # -- leases ------------------------------------------------------------

    def _unfinished(self) -> list[_Lease]:
        """Everything of the leases that are not over, from one moment."""
        with self._database.reader() as session:
            counts = {row.lease_id: (row.bookings, row.servers, row.waiting)
                      for row in session.execute(_COUNTS)}
            builds = set(session.scalars(
                sa.select(models.HeldBuild.lease_id)))
            events: dict[str, dict[str, ty.Any]] = (
                collections.defaultdict(dict))
            for row in session.execute(
                    sa.select(models.Event.__table__)
                    .where(_OPEN).order_by(models.Event.due.desc())):
                events[row.lease_id][row.event_type] = row
            found = session.execute(
                sa.select(models.Lease.__table__).where(
                    models.Lease.status != 'TERMINATED')
                .order_by(models.Lease.start_date, models.Lease.id)).all()
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
        offered = lease.row.status == 'OFFERED'
        return Difference(
            ('empty', lease.row.id),
            f'{lease.title} is {lease.row.status}, and has no booking.',
            '--fix ends it',
            functools.partial(self._life.ending.expire if offered else
                              self._life.ending.end, lease.row.id))

    def _unbuilt(self, lease: _Lease) -> ty.Iterator[Difference]:
        """What is to start has its build and nothing that was sent; what
        runs has nothing left to be sent.
        """
        status = lease.row.status
        if status == 'PENDING' and lease.servers and not (
                lease.has_build and lease.waiting == lease.servers):
            kept = 'was sent already' if lease.has_build else 'is not kept'
            yield Difference(
                ('no build', lease.row.id),
                f'{lease.title} is PENDING, but the build of its servers '
                f'{kept}: it cannot start.',
                'delete its servers, which ends it, and book again')
        elif lease.waiting and (status == 'ACTIVE' or (
                status == 'STARTING' and not lease.has_build)):
            yield Difference(
                ('build', lease.row.id),
                f'{lease.title} is {status}, but {lease.waiting} of its '
                f'servers were not sent and nobody will send them: the API '
                f'calls them RESERVED.',
                'they go with their lease; delete them to be rid of them now')

    def _without_event(self, lease: _Lease) -> ty.Iterator[Difference]:
        """What moves a lease on is an event that will still come."""
        wanted = {'OFFERED': [states.EventType.EXPIRE],
                  'PENDING': [states.EventType.START, states.EventType.END],
                  }.get(lease.row.status, [states.EventType.END])
        if lease.row.status == 'STARTING' and lease.waiting:
            wanted = [states.EventType.START, *wanted]
        for event_type in wanted:
            if event_type in lease.events:
                continue
            if event_type == states.EventType.EXPIRE:
                mend: Mend = functools.partial(
                    self._life.ending.expire, lease.row.id)
                remedy = '--fix ends it'
            else:
                mend = functools.partial(
                    self._database.retried, self._reopen, lease.row.id,
                    event_type)
                remedy = '--fix writes the event again'
            yield Difference(
                ('no event', lease.row.id, event_type),
                f'{lease.title} is {lease.row.status}, and no {event_type} '
                f'will come.', remedy, mend)

    def _reopen(self, lease_id: str, event_type: str) -> None:
        """Write the start or the end of a lease again."""
        with contextlib.suppress(errors.NotFound), (
                self._database.writer()) as session:
            lease = api.locked(session, lease_id)
            if lease.status == 'TERMINATED' or (
                    event_type == states.EventType.START and
                    lease.status not in ('PENDING', 'STARTING')) or any(
                        event.event_type == event_type and
                        event.status in _OPEN_STATES
                        for event in lease.events):
                return
            time = (lease.start_date if event_type == states.EventType.START
                    else lease.end_date)
            session.add(models.Event(
                id=uuidutils.generate_uuid(), lease_id=lease_id,
                event_type=event_type, time=time, due=time, status='UNDONE',
                attempts=0, claimed_by=None, claimed_until=0))

    def overdue(self) -> ty.Iterator[Difference]:
        """The events that nobody carries out."""
        latest = self._clock.now() - self._late
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Event.__table__, models.Lease.name).join(
                    models.Lease, models.Lease.id == models.Event.lease_id)
                .where(models.Lease.status != 'TERMINATED', sa.or_(
                    sa.and_(models.Event.status == 'UNDONE',
                            models.Event.due < latest),
                    sa.and_(models.Event.status == 'IN_PROGRESS',
                            models.Event.claimed_until < latest)))
                .order_by(models.Event.due)).all()
        for event in found:
            text = (f'is due since {when(event.due)}, and nobody has taken '
                    f'it up' if event.status == 'UNDONE' else
                    f'was taken up by {event.claimed_by}, who has given no '
                    f'sign of life since {when(event.claimed_until)}, and '
                    f'nobody has taken it over')
            yield Difference(
                ('overdue', event.id, event.due, event.claimed_until),
                f'{named(event.lease_id, event.name)}: its '
                f'{event.event_type} {text}.', LISTENER)

    def _overstaying(self, lease: _Lease) -> ty.Iterator[Difference]:
        """A lease whose end has begun, or should have, comes to an end."""
        row, latest = lease.row, self._clock.now() - STUCK
        end = lease.events.get(states.EventType.END)
        if row.status == 'TERMINATING' and row.updated_at < latest:
            yield Difference(
                ('ending', row.id),
                f'{lease.title} is TERMINATING since {when(row.updated_at)}: '
                f'{lease.servers} of its servers are not gone.',
                'see why Nova does not delete them; blazar-listener goes on '
                'trying')
        elif row.status != 'TERMINATING' and row.end_date < latest and (
                end is not None and end.attempts):
            yield Difference(
                ('not ended', row.id),
                f'{lease.title} should have ended at {when(row.end_date)} '
                f'and is {row.status}; its end was tried {end.attempts} '
                f'times.', LISTENER)

    # -- what is left behind -------------------------------------------------

    def _of_the_dead(self) -> ty.Iterator[Difference]:
        """Leases that are over have nothing but their record.

        Bookings with servers are left to who can ask for the servers.
        """
        parts = {
            'bookings': sa.select(models.Reservation.lease_id).join(
                models.Booking.reservation).where(
                    models.Booking.server_id.is_(None)),
            'a held build': sa.select(models.HeldBuild.lease_id),
            'events that are not done': sa.select(
                models.Event.lease_id).where(_OPEN),
        }
        left: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        with self._database.reader() as session:
            for what, query in parts.items():
                for row in session.execute(
                        sa.select(models.Lease.id, models.Lease.name).where(
                            models.Lease.status == 'TERMINATED',
                            models.Lease.id.in_(query))):
                    left[row.id, row.name].append(what)
        for (lease_id, name), has in left.items():
            yield Difference(
                ('dead', lease_id, *has),
                f'{named(lease_id, name)} is TERMINATED, and still has '
                f'{" and ".join(has)}.', '--fix removes them',
                functools.partial(
                    self._database.retried, self._bury, lease_id))

    def _bury(self, lease_id: str) -> None:
        with contextlib.suppress(errors.NotFound), (
                self._database.writer()) as session:
            lease = api.locked(session, lease_id)
            if lease.status != 'TERMINATED':
                return
            ledger.amend(session, self._clock.now(), [
                ledger.Edit(booking, None)
                for reservation in lease.reservations
                for booking in reservation.bookings
                if booking.server_id is None])
            session.execute(sa.delete(models.HeldBuild).where(
                models.HeldBuild.lease_id == lease_id))
            for event in lease.events:
                event.status = 'DONE'

    def _unlike(self) -> ty.Iterator[Difference]:
        """Bookings are over the window of their lease."""
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Booking.id, models.Booking.server_id,
                          models.Booking.start_date, models.Booking.end_date,
                          models.Lease.id.label('lease_id'),
                          models.Lease.name,
                          models.Lease.start_date.label('start'),
                          models.Lease.end_date.label('end'))
                .join(models.Booking.reservation)
                .join(models.Reservation.lease)
                .where(models.Lease.status != 'TERMINATED', sa.or_(
                    models.Booking.start_date != models.Lease.start_date,
                    models.Booking.end_date != models.Lease.end_date))).all()
        for row in found:
            yield Difference(
                ('unlike', row.id, row.start_date, row.end_date),
                f'{named(row.lease_id, row.name)} is from {when(row.start)} '
                f'to {when(row.end)}, but server {row.server_id} is booked '
                f'from {when(row.start_date)} to {when(row.end_date)}.',
                'end the lease and book again')

    def _without_lease(self) -> ty.Iterator[Difference]:
        with self._database.reader() as session:
            found = session.execute(
                sa.select(models.Booking.id, models.Booking.server_id,
                          models.Booking.start_date, models.Booking.end_date)
                .outerjoin(models.Booking.reservation)
                .outerjoin(models.Reservation.lease)
                .where(models.Lease.id.is_(None))).all()
        for row in found:
            yield Difference(
                ('no lease', row.id),
                f'Booking {row.id} of server {row.server_id} from '
                f'{when(row.start_date)} to {when(row.end_date)} belongs to '
                f'no lease.', '--fix removes it', functools.partial(
                    self._database.retried, self._drop, row.id))

    def _drop(self, booking_id: int) -> None:
        with self._database.writer() as session:
            row = session.scalars(
                sa.select(models.Booking).outerjoin(models.Booking.reservation)
                .outerjoin(models.Reservation.lease).where(
                    models.Booking.id == booking_id,
                    models.Lease.id.is_(None))).one_or_none()
            if row is not None:
                ledger.amend(session, self._clock.now(),
                             [ledger.Edit(row, None)])

    # -- capacity ------------------------------------------------------------

    def _overbooked(self) -> ty.Iterator[Difference]:
        """The rule, on every host, at every instant from now on."""
        now = self._clock.now()
        with self._database.reader() as session:
            hosts = {row.id: row for row in session.execute(inventory.HOSTS)}
            rows = session.execute(
                sa.select(models.Booking.host_id, models.Booking.start_date,
                          models.Booking.end_date, models.Booking.resources,
                          models.Booking.placed_at,
                          models.Reservation.lease_id)
                .join(models.Booking.reservation)
                .where(models.Booking.host_id.is_not(None),
                       sa.or_(models.Booking.end_date > now,
                              models.Booking.placed_at.is_not(None)))
                .order_by(models.Booking.host_id),
                execution_options={'yield_per': 10_000})
            for host_id, bookings in itertools.groupby(
                    rows, key=lambda row: ty.cast(int, row.host_id)):
                found = _overfull(hosts[host_id], list(bookings), now)
                if found is not None:
                    yield found

    # -- what is sealed ------------------------------------------------------

    def _sealed(self) -> ty.Iterator[Difference]:
        """What is kept sealed opens, and is kept only while it is needed."""
        for table, what in ((models.HeldBuild, 'the build of its servers'),
                            (models.Credential, 'the trust of its owner')):
            for row in self._sealed_rows(table):
                if row.id is None or row.status == 'TERMINATED':
                    if table is models.Credential:
                        yield self._unrevoked(row)
                elif self._open(row.sealed) is None:
                    yield Difference(
                        ('sealed', table.__tablename__, row.lease_id),
                        f'{named(row.id, row.name)}: {what} does not open '
                        f'with any key of [blazar] encryption_keys.',
                        'put the key back that it was sealed with')

    def _unrevoked(self, row: ty.Any) -> Difference:
        return Difference(
            ('unrevoked', row.lease_id),
            f'Lease {row.lease_id} is over, and the trust of its owner is '
            f'still kept.', '--fix revokes and forgets it',
            functools.partial(self._life.closing.revoke_of, row.lease_id))

    def _open(self, sealed: str) -> str | None:
        try:
            return self._opens(sealed)
        except errors.VaultError:
            return None

    def _sealed_rows(self, table: type[models.HeldBuild | models.Credential],
                     ) -> ty.Iterator[ty.Any]:
        """What somebody may still need to open, with its lease."""
        query = sa.select(table.lease_id, table.sealed, models.Lease.id,
                          models.Lease.name, models.Lease.status).outerjoin(
            models.Lease, models.Lease.id == table.lease_id).order_by(
                table.lease_id).limit(_BATCH)
        if table is models.HeldBuild:
            query = query.where(models.Lease.status.in_(
                ('PENDING', 'STARTING')))
        last = ''
        while True:
            with self._database.reader() as session:
                rows = session.execute(query.where(
                    table.lease_id > last)).all()
            if not rows:
                return
            yield from rows
            last = rows[-1].lease_id

    def credentials(self) -> dict[str, tuple[str, str, str]]:
        """What lets us act for owners of leases, opened.

        :returns: to each credential the id, name and status of its lease
        """
        return {opened: (row.lease_id, row.name or '',
                         row.status or 'TERMINATED')
                for row in self._sealed_rows(models.Credential)
                if (opened := self._open(row.sealed)) is not None}


_COUNTS = sa.select(
    models.Reservation.lease_id,
    sa.func.count(models.Booking.id).label('bookings'),
    sa.func.count(models.Booking.server_id).label('servers'),
    sa.func.count(sa.case((sa.and_(
        models.Booking.sent_at.is_(None), models.Booking.failed_at.is_(None)),
        models.Booking.server_id))).label('waiting'),
).outerjoin(models.Reservation.bookings).group_by(models.Reservation.lease_id)

_OPEN_STATES = ('UNDONE', 'IN_PROGRESS')
_OPEN = models.Event.status.in_(_OPEN_STATES)


def _overfull(host: ty.Any, rows: ty.Sequence[ty.Any], now: int,
              ) -> Difference | None:
    """The first instant at which more of a host is promised than it has."""
    steps: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for row in rows:
        stay = ledger.stay(row.start_date, row.end_date, row.placed_at, now)
        for rc, amount in row.resources.items():
            steps[rc] += ((max(stay.start, now), amount),
                          (stay.end, -amount))
    first = min((found for rc in sorted(steps) if (
        found := _first_over(host, rc, steps[rc])) is not None),
        default=None)
    if first is None:
        return None
    instant, rc, level = first
    leases = sorted({
        row.lease_id for row in rows
        if row.start_date <= instant < ledger.stay(
            row.start_date, row.end_date, row.placed_at, now).end})
    more = f' and {len(leases) - _NAMED} more' if len(leases) > _NAMED else ''
    concerned = ', '.join(leases[:_NAMED]) + more
    if not host.capacity:
        return Difference(
            ('homeless', host.uuid),
            f'Host {host.name} is none of Nova\'s any more, and leases are '
            f'booked on it: {concerned}.',
            'blazar-listener binds them to other hosts within seconds, or '
            'their leases say that there is no room; bring the host back, or '
            'free others')
    return Difference(
        ('overfull', host.uuid),
        f'Host {host.name} has {host.capacity.get(rc, 0)} {rc}, but at '
        f'{when(instant)} {level} are in use or promised; leases: '
        f'{concerned}.',
        'blazar-listener binds what has not begun to other hosts within '
        'seconds; of what runs, move servers away from it, or let leases end '
        'earlier')


def _first_over(host: ty.Any, rc: str, steps: list[tuple[int, int]],
                ) -> tuple[int, str, int] | None:
    if host.capacity and rc in ledger.SHARED and rc not in host.capacity:
        # A shared provider has it: Nova judges alone.
        return None
    most = host.capacity.get(rc, 0)
    level = host.usage.get(rc, 0)
    steps.sort()
    for instant, group in itertools.groupby(steps, key=lambda one: one[0]):
        level += sum(amount for _instant, amount in group)
        if level > most:
            return instant, rc, level
    return None
