# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers, which use reserved capacity until it is needed.

Their users accept that they are evicted when a reservation needs their
capacity. So they count as used only for their lead time from now on (the
notice to the owner, and the time of an eviction; on hosts that serve leases
only, also that of cleaning); what is reserved for later than that can have
their capacity (:func:`.rule.evictable`).

Each interruptible server is safe until its lead time before the first instant
at which its host no longer has enough of a resource class that it uses, for
it, the reservations, the servers without an end, and the interruptible servers
that come after it in the order of eviction. That order is fixed: those with
the largest part of the host first, so that few suffice; of equal ones the
youngest. So an evicted server has never been shown a later instant, however
many others are evicted with it, and a server without a device is safe if only
devices are needed.
"""

import collections
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import inventory
from blazar_core.capacity import rule
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

#: Columns of a server that was evicted and has a host again.
BACK: ty.Mapping[str, None] = {'evicted_at': None, 'resume_at': None}

_HOSTS, _BOOKINGS, _SERVERS = (
    models.Host.__table__.c, models.Booking.__table__.c,
    models.InterruptibleServer.__table__.c)
_RESERVATIONS, _LEASES = (
    models.Reservation.__table__.c, models.Lease.__table__.c)
_WINDOW = sa.select(
    _SERVERS.lead_time, _SERVERS.cleaning_time, _SERVERS.safe_by).where(
        _SERVERS.server_id == sa.bindparam('server'))
_OF_HOSTS = sa.select(
    _HOSTS.id, _HOSTS.uuid, _HOSTS.name, _HOSTS.generation, _HOSTS.capacity,
    _HOSTS.usage, _HOSTS.interruptible).where(
        _HOSTS.interruptible.is_not(None)).order_by(_HOSTS.id)
_IS_ENDING = _LEASES.status.in_(states.ENDING)
#: Without outages: interruptible servers are not moved off hosts that are
#: unavailable. Without leases that end before their servers exist.
_BOOKED = sa.select(
    _BOOKINGS.host_id, _BOOKINGS.start_date, _BOOKINGS.end_date,
    _BOOKINGS.claimed_at, _BOOKINGS.resources, sa.case(
        (_IS_ENDING, sa.null()), else_=_LEASES.id).label('lease_id'),
).join(models.Reservation.__table__,
       _RESERVATIONS.id == _BOOKINGS.reservation_id).join(
    models.Lease.__table__, _LEASES.id == _RESERVATIONS.lease_id).where(
        _BOOKINGS.host_id.in_(sa.bindparam('hosts', expanding=True)), sa.or_(
            sa.and_(_BOOKINGS.end_date > sa.bindparam('now'), ~_IS_ENDING),
            _BOOKINGS.claimed_at.is_not(None))).order_by(
                _BOOKINGS.start_date, _BOOKINGS.id)


_CHECKED_AT = sa.select(_SERVERS.checked_at).where(
    _SERVERS.server_id == sa.bindparam('server'))
_MADE_ORDINARY = sa.delete(models.InterruptibleServer.__table__).where(
    _SERVERS.server_id == sa.bindparam('server'),
    _SERVERS.checked_at == sa.bindparam('seen'))


class Server(ty.NamedTuple):
    """An interruptible server on a host.

    :ivar since: when it became interruptible
    """

    id: str
    resources: model.Resources
    lead_time: int
    since: int


class HostSafety(ty.NamedTuple):
    """A host with interruptible servers, and what is reserved there.

    :ivar servers: in the order of their eviction
    :ivar booked: in the order of their starts, each with its lease; None: the
        lease is ending
    """

    id: int
    uuid: str
    name: str
    generation: int
    capacity: model.Resources
    usage: model.Resources
    servers: ty.Sequence[Server]
    booked: ty.Sequence[tuple[rule.Taken, str | None]]

    def needed_for(self, instant: int) -> str | None:
        """Return a lease that needs capacity at an instant."""
        found = None
        for (window, _amounts), lease_id in self.booked:
            if window.start <= instant < window.end:
                found = lease_id or found
        return found


def register(connection: sa.Connection,
             servers: ty.Sequence[ty.Mapping[str, ty.Any]]) -> None:
    """Record servers as interruptible, before they are on any host.

    :param servers: the columns of :class:`models.InterruptibleServer`
    """
    connection.execute(models.InterruptibleServer.__table__.insert(), [
        {'safe_until': None, 'resume': False,
         'safe_by': one['created_at'] + one['safe_for'], **one}
        for one in servers])


def forget(connection: sa.Connection,
           server_ids: ty.Collection[str]) -> None:
    """Delete the records of servers that do not exist or were never built."""
    connection.execute(sa.delete(models.InterruptibleServer.__table__).where(
        _SERVERS.server_id.in_(server_ids)))


def update(database: api.Database, server_id: str, **values: ty.Any) -> None:
    """Change columns of :class:`models.InterruptibleServer`."""
    def attempt() -> None:
        with database.begin() as connection:
            connection.execute(
                sa.update(models.InterruptibleServer.__table__).where(
                    _SERVERS.server_id == server_id).values(values))

    database.retried(attempt)


def among(connection: sa.Connection,
          server_ids: ty.Collection[str]) -> set[str]:
    """Return which servers are interruptible."""
    return {*connection.scalars(sa.select(_SERVERS.server_id).where(
        _SERVERS.server_id.in_(server_ids)))}


def window_of(connection: sa.Connection, server_id: str, now: int,
              enrolled: bool = False) -> model.Window | None:
    """Return the window over which an interruptible server has to fit where
    it is placed now; None: it is not interruptible.

    :param enrolled: whether it is placed on a host that serves leases only
    """
    row = connection.execute(_WINDOW, {'server': server_id}).one_or_none()
    return None if row is None else model.Window(
        now, max(now, row.safe_by) + row.lead_time
        + enrolled * row.cleaning_time)


def make(connection: sa.Connection, now: int, host_id: int,
         values: ty.Mapping[str, ty.Any]) -> None:
    """Make a running server interruptible.

    :param values: see :func:`register`
    :raises LostRace: when another process decided about its host meanwhile
    """
    register(connection, [values])
    inventory.reclassify(connection, now, host_id, values['server_id'])


def make_ordinary(index: booking_index.Index, database: api.Database,
                  now: int, server_id: str) -> bool:
    """Make an interruptible server an ordinary one, if its capacity is free
    without an end, and its host does not serve leases only.

    :returns: whether it is ordinary now
    :raises Conflict: if it has capacity of two hosts
    :raises LostRace: when another process decided about its host meanwhile
    """
    with database.connection() as connection:
        seen = connection.scalar(_CHECKED_AT, {'server': server_id})
    with index.fresh() as timeline:
        ids = index.interruptible_servers().get(server_id, [])
        if len(ids) > 1:
            raise errors.Conflict(
                f'Server {server_id} stays interruptible, as it moves to '
                'another host, or its resize is not confirmed. Confirm or '
                'revert it, and try again.',
                errors.ConflictReason.IN_PROGRESS)
        host = index.hosts[ids[0]] if ids else None
        if host is not None and host.enrolled:
            return False
        if host is not None:
            with index.without_interruptible(host, server_id):
                rooms = timeline.fits(
                    model.Demand(host.interruptible[server_id][0]),
                    model.Window(now, model.FOREVER), [host.id])
                if not rooms[timeline.index(host.id)]:
                    return False
    with database.begin() as connection:
        if seen is not None and not connection.execute(_MADE_ORDINARY, {
                'server': server_id, 'seen': seen}).rowcount:
            # It was placed meanwhile.
            raise api.Outdated(f'server {server_id}')
        if host is not None:
            inventory.reclassify(
                connection, now, host.id, server_id, host.generation)
    return True


def conflicts(capacity: model.Resources, usage: model.Resources,
              servers: ty.Sequence[Server], booked: ty.Iterable[rule.Taken],
              now: int) -> dict[str, int]:
    """Return the first instant, from now on, at which each server no longer
    fits together with those after it, for lack of a class that it uses;
    servers that always fit are left out.

    Costs the number of bookings times that of servers.

    :param servers: in the order of their eviction
    """
    found: dict[str, int] = {}
    rests = [_taken(servers[number:]) for number in range(len(servers))]
    for instant, levels in _levels(booked, now):
        for one, rest in zip(servers, rests, strict=True):
            if one.id in found:
                continue
            lacking = rule.lacking(
                capacity, usage, model.summed((rest, levels)))
            if not lacking:
                # What remains for the next ones is less.
                break
            if any(one.resources.get(rc) for rc in lacking):
                found[one.id] = instant
        if len(found) == len(servers):
            break
    return found


def victims(capacity: model.Resources, usage: model.Resources,
            servers: ty.Sequence[Server], booked: ty.Iterable[rule.Taken],
            now: int, until: int) -> list[tuple[Server, int]]:
    """Return the servers that must leave their host so that the others fit
    until an instant, each with the instant at which its capacity is needed.

    They are the first ones in the order of eviction, less those that need not
    leave because the others suffice.

    :param servers: in the order of their eviction
    """
    booked = [*booked]
    found = conflicts(capacity, usage, servers, booked, now)
    chosen = [(one, found[one.id]) for one in servers
              if found.get(one.id, until) < until]
    instants = [dict(levels) for instant, levels in _levels(booked, now)
                if instant < until]
    # The last ones are the smallest.
    for entry in reversed(chosen[:]):
        less = [one for one in chosen if one is not entry]
        gone = {one.id for one, _instant in less}
        stay = _taken(one for one in servers if one.id not in gone)
        # What no server uses is not freed by an eviction.
        if not any(stay.get(rc) for levels in instants for rc in rule.lacking(
                capacity, usage, model.summed((stay, levels)))):
            chosen = less
    return chosen


def safety(host: HostSafety, leaving: ty.Collection[str], now: int,
           ) -> tuple[list[Server], dict[str, int]]:
    """Return the servers that stay on a host, and the first instant at which
    each of them no longer fits there (:func:`conflicts`).

    :param leaving: the servers that are being evicted from it
    """
    stay = [one for one in host.servers if one.id not in leaving]
    return stay, conflicts(host.capacity, host.usage, stay,
                           [taken for taken, _lease in host.booked], now)


def hosts(connection: sa.Connection, now: int,
          wanted: ty.Callable[[ty.Any], bool] = lambda row: True,
          ids: ty.Collection[int] | None = None) -> list[HostSafety]:
    """Return hosts with interruptible servers, from two statements.

    :param wanted: selects hosts by their rows
    :param ids: only of these; None: of all
    """
    query = _OF_HOSTS if ids is None else _OF_HOSTS.where(_HOSTS.id.in_(ids))
    rows = [row for row in connection.execute(query) if wanted(row)]
    booked = collections.defaultdict[
        int, list[tuple[rule.Taken, str | None]]](list)
    if rows:
        for one in connection.execute(_BOOKED, {
                'hosts': [row.id for row in rows], 'now': now}):
            booked[one.host_id].append(((rule.occupied(
                one.start_date, one.end_date, one.claimed_at, now),
                one.resources), one.lease_id))
    return [HostSafety(
        row.id, row.uuid, row.name, row.generation, row.capacity, row.usage,
        [Server(one, *row.interruptible[one]) for one in
         rule.eviction_order(row.interruptible, row.capacity)],
        booked[row.id]) for row in rows]


def _levels(booked: ty.Iterable[rule.Taken], now: int,
            ) -> ty.Iterator[tuple[int, dict[str, int]]]:
    """Yield what is booked from now on, and from each later change on."""
    last: dict[str, int] = {}
    began = False
    for instant, levels, _more in rule.levels(booked):
        if instant > now and not began:
            yield now, last
            began = True
        if instant >= now:
            began = True
            yield instant, levels
        last = {rc: amount for rc, amount in levels.items() if amount}
    if not began:
        yield now, last


def _taken(servers: ty.Iterable[Server]) -> dict[str, int]:
    return model.summed(one.resources for one in servers)
