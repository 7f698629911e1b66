# SPDX-License-Identifier: Apache-2.0

"""Users who resize servers of leases, and confirm or revert that.

nova-api refuses what Nova's plug-in refuses there
(:mod:`blazar_nova.api.guards`): servers of reservations, and growth beyond the
limits. The scheduler decides the rest. The choices have a random generator of
their own.
"""

import contextlib
import dataclasses
import itertools
import random

from blazar_core.common import errors
from blazar_core.leases import server_growth
from tests.simulation import cloud as clouds
from tests.simulation import world as worlds

#: Seconds between two requests, and before the end of a lease within which
#: half of them are sent.
_PAUSE, _BEFORE = 120, 60
#: Seconds after a resize, or a fault, within which the booking follows.
_LATE = 1200
_FAILED = (errors.DatabaseUnavailable, errors.ConcurrentUpdate,
           errors.LimitExceeded, errors.Conflict, errors.NotFound)
_IN_USE = (
    "SELECT bookings.server_id, leases.end_date, "
    "json_extract(bookings.resources, '$.VCPU') FROM bookings "
    "JOIN reservations ON reservations.id = bookings.reservation_id "
    "JOIN leases ON leases.id = reservations.lease_id "
    "WHERE bookings.running AND bookings.server_id IS NOT NULL "
    "AND leases.recurrence_id IS NULL AND leases.status = 'ACTIVE' "
    "ORDER BY bookings.id")


class Resizers:
    """Resizes servers of a world.

    :ivar done: how many requests had which result
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._baton, self._cloud = world.baton, world.cloud
        self._dice = random.Random(f'resize {world.baton.seed}')
        self._numbers = itertools.count(1)
        #: By server: when its size was last changed.
        self._at: dict[str, float] = {}
        self.done: dict[str, int] = {}
        world.checks.append(self._check_sizes)

    def ask(self, core: worlds.Core, until: float) -> None:
        """Send requests until a time."""
        while self._baton.now < until:
            self._baton.let_pass(self._dice.expovariate(1 / _PAUSE))
            found = self._world.look(_IN_USE)
            if not found:
                continue
            server_id, end, _vcpus = self._dice.choice(found)
            server = self._cloud.servers[server_id]
            soon = end - self._baton.now
            if 0 < soon < 1800 and self._dice.random() < 0.5:
                # It races the end of the lease.
                self._baton.let_pass(self._dice.uniform(
                    max(0, soon - _BEFORE), soon))
            with contextlib.suppress(*_FAILED):
                self._request(core, server)

    def _request(self, core: worlds.Core, server: clouds.Server) -> None:
        if server.state is not clouds.State.RUNNING or server.rest or (
                server.is_rescued or server.busy):
            self._count('refused by Nova')
            return
        if server.before is None:
            takes = {'VCPU': self._dice.choice([1, 2, 4, 8])}
            if takes != server.amounts:
                self._resize(core, server, takes)
        elif self._dice.random() < 0.5:
            self._at[server.id] = self._baton.now
            self._cloud.confirm(server)
            self._count('confirmed')
        else:
            self._revert(core, server, server.before)

    def _resize(self, core: worlds.Core, server: clouds.Server,
                takes: clouds.Amounts) -> None:
        booked = core.leases.lookup.booked(server.id)
        if booked is not None and booked.in_slot:
            self._count('refused in a reservation')
            return
        self._check_limits(core, server, takes)
        if self._cloud.engage(
                server, 'resize', lambda: self._carry_out(server, takes)):
            self._count('requested')

    def _revert(self, core: worlds.Core, server: clouds.Server,
                resize: clouds.Resize) -> None:
        source = resize.source
        self._check_limits(core, server, resize.amounts, server_growth.Revert(
            resize.amounts, source.name, source.name, resize.kept_as))

        def work() -> None:
            self._baton.let_pass(self._cloud.faults.pause('move'))
            server.busy = False
            if server.state is not clouds.State.RUNNING or (
                    server.before is not resize or source.down):
                return
            had, server.before = server.host, None
            for host in self._cloud.hosts.values():
                host.allocations.pop(server.id, None)
            source.allocations[server.id] = source.allocations.pop(
                resize.kept_as, dict(resize.amounts))
            # Its booking follows as it is, and is changed then.
            for amounts in (server.amounts, resize.amounts):
                self._cloud.act_against(source, amounts)
            server.host, server.amounts = source, resize.amounts
            self._end(server, 'reverted', source, had)

        self._cloud.engage(server, 'revert', work)

    def _check_limits(self, core: worlds.Core, server: clouds.Server,
                      takes: clouds.Amounts,
                      revert: server_growth.Revert | None = None) -> None:
        """Do what nova-api does before it passes a request on.

        :raises LimitExceeded: if the server would exceed a limit
        """
        found = server_growth.booked(core.database, server.id)
        if found is None:
            raise errors.NotFound('it has left its lease')
        lease, booked = found
        asked = server_growth.asked_of(lease, booked, takes)
        if asked is None:
            return
        try:
            granted = core.limits.check(dataclasses.replace(
                asked, server_ids=(server.id,)))
        except errors.LimitExceeded:
            self._count('beyond the limit')
            raise
        if revert is not None and granted is not None:
            server_growth.revert(core.database, core.clock, granted, lease.id,
                                 server.id, revert)

    def _carry_out(self, server: clouds.Server,
                   takes: clouds.Amounts) -> None:
        """Resize a server; the migration holds its old allocation."""
        cloud, source = self._cloud, server.host
        assert source is not None
        kept_as, old = f'resize-{next(self._numbers):05}', server.amounts
        source.allocations[kept_as] = source.allocations.pop(
            server.id, dict(old))
        # It counts as usage, in addition to the booking.
        cloud.act_against(source, old)
        host = cloud.ask(clouds.Request(
            server, clouds.State.RUNNING, takes=takes)).host
        if host is not None:
            # Its booking follows as it is, and is changed then.
            for amounts in (old, takes):
                cloud.act_against(host, amounts)
            self._baton.let_pass(cloud.faults.pause('move'))
        server.busy = False
        if server.state is not clouds.State.RUNNING:
            source.allocations.pop(kept_as, None)
            cloud.free(server)
        elif host is None or host.down or source.down or (
                cloud.faults.happens('move fails')):
            cloud.free(server)
            source.allocations[server.id] = source.allocations.pop(kept_as)
            self._end(server, 'not resized', source, host)
        else:
            server.before = clouds.Resize(source, old, kept_as)
            server.host, server.amounts = host, takes
            self._end(server, 'resized', source, host)

    def _end(self, server: clouds.Server, what: str,
             *hosts: clouds.Host | None) -> None:
        self._at[server.id] = self._baton.now
        self._count(what)
        self._baton.tell(f'{server.id} is {what}')
        for host in hosts:
            self._cloud.notify(server.id, host and host.uuid)

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def _check_sizes(self) -> None:
        """Check that no server is larger than its booking."""
        now = self._baton.now
        for server_id, _end, vcpus in self._world.look(_IN_USE) if (
                self._at) else ():
            server = self._cloud.servers[server_id]
            if server.amounts['VCPU'] > vcpus and not server.busy and (
                    server.host is not None and server.host.there) and (
                    now > _LATE + max(self._at.get(server_id, now),
                                      self._world.faults.last)):
                self._cloud.wrong.append(
                    f'{server_id} has {server.amounts}, and its booking '
                    f'{vcpus} VCPU')
