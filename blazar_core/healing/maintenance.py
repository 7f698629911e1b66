# SPDX-License-Identifier: Apache-2.0

"""Maintenance of hosts, scheduled by their operator.

Once maintenance is scheduled, the window is booked, and bookings of leases in
it are reassigned to other hosts in advance, by the overbooking check
(:mod:`blazar_core.healing.overbooking`). Running servers are moved when the
window comes near (:mod:`~blazar_core.healing.evacuation`); servers that
cannot be moved are listed beforehand, with their owners. The host is
available again when the window ends.
"""

import collections
import typing as ty

from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import ledger
from blazar_core.capacity import outages
from blazar_core.capacity import rule
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import alternatives
from blazar_core.healing import evacuation
from blazar_core.leases import views
from blazar_core.lifecycle.server_moves import Obstacle

LOG = logging.getLogger(__name__)

_UNKNOWN = 'Whether it can be reassigned is not known now: %s'


class Planned(ty.NamedTuple):
    """The window of a scheduled maintenance, and its reason."""

    window: model.Window
    reason: str


class Promised(ty.NamedTuple):
    """A booking of a lease on a host.

    :ivar server_id: None: no server uses it yet
    :ivar obstacle: why it would not move to another host, a sentence; empty:
        it would; None: not determined
    """

    lease_id: str
    name: str
    project_id: str
    user_id: str
    start_date: int
    end_date: int
    server_id: str | None
    obstacle: str | None


class Maintenance:
    """Schedules maintenance of hosts.

    :param others: determines which bookings would be reassigned
    :param drain: determines which servers would be moved
    :param notify: called with an event type and the maintenance of a host,
        after it is scheduled, changed or ended early
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 others: alternatives.Alternatives,
                 drain: evacuation.Evacuation, notify: views.Notify) -> None:
        self._notify = notify
        self._database = database
        self._clock = clock
        self._others = others
        self._drain = drain

    def planned(self, name: str) -> Planned | None:
        """Return the current or next maintenance of a host; None: there is
        none.

        :param name: of the host, or of its nova-compute
        :raises NotFound: when the host does not exist
        """
        with self._database.reader() as session:
            outage = session.get(models.Outage, (
                _named(session, name).id, outages.MAINTENANCE))
            if outage is None or outage.began_at is None:
                return None
            until = outages.until(session, outage)
            # An outage that is over may not have been removed yet.
            return None if until <= max(
                outage.began_at, self._clock.now()) else Planned(
                    model.Window(outage.began_at, until), outage.reason)

    def name_of(self, name: str) -> str:
        """Return the name of a host, given that or the name of its
        nova-compute.

        :raises NotFound: when the host does not exist
        """
        with self._database.reader() as session:
            return _named(session, name).name

    def promised(self, name: str, window: model.Window, judged: bool = True,
                 ) -> list[Promised]:
        """Return the bookings of leases on a host in a window, by their
        starts.

        Each reservation is judged as if no other one had to move. So of
        several that need the same capacity, some may be left without a host,
        which their leases then show. Costs a search for each reservation.

        :param name: of the host, or of its nova-compute
        :param judged: whether obstacles are determined
        :raises NotFound: when the host does not exist
        """
        with self._database.reader() as session:
            host = _named(session, name)
            rows = self._rows(session, host, window)
        of_reservation: dict[str, set[int]] = collections.defaultdict(set)
        for row in rows:
            of_reservation[row.reservation.id].add(row.id)
        obstacles: dict[int, str] = {}
        for one, ids in of_reservation.items() if judged else ():
            obstacles |= self._obstacles(one, ids, host.uuid)
            obstacles |= self._running(
                [row for row in rows if row.reservation_id == one and
                 obstacles.get(row.id) is Obstacle.IN_USE and
                 row.server_id and row.running and
                 row.end_date > window.start], host.uuid)
        return [Promised(
            lease.id, lease.name, lease.project_id, lease.user_id,
            row.start_date, row.end_date, row.server_id,
            obstacles.get(row.id, '') if judged else None,
        ) for row in rows for lease in [row.reservation.lease]]

    def _running(self, rows: ty.Sequence[models.Booking], uuid: str,
                 ) -> dict[int, str]:
        """Return why servers of a reservation that run on a host would not
        leave it; empty for those that would.
        """
        try:
            found = self._drain.obstacles(rows, uuid)
        except errors.CloudUnavailable as exc:
            return dict.fromkeys((row.id for row in rows), _UNKNOWN % exc)
        return {row.id: found.get(row.id, '') for row in rows}

    def _rows(self, session: orm.Session, host: models.Host,
              window: model.Window) -> list[models.Booking]:
        now = self._clock.now()
        return [row for row in session.scalars(_BOOKED, {
            'host': host.id, 'now': now, 'end': window.end,
        }) if rule.occupied(
            row.start_date, row.end_date, row.claimed_at, now,
        ).end > window.start]

    def _obstacles(self, reservation_id: str, ids: ty.Collection[int],
                   uuid: str) -> dict[int, str]:
        try:
            return self._others.obstacles(reservation_id, ids, uuid)
        except errors.CloudUnavailable as exc:
            return dict.fromkeys(ids, _UNKNOWN % exc)

    def announce(self, name: str, window: model.Window, reason: str) -> None:
        """Schedule maintenance of a host, or change its window.

        Safe to repeat.

        :param name: of the host, or of its nova-compute
        :param reason: for operators
        :raises NotFound: when the host does not exist
        :raises Conflict: when the host has no known capacity
        """
        self._publish(self._schedule(name, window, reason), reason,
                      clocks.iso(window.start), clocks.iso(window.end))

    @api.retried
    def _schedule(self, name: str, window: model.Window, reason: str) -> str:
        uuid = self._uuid(name)
        with self._database.writer() as session:
            host = outages.locked(session, uuid)
            now = self._clock.now()
            if host is None:
                raise errors.NotFound(f'Host {uuid} no longer exists.')
            if not any(host.capacity.values()):
                raise errors.Conflict(
                    f'Host {host.name} has no capacity for leases: it needs '
                    'no maintenance window.')
            outage = outages.noted(
                session, now, host.id, outages.MAINTENANCE, reason)
            (outages.last if outages.until(session, outage)
             else outages.plan)(session, now, outage, window)
            LOG.info('Host %s is in maintenance from %s to %s UTC: %s',
                     host.name, clocks.iso(window.start),
                     clocks.iso(window.end), reason)
            return host.name

    def end_early(self, name: str) -> None:
        """End the maintenance of a host early. Safe to repeat.

        :param name: of the host, or of its nova-compute
        :raises NotFound: when the host does not exist
        """
        ended = self._database.retried(
            _end, self._database, self._clock, self._uuid(name), True)
        if ended is not None:
            self._publish(ended)

    def _publish(self, name: str, reason: str = '', start: str | None = None,
                 end: str | None = None) -> None:
        self._notify('host.maintenance', {
            'id': None, 'name': name, 'message': reason, 'start_date': start,
            'end_date': end})

    def _uuid(self, name: str) -> str:
        with self._database.reader() as session:
            return _named(session, name).uuid


def forget(database: api.Database, clock: clocks.Clock) -> None:
    """Remove the outages of maintenance that is over.

    Safe to run concurrently; costs one SELECT if there is none.
    """
    with database.reader() as session:
        over = session.scalars(_OVER, {'now': clock.now()}).all()
    for uuid in over:
        try:
            database.retried(_end, database, clock, uuid, False)
        except errors.ConcurrentUpdate as exc:
            # A failure here does not keep other hosts out of service.
            LOG.info('Host %s: the end of its maintenance is processed next '
                     'time: %s', uuid, exc)


def _end(database: api.Database, clock: clocks.Clock, uuid: str,
         early: bool) -> str | None:
    """Return the name of the host, if its maintenance ends."""
    with database.writer() as session:
        host = outages.locked(session, uuid)
        now = clock.now()
        outage = host and session.get(
            models.Outage, (host.id, outages.MAINTENANCE))
        if host and outage and (
                early or outages.until(session, outage) <= now):
            outages.end(session, now, outage)
            LOG.info('Host %s: its maintenance has ended', host.name)
            return host.name
        return None


def _named(session: orm.Session, name: str) -> models.Host:
    """Return a host by its name, or by the name of its nova-compute.

    :raises NotFound: when the host does not exist
    :raises Conflict: when there are several
    """
    found = session.scalars(sa.select(models.Host).where(
        models.Host.pool == model.COMPUTE, sa.or_(
            models.Host.name == name,
            models.Host.service_host == name))).all()
    if not found:
        raise views.unknown_host(name)
    # A host that was created again has left its old row.
    found = [one for one in found if any(one.capacity.values())] or found
    if len(found) > 1:
        raise errors.Conflict(
            f'{name} is a nova-compute with several hypervisors. Write the '
            f'name of one: {", ".join(sorted(one.name for one in found))}.')
    return found[0]


_BOOKED = sa.select(models.Booking).options(
    orm.joinedload(models.Booking.reservation).joinedload(
        models.Reservation.lease)).where(
    models.Booking.host_id == sa.bindparam('host'),
    models.Booking.outage.is_(None),
    models.Booking.start_date < sa.bindparam('end'),
    ledger.is_held(sa.bindparam('now')),
).order_by(models.Booking.start_date, models.Booking.id)
_OVER = sa.select(models.Host.uuid).join(
    models.Outage, models.Outage.host_id == models.Host.id).where(
    models.Outage.kind == outages.MAINTENANCE,
    ~sa.exists().where(
        models.Booking.host_id == models.Host.id,
        models.Booking.outage == outages.MAINTENANCE,
        models.Booking.end_date > sa.bindparam('now')))
