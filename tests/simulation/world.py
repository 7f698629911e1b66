# SPDX-License-Identifier: Apache-2.0

"""The processes of a cloud with leases.

API processes, schedulers and listeners run the real core, each with a database
connection and an index of its own.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sqlite3
import tempfile
import types
import typing as ty
from unittest import mock
import uuid

import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import booking_index
from blazar_core.capacity import eligibility
from blazar_core.capacity import feed
from blazar_core.capacity import inventory
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import models
from blazar_core.healing import evacuation
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import idempotency
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import server_growth
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import admission_queue
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import lost_builds
from blazar_core.lifecycle import orphans
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests import databases
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import database
from tests.simulation import faults
from tests.simulation import moving
from tests.simulation import owners
from tests.simulation import whole
from tests.unit import base

#: Seconds between two full syncs, and between two checks when nothing has
#: changed; until builds are lost; for which a start waits for its host.
COMPARISON, REST, LOST_AFTER, PATIENCE = 300, 43200, 120, 300
#: Seconds after which servers that cannot be kept are deleted.
END_LIMIT = 1800
#: Seconds after its start after which a notification says that a lease is
#: unused, and then until it is ended, where that is enabled.
NO_SHOWS = 600, 300
#: Seconds between two checks of which hosts are down, and for how long they
#: must be.
POLL, PATIENT = 90, host_status.Thresholds(failed=90, back=90, interval=7200)
#: The most servers that are migrated for one lease.
MOVES = 4
#: The limits of servers that are resized.
LIMITS = {'max_reserved_vcpus_per_project': 12, 'max_leases_per_project': -1,
          'max_held_servers_per_project': -1, 'max_lease_duration': -1,
          'max_lease_ahead': -1, 'max_host_spread': -1}
#: The longest duration, in seconds, of a lease with automatic extension.
LONGEST = 2 * 3600
#: Seconds after which waiting leases are tried again, although nothing has
#: changed.
AGAIN = 60
#: A folder in memory, if there is one.
MEMORY = '/dev/shm'
#: The most results of queries that are kept; most queries name a time or an
#: id.
MOST_LOOKS = 2000
_TABLES = tuple(models.Base.metadata.tables)


class Places(base.FakeType):
    """Servers that are booted after their reservation has started."""

    def __init__(self, world: 'World') -> None:
        super().__init__()
        self._world = world

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        self._world.port.call('demand')
        return dataclasses.replace(
            super().demand(reserved),
            among=model.HostPool(reserved.params['among']))

    def start(self, reserved: resource_types.ReservationContext) -> None:
        self._world.port.call('open')
        self._world.cloud.open[reserved.id] = reserved.project_id
        self._world.port.answer('opened')

    def transferred(self, reserved: resource_types.ReservationContext) -> None:
        self._world.port.call('transferred')
        if reserved.id in self._world.cloud.open:
            self._world.cloud.open[reserved.id] = reserved.project_id
        self._world.port.answer('transferred')

    def end(self, reserved: resource_types.ReservationContext) -> None:
        self._world.port.call('close')
        self._world.cloud.open.pop(reserved.id, None)
        self._world.port.answer('closed')

    def open_reservations(self) -> list[str]:
        self._world.port.call('opened')
        return [*self._world.cloud.open]


class Boots(resource_types.BaseResourceType):
    """Servers of a boot: the call says what they need."""

    for_servers = True

    def __init__(self, world: 'World') -> None:
        self._world = world

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        self._world.port.call('demand')
        call = json.loads(
            reserved.call or '{"amounts": {"VCPU": 1}, "servers": []}')
        return model.Demand(call['amounts'], among=self._world.among(
            len(call['servers'])))


class Pool:
    """The executor of the engine: each piece of work is a task."""

    def __init__(self, process: batons.Process) -> None:
        self._process = process
        self._numbers = itertools.count()

    def __enter__(self) -> 'Pool':
        return self

    def __exit__(self, *_exc: ty.Any) -> None:
        pass

    def submit(self, work: ty.Callable[..., None], *args: ty.Any) -> None:
        self._process.spawn(f'event{next(self._numbers)}',
                            lambda: work(*args))


class Core:
    """The objects of the core in a process."""

    def __init__(self, world: 'World', process: batons.Process) -> None:
        self.world = world
        self.process = process
        self.clock = batons.Clock(process)
        self.database = world.storage.connect(process)
        self.admission = admissions.Admission(
            self.database, self.clock,
            start_timeout=PATIENCE if world.switching else 0)
        self.leases = leases.Leases(
            self.database, self.clock, self.admission, world.types)
        conf = databases.configuration('')
        for name, value in LIMITS.items():
            conf.set_override(name, value, 'blazar_enforcement')
        self.limits = limits.Limits(conf, self.database, self.clock)
        after, notice = world.no_shows
        self.lifecycle = handlers.Handlers(
            databases.configuration(
                '', start_timeout=PATIENCE, end_timeout=END_LIMIT,
                no_show_time=after, no_show_notice=notice,
                best_effort_moves=MOVES),
            self.database, self.clock, self.admission, base.integration(
                world.port, world.types, {
                    end_policies.DELETE: end_policies.Delete(),
                    'recycle': end_policies.Recycle(),
                    end_policies.SHELVE: end_policies.Shelve(),
                    'snapshot': end_policies.Snapshot(),
                    'stop': end_policies.Stop(),
                    'release': end_policies.Release()},
                str, world.notified, world.grant), LOST_AFTER)


def call_of(servers: ty.Sequence[clouds.Server]) -> str:
    """Return the call that builds servers at the start."""
    return json.dumps({'servers': [one.id for one in servers],
                       'amounts': servers[0].amounts})


class Claiming(scheduler_claims.Claims):
    """Record which servers were admitted without the reservation database."""

    def __init__(self, cloud: clouds.Cloud, core: Core,
                 index: booking_index.Index) -> None:
        super().__init__(
            core.database, core.clock, index,
            growth=functools.partial(server_growth.check, core.limits))
        self._cloud = cloud
        self._of = ''
        #: True if the last query about a reservation was not answered.
        self.unsure = False

    def claim(self, server_id: str, *args: ty.Any, **kwargs: ty.Any,
              ) -> scheduler_claims.Undo:
        self._of = server_id
        return super().claim(server_id, *args, **kwargs)

    def is_within(self, reservation_id: str) -> bool:
        self._alone = self.unsure = False
        sure = super().is_within(reservation_id)
        self._alone = True
        # It is not, or the database does not answer.
        self.unsure = not sure and super().is_within(reservation_id)
        return sure or self.unsure

    def _claim_alone(self, takes: ty.Mapping[str, model.Resources],
                     forced: bool, reservation_id: str | None,
                     ) -> scheduler_claims.Undo:
        undo = super()._claim_alone(takes, forced, reservation_id)
        self._cloud.servers[self._of].unasked = True
        for host, amounts in takes.items():
            self._cloud.act_against(self._cloud.hosts[host], amounts)
        return undo


class World:
    """A cloud with leases, and all its processes.

    :param seed: decides everything
    :param only: the faults that may happen; None: all
    :param vcpus: of each host
    :param compares: whether the periodic sync runs; without faults it finds
        nothing
    :param pool: how many more hosts an operator enrolls
    :param relocates: whether servers are evacuated from unavailable hosts
    :param drifts: whether clocks drift
    :param switches: whether idle hosts of the pool are switched off
    :param serves: whether there are neutron, cinder and Heat
    :param evicts: whether there are interruptible servers
    :param lends: whether enrolled hosts are lent
    :ivar lent: how often a server got a host that is lent
    :ivar cleaning_time: seconds for which hosts are kept free after a lease,
        and before one where they are lent
    """

    def __init__(self, seed: int, only: ty.Collection[str] | None = None,
                 hosts: int = 3, apis: int = 2, listeners: int = 2,
                 vcpus: int = 8, compares: bool = True,
                 pool: int = 0, relocates: bool = False,
                 drifts: bool = False, switches: bool = False,
                 serves: bool = False, evicts: bool = False,
                 lends: bool = False) -> None:
        self.stack = contextlib.ExitStack()
        self.baton = batons.Baton(seed)
        self.faults = faults.Faults(self.baton, only, drifts)
        self.cloud = clouds.Cloud(self.baton, self.faults)
        self.cloud.lends, self.lent = lends, 0
        self.port = moving.Port(self.cloud)
        self.cleaning_time = (
            self.baton.dice.choice([0, 60, 600]) if pool else 0)
        self.types = resource_types.ResourceTypes(
            {new_leases.RESOURCE_TYPE: Places(self), whole.HOSTS: whole.Hosts(
                self.cloud, self.port, self._current, self.cleaning_time)},
            Boots(self))
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(
            dir=MEMORY if os.path.isdir(MEMORY) else None))
        self._compares = compares
        self.relocates = relocates
        self.keystone = owners.Keystone(self.baton, self.look)
        #: See :class:`blazar_core.lifecycle.no_show_check.NoShows`.
        self.no_shows = self.baton.dice.choice(
            [(0, 0), (0, 0), NO_SHOWS]) if pool else (0, 0)
        #: By lease and the end of its automatic extension: the end before.
        self.prolonged: dict[tuple[str, int], int] = {}
        #: By host: its state when a comparison has found no difference.
        self._compared: dict[str, tuple[ty.Any, ...]] = {}
        #: The next recheck of a host: when, and which one.
        self.due: tuple[int, str] | None = None
        #: Called with a server and a host, when a claim is undone because
        #: placement refused it.
        self.taken_back: ty.Callable[[clouds.Server, clouds.Host], None] = (
            lambda *_of: None)
        #: True if all consequences of faults are repaired.
        self.settled = False
        #: The number of images that were due before an end and created.
        self.copied = 0
        #: By recurrence: its windows, and the servers that are kept.
        self.recurring: dict[str, tuple[
            list[model.Window], tuple[str, ...]]] = {}
        #: Called after each commit, and for each event of a lease.
        self.checks: list[ty.Callable[[], None]] = []
        self.hearing: list[ty.Callable[[str, dict[str, ty.Any]], None]] = []
        self.storage = database.Storage(
            self.baton, folder, self.faults.database, self._committed)
        #: By query: the tables that it names, how often they had been written,
        #: and the result.
        self._looked: dict[str, tuple[
            tuple[str, ...], int, list[ty.Any]]] = {}
        self._looking = self.stack.enter_context(
            contextlib.closing(sqlite3.connect(self.storage.path)))
        self._patch()
        self.switching = None
        if switches:
            # It needs Nova, which takes its time.
            from tests.simulation import switching
            self.switching = switching.Machines(self)
        self.services = None
        if serves:
            from tests.simulation import services
            self.services = services.Services(self)
        self.evicting = None
        if evicts:
            from tests.simulation import evicting
            self.evicting = evicting.Evicting(self)
        self.cores: dict[str, Core] = {}
        for number in range(hosts):
            self.cloud.add_host(f'host{number}', {'VCPU': vcpus})
        self.pool = [
            self.cloud.add_host(f'host{hosts + number}', {'VCPU': vcpus})
            for number in range(pool)]
        for number in range(2):
            self.process(f'scheduler{number}', self._schedule)
        for number in range(listeners):
            self.process(f'listener{number}', self._listen)
        self.apis = [f'api{number}' for number in range(apis)]

    def _patch(self) -> None:
        """Replace time, locks and randomness by those of the simulation."""
        baton, patch = self.baton, self.stack.enter_context
        lock = types.SimpleNamespace(
            Lock=lambda: batons.Lock(baton),
            get_ident=lambda: id(baton.current))
        patch(mock.patch('blazar_core.capacity.booking_index.threading', lock))
        patch(mock.patch('blazar_core.db.circuit_breaker.threading', lock))
        patch(mock.patch('blazar_core.lifecycle.event_queue.threading', lock))
        patch(mock.patch('oslo_db.api.time', types.SimpleNamespace(
            sleep=baton.let_pass)))
        patch(mock.patch('oslo_db.api.random', baton.dice))
        patch(mock.patch('blazar_core.lifecycle.fault_points.fault_point',
                         lambda step, _what: baton.point(
                             f'step {step.name}')))
        # It yields to other threads, and there are none.
        patch(mock.patch('oslo_db.sqlalchemy.engines._thread_yield',
                         lambda *_of: None))
        patch(mock.patch('uuid.uuid4', lambda: uuid.UUID(
            int=baton.dice.getrandbits(128), version=4)))
        patch(mock.patch.object(
            engine.futures, 'ThreadPoolExecutor',
            lambda _workers, thread_name_prefix: Pool(self._current())))

    def _current(self) -> batons.Process:
        assert self.baton.current is not None
        return self.baton.current.process

    def _committed(self) -> None:
        self.due = min(
            ((when, uuid) for when, uuid in self.look(
                'SELECT recheck_at, uuid FROM hosts '
                "WHERE recheck_at IS NOT NULL AND pool = 'compute'")
             if self.cloud.hosts[uuid].there), default=None)
        for core in self.cores.values() if self.due is not None else ():
            self.baton.alarm(core.process.when(self.due[0]))
        for check in self.checks:
            check()

    def process(self, name: str, work: ty.Callable[[Core], None],
                ) -> batons.Process:
        """Start a process; its work begins anew at each start."""
        def boot(process: batons.Process) -> None:
            process.offset = self.faults.offset()
            self.faults.drift(process)
            self.cores[name] = core = Core(self, process)
            work(core)

        return batons.Process(self.baton, name, boot)

    def notified(self, event_type: str, lease: dict[str, ty.Any]) -> None:
        for hear in self.hearing if event_type.startswith('lease.') else ():
            hear(event_type, lease)
        self.baton.tell(f'{event_type}: {lease["id"][:8]}')
        # Wakes the process that carries out events.
        self.cloud.notify('', None)

    def among(self, count: int) -> model.HostPool:
        """Return the hosts that so many servers of a boot may be booked on.
        """
        return model.HostPool.ALL if self.cloud.lends and count == 1 else (
            model.HostPool.COMMON)

    def version(self) -> int:
        """Return how often the database or the cloud has changed."""
        return self.storage.version + self.cloud.version

    def is_moving(self) -> bool:
        """Return whether anything changes as time passes."""
        return self.cloud.is_moving() or bool(self.look(
            "SELECT 1 FROM leases WHERE status IN ("
            "'STARTING', 'TERMINATING', 'IN_PROGRESS') LIMIT 1")) or bool(
                self.no_shows[0] and self.look(
                    "SELECT 1 FROM leases WHERE status = 'ACTIVE' "
                    "AND used_at IS NULL LIMIT 1"))

    def grant(self, lease: views.Lease,
              change: updates.LeaseChange) -> None:
        """Limit automatic extensions.

        :raises LimitExceeded: if the lease would be too long
        """
        assert change.end is not None
        if change.end - lease['start_date'] > LONGEST:
            raise errors.LimitExceeded('it is long enough')
        self.prolonged[lease['id'], change.end] = lease['end_date']

    def look(self, query: str) -> list[ty.Any]:
        """Return the result of a query without a point, in a list of its own.

        Results are kept until there is a commit in a table that the query
        names. Only :func:`blazar_core.db.api.lock` does not count as a change:
        no query reads the generation of a lease.
        """
        names, seen, rows = self._looked.get(query) or (
            tuple(one for one in _TABLES if one in query), -1, [])
        versions = self.storage.versions
        now = sum([versions[one] for one in names])
        if now != seen:
            rows = self._looking.execute(query).fetchall()
            if len(self._looked) > MOST_LOOKS:
                self._looked.clear()
            self._looked[query] = names, now, rows
        return [*rows]

    def close(self) -> None:
        self.baton.close()
        self.stack.close()

    # -- schedulers --------------------------------------------------------

    def _schedule(self, core: Core) -> None:
        index = core.admission.index if not self.cloud.lends else (
            booking_index.Index(core.database, core.clock, lends=True))
        eligible_hosts = eligibility.Eligibility(
            core.database, core.clock, index)
        claiming = Claiming(self.cloud, core, index)

        def loop() -> None:
            questions = self.cloud.questions
            while True:
                self.baton.wait(lambda: bool(questions) and any(
                    not one.taken for one in questions), 1e6)
                for one in questions:
                    if not one.taken:
                        one.taken = True
                        with contextlib.suppress(errors.DatabaseUnavailable,
                                                 errors.ConcurrentUpdate):
                            one.host = self._select(one, eligible_hosts,
                                                    claiming)
                        one.answered = True
                        break

        core.process.spawn('requests', loop)

    def _select(self, question: clouds.Request,
                eligible_hosts: eligibility.Eligibility,
                claiming: Claiming) -> clouds.Host | None:
        """Choose a host, or one that is lent if there is no other."""
        host = self._choose(question, eligible_hosts, claiming)
        if host is None and self.cloud.lends and question.may_be_lent and (
                eligible_hosts.may_be_lent([question.server.id])):
            host = self._choose(question, eligible_hosts, claiming, True)
            self.lent += host is not None
        return host

    def _choose(self, question: clouds.Request,
                eligible_hosts: eligibility.Eligibility,
                claiming: Claiming, lent: bool = False) -> clouds.Host | None:
        server = question.server
        hosts = [host for host in self.cloud.hosts.values()
                 if question.admits(host, lent)]
        # Forcing a host is only for the first build.
        forced = server.forced is not None and not server.launched
        if not hosts:
            return None
        found = eligible_hosts.for_server(
            server.id, question.amounts, [host.uuid for host in hosts],
            server.within or server.reservation)
        self.baton.dice.shuffle(hosts)
        hosts.sort(key=lambda host: host.uuid != found.booked)
        for host in hosts:
            if found.by_host.get(host.uuid, found.elsewhere) < 1 and (
                    not forced):
                continue
            if forced:
                self.cloud.act_against(host, server.amounts)
            known = self.knows(server, host)
            try:
                undo = claiming.claim(
                    server.id, {host.uuid: question.amounts},
                    forced=forced,
                    reservation_id=server.within)
            except scheduler_claims.Denied as exc:
                self.baton.tell(f'{server.id} not on {host.name}: {exc}')
                continue
            self.baton.point('placement')
            if self.faults.happens('placement slow'):
                self.baton.let_pass(self.faults.pause('placement'))
            if host.fits(question.amounts) and question.is_wanted:
                host.allocations[server.id] = dict(question.amounts)
                return host if self._is_within(server, claiming) else None
            undo()
            # If the database did not answer, the claim may be recorded all the
            # same until the host is read again.
            if not known and not server.unasked:
                self.taken_back(server, host)
        return None

    def knows(self, server: clouds.Server, host: clouds.Host) -> bool:
        """Return whether a server is recorded or claimed on a host."""
        return bool(self.look(
            f"SELECT 1 FROM hosts WHERE uuid = '{host.uuid}' AND ("
            f"consumers LIKE '%{server.id}%' OR EXISTS ("
            f"SELECT 1 FROM bookings WHERE server_id = '{server.id}' AND "
            f"host_id = hosts.id AND claimed_at IS NOT NULL))"))

    def _is_within(self, server: clouds.Server, claiming: Claiming) -> bool:
        """Return whether a server may stay on the host just claimed for it."""
        if server.within is None:
            return True
        self.baton.point('placed')
        stays = claiming.is_within(server.within)
        server.unasked |= claiming.unsure
        if not stays:
            self.baton.tell(f'{server.id} came too late')
            self.cloud.free(server)
        return stays

    # -- listeners ---------------------------------------------------------

    def _listen(self, core: Core) -> None:
        conf = databases.configuration(
            self.storage.url, max_sleep=REST)
        working = engine.Engine(conf, core.database, core.clock,
                                core.lifecycle, f'{core.process.name}.'
                                f'{core.process.lives}')
        # A worker renews the claims of its events, or others take them.
        core.clock.version = lambda: self.storage.versions['events']
        core.clock.is_idle = lambda: not self.look(
            "SELECT 1 FROM events WHERE status = 'IN_PROGRESS' LIMIT 1")
        watching = overbooking.OverbookingCheck(
            core.database, core.clock, core.admission,
            core.leases.reassignment,
            demands.Demands(core.clock, str, self.types), self.notified,
            PATIENCE)
        core.process.spawn('engine', working.run)
        core.process.spawn('watch', lambda: self._watch(watching))
        core.process.spawn('retrying', lambda: self._retry(core))
        core.process.spawn('monitors', lambda: self._monitor(core))
        core.process.spawn('slots', lambda: self._send_left(core))
        if self.switching:
            core.process.spawn('power', functools.partial(
                self.switching.run, core))
        if self.services:
            core.process.spawn('pools', functools.partial(
                self.services.sync, core))
        if self.evicting:
            core.process.spawn('evictions', functools.partial(
                self.evicting.run, core))
        if self.relocates:
            core.process.spawn('relocating', lambda: self._relocate(core))
        if self.keystone.knows:
            core.process.spawn('orphans', functools.partial(
                self.keystone.ask, orphans.Orphans(
                    core.database, core.clock, self.keystone,
                    core.lifecycle.lease_end.delete, True, owners.GRACE),
                working.wake))
        if self._compares:
            core.process.spawn('mirror', lambda: self._mirror(core, working))
        core.process.spawn('hints', lambda: self._hints(core, working))

    def _watch(self, watching: overbooking.OverbookingCheck) -> None:
        """Run the overbooking check after changes."""
        while True:
            seen = self._promises()
            with contextlib.suppress(errors.DatabaseUnavailable,
                                     errors.ConcurrentUpdate):
                watching.look()
            self.baton.let_pass(overbooking.PAUSE)
            self.baton.wait(
                lambda: self._promises() != seen,
                # A maintenance ends as time passes, which is checked at rest.
                POLL if self.look(
                    "SELECT 1 FROM outages WHERE kind = 'maintenance' LIMIT 1")
                else REST)

    def _send_left(self, core: Core) -> None:
        """Send the builds of slots whose requests died."""
        left = lost_builds.UnsentSlotBuilds(
            core.database, core.clock, core.leases.slots,
            self.port.send_slots, str)
        while True:
            self.baton.wait(lambda: bool(self.look(
                'SELECT 1 FROM slot_builds LIMIT 1')), REST)
            self.baton.let_pass(lost_builds.PAUSE)
            with contextlib.suppress(errors.DatabaseUnavailable):
                left.send()

    def _monitor(self, core: Core) -> None:
        """Update periodically which hosts are down."""
        knows = host_status.HostStatus(core.database, core.clock, PATIENT,
                                       self.notified)
        while True:
            with contextlib.suppress(errors.DatabaseUnavailable):
                knows.update({host.uuid: host_status.Down(
                    'It is silent.', host.forced_down)
                    if not host.is_up(self.baton.now) else None
                    for host in self.cloud.hosts.values() if host.there})
            self.baton.let_pass(POLL)
            if not self.look(
                    "SELECT 1 FROM outages WHERE kind = 'failure' LIMIT 1"):
                # Checking without finding anything takes long to simulate.
                self.baton.wait(lambda: any(
                    host.down or not host.on or self.baton.now < host.up_at
                    for host in self.cloud.hosts.values()), REST)

    def _relocate(self, core: Core) -> None:
        """Evacuate or drain unavailable hosts."""
        leaving = evacuation.Evacuation(
            core.database, core.clock, core.admission, self.port,
            PATIENT.interval, self.types)
        while True:
            seen = self._promises()
            with contextlib.suppress(errors.DatabaseUnavailable):
                leaving.look(lambda failed: {
                    uuid for uuid in failed
                    if self.cloud.hosts[uuid].forced_down})
            self.baton.let_pass(evacuation.PAUSE)
            self.baton.wait(
                lambda: self._promises() != seen, 2 * AGAIN if self.look(
                    "SELECT 1 FROM outages UNION SELECT 1 FROM server_moves "
                    "WHERE reason <> 'best_effort' AND status IN "
                    "('planned', 'requested', 'accepted')") else REST)

    def _retry(self, core: Core) -> None:
        """Admit waiting leases after changes."""
        while True:
            seen = self._promises()
            with contextlib.suppress(errors.DatabaseUnavailable):
                core.lifecycle.admission_queue.look()
            self.baton.let_pass(admission_queue.PAUSE)
            self.baton.wait(lambda: self._promises() != seen, AGAIN if (
                self.look("SELECT 1 FROM leases WHERE status = 'WAITING' "
                          "LIMIT 1")) else REST)

    def _promises(self) -> int:
        """Return how often anything has changed that admissions depend on."""
        versions = self.storage.versions
        return versions['hosts'] + versions['bookings'] + versions['leases']

    def _mirror(self, core: Core, working: engine.Engine) -> None:
        """Run the periodic sync."""
        while True:
            with contextlib.suppress(errors.DatabaseUnavailable):
                for part in (lambda: self.compare(core, working),
                             core.lifecycle.reconciliation.settle_left,
                             core.lifecycle.lost_builds.send,
                             core.lifecycle.lease_close.revoke_over,
                             core.lifecycle.lease_close.close_left,
                             core.lifecycle.no_shows.look):
                    self._apart(part)
            working.wake()
            seen, fail = self.version(), self.faults.on
            self.baton.let_pass(COMPARISON)
            if not self.is_moving():
                # Comparing what has not changed takes long to simulate. When
                # nothing fails any longer, clocks are right again.
                self.baton.wait(lambda: self.version() != seen or (
                    self.faults.on != fail), REST)

    def compare(self, core: Core, working: engine.Engine) -> None:
        """Compare every host and server with the reservation database."""
        for host in list(self.cloud.hosts.values()):
            if host.there:
                self._apart(self._compare_changed, core, host)
        if not all(host.there for host in self.cloud.hosts.values()):
            core.database.retried(self._retain, core)
        recorded = core.lifecycle.reconciliation.unfinished()
        self.port.call('list')
        nova = {server_id: self.port.seen(server_id) for server_id in recorded}
        for server_id, seen in nova.items():
            if seen != recorded[server_id]:
                self._apart(self.compare_server, core, working, server_id)
        self._apart(self._delete_orphans, core)
        if len(self.look(
                f'SELECT 1 FROM changes WHERE created_at < '
                f'{core.clock.now() - booking_index.KEEP} LIMIT 2')) > 1:
            feed.trim(core.database, core.clock.now() - booking_index.KEEP)
            core.database.retried(
                idempotency.trim, core.database, core.clock.now())

    def _apart(self, work: ty.Callable[..., ty.Any], *args: ty.Any) -> None:
        with contextlib.suppress(errors.CloudUnavailable,
                                 errors.ConcurrentUpdate):
            work(*args)

    def compare_host(self, core: Core, host: clouds.Host) -> None:
        core.database.retried(self._report, core, host)

    def _compare_changed(self, core: Core, host: clouds.Host) -> None:
        """Compare a host unless its state is known to have no difference."""
        before = self._state_of(host)
        if self._compared.get(host.uuid) != before:
            self.compare_host(core, host)
            if before == self._state_of(host):
                self._compared[host.uuid] = before

    def _state_of(self, host: clouds.Host) -> tuple[ty.Any, ...]:
        """Return everything that the comparison of a host depends on."""
        rows = self.look(
            f"SELECT id, generation, capacity, usage, consumers, recheck_at, "
            f"assigned_to FROM hosts WHERE uuid = '{host.uuid}'")
        for row in rows:
            if row[5] is not None:
                # Its usage changes as time passes.
                rows.append(self.baton.now)
            rows += self.look(f'SELECT * FROM bookings WHERE '
                              f'host_id = {row[0]} OR migrating_to = {row[0]}')
            break
        return (rows, dict(host.capacity), {
            one: dict(takes) for one, takes in host.allocations.items()},
            self.storage.versions['reservations'])

    def _report(self, core: Core, host: clouds.Host) -> None:
        with core.database.connection() as connection:
            now, seen = core.clock.now(), inventory.generations(
                connection, [host.uuid]).get(host.uuid)
        self.port.call('facts')
        facts = model.HostFacts(host.uuid, host.name, host.name,
                                dict(host.capacity))
        allocations = {self.port.migrations.get(one, one): dict(takes)
                       for one, takes in host.allocations.items()}
        with core.database.writer() as session:
            inventory.record_host(session, now, facts, allocations, seen)

    def _retain(self, core: Core) -> None:
        with core.database.writer() as session:
            inventory.retain(session, [
                host.uuid for host in self.cloud.hosts.values()
                if host.there], core.clock.now())

    def compare_server(self, core: Core, working: engine.Engine,
                       server_id: str) -> None:
        booked = core.leases.lookup.booked(server_id)
        if booked is None:
            return
        seen, stale = core.lifecycle.reconciliation.check(server_id)
        for name in stale:
            self._look_at(core, name)
        if seen.state is cloud_api.ServerState.GONE:
            working.trigger(booked.lease_id, booked.host_id)

    def _look_at(self, core: Core, name: str) -> None:
        for host in self.cloud.hosts.values():
            if name in (host.name, host.uuid) and host.there:
                self.compare_host(core, host)

    def _delete_orphans(self, core: Core) -> None:
        """Delete reserved servers without a lease."""
        for server in list(self.cloud.servers.values()):
            if server.state is clouds.State.HELD and (
                    server.since < self.baton.now - 600) and not self.look(
                    f"SELECT 1 FROM bookings "
                    f"WHERE server_id = '{server.id}'") and (
                    not core.leases.lookup.is_leased(server.id)):
                self.baton.tell(f'{server.id} has no lease')
                self.port.delete(server.id, None)

    def _hints(self, core: Core, working: engine.Engine) -> None:
        """Process notifications, and read hosts with a due recheck."""
        while True:
            self.baton.wait(lambda: self.cloud.has_notification() or (
                self._is_due(core)), REST)
            try:
                while one := self.cloud.next_notification():
                    if one[0]:
                        self._apart(
                            self.compare_server, core, working, one[0])
                    if one[1] is not None:
                        self._apart(self._look_at, core, one[1])
                    working.wake()
                if self._is_due(core):
                    self._recheck(core)
                    self.baton.let_pass(1)
            except errors.DatabaseUnavailable:
                self.baton.let_pass(1)

    def _is_due(self, core: Core) -> bool:
        """Return whether the recheck of a host is due."""
        return self.due is not None and self.due[0] <= core.clock.now()

    def _recheck(self, core: Core) -> None:
        """Read the hosts whose recheck is due."""
        with core.database.reader() as session:
            hosts = session.scalars(sa.select(models.Host.service_host).where(
                models.Host.recheck_at <= core.clock.now())).all()
        for host in hosts:
            self._apart(self._look_at, core, host)
