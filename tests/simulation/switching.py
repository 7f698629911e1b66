# SPDX-License-Identifier: Apache-2.0

"""Idle hosts are switched off and on, by BMCs that hang, fail and lie."""

import collections.abc
import contextlib
import math
import random
import typing as ty
from unittest import mock

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import leader_election
from blazar_core.healing import host_status
from blazar_nova.compat import power_services
from blazar_nova.listener import power
from tests import machines
from tests.simulation import cloud as clouds

#: What may happen to a request, and how often at most.
RATES = {'bmc hangs': 0.1, 'bmc fails': 0.2, 'bmc untold': 0.2,
         'bmc lies': 0.05, 'boot slow': 0.1}
#: Seconds that a BMC takes to answer if it hangs.
HANGS = 1, 10
#: Seconds from an answer of a BMC until a host is off, or reports.
SHUTDOWN, BOOT, SLOW = (5, 40), (30, 100), (200, 900)
#: Seconds by which outages are extended at once, so that time passes quickly.
RARELY = 1800
#: Seconds for which Nova believes that a host is up that is not.
SILENT = 30
#: Seconds by which a listener looks earlier for a host that a lease needs, as
#: its clock may be ahead.
EARLY = 60
#: Seconds after a fault for which a start may be late.
EXCUSED = 1500
POLICY = {'minimum_off': 300, 'minimum_on': 120, 'boot_time': 120,
          'boot_time_floor': 100, 'margin': 120, 'shutdown_timeout': 60,
          'claim': 60}


class Machines:
    """The hosts as :class:`power.Power` sees them, in a world.

    It has dice of its own, so that all other seeds tell the same story.

    :param world: a :class:`tests.simulation.world.World`
    """

    has_common = False

    def __init__(self, world: ty.Any) -> None:
        world.stack.enter_context(mock.patch.object(
            power, '_STEP', power._STEP))
        self._world = world
        self._baton = world.baton
        self._cloud: clouds.Cloud = world.cloud
        self._faults = world.faults
        self._dice = random.Random(f'power {world.baton.seed}')
        harm = self._dice.choice([0, 0, 0.3, 1])
        self._rates = {name: harm * most * self._dice.random()
                       for name, most in RATES.items()}
        self._policy = machines.policy(
            **POLICY, spare_hosts=self._dice.choice([0, 0, 1]),
            max_switching=self._dice.choice([1, 2, 10]))
        #: By id of a booking: for when it is looked whether its host is on.
        self._looks: dict[int, int] = {}
        #: By host: until when a command to its BMC may be under way.
        self._under_way: dict[str, float] = {}
        #: How many hosts have gone off, and how many starts were on time.
        self.off_count = self.on_time = 0
        world.checks.append(self)

    def look_rarely(self) -> None:
        """Extend the outages of hosts that are off by so much at once that a
        week does not take long to simulate.
        """
        power._STEP = RARELY

    # -- each listener -------------------------------------------------------

    def run(self, core: ty.Any) -> None:
        """Switch hosts, as a listener does."""
        switch = power.Power(
            core.database, core.clock, host_status.HostStatus(
                core.database, core.clock,
                host_status.Thresholds(90, 90, 7200), self._world.notified),
            power.Machines(ty.cast(ty.Any, self), ty.cast(ty.Any, self)),
            self._policy,
            lambda event, payload: self._baton.tell(
                f'{event}: {payload["host"]} {payload["reason"]}'),
            lambda work: core.process.spawn('switch', work))
        leader = leader_election.Leader(
            core.database, core.clock, power.LEADER,
            f'{core.process.name}.{core.process.lives}', power.PAUSE, 60)
        while True:
            with contextlib.suppress(errors.DatabaseUnavailable,
                                     errors.ConcurrentUpdate):
                leader.lead(switch.look)
            seen = self._world.storage.versions['bookings']
            self._baton.let_pass(power.PAUSE)
            if pause := self._pause():
                self._baton.wait(lambda: (
                    self._world.storage.versions['bookings'] != seen), pause)

    def _pause(self) -> float:
        """Return for how long a listener need not look if no bookings change.
        """
        hosts = dict(self._world.look(
            "SELECT power_state, max(power_lead) FROM hosts "
            "WHERE power_state IS NOT NULL GROUP BY power_state"))
        if states.Power.STOPPING in hosts or states.Power.BOOTING in hosts:
            return 0
        if not hosts:
            return 2 * power._STEP
        (start,), = self._world.look(
            "SELECT min(start_date) FROM bookings JOIN hosts ON hosts.id = "
            "bookings.host_id WHERE power_state IS NOT NULL AND "
            "outage IS NOT 'power' AND start_date > "
            f"{int(self._baton.now)}")
        # What is off is booked for one step more than it takes, or two.
        return max(0, min(power._STEP / 2, (start or math.inf) - EARLY - max(
            one or 0 for one in hosts.values()) - self._baton.now))

    # -- BMCs ----------------------------------------------------------------

    def _happens(self, name: str) -> bool:
        if not self._faults.on or self._dice.random() >= self._rates[name]:
            return False
        self._faults.hinder(self._baton.now)
        self._faults.count[name] = self._faults.count.get(name, 0) + 1
        return True

    def _host(self, name: str) -> clouds.Host:
        return next(one for one in self._cloud.hosts.values()
                    if one.name == name)

    def known(self, _host: str, _service: str) -> bool:
        return True

    def mismatch(self, _host: str, _service: str) -> str:
        self._ask()
        return ''

    def is_on(self, host: str, _service: str) -> bool:
        self._ask()
        return self._host(host).on != self._happens('bmc lies')

    def _ask(self) -> None:
        self._take_time()
        if self._happens('bmc fails'):
            raise errors.PowerUnavailable('It does not answer.')

    def _take_time(self) -> None:
        self._baton.point('bmc')
        if self._happens('bmc hangs'):
            self._baton.let_pass(self._dice.uniform(*HANGS))

    def on(self, host: str, _service: str) -> None:
        self._do(host, (0, 2), self._go_on)

    def off(self, host: str, _service: str, force: bool) -> None:
        """Request a shutdown. A process is never suspended right before that:
        the documentation says what happens then.
        """
        soon = self._booked(self._host(host), self._baton.now + BOOT[1])
        if soon:
            self._cloud.wrong.append(
                f'{host} is switched off {soon} s before it is needed')
        self._do(host, (0, 2) if force else SHUTDOWN, self._go_off)

    def _do(self, host: str, seconds: tuple[int, int],
            what: ty.Callable[[clouds.Host], None]) -> None:
        if self._under_way.get(host, 0) > self._baton.now:
            self._cloud.wrong.append(f'{host} gets two commands at once')
        # If its process dies, a command is under way for as long as any.
        self._under_way[host] = self._baton.now + HANGS[1]
        if not self._happens('bmc lies'):
            self._baton.later(self._dice.uniform(*seconds),
                              lambda: what(self._host(host)))
        self._take_time()
        self._under_way[host] = self._baton.now
        if self._happens('bmc untold'):
            raise errors.PowerUnavailable('Its answer is lost.')

    def _go_on(self, host: clouds.Host) -> None:
        if not host.on:
            host.on, host.up_at = True, self._baton.now + self._dice.uniform(
                *(SLOW if self._happens('boot slow') else BOOT))
            self._cloud.version += 1
            self._baton.tell(f'{host.name} boots')

    def _go_off(self, host: clouds.Host) -> None:
        if not host.on:
            return
        for server in self._cloud.servers.values():
            if server.host is host and server.is_there and (
                    server.forced != host.uuid):
                self._cloud.wrong.append(
                    f'{host.name} goes off under {server.id}')
        host.on, host.silent_at = False, self._baton.now
        self._cloud.version += 1
        self.off_count += 1
        self._baton.tell(f'{host.name} is off')

    def _booked(self, host: clouds.Host, until: float) -> int | None:
        """Return in how many seconds a lease needs a host; None: not before
        an instant.
        """
        now = self._baton.now
        starts = [start for (start,) in self._world.look(
            f"SELECT start_date FROM bookings JOIN hosts ON hosts.id = "
            f"bookings.host_id WHERE uuid = '{host.uuid}' AND outage IS NULL "
            f"AND end_date > {int(now)}")]
        return next((int(start - now) for start in starts
                     if start < until), None)

    # -- nova-compute --------------------------------------------------------

    def services(self) -> dict[str, power_services.ComputeService]:
        self._world.port.call('services')
        return {host.name: self._service(host)
                for host in self._cloud.hosts.values()}

    def service(self, name: str) -> power_services.ComputeService:
        self._world.port.call('services')
        return self._service(self._host(name))

    def _service(self, host: clouds.Host) -> power_services.ComputeService:
        now = self._baton.now
        up = host.is_up(now)
        return power_services.ComputeService(
            up or now < host.silent_at + SILENT,
            int(now if up else host.silent_at), host.disabled,
            host.forced_down)

    def zone(self, _service: str) -> str:
        return 'nova'

    def excluded(self, *_host: ty.Any) -> str:
        return ''

    def is_common(self, *_host: ty.Any) -> bool:
        return False

    def disable(self, service: str) -> bool:
        self._world.port.call('disable')
        host = self._host(service)
        if not host.forced_down:
            host.disabled = True
        self._world.port.answer('disabled')
        return host.disabled and not host.forced_down

    def enable(self, service: str, _uuid: str) -> None:
        self._world.port.call('enable')
        self._host(service).disabled = False
        self._world.port.answer('enabled')

    def forget_disabled(self, _service: str, _uuid: str) -> None:
        self._world.port.call('forget')

    def occupied(self, uuid: str, _service: str) -> str:
        self._world.port.call('occupied')
        host = self._cloud.hosts[uuid]
        found = {server.id for server in self._cloud.servers.values()
                 if server.host is host and server.is_there}
        self._baton.point('occupied in placement')
        return ', '.join(sorted({*found, *host.allocations}))

    # -- what must hold ------------------------------------------------------

    def __call__(self) -> None:
        """Have each start checked when it is due."""
        for id, start in self._world.look(
                "SELECT bookings.id, bookings.start_date "
                "FROM bookings JOIN reservations ON reservations.id = "
                "bookings.reservation_id JOIN leases ON "
                "leases.id = reservations.lease_id JOIN hosts ON "
                "hosts.id = bookings.host_id WHERE enrollment = 'enrolled' "
                "AND leases.status = 'PENDING'"):
            # One from now on may wait for its host; clocks differ.
            ahead = start - self._baton.now
            if self._looks.get(id) == start or ahead <= self._faults.ahead:
                continue
            self._looks[id] = start
            self._baton.later(ahead + self._faults.ahead + 1, lambda id=id,
                              start=start: self._look(id, start))

    def _look(self, id: int, start: int) -> None:
        """Check that the host of a booking is on at its start."""
        rows = self._world.look(
            f"SELECT uuid, power_state FROM bookings JOIN hosts ON "
            f"hosts.id = bookings.host_id WHERE bookings.id = {id} AND "
            f"start_date = {start} AND NOT EXISTS (SELECT 1 FROM bookings "
            f"AS others WHERE others.host_id = hosts.id AND "
            f"others.outage IN ('failure', 'maintenance'))")
        for uuid, state in rows:
            host = self._cloud.hosts[uuid]
            if host.down or not host.there:
                continue
            if host.is_up(self._baton.now) and not host.disabled:
                self.on_time += 1
            elif self._faults.last < start - EXCUSED:
                self._cloud.wrong.append(
                    f'{host.name} is {state} when a lease starts there')

    def left(self) -> collections.abc.Iterator[str]:
        """Return what is wrong when nothing has failed for long."""
        for uuid, state, since in self._world.look(
                'SELECT uuid, power_state, power_at FROM hosts'):
            host = self._cloud.hosts[uuid]
            if (since or 0) > self._baton.now - EXCUSED or not host.there:
                continue
            if state is None and (host.disabled or not host.on):
                yield f'{host.name} is on, and cannot be used'
            if state in (states.Power.STOPPING, states.Power.BOOTING):
                yield f'{host.name} is still {state}'
