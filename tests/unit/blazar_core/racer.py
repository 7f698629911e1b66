# SPDX-License-Identifier: Apache-2.0

"""Processes that race: they book, start a lease, or carry out events.

There is one for each socket whose number is an argument. It reads tasks as
lines of JSON and answers each with one. A task is prepared when it is read:
connections are opened, and the guards named by ``without`` are disabled. It is
carried out when a line with the instant follows.
"""

from concurrent import futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import socket
import sys
import threading
import time
import typing as ty
from unittest import mock

from oslo_utils import uuidutils
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.orm import exc as orm_exc

from blazar_core.capacity import admissions
from blazar_core.capacity import inventory
from blazar_core.capacity import scheduler_claims
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.healing import evacuation
from blazar_core.healing import host_status
from blazar_core.healing import overbooking
from blazar_core.leases import leases
from blazar_core.leases import limits
from blazar_core.leases import members
from blazar_core.leases import new_leases
from blazar_core.leases import reassignment
from blazar_core.leases import requests
from blazar_core.leases import slots
from blazar_core.leases import transfer
from blazar_core.leases import updates
from blazar_core.lifecycle import demands
from blazar_core.lifecycle import dispatch
from blazar_core.lifecycle import engine
from blazar_core.lifecycle import event_queue
from blazar_core.lifecycle import handlers
from blazar_core.lifecycle import lease_close
from blazar_core.plugins import cloud_api
from blazar_core.plugins import end_policies
from blazar_core.plugins import resource_types
from tests import databases
from tests import driven
from tests.unit import base


@api.retried
def seize(self: event_queue.EventQueue, event_ids: list[str]) -> set[str]:
    """Claim events, even if another worker has them."""
    with self._database.writer() as session:
        session.execute(
            sa.update(models.Event).where(models.Event.id.in_(event_ids))
            .values(status='IN_PROGRESS', claimed_by=self._name,
                    claimed_until=self._clock.now() + 60))
    return set(event_ids)


def take_unguarded(connection: sa.Connection, now: int,
                   hosts: ty.Iterable[model.Host],
                   changes: ty.Mapping[int, ty.Sequence[ty.Any]],
                   move: bool = False, **values: ty.Any) -> None:
    """Do what host_generations.advance does, without its check.

    :param move: increase the generations all the same; not if the database is
        a guard of its own then (innodb_snapshot_isolation)
    """
    rows = []
    if move:
        values = {**values, 'generation': models.Host.generation + 1}
    for host in hosts:
        if values:
            connection.execute(sa.update(models.Host).where(
                models.Host.id == host.id).values(**values))
        rows += [{
            'host_id': host.id, 'generation': host.generation + 1,
            'change_count': len(changes[host.id]),
            'created_at': now, 'start_date': change.window.start,
            'end_date': change.window.end, 'sign': change.sign,
            'resources': dict(change.resources)}
            for change in changes.get(host.id, ())]
    # Other processes may do anything between the read and the write, but a
    # database as fast as this one seldom leaves them the time.
    threading.Event().wait(0.05)
    if rows:
        connection.execute(sa.insert(models.Change), rows)


def late_lock(session: orm.Session, lease_id: str,
              _read: models.Lease | None = None) -> models.Lease:
    """Do what api.locked does, but read before the lock, and do not write."""
    api.found(session, lease_id)
    lease = session.get(models.Lease, lease_id, with_for_update=True)
    assert lease is not None
    return lease


_claim = inventory.claim


def claim_unguarded(connection: sa.Connection, now: int, host: model.Host,
                    *args: ty.Any, **kwargs: ty.Any) -> ty.Any:
    """Do what inventory.claim does, even if the decision is outdated."""
    # Time for the other processes, which have decided by the same state.
    threading.Event().wait(0.05)
    generation = connection.scalar(sa.select(models.Host.generation).where(
        models.Host.id == host.id))
    assert generation is not None
    return _claim(connection, now, host.at(generation, host.usage),
                  *args, **kwargs)


def place_unguarded(self: scheduler_claims.Claims, session: orm.Session,
                    now: int, booking: models.Booking,
                    *_args: ty.Any) -> ty.Callable[[], None]:
    """Do what Claims._place does on the booked host, without its check."""
    # Time for the other processes.
    threading.Event().wait(0.005)
    booking.claimed_at = now
    return lambda: None


_lease_of = slots.Slots._lease_of


def find_slowly(self: slots.Slots, *args: str) -> str:
    """Do what Slots._lease_of does, and give other processes time."""
    found = _lease_of(self, *args)
    threading.Event().wait(random.random() / 25)
    return found


_new_window = updates.new_window


def window_unguarded(lease: models.Lease, change: updates.LeaseChange,
                     now: int) -> model.Window:
    """Do what new_window does, even if the end was changed meanwhile."""
    return _new_window(lease, dataclasses.replace(change, was_end=None), now)


def pass_gate(self, *_lease):
    """Return the permit to send a build to every caller."""
    return dispatch.DispatchRight(cloud_api.Deadline(
        self._clock, dispatch.SECONDS), [], True)


def decided_unguarded(move: reassignment.Reassigned, lease: models.Lease,
                      _held: bool) -> list[models.Booking]:
    """Return the bookings of a move, whatever their state."""
    return [row for row in lease.bookings if row.id in move.hosts]


#: Guards that can be disabled: what is replaced, and the replacement.
GUARDS = {
    'generation': ('blazar_core.capacity.host_generations.advance',
                   take_unguarded),
    'comparison': ('blazar_core.capacity.host_generations.advance',
                   functools.partial(take_unguarded, move=True)),
    'judged': ('blazar_core.capacity.inventory.claim', claim_unguarded),
    'gate': ('blazar_core.lifecycle.dispatch.Dispatch._take', pass_gate),
    'place': ('blazar_core.capacity.scheduler_claims.Claims._place',
              place_unguarded),
    'lock': ('blazar_core.db.api.locked', late_lock),
    'check': ('blazar_core.lifecycle.lease_end.LeaseEnd._check_in',
              lambda *_what: None),
    'unchanged': ('blazar_core.db.api.changed_since', lambda *_what: False),
    'used': ('blazar_core.leases.slots.record_first_use',
             lambda _lease, _now: None),
    'end': ('blazar_core.leases.updates.new_window',
            window_unguarded),
    'claim': ('blazar_core.lifecycle.event_queue.EventQueue.claim', seize),
    'alone': ('blazar_core.capacity.outages._LOCK', sa.select(1)),
    'haste': ('blazar_core.leases.slots.Slots._lease_of', find_slowly),
    'owner': ('blazar_core.leases.slots._check_owner', lambda *_what: None),
    'asked': ('blazar_core.lifecycle.server_moves._is_taken',
              lambda _move, _seen: False),
    'due': ('blazar_core.lifecycle.server_moves.ServerMoves.put_off',
            lambda *_what: True),
    'seen': ('blazar_core.leases.reassignment._decided', decided_unguarded),
    'confirm': ('blazar_core.leases.limits.Granted.confirm',
                lambda self, connection, picks=(): None),
}

Answer: ty.TypeAlias = dict[str, ty.Any]


class FileCloud:
    """A cloud of many processes: each request is a line in a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def send(self, call: str, credential: str | None,
             server_ids: ty.Collection[str], gate: cloud_api.Gate) -> str:
        if gate(server_ids) is not None:
            self.write(call)
        return ''

    def hold(self, server_ids: ty.Collection[str]) -> None:
        pass

    def revoke(self, credential: str) -> None:
        self.write(f'revoke {credential}')

    def credentials(self) -> set[str]:
        return set()

    def traces(self, server_ids: ty.Collection[str],
               ) -> dict[str, cloud_api.BuildTrace]:
        return dict.fromkeys(server_ids, cloud_api.BuildTrace.NONE)

    def mark_failed(self, server_id: str) -> None:
        self.write(f'mark_failed {server_id}')

    def write(self, line: str) -> None:
        with open(self._path, 'a') as file:
            file.write(f'{line}\n')

    def look(self, server_id: str) -> cloud_api.ObservedServer:
        return cloud_api.ObservedServer(cloud_api.ServerState.BUILDING)

    def delete(self, server_id: str, _credential: str | None,
               check: cloud_api.Check = cloud_api.always) -> None:
        check()
        self.write(f'delete {server_id}')

    def release(self, server_id: str) -> None:
        self.write(f'release {server_id}')

    def move(self, server_id: str, _host: str, _lease_id: str,
             _deadline: cloud_api.Deadline) -> str:
        self.write(f'move {server_id}')
        return ''

    def evacuate(self, server_id: str, _lease_id: str,
                 _deadline: cloud_api.Deadline) -> str:
        self.write(f'evacuate {server_id}')
        return ''


class RunningCloud(FileCloud):
    """A cloud whose servers run on a failed host, and stay there."""

    def __init__(self, path: str, host: str, others: ty.Iterable[str],
                 ) -> None:
        super().__init__(path)
        self._host = host
        self._others = frozenset(others)

    def look(self, server_id: str) -> cloud_api.ObservedServer:
        return cloud_api.ObservedServer(cloud_api.ServerState.RUNNING,
                                        self._host)

    def needs(self, server_id: str, lent: bool = False) -> model.Demand:
        return model.Demand({'VCPU': 1}, hosts=self._others)

    def free(self, _host: str) -> model.Resources:
        return {'VCPU': 100}


class FileType(base.FakeType):
    """A resource type that records what happened to reservations."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @classmethod
    def types(cls, path: str) -> resource_types.ResourceTypes:
        kind = cls(path)
        return resource_types.ResourceTypes({new_leases.RESOURCE_TYPE: kind},
                                            kind)

    def start(self, reserved: resource_types.ReservationContext) -> None:
        self._write(f'open {reserved.id}')

    def end(self, reserved: resource_types.ReservationContext) -> None:
        self._write(f'close {reserved.id}')

    def _write(self, line: str) -> None:
        with open(self._path, 'a') as file:
            file.write(f'{line}\n')


class HostType(FileType):
    """A resource type that records which hosts were cleaned."""

    has_hosts = True

    def clean(self, reserved: resource_types.ReservationContext,
              hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        for host in hosts:
            self._write(host)
        return hosts


class Racer:
    """A prepared task."""

    def __init__(self, task: dict[str, ty.Any]) -> None:
        self.task = task
        self.conf = databases.configuration(
            task['url'], **task.get('options', {}))
        self.database = api.Database(self.conf)
        databases.compile_once(self.database.engine)
        self.clock = driven.ManualClock(task['now'])
        self.admission = search = admissions.Admission(
            self.database, self.clock)
        self.types = FileType.types(task.get('path', os.devnull))
        self.leases = leases.Leases(
            self.database, self.clock, search, self.types)
        self.limits = limits.Limits(self.conf, self.database, self.clock)
        for name, value in task.get('limits', {}).items():
            self.conf.set_override(name, value, 'blazar_enforcement')
        self.claims = scheduler_claims.Claims(self.database, self.clock,
                                              search.index)
        with search.index.fresh():
            # Load the index, so that the race is about writing.
            pass

    def run(self) -> ty.Any:
        # Other processes take longer to reach the critical section.
        threading.Event().wait(random.random() * self.task.get('late', 0))
        return getattr(self, self.task['do'])()

    def create(self) -> list[Answer]:
        """Create leases one after the other; return the result of each."""
        return [self._create(**wanted) for wanted in self.task['leases']]

    def _create(self, server_ids: list[str], start: int, end: int,
                resources: dict[str, int], affinity: str = 'none',
                withdraw: bool = False, later: bool = False) -> Answer:
        request = requests.LeaseRequest(
            name='race', window=model.Window(start, end), before_end=None,
            events=(), on_end='delete', starts_now=True)
        demand = model.Demand(
            resources, len(server_ids), model.Affinity(affinity))
        wanted = new_leases.NewReservation(demand, tuple(server_ids))
        if later:
            wanted = new_leases.NewReservation(demand, params={}, spec={})
        new = new_leases.NewLease('project', 'user', request, (wanted,))
        try:
            if 'limits' in self.task:
                new = dataclasses.replace(new, granted=self.limits.check(
                    limits.Asked('project', 'user', request.window,
                                 len(server_ids), model.total([demand]))))
            lease = self.leases.creation.create(new, None)
        except errors.LimitExceeded:
            return {'limited': True}
        except errors.Refused as exc:
            return {'refused': exc.refusal.next_start}
        except errors.ConcurrentUpdate:
            return {'busy': True}
        if withdraw:
            driven.withdraw(self.leases, lease['id'])
        return {'admitted': lease['id']}

    def enlarge(self) -> list[Answer]:
        """Give the servers of a lease other resources."""
        lease, resources = self.task['lease'], self.task['resources']
        window = model.Window(*self.task['window'])
        try:
            self.leases.updates.update(lease, updates.LeaseChange(
                reservations={
                    self.task['reservation']: new_leases.NewReservation(
                        model.Demand(resources), params=self.task['params'])},
                granted=self.limits.check(limits.Asked('project', 'user',
                                                       window, 1, resources,
                                                       lease_id=lease))))
        except errors.LimitExceeded:
            return [{'limited': True}]
        return [{'enlarged': lease}]

    def reserve(self) -> list[Answer]:
        """Create leases whose servers come later, all at once."""
        together = threading.Barrier(len(self.task['leases']))

        def one(wanted: dict[str, ty.Any]) -> Answer:
            together.wait(20)
            return self._create(**wanted)

        with futures.ThreadPoolExecutor(together.parties) as pool:
            return list(pool.map(one, self.task['leases']))

    def let_in(self) -> list[Answer]:
        """Admit servers to a host, one after the other."""
        answers: list[Answer] = []
        for server_id in self.task['server_ids']:
            try:
                self.claims.claim(
                    server_id, {self.task['host']: {'VCPU': 1}})
                answers.append({'let in': server_id})
            except scheduler_claims.Denied as exc:
                answers.append({'denied': str(exc)})
        return answers

    def take_slots(self) -> list[Answer]:
        """Take slots for servers, one after the other."""
        answers: list[Answer] = []
        for server_id in self.task['server_ids']:
            try:
                self.leases.slots.take(
                    self.task['reservation_id'], 'project', [server_id])
                answers.append({'taken': server_id})
            except errors.Conflict:
                answers.append({'full': server_id})
            except errors.NotFound:
                answers.append({'unknown': server_id})
        return answers

    def hand_over(self) -> list[Answer]:
        """Transfer a lease to another project, in the generation just read."""
        lease_id, own = self.task['lease_id'], self.leases.transfer
        try:
            own.transfer(
                lease_id, own.look(lease_id).generation,
                transfer.Owner(self.task['project_id'], 'user'), None, False)
        except errors.Conflict:
            return [{'kept': True}]
        return [{'handed': self.task['project_id']}]

    def adopt(self) -> list[Answer]:
        """Create a lease of running servers."""
        joiners = [members.NewMember(one, self.task['host'], {'VCPU': 2})
                   for one in self.task['server_ids']]
        try:
            self.leases.members.create(new_leases.NewLease(
                'project', 'user', requests.LeaseRequest(
                    name='race', window=model.Window(
                        self.task['now'], self.task['now'] + 100),
                    before_end=None, events=(), on_end='delete',
                    starts_now=True),
                self.leases.members.reservations(joiners)), joiners)
        except errors.Conflict:
            return [{'refused': True}]
        return [{'adopted': True}]

    def recur(self) -> list[Answer]:
        """Create a recurring lease, all of it or nothing."""
        windows = tuple(model.Window(*one) for one in self.task['windows'])
        asked = requests.Recurrence(
            'FREQ=DAILY;COUNT=3', 'UTC', 'delete', False, windows)
        request = requests.LeaseRequest(
            name='race', window=windows[0], before_end=None, events=(),
            on_end='delete', starts_now=False, recurrence=asked)
        recurrence_id = uuidutils.generate_uuid()
        wanted = [new_leases.NewLease(
            'project', 'user', one, (new_leases.NewReservation(
                model.Demand({'VCPU': 1}, 1)),), recurrence_id=recurrence_id)
            for one in request.occurrences]
        recurring = self.leases.series
        try:
            fits, left_out = recurring.fitting(wanted, asked.some)
            recurring.create(recurrence_id, asked, fits, [None] * len(fits),
                             left_out)
        except errors.Refused:
            return [{'refused': True}]
        return [{'made': True}]

    def relocate(self) -> list[Answer]:
        """Request evacuations from a host that has certainly failed."""
        evacuation.Evacuation(
            self.database, self.clock, self.admission, RunningCloud(
                self.task['path'], self.task['host'], self.task['others']),
            0, self.types).look(lambda failed: [*failed])
        return []

    def heal(self) -> list[Answer]:
        """Reassign bookings without capacity, and record notifications."""
        cloud = FileCloud(self.task['path'])
        overbooking.OverbookingCheck(
            self.database, self.clock, self.admission,
            self.leases.reassignment, demands.Demands(
                self.clock, str, FileType.types(os.devnull)),
            lambda event_type, lease: cloud.write(
                f'{event_type} {lease["id"]}'), 0).look()
        return []

    def ask_moves(self) -> list[Answer]:
        """Request the migrations that free capacity for a lease."""
        try:
            self._lifecycle().best_effort.request(self.task['lease_id'])
        except errors.InvalidTransition:
            # Without the guard the table of states detects it, but too late.
            return [{'failed': True}]
        return [{'asked': True}]

    def leave(self) -> list[Answer]:
        """Remove a running server from its lease."""
        server_id = self.task['server_id']
        try:
            self._lifecycle().server_removal.leave(
                self.task['lease_id'], [server_id], lambda _id: True)
        except errors.Conflict:
            return [{'refused': True}]
        except orm_exc.StaleDataError:
            # Only without the guards: the rows that were read no longer exist.
            return [{'failed': True}]
        return [{'left': True}]

    def update(self) -> list[Answer]:
        """Let a lease grow repeatedly, as long as possible."""
        answers: list[Answer] = []
        for amount in self.task['amounts']:
            wanted = new_leases.NewReservation(
                model.Demand({'VCPU': 1}, amount), spec={'vcpus': 1},
                params={'vcpus': 1, 'affinity': None, 'amount': amount})
            try:
                self.leases.updates.update(
                    self.task['lease_id'], updates.LeaseChange(
                        end=self.task['now'] + 100 + amount, reservations={
                            self.task['reservation_id']: wanted}))
                answers.append({'updated': amount})
            except (errors.NotFound, errors.InvalidLeaseParams):
                answers.append({'over': amount})
            except orm_exc.StaleDataError:
                # Only without the guards: the rows that were read no longer
                # exist.
                answers.append({'failed': amount})
        return answers

    def update_and_delete(self) -> list[Answer]:
        answers = self.update()
        self._lifecycle().lease_end.delete(self.task['lease_id'])
        return [*answers, {'deleted': True}]

    def start(self) -> None:
        self._lifecycle().lease_start.start(self.task['lease_id'])

    def remove_server(self) -> list[Answer]:
        """Let a server of an ended lease stay on its host."""
        stays = self._lifecycle().server_removal.remove_server(
            self.task['lease_id'], self.task['server_id'], True)
        return [{'stays': True} if stays else {'has no room': True}]

    def end_unused(self) -> list[Answer]:
        """End a lease that was never used."""
        self._lifecycle().no_shows.end(self.task['lease_id'])
        return [{'looked': True}]

    def extend(self) -> list[Answer]:
        """Extend a lease whose extension is due."""
        self._lifecycle().auto_extension.extend(self.task['lease_id'])
        return [{'looked': True}]

    def see(self) -> list[Answer]:
        """Report a host as down, or as up."""
        host_status.HostStatus(
            self.database, self.clock, host_status.Thresholds(0, 0, 3600),
            lambda *_said: None).update({self.task['host']: host_status.Down(
                'No answer.') if self.task['down'] else None, 'other': None})
        return [{'looked': True}]

    def delete(self) -> list[Answer]:
        """Delete a lease."""
        self._lifecycle().lease_end.delete(self.task['lease_id'])
        return [{'deleted': True}]

    def look(self) -> list[Answer]:
        """Try the leases that wait for capacity."""
        self._lifecycle().admission_queue.look()
        return [{'looked': True}]

    def clean(self) -> None:
        lease_close.Cleaning(self.database, self.clock).clean(
            HostType(self.task['path']), resource_types.ReservationContext(
                **self.task['reserved'], project_id='project',
                user_id='user', params={}, spec={}))

    def carry_out(self) -> int:
        return driven.run_due(self._engine(self._lifecycle()))

    def listen(self) -> int:
        """Carry out events as the daemon does, until nothing is due.

        :returns: how many leases were read with others
        """
        life, together = self._lifecycle(), []
        read = life.lease_start.read

        def note(lease_ids: ty.Collection[str]) -> ty.Any:
            if len(lease_ids) > 1:
                together.extend(lease_ids)
            return read(lease_ids)

        life.lease_start.read = note
        working = self._engine(life)
        thread = threading.Thread(target=working.run)
        thread.start()
        deadline, pause = time.monotonic() + 60, threading.Event()
        while time.monotonic() < deadline and self._is_left():
            pause.wait(0.02)
        working.stop()
        thread.join()
        return len(together)

    def _is_left(self) -> bool:
        """Return whether a start is due and not carried out."""
        with self.database.reader() as session:
            return session.scalar(sa.select(models.Event.id).where(
                models.Event.event_type == 'start_lease',
                models.Event.status != 'DONE',
                models.Event.run_at <= self.clock.now()).limit(1)) is not None

    def _engine(self, life: handlers.Handlers) -> engine.Engine:
        return engine.Engine(self.conf, self.database, self.clock, life,
                             f'racer {os.getpid()}')

    def _lifecycle(self) -> handlers.Handlers:
        cloud = FileCloud(self.task['path'])
        return handlers.Handlers(
            databases.configuration('', start_timeout=0, end_timeout=0,
                                    no_show_time=50),
            self.database, self.clock, self.admission, base.integration(
                cloud, self.types,
                {end_policies.DELETE: end_policies.Delete()}, str,
                lambda event, lease: cloud.write(f'{event} {lease["id"]}')),
            120)


def serve(channel: socket.socket) -> None:
    """Carry out the tasks from a channel until it is closed."""
    with channel.makefile('rw') as lines:
        for line in lines:
            task = json.loads(line)
            with contextlib.ExitStack() as stack:
                for guard in task.get('without', ()):
                    where, instead = GUARDS[guard]
                    stack.enter_context(mock.patch(where, instead))
                racer = Racer(task)
                print('ready', file=lines, flush=True)
                go = float(lines.readline())
                # All processes run by then, instead of waking up one by one.
                while time.time() < go:
                    pass
                answer = racer.run()
                racer.database.engine.dispose()
                print(json.dumps(answer), file=lines, flush=True)


def main() -> None:
    # The parent does not read the log, and a full pipe would block.
    logging.disable()
    channels = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    # The imports take longest, so they are done once.
    for channel in channels:
        if not os.fork():
            for other in channels:
                if other is not channel:
                    other.close()
            serve(channel)
            return
    for channel in channels:
        # Otherwise the parent would never notice that a racer has died.
        channel.close()
    for _channel in channels:
        os.wait()


if __name__ == '__main__':
    main()
