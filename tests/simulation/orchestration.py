# SPDX-License-Identifier: Apache-2.0

"""A Heat that works on stacks in its own time, fails, and leaves them half
created.

Its engine is a process like all others. It boots the servers of a stack into
their reservations, creates its volumes and checks its floating IPs.
"""

import json
import random
import typing as ty

from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.plugins import resource_types
from blazar_nova.resource_types import stack_templates
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import users
from tests.simulation import world as worlds
from tests.unit.blazar_nova import fake_network
from tests.unit.blazar_nova import test_stacks

STACK = 'virtual:stack'
#: The token of a user.
OWN = 'own'
#: The most seconds for which the engine rests.
PAUSE = 60
_LEASES = (f"SELECT spec, leases.status, start_date FROM reservations "
           f"JOIN leases ON leases.id = lease_id "
           f"WHERE resource_type = '{STACK}'")


class Flavors(worlds.Places):
    """Reservations of a flavor; its id is the number of its VCPUs."""

    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'flavor_id': '"1"'}

    def read(self, values: resource_types.Values) -> resource_types.Values:
        return {'amount': values['amount'], 'affinity': None,
                'vcpus': int(values['flavor_id']), 'among': 'common'}


class Owners:
    """Owners of leases, each with a trust until it is revoked."""

    def __init__(self, world: worlds.World) -> None:
        self._world = world

    def encrypt(self, text: str) -> str:
        return text

    def decrypt(self, encrypted: str) -> str:
        return encrypted

    def token(self, lease_id: str) -> str:
        self._world.port.call('token')
        for trust, in self._world.look(
                f"SELECT encrypted FROM credentials "
                f"WHERE lease_id = '{lease_id}'"):
            if trust in self._world.cloud.given:
                return ty.cast(str, trust)
        raise errors.TrustUnavailable('It is revoked.')


class Heat(test_stacks.FakeHeat):
    """A Heat whose engine is :meth:`run`.

    :ivar complete: how many stacks it has created completely
    """

    def __init__(self, world: worlds.World, network: fake_network.FakeNetwork,
                 cinder: ty.Any) -> None:
        super().__init__()
        self._world = world
        self._dice = random.Random(f'heat {world.baton.seed}')
        self._network = network
        self._cinder = cinder
        #: By path: the project and the resources of the last update.
        self._wanted: dict[str, tuple[str, dict[str, ty.Any]]] = {}
        self._servers: dict[str, list[clouds.Server]] = {}
        self.complete = 0

    # -- the API -----------------------------------------------------------

    def _calls(self, method: str, token: str, project_id: str) -> None:
        if token not in (OWN, *self._world.cloud.given):
            raise errors.CloudUnavailable(f'Heat refuses: {method} (401).')

    def update(self, token: str, project_id: str, path: str,
               body: dict[str, ty.Any]) -> None:
        found = self.stacks.get(path)
        if found is None or found.status.endswith('_IN_PROGRESS'):
            raise errors.CloudUnavailable('Heat refuses: 404 or 409.')
        for _status, start in self._leases(path):
            if start > self._world.baton.now + self._world.faults.ahead:
                self._world.cloud.wrong.append(
                    f'stack {path} is filled before its lease starts')
        super().update(token, project_id, path, body)
        self._wanted[path] = project_id, body['template']['resources']

    def delete(self, token: str, project_id: str, path: str) -> None:
        if path in self.stacks:
            super().delete(token, project_id, path)

    def _leases(self, path: str) -> ty.Iterator[tuple[str, int]]:
        """Yield the status and the start of the lease of a stack."""
        its_id = path.partition('/')[2]
        for spec, status, start in self._world.look(_LEASES):
            if json.loads(spec).get('stack_id') == its_id:
                yield status, start

    def left(self) -> ty.Iterator[str]:
        """Yield the stacks whose lease has ended. One without a lease, whose
        request died, belongs to its user and has no resources.
        """
        for path, found in self.stacks.items():
            if path in self._wanted and not [*self._leases(path)] or any(
                    status == states.Lease.TERMINATED
                    for status, _start in self._leases(path)):
                yield f'stack {path} is left: {found.status}'

    # -- the engine --------------------------------------------------------

    def run(self, core: worlds.Core) -> None:
        """Work on all stacks in progress, one after the other."""
        def found() -> list[str]:
            return [path for path, one in self.stacks.items()
                    if one.status.endswith('_IN_PROGRESS')]

        while True:
            self._world.baton.wait(lambda: bool(found()), worlds.REST)
            self._world.baton.let_pass(self._dice.uniform(1, PAUSE))
            for path in found():
                if self.stacks[path].status == 'DELETE_IN_PROGRESS':
                    self._go_on_deleting(path)
                else:
                    self._fill(core, path)

    def _fill(self, core: worlds.Core, path: str) -> None:
        """Create the resources of a stack, until one fails."""
        project, resources = self._wanted[path]
        why = 'it was deleted meanwhile.'
        try:
            for one in resources.values():
                self._make(core, path, project, one)
        except users.ANSWERS as exc:
            why = str(exc)
        else:
            if self._world.faults.happens('build fails'):
                why = 'a server is in ERROR.'
            elif self.stacks[path].status == 'UPDATE_IN_PROGRESS':
                self.become(path, 'UPDATE_COMPLETE')
                self.complete += 1
                return
        if self.stacks[path].status == 'UPDATE_IN_PROGRESS':
            self.become(path, 'UPDATE_FAILED', reason=why)
        self._world.baton.tell(f'stack {path} fails: {why}')

    def _make(self, core: worlds.Core, path: str, project: str,
              one: dict[str, ty.Any]) -> None:
        its = one.get('properties', {})
        if one['type'] == stack_templates.SERVER:
            self._servers.setdefault(path, []).append(users.boot_in(
                core, its['flavor'], project, 1))
        elif one['type'] == stack_templates.VOLUME:
            if not self._cinder.create(
                    project, its['volume_type'], its['size']):
                raise errors.Conflict('Cinder refuses the volume.')
        else:
            address = self._network.found.get(one['external_id'])
            if address is None or address.project_id != project:
                raise errors.Conflict('There is no such floating IP.')

    def _go_on_deleting(self, path: str) -> None:
        """Delete the servers of a stack, and then itself."""
        there = [one for one in self._servers.get(path, ())
                 if one.state is not clouds.State.GONE]
        for server in there:
            self._world.cloud.delete(server)
        if there:
            return
        if self._world.faults.happens('delete fails'):
            self.become(path, 'DELETE_FAILED', reason='It is in use.')
            return
        del self.stacks[path]
        self._world.baton.tell(f'stack {path} is gone at '
                               f'{self._world.baton.now - batons.START:.0f}')
