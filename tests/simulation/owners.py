# SPDX-License-Identifier: Apache-2.0

"""Ownership: joining and leaving leases, transfers, and deleted projects."""

import contextlib
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import members
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import transfer
from blazar_core.lifecycle import orphans
from blazar_core.plugins import cloud_api
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import whole

PROJECTS = ('red', 'blue')
#: Seconds between two checks of the projects, for which a project must be
#: missing, and for which keystone answers wrongly.
INTERVAL, GRACE, WRONG = 600, 900, 300


class Keystone:
    """A keystone with projects, which answers wrongly once in a run.

    :param look: reads the reservation database
    :ivar knows: whether it is used in this run
    :ivar gone: the projects that were deleted
    """

    def __init__(self, baton: batons.Baton,
                 look: ty.Callable[[str], list[ty.Any]]) -> None:
        self._baton = baton
        self._look = look
        self.knows = baton.dice.random() < 0.3
        self.gone: set[str] = set()
        self._wrong = 0.0

    def plan(self, end: float) -> None:
        """Plan wrong answers, and in some runs the deletion of a project."""
        dice = self._baton.dice
        if not self.knows:
            return
        self._wrong = dice.uniform(self._baton.now, end)
        self._baton.alarm(self._wrong)
        if dice.random() < 0.5:
            self._baton.later(
                dice.uniform(0, end - self._baton.now), self._delete)

    def _delete(self) -> None:
        self.gone.add(PROJECTS[-1])
        self._baton.tell(f'project {PROJECTS[-1]} is deleted')

    def projects(self) -> list[str]:
        return [one for one in PROJECTS if one not in self.gone]

    def absent(self, project_ids: ty.Collection[str],
               user_ids: ty.Collection[str],
               go_on: ty.Callable[[], object] = lambda: None,
               ) -> cloud_api.MissingOwners:
        self._baton.point('keystone')
        if self._is_wrong():
            self._baton.tell('keystone knows no project')
            return cloud_api.MissingOwners(frozenset(project_ids), frozenset())
        return cloud_api.MissingOwners(
            frozenset(self.gone.intersection(project_ids)), frozenset())

    def ask(self, finding: orphans.Orphans, wake: ty.Callable[[], None],
            ) -> None:
        """Search for orphans periodically, as a listener does."""
        while True:
            with contextlib.suppress(errors.CloudUnavailable,
                                     errors.DatabaseUnavailable,
                                     errors.ConcurrentUpdate):
                finding.find()
                wake()
            self._baton.let_pass(INTERVAL)
            seen = len(self.gone)
            if not self._has_found():
                # Searching without finding anything takes long to simulate.
                self._baton.wait(lambda: self._is_wrong() or (
                    len(self.gone) != seen), 86400)

    def _is_wrong(self) -> bool:
        return 0 <= self._baton.now - self._wrong < WRONG

    def _has_found(self) -> bool:
        """Return whether there is a lease without a project, or an orphan."""
        return bool(self._look(
            "SELECT 1 FROM leases WHERE status <> 'TERMINATED' AND "
            "conditions LIKE '%Orphaned%' LIMIT 1") or any(
            self._look(f"SELECT 1 FROM leases WHERE project_id = '{one}' AND "
                       f"status NOT IN ('TERMINATED', 'ERROR') LIMIT 1")
            for one in self.gone))


class Owners:
    """Users who change the owner or the lease of a server.

    :param core: a :class:`tests.simulation.world.Core`
    """

    def __init__(self, core: ty.Any) -> None:
        self._core = core
        self._cloud: clouds.Cloud = core.world.cloud
        self._port: clouds.Port = core.world.port
        self._baton: batons.Baton = core.world.baton

    def _running(self, leased: bool) -> list[clouds.Server]:
        """Return servers that were not booted into a reservation."""
        there = [one for one in self._cloud.servers.values() if (
            one.state is clouds.State.RUNNING and one.leased == leased and
            one.host is not None and not one.busy and not one.deleting and
            one.reservation is None and one.within is None)]
        if not there:
            raise errors.NotFound('no such server')
        return there

    def join(self, request: requests.LeaseRequest,
             lease: dict[str, ty.Any] | None) -> None:
        """Add running servers to a lease, or create one for them."""
        servers = self._running(False)
        first = self._baton.dice.choice(servers)
        servers = [one for one in servers if one.project == first.project][
            :self._baton.dice.choice([1, 1, 3])]
        if any(one.host is None or one.id not in one.host.allocations
               for one in servers):
            raise errors.Conflict('not in placement yet')
        if lease is not None and lease['project_id'] != first.project:
            raise errors.NotFound('another project')
        joiners = [members.NewMember(
            one.id, one.host.uuid, dict(one.host.allocations[one.id]))
            for one in servers if one.host is not None]
        own = self._core.leases.members
        wanted = own.reservations(joiners)
        self._baton.point('join')
        for one in servers:
            # An image must include servers that run at that time.
            one.ran_at = self._baton.now
        if lease is None:
            lease = own.create(new_leases.NewLease(
                first.project, 'user', request, wanted), joiners)
        else:
            own.join(lease['id'], joiners, wanted, None)
        for one in servers:
            one.leased, one.ran_at = True, self._baton.now
        self._baton.tell(f'{", ".join(one.id for one in servers)} comes '
                         f'under lease {lease["id"][:8]}')

    def leave(self) -> None:
        """Remove a server from its lease; it stays on its host."""
        server = self._baton.dice.choice(self._running(True))
        booked = self._core.leases.lookup.booked(server.id)
        if booked is None:
            raise errors.NotFound('no lease')
        self._port.release(server.id)
        try:
            self._core.lifecycle.server_removal.leave(
                booked[0], [server.id],
                lambda _id: server.host is not None)
        except errors.Conflict:
            server.leased = True
            raise
        self._baton.tell(f'{server.id} leaves lease {booked[0][:8]}')

    def hand_over(self, lease: dict[str, ty.Any]) -> None:
        """Transfer a lease with slots to the other project."""
        if any(one['resource_type'] in (whole.HOSTS, 'virtual:stack')
               for one in lease['reservations']):
            raise errors.NotFound('no lease that is transferred')
        looked = self._core.leases.transfer.look(lease['id'])
        project, = {*PROJECTS} - {looked.owner.project_id}
        self._baton.point('hand over')
        # If the answer is lost, an operator has to revoke the trusts.
        self._cloud.promised.difference_update(one for one, in (
            self._core.world.look(f"SELECT encrypted FROM credentials "
                                  f"WHERE lease_id = '{lease['id']}'")))
        _lease, given = self._core.leases.transfer.transfer(
            lease['id'], looked.generation, transfer.Owner(project, 'user'),
            None, False)
        for one in given:
            self._port.revoke(one)
        self._baton.tell(f'lease {lease["id"][:8]} is of {project} now')


def window_of_waiting(baton: batons.Baton, window: model.Window,
                      ) -> dict[str, ty.Any]:
    """Return how long a lease may wait for capacity."""
    dice = baton.dice
    return {'retry': requests.Retry(dice.choice([30, 300, 1200]),
                                    dice.choice([1, 3, 6])),
            'duration': dice.choice([None, window.end - window.start])}
