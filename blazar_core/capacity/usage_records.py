# SPDX-License-Identifier: Apache-2.0

"""Usage records: how much each reservation has reserved and used, and when.

They are written by :mod:`blazar_core.capacity.ledger` in the transaction that
writes the bookings, so that both always agree: if a process dies, either both
are written or neither. A row is a segment: amounts by class, and the hosts
that have them, over a half-open window ``[start, end)`` in the time of the
lease, which may lie in the future. The amount at an instant is the sum of the
rows over that instant, each by its sign; an amount over an interval is the sum
of the parts of the rows within it. All numbers are integers, so that adjacent
intervals add up exactly.

Rows that have begun are never changed. A change at *t* of what is recorded
over ``[start, end)`` adds

* a row with sign -1 that cancels the rest, ``[max(t, start), end)``, and
* a row with sign 1 with the new amounts from then on,

less the time in which both are the same. For example, a lease of 2 VCPU from
10:00 to 14:00 that is extended to 15:00, and deleted at 11:30::

    planned   +  10:00 - 14:00  2 VCPU
    reserved  +  14:00 - 15:00  2 VCPU
    reserved  -  11:30 - 15:00  2 VCPU

What a reservation reserves can be changed at any rate, so a change also
replaces the earlier rows that begin at *t* or later by as few as have the same
sum at each instant. Neither sums nor costs show that, as two rows stay as they
are: the first one of a reservation, for its flat fee, and the planned one.

There are three kinds:

``planned``
    Reserved by the admission of the reservation. It never changes: a lease
    that is deleted before its start has planned amounts and reserved none.
``reserved``
    Changes of that: capacity that is reserved on hosts, with the grace period
    of the lease and the cleaning time of the hosts. Both kinds together are
    the reserved amounts. A booking without a host reserves nothing, nor does
    a lease that waits for capacity.
``used``
    What servers of the reservation have: from when one is seen to run until
    it is deleted or leaves its lease, even past the end of the lease. A whole
    host is used while servers are on it. The row has no end at first; a row
    with sign -1 ends it.

A decision adds one statement for all of its rows, one to read those that it
may replace, and one to delete them: bookings of a reservation with the same
window are one row. ``recorded_at`` of a booking is the time from which on its
latest row counts; a later row never starts before that, however the clocks of
two processes differ. :mod:`blazar_core.leases.accounting` computes the sums.
"""

import collections
import enum
import itertools
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

_RECORDS = models.UsageRecord.__table__
_COLUMNS = _RECORDS.c
#: Maximum number of rows that one decision replaces.
_MOST = 1000


class Kind(enum.StrEnum):
    PLANNED = 'planned'
    RESERVED = 'reserved'
    USED = 'used'


def is_earliest() -> sa.ColumnElement[bool]:
    """Return the condition that no window that a reservation had begins
    before that of a usage record.
    """
    other = sa.alias(_RECORDS).c
    return ~sa.exists().where(
        other.lease_id == _COLUMNS.lease_id,
        other.reservation_id == _COLUMNS.reservation_id,
        other.kind != Kind.USED, other.sign == 1,
        sa.tuple_(other.start_date, other.id) < sa.tuple_(
            _COLUMNS.start_date, _COLUMNS.id))


#: The rows of reservations that have not begun and may be replaced.
_TO_COME = sa.select(_RECORDS).where(
    _COLUMNS.lease_id.in_(sa.bindparam('leases', expanding=True)),
    _COLUMNS.reservation_id.in_(sa.bindparam('reservations', expanding=True)),
    _COLUMNS.kind == Kind.RESERVED, _COLUMNS.start_date >= sa.bindparam('now'),
    sa.or_(_COLUMNS.sign < 0, ~is_earliest()),
).order_by(_COLUMNS.id).limit(_MOST)
_DELETE = sa.delete(_RECORDS).where(
    _COLUMNS.id.in_(sa.bindparam('ids', expanding=True)))

#: The latest end of what a lease has reserved. Before it starts it may have
#: been moved, so that its first window only counts by its length.
_LATEST_END = sa.select(sa.func.max(_COLUMNS.end_date - sa.case(
    (_COLUMNS.kind == Kind.PLANNED,
     _COLUMNS.start_date - sa.bindparam('start')), else_=0))).where(
         _COLUMNS.lease_id == sa.bindparam('lease'), _COLUMNS.sign == 1,
         _COLUMNS.kind != Kind.USED)


class Owner(ty.NamedTuple):
    """The owner of a reservation, for its records.

    :ivar admitted: whether its lease has its capacity; false: it waits for it
    :ivar first: whether nothing was recorded of it before
    """

    lease_id: str
    project_id: str
    resource_type: str
    admitted: bool = True
    first: bool = True


class _Segment(ty.NamedTuple):
    """The amounts that one booking reserves or uses over a window."""

    host_id: int
    start: int
    end: int
    resources: model.Resources


_Segments: ty.TypeAlias = dict[Kind, _Segment]
#: The reservation, its owner, the kind, the sign, the start and the end.
_Key: ty.TypeAlias = tuple[str, Owner, Kind, int, int, int]
#: Amounts by class, and the hosts that have them.
_Amounts: ty.TypeAlias = tuple[ty.Mapping[str, int], list[int]]


class Records:
    """The records of one decision.

    :param owners: by reservation; other reservations are not recorded
    """

    def __init__(self, now: int, owners: ty.Mapping[str, Owner]) -> None:
        self._now = now
        self._owners = owners
        self._rows: dict[_Key, tuple[
            collections.Counter[str], list[int]]] = {}
        #: By reservation, the owners of those that change what they reserve.
        self._changed: dict[str, Owner] = {}

    def change(self, row: models.Booking | None, new: ty.Any) -> int | None:
        """Record a change of a booking.

        :param row: before; None: it is new
        :param new: a :class:`.ledger.NewBooking`; None: it is removed
        :returns: its new ``recorded_at``
        """
        of: ty.Any = row if new is None else new
        owner = self._owners.get(of.reservation_id)
        was = None if row is None else row.recorded_at
        if owner is None:
            return was
        before = {} if row is None or was is None else _segments(
            row, row.start_date, row.end_date)
        after = {} if new is None or not owner.admitted else _segments(
            new, new.window.start, new.window.end)
        if before == after:
            return was
        return self.replace(of.reservation_id, owner, was, before, after)

    def replace(self, reservation_id: str, owner: Owner, was: int | None,
                before: _Segments, after: _Segments) -> int:
        """Record that a booking has other segments from now on.

        :param was: its ``recorded_at``
        :returns: its new ``recorded_at``
        """
        since = max(self._now, was or 0)
        for kind in (Kind.RESERVED, Kind.USED):
            old, new = before.get(kind), after.get(kind)
            if old == new:
                continue
            if old is not None:
                self._add(reservation_id, owner, kind, -1, since, old)
            if new is not None:
                self._add(reservation_id, owner, Kind.PLANNED if (
                    kind is Kind.RESERVED and was is None and owner.first
                ) else kind, 1, since, new)
        return since

    def _add(self, reservation_id: str, owner: Owner, kind: Kind, sign: int,
             since: int, segment: _Segment) -> None:
        start = max(since, segment.start)
        if start >= segment.end:
            return
        if kind is Kind.RESERVED and sign > 0:
            self._changed[reservation_id] = owner
        amounts, hosts = self._rows.setdefault(
            (reservation_id, owner, kind, sign, start, segment.end),
            (collections.Counter(), []))
        amounts.update(segment.resources)
        hosts.append(segment.host_id)

    def write(self, connection: sa.Connection) -> None:
        """Write the records.

        :raises Outdated: when another process has replaced the same rows
        """
        rows = [{
            'reservation_id': reservation_id, 'lease_id': owner.lease_id,
            'project_id': owner.project_id,
            'resource_type': owner.resource_type, 'kind': kind, 'sign': sign,
            'start_date': start, 'end_date': end,
            'resources': amounts, 'hosts': hosts, 'recorded_at': self._now,
        } for (reservation_id, owner, kind, sign, start, end), (
            amounts, hosts) in _joined(
                [*self._rows.items(), *self._replaced(connection)])]
        if rows:
            connection.execute(_RECORDS.insert(), rows)

    def _replaced(self, connection: sa.Connection,
                  ) -> list[tuple[_Key, _Amounts]]:
        """Delete the rows that have not begun of the reservations that change
        what they reserve; return them.
        """
        if not self._changed:
            return []
        rows = [row for row in connection.execute(_TO_COME, {
            'leases': [*{one.lease_id for one in self._changed.values()}],
            'reservations': [*self._changed], 'now': self._now})
            # A project that had a reservation keeps its rows of it.
            if row.project_id == self._changed[row.reservation_id].project_id]
        if rows and connection.execute(_DELETE, {
                'ids': [row.id for row in rows]}).rowcount != len(rows):
            raise api.Outdated('other usage records')
        return [((
            row.reservation_id, self._changed[row.reservation_id],
            Kind.RESERVED, row.sign, row.start_date, row.end_date,
        ), (row.resources, row.hosts)) for row in rows]


def _joined(rows: ty.Iterable[tuple[_Key, _Amounts]],
            ) -> ty.Iterator[tuple[_Key, _Amounts]]:
    """Yield few rows with the same sum at each instant."""
    changes: dict[tuple[ty.Any, ...], collections.Counter[int]] = (
        collections.defaultdict(collections.Counter))
    for (*of, sign, start, end), amounts in rows:
        for part in _parts(*amounts):
            change = changes[(*of, *part)]
            change[start] += sign
            change[end] -= sign
    found: dict[tuple[ty.Any, ...], list[tuple[int, ...]]] = (
        collections.defaultdict(list))
    for (*of, amounts, hosts), change in changes.items():
        for window in _windows(change):
            found[(*of, *window, amounts, len(hosts))].append(hosts)
    for (*key, amounts, _number), some in found.items():
        yield ty.cast(_Key, tuple(key)), (
            {rc: amount * len(some) for rc, amount in amounts},
            sorted(itertools.chain(*some)))


def _parts(amounts: ty.Mapping[str, int], hosts: ty.Sequence[int],
           ) -> ty.Iterator[tuple[tuple[tuple[str, int], ...],
                                  tuple[int, ...]]]:
    """Yield the amounts of each host, if all can have the same, or else those
    of all hosts; sorted, so that equal amounts are equal texts.
    """
    number = len(hosts)
    if number < 2 or any(amount % number for amount in amounts.values()):
        yield tuple(sorted(amounts.items())), tuple(sorted(hosts))
        return
    each = tuple((rc, amounts[rc] // number) for rc in sorted(amounts))
    for host_id in hosts:
        yield each, (host_id,)


def _windows(changes: ty.Mapping[int, int],
             ) -> ty.Iterator[tuple[int, int, int]]:
    """Yield few signs and windows, as (sign, start, end), of which the sum
    changes by so much at these instants.
    """
    begun: list[tuple[int, int]] = []
    for time, change in sorted(changes.items()):
        sign = 1 if change > 0 else -1
        for _number in range(abs(change)):
            if begun and begun[-1][0] != sign:
                yield (*begun.pop(), time)
            else:
                begun.append((sign, time))


def _segments(booking: ty.Any, start: int, end: int) -> _Segments:
    """Return what a booking reserves and uses."""
    # A booking within a reservation of the whole host takes nothing.
    if booking.host_id is None or not booking.resources:
        return {}
    amounts = model.plain(booking.resources)
    found = {Kind.RESERVED: _Segment(booking.host_id, start, end, amounts)}
    if booking.running:
        found[Kind.USED] = _Segment(
            booking.host_id, 0, model.FOREVER, amounts)
    return found


def _owner(one: models.Reservation, first: bool = False) -> Owner:
    return Owner(one.lease_id, one.lease.project_id, one.resource_type,
                 one.lease.status not in states.SEEKING, first)


def owners(session: orm.Session, edits: ty.Iterable[ty.Any],
           ) -> dict[str, Owner]:
    """Return the owners of the reservations of some bookings.

    :param edits: each a :class:`.ledger.Edit`
    """
    found: dict[str, models.Reservation] = {}
    coming = set()
    for row, new in edits:
        if row is not None and row.reservation is not None:
            found[row.reservation.id] = row.reservation
        elif new is not None and new.reservation_id is not None and (
                new.reservation_id not in found):
            found[new.reservation_id] = session.get_one(
                models.Reservation, new.reservation_id)
        if new is not None and (row is None or row.recorded_at is None):
            coming.add(new.reservation_id)
    return {one.id: _owner(one, one.id in coming and all(
        booking.recorded_at is None for booking in one.bookings))
        for one in found.values()}


def begin_use(session: orm.Session, now: int, booking: models.Booking,
              ) -> None:
    """Record that a booking of a lease is used from now on."""
    used = _segments(
        booking, booking.start_date, booking.end_date).get(Kind.USED)
    if booking.recorded_at is None or used is None:
        return
    records = Records(now, {})
    booking.recorded_at = records.replace(
        booking.reservation.id, _owner(booking.reservation),
        booking.recorded_at, {}, {Kind.USED: used})
    records.write(session.connection())


def latest_end(connection: sa.Connection, lease_id: str, start: int,
               ) -> int | None:
    """Return the latest end up to which a lease has reserved capacity, with
    its grace period and cleaning time, however often it was shortened since;
    None: it has reserved none. An end that was extended and shortened again
    before the end that it had first does not count.

    :param start: its present start
    """
    end: int | None = connection.scalar(
        _LATEST_END, {'lease': lease_id, 'start': start})
    return end


def transfer(session: orm.Session, now: int, lease: models.Lease,
             project_id: str) -> None:
    """Record that a lease belongs to another project from now on.

    :param project_id: the project that it belonged to before
    """
    records = Records(now, {})
    for one in lease.reservations:
        owner = _owner(one)
        for booking in one.bookings:
            has = _segments(booking, booking.start_date, booking.end_date)
            if booking.recorded_at is not None and has:
                for of, before, after in (
                        (owner._replace(project_id=project_id), has, {}),
                        (owner, {}, has)):
                    booking.recorded_at = records.replace(
                        one.id, of, booking.recorded_at, before, after)
    records.write(session.connection())
