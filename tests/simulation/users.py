# SPDX-License-Identifier: Apache-2.0

"""Users of a cloud with leases, who send requests at the worst moment."""

import dataclasses
import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.leases import events
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import updates
from blazar_core.leases import views
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import fault_points
from blazar_core.plugins import cloud_api
from tests.simulation import asking
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import delaying
from tests.simulation import owners
from tests.simulation import whole
from tests.simulation import world as worlds

#: The requests and their weights.
WEIGHTS = {
    'lease_now': 10, 'lease_later': 14, 'reserve': 10, 'offer': 4,
    'boot_in': 12, 'boot': 8, 'prolong': 8, 'shorten': 6, 'move': 6,
    'resize': 8, 'delete_lease': 8, 'delete_server': 12,
    'lease_hosts': 14, 'boot_within': 18, 'wait': 10, 'join': 8, 'leave': 4,
    'hand_over': 5, 'extend': 4, 'best_effort': 6, 'recur': 4, 'stop': 1,
    'delay': 12}
#: The same for users who come all at once.
EAGER = {
    'lease_now': 5, 'lease_later': 20, 'reserve': 15, 'offer': 2,
    'boot_in': 10, 'boots': 30, 'both': 30, 'lease_hosts': 25,
    'boot_within': 40, 'delete_server': 5, 'wait': 15, 'join': 15, 'leave': 5,
    'extend': 5, 'best_effort': 12, 'recur': 6, 'stop': 2, 'delay': 12}

#: The expected errors.
ANSWERS = (errors.Refused, errors.LimitExceeded, errors.InvalidLeaseParams,
           errors.NotFound, errors.Conflict, errors.ConcurrentUpdate,
           errors.DatabaseUnavailable, errors.CloudUnavailable)

Amounts: ty.TypeAlias = dict[str, int]

#: Seconds by which leases are extended automatically.
PERIODS = (301, 901, 3601)
#: The end policies of servers, and of those on whole hosts.
ENDS = ('delete',) * 4 + ('snapshot,delete', 'shelve', 'stop', 'release',
                          'stop,snapshot,shelve')
ENDS_OF_HOSTS = ('delete', 'delete', 'recycle', 'recycle', 'shelve',
                 'snapshot,delete')


class Users:
    """The requests to one API process.

    :param moments: when requests are sent
    :param eager: whether several are sent at a time, many of them at the
        moment at which a lease starts or ends
    """

    def __init__(self, core: worlds.Core,
                 moments: ty.Sequence[float], eager: bool) -> None:
        self._eager = eager
        self._weights = EAGER if eager else WEIGHTS
        self._core = core
        self._world = core.world
        self._baton = core.world.baton
        self._cloud = core.world.cloud
        self._dice = core.world.baton.dice
        self._moments = moments
        self._owners = owners.Owners(core)
        self._asking = asking.Asking(core)

    def run(self) -> None:
        for number, moment in enumerate(self._moments):
            if moment >= self._baton.now:
                self._baton.let_pass(moment - self._baton.now)
                self._core.process.spawn(f'request{number}', self._want)

    def _want(self) -> None:
        name, = self._dice.choices(
            list(self._weights), list(self._weights.values()))
        self._try(name, getattr(self, name))

    def _try(self, name: str, work: ty.Callable[..., None], *args: ty.Any,
             ) -> None:
        try:
            work(*args)
        except ANSWERS as exc:
            self._baton.tell(f'{name}: {type(exc).__name__}')

    def _project(self) -> str:
        return self._dice.choice(self._world.keystone.projects())

    # -- leases ------------------------------------------------------------

    def _window(self, now: bool, longest: int = 86400) -> model.Window:
        longest = min(longest, 1800) if self._eager else longest
        start = self._core.clock.now() + (
            0 if now else min(longest, self._dice.choice(
                [1, 60, 3600, 14400, 86400])) + self._dice.randint(0, 600))
        return model.Window(start, start + min(longest, self._dice.choice(
            [30, 600, 3600, 14400, 86400])) + self._dice.randint(1, 600))

    def _request(self, window: model.Window, now: bool, **more: ty.Any,
                 ) -> requests.LeaseRequest:
        return requests.LeaseRequest(**{
            'name': 'lease', 'window': window, 'on_end': self._dice.choice(
                ENDS), 'starts_now': now, 'auto_extend': self._dice.choice(
                    [0] * 8 + [*PERIODS]), **self._events(window), **more})

    def _events(self, window: model.Window) -> dict[str, ty.Any]:
        """Return events of a lease, some of which create images."""
        image, times = states.Action.SNAPSHOT, [
            self._dice.randrange(window.start, window.end)
            for _which in range(3)]
        return {'events': tuple(
            requests.EventRequest(f'mine{number}', time, image)
            for number, time in enumerate(times[:2])
            if self._dice.random() < 0.2), 'before_end_action': image,
            'before_end': times[2] if self._dice.random() < 0.2 else None}

    def _amounts(self, large: bool = False) -> Amounts:
        # A bit more than is free on any host.
        free = max(host.capacity['VCPU'] - sum(
            one['VCPU'] for one in host.allocations.values())
            for host in self._cloud.hosts.values() if not host.enrolled
        ) if large else 0
        return {'VCPU': min(8, max(1, free + self._dice.choice([1, 2, 3])))
                if large else self._dice.choice([1, 1, 2, 4])}

    def _demand(self, amounts: Amounts, count: int) -> model.Demand:
        """Return the demand of the servers of a boot."""
        return model.Demand(amounts, count, among=self._world.among(count))

    def _booted(self, state: clouds.State, credential: str | None = None,
                large: bool = False,
                ) -> tuple[new_leases.NewLease, list[clouds.Server]]:
        amounts, count = self._amounts(large), self._dice.choice([1, 1, 2])
        project, now = self._project(), state is clouds.State.READY
        servers = [self._cloud.new_server(
            project, amounts, state, preemptible=self._dice.random() < 0.3,
            # For a server that waits, the periodic sync searches its lease.
            leased=not now) for _number in range(count)]
        return new_leases.NewLease(
            project, 'user', self._request(
                self._window(now, 1200 if large else 86400), now),
            (new_leases.NewReservation(
                self._demand(amounts, count),
                tuple(one.id for one in servers)),),
            credential=credential), servers

    def lease_now(self) -> None:
        new, servers = self._booted(clouds.State.READY)
        try:
            lease = self._core.leases.creation.create(
                new, worlds.call_of(servers), dispatch.HEAD_START)
        except Exception:
            for server in servers:
                server.state = clouds.State.GONE
            raise
        for server in servers:
            server.leased = True
        self._accepted(lease)
        self._baton.point('send')
        self._core.lifecycle.dispatch.send_own(lease, functools.partial(
            self._cast, [one.id for one in servers]))

    def _cast(self, server_ids: list[str], gate: cloud_api.Gate) -> None:
        deadline = gate(server_ids)
        self._baton.point('send gate')
        if deadline is not None and not deadline.passed():
            self._cloud.cast(server_ids)

    def lease_later(self) -> None:
        credential = None
        if self._dice.random() < 0.5:
            credential = f'credential-{len(self._cloud.servers) + 1}'
            self._cloud.given.add(credential)
        new, servers = self._booted(clouds.State.HELD, credential)
        try:
            self._core.leases.creation.check(new)
            lease = self._core.leases.creation.create(
                new, worlds.call_of(servers))
        except errors.DatabaseUnavailable:
            # The lease may have been committed: the servers stay.
            raise
        except Exception:
            for server in servers:
                server.state = clouds.State.GONE
            raise
        if credential is not None:
            self._cloud.promised.add(credential)
        self._accepted(lease)

    def _places(self, amount: int, large: bool = False,
                ) -> new_leases.NewReservation:
        among = self._dice.choice([model.HostPool.COMMON, model.HostPool.ALL])
        return self._places_of({
            'amount': amount, 'vcpus': self._dice.choice([1, 2])
            if not large else self._amounts(True)['VCPU'], 'affinity': None,
            'among': among.value})

    def _places_of(self, params: dict[str, ty.Any],
                   ) -> new_leases.NewReservation:
        return new_leases.NewReservation(
            model.Demand({'VCPU': params['vcpus']}, params['amount'],
                         among=model.HostPool(params['among'])),
            params=params, spec={})

    def _hosts_of(self, least: int, most: int) -> new_leases.NewReservation:
        params = {'min': least, 'max': most}
        return new_leases.NewReservation(
            self._world.types.named[whole.HOSTS].requirements(
                None, params).demand,
            resource_type=whole.HOSTS, params=params, spec={})

    def lease_hosts(self) -> None:
        now = self._dice.random() < 0.5
        # There are few hosts, and many events are needed on them.
        window = self._window(now, 1200)
        self._lease_hosts(window, now, self._dice.choice([0, 0, 60, 900]))
        for _next in range(self._dice.choice([0, 2]) if self._eager else 0):
            # A lease that starts at the moment at which the hosts become free.
            (start,), = self._world.look(
                f"SELECT max(bookings.end_date) FROM bookings "
                f"JOIN reservations "
                f"ON reservations.id = bookings.reservation_id "
                f"WHERE reservations.resource_type = '{whole.HOSTS}'")
            self._lease_hosts(model.Window(
                start, start + self._dice.randint(60, 600)), False, 0)

    def _lease_hosts(self, window: model.Window, now: bool, grace: int,
                     ) -> None:
        self._accepted(self._core.leases.creation.create(new_leases.NewLease(
            self._project(), 'user', self._request(
                window, now, grace_period=grace,
                on_end=self._dice.choice(ENDS_OF_HOSTS)),
            (self._hosts_of(1, self._dice.choice([1, 2])),)), None))

    def reserve(self) -> None:
        now = self._dice.random() < 0.5
        lease = self._core.leases.creation.create(new_leases.NewLease(
            self._project(), 'user', self._request(self._window(now), now),
            (self._places(self._dice.choice([1, 2, 3])),)), None)
        self._accepted(lease)
        if now:
            # It was created to boot servers in it.
            self._baton.let_pass(self._dice.choice([10, 60]))
            for number in range(2):
                self._core.process.spawn(f'slot{number}', functools.partial(
                    self._try, 'boot_in', self._boot_in, lease))

    def wait(self) -> None:
        """Create a lease that waits for capacity if necessary."""
        self._seek(owners.window_of_waiting, False)

    def best_effort(self) -> None:
        """Create leases for which servers are migrated if necessary."""
        for _other in range(self._dice.choice([0, 2, 4])):
            self._cloud.leave(self.boot(), self._dice.uniform(300, 3600))
        self._baton.let_pass(self._dice.choice([0, 60, 120]))
        for number in range(self._dice.choice([1, 1, 2, 3])):
            self._core.process.spawn(f'effort{number}', functools.partial(
                self._try, 'best_effort', self._seek,
                asking.window_of_moves, True))

    def _seek(self, how: ty.Callable[
            [batons.Baton, model.Window], dict[str, ty.Any]], large: bool,
    ) -> None:
        if self._dice.random() < 0.5:
            new, servers = self._booted(clouds.State.HELD, large=large)
            encrypted: str | None = worlds.call_of(servers)
        else:
            now = self._dice.random() < 0.5
            new, servers, encrypted = new_leases.NewLease(
                self._project(), 'user', self._request(
                    self._window(now, 1200 if large else 86400), now),
                (self._hosts_of(1, self._dice.choice([1, 2]))
                 if large and self._dice.random() < 0.5 else
                 self._places(self._dice.choice([1, 2, 3]), large),)
            ), [], None
        new = dataclasses.replace(new, request=dataclasses.replace(
            new.request, **how(self._baton, new.request.window)))
        try:
            lease = self._core.leases.creation.create(new, encrypted)
        except errors.DatabaseUnavailable:
            # The lease may have been committed: the servers stay.
            raise
        except Exception:
            for server in servers:
                server.state = clouds.State.GONE
            raise
        self._accepted(lease)

    def recur(self) -> None:
        """Create a recurring lease, with servers or slots."""
        booted = self._dice.random() < 0.7
        asked = asking.recurrence(
            self._baton, self._window(False, 1800), booted)
        self._accepted(self._asking.recur(
            self._project(), self._request(
                asked.windows[0], False, recurrence=asked, auto_extend=0),
            new_leases.NewReservation(self._demand(
                self._amounts(), self._dice.choice([1, 1, 2])))
            if booted else self._places(self._dice.choice([1, 2]))))

    def stop(self) -> None:
        self._asking.stop()

    def delay(self) -> None:
        delaying.delay(self._world)

    def offer(self) -> None:
        offered = self._core.leases.creation.offer(new_leases.NewLease(
            self._project(), 'user', self._request(self._window(False), False),
            (self._places(1),)), 120)
        self._baton.let_pass(self._dice.choice([1, 110, 130]))
        self._accepted(self._core.leases.creation.accept(offered['id']))

    def _accepted(self, lease: dict[str, ty.Any]) -> None:
        self._baton.tell(
            f'lease {lease["id"][:8]} from {self._when(lease["start_date"])} '
            f'to {self._when(lease["end_date"])}')

    def _when(self, seconds: int) -> int:
        return seconds - batons.START

    def _lease(self, *states: str, of: str | None = None) -> ty.Any:
        """Return a lease that has not ended.

        :param of: the resource type of its reservation
        :raises NotFound: if there is none
        """
        with self._core.database.reader() as session:
            ids = list(session.scalars(sa.select(models.Lease.id).where(
                models.Lease.status.in_(states or (
                    'PENDING', 'STARTING', 'ACTIVE')),
                models.Lease.deleted_at.is_(None), sa.true()
                if of is None else models.Lease.reservations.any(
                    resource_type=of)).order_by(models.Lease.id)))
        if not ids:
            raise errors.NotFound('no lease')
        lease = views.get(self._core.database, self._dice.choice(ids))
        if lease['end_date'] <= lease['start_date']:
            raise errors.NotFound('it is over by now, and never began')
        period, window = lease['auto_extend'], model.Window(
            lease['start_date'], lease['end_date'])
        soon = [seconds for when in (window.start, window.end, *(
            [events.extension(window, period)] * (4 if period else 0)))
            if 0 < (seconds := when - self._core.clock.now()) < (
            1800 if self._eager else 600)]
        if soon and self._dice.random() < (0.8 if self._eager else 0.3):
            # At the moment at which it starts, ends, or is extended.
            early = self._dice.random() * self._dice.choice([0.05, 1])
            self._baton.let_pass(self._dice.choice(soon) - early)
        return lease

    def both(self) -> None:
        """Send two different requests for a lease, or the same twice."""
        lease, names = self._lease(), self._dice.choices((
            'prolong', 'shorten', 'move', 'resize', 'delete_lease',
            'extend', 'hand_over', 'boot_in', 'boot_in', 'boot_in'), k=2)
        if self._dice.random() < 0.4:
            # Requests that conflict with each other, or with the lease itself.
            if lease['auto_extend']:
                names = ['prolong', 'shorten']
            elif lease['status'] == 'ACTIVE' and (
                    lease['reservations'][0]['params']):
                names = ['hand_over', 'boot_in']
        for name in names:
            self._core.process.spawn(name, functools.partial(
                self._try, name, getattr(self, f'_{name}'), lease))

    def _update(self, lease: ty.Any, **change: ty.Any) -> None:
        self._core.leases.updates.update(
            lease['id'], updates.LeaseChange(**change))
        self._baton.tell(f'lease {lease["id"][:8]} is changed: '
                         f'{sorted(change)}')

    def prolong(self) -> None:
        self._prolong(self._lease())

    def _prolong(self, lease: ty.Any) -> None:
        self._update(lease, end=lease['end_date'] + self._dice.choice(
            [1, 600, 7200]))

    def shorten(self) -> None:
        self._shorten(self._lease())

    def _shorten(self, lease: ty.Any) -> None:
        low = max(lease['start_date'] + 1, self._core.clock.now())
        self._update(lease, end=max(low, lease['end_date'] -
                                    self._dice.choice([1, 600, 7200])))

    def move(self) -> None:
        self._move(self._lease('PENDING'))

    def _move(self, lease: ty.Any) -> None:
        later = self._dice.choice([-600, -1, 1, 600])
        self._update(lease, start=lease['start_date'] + later,
                     end=lease['end_date'] + later)

    def resize(self) -> None:
        self._resize(self._lease())

    def _resize(self, lease: ty.Any) -> None:
        one = lease['reservations'][0]
        if one['params'] is None or one['resource_type'] not in (
                new_leases.RESOURCE_TYPE, whole.HOSTS):
            raise errors.NotFound('servers of a boot, or no servers')
        amount = self._dice.choice([1, 2, 3])
        self._update(lease, reservations={
            one['id']: self._hosts_of(amount, amount)
            if one['resource_type'] == whole.HOSTS else
            self._places_of({**one['params'], 'amount': amount})})

    def extend(self) -> None:
        self._extend(self._lease())

    def _extend(self, lease: ty.Any) -> None:
        self._update(lease, auto_extend=self._dice.choice([0, *PERIODS]))

    def hand_over(self) -> None:
        self._hand_over(self._lease())

    def _hand_over(self, lease: ty.Any) -> None:
        self._owners.hand_over(lease)

    def join(self) -> None:
        self._owners.join(
            self._request(self._window(True), True),
            self._lease('ACTIVE') if self._dice.random() < 0.3 else None)

    def leave(self) -> None:
        self._owners.leave()

    def delete_lease(self) -> None:
        self._delete_lease(self._lease())

    def _delete_lease(self, lease: ty.Any) -> None:
        self._core.lifecycle.lease_end.delete(lease['id'])
        self._baton.tell(f'lease {lease["id"][:8]} is deleted')

    # -- servers -----------------------------------------------------------

    def boot_in(self) -> None:
        self._boot_in(self._lease('ACTIVE'))

    def _boot_in(self, lease: ty.Any) -> None:
        one = lease['reservations'][0]
        _check_open(self._cloud, one['id'])
        # Users of any project may try.
        project = self._dice.choice([lease['project_id'], self._project()])
        boot_in(self._core, one['id'], project, one['params']['vcpus'],
                self._dice.random() < 0.3)

    def boot_within(self) -> None:
        lease = self._lease('ACTIVE', of=whole.HOSTS)
        one = lease['reservations'][0]
        project = self._dice.choice([lease['project_id'], self._project()])
        why = self._core.leases.lookup.why_not_within(one['id'], project)
        if why is None and self._core.leases.slots.use(one['id']):
            why = self._core.leases.lookup.why_not_within(one['id'], project)
        if why is not None:
            raise errors.InvalidLeaseParams(why)
        for _number in range(self._dice.choice([1, 3]) if self._eager else 1):
            server = self._cloud.new_server(
                project, self._amounts(), clouds.State.READY,
                within=one['id'])
            self._cloud.cast([server.id])
            if lease['on_end'] == 'recycle':
                # Nothing else deletes it.
                self._cloud.leave(server, self._dice.uniform(0, 1800))

    def boot(self) -> clouds.Server:
        forced = self._dice.choice(
            [None, None, None, *self._cloud.hosts]) if (
                self._dice.random() < 0.2) else None
        server = self._cloud.new_server(
            self._project(), self._amounts(), clouds.State.READY,
            # The image of any user may have the property that placement reads.
            forced=forced, pooled=self._dice.random() < 0.1,
            kept=self._dice.random() < 0.2)
        self._cloud.cast([server.id])
        return server

    def boots(self) -> None:
        """Boot many servers at once that are soon deleted."""
        servers = [self._cloud.new_server(
            self._project(), {'VCPU': self._dice.choice([1, 2, 4])},
            clouds.State.READY) for _number in range(self._dice.randint(4, 9))]
        self._cloud.cast([one.id for one in servers])
        for server in servers:
            self._cloud.leave(server, self._dice.uniform(0, 600))

    def delete_server(self) -> None:
        there = [one for one in self._cloud.servers.values()
                 if one.state is not clouds.State.GONE]
        if there:
            server = self._dice.choice(there)
            self._baton.tell(f'{server.id} is deleted by its user')
            self._cloud.delete(server)


def boot_in(core: worlds.Core, reservation_id: str, project: str, vcpus: int,
            preemptible: bool = False) -> clouds.Server:
    """Boot a server into a reservation, as nova-api does it."""
    cloud, slots = core.world.cloud, core.leases.slots
    _check_open(cloud, reservation_id)
    server = cloud.new_server(
        project, {'VCPU': vcpus}, clouds.State.READY,
        reservation=reservation_id, preemptible=preemptible)
    try:
        server.pooled = slots.take(
            reservation_id, project, [server.id], worlds.call_of([server]))
    except errors.OutcomeUnknown:
        # A listener may be building it.
        if not server.casts and server.state is clouds.State.READY:
            server.state = clouds.State.HELD
        raise
    except Exception:
        server.state = clouds.State.GONE
        raise
    server.leased = True
    fault_points.fault_point(fault_points.FaultPoint.SLOT_TAKEN, server.id)
    if slots.take_permit(server.id):
        fault_points.fault_point(fault_points.FaultPoint.SLOT_DISPATCHED,
                                 server.id)
        cloud.cast([server.id])
    return server


def _check_open(cloud: clouds.Cloud, reservation_id: str) -> None:
    """Check that the flavor of a reservation exists.

    :raises NotFound: if it does not
    """
    if reservation_id not in cloud.open:
        raise errors.NotFound('no flavor')
