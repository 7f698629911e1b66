# SPDX-License-Identifier: Apache-2.0

"""Reshuffle later leases over the hosts, so that one host is free for all of a
window in which enough hosts are free at each instant.

A lease of whole hosts that has lost one may find none that is free until its
end, as each is booked at another time. Leases that have not started may get
any hosts that fulfil their request. So their bookings are assigned anew: in
the order of their starts, each gets a host that is free then, its own if
possible. If all hosts are alike and only leases that have started are fixed,
this finds an assignment whenever there is one, within the limits below: it is
interval colouring, where any free colour is optimal.
"""

import typing as ty

from oslo_log import log as logging
from oslo_serialization import jsonutils
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import feed
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.capacity import rule
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import alternatives
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.lifecycle import demands
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: The most bookings that one reshuffle reads, and the most that it reassigns.
_READ, _MOVED = 20_000, 128
#: The pause after a search, in multiples of its duration: if it found nothing,
#: and otherwise.
_VAIN, _WORTH = 10, 1
#: Seconds after which a reservation that asked is no longer waited for, and
#: after which its requests and failed searches are forgotten.
_GONE, _FORGOTTEN = 60, 3600


class Reshuffle:
    """Frees hosts by reassigning later leases of whole hosts.

    :param wanted: determines the demands of reservations
    :param notify: called with an event type and a lease
    """

    def __init__(
            self, database: api.Database, clock: clocks.Clock,
            admission: admissions.Admission,
            reassigner: reassignment.Reassignment, wanted: demands.Demands,
            notify: views.Notify) -> None:
        self._database = database
        self._clock = clock
        self._rests_until = self._rests_since = 0.0
        #: By reservation id, the time of the last request, and of the last
        #: search that found nothing.
        self._asked: dict[str, float] = {}
        self._vain: dict[str, float] = {}
        self._admission = admission
        self._reassigner = reassigner
        self._wanted = wanted
        self._notify = notify

    def is_next(self, reservation_id: str) -> bool:
        """Return whether a search for a host may run for a reservation now.

        Searches pause after each one, since many reservations may lack hosts
        that do not exist. Of the reservations that asked since the last
        search, the least recently tried one is next. The request is
        remembered.
        """
        now = self._clock.elapsed()
        self._asked[reservation_id] = now
        if now < self._rests_until:
            return False
        mine = self._vain.get(reservation_id, 0.0)
        return not any(
            self._vain.get(one, 0.0) < mine and
            asked >= max(self._rests_since, now - _GONE)
            for one, asked in self._asked.items() if one != reservation_id)

    def free(self, reservation_id: str, demand: model.Demand,
             window: model.Window, avoid: ty.Collection[str],
             anywhere: model.Demand | None = None) -> bool:
        """Free one more host for all of a window.

        Reads the bookings of the candidate hosts from then on, at most
        :data:`_READ`. Costs O(B) for that, and O(H) for the new booking and
        for each that is reassigned.

        :param reservation_id: the reservation that needs the host
        :param demand: of whole hosts, as their resource type determines it
        :param avoid: the uuids of hosts that are not suitable
        :param anywhere: what it would need had it not started; bookings of the
            same demand may be reassigned. None: the same
        :returns: whether a host was freed; any lease may take it first
        """
        if not self.is_next(reservation_id):
            return False
        began, pause = self._clock.elapsed(), _VAIN
        try:
            done = self._free(demand, anywhere or demand, window, avoid)
            if done:
                pause = _WORTH
            return done
        except (api.Outdated, errors.NotFound):
            # Another process was faster: an assignment may exist soon.
            pause = _WORTH
            return False
        finally:
            self._rest(reservation_id, began, pause)

    def _rest(self, reservation_id: str, began: float, pause: int) -> None:
        """Pause searches after one."""
        now = self._clock.elapsed()
        if pause == _VAIN:
            self._vain[reservation_id] = now
        self._asked = {one: asked for one, asked in self._asked.items()
                       if asked >= now - _FORGOTTEN}
        self._vain = {one: when for one, when in self._vain.items()
                      if one in self._asked}
        self._rests_since = now
        self._rests_until = now + pause * (now - began)

    def _free(self, demand: model.Demand, anywhere: model.Demand,
              window: model.Window, avoid: ty.Collection[str]) -> bool:
        """Plan and write a reshuffle; return whether it freed a host.

        :raises Outdated: when another process was faster
        """
        now = self._clock.now()
        hosts = self._admission.candidates(anywhere)
        with self._database.reader() as session:
            rows = session.execute(_BOOKED, {
                'hosts': hosts, 'since': min(now, window.start),
                'most': _READ + 1}).all()
            overdue = feed.overdue(session.connection(), now)
        if len(rows) > _READ:
            LOG.info('Hosts of a lease that has lost one have more than %s '
                     'bookings: they are not reshuffled',
                     _READ)
            return False
        later = [row for row in rows
                 if reassignment.may_move(row, row.later, False, row)]
        alike = self._alike(anywhere, {row.reservation_id for row in later})
        later = [row for row in later if row.reservation_id in alike]
        stays = {row.id for row in rows} - {row.id for row in later}
        busy: dict[int, list[model.Window]] = {one: [] for one in hosts}
        for row in rows:
            if row.id in stays:
                busy[row.host_id].append(
                    model.Window(row.start_date, row.end_date))
        for row in overdue:
            if row.host_id in busy:
                busy[row.host_id].append(
                    model.Window(row.end_date, now + rule.OVERDUE))
        its = self._admission.candidates(demand)
        going = _deal(busy, later, window, {
            one for one in hosts if one not in its or
            self._admission.index.hosts[one].uuid in avoid}, {
            row.host_id for row in rows if row.outage == outages.FAILURE})
        # If no booking has to move, a host is free already.
        return self._carry_out(going, demand) if going else False

    def _alike(self, demand: model.Demand,
               reservation_ids: ty.Collection[str]) -> ty.Collection[str]:
        """Return the reservations that need the same hosts.

        The resource type is asked once for all that differ only in their
        lease. If it cannot answer now, they are left out.
        """
        kinds: dict[ty.Hashable, list[str]] = {}
        with self._database.reader() as session:
            for row in session.execute(_KINDS, {
                    'reservations': reservation_ids}):
                kinds.setdefault(
                    (row.resource_type, row.project_id, jsonutils.dumps(
                        [row.params, row.spec], sort_keys=True)),
                    []).append(row.id)
            firsts = {one.id: (one, resource_types.context_of(session, one))
                      for one in session.scalars(alternatives.RESERVATIONS, {
                          'reservations': [ids[0] for ids in kinds.values()],
                      }).unique()}
        alike: set[str] = set()
        for ids in kinds.values():
            if ids[0] in firsts and self._needs(*firsts[ids[0]]) == (
                    demand.kind()):
                alike.update(ids)
        return alike

    def _needs(self, reservation: models.Reservation,
               reserved: resource_types.ReservationContext) -> ty.Hashable:
        """Return the kind of demand of a reservation; None: it is refused, or
        cannot be determined now.
        """
        try:
            needs = self._wanted.of(reservation, reserved, None)
        except errors.CloudUnavailable:
            return None
        return None if isinstance(needs, refusals.Refusal) else needs.kind()

    def _carry_out(self, going: ty.Sequence[tuple[ty.Any, int]],
                   demand: model.Demand) -> bool:
        """Reassign the bookings if nothing has changed.

        :raises Outdated: when another process was faster
        :raises NotFound: when one of the leases no longer exists
        """
        by_lease: dict[tuple[str, int], list[tuple[ty.Any, int]]] = {}
        for row, host_id in going:
            by_lease.setdefault((row.lease_id, row.generation), []).append(
                (row, host_id))
        with self._admission.deciding():
            leases = self._reassigner.reassign(*(reassignment.Reassigned(
                lease_id, seen, {row.id: host_id for row, host_id in some},
                among=demand.among)
                for (lease_id, seen), some in by_lease.items()))
        if leases is None:
            raise api.Outdated('leases to be moved to other hosts')
        for lease in leases:
            with logs.about(lease['id'], lease['project_id']):
                LOG.info('Lease %s, which starts later, was moved off a host '
                         'for a lease that has lost its own', lease['id'])
            self._notify('lease.update', lease)
        return True


def _deal(busy: ty.Mapping[int, list[model.Window]],
          later: ty.Iterable[ty.Any], window: model.Window,
          barred: ty.Collection[int], failed: ty.Collection[int],
          ) -> list[tuple[ty.Any, int]] | None:
    """Return which bookings are reassigned, and to which hosts.

    :param busy: by host, the windows of the bookings that stay; extended
    :param later: the bookings there that may be reassigned
    :param window: in which one more host is needed, none of ``barred``
    :param failed: hosts to use only if there is no other, as it is not known
        when they recover
    :returns: None: there is no assignment, or it moves too many bookings
    """
    own: dict[int, list[int]] = {one: [] for one in busy}
    for row in later:
        own[row.host_id].append(row.start_date)
    going: list[tuple[ty.Any, int]] = []

    def is_free(host_id: int, its: model.Window) -> bool:
        return not any(its.overlaps(other) for other in busy[host_id])

    def put(its: model.Window, but: ty.Collection[int] = ()) -> int | None:
        """Take the free host whose next own booking starts last."""
        free = [(one not in failed,
                 min((when for when in own[one] if when >= its.start),
                     default=model.FOREVER), one)
                for one in busy if one not in but and is_free(one, its)]
        if not free:
            return None
        host_id = max(free)[2]
        busy[host_id].append(its)
        return host_id

    for its, _id, row in sorted([(window, 0, None), *(
            (model.Window(row.start_date, row.end_date), row.id, row)
            for row in later)], key=lambda item: (item[0].start, item[1])):
        if row is None:
            if put(its, barred) is None:
                return None
        elif is_free(row.host_id, its):
            busy[row.host_id].append(its)
        else:
            host_id = put(its)
            if host_id is None or len(going) == _MOVED:
                return None
            going.append((row, host_id))
    return going


_BOOKED = sa.select(
    models.Booking.id, models.Booking.host_id, models.Booking.server_id,
    models.Booking.start_date, models.Booking.end_date,
    models.Booking.claimed_at, models.Booking.dispatched_at,
    models.Booking.outage, models.Booking.reservation_id,
    models.Reservation.params.is_not(None).label('later'),
    models.Lease.id.label('lease_id'), models.Lease.status,
    models.Lease.deleted_at, models.Lease.generation,
).outerjoin(models.Reservation, models.Reservation.id ==
            models.Booking.reservation_id).outerjoin(
    models.Lease, models.Lease.id == models.Reservation.lease_id).where(
    models.Booking.host_id.in_(sa.bindparam('hosts', expanding=True)),
    models.Booking.end_date > sa.bindparam('since'),
    # Servers within a lease of hosts follow its hosts.
    ledger.TAKES,
).limit(sa.bindparam('most'))
_KINDS = sa.select(
    models.Reservation.id, models.Reservation.resource_type,
    models.Lease.project_id, models.Reservation.params,
    models.Reservation.spec).join(
    models.Lease, models.Lease.id == models.Reservation.lease_id).where(
    models.Reservation.id.in_(sa.bindparam('reservations', expanding=True)))
