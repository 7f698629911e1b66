# SPDX-License-Identifier: Apache-2.0
"""Invariants of whole hosts."""

import collections
import itertools
import typing as ty

from blazar_core.common import states
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import whole
from tests.simulation import world as worlds


class Held:
    """A check after each commit: a lease has its hosts alone and clean.

    :ivar waited: the leases whose start was deferred because hosts were not
        free
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._hosts = world.cloud.hosts
        #: By host: the reservation that it was assigned to at the last check.
        self._before: dict[str, str | None] = {}
        #: Pairs of host and reservation that was opened by a process that was
        #: frozen and no longer allowed to: it closes the host again.
        self._late: set[tuple[str, str]] = set()
        self.waited: set[str] = set()
        world.cloud.opening = self._opening
        world.cloud.cleaning = self._cleaning

    def wrong(self) -> ty.Iterator[str]:
        """Return all violations."""
        if not self._world.pool:
            return
        holders: dict[str, str | None] = {}
        for uuid, holder, enrolled in self._world.look(
                "SELECT uuid, assigned_to, enrollment FROM hosts "
                "WHERE pool = 'compute'"):
            holders[uuid], host = holder, self._hosts[uuid]
            before = self._before.get(uuid)
            if before is not None and before != holder:
                yield from self._given_back(host, before)
                if holder is not None:
                    yield f'{host.name} goes from one who has it to another'
            if holder is not None and enrolled is None:
                yield f'{host.name} is held, and serves everybody'
            yield from self._who_is_there(
                host, holder, enrolled == states.Enrollment.ENROLLED)
            if len(self._openers(host)) > 1:
                yield f'{host.name} is opened to two reservations'
        self._before = holders
        yield from self._booked_once()
        self.waited.update(id for id, in self._world.look(
            "SELECT id FROM leases WHERE status = 'PENDING' AND "
            "conditions IS NOT NULL"))

    def _opening(self, host: clouds.Host, reservation_id: str) -> None:
        if not self._world.look(
                f"SELECT 1 FROM hosts JOIN reservations "
                f"ON reservations.id = hosts.assigned_to "
                f"JOIN leases ON leases.id = reservations.lease_id "
                f"WHERE hosts.uuid = '{host.uuid}' AND "
                f"leases.status IN ('STARTING', 'ACTIVE') AND "
                f"reservations.id = '{reservation_id}'"):
            self._late.add((host.uuid, reservation_id))
            self._world.baton.tell(f'{host.name} is opened too late')

    def _openers(self, host: clouds.Host) -> set[str]:
        return {one for one in host.opened
                if (host.uuid, one) not in self._late}

    def _cleaning(self, host: clouds.Host, reservation_id: str) -> None:
        """Check that a host is cleaned for its reservation, and empty."""
        held, = self._world.look(
            f"SELECT assigned_to FROM hosts WHERE uuid = '{host.uuid}'")
        if held != (reservation_id,):
            self._world.cloud.wrong.append(
                f'{host.name} is cleaned for one who does not have it')
        for server in self._there(host):
            if not server.unasked:
                self._world.cloud.wrong.append(
                    f'{host.name} is cleaned while {server.id} is there')

    def _there(self, host: clouds.Host) -> list[clouds.Server]:
        """Return the servers that run or are being built on a host."""
        return [one for one in self._world.cloud.servers.values()
                if one.host is host and one.is_there]

    def _given_back(self, host: clouds.Host, before: str,
                    ) -> ty.Iterator[str]:
        """Check a host that a reservation no longer has."""
        for server in self._there(host):
            if server.within == before and not server.unasked:
                yield f'{host.name} is given back with {server.id} on it'
        if host.dirty:
            yield f'{host.name} is given back before it is clean'
        if before in self._openers(host):
            yield f'{host.name} is given back before it is closed'

    def _who_is_there(self, host: clouds.Host, holder: str | None,
                      enrolled: bool) -> ty.Iterator[str]:
        """Check that servers on an assigned or enrolled host may be there.

        On hosts that are lent, servers with a lease and interruptible ones
        may be until a reservation gets all of it.
        """
        lends = self._world.cloud.lends
        if holder is not None or enrolled:
            for consumer in host.allocations:
                server_id = self._world.port.migrations.get(consumer, consumer)
                server = self._world.cloud.servers.get(server_id)
                if server is None:
                    # A migration, or a resize, of a server with a lease.
                    if holder is not None:
                        yield f'{consumer} still has {host.name}'
                    continue
                may = server.unasked or server.within or holder is None and (
                    (server.pooled or lends) and server.leased or
                    lends and server.interruptible or
                    server.released and self._is_ending(server_id))
                if not may:
                    yield (f'{server_id} is on {host.name}, and has no right '
                           f'to be there')
        for server in self._there(host):
            if server.within not in (None, holder) and not server.unasked:
                yield (f'{server.id} is on {host.name}, which its '
                       f'reservation does not have')

    def _is_ending(self, server_id: str) -> bool:
        """Return whether a server is to be shelved, as it cannot stay.

        It no longer belongs to its lease then, but its booking exists until it
        is shelved.
        """
        return bool(self._world.look(
            f"SELECT 1 FROM bookings JOIN reservations "
            f"ON reservations.id = bookings.reservation_id JOIN leases "
            f"ON leases.id = reservations.lease_id "
            f"WHERE bookings.server_id = '{server_id}' AND "
            f"leases.status = 'TERMINATING'"))

    def _booked_once(self) -> ty.Iterator[str]:
        """Check that no two reservations of hosts overlap on one host."""
        booked: dict[int, list[tuple[int, int]]] = collections.defaultdict(
            list)
        for host_id, start, end in self._world.look(
                f"SELECT bookings.host_id, bookings.start_date, "
                f"bookings.end_date FROM bookings JOIN reservations "
                f"ON reservations.id = bookings.reservation_id "
                f"WHERE reservations.resource_type = '{whole.HOSTS}' AND "
                f"bookings.host_id IS NOT NULL ORDER BY bookings.start_date"):
            booked[host_id].append((start, end))
        for host_id, windows in booked.items():
            for (_start, end), (start, _end) in itertools.pairwise(windows):
                if start < end:
                    yield (f'host {host_id} is booked twice from '
                           f'{start - batons.START} on')


def in_use(world: worlds.World, late: int) -> ty.Iterator[str]:
    """Return leases that cannot use their hosts although there are no faults.

    :param late: seconds after the start of a lease, or its last change
    """
    now = int(world.baton.now)
    for lease_id, reservation_id, uuid, holder in world.look(
            f"SELECT leases.id, reservations.id, hosts.uuid, "
            f"hosts.assigned_to FROM leases JOIN reservations "
            f"ON reservations.lease_id = leases.id JOIN bookings "
            f"ON bookings.reservation_id = reservations.id "
            f"JOIN hosts ON hosts.id = bookings.host_id "
            f"WHERE reservations.resource_type = '{whole.HOSTS}' AND "
            f"leases.status = 'ACTIVE' AND leases.end_date > {now} AND "
            f"leases.updated_at < {now - late}"):
        host = world.cloud.hosts[uuid]
        if holder != reservation_id or reservation_id not in host.opened:
            yield (f'lease {lease_id[:8]} has {host.name}, and cannot use '
                   f'it')


def left(world: worlds.World) -> ty.Iterator[str]:
    """Return what is left of leases of hosts when all have ended."""
    for name, holder in world.look(
            'SELECT name, assigned_to FROM hosts '
            'WHERE assigned_to IS NOT NULL OR vacated_at IS NOT NULL OR '
            'cleaned_at IS NOT NULL OR '
            'cleaning_until IS NOT NULL OR overdue_at IS NOT NULL'):
        yield f'{name} is still held by {holder}, or says what it was'
    for host in world.cloud.hosts.values():
        if host.opened:
            yield f'{host.name} is still open to {sorted(host.opened)}'
        if host.cleaned_by:
            yield f'{host.name} is still being cleaned'
    for server in world.cloud.servers.values():
        if server.within and server.is_there and not server.unasked:
            yield (f'{server.id} is {server.state.value}, and its lease of '
                   f'hosts is over')
