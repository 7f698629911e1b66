# SPDX-License-Identifier: Apache-2.0

"""Enrollment: which hosts serve leases only.

A host is enrolled in two steps, as the cloud has to be queried in between:
:func:`start` keeps out new servers without a lease, and :func:`complete`
makes the host reservable once the cloud has no server there. A host is
removed in the same way, at once or when it has no bookings left.

A host of another pool, managed by a resource type, is enrolled in one step.
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

#: The maximum number of extra capabilities of a host.
MAX_EXTRA = 100

#: How many leases an error names, those that end last first.
_NAMED = 5

_BOOKING = models.Booking.__table__.c


def named(session: orm.Session, name: str) -> models.Host:
    """Return an enrolled host, by its name or that of its nova-compute.

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
    the same service: the host was reinstalled under its name.
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
    """Return an enrolled host.

    :raises NotFound: when there is none of that id
    """
    host = session.get(models.Host, host_id)
    if host is None or host.enrollment is None:
        raise errors.NotFound(f'Host {host_id} could not be found.')
    return host


class PendingEnrollment(ty.NamedTuple):
    """An enrollment in progress. Until it is completed or canceled, the host
    admits no server without a lease.

    :ivar enrolled_generation: the generation of the host at its start
    :ivar is_own: whether it was started by this call, not by an earlier one
    """

    host_id: int
    enrolled_generation: int | None
    is_own: bool


def listed(session: orm.Session, after: int = 0, most: int | None = None,
           ) -> ty.Sequence[models.Host]:
    """Return the enrolled hosts, the oldest first.

    :param after: only those with a larger id
    :param most: at most so many; None: all
    """
    return session.scalars(sa.select(models.Host).where(
        models.Host.enrollment.is_not(None), models.Host.id > after,
    ).order_by(models.Host.id).limit(most)).all()


def start(session: orm.Session, now: int, uuid: str,
          extra: ty.Mapping[str, str], reservable: bool = True,
          ) -> PendingEnrollment:
    """Start an enrollment: the host admits only servers with a lease.

    Idempotent until the host is enrolled: the same attempt continues.

    :param extra: the extra capabilities of the host
    :param reservable: whether it may be reserved when it is enrolled
    :raises InvalidLeaseParams: when there are too many extra capabilities
    :raises NotFound: when the host is not in the reservation database
    :raises Conflict: when it is enrolled, being removed, or has bookings
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
            f'Host {host.name} is enrolled already: its id is {host.id}.',
            errors.ConflictReason.EXISTS)
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
    return PendingEnrollment(host.id, host.enrolled_generation, is_own)


def complete(session: orm.Session, now: int,
             enrolling: PendingEnrollment) -> None:
    """Complete an enrollment, once the cloud keeps all servers without a lease
    off the host: it can be reserved.

    :raises Conflict: when the enrollment was canceled meanwhile; the host may
        have admitted other servers
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.get_one(models.Host, enrolling.host_id)
    if host.enrollment not in (
            states.Enrollment.ENROLLING, states.Enrollment.ENROLLED) or (
            host.enrolled_generation != enrolling.enrolled_generation):
        raise errors.Conflict(
            f'The enrollment of host {host.name} was canceled by another '
            'request. Try again.',
            errors.ConflictReason.CHANGED)
    _write(session, now, host, enrollment=states.Enrollment.ENROLLED)


def cancel(session: orm.Session, now: int,
           enrolling: PendingEnrollment) -> models.Host | None:
    """Cancel an enrollment.

    :returns: the host, which is being removed; None: the enrollment was
        already completed or canceled
    :raises LostRace: when another process decided about it meanwhile
    """
    host = session.get_one(models.Host, enrolling.host_id)
    if host.enrollment != states.Enrollment.ENROLLING or (
            host.enrolled_generation != enrolling.enrolled_generation):
        return None
    _write(session, now, host, enrollment=states.Enrollment.LEAVING,
           reservable=False)
    return host


def remove(session: orm.Session, now: int, host_id: int,
           booked: bool = False) -> models.Host:
    """Start the removal of a host: no lease can reserve it. Idempotent.

    :param booked: true: also if the host has bookings; it stays enrolled
        until they are over (:func:`left`)
    :raises Conflict: when it has bookings, and ``booked`` is false
    :raises LostRace: when another process decided about it meanwhile
    """
    host = get(session, host_id)
    if not booked:
        check_unbooked(session, now, host, 'taken out')
    _write(session, now, host, enrollment=states.Enrollment.LEAVING,
           reservable=False)
    return host


def left(session: orm.Session, now: int) -> set[int]:
    """Return the ids of the hosts that are being removed and have no bookings
    left, so that :func:`retire` can finish.
    """
    return set(session.scalars(sa.select(models.Host.id).where(
        models.Host.enrollment == states.Enrollment.LEAVING,
        sa.not_(sa.exists().where(
            _BOOKING.host_id == models.Host.id, *_still(now))))))


def retire(session: orm.Session, now: int, host_id: int) -> None:
    """Finish the removal of a host, which then serves all workloads.

    Servers on an enrolled host are not counted, so the cloud is queried again.

    :raises Conflict: when the host is no longer being removed
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
    """Change the extra capabilities of a host, or whether it is reservable.

    Existing reservations are not affected.

    :param extra: new values of extra capabilities; None removes one
    :param reservable: whether more of it may be reserved; None: unchanged
    :raises InvalidLeaseParams: when there are too many extra capabilities
    :raises Conflict: when it is to be reservable, but its removal can no
        longer be stopped
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
        # The removal has had no effect yet.
        values['enrollment'] = states.Enrollment.ENROLLED
    _write(session, now, host,
           extra=_said({**(host.extra or {}), **extra}), **values)
    return host


def _said(extra: ty.Mapping[str, str | None]) -> dict[str, str]:
    """Return extra capabilities without those that are None.

    :raises InvalidLeaseParams: when there are too many
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
        host_generations.change(session, now, host, **values)
        # Callers return it from their sessions.
        session.refresh(host)


def check_unbooked(session: orm.Session, now: int, host: models.Host,
                   done: str) -> None:
    """Check that a host has no bookings.

    :param done: what is to be done to it, as a word: ``enrolled``
    :raises Conflict: when it has bookings
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
            f'these leases: {", ".join(shown)}.',
            errors.ConflictReason.IN_USE)


def _still(now: int) -> list[ty.Any]:
    """Return the condition of bookings that are not over or still in use."""
    return [ledger.TAKES, _BOOKING.outage.is_(None), ledger.is_held(now)]


def allocations(session: orm.Session, *where: ty.Any,
                ) -> dict[int, list[ty.Any]]:
    """Return the bookings of enrolled hosts, by the id of the host.

    :param where: conditions on reservations or their leases; none: all
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
    """Return the enrolled hosts of a pool, the oldest first.

    :param uuid: only the host of this uuid; None: all
    """
    return session.scalars(sa.select(models.Host).where(
        models.Host.pool == pool, models.Host.enrolled_at.is_not(None), *(
            [] if uuid is None else [models.Host.uuid == uuid]),
    ).order_by(models.Host.id)).all()


def facts_of(host: models.Host) -> model.HostFacts:
    """Return what is recorded of a host."""
    return model.HostFacts(host.uuid, host.name, host.service_host,
                           host.capacity, host.properties, host.pool,
                           host.units)


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
            f'{host.name} is enrolled already: its id is {host.uuid}.',
            errors.ConflictReason.EXISTS)
    inventory.record_host(session, now, facts, {},
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
    """Return, by the uuid of a host of a pool, the projects of the leases that
    have bookings there now, or have had until now.
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
