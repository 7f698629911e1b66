# SPDX-License-Identifier: Apache-2.0

"""Invariants that hold at any time, and those that hold at the end."""

import collections
import contextlib
import functools
import json
import types
import typing as ty

import sqlalchemy as sa

from blazar_core.audit import audit
from blazar_core.capacity import admissions
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from tests import databases
from tests.races import contender
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import held
from tests.simulation import host_outages
from tests.simulation import promised
from tests.simulation import world as worlds

#: The most seconds that builds and deletions take, and what waits for them.
LATE = 180
#: The same where a start may wait until its hosts are free.
WAITING = LATE + worlds.PATIENCE
#: The same for what the periodic sync must find.
LEFT = LATE + 2 * worlds.COMPARISON
#: Seconds within which a host with a due recheck is read again, and for how
#: long this is excused after a fault.
LOOKED, EXCUSED = 60, 600
#: Seconds within which the builds of servers with slots are sent.
SENT = 30


#: A few texts occur in many rows; the results are not changed.
_read = functools.lru_cache(4096)(json.loads)


class Broken(AssertionError):
    """An invariant does not hold."""


class Always:
    """Checks after each commit, on a connection that is not a point."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._excused = world.cloud.against
        self._held = held.Held(world)
        self._promised = promised.Promised(world)
        self._outages = host_outages.HostOutages(world)
        #: By id: the worker of each event and the end of its claim at the last
        #: commit.
        self._at: dict[str, tuple[str, int]] = {}
        #: The first host with a due recheck then, and when it was due.
        self._due: tuple[int, str] | None = None
        #: The same for waiting leases, in the order in which they were seen,
        #: and for the ends of leases with automatic extension.
        self._waiting: dict[str, tuple[str, int, int]] = {}
        self._ends: dict[str, int] = {}
        #: Servers with slots whose builds were not sent, and since when.
        self._slots: dict[str, int] = {}
        #: Leases that were ended as unused, and those that were deleted.
        self._unused: set[str] = set()
        self._deleted: set[str] = set()
        world.port.ending = self.nothing_ends_before_its_time
        world.taken_back = self.what_is_refused_counts_no_more
        world.checks.append(self)
        world.hearing.append(self.leases_start_at_their_time)
        world.hearing.append(self.each_server_has_one_image)

    def __call__(self) -> None:
        try:
            self.no_build_is_done_twice()
            self.no_host_is_promised_twice()
            self.nobody_has_what_is_of_another()
            self.no_event_is_taken_from_who_has_it()
            self.hosts_are_looked_at_soon()
            self.builds_of_slots_are_sent_soon()
            self.who_waits_longest_is_first()
            self.nobody_is_prolonged_from_another_end()
            self.nothing_that_is_used_ends_as_unused()
            self.only_what_has_no_owner_is_ended()
            for one in (*self._held.wrong(), *self._promised.wrong(),
                        *self._outages.wrong()):
                raise Broken(one)
        except Broken as exc:
            self._fail(exc)

    def _fail(self, exc: Broken) -> None:
        # It is not raised: the running task could take it for an error of its
        # own.
        self._world.baton.failure = self._world.baton.failure or exc

    def leases_start_at_their_time(self, event_type: str,
                                   lease: dict[str, ty.Any]) -> None:
        """Check that a lease starts at its time, by the clock of the process.

        Without faults it does not start much later.
        """
        if event_type != 'lease.event.start_lease':
            return
        late = self._world.baton.now - lease['start_date']
        if late < -self._ahead or self._world.settled and late > (
                WAITING if self._world.pool else LATE) and not (
                lease['status_reason'] or lease['id'] in self._held.waited):
            self._fail(Broken(
                f'lease {lease["id"][:8]} started {late:.0f} s after its '
                f'time'))

    def each_server_has_one_image(self, event_type: str,
                                  lease: dict[str, ty.Any]) -> None:
        """Check the images of an event.

        When the notification of the event is sent, there is one image of each
        server of the lease that was running at its time and still is.
        """
        own = {one['id'] for one in lease['reservations']}
        booked = {id for one in lease['reservations'] for id in one['servers']}
        for event in lease['events']:
            if event['action'] != states.Action.SNAPSHOT or event_type != (
                    f'lease.event.{event["event_type"]}') or (
                    event['status'] != states.Event.IN_PROGRESS) or (
                    event['time'] >= lease['end_date']):
                # Servers may change when the lease ends; images of an earlier
                # event may be reused.
                continue
            key = f'{event["id"]}@{event["time"]}'
            for server in self._world.cloud.servers.values():
                is_hosted = server.host is not None and (
                    server.within in own & server.host.opened)
                if (server.id in booked or is_hosted) and (
                        server.state is clouds.State.RUNNING and
                        not server.soft_deleted and
                        server.rest is not cloud_api.RestingState.SHELVED and
                        server.ran_at is not None and
                        server.ran_at < event['time'] - self._ahead):
                    self._world.copied += 1
                    if server.images[key] != 1:
                        self._fail(Broken(
                            f'{server.id} has {server.images[key]} images of '
                            f'{event["event_type"]} of lease '
                            f'{lease["id"][:8]}'))

    def nothing_ends_before_its_time(self, server_id: str) -> None:
        """Check a deletion of a server for its lease.

        A server is not deleted before its lease and the grace period end, or
        if it may stay, or before its image is created, unless the lease was
        deleted. No image is needed of a server that ran only after the end, or
        that its user has deleted.
        """
        server = self._world.cloud.servers[server_id]
        self._promised.what_is_kept_is_not_deleted(server)
        for lease_id, end, grace, on_end, deleted in self._world.look(
                'SELECT leases.id, leases.end_date, leases.grace_period, '
                'leases.on_end, leases.deleted_at '
                'FROM reservations LEFT JOIN bookings '
                'ON reservations.id = bookings.reservation_id '
                'JOIN leases ON leases.id = reservations.lease_id '
                f"WHERE bookings.server_id = '{server_id}' "
                f"OR reservations.id = '{server.within}'"):
            early = end + grace - self._world.baton.now
            if deleted is None and 'snapshot' in on_end and (
                    server.state is not clouds.State.GONE and
                    server.ran_at is not None and
                    server.ran_at < end - self._ahead and
                    lease_id not in server.copies) and (
                    -early < worlds.END_LIMIT - self._ahead):
                self._fail(Broken(f'{server_id} is deleted, and there is no '
                                  f'image of it'))
            if deleted is None and (
                    early > self._ahead or server.within and (
                        on_end == 'recycle')):
                self._fail(Broken(
                    f'{server_id} is deleted {early:.0f} s before the end of '
                    f'lease {lease_id[:8]} ({on_end})'))

    @property
    def _ahead(self) -> int:
        return self._promised.ahead

    def no_build_is_done_twice(self) -> None:
        """Check that no server is built twice, or with a revoked trust."""
        if self._world.cloud.wrong:
            raise Broken(self._world.cloud.wrong[0])

    def nobody_has_what_is_of_another(self) -> None:
        """Check that servers are booked by leases of their project."""
        for server_id, project in self._world.look(
                'SELECT bookings.server_id, leases.project_id FROM bookings '
                'JOIN reservations '
                'ON reservations.id = bookings.reservation_id '
                'JOIN leases ON leases.id = reservations.lease_id '
                'WHERE bookings.server_id IS NOT NULL'):
            if self._world.cloud.servers[server_id].project != project:
                raise Broken(f'{server_id} has a booking of {project}')

    def no_event_is_taken_from_who_has_it(self) -> None:
        """Check that an event is only taken when its claim has expired."""
        at = {id: (worker, until) for id, worker, until in self._world.look(
            "SELECT id, claimed_by, claimed_until FROM events "
            "WHERE status = 'IN_PROGRESS'")}
        for id, (worker, _until) in at.items():
            before, until = self._at.get(id, (worker, 0))
            if before != worker and until > (
                    self._world.baton.now + self._ahead):
                raise Broken(f'{worker} takes event {id[:8]}, which {before} '
                             f'has until {until - batons.START}')
        self._at = at

    def who_waits_longest_is_first(self) -> None:
        """Check that waiting leases of a project are admitted in order.

        The last try of a lease is exempt.
        """
        rows = {id: (project, created, until) for
                id, project, created, until in self._world.look(
                    "SELECT id, project_id, created_at, retry_until "
                    "FROM leases WHERE status = 'WAITING'")}
        before: list[str] = []
        for id, (project, created, until) in self._waiting.items():
            if id in rows:
                before.append(id)
                continue
            late = until <= self._world.baton.now + self._ahead
            if late or not self._world.look(
                    f"SELECT 1 FROM leases WHERE id = '{id}' "
                    f"AND admitted_at IS NOT NULL"):
                continue
            for other in before:
                if self._waiting[other][0] == project and (
                        (self._waiting[other][1], other) < (created, id)):
                    raise Broken(f'lease {id[:8]} gets room before lease '
                                 f'{other[:8]}, which has waited longer')
        # Leases that waited before keep their order.
        self._waiting = {id: rows[id] for id in before} | rows

    def nobody_is_prolonged_from_another_end(self) -> None:
        """Check that an extension is based on the current end."""
        ends = dict(self._world.look(
            'SELECT id, end_date FROM leases WHERE auto_extend > 0'))
        task = self._world.baton.current
        if task is not None and task.name.startswith('listener'):
            for id, end in ends.items():
                before = self._ends.get(id, end)
                decided = self._world.prolonged.get((id, end), before)
                if end > before != decided:
                    raise Broken(
                        f'lease {id[:8]} is prolonged from '
                        f'{decided - batons.START} on, and it had '
                        f'{before - batons.START} as its end by then')
        self._ends = ends

    def nothing_that_is_used_ends_as_unused(self) -> None:
        """Check that no lease that was used is ended as unused."""
        for lease_id, own in self._world.look(
                "SELECT leases.id, reservations.id FROM leases "
                "JOIN reservations ON reservations.lease_id = leases.id "
                "WHERE conditions LIKE '%EndedEarly%NoServerBooted%'"
        ) if self._world.no_shows[0] else ():
            if lease_id in self._unused:
                continue
            self._unused.add(lease_id)
            for server in self._world.cloud.servers.values():
                if server.reservation == own and server.leased or (
                        server.within == own and server.casts):
                    raise Broken(f'lease {lease_id[:8]} is ended as unused, '
                                 f'and {server.id} was booted in it')

    def only_what_has_no_owner_is_ended(self) -> None:
        """Check that no lease of an existing project is ended as an orphan."""
        if not self._world.keystone.knows:
            return
        deleted = dict(self._world.look(
            'SELECT id, project_id FROM leases WHERE deleted_at IS NOT NULL'))
        task = self._world.baton.current
        if task is not None and task.name.endswith('.orphans'):
            for id in sorted(deleted.keys() - self._deleted):
                if deleted[id] not in self._world.keystone.gone:
                    raise Broken(f'lease {id[:8]} is ended as if its project '
                                 f'did not exist')
        self._deleted = set(deleted)

    def hosts_are_looked_at_soon(self) -> None:
        """Check that hosts with a due recheck are read again.

        Their capacity cannot be used until then. Excused after a fault.
        """
        now, due = self._world.baton.now, self._due
        self._due = self._world.due
        if due is not None and LOOKED + self._ahead < now - max(
                due[0], self._world.faults.last + EXCUSED):
            raise Broken(f'{due[1]} was to be looked at {now - due[0]:.0f} s '
                         f'ago, and nobody has')

    def builds_of_slots_are_sent_soon(self) -> None:
        """Check that listeners send the builds of requests that died."""
        now, waits = self._world.baton.now, self._slots
        self._slots = {row[0]: row[1] for row in self._world.look(
            'SELECT server_id, created_at FROM slot_builds')}
        for server_id, since in waits.items():
            if SENT + self._ahead < now - max(
                    since, self._world.faults.last + EXCUSED):
                raise Broken(f'{server_id} has had its slot for '
                             f'{now - since:.0f} s, and its build is not sent')

    def what_is_refused_counts_no_more(
            self, server: clouds.Server, host: clouds.Host) -> None:
        """Check that a claim that placement refuses is undone."""
        asked = [one for one in self._world.cloud.questions
                 if one.server is server]
        if len(asked) == 1 and server.id not in host.allocations and (
                self._world.knows(server, host)):
            self._fail(Broken(f'{server.id} was not let onto {host.name}, and '
                              f'counts there'))

    def no_host_is_promised_twice(self) -> None:
        """Check that no host is overbooked at any instant.

        Bookings and open-ended usage fit into the capacity, except for what
        the cloud itself has taken.
        """
        now = self._world.baton.now
        rows = self._world.look(
            'SELECT hosts.uuid, bookings.start_date, bookings.end_date, '
            'bookings.resources, bookings.claimed_at FROM bookings '
            'JOIN hosts ON hosts.id = bookings.host_id '
            'JOIN reservations ON reservations.id = bookings.reservation_id '
            'JOIN leases ON leases.id = reservations.lease_id '
            # A best-effort lease in progress is booked in addition to the
            # servers that are to be moved.
            "WHERE leases.status != 'IN_PROGRESS'")
        levels: dict[str, list[tuple[int, int]]] = collections.defaultdict(
            list)
        limits: dict[str, int] = {}
        for uuid, start, end, takes, placed in rows:
            if uuid not in limits:
                limits[uuid] = self._room(uuid)
            # Hosts of other services have a single resource class.
            amount = _read(takes).get('VCPU', 0) if (
                uuid in self._world.cloud.hosts) else sum(
                    _read(takes).values())
            if placed is not None:
                # The ledger decides how long it may stay.
                start = min(start, int(now))
            levels[uuid] += [(start, amount), (end, -amount)]
        for uuid, changes in levels.items():
            level, worst = 0, (0, 0)
            for when, amount in sorted(changes):
                # Past overbooking is over; a process whose clock is ahead
                # knows that first, and may have reserved the capacity again.
                if when > now + self._ahead:
                    worst = max(worst, (level - limits[uuid], when))
                level += amount
            since, excused = self._excused.get(uuid, (now, 0))
            if worst[0] > excused:
                raise Broken(
                    f'{uuid} is promised twice: {worst[0]} too many until '
                    f'{worst[1] - batons.START}, {excused} of them by the '
                    f'cloud')
            if worst[0] <= 0 and now > since + 7200:
                # The cloud's own use of capacity has been compensated.
                del self._excused[uuid]

    def _room(self, uuid: str) -> int:
        """Return the capacity of a host, less its open-ended usage and claims.

        Claims of servers that will not arrive are part of the recorded usage
        until the host is read again, but reserve nothing. Claims get no more
        than is free in placement. Those of servers of leases, which are being
        resized, were admitted until the end of the lease only.
        """
        cloud = self._world.cloud
        (capacity, usage, consumers), = self._world.look(
            f"SELECT capacity, usage, consumers FROM hosts "
            f"WHERE uuid = '{uuid}'")
        if uuid not in cloud.hosts:
            return sum(_read(capacity).values())
        now, there = self._world.baton.now, cloud.hosts[uuid].allocations
        known = _read(consumers or 'null')
        total = _read(capacity).get('VCPU', 0)
        if known is None:
            return ty.cast(int, total - _read(usage).get('VCPU', 0))
        leased = {one for one, in self._world.look(
            'SELECT server_id FROM bookings WHERE server_id IS NOT NULL')}
        used = sum(takes.get('VCPU', 0) for one, (takes, until)
                   in known.items() if one in there and not (
                       one in cloud.servers and
                       cloud.servers[one].interruptible) and not (
                           one in leased and until >= now))
        coming = sum(takes.get('VCPU', 0) for one, (takes, until)
                     in known.items() if one not in there and until >= now and
                     not cloud.servers[one].interruptible and
                     cloud.servers[one].state in (
                         clouds.State.READY, clouds.State.BUILDING))
        free = cloud.hosts[uuid].capacity.get('VCPU', 0) - sum(
            takes.get('VCPU', 0) for takes in there.values())
        return ty.cast(int, total - used - min(coming, max(free, 0)))


def late(world: worlds.World) -> list[str]:
    """Return leases that are late without a reason, when there are no faults.

    A build that has just been sent is not late yet.
    """
    now = int(world.baton.now)
    return [
        f'lease {id[:8]} is still {status} at {now - batons.START}: it is '
        f'from {start - batons.START} to {end - batons.START}'
        for id, status, start, end in world.look(
            f"SELECT id, status, start_date, end_date FROM leases "
            f"WHERE conditions IS NULL AND ("
            f"status IN ('PENDING', 'STARTING') AND start_date < "
            f"{now - (WAITING if world.pool else LATE)} "
            f"AND id NOT IN (SELECT lease_id FROM reservations JOIN bookings "
            f"ON bookings.reservation_id = reservations.id "
            f"WHERE dispatched_at > {now - LATE}) "
            f"OR status = 'ACTIVE' AND end_date < {now - LATE} "
            f"OR status = 'TERMINATING' AND updated_at < {now - LATE} "
            f"AND (deleted_at IS NOT NULL OR "
            f"end_date + grace_period < {now - LATE}))")] + [
                *held.in_use(world, WAITING), *_left(world, now)]


def _left(world: worlds.World, now: int) -> ty.Iterator[str]:
    """Return leases without servers, or that wait too long."""
    for id, in world.look(
            f"SELECT id FROM leases WHERE status = 'ACTIVE' "
            f"AND updated_at < {now - LEFT} AND NOT EXISTS ("
            f"SELECT 1 FROM reservations WHERE lease_id = leases.id "
            f"AND params IS NOT NULL) AND NOT EXISTS ("
            f"SELECT 1 FROM reservations JOIN bookings "
            f"ON bookings.reservation_id = reservations.id "
            f"WHERE lease_id = leases.id)"):
        yield f'lease {id[:8]} is ACTIVE, and has no server any more'
    for id, in world.look(
            f"SELECT id FROM leases WHERE status IN ('WAITING', "
            f"'IN_PROGRESS') AND retry_until < {now - LATE}"):
        yield f'lease {id[:8]} waits for longer than it may'
    for id, project in world.look(
            f"SELECT reservations.id, project_id FROM reservations "
            f"JOIN leases ON leases.id = lease_id "
            f"WHERE leases.status = 'ACTIVE' "
            f"AND leases.updated_at < {now - LATE}"):
        if world.cloud.open.get(id, project) != project:
            yield f'reservation {id[:8]} of {project} is open to another'


def at_rest(world: worlds.World, core: worlds.Core) -> list[str]:
    """Return what is wrong long after the last event."""
    wrong = []
    with core.database.reader() as session:
        for row in session.execute(sa.select(
                models.Lease.id, models.Lease.status, models.Lease.end_date,
                models.Lease.deleted_at, models.Lease.conditions)):
            over = row.end_date < core.clock.now() - 3600
            if over and row.status not in ('TERMINATED', 'ERROR'):
                wrong.append(f'lease {row.id[:8]} is {row.status} long after '
                             f'its end: {row.conditions}')
        left = session.execute(sa.select(
            models.Booking.id, models.Booking.server_id,
            models.Booking.outage, models.Booking.end_date,
            models.Host.capacity).outerjoin(
                models.Host, models.Host.id == models.Booking.host_id)).all()
        for row in left:
            # The outage of a host that Nova no longer has is not extended.
            if row.end_date < core.clock.now() - 3600 and (
                    row.outage is None or any(row.capacity.values())):
                wrong.append(f'a booking of {row.server_id} is left')
        usages = {row.uuid: row.usage for row in session.execute(
            sa.select(models.Host.uuid, models.Host.usage))}
    for server in world.cloud.servers.values():
        if server.leased and server.state not in (
                clouds.State.GONE, clouds.State.ERROR):
            wrong.append(f'{server.id} is {server.state.value}, and its '
                         f'lease is over')
    for host in world.cloud.hosts.values():
        used: collections.Counter[str] = collections.Counter()
        for one in host.allocations.values():
            used.update(one)
        if host.there and +used != +collections.Counter(
                usages.get(host.uuid, {})):
            wrong.append(f'{host.name} has {dict(used)}, the database says '
                         f'{usages.get(host.uuid)}')
    wrong += [f'{one} was not given back'
              for one in sorted(world.cloud.promised & world.cloud.given)]
    wrong += held.left(world)
    wrong += promised.left(world, core)
    wrong += host_outages.left(world)
    wrong += world.switching.left() if world.switching else ()
    wrong += world.services.left() if world.services else ()
    wrong += world.evicting.left() if world.evicting else ()
    for reservation_id in world.cloud.open:
        wrong.append(f'reservation {reservation_id[:8]} is still open')
    return wrong + [one.text for one in audit.Audit(
        core.database, core.clock, core.lifecycle, str, 60).differences()]


def followers(world: worlds.World) -> list[str]:
    """Return indexes that differ from a newly loaded index.

    Both use the same clock: which servers are past their end depends on it.
    """
    now = int(world.baton.now)
    instants = list(range(now, now + 3 * 86400, 14400))

    @functools.cache
    def expected(offset: int) -> dict[str, ty.Any]:
        clock = types.SimpleNamespace(
            now=lambda: now + offset, elapsed=lambda: now)
        database = api.Database(
            databases.configuration(world.storage.url), clock)
        databases.compile_once(database.engine)
        # By the clock of the process, right or wrong.
        database.skew.note(None, 0)
        database.skew.check = lambda: None  # type: ignore[method-assign]
        try:
            return contender.picture(
                admissions.Admission(database, clock), instants)
        finally:
            database.engine.dispose()

    wrong = []
    for name, core in world.cores.items():
        index = core.admission.index
        # Neither of a dead process nor of one that is reading now.
        if not core.process.tasks or (
                index._turn.locked() or index._lock.locked()):
            continue
        # An index whose clock is wrong does not follow.
        with contextlib.suppress(errors.ClockSkewed):
            if contender.picture(core.admission, instants) != expected(
                    core.clock.now() - now):
                wrong.append(
                    f'the index of {name} differs from the database')
    return wrong
