# SPDX-License-Identifier: Apache-2.0

"""Base classes of unit tests, with a database, a fake cloud and rows."""

import abc
import collections
import dataclasses
import threading
import time
import typing as ty

from oslo_utils import uuidutils
from oslotest import base
import sqlalchemy as sa

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import api
from blazar_core.db import encryption
from blazar_core.db import models
from blazar_core.healing import alternatives
from blazar_core.healing import evacuation
from blazar_core.healing import maintenance
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import new_leases
from blazar_core.leases import requests
from blazar_core.leases import views
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import handlers
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven

#: 2027-01-15 08:00 UTC, the initial time of a ManualClock.
NOW = 1_800_000_000

#: Seconds after which a build is lost.
LOST_AFTER = 120

State = cloud_api.ServerState


class TestCase(base.BaseTestCase):
    """A test that may have to wait for a thread."""

    def wait_for(self, condition: ty.Callable[[], ty.Any], what: str,
                 timeout: float = 20) -> ty.Any:
        """Wait until a condition is true, and return its value."""
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not (value := condition()):
            if time.monotonic() > deadline:
                self.fail(f'Waited {timeout} s in vain for {what}')
            pause.wait(0.01)
        return value

    def in_thread(self, work: ty.Callable[[], ty.Any]) -> threading.Thread:
        """Start a thread that ends before the test does."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.addCleanup(thread.join, 20)
        return thread


class RefusalTestCase(TestCase):
    """A test of input of users."""

    def assert_refused(self, parts: str | ty.Iterable[str],
                       work: ty.Callable[..., ty.Any], *args: ty.Any) -> None:
        """Check that the input is refused with a sentence."""
        refused = str(self.assertRaises(
            errors.InvalidLeaseParams, work, *args))
        for part in (parts,) if isinstance(parts, str) else parts:
            self.assertIn(part, refused)
        self.assertTrue(refused.endswith('.'), refused)


class FakeCloud:
    """A cloud that carries out each request at once.

    :ivar servers: what is observed of each server; others do not exist
    :ivar sent: the calls that were sent, with their servers
    :ivar sent_with: the credential of each call that was sent
    :ivar given: the valid credentials
    :ivar revoked: the credentials that were revoked
    :ivar stranded: servers whose build was sent and has not arrived, and its
        traces
    :ivar marked_failed: servers whose build was marked as failed
    :ivar admits: how many servers the quota admits; None: all
    :ivar deleted: the servers whose deletion was requested, in order
    :ivar deleted_with: the credential of each of these
    :ivar forgotten: the servers whose records were to be removed
    :ivar held: servers that were marked as reserved again
    :ivar stubborn: servers whose deletion does not succeed
    :ivar rests: the servers to shelve, stop or suspend, with the state, in
        order
    :ivar slow: servers for which neither that nor an image is complete at once
    :ivar copies: the servers of which an image was requested, each with the
        name of its lease
    :ivar copied_at: the images that were requested at events: by server and
        event, the label and the credential
    :ivar released: servers that were released from their lease
    :ivar unblocked: servers that were to leave a state that blocks requests,
        in order
    :ivar lost: servers of whose task nothing is being done
    :ivar requested: by server, how often each action was requested for the
        end of its lease
    :ivar bound: servers that may not be migrated
    :ivar preemptible: servers that may be although they have a lease
    :ivar reach: the hosts to which servers may be migrated; others to all
    :ivar hosts: the UUIDs of all hosts
    :ivar moves: the requested migrations, in order: server and target host
    :ivar broken: by method or server, the exception that is raised
    """

    def __init__(self) -> None:
        self.servers: dict[str, cloud_api.ObservedServer] = {}
        self.sent: list[tuple[str, list[str]]] = []
        self.sent_with: list[str | None] = []
        self.given: set[str] = set()
        self.revoked: list[str] = []
        self.stranded: dict[str, cloud_api.BuildTrace] = {}
        self.marked_failed: list[str] = []
        self.admits: int | None = None
        self.deleted: list[str] = []
        self.deleted_with: list[str | None] = []
        self.forgotten: list[str] = []
        self.held: list[str] = []
        self.stubborn: set[str] = set()
        self.rests: list[tuple[str, cloud_api.RestingState]] = []
        self.slow: set[str] = set()
        self.unshelved: list[str] = []
        self.copies: dict[str, str] = {}
        self.copied_at: dict[tuple[str, str], tuple[str, str | None]] = {}
        self.released: list[str] = []
        self.bound: set[str] = set()
        self.preemptible: set[str] = set()
        self.reach: dict[str, frozenset[str]] = {}
        #: Free VCPUs of hosts that do not have 100.
        self.left: dict[str, int] = {}
        self.hosts: set[str] = set()
        self.moves: list[tuple[str, str | None]] = []
        self.unblocked: list[str] = []
        self.lost: set[str] = set()
        self.requested: dict[str, dict[str, int]] = {}
        self.evacuations: list[tuple[str, str | None]] = []
        self.broken: dict[str, Exception] = {}

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: cloud_api.Gate) -> str:
        self._break('send')
        self.sent_with.append(credential)
        chosen = list(server_ids)[:self.admits]
        deadline = gate(chosen) if chosen else None
        if deadline is not None and not deadline.passed():
            self.sent.append((call, chosen))
            for server_id in chosen:
                self.servers[server_id] = cloud_api.ObservedServer(
                    State.BUILDING)
        return ('' if len(chosen) == len(server_ids) else
                f'The quota admits {self.admits}.')

    def hold(self, server_ids: ty.Collection[str]) -> None:
        self._break('hold')
        self.held += server_ids

    def revoke(self, credential: str) -> None:
        self._break('revoke')
        self.revoked.append(credential)
        self.given.discard(credential)

    def credentials(self) -> set[str]:
        return set(self.given)

    def traces(self, server_ids: ty.Collection[str],
               ) -> dict[str, cloud_api.BuildTrace]:
        self._break('traces')
        return {server_id: self.stranded[server_id]
                for server_id in server_ids if server_id in self.stranded}

    def mark_failed(self, server_id: str) -> None:
        self._break('mark_failed')
        self.marked_failed.append(server_id)
        self.stranded.pop(server_id, None)
        self.servers[server_id] = cloud_api.ObservedServer(
            State.ERROR, fault='It stood still.')

    def look(self, server_id: str) -> cloud_api.ObservedServer:
        self._break('look')
        return self.servers.get(
            server_id, cloud_api.ObservedServer(State.GONE))

    def delete(self, server_id: str, credential: str | None,
               check: cloud_api.Check = cloud_api.always) -> None:
        self._break('delete')
        self._break(server_id)
        if server_id in self.servers:
            check()
        self.deleted.append(server_id)
        self.deleted_with.append(credential)
        if server_id not in self.stubborn:
            self.servers.pop(server_id, None)

    def set_resting_state(self, server_id: str, rest: cloud_api.RestingState,
                          _credential: str | None, _lease_id: str = '',
                          check: cloud_api.Check = cloud_api.always) -> None:
        self._break('set_resting_state')
        self._break(server_id)
        check()
        self.rests.append((server_id, rest))
        if server_id not in self.slow:
            host = self.servers[server_id].host
            self.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, None if rest is cloud_api.RestingState.SHELVED
                else host, rest=rest)

    def unshelve(self, server_id: str, _credential: str | None,
                 deadline: cloud_api.Deadline) -> None:
        self._break('unshelve')
        if deadline.passed():
            raise errors.CloudUnavailable('It is too late.')
        self.unshelved.append(server_id)

    def create_image(self, server_id: str, _lease_id: str, name: str,
                     credential: str | None, event: str = '', label: str = '',
                     check: cloud_api.Check = cloud_api.always) -> None:
        self._break('create_image')
        self._break(server_id)
        check()
        if event:
            self.copied_at[server_id, event] = label, credential
        else:
            self.copies[server_id] = name

    def has_image(self, server_id: str, _lease_id: str,
                  _credential: str | None, event: str = '') -> bool:
        there = (server_id, event) in self.copied_at if event else (
            server_id in self.copies)
        return there and server_id not in self.slow

    def release(self, server_id: str) -> None:
        self._break('release')
        self.released.append(server_id)

    def movable(self, server_ids: ty.Collection[str]) -> dict[str, bool]:
        self._break('movable')
        return {one: one in self.preemptible for one in server_ids
                if one in self.servers and one not in self.bound and
                not self.servers[one].busy}

    def needs(self, server_id: str, lent: bool = False) -> model.Demand:
        self._break('needs')
        return model.Demand({'VCPU': 1}, hosts=self.reach.get(
            server_id, frozenset(self.hosts)))

    def free(self, host: str) -> model.Resources:
        self._break('free')
        return {'VCPU': self.left.get(host, 100)}

    def move(self, server_id: str, host: str | None, _lease_id: str,
             deadline: cloud_api.Deadline) -> str:
        self._break('move')
        return self._take_up(server_id, deadline, self.moves, host)

    def requests(self, server_id: str, _lease_id: str,
                 ) -> ty.Mapping[str, int]:
        self._break('requests')
        return self.requested.get(server_id, {})

    def unblock(self, server_id: str, _lease_id: str,
                check: cloud_api.Check = cloud_api.always) -> None:
        self._break('unblock')
        check()
        self.unblocked.append(server_id)

    def reset_lost_task(self, server_id: str,
                        check: cloud_api.Check = cloud_api.always) -> None:
        self._break('reset_lost_task')
        check()
        if server_id in self.lost:
            self.servers[server_id] = dataclasses.replace(
                self.servers[server_id], busy=False)

    def evacuate(self, server_id: str, _lease_id: str,
                 deadline: cloud_api.Deadline) -> str:
        self._break('evacuate')
        return self._take_up(server_id, deadline, self.evacuations, None)

    def _take_up(self, server_id: str, deadline: cloud_api.Deadline,
                 asked: list[tuple[str, str | None]], host: str | None,
                 ) -> str:
        if server_id in self.broken:
            return str(self.broken[server_id])
        if deadline.passed():
            return 'It is too late.'
        asked.append((server_id, host))
        self.servers[server_id] = dataclasses.replace(
            self.servers[server_id], busy=True)
        return ''

    def arrive(self, server_id: str, host: str | None = None) -> None:
        """Complete a migration of a server, or let it fail.

        :param host: its host now; None: unchanged
        """
        seen = self.servers[server_id]
        self.servers[server_id] = dataclasses.replace(
            seen, busy=False, host=host or seen.host)

    def forget(self, server_id: str) -> None:
        self._break('forget')
        self.forgotten.append(server_id)

    def _break(self, what: str) -> None:
        if what in self.broken:
            raise self.broken[what]


class FakeType(resource_types.ResourceType):
    """A resource type of servers.

    :ivar open: the reservations that were started and not ended
    :ivar demand_of: returns the demand of a reservation
    :ivar broken: by method, the exception that is raised
    """

    for_servers = True
    parameters: ty.ClassVar[ty.Mapping[str, str]] = {
        'amount': '1', 'vcpus': '1', 'affinity': 'None'}

    def __init__(self) -> None:
        self.open: dict[str, resource_types.ReservationContext] = {}
        self.broken: dict[str, Exception] = {}
        self.demand_of: ty.Callable[[resource_types.ReservationContext],
                                    model.Demand] = (_demand_of)

    def read(self, values: resource_types.Values) -> resource_types.Values:
        return values

    def requirements(self, asking: ty.Any, params: resource_types.Values,
                     ) -> resource_types.Requirements:
        return resource_types.Requirements(model.Demand(
            {'VCPU': params['vcpus']}, params['amount']), {})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return self.demand_of(reserved)

    def start(self, reserved: resource_types.ReservationContext) -> None:
        if 'start' in self.broken:
            raise self.broken['start']
        self.open[reserved.id] = reserved

    def end(self, reserved: resource_types.ReservationContext) -> None:
        if 'end' in self.broken:
            raise self.broken['end']
        self.open.pop(reserved.id, None)


class WholeType(resource_types.ResourceType):
    """A resource type of whole hosts."""

    has_hosts = True
    parameters: ty.ClassVar[ty.Mapping[str, str]] = {'min': '1', 'max': '2'}
    changeable = ('min', 'max')

    def read(self, values: resource_types.Values) -> resource_types.Values:
        return values

    def requirements(self, asking: ty.Any, params: resource_types.Values,
                     ) -> resource_types.Requirements:
        return resource_types.Requirements(self.so_many(params), {})

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        return self.so_many(reserved.params)

    @abc.abstractmethod
    def so_many(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        """Return a demand for ``min`` to ``max`` hosts."""


def _demand_of(reserved: resource_types.ReservationContext) -> model.Demand:
    return model.Demand({'VCPU': reserved.params.get('vcpus', 1)}, affinity={
        None: model.Affinity.NONE, True: model.Affinity.SAME,
        False: model.Affinity.DIFFERENT}[reserved.params.get('affinity')])


class DatabaseTestCase(TestCase):
    """A test on a database of its own, of each kind.

    The module of the test must have ``load_tests = databases.load_tests``.
    """

    scenarios = databases.SCENARIOS
    kind = 'sqlite'
    #: Options in the group [blazar].
    options: ty.ClassVar[dict[str, ty.Any]] = {}

    def setUp(self) -> None:
        super().setUp()
        self.db = self.useFixture(
            databases.DatabaseFixture(self.kind, **self.options))
        self.database = self.db.database
        self.clock = driven.ManualClock(NOW)

    def host(self, name: str, usage: model.Resources | None = None,
             **capacity: int) -> str:
        """Add a host and return its UUID."""
        uuid = uuidutils.generate_uuid()
        self.report(uuid, name, usage, capacity)
        return uuid

    def report(self, uuid: str, name: str, usage: model.Resources | None,
               capacity: model.Resources) -> None:
        """Report the capacity of a host, as the periodic sync does."""
        with self.database.writer() as session:
            inventory.record_host(session, NOW, model.HostFacts(
                uuid, name, name, capacity), {'somebody': usage or {}},
                inventory.generations(session, [uuid]).get(uuid))

    def scalars(self, column: ty.Any, *where: ty.Any) -> list[ty.Any]:
        """Return the values of a column."""
        with self.database.reader() as session:
            return list(session.scalars(sa.select(column).where(*where)))

    def count_rows(self, *but: str) -> collections.Counter[str]:
        """Return how many rows the tables have, without empty ones.

        :param but: tables to leave out; ``changes`` remain after the deletion
            of what was changed, and so do usage records, which are left out
            together
        """
        if 'changes' in but:
            but = (*but, 'usage_records')
        with self.database.reader() as session:
            return +collections.Counter({
                table.name: session.scalar(
                    sa.select(sa.func.count()).select_from(table))
                for table in models.Base.metadata.sorted_tables
                if table.name not in but})

    def host_of(self, server_id: str) -> str | None:
        """Return the name of the host where a server is booked, or None."""
        names = self.scalars(
            models.Host.name, models.Host.id == models.Booking.host_id,
            models.Booking.server_id == server_id)
        return names[0] if names else None

    def generation(self, name: str) -> int:
        """Return the generation of a host."""
        return ty.cast(int, self.scalars(
            models.Host.generation, models.Host.name == name)[0])


class LeaseTestCase(DatabaseTestCase):
    """A test of the assembled core with a fake cloud."""

    start_timeout = 300
    end_timeout = 0
    no_shows = (0, 0)
    low_use = (0, 86400)
    most_moves = 10

    def setUp(self) -> None:
        super().setUp()
        self.cloud = FakeCloud()
        self.notified: list[tuple[str, str]] = []
        self.host_events: list[tuple[str, dict[str, ty.Any]]] = []
        self.encryption = encryption.Encryption([encryption.new_key()])
        self.admission = admissions.Admission(
            self.database, self.clock, start_timeout=self.start_timeout)
        self.places_type = FakeType()
        self.types = resource_types.ResourceTypes({
            'virtual:instance': self.places_type, **self.more_types()},
            self.places_type)
        self.leases = leases.Leases(
            self.database, self.clock, self.admission, self.types)
        self.lifecycle = self.new_handlers(self.database)

    def listed(self) -> list[dict[str, ty.Any]]:
        """Return the leases that are not over, as lists show them."""
        with self.database.reader() as session:
            return views.described(session, session.execute(
                sa.select(models.Lease.__table__).where(
                    models.Lease.status.in_(states.GOING_ON),
                ).order_by(models.Lease.start_date)).all())

    def new_handlers(self, database: api.Database) -> handlers.Handlers:
        """Return the handlers of a process with a connection of its own."""
        after, notice = self.no_shows
        share, period = self.low_use
        return handlers.Handlers(
            databases.configuration(
                '', start_timeout=self.start_timeout,
                end_timeout=self.end_timeout, no_show_time=after,
                no_show_notice=notice, low_use_share=share,
                low_use_period=period, best_effort_moves=self.most_moves),
            database, self.clock, self.admission, integration(
                self.cloud, self.types, self.policies(),
                self.encryption.decrypt, lambda event, lease:
                self.notified.append((event, lease['id'])),
                bound=self.bound), LOST_AFTER)

    def bound(self, _project_id: str, _lease_id: str,
              ) -> limits.Granted | None:
        """Return the bound on the hosts of a lease that waits."""
        return None

    def limit_moves(self, **values: int | None) -> None:
        """Set other limits of migrations."""
        plans = self.lifecycle.best_effort._plans
        plans._limits = plans._limits._replace(**values)

    def more_types(self) -> dict[str, resource_types.ResourceType]:
        """Return additional resource types."""
        return {}

    def policies(self) -> end_policies.Policies:
        """Return the end policies."""
        return {end_policies.DELETE: end_policies.Delete()}

    def new_maintenance(self) -> maintenance.Maintenance:
        """Return an object that schedules maintenance."""
        return maintenance.Maintenance(
            self.database, self.clock, alternatives.Alternatives(
                self.database, self.admission,
                self.new_demands()), self.new_relocating(),
            lambda *what: self.host_events.append(what))

    def new_demands(self) -> demands.Demands:
        """Return an object that determines the demands of reservations."""
        return demands.Demands(self.clock, self.encryption.decrypt, self.types)

    def new_relocating(self, interval: int = 3600) -> evacuation.Evacuation:
        """Return an object that drains and evacuates hosts."""
        return evacuation.Evacuation(
            self.database, self.clock, self.admission, self.cloud, interval,
            self.types)

    def new_engine(self, name: str = 'first', **options: ty.Any,
                   ) -> engine.Engine:
        """Return a worker with a database connection of its own."""
        for option, value in options.items():
            self.db.conf.set_override(option, value, 'blazar')
        return engine.Engine(self.db.conf, self.db.connect(),
                             self.clock, self.lifecycle, name)

    def request(self, start: int = 0, end: int = 100, **values: ty.Any,
                ) -> requests.LeaseRequest:
        """Return the request of a boot; times are seconds from NOW."""
        return requests.LeaseRequest(**{
            'name': 'lease', 'window': model.Window(NOW + start, NOW + end),
            'before_end': None, 'events': (), 'on_end': 'delete',
            'starts_now': start == 0, **values})

    def new_lease(self, start: int = 0, end: int = 100, count: int = 1,
                  project: str = 'project', request: ty.Any = None,
                  credential: str | None = None,
                  resources: model.Resources | None = None,
                  **demand: ty.Any) -> new_leases.NewLease:
        """Return a new lease for ``count`` servers of 1 VCPU."""
        return new_leases.NewLease(
            project, 'user', request or self.request(start, end),
            (new_leases.NewReservation(
                model.Demand(resources or {'VCPU': 1}, count, **demand),
                tuple(uuidutils.generate_uuid()
                      for _number in range(count))),),
            credential and self.encryption.encrypt(credential))

    def lease(self, start: int = 0, end: int = 100, *, call: str = 'call',
              **wanted: ty.Any) -> dict[str, ty.Any]:
        """Admit a lease; a build for later is deferred, else it is sent."""
        new, encrypted = self.new_lease(
            start, end, **wanted), self.encryption.encrypt(call)
        if start > 0:
            return self.leases.creation.create(new, encrypted)
        lease = self.leases.creation.create(new, encrypted,
                                            dispatch.HEAD_START)
        self.lifecycle.dispatch.send_own(
            lease, lambda gate: gate(new.server_ids))
        return lease

    def running_lease(self, start: int = 0, end: int = 100,
                      **wanted: ty.Any) -> dict[str, ty.Any]:
        """Return a lease whose servers run on their booked hosts."""
        lease = self.lease(start, end, **wanted)
        for server_id in servers_of(lease):
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.RUNNING, self.uuid_of(self.host_of(server_id)))
            self.lifecycle.reconciliation.check(server_id)
        return lease

    def replace_credential(self, lease_id: str, text: str) -> None:
        """Replace the trust of a lease, and keep the old one.

        Builds were sent with the old one.
        """
        with self.database.writer() as session:
            row = session.get_one(models.Credential, lease_id)
            row.replaced = [row.encrypted]
            row.encrypted = self.encryption.encrypt(text)

    def places(self, amount: int = 1, vcpus: int = 1,
               affinity: bool | None = None, **demand: ty.Any,
               ) -> new_leases.NewReservation:
        """Return a reservation of servers that come later."""
        return new_leases.NewReservation(
            model.Demand({'VCPU': vcpus}, amount, {
                None: model.Affinity.NONE, True: model.Affinity.SAME,
                False: model.Affinity.DIFFERENT}[affinity], **demand),
            params={'amount': amount, 'vcpus': vcpus, 'affinity': affinity},
            spec={'vcpus': vcpus})

    def reserve(self, start: int = 0, end: int = 100,
                *reserved: new_leases.NewReservation, active: bool = False,
                project: str = 'project', request: ty.Any = None,
                ) -> dict[str, ty.Any]:
        """Create a lease whose servers come later; by default one server.

        :param active: start it
        """
        lease = self.leases.creation.create(new_leases.NewLease(
            project, 'user', request or self.request(start, end),
            reserved or (self.places(),)), None)
        if active:
            self.lifecycle.lease_start.start(lease['id'])
            lease = views.get(self.database, lease['id'])
        return lease

    def take_slots(self, lease: dict[str, ty.Any], count: int = 1,
                   number: int = 0) -> list[str]:
        """Assign slots of a reservation of the lease to new servers."""
        server_ids = [uuidutils.generate_uuid() for _number in range(count)]
        self.leases.slots.take(lease['reservations'][number]['id'],
                               lease['project_id'], server_ids)
        for server_id in server_ids:
            self.cloud.servers[server_id] = cloud_api.ObservedServer(
                State.BUILDING)
        return server_ids

    def everything(self) -> dict[str, list[ty.Any]]:
        """Return all rows of all tables."""
        with self.database.reader() as session:
            return {table.name: list(session.execute(sa.select(
                table).order_by(*table.primary_key)).all())
                for table in models.Base.metadata.sorted_tables}

    def uuid_of(self, name: str | None) -> str | None:
        """Return the UUID of a host."""
        uuids = self.scalars(models.Host.uuid, models.Host.name == name)
        return uuids[0] if uuids else None

    def status(self, lease: dict[str, ty.Any]) -> str:
        """Return the status of a lease."""
        return ty.cast(str, views.get(self.database, lease['id'])['status'])

    def reason(self, lease: dict[str, ty.Any]) -> str:
        """Return the status reason of a lease."""
        return ty.cast(str, views.get(
            self.database, lease['id'])['status_reason'])

    def events_of(self, lease: dict[str, ty.Any]) -> dict[str, str]:
        """Return the status of each event of a lease, by type."""
        return {event['event_type']: event['status']
                for event in views.get(self.database, lease['id'])['events']}


def integration(*given: ty.Any, **values: ty.Any) -> handlers.Integration:
    """Return an integration without limits, budget and background threads,
    except for what is given.
    """
    names = [one.name for one in dataclasses.fields(handlers.Integration)]
    return handlers.Integration(**{
        'granting': lambda _lease, _change: None, 'budget': None,
        'later': lambda work: work(),
        'bound': lambda _project_id, _lease_id: None,
        **dict(zip(names, given)), **values})


def servers_of(lease: dict[str, ty.Any]) -> list[str]:
    """Return the ids of the servers of a lease."""
    return [server_id for reservation in lease['reservations']
            for server_id in reservation['servers']]
