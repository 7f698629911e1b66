# SPDX-License-Identifier: Apache-2.0

"""Claims of schedulers: a server counts on its host as soon as it is chosen.

Seconds pass between the choice of a host by a scheduler and the report of the
server by the cloud. Meanwhile other schedulers would see the same capacity as
free. So a scheduler records a claim first (:meth:`Claims.claim`), which
decides whether a server may be placed on the host
(:mod:`~blazar_core.capacity.eligibility` only proposes hosts). Of two that
decide at the same time, one fails and chooses again.
"""

import contextlib
import functools
import itertools
import typing as ty

import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import host_generations
from blazar_core.capacity import interruptible
from blazar_core.capacity import inventory
from blazar_core.capacity import ledger
from blazar_core.capacity import rule
from blazar_core.capacity import timelines
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models

#: Undoes a claim: the server was not placed after all.
Undo: ty.TypeAlias = ty.Callable[[], None]


#: Checks a server of a lease that would take more than is booked for it, under
#: the lock of its project: lease, server, booked and future resources. Raises
#: LimitExceeded if it may not.
GrowthCheck: ty.TypeAlias = ty.Callable[
    [sa.Connection, str, str, model.Resources, model.Resources], None]


#: What the decision about a claim depends on of the booking of the server.
_DECIDED_BY = 'server_id', 'running', 'host_id', 'start_date', 'end_date'


_BOOKING = models.Booking.__table__
#: A server does not move after all.
_STAYS = sa.update(_BOOKING).where(
    _BOOKING.c.id == sa.bindparam('booking')).values(migrating_to=None)
#: A server is not built on the host.
_NOT_BUILT = sa.update(_BOOKING).where(
    _BOOKING.c.id == sa.bindparam('booking'),
    _BOOKING.c.host_id == sa.bindparam('host'),
    sa.not_(_BOOKING.c.running)).values(claimed_at=None)


class Denied(Exception):
    """A server may not be placed on a host; the message has the reason."""


class Claims:
    """Admits servers to hosts.

    :param index: the index that is searched
    :param alone: whether to continue without the database if it is unavailable
    :param growth: checks servers that grow; None: they may
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 index: booking_index.Index, alone: bool = True,
                 growth: GrowthCheck | None = None) -> None:
        self._growth = growth
        self._database = database
        self._clock = clock
        self._index = index
        self._alone = alone

    def claim(self, server_id: str, takes: ty.Mapping[str, model.Resources],
              forced: bool = False, reservation_id: str | None = None,
              ) -> Undo:
        """Claim a host for a server if no reservation is violated.

        The booking of a leased server that is being built moves to the host;
        any other server counts there until the cloud reports it. While the
        database is unavailable it is unknown which servers have a lease: all
        are checked as servers without one, against the index in memory.

        :param takes: what it takes of each provider of the host, by uuid
        :param forced: whether to ignore reservations, unless the host serves
            leases only
        :param reservation_id: the reservation that has all of the hosts that
            the server may use; None: it is in none
        :returns: a function that undoes the claim
        :raises Denied: when the server may not use the host
        """
        # The first attempt may use an index that was current a moment ago.
        lags = itertools.chain([admissions.LAG], itertools.repeat(0))
        try:
            return self._database.retried(
                self._claim, server_id, takes, forced, reservation_id, lags)
        except errors.ConcurrentUpdate as exc:
            raise Denied('too many other requests decide about it at this '
                         'moment') from exc
        except errors.DatabaseUnavailable as exc:
            if not self._alone:
                raise Denied('the database of the leases does not answer'
                             ) from exc
            return self._claim_alone(takes, forced, reservation_id)

    def is_within(self, reservation_id: str,
                  uuids: ty.Collection[str] = ()) -> bool:
        """Return whether servers may still be placed within a reservation.

        For a scheduler that has just admitted a server. The end of a lease, or
        the return of a host, is written before the servers there are read, so
        one of both processes sees the change of the other.

        :param uuids: of the providers of the host on which it is placed
        """
        try:
            with self._database.reader() as session:
                status = session.scalar(
                    sa.select(models.Lease.status).join(models.Reservation)
                    .where(models.Reservation.id == reservation_id))
                returned = session.scalar(
                    sa.select(models.Host.id).where(
                        models.Host.uuid.in_(uuids), sa.or_(
                            models.Host.assigned_to.is_(None),
                            models.Host.assigned_to != reservation_id,
                            models.Host.overdue_at.is_not(None))).limit(1))
        except errors.DatabaseUnavailable:
            return self._alone
        return status in states.BEGUN and returned is None

    def _claim_alone(self, takes: ty.Mapping[str, model.Resources],
                     forced: bool, reservation_id: str | None) -> Undo:
        """Claim without the database, by the last known state."""
        with self._index.stale_index.timeline() as timeline:
            host, amounts = _known(self._index, takes)
            if timeline is None or host is None:
                return _nothing
            if _check_within(host, reservation_id):
                return _nothing
            _check_not_enrolled(host)
            if not forced and not self._fits(
                    timeline, host, amounts, model.Window(
                        self._index.stale_index.now(), model.FOREVER)):
                raise Denied('it is reserved by leases, according to the last '
                             'known state without their database')
            return self._index.stale_index.let_in(host.id, amounts)

    def _claim(self, server_id: str, takes: ty.Mapping[str, model.Resources],
               forced: bool, reservation_id: str | None,
               lags: ty.Iterator[float]) -> Undo:
        # A reservation of the whole host may have ended just now.
        lag = next(lags) if reservation_id is None else 0
        with self._index.fresh(lag) as timeline:
            host, amounts = _known(self._index, takes)
            if host is None:
                return _nothing
            if _check_within(host, reservation_id):
                return _nothing
            now = self._clock.now()
            forced = forced and not host.enrolled
            fits = not host.enrolled and (forced or self._fits(
                timeline, host, amounts, model.Window(now, model.FOREVER)))
            evictable = False
            # If no other server can be evicted, a server that fits without an
            # end is safe.
            if not forced and (host.interruptible or not fits) and (
                    not host.enrolled or
                    host.uuid in self._index.apart().lendable):
                with self._database.connection() as connection:
                    window = interruptible.window_of(
                        connection, server_id, now, host.enrolled)
                if window is not None:
                    with self._index.keeping_interruptible(window.end):
                        fits = evictable = self._fits(
                            timeline, host, amounts, window)
        try:
            with self._database.begin() as connection:
                claimed = inventory.claim(connection, self._clock.now(), host,
                                          server_id, amounts, fits,
                                          evictable=evictable)
            self._index.stale_index.written()
        except ledger.OverCapacity as exc:
            _check_not_enrolled(host)
            raise Denied('it is reserved by leases') from exc
        except inventory.Leased:
            return self._claim_leased(server_id, host.id, amounts, forced)
        if claimed is None and host.enrolled:
            raise Denied('it is not known yet which servers it has')
        return self._undo(self._release, claimed)

    def _claim_leased(self, server_id: str, host_id: int,
                      takes: model.Resources, forced: bool) -> Undo:
        """Claim for a server with a booking, which determines for how long."""
        now = self._clock.now()
        with self._database.connection() as connection, \
                self._index.fresh(connection=connection) as timeline:
            host = self._index.hosts[host_id]
            mine, own, _siblings = eligibility.own_of(connection, server_id)
            if mine is None:
                # Its lease has just ended.
                raise api.LostRace(host_id)
            project_id = _owner(connection, mine) if (
                self._growth is not None and _grows(mine, takes)) else None
            booked = self._index.hosts.get(mine.host_id)
            if booked != host and (
                    booked is None or not booked.enrolled or
                    not host.reservable):
                _check_not_enrolled(host)
            _check_not_assigned(host)
            # Forcing is possible only on hosts that serve all workloads.
            forced = forced and not host.enrolled
            fits = forced or self._fits(
                timeline, host, takes, model.Window(
                    now, max(mine.end_date, now + rule.OVERDUE)),
                [one for one in own if one.id != mine.id])
        try:
            with self._locked(
                    mine.lease_id, host_id, project_id) as session:
                booking = session.get(models.Booking, mine.id)
                if booking is None or any(
                        getattr(booking, name) != getattr(mine, name)
                        for name in _DECIDED_BY):
                    raise api.LostRace(host_id)
                if project_id is not None and self._growth is not None:
                    self._growth(
                        session.connection(), mine.lease_id, server_id,
                        booking.resources, takes)
                if not booking.running:
                    return self._place(session, now, booking, host,
                                       _as_placed(booking, takes), forced)
                if booking.reservation.lease.status in states.ENDING:
                    # At its end, a server is handled on its current host.
                    raise Denied('its lease has ended')
                if _is_back(booking, host_id, takes):
                    return _nothing
                if not forced:
                    _mind_siblings(booking, host_id)
                booking.migrating_to = host_id
                claimed = inventory.claim(session.connection(), now, host,
                                          server_id, takes, fits, leased=True)
        except ledger.OverCapacity as exc:
            raise Denied('it is reserved by other leases') from exc
        except errors.LimitExceeded as exc:
            raise Denied(str(exc)) from exc
        return self._undo(self._take_back, mine.lease_id, _STAYS,
                          {'booking': mine.id}, claimed)

    @contextlib.contextmanager
    def _locked(self, lease_id: str, host_id: int,
                project_id: str | None = None) -> ty.Iterator[orm.Session]:
        with self._database.writer() as session:
            if project_id is not None:
                # Before the lease, as everywhere that locks both.
                api.lock_project(session.connection(), project_id)
            try:
                api.locked(session, lease_id)
            except errors.NotFound:
                raise api.LostRace(host_id) from None
            yield session

    def _place(self, session: orm.Session, now: int, booking: models.Booking,
               host: model.Host, resources: model.Resources, forced: bool,
               ) -> Undo:
        """Move the booking of a server that is about to be built to its host.

        :param resources: its size, which may have grown in an occurrence
        :raises Denied: when the host was assigned to a reservation meanwhile
        :raises LostRace: when another process decided about the host meanwhile
        """
        if booking.host_id != host.id or dict(booking.resources) != resources:
            ledger.amend(session, now, _followed(
                booking, host.id, resources), forced)
        elif host.enrolled:
            # A concurrent transaction that assigns the host has looked for
            # servers placed there: one of both has to look again.
            row = session.get_one(models.Host, host.id)
            _check_not_assigned(row)
            host_generations.advance(session.connection(), now, [row], {})
            session.expire(row)
        if host.enrolled:
            session.execute(sa.update(models.Host).where(
                models.Host.id == host.id).values(lent_at=now))
        booking.claimed_at = now
        return self._undo(
            self._take_back, booking.reservation.lease_id, _NOT_BUILT,
            {'booking': booking.id, 'host': host.id})

    # -- undoing claims ------------------------------------------------------

    def _undo(self, work: ty.Callable[..., None], *args: ty.Any) -> Undo:
        return functools.partial(self._database.retried, work, *args)

    def _release(self, claimed: inventory.Claimed | None) -> None:
        if claimed is not None:
            with self._database.begin() as connection:
                inventory.release(connection, self._clock.now(), claimed)

    def _take_back(self, lease_id: str, change: sa.Update,
                   params: ty.Mapping[str, int],
                   claimed: inventory.Claimed | None = None) -> None:
        """Undo a claim of a server with a booking, which is changed."""
        with contextlib.suppress(errors.NotFound), \
                self._database.writer() as session:
            api.locked(session, lease_id)
            session.connection().execute(change, params)
        self._release(claimed)

    # -- checks ------------------------------------------------------------

    def _fits(self, timeline: timelines.Timeline, host: model.Host,
              amounts: model.Resources, window: model.Window,
              own: ty.Sequence[ty.Any] = ()) -> bool:
        """Return whether others have no booking there, or enough is free."""
        with self._index.excluding(own):
            if not any(timeline.peak(host.id, window).values()):
                return True
            rooms = timeline.fits(model.Demand(amounts), window, [host.id])
            return bool(rooms[timeline.index(host.id)])


def _known(index: booking_index.Index, takes: ty.Mapping[str, model.Resources],
           ) -> tuple[model.Host | None, dict[str, int]]:
    """Return the host, and what is taken of it in all of its providers.

    Classes that the host does not offer itself, for example shared storage,
    are not recorded and left out. The host is None if it is unknown or
    nothing is taken of it.
    """
    ids = index.ids_by_uuid
    host = next((index.hosts[ids[uuid]] for uuid in takes if uuid in ids),
                None)
    if host is None:
        return None, {}
    kinds = host.providers.kinds() if host.providers else {}
    total = model.summed({**resources, **{
        kind: resources[rc] for rc, kind in kinds.get(provider, {}).items()
        if rc in resources}} for provider, resources in takes.items())
    amounts = {rc: amount for rc, amount in total.items()
               if amount and rc in host.capacity}
    return (host if amounts else None), amounts


def _grows(booking: ty.Any, takes: model.Resources) -> bool:
    """Return whether a server takes more than is booked for it."""
    return any(amount > booking.resources.get(rc, 0)
               for rc, amount in model.plain(takes).items())


def _owner(connection: sa.Connection, booking: ty.Any) -> str | None:
    """Return the project that owns the lease of a booking."""
    return connection.scalar(sa.select(models.Lease.project_id).where(
        models.Lease.id == booking.lease_id))


def _as_placed(booking: models.Booking, takes: model.Resources,
               ) -> dict[str, int]:
    """Return what to book for a server that is placed: its booking, or more,
    with the kinds of providers that the cloud has chosen.
    """
    before, now = model.plain(booking.resources), model.plain(takes)
    booked = {rc: max(before.get(rc, 0), now.get(rc, 0))
              for rc in before | now}
    kinds = takes.keys() - now
    return booked | {rc: amount for rc, amount in booking.resources.items()
                     if rc not in booked and not kinds} | {
        rc: takes[rc] for rc in kinds}


def _followed(booking: models.Booking, host_id: int,
              resources: model.Resources) -> list[ledger.Edit]:
    """Return the edits that move a booking to the host of its server, and
    adapt it to the size of the server.
    """
    if booking.host_id == host_id:
        # A slot that has the new amounts gets the old ones in exchange.
        return [ledger.Edit(booking, ledger.new_of(
            booking, resources=resources)), *(
                ledger.Edit(one, ledger.new_of(
                    one, resources=booking.resources))
                for one in booking.reservation.bookings
                if one.host_id == host_id and one.claimed_at is None and
                one.id != booking.id and
                one.resources == resources != booking.resources)][:2]
    return [ledger.Edit(booking, ledger.new_of(
        booking, host_id=host_id, resources=resources)),
        *ledger.follow(booking, host_id)[1:]]


def _nothing() -> None:
    """Undo nothing, as nothing was claimed."""


def _check_within(host: model.Host, reservation_id: str | None) -> bool:
    """Return whether a server is placed on a host of its reservation.

    :raises Denied: when its reservation does not have all of the host
    """
    if reservation_id is None:
        return False
    if host.assigned_to != reservation_id or host.overdue:
        raise Denied(f'reservation {reservation_id} does not have all of it')
    return True


def _check_not_enrolled(host: model.Host) -> None:
    """Check that a host does not serve leases only.

    :raises Denied: when it does
    """
    if host.enrolled:
        raise Denied('it serves leases only')


def _check_not_assigned(host: model.Host | models.Host) -> None:
    """Check that a host is not assigned to a reservation of whole hosts, for
    a server outside of it.

    :raises Denied: when one has
    """
    if host.assigned_to is not None:
        raise Denied('a reservation has all of it')


def _is_back(booking: models.Booking, host_id: int, takes: model.Resources,
             ) -> bool:
    """Return whether a server returns to the capacity that is booked for it.

    It was shelved meanwhile. A server that is resized on its host takes
    another amount, and both for a while.
    """
    return booking.host_id == host_id and all(
        booking.resources.get(rc, 0) == amount
        for rc, amount in takes.items())


def _mind_siblings(booking: models.Booking, host_id: int) -> None:
    """Check that a server that moves respects the affinity of its reservation.

    The filter has checked the same, but possibly for two servers at once.

    :raises Denied: when the host violates the affinity
    """
    reservation = booking.reservation
    only, avoid = eligibility.bound(
        (reservation.params or {}).get('affinity'), booking,
        [one for one in reservation.bookings if one.id != booking.id])
    if host_id in avoid or only and host_id not in only:
        raise Denied('the other servers of its reservation are on hosts that '
                     'its affinity policy excludes')
