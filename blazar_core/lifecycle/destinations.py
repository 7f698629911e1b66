# SPDX-License-Identifier: Apache-2.0

"""Where servers may go that are to leave their hosts, and how many of them.

To which hosts the cloud would take a server is asked of the cloud. What is
free there the books say, with those reckoned in who were just asked for; of
who is within a lease of hosts they count nothing, so that there the cloud
says that, too.
"""

import collections
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.books import admission as admissions
from blazar_core.books import judge
from blazar_core.books import ledger
from blazar_core import cloud as clouds
from blazar_core.common import clock as clocks
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.db import notes
from blazar_core.db import skew
from blazar_core.leases import within

__all__ = ['AGAIN', 'Destinations', 'Room', 'is_due', 'pause']

#: Seconds after which a server is asked for again that stays where it is,
#: twice as many each time, and how often they are doubled.
AGAIN, _DOUBLED = 120, 5
#: Seconds for which the books may not know yet where somebody goes who was
#: asked for.
_SETTLE = 15


class Room:
    """What some hosts have left, as the cloud counts: the books count nobody
    who is within a lease of hosts.

    :param hosts: their uuids
    :param coming: what those need who were just asked to go there
    """

    def __init__(self, cloud: clouds.Cloud, hosts: ty.Collection[str],
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


class Destinations:
    """Says for how many there is capacity."""

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 admission: admissions.Admission, cloud: clouds.Cloud,
                 ) -> None:
        self._database = database
        self._clock = clock
        self._admission = admission
        self._cloud = cloud
        #: Those for whom the cloud was just asked, who go to a host of a
        #: lease of hosts: when that was, to which one, as far as can be said,
        #: and what they need.
        self._asked: list[tuple[float, str, model.Resources]] = []

    def room(self, hosts: ty.Collection[str]) -> Room:
        """What some hosts of a lease have left for those within it."""
        late = self._clock.elapsed() - _SETTLE
        self._asked = [one for one in self._asked if one[0] > late]
        return Room(self._cloud, hosts, [one[1:] for one in self._asked])

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


def _among(enrolled: bool) -> model.Among:
    """Where a server on a host may go: Nova keeps it among the enrolled hosts
    or among all others.
    """
    return model.Among.ENROLLED if enrolled else model.Among.COMMON


def pause(tries: int) -> int:
    """Seconds until a server is asked for again that was so often."""
    return AGAIN << min(tries - 1, _DOUBLED)


_BOOKING, _HOST = models.Booking.__table__.c, notes.Outage.host_id
_NOW = sa.bindparam('now', type_=sa.BigInteger)
#: Twice the pause of a server that was asked for so often.
_FURTHEST = sa.case(*(
    (_BOOKING.evacuations <= tries, 2 * pause(tries))
    for tries in range(1, _DOUBLED + 1)),
    (_BOOKING.evacuations.is_(None), 2 * AGAIN),
    else_=2 * pause(_DOUBLED + 1))
#: Whether a server may be asked for now; it says when again.
is_due = sa.or_(_BOOKING.next_evacuation_at.is_(None), skew.is_over(
    _BOOKING.next_evacuation_at, _NOW, _FURTHEST))
#: What was asked for, and may be on its way from a host that is away.
_ON_THE_WAY = sa.select(
    _BOOKING.id, _BOOKING.resources, _BOOKING.next_evacuation_at,
    _BOOKING.evacuations, models.Host.uuid, models.Host.enrolment,
).join(models.Host, models.Host.id == _BOOKING.host_id).where(
    _BOOKING.host_id.in_(sa.select(_HOST)), _BOOKING.evacuations > 0,
    # Of those within leases of hosts the books count nothing.
    ledger.TAKES, _BOOKING.server_id.is_not(None),
    _BOOKING.migrating_to.is_(None),
    _BOOKING.next_evacuation_at > sa.bindparam('now'))
