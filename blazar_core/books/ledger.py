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

"""Deciding: what is written into the books, and by which rule.

The rule, for every instant t of a booking's window::

    open_ended_usage(host) + booked(host, t) <= capacity(host)

Every decision is a list of edits of bookings (:func:`amend`): one comes, one
goes, or one becomes another. A lease that is made, prolonged, moved, resized
or ended, and a server that changes its host, are all that. A decision is all
or nothing, and it is guarded: it reads its hosts, and with them their
generations, no later than their bookings, and then takes each host with
``UPDATE ... WHERE generation = :seen``. Whoever decided about one of these
hosts in between has moved its generation, so that the update finds no row,
the whole transaction is rolled back and run again: it is always the later
one who loses, and nothing of his is left.

Each decision leaves behind what it changed (:class:`models.Change`), for
those who keep the books in memory.

The functions take a session or a connection, so that a caller can decide and
write what belongs to the decision in one transaction. A decision costs one
SELECT, one UPDATE for each host, and one INSERT each of bookings and of
changes; the rule is linear in the bookings that overlap it on its hosts.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

__all__ = [
    'CLAIM_SECONDS',
    'Claimed',
    'Edit',
    'Full',
    'HOSTS',
    'Leased',
    'NewBooking',
    'OVERDUE',
    'SHARED',
    'add',
    'amend',
    'awaited',
    'claim',
    'decide',
    'follow',
    'host_of',
    'in_the_way',
    'new_of',
    'recheck',
    'release',
    'report',
    'report_usage',
    'retain',
    'tell',
    'trim',
]

#: Seconds that a server which should be gone by now is expected to need yet.
OVERDUE = 60

#: Seconds for which what a scheduler has let in counts although the cloud does
#: not have it.
CLAIM_SECONDS = 30

#: Classes that a host may offer through a shared provider: where it reports
#: none of its own, Nova judges alone.
SHARED = frozenset({'DISK_GB'})


class Leased(Exception):
    """What was to count without an end has a booking."""


class Full(api.LostRace):
    """The rule does not hold for what was to come on a host.

    For who chose the host from what he had in memory, somebody was faster.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class NewBooking:
    """What a booking is to be. Without a host it takes no room.

    :ivar placed_at: when a scheduler let its server onto the host
    """

    reservation_id: str
    host_id: int | None
    server_id: str | None
    window: model.Window
    resources: model.Resources
    running: bool = False
    sent_at: int | None = None
    placed_at: int | None = None


class Edit(ty.NamedTuple):
    """A booking as it is (None: it comes) and as it is to be (None: goes)."""

    row: models.Booking | None
    new: NewBooking | None


def new_of(row: models.Booking, **changed: ty.Any) -> NewBooking:
    """A booking as it is, but for what is named."""
    same = NewBooking(row.reservation_id, row.host_id, row.server_id,
                      model.Window(row.start_date, row.end_date),
                      row.resources, row.running, row.sent_at,
                      row.placed_at)
    return dataclasses.replace(same, **changed)


def follow(booking: models.Booking, host_id: int) -> list[Edit]:
    """A booking goes where its server does.

    Whose place it takes there gets its own, so that both have one.
    """
    edits = [Edit(booking, new_of(booking, host_id=host_id))]
    if booking.host_id is not None:
        edits += [
            Edit(other, new_of(other, host_id=booking.host_id))
            for other in booking.reservation.bookings
            if other.host_id == host_id and other.placed_at is None and
            other.id != booking.id][:1]
    return edits


def amend(session: orm.Session, now: int, edits: ty.Sequence[Edit],
          force: bool = False) -> None:
    """Make all of these edits, or none.

    Where less is booked than before, nothing is asked; where more is, the
    rule must hold.

    :param force: for what is a fact already and no wish: the rule is not
        asked, but the guard is still moved
    :raises Full: when the rule does not hold on a host
    :raises LostRace: when somebody else decided about a host meanwhile
    """
    decide(session.connection(), now, edits, force)
    for row, new in edits:
        if row is not None and new is None:
            session.delete(row)
        elif row is not None and new is not None:
            for name, value in _values(new).items():
                setattr(row, name, value)
    add(session.connection(), edits)


def decide(connection: sa.Connection, now: int, edits: ty.Sequence[Edit],
           force: bool = False) -> None:
    """The first half of :func:`amend`: win the right to make the edits.

    For who has rows of his own to write before he goes on, and should not
    have written them when he loses.
    """
    changes = _changes(edits)
    hosts, others = _read(connection, changes, edits, now,
                          with_bookings=not force)
    if not force:
        for host in hosts:
            _check(host, now, others[host.id], changes[host.id])
    _take(connection, now, hosts, changes)


class _Change(ty.NamedTuple):
    """So much more (sign 1) or less (sign -1) on a host over a window."""

    window: model.Window
    resources: model.Resources
    sign: int
    placed_at: int | None

    def counts(self, now: int) -> model.Window:
        """The window over which it counts."""
        return stay(self.window.start, self.window.end, self.placed_at, now)


class _Seen(ty.NamedTuple):
    """What a decision has to know of a host."""

    id: int
    generation: int
    capacity: model.Resources
    usage: model.Resources

    def free(self) -> dict[str, int]:
        """Capacity less open-ended usage, per resource class."""
        return {rc: total - self.usage.get(rc, 0)
                for rc, total in self.capacity.items()}


def _changes(edits: ty.Iterable[Edit]) -> dict[int, list[_Change]]:
    """What edits do to each host."""
    changes: dict[int, list[_Change]] = collections.defaultdict(list)
    for row, new in edits:
        if row is not None and row.host_id is not None:
            changes[row.host_id].append(_Change(
                model.Window(row.start_date, row.end_date), row.resources,
                -1, row.placed_at))
        if new is not None and new.host_id is not None:
            changes[new.host_id].append(
                _Change(new.window, new.resources, 1, new.placed_at))
    return changes


def _read(connection: sa.Connection, changes: ty.Mapping[int, list[_Change]],
          edits: ty.Iterable[Edit], now: int, with_bookings: bool,
          ) -> tuple[list['_Seen'], dict[int, list[_Change]]]:
    """The hosts of a decision, in the order of their ids, and what others
    have booked there. One statement: no generation is read after a booking.
    """
    wanted = [change.window for of_host in changes.values()
              for change in of_host if change.sign > 0]
    if wanted and with_bookings:
        query, times = _WITH_BOOKINGS, {
            'since': min(one.start for one in wanted),
            'until': max(one.end for one in wanted)}
    else:
        query, times = _ALONE, {}
    own = {row.id for row, _new in edits if row is not None}
    hosts: dict[int, _Seen] = {}
    others: dict[int, list[_Change]] = collections.defaultdict(list)
    for row in connection.execute(
            query, {'hosts': sorted(changes), **times}):
        if row.id not in hosts:
            hosts[row.id] = _Seen(row.id, row.generation, row.capacity,
                                  row.usage)
        if len(row) > len(_SEEN) and row.booking_id not in (None, *own):
            others[row.id].append(_Change(
                model.Window(row.start_date, row.end_date), row.resources, 1,
                row.placed_at))
    return list(hosts.values()), others


_HOSTS = models.Host.__table__
_BOOKINGS = models.Booking.__table__
_CHANGES = models.Change.__table__

_SEEN = (_HOSTS.c.id, _HOSTS.c.generation, _HOSTS.c.capacity, _HOSTS.c.usage)
_ALONE = sa.select(*_SEEN).where(_HOSTS.c.id.in_(
    sa.bindparam('hosts', expanding=True))).order_by(_HOSTS.c.id)
_WITH_BOOKINGS = _ALONE.add_columns(
    _BOOKINGS.c.id.label('booking_id'), _BOOKINGS.c.start_date,
    _BOOKINGS.c.end_date, _BOOKINGS.c.resources, _BOOKINGS.c.placed_at,
).outerjoin(_BOOKINGS, sa.and_(
    _BOOKINGS.c.host_id == _HOSTS.c.id,
    _BOOKINGS.c.start_date < sa.bindparam('until'),
    sa.or_(_BOOKINGS.c.end_date > sa.bindparam('since'),
           _BOOKINGS.c.placed_at.is_not(None))))
_TAKE = sa.update(_HOSTS).where(
    _HOSTS.c.id == sa.bindparam('host'),
    _HOSTS.c.generation == sa.bindparam('seen'),
).values(generation=sa.bindparam('next'))
#: What of a host's row follows from what runs there.
_OF_USAGE = frozenset({'usage', 'consumers', 'updated_at', 'recheck_at'})
#: A host, what runs there, and whether some server is leased.
_RUNS = sa.select(
    *_SEEN, _HOSTS.c.consumers, _HOSTS.c.recheck_at,
    _BOOKINGS.c.server_id.label('leased'),
).outerjoin(_BOOKINGS, _BOOKINGS.c.server_id == sa.bindparam('server'))
_TOLD = _RUNS.where(_HOSTS.c.service_host == sa.bindparam('service_host'),
                    _HOSTS.c.name == sa.bindparam('name'))
_CLAIMS = _RUNS.where(_HOSTS.c.id == sa.bindparam('host'))
#: Say who runs on a host, where all of them together take what they took.
_CONFIRM = sa.update(_HOSTS).where(
    _HOSTS.c.id == sa.bindparam('host'),
    _HOSTS.c.generation == sa.bindparam('seen'),
).values(consumers=sa.bindparam('known'), recheck_at=sa.case(
    (_HOSTS.c.recheck_at == sa.bindparam('was'),
     sa.bindparam('becomes', type_=sa.BigInteger)),
    else_=_HOSTS.c.recheck_at))
#: What :func:`host_of` makes hosts of.
HOSTS = sa.select(
    _HOSTS.c.id, _HOSTS.c.uuid, _HOSTS.c.name, _HOSTS.c.service_host,
    _HOSTS.c.capacity, _HOSTS.c.usage, _HOSTS.c.generation,
    _HOSTS.c.properties)


def host_of(row: ty.Any) -> model.Host:
    """A host from what was read of it."""
    return model.Host(row.id, row.uuid, row.name, row.service_host,
                      row.capacity, row.usage, row.generation,
                      row.properties)


def stay(start: int, end: int, placed_at: int | None, now: int,
         ) -> model.Window:
    """The window of a booking as it counts.

    A server that overstays keeps its room until it is really gone, whether
    it runs or is being built.
    """
    return model.Window(start, end if placed_at is None or end > now
                        else now + OVERDUE)


def _check(host: _Seen, now: int, others: ty.Iterable[_Change],
           changes: ty.Sequence[_Change]) -> None:
    """The rule, at every instant at which a host gets more than before.

    :raises Full: when it does not hold
    """
    steps: dict[int, list[tuple[str, int, int]]] = collections.defaultdict(
        list)
    for change in others:
        window = change.counts(now)
        for rc, amount in change.resources.items():
            steps[window.start].append((rc, amount, 0))
            steps[window.end].append((rc, -amount, 0))
    for change in changes:
        window = change.counts(now)
        for rc, amount in change.resources.items():
            more = change.sign * amount
            steps[window.start].append((rc, max(more, 0), more))
            steps[window.end].append((rc, -max(more, 0), -more))
    free = host.free()
    after: dict[str, int] = collections.defaultdict(int)
    gain: dict[str, int] = collections.defaultdict(int)
    for when in sorted(steps):
        for rc, booked, more in steps[when]:
            after[rc] += booked
            gain[rc] += more
        for rc, more in gain.items():
            if more > 0 and after[rc] > free.get(rc, 0) and (
                    rc in free or rc not in SHARED):
                raise Full(host.id)


def _take(connection: sa.Connection, now: int,
          hosts: ty.Iterable[_Seen | models.Host],
          changes: ty.Mapping[int, ty.Sequence[_Change]],
          **values: ty.Any) -> None:
    """Claim the right to decide about hosts, and say what was decided.

    Everybody takes hosts in the order of their ids, so that two who want
    the same ones do not wait for each other in a ring.

    :param values: what the rows of the hosts get. Who follows the changes is
        told the usage; anything else he has to read
    :raises LostRace: when a generation is no longer the one read
    """
    rows: list[dict[str, ty.Any]] = []
    usage = values.get('usage') if values.keys() <= _OF_USAGE else None
    take = _TAKE.values(**values) if values else _TAKE
    for host in hosts:
        try:
            taken = connection.execute(take, {
                'host': host.id, 'seen': host.generation,
                'next': host.generation + 1}).rowcount
        except Exception as exc:
            # Databases that say themselves that somebody was faster.
            if not api.is_disturbance(exc):
                raise
            raise api.LostRace(host.id) from exc
        if taken != 1:
            raise api.LostRace(host.id)
        own = changes.get(host.id, ())
        rows += [{
            'host_id': host.id, 'generation': host.generation + 1,
            'parts': len(own), 'created_at': now,
            'start_date': change.window.start,
            'end_date': change.window.end, 'sign': change.sign,
            'resources': dict(change.resources),
        } for change in own] or [{
            'host_id': host.id, 'generation': host.generation + 1,
            'parts': 1, 'created_at': now, 'start_date': None,
            'end_date': None, 'sign': 0, 'resources': usage}]
    if rows:
        connection.execute(_CHANGES.insert(), rows)


def add(connection: sa.Connection, edits: ty.Iterable[Edit]) -> None:
    """Write the bookings that come, when that has been decided."""
    coming = [_values(new) for row, new in edits
              if row is None and new is not None]
    if coming:
        connection.execute(_BOOKINGS.insert(), coming)


def _values(booking: NewBooking) -> dict[str, ty.Any]:
    """By column."""
    return {'reservation_id': booking.reservation_id,
            'host_id': booking.host_id, 'server_id': booking.server_id,
            'start_date': booking.window.start,
            'end_date': booking.window.end,
            'resources': dict(booking.resources), 'running': booking.running,
            'sent_at': booking.sent_at, 'placed_at': booking.placed_at}


def in_the_way(session: orm.Session, window: model.Window, most: int = 10,
               ) -> list[str]:
    """The leases of the bookings in a window that end first.

    Goes through the bookings in the order of their ends, and looks at ten
    times ``most`` of them at most: a lease may have many.
    """
    first = sa.select(models.Booking.reservation_id, models.Booking.end_date,
                      ).where(
        models.Booking.host_id.is_not(None),
        models.Booking.end_date > window.start,
        models.Booking.start_date < window.end,
    ).order_by(models.Booking.end_date).limit(10 * most).subquery()
    leases = session.scalars(
        sa.select(models.Reservation.lease_id).join(
            first, first.c.reservation_id == models.Reservation.id)
        .order_by(first.c.end_date))
    return list(dict.fromkeys(leases))[:most]


# -- hosts -------------------------------------------------------------------

def generations(session: orm.Session, uuids: ty.Collection[str],
                ) -> dict[str, int]:
    """The generations of hosts, of those that are in the books."""
    return {row.uuid: row.generation for row in session.execute(
        sa.select(models.Host.uuid, models.Host.generation)
        .where(models.Host.uuid.in_(uuids)))}


def report(session: orm.Session, now: int, host: model.HostFacts,
           allocations: ty.Mapping[str, model.Resources],
           seen: int | None = None) -> bool:
    """Write down what a host has and what runs there.

    What runs there under a booking on this very host is no open-ended usage;
    when it has another size than its booking (it was resized), the booking
    follows.

    :param now: from before the cloud was asked: what it told (:func:`tell`)
        since then is newer
    :param allocations: resources by consumer (server), as placement has them
    :param seen: the generation that the host had before the cloud was asked,
        None if it was not in the books: of what somebody has written since
        then, who may have asked later, nothing is written over
    :returns: whether anything was new
    :raises LostRace: when somebody decided about the host meanwhile: ask the
        cloud again
    """
    row = _host(session, host.uuid)
    if row is None:
        _add_host(session, now, host, allocations)
        return True
    return _report(
        session, now, row, allocations, dataclasses.asdict(host), seen)


def report_usage(session: orm.Session, now: int, uuid: str,
                 allocations: ty.Mapping[str, model.Resources],
                 seen: int | None) -> bool:
    """The same of what runs on a host alone; nothing if it is unknown.

    :raises LostRace: when somebody decided about the host meanwhile: ask the
        cloud again
    """
    row = _host(session, uuid)
    return row is not None and _report(
        session, now, row, allocations, {}, seen)


def tell(connection: sa.Connection, now: int, service_host: str, name: str,
         server_id: str, takes: model.Resources | None) -> bool:
    """What the cloud told of its own accord of one server on a host.

    It may be told twice, or in the wrong order: a server that has left does
    not come again until the cloud has been asked.

    :param takes: None: it has left
    :returns: whether the books are right now; else ask the cloud. They
        cannot tell of a server with a booking, of a host that they do not
        know, and of one with classes of which nothing was told
    :raises LostRace: when somebody decided about the host meanwhile
    """
    rows = [row for row in connection.execute(_TOLD, {
        'service_host': service_host, 'name': name, 'server': server_id})
        if row.capacity]
    if len(rows) != 1 or rows[0].leased or rows[0].consumers is None:
        return False
    row = rows[0]
    known = row.consumers.get(server_id)
    if takes is not None and known is not None:
        if server_id in awaited(row.consumers, now):
            _confirm(connection, now, row, server_id)
        return True
    if takes is not None and not row.capacity.keys() <= takes.keys():
        return False
    amounts = {rc: amount for rc, amount in (takes or {}).items()
               if amount and rc in row.capacity}
    if known is None or known[0]:
        consumers = {**row.consumers, server_id: (amounts, now)}
        _take(connection, now, [_Seen(*row[:len(_SEEN)])], {},
              consumers=consumers, usage=_usage(consumers), updated_at=now)
    return True


# -- what is in flight ---------------------------------------------------

class Claimed(ty.NamedTuple):
    """What a claim has written.

    ``before`` is what the books had of the server on this host until then.
    """

    host_id: int
    server_id: str
    before: models.Consumer | None


def claim(connection: sa.Connection, now: int, host: model.Host,
          server_id: str, takes: model.Resources, fits: bool,
          leased: bool = False) -> Claimed | None:
    """Let a server count on a host before the cloud tells of it.

    It counts for :data:`CLAIM_SECONDS`; the host is looked at again when it
    has not been heard of by then. What the server has there already counts
    on: one that is resized in its place takes both for a while.

    The rule was asked in memory, and no booking is read here: the guard
    finds the host at the generation that it had there, or nothing is done.

    :param host: as it was when it was judged whether the server ``fits``
    :param takes: of the classes that the host has
    :param leased: that the server has a booking is known
    :returns: None when what runs there is not known yet, so that nothing was
        written
    :raises Leased: when it has a booking, and that was not known
    :raises Full: when it does not fit
    :raises LostRace: when somebody decided about the host since it was judged
    """
    row = connection.execute(_CLAIMS, {
        'host': host.id, 'server': server_id}).one_or_none()
    if row is not None and row.leased and not leased:
        raise Leased(server_id)
    if row is None or row.generation != host.generation:
        raise api.LostRace(host.id)
    if not fits:
        raise Full(host.id)
    if row.consumers is None:
        return None
    before = row.consumers.get(server_id)
    amounts = collections.Counter(takes)
    if before is not None and before[1] <= now:
        amounts.update(before[0])
    elif before is not None:
        # Let in again: what it had before the first time is still there.
        amounts |= collections.Counter(before[0])
    until = now + CLAIM_SECONDS
    _change_consumers(
        connection, now, row, {**row.consumers, server_id: (
            dict(amounts), until)},
        recheck_at=min(until + 1, row.recheck_at or until + 1))
    return Claimed(host.id, server_id, before)


def release(connection: sa.Connection, now: int, claimed: Claimed) -> None:
    """Undo a claim: the server did not get there.

    :raises LostRace: when somebody decided about the host meanwhile
    """
    row = connection.execute(_CLAIMS, {
        'host': claimed.host_id, 'server': claimed.server_id}).one()
    consumers = {one: entry for one, entry in (row.consumers or {}).items()
                 if one != claimed.server_id}
    if claimed.before is not None:
        consumers[claimed.server_id] = claimed.before
    if row.consumers is not None:
        _change_consumers(connection, now, row, consumers)


def _change_consumers(connection: sa.Connection, now: int, row: ty.Any,
                      consumers: dict[str, models.Consumer],
                      **values: ty.Any) -> None:
    _take(connection, now, [_Seen(*row[:len(_SEEN)])], {},
          consumers=consumers, usage=_usage(consumers), updated_at=now,
          **values)


def _confirm(connection: sa.Connection, now: int, row: ty.Any,
             server_id: str) -> None:
    """What was claimed for a server is there.

    The host is not looked at any more for its sake.

    :raises LostRace: when somebody decided about the host meanwhile
    """
    amounts, until = row.consumers[server_id]
    known = {**row.consumers, server_id: (amounts, now)}
    taken = connection.execute(_CONFIRM, {
        'host': row.id, 'seen': row.generation, 'known': known,
        'was': until + 1, 'becomes': _next_look(known, now)}).rowcount
    if taken != 1:
        raise api.LostRace(row.id)


def awaited(consumers: ty.Mapping[str, models.Consumer] | None, now: int,
            ) -> dict[str, model.Resources]:
    """What is claimed on a host, and the cloud need not have yet."""
    return {one: amounts for one, (amounts, until) in (
        consumers or {}).items() if amounts and until > now}


def _next_look(consumers: ty.Mapping[str, models.Consumer], now: int,
               ) -> int | None:
    """When the cloud must have what is claimed on a host."""
    return min((consumers[one][1] + 1 for one in awaited(consumers, now)),
               default=None)


def recheck(connection: sa.Connection, now: int,
            service_hosts: ty.Collection[str], at: int | None) -> None:
    """Say when the cloud is asked next what runs on hosts that were due.

    :param now: from before it was asked
    :param at: None: not before somebody wants it
    """
    connection.execute(sa.update(_HOSTS).where(
        _HOSTS.c.service_host.in_(service_hosts),
        _HOSTS.c.recheck_at <= now).values(recheck_at=at))


def _host(session: orm.Session, uuid: str) -> models.Host | None:
    return session.scalars(
        sa.select(models.Host).options(orm.undefer(models.Host.consumers))
        .where(models.Host.uuid == uuid)).one_or_none()


def _report(session: orm.Session, now: int, row: models.Host,
            allocations: ty.Mapping[str, model.Resources],
            values: dict[str, ty.Any], seen: int | None) -> bool:
    """Write down what runs on a host, and other values of its row."""
    known = _Seen(row.id, row.generation, row.capacity, row.usage)
    # Who left was told since then; who came is there, or is on his way.
    consumers = _consumers(allocations) | {
        consumer: entry for consumer, entry in (row.consumers or {}).items()
        if entry[1] >= now and not (entry[0] and consumer in allocations)}
    # Only of those that are there: many more may have a booking for later.
    leased = {booking.server_id: booking for booking in session.scalars(
        sa.select(models.Booking).where(
            models.Booking.host_id == row.id,
            models.Booking.server_id.in_(list(consumers))).options(
                orm.joinedload(models.Booking.reservation)))}
    for consumer in leased:
        consumers.pop(ty.cast(str, consumer), None)
    resized = [Edit(booking, new_of(booking, resources=takes))
               for server_id, booking in leased.items() if booking.running and
               server_id in allocations and booking.resources != (
                   takes := _keeps(booking, allocations[
                       ty.cast(str, server_id)]))]
    _stays_away(session, row, [
        one for one in row.consumers or () if one not in consumers])
    values = {**values, 'usage': _usage(consumers)}
    if row.recheck_at is not None and row.recheck_at <= now:
        _looked(session, row, _next_look(consumers, now))
    values = {name: value for name, value in values.items()
              if getattr(row, name) != value}
    if row.consumers is None or _amounts(row.consumers) != _amounts(consumers):
        values['consumers'] = consumers
    if (resized or values) and row.generation != seen:
        raise api.LostRace(row.id)
    if resized:
        amend(session, now, resized, force=True)
        known = known._replace(generation=known.generation + 1)
    if values:
        _take(session.connection(), now, [known], {}, updated_at=now,
              **values)
        session.expire(row)
    return bool(values or resized)


def _keeps(booking: models.Booking, takes: model.Resources,
           ) -> dict[str, int]:
    """What is booked for a server that runs, and takes so much.

    A place stays as large as was promised, whoever takes less of it: the
    next one may take all.
    """
    if booking.reservation.flavor is None:
        return dict(takes)
    return dict(collections.Counter(booking.reservation.resources) |
                collections.Counter(takes))


def _stays_away(session: orm.Session, row: models.Host,
                server_ids: ty.Collection[str]) -> None:
    """Servers that were on their way to a host are so no more."""
    if server_ids:
        session.execute(sa.update(models.Booking).where(
            models.Booking.server_id.in_(server_ids),
            models.Booking.moving_to == row.id).values(moving_to=None))


def _looked(session: orm.Session, row: models.Host, again: int | None,
            ) -> None:
    """A host was looked at, and is to be again then.

    Nothing is decided by that. Whoever wants it to be looked at has his way
    if he says so at the same moment.
    """
    session.execute(sa.update(_HOSTS).where(
        _HOSTS.c.id == row.id, _HOSTS.c.recheck_at == row.recheck_at,
    ).values(recheck_at=again))


def _add_host(session: orm.Session, now: int, host: model.HostFacts,
              allocations: ty.Mapping[str, model.Resources]) -> None:
    consumers = _consumers(allocations)
    row = models.Host(**dataclasses.asdict(host), generation=0,
                      usage=_usage(consumers), consumers=consumers,
                      updated_at=now)
    session.add(row)
    session.flush()
    _take(session.connection(), now, [row], {})


def _consumers(allocations: ty.Mapping[str, model.Resources],
               ) -> dict[str, models.Consumer]:
    """What the cloud said when it was asked, as a host's row has it."""
    return {consumer: (dict(amounts), 0)
            for consumer, amounts in allocations.items()}


def _amounts(consumers: ty.Mapping[str, models.Consumer],
             ) -> dict[str, model.Resources]:
    return {consumer: entry[0] for consumer, entry in consumers.items()}


def _usage(consumers: ty.Mapping[str, models.Consumer]) -> dict[str, int]:
    """Open-ended usage: what all of them take."""
    total: dict[str, int] = collections.defaultdict(int)
    for amounts, _told in consumers.values():
        for rc, amount in amounts.items():
            total[rc] += amount
    return dict(total)


def retain(session: orm.Session, uuids: ty.Collection[str], now: int,
           ) -> list[str]:
    """Take the capacity from hosts that Nova does not have any more.

    :returns: their names
    :raises LostRace: when somebody decided about one of them meanwhile
    """
    gone = [row for row in session.scalars(sa.select(models.Host).where(
        models.Host.uuid.not_in(uuids)).order_by(models.Host.id))
        if row.capacity]
    _take(session.connection(), now, gone, {})
    for row in gone:
        row.capacity, row.updated_at = {}, now
    return [row.name for row in gone]


def trim(session: orm.Session, before: int) -> int:
    """Forget changes from before an instant, but the newest of them.

    The newest one tells those who know it already that the database is the
    one that they have followed. Each change bears the time of who made it:
    where clocks differ, more or fewer are kept, and who misses one that he
    needs reads everything again.

    :returns: how many were forgotten
    """
    old = _CHANGES.c.created_at < before
    newest = session.scalar(sa.select(sa.func.max(_CHANGES.c.id)).where(old))
    deleted = session.execute(sa.delete(models.Change).where(
        old, _CHANGES.c.id < (newest or 0)))
    return ty.cast('sa.CursorResult[ty.Any]', deleted).rowcount
