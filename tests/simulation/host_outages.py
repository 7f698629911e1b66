# SPDX-License-Identifier: Apache-2.0

"""Hosts that fail, and hosts in maintenance."""

import contextlib
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.healing import alternatives
from blazar_core.healing import evacuation
from blazar_core.healing import maintenance
from blazar_core.lifecycle import demands
from tests.simulation import baton as batons
from tests.simulation import world as worlds

#: Seconds within which bookings of an unavailable host must be reassigned, or
#: lose their host, if no fault interferes.
HEALED = 120
#: The bookings that may be reassigned, as in the overbooking check.
MOVABLE = """
    bookings.dispatched_at IS NULL AND bookings.claimed_at IS NULL
    AND leases.deleted_at IS NULL AND (
        reservations.params IS NOT NULL AND bookings.server_id IS NULL
        AND leases.status IN ('PENDING', 'STARTING', 'ACTIVE')
        OR reservations.params IS NULL AND leases.status = 'PENDING'
        AND EXISTS (SELECT 1 FROM deferred_builds
                    WHERE deferred_builds.lease_id = leases.id))"""


def fail_hosts(world: worlds.World, end: float) -> None:
    """Let hosts fail for a day or two, one or two at a time, and recover.

    A week of failures takes twice as long to simulate, and finds nothing more.
    """
    baton, faults = world.baton, world.faults
    rate = faults.rates.get('failure', 0)
    end = min(end, baton.now + baton.dice.uniform(0.2, 2) * 86400)
    while rate and baton.now < end:
        faults.count['failure'] += 1
        hosts = [*world.cloud.hosts.values()]
        if world.relocates:
            # A host whose failure requires evacuations.
            runs = {server.host.uuid for server in
                    world.cloud.servers.values()
                    if server.is_there and server.leased and server.host}
            hosts = [host for host in hosts if host.uuid in runs] or hosts
        for host in baton.dice.sample(hosts, min(
                len(hosts), baton.dice.choice([1, 1, 2]))):
            if host.there and not host.down:
                world.cloud.fail_host(host, baton.dice.random() < (
                    0.9 if world.relocates else 0.3))
                baton.later(faults.pause('failure'),
                            lambda host=host: world.cloud.recover(host))
        baton.let_pass(faults.pause('failures') / rate)


class Operator:
    """An operator who announces maintenance and ends some of it early.

    :param moments: when maintenance is announced
    """

    def __init__(self, core: worlds.Core, moments: ty.Sequence[float],
                 ) -> None:
        self._core = core
        self._world = core.world
        self._baton = core.world.baton
        self._moments = moments

    def run(self) -> None:
        core = self._core
        taking = maintenance.Maintenance(
            core.database, core.clock, alternatives.Alternatives(
                core.database, core.admission,
                demands.Demands(core.clock, str, core.world.types),
            ), evacuation.Evacuation(
                core.database, core.clock, core.admission,
                core.world.port, worlds.PATIENT.interval,
                core.world.types), lambda *_what: None)
        for moment in self._moments:
            if moment < self._baton.now:
                continue
            self._baton.let_pass(moment - self._baton.now)
            host = self._baton.dice.choice(
                [*self._world.cloud.hosts.values()])
            with contextlib.suppress(
                    errors.DatabaseUnavailable, errors.ConcurrentUpdate,
                    errors.CloudUnavailable, errors.Conflict,
                    errors.NotFound):
                self._take(taking, host.name)

    def _take(self, taking: maintenance.Maintenance, name: str) -> None:
        dice = self._baton.dice
        start = self._core.clock.now() + dice.choice([0, 60, 3600, 14400])
        window = model.Window(start, start + dice.choice([60, 600, 3600]))
        stays = {one.server_id or one.lease_id
                 for one in taking.promised(name, window) if one.obstacle}
        taking.announce(name, window, 'new disks')
        self._baton.tell(f'{name} is taken from {start - batons.START} on, '
                         f'and {sorted(stays)} stay')
        if dice.random() < 0.3:
            self._baton.let_pass(dice.uniform(0, 7200))
            taking.end_early(name)
            self._baton.tell(f'{name} is given back')


class HostOutages:
    """A check after each commit: no booking depends on an unavailable host."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._seen = -1
        #: By id of a booking, its host at the last check; and the outages
        #: known then.
        self._bound: dict[int, int] = {}
        self._known: set[int] = set()
        #: By ids of an outage's booking and of another one: since when both
        #: are on the same host.
        self._since: dict[tuple[int, int], float] = {}

    def wrong(self) -> ty.Iterator[str]:
        """Return all violations."""
        versions = self._world.storage.versions
        seen = versions['bookings'] + versions['leases'] + versions['hosts']
        if seen == self._seen:
            yield from self._too_long()
            return
        self._seen = seen
        down = {id: (host_id, start, end) for id, host_id, start, end in
                self._world.look(
                    f'SELECT id, host_id, start_date, end_date FROM bookings '
                    f'WHERE outage IS NOT NULL '
                    f'AND end_date > {int(self._world.baton.now)}')}
        rows = {id: (host_id, start, end, lease_id)
                for id, host_id, start, end, lease_id in self._world.look(
                    f'SELECT bookings.id, bookings.host_id, '
                    f'bookings.start_date, bookings.end_date, leases.id '
                    f'FROM bookings JOIN reservations '
                    f'ON reservations.id = bookings.reservation_id '
                    f'JOIN leases ON leases.id = reservations.lease_id '
                    f'WHERE bookings.host_id IS NOT NULL AND {MOVABLE}')}
        since, self._since = self._since, {}
        for outage, (host_id, start, end) in down.items():
            for id, (where, begins, ends, lease_id) in rows.items():
                if where != host_id or begins >= end or ends <= start:
                    continue
                # The booking was there before the outage.
                if outage in self._known and self._bound.get(id) != host_id:
                    yield (f'lease {lease_id[:8]} is bound to host '
                           f'{host_id}, which does not answer')
                self._since[outage, id] = since.get(
                    (outage, id), self._world.baton.now)
        # A slot whose server left is on its previous host again.
        self._bound = dict(self._world.look(
            'SELECT id, host_id FROM bookings WHERE host_id IS NOT NULL'))
        self._known = {*down}
        yield from self._too_long()

    def _too_long(self) -> ty.Iterator[str]:
        """Return bookings that should have been reassigned by now."""
        excused = self._world.faults.last + HEALED + 600
        for (_outage, id), since in self._since.items():
            if self._world.baton.now > max(since + HEALED, excused):
                yield (f'booking {id} was to be bound elsewhere '
                       f'{self._world.baton.now - since:.0f} s ago: its host '
                       f'does not answer')


def left(world: worlds.World) -> ty.Iterator[str]:
    """Return what is wrong when all hosts are back."""
    for name, kind in world.look(
            f"SELECT hosts.name, outages.kind FROM outages "
            f"JOIN hosts ON hosts.id = outages.host_id "
            f"WHERE outages.kind = 'failure' "
            f"OR outages.kind = 'maintenance' AND NOT EXISTS ("
            f"SELECT 1 FROM bookings WHERE host_id = hosts.id "
            f"AND outage = 'maintenance' "
            f"AND end_date > {world.baton.now - HEALED})"):
        yield f'{name} is still unavailable: {kind}'
    if world.look("SELECT 1 FROM bookings WHERE outage = 'failure' LIMIT 1"):
        yield 'an outage of a host is still booked'
    for server_id, reason, status in world.look(
            "SELECT server_id, reason, status FROM server_moves "
            "WHERE reason <> 'best_effort' "
            "AND status IN ('planned', 'requested', 'accepted')"):
        yield f'{server_id} still has to leave a host: {reason}, {status}'
    if world.look(
            'SELECT 1 FROM bookings WHERE host_failed_at IS NOT NULL LIMIT 1'):
        yield 'something is still stranded'
