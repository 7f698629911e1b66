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

"""What was promised and does not fit any more, and what becomes of it.

Nothing that is decided here breaks a promise. But a server may be forced onto
a host or resized there, capacity shrinks, and hosts go. So the books are
looked through every few seconds, and what has no room where it is booked is
bound to another host, before it starts. Where none has room, the lease says
so from that moment on, and gets its room as soon as there is some again.

Any number of processes may do this at the same time.
"""

import collections
import contextlib
import dataclasses
import itertools
import threading
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import admission as admissions
from blazar_core.books import ledger
from blazar_core.books import timeline as timelines
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import binding as bindings
from blazar_core import resources

__all__ = ['PAUSE', 'Watch']

LOG = logging.getLogger(__name__)

#: Seconds between two looks.
PAUSE = 3
#: Seconds after which all is tried again though nothing has changed in the
#: books, and for which the cloud is not asked again about hosts.
AGAIN = 30


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


class Watch:
    """Looks after what is promised.

    :param opens: opens a sealed call
    :param notify: told of an event type and a lease
    :param patience: seconds for which a server that overstays is no reason
        to bind others elsewhere: their start waits for it
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, binding: bindings.Binding,
                 opens: ty.Callable[[str], str], types: resources.Types,
                 notify: Notify, patience: int) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._binding = binding
        self._opens = opens
        self._types = types
        self._notify = notify
        self._patience = patience
        #: By host, the generation at which nothing could be done for it, and
        #: that at which this was told.
        self._left: dict[int, int] = {}
        self._told: dict[int, int] = {}
        #: By reservation, what the cloud said of it, and when.
        self._asked: dict[tuple[str, int], tuple[
            model.Demand | refusals.Refusal | errors.CloudUnavailable,
            int]] = {}
        self._news = -1
        self._since = 0
        #: The last lease for which hosts were looked for, if not for all.
        self._tried: tuple[int, str] | None = None

    def run(self, stopping: threading.Event) -> None:
        """Look again and again."""
        while not stopping.is_set():
            try:
                self.look()
            except errors.BooksUnavailable:
                LOG.debug('The database of the leases is away')
            except Exception:
                LOG.exception('What does not fit any more could not be found '
                              'out; again in %s s', PAUSE)
            self._clock.wait(stopping, self._clock.now() + PAUSE)

    def look(self) -> None:
        """Find what does not fit, and bind it elsewhere or say so.

        Costs some ten ms with a million bookings where all of them fit, and
        a search for each lease that has no host: for :data:`PAUSE` seconds
        at most, then the next look goes on with the next one.
        """
        now = self._clock.now()
        with self._admission.index.fresh() as timeline:
            known = self._admission.index.hosts
            short = [known[host_id] for host_id in timeline.overfull(now)
                     if host_id in known]
            # Room comes only by a decision about a host.
            news = sum(host.generation for host in known.values())
        again = now - self._since >= AGAIN
        tried_all = self._news == news and not again
        self._news = news
        if again:
            self._since = now
            self._forget(short, now)
        self._bind_all([
            row for host in short
            if again or self._left.get(host.id) != host.generation
            for row in self._too_many(host, now)])
        if not tried_all or self._tried is not None:
            self._try_again(self._unbound(now))
        if again:
            self._relieve()

    def _try_again(self, rows: ty.Iterable[ty.Any]) -> None:
        """Look for hosts of bookings that have none, as long as that may
        last; the next look goes on from there.
        """
        late = self._clock.elapsed() + PAUSE
        of_leases = itertools.groupby(sorted(rows, key=_age), key=_age)
        for age, of_lease in of_leases:
            if self._tried is not None and age <= self._tried:
                continue
            if self._clock.elapsed() > late:
                return
            self._bind_all(of_lease)
            self._tried = age
        self._tried = None

    def _relieve(self) -> None:
        """Say nothing more of leases of which nothing is missing any more.

        What had no host may have gone, or a scheduler has found one for it.
        """
        with self._database.reader() as session:
            rows = session.execute(_RELIEVED).all()
        for row in rows:
            with contextlib.suppress(errors.NotFound):
                lease = self._database.retried(
                    self._binding.rebind, row.id, row.generation, {})
                if lease is not None:
                    self._notify('lease.update', lease)

    def _forget(self, short: ty.Iterable[model.Host], now: int) -> None:
        """What is over does not stay in memory."""
        ids = {host.id for host in short}
        self._told = {one: generation for one, generation
                      in self._told.items() if one in ids}
        self._asked = {one: (said, when) for one, (said, when)
                       in self._asked.items() if now - when < AGAIN}

    # -- what does not fit ---------------------------------------------------

    def _too_many(self, host: model.Host, now: int) -> list[ty.Any]:
        """The bookings for which a host has no room any more.

        Who booked first stays. What runs there stays in any case, and so
        does what is on its way there.
        """
        with self._database.reader() as session:
            rows = session.execute(_ON_HOST, {
                'host': host.id, 'now': now}).all()
            # Whoever comes exchanges his place with one that is here.
            coming = collections.Counter(session.scalars(_COMING, {
                'host': host.id,
                'reservations': [*{row.reservation_id for row in rows}]}))
        line = timelines.Timeline(shared=ledger.SHARED)
        line.set_host(host.id, host.capacity, host.usage)
        loose = []
        for row in rows:
            if bindings.may_move(row, row.later, row.held, row):
                loose.append(row)
            elif row.end_date > now or row.end_date + self._patience <= now:
                line.apply(host.id, ledger.stay(
                    row.start_date, row.end_date, row.placed_at, now),
                    row.resources, 1)
        over = bool(line.overfull(now))
        going = []
        for row in loose:
            window = model.Window(max(row.start_date, now), row.end_date)
            if line.rooms(model.Demand(row.resources), window)[0]:
                line.apply(host.id, window, row.resources, 1)
            elif coming[row.reservation_id]:
                coming[row.reservation_id] -= 1
            else:
                going.append(row)
        if not going:
            self._left[host.id] = host.generation
        if over and self._told.get(host.id) != host.generation:
            self._told[host.id] = host.generation
            LOG.warning(
                'Host %s is overbooked by servers that are there already, '
                'which nothing moves: it has %s, of which %s is used without '
                'an end', host.name, dict(host.capacity), dict(host.usage))
        return going

    def _unbound(self, now: int) -> list[ty.Any]:
        """The bookings that have no host, and could have one."""
        with self._database.reader() as session:
            rows = session.execute(_UNBOUND, {'now': now}).all()
        return [row for row in rows
                if bindings.may_move(row, row.later, row.held, row)]

    # -- and where it would --------------------------------------------------

    def _bind_all(self, found: ty.Iterable[ty.Any]) -> None:
        """Oldest lease first; none keeps another one from its room."""
        ids: dict[str, set[int]] = collections.defaultdict(set)
        for row in sorted(found, key=_age):
            ids[row.reservation_id].add(row.id)
        for reservation_id, of_it in ids.items():
            try:
                self._database.retried(self._bind, reservation_id, of_it)
            except errors.NotFound:
                LOG.debug('Reservation %s has gone meanwhile', reservation_id)
            except Exception as exc:
                # Nothing is said of a lease for what is not known.
                self._news = -1
                known = isinstance(exc, errors.CloudUnavailable |
                                   errors.BooksBusy | errors.Refused)
                LOG.warning(
                    'Reservation %s has no room where it is booked, and none '
                    'could be found elsewhere yet: %s', reservation_id, exc,
                    exc_info=not known)

    def _bind(self, reservation_id: str, ids: ty.Collection[int]) -> None:
        """Give bookings of a reservation other hosts, as many as there are.

        :raises Outdated: when somebody was faster: look again
        """
        case = self._case(reservation_id)
        if case is None or not case.rows:
            # Its build was sent meanwhile, say.
            return
        demand = self._asked_of(case)
        rows, staying = case.rows, case.staying
        if isinstance(demand, refusals.Refusal) or (
                demand.affinity is not model.Affinity.SAME):
            staying = [*staying, *(row for row in rows if row.id not in ids)]
            rows = [row for row in rows if row.id in ids]
        if not rows:
            return
        hosts: list[int] = []
        refusal = None
        if isinstance(demand, refusals.Refusal):
            refusal = dataclasses.replace(demand, wanted=len(rows))
        else:
            hosts, refusal = self._search(
                self._beside(demand, rows, staying), rows, case.lease)
        bound = dict(itertools.zip_longest((row.id for row in rows), hosts))
        if bound == {row.id: row.host_id for row in rows}:
            return
        lease = self._binding.rebind(
            case.lease.id, case.lease.generation, bound,
            '' if refusal is None else refusal.sentence())
        if lease is None:
            # It has changed meanwhile.
            self._news = -1
            return
        self._notify('lease.update', lease)

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

    def _asked_of(self, case: _Case) -> model.Demand | refusals.Refusal:
        """What the cloud says of a reservation; not asked in every round.

        :raises CloudUnavailable: when it did not answer a while ago
        """
        now, one = self._clock.now(), case.reservation
        # It has another key when it was changed meanwhile.
        key = one.id, one.updated_at
        said, when = self._asked.get(key, (None, 0))
        if said is None or now - when >= AGAIN:
            said = self._ask(case)
            self._asked[key] = said, now
        if isinstance(said, errors.CloudUnavailable):
            raise said
        return said

    def _ask(self, case: _Case,
             ) -> model.Demand | refusals.Refusal | errors.CloudUnavailable:
        try:
            return self._types.of_row(case.reservation).demand(
                dataclasses.replace(
                    case.reserved, call=None if case.sealed is None else
                    self._opens(case.sealed)))
        except errors.Refused as exc:
            return exc.refusal
        except errors.CloudUnavailable as exc:
            # Each of many would wait for it in every look.
            return exc

    def _beside(self, demand: model.Demand, rows: ty.Sequence[models.Booking],
                staying: ty.Iterable[models.Booking]) -> model.Demand:
        """The demand of some bookings of a reservation, beside its others.

        They get what was promised, whatever would be asked for by now.
        """
        known = self._admission.index.hosts
        here = collections.Counter(known[row.host_id].uuid for row in staying
                                   if row.host_id in known)
        demand = dataclasses.replace(
            demand, resources=rows[0].resources, count=len(rows))
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

        :raises Outdated: when somebody was faster: look again
        """
        window = model.Window(
            max(lease.start_date, self._clock.now()), lease.end_date)
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
        raise api.Outdated('there is room, all of a sudden')


_RESERVATIONS, _LEASES, _HELD_BUILDS = (
    models.Reservation.__table__, models.Lease.__table__,
    models.HeldBuild.__table__)
_BOOKING, _RESERVATION, _LEASE, _HELD = (
    models.Booking.__table__.c, _RESERVATIONS.c, _LEASES.c, _HELD_BUILDS.c)
#: Bookings, with what :func:`blazar_core.leases.binding.may_move` asks for.
_ROWS = sa.select(
    _BOOKING.id, _BOOKING.reservation_id, _BOOKING.server_id,
    _BOOKING.start_date, _BOOKING.end_date, _BOOKING.resources,
    _BOOKING.sent_at, _BOOKING.placed_at,
    _LEASE.id.label('lease_id'), _LEASE.status, _LEASE.deleted_at,
    _LEASE.created_at, _RESERVATION.params.is_not(None).label('later'),
    _HELD.lease_id.is_not(None).label('held'),
).join(_RESERVATIONS, _RESERVATION.id == _BOOKING.reservation_id).join(
    _LEASES, _LEASE.id == _RESERVATION.lease_id).outerjoin(
    _HELD_BUILDS, _HELD.lease_id == _LEASE.id).order_by(_BOOKING.id)
_ON_HOST = _ROWS.where(
    _BOOKING.host_id == sa.bindparam('host'),
    sa.or_(_BOOKING.end_date > sa.bindparam('now'),
           _BOOKING.placed_at.is_not(None)))
#: For each server that is on its way to a host, its reservation.
_COMING = sa.select(_BOOKING.reservation_id).where(
    _BOOKING.reservation_id.in_(sa.bindparam('reservations', expanding=True)),
    _BOOKING.moving_to == sa.bindparam('host'))
_UNBOUND = _ROWS.where(
    _BOOKING.host_id.is_(None), _BOOKING.end_date > sa.bindparam('now'),
    _BOOKING.sent_at.is_(None),
    _LEASE.status.in_((*states.BEFORE, *states.BEGUN)))
#: The leases that say that something is missing of which nothing is.
_RELIEVED = sa.select(_LEASE.id, _LEASE.generation).where(
    _LEASE.status.in_((*states.BEFORE, *states.BEGUN)),
    _LEASE.status_reason.startswith(bindings.MISSING, autoescape=True),
    ~sa.exists().where(
        _RESERVATION.lease_id == _LEASE.id,
        _BOOKING.reservation_id == _RESERVATION.id,
        _BOOKING.host_id.is_(None)))


def _age(row: ty.Any) -> tuple[int, str]:
    """Whose turn it is: the oldest lease comes first."""
    return row.created_at, row.lease_id
