# SPDX-License-Identifier: Apache-2.0

"""One more host for a lease that has all of one that has failed.

What such a host held before is not known while it is away: servers of the
lease may still be there. So the lease keeps it to its end, and gets another
one beside it; when the failed one is back, it has both.

Any number of processes may do this at the same time.
"""

import dataclasses
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.leases import binding as bindings
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import facts
from blazar_core.lifecycle import rearranging
from blazar_core.lifecycle import rebinding
from blazar_core import resources

__all__ = ['Replacing']

LOG = logging.getLogger(__name__)


class _Case(ty.NamedTuple):
    """A reservation of whole hosts that has fewer of them than it should.

    :ivar missing: how many
    :ivar own: the uuids of all that it has
    """

    reservation: models.Reservation
    reserved: resources.Reserved
    lease: models.Lease
    missing: int
    own: frozenset[str]


class Replacing:
    """Gives leases of whole hosts others beside those that have failed.

    :param wanted: says what reservations need
    :param rearranges: has hosts fall free
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, binding: bindings.Binding,
                 wanted: demands.Demands,
                 rearranges: rearranging.Rearranging,
                 notify: ty.Callable[[str, facts.Lease], None]) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._binding = binding
        self._wanted = wanted
        self._rearranging = rearranges
        self._notify = notify

    def look(self) -> None:
        """Look for one for each that has failed, for the oldest lease first.

        Where no host has failed, that is one SELECT of a table without rows.
        """
        with self._database.connection() as connection:
            found = connection.execute(_FAILED).all()
        for row in sorted(found, key=rebinding.age):
            with logs.about(row.lease_id, row.project_id):
                self._look_for(row.reservation_id)

    def _look_for(self, reservation_id: str) -> None:
        """Look for one; what fails keeps no other lease from its host."""
        try:
            self._database.retried(self._replace, reservation_id)
        except errors.Refused:
            # There is none yet.
            pass
        except Exception as exc:
            LOG.warning('Reservation %s has lost hosts, and whether there '
                        'are others is not known yet: %s', reservation_id,
                        exc, exc_info=not isinstance(exc, errors.BlazarError))

    def _replace(self, reservation_id: str) -> None:
        with self._database.reader() as session:
            case = _case(session, reservation_id)
        if case is None:
            return
        demand = self._wanted.of(case.reservation, case.reserved, None)
        if isinstance(demand, refusals.Refusal):
            return
        window = case.lease.booked(model.Window(
            self._clock.now(), case.lease.end_date))
        if window.end <= window.start:
            return
        more = dataclasses.replace(
            demand, count=case.missing, least=1,
            avoid=demand.avoid | case.own)
        try:
            hosts = self._admission.pick(more, window)
        except errors.Refused:
            anywhere = self._wanted.of(
                case.reservation, case.reserved, None, begun=False)
            if isinstance(anywhere, refusals.Refusal) or (
                    not self._rearranging.free(
                        reservation_id, demand, window, case.own, anywhere)):
                raise
            hosts = self._admission.pick(more, window)
        lease = self._binding.add(
            case.lease.id, case.lease.generation, reservation_id, hosts,
            window, demand.among)
        if lease is not None:
            self._notify('lease.update', lease)
            self._notify('lease.degraded' if any(
                one['missing_resources'] for one in lease['reservations'])
                else 'lease.healed', lease)
            if len(hosts) < case.missing:
                # One more may fall free for it.
                self._replace(reservation_id)


def _case(session: orm.Session, reservation_id: str) -> _Case | None:
    reservation = session.get(models.Reservation, reservation_id)
    if reservation is None or (
            reservation.lease.status != states.Lease.ACTIVE or
            reservation.lease.deleted_at is not None):
        return None
    missing = sum(row.host_failed_at is not None
                  for row in reservation.bookings)
    if not missing:
        return None
    reserved = resources.reserved(session, reservation)
    return _Case(reservation, reserved, reservation.lease, missing,
                 frozenset(reserved.hosts))


#: The reservations of which a host has failed that they had all of.
_FAILED = sa.select(
    models.Reservation.id.label('reservation_id'),
    models.Reservation.lease_id, models.Lease.project_id,
    models.Lease.created_at).distinct(
).select_from(notes.Outage).join(
    models.Booking, models.Booking.host_id == notes.Outage.host_id).join(
    models.Reservation,
    models.Reservation.id == models.Booking.reservation_id).join(
    models.Lease, models.Lease.id == models.Reservation.lease_id).where(
        notes.Outage.began_at.is_not(None),
        models.Booking.host_failed_at.is_not(None),
        models.Booking.server_id.is_(None),
        models.Lease.status == states.Lease.ACTIVE,
        models.Lease.deleted_at.is_(None))
