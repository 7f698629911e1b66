# SPDX-License-Identifier: Apache-2.0

"""Find leases, and represent them as dicts."""

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

#: A lease as :func:`describe` returns it.
Lease: ty.TypeAlias = dict[str, ty.Any]
#: Publishes an event type, e.g. ``lease.create``, and a lease, or whatever
#: else the event is about.
Notify: ty.TypeAlias = ty.Callable[[str, Lease], None]

#: The status that users see of a lease that is being deleted.
DELETING = 'DELETING'


#: Number of leases whose parts are read at once.
_AT_ONCE = 200
#: A page ends with the statements that reach the first number of parts:
#: reservations, events and servers. The second is for a list without pages:
#: ten for each of 10,000 leases, which take some seconds and 200 MB.
_PARTS, _PARTS_OF_ALL = 20_000, 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """A query for leases, and their order; None: any.

    :ivar status: None: not those that are over, unless ``ended``
    :ivar tags: only leases that have all of these
    :ivar ended_after: also those that are over, with an end after this
    :ivar start: only leases that end after this and start before ``end``
    :ivar occurrences: whether to return each occurrence of a recurring lease;
        otherwise the first that is not over, or else the last, represents all
    :ivar sort: columns, and whether they descend
    :ivar marker: only leases after this one
    :ivar paged: whether the caller can request the rest
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


_GOES_ON = models.Lease.status.in_(states.GOING_ON)
#: What is shown of the parts of leases, sorted like the relationships of the
#: tables: reservations, events and bookings. Slots without a server are
#: omitted, unless their host has failed.
_RESERVATION, _EVENT, _BOOKING = (
    models.Reservation, models.Event, models.Booking)
_IDS: sa.BindParameter[ty.Any] = sa.bindparam('lease_ids', expanding=True)
_SHOWN: tuple[sa.Select[ty.Any], ...] = (
    sa.select(
        _RESERVATION.lease_id, _RESERVATION.id, _RESERVATION.resource_type,
        _RESERVATION.status, _RESERVATION.amount, _RESERVATION.resources,
        _RESERVATION.params, _RESERVATION.spec, _RESERVATION.moved_at,
        _RESERVATION.created_at, _RESERVATION.updated_at,
    ).where(_RESERVATION.lease_id.in_(_IDS)).order_by(_RESERVATION.id),
    sa.select(
        _EVENT.lease_id, _EVENT.id, _EVENT.event_type, _EVENT.status,
        _EVENT.time, _EVENT.action, _EVENT.created_at, _EVENT.updated_at,
    ).where(_EVENT.lease_id.in_(_IDS)).order_by(_EVENT.time, _EVENT.id),
    sa.select(
        _BOOKING.reservation_id, _BOOKING.server_id, _BOOKING.host_id,
        _BOOKING.host_failed_at, _BOOKING.failed_at,
    ).join(_BOOKING.reservation).where(
        _RESERVATION.lease_id.in_(_IDS), sa.or_(
            _BOOKING.server_id.is_not(None), _BOOKING.host_id.is_(None),
            _BOOKING.host_failed_at.is_not(None))).order_by(_BOOKING.id))
#: The leases that may be degraded: few of all.
_MOVED = sa.select(_RESERVATION.lease_id).where(
    _RESERVATION.moved_at.is_not(None))
_LACKING = sa.select(_RESERVATION.lease_id).join(_BOOKING).where(sa.or_(
    _BOOKING.host_id.is_(None), _BOOKING.host_failed_at.is_not(None),
    _BOOKING.failed_at.is_not(None)))


def get(database: api.Database, lease_id: str) -> dict[str, ty.Any]:
    """Return a lease.

    :raises NotFound: if it does not exist or was deleted
    """
    with database.reader() as session:
        lease = session.get(models.Lease, lease_id)
        if lease is None or (lease.deleted_at is not None and
                             lease.status == states.Lease.TERMINATED):
            raise errors.NotFound(f'Lease {lease_id} could not be found.')
        return describe(lease)


def owner_of_deleted(database: api.Database, lease_id: str) -> str | None:
    """Return the project of a lease that was deleted, or None."""
    with database.reader() as session:
        return session.scalar(sa.select(models.Lease.project_id).where(
            models.Lease.id == lease_id,
            models.Lease.deleted_at.is_not(None)))


def page(database: api.Database, query: Query,
         ) -> tuple[list[dict[str, ty.Any]], bool]:
    """Return the leases that match a query, and whether there are more.

    Executes four statements, and some more for several hundred leases. A page
    of very large leases is shorter than the limit. If a list without pages is
    too long, it is returned without leases that are over.

    :raises InvalidLeaseParams: if the marker is not a visible lease
    """
    with database.reader() as session:
        found = session.execute(_statement(query)).all()
        if not found and query.marker is not None and session.execute(
                _marked(sa.select(models.Lease.id), query)).first() is None:
            raise errors.InvalidLeaseParams(
                '"marker" is not the ID of one of these leases. Write the ID '
                'of the last lease of the previous page.')
        may_shrink = not query.paged and query.ended_after is not None
        described = [] if may_shrink and len(found) > query.limit else (
            _described(session, found[:query.limit],
                       _PARTS if query.paged else _PARTS_OF_ALL))
    more = len(described) < len(found)
    if more and may_shrink:
        return page(database, dataclasses.replace(query, ended_after=None))
    return described, more


def listed(database: api.Database, ended: bool, host: str | None = None,
           degraded: bool = False) -> ty.Iterator[dict[str, ty.Any]]:
    """Yield all leases by start, oldest first, from one snapshot. Their parts
    are read when they are yielded, as there may be very many.

    :param ended: whether to include those that are over or were deleted
    :param host: only those that reserve capacity of the host of this name
    :param degraded: only those that are degraded
    :raises NotFound: if the host does not exist
    """
    chosen = sa.select(models.Lease.__table__).order_by(
        models.Lease.start_date, models.Lease.id)
    if degraded:
        few = sa.union(_MOVED, _LACKING).subquery()
        chosen = chosen.join(few, few.c.lease_id == models.Lease.id)
    named = sa.or_(models.Host.name == host, models.Host.service_host == host)
    if host is not None:
        chosen = chosen.where(models.Lease.id.in_(
            sa.select(models.Reservation.lease_id).join(models.Booking).join(
                models.Host, models.Host.id == models.Booking.host_id).where(
                    named)))
    with database.reader() as session:
        if host is not None and session.scalar(
                sa.select(models.Host.id).where(named).limit(1)) is None:
            raise unknown_host(host)
        found = session.execute(
            chosen if ended else chosen.where(_GOES_ON)).all()
        for first in range(0, len(found), _AT_ONCE):
            yield from (one for one in _described(
                session, found[first:first + _AT_ONCE])
                if one['degraded'] or not degraded)


def unknown_host(name: str) -> errors.NotFound:
    """Return the error that there is no host of a name."""
    return errors.NotFound(
        f'There is no host {name} in the reservation database. Write the '
        'name of a hypervisor, or of its nova-compute.')


def _statement(query: Query) -> sa.Select[ty.Any]:
    lease = models.Lease
    chosen = sa.select(lease.__table__).where(*_conditions(query))
    # The id makes the order total.
    order = [*query.sort, ('id', query.sort[-1][1])]
    if query.marker is not None:
        chosen = chosen.where(_after(order, query))
    return chosen.order_by(*(
        sa.desc(getattr(lease, key)) if descending else getattr(lease, key)
        for key, descending in order)).limit(query.limit + 1)


def _marked(chosen: sa.Select[ty.Any], query: Query,
            lease: type[models.Lease] = models.Lease) -> sa.Select[ty.Any]:
    """Restrict a query to the marker, which may have ended meanwhile."""
    chosen = chosen.where(lease.id == query.marker)
    return chosen if query.project_id is None else chosen.where(
        lease.project_id == query.project_id)


def _after(order: ty.Sequence[tuple[str, bool]], query: Query,
           ) -> sa.ColumnElement[bool]:
    """Return the condition of rows after the marker. If the marker does not
    exist, no row fulfils it.
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
        # A correlated count: for a rare type, PostgreSQL would otherwise
        # search all reservations first.
        conditions.append(sa.select(sa.func.count()).where(
            models.Reservation.lease_id == lease.id,
            models.Reservation.resource_type == query.resource_type,
        ).scalar_subquery() > 0)
    return conditions


def tagged(tags: ty.Iterable[str]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of leases that have all of some tags."""
    # json.dumps escapes non-ASCII characters, and no tag contains a quote.
    return [sa.cast(models.Lease.tags, sa.Text).contains(
        json.dumps(tag), autoescape=True) for tag in tags]


def _standing_before(over: ty.Collection[str]) -> sa.ColumnElement[bool]:
    """Return the condition that another occurrence represents the series: the
    first that is not over, or else the last.
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
    """Return leases as by :func:`describe`, reading the parts of many at once.

    :param most: only the first leases, with about this number of parts
    """
    done, read = 0, 0
    parts: list[dict[str, list[ty.Any]]] = [
        collections.defaultdict(list) for _query in _SHOWN]
    while done < len(found) and read < most:
        ids = [row.id for row in found[done:done + _AT_ONCE]]
        for query, some in zip(_SHOWN, parts, strict=True):
            for row in session.execute(query, {'lease_ids': ids}):
                # By lease; bookings by reservation.
                some[row[0]].append(row)
                read += 1
        done += _AT_ONCE
    reservations, events, bookings = parts
    return [describe_rows(row, reservations[row.id], events[row.id], bookings)
            for row in found[:done]]


def status(lease: ty.Any) -> str:
    """Return the status of a lease as users see it."""
    if lease.deleted_at is not None and (
            lease.status != states.Lease.TERMINATED):
        return DELETING
    return str(lease.status)


def describe(lease: models.Lease) -> dict[str, ty.Any]:
    """Return a lease as it is shown; see :func:`describe_rows`."""
    return describe_rows(lease, lease.reservations, lease.events, {
        one.id: one.bookings for one in lease.reservations})


def refreshed(session: orm.Session, lease: models.Lease) -> dict[str, ty.Any]:
    """Return a lease as it is shown, with what the session has written."""
    session.flush()
    session.expire(lease)
    return describe(lease)


def describe_rows(lease: ty.Any, reservations: ty.Sequence[ty.Any],
                  events: ty.Sequence[ty.Any],
                  bookings: ty.Mapping[str, ty.Sequence[ty.Any]],
                  ) -> dict[str, ty.Any]:
    """Return a lease and its parts as they are shown, without secrets.

    Times are seconds since the epoch, as in the row. ``degraded`` is true if a
    reservation has ``missing_resources`` (a booking without a host, on a host
    that has failed under its server, or of a server that could not be built)
    or ``resources_changed`` (its hosts have changed since its creation, and it
    is not over).

    :param lease: its row or mapped object; likewise its parts
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
    """Return the preflight warnings of a lease that has not started."""
    return list(lease.warnings or ()) if (
        lease.status == states.Lease.PENDING) else []


def is_near_end(lease: dict[str, ty.Any]) -> bool:
    """Return whether the notification before the end of a lease was sent, and
    none is pending.
    """
    told = {event['status'] for event in lease['events']
            if event['event_type'] == states.EventType.BEFORE_END}
    return states.Event.DONE in told and states.Event.UNDONE not in told


def _action(event: ty.Any) -> str | None:
    """Return the action of an event; None: users cannot choose one."""
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
        # A lease that waits for capacity has never had a host.
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
    """Yield warnings about a reservation for the owner of its lease.

    ``status_reason`` says what is omitted here: that its capacity is lost, or
    that a server could not be built.

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
               'failed. Servers stay on a failed host until it is up again '
               'or the operator evacuates them.')
    if _has_moved(reservation, status):
        yield (f'The hosts of {which} have changed. "openstack reservation '
               'acknowledge" removes this warning.')
    most = (reservation.params or {}).get('max')
    if whole and status == states.Lease.ACTIVE and most and (
            reservation.amount < most):
        yield (f'Reservation {reservation.id} has {reservation.amount} of at '
               f'most {words.count(most, "host")}, and no host is added '
               f'later. To get more, write a larger "min".')
