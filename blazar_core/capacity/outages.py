# SPDX-License-Identifier: Apache-2.0

"""Outages of hosts, as bookings.

An outage is a booking of all of the host that belongs to no reservation, so
that each search, quote and decision respects it. It is written even where
leases have bookings. These are moved to other hosts before they start
(:mod:`blazar_core.healing.overbooking`).
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

#: The kinds of outages: a failure, planned maintenance, and a host that is
#: switched off because it is not needed.
FAILURE, MAINTENANCE, POWER = 'failure', 'maintenance', 'power'


def locked(session: orm.Session, uuid: str) -> models.Host | None:
    """Return a host, locked until this transaction ends: no other process can
    start or end an outage of it. None: there is no host of that uuid.

    Call it first in the transaction; it writes: see :func:`api.locked`.
    """
    session.connection().execute(_LOCK, {'host': uuid})
    return session.scalars(sa.select(models.Host).where(
        models.Host.uuid == uuid)).one_or_none()


def failures(session: orm.Session) -> dict[str, models.Outage]:
    """Return the outages of hosts that have failed, or seem to have, by uuid.
    """
    return {uuid: row for row, uuid in session.execute(
        sa.select(models.Outage, models.Host.uuid)
        .join(models.Host, models.Host.id == models.Outage.host_id)
        .where(models.Outage.kind == FAILURE)).tuples()}


def listed(database: api.Database) -> list[ty.Any]:
    """Return all outages of hosts, current, planned and suspected, by host
    name.

    :returns: rows with the columns of :class:`models.Outage`, the ``name`` of
        the host, and ``until``: when it is expected to be available again; 0:
        it is
    """
    until = sa.select(sa.func.max(models.Booking.end_date)).where(
        models.Booking.host_id == models.Outage.host_id,
        models.Booking.outage == models.Outage.kind).scalar_subquery()
    with database.connection() as connection:
        return [*connection.execute(
            sa.select(models.Outage.__table__, models.Host.name,
                      sa.func.coalesce(until, 0).label('until'))
            .join(models.Host, models.Host.id == models.Outage.host_id)
            .order_by(models.Host.name, models.Outage.kind))]


def has_failed(host_id: ty.Any) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a host has failed."""
    return sa.exists().where(
        _FAILED.host_id == host_id, _FAILED.kind == FAILURE,
        _FAILED.began_at.is_not(None))


def note_fenced(connection: sa.Connection, uuid: str, now: int) -> None:
    """Record that a failed host was fenced, which is done once in a failure.
    """
    connection.execute(sa.update(models.Outage).where(
        models.Outage.kind == FAILURE, models.Outage.host_id.in_(
            sa.select(models.Host.id).where(models.Host.uuid == uuid))).values(
                fenced_at=now))


def noted(session: orm.Session, now: int, host_id: int, kind: str,
          reason: str) -> models.Outage:
    """Return the outage of a host, which is created if it has none."""
    outage = session.get(models.Outage, (host_id, kind))
    if outage is None:
        outage = models.Outage(
            host_id=host_id, kind=kind, seen_at=now, reason=reason)
        session.add(outage)
        session.flush()
    outage.reason = reason
    return outage


def begin(session: orm.Session, now: int, outage: models.Outage, until: int,
          ) -> None:
    """Start an outage of a host now. Its servers are marked as stranded, and
    so are the leases that have all of it.

    :param until: when the host is expected to be available again
    :raises OverCapacity: when the host has no capacity
    :raises LostRace: when another process decided about it meanwhile
    """
    plan(session, now, outage, model.Window(now, until))
    session.execute(sa.update(models.Booking).where(
        models.Booking.host_id == outage.host_id,
        models.Booking.claimed_at.is_not(None),
        models.Booking.host_failed_at.is_(None)).values(host_failed_at=now))


def plan(session: orm.Session, now: int, outage: models.Outage,
         window: model.Window, force: bool = True) -> None:
    """Book an outage of a host over a window; its servers are not stranded.

    :param force: true: whatever is booked there
    :raises OverCapacity: when the host has no capacity, or has bookings
    :raises LostRace: when another process decided about it meanwhile
    """
    ledger.amend(session, now, [ledger.Edit(None, ledger.NewBooking(
        None, outage.host_id, None, window, model.WHOLE,
        outage=outage.kind))], force=force)
    outage.began_at = window.start


def stranded(session: orm.Session, outage: models.Outage) -> list[str]:
    """Return the ids of the leases with stranded bookings on a host."""
    return [*session.scalars(
        sa.select(models.Reservation.lease_id).distinct()
        .join(models.Booking,
              models.Booking.reservation_id == models.Reservation.id)
        .where(models.Booking.host_id == outage.host_id,
               models.Booking.host_failed_at.is_not(None))
        .order_by(models.Reservation.lease_id))]


def last(session: orm.Session, now: int, outage: models.Outage,
         window: model.Window, force: bool = True) -> None:
    """Change the window of an outage.

    :param force: true: whatever is booked there
    :raises OverCapacity: when the host has bookings
    :raises LostRace: when another process decided about it meanwhile
    """
    ledger.amend(session, now, [
        ledger.Edit(row, ledger.new_of(row, window=window))
        for row in _bookings(session, outage)], force=force)
    outage.began_at = window.start


def end(session: orm.Session, now: int, outage: models.Outage) -> None:
    """End an outage: the host is available again.

    :raises LostRace: when another process decided about it meanwhile
    """
    ledger.amend(session, now, [ledger.Edit(row, None) for row in _bookings(
        session, outage)], force=True)
    if outage.kind == FAILURE:
        session.execute(sa.update(models.Booking).where(
            models.Booking.host_id == outage.host_id,
            models.Booking.host_failed_at.is_not(None),
        ).values(host_failed_at=None))
    session.delete(outage)


def until(session: orm.Session, outage: models.Outage) -> int:
    """Return when a host is expected to be available again; 0: it is."""
    return max((row.end_date for row in _bookings(session, outage)),
               default=0)


def on_host(connection: sa.Connection, host_id: int, now: int,
            ) -> list[ledger.NewBooking]:
    """Return the outages of a host that are not over."""
    return [ledger.NewBooking(
        None, host_id, None, model.Window(row.start_date, row.end_date),
        row.resources, outage=row.outage) for row in connection.execute(
            _ON_HOST, {'host': host_id, 'now': now})]


def are_unavailable(connection: sa.Connection,
                    host_ids: ty.Collection[int | None], when: int,
                    kinds: ty.Collection[str] = (FAILURE, MAINTENANCE),
                    ahead: int = 0) -> bool:
    """Return whether any of these hosts is unavailable at an instant.

    :param kinds: only because of outages of these kinds
    :param ahead: also if an outage starts up to so many seconds later
    """
    return connection.execute(sa.select(_ROWS.id).where(
        _ROWS.host_id.in_(host_ids), _ROWS.outage.in_(kinds),
        _ROWS.start_date <= when + ahead,
        _ROWS.end_date > when)).first() is not None


def wakeable(connection: sa.Connection, now: int, within: int, start: int,
             ) -> ty.Sequence[sa.Row[ty.Any]]:
    """Return the bookings of hosts that are switched off but could be used
    within so many seconds.

    :param start: of a lease that would wait for them
    """
    return connection.execute(_WAKEABLE, {
        'now': now, 'within': within, 'start': start}).all()


def off_until(connection: sa.Connection) -> int:
    """Return when all hosts could be used that are switched off; 0: none is.
    """
    return connection.scalar(sa.select(sa.func.max(_ROWS.end_date)).where(
        # Outages alone have none; that is indexed.
        _ROWS.reservation_id.is_(None), _ROWS.outage == POWER)) or 0


def wake(connection: sa.Connection, now: int, row: sa.Row[ty.Any],
         start: int) -> None:
    """End the outage of a host that is switched off at an instant, so that a
    lease can start then, which has it switched on.

    :param row: of :func:`wakeable`
    :raises LostRace: when another process decided about it meanwhile
    """
    ledger.decide(connection, now, [ledger.Edit(
        ty.cast(models.Booking, row), ledger.NewBooking(
            None, row.host_id, None, model.Window(row.start_date, start),
            row.resources, outage=POWER))], force=True)
    connection.execute(sa.update(models.Booking).where(
        _ROWS.id == row.id).values(end_date=start))


#: An alias, to be independent of outages in an enclosing statement.
_FAILED = orm.aliased(models.Outage)
_HOSTS = models.Host.__table__
_LOCK = sa.update(_HOSTS).where(
    _HOSTS.c.uuid == sa.bindparam('host')).values(
        updated_at=_HOSTS.c.updated_at)
_ROWS = models.Booking.__table__.c
#: One that boots can be used sooner than one that is off.
_WAKEABLE = sa.select(*_ROWS).join(_HOSTS, _HOSTS.c.id == _ROWS.host_id).where(
    _ROWS.outage == POWER, _ROWS.start_date < sa.bindparam('start'),
    _ROWS.end_date > sa.bindparam('start'), sa.or_(
        sa.and_(_HOSTS.c.power_state.in_(
            (states.Power.OFF, states.Power.BOOTING)),
            _HOSTS.c.power_lead <= sa.bindparam('within')),
        # Its BMC has accepted the boot at power_at.
        sa.and_(_HOSTS.c.power_state == states.Power.BOOTING,
                _HOSTS.c.power_until.is_not(None),
                _HOSTS.c.power_at + _HOSTS.c.power_lead <=
                sa.bindparam('now') + sa.bindparam('within'))),
).order_by(_ROWS.host_id)
_ON_HOST = sa.select(
    _ROWS.start_date, _ROWS.end_date, _ROWS.resources, _ROWS.outage).where(
        _ROWS.host_id == sa.bindparam('host'), _ROWS.outage.is_not(None),
        _ROWS.end_date > sa.bindparam('now'))


def _bookings(session: orm.Session, outage: models.Outage,
              ) -> ty.Sequence[models.Booking]:
    return session.scalars(sa.select(models.Booking).where(
        models.Booking.host_id == outage.host_id,
        models.Booking.outage == outage.kind)).all()
