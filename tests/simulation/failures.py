# SPDX-License-Identifier: Apache-2.0

"""Simulate failing hosts under leases of whole hosts for months.

Whether the leases get the hosts they have reserved: ``python -m
tests.simulation.failures 1-10``. The real core on a database file, without
other faults: 500 hosts, each of which fails once in 30 days on average and is
repaired after a day, and leases of one to eight of them for 70 % of all.
Whenever a host fails or is repaired, whenever a lease starts, and every few
hours, the status is updated and the overbooking check runs once. After it each
lease that has started, or starts within the healing interval, has all its
hosts; if not, an independent rule (:func:`has_room`) decides whether there
were free hosts.
"""

import argparse
import collections
import concurrent.futures
import functools
import heapq
import itertools
import logging
import pathlib
import random
import sys
import tempfile
import typing as ty
import uuid

import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import migration
from blazar_core.db import models
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import leases
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import handlers
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.simulation import database as simulated
from tests.unit import base

HOUR, DAY = 3600, 86_400
#: Seconds between two failures of a host, and until it is repaired.
FAILS_AFTER, REPAIRED_AFTER = 30 * DAY, DAY
#: The seconds for which bookings are healed in advance, and between two
#: checks.
INTERVAL, PASS = 6 * HOUR, 3 * HOUR
#: The most hosts of a lease; its mean days, and the days it is created ahead.
MOST, LASTS, AHEAD = 8, 5, 7
#: The requested share of all hosts; a part of it is refused.
ASKED = 0.78


class Need(ty.NamedTuple):
    """A demand for whole hosts, or their outage, over a window."""

    count: int
    start: int
    end: int


def has_room(hosts: int, needs: ty.Iterable[Need]) -> bool:
    """Return whether there are enough hosts, if each need may have any host.

    Exact, although it only counts: identical hosts are colours of intervals,
    and the number of intervals that overlap at one instant is enough (each
    takes a colour that is free when it begins). Needs that have a host have
    started, or are unavailable, so all of them overlap now and have different
    hosts, from which the same argument continues.
    """
    steps: dict[int, int] = collections.defaultdict(int)
    for need in needs:
        steps[need.start] += need.count
        steps[need.end] -= need.count
    return all(count <= hosts for count in itertools.accumulate(
        steps[when] for when in sorted(steps)))


class Result(ty.NamedTuple):
    """The results of a simulation.

    :ivar used: the share of all hosts over all time that was leased
    :ivar begun: how many leases have started
    :ivar failures: how many hosts have failed
    :ivar lacking: how many of the leases ever lacked hosts after a check
    :ivar wrong: how many of these although another host was free
    """

    used: float
    begun: int
    failures: int
    lacking: int
    wrong: int


class _Machines(base.WholeType):
    """Whole hosts that need no preparation."""

    def so_many(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(model.WHOLE, params['max'], least=params['max'])

    def start(self, reserved: resource_types.ReservationContext) -> None:
        pass

    def bookings_changed(self,
                         reserved: resource_types.ReservationContext) -> None:
        pass

    def end(self, reserved: resource_types.ReservationContext) -> None:
        pass


class Years:
    """A cloud over months.

    :param heals: whether the overbooking check runs
    """

    def __init__(self, seed: int, hosts: int, folder: pathlib.Path,
                 heals: bool = True) -> None:
        self._dice, self._hosts, self._heals = random.Random(
            seed), hosts, heals
        conf = databases.configuration(
            f'sqlite:///{folder}/{seed}.sqlite', end_timeout=0)
        self._clock = driven.ManualClock(base.NOW)
        self._database = api.Database(conf, self._clock)
        sa.event.listen(
            self._database.engine, 'connect', lambda connection, _record:
            simulated.set_time(connection, self._clock.now))
        migration.upgrade(self._database)
        search = admissions.Admission(self._database, self._clock)
        kind = _Machines()
        types = resource_types.ResourceTypes({'machine': kind}, kind)
        self._leases = leases.Leases(
            self._database, self._clock, search, types)
        life = handlers.Handlers(
            conf, self._database, self._clock, search, base.integration(
                base.FakeCloud(), types,
                {end_policies.DELETE: end_policies.Delete()}, str,
                self._told), base.LOST_AFTER)
        self._engine = engine.Engine(
            conf, self._database, self._clock, life, 'listener')
        self._host_status = host_status.HostStatus(
            self._database, self._clock, host_status.Thresholds(
                0, 0, INTERVAL), self._told)
        self._overbooking = overbooking.OverbookingCheck(
            self._database, self._clock, search, self._leases.reassignment,
            demands.Demands(self._clock, str, types), self._told, 300)
        self._uuids = [str(uuid.UUID(int=self._dice.getrandbits(128)))
                       for _host in range(hosts)]
        self._down: set[str] = set()
        self._events: list[tuple[int, int, ty.Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lacking: set[str] = set()
        self._wrong: set[str] = set()
        self._failures = 0
        for host in self._uuids:
            self._report(host)

    def _told(self, _event_type: str, _lease: ty.Any) -> None:
        pass

    def _recheck(self) -> None:
        """Report the hosts whose recheck is due."""
        with self._database.reader() as session:
            left = session.scalars(sa.select(models.Host.uuid).where(
                models.Host.recheck_at <= self._clock.now())).all()
        for host in left:
            self._report(host)

    def _report(self, host: str) -> None:
        """Report a host without servers."""
        with self._database.writer() as session:
            inventory.record_host(
                session, self._clock.now(), model.HostFacts(
                    host, host, host, {'VCPU': 8}), {},
                inventory.generations(session, [host]).get(host))

    def _at(self, when: float, work: ty.Callable[[], None]) -> None:
        heapq.heappush(self._events, (int(when), next(self._numbers), work))

    def _after(self, mean: float, work: ty.Callable[[], None]) -> None:
        self._at(self._clock.now() + self._dice.expovariate(1 / mean), work)

    def run(self, days: float) -> Result:
        """Let so many days pass."""
        end = base.NOW + days * DAY
        for host in self._uuids:
            self._after(FAILS_AFTER, functools.partial(self._fail, host))
        for when in range(base.NOW, int(end), PASS):
            self._at(when, lambda: None)
        self._ask()
        while self._events and self._events[0][0] <= end:
            when, _number, work = heapq.heappop(self._events)
            self._clock.advance(max(0, when - self._clock.now()))
            work()
            self._host_status.update(
                {host: host_status.Down('It is down.', certain=True) if host in
                 self._down else None for host in self._uuids})
            self._recheck()
            while driven.run_due(self._engine):
                self._recheck()
            if self._heals:
                self._overbooking.look()
            self._judge()
        return self._result(int(end))

    def _ask(self) -> None:
        """Ask for a lease, and schedule the next request."""
        dice, now = self._dice, self._clock.now()
        mean = (1 + MOST) / 2 * LASTS * DAY
        self._after(mean / (ASKED * self._hosts), self._ask)
        start = now + int(dice.uniform(HOUR, AHEAD * DAY))
        window = model.Window(start, start + int(
            max(HOUR, dice.expovariate(1 / (LASTS * DAY)))))
        params = {'max': dice.randint(1, MOST)}
        try:
            self._leases.creation.create(new_leases.NewLease(
                'project', 'user', requests.LeaseRequest(
                    name='lease', window=window, before_end=None, events=(),
                    on_end='delete', starts_now=False),
                (new_leases.NewReservation(
                    _Machines().so_many(params), resource_type='machine',
                    params=params, spec={}),)), None)
        except errors.Refused:
            return
        self._at(window.start, lambda: None)
        self._at(window.end, lambda: None)

    def _fail(self, host: str) -> None:
        self._down.add(host)
        self._failures += 1
        self._after(REPAIRED_AFTER, functools.partial(self._repair, host))

    def _repair(self, host: str) -> None:
        self._down.discard(host)
        self._after(FAILS_AFTER, functools.partial(self._fail, host))

    def _judge(self) -> None:
        """Record which started leases lack hosts, and if any were free."""
        now = self._clock.now()
        with self._database.reader() as session:
            rows = session.execute(_PROMISED, {'now': now}).all()
            down = {row.host_id: row.end_date for row in session.execute(
                _AWAY, {'now': now})}
        has = collections.Counter(
            row.id for row in rows
            if row.host_id is not None and row.host_id not in down)
        # A lease with a replacement has one more when the first host is
        # repaired.
        needs = {row.id: Need(
            max(row.amount, has[row.id]), max(row.start_date, now),
            row.end_date) for row in rows}
        lacking = {row.id for row in rows
                   if row.start_date <= now and has[row.id] < row.amount}
        self._lacking |= lacking
        for row in rows:
            if row.host_id in down and row.start_date <= now:
                # It stays assigned to its lease, which gets another one.
                down[row.host_id] = max(down[row.host_id], row.end_date)
        taken = [Need(1, now, until) for until in down.values()] + [
            # A lease that lacks hosts keeps those that it has.
            need._replace(count=has[one]) if one in lacking else need
            for one, need in needs.items()]
        self._wrong |= {one for one in lacking if has_room(
            self._hosts, [*taken, Need(
                1, needs[one].start, needs[one].end)])}

    def _result(self, end: int) -> Result:
        with self._database.reader() as session:
            rows = session.execute(sa.select(
                models.Lease.start_date, models.Lease.end_date,
                models.Reservation.amount).join(models.Reservation).where(
                    models.Lease.start_date <= end)).all()
        used = sum(row.amount * (min(row.end_date, end) - row.start_date)
                   for row in rows)
        return Result(
            used / self._hosts / (end - base.NOW), len(rows), self._failures,
            len(self._lacking), len(self._wrong))


_PROMISED = sa.select(
    models.Lease.id, models.Lease.start_date, models.Lease.end_date,
    models.Reservation.amount, models.Booking.host_id,
).join(models.Reservation, models.Reservation.lease_id == models.Lease.id,
       ).join(models.Booking).where(
    models.Lease.end_date > sa.bindparam('now'),
    models.Lease.status.in_((*states.BEFORE, *states.BEGUN)))
_AWAY = sa.select(models.Booking.host_id, models.Booking.end_date).where(
    models.Booking.outage.is_not(None),
    models.Booking.end_date > sa.bindparam('now'))


def replay(seed: int, hosts: int, days: float, heals: bool) -> Result:
    """Run one seed."""
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        return Years(seed, hosts, pathlib.Path(folder), heals).run(days)


def main(arguments: ty.Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m tests.simulation.failures', description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('seeds', help='7, or 1-1000')
    parser.add_argument('--hosts', type=int, default=500)
    parser.add_argument('--days', type=float, default=90)
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--without-healing', action='store_true',
                        help='nobody looks after what is promised')
    options = parser.parse_args(arguments)
    first, _dash, last = options.seeds.partition('-')
    wrong = 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        seeds = range(int(first), int(last or first) + 1)
        for seed, found in zip(seeds, pool.map(
                replay, seeds, itertools.repeat(options.hosts),
                itertools.repeat(options.days),
                itertools.repeat(not options.without_healing)), strict=True):
            print(f'seed {seed}: {found.used:.0%} used, {found.begun} leases, '
                  f'{found.failures} failures, {found.lacking} leases lacked '
                  f'hosts, {found.wrong} though there were some', flush=True)
            wrong += found.wrong
    return int(wrong > 0 and not options.without_healing)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
