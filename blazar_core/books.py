#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Admission: who gets which part of which host over which window.

The rule, for every instant t of the wanted window::

    open_ended_usage(host) + booked(host, t) + wanted <= capacity(host)

Reading is free; deciding is guarded. A decision reads the hosts (and with
them their generations) *before* it reads their bookings, and then takes each
chosen host with ``UPDATE ... WHERE generation = :seen``. Whoever decided
about one of these hosts in between has moved its generation, so that the
update finds no row, the whole transaction is rolled back and run again: it
is always the later one who loses, and nothing of his is left.

The functions take a session, so that a caller can decide and write what
belongs to the decision in one transaction. What they cost is linear in the
bookings that end after the wanted start.
"""

import collections
import dataclasses
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.db import api
from blazar_core.db import models
from blazar_core import errors
from blazar_core import model

__all__ = [
    'Place',
    'booking_row',
    'choose',
    'disturb',
    'report',
    'retain',
    'rooms_for',
    'shelf',
    'take',
]

#: Seconds that a server which should be gone by now is expected to need yet.
OVERDUE = 60

#: Classes that a host may offer through a shared provider: where it reports
#: none of its own, Nova judges alone.
_SHARED = frozenset({'DISK_GB'})


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A host and the bookings on it that matter for a question."""

    host: model.Host
    bookings: tuple[model.Booking, ...]

    def room(self, demand: model.Demand, window: model.Window) -> int:
        """How many of the demand's servers fit, at most what it may use."""
        free = self.host.free()
        peak = _peaks(self.bookings, window)
        rooms = [(free.get(rc, 0) - peak.get(rc, 0)) // need
                 for rc, need in demand.resources.items()
                 if need and (rc in free or rc not in _SHARED)]
        return max(0, min([*rooms, demand.most_per_host()]))


def _peaks(bookings: ty.Iterable[model.Booking], window: model.Window,
           ) -> dict[str, int]:
    """The most that is booked at any instant of a window, by class."""
    steps: list[tuple[int, int, str]] = []
    for booking in bookings:
        if booking.window.overlaps(window):
            for rc, amount in booking.resources.items():
                steps.append((booking.window.start, amount, rc))
                steps.append((booking.window.end, -amount, rc))
    # At one instant what ends goes before what starts: windows are half-open.
    steps.sort()
    level: dict[str, int] = collections.defaultdict(int)
    peak: dict[str, int] = {}
    for _when, amount, rc in steps:
        level[rc] += amount
        peak[rc] = max(peak.get(rc, 0), level[rc])
    return peak


def choose(session: orm.Session, demand: model.Demand, window: model.Window,
           now: int, last: ty.Container[int] = ()) -> list[model.Host]:
    """One host for each server of a demand; decides nothing yet.

    :param last: ids of hosts to be taken only when no others will do
    :raises Refused: when they do not all fit
    """
    places = [place for place in shelf(session, window.start, now)
              if demand.allows(place.host)]
    rooms = [(place, place.room(demand, window)) for place in places]
    picked = _pick(rooms, demand, last)
    if picked is None:
        raise errors.Refused(_refusal(places, rooms, demand, window))
    return picked


def _pick(rooms: ty.Sequence[tuple[Place, int]], demand: model.Demand,
          last: ty.Container[int]) -> list[model.Host] | None:
    """The strategy: fill the fullest hosts first, so that others stay whole.
    """
    order = sorted(rooms, key=lambda item: (
        item[0].host.id in last, item[1], item[0].host.id))
    if demand.affinity is model.Affinity.SAME:
        order = [item for item in order if item[1] >= demand.count][:1]
    picked: list[model.Host] = []
    for place, room in order:
        picked += [place.host] * min(room, demand.count - len(picked))
    return picked if len(picked) == demand.count else None


def _fits(rooms: ty.Iterable[int], demand: model.Demand) -> int:
    """How many servers fit, given the room of each host."""
    if demand.affinity is model.Affinity.SAME:
        return min(demand.count, max(rooms, default=0))
    return min(demand.count, sum(rooms))


def _refusal(places: ty.Sequence[Place],
             rooms: ty.Iterable[tuple[Place, int]],
             demand: model.Demand, window: model.Window) -> model.Refusal:
    fits_now = _fits((room for _place, room in rooms), demand)
    next_start = _next_start(places, demand, window)
    if next_start is not None:
        reason = model.Reason.NO_ROOM
    elif places:
        reason = model.Reason.TOO_BIG
    else:
        reason = model.Reason.NO_HOST
    return model.Refusal(reason, demand.count, fits_now, next_start)


def _next_start(places: ty.Sequence[Place], demand: model.Demand,
                window: model.Window) -> int | None:
    """The earliest start after the wanted one at which all of it fits.

    Room only ever grows at the end of a booking, so those are the candidates.
    """
    for start in sorted({booking.window.end for place in places
                         for booking in place.bookings
                         if booking.window.end > window.start}):
        moved = window.moved_to(start)
        rooms = (place.room(demand, moved) for place in places)
        if _fits(rooms, demand) == demand.count:
            return start
    return None


def shelf(session: orm.Session, since: int, now: int) -> list[Place]:
    """Every host with its bookings that end after ``since``.

    Hosts are read first: see the top of this module.
    """
    hosts = [_host(row) for row in session.scalars(
        sa.select(models.Host).order_by(models.Host.id))]
    bookings = collections.defaultdict(list)
    for row in session.execute(_BOOKING.where(
            models.Booking.host_id.is_not(None),
            sa.or_(models.Booking.end_date > since,
                   models.Booking.running))):
        bookings[row.host_id].append(_booking(row, now))
    return [Place(host, tuple(bookings[host.id])) for host in hosts]


_BOOKING = sa.select(
    models.Booking.id, models.Booking.reservation_id, models.Booking.host_id,
    models.Booking.server_id, models.Booking.start_date,
    models.Booking.end_date, models.Booking.resources, models.Booking.running)


def _host(row: models.Host) -> model.Host:
    return model.Host(row.id, row.uuid, row.name, row.service_host,
                      row.capacity, row.usage, row.generation)


def _booking(row: ty.Any, now: int) -> model.Booking:
    """A booking as it counts: a server that overstays keeps its room."""
    end = row.end_date
    if row.running and end <= now:
        end = now + OVERDUE
    return model.Booking(row.id, row.reservation_id, row.host_id,
                         row.server_id, model.Window(row.start_date, end),
                         row.resources, row.running)


def booking_row(reservation_id: str, window: model.Window,
                resources: model.Resources, server_id: str, host: model.Host,
                ) -> models.Booking:
    """The row of a booking; whoever adds it has taken the host."""
    return models.Booking(
        reservation_id=reservation_id, host_id=host.id, server_id=server_id,
        start_date=window.start, end_date=window.end,
        resources=dict(resources), running=False)


def take(session: orm.Session, hosts: ty.Iterable[model.Host]) -> None:
    """Claim the right to decide about hosts, as they were read.

    They are taken in the order of their ids by everybody, so that two who
    want the same ones do not wait for each other in a ring.

    :raises LostRace: when the generation of one is no longer the one read
    """
    seen = {host.id: host.generation for host in hosts}
    for host_id, generation in sorted(seen.items()):
        taken = session.execute(
            sa.update(models.Host)
            .where(models.Host.id == host_id,
                   models.Host.generation == generation)
            .values(generation=models.Host.generation + 1),
            execution_options={'synchronize_session': False})
        if ty.cast('sa.CursorResult[ty.Any]', taken).rowcount != 1:
            raise api.LostRace(host_id)


def disturb(session: orm.Session, host_ids: ty.Iterable[int | None]) -> None:
    """Make everybody who is deciding about these hosts look again."""
    for host_id in sorted({one for one in host_ids if one is not None}):
        session.execute(
            sa.update(models.Host).where(models.Host.id == host_id)
            .values(generation=models.Host.generation + 1),
            execution_options={'synchronize_session': False})


def rooms_for(session: orm.Session, server_id: str,
              resources: model.Resources, now: int,
              ) -> tuple[str | None, dict[str, int]]:
    """Where a server, and those that come with it, may be placed now.

    A server with a booking may go to its booked host, and to any host where
    the rule holds until its booking ends; the others only where it holds for
    ever. The servers of one reservation that are not placed yet may change
    places: what is booked for them stands in the way of others, not in
    theirs. Hosts without a booking of somebody else are not judged: there is
    no promise that could be broken, and Nova knows better what fits.

    :returns: the uuid of the booked host, if there is one, and for each host
        (by uuid) that is judged, how many such servers may go there
    """
    mine = session.execute(_BOOKING.where(
        models.Booking.server_id == server_id)).first()
    window = model.Window(now, model.FOREVER)
    if mine is not None:
        window = model.Window(now, max(mine.end_date, now + OVERDUE))
    demand = model.Demand(resources, count=_MANY)
    booked_host = None
    judged = {}
    for place in shelf(session, now, now):
        if mine is not None and place.host.id == mine.host_id:
            booked_host = place.host.uuid
        own = [one for one in place.bookings if mine is not None and (
            one.server_id == server_id or not one.running and
            one.reservation_id == mine.reservation_id)]
        others = tuple(one for one in place.bookings if one not in own)
        if any(one.window.overlaps(window) for one in others):
            room = Place(place.host, others).room(demand, window)
            judged[place.host.uuid] = max(room, len(own))
    return booked_host, judged


#: More servers than any request has.
_MANY = 2 ** 31


def report(session: orm.Session, now: int, uuid: str, name: str,
           service_host: str, capacity: model.Resources,
           allocations: ty.Mapping[str, model.Resources]) -> bool:
    """Write down what a host has and what runs there.

    What runs there under a booking on this very host is no open-ended usage;
    when it has another size than its booking (it was resized), the booking
    follows.

    :param allocations: resources by consumer (server), as placement has them
    :returns: whether anything was new
    :raises LostRace: when somebody decided about the host meanwhile
    """
    row = session.scalars(sa.select(models.Host).where(
        models.Host.uuid == uuid)).one_or_none()
    if row is None:
        session.add(models.Host(
            uuid=uuid, name=name, service_host=service_host,
            capacity=dict(capacity), generation=0, updated_at=now,
            usage=_sum(allocations.values())))
        return True
    leased = {booking.server_id: booking for booking in session.scalars(
        sa.select(models.Booking).where(models.Booking.host_id == row.id))}
    usage = _sum(amounts for consumer, amounts in allocations.items()
                 if consumer not in leased)
    resized = [(booking, dict(allocations[booking.server_id]))
               for booking in leased.values() if booking.running
               and booking.resources != allocations.get(
                   booking.server_id, booking.resources)]
    new = (name, service_host, dict(capacity), usage)
    if new == (row.name, row.service_host, row.capacity, row.usage) and (
            not resized):
        return False
    take(session, [_host(row)])
    for booking, amounts in resized:
        booking.resources = amounts
    row.name, row.service_host, row.capacity, row.usage = new
    row.updated_at = now
    return True


def retain(session: orm.Session, uuids: ty.Collection[str], now: int,
           ) -> list[str]:
    """Take the capacity from hosts that Nova does not have any more.

    :returns: their names
    """
    gone = []
    for row in session.scalars(sa.select(models.Host).where(
            models.Host.uuid.not_in(uuids)).order_by(models.Host.id)):
        if row.capacity:
            take(session, [_host(row)])
            row.capacity, row.updated_at = {}, now
            gone.append(row.name)
    return gone


def _sum(amounts: ty.Iterable[model.Resources]) -> dict[str, int]:
    total: dict[str, int] = collections.defaultdict(int)
    for resources in amounts:
        for rc, amount in resources.items():
            total[rc] += amount
    return dict(total)
