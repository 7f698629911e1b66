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
from blazar_core.lifecycle import rebinding
from blazar_core.lifecycle import steps

__all__ = ['AGAIN', 'BOUND', 'PAUSE', 'Fence', 'Relocating']

LOG = logging.getLogger(__name__)

#: Seconds between two looks, and how many servers are asked for in one.
PAUSE, _AT_ONCE = 10, 16
#: Seconds after which a server is asked for again that stays where it is, and
#: after which it is tried again where there was no other host for it.
AGAIN, _SOON = 120, 30
#: Seconds after which nobody asks any more who was about to, and for which it
#: is believed that a host is not certain to be down.
_SEND, _DOUBT = 20, 60

#: Why a server stays that the cloud does not move as it runs.
BOUND = ('It does not run, or what it has of its host or who owns it keeps it '
         'there: migrate it by hand.')

#: Told the uuid of a host that has failed: whether it is certain that nothing
#: runs there any more.
Fence: ty.TypeAlias = ty.Callable[[str], bool]


class _Stay(ty.NamedTuple):
    """A server that is on a host that is away, or will be.

    :ivar due: from when on it may be asked for; 0: it never was
    :ivar source: the uuid of the host
    :ivar name: the name of that
    :ivar failed: whether that has failed
    """

    booking_id: int
    server_id: str
    lease_id: str
    due: int
    source: str
    name: str
    failed: bool


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
        #: Until when a host that has failed is not certain to be down.
        self._doubted: dict[str, int] = {}

    def look(self, fence: Fence | None = None) -> None:
        """Ask for the next servers that are to leave.

        Where no host is away, that is one SELECT of a table without rows.

        :param fence: None: nothing is evacuated
        """
        left, certain = _AT_ONCE, dict[str, bool]()
        for stay in self._due():
            try:
                if stay.failed and stay.source not in certain:
                    certain[stay.source] = fence is not None and (
                        self._is_certain(stay, fence))
                if not stay.failed or certain[stay.source]:
                    left -= 1
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
            if not left:
                return

    def _due(self) -> list[_Stay]:
        """Whom somebody may ask for now: first those for whom nobody has,
        then those who wait for longest, the oldest lease first.
        """
        now = self._clock.now()
        with self._database.connection() as connection:
            rows = sorted(connection.execute(_STAYING, {
                'now': now, 'soon': now + self._interval,
                # What is later than this a clock has said that was wrong.
                'latest': now + 2 * AGAIN}), key=lambda row: (
                    row.relocate_at or 0, row.created_at, row.lease_id,
                    row.id))
        # A host that is in maintenance may fail as well.
        failed = {row.uuid for row in rows if row.outage == outages.FAILURE}
        return [*{row.id: _Stay(
            row.id, row.server_id, row.lease_id, row.relocate_at or 0,
            row.uuid, row.name, row.uuid in failed) for row in rows}.values()]

    def _is_certain(self, stay: _Stay, fence: Fence) -> bool:
        """Whether a host that has failed is certain to run nothing."""
        now = self._clock.now()
        if self._doubted.get(stay.source, now) > now:
            return False
        # Also where nobody can say so.
        self._doubted[stay.source] = now + _DOUBT
        certain = fence(stay.source)
        if certain:
            del self._doubted[stay.source]
        return certain

    def _ask(self, stay: _Stay) -> None:
        """Have a server leave, if nobody else does and it can."""
        taken = self._clock.now() + AGAIN
        if not self._database.retried(self._write, stay, taken):
            return
        deadline = clouds.Deadline(self._clock, _SEND)
        steps.reached(steps.Step.RELOCATE_TAKEN, stay.lease_id)
        why = self._why_stays(stay)
        if why is None:
            return
        if not why:
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
        if why == rebinding.NO_ROOM:
            self._database.retried(self._write, stay._replace(due=taken),
                                   self._clock.now() + _SOON)

    def _write(self, stay: _Stay, due: int) -> bool:
        """Write down from when on a server may be asked for again, if nobody
        else has meanwhile; says whether.
        """
        with self._database.begin() as connection:
            return connection.execute(_TAKE, {
                'booking': stay.booking_id, 'of': stay.server_id,
                'seen': stay.due, 'due': due}).rowcount == 1

    def obstacle(self, booking: models.Booking, uuid: str) -> str:
        """Why a server would stay on its host, if that was in maintenance
        now: a sentence; empty: it would leave.

        :param booking: of the server, with its reservation
        :param uuid: of the host
        :raises CloudUnavailable: when that cannot be said now
        """
        assert booking.server_id is not None
        why = self._why_stays(_Stay(
            booking.id, booking.server_id, booking.reservation.lease_id, 0,
            uuid, uuid, False))
        return 'It has a task under way.' if why is None else why

    def _why_stays(self, stay: _Stay) -> str | None:
        """
        :returns: empty: it can leave; None: somebody is at it, or it is not
            there any more, which the books know in a moment
        """
        seen = self._cloud.look(stay.server_id)
        if seen.busy or seen.host != stay.source or (
                seen.state is not clouds.ServerState.RUNNING):
            return None
        if not stay.failed and stay.server_id not in self._cloud.movable(
                [stay.server_id]):
            return BOUND
        return '' if self._has_room(stay) else rebinding.NO_ROOM

    def _has_room(self, stay: _Stay) -> bool:
        """Whether the books have capacity for a server on one of the hosts
        to which the cloud would take it.
        """
        targets = self._cloud.targets(stay.server_id)
        with self._database.reader() as session:
            booking = session.get(models.Booking, stay.booking_id)
            if booking is None:
                return False
            reservation, lease = booking.reservation, booking.reservation.lease
            outer = within.of(reservation)
            if outer is not None:
                targets &= within.hosts(session, outer)
            siblings = [one for one in reservation.bookings
                        if one.id != booking.id and one.host_id is not None]
            affinity = (reservation.params or {}).get('affinity')
            only, avoid = judge.bound(affinity, booking, siblings)
            uuids = {host_id: uuid for host_id, uuid in session.execute(
                sa.select(models.Host.id, models.Host.uuid).where(
                    models.Host.id.in_(only | avoid))).tuples()}
        if only:
            targets &= {uuids[one] for one in only}
        # The first one that leaves the others goes where all of them can.
        going = [booking, *siblings] if affinity and not only else [booking]
        now = self._clock.now()
        return self._admission.fits(model.Demand(
            booking.resources, count=len(going), hosts=targets,
            affinity=model.Affinity.SAME if len(going) > 1
            else model.Affinity.NONE,
            avoid=frozenset({stay.source, *(uuids[one] for one in avoid)}),
            among=model.Among.COMMON if outer is None else None),
            lease.booked(model.Window(now, max(lease.end_date, now + 1))),
            going) == len(going)


_BOOKING, _LEASE = models.Booking.__table__.c, models.Lease.__table__.c
_AWAY = models.Booking.__table__.alias('away')
#: The servers of leases that run on hosts that are away, or will be.
_STAYING = sa.select(
    _BOOKING.id, _BOOKING.server_id, _BOOKING.relocate_at,
    _AWAY.c.outage, models.Host.uuid, models.Host.name, _LEASE.id.label(
        'lease_id'),
    _LEASE.created_at,
).select_from(notes.Outage).join(
    _AWAY, sa.and_(_AWAY.c.host_id == notes.Outage.host_id,
                   _AWAY.c.outage == notes.Outage.kind)).join(
    models.Booking, _BOOKING.host_id == notes.Outage.host_id).join(
    models.Host, models.Host.id == notes.Outage.host_id).join(
    models.Reservation, models.Reservation.id == _BOOKING.reservation_id).join(
    models.Lease, _LEASE.id == models.Reservation.lease_id).where(
        _AWAY.c.start_date <= sa.bindparam('soon'),
        _AWAY.c.end_date > sa.bindparam('now'),
        _BOOKING.end_date > _AWAY.c.start_date,
        _BOOKING.server_id.is_not(None), _BOOKING.running,
        sa.or_(_BOOKING.relocate_at.is_(None),
               _BOOKING.relocate_at <= sa.bindparam('now'),
               _BOOKING.relocate_at > sa.bindparam('latest')),
        _LEASE.status.not_in(states.ENDING), _LEASE.deleted_at.is_(None))
_TAKE = sa.update(models.Booking.__table__).where(
    _BOOKING.id == sa.bindparam('booking'),
    _BOOKING.server_id == sa.bindparam('of'),
    sa.func.coalesce(_BOOKING.relocate_at, 0) == sa.bindparam('seen'),
).values(relocate_at=sa.bindparam('due'))
