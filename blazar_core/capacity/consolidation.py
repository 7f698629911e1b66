# SPDX-License-Identifier: Apache-2.0

"""Collect what a plan of migrations needs to know of the hosts.

:mod:`blazar_core.capacity.move_planner` plans on this input. The generations
of the hosts come with it, so that a plan based on old data is not written.
"""

import collections
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import ledger
from blazar_core.capacity import move_planner
from blazar_core.capacity import provider_limits
from blazar_core.capacity import timelines
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

#: The parts of a whole host, of which each server takes one: if all are free,
#: the host is empty. More than there are servers on any host.
_PARTS = 2 ** 20


class PlannerInput(ty.NamedTuple):
    """The hosts for all workloads, and the servers there; for whole hosts,
    those that serve leases only.

    :ivar wishes: the demands, with the ``hosts`` that they may use
    :ivar ordinary: servers without a lease, as if all of them could move;
        empty for whole hosts
    :ivar leased: servers of leases that last at least as long as the demand;
        for whole hosts, all servers of leases
    :ivar generations: of the hosts, by id
    :ivar ids: of the hosts, by uuid
    """

    places: list[move_planner.PlannedHost]
    wishes: list[move_planner.PlannedDemand]
    ordinary: list[move_planner.Movable]
    leased: list[move_planner.Movable]
    generations: dict[int, int]
    ids: dict[str, int]


def planner_input(
        database: api.Database, now: int, admission: admissions.Admission,
        demands: ty.Sequence[model.Demand], window: model.Window,
        instead_of: ty.Sequence[ty.Any], excluded: ty.Collection[str],
        coming: ty.Iterable[tuple[int, model.Resources]]) -> PlannerInput:
    """Read the input of a plan for demands of servers or of whole hosts.

    :param window: how long the capacity is needed, from now on
    :param instead_of: rows of bookings that would be removed in exchange
    :param excluded: servers that are not to be moved
    :param coming: what is about to arrive on hosts, by their ids, and may not
        be there yet
    """
    whole = any(one.whole for one in demands)
    # What a server takes, and its part of a whole host.
    part = {model.HOST: 1} if whole else {}
    arriving: dict[int, collections.Counter[str]] = (
        collections.defaultdict(collections.Counter))
    for host_id, amounts in coming:
        arriving[host_id].update({**amounts, **part})
    with admission.selector.asked_for(demands, 0, instead_of) as (
            timeline, demands):
        apart, hosts = admission.index.apart(), admission.index.hosts
        # No server may move to the other hosts.
        serve = apart.reservable if whole else ~apart.serving
        ids = [host_id for host_id, may in zip(
            timeline.ids, serve, strict=True)
            if may and hosts[host_id].capacity]
        places = [_place(timeline, hosts[host_id], window, arriving[host_id])
                  for host_id in ids]
        wishes = [_wish(timeline, one, admission.selector.allowed(
            timeline, one), ids) for one in demands]
        generations = {one: hosts[one].generation for one in ids}
        uuids = {hosts[one].uuid: one for one in ids}
    wanted = {host_id for one in wishes for host_id in one.hosts}
    with database.connection() as connection:
        # Hosts that serve leases only accept no server without one.
        ordinary = [] if whole else _ordinary(
            connection, wanted, generations, now, excluded)
        leased = [move_planner.Movable(
            row.server_id, row.host_id, {**row.resources, **part})
            for row in connection.execute(_LEASED, {
                'hosts': [*wanted], 'end': now if whole else window.end})
            if row.resources and row.server_id not in excluded and
            (row.params or {}).get('affinity') is None]
        if whole:
            taken = _taken(connection, ids, window, now, [
                row.id for row in instead_of])
            places = [one._replace(
                within={**one.within, model.HOST: _PARTS - taken[one.id] -
                        arriving[one.id][model.HOST]},
                beyond={**one.beyond, model.HOST: _PARTS})
                for one in places]
    return PlannerInput(places, wishes, ordinary, leased, generations,
                        uuids)


def _place(timeline: timelines.Timeline, host: model.Host,
           window: model.Window,
           coming: model.Resources) -> move_planner.PlannedHost:
    def free(window: model.Window) -> dict[str, int]:
        booked = timeline.peak(host.id, window)
        return {rc: amount - host.usage.get(rc, 0) - booked.get(rc, 0) - (
            coming.get(rc, 0))
            for rc, amount in host.capacity.items()}

    within = free(window)
    return move_planner.PlannedHost(host.id, within, within if (
        window.end >= model.FOREVER) else free(
            model.Window(window.end, model.FOREVER)))


def _ordinary(connection: sa.Connection, hosts: ty.Collection[int],
              generations: ty.Mapping[int, int], now: int,
              excluded: ty.Collection[str]) -> list[move_planner.Movable]:
    """Return servers without a lease on these hosts."""
    return [move_planner.Movable(server_id, row.id, amounts)
            for row in connection.execute(_CONSUMERS, {'hosts': [*hosts]})
            # If the host has changed since, the plan would be outdated.
            if row.generation == generations[row.id]
            for server_id, (amounts, told) in sorted(
                (row.consumers or {}).items())
            if any(amounts.values()) and told <= now and
            server_id not in excluded]


def _taken(connection: sa.Connection, ids: ty.Collection[int],
           window: model.Window, now: int, instead_of: ty.Sequence[int],
           ) -> collections.Counter[int]:
    """Return how many parts of each host are taken during a window."""
    taken = collections.Counter({row.host_id: row.count for row in (
        connection.execute(_THERE, {
            'hosts': [*ids], 'now': now, 'end': window.end,
            'own': [*instead_of]}))})
    for row in connection.execute(_CONSUMERS, {'hosts': [*ids]}):
        # As long as it is unknown which servers run there, count one.
        taken[row.id] += any(row.usage.values()) if (
            row.consumers is None) else sum(
                any(amounts.values())
                for amounts, _told in row.consumers.values())
    return taken


def _wish(timeline: timelines.Timeline, demand: model.Demand, allowed: ty.Any,
          ids: ty.Collection[int]) -> move_planner.PlannedDemand:
    usable = set(ids) if allowed is None else {
        host_id for host_id, may in zip(timeline.ids, allowed, strict=True)
        if may} & set(ids)
    limits = _limits(timeline, demand, usable)
    return move_planner.PlannedDemand(
        {model.HOST: _PARTS} if demand.whole else demand.resources,
        demand.count, demand.most_per_host(),
        frozenset(one for one in usable if limits.get(one, (1,))[0]),
        demand.affinity is model.Affinity.SAME,
        tuple(timeline.units.ways(demand)), limits)


def _limits(timeline: timelines.Timeline, demand: model.Demand,
            ids: ty.Iterable[int],
            ) -> ty.Mapping[int, tuple[int, model.Resources]]:
    """Return the limits that units set on hosts, see
    :class:`.move_planner.PlannedDemand`; hosts without any are left out.
    """
    most, lost = timeline.units.limits(demand, len(timeline))
    if most is None:
        return {}
    found = {}
    for host_id in ids:
        place = timeline.index(host_id)
        left = {rc: int(amount[place]) for rc, amount in lost.items()
                if amount[place]}
        if left or most[place] < provider_limits.UNLIMITED:
            found[host_id] = int(most[place]), left
    return found


_HOSTS, _BOOKINGS = models.Host.__table__, models.Booking.__table__
_CONSUMERS = sa.select(
    _HOSTS.c.id, _HOSTS.c.generation, _HOSTS.c.usage, _HOSTS.c.consumers,
).where(_HOSTS.c.id.in_(sa.bindparam('hosts', expanding=True))).order_by(
    _HOSTS.c.id)
_LEASED = sa.select(
    _BOOKINGS.c.server_id, _BOOKINGS.c.host_id, _BOOKINGS.c.resources,
    models.Reservation.__table__.c.params,
).join(models.Reservation.__table__).join(models.Lease.__table__).where(
    _BOOKINGS.c.host_id.in_(sa.bindparam('hosts', expanding=True)),
    _BOOKINGS.c.server_id.is_not(None), _BOOKINGS.c.running,
    _BOOKINGS.c.migrating_to.is_(None), ledger.TAKES,
    _BOOKINGS.c.end_date >= sa.bindparam('end'),
    models.Lease.status == states.Lease.ACTIVE,
    models.Lease.deleted_at.is_(None)).order_by(_BOOKINGS.c.id)
#: The number of bookings of each host during a window.
_THERE = sa.select(
    _BOOKINGS.c.host_id, sa.func.count().label('count'),
).where(
    _BOOKINGS.c.host_id.in_(sa.bindparam('hosts', expanding=True)),
    _BOOKINGS.c.id.not_in(sa.bindparam('own', expanding=True)),
    _BOOKINGS.c.start_date < sa.bindparam('end'),
    ledger.is_held(sa.bindparam('now'))).group_by(_BOOKINGS.c.host_id)
