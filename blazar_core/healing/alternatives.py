# SPDX-License-Identifier: Apache-2.0

"""Alternative hosts for bookings that do not fit on their hosts."""

import collections
import dataclasses
import itertools
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import hosted_servers
from blazar_core.leases import reassignment
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle.server_moves import Obstacle
from blazar_core.plugins import resource_types


class Case(ty.NamedTuple):
    """A reservation with bookings that need another host.

    :ivar rows: the bookings that may be reassigned
    :ivar staying: the bookings that keep their host
    """

    reservation: models.Reservation
    reserved: resource_types.ReservationContext
    lease: models.Lease
    encrypted: str | None
    rows: list[models.Booking]
    staying: list[models.Booking]

    def split(self, ids: ty.Collection[int],
              demand: model.Demand | refusals.Refusal,
              ) -> tuple[list[models.Booking], list[models.Booking]]:
        """Return the bookings to reassign if some of them lose their host, and
        those that stay.

        :param ids: those that lose it
        """
        if isinstance(demand, model.Demand) and (
                demand.affinity is model.Affinity.SAME):
            # All of them are moved, or none.
            return self.rows, self.staying
        return [row for row in self.rows if row.id in ids], [
            *self.staying, *(row for row in self.rows if row.id not in ids)]


class Together(ty.NamedTuple):
    """Reassignments that are decided in one transaction, not written yet.

    :ivar coming: the future states of the bookings
    :ivar leaving: their rows, as they are now
    """

    coming: list[booking_index.BookingRow]
    leaving: list[models.Booking]


#: By the id of a booking of a reservation, the host that lacks capacity for it
#: (None: the booking has no host).
Lost: ty.TypeAlias = dict[int, int | None]


class Alternatives:
    """Finds other hosts for bookings; reassigns nothing.

    :param wanted: determines the demands of reservations
    """

    def __init__(self, database: api.Database,
                 admission: admissions.Admission, wanted: demands.Demands,
                 ) -> None:
        self._database = database
        self._admission = admission
        self._demands = wanted

    def plan(self, case: Case, lost: Lost,
             together: Together | None = None, lag: float = 0,
             ) -> reassignment.Reassigned | None:
        """Plan the reassignment of bookings of a reservation.

        :param together: reassignments that are decided in the same transaction
        :param lag: seconds by which the index may be stale in the first search
        :returns: None: all bookings keep their hosts
        """
        # Another process may have reassigned or dispatched some of them.
        ids = {row.id for row in case.rows
               if row.id in lost and row.host_id == lost[row.id]}
        if not ids:
            return None
        demand = self._demand(case)
        rows, staying = case.split(ids, demand)
        hosts: list[int] = []
        if isinstance(demand, refusals.Refusal):
            refusal: refusals.Refusal | None = dataclasses.replace(
                demand, wanted=len(rows))
        else:
            hosts, refusal = self._search(
                self._beside(demand, rows, staying), rows, case.lease,
                together or Together([], []), lag)
        bound = dict(itertools.zip_longest((row.id for row in rows), hosts))
        among, groups = (None, ()) if isinstance(
            demand, refusals.Refusal) else (demand.among, demand.groups)
        if all(row.host_id == bound[row.id] and self._fits_as_booked(
                row, groups, case.lease) for row in rows):
            return None
        return reassignment.Reassigned(
            case.lease.id, case.lease.generation, bound,
            '' if refusal is None else refusal.sentence(), among, groups)

    def _fits_as_booked(
            self, row: models.Booking, groups: tuple[model.Group, ...],
            lease: models.Lease) -> bool:
        """Return whether a booking that keeps its host also keeps the kinds of
        its providers; not if these are missing and others will do.
        """
        host = self._admission.index.hosts.get(row.host_id or 0)
        return host is None or model.as_requested(
            row.resources, groups) == row.resources or bool(
                self._admission.fits(model.Demand(
                    row.resources, hosts=frozenset([host.uuid]), among=None),
                    lease.booked(), [row]))

    def whole(self, case: Case) -> tuple[
            model.Demand, model.Window] | None:
        """Return the demand for whole hosts of a reservation, and its window.

        :returns: None: it needs no whole hosts, or there are none for it
        """
        demand = self._demand(case)
        if isinstance(demand, refusals.Refusal) or not demand.whole:
            return None
        return demand, case.lease.booked()

    def _demand(self, case: Case) -> model.Demand | refusals.Refusal:
        return self._demands.of(
            case.reservation, case.reserved, case.encrypted)

    def add(self, together: Together, case: Case,
            move: reassignment.Reassigned) -> None:
        """Add a planned reassignment to those of the same transaction."""
        for row in case.rows:
            if row.id not in move.hosts or (
                    row.host_id == move.hosts[row.id]):
                continue
            together.leaving.append(row)
            host = self._admission.index.hosts.get(move.hosts[row.id] or 0)
            if host is not None:
                together.coming.append(booking_index.BookingRow(
                    host.id, row.start_date, row.end_date,
                    host.capacity if case.reservation.whole
                    else self._taken(row.resources, move.groups)))

    def _taken(self, booked: model.Resources,
               groups: tuple[model.Group, ...]) -> model.Resources:
        """Return what a booking takes of its new host, by kind of provider
        if it has no choice.
        """
        amounts = model.as_requested(booked, groups)
        with self._admission.index.fresh(admissions.LAG) as timeline:
            way, *others = timeline.units.ways(
                model.Demand(amounts, groups=groups))
        return amounts if others else {**amounts, **way}

    def obstacles(self, reservation_id: str, ids: ty.Collection[int],
                  uuid: str) -> dict[int, str]:
        """Return why bookings of a reservation would not be reassigned if
        their host became unavailable.

        :param ids: the bookings on the host of this uuid
        :returns: sentences, by the ids of the bookings that would stay
        :raises CloudUnavailable: when the demand cannot be determined now
        """
        case = self.case(reservation_id)
        rows = [] if case is None else [
            row for row in case.rows if row.id in ids]
        found: dict[int, str] = dict.fromkeys(
            set(ids) - {row.id for row in rows}, Obstacle.IN_USE)
        if case is None or not rows:
            return found
        outer = hosted_servers.of(case.reservation)
        if outer is not None:
            return found | (dict.fromkeys(
                (row.id for row in rows),
                'It belongs to a lease of the whole host.',
            ) if self._stays(outer, uuid) else {})
        demand = self._demand(case)
        if isinstance(demand, refusals.Refusal):
            return found | {row.id: demand.sentence() for row in rows}
        rows, staying = case.split(ids, demand)
        demand = self._beside(demand, rows, staying)
        fits = self._admission.fits(
            dataclasses.replace(demand, avoid=demand.avoid | {uuid}),
            case.lease.booked(), rows)
        if demand.affinity is model.Affinity.SAME and fits < len(rows):
            fits = 0
        return found | {row.id: Obstacle.NO_CAPACITY
                        for row in rows[fits:] if row.id in ids}

    def _stays(self, reservation_id: str, uuid: str) -> bool:
        """Return whether a reservation of hosts keeps the host of this uuid if
        that host becomes unavailable.
        """
        with self._database.reader() as session:
            ids = session.scalars(
                sa.select(models.Booking.id).join(models.Host).where(
                    models.Booking.reservation_id == reservation_id,
                    models.Host.uuid == uuid)).all()
        return bool(self.obstacles(reservation_id, ids, uuid))

    def case(self, reservation_id: str) -> Case | None:
        return self.cases([reservation_id]).get(reservation_id)

    def cases(self, reservation_ids: ty.Collection[str]) -> dict[str, Case]:
        """Return the reservations that exist, by their ids."""
        cases = {}
        with self._database.reader() as session:
            found = session.scalars(RESERVATIONS, {
                'reservations': reservation_ids}).unique().all()
            deferred = dispatch.encrypted_call(
                session, {one.lease_id for one in found})
            for one in found:
                reserved = resource_types.context_of(session, one)
                rows = [row for row in one.bookings if reassignment.may_move(
                    row, not one.booted, one.lease_id in deferred or bool(
                        reserved.kept), one.lease)]
                build = deferred.get(one.lease_id)
                cases[one.id] = Case(
                    one, reserved, one.lease, build and build.call, rows,
                    [row for row in one.bookings if row not in rows])
        return cases

    def _beside(self, demand: model.Demand, rows: ty.Sequence[models.Booking],
                staying: ty.Iterable[models.Booking]) -> model.Demand:
        """Return the demand of some bookings of a reservation, given its
        others.

        The resources are those that are booked, even if the resource type
        would ask for others by now.
        """
        known = self._admission.index.hosts
        here = collections.Counter(known[row.host_id].uuid for row in staying
                                   if row.host_id in known)
        demand = dataclasses.replace(
            demand, resources=model.WHOLE if demand.whole
            else model.as_requested(rows[0].resources, demand.groups),
            count=len(rows), least=None)
        if demand.affinity is model.Affinity.SAME and here:
            return dataclasses.replace(
                demand, hosts=frozenset(here) if demand.hosts is None
                else demand.hosts & here.keys())
        if demand.affinity is model.Affinity.DIFFERENT:
            return dataclasses.replace(
                demand, avoid=demand.avoid | here.keys())
        return dataclasses.replace(demand, members=here + collections.Counter(
            demand.members))

    def _search(self, demand: model.Demand, rows: ty.Sequence[models.Booking],
                lease: models.Lease, together: Together,
                lag: float) -> tuple[list[int], refusals.Refusal | None]:
        """Return hosts for as many bookings as possible, and the refusal of
        the others.
        """
        # It includes what has passed: a host may have bookings of an ended
        # lease that are not closed.
        window, refusal = lease.booked(), None
        last = self._admission.crowded()
        gone = [*rows, *together.leaving]
        if any(row.host_id is not None for row in rows):
            # Bookings that have just lost their host mostly fit elsewhere.
            try:
                return self._admission.pick(
                    demand, window, last=last, instead_of=gone, lag=lag,
                    coming=together.coming), None
            except errors.Refused as exc:
                refusal = exc.refusal
        hosts: list[int] = []
        fits = self._admission.fits(
            demand, window, gone, together.coming)
        if fits == demand.count or fits and (
                demand.affinity is not model.Affinity.SAME):
            hosts = self._admission.pick(dataclasses.replace(
                demand, count=fits), window, last=last, instead_of=gone,
                coming=together.coming)
        if all(row.host_id is None for row in rows[len(hosts):]):
            # No booking is left, or the refusal was recorded before.
            return hosts, None
        return hosts, refusal


#: Reservations by their ids, with their leases and bookings.
RESERVATIONS = sa.select(models.Reservation).where(
    models.Reservation.id.in_(sa.bindparam('reservations', expanding=True)),
).options(orm.joinedload(models.Reservation.lease),
          orm.joinedload(models.Reservation.bookings))
