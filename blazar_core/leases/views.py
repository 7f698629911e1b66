# SPDX-License-Identifier: Apache-2.0

"""Find leases, and show them as dicts."""

import collections
import dataclasses
import json
import math
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['DELETING', 'EventRow', 'Query', 'ReservationRow', 'describe',
           'describe_rows', 'get', 'is_near_end', 'listed',
           'owner_of_deleted', 'page', 'status', 'tagged']

#: What users see of a lease whose deletion is under way.
DELETING = 'DELETING'


#: Of how many leases the parts are asked for by one statement.
_AT_ONCE = 200
#: A page ends after the statement with which it has so many parts:
#: reservations, events and servers. So many has a list without pages: ten for
#: each of 10,000 leases, which take some seconds and 200 MB.
_PARTS, _PARTS_OF_ALL = 20_000, 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """Which leases, in which order; None: any.

    :ivar status: None leaves out those that are over, unless ``ended``
    :ivar tags: those that have all of these
    :ivar ended_after: but for those with an end after that
    :ivar start: those that end after this, and begin before ``end``
    :ivar occurrences: each of a lease that recurs; else the one that goes
        on, the next or the last one stands for all
    :ivar sort: columns, and whether they descend
    :ivar marker: only those that come after this one
    :ivar paged: whether the rest can be asked for
    """

    project_id: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    status: str | None = None
    resource_type: str | None = None
    start: int | None = None
    end: int | None = None
    sort: tuple[tuple[str, bool], ...] = (('start_date', False),)
    marker: str | None = None
    ended: bool = False
    ended_after: int | None = None
    limit: int = 1000
    paged: bool = True
    occurrences: bool = False


class EventRow(ty.NamedTuple):
    """What is shown of an event."""

    id: str
    lease_id: str
    event_type: str
    status: str
    time: int
    created_at: int
    updated_at: int
    action: str | None


class ReservationRow(ty.NamedTuple):
    """What is shown of a reservation."""

    id: str
    lease_id: str
    resource_type: str
    status: str
    amount: int
    created_at: int
    updated_at: int
    resources: model.Resources
    params: dict[str, ty.Any] | None
    spec: dict[str, ty.Any] | None
    moved_at: int | None


class _BookingRow(ty.NamedTuple):
    """What is shown of a booking."""

    id: str
    reservation_id: str
    server_id: str | None
    status: str
    host_id: int | None
    host_failed_at: int | None
    failed_at: int | None


#: So many fields are in the same column of the statement of :func:`_parts`,
#: whatever the row; the others have one each.
_SAME = 7
_OWN: dict[str, sa.ColumnElement[ty.Any]] = {
    **dict.fromkeys(('resources', 'params', 'spec', 'moved_at'), sa.null()),
    'action': sa.cast(sa.null(), sa.String(16))}


#: Not over. By their names, so that an index finds them.
_GOES_ON = models.Lease.status.in_([
    state for state in states.LEASE.steps
    if state not in states.LEASE.final()])


def get(database: api.Database, lease_id: str) -> dict[str, ty.Any]:
    """One lease.

    :raises NotFound: when there is none of that id, or it was deleted
    """
    with database.reader() as session:
        lease = session.get(models.Lease, lease_id)
        if lease is None or (lease.deleted_at is not None and
                             lease.status == states.Lease.TERMINATED):
            raise errors.NotFound(f'Lease {lease_id} could not be found.')
        return describe(lease)


def owner_of_deleted(database: api.Database, lease_id: str) -> str | None:
    """The project of a lease that was deleted and is gone; None otherwise."""
    with database.reader() as session:
        return session.scalar(sa.select(models.Lease.project_id).where(
            models.Lease.id == lease_id,
            models.Lease.deleted_at.is_not(None)))


def page(database: api.Database, query: Query,
         ) -> tuple[list[dict[str, ty.Any]], bool]:
    """The leases that a query is for, and whether there are more.

    Two statements, or some more for several hundred leases. A page of very
    large leases is shorter than the limit. A list without pages that is too
    long with those that are over comes without them.

    :raises InvalidLeaseParams: when the marker is no lease that may be seen
    """
    with database.reader() as session:
        found = session.execute(_statement(query)).all()
        if not found and query.marker is not None and session.execute(
                _marked(sa.select(models.Lease.id), query)).first() is None:
            raise errors.InvalidLeaseParams(
                f'The marker {query.marker} is not the ID of one of these '
                'leases. Write the ID of the last lease of the previous page.')
        may_shrink = not query.paged and query.ended_after is not None
        described = [] if may_shrink and len(found) > query.limit else (
            _described(session, found[:query.limit],
                       _PARTS if query.paged else _PARTS_OF_ALL))
    more = len(described) < len(found)
    if more and may_shrink:
        return page(database, dataclasses.replace(query, ended_after=None))
    return described, more


def listed(database: api.Database, ended: bool, host: str | None = None,
           ) -> list[dict[str, ty.Any]]:
    """All leases by start, oldest first.

    :param ended: those that are over and those that were deleted, too
    :param host: only those that reserve capacity of the host of this name
    """
    chosen = sa.select(models.Lease.__table__).order_by(
        models.Lease.start_date, models.Lease.id)
    if host is not None:
        chosen = chosen.where(models.Lease.id.in_(
            sa.select(models.Reservation.lease_id).join(models.Booking).join(
                models.Host, models.Host.id == models.Booking.host_id).where(
                    sa.or_(models.Host.name == host,
                           models.Host.service_host == host))))
    with database.reader() as session:
        return _described(session, session.execute(
            chosen if ended else chosen.where(_GOES_ON)).all())


def _statement(query: Query) -> sa.Select[ty.Any]:
    lease = models.Lease
    chosen = sa.select(lease.__table__).where(*_conditions(query))
    # An id makes every order one without equals.
    order = [*query.sort, ('id', query.sort[-1][1])]
    if query.marker is not None:
        chosen = chosen.where(_after(order, query))
    return chosen.order_by(*(
        sa.desc(getattr(lease, key)) if descending else getattr(lease, key)
        for key, descending in order)).limit(query.limit + 1)


def _marked(chosen: sa.Select[ty.Any], query: Query,
            lease: type[models.Lease] = models.Lease) -> sa.Select[ty.Any]:
    """Of the marker of a query. It may have ended since it was shown."""
    chosen = chosen.where(lease.id == query.marker)
    return chosen if query.project_id is None else chosen.where(
        lease.project_id == query.project_id)


def _after(order: ty.Sequence[tuple[str, bool]], query: Query,
           ) -> sa.ColumnElement[bool]:
    """What comes after the marker in an order; nothing if it is not there.
    """
    (key, descending), *rest = order
    marker = orm.aliased(models.Lease)
    column, value = getattr(models.Lease, key), _marked(
        sa.select(getattr(marker, key)), query, marker).scalar_subquery()
    beyond = column < value if descending else column > value
    if not rest:
        return ty.cast('sa.ColumnElement[bool]', beyond)
    return sa.or_(beyond, sa.and_(column == value, _after(rest, query)))


def _conditions(query: Query) -> list[sa.ColumnElement[bool]]:
    lease, over = models.Lease, states.LEASE.final()
    conditions: list[sa.ColumnElement[bool]] = []
    if query.ended or query.status in over:
        conditions.append(sa.or_(lease.deleted_at.is_(None),
                                 lease.status.not_in(over)))
    elif query.ended_after is None or query.status is not None:
        conditions.append(_GOES_ON)
    else:
        conditions.append(sa.or_(_GOES_ON, sa.and_(
            lease.status.in_(over), lease.deleted_at.is_(None),
            lease.end_date > query.ended_after)))
    if not query.occurrences:
        conditions.append(sa.or_(
            lease.recurrence_id.is_(None), ~_standing_before(over)))
    if query.project_id is not None:
        conditions.append(lease.project_id == query.project_id)
    if query.name is not None:
        conditions.append(lease.name == query.name)
    conditions += tagged(query.tags)
    if query.status == DELETING:
        conditions.append(lease.deleted_at.is_not(None))
    elif query.status is not None:
        conditions += [lease.status == query.status,
                       lease.deleted_at.is_(None)]
    if query.start is not None:
        conditions.append(lease.end_date > query.start)
    if query.end is not None:
        conditions.append(lease.start_date < query.end)
    if query.resource_type is not None:
        # Counted for each lease that all else fits: of a type that is rare,
        # PostgreSQL would look for the reservations first, among all.
        conditions.append(sa.select(sa.func.count()).where(
            models.Reservation.lease_id == lease.id,
            models.Reservation.resource_type == query.resource_type,
        ).scalar_subquery() > 0)
    return conditions


def tagged(tags: ty.Iterable[str]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of leases that have all of some tags."""
    # As JSON has them: in ASCII, and no tag has a quote that would end it.
    return [sa.cast(models.Lease.tags, sa.Text).contains(
        json.dumps(tag), autoescape=True) for tag in tags]


def _standing_before(over: ty.Collection[str]) -> sa.ColumnElement[bool]:
    """Whether another occurrence stands for all of what recurs: the first
    that is not over, or else the last.
    """
    lease, other = models.Lease, orm.aliased(models.Lease)
    is_over = lease.status.in_(over)
    return sa.exists().where(
        other.recurrence_id == lease.recurrence_id, other.id != lease.id,
        sa.or_(
            sa.and_(other.status.not_in(over), sa.or_(
                is_over, other.start_date < lease.start_date)),
            sa.and_(is_over, other.status.in_(over),
                    other.deleted_at.is_(None),
                    other.start_date > lease.start_date)))


def _described(session: orm.Session, found: ty.Sequence[ty.Any],
               most: float = math.inf) -> list[dict[str, ty.Any]]:
    """Leases as :func:`describe` has them, with the parts of many at once.

    :param most: only the first ones, with about so many parts
    """
    done, read = 0, 0
    bookings = collections.defaultdict(list)
    reservations = collections.defaultdict(list)
    events = collections.defaultdict(list)
    while done < len(found) and read < most:
        for part in _parts(session, [
                row.id for row in found[done:done + _AT_ONCE]]):
            read += 1
            if isinstance(part, _BookingRow):
                bookings[part.reservation_id].append(part)
            elif isinstance(part, EventRow):
                events[part.lease_id].append(part)
            else:
                reservations[part.lease_id].append(part)
        done += _AT_ONCE
    # In the order of the tables' relationships.
    for rows in bookings.values():
        rows.sort(key=lambda row: int(row.id))
    return [describe_rows(
        row, sorted(reservations[row.id], key=lambda one: one.id),
        sorted(events[row.id], key=lambda one: (one.time, one.id)), bookings)
        for row in found[:done]]


def _parts(session: orm.Session, lease_ids: ty.Sequence[str],
           ) -> ty.Iterator[EventRow | ReservationRow | _BookingRow]:
    """Read reservations, events and bookings of leases, by one statement.

    Slots without a server are left out, unless their host has failed.
    """
    reservation, booking = models.Reservation, models.Booking
    rows = {one.__name__: one for one in (
        ReservationRow, EventRow, _BookingRow)}
    # The first of the three says what the types of the columns are.
    found = session.execute(sa.union_all(
        _columns(ReservationRow, reservation, amount=sa.cast(
            reservation.amount, sa.BigInteger))
        .where(reservation.lease_id.in_(lease_ids)),
        _columns(EventRow, models.Event)
        .where(models.Event.lease_id.in_(lease_ids)),
        _columns(_BookingRow, booking, id=sa.cast(booking.id, sa.String(36)),
                 status=sa.literal_column("''"))
        .join(booking.reservation).where(
            reservation.lease_id.in_(lease_ids),
            sa.or_(booking.server_id.is_not(None),
                   booking.host_id.is_(None),
                   booking.host_failed_at.is_not(None))))).all()
    for part in found:
        kind = rows[part.kind]
        yield kind(*part[1:1 + _SAME], *(
            getattr(part, name) for name in kind._fields[_SAME:]))


def _columns(kind: type[ty.Any], table: ty.Any, **instead: ty.Any,
             ) -> sa.Select[ty.Any]:
    """Select the fields of a row, with null for what only others have.

    :param instead: by field, of the columns that are not the table's as such
    """
    fields = kind._fields
    own = dict(_OWN) | {name: getattr(table, name)
                        for name in fields[_SAME:]}
    return sa.select(
        sa.literal_column(f"'{kind.__name__}'").label('kind'),
        *((instead[name] if name in instead else getattr(table, name)).label(
            name) for name in fields[:_SAME]),
        *(column.label(name) for name, column in own.items()))


def status(lease: ty.Any) -> str:
    """The status of a lease that users see."""
    if lease.deleted_at is not None and (
            lease.status != states.Lease.TERMINATED):
        return DELETING
    return str(lease.status)


def describe(lease: models.Lease) -> dict[str, ty.Any]:
    """Return what is shown of a lease; see :func:`describe_rows`."""
    return describe_rows(lease, lease.reservations, lease.events, {
        one.id: one.bookings for one in lease.reservations})


def describe_rows(lease: ty.Any, reservations: ty.Sequence[ty.Any],
                  events: ty.Sequence[ty.Any],
                  bookings: ty.Mapping[str, ty.Sequence[ty.Any]],
                  ) -> dict[str, ty.Any]:
    """Return what is shown of a lease and its parts; no secrets in it.

    Times are seconds since the epoch, as in the row. ``degraded`` says that
    some reservation has ``missing_resources`` (a booking without a host, on
    one that has failed under its server, or of a server that was not built)
    or ``resources_changed`` (it has other hosts than when it was made, and is
    not over).

    :param lease: a row of it, or the mapped object; so of its parts
    :param bookings: by reservation
    """
    described = [_describe_reservation(one, bookings.get(one.id, ()),
                                       lease.status) for one in reservations]
    return {
        'id': lease.id, 'name': lease.name, 'status': status(lease),
        'description': lease.description or '', 'tags': [*(lease.tags or ())],
        'status_reason': conditions.status_reason(lease.conditions),
        'conditions': [dict(one) for one in lease.conditions or ()],
        'degraded': any(one['missing_resources'] or one['resources_changed']
                        for one in described),
        'project_id': lease.project_id, 'user_id': lease.user_id,
        **{name: getattr(lease, name) for name in (
            'start_date', 'end_date', 'before_end_date', 'on_end',
            'grace_period', 'auto_extend', 'cleaning_time', 'created_at',
            'updated_at')},
        'lease_type': lease.lease_type, 'retry_until': lease.retry_until,
        'recurrence_id': lease.recurrence_id,
        'warnings': [*preflight(lease), *(
            sentence for one in reservations for sentence in _lacks(
                one, bookings.get(one.id, ()), lease.status))],
        'reservations': described,
        'events': [{name: getattr(event, name) for name in (
            'id', 'lease_id', 'event_type', 'time', 'status', 'created_at',
            'updated_at')} | {'action': _action(event)}
            for event in events
            if not states.EventType.is_internal(event.event_type)],
    }


def preflight(lease: ty.Any) -> list[str]:
    """What is in the way of the start of a lease; history when it has begun.
    """
    return list(lease.warnings or ()) if (
        lease.status == states.Lease.PENDING) else []


def is_near_end(lease: dict[str, ty.Any]) -> bool:
    """Whether it was told of a lease that its end is near, which it is."""
    told = {event['status'] for event in lease['events']
            if event['event_type'] == states.EventType.BEFORE_END}
    return states.Event.DONE in told and states.Event.UNDONE not in told


def _action(event: ty.Any) -> str | None:
    """What is done at an event; None: a user has no say in that."""
    if states.EventType.may_act(event.event_type):
        return event.action or states.Action.NOTIFY
    return None


def _describe_reservation(
        reservation: ty.Any, bookings: ty.Sequence[ty.Any],
        status: str) -> dict[str, ty.Any]:
    """
    :param status: that of its lease
    """
    return {
        **{name: getattr(reservation, name) for name in (
            'id', 'lease_id', 'resource_type', 'status', 'amount', 'params',
            'spec', 'created_at', 'updated_at')},
        'resources': dict(reservation.resources),
        # While it waits for capacity it has had no host yet.
        'missing_resources': status not in states.SEEKING and any(
            booking.host_id is None or booking.host_failed_at is not None or
            booking.failed_at is not None for booking in bookings),
        'resources_changed': _has_moved(reservation, status),
        'servers': [booking.server_id for booking in bookings
                    if booking.server_id is not None],
    }


def _has_moved(reservation: ty.Any, status: str) -> bool:
    return (reservation.moved_at is not None and
            status not in states.LEASE.final())


def _lacks(reservation: ty.Any, bookings: ty.Sequence[ty.Any], status: str,
           ) -> ty.Iterator[str]:
    """What the owner of a lease should know of a reservation.

    Not what ``status_reason`` says: that its capacity is gone, or that a
    server could not be built.

    :param status: that of the lease
    """
    which = f'reservation {reservation.id}'
    failed = sum(one.host_failed_at is not None for one in bookings)
    whole = model.HOST in reservation.resources
    if failed and whole:
        yield (f'{words.count(failed, "host")} of {which} failed. A '
               'replacement is added when one is available.')
    elif failed:
        yield (f'The hosts of {words.count(failed, "server")} of {which} '
               'failed. The servers are reassigned when other hosts are '
               'available.')
    if _has_moved(reservation, status):
        yield (f'The hosts of {which} have changed. "openstack reservation '
               'acknowledge" removes this warning.')
    most = (reservation.params or {}).get('max')
    if whole and status == states.Lease.ACTIVE and most and (
            reservation.amount < most):
        yield (f'Reservation {reservation.id} has {reservation.amount} of at '
               f'most {words.count(most, "host")}, and no host is added '
               f'later. To get more, write a larger "min".')
