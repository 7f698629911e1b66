# SPDX-License-Identifier: Apache-2.0

"""The overbooking check: heal bookings that no longer fit their host, because
it has failed or for any other reason (:mod:`blazar_core.healing`).

No decision overbooks a host. But an administrator may force or resize a server
there, capacity shrinks, and hosts fail. So all bookings are compared with the
capacity every few seconds. A booking that does not fit is reassigned to
another host before its lease starts. If no host has free capacity, the lease
is marked, and gets capacity as soon as there is some.

Idempotent; safe to run concurrently.
"""

import collections
import contextlib
import itertools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.capacity import rule
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import conditions
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import host_replacement
from blazar_core.healing import maintenance
from blazar_core.leases import hosted_servers
from blazar_core.leases import reassignment
from blazar_core.leases import views
from blazar_core.lifecycle import demands

LOG = logging.getLogger(__name__)

#: Seconds between two looks if no change of a host is reported.
PAUSE = 3
#: Seconds after which everything is tried again though the reservation
#: database has not changed: the cloud is asked for hosts again by then.
AGAIN = demands.AGAIN


class OverbookingCheck:
    """Finds bookings that do not fit, and has them reassigned.

    :param wanted: determines the demands of reservations
    :param notify: called with an event type and a lease
    :param start_timeout: seconds for which a server past its end is no reason
        to reassign other bookings: their start waits for it
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission,
                 reassigner: reassignment.Reassignment,
                 wanted: demands.Demands, notify: views.Notify,
                 start_timeout: int) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._reassigner = reassigner
        self._replacement = host_replacement.HostReplacement(
            database, clock, admission, reassigner, wanted, notify)
        self._notify = notify
        self._start_timeout = start_timeout
        #: By host, the generation for which nothing could be done, and the one
        #: for which a warning was logged.
        self._left: dict[int, int] = {}
        self._told: dict[int, int] = {}
        #: The providers of hosts as seen last, and the hosts whose providers
        #: have changed since, so that bookings may not fit in them.
        self._providers: dict[int, model.Providers | None] = {}
        self._regrouped: set[int] = set()
        self._news = -1
        self._since = 0
        #: The last lease for which hosts were searched; None: the search
        #: reached all of them.
        self._tried: tuple[int, str] | None = None

    def look(self) -> None:
        """Find bookings that do not fit; reassign them or mark their leases.

        Costs some ten ms with a million bookings if all of them fit, and a
        search for each lease without a host, for at most :data:`PAUSE`
        seconds: the next look continues with the next lease.
        """
        now = self._clock.now()
        with self._admission.index.fresh() as timeline:
            known = self._admission.index.hosts
            # Only decisions about hosts free capacity.
            news = sum(host.generation for host in known.values())
            if news != self._news:
                self._note_providers(known)
            short = [known[host_id] for host_id in sorted(
                self._regrouped.union(timeline.overfull(now)))
                if host_id in known]
        again = now - self._since >= AGAIN
        tried_all = self._news == news and not again
        self._news = news
        if again:
            self._since = now
            self._forget(short)
        self._reassign_all([
            row for host in short
            if again or self._left.get(host.id) != host.generation
            for row in self._too_many(host, now)])
        if not tried_all:
            self._replacement.replace_failed()
        if not tried_all or self._tried is not None:
            # A server within a lease of hosts follows the hosts of that lease.
            self._try_again(self._homeless(now))
        if again:
            self._relieve()
            maintenance.forget(self._database, self._clock)

    def _note_providers(self, known: ty.Mapping[int, model.Host]) -> None:
        """Find the hosts whose providers may now offer less to one server."""
        if self._providers:
            self._regrouped.update(
                host.id for host in known.values()
                if self._providers.get(host.id, host.providers) !=
                host.providers)
        self._providers = {
            host.id: host.providers for host in known.values()}

    def _try_again(self, rows: ty.Iterable[ty.Any]) -> None:
        """Search hosts for bookings without one, for at most :data:`PAUSE`
        seconds; the next look continues from there.
        """
        late = self._clock.elapsed() + PAUSE
        of_leases = itertools.groupby(
            sorted(rows, key=host_replacement.age), key=host_replacement.age)
        for age, of_lease in of_leases:
            if self._tried is not None and age <= self._tried:
                continue
            if self._clock.elapsed() > late:
                return
            self._reassign_all(of_lease)
            self._tried = age
        self._tried = None

    def _reassign_all(self, found: ty.Iterable[ty.Any]) -> None:
        if not self._replacement.reassign_all(found):
            # Have the next look search again.
            self._news = -1

    def _relieve(self) -> None:
        """Clear the condition of leases that no longer lack a host.

        Their bookings without a host may have been deleted, or a scheduler has
        found a host.
        """
        with self._database.connection() as connection:
            rows = connection.execute(_RELIEVED).all()
        for row in rows:
            if conditions.find(row.conditions,
                               conditions.Type.CAPACITY_MISSING) is None:
                continue
            with contextlib.suppress(errors.NotFound):
                leases = self._database.retried(
                    self._reassigner.reassign, reassignment.Reassigned(
                        row.id, row.generation, {}))
                for lease in leases or ():
                    self._notify('lease.update', lease | {
                        'reason': conditions.Reason.CAPACITY_RESTORED})

    def _forget(self, short: ty.Iterable[model.Host]) -> None:
        """Remove outdated entries from memory."""
        ids = {host.id for host in short}
        self._told = {one: generation for one, generation
                      in self._told.items() if one in ids}

    # -- bookings that do not fit --------------------------------------------

    def _too_many(self, host: model.Host, now: int) -> list[ty.Any]:
        """Return the bookings that no longer fit on a host.

        The lease that booked first stays; so do servers that run there or are
        on their way there.
        """
        with self._database.reader() as session:
            rows = session.execute(_ON_HOST, {
                'host': host.id, 'now': now}).all()
            unavailable = outages.on_host(session.connection(), host.id, now)
            # An arriving server swaps bookings with a server of this host.
            coming = collections.Counter(session.scalars(_COMING, {
                'host': host.id,
                'reservations': [*{row.reservation_id for row in rows}]}))
        line = timelines.Timeline()
        line.set_host(host.id, host.capacity, host.usage, host.uuid,
                      host.providers)
        loose = []
        for row in rows:
            if row.status == states.Lease.IN_PROGRESS:
                # The lease waits for migrations: its bookings keep others off,
                # and are not in use yet.
                continue
            if _may_move(row):
                loose.append(row)
            elif not row.end_date <= now < row.end_date + self._start_timeout:
                line.apply(host.id, rule.occupied(
                    row.start_date, row.end_date, row.claimed_at, now),
                    row.resources, 1)
        over = bool(line.overfull(now))
        # Servers that run on an unavailable host block no other booking.
        for one in unavailable:
            over = over and one.window.start > now
            line.apply(host.id, one.window, one.resources, 1)
        going = []
        for row in loose:
            window = model.Window(max(row.start_date, now), row.end_date)
            # Bookings have no groups, and those of whole hosts need none. A
            # search for other hosts knows the groups, and keeps the host if it
            # fits.
            demand = model.Demand(row.resources, groups=(
                model.Group(tuple(sorted(row.resources.items()))),
            ) if host.id in self._regrouped and (
                dict(row.resources) != dict(host.capacity)) else ())
            if line.fits(demand, window)[0]:
                line.apply(host.id, window, row.resources, 1)
            elif coming[row.reservation_id]:
                coming[row.reservation_id] -= 1
            else:
                going.append(row)
        if not going:
            self._left[host.id] = host.generation
            self._regrouped.discard(host.id)
        if over:
            self._warn_once(host)
        return going

    def _warn_once(self, host: model.Host) -> None:
        if self._told.get(host.id) != host.generation:
            self._told[host.id] = host.generation
            LOG.warning(
                'Host %s is overbooked by existing servers, which are not '
                'moved: it has %s, of which %s is in use without an end',
                host.name, model.amounts_in_words(host.capacity),
                model.amounts_in_words(host.usage))

    def _homeless(self, now: int) -> list[ty.Any]:
        """Return the bookings on hosts that their reservation of hosts does
        not have, and those that lack a host and may get one.
        """
        with self._database.connection() as connection:
            ids = hosted_servers.astray(connection)
            astray = connection.execute(_ROWS.where(
                _BOOKING.id.in_(ids))).all() if ids else []
            unbound = connection.execute(_UNBOUND, {'now': now}).all()
        return [*astray, *(
            row for row in unbound if _may_move(row))]


def _may_move(row: ty.Any) -> bool:
    return reassignment.may_move(
        row, row.later, row.deferred or bool(row.kept), row)


_RESERVATIONS, _LEASES, _DEFERRED_BUILDS = (
    models.Reservation.__table__, models.Lease.__table__,
    models.DeferredBuild.__table__)
_BOOKING, _RESERVATION, _LEASE, _DEFERRED = (
    models.Booking.__table__.c, _RESERVATIONS.c, _LEASES.c, _DEFERRED_BUILDS.c)
#: Bookings, with the columns that
#: :func:`blazar_core.leases.reassignment.may_move` reads.
_ROWS = sa.select(
    _BOOKING.id, _BOOKING.reservation_id, _BOOKING.host_id,
    _BOOKING.server_id,
    _BOOKING.start_date, _BOOKING.end_date, _BOOKING.resources,
    _BOOKING.dispatched_at, _BOOKING.claimed_at,
    _LEASE.id.label('lease_id'), _LEASE.project_id, _LEASE.status,
    _LEASE.deleted_at,
    _LEASE.created_at, _RESERVATION.params.is_not(None).label('later'),
    _DEFERRED.lease_id.is_not(None).label('deferred'),
    models.Recurrence.servers.label('kept'),
).join(_RESERVATIONS, _RESERVATION.id == _BOOKING.reservation_id).join(
    _LEASES, _LEASE.id == _RESERVATION.lease_id).outerjoin(
    _DEFERRED_BUILDS, _DEFERRED.lease_id == _LEASE.id).outerjoin(
    models.Recurrence, models.Recurrence.id == _LEASE.recurrence_id,
).order_by(_BOOKING.id)
_ON_HOST = _ROWS.where(
    _BOOKING.host_id == sa.bindparam('host'),
    ledger.is_held(sa.bindparam('now')))
#: The reservation of each server that migrates to a host.
_COMING = sa.select(_BOOKING.reservation_id).where(
    _BOOKING.reservation_id.in_(sa.bindparam('reservations', expanding=True)),
    _BOOKING.migrating_to == sa.bindparam('host'))
_UNBOUND = _ROWS.where(
    _BOOKING.host_id.is_(None), _BOOKING.end_date > sa.bindparam('now'),
    _BOOKING.dispatched_at.is_(None),
    _LEASE.status.in_((*states.BEFORE, *states.BEGUN)))
#: Leases with conditions, all of whose bookings have hosts.
_RELIEVED = sa.select(_LEASE.id, _LEASE.generation, _LEASE.conditions).where(
    _LEASE.status.in_((*states.BEFORE, *states.BEGUN)),
    _LEASE.conditions.is_not(None),
    ~sa.exists().where(
        _RESERVATION.lease_id == _LEASE.id,
        _BOOKING.reservation_id == _RESERVATION.id,
        _BOOKING.host_id.is_(None)))
