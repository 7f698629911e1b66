# SPDX-License-Identifier: Apache-2.0

"""Hosts on which a server may be placed, and those to which it may move.

The answers come from memory (:mod:`blazar_core.capacity.booking_index`) and
serve a scheduler that chooses among hosts. The decision is the claim
(:mod:`blazar_core.capacity.scheduler_claims`).
"""

import bisect
import collections
import contextlib
import math
import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import booking_index
from blazar_core.capacity import interruptible
from blazar_core.capacity import rule
from blazar_core.capacity import selection
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models

#: In seconds, and in minutes.
_MINUTE, _YEAR = 60, 525_600
#: The bookings of the reservation of a server, and its parameters.
_OWN = sa.select(
    models.Booking.__table__, models.Reservation.__table__.c.params,
    models.Reservation.__table__.c.lease_id,
).join(models.Reservation.__table__).where(
    models.Booking.__table__.c.reservation_id.in_(
        sa.select(models.Booking.__table__.c.reservation_id).where(
            models.Booking.__table__.c.server_id == sa.bindparam('server'))))
#: The hosts of the bookings of servers.
_BOOKED = sa.select(models.Booking.server_id, models.Booking.host_id).where(
    models.Booking.server_id.in_(sa.bindparam('servers', expanding=True)))


class Eligible(ty.NamedTuple):
    """The hosts on which a server may be placed.

    ``booked`` is the uuid of the host of its booking. ``by_host`` has how many
    servers of that size may be placed on each host (by uuid) that was judged,
    and ``elsewhere`` how many on each other host that was asked about.
    ``candidates`` are the numbers of the candidates of a host that it may use;
    of other hosts, it may use all.
    """

    booked: str | None
    by_host: dict[str, int]
    elsewhere: float
    candidates: ty.Mapping[str, ty.Collection[int]] = {}


#: By the uuid of a host, the ways to place a server there: what each takes of
#: each provider, by uuid. Only for hosts where these differ in the kinds of
#: providers.
Candidates: ty.TypeAlias = ty.Mapping[
    str, ty.Sequence[ty.Mapping[str, model.Resources]]]


class ReservedLater(ty.NamedTuple):
    """Capacity that is free now, but reserved by leases for later.

    :ivar hosts: the number of hosts that have it
    :ivar until: the latest instant until which servers would fit
    """

    hosts: int
    until: int


class Eligibility:
    """Proposes where a server may be placed.

    A server with a booking may be placed on its booked host, and on any host
    where the rule holds until its booking ends; an interruptible one where it
    holds for as long as an eviction takes; any other only where it holds
    without an end. The servers of a reservation that are not placed yet may
    exchange their hosts: their bookings block others, not each other. Hosts
    without a booking of others are not judged: no reservation could be
    violated there, and the cloud knows better what fits.

    The servers of a reservation with an affinity are placed on the hosts that
    are booked for them; once placed, they may move to where the affinity still
    holds (:func:`_together`, :func:`_apart`).

    Hosts that serve leases only accept servers of a reservation that has all
    of the host, and servers with a booking on one of these hosts: on that
    host, and on the others that may be reserved. Those that are lent accept
    interruptible servers, too.

    :param index: the index that is searched
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 index: booking_index.Index) -> None:
        self._database = database
        self._clock = clock
        self._index = index

    def for_server(self, server_id: str, resources: model.Resources,
                   uuids: ty.Collection[str],
                   reservation_id: str | None = None,
                   candidates: Candidates | None = None) -> Eligible:
        """Return where a server, and those built with it, may be placed now.

        :param uuids: of the hosts that are asked about
        :param reservation_id: the reservation that the server claims to
            belong to; it may be placed nowhere unless it has a slot of this
            reservation, or the reservation has whole hosts
        """
        now = self._clock.now()
        with self._database.connection() as connection, \
                self._index.fresh(connection=connection) as timeline:
            mine, own, siblings = own_of(connection, server_id)
            apart = self._index.apart()
            if reservation_id is not None and (
                    reservation_id in apart.held or mine is None or
                    mine.reservation_id != reservation_id):
                # The holder of a whole host may place anything there.
                return Eligible(None, dict.fromkeys(
                    apart.held.get(reservation_id, ()), selection.MANY), 0)
            window = _window_of(
                connection, server_id, mine, now,
                bool(apart.lendable) and not apart.lendable.isdisjoint(uuids))
            evictable = mine is None and window.end < model.FOREVER
            affinity = mine and (mine.params or {}).get('affinity')
            with self._index.excluding(own), (
                    self._index.keeping_interruptible(window.end)
                    if evictable else contextlib.nullcontext()):
                # Nova asks about one server; its siblings may have to follow.
                by_host = self._fits_by_host(
                    timeline, resources, uuids, window,
                    everywhere=bool(affinity))
                fitting = self._fitting(timeline, resources, window,
                                        candidates or {})
            hosts = self._index.hosts
            booked = hosts.get(mine.host_id) if mine is not None else None
            uuid = booked.uuid if booked else None
            shut = _shut_to(booked, apart)
            if evictable:
                shut -= apart.lendable
            own_on = _own_on(own, hosts, shut, now)
            by_host |= dict.fromkeys(shut.intersection(uuids), 0)
            by_host |= {one: 0 for one, some in fitting.items() if not some}
            found = Eligible(uuid, _with_own(by_host, own_on, hosts), math.inf,
                             {one: some for one, some in fitting.items()
                              if some})
        if affinity is None:
            return found
        if mine.claimed_at is None:
            return _as_booked(found, siblings, own_on, hosts)
        return (_together if affinity else _apart)(
            found, mine, siblings, hosts)

    def for_unreserved(self, resources: model.Resources,
                       uuids: ty.Collection[str], lag: float = 0,
                       candidates: Candidates | None = None) -> Eligible:
        """Return where a server without a booking may be placed, at half the
        cost of :meth:`for_server`.

        :param uuids: of the hosts that are asked about
        :param lag: see :meth:`blazar_core.capacity.booking_index.Index.fresh`
        """
        with self._index.fresh(lag) as timeline:
            found = self._fits_for_ever(
                timeline, resources, uuids, self._clock.now())
            fitting = self._fitting(timeline, resources, model.Window(
                self._clock.now(), model.FOREVER), candidates or {})
        return found._replace(
            by_host=found.by_host | {
                one: 0 for one, some in fitting.items() if not some},
            candidates=fitting)

    def reserved_later(self, server_id: str, resources: model.Resources,
                       uuids: ty.Collection[str], count: int,
                       ) -> ReservedLater | None:
        """Return the capacity that servers without an end cannot use only
        because leases have reserved it for later.

        Costs one search for each bit of the number of minutes in a year.

        :param uuids: of the hosts that Nova would accept
        :param count: how many servers there are
        :returns: None: reservations are not the reason, or the server has a
            booking or is interruptible
        """
        now = self._clock.now()
        with self._database.connection() as connection, \
                self._index.fresh(connection=connection) as timeline:
            mine, _own, _siblings = own_of(connection, server_id)
            if mine is not None or interruptible.window_of(
                    connection, server_id, now) is not None:
                return None
            common = {*uuids} - self._index.apart().enrolled

            def fit(until: int) -> set[str]:
                by_host = self._fits_by_host(
                    timeline, resources, common, model.Window(now, until),
                    everywhere=True)
                return {one for one, fits in by_host.items() if fits} if (
                    sum(by_host.values()) >= count) else set()

            hosts = fit(now + _MINUTE) - fit(model.FOREVER)
            if not hosts:
                return None
            # They fit in the first minute, and not without an end.
            known = 1 + bisect.bisect(range(2, _YEAR), False, key=(
                lambda minutes: not fit(now + minutes * _MINUTE)))
        # Users write times in minutes.
        until = now + known * _MINUTE
        return ReservedLater(len(hosts), until - until % _MINUTE)

    def may_be_lent(self, server_ids: ty.Collection[str]) -> bool:
        """Return whether servers may use hosts that serve leases only,
        although they are in no reservation of whole hosts: interruptible ones,
        and those with a booking on one of these hosts.

        Costs as much for many servers as for one.

        :raises DatabaseUnavailable: when the database does not answer
        """
        with self._database.connection() as connection:
            booked = dict(connection.execute(
                _BOOKED, {'servers': [*server_ids]}).tuples().all())
            free = {*server_ids} - booked.keys()
            if free and interruptible.among(connection, free) != free:
                return False
        with self._index.fresh():
            hosts = self._index.hosts
            return bool(self._index.apart().enrolled) and all(
                one in hosts and hosts[one].enrolled
                for one in booked.values())

    def from_stale_index(self, resources: model.Resources,
                         uuids: ty.Collection[str]) -> Eligible:
        """Return where a server may be placed while the database is
        unavailable.

        The answer is based on the last state that this process knows, and
        treats the server as one without a lease, since that is unknown.

        :param uuids: of the hosts that are asked about
        """
        with self._index.stale_index.timeline() as timeline:
            if timeline is None:
                return Eligible(None, {}, math.inf)
            return self._fits_for_ever(
                timeline, resources, uuids, self._index.stale_index.now())

    def _fits_for_ever(self, timeline: timelines.Timeline,
                       resources: model.Resources,
                       uuids: ty.Collection[str], now: int) -> Eligible:
        """Return where a server fits without an end."""
        window = model.Window(now, model.FOREVER)
        return Eligible(None, self._fits_by_host(
            timeline, resources, uuids, window) | dict.fromkeys(
                self._index.apart().enrolled.intersection(uuids), 0),
            math.inf)

    def _fits_by_host(self, timeline: timelines.Timeline,
                      resources: model.Resources, uuids: ty.Collection[str],
                      window: model.Window, everywhere: bool = False,
                      ) -> dict[str, int]:
        """Return how many servers fit on each host that is judged: of those
        asked about, the ones with bookings, or all.
        """
        ids = self._index.ids_by_uuid
        asked = timeline.mask(ids[uuid] for uuid in uuids if uuid in ids)
        peaks = timeline.peaks(window, asked)
        judged = asked & (timeline.busy(peaks) | everywhere)
        rooms = timeline.fits(
            model.Demand(resources, count=selection.MANY), window, judged,
            peaks=peaks)
        return dict(zip(self._index.uuids()[judged].tolist(),
                        rooms[judged].tolist(), strict=True))

    def _fitting(self, timeline: timelines.Timeline,
                 resources: model.Resources, window: model.Window,
                 candidates: Candidates) -> dict[str, list[int]]:
        """Return which candidates of each host leave the providers that are
        booked for others.
        """
        alike: dict[frozenset[tuple[str, int]], list[tuple[str, int]]] = (
            collections.defaultdict(list))
        for uuid, ways in candidates.items():
            host = self._index.hosts.get(self._index.ids_by_uuid.get(uuid, 0))
            if host is None or host.providers is None:
                continue
            kinds = host.providers.kinds()
            for number, way in enumerate(ways):
                amounts: dict[str, int] = {}
                for provider, taken in way.items():
                    kind = kinds.get(provider, {})
                    for rc, amount in taken.items():
                        if rc in kind:
                            amounts[kind[rc]] = amount + amounts.get(
                                kind[rc], 0)
                if amounts:
                    alike[frozenset(amounts.items())].append((uuid, number))
        if not alike:
            return {}
        ids = self._index.ids_by_uuid
        asked = timeline.mask(ids[uuid] for uuid in candidates if uuid in ids)
        peaks = timeline.peaks(window, asked)
        judged = asked & timeline.busy(peaks)
        found: dict[str, list[int]] = {}
        for some, those in alike.items():
            rooms = timeline.fits(
                model.Demand({**resources, **dict(some)}), window, judged &
                timeline.mask(ids[uuid] for uuid, _number in those),
                peaks=peaks)
            for uuid, number in those:
                found.setdefault(uuid, [])
                place = timeline.index(ids[uuid])
                if rooms[place] or not judged[place]:
                    found[uuid].append(number)
        return found


def _window_of(connection: sa.Connection, server_id: str, mine: ty.Any,
               now: int, lent: bool) -> model.Window:
    """Return the window over which a server has to fit: to the end of its
    booking, until it can be evicted, or without an end.

    :param lent: whether it is placed on a host that serves leases only
    """
    if mine is not None:
        return model.Window(now, max(mine.end_date, now + rule.OVERDUE))
    return interruptible.window_of(connection, server_id, now, lent) or (
        model.Window(now, model.FOREVER))


def _shut_to(booked: model.Host | None, apart: booking_index.DedicatedHosts,
             ) -> frozenset[str]:
    """Return the uuids of the hosts that serve leases only and do not accept
    a server.

    :param booked: the host of the booking of a server
    """
    if booked is None or not booked.enrolled:
        return apart.enrolled
    return apart.closed - {booked.uuid}


def _own_on(own: ty.Iterable[ty.Any], hosts: ty.Mapping[int, model.Host],
            shut: frozenset[str], now: int) -> collections.Counter[int]:
    """Return how many bookings of its own a server has on each host, by id.

    :param shut: the uuids of the hosts that do not count
    """
    return collections.Counter(
        row.host_id for row in own if row.host_id in hosts and
        hosts[row.host_id].uuid not in shut and (
            row.claimed_at is not None or row.end_date > now))


def _with_own(by_host: dict[str, int], own_on: ty.Mapping[int, int],
              hosts: ty.Mapping[int, model.Host]) -> dict[str, int]:
    """Return how many servers fit on each judged host, by uuid: at least as
    many as have bookings there.

    :param own_on: how many have, by the host's id
    """
    own = {hosts[host_id].uuid: count for host_id, count in own_on.items()}
    return {uuid: max(room, own.get(uuid, 0))
            for uuid, room in by_host.items()}


def own_of(connection: sa.Connection, server_id: str,
           ) -> tuple[ty.Any, list[ty.Any], list[ty.Any]]:
    """Return the booking of a server, those that count as its own, and all
    other bookings of its reservation.
    """
    rows = connection.execute(_OWN, {'server': server_id}).all()
    mine = next((row for row in rows if row.server_id == server_id), None)
    siblings = [row for row in rows if row is not mine]
    return mine, [row for row in rows
                  if row is mine or row.claimed_at is None], siblings


# -- reservations with an affinity --------------------------------------------

def _as_booked(found: Eligible, siblings: ty.Iterable[ty.Any],
               own_on: ty.Mapping[int, int],
               hosts: ty.Mapping[int, model.Host]) -> Eligible:
    """Return where a server may be built: on a host that is booked for it, and
    to which none of its siblings is migrating.
    """
    awaited = {one.migrating_to for one in siblings}
    return Eligible(found.booked, {
        hosts[host_id].uuid: count for host_id, count in own_on.items()
        if host_id not in awaited}, 0, found.candidates)


def _apart(found: Eligible, mine: ty.Any, siblings: ty.Iterable[ty.Any],
           hosts: ty.Mapping[int, model.Host]) -> Eligible:
    """Return where a server with anti-affinity to its siblings may move."""
    _only, avoid = bound(False, mine, siblings)
    return found._replace(by_host={
        **found.by_host, **{hosts[host_id].uuid: 0 for host_id in avoid
                            if host_id in hosts}})


def _together(found: Eligible, mine: ty.Any, siblings: ty.Iterable[ty.Any],
              hosts: ty.Mapping[int, model.Host]) -> Eligible:
    """Return where a server with affinity to its siblings may move.

    The first one to leave their host moves to a host with capacity for all of
    them, the next ones follow it. Nova decides whether a server may leave the
    others at all.
    """
    siblings = [one for one in siblings if one.host_id is not None]
    only, _avoid = bound(True, mine, siblings)
    uuids = {hosts[host_id].uuid for host_id in only if host_id in hosts}
    return Eligible(found.booked, {
        uuid: room for uuid, room in found.by_host.items()
        if uuid == found.booked or (
            uuid in uuids if only else room > len(siblings))}, 0,
        found.candidates)


def bound(affinity: bool | None, mine: ty.Any, siblings: ty.Iterable[ty.Any],
          ) -> tuple[set[int], set[int]]:
    """Return how the siblings of a server restrict where it may move; the
    lease is locked.

    A slot without a server restricts nothing: the slots are exchanged.

    :param affinity: that of the reservation
    :param mine: the booking of the server
    :param siblings: all other bookings of the reservation
    :returns: the ids of the only hosts that it may move to (empty: any), and
        of those that it must not move to, because a sibling is there or
        migrating there
    """
    only: set[int | None] = set()
    avoid: set[int | None] = set()
    for one in siblings:
        if affinity is False and one.server_id is not None:
            avoid |= {one.host_id, one.migrating_to}
        elif affinity and one.claimed_at is not None:
            only.add(one.migrating_to or one.host_id)
    here = {None, mine.host_id}
    return (ty.cast('set[int]', only - here),
            ty.cast('set[int]', avoid - here))
