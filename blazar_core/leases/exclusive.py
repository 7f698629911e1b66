# SPDX-License-Identifier: Apache-2.0

"""Exclusive resources: ports, fixed IPs and volumes, for one server at a time.

The ``spec`` of a reservation lists the exclusive resources that the servers of
a boot need, and those of running servers that are added to a lease, by server
id, as phrases such as ``port ID``, until the server leaves the lease or is
deleted. Two leases of a project cannot overlap if both need the same resource
and the build of one is deferred. If one ends when the other starts, the start
waits until the servers of the first are deleted. Resources that are attached
to servers later are not known here: the cloud checks them right before it
sends a build.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models

_KEY = 'exclusive'
_LEASES, _RESERVATIONS = models.Lease.__table__, models.Reservation.__table__
_BUILDS = models.DeferredBuild.__table__
#: The latest time until which a lease may have servers.
_END = _LEASES.c.grace_period + sa.case(
    (sa.and_(_LEASES.c.status.in_(states.SEEKING), _LEASES.c.duration > 0),
     _LEASES.c.retry_until + _LEASES.c.duration), else_=_LEASES.c.end_date)
#: Leases of a project, with the ``spec`` of each reservation of a boot.
_OTHERS = sa.select(
    _LEASES.c.id, _LEASES.c.name, _LEASES.c.recurrence_id,
    _LEASES.c.start_date, _END.label('until'),
    models.Reservation.spec.label('spec'),
).join(_RESERVATIONS, _RESERVATIONS.c.lease_id == _LEASES.c.id).where(
    _LEASES.c.project_id == sa.bindparam('project'),
    _LEASES.c.status != states.Lease.TERMINATED,
    models.Reservation.params.is_(None), models.Reservation.spec.is_not(None))


def spec(its: ty.Mapping[str, ty.Any] | None,
         needed: ty.Mapping[str, ty.Iterable[str]],
         ) -> dict[str, ty.Any] | None:
    """Return the ``spec`` of a reservation with added exclusive resources.

    :param its: the present ``spec``
    :param needed: the exclusive resources by server
    """
    found = {**by_server(its), **{
        server_id: sorted(its) for server_id, its in needed.items() if its}}
    return {**(its or {}), **({_KEY: found} if found else {})} or None


def by_server(kept: ty.Mapping[str, ty.Any] | None,
              ) -> ty.Mapping[str, list[str]]:
    """Return the exclusive resources in a ``spec``, by server."""
    return ty.cast('dict[str, list[str]]', (kept or {}).get(_KEY, {}))


def of(kept: ty.Mapping[str, ty.Any] | None) -> frozenset[str]:
    """Return all exclusive resources in a ``spec``."""
    return frozenset().union(*by_server(kept).values())


def drop(reservation: models.Reservation, server_id: str) -> None:
    """Remove the exclusive resources of a server that leaves a reservation."""
    kept = by_server(reservation.spec)
    if server_id in kept:
        reservation.spec = spec(
            {key: value for key, value in (reservation.spec or {}).items()
             if key != _KEY},
            {one: its for one, its in kept.items() if one != server_id})


def check(connection: sa.Connection, project_id: str, needed: frozenset[str],
          window: model.Window, but: frozenset[str] = frozenset(),
          ) -> None:
    """Check that no other lease needs the same resources at the same time.

    Must be called in a transaction that has locked the project. Reads nothing
    if ``needed`` is empty.

    :param window: from the start of the lease until its servers are deleted
    :param but: ids of the lease itself and of its recurrence
    :raises Conflict: if one does; says which, and until when
    """
    if not needed:
        return
    overlapping = _OTHERS.join(
        _BUILDS, _BUILDS.c.lease_id == _LEASES.c.id).where(
            _LEASES.c.start_date < window.end, _END > window.start)
    for row in connection.execute(overlapping, {'project': project_id}):
        both = needed & of(row.spec)
        if both and but.isdisjoint({row.id, row.recurrence_id}):
            raise errors.Conflict(
                f'Lease {row.name} ({row.id}) needs {min(both)} from '
                f'{clocks.minute(row.start_date)} to '
                f'{clocks.minute(row.until)} UTC. Choose a start from then '
                f'on, an end before its start, or another one.',
                errors.ConflictReason.NO_CAPACITY)


def check_change(session: orm.Session, lease: models.Lease,
                 window: model.Window, grace_period: int | None) -> None:
    """Call :func:`check` for the time that another window would add to a
    lease.

    :param grace_period: None: the present one
    """
    if grace_period is None:
        grace_period = lease.grace_period
    end, before = window.end + grace_period, (
        lease.end_date + lease.grace_period)
    for start, until in ((window.start, min(end, lease.start_date)),
                         (max(window.start, before), end)):
        if start < until:
            check(session.connection(), lease.project_id, _of_lease(lease),
                  model.Window(start, until),
                  frozenset({lease.id, lease.recurrence_id or lease.id}))


def _of_lease(lease: models.Lease) -> frozenset[str]:
    return frozenset().union(*(
        of(one.spec) for one in lease.reservations if one.booted))


def why_wait(session: orm.Session, lease: models.Lease) -> str:
    """Return why a lease cannot start yet: a lease of its project that ends
    before still has servers with a resource that it needs. Empty: none has.

    Leases that end later are ignored, as their servers may not have the
    resource any longer.
    """
    needed = _of_lease(lease)
    if not needed:
        return ''
    for row in session.execute(_OTHERS.where(
            _LEASES.c.id != lease.id,
            _LEASES.c.end_date + _LEASES.c.grace_period <= lease.start_date,
            _LEASES.c.status.not_in((*states.BEFORE, *states.SEEKING))),
            {'project': lease.project_id}):
        if both := needed & of(row.spec):
            return (f'Servers of lease {row.name} ({row.id}) still have '
                    f'{min(both)}.')
    return ''
