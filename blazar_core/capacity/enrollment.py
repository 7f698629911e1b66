# SPDX-License-Identifier: Apache-2.0

"""Enrollment: which hosts serve leases only, and their properties.

A host is enrolled in two steps, as the cloud has to be asked in between:
:func:`start` keeps out new servers without a lease, and :func:`complete`
makes the host reservable once the cloud has no server there. A host is
removed in the same way, at once or when it has no bookings left.

A host of another pool, which a resource type has, is enrolled in one step.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import host_generations
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models

__all__ = ['Attempt', 'MAX_EXTRA', 'Property', 'add', 'cancel',
           'allocations', 'start', 'change', 'check_unbooked', 'complete',
           'exists', 'facts_of', 'get', 'holders', 'is_replaced', 'pooled',
           'remove', 'left', 'listed', 'named', 'properties', 'public',
           'retire', 'set_private', 'take_out']

#: No more may be said of a host beside what the cloud says.
MAX_EXTRA = 100

#: How many leases that are in the way are named, those that end last first.
_NAMED = 5

_BOOKING = models.Booking.__table__.c


def named(session: orm.Session, name: str) -> models.Host:
    """An enrolled host, by its name or by that of its nova-compute.

    :raises NotFound: when there is none
    :raises Conflict: when there are several
    """
    its_name = sa.or_(
        models.Host.name == name, models.Host.service_host == name)
    found = session.scalars(sa.select(models.Host).where(
        models.Host.enrollment.is_not(None), its_name).order_by(
            models.Host.id)).all()
    if not found:
        raise errors.NotFound(f'No enrolled host has the name {name}.')
    if len(found) > 1:
        raise errors.Conflict(
            f'Several enrolled hosts have the name {name}. Use an ID: '
            f'{", ".join(str(host.id) for host in found)}.')
    return found[0]


def is_replaced(session: orm.Session, host: models.Host) -> bool:
    """Return whether another host that is enrolled, or is being enrolled, has
    the same service: that of a host which was installed anew under its name.
    """
    return session.scalar(sa.select(models.Host.id).where(
        models.Host.service_host == host.service_host,
        models.Host.id != host.id, models.Host.enrollment.in_(
            (states.Enrollment.ENROLLING, states.Enrollment.ENROLLED))).limit(
                1)) is not None


def exists(database: api.Database) -> bool:
    """Return whether any host is enrolled, or is being enrolled."""
    with database.connection() as connection:
        return connection.scalar(_ANY) is not None


_ANY = sa.select(models.Host.id).where(
    models.Host.enrollment.is_not(None)).limit(1)


def get(session: orm.Session, host_id: int) -> models.Host:
    """An enrolled host.

    :raises NotFound: when there is none of that id
    """
    host = session.get(models.Host, host_id)
    if host is None or host.enrollment is None:
        raise errors.NotFound(f'Host {host_id} could not be found.')
    return host


class Property(ty.NamedTuple):
    """What operators say of their hosts by one name.

    :ivar values: each that a host has, in their order
    """

    private: bool
    values: list[str]


class Attempt(ty.NamedTuple):
    """An enrollment that goes on, for as long as it is neither done nor given
    up: all that time nobody without a lease is let in.

    :ivar enrolled_generation: of the host, when it was begun
    :ivar is_own: whether it was begun just now, and not by somebody before
    """

    host_id: int
    enrolled_generation: int | None
    is_own: bool


def listed(session: orm.Session, after: int = 0, most: int | None = None,
           ) -> ty.Sequence[models.Host]:
    """All enrolled hosts, the oldest first.

    :param after: only those whose id is larger
    :param most: no more than so many; None: all
    """
    return session.scalars(sa.select(models.Host).where(
        models.Host.enrollment.is_not(None), models.Host.id > after,
    ).order_by(models.Host.id).limit(most)).all()


def start(session: orm.Session, now: int, uuid: str,
          extra: ty.Mapping[str, str], reservable: bool = True) -> Attempt:
    """From now on a host takes only servers with a lease.

    Safe to repeat until it is enrolled: the same attempt goes on.

    :param extra: what is said of it beside what the cloud says
    :param reservable: whether it may be reserved when it is enrolled
    :raises InvalidLeaseParams: when that is too much
    :raises NotFound: when the books do not know it
    :raises Conflict: when it is enrolled, or something is booked there
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.scalars(sa.select(models.Host).where(
        models.Host.uuid == uuid)).one_or_none()
    if host is None:
        raise errors.NotFound(
            f'Host {uuid} is not in the reservation database yet. Try again '
            'in a minute.')
    if host.enrollment == states.Enrollment.ENROLLED:
        raise errors.Conflict(
            f'Host {host.name} is enrolled already: its id is {host.id}.')
    if host.enrollment == states.Enrollment.LEAVING:
        raise errors.Conflict(
            f'Host {host.name} is being removed. ' + (
                f'Delete host {host.id} again, and enroll it after that.'
                if host.id in left(session, now) else
                f'To keep it, set "reservable" of host {host.id} to true.'))
    check_unbooked(session, now, host, 'enrolled')
    is_own = host.enrollment is None
    _write(session, now, host, enrollment=states.Enrollment.ENROLLING,
           enrolled_generation=host.generation + 1 if is_own
           else host.enrolled_generation,
           enrolled_at=now if is_own else host.enrolled_at,
           reservable=reservable, extra=_said(extra))
    return Attempt(host.id, host.enrolled_generation, is_own)


def complete(session: orm.Session, now: int, attempt: Attempt) -> None:
    """The cloud keeps all others off a host: it can be reserved.

    :raises Conflict: when that was given up meanwhile; others may have been
        let in
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.get_one(models.Host, attempt.host_id)
    if host.enrollment not in (
            states.Enrollment.ENROLLING, states.Enrollment.ENROLLED) or (
            host.enrolled_generation != attempt.enrolled_generation):
        raise errors.Conflict(
            f'The enrollment of host {host.name} was canceled by another '
            'request. Try again.')
    _write(session, now, host, enrollment=states.Enrollment.ENROLLED)


def cancel(session: orm.Session, now: int,
           attempt: Attempt) -> models.Host | None:
    """Give an enrollment up.

    :returns: the host, which is leaving; None: somebody has finished it, or
        given it up before
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.get_one(models.Host, attempt.host_id)
    if host.enrollment != states.Enrollment.ENROLLING or (
            host.enrolled_generation != attempt.enrolled_generation):
        return None
    _write(session, now, host, enrollment=states.Enrollment.LEAVING,
           reservable=False)
    return host


def remove(session: orm.Session, now: int, host_id: int,
           booked: bool = False) -> models.Host:
    """From now on no lease can reserve a host; safe to repeat.

    :param booked: also while something is booked there: it stays what it is
        until that is over (:func:`left`)
    :raises Conflict: when something is booked there, and that is not wanted
    :raises LostRace: when another process decided about it meanwhile
    """
    host = get(session, host_id)
    if not booked:
        check_unbooked(session, now, host, 'taken out')
    _write(session, now, host, enrollment=states.Enrollment.LEAVING,
           reservable=False)
    return host


def left(session: orm.Session, now: int) -> set[int]:
    """The ids of the hosts that are leaving, and on which nothing is booked
    any more: they are to go.
    """
    return set(session.scalars(sa.select(models.Host.id).where(
        models.Host.enrollment == states.Enrollment.LEAVING,
        sa.not_(sa.exists().where(
            _BOOKING.host_id == models.Host.id, *_still(now))))))


def retire(session: orm.Session, now: int, host_id: int) -> None:
    """A host is one like all others again.

    What runs there was let in for as long as nobody else was: the cloud is
    asked.

    :raises Conflict: when it is not leaving any more
    :raises LostRace: when another process decided about it meanwhile
    """
    host = get(session, host_id)
    if host.enrollment != states.Enrollment.LEAVING:
        raise errors.Conflict(f'Host {host.name} is no longer being removed.')
    _write(session, now, host, enrollment=None, enrolled_at=None,
           reservable=None, extra=None, recheck_at=now)


def change(session: orm.Session, now: int, host_id: int,
           extra: ty.Mapping[str, str | None], reservable: bool | None,
           ) -> models.Host:
    """Say something else of a host.

    What is reserved stays so, whatever was asked for.

    :param extra: what is said of it; None: no more
    :param reservable: whether more of it may be reserved; None: as it is
    :raises InvalidLeaseParams: when too much would be said of it
    :raises Conflict: when it may be reserved, and is being taken out
    :raises LostRace: when another process decided about it meanwhile
    """
    host = get(session, host_id)
    values: dict[str, ty.Any] = {}
    if reservable is not None:
        values['reservable'] = reservable
    if reservable and host.enrollment == states.Enrollment.LEAVING:
        if host.id in left(session, now):
            raise errors.Conflict(
                f'Host {host.name} is being removed. Enroll it again after '
                'that.')
        # Nothing was done about it yet.
        values['enrollment'] = states.Enrollment.ENROLLED
    _write(session, now, host,
           extra=_said({**(host.extra or {}), **extra}), **values)
    return host


def _said(extra: ty.Mapping[str, str | None]) -> dict[str, str]:
    """What is said of a host, without what is not.

    :raises InvalidLeaseParams: when it is too much
    """
    said = {key: value for key, value in extra.items() if value is not None}
    if len(said) > MAX_EXTRA:
        raise errors.InvalidLeaseParams(
            f'The host would have {len(said)} extra capabilities. Write at '
            f'most {MAX_EXTRA}; null removes one.')
    return said


def _write(session: orm.Session, now: int, host: models.Host,
           **values: ty.Any) -> None:
    if any(getattr(host, name) != value for name, value in values.items()):
        host_generations.advance(session.connection(), now, [host], {},
                                 updated_at=now, **values)
        session.refresh(host)


def check_unbooked(session: orm.Session, now: int, host: models.Host,
                   done: str) -> None:
    """
    :param done: what happens to it, as a word: ``enrolled``
    :raises Conflict: when something is booked on a host
    """
    count, until = session.execute(sa.select(
        sa.func.count(), sa.func.max(_BOOKING.end_date)).where(
            _BOOKING.host_id == host.id, *_still(now))).one()
    if count:
        leases = [f'{name} ({lease_id})' for lease_id, name, _end in (
            session.execute(sa.select(
                models.Lease.id, models.Lease.name,
                sa.func.max(_BOOKING.end_date).label('last_end')).join(
                    models.Reservation,
                    models.Reservation.lease_id == models.Lease.id).join(
                        models.Booking,
                        _BOOKING.reservation_id == models.Reservation.id)
                .where(_BOOKING.host_id == host.id, *_still(now)).group_by(
                    models.Lease.id, models.Lease.name).order_by(
                        sa.desc('last_end'), models.Lease.id).limit(
                            _NAMED + 1)))]
        shown = [*leases[:_NAMED], *(['...'] if leases[_NAMED:] else [])]
        raise errors.Conflict(
            f'Host {host.name} cannot be {done}: it has '
            f'{words.count(count, "booking")} of leases, the last one until '
            f'{clocks.minute(until)} UTC. Try again after that, or delete '
            f'these leases: {", ".join(shown)}.')


def _still(now: int) -> list[ty.Any]:
    """What is to come, or somebody has yet."""
    return [ledger.TAKES, _BOOKING.outage.is_(None), sa.or_(
        _BOOKING.end_date > now, _BOOKING.claimed_at.is_not(None))]


def allocations(session: orm.Session, *where: ty.Any,
                ) -> dict[int, list[ty.Any]]:
    """What is booked on enrolled hosts, by the id of the host.

    :param where: of reservations or their leases; all of them if nothing
    :returns: rows of ``id`` (of the reservation), ``lease_id``,
        ``start_date`` and ``end_date``, in the order of their starts
    """
    found: dict[int, list[ty.Any]] = {}
    for row in session.execute(sa.select(
            _BOOKING.host_id, models.Reservation.id,
            models.Reservation.lease_id, models.Lease.start_date,
            models.Lease.end_date).join_from(
                models.Booking, models.Reservation).join(models.Lease).join(
                    models.Host, models.Host.id == models.Booking.host_id)
            .where(models.Host.enrollment.is_not(None), *where).distinct()
            .order_by(models.Lease.start_date, models.Reservation.id)):
        found.setdefault(row.host_id, []).append(row)
    return found


# -- hosts of other pools ------------------------------------------------

def pooled(session: orm.Session, pool: str, uuid: str | None = None,
           ) -> ty.Sequence[models.Host]:
    """The enrolled hosts of a pool, the oldest first.

    :param uuid: of the one that is wanted; None: all
    """
    return session.scalars(sa.select(models.Host).where(
        models.Host.pool == pool, models.Host.enrolled_at.is_not(None), *(
            [] if uuid is None else [models.Host.uuid == uuid]),
    ).order_by(models.Host.id)).all()


def facts_of(host: models.Host) -> model.HostFacts:
    """What is recorded of a host."""
    return model.HostFacts(host.uuid, host.name, host.service_host,
                           host.capacity, host.properties, host.pool)


def add(session: orm.Session, now: int, facts: model.HostFacts,
        ) -> models.Host:
    """Enroll a host of a pool.

    :raises Conflict: when it is enrolled
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.scalars(sa.select(models.Host).where(
        models.Host.uuid == facts.uuid)).one_or_none()
    if host is not None and host.enrolled_at is not None:
        raise errors.Conflict(
            f'{host.name} is enrolled already: its id is {host.uuid}.')
    inventory.report(session, now, facts, {},
                     None if host is None else host.generation)
    host = session.scalars(sa.select(models.Host).where(
        models.Host.uuid == facts.uuid).execution_options(
            populate_existing=True)).one()
    _write(session, now, host, enrolled_at=now)
    return host


def take_out(session: orm.Session, now: int, host: models.Host) -> None:
    """Remove a host of a pool. Its row stays, without capacity: ended leases
    may refer to it, and it may be enrolled again.

    :raises Conflict: when something is booked there
    :raises LostRace: when another process decided about it meanwhile
    """
    check_unbooked(session, now, host, 'taken out')
    _write(session, now, host, enrolled_at=None, capacity={})


def holders(session: orm.Session, now: int, pool: str) -> dict[str, set[str]]:
    """By the uuid of a host of a pool, the projects of the leases that have
    bookings there now, or had until now.
    """
    found: dict[str, set[str]] = {}
    for uuid, project_id in session.execute(sa.select(
            models.Host.uuid, models.Lease.project_id).join_from(
                models.Booking, models.Host,
                models.Host.id == models.Booking.host_id).join(
                models.Reservation, models.Reservation.id ==
                models.Booking.reservation_id).join(models.Lease).where(
                    models.Host.pool == pool, _BOOKING.start_date <= now)):
        found.setdefault(uuid, set()).add(project_id)
    return found


# -- properties ----------------------------------------------------------

def public(database: api.Database, always: ty.Sequence[str]) -> list[str]:
    """The properties of hosts by which every user may ask for them.

    :param always: those of the cloud that are
    """
    with database.reader() as session:
        known = properties(session)
    return [*always, *(name for name, one in known.items()
                       if not one.private and name not in always)]


def properties(session: orm.Session) -> dict[str, Property]:
    """What operators say of enrolled hosts, by its name, in their order."""
    values: dict[str, set[str]] = {}
    for extra in session.scalars(sa.select(models.Host.extra).where(
            models.Host.enrollment.is_not(None))):
        for name, value in (extra or {}).items():
            values.setdefault(name, set()).add(value)
    private = {row.name: row.private for row in session.execute(
        sa.select(models.HostProperty.name, models.HostProperty.private))}
    return {name: Property(private.get(name, False), sorted(values[name]))
            for name in sorted(values)}


def set_private(session: orm.Session, name: str, private: bool) -> None:
    """Make a property of hosts public or private.

    :raises NotFound: when no enrolled host has it
    """
    if name not in properties(session):
        raise errors.NotFound(f'No host has the property {name}.')
    row = session.get(models.HostProperty, name)
    if row is None:
        session.add(models.HostProperty(name=name, private=private))
    else:
        row.private = private
