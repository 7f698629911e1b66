# SPDX-License-Identifier: Apache-2.0

"""Servers within leases of whole hosts that have no bookings of their own.

They are the cloud's, not the books': where one is is asked of the type of the
reservation. Where a host of the lease has failed and the lease has others,
they leave it for those, and for no host beside them.

Where servers may go that are to leave their hosts, and how many of them.

To which hosts the cloud would take a server is asked of the cloud. What is
free there the books say, with those reckoned in who were just asked for; of
who is within a lease of hosts they count nothing, so that there the cloud
says that, too.

Servers of leases that leave hosts that are away.

What runs on a host that has failed is evacuated, where the operator wants
that, and once it is certain that nothing runs there any more. What runs on one
that is in maintenance, or soon will be, is moved as it runs. To which host is
for the cloud's scheduler to say, by the rule of the books; the booking follows
its server (:mod:`~blazar_core.lifecycle.reconciliation`). So are servers
evacuated that have no booking of their own, because they are within a lease of
hosts (:mod:`~blazar_core.healing.evacuation`).

Any number of processes may do this at the same time. A server is asked for by
who has written into its booking, or that of its host, that he is about to, and
by nobody else for :data:`~blazar_core.healing.evacuation.AGAIN` seconds;
a process that stood still meanwhile does not ask any more. What is under way
is seen in the cloud.
"""

import collections
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import eligibility
from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import clock_skew
from blazar_core.db import models
from blazar_core.healing import alternatives
from blazar_core.leases import hosted_servers
from blazar_core.lifecycle import fault_points
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types

__all__ = ['AGAIN', 'BOUND', 'BUSY', 'Certain', 'Evacuation', 'FreeCapacity',
           'HostedOnFailed', 'HostedServers', 'LATER', 'PAUSE', 'TargetHosts',
           'is_due', 'lodgings', 'pause']

LOG = logging.getLogger(__name__)


class HostedOnFailed(ty.NamedTuple):
    """The servers that a host which has failed has of a lease of hosts.

    :ivar server_ids: those that have no bookings
    :ivar hosts: the uuids of the other hosts of their reservation
    """

    server_ids: list[str]
    hosts: frozenset[str]


class HostedServers:
    """Finds them."""

    def __init__(self, database: api.Database,
                 types: resource_types.ResourceTypes) -> None:
        self._database = database
        self._types = types

    @property
    def types(self) -> list[str]:
        """The names of the types that have such servers."""
        return [name for name, kind in self._types.named.items()
                if kind.has_hosts]

    def on(self, booking_id: int, source: str) -> HostedOnFailed | None:
        """Those on a host, as far as is known without a look at each.

        :param booking_id: of the host, for their lease
        :param source: the uuid of the host
        :returns: None when it is not the lease's any more
        :raises CloudUnavailable: when that cannot be said now
        """
        with self._database.reader() as session:
            booking = session.get(models.Booking, booking_id)
            if booking is None:
                return None
            reservation = booking.reservation
            kind = self._types.of_row(reservation)
            reserved = resource_types.context_of(session, reservation)
            hosts = hosted_servers.hosts(session, reservation.id) - {source}
        there = set(kind.guests(reserved, source))
        with self._database.reader() as session:
            there -= set(session.scalars(sa.select(
                models.Booking.server_id).where(
                    models.Booking.server_id.in_(there))))
        return HostedOnFailed(sorted(there), hosts)


_HOSTED_BOOKING = models.Booking.__table__.c
_HOSTED_LEASE = models.Lease.__table__.c
_SOUND = models.Booking.__table__.alias('sound')


def lodgings(*columns: ty.Any) -> sa.Select[ty.Any]:
    """The bookings of hosts that have failed, for leases that have begun and
    have other hosts; of :attr:`HostedServers.types`, as the parameter
    ``types``.

    :param columns: what is wanted of them, their host and their lease
    """
    return sa.select(*columns).select_from(models.Outage).join(
        models.Booking, _HOSTED_BOOKING.host_id == models.Outage.host_id).join(
        models.Host, models.Host.id == models.Outage.host_id).join(
        models.Reservation,
        models.Reservation.id == _HOSTED_BOOKING.reservation_id).join(
        models.Lease, _HOSTED_LEASE.id == models.Reservation.lease_id).where(
            models.Outage.kind == outages.FAILURE,
            models.Outage.began_at.is_not(None),
            _HOSTED_BOOKING.server_id.is_(None),
            _HOSTED_BOOKING.start_date <= sa.bindparam('now'),
            _HOSTED_BOOKING.end_date > sa.bindparam('now'),
            models.Reservation.resource_type.in_(
                sa.bindparam('types', expanding=True)),
            _HOSTED_LEASE.status == states.Lease.ACTIVE,
            _HOSTED_LEASE.deleted_at.is_(None),
            # One that it got instead, too.
            sa.exists().where(
                _SOUND.c.reservation_id == _HOSTED_BOOKING.reservation_id,
                _SOUND.c.host_id.is_not(None),
                _SOUND.c.start_date <= sa.bindparam('now'),
                ~outages.has_failed(_SOUND.c.host_id)))


#: Seconds after which a server is asked for again that stays where it is,
#: twice as many each time, and how often they are doubled.
AGAIN, _DOUBLED = 120, 5
#: Seconds for which the books may not know yet where somebody goes who was
#: asked for.
_SETTLE = 15


class FreeCapacity:
    """What some hosts have left, as the cloud counts: the books count nobody
    who is within a lease of hosts.

    :param hosts: their uuids
    :param coming: what those need who were just asked to go there
    """

    def __init__(self, cloud: cloud_api.Cloud, hosts: ty.Collection[str],
                 coming: ty.Iterable[tuple[str, model.Resources]]) -> None:
        self._cloud = cloud
        self._hosts = sorted(hosts)
        self._coming = [*coming]
        self._left: dict[str, collections.Counter[str]] = {}

    def take(self, needs: model.Demand) -> str | None:
        """Take what a server needs, of the first host that has it.

        Each host is asked for when it is needed.

        :returns: the uuid of the host; None: none has
        :raises CloudUnavailable: when that cannot be said now
        """
        for host in self._hosts:
            if needs.hosts is not None and host not in needs.hosts:
                continue
            if host not in self._left:
                self._left[host] = collections.Counter(self._cloud.free(host))
                for target, taken in self._coming:
                    if target == host:
                        self._left[host].subtract(taken)
            left = self._left[host]
            if all(left[name] >= amount
                   for name, amount in needs.resources.items()):
                left.subtract(needs.resources)
                return host
        return None


class TargetHosts:
    """Says for how many there is capacity."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._cloud = cloud
        #: Those for whom the cloud was just asked, who go to a host of a
        #: lease of hosts: when that was, to which one, as far as can be said,
        #: and what they need.
        self._asked: list[tuple[float, str, model.Resources]] = []

    def room(self, hosts: ty.Collection[str]) -> FreeCapacity:
        """What some hosts of a lease have left for those within it."""
        late = self._clock.elapsed() - _SETTLE
        self._asked = [one for one in self._asked if one[0] > late]
        return FreeCapacity(self._cloud, hosts, [one[1:] for one in
                                                 self._asked])

    def goes(self, host: str, needs: model.Demand) -> None:
        """Somebody is about to be asked to go to a host of such a lease: the
        cloud counts him there a moment later.
        """
        self._asked.append((self._clock.elapsed(), host, needs.resources))

    def fits(self, ids: ty.Sequence[int], server_id: str, source: str,
             goes: bool = False) -> int:
        """For how many of some bookings of a reservation there is capacity in
        the books, on hosts to which the cloud would take their servers.

        :param server_id: of one of them; it goes where all of them may
        :param source: the uuid of the host of all of them
        :param goes: whether they are about to be asked
        """
        needs = self._cloud.needs(server_id)
        targets = needs.hosts or frozenset()
        now = self._clock.now()
        with self._database.reader() as session:
            booking = session.get(models.Booking, ids[0])
            if booking is None:
                return 0
            reservation, lease = booking.reservation, booking.reservation.lease
            outer = hosted_servers.of(reservation)
            if outer is not None:
                targets &= hosted_servers.hosts(session, outer)
            siblings = [one for one in reservation.bookings
                        if one.id not in ids and one.host_id is not None]
            affinity = (reservation.params or {}).get('affinity')
            only, avoid = eligibility.bound(affinity, booking, siblings)
            uuids = {host_id: uuid for host_id, uuid in session.execute(
                sa.select(models.Host.id, models.Host.uuid).where(
                    models.Host.id.in_(only | avoid))).tuples()}
            others = self._on_the_way(session, ids, now)
            enrolled = session.scalar(sa.select(models.Host.enrolment).where(
                models.Host.uuid == source)) is not None
        if only:
            targets &= {uuids[one] for one in only}
        # The first one that leaves the others goes where all of them can.
        count = len(ids) + (
            len(siblings) if affinity and not only else 0)
        demand = model.Demand(
            booking.resources, count=count, hosts=targets,
            affinity=model.Affinity.NONE if affinity is None or count == 1
            else model.Affinity.SAME if affinity
            else model.Affinity.DIFFERENT,
            avoid=frozenset({source, *(uuids[one] for one in avoid)}),
            groups=needs.groups, isolated=needs.isolated,
            among=_among(enrolled) if outer is None else None)
        window = lease.booked(model.Window(now, max(lease.end_date, now + 1)))
        if others and self._admission.quote([demand, *others], window):
            return 0
        fits = self._admission.fits(demand, window)
        if outer is not None:
            room = self.room(targets - demand.avoid)
            found = [host for _each in range(count)
                     if (host := room.take(needs)) is not None]
            fits = min(fits, len(found))
            for host in found if goes else ():
                self.goes(host, needs)
        return fits if not affinity or fits == count else 0

    def _on_the_way(self, session: orm.Session, ids: ty.Collection[int],
                    now: int) -> list[model.Demand]:
        """What those need who were just asked for, and of whom the books do
        not know yet where they go.
        """
        return [model.Demand(
            row.resources, avoid=frozenset([row.uuid]),
            among=_among(row.enrolment is not None))
            for row in session.execute(_ON_THE_WAY, {'now': now})
            if row.id not in ids and
            abs(row.next_evacuation_at - pause(row.evacuations) - now
                ) <= _SETTLE]


def _among(enrolled: bool) -> model.HostPool:
    """Where a server on a host may go: Nova keeps it among the enrolled hosts
    or among all others.
    """
    return model.HostPool.ENROLLED if enrolled else model.HostPool.COMMON


def pause(tries: int) -> int:
    """Seconds until a server is asked for again that was so often."""
    return AGAIN << min(tries - 1, _DOUBLED)


_TARGET_BOOKING = models.Booking.__table__.c
_TARGET_HOST = models.Outage.host_id
_NOW = sa.bindparam('now', type_=sa.BigInteger)
#: Twice the pause of a server that was asked for so often.
_FURTHEST = sa.case(*(
    (_TARGET_BOOKING.evacuations <= tries, 2 * pause(tries))
    for tries in range(1, _DOUBLED + 1)),
    (_TARGET_BOOKING.evacuations.is_(None), 2 * AGAIN),
    else_=2 * pause(_DOUBLED + 1))
#: Whether a server may be asked for now; it says when again.
is_due = sa.or_(_TARGET_BOOKING.next_evacuation_at.is_(None),
                clock_skew.is_over(_TARGET_BOOKING.next_evacuation_at, _NOW,
                                   _FURTHEST))
#: What was asked for, and may be on its way from a host that is away.
_ON_THE_WAY = sa.select(
    _TARGET_BOOKING.id, _TARGET_BOOKING.resources,
    _TARGET_BOOKING.next_evacuation_at, _TARGET_BOOKING.evacuations,
    models.Host.uuid, models.Host.enrolment,
).join(models.Host, models.Host.id == _TARGET_BOOKING.host_id).where(
    _TARGET_BOOKING.host_id.in_(sa.select(_TARGET_HOST)),
    _TARGET_BOOKING.evacuations > 0,
    # Of those within leases of hosts the books count nothing.
    ledger.TAKES, _TARGET_BOOKING.server_id.is_not(None),
    _TARGET_BOOKING.migrating_to.is_(None),
    _TARGET_BOOKING.next_evacuation_at > sa.bindparam('now'))


#: Seconds between two looks, and how long one asks for servers at most.
PAUSE, _WORK = 3, 10
#: Seconds after which one is tried again for whom there was no other host.
_SOON = 30
#: Seconds after which nobody asks any more who was about to.
_SEND = 20
#: Of so many servers at most that stay a line in the log says why.
_SHOWN = 5

#: Why a server stays that the cloud does not move as it runs, or that moves.
BOUND = ('It does not run, or what it has of its host or who owns it keeps it '
         'there: migrate it by hand.')
BUSY = 'It has a task under way.'
LATER = 'Others were asked for first.'

#: Told the uuids of hosts that have failed, and of each whether somebody may
#: see to it that it is down: those that are certain to run nothing any more.
Certain: ty.TypeAlias = ty.Callable[
    [ty.Mapping[str, bool]], ty.Collection[str]]


class _Stay(ty.NamedTuple):
    """A server that is on a host that is away, or will be.

    :ivar server_id: None: all within a lease of hosts that have no bookings
    :ivar due: from when on it may be asked for; 0: it never was
    :ivar tries: how often it was
    :ivar source: the uuid of the host
    :ivar name: the name of that
    :ivar failed: whether that has failed
    :ivar taken: whether it is in maintenance
    """

    booking_id: int
    server_id: str | None
    lease_id: str
    project_id: str
    due: int
    tries: int
    source: str
    name: str
    failed: bool
    taken: bool


class Evacuation:
    """Asks the cloud to take servers off hosts that are away.

    :param interval: seconds before maintenance from which on what runs there
        is moved
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: cloud_api.Cloud,
                 interval: int, types: resource_types.ResourceTypes) -> None:
        self._destinations = TargetHosts(
            database, clock, admission, cloud)
        self._lodgers = HostedServers(database, types)
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._interval = interval
        #: The hosts of which it was said that they wait for certainty.
        self._told: frozenset[str] = frozenset()

    def look(self, certain: Certain | None = None) -> None:
        """Ask for servers that are to leave, as long as that may last; the
        next look goes on with others.

        Where no host is away, that is one SELECT of a table without rows.

        :param certain: None: nothing is evacuated
        """
        # To fence a host writes nothing before.
        self._database.check_clock()
        late = self._clock.elapsed() + _WORK
        stays = self._due(certain is not None)
        sure = () if certain is None else self._sure(stays, certain)
        for stay in stays:
            if self._clock.elapsed() > late:
                return
            if stay.failed and stay.source not in sure:
                continue
            with logs.about(stay.lease_id, stay.project_id, stay.server_id):
                self._try(stay)

    def _try(self, stay: _Stay) -> None:
        """Ask for a server; what fails keeps no other one from leaving."""
        try:
            self._ask(stay)
        except errors.DatabaseUnavailable:
            raise
        except Exception as exc:
            known = isinstance(
                exc, errors.CloudUnavailable | errors.ConcurrentUpdate)
            LOG.warning('Server %s stays on host %s for now: %s',
                        stay.server_id, stay.name, exc, exc_info=not known)

    def _due(self, evacuates: bool) -> list[_Stay]:
        """Whom somebody may ask for now: first those for whom nobody has,
        and of them those whose host has failed; then who waits for longest.
        Last those that have no bookings, who take longer.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            rows = connection.execute(_STAYING, {
                'now': now, 'soon': now + self._interval,
                'kinds': [outages.MAINTENANCE, *(
                    [outages.FAILURE] if evacuates else [])]}).all()
            if evacuates:
                rows = [*rows, *connection.execute(_LODGING, {
                    'now': now, 'types': self._lodgers.types})]
        return [_Stay(row.id, row.server_id, row.lease_id, row.project_id,
                      row.next_evacuation_at or 0, row.evacuations or 0,
                      row.uuid, row.name, row.kind == outages.FAILURE,
                      row.taken)
                for row in sorted(rows, key=lambda row: (
                    row.server_id is None, row.next_evacuation_at or 0,
                    row.kind != outages.FAILURE, row.created_at,
                    row.lease_id, row.id))]

    def _sure(self, stays: ty.Iterable[_Stay], certain: Certain,
              ) -> ty.Collection[str]:
        """The hosts that have failed and are certain to run nothing."""
        failed = {stay.source: stay for stay in stays if stay.failed}
        if not failed:
            return ()
        try:
            # Its operator is at one that is in maintenance.
            sure = certain({uuid: not stay.taken
                            for uuid, stay in failed.items()})
        except errors.CloudUnavailable as exc:
            LOG.warning('Which hosts that have failed are certain to be down '
                        'is not known now: %s', exc)
            return ()
        waiting = frozenset(failed.keys() - set(sure))
        for uuid in sorted(waiting - self._told):
            LOG.warning(
                'Servers of leases on host %s, which has failed, are not '
                'evacuated before it is certain that nothing runs there: '
                'switch it off, and force its nova-compute down (openstack '
                'compute service set --down)', failed[uuid].name)
        self._told = waiting
        return sure

    def _ask(self, stay: _Stay) -> None:
        """Have a server leave, if nobody else does and it can."""
        # They count from before the commit: a process may stand still right
        # behind that.
        deadline, work = (cloud_api.Deadline(self._clock, seconds)
                          for seconds in (_SEND, _WORK))
        taken = self._clock.now() + AGAIN
        if not self._write(stay, taken, stay.tries):
            return
        stay, tries = stay._replace(due=taken), stay.tries + 1
        fault_points.fault_point(fault_points.FaultPoint.RELOCATE_TAKEN,
                                 stay.lease_id)
        if stay.server_id is None:
            self._ask_lodgers(stay, tries, work)
            return
        why = self._why_stays(stay, stay.server_id)
        if why is None or why == BUSY and not stay.tries:
            return
        if why == '':
            due = self._clock.now() + pause(tries)
            if not self._write(stay, due, tries):
                # The host is there again.
                return
            LOG.info('Lease %s: server %s is to leave host %s, which is away',
                     stay.lease_id, stay.server_id, stay.name)
            why = self._cloud.evacuate(
                stay.server_id, stay.lease_id, deadline,
            ) if stay.failed else self._cloud.move(
                stay.server_id, None, stay.lease_id, deadline)
            fault_points.fault_point(fault_points.FaultPoint.RELOCATE_ASKED,
                                     stay.lease_id)
        if why:
            LOG.warning('Lease %s: server %s stays on host %s, which is away: '
                        '%s', stay.lease_id, stay.server_id, stay.name, why)
        if why == alternatives.NO_ROOM:
            self._write(stay, self._clock.now() + _SOON, stay.tries)

    def _ask_lodgers(self, stay: _Stay, tries: int,
                     deadline: cloud_api.Deadline) -> None:
        """Have all leave a host that a lease of hosts had, and that has
        failed, as many as there is room for on its others.
        """
        lodging = self._lodgers.on(stay.booking_id, stay.source)
        due = self._clock.now() + pause(tries)
        if lodging is None or not self._write(stay, due, tries):
            return
        stay = stay._replace(due=due)
        room = self._destinations.room(lodging.hosts)
        # Those at the end have their turn, too.
        first = due % max(len(lodging.server_ids), 1)
        asked, stays = 0, {}
        for server_id in (*lodging.server_ids[first:],
                          *lodging.server_ids[:first]):
            try:
                why = LATER if deadline.passed() else self._ask_lodger(
                    stay, server_id, room, deadline)
            except Exception as exc:
                # It keeps no other one from leaving.
                if not isinstance(exc, errors.CloudUnavailable):
                    LOG.exception('Server %s stays', server_id)
                why = str(exc) or type(exc).__name__
            if why:
                stays[server_id] = why
            asked += why == ''
        if stays:
            LOG.warning('Lease %s: %s servers stay on host %s, which is away: '
                        '%s', stay.lease_id, len(stays), stay.name, '; '.join(
                            f'{one}: {why}' for one, why in
                            [*stays.items()][:_SHOWN]))
        if {LATER, alternatives.NO_ROOM} & {*stays.values()}:
            self._write(stay, self._clock.now() + (
                AGAIN if asked else _SOON), stay.tries)

    def _ask_lodger(self, stay: _Stay, server_id: str,
                    room: FreeCapacity, deadline: cloud_api.Deadline,
                    ) -> str | None:
        """
        :returns: why it stays; empty: the cloud has taken it up; None: it is
            not there any more
        """
        why = self._why_bound(server_id, stay.source, stay.failed)
        if why != '':
            return why
        needs = self._cloud.needs(server_id)
        host = room.take(needs)
        if host is None:
            return alternatives.NO_ROOM
        self._destinations.goes(host, needs)
        LOG.info('Lease %s: server %s is to leave host %s, which is away',
                 stay.lease_id, server_id, stay.name)
        why = self._cloud.evacuate(server_id, stay.lease_id, deadline)
        fault_points.fault_point(fault_points.FaultPoint.RELOCATE_ASKED,
                                 stay.lease_id)
        return why

    def _write(self, stay: _Stay, due: int, tries: int) -> bool:
        """Write down from when on a server may be asked for again, if nobody
        else has meanwhile and its host is still away; says whether.
        """
        return self._database.retried(self._written, {
            'booking': stay.booking_id, 'of': stay.server_id,
            'seen': stay.due, 'due': due, 'tries': tries})

    def _written(self, values: dict[str, ty.Any]) -> bool:
        with self._database.begin() as connection:
            return connection.execute(_TAKE, values).rowcount == 1

    def obstacles(self, rows: ty.Sequence[models.Booking], uuid: str,
                  ) -> dict[int, str]:
        """Why servers of a reservation would stay on their host, if that was
        in maintenance now; by the ids of the bookings that would.

        :param rows: of servers, with their reservation
        :param uuid: of the host
        :raises CloudUnavailable: when that cannot be said now
        """
        found: dict[int, str] = {}
        going: list[models.Booking] = []
        for row in rows:
            assert row.server_id is not None
            why = self._why_bound(row.server_id, uuid, False)
            if why:
                found[row.id] = why
            elif why == '':
                going.append(row)
        if going:
            fits = self._destinations.fits(
                [row.id for row in going],
                ty.cast(str, going[0].server_id), uuid)
            found |= {row.id: alternatives.NO_ROOM for row in going[fits:]}
        return found

    def _why_stays(self, stay: _Stay, server_id: str) -> str | None:
        """
        :returns: empty: it can leave; None: it is not there any more, which
            the books know in a moment
        """
        why = self._why_bound(server_id, stay.source, stay.failed)
        if why != '':
            return why
        fits = self._destinations.fits(
            [stay.booking_id], server_id, stay.source, goes=True)
        return '' if fits else alternatives.NO_ROOM

    def _why_bound(self, server_id: str, source: str, failed: bool,
                   ) -> str | None:
        seen = self._cloud.look(server_id)
        if seen.host != source or (
                seen.state is not cloud_api.ServerState.RUNNING):
            return None
        if seen.busy:
            return BUSY
        return '' if failed or server_id in self._cloud.movable(
            [server_id]) else BOUND


_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_AWAY = models.Booking.__table__.alias('away')
_OTHER = models.Outage.__table__.alias('other')
_HOST = models.Outage.host_id
_TAKEN = sa.exists().where(
    _OTHER.c.host_id == _HOST, _OTHER.c.kind == outages.MAINTENANCE,
    _OTHER.c.began_at <= sa.bindparam('now')).label('taken')
#: The servers of leases that run on hosts that have failed, or of others
#: where these are in maintenance.
_STAYING = sa.select(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.next_evacuation_at,
    _BOOKING.evacuations, models.Outage.kind, models.Host.uuid,
    models.Host.name, _LEASE.id.label('lease_id'), _LEASE.project_id,
    _LEASE.created_at, _TAKEN).select_from(models.Outage).join(_AWAY, sa.and_(
        _AWAY.c.host_id == _HOST, _AWAY.c.outage == models.Outage.kind)).join(
    models.Booking, _BOOKING.host_id == _HOST).join(
    models.Host, models.Host.id == _HOST).join(
    models.Reservation, models.Reservation.id == _BOOKING.reservation_id).join(
    models.Lease, _LEASE.id == models.Reservation.lease_id).where(
        models.Outage.kind.in_(sa.bindparam('kinds', expanding=True)),
        _AWAY.c.start_date <= sa.bindparam('soon'),
        _AWAY.c.end_date > sa.bindparam('now'),
        _BOOKING.end_date > _AWAY.c.start_date,
        _BOOKING.server_id.is_not(None), _BOOKING.running,
        _LEASE.status.not_in(states.ENDING), _LEASE.deleted_at.is_(None),
        sa.or_(models.Outage.kind == outages.FAILURE,
               ~sa.exists().where(
                   _OTHER.c.host_id == _HOST,
                   _OTHER.c.kind == outages.FAILURE,
                   _OTHER.c.began_at.is_not(None))),
        is_due)
#: The same for those within leases of hosts that have no bookings: by theirs.
_LODGING = lodgings(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.next_evacuation_at,
    _BOOKING.evacuations, models.Outage.kind, models.Host.uuid,
    models.Host.name, _LEASE.id.label('lease_id'), _LEASE.project_id,
    _LEASE.created_at, _TAKEN,
).where(is_due)
_TAKE = sa.update(models.Booking.__table__).where(
    _BOOKING.id == sa.bindparam('booking'),
    _BOOKING.server_id.is_not_distinct_from(sa.bindparam('of')),
    sa.func.coalesce(_BOOKING.next_evacuation_at, 0) == sa.bindparam('seen'),
    sa.exists().where(_HOST == _BOOKING.host_id),
).values(next_evacuation_at=sa.bindparam('due'),
         evacuations=sa.bindparam('tries'))
