# SPDX-License-Identifier: Apache-2.0

"""A simulation of Nova and placement, as far as the core needs them.

It implements :class:`blazar_core.plugins.cloud_api.Cloud`, and what the
reservation database receives: hosts, allocations and notifications. Its
operations take time, and may fail, be lost or be duplicated.
"""

import collections
import dataclasses
import enum
import json
import typing as ty

from blazar_core.common import errors
from blazar_core.plugins import cloud_api
from tests.simulation import baton as batons
from tests.simulation import faults

Seen = cloud_api.ObservedServer
Amounts: ty.TypeAlias = dict[str, int]


class State(enum.Enum):
    """States of a server.

    HELD waits for its lease, READY for a conductor; the others are those of
    the core.
    """

    HELD = 'held'
    READY = 'ready'
    BUILDING = 'building'
    RUNNING = 'running'
    ERROR = 'error'
    GONE = 'gone'


@dataclasses.dataclass(eq=False)
class Host:
    """A compute node with its allocations in placement.

    :ivar enrolled: whether placement keeps unreserved servers off it
    :ivar opened: the reservations whose servers it admits
    :ivar dirty: whether a server was there since it was cleaned
    :ivar cleaned_by: how many cleanings are under way
    :ivar down: whether its nova-compute does not report
    :ivar forced_down: whether an operator has forced its service down
    :ivar left: the servers that were evacuated from it meanwhile
    :ivar on: whether it is switched on
    :ivar up_at: when its nova-compute reports that was switched on
    :ivar silent_at: when it was switched off
    :ivar disabled: whether its service is, for being switched off
    """

    uuid: str
    name: str
    capacity: Amounts
    there: bool = True
    allocations: dict[str, Amounts] = dataclasses.field(default_factory=dict)
    enrolled: bool = False
    opened: set[str] = dataclasses.field(default_factory=set)
    dirty: bool = False
    cleaned_by: int = 0
    down: bool = False
    forced_down: bool = False
    left: set[str] = dataclasses.field(default_factory=set)
    on: bool = True
    up_at: float = 0
    silent_at: float = 0
    disabled: bool = False

    def is_up(self, now: float) -> bool:
        """Whether its nova-compute reports."""
        return self.there and self.on and not self.down and now >= self.up_at

    def admits(self, server: 'Server', lent: bool = False) -> bool:
        """Return whether placement offers it to a server.

        :param lent: whether it is asked for enrolled hosts, as there is no
            other for the server
        """
        return self.enrolled == (
            lent or server.pooled or server.within is not None) and (
                server.within is None or server.within in self.opened)

    def free(self) -> collections.Counter[str]:
        """Return what can still be claimed in placement."""
        left = collections.Counter(self.capacity)
        for one in self.allocations.values():
            left.subtract(one)
        return left

    def fits(self, amounts: Amounts) -> bool:
        left = self.free()
        return self.there and all(
            left[rc] >= amount for rc, amount in amounts.items())


class Resize(ty.NamedTuple):
    """A resize: what the server had before, and the consumer that keeps it."""

    source: Host
    amounts: Amounts
    kept_as: str


@dataclasses.dataclass(eq=False)
class Server:
    """A server, from its request until its deletion.

    :ivar reservation: the reservation whose flavor it was booted with
    :ivar within: the reservation whose hosts it is restricted to
    :ivar pooled: whether it requires an enrolled host
    :ivar unasked: whether it was admitted while the reservation database was
        unavailable
    :ivar forced: the host that an admin named
    :ivar kept: whether its owner wants it to stay on its host
    :ivar preemptible: whether it may be migrated although it has a lease
    :ivar interruptible: whether it may be evicted
    :ivar recurs: whether it is kept from one occurrence to the next
    :ivar busy: whether a compute works on it, except to delete it
    :ivar rest: how it is kept after its lease
    :ivar copies: the leases at whose ends an image of it was created
    :ivar asked: how often each action was requested for the end of each lease
    :ivar images: the number of its images by event
    :ivar ran_at: since when it has run
    :ivar released: whether it no longer belongs to a lease
    :ivar casts: how often a conductor was asked to build it
    :ivar tried: how often no host was found for it
    :ivar abandoned: whether its failure is recorded although a conductor may
        still build it
    :ivar soft_deleted: whether its user has deleted it, and may restore it
    :ivar is_rescued: whether its user has rescued it
    :ivar before: its resize, until that is confirmed or reverted
    :ivar deletions: when its deletion was requested, by any user
    """

    id: str
    project: str
    amounts: Amounts
    state: State
    since: float
    leased: bool = False
    reservation: str | None = None
    within: str | None = None
    pooled: bool = False
    unasked: bool = False
    forced: str | None = None
    kept: bool = False
    preemptible: bool = False
    interruptible: bool = False
    recurs: bool = False
    host: Host | None = None
    unplaced: bool = False
    launched: bool = False
    deleting: bool = False
    busy: bool = False
    rest: cloud_api.RestingState | None = None
    copies: set[str] = dataclasses.field(default_factory=set)
    asked: collections.Counter[tuple[str | None, str]] = dataclasses.field(
        default_factory=collections.Counter)
    images: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter)
    ran_at: float | None = None
    released: bool = False
    casts: int = 0
    tried: int = 0
    abandoned: bool = False
    soft_deleted: bool = False
    is_rescued: bool = False
    before: Resize | None = None
    deletions: list[float] = dataclasses.field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Return whether it is in a cell, on its host."""
        return self.state in (State.BUILDING, State.RUNNING)


@dataclasses.dataclass(eq=False)
class Request:
    """A conductor's request to a scheduler.

    :ivar state: that of the server; if the server is in another one, the
        answer is ignored
    :ivar target: the only host that is allowed
    :ivar takes: what the server would have; None: as it is
    :ivar given_up: whether the conductor has stopped waiting
    """

    server: Server
    state: State = State.READY
    target: Host | None = None
    takes: Amounts | None = None
    host: Host | None = None
    answered: bool = False
    taken: bool = False
    given_up: bool = False

    @property
    def amounts(self) -> Amounts:
        return self.server.amounts if self.takes is None else self.takes

    @property
    def is_wanted(self) -> bool:
        return self.server.state is self.state and not self.given_up

    @property
    def may_be_lent(self) -> bool:
        """Return whether a scheduler asks placement for enrolled hosts if
        there is no other.
        """
        server = self.server
        return self.is_wanted and self.target is None and (
            server.forced is None and server.within is None and (
                not server.pooled))

    def admits(self, host: Host, lent: bool = False) -> bool:
        """Return whether a host is a candidate according to placement.

        :param lent: see :meth:`Host.admits`
        """
        server = self.server
        return not host.down and host.on and not host.disabled and (
            host.fits(self.amounts)) and (
            self.target is host if self.target is not None else
            server.forced == host.uuid if server.forced is not None else
            host.admits(server, lent))


class Cloud:
    """The cloud, as all processes see it.

    :ivar lends: whether enrolled hosts are lent
    :ivar open: the reservations whose flavors exist, and their projects
    :ivar given: the credentials that users have given
    :ivar promised: the credentials that leases have
    :ivar notifications: when each arrives, of which server and host
    :ivar wrong: violations that the cloud itself finds
    :ivar against: by host, when capacity was last taken regardless of
        bookings, and the total that was taken
    :ivar opening: called for each host that is opened to a reservation
    :ivar cleaning: called for each host that is about to be cleaned for one
    """

    def __init__(self, baton: batons.Baton, faults: faults.Faults) -> None:
        self.baton = baton
        self.faults = faults
        self.lends = False
        self.hosts: dict[str, Host] = {}
        self.servers: dict[str, Server] = {}
        self.open: dict[str, str] = {}
        self.given: set[str] = set()
        self.promised: set[str] = set()
        #: The number of changes of which it has notified.
        self.version = 0
        self.questions: list[Request] = []
        self.notifications: list[tuple[float, str, str | None]] = []
        #: Casts that no conductor has taken yet.
        self.queue: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.against: dict[str, tuple[float, int]] = {}
        self.opening: ty.Callable[[Host, str], None] = lambda *_of: None
        self.cleaning: ty.Callable[[Host, str], None] = lambda *_of: None
        self.conductor = batons.Process(baton, 'conductor', self._conduct)
        #: Runs the work of the hosts, and does not die.
        self._computes = batons.Process(
            baton, 'compute', lambda _process: None, mortal=False)

    def is_moving(self) -> bool:
        """Return whether a server is new or being deleted."""
        return any(server.deleting or server.since > self.baton.now - 1800
                   for server in self.servers.values())

    # -- hosts and servers -------------------------------------------------

    def add_host(self, name: str, capacity: Amounts) -> Host:
        host = Host(f'uuid-{name}', name, capacity)
        self.hosts[host.uuid] = host
        return host

    def change_host(self, host: Host, capacity: Amounts, there: bool) -> None:
        """Change the capacity of a host, or remove it."""
        self.act_against(host, host.capacity)
        host.capacity, host.there = capacity, there
        self.version += 1
        self.baton.tell(f'{host.name} has {capacity} now' if there else
                        f'{host.name} goes')

    def fail_host(self, host: Host, forced: bool) -> None:
        """Let a host fail; its servers stay on it."""
        host.down, host.forced_down = True, forced
        self.baton.tell(f'{host.name} fails')

    def recover(self, host: Host) -> None:
        """Let a host that has failed continue."""
        host.down = host.forced_down = False
        for server_id in host.left:
            host.allocations.pop(server_id, None)
        host.left.clear()
        self.baton.tell(f'{host.name} is back')

    def _until_up(self, host: Host | None) -> None:
        self.baton.wait(lambda: host is None or not host.down, 1e9)

    def open_host(self, host: Host, reservation_id: str) -> None:
        """Admit the servers of a reservation to a host."""
        self.opening(host, reservation_id)
        host.opened.add(reservation_id)

    def clean(self, host: Host, reservation_id: str) -> list[bool]:
        """Begin to clean a host; the caller may die meanwhile.

        :returns: whether it is clean, as soon as that is known
        """
        self.cleaning(host, reservation_id)
        over: list[bool] = []
        host.cleaned_by += 1
        if host.cleaned_by > 1:
            self.wrong.append(f'two clean {host.name}')
        self.baton.tell(f'{host.name} is being cleaned')

        def work() -> None:
            self.baton.let_pass(self.faults.pause('clean'))
            host.cleaned_by -= 1
            over.append(not (host.down or self.faults.happens('call fails')))
            if over[0]:
                host.dirty = False

        self._computes.spawn(f'clean-{host.name}', work)
        return over

    def act_against(self, host: Host, amounts: ty.Mapping[str, int],
                    ) -> None:
        """Take capacity from a host, regardless of its bookings."""
        _when, before = self.against.get(host.uuid, (0, 0))
        self.against[host.uuid] = self.baton.now, before + amounts['VCPU']

    def new_server(self, project: str, amounts: Amounts, state: State,
                   **more: ty.Any) -> Server:
        number = len(self.servers) + 1
        server = Server(f'server-{number:05}', project, amounts, state,
                        self.baton.now, **more)
        self.servers[server.id] = server
        return server

    def cast(self, server_ids: ty.Iterable[str]) -> None:
        """Ask a conductor to build the servers of one request."""
        when = self.baton.now + self.faults.pause('cast')
        for server_id in server_ids:
            server = self.servers[server_id]
            server.casts += 1
            if server.casts - server.tried > 1:
                self.baton.tell(f'{server_id} is asked for once more')
                if server.reservation is not None:
                    self.wrong.append(f'{server_id} has a slot, and its build '
                                      f'is sent twice')
            if self.faults.happens('cast lost'):
                self.baton.tell(f'the build of {server_id} is lost')
                continue
            self.queue.append((when, server_id))
            self.baton.alarm(when)

    def _conduct(self, process: batons.Process) -> None:
        def take() -> None:
            while True:
                self.baton.wait(self._is_due, 3600)
                while self._is_due():
                    one = next(one for one in self.queue
                               if one[0] <= self.baton.now)
                    self.queue.remove(one)
                    server_id = one[1]
                    process.spawn(f'build-{server_id}',
                                  lambda one=server_id: self._build(one))

        process.spawn('queue', take)

    def _is_due(self) -> bool:
        return any(when <= self.baton.now for when, _one in self.queue)

    def _build(self, server_id: str) -> None:
        server = self.servers[server_id]
        self.baton.point('build')
        if server.state in (State.BUILDING, State.RUNNING):
            self.wrong.append(f'{server_id} was built twice')
        if server.state is not State.READY:
            return
        question = self.ask(Request(server))
        host = question.host
        if server.state is not State.READY:
            if server.state is not State.GONE and not server.abandoned:
                self.wrong.append(f'{server_id} was built twice')
            self.free(server)
            return
        if host is None:
            server.tried += 1
            self.fail(server, unplaced=question.answered)
            return
        server.state, server.host = State.BUILDING, host
        self._mark_dirty(server)
        self.baton.let_pass(self.faults.pause('build'))
        self._until_up(host)
        if server.state is not State.BUILDING:
            self.free(server)
            return
        if self.faults.happens('build fails'):
            self.fail(server)
            return
        if self.faults.happens('build elsewhere'):
            host = self.elsewhere(server, host)
        server.state, server.launched = State.RUNNING, True
        server.ran_at = self.baton.now
        self.baton.tell(f'{server_id} runs on {host.name}')
        self.notify(server_id, host.uuid)

    def ask(self, question: Request) -> Request:
        """Let a scheduler answer a request, which may not happen."""
        self.questions.append(question)
        self.baton.wait(lambda: question.answered, 60)
        if question in self.questions:
            self.questions.remove(question)
        question.given_up = not question.answered
        return question

    def elsewhere(self, server: Server, host: Host) -> Host:
        """Move a server to another host without asking a scheduler.

        An enrolled host only gets servers of its reservation.
        """
        for other in self.hosts.values():
            if other is not host and other.fits(server.amounts) and (
                    other.admits(server) and not server.pooled):
                other.allocations[server.id] = host.allocations.pop(
                    server.id, dict(server.amounts))
                # For a moment the reservation database counts it twice: in the
                # open-ended usage, and as the booking that has followed.
                for _time in range(2):
                    self.act_against(other, server.amounts)
                server.host = other
                self._mark_dirty(server)
                self.baton.tell(f'{server.id} goes to {other.name} instead')
                return other
        return host

    def _mark_dirty(self, server: Server) -> None:
        """Mark the whole host of a server as dirty."""
        if server.within and server.host and not server.unasked:
            server.host.dirty = True

    def fail(self, server: Server, unplaced: bool = False) -> None:
        server.state, server.unplaced = State.ERROR, unplaced
        host, server.host = server.host, None
        self.free(server)
        self.baton.tell(f'{server.id} could not be built' + (
            ': there is no host for it' if unplaced else ''))
        self.notify(server.id, host.uuid if host else None)

    def free(self, server: Server) -> None:
        """Remove all allocations of a server."""
        for host in self.hosts.values():
            host.allocations.pop(server.id, None)
        if server.before is not None:
            server.before.source.allocations.pop(server.before.kept_as, None)
            server.before = None

    def delete(self, server: Server) -> None:
        """Delete a server for its user or its lease."""
        if server.state in (State.HELD, State.READY) or (
                server.is_there and server.host and server.host.down):
            # Nova deletes a server on a host that is down at once.
            server.state = State.GONE
            self.free(server)
            self.notify(server.id, None)
            return
        if server.state is State.GONE or server.deleting:
            return
        server.deleting = True
        self._computes.spawn(f'delete-{server.id}', lambda: self._go(server))

    def soft_delete(self, server: Server) -> None:
        """Soft-delete a server for its user, unless it is busy."""
        if server.state is State.RUNNING and server.rest is None and not (
                server.deleting or server.busy or server.soft_deleted):
            self.confirm(server)
            server.soft_deleted = True
            server.deletions.append(self.baton.now)
            self.baton.tell(f'{server.id} is soft-deleted')
            self.notify(server.id, None)

    def restore(self, server: Server) -> None:
        """Restore a soft-deleted server."""
        if server.soft_deleted and not server.deleting and (
                server.state is State.RUNNING):
            server.soft_deleted, server.ran_at = False, self.baton.now
            self.baton.tell(f'{server.id} is restored')
            self.notify(server.id, None)

    def rescue(self, server: Server) -> bool:
        """Rescue a server for its user; return False if Nova refuses that."""
        if server.state is not State.RUNNING or server.rest is not None or (
                server.deleting or server.busy or server.soft_deleted or
                server.is_rescued or server.before or server.host is None or
                server.host.down):
            return False
        server.is_rescued = True
        self.baton.tell(f'{server.id} is rescued')
        self.notify(server.id, None)
        return True

    def unrescue(self, server: Server) -> bool:
        """Unrescue a server for its lease; return whether that was started.
        """
        def work() -> None:
            server.is_rescued = False

        return server.is_rescued and self._do(server, 'unrescued', work)

    def confirm(self, server: Server) -> bool:
        """Confirm the resize of a server; return False if there is none."""
        resize, server.before = server.before, None
        if resize is None:
            return False
        resize.source.allocations.pop(resize.kept_as, None)
        self.baton.tell(f'the resize of {server.id} is confirmed')
        for host in (resize.source, server.host):
            self.notify(server.id, host and host.uuid)
        return True

    def _go(self, server: Server) -> None:
        self.baton.let_pass(self.faults.pause('delete'))
        host = server.host
        self._until_up(host)
        server.deleting = False
        if server.state is State.GONE or self.faults.happens('delete fails'):
            return
        server.state = State.GONE
        if self.faults.happens('allocation late'):
            self.baton.let_pass(self.faults.pause('delete'))
        self.free(server)
        self.baton.tell(f'{server.id} is gone')
        self.notify(server.id, host.uuid if host else None)

    def leave(self, server: Server, seconds: float) -> None:
        """Let the user delete a server after some seconds."""
        def work() -> None:
            while server.state is not State.GONE:
                self.delete(server)
                self.baton.let_pass(600)

        self.baton.later(seconds, work)

    def set_resting_state(self, server: Server, rest: cloud_api.RestingState,
                          ) -> bool:
        """Shelve, stop or suspend a server for its lease; return whether that
        was started.
        """
        def work() -> None:
            server.rest = rest
            if rest is cloud_api.RestingState.SHELVED:
                server.host = None
                self.free(server)

        return self._do(server, rest.value, work)

    def create_image(self, server: Server, lease_id: str, event: str) -> bool:
        """Create an image of a server at an event or at a lease's end; return
        whether that was started.
        """
        return event not in server.images and self._do(
            server, 'copied', lambda: server.images.update([event])
            if event else server.copies.add(lease_id))

    def engage(self, server: Server, what: str,
               work: ty.Callable[[], None]) -> bool:
        """Start work on a server unless it is busy.

        :returns: whether the work was started
        """
        if server.state is not State.RUNNING or server.deleting or (
                server.busy or server.soft_deleted or
                server.host and server.host.down):
            return False
        server.busy = True
        self.start(f'{what}-{server.id}', work)
        return True

    def start(self, name: str, work: ty.Callable[[], None]) -> None:
        """Start work of a compute."""
        self._computes.spawn(name, work)

    def _do(self, server: Server, what: str, work: ty.Callable[[], None],
            ) -> bool:
        """Let a compute work on a server for some time, unless it is busy;
        return whether it does.
        """
        def do() -> None:
            self.baton.let_pass(self.faults.pause('delete'))
            self._until_up(server.host)
            server.busy = False
            if server.state is not State.RUNNING or self.faults.happens(
                    'delete fails'):
                return
            host = server.host
            work()
            self.baton.tell(f'{server.id} is {what}')
            self.notify(server.id, host.uuid if host else None)

        return self.engage(server, 'keep', do)

    # -- notifications -----------------------------------------------------

    def notify(self, server_id: str, host: str | None) -> None:
        """Notify listeners, unless the notification is lost."""
        if server_id:
            self.version += 1
        for seconds in self.faults.arrivals():
            when = self.baton.now + seconds
            self.notifications.append((when, server_id, host))
            self.baton.alarm(when)

    def has_notification(self) -> bool:
        return any(one[0] <= self.baton.now for one in self.notifications)

    def next_notification(self) -> tuple[str, str | None] | None:
        """Take a notification that has arrived."""
        for one in self.notifications:
            if one[0] <= self.baton.now:
                self.notifications.remove(one)
                return one[1], one[2]
        return None


class Port:
    """The cloud as the core calls it.

    Implements :class:`blazar_core.plugins.cloud_api.Cloud`.

    :ivar ending: called for each server that is deleted
    :ivar evicting: called for each server that is evicted, with the action
    """

    def __init__(self, cloud: Cloud) -> None:
        self.ending: ty.Callable[[str], None] = lambda server_id: None
        self.evicting: ty.Callable[[Server, str], None] = lambda *_of: None
        self._cloud = cloud
        self._baton = cloud.baton

    def call(self, what: str) -> None:
        """Let a call take time or fail before it does anything."""
        self._baton.point(what)
        if self._cloud.faults.happens('call hangs'):
            self._baton.let_pass(self._cloud.faults.pause('call'))
        if self._cloud.faults.happens('call fails'):
            raise errors.CloudUnavailable(f'{what} was not answered')

    def answer(self, what: str) -> None:
        """Let the answer of a call be lost after it was carried out."""
        self._baton.point(what)
        if self._cloud.faults.happens('call untold'):
            raise errors.CloudUnavailable(f'the answer to {what} was lost')

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: cloud_api.Gate) -> str:
        self.call('send')
        ready = []
        for server_id in json.loads(call)['servers']:
            server = self._cloud.servers[server_id]
            if server_id not in server_ids:
                continue
            if server.state is State.ERROR and server.unplaced:
                server.state, server.unplaced = State.HELD, False
            if server.state in (State.HELD, State.READY):
                server.state = State.READY
                ready.append(server_id)
        self._baton.point('send ready')
        if not ready:
            return ''
        deadline = gate(ready)
        self._baton.point('send gate')
        if deadline is None or deadline.passed():
            return ''
        if credential is not None and credential not in self._cloud.given:
            self._cloud.wrong.append(
                f'{credential} was revoked before the build')
        self._cloud.cast(ready)
        self._baton.tell(f'sends {", ".join(ready)}')
        self.answer('sent')
        return ''

    def send_slots(self, call: str, apart: bool, gate: cloud_api.Gate) -> None:
        """See :meth:`blazar_nova.compat.nova_cloud.Lookup.send_slots`."""
        server_ids = json.loads(call)['servers']
        for server_id in server_ids:
            self._cloud.servers[server_id].pooled = apart
        self.send(call, None, server_ids, gate)

    def hold(self, server_ids: ty.Collection[str]) -> None:
        self.call('hold')
        for server_id in server_ids:
            server = self._cloud.servers[server_id]
            if server.state is State.READY:
                server.state = State.HELD

    def revoke(self, credential: str) -> None:
        self.call('revoke')
        self._cloud.given.discard(credential)
        self.answer('revoked')

    def credentials(self) -> set[str]:
        self.call('credentials')
        return set(self._cloud.given)

    def traces(self, server_ids: ty.Collection[str],
               ) -> dict[str, cloud_api.BuildTrace]:
        self.call('traces')
        waiting = [one for _when, one in self._cloud.queue]
        if waiting and not self._baton.wait(
                lambda: not {*waiting} & {
                    one for _when, one in self._cloud.queue}, 10):
            raise errors.CloudUnavailable('no conductor answers')
        return {server.id: cloud_api.BuildTrace.CAUGHT if any(
            server.id in host.allocations for host in
            self._cloud.hosts.values()) else cloud_api.BuildTrace.NONE
            for server_id in server_ids if (
                server := self._cloud.servers[server_id]).state in (
                    State.READY, State.BUILDING) and (
                        not self._is_at_it(server))}

    def _is_at_it(self, server: Server) -> bool:
        """Return whether its build has arrived at a compute."""
        return server.state is State.BUILDING and any(
            task.name.endswith(f'build-{server.id}')
            for task in self._cloud.conductor.tasks)

    def mark_failed(self, server_id: str) -> None:
        self.call('mark_failed')
        server = self._cloud.servers[server_id]
        if server.state in (State.READY, State.BUILDING) and (
                not self._is_at_it(server)):
            server.abandoned = True
            self._cloud.fail(server)
        self.answer('marked failed')

    def look(self, server_id: str) -> Seen:
        self.call('look')
        return self.seen(server_id)

    def seen(self, server_id: str) -> Seen:
        """Return what can be observed of a server now."""
        server = self._cloud.servers.get(server_id)
        if server is None or server.state is State.GONE:
            return Seen(cloud_api.ServerState.LEAVING if server and any(
                server_id in host.allocations
                for host in self._cloud.hosts.values())
                else cloud_api.ServerState.GONE)
        host = server.host.uuid if server.host is not None else None
        if server.state is State.ERROR and not server.launched:
            return Seen(cloud_api.ServerState.ERROR, host, 'no reason',
                        server.unplaced)
        if server.soft_deleted:
            return Seen(cloud_api.ServerState.LEAVING, host)
        return Seen({State.HELD: cloud_api.ServerState.HELD,
                     State.READY: cloud_api.ServerState.BUILDING,
                     State.BUILDING: cloud_api.ServerState.BUILDING,
                     }.get(server.state, cloud_api.ServerState.RUNNING), host,
                    rest=server.rest, busy=server.busy,
                    resized=server.before is not None,
                    blocked=server.is_rescued)

    def delete(self, server_id: str, credential: str | None,
               check: cloud_api.Check = cloud_api.always) -> None:
        self.call('delete')
        self.ending(server_id)
        server = self._cloud.servers.get(server_id)
        if server is not None and server.is_there:
            check()
        if server is not None and not self.is_early(server):
            self.evicts(server, 'delete')
            server.deletions.append(self._baton.now)
            server.asked[None, 'delete'] += 1
            self._cloud.delete(server)
        self.answer('deleted')

    def evicts(self, server: Server, action: str) -> None:
        """Tell of a request for a server, if it is an eviction."""
        task = self._baton.current
        if server.interruptible and task is not None and (
                task.name.endswith('.evictions')):
            self.evicting(server, action)

    def is_early(self, server: Server) -> bool:
        """Return whether a deletion requested by an end waits for another one.

        Deletions by users do not count, see
        :mod:`blazar_nova.compat.server_deletion`.
        """
        return server.deleting

    def set_resting_state(self, server_id: str, rest: cloud_api.RestingState,
                          credential: str | None, lease_id: str = '',
                          check: cloud_api.Check = cloud_api.always) -> None:
        self.call('set_resting_state')
        check()
        server = self._cloud.servers[server_id]
        _refuse_rescued(server)
        if self._cloud.set_resting_state(server, rest):
            self.evicts(server, rest.value)
            server.asked[lease_id, rest.value] += 1
        self.answer('resting state set')

    def create_image(self, server_id: str, lease_id: str, name: str,
                     credential: str | None, event: str = '', label: str = '',
                     check: cloud_api.Check = cloud_api.always) -> None:
        self.call('create_image')
        check()
        server = self._cloud.servers[server_id]
        _refuse_rescued(server)
        if self._cloud.create_image(server, lease_id, event) and not event:
            server.asked[lease_id, 'image'] += 1
        self.answer('copied')

    def unblock(self, server_id: str, lease_id: str,
                check: cloud_api.Check = cloud_api.always) -> None:
        self.call('unblock')
        check()
        server = self._cloud.servers[server_id]
        if self._cloud.unrescue(server):
            server.asked[lease_id, 'unrescue'] += 1
        if not server.busy and not server.deleting and (
                self._cloud.confirm(server)):
            server.asked[lease_id, 'confirm'] += 1
        self.answer('unblocked')

    def reset_lost_task(self, server_id: str,
                        check: cloud_api.Check = cloud_api.always) -> None:
        self.call('reset_lost_task')

    def requests(self, server_id: str, lease_id: str) -> dict[str, int]:
        self.call('requests')
        return {what: count for (lease, what), count in
                self._cloud.servers[server_id].asked.items()
                if lease in (lease_id, None)}

    def has_image(self, server_id: str, lease_id: str,
                  credential: str | None, event: str = '') -> bool:
        self.call('is copied')
        server = self._cloud.servers[server_id]
        return event in server.images if event else (
            lease_id in server.copies)

    def release(self, server_id: str) -> None:
        self.call('release')
        server = self._cloud.servers[server_id]
        if not server.released and not server.recurs:
            # Nothing else deletes it.
            self._cloud.leave(server, self._baton.dice.uniform(0, 7200))
        server.reservation = server.within = None
        server.pooled, server.leased, server.released = False, False, True
        self.answer('released')

    def forget(self, server_id: str) -> None:
        self.call('forget')


def _refuse_rescued(server: Server) -> None:
    if server.is_rescued or server.before:
        raise errors.CloudRefusal('Nova refuses: it is rescued or resized.')
