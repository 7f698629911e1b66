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
from sqlalchemy import orm

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

__all__ = ['IN_USE', 'NO_ROOM', 'Notify', 'Rebinding', 'age']

LOG = logging.getLogger(__name__)

#: How many reservations are read together.
_TOGETHER = 16

#: Why something stays where it is.
IN_USE = 'It is in use.'
NO_ROOM = 'No other host has capacity for it.'

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
        done, wanted = True, iter(ids.items())
        while some := dict(itertools.islice(wanted, _TOGETHER)):
            cases = self._read(some)
            for reservation_id, of_it in some.items():
                done &= self._find(reservation_id, [
                    cases[reservation_id]] if reservation_id in cases else [],
                    of_it)
        return done

    def _read(self, reservation_ids: ty.Collection[str]) -> dict[str, _Case]:
        """Reservations, read together; none when that fails: each of them is
        read by itself then, and none is in the way of another one.
        """
        try:
            return self._cases(reservation_ids)
        except Exception as exc:
            LOG.warning('Reservations without capacity where they are booked '
                        'are read one by one: %s', exc,
                        exc_info=not isinstance(exc, errors.BooksUnavailable))
            return {}

    def _find(self, reservation_id: str, known: list[_Case],
              ids: ty.Collection[int]) -> bool:
        """As :meth:`_bind`; false also when nothing is known of it."""
        try:
            return self._database.retried(
                self._bind, reservation_id, known, ids)
        except errors.NotFound:
            LOG.debug('Reservation %s has gone meanwhile', reservation_id)
            return True
        except Exception as exc:
            # Nothing is said of a lease for what is not known.
            expected = isinstance(exc, errors.CloudUnavailable |
                                  errors.BooksBusy | errors.Refused)
            LOG.warning(
                'Reservation %s has no capacity where it is booked, and '
                'none could be found elsewhere yet: %s',
                reservation_id, exc, exc_info=not expected)
            return False

    def _bind(self, reservation_id: str, known: list[_Case],
              ids: ty.Collection[int]) -> bool:
        """Give bookings of a reservation other hosts, as many as there are.

        :param known: what was read of it with others, for the first run: it
            is taken out, and one that is run again reads it anew, and looks
            for capacity in what is booked by now
        :returns: false when its lease has changed meanwhile
        :raises Outdated: when another process was faster: look again
        """
        case, lag = (known.pop(), admissions.LAG) if known else (
            self._case(reservation_id), 0)
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
                self._beside(demand, rows, staying), rows, case.lease, lag)
        bound = dict(itertools.zip_longest((row.id for row in rows), hosts))
        if bound == {row.id: row.host_id for row in rows}:
            return True
        lease = self._binding.rebind(
            case.lease.id, case.lease.generation, bound,
            '' if refusal is None else refusal.sentence(),
            None if isinstance(demand, refusals.Refusal) else demand.among)
        if lease is None:
            # Another reservation of it was bound elsewhere, say, since it was
            # read with others.
            return bool(lag) and self._bind(reservation_id, [], ids)
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
        return found | {row.id: NO_ROOM
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
        return self._cases([reservation_id]).get(reservation_id)

    def _cases(self, reservation_ids: ty.Collection[str]) -> dict[str, _Case]:
        """Reservations, those that there are, by their ids."""
        cases = {}
        with self._database.reader() as session:
            found = session.scalars(_RESERVATIONS, {
                'reservations': reservation_ids}).unique().all()
            held = {lease_id: sealed for lease_id, sealed in session.execute(
                _HELD, {'leases': {one.lease_id for one in found}}).tuples()}
            for one in found:
                rows = [row for row in one.bookings if bindings.may_move(
                    row, not one.booted, one.lease_id in held, one.lease)]
                cases[one.id] = _Case(
                    one, resources.reserved(session, one), one.lease,
                    held.get(one.lease_id), rows,
                    [row for row in one.bookings if row not in rows])
        return cases

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
                lease: models.Lease, lag: float,
                ) -> tuple[list[int], refusals.Refusal | None]:
        """Hosts for as many as possible, and why not for the others.

        :param lag: seconds that what is looked at may be old
        """
        window, refusal = self._window(lease), None
        if any(row.host_id is not None for row in rows):
            # What has just lost its host mostly has capacity elsewhere.
            try:
                return self._admission.pick(
                    demand, window, instead_of=rows, lag=lag), None
            except errors.Refused as exc:
                refusal = exc.refusal
        hosts: list[int] = []
        fits = self._admission.fits(demand, window, rows)
        if fits == demand.count or fits and (
                demand.affinity is not model.Affinity.SAME):
            hosts = self._admission.pick(dataclasses.replace(
                demand, count=fits), window, instead_of=rows)
        if all(row.host_id is None for row in rows[len(hosts):]):
            # There are none, or it has been said before.
            return hosts, None
        return hosts, refusal

    def _window(self, lease: models.Lease) -> model.Window:
        """For what time a lease needs another host."""
        return lease.booked(model.Window(
            max(lease.start_date, self._clock.now()), lease.end_date))


def age(row: ty.Any) -> tuple[int, str]:
    """The sort key of leases: the oldest one comes first."""
    return row.created_at, row.lease_id


_RESERVATIONS = sa.select(models.Reservation).where(
    models.Reservation.id.in_(sa.bindparam('reservations', expanding=True)),
).options(orm.joinedload(models.Reservation.lease),
          orm.joinedload(models.Reservation.bookings))
_HELD = sa.select(models.HeldBuild.lease_id, models.HeldBuild.sealed).where(
    models.HeldBuild.lease_id.in_(sa.bindparam('leases', expanding=True)))
