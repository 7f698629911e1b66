# SPDX-License-Identifier: Apache-2.0

"""Drain of hosts in maintenance, and evacuation of failed hosts.

Servers of leases on a failed host are evacuated if the operator has enabled
it, and once it is certain that no server runs there. Servers on a host that is
in maintenance, or will be soon, are live-migrated. Nova's scheduler chooses
the host, by the rule of capacity; the booking follows its server
(:mod:`~blazar_core.lifecycle.reconciliation`).

Nova reports the possible target hosts of a server. Free capacity is determined
from the reservation database, together with the servers whose moves were
requested just now.

Servers within a lease of whole hosts that have no booking of their own are
listed by the resource type of the reservation. They leave a failed host for
other hosts of their lease only; placement is asked for free capacity there,
and the target is recorded with the move.

Each server has one move (:mod:`~blazar_core.lifecycle.server_moves`) from the
outage of its host until it has left. Idempotent; safe to run concurrently.
"""

import collections
import dataclasses
import functools
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.leases import hosted_servers
from blazar_core.lifecycle import lease_status
from blazar_core.lifecycle import retries
from blazar_core.lifecycle import server_moves
from blazar_core.lifecycle.server_moves import Obstacle
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types

LOG = logging.getLogger(__name__)

#: Seconds for which the target host of a move may not count the server yet.
_SETTLE = 15


class Fit(ty.NamedTuple):
    """The number of servers for which there is capacity, and what is recorded
    of the move of the first one: its target, if it is within a lease of hosts.
    """

    number: int
    resources: model.Resources
    target: int | None = None


class TargetHosts:
    """Determines for how many servers other hosts have capacity."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._cloud = cloud

    def within(self, hosts: ty.Collection[str], needs: model.Demand,
               count: int = 1) -> Fit:
        """Return for how many servers hosts of one lease have capacity,
        according to placement.

        :param hosts: their uuids
        :raises CloudUnavailable: when placement does not answer
        """
        needs = dataclasses.replace(needs, among=None)
        hosts = self._admission.usable(needs).intersection(hosts)
        with self._admission.index.fresh(admissions.LAG) as timeline:
            ways = timeline.units.ways(needs)
        with self._database.reader() as session:
            ids = {uuid: host_id for uuid, host_id in session.execute(
                sa.select(models.Host.uuid, models.Host.id).where(
                    models.Host.uuid.in_(hosts))).tuples()}
            coming = session.execute(_COMING, self._just_now()).all()
        found: list[int] = []
        for uuid in sorted(ids):
            left = collections.Counter(self._cloud.free(uuid))
            for row in coming:
                if row.target == ids[uuid]:
                    left.subtract(row.resources)
            having = {model.base_of(rc) for rc in left
                      if model.base_of(rc) != rc}
            takes = [{**needs.resources, **{
                rc: amount for rc, amount in way.items()
                if model.base_of(rc) in having}} for way in ways]
            while len(found) < count:
                fitting = next((one for one in takes if all(
                    left[rc] >= amount for rc, amount in one.items())), None)
                if fitting is None:
                    break
                left.subtract(fitting)
                found.append(ids[uuid])
            if len(found) == count:
                break
        return Fit(len(found), needs.resources, found[0] if found else None)

    def fits(self, server_ids: ty.Sequence[str], source: str) -> Fit:
        """Return for how many servers of a reservation with bookings of their
        own there is capacity on hosts to which Nova would move them.

        :param server_ids: Nova's target hosts of the first one are used for
            all
        :param source: the uuid of the host of all of them
        """
        with self._database.reader() as session:
            enrolled = session.scalar(sa.select(models.Host.enrollment).where(
                models.Host.uuid == source)) is not None
        needs = self._cloud.needs(server_ids[0], lent=enrolled)
        targets = needs.hosts or frozenset()
        now = self._clock.now()
        with self._database.reader() as session:
            booking = lease_status.booking_of(session, server_ids[0])
            if booking is None:
                return Fit(0, {})
            reservation, lease = booking.reservation, booking.reservation.lease
            outer = hosted_servers.of(reservation)
            if outer is not None:
                targets &= hosted_servers.hosts(session, outer)
            siblings = [one for one in reservation.bookings
                        if one.server_id not in server_ids and
                        one.host_id is not None]
            affinity = (reservation.params or {}).get('affinity')
            only, avoid = eligibility.bound(affinity, booking, siblings)
            uuids = {host_id: uuid for host_id, uuid in session.execute(
                sa.select(models.Host.id, models.Host.uuid).where(
                    models.Host.id.in_(only | avoid))).tuples()}
            others = self._on_the_way(session, server_ids)
        if only:
            targets &= {uuids[one] for one in only}
        # The first server to leave needs capacity for all of them.
        count = len(server_ids) + (
            len(siblings) if affinity and not only else 0)
        demand = model.Demand(
            model.as_requested(booking.resources, needs.groups),
            count=count, hosts=targets,
            affinity=model.Affinity.NONE if affinity is None or count == 1
            else model.Affinity.SAME if affinity
            else model.Affinity.DIFFERENT,
            avoid=frozenset({source, *(uuids[one] for one in avoid)}),
            groups=needs.groups, isolated=needs.isolated,
            among=None if outer is not None else needs.among
            if needs.among is model.HostPool.ALL else _among(enrolled))
        window = lease.booked(model.Window(now, max(lease.end_date, now + 1)))
        if others and self._admission.quote([demand, *others], window):
            return Fit(0, {})
        fit = Fit(self._admission.fits(demand, window), demand.resources)
        if outer is not None:
            inner = self.within(targets - demand.avoid, needs, count)
            fit = inner._replace(number=min(fit.number, inner.number))
        return fit if not affinity or fit.number == count else (
            fit._replace(number=0))

    def _on_the_way(self, session: orm.Session,
                    server_ids: ty.Collection[str]) -> list[model.Demand]:
        """Return the demands of servers whose moves were requested just now
        and whose targets the reservation database does not know yet.
        """
        return [model.Demand(
            row.resources, avoid=frozenset([row.uuid]),
            among=_among(row.enrollment is not None))
            for row in session.execute(_ON_THE_WAY, self._just_now())
            if row.server_id not in server_ids]

    def _just_now(self) -> dict[str, int]:
        now = self._clock.now()
        return {'since': now - _SETTLE, 'until': now + _SETTLE}


def _among(enrolled: bool) -> model.HostPool:
    """Return the hosts to which a server may move: Nova keeps it among the
    enrolled hosts, or among all others.
    """
    return model.HostPool.ENROLLED if enrolled else model.HostPool.COMMON


_TARGET_MOVE = models.ServerMove.__table__.c
_REQUESTED = sa.and_(server_moves.is_open, _TARGET_MOVE.status.in_(
    states.UNSETTLED), _TARGET_MOVE.requested_at.between(
        sa.bindparam('since'), sa.bindparam('until')))
_COMING = sa.select(
    _TARGET_MOVE.target, _TARGET_MOVE.resources).where(_REQUESTED)
_ON_THE_WAY = sa.select(_TARGET_MOVE.server_id, _TARGET_MOVE.resources,
                        models.Host.uuid, models.Host.enrollment).join(
                            models.Host, models.Host.id ==
                            _TARGET_MOVE.source).where(
                                _REQUESTED, _TARGET_MOVE.target.is_(None),
                                sa.exists().where(
                                    models.Booking.server_id ==
                                    _TARGET_MOVE.server_id,
                                    models.Booking.host_id ==
                                    _TARGET_MOVE.source,
                                    models.Booking.migrating_to.is_(None)))


#: Seconds between two looks, for which one requests moves at most, and within
#: which the request of a move has to be sent.
PAUSE, _WORK, _SEND = 3, 10, 20
#: Seconds after which a server without capacity elsewhere is tried again, and
#: after which Nova is asked again for servers without a booking.
_SOON = 30

#: The log line on a failure, which does not keep other servers from leaving.
_STAYS = '%s stays on an unavailable host for now: %s'

#: Called with the uuids of failed hosts, each with whether it may be fenced;
#: returns those that are certain to run no server.
Certain: ty.TypeAlias = ty.Callable[
    [ty.Mapping[str, bool]], ty.Collection[str]]


class _Leaving(ty.NamedTuple):
    """A move that is due.

    :ivar uuid: of the host that the server leaves
    :ivar kind: of that host's outage; None: the server need not leave it, or
        its booking has followed it already
    :ivar booked: whether the server has a booking of its own there
    """

    move: models.ServerMove
    uuid: str
    name: str
    kind: str | None
    booked: bool

    @property
    def failed(self) -> bool:
        return self.kind == outages.FAILURE


class Evacuation:
    """Moves servers off unavailable hosts.

    :param interval: seconds before maintenance from which on servers are moved
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 interval: int, types: resource_types.ResourceTypes) -> None:
        self._targets = TargetHosts(
            database, clock, admission, cloud)
        self._server_moves = server_moves.ServerMoves(
            database, clock, ahead=interval)
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._interval = interval
        self._types = types
        #: The hosts that were logged as not yet certain to be down.
        self._told: frozenset[str] = frozenset()
        #: By the booking of a failed host, when its servers without a booking
        #: were listed last.
        self._listed: dict[int, float] = {}

    def look(self, certain: Certain | None = None) -> None:
        """Request moves of servers that have to leave.

        Stops after :data:`_WORK` seconds; the next look continues.

        :param certain: None: nothing is evacuated
        """
        # Hosts are fenced before anything is written.
        self._database.check_clock()
        late = self._clock.elapsed() + _WORK
        moves = self._due()
        stays = self._staying(certain is not None)
        sure = () if certain is None else self._sure({
            one.uuid: one.name for one in (*moves, *stays)
            if one.kind == outages.FAILURE}, certain)
        new: dict[tuple[str, str], list[ty.Any]] = (
            collections.defaultdict(list))
        for one in stays:
            if one.uuid in sure or one.kind == outages.MAINTENANCE:
                new[one.lease_id, one.uuid].append(one)
        for (lease_id, _uuid), rows in new.items():
            if self._clock.elapsed() <= late:
                with (logs.about(lease_id),
                      retries.tried_later(LOG, _STAYS, f'Lease {lease_id}')):
                    self._plan(rows)
        for one in self._due() if new else moves:
            move = one.move
            if self._clock.elapsed() <= late and (
                    not one.failed or one.uuid in sure):
                with (logs.about(
                        move.lease_id, move.project_id, move.server_id),
                      retries.tried_later(
                          LOG, _STAYS, f'Server {move.server_id}')):
                    self._go_on(one)

    def _now(self) -> dict[str, int]:
        now = self._clock.now()
        return {'now': now, 'soon': now + self._interval}

    def _due(self) -> list[_Leaving]:
        """Return the open moves: those never requested first, and of them
        those off failed hosts.
        """
        with self._database.reader() as session:
            return [_Leaving(
                move, uuid, name, kind if host_id in (None, move.source)
                else None, host_id == move.source)
                for move, uuid, name, kind, host_id in session.execute(
                    _DUE, self._now() | self._with_hosts())]

    def _with_hosts(self) -> dict[str, list[str]]:
        """Return the resource types within whose reservations servers have no
        bookings.
        """
        return {'types': [name for name, kind in self._types.named.items()
                          if kind.has_hosts]}

    def _staying(self, evacuates: bool) -> list[ty.Any]:
        """Return servers on unavailable hosts that have no move yet, and
        bookings of failed hosts whose servers have no bookings.
        """
        with self._database.connection() as connection:
            rows = connection.execute(_STAYING, self._now() | {
                'kinds': [outages.MAINTENANCE, *(
                    [outages.FAILURE] if evacuates else [])]}).all()
            hosted = connection.execute(
                _HOSTED, self._now() | self._with_hosts(),
            ).all() if evacuates else []
        late = self._clock.elapsed() - _SOON
        self._listed = {one.id: self._listed[one.id] for one in hosted
                        if self._listed.get(one.id, late) > late}
        return [*rows, *(
            one for one in hosted if one.id not in self._listed)]

    def _sure(self, failed: ty.Mapping[str, str], certain: Certain,
              ) -> ty.Collection[str]:
        """Return the failed hosts that are certain to run no server.

        :param failed: their names, by uuid
        """
        if not failed:
            return ()
        with self._database.connection() as connection:
            # Do not fence a host in maintenance: its operator works on it.
            taken = set(connection.scalars(_TAKEN, {
                'hosts': [*failed], 'now': self._clock.now()}))
        try:
            sure = certain({uuid: uuid not in taken for uuid in failed})
        except errors.CloudUnavailable as exc:
            LOG.warning('Evacuation: whether nova-compute is down on failed '
                        'hosts is not known now: %s', exc)
            return ()
        waiting = frozenset(failed.keys() - set(sure))
        for uuid in sorted(waiting - self._told):
            LOG.warning(
                'Servers of leases on host %s, which has failed, are not '
                'evacuated until it is certain that no server runs there: '
                'power it off, and force its nova-compute down (openstack '
                'compute service set --down %s nova-compute)', failed[uuid],
                failed[uuid])
        self._told = waiting
        return sure

    def _plan(self, stays: ty.Sequence[ty.Any]) -> None:
        """Record which servers of a lease have to leave a host.

        :raises CloudUnavailable: when the servers there are not known
        """
        first = stays[0]
        server_ids = {one.server_id for one in stays if one.server_id}
        for one in stays:
            if one.server_id is None:
                server_ids |= self._hosted(one)
        if server_ids:
            self._server_moves.plan(first.lease_id, _REASONS[first.kind],
                                    first.host_id, sorted(server_ids))

    def _hosted(self, one: ty.Any) -> set[str]:
        """Return the servers without a booking on a failed host.

        :raises CloudUnavailable: when they cannot be listed now
        """
        self._listed[one.id] = self._clock.elapsed()
        with self._database.reader() as session:
            booking = session.get(models.Booking, one.id)
            if booking is None:
                return set()
            kind = self._types.of_row(booking.reservation)
            reserved = resource_types.context_of(session, booking.reservation)
        there = set(kind.hosted_servers(reserved, one.uuid))
        with self._database.reader() as session:
            return there.difference(session.scalars(sa.select(
                models.Booking.server_id).where(models.Booking.server_id.in_(
                    there)).union(sa.select(_MOVE.server_id).where(
                        _MOVE.lease_id == one.lease_id,
                        server_moves.is_open))))

    def _go_on(self, one: _Leaving) -> None:
        """Request the move of a server, unless another process does or it
        cannot be moved.
        """
        move = one.move
        # Starts before the commit: a process may stall right after that.
        deadline = cloud_api.Deadline(self._clock, _SEND)
        if not self._server_moves.put_off(move, server_moves.AGAIN):
            return
        seen = self._cloud.look(move.server_id)
        status = self._server_moves.next_status(move, seen, one.uuid)
        if status == states.Move.MOVED and one.booked:
            # The booking follows shortly, or the server returns to this host.
            return
        if one.kind is None and not seen.busy and (
                status != states.Move.MOVED):
            status = states.Move.CANCELLED
        if status != move.status:
            self._server_moves.write(move.lease_id, {move.id: status}, None,
                                     move.attempts)
        if status in states.MOVE.final():
            return
        why = self._why_bound(seen, move.server_id, one.uuid, one.failed)
        if why is Obstacle.BUSY and move.attempts:
            self._cloud.reset_lost_task(move.server_id)
        if why is Obstacle.BUSY and not move.attempts or why is None or (
                why == '' and status != states.Move.PLANNED):
            return
        if why == '':
            why = self._request(one, deadline)
        if why:
            LOG.warning('Lease %s: server %s stays on host %s, which is '
                        'unavailable: %s',
                        move.lease_id, move.server_id, one.name, why)
        if why in (Obstacle.NO_CAPACITY, Obstacle.LATE):
            self._server_moves.put_off(move, _SOON)

    def _request(self, one: _Leaving, deadline: cloud_api.Deadline,
                 ) -> str | None:
        """Request a move if there is capacity; return why not, if not."""
        move = one.move
        fit = self._targets.fits(
            [move.server_id], one.uuid,
        ) if one.booked else self._targets.within(
            self._other_hosts(move, one.uuid),
            self._cloud.needs(move.server_id))
        if not fit.number:
            return Obstacle.NO_CAPACITY
        LOG.info('Lease %s: server %s leaves host %s, which is unavailable',
                 move.lease_id, move.server_id, one.name)
        return self._server_moves.request(move, functools.partial(
            self._cloud.evacuate, move.server_id, move.lease_id,
        ) if one.failed else functools.partial(
            self._cloud.move, move.server_id, None, move.lease_id,
        ), deadline, reason=_REASONS[ty.cast(str, one.kind)],
            resources=fit.resources, target=fit.target)

    def _other_hosts(self, move: models.ServerMove, source: str,
                     ) -> frozenset[str]:
        """Return the uuids of the other hosts of a lease of hosts."""
        with self._database.reader() as session:
            reservation_id = session.scalar(sa.select(
                models.Booking.reservation_id).join(models.Reservation).where(
                    models.Reservation.lease_id == move.lease_id,
                    models.Booking.host_id == move.source,
                    models.Booking.server_id.is_(None)))
            return frozenset() if reservation_id is None else (
                hosted_servers.hosts(session, reservation_id) - {source})

    def obstacles(self, rows: ty.Sequence[models.Booking], uuid: str,
                  ) -> dict[int, str]:
        """Return why servers of a reservation would stay on their host if it
        were in maintenance now, by the ids of the bookings that would.

        :param rows: of servers, with their reservation
        :param uuid: of the host
        :raises CloudUnavailable: when Nova does not answer
        """
        found: dict[int, str] = {}
        going: list[models.Booking] = []
        for row in rows:
            server_id = ty.cast(str, row.server_id)
            why = self._why_bound(
                self._cloud.look(server_id), server_id, uuid, False)
            if why:
                found[row.id] = why
            elif why == '':
                going.append(row)
        if going:
            fit = self._targets.fits(
                [ty.cast(str, row.server_id) for row in going], uuid)
            found |= {row.id: Obstacle.NO_CAPACITY
                      for row in going[fit.number:]}
        return found

    def _why_bound(self, seen: cloud_api.ObservedServer, server_id: str,
                   source: str, failed: bool) -> str | None:
        """Return why Nova would not move a server.

        :returns: empty: it would; None: the server does not run on the host
        """
        if seen.host != source or (
                seen.state is not cloud_api.ServerState.RUNNING):
            return None
        if seen.busy:
            return Obstacle.BUSY
        return '' if failed or server_id in self._cloud.movable(
            [server_id]) else Obstacle.BOUND


_REASONS = {kind: reason for reason, kind in server_moves.OUTAGE_OF.items()}
_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_MOVE = models.ServerMove.__table__.c
_OUTAGE = models.Booking.__table__.alias('outage')
_SOUND = models.Booking.__table__.alias('sound')
_HOST = models.Outage.host_id
_NOW: sa.BindParameter[int] = sa.bindparam('now')


def _is_unavailable(host_id: ty.Any) -> sa.ColumnElement[bool]:
    """Return the condition that a host has an outage in progress, or that its
    maintenance starts soon.
    """
    return sa.and_(
        _HOST == host_id, _OUTAGE.c.host_id == _HOST,
        _OUTAGE.c.outage == models.Outage.kind,
        _OUTAGE.c.start_date <= sa.bindparam('soon'),
        _OUTAGE.c.end_date > _NOW)


#: Leases that do not end yet.
_GOES_ON = sa.and_(_LEASE.status.not_in(states.ENDING),
                   _LEASE.deleted_at.is_(None))
#: Bookings on unavailable hosts.
_BOOKED = sa.select(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.host_id, models.Outage.kind,
    models.Host.uuid, models.Host.name, _LEASE.id.label('lease_id'),
).join(models.Booking, _BOOKING.host_id == _HOST).join(
    models.Host, models.Host.id == _HOST).join(
    models.Reservation, models.Reservation.id == _BOOKING.reservation_id).join(
    models.Lease, _LEASE.id == models.Reservation.lease_id).where(
        _GOES_ON).order_by(
    models.Outage.kind, _LEASE.created_at, _LEASE.id, _BOOKING.id)
#: Servers of leases without a move that run on failed hosts, or on hosts in
#: maintenance that have not failed.
_STAYING = _BOOKED.join(_OUTAGE, _is_unavailable(_HOST)).where(
    models.Outage.kind.in_(sa.bindparam('kinds', expanding=True)),
    _BOOKING.end_date > _OUTAGE.c.start_date,
    _BOOKING.server_id.is_not(None), _BOOKING.running,
    sa.or_(models.Outage.kind == outages.FAILURE,
           ~outages.has_failed(_HOST)),
    ~sa.exists().where(
        _MOVE.lease_id == _LEASE.id,
        _MOVE.server_id == _BOOKING.server_id, server_moves.is_open))
_TYPES = models.Reservation.resource_type.in_(
    sa.bindparam('types', expanding=True))
#: Bookings of failed hosts whose active lease has other hosts, including
#: replacements.
_HOSTED = _BOOKED.where(
    models.Outage.kind == outages.FAILURE, models.Outage.began_at.is_not(None),
    _BOOKING.server_id.is_(None),
    _BOOKING.start_date <= _NOW, _BOOKING.end_date > _NOW,
    _TYPES, _LEASE.status == states.Lease.ACTIVE,
    sa.exists().where(
        _SOUND.c.reservation_id == _BOOKING.reservation_id,
        _SOUND.c.host_id.is_not(None), _SOUND.c.start_date <= _NOW,
        ~outages.has_failed(_SOUND.c.host_id)))
_TAKEN = sa.select(models.Host.uuid).join(
    models.Outage, _HOST == models.Host.id).where(
    models.Host.uuid.in_(sa.bindparam('hosts', expanding=True)),
    models.Outage.kind == outages.MAINTENANCE, models.Outage.began_at <= _NOW)
#: The condition that the lease still has the host that the server leaves.
_HAS_HOST = sa.exists().where(
    models.Reservation.lease_id == _MOVE.lease_id, _TYPES,
    _SOUND.c.reservation_id == models.Reservation.id,
    _SOUND.c.host_id == _MOVE.source, _SOUND.c.server_id.is_(None),
).correlate(models.ServerMove)
#: The kind of outage of the host that a server leaves: failure before
#: maintenance. None for a server without a booking on a host that is not of
#: its lease: it has left the lease.
_KIND = sa.select(sa.func.min(models.Outage.kind)).where(
    _is_unavailable(_MOVE.source), _GOES_ON,
    sa.or_(_BOOKING.host_id.is_not(None), _HAS_HOST),
).correlate(models.ServerMove, models.Lease, models.Booking).scalar_subquery()
_DUE = sa.select(
    models.ServerMove, models.Host.uuid, models.Host.name,
    _KIND.label('kind'), _BOOKING.host_id,
).join(models.Host, models.Host.id == _MOVE.source).join(
    models.Lease, _LEASE.id == _MOVE.lease_id).outerjoin(
    models.Booking, _BOOKING.server_id == _MOVE.server_id).where(
        server_moves.is_open, sa.or_(
            server_moves.is_due, _BOOKING.host_id != _MOVE.source,
            # Else the next outage of the host would inherit the pause.
            ~sa.exists().where(_HOST == _MOVE.source))).order_by(
    _MOVE.next_at, _MOVE.reason, _MOVE.id)
