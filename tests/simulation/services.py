# SPDX-License-Identifier: Apache-2.0

"""Networks and storage of neutron and cinder that hang, fail and are half
done.

The resource types are the real ones. Each call to a service may take long, be
refused, or be carried out although its answer is lost; cinder deletes volumes
in its own time, and users put them into every state.
"""

import contextlib
import random
import types
import typing as ty

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_nova.compat import network_api
from blazar_nova.listener import host_sync
from blazar_nova.resource_types import networks
from blazar_nova.resource_types import volumes
from tests.simulation import baton as batons
from tests.simulation import owners
from tests.simulation import world as worlds
from tests.unit.blazar_nova import fake_network
from tests.unit.blazar_nova import test_volumes

__all__ = ['Services']

NETWORK, VOLUME = 'virtual:network', 'virtual:volume'
#: The enrolled volume types, and the GiB of each.
ENROLLED, CAPACITY = ('fast', 'slow'), 100
#: Seconds between two looks at the enrolled capacity.
PAUSE = 300
#: Seconds after a fault in which something may be open too long.
EXCUSED = 1500
_USED = {'status': 'in-use', 'servers': ('unknown',)}
_STATES: tuple[dict[str, ty.Any], ...] = (
    {}, {}, _USED, {'status': 'reserved'}, {'status': 'awaiting-transfer'},
    {'group_id': 'group'})


class _Port:
    """A service as the resource types see it: any call may fail."""

    def __init__(self, world: worlds.World, service: ty.Any) -> None:
        self._world = world
        self._service = service

    def __getattr__(self, name: str) -> ty.Any:
        work = getattr(self._service, name)

        def call(*args: ty.Any) -> ty.Any:
            self._world.port.call(name)
            found = work(*args)
            self._world.port.answer(name)
            return found

        return call


class _Cinder(test_volumes.FakeCinder):
    """A cinder that deletes volumes in its own time.

    :param later: has a function called some time later
    """

    def __init__(self, later: ty.Callable[[ty.Callable[[], None]], None],
                 ) -> None:
        super().__init__()
        self._later = later

    def delete_volume(self, volume_id: str) -> None:
        super().delete_volume(volume_id)
        self._later(self.finish)


class Services:
    """Neutron and cinder of a world, and the users of both.

    It has dice of its own, so that all other seeds tell the same story.

    :ivar used: how many networks and volumes there were
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._baton = world.baton
        self._dice = random.Random(f'services {world.baton.seed}')
        clock = types.SimpleNamespace(now=lambda: int(world.baton.now))
        self._neutron = fake_network.FakeNetwork(clock)
        self._neutron.tags_at_once = True
        self._cinder = _Cinder(lambda work: world.baton.later(
            self._dice.uniform(1, 300), work))
        for name in ENROLLED:
            self._cinder.enroll(name, f'{name}-kind', CAPACITY)
        network, volume = networks.Networks(), volumes.Volumes()
        network.network = ty.cast(ty.Any, _Port(world, self._neutron))
        volume.cinder = ty.cast(ty.Any, _Port(world, self._cinder))
        volume.detach = lambda _server, _volume: False
        self._kinds = {NETWORK: network, VOLUME: volume}
        world.types.named.update(self._kinds)  # type: ignore[attr-defined]
        world.checks.append(self)
        self.used = 0

    # -- processes ---------------------------------------------------------

    def sync(self, core: worlds.Core) -> None:
        """Record what is enrolled, as a listener does."""
        pools = host_sync.HostSync(ty.cast(ty.Any, types.SimpleNamespace(
            database=core.database, clock=core.clock,
            types=self._world.types)))

        def apart(_what: str, work: ty.Callable[..., None],
                  *args: ty.Any) -> bool:
            with contextlib.suppress(errors.CloudUnavailable,
                                     errors.ConcurrentUpdate):
                work(*args)
            return True

        while True:
            with contextlib.suppress(errors.DatabaseUnavailable):
                pools.compare_pools(apart)
            self._baton.let_pass(PAUSE)
            if len(self._world.look(
                    "SELECT 1 FROM hosts WHERE pool LIKE 'virtual:%'")) == 5:
                self._baton.wait(lambda: False, worlds.REST)

    def ask(self, core: worlds.Core, until: float) -> None:
        """Request, change, use and delete leases."""
        while self._baton.now < until:
            self._baton.let_pass(self._dice.expovariate(1 / 60))
            with contextlib.suppress(
                    errors.Refused, errors.NotFound, errors.Conflict,
                    errors.ConcurrentUpdate, errors.InvalidLeaseParams,
                    errors.DatabaseUnavailable, errors.LimitExceeded):
                self._dice.choice((self._lease, self._lease, self._change,
                                   self._delete))(core)
            self._use()

    def _lease(self, core: worlds.Core) -> None:
        start = core.clock.now() + self._dice.choice([0, 0, 60, 600])
        window = model.Window(start, start + self._dice.randint(30, 1200))
        wanted = self._dice.choice([[NETWORK], [VOLUME], [NETWORK, VOLUME]])
        lease = core.leases.creation.create(new_leases.NewLease(
            self._dice.choice(owners.PROJECTS), 'user', requests.LeaseRequest(
                name='services', window=window, before_end=None, events=(),
                on_end='delete', starts_now=start == core.clock.now()),
            tuple(self._reservation(one) for one in wanted)), None)
        self._tell(lease, ', '.join(
            f'{one["resource_type"]} {one["params"].get("size", "")}'
            for one in lease['reservations']))

    def _tell(self, lease: dict[str, ty.Any], what: str) -> None:
        self._baton.tell(
            f'lease {lease["id"][:8]} is from '
            f'{lease["start_date"] - batons.START} to '
            f'{lease["end_date"] - batons.START}: {what}')

    def _reservation(self, name: str) -> new_leases.NewReservation:
        kind = self._kinds[name]
        params = kind.read({} if name == NETWORK else {
            'size': self._dice.choice([10, 50, CAPACITY])})
        return new_leases.NewReservation(
            kind.requirements(None, params).demand, resource_type=name,
            params=params, spec={})

    def _some(self) -> str:
        found = self._world.look(
            "SELECT id FROM leases WHERE name = 'services' AND status IN "
            "('PENDING', 'STARTING', 'ACTIVE') ORDER BY id")
        if not found:
            raise errors.NotFound('no lease')
        return ty.cast(str, self._dice.choice(found)[0])

    def _change(self, core: worlds.Core) -> None:
        self._tell(core.leases.updates.update(
            self._some(), updates.LeaseChange(
                end=core.clock.now() + self._dice.randint(1, 1200))),
            'changed')

    def _delete(self, core: worlds.Core) -> None:
        core.lifecycle.lease_end.delete(self._some())

    def _use(self) -> None:
        """Do what members of a project may do with what they have."""
        for one in self._cinder.types():
            for project in owners.PROJECTS:
                if self._dice.random() < 0.5 and self._cinder.create(
                        project, one.name, 10,
                        **self._dice.choice(_STATES)):
                    self.used += 1
        for its_id in list(self._neutron.made):
            if not self._neutron.ports(its_id):
                self.used += 1
                self._neutron.of_network[its_id] = [network_api.Port(
                    f'port of {its_id}', '', '')]

    # -- what must hold ----------------------------------------------------

    def __call__(self) -> None:
        """Check that no more storage is open than is enrolled."""
        if self._world.faults.last > self._baton.now - EXCUSED:
            return
        for name in ENROLLED:
            opened = sum(
                self._cinder.limits.get((project, one.name), 0)
                for one in self._cinder.types()
                if one.extra_specs.get('blazar:volume_type') == name
                for project in self._cinder.access[one.id])
            if opened > CAPACITY:
                self._world.cloud.wrong.append(
                    f'{opened} GiB of {name} can be used')

    def left(self) -> ty.Iterator[str]:
        """Return what is left when all leases have ended."""
        for one in self._neutron.made.values():
            yield f'network {one.name} is left'
        for kind in self._cinder.types():
            if kind.id not in ENROLLED:
                yield f'volume type {kind.name} is left'
        for its_id in self._cinder.volumes:
            yield f'volume {its_id} is left'
