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

"""Other hosts for what has no capacity where it is booked.

Any number of processes may look for them at the same time.
"""

import collections
import dataclasses
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import admission as admissions
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import binding as bindings
from blazar_core.leases import within
from blazar_core.lifecycle import demands
from blazar_core import resources

__all__ = ['IN_USE', 'Notify', 'Rebinding', 'age']

LOG = logging.getLogger(__name__)

#: Why something stays where it is.
IN_USE = 'It is in use.'

Notify: ty.TypeAlias = ty.Callable[[str, dict[str, ty.Any]], None]


class _Case(ty.NamedTuple):
    """A reservation with bookings that need another host.

    :ivar rows: the bookings that may be bound elsewhere
    :ivar staying: those that stay where they are
    """

    reservation: models.Reservation
    reserved: resources.Reserved
    lease: models.Lease
    sealed: str | None
    rows: list[models.Booking]
    staying: list[models.Booking]


class Rebinding:
    """Binds bookings to other hosts.

    :param wanted: says what reservations need
    :param notify: told of an event type and a lease
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, binding: bindings.Binding,
                 wanted: demands.Demands, notify: Notify) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._binding = binding
        self._demands = wanted
        self._notify = notify

    def forget(self) -> None:
        """What the cloud said too long ago does not stay in memory."""
        self._demands.forget()

    def bind_all(self, found: ty.Iterable[ty.Any]) -> bool:
        """Oldest lease first; none keeps another one from its room.

        :param found: bookings that have no room where they are
        :returns: whether all that could be done is done
        """
        ids: dict[str, set[int]] = collections.defaultdict(set)
        for row in sorted(found, key=age):
            ids[row.reservation_id].add(row.id)
        done = True
        for reservation_id, of_it in ids.items():
            try:
                done &= self._database.retried(
                    self._bind, reservation_id, of_it)
            except errors.NotFound:
                LOG.debug('Reservation %s has gone meanwhile', reservation_id)
            except Exception as exc:
                # Nothing is said of a lease for what is not known.
                done = False
                known = isinstance(exc, errors.CloudUnavailable |
                                   errors.BooksBusy | errors.Refused)
                LOG.warning(
                    'Reservation %s has no capacity where it is booked, and '
                    'none could be found elsewhere yet: %s',
                    reservation_id, exc,
                    exc_info=not known)
        return done

    def _bind(self, reservation_id: str, ids: ty.Collection[int]) -> bool:
        """Give bookings of a reservation other hosts, as many as there are.

        :returns: false when its lease has changed meanwhile
        :raises Outdated: when another process was faster: look again
        """
        case = self._case(reservation_id)
        if case is None or not case.rows:
            # Its build was sent meanwhile, say.
            return True
        demand = self._demands.of(
            case.reservation, case.reserved, case.sealed)
        rows, staying = case.rows, case.staying
        if isinstance(demand, refusals.Refusal) or (
                demand.affinity is not model.Affinity.SAME):
            staying = [*staying, *(row for row in rows if row.id not in ids)]
            rows = [row for row in rows if row.id in ids]
        if not rows:
            return True
        hosts: list[int] = []
        refusal = None
        if isinstance(demand, refusals.Refusal):
            refusal = dataclasses.replace(demand, wanted=len(rows))
        else:
            hosts, refusal = self._search(
                self._beside(demand, rows, staying), rows, case.lease)
        bound = dict(itertools.zip_longest((row.id for row in rows), hosts))
        if bound == {row.id: row.host_id for row in rows}:
            return True
        lease = self._binding.rebind(
            case.lease.id, case.lease.generation, bound,
            '' if refusal is None else refusal.sentence(),
            None if isinstance(demand, refusals.Refusal) else demand.among)
        if lease is None:
            return False
        self._notify('lease.update', lease)
        self._notify('lease.degraded' if any(
            one['missing_resources'] for one in lease['reservations'])
            else 'lease.healed', lease)
        return True

    def obstacles(self, reservation_id: str, ids: ty.Collection[int],
                  uuid: str) -> dict[int, str]:
        """Why bookings of a reservation are not bound to other hosts, if
        theirs goes away.

        :param ids: those that it has on the host of this uuid
        :returns: sentences, by the ids of those that are not
        :raises CloudUnavailable: when what it needs cannot be said now
        """
        case = self._case(reservation_id)
        rows = [] if case is None else [
            row for row in case.rows if row.id in ids]
        found = dict.fromkeys(
            set(ids) - {row.id for row in rows}, IN_USE)
        if case is None or not rows:
            return found
        outer = within.of(case.reservation)
        if outer is not None:
            return found | (dict.fromkeys(
                (row.id for row in rows),
                'It is within a lease that has all of the host.',
            ) if self._stays(outer, uuid) else {})
        demand = self._demands.of(
            case.reservation, case.reserved, case.sealed)
        if isinstance(demand, refusals.Refusal):
            return found | {row.id: demand.sentence() for row in rows}
        staying = case.staying
        if demand.affinity is model.Affinity.SAME:
            # They go all or none.
            rows = case.rows
        else:
            staying = [*staying, *(
                row for row in case.rows if row.id not in ids)]
        demand = self._beside(demand, rows, staying)
        fits = self._admission.fits(
            dataclasses.replace(demand, avoid=demand.avoid | {uuid}),
            self._window(case.lease), rows)
        if demand.affinity is model.Affinity.SAME and fits < len(rows):
            fits = 0
        return found | {row.id: 'No other host has capacity for it.'
                        for row in rows[fits:] if row.id in ids}

    def _stays(self, reservation_id: str, uuid: str) -> bool:
        """Whether a reservation of hosts keeps the one of this uuid, if that
        goes away.
        """
        with self._database.reader() as session:
            ids = session.scalars(
                sa.select(models.Booking.id).join(models.Host).where(
                    models.Booking.reservation_id == reservation_id,
                    models.Host.uuid == uuid)).all()
        return bool(self.obstacles(reservation_id, ids, uuid))

    def _case(self, reservation_id: str) -> _Case | None:
        with self._database.reader() as session:
            reservation = session.get(models.Reservation, reservation_id)
            if reservation is None:
                return None
            lease = reservation.lease
            held = session.get(models.HeldBuild, lease.id)
            rows = [row for row in reservation.bookings if bindings.may_move(
                row, not reservation.booted, held is not None, lease)]
            return _Case(
                reservation, resources.reserved(session, reservation), lease,
                None if held is None else held.sealed,
                rows, [row for row in reservation.bookings
                       if row not in rows])

    def _beside(self, demand: model.Demand, rows: ty.Sequence[models.Booking],
                staying: ty.Iterable[models.Booking]) -> model.Demand:
        """The demand of some bookings of a reservation, beside its others.

        They get what was promised, whatever would be asked for by now.
        """
        known = self._admission.index.hosts
        here = collections.Counter(known[row.host_id].uuid for row in staying
                                   if row.host_id in known)
        demand = dataclasses.replace(
            demand, resources=model.WHOLE if demand.whole
            else rows[0].resources, count=len(rows), least=None)
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
                lease: models.Lease,
                ) -> tuple[list[int], refusals.Refusal | None]:
        """Hosts for as many as possible, and why not for the others.

        :raises Outdated: when another process was faster: look again
        """
        window = self._window(lease)
        fits = self._admission.fits(demand, window, rows)
        if fits == demand.count:
            return self._admission.pick(
                demand, window, instead_of=rows), None
        hosts: list[int] = []
        if fits and demand.affinity is not model.Affinity.SAME:
            hosts = self._admission.pick(dataclasses.replace(
                demand, count=fits), window, instead_of=rows)
        if all(row.host_id is None for row in rows[len(hosts):]):
            # It has been said before.
            return hosts, None
        try:
            self._admission.pick(demand, window, instead_of=rows)
        except errors.Refused as exc:
            return hosts, exc.refusal
        raise api.Outdated('there is capacity again')

    def _window(self, lease: models.Lease) -> model.Window:
        """For what time a lease needs another host."""
        return lease.booked(model.Window(
            max(lease.start_date, self._clock.now()), lease.end_date))


def age(row: ty.Any) -> tuple[int, str]:
    """The sort key of leases: the oldest one comes first."""
    return row.created_at, row.lease_id
