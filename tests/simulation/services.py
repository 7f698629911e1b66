# SPDX-License-Identifier: Apache-2.0

"""Neutron, cinder and Heat, which hang, fail and leave things half done.

The resource types are the real ones. Each call to a service may take long, be
refused, or be carried out although its answer is lost; cinder deletes volumes
in its own time, and Heat works on stacks as :mod:`.orchestration` describes.
Users put volumes into every state, change the tags of their floating IPs and
delete their stacks; others take addresses that are enrolled.
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
from blazar_nova.resource_types import floating_ips
from blazar_nova.resource_types import networks
from blazar_nova.resource_types import reservation_requests
from blazar_nova.resource_types import stacks
from blazar_nova.resource_types import volumes
from blazar_nova.services import address_enrollment
from blazar_nova.services import lease_trusts
from tests.simulation import baton as batons
from tests.simulation import orchestration
from tests.simulation import owners
from tests.simulation import world as worlds
from tests.unit.blazar_nova import fake_network
from tests.unit.blazar_nova import test_stacks
from tests.unit.blazar_nova import test_volumes

NETWORK, VOLUME = 'virtual:network', 'virtual:volume'
ADDRESS, STACK = floating_ips.NAME, orchestration.STACK
#: The enrolled volume types, and the GiB of each.
ENROLLED, CAPACITY = ('fast', 'slow'), 100
#: The enrolled addresses, and all hosts of pools: three segments, the volume
#: types, and Heat.
ADDRESSES = ('203.0.113.10', '203.0.113.11', '203.0.113.12')
HOSTS = 3 + len(ENROLLED) + 1 + len(ADDRESSES)
#: Seconds between two looks at the enrolled capacity.
PAUSE = 300
#: Seconds after a fault in which something may be open too long.
EXCUSED = 1500
#: Seconds within which a project has what it reserved, and nothing else.
LATE = 600
#: The hosts of neutron that leases have, with their projects and starts.
_HELD = (f"SELECT hosts.name, project_id, leases.start_date, leases.status, "
         f"host_failed_at FROM bookings "
         f"JOIN hosts ON hosts.id = bookings.host_id "
         f"JOIN reservations ON reservations.id = bookings.reservation_id "
         f"JOIN leases ON leases.id = reservations.lease_id "
         f"WHERE pool IN ('{NETWORK}', '{ADDRESS}')")
_UNUSABLE = (f"SELECT uuid FROM hosts WHERE pool = '{ADDRESS}' "
             f"AND capacity = '{{}}'")
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

        def call(*args: ty.Any, **more: ty.Any) -> ty.Any:
            self._world.port.call(name)
            found = work(*args, **more)
            self._world.port.answer(name)
            return found

        return call


class _Neutron(fake_network.FakeNetwork):
    """A neutron in which a port or a floating IP has an address, not both."""

    def allocate(self, network_id: str, address: str, project_id: str) -> str:
        if address in self.taken:
            raise errors.CloudRefusal('Neutron refuses: in use.')
        return super().allocate(network_id, address, project_id)

    def tag(self, collection: str, its_id: str, reservation_id: str) -> None:
        if its_id not in self.found | self.made:
            raise errors.CloudRefusal('Neutron refuses: 404.')
        super().tag(collection, its_id, reservation_id)


class _Cinder(test_volumes.FakeCinder):
    """A cinder that deletes volumes in its own time.

    :param later: has a function called some time later
    """

    def __init__(self, later: ty.Callable[[ty.Callable[[], None]], None],
                 ) -> None:
        super().__init__()
        self._later = later

    def delete_volume(self, volume_id: str, forced: bool) -> None:
        super().delete_volume(volume_id, forced)
        self._later(self.finish)


class Services:
    """Neutron, cinder and Heat of a world, and their users.

    It has dice of its own, so that all other seeds tell the same story.

    :ivar used: how many networks, volumes and floating IPs were used
    :ivar heat: its engine is a process
    """

    def __init__(self, world: worlds.World) -> None:
        self._world = world
        self._baton = world.baton
        self._dice = random.Random(f'services {world.baton.seed}')
        clock = types.SimpleNamespace(now=lambda: int(world.baton.now))
        self._neutron = _Neutron(clock)
        self._cinder = _Cinder(lambda work: world.baton.later(
            self._dice.uniform(1, 300), work))
        for name in ENROLLED:
            self._cinder.enroll(name, f'{name}-kind', CAPACITY)
        self.heat = orchestration.Heat(world, self._neutron, self._cinder)
        network, volume = networks.Networks(), volumes.Volumes()
        address, stack = floating_ips.FloatingIPs(), stacks.Stacks()
        network.network = address.network = stack.network = ty.cast(
            ty.Any, _Port(world, self._neutron))
        volume.cinder = ty.cast(ty.Any, _Port(world, self._cinder))
        volume.detach = lambda *_args: False
        stack.heat = ty.cast(ty.Any, _Port(world, self.heat))
        stack.flavor_id = lambda _context, name: name
        stack.owners = orchestration.Owners(world)
        world.types.named.update({  # type: ignore[attr-defined]
            NETWORK: network, VOLUME: volume, ADDRESS: address, STACK: stack,
            'flavor:instance': orchestration.Flavors(world)})
        world.checks.append(self)
        self.used = self._trusts = 0
        #: Projects that have what they may not have, or lack what they should
        #: have, each with the host, and since when.
        self._differ: dict[tuple[str, str], float] = {}

    # -- processes ---------------------------------------------------------

    def sync(self, core: worlds.Core) -> None:
        """Record what is enrolled, as a listener does."""
        pools = host_sync.HostSync(
            core.database, core.clock, self._world.types)
        enrolling = address_enrollment.AddressEnrollment(
            core.database, core.clock, self._world.types)

        def apart(_what: str, work: ty.Callable[..., None],
                  *args: ty.Any) -> bool:
            with contextlib.suppress(errors.CloudUnavailable,
                                     errors.ConcurrentUpdate):
                work(*args)
            return True

        while True:
            taken = {*self._neutron.taken}
            with contextlib.suppress(errors.DatabaseUnavailable):
                self._enroll(enrolling, apart)
                pools.compare_pools(apart)
            self._baton.let_pass(PAUSE)
            if len(self._world.look(
                    "SELECT 1 FROM hosts WHERE pool LIKE 'virtual:%' AND "
                    "capacity != '{}'")) == HOSTS - len(taken):
                self._baton.wait(
                    lambda: self._neutron.taken != taken, worlds.REST)

    def _enroll(self, enrolling: address_enrollment.AddressEnrollment,
                apart: ty.Callable[..., bool]) -> None:
        """Enroll the addresses that are not, as an operator does."""
        enrolled = {name for name, in self._world.look(
            f"SELECT name FROM hosts WHERE pool = '{ADDRESS}' "
            f"AND enrolled_at IS NOT NULL")}
        for address in sorted({*ADDRESSES} - enrolled):
            with contextlib.suppress(errors.Conflict):
                apart(address, enrolling.add, fake_network.NETWORK, address)

    def ask(self, core: worlds.Core, until: float) -> None:
        """Request, change, use and delete leases."""
        while self._baton.now < until:
            self._baton.let_pass(self._dice.expovariate(1 / 60))
            with contextlib.suppress(
                    errors.Refused, errors.NotFound, errors.Conflict,
                    errors.ConcurrentUpdate, errors.InvalidLeaseParams,
                    errors.DatabaseUnavailable, errors.LimitExceeded,
                    errors.CloudUnavailable):
                self._dice.choice((self._lease, self._lease, self._change,
                                   self._delete))(core)
            self._use()
        self._neutron.taken.clear()

    def _lease(self, core: worlds.Core) -> None:
        now = core.clock.now()
        start = now + self._dice.choice([0, 0, 60, 600])
        window = model.Window(start, start + self._dice.randint(30, 1200))
        wanted = self._dice.choice([
            [NETWORK], [VOLUME], [NETWORK, VOLUME], [ADDRESS], [STACK],
            [ADDRESS, STACK, NETWORK]])
        context = types.SimpleNamespace(
            project_id=self._dice.choice(owners.PROJECTS), user_id='user',
            is_admin=False, auth_token=orchestration.OWN)
        asking = reservation_requests.ReservationRequest(
            context, tuple, self._world.types, lambda _projects: None)
        trust = self._trust() if STACK in wanted else None
        with lease_trusts.prepared(
                self._world.types, context, new_leases.NewLease(
                    context.project_id, 'user', requests.LeaseRequest(
                        name='services', window=window, before_end=None,
                        events=(), on_end='delete',
                        starts_now=start == now),
                    tuple(one for name in wanted
                          for one in asking.new_reservations(
                              self._values(name))), trust)) as new:
            lease = core.leases.creation.create(new, None)
        if trust is not None:
            self._world.cloud.promised.add(trust)
        self._tell(lease, ', '.join(
            f'{one["resource_type"]} {one["params"].get("size", "")}'
            for one in lease['reservations']))

    def _trust(self) -> str:
        self._trusts += 1
        trust = f'trust-{self._trusts}'
        self._world.cloud.given.add(trust)
        return trust

    def _values(self, name: str) -> dict[str, ty.Any]:
        """Return a request for a reservation."""
        found: dict[str, ty.Any] = {'resource_type': name}
        if name == VOLUME:
            found['size'] = self._dice.choice([10, 50, CAPACITY])
        elif name == ADDRESS:
            found |= {'network_id': fake_network.NETWORK,
                      'amount': self._dice.choice([1, 1, 2])}
        elif name == STACK:
            some: dict[str, ty.Any] = {'server': test_stacks.server('1')}
            if self._dice.random() < 0.5:
                some['address'] = test_stacks.floating_ip()
                found['floating_network_id'] = fake_network.NETWORK
            if self._dice.random() < 0.5:
                some |= {'volume': {'type': 'OS::Cinder::Volume',
                                    'properties': {'size': 10}},
                         'other': test_stacks.server('1')}
                found['volume_type'] = f'{ENROLLED[0]}-kind'
            found['template'] = test_stacks.template(**some)
        return found

    def _tell(self, lease: dict[str, ty.Any], what: str) -> None:
        self._baton.tell(
            f'lease {lease["id"][:8]} is from '
            f'{lease["start_date"] - batons.START} to '
            f'{lease["end_date"] - batons.START}: {what}')

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

        for one in list(self._neutron.found.values()):
            self.used += 1
            if self._dice.random() < 0.05:
                self._neutron.change(one.address, reservations=frozenset(
                    self._dice.choice([(), ('another',)])))
        for path in list(self.heat.stacks):
            if self._dice.random() < 0.02:
                self.heat.delete(orchestration.OWN, '', path)
        self._take(self._dice.choice(ADDRESSES))

    def _take(self, address: str) -> None:
        """Let a port of others have an address, or give it back."""
        if address in self._neutron.taken:
            if self._dice.random() < 0.3:
                self._neutron.taken.discard(address)
        elif not self._neutron.floating_ips(floating_ip_address=address) and (
                self._dice.random() < 0.05 and
                self._world.faults.happens('host')):
            self._baton.tell(f'{address} is taken')
            self._neutron.taken.add(address)

    # -- what must hold ----------------------------------------------------

    def __call__(self) -> None:
        """Check that each project has what it has reserved, and no more."""
        wrong = self._world.cloud.wrong
        wrong.extend(self.heat.left())
        for uuid, in self._world.look(_UNUSABLE):
            # Others have it, so that its leases get other addresses.
            self._world.cloud.against[uuid] = self._baton.now, 1
        wrong.extend(self._long(self._differences()))
        if self._world.faults.last > self._baton.now - EXCUSED:
            return
        for name in ENROLLED:
            opened = sum(
                self._cinder.limits.get((project, one.name), 0)
                for one in self._cinder.types()
                if one.extra_specs.get('blazar:volume_type') == name
                for project in self._cinder.access[one.id])
            if opened > CAPACITY:
                wrong.append(f'{opened} GiB of {name} can be used')

    def _differences(self) -> ty.Iterator[tuple[str, str]]:
        """Yield the projects that have a floating IP or network without a
        lease that has started, or lack one of their lease, and its host.
        """
        there = {(one.address, one.project_id)
                 for one in self._neutron.found.values()} | {
            (f'{one.segment.type}:{one.segment.physical or ""}:'
             f'{one.segment.number}', one.project_id)
            for one in self._neutron.made.values()}
        rows = self._world.look(_HELD)
        soon = self._baton.now + self._world.faults.ahead
        yield from there - {(host, project) for
                            host, project, start, *_more in rows
                            if start <= soon}
        yield from {(host, project) for
                    host, project, _start, status, failed in rows
                    if status == 'ACTIVE' and failed is None} - there

    def _long(self, found: ty.Iterable[tuple[str, str]]) -> ty.Iterator[str]:
        """Yield which differences have lasted for too long."""
        now = self._baton.now
        self._differ = {one: self._differ.get(one, now) for one in found}
        for (host, project), since in self._differ.items():
            if now - max(since, self._world.faults.last + EXCUSED) > LATE:
                yield (f'{project} has {host} without a lease, or a lease '
                       f'without it, for {now - since:.0f} s')

    def left(self) -> ty.Iterator[str]:
        """Return what is left when all leases have ended."""
        yield from self.heat.left()
        for address in self._neutron.found.values():
            yield f'floating IP {address} is left'
        for one in self._neutron.made.values():
            yield f'network {one.name} is left'
        for kind in self._cinder.types():
            if kind.id not in ENROLLED:
                yield f'volume type {kind.name} is left'
        for its_id in self._cinder.volumes:
            yield f'volume {its_id} is left'
