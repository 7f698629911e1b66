# SPDX-License-Identifier: Apache-2.0

"""Users who rescue servers shortly before the end of their leases.

The simulated Nova refuses to shelve, stop, suspend or copy a server that is
rescued, so that its end begins with unrescuing it. The choices have a random
generator of their own.
"""

import random

from tests.simulation import world as worlds

#: Seconds before an end within which users rescue servers, between two looks
#: for these, and after an end, with its grace period, within which a policy
#: must be complete when there are no more faults.
_BEFORE, _PAUSE, _LATE = 300, 120, 600
_IN_USE = (
    "SELECT bookings.server_id, leases.end_date + leases.grace_period "
    "FROM bookings "
    "JOIN reservations ON reservations.id = bookings.reservation_id "
    "JOIN leases ON leases.id = reservations.lease_id "
    "WHERE bookings.running AND bookings.server_id IS NOT NULL "
    "AND leases.on_end NOT IN ('delete', 'release') "
    "AND leases.recurrence_id IS NULL ")


class Rescuers:
    """Rescues servers until the simulation ends.

    :ivar count: how often a server was rescued
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._dice = random.Random(f'rescue {world.baton.seed}')
        self.count = 0
        self._look()

    def _look(self) -> None:
        now = self._world.baton.now
        for server_id, end in self._world.look(
                f"{_IN_USE} AND leases.status = 'ACTIVE' "
                "ORDER BY bookings.id"):
            if now < end <= now + _BEFORE and self._dice.random() < 0.5:
                self.count += self._world.cloud.rescue(
                    self._world.cloud.servers[server_id])
        if self._world.settled:
            for server_id, end in self._world.look(_IN_USE):
                server = self._world.cloud.servers[server_id]
                if now > end + _LATE and server.is_rescued:
                    self._world.cloud.wrong.append(
                        f'{server_id} is still rescued {now - end:.0f} s '
                        f'after the end of its lease')
        self._world.baton.later(_PAUSE, self._look)
