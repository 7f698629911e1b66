# SPDX-License-Identifier: Apache-2.0

"""Exclusive resources: ports, fixed IPs and volumes, for one server at a time.

What the server of a boot needs of these, and what servers that run have when
they come under a lease, is kept in the ``spec`` of their reservation, by the
id of the server, as phrases such as ``port ID``, until the server leaves the
lease or is deleted. A lease does not need or have what another one of its
project needs whose build is deferred and whose time overlaps. Where one ends
when the other starts, the start waits until the servers of the first are gone.
What servers are given later, with a lease or without, is not known here: the
cloud says that when a build is about to be sent.
"""

import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models

__all__ = ['by_server', 'check', 'check_change', 'drop', 'of', 'spec',
           'why_wait']

_KEY = 'exclusive'
_LEASES, _RESERVATIONS = models.Lease.__table__, models.Reservation.__table__
_BUILDS = models.HeldBuild.__table__
#: Until when a lease has servers, if it starts as late as it may.
_END = _LEASES.c.grace_period + sa.case(
    (sa.and_(_LEASES.c.status.in_(states.SEEKING), _LEASES.c.duration > 0),
     _LEASES.c.retry_until + _LEASES.c.duration), else_=_LEASES.c.end_date)
#: Of leases of a project, with what a boot has kept beside its reservations.
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
    """Return what is kept of a reservation whose servers need something.

    :param its: what is kept of it already
    :param needed: what only one server at a time can have, by server
    """
    found = {**by_server(its), **{
        server_id: sorted(its) for server_id, its in needed.items() if its}}
    return {**(its or {}), **({_KEY: found} if found else {})} or None


def by_server(kept: ty.Mapping[str, ty.Any] | None,
              ) -> ty.Mapping[str, list[str]]:
    """Return what of this servers need, by the ``spec`` of a reservation."""
    return ty.cast('dict[str, list[str]]', (kept or {}).get(_KEY, {}))


def of(kept: ty.Mapping[str, ty.Any] | None) -> frozenset[str]:
    """Return what of this a reservation needs, by its ``spec``."""
    return frozenset().union(*by_server(kept).values())


def drop(reservation: models.Reservation, server_id: str) -> None:
    """Keep no longer what a server needs that leaves its reservation."""
    kept = by_server(reservation.spec)
    if server_id in kept:
        reservation.spec = spec(
            {key: value for key, value in (reservation.spec or {}).items()
             if key != _KEY},
            {one: its for one, its in kept.items() if one != server_id})


def check(connection: sa.Connection, project_id: str, needed: frozenset[str],
          window: model.Window, but: frozenset[str] = frozenset(),
          ) -> None:
    """Make sure that no other lease needs the same in the same time.

    In a transaction that has locked the project. Nothing is read when nothing
    is needed.

    :param window: from the start of the lease until its servers are deleted
    :param but: the lease itself, and the series of which it is an occurrence
    :raises Conflict: when one does; says which, and until when
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
                f'on, an end before its start, or another one.')


def check_change(session: orm.Session, lease: models.Lease,
                 window: model.Window, grace_period: int | None) -> None:
    """:func:`check` a lease that is to have another window: for the time that
    it does not have yet.

    :param grace_period: None: its own
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
    """Return why a lease cannot start yet: servers of one of its project that
    ends before have what it needs until they are gone. Empty: none does.

    What a server of a lease that goes on has had, it may have given back.
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
