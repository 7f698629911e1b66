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

"""Servers of leases that leave hosts that are away.

What runs on a host that has failed is evacuated, where the operator wants
that, and once it is certain that nothing runs there any more. What runs on one
that is in maintenance, or soon will be, is moved as it runs. To which host is
for the cloud's scheduler to say, by the rule of the books; the booking follows
its server (:mod:`~blazar_core.lifecycle.observing`).

Any number of processes may do this at the same time. A server is asked for by
who has written into its booking that he is about to, and by nobody else for
:data:`AGAIN` seconds; a process that stood still meanwhile does not ask any
more. What is under way is seen in the cloud.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import judge
from blazar_core.books import outages
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.leases import within
from blazar_core.lifecycle import other_hosts
from blazar_core.lifecycle import steps

__all__ = ['AGAIN', 'BOUND', 'BUSY', 'PAUSE', 'Certain', 'Relocating']

LOG = logging.getLogger(__name__)

#: Seconds between two looks, and how long one asks for servers at most.
PAUSE, _WORK = 3, 10
#: Seconds after which a server is asked for again that stays where it is,
#: twice as many each time, and how often they are doubled; and after which it
#: is tried again where there was no other host for it.
AGAIN, _DOUBLED, _SOON = 120, 5, 30
#: Seconds after which nobody asks any more who was about to, and for which
#: the books may not know yet where somebody goes who was asked for.
_SEND, _SETTLE = 20, 15

#: Why a server stays that the cloud does not move as it runs, or that moves.
BOUND = ('It does not run, or what it has of its host or who owns it keeps it '
         'there: migrate it by hand.')
BUSY = 'It has a task under way.'

#: Told the uuids of hosts that have failed, and of each whether somebody may
#: see to it that it is down: those that are certain to run nothing any more.
Certain: ty.TypeAlias = ty.Callable[
    [ty.Mapping[str, bool]], ty.Collection[str]]


class _Stay(ty.NamedTuple):
    """A server that is on a host that is away, or will be.

    :ivar due: from when on it may be asked for; 0: it never was
    :ivar tries: how often it was
    :ivar source: the uuid of the host
    :ivar name: the name of that
    :ivar failed: whether that has failed
    :ivar taken: whether it is in maintenance
    """

    booking_id: int
    server_id: str
    lease_id: str
    due: int
    tries: int
    source: str
    name: str
    failed: bool
    taken: bool


class Relocating:
    """Asks the cloud to take servers off hosts that are away.

    :param interval: seconds before maintenance from which on what runs there
        is moved
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: clouds.Cloud,
                 interval: int) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
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
        late = self._clock.elapsed() + _WORK
        stays = self._due(certain is not None)
        sure = () if certain is None else self._sure(stays, certain)
        for stay in stays:
            if self._clock.elapsed() > late:
                return
            if stay.failed and stay.source not in sure:
                continue
            try:
                self._ask(stay)
            except errors.BooksUnavailable:
                raise
            except Exception as exc:
                # It keeps no other one from leaving.
                LOG.warning(
                    'Lease %s: whether server %s leaves host %s is not known '
                    'yet: %s', stay.lease_id, stay.server_id, stay.name, exc,
                    exc_info=not isinstance(
                        exc, errors.CloudUnavailable | errors.BooksBusy))

    def _due(self, evacuates: bool) -> list[_Stay]:
        """Whom somebody may ask for now: first those for whom nobody has,
        and of them those whose host has failed; then who waits for longest.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            rows = connection.execute(_STAYING, {
                'now': now, 'soon': now + self._interval,
                'kinds': [outages.MAINTENANCE, *(
                    [outages.FAILURE] if evacuates else [])],
                # What is later than this a clock has said that was wrong.
                'latest': now + 2 * _pause(_DOUBLED + 1)}).all()
        return [_Stay(row.id, row.server_id, row.lease_id,
                      row.relocate_at or 0, row.relocate_tries or 0, row.uuid,
                      row.name, row.kind == outages.FAILURE, row.taken)
                for row in sorted(rows, key=lambda row: (
                    row.relocate_at or 0, row.kind != outages.FAILURE,
                    row.created_at, row.lease_id, row.id))]

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
        taken = self._clock.now() + AGAIN
        if not self._write(stay, taken, stay.tries):
            return
        stay, tries = stay._replace(due=taken), stay.tries + 1
        deadline = clouds.Deadline(self._clock, _SEND)
        steps.reached(steps.Step.RELOCATE_TAKEN, stay.lease_id)
        why = self._why_stays(stay)
        if why is None or why == BUSY and not stay.tries:
            return
        if why == '':
            if not self._write(
                    stay, self._clock.now() + _pause(tries), tries):
                # The host is there again.
                return
            LOG.info('Lease %s: server %s is to leave host %s, which is away',
                     stay.lease_id, stay.server_id, stay.name)
            why = self._cloud.evacuate(
                stay.server_id, stay.lease_id, deadline,
            ) if stay.failed else self._cloud.move(
                stay.server_id, None, stay.lease_id, deadline)
            steps.reached(steps.Step.RELOCATE_ASKED, stay.lease_id)
        if why:
            LOG.warning('Lease %s: server %s stays on host %s, which is away: '
                        '%s', stay.lease_id, stay.server_id, stay.name, why)
        if why == other_hosts.NO_ROOM:
            self._write(stay, self._clock.now() + _SOON, stay.tries)

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
            fits = self._fits([row.id for row in going],
                              ty.cast(str, going[0].server_id), uuid)
            found |= {row.id: other_hosts.NO_ROOM for row in going[fits:]}
        return found

    def _why_stays(self, stay: _Stay) -> str | None:
        """
        :returns: empty: it can leave; None: it is not there any more, which
            the books know in a moment
        """
        why = self._why_bound(stay.server_id, stay.source, stay.failed)
        if why != '':
            return why
        fits = self._fits([stay.booking_id], stay.server_id, stay.source)
        return '' if fits else other_hosts.NO_ROOM

    def _why_bound(self, server_id: str, source: str, failed: bool,
                   ) -> str | None:
        seen = self._cloud.look(server_id)
        if seen.host != source or (
                seen.state is not clouds.ServerState.RUNNING):
            return None
        if seen.busy:
            return BUSY
        return '' if failed or server_id in self._cloud.movable(
            [server_id]) else BOUND

    def _fits(self, ids: ty.Sequence[int], server_id: str, source: str) -> int:
        """For how many of some bookings of a reservation there is capacity in
        the books, on hosts to which the cloud would take their servers.

        :param server_id: of one of them; it goes where all of them may
        :param source: the uuid of the host of all of them
        """
        targets = self._cloud.targets(server_id)
        now = self._clock.now()
        with self._database.reader() as session:
            booking = session.get(models.Booking, ids[0])
            if booking is None:
                return 0
            reservation, lease = booking.reservation, booking.reservation.lease
            outer = within.of(reservation)
            if outer is not None:
                targets &= within.hosts(session, outer)
            siblings = [one for one in reservation.bookings
                        if one.id not in ids and one.host_id is not None]
            affinity = (reservation.params or {}).get('affinity')
            only, avoid = judge.bound(affinity, booking, siblings)
            uuids = {host_id: uuid for host_id, uuid in session.execute(
                sa.select(models.Host.id, models.Host.uuid).where(
                    models.Host.id.in_(only | avoid))).tuples()}
            others = self._on_the_way(session, ids, now)
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
            among=model.Among.COMMON if outer is None else None)
        window = lease.booked(model.Window(now, max(lease.end_date, now + 1)))
        if others and self._admission.quote([demand, *others], window):
            return 0
        fits = self._admission.fits(demand, window)
        return fits if not affinity or fits == count else 0

    def _on_the_way(self, session: orm.Session, ids: ty.Collection[int],
                    now: int) -> list[model.Demand]:
        """What those need who were just asked for, and of whom the books do
        not know yet where they go.
        """
        return [model.Demand(
            row.resources, avoid=frozenset([row.uuid]),
            among=model.Among.COMMON) for row in session.execute(
                _ON_THE_WAY, {'now': now}) if row.id not in ids and
            row.relocate_at - _pause(row.relocate_tries) >= now - _SETTLE]


def _pause(tries: int) -> int:
    """Seconds until a server is asked for again that was so often."""
    return AGAIN << min(tries - 1, _DOUBLED)


_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_AWAY = models.Booking.__table__.alias('away')
_OTHER = notes.Outage.__table__.alias('other')
_HOST = notes.Outage.host_id
#: The servers of leases that run on hosts that have failed, or of others
#: where these are in maintenance.
_STAYING = sa.select(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.relocate_at,
    _BOOKING.relocate_tries, notes.Outage.kind, models.Host.uuid,
    models.Host.name, _LEASE.id.label('lease_id'), _LEASE.created_at,
    sa.exists().where(
        _OTHER.c.host_id == _HOST, _OTHER.c.kind == outages.MAINTENANCE,
        _OTHER.c.began_at <= sa.bindparam('now')).label('taken'),
).select_from(notes.Outage).join(_AWAY, sa.and_(
    _AWAY.c.host_id == _HOST, _AWAY.c.outage == notes.Outage.kind)).join(
    models.Booking, _BOOKING.host_id == _HOST).join(
    models.Host, models.Host.id == _HOST).join(
    models.Reservation, models.Reservation.id == _BOOKING.reservation_id).join(
    models.Lease, _LEASE.id == models.Reservation.lease_id).where(
        notes.Outage.kind.in_(sa.bindparam('kinds', expanding=True)),
        _AWAY.c.start_date <= sa.bindparam('soon'),
        _AWAY.c.end_date > sa.bindparam('now'),
        _BOOKING.end_date > _AWAY.c.start_date,
        _BOOKING.server_id.is_not(None), _BOOKING.running,
        _LEASE.status.not_in(states.ENDING), _LEASE.deleted_at.is_(None),
        sa.or_(notes.Outage.kind == outages.FAILURE,
               ~sa.exists().where(
                   _OTHER.c.host_id == _HOST,
                   _OTHER.c.kind == outages.FAILURE,
                   _OTHER.c.began_at.is_not(None))),
        sa.or_(_BOOKING.relocate_at.is_(None),
               _BOOKING.relocate_at <= sa.bindparam('now'),
               _BOOKING.relocate_at > sa.bindparam('latest')))
#: What was asked for, and may be on its way from a host that is away.
_ON_THE_WAY = sa.select(
    _BOOKING.id, _BOOKING.resources, _BOOKING.relocate_at,
    _BOOKING.relocate_tries, models.Host.uuid,
).join(models.Host, models.Host.id == _BOOKING.host_id).where(
    _BOOKING.host_id.in_(sa.select(_HOST)), _BOOKING.relocate_tries > 0,
    _BOOKING.moving_to.is_(None), _BOOKING.relocate_at > sa.bindparam('now'))
_TAKE = sa.update(models.Booking.__table__).where(
    _BOOKING.id == sa.bindparam('booking'),
    _BOOKING.server_id == sa.bindparam('of'),
    sa.func.coalesce(_BOOKING.relocate_at, 0) == sa.bindparam('seen'),
    sa.exists().where(_HOST == _BOOKING.host_id),
).values(relocate_at=sa.bindparam('due'), relocate_tries=sa.bindparam('tries'))
