# SPDX-License-Identifier: Apache-2.0

"""Users who delete and restore a server over the end of its lease.

The simulated Nova keeps a server that its user deletes until it is restored,
or deleted for good, which the end of a lease requests.
"""

from blazar_core.common import errors
from tests.simulation import cloud as clouds
from tests.simulation import world as worlds

#: Seconds for which users continue after the end, and after which a server
#: must be deleted when there are no more faults.
_PATIENCE, _LATE = 6 * 3600, 300
_TO_END = (
    "SELECT bookings.server_id, leases.end_date + leases.grace_period "
    "FROM bookings "
    "JOIN reservations ON reservations.id = bookings.reservation_id "
    "JOIN leases ON leases.id = reservations.lease_id "
    "WHERE bookings.running AND leases.on_end = 'delete' "
    "AND leases.recurrence_id IS NULL")


def delay(world: worlds.World) -> None:
    """Choose a server, and delete and restore it over the end of its lease.

    The end must not be delayed by that.

    :raises NotFound: if there is no server
    """
    baton, cloud = world.baton, world.cloud
    found = world.look(f"{_TO_END} AND leases.status = 'ACTIVE' "
                       f"ORDER BY bookings.id")
    if not found:
        raise errors.NotFound('no server')
    server_id, end = baton.dice.choice(found)
    if server_id is None:
        raise errors.NotFound('a whole host')
    server, pause = cloud.servers[server_id], baton.dice.choice([20, 300, 590])

    def work() -> None:
        while server.state is not clouds.State.GONE and (
                baton.now < end + _PATIENCE):
            cloud.soft_delete(server)
            baton.let_pass(baton.dice.uniform(1, pause / 2))
            cloud.restore(server)
            baton.let_pass(baton.dice.uniform(1, pause / 2))
            for _id, until in world.look(
                    f"{_TO_END} AND bookings.server_id = '{server_id}'"):
                if world.settled and baton.now > until + _LATE:
                    cloud.wrong.append(
                        f'{server_id} is kept for {baton.now - until:.0f} s '
                        f'after the end of its lease')

    baton.later(max(0, end - baton.now - 5 * pause), work)
