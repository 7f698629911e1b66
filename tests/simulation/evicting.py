# SPDX-License-Identifier: Apache-2.0

"""Interruptible servers: their users, their evictions, and what must hold."""

import contextlib
import datetime
import functools
import random
import types
import typing as ty
from unittest import mock

from blazar_core.capacity import interruptible
from blazar_core.common import background
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import leader_election
from blazar_core.lifecycle import eviction
from blazar_core.lifecycle import resumption
from tests.simulation import cloud as clouds
from tests.simulation import owners
from tests.simulation import world as worlds

#: Seconds: the notice, the time of an eviction, for which a server has to be
#: safe where it is resumed, and after which a leader counts as dead.
NOTICE, EVICTION, SAFE_FOR, TIMEOUT = 120, 300, 600, 60
#: The actions that evict a server, in the operator's order.
ACTIONS = ('migrate', 'shelve', 'delete')
#: Seconds after its start for which a reservation may lack capacity that
#: interruptible servers have, and for how long that is excused after a fault
#: or after the cloud has taken capacity itself.
LATE, EXCUSED = 60, 600
#: Seconds for which users boot servers, before they pause.
BURST = 1800
_FAILED = (errors.DatabaseUnavailable, errors.ConcurrentUpdate)


class Evicting:
    """The interruptible servers of a world.

    It has dice of its own.

    :ivar evicted: how many servers were evicted, by action
    :ivar pause: seconds between two looks of a listener
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._baton = world.baton
        self._dice = random.Random(f'interruptible {world.baton.seed}')
        #: By server: when a notification was sent, and the time that it says.
        self._told: dict[str, list[tuple[float, int]]] = {}
        #: By host: since when reservations lack capacity.
        self._lacks: dict[str, float] = {}
        self._numbers = 0
        self.evicted: dict[str, int] = {}
        self.pause = eviction.PAUSE
        # Without threads, it does the work at once.
        world.stack.enter_context(mock.patch.object(
            eviction, 'background', types.SimpleNamespace(
                Background=functools.partial(background.Background, 0))))
        world.checks.append(self._check_starts)
        world.port.evicting = self._check_notice

    # -- processes ---------------------------------------------------------

    def run(self, core: worlds.Core) -> None:
        """Plan and carry out evictions, as a listener does."""
        self._numbers += 1
        leader = leader_election.Leader(
            core.database, core.clock, eviction.LEADER,
            f'{core.process.name}.{self._numbers}', eviction.PAUSE, TIMEOUT)
        evictions = eviction.Evictions(
            core.database, core.clock, self._world.port, self._hear,
            lambda _id: None, ACTIONS, resumption.Resumption(
                core.database, core.clock, self._world.port, core.admission,
                lambda _id: None, SAFE_FOR))
        while True:
            with contextlib.suppress(*_FAILED):
                leader.lead(evictions.look)
            self._baton.let_pass(self.pause)
            self._baton.wait(lambda: bool(self._world.look(
                'SELECT 1 FROM interruptible_servers LIMIT 1')), worlds.REST)

    def ask(self, core: worlds.Core, until: float) -> None:
        """Boot interruptible servers now and then, and delete them later."""
        pause = (until - self._baton.now) / 3
        while self._baton.now < until:
            end = min(until, self._baton.now + BURST)
            while self._baton.now < end:
                self._baton.let_pass(self._dice.expovariate(1 / 120))
                self._boot(core)
            self._baton.let_pass(self._dice.uniform(0, pause))

    def _boot(self, core: worlds.Core) -> None:
        server = self._world.cloud.new_server(
            self._dice.choice(owners.PROJECTS),
            {'VCPU': self._dice.choice([1, 1, 2, 4])},
            clouds.State.READY, interruptible=True)
        self._world.cloud.leave(
            server, min(5400, self._dice.expovariate(1 / 3600)))
        self.boot(core, server, safe_for=self._dice.choice([0, 0, 600]),
                  on_evict=self._dice.choice(ACTIONS[1:]),
                  resume=self._dice.random() < 0.5)

    def boot(self, core: worlds.Core, server: clouds.Server,
             **wanted: ty.Any) -> None:
        """Boot an interruptible server.

        :param wanted: what its user wants
        """
        with contextlib.suppress(*_FAILED):
            core.database.retried(self._register, core, server, wanted)
            self._world.cloud.cast([server.id])

    def _register(self, core: worlds.Core, server: clouds.Server,
                  wanted: ty.Mapping[str, ty.Any]) -> None:
        now = core.clock.now()
        with core.database.begin() as connection:
            interruptible.register(connection, [{
                'server_id': server.id, 'project_id': server.project,
                'user_id': 'user', 'lead_time': NOTICE + EVICTION,
                'notice': NOTICE, 'credential_id': None,
                'cleaning_time': self._world.cleaning_time, 'safe_until': 0,
                'created_at': now, 'checked_at': now, **wanted}])

    def _hear(self, event_type: str, payload: dict[str, ty.Any]) -> None:
        server_id = payload['server_id']
        kind = event_type.rpartition('.')[2]
        self._baton.tell(f'{server_id}: {kind} '
                         f'{payload.get("evict_at", "")}')
        if kind == 'evict_scheduled':
            self._told.setdefault(server_id, []).append((
                self._baton.now, _seconds(payload['evict_at'])))

    # -- what must hold ----------------------------------------------------

    def _check_notice(self, server: clouds.Server, what: str) -> None:
        """Check that an eviction was announced, and does not come before that
        time or an instant that was shown.
        """
        self.evicted[what] = self.evicted.get(what, 0) + 1
        now, ahead = self._baton.now, self._world.faults.ahead + 1
        told = self._told.get(server.id, [])
        if not told:
            self._wrong(f'{server.id} is evicted, and was not told')
            return
        if now < min(time for _at, time in told) - ahead:
            self._wrong(f'{server.id} is evicted earlier than it was told')
        if self._is_excused(server.host):
            return
        if now < told[0][0] + NOTICE - ahead:
            self._wrong(f'{server.id} is evicted {now - told[0][0]:.0f} s '
                        f'after it was told')
        for safe_until, in self._world.look(
                f"SELECT safe_until FROM interruptible_servers "
                f"WHERE server_id = '{server.id}'"):
            if safe_until is None or safe_until > now + ahead:
                self._wrong(f'{server.id} is evicted, and shown as safe until '
                            f'{safe_until}')

    def _check_starts(self) -> None:
        """Check that no reservation lacks what interruptible servers have."""
        now = int(self._baton.now)
        for host in self._world.cloud.hosts.values():
            mine = sum(
                takes['VCPU'] for one, takes in host.allocations.items()
                if self._is_interruptible(one))
            reserved = mine and self._reserved(host, now)
            if not reserved or host.capacity['VCPU'] >= reserved + sum(
                    takes['VCPU'] for takes in host.allocations.values()) or (
                    self._is_excused(host)):
                self._lacks.pop(host.uuid, None)
            elif now > self._lacks.setdefault(host.uuid, now) + LATE:
                self._wrong(
                    f'{host.name}: interruptible servers have {mine} VCPU, '
                    f'and reservations that have started lack {reserved}')

    def _reserved(self, host: clouds.Host, now: int) -> int:
        """Return the VCPUs of reservations that have started, and of which no
        server is on its host yet; on an enrolled host so much earlier as it
        takes to clean it.
        """
        return sum(
            amount for amount, server_id in self._world.look(
                f"SELECT json_extract(bookings.resources, '$.VCPU'), "
                f"bookings.server_id FROM bookings "
                f"JOIN hosts ON hosts.id = bookings.host_id "
                f"JOIN reservations "
                f"ON reservations.id = bookings.reservation_id "
                f"JOIN leases ON leases.id = reservations.lease_id "
                f"WHERE hosts.uuid = '{host.uuid}' "
                f"AND leases.status IN ('PENDING', 'STARTING', 'ACTIVE') "
                f"AND bookings.start_date <= {now} + CASE hosts.enrollment "
                f"WHEN '{states.Enrollment.ENROLLED}' "
                f"THEN {self._world.cleaning_time} ELSE 0 END "
                f"AND bookings.end_date > {now}")
            if server_id not in host.allocations)

    def _is_interruptible(self, consumer: str) -> bool:
        server = self._world.cloud.servers.get(
            self._world.port.migrations.get(consumer, consumer))
        return server is not None and server.interruptible

    def _is_excused(self, host: clouds.Host | None) -> bool:
        """Return whether a fault, or the cloud, may have taken the time."""
        if host is None or host.down:
            return True
        taken, _amount = self._world.cloud.against.get(host.uuid, (0, 0))
        return self._baton.now < EXCUSED + max(
            taken, self._world.faults.last)

    def _wrong(self, what: str) -> None:
        self._world.cloud.wrong.append(what)

    def left(self) -> ty.Iterator[str]:
        """Return what is left when all servers have gone. Whether one exists
        is checked each 15 minutes.
        """
        for server_id, in self._world.look(
                f'SELECT server_id FROM interruptible_servers '
                f'WHERE checked_at < {int(self._baton.now) - 1800}'):
            yield f'{server_id} is still recorded as interruptible'
        for uuid, servers in self._world.look(
                'SELECT uuid, interruptible FROM hosts '
                'WHERE interruptible IS NOT NULL'):
            # Hosts that no longer exist keep what was there.
            if self._world.cloud.hosts[uuid].there:
                yield f'{uuid} still has interruptible servers: {servers}'


def _seconds(text: str) -> int:
    return int(datetime.datetime.fromisoformat(text).replace(
        tzinfo=datetime.UTC).timestamp())
