#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""What must always hold, and what must hold when all is at rest."""

import collections
import functools
import json
import types
import typing as ty

import sqlalchemy as sa

from blazar_core.books import admission
from blazar_core import cloud as ports
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.lifecycle import audit
from tests import databases
from tests.races import contender
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import held
from tests.simulation import world as worlds

__all__ = ['Always', 'Broken', 'at_rest', 'followers', 'late']

#: Seconds that builds and deletions take at most, and those that wait for
#: them.
LATE = 180
#: The same where a start may wait for who was on the hosts before.
WAITING = LATE + worlds.PATIENCE
#: Seconds within which a host is looked at that is to be looked at, and for
#: which that may be otherwise after something has failed.
LOOKED, EXCUSED = 60, 600


class Broken(AssertionError):
    """An invariant does not hold."""


class Always:
    """Looked at after each commit, by a connection that takes no turns."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._excused = world.cloud.against
        self._held = held.Held(world)
        #: By id: who was at each event, and until when, when something was
        #: last written.
        self._at: dict[str, tuple[str, int]] = {}
        #: Which host was to be looked at first then, and when.
        self._due: tuple[int, str] | None = None
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
            for one in self._held.wrong():
                raise Broken(one)
        except Broken as exc:
            self._fail(exc)

    def _fail(self, exc: Broken) -> None:
        # Whoever has his turn just now could take it for a fault of his.
        self._world.baton.failure = self._world.baton.failure or exc

    def leases_start_at_their_time(self, event_type: str,
                                   lease: dict[str, ty.Any]) -> None:
        """A lease starts at its time, by the clock of whoever starts it; and
        not long after it, when nothing goes wrong any more.
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
        """When it is told of an event at which images are made, there is one
        of each server of the lease that was running at its time and still is.
        """
        own = {one['id'] for one in lease['reservations']}
        booked = {id for one in lease['reservations'] for id in one['servers']}
        for event in lease['events']:
            if event['action'] != states.Action.SNAPSHOT or event_type != (
                    f'lease.event.{event["event_type"]}') or (
                    event['status'] != states.Event.IN_PROGRESS):
                continue
            key = f'{event["id"]}@{event["time"]}'
            for server in self._world.cloud.servers.values():
                is_guest = server.host is not None and (
                    server.within in own & server.host.opened)
                if (server.id in booked or is_guest) and (
                        server.state is clouds.State.RUNNING and
                        server.rest is not ports.Rest.SHELVED and
                        server.ran_at is not None and
                        server.ran_at < event['time'] - self._ahead):
                    self._world.copied += 1
                    if server.images[key] != 1:
                        self._fail(Broken(
                            f'{server.id} has {server.images[key]} images of '
                            f'{event["event_type"]} of lease '
                            f'{lease["id"][:8]}'))

    def nothing_ends_before_its_time(self, server_id: str) -> None:
        """Nobody deletes the servers of a lease before its end and its grace
        period are over, or those that may stay, or of which there is to be an
        image first, unless its owner has deleted it.
        """
        server = self._world.cloud.servers[server_id]
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
                    server.launched and lease_id not in server.copies) and (
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
        """How many seconds a clock may be ahead, and what it rounds."""
        return self._world.faults.clocks + 1

    def no_build_is_done_twice(self) -> None:
        """No server is built twice, and none in the name of somebody who does
        not vouch for it any more.
        """
        if self._world.cloud.wrong:
            raise Broken(self._world.cloud.wrong[0])

    def nobody_has_what_is_of_another(self) -> None:
        """What is booked for a server is of a lease of its project."""
        for server_id, project in self._world.look(
                'SELECT bookings.server_id, leases.project_id FROM bookings '
                'JOIN reservations '
                'ON reservations.id = bookings.reservation_id '
                'JOIN leases ON leases.id = reservations.lease_id '
                'WHERE bookings.server_id IS NOT NULL'):
            if self._world.cloud.servers[server_id].project != project:
                raise Broken(f'{server_id} has a booking of {project}')

    def no_event_is_taken_from_who_has_it(self) -> None:
        """Who is at an event is the only one, as long as he says so."""
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

    def hosts_are_looked_at_soon(self) -> None:
        """Of which it is not known what runs there, so that its room may not
        be used, if all can do their work.
        """
        now, due = self._world.baton.now, self._due
        self._due = self._world.due
        if due is not None and LOOKED + self._ahead < now - max(
                due[0], self._world.faults.last + EXCUSED):
            raise Broken(f'{due[1]} was to be looked at {now - due[0]:.0f} s '
                         f'ago, and nobody has')

    def what_is_refused_counts_no_more(
            self, server: clouds.Server, host: clouds.Host) -> None:
        """What placement does not give to a server is not taken from others
        in the books.
        """
        asked = [one for one in self._world.cloud.questions
                 if one.server is server]
        if len(asked) == 1 and server.id not in host.allocations and (
                self._world.knows(server, host)):
            self._fail(Broken(f'{server.id} was not let onto {host.name}, and '
                              f'counts there'))

    def no_host_is_promised_twice(self) -> None:
        """At no instant more is booked on a host than it has, less what runs
        there for ever, but for what the cloud did against the books.
        """
        now = self._world.baton.now
        rows = self._world.look(
            'SELECT hosts.uuid, hosts.capacity, hosts.usage, '
            'bookings.start_date, bookings.end_date, bookings.resources, '
            'bookings.placed_at FROM bookings '
            'JOIN hosts ON hosts.id = bookings.host_id')
        levels: dict[str, list[tuple[int, int]]] = collections.defaultdict(
            list)
        limits: dict[str, int] = {}
        for uuid, capacity, usage, start, end, takes, placed in rows:
            limits[uuid] = json.loads(capacity).get('VCPU', 0) - json.loads(
                usage).get('VCPU', 0)
            amount = json.loads(takes).get('VCPU', 0)
            if placed is not None:
                # Until when it stays is for who decides: see the ledger.
                start = min(start, int(now))
            levels[uuid] += [(start, amount), (end, -amount)]
        for uuid, changes in levels.items():
            level, worst = 0, (0, 0)
            for when, amount in sorted(changes):
                # Until then it has been so.
                if when > now:
                    worst = max(worst, (level - limits[uuid], when))
                level += amount
            since, excused = self._excused.get(uuid, (now, 0))
            if worst[0] > excused:
                raise Broken(
                    f'{uuid} is promised twice: {worst[0]} too many until '
                    f'{worst[1] - batons.START}, {excused} of them by the '
                    f'cloud')
            if worst[0] <= 0 and now > since + 7200:
                # Whatever was done against the books is made good.
                del self._excused[uuid]


def late(world: worlds.World) -> list[str]:
    """Leases that have not started or ended at their time, and do not say
    why, though nothing goes wrong any more. A build that has just been sent
    is no answer yet.
    """
    now = int(world.baton.now)
    return [
        f'lease {id[:8]} is still {status} at {now - batons.START}: it is '
        f'from {start - batons.START} to {end - batons.START}'
        for id, status, start, end in world.look(
            f"SELECT id, status, start_date, end_date FROM leases "
            f"WHERE status_reason = '' AND ("
            f"status IN ('PENDING', 'STARTING') AND start_date < "
            f"{now - (WAITING if world.pool else LATE)} "
            f"AND id NOT IN (SELECT lease_id FROM reservations JOIN bookings "
            f"ON bookings.reservation_id = reservations.id "
            f"WHERE sent_at > {now - LATE}) "
            f"OR status = 'ACTIVE' AND end_date < {now - LATE} "
            f"OR status = 'TERMINATING' AND updated_at < {now - LATE} "
            f"AND (deleted_at IS NOT NULL OR "
            f"end_date + grace_period < {now - LATE}))")] + [
                *held.in_use(world, WAITING)]


def at_rest(world: worlds.World, core: worlds.Core) -> list[str]:
    """What is wrong when nothing has happened for long."""
    wrong = []
    with core.database.reader() as session:
        for row in session.execute(sa.select(
                models.Lease.id, models.Lease.status, models.Lease.end_date,
                models.Lease.deleted_at, models.Lease.status_reason)):
            over = row.end_date < core.clock.now() - 3600
            if over and row.status not in ('TERMINATED', 'ERROR'):
                wrong.append(f'lease {row.id[:8]} is {row.status} long after '
                             f'its end: {row.status_reason}')
        left = session.execute(sa.select(
            models.Booking.id, models.Booking.server_id,
            models.Booking.end_date)).all()
        for row in left:
            if row.end_date < core.clock.now() - 3600:
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
            wrong.append(f'{host.name} has {dict(used)}, and the books say '
                         f'{usages.get(host.uuid)}')
    wrong += [f'{one} was not given back'
              for one in sorted(world.cloud.promised & world.cloud.given)]
    wrong += held.left(world)
    for reservation_id in world.cloud.open:
        wrong.append(f'reservation {reservation_id[:8]} is still open')
    return wrong + [one.text for one in audit.Audit(
        core.database, core.clock, core.lifecycle, str, 60).differences()]


def followers(world: worlds.World) -> list[str]:
    """An index that has followed says what one says that was just loaded, by
    the same clock: who overstays his time depends on that.
    """
    now = int(world.baton.now)
    instants = list(range(now, now + 3 * 86400, 14400))

    @functools.cache
    def expected(offset: int) -> dict[str, ty.Any]:
        clock = types.SimpleNamespace(
            now=lambda: now + offset, elapsed=lambda: now)
        database = api.Database(
            databases.configuration(world.books.url), clock)
        try:
            return contender.picture(
                admission.Admission(database, clock), instants)
        finally:
            database.engine.dispose()

    wrong = []
    for name, core in world.cores.items():
        index = core.admission.index
        # Not of who is dead, or has it at this moment.
        if core.process.tasks and not (
                index._turn.locked() or index._lock.locked()) and (
                contender.picture(core.admission, instants) !=
                expected(core.process.offset)):
            wrong.append(f'the index of {name} is not what is in the books')
    return wrong
