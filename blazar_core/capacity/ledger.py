# SPDX-License-Identifier: Apache-2.0

"""Write bookings, by the rule of capacity.

The rule is in :mod:`blazar_core.capacity.rule`. Every decision is a list of
edits of bookings (:func:`amend`): one comes, one goes, or one becomes another.
A lease that is made, prolonged, moved, resized or ended, and a server that
changes its host, are all that. A decision is all or nothing, and it is
guarded: it reads its hosts, and with them their generations, no later than
their bookings, and then takes each host with ``UPDATE ... WHERE generation =
:seen``. Another transaction that decided about one of these hosts in between
has moved its generation, so that the update finds no row, and this transaction
is rolled back and run again: it is always the later one that loses, and
nothing of it is left.

Each decision leaves behind what it changed (:class:`models.Change`), for
the processes that keep the books in memory, and its usage records
(:mod:`blazar_core.capacity.usage_records`).

The functions take a session or a connection, so that a caller can decide and
write what belongs to the decision in one transaction. A decision costs one
SELECT, one UPDATE for each host, and one INSERT each of bookings, of changes
and of usage records; the rule is linear in the bookings that overlap it on its
hosts.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import rule
from blazar_core.capacity import units
from blazar_core.capacity import usage_records
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['Edit', 'OverCapacity', 'NewBooking', 'RESERVABLE', 'SEEN',
           'HostLoad', 'TAKES', 'add', 'amend', 'decide', 'follow', 'hold',
           'new_of']


class OverCapacity(api.LostRace):
    """The rule does not hold for what was to come on a host.

    The host was chosen in memory, and another transaction was faster.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class NewBooking:
    """A booking as it is written. Without a host it takes no capacity.

    :ivar resources: what it takes; :data:`model.WHOLE`: all that the host has
        when this is decided
    :ivar among: of which hosts its host has to be one; None: of any, as where
        the cloud has put its server
    :ivar claimed_at: when a scheduler let its server onto the host
    :ivar outage: why the host is away then, of no reservation; None: it is not
    :ivar host_failed_at: since when its host is known to have failed under it
    :ivar groups: the request groups of its resources; none: any provider of
        its host will do
    :ivar recorded_at: see :mod:`blazar_core.capacity.usage_records`; it is set
        when this is written
    """

    reservation_id: str | None
    host_id: int | None
    server_id: str | None
    window: model.Window
    resources: model.Resources
    running: bool = False
    dispatched_at: int | None = None
    claimed_at: int | None = None
    among: model.HostPool | None = None
    outage: str | None = None
    host_failed_at: int | None = None
    recorded_at: int | None = None
    groups: tuple[model.Group, ...] = ()
    failed_at: ty.ClassVar[None] = None  # What is new has not.


class Edit(ty.NamedTuple):
    """A booking before (None: it is new) and after (None: it is removed)."""

    row: models.Booking | None
    new: NewBooking | None


def new_of(row: models.Booking, **changed: ty.Any) -> NewBooking:
    """A booking as it is, but for what is named.

    One of a whole host is that of whichever host it gets.
    """
    same = NewBooking(row.reservation_id, row.host_id, row.server_id,
                      model.Window(row.start_date, row.end_date),
                      model.WHOLE if row.whole else row.resources,
                      row.running, row.dispatched_at, row.claimed_at,
                      outage=row.outage)
    new = dataclasses.replace(same, **changed)
    if new.host_id == row.host_id or not new.groups:
        # What it has, or what it was promised, stays of its kind.
        new = dataclasses.replace(new, resources=_of_same_kinds(
            new.resources, row.resources))
    return new if new.host_id != row.host_id else dataclasses.replace(
        new, host_failed_at=row.host_failed_at)


def _of_same_kinds(amounts: model.Resources, before: model.Resources,
                   ) -> model.Resources:
    """Return amounts, of the kinds of others where they are the same."""
    known = {model.base_of(rc) for rc in amounts.keys() - model.plain(amounts)}
    kinds = {rc: amount for rc, amount in before.items()
             if (base := model.base_of(rc)) != rc and base not in known and
             amounts.get(base) == before.get(base)}
    return {**amounts, **kinds} if kinds else amounts


def follow(booking: models.Booking, host_id: int, swap: bool = True,
           ) -> list[Edit]:
    """A booking goes where its server does.

    Whose place it takes there gets its own, so that both have one.

    :param swap: false: nobody gets its own, as that host is away
    """
    edits = [Edit(booking, new_of(booking, host_id=host_id))]
    if booking.host_id is not None and swap:
        edits += [
            Edit(other, new_of(other, host_id=booking.host_id))
            for other in booking.reservation.bookings
            if other.host_id == host_id and other.claimed_at is None and
            other.id != booking.id][:1]
    return edits


def amend(session: orm.Session, now: int, edits: ty.Sequence[Edit],
          force: bool = False, seen: ty.Mapping[int, int] | None = None,
          ) -> None:
    """Make all of these edits, or none.

    Where less is booked than before, nothing is asked; where more is, the
    rule must hold.

    :param force: for what is a fact already and no wish: the rule is not
        asked, but the guard is still moved
    :param seen: by id, generations of hosts that this goes by as well
    :raises OverCapacity: when the rule does not hold on a host
    :raises LostRace: when another process decided about a host meanwhile
    """
    edits = decide(session.connection(), now, edits, force, seen)
    edits = _recorded(session.connection(), now, edits,
                      usage_records.owners(session, edits))
    for row, new in edits:
        if row is not None and new is None:
            session.delete(row)
        elif row is not None and new is not None:
            for name, value in _values(new).items():
                setattr(row, name, value)
    _insert(session.connection(), edits)


def decide(connection: sa.Connection, now: int, edits: ty.Sequence[Edit],
           force: bool = False, seen: ty.Mapping[int, int] | None = None,
           ) -> ty.Sequence[Edit]:
    """The first half of :func:`amend`: win the right to make the edits.

    For a caller that has rows of its own to write before it goes on, and
    must not have written them when it loses.

    :returns: the edits, each with what it takes of its host
    """
    changes, seen = _changes(edits), seen or {}
    hosts, others = _read(connection, changes, edits, now,
                          {*changes, *seen}, with_bookings=not force)
    found = {host.id: host.generation for host in hosts}
    for host_id, generation in seen.items():
        if found.get(host_id) != generation:
            raise api.LostRace(host_id)
    _check_enrollment(edits, hosts)
    if any(edit.new is not None and model.HOST in edit.new.resources
           for edit in edits):
        edits = _spelled_out(edits, hosts)
        changes = _changes(edits)
    if any(host.units for host in hosts) or any(
            edit.new is not None and model.plain(edit.new.resources) !=
            edit.new.resources for edit in edits):
        edits = _of_kinds(edits, hosts, others, now)
        changes = _changes(edits)
    if not force:
        for host in hosts:
            _check(host, now, others[host.id], changes[host.id])
    host_generations.advance(connection, now, hosts, changes)
    return edits


def _check_enrollment(
        edits: ty.Iterable[Edit], hosts: ty.Iterable['HostLoad']) -> None:
    """A host may have been enrolled, or have left, since it was picked.

    :raises OverCapacity: when one is not for what was to come there
    """
    known = {host.id: host for host in hosts}
    for _row, new in edits:
        if new is not None and new.host_id is not None and (
                new.among is not None and
                not known[new.host_id].is_among(new.among)):
            raise OverCapacity(new.host_id)


def _spelled_out(edits: ty.Iterable[Edit], hosts: ty.Iterable['HostLoad'],
                 ) -> list[Edit]:
    """Edits that say how much a whole host is.

    :raises OverCapacity: when a host has nothing at all
    """
    capacity = {host.id: host.capacity for host in hosts}
    spelled = []
    for row, new in edits:
        if new is not None and new.host_id is not None and (
                model.HOST in new.resources):
            if not any(capacity[new.host_id].values()):
                raise OverCapacity(new.host_id)
            new = dataclasses.replace(
                new, resources=capacity[new.host_id])
        spelled.append(Edit(row, new))
    return spelled


def _of_kinds(edits: ty.Sequence[Edit], hosts: ty.Iterable['HostLoad'],
              others: ty.Mapping[int, ty.Sequence['_Delta']], now: int,
              ) -> list[Edit]:
    """Edits that say of which kind of provider their host gives the amounts:
    the first ones of which it has enough.

    Where it has not, the rule does not hold for what is returned.
    """
    found = [*edits]
    for host in hosts:
        kinds = units.kinds_of((host.units or {}).items())
        found = [_without_kinds(edit, host, kinds) for edit in found]
        open_: dict[int, list[dict[str, int]]] = {}
        for number, (_row, new) in enumerate(found):
            if kinds and new is not None and new.host_id == host.id and (
                    any(ways := units.ways(
                        new.resources, new.groups, kinds))):
                open_[number] = ways
        if not open_:
            continue
        stays = [*(one.taken(now) for one in others[host.id]), *rule.evictable(
            rule.by_lead_time(host.interruptible), now), *(
                (new.window, new.resources)
                for number, (_row, new) in enumerate(found)
                if number not in open_ and new is not None and
                new.host_id == host.id)]
        # All of the first way, if they fit so: then of the next.
        chosen = next(filter(None, (
            _chosen(host, stays, [
                (ty.cast(NewBooking, found[number].new).window,
                 [*some[first:], *some[:first]])
                for number, some in open_.items()])
            for first in range(max(map(len, open_.values()))))), None)
        for (number, ways), way in zip(
                open_.items(), chosen or [one[0] for one in open_.values()],
                strict=True):
            row, new = found[number]
            assert new is not None
            found[number] = Edit(row, dataclasses.replace(
                new, resources={**new.resources, **way}))
    return found


def _without_kinds(edit: Edit, host: 'HostLoad', kinds: units.Kinds) -> Edit:
    """Return an edit by which a host gives what it has itself."""
    row, new = edit
    if new is None or new.host_id != host.id:
        return edit
    amounts = {rc: amount for rc, amount in new.resources.items()
               if rc in host.capacity or model.base_of(rc) in kinds or
               model.base_of(rc) == rc}
    return edit if len(amounts) == len(new.resources) else Edit(
        row, dataclasses.replace(new, resources=amounts))


def _chosen(host: 'HostLoad', stays: ty.Iterable[rule.Taken],
            wanted: ty.Iterable[tuple[
                model.Window, ty.Sequence[model.Resources]]],
            ) -> list[model.Resources] | None:
    """Return one of several amounts for each window, so that a host has all
    of them; None: not in this order.
    """
    taken, chosen = [*stays], []
    for window, ways in wanted:
        way = next((one for one in ways if not rule.lacking(
            host.capacity, host.usage,
            rule.peaks(taken, [(window, one)]))), None)
        if way is None:
            return None
        taken.append((window, way))
        chosen.append(way)
    return chosen


def hold(connection: sa.Connection, host_ids: ty.Collection[int],
         many: int) -> bool:
    """Where hosts are more than so many, nobody else decides about them from
    now on until the transaction is over: some other would always be faster,
    until the retries are used up.

    The sooner the better: PostgreSQL refuses what has changed since the
    transaction read something first, and locks nothing of what it reads with
    bookings before it has read all of that.

    :returns: whether they are more
    """
    if len(host_ids) <= many:
        return False
    connection.execute(_LOCK, {'hosts': sorted(host_ids)}).all()
    return True


class _Delta(ty.NamedTuple):
    """So much more (sign 1) or less (sign -1) on a host over a window."""

    window: model.Window
    resources: model.Resources
    sign: int
    claimed_at: int | None

    def taken(self, now: int) -> rule.Taken:
        """Return the window over which it counts, and the amounts."""
        return rule.occupied(self.window.start, self.window.end,
                             self.claimed_at, now), self.resources


class HostLoad(ty.NamedTuple):
    """What a decision has to know of a host."""

    id: int
    generation: int
    capacity: model.Resources
    usage: model.Resources
    enrollment: str | None = None
    reservable: bool | None = None
    interruptible: ty.Mapping[str, models.Interruptible] | None = None
    units: ty.Mapping[str, ty.Mapping[str, ty.Sequence[int]]] | None = None

    def is_among(self, among: model.HostPool) -> bool:
        """Whether it is one of such hosts, and may be reserved if it serves
        leases only.
        """
        if self.enrollment is None:
            return among is not model.HostPool.ENROLLED
        return among is not model.HostPool.COMMON and bool(
            self.reservable) and (
                self.enrollment == states.Enrollment.ENROLLED)


def _changes(edits: ty.Iterable[Edit]) -> dict[int, list[_Delta]]:
    """What edits do to each host."""
    changes: dict[int, list[_Delta]] = collections.defaultdict(list)
    for row, new in edits:
        if row is not None and row.host_id is not None:
            # What overstays has had no promise for that: none to prolong.
            longer = new is not None and new.window.end > row.end_date
            changes[row.host_id].append(_Delta(
                model.Window(row.start_date, row.end_date), row.resources,
                -1, None if longer else row.claimed_at))
        if new is not None and new.host_id is not None:
            changes[new.host_id].append(
                _Delta(new.window, new.resources, 1, new.claimed_at))
    return changes


def _read(connection: sa.Connection, changes: ty.Mapping[int, list[_Delta]],
          edits: ty.Iterable[Edit], now: int, ids: ty.Collection[int],
          with_bookings: bool,
          ) -> tuple[list['HostLoad'], dict[int, list[_Delta]]]:
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
    if hold(connection, ids, host_generations.MANY):
        query = query.with_for_update(of=_HOSTS)
    own = {row.id for row, _new in edits if row is not None}
    hosts: dict[int, HostLoad] = {}
    others: dict[int, list[_Delta]] = collections.defaultdict(list)
    for row in connection.execute(
            query, {'hosts': sorted(ids), **times}):
        if row.id not in hosts:
            hosts[row.id] = HostLoad(*row[:len(SEEN)])
        if len(row) > len(SEEN) and row.booking_id not in (None, *own):
            others[row.id].append(_Delta(
                model.Window(row.start_date, row.end_date), row.resources, 1,
                row.claimed_at))
    return list(hosts.values()), others


_HOSTS = models.Host.__table__
_BOOKINGS = models.Booking.__table__

#: Whether whole hosts may be reserved of it, as far as its row says: not
#: while it is unknown when its present holder will be gone.
RESERVABLE = sa.case((_HOSTS.c.overdue_at.is_not(None), sa.false()),
                     else_=_HOSTS.c.reservable).label('reservable')
SEEN = (_HOSTS.c.id, _HOSTS.c.generation, _HOSTS.c.capacity, _HOSTS.c.usage,
        _HOSTS.c.enrollment, RESERVABLE, _HOSTS.c.interruptible,
        _HOSTS.c.units)
#: Whether a booking is in anybody's way: one within a reservation that has all
#: of the host is not.
TAKES = sa.cast(_BOOKINGS.c.resources, sa.Text) != '{}'
_LOCK = sa.select(_HOSTS.c.id).where(_HOSTS.c.id.in_(
    sa.bindparam('hosts', expanding=True))).order_by(
        _HOSTS.c.id).with_for_update()
_ALONE = sa.select(*SEEN).where(_HOSTS.c.id.in_(
    sa.bindparam('hosts', expanding=True))).order_by(_HOSTS.c.id)
_WITH_BOOKINGS = _ALONE.add_columns(
    _BOOKINGS.c.id.label('booking_id'), _BOOKINGS.c.start_date,
    _BOOKINGS.c.end_date, _BOOKINGS.c.resources, _BOOKINGS.c.claimed_at,
).outerjoin(_BOOKINGS, sa.and_(
    _BOOKINGS.c.host_id == _HOSTS.c.id,
    _BOOKINGS.c.start_date < sa.bindparam('until'),
    sa.or_(_BOOKINGS.c.end_date > sa.bindparam('since'),
           _BOOKINGS.c.claimed_at.is_not(None))))


def _check(host: HostLoad, now: int, others: ty.Iterable[_Delta],
           changes: ty.Sequence[_Delta]) -> None:
    """Check the rule at every instant at which a host gets more than before.

    :raises OverCapacity: when it does not hold
    """
    if rule.lacking(host.capacity, host.usage, rule.peaks(
            [*(one.taken(now) for one in others),
             *rule.evictable(rule.by_lead_time(host.interruptible), now)],
            (one.taken(now) for one in changes if one.sign > 0),
            (one.taken(now) for one in changes if one.sign < 0))):
        raise OverCapacity(host.id)


def add(connection: sa.Connection, now: int, edits: ty.Iterable[Edit],
        owners: ty.Mapping[str, usage_records.Owner]) -> None:
    """Write the bookings that come, when that has been decided.

    :param owners: by reservation
    """
    _insert(connection, _recorded(connection, now, edits, owners))


def _recorded(connection: sa.Connection, now: int, edits: ty.Iterable[Edit],
              owners: ty.Mapping[str, usage_records.Owner]) -> list[Edit]:
    """Write the usage records of edits; return these with what is noted of
    that in the bookings.
    """
    records, noted = usage_records.Records(now, owners), []
    for row, new in edits:
        since = records.change(row, new)
        noted.append(Edit(row, new if new is None else dataclasses.replace(
            new, recorded_at=since)))
    records.write(connection)
    return noted


def _insert(connection: sa.Connection, edits: ty.Iterable[Edit]) -> None:
    coming = [_values(new) for row, new in edits
              if row is None and new is not None]
    if coming:
        connection.execute(_BOOKINGS.insert(), coming)


def _values(booking: NewBooking) -> dict[str, ty.Any]:
    """By column."""
    return {'reservation_id': booking.reservation_id,
            'host_id': booking.host_id, 'server_id': booking.server_id,
            'start_date': booking.window.start, 'end_date': booking.window.end,
            'resources': dict(booking.resources), 'running': booking.running,
            'dispatched_at': booking.dispatched_at,
            'claimed_at': booking.claimed_at, 'outage': booking.outage,
            'host_failed_at': booking.host_failed_at,
            'recorded_at': booking.recorded_at}
