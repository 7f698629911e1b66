# SPDX-License-Identifier: Apache-2.0

"""Servers of leases that leave hosts that are away.

What runs on a host that has failed is evacuated, where the operator wants
that, and once it is certain that nothing runs there any more. What runs on one
that is in maintenance, or soon will be, is moved as it runs. To which host is
for the cloud's scheduler to say, by the rule of the books; the booking follows
its server (:mod:`~blazar_core.lifecycle.observing`). So are servers evacuated
that have no booking of their own, because they are within a lease of hosts
(:mod:`~blazar_core.lifecycle.lodgers`).

Any number of processes may do this at the same time. A server is asked for by
who has written into its booking, or that of its host, that he is about to, and
by nobody else for :data:`~blazar_core.lifecycle.destinations.AGAIN` seconds;
a process that stood still meanwhile does not ask any more. What is under way
is seen in the cloud.
"""

import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa

from blazar_core.books import admission as admissions
from blazar_core.books import outages
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import errors
from blazar_core.common import logs
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.lifecycle import destinations
from blazar_core.lifecycle import lodgers
from blazar_core.lifecycle import other_hosts
from blazar_core.lifecycle import steps
from blazar_core import resources

__all__ = ['BOUND', 'BUSY', 'LATER', 'PAUSE', 'Certain', 'Relocating']

LOG = logging.getLogger(__name__)

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


class Relocating:
    """Asks the cloud to take servers off hosts that are away.

    :param interval: seconds before maintenance from which on what runs there
        is moved
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: clouds.Cloud,
                 interval: int, types: resources.Types) -> None:
        self._destinations = destinations.Destinations(
            database, clock, admission, cloud)
        self._lodgers = lodgers.Lodgers(database, types)
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
        except errors.BooksUnavailable:
            raise
        except Exception as exc:
            known = isinstance(exc, errors.CloudUnavailable | errors.BooksBusy)
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
        deadline, work = (clouds.Deadline(self._clock, seconds)
                          for seconds in (_SEND, _WORK))
        taken = self._clock.now() + destinations.AGAIN
        if not self._write(stay, taken, stay.tries):
            return
        stay, tries = stay._replace(due=taken), stay.tries + 1
        steps.reached(steps.Step.RELOCATE_TAKEN, stay.lease_id)
        if stay.server_id is None:
            self._ask_lodgers(stay, tries, work)
            return
        why = self._why_stays(stay, stay.server_id)
        if why is None or why == BUSY and not stay.tries:
            return
        if why == '':
            due = self._clock.now() + destinations.pause(tries)
            if not self._write(stay, due, tries):
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

    def _ask_lodgers(self, stay: _Stay, tries: int, deadline: clouds.Deadline,
                     ) -> None:
        """Have all leave a host that a lease of hosts had, and that has
        failed, as many as there is room for on its others.
        """
        lodging = self._lodgers.on(stay.booking_id, stay.source)
        due = self._clock.now() + destinations.pause(tries)
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
        if {LATER, other_hosts.NO_ROOM} & {*stays.values()}:
            self._write(stay, self._clock.now() + (
                destinations.AGAIN if asked else _SOON), stay.tries)

    def _ask_lodger(self, stay: _Stay, server_id: str,
                    room: destinations.Room, deadline: clouds.Deadline,
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
            return other_hosts.NO_ROOM
        self._destinations.goes(host, needs)
        LOG.info('Lease %s: server %s is to leave host %s, which is away',
                 stay.lease_id, server_id, stay.name)
        why = self._cloud.evacuate(server_id, stay.lease_id, deadline)
        steps.reached(steps.Step.RELOCATE_ASKED, stay.lease_id)
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
            found |= {row.id: other_hosts.NO_ROOM for row in going[fits:]}
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


_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_AWAY = models.Booking.__table__.alias('away')
_OTHER = notes.Outage.__table__.alias('other')
_HOST = notes.Outage.host_id
_TAKEN = sa.exists().where(
    _OTHER.c.host_id == _HOST, _OTHER.c.kind == outages.MAINTENANCE,
    _OTHER.c.began_at <= sa.bindparam('now')).label('taken')
#: The servers of leases that run on hosts that have failed, or of others
#: where these are in maintenance.
_STAYING = sa.select(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.next_evacuation_at,
    _BOOKING.evacuations, notes.Outage.kind, models.Host.uuid,
    models.Host.name, _LEASE.id.label('lease_id'), _LEASE.project_id,
    _LEASE.created_at, _TAKEN).select_from(notes.Outage).join(_AWAY, sa.and_(
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
        destinations.is_due)
#: The same for those within leases of hosts that have no bookings: by theirs.
_LODGING = lodgers.lodgings(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.next_evacuation_at,
    _BOOKING.evacuations, notes.Outage.kind, models.Host.uuid,
    models.Host.name, _LEASE.id.label('lease_id'), _LEASE.project_id,
    _LEASE.created_at, _TAKEN,
).where(destinations.is_due)
_TAKE = sa.update(models.Booking.__table__).where(
    _BOOKING.id == sa.bindparam('booking'),
    _BOOKING.server_id.is_not_distinct_from(sa.bindparam('of')),
    sa.func.coalesce(_BOOKING.next_evacuation_at, 0) == sa.bindparam('seen'),
    sa.exists().where(_HOST == _BOOKING.host_id),
).values(next_evacuation_at=sa.bindparam('due'),
         evacuations=sa.bindparam('tries'))
