# SPDX-License-Identifier: Apache-2.0

"""Check the servers of leases, and servers that should have a lease."""

import functools
import typing as ty

import sqlalchemy as sa

from blazar_core.audit import findings
from blazar_core.audit.findings import Difference
from blazar_core.common import clocks
from blazar_core.common import errors
from blazar_core.common import states
from blazar_core.common import words
from blazar_core.db import api
from blazar_core.db import models
from blazar_core.plugins import cloud_api
from blazar_nova.compat import bulk_state
from blazar_nova.compat import nova_cloud
from blazar_nova.compat import request_specs
from blazar_nova.compat import unbuilt_leftovers
from blazar_nova.compat import unmapped_servers
from blazar_nova.listener import server_sync
from blazar_nova.schemas import hint_params
from blazar_nova.verify import gaps

#: Seconds after which an admission has succeeded or failed.
ADMISSION = 60

#: Seconds after which no service works any longer on a server that was deleted
#: before it had a cell.
_LEFT = 3600

#: The number of servers between two lines of progress.
_STEP = 1000

_NOBODY = 'nova-api failed while creating it, and no service will build it'

State = cloud_api.ServerState


class LeasedServers:
    """Compares servers.

    :param say: called with lines of progress
    """

    def __init__(self, conf: ty.Any, database: api.Database,
                 clock: clocks.Clock, cloud: nova_cloud.NovaCloud,
                 sync: server_sync.ServerSync, gaps: gaps.Gaps,
                 say: ty.Callable[[str], None]) -> None:
        self._defaults = hint_params.defaults(conf)
        self._database = database
        self._clock = clock
        self._cloud = cloud
        self._sync = sync
        self._gaps = gaps
        self._say = say

    def differences(self) -> ty.Iterator[Difference]:
        """Yield differences of servers of leases, and servers without one."""
        nova = bulk_state.BulkState(self._cloud)
        count = 0
        for rows in self._leased():
            seen = nova.look(row.server_id for row in rows)
            for row in rows:
                if row.server_id in seen:
                    yield from self._server(row, seen[row.server_id])
            count += len(rows)
            self._say(f'{words.count(count, "server")} of leases')
        yield from self._orphans(nova)
        yield from self._endless(nova)
        yield from self._left_behind()
        yield from self._unmapped(nova.silent)
        yield from self._strangers(nova.silent)
        self._gaps.failures += [
            f'Cell {name} did not answer: its servers were not compared.'
            for name in sorted(nova.silent)]

    def _leased(self) -> ty.Iterator[ty.Sequence[ty.Any]]:
        """Yield the bookings of servers with their leases, many at a time."""
        query = sa.select(
            models.Booking.id, models.Booking.server_id,
            models.Booking.running, models.Booking.host_id,
            models.Host.uuid.label('host'),
            models.Host.name.label('host_name'),
            models.Lease.id.label('lease_id'), models.Lease.name,
            models.Lease.status, models.Lease.start_date,
            models.Booking.dispatched_at, models.Booking.failed_at,
            models.Reservation.params,
            models.DeferredBuild.lease_id.label('deferred'),
        ).join(models.Booking.reservation).join(
            models.Reservation.lease).outerjoin(
            models.Host, models.Host.id == models.Booking.host_id).outerjoin(
            models.DeferredBuild,
            models.DeferredBuild.lease_id == models.Lease.id,
        ).where(models.Booking.server_id.is_not(None)).order_by(
            models.Booking.id).limit(_STEP)
        last = 0
        while True:
            with self._database.reader() as session:
                rows = session.execute(
                    query.where(models.Booking.id > last)).all()
            if not rows:
                return
            yield rows
            last = rows[-1].id

    def _server(self, row: ty.Any, seen: cloud_api.ObservedServer,
                ) -> ty.Iterator[Difference]:
        """Yield a server of a lease that is recorded differently from Nova."""
        verdict = self._judge(row, seen)
        if verdict is not None:
            text, remedy = verdict
            fix = None if remedy is not None else functools.partial(
                self._sync.compare_server, row.server_id)
            yield Difference(
                ('server', row.server_id, row.status, seen.state, seen.host),
                f'{findings.named(row.lease_id, row.name)} is {row.status}: '
                f'server {row.server_id} {text}.',
                remedy or '--fix updates the booking', fix)

    def _judge(self, row: ty.Any, seen: cloud_api.ObservedServer,
               ) -> tuple[str, str | None] | None:
        """Return what is wrong with a server, and what an operator can do
        about it (None: the reservation database has to be updated).

        :returns: None: nothing is wrong
        """
        state = seen.state
        if state is State.GONE:
            return 'no longer exists in Nova', None
        if state is State.LEAVING and (
                seen.host is None or
                row.status != states.Lease.TERMINATED):
            return None
        if row.status == states.Lease.TERMINATED:
            return f'still exists in Nova ({state.value})', (
                'delete it: it is past its end')
        if state is State.ERROR:
            # A server that ran before keeps its allocation, and so its
            # booking; so does a server that will be sent again. What Nova
            # keeps of a failed one is compared with its host.
            return None if (row.running or row.host_id is None or
                            row.failed_at is not None or
                            row.params is not None or
                            row.dispatched_at is None) else (
                f'is in ERROR in Nova, and its booking holds capacity on host '
                f'{row.host_name}', None)
        if row.status in (*states.SEEKING, states.Lease.PENDING):
            return self._judge_pending(row, seen)
        if state is State.HELD and row.dispatched_at is not None and (
                row.status in states.BEGUN):
            return 'is still RESERVED in Nova', (
                'delete it; its lease ends with it')
        if state is State.BUILDING and seen.host is None:
            return self._judge_unbuilt(row)
        if state is not State.HELD and seen.host not in (None, row.host):
            return ('is on another host than its booking, '
                    f'{row.host_name or "none"}'), None
        if state is State.RUNNING and not row.running and row.host:
            return 'runs, but is not in the reservation database', None
        return None

    def _judge_pending(self, row: ty.Any, seen: cloud_api.ObservedServer,
                       ) -> tuple[str, str | None] | None:
        if seen.state is State.HELD:
            return None
        if seen.state is State.BUILDING and seen.host is None:
            if row.start_date <= self._clock.now():
                return None
            return 'is shown as being built instead of RESERVED', (
                'nothing to do: it is built when its lease starts')
        return 'is built already', (
            'delete it, or let it run: it is deleted when its lease ends')

    def _judge_unbuilt(self, row: ty.Any) -> tuple[str, str | None] | None:
        if row.status not in states.BEGUN or (
                row.dispatched_at is None or
                row.dispatched_at > self._clock.now() - findings.STUCK):
            return None
        return (f'has been building since {findings.when(row.dispatched_at)}, '
                'but no host has started the build'), (
            'blazar-listener sends it again if it was lost; check that it and '
            'nova-conductor run, and read their logs'
            if row.deferred else
            'delete it, and boot a new server' + (
                '' if row.params is not None else '; its lease ends with it'))

    def _orphans(self, nova: bulk_state.BulkState) -> ty.Iterator[Difference]:
        """Yield the servers that wait for a build and have no lease."""
        waiting = self._unleased(nova.waiting)
        hints = request_specs.hints_of(
            one for one in waiting if not nova.waiting[one].reserved)
        for server_id in waiting:
            its = nova.waiting[server_id]
            if not its.reserved and not self._asks(hints.get(server_id, {})):
                continue
            is_what = ('is RESERVED' if its.reserved else
                       'was to be built with a lease')
            yield Difference(
                ('orphan', server_id, its.reserved),
                f'Server {server_id} {is_what}, but no lease has it: '
                f'{_NOBODY}.', '--fix deletes it',
                functools.partial(self._sync.delete_orphan, server_id),
                its.since + ADMISSION)

    def _endless(self, nova: bulk_state.BulkState) -> ty.Iterator[Difference]:
        """Yield the servers that were booted with a lease and no longer have
        one.
        """
        seen = nova.look(self._unleased(
            request_specs.in_cells_asking_for_leases(self._asks)))
        for server_id, one in seen.items():
            if one.state in (State.RUNNING, State.BUILDING, State.ERROR):
                yield Difference(
                    ('endless', server_id),
                    f'Server {server_id} was booted with a lease, but the '
                    'reservation database has no lease of it that has not '
                    'ended: it has no end.',
                    'delete it, or let it run as a server without a lease')

    def _left_behind(self) -> ty.Iterator[Difference]:
        """Yield the servers that were deleted before they were built."""
        for server_id in self._unleased(
                unbuilt_leftovers.left_behind(self._asks, _LEFT)):
            yield Difference(
                ('left behind', server_id),
                f'Server {server_id} was deleted before it was built, but '
                'Nova still has its mapping and its request specification.',
                '--fix removes them',
                functools.partial(unbuilt_leftovers.forget, server_id))

    @staticmethod
    def _unmapped(silent: set[str]) -> ty.Iterator[Difference]:
        """Yield the servers in cells that Nova's API does not find."""
        for one in unmapped_servers.unmapped(silent):
            where = f'on host {one.host}' if one.host else 'on no host'
            yield Difference(
                ('unmapped', one.server_id),
                f'Server {one.server_id} is in cell {one.cell_name}, {where}, '
                'but has no instance mapping: the API answers 404.',
                '--fix maps it to its cell again',
                functools.partial(unmapped_servers.restore, one))

    def _strangers(self, silent: set[str]) -> ty.Iterator[Difference]:
        """Yield the consumers in placement that are no server of any cell."""
        with self._database.reader() as session:
            hosts = {consumer: row.name for row in session.execute(
                sa.select(models.Host.name, models.Host.consumers).where(
                    models.Host.consumers.is_not(None)))
                for consumer, (takes, _told) in row.consumers.items()
                if takes}
        for consumer in sorted(unmapped_servers.strangers(hosts.keys(),
                                                          silent)):
            yield Difference(
                ('stranger', consumer),
                f'Placement has an allocation of consumer {consumer} on host '
                f'{hosts[consumer]}, but no cell has a server or migration '
                'with that ID, unless the server is deleted: Nova may have '
                'lost track of a guest there, or has leaked the allocation.',
                'check the hypervisor for a guest with that ID, and destroy '
                'it; then remove the allocation with "nova-manage placement '
                'audit --delete"')

    def _asks(self, hints: ty.Mapping[str, object]) -> bool:
        """Return whether hints request a lease, at any time."""
        try:
            return hint_params.lease_request(
                hints, self._clock.now(),
                self._defaults) is not None
        except errors.InvalidLeaseParams:
            # Its time has passed; for other errors, the boot was refused.
            return True

    def _unleased(self, server_ids: ty.Iterable[str]) -> list[str]:
        """Return those of some servers that have no booking."""
        unleased: list[str] = []
        for batch in bulk_state.batches(server_ids):
            with self._database.reader() as session:
                leased = set(session.scalars(
                    sa.select(models.Booking.server_id).where(
                        models.Booking.server_id.in_(batch))))
            unleased += [one for one in batch if one not in leased]
        return unleased
