# SPDX-License-Identifier: Apache-2.0

"""Admission: find hosts for a demand, or explain why there are none.

Leases that wait for capacity call this again from
:mod:`blazar_core.lifecycle.admission_queue`; boots with a lease come through
``blazar_nova/services/lease_admission.py``.

The search is done in memory (:mod:`blazar_core.capacity.booking_index`), the
decision in the database (:func:`blazar_core.capacity.ledger.amend`). If
another process was faster, the search is repeated and prefers other hosts.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import typing as ty

import numpy as np
from oslo_log import log as logging
import sqlalchemy as sa
from sqlalchemy import orm

from blazar_core.capacity import booking_index
from blazar_core.capacity import outages
from blazar_core.capacity import provider_limits
from blazar_core.capacity import selection
from blazar_core.capacity import start_times
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import refusals
from blazar_core.db import api
from blazar_core.db import models

LOG = logging.getLogger(__name__)

R = ty.TypeVar('R')

#: The hosts picked for a lease, and the window over which it gets them.
Pick: ty.TypeAlias = tuple[
    ty.Sequence[ty.Sequence[int | None]], model.Window]


class ProjectHosts:
    """The hosts of a project, for one search or one check under its lock.

    They are read when a pick includes a host that may be new to the project.

    :param read: given the ids of hosts, returns the bound of a project that
        would get them; None: it has reservations on all of them that have not
        started. It takes a ``connection`` if there is a transaction.
    """

    def __init__(self, read: ty.Callable[..., selection.HostBound | None],
                 ) -> None:
        self._read = read
        self._own: set[int] = set()
        self._host_bound: selection.HostBound | None = None
        self._added: list[tuple[selection.Picked, model.Window]] = []

    def has_all(self, picked: selection.Picked) -> bool:
        """Return whether the project has reservations on all picked hosts
        that have not started.
        """
        wanted = set(itertools.chain(*picked))
        if self._host_bound is None and not wanted <= self._own:
            self._host_bound = self._read(wanted)
            if self._host_bound is None:
                self._own |= wanted
            else:
                for one in self._added:
                    self._host_bound = self._host_bound.with_lease(*one)
                self._own |= self._host_bound.later
        return wanted <= self._own

    def exceeded(self, picked: selection.Picked, window: model.Window,
                 ) -> selection.HostBound | None:
        """Return the bound that a pick exceeds; None: it exceeds none."""
        if self.has_all(picked) or self._host_bound is None or (
                self._host_bound.allows(picked, window)):
            return None
        return self._host_bound

    def add(self, picked: selection.Picked, window: model.Window) -> None:
        """Count another lease of the project."""
        self._own.update(*picked)
        self._added.append((picked, window))
        if self._host_bound is not None:
            self._host_bound = self._host_bound.with_lease(picked, window)

    def confirm(self, connection: sa.Connection, picks: ty.Iterable[Pick],
                ) -> None:
        """Check that picks from these hosts respect the current bound; under
        the lock of the project.

        A pick may exceed the bound if the project has no new hosts since the
        search, which has found no capacity on the others.

        :raises Outdated: when another search may find hosts within the bound
        """
        now = ProjectHosts(functools.partial(
            self._read, connection=connection))
        for some, window in picks:
            picked = [[one for one in hosts if one is not None]
                      for hosts in some]
            bound = now.exceeded(picked, window)
            if bound is not None and (
                    self._host_bound is None or
                    not bound.hosts <= self._host_bound.hosts):
                raise api.Outdated('its project now has other hosts')
            now.add(picked, window)


#: Returns the current hosts of a project; None: any host is allowed.
_HostBound: ty.TypeAlias = ty.Callable[[], ProjectHosts | None]


def _no_bound() -> None:
    return None


#: Seconds that the first search for capacity may lag behind the database: a
#: query costs half as much as a decision.
LAG = 0.1
#: Attempts of an admission that prefer hosts with reservations even if others
#: are deciding about these hosts.
GATHER_TRIES = 4
#: Seconds for which a host where a race was lost is used only if necessary.
CROWDED = 1


class Admission:
    """Finds capacity, or explains why there is none.

    :param start_timeout: seconds for which a lease that starts now may wait
        for hosts that are switched on for it

    :ivar index: the index that is searched
    :ivar selector: selects the hosts
    :ivar starts: finds when there is capacity, and how much
    """

    def __init__(self, database: api.Database, clock: clocks.Clock,
                 strategy: selection.Strategy = selection.pack,
                 start_timeout: int = 0) -> None:
        self.index = booking_index.Index(database, clock)
        self.selector = selection.Selection(self.index, strategy)
        self.starts = start_times.StartTimes(clock, self.index, self.selector)
        self._database = database
        self._clock = clock
        self._start_timeout = start_timeout
        self._lost: dict[int, float] = {}

    def admit(self, demands: ty.Sequence[model.Demand], window: model.Window,
              write: ty.Callable[[sa.Connection, selection.Picked], R],
              host_bound: _HostBound = _no_bound,
              after_end: int | None = None) -> R:
        """Find hosts and write the decision; repeat both after a lost race.

        :param demands: admitted all or nothing
        :param write: decides in a transaction, by
            :func:`blazar_core.capacity.ledger.decide`, about the hosts that
            it is given, one for each server of each demand
        :param host_bound: the hosts of the project, read before each attempt
        :param after_end: see :meth:`pick_now`
        :returns: what ``write`` returned, after its commit
        :raises Refused: when there is no capacity, with the reason and the
            next start
        :raises ConcurrentUpdate: when too many others book at the same moment
        """
        return self.admit_all(
            [(demands, window)],
            lambda connection, picked: write(connection, picked[0]),
            host_bound, after_end)

    def admit_all(self, wanted: ty.Sequence[tuple[
            ty.Sequence[model.Demand], model.Window]],
            write: ty.Callable[[sa.Connection, list[selection.Picked]], R],
            host_bound: _HostBound = _no_bound,
            after_end: int | None = None) -> R:
        """As :meth:`admit`, for windows that do not overlap: all or nothing.

        :param wanted: windows of which no two overlap, with the demands of
            each
        :param write: is given hosts for each window
        """
        lags = iter([LAG])
        losses = itertools.count()

        def attempt() -> R:
            crowded, lag = self.crowded(), next(lags, 0)
            gather, bound = next(losses) < GATHER_TRIES, host_bound()
            own: set[int] = set()
            picked, woken = [], []
            for demands, window in wanted:
                found, off = self.pick_now(
                    demands, window, after_end, lag=lag, host_bound=bound,
                    preference=selection.Preference(crowded, own, gather))
                picked.append(found)
                woken += [(row, window.start) for row in off]
                own.update(*picked[-1])
                if bound is not None:
                    bound.add(picked[-1], window)
            with self.deciding(), self._database.begin() as connection:
                for row, start in woken:
                    outages.wake(connection, self._clock.now(), row, start)
                return write(connection, picked)

        return self._database.retried(attempt)

    @contextlib.contextmanager
    def deciding(self) -> ty.Iterator[None]:
        """Note the host on which a decision in this context loses a race, so
        that the next search prefers others.
        """
        try:
            yield
        except api.LostRace as race:
            self._lost[race.host_id] = self._clock.elapsed()
            raise

    def crowded(self) -> set[int]:
        """Return the ids of hosts about which others decided a moment ago.

        The same host is the best for all processes that decide concurrently,
        so each of them avoids it for a while after a lost race.
        """
        since = self._clock.elapsed() - CROWDED
        self._lost = {host_id: when for host_id, when in self._lost.items()
                      if when >= since}
        return set(self._lost)

    def pick(self, demand: model.Demand, window: model.Window,
             last: ty.Collection[int] = (), **how: ty.Any) -> list[int]:
        """As :meth:`pick_all`, for one demand.

        :param last: see :class:`.selection.Preference`
        """
        return self.pick_all([demand], window, **how,
                             preference=selection.Preference(last))[0]

    def pick_all(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, instead_of: ty.Sequence[ty.Any] = (),
                 lag: float = 0, kept: ty.Sequence[selection.Pinned] = (),
                 coming: ty.Sequence[ty.Any] = (),
                 host_bound: ProjectHosts | None = None,
                 preference: selection.Preference = selection.Preference(),
                 ) -> selection.Picked:
        """Return the id of a host for each server of demands; book nothing.

        A demand that accepts fewer servers gets as many as fit.

        :param instead_of: rows of bookings that would be removed in exchange
        :param lag: seconds by which the index may be out of date; a refusal
            is based on current data only
        :param kept: servers that must fit as well where they are; then no
            other start is searched for
        :param coming: bookings that are decided together with this, and not
            recorded yet
        :param host_bound: the hosts of the project; None: any host is allowed
        :raises Refused: when they do not all fit
        :raises LimitExceeded: when the hosts that they select would exceed
            the bound of the project
        """
        if any(demand.required for demand in demands):
            parts = [demand.parts() for demand in demands]
            picked = iter(self.pick_all(
                [*itertools.chain(*parts)], window, instead_of, lag, kept,
                coming, host_bound, preference))
            return [[*itertools.chain(*itertools.islice(picked, len(each)))]
                    for each in parts]
        alike = _alike(demands)
        merged: ty.Sequence[model.Demand] = [
            dataclasses.replace(demands[numbers[0]], count=sum(
                demands[number].count for number in numbers))
            for numbers in alike]
        asked = merged
        with self.selector.asked_for(
                merged, lag, instead_of, coming) as (timeline, merged):
            found = self.selector.together(
                timeline, merged, window, kept, preference)
        # An index that lags may miss the newest hosts of the project.
        if lag and (isinstance(found, selection.NoFit) or (
                host_bound is not None and not host_bound.has_all(found))):
            return self.pick_all(demands, window, instead_of, 0, kept, coming,
                                 host_bound, preference)
        if not isinstance(found, selection.NoFit):
            bound = host_bound and host_bound.exceeded(found, window)
            if bound:
                with self.selector.asked_for(
                        asked, 0, instead_of, coming) as (timeline, merged):
                    found = self.selector.gathered(
                        timeline, asked, merged, window, kept, bound) or found
            return _dealt(found, alike, demands)
        refusal = self._refusal([demand.fewest() for demand in merged],
                                window, found, instead_of, kept)
        self._explain(refusal, window)
        raise errors.Refused(refusal, (demands, window))

    def pick_now(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, after_end: int | None, **how: ty.Any,
                 ) -> tuple[selection.Picked, list[sa.Row[ty.Any]]]:
        """As :meth:`pick_all`, where a lease that starts now may also have
        hosts that are switched off, if they are back in time.

        :param after_end: seconds at the end of the window that follow the end
            of the lease; None: it may not
        :returns: the bookings of these hosts as well, see
            :func:`outages.wake`
        """
        try:
            return self.pick_all(demands, window, **how), []
        except errors.Refused:
            off = [] if after_end is None else self.off_hosts(
                window, after_end)
            if not off:
                raise
            # Without them, the refusal says when there is capacity.
            with contextlib.suppress(errors.Refused):
                picked = self.pick_all(
                    demands, window, instead_of=off, **how)
                used = {*itertools.chain(*picked)}
                return picked, [row for row in off if row.host_id in used]
            raise

    def off_hosts(self, window: model.Window, after_end: int,
                  ) -> list[sa.Row[ty.Any]]:
        """Return the bookings of the hosts that are switched off, but which a
        lease can have that starts now.

        :param after_end: see :meth:`pick_now`
        """
        now = self._clock.now()
        # Before the lease ends, too.
        within = min(self._start_timeout, window.end - after_end - now - 1)
        if window.start > now or within <= 0 or (
                not self.index.apart().off.any()):
            return []
        with self._database.connection() as connection:
            return [*outages.wakeable(connection, now, within, window.start)]

    def off_until(self) -> int:
        """Return when all hosts could be used that are switched off; 0: none
        is off.
        """
        if not self.index.apart().off.any():
            return 0
        with self._database.connection() as connection:
            return outages.off_until(connection)

    def candidates(self, demand: model.Demand) -> set[int]:
        """Return the ids of the hosts that a demand could have entirely, if
        nothing were booked there.
        """
        with self.selector.asked_for([demand], 0) as (timeline, (demand,)):
            allowed = self.selector.allowed(timeline, demand)
            ids = timeline.ids if allowed is None else [
                timeline.ids[place] for place in np.flatnonzero(allowed)]
        hosts = self.index.hosts
        return {one for one in ids if any(hosts[one].capacity.values()) and
                not any(hosts[one].usage.values())}

    def usable(self, demand: model.Demand, window: model.Window | None = None,
               instead_of: ty.Sequence[ty.Any] = ()) -> frozenset[str]:
        """Return the uuids of the hosts that can take a server of a demand.

        :param window: over which it has to fit; None: as if nothing were
            booked or used there
        :param instead_of: rows of bookings that would be removed in exchange
        """
        with self.selector.asked_for(
                [demand], 0, instead_of) as (timeline, (demand,)):
            able = timeline.units.limits(demand, len(timeline)).able(
                self.selector.places(timeline, demand), 1)
            if window is not None:
                able = able[timeline.fits(demand, window)[able] > 0]
            hosts = self.index.uuids()[able]
        return frozenset(hosts.tolist())

    def fits(self, demand: model.Demand, window: model.Window,
             instead_of: ty.Sequence[ty.Any] = (),
             coming: ty.Sequence[ty.Any] = ()) -> int:
        """Return how many servers of a demand fit; book nothing.

        :param instead_of: rows of bookings that would be removed in exchange
        :param coming: as for :meth:`pick_all`
        """
        with self.selector.asked_for(
                demand.parts(), 0, instead_of, coming) as (timeline, parts):
            return self.selector.fitting(timeline, parts)(window)

    def safe_for(self, demand: model.Demand, lead_time: int, wanted: int,
                 cleaning_time: int = 0) -> int | None:
        """Return for how many seconds interruptible servers of a demand would
        be safe on the best hosts, if no other one is evicted for them.

        Costs one search, and if the result is less than ``wanted``, one more
        for each bit of ``wanted``.

        :param wanted: the maximum of the result, in seconds
        :param cleaning_time: seconds by which the lead time is longer on hosts
            that serve leases only
        :returns: None: there is no capacity for them now
        """
        now = self._clock.now()
        with self.selector.asked_for([demand], 0) as (timeline, (demand,)):
            allowed = self.selector.allowed(timeline, demand)
            serving = self.index.apart().serving

            def fits(seconds: int) -> bool:
                window = model.Window(now, now + seconds + lead_time)
                with self.index.keeping_interruptible(window.end):
                    rooms = timeline.fits(demand, window, allowed)
                if cleaning_time and rooms[serving].any():
                    window = model.Window(now, window.end + cleaning_time)
                    with self.index.keeping_interruptible(window.end):
                        rooms[serving] = timeline.fits(
                            demand, window, serving & (rooms > 0))[serving]
                return selection.most_of(demand, rooms) >= demand.count

            if fits(wanted):
                return wanted
            if not fits(0):
                return None
            return bisect.bisect(range(1, wanted), False, key=(
                lambda seconds: not fits(seconds)))

    def fits_without_interruptible(
            self, demands: ty.Sequence[model.Demand], window: model.Window,
            host_bound: ProjectHosts | None = None) -> bool:
        """Return whether demands fit where no interruptible server is."""
        try:
            self.pick_all(demands, window, host_bound=host_bound,
                          instead_of=self.index.evictable())
        except errors.Refused:
            return False
        return True

    def quote(self, demands: ty.Sequence[model.Demand], window: model.Window,
              host_bound: ProjectHosts | None = None,
              after_end: int | None = None) -> refusals.Refusal | None:
        """Return the refusal that :meth:`pick_now` would raise; None: there
        is capacity.
        """
        try:
            self.pick_now(demands, window, after_end, host_bound=host_bound)
        except errors.Refused as exc:
            return exc.refusal
        return None

    def _refusal(self, demands: ty.Sequence[model.Demand],
                 window: model.Window, short: selection.NoFit,
                 instead_of: ty.Sequence[ty.Any],
                 kept: ty.Sequence[selection.Pinned]) -> refusals.Refusal:
        """Return the refusal of demands that do not fit.

        :param kept: servers that cannot start at another time
        """
        next_start = after = None
        reason = refusals.Reason.NO_HOST
        if short.anywhere:
            reason = refusals.Reason.TOO_BIG
            if kept:
                if self.starts.fit_once(demands, window, instead_of, kept):
                    reason = refusals.Reason.NO_ROOM
            else:
                next_start, after = self.starts.next_start(
                    demands, window, instead_of)
                if (next_start, after) != (None, None):
                    reason = refusals.Reason.NO_ROOM
        return refusals.Refusal(
            reason, selection.count_of(kept) + sum(
                demand.count for demand in demands),
            short.fits, next_start, after, detail=self._too_much(demands)
            if reason is refusals.Reason.TOO_BIG else '', whole=all(
                model.HOST in one.resources for one in demands),
            resource=refusals.resource_of(
                short.demand.resources if short.demand else ()))

    def _too_much(self, demands: ty.Iterable[model.Demand]) -> str:
        """Return the amounts that no host gives one server, as text."""
        with self.selector.asked_for(
                [*demands], start_times.PATIENCE) as (timeline, named):
            found = [timeline.too_much(
                demand, self.selector.places(timeline, demand))
                for demand in named]
        said = [_said(one) for some in found for one in some or ()]
        if not said and any(some is not None for some in found):
            said = [_TOGETHER]
        return ' '.join(dict.fromkeys(said))

    def _explain(self, refusal: refusals.Refusal, window: model.Window,
                 ) -> None:
        """Log which leases block a refused request."""
        if refusal.reason is not refusals.Reason.NO_ROOM or not (
                LOG.isEnabledFor(logging.INFO)):
            return
        with self._database.reader() as session:
            leases = _in_the_way(session, window)
        LOG.info('Refused %s servers from %s to %s: only %s fit. Blocked by '
                 'leases: %s',
                 refusal.wanted, clocks.minute(window.start),
                 clocks.minute(window.end), refusal.fits_now,
                 ', '.join(leases) or 'none, but servers without an end')


#: Each amount is available, but not all of them in one server.
_TOGETHER = ('No host can provide all that one server needs: a single '
             'resource provider must provide all resources of a class, and '
             'all resources of a numbered request group, with the traits of '
             'the group.')


def _said(one: provider_limits.ExceedsHost) -> str:
    """Return the message about an amount that no host gives one server."""
    asked = f'One server needs {one.amount} {one.rc}, but'
    if one.amount > one.most:
        return f'{asked} no host gives one server more than {one.most}.'
    if one.amount < one.least:
        return f'{asked} no host gives one server less than {one.least}.'
    return (f'{asked} hosts give one server only multiples of '
            f'{" or ".join(map(str, one.steps))}.')


def _alike(demands: ty.Sequence[model.Demand]) -> list[list[int]]:
    """Return groups of demands, by number, that differ only in their counts.

    Demands with an affinity, and those that accept fewer servers, are in a
    group of their own.
    """
    alike: dict[ty.Hashable, list[int]] = {}
    for number, demand in enumerate(demands):
        alike.setdefault(
            demand.kind() if demand.affinity is model.Affinity.NONE and
            demand.least is None else number, []).append(number)
    return [*alike.values()]


def _dealt(found: selection.Picked, alike: ty.Sequence[ty.Sequence[int]],
           demands: ty.Sequence[model.Demand]) -> selection.Picked:
    """Return hosts picked for merged demands, distributed to all demands."""
    picked: selection.Picked = [[] for _demand in demands]
    for hosts, numbers in zip(found, alike, strict=True):
        rest = iter(hosts)
        for number in numbers:
            picked[number] = [*itertools.islice(rest, demands[number].count)]
    return picked


def _in_the_way(session: orm.Session, window: model.Window) -> list[str]:
    """Return the leases, at most ten, of the bookings in a window that end
    first.

    Reads the bookings in the order of their ends, at most a hundred of them: a
    lease may have many.
    """
    first = sa.select(models.Booking.reservation_id, models.Booking.end_date,
                      ).where(
        models.Booking.host_id.is_not(None),
        models.Booking.end_date > window.start,
        models.Booking.start_date < window.end,
    ).order_by(models.Booking.end_date).limit(100).subquery()
    leases = session.scalars(
        sa.select(models.Reservation.lease_id).join(
            first, first.c.reservation_id == models.Reservation.id)
        .order_by(first.c.end_date))
    return list(dict.fromkeys(leases))[:10]
