# SPDX-License-Identifier: Apache-2.0

"""Invariants of best-effort leases and of recurring ones."""

import collections
import json
import typing as ty

from blazar_core.common import errors
from tests.simulation import cloud as clouds
from tests.simulation import world as worlds

#: The states of a lease that has started.
BEGUN = ('STARTING', 'ACTIVE')
#: The moves whose outcome is open.
OPEN = ("server_moves.reason = 'best_effort' AND server_moves.status IN "
        "('planned', 'requested', 'accepted')")


class Promised:
    """A check after each commit."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._cloud = world.cloud
        #: The numbers of writes to tables at the last check.
        self._seen: collections.Counter[str] = collections.Counter()
        #: The moves planned then: lease, server and target host.
        self._planned: set[tuple[str, str, int]] = set()
        #: The occurrences by recurrence, and those that have started.
        self._occurrences: dict[str, set[str]] = {}
        self._begun: set[str] = set()
        #: The servers that were asked to migrate, each with the lease.
        self._asked: set[tuple[str, str]] = set()
        #: The time at which a server was last migrated for a lease.
        self._migrated: dict[str, float] = {}
        world.port.migrating = self._each_is_left_alone_for_a_while
        world.port.asked = self._only_what_may_move_is_asked_to_once
        world.port.unshelved = self._nobody_comes_back_but_for_an_occurrence

    def wrong(self) -> ty.Iterator[str]:
        """Return all violations."""
        if self._is_new('server_moves', 'leases'):
            yield from self._nobody_moves_for_two()
            yield from self._no_target_is_promised_twice()
        if self._is_new('leases'):
            yield from self._each_occurrence_is_there_once()

    def _is_new(self, *tables: str) -> bool:
        """Return whether tables were written since the last call."""
        versions, key = self._world.storage.versions, ' '.join(tables)
        count = sum(versions[one] for one in tables)
        before, self._seen[key] = self._seen[key], count
        return count != before

    # -- moves -------------------------------------------------------------

    def _only_what_may_move_is_asked_to_once(
            self, server: clouds.Server, lease_id: str) -> None:
        """Check that a server is asked to migrate once and only if it may.

        Not if its owner wants it to stay on its host, or if it has a lease and
        is not preemptible.
        """
        if (lease_id, server.id) in self._asked:
            self._cloud.wrong.append(
                f'{server.id} is asked to move twice for lease '
                f'{lease_id[:8]}')
        self._asked.add((lease_id, server.id))
        if server.kept:
            self._cloud.wrong.append(
                f'{server.id} is asked to move, and is to stay')
        if not server.preemptible and self._world.look(
                f"SELECT 1 FROM bookings "
                f"WHERE server_id = '{server.id}'"):
            self._cloud.wrong.append(
                f'{server.id} is asked to move, and has a lease')

    def _each_is_left_alone_for_a_while(self, server: clouds.Server) -> None:
        """Check the interval between two migrations of a server.

        It is the operator's setting, the default here.
        """
        now = self._world.baton.now
        before = self._migrated.get(server.id)
        if before is not None and now - before < 600:
            self._cloud.wrong.append(
                f'{server.id} is migrated again after {now - before:.0f} s')
        self._migrated[server.id] = now

    def _nobody_moves_for_two(self) -> ty.Iterator[str]:
        """Check that no server is to migrate for two leases at once."""
        for server_id, count in self._world.look(
                f"SELECT server_id, count(*) FROM server_moves "
                f"JOIN leases ON leases.id = server_moves.lease_id "
                f"WHERE leases.status = 'IN_PROGRESS' AND {OPEN} "
                f"GROUP BY server_id HAVING count(*) > 1"):
            yield f'{server_id} is to move for {count} leases'

    def _no_target_is_promised_twice(self) -> ty.Iterator[str]:
        """Check that planned migrations fit on their target.

        Together with its usage and bookings, at the time of the decision.
        Interruptible servers count until they can be evicted.
        """
        planned = {tuple(row) for row in self._world.look(
            "SELECT lease_id, server_id, target FROM server_moves "
            "WHERE status = 'planned' AND reason = 'best_effort'")}
        new, self._planned = planned - self._planned, planned
        for host_id in sorted({target for _lease, _server, target in new}):
            (uuid, capacity, consumers, lent), = self._world.look(
                f'SELECT uuid, capacity, consumers, interruptible FROM hosts '
                f'WHERE id = {host_id}')
            there = json.loads(consumers or '{}')
            evictable = json.loads(lent or 'null') or {}
            level = sum(_vcpus(takes) for one, (takes, _told) in there.items()
                        if one not in evictable)
            for server_id, source, target, takes in self._world.look(
                    f"SELECT server_id, source, target, resources "
                    f"FROM server_moves "
                    f"JOIN leases ON leases.id = server_moves.lease_id "
                    f"WHERE leases.status = 'IN_PROGRESS' AND {OPEN}"):
                if target == host_id and server_id not in there:
                    level += _vcpus(json.loads(takes))
                if source == host_id and not evictable.pop(server_id, None):
                    level -= _vcpus(json.loads(takes))
            level += self._peak(host_id, evictable)
            if level > _vcpus(json.loads(capacity)) and (
                    uuid not in self._cloud.against):
                yield (f'{uuid} is promised to too many who are to move '
                       f'there: {level} of '
                       f'{_vcpus(json.loads(capacity))}')

    def _peak(self, host_id: int,
              evictable: ty.Mapping[str, tuple[ty.Any, int, int]]) -> int:
        """Return the most that bookings and interruptible servers take of a
        host at any instant.
        """
        level = peak = 0
        changes: list[tuple[int, int]] = []
        for amounts, lead_time, _since in evictable.values():
            changes += [(0, _vcpus(amounts)), (
                int(self._world.baton.now) + lead_time, -_vcpus(amounts))]
        for start, end, takes in self._world.look(
                f'SELECT start_date, end_date, resources FROM bookings '
                f'WHERE host_id = {host_id} '
                f'AND end_date > {int(self._world.baton.now)}'):
            changes += [(start, _vcpus(json.loads(takes))),
                        (end, -_vcpus(json.loads(takes)))]
        for _when, amount in sorted(changes):
            level += amount
            peak = max(peak, level)
        return peak

    # -- recurring leases --------------------------------------------------

    def _each_occurrence_is_there_once(self) -> ty.Iterator[str]:
        """Check that all requested occurrences exist once, or none of them.

        Each has its own window, and those that did not fit do not exist. Each
        starts once.
        """
        if not self._world.recurring:
            return
        found: dict[str, dict[str, tuple[int, int]]] = (
            collections.defaultdict(dict))
        begun = set()
        for id, recurrence_id, start, end, status in self._world.look(
                'SELECT id, recurrence_id, start_date, end_date, status '
                'FROM leases WHERE recurrence_id IS NOT NULL'):
            found[recurrence_id][id] = start, end
            if status in BEGUN:
                begun.add(id)
            elif status == 'PENDING' and id in self._begun:
                yield f'lease {id[:8]} begins again'
        self._begun |= begun
        for recurrence_id, leases in found.items():
            is_new = recurrence_id not in self._occurrences
            known = self._occurrences.setdefault(recurrence_id, {*leases})
            windows, _kept = self._world.recurring[recurrence_id]
            if known != leases.keys():
                yield f'{recurrence_id[:8]} has got other occurrences'
            if len(known) != len(windows):
                yield (f'{recurrence_id[:8]} has {len(known)} occurrences of '
                       f'{len(windows)}')
            if is_new and sorted(leases.values()) != [
                    (one.start, one.end) for one in windows]:
                yield (f'{recurrence_id[:8]} has other windows than those '
                       f'that were asked for')

    def what_is_kept_is_not_deleted(self, server: clouds.Server) -> None:
        """Check that a server kept for a later occurrence is not deleted.

        Except by an owner who deletes the current occurrence.
        """
        if not server.recurs or server.ran_at is None:
            return
        late = self._world.baton.now - worlds.END_LIMIT + self.ahead
        for id, in self._world.look(
                f"SELECT later.id FROM bookings JOIN reservations "
                f"ON reservations.id = bookings.reservation_id "
                f"JOIN leases ON leases.id = reservations.lease_id "
                f"JOIN leases AS later "
                f"ON later.recurrence_id = leases.recurrence_id "
                f"WHERE bookings.server_id = '{server.id}' "
                f"AND leases.deleted_at IS NULL AND leases.end_date > {late} "
                f"AND leases.end_date > {server.ran_at + self.ahead} "
                f"AND later.start_date > leases.start_date "
                f"AND later.status IN ('PENDING', 'STARTING')"):
            self._cloud.wrong.append(
                f'{server.id} is deleted, and is kept for lease {id[:8]}')

    @property
    def ahead(self) -> int:
        """Return how many seconds a clock may be ahead, with rounding."""
        return self._world.faults.ahead + 1

    def _nobody_comes_back_but_for_an_occurrence(
            self, server: clouds.Server) -> None:
        """Check that a server is only unshelved for a started occurrence."""
        if not self._world.look(
                f"SELECT 1 FROM bookings JOIN reservations "
                f"ON reservations.id = bookings.reservation_id "
                f"JOIN leases ON leases.id = reservations.lease_id "
                f"WHERE bookings.server_id = '{server.id}' "
                f"AND leases.status IN ('STARTING', 'ACTIVE', "
                f"'TERMINATING')"):
            self._cloud.wrong.append(
                f'{server.id} comes back, and has no occurrence')


def left(world: worlds.World, core: worlds.Core) -> ty.Iterator[str]:
    """Return what is wrong with recurring leases when all have ended."""
    there = {one for one, in world.look(
        'SELECT recurrence_id FROM leases WHERE recurrence_id IS NOT NULL '
        'AND deleted_at IS NULL')}
    for recurrence_id in sorted(there):
        windows, _kept = world.recurring[recurrence_id]
        try:
            shown = core.leases.series.get(recurrence_id)
        except errors.NotFound:
            yield f'{recurrence_id[:8]} is not shown any more'
            continue
        count = sum(one['id'] is not None for one in shown['occurrences'])
        if count != len(windows):
            yield f'{recurrence_id[:8]} is shown with {count} occurrences'
    for server_id in {one for _windows, kept in world.recurring.values()
                      for one in kept}:
        server = world.cloud.servers[server_id]
        if server.state is clouds.State.HELD:
            yield f'{server_id} waits for an occurrence that is over'


def _vcpus(takes: ty.Mapping[str, int]) -> int:
    return takes.get('VCPU', 0)
