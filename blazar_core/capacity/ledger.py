# SPDX-License-Identifier: Apache-2.0

"""Write bookings, by the rule of capacity, so that nothing is booked twice.

The rule is in :mod:`blazar_core.capacity.rule`. Every decision is a list of
edits of bookings (:func:`amend`): a booking is added, removed, or replaced.
Creating, extending, moving, resizing and ending a lease are lists of edits,
and so is a server's change of host. A decision is all or nothing, and it is
guarded: it reads its hosts with their generations, no later than their
bookings, and then takes each host with ``UPDATE ... WHERE generation =
:seen``. If another transaction has decided about one of these hosts in
between, the generation has changed, the update finds no row, and this
transaction is rolled back and run again. So the later one always loses, and
nothing of it is left.

Each decision stores its changes (:class:`models.Change`), for the processes
that have the reservation database in memory, and its usage records
(:mod:`blazar_core.capacity.usage_records`).

The functions take a session or a connection, so that a caller can decide and
write what belongs to the decision in one transaction. A decision costs one
SELECT, one UPDATE for each host, and one INSERT each of bookings, of changes
and of usage records, one SELECT if it changes what is reserved, and one DELETE
if it replaces usage records; the rule is linear in the bookings that overlap
it on its hosts.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import provider_limits
from blazar_core.capacity import rule
from blazar_core.capacity import usage_records
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models


class OverCapacity(api.LostRace):
    """The edits of a decision violate the rule on a host.

    The host was chosen in memory, and another transaction was faster.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class NewBooking:
    """A booking to write. Without a host it takes no capacity.

    :ivar resources: the amounts it takes; :data:`model.WHOLE`: the whole
        capacity of the host at the time of the decision
    :ivar among: the pool that its host must be in; None: any, for example
        because the cloud has placed the server
    :ivar claimed_at: when a scheduler admitted its server to the host
    :ivar outage: the kind of outage that this is, without a reservation;
        None: it is a booking of a reservation
    :ivar host_failed_at: since when its host is known to have failed
    :ivar groups: the request groups of its resources; empty: any provider of
        its host will do
    :ivar recorded_at: see :mod:`blazar_core.capacity.usage_records`; it is set
        when the booking is written
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
    failed_at: ty.ClassVar[None] = None  # A new booking has not failed.


class Edit(ty.NamedTuple):
    """A booking before (None: it is new) and after (None: it is removed)."""

    row: models.Booking | None
    new: NewBooking | None


def new_of(row: models.Booking, **changed: ty.Any) -> NewBooking:
    """Return a booking like an existing one, with some values changed.

    The booking of a whole host is one of whichever host it gets.
    """
    same = NewBooking(row.reservation_id, row.host_id, row.server_id,
                      model.Window(row.start_date, row.end_date),
                      model.WHOLE if row.whole else row.resources,
                      row.running, row.dispatched_at, row.claimed_at,
                      outage=row.outage)
    new = dataclasses.replace(same, **changed)
    if new.host_id == row.host_id or not new.groups:
        # The kinds of providers that it has, or has reserved, stay the same.
        new = dataclasses.replace(new, resources=of_same_kinds(
            new.resources, row.resources))
    return new if new.host_id != row.host_id else dataclasses.replace(
        new, host_failed_at=row.host_failed_at)


def of_same_kinds(amounts: model.Resources, before: model.Resources,
                  ) -> model.Resources:
    """Return amounts, with the kinds of providers of equal earlier amounts."""
    known = {model.base_of(rc) for rc in amounts.keys() - model.plain(amounts)}
    kinds = {rc: amount for rc, amount in before.items()
             if (base := model.base_of(rc)) != rc and base not in known and
             amounts.get(base) == before.get(base)}
    return {**amounts, **kinds} if kinds else amounts


def follow(booking: models.Booking, host_id: int, swap: bool = True,
           ) -> list[Edit]:
    """Return the edits that move a booking to the host of its server.

    If the server takes a slot there, that slot moves to the old host. Slots of
    equal size exchange the kinds of their providers, too.

    :param swap: false: no slot moves, as the old host is unavailable
    """
    other = next((
        other for other in booking.reservation.bookings
        if other.host_id == host_id and other.claimed_at is None and
        other.id != booking.id), None)
    if other is None or booking.host_id is None or not swap:
        return [Edit(booking, new_of(booking, host_id=host_id))]
    alike = model.plain(booking.resources) == model.plain(other.resources)
    return [Edit(one, new_of(
        one, host_id=there.host_id,
        resources=(there if alike else one).resources))
        for one, there in ((booking, other), (other, booking))]


def amend(session: orm.Session, now: int, edits: ty.Sequence[Edit],
          force: bool = False, seen: ty.Mapping[int, int] | None = None,
          ) -> None:
    """Make all of these edits, or none.

    Edits that reduce what is booked are not checked; where more is booked,
    the rule must hold.

    :param force: for edits that record facts: the rule is not checked, but
        the generations are still increased
    :param seen: by id, generations of further hosts that the decision relies
        on
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
    """Check edits and advance the generations of their hosts, as the first
    half of :func:`amend`.

    For a caller that writes rows of its own between the halves, and must not
    write them if another process was first.

    :returns: the edits, each with the amounts it takes of its host
    """
    changes, seen = _changes(edits), seen or {}
    hosts, others = _read(connection, changes, edits, {*changes, *seen},
                          with_bookings=not force)
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
    """Check that hosts were not enrolled or removed since they were picked.

    :raises OverCapacity: when a host does not serve an edit
    """
    known = {host.id: host for host in hosts}
    for _row, new in edits:
        if new is not None and new.host_id is not None and (
                new.among is not None and
                not known[new.host_id].is_among(new.among)):
            raise OverCapacity(new.host_id)


def _spelled_out(edits: ty.Iterable[Edit], hosts: ty.Iterable['HostLoad'],
                 ) -> list[Edit]:
    """Return edits with the amounts of the whole hosts that they book.

    :raises OverCapacity: when a host has no capacity at all
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
    """Return edits with the kinds of providers that give their amounts: the
    first kinds of which the host has enough.

    If it has not enough, the returned edits violate the rule.
    """
    found = [*edits]
    for host in hosts:
        kinds = provider_limits.kinds_of((host.units or {}).items())
        found = [_without_kinds(edit, host, kinds) for edit in found]
        open_: dict[int, list[dict[str, int]]] = {}
        for number, (_row, new) in enumerate(found):
            if kinds and new is not None and new.host_id == host.id and (
                    any(ways := provider_limits.ways(
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
        # Prefer the first way for all; if they do not fit, the next.
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


def _without_kinds(edit: Edit, host: 'HostLoad',
                   kinds: provider_limits.Kinds) -> Edit:
    """Return an edit without kinds, for classes of which its host has none."""
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
    """Return one of several amounts for each window, so that all of them fit
    on a host; None: they do not fit in this order.
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


class _Delta(ty.NamedTuple):
    """An amount that a host has more (sign 1) or less (-1) over a window."""

    window: model.Window
    resources: model.Resources
    sign: int
    claimed_at: int | None

    def taken(self, now: int) -> rule.Taken:
        """Return the window over which it counts, and the amounts."""
        return rule.occupied(self.window.start, self.window.end,
                             self.claimed_at, now), self.resources


class HostLoad(ty.NamedTuple):
    """The values of a host that a decision needs."""

    id: int
    generation: int
    capacity: model.Resources
    usage: model.Resources
    enrollment: str | None = None
    reservable: bool | None = None
    interruptible: ty.Mapping[str, models.Interruptible] | None = None
    units: ty.Mapping[str, ty.Mapping[str, ty.Sequence[int]]] | None = None

    def is_among(self, among: model.HostPool) -> bool:
        """Return whether the host is in a pool, and may be reserved if it
        serves leases only.
        """
        if self.enrollment is None:
            return among is not model.HostPool.ENROLLED
        return among is not model.HostPool.COMMON and bool(
            self.reservable) and (
                self.enrollment == states.Enrollment.ENROLLED)


def _changes(edits: ty.Iterable[Edit]) -> dict[int, list[_Delta]]:
    """Return the changes that edits make to each host."""
    changes: dict[int, list[_Delta]] = collections.defaultdict(list)
    for row, new in edits:
        if row is not None and row.host_id is not None:
            # Time past its end was never reserved, so nothing is extended.
            longer = new is not None and new.window.end > row.end_date
            changes[row.host_id].append(_Delta(
                model.Window(row.start_date, row.end_date), row.resources,
                -1, None if longer else row.claimed_at))
        if new is not None and new.host_id is not None:
            changes[new.host_id].append(
                _Delta(new.window, new.resources, 1, new.claimed_at))
    return changes


def _read(connection: sa.Connection, changes: ty.Mapping[int, list[_Delta]],
          edits: ty.Iterable[Edit], ids: ty.Collection[int],
          with_bookings: bool,
          ) -> tuple[list['HostLoad'], dict[int, list[_Delta]]]:
    """Return the hosts of a decision, in the order of their ids, and what
    others have booked there. One statement: no generation is read after a
    booking.
    """
    wanted = [change.window for of_host in changes.values()
              for change in of_host if change.sign > 0]
    if wanted and with_bookings:
        query, times = _WITH_BOOKINGS, {
            'since': min(one.start for one in wanted),
            'until': max(one.end for one in wanted)}
    else:
        query, times = _ALONE, {}
    if len(ids) > host_generations.MANY:
        # Otherwise others would always be faster, until the retries are used
        # up; and a locking read with bookings locks nothing before it has read
        # all rows.
        with host_generations.losing(min(ids), ids):
            connection.execute(api.LOCK_HOSTS, {'hosts': sorted(ids)}).all()
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

#: Whether the row of a host permits reservations of the whole host: not while
#: it is unknown when its overdue holder will leave.
RESERVABLE = sa.case((_HOSTS.c.overdue_at.is_not(None), sa.false()),
                     else_=_HOSTS.c.reservable).label('reservable')
SEEN = (_HOSTS.c.id, _HOSTS.c.generation, _HOSTS.c.capacity, _HOSTS.c.usage,
        _HOSTS.c.enrollment, RESERVABLE, _HOSTS.c.interruptible,
        _HOSTS.c.units)
#: Condition: the booking takes capacity. One within a reservation that has all
#: of the host does not.
TAKES = sa.cast(_BOOKINGS.c.resources, sa.Text) != '{}'


def is_held(since: int | sa.BindParameter[ty.Any]) -> sa.ColumnElement[bool]:
    """Return the condition: the booking ends after an instant, or is in use,
    whatever its dates.
    """
    return sa.or_(_BOOKINGS.c.end_date > since,
                  _BOOKINGS.c.claimed_at.is_not(None))


_ALONE = sa.select(*SEEN).where(_HOSTS.c.id.in_(
    sa.bindparam('hosts', expanding=True))).order_by(_HOSTS.c.id)
_WITH_BOOKINGS = _ALONE.add_columns(
    _BOOKINGS.c.id.label('booking_id'), _BOOKINGS.c.start_date,
    _BOOKINGS.c.end_date, _BOOKINGS.c.resources, _BOOKINGS.c.claimed_at,
).outerjoin(_BOOKINGS, sa.and_(
    _BOOKINGS.c.host_id == _HOSTS.c.id,
    _BOOKINGS.c.start_date < sa.bindparam('until'),
    is_held(sa.bindparam('since'))))


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


def awaited(connection: sa.Connection, host_ids: ty.Collection[int],
            late: ty.Container[int], now: int) -> set[int]:
    """Return the bookings past their end, by id, that take what the bookings
    of now need on a host: the oldest ends, and no more than that takes.

    :param late: hosts of which all are returned that take what is needed
    """
    if not host_ids:
        return set()
    hosts: dict[int, tuple[HostLoad, list[sa.Row[ty.Any]]]] = {}
    for row in connection.execute(_WITH_BOOKINGS, {
            'hosts': sorted(host_ids), 'since': now, 'until': now + 1}):
        _load, rows = hosts.setdefault(
            row.id, (HostLoad(*row[:len(SEEN)]), []))
        if row.booking_id is not None:
            rows.append(row)
    found = set()
    for load, rows in hosts.values():
        taken = rule.peaks((), ((model.Window(now, now + 1), one.resources)
                                for one in rows))
        for one in sorted(rows, key=lambda one: (
                one.end_date, one.booking_id)):
            if one.end_date <= now and not one.resources.keys().isdisjoint(
                    rule.lacking(load.capacity, load.usage, taken)):
                found.add(one.booking_id)
                if load.id not in late:
                    taken = {rc: amount - one.resources.get(rc, 0)
                             for rc, amount in taken.items()}
    return found


def add(connection: sa.Connection, now: int, edits: ty.Iterable[Edit],
        owners: ty.Mapping[str, usage_records.Owner]) -> None:
    """Write the new bookings of edits that have been decided.

    :param owners: by reservation
    """
    _insert(connection, _recorded(connection, now, edits, owners))


def _recorded(connection: sa.Connection, now: int, edits: ty.Iterable[Edit],
              owners: ty.Mapping[str, usage_records.Owner]) -> list[Edit]:
    """Write the usage records of edits; return the edits with their
    ``recorded_at``.
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
    """Return the values of a booking by column."""
    return {'reservation_id': booking.reservation_id,
            'host_id': booking.host_id, 'server_id': booking.server_id,
            'start_date': booking.window.start, 'end_date': booking.window.end,
            'resources': dict(booking.resources), 'running': booking.running,
            'dispatched_at': booking.dispatched_at,
            'claimed_at': booking.claimed_at, 'outage': booking.outage,
            'host_failed_at': booking.host_failed_at,
            'recorded_at': booking.recorded_at}
