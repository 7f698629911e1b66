# SPDX-License-Identifier: Apache-2.0

"""The base class of the tests of leases of whole hosts."""

import typing as ty

import sqlalchemy as sa

from blazar_core.capacity import enrollment
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import overbooking
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import updates
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests.unit import base

NOW = base.NOW


class Machines(base.WholeType):
    """A resource type of whole hosts.

    :ivar doors: by reservation, the UUIDs of its open hosts
    :ivar full: by reservation, the servers that are on its hosts
    :ivar there: by the UUID of a host, the servers that are there
    :ivar among: the pool of the hosts
    :ivar dirty: the hosts that cannot be cleaned
    :ivar swept: the hosts that were to be cleaned, in order
    :ivar leaving: whether hosts are available to all workloads after a lease
    """

    def __init__(self) -> None:
        self.doors: dict[str, tuple[str, ...]] = {}
        self.full: dict[str, list[str]] = {}
        self.there: dict[str, list[str]] = {}
        self.among = model.HostPool.COMMON
        self.cleaning_time = 0
        self.dirty: set[str] = set()
        self.swept: list[str] = []
        self.leaving = False

    def so_many(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(
            model.WHOLE, params['max'], least=params['min'],
            among=self.among, cleaning_time=self.cleaning_time)

    def start(self, reserved: resource_types.ReservationContext) -> None:
        self.doors[reserved.id] = reserved.hosts

    def hosted_servers(self, reserved: resource_types.ReservationContext,
                       host: str | None = None) -> ty.Collection[str]:
        return [*self.full.get(reserved.id, ()), *(
            server for one in reserved.hosts if host in (None, one)
            for server in self.there.get(one, ()))]

    @property
    def hosts_leave(self) -> bool:
        return self.leaving

    def end(self, reserved: resource_types.ReservationContext) -> None:
        self.doors.pop(reserved.id, None)

    def bookings_changed(self,
                         reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def clean(self, reserved: resource_types.ReservationContext,
              hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        self.swept += sorted(hosts)
        return set(hosts) - self.dirty


class WholeHostsTestCase(base.LeaseTestCase):

    def more_types(self):
        self.machines = Machines()
        return {'machine': self.machines}

    def policies(self):
        return {**super().policies(),
                'recycle': end_policies.Recycle()}

    def enrol(self, name, finish=True, **extra):
        """Enroll a host and return its id."""
        with self.database.writer() as session:
            enrolling = enrollment.start(
                session, NOW, self.uuid_of(name), extra)
            if finish:
                enrollment.complete(session, NOW, enrolling)
        return enrolling.host_id

    def machines_of(self, least=1, most=1):
        params = {'min': least, 'max': most}
        return new_leases.NewReservation(
            self.machines.requirements(None, params).demand,
            resource_type='machine', params=params, spec={})

    def reserve_machines(self, start=0, end=100, least=1, most=1):
        return self.reserve(start, end, self.machines_of(least, most))

    def bookings_of(self, lease):
        """Return the booked resources of a lease by the name of the host."""
        with self.database.reader() as session:
            return {host: resources for host, resources in session.execute(
                sa.select(models.Host.name, models.Booking.resources)
                .join(models.Booking, models.Booking.host_id ==
                      models.Host.id).join(models.Booking.reservation)
                .where(models.Reservation.lease_id == lease['id'])).tuples()}

    def held(self):
        with self.database.reader() as session:
            return dict(session.execute(sa.select(
                models.Host.name, models.Host.assigned_to).where(
                    models.Host.assigned_to.is_not(None))).tuples().all())

    def change(self, lease, least, most):
        return self.leases.updates.update(lease['id'], updates.LeaseChange(
            reservations={lease['reservations'][0]['id']:
                          self.machines_of(least, most)}))

    def overbooking_check(self):
        database = self.db.connect()
        return overbooking.OverbookingCheck(
            database, self.clock, self.admission,
            reassignment.Reassignment(database, self.clock, self.types),
            self.new_demands(), lambda event, lease: None,
            self.start_timeout)
