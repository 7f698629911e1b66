# SPDX-License-Identifier: Apache-2.0
"""Whole hosts: their resource type, and the operator who enrolls them."""

import contextlib
import typing as ty

from blazar_core.capacity import enrollment
from blazar_core.capacity import pending
from blazar_core.common import errors
from blazar_core.common import model
from blazar_core.common import states
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_core.plugins import resource_types
from tests.simulation import baton as batons
from tests.simulation import cloud as clouds
from tests.simulation import faults
from tests.unit import base

#: The name of the resource type.
HOSTS = 'hosts'
#: Seconds after which a cleaning is surely over.
LONGEST = int(faults.TIMES['clean'][1]) + 2


class Hosts(base.WholeType):
    """A number of whole hosts, of the enrolled ones.

    :param process: returns the process whose task is running
    :param cleaning_time: seconds after a lease for which its host is kept free
    """

    changeable = ('min', 'max', 'projects')

    def __init__(self, cloud: clouds.Cloud, port: clouds.Port,
                 process: ty.Callable[[], batons.Process],
                 cleaning_time: int) -> None:
        self._cloud = cloud
        self._port = port
        self._process = process
        self._cleaning_time = cleaning_time

    def demand(self,
               reserved: resource_types.ReservationContext) -> model.Demand:
        self._port.call('demand')
        return super().demand(reserved)

    def so_many(self, params: ty.Mapping[str, ty.Any]) -> model.Demand:
        return model.Demand(
            model.WHOLE, params['max'], least=params['min'],
            among=model.HostPool.ENROLLED, cleaning_time=self._cleaning_time)

    def start(self, reserved: resource_types.ReservationContext) -> None:
        for uuid in reserved.hosts:
            self._port.call('open host')
            self._cloud.open_host(self._cloud.hosts[uuid], reserved.id)
        self._close(reserved.id, reserved.hosts)
        self._port.answer('hosts opened')

    def bookings_changed(self,
                         reserved: resource_types.ReservationContext) -> None:
        self.start(reserved)

    def end(self, reserved: resource_types.ReservationContext) -> None:
        for server in self._cloud.servers.values():
            if server.within == reserved.id and (
                    server.rest is cloud_api.RestingState.SHELVED):
                self._port.release(server.id)
        self._close(reserved.id, ())
        self._port.answer('hosts closed')

    def open_reservations(self) -> list[str]:
        self._port.call('opened hosts')
        return sorted(set[str]().union(*(
            host.opened for host in self._cloud.hosts.values())))

    def _close(self, reservation_id: str, keep: ty.Collection[str]) -> None:
        for host in self._members(reservation_id):
            if host.uuid not in keep:
                self._port.call('close host')
                host.opened.discard(reservation_id)

    def _members(self, reservation_id: str) -> list[clouds.Host]:
        return [host for host in self._cloud.hosts.values()
                if reservation_id in host.opened]

    def hosted_servers(self, reserved: resource_types.ReservationContext,
                       only: str | None = None) -> ty.Collection[str]:
        """Return the hosted servers.

        As Nova's cells have them, and from placement those being built.
        """
        self._port.call('hosted_servers')
        hosts = [host for host in self._cloud.hosts.values()
                 if only in (None, host.uuid) and (
                     host.uuid in reserved.hosts or
                     reserved.id in host.opened)]
        found = {server.id for server in self._cloud.servers.values()
                 if server.host in hosts and server.is_there}
        self._cloud.baton.point('hosted_servers in placement')
        found.update(*(host.allocations for host in hosts))
        return sorted(one for one in found if one in self._cloud.servers and
                      self._cloud.servers[one].within == reserved.id)

    @property
    def cleaning_seconds(self) -> int:
        # Processes whose clocks differ need as much more time.
        return LONGEST + 2 * self._cloud.faults.ahead

    def clean(self, reserved: resource_types.ReservationContext,
              hosts: ty.Collection[str],
              deadline: cloud_api.Deadline) -> ty.Collection[str]:
        """Clean hosts in parallel; the process may die meanwhile."""
        done: dict[str, bool] = {}
        for uuid in sorted(hosts):
            host = self._cloud.hosts[uuid]
            if not host.there:
                # A host that does not exist is not leased again as it is.
                host.dirty, done[uuid] = False, True
                continue
            self._process().spawn(
                f'clean-{host.name}', lambda host=host: done.update({
                    host.uuid: self._clean(host, reserved.id, deadline)}))
        self._cloud.baton.wait(lambda: len(done) == len(hosts), 1e9)
        return {uuid for uuid, clean in done.items() if clean}

    def _clean(self, host: clouds.Host, reservation_id: str,
               deadline: cloud_api.Deadline) -> bool:
        try:
            self._port.call('clean')
            if deadline.passed():
                return False
            over = self._cloud.clean(host, reservation_id)
            self._cloud.baton.wait(lambda: bool(over), 1e9)
            self._port.answer('cleaned')
        except errors.CloudUnavailable:
            return False
        return over[0]


class Operator:
    """An operator who enrolls hosts, and sometimes removes one.

    After its process died, it first completes what it was doing.

    :param core: a :class:`tests.simulation.world.Core`
    :param moments: when a host is removed, or enrolled again
    """

    def __init__(self, core: ty.Any, pool: ty.Sequence[clouds.Host],
                 moments: ty.Sequence[float]) -> None:
        self._core = core
        self._cloud: clouds.Cloud = core.world.cloud
        self._port: clouds.Port = core.world.port
        self._baton: batons.Baton = core.world.baton
        self._pool = pool
        self._moments = moments

    def run(self) -> None:
        for host in self._pool:
            if self._status(host) != states.Enrollment.ENROLLED:
                self._see_to(host)
        for moment in self._moments:
            if moment >= self._baton.now:
                self._baton.let_pass(moment - self._baton.now)
                self._see_to(self._baton.dice.choice(self._pool))

    def _status(self, host: clouds.Host) -> str | None:
        rows = self._core.world.look(
            f"SELECT enrollment FROM hosts WHERE uuid = '{host.uuid}'")
        return rows[0][0] if rows else None

    def _see_to(self, host: clouds.Host) -> None:
        """Enroll or remove a host, until that is done or impossible."""
        work = self._have_in if self._status(host) in (
            None, states.Enrollment.ENROLLING) else self._take_out
        while True:
            try:
                work(host)
            except errors.Conflict as exc:
                self._baton.tell(f'{host.name} stays as it is: {exc}')
            except (errors.NotFound, errors.CloudUnavailable,
                    errors.ConcurrentUpdate, errors.DatabaseUnavailable):
                self._baton.let_pass(10)
                continue
            return

    def _have_in(self, host: clouds.Host) -> None:
        """Enroll a host as blazar-nova-manage does."""
        self._baton.wait(lambda: host.there, 1e9)
        enrolling = self._write(enrollment.start, host.uuid, {})
        self._port.call('join')
        host.enrolled = True
        self._port.call('everybody')
        with self._core.database.reader() as session:
            row = session.get(models.Host, enrolling.host_id)
            there = {*pending.awaited(
                row.consumers, self._core.clock.now()), *host.allocations}
        if there:
            self._leave(host, enrolling.host_id)
            raise errors.Conflict(f'{len(there)} servers are there')
        self._write(enrollment.complete, enrolling)
        self._baton.tell(f'{host.name} is enrolled')

    def _take_out(self, host: clouds.Host) -> None:
        (host_id,), = self._core.world.look(
            f"SELECT id FROM hosts WHERE uuid = '{host.uuid}'")
        self._leave(host, host_id)
        self._baton.tell(f'{host.name} serves everybody again')

    def _leave(self, host: clouds.Host, host_id: int) -> None:
        with contextlib.suppress(errors.NotFound):
            self._write(enrollment.remove, host_id)
            self._port.call('leave')
            host.enrolled = False
            self._write(enrollment.retire, host_id)

    def _write(self, work: ty.Callable[..., ty.Any], *args: ty.Any,
               ) -> ty.Any:
        def attempt() -> ty.Any:
            with self._core.database.writer() as session:
                return work(session, self._core.clock.now(), *args)

        return self._core.database.retried(attempt)
