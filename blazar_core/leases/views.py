# SPDX-License-Identifier: Apache-2.0

"""Represent leases as dicts."""

import collections
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
AT_ONCE = 200
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


def unknown_host(name: str) -> errors.NotFound:
    """Return the error that there is no host of a name."""
    return errors.NotFound(
        f'There is no host {name} in the reservation database. Write the '
        'name of a hypervisor, or of its nova-compute.')


def tagged(tags: ty.Iterable[str]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of leases that have all of some tags."""
    # json.dumps escapes non-ASCII characters, and no tag contains a quote.
    return [sa.cast(models.Lease.tags, sa.Text).contains(
        json.dumps(tag), autoescape=True) for tag in tags]


def described(session: orm.Session, found: ty.Sequence[ty.Any],
              most: float = math.inf) -> list[dict[str, ty.Any]]:
    """Return leases as by :func:`describe`, reading the parts of many at once.

    :param found: their rows
    :param most: only the first leases, with about this number of parts
    """
    done, read = 0, 0
    parts: list[dict[str, list[ty.Any]]] = [
        collections.defaultdict(list) for _query in _SHOWN]
    while done < len(found) and read < most:
        ids = [row.id for row in found[done:done + AT_ONCE]]
        for query, some in zip(_SHOWN, parts, strict=True):
            for row in session.execute(query, {'lease_ids': ids}):
                # By lease; bookings by reservation.
                some[row[0]].append(row)
                read += 1
        done += AT_ONCE
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
