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

"""Other hosts for leases that come later, so that one is free for all of a
time in which enough are at each instant.

A lease of whole hosts that has lost one may find none that is free until its
end, as each is booked at another time of it. Leases that have not begun do
not mind which hosts they get, as long as these are what they asked for. So
they are dealt out anew: in the order in which they begin, each booking gets a
host that is free then, its own if that is. Where all hosts are alike and only
what has begun is where it is, this finds a way whenever there is one: it is
the colouring of intervals, in which no colour can be wrong.
"""

import typing as ty

from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import ledger
from blazar_core.books import news
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import binding as bindings
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import facts
from blazar_core import resources

__all__ = ['Rearranging']

LOG = logging.getLogger(__name__)

#: Of so many bookings at most it is looked how they could be dealt out, and
#: so many get another host at most.
_READ, _MOVED = 20_000, 64


class Rearranging:
    """Has leases of whole hosts that come later leave hosts.

    :param wanted: says what reservations need
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, binding: bindings.Binding,
                 wanted: demands.Demands,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._rests_until = 0.0
        self._admission = admission
        self._binding = binding
        self._wanted = wanted
        self._notify = notify

    def free(self, demand: model.Demand, window: model.Window,
             avoid: ty.Collection[str]) -> bool:
        """Have one more host fall free for all of a window.

        Reads what is booked from then on, at most :data:`_READ` of it. Costs
        O(H) for the new one and for each that gets another host. Where it has
        found nothing it rests for ten times as long as that took: many may
        lack hosts for which there are none.

        :param demand: of whole hosts, as their type has said it
        :param avoid: the uuids of hosts that will not do
        :returns: whether one has, for who is the first to take it
        """
        began = self._clock.elapsed()
        if not demand.whole or began < self._rests_until:
            return False
        if self._free(demand, window, avoid):
            return True
        now = self._clock.elapsed()
        self._rests_until = now + 10 * (now - began)
        return False

    def _free(self, demand: model.Demand, window: model.Window,
              avoid: ty.Collection[str]) -> bool:
        hosts = self._admission.candidates(demand)
        with self._database.reader() as session:
            rows = session.execute(_BOOKED, {
                'since': window.start, 'most': _READ + 1}).all()
            if len(rows) > _READ:
                return False
            overdue = news.overdue(session.connection(), window.start)
            alike = self._alike(session, demand, {
                row.reservation_id for row in rows
                if row.host_id in hosts and bindings.may_move(
                    row, row.later, False, row)})
        busy: dict[int, list[tuple[int, int]]] = {one: [] for one in hosts}
        later = []
        for row in rows:
            if row.reservation_id in alike and bindings.may_move(
                    row, row.later, False, row):
                later.append(row)
            elif row.host_id in busy:
                busy[row.host_id].append((row.start_date, row.end_date))
        for row in overdue:
            if row.host_id in busy:
                busy[row.host_id].append(
                    (row.end_date, window.start + ledger.OVERDUE))
        barred = {one for one in hosts
                  if self._admission.index.hosts[one].uuid in avoid}
        going = _deal(busy, later, window, barred)
        # Where nobody has to go, a host is free already.
        return bool(going) and self._carry_out(going or [], demand)

    def _alike(self, session: orm.Session, demand: model.Demand,
               reservation_ids: ty.Collection[str]) -> ty.Collection[str]:
        """The reservations that need the same hosts. The type is asked once
        for all that differ in nothing but their lease.
        """
        said: dict[ty.Hashable, bool] = {}
        alike = set()
        for one in session.scalars(_RESERVATIONS, {
                'reservations': reservation_ids}):
            key = (one.resource_type, one.lease.project_id,
                   jsonutils.dumps([one.params, one.spec], sort_keys=True))
            if key not in said:
                needs = self._wanted.of(
                    one, resources.reserved(session, one), None)
                said[key] = not isinstance(needs, refusals.Refusal) and (
                    needs.kind() == demand.kind())
            if said[key]:
                alike.add(one.id)
        return alike

    def _carry_out(self, going: ty.Sequence[tuple[ty.Any, int]],
                   demand: model.Demand) -> bool:
        """Bind them there, if nothing has changed; says whether."""
        by_lease: dict[tuple[str, int], list[tuple[ty.Any, int]]] = {}
        for row, host_id in going:
            by_lease.setdefault((row.lease_id, row.generation), []).append(
                (row, host_id))
        try:
            with self._admission.deciding():
                leases = self._binding.rebind(*(bindings.Move(
                    lease_id, seen, {row.id: host_id for row, host_id in some},
                    among=demand.among, before={
                        row.host_id for row, _host_id in some})
                    for (lease_id, seen), some in by_lease.items()))
        except (api.Outdated, errors.NotFound):
            return False
        for lease in leases or ():
            LOG.info('Lease %s, which comes later, has left a host for one '
                     'that has lost its own', lease['id'])
            self._notify('lease.update', lease)
        return leases is not None


def _deal(busy: ty.Mapping[int, list[tuple[int, int]]],
          later: ty.Iterable[ty.Any], window: model.Window,
          barred: ty.Collection[int]) -> list[tuple[ty.Any, int]] | None:
    """Which bookings get which other hosts.

    :param busy: by host, what is booked there and stays; it grows
    :param later: the bookings that may go
    :param window: when one more host is needed, and none of those that are
        barred
    :returns: None: there is no such way, or too many would go
    """
    own: dict[int, list[int]] = {one: [] for one in busy}
    for row in later:
        own.setdefault(row.host_id, []).append(row.start_date)
    going: list[tuple[ty.Any, int]] = []

    def is_free(host_id: int, start: int, end: int) -> bool:
        return all(end <= since or until <= start
                   for since, until in busy[host_id])

    def put(start: int, end: int, but: ty.Collection[int] = ()) -> int | None:
        """On a host that nobody else wants for as long as possible."""
        free = [(min((when for when in own[one] if when >= start),
                     default=model.FOREVER), one)
                for one in busy if one not in but and is_free(one, start, end)]
        if not free:
            return None
        busy[max(free)[1]].append((start, end))
        return max(free)[1]

    for start, _id, row in sorted([(window.start, 0, None), *(
            (row.start_date, row.id, row) for row in later)],
            key=lambda item: item[:2]):
        if row is None:
            if put(start, window.end, barred) is None:
                return None
        elif row.host_id in busy and is_free(
                row.host_id, start, row.end_date):
            busy[row.host_id].append((start, row.end_date))
        else:
            host_id = put(start, row.end_date)
            if host_id is None or len(going) == _MOVED:
                return None
            going.append((row, host_id))
    return going


_BOOKED = sa.select(
    models.Booking.id, models.Booking.host_id, models.Booking.server_id,
    models.Booking.start_date, models.Booking.end_date,
    models.Booking.placed_at, models.Booking.sent_at,
    models.Booking.reservation_id,
    models.Reservation.params.is_not(None).label('later'),
    models.Lease.id.label('lease_id'), models.Lease.status,
    models.Lease.deleted_at, models.Lease.generation,
).outerjoin(models.Reservation, models.Reservation.id ==
            models.Booking.reservation_id).outerjoin(
    models.Lease, models.Lease.id == models.Reservation.lease_id).where(
    models.Booking.host_id.is_not(None),
    models.Booking.end_date > sa.bindparam('since'),
    # Servers within a lease of hosts go where that goes.
    ledger.TAKES,
).order_by(models.Booking.end_date).limit(sa.bindparam('most'))
_RESERVATIONS = sa.select(models.Reservation).where(
    models.Reservation.id.in_(sa.bindparam('reservations', expanding=True)),
).options(orm.joinedload(models.Reservation.lease),
          orm.selectinload(models.Reservation.bookings))
